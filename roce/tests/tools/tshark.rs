//! Wireshark's decoder, for the tests of several packages.

use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

/// The output of `tshark`; `None`, and a line that says so, where it is not installed. With `UVERBS_NEEDS_TSHARK` that is a
/// failure.
pub(crate) fn output_of(mut tshark: Command, file: &Path) -> Option<String> {
    let output = tshark.output();
    let _ = std::fs::remove_file(file);
    let output = match output {
        Ok(output) => output,
        Err(why) if why.kind() == io::ErrorKind::NotFound => {
            let needed = std::env::var_os("UVERBS_NEEDS_TSHARK").is_some();
            assert!(!needed, "UVERBS_NEEDS_TSHARK is set and tshark is not installed");
            let this = std::thread::current();
            let name = this.name().unwrap_or("a test");
            // Not `eprintln`, which is shown of failures only.
            let _ = writeln!(io::stderr(), "skipped: {name}: tshark is not installed");
            return None;
        }
        Err(why) => panic!("tshark cannot be run: {why}"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}
