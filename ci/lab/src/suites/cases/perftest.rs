//! perftest: latency and bandwidth of every operation, in the forms that use the device in
//! different ways.

use super::case::Case;

const OPERATIONS: [&str; 4] = ["send", "write", "read", "atomic"];

fn pair(name: String, program: &str, options: &str, host: &str, ready: &str) -> Case {
    let common = format!("{program} -F -x 3 {options}");
    Case::pair(
        format!("perftest::{name}"),
        ready,
        &format!("{common} -d mlx5_1"),
        &format!("{common} -d mlx5_0 {host}"),
    )
}

/// Addresses exchanged over a socket.
fn plain(name: &str, program: &str, options: &str) -> Case {
    pair(name.to_owned(), program, options, "127.0.0.1", "tcp 18515")
}

/// Connected by the connection manager.
fn managed(name: &str, program: &str, options: &str) -> Case {
    pair(name.to_owned(), program, &format!("-R {options}"), "10.0.0.2", "cm")
}

/// All of them.
pub(crate) fn programs() -> Vec<Case> {
    let mut cases = Vec::new();
    for operation in OPERATIONS {
        // Atomics are of eight bytes and take no size.
        let size = if operation == "atomic" { "" } else { "-s 4096" };
        for what in ["lat", "bw"] {
            let program = format!("ib_{operation}_{what}");
            cases.push(plain(&program, &program, &format!("-n 1000 {size}")));
            cases.push(managed(&format!("{program}_cm"), &program, &format!("-n 500 {size}")));
        }
        let bandwidth = format!("ib_{operation}_bw");
        let name = format!("{bandwidth}_qps");
        cases.push(plain(&name, &bandwidth, &format!("-n 500 -q 4 {size}")));
    }
    cases.extend([
        plain("ib_send_lat_inline", "ib_send_lat", "-n 1000 -s 64 -I 64"),
        plain("ib_write_lat_inline", "ib_write_lat", "-n 1000 -s 64 -I 64"),
        plain("ib_write_bw_inline", "ib_write_bw", "-n 1000 -s 64 -I 64"),
        plain("ib_send_bw_events", "ib_send_bw", "-n 500 -s 4096 -e"),
        plain("ib_send_lat_events", "ib_send_lat", "-n 500 -s 64 -e"),
        managed("ib_send_lat_events_cm", "ib_send_lat", "-n 200 -s 64 -e"),
        plain("ib_send_bw_both_ways", "ib_send_bw", "-n 500 -s 4096 -b"),
        plain("ib_write_bw_both_ways", "ib_write_bw", "-n 500 -s 4096 -b -q 2"),
        plain("ib_send_bw_lists", "ib_send_bw", "-n 512 -s 1024 -l 16"),
        plain("ib_write_bw_old_posting", "ib_write_bw", "-n 500 -s 4096 --use_old_post_send"),
        plain("ib_send_bw_uc", "ib_send_bw", "-n 500 -s 4096 -c UC"),
        plain("ib_send_lat_ud", "ib_send_lat", "-n 500 -s 1024 -c UD"),
        plain("ib_send_bw_xrc", "ib_send_bw", "-n 500 -s 1024 -c XRC"),
        plain("ib_write_bw_uc", "ib_write_bw", "-n 500 -s 4096 -c UC"),
        plain("ib_send_bw_srq", "ib_send_bw", "-n 500 -s 1024 -q 4 --use-srq"),
        plain("ib_atomic_bw_swap", "ib_atomic_bw", "-n 500 -A CMP_AND_SWAP"),
        // Sixteen megabytes, more than the user may pin.
        Case { root: true, ..plain("ib_write_bw_sizes", "ib_write_bw", "-n 20 -a") },
    ]);
    cases
}
