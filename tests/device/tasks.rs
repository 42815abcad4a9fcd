//! Shared by tests of futures: a runtime, two connected halves, and the messages between them.

use crate::capability::Capability;
use crate::env;
use crate::pair::{PATIENCE, gid};
use crate::pattern;
use crate::verdict::{Stop, Verdict, supported};
use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use uverbs::aio::{AsyncCompletionQueue, AsyncQueuePair};
use uverbs::owned::BufferPool;
use uverbs::{Context, ProtectionDomain, QpType};

pub(crate) fn runtime(threads: usize) -> Verdict<Runtime> {
    let mut builder = match threads {
        0 => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    Ok(builder.worker_threads(threads.max(1)).enable_all().build()?)
}

/// Runs a test, which must end in time.
pub(crate) fn run(threads: usize, test: impl Future<Output = Verdict>) -> Verdict {
    run_for(2 * PATIENCE, threads, test)
}

/// As [`run`], for a test that may wait for the kernel for longer.
pub(crate) fn run_for(
    most: Duration,
    threads: usize,
    test: impl Future<Output = Verdict>,
) -> Verdict {
    runtime(threads)?.block_on(async {
        match tokio::time::timeout(most, test).await {
            Ok(verdict) => verdict,
            Err(_) => Err(Stop::fail("the test takes too long")),
        }
    })
}

/// One half of a pair.
pub(crate) struct Half {
    pub(crate) qp: AsyncQueuePair,
    pub(crate) cq: AsyncCompletionQueue,
    pub(crate) pool: BufferPool,
    pub(crate) pd: ProtectionDomain,
    pub(crate) context: Context,
}

pub(crate) const DEPTH: u32 = 16;
pub(crate) const BUFFERS: usize = 64;

impl Half {
    pub(crate) fn new() -> Verdict<Half> {
        let context = env::open()?;
        let (cq, _) = context.cq_builder(128).spawn()?;
        Half::on(context, cq)
    }

    pub(crate) fn on(context: Context, cq: AsyncCompletionQueue) -> Verdict<Half> {
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(1024).count(BUFFERS).build()?;
        let builder = pd.qp_builder(&cq, &cq, QpType::RC);
        let qp = builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).max_inline_data(64).build();
        let qp = cq.adopt(supported(qp, Capability::Rc)?)?;
        Ok(Half { qp, cq, pool, pd, context })
    }
}

pub(crate) fn connected(one: &Half, other: &Half) -> Verdict {
    let here = one.qp.endpoint(&gid(&one.context)?)?;
    let there = other.qp.endpoint(&gid(&other.context)?)?;
    // A busy emulated machine can delay an acknowledgement by more than half a second in all.
    let options = env::handshake_options().timeout(16);
    one.qp.handshake(&there, &options)?;
    Ok(other.qp.handshake(&here, &options)?)
}

pub(crate) fn pair() -> Verdict<(Half, Half)> {
    let (one, other) = (Half::new()?, Half::new()?);
    connected(&one, &other)?;
    Ok((one, other))
}

/// Sends each received message back, `count` times.
pub(crate) async fn echo_back(half: &Half, count: usize) -> Verdict {
    let mut inbox = half.qp.inbox(&half.pool, 8);
    for _ in 0..count {
        let message = inbox.next().await?;
        half.qp.send(message.memory).await?;
    }
    Ok(())
}

pub(crate) async fn ask(half: &Half, count: usize) -> Verdict {
    let mut inbox = half.qp.inbox(&half.pool, 8);
    for seed in 0..count as u64 {
        let text = pattern::bytes(seed, 1 + seed as usize * 7 % 1000);
        half.qp.send(half.pool.copy(&text).expect("a buffer")).await?;
        let answer = inbox.next().await?;
        assert_eq!(answer.memory.len(), text.len());
        pattern::check(&answer.memory, seed);
    }
    Ok(())
}

/// Polls both futures to their end.
pub(crate) async fn both(
    one: impl Future<Output = Verdict>,
    other: impl Future<Output = Verdict>,
) -> Verdict {
    let (mut one, mut other) = (pin!(one), pin!(other));
    let mut ends = (None, None);
    std::future::poll_fn(|cx| {
        if ends.0.is_none() {
            if let Poll::Ready(end) = one.as_mut().poll(cx) {
                ends.0 = Some(end);
            }
        }
        if ends.1.is_none() {
            if let Poll::Ready(end) = other.as_mut().poll(cx) {
                ends.1 = Some(end);
            }
        }
        match (&mut ends.0, &mut ends.1) {
            (Some(Ok(())), Some(Ok(()))) => Poll::Ready(Ok(())),
            (Some(failed @ Err(_)), _) | (_, Some(failed @ Err(_))) => {
                Poll::Ready(std::mem::replace(failed, Ok(())))
            }
            _ => Poll::Pending,
        }
    })
    .await
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}
