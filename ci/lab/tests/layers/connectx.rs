//! The layers of the emulated ConnectX.

use super::source::Source;
use super::{Layer, breaches, missing, workspace};
use std::path::PathBuf;

/// From the bottom to the top; `connectx/README.md` says what each is for.
const CONNECTX: &[Layer] = &[
    (
        "base",
        &[
            "bar0.rs",
            "chunks.rs",
            "command_error.rs",
            "cost.rs",
            "fault.rs",
            "format.rs",
            "format",
            "guest.rs",
            "interrupt.rs",
            "options.rs",
            "recording.rs",
            "scratch.rs",
        ],
    ),
    (
        "state",
        &[
            "audit.rs",
            "bar_memory.rs",
            "doorbell.rs",
            "hca_caps.rs",
            "init_segment.rs",
            "object.rs",
            "object",
            "pages.rs",
            "pci.rs",
            "port.rs",
            "ready.rs",
        ],
    ),
    ("device", &["device.rs"]),
    ("data", &["data.rs", "data"]),
    ("cmd", &["cmd.rs", "cmd"]),
    ("function", &["function.rs", "mmio.rs"]),
    ("fabric", &["fabric.rs"]),
    ("the library", &["lib.rs"]),
];

fn root() -> PathBuf {
    workspace().join("connectx/src")
}

#[test]
fn a_file_imports_only_from_its_layer_and_below() {
    let source = Source::read(&root()).unwrap();
    assert!(source.files().count() > 60, "this is not the source of connectx");
    let found = breaches(CONNECTX, &source);
    assert!(found.is_empty(), "{} imports break the layers:\n{}", found.len(), found.join("\n"));
}

#[test]
fn every_entry_is_a_file_or_a_folder() {
    let missing = missing(CONNECTX, &root());
    assert!(missing.is_empty(), "{missing:?}");
}
