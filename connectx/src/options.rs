//! Options of a function, from the command line.

/// The key of a full member of the default partition.
const DEFAULT_PKEY: u16 = 0xffff;

/// Type of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PortType {
    /// RoCE and Ethernet.
    #[default]
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

/// Limits of a function, as binary logarithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub log_max_qp: u8,
    /// CQs.
    pub log_max_cq: u8,
    /// SRQs.
    pub log_max_srq: u8,
    /// PDs.
    pub log_max_pd: u8,
    /// Memory keys.
    pub log_max_mkey: u8,
    /// WQEs of a send or receive queue.
    pub log_max_qp_sz: u8,
    /// Receives of an SRQ.
    pub log_max_srq_sz: u8,
    /// Entries of a CQ.
    pub log_max_cq_sz: u8,
    /// Reads and atomics in flight, of either side of a queue pair.
    pub log_max_ra_qp: u8,
}

impl Limits {
    /// The limits of a ConnectX-5, or lower ones where the emulation has less.
    pub const FULL: Limits = Limits {
        log_max_qp: 16,
        log_max_cq: 16,
        log_max_srq: 16,
        log_max_pd: 16,
        log_max_mkey: 17,
        log_max_qp_sz: 15,
        log_max_srq_sz: 15,
        log_max_cq_sz: 22,
        log_max_ra_qp: 4,
    };

    /// The name of a limit that is 0 or above [`Limits::FULL`].
    pub fn out_of_range(&self) -> Option<&'static str> {
        let full = Limits::FULL;
        [
            ("log_max_qp", self.log_max_qp, full.log_max_qp),
            ("log_max_cq", self.log_max_cq, full.log_max_cq),
            ("log_max_srq", self.log_max_srq, full.log_max_srq),
            ("log_max_pd", self.log_max_pd, full.log_max_pd),
            ("log_max_mkey", self.log_max_mkey, full.log_max_mkey),
            ("log_max_qp_sz", self.log_max_qp_sz, full.log_max_qp_sz),
            ("log_max_srq_sz", self.log_max_srq_sz, full.log_max_srq_sz),
            ("log_max_cq_sz", self.log_max_cq_sz, full.log_max_cq_sz),
            ("log_max_ra_qp", self.log_max_ra_qp, full.log_max_ra_qp),
        ]
        .into_iter()
        .find(|(_, value, full)| !(1..=*full).contains(value))
        .map(|(name, ..)| name)
    }

    /// Limits so low that a test reaches them quickly.
    pub const SMALL: Limits = Limits {
        log_max_qp: 4,
        log_max_cq: 4,
        log_max_srq: 4,
        log_max_pd: 4,
        log_max_mkey: 6,
        log_max_qp_sz: 6,
        log_max_srq_sz: 6,
        log_max_cq_sz: 8,
        log_max_ra_qp: 1,
    };
}

/// Options of a function.
#[derive(Debug, Clone)]
pub struct Options {
    /// Type of the port.
    pub port_type: PortType,
    /// Whether BlueFlame registers take data.
    pub write_combining: bool,
    /// Whether the driver registers memory only with commands, and connections have no options (ECE), as on a device
    /// with the smallest set of capabilities.
    pub minimal: bool,
    /// Whether the guest may map VAR pages and device memory. Other writes to BAR0 then wait for a
    /// reply.
    pub mapped: bool,
    /// Partition keys of the port, from index 0. An Ethernet port has the default one alone.
    pub pkeys: Vec<u16>,
    /// Whether there are extended reliable connections.
    pub xrc: bool,
    /// Whether there are atomics.
    pub atomics: bool,
    /// Whether it has a data-direct function, as a ConnectX-8 does: a second PCI function, through which it reaches the
    /// memory of some regions.
    pub data_direct: bool,
    /// The time of its clock of real time at the start, in nanoseconds since the epoch. Without one timestamps of CQEs
    /// count ticks alone, as those of a ConnectX-5.
    pub real_time: Option<u64>,
    /// Limits of its objects.
    pub limits: Limits,
    /// The source of random numbers of a function whose port leads outside of the process, to peers that nobody vouches
    /// for: the numbers of its queue pairs and mkeys are drawn from it, in all 24 bits, and its reliable connections
    /// keep few packets in flight where some are lost.
    pub exposed: Option<fn() -> u64>,
    /// Number of the function at the switch; its addresses derive from it.
    pub number: u32,
}

impl Options {
    /// The identifier (VUID) of the function.
    pub fn vuid(&self) -> String {
        format!("UVERBS{:026X}MLNXS0D0F0", self.number)
    }

    /// The identifier that the function tells of its data-direct function, and that function in its vital product data:
    /// the driver binds those whose identifiers are the same.
    pub fn data_direct_vuid(&self) -> String {
        format!("UVERBS{:026X}MLNXS0D1F0", self.number)
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port_type: PortType::Ethernet,
            write_combining: true,
            minimal: false,
            mapped: false,
            pkeys: vec![DEFAULT_PKEY],
            xrc: true,
            atomics: true,
            data_direct: false,
            real_time: None,
            limits: Limits::FULL,
            exposed: None,
            number: 0,
        }
    }
}
