//! Queue pairs: two queues and a state. Pairs with `core/uverbs_std_types_qp.c`.
//!
//! [`builder`] makes one, [`send`] and [`recv`] post to it, [`state`] has the states and their order, and [`control`]
//! changes the state by the attributes of [`attr`]; [`xrc`] has the halves of XRC connections.

mod attr;
mod builder;
mod control;
pub(crate) mod ece;
mod endpoint;
mod handle;
mod info;
mod mcast;
pub(crate) mod ordering;
mod recv;
mod reset;
mod send;
pub(crate) mod state;
mod transition;
mod xrc;

pub use attr::{PathMigState, QpAttr};
pub use builder::QpBuilder;
pub use control::QpControl;
pub use ece::Ece;
pub use endpoint::{Endpoint, Handshake};
pub(crate) use handle::{QpHandle, WeakQpHandle};
pub use info::QpInfo;
pub use mcast::McastMembership;
pub use recv::{RecvBatch, RecvQueue};
pub use send::{SendBatch, SendQueue};
pub use state::{QpState, QpType};
pub use xrc::XrcTarget;

use crate::context::Context;
use crate::cq::CqInner;
use crate::error::{Error, ErrorWith, Result};
use crate::events::keys::EventKey;
use crate::file::File;
use crate::first_panic::FirstPanic;
use crate::number::Qpn;
use crate::object::Object;
use crate::pd::{PdInner, Shared, Sharing};
use crate::provider::mlx5::rq::Mlx5Rq;
use crate::provider::mlx5::sq::Mlx5Sq;
use crate::provider::{Member, NamedAddresses, QueueResources};
use crate::srq::SrqInner;
use crate::sync::lock::{Guard, Lock};
use crate::wr::PostError;
use crate::xrcd::XrcdInner;
use ece::EceState;
use state::Tracked;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use uverbs_uapi::qp::ib_uverbs_qp_cap;

/// The capacities that a queue pair was granted at creation, each at least the requested one; see [`QpControl::caps`].
#[doc(alias = "ibv_qp_cap")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpCaps {
    /// Requests that the send queue holds.
    pub max_send_wr: u32,
    /// Requests that the receive queue holds; 0 with a shared receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

impl QpCaps {
    fn new(raw: &ib_uverbs_qp_cap) -> Self {
        QpCaps {
            max_send_wr: raw.max_send_wr,
            max_recv_wr: raw.max_recv_wr,
            max_send_sge: raw.max_send_sge,
            max_recv_sge: raw.max_recv_sge,
            max_inline_data: raw.max_inline_data,
        }
    }
}

/// The part that a queue pair's queues and its control handle share.
#[derive(Debug)]
pub(crate) struct QpInner {
    pub(crate) object: Object<QueueResources>,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    pub(crate) caps: QpCaps,
    /// The state that this process last brought the queue pair to.
    state: Tracked,
    /// Held while a change reads the old state and stores the new one, so that a change does not overwrite the
    /// state of a concurrent reset.
    moving: Lock<()>,
    /// Whether completions may carry received data in the CQE instead of memory (scatter to CQE).
    pub(crate) scatters: bool,
    /// Whether the device may place data out of order.
    pub(crate) out_of_order: bool,
    /// The endpoint that was given to the peer.
    local: Lock<Option<endpoint::Local>>,
    pub(crate) groups: mcast::Groups,
    event_key: EventKey,
    pub(crate) base: Base,
    /// Its identity in its completion queues.
    pub(crate) member: Member,
    /// The options of its connection; `None` if the device has none.
    ece: Option<EceState>,
    /// The address handles that its requests name; `None` unless it sends datagrams on rxe.
    named: Option<Arc<NamedAddresses>>,
    /// Whether it was retired from its completion queues.
    retired: bool,
    /// Dropped once the kernel confirmed that the queue pair is gone, and else leaked.
    kept: Lock<Vec<Box<dyn Any + Send>>>,
}

/// The objects that a queue pair was created from, and keeps alive.
#[derive(Debug)]
pub(crate) enum Base {
    Domain {
        send_cq: Arc<CqInner>,
        recv_cq: Arc<CqInner>,
        srq: Option<Arc<SrqInner>>,
        pd: Arc<PdInner>,
    },
    /// An XRC target: its receives, memory and completions are those of shared receive queues.
    Xrc { _xrcd: Arc<XrcdInner> },
}

impl QpInner {
    pub(crate) fn file(&self) -> &Arc<File> {
        self.object.file()
    }

    #[inline]
    pub(crate) fn state(&self) -> QpState {
        self.state.get()
    }

    pub(crate) fn set_state(&self, state: QpState) {
        self.state.set(state);
    }

    /// Locks the queue pair's state: nobody else changes it while this is held. An error in a forked child.
    pub(crate) fn moving(&self, verb: &'static str) -> Result<Guard<'_, ()>> {
        self.moving.lock().ok_or_else(|| Error::forked(verb))
    }

    /// The number of resets that this process learned of.
    pub(crate) fn resets(&self) -> u32 {
        self.state.resets()
    }

    /// Stores the state that a change led to, unless the rings became stale meanwhile.
    pub(crate) fn advance(&self, state: QpState) {
        self.state.advance(state);
    }

    /// Stores a state that the kernel reported, unless this process changed the state since it was `before`.
    pub(crate) fn observe_state(&self, before: QpState, reported: QpState) {
        self.state.observe(before, reported, matches!(self.base, Base::Domain { .. }));
    }

    /// Marks the rings as stale: the device's queues were reset, and the rings of this process were not. Nothing is
    /// posted and the state does not change before a [`reset`](QueuePair::reset) that resets the rings, too.
    pub(crate) fn set_stale(&self) {
        self.state.set_stale();
    }

    /// See [`set_stale`](Self::set_stale).
    pub(crate) fn is_stale(&self) -> bool {
        self.state.is_stale()
    }

    /// Destroys the kernel's queue pair, and makes its completion queues discard the completions of
    /// it that they still hold.
    pub(crate) fn destroy(&mut self) -> Result<()> {
        if self.retired {
            return Ok(());
        }
        self.object.destroy()?;
        self.retired = true;
        self.each_cq(|cq| cq.members.retire(&self.member));
        if let (Some(named), Some(pd)) = (&self.named, self.pd()) {
            pd.kernel.retired.detach(named);
        }
        Ok(())
    }

    /// Keeps memory that the device may still reach until the kernel confirmed that the queue pair is gone.
    pub(crate) fn keep(&self, values: Vec<Box<dyn Any + Send>>) {
        match self.kept.lock() {
            Some(mut kept) => kept.extend(values),
            // A forked child: all of it is the parent's.
            None => values.into_iter().for_each(std::mem::forget),
        }
    }

    /// Visits its completion queues, each once.
    fn each_cq(&self, visit: impl Fn(&CqInner)) {
        let Base::Domain { send_cq, recv_cq, .. } = &self.base else { return };
        visit(send_cq);
        if !Arc::ptr_eq(send_cq, recv_cq) {
            visit(recv_cq);
        }
    }

    /// Whether its sends complete to this queue.
    pub(crate) fn sends_to(&self, cq: &Arc<CqInner>) -> bool {
        matches!(&self.base, Base::Domain { send_cq, .. } if Arc::ptr_eq(send_cq, cq))
    }

    /// The options of its connection, if its device has any.
    pub(crate) fn ece(&self) -> Option<&EceState> {
        self.ece.as_ref()
    }

    /// The protection domain; an XRC target has none.
    #[inline]
    pub(crate) fn pd(&self) -> Option<&Arc<PdInner>> {
        match &self.base {
            Base::Domain { pd, .. } => Some(pd),
            Base::Xrc { .. } => None,
        }
    }

    /// The shared receive queue that receives come from, if any.
    pub(crate) fn srq(&self) -> Option<&Arc<SrqInner>> {
        match &self.base {
            Base::Domain { srq, .. } => srq.as_ref(),
            Base::Xrc { .. } => None,
        }
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        let kept = self.kept.get_mut().map(std::mem::take).unwrap_or_default();
        if self.file().epoch.is_over() {
            return kept.into_iter().for_each(std::mem::forget);
        }
        if self.destroy().is_ok() {
            return FirstPanic::drop_each(kept);
        }
        kept.into_iter().for_each(std::mem::forget);
        // No second attempt: if it succeeded, the number would be retired for ever without need.
        self.object.abandon();
        self.each_cq(|cq| cq.members.retire_for_good(&self.member));
    }
}

/// A queue pair: a send queue, a receive queue, and control over both.
///
/// Posting takes `&mut self`. To send from one thread and receive in another, [`split`] it; to
/// share one queue among threads, put it into a `Mutex`. Everything else is in [`QpControl`], takes `&self`
/// and works from any thread. The parameter says how the send queue is rung; see [`Sharing`]. The
/// [crate's page](crate#the-verbs-themselves) has a whole program.
///
/// [`split`]: QueuePair::split
///
/// The queues of a whole queue pair are never lent as such: a program that had two of them could
/// exchange them, and a reset would then empty a queue that a device works on. So this does not compile:
///
/// ```compile_fail,E0599
/// # fn f(one: &mut uverbs::QueuePair, other: &mut uverbs::QueuePair) {
/// std::mem::swap(one.send_queue(), other.send_queue());
/// # }
/// ```
#[doc(alias = "ibv_qp")]
pub struct QueuePair<S: Sharing = Shared> {
    pub(crate) send: SendQueue<S>,
    /// `None` when receives come from a shared receive queue, and on an XRC initiator.
    recv: Option<RecvQueue>,
    control: QpControl,
}

/// The parts of a queue pair; see [`QueuePair::split`].
#[derive(Debug)]
pub struct QpParts<S: Sharing = Shared> {
    /// The send queue.
    pub send: SendQueue<S>,
    /// The receive queue; `None` when receives come from a shared one, and on an XRC initiator.
    pub recv: Option<RecvQueue>,
    /// Everything that is not posting.
    pub control: QpControl,
}

impl<S: Sharing> QueuePair<S> {
    /// Takes the queue pair apart: the queues can go to different threads, and the control handle
    /// works from any.
    ///
    /// The queue pair is destroyed when all parts are dropped, as far as
    /// [dropping a queue pair](Self::destroy) does. [`join`](Self::join) puts them together again.
    ///
    /// ```no_run
    /// # fn f(qp: uverbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::{QpParts, QueuePair};
    ///
    /// let QpParts { mut send, recv, control } = qp.split();
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| println!("one thread sends: {:?}", send.batch().map(|batch| batch.room())));
    ///     scope.spawn(|| println!("another watches: {:?}", control.query()));
    /// });
    /// let whole = QueuePair::join(QpParts { send, recv, control })?;
    /// whole.destroy()?;
    /// # Ok(()) }
    /// ```
    pub fn split(self) -> QpParts<S> {
        QpParts { send: self.send, recv: self.recv, control: self.control }
    }

    /// Puts the parts of a queue pair together again.
    ///
    /// # Errors
    ///
    /// `EINVAL`, with the parts, if they belong to different queue pairs or if one is missing.
    pub fn join(parts: QpParts<S>) -> std::result::Result<Self, ErrorWith<QpParts<S>>> {
        let QpParts { send, recv, control } = &parts;
        let whole = Arc::ptr_eq(send.context.qp.inner(), control.qp.inner())
            && match recv {
                Some(recv) => Arc::ptr_eq(recv.qp.inner(), control.qp.inner()),
                None => {
                    let none_asked = control.qp.caps.max_recv_wr == 0;
                    control.qp.srq().is_some()
                        || control.qp.qp_type == QpType::XRC_INI
                        || none_asked
                }
            };
        if !whole {
            let error = Error::invalid("join", "the parts are not those of one queue pair");
            return Err(error.with(parts));
        }
        Ok(QueuePair { send: parts.send, recv: parts.recv, control: parts.control })
    }

    /// The queues of an mlx5 device.
    pub(crate) fn mlx5(&self) -> Option<(&Mlx5Sq, Option<&Mlx5Rq>)> {
        Some((self.send.mlx5()?, self.recv.as_ref().and_then(RecvQueue::mlx5)))
    }

    /// As [`mlx5`](Self::mlx5), to change.
    pub(crate) fn mlx5_mut(&mut self) -> Option<(&mut Mlx5Sq, Option<&mut Mlx5Rq>)> {
        Some((self.send.mlx5_mut()?, self.recv.as_mut().and_then(RecvQueue::mlx5_mut)))
    }

    /// Starts a batch of sends; see [`SendQueue::batch`].
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn send_batch(&mut self) -> std::result::Result<SendBatch<'_, S>, PostError> {
        self.send.batch()
    }

    /// Starts a batch of receives; see [`RecvQueue::batch`].
    ///
    /// # Errors
    ///
    /// [`PostError::SharedReceives`] when receives come from a shared receive queue,
    /// [`PostError::Unsupported`] on an XRC initiator, which receives nothing, and
    /// [`PostError::NoQueue`] if the queue pair was built with [`max_recv_wr(0)`](QpBuilder::max_recv_wr).
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn recv_batch(&mut self) -> std::result::Result<RecvBatch<'_>, PostError> {
        match &mut self.recv {
            Some(recv) => recv.batch(),
            None if self.control.qp.srq().is_some() => Err(PostError::SharedReceives),
            None if self.control.qp_type() == QpType::XRC_INI => Err(PostError::Unsupported),
            None => Err(PostError::NoQueue),
        }
    }

    /// Destroys the queue pair and returns the error, if any. Its completions that were not polled are discarded.
    ///
    /// Dropping it does the same silently, unless another object keeps it alive. Then it is brought to
    /// state [`RESET`](QpState::RESET) instead, where the device works on none of its requests any more,
    /// and is destroyed after the last such object. If the kernel refuses that, the queue pair is leaked
    /// (see [`Context::leaked`]), and the device may go on with posted requests.
    ///
    /// # Errors
    ///
    /// `EBUSY` while another object keeps it alive: a multicast membership, a flow rule, a
    /// [memory window](crate::MemoryWindow#what-a-window-holds), or an
    /// [object of DEVX](crate::mlx5::devx::DevxObject); it comes back with the error.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        const HELD: &str = "a multicast membership, a memory window of type 2 that was to be bound \
                            through it, a flow rule, or an object of DEVX still holds the queue pair: \
                            destroy that, or reallocate the window";
        let QueuePair { send, recv, control } = self;
        // The queues dropped their handles, so `control` has the last one.
        let (send_ring, recv_ring) = (send.into_ring(), recv.map(RecvQueue::into_ring));
        control.qp.destroy(HELD).map_err(|failed| {
            failed.map(|qp| {
                let recv = recv_ring.map(|(ring, gate)| RecvQueue::new(qp.clone(), ring, gate));
                let (ring, gate) = send_ring;
                let send = SendQueue::new(qp.clone(), ring, gate);
                QueuePair { send, recv, control: QpControl { qp } }
            })
        })
    }
}

/// Everything that is not posting.
impl<S: Sharing> std::ops::Deref for QueuePair<S> {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.control
    }
}

impl<S: Sharing> fmt::Debug for QueuePair<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.control.fmt(f)
    }
}

impl QpControl {
    /// A context on the same file.
    pub fn context(&self) -> Context {
        Context { file: self.qp.file().clone() }
    }
}
