//! Parent domains: a protection domain with a thread domain, an allocator for queue memory, or
//! both. Pure bookkeeping of this library; the kernel sees the protection domain only.

use crate::error::{ErrorWith, Result};
use crate::memory::allocator::{DomainAllocator, QueueAllocator};
use crate::pd::{Exclusive, PdInner, ProtectionDomain, Shared, Sharing};
use crate::td::{TdInner, ThreadDomain};
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// A protection domain extended by a [`ThreadDomain`], a [`QueueAllocator`] or both.
///
/// It *is* a protection domain and stands wherever one does: it dereferences to
/// [`ProtectionDomain`], and both name the same kernel object, so memory of one may be used with
/// queues of the other. A parent domain made of a parent domain flattens to the protection domain
/// underneath and inherits neither thread domain nor allocator. Everything made from it, shared
/// receive queues included, keeps it alive.
///
/// On rxe queue memory is the kernel's, so an allocator is accepted and never asked.
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// # let context = uverbs::Context::open(&uverbs::devices()?[0])?;
/// let pd = context.alloc_pd()?;
/// let td = context.alloc_td()?;
/// let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
/// let region = domain.allocate::<u64>(512)?;
/// # drop(region); Ok(()) }
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
            sharing: PhantomData,
        }
    }
}

impl<S: Sharing> ParentDomain<S> {
    /// Deallocates the parent domain; the protection domain underneath stays.
    ///
    /// # Errors
    ///
    /// `EBUSY` while anything made from it lives; it comes back with the error.
    #[doc(alias = "ibv_dealloc_pd")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "something made from the parent domain is still alive";
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
    sharing: PhantomData<fn() -> S>,
}

impl<S: Sharing> ParentDomainBuilder<S> {
    /// Puts queues created in the domain under `td`.
    #[must_use]
    pub fn thread_domain(self, td: &ThreadDomain) -> ParentDomainBuilder<Exclusive> {
        ParentDomainBuilder {
            pd: self.pd,
            td: Some(td.inner.clone()),
            allocator: self.allocator,
            sharing: PhantomData,
        }
    }

    /// Lets `allocator` provide the memory of queues created in the domain.
    #[must_use]
    pub fn allocator(mut self, allocator: impl QueueAllocator) -> Self {
        self.allocator = Some(Arc::new(allocator));
        self
    }

    /// Makes the domain.
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
            .map(|allocator| Arc::new(DomainAllocator::new(kernel.clone(), allocator)));
        let inner = PdInner { kernel, td: self.td, allocator };
        Ok(ParentDomain(ProtectionDomain::of(Arc::new(inner))))
    }
}
