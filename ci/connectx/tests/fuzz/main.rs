//! Whatever a guest writes, the device and the decoders take it.
//!
//! Inputs come from a seed, so a run can be had again. Each target keeps those that showed something
//! new in `tests/corpus`, and begins with them. In the environment `CONNECTX_FUZZ_SECONDS` lets it
//! run longer, `CONNECTX_FUZZ_SEED` begins elsewhere, and `CONNECTX_FUZZ_KEEP` adds what is new to
//! the corpus.

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
fn any_chain_of_mailboxes_ends() {
    corpus::explore("mailbox", decoders::mailbox, 0.5);
}

#[test]
fn any_work_request_is_read_or_refused() {
    corpus::explore("request", decoders::request, 0.5);
}

#[test]
fn any_recording_is_printed_or_refused() {
    corpus::explore("recording", decoders::recording, 0.5);
}
