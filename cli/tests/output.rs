//! Output arrives, or the program reports an error: pipes without a reader, full disks, closed
//! descriptors. No device is needed.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Output, Stdio};

/// The status of a program whose reader is gone.
const CLOSED: i32 = 141;

/// Command lines that print to standard output on any machine.
const PRINTING: [&[&str]; 9] = [
    &["doctor"],
    &["doctor", "-v"],
    &["doctor", "--json"],
    &["doctor", "--report"],
    &["devinfo", "--json"],
    &["pingpong", "rc", "--size", "0", "--json"],
    &["cm", "rping", "--json"],
    &["--version"],
    &["cm", "mckey", "--help"],
];

fn uverbs(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uverbs"));
    command.args(words).stdin(Stdio::null());
    command
}

/// The writing end of a pipe without a reader. No program that another test starts meanwhile inherits the reading end.
fn closed_pipe() -> OwnedFd {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap().1
}

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_closed_pipe_ends_the_program_quietly() {
    for words in PRINTING {
        let output = uverbs(words).stdout(closed_pipe()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(CLOSED), "{words:?}: {}", said(&output));
        for word in ["panicked", "pipe", "standard output"] {
            assert!(!said(&output).contains(word), "{words:?}: {}", said(&output));
        }
    }
}

#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    // The program writes each line by a write(2) of its own.
    let mut child =
        uverbs(&["doctor", "-v"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_ne!(output.status.code(), Some(101), "{}", said(&output));
    assert!(!said(&output).contains("panicked"), "{}", said(&output));
}

#[test]
fn a_full_disk_is_an_error() {
    for words in PRINTING {
        let output = uverbs(words).stdout(full()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", said(&output));
        let expected = "uverbs: standard output: No space left on device";
        assert!(said(&output).contains(expected), "{words:?}: {}", said(&output));
    }
}

#[test]
fn a_descriptor_that_cannot_be_written_is_an_error() {
    let null = File::open("/dev/null").unwrap();
    let output = uverbs(&["--version"]).stdout(null).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("Bad file descriptor"), "{}", said(&output));
}

/// An error has the same status if standard error cannot be written.
#[test]
fn the_status_does_not_depend_on_standard_error() {
    let asked: [(&[&str], i32); 3] =
        [(&["share", "use", "/nonexistent"], 4), (&["cm", "rping"], 2), (&["--nonsense"], 2)];
    for (words, status) in asked {
        for to in [closed_pipe(), full().into()] {
            let ended = uverbs(words).stdout(Stdio::null()).stderr(to).status().unwrap();
            assert_eq!(ended.code(), Some(status), "{words:?}");
        }
    }
}

#[test]
fn results_that_cannot_be_read_are_an_error() {
    let folder = std::env::temp_dir();
    for path in ["/nonexistent/results.txt", folder.to_str().unwrap()] {
        let output = uverbs(&["doctor", "--report", "--results", path]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(path), "{}", said(&output));
        assert!(output.stdout.is_empty(), "half a report is none");
    }
}
