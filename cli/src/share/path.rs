//! A path to memory with only the memory's keys: two queue pairs of one process, connected to each
//! other.

use crate::failure::{Failure, Result};
use std::time::{Duration, Instant};
use uverbs::{
    CompletionQueue, Context, Handshake, ProtectionDomain, QpType, QueuePair, SendWr, WcStatus,
};

/// The longest time of a request.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Path {
    here: QueuePair,
    /// The other end of the queue pair.
    _there: QueuePair,
    cq: CompletionQueue,
}

impl Path {
    pub(crate) fn new(
        context: &Context,
        pd: &ProtectionDomain,
        port: u32,
        gid_index: Option<u32>,
    ) -> Result<Path> {
        let gid = match gid_index {
            Some(index) => context.query_gid(port, index)?,
            None => context.default_gid(port)?,
        };
        let cq = context.cq_builder(4).build()?;
        let here = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
        let there = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
        let ends = (here.endpoint(&gid)?, there.endpoint(&gid)?);
        here.handshake(&ends.1, &Handshake::new())?;
        there.handshake(&ends.0, &Handshake::new())?;
        Ok(Path { here, _there: there, cq })
    }

    /// Posts one request and waits for its completion.
    pub(crate) fn request(&mut self, wr: SendWr<'_>) -> Result<()> {
        self.post(wr).map_err(|error| Failure::run(error.to_string()))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut completions =
                self.cq.poll().map_err(|error| Failure::run(error.to_string()))?;
            if let Some(done) = completions.next() {
                return match done.status() {
                    WcStatus::SUCCESS => Ok(()),
                    other => Err(Failure::run(format!("the request failed: {other}"))),
                };
            }
            if Instant::now() > deadline {
                return Err(Failure::run(format!("no completion within {PATIENCE:?}")));
            }
            std::thread::yield_now();
        }
    }

    #[allow(unsafe_code, reason = "ringing a batch names memory by number")]
    fn post(&mut self, wr: SendWr<'_>) -> uverbs::Result<()> {
        let mut batch = self.here.send_batch()?;
        batch.push(wr.signaled())?;
        // SAFETY: the memory on this side is a region that outlives the completion, and the program
        // only copies from and to it; the other memory is registered for this.
        unsafe { batch.ring()? };
        Ok(())
    }
}
