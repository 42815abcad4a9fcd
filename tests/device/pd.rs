//! Protection domains, thread domains and parent domains.

use crate::env;
use crate::verdict::{Verdict, trials};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use uverbs::{Allocation, DomainView, Errno, QpType, QueueAllocator, ResourceType};

trials![
    domain_is_busy_until_its_dependants_are_destroyed,
    parent_domain_holds_its_protection_domain,
    parent_domain_of_a_parent_domain_holds_the_protection_domain,
    thread_domain_is_held_by_its_dependants,
    foreign_thread_domain_is_refused,
    allocator_is_not_asked_on_rxe,
    objects_of_two_contexts_do_not_mix,
];

fn domain_is_busy_until_its_dependants_are_destroyed() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let cq = context.cq_builder(1).build()?;
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let (pd, error) = pd.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    let (cq, error) = cq.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    qp.destroy()?;
    cq.destroy()?;
    pd.destroy()?;
    Ok(())
}

fn parent_domain_holds_its_protection_domain() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let domain = pd.parent_domain_builder().build()?;
    assert_eq!(domain.handle(), pd.handle());
    let (pd, error) = pd.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    assert!(error.message().contains("parent domain"), "{error}");
    let srq = domain.srq_builder(1).build()?;
    let (domain, error) = domain.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(srq);
    domain.destroy()?;
    pd.destroy()?;
    Ok(())
}

fn parent_domain_of_a_parent_domain_holds_the_protection_domain() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let td = context.alloc_td()?;
    let inner = pd.parent_domain_builder().thread_domain(&td).build()?;
    let outer = inner.parent_domain_builder().build()?;
    assert_eq!(outer.handle(), pd.handle());
    // The outer parent domain holds the protection domain, not the inner parent domain.
    inner.destroy()?;
    td.destroy()?;
    outer.destroy()?;
    Ok(())
}

fn thread_domain_is_held_by_its_dependants() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let td = context.alloc_td()?;
    let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
    let cq = context.cq_builder(1).build()?;
    let qp = domain.qp_builder(&cq, &cq, QpType::UD).build()?;
    drop(domain);
    let (td, error) = td.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(qp);
    td.destroy()?;
    Ok(())
}

fn foreign_thread_domain_is_refused() -> Verdict {
    let (one, other) = (env::open()?, env::open()?);
    let pd = one.alloc_pd()?;
    let td = other.alloc_td()?;
    let error = pd.parent_domain_builder().thread_domain(&td).build().unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(error.message().contains(one.device().name()), "{error}");
    Ok(())
}

/// Counts its calls, and leaves every buffer to the library.
#[derive(Debug, Default)]
struct Counting(Arc<AtomicUsize>);

#[allow(unsafe_code, reason = "it never answers memory, so there is nothing to keep valid")]
// SAFETY: `alloc` never returns memory.
unsafe impl QueueAllocator for Counting {
    fn alloc(&self, _: &DomainView<'_>, _: Layout, _: ResourceType) -> Allocation {
        self.0.fetch_add(1, Ordering::Relaxed);
        Allocation::UseDefault
    }

    unsafe fn free(&self, _: &DomainView<'_>, _: NonNull<u8>, _: Layout, _: ResourceType) {
        unreachable!("no memory was ever answered");
    }
}

fn allocator_is_not_asked_on_rxe() -> Verdict {
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let asked = Arc::new(AtomicUsize::new(0));
    let domain = pd.parent_domain_builder().allocator(Counting(asked.clone())).build()?;
    let cq = context.cq_builder(8).build()?;
    let qp = domain.qp_builder(&cq, &cq, QpType::RC).build()?;
    let srq = domain.srq_builder(8).build()?;
    let rxe = context.device().driver() == Some(uverbs::device::DriverId::RXE);
    assert_eq!(asked.load(Ordering::Relaxed) == 0, rxe, "asked {asked:?} times");
    assert_eq!(domain.asks_allocator(), !rxe);
    assert!(!pd.parent_domain_builder().build()?.asks_allocator(), "it has none");
    drop((qp, srq));
    Ok(())
}

fn objects_of_two_contexts_do_not_mix() -> Verdict {
    let (one, other) = (env::open()?, env::open()?);
    let pd = one.alloc_pd()?;
    let own = one.cq_builder(1).build()?;
    let cq = other.cq_builder(1).build()?;
    let srq = other.alloc_pd()?.srq_builder(1).build()?;
    let channel = other.create_comp_channel()?;
    let errors = [
        pd.qp_builder(&cq, &own, QpType::RC).build().unwrap_err(),
        pd.qp_builder(&own, &cq, QpType::RC).build().unwrap_err(),
        pd.qp_builder(&own, &own, QpType::RC).srq(&srq).build().unwrap_err(),
        one.cq_builder(1).channel(&channel).build().unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.errno(), Errno::INVAL);
        assert_eq!(error.kernel_errno(), None, "the kernel was asked: {error}");
        assert!(error.message().contains("another context"), "{error}");
    }
    Ok(())
}
