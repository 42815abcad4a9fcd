//! PCI configuration space of one function, or of its data-direct function.
//!
//! Pairs with the guest's PCI core, and with `hw/mlx5/data_direct.c`. QEMU handles the MSI-X table and the address of
//! the BAR itself and passes on other accesses.

use crate::bar0::{MSIX_PBA, MSIX_TABLE};

/// Size of the configuration space, including the extended part.
pub const CONFIG_SIZE: usize = 4096;

const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;
const PM: usize = 0x40;
const PCIE: usize = 0x60;
const DEVICE_CONTROL: usize = PCIE + 8;
const MSIX: usize = 0x9c;
/// Of the data-direct function, which has no interrupts.
const VPD: usize = 0x9c;
const VPD_ADDRESS: usize = VPD + 2;
const VPD_DATA: usize = VPD + 4;
/// Bit of the upper byte of the address: the data are there.
const VPD_DONE: u8 = 1 << 7;

const BUS_MASTER: u8 = 1 << 2;
const FUNCTION_LEVEL_RESET: u8 = 1 << 7;

/// The configuration space.
pub struct ConfigSpace {
    bytes: Vec<u8>,
    /// Bits the guest may change.
    writable: Vec<u8>,
    kind: Kind,
}

/// The function behind it.
enum Kind {
    /// A ConnectX-5 with `vectors` MSI-X vectors and a BAR0 of `bar0_size` bytes.
    Adapter { vectors: u16, bar0_size: u64 },
    /// The data-direct function of a ConnectX-8, with its vital product data. It has neither registers nor interrupts.
    DataDirect { vital_product_data: Vec<u8> },
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
        Self::of(Kind::Adapter { vectors, bar0_size })
    }

    /// A data-direct function, which its vital product data identify: keyword `VU`.
    pub fn data_direct(vuid: &str) -> Self {
        Self::of(Kind::DataDirect { vital_product_data: vital_product_data(vuid) })
    }

    fn of(kind: Kind) -> Self {
        let mut config = Self { bytes: vec![], writable: vec![0; CONFIG_SIZE], kind };
        config.reset();
        config
    }

    /// Restores the values after power on.
    pub fn reset(&mut self) {
        let device: u16 = match self.kind {
            Kind::Adapter { .. } => 0x1017,
            Kind::DataDirect { .. } => 0x2100,
        };
        self.bytes = vec![0; CONFIG_SIZE];
        self.put(0x00, &0x15b3u16.to_le_bytes());
        self.put(0x02, &device.to_le_bytes());
        self.put(0x06, &0x0010u16.to_le_bytes()); // status: capability list
        self.put(0x2c, &0x15b3u16.to_le_bytes());
        self.put(0x2e, &0x0016u16.to_le_bytes());
        self.put(0x34, &[PM as u8]);
        // Power management version 3, D0 only.
        self.put(PM, &[0x01, PCIE as u8, 0x03, 0x00]);
        // PCI Express version 2, endpoint. The next capability is at the same place in both functions.
        self.put(PCIE, &[0x10, MSIX as u8, 0x02, 0x00]);
        self.put(PCIE + 0x04, &(1u32 << 28 | 1 << 15 | 0x2).to_le_bytes()); // FLR, role-based, 512 B
        self.put(PCIE + 0x0c, &(0x83u32 | 16 << 4).to_le_bytes()); // 8 GT/s, 16 lanes
        self.put(PCIE + 0x12, &(0x3u16 | 16 << 4).to_le_bytes());
        self.put(PCIE + 0x2c, &0xeu32.to_le_bytes());
        self.allow(COMMAND, &[0x46, 0x05]);
        self.allow(0x0c, &[0xff]);
        self.allow(0x3c, &[0xff]);
        self.allow(PM + 4, &[0x03, 0x01]);
        self.allow(DEVICE_CONTROL, &[0xff, 0x7f]);
        self.allow(PCIE + 0x10, &[0xfb, 0x0f]);
        self.allow(PCIE + 0x28, &[0xff, 0xff]);
        match self.kind {
            Kind::Adapter { vectors, bar0_size } => {
                self.put(0x0a, &[0x00, 0x02]); // class: network, Ethernet
                self.put(BAR0, &0x0cu32.to_le_bytes()); // 64 bits, prefetchable
                self.put(MSIX, &[0x11, 0x00]);
                self.put(MSIX + 2, &(vectors - 1).to_le_bytes());
                self.put(MSIX + 4, &MSIX_TABLE.to_le_bytes());
                self.put(MSIX + 8, &MSIX_PBA.to_le_bytes());
                self.allow(BAR0, &(!(bar0_size - 1)).to_le_bytes());
                self.allow(MSIX + 3, &[0xc0]);
            }
            Kind::DataDirect { .. } => {
                self.put(0x0a, &[0x00, 0x08]); // class: generic system peripheral
                self.put(VPD, &[0x03, 0x00]);
                self.allow(VPD_ADDRESS, &[0xff, 0x7f]);
            }
        }
    }

    fn put(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Fetches the four bytes of vital product data that the guest asked for by their address.
    fn fetch_vital_product_data(&mut self) {
        let Kind::DataDirect { vital_product_data } = &self.kind else { return };
        let at = u16::from_le_bytes([self.bytes[VPD_ADDRESS], self.bytes[VPD_ADDRESS + 1]]);
        let rest = vital_product_data.get(usize::from(at & 0x7fff)..).unwrap_or_default();
        let mut data = [0; 4];
        data.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        self.put(VPD_DATA, &data);
        self.bytes[VPD_ADDRESS + 1] |= VPD_DONE;
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
        let mut asked = false;
        for (at, &new) in (offset..CONFIG_SIZE).zip(from) {
            // The guest clears the bit to read. Nothing can be written.
            asked |= at == VPD_ADDRESS + 1 && new & VPD_DONE == 0;
            if at == DEVICE_CONTROL + 1 && new & FUNCTION_LEVEL_RESET != 0 {
                effect = ConfigAction::Flr;
            }
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | new & mask;
        }
        if asked {
            self.fetch_vital_product_data();
        }
        effect
    }
}

/// The product's name, and a read-only part with the identifier and a checksum:
///
/// ```text
/// 82 len16 name | 90 len16 'V' 'U' len8 identifier 'R' 'V' 1 checksum | 78
/// ```
fn vital_product_data(vuid: &str) -> Vec<u8> {
    const NAME: &[u8] = b"emulated data-direct function";
    let mut data = vec![0x82];
    data.extend((NAME.len() as u16).to_le_bytes());
    data.extend(NAME);
    data.push(0x90);
    let length = 3 + vuid.len() as u16 + 4;
    data.extend(length.to_le_bytes());
    data.extend(b"VU");
    data.push(vuid.len() as u8);
    data.extend(vuid.as_bytes());
    data.extend(b"RV\x01");
    // All bytes up to here and the checksum add up to 0.
    let sum = data.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    data.extend([sum.wrapping_neg(), 0x78]);
    data
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

    /// As `pci_vpd_read` and `pci_vpd_find_ro_info_keyword` of the kernel do it.
    #[test]
    fn vital_product_data_of_the_data_direct_function_tell_its_identifier() {
        let mut config = ConfigSpace::data_direct("who");
        assert_eq!(word(&config, 0), 0x2100_15b3);
        let mut read = Vec::new();
        for at in (0..0x40u16).step_by(4) {
            assert_eq!(config.write(VPD_ADDRESS, &at.to_le_bytes()), ConfigAction::None);
            assert_eq!(word(&config, VPD) >> 16, u32::from(at) | 0x8000, "the data are there");
            read.extend(word(&config, VPD_DATA).to_le_bytes());
        }
        let name = usize::from(read[1]);
        assert_eq!(
            (read[0], read[3 + name], &read[6 + name..12 + name]),
            (0x82, 0x90, &b"VU\x03who"[..])
        );
        let end = 6 + name + usize::from(read[4 + name]);
        assert_eq!(read[end], 0x78);
        assert_eq!(read[..end].iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        // Writes to the data are lost, and there are none behind the end.
        assert_eq!(config.write(VPD_DATA, &[1; 4]), ConfigAction::None);
        assert_eq!(config.write(VPD_ADDRESS, &[0xfc, 0x7f]), ConfigAction::None);
        assert_eq!(word(&config, VPD_DATA), 0);
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
