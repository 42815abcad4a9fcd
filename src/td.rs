//! Thread domains: the promise that only one thread at a time uses what is created under one,
//! kept by a token that cannot be in two places.

use crate::context::Context;
use crate::error::{ErrorWith, Result};
use crate::file::File;
use crate::object::destroy_sole;
use crate::provider::ThreadRegister;
use std::sync::Arc;

/// What queues under a thread domain remember of it.
#[derive(Debug)]
pub(crate) struct TdInner {
    pub(crate) file: Arc<File>,
    pub(crate) register: ThreadRegister,
}

/// A thread domain: exclusive use of a doorbell register.
///
/// Add it to a [`ParentDomain`](crate::ParentDomain); queues created there are rung with
/// `&mut` of this token. As it is not `Clone`, whoever holds it is the only one who can ring any
/// of them, and no lock is needed to make it so. The token moves between threads together with
/// its queues:
///
/// ```no_run
/// use uverbs::{CompletionQueue, Exclusive, QueuePair, ThreadDomain};
///
/// struct Worker {
///     td: ThreadDomain,
///     qp: QueuePair<Exclusive>,
///     cq: CompletionQueue,
/// }
/// ```
///
/// On mlx5 the register is a BlueFlame register, into which small requests are copied whole. It goes
/// back to the context when the domain is gone, and the next domain gets it. Where the machine
/// cannot combine writes there are no such registers, and all domains of a context ring a page of
/// doorbells that needs no lock.
///
/// On rxe there is no register: the kernel is rung by a system call, and the domain is pure
/// bookkeeping.
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
    /// On mlx5 what the kernel answers when the device has no register left, mostly `ENOMEM` or
    /// `ENOSPC`; the message counts those that this context has. None on rxe but
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
