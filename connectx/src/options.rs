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
    /// Number of the function at the switch; its addresses derive from it.
    pub number: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port_type: PortType::Ethernet,
            write_combining: true,
            minimal: false,
            mapped: false,
            pkeys: vec![DEFAULT_PKEY],
            number: 0,
        }
    }
}
