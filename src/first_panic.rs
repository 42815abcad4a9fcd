//! Calls into the program's code that must all be made, although some of them panic.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The first panic of several calls.
#[derive(Debug, Default)]
pub(crate) struct FirstPanic(Option<Box<dyn Any + Send>>);

impl FirstPanic {
    /// Makes a call, and keeps its panic.
    pub(crate) fn catch(&mut self, call: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
            match &self.0 {
                None => self.0 = Some(panic),
                // Dropping the payload of a panic may panic again.
                Some(_) => std::mem::forget(panic),
            }
        }
    }

    /// Lets the first panic go on, unless this thread panics already: a second panic would abort the process.
    pub(crate) fn resume(mut self) {
        if std::thread::panicking() {
            return;
        }
        if let Some(panic) = self.0.take() {
            resume_unwind(panic);
        }
    }

    /// Makes a single call, whose panic goes on unless this thread panics already: a destructor may wake a task so.
    pub(crate) fn of_one(call: impl FnOnce()) {
        if !std::thread::panicking() {
            return call();
        }
        let mut calls = FirstPanic::default();
        calls.catch(call);
    }

    /// Drops each value, even if destructors panic. The first panic goes on unless this thread panics already.
    pub(crate) fn drop_each<T>(values: impl IntoIterator<Item = T>) {
        let mut calls = FirstPanic::default();
        values.into_iter().for_each(|value| calls.catch(|| drop(value)));
        calls.resume();
    }

    /// Ignores the panics.
    pub(crate) fn ignore(self) {}
}

impl Drop for FirstPanic {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn every_call_is_made_and_the_first_panic_goes_on() {
        let mut made = Vec::new();
        let mut calls = FirstPanic::default();
        for number in 0..4 {
            calls.catch(|| {
                made.push(number);
                assert!(number % 2 == 0, "call {number}");
            });
        }
        assert_eq!(made, [0, 1, 2, 3]);
        let panic = catch_unwind(AssertUnwindSafe(|| calls.resume())).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("call 1"));
    }

    /// Otherwise the second panic aborts the process.
    #[test]
    fn a_panic_in_a_destructor_is_dropped_if_the_thread_panics_already() {
        struct Wakes<'a>(&'a AtomicBool);
        impl Drop for Wakes<'_> {
            fn drop(&mut self) {
                FirstPanic::of_one(|| panic!("in the destructor"));
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let text =
            |end: Result<(), Box<dyn Any + Send>>| *end.unwrap_err().downcast::<&str>().unwrap();
        let went_on = AtomicBool::new(false);
        let end = catch_unwind(|| {
            let _wakes = Wakes(&went_on);
            panic!("the first one");
        });
        assert_eq!((text(end), went_on.load(Ordering::Relaxed)), ("the first one", true));
        let went_on = AtomicBool::new(false);
        let end = catch_unwind(|| drop(Wakes(&went_on)));
        assert_eq!((text(end), went_on.load(Ordering::Relaxed)), ("in the destructor", false));
    }

    #[test]
    fn a_panic_that_panics_when_it_is_dropped_is_ignored() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        let mut calls = FirstPanic::default();
        (0..2).for_each(|_| calls.catch(|| std::panic::panic_any(Bomb)));
        calls.ignore();
    }
}
