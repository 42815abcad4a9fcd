//! A queue of a controller: a connected queue pair, and the memory that the target reads and writes.
//!
//! A command travels as a message of 64 bytes and its response as one of 16. In between the target fetches data by RDMA
//! READ and delivers it by RDMA WRITE, with the rkey in the command.
//!
//! The memory for data is a [`MemoryRegion`]. A target that has its rkey may write it at any time, so that the region
//! only lets the program copy bytes in and out, and revokes the rkey before it frees the memory. So the program needs
//! no `unsafe`, however the target behaves.

use crate::Result;
use crate::capsule::{Command, KeyedSgl, Response};
use crate::handshake::{self, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::ops::Deref;
use std::time::{Duration, Instant};
use uverbs::cm::{ConnectParam, Connection, Connector, EventChannel, RouteResolved};
use uverbs::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{Access, CompletionChannel, MemoryRegion, Notify, QpControl, QpType, SendWr};
use zerocopy::IntoBytes;

/// The longest time of a command.
const PATIENCE: Duration = Duration::from_secs(30);

/// The attributes of a queue to connect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueAttr {
    /// The queue's number; 0 is the admin queue.
    pub(crate) qid: u16,
    /// The controller of an I/O queue.
    pub(crate) controller: u16,
    /// The number of commands that may be under way.
    pub(crate) depth: u16,
    /// At least one more than the depth, because a full submission queue has an empty entry.
    pub(crate) entries: u16,
    /// The largest number of data bytes of a command.
    pub(crate) bytes: usize,
}

/// The request that a completion of the device belongs to.
#[derive(Clone, Copy, Debug)]
enum Tag {
    /// The command of this slot was sent.
    Command(Slot),
    Response,
}

/// A place for a command that is under way, with its share of the memory. Its number is the command's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(u16);

impl Slot {
    pub(crate) fn index(self) -> usize {
        self.0.into()
    }
}

/// A slot's command under way. The slot is free again when the send has completed and the response has arrived. The
/// response may arrive before the completion of the send.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    sent: bool,
    response: Option<Response>,
}

/// The objects of a connection that do not depend on its peer.
struct Resources {
    qp: OwnedQueuePair<Tag>,
    cq: OwnedCompletionQueue<Tag>,
    completions: CompletionChannel,
    data: MemoryRegion<u8>,
}

/// Gives [`Connector::connect`] the queue pair.
impl Deref for Resources {
    type Target = QpControl;

    fn deref(&self) -> &QpControl {
        &self.qp
    }
}

impl Resources {
    fn new(route: &RouteResolved, attr: QueueAttr) -> uverbs::Result<(Resources, BufferPool)> {
        let context = route.context()?;
        let pd = context.alloc_pd()?;
        let (depth, entries) = (u32::from(attr.depth), u32::from(attr.entries));
        let completions = context.create_comp_channel()?;
        // Devices round the sizes of both queues up to a power of two, and small ones further.
        let cq = context.cq_builder(2 * (entries + depth) + 16).channel(&completions).build()?;
        let mut cq = OwnedCompletionQueue::new(cq);
        let qp = pd
            .qp_builder(cq.queue(), cq.queue(), QpType::RC)
            .max_send_wr(depth)
            .max_recv_wr(entries)
            .max_inline_data(size_of::<Command>() as u32)
            .build()?;
        let qp = cq.adopt(qp)?;
        // Receives can be posted from now on.
        route.init_qp(&qp)?;
        let responses =
            pd.buffer_pool_builder(size_of::<Response>()).count(attr.entries.into()).build()?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let data = pd.mr_builder().access(access).allocate(usize::from(attr.depth) * attr.bytes)?;
        Ok((Resources { qp, cq, completions, data }, responses))
    }

    fn post_receives(&mut self, responses: &BufferPool) -> uverbs::Result<()> {
        let mut batch = self.qp.recv_batch()?;
        while let Ok(buffer) = responses.take() {
            batch.push(buffer, Tag::Response)?;
        }
        Ok(batch.ring()?)
    }
}

/// A connected queue.
pub(crate) struct Queue {
    connection: Connection,
    events: EventChannel,
    resources: Resources,
    attr: QueueAttr,
    slots: Vec<Option<UnderWay>>,
    free: Vec<Slot>,
    done: VecDeque<(Slot, Response)>,
}

impl Queue {
    /// Connects to a target's port. The queue belongs to no controller before [`Command::connect`].
    pub(crate) fn connect(events: &EventChannel, to: &str, attr: QueueAttr) -> Result<Queue> {
        let request = Request::new(attr.qid, attr.entries, attr.controller);
        // The host sends no reads. The target sends some: as many at once as the device can answer.
        let param = ConnectParam::new().private_data(request.as_bytes()).initiator_depth(0);
        let connector = Connector::new(to).map_err(|error| format!("{to}: {error}"))?;
        let mut posted = Ok(());
        let connected = connector.channel(events).param(param).connect(|route| {
            let (mut resources, responses) = Resources::new(route, attr)?;
            posted = resources.post_receives(&responses);
            Ok(resources)
        });
        let (resources, connection) = connected.map_err(|error| handshake::explain(&error, to))?;
        posted?;
        handshake::check_accept(connection.private_data(), attr.depth.into())?;
        Ok(Queue {
            connection,
            events: events.clone(),
            resources,
            attr,
            slots: vec![None; attr.depth.into()],
            free: (0..attr.depth).rev().map(Slot).collect(),
            done: VecDeque::new(),
        })
    }

    /// The device that the queue pair is on, and the address of the target.
    pub(crate) fn describe(&self) -> Result<String> {
        let context = self.resources.qp.context();
        Ok(format!("{} by {}", self.connection.peer_addr()?, context.device().name()))
    }

    /// A slot that no command uses; `None` while all are under way.
    pub(crate) fn take_slot(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Frees a slot whose response was handled.
    pub(crate) fn free_slot(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    fn offset(&self, slot: Slot) -> usize {
        slot.index() * self.attr.bytes
    }

    /// Copies into the memory of a slot, for the target to read.
    pub(crate) fn write_data(&mut self, slot: Slot, bytes: &[u8]) -> Result<()> {
        let offset = self.offset(slot);
        Ok(self.resources.data.copy_from(offset, bytes)?)
    }

    /// Copies the target's data out of the memory of a slot.
    pub(crate) fn read_data(&self, slot: Slot, bytes: &mut [u8]) -> Result<()> {
        Ok(self.resources.data.copy_to(self.offset(slot), bytes)?)
    }

    /// Describes the first `length` bytes of a slot's memory to the target.
    pub(crate) fn sgl(&self, slot: Slot, length: usize) -> Result<KeyedSgl> {
        if length > self.attr.bytes.min(KeyedSgl::MAX_LENGTH) {
            let most = self.attr.bytes;
            return Err(format!("{length} bytes of data: the queue has {most} a command").into());
        }
        Ok(KeyedSgl::new(self.resources.data.remote(self.offset(slot))?, length))
    }

    /// Sends a command.
    pub(crate) fn submit(&mut self, slot: Slot, mut command: Command) -> Result<()> {
        command.id = slot.0.into();
        let mut batch = self.resources.qp.send_batch()?;
        // Inline: the command is copied into the request, and needs no registered memory.
        let send = SendWr::send(&[]).inline(command.as_bytes());
        batch.push(send, (), Tag::Command(slot)).map_err(|failed| failed.error)?;
        batch.ring()?;
        if let Some(state) = self.slots.get_mut(slot.index()) {
            *state = Some(UnderWay { sent: false, response: None });
        }
        Ok(())
    }

    /// Waits for a response. Its slot stays taken.
    pub(crate) fn wait(&mut self) -> Result<(Slot, Response)> {
        let deadline = Instant::now() + PATIENCE;
        let mut armed = false;
        loop {
            self.poll()?;
            if let Some(done) = self.done.pop_front() {
                return Ok(done);
            }
            if armed {
                self.sleep(deadline)?;
            } else {
                // Polled once more: a completion that came before this raises no event.
                self.resources.cq.req_notify(Notify::Next)?;
            }
            armed = !armed;
        }
    }

    /// Sends a command and waits for its response, when no other is under way.
    pub(crate) fn execute(
        &mut self,
        what: &str,
        command: impl FnOnce(&mut Queue, Slot) -> Result<Command>,
    ) -> Result<(Slot, Response)> {
        let slot =
            self.take_slot().ok_or_else(|| format!("{what}: another command is under way"))?;
        let command = command(self, slot)?;
        self.submit(slot, command)?;
        let done = self.wait().map_err(|error| format!("{what}: {error}"))?;
        self.free_slot(slot);
        Ok(done)
    }

    /// Polls completions, and posts a receive for each response that came.
    fn poll(&mut self) -> Result<()> {
        let Queue { resources: Resources { qp, cq, .. }, slots, done, .. } = self;
        let mut failure = None;
        for completion in cq.poll()? {
            if !completion.outcome.is_success() {
                failure.get_or_insert((completion.tag, completion.outcome.status));
                continue;
            }
            let slot = match completion.tag {
                Tag::Command(slot) => {
                    if let Some(Some(state)) = slots.get_mut(slot.index()) {
                        state.sent = true;
                    }
                    slot
                }
                Tag::Response => {
                    let buffer =
                        completion.memory.into_buffer().ok_or("a receive without buffer")?;
                    let filled = completion.outcome.filled();
                    let response = Response::parse(buffer.get(..filled).unwrap_or_default())?;
                    let slot = Slot(response.id.get());
                    match slots.get_mut(slot.index()) {
                        Some(Some(state)) if state.response.is_none() => {
                            state.response = Some(response);
                        }
                        _ => {
                            return Err(format!(
                                "the target answers command {}, which is not under way",
                                slot.0
                            )
                            .into());
                        }
                    }
                    let mut batch = qp.recv_batch()?;
                    batch.push(buffer, Tag::Response).map_err(|failed| failed.error)?;
                    batch.ring()?;
                    slot
                }
            };
            if let Some(state) = slots.get_mut(slot.index()) {
                if let Some(UnderWay { sent: true, response: Some(response) }) = *state {
                    *state = None;
                    done.push_back((slot, response));
                }
            }
        }
        let Some((tag, status)) = failure else { return Ok(()) };
        self.check_connection()?;
        Err(match tag {
            Tag::Command(_) => format!("a command was not delivered: {status}"),
            Tag::Response => format!("receiving failed: {status}"),
        }
        .into())
    }

    /// Sleeps until there is a completion or an event of the connection.
    fn sleep(&mut self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = PATIENCE.as_secs();
            return Err(format!("the target did not answer within {seconds} seconds").into());
        }
        let completions = &self.resources.completions;
        let mut files =
            [PollFd::new(completions, PollFlags::IN), PollFd::new(&self.events, PollFlags::IN)];
        match poll(&mut files, Some(&Timespec::try_from(left)?)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        while completions.try_next()?.is_some() {}
        self.check_connection()
    }

    /// Fails if the target has closed the connection.
    fn check_connection(&self) -> Result<()> {
        while self.connection.next_event(Some(Duration::ZERO))?.is_some() {}
        match self.connection.is_closed() {
            true => Err("the target closed the connection".into()),
            false => Ok(()),
        }
    }

    /// Closes the connection.
    pub(crate) fn disconnect(self) -> Result<()> {
        Ok(self.connection.disconnect()?)
    }
}
