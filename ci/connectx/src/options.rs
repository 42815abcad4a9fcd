//! What a function is made with, from the command line.

/// What a port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PortType {
    /// RoCE and a network interface.
    #[default]
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

/// How a function is made.
#[derive(Debug, Clone)]
pub struct Options {
    /// What its port is.
    pub port_type: PortType,
    /// Whether BlueFlame registers take data.
    pub write_combining: bool,
    /// Whether keys are only made and destroyed by commands, as on a function with the smallest
    /// set of capabilities.
    pub minimal: bool,
    /// Whether the guest maps VAR pages and device memory. Each other write then waits for its
    /// answer.
    pub mapped: bool,
    /// Its number on the switch, from which addresses are made.
    pub number: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port_type: PortType::Ethernet,
            write_combining: true,
            minimal: false,
            mapped: false,
            number: 0,
        }
    }
}
