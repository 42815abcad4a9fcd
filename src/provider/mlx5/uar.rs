//! UARs: pages of doorbell registers, and their assignment to queues.
//!
//! Pairs with `MLX5_IB_OBJECT_UAR` in `hw/mlx5/main.c`. Pages come from the kernel one by one and
//! stay with the context: a register that is given back is lent again. The kernel frees the pages with the
//! context's file; the context frees them itself if something else may keep the file open for longer.

use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::mapping::Mapping;
use crate::sync::lock::Lock;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_UAR;
use uverbs_uapi::mlx5::uar as uapi;
use uverbs_uapi::mlx5::uar::mlx5_ib_uapi_uar_alloc_type as UarType;

/// Bytes of a UAR, with system pages of any size.
const UAR: usize = 4096;
/// Offset in a UAR of its first register.
const REGISTERS: usize = 0x800;
/// Offset in a UAR of the register that arms completion queues.
const ARMING: usize = 0x20;
/// Registers of a UAR that queue pairs may use; the others are fast path registers of firmware.
const PER_UAR: usize = 2;

/// Registers that belong to one queue pair each, as long as there are queue pairs without one.
const MAX_DEDICATED: usize = 4;
/// Registers that the remaining queue pairs share.
const MAX_SHARED: usize = 12;

/// A UAR as the kernel made it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UarPage {
    pub(crate) handle: u32,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// The device's number of its first UAR.
    pub(crate) id: u32,
}

impl UarPage {
    pub(crate) fn alloc(kernel: &dyn Kernel, kind: UarType) -> Result<UarPage, Errno> {
        let (mut offset, mut length, mut id) = (0u64, 0u32, 0u32);
        let mut command = Command::new(MLX5_IB_OBJECT_UAR, uapi::MLX5_IB_METHOD_UAR_OBJ_ALLOC);
        command
            .new_handle(uapi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE)
            .u64(uapi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE, kind.0.into())
            .output(uapi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, &mut offset)
            .output(uapi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, &mut length)
            .output(uapi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, &mut id);
        kernel.execute(&mut command)?;
        let handle = command.made(uapi::MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE)?;
        Ok(UarPage { handle, offset, length, id })
    }

    pub(crate) fn map(&self, kernel: &dyn Kernel) -> Result<Mapping, Errno> {
        kernel.mapper().map(self.offset, self.length as usize)
    }

    /// Destroys a page that nothing rings.
    fn free(self, kernel: &dyn Kernel) {
        let mut command = Command::new(MLX5_IB_OBJECT_UAR, uapi::MLX5_IB_METHOD_UAR_OBJ_DESTROY);
        command.destroy(uapi::MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE, self.handle);
        // If this fails the page stays allocated until the file is closed, which does no harm.
        let _ = kernel.execute(&mut command);
    }
}

/// A register and the number by which the device knows its UAR.
#[derive(Clone, Debug)]
struct Bfreg {
    register: Arc<DoorbellRegister>,
    page_id: u32,
    /// The offset at which the file maps the page.
    mmap_offset: u64,
}

/// A register that several queue pairs ring.
#[derive(Debug)]
struct SharedBfreg {
    bfreg: Bfreg,
    users: usize,
}

/// All fields change under one lock, so there is no interleaving to explore in a loom model.
#[derive(Debug, Default)]
struct Pool {
    /// The pages that the registers below are in.
    pages: Vec<UarPage>,
    /// Registers of thread domains: the number of all, and the free ones.
    exclusive: usize,
    free_exclusive: Vec<Bfreg>,
    /// Registers of one queue pair each.
    dedicated: usize,
    free_dedicated: Vec<Bfreg>,
    shared: Vec<SharedBfreg>,
}

/// The doorbell registers of a context.
#[derive(Debug)]
pub(crate) struct Registers {
    /// Bytes of a BlueFlame register, both halves.
    bf_reg_size: usize,
    uars_per_page: usize,
    /// A register without caching or write combining, at which completion queues are armed. Queue pairs ring it
    /// if there are no BlueFlame registers. Its doorbells are single stores, which need no lock.
    non_cached: Bfreg,
    arming: Arc<DoorbellRegister>,
    /// The page of these two.
    page: UarPage,
    pool: Lock<Pool>,
}

/// The part of the pool that a lent register returns to.
#[derive(Clone, Copy, Debug)]
enum Origin {
    Exclusive,
    Dedicated,
    Shared,
    NonCached,
}

impl Registers {
    pub(crate) fn new(
        kernel: &dyn Kernel,
        bf_reg_size: u32,
        uars_per_page: u32,
    ) -> Result<Registers, Errno> {
        let page = UarPage::alloc(kernel, UarType::MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC)?;
        let made = page.map(kernel).and_then(|mapping| {
            let mapping = Arc::new(mapping);
            let register = DoorbellRegister::new(mapping.clone(), REGISTERS, 0);
            let arming = DoorbellRegister::new(mapping, ARMING, 0);
            register.zip(arming).ok_or(Errno::BADMSG)
        });
        let (register, arming) = made.inspect_err(|_| page.free(kernel))?;
        Ok(Registers {
            bf_reg_size: bf_reg_size as usize,
            uars_per_page: uars_per_page as usize,
            non_cached: Bfreg {
                register: Arc::new(register),
                page_id: page.id,
                mmap_offset: page.offset,
            },
            arming: Arc::new(arming),
            page,
            pool: Lock::default(),
        })
    }

    /// Gives all pages back, once no queue of this context can ring them any more. The kernel keeps a page
    /// that is still mapped until it is unmapped.
    pub(crate) fn close(&self, kernel: &dyn Kernel) {
        let pages = self.pool.lock().map(|mut pool| std::mem::take(&mut pool.pages));
        for page in pages.into_iter().flatten().chain([self.page]) {
            page.free(kernel);
        }
    }

    /// The register at which completion queues are armed, and the device's number of its page.
    pub(crate) fn arming(&self) -> (&Arc<DoorbellRegister>, u32) {
        (&self.arming, self.non_cached.page_id)
    }

    /// A register for one thread domain alone. The error comes with the number of registers that
    /// thread domains of this context have.
    pub(crate) fn for_thread(
        self: &Arc<Self>,
        kernel: &dyn Kernel,
    ) -> Result<RegisterLease, (Errno, usize)> {
        if self.bf_reg_size == 0 {
            return Ok(self.lend(self.non_cached.clone(), Origin::NonCached));
        }
        let mut pool = self.pool.lock().ok_or((Errno::OWNERDEAD, 0))?;
        if pool.free_exclusive.is_empty() {
            let bfregs =
                self.open_page(&mut pool, kernel).map_err(|errno| (errno, pool.exclusive))?;
            pool.exclusive += bfregs.len();
            pool.free_exclusive = bfregs;
        }
        let bfreg = pool.free_exclusive.pop().ok_or((Errno::BADMSG, 0))?;
        Ok(self.lend(bfreg, Origin::Exclusive))
    }

    /// A register for a queue pair that is under no thread domain: one of its own while there are
    /// few, then one that it shares with as few others as possible. If no page is left, it rings
    /// the non-cached page, as all queue pairs do on a machine without write combining.
    pub(crate) fn for_queue(self: &Arc<Self>, kernel: &dyn Kernel) -> RegisterLease {
        if self.bf_reg_size == 0 {
            return self.lend(self.non_cached.clone(), Origin::NonCached);
        }
        let Some(mut pool) = self.pool.lock() else {
            return self.lend(self.non_cached.clone(), Origin::NonCached);
        };
        if pool.free_dedicated.is_empty() && pool.dedicated < MAX_DEDICATED {
            if let Ok(bfregs) = self.open_page(&mut pool, kernel) {
                pool.dedicated += bfregs.len();
                pool.free_dedicated = bfregs;
            }
        }
        if let Some(bfreg) = pool.free_dedicated.pop() {
            return self.lend(bfreg, Origin::Dedicated);
        }
        let idle = pool.shared.iter().any(|shared| shared.users == 0);
        if !idle && pool.shared.len() < MAX_SHARED {
            if let Ok(bfregs) = self.open_page(&mut pool, kernel) {
                pool.shared.extend(bfregs.into_iter().map(|bfreg| SharedBfreg { bfreg, users: 0 }));
            }
        }
        match pool.shared.iter_mut().min_by_key(|shared| shared.users) {
            Some(shared) => {
                shared.users += 1;
                self.lend(shared.bfreg.clone(), Origin::Shared)
            }
            None => self.lend(self.non_cached.clone(), Origin::NonCached),
        }
    }

    /// Allocates and maps a page, and cuts it into registers.
    fn open_page(&self, pool: &mut Pool, kernel: &dyn Kernel) -> Result<Vec<Bfreg>, Errno> {
        let page = UarPage::alloc(kernel, UarType::MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF)?;
        let cut = page.map(kernel).and_then(|mapping| self.cut(&page, mapping));
        let bfregs = cut.inspect_err(|_| page.free(kernel))?;
        pool.pages.push(page);
        Ok(bfregs)
    }

    fn cut(&self, page: &UarPage, mapping: Mapping) -> Result<Vec<Bfreg>, Errno> {
        // The driver reported both numbers.
        if self.uars_per_page > mapping.len() / UAR {
            return Err(Errno::BADMSG);
        }
        let mapping = Arc::new(mapping);
        let mut bfregs = Vec::with_capacity(self.uars_per_page * PER_UAR);
        for uar in 0..self.uars_per_page {
            for nth in 0..PER_UAR {
                let offset = uar * UAR + REGISTERS + nth * self.bf_reg_size;
                let register = DoorbellRegister::new(mapping.clone(), offset, self.bf_reg_size / 2)
                    .ok_or(Errno::BADMSG)?;
                let page_id = page.id.checked_add(uar as u32).ok_or(Errno::BADMSG)?;
                let register = Arc::new(register);
                bfregs.push(Bfreg { register, page_id, mmap_offset: page.offset });
            }
        }
        // Reversed, because registers are taken from the end.
        bfregs.reverse();
        Ok(bfregs)
    }

    fn lend(self: &Arc<Self>, bfreg: Bfreg, origin: Origin) -> RegisterLease {
        RegisterLease { bfreg, origin, home: self.clone() }
    }

    fn take_back(&self, bfreg: &Bfreg, origin: Origin) {
        let Some(mut pool) = self.pool.lock() else { return };
        match origin {
            Origin::Exclusive => pool.free_exclusive.push(bfreg.clone()),
            Origin::Dedicated => pool.free_dedicated.push(bfreg.clone()),
            Origin::Shared => {
                let same = |shared: &&mut SharedBfreg| {
                    Arc::ptr_eq(&shared.bfreg.register, &bfreg.register)
                };
                if let Some(shared) = pool.shared.iter_mut().find(same) {
                    shared.users -= 1;
                }
            }
            Origin::NonCached => {}
        }
    }
}

/// A register, lent until this is dropped.
#[derive(Debug)]
pub(crate) struct RegisterLease {
    bfreg: Bfreg,
    origin: Origin,
    home: Arc<Registers>,
}

impl RegisterLease {
    pub(crate) fn register(&self) -> &Arc<DoorbellRegister> {
        &self.bfreg.register
    }

    /// Whether other queue pairs may ring it at the same time, so that a BlueFlame copy needs the register's lock.
    /// Doorbells of the non-cached page are single stores, which cannot mix.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.origin, Origin::Shared)
    }

    /// The device's number of the register's UAR.
    pub(crate) fn page_id(&self) -> u32 {
        self.bfreg.page_id
    }

    pub(crate) fn mmap_offset(&self) -> u64 {
        self.bfreg.mmap_offset
    }
}

impl Drop for RegisterLease {
    fn drop(&mut self) {
        self.home.take_back(&self.bfreg, self.origin);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::sync::fork::Epoch;

    /// Pages of 4, 8, 16 and 64 KiB.
    #[test]
    fn a_page_is_cut_into_the_registers_of_each_of_its_uars() {
        for uars in [1, 2, 4, 16] {
            check_registers_of(uars);
        }
    }

    fn check_registers_of(uars: usize) {
        let length = uars * UAR;
        let file = FakeMapping::new("uars", length);
        let epoch = Epoch::current().unwrap();
        let mapping = || file.map(length, epoch).unwrap();
        let page = UarPage { handle: 1, offset: 0, length: length as u32, id: 5 };
        let register = Arc::new(DoorbellRegister::new(Arc::new(mapping()), REGISTERS, 0).unwrap());
        let with = |uars_per_page| Registers {
            bf_reg_size: 512,
            uars_per_page,
            non_cached: Bfreg { register: register.clone(), page_id: 5, mmap_offset: 0 },
            arming: register.clone(),
            page,
            pool: Lock::default(),
        };
        let registers = with(uars);
        let bfregs = registers.cut(&page, mapping()).unwrap();
        // Numbers of a driver that contradict each other.
        let last = UarPage { id: u32::MAX, ..page };
        assert_eq!(registers.cut(&last, mapping()).is_ok(), uars == 1, "{uars}");
        for many in [uars + 1, usize::MAX] {
            assert_eq!(with(many).cut(&page, mapping()).map(|cut| cut.len()), Err(Errno::BADMSG));
        }
        // Two registers of 512 bytes from 0x800 on, of each UAR of 4096 bytes.
        let places = (0..uars).flat_map(|uar| {
            [0x800, 0xa00].map(|within| (uar as u64 * 0x1000 + within, 5 + uar as u32))
        });
        assert_eq!(bfregs.len(), 2 * uars);
        for (bfreg, (offset, id)) in bfregs.iter().rev().zip(places) {
            let [first, second] = [offset, offset | 0x0101_0101_0000_0000];
            bfreg.register.doorbell(first);
            bfreg.register.doorbell(second);
            assert_eq!(bfreg.page_id, id);
            // The buffers of a register take turns.
            assert_eq!(file.read(offset, 8), first.to_ne_bytes());
            assert_eq!(file.read(offset + 256, 8), second.to_ne_bytes());
        }
    }
}
