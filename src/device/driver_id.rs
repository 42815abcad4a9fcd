//! The kernel driver of a device, and the provider of this library that drives it. Pairs with `enum
//! rdma_driver_id` and the PCI table of `mlx5_core`.

use std::fmt;
use std::ops::RangeInclusive;
use uverbs_uapi::device::rdma_driver_id;

/// The kernel driver of a device: `enum rdma_driver_id`. A number unknown to this library stays a
/// value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverId(u32);

macro_rules! drivers {
    ($($(#[$doc:meta])* $name:ident = $kernel:ident, $text:literal;)*) => {
        impl DriverId {
            $($(#[$doc])* pub const $name: DriverId = DriverId(rdma_driver_id::$kernel.0);)*

            /// The drivers that this library can name.
            const NAMED: &[DriverId] = &[$(DriverId::$name),*];

            /// The driver's name, if this library knows the number.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(DriverId::$name => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

drivers! {
    /// NVIDIA ConnectX-4 and later, Connect-IB, BlueField.
    MLX5 = RDMA_DRIVER_MLX5, "mlx5";
    /// NVIDIA ConnectX-3 and earlier.
    MLX4 = RDMA_DRIVER_MLX4, "mlx4";
    /// Chelsio T3.
    CXGB3 = RDMA_DRIVER_CXGB3, "cxgb3";
    /// Chelsio T4 and later.
    CXGB4 = RDMA_DRIVER_CXGB4, "cxgb4";
    /// Mellanox InfiniHost.
    MTHCA = RDMA_DRIVER_MTHCA, "mthca";
    /// Broadcom NetXtreme-E.
    BNXT_RE = RDMA_DRIVER_BNXT_RE, "bnxt_re";
    /// Emulex OneConnect.
    OCRDMA = RDMA_DRIVER_OCRDMA, "ocrdma";
    /// NetEffect.
    NES = RDMA_DRIVER_NES, "nes";
    /// Intel Ethernet.
    IRDMA = RDMA_DRIVER_IRDMA, "irdma";
    /// VMware paravirtual.
    VMW_PVRDMA = RDMA_DRIVER_VMW_PVRDMA, "vmw_pvrdma";
    /// Marvell FastLinQ.
    QEDR = RDMA_DRIVER_QEDR, "qedr";
    /// HiSilicon.
    HNS = RDMA_DRIVER_HNS, "hns";
    /// Cisco usNIC.
    USNIC = RDMA_DRIVER_USNIC, "usnic";
    /// Soft-RoCE.
    RXE = RDMA_DRIVER_RXE, "rxe";
    /// Omni-Path.
    HFI1 = RDMA_DRIVER_HFI1, "hfi1";
    /// QLogic InfiniBand.
    QIB = RDMA_DRIVER_QIB, "qib";
    /// Amazon Elastic Fabric Adapter.
    EFA = RDMA_DRIVER_EFA, "efa";
    /// Soft-iWARP.
    SIW = RDMA_DRIVER_SIW, "siw";
    /// Alibaba Elastic RDMA.
    ERDMA = RDMA_DRIVER_ERDMA, "erdma";
    /// Microsoft Azure.
    MANA = RDMA_DRIVER_MANA, "mana";
    /// AMD Pensando.
    IONIC = RDMA_DRIVER_IONIC, "ionic";
}

impl DriverId {
    /// The ids to ask a device for, in this order: those of this library's providers, then the others that it can
    /// name.
    pub(super) fn probe_order() -> impl Iterator<Item = DriverId> {
        let provided = PROVIDERS.iter().map(|provider| provider.driver);
        let is_provided = |id: &DriverId| PROVIDERS.iter().any(|known| known.driver == *id);
        provided.chain(DriverId::NAMED.iter().copied().filter(move |id| !is_provided(id)))
    }

    /// From the kernel's number.
    pub const fn new(raw: u32) -> Self {
        DriverId(raw)
    }

    /// The kernel's number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for DriverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "driver {}", self.0),
        }
    }
}

impl fmt::Debug for DriverId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DriverId({}: {self})", self.0)
    }
}

/// Vendor and device of a PCI function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PciId {
    /// Vendor, for example 0x15b3.
    pub vendor: u16,
    /// Device of that vendor, for example 0x1017.
    pub device: u16,
}

impl PciId {
    /// From a `modalias` as the PCI bus writes it, `pci:v000015B3d00001017sv…`; another bus's is
    /// `None`.
    pub(super) fn from_modalias(text: &str) -> Option<Self> {
        let (vendor, rest) = text.strip_prefix("pci:v")?.split_at_checked(8)?;
        let device = rest.strip_prefix('d')?.get(..8)?;
        let id = |digits| u16::try_from(u32::from_str_radix(digits, 16).ok()?).ok();
        Some(PciId { vendor: id(vendor)?, device: id(device)? })
    }
}

impl fmt::Display for PciId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x}", self.vendor, self.device)
    }
}

/// The part of this library that drives a device's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProviderKind {
    /// Soft-RoCE.
    Rxe,
    /// ConnectX-4 and later.
    Mlx5,
}

/// The driver that a provider speaks to, and the versions of its ABI that the provider knows.
struct SupportedDriver {
    kind: ProviderKind,
    driver: DriverId,
    abi: RangeInclusive<u32>,
}

const PROVIDERS: [SupportedDriver; 2] = [
    SupportedDriver {
        kind: ProviderKind::Rxe,
        driver: DriverId::RXE,
        // Version 1 has other padding than 2 on 32-bit machines only.
        abi: if cfg!(target_pointer_width = "64") { 1..=2 } else { 2..=2 },
    },
    SupportedDriver { kind: ProviderKind::Mlx5, driver: DriverId::MLX5, abi: 1..=1 },
];

const PCI_VENDOR_MELLANOX: u16 = 0x15b3;

/// The functions that `mlx5_core` of Linux 7.2 binds to.
const MLX5_PCI_DEVICES: [u16; 25] = [
    0x1011, // Connect-IB
    0x1012, // its virtual functions
    0x1013, // ConnectX-4
    0x1014, // its virtual functions
    0x1015, // ConnectX-4 Lx
    0x1016, // its virtual functions
    0x1017, // ConnectX-5, PCIe 3.0
    0x1018, // its virtual functions
    0x1019, // ConnectX-5 Ex
    0x101a, // its virtual functions
    0x101b, // ConnectX-6
    0x101c, // its virtual functions
    0x101d, // ConnectX-6 Dx
    0x101e, // virtual functions from ConnectX-6 Dx on
    0x101f, // ConnectX-6 Lx
    0x1021, // ConnectX-7
    0x1023, // ConnectX-8
    0x1025, // ConnectX-9
    0x1027, // ConnectX-10
    0x2101, // ConnectX-10 by NVLink
    0xa2d2, // BlueField
    0xa2d3, // its virtual functions
    0xa2d6, // BlueField-2
    0xa2dc, // BlueField-3
    0xa2df, // BlueField-4
];

/// The driver of a PCI function, for a kernel that tells the function's ids and not its driver.
pub(super) fn driver_of_pci(pci: PciId) -> Option<DriverId> {
    (pci.vendor == PCI_VENDOR_MELLANOX && MLX5_PCI_DEVICES.contains(&pci.device))
        .then_some(DriverId::MLX5)
}

/// The reason why no provider drives a device.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mismatch {
    /// There is none for this driver.
    Driver,
    /// There is one, for other versions of the driver's ABI.
    Abi(RangeInclusive<u32>),
}

/// The provider for a driver with version `abi` of its ABI.
pub(super) fn provider_of(driver: DriverId, abi: u32) -> Result<ProviderKind, Mismatch> {
    match PROVIDERS.iter().find(|provider| provider.driver == driver) {
        None => Err(Mismatch::Driver),
        Some(provider) if provider.abi.contains(&abi) => Ok(provider.kind),
        Some(provider) => Err(Mismatch::Abi(provider.abi.clone())),
    }
}

/// The provider for a driver, for any version of the driver's ABI.
pub(super) fn any_provider_of(driver: DriverId) -> Option<ProviderKind> {
    PROVIDERS.iter().find(|provider| provider.driver == driver).map(|provider| provider.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modalias_gives_pci_ids() {
        let text = "pci:v000015B3d00001017sv000015B3sd00000007bc02sc00i00";
        let pci = PciId::from_modalias(text).unwrap();
        assert_eq!(pci, PciId { vendor: 0x15b3, device: 0x1017 });
        assert_eq!(pci.to_string(), "15b3:1017");
        assert_eq!(driver_of_pci(pci), Some(DriverId::MLX5));
        assert_eq!(driver_of_pci(PciId { vendor: 0x15b3, device: 0x1003 }), None);
        assert_eq!(driver_of_pci(PciId { vendor: 0x8086, device: 0x1017 }), None);
    }

    #[test]
    fn other_modaliases_give_none() {
        for text in [
            "",
            "pci:v",
            "pci:v000015B3",
            "pci:v000015B3d0000101",
            "pci:v000015B3x00001017",
            "pci:v000A15B3d00001017",
            "pci:v0000ä15B3d00001017",
            "auxiliary:mlx5_core.sf",
            "virtio:d00000001v00001AF4",
        ] {
            assert_eq!(PciId::from_modalias(text), None, "{text:?}");
        }
    }

    #[test]
    fn providers_know_their_abi() {
        assert_eq!(provider_of(DriverId::RXE, 2), Ok(ProviderKind::Rxe));
        assert_eq!(provider_of(DriverId::MLX5, 1), Ok(ProviderKind::Mlx5));
        assert_eq!(provider_of(DriverId::MLX5, 2), Err(Mismatch::Abi(1..=1)));
        let oldest = if cfg!(target_pointer_width = "64") { 1 } else { 2 };
        assert_eq!(provider_of(DriverId::RXE, oldest - 1), Err(Mismatch::Abi(oldest..=2)));
        assert_eq!(provider_of(DriverId::SIW, 1), Err(Mismatch::Driver));
        assert_eq!(provider_of(DriverId::new(0), 1), Err(Mismatch::Driver));
    }

    #[test]
    fn unknown_drivers_still_have_a_name() {
        assert_eq!(DriverId::IRDMA.to_string(), "irdma");
        assert_eq!(DriverId::RXE.get(), 14);
        assert_eq!(DriverId::new(77).to_string(), "driver 77");
        assert_eq!(DriverId::new(77).name(), None);
    }
}
