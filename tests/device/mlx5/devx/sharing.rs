//! Objects and umems of DEVX that separately started processes share.

use super::{counters, create, input, open, query_counters};
use crate::capability::Capability;
use crate::fork::in_child;
use crate::heir::take_over;
use crate::leaks::rounds;
use crate::partner::{Partner, missing, parse, print, refused};
use crate::verdict::{Stop, Verdict, supported, trials};
use uverbs::mlx5::devx::{self, DevxObject, DevxRef, ImportedDevxObject, ImportedUmem, Umem};
use uverbs::mlx5::{Uar, UarKind, export_sizes};
use uverbs::{Context, Envelope, Errno, ErrorWith, Foreign, ObjectKind};
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in};
use uverbs_uapi::mlx5::prm::opcode;

trials![
    importer_queries_the_object_of_its_owner,
    importer_makes_a_queue_in_the_memory_of_the_exporter,
    object_that_is_released_belongs_to_the_importer,
    exports_have_the_layouts_of_rdma_core,
    envelopes_of_nothing_are_refused,
    orphans_are_destroyed_by_their_handles,
    imports_leave_nothing,
    imports_stay_the_parents,
];

const DOORBELL_RECORD: u64 = 0x1000;

/// The command that creates a completion queue of 16 CQEs at the beginning of a umem of two pages.
pub(crate) fn queue_command(context: &Context, umem: u32, uar: &Uar) -> Verdict<Vec<u8>> {
    let mut input = input::<create_cq_in>(opcode::CREATE_CQ);
    input.set(create_cq_in::cq_umem_id, umem.into());
    let mut queue = input.sub_mut(create_cq_in::cq_context);
    for (field, value) in [
        (cqc::log_cq_size, 4),
        (cqc::uar_page, uar.page_id().into()),
        (cqc::c_eqn_or_apu_element, devx::query_eqn(context, 0)?.into()),
        (cqc::dbr_umem_id, umem.into()),
        (cqc::dbr_addr, DOORBELL_RECORD),
    ] {
        queue.set(field, value);
    }
    Ok(input.bytes().to_vec())
}

/// The queue of [`queue_command`].
pub(crate) fn queue_in(
    context: &Context,
    umem: u32,
    uar: &Uar,
    keeps: &[&dyn DevxRef],
) -> Verdict<DevxObject> {
    Ok(create(context, &queue_command(context, umem, uar)?, keeps)?)
}

/// A partner's objects.
#[derive(Debug, Default)]
pub(crate) struct PartnerObjects {
    // The queue is dropped before the umem that it keeps.
    queue: Option<(DevxObject, Uar)>,
    umem: Option<ImportedUmem>,
    imported: Option<ImportedDevxObject>,
}

impl PartnerObjects {
    pub(crate) fn obey(&mut self, context: &Context, line: &str) -> Verdict<String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        Ok(match word {
            "import" => match DevxObject::import(context, &parse(rest)?) {
                Ok(object) => {
                    let text = format!("imported {}", object.number());
                    self.imported = Some(object);
                    text
                }
                Err(error) => refused(&error),
            },
            "query" => {
                let counters = self.imported.as_ref().ok_or_else(|| missing("object"))?;
                match query_counters(counters) {
                    Ok(()) => "queried".into(),
                    Err(error) => refused(&error),
                }
            }
            "own" => {
                let object = self.imported.take().ok_or_else(|| missing("object"))?;
                match take_over(object).map_err(|failed| failed.error) {
                    Ok(object) => {
                        object.destroy()?;
                        "destroyed".into()
                    }
                    Err(error) => refused(&error),
                }
            }
            "umem" => {
                let umem = Umem::<Foreign>::import(context, &parse(rest)?)?;
                let uar = Uar::alloc(context, UarKind::NonCached)?;
                let queue = queue_in(context, umem.id(), &uar, &[&*umem])?;
                let text = format!("created {} {}", queue.number(), umem.len());
                (self.queue, self.umem) = (Some((queue, uar)), Some(umem));
                text
            }
            "unimport" => {
                let umem = self.umem.take().ok_or_else(|| missing("umem"))?;
                let ErrorWith { object: umem, error } =
                    umem.unimport().expect_err("a queue is in it");
                assert_eq!(error.errno(), Errno::BUSY);
                self.queue = None;
                umem.unimport()?;
                "forgotten".into()
            }
            other => return Err(Stop::fail(format!("devx-{other} is nothing that is known"))),
        })
    }
}

fn importer_queries_the_object_of_its_owner() -> Verdict {
    let context = open()?;
    let (own, other) = (counters(&context)?, counters(&context)?);
    let mut partner = Partner::sharing(&context)?;
    for object in [&own, &other] {
        let told = partner.ask(&format!("devx-import {}", print(&object.export()?)), "imported")?;
        assert_eq!(told, object.number().to_string());
        partner.ask("devx-query", "queried")?;
    }
    // Imports forget; owners destroy.
    partner.dismiss()?;
    assert_eq!(context.handles(ObjectKind::MLX5_DEVX_OBJ)?.len(), 2);
    query_counters(&other)?;
    let mut partner = Partner::sharing(&context)?;
    let envelope = print(&own.export()?);
    partner.ask(&format!("devx-import {envelope}"), "imported")?;
    own.destroy()?;
    let gone = format!("devx_obj_query {}", Errno::NOENT.raw_os_error());
    assert_eq!(partner.ask("devx-query", "refused")?, gone);
    let gone = format!("into_owner {}", Errno::NOENT.raw_os_error());
    assert_eq!(partner.ask("devx-own", "refused")?, gone);
    let gone = format!("import_devx_obj {}", Errno::NOENT.raw_os_error());
    assert_eq!(partner.ask(&format!("devx-import {envelope}"), "refused")?, gone);
    partner.dismiss()
}

fn importer_makes_a_queue_in_the_memory_of_the_exporter() -> Verdict {
    let context = open()?;
    let umem = Umem::builder(&context).page_sizes(4096).allocate(0x2000)?;
    let mut partner = Partner::sharing(&context)?;
    let told = partner.ask(&format!("devx-umem {}", print(&umem.export()?)), "created")?;
    let (number, length) = told.split_once(' ').ok_or_else(|| Stop::fail(told.clone()))?;
    assert_eq!((number.parse::<u32>().is_ok(), length), (true, "8192"));
    // Firmware keeps the memory while the other process has a queue there.
    let ErrorWith { object: umem, error } = umem.destroy().expect_err("a queue is in it");
    assert_eq!(error.errno(), Errno::BUSY, "{error}");
    let number = format!("umem {:#x}", umem.id());
    assert!(error.message().contains(&number) && error.message().contains("process"), "{error}");
    partner.ask("devx-unimport", "forgotten")?;
    partner.dismiss()?;
    umem.destroy()?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn object_that_is_released_belongs_to_the_importer() -> Verdict {
    let context = open()?;
    let mut partner = Partner::sharing(&context)?;
    let envelope = counters(&context)?.release()?;
    assert_eq!(context.handles(ObjectKind::MLX5_DEVX_OBJ)?.len(), 1);
    partner.ask(&format!("devx-import {}", print(&envelope)), "imported")?;
    partner.ask("devx-own", "destroyed")?;
    assert_eq!(context.handles(ObjectKind::MLX5_DEVX_OBJ)?, [0u32; 0]);
    partner.dismiss()?;
    // A queue stays with the process that keeps its umem.
    let umem = Umem::builder(&context).page_sizes(4096).allocate(0x2000)?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let queue = queue_in(&context, umem.id(), &uar, &[&umem])?;
    let ErrorWith { object: queue, error } = queue.release().expect_err("it keeps its umem");
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    queue.destroy()?;
    Ok(())
}

fn exports_have_the_layouts_of_rdma_core() -> Verdict {
    let context = open()?;
    let counters = counters(&context)?;
    let bytes = counters.export_rdma_core();
    let word = |at: usize| bytes[at..at + 4].try_into().map_or(u32::MAX, u32::from_ne_bytes);
    assert_eq!([word(0), word(4), word(8)], [counters.handle(), 0, counters.number()]);
    assert_eq!(bytes[12..], [0; 20]);
    let imported = DevxObject::import_rdma_core(&context, &bytes)?;
    query_counters(&imported)?;
    imported.unimport()?;
    let umem = Umem::builder(&context).allocate(4096)?;
    let bytes = umem.export_rdma_core();
    let words = [umem.handle().to_ne_bytes(), umem.id().to_ne_bytes()].concat();
    assert_eq!(bytes[..], words[..]);
    let imported = Umem::<Foreign>::import_rdma_core(&context, &bytes)?;
    assert_eq!((imported.id(), imported.len()), (umem.id(), 0));
    assert!(imported.as_ptr().is_null());
    let sizes = export_sizes();
    assert_eq!((sizes.rdma_core_object, sizes.rdma_core_umem), (32, 8));
    Ok(())
}

fn envelopes_of_nothing_are_refused() -> Verdict {
    let context = open()?;
    let (counters, umem) = (counters(&context)?, Umem::builder(&context).allocate(4096)?);
    let (object, memory) = (counters.export()?, umem.export()?);
    let errno = |error: Option<uverbs::Error>| error.map(|error| error.errno());
    let as_object = |envelope: &Envelope| errno(DevxObject::import(&context, envelope).err());
    let as_umem = |envelope: &Envelope| errno(Umem::<Foreign>::import(&context, envelope).err());
    assert_eq!((as_object(&memory), as_umem(&object)), (Some(Errno::INVAL), Some(Errno::INVAL)));
    for length in [0, 7, 9, 31, 33] {
        let bytes = vec![0xff; length];
        let object = DevxObject::import_rdma_core(&context, &bytes).err();
        let umem = Umem::<Foreign>::import_rdma_core(&context, &bytes).err();
        assert_eq!((errno(object), errno(umem)), (Some(Errno::INVAL), Some(Errno::INVAL)));
    }
    let object = DevxObject::import_rdma_core(&context, &[0xff; 32]).err();
    let umem_of_nobody = Umem::<Foreign>::import_rdma_core(&context, &[0xff; 8]).err();
    assert_eq!((errno(object), errno(umem_of_nobody)), (Some(Errno::NOENT), Some(Errno::NOENT)));
    // Another file has other objects.
    let other = open()?;
    let refused = DevxObject::import(&other, &counters.export()?).err();
    assert_eq!(errno(refused), Some(Errno::XDEV));
    Ok(())
}

/// As those of a process that ended, while this one has its file open.
fn orphans_are_destroyed_by_their_handles() -> Verdict {
    const KINDS: [ObjectKind; 2] = [ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_DEVX_OBJ];
    let context = open()?;
    let handles = |kind| supported(context.handles(kind), Capability::InfoHandles);
    let census = || KINDS.into_iter().map(handles).collect::<Verdict<Vec<_>>>();
    let before = census()?;
    let umem = Umem::builder(&context).page_sizes(4096).allocate(0x2000)?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let queue = queue_in(&context, umem.id(), &uar, &[])?;
    let of_umem = (KINDS[0], umem.handle());
    let of_queue = (KINDS[1], queue.handle());
    // Nobody here destroys them; the memory of the umem stays.
    std::mem::forget((umem, queue));
    // SAFETY: the handles are those of the two, which have no other owner.
    let find = |(kind, handle)| unsafe { context.foreign_raw(kind, handle) };
    // SAFETY: as above.
    let refused = unsafe { find(of_umem)?.destroy() }.expect_err("a queue is in it");
    let text = refused.error.to_string();
    assert!(text.contains("umem") && text.contains("depends on it"), "{text}");
    // SAFETY: as above.
    unsafe { find(of_queue)?.destroy()? };
    // SAFETY: as above.
    unsafe { refused.object.destroy()? };
    assert_eq!(census()?, before);
    assert_eq!(find(of_umem).err().map(|error| error.errno()), Some(Errno::NOENT));
    Ok(())
}

/// An import is another name for an object, which its owner destroys.
fn imports_leave_nothing() -> Verdict {
    open()?;
    let kinds = [ObjectKind::MLX5_DEVX_OBJ, ObjectKind::MLX5_DEVX_UMEM, ObjectKind::MLX5_UAR];
    rounds(&kinds, |context| {
        let context = context.clone();
        let umem = Umem::builder(&context).page_sizes(4096).allocate(0x2000)?;
        let object = counters(&context)?;
        Ok(Box::new(move || {
            query_counters(&*DevxObject::import_rdma_core(&context, &object.export_rdma_core())?)?;
            DevxObject::import_rdma_core(&context, &object.export_rdma_core())?.unimport()?;
            let theirs = Umem::<Foreign>::import_rdma_core(&context, &umem.export_rdma_core())?;
            let uar = Uar::alloc(&context, UarKind::NonCached)?;
            let queue = queue_in(&context, theirs.id(), &uar, &[&*theirs])?;
            let ErrorWith { object: theirs, error } =
                theirs.unimport().expect_err("a queue is in it");
            assert_eq!(error.errno(), Errno::BUSY);
            drop(theirs);
            queue.destroy()?;
            Ok(())
        }))
    })
}

fn imports_stay_the_parents() -> Verdict {
    let context = open()?;
    let (object, umem) = (counters(&context)?, Umem::builder(&context).allocate(4096)?);
    let imported = DevxObject::import_rdma_core(&context, &object.export_rdma_core())?;
    let memory = Umem::<Foreign>::import_rdma_core(&context, &umem.export_rdma_core())?;
    let mine = (context, imported, memory, object);
    let (context, imported, memory, object) =
        in_child(mine, |(context, imported, memory, object)| {
            let (exported, bytes) = (object.export_rdma_core(), memory.export_rdma_core());
            for result in [
                query_counters(&imported),
                DevxObject::import_rdma_core(&context, &exported).map(drop),
                Umem::<Foreign>::import_rdma_core(&context, &bytes).map(drop),
                object.release().map(drop).map_err(|failed| failed.error),
                imported.unimport().map_err(|failed| failed.error),
                memory.unimport().map_err(|failed| failed.error),
            ] {
                let error = result.expect_err("it is the parent's");
                assert!(error.is_forked(), "{error}");
            }
            Ok(())
        })?;
    query_counters(&imported)?;
    imported.unimport()?;
    memory.unimport()?;
    object.destroy()?;
    umem.destroy()?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}
