//! The importer: reads a greeting from memory of another process and leaves a message there.

use super::handover::{Handover, limit};
use super::path::Path;
use super::slots::{GREETING, MESSAGE, read, write};
use crate::args::ShareArgs;
use crate::failure::{Failure, Result};
use crate::output::outln;
use std::io::Write;
use std::os::unix::net::UnixStream;
use uverbs::{Context, SendWr};

pub(crate) fn run(args: &ShareArgs) -> Result<()> {
    let ShareArgs::Use { socket, ib_port, gid_index, text } = args else {
        return Err(Failure::usage("not a client's arguments"));
    };
    let message = write(text)?;
    let mut server = UnixStream::connect(socket).map_err(|error| {
        Failure::peer(format!("cannot connect to {}: {error}", socket.display()))
            .advice("start `uverbs share serve` with that path first")
    })?;
    limit(&server)?;
    let handover = Handover::receive(&server)?;
    let context = Context::import_exported(handover.file, &handover.context)?;
    let pd = context.import_pd(&handover.pd)?;
    let region = pd.import_mr(&handover.region)?;
    outln!(
        "imported {} bytes of {} with rkey {}",
        region.byte_len(),
        context.device(),
        region.rkey()
    );
    let out_of_range = |error: uverbs::MemoryError| Failure::peer(error.to_string());
    let mut own = pd.mr_builder().allocate::<u8>(GREETING.len())?;
    let mut path = Path::new(&context, &pd, *ib_port, *gid_index)?;

    let sges = [own.sge(..).map_err(out_of_range)?];
    let greeting = region.remote(GREETING.start).map_err(out_of_range)?;
    path.request(SendWr::read(greeting, &sges))?;
    let mut bytes = vec![0; GREETING.len()];
    own.copy_to(0, &mut bytes).map_err(out_of_range)?;
    outln!("the exporter says: {}", read(&bytes)?);

    own.copy_from(0, &message).map_err(out_of_range)?;
    let sges = [own.sge(..message.len()).map_err(out_of_range)?];
    let room = region.remote(MESSAGE.start).map_err(out_of_range)?;
    path.request(SendWr::write(room, &sges))?;
    server.write_all(b"d").map_err(|error| Failure::peer(format!("the exporter left: {error}")))?;

    // Imported objects stay with the exporter; those that this process made go.
    drop((path, own));
    region.unimport()?;
    pd.unimport()?;
    Ok(())
}
