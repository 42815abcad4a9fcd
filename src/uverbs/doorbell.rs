//! Doorbells that are commands to the kernel, as rxe's are: one per batch of sends, and one per armed
//! completion queue.
//!
//! Pairs with `ib_uverbs_post_send` and `ib_uverbs_req_notify_cq` in `core/uverbs_cmd.c` and with
//! `ib_uverbs_write` in `core/uverbs_main.c`. All other commands are ioctls. These go by
//! `write(2)`, which has no attributes to parse and takes two thirds of an ioctl's time. [`fd`](super::fd)
//! writes them, and uses the ioctl where the kernel refuses a `write(2)`.

use super::command::Command;
use super::invoke_write::write;
use rustix::io::Errno;
use uverbs_uapi::cq::ib_uverbs_req_notify_cq;
use uverbs_uapi::wr::{ib_uverbs_post_send, ib_uverbs_post_send_resp, ib_uverbs_send_wr};
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_POST_SEND, IB_USER_VERBS_CMD_REQ_NOTIFY_CQ, ib_uverbs_cmd_hdr,
};
use zerocopy::{Immutable, IntoBytes};

/// A doorbell of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doorbell {
    /// Makes the kernel read the send queue of a queue pair: a POST_SEND command without requests.
    Send { qp_handle: u32 },
    /// Arms a completion queue for the next completion, or the next solicited one.
    Notify { cq_handle: u32, solicited: bool },
}

/// The kernel's response to either doorbell.
pub(super) type Response = ib_uverbs_post_send_resp;

/// [`Doorbell::Send`] as `write(2)` takes it.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct WrittenSend {
    header: ib_uverbs_cmd_hdr,
    request: ib_uverbs_post_send,
}

/// [`Doorbell::Notify`] as `write(2)` takes it.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct WrittenNotify {
    header: ib_uverbs_cmd_hdr,
    request: ib_uverbs_req_notify_cq,
}

impl Doorbell {
    /// Rings through `execute`, which runs a command.
    pub(super) fn by_ioctl(
        self,
        execute: impl FnOnce(&mut Command<'_>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        match self {
            Doorbell::Send { qp_handle } => {
                let mut resp = Response::default();
                let request = empty_post_send(qp_handle);
                execute(write(IB_USER_VERBS_CMD_POST_SEND, &request).response(&mut resp))
            }
            Doorbell::Notify { cq_handle, solicited } => execute(&mut write(
                IB_USER_VERBS_CMD_REQ_NOTIFY_CQ,
                &req_notify(cq_handle, solicited),
            )),
        }
    }

    /// Rings through `write`, which passes bytes to the kernel; a [`Response`] goes to the address
    /// `response`.
    pub(super) fn by_write<R>(self, response: u64, write: impl FnOnce(&[u8]) -> R) -> R {
        match self {
            Doorbell::Send { qp_handle } => {
                const ANSWER: usize = size_of::<Response>();
                let header = header::<WrittenSend>(IB_USER_VERBS_CMD_POST_SEND, ANSWER);
                let request = ib_uverbs_post_send { response, ..empty_post_send(qp_handle) };
                write(WrittenSend { header, request }.as_bytes())
            }
            Doorbell::Notify { cq_handle, solicited } => {
                let header = header::<WrittenNotify>(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ, 0);
                let request = req_notify(cq_handle, solicited);
                write(WrittenNotify { header, request }.as_bytes())
            }
        }
    }
}

/// A POST_SEND without requests; the kernel still checks `wqe_size`.
fn empty_post_send(qp_handle: u32) -> ib_uverbs_post_send {
    ib_uverbs_post_send {
        qp_handle,
        wqe_size: size_of::<ib_uverbs_send_wr>() as u32,
        ..Default::default()
    }
}

fn req_notify(cq_handle: u32, solicited: bool) -> ib_uverbs_req_notify_cq {
    ib_uverbs_req_notify_cq { cq_handle, solicited_only: solicited.into() }
}

/// Lengths are in words of 4 bytes; the input's includes the header.
fn header<T>(command: u32, response: usize) -> ib_uverbs_cmd_hdr {
    const WORD: usize = 4;
    ib_uverbs_cmd_hdr {
        command,
        in_words: (size_of::<T>() / WORD) as u16,
        out_words: (response / WORD) as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(doorbell: Doorbell, response: u64) -> Vec<u32> {
        doorbell.by_write(response, |bytes| {
            bytes
                .chunks_exact(4)
                .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
                .collect()
        })
    }

    /// Two sixteen-bit numbers as one word.
    fn pair(first: u8, second: u8) -> u32 {
        let ([a, b], [c, d]) = (u16::from(first).to_ne_bytes(), u16::from(second).to_ne_bytes());
        u32::from_ne_bytes([a, b, c, d])
    }

    #[test]
    fn written_commands_count_their_words() {
        let send = words(Doorbell::Send { qp_handle: 7 }, 0x1122_3344_1122_3344);
        assert_eq!(send, [28, pair(8, 1), 0x1122_3344, 0x1122_3344, 7, 0, 0, 56]);
        let notify = Doorbell::Notify { cq_handle: 9, solicited: true };
        assert_eq!(words(notify, u64::MAX), [23, pair(4, 0), 9, 1]);
    }
}
