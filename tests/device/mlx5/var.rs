//! VARs within one process.

use crate::capability::Capability;
use crate::env;
use crate::fork::in_child;
use crate::leaks::rounds;
use crate::verdict::{Verdict, supported, trials};
use uverbs::MemoryError;
use uverbs::mlx5::{Var, VarKind};
use uverbs::{Errno, ObjectKind};

trials![
    pages_are_distinct_and_reused,
    doorbells_are_stores,
    mappings_outlive_the_object,
    exhausted_slots_are_free_again_after_a_drop,
    tlp_pages_are_of_another_kind,
    slots_leave_nothing,
    pages_stay_the_parents,
];

fn alloc(context: &uverbs::Context) -> Verdict<Var> {
    supported(Var::alloc(context, VarKind::Virtio), Capability::Var)
}

fn pages_are_distinct_and_reused() -> Verdict {
    let context = super::open()?;
    let (one, other) = (alloc(&context)?, alloc(&context)?);
    assert_ne!(one.page_id(), other.page_id());
    assert_ne!(one.mmap_offset(), other.mmap_offset());
    assert_eq!(one.len() % env::page_size(), 0);
    let mut listed = context.handles(ObjectKind::MLX5_VAR)?;
    listed.sort_unstable();
    assert_eq!(listed, [one.handle(), other.handle()]);
    let id = one.page_id();
    one.destroy()?;
    let again = alloc(&context)?;
    let taken = again.page_id();
    drop((other, again));
    assert_eq!(context.handles(ObjectKind::MLX5_VAR)?, [0u32; 0]);
    env::alone()?;
    assert_eq!(taken, id, "the lowest free page");
    Ok(())
}

fn doorbells_are_stores() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let page = var.map()?;
    let last = page.len() - 2;
    page.ring_u16(0, 3)?;
    page.ring_u16(last, 0xffff)?;
    page.ring_u32(4, 0x1234_5678)?;
    page.ring_u64(8, 0x1122_3344_5566_7788)?;
    assert_eq!(
        page.ring_u32(last, 0),
        Err(MemoryError::Unaligned { offset: last, length: 4, word: 4 })
    );
    let outside =
        |offset, width| Err(MemoryError::OutOfRange { offset, length: width, size: page.len() });
    assert_eq!(page.ring_u16(page.len(), 0), outside(page.len(), 2));
    assert_eq!(page.ring_u64(usize::MAX - 7, 0), outside(usize::MAX - 7, 8));
    env::shows_stores()?;
    assert_eq!([page.peek_u32(0)?, page.peek_u32(4)?], [3, 0x1234_5678]);
    assert_eq!([page.peek_u32(8)?, page.peek_u32(12)?], [0x5566_7788, 0x1122_3344]);
    assert_eq!(page.peek_u32(last - 2)?, 0xffff_0000);
    Ok(())
}

fn mappings_outlive_the_object() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let (page, id) = (var.map()?, var.page_id());
    var.destroy()?;
    page.ring_u32(0, 1)?;
    let next = alloc(&context)?;
    assert_ne!(next.page_id(), id, "the page is still somebody's");
    drop((page, next));
    env::alone()?;
    assert_eq!(alloc(&context)?.page_id(), id);
    Ok(())
}

fn exhausted_slots_are_free_again_after_a_drop() -> Verdict {
    /// More VARs than any device has.
    const MANY: usize = 1 << 16;
    env::alone()?;
    let context = super::open()?;
    let mut held = vec![alloc(&context)?];
    let error = loop {
        match Var::alloc(&context, VarKind::Virtio) {
            Ok(var) => held.push(var),
            Err(error) => break error,
        }
        assert!(held.len() < MANY, "pages without end");
    };
    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
    held.pop();
    alloc(&context)?;
    Ok(())
}

fn tlp_pages_are_of_another_kind() -> Verdict {
    let context = super::open()?;
    let tlp = supported(Var::alloc(&context, VarKind::Tlp), Capability::VarTlp)?;
    tlp.map()?.ring_u32(0, 7)?;
    let virtio = alloc(&context)?;
    assert_ne!(tlp.mmap_offset(), virtio.mmap_offset());
    Ok(())
}

fn slots_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::MLX5_VAR], |context| {
        super::open()?;
        let context = context.clone();
        Ok(Box::new(move || {
            let var = alloc(&context)?;
            drop(var.map()?);
            var.destroy()?;
            Ok(())
        }))
    })
}

fn pages_stay_the_parents() -> Verdict {
    let context = super::open()?;
    let var = alloc(&context)?;
    let page = var.map()?;
    let (context, var, page) = in_child((context, var, page), |(context, var, page)| {
        for result in [Var::alloc(&context, VarKind::Virtio).map(drop), var.map().map(drop)] {
            let error = result.expect_err("it is the parent's");
            assert!(error.is_forked(), "{error}");
        }
        assert_eq!(page.ring_u32(0, 1), Err(MemoryError::Forked));
        assert!(var.destroy().expect_err("it is the parent's").error.is_forked());
        Ok(())
    })?;
    page.ring_u32(0, 1)?;
    var.destroy()?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}
