//! Programs under the filter of system calls that `docs/DEPLOYMENT.md` offers.
//!
//! `uverbs-device-tests --confined` installs it. A call that the profile lacks kills the program, and so the case.

use super::case::Case;

/// The cases, between two devices that reach each other.
pub(crate) fn cases(one: &str, other: &str) -> Vec<Case> {
    let under = |command: &str| format!("uverbs-device-tests --confined {command}");
    let alone = |name: &str, command: &str| {
        let script = format!(
            "cd /tmp; export UVERBS_TEST_DEVICE={one} UVERBS_TEST_SECOND_DEVICE={other}\n\
             timeout 100 {}; status=$?\n\
             [ $status = 0 ] || fail \"it ended with $status\"",
            under(command)
        );
        Case::new(format!("confined::{name}"), script)
    };
    vec![
        // SIGSYS: the filter is there.
        Case::new(
            "confined::other_calls",
            format!(
                "cd /tmp; {}; status=$?\n\
                 [ $status = 159 ] || fail \"not ended by SIGSYS: $status\"\n\
                 [ ! -e confined ] || fail 'it made a directory'",
                under("mkdir confined")
            ),
        ),
        alone("devinfo", &format!("uverbs devinfo -v {one}")),
        alone("doctor", &format!("uverbs doctor -v {one}")),
        Case::pair(
            "confined::pingpong",
            "tcp 18515",
            &under(&format!("uverbs pingpong rc -n 50 -c -e -d {other}")),
            &under(&format!("uverbs pingpong rc -n 50 -c -e -d {one} 127.0.0.1")),
        ),
        Case::pair(
            "confined::rping",
            "cm",
            &under("uverbs cm rping -s -a 10.0.0.2"),
            &under("uverbs cm rping -c -a 10.0.0.2 -I 10.0.0.1 -C 5"),
        ),
        // tokio, with threads.
        alone("futures", "uverbs-device-tests --test-threads 1 async::echo"),
        alone("connections", "uverbs-device-tests --test-threads 1 cm::futures"),
    ]
}
