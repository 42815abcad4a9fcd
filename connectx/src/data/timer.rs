//! Work that is due at a time.

use crate::device::Device;
use crate::object::qp::QpState;

impl Device {
    /// Runs the timers that are due; returns whether one was.
    pub(crate) fn run_timers(&mut self) -> bool {
        if self.deadline().is_none_or(|due| due > self.now) {
            return false;
        }
        self.link.release(self.now);
        let now = self.now;
        self.transport(|endpoint, host| endpoint.expire(now, host));
        while self.late_receive_timers.first().is_some_and(|(due, _)| *due <= self.now) {
            let Some((_, number)) = self.late_receive_timers.pop_first() else { break };
            self.schedule(number);
        }
        self.run_cq_timers();
        while let Some(up) = self.faults.due_link_change(self.now) {
            self.set_link(up);
        }
        true
    }

    /// Checks later whether the driver has posted a receive to a queue pair in error state, since
    /// receives have no doorbell register. A program that drains a queue posts a receive and waits
    /// for its flush error. The interval doubles each time, for four seconds in all.
    pub(crate) fn check_for_late_receives(&mut self, qpn: u32) {
        const FIRST: u64 = 1_000_000;
        const MOST: u8 = 12;
        let now = self.now;
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        let waits = qp.late_receive_check.is_some_and(|due| due > now);
        if qp.state != QpState::Error || qp.rq.is_none() || waits || qp.late_receive_checks == MOST
        {
            return;
        }
        let due = now.saturating_add(FIRST << qp.late_receive_checks);
        qp.late_receive_checks += 1;
        qp.late_receive_check = Some(due);
        self.late_receive_timers.insert((due, qpn));
    }

    /// Forgets to look for late receives of a queue pair.
    pub(crate) fn cancel_late_receive_check(&mut self, qpn: u32) {
        let Ok(qp) = self.objects.qps.get_mut(qpn) else { return };
        if let Some(due) = qp.late_receive_check.take() {
            self.late_receive_timers.remove(&(due, qpn));
        }
    }
}
