//! rdma-core's programs that connect through the connection manager.

use super::case::Case;

/// Ready when the server listens.
const LISTENS: &str = "cm";

/// All of them, from the first device to the second, except udpong: its server never ends, and its
/// client finds no route to another address of its own machine.
pub(crate) fn programs() -> Vec<Case> {
    let pair = |name: &str, server: &str, client: &str| {
        Case::pair(format!("rdmacm::{name}"), LISTENS, server, client)
    };
    vec![
        pair("rping", "rping -s -a 10.0.0.2 -C 100 -V", "rping -c -a 10.0.0.2 -C 100 -V"),
        pair(
            "rping_large",
            "rping -s -a 10.0.0.2 -C 20 -S 65000 -V",
            "rping -c -a 10.0.0.2 -C 20 -S 65000 -V",
        ),
        pair(
            "rping_own_qp",
            "rping -s -a 10.0.0.2 -C 10 -V -q",
            "rping -c -a 10.0.0.2 -C 10 -V -q",
        ),
        pair("udaddy", "udaddy -b 10.0.0.2", "udaddy -s 10.0.0.2")
            .then("grep -q \"return status 0\" client"),
        pair("ucmatose", "ucmatose -b 10.0.0.2", "ucmatose -s 10.0.0.2")
            .then("grep -q \"return status 0\" client"),
        pair("rdma_server", "rdma_server", "rdma_client -s 10.0.0.2"),
        pair("rdma_xserver", "rdma_xserver -c x", "rdma_xclient -c x -s 10.0.0.2"),
        // It invents queue pair numbers: on one machine each side needs its own.
        pair("cmtime", "cmtime -b 10.0.0.2 -c 10 -q 20000", "cmtime -s 10.0.0.2 -c 10 -q 40000"),
        pair("rstream", "rstream -b 10.0.0.2 -C 100 -S 4096", "rstream -s 10.0.0.2 -C 100 -S 4096"),
    ]
}
