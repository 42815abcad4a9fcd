//! Connections by address as futures.

use super::{PATIENCE, address, passive};
use crate::capability::Capability;
use crate::env;
use crate::tasks::{both, run, run_for};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::collections::HashMap;
use std::future::poll_fn;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};
use uverbs::aio::cm::{AsyncConnection, AsyncEventChannel, AsyncListener, AsyncMulticastMember};
use uverbs::aio::tokio::within;
use uverbs::aio::{AsyncCompletionQueue, AsyncQueuePair};
use uverbs::cm::{
    ConnectParam, ConnectRequest, Connector, DatagramPeer, Listener, MulticastRole, PortSpace,
    QpWith,
};
use uverbs::owned::{Buffer, BufferPool};
use uverbs::{Context, Destination, Device, Errno, ProtectionDomain, QpType, SendWr};

trials![
    clients_and_server_exchange_messages,
    workers_accept_on_channels_of_their_own,
    dropped_futures_leave_nothing,
    end_of_a_connection_wakes_its_tasks,
    datagrams_go_where_the_listener_says,
    datagrams_of_one_member_reach_all_members,
    dropped_futures_of_datagrams_leave_nothing,
    tasks_share_a_listener,
    a_crowd_of_clients_leaves_nothing,
    first_message_finds_a_receive_that_the_closure_posted,
];

fn param() -> ConnectParam {
    ConnectParam::new().rnr_retry(env::rnr_retry())
}

/// The objects from which a worker makes its queue pairs.
struct Worker {
    channel: AsyncEventChannel,
    cq: AsyncCompletionQueue,
    pd: ProtectionDomain,
    pool: BufferPool,
}

impl Worker {
    fn on(device: &Device) -> Verdict<Worker> {
        let context = Context::open(device)?;
        let (channel, _driver) = AsyncEventChannel::spawn()?;
        channel.use_context(&context)?;
        let (cq, _driver) = context.cq_builder(1024).spawn()?;
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(64).count(64).build()?;
        Ok(Worker { channel, cq, pd, pool })
    }

    fn qp(&self) -> uverbs::Result<AsyncQueuePair> {
        self.qp_of(QpType::RC)
    }

    fn qp_of(&self, qp_type: QpType) -> uverbs::Result<AsyncQueuePair> {
        let builder = self.pd.qp_builder(&self.cq, &self.cq, qp_type);
        Ok(self.cq.adopt(builder.max_send_wr(4).max_recv_wr(4).build()?)?)
    }

    fn listen(&self) -> Verdict<(AsyncListener, SocketAddr)> {
        let listener =
            self.channel.listen(&Listener::builder((address(&passive()?)?, 0))?.backlog(64))?;
        let at = listener.local_addr()?;
        Ok((listener, at))
    }

    async fn connect(&self, at: SocketAddr) -> Verdict<(AsyncQueuePair, AsyncConnection)> {
        let from = SocketAddr::new(address(&env::device())?, 0);
        let connector = Connector::new(at)?.source(from).param(param());
        Ok(self.channel.connect(&connector, |_| self.qp()).await?)
    }

    async fn accept(&self, request: ConnectRequest) -> Verdict<(AsyncQueuePair, AsyncConnection)> {
        Ok(self.channel.accept(request, &param(), |_| self.qp()).await?)
    }

    /// Sends a message and waits until it comes back; then closes the connection.
    async fn ask(&self, at: SocketAddr, text: &str) -> Verdict {
        let (qp, connection) = self.connect(at).await?;
        let buffer = self.pool.copy(text.as_bytes())?;
        let answer = self.pool.take()?;
        let (answer, sent) = tokio::join!(qp.recv(answer), qp.send(buffer));
        sent?;
        assert_eq!(&answer?.memory[..], text.as_bytes());
        connection.disconnect()?;
        connection.disconnected().await?;
        Ok(())
    }

    /// Sends one message back, and waits until the peer closes the connection.
    async fn echo(&self, request: ConnectRequest) -> Verdict {
        let buffer = self.pool.take()?;
        let (qp, connection) = self.accept(request).await?;
        let message = qp.recv(buffer).await?;
        // The peer closes when it has the answer; soft-RoCE may then send no acknowledgement for it.
        tokio::select! {
            sent = qp.send(message.memory) => {
                sent?;
                connection.disconnected().await?;
            }
            ended = connection.disconnected() => ended?,
        }
        Ok(())
    }
}

fn clients_and_server_exchange_messages() -> Verdict {
    const CLIENTS: usize = 10;
    env::rnr_wait()?;
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (listener, at) = server.listen()?;
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
    env::rnr_wait()?;
    run(4, async {
        let front = Worker::on(&passive()?)?;
        let (listener, at) = front.listen()?;
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
    env::rnr_wait()?;
    let before = env::resources()?;
    run_for(6 * PATIENCE, 0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (listener, at) = server.listen()?;
        for milliseconds in [0, 1, 2, 5, 10, 50] {
            let connect = Box::pin(client.connect(at));
            if let Ok(connected) = within(Duration::from_millis(milliseconds), connect).await {
                return Err(Stop::fail(format!("no accept was sent: {:?}", connected.map(drop))));
            }
        }
        // Some requests arrived, from peers that gave up.
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
        let (listener, at) = server.listen()?;
        let (connected, request) = tokio::join!(client.connect(at), async {
            server.accept(listener.next_request().await?).await
        });
        let ((_client_qp, connection), (server_qp, accepted)) = (connected?, request?);
        let buffer = server.pool.take()?;
        let wait = async {
            // rxe flushes requests that were posted before the queue pair went to ERR, and keeps later receives.
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

/// Bytes of the global route header before the payload of a datagram.
const GRH: usize = 40;

impl Worker {
    fn ud_qp(&self) -> uverbs::Result<AsyncQueuePair> {
        self.qp_of(QpType::UD)
    }

    fn buffer(&self, text: &[u8]) -> Verdict<Buffer> {
        Ok(self.pool.copy(text)?)
    }

    /// A buffer for a receive.
    fn room(&self) -> Verdict<Buffer> {
        Ok(self.pool.take()?)
    }

    fn listen_for_datagrams(&self) -> Verdict<(AsyncListener, SocketAddr)> {
        let listener = self
            .channel
            .listen(&Listener::builder((address(&passive()?)?, 0))?.qp_type(QpType::UD))?;
        let at = listener.local_addr()?;
        Ok((listener, at))
    }

    /// Asks the listener for its queue pair.
    async fn ask_datagrams(&self, at: SocketAddr) -> Verdict<(AsyncQueuePair, DatagramPeer)> {
        let connector = Connector::new(at)?.source(SocketAddr::new(address(&env::device())?, 0));
        Ok(self.channel.connect_datagrams(&connector, |_| self.ud_qp()).await?)
    }

    async fn join(
        &self,
        local: IpAddr,
        role: MulticastRole,
    ) -> Verdict<(AsyncQueuePair, AsyncMulticastMember)> {
        let joined = self.channel.join_multicast(local, group(), role, |_| self.ud_qp()).await;
        supported(joined, Capability::Multicast)
    }
}

/// A group of this process.
fn group() -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(239, 9, high, low).into()
}

fn datagrams_go_where_the_listener_says() -> Verdict {
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (listener, at) = server.listen_for_datagrams()?;
        let qp = server.ud_qp()?;
        let serve = async {
            let request = listener.next_request().await?;
            assert_eq!(request.port_space(), PortSpace::UDP);
            // The queue pair takes receives from `INIT` on, and the client sends as soon as it has the answer.
            request.init_qp(&qp)?;
            let mut received = pin!(qp.recv(server.room()?));
            let posted = poll_fn(|cx| Poll::Ready(received.as_mut().poll(cx).is_pending())).await;
            assert!(posted);
            request.accept_datagrams(&qp, &ConnectParam::new())?;
            assert_eq!(received.await?.memory[GRH..], *b"by await");
            Ok(())
        };
        let ask = async {
            let (qp, peer) = client.ask_datagrams(at).await?;
            let ah = supported(client.pd.create_ah(peer.address()), Capability::Ah)?;
            let to = Destination::new(&ah, peer.qpn(), peer.qkey());
            qp.post(SendWr::send(&[]).to(to), client.buffer(b"by await")?).await?;
            Ok(())
        };
        both(serve, ask).await
    })
}

fn datagrams_of_one_member_reach_all_members() -> Verdict {
    run(0, async {
        let (here, there) = (Worker::on(&env::device())?, Worker::on(&passive()?)?);
        let (sending, to) = here.join(address(&env::device())?, MulticastRole::SendOnly).await?;
        let (receiving, member) = there.join(address(&passive()?)?, MulticastRole::Full).await?;
        assert!(member.receives() && !to.receives());
        let ah = supported(here.pd.create_ah(to.address()), Capability::Ah)?;
        let to = Destination::new(&ah, to.qpn(), to.qkey());
        let receive = async {
            let received = receiving.recv(there.room()?).await?;
            assert_eq!(received.memory[GRH..], *b"to the group");
            Ok(())
        };
        let send = async {
            sending.post(SendWr::send(&[]).to(to), here.buffer(b"to the group")?).await?;
            Ok(())
        };
        both(receive, send).await
    })
}

fn dropped_futures_of_datagrams_leave_nothing() -> Verdict {
    let before = env::resources()?;
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (listener, at) = server.listen_for_datagrams()?;
        let local = address(&env::device())?;
        // Each future is dropped after a different number of polls; no program answers the requests.
        for polls in 1..6 {
            let mut ask = pin!(client.ask_datagrams(at));
            let mut join = pin!(client.join(local, MulticastRole::Full));
            let mut left = polls;
            poll_fn(|cx| {
                assert!(ask.as_mut().poll(cx).is_pending(), "nobody answered");
                let joined = join.as_mut().poll(cx);
                left -= 1;
                // A join may end before its last poll.
                if left == 0 || joined.is_ready() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        // Requests of clients that gave up may come before the last one.
        let mut ask = pin!(client.ask_datagrams(at));
        loop {
            let next = poll_fn(|cx| match ask.as_mut().poll(cx) {
                Poll::Ready(answered) => Poll::Ready(Err(answered)),
                Poll::Pending => listener.poll_next(cx).map(Ok),
            });
            match next.await {
                Ok(request) => {
                    let qp = server.ud_qp()?;
                    request?.accept_datagrams(&qp, &ConnectParam::new())?;
                }
                Err(answered) => return answered.map(drop),
            }
        }
    })?;
    env::settles(&before)
}

/// Each request goes to one of the tasks.
fn tasks_share_a_listener() -> Verdict {
    const TASKS: usize = 4;
    env::rnr_wait()?;
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (listener, at) = server.listen()?;
        let (server, listener) = (Arc::new(server), Arc::new(listener));
        let serving: Vec<_> = (0..TASKS)
            .map(|_| {
                let (server, listener) = (server.clone(), listener.clone());
                tokio::spawn(async move { server.echo(listener.next_request().await?).await })
            })
            .collect();
        for number in 0..TASKS {
            client.ask(at, &format!("client {number}")).await?;
        }
        for task in serving {
            task.await??;
        }
        assert_eq!(listener.overflows(), 0);
        Ok(())
    })
}

/// A message that finds no receive fails at once: `rnr_retry` is 0 on both sides.
fn first_message_finds_a_receive_that_the_closure_posted() -> Verdict {
    let param = ConnectParam::new().rnr_retry(0);
    run(0, async {
        let (server, client) = (Worker::on(&passive()?)?, Worker::on(&env::device())?);
        let (listener, at) = server.listen()?;
        let serve = async {
            let request = listener.next_request().await?;
            let accepted = server.channel.accept(request, &param, |request| {
                let qp = server.qp()?;
                request.init_qp(&qp)?;
                let mut inbox = qp.inbox(&server.pool, 2);
                assert_eq!(inbox.fill(), 2);
                Ok(QpWith(qp, inbox))
            });
            let (QpWith(qp, mut inbox), connection) = accepted.await?;
            let message = inbox.next().await?;
            assert_eq!(*message.memory, *b"at once");
            tokio::select! {
                sent = qp.send(message.memory) => { sent?; connection.disconnected().await?; }
                ended = connection.disconnected() => ended?,
            }
            Ok(())
        };
        let ask = async {
            let from = SocketAddr::new(address(&env::device())?, 0);
            let connector = Connector::new(at)?.source(from).param(param.clone());
            let connected = client.channel.connect(&connector, |route| {
                let qp = client.qp()?;
                route.init_qp(&qp)?;
                let mut inbox = qp.inbox(&client.pool, 2);
                assert_eq!(inbox.fill(), 2);
                Ok(QpWith(qp, inbox))
            });
            let (QpWith(qp, mut inbox), connection) = connected.await?;
            qp.send(client.buffer(b"at once")?).await?;
            assert_eq!(*inbox.next().await?.memory, *b"at once");
            assert!(poll_fn(|cx| Poll::Ready(connection.poll_event(cx))).await.is_pending());
            connection.disconnect()?;
            poll_fn(|cx| connection.poll_disconnected(cx)).await?;
            Ok(())
        };
        both(serve, ask).await
    })
}

/// The visit of a client of a crowd.
#[derive(Clone, Copy, Debug)]
enum Visit {
    /// It connects, and closes the connection.
    Open = 1,
    /// It connects, and the server closes the connection.
    Closed,
    /// It gives up after so many polls or milliseconds.
    Cancel,
    /// The server rejects it.
    Reject,
}

/// The longest wait of the server for a client that may have given up. The kernel would wait for a minute if the
/// client's cancellation overtook the request (`docs/KERNEL-NOTES.md`).
const ACCEPT: Duration = Duration::from_secs(5);

/// The requests that the server still works on, with their visits, states and starting times.
#[derive(Default)]
struct Open(Mutex<HashMap<usize, (u8, &'static str, Instant)>>);

impl Open {
    fn is(&self, number: usize, visit: u8, state: &'static str) {
        self.0.lock().expect("no panic").insert(number, (visit, state, Instant::now()));
    }

    fn ends(&self, number: usize) {
        self.0.lock().expect("no panic").remove(&number);
    }
}

impl Worker {
    async fn visit(&self, at: SocketAddr, visit: Visit, patience: u64) -> Verdict {
        let from = SocketAddr::new(address(&env::device())?, 0);
        let param = param().private_data(&[visit as u8]);
        let connector = Connector::new(at)?.source(from).param(param);
        let connect = Box::pin(self.channel.connect(&connector, |_| self.qp()));
        match visit {
            Visit::Cancel => {
                // If it is connected before, the connection is dropped.
                let _ = within(Duration::from_millis(patience), connect).await;
            }
            Visit::Reject => {
                let error = connect.await.map(drop).unwrap_err();
                assert_eq!(error.errno(), Errno::CONNREFUSED, "{error}");
            }
            Visit::Open | Visit::Closed => {
                let (_qp, connection) = connect.await?;
                if let Visit::Open = visit {
                    connection.disconnect()?;
                }
                connection.disconnected().await?;
            }
        }
        Ok(())
    }

    async fn receive(&self, request: ConnectRequest, number: usize, open: &Open) -> Verdict {
        let visit = request.private_data().first().copied().unwrap_or_default();
        open.is(number, visit, "accepted");
        if visit == Visit::Reject as u8 {
            request.reject(b"no")?;
        } else if let Ok(Ok((_qp, connection))) =
            within(ACCEPT, Box::pin(self.accept(request))).await
        {
            open.is(number, visit, "connected");
            if visit == Visit::Closed as u8 {
                connection.disconnect()?;
            }
            connection.disconnected().await?;
        }
        open.ends(number);
        Ok(())
    }
}

/// Each client makes all four visits in turn; at the end the server has no object left.
fn a_crowd_of_clients_leaves_nothing() -> Verdict {
    let (clients, rounds) = if env::soak().is_ok() { (48, 20) } else { (6, 2) };
    let before = env::resources()?;
    run_for(30 * PATIENCE, 0, async {
        let server = Arc::new(Worker::on(&passive()?)?);
        let listener =
            server.channel.listen(&Listener::builder((address(&passive()?)?, 0))?.backlog(0))?;
        let (at, open) = (listener.local_addr()?, Arc::new(Open::default()));
        let receiving = {
            let (server, open) = (server.clone(), open.clone());
            tokio::spawn(async move {
                for number in 0.. {
                    let request = listener.next_request().await?;
                    let (server, open) = (server.clone(), open.clone());
                    tokio::spawn(async move {
                        if let Err(stop) = server.receive(request, number, &open).await {
                            eprintln!("request {number}: {stop:?}");
                        }
                    });
                }
                Verdict::Ok(())
            })
        };
        let client = Arc::new(Worker::on(&env::device())?);
        let visitors: Vec<_> = (0..clients)
            .map(|number| {
                let client = client.clone();
                tokio::spawn(async move {
                    for round in 0..rounds {
                        for visit in [Visit::Open, Visit::Closed, Visit::Cancel, Visit::Reject] {
                            client.visit(at, visit, (number * 7 + round * 3) % 60).await?;
                        }
                    }
                    Verdict::Ok(())
                })
            })
            .collect();
        for visitor in visitors {
            visitor.await??;
        }
        let deadline = Instant::now() + 5 * PATIENCE;
        let mut said = Instant::now();
        loop {
            let left = open.0.lock().expect("no panic").clone();
            if left.is_empty() {
                break;
            }
            if said.elapsed() > Duration::from_secs(3) {
                said = Instant::now();
                eprintln!("left: {left:?}");
            }
            if Instant::now() > deadline {
                return Err(Stop::fail(format!("left: {left:?}")));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        receiving.abort();
        Ok(())
    })?;
    env::settles(&before)
}
