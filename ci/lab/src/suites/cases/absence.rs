//! Machines that lack a module, a device or a namespace: the command line names it and the remedy.
//!
//! Each case puts the module, device or namespace back. The kernel must not load a module by itself that a case unloaded.

use super::case::Case;

/// `says STATUS TEXT... -- COMMAND...` succeeds if the command exits with STATUS and its output has every text.
/// `usable DEVICE ADDRESS` waits until a device has a node and the GID of its address, four hexadecimal digits a
/// group.
const BEGINNING: &str = r#"
says() {
    expected=$1; shift
    while [ "$1" != -- ]; do echo "$1"; shift; done >texts; shift
    "$@" >said 2>&1; status=$?
    cat said
    [ $status = $expected ] || fail "it ended with $status"
    while read -r text; do grep -qF "$text" said || fail "not said: $text"; done <texts
}
usable() {
    until_true "grep -q $2 /sys/class/infiniband/$1/ports/1/gids/*" &&
        until_true "grep -lx $1 /sys/class/infiniband_verbs/uverbs*/ibdev"
}
directory=$(mktemp -d) && cd $directory || exit 1
loader=$(cat /proc/sys/kernel/modprobe)
echo /nowhere >/proc/sys/kernel/modprobe
"#;

/// Runs `script` in a subshell and restores in another one; fails if either did. `before` sets variables for both.
fn case(name: &str, before: &str, script: &str, restore: &str) -> Case {
    let text = format!(
        "{before}\n{BEGINNING}\n({script}\n); found=$?\necho $loader >/proc/sys/kernel/modprobe\n\
         ({restore}\n) || {{ echo 'not restored'; found=1; }}\ncd / && rm -r $directory\n[ $found = 0 ] || exit 1"
    );
    Case::as_root(format!("absence::{name}"), text)
}

/// On the emulated device.
pub(crate) fn on_mlx5() -> Vec<Case> {
    vec![
        case(
            "rdma_part_of_the_driver",
            "",
            "rmmod mlx5_ib || fail 'it stays'\n\
             says 3 'has driver mlx5_core without its RDMA part' '`modprobe mlx5_ib`' -- uverbs devinfo\n\
             says 3 '`modprobe mlx5_ib`' -- uverbs pingpong rc\n\
             says 3 'PROBLEM devices: ' '`modprobe mlx5_ib`' -- uverbs doctor",
            "modprobe mlx5_ib && usable mlx5_0 0a00:0001 && usable mlx5_1 0a00:0002",
        ),
        case(
            "connection_manager",
            "",
            "rmmod rdma_ucm || fail 'it stays'\n\
             says 3 'modprobe rdma_ucm' -- uverbs cm rping -s -a 10.0.0.2\n\
             says 3 'modprobe rdma_ucm' -- uverbs cm rping -c -a 10.0.0.2\n\
             says 0 'rdma_ucm is not loaded' 'what to do: `modprobe rdma_ucm`' -- uverbs doctor mlx5_0",
            "modprobe rdma_ucm && until_true 'ls /dev/infiniband/rdma_cm'",
        ),
        namespace(),
    ]
}

/// On soft-RoCE.
pub(crate) fn on_rxe() -> Vec<Case> {
    const PARENTS: &str = "one=$(cat /sys/class/infiniband/rxe0/parent)\n\
        other=$(cat /sys/class/infiniband/rxe1/parent)\n\
        /usr/bin/rdma link delete rxe0; /usr/bin/rdma link delete rxe1";
    const RESTORE: &str = "modprobe rdma_rxe && modprobe rdma_ucm && until_true 'ls /dev/infiniband/rdma_cm' &&\n\
        /usr/bin/rdma link add rxe0 type rxe netdev $one && /usr/bin/rdma link add rxe1 type rxe netdev $other &&\n\
        usable rxe0 0a00:0001 && usable rxe1 0a00:0002";
    vec![
        case(
            "any_device",
            PARENTS,
            "says 3 'this machine has no RDMA device' 'are loaded and have no device' \
             '`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE`' -- uverbs devinfo",
            RESTORE,
        ),
        // `modprobe -r` unloads a module after those that use it. Each case on mlx5 unloads one module that no other
        // uses: rmmod does that.
        case(
            "modules",
            PARENTS,
            "modprobe -r rdma_rxe rdma_ucm rdma_cm ib_uverbs ib_core; lsmod | grep -q ib_core && fail 'it stays'\n\
             says 3 'RDMA core is not loaded' '(mlx5_ib)' 'rdma_rxe for a software device' -- uverbs devinfo\n\
             modprobe ib_core || fail 'not loaded'\n\
             says 3 'the module ib_uverbs is not loaded' '`modprobe ib_uverbs`' -- uverbs devinfo\n\
             says 3 'PROBLEM modules: ib_uverbs is not loaded' -- uverbs doctor",
            RESTORE,
        ),
        namespace(),
    ]
}

/// Devices that belong to one network namespace, seen from another one.
fn namespace() -> Case {
    case(
        "network_namespace_of_the_device",
        "mode=$(/usr/bin/rdma system show netns | grep -o -e shared -e exclusive)",
        "/usr/bin/rdma system set netns exclusive || fail 'namespaces go on sharing devices'\n\
         /usr/bin/ip netns add absent || fail 'no namespace'\n\
         node=$(ls /dev/infiniband/uverbs* | head -1)\n\
         says 3 'belongs to another network namespace' 'rdma dev set' -- /usr/bin/ip netns exec absent uverbs devinfo $node\n\
         says 3 'belongs to another network namespace' -- /usr/bin/ip netns exec absent uverbs devinfo",
        "/usr/bin/ip netns del absent && until_true \"/usr/bin/rdma system set netns $mode\"",
    )
}
