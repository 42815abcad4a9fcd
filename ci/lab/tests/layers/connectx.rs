//! The layers of the emulated ConnectX.

use super::{Layer, assert_entries, assert_layers, workspace};
use std::path::PathBuf;

/// From the bottom to the top; `connectx/README.md` says what each is for.
const CONNECTX: &[Layer] = &[
    (
        "base",
        &[
            "bar0",
            "bus",
            "capture",
            "chunks",
            "command_error",
            "cost",
            "decisions",
            "fault",
            "format",
            "guest",
            "interrupt",
            "link",
            "network",
            "options",
            "outside",
            "path",
            "recording",
            "ways",
        ],
    ),
    (
        "state",
        &[
            "audit",
            "bar_memory",
            "doorbell",
            "hca_caps",
            "init_segment",
            "object",
            "pages",
            "pci",
            "port",
            "ready",
        ],
    ),
    ("device", &["device"]),
    ("data", &["data"]),
    ("cmd", &["cmd"]),
    ("function", &["function", "mmio"]),
    ("fabric", &["fabric"]),
    ("the library", &["lib"]),
];

fn root() -> PathBuf {
    workspace().join("connectx/src")
}

#[test]
fn a_file_imports_only_from_its_layer_and_below() {
    assert_layers(CONNECTX, &root(), 60);
}

#[test]
fn every_entry_is_a_file_or_a_folder() {
    assert_entries(CONNECTX, &root());
}
