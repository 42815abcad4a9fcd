//! Linux's soft-RoCE judges the transport in a process: `UVERBS_SIM=udp:ADDRESS` at one end of a virtual cable, in a
//! network namespace of its own, and a device of the kernel's at the other.
//!
//! The kernel's device stays in the first namespace, because before 7.x it works in no other.

use super::case::Case;

/// Makes the cable, the namespace `away` with our end (10.1.0.2), and `rxe2` at the other (10.1.0.1), unless an earlier
/// case did. `there` runs a command in the namespace, `tcp_there` is [`tcp`](super::case::PRELUDE) of it, `shape` makes
/// both ends lose, repeat or reorder packets.
const CABLE: &str = r#"
ip=/usr/bin/ip gids=/sys/class/infiniband/rxe2/ports/1/gids
$ip netns list | grep -q "^away" || {
    $ip netns add away &&
    $ip link add w0 mtu 4200 type veth peer name w1 mtu 4200 &&
    $ip link set w1 netns away &&
    $ip -n away link set lo up &&
    $ip -n away address add 10.1.0.2/24 dev w1 &&
    $ip -n away link set w1 up &&
    $ip address add 10.1.0.1/24 dev w0 &&
    $ip link set w0 up &&
    /usr/bin/rdma link add rxe2 type rxe netdev w0
} || fail "no cable"
until_true "grep -q 0a01:0001 $gids/*" || exit 1
gid=$(basename $(grep -l 0a01:0001 $gids/* | head -n 1))
there="$ip netns exec away"
sim="$there env UVERBS_SIM=udp:10.1.0.2"
tcp_there() { $there grep -qE ":$(printf %04X $1) [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6; }
shape() {
    /usr/sbin/tc qdisc replace dev w0 root netem "$@" && $there /usr/sbin/tc qdisc replace dev w1 root netem "$@"
}
clean() { /usr/sbin/tc qdisc del dev w0 root; $there /usr/sbin/tc qdisc del dev w1 root; }
"#;

fn case(name: &str, script: &str) -> Case {
    Case::as_root(format!("ours::{name}"), format!("{CABLE}\n{script}"))
}

/// A ping-pong of rdma-core's and one of ours, in both roles. The data is compared.
fn pingpong(kind: &str, name: &str, options: &str) -> Case {
    let theirs = format!("ibv_{kind}_pingpong -d rxe2 -g $gid -c {options}");
    let ours = format!("$sim uverbs pingpong {kind} -c {options}");
    case(
        &format!("{kind}_pingpong::{name}"),
        &format!(
            "(pair 'tcp 18515' \"{theirs}\" \"{ours} 10.1.0.1\") || fail 'theirs serves'\n\
             (pair 'tcp_there 18515' \"{ours}\" \"{theirs} 10.1.0.2\") || fail 'ours serves'"
        ),
    )
}

/// Ping-pongs over a cable that loses nothing.
fn pingpongs() -> Vec<Case> {
    let rc = [
        ("2_bytes", "-m 1024 -s 2 -n 50"),
        ("2_bytes_events", "-m 4096 -s 2 -n 50 -e"),
        ("4_kib", "-m 4096 -s 4096 -n 50"),
        ("4_kib_events", "-m 1024 -s 4096 -n 50 -e"),
        ("1_mib", "-m 1024 -s 1048576 -n 5"),
        ("1_mib_events", "-m 4096 -s 1048576 -n 5 -e"),
    ];
    let mut cases: Vec<Case> =
        rc.iter().map(|(name, options)| pingpong("rc", name, options)).collect();
    for kind in ["uc", "ud", "srq"] {
        cases.push(pingpong(kind, "polling", "-n 50"));
        cases.push(pingpong(kind, "events", "-n 50 -e"));
    }
    cases
}

/// Parameters of `tc netem`, and the messages of a ping-pong under it: soft-RoCE waits for a timeout of 67
/// ms whenever packets change places, as it does with soft-RoCE at the other end.
const WEATHER: [(&str, &str, u32); 4] = [
    ("loss", "loss 3%", 50),
    ("duplicates", "duplicate 10%", 50),
    ("reordering", "delay 1ms reorder 75%", 20),
    ("all", "delay 1ms reorder 90% loss 1% duplicate 2% corrupt 1%", 20),
];

/// Ping-pongs of several packets a message over a cable that loses, doubles or reorders them.
fn weather() -> Vec<Case> {
    let case = |&(name, netem, iterations)| {
        let calm = pingpong("rc", name, &format!("-m 1024 -s 8192 -n {iterations}"));
        let script = calm.script.strip_prefix(CABLE).unwrap_or(&calm.script);
        self::case(
            &format!("rc_pingpong::{name}"),
            &format!("trap clean EXIT\nshape {netem} || fail 'no netem'\n{script}"),
        )
    };
    WEATHER.iter().map(case).collect()
}

/// Parts of the device suite, with our device as one side of each pair and soft-RoCE as the other.
const PARTS: [&str; 8] =
    ["rc::", "uc::", "ud::", "srq::", "atomics::", "errors::", "mw::", "unsignaled::"];

/// Tests among them of what only one of the two devices has: masks, regions without memory, atomic writes, flushes,
/// SQD, and doorbells by `write(2)`; and of XRC, whose names end like those of RC. A device over UDP is in no multicast
/// group.
const NOT_OF_BOTH: &str = "--skip masked --skip atomic_write --skip null_region --skip flush_of --skip multicast_ \
                           --skip dropped_address_handle --skip after_a_change_of_credentials --skip xrc::";

/// Runs one of them. The suite's expectations are those of soft-RoCE at both ends.
fn suite(side: &str, part: &str) -> Case {
    case(
        &format!("suite::side_{side}::{}", part.trim_end_matches(':')),
        &format!(
            "directory=$(mktemp -d) && cd $directory || exit 1\n\
             export UVERBS_TEST_DEVICE=rxe2 UVERBS_TEST_WIRE={side}:10.1.0.2@/run/netns/away\n\
             timeout 200 uverbs-device-tests --test-threads 1 {NOT_OF_BOTH} {part} >said 2>&1; status=$?; cat said\n\
             [ $status = 0 ] || fail \"status $status\"\n\
             grep -q ' [1-9][0-9]* passed; ' said || fail 'no test passed'"
        ),
    )
}

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = pingpongs();
    cases.extend(weather());
    cases.extend(["a", "b"].iter().flat_map(|side| PARTS.map(|part| suite(side, part))));
    cases
}
