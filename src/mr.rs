//! Memory regions: memory that a device, and through it a peer, may reach by a key.
//!
//! [`register`] registers memory of this process and dma-bufs ([`data_direct`] through a second function), [`device`]
//! registers memory on the device. [`memory`] reads and writes a region, [`range`] checks ranges of it, [`rereg`] changes
//! it, [`advise`] prefetches its pages, [`null`] is the region of no memory, [`any`] is a region of any memory, [`query`]
//! asks the kernel about it, and [`sharing`](crate::sharing) shares it with other processes. Pairs with
//! `core/uverbs_std_types_mr.c` and the registration commands of `core/uverbs_cmd.c`.

mod advise;
mod any;
pub(crate) mod data_direct;
mod device;
mod mapped;
mod memory;
mod null;
mod query;
mod range;
mod register;
mod rereg;
#[cfg(test)]
mod tests;

pub use advise::{Advice, OnDemandRange};
pub use any::AnyMemoryRegion;
pub use device::OnDevice;
pub use memory::HostMemory;
pub use null::NullRegion;
pub(crate) use query::RegionInfo;
pub(crate) use range::resolve;
pub use register::MrBuilder;
pub(crate) use register::{check_alignment, keep_from_children};
pub use rereg::{ExchangeError, Exchanged, Rereg};

use crate::access::Access;
use crate::context::Context;
use crate::error::{Error, ErrorWith, MemoryError};
use crate::file::File;
use crate::memory::region::{Backing, Location};
use crate::number::{Lkey, Rkey};
use crate::object::Object;
use crate::pd::PdInner;
use crate::wr::{Remote, Sge};
use memmap2::MmapMut;
use rustix::io::Errno;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

/// The reason of an `EBUSY` from changing, releasing or destroying a region.
pub(crate) const HELD: &str = "a memory window holds the region, which was handed out for a \
                               binding, or an object of DEVX keeps it: destroy or reallocate the window, \
                               destroy the object";

/// The part of a region that the windows which hold it share.
pub(crate) struct MrInner<M> {
    /// The first field: the region is deregistered before the protection domain is deallocated.
    pub(crate) object: Object<Backing<M>>,
    pub(crate) pd: Arc<PdInner>,
    pub(crate) lkey: Lkey,
    pub(crate) rkey: Rkey,
    pub(crate) access: Access,
    pub(crate) iova: u64,
    /// Whether a failed REREG left the region without a translation.
    pub(crate) dead: bool,
    /// The kernel's response when the region was imported; `None` if it was registered here.
    pub(crate) imported: Option<RegionInfo>,
}

impl<M> MrInner<M> {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.object.file()
    }

    /// Whether it was imported from another process or another context.
    pub(crate) fn is_imported(&self) -> bool {
        self.object.memory().is_some_and(|memory| memory.location() == Location::Foreign)
    }

    /// Bytes that the device can reach.
    fn reach(&self) -> u64 {
        self.object.memory().map_or(0, Backing::reach)
    }
}

impl<M> fmt::Debug for MrInner<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("device", &self.file().device.name())
            .field("lkey", &self.lkey)
            .field("rkey", &self.rkey)
            .field("access", &self.access)
            .field("addr", &self.iova)
            .field("bytes", &self.reach())
            .field("dead", &self.dead)
            .finish()
    }
}

/// Registered memory: `len` values of `T`, which the device reaches by [`lkey`](Self::lkey) and
/// peers by [`rkey`](Self::rkey).
///
/// It is not a slice. A peer that has the key may write it at any time, so this process copies in
/// and out ([`read_at`](Self::read_at), [`write_at`](Self::write_at)), or borrows it as
/// [atomics](Self::as_atomics). Reading takes `&self` and writing `&mut self`, so that threads of this
/// process do not race with each other.
///
/// `M` is the owner of the memory, which [`destroy`](Self::destroy) gives back: an anonymous mapping for
/// [`allocate`], or the vector, box or mapping given to [`register`](crate::MrBuilder::register).
/// [`MrBuilder`] lists all kinds of memory. Memory that the program keeps accessing itself is
/// [unowned](crate::MrBuilder::register_unowned): its region has keys, address and SGEs, and no access.
/// [`erase`](Self::erase) gives regions of different memory one type.
///
/// `T` may be a type of the program's own that zerocopy can make of any bytes; `examples/records.rs`
/// lets a peer write an element of such a region.
///
/// Dropping the region deregisters it and then frees the memory; while a
/// [memory window](crate::MemoryWindow#what-a-window-holds) holds the region, both happen after the window
/// is gone. If the kernel refuses to deregister it, the memory is never freed (see [`Context::leaked`]). All methods
/// may be called from any thread.
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// let pd = context.alloc_pd()?;
/// let mut region = pd.mr_builder().allocate::<u64>(512)?;
/// region.write_at(0, 42)?;
/// let sges = [region.sge(..64)?];
/// # let _ = sges; Ok(()) }
/// ```
///
/// Access to a region, and changes of it:
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, other: &uverbs::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// use std::sync::atomic::Ordering;
/// use uverbs::{Access, Rereg};
///
/// let mut region = pd.mr_builder().access(Access::ALL_REMOTE).register(vec![0u64; 512])?;
/// // SAFETY: no request and no peer accesses the region yet.
/// unsafe { region.as_mut_slice() }.fill(7);
/// // This process reads words that a peer's atomics change as atomics.
/// let counters = region.as_atomics().expect("aligned words");
/// assert_eq!(counters[0].load(Ordering::Acquire), 7);
/// // The kernel changes the rights, or the domain, of a region; if that fails, the region may be dead.
/// region.rereg(Rereg::new().access(Access::LOCAL_WRITE).protection_domain(other))?;
/// // Other memory under the same keys: peers go on, and this program gets the old memory back.
/// let (region, first_numbers) = region.exchange(vec![0u64; 512])?;
/// let numbers: Vec<u64> = region.destroy()?;
/// # drop((first_numbers, numbers)); Ok(()) }
/// ```
///
/// [`allocate`]: crate::MrBuilder::allocate
#[doc(alias = "ibv_mr")]
pub struct MemoryRegion<T = u8, M = MmapMut> {
    pub(crate) inner: Arc<MrInner<M>>,
    item: PhantomData<fn() -> T>,
}

impl<T, M> MemoryRegion<T, M> {
    pub(crate) fn of(inner: Arc<MrInner<M>>) -> Self {
        MemoryRegion { inner, item: PhantomData }
    }

    /// The key by which requests of this side name the memory.
    pub fn lkey(&self) -> Lkey {
        self.inner.lkey
    }

    /// The key by which a peer names the memory, within the rights of [`access`](Self::access).
    pub fn rkey(&self) -> Rkey {
        self.inner.rkey
    }

    /// The memory's first address in requests and for peers: its virtual address in this process,
    /// unless it was [registered at another](MrBuilder::iova).
    pub fn addr(&self) -> u64 {
        self.inner.iova
    }

    /// The number of whole values of `T` in the memory.
    #[expect(clippy::len_without_is_empty, reason = "there are no empty regions")]
    pub fn len(&self) -> usize {
        self.byte_len().checked_div(size_of::<T>()).unwrap_or(0)
    }

    /// The number of bytes that the device can reach.
    pub fn byte_len(&self) -> usize {
        usize::try_from(self.inner.reach()).unwrap_or(usize::MAX)
    }

    /// The rights that the device and peers have.
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Whether a failed [`rereg`](Self::rereg) may have left the keys without memory behind them.
    /// Such a region can only be destroyed.
    pub fn is_dead(&self) -> bool {
        self.inner.dead
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }

    /// The kernel's handle of the region, a number within its file.
    pub fn handle(&self) -> u32 {
        self.inner.object.handle()
    }

    /// The SGE of a part of the region, for a request of this side; `range` counts bytes from its beginning.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], also for more than 2^32 - 1 bytes; [`MemoryError::Dead`].
    #[doc(alias = "ibv_sge")]
    #[inline]
    pub fn sge(&self, range: impl RangeBounds<usize>) -> Result<Sge, MemoryError> {
        range::sge(self.inner.iova, self.lkey(), self.resolve(range)?)
    }

    /// The address and key by which a peer reaches the byte `offset` and those behind it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`] beyond the end; [`MemoryError::Dead`].
    #[inline]
    pub fn remote(&self, offset: usize) -> Result<Remote, MemoryError> {
        self.resolve(offset..)?;
        Ok(Remote { addr: self.inner.iova.wrapping_add(offset as u64), rkey: self.rkey() })
    }

    /// Offset and length of a range that lies in the region.
    #[inline]
    pub(crate) fn resolve(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<(usize, usize), MemoryError> {
        if self.inner.dead {
            return Err(MemoryError::Dead);
        }
        range::resolve(range, self.byte_len())
    }

    /// Deregisters the memory and gives it back; dropping the region does the same and frees it.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a [memory window](crate::MemoryWindow#what-a-window-holds) holds the region: destroy
    /// or [reallocate](crate::MemoryWindow::reallocate) the window first; and while an
    /// [object of DEVX](crate::mlx5::devx::DevxObject) keeps it. Other errors are the kernel's. The
    /// region comes back with the error.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn destroy(self) -> Result<M, ErrorWith<Self>> {
        const VERB: &str = "dereg_mr";
        let mut inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(inner) => {
                let error = Error::new(VERB, Errno::BUSY).detail(HELD);
                return Err(error.with(Self::of(inner)));
            }
        };
        if let Err(error) = inner.object.destroy() {
            return Err(error.with(Self::of(Arc::new(inner))));
        }
        match inner.object.reclaim() {
            Some(backing) => Ok(backing.into_owner()),
            None => {
                let error = Error::new(VERB, Errno::INVAL).detail("the region has no memory");
                Err(error.with(Self::of(Arc::new(inner))))
            }
        }
    }
}

impl<T, M> fmt::Debug for MemoryRegion<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
