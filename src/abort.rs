//! The end of a process in which a device could write memory that the program uses again.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::write;
use std::io::stderr;
use std::mem;

/// Prints `line` on standard error, and ends the process.
///
/// Nothing here unwinds or waits. Standard error may be closed, a pipe that is broken or full, or locked by a thread
/// that waits for this one. `eprintln!` would panic or wait, and the process would go on.
#[cold]
pub(crate) fn abort(line: &'static str) -> ! {
    // No lock: `Stderr` names the file, and is not written to.
    let stderr = stderr();
    let mut file = [PollFd::new(&stderr, PollFlags::OUT)];
    let has_room = poll(&mut file, Some(&Timespec::default()));
    if has_room.is_ok_and(|ready| ready > 0) {
        let _ = write(&stderr, line.as_bytes());
    }
    std::process::abort()
}

/// Ends the process when it is dropped, which a panic does. Made before memory is proven to be back, and disarmed
/// afterwards.
#[derive(Debug)]
pub(crate) struct AbortOnUnwind(&'static str);

impl AbortOnUnwind {
    /// The process ends with `line` unless this is disarmed.
    pub(crate) fn new(line: &'static str) -> AbortOnUnwind {
        AbortOnUnwind(line)
    }

    pub(crate) fn disarm(self) {
        mem::forget(self);
    }
}

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        abort(self.0);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// The state of a test process's standard error.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Stderr {
        Read,
        /// A pipe whose other end is closed.
        Broken,
        /// A pipe that takes nothing, and whose other end stays open.
        Full,
        /// No file at all.
        Closed,
        /// Locked by a thread that never ends.
        Locked,
    }

    const ALL: [Stderr; 5] =
        [Stderr::Read, Stderr::Broken, Stderr::Full, Stderr::Closed, Stderr::Locked];
    const CHILD: &str = "UVERBS_TEST_ABORTS";

    /// Runs the test `name` in child processes, one for each state of standard error. Each must abort, and print
    /// `why` where standard error can be read. Returns `false` in a child.
    pub(crate) fn aborts_in_a_child(name: &str, why: &str) -> bool {
        if let Some(stderr) = std::env::var_os(CHILD) {
            break_stderr(&stderr.into_string().unwrap());
            return false;
        }
        for stderr in ALL {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            if stderr == Stderr::Full {
                let flags = fcntl_getfl(&writer).unwrap();
                fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
                while write(&writer, &[b'x'; 4096]).is_ok() {}
                while write(&writer, b"x").is_ok() {}
                fcntl_setfl(&writer, flags).unwrap();
            }
            let reader = (stderr != Stderr::Broken).then_some(reader);
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(CHILD, format!("{stderr:?}"))
                .stdout(Stdio::null())
                .stderr(writer)
                .spawn()
                .unwrap();
            let started = Instant::now();
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if started.elapsed() > Duration::from_secs(60) => {
                        child.kill().unwrap();
                        panic!("{stderr:?}: the process goes on")
                    }
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            let mut text = String::new();
            if let (Some(reader), Stderr::Read) = (reader, stderr) {
                std::fs::File::from(reader).read_to_string(&mut text).unwrap();
                assert!(text.contains(why), "{text}");
            }
            assert_eq!(status.signal(), Some(6), "{stderr:?}: {text}");
        }
        true
    }

    #[allow(unsafe_code, reason = "it closes standard error")]
    fn break_stderr(how: &str) {
        match how {
            "Closed" => {
                // SAFETY: this process is the test's own, and opens no file before it ends.
                unsafe { rustix::io::close(2) };
            }
            "Locked" => {
                let (locked, is_locked) = std::sync::mpsc::channel();
                std::thread::spawn(move || {
                    let _held = stderr().lock();
                    locked.send(()).unwrap();
                    loop {
                        std::thread::park();
                    }
                });
                is_locked.recv().unwrap();
            }
            _ => {}
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it starts a process")]
    fn a_panic_behind_the_guard_aborts_with_any_standard_error() {
        const NAME: &str = "abort::tests::a_panic_behind_the_guard_aborts_with_any_standard_error";
        if aborts_in_a_child(NAME, "not proven") {
            return;
        }
        let end = std::panic::catch_unwind(|| {
            let _guard = AbortOnUnwind::new("not proven\n");
            // Without the hook, which writes to standard error.
            std::panic::resume_unwind(Box::new(()));
        });
        unreachable!("the process goes on: {}", end.is_err());
    }

    #[test]
    fn a_guard_that_is_disarmed_does_nothing() {
        AbortOnUnwind::new("disarmed\n").disarm();
    }
}
