//! The mappings of the program: pages of registers, memory of the device, the clock.
//!
//! Pairs with `mlx5_ib_mmap` in `hw/mlx5/main.c`: the page number of an offset is a command with an index, or
//! the key of an entry that a method made.

use super::dm::DeviceMemory;
use super::{FileId, Kernel};
use crate::call::Result;
use crate::driver::Driver;
use crate::memory::{PAGE, Pages};
use rustix::io::Errno;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use uverbs_connectx::fabric::Fabric as Switch;
use uverbs_connectx::init_segment::{CLOCK_KHZ, NS_PER_TICK};
use uverbs_uapi::mlx5::context::{
    MLX5_IB_MMAP_CLOCK_INFO, MLX5_IB_MMAP_CORE_CLOCK, MLX5_IB_MMAP_DEVICE_MEM, mlx5_ib_clock_info,
};
use uverbs_uapi::mlx5::prm::opcode;
use zerocopy::IntoBytes;

/// The first command of an offset that names an entry: `MLX5_IB_MMAP_OFFSET_START`.
const FIRST_ENTRY: u64 = 9;
/// Bits of an index, and of the part of it that is below the command.
const INDEX_BITS: u32 = 16;
const LOW_BITS: u32 = 8;
/// Bits of the clock's counter, and how its ticks become nanoseconds: multiplied, and shifted.
const CLOCK_MASK: u64 = u64::MAX >> 1;
const CLOCK_SHIFT: u32 = 20;

/// Pages that the program maps: `struct rdma_user_mmap_entry`.
#[derive(Debug)]
pub(crate) enum Mapped {
    /// Pages of registers, by the number of the first UAR among them.
    Uars { pages: Arc<Pages>, first: u32 },
    /// Memory in BAR0, from this byte on.
    Bar { offset: u64, length: usize },
}

/// Held by each mapping of an entry: the resource behind the entry is not reused before the last mapping is gone.
#[derive(Debug)]
pub(crate) struct Lease;

/// An entry: `struct rdma_user_mmap_entry`.
#[derive(Debug)]
pub(super) struct Entry {
    mapped: Mapped,
    lease: Arc<Lease>,
}

/// A resource that is freed with its last mapping.
#[derive(Debug)]
pub(crate) enum Leaving {
    /// The number of a UAR, and the user context that owns it.
    Uar {
        number: u32,
        uid: u16,
    },
    DeviceMemory(DeviceMemory),
}

impl Leaving {
    fn give_back(&self, driver: &mut Driver, switch: &mut Switch) -> Result<()> {
        match self {
            Leaving::Uar { number, .. } => {
                driver.execute_on(switch, opcode::DEALLOC_UAR, *number).map(drop)
            }
            Leaving::DeviceMemory(memory) => memory.dealloc(driver, switch),
        }
    }
}

/// The location of pages that the program maps.
pub(crate) enum Shown {
    Pages(Arc<Pages>),
    /// Memory in BAR0, which stays as long as the kernel.
    Bar(NonNull<u8>),
}

/// The clock's pages, which are brought up to date when the program looks at them.
#[derive(Debug)]
pub(crate) struct ClockPages {
    counter: Arc<Pages>,
    info: Arc<Pages>,
}

impl ClockPages {
    pub(crate) fn new() -> ClockPages {
        let pages = ClockPages { counter: Pages::new(PAGE), info: Pages::new(PAGE) };
        pages.explain();
        pages
    }

    fn update(&self, now: u64) {
        let ticks = (now / NS_PER_TICK) & CLOCK_MASK;
        self.counter.store(0, &ticks.to_be_bytes());
    }

    /// Writes the page that turns ticks into nanoseconds: both clocks began at the same time.
    fn explain(&self) {
        let info = mlx5_ib_clock_info {
            mult: (NS_PER_TICK as u32) << CLOCK_SHIFT,
            shift: CLOCK_SHIFT,
            mask: CLOCK_MASK,
            overflow_period: CLOCK_MASK / 2 / CLOCK_KHZ / 1000,
            ..Default::default()
        };
        self.info.store(0, info.as_bytes());
    }
}

/// The command of a page number, and its index.
fn parts(page: u64) -> (u64, u64) {
    let command = page >> LOW_BITS & 0xff;
    let index = page >> INDEX_BITS << LOW_BITS | page & 0xff;
    (command, index)
}

/// The key of device memory by its index.
pub(super) fn device_memory_key(index: u64) -> u64 {
    u64::from(MLX5_IB_MMAP_DEVICE_MEM) << INDEX_BITS | index
}

impl Kernel {
    /// Maps `length` bytes at `offset`.
    pub(crate) fn map(
        &mut self,
        file: FileId,
        offset: u64,
        length: usize,
        read_only: bool,
        now: u64,
    ) -> Result<(Shown, Arc<Lease>)> {
        let size = rustix::param::page_size();
        let page = offset / size as u64;
        let (command, index) = parts(page);
        let is_clock = [MLX5_IB_MMAP_CORE_CLOCK, MLX5_IB_MMAP_CLOCK_INFO]
            .into_iter()
            .find(|clock| u64::from(*clock) == command && page < FIRST_ENTRY << INDEX_BITS);
        if let Some(clock) = is_clock {
            let pages = self.map_clock(file, clock, length, read_only, now)?;
            return Ok((Shown::Pages(pages), Arc::new(Lease)));
        }
        let key = match page < FIRST_ENTRY << INDEX_BITS {
            true if command == u64::from(MLX5_IB_MMAP_DEVICE_MEM) => device_memory_key(index),
            true => return Err(Errno::INVAL),
            false => page,
        };
        let open = self.file(file)?;
        let entry = open.mapped.get(&key).filter(|_| !open.unmapped.contains(&key));
        let Entry { mapped, lease } = entry.ok_or(Errno::INVAL)?;
        let lease = lease.clone();
        let shown = match mapped {
            Mapped::Uars { pages, .. } if length == pages.len() => Shown::Pages(pages.clone()),
            Mapped::Bar { offset, length: whole } if length == *whole => {
                let offset = *offset;
                let (driver, switch) = self.driver(file)?;
                Shown::Bar(driver.bar(switch, offset, length).ok_or(Errno::INVAL)?)
            }
            _ => return Err(Errno::INVAL),
        };
        Ok((shown, lease))
    }

    fn map_clock(
        &mut self,
        file: FileId,
        which: u32,
        length: usize,
        read_only: bool,
        now: u64,
    ) -> Result<Arc<Pages>> {
        let size = rustix::param::page_size();
        if length != size {
            return Err(Errno::INVAL);
        }
        if !read_only {
            return Err(Errno::PERM);
        }
        // Larger pages would show more than the counter.
        if which == MLX5_IB_MMAP_CORE_CLOCK && size > PAGE {
            return Err(Errno::OPNOTSUPP);
        }
        let (driver, _) = self.driver(file)?;
        driver.clock.update(now);
        let pages = match which {
            MLX5_IB_MMAP_CORE_CLOCK => &driver.clock.counter,
            _ => &driver.clock.info,
        };
        Ok(pages.clone())
    }

    /// Called before the program loads from the pages at `offset`.
    pub(crate) fn looked_at(&mut self, file: FileId, offset: u64, now: u64) {
        let (command, _) = parts(offset / rustix::param::page_size() as u64);
        let clocks = [MLX5_IB_MMAP_CORE_CLOCK, MLX5_IB_MMAP_CLOCK_INFO];
        if clocks.into_iter().any(|clock| u64::from(clock) == command) {
            if let Ok((driver, _)) = self.driver(file) {
                driver.clock.update(now);
            }
        }
    }

    /// Adds pages for the program to map; returns the page number of their offset.
    pub(crate) fn add_mapped(&mut self, file: FileId, mapped: Mapped) -> Result<u64> {
        self.add_entry(file, mapped, FIRST_ENTRY << INDEX_BITS)
    }

    /// Adds an entry under the first free key from `first` on.
    fn add_entry(&mut self, file: FileId, mapped: Mapped, first: u64) -> Result<u64> {
        let entries = &mut self.file_mut(file)?.mapped;
        let key = super::first_free(entries, first);
        if key > first | 0xffff {
            return Err(Errno::NOMEM);
        }
        let entry = Entry { mapped, lease: Arc::new(Lease) };
        entries.insert(key, entry);
        Ok(key)
    }

    /// Ends an entry. The pages behind it go with the last mapping.
    pub(super) fn remove_mapped(&mut self, file: FileId, key: u64) -> Result<()> {
        let lease = self.lease(file, key)?;
        let file = self.file_mut(file)?;
        match lease.strong_count() {
            // Only the entry itself holds the lease.
            1 => drop(file.mapped.remove(&key)),
            _ => file.unmapped.push(key),
        }
        Ok(())
    }

    /// Ends an entry, and gives its resource back to the device now or with the last mapping. `mlx5_ib_mmap_free` has
    /// nobody to tell of a refusal, and firmware keeps a UAR that a queue of DEVX rings until the context closes; here it
    /// is given back when firmware takes it.
    pub(super) fn end_mapped(&mut self, file: FileId, key: u64, leaving: Leaving) -> Result<()> {
        let lease = self.lease(file, key)?;
        let (driver, switch) = self.driver(file)?;
        if lease.strong_count() > 1 || leaving.give_back(driver, switch).is_err() {
            driver.leaving.push((lease, leaving));
        }
        self.remove_mapped(file, key)
    }

    /// Gives back the resources whose last mapping is gone. Those that firmware refuses stay for the next call.
    pub(crate) fn reap(&mut self) {
        for file in self.files.values_mut() {
            let mapped = &mut file.mapped;
            file.unmapped.retain(|key| {
                let stays = mapped.get(key).is_some_and(|it| Arc::strong_count(&it.lease) > 1);
                if !stays {
                    mapped.remove(key);
                }
                stays
            });
        }
        let switch = &mut self.switch;
        for driver in &mut self.drivers {
            for (lease, leaving) in std::mem::take(&mut driver.leaving) {
                if lease.strong_count() > 0 || leaving.give_back(driver, switch).is_err() {
                    driver.leaving.push((lease, leaving));
                }
            }
        }
    }

    /// Adds device memory for the program to map; returns its index.
    pub(crate) fn add_device_memory(
        &mut self,
        file: FileId,
        offset: u64,
        length: usize,
    ) -> Result<u16> {
        let key = self.add_entry(file, Mapped::Bar { offset, length }, device_memory_key(0))?;
        Ok(key as u16)
    }

    /// The lease of an entry.
    pub(crate) fn lease(&self, file: FileId, key: u64) -> Result<Weak<Lease>> {
        let entry = self.file(file)?.mapped.get(&key).ok_or(Errno::INVAL)?;
        Ok(Arc::downgrade(&entry.lease))
    }

    /// Called after the program has stored `bytes` at byte `at` of the pages at `offset`.
    pub(crate) fn rung(
        &mut self,
        file: FileId,
        offset: u64,
        at: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let entry = self.file(file)?.mapped.get(&(offset >> self.page_bits));
        match entry.map(|entry| &entry.mapped) {
            Some(Mapped::Uars { first, .. }) => {
                let uar = *first + (at / PAGE) as u32;
                let (driver, switch) = self.driver(file)?;
                driver.ring(switch, uar, (at % PAGE) as u64, bytes);
            }
            Some(Mapped::Bar { offset, .. }) => {
                let offset = *offset + at as u64;
                let (driver, switch) = self.driver(file)?;
                switch.function(driver.function()).ring_page(offset, bytes);
            }
            None => {}
        }
        Ok(())
    }
}

impl Driver {
    /// The address of memory in BAR0.
    fn bar(&self, switch: &mut Switch, offset: u64, length: usize) -> Option<NonNull<u8>> {
        switch.function(self.function()).bar_address(offset, length)
    }
}
