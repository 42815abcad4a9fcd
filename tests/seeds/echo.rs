//! Echo, connected by address: messages come back whole, in the order in which they were sent, each once.

use crate::harness::{Dice, GivingUp, Result, Stage, polls};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::yield_now;
use tokio::time::timeout;
use uverbs::aio::AsyncQueuePair;
use uverbs::aio::cm::{AsyncEventChannel, AsyncListener};
use uverbs::aio::tokio::within;
use uverbs::cm::{ConnectParam, ConnectRequest, Connector, Listener, QpWith};
use uverbs::owned::BufferPool;
use uverbs::{Context, QpType};

const DEPTH: usize = 8;
const BYTES: usize = 256;
const ROUNDS: u64 = 4;
const PATIENCE: Duration = Duration::from_secs(120);

fn create(stage: &Stage, context: &Context) -> uverbs::Result<(AsyncQueuePair, BufferPool)> {
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(BYTES).count(4 * DEPTH).build()?;
    let (cq, driver) = context.cq_builder(64).spawn()?;
    stage.watch(driver);
    let qp =
        pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(2).max_recv_wr(DEPTH as u32).build()?;
    Ok((cq.adopt(qp)?, pool))
}

async fn serve(stage: Stage, channel: AsyncEventChannel, listener: AsyncListener) -> Result<()> {
    loop {
        let request = listener.next_request().await?;
        let (of_task, channel) = (stage.clone(), channel.clone());
        stage.spawn(async move {
            // A client that leaves ends its task with an error.
            let _ = echo(of_task, channel, request).await;
        });
    }
}

async fn echo(stage: Stage, channel: AsyncEventChannel, request: ConnectRequest) -> Result<()> {
    let (qp, pool) = create(&stage, &request.context()?)?;
    let param = ConnectParam::new();
    let accepted = timeout(
        PATIENCE,
        channel.accept(request, &param, |request| {
            // If the client's confirmation is lost, its first message comes seconds before this returns.
            request.init_qp(&qp)?;
            let inbox = qp.inbox(&pool, DEPTH);
            Ok(QpWith(qp, inbox))
        }),
    );
    let (QpWith(qp, mut inbox), connection) = accepted.await??;
    stage.spawn(async move {
        let _ = timeout(10 * PATIENCE, connection.disconnected()).await;
    });
    while let Ok(Ok(message)) = timeout(10 * PATIENCE, inbox.next()).await {
        // A device with an internal error completes no request any more.
        within(PATIENCE, qp.send(message.memory)).await.map_err(|_| "a send does not end")??;
    }
    Ok(())
}

/// The known facts of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Its future was dropped before it was posted.
    Dropped,
    Posted,
}

fn message(number: u64, length: usize) -> Vec<u8> {
    let mut dice = Dice::new(number);
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((8..length).map(|_| dice.next() as u8));
    bytes
}

pub(crate) async fn run(stage: Stage, dice: Dice) -> Result<Vec<u8>> {
    let context = stage.open(1)?;
    let channel = stage.channel(1, &context)?;
    let listener = channel.listen(&Listener::builder("10.0.0.2:0")?)?;
    let address = listener.local_addr()?;
    let server = tokio::spawn(serve(stage.clone(), channel, listener));
    let end = talk(&stage, address, dice).await;
    server.abort();
    if let Err(error) = server.await {
        if error.is_panic() {
            std::panic::resume_unwind(error.into_panic());
        }
    }
    end
}

async fn talk(stage: &Stage, address: std::net::SocketAddr, mut dice: Dice) -> Result<Vec<u8>> {
    let context = stage.open(0)?;
    let channel = stage.channel(0, &context)?;
    let (qp, pool) = create(stage, &context)?;
    let ended = {
        // A REQ that is lost goes again after 4.6 s, so that three of them already take longer than the default.
        let connector = Connector::new(address)?.source("10.0.0.1:0".parse()?).timeout(PATIENCE);
        let connected = timeout(PATIENCE, channel.connect(&connector, |_| Ok(qp.clone())));
        match connected.await? {
            Ok((_, connection)) => {
                let ended = rounds(stage, &qp, &pool, &mut dice).await;
                drop(connection);
                ended
            }
            Err(error) => Err(error.into()),
        }
    };
    drop(qp);
    // The error of a request has its buffer.
    let ended = ended.map_err(|error| error.to_string().into());
    assert_eq!(pool.idle(), pool.count(), "buffers are lost: {:?}", stage.fault);
    assert_eq!(context.leaked(), 0, "{:?}", stage.fault);
    ended
}

async fn rounds(
    stage: &Stage,
    qp: &AsyncQueuePair,
    pool: &BufferPool,
    dice: &mut Dice,
) -> Result<Vec<u8>> {
    let mut inbox = qp.inbox(pool, DEPTH);
    let (numbers, mut newest, mut record) = (Arc::new(AtomicU64::new(1)), 0, Vec::new());
    for _ in 0..ROUNDS {
        let fates = Arc::new(Mutex::new(Vec::new()));
        let mut senders = Vec::new();
        for _ in 0..1 + dice.below(DEPTH as u64 - 1) {
            let length = 8 + dice.below(BYTES as u64 - 8) as usize;
            let sender = Sender {
                qp: qp.clone(),
                pool: pool.clone(),
                numbers: numbers.clone(),
                fates: fates.clone(),
            };
            let sender = sender.send(length, dice.fork());
            senders.push(tokio::spawn(sender));
        }
        let mut ended = Ok(());
        for sender in senders {
            match sender.await {
                Ok(sent) => ended = ended.and(sent),
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
        ended?;
        let fates = fates.lock().map_err(|_| "a sender panicked")?.clone();
        let mut posted: Vec<_> =
            fates.iter().filter(|(_, fate)| *fate == Fate::Posted).map(|(at, _)| *at).collect();
        while !posted.is_empty() {
            if dice.happens(20) {
                // A dropped future of a receive loses no message.
                let mut next = Box::pin(inbox.next());
                let received = timeout(PATIENCE, polls(&mut next, GivingUp::choose(dice))).await;
                let Some(received) = received.map_err(|_| "no answer")? else { continue };
                take(received?.memory.to_vec(), &mut newest, &mut posted, &mut record);
                continue;
            }
            let received = timeout(PATIENCE, inbox.next()).await;
            let received = received.map_err(|_| "no answer")??;
            take(received.memory.to_vec(), &mut newest, &mut posted, &mut record);
        }
    }
    if stage.fault.is_harmless() {
        let silence = timeout(Duration::from_secs(5), inbox.next()).await;
        assert!(silence.is_err(), "an answer to no message: {silence:?}");
    }
    Ok(record)
}

/// Checks an answer: it belongs to a posted message, and comes after the answers before it.
fn take(answer: Vec<u8>, newest: &mut u64, posted: &mut Vec<u64>, record: &mut Vec<u8>) {
    let number = u64::from_le_bytes(*answer.first_chunk().expect("a whole number"));
    assert_eq!(answer, message(number, answer.len()), "the answer to {number}");
    assert!(number > *newest, "the answer to {number} behind that to {newest}");
    let at = posted.iter().position(|other| *other == number);
    posted.remove(at.unwrap_or_else(|| panic!("an answer to {number}, which was not posted")));
    *newest = number;
    record.extend(answer);
}

struct Sender {
    qp: AsyncQueuePair,
    pool: BufferPool,
    /// The number of the next message. Messages are numbered in the order in which they are first polled.
    numbers: Arc<AtomicU64>,
    fates: Arc<Mutex<Vec<(u64, Fate)>>>,
}

impl Sender {
    async fn send(self, length: usize, mut dice: Dice) -> Result<()> {
        for _ in 0..dice.pick(&[0, 4, 16, 64]) * dice.below(2) {
            yield_now().await;
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let bytes = message(number, length);
        let mut op = self.qp.send(self.pool.copy(&bytes)?);
        let note = |fate| self.fates.lock().expect("no panic").push((number, fate));
        let late = "a send does not end";
        let sent = match dice.below(5) {
            // The future is dropped after some polls.
            0 | 1 => match timeout(PATIENCE, polls(&mut op, GivingUp::choose(&mut dice))).await? {
                Some(sent) => sent,
                None => {
                    note(if op.is_posted() { Fate::Posted } else { Fate::Dropped });
                    return Ok(());
                }
            },
            // The future begins in one task, and ends in another.
            2 => match within(Duration::ZERO, op).await {
                Ok(sent) => sent,
                Err(op) => match tokio::spawn(within(PATIENCE, op)).await {
                    Ok(sent) => sent.map_err(|_| late)?,
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
            },
            _ => within(PATIENCE, op).await.map_err(|_| late)?,
        };
        let mut buffer = sent?.memory;
        assert_eq!(&buffer[..], &bytes[..], "a buffer that came back");
        // The device no longer reads the buffer.
        buffer.fill(0xee);
        note(Fate::Posted);
        Ok(())
    }
}
