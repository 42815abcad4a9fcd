//! An echo server and its client. Both run in this process; the second half of each could be on
//! another machine, with the server's address in place of the local one.

use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use uverbs::aio::tokio::{connect, handshake};
use uverbs::aio::{CompletionQueue, QueuePair};
use uverbs::owned::BufferPool;
use uverbs::{Context, Handshake, QpType, devices};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn open() -> Outcome<(QueuePair, BufferPool, u32)> {
    let device = devices()?.into_iter().find(|d| d.is_supported()).ok_or("no RDMA device")?;
    let context = Context::open(&device)?;
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(4096).build()?;
    let (cq, _driver) = CompletionQueue::spawn(&context, 64)?;
    let qp = cq.create_qp(&pd, QpType::RC, |qp| qp.max_send_wr(8).max_recv_wr(8))?;
    Ok((qp, pool, context.default_gid(1)?.index))
}

async fn serve(listener: TcpListener) {
    loop {
        // Too many clients at once end nothing: some of them will leave.
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        // A silent client, or one that talks nonsense, keeps no other waiting.
        tokio::spawn(async move {
            if let Err(error) = echo(stream).await {
                eprintln!("a client: {error}");
            }
        });
    }
}

async fn echo(stream: TcpStream) -> Outcome<()> {
    let (qp, pool, gid) = open()?;
    handshake(&qp, &stream, 1, gid, &Handshake::new()).await?;
    let connection = qp.clone();
    // The client keeps the stream for as long as it asks.
    tokio::spawn(async move { (stream.peek(&mut [0]).await, connection.abort()) });
    let mut inbox = qp.inbox(&pool, 8);
    while let Ok(message) = inbox.next().await {
        qp.send(message.buffer).await?;
    }
    Ok(())
}

async fn talk() -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(serve(listener));

    let (qp, pool, gid) = open()?;
    let _peer = connect(&qp, address, 1, gid).await?;
    let mut inbox = qp.inbox(&pool, 8);
    for text in ["hello, peer", "no unsafe, no copies"] {
        let buffer = pool.copy(text.as_bytes()).ok_or("no buffer is left")?;
        qp.send(buffer).await?;
        let answer = inbox.next().await?;
        println!("{}", String::from_utf8_lossy(&answer.buffer));
    }
    Ok(())
}

fn main() -> Outcome<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(talk())
}
