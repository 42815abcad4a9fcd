//! The program's destructors run only when the device has given its memory back. A panic in one of them goes on
//! afterwards, and does not keep the others from running.

use super::Bench;
use super::owned::{bring_up_owned, fresh};
use crate::abort::tests::aborts_in_a_child;
use crate::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair, ScopeError};
use crate::uverbs::scripted::{Op, Role, Script};
use crate::{
    Allocation, DomainView, Errno, QpState, QueueAllocator, ResourceType, SendWr, WcStatus,
};
use std::alloc::Layout;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uverbs_uapi::object::UVERBS_OBJECT_MR;

const SOON: Duration = Duration::from_millis(30);

/// Calls a closure when it is dropped.
struct Tag(Box<dyn Fn() + Send>);

impl Drop for Tag {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn tag(act: impl Fn() + Send + 'static) -> Tag {
    Tag(Box::new(act))
}

/// Panics without a message on standard error.
fn panics() {
    resume_unwind(Box::new("a tag"));
}

struct Tagged {
    bench: Bench,
    pool: BufferPool,
    cq: OwnedCompletionQueue<Tag>,
    qp: OwnedQueuePair<Tag>,
}

impl Tagged {
    fn new() -> Tagged {
        let bench = Bench::new();
        let pool = bench.pd.buffer_pool_builder(64).count(8).build().unwrap();
        let mut cq = OwnedCompletionQueue::new(bench.context.cq_builder(64).build().unwrap());
        let qp = cq.adopt(fresh(&bench, cq.queue())).unwrap();
        bring_up_owned(&bench.script, &qp);
        Tagged { bench, pool, cq, qp }
    }

    /// Forgets a batch of sends with these tags, and one of receives.
    fn forget(&mut self, sends: Vec<Tag>, receives: Vec<Tag>) {
        let mut batch = self.qp.send_batch().unwrap();
        for tag in sends {
            batch.push(SendWr::send(&[]), self.pool.take().unwrap(), tag).unwrap();
        }
        std::mem::forget(batch);
        let mut batch = self.qp.recv_batch().unwrap();
        for tag in receives {
            batch.push(self.pool.take().unwrap(), tag).unwrap();
        }
        std::mem::forget(batch);
    }
}

fn text(end: std::thread::Result<impl Sized>) -> &'static str {
    end.map(drop).unwrap_err().downcast_ref::<&str>().unwrap()
}

/// State of the queue pair and number of regions in the kernel, whenever a tag was dropped.
type Seen = Arc<Mutex<Vec<(u8, usize)>>>;

fn watching(script: &Script, qp: u32, seen: &Seen) -> Tag {
    let (script, seen) = (script.clone(), seen.clone());
    tag(move || {
        let state = script.object(qp).state;
        seen.lock().unwrap().push((state, script.count(UVERBS_OBJECT_MR)));
        panics();
    })
}

/// The peer is silent, so that the scope resets the queue pair.
#[test]
fn a_scope_ends_its_requests_before_it_drops_tags_of_forgotten_batches() {
    for body_panics in [false, true] {
        let mut tagged = Tagged::new();
        let (script, handle) = (tagged.bench.script.clone(), tagged.qp.handle());
        let mut batch = tagged.qp.send_batch().unwrap();
        let others = tag(|| ());
        batch.push(SendWr::send(&[]), tagged.pool.take().unwrap(), others).unwrap();
        batch.ring().unwrap();
        let seen = Seen::default();
        let tags = || (0..2).map(|_| watching(&script, handle, &seen)).collect();
        let regions = script.count(UVERBS_OBJECT_MR);
        tagged.forget(tags(), tags());
        // The forgotten receives would be dropped as soon as the scope posts one.
        let mut local = [0u8; 64];
        let mut buffer = tagged.pool.take().unwrap();
        let Tagged { bench, cq, qp, pool } = &mut tagged;
        let end = catch_unwind(AssertUnwindSafe(|| {
            qp.scope(cq, |scope| {
                scope.drain_timeout(SOON);
                let _ = scope.register(&bench.pd, &mut local).unwrap();
                // Its tags are dropped as soon as the scope needs their slots: before anything is posted.
                let refused = catch_unwind(AssertUnwindSafe(|| scope.recv(()).map(drop)));
                assert_eq!(text(refused), "a tag");
                assert_eq!(seen.lock().unwrap().len(), 2);
                let _ = scope.recv(&mut buffer).unwrap();
                if body_panics {
                    resume_unwind(Box::new("the body"));
                }
            })
            .map(drop)
        }));
        assert_eq!(text(end), if body_panics { "the body" } else { "a tag" });
        assert_eq!(qp.state(), QpState::RESET);
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!(seen[2..], [(QpState::RESET.0, regions); 2], "the kernel had not confirmed");
        let flushed: Vec<_> = cq.poll().unwrap().map(|done| done.outcome.status).collect();
        assert_eq!(flushed, [WcStatus::WR_FLUSH_ERR], "the requests of others");
        assert_eq!((pool.idle(), qp.send_room(), qp.recv_room()), (7, 6, 6));
    }
}

/// The kernel refuses to reset the queue pair, which may still receive into memory that the scope borrowed.
#[test]
#[cfg_attr(miri, ignore = "it starts a process")]
fn a_panicking_tag_does_not_end_a_scope_before_its_requests() {
    const NAME: &str = "tests::destructors::\
                        a_panicking_tag_does_not_end_a_scope_before_its_requests";
    if aborts_in_a_child(NAME, "does not end requests") {
        return;
    }
    let mut tagged = Tagged::new();
    tagged.forget(vec![tag(panics)], vec![]);
    let mut buffer = tagged.pool.take().unwrap();
    let (script, handle) = (tagged.bench.script.clone(), tagged.qp.handle());
    script.refuse(Op::MODIFY_QP, Errno::NOMEM);
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let _ = tagged.qp.scope(&mut tagged.cq, |scope| {
            scope.drain_timeout(SOON);
            scope.recv(&mut buffer).map(drop)
        });
    }));
    unreachable!("{} receives are posted into a free buffer", script.pending(handle, Role::Recv));
}

#[test]
fn a_reset_drops_all_tags_of_forgotten_batches_after_the_kernel_confirmed() {
    let mut tagged = Tagged::new();
    let (script, handle) = (tagged.bench.script.clone(), tagged.qp.handle());
    let seen = Seen::default();
    let tags = || (0..2).map(|_| watching(&script, handle, &seen)).collect();
    tagged.forget(tags(), tags());
    let Tagged { cq, qp, pool, .. } = &mut tagged;
    assert_eq!(text(catch_unwind(AssertUnwindSafe(|| qp.reset(cq)))), "a tag");
    assert!(seen.lock().unwrap().iter().all(|(state, _)| *state == QpState::RESET.0));
    assert_eq!((seen.lock().unwrap().len(), pool.idle()), (4, 8));
    assert_eq!((qp.send_room(), qp.recv_room()), (6, 6));
    assert_eq!(cq.poll().unwrap().count(), 0, "nothing of them was posted");
}

/// The whole batch is taken back.
#[test]
fn a_batch_that_is_dropped_by_a_panic_drops_its_tags_without_a_second_one() {
    let mut tagged = Tagged::new();
    let Tagged { qp, pool, .. } = &mut tagged;
    let end = catch_unwind(AssertUnwindSafe(|| {
        let mut batch = qp.send_batch().unwrap();
        for _ in 0..3 {
            batch.push(SendWr::send(&[]), pool.take().unwrap(), tag(panics)).unwrap();
        }
        resume_unwind(Box::new("the program"));
    }));
    assert_eq!((text(end), pool.idle(), qp.send_room()), ("the program", 8, 6));
}

/// Panics when it is dropped.
#[derive(Debug)]
struct LastWords;

// SAFETY: it returns no memory.
#[allow(unsafe_code)]
unsafe impl QueueAllocator for LastWords {
    fn alloc(&self, _: &DomainView<'_>, _: Layout, _: ResourceType) -> Allocation {
        Allocation::UseDefault
    }

    unsafe fn free(&self, _: &DomainView<'_>, _: NonNull<u8>, _: Layout, _: ResourceType) {}
}

impl Drop for LastWords {
    fn drop(&mut self) {
        resume_unwind(Box::new("the allocator"));
    }
}

/// A region keeps its parent domain, and that an allocator of the program.
#[test]
fn a_panicking_allocator_does_not_keep_a_scope_from_deregistering_memory() {
    let mut tagged = Tagged::new();
    let Tagged { bench, cq, qp, .. } = &mut tagged;
    let domain = bench.pd.parent_domain_builder().allocator(LastWords).build().unwrap();
    let (mut one, mut other) = ([0u8; 64], [0u8; 64]);
    let script = &bench.script;
    let before = script.count(UVERBS_OBJECT_MR);
    let mut kernel = None;
    let end = catch_unwind(AssertUnwindSafe(|| {
        qp.scope(cq, |scope| {
            scope.register(&domain, &mut one).unwrap();
            drop(domain);
            scope.register(&bench.pd, &mut other).unwrap();
            let mut regions =
                script.live().into_iter().filter(|(kind, _)| *kind == UVERBS_OBJECT_MR);
            let region = regions.next_back().unwrap().1;
            script.refuse_destroy(region, Errno::BUSY);
            let script = script.clone();
            kernel = Some(std::thread::spawn(move || {
                std::thread::sleep(SOON);
                script.permit_destroy(region);
            }));
        })
        .map_err(|_: ScopeError<()>| ())
    }));
    assert_eq!((text(end), script.count(UVERBS_OBJECT_MR)), ("the allocator", before));
    kernel.unwrap().join().unwrap();
    assert_eq!(bench.context.leaked(), 0);
}
