//! The readers of recordings accept any bytes.
//!
//! [`corpus`] describes the source of inputs.

#[path = "../../../../connectx/tests/fuzz/corpus.rs"]
mod corpus;

use connectx_vfio::{decode, golden};
use corpus::Traits;
use uverbs_connectx::format::segments::{self, receive_segments};
use uverbs_connectx::format::wqe::CtrlSegment;
use uverbs_connectx::recording::{MAGIC, VERSION};

/// The corpus of WQEs of the tests of the device's own parsers.
const WQES: &str = "../../../../connectx/tests/corpus/request";

#[test]
fn any_recording_is_printed_or_refused() {
    corpus::explore("recording", recording, 0.5);
}

#[test]
fn any_wqe_is_split_into_segments_within_its_bytes() {
    corpus::explore(WQES, segments, 0.5);
}

/// A WQE, split in each way in which a service may split it.
fn segments(input: &[u8]) -> Traits {
    let mut traits = Traits::new();
    let Some((shape, bytes)) = input.split_first() else { return traits };
    let Some(control) = bytes.first_chunk::<16>().map(CtrlSegment::parse) else { return traits };
    for service in [0, 2, 3, 0xc, 0xff] {
        let cut = segments::segments(service, bytes);
        let len: usize = cut.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(len <= bytes.len() && len <= usize::from(control.ds).max(1) * 16);
        traits.insert((1, service.into(), cut.len() as u32));
    }
    let cut = receive_segments(shape & 1 != 0, bytes);
    assert!(cut.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() <= bytes.len());
    traits
}

/// A recording with entries of any kind.
fn recording(input: &[u8]) -> Traits {
    let mut traits = Traits::new();
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &[0; 4]].concat();
    let mut rest = input;
    while let Some(([kind, len], left)) = rest.split_first_chunk::<2>() {
        let (body, left) = left.split_at(usize::from(*len).min(left.len()));
        rest = left;
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend([kind % 12, 0, 0, 0]);
        bytes.extend([0; 8]);
        bytes.extend(body);
    }
    let mut text = Vec::new();
    decode::print(&bytes[..], &mut text).unwrap();
    golden::TestVectors::default().add(&bytes[..]).unwrap();
    // A word that was not printed before is a new trait.
    for word in text.split(|byte| !byte.is_ascii_alphabetic() && *byte != b'_') {
        if word.iter().any(|byte| !byte.is_ascii_hexdigit()) {
            let hash = word
                .iter()
                .fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(*byte)));
            traits.insert((0, hash, 0));
        }
    }
    // The input as it is, without entry headers.
    let raw = [&MAGIC[..], &VERSION.to_le_bytes(), input].concat();
    let _ = decode::print(&raw[..], &mut Vec::new());
    traits
}
