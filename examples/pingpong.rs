//! Latency of futures: one message there and one back, again and again, waiting for events. The benchmark
//! `cargo ci bench rxe-futures` compares it with `ibv_rc_pingpong -e`, so that it has the same options:
//! `pingpong [-d DEVICE] [-p PORT] [-g GID] [-s BYTES] [-n ITERATIONS] [-e] [--blocking] [HOST]`; with `--both` in
//! place of HOST one process plays both sides. With `--blocking` the thread sleeps in the read of the next event, and
//! not in the event loop.

use std::io::{Read, Write};
use std::process::ExitCode;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use uverbs::aio::tokio::{HANDSHAKE_TIMEOUT, Registered, handshake};
use uverbs::aio::{AsyncQueuePair, Blocking, Readiness};
use uverbs::{Device, Handshake, QpType};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Clone)]
struct Arguments {
    device: Option<String>,
    host: Option<String>,
    both: bool,
    blocking: bool,
    port: u16,
    gid: Option<u32>,
    size: usize,
    iterations: u64,
}

fn arguments() -> Result<Arguments> {
    let mut all = Arguments {
        device: None,
        host: None,
        both: false,
        blocking: false,
        port: 18515,
        gid: None,
        size: 4096,
        iterations: 1000,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} wants a value"));
        let wrong = |_| format!("{word} wants a number");
        match word.as_str() {
            "-d" => all.device = Some(value()?),
            "-p" => all.port = value()?.parse().map_err(wrong)?,
            "-g" => all.gid = Some(value()?.parse().map_err(wrong)?),
            "-s" => all.size = value()?.parse().map_err(wrong)?,
            "-n" => all.iterations = value()?.parse().map_err(wrong)?,
            // Accepted and ignored: both ends use the port's MTU, and always wait for events.
            "-m" => drop(value()?),
            "-e" => {}
            "--blocking" => all.blocking = true,
            "--both" => all.both = true,
            _ if word.starts_with('-') => return Err(format!("{word} is unknown").into()),
            _ => all.host = Some(word),
        }
    }
    if all.both && all.blocking {
        return Err("--both wants an event loop, which runs both sides".into());
    }
    if all.iterations == 0 {
        return Err("-n wants a number above 0".into());
    }
    Ok(all)
}

/// Waits for the byte by which the other side reports that it has finished. If the other side leaves without it, or
/// finishes long before this side, no posted request waits any longer.
///
/// It runs on a thread of its own: with `--blocking` that of the messages sleeps, and else it does not slow them down.
fn hear(mut stream: std::net::TcpStream, qp: &AsyncQueuePair) -> Result<()> {
    let mut byte = [0];
    match stream.read_exact(&mut byte) {
        Ok(()) if byte == *b"E" => {
            // The other side waits for this one now, which aborts if it has not finished after a while. Not by a timer
            // of the event loop, which would slow each message down.
            let qp = qp.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_secs(10));
                let _ = qp.abort();
            });
            Ok(())
        }
        _ => {
            // If the device is gone, too, all requests have ended already.
            let _ = qp.abort();
            Err("the other side is gone".into())
        }
    }
}

/// The connection to the other side, which ends with this side, so that [`hear`] does.
struct Hangup(std::net::TcpStream);

impl Drop for Hangup {
    fn drop(&mut self) {
        // The other side may have ended it.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// Where the driver sleeps.
enum Sleep {
    EventLoop(Registered),
    Read(Blocking),
}

impl Readiness for Sleep {
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        read: &mut dyn FnMut() -> uverbs::Result<()>,
    ) -> Poll<uverbs::Result<()>> {
        match self {
            Sleep::EventLoop(file) => file.poll_read(cx, read),
            Sleep::Read(file) => file.poll_read(cx, read),
        }
    }
}

/// Plays both sides, as tasks.
async fn run_both(arguments: Arguments) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let (host, port) = (Some("127.0.0.1".into()), listener.local_addr()?.port());
    let client = Arguments { host, port, ..arguments.clone() };
    let server = tokio::spawn(run(arguments, Some(listener)));
    tokio::spawn(run(client, None)).await??;
    server.await?
}

/// Plays one side. Without a `listener` the server makes its own.
async fn run(arguments: Arguments, listener: Option<TcpListener>) -> Result<()> {
    let Arguments { device, host, blocking, port, gid, size, iterations, .. } = arguments;
    let context = match device {
        Some(name) => uverbs::Context::open(&Device::by_name(&name)?)?,
        None => uverbs::Context::open_first()?,
    };
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(size.max(1)).count(8).build()?;
    // Polled by the task that waits for it, and not spawned: one task to be scheduled in place of two.
    let (cq, driver) = context.cq_builder(64).build_async(|file| {
        Ok(match blocking {
            true => Sleep::Read(Blocking::new(file)?),
            false => Sleep::EventLoop(Registered::new(file)?),
        })
    })?;
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(4).build()?;
    let qp = cq.adopt(qp)?;
    let gid = match gid {
        Some(index) => context.query_gid(1, index)?,
        None => context.default_gid(1)?,
    };
    let client = host.is_some();
    let mut stream = match (host, listener) {
        (Some(host), _) => {
            let stream = TcpStream::connect((&host[..], port)).await;
            stream.map_err(|error| format!("{host}: {error}"))?
        }
        (None, Some(listener)) => listener.accept().await?.0,
        (None, None) => TcpListener::bind(("0.0.0.0", port)).await?.accept().await?.0,
    };
    handshake(&qp, &stream, &gid, &Handshake::new(), HANDSHAKE_TIMEOUT).await?;
    let mut inbox = qp.inbox(&pool, 4);
    let posted = inbox.fill();
    stream.write_u8(posted as u8).await?;
    stream.read_u8().await?;

    let mut buffer = pool.take()?;
    buffer.set_len(size);
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    let (reader, hearer) = (stream.try_clone()?, qp.clone());
    let mut stream = Hangup(stream);
    let heard = tokio::task::spawn_blocking(move || hear(reader, &hearer));
    let started = Instant::now();
    let play = async {
        if !client {
            inbox.next().await?;
        }
        for round in 0..iterations {
            let last = !client && round + 1 == iterations;
            let send = qp.send(buffer);
            buffer = match last {
                true => send.await?.memory,
                // The answer may arrive before the acknowledgement.
                false => {
                    let (sent, answer) = tokio::join!(send, inbox.next());
                    if answer?.memory.len() != size {
                        return Err("a message of another length".into());
                    }
                    sent?.memory
                }
            };
        }
        Result::Ok(())
    };
    let played = match blocking {
        // The driver sleeps, so that the messages come first.
        true => tokio::select! {
            biased;
            played = play => played,
            ended = driver => ended.map_err(Into::into),
        },
        false => tokio::select! {
            biased;
            ended = driver => ended.map_err(Into::into),
            played = play => played,
        },
    };
    if let Err(error) = played {
        // The other task may have the reason: the peer left.
        return if heard.is_finished() { heard.await?.and(Err(error)) } else { Err(error) };
    }
    let elapsed = started.elapsed();
    let each = elapsed.as_secs_f64() * 1e6 / iterations as f64;
    println!(
        "{iterations} iterations in {:.3} s: {each:.2} µs per iteration",
        elapsed.as_secs_f64()
    );
    // A peer that is gone acknowledges nothing.
    stream.0.write_all(b"E")?;
    heard.await?
}

fn main() -> ExitCode {
    let ended = arguments().and_then(|arguments| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // In a task: the wake-up of a future in `block_on` takes a detour through the kernel.
        runtime.block_on(async {
            match arguments.both {
                true => run_both(arguments).await,
                false => tokio::spawn(run(arguments, None)).await?,
            }
        })
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}
