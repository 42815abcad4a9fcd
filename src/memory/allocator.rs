//! The source of queue memory: a parent domain's allocator, or pages of this library's own.

mod arena;
mod huge;
mod lent;
mod numa;
mod pages;
mod shared;

pub use arena::Arena;
pub use huge::HugePages;
pub use numa::NumaNode;
pub use pages::Pages;
pub use shared::{QueueFile, SharedMemory};

pub use super::queue_memory::DmaBufPart;
use super::queue_memory::QueueMemory;
use crate::error::{Error, Result};
use crate::number::ByteCount;
use rustix::io::Errno;
use rustix::param::page_size;
use std::alloc::Layout;
use std::fmt;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use uverbs_uapi::device::rdma_driver_id;

/// The purpose of a buffer: the kernel's driver id in the upper 32 bits, the driver's own code in
/// the lower, as in the `resource_type` of `ibv_alloc_parent_domain`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResourceType(pub u64);

impl ResourceType {
    /// The queues of a queue pair on mlx5: receives first, then sends. A raw packet queue pair asks
    /// twice, for its receives and for its sends.
    #[doc(alias = "MLX5DV_RES_TYPE_QP")]
    pub const MLX5_QP: ResourceType = ResourceType::mlx5(1);
    /// A work queue of receives on mlx5. This library makes none, and asks no allocator for one; it
    /// is there for allocators that serve others as well.
    #[doc(alias = "MLX5DV_RES_TYPE_RWQ")]
    pub const MLX5_RWQ: ResourceType = ResourceType::mlx5(2);
    /// A doorbell record on mlx5, 8 bytes: the producer or consumer indices of a queue.
    #[doc(alias = "MLX5DV_RES_TYPE_DBR")]
    pub const MLX5_DBR: ResourceType = ResourceType::mlx5(3);
    /// A shared receive queue on mlx5.
    #[doc(alias = "MLX5DV_RES_TYPE_SRQ")]
    pub const MLX5_SRQ: ResourceType = ResourceType::mlx5(4);
    /// A completion queue on mlx5.
    #[doc(alias = "MLX5DV_RES_TYPE_CQ")]
    pub const MLX5_CQ: ResourceType = ResourceType::mlx5(5);

    const fn mlx5(code: u32) -> ResourceType {
        ResourceType((rdma_driver_id::RDMA_DRIVER_MLX5.0 as u64) << 32 | code as u64)
    }

    /// The kernel's id of the driver.
    pub fn driver(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The driver's code for the kind of buffer.
    pub fn code(self) -> u32 {
        self.0 as u32
    }
}

/// The name of the constant, `MLX5_QP`, or the number.
impl fmt::Debug for ResourceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            ResourceType::MLX5_QP => "MLX5_QP",
            ResourceType::MLX5_RWQ => "MLX5_RWQ",
            ResourceType::MLX5_DBR => "MLX5_DBR",
            ResourceType::MLX5_SRQ => "MLX5_SRQ",
            ResourceType::MLX5_CQ => "MLX5_CQ",
            ResourceType(other) => return write!(f, "ResourceType({other:#x})"),
        })
    }
}

impl fmt::Display for ResourceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            ResourceType::MLX5_QP => "the queues of a queue pair",
            ResourceType::MLX5_RWQ => "a work queue",
            ResourceType::MLX5_DBR => "a doorbell record",
            ResourceType::MLX5_SRQ => "a shared receive queue",
            ResourceType::MLX5_CQ => "a completion queue",
            ResourceType(other) => return write!(f, "resource {other:#x}"),
        })
    }
}

/// The parent domain on whose behalf an allocator is asked: a view that cannot be kept.
pub struct DomainView<'a> {
    pub(crate) domain: &'a dyn AllocatorDomain,
    pub(crate) pd_context: u64,
}

impl DomainView<'_> {
    /// The kernel's number of the protection domain underneath, which parent domains may have in common.
    pub fn handle(&self) -> u32 {
        self.domain.handle()
    }

    /// The number that the program gave the parent domain by
    /// [`pd_context`](crate::ParentDomainBuilder::pd_context), to tell domains that share this
    /// allocator apart. 0 unless it was given.
    pub fn pd_context(&self) -> u64 {
        self.pd_context
    }

    /// Name of the device, `mlx5_0` for one.
    pub fn device(&self) -> &str {
        self.domain.device()
    }
}

impl fmt::Debug for DomainView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainView")
            .field("handle", &self.handle())
            .field("pd_context", &self.pd_context)
            .finish()
    }
}

/// The answer of an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Memory of the size and alignment that was asked for.
    Memory(NonNull<u8>),
    /// The library shall allocate this buffer itself.
    UseDefault,
    /// There is no memory; the creation fails with `ENOMEM`.
    Failed,
}

/// Provides the memory of queues created in a [`ParentDomain`](crate::ParentDomain).
///
/// [`allocator`](crate::allocator) has some ready-made. To keep access to an allocator, give the parent
/// domain an `Arc` of it.
///
/// Any thread that creates or destroys an object calls it, and holds no lock of this library
/// meanwhile. A panic in `alloc` unwinds the creation; one in `free` is caught and counted.
///
/// # Sizes and alignments
///
/// On mlx5 the library asks for these alignments; the size is that of the device's queue:
///
/// | buffer | alignment |
/// |---|---|
/// | [`MLX5_CQ`](ResourceType::MLX5_CQ), [`MLX5_SRQ`](ResourceType::MLX5_SRQ) | a page |
/// | [`MLX5_QP`](ResourceType::MLX5_QP) | the size as a power of two, divided by 64, but at least 64 bytes and a receive WQE: 64 bytes for a queue pair of a page, 32 KiB for one of 2 MiB (32,768 WQEBBs), 64 KiB for one of 4 MiB |
/// | [`MLX5_QP`](ResourceType::MLX5_QP) of a raw packet queue pair, whose queues are apart | a page |
/// | [`MLX5_DBR`](ResourceType::MLX5_DBR), 8 bytes | 8 bytes |
///
/// An address at a smaller multiple is refused with `EINVAL`, and the memory comes back at once.
/// Alignments above a page need memory that was mapped with that in mind: an [`Arena`](crate::allocator::Arena),
/// huge pages, or a mapping that is larger by the alignment. rxe asks for nothing
/// ([`ParentDomain::asks_allocator`](crate::ParentDomain::asks_allocator)).
///
/// # Safety
///
/// Memory returned by [`alloc`](Self::alloc) must be readable and writable, of at least the size and alignment asked
/// for, used by nobody else until [`free`](Self::free), and must stay at its physical place across `fork` (shared,
/// `MADV_WIPEONFORK` or `MADV_DONTFORK`): a device reads and writes it. A dma-buf that [`dmabuf`](Self::dmabuf) returns
/// has this memory, and no other, from the offset on: the device addresses the dma-buf, and would otherwise write
/// outside the queue. If a child inherits a [`Completions`](crate::Completions) and asks it for the next completion, it
/// finds the parent's completions in shared memory, and dies of a signal with `MADV_DONTFORK`. Every other call fails
/// because the process is a fork.
pub unsafe trait QueueAllocator:
    fmt::Debug + Send + Sync + UnwindSafe + RefUnwindSafe + 'static
{
    /// Memory of the layout's size and alignment; the library zeroes it.
    fn alloc(&self, domain: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation;

    /// Takes back memory that `alloc` returned as [`Allocation::Memory`], with the same layout and resource: once for
    /// each, after the kernel confirmed that the object is gone, and never for a default buffer.
    ///
    /// # Safety
    ///
    /// `memory` was returned by `alloc` of this allocator for this layout, and has not been freed. Neither the library
    /// nor a device accesses it any more.
    unsafe fn free(
        &self,
        domain: &DomainView<'_>,
        memory: NonNull<u8>,
        layout: Layout,
        resource: ResourceType,
    );

    /// The dma-buf that backs `memory`, which `alloc` just returned; `None` unless this is implemented. The
    /// library passes the dma-buf to the kernel in place of the address. The kernel then need not pin the
    /// memory, which is impossible where a machine hides its memory from devices (confidential guests).
    /// `offset` must be a multiple of the alignment asked for, and the memory's address a multiple of that
    /// alignment or of a page, whichever is less.
    ///
    /// On mlx5, from Linux 7.2 on; older kernels refuse the creation (`EOPNOTSUPP`). The kernel takes
    /// dma-bufs for queue pairs, completion queues and their doorbell records. For shared receive queues,
    /// and for the new buffer of a resized completion queue, it takes addresses only.
    ///
    /// Queue memory out of one dma-buf that the program has mapped, for example memory of a DMA heap that a
    /// confidential guest shares with its devices:
    ///
    /// ```no_run
    /// # use std::alloc::Layout;
    /// use std::os::fd::OwnedFd;
    /// use std::ptr::NonNull;
    /// use uverbs::{DmaBufPart, QueueAllocator};
    /// # use uverbs::{Allocation, DomainView, ResourceType};
    ///
    /// #[derive(Debug)]
    /// struct Heap {
    ///     file: OwnedFd,
    ///     /// The address of the mapping.
    ///     start: usize,
    /// }
    ///
    /// # fn cut(_: &Heap, _: Layout) -> Option<NonNull<u8>> { None }
    /// // SAFETY: `alloc` cuts each buffer out of the mapping once, and the mapping is of shared memory.
    /// unsafe impl QueueAllocator for Heap {
    ///     // … `alloc` and `free` …
    /// #     fn alloc(&self, _: &DomainView<'_>, layout: Layout, _: ResourceType) -> Allocation {
    /// #         cut(self, layout).map_or(Allocation::Failed, Allocation::Memory)
    /// #     }
    /// #     unsafe fn free(&self, _: &DomainView<'_>, _: NonNull<u8>, _: Layout, _: ResourceType) {}
    ///     unsafe fn dmabuf(&self, memory: NonNull<u8>) -> Option<DmaBufPart> {
    ///         let offset = memory.addr().get() - self.start;
    ///         Some(DmaBufPart { file: self.file.try_clone().ok()?, offset: offset as u64 })
    ///     }
    /// }
    /// ```
    ///
    /// # Safety
    ///
    /// `memory` was returned by `alloc` of this allocator and has not been freed. The caller uses the dma-buf
    /// only to name the memory to the kernel, and gives it to nobody: another holder could register it as a
    /// memory region and let peers write the queue.
    #[doc(alias = "UVERBS_ATTR_CREATE_CQ_BUF_UMEM")]
    #[doc(alias = "UVERBS_ATTR_CREATE_QP_BUF_UMEM")]
    unsafe fn dmabuf(&self, memory: NonNull<u8>) -> Option<DmaBufPart> {
        let _ = memory;
        None
    }
}

// SAFETY: every call goes to the inner allocator, whose promises are the same.
unsafe impl<A: QueueAllocator> QueueAllocator for Arc<A> {
    fn alloc(&self, domain: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation {
        A::alloc(self, domain, layout, resource)
    }

    unsafe fn free(
        &self,
        domain: &DomainView<'_>,
        memory: NonNull<u8>,
        layout: Layout,
        resource: ResourceType,
    ) {
        // SAFETY: the memory comes from the inner allocator for this layout, and has not been freed.
        unsafe { A::free(self, domain, memory, layout, resource) }
    }

    unsafe fn dmabuf(&self, memory: NonNull<u8>) -> Option<DmaBufPart> {
        // SAFETY: the memory comes from the inner allocator; the caller's promise is the same.
        unsafe { A::dmabuf(self, memory) }
    }
}

/// The protection domain under a parent domain, as an allocator sees it.
pub(crate) trait AllocatorDomain:
    fmt::Debug + Send + Sync + UnwindSafe + RefUnwindSafe
{
    /// The kernel's number of the protection domain.
    fn handle(&self) -> u32;
    /// Name of the device.
    fn device(&self) -> &str;
    /// Counts memory that could not be given back.
    fn count_leak(&self);
}

/// A parent domain's allocator. Queue memory holds it, and with it the protection domain, until the
/// memory was given back.
#[derive(Debug)]
pub(crate) struct DomainAllocator {
    domain: Arc<dyn AllocatorDomain>,
    allocator: Arc<dyn QueueAllocator>,
    pd_context: u64,
}

impl DomainAllocator {
    pub(crate) fn new(
        domain: Arc<dyn AllocatorDomain>,
        allocator: Arc<dyn QueueAllocator>,
        pd_context: u64,
    ) -> Self {
        DomainAllocator { domain, allocator, pd_context }
    }

    fn view(&self) -> DomainView<'_> {
        DomainView { domain: &*self.domain, pd_context: self.pd_context }
    }

    /// Gives memory back to the allocator. A panic there must not leave a drop: it is counted as a leak.
    fn give_back(&self, memory: NonNull<u8>, layout: Layout, resource: ResourceType) {
        let freed = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: this allocator returned the memory for the layout, and this is called once for it, when its
            // last holder is gone: no kernel object is left that uses it.
            unsafe { self.allocator.free(&self.view(), memory, layout, resource) }
        }));
        if let Err(payload) = freed {
            // Dropping the payload of the panic may panic again.
            std::mem::forget(payload);
            self.domain.count_leak();
        }
    }
}

/// The source of queue memory for one creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) verb: &'static str,
    /// The allocator of the parent domain; without one, the library allocates the memory itself.
    pub(crate) allocator: Option<&'a Arc<DomainAllocator>>,
}

impl Source<'_> {
    /// Zeroed memory of at least `size` bytes at a multiple of `align`, a power of two.
    ///
    /// An allocator is asked for exactly that, and gets its memory back once, when nothing uses it any more.
    /// It may leave the buffer to the library, whose memory begins at a page, even if `align` is greater: a
    /// queue asks for more than a page so that the device can address the buffer in larger pages, and
    /// works without them.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` if the allocator returned memory at another alignment, which it gets back
    /// at once.
    pub(crate) fn alloc(
        &self,
        size: usize,
        align: usize,
        resource: ResourceType,
    ) -> Result<QueueMemory> {
        match self.custom(size, align, resource)? {
            Some(memory) => Ok(memory),
            None => QueueMemory::pages(size).map_err(|errno| {
                Error::new(self.verb, errno)
                    .detail(format!("no {} for {resource}", ByteCount::of(size)))
            }),
        }
    }

    /// As [`alloc`](Self::alloc); `None` if it is left to the library.
    pub(crate) fn custom(
        &self,
        size: usize,
        align: usize,
        resource: ResourceType,
    ) -> Result<Option<QueueMemory>> {
        let Some(domain) = self.allocator else { return Ok(None) };
        let allocator = &domain.allocator;
        let layout = Layout::from_size_align(size, align).map_err(|_| {
            Error::new(self.verb, Errno::NOMEM).detail(format!("{}", ByteCount::of(size)))
        })?;
        let memory = match allocator.alloc(&domain.view(), layout, resource) {
            Allocation::Memory(memory) => memory,
            Allocation::UseDefault => return Ok(None),
            Allocation::Failed => {
                return Err(Error::new(self.verb, Errno::NOMEM).detail(format!(
                    "the parent domain's allocator has no {} for {resource}",
                    ByteCount::of(size)
                )));
            }
        };
        let held = domain.clone();
        let release = Box::new(move |memory| held.give_back(memory, layout, resource));
        // SAFETY: `alloc` just returned the memory, and `QueueMemory` keeps the dma-buf to itself.
        let asked = catch_unwind(AssertUnwindSafe(|| unsafe { allocator.dmabuf(memory) }));
        let dmabuf = match asked {
            Ok(dmabuf) => dmabuf,
            Err(payload) => {
                release(memory);
                resume_unwind(payload)
            }
        };
        // The device addresses memory of a dma-buf by its offset there, so the offset must be aligned.
        let page = page_size();
        let (place, own) = match &dmabuf {
            Some(part) => (part.offset, align.min(page)),
            None => (0, align),
        };
        if memory.as_ptr().addr() % own != 0 || place % align as u64 != 0 {
            release(memory);
            return Err(Error::invalid(
                self.verb,
                match &dmabuf {
                    None => format!(
                        "the parent domain's allocator returned {memory:p} for {resource}, which is \
                         no multiple of {align}"
                    ),
                    Some(_) => format!(
                        "the parent domain's allocator returned {memory:p} for {resource}, {place:#x} \
                         in its dma-buf, and they are no multiples of {own} and {align}"
                    ),
                },
            ));
        }
        // SAFETY: the allocator promises memory of `size` bytes that nobody else uses until it is
        // given back, which `release` does, and that stays where it is across a fork.
        let memory = unsafe { QueueMemory::custom(memory, size, release) };
        match memory {
            Ok(memory) => Ok(Some(memory.with_dmabuf(dmabuf))),
            Err(errno) => Err(Error::new(self.verb, errno)),
        }
    }
}
