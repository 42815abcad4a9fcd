//! The bytes that a message shows, and a server's treatment of clients: no client reads the data of
//! another, and none keeps the others waiting.

use crate::capability::Capability;
use crate::env;
use crate::pair::{PATIENCE, gid};
use crate::tasks::{Half, ask, echo_back, pair, run};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use uverbs::aio::Inbox;
use uverbs::aio::tokio::{HANDSHAKE_TIMEOUT, connect, handshake};
use uverbs::owned::BufferPool;
use uverbs::{Access, Destination, Endpoint, Errno, QpType, SendWr, WcOpcode};

trials![
    a_write_with_immediate_shows_nothing_of_an_earlier_message,
    a_shared_queue_shows_a_client_nothing_of_another,
    a_received_buffer_has_the_length_of_its_message,
    a_receive_that_was_flushed_is_empty,
    a_datagram_shows_no_old_bytes_before_its_payload,
    a_silent_client_fails_the_step_it_reached,
    a_garbage_client_fails_the_step_it_reached,
    a_client_that_leaves_midway_fails_the_step_it_reached,
    a_server_goes_on_after_silence_and_garbage,
];

const SECRET: &[u8] = b"the password is 12345";

/// `first` sends a message. Then `second` writes as many bytes elsewhere, with immediate data.
async fn tell_and_write<S: uverbs::aio::Locking>(
    inbox: &mut Inbox<S>,
    (first, second): (&Half, &Half),
    target: &Half,
) -> Verdict {
    let theirs = target.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64)?;
    inbox.fill();
    first.qp.send(first.pool.copy(SECRET).expect("a buffer")).await?;
    let message = inbox.next().await?;
    assert_eq!(&message.memory[..], SECRET);
    assert_eq!(message.outcome.filled(), SECRET.len());
    drop(message);
    inbox.fill();
    let write = SendWr::write_imm(theirs.remote(0)?, &[], 7);
    let text = second.pool.copy(&[b'x'; SECRET.len()]).expect("a buffer");
    second.qp.post(write, text).await?;
    let message = inbox.next().await?;
    assert_eq!(message.outcome.imm(), Some(7));
    assert_eq!(message.outcome.opcode, WcOpcode::RECV_WRITE_IMM);
    let shown = String::from_utf8_lossy(&message.memory);
    assert_eq!((&*shown, message.outcome.filled()), ("", 0));
    let mut written = [0; SECRET.len()];
    theirs.copy_to(0, &mut written)?;
    assert_eq!(written, [b'x'; SECRET.len()]);
    Ok(())
}

/// A pool of one buffer, which holds the bytes of the last message.
fn narrow(half: &Half) -> Verdict<BufferPool> {
    Ok(half.pd.buffer_pool_builder(64).count(1).build()?)
}

fn a_write_with_immediate_shows_nothing_of_an_earlier_message() -> Verdict {
    run(0, async {
        let (a, b) = pair()?;
        let mut inbox = b.qp.inbox(&narrow(&b)?, 1);
        tell_and_write(&mut inbox, (&a, &a), &b).await
    })
}

fn a_shared_queue_shows_a_client_nothing_of_another() -> Verdict {
    run(0, async {
        let b = Half::new()?;
        let index = gid(&b.context)?;
        let srq = b.cq.adopt_srq(supported(b.pd.srq_builder(4).build(), Capability::Srq)?)?;
        let mut servers = Vec::new();
        let clients = [Half::new()?, Half::new()?];
        for client in &clients {
            let builder = b.pd.qp_builder(&b.cq, &b.cq, QpType::RC).max_send_wr(4).srq(&srq);
            let server = b.cq.adopt_on(builder.build()?, &srq)?;
            let (here, there) = (client.qp.endpoint(&index)?, server.endpoint(&index)?);
            env::handshake(&server, &here)?;
            env::handshake(&client.qp, &there)?;
            servers.push(server);
        }
        let mut inbox = srq.inbox(&narrow(&b)?, 1);
        tell_and_write(&mut inbox, (&clients[0], &clients[1]), &b).await
    })
}

fn a_received_buffer_has_the_length_of_its_message() -> Verdict {
    run(0, async {
        let (a, b) = pair()?;
        let pool = narrow(&b)?;
        let mut buffer = pool.take().expect("a buffer");
        buffer.fill(0xee);
        let mut recv = b.qp.recv(buffer);
        poll_fn(|cx| Poll::Ready(Pin::new(&mut recv).poll(cx).is_pending())).await;
        a.qp.send(a.pool.copy(b"short").expect("a buffer")).await?;
        let mut buffer = recv.await?.memory;
        assert_eq!(&buffer[..], b"short");
        // A receive gets only the visible part of its buffer; `reset` makes all of it visible again.
        buffer.reset();
        assert_eq!(buffer.len(), pool.buffer_size());
        Ok(())
    })
}

fn a_receive_that_was_flushed_is_empty() -> Verdict {
    run(0, async {
        let (_a, b) = pair()?;
        let mut recv = b.qp.recv(narrow(&b)?.take().expect("a buffer"));
        poll_fn(|cx| Poll::Ready(Pin::new(&mut recv).poll(cx).is_pending())).await;
        b.qp.abort()?;
        let error = recv.await.expect_err("nothing was sent");
        assert_eq!(error.memory.map(|buffer| buffer.len()), Some(0));
        Ok(())
    })
}

/// The device writes only part of the header's room, because an IPv4 header has half the length.
fn a_datagram_shows_no_old_bytes_before_its_payload() -> Verdict {
    const HEADER: usize = 40;
    run(0, async {
        let (a, b) = (Half::new()?, Half::new()?);
        let ends = [(&a, a.context.clone()), (&b, b.context.clone())];
        let mut qps = Vec::new();
        for (half, context) in ends {
            let builder = half.pd.qp_builder(&half.cq, &half.cq, QpType::UD);
            let qp = builder.max_send_wr(4).max_recv_wr(4).build();
            let qp = half.cq.adopt(supported(qp, Capability::Ud)?)?;
            let own = qp.endpoint(&gid(&context)?)?;
            env::handshake(&qp, &own)?;
            qps.push((qp, own));
        }
        let [(sender, _), (receiver, there)] = &qps[..] else { panic!("two queue pairs") };
        let pool = b.pd.buffer_pool_builder(128).count(1).build()?;
        pool.take().expect("a buffer").fill(0xee);
        let mut inbox = receiver.inbox(&pool, 1);
        inbox.fill();
        let ah = supported(a.pd.create_ah(&sender.path_to(there)?), Capability::Ah)?;
        let to = Destination::new(&ah, there.qpn, there.qkey);
        sender.post(SendWr::send(&[]).to(to), a.pool.copy(b"datagram").expect("a buffer")).await?;
        let message = tokio::time::timeout(PATIENCE, inbox.next()).await??;
        assert_eq!(message.memory.len(), HEADER + 8);
        assert_eq!(&message.memory[HEADER..], b"datagram");
        let header = &message.memory[..HEADER];
        let old = header.iter().filter(|byte| **byte == 0xee).count();
        assert_eq!(old, 0, "{header:02x?}");
        Ok(())
    })
}

/// The result of a server's handshake with a client that does `act` on its stream.
async fn judged<F: Future<Output = std::io::Result<TcpStream>>>(
    act: impl FnOnce(TcpStream) -> F,
) -> Verdict<uverbs::Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let half = Half::new()?;
    let index = gid(&half.context)?;
    let client = TcpStream::connect(listener.local_addr()?).await?;
    let (stream, _) = listener.accept().await?;
    let client = act(client).await?;
    let (timeout, options) = (Duration::from_millis(300), env::handshake_options());
    let shaken = handshake(&half.qp, &stream, &index, &options, timeout).await;
    drop(client);
    shaken.err().ok_or_else(|| Stop::fail("a handshake without a peer succeeded"))
}

fn a_silent_client_fails_the_step_it_reached() -> Verdict {
    run(0, async {
        let error = judged(|client| async { Ok(client) }).await?;
        assert_eq!(error.errno(), Errno::TIMEDOUT);
        let text = error.to_string();
        assert!(
            text.contains("0 of 40 bytes to say its endpoint") && text.contains("300ms"),
            "{text}"
        );
        // An endpoint, and then nothing.
        let peer = Half::new()?;
        let endpoint = peer.qp.endpoint(&gid(&peer.context)?)?;
        let error = judged(|mut client| async move {
            client.write_all(&endpoint.to_bytes()).await?;
            Ok(client)
        });
        let error = error.await?;
        assert_eq!(error.errno(), Errno::TIMEDOUT);
        assert!(error.to_string().contains("0 of 1 bytes to say that it is ready"), "{error}");
        Ok(())
    })
}

fn a_garbage_client_fails_the_step_it_reached() -> Verdict {
    run(0, async {
        let error = judged(|mut client| async {
            client.write_all(b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n").await?;
            Ok(client)
        });
        let error = error.await?;
        assert_eq!(error.errno(), Errno::PROTO);
        assert!(error.to_string().contains("\"GET \""), "{error}");
        let peer = Half::new()?;
        let endpoint = peer.qp.endpoint(&gid(&peer.context)?)?;
        let error = judged(|mut client| async move {
            client.write_all(&endpoint.to_bytes()).await?;
            client.write_all(b"?").await?;
            Ok(client)
        });
        let error = error.await?;
        assert_eq!(error.errno(), Errno::PROTO);
        assert!(error.to_string().contains("0x3f in place of 0x52"), "{error}");
        Ok(())
    })
}

fn a_client_that_leaves_midway_fails_the_step_it_reached() -> Verdict {
    run(0, async {
        let error = judged(|mut client| async {
            client.write_all(b"uvb").await?;
            client.shutdown().await?;
            Ok(client)
        });
        let error = error.await?;
        assert_eq!(error.errno(), Errno::CONNRESET);
        assert!(error.to_string().contains("3 of 40 bytes to say its endpoint"), "{error}");
        Ok(())
    })
}

/// The server of the example `echo`.
fn a_server_goes_on_after_silence_and_garbage() -> Verdict {
    env::rnr_wait()?;
    env::first_pkey()?;
    const CLIENTS: usize = 4;
    run(0, async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let server = tokio::spawn(async move {
            let mut tasks = Vec::new();
            for _ in 0..CLIENTS {
                let (stream, _) = listener.accept().await?;
                tasks.push(tokio::spawn(async move {
                    let half = Half::new()?;
                    let index = gid(&half.context)?;
                    handshake(
                        &half.qp,
                        &stream,
                        &index,
                        &env::handshake_options(),
                        HANDSHAKE_TIMEOUT,
                    )
                    .await?;
                    echo_back(&half, 3).await.map(|()| half)
                }));
            }
            Ok::<_, Stop>(tasks)
        });
        // One client stays silent, one sends garbage, one stops halfway; the last one connects.
        let silent = TcpStream::connect(address).await?;
        let mut garbage = TcpStream::connect(address).await?;
        garbage.write_all(&[0xff; 100]).await?;
        let mut midway = TcpStream::connect(address).await?;
        midway.write_all(b"uvb1").await?;
        drop(midway);
        let half = Half::new()?;
        let _stream = connect(&half.qp, address, &gid(&half.context)?).await?;
        ask(&half, 3).await?;
        let mut tasks = server.await??;
        tasks.pop().expect("the last client's").await??;
        tasks.pop().expect("the third client's").await?.err().expect("it left midway");
        tasks.pop().expect("the second client's").await?.err().expect("it said nonsense");
        // The first is still waited for.
        assert!(!tasks.pop().expect("the first client's").is_finished());
        let mut endpoint = [0; Endpoint::BYTES];
        garbage.read_exact(&mut endpoint).await?;
        assert!(Endpoint::from_bytes(&endpoint).is_some());
        drop(silent);
        Ok(())
    })
}
