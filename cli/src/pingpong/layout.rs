//! The places of buffers in the one memory region of all messages.

use std::ops::Range;

/// Buffers start at multiples of it, so that no two share a cache line.
const ALIGN: usize = 64;

/// Places of buffers, in bytes from the start of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    header: usize,
    size: usize,
    slots: usize,
    senders: usize,
}

impl Layout {
    /// One buffer for everything: a message is sent from where it arrived.
    pub(crate) fn shared(header: u32, size: u32) -> Self {
        Layout { header: header as usize, size: size as usize, slots: 1, senders: 0 }
    }

    /// `slots` buffers for receives and one per queue pair for sends.
    pub(crate) fn separate(header: u32, size: u32, slots: usize, qps: usize) -> Self {
        Layout { header: header as usize, size: size as usize, slots, senders: qps }
    }

    /// Receive buffers.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Send buffers.
    pub(crate) fn senders(&self) -> usize {
        self.senders.max(1)
    }

    /// A receive buffer, with the room before the message.
    pub(crate) fn recv(&self, slot: usize) -> Range<usize> {
        let start = slot * self.stride(self.header + self.size);
        start..start + self.header + self.size
    }

    /// The message in a receive buffer.
    pub(crate) fn payload(&self, slot: usize) -> Range<usize> {
        let recv = self.recv(slot);
        recv.start + self.header..recv.end
    }

    /// The message that a queue pair sends.
    pub(crate) fn send(&self, qp: usize) -> Range<usize> {
        if self.senders == 0 {
            return self.payload(0);
        }
        let start = self.slots * self.stride(self.header + self.size) + qp * self.stride(self.size);
        start..start + self.size
    }

    /// Bytes in all.
    pub(crate) fn byte_len(&self) -> usize {
        self.send(self.senders() - 1).end
    }

    fn stride(&self, length: usize) -> usize {
        match self.senders {
            0 => length,
            _ => length.next_multiple_of(ALIGN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_buffer_is_as_long_as_a_receive() {
        let layout = Layout::shared(40, 100);
        assert_eq!((layout.recv(0), layout.payload(0)), (0..140, 40..140));
        assert_eq!((layout.send(0), layout.send(15)), (40..140, 40..140));
        assert_eq!(layout.byte_len(), 140);
    }

    #[test]
    fn separate_buffers_do_not_overlap() {
        let layout = Layout::separate(40, 100, 3, 2);
        let mut buffers: Vec<_> = (0..3).map(|slot| layout.recv(slot)).collect();
        buffers.extend((0..2).map(|qp| layout.send(qp)));
        for pair in buffers.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{pair:?}");
            assert_eq!(pair[1].start % ALIGN, 0);
        }
        assert_eq!(layout.byte_len(), buffers[4].end);
        assert_eq!(layout.payload(2), buffers[2].start + 40..buffers[2].end);
    }
}
