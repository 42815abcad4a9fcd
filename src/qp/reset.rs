//! The change of a queue pair to state `RESET`, which drops all posted requests.

use super::{Base, QpState, QueuePair};
use crate::cq::{CompletionQueue, CqControl, CqInner};
use crate::error::{Error, Result};
use crate::pd::Sharing;
use std::sync::Arc;

impl<S: Sharing> QueuePair<S> {
    /// Brings the queue pair back to state [`RESET`](QpState::RESET), as if just created.
    ///
    /// Requests that have not completed never will, and completions that have not been polled are
    /// discarded: therefore this takes the queue pair's completion queues, and no batch can be
    /// open. Receives in a shared receive queue stay there.
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
        self.reset_among(cqs, &[])
    }

    /// As [`reset`](Self::reset), of a queue pair that completes to `foreign` as well, which this library does not poll:
    /// earlier completions stay there.
    pub(crate) fn reset_among(
        &mut self,
        cqs: &mut [&mut CompletionQueue],
        foreign: &[&CqControl],
    ) -> Result<()> {
        const VERB: &str = "reset_qp";
        self.check_cqs(VERB, cqs, foreign)?;
        let qp = self.qp.clone();
        let _moving = qp.moving(VERB)?;
        for _ in 0..self.qp.file().provider.traits().resets_needed {
            self.qp.apply_reset(VERB)?;
            // The rings are stale until they are reset, too: another handle could change the state meanwhile.
            self.qp.set_stale();
            // After each reset: if a second one fails, no completion from before the first is left.
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

    /// Checks that these are the queues that [`reset`](Self::reset) needs.
    pub(crate) fn check_cqs(
        &self,
        verb: &'static str,
        cqs: &[&mut CompletionQueue],
        foreign: &[&CqControl],
    ) -> Result<()> {
        let cqs = || cqs.iter().map(|cq| &cq.inner).chain(foreign.iter().map(|cq| &cq.inner));
        let Base::Domain { send_cq: send, recv_cq: recv, .. } = &self.qp.base else {
            return Ok(());
        };
        let has = |own: &Arc<CqInner>| cqs().any(|cq| Arc::ptr_eq(cq, own));
        let stranger = cqs().find(|cq| !Arc::ptr_eq(cq, send) && !Arc::ptr_eq(cq, recv));
        if let Some(stranger) = stranger {
            let detail = format!(
                "completion queue {} is not one of the queue pair's",
                stranger.object.handle()
            );
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
