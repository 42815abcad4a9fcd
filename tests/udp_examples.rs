//! Examples of which each side runs in a process and on a device of its own: `UVERBS_SIM=udp:ADDRESS`.

#![cfg(all(feature = "sim", feature = "tokio"))]

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long an example may take on a machine that is busy.
const LIMIT: Duration = Duration::from_secs(60);

/// The program of an example, which is built unless that has been done: `cargo test` with a target does not.
fn example(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe()?;
    let profile = this.parent().and_then(|deps| deps.parent()).ok_or("no profile")?;
    let program = profile.join("examples").join(name);
    if !program.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--all-features", "--example", name]);
        build.arg("--target-dir").arg(profile.parent().ok_or("no target")?);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status()?.success(), "{name}");
    }
    Ok(program)
}

/// A side of an example. It is killed when it is dropped.
struct Process(Option<Child>);

impl Process {
    /// One on a device at 127.HIGH.LOW.`host`, which no other test process has.
    fn start(name: &str, host: u8, arguments: &[&str]) -> Result<Process> {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let at = Ipv4Addr::new(127, 192 | high & 31, low, host);
        let mut command = Command::new(example(name)?);
        command.args(arguments).env("UVERBS_SIM", format!("udp:{at}:24793"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        Ok(Process(Some(child)))
    }

    /// Its output, when it has ended well.
    fn ends(mut self) -> Result<String> {
        let end = Instant::now() + LIMIT;
        while self.0.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None))) {
            if Instant::now() > end {
                return Err("it does not end".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let Output { status, stdout, stderr } =
            self.0.take().ok_or("it has ended")?.wait_with_output()?;
        let said = String::from_utf8(stdout)?;
        if !status.success() {
            return Err(format!("{status}: {said}{}", String::from_utf8_lossy(&stderr)).into());
        }
        Ok(said)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A TCP port that is free.
fn port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Waits until a process listens at a port.
fn listens(port: u16) -> Result<()> {
    let end = Instant::now() + LIMIT;
    let listens = || -> Result<bool> {
        let table = std::fs::read_to_string("/proc/net/tcp")?;
        let table6 = std::fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
        let port = format!(":{port:04X}");
        // As `get_tcp4_sock` has it: the local address, the peer's, and the state, which is 0A.
        Ok(table.lines().chain(table6.lines()).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().take(4).collect();
            fields.get(1).is_some_and(|local| local.ends_with(&port))
                && fields.get(3) == Some(&"0A")
        }))
    };
    while !listens()? {
        if Instant::now() > end {
            return Err(format!("nobody listens at {port}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn requests_and_replies() -> Result<()> {
    let port = port()?;
    let at = format!("127.0.0.1:{port}");
    // It serves until it is killed.
    let _server = Process::start("requests", 1, &["serve", &at])?;
    listens(port)?;
    let client = Process::start("requests", 2, &["ask", &at, "64", "4"])?.ends()?;
    assert!(client.contains("receivers not ready: none"), "{client}");
    Ok(())
}

#[test]
fn a_file_is_copied() -> Result<()> {
    let port = port()?;
    let at = format!("127.0.0.1:{port}");
    let directory = std::env::temp_dir().join(format!("uverbs-udp-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let [from, to] = ["from", "to"].map(|name| directory.join(name));
    let bytes: Vec<u8> = (0..3_000_001u32).map(|at| (at * 7 + (at >> 8) * 13) as u8).collect();
    std::fs::write(&from, &bytes)?;
    let [from, to] = [&from, &to].map(|path| path.to_str().ok_or("no UTF-8"));
    let (from, to) = (from?, to?);
    let receiver = Process::start("file_transfer", 3, &["receive", to, &at])?;
    listens(port)?;
    Process::start("file_transfer", 4, &["send", from, &at])?.ends()?;
    receiver.ends()?;
    assert!(std::fs::read(to)? == bytes, "the copy differs");
    std::fs::remove_dir_all(directory)?;
    Ok(())
}

#[test]
fn a_ping_pong() -> Result<()> {
    let port = port()?;
    let number = port.to_string();
    let server = Process::start("pingpong", 5, &["-p", &number, "-n", "200"])?;
    listens(port)?;
    let client = Process::start("pingpong", 6, &["-p", &number, "-n", "200", "127.0.0.1"])?;
    assert!(client.ends()?.contains("µs per iteration"));
    assert!(server.ends()?.contains("µs per iteration"));
    Ok(())
}
