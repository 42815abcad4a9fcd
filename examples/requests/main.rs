//! Requests and replies over one connection, see `channel`: requests a second, and for large bodies bytes a second. A
//! receiver that is not ready would break the connection at once (`rnr_retry` is 0); the device's count of such
//! receivers is printed, too.
//!
//! ```text
//! requests [COUNT [TASKS]]                     both sides in this process
//! requests serve ADDRESS:PORT                  one side, for any number of others
//! requests ask HOST:PORT [COUNT [TASKS]]       the other
//! ```
//!
//! In the lab (soft-RoCE on Linux 7.3, emulated on two busy processors, 22 November 2026, as the README
//! says how to run it), `requests 500 4`: 661 round trips a second of 100 bytes, 342 of 4096 bytes, 45 of
//! 262144 bytes, which are 11.7 MB/s each way; receivers not ready: 0.

mod channel;

use channel::{BULK, Channel, DEPTH, Result};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use uverbs::aio::Inbox;
use uverbs::aio::tokio::{HANDSHAKE_TIMEOUT, handshake};
use uverbs::owned::Buffer;
use uverbs::{Context, Device, Handshake, QpType};

/// The number of times that requests are dropped early, each time a little later.
const ROUNDS: usize = 40;

/// Makes one side, and connects it.
async fn open(stream: &mut TcpStream) -> Result<(Channel, Inbox)> {
    let context = Context::open_first()?;
    let pd = context.alloc_pd()?;
    let (cq, _driver) = context.cq_builder(16 * DEPTH as u32).spawn()?;
    let builder = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(2 * DEPTH as u32);
    let qp = cq.adopt(builder.max_recv_wr(DEPTH as u32).max_inline_data(128).build()?)?;
    let gid = context.default_gid(1)?;
    let channel = Channel::new(&pd, qp.clone())?;
    // With `rnr_retry` 0 a frame that finds no receive fails; the credits prevent that.
    let hasty = Handshake::new().rnr_retry(0).timeout(14).retry_count(3);
    handshake(&qp, stream, &gid, &hasty, HANDSHAKE_TIMEOUT).await?;
    // Neither side sends before both have posted their receives.
    let inbox = channel.receive().await?;
    stream.write_u8(b'P').await?;
    stream.read_u8().await?;
    Ok((channel, inbox))
}

/// Works until the other side leaves: the connection or the stream ends.
async fn attend(channel: Channel, inbox: Inbox, mut stream: TcpStream) -> Result<()> {
    tokio::select! {
        ended = channel.run(inbox, increment) => ended,
        _ = stream.read_u8() => Ok(()),
    }
}

/// The service: it adds one to each byte.
async fn increment(_: Channel, mut body: Buffer) -> Result<Buffer> {
    body.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    Ok(body)
}

async fn ask(channel: &Channel, length: usize, seed: u8) -> Result<()> {
    let mut body = channel.buffer(length).await;
    body.fill(seed);
    let reply = channel.call(body).await?;
    match reply.len() == length && reply.iter().all(|byte| *byte == seed.wrapping_add(1)) {
        true => Ok(()),
        false => Err(format!("{length} bytes came back as {} others", reply.len()).into()),
    }
}

/// Asks again and again, and drops the futures before the replies are there. A request's
/// place, credit and buffer must not be lost with the future.
async fn leave_early(channel: &Channel) -> Result<()> {
    for round in 0..ROUNDS {
        let asking: Vec<_> = (0..2 * DEPTH)
            .map(|task| {
                let channel = channel.clone();
                // Calls that find no credit any more have offered their bodies already.
                let length = if task % DEPTH < DEPTH - 2 { 900 } else { BULK };
                tokio::spawn(async move { ask(&channel, length, task as u8).await })
            })
            .collect();
        for _ in 0..round {
            tokio::task::yield_now().await;
        }
        for task in &asking {
            task.abort();
        }
        for task in asking {
            match task.await {
                Ok(asked) => asked?,
                Err(gone) if gone.is_cancelled() => {}
                Err(panicked) => return Err(panicked.into()),
            }
        }
    }
    for length in [900, BULK] {
        let asked = tokio::time::timeout(Duration::from_secs(30), ask(channel, length, 1)).await;
        asked.map_err(|_| "dropped requests kept their credits and buffers")??;
    }
    println!("{} requests, left early: the channel is as it was", ROUNDS * 2 * DEPTH);
    Ok(())
}

/// Receivers that were not ready, as the device counted them; `None` if it does not count.
fn unready(device: &Device) -> Option<u64> {
    let counters = format!("/sys/class/infiniband/{}/ports/1/hw_counters", device.name());
    let mut all = None;
    for counter in std::fs::read_dir(counters).ok()?.flatten() {
        if counter.file_name().to_string_lossy().contains("rnr") {
            let count = std::fs::read_to_string(counter.path()).ok()?.trim().parse::<u64>().ok()?;
            *all.get_or_insert(0) += count;
        }
    }
    all
}

/// Sends requests for a while, in `tasks` tasks, and prints their rate.
async fn measure(channel: &Channel, count: usize, tasks: usize) -> Result<()> {
    let device = channel.device();
    let before = unready(&device);
    for length in [0, 100, 1000, 1 << 12, 1 << 16, BULK] {
        let count = count.min((count << 16) / (length + 1)).max(tasks);
        let started = Instant::now();
        let asking: Vec<_> = (0..tasks)
            .map(|task| {
                let channel = channel.clone();
                tokio::spawn(async move {
                    for n in 0..count / tasks {
                        ask(&channel, length, (task * 31 + n) as u8).await?;
                    }
                    Result::Ok(())
                })
            })
            .collect();
        for task in asking {
            task.await??;
        }
        let asked = count / tasks * tasks;
        let rate = asked as f64 / started.elapsed().as_secs_f64();
        print!("{asked} requests of {length} bytes: {rate:.0} round trips a second");
        match length {
            0 => println!(),
            _ => println!(", {:.2} MB/s each way", rate * length as f64 / 1e6),
        }
    }
    match (before, unready(&device)) {
        (Some(before), Some(after)) => println!("receivers not ready: {}", after - before),
        _ => println!("receivers not ready: none, and {} counts none", device.name()),
    }
    Ok(())
}

async fn serve(listener: TcpListener) -> Result<()> {
    loop {
        let (mut stream, peer) = listener.accept().await?;
        tokio::spawn(async move {
            let served = async {
                let (channel, inbox) = open(&mut stream).await?;
                attend(channel, inbox, stream).await
            };
            match served.await {
                Ok(()) => eprintln!("{peer} has left"),
                Err(error) => eprintln!("{peer}: {error}"),
            }
        });
    }
}

async fn ask_at(mut stream: TcpStream, count: usize, tasks: usize) -> Result<()> {
    let (channel, inbox) = open(&mut stream).await?;
    tokio::select! {
        measured = measure(&channel, count, tasks) => measured,
        ended = attend(channel.clone(), inbox, stream) => Err(match ended {
            Ok(()) => "the other side left".into(),
            Err(error) => error,
        }),
    }
}

/// Both sides; one leaves in the end.
async fn both(count: usize, tasks: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (stay, leave) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        let (channel, inbox) = open(&mut stream).await?;
        tokio::select! {
            ended = attend(channel, inbox, stream) => ended,
            _ = leave => Ok(()),
        }
    });
    let mut stream = TcpStream::connect(address).await?;
    let (channel, inbox) = open(&mut stream).await?;
    // Without the stream: the end of the connection is enough.
    let attending = tokio::spawn(channel.clone().run(inbox, increment));
    measure(&channel, count, tasks).await?;
    leave_early(&channel).await?;
    // The other side leaves without notice, and no request waits for its reply.
    drop(stay);
    server.await??;
    match tokio::time::timeout(Duration::from_secs(30), ask(&channel, 100, 1)).await {
        Ok(Err(error)) => println!("the other side left: {error}"),
        Ok(Ok(())) => return Err("a reply of a side that is gone".into()),
        Err(_) => return Err("a request waits for a side that is gone".into()),
    }
    attending.abort();
    Ok(())
}

async fn run(arguments: &[&str]) -> Result<()> {
    const USAGE: &str =
        "usage: requests [COUNT [TASKS]] | serve ADDRESS:PORT | ask HOST:PORT [COUNT [TASKS]]";
    let number = |at: usize, default: usize| match arguments.get(at).map(|text| text.parse()) {
        None => Ok(default),
        Some(Ok(number)) if number > 0 => Ok(number),
        _ => Err(USAGE),
    };
    match arguments {
        ["serve", address] => {
            let listener = TcpListener::bind(address).await;
            serve(listener.map_err(|error| format!("{address}: {error}"))?).await
        }
        ["ask", address] | ["ask", address, _] | ["ask", address, _, _] => {
            let (count, tasks) = (number(2, 500)?, number(3, 4)?);
            let stream = TcpStream::connect(address).await;
            ask_at(stream.map_err(|error| format!("{address}: {error}"))?, count, tasks).await
        }
        [] | [_] | [_, _] => both(number(0, 500)?, number(1, 4)?).await,
        _ => Err(USAGE.into()),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(&arguments)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("requests: {error}");
            ExitCode::FAILURE
        }
    }
}
