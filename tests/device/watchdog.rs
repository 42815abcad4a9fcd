//! Ends the whole run when one test hangs in a system call, where no deadline of its own reaches.

use crate::results;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any test may take, or any part of one that tells of its parts.
const PATIENCE: Duration = Duration::from_secs(90);
/// Longer than any test may take that does.
const MOST: Duration = Duration::from_secs(600);

thread_local! {
    /// Parts that are done of the test that this thread runs.
    static DONE: Arc<AtomicU64> = Arc::default();
}

/// Tells of progress, on the test's own thread: a test of many parts takes its time where the machine has
/// other things to do.
pub(crate) fn progress() {
    DONE.with(|done| done.fetch_add(1, Ordering::Relaxed));
}

/// Calls the watchdog off when dropped.
pub(crate) struct Guard(#[expect(dead_code, reason = "its end is the message")] Sender<()>);

/// Watches the test `name`, which this thread runs, for as long as the guard lives.
pub(crate) fn watch(name: &str) -> Guard {
    let (sender, receiver) = channel::<()>();
    let (name, parts) = (name.to_owned(), DONE.with(Arc::clone));
    thread::spawn(move || {
        let start = Instant::now();
        loop {
            let before = parts.load(Ordering::Relaxed);
            if receiver.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let (done, seconds) = (parts.load(Ordering::Relaxed), start.elapsed().as_secs());
            if done == before {
                end(&format!("test {name} hangs: no progress for {} s", PATIENCE.as_secs()));
            }
            if start.elapsed() > MOST {
                end(&format!("test {name} goes on and on: no end after {seconds} s"));
            }
            eprintln!("test {name} takes more than {seconds} s");
        }
    });
    Guard(sender)
}

/// Ends the run, with its results so far.
fn end(why: &str) -> ! {
    eprintln!("{why}");
    if let Err(error) = results::write("device", Some(why)) {
        eprintln!("the results cannot be written: {error}");
    }
    process::exit(101)
}
