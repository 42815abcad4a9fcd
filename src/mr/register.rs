//! Registering memory. Pairs with `ib_uverbs_reg_mr` in `core/uverbs_cmd.c`, and for dma-bufs with
//! `core/uverbs_std_types_mr.c`.
//!
//! The REG_MR method of Linux 6.17 is not used: on Linux 7.2 a region that rxe made by it fails every range
//! check.

use super::{MemoryRegion, MrInner, mapped};
use crate::access::Access;
use crate::context::Context;
use crate::device::copies_on_fork;
use crate::error::{Error, ErrorWith, Result};
use crate::memory::huge_pages;
use crate::memory::region::{
    AddressSpace, Backing, Borrowed, DmaBuf, Location, Pledged, Pledges, RawRange, StableBytes,
    Unowned,
};
use crate::number::{ByteCount, Lkey, Offset, Rkey};
use crate::object::{Class, Object};
use crate::pd::{PdInner, ProtectionDomain, Sharing};
use crate::uverbs::command::Command;
use crate::uverbs::invoke_write::write;
use memmap2::MmapMut;
use rustix::io::Errno;
use rustix::param::page_size;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, mlx5_ib_uapi_reg_dmabuf_flags,
};
use uverbs_uapi::mr::{
    UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, UVERBS_ATTR_REG_DMABUF_MR_FD,
    UVERBS_ATTR_REG_DMABUF_MR_HANDLE, UVERBS_ATTR_REG_DMABUF_MR_IOVA,
    UVERBS_ATTR_REG_DMABUF_MR_LENGTH, UVERBS_ATTR_REG_DMABUF_MR_OFFSET,
    UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY,
    UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, UVERBS_METHOD_REG_DMABUF_MR, ib_uverbs_reg_mr,
    ib_uverbs_reg_mr_resp,
};
use uverbs_uapi::object::UVERBS_OBJECT_MR;
use uverbs_uapi::write::IB_USER_VERBS_CMD_REG_MR;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const VERB: &str = "reg_mr";

impl<S: Sharing> ProtectionDomain<S> {
    /// Starts to register memory. Unless [`access`](MrBuilder::access) is called, the region has the least rights
    /// that this side's sends and receives need, [`Access::LOCAL_WRITE`], and no peer reaches it.
    ///
    /// Registration pins memory and is slow: keep it out of the data path.
    #[doc(alias = "ibv_reg_mr")]
    pub fn mr_builder(&self) -> MrBuilder {
        MrBuilder {
            pd: self.inner.clone(),
            access: Access::LOCAL_WRITE,
            iova: None,
            data_direct: false,
        }
    }
}

/// Builds a memory region; started by [`mr_builder`](ProtectionDomain::mr_builder).
///
/// The memory decides which method fits:
///
/// | memory | method |
/// |---|---|
/// | owned and accessed by the program itself, as in C | [`register_unowned`](Self::register_unowned) |
/// | to be allocated for the purpose | [`allocate`](Self::allocate) |
/// | a vector, boxed slice or mapping that the region shall own | [`register`](Self::register) |
/// | a borrowed slice | [`register_borrowed`](Self::register_borrowed), or a [scope](crate::owned::Scope) |
/// | an address range that only the region accesses | [`register_raw`](Self::register_raw) |
/// | behind a dma-buf, such as memory of a GPU | [`register_dmabuf`](Self::register_dmabuf) |
/// | on the device | [`register_dm`](Self::register_dm) |
/// | everything in this process, on demand | [`register_address_space`](Self::register_address_space) |
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// # let pd = context.alloc_pd()?;
/// use uverbs::Access;
///
/// let region = pd
///     .mr_builder()
///     .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
///     .relaxed_ordering()
///     .register(vec![0u64; 4096])?;
/// # drop(region); Ok(()) }
/// ```
///
/// All kinds of memory, as in the table:
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, dm: &uverbs::DeviceMemory, gpu: std::fs::File,
/// #     memory: *mut u8, slice: &mut [u32]) -> uverbs::Result<()> {
/// use uverbs::Access;
///
/// let local = pd.mr_builder();
/// // SAFETY: `memory` stays mapped until the region is deregistered.
/// let as_in_c = unsafe { local.clone().register_unowned(memory, 4096)? };
/// // A peer counts from 0, independent of the address here.
/// let zeroed = local.clone().iova(0).allocate::<u64>(512)?;
/// // Pages that the device is about to need: `pd.advise` lets it fault them in ahead.
/// let paged = local.clone().on_demand().register(vec![0u8; 1 << 30])?;
/// // SAFETY: the region is destroyed before `slice` is used again, or the process ends.
/// let borrowed = unsafe { local.clone().register_borrowed(slice)? };
/// // … requests on it, until they are over …
/// if let Err(failed) = borrowed.destroy() {
///     eprintln!("the device may still reach the slice: {failed}");
///     std::process::abort();
/// }
/// // SAFETY: `memory` is initialised, and only the region accesses it.
/// let range = unsafe { local.clone().register_raw(memory, 4096)? };
/// let of_gpu = local.clone().register_dmabuf(&gpu, 0, 1 << 20)?;
/// let on_device = local.clone().zero_based().register_dm(dm, ..64)?;
/// // SAFETY: requests name only memory that stays mapped, and that this process does not use meanwhile.
/// let everything = unsafe { local.on_demand().register_address_space()? };
/// pd.advise(uverbs::Advice::PREFETCH, &[paged.on_demand(..4096)?], true)?;
/// # drop((as_in_c, zeroed, paged, range, of_gpu, on_device, everything)); Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct MrBuilder {
    pub(super) pd: Arc<PdInner>,
    pub(super) access: Access,
    pub(super) iova: Option<u64>,
    data_direct: bool,
}

impl MrBuilder {
    /// Sets the rights, in place of [`Access::LOCAL_WRITE`]: requests of this side read and write the memory.
    /// [`Access::empty`], for memory that is mapped read-only, lets them only read. Rights of peers are added to local
    /// ones, as in [`Access::ALL_REMOTE`]; atomics only if the
    /// [device has them](crate::DeviceAttr::atomic_cap).
    pub fn access(mut self, access: Access) -> Self {
        const OPTIONS: Access =
            Access::RELAXED_ORDERING.union(Access::ZERO_BASED).union(Access::ON_DEMAND);
        self.access = access | self.access & OPTIONS;
        self
    }

    /// Lets the device reach the memory of [`register_dmabuf`](Self::register_dmabuf) by its data-direct function, a
    /// second PCI function that is nearer to the memory, as that of a GPU beside the device.
    /// [`mlx5::data_direct_path`](crate::mlx5::data_direct_path) tells where that is. Other
    /// registrations refuse it (`EINVAL`).
    #[doc(alias = "MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT")]
    #[doc(alias = "mlx5dv_reg_dmabuf_mr")]
    pub fn data_direct(mut self) -> Self {
        self.data_direct = true;
        self
    }

    /// Lets the device reorder its accesses on the bus, which can be faster. A kernel or device that does
    /// not know the flag ignores it.
    #[doc(alias = "IBV_ACCESS_RELAXED_ORDERING")]
    pub fn relaxed_ordering(mut self) -> Self {
        self.access |= Access::RELAXED_ORDERING;
        self
    }

    /// Lets addresses count from 0, the beginning of the region, which must lie at a page
    /// boundary.
    ///
    /// rxe fails with `EOPNOTSUPP`; there [`iova(0)`](Self::iova) does the same.
    #[doc(alias = "IBV_ACCESS_ZERO_BASED")]
    pub fn zero_based(mut self) -> Self {
        self.access |= Access::ZERO_BASED;
        self.iova = Some(0);
        self
    }

    /// Pins no pages: the device faults them in when it needs them.
    ///
    /// [`odp_caps`](crate::DeviceAttr::odp_caps) tells whether the device can. rxe can from Linux 6.15 on,
    /// but up to 7.2 at least it copies each packet to and from the beginning of its page, and it finds
    /// pages only by the memory's own address. On rxe the library therefore refuses (`EOPNOTSUPP`) memory
    /// that does not begin at a page, and an [`iova`](Self::iova) other than the memory's address.
    #[doc(alias = "IBV_ACCESS_ON_DEMAND")]
    pub fn on_demand(mut self) -> Self {
        self.access |= Access::ON_DEMAND;
        self
    }

    /// Lets requests and peers address the memory from `iova` on instead of its virtual address. Both must
    /// agree in the bits below the page size.
    #[doc(alias = "ibv_reg_mr_iova")]
    #[doc(alias = "ibv_reg_mr_iova2")]
    pub fn iova(mut self, iova: u64) -> Self {
        self.iova = Some(iova);
        self
    }

    /// Allocates page-aligned, zeroed memory for `n` values of `T` and registers it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for zero bytes or a `T` aligned to more than a page, `ENOMEM` without memory or
    /// beyond the limit of locked memory, and those of [`register`](Self::register).
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate<T: FromBytes + IntoBytes>(self, n: usize) -> Result<MemoryRegion<T>> {
        let length = allocation_size(n, size_of::<T>(), align_of::<T>())?;
        let backing: Backing<MmapMut> = Backing::pages(length).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
            Error::new(VERB, errno)
                .detail(format!("no {} of memory to register", ByteCount::of(length)))
        })?;
        Ok(self.enter(backing)?)
    }

    /// Registers memory that the region takes ownership of.
    ///
    /// Before Linux 5.12 huge pages of registered memory are not inherited by children that this process forks
    /// from then on (`MADV_DONTFORK`): the kernel would leave the child's pages to the device. The huge pages
    /// are found in `/proc/self/smaps`; a process that cannot read it is not protected.
    ///
    /// # Errors
    ///
    /// `EINVAL` for zero bytes, memory that is not aligned to its [items](StableBytes::Item), rights that
    /// contradict each other, or an [`iova`](Self::iova) whose low bits differ from the memory's; `ENOMEM` beyond the
    /// limit of locked memory; `EOPNOTSUPP` for a right that the device does not know; `EFAULT` for memory that is
    /// not mapped, or is read-only where the rights let the device write. The memory comes back with the
    /// error.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register<M: StableBytes>(
        self,
        memory: M,
    ) -> std::result::Result<MemoryRegion<M::Item, M>, ErrorWith<M>> {
        let backing = Backing::own(memory);
        if let Err(error) = check_alignment::<M>(VERB, &backing) {
            return Err(error.with(backing.into_owner()));
        }
        self.enter(backing).map_err(|failed| failed.map(Backing::into_owner))
    }

    /// Registers `length` bytes at `addr` that stay the program's: the region gives keys, addresses
    /// and SGEs, and does not access the memory.
    ///
    /// This is what `ibv_reg_mr` does, for programs that manage their memory themselves. The memory need
    /// not be initialised, it may be borrowed, and it may be registered several times, with several domains
    /// and devices.
    ///
    /// Memory of a GPU by its address in this process needs a module that knows the GPU's pages, `nvidia_peermem` or
    /// `amdgpu`, and an RDMA core with the interface that these call (`ib_register_peer_memory_client`): that of OFED or
    /// DOCA, or of a distribution that added it. Linux itself has none. It is an error (`EFAULT`) without either; a
    /// [dma-buf](Self::register_dmabuf) needs neither. If the GPU's memory is
    /// freed while the region is there, the module takes the pages back, and accesses fail.
    ///
    /// ```no_run
    /// # fn f(one: &uverbs::ProtectionDomain, other: &uverbs::ProtectionDomain) -> uverbs::Result<()> {
    /// let mut memory = Vec::<u8>::with_capacity(1 << 20);
    /// let (addr, length) = (memory.as_mut_ptr(), memory.capacity());
    /// // SAFETY: `memory` is neither grown nor dropped before both regions are, and its bytes are
    /// // looked at only after the receive that wrote them has completed.
    /// let region = unsafe { one.mr_builder().register_unowned(addr, length) }?;
    /// // SAFETY: as above.
    /// let again = unsafe { other.mr_builder().register_unowned(addr, length) }?;
    /// assert_eq!(region.addr(), again.addr());
    /// # Ok(()) }
    /// ```
    ///
    /// # Safety
    ///
    /// The range stays mapped until [`destroy`](MemoryRegion::destroy) returned `Ok`, or the region and all
    /// [memory windows](crate::MemoryWindow#what-a-window-holds) that got a binding to it were dropped. If
    /// the region or such a window is leaked, by the program or because the kernel refuses to destroy it
    /// ([`Context::leaked`](crate::Context::leaked)), or the region is
    /// [released](MemoryRegion::release) to another process, the range stays mapped until the process ends.
    ///
    /// The caller also answers for the accesses of the device and peers by the [rights](Self::access) of the
    /// region: where one of them may write, the program holds no reference to the bytes and does not assume that
    /// they are unchanged.
    ///
    /// # Errors
    ///
    /// Those of [`register`](Self::register).
    #[doc(alias = "ibv_reg_mr")]
    #[doc(alias = "ibv_reg_mr_iova")]
    #[doc(alias = "nvidia_peermem")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn register_unowned(
        self,
        addr: *mut u8,
        length: usize,
    ) -> Result<MemoryRegion<u8, Unowned>> {
        // SAFETY: the caller's obligation is the same.
        let backing = unsafe { Backing::unowned(addr, length) };
        self.enter(backing).map_err(|failed| failed.error)
    }

    /// Registers `length` bytes at `addr`, which this process then accesses only through the region. For
    /// memory that the program keeps accessing itself there is [`register_unowned`](Self::register_unowned).
    ///
    /// # Safety
    ///
    /// The memory must be one range within one allocation, of at most `isize::MAX` bytes, readable, writable and
    /// initialised. It must be neither borrowed nor accessed other than through the region, from any thread: the
    /// region's safe methods read and write it. That
    /// holds until [`destroy`](MemoryRegion::destroy) returned `Ok`, or the region and all
    /// [memory windows](crate::MemoryWindow#what-a-window-holds) that got a binding to it were dropped. If
    /// the region or such a window is leaked, by the program or because the kernel refuses to destroy it
    /// ([`Context::leaked`](crate::Context::leaked)), or the region is
    /// [released](MemoryRegion::release) to another process, it holds until the process ends.
    ///
    /// # Errors
    ///
    /// Those of [`register`](Self::register).
    #[doc(alias = "ibv_reg_mr")]
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn register_raw(
        self,
        addr: *mut u8,
        length: usize,
    ) -> Result<MemoryRegion<u8, RawRange>> {
        // SAFETY: the caller's obligation is the same.
        let backing = unsafe { Backing::raw(addr, length) };
        Ok(self.enter(backing)?)
    }

    /// Registers a borrowed slice.
    ///
    /// # Safety
    ///
    /// The region must not be forgotten, leaked or [released](MemoryRegion::release): it is dropped before the
    /// borrow ends, and so is each [memory window](crate::MemoryWindow#what-a-window-holds) that got a binding to
    /// it. Only a successful [`destroy`](MemoryRegion::destroy) proves that the device no longer
    /// reaches the memory; after an error the memory must not be accessed.
    ///
    /// # Errors
    ///
    /// Those of [`register`](Self::register).
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn register_borrowed<T: FromBytes + IntoBytes>(
        self,
        memory: &mut [T],
    ) -> Result<MemoryRegion<T, Borrowed<'_>>> {
        // SAFETY: the caller's obligation is the same.
        let backing = unsafe { Backing::borrow(memory) };
        Ok(self.enter(backing)?)
    }

    /// Registers memory whose borrow outlives `pledges`.
    pub(crate) fn register_pledged<'env, T: FromBytes + IntoBytes>(
        self,
        memory: &'env mut [T],
        pledges: &mut Pledges<'env>,
    ) -> Result<MemoryRegion<u8, Pledged>> {
        Ok(self.enter(pledges.backing(memory))?)
    }

    /// Registers the whole address space of this process, faulted in on demand ("implicit ODP").
    ///
    /// Ranges of the region are virtual addresses.
    ///
    /// # Safety
    ///
    /// Every peer that knows the keys can, as far as the rights go, read and write all memory of this
    /// process. All of them must be trusted to access only the memory that they were given.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the device does not advertise it, and those of
    /// [`register`](Self::register).
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn register_address_space(self) -> Result<MemoryRegion<u8, AddressSpace>> {
        // SAFETY: the caller's obligation is the same.
        let backing = unsafe { Backing::everything() };
        self.on_demand().enter(backing).map_err(Error::from).map_err(|error| {
            match error.kernel_errno() {
                // A device that pages on demand, but not the whole address space, answers EINVAL.
                Some(Errno::INVAL) => Error::new(VERB, Errno::OPNOTSUPP)
                    .detail("the device does not page a whole address space on demand"),
                _ => error,
            }
        })
    }

    /// Registers `length` bytes at `offset` of a dma-buf. The kernel keeps the buffer alive; the
    /// file may be closed afterwards. Addresses count from [`iova`](Self::iova), by default from
    /// `offset`.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on rxe, whose driver registers no dma-bufs, and on mlx5 if the device does not page
    /// on demand, from Linux 7.2 on and from a release of 6.12 between 6.12.108 and 6.12.117; `EINVAL` for zero bytes,
    /// a range that overflows, or an `offset` whose bits below the page size differ from those of the address; `EBADF`
    /// or `EINVAL` for a file that is no dma-buf. With [`data_direct`](Self::data_direct) `EOPNOTSUPP` before Linux 6.12
    /// and on a device that has no such function, and `EINVAL` for an address in the region ([`iova`](Self::iova)) that is
    /// no multiple of the page size.
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn register_dmabuf(
        self,
        dmabuf: impl AsFd,
        offset: u64,
        length: u64,
    ) -> Result<MemoryRegion<u8, DmaBuf>> {
        const VERB: &str = "reg_dmabuf_mr";
        let file = self.pd.file();
        if self.data_direct {
            super::data_direct::path_of(VERB, file)?;
        }
        let iova = self.iova.unwrap_or(offset);
        check(self.access, offset, u64::MAX, iova, length).map_err(|error| error.in_verb(VERB))?;
        let page = page_size() as u64;
        if self.data_direct && iova % page != 0 {
            let detail = format!(
                "the address {iova:#x} of a data-direct region is no multiple of {page}: set iova, \
                 which is the offset otherwise"
            );
            return Err(Error::invalid(VERB, detail));
        }
        let (mut lkey, mut rkey) = (0u32, 0u32);
        let fd = dmabuf.as_fd().as_raw_fd();
        let mut command = Command::new(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR);
        command
            .new_handle(UVERBS_ATTR_REG_DMABUF_MR_HANDLE)
            .handle(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, self.pd.handle())
            .u64(UVERBS_ATTR_REG_DMABUF_MR_OFFSET, offset)
            .u64(UVERBS_ATTR_REG_DMABUF_MR_LENGTH, length)
            .u64(UVERBS_ATTR_REG_DMABUF_MR_IOVA, iova)
            .u32(UVERBS_ATTR_REG_DMABUF_MR_FD, fd as u32)
            .flags(
                UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS,
                self.access.for_kernel(file.optional_access),
            )
            .output(UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, &mut lkey)
            .output(UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, &mut rkey);
        if self.data_direct {
            let flag = mlx5_ib_uapi_reg_dmabuf_flags::MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT;
            command.flags(MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, flag.bits());
        }
        file.execute(VERB, &mut command).map_err(|error| match error.errno() {
            Errno::OPNOTSUPP => {
                let name = file.device.name();
                let has_method = error.kernel_errno() == Some(Errno::OPNOTSUPP);
                let cause = match self.data_direct {
                    // Such a region is pinned.
                    true => None,
                    false => file.provider.refuses_dmabufs(has_method, self.pages_on_demand()),
                };
                error.detail(match cause {
                    Some(cause) => format!("{name} registers no dma-buf: {cause}"),
                    None => format!(
                        "the driver of {name} registers no dma-buf with access {}",
                        self.access
                    ),
                })
            }
            _ => match why_no_dmabuf(dmabuf.as_fd(), offset, length) {
                Some(why) => error.detail(why),
                None => error.context(|| {
                    let (length, offset) = (ByteCount(length), Offset(offset));
                    format!("{length} at offset {offset} of a dma-buf with access {}", self.access)
                }),
            },
        })?;
        let handle = command.made(UVERBS_ATTR_REG_DMABUF_MR_HANDLE);
        let handle = handle.map_err(|errno| Error::new(VERB, errno))?;
        let object = Object::new(file.clone(), Class::MR, handle, Backing::dmabuf(length));
        Ok(MemoryRegion::of(Arc::new(MrInner {
            object,
            pd: self.pd,
            lkey: Lkey(lkey),
            rkey: Rkey(rkey),
            access: self.access,
            iova,
            dead: false,
            imported: None,
        })))
    }

    /// Whether the device advertises paging on demand.
    fn pages_on_demand(&self) -> bool {
        let context = Context { file: self.pd.file().clone() };
        context.query_device().is_ok_and(|device| device.odp_caps.is_some())
    }

    /// Refuses the data-direct function for memory that is no dma-buf, which the driver would ignore.
    pub(super) fn refuse_data_direct(&self, verb: &'static str) -> Result<()> {
        if self.data_direct {
            let detail =
                "data_direct registers dma-bufs only: use register_dmabuf, or leave it out";
            return Err(Error::invalid(verb, detail));
        }
        Ok(())
    }

    /// Registers the memory of `backing`.
    fn enter<T, M>(
        self,
        backing: Backing<M>,
    ) -> std::result::Result<MemoryRegion<T, M>, ErrorWith<Backing<M>>> {
        let file = self.pd.file();
        if let Err(error) = self.refuse_data_direct(VERB) {
            return Err(error.with(backing));
        }
        let (start, length) = (backing.address(), backing.reach());
        let hca_va = self.iova.unwrap_or(start);
        if let Err(error) = check(self.access, start, LAST_ADDRESS, hca_va, length) {
            return Err(error.with(backing));
        }
        if self.access.contains(Access::ON_DEMAND) && file.provider.traits().on_demand_in_place_only
        {
            if let Err(error) = check_in_place(start, hca_va, file.device.name()) {
                return Err(error.with(backing));
            }
        }
        if let Err(error) = keep_from_children(VERB, &backing, self.access) {
            return Err(error.with(backing));
        }
        let request = ib_uverbs_reg_mr {
            start,
            length,
            hca_va,
            pd_handle: self.pd.handle(),
            access_flags: self.access.for_kernel(file.optional_access),
            ..Default::default()
        };
        let mut resp = ib_uverbs_reg_mr_resp::new_zeroed();
        let made =
            file.execute(VERB, write(IB_USER_VERBS_CMD_REG_MR, &request).response(&mut resp));
        if let Err(error) = made {
            let advertised = self.access.contains(Access::ON_DEMAND) && self.pages_on_demand();
            return Err(explain(error, start, length, self.access, advertised).with(backing));
        }
        let object = Object::new(file.clone(), Class::MR, resp.mr_handle, backing);
        Ok(MemoryRegion::of(Arc::new(MrInner {
            object,
            pd: self.pd,
            lkey: Lkey(resp.lkey),
            rkey: Rkey(resp.rkey),
            access: self.access,
            iova: hca_va,
            dead: false,
            imported: None,
        })))
    }
}

/// Keeps memory in huge pages from children of this process, where the kernel would give one of the two new pages
/// and leave the device the old ones.
pub(crate) fn keep_from_children<M>(
    verb: &'static str,
    backing: &Backing<M>,
    access: Access,
) -> Result<()> {
    // On demand the device follows the process to its new pages.
    let pinned = backing.location() == Location::Mapped && !access.contains(Access::ON_DEMAND);
    if !pinned || copies_on_fork() {
        return Ok(());
    }
    let (start, length) = (backing.address(), backing.reach());
    huge_pages::keep_from_children(start, length, page_size()).map_err(|errno| {
        Error::new(verb, errno).detail(
            "this kernel does not copy huge pages for forked children (Linux 5.12 does), and refuses to keep \
             these from them (MADV_DONTFORK)",
        )
    })
}

/// The size of `n` values, if there can be such an allocation.
pub(super) fn allocation_size(n: usize, size: usize, align: usize) -> Result<usize> {
    if n == 0 || size == 0 {
        return Err(Error::invalid(
            VERB,
            match n {
                0 => format!("0 values of {} make a region of 0 bytes", ByteCount::of(size)),
                _ => "values of 0 bytes make a region of 0 bytes".into(),
            },
        ));
    }
    if align > page_size() {
        return Err(Error::invalid(
            VERB,
            format!("values aligned to {align} exceed the page size of {}", page_size()),
        ));
    }
    n.checked_mul(size).filter(|&length| isize::try_from(length).is_ok()).ok_or_else(|| {
        Error::new(VERB, Errno::NOMEM).detail(format!(
            "values of {} exceed the address space: {} in all",
            ByteCount::of(size),
            ByteCount::of(n.saturating_mul(size))
        ))
    })
}

/// The highest address of this process.
pub(super) const LAST_ADDRESS: u64 = usize::MAX as u64;

/// Refuses values that the kernel would refuse by an errno alone, and names them. `start` is an address of
/// this process or an offset in a dma-buf, and the memory ends at `last` at most.
pub(super) fn check(access: Access, start: u64, last: u64, iova: u64, length: u64) -> Result<()> {
    access.check(VERB)?;
    if length == 0 {
        return Err(Error::invalid(VERB, "a region of 0 bytes"));
    }
    // The length of the whole address space does not fit; `u64::MAX` stands for it.
    let whole = start == 0 && length == u64::MAX;
    for (first, last) in [(start, last), (iova, u64::MAX)] {
        if !whole && first.checked_add(length).is_none_or(|end| end > last) {
            return Err(Error::invalid(
                VERB,
                format!(
                    "{} at {first:#x} reach beyond the end of the address space",
                    ByteCount(length)
                ),
            ));
        }
    }
    let below_page = page_size() as u64 - 1;
    if start & below_page != iova & below_page {
        return Err(Error::invalid(
            VERB,
            format!(
                "memory at {start:#x} cannot be addressed from {iova:#x}: they must agree in the \
                 bits below the page size of {}",
                page_size()
            ),
        ));
    }
    Ok(())
}

/// Refuses memory that is not aligned for a slice.
pub(crate) fn check_alignment<M: StableBytes>(
    verb: &'static str,
    backing: &Backing<M>,
) -> Result<()> {
    if backing.is_aligned_to::<M::Item>() {
        return Ok(());
    }
    let (start, align) = (backing.address(), align_of::<M::Item>());
    let detail = format!(
        "memory at {start:#x}, of items that are aligned to {align} bytes: let `StableBytes::items` begin at a \
         multiple of that"
    );
    Err(Error::invalid(verb, detail))
}

/// Refuses memory that a driver would address wrongly; see
/// [`on_demand_in_place_only`](crate::provider::DriverTraits::on_demand_in_place_only).
fn check_in_place(start: u64, iova: u64, device: &str) -> Result<()> {
    let inside = start % page_size() as u64;
    let refused = |detail: String| {
        Err(Error::new(VERB, Errno::OPNOTSUPP)
            .detail(format!("{detail}, which the driver of {device} does not page on demand")))
    };
    if inside != 0 {
        return refused(format!(
            "memory at {start:#x}, {inside} bytes behind the beginning of its page (let it begin \
             there, as MrBuilder::allocate does)"
        ));
    }
    if start != iova {
        return refused(format!("memory at {start:#x} that is addressed from {iova:#x}"));
    }
    Ok(())
}

/// Explains a refusal of the kernel, and says what to change.
pub(super) fn explain(
    error: Error,
    start: u64,
    length: u64,
    access: Access,
    pages_on_demand: bool,
) -> Error {
    let verb = error.verb();
    let size = ByteCount(length);
    let on_demand = access.contains(Access::ON_DEMAND);
    match error.errno() {
        // Linux 6.1 answers EINVAL.
        Errno::INVAL | Errno::OPNOTSUPP if on_demand && !pages_on_demand => {
            Error::new(verb, Errno::OPNOTSUPP).detail("the device does not page on demand")
        }
        Errno::NOMEM | Errno::PERM if !on_demand => {
            error.pinning(usize::try_from(length).unwrap_or(usize::MAX))
        }
        Errno::OPNOTSUPP => {
            error.detail(format!("the device knows no memory regions with access {access}"))
        }
        Errno::INVAL if access.contains(Access::REMOTE_ATOMIC) => error.detail(format!(
            "{size} with access {access}; a device without atomics (`DeviceAttr::atomic_cap`) may refuse \
             REMOTE_ATOMIC"
        )),
        Errno::INVAL => error.detail(format!("{size} with access {access}")),
        Errno::FAULT => error.detail(mapped::why_not(start, length, access).unwrap_or_else(|| {
            format!("{size} at {start:#x} are not all mapped in a way that allows access {access}")
        })),
        _ => error.context(|| format!("{size} at {start:#x} with access {access}")),
    }
}

/// The reason why the kernel registers no such part of a file as a dma-buf, if the file tells.
fn why_no_dmabuf(file: BorrowedFd<'_>, offset: u64, length: u64) -> Option<String> {
    /// `DMA_BUF_MAGIC` of `linux/magic.h`.
    const DMA_BUF_MAGIC: u64 = 0x444d_4142;
    let stat = rustix::fs::fstat(file).ok()?;
    if rustix::fs::fstatfs(file).ok()?.f_type as u64 & 0xffff_ffff != DMA_BUF_MAGIC {
        return Some(format!("the file behind descriptor {} is no dma-buf", file.as_raw_fd()));
    }
    beyond_dmabuf(stat.st_size as u64, offset, length)
}

/// Says that a part is not within a dma-buf of `size` bytes.
fn beyond_dmabuf(size: u64, offset: u64, length: u64) -> Option<String> {
    if size == 0 || offset.checked_add(length).is_some_and(|end| end <= size) {
        return None;
    }
    let (size, offset, length) = (ByteCount(size), Offset(offset), ByteCount(length));
    Some(format!(
        "{length} at offset {offset} reach beyond the end of the dma-buf, which has {size}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_0_are_invalid_and_too_large_ones_are_out_of_memory() {
        assert_eq!(allocation_size(0, 8, 8).unwrap_err().errno(), Errno::INVAL);
        assert_eq!(allocation_size(8, 0, 1).unwrap_err().errno(), Errno::INVAL);
        assert_eq!(allocation_size(usize::MAX, 2, 1).unwrap_err().errno(), Errno::NOMEM);
        assert_eq!(allocation_size(usize::MAX / 2 + 1, 1, 1).unwrap_err().errno(), Errno::NOMEM);
        assert_eq!(allocation_size(1, 8, 2 * page_size()).unwrap_err().errno(), Errno::INVAL);
        assert_eq!(allocation_size(3, 8, 8).unwrap(), 24);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens a file")]
    fn files_that_are_no_dma_bufs_are_named_and_so_are_ends() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let why = why_no_dmabuf(file.as_fd(), 0, 4096).unwrap();
        assert!(why.contains(&format!("descriptor {} is no dma-buf", file.as_raw_fd())), "{why}");
        let why = beyond_dmabuf(8192, 4096, 8192).unwrap();
        assert_eq!(
            why,
            "8192 bytes at offset 4096 reach beyond the end of the dma-buf, which has 8192 bytes"
        );
        assert!(beyond_dmabuf(8192, u64::MAX, 8192).is_some());
        // A kernel that tells no size.
        assert_eq!((beyond_dmabuf(8192, 0, 8192), beyond_dmabuf(0, 0, 8192)), (None, None));
    }

    #[test]
    fn low_bits_of_both_addresses_must_agree() {
        let page = page_size() as u64;
        let access = Access::LOCAL_WRITE;
        assert!(check(access, 5 * page + 8, LAST_ADDRESS, 8, 64).is_ok());
        assert!(check(access, 5 * page + 8, LAST_ADDRESS, 9 * page + 8, 64).is_ok());
        let error = check(access, 5 * page + 8, LAST_ADDRESS, 16, 64).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        let start = format!("{:#x}", 5 * page + 8);
        assert!(error.message().contains(&start) && error.message().contains("0x10"), "{error}");
    }

    #[test]
    fn ranges_must_end_within_the_address_space() {
        let page = page_size() as u64;
        let last = u64::MAX - page + 1;
        let none = Access::empty();
        assert!(check(none, last, u64::MAX, last, page).is_err());
        assert!(check(none, page, LAST_ADDRESS, last, page).is_err());
        assert!(check(none, page, LAST_ADDRESS, page, 0).is_err());
        assert!(check(Access::ON_DEMAND, 0, LAST_ADDRESS, 0, u64::MAX).is_ok());
        let last_of_32_bits = u64::from(u32::MAX);
        assert!(check(none, last_of_32_bits + 1 - 2 * page, last_of_32_bits, 0, page).is_ok());
        assert!(check(none, last_of_32_bits + 1 - 2 * page, last_of_32_bits, 0, 2 * page).is_err());
    }

    #[test]
    fn rights_that_contradict_each_other_are_refused() {
        let error = check(Access::REMOTE_WRITE, 0x1000, LAST_ADDRESS, 0x1000, 64).unwrap_err();
        assert!(error.message().contains("LOCAL_WRITE"), "{error}");
    }
}
