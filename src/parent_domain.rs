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
/// On rxe the kernel allocates queue memory: an allocator is accepted there and never called.
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
    /// Deallocates the parent domain; its protection domain stays.
    ///
    /// # Errors
    ///
    /// `EBUSY` while an object made from it lives; the domain comes back with the error.
    #[doc(alias = "ibv_dealloc_pd")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "an object made from the parent domain is still alive";
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
    /// Lets queues that are created in the domain ring the doorbell register of `td`.
    #[must_use]
    pub fn thread_domain(self, td: &ThreadDomain) -> ParentDomainBuilder<Exclusive> {
        ParentDomainBuilder {
            pd: self.pd,
            td: Some(td.inner.clone()),
            allocator: self.allocator,
            sharing: PhantomData,
        }
    }

    /// Lets `allocator` provide the memory of queues that are created in the domain.
    #[must_use]
    pub fn allocator(mut self, allocator: impl QueueAllocator) -> Self {
        self.allocator = Some(Arc::new(allocator));
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
            .map(|allocator| Arc::new(DomainAllocator::new(kernel.clone(), allocator)));
        let inner = PdInner { kernel, td: self.td, allocator };
        Ok(ParentDomain(ProtectionDomain::of(Arc::new(inner))))
    }
}
