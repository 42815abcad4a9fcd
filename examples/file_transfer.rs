//! Copies a file to another machine. Several pieces are under way at once. A piece is written into
//! a buffer of the receiver, and its immediate data is its number.
//!
//! ```text
//! file_transfer receive FILE ADDRESS:PORT      on one machine
//! file_transfer send FILE HOST:PORT            on the other
//! file_transfer copy FROM TO                   both sides in one process
//! ```

use std::collections::VecDeque;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use uverbs::aio::AsyncQueuePair;
use uverbs::aio::tokio::{accept, connect};
use uverbs::{Context, GidEntry, ProtectionDomain, QpType, SendWr};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Bytes of a piece.
const PIECE: usize = 64 * 1024;
/// Pieces under way.
const AHEAD: usize = 16;

fn open() -> Result<(ProtectionDomain, AsyncQueuePair, GidEntry)> {
    let context = Context::open_first()?;
    let pd = context.alloc_pd()?;
    let (cq, _driver) = context.cq_builder(256).spawn()?;
    let depth = AHEAD as u32;
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(depth).max_recv_wr(depth).build()?;
    Ok((pd, cq.adopt(qp)?, context.default_gid(1)?))
}

/// A line with the progress.
struct Progress {
    total: u64,
    started: Instant,
    shown: Instant,
}

impl Progress {
    fn new(total: u64) -> Progress {
        let now = Instant::now();
        Progress { total, started: now, shown: now }
    }

    fn show(&mut self, done: u64) {
        let finished = done == self.total;
        if !finished && (self.shown.elapsed().as_millis() < 100 || !std::io::stderr().is_terminal())
        {
            return;
        }
        self.shown = Instant::now();
        let part = if self.total == 0 { 1.0 } else { done as f64 / self.total as f64 };
        let rate = done as f64 / self.started.elapsed().as_secs_f64() / 1e6;
        let bar = "#".repeat((part * 40.0) as usize);
        let end = if finished { "\n" } else { "" };
        eprint!(
            "\r[{bar:<40}] {:3.0} % of {} bytes, {rate:.1} MB/s{end}",
            part * 100.0,
            self.total
        );
        let _ = std::io::stderr().flush();
    }
}

/// Ends when the other side is gone, or a while after it reported that it has finished. The byte of
/// that report stays to be read.
async fn gone(stream: &TcpStream) -> Result<()> {
    match stream.peek(&mut [0]).await {
        Ok(1) => {
            tokio::time::sleep(Duration::from_secs(10)).await;
            Err("the other side has finished, and this one has not".into())
        }
        _ => Err("the other side is gone".into()),
    }
}

/// Sends each piece as a message; the receiver's posted buffers limit the pieces under way.
async fn send(path: &str, address: &str) -> Result<()> {
    let (pd, qp, gid) = open()?;
    let file = File::open(path).map_err(|error| format!("{path}: {error}"))?;
    let total = file.metadata()?.len();
    let pool = pd.buffer_pool_builder(PIECE).count(AHEAD).build()?;
    let stream = connect(&qp, address, &gid).await;
    let mut stream = stream.map_err(|error| format!("{address}: {error}"))?;
    stream.write_u64(total).await?;
    let (mut progress, mut read, mut sent) = (Progress::new(total), 0, 0);
    let mut under_way = VecDeque::new();
    while sent < total {
        while let (true, Ok(mut buffer)) = (read < total, pool.take()) {
            let length = file.read_at(&mut buffer[..PIECE], read)?;
            if length == 0 {
                return Err("the file became shorter".into());
            }
            buffer.set_len(length);
            let piece = (read / PIECE as u64) as u32;
            read += length as u64;
            // Spawned, so that all pieces are posted, in this order.
            let op = qp.post(SendWr::send_imm(&[], piece), buffer);
            under_way.push_back(tokio::spawn(op));
        }
        let piece = under_way.pop_front().ok_or("nothing is under way")?;
        let piece = tokio::select! {
            piece = piece => piece??,
            gone = gone(&stream) => return gone,
        };
        sent += piece.memory.len() as u64;
        progress.show(sent);
    }
    // The receiver reports when it has written everything.
    stream.read_u8().await?;
    Ok(())
}

async fn receive(path: &str, listener: TcpListener) -> Result<()> {
    let (pd, qp, gid) = open()?;
    let pool = pd.buffer_pool_builder(PIECE).count(AHEAD).build()?;
    let mut stream = accept(&qp, &listener, &gid).await?;
    let total = stream.read_u64().await?;
    // An existing file is not overwritten.
    let file = File::create_new(path).map_err(|error| format!("{path}: {error}"))?;
    let mut inbox = qp.inbox(&pool, AHEAD);
    let (mut progress, mut written) = (Progress::new(total), 0);
    while written < total {
        let message = tokio::select! {
            message = inbox.next() => message?,
            gone = gone(&stream) => return gone,
        };
        let piece = message.outcome.imm().ok_or("a piece without a number")?;
        if u64::from(piece) != written / PIECE as u64 {
            return Err(format!("piece {piece} comes out of turn").into());
        }
        file.write_all_at(&message.memory, written)?;
        written += message.memory.len() as u64;
        progress.show(written);
    }
    stream.write_u8(b'D').await?;
    // The peer closes first: until then its last requests may wait for an acknowledgement.
    let _ = stream.read_u8().await;
    Ok(())
}

async fn run(arguments: &[&str]) -> Result<()> {
    match arguments {
        ["send", path, address] => send(path, address).await,
        ["receive", path, address] => {
            let listener = TcpListener::bind(address).await;
            receive(path, listener.map_err(|error| format!("{address}: {error}"))?).await
        }
        ["copy", from, to] => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let address = listener.local_addr()?.to_string();
            tokio::try_join!(receive(to, listener), send(from, &address)).map(drop)
        }
        _ => Err("usage: file_transfer send FILE HOST:PORT | receive FILE ADDRESS:PORT | \
                  copy FROM TO"
            .into()),
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
            eprintln!("file_transfer: {error}");
            ExitCode::FAILURE
        }
    }
}
