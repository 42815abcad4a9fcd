//! Protection domains: a queue pair reaches only memory of its own. Parent domains are protection
//! domains too; see [`ParentDomain`](crate::ParentDomain).

use crate::ah::named_handles::NamedHandles;
use crate::context::Context;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::identity::Identity;
use crate::memory::allocator::{AllocatorDomain, DomainAllocator};
use crate::object::{Class, Object, destroy_sole};
use crate::td::TdInner;
use crate::uverbs::invoke_write::write;
use rustix::io::Errno;
use std::marker::PhantomData;
use std::sync::Arc;
use uverbs_uapi::pd::{ib_uverbs_alloc_pd, ib_uverbs_alloc_pd_resp};
use uverbs_uapi::write::IB_USER_VERBS_CMD_ALLOC_PD;
use zerocopy::FromZeros;

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Shared {}
    impl Sealed for super::Exclusive {}
}

/// The way queues ring their doorbell register: [`Shared`] or [`Exclusive`].
pub trait Sharing: sealed::Sealed + Send + Sync + 'static {}

/// Queues of a plain protection domain: they may share a doorbell register with other queues, and the library
/// locks it.
#[derive(Clone, Copy, Debug)]
pub enum Shared {}

/// Queues under a [`ThreadDomain`](crate::ThreadDomain): only the holder of the token rings their doorbell
/// register, so that ringing takes no lock and asks for the token.
#[derive(Clone, Copy, Debug)]
pub enum Exclusive {}

impl Sharing for Shared {}
impl Sharing for Exclusive {}

/// The kernel's protection domain.
#[derive(Debug)]
pub(crate) struct KernelPd {
    /// Declared first, so that they are destroyed before the domain.
    pub(crate) retired: NamedHandles,
    pub(crate) object: Object,
    /// The number of an imported domain on the device, where the driver tells it.
    pub(crate) number: Option<u32>,
}

impl AllocatorDomain for KernelPd {
    fn handle(&self) -> u32 {
        self.object.handle()
    }

    fn device(&self) -> &str {
        self.object.file().device.name()
    }

    fn count_leak(&self) {
        self.object.file().count_leak();
    }
}

/// The part of a protection domain that its dependants keep alive: the kernel's object, and the
/// additions of a parent domain.
#[derive(Debug)]
pub(crate) struct PdInner {
    pub(crate) kernel: Arc<KernelPd>,
    pub(crate) td: Option<Arc<TdInner>>,
    pub(crate) allocator: Option<Arc<DomainAllocator>>,
}

impl PdInner {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.kernel.object.file()
    }

    pub(crate) fn handle(&self) -> u32 {
        self.kernel.object.handle()
    }

    /// The identity of the kernel's domain.
    #[inline]
    pub(crate) fn identity(&self) -> Identity {
        Identity::of(&self.kernel)
    }
}

/// A protection domain.
///
/// Everything made from it keeps it alive. All methods may be called from any thread. The
/// parameter says how queues made here ring their doorbell; it is [`Shared`] unless the domain is
/// a [parent domain](crate::ParentDomain) with a thread domain. See [`Context`] for an example.
#[doc(alias = "ibv_pd")]
pub struct ProtectionDomain<S: Sharing = Shared> {
    pub(crate) inner: Arc<PdInner>,
    sharing: PhantomData<fn() -> S>,
}

impl Context {
    /// Allocates a protection domain. A queue pair reaches only memory of its own protection domain.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, or `EAGAIN` where an RDMA cgroup limit is reached.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        let mut resp = ib_uverbs_alloc_pd_resp::new_zeroed();
        let request = ib_uverbs_alloc_pd::default();
        let mut uhw = self.file.provider.traits().pd_response.clone();
        let allocated = self.file.execute(
            "alloc_pd",
            write(IB_USER_VERBS_CMD_ALLOC_PD, &request)
                .response(&mut resp)
                .driver(&[], uhw.as_mut()),
        );
        allocated.map_err(|error| {
            error.context(|| format!("{} allocates no protection domain", self.device().name()))
        })?;
        let object = Object::new(self.file.clone(), Class::PD, resp.pd_handle, ());
        let kernel = Arc::new(KernelPd { retired: NamedHandles::default(), object, number: None });
        Ok(ProtectionDomain::of(Arc::new(PdInner { kernel, td: None, allocator: None })))
    }
}

impl<S: Sharing> ProtectionDomain<S> {
    pub(crate) fn of(inner: Arc<PdInner>) -> Self {
        ProtectionDomain { inner, sharing: PhantomData }
    }

    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.inner.file().clone() }
    }

    /// The number by which the kernel knows this domain within its file. A parent domain has the
    /// number of the domain that it was made of.
    pub fn handle(&self) -> u32 {
        self.inner.handle()
    }

    /// Deallocates the domain, and returns an error if that fails; dropping it does the same silently.
    ///
    /// # Errors
    ///
    /// `EBUSY` while anything made from it lives, or an [object of DEVX](crate::mlx5::devx::DevxObject)
    /// keeps it. The domain comes back with the error.
    #[doc(alias = "ibv_dealloc_pd")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "something made from the protection domain, or an object of DEVX that keeps it, is \
                            still alive";
        let restore = |inner| ProtectionDomain { inner, sharing: PhantomData };
        const PARENT: &str = "a parent domain of the protection domain is still alive";
        destroy_sole(self.inner, "dealloc_pd", HELD, |inner| {
            match Arc::get_mut(&mut inner.kernel) {
                Some(kernel) => {
                    kernel.retired.sweep();
                    kernel.object.destroy()
                }
                None => Err(Error::new("dealloc_pd", Errno::BUSY).detail(PARENT)),
            }
        })
        .map_err(|failed| failed.map(restore))
    }
}

impl<S: Sharing> std::fmt::Debug for ProtectionDomain<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.inner.file().device.name())
            .field("handle", &self.inner.handle())
            .field("thread_domain", &self.inner.td.is_some())
            .field("allocator", &self.inner.allocator.is_some())
            .finish()
    }
}
