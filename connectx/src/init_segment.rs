//! The initialization segment: the first pages of BAR0.
//!
//! Pairs with `struct mlx5_init_seg` of the driver. Words are big-endian.

/// Firmware version 16.35.4030.
const FW_REV: u32 = 35 << 16 | 16;
/// Command interface revision 5, firmware sub-minor.
const CMDIF_REV: u32 = 5 << 16 | 4030;
/// log2 of the number of command slots in bits 4 to 7, and of the size of a slot in bits 0 to 3.
const QUEUE_SHAPE: u32 = (LOG_SLOTS << 4) | 6;
/// log2 of the number of command slots.
pub const LOG_SLOTS: u32 = 5;

const CMDQ_HIGH: u64 = 0x10;
const CMDQ_LOW: u64 = 0x14;
const DOORBELL: u64 = 0x18;
const INITIALIZING: u64 = 0x1fc;
const HEALTH_SEVERITY: u64 = 0x238;
const HEALTH_SYNDROME: u64 = 0x23c;
/// Flag in the word of the severity: firmware requests a reset.
const REQUIRES_RESET: u32 = 1 << 31;
const TIMER_HIGH: u64 = 0x1000;
const TIMER_LOW: u64 = 0x1004;
const HEALTH_COUNTER: u64 = 0x1010;
const REAL_TIME_HIGH: u64 = 0x1040;
const REAL_TIME_LOW: u64 = 0x1044;

/// NIC interface state, bits 8 to 10 of the low word of the command queue's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NicInterface {
    /// The driver uses the interface.
    Full = 0,
    /// After a reset: the interface does not work.
    Disabled = 1,
}

/// Written as the NIC interface state, this requests a software reset.
const SOFTWARE_RESET: u32 = 7;
/// Flag in the `initializing` word: a software reset is supported.
const RESET_SUPPORTED: u32 = 1 << 30;

/// The registers of the segment.
pub struct InitSegment {
    queue: u64,
    interface: NicInterface,
    health: u32,
    severity: u32,
}

/// The request in a write to the segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitSegmentAction {
    /// Nothing.
    None,
    /// Execute the commands in these slots.
    Commands(u32),
    /// Reset the function: the driver believes that the firmware has failed.
    Reset,
}

impl InitSegment {
    /// As after power on.
    pub fn new() -> Self {
        Self { queue: 0, interface: NicInterface::Full, health: 0, severity: 0 }
    }

    /// The state after an FLR or a software reset. The driver is not told of an FLR, and waits for the
    /// end of a software reset. In both cases it must find the interface disabled, or its commands would
    /// time out. When it writes the address of the command queue, it enables the interface.
    pub fn after_reset() -> Self {
        Self { queue: 0, interface: NicInterface::Disabled, health: 0, severity: 0 }
    }

    /// Address of the command queue, if the driver has set one.
    pub fn queue(&self) -> Option<u64> {
        (self.queue != 0 && self.interface == NicInterface::Full).then_some(self.queue)
    }

    /// Sets the health syndrome that the driver polls; 0 is healthy. With `fatal`, firmware
    /// requests a reset.
    pub fn set_health(&mut self, syndrome: u8, fatal: bool) {
        self.health = u32::from(syndrome) << 16;
        self.severity = if fatal { REQUIRES_RESET } else { 0 };
    }

    /// The word at `offset`, a multiple of 4, `now` nanoseconds after the start, when the clock of real time shows
    /// `real_time`: seconds in the upper half, nanoseconds in the lower one.
    pub fn read(&self, offset: u64, now: u64, real_time: u64) -> u32 {
        match offset {
            0x0 => FW_REV,
            0x4 => CMDIF_REV,
            CMDQ_HIGH => (self.queue >> 32) as u32,
            CMDQ_LOW => self.queue as u32 | (self.interface as u32) << 8 | QUEUE_SHAPE,
            INITIALIZING => RESET_SUPPORTED,
            HEALTH_SYNDROME => self.health,
            HEALTH_SEVERITY => self.severity,
            TIMER_HIGH => ((now / NS_PER_TICK) >> 32) as u32,
            TIMER_LOW => (now / NS_PER_TICK) as u32,
            REAL_TIME_HIGH => (real_time >> 32) as u32,
            REAL_TIME_LOW => real_time as u32,
            // The driver expects the counter to move while the device is healthy.
            HEALTH_COUNTER => (now / 10_000_000) as u32,
            _ => 0,
        }
    }

    /// Writes the word at `offset`, a multiple of 4.
    #[must_use]
    pub fn write(&mut self, offset: u64, value: u32) -> InitSegmentAction {
        match offset {
            CMDQ_HIGH => self.queue = self.queue & 0xffff_ffff | u64::from(value) << 32,
            CMDQ_LOW if value >> 8 & 7 == SOFTWARE_RESET => return InitSegmentAction::Reset,
            CMDQ_LOW => {
                self.queue = self.queue & !0xffff_ffff | u64::from(value & !0xfff);
                self.interface = if value >> 8 & 7 == NicInterface::Full as u32 {
                    NicInterface::Full
                } else {
                    NicInterface::Disabled
                };
            }
            DOORBELL => return InitSegmentAction::Commands(value),
            _ => {}
        }
        InitSegmentAction::None
    }
}

impl Default for InitSegment {
    fn default() -> Self {
        Self::new()
    }
}

/// Nanoseconds per tick of the device's clock, which runs at [`CLOCK_KHZ`].
pub const NS_PER_TICK: u64 = 1_000_000 / CLOCK_KHZ;
/// Frequency of the device's clock.
pub const CLOCK_KHZ: u64 = 250_000;
