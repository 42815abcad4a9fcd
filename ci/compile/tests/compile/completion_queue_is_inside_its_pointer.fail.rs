//! A pointer that is not known to lead to a completion queue is followed by the program.
#![allow(unused, clippy::redundant_allocation)]

use std::pin::Pin;
use std::sync::Arc;
use uverbs::{CompletionQueue, ProtectionDomain, QpBuilder, QpType};

fn make(pd: &ProtectionDomain, cq: &Pin<Box<CompletionQueue>>) -> QpBuilder {
    pd.qp_builder(cq, cq, QpType::RC)
}

fn main() {
    let _ = make;
}
