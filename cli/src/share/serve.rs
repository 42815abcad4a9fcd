//! The exporter: registers memory for each client that connects, and gives the client all that it
//! needs to reach it.

use super::handover::{Handover, PATIENCE, limit};
use super::slots::{GREETING, MESSAGE, SIZE, read, write};
use super::socket::Listening;
use crate::args::ShareArgs;
use crate::failure::{Failure, Result};
use crate::open;
use crate::output;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use uverbs::{Access, Context, ProtectionDomain};

pub(crate) fn run(args: &ShareArgs) -> Result<()> {
    let ShareArgs::Serve { socket, device, clients, text } = args else {
        return Err(Failure::usage("not a server's arguments"));
    };
    let greeting = write(text)?;
    let listening = Listening::at(socket).map_err(|error| failed(socket, &error))?;
    let context = open::open(device.as_deref())?;
    let device = context.device();
    let pd = context.alloc_pd()?;
    let say = |line: String| say(&listening, &line);
    say(format!("serving {SIZE} bytes of {device} to each client at {}", socket.display()));
    thread::scope(|threads| {
        let mut served = 0;
        while clients.is_none_or(|most| served < most) {
            let (client, _) =
                listening.listener.accept().map_err(|error| failed(socket, &error))?;
            served += 1;
            let (context, pd, greeting, say) = (&context, &pd, &greeting, &say);
            // A client that fails, or is silent, does not affect the others.
            threads.spawn(move || match serve(context, pd, greeting, &client) {
                Ok(message) => say(format!("client {served} wrote: {message}")),
                Err(failure) => say(format!("client {served}: {failure}")),
            });
        }
        Ok(())
    })
}

/// Shares memory with a client and waits until it has done its work there.
fn serve(
    context: &Context,
    pd: &ProtectionDomain,
    greeting: &[u8],
    mut client: &UnixStream,
) -> Result<String> {
    limit(client)?;
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let mut region = pd.mr_builder().access(rights).allocate::<u8>(SIZE)?;
    let out_of_range = |error: uverbs::MemoryError| Failure::run(error.to_string());
    region.copy_from(GREETING.start, greeting).map_err(out_of_range)?;
    let handover = Handover {
        file: context.share()?,
        context: context.export(),
        pd: pd.export()?,
        region: region.export()?,
    };
    handover.send(client)?;
    let mut done = [0];
    client.read_exact(&mut done).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Failure::peer(format!("it was not done after {PATIENCE:?}"))
        }
        _ => Failure::peer("it left before it was done"),
    })?;
    let mut bytes = vec![0; MESSAGE.len()];
    region.copy_to(MESSAGE.start, &mut bytes).map_err(out_of_range)?;
    read(&bytes)
}

/// Prints a line. If that fails the program ends, so that the socket is removed first.
fn say(socket: &Listening, line: &str) {
    if let Err(error) = output::write(format!("{line}\n").as_bytes()) {
        socket.remove();
        output::fail(&error);
    }
}

fn failed(socket: &Path, error: &io::Error) -> Failure {
    Failure::peer(format!("cannot listen at {}: {error}", socket.display()))
}
