//! The capabilities of each device on each kernel, and therefore which tests may not skip.
//!
//! A test that finds a capability missing skips with a reason that begins with the capability's
//! name in brackets: `[odp] not advertised`. This table decides whether that is legitimate. A skip
//! for a name that is not in the table never is: a new kind of skip is decided here, not in the
//! test.
//!
//! Upstream's version says which kernel has a capability. Distributions backport changes, so where
//! a capability probe needs no RDMA (a name in the BTF of a driver, a line of `/proc/misc`), the
//! probe decides. On the three kernels of a whole run, probe and version have to agree.

use crate::machine::device::DeviceName;
use crate::packages::kernel::release::{self, Series};
use anyhow::Result;
use std::collections::BTreeMap;

/// The oldest kernel that the tables were made for.
const OLDEST: Series = Series(5, 10);

/// Capabilities that kernels since 6.1 have as [`TABLE`] says and older ones have not: the first that has it.
const LATER: &[(&str, DeviceName, Series)] = &[
    ("ah", DeviceName::Rxe, Series(5, 16)),
    ("mw1", DeviceName::Rxe, Series(5, 14)),
    ("mw2", DeviceName::Rxe, Series(5, 14)),
    ("btf", DeviceName::Rxe, Series(5, 11)),
    ("dmabuf", DeviceName::Mlx5, Series(5, 12)),
    // `MLX5_IB_METHOD_DM_QUERY` came to Linux 5.13.
    ("dm_import", DeviceName::Mlx5, Series(5, 13)),
    ("rnr_wait", DeviceName::Rxe, Series(6, 0)),
    ("cm_unreachable", DeviceName::Rxe, Series(6, 0)),
    ("cm_unreachable", DeviceName::Mlx5, Series(6, 0)),
    // Read in 5.10, and seen from 6.1 on.
    ("access_errors", DeviceName::Rxe, Series(6, 1)),
    ("error_flush", DeviceName::Rxe, Series(6, 1)),
];

/// The kernels on which a device has a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Has {
    /// On every kernel since 6.1.
    Always,
    /// From this kernel on.
    Since(Series),
    /// Up to this kernel.
    Until(Series),
    /// Up to this kernel, but not from this release on of an older series, into which the change that ended
    /// it was carried back.
    UntilOrFrom(Series, Series, &'static str),
    /// Where the probe finds it; upstream has it from this kernel on.
    Probed(Probe, Series),
    /// On kernels whose pages have 4 KiB.
    WithSmallPages,
    /// On no kernel.
    Never,
}

/// A capability probe: a sign of a feature that needs no RDMA to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Probe {
    /// The BTF of a module names this function or enumerator.
    Btf { module: &'static str, name: &'static str },
    /// There is a miscellaneous device of this name.
    Misc(&'static str),
}

const fn btf(module: &'static str, name: &'static str) -> Probe {
    Probe::Btf { module, name }
}

impl Probe {
    /// The file to read.
    fn file(self) -> String {
        match self {
            Probe::Btf { module, .. } => format!("/sys/kernel/btf/{module}"),
            Probe::Misc(_) => "/proc/misc".into(),
        }
    }

    /// Whether the probe finds its sign in the file's contents.
    fn is_in(self, contents: &str) -> bool {
        match self {
            Probe::Btf { name, .. } => contents.split('\0').any(|word| word == name),
            Probe::Misc(name) => {
                contents.lines().any(|line| line.split_whitespace().nth(1) == Some(name))
            }
        }
    }
}

/// The part of a machine that decides whether the capability is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecidedBy {
    /// The driver, and so the kernel.
    Driver,
    /// The device; another one of the same driver may be different.
    Device,
    /// The lab's guest, which offers more than a production machine.
    Guest,
}

/// Capability, what decides it (driver or device), soft-RoCE, emulated ConnectX.
const TABLE: &[(&str, DecidedBy, Has, Has)] = &[
    // Verbs that both have and every test may count on.
    ("ah", DecidedBy::Driver, Has::Always, Has::Always),
    ("atomic", DecidedBy::Device, Has::Always, Has::Always),
    // The device is the guest's: it has a node, any process may open it, and no thread of a test does its work.
    ("node", DecidedBy::Guest, Has::Always, Has::Always),
    ("processes", DecidedBy::Guest, Has::Always, Has::Always),
    // Types of modules, to compare the ABI with.
    ("btf", DecidedBy::Guest, Has::Always, Has::Always),
    // Types of a module that a kernel may be built without.
    ("vdpa", DecidedBy::Guest, Has::Never, Has::Never),
    // The module rdma_ucm.
    ("cm", DecidedBy::Guest, Has::Always, Has::Always),
    (
        "cm_events",
        DecidedBy::Driver,
        Has::Probed(btf("rdma_ucm", "ucma_write_cm_event"), Series(6, 18)),
        Has::Probed(btf("rdma_ucm", "ucma_write_cm_event"), Series(6, 18)),
    ),
    // The core itself, on RoCE.
    ("cm_unreachable", DecidedBy::Driver, Has::Always, Has::Always),
    // The driver maps the counter into larger pages for nobody: these would show more than the counter.
    ("clock", DecidedBy::Driver, Has::Never, Has::WithSmallPages),
    ("cq_resize", DecidedBy::Driver, Has::Always, Has::Always),
    ("events", DecidedBy::Driver, Has::Always, Has::Always),
    ("info_handles", DecidedBy::Driver, Has::Always, Has::Always),
    ("inline", DecidedBy::Driver, Has::Always, Has::Always),
    // Nobody else uses the guest's devices.
    ("alone", DecidedBy::Guest, Has::Always, Has::Always),
    // The suites run on Ethernet links; a group of cases on InfiniBand ones.
    ("infiniband", DecidedBy::Guest, Has::Never, Has::Never),
    // Its ports are full members of their first partition.
    ("first_pkey", DecidedBy::Guest, Has::Always, Has::Always),
    // Pages that return the stored bytes, which real ones do not.
    ("shown_stores", DecidedBy::Guest, Has::Never, Has::Always),
    // Devices whose answers are on record. Those of mlx5 on 6.1 are, too.
    ("recorded", DecidedBy::Guest, Has::Since(Series(7, 0)), Has::Since(Series(7, 0))),
    // Root may change links, namespaces and modules, as in the guest.
    ("lab", DecidedBy::Guest, Has::Always, Has::Always),
    // Software devices, made and removed on network interfaces.
    ("links", DecidedBy::Guest, Has::Always, Has::Never),
    // The driver of the other device does not offer these.
    ("sqd", DecidedBy::Driver, Has::Always, Has::Never),
    ("srq_resize", DecidedBy::Driver, Has::Always, Has::Never),
    // Suspend to idle, and a clock that ends it.
    ("suspend", DecidedBy::Guest, Has::Always, Has::Always),
    ("loopback", DecidedBy::Device, Has::Always, Has::Always),
    ("mw1", DecidedBy::Device, Has::Always, Has::Always),
    ("mw2", DecidedBy::Device, Has::Always, Has::Always),
    ("multicast", DecidedBy::Device, Has::Always, Has::Always),
    ("rc", DecidedBy::Driver, Has::Always, Has::Always),
    ("access_errors", DecidedBy::Driver, Has::Always, Has::Always),
    ("error_flush", DecidedBy::Driver, Has::Always, Has::Always),
    ("rnr_wait", DecidedBy::Driver, Has::Always, Has::Always),
    ("send_inv", DecidedBy::Device, Has::Always, Has::Always),
    ("srq", DecidedBy::Driver, Has::Always, Has::Always),
    ("srq_limit", DecidedBy::Driver, Has::Always, Has::Always),
    ("uc", DecidedBy::Driver, Has::Always, Has::Always),
    ("ud", DecidedBy::Driver, Has::Always, Has::Always),
    // A second device that the first one reaches.
    ("two_devices", DecidedBy::Guest, Has::Always, Has::Always),
    // soft-RoCE gained these over time.
    (
        "atomic_write",
        DecidedBy::Driver,
        Has::Probed(btf("rdma_rxe", "RESPST_ATOMIC_WRITE_REPLY"), Series(6, 2)),
        Has::Never,
    ),
    (
        "flush",
        DecidedBy::Driver,
        Has::Probed(btf("rdma_rxe", "RESPST_PROCESS_FLUSH"), Series(6, 2)),
        Has::Never,
    ),
    (
        "rereg",
        DecidedBy::Driver,
        Has::Probed(btf("rdma_rxe", "rxe_rereg_user_mr"), Series(6, 5)),
        Has::Always,
    ),
    ("last_wqe_event", DecidedBy::Driver, Has::Since(Series(6, 5)), Has::Always),
    (
        "qp_access_event",
        DecidedBy::Driver,
        Has::Probed(btf("rdma_rxe", "RESPST_ERR_RKEY_VIOLATION_EVENT"), Series(7, 1)),
        Has::Always,
    ),
    (
        "odp",
        DecidedBy::Device,
        Has::Probed(btf("rdma_rxe", "rxe_odp_mr_init_user"), Series(6, 15)),
        Has::Never,
    ),
    (
        "out_of_order",
        DecidedBy::Device,
        Has::Never,
        Has::Probed(btf("mlx5_ib", "MLX5_IB_MODIFY_QP_OOO_DP"), Series(6, 13)),
    ),
    // A second function of a ConnectX-8: the group `data_direct` has one.
    ("data_direct", DecidedBy::Device, Has::Never, Has::Never),
    // A ConnectX-6 Dx has it: the group `real_time`.
    ("real_time", DecidedBy::Device, Has::Never, Has::Never),
    // A key of no memory.
    ("null_mr", DecidedBy::Device, Has::Never, Has::Always),
    ("odp_implicit", DecidedBy::Device, Has::Never, Has::Never),
    (
        "advise_mr",
        DecidedBy::Device,
        Has::Probed(btf("rdma_rxe", "rxe_ib_advise_mr"), Series(6, 17)),
        Has::Never,
    ),
    (
        "netns",
        DecidedBy::Guest,
        Has::Probed(btf("rdma_rxe", "rxe_ns_init"), Series(7, 1)),
        Has::Never,
    ),
    // The guest reserves them.
    ("huge_pages", DecidedBy::Guest, Has::Always, Has::Always),
    // Memory to share between devices: depends on Debian's kernel configuration.
    (
        "udmabuf",
        DecidedBy::Guest,
        Has::Probed(Probe::Misc("udmabuf"), Series(6, 12)),
        Has::Probed(Probe::Misc("udmabuf"), Series(6, 12)),
    ),
    // A device can be removed while files of it are open.
    (
        "disassociate",
        DecidedBy::Guest,
        Has::Probed(btf("rdma_rxe", "rxe_disassociate_ucontext"), Series(7, 3)),
        Has::Always,
    ),
    // Only on hardware, or emulated hardware.
    ("import", DecidedBy::Driver, Has::Never, Has::Always),
    ("relaxed_ordering", DecidedBy::Device, Has::Always, Has::Always),
    ("mlx5", DecidedBy::Driver, Has::Never, Has::Always),
    ("rereg_translation", DecidedBy::Driver, Has::Never, Has::Always),
    ("var", DecidedBy::Device, Has::Never, Has::Always),
    // The device's VARs have 4 KiB, and the driver maps whole pages of the system.
    ("var_page", DecidedBy::Device, Has::Never, Has::WithSmallPages),
    (
        "var_tlp",
        DecidedBy::Device,
        Has::Never,
        Has::Probed(btf("mlx5_ib", "MLX5_IB_UAPI_VAR_ALLOC_FLAG_TLP"), Series(7, 1)),
    ),
    ("xrc", DecidedBy::Device, Has::Never, Has::Always),
    // The emulated function is behind a LAG, and changes the source port of connected queue pairs.
    ("lag", DecidedBy::Device, Has::Never, Has::Always),
    ("udp_port", DecidedBy::Device, Has::Never, Has::Always),
    ("counters", DecidedBy::Device, Has::Never, Has::Never),
    ("cq_moderation", DecidedBy::Device, Has::Never, Has::Always),
    ("masked_atomic", DecidedBy::Device, Has::Never, Has::Always),
    ("device_memory", DecidedBy::Device, Has::Never, Has::Always),
    ("dm_import", DecidedBy::Driver, Has::Never, Has::Always),
    // Options of connections (ECE).
    ("ece", DecidedBy::Device, Has::Never, Has::Always),
    // Later drivers register them only where the device pages on demand, which this one does not.
    // Debian's 6.12.107 still takes one, and its 6.12.117 does not.
    (
        "dmabuf",
        DecidedBy::Device,
        Has::Never,
        Has::UntilOrFrom(Series(7, 1), Series(6, 12), "6.12.108"),
    ),
    (
        "dmabuf_export",
        DecidedBy::Driver,
        Has::Never,
        Has::Probed(btf("ib_uverbs", "UVERBS_ATTR_ALLOC_DMABUF_PGOFF"), Series(7, 0)),
    ),
    (
        "dmabuf_queues",
        DecidedBy::Device,
        Has::Never,
        Has::Probed(btf("ib_uverbs", "UVERBS_ATTR_CREATE_CQ_BUF_UMEM"), Series(7, 2)),
    ),
    // Raw packet queue pairs and flow rules.
    ("raw_packet", DecidedBy::Device, Has::Never, Has::Always),
    // The driver of later kernels looks for such a rule beyond the end of its table.
    ("flow_default", DecidedBy::Device, Has::Never, Has::Until(Series(6, 12))),
    ("timestamp", DecidedBy::Device, Has::Never, Has::Never),
];

/// The capabilities that differ where the lab's emulated ConnectX has InfiniBand ports.
const ON_INFINIBAND: &[(&str, Has)] = &[
    // No interface has an IP address there, and connections are made by GID.
    ("cm", Has::Never),
    ("infiniband", Has::Always),
    ("raw_packet", Has::Never),
    // Ports of RoCE alone.
    ("udp_port", Has::Never),
    // The records are of Ethernet ports.
    ("recorded", Has::Never),
];

/// Options of a run that decide about skips.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunOptions {
    /// rdma-core's tools are in the guest.
    pub(crate) peers: bool,
    /// Long tests run.
    pub(crate) soak: bool,
}

/// Splits the reason of a skip into the name in brackets and the rest.
pub(crate) fn split(reason: &str) -> Option<(&str, &str)> {
    let (name, rest) = reason.strip_prefix('[')?.split_once(']')?;
    (!name.is_empty()).then(|| (name, rest.trim_start()))
}

/// The kernel that tests run on, with the results of the probes.
#[derive(Clone, Debug)]
pub(crate) struct RunningKernel {
    device: DeviceName,
    series: Series,
    release: String,
    /// The results of the probes that could be made.
    probes: BTreeMap<Probe, bool>,
    /// Whether its pages have 4 KiB, as they do unless the kernel shows another size.
    has_small_pages: bool,
    /// Whether machine and device are the lab's.
    lab: bool,
    /// Whether the ports are the lab's InfiniBand ports.
    infiniband: bool,
}

impl RunningKernel {
    /// Probes a kernel. `read` returns the contents of one of its files, if it exists.
    pub(crate) fn probe(
        device: DeviceName,
        release: &str,
        lab: bool,
        mut read: impl FnMut(&str) -> Result<Option<String>>,
    ) -> Result<Self> {
        let mut files: BTreeMap<String, Option<String>> = BTreeMap::new();
        let mut probes = BTreeMap::new();
        for (.., rxe, mlx5) in TABLE {
            let Has::Probed(probe, _) = of(device, *rxe, *mlx5) else { continue };
            let file = probe.file();
            if !files.contains_key(&file) {
                let contents = read(&file)?;
                files.insert(file.clone(), contents);
            }
            if let Some(Some(contents)) = files.get(&file) {
                probes.insert(probe, probe.is_in(contents));
            }
        }
        let (series, release) = (Series::of(release)?, release.trim().to_owned());
        let mappings = read("/proc/self/smaps")?;
        let page = mappings.as_deref().and_then(page_of);
        let has_small_pages = page.is_none_or(|kilobytes| kilobytes == 4);
        Ok(Self { device, series, release, probes, has_small_pages, lab, infiniband: false })
    }

    /// The same kernel with ports of this link layer.
    pub(crate) fn on_infiniband(self, infiniband: bool) -> Self {
        Self { infiniband, ..self }
    }

    /// Whether the device has something on this kernel.
    fn has(&self, has: Has) -> bool {
        match has {
            Has::Always => true,
            Has::Since(first) => self.series >= first,
            Has::Until(last) => self.series <= last,
            Has::UntilOrFrom(last, older, release) => {
                let carried_back =
                    self.series == older && release::compare(&self.release, release).is_ge();
                self.series <= last && !carried_back
            }
            Has::Probed(probe, first) => {
                self.probes.get(&probe).copied().unwrap_or(self.series >= first)
            }
            Has::WithSmallPages => self.has_small_pages,
            Has::Never => false,
        }
    }

    /// Whether the table decides about such a capability.
    fn is_judged(&self, decided_by: DecidedBy) -> bool {
        let known = match decided_by {
            DecidedBy::Driver => true,
            // A software device is the same everywhere.
            DecidedBy::Device => self.lab || self.device == DeviceName::Rxe,
            DecidedBy::Guest => self.lab,
        };
        known && (self.lab || self.series >= OLDEST)
    }

    /// Probes that contradict the versions in the table, or could not be made. On a distribution's
    /// kernel that may be a backport.
    pub(crate) fn contradictions(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (name, _, rxe, mlx5) in TABLE {
            let Has::Probed(probe, first) = of(self.device, *rxe, *mlx5) else { continue };
            let series = self.series;
            match self.probes.get(&probe) {
                None => found.push(format!("[{name}] {} cannot be read", probe.file())),
                Some(shown) if *shown != (series >= first) => found.push(format!(
                    "[{name}] {series} {} {probe:?}, and the table says since {first}",
                    if *shown { "shows" } else { "does not show" }
                )),
                Some(_) => {}
            }
        }
        found
    }
}

/// KiB of a page, by what a process that has no huge pages reads of its mappings.
fn page_of(smaps: &str) -> Option<u32> {
    let mut lines = smaps.lines();
    let size = lines.find_map(|line| line.strip_prefix("KernelPageSize:"))?;
    size.trim().strip_suffix(" kB")?.parse().ok()
}

/// The entry of a device.
fn of(device: DeviceName, rxe: Has, mlx5: Has) -> Has {
    match device {
        DeviceName::Rxe => rxe,
        DeviceName::Mlx5 => mlx5,
    }
}

/// The reason why a skip is not legitimate; `None` if it is.
pub(crate) fn objection(
    reason: &str,
    running: &RunningKernel,
    options: RunOptions,
) -> Option<String> {
    let Some((name, _)) = split(reason) else {
        return Some("its reason names no capability in brackets".into());
    };
    match name {
        "peers" => return (options.peers && running.lab).then(|| "the peers are there".into()),
        "soak" => return options.soak.then(|| "long runs were asked for".into()),
        _ => {}
    }
    let Some((_, decided_by, rxe, mlx5)) = TABLE.iter().find(|(known, ..)| *known == name) else {
        return Some(format!("the capability table knows no [{name}]"));
    };
    let differs = ON_INFINIBAND.iter().find(|(known, _)| running.infiniband && *known == name);
    let has = differs.map_or(of(running.device, *rxe, *mlx5), |(_, has)| *has);
    let is_later = |(later, device, first): &(&str, DeviceName, Series)| {
        (*later, *device) == (name, running.device) && running.series < *first
    };
    let expected =
        running.is_judged(*decided_by) && running.has(has) && !LATER.iter().any(is_later);
    expected.then(|| {
        let shown = match has {
            Has::Probed(probe, _) if running.probes.contains_key(&probe) => ", as the kernel shows",
            _ => "",
        };
        format!("{} has [{name}] on Linux {}{shown}", running.device.label(), running.series)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAB: bool = true;

    /// A kernel without readable files: versions alone decide.
    fn blind(device: DeviceName, release: &str, lab: bool) -> RunningKernel {
        RunningKernel::probe(device, release, lab, |_| Ok(None)).unwrap()
    }

    fn rxe(reason: &str, release: &str) -> Option<String> {
        objection(reason, &blind(DeviceName::Rxe, release, LAB), RunOptions::default())
    }

    fn mlx5(reason: &str, release: &str) -> Option<String> {
        objection(reason, &blind(DeviceName::Mlx5, release, LAB), RunOptions::default())
    }

    /// A kernel that shows these names in the BTF of soft-RoCE.
    fn showing(release: &str, names: &str) -> RunningKernel {
        let read = |file: &str| {
            Ok(match file {
                "/sys/kernel/btf/rdma_rxe" => Some(names.replace(' ', "\0")),
                _ => Some("126 udmabuf\n".into()),
            })
        };
        RunningKernel::probe(DeviceName::Rxe, release, LAB, read).unwrap()
    }

    #[test]
    fn a_skip_is_legitimate_only_where_the_device_lacks_it() {
        assert_eq!(rxe("[odp] not advertised", "6.12.107+deb13-amd64"), None);
        assert!(rxe("[odp] not advertised", "7.3.4").is_some());
        assert!(rxe("[rc] no", "6.1.0-50-amd64").is_some());
        assert_eq!(rxe("[xrc] EOPNOTSUPP", "7.3.4"), None);
        assert!(mlx5("[xrc] no", "6.1.0-50-amd64").is_some());
    }

    #[test]
    fn kernels_between_the_three_are_judged_by_version() {
        for (reason, last_without, first_with) in [
            ("[atomic_write]", "6.1.9", "6.2.0"),
            ("[last_wqe_event]", "6.4.1", "6.5"),
            ("[odp]", "6.14.2", "6.15"),
            ("[advise_mr]", "6.16.12", "6.17.1"),
            ("[netns]", "7.0.13", "7.1.1"),
            ("[qp_access_event]", "7.0.13", "7.1.1"),
            ("[disassociate]", "7.2.12", "7.3-rc7"),
        ] {
            assert_eq!(rxe(reason, last_without), None, "{reason}");
            assert!(rxe(reason, first_with).is_some(), "{reason}");
        }
        assert!(mlx5("[dmabuf]", "6.18.15").is_some());
        assert_eq!(mlx5("[dmabuf]", "7.2.12"), None);
        assert!(mlx5("[dmabuf]", "6.12.107+deb13-amd64").is_some());
        assert_eq!(mlx5("[dmabuf]", "6.12.117+deb13-amd64"), None);
    }

    #[test]
    fn kernels_before_the_three_are_judged_by_version() {
        assert_eq!(rxe("[ah] no number", "5.10.0-32-amd64"), None);
        assert_eq!(rxe("[mw1] no", "5.10.0-32-amd64"), None);
        assert!(rxe("[ah] no", "5.16.1").is_some() && rxe("[mw1] no", "5.14").is_some());
        assert!(mlx5("[ah] no", "5.10.0-32-amd64").is_some());
        assert!(rxe("[rc] no", "5.10.0-32-amd64").is_some());
    }

    #[test]
    fn a_probe_outweighs_the_version() {
        let carried_back = showing("6.12.1", "void rxe_ns_init rxe_reg");
        let judged = |reason: &str| objection(reason, &carried_back, RunOptions::default());
        assert!(judged("[netns] no").unwrap().contains("as the kernel shows"));
        // A part of a name is no match.
        let other = showing("7.3.4", "rxe_ns_init_early my_rxe_ns_init");
        assert_eq!(objection("[netns] no", &other, RunOptions::default()), None);
        assert!(rxe("[netns] no", "7.3.4").is_some());
    }

    #[test]
    fn the_size_of_pages_decides_where_the_driver_looks_at_it() {
        let judged = |smaps: &str| {
            let read = |file: &str| {
                Ok((file == "/proc/self/smaps").then(|| format!("00-10 r-xp\n{smaps}")))
            };
            let running =
                RunningKernel::probe(DeviceName::Mlx5, "7.3.4+deb13-arm64", LAB, read).unwrap();
            objection("[clock] not mapped", &running, RunOptions::default())
        };
        assert_eq!(judged("KernelPageSize:       16 kB\nMMUPageSize:       16 kB\n"), None);
        assert!(judged("KernelPageSize:        4 kB\nMMUPageSize:        4 kB\n").is_some());
        assert!(mlx5("[clock] not mapped", "7.3.4").is_some());
    }

    #[test]
    fn contradictions_of_probe_and_version_are_reported() {
        let all = "RESPST_ATOMIC_WRITE_REPLY RESPST_PROCESS_FLUSH rxe_rereg_user_mr";
        assert_eq!(showing("6.12.1", all).contradictions(), [""; 0]);
        let told = showing("6.12.1", &format!("{all} rxe_ns_init")).contradictions();
        assert!(matches!(&told[..], [one] if one.starts_with("[netns] 6.12 shows")), "{told:?}");
        let told = showing("6.12.1", "rxe_rereg_user_mr").contradictions();
        assert_eq!(told.len(), 2, "{told:?}");
        let told = blind(DeviceName::Mlx5, "6.12.1", LAB).contradictions();
        assert!(told.iter().any(|one| one.contains("mlx5_ib cannot be read")), "{told:?}");
    }

    #[test]
    fn on_a_native_machine_only_features_of_the_driver_are_required() {
        let judged = |device, release, reason| {
            objection(reason, &blind(device, release, !LAB), RunOptions::default())
        };
        // There is no cable, and one device may lack what another has.
        assert_eq!(judged(DeviceName::Rxe, "6.18.3", "[two_devices] none"), None);
        assert_eq!(judged(DeviceName::Mlx5, "6.18.3", "[device_memory] none"), None);
        assert_eq!(judged(DeviceName::Mlx5, "6.18.3", "[sqd] the driver"), None);
        assert!(judged(DeviceName::Mlx5, "6.18.3", "[rereg] no").is_some());
        assert!(judged(DeviceName::Mlx5, "6.18.3", "[srq] no").is_some());
        assert!(judged(DeviceName::Rxe, "6.18.3", "[advise_mr] no").is_some());
        assert_eq!(judged(DeviceName::Rxe, "6.8.0-45-generic", "[advise_mr] no"), None);
        // Nothing is known of kernels before the oldest of the table.
        assert_eq!(judged(DeviceName::Mlx5, "5.4.0-216-generic", "[srq] no"), None);
    }

    #[test]
    fn infiniband_ports_lack_other_things() {
        let running = blind(DeviceName::Mlx5, "7.3.4", LAB);
        let judged = |infiniband, reason| {
            let running = running.clone().on_infiniband(infiniband);
            objection(reason, &running, RunOptions::default())
        };
        assert_eq!(judged(true, "[raw_packet] no Ethernet"), None);
        assert!(judged(false, "[raw_packet] no Ethernet").is_some());
        assert!(judged(true, "[multicast] no group").is_some());
        assert_eq!(judged(false, "[infiniband] Ethernet"), None);
        assert!(judged(true, "[infiniband] Ethernet").is_some());
        assert!(judged(true, "[xrc] no").is_some());
    }

    #[test]
    fn unnamed_and_unknown_capabilities_are_no_excuse() {
        assert!(rxe("not today", "6.1").is_some());
        assert!(rxe("[] empty", "6.1").is_some());
        assert!(rxe("[phase_of_moon] wrong", "6.1").is_some());
        let native = blind(DeviceName::Mlx5, "6.18", !LAB);
        assert!(objection("[phase_of_moon]", &native, RunOptions::default()).is_some());
    }

    #[test]
    fn a_skip_for_something_that_the_run_offers_is_refused() {
        let running = blind(DeviceName::Rxe, "6.1", LAB);
        let skip = |options| objection("[peers] none", &running, options);
        assert_eq!(skip(RunOptions::default()), None);
        assert!(skip(RunOptions { peers: true, soak: false }).is_some());
        let soak = RunOptions { peers: false, soak: true };
        assert!(objection("[soak] long", &running, soak).is_some());
    }

    #[test]
    fn names_are_unique() {
        for (index, (name, ..)) in TABLE.iter().enumerate() {
            assert!(!TABLE[..index].iter().any(|(earlier, ..)| earlier == name), "{name} twice");
        }
        for (name, _) in ON_INFINIBAND {
            assert!(TABLE.iter().any(|(known, ..)| known == name), "{name} is in no table");
        }
    }
}
