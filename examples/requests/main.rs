//! Requests and replies over one connection, and how many a second: see `channel`. Receivers that
//! are not ready would break it at once (`rnr_retry` is 0). `requests [COUNT [TASKS]]`

mod channel;

use channel::{BULK, Channel, DEPTH, Outcome};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use uverbs::aio::CompletionQueue;
use uverbs::aio::tokio::handshake;
use uverbs::owned::Buffer;
use uverbs::{Context, Handshake, QpType, devices};

/// Makes one side, and connects it.
async fn open(stream: &TcpStream) -> Outcome<Channel> {
    let device = devices()?.into_iter().find(|device| device.is_supported());
    let context = Context::open(&device.ok_or("there is no RDMA device with a provider")?)?;
    let pd = context.alloc_pd()?;
    let (cq, _driver) = CompletionQueue::spawn(&context, 16 * DEPTH as u32)?;
    let qp = cq.create_qp(&pd, QpType::RC, |qp| {
        qp.max_send_wr(2 * DEPTH as u32).max_recv_wr(DEPTH as u32).max_inline_data(128)
    })?;
    let gid = context.default_gid(1)?.index;
    let channel = Channel::new(&pd, qp.clone())?;
    // A frame that finds no receive fails: none does.
    let hasty = Handshake::new().rnr_retry(0).timeout(14).retry_count(3);
    handshake(&qp, stream, 1, gid, &hasty).await?;
    Ok(channel)
}

/// The service: the bytes, each one more.
async fn increment(_: Channel, mut body: Buffer) -> Outcome<Buffer> {
    body.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    Ok(body)
}

async fn ask(channel: &Channel, length: usize, seed: u8) -> Outcome<()> {
    let mut body = channel.buffer(length).await;
    body.fill(seed);
    let reply = channel.call(body).await?;
    match reply.len() == length && reply.iter().all(|byte| *byte == seed.wrapping_add(1)) {
        true => Ok(()),
        false => Err(format!("{length} bytes came back as {} others", reply.len()).into()),
    }
}

async fn run(count: usize, tasks: usize) -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (ready, wait) = tokio::sync::oneshot::channel();
    let (stay, leave) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await?;
        let channel = open(&stream).await?;
        let served = tokio::spawn(channel.run(increment));
        tokio::task::yield_now().await;
        let _ = ready.send(());
        let _ = leave.await;
        served.abort();
        let _ = served.await;
        Outcome::Ok(())
    });
    let stream = TcpStream::connect(address).await?;
    let channel = open(&stream).await?;
    tokio::spawn(channel.clone().run(increment));
    // The other side's receives are posted.
    wait.await?;
    tokio::task::yield_now().await;
    for length in [0, 100, 1000, 1 << 12, BULK] {
        let count = count.min((count << 16) / (length + 1)).max(tasks);
        let started = Instant::now();
        let tasks: Vec<_> = (0..tasks)
            .map(|task| {
                let channel = channel.clone();
                tokio::spawn(async move {
                    for n in 0..count / tasks {
                        ask(&channel, length, (task * 31 + n) as u8).await?;
                    }
                    Outcome::Ok(())
                })
            })
            .collect();
        let asked = count / tasks.len() * tasks.len();
        for task in tasks {
            task.await??;
        }
        let rate = asked as f64 / started.elapsed().as_secs_f64();
        println!("{asked} requests of {length} bytes: {rate:.0} a second");
    }
    // The other side leaves without a word, and nobody waits for its reply.
    drop(stay);
    server.await??;
    match tokio::time::timeout(Duration::from_secs(30), ask(&channel, 100, 1)).await {
        Ok(Err(error)) => println!("the other side left: {error}"),
        Ok(Ok(())) => return Err("a reply of a side that is gone".into()),
        Err(_) => return Err("a request waits for a side that is gone".into()),
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse());
    let count = arguments.next().unwrap_or(Ok(500))?;
    let tasks = arguments.next().unwrap_or(Ok(4))?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(count, tasks))
}
