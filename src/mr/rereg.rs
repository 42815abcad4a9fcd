//! Changing a region in place. Pairs with `ib_uverbs_rereg_mr` in `core/uverbs_cmd.c`.

use super::{HELD, MemoryRegion, MrInner, register};
use crate::access::Access;
use crate::error::{Error, Result, debug_is_sentence};
use crate::memory::region::{Backing, Location, StableBytes};
use crate::number::{Lkey, Rkey};
use crate::pd::{PdInner, ProtectionDomain, Sharing};
use crate::uverbs::invoke_write::write;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;
use uverbs_uapi::mr::{ib_mr_rereg_flags as change, ib_uverbs_rereg_mr, ib_uverbs_rereg_mr_resp};
use uverbs_uapi::write::IB_USER_VERBS_CMD_REREG_MR;
use zerocopy::FromZeros;

const VERB: &str = "rereg_mr";

/// A change of a region; see [`MemoryRegion::rereg`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Rereg {
    pd: Option<Arc<PdInner>>,
    access: Option<Access>,
}

impl Rereg {
    /// A change of nothing, to be completed by the other methods.
    pub fn new() -> Self {
        Rereg::default()
    }

    /// Sets other rights.
    #[doc(alias = "IBV_REREG_MR_CHANGE_ACCESS")]
    pub fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Moves the region to another protection domain.
    #[doc(alias = "IBV_REREG_MR_CHANGE_PD")]
    pub fn protection_domain<S: Sharing>(mut self, pd: &ProtectionDomain<S>) -> Self {
        self.pd = Some(pd.inner.clone());
        self
    }
}

impl<T, M> MemoryRegion<T, M> {
    /// Changes the rights, the protection domain or both. The keys may change with them.
    ///
    /// Requests in flight that use the region meanwhile fail.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the driver has no REREG, as rxe of Linux 6.1; `EACCES` for write access to memory
    /// that was registered without; `EBUSY` while a [window](crate::MemoryWindow#what-a-window-holds) holds
    /// the region, or an [object of DEVX](crate::mlx5::devx::DevxObject) keeps it; `EINVAL` for no change, for
    /// contradictory rights, for flags that cannot change (`ON_DEMAND`, `HUGETLB`, `ZERO_BASED`), for a domain of another context, or for a region of [device
    /// memory](crate::DeviceMemory), which no kernel changes; `EPERM` for a region that was
    /// [imported](crate::ProtectionDomain::import_mr), even by its new owner, and for more rights to memory
    /// that is [unowned](crate::MrBuilder::register_unowned) or the whole address space, for whose present
    /// rights the caller of an `unsafe` function answered. After these errors the region is unchanged. After
    /// other errors, `ENOMEM` among them, the change may have been made in part: the region [is
    /// dead](Self::is_dead), its keys reach nothing, and it can only be [destroyed](Self::destroy), which
    /// gives the memory back.
    #[doc(alias = "ibv_rereg_mr")]
    pub fn rereg(&mut self, change: Rereg) -> Result<()> {
        let inner = Arc::get_mut(&mut self.inner).ok_or_else(held)?;
        if inner.dead {
            return Err(dead());
        }
        check_location(inner)?;
        let file = inner.object.file().clone();
        let mut flags = change::empty();
        if let Some(pd) = &change.pd {
            file.check_same(VERB, "protection domain", pd.file())?;
            flags |= change::IB_MR_REREG_PD;
        }
        if let Some(access) = change.access {
            access.check(VERB)?;
            check_fixed_flags(inner.access, access)?;
            check_promised(inner, access)?;
            flags |= change::IB_MR_REREG_ACCESS;
        }
        if flags.is_empty() {
            return Err(Error::invalid(VERB, "no change was asked for"));
        }
        let access = change.access.unwrap_or(inner.access);
        let request = ib_uverbs_rereg_mr {
            mr_handle: inner.object.handle(),
            flags: flags.bits(),
            pd_handle: change.pd.as_ref().unwrap_or(&inner.pd).handle(),
            access_flags: access.for_kernel(file.optional_access),
            ..Default::default()
        };
        let mut resp = ib_uverbs_rereg_mr_resp::new_zeroed();
        let done =
            file.execute(VERB, write(IB_USER_VERBS_CMD_REREG_MR, &request).response(&mut resp));
        if let Err(error) = done {
            inner.dead = !error.is_refusal();
            return Err(explain_change(error, &change, inner, access));
        }
        (inner.lkey, inner.rkey) = (Lkey(resp.lkey), Rkey(resp.rkey));
        inner.access = access;
        if let Some(pd) = change.pd {
            inner.pd = pd;
        }
        Ok(())
    }
}

/// Explains a refusal of the kernel, and says what to change.
fn explain_change<M>(error: Error, change: &Rereg, inner: &MrInner<M>, access: Access) -> Error {
    let asked = match (change.access, &change.pd) {
        (Some(_), Some(_)) => format!("to access {access} in another protection domain"),
        (Some(_), None) => format!("from access {} to {access}", inner.access),
        (None, _) => "to another protection domain".into(),
    };
    match error.errno() {
        Errno::OPNOTSUPP => {
            let device = inner.file().device.name();
            error.detail(format!("{device} changes no regions: {asked}"))
        }
        Errno::ACCESS => error.detail(format!(
            "{asked}, and the memory was registered for reading alone: register it anew"
        )),
        _ => error.context(|| asked),
    }
}

/// Refuses to change flags that only a registration sets. Kernels store them and page the region as before;
/// rxe's prefetch then trusts the stored flag and misreads the kernel's own memory.
fn check_fixed_flags(old: Access, new: Access) -> Result<()> {
    let fixed = Access::ON_DEMAND | Access::HUGETLB | Access::ZERO_BASED;
    let changed = (old ^ new) & fixed;
    if changed.is_empty() {
        return Ok(());
    }
    Err(Error::invalid(
        VERB,
        format!("{changed} cannot change from {old} to {new}: register the memory anew"),
    ))
}

/// Refuses more rights to memory that the program accesses by itself: its promise at the registration covers
/// only the rights that it asked for then.
fn check_promised<M>(inner: &MrInner<M>, new: Access) -> Result<()> {
    let more = new.difference(inner.access | Access::RELAXED_ORDERING);
    if more.is_empty() || !inner.object.memory().is_some_and(Backing::rights_are_promised) {
        return Ok(());
    }
    let old = inner.access;
    Err(Error::new(VERB, Errno::PERM).detail(format!(
        "the program accesses the memory by itself, and registered it with {old}; with {more} it has \
         to register the memory anew"
    )))
}

fn held() -> Error {
    Error::new(VERB, Errno::BUSY).detail(HELD)
}

fn dead() -> Error {
    Error::invalid(VERB, "a failed change left the region without memory; it can be destroyed")
}

fn check_location<M>(inner: &MrInner<M>) -> Result<()> {
    match inner.object.memory().map(Backing::location) {
        // A forged envelope may name a region of this process's pools, whose buffers are borrowed as slices
        // that no peer may write.
        Some(Location::Foreign) => Err(Error::new(VERB, Errno::PERM).detail(
            "the region was imported: only the process that registered its memory can change it",
        )),
        Some(Location::Device) => Err(Error::invalid(
            VERB,
            "a region of device memory, which the kernel does not change: register it anew",
        )),
        Some(Location::Mapped | Location::DmaBuf) | None => Ok(()),
    }
}

/// The region with its new memory, and the old memory.
pub type Exchanged<M, N> = (MemoryRegion<<N as StableBytes>::Item, N>, M);

/// A failed exchange of a region's memory.
///
/// ```no_run
/// # use uverbs::{Access, MemoryRegion, ProtectionDomain, Result};
/// # fn f(pd: &ProtectionDomain, region: MemoryRegion<u64, Vec<u64>>)
/// # -> Result<MemoryRegion<u64, Vec<u64>>> {
/// use uverbs::ExchangeError;
///
/// let region = match region.exchange(vec![0u64; 512]) {
///     Ok((region, _old)) => region,
///     // The kernel refused: the region is unchanged.
///     Err(ExchangeError { region: Some(region), error, .. }) => {
///         println!("the region keeps its memory: {error}");
///         region
///     }
///     // The region and its keys are gone: register the old memory anew, and tell peers the new key.
///     Err(ExchangeError { old: Some(old), .. }) => pd.mr_builder().access(Access::ALL_REMOTE).register(old)?,
///     // The device may still reach both memories: they are leaked.
///     Err(failed) => return Err(failed.into()),
/// };
/// # Ok(region) }
/// ```
pub struct ExchangeError<T, M, N> {
    /// The unchanged region, if the kernel refused the exchange. Otherwise the region is gone.
    pub region: Option<MemoryRegion<T, M>>,
    /// The memory of a region that is gone; `None` if the kernel refused to deregister the region. Both
    /// memories are leaked then.
    pub old: Option<M>,
    /// The memory that was to be exchanged for it.
    pub memory: Option<N>,
    /// The reason of the failure.
    pub error: Error,
}

impl<T, M, N> From<ExchangeError<T, M, N>> for Error {
    fn from(failed: ExchangeError<T, M, N>) -> Error {
        failed.error
    }
}

debug_is_sentence!(ExchangeError<T, M, N>);

impl<T, M, N> fmt::Display for ExchangeError<T, M, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T, M, N> std::error::Error for ExchangeError<T, M, N> {}

impl<T, M> MemoryRegion<T, M> {
    /// Exchanges the memory of the region, and gives the former memory back. The keys may change; addresses
    /// are those of the new memory.
    ///
    /// Requests in flight that use the region meanwhile fail.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` where the driver does not exchange memory, as rxe's; `EBUSY` while a
    /// [window](crate::MemoryWindow#what-a-window-holds) holds the region; `EINVAL` for memory of zero
    /// bytes or that is not aligned to its items, and for a region of device memory; `EPERM` for a region that was
    /// [imported](crate::ProtectionDomain::import_mr). After these errors the region comes back unchanged.
    /// After other errors, `ENOMEM` beyond the limit of locked memory among them, the region is destroyed,
    /// and both memories come back.
    #[doc(alias = "IBV_REREG_MR_CHANGE_TRANSLATION")]
    pub fn exchange<N: StableBytes>(
        self,
        memory: N,
    ) -> std::result::Result<Exchanged<M, N>, ExchangeError<T, M, N>> {
        let refused = |inner, backing: Backing<N>, error| ExchangeError {
            region: Some(MemoryRegion::of(inner)),
            old: None,
            memory: Some(backing.into_owner()),
            error,
        };
        let backing = Backing::own(memory);
        let mut inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(shared) => return Err(refused(shared, backing, held())),
        };
        let (start, length) = (backing.address(), backing.reach());
        let checked = if inner.dead {
            Err(dead())
        } else {
            check_location(&inner).and_then(|()| {
                register::check_alignment::<N>(VERB, &backing)?;
                let last = register::LAST_ADDRESS;
                let checked = register::check(inner.access, start, last, start, length);
                checked.map_err(|error| error.in_verb(VERB))?;
                register::keep_from_children(VERB, &backing, inner.access)
            })
        };
        let file = inner.object.file().clone();
        let request = ib_uverbs_rereg_mr {
            mr_handle: inner.object.handle(),
            flags: change::IB_MR_REREG_TRANS.bits(),
            start,
            length,
            hca_va: start,
            pd_handle: inner.pd.handle(),
            access_flags: inner.access.for_kernel(file.optional_access),
            ..Default::default()
        };
        let mut resp = ib_uverbs_rereg_mr_resp::new_zeroed();
        let done = checked.and_then(|()| {
            let exchanged =
                file.execute(VERB, write(IB_USER_VERBS_CMD_REREG_MR, &request).response(&mut resp));
            exchanged.map_err(|error| match error.errno() {
                Errno::OPNOTSUPP => {
                    let device = file.device.name();
                    error.detail(format!("{device} exchanges no memory of regions"))
                }
                _ => register::explain(error, start, length, inner.access, true),
            })
        });
        match done {
            Ok(()) => {
                let MrInner { object, pd, access, .. } = inner;
                let (object, old) = object.exchange(backing);
                let region = MemoryRegion::of(Arc::new(MrInner {
                    object,
                    pd,
                    lkey: Lkey(resp.lkey),
                    rkey: Rkey(resp.rkey),
                    access,
                    iova: start,
                    dead: false,
                    imported: None,
                }));
                match old {
                    Some(old) => Ok((region, old.into_owner())),
                    None => {
                        Err(ExchangeError { region: None, old: None, memory: None, error: dead() })
                    }
                }
            }
            Err(error) if error.is_refusal() => Err(refused(Arc::new(inner), backing, error)),
            Err(error) => match inner.object.destroy() {
                Ok(()) => Err(ExchangeError {
                    region: None,
                    old: inner.object.reclaim().map(Backing::into_owner),
                    memory: Some(backing.into_owner()),
                    error,
                }),
                Err(_) => {
                    // The device may reach either memory. Dropping the region leaks the old one and
                    // counts it.
                    std::mem::forget(backing);
                    Err(ExchangeError { region: None, old: None, memory: None, error })
                }
            },
        }
    }
}
