//! Suite `udp`: devices in two processes, over UDP, beside soft-RoCE's two devices with rdma-core's ping-pong. Either
//! pair has a virtual cable of its own.

use super::BenchArguments;
use super::pingpong::{PingPongOperation, Program, yielding};
use super::rxe::{Contest, measure};
use super::score::Score;
use crate::workspace::Profile;
use anyhow::Result;

/// Makes the cable and the namespace with its far end, unless an earlier run did. The port is not that of RoCE, which
/// soft-RoCE's socket has.
const CABLE: &str = r#"
ip=/usr/bin/ip
$ip netns list | grep -q "^away" || {
    $ip netns add away &&
    $ip link add w0 type veth peer name w1 &&
    $ip link set w1 netns away &&
    $ip -n away address add 10.1.0.2/24 dev w1 &&
    $ip -n away link set w1 up &&
    $ip address add 10.1.0.1/24 dev w0 &&
    $ip link set w0 up
} || exit 1
"#;

/// Latency with one message under way, and the rate with 16.
fn operations() -> impl Iterator<Item = PingPongOperation> {
    let latency = [2, 4096, 65536].map(|size| ("rc", 1, size));
    latency.into_iter().chain([("srq", 16, 65536)]).map(|(kind, queue_pairs, size)| {
        PingPongOperation { kind, queue_pairs, size, events: true, blocking: false }
    })
}

/// Measures them.
pub(super) fn run(arguments: &BenchArguments) -> Result<Score> {
    measure(arguments, operations().map(Contest::PingPong), Program::Udp, |workspace| {
        let program = workspace.static_program("uverbs-cli", "uverbs", Profile::Release)?;
        Ok(vec![("uverbs".to_owned(), program)])
    })
}

/// Runs both sides, as root, who enters the namespace.
pub(super) fn pair(side: &str, counted: bool) -> Vec<String> {
    let counter = if counted { "lab-count " } else { "" };
    let at = |address| format!("env UVERBS_SIM=udp:{address}:14791 {counter}{side}");
    let client = format!("$ip netns exec away {} 10.1.0.1", at("10.1.0.2"));
    let mut command = yielding(&at("10.1.0.1"), &client);
    command[2].insert_str(0, CABLE);
    command
}
