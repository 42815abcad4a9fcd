//! `uverbs share`: one process registers memory and serves its context over a Unix socket. Others import both and
//! access the memory by RDMA, which is their only access to it.
//!
//! [`serve`] owns the memory, [`user`] imports it, [`handover`] is the message over the socket, [`slots`] is the layout
//! of the memory, [`path`] is the importer's path to it, [`socket`] is the exporter's listener.

mod handover;
mod path;
mod serve;
mod slots;
mod socket;
mod user;

use crate::args::ShareArgs;
use crate::failure::Result;

pub(crate) fn run(args: &ShareArgs) -> Result<()> {
    match args {
        ShareArgs::Serve { .. } => serve::run(args),
        ShareArgs::Use { .. } => user::run(args),
    }
}
