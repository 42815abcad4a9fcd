//! A queue pair that receives a number of messages, and sends as many, for ucmatose, udaddy and mckey.

use super::link::LAST_ACKNOWLEDGEMENT;
use crate::args::{BurstOptions, MckeyArgs};
use crate::failure::{Failure, Result};
use std::ops::Deref;
use std::time::{Duration, Instant};
use uverbs::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    Context, Destination, ProtectionDomain, Psn, QpAttr, QpControl, QpState, QpType, SendWr,
    WcStatus,
};

/// Bytes of the global route header (GRH), which the device writes before a received datagram.
const GRH: usize = 40;

/// Polls without a completion before the connection is checked.
const TURNS: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Send,
    Receive,
}

/// The number of messages, and their size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) count: u32,
    pub(super) size: u32,
}

impl BurstOptions {
    pub(super) fn shape(&self) -> Shape {
        Shape { count: self.count, size: self.size }
    }
}

impl MckeyArgs {
    pub(super) fn shape(&self) -> Shape {
        Shape { count: self.count, size: self.size }
    }
}

/// The queues of one connection, or of one member of a group.
#[derive(Debug)]
pub(super) struct Burst {
    qp: OwnedQueuePair<Request>,
    cq: OwnedCompletionQueue<Request>,
    pool: BufferPool,
    pub(super) pd: ProtectionDomain,
    shape: Shape,
    header: usize,
    timeout: Duration,
    sent: u32,
    received: u32,
    /// The immediate data of the last message: udaddy and mckey send the number of their queue pair.
    pub(super) sender: Option<u32>,
}

impl Burst {
    pub(super) fn new(
        context: &Context,
        qp_type: QpType,
        shape: Shape,
        timeout: Duration,
    ) -> Result<Burst> {
        let header = if qp_type == QpType::UD { GRH } else { 0 };
        let count = shape.count.max(1);
        let pd = context.alloc_pd()?;
        // Devices round queue sizes up, at most to twice the next power of two.
        let room = 4 * count.next_power_of_two();
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(room).build()?);
        let pool = pd.buffer_pool_builder(shape.size.max(1) as usize + header);
        let pool = pool.count(2 * count as usize).build()?;
        let qp = pd.qp_builder(cq.queue(), cq.queue(), qp_type);
        let qp = qp.max_send_wr(count).max_recv_wr(count).build()?;
        let qp = cq.adopt(qp).map_err(|failed| failed.error)?;
        let (sent, received, sender) = (0, 0, None);
        Ok(Burst { qp, cq, pool, pd, shape, header, timeout, sent, received, sender })
    }

    /// Posts a receive for each message.
    pub(super) fn post_receives(&mut self) -> Result<()> {
        let mut batch = self.qp.recv_batch().map_err(cannot_post)?;
        for _ in 0..self.shape.count {
            let mut buffer = self.pool.take()?;
            buffer.set_len(self.shape.size as usize + self.header);
            batch.push(buffer, Request::Receive).map_err(|failed| cannot_post(failed.error))?;
        }
        batch.ring().map_err(|error| Failure::run(error.to_string()))
    }

    /// Brings a queue pair of datagrams from `INIT` to `RTS`.
    pub(super) fn ready(&self) -> Result<()> {
        self.qp.modify(&QpAttr::new().state(QpState::RTR))?;
        self.qp.modify(&QpAttr::new().state(QpState::RTS).sq_psn(Psn(0)))?;
        Ok(())
    }

    /// Sends all messages. `to` is the destination of datagrams, which carry the number of this queue pair.
    pub(super) fn send_all(&mut self, to: Option<Destination<'_>>) -> Result<()> {
        let own = self.qp.qpn().0;
        let mut batch = self.qp.send_batch().map_err(cannot_post)?;
        for message in 0..self.shape.count {
            let mut buffer = self.pool.take()?;
            buffer.set_len(self.shape.size as usize);
            buffer.fill(message as u8);
            let wr = match to {
                Some(to) => SendWr::send_imm(&[], own).to(to),
                None => SendWr::send(&[]),
            };
            batch.push(wr, buffer, Request::Send).map_err(|failed| cannot_post(failed.error))?;
        }
        batch.ring().map_err(|error| Failure::run(error.to_string()))
    }

    /// Waits until all messages were sent. `alive` fails if the connection ended.
    pub(super) fn wait_sent(&mut self, alive: impl FnMut() -> Result<()>) -> Result<()> {
        self.wait("sent", self.timeout, LAST_ACKNOWLEDGEMENT, |burst| burst.sent, alive)
    }

    /// Waits until all messages were received. `alive` fails if the connection ended.
    pub(super) fn wait_received(&mut self, alive: impl FnMut() -> Result<()>) -> Result<()> {
        self.wait("received", self.timeout, Duration::ZERO, |burst| burst.received, alive)
    }

    /// As [`wait_received`](Self::wait_received), if the first message may take as long as `first`.
    pub(super) fn wait_received_from(&mut self, first: Duration) -> Result<()> {
        self.wait("received", first, Duration::ZERO, |burst| burst.received, || Ok(()))
    }

    /// Waits until `done` counts all messages. They may still arrive for `late` after the end of the connection.
    fn wait(
        &mut self,
        what: &str,
        first: Duration,
        late: Duration,
        done: impl Fn(&Burst) -> u32,
        mut alive: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut deadline = Instant::now() + first;
        let mut before = done(self);
        let mut ended = None;
        while done(self) < self.shape.count {
            for _ in 0..TURNS {
                self.poll()?;
                std::thread::yield_now();
            }
            if done(self) >= self.shape.count {
                break;
            }
            if ended.is_none() {
                ended = alive().err().map(|failure| (Instant::now() + late, failure));
            }
            if let Some((end, failure)) = ended.take() {
                // The peer may have closed the connection after its last message.
                self.poll()?;
                if done(self) < self.shape.count && Instant::now() >= end {
                    return Err(failure);
                }
                ended = Some((end, failure));
                continue;
            }
            if done(self) > before {
                before = done(self);
                deadline = Instant::now() + self.timeout;
            }
            if Instant::now() > deadline {
                let count = self.shape.count;
                let timeout = if before == 0 { first } else { self.timeout };
                return Err(Failure::run(format!(
                    "{before} of {count} messages were {what}, and then none for {timeout:?}"
                ))
                .advice("give both sides the same -C and -S, or allow more time with --timeout"));
            }
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        let completions = self.cq.poll().map_err(|error| Failure::run(error.to_string()))?;
        for done in completions {
            let status = done.outcome.status;
            let what = match done.tag {
                Request::Send => "a send",
                Request::Receive => "a receive",
            };
            if status != WcStatus::SUCCESS {
                return Err(Failure::run(format!("{what} failed: {status}"))
                    .advice("give both sides the same -C and -S"));
            }
            match done.tag {
                Request::Send => self.sent += 1,
                Request::Receive => {
                    let length = done.outcome.filled().saturating_sub(self.header);
                    if length != self.shape.size as usize {
                        return Err(Failure::peer(format!(
                            "the peer sent {length} bytes in place of {}",
                            self.shape.size
                        ))
                        .advice("give both sides the same -S"));
                    }
                    self.received += 1;
                    self.sender = done.outcome.imm().or(self.sender);
                }
            }
        }
        Ok(())
    }
}

/// The queue pair, for everything but posting.
impl Deref for Burst {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.qp
    }
}

/// Refuses messages that are longer than a datagram may be.
pub(super) fn check_datagram(context: &Context, port: u32, size: u32) -> Result<()> {
    let mtu = context.query_port(port)?.active_mtu.bytes().unwrap_or(u32::MAX);
    if size > mtu {
        return Err(Failure::usage(format!(
            "-S {size} is longer than a datagram: the port's MTU is {mtu}"
        )));
    }
    Ok(())
}

fn cannot_post(error: uverbs::PostError) -> Failure {
    Failure::run(format!("a request could not be posted: {error}"))
}
