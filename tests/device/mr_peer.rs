//! Memory regions as a peer sees them: addresses, rights, pages that are not there yet.

use crate::capability::Capability;
use crate::pair::{Config, Pair};
use crate::pattern;
use crate::verdict::{Verdict, supported, trials};
use uverbs::{Access, MemoryRegion, Remote, Rereg, SendWr, WcOpcode, WcStatus};

trials![addresses_count_from_where_they_are_told, right_is_lost_by_rereg, pages_are_faulted_in];

/// Lets `a` write to a region of `b`'s; how that ended.
fn write(pair: &mut Pair, remote: Remote, seed: u64, length: usize) -> Verdict<WcStatus> {
    pair.a.fill(0..length, seed);
    let sges = [pair.a.sge(0..length)];
    pair.a.send(SendWr::write(remote, &sges).id(seed).signaled())?;
    Ok(pair.a.wait()?.status)
}

fn check(region: &MemoryRegion<u8>, offset: usize, seed: u64, length: usize) {
    let mut bytes = vec![0; length];
    region.copy_to(offset, &mut bytes).expect("within the region");
    pattern::check(&bytes, seed);
}

fn addresses_count_from_where_they_are_told() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    for iova in [0, 0x1234_5000, 1 << 62] {
        let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).iova(iova);
        let region = builder.allocate::<u8>(3 * 4096)?;
        let remote = region.remote(4000)?;
        assert_eq!(remote.addr, iova + 4000);
        assert_eq!(write(&mut pair, remote, iova + 1, 5000)?, WcStatus::SUCCESS);
        check(&region, 4000, iova + 1, 5000);
        // And so do requests of this side.
        let sges = [region.sge(4000..9000)?];
        pair.a.recv(3, 0..5000)?;
        pair.b.send(SendWr::send(&sges).id(4).signaled())?;
        pair.b.expect(4, WcOpcode::SEND)?;
        pair.a.expect(3, WcOpcode::RECV)?;
        pair.a.check(0..5000, iova + 1);
    }
    Ok(())
}

fn right_is_lost_by_rereg() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut region = pair.b.pd.allocate::<u8>(4096)?;
    assert_eq!(write(&mut pair, region.remote(0)?, 5, 100)?, WcStatus::SUCCESS);
    let less = Access::LOCAL_WRITE | Access::REMOTE_READ;
    supported(region.rereg(Rereg::new().access(less)), Capability::Rereg)?;
    assert_eq!(write(&mut pair, region.remote(0)?, 6, 100)?, WcStatus::REM_ACCESS_ERR);
    check(&region, 0, 5, 100);
    Ok(())
}

fn pages_are_faulted_in() -> Verdict {
    // rxe of Linux 7.2 copies each packet to and from the beginning of its page, so what is told
    // apart here is pages, by messages of one packet.
    const LENGTH: usize = 1000;
    let mut pair = Pair::new(Config::rc())?;
    let builder = pair.b.pd.registration().access(Access::ALL_REMOTE).on_demand();
    let region = supported(builder.allocate::<u8>(16 * 4096), Capability::Odp)?;
    // None of the pages was ever touched.
    for page in 0..16 {
        let remote = region.remote(page * 4096)?;
        assert_eq!(write(&mut pair, remote, page as u64, LENGTH)?, WcStatus::SUCCESS);
    }
    for page in 0..16 {
        check(&region, page * 4096, page as u64, LENGTH);
        pair.a.poison(0..LENGTH);
        let sges = [pair.a.sge(0..LENGTH)];
        pair.a.send(SendWr::read(region.remote(page * 4096)?, &sges).id(8).signaled())?;
        pair.a.expect(8, WcOpcode::READ)?;
        pair.a.check(0..LENGTH, page as u64);
    }
    region.destroy().map_err(|(_, error)| error)?;
    Ok(())
}
