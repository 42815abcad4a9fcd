//! Connections by address as futures.

use super::{PATIENCE, address, passive};
use crate::env;
use crate::tasks::{both, run, run_for};
use crate::verdict::{Stop, Verdict, trials};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use uverbs::aio::cm::{Connection, EventChannel, Listener};
use uverbs::aio::tokio::within;
use uverbs::aio::{CompletionQueue, QueuePair};
use uverbs::cm::{ConnectParam, ConnectRequest, Connector};
use uverbs::owned::BufferPool;
use uverbs::{Context, Device, ProtectionDomain, QpType};

trials![
    clients_and_server_exchange_messages,
    workers_accept_on_channels_of_their_own,
    dropped_futures_leave_nothing,
    end_of_a_connection_wakes_its_tasks,
];

/// A message that comes before its receive is sent again soon.
fn param() -> ConnectParam {
    ConnectParam::new().min_rnr_timer(12)
}

/// What a worker makes its queue pairs from.
struct Worker {
    channel: EventChannel,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    pool: BufferPool,
}

impl Worker {
    fn on(device: &Device) -> Verdict<Worker> {
        let context = Context::open(device)?;
        let (channel, _driver) = EventChannel::spawn()?;
        channel.use_context(&context)?;
        let (cq, _driver) = CompletionQueue::spawn(&context, 256)?;
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(64).count(64).build()?;
        Ok(Worker { channel, cq, pd, pool })
    }

    fn qp(&self) -> uverbs::Result<QueuePair> {
        self.cq.create_qp(&self.pd, QpType::RC, |qp| qp.max_send_wr(4).max_recv_wr(4))
    }

    fn listen(&self) -> Verdict<(Listener, SocketAddr)> {
        let listener = self.channel.listen((address(&passive()?)?, 0), 64)?;
        let at = listener.local_addr()?;
        Ok((listener, at))
    }

    async fn connect(&self, at: SocketAddr) -> Verdict<(QueuePair, Connection)> {
        let from = SocketAddr::new(address(&env::device())?, 0);
        let connector = Connector::new(at)?.from(from).param(param());
        Ok(self.channel.connect(&connector, |_| self.qp()).await?)
    }

    async fn accept(&self, request: ConnectRequest) -> Verdict<(QueuePair, Connection)> {
        Ok(self.channel.accept(request, &param(), |_| self.qp()).await?)
    }

    /// Sends a message and waits until it comes back; then closes the connection.
    async fn ask(&self, at: SocketAddr, text: &str) -> Verdict {
        let (qp, connection) = self.connect(at).await?;
        let buffer = self.pool.copy(text.as_bytes()).ok_or_else(|| Stop::fail("no buffer"))?;
        let answer = self.pool.take().ok_or_else(|| Stop::fail("no buffer"))?;
        let (answer, sent) = tokio::join!(qp.recv(answer), qp.send(buffer));
        sent?;
        assert_eq!(&answer?.memory[..], text.as_bytes());
        connection.disconnect()?;
        connection.disconnected().await?;
        Ok(())
    }

    /// Sends one message back, and waits until the peer closes the connection.
    async fn echo(&self, request: ConnectRequest) -> Verdict {
        let buffer = self.pool.take().ok_or_else(|| Stop::fail("no buffer"))?;
        let (qp, connection) = self.accept(request).await?;
        let message = qp.recv(buffer).await?;
        qp.send(message.memory).await?;
        connection.disconnected().await?;
        Ok(())
    }
}

fn clients_and_server_exchange_messages() -> Verdict {
    const CLIENTS: usize = 10;
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (mut listener, at) = server.listen()?;
        let serve = async {
            for _ in 0..CLIENTS {
                server.echo(listener.next_request().await?).await?;
            }
            Ok(())
        };
        let ask = async {
            for number in 0..CLIENTS {
                client.ask(at, &format!("client {number}")).await?;
            }
            Ok(())
        };
        both(serve, ask).await
    })
}

fn workers_accept_on_channels_of_their_own() -> Verdict {
    const WORKERS: usize = 3;
    run(4, async {
        let front = Worker::on(&passive()?)?;
        let (mut listener, at) = front.listen()?;
        let mut tasks = Vec::new();
        for number in 0..2 * WORKERS {
            tasks.push(tokio::spawn(async move {
                Worker::on(&env::device())?.ask(at, &format!("client {number}")).await
            }));
        }
        for _ in 0..2 * WORKERS {
            let request = listener.next_request().await?;
            tasks.push(tokio::spawn(async move { Worker::on(&passive()?)?.echo(request).await }));
        }
        for task in tasks {
            task.await??;
        }
        Ok(())
    })
}

fn dropped_futures_leave_nothing() -> Verdict {
    let before = env::resources()?;
    run_for(6 * PATIENCE, 0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (mut listener, at) = server.listen()?;
        for milliseconds in [0, 1, 2, 5, 10, 50] {
            let connect = Box::pin(client.connect(at));
            if let Ok(connected) = within(Duration::from_millis(milliseconds), connect).await {
                return Err(Stop::fail(format!("nobody accepted: {:?}", connected.map(drop))));
            }
        }
        // Some requests came, of peers that gave up.
        while let Ok(request) =
            within(Duration::from_millis(100), Box::pin(listener.next_request())).await
        {
            let accept = Box::pin(server.accept(request?));
            // If the message that ends the request was lost, the kernel sends its REP up to 16 times, 4 s
            // apart, before it gives up.
            let accepted = tokio::time::timeout(4 * PATIENCE, accept).await;
            assert!(accepted.is_ok_and(|accepted| accepted.is_err()));
        }
        both(client.ask(at, "still here"), async {
            server.echo(listener.next_request().await?).await
        })
        .await
    })?;
    env::settles(&before)
}

fn end_of_a_connection_wakes_its_tasks() -> Verdict {
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (mut listener, at) = server.listen()?;
        let (connected, request) = tokio::join!(client.connect(at), async {
            server.accept(listener.next_request().await?).await
        });
        let ((_client_qp, connection), (server_qp, accepted)) = (connected?, request?);
        let buffer = server.pool.take().ok_or_else(|| Stop::fail("no buffer"))?;
        let wait = async {
            // rxe flushes what was posted before the queue pair went to ERR, and leaves later receives.
            let mut received = pin!(server_qp.recv(buffer));
            let posted = poll_fn(|cx| Poll::Ready(received.as_mut().poll(cx).is_pending())).await;
            assert!(posted);
            let (one, other) = tokio::join!(accepted.disconnected(), accepted.disconnected());
            one?;
            other?;
            // The queue pair goes to ERR when the connection is dropped, which flushes the receive.
            drop(accepted);
            assert!(received.await.is_err());
            Ok(())
        };
        let close = async {
            drop(connection);
            Ok(())
        };
        both(wait, close).await
    })
}
