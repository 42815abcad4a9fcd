//! The properties of a device of a fabric.

use std::net::IpAddr;
pub use uverbs_connectx::options::Limits;
use uverbs_connectx::options::{Options, PortType};

/// A device of a fabric: its name, its addresses, and its capabilities.
///
/// [`Profile::new`] is an emulated ConnectX-5 with all its capabilities. Other methods take some away.
///
/// A device has one port, as each PCI function has since ConnectX-4: a card with two ports is two devices.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Profile {
    pub(crate) name: Option<String>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) jumbo_frames: bool,
    pub(crate) options: Options,
}

impl Profile {
    /// An emulated ConnectX-5: one Ethernet port with RoCE.
    pub fn new() -> Profile {
        Profile::default()
    }

    /// The name, in place of `mlx5_` and the device's number. Names have 1 to 63 characters.
    pub fn name(mut self, name: impl Into<String>) -> Profile {
        self.name = Some(name.into());
        self
    }

    /// An address of the port's network interface, beside its link-local one and in place of 10.0.0.1 for the first
    /// device, 10.0.0.2 for the second and so on. May be called several times.
    pub fn address(mut self, address: IpAddr) -> Profile {
        self.addresses.push(address);
        self
    }

    /// An InfiniBand port in place of an Ethernet one, with a LID. Its addresses are of IP over InfiniBand (IPoIB), in
    /// the partition of the first key: `rdma_cm` resolves them to path records with LIDs. [`pkeys`](Self::pkeys) sets
    /// the partition keys. A multicast group cannot be joined by address, as the subnet administrator keeps none.
    pub fn infiniband(mut self) -> Profile {
        self.options.port_type = PortType::InfiniBand;
        self
    }

    /// The partition keys of an InfiniBand port, from index 0; that of a full member of the default partition, 0xffff,
    /// unless set.
    pub fn pkeys(mut self, pkeys: impl Into<Vec<u16>>) -> Profile {
        self.options.pkeys = pkeys.into();
        self
    }

    /// Frames of 9000 bytes in place of 1500: the port's MTU is 4096 in place of 1024, so that long messages have fewer
    /// packets.
    pub fn jumbo_frames(mut self) -> Profile {
        self.jumbo_frames = true;
        self
    }

    /// Without write combining: BlueFlame registers take doorbells and no WQEs.
    pub fn without_write_combining(mut self) -> Profile {
        self.options.write_combining = false;
        self
    }

    /// Limits so low that a test reaches them quickly: 16 protection domains, queues of each kind, 64 memory keys,
    /// queues of 64 WQEBBs, 255 completions, and 2 reads or atomics in flight.
    pub fn small(self) -> Profile {
        self.limits(Limits::SMALL)
    }

    /// Other limits, at most those of [`Limits::FULL`].
    pub fn limits(mut self, limits: Limits) -> Profile {
        self.options.limits = limits;
        self
    }

    /// Without extended reliable connections (XRC).
    pub fn without_xrc(mut self) -> Profile {
        self.options.xrc = false;
        self
    }

    /// Without atomics.
    pub fn without_atomics(mut self) -> Profile {
        self.options.atomics = false;
        self
    }

    /// With a data-direct function, as a ConnectX-8 has: a second PCI function, through which dma-bufs are registered.
    /// Beside dma-bufs of Linux it takes those of [`dma_buf`](crate::dma_buf).
    pub fn data_direct(mut self) -> Profile {
        self.options.data_direct = true;
        self
    }

    /// With a clock of real time, which begins at the epoch, beside that of ticks: queues may have timestamps of it.
    pub fn real_time(mut self) -> Profile {
        self.options.real_time = Some(0);
        self
    }

    /// Without extended connection establishment (ECE), and with memory keys that change by commands only: a device
    /// with the smallest set of capabilities.
    pub fn minimal(mut self) -> Profile {
        self.options.minimal = true;
        self
    }
}
