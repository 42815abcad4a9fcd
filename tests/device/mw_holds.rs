//! Memory windows hold their regions, regardless of the program's claims; and the calls that end their keys.

use crate::capability::Capability;
use crate::env;
use crate::mw::{BIND, SIZE, allocate, bind, content, read_write, still_held, write};
use crate::pair::{Config, Pair, Side};
use crate::partner::Loop;
use crate::pattern;
use crate::verdict::{Verdict, supported, trials};
use std::time::{Duration, Instant};
use uverbs::{
    Access, Envelope, Errno, ErrorWith, MemoryRegion, MemoryWindow, ObjectKind, Remote, Rereg,
    Rkey, SendWr, WcOpcode, WcStatus, WindowType,
};

trials![
    failed_binding_is_followed_by_a_fresh_key,
    flushed_binding_holds_its_region,
    false_claim_opens_no_other_region,
    imported_region_is_not_bound_even_if_its_envelope_claims_the_right,
    reallocation_ends_every_key,
    hundreds_of_bindings_hold_few_regions,
    forgotten_window_holds_its_region,
    bound_window_holds_its_region,
    any_order_of_dropping_is_quick,
    dropped_queue_pair_that_a_window_keeps_receives_nothing,
];

/// Brings both sides back from an error.
fn reconnect(pair: &mut Pair) -> Verdict {
    pair.a.reset()?;
    pair.b.reset()?;
    pair.connect()
}

fn failed_binding_is_followed_by_a_fresh_key() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    let first = window.rkey();
    // The program claims that the window is free, and binds it again, which devices refuse.
    window.invalidated();
    let binding = window.bind(&pair.b.qp, &region, .., read_write())?;
    let second = binding.rkey();
    pair.b.send(SendWr::bind_mw(binding).id(BIND).signaled())?;
    let done = pair.b.wait()?;
    // rxe flushes the request that failed, too.
    let failures = [WcStatus::MW_BIND_ERR, WcStatus::WR_FLUSH_ERR];
    assert!(done.wr_id == BIND && failures.contains(&done.status), "{done:?}");
    window.settle(done.status);
    assert!(window.is_bound(), "by either binding");
    let region = still_held(region);

    reconnect(&mut pair)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    assert!(window.rkey() != first && window.rkey() != second);
    let target = region.addr() + 4096;
    assert_eq!(write(&mut pair, window.rkey(), target, 8)?, WcStatus::SUCCESS);
    assert_eq!(write(&mut pair, first, target, 8)?, WcStatus::REM_ACCESS_ERR);
    window.destroy()?;
    region.destroy()?;
    Ok(())
}

/// rxe carries a binding out before it learns that the request before it failed, and reports it as flushed.
fn flushed_binding_holds_its_region() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut path = Loop::new(&pair.b.context, &pair.b.pd)?;
    let (region, mut window) = allocate(&pair.b, WindowType::One)?;
    let binding = window.bind(&pair.b.qp, &region, 4096..8192, read_write())?;
    let sges = [pair.b.sge(0..8)];
    let nowhere = Remote { rkey: Rkey(!pair.a.memory.rkey().0), ..pair.a.remote(0) };
    pair.b.send_all(&[
        SendWr::write(nowhere, &sges).id(1).signaled(),
        SendWr::bind_mw(binding).id(BIND).signaled(),
    ])?;
    pair.b.expect_failure(1, WcStatus::REM_ACCESS_ERR)?;
    let done = pair.b.wait()?;
    assert_eq!((done.wr_id, done.status), (BIND, WcStatus::WR_FLUSH_ERR), "{done:?}");
    window.settle(done.status);
    let addr = region.addr() + 4096;
    let slices = memory_as_slices(&pair.b, region)?;

    // Through a queue pair that has not failed.
    let from = pair.b.sge(0..4096);
    let status = path.write(from, Remote { addr, rkey: binding.rkey() })?;
    slices.check("a peer wrote slices by a binding that was flushed");
    // The binding was carried out or not, depending on the time at which the failure arrived.
    let either = [WcStatus::SUCCESS, WcStatus::REM_ACCESS_ERR];
    assert!(either.contains(&status), "{status}");
    assert_eq!(slices.refused, Some((Errno::BUSY, None)));
    drop(window);
    assert_eq!(pair.b.context.leaked(), 0);
    Ok(())
}

/// Buffers of a pool, in the place of a region, if that could be destroyed.
struct Slices {
    buffers: Vec<uverbs::owned::Buffer>,
    /// The error of destroying the region: the library's number, and the kernel's.
    refused: Option<(Errno, Option<Errno>)>,
}

/// Destroys a region, drops it if that fails, and registers a pool: the kernel gives it the region's addresses, and
/// mlx5's driver the region's key.
fn memory_as_slices(side: &Side, region: MemoryRegion<u8>) -> Verdict<Slices> {
    let refused = match region.destroy() {
        Ok(memory) => {
            drop(memory);
            None
        }
        Err(ErrorWith { error, .. }) => Some((error.errno(), error.kernel_errno())),
    };
    let pool = side.pd.buffer_pool_builder(4096).count(SIZE / 4096).build()?;
    let buffers: Vec<_> = std::iter::from_fn(|| pool.copy(&[0; 4096]).ok()).collect();
    assert_eq!(buffers.len(), SIZE / 4096);
    Ok(Slices { buffers, refused })
}

impl Slices {
    #[track_caller]
    fn check(&self, why: &str) {
        let is_zeroed = |slice: &[u8]| slice.iter().all(|byte| *byte == 0);
        assert!(self.buffers.iter().all(|buffer| is_zeroed(buffer)), "{why}");
    }
}

/// A window holds every region that it may open to the peer, regardless of the program's claims about the window.
fn false_claim_opens_no_other_region() -> Verdict {
    let words: [fn(&mut MemoryWindow, &Side) -> Verdict; 3] = [
        |window, _| {
            window.invalidated();
            Ok(())
        },
        |window, side| {
            let (other, _spare) = allocate(side, window.window_type())?;
            window.invalidated();
            window.bind(&side.qp, &other, .., read_write())?;
            // The binding was not even posted.
            window.settle(WcStatus::SUCCESS);
            Ok(())
        },
        |window, side| {
            if window.window_type() == WindowType::One {
                window.unbind(&side.qp)?;
                window.settle(WcStatus::SUCCESS);
            }
            Ok(())
        },
    ];
    for window_type in [WindowType::One, WindowType::Two] {
        for say in words {
            let mut pair = Pair::new(Config::rc())?;
            let (region, mut window) = allocate(&pair.b, window_type)?;
            bind(&mut pair.b, &mut window, &region, read_write())?;
            let (key, addr) = (window.rkey(), region.addr() + 4096);
            say(&mut window, &pair.b)?;
            let slices = memory_as_slices(&pair.b, region)?;
            let status = write(&mut pair, key, addr, 4096)?;
            slices.check("a peer wrote slices through a window that was said to be free");
            assert_eq!((status, slices.refused), (WcStatus::SUCCESS, Some((Errno::BUSY, None))));
            drop(window);
            assert_eq!(pair.b.context.leaked(), 0);
        }
    }
    Ok(())
}

/// An envelope with a forged proof of the region's rights.
fn forge(envelope: &Envelope, access: Access) -> Verdict<Envelope> {
    const RIGHTS: std::ops::Range<usize> = 72..80;
    const CHECK: std::ops::Range<usize> = 84..88;
    let mut bytes = envelope.to_bytes();
    bytes[RIGHTS].copy_from_slice(&u64::from(access.bits()).to_le_bytes());
    bytes[CHECK].fill(0);
    let check = !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ ((crc & 1) * 0xedb8_8320))
    });
    bytes[CHECK].copy_from_slice(&check.to_le_bytes());
    Ok(Envelope::from_bytes(&bytes)?)
}

/// A window is not bound to an imported region, neither with its own rights nor with claimed ones.
fn imported_region_is_not_bound_even_if_its_envelope_claims_the_right() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    let private = pair.b.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 4096])?;
    let forged = forge(&private.export()?, Access::LOCAL_WRITE | Access::MW_BIND)?;
    for envelope in [region.export()?, forged] {
        let imported = pair.b.pd.import_mr(&envelope)?;
        assert!(imported.access().contains(Access::MW_BIND));
        let error = window.bind(&pair.b.qp, &imported, .., read_write()).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::PERM, None), "{error}");
    }
    assert!(!window.is_bound());
    // rxe of Linux 7 takes a pinned region for a paged one if the program gives advice on it.
    let paged = forge(&private.export()?, Access::LOCAL_WRITE | Access::ON_DEMAND)?;
    let error = pair.b.pd.import_mr(&paged)?.on_demand(..).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::PERM, None), "{error}");
    private.destroy()?;
    region.destroy()?;
    Ok(())
}

fn reallocation_ends_every_key() -> Verdict {
    for window_type in [WindowType::One, WindowType::Two] {
        let mut pair = Pair::new(Config::rc())?;
        let (region, mut window) = allocate(&pair.b, window_type)?;
        bind(&mut pair.b, &mut window, &region, read_write())?;
        let (key, target) = (window.rkey(), region.addr() + 4096);
        assert_eq!(write(&mut pair, key, target, 8)?, WcStatus::SUCCESS);
        window.reallocate()?;
        assert!(!window.is_bound());
        assert_ne!(window.rkey(), key);
        assert_eq!(write(&mut pair, key, target, 8)?, WcStatus::REM_ACCESS_ERR);
        region.destroy()?;

        reconnect(&mut pair)?;
        let (region, _spare) = allocate(&pair.b, window_type)?;
        bind(&mut pair.b, &mut window, &region, read_write())?;
        let target = region.addr() + 4096;
        assert_eq!(write(&mut pair, window.rkey(), target, 8)?, WcStatus::SUCCESS);
        pattern::check(&content(&region)?[4096..4104], 5);
        still_held(region);
    }
    Ok(())
}

fn hundreds_of_bindings_hold_few_regions() -> Verdict {
    const MOST: usize = 16;
    for window_type in [WindowType::One, WindowType::Two] {
        let mut pair = Pair::new(Config::rc())?;
        let context = pair.b.context.clone();
        let regions = || supported(context.handles(ObjectKind::MR), Capability::InfoHandles);
        let others = regions()?.len();
        let (_, mut window) = allocate(&pair.b, window_type)?;
        for round in 0..200 {
            let access = Access::LOCAL_WRITE | Access::MW_BIND;
            let region = pair.b.pd.mr_builder().access(access).allocate::<u8>(SIZE)?;
            bind(&mut pair.b, &mut window, &region, read_write())?;
            if round % 10 == 0 {
                let target = region.addr() + 4096;
                assert_eq!(write(&mut pair, window.rkey(), target, 8)?, WcStatus::SUCCESS);
                pattern::check(&content(&region)?[4096..4104], 5);
            }
            drop(region);
            if window_type == WindowType::Two {
                pair.b.send(SendWr::local_inv(window.rkey()).id(3).signaled())?;
                pair.b.expect(3, WcOpcode::LOCAL_INV)?;
                window.invalidated();
            }
            let held = regions()?.len() - others;
            assert!(held <= MOST, "{held} regions after {round} bindings");
        }
        drop(window);
        assert_eq!((regions()?.len(), context.leaked()), (others, 0));
    }
    Ok(())
}

fn forgotten_window_holds_its_region() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::One)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    let (key, addr) = (window.rkey(), region.addr() + 4096);
    std::mem::forget(window);
    let slices = memory_as_slices(&pair.b, region)?;
    assert_eq!(write(&mut pair, key, addr, 4096)?, WcStatus::SUCCESS);
    slices.check("a peer wrote slices through a window that was forgotten");
    assert_eq!(slices.refused, Some((Errno::BUSY, None)));
    Ok(())
}

fn bound_window_holds_its_region() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    let mut region = still_held(region);
    let error = region.rereg(Rereg::new().access(Access::LOCAL_WRITE)).unwrap_err();
    assert_eq!(error.errno(), Errno::BUSY);
    let addr = region.addr() + 4096;
    drop(region);
    assert_eq!(write(&mut pair, window.rkey(), addr, 64)?, WcStatus::SUCCESS);
    drop(window);
    let left = supported(pair.b.context.handles(ObjectKind::MR), Capability::InfoHandles)?;
    assert_eq!(left, [pair.b.memory.handle()], "the region went with its window");
    assert_eq!(pair.b.context.leaked(), 0);
    Ok(())
}

fn any_order_of_dropping_is_quick() -> Verdict {
    let idle = env::resources()?;
    for window_type in [WindowType::One, WindowType::Two] {
        for order in 0..6 {
            let mut pair = Pair::new(Config::rc())?;
            let context = pair.b.context.clone();
            let (region, mut window) = allocate(&pair.b, window_type)?;
            bind(&mut pair.b, &mut window, &region, read_write())?;
            let start = Instant::now();
            match order {
                0 => drop((pair, region, window)),
                1 => drop((pair, window, region)),
                2 => drop((region, pair, window)),
                3 => drop((region, window, pair)),
                4 => drop((window, pair, region)),
                _ => drop((window, region, pair)),
            }
            // rxe waits for the window when the queue pair goes first, for 50 seconds.
            let took = start.elapsed();
            assert!(took < Duration::from_secs(10), "{window_type:?}, order {order}: {took:?}");
            assert_eq!(context.leaked(), 0, "{window_type:?}, order {order}");
        }
    }
    env::unchanged(&idle)
}

fn dropped_queue_pair_that_a_window_keeps_receives_nothing() -> Verdict {
    let mut pair = Pair::new(Config { timeout: 8, retry_count: 2, ..Config::rc() })?;
    let (region, mut window) = allocate(&pair.b, WindowType::Two)?;
    bind(&mut pair.b, &mut window, &region, read_write())?;
    pair.b.fill(0..64, 1);
    pair.b.recv(1, 0..64)?;
    let Pair { mut a, b, .. } = pair;
    drop(b.qp);
    a.fill(0..64, 2);
    let sges = [a.sge(0..64)];
    a.send(SendWr::send(&sges).id(2).signaled())?;
    a.expect_failure(2, WcStatus::RETRY_EXC_ERR)?;
    let mut inbox = [0; 64];
    b.memory.copy_to(0, &mut inbox)?;
    pattern::check(&inbox, 1);
    window.destroy()?;
    region.destroy()?;
    Ok(())
}
