//! Memory regions as a peer sees them: addresses, rights, pages that are not present yet.

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Pair};
use crate::pattern;
use crate::verdict::{Verdict, supported, trials};
use std::mem::offset_of;
use uverbs::{
    Access, Errno, MemoryRegion, ProtectionDomain, Remote, Rereg, SendWr, WcOpcode, WcStatus,
};
use zerocopy::{FromBytes, IntoBytes};

trials![
    addresses_count_from_the_given_iova,
    rereg_takes_the_right_away,
    pages_are_faulted_in,
    boxed_slice_can_be_reached,
    mapping_can_be_reached,
    raw_memory_can_be_reached,
    unowned_memory_can_be_reached_through_every_registration,
    borrowed_memory_can_be_reached,
    written_bytes_read_as_values,
    fields_of_a_type_of_the_programs_own_can_be_written,
    region_works_in_its_new_protection_domain,
    exchanged_memory_can_be_reached,
    whole_address_space_can_be_reached,
    invalidating_the_rkey_of_a_region_fails,
];

/// Has `a` write to a region of `b`; returns the status.
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

fn addresses_count_from_the_given_iova() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    // Multiples of every page size.
    for iova in [0, 0x1235_0000, 1 << 62] {
        let builder = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).iova(iova);
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

fn rereg_takes_the_right_away() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut region = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    assert_eq!(write(&mut pair, region.remote(0)?, 5, 100)?, WcStatus::SUCCESS);
    let less = Access::LOCAL_WRITE | Access::REMOTE_READ;
    supported(region.rereg(Rereg::new().access(less)), Capability::Rereg)?;
    assert_eq!(write(&mut pair, region.remote(0)?, 6, 100)?, WcStatus::REM_ACCESS_ERR);
    check(&region, 0, 5, 100);
    Ok(())
}

fn pages_are_faulted_in() -> Verdict {
    // rxe of Linux 7.2 copies each packet to and from the beginning of its page. So this test tells
    // pages apart, by messages of one packet.
    const LENGTH: usize = 1000;
    let size = env::page_size();
    let mut pair = Pair::new(Config::rc())?;
    let builder = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).on_demand();
    let region = supported(builder.allocate::<u8>(16 * size), Capability::Odp)?;
    // None of the pages was ever touched.
    for page in 0..16 {
        let remote = region.remote(page * size)?;
        assert_eq!(write(&mut pair, remote, page as u64, LENGTH)?, WcStatus::SUCCESS);
    }
    for page in 0..16 {
        check(&region, page * size, page as u64, LENGTH);
        pair.a.poison(0..LENGTH);
        let sges = [pair.a.sge(0..LENGTH)];
        pair.a.send(SendWr::read(region.remote(page * size)?, &sges).id(8).signaled())?;
        pair.a.expect(8, WcOpcode::READ)?;
        pair.a.check(0..LENGTH, page as u64);
    }
    region.destroy()?;
    Ok(())
}

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
    let region = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register(boxed)?;
    reaches(&mut pair, region.remote(5)?, 9_000)?;
    let boxed = region.destroy()?;
    pattern::check(&boxed[5..9_005], 21);
    assert!(boxed[..5].iter().chain(&boxed[9_005..]).all(|byte| *byte == 0xaa));
    Ok(())
}

fn mapping_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mapping = memmap2::MmapMut::map_anon(20_000)?;
    let region = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register(mapping)?;
    reaches(&mut pair, region.remote(4090)?, 10_000)?;
    let mapping = region.destroy()?;
    pattern::check(&mapping[4090..14_090], 21);
    Ok(())
}

#[allow(unsafe_code, reason = "the memory is borrowed by hand")]
fn raw_memory_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut memory = vec![0u8; 5000];
    let address = memory.as_mut_ptr();
    // SAFETY: the vector outlives the region, and nothing touches it meanwhile.
    let region =
        unsafe { pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register_raw(address, 5000) }?;
    reaches(&mut pair, region.remote(0)?, 5000)?;
    region.destroy()?;
    pattern::check(&memory, 21);
    Ok(())
}

#[allow(unsafe_code, reason = "the memory is borrowed by hand")]
fn unowned_memory_can_be_reached_through_every_registration() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut memory = Vec::<u8>::with_capacity(9000);
    let address = memory.as_mut_ptr();
    let register = |pd: &ProtectionDomain| {
        // SAFETY: the vector keeps its buffer until the regions are gone, and is looked at while no
        // request is under way.
        unsafe { pd.mr_builder().access(Access::ALL_REMOTE).register_unowned(address, 9000) }
    };
    let (near, far) = (register(&pair.a.pd)?, register(&pair.b.pd)?);
    let far = far.erase();
    reaches(&mut pair, far.remote(0)?, 9000)?;
    // SAFETY: a peer wrote all of them.
    unsafe { memory.set_len(9000) };
    pattern::check(&memory, 21);
    // This side sends the same memory.
    memory[..4000].fill(9);
    pair.b.recv(3, 0..4000)?;
    pair.a.send(SendWr::send(&[near.sge(..4000)?]).id(4).signaled())?;
    pair.a.expect(4, WcOpcode::SEND)?;
    pair.b.expect(3, WcOpcode::RECV)?;
    let mut received = [0; 4000];
    pair.b.memory.copy_to(0, &mut received)?;
    assert_eq!(received, [9; 4000]);
    near.destroy()?;
    far.destroy()?;
    Ok(())
}

#[allow(unsafe_code, reason = "the memory is borrowed by hand")]
fn borrowed_memory_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut memory = [0u8; 3000];
    let builder = pair.b.pd.mr_builder().access(Access::ALL_REMOTE);
    // SAFETY: the region is destroyed before the borrow ends.
    let region = unsafe { builder.register_borrowed(&mut memory[..]) }?;
    reaches(&mut pair, region.remote(1000)?, 2000)?;
    region.destroy()?;
    pattern::check(&memory[1000..], 21);
    Ok(())
}

fn written_bytes_read_as_values() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let mut from = pair.a.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(100)?;
    let to = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(100)?;
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

/// 24 bytes, so that the distance of values is no power of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, FromBytes, IntoBytes)]
#[repr(C)]
struct Record {
    key: u32,
    count: u32,
    mean: f64,
    name: [u8; 8],
}

fn fields_of_a_type_of_the_programs_own_can_be_written() -> Verdict {
    const SIZE: usize = size_of::<Record>();
    let mut pair = Pair::new(Config::rc())?;
    let mut from = pair.a.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<Record>(2)?;
    let table =
        pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register(vec![Record::default(); 5])?;
    assert_eq!((table.len(), table.byte_len()), (5, 5 * SIZE));
    let record = Record { key: 7, count: 128, mean: 21.5, name: *b"a sensor" };
    from.write_at(1, record)?;
    assert_eq!((from.read_at(0), from.read_at(1)), (Some(Record::default()), Some(record)));
    // A whole value, and one field of another.
    let mean = offset_of!(Record, mean);
    let (whole, field) = ([from.sge(SIZE..)?], [from.sge(SIZE + mean..SIZE + mean + 8)?]);
    pair.a.send(SendWr::write(table.remote(3 * SIZE)?, &whole).id(1))?;
    pair.a.send(SendWr::write(table.remote(SIZE + mean)?, &field).id(2).signaled())?;
    pair.a.expect(2, WcOpcode::WRITE)?;
    let only_mean = Record { mean: record.mean, ..Record::default() };
    let expected = [Record::default(), only_mean, Record::default(), record, Record::default()];
    assert_eq!(std::array::from_fn(|index| table.read_at(index)), expected.map(Some));
    assert_eq!(table.read_at(5), None);
    // The program gets its own type back.
    assert_eq!(table.destroy()?, expected);
    Ok(())
}

fn region_works_in_its_new_protection_domain() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let other = pair.b.context.alloc_pd()?;
    let mut region = other.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    supported(region.rereg(Rereg::new().protection_domain(&pair.b.pd)), Capability::Rereg)?;
    reaches(&mut pair, region.remote(0)?, 4096)?;
    // The domain that it left is free.
    other.destroy()?;
    let foreign = crate::env::open()?.alloc_pd()?;
    let error = region.rereg(Rereg::new().protection_domain(&foreign)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    Ok(())
}

fn exchanged_memory_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let region = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register(vec![1u8; 8192])?;
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

#[allow(unsafe_code, reason = "all memory is exposed")]
fn whole_address_space_can_be_reached() -> Verdict {
    let mut pair = Pair::new(Config::rc())?;
    let builder = pair.b.pd.mr_builder().access(Access::ALL_REMOTE).on_demand();
    // SAFETY: no other program gets the key.
    let region = unsafe { builder.register_address_space() };
    let region = supported(region, Capability::OdpImplicit)?;
    let remote = Remote { addr: pair.b.memory.addr(), rkey: region.rkey() };
    reaches(&mut pair, remote, 4096)
}

fn invalidating_the_rkey_of_a_region_fails() -> Verdict {
    crate::env::access_errors()?;
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
