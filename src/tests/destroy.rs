//! Destruction: in any order, refused, of objects that another process destroyed, of a device that
//! is gone.

use super::Bench;
use crate::memory::region::StableBytes;
use crate::uverbs::scripted::{Op, Script};
use crate::{Access, AddressVector, Errno, ErrorWith, Gid, QpType, RecvWr, WindowType};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uverbs_uapi::object as objects;

/// Memory that tells whether it was freed.
pub(super) struct Witness(Box<[u8]>, #[expect(dead_code, reason = "held for its count")] Arc<()>);

// SAFETY: the box owns its bytes alone, and they stay as long as it does.
#[allow(unsafe_code)]
unsafe impl StableBytes for Witness {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        NonNull::from(&mut *self.0)
    }
}

pub(super) fn witness(alive: &Arc<()>) -> Witness {
    Witness(Box::new([0; 64]), alive.clone())
}

fn address() -> AddressVector {
    AddressVector::global(1, 0, Gid([1; 16]))
}

#[test]
fn memory_is_freed_only_when_the_kernel_destroyed_the_object() {
    for errno in [Errno::BUSY, Errno::IO, Errno::NOMEM, Errno::INVAL] {
        let bench = Bench::new();
        let alive = Arc::new(());
        let region =
            bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(witness(&alive)).unwrap();
        bench.script.refuse_destroy(region.handle(), errno);
        drop(region);
        assert_eq!(Arc::strong_count(&alive), 2, "freed although the device may write it");
        assert_eq!(bench.context.leaked(), 1);
        assert_eq!(bench.script.count(objects::UVERBS_OBJECT_MR), 1);
        // The objects that the region needs cannot be destroyed either, and are counted.
        let Bench { script, context, pd, cq } = bench;
        drop((pd, cq));
        assert_eq!(context.leaked(), 2);
        assert_eq!(script.count(objects::UVERBS_OBJECT_CQ), 0);

        let bench = Bench::new();
        let alive = Arc::new(());
        drop(bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(witness(&alive)).unwrap());
        assert_eq!(Arc::strong_count(&alive), 1);
        assert_eq!(bench.context.leaked(), 0);
    }
}

#[test]
fn a_refused_registration_frees_or_gives_back_the_memory() {
    let bench = Bench::new();
    let alive = Arc::new(());
    bench.script.refuse(Op::REG_MR, Errno::NOMEM);
    let refused = bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(witness(&alive));
    assert!(refused.is_err());
    drop(refused);
    assert_eq!(Arc::strong_count(&alive), 1);
    assert_eq!(bench.context.leaked(), 0);
}

/// Destroys `$object` twice; the kernel refuses the first attempt.
macro_rules! destroy_twice {
    ($script:expr, $object:expr) => {{
        let object = $object;
        let handle = object.handle();
        let before = $script.live().len();
        for errno in [Errno::BUSY, Errno::IO] {
            $script.refuse_destroy(handle, errno);
        }
        let Err(ErrorWith { object, error }) = object.destroy() else {
            panic!("destroyed against its will")
        };
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, Some(Errno::BUSY)));
        $script.permit_destroy(handle);
        $script.refuse_destroy(handle, Errno::IO);
        let Err(ErrorWith { object, error }) = object.destroy() else {
            panic!("a firmware failure is final")
        };
        assert_eq!(error.errno(), Errno::IO);
        assert_eq!($script.live().len(), before, "still there");
        $script.permit_destroy(handle);
        assert!(object.destroy().is_ok());
        assert_eq!($script.live().len(), before - 1);
    }};
}

#[test]
fn a_handle_that_could_not_be_destroyed_comes_back_for_another_try() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    destroy_twice!(script, bench.qp(QpType::RC));
    destroy_twice!(script, context.cq_builder(4).build().unwrap());
    destroy_twice!(script, pd.srq_builder(4).build().unwrap());
    destroy_twice!(script, pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8).unwrap());
    destroy_twice!(script, pd.alloc_mw(WindowType::Two).unwrap());
    destroy_twice!(script, context.alloc_pd().unwrap());
    let ah = pd.create_ah(&address()).unwrap();
    let handle = script.live().last().unwrap().1;
    script.refuse_destroy(handle, Errno::BUSY);
    let (ah, error) = ah.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    script.permit_destroy(handle);
    ah.destroy().unwrap();
    assert_eq!(script.live().len(), 2, "{:?} and {:?}", pd, cq);
    assert_eq!(context.leaked(), 0);
    assert_eq!(script.complaints(), [""; 0]);
}

/// A queue pair that came back still posts: its rings came back with it.
#[test]
fn a_queue_pair_that_came_back_works() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    bench.script.refuse_destroy(handle, Errno::BUSY);
    let (mut qp, _) = qp.destroy().unwrap_err().into_parts();
    let mut batch = qp.recv_batch().unwrap();
    batch.push(RecvWr::new(&[]).id(7)).unwrap();
    super::ring_recv(batch).unwrap();
    assert_eq!(bench.script.pending(handle, crate::uverbs::scripted::Role::Recv), 1);
}

#[test]
fn handles_in_use_are_busy_without_asking_the_kernel() {
    let bench = Bench::new();
    let td = bench.context.alloc_td().unwrap();
    let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let srq = domain.srq_builder(4).build().unwrap();
    let qp = domain.qp_builder(&bench.cq, &bench.cq, QpType::RC).srq(&srq).build().unwrap();
    let Bench { script, context, pd, cq } = bench;
    let commands = script.log().len();
    let (cq, error) = cq.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None));
    let (srq, error) = srq.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    let (pd, error) = pd.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    let (td, error) = td.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    let (domain, error) = domain.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    assert_eq!(script.log().len(), commands);
    qp.destroy().unwrap();
    srq.destroy().unwrap();
    domain.destroy().unwrap();
    td.destroy().unwrap();
    cq.destroy().unwrap();
    pd.destroy().unwrap();
    assert_eq!(script.live(), []);
    assert_eq!((context.leaked(), script.mappings()), (0, 0));
}

#[test]
fn an_object_that_another_process_destroyed_is_no_leak() {
    let bench = Bench::new();
    let alive = Arc::new(());
    let region =
        bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(witness(&alive)).unwrap();
    bench.script.steal(region.handle());
    drop(region);
    assert_eq!((Arc::strong_count(&alive), bench.context.leaked()), (1, 0));
    let qp = bench.qp(QpType::RC);
    bench.script.steal(qp.handle());
    qp.destroy().unwrap();
}

/// The kernel answers `EIO` before it has destroyed anything, so `EIO` does not mean that an object
/// is gone.
#[test]
fn a_device_that_is_being_removed_is_not_gone() {
    for (errno, patient) in [(Errno::IO, false), (Errno::BUSY, false), (Errno::IO, true)] {
        let bench = Bench::new();
        let alive = Arc::new(());
        let region =
            bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(witness(&alive)).unwrap();
        let handle = region.handle();
        bench.script.begin_to_vanish();
        bench.script.refuse_destroy(handle, errno);
        let script = bench.script.clone();
        let kernel = patient.then(|| {
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                script.permit_destroy(handle);
            })
        });
        drop(region);
        let (held, leaked) = if patient { (1, 0) } else { (2, 1) };
        assert_eq!((Arc::strong_count(&alive), bench.context.leaked()), (held, leaked), "{errno}");
        assert_eq!(bench.script.count(objects::UVERBS_OBJECT_MR), leaked as usize);
        kernel.into_iter().for_each(|kernel| kernel.join().unwrap());
    }
}

/// All objects of a file wait for the kernel together, up to one deadline.
#[test]
#[cfg_attr(miri, ignore = "it measures time")]
fn many_objects_of_a_vanishing_device_wait_no_longer_than_one() {
    const REGIONS: usize = 500;
    let bench = Bench::new();
    let regions: Vec<_> = (0..REGIONS)
        .map(|_| bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 8]).unwrap())
        .collect();
    bench.script.begin_to_vanish();
    regions.iter().for_each(|region| bench.script.refuse_destroy(region.handle(), Errno::IO));
    // One object waits a tenth of a second here, so one after the other would take most of a
    // minute.
    let (started, alone) = (Instant::now(), Duration::from_millis(100));
    drop(regions);
    let taken = started.elapsed();
    assert!(taken >= alone && taken < 20 * alone, "{taken:?}");
    assert_eq!(bench.context.leaked(), REGIONS as u64);
}

/// The result of DESTROY when the device is gone: success for objects of the core. For objects of
/// drivers, which reach no memory, it may be `EIO`.
#[test]
fn a_device_that_is_gone_leaks_nothing_and_answers_eio() {
    let mut bench = Bench::new();
    let alive = Arc::new(());
    let region =
        bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(witness(&alive)).unwrap();
    let srq = bench.pd.srq_builder(4).build().unwrap();
    let ah = bench.pd.create_ah(&address()).unwrap();
    let mut qp = bench.qp(QpType::RC);
    bench.script.vanish();
    let Bench { context, pd, .. } = &bench;
    for error in [
        context.alloc_pd().unwrap_err(),
        context.cq_builder(4).build().unwrap_err(),
        context.query_device().unwrap_err(),
        pd.srq_builder(4).build().unwrap_err(),
        pd.create_ah(&address()).unwrap_err(),
        srq.query().unwrap_err(),
        qp.query().unwrap_err(),
        bench.cq.resize(32).unwrap_err(),
    ] {
        assert_eq!(error.kernel_errno(), Some(Errno::IO), "{error}");
    }
    // Queues are memory of this process: they stay mapped, and stay empty.
    assert!(bench.cq.poll().unwrap().next().is_none());
    let mut batch = qp.send_batch().unwrap();
    batch.push(crate::SendWr::send(&[])).unwrap();
    assert_eq!(super::ring(batch), Err(crate::RingError::StillQueued(Errno::IO)));
    drop((region, srq, ah, qp));
    let Bench { script, context, pd, cq } = bench;
    drop((pd, cq));
    assert_eq!((Arc::strong_count(&alive), context.leaked()), (1, 0));
    assert_eq!(script.mappings(), 0);
    assert_eq!(script.complaints(), [""; 0]);
}

/// One object of each kind, boxed so that they can be dropped in any order.
fn one_of_everything(script: &Script) -> Vec<Box<dyn Send>> {
    let context = script.open("rxe0");
    let pd = context.alloc_pd().unwrap();
    let td = context.alloc_td().unwrap();
    let domain = pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let channel = context.create_comp_channel().unwrap();
    let send_cq = context.cq_builder(4).channel(&channel).build().unwrap();
    let recv_cq = context.cq_builder(4).build().unwrap();
    let srq = pd.srq_builder(4).build().unwrap();
    let ah = domain.create_ah(&address()).unwrap();
    let region = domain
        .mr_builder()
        .access(Access::LOCAL_WRITE | Access::MW_BIND)
        .allocate::<u8>(64)
        .unwrap();
    let with_srq = domain.qp_builder(&send_cq, &recv_cq, QpType::UD).srq(&srq).build().unwrap();
    let group = with_srq.attach_mcast("ff12::1".parse::<std::net::Ipv6Addr>().unwrap().into(), 0);
    let parts = pd.qp_builder(&send_cq, &send_cq, QpType::RC).build().unwrap().split();
    let mut window = pd.alloc_mw(WindowType::Two).unwrap();
    let binding = window.bind(&parts.control, &region, .., Access::REMOTE_READ).unwrap();
    assert_ne!(binding.rkey(), crate::Rkey(0));
    window.settle(crate::WcStatus::SUCCESS);
    vec![
        Box::new(context),
        Box::new(pd),
        Box::new(td),
        Box::new(domain),
        Box::new(channel),
        Box::new(send_cq),
        Box::new(recv_cq),
        Box::new(srq),
        Box::new(ah),
        Box::new(region),
        Box::new(window),
        Box::new(with_srq),
        Box::new(group.unwrap()),
        Box::new(parts.send),
        Box::new(parts.recv),
        Box::new(parts.control),
    ]
}

fn all_is_gone(script: &Script, order: &[usize]) {
    assert_eq!(script.complaints(), [""; 0], "dropped in order {order:?}");
    assert_eq!(script.left_at_close(), Some(vec![]), "dropped in order {order:?}");
    assert_eq!(script.mappings(), 0, "dropped in order {order:?}");
}

/// The scripted kernel complains of a DESTROY before that of a dependant, and of a second one.
#[test]
fn everything_may_be_dropped_in_any_order() {
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    const ROUNDS: u32 = if cfg!(miri) { 8 } else { 400 };
    for round in 0..ROUNDS {
        let script = Script::new();
        let mut all = one_of_everything(&script);
        let mut numbers: Vec<usize> = (0..all.len()).collect();
        let mut order = Vec::new();
        while !all.is_empty() {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            // The first two rounds drop them from the beginning and from the end.
            let at = match round {
                0 => 0,
                1 => all.len() - 1,
                _ => (seed % all.len() as u64) as usize,
            };
            order.push(numbers.remove(at));
            drop(all.remove(at));
        }
        all_is_gone(&script, &order);
    }
}

/// All orders of the objects that depend on each other most.
#[test]
fn a_queue_pair_and_its_dependencies_drop_in_every_order() {
    fn permute(left: &mut Vec<usize>, order: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
        if left.is_empty() {
            visit(order);
        }
        for at in 0..left.len() {
            order.push(left.remove(at));
            permute(left, order, visit);
            left.insert(at, order.pop().expect("pushed above"));
        }
    }
    let mut orders = 0;
    permute(&mut (0..6).collect(), &mut Vec::new(), &mut |order| {
        orders += 1;
        if cfg!(miri) && orders % 45 != 0 {
            return;
        }
        let script = Script::new();
        let context = script.open("rxe0");
        let pd = context.alloc_pd().unwrap();
        let cq = context.cq_builder(4).build().unwrap();
        let srq = pd.srq_builder(4).build().unwrap();
        let parts = pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build().unwrap().split();
        let mut all: [Option<Box<dyn Send>>; 6] = [
            Some(Box::new(context)),
            Some(Box::new(pd)),
            Some(Box::new(cq)),
            Some(Box::new(srq)),
            Some(Box::new(parts.send)),
            Some(Box::new(parts.control)),
        ];
        for &index in order {
            drop(all[index].take());
        }
        all_is_gone(&script, order);
    });
    assert_eq!(orders, 720);
}
