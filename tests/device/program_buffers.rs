//! A program lends memory that it registered itself, and gets its own values back.
#![allow(unsafe_code, reason = "the test implements the unsafe trait")]

use crate::lent::{Half, pair};
use crate::pattern;
use crate::verdict::{Verdict, trials};
use std::sync::Arc;
use uverbs::owned::{RegionSge, RegisteredBuffer};
use uverbs::{Access, MemoryRegion, PostError, SendWr, WcStatus};

trials![
    pages_carry_messages,
    pages_are_read_and_written,
    a_page_of_another_domain_is_refused,
    dropping_the_queue_pair_drops_its_pages,
];

/// Pages of one region; the program hands each out once.
struct Arena {
    region: Arc<MemoryRegion<u8, Vec<u8>>>,
}

const PAGE: usize = 4096;

/// A page, which keeps the arena registered.
struct Page {
    region: Arc<MemoryRegion<u8, Vec<u8>>>,
    number: usize,
}

// SAFETY: a page keeps the region registered, and is handed out once: only the functions below, which take
// the page, reach its bytes.
unsafe impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        let start = self.number * PAGE;
        RegionSge::new(&self.region, start..start + PAGE).expect("a page of the region")
    }
}

impl Arena {
    fn new(half: &Half, pages: usize) -> Verdict<Arena> {
        let region =
            half.pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; pages * PAGE]);
        Ok(Arena { region: Arc::new(region.map_err(|failed| failed.error)?) })
    }

    fn page(&self, number: usize) -> Page {
        Page { region: self.region.clone(), number }
    }
}

impl Page {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        self.region.copy_to(self.number * PAGE, &mut bytes).expect("a page of the region");
        bytes
    }
}

fn pages_carry_messages() -> Verdict {
    let (mut a, mut b) = pair()?;
    let (ours, theirs) = (Arena::new(&a, 4)?, Arena::new(&b, 4)?);
    for round in 0..20u64 {
        let text = pattern::bytes(round, PAGE);
        let mut batch = b.qp.recv_batch()?;
        batch.push(theirs.page(round as usize % 4), round)?;
        batch.ring()?;
        // A read of a buffer writes the content into the page.
        let source = b.pool.copy(&text).expect("a buffer");
        let mut batch = a.qp.send_batch()?;
        batch.push(SendWr::read(source.remote(), &[]), ours.page(1), 1)?;
        batch.ring()?;
        let read = a.wait()?;
        assert_eq!((read.outcome.status, read.outcome.filled()), (WcStatus::SUCCESS, PAGE));
        let page: Page = read.memory.into_program().expect("the page");
        let mut batch = a.qp.send_batch()?;
        batch.push(SendWr::send(&[]), page, 2)?;
        batch.ring()?;
        assert_eq!(a.wait()?.outcome.status, WcStatus::SUCCESS);
        let received = b.wait()?;
        assert_eq!((received.tag, received.outcome.filled()), (round, PAGE));
        let page = received.memory.into_program::<Page>().expect("the page");
        assert_eq!((page.number, page.bytes() == text), (round as usize % 4, true));
    }
    Ok(())
}

fn pages_are_read_and_written() -> Verdict {
    let (mut a, b) = pair()?;
    let ours = Arena::new(&a, 8)?;
    let theirs = b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(8 * PAGE)?;
    let source = b.pool.copy(&pattern::bytes(9, PAGE)).expect("a buffer");
    let mut batch = a.qp.send_batch()?;
    for number in 0..3 {
        batch.push_unsignaled(
            SendWr::read(source.remote(), &[]),
            ours.page(number),
            number as u64,
        )?;
    }
    batch.push(SendWr::read(source.remote(), &[]), ours.page(3), 3)?;
    batch.ring()?;
    let mut pages = Vec::new();
    for tag in 0..4 {
        let done = a.wait()?;
        assert_eq!((done.tag, done.outcome.filled()), (tag, PAGE));
        pages.push(done.memory.into_program::<Page>().expect("the page"));
    }
    let mut batch = a.qp.send_batch()?;
    for page in pages {
        pattern::check(&page.bytes(), 9);
        let to = theirs.remote(page.number * PAGE)?;
        match page.number {
            3 => batch.push(SendWr::write(to, &[]), page, 3)?,
            number => batch.push_unsignaled(SendWr::write(to, &[]), page, number as u64)?,
        }
    }
    batch.ring()?;
    for tag in 0..4 {
        assert_eq!(a.wait()?.tag, tag);
    }
    for number in 0..4 {
        let mut written = vec![0; PAGE];
        theirs.copy_to(number * PAGE, &mut written)?;
        pattern::check(&written, 9);
    }
    assert_eq!(Arc::strong_count(&ours.region), 1, "all pages came back");
    Ok(())
}

fn a_page_of_another_domain_is_refused() -> Verdict {
    let (mut a, b) = pair()?;
    let theirs = Arena::new(&b, 1)?;
    let mut batch = a.qp.recv_batch()?;
    let refused = batch.push(theirs.page(0), 1).map_err(|refused| refused.error);
    assert_eq!(refused, Err(PostError::ForeignMemory));
    Ok(())
}

fn dropping_the_queue_pair_drops_its_pages() -> Verdict {
    let (mut a, _b) = pair()?;
    let ours = Arena::new(&a, 4)?;
    let mut batch = a.qp.recv_batch()?;
    for number in 0..4 {
        batch.push(ours.page(number), number as u64)?;
    }
    batch.ring()?;
    assert_eq!(Arc::strong_count(&ours.region), 5);
    drop(a.qp);
    assert_eq!(Arc::strong_count(&ours.region), 1);
    Ok(())
}
