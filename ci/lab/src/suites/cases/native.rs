//! The device suite as a stranger's machine runs it: the static binary alone, as an ordinary user, on a device
//! that is not set up like the lab's.
//!
//! The device is the second of two. Its MTU, its partition or its link layer differ from the lab's defaults,
//! and another process makes and destroys objects on it all the time. Whatever the machine lacks has to skip
//! by name, and nothing of the machine may be different afterwards.

use super::case::Case;
use std::time::Duration;

/// Tests that show in a few seconds that port, MTU, partition and counts of objects are not the lab's.
pub(super) const FEW: &str = "port::port_is_active_and_plausible,port::port_is_in_a_partition,\
                   port::gid_table_and_single_gids_agree,handshake::rc_pairs_connect,\
                   handshake::smaller_mtu_is_agreed_on,qp::query_returns_the_attributes_that_were_set,\
                   qp::last_part_destroys_the_queue_pair,rc::messages_of_every_size,\
                   ud::datagrams_of_every_size,context::objects_keep_the_context_open,\
                   processes::killed_peer_leaves_nothing,\
                   rc::messages_between_two_devices_arrive,mlx5::var::doorbells_are_stores,\
                   mlx5::td::exhaustion_names_the_number_of_domains,root::link_is_added_and_removed";

/// The tests among these that a machine like this skips.
const SKIPPED: [&str; 4] = ["[two_devices]", "[shown_stores]", "[alone]", "[lab]"];

/// The beginning of each script: `suite` runs the binary as the user, with nothing of the lab's environment and
/// no other program to be found; `state` prints the settings that the suite must not change.
const NATIVE: &str = r#"
binary=$(command -v uverbs-device-tests) || fail 'no suite'
suite() {
    timeout 3000 /lab/lab-launch user plain -- env -i PATH=/nowhere UVERBS_TEST_DEVICE=$device "$@" \
        $binary --test-threads 1 --color never
}
netdev() { ls /sys/class/infiniband/$1/device/net 2>/dev/null | head -n 1; }
node() { grep -lx $1 /sys/class/infiniband_verbs/uverbs*/ibdev | cut -d / -f 5; }
is_active() { grep -q ACTIVE /sys/class/infiniband/$1/ports/1/state; }
state() {
    grep -s '' /sys/class/net/*/flags /sys/class/net/*/mtu /sys/class/net/*/operstate \
        /sys/class/infiniband/*/ports/*/state /sys/class/infiniband/*/ports/*/rate \
        /sys/class/infiniband/*/ports/*/pkeys/[01] /sys/class/infiniband/*/ports/*/gids/? \
        /sys/class/infiniband/*/node_desc /sys/class/infiniband/*/node_guid \
        /sys/module/ib_*/parameters/* /sys/module/rdma_*/parameters/* /sys/module/mlx5_*/parameters/* \
        /sys/kernel/mm/hugepages/*/nr_hugepages \
        /proc/sys/vm/* /proc/sys/kernel/* /proc/sys/net/ipv4/conf/*/* /proc/sys/net/rdma_ucm/* |
        grep -v -e ns_last_pid -e perf_event_max_sample_rate -e hung_task_detect_count
    cut -d ' ' -f 1 /proc/modules | sort
    grep HugePages /proc/meminfo
    ls -ln /dev/infiniband /dev/shm | awk '{ print $1, $3, $4, $NF }'
    /usr/bin/rdma resource show
    /lab/lab-launch user plain -- sh -c 'ulimit -a'
}
settled() { until_true 'state >before; sleep 1; state >after; cmp -s before after'; }
directory=$(mktemp -d) && chmod 777 $directory && cd $directory || exit 1
unchanged() {
    # The kernel cleans up after the last process on its own time.
    until_true 'state >after; cmp -s before after' || { diff before after; fail 'the machine is different'; }
}
"#;

/// The first registration on an mlx5 device makes the driver's own queues for registrations, which stay.
const WARM: &str =
    "suite UVERBS_TEST_NAMES=handshake::rc_pairs_connect >warm 2>&1 || { cat warm; exit 1; }";

/// A neighbour that makes and destroys objects on the same device, until `end_neighbour`. Its suite may not
/// fail either, and has run at least twice.
const NEIGHBOUR: &str = r#"
(
    while [ ! -e enough ]; do
        suite UVERBS_TEST_NAMES=handshake::rc_pairs_connect,processes::killed_peer_leaves_nothing \
            >neighbour 2>&1 || { mv neighbour neighbour-failed; break; }
        echo round >>rounds
    done
) &
neighbour=$!
until_true 'test -e rounds || test -e neighbour-failed'
end_neighbour() {
    touch enough; wait $neighbour
    [ ! -e neighbour-failed ] || { cat neighbour-failed; fail 'the neighbour fails'; }
    [ $(wc -l <rounds) -ge 2 ] || fail 'the neighbour was idle'
}
"#;

fn script(device: &str, body: &str) -> String {
    format!("device={device}\n{NATIVE}\n{body}")
}

/// Runs tests, beside a busy neighbour, and expects these words in the suite's output.
fn run(names: Option<&str>, expected: &[&str]) -> String {
    let names = names.map_or(String::new(), |names| format!("UVERBS_TEST_NAMES={names}"));
    let words: String = expected
        .iter()
        .map(|word| format!("grep -qF '{word}' said || fail 'not said: {word}'\n"))
        .collect();
    format!(
        "{WARM}\nsettled || exit 1\n{NEIGHBOUR}\nsuite {names} >said 2>&1; status=$?\n\
         cat said\n\
         end_neighbour\n[ $status = 0 ] || fail \"the suite ended with $status\"\n{words}unchanged\n"
    )
}

/// The first function is down, and the MTU of the second is the largest.
const OTHER_DEFAULTS: &str = r#"
first=$(netdev mlx5_0) second=$(netdev mlx5_1)
ip link set $first down && ip link set $second mtu 9000 || fail 'the links stay as they are'
restore() {
    ip link set $second mtu 1500; ip link set $second up; ip link set $first mtu 1500; ip link set $first up
    until_true 'is_active mlx5_0 && is_active mlx5_1'
}
trap restore EXIT
until_true '! is_active mlx5_0'
"#;

/// Each fault is planted, has to be in the first line of the suite's output, and is removed.
const FAULTS: &str = r#"
first=$(netdev mlx5_0) second=$(netdev mlx5_1) node=/dev/infiniband/$(node mlx5_1)
restore() {
    chmod 666 $node; ip link set $second mtu 1500; ip link set $second up
    until_true 'is_active mlx5_1'
}
trap restore EXIT
few=UVERBS_TEST_NAMES=port::port_is_active_and_plausible
# planted STATUS WORDS [VARIABLE...]
planted() {
    expected=$1 words=$2; shift 2
    suite $few "$@" >said 2>&1; status=$?
    cat said
    [ $status = $expected ] || fail "it ended with $status, not $expected"
    head -n 1 said | grep -q "$words" || fail "not in the first line: $words"
}
planted 0 'tests between two devices skip (\[two_devices\]): UVERBS_TEST_SECOND_DEVICE names none'
planted 0 '^device under test: mlx5_1 (mlx5).* partner mlx5_0' UVERBS_TEST_SECOND_DEVICE=mlx5_0
ip link set $second mtu 9000
planted 0 'the MTU is 1024, .* not 4096' UVERBS_TEST_SECOND_DEVICE=mlx5_0
ip link set $second mtu 1500
chmod 600 $node
planted 1 "^device tests not run: $node has mode 0600"
chmod 666 $node
bare="env -i UVERBS_TEST_DEVICE=mlx5_1 $binary"
suite() { /lab/lab-launch user plain -- sh -c "ulimit -l 64; exec $bare"; }
planted 1 '^device tests not run: this process may lock 64 KiB'
suite() { /lab/lab-launch user plain -- $bare; }
ip link set $second down
until_true '! is_active mlx5_1'
planted 1 '^device tests not run: port 1 of mlx5_1 is down'
"#;

/// The comparison of [`NATIVE`] notices each of these changes: of a link, a node, huge pages, a sysctl, shared
/// memory, and of objects on the device.
const CHANGES: &str = r#"
second=$(netdev mlx5_1) node=/dev/infiniband/$(node mlx5_1)
# noticed CHANGE UNDO
noticed() {
    settled || exit 1
    eval "$1" || fail "it cannot be changed: $1"
    state >after
    cmp -s before after && fail "not noticed: $1"
    eval "$2"
    until_true 'state >after; cmp -s before after' || { diff before after; fail "not undone: $2"; }
}
noticed 'ip link set $second mtu 4000' 'ip link set $second mtu 1500'
noticed 'chmod 600 $node' 'chmod 666 $node'
pages=$(cat /proc/sys/vm/nr_hugepages)
noticed 'echo $((pages + 1)) >/proc/sys/vm/nr_hugepages' 'echo $pages >/proc/sys/vm/nr_hugepages'
backlog=$(cat /proc/sys/net/rdma_ucm/max_backlog)
noticed 'echo 77 >/proc/sys/net/rdma_ucm/max_backlog' 'echo $backlog >/proc/sys/net/rdma_ucm/max_backlog'
noticed 'ibv_rc_pingpong -d mlx5_1 -g 0 >/dev/null 2>&1 & pid=$!; until_true "tcp 18515"' 'kill $pid'
noticed 'touch /dev/shm/left' 'rm /dev/shm/left'
"#;

/// The faults, and a few tests on Ethernet.
pub(crate) fn on_ethernet() -> Vec<Case> {
    let mut expected = vec!["MTU 4096 of 4096", "device under test: mlx5_1 (mlx5)"];
    expected.extend(SKIPPED);
    let few = format!("{OTHER_DEFAULTS}{}", run(Some(FEW), &expected));
    vec![
        Case::as_root(
            "ours::native::changes_of_the_machine_are_noticed",
            script("mlx5_1", &format!("{WARM}\n{CHANGES}")),
        ),
        // This one before the next: a link that was down has lost the guest's routes from one port to the other.
        Case::as_root("ours::native::faults_are_the_first_line", script("mlx5_1", FAULTS)),
        Case::as_root("ours::native::second_function_with_a_neighbour", script("mlx5_1", &few)),
    ]
}

/// A few tests on InfiniBand.
pub(crate) fn on_infiniband() -> Vec<Case> {
    let mut expected = vec!["InfiniBand, MTU 4096 of 4096", "device under test: mlx5_1 (mlx5)"];
    expected.extend(SKIPPED);
    vec![Case::as_root(
        "ours::native::second_function_with_a_neighbour",
        script("mlx5_1", &run(Some(FEW), &expected)),
    )]
}

fn whole(device: &str, body: &str) -> Case {
    let case = Case::as_root("ours::native::whole_suite", script(device, body));
    Case { patience: Duration::from_secs(3600), ..case }
}

/// The whole suite on the second device of a kind; on mlx5 with the first one down.
pub(crate) fn whole_on_mlx5() -> Vec<Case> {
    let body = format!("{OTHER_DEFAULTS}{}", run(None, &SKIPPED));
    vec![whole("mlx5_1", &body)]
}

/// The same on soft-RoCE, whose doorbell pages and thread domains there are not.
pub(crate) fn whole_on_rxe() -> Vec<Case> {
    let body = run(None, &["[two_devices]", "[lab]"]);
    vec![whole("rxe1", &body)]
}

/// The same on InfiniBand, where the port is a limited member of its first partition.
pub(crate) fn whole_in_a_partition() -> Vec<Case> {
    let body =
        run(None, &["partition key 0x8123 at 1", "[first_pkey]", "[two_devices]", "[alone]"]);
    vec![whole("mlx5_1", &body)]
}
