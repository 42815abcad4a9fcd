//! Contexts, doorbell registers and queue memory of mlx5, on a device of a fabric whose kernel is scripted.

use crate::uverbs::scripted::{Op, Script};
use crate::{
    AddressVector, Allocation, CompletionQueue, Context, DmaBufPart, DomainView, Errno, Gid,
    ParentDomain, ProtectionDomain, QpControl, QpType, QueueAllocator, QueuePair, ResourceType,
    Result, SharedReceiveQueue,
};
use rustix::param::page_size;
use std::alloc::Layout;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use uverbs_uapi::buffer::{ib_uverbs_buffer_desc, ib_uverbs_buffer_type};
use uverbs_uapi::cq::{
    UVERBS_ATTR_CREATE_CQ_BUF_UMEM, UVERBS_ATTR_CREATE_CQ_CQE, ib_uverbs_resize_cq,
};
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_IN, UVERBS_METHOD_QUERY_GID_ENTRY, UVERBS_METHOD_QUERY_PORT,
};
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_cq, mlx5_ib_create_qp};
use uverbs_uapi::mlx5::context::mlx5_ib_alloc_ucontext_resp;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX,
    MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM, MLX5_IB_OBJECT_UAR,
};
use uverbs_uapi::mlx5::uar::MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID;
use uverbs_uapi::object as objects;
use uverbs_uapi::qp::UVERBS_ATTR_CREATE_QP_BUF_UMEM;

#[test]
fn a_context_is_opened_without_devx_if_the_kernel_refuses_it() {
    let script = Script::mlx5();
    script.grant_devx();
    let attr = crate::mlx5::query_device(&script.open("mlx5_0")).unwrap();
    assert_eq!(attr.devx(), Some(true));
    let script = Script::mlx5();
    let attr = crate::mlx5::query_device(&script.open("mlx5_0")).unwrap();
    assert_eq!(attr.devx(), Some(false));
    assert_eq!(attr.blueflame_bytes(), 256);
    let tries = script.log().iter().filter(|op| **op == Op::GET_CONTEXT).count();
    assert_eq!(tries, 2);
}

#[test]
fn an_unsupported_device_is_refused_with_the_reason() {
    let refusals: [(fn(&mut mlx5_ib_alloc_ucontext_resp), _); 3] = [
        (|context| context.tot_bfregs = 16, "16 registers"),
        (|context| context.cqe_version = 0, "CQEs of version 0"),
        (|context| context.num_uars_per_page = 0, "0 UARs"),
    ];
    for (change, text) in refusals {
        let script = Script::mlx5();
        script.forge(Op::GET_CONTEXT, objects::UVERBS_ATTR_UHW_OUT, change);
        let error = script.try_open("mlx5_0").unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains(text), "{error}");
        assert_eq!(script.left_at_close(), Some(vec![]));
    }
}

#[test]
fn opening_fails_at_every_step_without_a_trace() {
    // The context, its event file, the limits, a page of registers and its mapping.
    for step in 1..=5 {
        let script = Script::mlx5();
        // The first try is refused anyway.
        script.fail_step(step + 1, Errno::NOMEM);
        let error = script.try_open("mlx5_0").unwrap_err();
        assert_eq!(error.errno(), Errno::NOMEM, "step {step}: {error}");
        assert_eq!(script.left_at_close(), Some(vec![]), "step {step}");
        assert_eq!(script.mappings(), 0);
    }
}

/// The parent domain's number, that of its protection domain, and the device.
type Asker = (u64, u32, String);

fn asker(view: &DomainView<'_>) -> Asker {
    (view.pd_context(), view.handle(), view.device().to_string())
}

/// An allocator that records its lent buffers.
#[derive(Debug, Default)]
struct Counted {
    lent: AtomicUsize,
    freed: AtomicUsize,
    /// Address and layout of each buffer, its resource type, and the domain that asked.
    boxes: Mutex<Vec<(usize, Layout, ResourceType, Asker)>>,
    /// The freed buffers, oldest first.
    back: Mutex<Vec<ResourceType>>,
}

impl Counted {
    fn outstanding(&self) -> usize {
        self.lent.load(Ordering::Relaxed) - self.freed.load(Ordering::Relaxed)
    }
}

// SAFETY: the memory has the requested size and alignment, and belongs to the caller until it is
// freed; no device uses it.
#[allow(unsafe_code)]
unsafe impl QueueAllocator for Counted {
    fn alloc(&self, view: &DomainView<'_>, layout: Layout, resource: ResourceType) -> Allocation {
        // SAFETY: no buffer has 0 bytes.
        let Some(memory) = NonNull::new(unsafe { std::alloc::alloc(layout) }) else {
            return Allocation::Failed;
        };
        // SAFETY: just allocated.
        unsafe { memory.as_ptr().write_bytes(0xa5, layout.size()) };
        let lent = (memory.as_ptr() as usize, layout, resource, asker(view));
        self.boxes.lock().unwrap().push(lent);
        self.lent.fetch_add(1, Ordering::Relaxed);
        Allocation::Memory(memory)
    }

    unsafe fn free(
        &self,
        view: &DomainView<'_>,
        memory: NonNull<u8>,
        layout: Layout,
        resource: ResourceType,
    ) {
        self.back.lock().unwrap().push(resource);
        let mut boxes = self.boxes.lock().unwrap();
        let at = boxes.iter().position(|(address, ..)| *address == memory.as_ptr() as usize);
        let (_, lent, kind, of) = boxes.remove(at.expect("memory that was lent"));
        let back = (layout, resource, asker(view));
        assert_eq!((lent, kind, of), back, "memory comes back as it was asked for");
        // SAFETY: allocated above with this layout.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) struct Bench {
    pub(super) script: Script,
    pub(super) context: Context,
    pub(super) domain: ParentDomain,
    pd: ProtectionDomain,
    memory: Arc<Counted>,
}

impl Bench {
    pub(super) fn new() -> Bench {
        let script = Script::mlx5();
        let context = script.open("mlx5_0");
        let pd = context.alloc_pd().unwrap();
        let memory = Arc::new(Counted::default());
        let domain = pd.parent_domain_builder().allocator(memory.clone()).build().unwrap();
        Bench { script, context, domain, pd, memory }
    }

    /// The address and the size of each buffer that the allocator lent for these resources, oldest first.
    pub(super) fn buffers(&self, of: ResourceType) -> Vec<(u64, usize)> {
        let boxes = self.memory.boxes.lock().unwrap();
        let buffers = boxes.iter().filter(|(_, _, kind, _)| *kind == of);
        buffers.map(|(address, layout, ..)| (*address as u64, layout.size())).collect()
    }

    /// Four objects, with two buffers each.
    fn make(&self) -> Result<([QueuePair; 2], SharedReceiveQueue, CompletionQueue)> {
        let cq = self.context.cq_builder(10).parent_domain(&self.domain).build()?;
        let srq = self.domain.srq_builder(10).build()?;
        let own = self.domain.qp_builder(&cq, &cq, QpType::RC).build()?;
        let shared = self.domain.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
        Ok(([own, shared], srq, cq))
    }
}

#[test]
fn creation_that_fails_at_any_step_gives_everything_back() {
    let bench = Bench::new();
    // Doorbell registers stay with the context: allocates them before counting.
    drop(bench.make().unwrap());
    let (live, mappings) = (bench.script.live(), bench.script.mappings());
    for errno in [Errno::NOMEM, Errno::IO, Errno::AGAIN] {
        for step in 1.. {
            bench.script.fail_step(step, errno);
            let error = match bench.make() {
                Err(error) => error,
                Ok(_made) => {
                    assert!(bench.script.cancel_failure());
                    assert_eq!(step, 5, "there are four commands");
                    break;
                }
            };
            assert_eq!(error.errno(), errno);
            assert_eq!(bench.memory.outstanding(), 0, "step {step}");
            assert_eq!((bench.script.live(), bench.script.mappings()), (live.clone(), mappings));
        }
    }
    assert_eq!(bench.context.leaked(), 0);
    assert_eq!(bench.script.complaints(), [""; 0]);
}

#[test]
fn a_queue_that_has_the_size_already_stays_where_the_device_writes() {
    let bench = Bench::new();
    let mut cq = bench.context.cq_builder(10).parent_domain(&bench.domain).build().unwrap();
    let lent = || bench.memory.lent.load(Ordering::Relaxed);
    // The device writes to memory that the allocator did not get back.
    let kept = |cq: &CompletionQueue| {
        let start = bench.script.told::<u64>(cq.handle()) as usize;
        bench.memory.boxes.lock().unwrap().iter().any(|(address, ..)| *address == start)
    };
    let before = lent();
    for cqe in [10, 15, 8, 10] {
        cq.resize(cqe).unwrap();
        assert!(kept(&cq), "resized to {cqe}");
        assert_eq!((lent(), bench.memory.outstanding(), cq.capacity()), (before, 2, 15));
    }
    for (cqe, capacity) in [(16, 31), (31, 31), (3, 3), (10, 15)] {
        cq.resize(cqe).unwrap();
        assert!(kept(&cq), "resized to {cqe}");
        assert_eq!((bench.memory.outstanding(), cq.capacity()), (2, capacity));
        let told = bench.script.attribute(Op::RESIZE_CQ, UVERBS_ATTR_CORE_IN);
        assert_eq!(told.map(|request: ib_uverbs_resize_cq| request.cqe), Some(capacity));
    }
    assert_eq!(lent(), before + 3, "one for each that moved");
}

#[test]
fn the_doorbell_record_is_freed_before_the_queue() {
    let bench = Bench::new();
    let back = || std::mem::take(&mut *bench.memory.back.lock().unwrap());
    let record = |queue| [ResourceType::MLX5_DBR, queue];
    let (qps, srq, cq) = bench.make().unwrap();
    drop(qps);
    let qp = ResourceType::MLX5_QP;
    assert_eq!(back(), [record(qp), record(qp)].concat());
    drop(srq);
    assert_eq!(back(), record(ResourceType::MLX5_SRQ));
    drop(cq);
    assert_eq!(back(), record(ResourceType::MLX5_CQ));
    let ([one, other], srq, cq) = bench.make().unwrap();
    one.destroy().unwrap();
    other.destroy().unwrap();
    assert_eq!(back(), [record(qp), record(qp)].concat());
    srq.destroy().unwrap();
    cq.destroy().unwrap();
    let both = [record(ResourceType::MLX5_SRQ), record(ResourceType::MLX5_CQ)].concat();
    assert_eq!(back(), both);
    // Also when the creation of the object fails.
    for (step, queue) in [(1, ResourceType::MLX5_CQ), (2, ResourceType::MLX5_SRQ), (3, qp)] {
        bench.script.fail_step(step, Errno::NOMEM);
        bench.make().unwrap_err();
        assert_eq!(back()[..2], record(queue));
    }
}

#[test]
fn memory_of_a_queue_that_the_kernel_keeps_is_never_freed() {
    let bench = Bench::new();
    let ([own, qp], srq, cq) = bench.make().unwrap();
    drop(own);
    assert_eq!(bench.memory.outstanding(), 6, "two of each");
    bench.script.refuse_destroy(qp.handle(), Errno::BUSY);
    // An explicit `destroy` returns the error, and changes nothing.
    let (qp, error) = qp.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), bench.memory.outstanding()), (Errno::BUSY, 6));
    bench.script.refuse_destroy(srq.handle(), Errno::IO);
    drop((qp, srq, cq));
    // The scripted kernel destroys the completion queue only if no object depends on it.
    assert_eq!(bench.context.leaked(), 3);
    assert_eq!(bench.memory.outstanding(), 6);
    assert_eq!(bench.script.count(objects::UVERBS_OBJECT_QP), 1);
}

/// Raw packet queue pairs have their send and receive queues in separate memory.
#[test]
fn memory_of_raw_packets_stays_as_long_as_the_kernel_has_them() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let make =
        || bench.domain.qp_builder(&cq, &cq, QpType::RAW_PACKET).max_recv_wr(4).build().unwrap();
    let qp = make();
    assert_eq!(bench.memory.outstanding(), 3, "two queues and a doorbell record");
    drop(qp);
    assert_eq!(bench.memory.outstanding(), 0);
    let qp = make();
    bench.script.refuse_destroy(qp.handle(), Errno::BUSY);
    drop(qp);
    assert_eq!((bench.memory.outstanding(), bench.context.leaked()), (3, 1));
}

/// A receive WQE across two pages of the device would be written in part elsewhere.
#[test]
fn queues_begin_at_a_multiple_of_a_receive_s_size() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    for (sges, stride) in [(1, 16), (5, 128), (32, 512)] {
        let builder = bench.domain.qp_builder(&cq, &cq, QpType::RC).max_recv_sge(sges);
        let qp = builder.build().unwrap();
        let layouts = bench.memory.boxes.lock().unwrap();
        let queues = layouts.iter().find(|(.., kind, _)| *kind == ResourceType::MLX5_QP).unwrap();
        assert!(queues.1.align() >= stride, "{sges} SGEs: {:?}", queues.1);
        drop(layouts);
        drop(qp);
    }
}

#[test]
fn memory_of_a_device_that_is_gone_is_freed() {
    let bench = Bench::new();
    let made = bench.make().unwrap();
    bench.script.vanish();
    drop(made);
    assert_eq!((bench.memory.outstanding(), bench.context.leaked()), (0, 0));
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_child_frees_nothing() {
    let bench = Bench::new();
    let made = bench.make().unwrap();
    let freed = bench.memory.freed.load(Ordering::Relaxed);
    let mut made = Some(made);
    crate::sync::fork::in_child(|| {
        drop(made.take());
        assert_eq!(bench.memory.freed.load(Ordering::Relaxed), freed);
    });
    drop(made);
    assert_eq!(bench.memory.outstanding(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_poll_begun_before_a_fork_finds_nothing_in_the_child() {
    use crate::allocator::{Arena, Pages, SharedMemory};
    let bench = Bench::new();
    let builder = || bench.pd.parent_domain_builder();
    let arena = Arena::new(1 << 20).unwrap();
    let domains = [
        builder().allocator(Pages::new()).build().unwrap(),
        builder().allocator(arena).build().unwrap(),
        builder().allocator(SharedMemory::new()).build().unwrap(),
        builder().build().unwrap(),
    ];
    for domain in &domains {
        let mut cq = bench.context.cq_builder(10).parent_domain(domain).build().unwrap();
        let mut guard = Some(cq.poll().unwrap());
        crate::sync::fork::in_child(|| {
            assert!(guard.as_mut().unwrap().next().is_none());
            drop(guard.take());
        });
    }
}

/// An allocator belongs to the process that made it. Another thread may hold its lock during the
/// fork, so the child must not wait for it.
#[test]
#[cfg_attr(miri, ignore = "it forks")]
#[allow(unsafe_code, reason = "memory is given back by hand")]
fn a_child_gets_nothing_from_its_parents_allocators() {
    use crate::allocator::{Arena, HugePages, NumaNode, Pages, SharedMemory};
    let bench = Bench::new();
    let view = DomainView { domain: &*bench.pd.inner.kernel, pd_context: 0 };
    let (arena, pages, shared) = (Arena::new(1 << 20).unwrap(), Pages::new(), SharedMemory::new());
    let (huge, numa) = (HugePages::new(), NumaNode::new(0));
    let allocators: [&dyn QueueAllocator; 3] = [&arena, &pages, &shared];
    let layout = Layout::from_size_align(64, 64).unwrap();
    let ask = |of: &dyn QueueAllocator| of.alloc(&view, layout, ResourceType::MLX5_CQ);
    let lent = allocators.map(ask);
    assert!(lent.iter().all(|answer| matches!(answer, Allocation::Memory(_))), "{lent:?}");
    let counts =
        || [arena.buffers(), pages.buffers(), huge.buffers(), numa.buffers(), arena.used()];
    assert_eq!(counts(), [1, 1, 0, 0, 64]);
    crate::sync::fork::in_child(|| {
        assert_eq!(allocators.map(ask), [Allocation::Failed; 3]);
        assert_eq!(counts(), [0; 5]);
        assert!(shared.buffers().unwrap_err().is_forked());
    });
    assert_eq!(shared.buffers().unwrap().len(), 1);
    for (of, answer) in allocators.iter().zip(lent) {
        let Allocation::Memory(memory) = answer else { continue };
        // SAFETY: the allocator just returned it.
        unsafe { of.free(&view, memory, layout, ResourceType::MLX5_CQ) };
    }
    assert_eq!(counts(), [0; 5]);
}

/// After some errors of a resize it is unknown whether the device uses the old or the new memory.
#[test]
fn memory_of_a_resize_in_doubt_stays_until_the_queue_is_gone() {
    let bench = Bench::new();
    let make = || bench.context.cq_builder(10).parent_domain(&bench.domain).build().unwrap();
    let before = bench.memory.outstanding();
    let mut cq = make();
    let own = bench.memory.outstanding();
    for errno in [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOMEM, Errno::AGAIN] {
        bench.script.refuse(Op::RESIZE_CQ, errno);
        assert_eq!(cq.resize(100).unwrap_err().errno(), errno);
        assert_eq!(bench.memory.outstanding(), own, "{errno}: it was never told to the device");
        bench.script.allow(Op::RESIZE_CQ);
    }
    for (nth, errno) in (1..).zip([Errno::TIMEDOUT, Errno::IO, Errno::FAULT]) {
        bench.script.refuse(Op::RESIZE_CQ, errno);
        assert_eq!(cq.resize(100).unwrap_err().errno(), errno);
        assert_eq!(bench.memory.outstanding(), own + nth, "{errno}");
        bench.script.allow(Op::RESIZE_CQ);
    }
    cq.resize(100).unwrap();
    assert_eq!(bench.memory.outstanding(), own + 3);
    drop(cq);
    assert_eq!(bench.memory.outstanding(), before);
    // A queue that the kernel does not destroy keeps all of its memory.
    let mut cq = make();
    bench.script.refuse(Op::RESIZE_CQ, Errno::TIMEDOUT);
    cq.resize(100).unwrap_err();
    bench.script.refuse_destroy(cq.handle(), Errno::BUSY);
    let held = bench.memory.outstanding();
    drop(cq);
    assert_eq!((bench.memory.outstanding(), bench.context.leaked()), (held, 1));
}

#[test]
fn a_queue_that_cannot_be_resized_says_so() {
    let bench = Bench::new();
    let mut cq = bench.context.cq_builder(10).build().unwrap();
    bench.script.refuse(Op::RESIZE_CQ, Errno::NOSYS);
    let error = cq.resize(100).unwrap_err();
    assert!(error.is_unsupported(), "{error}");
    assert_eq!(error.message(), "mlx5_0 resizes no completion queues");
}

#[test]
fn doorbells_outside_the_page_or_unaligned_are_refused() {
    use crate::MemoryError;
    use crate::mlx5::{Uar, UarKind};
    let bench = Bench::new();
    let page = Uar::alloc(&bench.context, UarKind::NonCached).unwrap().map().unwrap();
    let error = page.ring_u32(6, 0).unwrap_err();
    assert_eq!(error, MemoryError::Unaligned { offset: 6, length: 4, word: 4 });
    assert!(error.to_string().contains("4 bytes at 6"), "{error}");
    let end = page_size();
    for error in [page.ring_u64(end, 0).unwrap_err(), page.ring_be64(end, 0).unwrap_err()] {
        assert_eq!(error, MemoryError::OutOfRange { offset: end, length: 8, size: end });
        let text = format!("8 bytes at {end} exceed the memory of {end} bytes");
        assert!(error.to_string().contains(&text), "{error}");
    }
    assert_eq!(page.peek_u32(9), Err(MemoryError::Unaligned { offset: 9, length: 4, word: 4 }));
}

#[test]
fn padding_needs_cqes_of_128_bytes() {
    let bench = Bench::new();
    let cq = || bench.context.cq_builder(10).pad();
    let error = cq().build().unwrap_err();
    assert!(error.errno() == Errno::INVAL && error.message().contains("64 bytes"), "{error}");
    cq().cqe_size(128).build().unwrap();
    let error = Script::new().open("rxe0").cq_builder(10).cqe_size(128).pad().build().unwrap_err();
    assert!(error.is_unsupported(), "{error}");
}

#[test]
fn an_error_names_the_bytes_that_could_not_be_pinned() {
    let bench = Bench::new();
    for (step, bytes) in [(1, page_size()), (2, 512)] {
        bench.script.fail_step(step, Errno::NOMEM);
        let error = bench.make().unwrap_err();
        let text = format!("cannot pin {bytes} bytes");
        assert!(error.message().contains(&text), "{error}");
    }
    let mut cq = bench.context.cq_builder(10).build().unwrap();
    bench.script.fail_step(1, Errno::NOMEM);
    let error = cq.resize(1000).unwrap_err();
    assert!(error.message().contains("cannot pin 65536 bytes"), "{error}");
}

#[test]
fn registers_are_dedicated_then_shared_then_recycled() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let qp = || bench.pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    // Page numbers, counted from the page for arming.
    let first = u32::from(bench.script.asked::<mlx5_ib_create_cq>(Op::CREATE_CQ).uar_page_index);
    let number =
        |qp: &QpControl| bench.script.told::<mlx5_ib_create_qp>(qp.handle()).bfreg_index - first;
    let page = |qp: &QueuePair| number(qp);
    let pages = || bench.script.count(MLX5_IB_OBJECT_UAR);
    // One page is there for arming. There are two registers in a page, four for one queue pair
    // each, and twelve to share.
    assert_eq!(pages(), 1);
    let own: Vec<_> = (0..4).map(|_| qp()).collect();
    assert_eq!(pages(), 3);
    assert_eq!(own.iter().map(page).collect::<Vec<_>>(), [1, 1, 2, 2]);
    let shared: Vec<_> = (0..24).map(|_| qp()).collect();
    assert_eq!(pages(), 9);
    let mut users = [0; 16];
    for qp in &shared {
        users[page(qp) as usize] += 1;
    }
    assert_eq!(users[3..9], [4; 6], "each register is shared by two");
    // The next queue pairs share the registers that have become free.
    let mut shared = shared;
    shared.retain(|qp| page(qp) != 3);
    shared.extend((0..4).map(|_| qp()));
    assert_eq!(shared[20..].iter().map(page).collect::<Vec<_>>(), [3; 4]);
    // The next queue pair gets the register of a destroyed one.
    let first = page(&own[0]);
    drop(own);
    assert_eq!(page(&qp()), first + 1, "the one that came back last");
    drop(shared);
    // Thread domains have registers of their own.
    let tds = [bench.context.alloc_td().unwrap(), bench.context.alloc_td().unwrap()];
    assert_eq!(pages(), 10);
    drop(tds);
    let td = bench.context.alloc_td().unwrap();
    assert_eq!(pages(), 10);
    let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let exclusive = domain.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    assert_eq!(number(&exclusive), 9);
    let (td, error) = td.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop((exclusive, domain));
    td.destroy().unwrap();
}

/// Four registers are of one queue pair each. Two threads may ring a shared one at once, so they need its lock.
#[test]
#[cfg_attr(miri, ignore = "it takes long")]
fn the_fifth_queue_pair_shares_its_register() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let parts: Vec<_> = (0..6)
        .map(|_| bench.pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap().split())
        .collect();
    let own: Vec<_> = parts.iter().map(|parts| parts.send.owns_register()).collect();
    assert_eq!(own, [true, true, true, true, false, false]);
}

#[test]
fn the_link_layer_of_a_port_is_queried_once() {
    let bench = Bench::new();
    let asked = |method| {
        let op = Op::Method { object: objects::UVERBS_OBJECT_DEVICE, method };
        bench.script.log().iter().filter(|known| **known == op).count()
    };
    let path = AddressVector::global(1, 0, bench.context.query_gid(1, 0).unwrap().gid);
    let before = asked(UVERBS_METHOD_QUERY_GID_ENTRY);
    let counts =
        || [asked(UVERBS_METHOD_QUERY_PORT), asked(UVERBS_METHOD_QUERY_GID_ENTRY) - before];
    bench.pd.create_ah(&path).unwrap();
    assert_eq!(counts(), [1, 1]);
    bench.pd.create_ah(&path).unwrap();
    // Entries of the GID table change, so each is queried again; the port's link layer is remembered.
    assert_eq!(counts(), [1, 2]);
    // The kernel is not asked about a port that is not there, nor about an index beyond all tables.
    for (port, index) in [(0, 3), (2, 3), (300, 3), (1, 256)] {
        let path = AddressVector::global(port, index, Gid([7; 16]));
        let error = bench.pd.create_ah(&path).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert_eq!(counts(), [1, 2]);
    }
}

#[test]
fn running_out_of_registers_names_their_number() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(10).build().unwrap();
    let tds: Vec<_> = (0..6).map(|_| context.alloc_td().unwrap()).collect();
    let armed: mlx5_ib_create_cq = script.asked(Op::CREATE_CQ);
    script.refuse(Op::ALLOC_UAR, Errno::NOSPC);
    let error = context.alloc_td().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::NOSPC));
    assert!(error.message().ends_with("thread domains of this context have 6"), "{error}");
    assert!(error.message().contains("no doorbell register left"), "{error}");
    // An error with another reason does not mention registers.
    script.fail_step(1, Errno::IO);
    let error = context.alloc_td().unwrap_err();
    let text = "no page of doorbell registers could be had; thread domains of this context have 6";
    assert!(error.errno() == Errno::IO && error.message().ends_with(text), "{error}");
    // A queue pair rings the page that exists.
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let rung = script.told::<mlx5_ib_create_qp>(qp.handle()).bfreg_index;
    assert_eq!(rung, u32::from(armed.uar_page_index));
    drop(tds);
    context.alloc_td().unwrap();
}

#[test]
fn without_write_combining_every_queue_rings_the_non_cached_page() {
    let script = Script::mlx5();
    script.forge(
        Op::GET_CONTEXT,
        objects::UVERBS_ATTR_UHW_OUT,
        |context: &mut mlx5_ib_alloc_ucontext_resp| context.bf_reg_size = 0,
    );
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(10).build().unwrap();
    let td = context.alloc_td().unwrap();
    let domain = pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let shared = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let exclusive = domain.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let page = |handle| script.told::<mlx5_ib_create_qp>(handle).bfreg_index;
    let armed = u32::from(script.asked::<mlx5_ib_create_cq>(Op::CREATE_CQ).uar_page_index);
    assert_eq!((page(shared.handle()), page(exclusive.handle())), (armed, armed));
    assert_eq!(script.count(MLX5_IB_OBJECT_UAR), 1);
}

#[test]
fn pages_with_large_numbers_are_named_by_an_attribute() {
    let script = Script::mlx5();
    let large = 1u32 << 16;
    script.forge(Op::ALLOC_UAR, MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, move |page| *page = large);
    let context = script.open("mlx5_0");
    // The fabric's kernel is older than the attribute.
    let error = context.cq_builder(10).build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::PROTONOSUPPORT), "{error}");
    let told = script.attribute::<u32>(Op::CREATE_CQ, MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX);
    assert_eq!(told, Some(large));
    let flags = script.asked::<mlx5_ib_create_cq>(Op::CREATE_CQ).flags;
    assert_eq!(flags, 0, "no page of the other kind");
}

#[test]
fn a_panic_in_an_allocator_leaves_nothing() {
    #[derive(Debug)]
    struct Panics;
    // SAFETY: it never returns memory.
    #[allow(unsafe_code)]
    unsafe impl QueueAllocator for Panics {
        fn alloc(&self, _: &DomainView<'_>, _: Layout, kind: ResourceType) -> Allocation {
            assert_eq!(kind, ResourceType::MLX5_CQ, "as the test wants it");
            Allocation::UseDefault
        }

        unsafe fn free(&self, _: &DomainView<'_>, _: NonNull<u8>, _: Layout, _: ResourceType) {}
    }
    let bench = Bench::new();
    let domain = bench.pd.parent_domain_builder().allocator(Panics).build().unwrap();
    let live = bench.script.live();
    let create = || bench.context.cq_builder(10).parent_domain(&domain).build().map(drop);
    assert!(catch_unwind(AssertUnwindSafe(create)).is_err());
    assert_eq!(bench.script.live(), live);
}

/// A panic in `free` is counted as a leak, so that a failed assertion of [`Counted`] shows.
#[test]
fn domains_that_share_an_allocator_are_told_apart() {
    let bench = Bench::new();
    let second = bench.context.alloc_pd().unwrap();
    let domain = |pd: &ProtectionDomain, number| {
        let builder = pd.parent_domain_builder().pd_context(number);
        builder.allocator(bench.memory.clone()).build().unwrap()
    };
    let asked = || -> Vec<Asker> {
        bench.memory.boxes.lock().unwrap().iter().map(|lent| lent.3.clone()).collect()
    };
    let (one, other) = (domain(&bench.pd, 7), domain(&second, 8));
    let cq = bench.context.cq_builder(10).parent_domain(&one).build().unwrap();
    let qp = other.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let srq = bench.domain.srq_builder(10).build().unwrap();
    // Each object has two buffers: a queue and its doorbell record.
    let expected = [(7, &bench.pd), (8, &second), (0, &bench.pd)];
    let expected = expected.map(|(number, pd)| (number, pd.handle(), "mlx5_0".to_string()));
    assert_eq!(asked(), expected.each_ref().map(|of| [of.clone(), of.clone()]).as_flattened());
    assert_ne!(expected[0].1, expected[1].1);
    drop((qp, srq, cq));
    assert_eq!((asked(), bench.memory.outstanding(), bench.context.leaked()), (vec![], 0, 0));
}

#[test]
fn a_domain_tells_whether_its_allocator_is_asked() {
    let asking = Bench::new();
    assert!(asking.domain.asks_allocator());
    assert!(!asking.pd.parent_domain_builder().build().unwrap().asks_allocator(), "it has none");
    // rxe's queues are the kernel's.
    let rxe = crate::tests::Bench::new();
    let memory = Arc::new(Counted::default());
    let domain = rxe.pd.parent_domain_builder().allocator(memory.clone()).build().unwrap();
    let cq = rxe.context.cq_builder(10).parent_domain(&domain).build().unwrap();
    drop((domain.qp_builder(&cq, &cq, QpType::RC).build().unwrap(), cq));
    assert_eq!((domain.asks_allocator(), memory.lent.load(Ordering::Relaxed)), (false, 0));
}

/// The builder's parent domain and number of entries; a queue and its doorbell record are two buffers.
#[test]
fn completion_queues_of_futures_are_as_their_builder_says() {
    use crate::tests::futures::Watched;
    let bench = Bench::new();
    let td = bench.context.alloc_td().unwrap();
    let builder = || bench.context.cq_builder(1000).parent_domain(&bench.domain);
    let ready = |_: std::os::fd::BorrowedFd<'_>| Ok(Watched::default());
    let told = || bench.script.attribute(Op::CREATE_CQ, UVERBS_ATTR_CREATE_CQ_CQE) >= Some(1000u32);
    let (shared, driver) = builder().build_async(ready).unwrap();
    assert!(told() && bench.memory.outstanding() == 2);
    let worker = builder().build_worker(td).unwrap();
    assert!(told() && bench.memory.outstanding() == 4);
    let (local, local_driver) = worker.start(ready).unwrap();
    drop((shared, driver, local, local_driver));
    assert_eq!((bench.memory.outstanding(), bench.context.leaked()), (0, 0));
}

#[test]
fn an_initiator_takes_no_memory_for_receives() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let size = |receives| {
        let builder = bench.domain.qp_builder(&cq, &cq, QpType::XRC_INI).max_recv_wr(receives);
        let qp = builder.build().unwrap();
        assert_eq!(qp.caps().max_recv_wr, 0);
        bench.memory.boxes.lock().unwrap()[0].1.size()
    };
    assert_eq!(size(1), size(1000));
}

#[test]
fn an_arena_gets_its_memory_back() {
    let bench = Bench::new();
    let arena = Arc::new(crate::allocator::Arena::new(1 << 20).unwrap());
    let domain = bench.pd.parent_domain_builder().allocator(arena.clone()).build().unwrap();
    let cq = bench.context.cq_builder(10).parent_domain(&domain).build().unwrap();
    let qp = domain.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    assert!(arena.buffers() == 4 && arena.used() > 4096, "{} of {arena:?}", arena.used());
    drop((qp, cq));
    assert_eq!((arena.buffers(), arena.used(), bench.context.leaked()), (0, 0, 0));
}

/// [`Counted`] memory that the allocator reports as part of a dma-buf.
#[derive(Debug)]
struct Parts {
    memory: Counted,
    offset: u64,
    /// The only resource whose memory is reported so; `None` is all.
    only: Option<ResourceType>,
}

// SAFETY: as for the memory itself.
#[allow(unsafe_code)]
unsafe impl QueueAllocator for Parts {
    fn alloc(&self, view: &DomainView<'_>, layout: Layout, kind: ResourceType) -> Allocation {
        self.memory.alloc(view, layout, kind)
    }

    unsafe fn free(
        &self,
        view: &DomainView<'_>,
        memory: NonNull<u8>,
        layout: Layout,
        kind: ResourceType,
    ) {
        // SAFETY: it came from there.
        unsafe { self.memory.free(view, memory, layout, kind) }
    }

    unsafe fn dmabuf(&self, memory: NonNull<u8>) -> Option<DmaBufPart> {
        let boxes = self.memory.boxes.lock().unwrap();
        let (.., kind, _) =
            boxes.iter().find(|(address, ..)| *address == memory.as_ptr() as usize)?;
        if self.only.is_some_and(|only| only != *kind) {
            return None;
        }
        let file = std::fs::File::open("/dev/null").unwrap().into();
        Some(DmaBufPart { file, offset: self.offset })
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens a file")]
fn dma_bufs_are_named_by_attributes_or_not_at_all() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let domain = |offset| {
        let parts = Arc::new(Parts { memory: Counted::default(), offset, only: None });
        (parts.clone(), pd.parent_domain_builder().allocator(parts).build().unwrap())
    };
    let (parts, at_page) = domain(0x7_0000);
    // The fabric's kernel is older than the attributes, and does not get an address instead.
    let error = context.cq_builder(10).parent_domain(&at_page).build().unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("Linux 7.2"), "{error}");
    let named = |op, id| script.attribute::<ib_uverbs_buffer_desc>(op, id).unwrap();
    let check = |desc: ib_uverbs_buffer_desc| {
        let dmabuf = ib_uverbs_buffer_type::IB_UVERBS_BUFFER_TYPE_DMABUF.0;
        assert_eq!((desc.r#type, desc.flags, desc.addr), (dmabuf, 0, 0x7_0000));
        assert!(desc.length > 0 && desc.fd >= 0, "{desc:?}");
    };
    check(named(Op::CREATE_CQ, UVERBS_ATTR_CREATE_CQ_BUF_UMEM));
    check(named(Op::CREATE_CQ, MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM));
    let asked: mlx5_ib_create_cq = script.asked(Op::CREATE_CQ);
    assert_eq!((asked.buf_addr, asked.db_addr), (0, 0));
    let cq = context.cq_builder(10).build().unwrap();
    let error = at_page.qp_builder(&cq, &cq, QpType::RC).build().unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("Linux 7.2"), "{error}");
    check(named(Op::CREATE_QP, UVERBS_ATTR_CREATE_QP_BUF_UMEM));
    check(named(Op::CREATE_QP, MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM));
    let asked: mlx5_ib_create_qp = script.asked(Op::CREATE_QP);
    assert_eq!((asked.buf_addr, asked.db_addr), (0, 0));
    // For shared receive queues the kernel takes an address.
    drop(at_page.srq_builder(10).build().unwrap());
    assert_eq!((parts.memory.outstanding(), context.leaked()), (0, 0));
    // The offset in the dma-buf has to be aligned.
    let (parts, askew) = domain(0x7008);
    let error = context.cq_builder(10).parent_domain(&askew).build().unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().contains("0x7008"), "{error}");
    assert_eq!(parts.memory.outstanding(), 0);
    // One dma-buf is enough for that.
    for only in [ResourceType::MLX5_CQ, ResourceType::MLX5_QP, ResourceType::MLX5_DBR] {
        let parts = Parts { memory: Counted::default(), offset: 0x7_0000, only: Some(only) };
        let domain = pd.parent_domain_builder().allocator(Arc::new(parts)).build().unwrap();
        let explains = |result: Option<crate::Error>| {
            result.is_some_and(|error| error.message().contains("Linux 7.2"))
        };
        let made = context.cq_builder(10).parent_domain(&domain).build();
        assert_eq!(explains(made.err()), only != ResourceType::MLX5_QP, "{only:?}");
        let made = domain.qp_builder(&cq, &cq, QpType::RC).build();
        assert_eq!(explains(made.err()), only != ResourceType::MLX5_CQ, "{only:?}");
    }
}

/// The queue is never polled, so updates about earlier queue pairs pile up; creating a queue pair
/// compacts them.
#[test]
fn queue_pairs_that_come_and_go_do_not_use_up_user_indices() {
    const LIVES: usize = if cfg!(miri) { 110 } else { 1000 };
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let staying = bench.pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let index = |qp: &QueuePair| bench.script.told::<mlx5_ib_create_qp>(qp.handle()).uidx;
    let mut seen = std::collections::HashSet::new();
    for _ in 0..LIVES {
        let short = bench.pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
        assert_ne!(index(&short), index(&staying), "in use");
        seen.insert(index(&short));
    }
    assert!(seen.len() < 100, "{} indices for queue pairs of which two live at once", seen.len());
}

#[test]
fn a_refusal_for_lack_of_memory_names_the_bytes_to_be_pinned() {
    let bench = Bench::new();
    let cq = bench.context.cq_builder(10).build().unwrap();
    let mut resized = bench.context.cq_builder(10).build().unwrap();
    let ops = [Op::CREATE_CQ, Op::CREATE_QP, Op::CREATE_SRQ, Op::RESIZE_CQ];
    ops.into_iter().for_each(|op| bench.script.refuse(op, Errno::NOMEM));
    let qp = bench.pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(1000);
    let errors = [
        bench.context.cq_builder(1000).build().unwrap_err(),
        qp.build().unwrap_err(),
        bench.pd.srq_builder(1000).build().unwrap_err(),
        resized.resize(1000).unwrap_err(),
    ];
    // A completion has 64 bytes, a request as many, and a receive of a shared queue 32 at least.
    for (error, least) in errors.into_iter().zip([64_000, 64_000, 32_000, 64_000]) {
        let rest = error.message().strip_prefix("cannot pin ");
        let bytes = rest.and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
        let bytes = bytes.unwrap_or_default();
        assert!((least..16 * least).contains(&bytes), "{error}");
    }
}

#[test]
fn the_kernel_gets_the_number_of_cqes_that_the_buffer_holds() {
    let bench = Bench::new();
    for asked in [1, 3, 4, 63, 64, 1000] {
        let cq = bench.context.cq_builder(asked).build().unwrap();
        let told: u32 = bench.script.attribute(Op::CREATE_CQ, UVERBS_ATTR_CREATE_CQ_CQE).unwrap();
        assert!(told >= asked && told == cq.capacity(), "{asked}: {told}, {}", cq.capacity());
    }
}

#[test]
fn a_resource_type_is_the_driver_beside_its_code() {
    let types = [
        (ResourceType::MLX5_QP, 1, "MLX5_QP", "the queues of a queue pair"),
        (ResourceType::MLX5_RWQ, 2, "MLX5_RWQ", "a work queue"),
        (ResourceType::MLX5_DBR, 3, "MLX5_DBR", "a doorbell record"),
        (ResourceType::MLX5_SRQ, 4, "MLX5_SRQ", "a shared receive queue"),
        (ResourceType::MLX5_CQ, 5, "MLX5_CQ", "a completion queue"),
    ];
    for (resource, code, name, text) in types {
        assert_eq!((resource.driver(), resource.code()), (1, code));
        assert_eq!(resource, ResourceType(1 << 32 | u64::from(code)));
        assert_eq!((format!("{resource:?}"), resource.to_string()), (name.into(), text.into()));
    }
    let unknown = ResourceType(0x2a_0000_0063);
    assert_eq!((unknown.driver(), unknown.code()), (0x2a, 0x63));
    assert_eq!(unknown.to_string(), "resource 0x2a00000063");
}
