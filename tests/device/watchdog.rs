//! Ends the whole run when one test hangs in a system call, where no deadline of its own reaches.

use std::process;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Longer than any test may take, soaks apart.
const PATIENCE: Duration = Duration::from_secs(90);

/// Calls the watchdog off when dropped.
pub(crate) struct Guard(#[expect(dead_code, reason = "its end is the message")] Sender<()>);

/// Watches the test `name` for as long as the guard lives.
pub(crate) fn watch(name: &str) -> Guard {
    let (sender, receiver) = channel::<()>();
    let name = name.to_owned();
    thread::spawn(move || {
        if receiver.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            eprintln!("test {name} hangs: no end after {} s", PATIENCE.as_secs());
            process::exit(101);
        }
    });
    Guard(sender)
}
