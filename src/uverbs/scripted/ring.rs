//! The kernel's end of a scripted queue: a memfd, which the library maps as it would map rxe's queue, and
//! which the test reads and writes by system calls.

use crate::memory::fake_mapping::FakeMapping;
use std::mem::offset_of;
use uverbs_uapi::rxe::rxe_queue_buf;
use zerocopy::{FromBytes, IntoBytes};

const HEADER: u64 = size_of::<rxe_queue_buf>() as u64;
/// rxe's elements fill at least a cache line.
const MIN_STRIDE: usize = 64;

/// A queue as rxe lays one out.
#[derive(Debug)]
pub(super) struct KernelRing {
    file: FakeMapping,
    slots: u32,
    stride: u32,
}

impl KernelRing {
    /// A queue for at least `entries` elements of `size` bytes. `name` shows up in
    /// `/proc/self/maps` for as long as the queue is mapped.
    pub(super) fn new(name: &str, entries: u32, size: usize) -> KernelRing {
        let slots = (entries + 1).next_power_of_two();
        let stride = size.max(MIN_STRIDE).next_power_of_two() as u32;
        let file = FakeMapping::new(name, HEADER as usize + slots as usize * stride as usize);
        let header = rxe_queue_buf {
            log2_elem_size: stride.trailing_zeros(),
            index_mask: slots - 1,
            ..Default::default()
        };
        let ring = KernelRing { file, slots, stride };
        ring.file.write(0, header.as_bytes());
        ring
    }

    pub(super) fn file(&self) -> &FakeMapping {
        &self.file
    }

    pub(super) fn size(&self) -> u32 {
        HEADER as u32 + self.slots * self.stride
    }

    pub(super) fn capacity(&self) -> u32 {
        self.slots - 1
    }

    pub(super) fn producer(&self) -> u32 {
        self.index(offset_of!(rxe_queue_buf, producer_index))
    }

    pub(super) fn consumer(&self) -> u32 {
        self.index(offset_of!(rxe_queue_buf, consumer_index))
    }

    pub(super) fn set_producer(&self, index: u32) {
        self.set_index(offset_of!(rxe_queue_buf, producer_index), index);
    }

    pub(super) fn set_consumer(&self, index: u32) {
        self.set_index(offset_of!(rxe_queue_buf, consumer_index), index);
    }

    /// Writes both indices, in the range of the ring or not.
    pub(super) fn scribble(&self, producer: u32, consumer: u32) {
        self.file.write(offset_of!(rxe_queue_buf, producer_index) as u64, producer.as_bytes());
        self.file.write(offset_of!(rxe_queue_buf, consumer_index) as u64, consumer.as_bytes());
    }

    /// Elements that are neither free nor consumed.
    pub(super) fn pending(&self) -> u32 {
        self.producer().wrapping_sub(self.consumer()) & (self.slots - 1)
    }

    /// Produces an element; `false` if the queue is full.
    pub(super) fn put(&self, bytes: &[u8]) -> bool {
        if self.pending() == self.capacity() {
            return false;
        }
        let at = self.producer();
        self.file.write(self.place(at), bytes);
        self.set_producer(at + 1);
        true
    }

    /// The oldest element that is not consumed; stays where it is.
    pub(super) fn peek(&self) -> Option<Vec<u8>> {
        (self.pending() > 0)
            .then(|| self.file.read(self.place(self.consumer()), self.stride as usize))
    }

    /// Consumes the oldest element.
    pub(super) fn take(&self) -> Option<Vec<u8>> {
        let element = self.peek()?;
        self.set_consumer(self.consumer() + 1);
        Some(element)
    }

    /// Overwrites all elements, as earlier ones would.
    pub(super) fn poison(&self) {
        self.file.write(HEADER, &vec![0xa5; (self.slots * self.stride) as usize]);
    }

    fn place(&self, index: u32) -> u64 {
        HEADER + u64::from(index & (self.slots - 1)) * u64::from(self.stride)
    }

    fn index(&self, offset: usize) -> u32 {
        let bytes = self.file.read(offset as u64, size_of::<u32>());
        u32::read_from_bytes(&bytes).expect("four bytes")
    }

    fn set_index(&self, offset: usize, index: u32) {
        self.file.write(offset as u64, (index & (self.slots - 1)).as_bytes());
    }
}
