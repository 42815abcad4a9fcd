//! Memory of the program's own is lent by value, and comes back as the same value.
#![allow(unsafe_code, reason = "the point of the tests")]

use super::futures::{Futures, cx};
use super::owned::Owned;
use super::{Bench, wc};
use crate::aio::Transfer;
use crate::owned::{Memory, ProgramBuffer, RegionSge, RegisteredBuffer};
use crate::uverbs::scripted::Role;
use crate::{Access, PostError, Remote, Rkey, SendWr, Sge, WcStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

const REMOTE: Remote = Remote { addr: 0x2000, rkey: Rkey(6) };

/// A page of a region that the test keeps.
#[derive(Debug)]
struct Page {
    sge: RegionSge,
    /// Counts the pages.
    _alive: Arc<()>,
}

// SAFETY: the tests keep the region, which nobody else reads or writes.
unsafe impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        self.sge
    }
}

/// A page that others read.
#[derive(Debug)]
struct ReadOnly(Page);

// SAFETY: as above.
unsafe impl RegisteredBuffer for ReadOnly {
    fn sge(&self) -> RegionSge {
        self.0.sge
    }

    fn is_writable(&self) -> bool {
        false
    }
}

/// A page that is too large for its place, in a box.
#[derive(Debug)]
struct Boxed(Box<(Page, [u64; 8])>);

// SAFETY: as above.
unsafe impl RegisteredBuffer for Boxed {
    fn sge(&self) -> RegionSge {
        self.0.0.sge
    }
}

fn complete_next(owned: &Owned, role: Role) -> Vec<u8> {
    let request = owned.bench.script.take(owned.qp.handle(), role).expect("a request");
    let wr_id = u64::from_ne_bytes(request[..8].try_into().unwrap());
    let done = wc(owned.qp.qpn().0, wr_id);
    assert!(owned.bench.script.complete(owned.cq.queue().handle(), done));
    request
}

#[test]
fn a_page_is_named_and_comes_back_as_it_was() {
    let mut owned = Owned::new();
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 256]).unwrap();
    let whole = RegionSge::new(&region, ..).unwrap();
    assert_eq!(RegionSge::in_domain(&owned.bench.pd, whole.sge()), whole);
    assert!(whole.slice(250..260).is_none());
    let alive = Arc::new(());
    let page = |range| Page { sge: whole.slice(range).unwrap(), _alive: alive.clone() };
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::write(REMOTE, &[]), page(64..128), "page").unwrap();
    let boxed = Boxed(Box::new((page(128..130), [7; 8])));
    batch.push(SendWr::read(REMOTE, &[]), boxed, "boxed").unwrap();
    batch.ring().unwrap();
    let mut batch = owned.qp.recv_batch().unwrap();
    batch.push(page(0..8), "receive").unwrap();
    batch.ring().unwrap();
    let requests = [Role::Send, Role::Send, Role::Recv].map(|role| complete_next(&owned, role));
    let header = size_of::<uverbs_uapi::rxe::rxe_send_wqe>();
    let address = u64::from_ne_bytes(requests[0][header..header + 8].try_into().unwrap());
    assert_eq!(address, region.addr() + 64);
    let mut done: Vec<_> = owned.cq.poll().unwrap().collect();
    assert_eq!(done.iter().map(|done| done.tag).collect::<Vec<_>>(), ["page", "boxed", "receive"]);
    let received = done.pop().unwrap().memory.into_program::<Page>().unwrap();
    assert_eq!(received.sge.sge().length, 8);
    let memory = done.pop().unwrap().memory.into_program::<Page>().unwrap_err();
    let Boxed(boxed) = memory.into_program().unwrap();
    assert_eq!((boxed.0.sge.sge().length, boxed.1), (2, [7; 8]));
    let Memory::Program(buffer) = done.pop().unwrap().memory else { panic!("a program's own") };
    let buffer = buffer.downcast::<Boxed>().unwrap_err();
    assert!(buffer.downcast::<Page>().is_ok());
    drop((received, boxed));
    assert_eq!(Arc::strong_count(&alive), 1);
}

/// Memory that comes back with its type erased can be lent again.
#[test]
fn an_erased_page_is_lent_again() {
    let mut owned = Owned::new();
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let sge = RegionSge::new(&region, ..).unwrap();
    let mut memory = Some(Memory::None);
    for round in 0..3 {
        let mut batch = owned.qp.send_batch().unwrap();
        match memory.take().unwrap() {
            Memory::None => {
                let page = ReadOnly(Page { sge, _alive: Arc::new(()) });
                batch.push(SendWr::write(REMOTE, &[]), page, "first").unwrap();
            }
            again => {
                let refused = batch.push(SendWr::read(REMOTE, &[]), again, "again").unwrap_err();
                assert_eq!(refused.error, PostError::ReadOnly, "round {round}");
                batch.push_unsignaled(SendWr::write(REMOTE, &[]), refused.memory, "again").unwrap();
                batch.push(SendWr::send(&[]).inline(b"x"), (), "last").unwrap();
            }
        }
        batch.ring().unwrap();
        if round > 0 {
            owned.bench.script.take(owned.qp.handle(), Role::Send).unwrap();
        }
        complete_next(&owned, Role::Send);
        let done: Vec<_> = owned.cq.poll().unwrap().map(|done| done.memory).collect();
        memory = done.into_iter().next();
    }
    assert!(matches!(memory, Some(Memory::Program(ProgramBuffer { .. }))));
}

/// A page of these bytes that a write was posted from, and that came back with its type erased.
fn written(owned: &mut Owned, sge: RegionSge) -> Memory {
    let mut batch = owned.qp.send_batch().unwrap();
    let page = Page { sge, _alive: Arc::new(()) };
    batch.push(SendWr::write(REMOTE, &[]), page, "page").unwrap();
    batch.ring().unwrap();
    complete_next(owned, Role::Send);
    owned.cq.poll().unwrap().next().unwrap().memory
}

/// Erased memory still records whether a device may write it.
#[test]
fn an_erased_page_that_may_be_written_takes_reads_and_receives() {
    let mut owned = Owned::new();
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let sge = RegionSge::new(&region, ..).unwrap();
    let erased = written(&mut owned, sge);
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::read(REMOTE, &[]), erased, "read").unwrap();
    batch.ring().unwrap();
    complete_next(&owned, Role::Send);
    let erased = owned.cq.poll().unwrap().next().unwrap().memory;
    assert!(erased.into_program::<Page>().is_ok());
}

/// Erased memory still has its key.
#[test]
fn an_erased_page_names_its_bytes_and_its_domain() {
    let (mut owned, mut other) = (Owned::new(), Owned::new());
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let sge = RegionSge::new(&region, ..).unwrap();
    let erased = written(&mut owned, sge);
    let mut batch = other.qp.send_batch().unwrap();
    let refused = batch.push(SendWr::write(REMOTE, &[]), erased, "other").unwrap_err();
    assert_eq!(refused.error, PostError::ForeignMemory);
    let mut batch = owned.qp.send_batch().unwrap();
    batch.push(SendWr::write(REMOTE, &[]), refused.memory, "again").unwrap();
    batch.ring().unwrap();
    let request = complete_next(&owned, Role::Send);
    let header = size_of::<uverbs_uapi::rxe::rxe_send_wqe>();
    let address = u64::from_ne_bytes(request[header..header + 8].try_into().unwrap());
    assert_eq!(address, region.addr());
    assert_eq!(owned.cq.poll().unwrap().count(), 1);
}

#[test]
fn a_page_that_a_request_may_not_have_is_refused() {
    let mut owned = Owned::new();
    let region =
        owned.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let other = owned.bench.context.alloc_pd().unwrap();
    let foreign = other.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let alive = Arc::new(());
    let page = |sge| Page { sge, _alive: alive.clone() };
    let ours = RegionSge::new(&region, ..).unwrap();
    let theirs = RegionSge::new(&foreign, ..).unwrap();
    let mut batch = owned.qp.send_batch().unwrap();
    let refused = batch.push(SendWr::write(REMOTE, &[]), page(theirs), "x");
    assert_eq!(refused.unwrap_err().error, PostError::ForeignMemory);
    let refused = batch.push(SendWr::read(REMOTE, &[]), ReadOnly(page(ours)), "x");
    assert_eq!(refused.unwrap_err().error, PostError::ReadOnly);
    drop(batch);
    let mut batch = owned.qp.recv_batch().unwrap();
    let refused = batch.push(ReadOnly(page(ours)), "x").unwrap_err();
    assert_eq!(refused.error, PostError::ReadOnly);
    assert_eq!(refused.memory.0.sge, ours);
    drop((batch, refused));
    assert_eq!(Arc::strong_count(&alive), 1);
}

/// The device may still write it.
#[test]
fn a_page_that_the_kernel_does_not_take_back_is_leaked() {
    for confirms in [true, false] {
        let mut owned = Owned::new();
        let region = owned
            .bench
            .pd
            .mr_builder()
            .access(Access::LOCAL_WRITE)
            .register(vec![0u8; 64])
            .unwrap();
        let alive = Arc::new(());
        let sge = RegionSge::new(&region, ..).unwrap();
        let mut batch = owned.qp.recv_batch().unwrap();
        batch.push(Page { sge, _alive: alive.clone() }, "x").unwrap();
        batch.ring().unwrap();
        if !confirms {
            let modify = crate::uverbs::scripted::Op::MODIFY_QP;
            owned.bench.script.refuse(modify, crate::Errno::NOMEM);
            owned.bench.script.refuse_destroy(owned.qp.handle(), crate::Errno::NOMEM);
        }
        drop(owned.qp);
        assert_eq!(Arc::strong_count(&alive), if confirms { 1 } else { 2 });
    }
}

#[test]
fn no_part_of_memory_begins_beyond_the_last_address() {
    let bench = Bench::new();
    let sge = Sge { addr: u64::MAX - 9, length: u32::MAX, lkey: crate::Lkey(5) };
    let memory = RegionSge::in_domain(&bench.pd, sge);
    let last = memory.slice(9..11).expect("it begins at the last address");
    assert_eq!((last.sge().addr, last.sge().length), (u64::MAX, 2));
    assert_eq!((memory.slice(10..11), memory.slice(1 << 31..)), (None, None));
}

/// Memory that counts how often it is asked for its bytes.
struct Asked {
    sge: RegionSge,
    times: Arc<AtomicUsize>,
}

// SAFETY: as above.
unsafe impl RegisteredBuffer for Asked {
    fn sge(&self) -> RegionSge {
        self.times.fetch_add(1, Ordering::Relaxed);
        self.sge
    }
}

#[test]
fn memory_of_a_long_list_is_asked_a_few_times() {
    const LENGTH: usize = 100;
    let mut futures = Futures::new();
    let region =
        futures.bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let times = Arc::new(AtomicUsize::new(0));
    let memory = || Asked { sge: RegionSge::new(&region, ..).unwrap(), times: times.clone() };
    let mut list = futures.qp.post_all((0..LENGTH).map(|_| (Transfer::Send, memory())));
    let mut ends = 0;
    while ends < LENGTH {
        while let Poll::Ready(Some(end)) = list.poll_next(&mut cx()) {
            drop(end.unwrap());
            ends += 1;
        }
        if ends < LENGTH {
            futures.complete(Role::Send, WcStatus::SUCCESS);
        }
    }
    // Each completion makes room for one, and the next one is asked, too: not all that wait.
    assert!(times.load(Ordering::Relaxed) <= 8 * LENGTH, "{times:?} for {LENGTH} requests");
    drop(list);
}
