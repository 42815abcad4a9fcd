//! A unit does what its packets do.

use super::device::{Device, KEY};
use super::network::{Network, QPNS, Random, attributes};
use crate::opcodes::Transport;
use crate::{Attributes, Event, Request, State, Work};
use std::collections::BTreeMap;
use std::format;

/// Bytes of the peer's memory that a request has for itself.
const STRIDE: usize = 40 * 256;

/// Plays requests of a seed, whose packets leave as units or not.
fn play(transport: Transport, seed: u64, units: bool) -> Network {
    let mut random = Random(seed);
    let attributes = [0, 1].map(|side| Attributes { retry_count: 7, ..attributes(side) });
    let mut network = Network::new(seed, transport, attributes, 16);
    let requests = 1 + random.below(5);
    for device in &mut network.devices {
        device.has_units = units;
        device.memory = (0..6 * STRIDE).map(|at| (at * 11 + (at >> 8) * 3) as u8).collect();
        (0..requests).for_each(|_| device.post_receive());
    }
    for _ in 0..random.below(3) {
        network.loses.insert((random.below(2) as usize, 100 + random.below(100) as u32));
    }
    for id in 0..requests {
        let short = random.happens(800);
        // Receives of 8192 bytes are too short for the longest ones.
        let length = random.below(if short { 8192 } else { STRIDE as u64 + 1 }) as u32 & !3;
        let (address, key) = (id * STRIDE as u64, KEY);
        let work = match random.below(3) {
            0 => Work::Send { immediate: None },
            1 => Work::Write { address, key, immediate: None },
            _ => Work::Read { address, key },
        };
        // Some requests have less memory than they need.
        let missing = if random.happens(50) { 1 + random.below(length.max(1).into()) } else { 0 };
        let local = (0..u64::from(length).saturating_sub(missing)).map(|at| (at * 7 + id) as u8);
        network.devices[0].local.insert(id, local.collect());
        let (solicited, fence, datagram) = (false, random.happens(100), None);
        let request = Request { id, work, length, fence, solicited, srq: 9, datagram };
        let _ = network.endpoints[0].post(QPNS[0], request);
    }
    network.run(0).unwrap();
    network.finish();
    network
}

/// Whether a side of two networks has seen the same.
fn is_same(side: usize, one: &Network, other: &Network) -> bool {
    fn seen(device: &Device) -> impl PartialEq + '_ {
        let Device { memory, local, received, failed_receives, receives, buffers, .. } = device;
        let Device { completions, events, counts, failed_buffers, .. } = device;
        let failed = (failed_receives, failed_buffers);
        (memory, local, received, failed, receives, buffers, completions, events, counts)
    }
    let ends = [one, other].map(|network| {
        let endpoint = &network.endpoints[side];
        let state = endpoint.state(QPNS[side]);
        (state, endpoint.psns(QPNS[side]).filter(|_| state == Some(State::Rts)))
    });
    ends[0] == ends[1] && seen(&one.devices[side]) == seen(&other.devices[side])
}

#[test]
fn a_unit_and_its_packets_have_the_same_effects() {
    for transport in [Transport::Rc, Transport::Xrc] {
        let (mut whole, mut refused, mut events) = (0, 0, BTreeMap::new());
        for seed in 0..500 {
            let (network, other) = (play(transport, seed, true), play(transport, seed, false));
            for side in 0..2 {
                assert!(is_same(side, &network, &other), "{transport:?}, seed {seed}, side {side}");
            }
            whole += network.whole_units;
            refused += network.refused_units;
            for event in network.devices.iter().flat_map(|device| &device.events) {
                *events.entry(format!("{event:?}")).or_insert(0) += 1;
            }
        }
        let failed = |event| events.get(&format!("{event:?}")).copied().unwrap_or(0);
        assert!(whole > 500 && refused > 50, "{whole} whole, {refused} refused");
        assert!(failed(Event::SendFailed) > 50 && failed(Event::ReceiveFailed) > 5, "{events:?}");
    }
}
