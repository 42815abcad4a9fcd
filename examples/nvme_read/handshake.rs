//! The private data of connection management: the host's request for a queue, and the target's answer.
//!
//! From NVM Express RDMA Transport 1.0, "Connection Establishment".

use crate::Result;
use uverbs::cm::{ConnectError, RejectReason, Rejection};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The only record format.
const FORMAT: U16 = U16::ZERO;

/// Private data of the connect request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Request {
    format: U16,
    qid: U16,
    host_receive_entries: U16,
    /// Counts from 0.
    host_send_entries: U16,
    /// 0 for an admin queue.
    controller: U16,
    reserved: [u8; 22],
}

/// Private data of the accept.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Accept {
    format: U16,
    controller_receive_entries: U16,
    reserved: [u8; 28],
}

/// Private data of a rejection.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Reject {
    format: U16,
    status: U16,
}

const _: () = assert!(size_of::<Request>() == 32);
const _: () = assert!(size_of::<Accept>() == 32);
const _: () = assert!(size_of::<Reject>() == 4);

impl Request {
    /// Asks for a queue with `entries` entries, of controller `controller`.
    pub(crate) fn new(qid: u16, entries: u16, controller: u16) -> Request {
        Request {
            format: FORMAT,
            qid: qid.into(),
            host_receive_entries: entries.into(),
            host_send_entries: entries.saturating_sub(1).into(),
            controller: controller.into(),
            reserved: [0; 22],
        }
    }
}

/// Checks that the target posted a receive for each of `commands`.
pub(crate) fn check_accept(private_data: &[u8], commands: usize) -> Result<()> {
    let Ok((accept, _)) = Accept::read_from_prefix(private_data) else {
        return Err(format!("the target's accept has {} bytes", private_data.len()).into());
    };
    if accept.format != FORMAT {
        return Err(format!("the target answers in format {}, not in 0", accept.format).into());
    }
    let room = usize::from(accept.controller_receive_entries.get());
    if room < commands {
        return Err(format!(
            "the target takes {room} commands at once, and {commands} were asked for: ask for \
             fewer with --depth"
        )
        .into());
    }
    Ok(())
}

/// The error of a connect, with the target's reason if there is one.
pub(crate) fn explain(error: &ConnectError, to: &str) -> String {
    match error.rejection() {
        Some(rejection) => format!("{to}: {}", refusal(rejection)),
        None => format!("{to}: {error}"),
    }
}

fn refusal(rejection: &Rejection) -> String {
    if rejection.reason() == Some(RejectReason::INVALID_SERVICE_ID) {
        return "nobody listens on the port: is the target's port enabled, on this address, with transport \
                rdma?"
            .into();
    }
    if rejection.reason() != Some(RejectReason::CONSUMER_DEFINED) {
        return format!("the connection was rejected: {rejection}");
    }
    match Reject::read_from_prefix(rejection.private_data()) {
        Ok((reject, _)) => format!("the target refused: {}", reason(reject.status.get())),
        Err(_) => "the target refused without a reason".into(),
    }
}

fn reason(status: u16) -> String {
    let name = match status {
        1 => "invalid length of private data",
        2 => "invalid record format",
        3 => "invalid queue id",
        4 => "invalid size of the host's send queue",
        5 => "invalid size of the host's receive queue",
        6 => "it has not the resources for another queue of this size",
        7 => "invalid number of reads that the host answers (IRD)",
        8 => "invalid number of reads that the host sends (ORD)",
        _ => return format!("status {status:#x}"),
    };
    format!("{name} (status {status:#x})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_has_the_queue_and_its_size() {
        let request = Request::new(0x0102, 33, 0x0304);
        let mut expected = [0; 32];
        expected[..10].copy_from_slice(&[0, 0, 2, 1, 33, 0, 32, 0, 4, 3]);
        assert_eq!(request.as_bytes(), expected);
    }

    #[test]
    fn accept_must_have_room_for_the_commands() {
        let mut accept = [0; 196];
        accept[2] = 16;
        check_accept(&accept, 16).unwrap();
        let error = check_accept(&accept, 17).unwrap_err().to_string();
        assert!(error.contains("takes 16 commands") && error.contains("--depth"), "{error}");
        accept[0] = 1;
        assert!(check_accept(&accept, 1).unwrap_err().to_string().contains("format 1"));
        assert!(check_accept(&accept[..31], 1).unwrap_err().to_string().contains("31 bytes"));
    }

    #[test]
    fn reasons_have_names_and_numbers() {
        assert_eq!(reason(3), "invalid queue id (status 0x3)");
        assert_eq!(reason(0x77), "status 0x77");
    }
}
