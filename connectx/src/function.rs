//! A PCI function: configuration space and BAR0.
//!
//! Pairs with the session of `connectx-vfio`, through which QEMU reaches it.

use std::ptr::NonNull;

use crate::bar_memory::BarMemory;
use crate::bar0;
use crate::cmd::{eq, queue};
use crate::command_error::CommandError;
use crate::device::Device;
use crate::format::event::Event;
use crate::guest::GuestMemory;
use crate::init_segment::InitSegment;
use crate::interrupt::{Interrupts, VECTORS};
use crate::mmio;
use crate::options::Options;
use crate::pci::{ConfigAction, ConfigSpace};

/// Offset of the interrupt pin in configuration space; 0 means none.
const INTERRUPT_PIN: u64 = 0x3d;

/// Offset of the command register in configuration space, and the bits for memory space and bus
/// mastering.
const COMMAND_REGISTER: u64 = 4;
const MEMORY_AND_MASTER: [u8; 2] = [6, 0];

/// The regions of a function that can be read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// BAR0: registers, doorbells, VAR pages, device memory.
    Bar0,
    /// Configuration space.
    Config,
    /// Configuration space of the data-direct function.
    DataDirect,
}

/// A PCI function.
pub struct Function {
    config: ConfigSpace,
    /// Configuration space of the data-direct function. Without the option nothing reaches it.
    data_direct: ConfigSpace,
    device: Device,
    gone: bool,
}

impl Function {
    /// A function as after power on.
    pub fn new(options: Options) -> Self {
        Self {
            config: ConfigSpace::new(VECTORS as u16, bar0::SIZE),
            data_direct: ConfigSpace::data_direct(&options.data_direct_vuid()),
            device: Device::new(options, VECTORS),
            gone: false,
        }
    }

    /// Restores the state after power on, for another guest.
    pub fn restart(&mut self) {
        self.gone = false;
        self.config.reset();
        self.restart_data_direct();
        self.device.set_bus_master(false);
        self.device.memory_mut().clear();
        self.device.interrupts_mut().disconnect_all();
        self.device.reset();
        // The old guest may still have the old memory mapped.
        self.device.bar = BarMemory::new(self.device.options.mapped);
        self.device.init_segment = InitSegment::new();
    }

    /// Restores the state of the data-direct function after power on.
    pub fn restart_data_direct(&mut self) {
        self.data_direct.reset();
        self.device.set_data_direct(false);
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
            Region::Bar0 | Region::DataDirect if self.gone => to.fill(0xff),
            Region::Bar0 => mmio::read(&mut self.device, offset, to),
            Region::Config => self.config.read(offset as usize, to),
            Region::DataDirect => self.data_direct.read(offset as usize, to),
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
            Region::DataDirect => match self.data_direct.write(offset as usize, from) {
                ConfigAction::None => {
                    self.device.set_data_direct(self.data_direct.bus_master());
                }
                ConfigAction::Flr => self.restart_data_direct(),
            },
        }
    }

    /// Enables access to memory and interrupts, as a driver does in the command register: before that
    /// the function does nothing.
    pub fn enable_bus_master(&mut self) {
        self.write(Region::Config, COMMAND_REGISTER, &MEMORY_AND_MASTER);
    }

    /// Enables access to memory by the data-direct function, as its driver does.
    pub fn enable_data_direct(&mut self) {
        self.write(Region::DataDirect, COMMAND_REGISTER, &MEMORY_AND_MASTER);
    }

    /// Executes a firmware command without a command queue: the input with opcode, user context and
    /// modifier, as in `uverbs_uapi::mlx5::prm`, to an output of `out_len` bytes. Its first byte is the
    /// status ([`CommandStatus`], 0 for success), bytes 4 to 7 are the syndrome.
    ///
    /// `None` if the command gets no completion: the function is removed, may not access memory, or a
    /// test silenced the command.
    ///
    /// [`CommandStatus`]: crate::command_error::CommandStatus
    pub fn command(&mut self, input: &[u8], out_len: usize) -> Option<Vec<u8>> {
        if self.gone || !self.device.bus_master {
            return None;
        }
        queue::run_direct(&mut self.device, input, out_len)
    }

    /// A write to a UAR page that comes whole: a doorbell of a send queue (8 bytes from 0x800 on), a
    /// BlueFlame copy of a WQE to the same place, a doorbell of a CQ (8 bytes at 0x20) or of an EQ.
    /// `offset` is in the page. [`Function::write`] gathers single words instead.
    pub fn ring(&mut self, uar: u32, offset: u64, bytes: &[u8]) {
        if !self.gone && bar0::UARS.contains(&uar) && offset < bar0::PAGE {
            mmio::ring(&mut self.device, uar, offset, bytes);
        }
    }

    /// A store of `bytes` that a program of this process made at [`Function::bar_address`]: the doorbell of a
    /// virtqueue, if it is in a VAR page. `offset` is in BAR0.
    pub fn ring_page(&mut self, offset: u64, bytes: &[u8]) {
        if !self.gone {
            mmio::ring_page(&mut self.device, offset, bytes);
        }
    }

    /// Rings the doorbell of a send queue (of a queue pair or of raw packets) if its doorbell record is
    /// ahead of the last doorbell; returns whether it was. For programs whose stores to a UAR page do not reach the
    /// device.
    pub fn ring_to_record(&mut self, number: u32) -> bool {
        !self.gone && self.device.bus_master && self.device.ring_to_record(number)
    }

    /// Rings the doorbell of a CQ if the arm word of its doorbell record differs from the last doorbell;
    /// returns whether it did. The first arm word of a program may be 0, as in a new record: so a kernel writes
    /// [`NO_ARM_WORD`] there before it creates the CQ.
    ///
    /// [`NO_ARM_WORD`]: crate::object::cq::NO_ARM_WORD
    pub fn arm_from_record(&mut self, cqn: u32) -> bool {
        !self.gone && self.device.bus_master && self.device.arm_from_record(cqn)
    }

    /// Creates an EQ without memory, which CQs can name and DESTROY_EQ destroys. It gets completion
    /// events, and the events of the types in `kinds` (`crate::format::event`). [`Function::next_event`]
    /// takes them; there is nothing to arm.
    ///
    /// # Errors
    /// If there are 63 EQs.
    pub fn create_event_queue(&mut self, kinds: &[u8]) -> Result<u32, CommandError> {
        eq::create_value_eq(&mut self.device, kinds)
    }

    /// The oldest event that was not taken. Take all after each run and before an object is destroyed:
    /// events of an object stay when it is gone.
    pub fn next_event(&mut self) -> Option<Event> {
        self.device.events.pop_front()
    }

    /// Whether there are events that were not taken.
    pub fn has_events(&self) -> bool {
        !self.device.events.is_empty()
    }

    /// The address in this process of a range of VAR pages or device memory, by its offset in BAR0;
    /// `None` if the range is neither. It is valid until the function is restarted or dropped.
    pub fn bar_address(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        self.device.bar.address(offset, len)
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
        self.device.bar.file()
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
