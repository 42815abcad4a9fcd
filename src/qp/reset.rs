//! Back to state `RESET`, with everything that was posted forgotten.

use super::attr::QpAttr;
use super::{Base, QpControl, QpState, QueuePair};
use crate::cq::{CompletionQueue, CqInner};
use crate::error::{Error, Result};
use crate::pd::Sharing;
use rustix::io::Errno;
use std::sync::Arc;

impl<S: Sharing> QueuePair<S> {
    /// Brings the queue pair back to state [`RESET`](QpState::RESET), as if just created.
    ///
    /// Requests that have not completed never will, and completions that have not been polled are
    /// discarded: that is why the queue pair's own completion queues are needed, and why no batch
    /// can be in the making. Receives in a shared receive queue stay there.
    ///
    /// ```no_run
    /// # fn f(qp: &mut uverbs::QueuePair, cq: &mut uverbs::CompletionQueue) -> uverbs::Result<()> {
    /// // One completion queue for both; else `&mut [&mut send_cq, &mut recv_cq]`.
    /// qp.reset(&mut [cq])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EINVAL` if `cqs` are not exactly the queues that this queue pair completes to, each once.
    pub fn reset(&mut self, cqs: &mut [&mut CompletionQueue]) -> Result<()> {
        const VERB: &str = "reset_qp";
        self.check_cqs(VERB, cqs)?;
        let qp = self.qp.clone();
        let _moving = qp.moving(VERB)?;
        let attr = QpAttr::new().state(QpState::RESET);
        for _ in 0..self.qp.file().provider.resets() {
            match self.control.apply(VERB, &attr) {
                // rxe lets a send queue that is being drained go nowhere but to ERR.
                Err(error) if error.errno() == Errno::INVAL => {
                    self.control.apply(VERB, &QpAttr::new().state(QpState::ERR))?;
                    self.qp.set_state(QpState::ERR);
                    self.control.apply(VERB, &attr)?;
                }
                answer => answer?,
            }
            // Until the rings are, too: another handle may want to move on.
            self.qp.set_stale();
            // After each, lest a second that fails leaves completions of the life before.
            for cq in cqs.iter_mut() {
                cq.purge(&self.qp.member);
            }
            self.send.reset();
            if let Some(recv) = &mut self.recv {
                recv.reset();
            }
            self.qp.set_state(QpState::RESET);
        }
        Ok(())
    }

    /// Whether `cqs` are what [`reset`](Self::reset) needs.
    pub(crate) fn check_cqs(&self, verb: &'static str, cqs: &[&mut CompletionQueue]) -> Result<()> {
        let Base::Domain { send_cq: send, recv_cq: recv, .. } = &self.qp.base else {
            return Ok(());
        };
        let has = |own: &Arc<CqInner>| cqs.iter().any(|cq| Arc::ptr_eq(&cq.inner, own));
        let stranger =
            cqs.iter().find(|cq| !Arc::ptr_eq(&cq.inner, send) && !Arc::ptr_eq(&cq.inner, recv));
        if let Some(stranger) = stranger {
            let detail = format!("{stranger:?} is not one of the queue pair's completion queues");
            return Err(Error::invalid(verb, detail));
        }
        for (own, which) in [(send, "send"), (recv, "receive")] {
            if !has(own) {
                let detail = format!("the queue pair's {which} completion queue is missing");
                return Err(Error::invalid(verb, detail));
            }
        }
        Ok(())
    }
}

impl QpControl {
    /// Makes sure that the device works on nothing any more that was posted to the queues of this
    /// queue pair alone; whether the kernel confirmed that. The queue pair is fit for destruction
    /// only, or for a proper [`reset`](QueuePair::reset): the rings are [stale](QpInner::set_stale).
    pub(crate) fn revoke(&self) -> bool {
        const VERB: &str = "reset_qp";
        let Ok(_moving) = self.qp.moving(VERB) else {
            return false;
        };
        let attr = QpAttr::new().state(QpState::RESET);
        let mut answer = self.apply(VERB, &attr);
        if answer.as_ref().is_err_and(|error| error.errno() == Errno::INVAL) {
            // As above.
            answer = self.apply(VERB, &QpAttr::new().state(QpState::ERR));
            answer = answer.and_then(|()| self.apply(VERB, &attr));
        }
        match answer {
            Ok(()) => {
                self.qp.set_stale();
                true
            }
            Err(error) => match error.kernel_errno() {
                // Somebody who shares the file destroyed it.
                Some(Errno::NOENT) => true,
                // The device may be gone, or going: then only the destruction is an answer.
                Some(Errno::IO) => self.qp.object.is_gone_with_its_device(),
                _ => false,
            },
        }
    }
}
