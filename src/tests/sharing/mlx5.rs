//! The calls that sharing makes to mlx5's driver, and the objects that it leaves there.

use super::destroyed;
use crate::mlx5::{ImportedVar, Uar, UarKind, Var, VarKind};
use crate::uverbs::scripted::{Op, Script};
use crate::{
    Access, Context, DeviceMemory, Envelope, Errno, MemoryRegion, ObjectKind, OnDevice,
    ProtectionDomain, QpType, Rereg,
};
use rustix::param::page_size;
use std::os::fd::AsFd;
use uverbs_uapi::device::UVERBS_METHOD_QUERY_CONTEXT;
use uverbs_uapi::mlx5::context::mlx5_ib_alloc_ucontext_resp;
use uverbs_uapi::mlx5::dm::MLX5_IB_METHOD_DM_QUERY;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX, MLX5_IB_ATTR_QUERY_PD_RESP_PDN, MLX5_IB_METHOD_PD_QUERY,
    MLX5_IB_OBJECT_UAR, MLX5_IB_OBJECT_VAR,
};
use uverbs_uapi::object::{
    UVERBS_OBJECT_DEVICE, UVERBS_OBJECT_DM, UVERBS_OBJECT_MR, UVERBS_OBJECT_PD,
};

/// An exporter, and an importer with the envelope of the exporter's context.
fn shared() -> (Script, Context, Context) {
    let script = Script::mlx5();
    let exporter = script.open("mlx5_0");
    // The envelope for the importer.
    exporter.as_fd();
    let importer = script.import("mlx5_0", Some(&exporter.export())).unwrap();
    (script, exporter, importer)
}

/// Makes and drops queues that ring registers of each kind.
fn use_registers(context: &Context) {
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(4).build().unwrap();
    let make = |_| pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let queues: Vec<_> = (0..6).map(make).collect();
    let td = context.alloc_td().unwrap();
    drop((queues, td));
}

#[allow(unsafe_code, reason = "envelopes of VARs are taken on trust")]
fn import_var(context: &Context, envelope: &Envelope) -> crate::Result<ImportedVar> {
    // SAFETY: the scripted kernel maps nothing but pages of this test.
    unsafe { Var::import(context, envelope) }
}

#[test]
fn registers_are_freed_with_the_context_that_used_them() {
    let (script, exporter, importer) = shared();
    let before = script.count(MLX5_IB_OBJECT_UAR);
    assert_eq!(before, 2, "a page of each that is not cached");
    use_registers(&importer);
    assert!(script.count(MLX5_IB_OBJECT_UAR) > before + 2);
    drop(importer);
    assert_eq!(script.count(MLX5_IB_OBJECT_UAR), 1, "the exporter's");
    // The importer may also be the last one.
    let importer = script.import("mlx5_0", Some(&exporter.export())).unwrap();
    use_registers(&exporter);
    drop(exporter);
    assert_eq!(script.count(MLX5_IB_OBJECT_UAR), 1, "the importer's");
    drop(importer);
    assert_eq!(script.left_at_close(), Some(vec![]));
    assert_eq!(script.complaints(), [""; 0]);
    assert_eq!(script.mappings(), 0);
}

/// Giving a register back costs a call, which pays only if another process keeps the file.
#[test]
fn registers_of_an_unshared_context_are_left_to_the_kernel() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    use_registers(&context);
    let used = script.count(MLX5_IB_OBJECT_UAR);
    assert!(used > 2);
    drop(context);
    assert_eq!(destroyed(&script, MLX5_IB_OBJECT_UAR), 0);
    let left = script.left_at_close().unwrap();
    assert!(left.len() == used && left.iter().all(|(kind, _)| *kind == MLX5_IB_OBJECT_UAR));
    assert_eq!(script.mappings(), 0);
}

/// A mapping keeps the kernel's file for as long as it stays.
#[test]
fn registers_are_given_back_where_a_mapping_outlives_the_context() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    use_registers(&context);
    let page = Uar::alloc(&context, UarKind::NonCached).unwrap().map().unwrap();
    let used = script.count(MLX5_IB_OBJECT_UAR);
    assert!(used > 2);
    let before = destroyed(&script, MLX5_IB_OBJECT_UAR);
    drop(context);
    assert_eq!(destroyed(&script, MLX5_IB_OBJECT_UAR) - before, used);
    drop(page);
}

#[test]
fn a_queue_that_could_not_be_destroyed_keeps_its_register() {
    let (script, exporter, importer) = shared();
    let pd = importer.alloc_pd().unwrap();
    let cq = importer.cq_builder(4).build().unwrap();
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let before = script.count(MLX5_IB_OBJECT_UAR);
    script.refuse_destroy(qp.handle(), Errno::BUSY);
    drop((qp, cq, pd));
    assert_eq!(importer.leaked(), 3);
    drop(importer);
    assert_eq!(script.count(MLX5_IB_OBJECT_UAR), before);
    drop(exporter);
}

#[test]
fn an_import_trusts_the_kernel_over_the_envelope() {
    let (script, exporter, importer) = shared();
    assert_eq!(importer.completion_vectors(), 2);
    assert_eq!(importer.file.origin, exporter.file.origin);
    // The kernel's response wins over a different envelope.
    let lie = Envelope::seal(&exporter.file, ObjectKind::CONTEXT, 0, [7, 0, 0, 0]);
    let misled = script.import("mlx5_0", Some(&lie)).unwrap();
    assert_eq!(misled.completion_vectors(), 2);
    assert!(misled.file.optional_access);
    // Without an envelope the importer has the same facts.
    let untold = script.import("mlx5_0", None).unwrap();
    assert_eq!((untold.completion_vectors(), untold.file.origin), (2, 0));
}

#[test]
fn a_refused_envelope_asks_the_kernel_nothing() {
    let (script, exporter, _importer) = shared();
    let pd = exporter.alloc_pd().unwrap();
    let other = Script::mlx5().open("mlx5_0");
    let elsewhere = Script::new().open("rxe0").export();
    let (asked, live) = (script.log().len(), script.live());
    for (wrong, errno) in [(pd.export().unwrap(), Errno::INVAL), (elsewhere, Errno::XDEV)] {
        let asked = script.log().len();
        let error = script.import("mlx5_0", Some(&wrong)).unwrap_err();
        assert_eq!((error.verb(), error.errno()), ("import_device", errno), "{error}");
        assert_eq!(script.log().len(), asked, "the kernel was asked");
    }
    // Exporting the domain asked the kernel once; the refusals did not ask.
    assert_eq!((script.log().len(), script.live()), (asked + 1, live));
    drop(other);
}

#[test]
fn a_context_without_registers_of_its_own_is_not_imported() {
    let (script, exporter, _importer) = shared();
    let before = script.live();
    let query = Op::Method { object: UVERBS_OBJECT_DEVICE, method: UVERBS_METHOD_QUERY_CONTEXT };
    let id = MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX;
    script.forge(query, id, |response: &mut mlx5_ib_alloc_ucontext_resp| response.tot_bfregs = 16);
    let error = script.import("mlx5_0", Some(&exporter.export())).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_device", Errno::OPNOTSUPP), "{error}");
    assert!(error.message().contains("16 registers"), "{error}");
    assert_eq!(script.live(), before);
}

#[test]
fn a_domain_of_another_number_is_stale() {
    let (script, exporter, importer) = shared();
    let pd = exporter.alloc_pd().unwrap();
    let sent = pd.export().unwrap();
    let imported = importer.import_pd(&sent).unwrap();
    let query = Op::Method { object: UVERBS_OBJECT_PD, method: MLX5_IB_METHOD_PD_QUERY };
    script.forge(query, MLX5_IB_ATTR_QUERY_PD_RESP_PDN, |number: &mut u32| *number ^= 0x777);
    let error = importer.import_pd(&sent).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_pd", Errno::STALE), "{error}");
    assert!(error.message().ends_with("has number 1910, not 1"), "{error}");
    // An imported object must still be the same when it is taken over.
    let (imported, error) = super::own(imported).unwrap_err().into_parts();
    assert_eq!((error.verb(), error.errno()), ("into_owner", Errno::STALE), "{error}");
    assert_eq!(importer.foreign(&sent).unwrap_err().errno(), Errno::STALE);
    drop(imported);
    assert_eq!(script.count(UVERBS_OBJECT_PD), 1);
}

#[test]
fn forged_places_of_vars_are_refused() {
    let (script, exporter, importer) = shared();
    let var = Var::alloc(&exporter, VarKind::Virtio).unwrap();
    let sent = var.export().unwrap();
    let imported = import_var(&importer, &sent).unwrap();
    assert_eq!((imported.handle(), imported.len()), (var.handle(), page_size()));
    let (page, length, at) = (u64::from(var.page_id()), page_size() as u64, var.mmap_offset());
    let before = script.live();
    let forge = |handle, proof| {
        let forged = Envelope::seal(&exporter.file, ObjectKind::MLX5_VAR, handle, proof);
        import_var(&importer, &forged).map(drop).map_err(|error| error.errno())
    };
    let handle = var.handle();
    // No page is there, or the length is wrong or not whole pages, or the end overflows.
    assert_eq!(forge(handle, [page, length, 0x7000_0000, 0]), Err(Errno::STALE));
    assert_eq!(forge(handle, [page, 2 * length, at, 0]), Err(Errno::STALE));
    assert_eq!(forge(handle, [page, 100, at, 0]), Err(Errno::INVAL));
    assert_eq!(forge(handle, [page, 0, at, 0]), Err(Errno::INVAL));
    assert_eq!(forge(handle, [page, 1 << 40, at, 0]), Err(Errno::INVAL));
    assert_eq!(forge(handle, [1 << 40, length, at, 0]), Err(Errno::INVAL));
    assert_eq!(forge(handle + 100, [page, length, at, 0]), Err(Errno::NOENT));
    assert_eq!(script.live(), before);
    drop(imported);
    assert_eq!(script.count(MLX5_IB_OBJECT_VAR), 1);
    var.destroy().unwrap();
    assert_eq!(import_var(&importer, &sent).unwrap_err().errno(), Errno::NOENT);
}

/// While a page is mapped, the kernel gives its mmap offset to no other page, such as registers of queues. The
/// offset is all that a mapping names.
#[test]
#[cfg_attr(miri, ignore = "it counts mappings")]
fn an_import_keeps_the_page_of_its_var_mapped() {
    let (script, exporter, importer) = shared();
    let var = Var::alloc(&exporter, VarKind::Virtio).unwrap();
    let before = script.mappings();
    let imported = import_var(&importer, &var.export().unwrap()).unwrap();
    assert_eq!(script.mappings(), before + 1);
    var.destroy().unwrap();
    assert_eq!(script.mappings(), before + 1, "whatever its owner does");
    let (owned, error) = super::own(imported).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::NOENT, "{error}");
    assert_eq!(script.mappings(), before + 1, "it came back");
    drop(owned);
    assert_eq!(script.mappings(), before);
}

/// Device memory, and a region of all of it.
fn on_device(context: &Context) -> (ProtectionDomain, DeviceMemory, MemoryRegion<u8, OnDevice>) {
    let pd = context.alloc_pd().unwrap();
    let memory = context.alloc_dm(64, 8).unwrap();
    let region = pd.mr_builder().access(Access::ALL_REMOTE).register_dm(&memory, ..).unwrap();
    (pd, memory, region)
}

#[test]
fn device_memory_is_imported_while_it_is_there() {
    let (script, exporter, importer) = shared();
    let memory = exporter.alloc_dm(64, 8).unwrap();
    let envelope = memory.export().unwrap();
    let imported = importer.import_dm(&envelope).unwrap();
    assert_eq!((imported.len(), imported.handle()), (64, memory.handle()));
    drop(imported);
    assert_eq!(script.count(UVERBS_OBJECT_DM), 1, "its owner's");
    memory.destroy().unwrap();
    let error = importer.import_dm(&envelope).unwrap_err();
    assert_eq!(error.errno(), Errno::NOENT, "{error}");
}

#[test]
fn a_kernel_that_does_not_tell_of_device_memory_is_named() {
    let (script, exporter, importer) = shared();
    let memory = exporter.alloc_dm(64, 8).unwrap();
    let query = Op::Method { object: UVERBS_OBJECT_DM, method: MLX5_IB_METHOD_DM_QUERY };
    script.refuse(query, Errno::PROTONOSUPPORT);
    let error = importer.import_dm(&memory.export().unwrap()).unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("Linux 5.13"), "{error}");
    // The method exists, but the memory is of another type, which mlx5dv allocates.
    script.allow(query);
    script.refuse(query, Errno::OPNOTSUPP);
    let error = importer.import_dm(&memory.export().unwrap()).unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("flow steering"), "{error}");
    memory.destroy().unwrap();
}

#[test]
fn a_region_of_device_memory_changes_hands() {
    let (script, exporter, importer) = shared();
    let (pd, memory, region) = on_device(&exporter);
    let imported_pd = importer.import_pd(&pd.export().unwrap()).unwrap();
    let sent = region.release().unwrap();
    let imported = imported_pd.import_mr(&sent).unwrap();
    assert_eq!((imported.addr(), imported.byte_len()), (0, 64));
    // The region keeps the memory, in the importer as in the exporter.
    let (memory, error) = memory.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, Some(Errno::BUSY)), "{error}");
    super::own(imported).unwrap().destroy().unwrap();
    memory.destroy().unwrap();
    assert_eq!((script.count(UVERBS_OBJECT_MR), script.count(UVERBS_OBJECT_DM)), (0, 0));
    drop(imported_pd);
    assert_eq!(exporter.leaked() + importer.leaked(), 0);
}

#[test]
fn device_memory_under_a_released_region_is_left_and_counted() {
    let (script, exporter, _importer) = shared();
    let (_pd, memory, region) = on_device(&exporter);
    drop(memory);
    assert_eq!(script.count(UVERBS_OBJECT_DM), 1, "the region keeps it");
    region.release().unwrap();
    assert_eq!((script.count(UVERBS_OBJECT_DM), exporter.leaked()), (1, 1));
}

#[test]
fn a_region_of_device_memory_is_not_changed() {
    let (script, exporter, _importer) = shared();
    let (_pd, _memory, mut region) = on_device(&exporter);
    let asked = script.log().len();
    let error = region.rereg(Rereg::new().access(Access::REMOTE_READ)).unwrap_err();
    let names = |error: &crate::Error| {
        error.errno() == Errno::INVAL && error.message().starts_with("a region of device memory")
    };
    assert!(names(&error), "{error}");
    let refused = region.exchange(vec![0u8; 64]).unwrap_err();
    assert!(names(&refused.error), "{}", refused.error);
    let region = refused.region.unwrap();
    assert!(!region.is_dead());
    assert_eq!(script.log().len(), asked, "the kernel was asked");
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn device_memory_of_the_parent_is_refused_in_a_child() {
    let (_script, exporter, _importer) = shared();
    let memory = exporter.alloc_dm(64, 8).unwrap();
    memory.copy_from(0, &[7u8; 8]).unwrap();
    crate::sync::fork::in_child(|| {
        let copied = |error| crate::Error::from(error);
        let error = memory.copy_from(0, &[1u8; 8]).map_err(copied).unwrap_err();
        assert!(error.is_forked(), "{error}");
        let error = memory.copy_to(0, &mut [0u8; 8]).map_err(copied).unwrap_err();
        assert!(error.is_forked(), "{error}");
    });
    let error = crate::Error::from(memory.copy_from(64, &[1u8; 8]).unwrap_err());
    assert!(error.errno() == Errno::INVAL && !error.is_forked(), "{error}");
}
