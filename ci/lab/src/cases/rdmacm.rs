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
        pair(
            "uverbs_serves_rping",
            "uverbs cm rping -s -a 10.0.0.2 -S 100 -v",
            "rping -c -a 10.0.0.2 -C 20 -S 100 -V",
        )
        .then("grep -q \"server ping data: rdma-ping-19: \" server")
        .then("grep -q \"20 pings in\" server"),
        pair(
            "uverbs_uses_rping",
            "rping -s -a 10.0.0.2 -S 100",
            "uverbs cm rping -c -a 10.0.0.2 -C 20 -S 100 --json",
        )
        .then("grep -q \"pings.:20,\" client"),
        pair(
            "uverbs_rping_large",
            "uverbs cm rping -s -S 65535",
            "uverbs cm rping -c -a 10.0.0.2 -I 10.0.0.1 -C 20 -S 65535 -v",
        )
        .then("grep -q \"ping data: rdma-ping-19: \" client"),
        Case::new(
            "rdmacm::uverbs_says_what_is_wrong",
            "cd /tmp; says() { \"$@\" >said; cat said; grep -q \"$needle\" said; }\n\
             needle='nobody listens' says uverbs cm rping -c -a 10.0.0.2 -p 9 --json || fail 'not heard'\n\
             needle='exit_status.:4' says uverbs cm rping -c -a 10.0.0.2 -p 9 --json || fail 'status'\n\
             needle='ip address' says uverbs cm rping -s -a 192.0.2.1 --json || fail 'foreign'",
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
