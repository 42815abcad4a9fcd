//! Work that is due at a time.

use crate::device::Device;

impl Device {
    /// Runs the timers that are due; returns whether one was.
    pub(crate) fn run_timers(&mut self) -> bool {
        if self.deadline().is_none_or(|due| due > self.now) {
            return false;
        }
        while self.retry_timers.first().is_some_and(|(due, _)| *due <= self.now) {
            let Some((_, number)) = self.retry_timers.pop_first() else { break };
            self.schedule(number);
        }
        self.run_cq_timers();
        while let Some(up) = self.faults.due_link_change(self.now) {
            self.set_link(up);
        }
        true
    }
}
