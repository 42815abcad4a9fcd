//! A PCI function: configuration space and BAR0.
//!
//! Pairs with the session of `connectx-vfio`, through which QEMU reaches it.

use crate::bar_memory::BarMemory;
use crate::bar0;
use crate::device::Device;
use crate::guest::GuestMemory;
use crate::init_segment::InitSegment;
use crate::interrupt::{Interrupts, VECTORS};
use crate::mmio;
use crate::options::Options;
use crate::pci::{ConfigAction, ConfigSpace};

/// Offset of the interrupt pin in configuration space; 0 means none.
const INTERRUPT_PIN: u64 = 0x3d;

/// The regions of a function that can be read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// BAR0: registers, doorbells, VAR pages, device memory.
    Bar0,
    /// Configuration space.
    Config,
}

/// A PCI function.
pub struct Function {
    config: ConfigSpace,
    device: Device,
    gone: bool,
}

impl Function {
    /// A function as after power on.
    pub fn new(options: Options) -> Self {
        Self {
            config: ConfigSpace::new(VECTORS as u16, bar0::SIZE),
            device: Device::new(options, VECTORS),
            gone: false,
        }
    }

    /// Restores the state after power on, for another guest.
    pub fn restart(&mut self) {
        self.gone = false;
        self.config.reset();
        self.device.set_bus_master(false);
        self.device.memory_mut().clear();
        self.device.interrupts_mut().disconnect_all();
        self.device.reset();
        // The old guest may still have the old memory mapped.
        self.device.bar = BarMemory::new();
        self.device.init_segment = InitSegment::new();
    }

    /// Inserts the function into its slot, as after power on.
    pub fn insert(&mut self) {
        self.gone = false;
        self.reset();
        self.device.init_segment = InitSegment::new();
    }

    /// Removes the function from its slot: reads return ones and writes have no effect, until
    /// [`Function::insert`] or [`Function::restart`].
    pub fn remove(&mut self) {
        log::info!("function {} is removed", self.device.options.number);
        self.reset();
        // A guest that still has it mapped reads zeros, where a bus would return ones.
        self.device.bar.clear();
        self.gone = true;
    }

    /// A function-level reset.
    pub fn reset(&mut self) {
        if self.gone {
            return;
        }
        self.config.reset();
        self.device.set_bus_master(false);
        self.device.reset();
    }

    /// Reads; the caller has checked the range.
    pub fn read(&mut self, region: Region, offset: u64, to: &mut [u8]) {
        match region {
            Region::Config if self.gone => {
                to.fill(0xff);
                // QEMU fails when it removes a function with an interrupt pin of 0xff.
                let pin = INTERRUPT_PIN.checked_sub(offset);
                if let Some(pin) = pin.and_then(|pin| to.get_mut(pin as usize)) {
                    *pin = 0;
                }
            }
            Region::Bar0 if self.gone => to.fill(0xff),
            Region::Bar0 => mmio::read(&mut self.device, offset, to),
            Region::Config => self.config.read(offset as usize, to),
        }
    }

    /// Writes; the caller has checked the range.
    pub fn write(&mut self, region: Region, offset: u64, from: &[u8]) {
        match region {
            _ if self.gone => {}
            Region::Bar0 => mmio::write(&mut self.device, offset, from),
            Region::Config => match self.config.write(offset as usize, from) {
                ConfigAction::None => self.device.set_bus_master(self.config.bus_master()),
                ConfigAction::Flr => self.reset(),
            },
        }
    }

    /// The device behind BAR0.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The device behind BAR0, to change.
    pub fn device_mut(&mut self) -> &mut Device {
        &mut self.device
    }

    /// The file of the memory in BAR0, if the guest may map it.
    pub fn bar_file(&self) -> Option<&std::fs::File> {
        self.device.bar.file().filter(|_| self.device.options.mapped)
    }

    /// Guest memory, to map.
    pub fn memory_mut(&mut self) -> &mut GuestMemory {
        self.device.memory_mut()
    }

    /// MSI-X vectors, to connect.
    pub fn interrupts_mut(&mut self) -> &mut Interrupts {
        self.device.interrupts_mut()
    }
}
