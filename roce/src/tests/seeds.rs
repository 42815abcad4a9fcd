//! Many seeds for each transport. Each draws attributes, requests, and the faults of the network.

use super::plan;
use crate::opcodes::Transport;

/// Seeds of each transport. `UVERBS_ROCE_SEEDS` plays another number of them.
pub(super) const SEEDS: u64 = 1_000;

fn all(transport: Transport) {
    let asked = std::env::var("UVERBS_ROCE_SEEDS").ok();
    let seeds = asked.map_or(SEEDS, |count| count.parse().expect("a number of seeds"));
    let (mut whole, mut received, mut sent) = (0, 0, 0);
    for seed in 0..seeds {
        let run = plan::run(transport, seed).unwrap_or_else(|why| panic!("{why}"));
        whole += u64::from(run.is_whole());
        received += run.received();
        sent += run.sent();
    }
    // Where a tenth of the seeds has few retries, some fail. If most did, this would test little.
    assert!(whole * 10 >= seeds * 8, "{whole} of {seeds} seeds complete all requests");
    assert!(received * 2 > sent, "{received} of {sent} messages are received");
}

#[test]
fn rc_completes_each_request_once_and_in_order_or_fails_as_negotiated() {
    all(Transport::Rc);
}

#[test]
fn xrc_completes_each_request_once_and_in_order_or_fails_as_negotiated() {
    all(Transport::Xrc);
}

#[test]
fn a_message_of_uc_comes_whole_or_not_at_all_and_never_twice() {
    all(Transport::Uc);
}

#[test]
fn a_datagram_is_lost_or_doubled_and_never_altered() {
    all(Transport::Ud);
}
