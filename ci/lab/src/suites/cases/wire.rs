//! Linux's soft-RoCE judges the transport in a process: `UVERBS_SIM=udp:ADDRESS` at one end of a virtual cable, in a
//! network namespace of its own, and a device of the kernel's at the other.
//!
//! The kernel's device stays in the first namespace, because before 7.x it works in no other.

use super::case::Case;

/// Makes the cable, the namespace `away` with our end (10.1.0.2), and `rxe2` at the other (10.1.0.1), unless an earlier
/// case did. In the middle of the cable, in the namespace `between`, is a switch. `there` runs a command in `away`,
/// `tcp_there` is [`tcp`](super::case::PRELUDE) of it, `weather PACKETS NETEM...` makes both ports of the switch lose,
/// repeat or reorder packets until soft-RoCE has sent so many. On its own interface they would do it in the sight of
/// soft-RoCE: it takes a packet that netem drops there for one that it could not send, and its queue pair fails.
const CABLE: &str = r#"
ip=/usr/bin/ip gids=/sys/class/infiniband/rxe2/ports/1/gids
$ip netns list | grep -q "^away" || {
    $ip netns add away &&
    $ip netns add between &&
    $ip -n between link add switch type bridge &&
    $ip -n between link set switch up mtu 4200 &&
    $ip link add w0 mtu 4200 type veth peer name b0 mtu 4200 netns between &&
    $ip link add w1 mtu 4200 netns away type veth peer name b1 mtu 4200 netns between &&
    $ip -n between link set b0 master switch up &&
    $ip -n between link set b1 master switch up &&
    $ip -n away link set lo up &&
    $ip -n away address add 10.1.0.2/24 dev w1 &&
    $ip -n away link set w1 up &&
    $ip address add 10.1.0.1/24 dev w0 &&
    $ip link set w0 up &&
    /usr/bin/rdma link add rxe2 type rxe netdev w0
} || fail "no cable"
until_true "grep -q 0a01:0001 $gids/*" || exit 1
gid=$(basename $(grep -l 0a01:0001 $gids/* | head -n 1))
there="$ip netns exec away" tc="$ip netns exec between /usr/sbin/tc"
sim="$there env UVERBS_SIM=udp:10.1.0.2"
tcp_there() { $there grep -qE ":$(printf %04X $1) [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6; }
sent() { $tc -s qdisc show dev b1 | sed -n 's/.* bytes \([0-9]*\) pkt.*/\1/p'; }
clean() { $tc qdisc del dev b0 root; $tc qdisc del dev b1 root; }
weather() {
    packets=$1 ended=$(mktemp -u); shift
    $tc qdisc replace dev b0 root netem "$@" && $tc qdisc replace dev b1 root netem "$@" || fail "no netem"
    trap 'kill $weather; [ -e $ended ] || clean' EXIT
    { until [ $(sent) -ge $packets ]; do usleep 50000; done; clean; touch $ended; } & weather=$!
}
weather_ended() { wait $weather; [ -e $ended ] || fail "the weather did not end"; }
"#;

fn case(name: &str, script: &str) -> Case {
    Case::as_root(format!("ours::{name}"), format!("{CABLE}\n{script}"))
}

/// The commands of a ping-pong: rdma-core's, and ours, which compares the data.
fn commands(kind: &str, options: &str) -> [String; 2] {
    [
        format!("ibv_{kind}_pingpong -d rxe2 -g $gid -c {options}"),
        format!("$sim uverbs pingpong {kind} -c {options}"),
    ]
}

/// A ping-pong in both roles.
fn pingpong(kind: &str, name: &str, options: &str) -> Case {
    let [theirs, ours] = commands(kind, options);
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

/// Connections by address, with Linux's connection manager at the other end. A device in a process listens where
/// nobody sees it, so that a client is run again while it is refused.
fn connections() -> Vec<Case> {
    let both = |name: &str, serves: &str, asks: &str, ends: &str| {
        let again = "again() { for turn in $(seq 40); do \"$@\" >said 2>&1 && break; grep -qiE 'reject|unreachable' said || \
                     break; usleep 250000; done; cat said; }";
        case(
            &format!("cm::{name}"),
            &format!(
                "cd $(mktemp -d) || exit 1\n{again}\n\
                 (pair cm '{name} {serves} 10.1.0.1' \"$sim uverbs cm {name} {asks} 10.1.0.1\") || fail 'theirs serves'\n\
                 timeout 100 $sim uverbs cm {name} {serves} 10.1.0.2 >server 2>&1 & server=$!\n\
                 again timeout 90 {name} {asks} 10.1.0.2 >client 2>&1; cat client\n\
                 wait $server || fail \"the server ended with $?: $(cat server)\"\n\
                 {ends}"
            ),
        )
    };
    let mut cases = vec![
        both("rping", "-s -C 20 -a", "-c -C 20 -a", "grep -q 'client DISCONNECT EVENT' client"),
        both("ucmatose", "-c 3 -C 5 -b", "-c 3 -C 5 -s", "grep -q 'return status 0' client"),
        both("udaddy", "-c 3 -C 5 -b", "-c 3 -C 5 -s", "grep -q 'return status 0' client"),
    ];
    cases.push(case(
        "cm::nobody_listens",
        "$sim uverbs cm rping -c -a 10.1.0.1 -p 9 2>&1 | grep -q 'nobody listens' || fail 'not heard from theirs'\n\
         timeout 100 $sim uverbs cm rping -s -a 10.1.0.2 -p 9 & server=$!\n\
         until_true \"$there grep -q ':12B7 ' /proc/net/udp\" || exit 1\n\
         rping -c -a 10.1.0.2 -p 10 2>&1 | grep -q 'REJECTED, error 8' || fail 'not heard from ours'\n\
         kill $server",
    ));
    cases
}

/// Parameters of `tc netem`, and how many packets soft-RoCE sends under them: it waits for a timeout of 67 ms whenever
/// packets change places, as it does with soft-RoCE at the other end.
const WEATHER: [(&str, &str, u32); 4] = [
    ("loss", "loss 3%", 500),
    ("duplicates", "duplicate 10%", 500),
    ("reordering", "delay 1ms reorder 75%", 200),
    ("all", "delay 1ms reorder 90% loss 1% duplicate 2% corrupt 1%", 200),
];

/// `play ASKS READY SERVER CLIENT` runs a ping-pong under weather, of which ours is the client if ASKS is 1. Of two
/// soft-RoCE devices one in seven such ping-pongs stops for good (docs/KERNEL-NOTES.md), so that one is repeated in which
/// all that ours has sent was acknowledged, and soft-RoCE sends nothing.
const PLAY: &str = r#"
once() {
    $3 >server 2>&1 & server=$!
    until_true "$2" || exit 1
    $4 >client 2>&1 & client=$!
    if [ $1 = 1 ]; then ours=$client theirs=$server said=client; else ours=$server theirs=$client said=server; fi
    wait $ours; ours=$?
    [ $ours = 0 ] || kill $theirs
    wait $theirs; theirs=$?
    echo "$3"; cat server; echo "$4"; cat client
}
play() {
    cd $(mktemp -d) || exit 1
    for turn in 1 2 3 4; do
        once "$@"
        [ $ours = 0 ] && [ $theirs = 0 ] && return
        set -- "$@" $(sed -n 's/.*no progress.* with \([0-9]*\) sent and \([0-9]*\) received.*/\1 \2/p' $said)
        [ $# = 6 ] && [ $5 = $(($6 + $1)) ] || fail "ours ended with $ours, theirs with $theirs"
        echo "soft-RoCE has stopped"
        set -- "$1" "$2" "$3" "$4"
    done
    fail "soft-RoCE stops each time"
}
"#;

/// Ping-pongs of several packets a message over a cable that loses, doubles or reorders them. The weather ends before
/// the ping-pong does: a program that has all its completions leaves, and if its last ACK were lost, nobody would be
/// there to repeat it, and the other program could only fail.
fn weather() -> Vec<Case> {
    let [theirs, ours] = commands("rc", "-m 1024 -s 8192 -n 150");
    let roles = [
        format!("play 1 'tcp 18515' \"timeout 100 {theirs}\" \"{ours} 10.1.0.1\""),
        format!("play 0 'tcp_there 18515' \"{ours}\" \"timeout 100 {theirs} 10.1.0.2\""),
    ];
    let case = |&(name, netem, packets)| {
        let script: Vec<String> = roles
            .iter()
            .map(|play| format!("weather {packets} {netem}\n{play}\nweather_ended"))
            .collect();
        self::case(&format!("rc_pingpong::{name}"), &format!("{PLAY}\n{}", script.join("\n")))
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
    cases.extend(connections());
    cases.extend(weather());
    cases.extend(["a", "b"].iter().flat_map(|side| PARTS.map(|part| suite(side, part))));
    cases
}
