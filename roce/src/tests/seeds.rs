//! Many seeds for each transport. Each draws attributes, requests, and the faults of the network.

use super::plan;
use crate::opcodes::Transport;

/// Seeds of each transport. `UVERBS_ROCE_SEEDS` plays another number of them.
pub(super) const SEEDS: u64 = 1_000;

fn all(transport: Transport) {
    let asked = std::env::var("UVERBS_ROCE_SEEDS").ok();
    let seeds = asked.map_or(SEEDS, |count| count.parse().expect("a number of seeds"));
    let (mut whole, mut received, mut sent) = (0, 0, 0);
    let (mut refusals, mut refused) = (0, 0);
    for seed in 0..seeds {
        let run = plan::run(transport, seed).unwrap_or_else(|why| panic!("{why}"));
        whole += u64::from(run.is_whole());
        let (planned, met) = run.refusal();
        refusals += u64::from(planned);
        refused += u64::from(met);
        received += run.received();
        sent += run.sent();
    }
    // Where a tenth of the seeds has few retries, some fail. If most did, this would test little.
    let all = seeds - refusals;
    assert!(whole * 10 >= all * 8, "{whole} of {all} seeds complete all requests");
    assert!(refused * 2 >= refusals, "{refused} of {refusals} requests are refused");
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
