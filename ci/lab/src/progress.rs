//! Progress on the terminal: a spinner or a bar during long steps.
//!
//! Where standard error is no terminal (CI logs) each step prints one plain line instead.

use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::Duration;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Leaves the terminal to other threads: this thread shows no progress from now on.
pub(crate) fn be_quiet() {
    QUIET.set(true);
}

fn visible() -> bool {
    std::io::stderr().is_terminal()
}

/// A spinner beside a text.
pub(crate) fn spinner(text: impl Into<String>) -> ProgressBar {
    let text = text.into();
    if !visible() {
        eprintln!("{text} …");
    }
    if !visible() || QUIET.get() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_message(text);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// A bar that counts bytes towards a total.
pub(crate) fn bytes(text: impl Into<String>, total: u64) -> ProgressBar {
    let text = text.into();
    if !visible() {
        eprintln!("{text}, {} MB …", total.div_ceil(1_000_000));
    }
    if !visible() || QUIET.get() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style).with_message(text)
}
