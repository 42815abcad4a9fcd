//! The layers of the RoCE transport.

use super::{Layer, assert_entries, assert_layers, workspace};
use std::path::PathBuf;

/// From the bottom to the top; `docs/TRANSPORT.md` says what each file is for.
const ROCE: &[Layer] = &[
    ("numbers", &["icrc", "mistake", "opcodes", "psn", "timers"]),
    ("packets", &["cm", "datagram", "frame", "headers"]),
    ("the device", &["host"]),
    ("queue pairs", &["queue_pair", "request", "requester", "responder", "window"]),
    ("the endpoint", &["endpoint"]),
    ("the library", &["lib", "tests"]),
];

fn root() -> PathBuf {
    workspace().join("roce/src")
}

#[test]
fn a_file_of_the_transport_imports_only_from_its_layer_and_below() {
    assert_layers(ROCE, &root(), 10);
}

#[test]
fn every_layer_of_the_transport_is_a_file() {
    assert_entries(ROCE, &root());
}
