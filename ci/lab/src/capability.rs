//! What each device must be able to do on each kernel, and therefore which tests may not skip.
//!
//! A test that finds a capability missing skips with a reason that begins with the capability's
//! name in brackets: `[odp] not advertised`. Here stands whether that is legitimate. A name that is
//! not in the table is not: a new kind of skip is decided here, not in the test.

use crate::device::DeviceName;
use crate::kernel::KernelName;

/// When a device has something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Has {
    /// On every kernel.
    Always,
    /// From this kernel on.
    Since(KernelName),
    /// Up to this kernel.
    Until(KernelName),
    /// On no kernel of the lab.
    Never,
}

/// Capability, what soft-RoCE has, what the emulated ConnectX has.
const TABLE: &[(&str, Has, Has)] = &[
    // Verbs that both have and every test may count on.
    ("ah", Has::Always, Has::Always),
    ("atomic", Has::Always, Has::Always),
    ("cq_resize", Has::Always, Has::Always),
    ("events", Has::Always, Has::Always),
    ("info_handles", Has::Always, Has::Always),
    ("inline", Has::Always, Has::Always),
    // Links, namespaces and modules may be changed, by root: so it is in the guest.
    ("lab", Has::Always, Has::Always),
    // Software devices, made and removed on network interfaces.
    ("links", Has::Always, Has::Never),
    // What the driver of the other does not offer.
    ("sqd", Has::Always, Has::Never),
    ("srq_resize", Has::Always, Has::Never),
    ("loopback", Has::Always, Has::Always),
    ("mw1", Has::Always, Has::Always),
    ("mw2", Has::Always, Has::Always),
    ("multicast", Has::Always, Has::Always),
    ("rc", Has::Always, Has::Always),
    ("send_inv", Has::Always, Has::Always),
    ("srq", Has::Always, Has::Always),
    ("srq_limit", Has::Always, Has::Always),
    ("uc", Has::Always, Has::Always),
    ("ud", Has::Always, Has::Always),
    // A second device that the first one reaches.
    ("two_devices", Has::Always, Has::Always),
    // soft-RoCE learnt these over time.
    ("atomic_write", Has::Since(KernelName::V6_12), Has::Never),
    ("flush", Has::Since(KernelName::V6_12), Has::Never),
    ("rereg", Has::Since(KernelName::V6_12), Has::Always),
    ("last_wqe_event", Has::Since(KernelName::V6_12), Has::Always),
    ("qp_access_event", Has::Since(KernelName::Newest), Has::Always),
    ("odp", Has::Since(KernelName::Newest), Has::Never),
    ("odp_implicit", Has::Never, Has::Never),
    ("advise_mr", Has::Since(KernelName::Newest), Has::Never),
    ("netns", Has::Since(KernelName::Newest), Has::Never),
    // Set aside in the guest.
    ("huge_pages", Has::Always, Has::Always),
    // Memory to share between devices: the kernel's, whatever the RDMA device.
    ("udmabuf", Has::Since(KernelName::V6_12), Has::Since(KernelName::V6_12)),
    // A device goes while files of it are open.
    ("disassociate", Has::Since(KernelName::Newest), Has::Always),
    // Only hardware, or what emulates it.
    ("import", Has::Never, Has::Always),
    ("relaxed_ordering", Has::Always, Has::Always),
    ("mlx5", Has::Never, Has::Always),
    ("rereg_translation", Has::Never, Has::Always),
    ("var", Has::Never, Has::Always),
    ("var_tlp", Has::Never, Has::Since(KernelName::Newest)),
    ("xrc", Has::Never, Has::Always),
    ("counters", Has::Never, Has::Never),
    ("cq_moderation", Has::Never, Has::Always),
    ("masked_atomic", Has::Never, Has::Always),
    ("device_memory", Has::Never, Has::Always),
    // Later drivers register them only where the device pages on demand, which this one does not.
    ("dmabuf", Has::Never, Has::Until(KernelName::V6_12)),
    ("dmabuf_queues", Has::Never, Has::Since(KernelName::Newest)),
    // With the rules that they are received by.
    ("raw_packet", Has::Never, Has::Always),
    // The driver of later kernels looks for such a rule behind its end.
    ("flow_default", Has::Never, Has::Until(KernelName::V6_12)),
    ("timestamp", Has::Never, Has::Never),
];

/// What a run offers besides the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// rdma-core's tools are there.
    pub(crate) peers: bool,
    /// Long runs are wanted.
    pub(crate) soak: bool,
}

/// The name in brackets that a skip's reason begins with, and the rest.
pub(crate) fn split(reason: &str) -> Option<(&str, &str)> {
    let (name, rest) = reason.strip_prefix('[')?.split_once(']')?;
    (!name.is_empty()).then(|| (name, rest.trim_start()))
}

/// Why a skip with this reason is not legitimate; `None` if it is.
pub(crate) fn objection(
    reason: &str,
    device: DeviceName,
    kernel: KernelName,
    offer: Offer,
) -> Option<String> {
    let Some((name, _)) = split(reason) else {
        return Some("its reason names no capability in brackets".into());
    };
    match name {
        "peers" => return offer.peers.then(|| "the peers are there".into()),
        "soak" => return offer.soak.then(|| "long runs were asked for".into()),
        _ => {}
    }
    let Some((_, rxe, mlx5)) = TABLE.iter().find(|(known, ..)| *known == name) else {
        return Some(format!("the capability table knows no [{name}]"));
    };
    let has = match device {
        DeviceName::Rxe => *rxe,
        DeviceName::Mlx5 => *mlx5,
    };
    let expected = match has {
        Has::Always => true,
        Has::Since(first) => kernel >= first,
        Has::Until(last) => kernel <= last,
        Has::Never => false,
    };
    expected.then(|| format!("{} has [{name}] on {}", device.label(), kernel.label()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rxe(reason: &str, kernel: KernelName) -> Option<String> {
        objection(reason, DeviceName::Rxe, kernel, Offer::default())
    }

    #[test]
    fn a_skip_is_legitimate_only_where_the_device_lacks_it() {
        assert_eq!(rxe("[odp] not advertised", KernelName::V6_12), None);
        assert!(rxe("[odp] not advertised", KernelName::Newest).is_some());
        assert!(rxe("[rc] no", KernelName::V6_1).is_some());
        assert_eq!(rxe("[xrc] EOPNOTSUPP", KernelName::Newest), None);
        let mlx5 = objection("[xrc] no", DeviceName::Mlx5, KernelName::V6_1, Offer::default());
        assert!(mlx5.is_some());
    }

    #[test]
    fn unnamed_and_unknown_capabilities_are_no_excuse() {
        assert!(rxe("not today", KernelName::V6_1).is_some());
        assert!(rxe("[] empty", KernelName::V6_1).is_some());
        assert!(rxe("[phase_of_moon] wrong", KernelName::V6_1).is_some());
    }

    #[test]
    fn what_the_run_offers_may_not_be_missed() {
        let skip = |offer| objection("[peers] none", DeviceName::Rxe, KernelName::V6_1, offer);
        assert_eq!(skip(Offer::default()), None);
        assert!(skip(Offer { peers: true, soak: false }).is_some());
        let soak = Offer { peers: false, soak: true };
        assert!(objection("[soak] long", DeviceName::Rxe, KernelName::V6_1, soak).is_some());
    }

    #[test]
    fn names_are_unique() {
        for (index, (name, ..)) in TABLE.iter().enumerate() {
            assert!(!TABLE[..index].iter().any(|(earlier, ..)| earlier == name), "{name} twice");
        }
    }
}
