//! The objects of an open file of the kernel, of all processes.

use crate::capability::Capability;
use crate::verdict::{Verdict, supported};
use uverbs::{Context, Errno, ObjectKind};

/// The numbers of protection domains, regions, completion queues, queue pairs and shared receive queues.
pub(crate) fn census(context: &Context) -> Verdict<Vec<usize>> {
    let kinds = [ObjectKind::PD, ObjectKind::MR, ObjectKind::CQ, ObjectKind::QP, ObjectKind::SRQ];
    let count = |kind| context.handles(kind).map(|handles| handles.len());
    kinds.into_iter().map(|kind| supported(count(kind), Capability::InfoHandles)).collect()
}

/// The pages of doorbell registers, which a context keeps until it goes. There are none where the doorbell is a system
/// call.
pub(crate) fn registers(context: &Context) -> Verdict<Vec<u32>> {
    match context.handles(ObjectKind::MLX5_UAR) {
        Err(error) if error.errno() == Errno::NOENT => Ok(Vec::new()),
        listed => supported(listed, Capability::InfoHandles),
    }
}
