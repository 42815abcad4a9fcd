//! Progress of long steps: a spinner or a bar on a terminal.
//!
//! Where standard error is no terminal (CI logs) each step prints a line when it begins, and another one now and then
//! until it ends, so that no step is silent for long.

use crate::output::{self, errln};
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time between two lines of a step.
const BEAT: Duration = Duration::from_secs(20);
/// A build that compiles nothing ends before this.
const SHORT: Duration = Duration::from_secs(3);

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static PATIENT: Cell<bool> = const { Cell::new(false) };
}

/// Shows only steps that take long, and no step with a spinner or a bar: this thread's output is another program's.
pub(crate) fn be_patient() {
    PATIENT.set(true);
}

/// Whether the terminal may show each step.
pub(crate) fn shows_all() -> bool {
    output::is_watched() && !PATIENT.get()
}

/// Leaves the terminal to other threads: this thread shows no progress from now on.
pub(crate) fn be_quiet() {
    QUIET.set(true);
}

/// A step under way; it ends when this is dropped.
pub(crate) struct Step {
    bar: ProgressBar,
    beats: Option<(Sender<String>, JoinHandle<()>)>,
}

impl Step {
    /// A step with lines, the first one after `first`, each with the latest note.
    fn with_lines(text: String, first: Duration, beat: Duration) -> Self {
        let (notes, from) = channel();
        let show = |line: &str| errln!("{line}");
        let thread = thread::spawn(move || tell(&text, first, beat, &from, show));
        Self { bar: ProgressBar::hidden(), beats: Some((notes, thread)) }
    }

    /// Says how far the step is.
    pub(crate) fn note(&self, text: String) {
        if let Some((notes, _)) = &self.beats {
            // The thread waits for notes until the step ends.
            let _taken = notes.send(text);
        }
    }

    /// Ends the step.
    pub(crate) fn finish_and_clear(self) {
        drop(self);
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        if let Some((notes, thread)) = self.beats.take() {
            drop(notes);
            // It has nothing to say that matters now.
            let _ended = thread.join();
        }
    }
}

/// Prints a line after `first` and then after each `beat`, until the sender of the notes is gone.
fn tell(
    text: &str,
    first: Duration,
    beat: Duration,
    notes: &Receiver<String>,
    mut show: impl FnMut(&str),
) {
    let begin = Instant::now();
    let (mut due, mut note) = (begin + first, String::new());
    loop {
        match notes.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(later) => note = format!(", {later}"),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                match begin.elapsed().as_secs() {
                    0 => show(&format!("{text} …")),
                    seconds => show(&format!("{text} … {seconds} s{note}")),
                }
                due = Instant::now() + beat;
            }
        }
    }
}

/// A spinner beside a text.
pub(crate) fn spinner(text: impl Into<String>) -> Step {
    let text = text.into();
    if !shows_all() {
        let first = if PATIENT.get() { BEAT } else { Duration::ZERO };
        return Step::with_lines(text, first, BEAT);
    }
    if QUIET.get() {
        return Step { bar: ProgressBar::hidden(), beats: None };
    }
    let bar = ProgressBar::new_spinner().with_message(text);
    bar.enable_steady_tick(Duration::from_millis(120));
    Step { bar, beats: None }
}

/// A build by cargo, which shows its own progress on a terminal.
pub(crate) fn build(text: impl Into<String>) -> Step {
    if shows_all() {
        return Step { bar: ProgressBar::hidden(), beats: None };
    }
    Step::with_lines(text.into(), SHORT, BEAT)
}

/// A bar that counts bytes towards a total.
pub(crate) fn bytes(text: impl Into<String>, total: u64) -> ProgressBar {
    let text = text.into();
    if !output::is_watched() {
        errln!("{text}, {} MB …", total.div_ceil(1_000_000));
    }
    if !output::is_watched() || QUIET.get() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style).with_message(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_step_is_never_silent_for_long() {
        let (notes, from) = channel();
        let (sender, lines) = channel();
        let step = thread::spawn(move || {
            let beat = Duration::from_millis(400);
            tell("building", Duration::ZERO, beat, &from, |line| sender.send(line.into()).unwrap());
        });
        let next = || -> String { lines.recv_timeout(Duration::from_secs(20)).unwrap() };
        assert_eq!(next(), "building …");
        notes.send("1 crate".into()).unwrap();
        notes.send("2 crates".into()).unwrap();
        let later = std::iter::repeat_with(next).find(|line| line.contains(" s"));
        let later = later.unwrap();
        assert!(later.starts_with("building … ") && later.ends_with(" s, 2 crates"), "{later}");
        drop(notes);
        step.join().unwrap();
        assert!(lines.iter().all(|line| line.starts_with("building")), "the end ends the lines");
    }

    #[test]
    fn a_short_build_says_nothing() {
        let (notes, from) = channel::<String>();
        drop(notes);
        tell("building", SHORT, BEAT, &from, |line| panic!("{line}"));
    }
}
