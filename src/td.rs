//! Thread domains: only one thread at a time rings the queues of a thread domain, because ringing takes its
//! token, which is not `Clone`.

use crate::context::Context;
use crate::error::{ErrorWith, Result};
use crate::file::File;
use crate::object::destroy_sole;
use crate::provider::RegisterLease;
use std::sync::Arc;

/// The part of a thread domain that its queues hold.
#[derive(Debug)]
pub(crate) struct TdInner {
    pub(crate) file: Arc<File>,
    /// `None` where the doorbell is in the kernel.
    pub(crate) register: Option<RegisterLease>,
}

/// A thread domain: exclusive use of a doorbell register.
///
/// Add it to a [`ParentDomain`](crate::ParentDomain); queues created there are rung with
/// `&mut` of this token. The token is not `Clone`: only the thread that holds it can ring these queues, so
/// ringing needs no lock. The token moves between threads together with its queues:
///
/// ```no_run
/// use uverbs::{CompletionQueue, Exclusive, QueuePair, ThreadDomain};
///
/// struct Worker {
///     td: ThreadDomain,
///     qp: QueuePair<Exclusive>,
///     cq: CompletionQueue,
/// }
///
/// /// Destroys all objects; fails at the first one that is still in use.
/// fn finish(Worker { td, qp, cq }: Worker) -> uverbs::Result<()> {
///     qp.destroy()?;
///     cq.destroy()?;
///     Ok(td.destroy()?)
/// }
/// ```
///
/// `examples/per_thread.rs` is a whole program of several such workers, and `docs/FEATURES.md` of the
/// repository has the cost and the savings of a thread domain.
///
/// On mlx5 the register is a BlueFlame register, into which small WQEs are copied whole. The context gives
/// it to the next domain when this one is gone. Where the machine cannot combine writes there are no
/// BlueFlame registers, and all domains of a context ring a UAR page that needs no lock.
///
/// On rxe there is no doorbell register: a system call rings a queue, and only this library knows of the domain.
#[doc(alias = "ibv_td")]
#[derive(Debug)]
pub struct ThreadDomain {
    pub(crate) inner: Arc<TdInner>,
}

impl Context {
    /// Allocates a thread domain.
    ///
    /// # Errors
    ///
    /// On mlx5 the kernel's error when the device has no register left, mostly `ENOMEM` or `ENOSPC`; the
    /// message has the number of registers of this context. On rxe none but
    /// [`Error::is_forked`](crate::Error::is_forked).
    #[doc(alias = "ibv_alloc_td")]
    pub fn alloc_td(&self) -> Result<ThreadDomain> {
        const VERB: &str = "alloc_td";
        let file = self.file.clone();
        file.check_fork(VERB)?;
        let register = file.provider.thread_register(&*file.kernel, VERB)?;
        Ok(ThreadDomain { inner: Arc::new(TdInner { file, register }) })
    }
}

impl ThreadDomain {
    /// Deallocates the domain; dropping it does the same as soon as nothing uses it any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a parent domain or a queue created under it lives; the domain comes back
    /// with the error.
    #[doc(alias = "ibv_dealloc_td")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "a parent domain or a queue still uses the thread domain";
        destroy_sole(self.inner, "dealloc_td", HELD, |td| td.file.check_fork("dealloc_td"))
            .map_err(|failed| failed.map(|inner| ThreadDomain { inner }))
    }
}
