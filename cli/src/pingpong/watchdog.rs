//! Ends the program if there is no progress while it sleeps for an event.
//!
//! A sleep with a timeout takes a second system call for each event, and the run measures the time
//! between events. So the sleeper has no timeout. A thread watches it; as that thread cannot wake
//! the sleeper, it reports the failure and ends the program in its place.

use crate::failure::Failure;
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, park_timeout, spawn};
use std::time::{Duration, Instant};

/// The progress of the run, as the run's thread reports it.
#[derive(Debug, Default)]
struct Progress {
    sent: AtomicU64,
    received: AtomicU64,
    over: AtomicBool,
}

/// A thread that watches until it is dropped.
#[derive(Debug)]
pub(crate) struct Watchdog {
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Ends the program with the failure that `failure` makes of the numbers of messages sent and
    /// received, once these have been the same for `timeout`.
    pub(crate) fn new(
        timeout: Duration,
        json: bool,
        failure: impl Fn(u64, u64) -> Failure + Send + 'static,
    ) -> Watchdog {
        let progress = Arc::new(Progress::default());
        let watched = progress.clone();
        let thread = spawn(move || {
            if let Some((sent, received)) = watch(&watched, timeout) {
                exit(failure(sent, received).tell(json).into());
            }
        });
        Watchdog { progress, thread: Some(thread) }
    }

    /// Records the progress of the run.
    #[inline]
    pub(crate) fn tell(&self, sent: u64, received: u64) {
        self.progress.sent.store(sent, Ordering::Relaxed);
        self.progress.received.store(received, Ordering::Relaxed);
    }
}

/// Returns the progress once it has been the same for `timeout`; `None` at the end of the run.
fn watch(progress: &Progress, timeout: Duration) -> Option<(u64, u64)> {
    let read =
        || (progress.sent.load(Ordering::Relaxed), progress.received.load(Ordering::Relaxed));
    let (mut seen, mut since) = (read(), Instant::now());
    while !progress.over.load(Ordering::Acquire) {
        park_timeout((timeout / 4).max(Duration::from_millis(1)));
        let now = read();
        if now != seen {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() >= timeout && !progress.over.load(Ordering::Acquire) {
            return Some(seen);
        }
    }
    None
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.progress.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread's result does not matter now.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_standing_still_ends_the_watch() {
        let progress = Arc::new(Progress::default());
        let watched = progress.clone();
        let watch = spawn(move || {
            let start = Instant::now();
            (watch(&watched, Duration::from_millis(200)), start.elapsed())
        });
        for sent in 1..=10 {
            std::thread::sleep(Duration::from_millis(50));
            progress.sent.store(sent, Ordering::Relaxed);
        }
        let (reached, took) = watch.join().unwrap();
        assert_eq!(reached, Some((10, 0)));
        assert!(took >= Duration::from_millis(650), "{took:?}: it moved meanwhile");
    }

    #[test]
    fn a_run_that_is_over_is_not_waited_for() {
        let start = Instant::now();
        let dog = Watchdog::new(Duration::from_secs(60), false, |_, _| Failure::run("not reached"));
        dog.tell(1, 1);
        drop(dog);
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
