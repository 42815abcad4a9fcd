//! Ends the whole run when one test hangs in a system call, which its own deadlines cannot interrupt.

use crate::results;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any test may take, or any part of a test that reports progress.
const PATIENCE: Duration = Duration::from_secs(90);
/// Longer than any test with reports of progress may take.
const MOST: Duration = Duration::from_secs(600);

thread_local! {
    /// The completed parts of the test on this thread.
    static DONE: Arc<AtomicU64> = Arc::default();
}

/// Reports progress, on the test's own thread: a test of many parts takes longer on a busy machine.
pub(crate) fn progress() {
    DONE.with(|done| done.fetch_add(1, Ordering::Relaxed));
}

/// Stops the watchdog when it is dropped.
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
