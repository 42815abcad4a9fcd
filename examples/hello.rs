//! A message there and back between two devices of this process: the program of the README.

use uverbs::aio::AsyncQueuePair;
use uverbs::device::{Device, devices_on};
use uverbs::owned::BufferPool;
use uverbs::sim::{Fabric, Mode};
use uverbs::{Context, Endpoint, Handshake, QpType};

/// Opens the device: a queue pair, buffers for its messages, and how a peer reaches it.
fn open(device: &Device) -> uverbs::Result<(AsyncQueuePair, BufferPool, Endpoint)> {
    let context = Context::open(device)?;
    let pd = context.alloc_pd()?;
    let pool = pd.buffer_pool_builder(4096).build()?;
    let (cq, _driver) = context.cq_builder(16).spawn()?;
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(4).build()?;
    let endpoint = qp.endpoint(&context.default_gid(1)?)?;
    Ok((cq.adopt(qp)?, pool, endpoint))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two emulated ConnectX-5s; `uverbs::devices()` lists those of the machine.
    let fabric = Fabric::new(2, Mode::Trapped);
    let devices = devices_on(&fabric.system());
    let (client, client_pool, here) = open(&devices[0])?;
    let (server, server_pool, there) = open(&devices[1])?;
    client.handshake(&there, &Handshake::new())?;
    server.handshake(&here, &Handshake::new())?;

    // The buffers of an inbox are posted as receives.
    let mut requests = server.inbox(&server_pool, 4);
    let mut answers = client.inbox(&client_pool, 4);
    client.send_inline(b"hello, peer").await?;
    let request = requests.next().await?;
    server.send(request.memory).await?; // The queue has the buffer until the device is done with it.
    println!("{}", String::from_utf8_lossy(&answers.next().await?.memory));
    Ok(())
}
