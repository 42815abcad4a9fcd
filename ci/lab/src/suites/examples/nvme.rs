//! `nvme_read` against the kernel's own NVMe over Fabrics target, on the address of the second device.

use super::{DONE, REFUSED, alone};
use crate::suites::cases::case::Case;

/// The target's address, and the subsystem's name.
const ADDRESS: &str = "10.0.0.2";
const SUBSYSTEM: &str = "nqn.2024-01.org.example:disk";

/// Namespace 1 is a RAM disk of 16 MiB, which tests write; namespace 2 is a file of random bytes, which
/// they only read. `nvmet-rdma` brings its listener up when a subsystem is linked to the port.
const TARGET: &str = r#"
modprobe brd && modprobe nvmet-rdma || fail 'no NVMe target in this kernel'
mount -t configfs none /sys/kernel/config || exit 1
chmod 644 /dev/ram0
head -c 5001216 /dev/urandom >/tmp/nvme-disk && chmod 644 /tmp/nvme-disk
cd /sys/kernel/config/nvmet || exit 1
mkdir subsystems/$SUBSYSTEM && cd subsystems/$SUBSYSTEM || exit 1
echo 1 >attr_allow_any_host
mkdir namespaces/1 namespaces/2
echo /dev/ram0 >namespaces/1/device_path
echo /tmp/nvme-disk >namespaces/2/device_path
echo 1 >namespaces/2/buffered_io
for number in 1 2; do echo 1 >namespaces/$number/enable || exit 1; done
mkdir ../../ports/1 && cd ../../ports/1 || exit 1
echo rdma >addr_trtype && echo ipv4 >addr_adrfam || exit 1
echo $ADDRESS >addr_traddr && echo 4420 >addr_trsvcid || exit 1
ln -s ../../subsystems/$SUBSYSTEM subsystems/ || fail 'the target does not listen'
"#;

/// Takes the subsystem away while a host reads with small requests, one at a time.
const TARGET_LEAVES: &str = r#"
cd $(mktemp -d) || exit 1
timeout 100 nvme_read --depth 1 --size 512 $ADDRESS $SUBSYSTEM >printed 2>&1 & host=$!
until_true 'grep -q ^I/O printed' || { cat printed; exit 1; }
rm /sys/kernel/config/nvmet/ports/1/subsystems/$SUBSYSTEM || exit 1
wait $host; status=$?; cat printed
[ $status = 1 ] || fail "the host ended with $status"
grep -Eq 'the target closed the connection|not delivered' printed || fail 'no reason'
cd /sys/kernel/config/nvmet || exit 1
rmdir ports/1 subsystems/$SUBSYSTEM/namespaces/* subsystems/$SUBSYSTEM
"#;

fn as_root(name: &str, script: &str) -> Case {
    Case::as_root(
        format!("nvme_read::{name}"),
        format!("ADDRESS={ADDRESS} SUBSYSTEM={SUBSYSTEM}\n{script}"),
    )
}

/// All of them, in this order: the first makes the target, the last removes it.
pub(super) fn cases() -> Vec<Case> {
    let host = |name: &str, options: &str, ending, line| {
        alone(name, &format!("nvme_read {options} {ADDRESS} {SUBSYSTEM}"), ending, line)
    };
    vec![
        as_root("target", TARGET),
        host(
            "nvme_read::copy",
            "--namespace 2 --output copy",
            DONE,
            "^read 5001216 bytes in .*MB/s",
        )
        .then("cmp /tmp/nvme-disk copy")
        .then("grep -q \"^namespace 2: 1221 blocks of 4096 bytes\" printed"),
        host(
            "nvme_read",
            "--write --seed 7 --output copy",
            DONE,
            "^all 32768 blocks have the pattern of seed 7",
        )
        .then("grep -Eq \"^wrote 16777216 bytes .* 16 under way\" printed")
        .then("grep -Eq \"^controller [0-9]+ at 10.0.0.2:4420 by \" printed"),
        // The kernel's view of the disk, and not the one that this library has.
        as_root("kernel_agrees", "cd $(mktemp -d) && nvme_read --output copy $ADDRESS $SUBSYSTEM")
            .then("cmp /dev/ram0 copy"),
        host(
            "nvme_read::deep",
            "--verify --seed 7 --depth 100 --size 4096",
            DONE,
            " 100 under way",
        ),
        host(
            "nvme_read::part",
            "--write --seed 8 --first 1001 --blocks 333 --size 1048576 --depth 2",
            DONE,
            "^all 333 blocks have the pattern of seed 8",
        ),
        host(
            "nvme_read::other_blocks_stay",
            "--verify --seed 7 --first 1334 --depth 1",
            DONE,
            "^all 31434 blocks have the pattern of seed 7",
        ),
        host(
            "nvme_read::wrong_pattern",
            "--verify --seed 7",
            REFUSED,
            "block (1[0-9]{3}) has 0x[0-9a-f]+ at byte [0-9]+, where the pattern of seed 7 has",
        ),
        host("nvme_read::no_namespace", "--namespace 9", REFUSED, "namespace 9"),
        host("nvme_read::too_deep", "--depth 5000", REFUSED, "depth 5000: .* at most [0-9]+"),
        alone(
            "nvme_read::no_subsystem",
            &format!("nvme_read {ADDRESS} {SUBSYSTEM}x"),
            REFUSED,
            "the target has no subsystem .nqn.2024-01.org.example:diskx.",
        ),
        alone(
            "nvme_read::nobody",
            &format!("nvme_read {ADDRESS}:4421 {SUBSYSTEM}"),
            REFUSED,
            "10.0.0.2:4421: nobody listens on the port",
        ),
        as_root("target_leaves", TARGET_LEAVES),
    ]
}
