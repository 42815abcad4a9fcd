//! The limit of a shared receive queue.

use crate::device::Device;
use crate::format::event;

impl Device {
    /// Raises the limit event of an SRQ once it has fallen below its limit.
    pub(crate) fn check_limit(&mut self, number: u32) {
        let Ok(srq) = self.objects.srqs.get_mut(number) else { return };
        if srq.limit == 0 || srq.queue.posted(&self.memory).is_none_or(|posted| posted >= srq.limit)
        {
            return;
        }
        srq.limit = 0;
        let mut data = [0; 28];
        data[24..].copy_from_slice(&number.to_be_bytes());
        self.raise_async_event(event::SRQ_LIMIT, 0, &data);
    }
}
