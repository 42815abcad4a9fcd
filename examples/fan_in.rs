//! Many clients, one shared receive queue: the number of the server's receives does not grow with
//! its clients. `fan_in [CLIENTS [MESSAGES]]`

use std::collections::HashMap;
use std::process::ExitCode;
use std::time::Instant;
use uverbs::aio::AsyncQueuePair;
use uverbs::{Context, Handshake, QpType};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Receives that are posted ahead, for all clients together.
const RECEIVES: u32 = 64;

fn open() -> Result<Context> {
    Ok(Context::open_first()?)
}

async fn client(qp: AsyncQueuePair, id: u32, messages: u32) -> Result<()> {
    for n in 0..messages {
        let text = [id.to_be_bytes(), n.to_be_bytes()].concat();
        qp.send_inline(&text).await?;
    }
    Ok(())
}

async fn run(clients: u32, messages: u32) -> Result<()> {
    let (here, there) = (open()?, open()?);
    let (pd, their_pd) = (here.alloc_pd()?, there.alloc_pd()?);
    // Both sides: a completion for each send that may be under way, and for each receive.
    let (cq, _driver) = here.cq_builder(4 * clients + 2 * RECEIVES).spawn()?;
    let (their_cq, _driver) = there.cq_builder(32 * clients).spawn()?;
    let srq = cq.adopt_srq(pd.srq_builder(RECEIVES).build()?)?;
    let pool = pd.buffer_pool_builder(64).count(RECEIVES as usize + 8).build()?;
    let mut inbox = srq.inbox(&pool, RECEIVES as usize);

    let (gid, their_gid) = (here.default_gid(1)?, there.default_gid(1)?);
    let (mut servers, mut tasks) = (HashMap::new(), Vec::new());
    for id in 0..clients {
        let server = pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
        let server = cq.adopt_on(server, &srq)?;
        let builder = their_pd.qp_builder(&their_cq, &their_cq, QpType::RC);
        let qp = their_cq.adopt(builder.max_send_wr(8).max_inline_data(64).build()?)?;
        let ends = (server.endpoint(&gid)?, qp.endpoint(&their_gid)?);
        server.handshake(&ends.1, &Handshake::new())?;
        qp.handshake(&ends.0, &Handshake::new())?;
        servers.insert(server.qpn(), (id, server));
        tasks.push((qp, id));
    }
    let started = Instant::now();
    // The queue pairs stay until all messages have arrived: a peer that is gone acknowledges nothing.
    let kept: Vec<AsyncQueuePair> = tasks.iter().map(|(qp, _)| qp.clone()).collect();
    let tasks: Vec<_> =
        tasks.into_iter().map(|(qp, id)| tokio::spawn(client(qp, id, messages))).collect();
    let mut next = vec![0; clients as usize];
    for _ in 0..u64::from(clients) * u64::from(messages) {
        let message = inbox.next().await?;
        let (id, _) = servers.get(&message.outcome.qpn).ok_or("an unknown queue pair")?;
        let expected = [id.to_be_bytes(), u32::to_be_bytes(next[*id as usize])].concat();
        if *message.memory != expected {
            return Err(format!("client {id} says {:?}", &*message.memory).into());
        }
        next[*id as usize] += 1;
    }
    for task in tasks {
        task.await??;
    }
    drop(kept);
    let (count, time) = (u64::from(clients) * u64::from(messages), started.elapsed());
    println!("{count} messages of {clients} clients in {:.3} s", time.as_secs_f64());
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).map(|text| text.parse()).collect();
    let (clients, messages) = match arguments[..] {
        [] => (64, 20),
        [Ok(clients @ 1..)] => (clients, 20),
        [Ok(clients @ 1..), Ok(messages)] => (clients, messages),
        _ => {
            eprintln!("usage: fan_in [CLIENTS [MESSAGES]]");
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended =
        runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(clients, messages)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fan_in: {error}");
            ExitCode::FAILURE
        }
    }
}
