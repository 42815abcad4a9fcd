//! The run itself: message after message, there and back, until there are enough of them.
//!
//! For each message it does the same as rdma-core's programs, so that their times can be compared:
//! every send is signaled, a queue pair sends again when its send has completed and its message has
//! arrived, and receives are posted all together when few are left.

use super::content::Content;
use super::kind::Kind;
use super::layout::Layout;
use super::queues::{Posting, Queues, RECV, SEND, SLOT_SHIFT, WHAT};
use super::watchdog::Watchdog;
use crate::failure::{Failure, Result};
use std::time::{Duration, Instant};
use uverbs::{Completion, MemoryRegion, Notify, WcStatus};

/// The number of empty polls after which the run reads the clock.
const POLLS_PER_LOOK: u32 = 1 << 12;

/// Completions to handle before the queue gets their places back. The queue needs as much room
/// beyond the requests under way, because the requests that they lead to complete meanwhile.
pub(crate) const MOST_POLLED: u32 = 16;

/// Attributes of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Volley {
    pub(crate) kind: Kind,
    pub(crate) client: bool,
    pub(crate) iters: u64,
    pub(crate) rx_depth: u32,
    pub(crate) timeout: Duration,
    /// Whether a run without progress is reported as JSON.
    pub(crate) json: bool,
    pub(crate) layout: Layout,
}

/// The progress of a run.
struct Progress<'a, C> {
    volley: &'a Volley,
    posting: &'a mut Posting,
    memory: &'a mut MemoryRegion,
    content: &'a mut C,
    sent: u64,
    received: u64,
    /// The number of posted receives.
    posted: u32,
    /// The number of posted receives at which more are posted.
    low: u32,
    /// For each queue pair the requests that have to complete before it sends: bits of [`WHAT`].
    pending: Vec<u64>,
}

impl Volley {
    /// Fills the buffers and posts all receives. The peer may send from then on.
    pub(crate) fn prepare<C: Content>(&self, queues: &mut Queues, content: &mut C) -> Result<()> {
        content.prepare(&mut queues.memory)?;
        let slots = (0..self.rx_depth).map(|_| content.take_slot());
        queues.posting.post_recvs(slots).map_err(|error| cannot_post("receives", error))
    }

    /// Exchanges the messages, and returns the time that this took.
    pub(crate) fn run<C: Content>(&self, queues: &mut Queues, content: &mut C) -> Result<Duration> {
        let Queues { cq, channel, posting, memory, .. } = queues;
        let qps = posting.qps.len();
        let mut progress = Progress {
            volley: self,
            sent: 0,
            received: 0,
            posted: self.rx_depth,
            low: if self.kind == Kind::Srq { qps as u32 } else { 1 },
            pending: vec![RECV; qps],
            posting,
            memory,
            content,
        };
        if self.client {
            for qp in 0..qps {
                progress.send(qp)?;
            }
        }
        let start = Instant::now();
        let mut watch = Watch { seen: 0, since: start };
        let volley = *self;
        let watchdog = channel.as_ref().map(|_| {
            Watchdog::new(self.timeout, self.json, move |sent, received| {
                volley.stalled(sent, received)
            })
        });
        while progress.received < self.iters || progress.sent < self.iters {
            if let (Some(channel), Some(watchdog)) = (&channel, &watchdog) {
                watchdog.tell(progress.sent, progress.received);
                channel.wait(None)?;
            }
            let (mut vain, mut armed) = (0, false);
            loop {
                let mut completions = cq.poll().map_err(|error| Failure::run(error.to_string()))?;
                let mut found = 0;
                while found < MOST_POLLED {
                    let Some(completion) = completions.next() else { break };
                    found += 1;
                    if !completion.is_success() {
                        let mut failed = Failed::new(&completion);
                        while let Some(completion) = completions.next() {
                            failed.or(&completion);
                        }
                        return Err(progress.failed(&failed));
                    }
                    progress.completed(&completion)?;
                }
                drop(completions);
                // An event announces one completion or more; all of them have to be polled, and answered before the next
                // event is asked for. Those that came before that have no event.
                match (found, &channel) {
                    (0, Some(_)) if armed => break,
                    (0, Some(_)) => {
                        cq.req_notify(Notify::Next)?;
                        armed = true;
                    }
                    (1.., None) => break,
                    _ => {}
                }
                vain += 1;
                if vain % POLLS_PER_LOOK == 0
                    && watch.is_overdue(progress.sent + progress.received, self.timeout)
                {
                    return Err(self.stalled(progress.sent, progress.received));
                }
            }
        }
        Ok(start.elapsed())
    }

    fn stalled(&self, sent: u64, received: u64) -> Failure {
        let so_far = so_far(sent, received, self.iters);
        let message = format!("no progress for {} s, with {so_far}", self.timeout.as_secs());
        Failure::run(message).advice(match (self.kind.is_reliable(), received) {
            (_, 0) => {
                "read the other side's output; if it waits, too, packets get lost: look for a \
                 firewall (RoCE v2 is UDP port 4791), and choose GIDs of one network"
            }
            (true, _) => {
                "read the other side's output; it may have died or started with fewer --iters"
            }
            (false, _) => {
                "read the other side's output; a single lost packet ends a run over this \
                 unreliable transport"
            }
        })
    }
}

impl<C: Content> Progress<'_, C> {
    #[inline]
    fn completed(&mut self, completion: &Completion<'_>) -> Result<()> {
        let wr_id = completion.wr_id();
        let qp = match self.pending.len() {
            1 => 0,
            _ => self.find(completion)?,
        };
        if wr_id & WHAT == RECV {
            self.posted -= 1;
            let slot = (wr_id >> SLOT_SHIFT) as usize;
            self.content.received(self.memory, qp, slot, completion.byte_len())?;
            if self.posted <= self.low {
                self.post_recvs()?;
            }
            self.received += 1;
        } else {
            self.sent += 1;
        }
        self.pending[qp] &= !(wr_id & WHAT);
        if self.sent < self.volley.iters && self.pending[qp] == 0 {
            self.send(qp)?;
        }
        Ok(())
    }

    #[inline]
    fn send(&mut self, qp: usize) -> Result<()> {
        self.content.sending(self.memory, qp)?;
        self.posting
            .post_send(qp, self.memory, &self.volley.layout)
            .map_err(|error| cannot_post("a send", error))?;
        self.pending[qp] = SEND | RECV;
        Ok(())
    }

    fn post_recvs(&mut self) -> Result<()> {
        let missing = self.volley.rx_depth - self.posted;
        let slots = (0..missing).map(|_| self.content.take_slot());
        self.posting.post_recvs(slots).map_err(|error| cannot_post("receives", error))?;
        self.posted = self.volley.rx_depth;
        Ok(())
    }

    fn find(&self, completion: &Completion<'_>) -> Result<usize> {
        let qpn = completion.qpn();
        self.posting.qps.iter().position(|qp| qp.qpn() == qpn).ok_or_else(|| {
            Failure::run(format!("a completion for queue pair {qpn}, which is none of ours"))
        })
    }

    fn failed(&self, failed: &Failed) -> Failure {
        let Failed { status, what, vendor_err } = *failed;
        let vendor = match vendor_err {
            0 => String::new(),
            code => format!(", vendor error {code:#x}"),
        };
        let so_far = so_far(self.sent, self.received, self.volley.iters);
        let message = format!("{what} failed: {status}{vendor}, with {so_far}");
        let failure = Failure::run(message);
        match status {
            WcStatus::RETRY_EXC_ERR | WcStatus::RNR_RETRY_EXC_ERR => failure.advice(
                "the peer does not answer: read its output; if it runs, packets get lost on the \
                 way: look for a firewall (RoCE v2 is UDP port 4791)",
            ),
            // The last two are rxe's statuses for it.
            WcStatus::LOC_LEN_ERR
            | WcStatus::REM_INV_REQ_ERR
            | WcStatus::LOC_QP_OP_ERR
            | WcStatus::REM_OP_ERR => failure.advice("give both sides the same --size"),
            WcStatus::WR_FLUSH_ERR => {
                failure.advice("the connection broke: read the other side's output")
            }
            _ => failure,
        }
    }
}

/// The request that failed first.
struct Failed {
    status: WcStatus,
    what: &'static str,
    vendor_err: u32,
}

impl Failed {
    fn new(completion: &Completion<'_>) -> Self {
        let what = if completion.wr_id() & WHAT == RECV { "a receive" } else { "a send" };
        Failed { status: completion.status(), what, vendor_err: completion.vendor_err() }
    }

    /// A flushed request does not tell the cause; another one may.
    fn or(&mut self, completion: &Completion<'_>) {
        if self.status == WcStatus::WR_FLUSH_ERR && !completion.is_success() {
            *self = Failed::new(completion);
        }
    }
}

/// Notices the end of progress, and reads the clock only while there is none.
struct Watch {
    seen: u64,
    since: Instant,
}

impl Watch {
    #[cold]
    fn is_overdue(&mut self, progress: u64, timeout: Duration) -> bool {
        let now = Instant::now();
        if progress != self.seen {
            *self = Watch { seen: progress, since: now };
        }
        now.duration_since(self.since) >= timeout
    }
}

fn so_far(sent: u64, received: u64, iters: u64) -> String {
    format!("{sent} sent and {received} received of {iters}")
}

fn cannot_post(what: &str, error: uverbs::Error) -> Failure {
    Failure::run(format!("cannot post {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_standing_still_is_overdue() {
        let start = Instant::now();
        let mut watch = Watch { seen: 0, since: start };
        assert!(!watch.is_overdue(0, Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!watch.is_overdue(1, Duration::from_millis(2)), "it moved since");
        std::thread::sleep(Duration::from_millis(5));
        assert!(watch.is_overdue(1, Duration::from_millis(2)));
    }
}
