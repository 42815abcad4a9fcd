//! PCI configuration space of one function.
//!
//! Pairs with the guest's PCI core. QEMU handles the MSI-X table and the address of the BAR itself
//! and passes on other accesses.

use crate::bar0::{MSIX_PBA, MSIX_TABLE};

/// Size of the configuration space, including the extended part.
pub const CONFIG_SIZE: usize = 4096;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const PM: usize = 0x40;
const PCIE: usize = 0x60;
const DEVICE_CONTROL: usize = PCIE + 8;
const MSIX: usize = 0x9c;

const BUS_MASTER: u8 = 1 << 2;
const FUNCTION_LEVEL_RESET: u8 = 1 << 7;

/// The configuration space.
pub struct ConfigSpace {
    bytes: Vec<u8>,
    /// Bits the guest may change.
    writable: Vec<u8>,
    vectors: u16,
    bar0_size: u64,
}

/// The request in a write to configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigAction {
    /// Nothing.
    None,
    /// A function-level reset.
    Flr,
}

impl ConfigSpace {
    /// A ConnectX-5 with `vectors` MSI-X vectors and a BAR0 of `bar0_size` bytes.
    pub fn new(vectors: u16, bar0_size: u64) -> Self {
        let mut config = Self { bytes: vec![], writable: vec![0; CONFIG_SIZE], vectors, bar0_size };
        config.reset();
        config
    }

    /// Restores the values after power on.
    pub fn reset(&mut self) {
        self.bytes = vec![0; CONFIG_SIZE];
        let (vectors, bar0_size) = (self.vectors, self.bar0_size);
        let mut put = |at: usize, value: &[u8]| {
            self.bytes[at..at + value.len()].copy_from_slice(value);
        };
        put(0x00, &0x15b3u16.to_le_bytes());
        put(0x02, &0x1017u16.to_le_bytes());
        put(0x06, &0x0010u16.to_le_bytes()); // status: capability list
        put(0x0a, &[0x00, 0x02]); // class: network, Ethernet
        put(BAR0, &0x0cu32.to_le_bytes()); // 64 bits, prefetchable
        put(0x2c, &0x15b3u16.to_le_bytes());
        put(0x2e, &0x0016u16.to_le_bytes());
        put(0x34, &[PM as u8]);
        // Power management version 3, D0 only.
        put(PM, &[0x01, PCIE as u8, 0x03, 0x00]);
        // PCI Express version 2, endpoint.
        put(PCIE, &[0x10, MSIX as u8, 0x02, 0x00]);
        put(PCIE + 0x04, &(1u32 << 28 | 1 << 15 | 0x2).to_le_bytes()); // FLR, role-based, 512 B
        put(PCIE + 0x0c, &(0x83u32 | 16 << 4).to_le_bytes()); // 8 GT/s, 16 lanes
        put(PCIE + 0x12, &(0x3u16 | 16 << 4).to_le_bytes());
        put(PCIE + 0x2c, &0xeu32.to_le_bytes());
        put(MSIX, &[0x11, 0x00]);
        put(MSIX + 2, &(vectors - 1).to_le_bytes());
        put(MSIX + 4, &MSIX_TABLE.to_le_bytes());
        put(MSIX + 8, &MSIX_PBA.to_le_bytes());

        let mut allow = |at: usize, mask: &[u8]| {
            self.writable[at..at + mask.len()].copy_from_slice(mask);
        };
        allow(COMMAND, &[0x46, 0x05]);
        allow(0x0c, &[0xff]);
        allow(0x3c, &[0xff]);
        let size_mask = !(bar0_size - 1);
        allow(BAR0, &size_mask.to_le_bytes());
        allow(PM + 4, &[0x03, 0x01]);
        allow(DEVICE_CONTROL, &[0xff, 0x7f]);
        allow(PCIE + 0x10, &[0xfb, 0x0f]);
        allow(PCIE + 0x28, &[0xff, 0xff]);
        allow(MSIX + 3, &[0xc0]);
    }

    /// Whether bus mastering is enabled: the function may access memory and raise interrupts.
    pub fn bus_master(&self) -> bool {
        self.bytes[COMMAND] & BUS_MASTER != 0
    }

    /// Reads; the caller has checked the range.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        if let Some(from) = self.bytes.get(offset..offset + to.len()) {
            to.copy_from_slice(from);
        }
    }

    /// Writes the writable bits.
    #[must_use]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> ConfigAction {
        let mut effect = ConfigAction::None;
        for (at, &new) in (offset..CONFIG_SIZE).zip(from) {
            if at == DEVICE_CONTROL + 1 && new & FUNCTION_LEVEL_RESET != 0 {
                effect = ConfigAction::Flr;
            }
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | new & mask;
        }
        effect
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(config: &ConfigSpace, at: usize) -> u32 {
        let mut bytes = [0; 4];
        config.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn the_pci_capability_list_ends() {
        let config = ConfigSpace::new(32, 32 << 20);
        let mut seen = vec![];
        let mut at = word(&config, 0x34) as usize & 0xfc;
        while at != 0 {
            seen.push(word(&config, at) as u8);
            at = word(&config, at) as usize >> 8 & 0xfc;
            assert!(seen.len() < 8);
        }
        assert_eq!(seen, [0x01, 0x10, 0x11]);
    }

    #[test]
    fn bar0_reports_its_size_and_the_ids_are_read_only() {
        let mut config = ConfigSpace::new(32, 32 << 20);
        assert_eq!(config.write(BAR0, &[0xff; 8]), ConfigAction::None);
        assert_eq!(word(&config, BAR0), 0xfe00_000c);
        assert_eq!(word(&config, BAR0 + 4), 0xffff_ffff);
        assert_eq!(config.write(0, &[0; 4]), ConfigAction::None);
        assert_eq!(word(&config, 0), 0x1017_15b3);
    }

    #[test]
    fn an_flr_request_is_reported_and_reads_back_zero() {
        let mut config = ConfigSpace::new(32, 32 << 20);
        assert_eq!(config.write(DEVICE_CONTROL, &[0x10, 0x80]), ConfigAction::Flr);
        assert_eq!(word(&config, DEVICE_CONTROL) as u16, 0x0010);
        assert!(!config.bus_master());
        assert_eq!(config.write(COMMAND, &[6, 0]), ConfigAction::None);
        assert!(config.bus_master());
        config.reset();
        assert!(!config.bus_master());
    }
}
