//! Requests and replies over connections whose receives come from one shared receive queue: each reply belongs to its
//! request, no request has two, and each one ends by its reply, by its timeout, or with its connection.

use crate::harness::{Dice, Fault, GivingUp, Result, Stage, connect, polls};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use uverbs::aio::tokio::within;
use uverbs::aio::{AsyncQueuePair, AsyncSharedReceiveQueue, Inbox};
use uverbs::owned::{Buffer, BufferPool};
use uverbs::{Context, QpType};

const CLIENTS: usize = 2;
const REQUESTS: u64 = 8;
/// The number of a client's requests that wait for their replies.
const ASKING: usize = 4;
const BYTES: usize = 64;
/// The longest wait of a client for a reply. The server takes less than half of it.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest wait of either side for the completion of a request: longer than all retries.
const LATE: Duration = Duration::from_secs(120);

/// The server replies.
const REPLY: u8 = 0;
const IGNORE: u8 = 1;
/// The server drops the connection.
const LEAVE: u8 = 2;

/// A request, or the reply to it: the number, the kind that is asked for, and bytes that depend on both.
fn message(number: u64, asked: u8, salt: u64) -> [u8; BYTES] {
    let mut bytes = [asked; BYTES];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    let mut dice = Dice::new(number ^ salt);
    bytes[9..].iter_mut().for_each(|byte| *byte = dice.next() as u8);
    bytes
}

const REQUEST: u64 = 1 << 60;
const ANSWER: u64 = 2 << 60;

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("a whole number"))
}

struct Server {
    srq: AsyncSharedReceiveQueue,
    pool: BufferPool,
    /// `None` once the server has left.
    qps: Mutex<Vec<Option<AsyncQueuePair>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    fn new(stage: &Stage, context: &Context) -> Result<Server> {
        let pd = context.alloc_pd()?;
        let (cq, driver) = context.cq_builder(256).spawn()?;
        stage.watch(driver);
        let pool = pd.buffer_pool_builder(BYTES).count(48).build()?;
        let srq = cq.adopt_srq(pd.srq_builder(16).build()?)?;
        let mut qps = Vec::new();
        for _ in 0..CLIENTS {
            let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).srq(&srq);
            qps.push(Some(cq.adopt_on(builder.build()?, &srq)?));
        }
        Ok(Server { srq, pool, qps: Mutex::new(qps) })
    }

    fn qp(&self, client: usize) -> Option<AsyncQueuePair> {
        lock(&self.qps)[client].clone()
    }

    async fn serve(self: Arc<Self>, stage: Stage, mut inbox: Inbox, mut dice: Dice) {
        loop {
            let message = match inbox.next().await {
                Ok(message) => message,
                // A failed receive of a shared queue ends only its connection; a failed driver ends all.
                Err(error) if error.memory.is_some() => continue,
                Err(_) => return,
            };
            let of = message.outcome.qpn;
            let client =
                lock(&self.qps).iter().position(|qp| qp.as_ref().is_some_and(|qp| qp.qpn() == of));
            // The client has left.
            let Some(client) = client else { continue };
            let (server, dice) = (self.clone(), dice.fork());
            stage.spawn(async move { server.answer(client, message.memory, dice).await });
        }
    }

    async fn answer(&self, client: usize, mut buffer: Buffer, mut dice: Dice) {
        let (number, asked) = (number(&buffer), buffer[8]);
        assert_eq!(buffer[..], message(number, asked, REQUEST), "a request");
        if dice.happens(50) {
            sleep(Duration::from_millis(dice.below(20))).await;
        }
        if asked == LEAVE {
            *lock(&self.qps).get_mut(client).expect("a client") = None;
        }
        if asked != REPLY {
            return;
        }
        if dice.happens(50) {
            // The buffer goes back to the pool before the reply.
            drop(buffer);
            buffer = loop {
                match self.pool.take() {
                    Ok(buffer) => break buffer,
                    Err(_) => sleep(Duration::from_millis(1)).await,
                }
            };
        }
        buffer.copy_from_slice(&message(number, asked, ANSWER));
        if let Some(qp) = self.qp(client) {
            // The connection may be over.
            let _ = within(LATE, qp.send(buffer)).await;
        }
    }
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Replied,
    TimedOut,
    /// The caller dropped the future.
    Dropped,
    Broken,
}

struct Client {
    qp: AsyncQueuePair,
    pool: BufferPool,
    asking: Semaphore,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<()>>>,
    /// Numbers of requests whose callers do not wait any more.
    given_up: Mutex<BTreeSet<u64>>,
}

impl Client {
    fn new(stage: &Stage, context: &Context) -> Result<Client> {
        let pd = context.alloc_pd()?;
        let (cq, driver) = context.cq_builder(64).spawn()?;
        stage.watch(driver);
        let pool = pd.buffer_pool_builder(BYTES).count(24).build()?;
        let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(2).max_recv_wr(8);
        let qp = cq.adopt(builder.build()?)?;
        let asking = Semaphore::new(ASKING);
        let (waiting, given_up) = (Mutex::default(), Mutex::default());
        Ok(Client { qp, pool, asking, waiting, given_up })
    }

    /// Hands each reply to its caller, until the connection ends.
    async fn listen(self: Arc<Self>, mut inbox: Inbox) {
        let mut replied = BTreeSet::new();
        while let Ok(received) = inbox.next().await {
            let number = number(&received.memory);
            assert_eq!(received.memory[..], message(number, REPLY, ANSWER), "a reply");
            assert!(replied.insert(number), "two replies to {number}");
            match lock(&self.waiting).remove(&number) {
                Some(caller) => drop(caller.send(())),
                None => assert!(lock(&self.given_up).contains(&number), "a reply to {number}"),
            }
        }
        lock(&self.waiting).clear();
        self.asking.close();
    }

    async fn call(self: Arc<Self>, number: u64, asked: u8, mut dice: Dice) -> End {
        let gives_up = dice.happens(25).then(|| GivingUp::choose(&mut dice));
        let mut call = Box::pin(self.ask(number, asked, dice));
        let end = match gives_up {
            Some(giving_up) => polls(&mut call, giving_up).await.unwrap_or(End::Dropped),
            None => call.as_mut().await,
        };
        if end != End::Replied {
            lock(&self.given_up).insert(number);
            lock(&self.waiting).remove(&number);
        }
        end
    }

    async fn ask(&self, number: u64, asked: u8, mut dice: Dice) -> End {
        let Ok(_permit) = self.asking.acquire().await else { return End::Broken };
        let (sender, reply) = oneshot::channel();
        lock(&self.waiting).insert(number, sender);
        let bytes = message(number, asked, REQUEST);
        // The reply may arrive before the completion of its request.
        let sent = if dice.happens(20) {
            within(LATE, self.qp.send_inline(&bytes[..])).await.is_ok_and(|sent| sent.is_ok())
        } else {
            let buffer = self.pool.copy(&bytes).expect("a buffer for each that asks");
            let sent = within(LATE, self.qp.send(buffer)).await.ok().and_then(|sent| sent.ok());
            sent.is_some_and(|sent| {
                assert_eq!(sent.memory[..], bytes, "a buffer that came back");
                true
            })
        };
        if !sent {
            return End::Broken;
        }
        match timeout(PATIENCE, reply).await {
            Ok(Ok(())) => End::Replied,
            Ok(Err(_)) => End::Broken,
            Err(_) => End::TimedOut,
        }
    }
}

pub(crate) async fn run(stage: Stage, mut dice: Dice) -> Result<Vec<u8>> {
    let served = stage.open(1)?;
    let server = Arc::new(Server::new(&stage, &served)?);
    let (pool, inbox) = (server.pool.clone(), server.srq.inbox(&server.pool, 16));
    let serving = tokio::spawn(server.clone().serve(stage.clone(), inbox, dice.fork()));
    let end = talk(&stage, &server, &mut dice).await;
    serving.abort();
    if let Err(error) = serving.await {
        if error.is_panic() {
            std::panic::resume_unwind(error.into_panic());
        }
    }
    // Waits for answers that are under way.
    sleep(2 * LATE).await;
    assert_eq!(Arc::strong_count(&server), 1);
    drop(server);
    // The driver polls the last completions.
    sleep(Duration::from_secs(1)).await;
    assert_eq!(pool.idle(), pool.count(), "the server's buffers: {:?}", stage.fault);
    assert_eq!(served.leaked(), 0, "{:?}", stage.fault);
    end
}

async fn talk(stage: &Stage, server: &Server, dice: &mut Dice) -> Result<Vec<u8>> {
    let context = stage.open(0)?;
    let mut clients = Vec::new();
    for at in 0..CLIENTS {
        let client = Arc::new(Client::new(stage, &context)?);
        let Some(qp) = server.qp(at) else { continue };
        connect(&client.qp, &qp)?;
        clients.push(client);
    }
    let leaver =
        dice.happens(30).then(|| (dice.below(CLIENTS as u64) as usize, dice.below(REQUESTS)));
    let (mut calls, mut listeners) = (Vec::new(), Vec::new());
    for (at, client) in clients.iter().enumerate() {
        listeners.push(tokio::spawn(client.clone().listen(client.qp.inbox(&client.pool, 8))));
        for number in 0..REQUESTS {
            let asked = match leaver {
                Some(leaver) if leaver == (at, number) => LEAVE,
                _ if dice.happens(10) => IGNORE,
                _ => REPLY,
            };
            let call = client.clone().call(number, asked, dice.fork());
            calls.push((at, number, asked, tokio::spawn(call)));
        }
    }
    let mut ends = Vec::new();
    for (at, number, asked, call) in calls {
        let end = match call.await {
            Ok(end) => end,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let may_break =
            leaver.is_some_and(|(leaver, _)| leaver == at) || !stage.fault.is_harmless();
        let expected = match asked {
            REPLY => matches!(end, End::Replied | End::Dropped),
            _ => matches!(end, End::TimedOut | End::Dropped),
        };
        assert!(expected || may_break, "{:?}: client {at}, request {number}: {end:?}", stage.fault);
        ends.push(end as u8);
    }
    let pools: Vec<_> = clients.iter().map(|client| client.pool.clone()).collect();
    // A device that is gone or failed takes no command any more.
    let aborted =
        clients.iter().map(|client| client.qp.abort().is_ok()).fold(true, |all, one| all & one);
    assert!(aborted || !stage.fault.is_harmless());
    drop(clients);
    for mut listener in listeners {
        let ended = timeout(LATE, &mut listener).await;
        // A device in internal error sets queue pairs to ERR on command, and flushes no request.
        let flushes = aborted && !matches!(stage.fault, Fault::Fail);
        assert!(ended.is_ok() || !flushes, "{:?}: an inbox does not end", stage.fault);
        listener.abort();
        if let Ok(Err(error)) = ended {
            std::panic::resume_unwind(error.into_panic());
        }
    }
    sleep(Duration::from_secs(1)).await;
    for pool in pools {
        assert_eq!(pool.idle(), pool.count(), "a client's buffers: {:?}", stage.fault);
    }
    assert_eq!(context.leaked(), 0, "{:?}", stage.fault);
    Ok(ends)
}
