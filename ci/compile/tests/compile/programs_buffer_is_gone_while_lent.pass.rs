//! The program cannot use its own buffer while it is lent to a request.
#![allow(unused)]

use uverbs::SendWr;
use uverbs::owned::{OwnedSendBatch, RegionSge, RegisteredBuffer};

struct Page(RegionSge);

unsafe impl RegisteredBuffer for Page {
    fn sge(&self) -> RegionSge {
        self.0
    }
}

fn push(batch: &mut OwnedSendBatch<'_, u32>, page: Page, other: Page) -> RegionSge {
    batch.push_unsignaled(SendWr::send(&[]), page, 1).unwrap();
    other.sge()
}

fn main() {
    let _ = push;
}
