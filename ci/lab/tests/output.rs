//! Output of the lab arrives, or the lab says that it did not.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Command lines that print to standard output on any machine.
const PRINTING: [&[&str]; 3] = [&["soak", "--list"], &["--version"], &["exec", "--help"]];

fn lab(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A socket without a reader, which is as a pipe without one.
fn closed() -> OwnedFd {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    ours.into()
}

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _absent = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn a_closed_pipe_ends_the_lab_quietly() {
    for words in PRINTING {
        let output = lab(words).stdout(closed()).output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{words:?}: {}", said(&output));
        assert!(output.stderr.is_empty(), "{words:?}: {}", said(&output));
    }
}

#[test]
fn a_full_disk_is_an_error() {
    for words in PRINTING {
        let output = lab(words).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", said(&output));
        let expected = "error: standard output: No space left on device";
        assert!(said(&output).contains(expected), "{words:?}: {}", said(&output));
    }
}

#[test]
fn the_status_does_not_depend_on_standard_error() {
    let asked: [(&[&str], i32); 2] =
        [(&["--nonsense"], 2), (&["exec", "--overlay", "/none", "x"], 1)];
    for (words, status) in asked {
        for to in [closed(), full().into()] {
            let ended = lab(words).stderr(to).status().unwrap();
            assert_eq!(ended.code(), Some(status), "{words:?}");
        }
    }
}

/// The lab looks at the place of a result before it works for it.
#[test]
fn files_that_are_no_results_stay() {
    let folder = folder("stay");
    let file = folder.join("README.md");
    fs::write(&file, "text").unwrap();
    let path = file.to_str().unwrap();
    let commands: [&[&str]; 3] =
        [&["test", "--junit", path], &["bundle", path], &["bench", "size", "--plots", path]];
    for words in commands {
        let output = lab(words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", said(&output));
        assert!(said(&output).contains(path), "{words:?}: {}", said(&output));
        assert_eq!(fs::read(&file).unwrap(), b"text", "{words:?}");
    }
    let record = folder.join("function1.record");
    fs::write(&record, "earlier").unwrap();
    let folder = folder.to_str().unwrap();
    let output = lab(&["exec", "--device", "mlx5", "--record", folder, "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains(record.to_str().unwrap()), "{}", said(&output));
}

#[test]
fn a_cache_that_cannot_be_one_is_named_with_its_variable() {
    let folder = folder("cache");
    fs::create_dir_all(folder.join("staging")).unwrap();
    for cache in [folder.to_str().unwrap(), "/dev/null/cache"] {
        let output = lab(&["fetch"]).env("UVERBS_LAB_CACHE", cache).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        for part in [cache, "UVERBS_LAB_CACHE"] {
            assert!(said(&output).contains(part), "{}", said(&output));
        }
    }
    assert!(folder.join("staging").exists(), "a folder of the user is no rest of a download");
}
