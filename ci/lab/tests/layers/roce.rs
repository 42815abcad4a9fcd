//! The layers of the RoCE transport.

use super::source::Source;
use super::{Layer, breaches, missing, workspace};
use std::path::PathBuf;

/// From the bottom to the top; `docs/TRANSPORT.md` says what each file is for.
const ROCE: &[Layer] = &[
    ("numbers", &["icrc", "mistake", "opcodes", "psn", "timers"]),
    ("packets", &["frame", "headers"]),
    ("the device", &["host"]),
    ("queue pairs", &["queue_pair", "request", "requester", "responder"]),
    ("the endpoint", &["endpoint"]),
    ("the library", &["lib", "tests"]),
];

fn root() -> PathBuf {
    workspace().join("roce/src")
}

#[test]
fn a_file_of_the_transport_imports_only_from_its_layer_and_below() {
    let source = Source::read(&root()).unwrap();
    assert!(source.files().count() > 10, "this is not the source of the transport");
    let found = breaches(ROCE, &source);
    assert!(found.is_empty(), "{} imports break the layers:\n{}", found.len(), found.join("\n"));
}

#[test]
fn every_layer_of_the_transport_is_a_file() {
    let missing = missing(ROCE, &root());
    assert!(missing.is_empty(), "{missing:?}");
}
