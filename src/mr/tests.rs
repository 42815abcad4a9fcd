//! Memory regions on a scripted kernel: failures that no device has on demand.

use crate::memory::region::StableBytes;
use crate::tests::Bench;
use crate::uverbs::scripted::{Op, Script};
use crate::{
    Access, AnyMemoryRegion, Errno, MemoryError, MemoryRegion, ProtectionDomain, Rereg, Unowned,
    WcStatus, WindowType,
};
use std::collections::BTreeMap;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_OUT, ib_uverbs_ex_query_device_resp, ib_uverbs_odp_general_cap_bits,
};
use uverbs_uapi::mr::UVERBS_METHOD_REG_DMABUF_MR;
use uverbs_uapi::object::{UVERBS_OBJECT_MR, UVERBS_OBJECT_MW};
use uverbs_uapi::write::IB_USER_VERBS_CMD_REREG_MR;

const REREG: Op = Op::Write(IB_USER_VERBS_CMD_REREG_MR);

#[test]
fn rights_that_are_set_last_keep_the_options() {
    let builder = Bench::new().pd.mr_builder().on_demand().relaxed_ordering();
    let access = builder.access(Access::LOCAL_WRITE).access;
    assert_eq!(access, Access::LOCAL_WRITE | Access::ON_DEMAND | Access::RELAXED_ORDERING);
}

/// Memory that calls a function when it is freed.
struct Watched {
    bytes: Box<[u8; 64]>,
    freed: Box<dyn Fn() + Send>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched")
    }
}

#[allow(unsafe_code, reason = "what is registered must be")]
// SAFETY: the box owns its bytes, and they stay as long as it.
unsafe impl StableBytes for Watched {
    type Item = u8;

    fn items(&mut self) -> NonNull<[u8]> {
        NonNull::from(self.bytes.as_mut_slice())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        (self.freed)();
    }
}

/// Items of eight bytes that begin where the test says, and that may panic when they are asked for.
struct Words {
    memory: Box<[u64; 8]>,
    offset: usize,
    panics: bool,
    _alive: Arc<()>,
}

#[allow(unsafe_code, reason = "the library refuses it")]
// SAFETY: aligned only with offset 0, and refused with others; else as above.
unsafe impl StableBytes for Words {
    type Item = u64;

    fn items(&mut self) -> NonNull<[u64]> {
        assert!(!self.panics, "as planned");
        let start = NonNull::from(self.memory.as_mut_slice()).cast::<u8>();
        let start = NonNull::new(start.as_ptr().wrapping_add(self.offset)).unwrap();
        NonNull::slice_from_raw_parts(start.cast(), 7)
    }
}

fn words(offset: usize, panics: bool) -> (Words, Arc<()>) {
    let alive = Arc::new(());
    (Words { memory: Box::new([7; 8]), offset, panics, _alive: alive.clone() }, alive)
}

/// A slice is made of them.
#[test]
fn memory_that_is_not_aligned_to_its_items_is_refused() {
    let bench = Bench::new();
    for offset in [1, 4, 7] {
        let (unaligned, alive) = words(offset, false);
        let failed = bench
            .pd
            .mr_builder()
            .access(Access::LOCAL_WRITE)
            .register(unaligned)
            .map(drop)
            .unwrap_err();
        assert_eq!(failed.error.errno(), Errno::INVAL);
        assert!(failed.error.message().contains("aligned to 8 bytes"), "{}", failed.error);
        assert_eq!(failed.into_object().offset, offset);
        assert_eq!(Arc::strong_count(&alive), 1);
        let (aligned, _) = words(0, false);
        let region = bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(aligned).unwrap();
        assert_eq!(region.len(), 7);
        let (unaligned, _) = words(offset, false);
        let failed = region.exchange(unaligned).map(drop).unwrap_err();
        assert_eq!((failed.error.errno(), failed.region.is_some()), (Errno::INVAL, true));
        assert_eq!(failed.memory.map(|memory| memory.offset), Some(offset));
    }
}

#[test]
fn memory_whose_items_panic_is_dropped() {
    let bench = Bench::new();
    let (panics, alive) = words(0, true);
    let before = bench.script.count(UVERBS_OBJECT_MR);
    let register = std::panic::AssertUnwindSafe(|| {
        bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(panics)
    });
    assert!(std::panic::catch_unwind(register).is_err());
    assert_eq!((Arc::strong_count(&alive), bench.script.count(UVERBS_OBJECT_MR)), (1, before));
}

/// Such memory, and the number of times that it was freed.
fn watched() -> (Watched, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let freed = {
        let count = count.clone();
        Box::new(move || _ = count.fetch_add(1, Ordering::Relaxed))
    };
    (Watched { bytes: Box::new([1; 64]), freed }, count)
}

fn freed(count: &AtomicUsize) -> usize {
    count.load(Ordering::Relaxed)
}

#[test]
fn memory_is_freed_after_the_region_is_deregistered() {
    let Bench { script, pd, .. } = &Bench::new();
    let left = Arc::new(AtomicUsize::new(usize::MAX));
    let freed = {
        let (script, left) = (script.clone(), left.clone());
        Box::new(move || left.store(script.count(UVERBS_OBJECT_MR), Ordering::Relaxed))
    };
    let memory = Watched { bytes: Box::new([0; 64]), freed };
    let region = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap();
    assert_eq!(script.count(UVERBS_OBJECT_MR), 1);
    drop(region);
    assert_eq!(left.load(Ordering::Relaxed), 0, "regions in the kernel when it was freed");
}

#[test]
fn memory_is_leaked_and_counted_if_deregistration_fails() {
    let Bench { script, context, pd, .. } = &Bench::new();
    for errno in [Errno::BUSY, Errno::INVAL, Errno::NOMEM, Errno::PERM] {
        let before = context.leaked();
        let (memory, count) = watched();
        let region = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap();
        script.refuse_destroy(region.handle(), errno);
        drop(region);
        assert_eq!((freed(&count), context.leaked()), (0, before + 1), "{errno}");
    }
}

#[test]
fn memory_is_freed_if_the_region_was_destroyed_by_another_process_or_with_the_device() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let (memory, count) = watched();
    let region = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap();
    script.refuse_destroy(region.handle(), Errno::NOENT);
    drop(region);
    assert_eq!(freed(&count), 1, "destroyed by another holder of the file");
    let (memory, count) = watched();
    let region = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap();
    script.vanish();
    drop(region);
    assert_eq!(freed(&count), 1, "destroyed with the device");
    assert_eq!(context.leaked(), 0);
}

#[test]
fn a_region_that_could_not_be_destroyed_comes_back() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let (memory, count) = watched();
    let mut region = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap();
    script.refuse_destroy(region.handle(), Errno::BUSY);
    for _ in 0..2 {
        let error;
        (region, error) = region.destroy().unwrap_err().into_parts();
        assert_eq!((error.verb(), error.kernel_errno()), ("dereg_mr", Some(Errno::BUSY)));
        region.write_at(0, 9).unwrap();
    }
    script.permit_destroy(region.handle());
    let memory = region.destroy().unwrap();
    assert_eq!((memory.bytes[0], freed(&count)), (9, 0));
    drop(memory);
    assert_eq!((freed(&count), context.leaked()), (1, 0));
}

#[test]
fn failed_registration_gives_the_memory_back() {
    let Bench { script, pd, .. } = &Bench::new();
    for errno in [Errno::NOMEM, Errno::INVAL, Errno::FAULT, Errno::IO, Errno::PERM] {
        script.fail_step(1, errno);
        let (memory, count) = watched();
        let failed = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap_err();
        assert_eq!((failed.error.errno(), failed.object.bytes[63]), (errno, 1));
        assert_eq!(freed(&count), 0);
        drop(failed);
        assert_eq!(freed(&count), 1);
        assert_eq!(script.count(UVERBS_OBJECT_MR), 0);
    }
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn the_kernel_gets_the_address_the_length_and_the_rights() {
    let Bench { script, pd, .. } = &Bench::new();
    let access = Access::LOCAL_WRITE | Access::RELAXED_ORDERING;
    let memory = vec![0u32; 100];
    let start = memory.as_ptr().addr() as u64;
    let region = pd.mr_builder().access(access).register(memory).unwrap();
    let seen = script.object(region.handle());
    assert_eq!((seen.start, seen.length, seen.access), (start, 400, access.bits()));
    assert_eq!((region.addr(), region.as_ptr().addr() as u64), (start, start));
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<[u64; 3]>(5).unwrap();
    let seen = script.object(region.handle());
    assert_eq!((seen.start, seen.length), (region.addr(), 120));
    assert_eq!(seen.access, Access::ALL_REMOTE.bits());
}

#[test]
fn a_region_has_no_rights_but_those_that_were_asked_for() {
    let Bench { script, pd, .. } = &Bench::new();
    let (local, owned) = (pd.mr_builder(), pd.mr_builder().register(vec![0u8; 8]).unwrap());
    assert_eq!(owned.access(), Access::LOCAL_WRITE);
    assert_eq!(local.clone().allocate::<u64>(1).unwrap().access(), Access::LOCAL_WRITE);
    let constant = local.access(Access::empty()).allocate::<u64>(1).unwrap();
    assert_eq!(script.object(constant.handle()).access, 0);
    // Rights that the device refuses are an error, and not left out.
    for errno in [Errno::INVAL, Errno::OPNOTSUPP] {
        script.fail_step(1, errno);
        let builder = pd.mr_builder().access(Access::ALL_REMOTE);
        let error = builder.allocate::<u64>(1).unwrap_err();
        assert!(error.message().contains("REMOTE_ATOMIC"), "{error}");
    }
}

#[test]
fn invalid_registrations_do_not_reach_the_kernel() {
    let Bench { script, pd, .. } = &Bench::new();
    let before = script.log().len();
    let nothing = pd.mr_builder().allocate::<u8>(0).unwrap_err();
    assert!(nothing.errno() == Errno::INVAL && nothing.message().contains("0 values"), "{nothing}");
    let nothing = pd.mr_builder().allocate::<[u64; 0]>(1).unwrap_err();
    assert!(nothing.errno() == Errno::INVAL && nothing.message().contains("0 bytes"), "{nothing}");
    let error = pd.mr_builder().allocate::<u64>(usize::MAX / 4).unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    assert!(pd.mr_builder().register(Vec::<u8>::new()).is_err());
    assert!(pd.mr_builder().access(Access::REMOTE_WRITE).register(vec![0u8; 8]).is_err());
    assert!(pd.mr_builder().iova(1).allocate::<u8>(1).is_err());
    assert_eq!(script.log().len(), before);
}

#[test]
fn a_refused_rereg_changes_nothing_and_another_failure_kills_the_region() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let (memory, count) = watched();
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).register(memory).unwrap();
    let less = Access::LOCAL_WRITE;
    for errno in [Errno::OPNOTSUPP, Errno::INVAL, Errno::ACCESS] {
        script.fail_step(1, errno);
        assert_eq!(region.rereg(Rereg::new().access(less)).unwrap_err().errno(), errno);
        assert_eq!((region.is_dead(), region.access()), (false, Access::ALL_REMOTE));
    }
    region.rereg(Rereg::new().access(less)).unwrap();
    assert_eq!(script.object(region.handle()).access, less.bits());

    script.fail_step(1, Errno::NOMEM);
    let error = region.rereg(Rereg::new().access(Access::ALL_REMOTE)).unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
    assert!(region.is_dead());
    assert_eq!(region.sge(..), Err(MemoryError::Dead));
    assert_eq!(region.remote(0), Err(MemoryError::Dead));
    assert_eq!(region.read_at(3), Some(1), "the memory is still this process's");
    assert!(region.rereg(Rereg::new().access(less)).is_err());
    assert_eq!(region.destroy().unwrap().bytes[3], 1);
    assert_eq!((freed(&count), context.leaked()), (1, 0));
}

#[test]
fn a_region_holds_the_domain_that_rereg_moved_it_to() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let other = context.alloc_pd().unwrap();
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(8).unwrap();
    region.rereg(Rereg::new().protection_domain(&other)).unwrap();
    let (other, error) = other.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(region);
    other.destroy().unwrap();
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn exchange_returns_the_former_memory() {
    let Bench { script, pd, .. } = &Bench::new();
    script.allow_translation();
    let (old, count) = watched();
    let region = pd.mr_builder().access(Access::ALL_REMOTE).register(old).unwrap();
    let handle = region.handle();
    let new = vec![5u64; 4];
    let start = new.as_ptr().addr() as u64;
    let (region, old) = region.exchange(new).unwrap();
    assert_eq!((region.handle(), region.addr(), region.len()), (handle, start, 4));
    assert_eq!((script.object(handle).start, script.object(handle).length), (start, 32));
    drop(old);
    assert_eq!((freed(&count), script.count(UVERBS_OBJECT_MR)), (1, 1));
    assert_eq!(region.destroy().unwrap(), [5; 4]);
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn a_failed_exchange_returns_both_memories_or_leaks_both() {
    let Bench { script, context, pd, .. } = &Bench::new();
    // Refused: all is as it was.
    let region = pd.mr_builder().access(Access::ALL_REMOTE).register(vec![1u8]).unwrap();
    let failed = region.exchange(vec![2u8]).unwrap_err();
    assert!(failed.error.is_unsupported());
    assert_eq!(failed.memory, Some(vec![2]));
    let region = failed.region.unwrap();
    assert_eq!((region.read_at(0), script.count(UVERBS_OBJECT_MR)), (Some(1), 1));
    // Failed in the middle: the region is gone, and both memories come back.
    script.refuse(REREG, Errno::NOMEM);
    let failed = region.exchange(vec![2u8]).unwrap_err();
    assert!(failed.region.is_none());
    assert_eq!((failed.old, failed.memory), (Some(vec![1]), Some(vec![2])));
    assert_eq!((script.count(UVERBS_OBJECT_MR), context.leaked()), (0, 0));
    // And it cannot be destroyed: the device may know either memory, so neither is freed.
    let ((old, first), (new, second)) = (watched(), watched());
    let region = pd.mr_builder().access(Access::ALL_REMOTE).register(old).unwrap();
    script.refuse_destroy(region.handle(), Errno::BUSY);
    let failed = region.exchange(new).unwrap_err();
    assert!(failed.region.is_none() && failed.old.is_none() && failed.memory.is_none());
    drop(failed);
    assert_eq!((freed(&first), freed(&second), context.leaked()), (0, 0, 1));
}

#[test]
#[cfg_attr(miri, ignore = "it opens a file")]
fn methods_that_a_kernel_lacks_are_unsupported() {
    let Bench { pd, .. } = &Bench::new();
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = pd
        .mr_builder()
        .access(Access::LOCAL_WRITE)
        .iova(0)
        .register_dmabuf(&file, 0, 4096)
        .unwrap_err();
    assert!(error.is_unsupported() && error.kernel_errno().is_some(), "{error:?}");
    let region = pd.mr_builder().on_demand().allocate::<u8>(64).unwrap();
    let range = region.on_demand(..).unwrap();
    let error = pd.advise(crate::Advice::PREFETCH, &[range], true).unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("prefetch"), "{error:?}");
}

/// rxe would write at a wrong place in any other memory.
#[test]
fn rxe_pages_on_demand_only_memory_at_a_page_and_at_its_own_address() {
    let bench = Bench::new();
    let page = rustix::param::page_size();
    let memory: &'static mut [u8] = Box::leak(vec![0; 3 * page].into_boxed_slice());
    let start = memory.as_ptr().align_offset(page);
    let (front, own) = memory.split_at_mut(start + 512);
    let registration = bench.pd.mr_builder().on_demand();
    let failed = registration.clone().register(own).unwrap_err();
    assert!(failed.error.is_unsupported(), "{}", failed.error);
    assert_eq!(failed.error.kernel_errno(), None, "the kernel was not asked");
    assert!(failed.error.message().contains("512 bytes behind"), "{}", failed.error);
    bench.pd.mr_builder().access(Access::LOCAL_WRITE).register(failed.object).unwrap();
    let (_, whole) = front.split_at_mut(start);
    let failed = registration.clone().iova(0).register(whole).unwrap_err();
    assert!(failed.error.is_unsupported(), "{}", failed.error);
    assert!(failed.error.message().contains("addressed from 0x0"), "{}", failed.error);
    registration.register(failed.object).unwrap();
}

#[test]
fn on_demand_on_a_device_without_it_is_unsupported_and_not_invalid() {
    let Bench { script, pd, .. } = &Bench::new();
    for errno in [Errno::INVAL, Errno::OPNOTSUPP] {
        script.fail_step(1, errno);
        let error = pd.mr_builder().on_demand().allocate::<u8>(64).unwrap_err();
        assert!(error.is_unsupported(), "{error:?}");
    }
}

#[test]
fn a_window_is_deallocated_before_its_region_and_queue_pair() {
    let bench = Bench::new();
    let qp = bench.qp(crate::QpType::RC);
    let Bench { script, context, pd, .. } = &bench;
    let (memory, count) = watched();
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let region = pd.mr_builder().access(access).register(memory).unwrap();
    let mut window = pd.alloc_mw(WindowType::Two).unwrap();
    window.bind(&qp, &region, .., Access::REMOTE_READ).unwrap();
    window.settle(WcStatus::SUCCESS);
    let queue = qp.handle();
    drop((region, qp));
    assert_eq!((freed(&count), script.count(UVERBS_OBJECT_MR)), (0, 1));
    assert!(script.live().iter().any(|(_, handle)| *handle == queue), "held by the window");
    let start = script.log().len();
    drop(window);
    let order: Vec<Op> = script.log().split_off(start);
    assert_eq!(order.first(), Some(&Op::destroy(UVERBS_OBJECT_MW)));
    assert!(order.contains(&Op::destroy(UVERBS_OBJECT_MR)));
    assert_eq!((freed(&count), context.leaked()), (1, 0));
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn rereg_refuses_flags_that_only_a_registration_sets() {
    let Bench { script, pd, .. } = &Bench::new();
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let asked = || script.log().iter().filter(|op| **op == REREG).count();
    for flag in [Access::ON_DEMAND, Access::HUGETLB, Access::ZERO_BASED] {
        let access = Access::ALL_REMOTE | flag;
        let error = region.rereg(Rereg::new().access(access)).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
        assert!(error.message().starts_with(&format!("{flag} cannot change")), "{error}");
    }
    assert_eq!(asked(), 0);
    assert_eq!(region.access(), Access::ALL_REMOTE);
    assert!(region.on_demand(..).is_err());
}

/// Registers memory that stays the test's.
#[allow(unsafe_code, reason = "the memory is kept by hand")]
fn unowned(pd: &ProtectionDomain, memory: &[MaybeUninit<u8>]) -> MemoryRegion<u8, Unowned> {
    let start = memory.as_ptr().cast_mut().cast();
    // SAFETY: the tests keep their memory until its regions are gone.
    unsafe { pd.mr_builder().access(Access::ALL_REMOTE).register_unowned(start, memory.len()) }
        .unwrap()
}

#[test]
fn uninitialised_and_borrowed_memory_gets_keys_of_several_devices() {
    let (one, other) = (Bench::new(), Bench::new());
    let memory = vec![MaybeUninit::<u8>::uninit(); 100];
    let start = memory.as_ptr().addr() as u64;
    let regions = [unowned(&one.pd, &memory), unowned(&other.pd, &memory)];
    for (bench, region) in [&one, &other].into_iter().zip(&regions) {
        let seen = bench.script.object(region.handle());
        assert_eq!((seen.start, seen.length), (start, 100));
        assert_eq!((region.addr(), region.byte_len()), (start, 100));
        let sge = region.sge(10..30).unwrap();
        assert_eq!((sge.addr, sge.length, sge.lkey), (start + 10, 20, region.lkey()));
        assert_eq!(region.remote(99).unwrap().addr, start + 99);
        let out = MemoryError::OutOfRange { offset: 0, length: 101, size: 100 };
        assert_eq!(region.sge(..101), Err(out));
    }
    for region in regions {
        region.destroy().unwrap();
    }
    for bench in [one, other] {
        assert_eq!((bench.script.count(UVERBS_OBJECT_MR), bench.context.leaked()), (0, 0));
        assert_eq!(bench.script.complaints(), [""; 0]);
    }
}

#[test]
#[allow(unsafe_code, reason = "the memory is kept by hand")]
fn unowned_memory_is_checked_before_the_kernel_is_asked() {
    let Bench { script, pd, .. } = &Bench::new();
    let mut memory = vec![0u8; 64];
    let before = script.log().len();
    for (start, length, access) in [
        (memory.as_mut_ptr(), 0, Access::LOCAL_WRITE),
        (memory.as_mut_ptr(), 64, Access::REMOTE_WRITE),
        (std::ptr::null_mut::<u8>().wrapping_sub(8), 64, Access::LOCAL_WRITE),
    ] {
        // SAFETY: nothing is registered.
        let error =
            unsafe { pd.mr_builder().access(access).register_unowned(start, length) }.unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    }
    assert_eq!(script.log().len(), before);
    let iova = 0x7000_0000 + (memory.as_ptr().addr() % rustix::param::page_size()) as u64;
    let builder = pd.mr_builder().iova(iova);
    // SAFETY: `memory` outlives the region.
    let region = unsafe { builder.register_unowned(memory.as_mut_ptr(), 64) }.unwrap();
    assert_eq!((region.addr(), script.object(region.handle()).iova), (iova, iova));
}

/// The `unsafe` of `register_unowned` covers the rights asked for there; the safe `rereg` must not add any.
#[test]
#[allow(unsafe_code, reason = "the memory is kept by hand")]
fn unowned_memory_gets_no_more_rights_than_were_promised_for() {
    let Bench { script, pd, .. } = &Bench::new();
    let asked = || script.log().iter().filter(|op| **op == REREG).count();
    let mut memory = vec![0u8; 64];
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    // SAFETY: `memory` outlives the region, and nobody borrows it.
    let region =
        unsafe { pd.mr_builder().access(access).register_unowned(memory.as_mut_ptr(), 64) };
    let builder = pd.mr_builder().access(access);
    // SAFETY: there is no device that could reach anything.
    let everything = unsafe { builder.register_address_space() };
    let (mut region, mut everything) = (region.unwrap(), everything.unwrap());
    let more = |access| Rereg::new().access(access | Access::REMOTE_WRITE);
    let paged = everything.access();
    let refused = [region.rereg(more(access)), everything.rereg(more(paged))];
    for error in refused.map(Result::unwrap_err) {
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::PERM, None));
        assert!(error.message().contains("REMOTE_WRITE"), "{error}");
    }
    assert_eq!((asked(), region.access(), region.is_dead()), (0, access, false));
    region.rereg(Rereg::new().access(access | Access::RELAXED_ORDERING)).unwrap();
    region.rereg(Rereg::new().access(Access::LOCAL_WRITE)).unwrap();
    assert_eq!((asked(), region.access()), (2, Access::LOCAL_WRITE));
}

#[test]
fn an_unowned_region_that_the_kernel_keeps_is_counted_and_comes_back() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let memory = [MaybeUninit::uninit(); 8];
    let region = unowned(pd, &memory);
    script.refuse_destroy(region.handle(), Errno::BUSY);
    let (region, error) = region.destroy().unwrap_err().into_parts();
    assert_eq!(error.kernel_errno(), Some(Errno::BUSY));
    drop(region);
    assert_eq!(context.leaked(), 1);
}

#[test]
fn regions_of_any_memory_stand_in_one_map() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let bytes = [MaybeUninit::uninit(); 16];
    let (memory, count) = watched();
    let regions: [AnyMemoryRegion; 3] = [
        pd.mr_builder().access(Access::ALL_REMOTE).allocate::<[u64; 3]>(5).unwrap().into(),
        pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap().erase(),
        unowned(pd, &bytes).erase(),
    ];
    let mut map: BTreeMap<_, _> = regions.into_iter().map(|it| (it.lkey(), it)).collect();
    assert_eq!(map.values().map(AnyMemoryRegion::byte_len).collect::<Vec<_>>(), [120, 64, 16]);
    for region in map.values() {
        let seen = script.object(region.handle());
        assert_eq!((seen.start, seen.access), (region.addr(), region.access().bits()));
        assert_eq!((seen.number, seen.number), (region.lkey().0, region.rkey().0));
        let sge = region.sge(4..12).unwrap();
        assert_eq!((sge.addr, sge.length, sge.lkey), (region.addr() + 4, 8, region.lkey()));
        assert_eq!(region.remote(4).unwrap().addr, region.addr() + 4);
        assert!(region.sge(..region.byte_len() + 1).is_err() && !region.is_dead());
    }
    let keys: Vec<_> = map.keys().copied().collect();
    map.remove(&keys[1]).unwrap().destroy().unwrap();
    assert_eq!((freed(&count), script.count(UVERBS_OBJECT_MR)), (1, 2));
    drop(map);
    assert_eq!((script.count(UVERBS_OBJECT_MR), context.leaked()), (0, 0));
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn an_erased_region_frees_its_memory_only_after_the_kernel_destroyed_it() {
    let Bench { script, context, pd, .. } = &Bench::new();
    let (memory, count) = watched();
    let region = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory).unwrap().erase();
    script.refuse_destroy(region.handle(), Errno::BUSY);
    let (region, error) = region.destroy().unwrap_err().into_parts();
    assert_eq!((error.verb(), error.kernel_errno()), ("dereg_mr", Some(Errno::BUSY)));
    drop(region);
    assert_eq!((freed(&count), context.leaked()), (0, 1));
}

#[test]
fn an_erased_region_stays_held_by_its_window() {
    let bench = Bench::new();
    let qp = bench.qp(crate::QpType::RC);
    let (memory, count) = watched();
    let region = bench
        .pd
        .mr_builder()
        .access(Access::LOCAL_WRITE | Access::MW_BIND)
        .register(memory)
        .unwrap();
    let mut window = bench.pd.alloc_mw(WindowType::Two).unwrap();
    window.bind(&qp, &region, .., Access::REMOTE_READ).unwrap();
    let (region, error) = region.erase().destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    drop(region);
    assert_eq!(freed(&count), 0);
    drop(window);
    assert_eq!((freed(&count), bench.context.leaked()), (1, 0));
    assert_eq!(bench.script.complaints(), [""; 0]);
}

#[test]
fn a_dead_region_is_dead_when_it_is_erased() {
    let Bench { script, pd, .. } = &Bench::new();
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(8).unwrap();
    script.fail_step(1, Errno::NOMEM);
    region.rereg(Rereg::new().access(Access::LOCAL_WRITE)).unwrap_err();
    let region = region.erase();
    assert!(region.is_dead());
    assert_eq!(
        (region.sge(..), region.remote(0)),
        (Err(MemoryError::Dead), Err(MemoryError::Dead))
    );
}

#[test]
#[cfg_attr(miri, ignore = "it opens a file")]
fn a_refused_dmabuf_names_the_one_cause() {
    const REG_DMABUF: Op =
        Op::Method { object: UVERBS_OBJECT_MR, method: UVERBS_METHOD_REG_DMABUF_MR };
    let file = std::fs::File::open("/dev/null").unwrap();
    let answer = |script: Script, device, errno| {
        script.refuse(REG_DMABUF, errno);
        let pd = script.open(device).alloc_pd().unwrap();
        let error = pd
            .mr_builder()
            .access(Access::LOCAL_WRITE)
            .iova(0)
            .register_dmabuf(&file, 0, 4096)
            .unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        error.message().to_owned()
    };
    let message = |script, device| answer(script, device, Errno::OPNOTSUPP);
    let old = answer(Script::mlx5(), "mlx5_0", Errno::PROTONOSUPPORT);
    assert!(old.contains("Linux 5.12"), "{old}");
    // A kernel answers so for a driver without such regions, too.
    let old = answer(Script::new(), "rxe0", Errno::PROTONOSUPPORT);
    assert!(old.contains("its driver has no regions of dma-bufs"), "{old}");
    assert_eq!(
        message(Script::new(), "rxe0"),
        "rxe0 registers no dma-buf: its driver has no regions of dma-bufs"
    );
    let without = message(Script::mlx5(), "mlx5_0");
    assert!(
        without.starts_with("mlx5_0 registers no dma-buf: it does not page on demand"),
        "{without}"
    );
    let pages = Script::mlx5();
    let on_demand = |device: &mut ib_uverbs_ex_query_device_resp| {
        let support = ib_uverbs_odp_general_cap_bits::IB_UVERBS_ODP_SUPPORT;
        device.odp_caps.general_caps = support.bits();
    };
    pages.forge(Op::QUERY_DEVICE, UVERBS_ATTR_CORE_OUT, on_demand);
    assert_eq!(
        message(pages, "mlx5_0"),
        "the driver of mlx5_0 registers no dma-buf with access LOCAL_WRITE"
    );
}

/// 24 bytes, so that a value's place is no power of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, zerocopy::FromBytes, zerocopy::IntoBytes)]
#[repr(C)]
struct Record {
    key: u64,
    mean: f64,
    name: [u8; 8],
}

#[test]
fn values_of_a_type_of_the_programs_own_are_read_and_written_by_number() {
    let bench = Bench::new();
    let mut region = bench
        .pd
        .mr_builder()
        .access(Access::ALL_REMOTE)
        .register(vec![Record::default(); 4])
        .unwrap();
    assert_eq!((region.len(), region.byte_len()), (4, 96));
    let record = Record { key: 7, mean: 21.5, name: *b"a sensor" };
    region.write_at(2, record).unwrap();
    let values = [0, 1, 2, 3, 4].map(|number| region.read_at(number));
    let none = Some(Record::default());
    assert_eq!(values, [none, none, Some(record), none, None]);
    let mut name = [0; 8];
    region.copy_to(2 * 24 + 16, &mut name).unwrap();
    assert_eq!(name, record.name, "bytes are counted from the region's start");
    let beyond = MemoryError::OutOfRange { offset: 96, length: 24, size: 96 };
    assert_eq!(region.write_at(4, record), Err(beyond));
    assert_eq!(region.destroy().unwrap()[2], record);
}
