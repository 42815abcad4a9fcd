//! The facts that all devices share: the kernel and its modules, limits of this process, memory, the IOMMU, cgroups.

use super::Findings;
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use uverbs::Device;
use uverbs::device::{absence, system};

/// With less lockable memory than the first hardly any program works, with less than the second many do not.
const LITTLE_MEMLOCK: u64 = 1 << 20;
const SOME_MEMLOCK: u64 = 64 << 20;
/// The bit of `CAP_IPC_LOCK`, which lifts the limit of locked memory.
const CAP_IPC_LOCK: u32 = 14;
/// The oldest kernel that the library supports.
const OLDEST: (u32, u32) = (5, 10);

pub(super) fn look(findings: &mut Findings) {
    versions(findings);
    let core = modules(findings);
    namespaces(core, findings);
    memlock(findings);
    let status = read("/proc/self/cgroup");
    cgroup(status.as_deref().unwrap_or(""), Path::new("/sys/fs/cgroup"), findings);
    huge_pages(&read("/proc/meminfo").unwrap_or_default(), findings);
    iommu(findings);
}

/// The devices; if there is none, a problem with the reason.
pub(super) fn devices(findings: &mut Findings) -> Vec<Device> {
    let listed = match uverbs::devices() {
        Ok(listed) => listed,
        Err(error) => {
            findings.failed("devices", error);
            return Vec::new();
        }
    };
    if listed.is_empty() {
        for reason in absence().reasons() {
            findings.problem("devices", "no RDMA device is listed", reason);
        }
    } else {
        let names: Vec<_> = listed.iter().map(ToString::to_string).collect();
        findings.ok("devices", names.join(", "));
    }
    listed
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn versions(findings: &mut Findings) {
    let kernel = rustix::system::uname();
    version_of(&kernel.release().to_string_lossy(), findings);
}

/// The first two numbers of a kernel's release.
pub(super) fn series(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn version_of(release: &str, findings: &mut Findings) {
    let message = format!("uverbs {}, Linux {release}", env!("CARGO_PKG_VERSION"));
    match series(release) {
        Some(series) if series < OLDEST => {
            let (major, minor) = OLDEST;
            let advice = format!("boot Linux {major}.{minor} or later, which this library needs");
            findings.problem("versions", message, advice);
        }
        _ => findings.ok("versions", message),
    }
}

/// Looks at modules; returns whether the kernel's RDMA core is loaded, or may be.
fn modules(findings: &mut Findings) -> bool {
    let absence = absence();
    let Some(modules) = &absence.modules else {
        findings.warning(
            "modules",
            "sysfs is not mounted, so that modules and PCI functions cannot be told",
            "mount it: `mount -t sysfs none /sys`",
        );
        return true;
    };
    let has = |name: &str| modules.iter().any(|module| module == name);
    modules_of(modules, findings);
    if has("ib_core") && !has("rdma_ucm") {
        findings.warning(
            "modules",
            "rdma_ucm is not loaded: programs that connect by IP address do not work",
            "`modprobe rdma_ucm`",
        );
    }
    for idle in &absence.idle {
        let driver = idle.driver.as_deref().unwrap_or("no driver");
        findings.warning(
            "functions",
            format!(
                "PCI function {} ({}) has {driver} and is no RDMA device",
                idle.address, idle.pci
            ),
            format!("`modprobe {}`", idle.module),
        );
    }
    has("ib_core")
}

/// Judges the loaded modules of RDMA.
fn modules_of(loaded: &[String], findings: &mut Findings) {
    let has = |name: &str| loaded.iter().any(|module| module == name);
    match loaded {
        // The finding on devices names the module to load.
        [] => findings.note("modules", "none that has to do with RDMA is loaded"),
        _ if has("ib_core") && !has("ib_uverbs") => {
            findings.problem("modules", "ib_uverbs is not loaded", "`modprobe ib_uverbs`");
        }
        _ => findings.ok("modules", loaded.join(", ")),
    }
}

/// Reports that no device is on the route to the peer.
pub(super) fn no_route(peer: IpAddr, findings: &mut Findings) {
    findings.about_machine();
    findings.problem(
        "route",
        format!("the route to {peer} leads through no port of an RDMA device"),
        format!(
            "`ip route get {peer}` shows the interface that packets take, `rdma link` those of RDMA devices"
        ),
    );
}

fn namespaces(core: bool, findings: &mut Findings) {
    match system() {
        Ok(system) => {
            let mode = match system.netns_shared {
                Some(true) => "network namespaces share all devices",
                Some(false) => "each device belongs to one network namespace",
                None => "the kernel does not say whether network namespaces share devices",
            };
            findings.note("namespaces", mode);
            if !system.copy_on_fork {
                findings.note(
                    "fork",
                    "the kernel does not say that it copies pinned huge pages for a forked child (Linux 5.12 \
                     does): children do not get those that are registered",
                );
            }
        }
        Err(_) if !core => findings
            .note("netlink", "RDMA netlink belongs to the kernel's RDMA core, which is not loaded"),
        Err(error) => findings.warning(
            "netlink",
            format!("RDMA netlink does not answer: {error}"),
            "permit AF_NETLINK sockets (systemd: RestrictAddressFamilies=, containers: seccomp); \
             devices are found by sysfs or by their nodes until then",
        ),
    }
}

fn memlock(findings: &mut Findings) {
    let limit = getrlimit(Resource::Memlock).current;
    let status = read("/proc/self/status").unwrap_or_default();
    let users = read("/proc/self/uid_map").unwrap_or_default();
    let exempt = has_capability(&status, CAP_IPC_LOCK) && maps_all_users(&users);
    memlock_of(limit, exempt, findings);
}

fn memlock_of(limit: Option<u64>, exempt: bool, findings: &mut Findings) {
    let advice = "raise it: `ulimit -l unlimited`, limits.conf, LimitMEMLOCK=infinity, or \
                  `--ulimit memlock=-1` of a container";
    match limit {
        None => findings.ok("memlock", "unlimited"),
        Some(_) if exempt => findings.ok("memlock", "limited, which CAP_IPC_LOCK lifts"),
        Some(bytes) => {
            let message = format!("this process may lock {} KiB of memory", bytes >> 10);
            match bytes {
                0..LITTLE_MEMLOCK => findings.problem("memlock", message, advice),
                LITTLE_MEMLOCK..SOME_MEMLOCK => findings.warning("memlock", message, advice),
                _ => findings.ok("memlock", message),
            }
        }
    }
}

/// Whether `/proc/self/status` has a bit among the effective capabilities.
fn has_capability(status: &str, bit: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> bit & 1 == 1)
}

/// Whether `/proc/self/uid_map` is that of the first user namespace. The kernel asks for the capability there: the
/// capability of a container without privileges, in a namespace of its own, lifts no limit.
fn maps_all_users(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The limits of this process's cgroup (version 2) and of those above it.
fn cgroup(membership: &str, root: &Path, findings: &mut Findings) {
    let own = membership.lines().find_map(|line| line.strip_prefix("0::/"));
    let Some(own) = own else { return };
    let mut folder = root.join(own);
    let mut limited = false;
    while folder.starts_with(root) {
        let limits = fs::read_to_string(folder.join("rdma.max")).unwrap_or_default();
        let current = fs::read_to_string(folder.join("rdma.current")).unwrap_or_default();
        for (device, kind, limit) in limits.lines().flat_map(limits_of) {
            limited = true;
            let mut used = current.lines().flat_map(limits_of);
            let used = used.find(|(of, other, _)| (*of, *other) == (device, kind));
            let used = used.map_or(0, |(_, _, count)| count);
            let message = format!(
                "{device}: {used} of {limit} {kind} in use, by rdma.max of {}",
                folder.display()
            );
            if used >= limit {
                let advice = format!("raise it: `echo \"{device} {kind}=N\" > rdma.max` there");
                findings.problem("cgroup", message, advice);
            } else {
                findings.note("cgroup", message);
            }
        }
        if !folder.pop() {
            break;
        }
    }
    if !limited {
        findings.ok("cgroup", "rdma.max limits nothing");
    }
}

/// The kinds, uses and limits in a line `rxe0 hca_handle=2 hca_object=max`.
fn limits_of(line: &str) -> Vec<(&str, &str, u64)> {
    let mut words = line.split_whitespace();
    let device = words.next().unwrap_or("");
    let limit = |word| {
        let (kind, limit) = str::split_once(word, '=')?;
        Some((device, kind, limit.parse().ok()?))
    };
    words.filter_map(limit).collect()
}

fn huge_pages(meminfo: &str, findings: &mut Findings) {
    let value = |name| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    match (value("HugePages_Total:"), value("HugePages_Free:"), value("Hugepagesize:")) {
        (Some(0), ..) => findings.note(
            "huge pages",
            "none are reserved; `sysctl vm.nr_hugepages=N` reserves some for programs that ask for them",
        ),
        (Some(total), Some(free), Some(size)) => {
            findings.note("huge pages", format!("{free} of {total} are free, {size} KiB each"));
        }
        _ => findings.note("huge pages", "the kernel does not say"),
    }
}

fn iommu(findings: &mut Findings) {
    let groups = fs::read_dir("/sys/kernel/iommu_groups").map(Iterator::count).unwrap_or(0);
    let passthrough = fs::read_to_string("/sys/kernel/iommu_groups/0/type")
        .is_ok_and(|kind| kind.trim() == "identity");
    findings.note(
        "iommu",
        match (groups, passthrough) {
            (0, _) => "none is in use",
            (_, true) => "in use, passing addresses through",
            (_, false) => {
                "in use, translating: each registration maps its pages there; `iommu=pt` on the \
                 kernel's command line avoids that cost"
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn levels(look: impl FnOnce(&mut Findings)) -> Vec<(&'static str, Level)> {
        let mut findings = Findings::default();
        look(&mut findings);
        findings.found.iter().map(|finding| (finding.check, finding.level)).collect()
    }

    #[test]
    fn little_memlock_is_a_problem_unless_a_capability_lifts_it() {
        let of = |limit, exempt| levels(|findings| memlock_of(limit, exempt, findings))[0].1;
        assert_eq!(of(Some(64 << 10), false), Level::Problem);
        assert_eq!(of(Some(8 << 20), false), Level::Warning);
        assert_eq!(of(Some(1 << 30), false), Level::Ok);
        assert_eq!(of(Some(64 << 10), true), Level::Ok);
        assert_eq!(of(None, false), Level::Ok);
        assert!(has_capability("Name:\tx\nCapEff:\t0000000000004000\n", CAP_IPC_LOCK));
        assert!(!has_capability("CapEff:\t0000000000003fff\n", CAP_IPC_LOCK));
        assert!(maps_all_users("         0          0 4294967295\n"));
        assert!(!maps_all_users("         0       1000          1\n") && !maps_all_users(""));
    }

    #[test]
    fn no_module_is_no_reason_to_say_ok() {
        let of = |loaded: &[&str]| {
            let loaded: Vec<String> = loaded.iter().map(|name| (*name).into()).collect();
            levels(|findings| modules_of(&loaded, findings))
        };
        assert_eq!(of(&[]), [("modules", Level::Note)]);
        assert_eq!(of(&["ib_core"]), [("modules", Level::Problem)]);
        assert_eq!(of(&["ib_core", "ib_uverbs"]), [("modules", Level::Ok)]);
    }

    #[test]
    fn netlink_is_missed_only_where_the_core_is_loaded() {
        let of = |core| levels(|findings| namespaces(core, findings));
        // The machine of the test may have the RDMA core loaded.
        assert!(!of(false).contains(&("netlink", Level::Warning)));
        if system().is_err() {
            assert_eq!(of(true), [("netlink", Level::Warning)]);
        }
    }

    #[test]
    fn a_peer_that_no_device_reaches_is_one_problem_of_the_machine() {
        let mut findings = Findings::default();
        findings.about("rxe0 port 1");
        no_route(IpAddr::from([10, 9, 0, 1]), &mut findings);
        let [finding] = &findings.found[..] else { panic!("{findings:?}") };
        assert_eq!((finding.level, finding.subject.as_deref()), (Level::Problem, None));
        assert!(finding.message.contains("10.9.0.1"), "{}", finding.message);
    }

    #[test]
    fn a_kernel_that_is_too_old_is_a_problem() {
        let of = |release| levels(|findings| version_of(release, findings))[0].1;
        assert_eq!(of("5.4.0-216-generic"), Level::Problem);
        assert_eq!(of("5.10.0-32-amd64"), Level::Ok);
        assert_eq!(of("6.1"), Level::Ok);
        assert_eq!(of("unknown"), Level::Ok);
    }

    #[test]
    fn a_cgroup_limit_that_is_reached_is_a_problem() {
        let root = std::env::temp_dir().join(format!("uverbs-doctor-{}", std::process::id()));
        let own = root.join("outer/inner");
        fs::create_dir_all(&own).unwrap();
        fs::write(root.join("outer/rdma.max"), "rxe0 hca_handle=2 hca_object=max\n").unwrap();
        fs::write(root.join("outer/rdma.current"), "rxe0 hca_handle=2 hca_object=9\n").unwrap();
        let found = levels(|findings| cgroup("0::/outer/inner\n", &root, findings));
        assert_eq!(found, [("cgroup", Level::Problem)]);
        fs::write(root.join("outer/rdma.current"), "rxe0 hca_handle=1 hca_object=9\n").unwrap();
        let found = levels(|findings| cgroup("0::/outer/inner\n", &root, findings));
        assert_eq!(found, [("cgroup", Level::Note)]);
        fs::remove_dir_all(&root).unwrap();
    }
}
