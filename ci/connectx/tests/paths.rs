//! The program's sockets, recordings and output: no file of another kind is lost, no server loses its path, and output
//! arrives or is an error.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _absent = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn connectx() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_connectx"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A running program, which is killed in the end.
struct Server(Child);

impl Server {
    fn at(path: &Path) -> Server {
        let mut server = Server(connectx().arg("--socket").arg(path).spawn().unwrap());
        let end = Instant::now() + Duration::from_secs(30);
        while UnixStream::connect(path).is_err() {
            let ended = server.0.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < end, "it serves no socket: {ended:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Runs a command that has to end by itself.
fn ended(command: &mut Command) -> Output {
    let mut server = Server(command.spawn().unwrap());
    let end = Instant::now() + Duration::from_secs(30);
    let status = loop {
        match server.0.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < end, "it serves"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    server.0.stdout.take().map(|mut from| from.read_to_end(&mut stdout).unwrap());
    server.0.stderr.take().map(|mut from| from.read_to_end(&mut stderr).unwrap());
    Output { status, stdout, stderr }
}

fn refused(command: &mut Command, path: &Path, why: &str) {
    let output = ended(command);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(path.to_str().unwrap()) && said.contains(why), "{said}");
}

#[test]
fn a_file_at_the_path_of_a_socket_stays() {
    let folder = folder("file");
    let path = folder.join("important");
    fs::write(&path, "text").unwrap();
    refused(connectx().arg("--socket").arg(&path), &path, "no socket");
    let other = folder.join("socket");
    refused(connectx().arg("--socket").arg(&other).arg("--control").arg(&path), &path, "no socket");
    assert_eq!(fs::read(&path).unwrap(), b"text");
}

#[test]
fn a_second_process_does_not_take_over_a_path() {
    let path = folder("live").join("socket");
    let _first = Server::at(&path);
    let before = fs::symlink_metadata(&path).unwrap();
    refused(connectx().arg("--socket").arg(&path), &path, "another process serves");
    let now = fs::symlink_metadata(&path).unwrap();
    use std::os::unix::fs::MetadataExt;
    assert_eq!((before.dev(), before.ino()), (now.dev(), now.ino()));
    UnixStream::connect(&path).unwrap();
}

#[test]
fn a_function_has_a_path_of_its_own() {
    let path = folder("twice").join("socket");
    refused(connectx().arg("--socket").arg(&path).arg("--socket").arg(&path), &path, "serves");
}

#[test]
fn the_socket_of_a_killed_process_is_replaced() {
    let path = folder("stale").join("socket");
    drop(UnixListener::bind(&path).unwrap());
    drop(Server::at(&path));
    assert!(path.exists(), "it was killed");
    drop(Server::at(&path));
}

#[test]
fn a_recording_is_not_overwritten() {
    let folder = folder("record");
    let record = folder.join("function0.record");
    fs::write(&record, "earlier").unwrap();
    let socket = folder.join("socket");
    refused(
        connectx().arg("--socket").arg(&socket).arg("--record").arg(&folder),
        &record,
        "exists",
    );
    assert_eq!(fs::read(&record).unwrap(), b"earlier");
    let file = folder.join("file");
    fs::write(&file, "").unwrap();
    refused(connectx().arg("--socket").arg(&socket).arg("--record").arg(&file), &file, "exists");
}

/// A recording of one reset.
fn recording(folder: &Path) -> PathBuf {
    let path = folder.join("function0.record");
    let mut recorder = uverbs_connectx::recording::Recorder::create(&path, 0).unwrap();
    recorder.reset(0);
    recorder.flush();
    path
}

#[test]
fn decoded_text_arrives_or_is_an_error() {
    let path = recording(&folder("decode"));
    let output = ended(connectx().arg("decode").arg(&path));
    assert!(output.status.success() && !output.stdout.is_empty());
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = ended(connectx().arg("decode").arg(&path).stdout(full));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output: No space left"), "{said}");
    for words in [&["decode", path.to_str().unwrap()][..], &["--help"]] {
        // A socket without a reader is as a pipe without one.
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let output = ended(connectx().args(words).stdout(std::os::fd::OwnedFd::from(ours)));
        assert_eq!(output.status.code(), Some(141), "{words:?}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
