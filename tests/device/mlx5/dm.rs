//! Memory on the device.

use crate::capability::Capability;
use crate::env;
use crate::heir::take_over;
use crate::leaks::rounds;
use crate::pair::{Config, Pair};
use crate::partner::{Partner, missing, parse, print, refused};
use crate::pattern;
use crate::verdict::{Stop, Verdict, require, supported, trials};
use uverbs::{
    Access, Context, DeviceMemory, Errno, ErrorWith, Imported, MemoryError, MemoryRegion,
    ObjectKind, OnDevice, Remote, Rereg, SendWr, WcOpcode, WcStatus,
};

trials![
    words_read_back_as_written,
    partial_words_and_ranges_outside_are_refused,
    peers_write_and_read_it,
    messages_leave_from_it_and_arrive_in_it,
    peers_do_atomics_on_it,
    a_part_is_addressed_from_its_beginning,
    registrations_that_make_no_sense_are_refused,
    sizes_that_make_no_sense_are_refused,
    exhausted_memory_is_free_again_after_a_drop,
    memory_with_a_region_is_not_freed,
    imported_memory_with_a_region_is_not_freed,
    importer_copies_and_writes,
    ownership_moves_to_the_importer,
    ownership_of_a_region_moves_to_the_importer,
    stale_envelopes_are_refused,
    memory_leaves_nothing,
    imported_memory_leaves_nothing,
];

const BYTES: usize = 4096;

fn open() -> Verdict<Context> {
    let context = super::open()?;
    let most = context.query_device()?.max_dm_size;
    require(most > 0, Capability::DeviceMemory, "not advertised")?;
    Ok(context)
}

fn alloc(context: &Context, length: usize) -> Verdict<DeviceMemory> {
    supported(context.alloc_dm(length, 8), Capability::DeviceMemory)
}

/// Skips tests of imports on kernels that do not report the place of another context's memory.
fn importing(context: &Context) -> Verdict {
    let memory = alloc(context, 64)?;
    supported(context.import_dm(&memory.export()?), Capability::DmImport).map(drop)
}

/// Two sides, and memory on the device in the context of the second.
fn pair() -> Verdict<(Pair, DeviceMemory)> {
    open()?;
    let pair = Pair::new(Config::rc())?;
    let memory = alloc(&pair.b.context, BYTES)?;
    Ok((pair, memory))
}

fn register(pair: &Pair, memory: &DeviceMemory) -> Verdict<MemoryRegion<u8, OnDevice>> {
    Ok(pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register_dm(memory, ..)?)
}

fn fill(memory: &DeviceMemory, offset: usize, length: usize, seed: u64) -> Verdict {
    Ok(memory.copy_from(offset, pattern::bytes(seed, length).as_slice())?)
}

#[track_caller]
fn check(memory: &DeviceMemory, offset: usize, length: usize, seed: u64) -> Verdict {
    let mut bytes = vec![0; length];
    memory.copy_to(offset, bytes.as_mut_slice())?;
    pattern::check(&bytes, seed);
    Ok(())
}

fn words_read_back_as_written() -> Verdict {
    let context = open()?;
    // No whole page, and no whole unit of the device.
    let memory = alloc(&context, 5000)?;
    assert_eq!(memory.len(), 5000);
    fill(&memory, 0, 256, 1)?;
    fill(&memory, 4900, 100, 2)?;
    memory.copy_from(128, &0x0102_0304_0506_0708u64)?;
    check(&memory, 4900, 100, 2)?;
    let expected = pattern::bytes(1, 256);
    let mut found = [0u8; 256];
    memory.copy_to(0, &mut found)?;
    assert!(found[..128] == expected[..128] && found[136..] == expected[136..]);
    let mut value = 0u64;
    memory.copy_to(128, &mut value)?;
    assert_eq!(value, 0x0102_0304_0506_0708);
    // Other memory is not changed.
    let other = alloc(&context, 64)?;
    other.copy_from(0, &[0xffu8; 64])?;
    check(&memory, 4900, 100, 2)?;
    assert_eq!(context.handles(ObjectKind::DM)?.len(), 2);
    Ok(())
}

fn partial_words_and_ranges_outside_are_refused() -> Verdict {
    let context = open()?;
    let memory = alloc(&context, 64)?;
    fill(&memory, 0, 64, 3)?;
    for (offset, length) in [(0, 3), (1, 4), (2, 2), (62, 4)] {
        let error = Err(MemoryError::Unaligned { offset, length, word: 4 });
        assert_eq!(memory.copy_from(offset, vec![0u8; length].as_slice()), error);
        assert_eq!(memory.copy_to(offset, vec![0u8; length].as_mut_slice()), error);
    }
    for (offset, length) in [(0, 68), (64, 4), (usize::MAX - 3, 8), (68, 0)] {
        let error = Err(MemoryError::OutOfRange { offset, length, size: 64 });
        assert_eq!(memory.copy_from(offset, vec![0u8; length].as_slice()), error);
        assert_eq!(memory.copy_to(offset, vec![0u8; length].as_mut_slice()), error);
    }
    check(&memory, 0, 64, 3)
}

fn peers_write_and_read_it() -> Verdict {
    let (mut pair, memory) = pair()?;
    let region = register(&pair, &memory)?;
    assert_eq!((region.addr(), region.byte_len()), (0, BYTES));
    for (seed, offset, length) in [(1, 0, 100), (2, 1000, 3000), (3, BYTES - 64, 64)] {
        let to = region.remote(offset)?;
        assert_eq!(to.addr, offset as u64);
        pair.a.fill(0..length, seed);
        let sges = [pair.a.sge(0..length)];
        pair.a.send(SendWr::write(to, &sges).id(seed).signaled())?;
        pair.a.expect(seed, WcOpcode::WRITE)?;
        check(&memory, offset, length, seed)?;
        // And back, from data that this process wrote there.
        fill(&memory, offset, length, !seed)?;
        pair.a.poison(0..length);
        let sges = [pair.a.sge(0..length)];
        pair.a.send(SendWr::read(to, &sges).id(seed).signaled())?;
        pair.a.expect(seed, WcOpcode::READ)?;
        pair.a.check(0..length, !seed);
    }
    let beyond = Remote { addr: BYTES as u64 - 8, rkey: region.rkey() };
    let sges = [pair.a.sge(0..16)];
    pair.a.send(SendWr::write(beyond, &sges).id(9))?;
    pair.a.expect_failure(9, WcStatus::REM_ACCESS_ERR)?;
    Ok(())
}

fn messages_leave_from_it_and_arrive_in_it() -> Verdict {
    let (mut pair, memory) = pair()?;
    let region = register(&pair, &memory)?;
    let (lower, upper) = (region.sge(..2000)?, region.sge(2048..4048)?);
    pair.a.fill(0..2000, 5);
    pair.b.recv_into(1, &[upper])?;
    let sges = [pair.a.sge(0..2000)];
    pair.a.send(SendWr::send(&sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::SEND)?;
    assert_eq!(pair.b.expect(1, WcOpcode::RECV)?.byte_len, 2000);
    check(&memory, 2048, 2000, 5)?;
    fill(&memory, 0, 2000, 6)?;
    pair.a.poison(0..2000);
    pair.a.recv(2, 0..2000)?;
    pair.b.send(SendWr::send(&[lower]).id(2).signaled())?;
    pair.b.expect(2, WcOpcode::SEND)?;
    pair.a.expect(2, WcOpcode::RECV)?;
    pair.a.check(0..2000, 6);
    Ok(())
}

fn peers_do_atomics_on_it() -> Verdict {
    let (mut pair, memory) = pair()?;
    let region = register(&pair, &memory)?;
    memory.copy_from(64, &[7u64, 100])?;
    let at = region.remote(72)?;
    let sges = [pair.a.sge(0..8)];
    for n in 0..4 {
        pair.a.send(SendWr::fetch_add(at, 3, &sges).id(n).signaled())?;
        pair.a.expect(n, WcOpcode::FETCH_ADD)?;
        assert_eq!(pair.a.read(0..8), (100 + 3 * n).to_ne_bytes());
    }
    pair.a.send(SendWr::compare_swap(at, 112, 5, &sges).id(9).signaled())?;
    pair.a.expect(9, WcOpcode::COMPARE_SWAP)?;
    let mut found = [0u64; 2];
    memory.copy_to(64, &mut found)?;
    assert_eq!(found, [7, 5]);
    Ok(())
}

fn a_part_is_addressed_from_its_beginning() -> Verdict {
    let (mut pair, memory) = pair()?;
    fill(&memory, 0, BYTES, 1)?;
    let region =
        pair.b.pd.mr_builder().access(Access::ALL_REMOTE).register_dm(&memory, 1024..1280)?;
    assert_eq!((region.addr(), region.byte_len()), (0, 256));
    pair.a.fill(0..256, 2);
    let sges = [pair.a.sge(0..256)];
    pair.a.send(SendWr::write(region.remote(0)?, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::WRITE)?;
    let mut found = vec![0; BYTES];
    memory.copy_to(0, found.as_mut_slice())?;
    let before = pattern::bytes(1, BYTES);
    assert!(found[..1024] == before[..1024] && found[1280..] == before[1280..]);
    pattern::check(&found[1024..1280], 2);
    // The bytes after the part are not reachable.
    let beyond = Remote { addr: 256, rkey: region.rkey() };
    let sges = [pair.a.sge(0..4)];
    pair.a.send(SendWr::write(beyond, &sges).id(2))?;
    pair.a.expect_failure(2, WcStatus::REM_ACCESS_ERR)?;
    Ok(())
}

fn registrations_that_make_no_sense_are_refused() -> Verdict {
    let context = open()?;
    let memory = alloc(&context, BYTES)?;
    let pd = context.alloc_pd()?;
    for range in [0..BYTES + 1, BYTES..BYTES + 1, 5..5] {
        let error = pd
            .mr_builder()
            .access(Access::LOCAL_WRITE)
            .register_dm(&memory, range.clone())
            .unwrap_err();
        assert_eq!((error.verb(), error.errno()), ("reg_dm_mr", Errno::INVAL), "{range:?}");
    }
    let refused = [
        pd.mr_builder().access(Access::REMOTE_WRITE).register_dm(&memory, ..),
        pd.mr_builder().access(Access::LOCAL_WRITE | Access::MW_BIND).register_dm(&memory, ..),
        pd.mr_builder().iova(4096).register_dm(&memory, ..),
        env::open()?.alloc_pd()?.mr_builder().access(Access::LOCAL_WRITE).register_dm(&memory, ..),
    ];
    for answer in refused {
        let error = answer.unwrap_err();
        assert_eq!((error.verb(), error.errno()), ("reg_dm_mr", Errno::INVAL), "{error}");
    }
    // A hint does not count as a right.
    let access = Access::LOCAL_WRITE;
    drop(pd.mr_builder().access(access).relaxed_ordering().register_dm(&memory, ..)?);
    assert_eq!(context.handles(ObjectKind::MR)?, [0u32; 0]);
    Ok(())
}

fn sizes_that_make_no_sense_are_refused() -> Verdict {
    let context = open()?;
    let most = context.query_device()?.max_dm_size;
    for (length, align) in [(0, 1), (most as usize + 1, 1), (64, 0), (64, 24), (64, 1 << 30)] {
        let error = context.alloc_dm(length, align).unwrap_err();
        let found = (error.verb(), error.errno());
        assert_eq!(found, ("alloc_dm", Errno::INVAL), "{length} at {align}: {error}");
    }
    let error = context.alloc_dm(most as usize + 1, 1).unwrap_err();
    assert!(error.message().contains(&most.to_string()), "{error}");
    for align in [1, 4, 64, 4096] {
        assert_eq!(context.alloc_dm(100, align)?.len(), 100);
    }
    assert_eq!(context.handles(ObjectKind::DM)?, [0u32; 0]);
    Ok(())
}

fn exhausted_memory_is_free_again_after_a_drop() -> Verdict {
    env::alone()?;
    let context = open()?;
    let most = context.query_device()?.max_dm_size as usize;
    let piece = (most / 8).next_multiple_of(64);
    let use_up = || -> Verdict<Vec<DeviceMemory>> {
        let mut pieces = Vec::new();
        loop {
            match context.alloc_dm(piece, 1) {
                Ok(memory) => pieces.push(memory),
                Err(error) => {
                    assert_eq!(error.errno(), Errno::NOMEM, "{error}");
                    assert!(error.message().contains(&most.to_string()), "{error}");
                    return Ok(pieces);
                }
            }
            assert!(pieces.len() <= most.div_ceil(piece), "more than there is");
        }
    };
    let first = use_up()?;
    let count = first.len();
    assert!(count > 0);
    // No two of them overlap.
    for (seed, memory) in (0..).zip(&first) {
        fill(memory, piece - 64, 64, seed)?;
    }
    for (seed, memory) in (0..).zip(&first) {
        check(memory, piece - 64, 64, seed)?;
    }
    drop(first);
    assert_eq!(use_up()?.len(), count);
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn memory_with_a_region_is_not_freed() -> Verdict {
    let (mut pair, memory) = pair()?;
    let region = register(&pair, &memory)?;
    let (memory, error) = memory.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    // The region keeps the memory when all other handles are gone.
    let context = pair.b.context.clone();
    drop(memory);
    assert_eq!(context.handles(ObjectKind::DM)?.len(), 1);
    pair.a.fill(0..64, 1);
    let sges = [pair.a.sge(0..64)];
    pair.a.send(SendWr::write(region.remote(0)?, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::WRITE)?;
    drop(region);
    assert_eq!((context.handles(ObjectKind::DM)?.len(), context.leaked()), (0, 0));
    Ok(())
}

/// A new owner does not know of the region, so the kernel refuses.
fn imported_memory_with_a_region_is_not_freed() -> Verdict {
    importing(&open()?)?;
    let (pair, memory) = pair()?;
    let region = register(&pair, &memory)?;
    let own = take_over(pair.b.context.import_dm(&memory.export()?)?)?;
    let (own, error) = own.destroy().unwrap_err().into_parts();
    assert_eq!(error.kernel_errno(), Some(Errno::BUSY), "{error}");
    own.release()?;
    drop((region, memory));
    let context = &pair.b.context;
    assert_eq!((context.handles(ObjectKind::DM)?.len(), context.leaked()), (0, 0));
    Ok(())
}

fn importer_copies_and_writes() -> Verdict {
    let context = open()?;
    importing(&context)?;
    let memory = alloc(&context, BYTES)?;
    let pd = context.alloc_pd()?;
    let region = pd.mr_builder().access(Access::ALL_REMOTE).register_dm(&memory, ..)?;
    fill(&memory, 0, 512, 1)?;
    let mut partner = Partner::sharing(&context)?;
    let told = partner.ask(&format!("dm-import {}", print(&memory.export()?)), "imported")?;
    assert_eq!(told, BYTES.to_string());
    partner.ask("dm-check 0 512 1", "checked")?;
    partner.ask("dm-fill 512 256 2", "filled")?;
    check(&memory, 512, 256, 2)?;
    // By its keys, too: each importer addresses the region from 0.
    partner.ask(&format!("pd {}", print(&pd.export()?)), "pd")?;
    partner.ask(&format!("mr {}", print(&region.export()?)), "mr")?;
    assert_eq!(partner.ask("copy 0 1024 512", "copied")?, WcStatus::SUCCESS.0.to_string());
    check(&memory, 1024, 512, 1)?;
    partner.dismiss()?;
    assert_eq!(context.handles(ObjectKind::DM)?, [memory.handle()]);
    check(&memory, 512, 256, 2)
}

fn ownership_moves_to_the_importer() -> Verdict {
    let context = open()?;
    importing(&context)?;
    let memory = alloc(&context, 64)?;
    let mut partner = Partner::sharing(&context)?;
    let envelope = memory.release()?;
    assert_eq!(context.handles(ObjectKind::DM)?.len(), 1, "released, not freed");
    partner.ask(&format!("dm-import {}", print(&envelope)), "imported")?;
    partner.ask("dm-own", "owned")?;
    partner.dismiss()?;
    assert_eq!(context.handles(ObjectKind::DM)?, [0u32; 0], "the new owner freed it");
    Ok(())
}

fn ownership_of_a_region_moves_to_the_importer() -> Verdict {
    let context = open()?;
    let memory = alloc(&context, BYTES)?;
    let pd = context.alloc_pd()?;
    // Not from the beginning of the memory, the one place that the kernel reports.
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).register_dm(&memory, 1024..)?;
    let error = region.rereg(Rereg::new().access(Access::REMOTE_READ)).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    let mut partner = Partner::sharing(&context)?;
    let sent = region.release()?;
    let sent_pd = pd.release()?;
    partner.ask(&format!("pd {}", print(&sent_pd)), "pd")?;
    partner.ask(&format!("mr {}", print(&sent)), "mr")?;
    let (memory, error) = memory.destroy().unwrap_err().into_parts();
    assert_eq!(error.kernel_errno(), Some(Errno::BUSY), "the region has crossed: {error}");
    partner.ask("own", "owned")?;
    assert_eq!(context.handles(ObjectKind::MR)?, [0u32; 0], "the new owner destroyed it");
    memory.destroy()?;
    partner.dismiss()?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}

#[allow(unsafe_code, reason = "bare handles are taken on trust")]
fn stale_envelopes_are_refused() -> Verdict {
    let context = open()?;
    importing(&context)?;
    let memory = alloc(&context, 64)?;
    let envelope = memory.export()?;
    let handle = memory.handle();
    drop(context.import_dm(&envelope)?);
    // SAFETY: allocated above.
    let bare = unsafe { context.import_dm_raw(handle) }?;
    assert_eq!(bare.len(), 64);
    bare.unimport()?;
    memory.destroy()?;
    assert_eq!(context.import_dm(&envelope).unwrap_err().errno(), Errno::NOENT);
    // The length tells another allocation under the same handle.
    let next = alloc(&context, 128)?;
    assert_eq!(next.handle(), handle);
    let error = context.import_dm(&envelope).unwrap_err();
    assert_eq!(error.errno(), Errno::STALE, "{error}");
    let error = context.import_pd(&next.export()?).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    let error = super::open()?.import_dm(&next.export()?).unwrap_err();
    assert_eq!(error.errno(), Errno::XDEV, "{error}");
    Ok(())
}

/// A partner's device memory.
#[derive(Debug, Default)]
pub(crate) struct PartnerMemory {
    imported: Option<Imported<DeviceMemory>>,
    own: Option<DeviceMemory>,
}

impl PartnerMemory {
    pub(crate) fn obey(&mut self, context: &Context, line: &str) -> Verdict<String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let numbers: Vec<usize> = rest.split(' ').map_while(|number| number.parse().ok()).collect();
        Ok(match (word, &self.imported, &numbers[..]) {
            ("import", ..) => match context.import_dm(&parse(rest)?) {
                Ok(memory) => {
                    let text = format!("imported {}", memory.len());
                    self.imported = Some(memory);
                    text
                }
                Err(error) => refused(&error),
            },
            ("fill", Some(memory), [offset, length, seed]) => {
                fill(memory, *offset, *length, *seed as u64)?;
                "filled".into()
            }
            ("check", Some(memory), [offset, length, seed]) => {
                check(memory, *offset, *length, *seed as u64)?;
                "checked".into()
            }
            ("own", ..) => {
                let memory = self.imported.take().ok_or_else(|| missing("device memory"))?;
                match take_over(memory) {
                    Ok(memory) => {
                        self.own = Some(memory);
                        "owned".into()
                    }
                    Err(ErrorWith { error, .. }) => refused(&error),
                }
            }
            _ => return Err(Stop::fail(format!("dm-{line} makes no sense"))),
        })
    }
}

/// Allocated, mapped, registered, and with `imported` imported, in many rounds.
fn leave_nothing(imported: bool) -> Verdict {
    rounds(&[ObjectKind::DM, ObjectKind::MR, ObjectKind::PD], move |context| {
        let context = context.clone();
        let pd = context.alloc_pd()?;
        Ok(Box::new(move || {
            let memory = alloc(&context, 256)?;
            memory.copy_from(0, &1u64)?;
            let region = pd.mr_builder().access(Access::ALL_REMOTE).register_dm(&memory, ..)?;
            if imported {
                drop(context.import_dm(&memory.export()?)?);
            }
            region.destroy()?;
            memory.destroy()?;
            Ok(())
        }))
    })
}

fn memory_leaves_nothing() -> Verdict {
    open()?;
    leave_nothing(false)
}

fn imported_memory_leaves_nothing() -> Verdict {
    importing(&open()?)?;
    leave_nothing(true)
}
