//! What is made and destroyed again and again leaves nothing behind: counted by kind in the file
//! while the context is open, and on the device when it is closed.

use crate::capability::Capability;
use crate::env;
use crate::pair::{PORT, gid};
use crate::verdict::{Verdict, supported, trials};
use crate::watchdog;
use uverbs::device::DriverId;
use uverbs::{AddressVector, Context, Errno, ObjectKind, ParentDomain, QpType};

trials![
    handles_are_listed,
    unknown_kinds_are_not_there,
    contexts,
    protection_domains,
    parent_domains,
    address_handles,
    completion_channels,
    completion_queues,
    shared_receive_queues,
    queue_pairs,
    xrc_objects,
    imports,
];

/// Rounds of making and destroying each kind of object: what leaks once a round shows in few, what
/// runs out after thousands shows in a long run.
fn many() -> u64 {
    env::rounds(100, 10_000)
}

/// Runs `round` many times in a context, and compares what there is before and after.
pub(crate) fn rounds(
    kinds: &[ObjectKind],
    prepare: impl FnMut(&Context) -> Verdict<Box<dyn FnMut() -> Verdict>>,
) -> Verdict {
    rounds_of(many(), kinds, prepare)
}

/// The same `many` times.
pub(crate) fn rounds_of(
    many: u64,
    kinds: &[ObjectKind],
    mut prepare: impl FnMut(&Context) -> Verdict<Box<dyn FnMut() -> Verdict>>,
) -> Verdict {
    let device = env::device();
    let idle = device.resources()?;
    {
        let context = env::open()?;
        let mut round = prepare(&context)?;
        round()?;
        let count = |kind| supported(context.handles(kind), Capability::InfoHandles);
        let before = kinds.iter().map(|kind| count(*kind)).collect::<Verdict<Vec<_>>>()?;
        let busy = device.resources()?;
        for _ in 0..many {
            round()?;
            watchdog::progress();
        }
        let after = kinds.iter().map(|kind| count(*kind)).collect::<Verdict<Vec<_>>>()?;
        for ((kind, before), after) in kinds.iter().zip(&before).zip(&after) {
            assert_eq!(before.len(), after.len(), "{kind} objects of the file, before and after");
        }
        assert_eq!(device.resources()?, busy, "objects of the device, before and after");
        assert_eq!(context.leaked(), 0);
    }
    assert_eq!(device.resources()?, idle, "objects of the device after the context is closed");
    Ok(())
}

fn handles_are_listed() -> Verdict {
    let context = env::open()?;
    let count = |kind| supported(context.handles(kind), Capability::InfoHandles);
    assert_eq!(count(ObjectKind::PD)?, [0u32; 0]);
    // More than the first guess of how many there are, and than the second.
    let domains = (0..300).map(|_| context.alloc_pd()).collect::<uverbs::Result<Vec<_>>>()?;
    let mut expected: Vec<u32> = domains.iter().map(|pd| pd.handle()).collect();
    expected.sort_unstable();
    let mut listed = count(ObjectKind::PD)?;
    listed.sort_unstable();
    assert_eq!(listed, expected);
    let cq = context.create_cq(1).build()?;
    assert_eq!(count(ObjectKind::CQ)?, [cq.handle()]);
    assert_eq!(count(ObjectKind::QP)?, [0u32; 0]);
    drop(domains);
    assert_eq!(count(ObjectKind::PD)?, [0u32; 0]);
    Ok(())
}

fn unknown_kinds_are_not_there() -> Verdict {
    let context = env::open()?;
    supported(context.handles(ObjectKind::PD), Capability::InfoHandles)?;
    let error = context.handles(ObjectKind(0x0abc)).unwrap_err();
    assert_eq!(error.errno(), Errno::NOENT, "{error:?}");
    assert!(error.message().contains("2748"), "{error}");
    Ok(())
}

fn contexts() -> Verdict {
    let device = env::device();
    let idle = device.resources()?;
    for _ in 0..env::rounds(100, 1000) {
        env::open()?;
    }
    assert_eq!(device.resources()?, idle);
    Ok(())
}

fn protection_domains() -> Verdict {
    rounds(&[ObjectKind::PD], |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            context.alloc_pd()?.destroy().map_err(|(_, error)| error)?;
            drop(context.alloc_pd()?);
            Ok(())
        }))
    })
}

fn parent_domains() -> Verdict {
    rounds(&[ObjectKind::PD], |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            let pd = context.alloc_pd()?;
            let td = context.alloc_td()?;
            drop(ParentDomain::builder(&pd).build()?);
            drop(ParentDomain::builder(&pd).thread_domain(&td).build()?);
            Ok(())
        }))
    })
}

fn address_handles() -> Verdict {
    rounds(&[ObjectKind::AH, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let own = gid(context)?;
        let vector = AddressVector::global(PORT, own.index, own.gid);
        Ok(Box::new(move || {
            pd.create_ah(&vector)?.destroy().map_err(|(_, error)| error)?;
            drop(pd.create_ah(&vector)?);
            Ok(())
        }))
    })
}

fn completion_channels() -> Verdict {
    // Channels are files, which the kernel does not list among a context's objects.
    let files = || Ok::<_, std::io::Error>(std::fs::read_dir("/proc/self/fd")?.count());
    let context = env::open()?;
    let before = files()?;
    let channel = context.create_comp_channel()?;
    assert_eq!(files()?, before + 1);
    for _ in 0..many() {
        drop(context.create_comp_channel()?);
        context.create_comp_channel()?.destroy().map_err(|(_, error)| error)?;
    }
    channel.destroy().map_err(|(_, error)| error)?;
    assert_eq!(files()?, before);
    Ok(())
}

fn completion_queues() -> Verdict {
    rounds(&[ObjectKind::CQ], |context| {
        let context = context.clone();
        let channel = context.create_comp_channel()?;
        Ok(Box::new(move || {
            let mut cq = context.create_cq(16).channel(&channel).build()?;
            supported(cq.resize(32), Capability::CqResize)?;
            Ok(())
        }))
    })
}

fn shared_receive_queues() -> Verdict {
    rounds(&[ObjectKind::SRQ, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        Ok(Box::new(move || {
            let mut srq = supported(pd.create_srq(16).build(), Capability::Srq)?;
            if env::device().driver() != Some(DriverId::MLX5) {
                srq.resize(32)?;
            }
            Ok(())
        }))
    })
}

fn queue_pairs() -> Verdict {
    rounds(&[ObjectKind::QP, ObjectKind::CQ, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(16).build()?;
        let mut types = [QpType::RC, QpType::UC, QpType::UD].into_iter().cycle();
        Ok(Box::new(move || {
            let qp_type = types.next().expect("it has no end");
            pd.create_qp(&cq, &cq, qp_type).max_send_wr(4).max_recv_wr(4).build()?;
            Ok(())
        }))
    })
}

/// A domain, a queue in it, and both ends of a connection.
fn xrc_objects() -> Verdict {
    const KINDS: [ObjectKind; 5] =
        [ObjectKind::XRCD, ObjectKind::SRQ, ObjectKind::QP, ObjectKind::CQ, ObjectKind::PD];
    rounds(&KINDS, |context| {
        let context = context.clone();
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(16).build()?;
        Ok(Box::new(move || {
            let domain = supported(context.open_xrcd().open(), Capability::Xrc)?;
            drop(pd.create_srq(16).xrc(&domain, &cq).build()?);
            drop(domain.create_target()?);
            drop(pd.create_qp(&cq, &cq, QpType::XRC_INI).max_send_wr(4).build()?);
            domain.destroy().map_err(|(_, error)| error)?;
            Ok(())
        }))
    })
}

/// What is imported is named anew, and nothing is made or destroyed by that.
fn imports() -> Verdict {
    rounds(&[ObjectKind::MR, ObjectKind::PD], |context| {
        let context = context.clone();
        let pd = context.alloc_pd()?;
        let region = pd.allocate::<u8>(64)?;
        let envelopes = (pd.export()?, region.export()?);
        Ok(Box::new(move || {
            let theirs = supported(context.import_pd(&envelopes.0), Capability::Import)?;
            let import = theirs.import_mr(&envelopes.1)?;
            assert_eq!(import.lkey(), region.lkey());
            import.unimport().map_err(|(_, error)| error)?;
            theirs.unimport().map_err(|(_, error)| error)?;
            Ok(())
        }))
    })
}
