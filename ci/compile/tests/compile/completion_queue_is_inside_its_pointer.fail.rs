//! The library follows only pointers that are known to lead to a completion queue; the program follows others.
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
