//! An echo server and its client. Both run in this process; the second half of each could be on
//! another machine, with the server's address in place of the local one.

use uverbs::aio::AsyncQueuePair;
use uverbs::aio::cm::{AsyncEventChannel, AsyncListener};
use uverbs::cm::{ConnectParam, ConnectRequest, Connector, Listener};
use uverbs::owned::BufferPool;
use uverbs::{Context, QpType};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn create(context: &Context) -> uverbs::Result<(AsyncQueuePair, BufferPool)> {
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(4096).build()?;
    let (cq, _driver) = context.cq_builder(64).spawn()?;
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(8).max_recv_wr(8).build()?;
    Ok((cq.adopt(qp)?, pool))
}

async fn serve(channel: AsyncEventChannel, listener: AsyncListener) -> Result<()> {
    loop {
        let (request, channel) = (listener.next_request().await?, channel.clone());
        // A task for each client, so that a silent client does not delay the others.
        tokio::spawn(async move {
            if let Err(error) = echo(channel, request).await {
                eprintln!("a client: {error}");
            }
        });
    }
}

async fn echo(channel: AsyncEventChannel, request: ConnectRequest) -> Result<()> {
    let (qp, pool) = create(&request.context()?)?;
    let (qp, connection) = channel.accept(request, &ConnectParam::new(), |_| Ok(qp)).await?;
    let mut inbox = qp.inbox(&pool, 8);
    // The connection is dropped when the client closes it, which ends the inbox.
    tokio::spawn(async move { connection.disconnected().await });
    while let Ok(message) = inbox.next().await {
        qp.send(message.memory).await?;
    }
    Ok(())
}

async fn talk() -> Result<()> {
    let context = Context::open_first()?;
    let (channel, _driver) = AsyncEventChannel::spawn()?;
    channel.use_context(&context)?;
    let listener = channel.listen(&Listener::builder((context.default_gid(1)?.gid.ip(), 0))?)?;
    let connector = Connector::new(listener.local_addr()?)?;
    tokio::spawn(serve(channel.clone(), listener));

    let (qp, pool) = create(&context)?;
    let (qp, _connection) = channel.connect(&connector, |_| Ok(qp.clone())).await?;
    let mut inbox = qp.inbox(&pool, 8);
    for text in ["hello, peer", "and no unsafe"] {
        let buffer = pool.copy(text.as_bytes())?;
        qp.send(buffer).await?;
        let answer = inbox.next().await?;
        println!("{}", String::from_utf8_lossy(&answer.memory));
    }
    Ok(())
}

fn main() -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(talk())
}
