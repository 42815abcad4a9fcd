//! This project's own programs on variants of the device that the suite does not run on: InfiniBand
//! ports, and no write combining.

use super::case::Case;

/// Ping-pongs of `uverbs pingpong` with itself, polling and by events. The data is compared.
pub(crate) fn pingpongs() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in ["rc", "uc", "ud", "srq", "xsrq"] {
        // Messages over XRC are all alike, so there is nothing to compare.
        let check = if kind == "xsrq" { "" } else { "-c" };
        for (name, options) in [("polling", ""), ("events", "-e")] {
            let program = format!("uverbs pingpong {kind} -n 50 {check} {options}");
            let server = format!("{program} -d mlx5_1");
            let client = format!("{program} -d mlx5_0 127.0.0.1");
            let name = format!("ours::{kind}_pingpong::{name}");
            cases.push(Case::pair(name, "tcp 18515", &server, &client));
        }
    }
    cases
}

/// Connections by address, between `uverbs cm` and rdma-core's programs.
pub(crate) fn by_address() -> Vec<Case> {
    let mut cases = rping();
    cases.push(one_server_at_a_path());
    cases.extend(ucmatose());
    cases.extend(udaddy());
    cases.extend(mckey());
    cases.extend(cmtime());
    cases
}

/// A server, ready when an id listens, and its client.
fn pair(name: &str, server: &str, client: &str) -> Case {
    Case::pair(format!("ours::{name}"), "cm", server, client)
}

/// A second server at a path ends with an error, and is no client of the first.
fn one_server_at_a_path() -> Case {
    Case::new(
        "ours::share::one_server_at_a_path",
        "directory=$(mktemp -d) && cd $directory || exit 1\n\
         echo text >file; uverbs share serve file >said 2>&1; status=$?; cat said\n\
         [ $status = 4 ] && grep -q text file && grep -q 'file: ' said || fail 'the file is lost'\n\
         uverbs share serve -n 1 socket >served & server=$!\n\
         until_true '[ -S socket ]' || exit 1\n\
         uverbs share serve socket >said 2>&1; status=$?; cat said\n\
         [ $status = 4 ] && grep -q socket said || fail \"the second server ended with $status\"\n\
         uverbs share use socket --text arrived || fail 'the first server is gone'\n\
         wait $server || fail 'the first server failed'\n\
         cat served; grep -q 'client 1 wrote: arrived' served || fail 'another client was counted'\n\
         [ ! -e socket ] || fail 'the socket stays'",
    )
}

fn rping() -> Vec<Case> {
    vec![
        pair(
            "rping::serves_the_peer",
            "uverbs cm rping -s -a 10.0.0.2 -S 100 -v",
            "rping -c -a 10.0.0.2 -I 10.0.0.1 -C 20 -S 100 -V",
        )
        .then("grep -q \"server ping data: rdma-ping-19: \" server")
        .then("grep -q \"20 pings in\" server"),
        pair(
            "rping::uses_the_peer",
            "rping -s -a 10.0.0.2 -S 100",
            "uverbs cm rping -c -a 10.0.0.2 -I 10.0.0.1 -C 20 -S 100 --json",
        )
        .then("grep -q \"pings.:20,\" client"),
        pair(
            "rping::large",
            "uverbs cm rping -s -S 65535",
            "uverbs cm rping -c -a 10.0.0.2 -I 10.0.0.1 -C 20 -S 65535 -v",
        )
        .then("grep -q \"ping data: rdma-ping-19: \" client"),
        Case::new(
            "ours::rping::says_what_is_wrong",
            "cd /tmp; says() { \"$@\" >said; cat said; grep -q \"$needle\" said; }\n\
             needle='nobody listens' says uverbs cm rping -c -a 10.0.0.2 -I 10.0.0.1 -p 9 --json || fail 'not heard'\n\
             needle='exit_status.:4' says uverbs cm rping -c -a 10.0.0.2 -I 10.0.0.1 -p 9 --json || fail 'status'\n\
             needle='ip address' says uverbs cm rping -s -a 192.0.2.1 --json || fail 'foreign'",
        ),
    ]
}

fn ucmatose() -> Vec<Case> {
    vec![
        pair(
            "ucmatose::serves_the_peer",
            "uverbs cm ucmatose -b 10.0.0.2 -c 3 --json",
            "ucmatose -s 10.0.0.2 -b 10.0.0.1 -c 3",
        )
        .then("grep -q \"return status 0\" client")
        .then("grep -q \"connections.:3,.messages.:10,.size.:100,\" server"),
        pair(
            "ucmatose::uses_the_peer",
            "ucmatose -b 10.0.0.2 -c 2 -C 5 -S 3000",
            "uverbs cm ucmatose -s 10.0.0.2 -b 10.0.0.1 -c 2 -C 5 -S 3000 -t 8 -a 18 -m",
        )
        .then("grep -q \"return status 0\" server")
        .then("grep -q \"2 of 2 with 5 messages of 3000 bytes\" client"),
        Case::new(
            "ours::ucmatose::counts_that_differ_are_named",
            "(pair cm 'uverbs cm ucmatose -b 10.0.0.2 -C 4' \
             'uverbs cm ucmatose -s 10.0.0.2 -b 10.0.0.1 -C 5 --timeout 1') >/tmp/said 2>&1 && fail 'it went well'\n\
             cat /tmp/said; grep -q '4 of 5 messages were received' /tmp/said || fail 'not said'",
        ),
    ]
}

fn udaddy() -> Vec<Case> {
    vec![
        pair(
            "udaddy::serves_the_peer",
            "uverbs cm udaddy -b 10.0.0.2 -c 2 --json",
            "udaddy -s 10.0.0.2 -b 10.0.0.1 -c 2",
        )
        .then("grep -q \"return status 0\" client")
        .then("grep -q \"connections.:2,.messages.:10,.size.:100,\" server"),
        pair(
            "udaddy::uses_the_peer",
            "udaddy -b 10.0.0.2 -C 5 -S 900",
            "uverbs cm udaddy -s 10.0.0.2 -b 10.0.0.1 -C 5 -S 900",
        )
        .then("grep -q \"return status 0\" server")
        .then("grep -q \"1 of 1 with 5 messages of 900 bytes\" client"),
    ]
}

/// A sender of rdma-core's, until the receiver has printed its result. It destroys its queue pair without waiting for
/// its sends, and soft-RoCE then drops those that the kernel has not looked at: of so many it has looked at one, unless
/// the machine is busy.
const SENDER: &str = "for _ in 1 2 3 4 5 6; do\n\
     mckey -m 239.255.7.4 -s -b 10.0.0.1 -C 1000 || exit\n\
     grep -q role server && exit\n\
     done\n";

/// A receiver is ready when its host is in the group; a sender of rdma-core's waits three seconds then.
fn mckey() -> Vec<Case> {
    let joined = "grep -qi 0407ffef /proc/net/igmp || grep -q joined server";
    let pair = |name: &str, server: &str, client: &str| {
        Case::pair(format!("ours::mckey::{name}"), joined, server, client)
    };
    vec![
        Case::new(
            "ours::mckey::receives_from_the_peer",
            format!(
                "cat >/tmp/sender <<'end'\n{SENDER}end\n\
                 pair '{joined}' 'uverbs cm mckey -m 239.255.7.4 -b 10.0.0.2 -C 1 --json' 'sh /tmp/sender'"
            ),
        )
        .then("grep -q \"return status 0\" client")
        .then("grep -q \"role.:.receiver.*messages.:1,.size.:100,\" server"),
        pair(
            "sends_to_the_peer",
            "mckey -m 239.255.7.4 -b 10.0.0.2",
            "uverbs cm mckey -m 239.255.7.4 -s -b 10.0.0.1",
        )
        .then("grep -q \"return status 0\" server"),
        Case::pair(
            "ours::mckey::send_only",
            "grep -q joined server",
            "uverbs cm mckey -m 239.255.7.4 -b 10.0.0.2 -c 2",
            "uverbs cm mckey -m 239.255.7.4 -s -b 10.0.0.1 -o --pause 0",
        )
        .then("grep -q \"2 of 2 with 10 messages of 100 bytes\" server"),
    ]
}

fn cmtime() -> Vec<Case> {
    vec![
        // rdma-core's program invents queue pair numbers.
        pair(
            "cmtime::serves_the_peer",
            "uverbs cm cmtime -b 10.0.0.2 -c 10 --json",
            "cmtime -s 10.0.0.2 -b 10.0.0.1 -c 10 -q 40000",
        )
        .then("grep -q \"connections.:10,.steps.:.*connect.*disconnect\" server")
        .then("grep -q \"full connect\" client"),
        pair(
            "cmtime::uses_the_peer",
            "cmtime -b 10.0.0.2 -c 10 -q 20000",
            "uverbs cm cmtime -s 10.0.0.2 -b 10.0.0.1 -c 10",
        )
        .then("grep -q \"^full connect  *[1-9]\" client"),
    ]
}

/// A part of the device suite. Skips are checked where the whole suite runs.
fn part(filter: &str) -> Case {
    part_without(filter, "")
}

/// As [`part`], without the tests that `skips` names.
fn part_without(filter: &str, skips: &str) -> Case {
    let name = format!("ours::{}", filter.replace("::", "_").trim_end_matches('_'));
    let script = format!(
        "cd /tmp; export UVERBS_TEST_DEVICE=mlx5_0 UVERBS_TEST_SECOND_DEVICE=mlx5_1 UVERBS_PEERS=1\n\
         timeout 300 uverbs-device-tests --test-threads 1 {skips} {filter} || exit 1"
    );
    // The output contains the results; a filter without any test is a mistake.
    let script = format!(
        "({script}) >part; status=$?; cat part; [ $status = 0 ] || exit 1\n\
         grep -q ' [1-9][0-9]* passed; 0 failed' part || fail 'nothing of it was run'"
    );
    Case::new(name, format!("directory=$(mktemp -d) && cd $directory || exit 1\n{script}"))
}

/// Tests that an InfiniBand port affects: addressing of peers, and attributes of the states. They
/// include rdma-core's ping-pongs as the other side.
pub(crate) fn over_infiniband() -> Vec<Case> {
    let parts = [
        "port::",
        "modify::",
        "rc::",
        "uc::",
        "ud::",
        "srq::",
        "handshake::",
        "peers::",
        "cm::infiniband",
    ];
    let mut cases = pingpongs();
    cases.extend(parts.map(part));
    cases
}

/// Tests that ring doorbells, on a device without write combining. All thread domains share one
/// register, so they cannot be exhausted.
pub(crate) fn without_combining() -> Vec<Case> {
    let mut cases: Vec<Case> = ["mlx5::stress", "rc::", "srq::", "events::"].map(part).into();
    cases.push(part_without("mlx5::td", "--skip exhaustion_names_the_number_of_domains"));
    cases
}

/// Dma-bufs, which the driver binds to the data-direct function. A test that skips for want of it is a failure here.
pub(crate) fn through_data_direct() -> Vec<Case> {
    vec![part("mlx5::dmabuf").then("! grep -q '\\[data_direct\\]' part")]
}

/// Timestamps, with and without real time.
pub(crate) fn in_real_time() -> Vec<Case> {
    vec![part("mlx5::clock").then("! grep -q '\\[real_time\\]' part")]
}
