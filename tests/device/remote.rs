//! Memory that a peer reaches: however it was registered, and whatever became of it since.

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, require, supported, trials};
use uverbs::{Access, Advice, Errno, OdpOps, Remote, Rereg, SendWr, WcOpcode, WcStatus};

trials![
    boxed_slice_can_be_reached,
    mapping_can_be_reached,
    raw_memory_can_be_reached,
    borrowed_memory_can_be_reached,
    addresses_of_ones_own,
    elements_arrive_as_values,
    rights_change,
    domain_changes,
    memory_is_exchanged,
    relaxed_ordering_is_a_hint,
    paged_on_demand,
    paged_on_demand_is_prefetched,
    whole_address_space,
    invalidation_of_what_is_no_window,
];

/// Writes to memory of b, reads it back, and compares.
fn reaches(pair: &mut Pair, remote: Remote, length: usize) -> Verdict {
    pair.a.fill(0..length, 21);
    let sges = [pair.a.sge(0..length)];
    pair.a.send(SendWr::write(remote, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::WRITE)?;
    pair.a.poison(0..length);
    pair.a.send(SendWr::read(remote, &sges).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::READ)?;
    pair.a.check(0..length, 21);
    Ok(())
}

fn boxed_slice_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let boxed = vec![0xaau8; 10_000].into_boxed_slice();
    let region = pair.b.pd.register(boxed, Access::ALL_REMOTE)?;
    reaches(&mut pair, region.remote(5)?, 9_000)?;
    let boxed = region.destroy().map_err(|(_, error)| error)?;
    crate::pattern::check(&boxed[5..9_005], 21);
    assert!(boxed[..5].iter().chain(&boxed[9_005..]).all(|byte| *byte == 0xaa));
    Ok(())
}

fn mapping_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mapping = memmap2::MmapMut::map_anon(20_000)?;
    let region = pair.b.pd.register(mapping, Access::ALL_REMOTE)?;
    reaches(&mut pair, region.remote(4090)?, 10_000)?;
    let mapping = region.destroy().map_err(|(_, error)| error)?;
    crate::pattern::check(&mapping[4090..14_090], 21);
    Ok(())
}

#[allow(unsafe_code, reason = "the memory is borrowed by hand")]
fn raw_memory_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut memory = vec![0u8; 5000];
    let address = memory.as_mut_ptr();
    // SAFETY: the vector outlives the region, and nothing touches it meanwhile.
    let region = unsafe { pair.b.pd.register_raw(address, 5000, Access::ALL_REMOTE) }?;
    reaches(&mut pair, region.remote(0)?, 5000)?;
    region.destroy().map_err(|(_, error)| error)?;
    crate::pattern::check(&memory, 21);
    Ok(())
}

#[allow(unsafe_code, reason = "the memory is borrowed by hand")]
fn borrowed_memory_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut memory = [0u8; 3000];
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE);
    // SAFETY: the region is destroyed before the borrow ends.
    let region = unsafe { builder.register_borrowed(&mut memory[..]) }?;
    reaches(&mut pair, region.remote(1000)?, 2000)?;
    region.destroy().map_err(|(_, error)| error)?;
    crate::pattern::check(&memory[1000..], 21);
    Ok(())
}

fn addresses_of_ones_own() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for iova in [0u64, 0x1234_5000, 1 << 40] {
        let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).iova(iova);
        let region = builder.allocate::<u8>(8192)?;
        let remote = region.remote(100)?;
        assert_eq!(remote.addr, iova + 100);
        reaches(&mut pair, remote, 5000)?;
    }
    // Within a page both must lie alike.
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).iova(0x1001);
    assert_eq!(builder.allocate::<u8>(8192).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn elements_arrive_as_values() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut from = pair.a.pd.allocate::<u64>(100)?;
    let to = pair.b.pd.allocate::<u64>(100)?;
    for index in 0..100 {
        from.write_at(index, (index as u64) << 40 | 0xff)?;
    }
    let sges = [from.sge(..)?];
    pair.a.send(SendWr::write(to.remote(0)?, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::WRITE)?;
    for index in 0..100 {
        assert_eq!(to.read_at(index), Some((index as u64) << 40 | 0xff));
    }
    Ok(())
}

fn rights_change() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut region = pair.b.pd.allocate::<u8>(4096)?;
    reaches(&mut pair, region.remote(0)?, 1000)?;
    let read_only = Access::LOCAL_WRITE | Access::REMOTE_READ;
    supported(region.rereg(Rereg::new().access(read_only)), Capability::Rereg)?;
    assert_eq!(region.access(), read_only);
    let sges = [pair.a.sge(0..8)];
    pair.a.send(SendWr::read(region.remote(0)?, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::READ)?;
    pair.a.send(SendWr::write(region.remote(0)?, &sges).id(2))?;
    pair.a.expect_failure(2, WcStatus::REM_ACCESS_ERR)?;
    let error = region.rereg(Rereg::new()).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    Ok(())
}

fn domain_changes() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let other = pair.b.context.alloc_pd()?;
    let mut region = other.allocate::<u8>(4096)?;
    supported(region.rereg(Rereg::new().protection_domain(&pair.b.pd)), Capability::Rereg)?;
    reaches(&mut pair, region.remote(0)?, 4096)?;
    // The domain that it left is free.
    other.destroy().map_err(|(_, error)| error)?;
    let foreign = env::open()?.alloc_pd()?;
    let error = region.rereg(Rereg::new().protection_domain(&foreign)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    Ok(())
}

fn memory_is_exchanged() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let region = pair.b.pd.register(vec![1u8; 8192], Access::ALL_REMOTE)?;
    let (region, old) = match region.exchange(vec![2u8; 4096]) {
        Ok(exchanged) => exchanged,
        Err(failed) => {
            assert!(failed.region.is_some() && failed.memory.is_some(), "{}", failed.error);
            supported(Err(failed.error), Capability::ReregTranslation)?
        }
    };
    assert_eq!((old.len(), old[0], region.byte_len()), (8192, 1, 4096));
    reaches(&mut pair, region.remote(0)?, 4096)
}

fn relaxed_ordering_is_a_hint() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).relaxed_ordering();
    let region = builder.allocate::<u8>(4096)?;
    reaches(&mut pair, region.remote(0)?, 4096)
}

/// What the device can do with reliable connections to pages that are not there.
fn odp(pair: &Pair) -> Verdict<OdpOps> {
    let caps = pair.b.context.query_device()?.odp_caps();
    match caps {
        Some(caps) if caps.rc.contains(OdpOps::WRITE | OdpOps::READ) => Ok(caps.rc),
        _ => {
            require(false, Capability::Odp, "not advertised")?;
            Ok(OdpOps::empty())
        }
    }
}

fn paged_on_demand() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    odp(&pair)?;
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).on_demand();
    let mapping = memmap2::MmapMut::map_anon(1 << 20)?;
    // No page of it exists yet.
    let region = builder.register(mapping)?;
    // One packet at the beginning of a page: rxe of Linux 7.2 copies all others to the wrong place
    // (`__rxe_odp_mr_copy` forgets the offset within the page, and where it is in the packet).
    for page in [0, 73, 250] {
        reaches(&mut pair, region.remote(4096 * page)?, 1000)?;
    }
    let mapping = region.destroy().map_err(|(_, error)| error)?;
    crate::pattern::check(&mapping[4096 * 73..4096 * 73 + 1000], 21);
    Ok(())
}

fn paged_on_demand_is_prefetched() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    odp(&pair)?;
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).on_demand();
    let region = builder.allocate::<u8>(1 << 18)?;
    let ranges = [region.on_demand(0..100_000)?, region.on_demand(200_000..200_001)?];
    for advice in [Advice::PREFETCH_WRITE, Advice::PREFETCH, Advice::PREFETCH_NO_FAULT] {
        for wait in [true, false] {
            supported(pair.b.pd.advise(advice, &ranges, wait), Capability::AdviseMr)?;
        }
    }
    assert_eq!(pair.b.pd.advise(Advice::PREFETCH, &[], true).unwrap_err().errno(), Errno::INVAL);
    reaches(&mut pair, region.remote(8192)?, 1000)
}

#[allow(unsafe_code, reason = "all memory is exposed")]
fn whole_address_space() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).on_demand();
    // SAFETY: the only one who learns the key is this test.
    let region = unsafe { builder.register_address_space() };
    let region = supported(region, Capability::OdpImplicit)?;
    let remote = Remote { addr: pair.b.memory.addr(), rkey: region.rkey() };
    reaches(&mut pair, remote, 4096)
}

fn invalidation_of_what_is_no_window() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    pair.b.recv(1, 0..50)?;
    let sges = [pair.a.sge(0..50)];
    pair.a.send(SendWr::send_inv(&sges, uverbs::Rkey(0x00ee_ee00)).id(2).signaled())?;
    // The message arrives, but the receive and with it the queue pair fail.
    let received = pair.b.wait()?;
    assert_eq!(received.wr_id, 1);
    assert_ne!(received.status, WcStatus::SUCCESS, "{received:?}");
    Ok(())
}
