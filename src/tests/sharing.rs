//! Two contexts on one kernel file, as two processes have them.

mod mlx5;

use super::Bench;
use crate::sharing::imported::Importable;
use crate::uverbs::scripted::{Op, Script};
use crate::{
    Access, Context, Envelope, Errno, ErrorWith, ForeignObject, Imported, MemoryRegion, ObjectKind,
    QpType, Rereg,
};
use uverbs_uapi::object::{UVERBS_OBJECT_CQ, UVERBS_OBJECT_MR, UVERBS_OBJECT_PD, UVERBS_OBJECT_QP};

/// An exporter, and an importer with the envelope of the exporter's context.
fn shared() -> (Bench, Context) {
    let bench = Bench::new();
    let importer = bench.script.import("rxe0", Some(&bench.context.export())).unwrap();
    (bench, importer)
}

/// Takes over an imported object.
#[allow(unsafe_code, reason = "that there is no other owner is taken on trust")]
pub(super) fn own<T: Importable>(imported: Imported<T>) -> Result<T, ErrorWith<Imported<T>>> {
    // SAFETY: the scripted kernel uses no handle again.
    unsafe { imported.into_owner() }
}

#[allow(unsafe_code, reason = "that there is no other owner is taken on trust")]
pub(super) fn destroy(object: ForeignObject) -> Result<(), ErrorWith<ForeignObject>> {
    // SAFETY: the scripted kernel uses no handle again.
    unsafe { object.destroy() }
}

fn destroyed(script: &Script, object: u16) -> usize {
    script.log().iter().filter(|op| **op == Op::destroy(object)).count()
}

#[test]
fn an_import_has_the_exporters_attributes() {
    let (bench, importer) = shared();
    assert_eq!(importer.completion_vectors(), bench.context.completion_vectors());
    assert_eq!(importer.completion_vectors(), 2);
    assert!(importer.file.optional_access);
    assert_eq!(importer.file.origin, bench.context.file.origin);
    // The importer does not create a context of its own.
    assert_eq!(bench.script.log().iter().filter(|op| **op == Op::GET_CONTEXT).count(), 1);
    let untold = bench.script.import("rxe0", None).unwrap();
    assert_eq!(untold.completion_vectors(), 1);
}

#[test]
fn a_file_without_a_context_is_refused() {
    let script = Script::new();
    let error = script.import("rxe0", None).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_device", Errno::INVAL));
    assert!(error.message().contains("no process has established a context"), "{error}");
    assert_eq!(script.left_at_close(), Some(vec![]));
}

#[test]
fn an_envelope_of_something_else_imports_no_context() {
    let bench = Bench::new();
    let wrong = bench.pd.export().unwrap();
    let error = bench.script.import("rxe0", Some(&wrong)).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    let other = Script::new();
    let context = other.open("rxe0");
    let told = Bench::new().context.export();
    // The scripted devices differ only in their files, which an import without an envelope cannot tell apart.
    assert!(other.import("rxe0", Some(&told)).is_ok());
    drop(context);
}

#[test]
fn importing_and_forgetting_destroys_nothing() {
    let (bench, importer) = shared();
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096).unwrap();
    let before = bench.script.live();
    for _ in 0..3 {
        let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
        assert_eq!(pd.handle(), bench.pd.handle());
        let imported = pd.import_mr(&region.export().unwrap()).unwrap();
        assert_eq!((imported.lkey(), imported.rkey()), (region.lkey(), region.rkey()));
        assert_eq!((imported.addr(), imported.byte_len()), (region.addr(), region.byte_len()));
        assert_eq!(imported.access(), region.access());
        assert_eq!(imported.sge(5..9).unwrap(), region.sge(5..9).unwrap());
        let (pd, error) = pd.unimport().unwrap_err().into_parts();
        assert_eq!((error.verb(), error.errno()), ("unimport_pd", Errno::BUSY));
        imported.unimport().unwrap();
        pd.unimport().unwrap();
        let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
        drop(pd.import_mr(&region.export().unwrap()).unwrap());
        drop(pd);
    }
    drop(importer);
    assert_eq!(bench.script.live(), before);
    assert_eq!(bench.script.complaints(), [""; 0]);
}

#[test]
fn an_imported_domain_is_like_any_other() {
    let (bench, importer) = shared();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let cq = importer.cq_builder(4).build().unwrap();
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8).unwrap();
    assert!(bench.script.object(qp.handle()).stands_on.contains(&bench.pd.handle()));
    assert_eq!(bench.script.object(region.handle()).stands_on, [bench.pd.handle()]);
    let (pd, error) = pd.unimport().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(pd);
    // The importer destroys the objects that it made, even after imports.
    drop((qp, region));
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_QP), 1);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_PD), 0);
}

#[test]
fn ownership_moves() {
    let (bench, importer) = shared();
    let pd = bench.context.alloc_pd().unwrap();
    let region = pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![7u8; 64]).unwrap();
    let (pd_handle, mr_handle) = (pd.handle(), region.handle());
    let sent = region.release().unwrap();
    let sent_pd = pd.release().unwrap();
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 0);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_PD), 0);
    let pd = own(importer.import_pd(&sent_pd).unwrap()).unwrap();
    let mut region = own(pd.import_mr(&sent).unwrap()).unwrap();
    // The envelope may be forged and name a region of this process's own pools: the region gets no
    // further rights and no other memory.
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let error = region.rereg(Rereg::new().access(all)).unwrap_err();
    assert_eq!(error.errno(), Errno::PERM, "{error}");
    let refused = region.exchange(vec![0u8; 4096].into_boxed_slice()).unwrap_err();
    assert_eq!(refused.error.errno(), Errno::PERM);
    let region = refused.region.unwrap();
    assert_eq!((pd.handle(), region.handle()), (pd_handle, mr_handle));
    region.destroy().unwrap();
    drop(pd);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_PD), 1);
    assert_eq!(bench.script.complaints(), [""; 0]);
    assert_eq!(bench.context.leaked() + importer.leaked(), 0);
}

#[test]
fn a_released_domain_stays_for_objects_made_from_it() {
    let (bench, _) = shared();
    let pd = bench.context.alloc_pd().unwrap();
    let handle = pd.handle();
    let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    pd.release().unwrap();
    drop(region);
    assert!(bench.script.live().contains(&(UVERBS_OBJECT_PD, handle)));
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
}

#[test]
fn a_bound_region_is_not_released() {
    let bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let registration = bench.pd.mr_builder().access(Access::LOCAL_WRITE | Access::MW_BIND);
    let region = registration.allocate::<u8>(64).unwrap();
    let mut window = bench.pd.alloc_mw(crate::WindowType::Two).unwrap();
    window.bind(&qp, &region, .., Access::REMOTE_READ).unwrap();
    window.settle(crate::WcStatus::SUCCESS);
    let (region, error) = region.release().unwrap_err().into_parts();
    assert_eq!((error.verb(), error.errno()), ("release_mr", Errno::BUSY));
    drop(window);
    drop(region);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
}

#[test]
fn a_destroyed_object_is_not_imported() {
    let (bench, importer) = shared();
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let pd = bench.context.alloc_pd().unwrap();
    let (sent_pd, sent) = (pd.export().unwrap(), region.export().unwrap());
    drop((pd, region));
    let error = importer.import_pd(&sent_pd).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_pd", Errno::NOENT), "{error}");
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let error = pd.import_mr(&sent).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_mr", Errno::NOENT), "{error}");
}

#[test]
fn an_object_destroyed_after_its_import_is_not_taken_over() {
    let (bench, importer) = shared();
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let gone = bench.context.alloc_pd().unwrap();
    let imported = importer.import_pd(&gone.export().unwrap()).unwrap();
    drop(gone);
    let (imported, error) = own(imported).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::NOENT, "{error}");
    drop(imported);
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let imported = pd.import_mr(&region.export().unwrap()).unwrap();
    drop(region);
    assert_eq!(own(imported).unwrap_err().error.errno(), Errno::NOENT);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
}

#[test]
fn a_region_of_other_keys_is_stale() {
    let (bench, importer) = shared();
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let sent = region.export().unwrap();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let imported = pd.import_mr(&sent).unwrap();
    bench.script.renumber(region.handle(), 0x4711);
    let error = pd.import_mr(&sent).unwrap_err();
    assert_eq!(error.errno(), Errno::STALE, "{error}");
    assert_eq!(own(imported).unwrap_err().error.errno(), Errno::STALE);
    // Cleaning up does not destroy an object of another owner.
    assert_eq!(importer.foreign(&sent).unwrap_err().errno(), Errno::STALE);
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 0);
    destroy(importer.foreign(&region.export().unwrap()).unwrap()).unwrap();
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
}

#[test]
fn a_region_of_another_range_is_stale() {
    let (bench, importer) = shared();
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let imported = pd.import_mr(&region.export().unwrap()).unwrap();
    let moved = |length, iova| bench.script.resize(region.handle(), length, iova);
    let (length, iova) = (64, region.addr());
    moved(65, iova);
    let (imported, error) = own(imported).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::STALE, "{error}");
    moved(length, iova + 1);
    let (imported, error) = own(imported).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::STALE, "{error}");
    moved(length, iova);
    own(imported).unwrap().destroy().unwrap();
}

#[test]
fn a_foreign_object_that_vanishes_before_its_destruction_is_missed() {
    let (bench, importer) = shared();
    let cq = bench.context.cq_builder(4).build().unwrap();
    let found = importer.foreign(&cq.export().unwrap()).unwrap();
    // The kernel may report at the end that the object is gone, although all checks passed.
    bench.script.steal(cq.handle());
    let asked = bench.script.log().len();
    let (found, error) = destroy(found).unwrap_err().into_parts();
    assert_eq!((error.verb(), error.errno()), ("destroy_cq", Errno::NOENT), "{error}");
    assert_eq!(bench.script.log().len(), asked + 1);
    drop((found, cq));
}

#[test]
fn envelopes_of_other_contexts_and_kinds_ask_the_kernel_nothing() {
    let (bench, importer) = shared();
    let other = Bench::new();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let region = other.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let (alien_pd, alien) = (other.pd.export().unwrap(), region.export().unwrap());
    let cq = bench.cq.export().unwrap();
    let asked = bench.script.log().len();
    assert_eq!(importer.import_pd(&alien_pd).unwrap_err().errno(), Errno::XDEV);
    assert_eq!(pd.import_mr(&alien).unwrap_err().errno(), Errno::XDEV);
    assert_eq!(importer.foreign(&alien).unwrap_err().errno(), Errno::XDEV);
    assert_eq!(importer.import_pd(&cq).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(pd.import_mr(&cq).unwrap_err().errno(), Errno::INVAL);
    assert_eq!(bench.script.log().len(), asked, "the kernel was asked");
}

/// Arbitrary bytes with a right CRC. An accepted envelope names an existing object whose facts agree
/// with the kernel's, and no import creates or destroys an object of the kernel.
#[test]
#[cfg_attr(miri, ignore = "safe code, in too many rounds")]
fn forged_envelopes_change_nothing() {
    let (bench, importer) = shared();
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let before = bench.script.live();
    let mut accepted = 0;
    let mut found = std::collections::BTreeMap::new();
    let keys = u64::from(region.lkey().0) | u64::from(region.rkey().0) << 32;
    let (length, iova) = (region.byte_len() as u64, region.addr());
    let proofs = [
        [0; 4],
        [u64::MAX; 4],
        [1, 0, 0, 0],
        [keys ^ 1, length, iova, 0],
        [keys ^ 1 << 32, length, iova, 0],
        [keys, length + 1, iova, 0],
        [keys, length, iova - 1, 0],
        [keys, length, iova, 1 << 32],
    ];
    for kind in 0..20 {
        for handle in 0..20 {
            let file = &importer.file;
            for proof in proofs {
                let forged = Envelope::seal(file, ObjectKind(kind), handle, proof);
                accepted += usize::from(importer.import_pd(&forged).is_ok());
                accepted += usize::from(pd.import_mr(&forged).is_ok());
                let Ok(object) = importer.foreign(&forged) else { continue };
                assert_eq!((object.kind(), object.handle()), (ObjectKind(kind), handle));
                // It can be queried as any other object, and dropping it has no effect.
                assert_eq!(object.query_qp().unwrap_err().errno(), Errno::INVAL);
                drop(object);
                *found.entry((kind, handle)).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(accepted, 1, "the protection domain that is there");
    // The driver tells no number of a domain, so one fingerprint is right for it. A queue has no
    // fingerprint, so all are right. No fingerprint has the region's keys, length and address.
    let domain = (UVERBS_OBJECT_PD, bench.pd.handle());
    let queue = (UVERBS_OBJECT_CQ, bench.cq.handle());
    let expected = [(domain, 1), (queue, proofs.len())];
    assert_eq!(found, expected.into_iter().collect());
    assert_eq!(bench.script.live(), before);
    drop((pd, region));
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1, "by its owner");
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_PD), 0);
}

#[test]
fn foreign_queues_are_asked_about_and_destroyed() {
    let (bench, importer) = shared();
    let qp = bench.qp(QpType::RC);
    let srq = bench.pd.srq_builder(8).build().unwrap();
    let found = importer.foreign(&qp.export().unwrap()).unwrap();
    assert_eq!((found.kind(), found.handle()), (ObjectKind::QP, qp.handle()));
    assert_eq!(found.query_qp().unwrap().state, crate::QpState::RTS);
    assert_eq!(found.query_srq().unwrap_err().errno(), Errno::INVAL);
    let shared_queue = importer.foreign(&srq.export().unwrap()).unwrap();
    assert_eq!(shared_queue.query_srq().unwrap(), srq.query().unwrap());
    // Another object depends on it.
    let cq = importer.foreign(&bench.cq.export().unwrap()).unwrap();
    let (cq, error) = destroy(cq).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(cq);
    drop(shared_queue);
    let again = importer.foreign(&qp.export().unwrap()).unwrap();
    destroy(found).unwrap();
    assert_eq!(destroy(again).unwrap_err().error.errno(), Errno::NOENT);
    // For the owner, destroying the object that is gone succeeds.
    drop((qp, srq));
    assert_eq!(bench.context.leaked(), 0);
}

#[test]
fn events_go_to_the_process_that_made_the_object() {
    let (bench, importer) = shared();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let cq = importer.cq_builder(4).build().unwrap();
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let srq = pd.srq_builder(4).build().unwrap();
    let fd = |context: &Context| {
        use std::os::fd::AsRawFd;
        Some(context.events_fd().as_raw_fd())
    };
    for handle in [cq.handle(), qp.handle(), srq.handle()] {
        assert_eq!(bench.script.object(handle).events, fd(&importer));
    }
    assert_eq!(bench.script.object(bench.cq.handle()).events, fd(&bench.context));
    assert_ne!(fd(&importer), fd(&bench.context));
}

/// For a zero-based region the kernel may report another start address.
#[test]
fn a_zero_based_region_is_taken_over() {
    let (bench, importer) = shared();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let builder = bench.pd.mr_builder().access(Access::REMOTE_READ | Access::LOCAL_WRITE);
    let region = builder.zero_based().allocate::<u8>(64).unwrap();
    bench.script.resize(region.handle(), 64, 0x9000);
    let imported = pd.import_mr(&region.export().unwrap()).unwrap();
    assert_eq!((imported.addr(), imported.byte_len()), (0, 64));
    bench.script.resize(region.handle(), 64, 0x9040);
    let (imported, error) = own(imported).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::STALE, "{error}");
    bench.script.resize(region.handle(), 64, 0x9000);
    region.release().unwrap();
    own(imported).unwrap().destroy().unwrap();
    assert_eq!(destroyed(&bench.script, UVERBS_OBJECT_MR), 1);
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn nothing_is_exported_in_a_forked_child() {
    let bench = Bench::on(Script::mlx5());
    let domain = bench.context.xrcd_builder().build().unwrap();
    let (qp, srq) = (bench.qp(QpType::RC), bench.pd.srq_builder(8).build().unwrap());
    let region = bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let exports = || {
        [
            ("export_xrcd", domain.export()),
            ("export_qp", qp.export()),
            ("export_srq", srq.export()),
            ("export_cq", bench.cq.export()),
            ("export_pd", bench.pd.export()),
            ("export_mr", region.export()),
        ]
    };
    assert!(exports().iter().all(|(_, sealed)| sealed.is_ok()));
    crate::sync::fork::in_child(|| {
        for (verb, sealed) in exports() {
            let error = sealed.expect_err(verb);
            assert!(error.is_forked() && error.verb() == verb, "{verb}: {error}");
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn imports_of_a_forked_parent_are_left_alone() {
    let (bench, importer) = shared();
    let pd = importer.import_pd(&bench.pd.export().unwrap()).unwrap();
    let region: MemoryRegion =
        bench.pd.mr_builder().access(Access::ALL_REMOTE).allocate(64).unwrap();
    let imported = pd.import_mr(&region.export().unwrap()).unwrap();
    let mut parts = Some((pd, imported));
    crate::sync::fork::in_child(|| {
        let (pd, imported) = parts.take().unwrap();
        assert!(own(imported).unwrap_err().error.is_forked());
        assert!(pd.export().unwrap_err().is_forked());
        let (pd, error) = pd.unimport().unwrap_err().into_parts();
        assert!(error.is_forked());
        drop(pd);
    });
}
