#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod cm;
pub mod datagram;
mod endpoint;
pub mod frame;
pub mod headers;
mod host;
mod icrc;
mod mistake;
pub mod opcodes;
mod psn;
mod queue_pair;
mod request;
mod requester;
mod responder;
pub mod timers;
mod window;

#[cfg(test)]
mod tests;

pub use endpoint::{Dropped, Endpoint, MAX_UNIT, Progress};
pub use host::{Atomic, Counter, Event, Host, Received, Refusal, Right, Source, Target};
pub use psn::Psn;
pub use queue_pair::{Attributes, MAX_MESSAGE, Mtu, State};
pub use request::{Datagram, Request, Work};
pub use requester::NotPosted;
