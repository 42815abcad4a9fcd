//! Raw mode of the terminal, which ends with the run, however that ends.

use anyhow::Result;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::sync::{Mutex, PoisonError};

/// The terminal's mode before it became raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Ends raw mode of the terminal, if that is on.
pub(crate) fn restore() {
    if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // A terminal that is gone needs no reset.
        let _gone = tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &before);
    }
}

/// Raw mode of the terminal, until dropped.
pub(crate) struct RawTerminal;

impl RawTerminal {
    pub(crate) fn enter() -> Result<Self> {
        let before = tcgetattr(rustix::stdio::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &raw)?;
        Ok(Self)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}
