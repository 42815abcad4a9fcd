//! rxe's doorbell: a post command without requests, which makes the kernel look at a send queue.
//!
//! Pairs with `ib_uverbs_post_send` in `core/uverbs_cmd.c` and with `ib_uverbs_write` in
//! `core/uverbs_main.c`. It is the one command of a data path, so it is the one command that goes
//! by `write(2)`: the kernel spares itself the attributes, and answers in two thirds of the time
//! that the ioctl takes. [`fd`](super::fd) does that, and comes back to the ioctl where the kernel
//! refuses to be written to.

use super::command::Command;
use super::invoke_write::write;
use rustix::io::Errno;
use uverbs_uapi::wr::{ib_uverbs_post_send, ib_uverbs_post_send_resp, ib_uverbs_send_wr};
use uverbs_uapi::write::{IB_USER_VERBS_CMD_POST_SEND, ib_uverbs_cmd_hdr};
use zerocopy::{Immutable, IntoBytes};

/// The command as `write(2)` takes it.
#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct WrittenKick {
    header: ib_uverbs_cmd_hdr,
    request: ib_uverbs_post_send,
}

impl WrittenKick {
    /// A kick whose answer, one [`ib_uverbs_post_send_resp`], goes to the address `response`.
    pub(super) fn new(qp_handle: u32, response: u64) -> WrittenKick {
        const WORD: usize = 4;
        WrittenKick {
            header: ib_uverbs_cmd_hdr {
                command: IB_USER_VERBS_CMD_POST_SEND,
                in_words: (size_of::<WrittenKick>() / WORD) as u16,
                out_words: (size_of::<ib_uverbs_post_send_resp>() / WORD) as u16,
            },
            request: ib_uverbs_post_send { response, ..nothing(qp_handle) },
        }
    }
}

/// Kicks through `execute`, which runs a command.
pub(super) fn by_ioctl(
    execute: impl FnOnce(&mut Command<'_>) -> Result<(), Errno>,
    qp_handle: u32,
) -> Result<(), Errno> {
    let mut resp = ib_uverbs_post_send_resp::default();
    let request = nothing(qp_handle);
    execute(&mut write(IB_USER_VERBS_CMD_POST_SEND, &request).answer(&mut resp))
}

/// A post without requests; the kernel checks the size of one all the same.
fn nothing(qp_handle: u32) -> ib_uverbs_post_send {
    ib_uverbs_post_send {
        qp_handle,
        wqe_size: size_of::<ib_uverbs_send_wr>() as u32,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_kick_counts_its_words() {
        let kick = WrittenKick::new(7, 0x1122_3344_1122_3344);
        let words: Vec<u32> = kick
            .as_bytes()
            .chunks_exact(4)
            .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let header = u32::from_ne_bytes([8, 0, 1, 0]);
        assert_eq!(words, [28, header, 0x1122_3344, 0x1122_3344, 7, 0, 0, 56]);
    }
}
