//! A record of the accesses of a test's thread to memory that a device sees, in order.
//!
//! The processors that tests run on are ordered strongly enough to hide a missing barrier. The
//! record has the barriers that the code asked for, and shows that one is missing.

use std::cell::RefCell;

/// One access, or one barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordedStep {
    /// A part of a WQE was written.
    Request,
    /// The `op_own` of a CQE was read.
    OpOwn,
    /// Another part of a completion was read.
    Completion,
    ToDevice,
    FromDevice,
    DoneReading,
    WcStart,
    Flush,
    /// A word of a doorbell record was set.
    Record(usize),
    /// The lock of a register was taken.
    Lock,
    /// A register was rung by one store.
    Doorbell,
    /// A register was given a whole request.
    BlueFlame,
    /// A word of the device's own memory was read or written.
    DeviceMemory,
    /// The lock of a register was given back.
    Unlock,
}

thread_local! {
    static STEPS: RefCell<Option<Vec<RecordedStep>>> = const { RefCell::new(None) };
}

/// Records `step` if a recording is running.
pub(crate) fn record_step(step: RecordedStep) {
    STEPS.with_borrow_mut(|steps| {
        if let Some(steps) = steps {
            steps.push(step);
        }
    });
}

/// The steps of `act`; a step that repeats is listed once.
#[cfg(not(loom))]
pub(crate) fn steps_of(act: impl FnOnce()) -> Vec<RecordedStep> {
    STEPS.replace(Some(Vec::new()));
    act();
    let mut steps = STEPS.take().unwrap_or_default();
    steps.dedup();
    steps
}
