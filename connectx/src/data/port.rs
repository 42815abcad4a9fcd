//! Changes of the link.

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

    pub(crate) fn port_changed(&mut self) {
        const SUB_DOWN: u8 = 1;
        const SUB_ACTIVE: u8 = 4;
        let mut data = [0; 28];
        data[8] = 1 << 4;
        let sub_type = if self.port.active() { SUB_ACTIVE } else { SUB_DOWN };
        self.raise_async_event(event::PORT_CHANGE, sub_type, &data);
    }
}
