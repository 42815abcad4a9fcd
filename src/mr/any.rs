//! Regions of any memory as one type.

use super::{HELD, MemoryError, MemoryRegion, MrInner, range};
use crate::access::Access;
use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::number::{Lkey, Rkey};
use crate::wr::{Remote, Sge};
use rustix::io::Errno;
use std::any::Any;
use std::fmt;
use std::ops::RangeBounds;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

/// A registration of memory of any kind.
trait Registration: fmt::Debug + Send + Sync {
    fn file(&self) -> &Arc<File>;

    fn handle(&self) -> u32;

    fn deregister(&mut self) -> Result<()>;
}

impl<M: Send> Registration for MrInner<M> {
    fn file(&self) -> &Arc<File> {
        self.object.file()
    }

    fn handle(&self) -> u32 {
        self.object.handle()
    }

    fn deregister(&mut self) -> Result<()> {
        self.object.destroy()
    }
}

/// A memory region of any kind: its keys, its address, its length in bytes, and the registration.
///
/// Regions of different memory have different types; this one can stand in a map with others. It is
/// made of any [`MemoryRegion`] by [`erase`](MemoryRegion::erase) or `into()`, and gives no access to
/// the memory. The region keeps the memory's owner until it is dropped.
///
/// Dropping it deregisters the memory and then frees the region's owned memory, as dropping the
/// region that it was made of does. All methods may be called from any thread.
///
/// ```no_run
/// use std::collections::HashMap;
/// use uverbs::{AnyMemoryRegion, Lkey};
///
/// # fn f(pd: &uverbs::ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// let mut regions: HashMap<Lkey, AnyMemoryRegion> = HashMap::new();
/// let pages = pd.mr_builder().allocate::<u64>(512)?.erase();
/// let table = pd.mr_builder().register(vec![0u8; 100])?.erase();
/// for region in [pages, table] {
///     regions.insert(region.lkey(), region);
/// }
/// for region in regions.into_values() {
///     // For a request here, and for a peer.
///     let (sge, remote) = (region.sge(..64)?, region.remote(64)?);
///     region.destroy()?;
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_mr")]
pub struct AnyMemoryRegion {
    registration: Arc<dyn Registration>,
    lkey: Lkey,
    rkey: Rkey,
    access: Access,
    addr: u64,
    length: usize,
    dead: bool,
}

// A panic can leave nothing half-done: the memory is not accessed through this type.
impl UnwindSafe for AnyMemoryRegion {}
impl RefUnwindSafe for AnyMemoryRegion {}

impl<T, M: Send + 'static> From<MemoryRegion<T, M>> for AnyMemoryRegion {
    fn from(region: MemoryRegion<T, M>) -> AnyMemoryRegion {
        region.erase()
    }
}

impl<T, M: Send + 'static> MemoryRegion<T, M> {
    /// The same region as a type that names neither the memory nor its elements.
    ///
    /// There is no way back. Bind [windows](crate::MemoryWindow) before; they hold the erased region as they
    /// held this one.
    pub fn erase(self) -> AnyMemoryRegion {
        AnyMemoryRegion {
            lkey: self.lkey(),
            rkey: self.rkey(),
            access: self.access(),
            addr: self.addr(),
            length: self.byte_len(),
            dead: self.is_dead(),
            registration: self.inner,
        }
    }
}

impl AnyMemoryRegion {
    /// The key by which requests of this side name the memory.
    pub fn lkey(&self) -> Lkey {
        self.lkey
    }

    /// The key by which a peer names the memory, within the rights of [`access`](Self::access).
    pub fn rkey(&self) -> Rkey {
        self.rkey
    }

    /// The memory's first address in requests and for peers, as [`MemoryRegion::addr`] says.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The number of bytes that the device can reach.
    pub fn byte_len(&self) -> usize {
        self.length
    }

    /// The rights that the device and peers have.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether a failed [`rereg`](MemoryRegion::rereg) may have left the keys without memory behind
    /// them. Such a region can only be destroyed.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.registration.file().clone() }
    }

    /// The kernel's handle of the region, a number within its file.
    pub fn handle(&self) -> u32 {
        self.registration.handle()
    }

    /// The SGE of a part of the region, for a request of this side; `range` counts bytes from its beginning.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`], also for more than 2^32 - 1 bytes; [`MemoryError::Dead`].
    #[doc(alias = "ibv_sge")]
    #[inline]
    pub fn sge(&self, range: impl RangeBounds<usize>) -> std::result::Result<Sge, MemoryError> {
        range::sge(self.addr, self.lkey, self.resolve(range)?)
    }

    /// The address and key by which a peer reaches the byte `offset` and those behind it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfRange`] beyond the end; [`MemoryError::Dead`].
    #[inline]
    pub fn remote(&self, offset: usize) -> std::result::Result<Remote, MemoryError> {
        self.resolve(offset..)?;
        Ok(Remote { addr: self.addr.wrapping_add(offset as u64), rkey: self.rkey })
    }

    #[inline]
    fn resolve(
        &self,
        range: impl RangeBounds<usize>,
    ) -> std::result::Result<(usize, usize), MemoryError> {
        if self.dead { Err(MemoryError::Dead) } else { range::resolve(range, self.length) }
    }

    /// Keeps the registration.
    pub(crate) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(self.registration.clone())
    }

    /// Deregisters the memory and frees the region's owned memory; dropping the region does the same
    /// and ignores errors.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a [memory window](crate::MemoryWindow#what-a-window-holds) holds the region: destroy
    /// or [reallocate](crate::MemoryWindow::reallocate) the window first; and while an
    /// [object of DEVX](crate::mlx5::devx::DevxObject) keeps it. Other errors are the kernel's. The
    /// region comes back with the error.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn destroy(mut self) -> std::result::Result<(), ErrorWith<Self>> {
        let destroyed = match Arc::get_mut(&mut self.registration) {
            Some(registration) => registration.deregister(),
            None => Err(Error::new("dereg_mr", Errno::BUSY).detail(HELD)),
        };
        destroyed.map_err(|error| error.with(self))
    }
}

impl fmt::Debug for AnyMemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registration.fmt(f)
    }
}
