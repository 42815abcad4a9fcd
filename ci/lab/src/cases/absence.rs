//! Machines that lack a module, a device or a namespace: the command line says what, and what to do.
//!
//! Each case restores what it took away. The kernel must not load by itself what a case unloaded.

use super::case::Case;

/// `says STATUS TEXT... -- COMMAND...` succeeds if the command ends so and its output has every text.
const SAYS: &str = r#"
says() {
    expected=$1; shift
    while [ "$1" != -- ]; do echo "$1"; shift; done >texts; shift
    "$@" >said 2>&1; status=$?
    cat said
    [ $status = $expected ] || fail "it ended with $status"
    while read -r text; do grep -qF "$text" said || fail "not said: $text"; done <texts
}
directory=$(mktemp -d) && cd $directory || exit 1
loader=$(cat /proc/sys/kernel/modprobe)
echo /nowhere >/proc/sys/kernel/modprobe
"#;

/// Runs `script` in a subshell, restores, and fails if it did.
fn case(name: &str, script: &str, restore: &str) -> Case {
    let text = format!(
        "{SAYS}\n({script}\n); found=$?\n{restore}\necho $loader >/proc/sys/kernel/modprobe\n[ $found = 0 ] || exit 1"
    );
    Case::as_root(format!("absence::{name}"), text)
}

/// On the emulated device.
pub(crate) fn on_mlx5() -> Vec<Case> {
    vec![
        case(
            "rdma_part_of_the_driver",
            "rmmod mlx5_ib || fail 'it stays'\n\
             says 3 'has driver mlx5_core without its RDMA part' '`modprobe mlx5_ib`' -- uverbs devinfo\n\
             says 3 '`modprobe mlx5_ib`' -- uverbs pingpong rc\n\
             says 3 'PROBLEM devices: ' '`modprobe mlx5_ib`' -- uverbs doctor",
            "modprobe mlx5_ib\n\
             until_true 'ls /sys/class/infiniband/mlx5_1' || exit 1",
        ),
        case(
            "connection_manager",
            "rmmod rdma_ucm || fail 'it stays'\n\
             says 3 'modprobe rdma_ucm' -- uverbs cm rping -s -a 10.0.0.2\n\
             says 0 'rdma_ucm is not loaded' 'what to do: `modprobe rdma_ucm`' -- uverbs doctor mlx5_0",
            "modprobe rdma_ucm\n\
             until_true 'ls /dev/infiniband/rdma_cm' || exit 1",
        ),
        namespace(),
    ]
}

/// On soft-RoCE.
pub(crate) fn on_rxe() -> Vec<Case> {
    const RESTORE: &str = "modprobe rdma_rxe; modprobe rdma_ucm\n\
        /usr/bin/rdma link add rxe0 type rxe netdev $one; /usr/bin/rdma link add rxe1 type rxe netdev $other\n\
        until_true 'grep -q 0a00:0002 /sys/class/infiniband/rxe1/ports/1/gids/*' || exit 1";
    const REMOVE: &str = "/usr/bin/rdma link delete rxe0; /usr/bin/rdma link delete rxe1";
    let case = |name: &str, script: &str| {
        let parents = "one=$(cat /sys/class/infiniband/rxe0/parent)\n\
            other=$(cat /sys/class/infiniband/rxe1/parent)";
        let Case { script, .. } = case(name, &format!("{REMOVE}\n{script}"), RESTORE);
        Case::as_root(format!("absence::{name}"), format!("{parents}\n{script}"))
    };
    vec![
        case(
            "any_device",
            "says 3 'this machine has no RDMA device' 'are loaded and have no device' \
             '`modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE`' -- uverbs devinfo",
        ),
        case(
            "modules",
            "modprobe -r rdma_rxe rdma_ucm rdma_cm ib_uverbs ib_core; lsmod | grep -q ib_core && fail 'it stays'\n\
             says 3 'RDMA core is not loaded' '(mlx5_ib)' 'rdma_rxe for a software device' -- uverbs devinfo\n\
             modprobe ib_core || fail 'not loaded'\n\
             says 3 'the module ib_uverbs is not loaded' '`modprobe ib_uverbs`' -- uverbs devinfo\n\
             says 3 'PROBLEM modules: ib_uverbs is not loaded' -- uverbs doctor",
        ),
        namespace(),
    ]
}

/// Devices that belong to one network namespace, seen from another one.
fn namespace() -> Case {
    case(
        "network_namespace_of_the_device",
        "/usr/bin/rdma system set netns exclusive || fail 'namespaces go on sharing devices'\n\
         /usr/bin/ip netns add far || fail 'no namespace'\n\
         node=$(ls /dev/infiniband/uverbs* | head -1)\n\
         says 3 'belongs to another network namespace' 'rdma dev set' -- /usr/bin/ip netns exec far uverbs devinfo $node\n\
         says 3 'belongs to another network namespace' -- /usr/bin/ip netns exec far uverbs devinfo",
        "/usr/bin/ip netns del far\n\
         until_true '/usr/bin/rdma system set netns shared' || exit 1",
    )
}
