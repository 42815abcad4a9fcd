//! Two tables of connections, with a network between them that loses, doubles and reorders MADs, in virtual time.
//!
//! | file | subject |
//! |---|---|
//! | `plan` | programs that connect, answer, end and die at random: all they ask for ends |
//! | `rules` | one rule at a time: duplicates, unknown numbers, limits |
//! | `strangers` | requests that do not fit their sender, floods, noise |

mod plan;
mod rules;
mod strangers;

use super::connections::Connections;
use super::message::{Gid, Message, Service, Side};
use super::wire;
use uverbs_roce::cm::{MAD, decode, encode};

pub(super) const A: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
pub(super) const B: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2];
pub(super) const SERVICE: Service = Service { space: 0x106, port: 7, source_port: 9 };

/// A message as it travels.
pub(super) fn bytes(message: &Message) -> [u8; MAD] {
    encode(message.transaction, &wire::encode(message, 0x1122_3344_5566_7788, 0xffff))
}

/// A message as the receiver gets it. A request has to name the addresses that it travels between.
pub(super) fn message(bytes: &[u8; MAD], (from, to): (Gid, Gid)) -> Message {
    let (transaction, mad) = decode(bytes).expect("a message that was encoded");
    let (local, remote, body, fits) = wire::decode(&mad, (from, to));
    assert!(fits, "{body:?}");
    Message { from, to, local, remote, transaction, body }
}

/// The same message, encoded and decoded.
pub(super) fn travel(sent: &Message) -> Message {
    message(&bytes(sent), (sent.from, sent.to))
}

pub(super) fn side(qpn: u32, private_data: &[u8]) -> Side {
    Side { qpn, private_data: private_data.to_vec(), retry_count: 7, ..Side::default() }
}

/// A table whose numbers begin behind this one.
pub(super) fn new_table(last: u32) -> Connections {
    let mut table = Connections::default();
    table.last = last;
    table
}
