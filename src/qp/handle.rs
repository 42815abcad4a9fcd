//! The program's handles of a queue pair. Other objects keep the kernel's queue pair alive, too.

use super::attr::QpAttr;
use super::ece::EceState;
use super::{Base, QpInner, QpState};
use crate::error::{ErrorWith, Result};
use crate::object::destroy_sole;
use crate::provider::QpChange;
use crate::uverbs::invoke_write::{write, write_ex};
use rustix::io::Errno;
use std::mem;
use std::ops::Deref;
use std::sync::{Arc, Weak};
use uverbs_uapi::qp as uapi;
use uverbs_uapi::write::{IB_USER_VERBS_CMD_MODIFY_QP, IB_USER_VERBS_EX_CMD_MODIFY_QP};

/// Held by each queue of a queue pair and by its control.
///
/// Memory windows, flow rules, multicast memberships and objects of DEVX keep a queue pair alive, too. When the last handle is dropped
/// before them, the program can neither post nor poll for it any more. The queue pair then goes to state `RESET`, where
/// the device carries out none of its requests, and the peer's requests time out.
#[derive(Clone, Debug)]
pub(crate) struct QpHandle {
    // Declared first, so that it is dropped first.
    qp: Arc<QpInner>,
    last: Arc<LastHandle>,
}

/// Dropped with the last handle of the queue pair.
#[derive(Debug)]
struct LastHandle(Weak<QpInner>);

impl Drop for LastHandle {
    fn drop(&mut self) {
        // An XRC target may be another process's, too, and nothing is posted to it.
        let Some(qp) = self.0.upgrade() else { return };
        let is_revocable = matches!(qp.base, Base::Domain { .. }) && !qp.file().epoch.is_over();
        if is_revocable && !qp.revoke() {
            qp.file().count_leak();
            mem::forget(qp);
        }
    }
}

impl QpHandle {
    pub(super) fn new(qp: Arc<QpInner>) -> Self {
        let last = Arc::new(LastHandle(Arc::downgrade(&qp)));
        QpHandle { qp, last }
    }

    /// The shared part, which keeps the kernel's queue pair alive.
    pub(crate) fn inner(&self) -> &Arc<QpInner> {
        &self.qp
    }

    /// Names the queue pair without keeping it.
    pub(crate) fn downgrade(&self) -> WeakQpHandle {
        WeakQpHandle { qp: Arc::downgrade(&self.qp), last: Arc::downgrade(&self.last) }
    }

    /// Destroys the queue pair, unless something else than this handle keeps it alive: `dependants`.
    pub(super) fn destroy(
        self,
        dependants: &'static str,
    ) -> std::result::Result<(), ErrorWith<QpHandle>> {
        let QpHandle { qp, last } = self;
        destroy_sole(qp, "destroy_qp", dependants, QpInner::destroy)
            .map_err(|failed| failed.map(|qp| QpHandle { qp, last }))
    }
}

/// A weak reference to a queue pair whose handles the program may all have dropped.
#[derive(Clone, Debug)]
pub(crate) struct WeakQpHandle {
    qp: Weak<QpInner>,
    last: Weak<LastHandle>,
}

impl WeakQpHandle {
    /// A handle, if the program still has one.
    pub(crate) fn upgrade(&self) -> Option<QpHandle> {
        let last = self.last.upgrade()?;
        Some(QpHandle { qp: self.qp.upgrade()?, last })
    }
}

impl Deref for QpHandle {
    type Target = QpInner;

    #[inline]
    fn deref(&self) -> &QpInner {
        &self.qp
    }
}

impl QpInner {
    /// Makes the device stop all requests that were posted to this queue pair's own queues. Returns
    /// whether the kernel confirmed that. The queue pair is fit for destruction only, or for a proper
    /// [`reset`](crate::QueuePair::reset): the rings are [stale](Self::set_stale).
    pub(crate) fn revoke(&self) -> bool {
        const VERB: &str = "reset_qp";
        let Ok(_moving) = self.moving(VERB) else {
            return false;
        };
        match self.apply_reset(VERB) {
            Ok(()) => {
                self.set_stale();
                true
            }
            Err(error) => match error.kernel_errno() {
                // Another process that has the file destroyed it.
                Some(Errno::NOENT) => true,
                // If the device is gone, or being removed, only a DESTROY tells whether the queue pair is gone.
                Some(Errno::IO) => self.object.is_gone_with_its_device(),
                _ => false,
            },
        }
    }

    /// Makes the kernel reset the queue pair.
    pub(super) fn apply_reset(&self, verb: &'static str) -> Result<()> {
        let attr = QpAttr::new().state(QpState::RESET);
        match self.apply(verb, &attr) {
            // rxe lets a queue pair whose send queue is being drained go only to ERR.
            Err(error) if error.errno() == Errno::INVAL => {
                self.apply(verb, &QpAttr::new().state(QpState::ERR))?;
                self.set_state(QpState::ERR);
                self.apply(verb, &attr)
            }
            applied => applied,
        }
    }

    /// Hands a change to the kernel, with the ECE options that the device is to take.
    pub(super) fn apply(&self, verb: &'static str, attr: &QpAttr) -> Result<()> {
        let file = self.file();
        let base = attr.to_raw(verb, self.object.handle())?;
        let ece = self.ece();
        let asked = ece.filter(|_| attr.may_carry_options()).map_or(0, EceState::asked);
        let out_of_order = self.out_of_order && attr.next_state() == Some(QpState::INIT);
        let has_drivers_part = asked != 0 || out_of_order;
        if !has_drivers_part && attr.limit().is_none() {
            file.execute(verb, &mut write(IB_USER_VERBS_CMD_MODIFY_QP, &base))?;
        } else {
            let rate_limit = attr.limit().unwrap_or_default();
            let request = uapi::ib_uverbs_ex_modify_qp { base, rate_limit, reserved: 0 };
            let mut resp = uapi::ib_uverbs_ex_modify_qp_resp::default();
            let mut modify = |input: &[u8], output: &mut [u8]| {
                file.execute(
                    verb,
                    write_ex(IB_USER_VERBS_EX_CMD_MODIFY_QP, &request)
                        .response(&mut resp)
                        .driver(input, output),
                )
            };
            if !has_drivers_part {
                modify(&[], &mut [])?;
            } else {
                let change = QpChange { ece: asked, out_of_order };
                let granted = file.provider.modify_qp_with(verb, change, &mut modify)?;
                // The answer to no options says nothing of those that are agreed on.
                if asked != 0 {
                    ece.into_iter().for_each(|ece| ece.grant(granted));
                }
            }
        }
        if attr.next_state() == Some(QpState::RESET) {
            ece.into_iter().for_each(EceState::reset);
        }
        Ok(())
    }
}
