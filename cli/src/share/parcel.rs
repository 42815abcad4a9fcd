//! What is handed over: the context's file, and the envelopes of the context, of a protection domain
//! and of the memory.

use crate::failure::{Failure, Result};
use rustix::io::{Errno, IoSlice};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use uverbs::Envelope;

/// How long the other side may be silent. It has a few requests to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Room for one file.
const ROOM: usize = rustix::cmsg_space!(ScmRights(1));

#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) file: OwnedFd,
    pub(crate) context: Envelope,
    pub(crate) pd: Envelope,
    pub(crate) region: Envelope,
}

fn lost(what: &str) -> Failure {
    Failure::peer(format!("the other side {what}"))
}

fn broken(errno: Errno) -> Failure {
    match errno {
        Errno::AGAIN => lost(&format!("did nothing for {PATIENCE:?}")),
        _ => Failure::peer(format!("the socket failed: {errno}")),
    }
}

/// Lets nobody wait for the other side for ever.
pub(crate) fn limit(socket: &UnixStream) -> Result<()> {
    let set = socket.set_read_timeout(Some(PATIENCE));
    set.and_then(|()| socket.set_write_timeout(Some(PATIENCE)))
        .map_err(|error| Failure::peer(format!("the socket failed: {error}")))
}

impl Parcel {
    pub(crate) fn send(&self, to: &UnixStream) -> Result<()> {
        let bytes =
            [self.context, self.pd, self.region].map(|envelope| envelope.to_bytes()).concat();
        let mut room = [MaybeUninit::uninit(); ROOM];
        let mut ancillary = SendAncillaryBuffer::new(&mut room);
        let files = [self.file.as_fd()];
        if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(lost("takes no files"));
        }
        let slices = [IoSlice::new(&bytes)];
        match sendmsg(to, &slices, &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) => Err(lost("took half of a message")),
            Err(errno) => Err(broken(errno)),
        }
    }

    pub(crate) fn receive(mut from: &UnixStream) -> Result<Parcel> {
        let mut bytes = [0; 3 * Envelope::SIZE];
        let mut room = [MaybeUninit::uninit(); ROOM];
        let mut ancillary = RecvAncillaryBuffer::new(&mut room);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(from, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let got = got.map_err(broken)?.bytes;
        let files = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let file = files.ok_or_else(|| lost("sent no file: it does not share a context"))?;
        from.read_exact(&mut bytes[got..]).map_err(|_| lost("left in the middle of a message"))?;
        let (context, rest) = bytes.split_at(Envelope::SIZE);
        let (pd, region) = rest.split_at(Envelope::SIZE);
        let open =
            |bytes| Envelope::from_bytes(bytes).map_err(|error| Failure::peer(error.to_string()));
        Ok(Parcel { file, context: open(context)?, pd: open(pd)?, region: open(region)? })
    }
}
