//! `uverbs share serve` replaces a socket without a server, and no other file. It checks the path before it opens a
//! device, so that the tests need no device.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _absent = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn serve(path: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uverbs"));
    // No device has this name.
    command.args(["share", "serve", "-d", "no-such-device"]).arg(path).output().unwrap()
}

fn refused(path: &Path, why: &str) {
    let output = serve(path);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains(path.to_str().unwrap()) && said.contains(why), "{said}");
}

#[test]
fn a_file_stays() {
    let path = folder("file").join("important");
    fs::write(&path, "text").unwrap();
    refused(&path, "no socket");
    assert_eq!(fs::read(&path).unwrap(), b"text");
    refused(path.parent().unwrap(), "no socket");
}

#[test]
fn a_server_keeps_its_path_and_counts_no_client() {
    let path = folder("live").join("socket");
    let server = UnixListener::bind(&path).unwrap();
    refused(&path, "another process serves");
    server.set_nonblocking(true).unwrap();
    assert!(server.accept().is_err(), "nobody connected");
    assert!(path.exists());
}

#[test]
fn a_socket_of_a_server_that_is_gone_is_replaced() {
    let path = folder("stale").join("socket");
    drop(UnixListener::bind(&path).unwrap());
    let output = serve(&path);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("no-such-device"), "{said}");
    assert!(!path.exists(), "a server that ends takes its socket along");
}
