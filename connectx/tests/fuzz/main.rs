//! The device and the decoders accept any bytes that a guest writes.
//!
//! Inputs come from a seed, so a run can be repeated. Each target begins with the inputs in
//! `tests/corpus`. `CONNECTX_FUZZ_SECONDS` sets a longer time, `CONNECTX_FUZZ_SEED` another seed,
//! and `CONNECTX_FUZZ_KEEP` adds inputs with new traits to the corpus.

mod corpus;
mod decoders;
#[path = "../driver/mod.rs"]
mod driver;
mod guest;

#[test]
fn a_hostile_guest_neither_crashes_nor_hangs_the_device() {
    corpus::explore("guest", guest::run, 2.0);
}

#[test]
fn any_mailbox_chain_ends() {
    corpus::explore("mailbox", decoders::mailbox, 0.5);
}

#[test]
fn any_wqe_is_parsed_or_refused() {
    corpus::explore("request", decoders::request, 0.5);
}
