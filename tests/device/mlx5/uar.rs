//! UARs that the program allocates itself.

use crate::env::page_size;
use crate::leaks::rounds;
use crate::verdict::{Verdict, trials};
use uverbs::MemoryError;
use uverbs::mlx5::{Uar, UarKind, query_device};
use uverbs::{Errno, ObjectKind};

trials![
    pages_are_distinct_and_reused,
    mapped_pages_can_be_rung,
    without_combining_there_is_no_blueflame,
    pages_leave_nothing,
];

fn pages_are_distinct_and_reused() -> Verdict {
    let context = super::open()?;
    let before = context.handles(ObjectKind::MLX5_UAR)?;
    for _ in 0..3 {
        let one = Uar::alloc(&context, UarKind::NonCached)?;
        let other = Uar::alloc(&context, UarKind::NonCached)?;
        assert_ne!(one.page_id(), other.page_id());
        assert_ne!(one.handle(), other.handle());
        assert_eq!(one.len(), page_size());
        assert_eq!(context.handles(ObjectKind::MLX5_UAR)?.len(), before.len() + 2);
        one.destroy()?;
        drop(other);
        assert_eq!(context.handles(ObjectKind::MLX5_UAR)?, before);
    }
    Ok(())
}

fn mapped_pages_can_be_rung() -> Verdict {
    let context = super::open()?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let (page, again) = (uar.map()?, uar.map()?);
    assert_eq!(page.len(), uar.len());
    // A doorbell of queue pair 0, which does not exist.
    page.ring_be64(0x800, 0)?;
    again.ring_be64(0x800, 0)?;
    let end = page_size();
    let outside = MemoryError::OutOfRange { offset: end, length: 8, size: end };
    assert_eq!(page.ring_be64(end, 0), Err(outside));
    assert_eq!(
        page.ring_be64(0x804, 0),
        Err(MemoryError::Unaligned { offset: 0x804, length: 8, word: 8 })
    );
    uar.destroy()?;
    // The page goes to no other UAR while it is mapped.
    page.ring_be64(0x800, 0)?;
    Ok(())
}

fn without_combining_there_is_no_blueflame() -> Verdict {
    let context = super::open()?;
    let combines = query_device(&context)?.blueflame_bytes() > 0;
    match Uar::alloc(&context, UarKind::BlueFlame) {
        Ok(uar) => {
            assert!(combines);
            uar.map()?;
        }
        Err(error) => {
            assert!(!combines, "{error}");
            assert_eq!(error.errno(), Errno::OPNOTSUPP);
        }
    }
    Ok(())
}

fn pages_leave_nothing() -> Verdict {
    rounds(&[ObjectKind::MLX5_UAR], |context| {
        super::open()?;
        let context = context.clone();
        Ok(Box::new(move || {
            let uar = Uar::alloc(&context, UarKind::NonCached)?;
            drop(uar.map()?);
            uar.destroy()?;
            Ok(())
        }))
    })
}
