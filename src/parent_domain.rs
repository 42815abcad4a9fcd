//! Parent domains: a protection domain with a thread domain, an allocator for queue memory, or both. The
//! kernel does not know of them and sees the protection domain only.

use crate::error::{ErrorWith, Result};
use crate::memory::allocator::{DomainAllocator, QueueAllocator};
use crate::pd::{Exclusive, PdInner, ProtectionDomain, Shared, Sharing};
use crate::td::{TdInner, ThreadDomain};
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// A protection domain extended by a [`ThreadDomain`], a [`QueueAllocator`] or both.
///
/// It dereferences to [`ProtectionDomain`], and both name the same kernel object, so memory of one may be
/// used with queues of the other. A parent domain of a parent domain extends the protection domain that
/// the latter was made of, and inherits neither thread domain nor allocator. Objects made from it, shared
/// receive queues included, keep it alive.
///
/// On rxe the kernel allocates queue memory: an allocator is accepted there and never called
/// ([`asks_allocator`](Self::asks_allocator)).
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// let pd = context.alloc_pd()?;
/// let td = context.alloc_td()?;
/// let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
/// let region = domain.mr_builder().allocate::<u64>(512)?;
/// # drop(region); Ok(()) }
/// ```
///
/// An allocator of the program's own, which tells the domains that share it apart:
///
/// ```no_run
/// use std::alloc::Layout;
/// use std::ptr::NonNull;
/// use uverbs::{Allocation, DomainView, QueueAllocator, ResourceType};
///
/// /// Huge pages for completion queues of the domain 7, and the library's own memory for the rest.
/// #[derive(Debug)]
/// struct Chosen(uverbs::allocator::HugePages);
///
/// // SAFETY: all memory is that of `HugePages`, which keeps the contract.
/// unsafe impl QueueAllocator for Chosen {
///     fn alloc(&self, domain: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation {
///         match (domain.pd_context(), resource) {
///             (7, ResourceType::MLX5_CQ) => self.0.alloc(domain, layout, resource),
///             _ => Allocation::UseDefault,
///         }
///     }
///
///     unsafe fn free(
///         &self,
///         domain: &DomainView<'_>,
///         memory: NonNull<u8>,
///         layout: Layout,
///         resource: ResourceType,
///     ) {
///         // SAFETY: the memory came from there.
///         unsafe { self.0.free(domain, memory, layout, resource) }
///     }
/// }
///
/// # fn f(pd: &uverbs::ProtectionDomain) -> uverbs::Result<()> {
/// let chosen = Chosen(uverbs::allocator::HugePages::new());
/// let domain = pd.parent_domain_builder().allocator(chosen).pd_context(7).build()?;
/// domain.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_parent_domain")]
#[derive(Debug)]
pub struct ParentDomain<S: Sharing = Shared>(ProtectionDomain<S>);

impl<P: Sharing> ProtectionDomain<P> {
    /// Starts to extend this domain by a thread domain, an allocator for queue memory, or both; see
    /// [`ParentDomain`].
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub fn parent_domain_builder(&self) -> ParentDomainBuilder {
        ParentDomainBuilder {
            pd: self.inner.clone(),
            td: None,
            allocator: None,
            pd_context: 0,
            sharing: PhantomData,
        }
    }
}

impl<S: Sharing> ParentDomain<S> {
    /// Whether queues that are created in the domain take their memory from an allocator: `false`
    /// without one, and on rxe, where the kernel allocates queue memory and no allocator is called.
    pub fn asks_allocator(&self) -> bool {
        let inner = &self.0.inner;
        inner.allocator.is_some() && inner.file().provider.traits().asks_allocators
    }

    /// Deallocates the parent domain; its protection domain stays.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object made from it lives, or an [object of DEVX](crate::mlx5::devx::DevxObject)
    /// keeps it; the domain comes back with the error.
    #[doc(alias = "ibv_dealloc_pd")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "an object made from the parent domain, or an object of DEVX that keeps it, is \
                            still alive";
        const VERB: &str = "dealloc_parent_domain";
        crate::object::destroy_sole(self.0.inner, VERB, HELD, |inner| inner.file().check_fork(VERB))
            .map_err(|failed| failed.map(|inner| ParentDomain(ProtectionDomain::of(inner))))
    }
}

impl<S: Sharing> Deref for ParentDomain<S> {
    type Target = ProtectionDomain<S>;

    fn deref(&self) -> &ProtectionDomain<S> {
        &self.0
    }
}

/// Builds a [`ParentDomain`].
#[derive(Debug)]
pub struct ParentDomainBuilder<S: Sharing = Shared> {
    pd: Arc<PdInner>,
    td: Option<Arc<TdInner>>,
    allocator: Option<Arc<dyn QueueAllocator>>,
    pd_context: u64,
    sharing: PhantomData<fn() -> S>,
}

impl<S: Sharing> ParentDomainBuilder<S> {
    /// Lets queues that are created in the domain ring the doorbell register of `td`.
    #[must_use]
    pub fn thread_domain(self, td: &ThreadDomain) -> ParentDomainBuilder<Exclusive> {
        ParentDomainBuilder {
            pd: self.pd,
            td: Some(td.inner.clone()),
            allocator: self.allocator,
            pd_context: self.pd_context,
            sharing: PhantomData,
        }
    }

    /// Lets `allocator` provide the memory of queues that are created in the domain, and of their
    /// doorbell records. Several domains share one allocator by giving each a clone of its `Arc`.
    ///
    /// On rxe it is accepted and never called: [`ParentDomain::asks_allocator`] tells.
    #[must_use]
    pub fn allocator(mut self, allocator: impl QueueAllocator) -> Self {
        self.allocator = Some(Arc::new(allocator));
        self
    }

    /// A number that the allocator gets with each buffer of this domain, to tell domains that share it
    /// apart: an index into a table of the program, for example. 0 by default.
    ///
    /// In C it is a pointer that belongs to the allocator; here the allocator is a value of its own.
    #[must_use]
    pub fn pd_context(mut self, pd_context: u64) -> Self {
        self.pd_context = pd_context;
        self
    }

    /// Allocates the domain.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the thread domain belongs to another context.
    pub fn build(self) -> Result<ParentDomain<S>> {
        const VERB: &str = "alloc_parent_domain";
        let file = self.pd.file();
        file.check_fork(VERB)?;
        if let Some(td) = &self.td {
            file.check_same(VERB, "thread domain", &td.file)?;
        }
        let kernel = self.pd.kernel.clone();
        let allocator = self
            .allocator
            .map(|allocator| DomainAllocator::new(kernel.clone(), allocator, self.pd_context));
        let allocator = allocator.map(Arc::new);
        let inner = PdInner { kernel, td: self.td, allocator };
        Ok(ParentDomain(ProtectionDomain::of(Arc::new(inner))))
    }
}
