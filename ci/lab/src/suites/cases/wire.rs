//! Linux's soft-RoCE judges the transport in a process: `UVERBS_SIM=udp:ADDRESS` at one end of a virtual cable, in a
//! network namespace of its own, and a device of the kernel's at the other.
//!
//! The kernel's device stays in the first namespace, because before 7.x it works in no other.

use super::case::Case;

/// Makes the cable, the namespace `away` with our end (10.1.0.2, fd00::2), and `rxe2` at the other (10.1.0.1, fd00::1),
/// unless an earlier case did. A switch in the namespace `between` joins them. `there` runs a command in `away`, and `tcp_there` is
/// [`tcp`](super::case::PRELUDE) of that namespace. `impair PACKETS NETEM...` makes both ports of the switch lose, repeat
/// or reorder packets until soft-RoCE has sent so many. On soft-RoCE's own interface a packet that netem drops would be an
/// error of sending. Our trains are cut before they come to the switch, which would lose or repeat them whole; with
/// `trains=whole` it does.
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
    $ip -n away address add fd00::2/64 dev w1 nodad &&
    $ip -n away link set w1 up &&
    $ip address add 10.1.0.1/24 dev w0 &&
    $ip address add fd00::1/64 dev w0 nodad &&
    $ip link set w0 up &&
    /usr/bin/rdma link add rxe2 type rxe netdev w0
} || fail "no cable"
until_true "grep -q 0a01:0001 $gids/*" || exit 1
gid=$(basename $(grep -l 0a01:0001 $gids/* | head -n 1))
there="$ip netns exec away" tc="$ip netns exec between /usr/sbin/tc"
sim="$there env UVERBS_SIM=udp:10.1.0.2" sim6="$there env UVERBS_SIM=udp:fd00::2"
tcp_there() { $there grep -qE ":$(printf %04X $1) [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6; }
sent() { $tc -s qdisc show dev b1 | sed -n 's/.* bytes \([0-9]*\) pkt.*/\1/p'; }
cut_trains() { $ip -n away link set w1 gso_max_segs $1; }
unimpair() {
    [ -e $unimpaired ] || { $tc qdisc del dev b0 root; $tc qdisc del dev b1 root; cut_trains 65535; touch $unimpaired; }
}
impair() {
    packets=$1 unimpaired=$(mktemp -u); shift
    trap 'kill $counter $server $client; unimpair' EXIT
    [ "$trains" = whole ] || cut_trains 1 || fail "trains are not cut"
    $tc qdisc replace dev b0 root netem "$@" && $tc qdisc replace dev b1 root netem "$@" || fail "no netem"
    { for turn in $(seq 1000); do [ "$(sent)" -ge $packets ] && break; usleep 50000; done; unimpair; } & counter=$!
}
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
    for (kind, options) in [("rc", "-m 1024 -s 65536 -n 50 -e"), ("ud", "-n 50")] {
        cases.push(over_ipv6(kind, options));
    }
    cases
}

/// A ping-pong in both roles over IPv6, where soft-RoCE sends no UDP checksum.
fn over_ipv6(kind: &str, options: &str) -> Case {
    let [theirs, ours] = commands(kind, options);
    let (theirs, ours) = (theirs.replace("$gid", "$gid6"), ours.replace("$sim", "$sim6"));
    case(
        &format!("{kind}_pingpong::ipv6"),
        &format!(
            "until_true \"grep -q fd00:.*:0001 $gids/*\" || exit 1\n\
             gid6=$(basename $(grep -l fd00:.*:0001 $gids/* | head -n 1))\n\
             (pair 'tcp 18515' \"{theirs}\" \"{ours} 10.1.0.1\") || fail 'theirs serves'\n\
             (pair 'tcp_there 18515' \"{ours}\" \"{theirs} 10.1.0.2\") || fail 'ours serves'"
        ),
    )
}

/// A client that is refused is run again, beside another server: a device in a process listens where nobody sees it, and a
/// server that has accepted some of a client's connections waits for their messages.
const AGAIN: &str = r#"
again() {
    for turn in $(seq 12); do
        serve
        usleep $((turn * 250000))
        "$@" >said 2>&1; status=$?
        grep -qiE 'reject|unreachable' said || break
        kill $server; wait $server
    done
    cat said
    return $status
}
cd $(mktemp -d) || exit 1
trap 'kill $server; wait $server' EXIT
"#;

/// Connections by address, with Linux's connection manager at the other end: rdma-core's program serves ours, and ours
/// serves rdma-core's, which prints `end`.
fn connections() -> Vec<Case> {
    let both = |name: &str, theirs: [&str; 2], ours: [&str; 2], end: &str| {
        let ([they_serve, they_ask], [we_serve, we_ask]) = (theirs, ours);
        let (there, here, sim) = match name.ends_with("ipv6") {
            true => ("fd00::1", "fd00::2", "sim6"),
            false => ("10.1.0.1", "10.1.0.2", "sim"),
        };
        case(
            &format!("cm::{name}"),
            &format!(
                "{AGAIN}\n\
                 (pair cm '{they_serve} {there}' \"${sim} uverbs cm {we_ask} {there}\") || fail 'theirs serves'\n\
                 serve() {{ timeout 60 ${sim} uverbs cm {we_serve} {here} >server 2>&1 & server=$!; }}\n\
                 again timeout 20 {they_ask} {here} >client 2>&1; client=$?; cat client\n\
                 [ $client = 0 ] || fail \"the client ended with $client, the server said: $(cat server)\"\n\
                 wait $server || fail \"the server ended with $?: $(cat server)\"\n\
                 grep -q '{end}' client || fail 'the client did not come to its end'"
            ),
        )
    };
    let mut cases = vec![
        both(
            "rping",
            ["rping -s -C 20 -V -a", "rping -c -C 20 -V -v -a"],
            ["rping -s -a", "rping -c -C 20 -a"],
            "rdma-ping-19",
        ),
        both(
            "rping_ipv6",
            ["rping -s -C 20 -V -a", "rping -c -C 20 -V -v -a"],
            ["rping -s -a", "rping -c -C 20 -a"],
            "rdma-ping-19",
        ),
        both(
            "ucmatose",
            ["ucmatose -c 3 -C 5 -b", "ucmatose -c 3 -C 5 -s"],
            ["ucmatose -c 3 -C 5 -b", "ucmatose -c 3 -C 5 -s"],
            "return status 0",
        ),
        both(
            "udaddy",
            ["udaddy -c 3 -C 5 -b", "udaddy -c 3 -C 5 -s"],
            ["udaddy -c 3 -C 5 -b", "udaddy -c 3 -C 5 -s"],
            "return status 0",
        ),
    ];
    cases.push(case(
        "cm::nobody_listens",
        &format!(
            "{AGAIN}\n\
             timeout 60 $sim uverbs cm rping -c -a 10.1.0.1 -p 9 2>&1 | grep -q 'nobody listens' || fail 'by theirs'\n\
             timeout 60 $sim uverbs cm rping -s -a 10.1.0.2 -p 9 & server=$!\n\
             until_true \"$there grep -q ':12B7 ' /proc/net/udp\" || exit 1\n\
             timeout 60 rping -c -a 10.1.0.2 -p 10 2>&1 | grep -q 'REJECTED, error 8' || fail 'by ours'"
        ),
    ));
    cases
}

/// A multicast group, in which rdma-core's program and ours are. soft-RoCE takes packets for the MAC of a group, and
/// the kernel's connection manager joins it by IGMP; a device in a process joins it by a socket.
fn multicast() -> Vec<Case> {
    const JOINED: &str = "grep -qi 0407ffef /proc/net/igmp";
    let send = "uverbs cm mckey -m 239.255.7.4 -s -b 10.1.0.2";
    vec![
        case(
            "mckey::sends_to_theirs",
            &format!(
                "pair '{JOINED}' 'mckey -m 239.255.7.4 -b 10.1.0.1' \"$sim {send}\"\n\
                 grep -q 'return status 0' server || fail 'it did not receive'"
            ),
        ),
        // A sender of rdma-core's leaves before soft-RoCE has sent all: it is repeated until a message has come.
        case(
            "mckey::receives_from_theirs",
            &format!(
                "cat >/tmp/sender <<'end'\n\
                 for _ in 1 2 3 4 5 6; do\n\
                 mckey -m 239.255.7.4 -s -b 10.1.0.1 -C 1000 || exit\n\
                 grep -q role server && exit\n\
                 done\n\
                 end\n\
                 pair \"$there {JOINED}\" \"$sim uverbs cm mckey -m 239.255.7.4 -b 10.1.0.2 -C 1 --json\" \
                 'sh /tmp/sender'\n\
                 grep -q 'role.:.receiver.*messages.:1,.size.:100,' server || fail 'nothing came'"
            ),
        ),
    ]
}

/// Parameters of `tc netem`, and how many packets soft-RoCE sends under them: it waits for a timeout of 67 ms whenever
/// packets change places, as it does with soft-RoCE at the other end.
const IMPAIRMENTS: [(&str, &str, u32); 5] = [
    ("loss", "loss 3%", 500),
    ("loss_of_trains", "loss 3%", 500),
    ("duplicates", "duplicate 10%", 500),
    ("reordering", "delay 1ms reorder 75%", 200),
    ("all", "delay 1ms reorder 90% loss 1% duplicate 2% corrupt 1%", 200),
];

/// `play OURS_IS_CLIENT READY SERVER CLIENT` runs a ping-pong while `$netem` impairs the switch. One in seven such
/// ping-pongs between two soft-RoCE devices stops for good (docs/KERNEL-NOTES.md). So it is repeated if soft-RoCE sends
/// nothing more, its program waits, and ours has its last message acknowledged.
const PLAY: &str = r#"
sent_by_rxe() { cat /sys/class/infiniband/rxe2/ports/1/hw_counters/sent_pkts; }
once() {
    impair $netem
    $3 >server 2>&1 & server=$!
    until_true "$2" || exit 1
    $4 >client 2>&1 & client=$!
    if [ $1 = 1 ]; then ours=$client theirs=$server said=client; else ours=$server theirs=$client said=server; fi
    wait $ours; ours_ended=$? silent=no
    if [ $ours_ended != 0 ]; then
        before=$(sent_by_rxe); sleep 1
        [ $(sent_by_rxe) = $before ] && silent=yes
        kill $theirs
    fi
    wait $theirs; theirs_ended=$?
    echo "$3"; cat server; echo "$4"; cat client
}
play() {
    cd $(mktemp -d) || exit 1
    for turn in 1 2 3 4; do
        once "$@"
        if [ $ours_ended = 0 ] && [ $theirs_ended = 0 ]; then
            [ -e $unimpaired ] || fail "the last ACKs may have been lost"
            return
        fi
        ahead=$(sed -n 's/.*no progress.* with \([0-9]*\) sent and \([0-9]*\) received.*/\1 - \2/p' $said)
        [ $silent = yes ] && [ $theirs_ended = 143 ] && [ -n "$ahead" ] && [ $(($ahead)) = $1 ] ||
            fail "ours ended with $ours_ended, theirs with $theirs_ended"
        echo "soft-RoCE has stopped"
        kill $counter; unimpair
    done
    fail "soft-RoCE stops each time"
}
"#;

/// Ping-pongs of several packets a message over a cable that loses, doubles or reorders them. That ends before the
/// ping-pong does: a program that has all its completions leaves, and if its last ACK were lost, nobody would be there
/// to repeat it, and the other program could only fail.
fn impaired() -> Vec<Case> {
    let [theirs, ours] = commands("rc", "-m 1024 -s 8192 -n 150");
    let (theirs, ours) = (format!("timeout 60 {theirs}"), format!("timeout 60 {ours}"));
    let case = |&(name, netem, packets)| {
        let trains = if name == "loss_of_trains" { "whole" } else { "cut" };
        self::case(
            &format!("rc_pingpong::{name}"),
            &format!(
                "{PLAY}\ntrains={trains} netem='{packets} {netem}'\n\
                 play 1 'tcp 18515' \"{theirs}\" \"{ours} 10.1.0.1\"\n\
                 play 0 'tcp_there 18515' \"{ours}\" \"{theirs} 10.1.0.2\""
            ),
        )
    };
    IMPAIRMENTS.iter().map(case).collect()
}

/// Parts of the device suite, with our device as one side of each pair and soft-RoCE as the other.
const PARTS: [&str; 8] =
    ["rc::", "uc::", "ud::", "srq::", "atomics::", "errors::", "mw::", "unsignaled::"];

/// Tests among them of what only one of the two devices has: masks, regions without memory, atomic writes, flushes,
/// SQD, and doorbells by `write(2)`; and of XRC, whose names end like those of RC. A test that attaches a queue pair
/// to a group has no host join it, which soft-RoCE's needs: `mckey` has `rdma_cm` do that.
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
    cases.extend(multicast());
    cases.extend(impaired());
    cases.extend(["a", "b"].iter().flat_map(|side| PARTS.map(|part| suite(side, part))));
    cases
}
