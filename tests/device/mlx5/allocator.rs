//! Queue memory from the program's own allocator.

#[cfg(feature = "tokio")]
pub(super) mod futures;

use crate::capability::Capability;
use crate::env::{self, page_size};
use crate::pair::{Config, Pair};
use crate::verdict::{Stop, Verdict, require, supported, trials};
use std::alloc::Layout;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use uverbs::allocator::{Arena, HugePages, NumaNode, Pages, SharedMemory};
use uverbs::{
    Allocation, Context, DomainView, Errno, ObjectKind, ParentDomain, ProtectionDomain, QpType,
    QueueAllocator, ResourceType, SendWr, WcOpcode,
};

trials![
    allocator_is_asked_for_every_buffer,
    queues_work_in_memory_that_was_not_zeroed,
    each_buffer_can_be_left_to_the_library,
    failed_allocation_frees_the_earlier_ones,
    misaligned_memory_is_refused,
    domains_that_share_an_allocator_are_told_apart,
    deep_queue_pair_asks_for_more_than_a_page,
    panicking_allocator_leaves_nothing,
    resize_asks_the_allocator_again,
    memory_is_freed_after_its_object,
    pages_carry_traffic,
    memory_of_a_node_carries_traffic,
    huge_pages_carry_traffic,
    an_arena_carries_traffic,
    an_arena_of_huge_pages_carries_traffic,
    shared_memory_carries_traffic,
    dma_bufs_carry_traffic,
];

const KINDS: [ResourceType; 4] =
    [ResourceType::MLX5_QP, ResourceType::MLX5_DBR, ResourceType::MLX5_SRQ, ResourceType::MLX5_CQ];

/// The behaviour of the allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mood {
    /// Returns memory full of garbage.
    #[default]
    Give,
    /// Leaves buffers of this type to the library.
    Leave(ResourceType),
    /// Fails, or panics, at this call, counted from 1.
    Fail(usize),
    Panic(usize),
    /// Returns memory that begins 4 bytes too late.
    Shift(ResourceType),
    /// Takes nothing back.
    PanicInFree,
}

#[derive(Debug, Default)]
struct Log {
    mood: Mood,
    asked: Vec<(ResourceType, usize, usize)>,
    /// Address, layout, type, and the number of the domain.
    lent: Vec<(usize, Layout, ResourceType, u64)>,
    freed: usize,
    complaints: Vec<String>,
    /// The context whose objects are counted when memory comes back.
    context: Option<Context>,
}

/// An allocator that records every call.
#[derive(Debug, Default)]
struct Watched {
    pages: Pages,
    log: Mutex<Log>,
}

impl Watched {
    fn log<T>(&self, look: impl FnOnce(&mut Log) -> T) -> T {
        look(&mut self.log.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the behaviour, and clears the log.
    fn set(&self, mood: Mood) {
        self.log(|log| {
            log.mood = mood;
            log.asked.clear();
        });
    }

    /// Everything came back, once.
    #[track_caller]
    fn settle(&self) {
        self.log(|log| {
            assert_eq!(log.lent, [], "memory that was not given back");
            assert_eq!(log.complaints, [""; 0]);
        });
        assert_eq!(self.pages.buffers(), 0);
    }
}

#[allow(unsafe_code, reason = "an allocator promises that its memory is there")]
// SAFETY: the memory is that of `Pages`, at most moved by 4 bytes, and kept until it comes back.
unsafe impl QueueAllocator for Watched {
    fn alloc(&self, domain: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation {
        let (size, align) = (layout.size(), layout.align());
        let (mood, nth) = self.log(|log| {
            log.asked.push((resource, size, align));
            (log.mood, log.asked.len())
        });
        let shift = match mood {
            Mood::Leave(left) if left == resource => return Allocation::UseDefault,
            Mood::Fail(n) if n == nth => return Allocation::Failed,
            Mood::Panic(n) if n == nth => panic!("as the test wants it"),
            Mood::Shift(kind) if kind == resource => 4,
            _ => 0,
        };
        let Ok(larger) = Layout::from_size_align(size + shift, align) else {
            return Allocation::Failed;
        };
        let Allocation::Memory(memory) = self.pages.alloc(domain, larger, resource) else {
            return Allocation::Failed;
        };
        // SAFETY: the pages have room for this.
        unsafe { memory.as_ptr().write_bytes(0xa5, size + shift) };
        // SAFETY: `shift` is within the memory.
        let memory = unsafe { memory.add(shift) };
        let lent = (memory.as_ptr() as usize, layout, resource, domain.pd_context());
        self.log(|log| log.lent.push(lent));
        Allocation::Memory(memory)
    }

    unsafe fn free(
        &self,
        domain: &DomainView<'_>,
        memory: NonNull<u8>,
        layout: Layout,
        resource: ResourceType,
    ) {
        let address = memory.as_ptr() as usize;
        let (mood, context) = self.log(|log| {
            log.freed += 1;
            let back = (address, layout, resource, domain.pd_context());
            match log.lent.iter().position(|lent| *lent == back) {
                Some(at) => drop(log.lent.remove(at)),
                None => log.complaints.push(format!("{resource} at {address:#x} was not lent")),
            }
            (log.mood, log.context.clone())
        });
        if mood == Mood::PanicInFree {
            panic!("as the test wants it");
        }
        if let Some(context) = context {
            let kind = match resource {
                ResourceType::MLX5_QP => Some(ObjectKind::QP),
                ResourceType::MLX5_SRQ => Some(ObjectKind::SRQ),
                ResourceType::MLX5_CQ => Some(ObjectKind::CQ),
                _ => None,
            };
            let alive = kind.map_or(0, |kind| context.handles(kind).map_or(0, |list| list.len()));
            if alive > 0 {
                self.log(|log| log.complaints.push(format!("{resource} freed before its object")));
            }
        }
        let base = address / page_size() * page_size();
        let base = NonNull::new(memory.as_ptr().with_addr(base)).expect("pages are not at 0");
        // SAFETY: the pages answered this address, or one 4 bytes behind it in the same page.
        unsafe { self.pages.free(domain, base, layout, resource) };
    }
}

fn domain(pd: &ProtectionDomain, watched: &Arc<Watched>) -> uverbs::Result<ParentDomain> {
    pd.parent_domain_builder().allocator(watched.clone()).build()
}

/// A completion queue, a shared receive queue and a queue pair of each kind of receives.
fn make_all(context: &Context, domain: &ParentDomain) -> uverbs::Result<()> {
    let cq = context.cq_builder(100).parent_domain(domain).build()?;
    let srq = domain.srq_builder(50).max_sge(2).build()?;
    let qp = domain.qp_builder(&cq, &cq, QpType::RC).max_send_wr(20).max_recv_wr(40).build()?;
    let shared = domain.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
    drop((qp, shared));
    Ok(())
}

fn allocator_is_asked_for_every_buffer() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain = domain(&pd, &watched)?;
    make_all(&context, &domain)?;
    let asked = watched.log(|log| std::mem::take(&mut log.asked));
    let kinds: Vec<_> = asked.iter().map(|(kind, ..)| *kind).collect();
    let [qp, dbr, srq, cq] = KINDS;
    assert_eq!(kinds, [cq, dbr, srq, dbr, qp, dbr, qp, dbr]);
    for (kind, size, align) in asked {
        assert!(align.is_power_of_two(), "{kind}: {size} at {align}");
        match kind {
            ResourceType::MLX5_DBR => assert_eq!((size, align), (8, 8)),
            ResourceType::MLX5_CQ => assert_eq!(
                (size, align),
                ((128 * 64usize).next_multiple_of(page_size()), page_size())
            ),
            ResourceType::MLX5_SRQ => assert_eq!((size, align), (64 * 64, page_size())),
            // Receives of 16 bytes, sends in blocks of 64; rounded to the alignment.
            _ => assert!(size % align == 0 && align >= 64 && size >= 4096 / 64, "{size} {align}"),
        }
    }
    watched.settle();
    // A completion queue that names no domain does not use the allocator.
    drop(context.cq_builder(10).build()?);
    assert_eq!(watched.log(|log| log.asked.len()), 0);
    Ok(())
}

fn traffic(allocator: &Arc<Watched>) -> Verdict {
    super::open()?;
    for config in [
        Config::rc(),
        Config { srq: true, ..Config::rc() },
        Config { depth: 3, cqe: 3, sges: 1, ..Config::uc() },
        Config::ud(),
    ] {
        let mut pair = Pair::within(config, &|pd| domain(pd, allocator))?;
        // Around each queue several times.
        for seed in 0..100 {
            pair.message(seed, 100)?;
        }
        pair.a.expect_silence()?;
    }
    Ok(())
}

fn queues_work_in_memory_that_was_not_zeroed() -> Verdict {
    let watched = Arc::new(Watched::default());
    traffic(&watched)?;
    watched.settle();
    assert!(watched.log(|log| log.freed) >= 4 * 2 * 4);
    Ok(())
}

fn each_buffer_can_be_left_to_the_library() -> Verdict {
    for kind in KINDS {
        let watched = Arc::new(Watched::default());
        watched.set(Mood::Leave(kind));
        traffic(&watched)?;
        watched.settle();
        watched.log(|log| {
            let left = log.asked.iter().filter(|(asked, ..)| *asked == kind).count();
            assert_eq!(log.freed, log.asked.len() - left, "{kind}");
            assert!(left > 0, "{kind}");
        });
    }
    Ok(())
}

fn failed_allocation_frees_the_earlier_ones() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain = domain(&pd, &watched)?;
    make_all(&context, &domain)?;
    let count = watched.log(|log| log.asked.len());
    for nth in 1..=count {
        watched.set(Mood::Fail(nth));
        let error = make_all(&context, &domain).unwrap_err();
        assert_eq!(error.errno(), Errno::NOMEM, "{error}");
        assert!(error.message().contains("allocator"), "{error}");
        watched.settle();
        for kind in [ObjectKind::QP, ObjectKind::CQ, ObjectKind::SRQ] {
            assert_eq!(context.handles(kind)?, [0u32; 0], "{kind}");
        }
    }
    // Freed memory can be used again.
    watched.set(Mood::Give);
    make_all(&context, &domain)?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn misaligned_memory_is_refused() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain = domain(&pd, &watched)?;
    for kind in KINDS {
        watched.set(Mood::Shift(kind));
        let error = make_all(&context, &domain).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert!(error.message().contains(&kind.to_string()), "{error}");
        assert!(error.message().contains("multiple of"), "{error}");
        watched.settle();
    }
    Ok(())
}

/// Memory comes back under the number of the domain that asked for it; [`Watched`] compares.
fn domains_that_share_an_allocator_are_told_apart() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain =
        |number| pd.parent_domain_builder().pd_context(number).allocator(watched.clone()).build();
    let (one, other, unnumbered) = (domain(7)?, domain(8)?, self::domain(&pd, &watched)?);
    let asking = |domain: &ParentDomain| -> Verdict<u64> {
        let cq = context.cq_builder(10).parent_domain(domain).build()?;
        let numbers: Vec<u64> = watched.log(|log| log.lent.iter().map(|lent| lent.3).collect());
        drop(cq);
        assert_eq!(numbers.len(), 2, "a queue and its doorbell record");
        assert_eq!(numbers[0], numbers[1]);
        Ok(numbers[0])
    };
    assert_eq!((asking(&one)?, asking(&other)?, asking(&unnumbered)?), (7, 8, 0));
    watched.settle();
    Ok(())
}

/// The alignment that the documentation of [`QueueAllocator`] states.
fn deep_queue_pair_asks_for_more_than_a_page() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain = domain(&pd, &watched)?;
    let cq = context.cq_builder(1).build()?;
    for depth in [64, 1024, 8192] {
        watched.set(Mood::Give);
        let qp = domain.qp_builder(&cq, &cq, QpType::RC).max_send_wr(depth).build()?;
        let asked = watched.log(|log| log.asked.clone());
        let (_, size, align) = asked[0];
        assert_eq!(asked[0].0, ResourceType::MLX5_QP);
        let pages = size.next_power_of_two().max(page_size());
        assert_eq!(align, (pages / 64).max(64), "{depth}: {size}");
        // Of a page of 4 KiB.
        assert_eq!(align > 4096, depth > 64, "{size} at {align}");
        drop(qp);
        watched.settle();
    }
    Ok(())
}

fn panicking_allocator_leaves_nothing() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    let pd = context.alloc_pd()?;
    let domain = domain(&pd, &watched)?;
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for nth in 1..=8 {
        watched.set(Mood::Panic(nth));
        let thrown = catch_unwind(AssertUnwindSafe(|| make_all(&context, &domain)));
        assert!(thrown.is_err(), "the panic came to nobody");
        watched.settle();
    }
    assert_eq!((context.handles(ObjectKind::QP)?, context.leaked()), (vec![], 0));
    // A panic in `free` reaches no caller, so it is counted.
    watched.set(Mood::PanicInFree);
    let made = make_all(&context, &domain);
    std::panic::set_hook(hook);
    made?;
    assert_eq!(context.leaked(), 8);
    watched.log(|log| assert_eq!((log.lent.len(), &log.complaints), (0, &vec![])));
    Ok(())
}

fn resize_asks_the_allocator_again() -> Verdict {
    super::open()?;
    let watched = Arc::new(Watched::default());
    let mut pair = Pair::within(Config::rc(), &|pd| domain(pd, &watched))?;
    for (round, cqe) in [300, 10, 1000].into_iter().enumerate() {
        let seed = 10 * round as u64;
        // The queue has completions when it moves.
        for n in 0..5 {
            pair.b.recv(seed + n, 0..8)?;
            pair.a.send(SendWr::send(&[]).id(seed + n).signaled())?;
            pair.a.expect(seed + n, WcOpcode::SEND)?;
        }
        let before = watched.log(|log| {
            log.asked.clear();
            log.freed
        });
        pair.b.cq.resize(cqe)?;
        watched.log(|log| {
            let (size, page) = ((cqe as usize + 1).next_power_of_two() * 64, page_size());
            let expected = (ResourceType::MLX5_CQ, size.next_multiple_of(page), page);
            assert_eq!(log.asked, [expected]);
            assert_eq!(log.freed, before + 1, "the old memory is given back, and no other");
        });
        for n in 0..5 {
            pair.b.expect(seed + n, WcOpcode::RECV)?;
        }
        pair.message(99, 1000)?;
    }
    watched.set(Mood::Fail(1));
    let error = pair.b.cq.resize(77).unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    pair.message(100, 1000)?;
    drop(pair);
    watched.settle();
    Ok(())
}

fn memory_is_freed_after_its_object() -> Verdict {
    let context = super::open()?;
    let watched = Arc::new(Watched::default());
    watched.log(|log| log.context = Some(context.clone()));
    let pd = context.alloc_pd()?;
    let domain = domain(&pd, &watched)?;
    let cq = context.cq_builder(100).parent_domain(&domain).build()?;
    let srq = domain.srq_builder(50).build()?;
    let qp = domain.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
    // Objects made in the domain keep it.
    let (domain, error) = domain.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop((domain, pd));
    let lent = watched.log(|log| log.lent.len());
    assert_eq!(lent, 6);
    // The queue pair still holds both queues: nothing is freed.
    drop((cq, srq));
    assert_eq!(watched.log(|log| log.freed), 0);
    qp.destroy()?;
    watched.settle();
    watched.log(|log| log.context = None);
    Ok(())
}

/// Messages through queues in memory of `allocator`.
fn carries<A: QueueAllocator>(allocator: &Arc<A>) -> Verdict<Pair> {
    super::open()?;
    let extend =
        |pd: &ProtectionDomain| pd.parent_domain_builder().allocator(allocator.clone()).build();
    let mut pair = Pair::within(Config { srq: true, ..Config::rc() }, &extend)?;
    for seed in 0..50 {
        pair.message(seed, 1000)?;
    }
    Ok(pair)
}

fn pages_carry_traffic() -> Verdict {
    let pages = Arc::new(Pages::new());
    let pair = carries(&pages)?;
    assert_eq!(pages.buffers(), 2 * 6);
    drop(pair);
    assert_eq!(pages.buffers(), 0);
    Ok(())
}

fn memory_of_a_node_carries_traffic() -> Verdict {
    let node = Arc::new(NumaNode::new(0));
    let pair = carries(&node)?;
    assert_eq!(node.buffers(), 2 * 6);
    drop(pair);
    assert_eq!(node.buffers(), 0);
    // No machine has so many nodes.
    let context = super::open()?;
    let nowhere =
        context.alloc_pd()?.parent_domain_builder().allocator(NumaNode::new(1000)).build()?;
    let error = context.cq_builder(1).parent_domain(&nowhere).build().unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    Ok(())
}

fn huge_pages_carry_traffic() -> Verdict {
    let context = super::open()?;
    let before = env::free_pages_of_2_mib();
    // Three buffers of each side; doorbell records are left to the library.
    require(before >= 2 * 3, Capability::HugePages, "none, or few, are set aside")?;
    let huge = Arc::new(HugePages::new());
    let pair = carries(&huge)?;
    assert_eq!(huge.buffers(), 2 * 3);
    assert_eq!(env::free_pages_of_2_mib(), before - 2 * 3);
    drop(pair);
    assert_eq!((huge.buffers(), env::free_pages_of_2_mib()), (0, before));
    // If none is left, the allocator fails, or falls back to ordinary pages if that was allowed.
    let pd = context.alloc_pd()?;
    let greedy = pd.parent_domain_builder().allocator(HugePages::of(34)?).build()?;
    let error = context.cq_builder(1).parent_domain(&greedy).build().unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    let modest = pd.parent_domain_builder().allocator(HugePages::of(34)?.or_default()).build()?;
    context.cq_builder(1).parent_domain(&modest).build()?;
    Ok(())
}

fn an_arena_carries_traffic() -> Verdict {
    let arena = Arc::new(Arena::new(1 << 20)?);
    let pair = carries(&arena)?;
    assert_eq!(arena.buffers(), 2 * 6);
    let used = arena.used();
    assert!(used > 0 && used < arena.len());
    // It fails when it is used up, and nothing is lost by that.
    let context = super::open()?;
    let domain = context.alloc_pd()?.parent_domain_builder().allocator(arena.clone()).build()?;
    let error = context.cq_builder(1 << 14).parent_domain(&domain).build().unwrap_err();
    assert_eq!((error.errno(), arena.used()), (Errno::NOMEM, used));
    drop(pair);
    assert_eq!(arena.used(), 0);
    Ok(())
}

fn an_arena_of_huge_pages_carries_traffic() -> Verdict {
    let before = env::free_pages_of_2_mib();
    require(before >= 1, Capability::HugePages, "none is set aside")?;
    // All queues and doorbell records of both sides are in one page.
    let arena = Arc::new(Arena::huge_pages(1)?);
    assert_eq!(arena.len(), 2 << 20);
    let pair = carries(&arena)?;
    assert_eq!((arena.buffers(), env::free_pages_of_2_mib()), (2 * 6, before - 1));
    drop(pair);
    assert_eq!(arena.used(), 0);
    drop(arena);
    assert_eq!(env::free_pages_of_2_mib(), before);
    let error = Arena::huge_pages(usize::try_from(1u64 << 40).unwrap_or(1 << 31)).unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    assert!(error.message().contains("nr_hugepages"), "{error}");
    Ok(())
}

fn shared_memory_carries_traffic() -> Verdict {
    let shared = Arc::new(SharedMemory::new());
    let pair = carries(&shared)?;
    let buffers = shared.buffers()?;
    assert_eq!(buffers.len(), 2 * 6);
    // The file of shared memory shows the CQEs that the device wrote.
    let cq = buffers.iter().find(|buffer| buffer.resource == ResourceType::MLX5_CQ);
    let cq = cq.expect("the memory of a completion queue");
    let mut bytes = vec![0u8; cq.length];
    let read = rustix::io::pread(&cq.file, bytes.as_mut_slice(), 0)?;
    assert_eq!(read, cq.length);
    assert!(bytes.chunks(64).any(|entry| entry[63] >> 4 == 0), "no completion of a request");
    drop(pair);
    assert_eq!(shared.buffers()?.len(), 0);
    Ok(())
}

fn dma_bufs_carry_traffic() -> Verdict {
    let context = super::open()?;
    let made = match SharedMemory::dmabufs() {
        Ok(made) => Arc::new(made),
        Err(error) => {
            assert!(matches!(error.errno(), Errno::NOENT | Errno::NODEV), "{error}");
            return Err(Stop::Skip(Capability::Udmabuf, error.to_string()));
        }
    };
    let pd = context.alloc_pd()?;
    let domain = pd.parent_domain_builder().allocator(made.clone()).build()?;
    match context.cq_builder(10).parent_domain(&domain).build() {
        Ok(cq) => drop(cq),
        Err(error) => {
            // A kernel without dma-buf queues must refuse with a reason, and leave nothing behind.
            assert!(error.message().contains("dma-bufs"), "{error}");
            assert_eq!(made.buffers()?.len(), 0);
            let cq = context.cq_builder(10).build()?;
            let refused = domain.qp_builder(&cq, &cq, QpType::RC).build().unwrap_err();
            assert_eq!(refused.errno(), Errno::OPNOTSUPP, "{refused}");
            assert!(refused.message().contains("dma-bufs"), "{refused}");
            assert_eq!((made.buffers()?.len(), context.leaked()), (0, 0));
            return supported(Err(error), Capability::DmabufQueues);
        }
    }
    let mut pair = carries(&made)?;
    assert_eq!(made.buffers()?.len(), 2 * 6);
    // Queues that no dma-buf can hold, as the kernel demands an address: a large queue pair, and a resized queue.
    let cq = context.cq_builder(10).parent_domain(&domain).build()?;
    let large = domain.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4000).max_recv_wr(4000);
    drop(large.build()?);
    pair.b.cq.resize(300)?;
    pair.message(99, 1000)?;
    drop((pair, cq));
    assert_eq!((made.buffers()?.len(), context.leaked()), (0, 0));
    Ok(())
}
