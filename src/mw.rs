//! Memory windows: rights to a piece of a region that are given and taken back by requests, without
//! a registration. Pairs with `ib_uverbs_alloc_mw` in `core/uverbs_cmd.c`, and with the bind and
//! invalidate requests of [`SendWr`](crate::SendWr).

use crate::access::Access;
use crate::completion::WcStatus;
use crate::error::{Error, Result};
use crate::mr::MemoryRegion;
use crate::number::{Lkey, Rkey};
use crate::object::{Class, Object};
use crate::pd::{PdInner, ProtectionDomain, Sharing};
use crate::qp::{QpControl, QpInner};
use crate::uverbs::invoke_write::write;
use crate::wr::WindowBinding;
use rustix::io::Errno;
use std::fmt;
use std::ops::RangeBounds;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use uverbs_uapi::mw::{ib_mw_type, ib_uverbs_alloc_mw, ib_uverbs_alloc_mw_resp};
use uverbs_uapi::write::IB_USER_VERBS_CMD_ALLOC_MW;
use zerocopy::FromZeros;

/// The two kinds of memory windows.
#[doc(alias = "ibv_mw_type")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowType {
    /// Valid for peers of every queue pair of the protection domain; bound again or
    /// [unbound](MemoryWindow::unbind) at any time.
    #[doc(alias = "IBV_MW_TYPE_1")]
    One,
    /// Valid for the peer of the queue pair that bound it; to be invalidated, by this side or by
    /// the peer, before it can be bound again.
    #[doc(alias = "IBV_MW_TYPE_2")]
    Two,
}

/// What a bound window stands on. The kernel refuses to destroy a region with a bound window, and
/// rxe waits 50 seconds for the window when its queue pair is destroyed.
#[derive(Debug)]
struct Hold {
    _region: Arc<dyn fmt::Debug + Send + Sync>,
    /// Type 2 only.
    _qp: Option<Arc<QpInner>>,
}

// Nothing is ever read through a hold, so nobody can see what a panic left behind.
impl UnwindSafe for Hold {}
impl RefUnwindSafe for Hold {}

/// A binding that was handed out and of which nobody said yet what became of it.
#[derive(Debug)]
struct Pending {
    rkey: Rkey,
    /// `None` if it unbinds.
    hold: Option<Hold>,
}

/// A memory window: a key of its own, with rights of its own, to a piece of a region.
///
/// Binding is a request like a send. [`bind`](Self::bind) prepares it, and the binding is posted
/// with [`SendWr::bind_mw`](crate::SendWr::bind_mw); requests are carried out in order, so a send
/// that tells the peer the new key may follow in the same batch. When the request has completed,
/// [`settle`](Self::settle) tells the window how. To take the rights back post
/// [`SendWr::local_inv`](crate::SendWr::local_inv) with its key, or let the peer do it with
/// [`SendWr::send_inv`](crate::SendWr::send_inv), then call [`invalidated`](Self::invalidated); a
/// window of type 1 is [unbound](Self::unbind) instead.
///
/// ```no_run
/// # use uverbs::*;
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// # let context = Context::open(&devices()?[0])?;
/// # let pd = context.alloc_pd()?;
/// # let mut cq = context.create_cq(16).build()?;
/// # let mut qp = pd.create_qp(&cq, &cq, QpType::RC).build()?;
/// let region = pd
///     .registration()
///     .access(Access::LOCAL_WRITE | Access::MW_BIND)
///     .allocate::<u8>(1 << 20)?;
/// let mut window = pd.alloc_mw(WindowType::Two)?;
/// let binding = window.bind(&qp, &region, 4096..8192, Access::REMOTE_READ)?;
/// let mut batch = qp.send_batch()?;
/// batch.push(SendWr::bind_mw(binding).signaled())?;
/// // SAFETY: the request names no memory of this side.
/// unsafe { batch.ring()? };
/// // ... and when it has completed:
/// # let status = WcStatus::SUCCESS;
/// window.settle(status);
/// # Ok(()) }
/// ```
///
/// As long as a window is bound it keeps its region, and if it is of type 2 its queue pair, alive,
/// so all of them may be dropped in any order. It is the library's word against the device's: if
/// `settle` or `invalidated` is told otherwise than it is, destroying the region fails, and its
/// memory is leaked rather than freed (see [`Context::leaked`](crate::Context::leaked)).
///
/// Dropping a window deallocates it, bound or not.
///
/// rxe grants a window's rights to the whole region (at least up to Linux 7.2): it compares a
/// peer's addresses with the bounds of the region instead of the window's.
#[doc(alias = "ibv_mw")]
#[derive(Debug)]
pub struct MemoryWindow {
    /// First, so that the kernel's window is gone before what it stands on.
    object: Object,
    window_type: WindowType,
    rkey: Rkey,
    pending: Option<Box<Pending>>,
    bound: Option<Hold>,
    pd: Arc<PdInner>,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Allocates a memory window, which is not bound to anything yet.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no windows, `EINVAL` if it has none of this type, `ENOMEM`.
    #[doc(alias = "ibv_alloc_mw")]
    pub fn alloc_mw(&self, window_type: WindowType) -> Result<MemoryWindow> {
        const VERB: &str = "alloc_mw";
        let file = self.inner.file();
        let mw_type = match window_type {
            WindowType::One => ib_mw_type::IB_MW_TYPE_1,
            WindowType::Two => ib_mw_type::IB_MW_TYPE_2,
        };
        let request = ib_uverbs_alloc_mw {
            pd_handle: self.inner.handle(),
            mw_type: mw_type.0,
            ..Default::default()
        };
        let mut resp = ib_uverbs_alloc_mw_resp::new_zeroed();
        let mut command = write(IB_USER_VERBS_CMD_ALLOC_MW, &request).answer(&mut resp);
        file.execute(VERB, &mut command)
            .map_err(|error| error.detail(format!("a memory window of type {window_type:?}")))?;
        drop(command);
        Ok(MemoryWindow {
            object: Object::new(file.clone(), Class::MW, resp.mw_handle, ()),
            window_type,
            rkey: Rkey(resp.rkey),
            pending: None,
            bound: None,
            pd: self.inner.clone(),
        })
    }
}

impl MemoryWindow {
    /// The key for peers. From [`bind`](Self::bind) on it is the new one, of use as soon as the
    /// request was carried out.
    pub fn rkey(&self) -> Rkey {
        self.pending.as_ref().map_or(self.rkey, |pending| pending.rkey)
    }

    /// The kind of window.
    pub fn window_type(&self) -> WindowType {
        self.window_type
    }

    /// Whether it is bound, as far as [`settle`](Self::settle) and
    /// [`invalidated`](Self::invalidated) told.
    pub fn is_bound(&self) -> bool {
        self.bound.is_some()
    }

    /// The number by which the kernel knows the window within its file.
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }

    /// Prepares to bind the window to `range` of `region`, in bytes, with the rights `access`. The
    /// binding must be posted to `qp`, and the window must be told what became of it by
    /// [`settle`](Self::settle).
    ///
    /// With [`Access::ZERO_BASED`], on windows of type 2, peers count addresses from the beginning
    /// of the range; otherwise they are those of the region.
    ///
    /// # Errors
    ///
    /// `EBUSY` while another binding is not settled, or while a window of type 2 is bound.
    /// `EINVAL` for a range that is empty or not in the region, for rights that the region lacks
    /// ([`Access::MW_BIND`]; [`Access::LOCAL_WRITE`] if peers shall write) or that windows do not
    /// have, and if window, region and queue pair are not of one protection domain.
    #[doc(alias = "ibv_bind_mw")]
    pub fn bind<T, M: Send + 'static>(
        &mut self,
        qp: &QpControl,
        region: &MemoryRegion<T, M>,
        range: impl RangeBounds<usize>,
        access: Access,
    ) -> Result<WindowBinding> {
        self.check_queue(qp)?;
        let file = self.object.file();
        file.check_same(VERB, "memory region", region.inner.file())?;
        self.check_domain("memory region", &region.inner.pd)?;
        check_access(self.window_type, access, region.access())?;
        let (offset, length) =
            region.resolve(range).map_err(|error| Error::from(error).in_verb(VERB))?;
        if length == 0 {
            return Err(Error::invalid(VERB, "a range of 0 bytes"));
        }
        if self.window_type == WindowType::Two && self.bound.is_some() {
            return Err(Error::new(VERB, Errno::BUSY)
                .detail("a window of type 2 must be invalidated before it is bound again"));
        }
        let hold = Hold {
            _region: region.inner.clone(),
            _qp: (self.window_type == WindowType::Two).then(|| qp.qp.clone()),
        };
        Ok(self.begin(
            WindowBinding {
                qpn: (self.window_type == WindowType::Two).then(|| qp.qpn()),
                addr: region.addr().wrapping_add(offset as u64),
                length: length as u64,
                mr_lkey: region.lkey(),
                old_rkey: self.rkey,
                new_rkey: next_key(self.rkey),
                access,
            },
            Some(hold),
        ))
    }

    /// Prepares to unbind a window of type 1: a binding to nothing, posted and settled like any.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a window of type 2, `EBUSY` while another binding is not settled.
    #[doc(alias = "ibv_bind_mw")]
    pub fn unbind(&mut self, qp: &QpControl) -> Result<WindowBinding> {
        self.check_queue(qp)?;
        if self.window_type == WindowType::Two {
            return Err(Error::invalid(VERB, "a window of type 2 is invalidated, not unbound"));
        }
        Ok(self.begin(
            WindowBinding {
                qpn: None,
                addr: 0,
                length: 0,
                mr_lkey: Lkey(0),
                old_rkey: self.rkey,
                new_rkey: next_key(self.rkey),
                access: Access::empty(),
            },
            None,
        ))
    }

    /// Tells the window how the request with its binding completed. Unless that is
    /// [`WcStatus::SUCCESS`] it is again what it was before; say so, too, if the binding was never
    /// posted ([`WcStatus::WR_FLUSH_ERR`]).
    pub fn settle(&mut self, status: WcStatus) {
        let Some(pending) = self.pending.take() else { return };
        if status == WcStatus::SUCCESS {
            self.rkey = pending.rkey;
            self.bound = pending.hold;
        }
    }

    /// Tells the window that its key was invalidated: a local invalidate completed, or a message
    /// that invalidates it was [received](crate::Completion::invalidated_rkey). It may be bound again.
    pub fn invalidated(&mut self) {
        self.bound = None;
    }

    /// Deallocates the window and says whether that went well; dropping it does the same
    /// silently.
    ///
    /// # Errors
    ///
    /// What the kernel answers; the window comes back with the error.
    #[doc(alias = "ibv_dealloc_mw")]
    pub fn destroy(mut self) -> std::result::Result<(), (Self, Error)> {
        match self.object.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn begin(&mut self, binding: WindowBinding, hold: Option<Hold>) -> WindowBinding {
        self.pending = Some(Box::new(Pending { rkey: binding.new_rkey, hold }));
        binding
    }

    fn check_queue(&self, qp: &QpControl) -> Result<()> {
        let file = self.object.file();
        file.check_fork(VERB)?;
        file.check_same(VERB, "queue pair", qp.qp.file())?;
        match qp.qp.pd() {
            Some(pd) => self.check_domain("queue pair", pd)?,
            None => return Err(Error::invalid(VERB, "an XRC target binds no windows")),
        }
        if self.pending.is_some() {
            return Err(Error::new(VERB, Errno::BUSY)
                .detail("the window was not told yet what became of its last binding"));
        }
        Ok(())
    }

    fn check_domain(&self, what: &str, pd: &PdInner) -> Result<()> {
        if Arc::ptr_eq(&self.pd.kernel, &pd.kernel) {
            return Ok(());
        }
        Err(Error::invalid(
            VERB,
            format!(
                "the {what} belongs to protection domain {}, the window to {}",
                pd.handle(),
                self.pd.handle()
            ),
        ))
    }
}

const VERB: &str = "bind_mw";

impl WindowBinding {
    /// The key that the window has when the request was carried out: what to tell the peer.
    pub fn rkey(&self) -> Rkey {
        self.new_rkey
    }
}

/// The next key of a window: the device owns the upper 24 bits, the user the lowest 8, and a
/// binding must change them so that keys told earlier are of no use any more.
#[doc(alias = "ibv_inc_rkey")]
fn next_key(rkey: Rkey) -> Rkey {
    Rkey(rkey.0 & !0xff | rkey.0.wrapping_add(1) & 0xff)
}

fn check_access(window_type: WindowType, access: Access, region: Access) -> Result<()> {
    let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let known = match window_type {
        WindowType::One => remote,
        WindowType::Two => remote | Access::ZERO_BASED,
    };
    if !known.contains(access) {
        let unknown = access.difference(known);
        return Err(Error::invalid(
            VERB,
            format!("a window of type {window_type:?} cannot have access {unknown:?}"),
        ));
    }
    if !region.contains(Access::MW_BIND) {
        return Err(Error::invalid(
            VERB,
            format!("the region was registered with access {region:?}, without MW_BIND"),
        ));
    }
    let written = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(written) && !region.contains(Access::LOCAL_WRITE) {
        return Err(Error::invalid(
            VERB,
            format!("access {access:?} needs LOCAL_WRITE on the region, which has {region:?}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_key_differs_in_the_low_byte_only() {
        assert_eq!(next_key(Rkey(0x1234_5600)), Rkey(0x1234_5601));
        assert_eq!(next_key(Rkey(0x1234_56ff)), Rkey(0x1234_5600));
        assert_eq!(next_key(Rkey(0xffff_ffff)), Rkey(0xffff_ff00));
    }

    #[test]
    fn rights_of_a_window_are_for_peers_and_within_those_of_the_region() {
        let region = Access::LOCAL_WRITE | Access::MW_BIND;
        let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let ok = |window, access, region| check_access(window, access, region).is_ok();
        assert!(ok(WindowType::One, all, region));
        assert!(ok(WindowType::Two, all | Access::ZERO_BASED, region));
        assert!(!ok(WindowType::One, all | Access::ZERO_BASED, region));
        assert!(!ok(WindowType::Two, Access::LOCAL_WRITE, region));
        assert!(!ok(WindowType::Two, all, Access::LOCAL_WRITE));
        assert!(!ok(WindowType::Two, Access::REMOTE_WRITE, Access::MW_BIND));
        assert!(!ok(WindowType::Two, Access::REMOTE_ATOMIC, Access::MW_BIND));
        assert!(ok(WindowType::Two, Access::REMOTE_READ, Access::MW_BIND));
    }
}
