//! `uverbs share`: one process registers memory and serves its context over a Unix socket; others
//! import both and work on the memory by RDMA, which is the only way they have to it.
//!
//! [`serve`] has the memory, [`user`] imports it, [`handover`] is what goes over the socket, [`slots`]
//! says where in the memory what lies, [`path`] is how the importer gets there, [`socket`] where the exporter listens.

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
