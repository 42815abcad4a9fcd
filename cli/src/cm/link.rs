//! A queue pair with buffers for one message in each direction, and the connection that it is in.

use crate::failure::{Failure, Result};
use std::collections::VecDeque;
use std::ops::Deref;
use std::time::{Duration, Instant};
use uverbs::cm::{Connection, ConnectionEvent};
use uverbs::owned::{Buffer, BufferPool, Lend, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{Context, ProtectionDomain, QpControl, QpType, SendWr, WcStatus};

/// Polls without a completion before the connection is checked.
const TURNS: u32 = 64;

/// The longest time from the news that the receiver of a message closed the connection to the message's
/// acknowledgement. A device may complete a receive before it sends the acknowledgement, and the program may close in
/// between.
pub(super) const LAST_ACKNOWLEDGEMENT: Duration = Duration::from_secs(1);

/// Receives that are posted at once.
const RECEIVES: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Send,
    Receive,
}

/// The queues of one side.
#[derive(Debug)]
pub(super) struct Link {
    qp: OwnedQueuePair<Request>,
    cq: OwnedCompletionQueue<Request>,
    pool: BufferPool,
    pub(super) pd: ProtectionDomain,
    received: VecDeque<Buffer>,
    /// The memory of the completed request.
    sent: Option<Option<Buffer>>,
    timeout: Duration,
}

/// The end of a wait for a message.
#[derive(Debug)]
pub(super) enum Heard {
    Message(Buffer),
    /// The peer closed the connection.
    End,
}

impl Link {
    /// Makes the queues, with buffers of `size` bytes that peers may read.
    pub(super) fn new(context: &Context, size: usize, timeout: Duration) -> uverbs::Result<Link> {
        let pd = context.alloc_pd()?;
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(16).build()?);
        let pool = pd.buffer_pool_builder(size).count(8).remote_read().build()?;
        let qp = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        let qp = qp.max_send_wr(4).max_recv_wr(RECEIVES).max_inline_data(16).build()?;
        let qp = cq.adopt(qp).map_err(|failed| failed.error)?;
        let (received, sent) = (VecDeque::new(), None);
        Ok(Link { qp, cq, pool, pd, received, sent, timeout })
    }

    pub(super) fn buffer(&self) -> Result<Buffer> {
        Ok(self.pool.take()?)
    }

    /// Posts the receive of a message.
    pub(super) fn receive(&mut self) -> Result<()> {
        let buffer = self.buffer()?;
        let mut batch = self.qp.recv_batch().map_err(cannot_post)?;
        batch.push(buffer, Request::Receive).map_err(|failed| cannot_post(failed.error))?;
        batch.ring().map_err(|error| Failure::run(error.to_string()))
    }

    /// Carries out one request of the send queue, and returns its buffer.
    pub(super) fn request<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        connection: &Connection,
    ) -> Result<Option<Buffer>> {
        let done = self.begin(wr, memory, connection)?;
        done.ok_or_else(|| Failure::run("the peer closed the connection during a request"))
    }

    /// Sends a message after which the peer may close the connection. A device that it has closed may acknowledge
    /// nothing any more: soft-RoCE does not.
    pub(super) fn send_last(&mut self, bytes: &[u8], connection: &Connection) -> Result<()> {
        self.begin(SendWr::send(&[]).inline(bytes), (), connection).map(drop)
    }

    /// The same as [`request`](Self::request); `None` if the peer closed the connection before it was complete.
    fn begin<L: Lend>(
        &mut self,
        wr: SendWr<'_>,
        memory: L,
        connection: &Connection,
    ) -> Result<Option<Option<Buffer>>> {
        let mut batch = self.qp.send_batch().map_err(cannot_post)?;
        batch.push(wr, memory, Request::Send).map_err(|failed| cannot_post(failed.error))?;
        batch.ring().map_err(|error| Failure::run(error.to_string()))?;
        self.wait(connection, LAST_ACKNOWLEDGEMENT, |link| link.sent.take())
    }

    /// Waits for a message, or until the peer closes the connection.
    pub(super) fn hear(&mut self, connection: &Connection) -> Result<Heard> {
        // A message that came before the end has completed.
        let message = self.wait(connection, Duration::ZERO, |link| link.received.pop_front())?;
        Ok(message.map_or(Heard::End, Heard::Message))
    }

    /// Polls until `take` finds something; `None` if the peer closed the connection, and nothing came for `late`
    /// after that.
    fn wait<R>(
        &mut self,
        connection: &Connection,
        late: Duration,
        take: impl Fn(&mut Link) -> Option<R>,
    ) -> Result<Option<R>> {
        let deadline = Instant::now() + self.timeout;
        let mut end = None;
        loop {
            for _ in 0..TURNS {
                self.poll()?;
                if let Some(taken) = take(self) {
                    return Ok(Some(taken));
                }
                std::thread::yield_now();
            }
            while let Some(event) = connection.next_event(Some(Duration::ZERO))? {
                if event == ConnectionEvent::DeviceRemoval {
                    return Err(Failure::device("the kernel is removing the device"));
                }
            }
            // An earlier wait may have read the event.
            if connection.is_closed() {
                let end = *end.get_or_insert_with(|| Instant::now() + late);
                // The awaited request may have completed between the polls and the event.
                self.poll()?;
                let taken = take(self);
                if taken.is_some() || Instant::now() >= end {
                    return Ok(taken);
                }
            } else if Instant::now() > deadline {
                return Err(Failure::run(format!("the peer was silent for {:?}", self.timeout))
                    .advice("look at the peer's output, or allow more time with --timeout"));
            }
        }
    }

    fn poll(&mut self) -> Result<()> {
        let completions = self.cq.poll().map_err(|error| Failure::run(error.to_string()))?;
        for done in completions {
            let status = done.outcome.status;
            if status != WcStatus::SUCCESS {
                let what = match done.tag {
                    Request::Send => "a request",
                    Request::Receive => "a receive",
                };
                return Err(Failure::run(format!("{what} failed: {status}")));
            }
            let filled = done.outcome.filled();
            match (done.tag, done.memory.into_buffer()) {
                (Request::Receive, Some(mut buffer)) => {
                    buffer.set_len(filled);
                    self.received.push_back(buffer);
                }
                (Request::Receive, None) => {}
                (Request::Send, buffer) => self.sent = Some(buffer),
            }
        }
        Ok(())
    }
}

/// The queue pair, for everything but posting.
impl Deref for Link {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.qp
    }
}

fn cannot_post(error: uverbs::PostError) -> Failure {
    Failure::run(format!("a request could not be posted: {error}"))
}
