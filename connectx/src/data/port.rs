//! Changes of the link.

use crate::cmd::lag;
use crate::device::Device;
use crate::format::event;

impl Device {
    /// Takes the link up or down.
    pub fn set_link(&mut self, up: bool) {
        let was = self.port.active();
        self.port.link_up = up;
        if was != self.port.active() {
            self.port_changed();
        }
    }

    /// Takes a port of the LAG behind the function up or down, counted from 1; returns whether there is such a port. Queues
    /// that are to send from a port that is down send from another one.
    pub fn set_lag_port_up(&mut self, port: u32, up: bool) -> bool {
        let has = u64::from(port) <= lag::ports(&self.caps);
        let state = port.checked_sub(1).and_then(|at| self.port.lag_up.get_mut(at as usize));
        match state.filter(|_| has) {
            Some(state) => {
                *state = up;
                true
            }
            None => false,
        }
    }

    pub(crate) fn port_changed(&mut self) {
        const SUB_DOWN: u8 = 1;
        const SUB_ACTIVE: u8 = 4;
        let mut data = [0; 28];
        data[8] = 1 << 4;
        let sub_type = if self.port.active() { SUB_ACTIVE } else { SUB_DOWN };
        self.raise_async_event(event::PORT_CHANGE, sub_type, &data);
    }
}
