//! VARs that separately started processes share.

use crate::capability::Capability;
use crate::env;
use crate::partner::{Partner, parse, print};
use crate::verdict::{Verdict, require, supported, trials};
use uverbs::mlx5::{ImportedVar, Var, VarKind, export_sizes};
use uverbs::{Context, Envelope, Errno, ObjectKind};

trials![
    doorbells_of_both_processes_reach_one_page,
    doorbells_reach_the_page_of_no_other_var,
    importer_keeps_its_mapping_after_the_owner_destroys,
    owner_keeps_its_mapping_after_an_importer_destroys,
    stale_envelopes_are_refused_until_the_handle_is_used_again,
    an_import_maps_nothing_that_took_the_place_of_its_var,
    ownership_moves_to_the_importer,
    dropped_imports_leave_nothing,
    var_export_has_the_layout_of_rdma_core,
    envelopes_of_something_else_are_refused,
    a_killed_importer_leaves_the_page_to_its_owner,
];

#[allow(unsafe_code, reason = "envelopes of VARs are taken on trust")]
fn import(context: &Context, envelope: &Envelope) -> uverbs::Result<ImportedVar> {
    // SAFETY: these tests, or their partner, exported each envelope.
    unsafe { Var::import(context, envelope) }
}

fn alloc(context: &Context) -> Verdict<Var> {
    supported(Var::alloc(context, VarKind::Virtio), Capability::Var)
}

fn refused(verb: &str, errno: Errno) -> String {
    format!("{verb} {}", errno.raw_os_error())
}

fn doorbells_of_both_processes_reach_one_page() -> Verdict {
    let context = super::open()?;
    let (var, other) = (alloc(&context)?, alloc(&context)?);
    let mut partner = Partner::sharing(&context)?;
    let told = partner.ask(&format!("var-import {}", print(&var.export()?)), "imported")?;
    assert_eq!(told, format!("{} {}", var.page_id(), var.len()));
    partner.ask("var-map", "mapped")?;
    let page = var.map()?;
    let shown = env::shows_stores();
    for value in [1, 0x8000_0001] {
        partner.ask(&format!("var-ring {value}"), "rung")?;
        if shown.is_ok() {
            assert_eq!(page.peek_u32(0)?, value);
        }
        page.ring_u32(0, value + 1)?;
        if shown.is_ok() {
            assert_eq!(page.peek_u32(0)?, value + 1);
        }
    }
    // The other way round: the partner's VAR, imported here.
    let envelope = parse(&partner.ask("var-alloc", "allocated")?)?;
    let theirs = import(&context, &envelope)?;
    assert!(theirs.page_id() != var.page_id() && theirs.page_id() != other.page_id());
    theirs.map()?.ring_u32(0, 9)?;
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?.len(), 3);
    partner.dismiss()?;
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?.len(), 2, "owners destroy, importers do not");
    shown
}

/// The kernel maps whole pages of the system, and does not report the place of a smaller VAR in its page.
fn doorbells_reach_the_page_of_no_other_var() -> Verdict {
    /// Bytes of the emulated device's VARs.
    const LENGTH: usize = 4096;
    let context = super::open()?;
    let (var, other) = (alloc(&context)?, alloc(&context)?);
    env::shows_stores()?;
    let page = env::page_size();
    require(page <= LENGTH, Capability::VarPage, &format!("{LENGTH} bytes in a page of {page}"))?;
    let mut partner = Partner::sharing(&context)?;
    partner.ask(&format!("var-import {}", print(&var.export()?)), "imported")?;
    partner.ask("var-map", "mapped")?;
    let (page, stranger) = (var.map()?, other.map()?);
    stranger.ring_u32(0, 7)?;
    page.ring_u32(0, 1)?;
    assert_eq!((page.peek_u32(0)?, stranger.peek_u32(0)?), (1, 7));
    partner.ask("var-ring 2", "rung")?;
    assert_eq!((page.peek_u32(0)?, stranger.peek_u32(0)?), (2, 7));
    partner.dismiss()
}

fn importer_keeps_its_mapping_after_the_owner_destroys() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let id = var.page_id();
    let mut partner = Partner::sharing(&context)?;
    partner.ask(&format!("var-import {}", print(&var.export()?)), "imported")?;
    partner.ask("var-map", "mapped")?;
    var.destroy()?;
    // The mapping stays, and the page goes to no other VAR meanwhile.
    partner.ask("var-ring 5", "rung")?;
    let next = alloc(&context)?;
    assert_ne!(next.page_id(), id);
    drop(next);
    // A new mapping and a new owner are refused; the importer can only forget it.
    assert_eq!(partner.ask("var-map", "refused")?, refused("map_var", Errno::INVAL));
    assert_eq!(partner.ask("var-own", "refused")?, refused("into_owner", Errno::NOENT));
    partner.dismiss()?;
    let again = alloc(&context)?;
    env::alone()?;
    assert_eq!(again.page_id(), id, "the last mapping is gone");
    Ok(())
}

fn owner_keeps_its_mapping_after_an_importer_destroys() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let page = var.map()?;
    let mut partner = Partner::sharing(&context)?;
    partner.ask(&format!("var-import {}", print(&var.export()?)), "imported")?;
    // rdma-core's manual lets either side destroy it; here the importer has to take ownership first.
    partner.ask("var-own", "owned")?;
    partner.ask("var-destroy", "destroyed")?;
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?, [0u32; 0]);
    assert_eq!(var.map().unwrap_err().errno(), Errno::INVAL);
    page.ring_u32(0, 3)?;
    var.destroy()?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn stale_envelopes_are_refused_until_the_handle_is_used_again() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let envelope = var.export()?;
    drop(import(&context, &envelope)?);
    let (handle, id) = (var.handle(), var.page_id());
    var.destroy()?;
    let error = import(&context, &envelope).unwrap_err();
    assert_eq!(error.errno(), Errno::NOENT, "{error}");
    // The next VAR has the same offset and handle, so that the import cannot tell them apart.
    env::alone()?;
    let next = alloc(&context)?;
    assert_eq!((next.handle(), next.page_id()), (handle, id));
    let taken = import(&context, &envelope)?;
    assert_eq!(taken.page_id(), id);
    Ok(())
}

fn an_import_maps_nothing_that_took_the_place_of_its_var() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let id = var.page_id();
    let taken = import(&context, &var.export()?)?;
    var.destroy()?;
    // The pages of their registers take the lowest free offsets of the file.
    let domains = (0..4).map(|_| context.alloc_td()).collect::<uverbs::Result<Vec<_>>>()?;
    match taken.map() {
        Ok(_) => panic!("a page of doorbell registers is mapped as a VAR"),
        Err(error) => assert_eq!(error.errno(), Errno::INVAL, "{error}"),
    }
    let next = alloc(&context)?;
    assert_ne!(next.page_id(), id, "the import still maps the page");
    drop((domains, next, taken));
    env::alone()?;
    assert_eq!(alloc(&context)?.page_id(), id);
    Ok(())
}

fn ownership_moves_to_the_importer() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let mut partner = Partner::sharing(&context)?;
    let envelope = var.release()?;
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?.len(), 1, "released, not destroyed");
    partner.ask(&format!("var-import {}", print(&envelope)), "imported")?;
    partner.ask("var-own", "owned")?;
    partner.dismiss()?;
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?, [0u32; 0], "the new owner destroyed it");
    Ok(())
}

fn dropped_imports_leave_nothing() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    for _ in 0..3 {
        let imported = import(&context, &var.export()?)?;
        let page = imported.map()?;
        imported.unimport()?;
        page.ring_u32(0, 1)?;
        drop(import(&context, &var.export()?)?);
    }
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?, [var.handle()]);
    var.map()?.ring_u32(0, 2)?;
    Ok(())
}

#[allow(unsafe_code, reason = "such bytes are taken on trust")]
fn var_export_has_the_layout_of_rdma_core() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let sizes = export_sizes();
    assert_eq!((sizes.envelope, sizes.rdma_core), (Envelope::SIZE, 24));
    let bytes = var.export_rdma_core();
    let mut expected = Vec::new();
    for word in [var.handle(), var.page_id(), var.len() as u32, 0] {
        expected.extend(word.to_ne_bytes());
    }
    expected.extend(var.mmap_offset().to_ne_bytes());
    assert_eq!(bytes.as_slice(), expected);
    // SAFETY: exported above.
    let imported = unsafe { Var::import_rdma_core(&context, &bytes) }?;
    imported.map()?.ring_u32(0, 11)?;
    // SAFETY: refused before anything is done with them.
    let short = unsafe { Var::import_rdma_core(&context, &bytes[..23]) }.unwrap_err();
    assert_eq!(short.errno(), Errno::INVAL);
    let mut elsewhere = bytes;
    elsewhere[16..].copy_from_slice(&(var.mmap_offset() + (1 << 30)).to_ne_bytes());
    // SAFETY: no VAR is mapped there.
    let stale = unsafe { Var::import_rdma_core(&context, &elsewhere) }.unwrap_err();
    assert_eq!(stale.errno(), Errno::STALE, "{stale}");
    env::shows_stores()?;
    assert_eq!(var.map()?.peek_u32(0)?, 11);
    Ok(())
}

fn envelopes_of_something_else_are_refused() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let error = import(&context, &pd.export()?).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    let var = alloc(&context)?;
    let mut bytes = var.export()?.to_bytes();
    bytes[20] ^= 1;
    assert_eq!(Envelope::from_bytes(&bytes).unwrap_err().errno(), Errno::INVAL);
    let other = super::open()?;
    let error = import(&other, &var.export()?).unwrap_err();
    assert_eq!(error.errno(), Errno::XDEV, "{error}");
    Ok(())
}

fn a_killed_importer_leaves_the_page_to_its_owner() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let mut partner = Partner::sharing(&context)?;
    partner.ask(&format!("var-import {}", print(&var.export()?)), "imported")?;
    partner.ask("var-map", "mapped")?;
    partner.ask("var-ring 1", "rung")?;
    partner.kill()?;
    let page = var.map()?;
    let kept = page.peek_u32(0)?;
    page.ring_u32(0, 2)?;
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?, [var.handle()]);
    env::shows_stores()?;
    assert_eq!(kept, 1);
    Ok(())
}
