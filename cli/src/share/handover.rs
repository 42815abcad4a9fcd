//! The message that goes over the socket: the context's file, and the envelopes of the context, of a protection
//! domain and of the memory.

use crate::failure::{Failure, Result};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use uverbs::{Envelope, Errno, passing};

/// The longest silence of the other side, which has a few requests to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) file: OwnedFd,
    pub(crate) context: Envelope,
    pub(crate) pd: Envelope,
    pub(crate) region: Envelope,
}

fn lost(what: &str) -> Failure {
    Failure::peer(format!("the other side {what}"))
}

fn broken(error: &uverbs::Error) -> Failure {
    match error.errno() {
        Errno::AGAIN => lost(&format!("did nothing for {PATIENCE:?}")),
        _ => Failure::peer(error.to_string()),
    }
}

/// Limits each wait for the other side.
pub(crate) fn limit(socket: &UnixStream) -> Result<()> {
    let set = socket.set_read_timeout(Some(PATIENCE));
    set.and_then(|()| socket.set_write_timeout(Some(PATIENCE)))
        .map_err(|error| Failure::peer(format!("the socket failed: {error}")))
}

impl Handover {
    pub(crate) fn send(&self, to: &UnixStream) -> Result<()> {
        let bytes =
            [self.context, self.pd, self.region].map(|envelope| envelope.to_bytes()).concat();
        match passing::send_files(to, &bytes, &[self.file.as_fd()]) {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) => Err(lost("took half of a message")),
            Err(error) => Err(broken(&error)),
        }
    }

    pub(crate) fn receive(mut from: &UnixStream) -> Result<Handover> {
        let mut bytes = [0; 3 * Envelope::SIZE];
        let received = passing::receive_files(from, &mut bytes).map_err(|error| broken(&error))?;
        let (got, files) = (received.length, received.files.into_iter().next());
        let file = files.ok_or_else(|| lost("sent no file: it does not share a context"))?;
        from.read_exact(&mut bytes[got..]).map_err(|_| lost("left in the middle of a message"))?;
        let (context, rest) = bytes.split_at(Envelope::SIZE);
        let (pd, region) = rest.split_at(Envelope::SIZE);
        let open =
            |bytes| Envelope::from_bytes(bytes).map_err(|error| Failure::peer(error.to_string()));
        Ok(Handover { file, context: open(context)?, pd: open(pd)?, region: open(region)? })
    }
}
