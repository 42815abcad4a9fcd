//! The objects of a kernel file, whichever process made them.

use crate::capability::Capability;
use crate::verdict::{Verdict, supported};
use uverbs::{Context, Errno, ObjectKind};

/// How many domains, regions, completion queues, queue pairs and shared receive queues there are.
pub(crate) fn census(context: &Context) -> Verdict<Vec<usize>> {
    let kinds = [ObjectKind::PD, ObjectKind::MR, ObjectKind::CQ, ObjectKind::QP, ObjectKind::SRQ];
    let count = |kind| context.handles(kind).map(|handles| handles.len());
    kinds.into_iter().map(|kind| supported(count(kind), Capability::InfoHandles)).collect()
}

/// The pages of doorbell registers; contexts keep theirs until they go. None where the doorbell is a
/// call of the kernel.
pub(crate) fn registers(context: &Context) -> Verdict<Vec<u32>> {
    match context.handles(ObjectKind::MLX5_UAR) {
        Err(error) if error.errno() == Errno::NOENT => Ok(Vec::new()),
        listed => supported(listed, Capability::InfoHandles),
    }
}
