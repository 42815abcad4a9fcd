//! Objects that are made and destroyed again and again leave nothing behind. Objects of open
//! contexts are counted by kind in their file, those of closed ones among the objects of this
//! process.

use crate::capability::Capability;
use crate::env;
use crate::pair::loopback;
use crate::verdict::{Verdict, supported, trials};
use crate::watchdog;
use uverbs::device::DriverId;
use uverbs::{Access, Context, Errno, ObjectKind, QpType};

trials![
    every_live_handle_is_listed,
    listing_an_unknown_kind_is_refused,
    contexts_leave_nothing,
    protection_domains_leave_nothing,
    parent_domains_leave_nothing,
    address_handles_leave_nothing,
    completion_channels_leave_nothing,
    completion_queues_leave_nothing,
    shared_receive_queues_leave_nothing,
    queue_pairs_leave_nothing,
    xrc_objects_leave_nothing,
    imports_leave_nothing,
];

/// The rounds for each kind of object. A leak in each round shows after few, the exhaustion of a
/// resource after thousands, in a long run.
fn many() -> u64 {
    env::rounds(100, 10_000)
}

/// Runs `round` many times in a context, and compares the objects before and after.
pub(crate) fn rounds(
    kinds: &[ObjectKind],
    prepare: impl FnMut(&Context) -> Verdict<Box<dyn FnMut() -> Verdict>>,
) -> Verdict {
    rounds_of(many(), kinds, prepare)
}

/// The same in `many` rounds.
pub(crate) fn rounds_of(
    many: u64,
    kinds: &[ObjectKind],
    mut prepare: impl FnMut(&Context) -> Verdict<Box<dyn FnMut() -> Verdict>>,
) -> Verdict {
    let idle = env::resources()?;
    {
        let context = env::open()?;
        let mut round = prepare(&context)?;
        round()?;
        let count = |kind| supported(context.handles(kind), Capability::InfoHandles);
        let before = kinds.iter().map(|kind| count(*kind)).collect::<Verdict<Vec<_>>>()?;
        let busy = env::resources()?;
        let (firmware, files) = (env::firmware_objects(), open_files()?);
        for _ in 0..many {
            round()?;
            watchdog::progress();
        }
        let after = kinds.iter().map(|kind| count(*kind)).collect::<Verdict<Vec<_>>>()?;
        for ((kind, before), after) in kinds.iter().zip(&before).zip(&after) {
            assert_eq!(before.len(), after.len(), "{kind} objects of the file, before and after");
        }
        env::unchanged(&busy)?;
        assert_eq!(context.leaked(), 0);
        assert_eq!(env::firmware_objects(), firmware, "the device's own objects, after and before");
        // A kernel in this process notices a closed descriptor at its next call.
        context.query_device()?;
        assert_eq!(open_files()?, files, "open files, after and before");
    }
    env::unchanged(&idle)
}

/// The number of open files.
fn open_files() -> Verdict<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

fn every_live_handle_is_listed() -> Verdict {
    let context = env::open()?;
    let count = |kind| supported(context.handles(kind), Capability::InfoHandles);
    assert_eq!(count(ObjectKind::PD)?, [0u32; 0]);
    // More than the library's first guess of their number, and than the second.
    let domains = (0..300).map(|_| context.alloc_pd()).collect::<uverbs::Result<Vec<_>>>()?;
    let mut expected: Vec<u32> = domains.iter().map(|pd| pd.handle()).collect();
    expected.sort_unstable();
    let mut listed = count(ObjectKind::PD)?;
    listed.sort_unstable();
    assert_eq!(listed, expected);
    let cq = context.cq_builder(1).build()?;
    assert_eq!(count(ObjectKind::CQ)?, [cq.handle()]);
    assert_eq!(count(ObjectKind::QP)?, [0u32; 0]);
    drop(domains);
    assert_eq!(count(ObjectKind::PD)?, [0u32; 0]);
    Ok(())
}

fn listing_an_unknown_kind_is_refused() -> Verdict {
    let context = env::open()?;
    supported(context.handles(ObjectKind::PD), Capability::InfoHandles)?;
    let error = context.handles(ObjectKind(0x0abc)).unwrap_err();
    assert_eq!(error.errno(), Errno::NOENT, "{error:?}");
    assert!(error.message().contains("2748"), "{error}");
    Ok(())
}

fn contexts_leave_nothing() -> Verdict {
    let idle = env::resources()?;
    for _ in 0..env::rounds(100, 1000) {
        env::open()?;
    }
    env::unchanged(&idle)
}

fn protection_domains_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::PD], |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            context.alloc_pd()?.destroy()?;
            drop(context.alloc_pd()?);
            Ok(())
        }))
    })
}

fn parent_domains_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::PD], |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            let pd = context.alloc_pd()?;
            let td = context.alloc_td()?;
            drop(pd.parent_domain_builder().build()?);
            drop(pd.parent_domain_builder().thread_domain(&td).build()?);
            Ok(())
        }))
    })
}

fn address_handles_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::AH, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let vector = loopback(context)?;
        Ok(Box::new(move || {
            supported(pd.create_ah(&vector), Capability::Ah)?.destroy()?;
            drop(supported(pd.create_ah(&vector), Capability::Ah)?);
            Ok(())
        }))
    })
}

fn completion_channels_leave_nothing() -> Verdict {
    // Channels are files, and the kernel does not list them among a context's objects.
    let context = env::open()?;
    let before = open_files()?;
    let channel = context.create_comp_channel()?;
    assert_eq!(open_files()?, before + env::descriptors_of_a_channel());
    for _ in 0..many() {
        drop(context.create_comp_channel()?);
        context.create_comp_channel()?.destroy()?;
    }
    channel.destroy()?;
    // A kernel in this process notices a closed descriptor at its next call.
    context.query_device()?;
    assert_eq!(open_files()?, before);
    Ok(())
}

fn completion_queues_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::CQ], |context| {
        let context = context.clone();
        let channel = context.create_comp_channel()?;
        Ok(Box::new(move || {
            let mut cq = context.cq_builder(16).channel(&channel).build()?;
            supported(cq.resize(32), Capability::CqResize)?;
            Ok(())
        }))
    })
}

fn shared_receive_queues_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::SRQ, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        Ok(Box::new(move || {
            let mut srq = supported(pd.srq_builder(16).build(), Capability::Srq)?;
            if env::device().driver() != Some(DriverId::MLX5) {
                srq.resize(32)?;
            }
            Ok(())
        }))
    })
}

fn queue_pairs_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::QP, ObjectKind::CQ, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(16).build()?;
        let mut types = [QpType::RC, QpType::UC, QpType::UD].into_iter().cycle();
        Ok(Box::new(move || {
            let qp_type = types.next().expect("it has no end");
            pd.qp_builder(&cq, &cq, qp_type).max_send_wr(4).max_recv_wr(4).build()?;
            Ok(())
        }))
    })
}

/// A domain, a queue in it, and both ends of a connection.
fn xrc_objects_leave_nothing() -> Verdict {
    const KINDS: [ObjectKind; 5] =
        [ObjectKind::XRCD, ObjectKind::SRQ, ObjectKind::QP, ObjectKind::CQ, ObjectKind::PD];
    rounds(&KINDS, |context| {
        let context = context.clone();
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(16).build()?;
        Ok(Box::new(move || {
            let domain = supported(context.xrcd_builder().build(), Capability::Xrc)?;
            drop(pd.srq_builder(16).xrc(&domain, &cq).build()?);
            drop(domain.create_target()?);
            drop(pd.qp_builder(&cq, &cq, QpType::XRC_INI).max_send_wr(4).build()?);
            domain.destroy()?;
            Ok(())
        }))
    })
}

/// An import is another name for an object; the kernel makes and destroys nothing.
fn imports_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::MR, ObjectKind::PD], |context| {
        let context = context.clone();
        let pd = context.alloc_pd()?;
        let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64)?;
        let envelopes = (pd.export()?, region.export()?);
        Ok(Box::new(move || {
            let theirs = supported(context.import_pd(&envelopes.0), Capability::Import)?;
            let import = theirs.import_mr(&envelopes.1)?;
            assert_eq!(import.lkey(), region.lkey());
            import.unimport()?;
            theirs.unimport()?;
            Ok(())
        }))
    })
}
