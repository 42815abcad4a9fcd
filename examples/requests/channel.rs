//! Requests and replies in frames over a reliable connection.
//!
//! Each side posts as many receives as the other may have frames under way, and reports in each frame the number that
//! it has posted again. So no frame ever finds the receiver unready, even while requests that are being answered hold
//! all of its buffers. Short frames go inline, longer ones from a buffer. A body that fits into no frame stays where it
//! is: the frame has its address, the receiver reads it, and reports when the buffer is free again.
//!
//! Frames, requests and replies have pools of their own, so that a task that waits for the other side holds no buffer
//! that another task needs to go on.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use uverbs::aio::{AsyncQueuePair, Inbox};
use uverbs::owned::{Buffer, BufferPool};
use uverbs::{Device, ProtectionDomain, Remote, Rkey};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Receives that each side posts.
pub(crate) const DEPTH: usize = 32;
/// Places for frames that only report posted receives. Without them two sides that wait for each other would stay so.
const RESERVE: usize = 2;
/// The pause before another try for a buffer of a full pool.
const SOON: Duration = Duration::from_millis(1);
/// Bytes of a frame.
const FRAME: usize = 1024;
const HEADER: usize = 16;
/// Bytes of a reference to a body outside of the frame.
const REFERENCE: usize = 16;
/// Bytes of the largest body, and the number of buffers of a kind.
pub(crate) const BULK: usize = 1 << 18;
const BULKS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Request = 1,
    Reply,
    /// The body of the other side's frame was read.
    Taken,
    /// Receives were posted again.
    Credit,
}

/// A flag in the kind of a frame whose body is elsewhere.
const ELSEWHERE: u8 = 0x80;

/// One side of a channel; clones are the same.
#[derive(Clone)]
pub(crate) struct Channel(Arc<Inner>);

struct Inner {
    qp: AsyncQueuePair,
    /// Buffers of received frames: as many as are posted, as many as the other side may have requests, and as many as
    /// there may be replies that a task reads.
    received: BufferPool,
    /// Buffers of sent frames. A task takes a credit first, and there is a frame for each credit.
    frames: BufferPool,
    /// Buffers for bodies that this side makes.
    short: BufferPool,
    long: BufferPool,
    /// Buffers for bodies that it reads from the other side: of requests, and of replies.
    asked: BufferPool,
    answered: BufferPool,
    /// Permits of requests that wait for their replies.
    asking: Semaphore,
    /// Permits of frames for which the other side has receives.
    credits: Semaphore,
    /// The frames of the reserve that are under way.
    reserved: AtomicU32,
    /// The receives that were posted again, and not yet reported to the other side.
    owed: AtomicU32,
    next: AtomicU32,
    calls: Mutex<HashMap<u32, oneshot::Sender<Buffer>>>,
    /// Bodies that the other side has not read yet.
    offered: Mutex<HashMap<u32, Buffer>>,
}

impl Channel {
    /// A channel on a queue pair that holds as many requests as there may be frames and reads, before it is connected.
    pub(crate) fn new(pd: &ProtectionDomain, qp: AsyncQueuePair) -> Result<Channel> {
        let inner = Inner {
            qp,
            received: pd.buffer_pool_builder(FRAME).count(3 * DEPTH).build()?,
            frames: pd.buffer_pool_builder(FRAME).count(DEPTH).build()?,
            short: pd.buffer_pool_builder(FRAME).count(DEPTH).build()?,
            long: pd.buffer_pool_builder(BULK).count(BULKS).remote_read().build()?,
            asked: pd.buffer_pool_builder(BULK).count(BULKS).remote_read().build()?,
            answered: pd.buffer_pool_builder(BULK).count(BULKS).build()?,
            asking: Semaphore::new(DEPTH),
            credits: Semaphore::new(DEPTH - RESERVE),
            reserved: AtomicU32::new(0),
            owed: AtomicU32::new(0),
            next: AtomicU32::new(0),
            calls: Mutex::default(),
            offered: Mutex::default(),
        };
        Ok(Channel(Arc::new(inner)))
    }

    /// The device that the connection is on.
    pub(crate) fn device(&self) -> Device {
        self.0.qp.context().device().clone()
    }

    /// A buffer for a body of any length up to [`BULK`], as soon as there is one.
    pub(crate) async fn buffer(&self, length: usize) -> Buffer {
        let pool = if length > FRAME - HEADER { &self.0.long } else { &self.0.short };
        take(pool, length).await
    }

    /// Sends a request to the other side, and waits for its reply. A dropped call goes on by itself: if it ended
    /// halfway, it would lose its credit, and a body that the other side has not been told of.
    pub(crate) async fn call(&self, body: Buffer) -> Result<Buffer> {
        let channel = self.clone();
        tokio::spawn(async move { channel.ask(body).await }).await?
    }

    async fn ask(&self, body: Buffer) -> Result<Buffer> {
        let _permit = self.0.asking.acquire().await?;
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let (sender, reply) = oneshot::channel();
        lock(&self.0.calls).insert(id, sender);
        if let Err(error) = self.send(Kind::Request, id, body).await {
            lock(&self.0.calls).remove(&id);
            return Err(error);
        }
        Ok(reply.await.map_err(|_| "the connection broke before the reply")?)
    }

    async fn send(&self, kind: Kind, id: u32, body: Buffer) -> Result<()> {
        if HEADER + body.len() <= FRAME {
            return self.frame(kind as u8, id, &body).await;
        }
        let Remote { addr, rkey } = body.remote();
        let length = body.len() as u32;
        let place = [&addr.to_be_bytes()[..], &rkey.0.to_be_bytes(), &length.to_be_bytes()];
        // A reply answers the number that the other side chose, so that both may offer it.
        let number = id << 1 | u32::from(kind == Kind::Reply);
        lock(&self.0.offered).insert(number, body);
        let sent = self.frame(kind as u8 | ELSEWHERE, id, &place.concat()).await;
        if sent.is_err() {
            drop(lock(&self.0.offered).remove(&number));
        }
        sent
    }

    /// Sends a frame once the other side has a receive for it.
    async fn frame(&self, kind: u8, id: u32, body: &[u8]) -> Result<()> {
        self.0.credits.acquire().await?.forget();
        self.frame_now(kind, id, body).await
    }

    async fn frame_now(&self, kind: u8, id: u32, body: &[u8]) -> Result<()> {
        let owed = self.0.owed.swap(0, Ordering::Relaxed);
        let mut header = [0; HEADER];
        header[0] = kind;
        header[4..8].copy_from_slice(&owed.to_be_bytes());
        header[8..12].copy_from_slice(&id.to_be_bytes());
        header[12..].copy_from_slice(&(body.len() as u32).to_be_bytes());
        let inner = &*self.0;
        if HEADER + body.len() <= inner.qp.caps().max_inline_data as usize {
            inner.qp.send_inline(&[&header, body].concat()).await?;
            return Ok(());
        }
        let mut frame = take(&inner.frames, HEADER + body.len()).await;
        frame[..HEADER].copy_from_slice(&header);
        frame[HEADER..].copy_from_slice(body);
        inner.qp.send(frame).await?;
        Ok(())
    }

    /// Posts the receives that the other side relies on. Call it before the other side may send.
    pub(crate) async fn receive(&self) -> Result<Inbox> {
        let mut inbox = self.0.qp.inbox(&self.0.received, DEPTH);
        match inbox.fill() {
            DEPTH => Ok(inbox),
            fewer => Err(format!("only {fewer} of {DEPTH} receives could be posted").into()),
        }
    }

    /// Handles the other side's frames, until the connection breaks or the future is dropped.
    /// `answer` makes replies.
    pub(crate) async fn run<F: Future<Output = Result<Buffer>> + Send + 'static>(
        self,
        inbox: Inbox,
        answer: impl Fn(Channel, Buffer) -> F + Clone + Send + Sync + 'static,
    ) -> Result<()> {
        let _end = End(&self.0);
        self.serve(inbox, answer).await
    }

    async fn serve<F: Future<Output = Result<Buffer>> + Send + 'static>(
        &self,
        mut inbox: Inbox,
        answer: impl Fn(Channel, Buffer) -> F + Clone + Send + Sync + 'static,
    ) -> Result<()> {
        // The receives that the other side knows of, with those that are still to be reported.
        let mut told = DEPTH;
        loop {
            let posted = inbox.fill();
            let more = posted.saturating_sub(told);
            told += more;
            self.0.owed.fetch_add(more as u32, Ordering::Relaxed);
            self.repay().await?;
            // The pool does not report when there are buffers again.
            let patience = if posted < DEPTH { SOON } else { Duration::MAX };
            let Ok(message) = timeout(patience, inbox.next()).await else { continue };
            told -= 1;
            let (kind, id, body) = self.parse(message?.memory)?;
            if kind == Kind::Taken as u8 {
                let number = body.first_chunk().map(|number| u32::from_be_bytes(*number));
                drop(lock(&self.0.offered).remove(&number.ok_or("a frame without a body")?));
            } else if kind != Kind::Credit as u8 {
                let (channel, answer) = (self.clone(), answer.clone());
                tokio::spawn(async move {
                    if let Err(error) = channel.handle(kind, id, body, answer).await {
                        eprintln!("frame {id}: {error}");
                    }
                });
            }
        }
    }

    /// Takes a frame apart.
    fn parse(&self, mut buffer: Buffer) -> Result<(u8, u32, Buffer)> {
        let word = |at: usize| {
            let bytes = buffer.get(at..at + 4).and_then(|bytes| bytes.first_chunk().copied());
            bytes.map(u32::from_be_bytes).ok_or("a frame without a header")
        };
        let (credits, id, length) = (word(4)?, word(8)?, word(12)?);
        let kind = buffer[0];
        if buffer.len() != HEADER + length as usize {
            return Err("a frame of another length than it says".into());
        }
        // The reserve is filled first.
        let reserve = self.0.reserved.load(Ordering::Relaxed).min(credits);
        self.0.reserved.fetch_sub(reserve, Ordering::Relaxed);
        self.0.credits.add_permits((credits - reserve) as usize);
        buffer.advance(HEADER);
        Ok((kind, id, buffer))
    }

    /// Reports receives to the other side before it runs out of credits.
    async fn repay(&self) -> Result<()> {
        let much = self.0.owed.load(Ordering::Relaxed) as usize >= DEPTH / 2;
        if much && (self.0.reserved.load(Ordering::Relaxed) as usize) < RESERVE {
            self.0.reserved.fetch_add(1, Ordering::Relaxed);
            self.frame_now(Kind::Credit as u8, 0, &[]).await?;
        }
        Ok(())
    }

    async fn handle<F: Future<Output = Result<Buffer>>>(
        &self,
        kind: u8,
        id: u32,
        mut body: Buffer,
        answer: impl Fn(Channel, Buffer) -> F,
    ) -> Result<()> {
        let reply = kind & !ELSEWHERE == Kind::Reply as u8;
        if kind & ELSEWHERE != 0 {
            body = self.fetch(&body, if reply { &self.0.answered } else { &self.0.asked }).await?;
            let number = id << 1 | u32::from(reply);
            self.frame(Kind::Taken as u8, id, &number.to_be_bytes()).await?;
        }
        if reply {
            let call = lock(&self.0.calls).remove(&id).ok_or("a reply to no waiting call")?;
            // The task that asked may have gone away.
            let _ = call.send(body);
            return Ok(());
        }
        let reply = answer(self.clone(), body).await?;
        self.send(Kind::Reply, id, reply).await
    }

    /// Reads a body from the other side's memory.
    async fn fetch(&self, place: &[u8], pool: &BufferPool) -> Result<Buffer> {
        let (Some((addr, rest)), REFERENCE) = (place.split_first_chunk(), place.len()) else {
            return Err("a body that lies nowhere".into());
        };
        let (rkey, length) = rest.split_at(4);
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |word| u32::from_be_bytes(*word));
        let remote = Remote { addr: u64::from_be_bytes(*addr), rkey: Rkey(number(rkey)) };
        let length = number(length) as usize;
        if length > BULK {
            return Err(format!("a body of {length} bytes; {BULK} is the most").into());
        }
        let buffer = take(pool, length).await;
        Ok(self.0.qp.read(remote, buffer).await?.memory)
    }
}

/// A buffer of a pool, as soon as there is one.
async fn take(pool: &BufferPool, length: usize) -> Buffer {
    loop {
        if let Ok(mut buffer) = pool.take() {
            buffer.set_len(length);
            return buffer;
        }
        tokio::task::yield_now().await;
    }
}

/// At the end of the connection no task may wait for it. The senders are closed first, so that no task begins to wait
/// for a reply afterwards.
struct End<'c>(&'c Inner);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let _ = self.0.qp.abort();
        self.0.asking.close();
        self.0.credits.close();
        lock(&self.0.calls).clear();
        lock(&self.0.offered).clear();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
