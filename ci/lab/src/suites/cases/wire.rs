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
    let mut cases = Vec::new();
    for mtu in [1024, 4096] {
        for size in [2, 4096, 1 << 20] {
            let iterations = if size > 4096 { 20 } else { 200 };
            let options = format!("-m {mtu} -s {size} -n {iterations}");
            let name = |way| format!("{size}_bytes_in_{mtu}_{way}");
            cases.push(pingpong("rc", &name("polling"), &options));
            cases.push(pingpong("rc", &name("events"), &format!("{options} -e")));
        }
    }
    for kind in ["uc", "ud", "srq"] {
        cases.push(pingpong(kind, "polling", "-n 200"));
        cases.push(pingpong(kind, "events", "-n 200 -e"));
    }
    cases
}

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    pingpongs()
}
