//! The real connection manager: `write(2)` on `/dev/infiniband/rdma_cm`.
//!
//! Pairs with `ucma_write` in `core/ucma.c`. Only this file turns a slice of a command into the address that the kernel
//! reads or writes.

use super::ucma::{CommandMemory, UcmaCommand, UcmaFile};
use crate::platform::Platform;
use crate::uverbs::open_file::OpenFile;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use uverbs_uapi::rdma_user_cm::{rdma_ucm_cmd_hdr, rdma_ucm_write_cm_event};
use zerocopy::IntoBytes;

const HEADER: usize = size_of::<rdma_ucm_cmd_hdr>();
/// The length of the longest command.
const LONGEST: usize = HEADER + size_of::<rdma_ucm_write_cm_event>();

#[derive(Debug)]
pub(crate) struct RdmaCmFd(OpenFile);

impl RdmaCmFd {
    pub(crate) fn new(file: impl Into<OpenFile>) -> Self {
        RdmaCmFd(file.into())
    }
}

impl UcmaFile for RdmaCmFd {
    fn execute(&self, mut command: UcmaCommand<'_>) -> Result<(), Errno> {
        let mut message = [0; LONGEST];
        let length = encode(&mut command, &mut message)?;
        let message = message.get(..length).ok_or(Errno::TOOBIG)?;
        loop {
            // The kernel writes only to the slice that the command borrows exclusively.
            match self.0.write(message) {
                Ok(written) if written == length => return Ok(()),
                Ok(_) => return Err(Errno::PROTO),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn platform(&self) -> Platform {
        self.0.platform()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Writes the header and the struct, with the address of the buffer, and returns their length.
fn encode(command: &mut UcmaCommand<'_>, message: &mut [u8; LONGEST]) -> Result<usize, Errno> {
    let (address, out) = match &mut command.buffer {
        CommandMemory::None => (None, 0),
        CommandMemory::In(bytes) => (Some(bytes.as_ptr().expose_provenance()), 0),
        CommandMemory::Out(bytes) => (Some(bytes.as_mut_ptr().expose_provenance()), bytes.len()),
    };
    let header = rdma_ucm_cmd_hdr {
        cmd: command.number,
        r#in: u16::try_from(command.request.len()).map_err(|_| Errno::TOOBIG)?,
        out: u16::try_from(out).map_err(|_| Errno::TOOBIG)?,
    };
    let (head, body) = message.split_at_mut(HEADER);
    head.copy_from_slice(header.as_bytes());
    body.get_mut(..command.request.len()).ok_or(Errno::TOOBIG)?.copy_from_slice(command.request);
    if let Some(address) = address {
        let field = body.get_mut(command.address_at..command.address_at + size_of::<u64>());
        field.ok_or(Errno::TOOBIG)?.copy_from_slice(&(address as u64).to_ne_bytes());
    }
    Ok(HEADER + command.request.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_uapi::rdma_user_cm::{
        rdma_ucm_create_id, rdma_ucm_create_id_resp, rdma_ucm_listen, rdma_ucm_set_option,
    };
    use zerocopy::FromBytes;

    fn encoded(mut command: UcmaCommand<'_>) -> Vec<u8> {
        let mut message = [0; LONGEST];
        let length = encode(&mut command, &mut message).unwrap();
        message[..length].to_vec()
    }

    #[test]
    fn command_without_an_answer_is_a_header_and_its_struct() {
        let listen = rdma_ucm_listen { id: 7, backlog: 9 };
        let words: Vec<_> = encoded(UcmaCommand::new(7, &listen))
            .chunks_exact(4)
            .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
            .collect();
        let lengths = u32::from_ne_bytes([8u16.to_ne_bytes(), [0; 2]].concat().try_into().unwrap());
        assert_eq!(words, [7, lengths, 7, 9]);
    }

    #[test]
    fn answer_is_written_to_the_borrowed_memory() {
        let request = rdma_ucm_create_id { uid: 5, ps: 0x106, ..Default::default() };
        let mut answer = rdma_ucm_create_id_resp::default();
        let place = std::ptr::from_ref(&answer).addr() as u64;
        let message = encoded(UcmaCommand::create_id(&request, &mut answer));
        let header = rdma_ucm_cmd_hdr::read_from_bytes(&message[..HEADER]).unwrap();
        assert_eq!((header.r#in, header.out), (24, 4));
        let sent = rdma_ucm_create_id::read_from_bytes(&message[HEADER..]).unwrap();
        assert_eq!((sent.uid, sent.response, sent.ps), (5, place, 0x106));
    }

    #[test]
    fn option_is_read_from_the_borrowed_memory() {
        let value = [3u8];
        let request = rdma_ucm_set_option { id: 1, optlen: 1, ..Default::default() };
        let message = encoded(UcmaCommand::set_option(&request, &value));
        let sent = rdma_ucm_set_option::read_from_bytes(&message[HEADER..]).unwrap();
        assert_eq!((sent.optval, sent.optlen), (value.as_ptr().addr() as u64, 1));
    }

    #[test]
    fn error_of_the_write_is_the_error_of_the_command() {
        let (read_only, _) = rustix::pipe::pipe().unwrap();
        let listen = rdma_ucm_listen::default();
        let errno = RdmaCmFd::new(read_only).execute(UcmaCommand::new(7, &listen));
        // Miri does not tell the ends of a pipe apart; the other end is closed.
        assert_eq!(errno, Err(if cfg!(miri) { Errno::PIPE } else { Errno::BADF }));
    }
}
