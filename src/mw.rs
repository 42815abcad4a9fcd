//! Memory windows: rights to a part of a region that work requests grant and revoke, without a
//! registration. Pairs with `ib_uverbs_alloc_mw` in `core/uverbs_cmd.c`, and with the bind and
//! invalidate requests of [`SendWr`](crate::SendWr).
//!
//! `docs/KERNEL-NOTES.md` says what each driver does with a region or queue pair under a bound window, and
//! why a window's regions are held until DEALLOC_MW.

use crate::access::Access;
use crate::error::{Error, ErrorWith, Result};
use crate::mr::{MemoryRegion, MrInner};
use crate::number::{Lkey, Rkey};
use crate::object::{Class, Object};
use crate::pd::{PdInner, ProtectionDomain, Sharing};
use crate::qp::{QpControl, QpInner};
use crate::uverbs::invoke_write::write;
use crate::wc::WcStatus;
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

/// The number of regions, and of queue pairs, that a window holds before [`bind`](MemoryWindow::bind)
/// reallocates it and releases them. Each held region may be pinned memory that the program no longer
/// needs. A window that was bound to fewer regions is not reallocated for this reason.
const MAX_HELD: usize = 16;

/// Everything that the device may still reach by the window's keys: every region and, for type 2, every queue
/// pair that [`bind`](MemoryWindow::bind) prepared a binding for. They are released once the kernel confirmed
/// that the window is gone, and leaked with a window that the kernel refuses to deallocate.
///
/// The program cannot release them before. mlx5's driver deregisters a region with a bound window, and
/// gives the key to the next region, which the window then opens to the peer. rxe's driver waits 50 seconds
/// for a queue pair with a bound window, and then frees it although the window still points to it.
#[derive(Debug, Default)]
struct Holds {
    regions: Vec<Arc<dyn fmt::Debug + Send + Sync>>,
    qps: Vec<Arc<QpInner>>,
}

// The held objects are never accessed, so a panic leaves nothing half-done that could be seen.
impl UnwindSafe for Holds {}
impl RefUnwindSafe for Holds {}

impl Holds {
    fn has_region<M>(&self, region: &Arc<MrInner<M>>) -> bool {
        let wanted = Arc::as_ptr(region);
        self.regions.iter().any(|held| std::ptr::addr_eq(Arc::as_ptr(held), wanted))
    }

    fn has_qp(&self, qp: &Arc<QpInner>) -> bool {
        self.qps.iter().any(|held| Arc::ptr_eq(held, qp))
    }

    /// Whether adding these would exceed [`MAX_HELD`].
    fn is_full_for<M>(&self, region: &Arc<MrInner<M>>, qp: Option<&Arc<QpInner>>) -> bool {
        (self.regions.len() >= MAX_HELD && !self.has_region(region))
            || qp.is_some_and(|qp| self.qps.len() >= MAX_HELD && !self.has_qp(qp))
    }

    fn add<M: Send + 'static>(&mut self, region: &Arc<MrInner<M>>, qp: Option<&Arc<QpInner>>) {
        if !self.has_region(region) {
            self.regions.push(region.clone());
        }
        if let Some(qp) = qp.filter(|qp| !self.has_qp(qp)) {
            self.qps.push(qp.clone());
        }
    }
}

/// A binding that `bind` or `unbind` returned and that is not settled yet.
#[derive(Clone, Copy, Debug)]
struct PendingBinding {
    rkey: Rkey,
    /// Whether it binds the window, or unbinds it.
    binds: bool,
}

/// The outcome of a window's last binding, as the program reported it to [`settle`](MemoryWindow::settle).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reported {
    Unbound,
    Bound,
    /// The request failed, or was never posted: it is not known which key the window has on the device.
    Failed,
}

/// A memory window: a key of its own, with rights of its own, to a part of a region.
///
/// Binding is a request like a send. [`bind`](Self::bind) prepares it, and the binding is posted
/// with [`SendWr::bind_mw`](crate::SendWr::bind_mw); requests are carried out in order, so a send
/// that tells the peer the new key may follow in the same batch. When the request has completed,
/// report its status to [`settle`](Self::settle). To revoke the rights, post
/// [`SendWr::local_inv`](crate::SendWr::local_inv) with its key, or let the peer do it with
/// [`SendWr::send_inv`](crate::SendWr::send_inv), then call [`invalidated`](Self::invalidated); a
/// window of type 1 is [unbound](Self::unbind) instead.
///
/// ```no_run
/// # use uverbs::*;
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// # let context = Context::open(&devices()?[0])?;
/// # let pd = context.alloc_pd()?;
/// # let mut cq = context.cq_builder(16).build()?;
/// # let mut qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
/// let region = pd
///     .mr_builder()
///     .access(Access::LOCAL_WRITE | Access::MW_BIND)
///     .allocate::<u8>(1 << 20)?;
/// let mut window = pd.alloc_mw(WindowType::Two)?;
/// let binding = window.bind(&qp, &region, 4096..8192, Access::REMOTE_READ)?;
/// let mut batch = qp.send_batch()?;
/// batch.push(SendWr::bind_mw(binding).signaled())?;
/// // SAFETY: the request names no memory of this side, and `window` outlives its completion.
/// unsafe { batch.ring()? };
/// // ... and when it has completed:
/// # let status = WcStatus::SUCCESS;
/// window.settle(status);
/// # Ok(()) }
/// ```
///
/// # What a window holds
///
/// A window holds every region that [`bind`](Self::bind) prepared a binding to, and for type 2 every queue pair of
/// a binding, until the kernel confirmed that the window is deallocated. The program may drop them in any order;
/// they are destroyed after the window. Until then [destroying](MemoryRegion::destroy) such a region or queue pair
/// fails with `EBUSY`. A queue pair that is dropped before the window moves to state
/// [`RESET`](crate::QpState::RESET) at once, and receives and sends nothing. `settle`, `invalidated` and an
/// unbinding release nothing, because the library cannot ask a device which memory a key still opens. To free a
/// region and keep the window, [reallocate](Self::reallocate) the window.
///
/// A window holds at most 16 regions and 16 queue pairs. The `bind` that would add a seventeenth reallocates
/// the window first. The old key then ends at that call and not when the request is carried out: a peer that
/// still uses the old key of a window of type 1 gets
/// [`REM_ACCESS_ERR`](crate::WcStatus::REM_ACCESS_ERR) a moment earlier.
///
/// Dropping a window deallocates it, bound or not. If the kernel refuses, the regions and queue pairs that
/// it holds are leaked with it (see [`Context::leaked`](crate::Context::leaked)).
///
/// rxe grants a window's rights to the whole region (at least up to Linux 7.2): it compares a
/// peer's addresses with the bounds of the region instead of the window's.
///
/// Revoking the rights, and deallocating the window:
///
/// ```no_run
/// # use uverbs::*;
/// # fn f(mut window: MemoryWindow, qp: &QueuePair, batch: &mut SendBatch<'_>)
/// # -> std::result::Result<(), Box<dyn std::error::Error>> {
/// match window.window_type() {
///     WindowType::One => batch.push(SendWr::bind_mw(window.unbind(qp)?).signaled())?,
///     WindowType::Two => batch.push(SendWr::local_inv(window.rkey()).signaled())?,
/// }
/// // … and when the request has completed with success:
/// match window.window_type() {
///     WindowType::One => window.settle(WcStatus::SUCCESS),
///     WindowType::Two => window.invalidated(),
/// }
/// assert!(!window.is_bound());
/// println!("window {} of the kernel", window.handle());
/// // A new key, and the regions that the window held are free.
/// window.reallocate()?;
/// window.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_mw")]
#[derive(Debug)]
pub struct MemoryWindow {
    object: Object<Holds>,
    window_type: WindowType,
    /// The window's key on the device, unless a binding failed.
    rkey: Rkey,
    pending: Option<PendingBinding>,
    reported: Reported,
    pd: Arc<PdInner>,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Allocates a memory window that is not bound yet.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no windows, `EINVAL` if it has none of this type, `ENOMEM`.
    #[doc(alias = "ibv_alloc_mw")]
    pub fn alloc_mw(&self, window_type: WindowType) -> Result<MemoryWindow> {
        let pd = self.inner.clone();
        let (object, rkey) = allocate(&pd, window_type)
            .map_err(|error| error.detail(format!("a memory window of type {window_type:?}")))?;
        Ok(MemoryWindow {
            object,
            window_type,
            rkey,
            pending: None,
            reported: Reported::Unbound,
            pd,
        })
    }
}

fn allocate(pd: &PdInner, window_type: WindowType) -> Result<(Object<Holds>, Rkey)> {
    let mw_type = match window_type {
        WindowType::One => ib_mw_type::IB_MW_TYPE_1,
        WindowType::Two => ib_mw_type::IB_MW_TYPE_2,
    };
    let request =
        ib_uverbs_alloc_mw { pd_handle: pd.handle(), mw_type: mw_type.0, ..Default::default() };
    let mut resp = ib_uverbs_alloc_mw_resp::new_zeroed();
    pd.file()
        .execute("alloc_mw", write(IB_USER_VERBS_CMD_ALLOC_MW, &request).response(&mut resp))?;
    let object = Object::new(pd.file().clone(), Class::MW, resp.mw_handle, Holds::default());
    Ok((object, Rkey(resp.rkey)))
}

impl MemoryWindow {
    /// The key for peers. From [`bind`](Self::bind) on it is the new one, which is valid once the device
    /// has carried out the request. After a binding that failed the device's key is not known, and this
    /// returns the former one.
    pub fn rkey(&self) -> Rkey {
        self.pending.map_or(self.rkey, |pending| pending.rkey)
    }

    /// The kind of window.
    pub fn window_type(&self) -> WindowType {
        self.window_type
    }

    /// Whether a peer may reach memory through the window, as far as [`settle`](Self::settle) and
    /// [`invalidated`](Self::invalidated) reported: the window is bound, or a binding failed, which the
    /// device may still have carried out.
    pub fn is_bound(&self) -> bool {
        self.reported != Reported::Unbound
    }

    /// The kernel's handle of the window, a number within its file; it changes with
    /// [`reallocate`](Self::reallocate).
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }

    /// Prepares to bind the window to `range` of `region`, in bytes, with the rights `access`. The program
    /// must post the binding to `qp`, and report its completion status to [`settle`](Self::settle).
    ///
    /// With [`Access::ZERO_BASED`], on windows of type 2, peers count addresses from the beginning
    /// of the range; otherwise they are those of the region.
    ///
    /// The window [is reallocated](Self::reallocate) first if the last binding failed, or if the window
    /// would [hold too much](Self#what-a-window-holds).
    ///
    /// # Errors
    ///
    /// `EBUSY` while another binding is not settled, or while a window of type 2 is bound.
    /// `EPERM` for a region that was [imported](crate::ProtectionDomain::import_mr), even by its new
    /// owner: its exporter may deregister it at any time, and its rights are only those that the exporter
    /// claims. Bind it in the process that registered it.
    /// `EINVAL` for a range that is empty or not in the region, for rights that the region lacks
    /// ([`Access::MW_BIND`]; [`Access::LOCAL_WRITE`] if peers shall write) or that windows do not
    /// have, and if window, region and queue pair are not of one protection domain. If the window has
    /// to be reallocated, the errors of [`reallocate`](Self::reallocate). The window is unchanged after
    /// each of these.
    #[doc(alias("ibv_bind_mw", "ibv_inc_rkey"))]
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
        if region.inner.is_imported() {
            return Err(Error::new(VERB, Errno::PERM).detail(
                "the region was imported: bind it in the process that registered its memory",
            ));
        }
        check_access(self.window_type, access, region.access())?;
        let (offset, length) =
            region.resolve(range).map_err(|error| Error::from(error).in_verb(VERB))?;
        if length == 0 {
            return Err(Error::invalid(VERB, "a range of 0 bytes"));
        }
        if self.window_type == WindowType::Two && self.reported == Reported::Bound {
            return Err(Error::new(VERB, Errno::BUSY).detail(
                "a window of type 2 must be invalidated, or reallocated, before it is bound again",
            ));
        }
        // The kernel stores the queue pair that binds a window of type 2.
        let binder = (self.window_type == WindowType::Two).then_some(qp.qp.inner());
        let is_full = |holds: &Holds| holds.is_full_for(&region.inner, binder);
        if self.reported == Reported::Failed || self.object.memory().is_none_or(is_full) {
            self.exchange(VERB)?;
        }
        match self.object.memory_mut() {
            Some(holds) => holds.add(&region.inner, binder),
            None => return Err(Error::invalid(VERB, "the window was destroyed")),
        }
        Ok(self.begin(WindowBinding {
            qpn: binder.map(|_| qp.qpn()),
            addr: region.addr().wrapping_add(offset as u64),
            length: length as u64,
            mr_lkey: region.lkey(),
            old_rkey: self.rkey,
            new_rkey: next_key(self.rkey),
            access,
        }))
    }

    /// Prepares to unbind a window of type 1: a binding of length 0, which is posted and settled like any other.
    /// The window holds its regions as before.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a window of type 2, `EBUSY` while another binding is not settled. After a binding
    /// that failed, the window is reallocated first: the errors of [`reallocate`](Self::reallocate).
    #[doc(alias = "ibv_bind_mw")]
    pub fn unbind(&mut self, qp: &QpControl) -> Result<WindowBinding> {
        self.check_queue(qp)?;
        if self.window_type == WindowType::Two {
            return Err(Error::invalid(VERB, "a window of type 2 is invalidated, not unbound"));
        }
        if self.reported == Reported::Failed {
            self.exchange(VERB)?;
        }
        Ok(self.begin(WindowBinding {
            qpn: None,
            addr: 0,
            length: 0,
            mr_lkey: Lkey(0),
            old_rkey: self.rkey,
            new_rkey: next_key(self.rkey),
            access: Access::empty(),
        }))
    }

    /// Reports how the request with the window's binding completed. Report [`WcStatus::WR_FLUSH_ERR`] for
    /// a binding that was never posted, and never will be.
    ///
    /// Only after [`WcStatus::SUCCESS`] the window is known to have its new key. A device may have
    /// carried out a request that it reports as failed or flushed, as rxe does when the request before
    /// it failed. The window may then have either key, and the next [`bind`](Self::bind) or
    /// [`unbind`](Self::unbind) [reallocates](Self::reallocate) it, which ends both.
    pub fn settle(&mut self, status: WcStatus) {
        let Some(pending) = self.pending.take() else { return };
        if status == WcStatus::SUCCESS {
            self.rkey = pending.rkey;
            self.reported = if pending.binds { Reported::Bound } else { Reported::Unbound };
        } else {
            self.reported = Reported::Failed;
        }
    }

    /// Reports that the window's key was invalidated: a local invalidate completed, or a message that
    /// invalidates it was [received](crate::Completion::invalidated_rkey). The window may be bound again.
    ///
    /// This releases nothing, and has no effect after a binding that failed.
    pub fn invalidated(&mut self) {
        if self.reported == Reported::Bound {
            self.reported = Reported::Unbound;
        }
    }

    /// Exchanges the kernel's window for a fresh one of the same type, which is not bound. All keys that
    /// the window had end, and the window releases the regions and queue pairs that it
    /// [held](Self#what-a-window-holds). It takes two system calls.
    ///
    /// # Errors
    ///
    /// `EBUSY` while a binding is not settled, and the kernel's errors for `ibv_alloc_mw` (`ENOMEM`
    /// if there are too many windows: [destroy](Self::destroy) one) and `ibv_dealloc_mw`. The window is
    /// unchanged then, with its keys and all that it holds.
    #[doc(alias = "ibv_dealloc_mw")]
    #[doc(alias = "ibv_alloc_mw")]
    pub fn reallocate(&mut self) -> Result<()> {
        const VERB: &str = "reallocate_mw";
        self.object.file().check_fork(VERB)?;
        self.check_settled(VERB)?;
        self.exchange(VERB)
    }

    /// Deallocates the window; dropping it does the same and ignores errors.
    ///
    /// # Errors
    ///
    /// Those of the kernel; the window comes back with the error.
    #[doc(alias = "ibv_dealloc_mw")]
    pub fn destroy(mut self) -> std::result::Result<(), ErrorWith<Self>> {
        match self.object.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err(error.with(self)),
        }
    }

    /// Allocates the fresh window before it deallocates the old one: an error of either call leaves the old
    /// one as it was, and the fresh one gets no key that the old one had.
    fn exchange(&mut self, verb: &'static str) -> Result<()> {
        const NO_FRESH: &str = "the kernel allocates no fresh window, and the old one is \
                                unchanged: destroy a window that is not needed, and try again";
        const KEPT: &str = "the kernel does not deallocate the old window, which is unchanged";
        let failed = |error: Error, detail: &'static str| match error.errno() {
            // The error's own text says that the device is gone, which helps more.
            Errno::IO => error.in_verb(verb),
            _ => error.in_verb(verb).detail(detail),
        };
        let fresh = allocate(&self.pd, self.window_type);
        let (fresh, rkey) = fresh.map_err(|error| failed(error, NO_FRESH))?;
        self.object.destroy().map_err(|error| failed(error, KEPT))?;
        (self.rkey, self.reported) = (rkey, Reported::Unbound);
        // Drops everything that the old window held, after the kernel confirmed that it is gone. The
        // program's destructors run here and may panic, so that the window has its fresh key before.
        self.object = fresh;
        Ok(())
    }

    fn begin(&mut self, binding: WindowBinding) -> WindowBinding {
        self.pending = Some(PendingBinding { rkey: binding.new_rkey, binds: binding.length > 0 });
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
        self.check_settled(VERB)
    }

    fn check_settled(&self, verb: &'static str) -> Result<()> {
        match self.pending {
            None => Ok(()),
            Some(_) => Err(Error::new(verb, Errno::BUSY)
                .detail("the window's last binding is not settled: report its completion to MemoryWindow::settle")),
        }
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
    /// The key that the window has once the request was carried out: the one to send to the peer.
    pub fn rkey(&self) -> Rkey {
        self.new_rkey
    }
}

/// The next key of a window: the device owns the upper 24 bits and the user the lowest 8. A binding must
/// change those, so that earlier keys become invalid.
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
            format!("a window of type {window_type:?} cannot have access {unknown}"),
        ));
    }
    if !region.contains(Access::MW_BIND) {
        return Err(Error::invalid(
            VERB,
            format!("the region was registered with access {region}, without MW_BIND"),
        ));
    }
    let written = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(written) && !region.contains(Access::LOCAL_WRITE) {
        return Err(Error::invalid(
            VERB,
            format!("access {access} needs LOCAL_WRITE on the region, which has {region}"),
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
