//! Atomic operations on memory of the peer.

use crate::capability::Capability;
use crate::pair::{Config, Pair, Side};
use crate::verdict::{Verdict, require, trials};
use uverbs::{AtomicCap, MaskedSwap, PostError, SendWr, WcOpcode, WcStatus};

trials![
    fetch_add_returns_the_old_value,
    compare_swap_swaps_only_if_equal,
    every_fetch_add_counts_once,
    masked_swap_leaves_the_other_bits,
    masked_add_carries_within_its_fields,
    masked_atomics_need_a_reliable_connection,
    unaligned_address_is_refused,
    a_buffer_too_short_for_the_old_value_is_refused,
    an_atomic_without_the_right_fails,
    atomic_write_writes_eight_bytes,
];

fn pair() -> Verdict<(Side, Side)> {
    let Pair { a, b, .. } = Pair::new(Config::rc())?;
    let cap = a.context.query_device()?.atomic_cap;
    require(cap != AtomicCap::NONE, Capability::Atomic, "not advertised")?;
    Ok((a, b))
}

fn put(side: &mut Side, offset: usize, value: u64) {
    side.memory.copy_from(offset, &value.to_ne_bytes()).expect("within the memory");
}

fn get(side: &Side, offset: usize) -> u64 {
    let mut bytes = [0; 8];
    side.memory.copy_to(offset, &mut bytes).expect("within the memory");
    u64::from_ne_bytes(bytes)
}

fn fetch_add_returns_the_old_value() -> Verdict {
    let (mut a, mut b) = pair()?;
    let mut value = 0xffff_ffff_ffff_fff0u64;
    put(&mut b, 64, value);
    for add in [1, 0, 0x20, u64::MAX] {
        a.poison(0..8);
        let sges = [a.sge(0..8)];
        let remote = b.remote(64);
        a.send(SendWr::fetch_add(remote, add, &sges).id(add).signaled())?;
        let done = a.expect(add, WcOpcode::FETCH_ADD)?;
        assert_eq!(done.byte_len, 8);
        assert_eq!(get(&a, 0), value, "what was there");
        value = value.wrapping_add(add);
        assert_eq!(get(&b, 64), value, "what is there");
    }
    Ok(())
}

fn compare_swap_swaps_only_if_equal() -> Verdict {
    let (mut a, mut b) = pair()?;
    put(&mut b, 0, 5);
    for (compare, swap, before, after) in [(5, 9, 5, 9), (5, 11, 9, 9), (9, 0, 9, 0)] {
        a.poison(0..8);
        let sges = [a.sge(0..8)];
        let remote = b.remote(0);
        a.send(SendWr::compare_swap(remote, compare, swap, &sges).id(1).signaled())?;
        a.expect(1, WcOpcode::COMPARE_SWAP)?;
        assert_eq!((get(&a, 0), get(&b, 0)), (before, after), "{compare} for {swap}");
    }
    Ok(())
}

fn every_fetch_add_counts_once() -> Verdict {
    let (mut a, mut b) = pair()?;
    put(&mut b, 0, 0);
    let sges = [a.sge(8..16)];
    let remote = b.remote(0);
    for _ in 0..50 {
        a.send_all(&[
            SendWr::fetch_add(remote, 1, &sges),
            SendWr::fetch_add(remote, 1, &sges).id(1).signaled(),
        ])?;
        a.expect(1, WcOpcode::FETCH_ADD)?;
    }
    assert_eq!(get(&b, 0), 100);
    Ok(())
}

/// Posts a masked atomic, which devices without masks refuse.
fn post_masked(side: &mut Side, wr: SendWr<'_>) -> Verdict {
    let posted = side.send(wr);
    let refused = posted == Err(PostError::Unsupported);
    require(!refused, Capability::MaskedAtomic, "the driver has no such request")?;
    Ok(posted?)
}

fn masked_swap_leaves_the_other_bits() -> Verdict {
    let (mut a, mut b) = pair()?;
    let remote = b.remote(64);
    let start = 0x1111_2222_3333_4444;
    let low = 0xffff_ffff;
    // Compare value, compare mask, swap value, swap mask, and the word afterwards.
    for (compare, compare_mask, swap, swap_mask, after) in [
        // All bits: as without masks.
        (start, u64::MAX, 5, u64::MAX, 5),
        (start + 1, u64::MAX, 5, u64::MAX, start),
        // The halves, one as the condition of the other.
        (0x3333_4444, low, 0xaaaa_bbbb_0000_0000, !low, 0xaaaa_bbbb_3333_4444),
        (0x3333_4445, low, 0xaaaa_bbbb_0000_0000, !low, start),
        // Bits of the operands outside of the masks are ignored.
        (0xffff_0000_3333_4444, low, 0x5555, 0xf0f0, 0x1111_2222_3333_5454),
        // Without a condition: bits are set, and cleared.
        (7, 0, u64::MAX, 0x8000_0000_0000_0001, 0x9111_2222_3333_4445),
        (7, 0, 0, 0x1000_0000_0000_0004, 0x0111_2222_3333_4440),
    ] {
        let operands = MaskedSwap { compare, compare_mask, swap, swap_mask };
        put(&mut b, 56, 0xa5a5_a5a5_a5a5_a5a5);
        put(&mut b, 64, start);
        put(&mut b, 72, 0x5a5a_5a5a_5a5a_5a5a);
        a.poison(0..8);
        let sges = [a.sge(0..8)];
        let wr = SendWr::masked_compare_swap(remote, &operands, &sges).id(1).signaled();
        post_masked(&mut a, wr)?;
        assert_eq!(a.expect(1, WcOpcode::COMPARE_SWAP)?.byte_len, 8);
        assert_eq!((get(&a, 0), get(&b, 64)), (start, after), "{operands:x?}");
        assert_eq!(get(&b, 56), 0xa5a5_a5a5_a5a5_a5a5);
        assert_eq!(get(&b, 72), 0x5a5a_5a5a_5a5a_5a5a);
    }
    Ok(())
}

fn masked_add_carries_within_its_fields() -> Verdict {
    let (mut a, mut b) = pair()?;
    let remote = b.remote(8);
    for (start, add, boundary, after) in [
        (0xffff_ffff, 1, 0, 0x1_0000_0000),
        (0xffff_ffff, 1, 1 << 31, 0),
        (0x0000_0001_ffff_ffff, 0x0000_0002_0000_0003, 1 << 31, 0x0000_0003_0000_0002),
        (0x00ff_00ff_00ff_00ff, 0x0001_0001_0001_0001, 0x0080_0080_0080_0080, 0),
        (0x00ff_00ff_00ff_00ff, 0x0001_0001_0001_0001, 0, 0x0100_0100_0100_0100),
        (u64::MAX, 1, 1 << 63, 0),
    ] {
        put(&mut b, 8, start);
        a.poison(0..8);
        let sges = [a.sge(0..8)];
        let wr = SendWr::masked_fetch_add(remote, add, boundary, &sges).id(2).signaled();
        post_masked(&mut a, wr)?;
        assert_eq!(a.expect(2, WcOpcode::FETCH_ADD)?.byte_len, 8);
        assert_eq!((get(&a, 0), get(&b, 8)), (start, after), "{start:x} {add:x} {boundary:x}");
    }
    Ok(())
}

fn masked_atomics_need_a_reliable_connection() -> Verdict {
    let operands = MaskedSwap::default();
    for config in [Config::uc(), Config::ud()] {
        let mut pair = Pair::new(config)?;
        let (sges, remote) = ([pair.a.sge(0..8)], pair.b.remote(0));
        let path = pair.path()?;
        for wr in [
            SendWr::masked_compare_swap(remote, &operands, &sges),
            SendWr::masked_fetch_add(remote, 1, 0, &sges),
        ] {
            assert_eq!(pair.a.send(path.to(wr)), Err(PostError::Unsupported), "{config:?}");
        }
        pair.a.expect_silence()?;
    }
    // One access right covers all atomics.
    let access = uverbs::Access::ALL_REMOTE - uverbs::Access::REMOTE_ATOMIC;
    let Pair { mut a, mut b, .. } = Pair::new(Config { access, ..Config::rc() })?;
    put(&mut b, 0, 3);
    let sges = [a.sge(0..8)];
    let remote = b.remote(0);
    post_masked(&mut a, SendWr::masked_fetch_add(remote, 1, 0, &sges).id(1))?;
    a.expect_failure_of(1, &[WcStatus::REM_INV_REQ_ERR, WcStatus::REM_ACCESS_ERR])?;
    assert_eq!(get(&b, 0), 3);
    Ok(())
}

fn unaligned_address_is_refused() -> Verdict {
    let (mut a, b) = pair()?;
    let sges = [a.sge(0..8)];
    for offset in [1, 4, 7] {
        let remote = b.remote(offset);
        for wr in [SendWr::fetch_add(remote, 1, &sges), SendWr::compare_swap(remote, 0, 1, &sges)] {
            assert_eq!(a.send(wr), Err(PostError::Unaligned), "{wr:?}");
        }
        // A device without atomic writes answers that first.
        let refused = a.send(SendWr::atomic_write(remote, [1; 8]));
        let expected = [Err(PostError::Unaligned), Err(PostError::Unsupported)];
        assert!(expected.contains(&refused), "{refused:?}");
    }
    a.expect_silence()
}

fn a_buffer_too_short_for_the_old_value_is_refused() -> Verdict {
    let (mut a, b) = pair()?;
    let sges = [a.sge(0..7)];
    let remote = b.remote(0);
    assert_eq!(a.send(SendWr::fetch_add(remote, 1, &sges)), Err(PostError::AtomicTooShort));
    assert_eq!(a.send(SendWr::compare_swap(remote, 1, 2, &[])), Err(PostError::AtomicTooShort));
    Ok(())
}

fn an_atomic_without_the_right_fails() -> Verdict {
    crate::env::access_errors()?;
    let access = uverbs::Access::ALL_REMOTE - uverbs::Access::REMOTE_ATOMIC;
    let Pair { mut a, mut b, .. } = Pair::new(Config { access, ..Config::rc() })?;
    put(&mut b, 0, 3);
    let sges = [a.sge(0..8)];
    let remote = b.remote(0);
    a.send(SendWr::fetch_add(remote, 1, &sges).id(1))?;
    let done = a.wait()?;
    // Devices differ in the status for a queue pair without the right.
    let refused = [WcStatus::REM_INV_REQ_ERR, WcStatus::REM_ACCESS_ERR];
    assert!(done.wr_id == 1 && refused.contains(&done.status), "{done:?}");
    assert_eq!(get(&b, 0), 3);
    Ok(())
}

fn atomic_write_writes_eight_bytes() -> Verdict {
    let (mut a, mut b) = pair()?;
    let caps = a.context.query_device()?.caps;
    require(
        caps.contains(uverbs::DeviceCaps::ATOMIC_WRITE),
        Capability::AtomicWrite,
        "not advertised",
    )?;
    b.poison(0..64);
    let poison = crate::pattern::bytes(crate::pattern::POISON, 64);
    let remote = b.remote(16);
    a.send(SendWr::atomic_write(remote, [1, 2, 3, 4, 5, 6, 7, 8]).id(1).signaled())?;
    a.expect(1, WcOpcode::ATOMIC_WRITE)?;
    assert_eq!(b.read(16..24), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(b.read(0..16) == poison[..16] && b.read(24..64) == poison[24..], "more was written");
    Ok(())
}
