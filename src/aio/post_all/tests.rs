//! Lists on the scripted kernel.

use super::*;
use crate::aio::OpError;
use crate::owned::{Buffer, SharedBuffer};
use crate::tests::futures::{Futures, Kind, cx, for_each_kind};
use crate::uverbs::scripted::Role;
use crate::{Access, MemoryRegion, Remote, Rkey, SendWr, WcStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

for_each_kind! {
    a_list_takes_one_doorbell_and_ends_in_its_order
    a_list_is_extended_in_its_middle_and_after_its_end
    what_extends_a_list_is_posted_before_an_end_is_returned
    what_extends_a_list_that_waits_comes_behind_those_who_wait
    a_list_longer_than_the_queue_is_posted_as_room_is_made
    a_list_keeps_its_turn_before_later_futures
    a_refused_request_of_a_list_gives_its_memory_back
    a_list_of_a_broken_queue_pair_gives_all_memory_back
    a_list_that_is_dropped_leaves_posted_requests_to_the_queue
    sends_and_receives_of_one_list_are_posted_in_its_order
    a_list_longer_than_the_queue_ends_in_its_order_on_mlx5
    a_list_that_fails_gives_all_memory_back_on_mlx5
    a_list_that_is_dropped_gives_its_memory_back_on_mlx5
    a_task_that_polls_a_list_later_is_woken_on_mlx5
}

/// How many sends the queue pair holds.
fn room<S: Kind>(futures: &Futures<S>) -> usize {
    futures.qp.caps().max_send_wr as usize
}

type Writes<S> = PostAll<Buffer, S>;

fn writes<S: Kind>(futures: &Futures<S>, lengths: std::ops::Range<usize>) -> Writes<S> {
    let to = Transfer::Write(Remote { addr: 0, rkey: Rkey(1) });
    let buffers = lengths.map(|length| {
        let mut buffer = futures.pool.take().unwrap();
        buffer.set_len(length);
        (to, buffer)
    });
    futures.qp.post_all(buffers)
}

fn poll<S: Kind>(list: &mut Writes<S>) -> Poll<Vec<usize>> {
    let ends = Pin::new(list).poll(&mut cx());
    ends.map(|ends| ends.into_iter().map(|end| end.unwrap().memory.len()).collect())
}

fn next<S: Kind>(list: &mut Writes<S>) -> Poll<Option<usize>> {
    list.poll_next(&mut cx()).map(|end| end.map(|end| end.unwrap().memory.len()))
}

/// The ends come one by one, and those of requests that extend the list come behind.
#[cfg(feature = "stream")]
#[test]
fn a_list_is_a_stream_of_ends() {
    use futures_core::Stream;
    let mut futures = Futures::new();
    let mut list = writes(&futures, 1..3);
    let next = |list: &mut Writes<Shared>| {
        let end = Stream::poll_next(Pin::new(list), &mut cx());
        end.map(|end| end.map(|end| end.unwrap().memory.len()))
    };
    assert!(next(&mut list).is_pending());
    for length in [1, 2] {
        futures.complete(Role::Send, WcStatus::SUCCESS);
        assert_eq!(next(&mut list), Poll::Ready(Some(length)));
    }
    assert_eq!(next(&mut list), Poll::Ready(None));
    let to = Transfer::Write(Remote { addr: 0, rkey: Rkey(1) });
    list.extend([(to, futures.pool.copy(b"three").unwrap())]);
    assert!(next(&mut list).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!(next(&mut list), Poll::Ready(Some(5)));
}

fn a_list_takes_one_doorbell_and_ends_in_its_order<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let mut list = writes(&futures, 1..4);
    assert_eq!((futures.qp.in_flight(), list.waiting()), (0, 3), "it is not polled yet");
    assert!(poll(&mut list).is_pending());
    assert_eq!((futures.qp.in_flight(), list.waiting()), (3, 0));
    for _ in 0..2 {
        futures.complete(Role::Send, WcStatus::SUCCESS);
        assert!(poll(&mut list).is_pending());
    }
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!(poll(&mut list), Poll::Ready(vec![1, 2, 3]));
    assert_eq!(poll(&mut list), Poll::Ready(vec![]), "no end is returned twice");
    let mut stream = writes(&futures, 1..3);
    assert!(next(&mut stream).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!(next(&mut stream), Poll::Ready(Some(1)));
    assert!(next(&mut stream).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!(next(&mut stream), Poll::Ready(Some(2)));
    assert_eq!(next(&mut stream), Poll::Ready(None));
}

fn a_list_is_extended_in_its_middle_and_after_its_end<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let write = |futures: &Futures<S>, length| {
        let mut buffer = futures.pool.take().unwrap();
        buffer.set_len(length);
        (Transfer::Write(Remote { addr: 0, rkey: Rkey(1) }), buffer)
    };
    let mut list = writes(&futures, 1..2);
    assert!(next(&mut list).is_pending());
    list.extend([write(&futures, 2)]);
    assert_eq!((futures.qp.in_flight(), list.waiting()), (1, 1), "it is not polled yet");
    assert!(next(&mut list).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!([next(&mut list), next(&mut list)], [1, 2].map(|n| Poll::Ready(Some(n))));
    assert_eq!(next(&mut list), Poll::Ready(None));
    list.extend([write(&futures, 3), write(&futures, 4)]);
    assert!(poll(&mut list).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert_eq!(poll(&mut list), Poll::Ready(vec![3, 4]));
    list.extend([write(&futures, 5)]);
    drop(list);
    let free = futures.pool.idle();
    assert_eq!((futures.qp.in_flight(), free), (0, futures.pool.count()), "all memory is back");
}

fn what_extends_a_list_is_posted_before_an_end_is_returned<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let mut list = writes(&futures, 1..3);
    assert!(next(&mut list).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    futures.complete(Role::Send, WcStatus::SUCCESS);
    list.extend([(Transfer::Send, futures.pool.take().unwrap())]);
    assert_eq!(next(&mut list), Poll::Ready(Some(1)));
    assert_eq!((futures.qp.in_flight(), list.waiting()), (1, 0));
}

fn what_extends_a_list_that_waits_comes_behind_those_who_wait<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let mut list = writes(&futures, 0..room(&futures) + 2);
    assert!(next(&mut list).is_pending());
    let mut later = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut later).poll(&mut cx()).is_pending());
    for waits in [true, true, false] {
        list.extend([(Transfer::Send, futures.pool.take().unwrap())]);
        futures.complete(Role::Send, WcStatus::SUCCESS);
        assert!(next(&mut list).is_ready());
        assert!(Pin::new(&mut later).poll(&mut cx()).is_pending());
        assert_eq!(later.is_posted(), !waits);
    }
    assert_eq!(list.waiting(), 3);
}

fn a_list_longer_than_the_queue_is_posted_as_room_is_made<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let (room, all) = (room(&futures), 1..3 * room(&futures));
    let mut list = writes(&futures, all.clone());
    assert!(next(&mut list).is_pending());
    assert_eq!((futures.qp.in_flight(), list.waiting()), (room, all.len() - room));
    let mut seen = Vec::new();
    for _ in all.clone() {
        futures.complete(Role::Send, WcStatus::SUCCESS);
        while let Poll::Ready(Some(length)) = next(&mut list) {
            seen.push(length);
        }
    }
    assert_eq!(seen, all.collect::<Vec<_>>());
    assert_eq!(futures.qp.in_flight(), 0);
}

fn a_list_keeps_its_turn_before_later_futures<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let mut list = writes(&futures, 0..room(&futures) + 2);
    assert!(poll(&mut list).is_pending());
    let mut later = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut later).poll(&mut cx()).is_pending());
    for _ in 0..2 {
        futures.complete(Role::Send, WcStatus::SUCCESS);
        assert!(Pin::new(&mut later).poll(&mut cx()).is_pending());
        assert!(!later.is_posted() && poll(&mut list).is_pending());
    }
    assert_eq!(list.waiting(), 0);
    futures.complete(Role::Send, WcStatus::SUCCESS);
    assert!(Pin::new(&mut later).poll(&mut cx()).is_pending() && later.is_posted());
}

fn a_refused_request_of_a_list_gives_its_memory_back<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let shared: SharedBuffer = futures.pool.take().unwrap().share();
    let to = Remote { addr: 0, rkey: Rkey(1) };
    // A device may not write memory that has other readers.
    let requests = [SendWr::write(to, &[]), SendWr::read(to, &[]), SendWr::send(&[])];
    let mut list = futures.qp.post_all(requests.map(|wr| (wr, shared.clone())));
    assert!(Pin::new(&mut list).poll(&mut cx()).is_pending());
    assert_eq!(futures.qp.in_flight(), 2);
    for _ in 0..2 {
        futures.complete(Role::Send, WcStatus::SUCCESS);
    }
    let Poll::Ready(ends) = Pin::new(&mut list).poll(&mut cx()) else { panic!("all are over") };
    let kinds: Vec<_> = ends.iter().map(|end| end.as_ref().err().map(|error| error.kind)).collect();
    assert_eq!(kinds, [None, Some(OpErrorKind::Post(PostError::ReadOnly)), None]);
    assert!(ends[1].as_ref().is_err_and(|error| error.memory.is_some()));
}

fn a_list_of_a_broken_queue_pair_gives_all_memory_back<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let room = room(&futures);
    let mut list = writes(&futures, 0..room + 2);
    assert!(poll(&mut list).is_pending());
    futures.complete(Role::Send, WcStatus::REM_ACCESS_ERR);
    for _ in 1..room {
        futures.complete(Role::Send, WcStatus::WR_FLUSH_ERR);
    }
    let Poll::Ready(ends) = Pin::new(&mut list).poll(&mut cx()) else { panic!("all are over") };
    let kinds: Vec<_> = ends.iter().map(|end| end.as_ref().unwrap_err().kind).collect();
    let status = WcStatus::REM_ACCESS_ERR;
    let (first, flushed) =
        (OpErrorKind::Status(status), OpErrorKind::Status(WcStatus::WR_FLUSH_ERR));
    let earlier = OpErrorKind::Earlier(status);
    assert_eq!((kinds[0], kinds.len()), (first, room + 2));
    assert!(kinds[1..room].iter().all(|kind| *kind == flushed));
    assert_eq!(kinds[room..], [earlier, earlier]);
    assert!(ends.iter().all(|end| end.as_ref().unwrap_err().memory.is_some()));
}

fn a_list_that_is_dropped_leaves_posted_requests_to_the_queue<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let (idle, room) = (futures.pool.idle(), room(&futures));
    let mut list = writes(&futures, 0..room + 2);
    assert!(poll(&mut list).is_pending());
    futures.complete(Role::Send, WcStatus::SUCCESS);
    let mut later = futures.qp.send(futures.pool.take().unwrap());
    assert!(Pin::new(&mut later).poll(&mut cx()).is_pending() && !later.is_posted());
    drop(list);
    assert!(Pin::new(&mut later).poll(&mut cx()).is_pending() && later.is_posted());
    // The writes but one, and the send.
    assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (room, idle - room));
    for _ in 0..room {
        futures.complete(Role::Send, WcStatus::SUCCESS);
    }
    drop(later);
    assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, idle));
}

fn sends_and_receives_of_one_list_are_posted_in_its_order<S: Kind>() {
    let mut futures = Futures::<S>::of();
    let kinds = [Transfer::Send, Transfer::Recv, Transfer::Recv, Transfer::Send];
    let requests = kinds.map(|kind| (kind, futures.pool.take().unwrap()));
    let mut list = futures.qp.post_all(requests);
    assert!(poll(&mut list).is_pending());
    assert_eq!((futures.qp.in_flight(), list.waiting()), (4, 0));
    for _ in 0..2 {
        futures.complete(Role::Send, WcStatus::SUCCESS);
        futures.complete(Role::Recv, WcStatus::SUCCESS);
    }
    assert!(poll(&mut list).is_ready());
}

/// A queue pair whose sends need no check, memory to write to, and so many writes of a byte each.
fn on_mlx5<S: Kind>(writes: usize) -> (Futures<S>, MemoryRegion<u64>, Vec<(Transfer, Buffer)>) {
    let futures = Futures::<S>::connected();
    let region = futures.bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate(1).unwrap();
    let to = Transfer::Write(region.remote(0).unwrap());
    let writes = (0..writes).map(|n| (to, futures.pool.copy(&[n as u8]).unwrap())).collect();
    (futures, region, writes)
}

/// Executes what is posted, and polls the driver.
fn execute<S: Kind>(futures: &mut Futures<S>) {
    futures.bench.script.settle();
    assert!(Pin::new(&mut futures.driver).poll(&mut cx()).is_pending());
}

fn a_list_longer_than_the_queue_ends_in_its_order_on_mlx5<S: Kind>() {
    let (mut futures, region, writes) = on_mlx5::<S>(19);
    let room = room(&futures);
    let mut list = futures.qp.post_all(writes);
    let mut seen = Vec::new();
    while seen.len() < 19 {
        while let Poll::Ready(Some(end)) = list.poll_next(&mut cx()) {
            seen.push(end.unwrap().memory[0]);
        }
        assert!(futures.qp.in_flight() == room.min(19 - seen.len()), "{seen:?}");
        execute(&mut futures);
    }
    assert_eq!(seen, (0..19).collect::<Vec<_>>());
    assert_eq!((region.read_at(0), futures.pool.idle()), (Some(18), 64));
}

/// The second one names memory that the peer does not have.
fn a_list_that_fails_gives_all_memory_back_on_mlx5<S: Kind>() {
    let (mut futures, _region, mut writes) = on_mlx5::<S>(4);
    writes[1].0 = Transfer::Write(Remote { addr: 0, rkey: Rkey(1) });
    let mut list = futures.qp.post_all(writes);
    assert!(poll(&mut list).is_pending());
    execute(&mut futures);
    let Poll::Ready(ends) = Pin::new(&mut list).poll(&mut cx()) else { panic!("all are over") };
    // The queue pair is its own peer, which ends the connection: the first one may be flushed.
    let has_failed = |error: &OpError<Buffer>| matches!(error.kind, OpErrorKind::Status(_));
    assert!(ends[1..].iter().all(|end| end.as_ref().is_err_and(has_failed)), "{ends:?}");
    assert!(ends[1..].iter().all(|end| end.as_ref().is_err_and(|error| error.memory.is_some())));
    drop(ends);
    assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, 64));
}

/// Before and after its requests are over, which need no driver to be over.
fn a_list_that_is_dropped_gives_its_memory_back_on_mlx5<S: Kind>() {
    for is_over in [false, true] {
        let (mut futures, _region, writes) = on_mlx5::<S>(4);
        let mut list = futures.qp.post_all(writes);
        assert!(list.poll_next(&mut cx()).is_pending() && futures.qp.in_flight() == 4);
        if is_over {
            execute(&mut futures);
            assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, 60), "for the list");
        }
        drop(list);
        execute(&mut futures);
        assert_eq!((futures.qp.in_flight(), futures.pool.idle()), (0, 64), "{is_over}");
    }
}

/// The list is polled by one task, and then by another one.
fn a_task_that_polls_a_list_later_is_woken_on_mlx5<S: Kind>() {
    let (mut futures, _region, writes) = on_mlx5::<S>(3);
    let mut list = futures.qp.post_all(writes);
    let count = Arc::<Count>::default();
    let waker = Waker::from(count.clone());
    assert!(Pin::new(&mut list).poll(&mut cx()).is_pending());
    assert!(list.poll_next(&mut Context::from_waker(&waker)).is_pending());
    execute(&mut futures);
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!(poll(&mut list), Poll::Ready(vec![1, 1, 1]));
}
