//! An address handle outlives the request that names it.
#![allow(unused)]

use uverbs::{AddressHandle, Destination, PostError, Qkey, Qpn, SendBatch, SendWr};

fn send(
    batch: &mut SendBatch<'_>,
    ah: AddressHandle,
    other: AddressHandle,
) -> Result<(), PostError> {
    let to = Destination::new(&ah, Qpn(1), Qkey(2));
    drop(other);
    batch.push(SendWr::send(&[]).to(to))
}

fn main() {
    let _ = send;
}
