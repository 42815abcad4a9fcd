//! DEVX: commands that a program sends to firmware by itself, and objects that it makes by them.
//!
//! Pairs with `hw/mlx5/devx.c`. A command is the bytes that the device's manual describes; `uverbs_uapi::mlx5::prm` has
//! the layouts that this project uses, with the kernel's names, and `Bits` to read and write them. The kernel sets the
//! user context of each command, so that firmware keeps a program from the objects of others, and says in each creation
//! that queues lie in [umems](Umem).
//!
//! Completion queue and queue pair of DEVX alone:
//!
//! ```no_run
//! # fn f(context: &uverbs::Context) -> Result<(), Box<dyn std::error::Error>> {
//! use uverbs::mlx5::devx::{self, DevxObject, DevxRef, Umem};
//! use uverbs::mlx5::{Uar, UarKind};
//! use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in};
//! use uverbs_uapi::mlx5::prm::{Bits, Layout, command, opcode};
//!
//! let uar = Uar::alloc(context, UarKind::NonCached)?;
//! // 64 CQEs, and behind them the doorbell record.
//! let umem = Umem::builder(context).page_sizes(4096).allocate(2 * 4096)?;
//! let mut create = Bits::<create_cq_in, _>::new(command::<{ create_cq_in::SIZE }>(opcode::CREATE_CQ));
//! create.set(create_cq_in::cq_umem_id, umem.id().into());
//! let mut queue = create.sub_mut(create_cq_in::cq_context);
//! queue.set(cqc::log_cq_size, 6);
//! queue.set(cqc::uar_page, uar.page_id().into());
//! queue.set(cqc::c_eqn_or_apu_element, devx::query_eqn(context, 0)?.into());
//! queue.set(cqc::dbr_umem_id, umem.id().into());
//! queue.set(cqc::dbr_addr, 4096);
//! // SAFETY: the queue lies in the umem, which the object keeps, as it keeps the UAR.
//! let keeps: [&dyn DevxRef; 2] = [&umem, &uar];
//! let cq = unsafe { DevxObject::create(context, create.bytes(), &mut [0; 16], &keeps)? };
//! println!("completion queue {:#x}", cq.number());
//! # Ok(()) }
//! ```

mod command;
mod events;
mod object;
mod queries;
mod umem;

pub use command::{general_command, general_command_unchecked, query_eqn};
pub use events::{DevxEvent, DevxEventData, DevxEvents};
pub(super) use object::send_modify;
pub use object::{DevxObject, DevxRef, DevxTarget, modify, query};
pub(crate) use object::{Facts, kept};
pub use queries::{DevxAnswer, DevxQueries};
pub use umem::{Umem, UmemBuilder};

pub use crate::sharing::devx::{ImportedDevxObject, ImportedUmem};
