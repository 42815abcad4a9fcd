//! A table of values that clients read without its owner's doing: by one-sided reads. The owner changes a value while a
//! client reads it; the client notices, because the versions before and after the value differ. `key_value [READS]`

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use uverbs::aio::AsyncQueuePair;
use uverbs::aio::tokio::{accept, connect};
use uverbs::owned::Buffer;
use uverbs::{Access, Context, GidEntry, MemoryRegion, ProtectionDomain, QpType, Remote, Rkey};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Entries of the table. Each is a version, a value of [`WORDS`] words that repeats its key and version, and the
/// version again.
const ENTRIES: usize = 256;
const WORDS: usize = 14;
const ENTRY: usize = WORDS + 2;

fn open() -> Result<(Context, ProtectionDomain, AsyncQueuePair, GidEntry)> {
    let context = Context::open_first()?;
    let pd = context.alloc_pd()?;
    let (cq, _driver) = context.cq_builder(64).spawn()?;
    let qp = cq.adopt(pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).build()?)?;
    let gid = context.default_gid(1)?;
    Ok((context, pd, qp, gid))
}

/// Writes an entry so that a peer that reads it meanwhile sees two different versions: the last word first, and the
/// first word last.
fn put(table: &mut MemoryRegion<u64>, key: usize, version: u64) -> Result<()> {
    let start = key * ENTRY;
    table.write_at(start + ENTRY - 1, version)?;
    for word in 1..=WORDS {
        table.write_at(start + word, version << 32 | key as u64)?;
    }
    Ok(table.write_at(start, version)?)
}

async fn serve(listener: TcpListener) -> Result<()> {
    let (_context, pd, qp, gid) = open()?;
    let readable = pd.mr_builder().access(Access::LOCAL_WRITE | Access::REMOTE_READ);
    let mut table = readable.allocate::<u64>(ENTRIES * ENTRY)?;
    for key in 0..ENTRIES {
        put(&mut table, key, 1)?;
    }
    let mut stream = accept(&qp, &listener, &gid).await?;
    let Remote { addr, rkey } = table.remote(0)?;
    stream.write_u64(addr).await?;
    stream.write_u32(rkey.0).await?;
    // From here on this side gets no request; it changes values until the client leaves.
    let mut version = 2;
    while stream.try_read(&mut [0]).is_err() {
        for key in 0..ENTRIES {
            put(&mut table, key, version)?;
        }
        version += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

async fn learn(stream: &mut TcpStream) -> Result<Remote> {
    Ok(Remote { addr: stream.read_u64().await?, rkey: Rkey(stream.read_u32().await?) })
}

/// Reads an entry until its two versions agree; returns the version, and the number of reads.
async fn get(
    qp: &AsyncQueuePair,
    table: Remote,
    key: usize,
    mut buffer: Buffer,
) -> Result<(u64, u32, Buffer)> {
    let entry = Remote { addr: table.addr + (key * ENTRY * 8) as u64, ..table };
    for tries in 1.. {
        buffer.set_len(ENTRY * 8);
        buffer = qp.read(entry, buffer).await?.memory;
        let word = |at: usize| buffer[at * 8..].first_chunk().map(|word| u64::from_ne_bytes(*word));
        let (first, last) = (word(0), word(ENTRY - 1));
        if first == last {
            let version = first.ok_or("an entry is longer")?;
            for at in 1..=WORDS {
                if word(at) != Some(version << 32 | key as u64) {
                    return Err(format!("entry {key} is torn: {:?}", &buffer[..]).into());
                }
            }
            return Ok((version, tries, buffer));
        }
    }
    Err("it changes all the time".into())
}

async fn run(reads: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let server = tokio::spawn(serve(listener));

    let (_context, pd, qp, gid) = open()?;
    let pool = Arc::new(pd.buffer_pool_builder(ENTRY * 8).count(8).build()?);
    let mut stream = connect(&qp, address, &gid).await?;
    let table = learn(&mut stream).await?;
    let started = Instant::now();
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let (qp, pool) = (qp.clone(), pool.clone());
            tokio::spawn(async move {
                let (mut newest, mut again) = (0, 0);
                let mut buffer = pool.take()?;
                for n in 0..reads / 8 {
                    let key = (n * 31 + task * 7) % ENTRIES;
                    let (version, tries, back) = get(&qp, table, key, buffer).await?;
                    (newest, again, buffer) = (newest.max(version), again + tries - 1, back);
                }
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>((newest, again))
            })
        })
        .collect();
    let (mut newest, mut again) = (0, 0);
    for task in tasks {
        let (version, tries) = task.await??;
        (newest, again) = (newest.max(version), again + tries);
    }
    let rate = reads as f64 / started.elapsed().as_secs_f64();
    println!(
        "{reads} values read, {rate:.0} a second; {again} read again, newest version {newest}"
    );
    drop(stream);
    server.await?
}

fn main() -> ExitCode {
    let reads = match std::env::args().nth(1).map(|reads| reads.parse()) {
        None => 2000,
        Some(Ok(reads)) => reads,
        Some(Err(_)) => {
            eprintln!("usage: key_value [READS]");
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(reads)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("key_value: {error}");
            ExitCode::FAILURE
        }
    }
}
