//! Memory regions: every way to register memory, refusals, and the return of memory.

#![allow(unsafe_code, reason = "raw and borrowed registrations are unsafe")]

use crate::capability::Capability;
use crate::env;
use crate::leaks::rounds;
use crate::verdict::{Verdict, require, supported, trials};
use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use uverbs::device::DriverId;
use uverbs::{
    Access, Advice, AnyMemoryRegion, Context, Errno, MemoryError, MemoryRegion, ObjectKind, Rereg,
    StableBytes,
};

trials![
    allocation_is_zeroed_and_aligned,
    allocation_of_nothing_is_invalid,
    allocation_beyond_memory_is_an_error,
    destroy_gives_owned_memory_back,
    own_types_can_be_registered,
    borrowed_and_raw_memory_can_be_registered,
    unowned_memory_gets_keys_of_every_context,
    regions_of_any_memory_stand_in_one_list,
    failed_registration_gives_memory_back,
    region_reads_as_values_bytes_and_atomics,
    ranges_are_checked,
    contradictory_rights_are_refused,
    rights_are_granted_one_by_one,
    relaxed_ordering_is_a_hint,
    addresses_count_from_the_given_iova,
    iova_must_share_the_page_offset_of_the_memory,
    zero_based_region_counts_from_zero_or_is_refused,
    unmapped_memory_is_refused,
    read_only_mapping_can_be_registered_for_reading_only,
    limit_of_locked_memory_is_explained,
    parent_domain_registers_memory,
    domain_is_busy_until_its_regions_are_destroyed,
    handles_may_be_dropped_in_any_order,
    files_that_are_no_dma_buf_are_refused,
    on_demand_region_locks_no_memory,
    whole_address_space_can_be_registered,
    advice_on_paged_memory_is_taken,
    advice_on_pinned_memory_is_refused,
    rereg_changes_the_access_flags,
    rereg_changes_the_protection_domain,
    rereg_of_nothing_or_elsewhere_is_refused,
    exchange_swaps_the_memory_or_gives_both_back,
    two_hundred_regions_have_keys_of_their_own,
    regions_leave_nothing,
];

fn count(context: &Context) -> Verdict<usize> {
    Ok(supported(context.handles(ObjectKind::MR), Capability::InfoHandles)?.len())
}

fn is_rxe() -> bool {
    env::device().driver() == Some(DriverId::RXE)
}

fn allocation_is_zeroed_and_aligned() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1000)?;
    assert_eq!((region.len(), region.byte_len()), (1000, 8000));
    assert_eq!(region.addr() % env::page_size() as u64, 0);
    assert_eq!(region.addr(), region.as_ptr() as u64);
    assert!((0..1000).all(|index| region.read_at(index) == Some(0)));
    assert_eq!(region.read_at(1000), None);
    assert_eq!(region.access(), Access::ALL_REMOTE);
    let all = supported(context.handles(ObjectKind::MR), Capability::InfoHandles)?;
    assert_eq!(all, [region.handle()]);
    Ok(())
}

fn allocation_of_nothing_is_invalid() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let local = pd.mr_builder();
    assert_eq!(local.clone().allocate::<u8>(0).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(local.clone().allocate::<[u8; 0]>(8).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(local.allocate::<u8>(1)?.byte_len(), 1);
    Ok(())
}

fn allocation_beyond_memory_is_an_error() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    // 64-bit processors can address so much, and no kernel provides it.
    let more_than_there_is = usize::try_from(1u64 << 46).unwrap_or(usize::MAX);
    for n in [usize::MAX, usize::MAX / 8, usize::MAX / 16 + 1, more_than_there_is] {
        let error = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(n).unwrap_err();
        assert_eq!(error.errno(), Errno::NOMEM, "{error}");
    }
    assert_eq!(count(&context)?, 0);
    Ok(())
}

fn destroy_gives_owned_memory_back() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let access = Access::ALL_REMOTE;

    let mut vector = Vec::with_capacity(64);
    vector.extend([1u32, 2, 3]);
    let mut region = pd.mr_builder().access(access).register(vector)?;
    assert_eq!((region.len(), region.byte_len()), (3, 12));
    region.write_at(1, 9)?;
    let vector = region.destroy()?;
    assert_eq!((vector.as_slice(), vector.capacity()), (&[1, 9, 3][..], 64));

    let mut region = pd.mr_builder().access(access).register(vec![7u16; 5].into_boxed_slice())?;
    region.write_at(4, 8)?;
    assert_eq!(*region.destroy()?, [7, 7, 7, 7, 8]);

    let map = MmapOptions::new().len(5000).map_anon()?;
    let mut region = pd.mr_builder().access(access).register(map)?;
    region.copy_from(4990, b"0123456789")?;
    let map: MmapMut = region.destroy()?;
    assert_eq!(&map[4990..], b"0123456789");

    let leaked: &'static mut [u8] = Box::leak(Box::new([5; 100]));
    let region = pd.mr_builder().access(access).register(leaked)?;
    assert_eq!(region.destroy()?, [5; 100]);

    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(10)?;
    region.write_at(9, 1)?;
    assert_eq!(region.destroy()?[..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(count(&context)?, 0);
    Ok(())
}

/// Memory inside the value itself, which the library must therefore not move.
struct Page {
    bytes: [u8; 300],
}

// SAFETY: the bytes belong to the value and stay with it.
unsafe impl StableBytes for Page {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        NonNull::from(self.bytes.as_mut_slice())
    }
}

fn own_types_can_be_registered() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut region =
        pd.mr_builder().access(Access::LOCAL_WRITE).register(Page { bytes: [1; 300] })?;
    let regions: Vec<MemoryRegion<u8, Page>> = {
        region.write_at(299, 2)?;
        vec![region]
    };
    let region = regions.into_iter().next().expect("one was put in");
    assert_eq!((region.read_at(0), region.read_at(299)), (Some(1), Some(2)));
    let page = region.destroy()?;
    assert_eq!((page.bytes[298], page.bytes[299]), (1, 2));
    Ok(())
}

fn borrowed_and_raw_memory_can_be_registered() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut numbers = [1u64, 2, 3, 4];
    // SAFETY: the region is destroyed below, and the test checks that.
    let mut region = unsafe {
        pd.mr_builder().access(Access::LOCAL_WRITE).register_borrowed(&mut numbers[1..])
    }?;
    assert_eq!((region.len(), region.read_at(0)), (3, Some(2)));
    region.write_at(2, 40)?;
    region.destroy()?;
    assert_eq!(numbers, [1, 2, 3, 40]);

    let mut bytes = vec![3u8; 50];
    // SAFETY: the vector outlives the region and is not touched meanwhile.
    let region = unsafe {
        pd.mr_builder().access(Access::LOCAL_WRITE).register_raw(bytes.as_mut_ptr(), 50)
    }?;
    assert_eq!(region.addr(), region.as_ptr() as u64);
    assert_eq!((region.len(), region.read_at(49)), (50, Some(3)));
    region.destroy()?;
    assert_eq!(bytes, [3; 50]);
    Ok(())
}

fn unowned_memory_gets_keys_of_every_context() -> Verdict {
    let (one, other) = (env::open()?, env::open()?);
    let domains = [one.alloc_pd()?, other.alloc_pd()?];
    let mut memory = Vec::<u8>::with_capacity(10_000);
    let start = memory.as_mut_ptr();
    let register = |pd: &uverbs::ProtectionDomain| {
        // SAFETY: the vector keeps its buffer until the regions are gone.
        unsafe { pd.mr_builder().access(Access::ALL_REMOTE).register_unowned(start, 10_000) }
    };
    let regions = [register(&domains[0])?, register(&domains[1])?, register(&domains[1])?];
    for region in &regions {
        assert_eq!((region.addr(), region.byte_len()), (start.addr() as u64, 10_000));
    }
    // The program goes on using its memory.
    memory.resize(10_000, 7);
    assert_eq!(memory.as_ptr(), start.cast_const());
    for region in regions {
        region.destroy()?;
    }
    assert_eq!(memory, [7; 10_000]);
    assert_eq!((count(&one)?, count(&other)?), (0, 0));
    Ok(())
}

fn regions_of_any_memory_stand_in_one_list() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut bytes = [0u8; 300];
    // SAFETY: `bytes` outlives the list.
    let own = unsafe {
        pd.mr_builder().access(Access::LOCAL_WRITE).register_unowned(bytes.as_mut_ptr(), 300)
    }?;
    let mut list: Vec<AnyMemoryRegion> = vec![
        pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(100)?.into(),
        pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u16; 100])?.into(),
        own.into(),
    ];
    let lengths: Vec<_> = list.iter().map(AnyMemoryRegion::byte_len).collect();
    assert_eq!((lengths, count(&context)?), (vec![800, 200, 300], 3));
    list.remove(1).destroy()?;
    assert_eq!(count(&context)?, 2);
    drop(list);
    assert_eq!((count(&context)?, context.leaked()), (0, 0));
    Ok(())
}

fn failed_registration_gives_memory_back() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let failed =
        pd.mr_builder().access(Access::REMOTE_WRITE).register(vec![1u8, 2, 3]).unwrap_err();
    assert_eq!(failed.error.errno(), Errno::INVAL);
    assert_eq!(failed.object, [1, 2, 3]);
    let failed =
        pd.mr_builder().access(Access::LOCAL_WRITE).register(Vec::<u64>::new()).unwrap_err();
    assert_eq!(failed.error.errno(), Errno::INVAL);
    // A right that the kernel does not know: the kernel refuses, not the library.
    let unknown = Access::from_bits_retain(1 << 15);
    let failed = pd.mr_builder().access(unknown).register(vec![4u8, 5]).unwrap_err();
    assert!(failed.error.kernel_errno().is_some(), "{failed:?}");
    assert_eq!(failed.object, [4, 5]);
    assert_eq!(count(&context)?, 0);
    Ok(())
}

fn region_reads_as_values_bytes_and_atomics() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(16)?;
    region.write_at(15, u64::MAX)?;
    assert_eq!(region.read_at(15), Some(u64::MAX));
    assert!(region.write_at(16, 1).is_err() && region.write_at(usize::MAX, 1).is_err());
    region.copy_from(1, &[0xaa; 13])?;
    let mut bytes = [0; 16];
    region.copy_to(0, &mut bytes)?;
    assert_eq!(bytes[..1], [0]);
    assert_eq!(bytes[1..14], [0xaa; 13]);
    assert_eq!(bytes[14..], [0, 0]);
    let out = MemoryError::OutOfRange { offset: 120, length: 9, size: 128 };
    assert_eq!(region.copy_from(120, &[0; 9]), Err(out));
    assert_eq!(region.copy_to(120, &mut [0; 9]), Err(out));

    let words = region.as_atomics().expect("pages are aligned");
    assert_eq!(words.len(), 16);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..1000).for_each(|_| _ = words[3].fetch_add(1, Ordering::Relaxed)));
        }
    });
    assert_eq!(region.read_at(3), Some(2000));
    // SAFETY: no peer gets the keys.
    assert_eq!(unsafe { region.as_slice() }[3], 2000);
    // SAFETY: as above.
    let slice = unsafe { region.as_mut_slice() };
    slice[3] = 5;
    assert_eq!(region.read_at(3), Some(5));
    Ok(())
}

fn ranges_are_checked() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(100)?;
    let sge = region.sge(10..30)?;
    assert_eq!((sge.addr, sge.length, sge.lkey), (region.addr() + 10, 20, region.lkey()));
    assert_eq!(region.sge(..)?.length, 100);
    assert_eq!(region.sge(100..)?.length, 0);
    assert_eq!(
        region.sge(..101),
        Err(MemoryError::OutOfRange { offset: 0, length: 101, size: 100 })
    );
    let remote = region.remote(99)?;
    assert_eq!((remote.addr, remote.rkey), (region.addr() + 99, region.rkey()));
    assert!(region.remote(101).is_err());
    Ok(())
}

fn contradictory_rights_are_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
        let failed = pd.mr_builder().access(access).register(vec![0u8; 8]).unwrap_err();
        assert_eq!(failed.error.errno(), Errno::INVAL);
        assert!(failed.error.message().contains("LOCAL_WRITE"), "{failed}");
    }
    Ok(())
}

fn rights_are_granted_one_by_one() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let local = Access::LOCAL_WRITE;
    for access in [
        Access::empty(),
        local,
        Access::REMOTE_READ,
        local | Access::REMOTE_WRITE,
        local | Access::REMOTE_ATOMIC,
        local | Access::MW_BIND,
        Access::MW_BIND,
    ] {
        let region = pd.mr_builder().access(access).register(vec![0u64; 8])?;
        assert_eq!(region.access(), access);
    }
    Ok(())
}

fn relaxed_ordering_is_a_hint() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let builder = pd.mr_builder().access(Access::ALL_REMOTE).relaxed_ordering();
    let region = supported(builder.allocate::<u8>(64), Capability::RelaxedOrdering)?;
    assert!(region.access().contains(Access::RELAXED_ORDERING));
    Ok(())
}

fn addresses_count_from_the_given_iova() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    for iova in [0, 0x7000_0000_0000, 1 << 63] {
        let region = pd.mr_builder().access(Access::ALL_REMOTE).iova(iova).allocate::<u8>(64)?;
        assert_eq!(region.addr(), iova);
        assert_eq!(region.sge(8..16)?.addr, iova + 8);
        assert_eq!(region.remote(63)?.addr, iova + 63);
    }
    Ok(())
}

fn iova_must_share_the_page_offset_of_the_memory() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let error = pd.mr_builder().iova(8).allocate::<u8>(64).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().contains("0x8:"), "{error}");
    let error = pd.mr_builder().iova(u64::MAX - 4095).allocate::<u8>(4096).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    Ok(())
}

fn zero_based_region_counts_from_zero_or_is_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    match pd.mr_builder().access(Access::ALL_REMOTE).zero_based().allocate::<u8>(64) {
        // rxe of Linux 6.1 accepts any right; later kernels support zero-based windows only.
        Ok(region) => assert_eq!(region.addr(), 0),
        Err(error) => {
            assert!(is_rxe() && error.is_unsupported(), "{error}");
            assert!(error.message().contains("ZERO_BASED"), "{error}");
        }
    }
    Ok(())
}

fn unmapped_memory_is_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let map = MmapOptions::new().len(1 << 16).map_anon()?;
    let hole = map.as_ptr().cast_mut();
    drop(map);
    // SAFETY: nothing is mapped there, so the device has nothing to write.
    let error = unsafe { pd.mr_builder().access(Access::LOCAL_WRITE).register_raw(hole, 1 << 16) }
        .unwrap_err();
    assert_eq!(error.errno(), Errno::FAULT, "{error}");
    assert!(error.message().contains("65536"), "{error}");
    Ok(())
}

fn read_only_mapping_can_be_registered_for_reading_only() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let page = env::page_size();
    let map = MmapOptions::new().len(page).map_anon()?.make_read_only()?;
    let start = map.as_ptr().cast_mut();
    // SAFETY: the device may only read, and the mapping outlives the region.
    let region = unsafe { pd.mr_builder().access(Access::REMOTE_READ).register_raw(start, page) }?;
    region.destroy()?;
    // SAFETY: the registration is refused, and no request names it otherwise.
    let error = unsafe { pd.mr_builder().access(Access::LOCAL_WRITE).register_raw(start, page) }
        .unwrap_err();
    assert_eq!(error.errno(), Errno::FAULT, "{error}");
    Ok(())
}

fn limit_of_locked_memory_is_explained() -> Verdict {
    require(!rustix::process::geteuid().is_root(), Capability::Lab, "root may lock all memory")?;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let before = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 20), ..before })?;
    let answers = [
        pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(2 << 20),
        pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096),
    ];
    setrlimit(Resource::Memlock, before)?;
    let [too_much, little] = answers;
    let error = too_much.unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    for part in ["pin 2 MiB", "lock 1 MiB", "RLIMIT_MEMLOCK", "ulimit -l"] {
        assert!(error.message().contains(part), "{error}");
    }
    little?;
    assert_eq!(count(&context)?, 0);
    Ok(())
}

fn parent_domain_registers_memory() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let td = context.alloc_td()?;
    let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
    let region = domain.mr_builder().access(Access::ALL_REMOTE).allocate::<u32>(4)?;
    let (domain, error) = domain.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(region);
    Ok(domain.destroy()?)
}

fn domain_is_busy_until_its_regions_are_destroyed() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u32>(4)?;
    let (pd, error) = pd.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    region.destroy()?;
    Ok(pd.destroy()?)
}

fn handles_may_be_dropped_in_any_order() -> Verdict {
    let idle = env::resources()?;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u32>(4)?;
    drop(pd);
    region.write_at(3, 1)?;
    let leaked = context.clone();
    drop(context);
    drop(region);
    assert_eq!(leaked.leaked(), 0);
    drop(leaked);
    env::unchanged(&idle)
}

fn files_that_are_no_dma_buf_are_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let file = memfd_create("not a dma-buf", MemfdFlags::CLOEXEC)?;
    let access = Access::ALL_REMOTE;
    let error = pd.mr_builder().access(access).iova(0).register_dmabuf(&file, 0, 4096).unwrap_err();
    if is_rxe() {
        assert!(error.is_unsupported(), "{error:?}");
        assert!(error.message().contains("dma-buf"), "{error}");
    } else if !env::kernel_is_since(5, 12) {
        assert!(error.is_unsupported() && error.message().contains("Linux 5.12"), "{error:?}");
    } else {
        assert_eq!(error.errno(), Errno::INVAL, "an ordinary file as dma-buf: {error:?}");
        assert!(error.message().contains("is no dma-buf"), "{error}");
    }
    for (offset, length, iova) in [(1, 4096, 0), (0, 0, 0), (4096, u64::MAX, 0)] {
        let error = pd
            .mr_builder()
            .access(access)
            .iova(iova)
            .register_dmabuf(&file, offset, length)
            .unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert_eq!(error.verb(), "reg_dmabuf_mr");
    }
    Ok(())
}

fn on_demand_region_locks_no_memory() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let builder = pd.mr_builder().access(Access::ALL_REMOTE).on_demand();
    let mut region = supported(builder.allocate::<u64>(1 << 20), Capability::Odp)?;
    // The file's limit of locked memory is 8 MiB, and this is as much: nothing is locked.
    region.write_at(5, 6)?;
    assert_eq!(region.read_at(5), Some(6));
    assert!(region.access().contains(Access::ON_DEMAND));
    region.destroy()?;
    Ok(())
}

fn whole_address_space_can_be_registered() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let builder = pd.mr_builder().access(Access::LOCAL_WRITE);
    // SAFETY: no peer gets the keys.
    let region = unsafe { builder.register_address_space() };
    let region = supported(region, Capability::OdpImplicit)?;
    assert_eq!((region.addr(), region.byte_len()), (0, usize::MAX));
    let here = Box::new(5u64);
    let address = std::ptr::from_ref(&*here).addr();
    assert_eq!(region.sge(address..address + 8)?.addr, address as u64);
    region.destroy()?;
    Ok(())
}

fn advice_on_paged_memory_is_taken() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let builder = pd.mr_builder().access(Access::ALL_REMOTE).on_demand();
    let region = supported(builder.clone().allocate::<u8>(1 << 16), Capability::Odp)?;
    let ranges = [region.on_demand(..4096)?, region.on_demand(10_000..60_000)?];
    for wait in [false, true] {
        let answer = pd.advise(Advice::PREFETCH, &ranges, wait);
        supported(answer, Capability::AdviseMr)?;
        pd.advise(Advice::PREFETCH_WRITE, &ranges, wait)?;
        pd.advise(Advice::PREFETCH_NO_FAULT, &ranges, wait)?;
    }
    assert!(region.on_demand(..(1 << 16) + 1).is_err());
    assert_eq!(pd.advise(Advice::PREFETCH, &[], true).unwrap_err().errno(), Errno::INVAL);
    let many = vec![ranges[0]; 4096];
    assert_eq!(pd.advise(Advice::PREFETCH, &many, true).unwrap_err().errno(), Errno::INVAL);
    pd.advise(Advice::PREFETCH, &many[..4095], true)?;
    assert!(pd.advise(Advice(77), &ranges, true).unwrap_err().is_unsupported());
    let foreign = env::open()?.alloc_pd()?;
    let error = foreign.advise(Advice::PREFETCH, &ranges, true).unwrap_err();
    assert!(error.message().contains("another context"), "{error}");
    let other = context.alloc_pd()?;
    assert_eq!(other.advise(Advice::PREFETCH, &ranges, true).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn advice_on_pinned_memory_is_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    let error = region.on_demand(..).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    Ok(())
}

fn rereg_changes_the_access_flags() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8)?;
    region.write_at(0, 1)?;
    let less = Access::LOCAL_WRITE | Access::REMOTE_READ;
    supported(region.rereg(Rereg::new().access(less)), Capability::Rereg)?;
    assert_eq!((region.access(), region.is_dead()), (less, false));
    assert_eq!(region.read_at(0), Some(1));
    let error = region.rereg(Rereg::new().access(Access::REMOTE_ATOMIC)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    let unknown = Access::from_bits_retain(1 << 15);
    let error = region.rereg(Rereg::new().access(unknown)).unwrap_err();
    assert!(error.kernel_errno().is_some(), "{error:?}");
    assert_eq!((region.access(), region.is_dead()), (less, false), "after a refusal");
    region.sge(..)?;
    region.destroy()?;
    Ok(())
}

fn rereg_changes_the_protection_domain() -> Verdict {
    let context = env::open()?;
    let (one, other) = (context.alloc_pd()?, context.alloc_pd()?);
    let mut region = one.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8)?;
    let change = Rereg::new().protection_domain(&other).access(Access::LOCAL_WRITE);
    supported(region.rereg(change), Capability::Rereg)?;
    one.destroy()?;
    let (other, error) = other.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    region.destroy()?;
    Ok(other.destroy()?)
}

fn rereg_of_nothing_or_elsewhere_is_refused() -> Verdict {
    let pd = env::open()?.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8)?;
    assert_eq!(region.rereg(Rereg::new()).unwrap_err().errno(), Errno::INVAL);
    let elsewhere = env::open()?.alloc_pd()?;
    let error = region.rereg(Rereg::new().protection_domain(&elsewhere)).unwrap_err();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
    assert!(error.message().contains("another context"), "{error}");
    assert!(!region.is_dead());
    Ok(())
}

fn exchange_swaps_the_memory_or_gives_both_back() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let region = pd.mr_builder().access(Access::ALL_REMOTE).register(vec![1u64, 2])?;
    match region.exchange(vec![3u32, 4, 5]) {
        Ok((region, old)) => {
            assert_eq!(old, [1, 2]);
            assert_eq!((region.byte_len(), region.read_at(2)), (12, Some(5)));
            assert_eq!(region.destroy()?, [3, 4, 5]);
        }
        Err(failed) => {
            assert_eq!(failed.memory, Some(vec![3, 4, 5]));
            let region = failed.region.expect("a refusal leaves the region as it was");
            assert_eq!(region.read_at(1), Some(2));
            region.sge(..)?;
            assert_eq!(region.destroy()?, [1, 2]);
            supported::<()>(Err(failed.error), Capability::ReregTranslation)?;
        }
    }
    assert_eq!(count(&context)?, 0);
    Ok(())
}

fn two_hundred_regions_have_keys_of_their_own() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let regions = (0..200)
        .map(|n| pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![n as u8; 64]))
        .collect::<Result<Vec<_>, _>>()?;
    let mut keys: Vec<u32> = regions.iter().map(|region| region.lkey().0).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!((keys.len(), count(&context)?), (200, 200));
    for (n, region) in regions.into_iter().enumerate() {
        assert_eq!(region.destroy()?, [n as u8; 64]);
    }
    assert_eq!(count(&context)?, 0);
    Ok(())
}

fn regions_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::MR, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        Ok(Box::new(move || {
            drop(pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1024)?);
            pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 100])?.destroy()?;
            Ok(())
        }))
    })
}
