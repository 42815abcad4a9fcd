//! Memory windows: the objects that they hold, for how long, and their reallocation.

use super::Bench;
use super::destroy::{Witness, witness};
use crate::handles::ObjectKind;
use crate::sharing::envelope::Envelope;
use crate::uverbs::scripted::{Op, Script};
use crate::{
    Access, Errno, Error, ErrorWith, MemoryRegion, MemoryWindow, QpControl, QpParts, QpState,
    QpType, QueuePair, Rereg, WcStatus, WindowType,
};
use std::sync::Arc;
use uverbs_uapi::object::{UVERBS_OBJECT_MR, UVERBS_OBJECT_MW, UVERBS_OBJECT_QP};
use uverbs_uapi::write::{IB_USER_VERBS_CMD_ALLOC_MW, IB_USER_VERBS_CMD_MODIFY_QP};

const ALLOC_MW: Op = Op::Write(IB_USER_VERBS_CMD_ALLOC_MW);
const DEALLOC_MW: Op = Op::destroy(UVERBS_OBJECT_MW);
const BINDABLE: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);
/// The most regions and queue pairs that a window holds.
const MOST: usize = 16;

type Witnessed = MemoryRegion<u8, Witness>;

/// A region, and an `Arc` that counts its memory: 2 while it exists.
fn region(bench: &Bench) -> (Witnessed, Arc<()>) {
    let alive = Arc::new(());
    (bench.pd.mr_builder().access(BINDABLE).register(witness(&alive)).unwrap(), alive)
}

fn is_freed(alive: &Arc<()>) -> bool {
    Arc::strong_count(alive) == 1
}

fn window(bench: &Bench, window_type: WindowType) -> MemoryWindow {
    bench.pd.alloc_mw(window_type).unwrap()
}

/// Binds the window, and settles the binding with this status.
fn bind(window: &mut MemoryWindow, qp: &QpControl, region: &Witnessed, status: WcStatus) {
    window.bind(qp, region, .., Access::REMOTE_WRITE).unwrap();
    window.settle(status);
}

/// Fails unless the region is refused to the program because a window holds it.
fn still_held(region: Witnessed) -> Witnessed {
    let Err(ErrorWith { object: region, error }) = region.destroy() else {
        panic!("destroyed under a window")
    };
    names_the_remedy(&error);
    region
}

fn names_the_remedy(error: &Error) {
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    assert!(error.message().contains("reallocate the window"), "{error}");
}

fn live(script: &Script, object: u16) -> usize {
    script.count(object)
}

#[test]
fn window_holds_every_region_it_was_bound_to_until_dealloc() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let mut window = window(&bench, WindowType::One);
    let (first, first_alive) = region(&bench);
    let (second, second_alive) = region(&bench);
    bind(&mut window, &qp, &first, WcStatus::SUCCESS);
    bind(&mut window, &qp, &second, WcStatus::SUCCESS);
    drop(still_held(first));
    drop(second);
    assert!(!is_freed(&first_alive) && !is_freed(&second_alive));
    window.destroy().unwrap();
    assert!(is_freed(&first_alive) && is_freed(&second_alive));
    assert_eq!((bench.context.leaked(), bench.script.complaints()), (0, vec![]));
}

#[test]
fn nothing_that_the_program_claims_releases_a_region() {
    let words: [fn(&mut MemoryWindow, &QpControl); 5] = [
        |window, _| window.settle(WcStatus::WR_FLUSH_ERR),
        |window, _| window.settle(WcStatus::MW_BIND_ERR),
        |window, _| {
            window.settle(WcStatus::SUCCESS);
            window.invalidated();
        },
        |window, _| window.invalidated(),
        |window, qp| {
            window.settle(WcStatus::SUCCESS);
            if window.window_type() == WindowType::One {
                window.unbind(qp).unwrap();
                window.settle(WcStatus::SUCCESS);
            }
        },
    ];
    for window_type in [WindowType::One, WindowType::Two] {
        for say in words {
            let bench = Bench::new();
            let qp = bench.qp(QpType::RC);
            let (region, alive) = region(&bench);
            let mut window = window(&bench, window_type);
            window.bind(&qp, &region, .., Access::REMOTE_WRITE).unwrap();
            say(&mut window, &qp);
            drop(still_held(region));
            assert!(!is_freed(&alive));
            drop(window);
            assert!(is_freed(&alive));
        }
    }
}

#[test]
fn regions_that_a_leaked_window_holds_are_leaked() {
    for errno in [Errno::BUSY, Errno::IO, Errno::NOMEM, Errno::INVAL] {
        for region_first in [true, false] {
            let bench = Bench::new();
            let qp = bench.qp(QpType::RC);
            let queue = qp.handle();
            let (region, alive) = region(&bench);
            let mut window = window(&bench, WindowType::Two);
            bind(&mut window, &qp, &region, WcStatus::SUCCESS);
            bench.script.refuse_destroy(window.handle(), errno);
            if region_first {
                drop((region, window));
            } else {
                drop((window, region));
            }
            assert!(!is_freed(&alive), "freed although the window may open it");
            assert_eq!(bench.context.leaked(), 1);
            assert_eq!(live(&bench.script, UVERBS_OBJECT_MR), 1);
            drop(qp);
            assert!(bench.script.live().contains(&(UVERBS_OBJECT_QP, queue)));
            assert_eq!(bench.script.complaints(), [""; 0]);
        }
    }
}

#[test]
fn forgotten_window_keeps_its_region() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let (region, alive) = region(&bench);
    let mut window = window(&bench, WindowType::One);
    bind(&mut window, &qp, &region, WcStatus::SUCCESS);
    std::mem::forget(window);
    drop(still_held(region));
    assert!(!is_freed(&alive));
    assert_eq!(live(&bench.script, UVERBS_OBJECT_MR), 1);
}

#[test]
fn held_region_is_not_changed_or_given_away() {
    let bench = Bench::new();
    bench.script.allow_translation();
    let qp = bench.qp(QpType::RC);
    let (mut region, alive) = region(&bench);
    let mut window = window(&bench, WindowType::Two);
    bind(&mut window, &qp, &region, WcStatus::SUCCESS);
    window.invalidated();
    let commands = bench.script.log().len();
    let error = region.rereg(Rereg::new().access(Access::LOCAL_WRITE)).unwrap_err();
    names_the_remedy(&error);
    let Err(failed) = region.exchange(vec![0u8; 64]) else { panic!("exchanged under a window") };
    names_the_remedy(&failed.error);
    let region = failed.region.unwrap();
    // `release` asks the kernel about the region, and changes nothing.
    let (region, error) = region.release().unwrap_err().into_parts();
    names_the_remedy(&error);
    let mut region = still_held(region);
    assert_eq!(bench.script.log().len(), commands + 1);

    window.reallocate().unwrap();
    region.rereg(Rereg::new().access(BINDABLE)).unwrap();
    drop(region.destroy().unwrap());
    assert!(is_freed(&alive));
}

#[test]
fn reallocated_window_has_another_key_and_holds_nothing() {
    for window_type in [WindowType::One, WindowType::Two] {
        let bench = Bench::new();
        let qp = bench.qp(QpType::RC);
        let (region, alive) = region(&bench);
        let mut window = window(&bench, window_type);
        let first = (window.handle(), window.rkey());
        bind(&mut window, &qp, &region, WcStatus::SUCCESS);
        let start = bench.script.log().len();
        window.reallocate().unwrap();
        assert_eq!(bench.script.log()[start..], [ALLOC_MW, DEALLOC_MW]);
        assert_ne!((window.handle(), window.rkey()), first);
        assert!(!window.is_bound());
        drop(region.destroy().unwrap());
        qp.destroy().unwrap();
        assert!(is_freed(&alive));
        assert_eq!(live(&bench.script, UVERBS_OBJECT_MW), 1);
        drop(window);
        assert_eq!(live(&bench.script, UVERBS_OBJECT_MW), 0);
        assert_eq!(bench.script.complaints(), [""; 0]);
    }
}

#[test]
fn window_is_not_reallocated_under_an_unsettled_binding() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let (region, _) = region(&bench);
    let mut window = window(&bench, WindowType::One);
    window.bind(&qp, &region, .., Access::REMOTE_READ).unwrap();
    let commands = bench.script.log().len();
    let error = window.reallocate().unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("reallocate_mw", Errno::BUSY));
    assert_eq!(bench.script.log().len(), commands);
    window.settle(WcStatus::SUCCESS);
    window.reallocate().unwrap();
}

/// Refuses either step of a reallocation, which leaves the window and its region as they were.
fn refused_reallocation(
    attempt: impl Fn(&Bench, &mut MemoryWindow, &QueuePair) -> Result<(), Error>,
) {
    for errno in [Errno::NOMEM, Errno::BUSY, Errno::INVAL, Errno::IO] {
        for allocation in [true, false] {
            let bench = Bench::new();
            let qp = bench.qp(QpType::RC);
            let (region, alive) = region(&bench);
            let mut window = window(&bench, WindowType::One);
            let handle = window.handle();
            // After this an attempt to bind or to unbind has to reallocate.
            bind(&mut window, &qp, &region, WcStatus::WR_FLUSH_ERR);
            if allocation {
                bench.script.refuse(ALLOC_MW, errno);
            } else {
                bench.script.refuse_destroy(handle, errno);
            }
            let rkey = window.rkey();
            let error = attempt(&bench, &mut window, &qp).unwrap_err();
            assert_eq!(error.kernel_errno(), Some(errno), "{error}");
            assert!(["reallocate_mw", "bind_mw"].contains(&error.verb()), "{error}");
            assert!(!error.message().is_empty(), "{error}");
            assert_eq!((window.handle(), window.rkey(), window.is_bound()), (handle, rkey, true));
            assert_eq!(live(&bench.script, UVERBS_OBJECT_MW), 1, "the fresh window is gone");
            let region = still_held(region);

            bench.script.allow(ALLOC_MW);
            bench.script.permit_destroy(handle);
            attempt(&bench, &mut window, &qp).unwrap();
            assert_ne!(window.handle(), handle);
            drop(region.destroy().unwrap());
            assert!(is_freed(&alive));
            drop(window);
            assert_eq!((bench.context.leaked(), bench.script.complaints()), (0, vec![]));
        }
    }
}

#[test]
fn refused_reallocation_leaves_the_window_as_it_was() {
    refused_reallocation(|_, window, _| window.reallocate());
    refused_reallocation(|_, window, qp| window.unbind(qp).map(drop));
    refused_reallocation(|bench, window, qp| {
        let other = bench.pd.mr_builder().access(BINDABLE).register(vec![0u8; 64]).unwrap();
        window.bind(qp, &other, .., Access::REMOTE_READ).map(drop)
    });
}

#[test]
fn window_outlives_a_device_that_is_gone() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let (region, alive) = region(&bench);
    let mut window = window(&bench, WindowType::One);
    bind(&mut window, &qp, &region, WcStatus::SUCCESS);
    bench.script.vanish();
    let error = window.reallocate().unwrap_err();
    assert_eq!(error.errno(), Errno::IO);
    assert!(error.message().contains("the device is gone"), "{error}");
    drop((region, window, qp));
    assert_eq!((is_freed(&alive), bench.context.leaked()), (true, 0));
}

#[test]
fn bind_after_a_failed_one_uses_a_key_that_neither_had() {
    for window_type in [WindowType::One, WindowType::Two] {
        let bench = Bench::new();
        let qp = bench.qp(QpType::RC);
        let (region, _alive) = region(&bench);
        let mut window = window(&bench, window_type);
        let before = window.rkey();
        let binding = window.bind(&qp, &region, .., Access::REMOTE_WRITE).unwrap();
        let tried = binding.rkey();
        window.settle(WcStatus::WR_FLUSH_ERR);
        assert!(window.is_bound(), "the device may have carried it out");
        // The program cannot know which of the keys it invalidated.
        window.invalidated();
        assert!(window.is_bound());
        let start = bench.script.log().len();
        let next = window.bind(&qp, &region, .., Access::REMOTE_WRITE).unwrap();
        assert_eq!(bench.script.log()[start..], [ALLOC_MW, DEALLOC_MW]);
        for key in [next.old_rkey, next.new_rkey] {
            assert!(key != before && key != tried, "{key:?}, {before:?}, {tried:?}");
        }
        assert_eq!(window.rkey(), next.rkey());
        window.settle(WcStatus::SUCCESS);
        still_held(region);
    }
}

#[test]
fn window_is_reallocated_only_when_it_would_hold_too_many_regions() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let regions: Vec<_> = (0..MOST).map(|_| region(&bench).0).collect();
    let mut window = window(&bench, WindowType::One);
    let handle = window.handle();
    for _ in 0..3 {
        regions.iter().for_each(|region| bind(&mut window, &qp, region, WcStatus::SUCCESS));
    }
    assert_eq!(window.handle(), handle, "these are no more than a window holds");
    let (extra, _alive) = region(&bench);
    bind(&mut window, &qp, &extra, WcStatus::SUCCESS);
    assert_ne!(window.handle(), handle);
    for region in regions {
        drop(region.destroy().unwrap());
    }
    still_held(extra);
}

#[test]
#[cfg_attr(miri, ignore = "it takes long")]
fn window_of_type_2_holds_a_bounded_number_of_queue_pairs() {
    let bench = Bench::new();
    let (region, _alive) = region(&bench);
    let mut window = window(&bench, WindowType::Two);
    for round in 0..10 * MOST {
        let qp = bench.qp(QpType::RC);
        bind(&mut window, &qp, &region, WcStatus::SUCCESS);
        window.invalidated();
        let (qp, error) = qp.destroy().unwrap_err().into_parts();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None));
        assert!(error.message().contains("reallocate the window"), "{error}");
        drop(qp);
        let held = live(&bench.script, UVERBS_OBJECT_QP);
        assert!(held <= MOST, "{held} queue pairs after {round} bindings");
    }
    drop(window);
    assert_eq!(live(&bench.script, UVERBS_OBJECT_QP), 0);
    let mut window = self::window(&bench, WindowType::One);
    let qp = bench.qp(QpType::RC);
    bind(&mut window, &qp, &region, WcStatus::SUCCESS);
    qp.destroy().unwrap();
}

#[test]
fn queue_pair_that_only_a_window_keeps_is_reset() {
    let bench = Bench::new();
    let (region, _alive) = region(&bench);
    let mut window = window(&bench, WindowType::Two);
    let qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    bench.script.set_qp_state(handle, QpState::RTS.0);
    bind(&mut window, &qp, &region, WcStatus::SUCCESS);
    let QpParts { send, recv, control } = qp.split();
    drop((send, control));
    assert_eq!(bench.script.object(handle).state, QpState::RTS.0, "the receive queue is left");
    drop(recv);
    assert_eq!(bench.script.object(handle).state, QpState::RESET.0);
    drop(window);
    assert_eq!(live(&bench.script, UVERBS_OBJECT_QP), 0);
}

#[test]
fn queue_pair_that_a_window_keeps_and_nobody_can_reset_is_leaked() {
    let bench = Bench::new();
    let (region, _alive) = region(&bench);
    let mut window = window(&bench, WindowType::Two);
    let qp = bench.qp(QpType::RC);
    bind(&mut window, &qp, &region, WcStatus::SUCCESS);
    bench.script.refuse(Op::Write(IB_USER_VERBS_CMD_MODIFY_QP), Errno::NOMEM);
    drop(qp);
    assert_eq!(bench.context.leaked(), 1);
    drop(window);
    assert_eq!(live(&bench.script, UVERBS_OBJECT_QP), 1);
}

#[test]
fn million_bindings_hold_a_bounded_number_of_regions() {
    const BINDINGS: u32 = if cfg!(miri) { 100 } else { 1_000_000 };
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let mut window = window(&bench, WindowType::One);
    for round in 0..BINDINGS {
        let region = bench.pd.mr_builder().access(BINDABLE).register(vec![0u8; 8]).unwrap();
        window.bind(&qp, &region, .., Access::REMOTE_READ).unwrap();
        window.settle(WcStatus::SUCCESS);
        drop(region);
        // Checking is slower than binding.
        if round < 100 || round % 997 == 0 {
            let held = live(&bench.script, UVERBS_OBJECT_MR);
            assert!(held <= MOST, "{held} regions after {round} bindings");
        }
    }
    drop(window);
    assert_eq!((live(&bench.script, UVERBS_OBJECT_MR), bench.context.leaked()), (0, 0));
}

/// A forged envelope of the region that claims these rights.
fn forged<T, M>(bench: &Bench, region: &MemoryRegion<T, M>, access: Access) -> Envelope {
    let [keys, length, iova, _] = region.export().unwrap().fingerprint();
    let claimed = [keys, length, iova, access.bits().into()];
    let forged = Envelope::seal(&bench.context.file, ObjectKind::MR, region.handle(), claimed);
    Envelope::from_bytes(&forged.to_bytes()).unwrap()
}

/// The exporter may deregister its region at any time, and the rights in an envelope are only a
/// claim.
#[test]
fn imported_region_is_not_bound() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let mut window = window(&bench, WindowType::Two);
    let honest = bench.pd.mr_builder().access(BINDABLE).register(vec![0u8; 64]).unwrap();
    let private =
        bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let commands = |bench: &Bench| bench.script.log().len();
    for envelope in [forged(&bench, &private, BINDABLE), honest.export().unwrap()] {
        let imported = bench.pd.import_mr(&envelope).unwrap();
        assert!(imported.access().contains(Access::MW_BIND));
        let before = commands(&bench);
        let error = window.bind(&qp, &imported, .., Access::REMOTE_WRITE).unwrap_err();
        assert_eq!((error.verb(), error.errno()), ("bind_mw", Errno::PERM), "{error}");
        assert_eq!((error.kernel_errno(), commands(&bench)), (None, before));
        assert!(error.message().contains("the process that registered"), "{error}");
    }
    // A new owner does not know the rights either.
    let imported = bench.pd.import_mr(&honest.release().unwrap()).unwrap();
    let owned = super::sharing::own(imported).unwrap();
    let error = window.bind(&qp, &owned, .., Access::REMOTE_WRITE).unwrap_err();
    assert_eq!(error.errno(), Errno::PERM, "{error}");
}

/// rxe of Linux 7 treats a pinned region as a paged one when it gets advice on it.
#[test]
fn imported_region_takes_no_advice() {
    let bench = Bench::new();
    let pinned = bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64]).unwrap();
    let claimed = Access::LOCAL_WRITE | Access::ON_DEMAND;
    let imported = bench.pd.import_mr(&forged(&bench, &pinned, claimed)).unwrap();
    assert!(imported.access().contains(Access::ON_DEMAND));
    let error = imported.on_demand(..).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("advise_mr", Errno::PERM), "{error}");
    assert!(error.message().contains("the process that registered"), "{error}");
}
