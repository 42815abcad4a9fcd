//! `uverbs doctor` on a healthy guest and with planted faults: each must be found, with its remedy.

use super::case::Case;

/// Runs the doctor as JSON: `told STATUS WORD...` succeeds if it ends so and its report has every word.
const TOLD: &str = r#"
told() {
    expected=$1; shift
    uverbs doctor --json $device >report; status=$?
    cat report
    [ $status = $expected ] || fail "it ended with $status"
    for word; do grep -q "$word" report || fail "not found: $word"; done
}
directory=$(mktemp -d) && cd $directory || exit 1
"#;

pub(crate) fn cases() -> Vec<Case> {
    let case = |name: &str, script: &str| {
        Case::as_root(format!("doctor::{name}"), format!("{TOLD}\n{script}"))
    };
    vec![
        case(
            "finds_nothing_wrong",
            "device=mlx5_0 told 0 '.check.:.gid.,.subject.:.mlx5_0 (mlx5) port 1.,.level.:.ok.' \
             '.problems.:0' 'RoCE v2, an IPv4 address' '.check.:.pfc.' '.check.:.ecn.'",
        ),
        case(
            "link_down",
            "/usr/bin/ip link set eth0 down || fail 'eth0 stays up'\n\
             until_true \"uverbs devinfo mlx5_0 --json | grep -q '.state.:.down'\" || status=1\n\
             (device=mlx5_0 told 3 '.check.:.link.' '.level.:.problem.' 'ip link set eth0 up')\n\
             found=$?\n\
             /usr/bin/ip link set eth0 up\n\
             until_true \"uverbs devinfo mlx5_0 --json | grep -q '.state.:.active'\"\n\
             [ $found = 0 ] || exit 1",
        ),
        case(
            "node_is_roots",
            "node=$(ls /dev/infiniband/uverbs* | head -1)\n\
             chmod 600 $node\n\
             (device=$node told 0 '.check.:.node.' 'mode 0600' \"chmod 666 $node\")\n\
             found=$?\n\
             chmod 666 $node; [ $found = 0 ] || exit 1",
        ),
        // Not root: a capability would lift the limit.
        Case::new(
            "doctor::little_memlock",
            format!(
                "{TOLD}\nulimit -l 64 || fail 'the limit stays'\n\
                 device=mlx5_0 told 3 '.check.:.memlock.' '64 KiB' 'ulimit -l'"
            ),
        ),
        // Root of a user namespace has the capability, and it lifts nothing.
        Case::new(
            "doctor::user_namespace",
            format!(
                "{TOLD}\nulimit -l 64 || fail 'the limit stays'\n\
                 uverbs() {{ unshare -r /usr/local/bin/uverbs \"$@\"; }}\n\
                 device=mlx5_0 told 3 '.check.:.memlock.' '64 KiB' 'ulimit -l'"
            ),
        ),
        case(
            "cgroup_limit",
            "mkdir -p group && mount -t cgroup2 none group || fail 'no cgroups'\n\
             echo +rdma >group/cgroup.subtree_control && mkdir group/few || fail 'no rdma controller'\n\
             echo 'mlx5_0 hca_handle=0' >group/few/rdma.max || fail 'no limit'\n\
             sh -c 'echo $$ >group/few/cgroup.procs; exec uverbs pingpong rc -d mlx5_0 -g 3' >said 2>&1\n\
             status=$?; cat said\n\
             rmdir group/few; umount group\n\
             [ $status = 3 ] && grep -q 'rdma.max' said || fail 'the limit is not named'",
        ),
    ]
}

/// A peer in a network namespace, which takes shorter packets than the device sends, and then as long ones. Only one
/// device is on the route to it.
pub(crate) fn peers() -> Vec<Case> {
    let script = r#"
ip=/usr/bin/ip
$ip netns add far && $ip link add uvt1 mtu 9000 type veth peer name uvt2 netns far || fail 'no cable'
$ip addr add 10.77.1.1/24 dev uvt1 && $ip link set uvt1 up || fail 'no address'
$ip -n far addr add 10.77.1.2/24 dev uvt2 && $ip -n far link set uvt2 up || fail 'no peer'
/usr/bin/rdma link add uvt_rxe type rxe netdev uvt1 || fail 'no device'
until_true "grep -q 0a4d:0101 /sys/class/infiniband/uvt_rxe/ports/1/gids/*" || exit 1
(
    device='--peer 10.77.1.2 uvt_rxe'
    (told 3 '.check.:.peer.,.*.level.:.problem.' 'packets of 1088 bytes, and none of 4160') || exit 1
    $ip -n far link set uvt2 mtu 9000 || fail 'the MTU stays'
    (told 0 '.check.:.peer.,.*.level.:.ok.' 'answers packets of 4160 bytes') || exit 1
    # Two other devices are there, which work and are not on the route.
    device='--peer 10.77.1.2'
    (told 0 'rxe0 (rxe) port 1.,.level.:.note.,.message.:.not on the route to 10.77.1.2' '.problems.:0') || exit 1
    device='--peer 10.77.1.2 rxe0'
    (told 3 '.check.:.route.,.subject.:null,.level.:.problem.' 'ip route get 10.77.1.2' '.problems.:1') || exit 1
)
found=$?
/usr/bin/rdma link delete uvt_rxe; $ip link del uvt1; $ip netns del far
[ $found = 0 ] || exit 1
"#;
    vec![Case::as_root("doctor::mtu_of_the_peer", format!("{TOLD}\n{script}"))]
}
