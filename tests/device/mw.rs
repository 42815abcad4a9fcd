//! Memory windows: their keys work only while they are bound, and bad bindings are refused.
//! [`mw_holds`](crate::mw_holds) tests which objects they hold.

use crate::capability::Capability;
use crate::env;
use crate::leaks::rounds;
use crate::pair::{Config, Pair, Side};
use crate::pattern;
use crate::verdict::{Stop, Verdict, supported, trials};
use uverbs::device::DriverId;
use uverbs::{
    Access, Errno, ErrorWith, MemoryRegion, MemoryWindow, ObjectKind, QpType, Remote, Rkey, SendWr,
    WcOpcode, WcStatus, WindowType,
};

trials![
    types_are_allocated_and_destroyed,
    type_2_opens_its_range_only,
    type_2_counts_from_zero,
    type_2_ends_with_a_local_invalidate,
    type_2_ends_with_the_peer_s_invalidate,
    type_2_opens_only_to_the_peer_of_its_queue_pair,
    type_1_rebinds_and_unbinds,
    bind_and_its_rkey_go_in_one_batch,
    window_grants_only_its_own_access,
    bindings_that_do_not_fit_are_refused,
    other_domains_and_contexts_are_refused,
    second_binding_before_the_first_settles_is_refused,
    windows_leave_nothing,
];

pub(crate) const SIZE: usize = 3 * 4096;
pub(crate) const BIND: u64 = 77;

pub(crate) fn allocate(
    side: &Side,
    window_type: WindowType,
) -> Verdict<(MemoryRegion<u8>, MemoryWindow)> {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let mut region = side.pd.mr_builder().access(access).allocate::<u8>(SIZE)?;
    region.copy_from(0, &pattern::bytes(pattern::POISON, SIZE))?;
    let capability = match window_type {
        WindowType::One => Capability::Mw1,
        WindowType::Two => Capability::Mw2,
    };
    Ok((region, supported(side.pd.alloc_mw(window_type), capability)?))
}

/// Binds a window to 4096 bytes in the middle of a region, and waits until it is done.
pub(crate) fn bind(
    side: &mut Side,
    window: &mut MemoryWindow,
    region: &MemoryRegion<u8>,
    access: Access,
) -> Verdict {
    let binding = window.bind(&side.qp, region, 4096..8192, access)?;
    assert_eq!(binding.rkey(), window.rkey());
    side.send(SendWr::bind_mw(binding).id(BIND).signaled())?;
    let done = side.expect(BIND, WcOpcode::BIND_MW)?;
    window.settle(done.status);
    assert!(window.is_bound());
    Ok(())
}

pub(crate) fn read_write() -> Access {
    Access::REMOTE_READ | Access::REMOTE_WRITE
}

/// Has `a` write `length` bytes to `addr` with `rkey`; returns the status.
pub(crate) fn write(pair: &mut Pair, rkey: Rkey, addr: u64, length: usize) -> Verdict<WcStatus> {
    pair.a.fill(0..length, 5);
    let sges = [pair.a.sge(0..length)];
    pair.a.send(SendWr::write(Remote { addr, rkey }, &sges).id(1).signaled())?;
    Ok(pair.a.wait()?.status)
}

/// Fails unless the region cannot be destroyed because a window holds it.
#[track_caller]
pub(crate) fn still_held(region: MemoryRegion<u8>) -> MemoryRegion<u8> {
    let Err(ErrorWith { object: region, error }) = region.destroy() else {
        panic!("destroyed under a window")
    };
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    region
}

pub(crate) fn content(region: &MemoryRegion<u8>) -> Verdict<Vec<u8>> {
    let mut bytes = vec![0; region.byte_len()];
    region.copy_to(0, &mut bytes)?;
    Ok(bytes)
}

fn types_are_allocated_and_destroyed() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let one = supported(pd.alloc_mw(WindowType::One), Capability::Mw1)?;
    let two = supported(pd.alloc_mw(WindowType::Two), Capability::Mw2)?;
    assert_ne!(one.rkey(), two.rkey());
    assert_eq!((one.window_type(), two.window_type()), (WindowType::One, WindowType::Two));
    assert!(!one.is_bound() && !two.is_bound());
    let count = || supported(context.handles(ObjectKind::MW), Capability::InfoHandles);
    assert_eq!(count()?.len(), 2);
    let (pd, error) = pd.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    one.destroy()?;
    drop(two);
    assert_eq!(count()?, [0u32; 0]);
    pd.destroy()?;
    Ok(())
}

fn type_2_opens_its_range_only() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    let before = window.rkey();
    bind(&mut pair.b, &mut window, &region, read_write())?;
    assert_ne!(window.rkey(), before);
    let middle = region.addr() + 4096;
    assert_eq!(write(&mut pair, window.rkey(), middle, 4096)?, WcStatus::SUCCESS);
    let bytes = content(&region)?;
    pattern::check(&bytes[4096..8192], 5);
    let poison = pattern::bytes(pattern::POISON, SIZE);
    assert!(bytes[..4096] == poison[..4096] && bytes[8192..] == poison[8192..]);

    pair.a.poison(0..4096);
    let sges = [pair.a.sge(0..4096)];
    let remote = Remote { addr: middle, rkey: window.rkey() };
    pair.a.send(SendWr::read(remote, &sges).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::READ)?;
    pair.a.check(0..4096, 5);

    // rxe checks the bounds of the region only.
    let rxe = env::device().driver() == Some(DriverId::RXE);
    let first = if rxe { region.addr() + SIZE as u64 - 4096 } else { middle };
    let status = write(&mut pair, window.rkey(), first + 1, 4096)?;
    assert_eq!(status, WcStatus::REM_ACCESS_ERR, "beyond the end");
    Ok(())
}

fn type_2_counts_from_zero() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, read_write() | Access::ZERO_BASED)?;
    assert_eq!(write(&mut pair, window.rkey(), 100, 50)?, WcStatus::SUCCESS);
    pattern::check(&content(&region)?[4196..4246], 5);
    Ok(())
}

fn type_2_ends_with_a_local_invalidate() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    for _ in 0..3 {
        bind(&mut pair.b, &mut window, &region, read_write())?;
        assert_eq!(write(&mut pair, window.rkey(), region.addr() + 4096, 8)?, WcStatus::SUCCESS);
        let error = window.bind(&pair.b.qp, &region, .., read_write()).unwrap_err();
        assert_eq!(error.errno(), Errno::BUSY, "bound twice");
        pair.b.send(SendWr::local_inv(window.rkey()).id(3).signaled())?;
        pair.b.expect(3, WcOpcode::LOCAL_INV)?;
        window.invalidated();
        assert!(!window.is_bound());
    }
    let status = write(&mut pair, window.rkey(), region.addr() + 4096, 8)?;
    assert_eq!(status, WcStatus::REM_ACCESS_ERR, "through a window that is gone");
    let region = still_held(region);
    window.reallocate()?;
    region.destroy()?;
    Ok(())
}

fn type_2_ends_with_the_peer_s_invalidate() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    pair.b.recv(4, 0..64)?;
    let sges = [pair.a.sge(0..8)];
    pair.a.send(SendWr::send_inv(&sges, window.rkey()).id(5).signaled())?;
    pair.a.expect(5, WcOpcode::SEND)?;
    let done = pair.b.expect(4, WcOpcode::RECV)?;
    assert_eq!(done.invalidated, Some(window.rkey()));
    window.invalidated();
    assert!(!window.is_bound());
    bind(&mut pair.b, &mut window, &region, read_write())?;
    assert_eq!(write(&mut pair, window.rkey(), region.addr() + 4096, 8)?, WcStatus::SUCCESS);
    window.destroy()?;
    region.destroy()?;
    Ok(())
}

fn type_2_opens_only_to_the_peer_of_its_queue_pair() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    let mut other = Pair::on(pair.a.context.clone(), pair.b.context.clone(), Config::rc())?;
    other.connect()?;
    let status = write(&mut other, window.rkey(), region.addr() + 4096, 8)?;
    assert_eq!(status, WcStatus::REM_ACCESS_ERR);
    assert_eq!(write(&mut pair, window.rkey(), region.addr() + 4096, 8)?, WcStatus::SUCCESS);
    Ok(())
}

fn type_1_rebinds_and_unbinds() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::One)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    let first = window.rkey();
    assert_eq!(write(&mut pair, first, region.addr() + 4096, 8)?, WcStatus::SUCCESS);
    let (elsewhere, spare) = allocate(&pair.b, WindowType::One)?;
    bind(&mut pair.b, &mut window, &elsewhere, read_write())?;
    drop(spare);
    assert_ne!(window.rkey(), first);
    let target = elsewhere.addr() + 4096;
    assert_eq!(write(&mut pair, window.rkey(), target, 8)?, WcStatus::SUCCESS);
    pattern::check(&content(&elsewhere)?[4096..4104], 5);
    let region = still_held(region);

    let binding = window.unbind(&pair.b.qp)?;
    pair.b.send(SendWr::bind_mw(binding).id(BIND).signaled())?;
    let done = pair.b.expect(BIND, WcOpcode::BIND_MW)?;
    window.settle(done.status);
    assert!(!window.is_bound());
    assert_eq!(write(&mut pair, window.rkey(), target, 8)?, WcStatus::REM_ACCESS_ERR);
    let elsewhere = still_held(elsewhere);
    window.reallocate()?;
    region.destroy()?;
    elsewhere.destroy()?;
    Ok(())
}

fn bind_and_its_rkey_go_in_one_batch() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    let binding = window.bind(&pair.b.qp, &region, 4096..8192, read_write())?;
    pair.b.memory.copy_from(0, &binding.rkey().0.to_be_bytes())?;
    let sges = [pair.b.sge(0..4)];
    pair.a.recv(1, 0..4)?;
    pair.b.send_all(&[
        SendWr::bind_mw(binding).id(BIND).signaled(),
        SendWr::send(&sges).id(2).signaled(),
    ])?;
    let done = pair.b.expect(BIND, WcOpcode::BIND_MW)?;
    window.settle(done.status);
    pair.b.expect(2, WcOpcode::SEND)?;
    pair.a.expect(1, WcOpcode::RECV)?;
    let told: [u8; 4] = pair.a.read(0..4).try_into().map_err(|_| Stop::fail("four bytes"))?;
    let rkey = Rkey(u32::from_be_bytes(told));
    assert_eq!(rkey, window.rkey());
    assert_eq!(write(&mut pair, rkey, region.addr() + 4096, 100)?, WcStatus::SUCCESS);
    Ok(())
}

fn window_grants_only_its_own_access() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, Access::REMOTE_READ)?;
    let status = write(&mut pair, window.rkey(), region.addr() + 4096, 8)?;
    assert_eq!(status, WcStatus::REM_ACCESS_ERR);
    assert!(content(&region)? == pattern::bytes(pattern::POISON, SIZE));
    Ok(())
}

fn bindings_that_do_not_fit_are_refused() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let qp = &pair.b.qp;
    let (region, mut one) = allocate(&pair.b, WindowType::One)?;
    let (_, mut two) = allocate(&pair.b, WindowType::Two)?;
    let read = Access::REMOTE_READ;
    let unbindable = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64)?;
    let errors = [
        two.bind(qp, &region, ..SIZE + 1, read).unwrap_err(),
        two.bind(qp, &region, 5..5, read).unwrap_err(),
        two.bind(qp, &region, .., Access::LOCAL_WRITE).unwrap_err(),
        one.bind(qp, &region, .., read | Access::ZERO_BASED).unwrap_err(),
        two.bind(qp, &unbindable, .., read).unwrap_err(),
        two.unbind(qp).unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert_eq!(error.verb(), "bind_mw");
    }
    Ok(())
}

fn other_domains_and_contexts_are_refused() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    let (foreign, _) = allocate(&pair.a, WindowType::Two)?;
    let access = Access::REMOTE_READ;
    for error in [
        window.bind(&pair.a.qp, &region, .., access).unwrap_err(),
        window.bind(&pair.b.qp, &foreign, .., access).unwrap_err(),
    ] {
        assert!(error.message().contains("another context"), "{error}");
    }
    let domain = pair.b.context.alloc_pd()?;
    let cq = pair.b.context.cq_builder(1).build()?;
    let qp = domain.qp_builder(&cq, &cq, QpType::RC).build()?;
    let rights = Access::LOCAL_WRITE | Access::MW_BIND;
    let elsewhere = domain.mr_builder().access(rights).allocate::<u8>(64)?;
    for error in [
        window.bind(&qp, &region, .., access).unwrap_err(),
        window.bind(&pair.b.qp, &elsewhere, .., access).unwrap_err(),
    ] {
        assert!(error.message().contains("protection domain"), "{error}");
    }
    Ok(())
}

fn second_binding_before_the_first_settles_is_refused() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    let before = window.rkey();
    let binding = window.bind(&pair.b.qp, &region, .., read_write())?;
    assert_eq!(window.rkey(), binding.rkey());
    let error = window.bind(&pair.b.qp, &region, .., read_write()).unwrap_err();
    assert_eq!(error.errno(), Errno::BUSY);
    assert_eq!(window.reallocate().unwrap_err().errno(), Errno::BUSY);
    // A binding to the region may be under way.
    let region = still_held(region);
    // The binding was never posted, but the window does not know that.
    window.settle(WcStatus::WR_FLUSH_ERR);
    assert_eq!((window.rkey(), window.is_bound()), (before, true));
    let region = still_held(region);
    window.reallocate()?;
    assert!(!window.is_bound());
    region.destroy()?;
    Ok(())
}

fn windows_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::MW, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        Ok(Box::new(move || {
            drop(supported(pd.alloc_mw(WindowType::One), Capability::Mw1)?);
            let window = supported(pd.alloc_mw(WindowType::Two), Capability::Mw2)?;
            window.destroy()?;
            Ok(())
        }))
    })
}
