//! Three tasks that post, two that receive, and the drivers of both sides. In run after run, at one poll of a task or
//! driver after the other, one thing happens: the future that is polled is dropped, its queue pair is aborted, or a device
//! is unplugged, fails or is killed with its process.

use crate::harness::{Result, check_objects, connect_with};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use uverbs::aio::tokio::Registered;
use uverbs::aio::{AsyncQueuePair, AsyncSharedReceiveQueue, Driver, Transfer};
use uverbs::device::devices_on;
use uverbs::owned::{Buffer, BufferPool};
use uverbs::sim::{Device, Fabric, Profile, TokioClock};
use uverbs::{Access, Handshake, MemoryRegion, QpType, Remote};

const BUFFERS: usize = 24;
/// Sends that a queue holds: fewer than the lists have.
const DEPTH: u32 = 3;
/// Requests of each list.
const LIST: usize = 5;
/// Longer than all retries of a connection.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The future that is polled is dropped.
    Dropped,
    /// Its queue pair is aborted.
    Aborted,
    /// The device of this side is taken away.
    Unplugged(usize),
    /// The device of this side has an internal error.
    Failed(usize),
    /// The process on this side dies.
    Killed(usize),
}

impl Event {
    pub(crate) const ALL: [Event; 8] = [
        Event::Dropped,
        Event::Aborted,
        Event::Unplugged(0),
        Event::Unplugged(1),
        Event::Failed(0),
        Event::Failed(1),
        Event::Killed(0),
        Event::Killed(1),
    ];
}

struct Side {
    context: uverbs::Context,
    device: Device,
    qp: AsyncQueuePair,
    srq: Option<AsyncSharedReceiveQueue>,
    pool: BufferPool,
    region: MemoryRegion<u8>,
}

impl Side {
    /// A side, perhaps with a shared receive queue, and its driver.
    fn new(fabric: &Fabric, number: usize, shares: bool) -> Result<(Side, Driver<Registered>)> {
        let devices = devices_on(&fabric.system());
        let name = devices[number].name();
        let device = fabric.device(name).ok_or("no device")?;
        let context = uverbs::Context::open(&devices[number])?;
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(64).count(BUFFERS).build()?;
        let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate(64)?;
        let (cq, driver) = context.cq_builder(64).build_async(Registered::new)?;
        let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(DEPTH);
        let (qp, srq) = if shares {
            let srq = cq.adopt_srq(pd.srq_builder(8).build()?)?;
            (cq.adopt_on(builder.srq(&srq).build()?, &srq)?, Some(srq))
        } else {
            (cq.adopt(builder.max_recv_wr(8).build()?)?, None)
        };
        Ok((Side { context, device, qp, srq, pool, region }, driver))
    }
}

/// Counts the polls of all tasks, and acts at one of them.
#[derive(Clone)]
struct Script {
    event: Option<Event>,
    /// Polls until then.
    left: Arc<AtomicU32>,
    fabric: Fabric,
    sides: Arc<[(Device, uverbs::Context); 2]>,
}

impl Script {
    /// Whether the future is to be dropped.
    fn act(&self, qp: Option<&AsyncQueuePair>) -> bool {
        let device = |side: usize| &self.sides[side].0;
        match self.event {
            None => {}
            Some(Event::Dropped) => return true,
            // In a process that was killed no call succeeds.
            Some(Event::Aborted) => drop(qp.map(AsyncQueuePair::abort)),
            Some(Event::Unplugged(side)) => device(side).clone().unplug(),
            Some(Event::Failed(side)) => device(side).fail(),
            Some(Event::Killed(side)) => drop(self.fabric.kill(&self.sides[side].1)),
        }
        false
    }
}

/// A task, or a driver, which has no queue pair; `None` if it was dropped.
struct Scripted {
    script: Script,
    qp: Option<AsyncQueuePair>,
    task: Option<Pin<Box<dyn Future<Output = Result<()>> + Send>>>,
}

impl Future for Scripted {
    type Output = Option<Result<()>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Scripted { script, qp, task } = &mut *self;
        let before = script
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if before == Ok(1) && script.act(qp.as_ref()) {
            *task = None;
        }
        match task {
            Some(task) => task.as_mut().poll(cx).map(Some),
            None => Poll::Ready(None),
        }
    }
}

/// Sends as a future of all ends, then a single one.
async fn send(qp: AsyncQueuePair, pool: BufferPool) -> Result<()> {
    let message = || pool.copy(b"a message");
    let list = (0..LIST).map(|_| Ok((Transfer::Send, message()?)));
    let list: Vec<_> = list.collect::<Result<_>>()?;
    for end in qp.post_all(list).await {
        end.map_err(|failed| failed.to_string())?;
    }
    qp.send(message()?).await.map_err(|failed| failed.to_string())?;
    Ok(())
}

/// Writes and a read as a stream of ends, then a single write.
async fn write(qp: AsyncQueuePair, pool: BufferPool, to: Remote) -> Result<()> {
    let buffers = (0..LIST).map(|_| Ok(pool.take()?)).collect::<Result<Vec<Buffer>>>()?;
    let transfer = |at| if at % 2 == 0 { Transfer::Write(to) } else { Transfer::Read(to) };
    let mut list =
        qp.post_all(buffers.into_iter().enumerate().map(|(at, buffer)| (transfer(at), buffer)));
    while let Some(end) = list.next().await {
        end.map_err(|failed| failed.to_string())?;
    }
    qp.write(to, pool.take()?).await.map_err(|failed| failed.to_string())?;
    Ok(())
}

/// A single read, and an atomic.
async fn count(qp: AsyncQueuePair, pool: BufferPool, from: Remote) -> Result<()> {
    let read = qp.read(from, pool.take()?).await.map_err(|failed| failed.to_string())?;
    qp.fetch_add(from, 1, read.memory).await.map_err(|failed| failed.to_string())?;
    Ok(())
}

/// Takes messages while they come; a server sends each back.
async fn receive(
    qp: AsyncQueuePair,
    srq: Option<AsyncSharedReceiveQueue>,
    pool: BufferPool,
    sends_back: bool,
) -> Result<()> {
    let mut inbox = match &srq {
        Some(srq) => srq.inbox(&pool, 4),
        None => qp.inbox(&pool, 4),
    };
    for _ in 0..=LIST {
        let message = inbox.next().await.map_err(|failed| failed.to_string())?;
        assert_eq!(&message.memory[..], b"a message");
        if sends_back {
            qp.send(message.memory).await.map_err(|failed| failed.to_string())?;
        }
    }
    Ok(())
}

/// The polls of the program without an event: all of its tasks succeed. Sides may have shared receive queues.
pub(crate) fn polls(shares: bool) -> Result<u32> {
    let left = Arc::new(AtomicU32::new(u32::MAX));
    play(0, shares, None, &left)?;
    Ok(u32::MAX - left.load(Ordering::Relaxed))
}

/// Runs the program with `event` at poll `at`, counted from 1.
pub(crate) fn run(shares: bool, event: Event, at: u32) -> Result<()> {
    let ended = play(at.into(), shares, Some(event), &Arc::new(AtomicU32::new(at)));
    ended.map_err(|error| format!("{event:?} at poll {at}: {error}").into())
}

fn play(seed: u64, shares: bool, event: Option<Event>, left: &Arc<AtomicU32>) -> Result<()> {
    let fabric = Fabric::builder().device(Profile::new()).device(Profile::new());
    let fabric = fabric.stepped(seed).writes_in_any_order().history().build()?;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().start_paused(true).build()?;
    let driven = fabric.clone();
    runtime.spawn(async move { driven.drive(TokioClock::new()).await });
    runtime.block_on(program(&fabric, shares, event, left))?;
    drop(runtime);
    check_objects(&fabric)
}

/// Waits for the end of a task, and makes it end after a while: `None`. A task that was dropped has ended well.
async fn end(mut task: JoinHandle<Option<Result<()>>>) -> Option<Result<()>> {
    let ended = timeout(PATIENCE, &mut task).await;
    let by_itself = ended.is_ok();
    let ended = match ended {
        Ok(ended) => ended,
        Err(_) => {
            task.abort();
            task.await
        }
    };
    match ended {
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Ok(ended) if by_itself => Some(ended.unwrap_or(Ok(()))),
        _ => None,
    }
}

async fn program(
    fabric: &Fabric,
    shares: bool,
    event: Option<Event>,
    left: &Arc<AtomicU32>,
) -> Result<()> {
    let ((client, one), (server, other)) =
        (Side::new(fabric, 0, shares)?, Side::new(fabric, 1, shares)?);
    // A peer without receives ends a send.
    connect_with(&client.qp, &server.qp, &Handshake::new().rnr_retry(2).timeout(14))?;
    let to = server.region.remote(0)?;
    let sides = [&client, &server].map(|side| (side.device.clone(), side.context.clone()));
    let script =
        Script { event, left: left.clone(), fabric: fabric.clone(), sides: Arc::new(sides) };
    let start = |side: &Side, task: Pin<Box<dyn Future<Output = Result<()>> + Send>>| {
        let qp = Some(side.qp.clone());
        tokio::spawn(Scripted { script: script.clone(), qp, task: Some(task) })
    };
    let drivers = [one, other].map(|driver| {
        let task = Box::pin(async { Ok(driver.await?) });
        tokio::spawn(Scripted { script: script.clone(), qp: None, task: Some(task) })
    });
    let (a, b) = (&client, &server);
    let receiver = |side: &Side, sends_back| {
        receive(side.qp.clone(), side.srq.clone(), side.pool.clone(), sends_back)
    };
    let receivers = [start(b, Box::pin(receiver(b, true))), start(a, Box::pin(receiver(a, false)))];
    let posters = [
        start(a, Box::pin(send(a.qp.clone(), a.pool.clone()))),
        start(a, Box::pin(write(a.qp.clone(), a.pool.clone(), to))),
        start(a, Box::pin(count(a.qp.clone(), a.pool.clone(), to))),
    ];
    for poster in posters {
        match end(poster).await {
            Some(Err(error)) if event.is_none() => return Err(error),
            Some(_) => {}
            // A device with an internal error completes no request.
            None if matches!(event, Some(Event::Failed(0))) => {}
            None => return Err("a request waits for ever".into()),
        }
    }
    for (receiver, side) in receivers.into_iter().zip([1, 0]) {
        let is_gone = match event {
            Some(Event::Unplugged(gone) | Event::Killed(gone)) => gone == side,
            _ => false,
        };
        match end(receiver).await {
            Some(Err(error)) if event.is_none() => return Err(error),
            Some(_) => {}
            // A message that was never sent does not come.
            None if event.is_some() && !is_gone => {}
            None => return Err("a receive waits for ever".into()),
        }
    }
    drop(script);
    for (Side { context, device: _, qp, srq, pool, region }, driver) in
        [client, server].into_iter().zip(drivers)
    {
        drop((qp, srq, region));
        // Why it ended was told to those who waited.
        let _ = timeout(PATIENCE, driver).await.map_err(|_| "a driver does not end")??;
        sleep(Duration::from_secs(1)).await;
        if pool.idle() != BUFFERS || context.leaked() != 0 {
            return Err(format!(
                "{} of {BUFFERS} buffers are back, {} objects leaked",
                pool.idle(),
                context.leaked()
            )
            .into());
        }
    }
    Ok(())
}
