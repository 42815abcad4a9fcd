//! Completion queues: the device produces, we consume, and tell it how far by a doorbell record.
//!
//! An element is ours when it was written, and the last bit of its last byte equals the parity of the
//! pass over the ring. Arming is the one thing that rings.

use super::cqe::{COUNTER, INDEX, Mlx5Wc, behind, is_receive, number_of, opcode_of, received};
use super::poll_gate::PollGate;
use super::qp_table::{Leftover, QpRegistry, QpTable};
use super::wqe::pair;
use super::wr_ids::SharedQp;
use crate::memory::barrier::{udma_done_reading, udma_from_device, udma_to_device};
use crate::memory::cq_buffer::{CqBuffer, CqReader, UNWRITTEN};
use crate::memory::doorbell_record::{DoorbellRecord, Gate, RecordWord};
use crate::memory::doorbell_register::{DoorbellRegister, DoorbellRegisterWord};
use crate::memory::fork::Epoch;
use crate::memory::queue_memory::QueueMemory;
use crate::wc::WcOpcode;
use std::sync::Arc;
use uverbs_uapi::mlx5::cqe::{
    MLX5_CQ_DB_REQ_NOT, MLX5_CQ_DB_REQ_NOT_SOL, MLX5_CQE_OWNER_MASK, mlx5_cqe_opcode as opcode,
};

/// Names nobody.
const NOBODY: u32 = 0;

/// Lays out `entries` of `size` bytes that the device has not written; `None` unless they fit into
/// `memory`, are a power of two, and of 64 or 128 bytes. To be done before the device knows them.
pub(crate) fn prepare(memory: &Arc<QueueMemory>, entries: u32, size: usize) -> Option<CqBuffer> {
    let elements = CqBuffer::new(memory.clone(), entries, size)?;
    for entry in 0..entries {
        elements.at(entry).mark_unwritten();
    }
    Some(elements)
}

/// The poller's side of a completion queue.
#[derive(Debug)]
pub(crate) struct CqRing {
    // Before the memory, as it is where the kernel's object holds both.
    consumed: RecordWord<0>,
    armed: RecordWord<1>,
    reader: CqReader,
    epoch: Epoch,
    /// The queue's number, as it lies in the second half of a word of the register.
    cqn: u64,
    arming: DoorbellRegisterWord,
    members: Arc<QpRegistry>,
    book: QpTable,
    /// What [`unusual`](Self::unusual) found.
    odd: Found,
}

/// A completion, as far as it is looked at for everybody.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// The queue pair's, in the book.
    number: u32,
    wr_id: u64,
    /// What it completes.
    kind: WcOpcode,
    owner: u8,
}

impl CqRing {
    /// Takes what [`prepare`] made.
    pub(crate) fn new(
        elements: CqBuffer,
        dbrec: Arc<DoorbellRecord>,
        news: PollGate,
        arming: &Arc<DoorbellRegister>,
        cqn: u32,
    ) -> CqRing {
        CqRing {
            epoch: elements.epoch(),
            reader: CqReader::new(elements, 0),
            cqn: pair(0, cqn),
            consumed: dbrec.word(),
            armed: dbrec.word(),
            arming: arming.word(),
            members: QpRegistry::new(news),
            book: QpTable::default(),
            odd: Found::default(),
        }
    }

    /// Where the control path tells of queue pairs.
    pub(crate) fn members(&self) -> &Arc<QpRegistry> {
        &self.members
    }

    /// Throws away what the control path wrote of queue pairs that came and went. Whoever borrows the
    /// ring keeps others from polling meanwhile.
    pub(crate) fn tidy(&self) {
        if !self.epoch.is_over() {
            self.members.tidy(|| self.reader.is_empty());
        }
    }

    /// How many completions were consumed, as far as 24 bits say.
    #[inline(always)]
    pub(crate) fn consumer(&self) -> u32 {
        self.reader.consumer()
    }

    /// Bytes of an element.
    pub(crate) fn element_size(&self) -> usize {
        self.reader.elements().size()
    }

    /// How many elements there are.
    pub(crate) fn entries(&self) -> u32 {
        self.reader.elements().count()
    }

    /// How many completions fit, as the kernel counts them: one element stays free, for the mark that
    /// ends a queue which is resized.
    pub(crate) fn capacity(&self) -> u32 {
        self.entries() - 1
    }

    /// What tells whether there is something to [learn](Self::listen), and whether this is the process
    /// that made the queue.
    pub(crate) fn gate(&self) -> &Gate {
        self.members.news.gate()
    }

    /// Listens to the control path. A poll that finds the gate less than
    /// [quiet](super::poll_gate::QUIET) has to do so once, before it believes anything; not in a forked
    /// child.
    pub(crate) fn listen(&mut self) {
        if self.members.news.is_quiet() {
            return;
        }
        self.members.news.clear();
        self.learn();
        self.forget();
        if self.book.has_retired() {
            // What is there may be over by the next poll.
            self.members.news.mark_dirty();
        }
    }

    /// Reads what the control path wrote, if it wrote anything.
    fn learn(&mut self) {
        if !self.members.is_empty() {
            let entries = self.reader.elements().count();
            self.book.learn(&self.members, self.reader.consumer(), entries);
        }
    }

    fn forget(&mut self) {
        // After the letters were read: what a dead queue pair completed is there by now.
        let empty = self.reader.is_empty();
        self.book.forget(self.reader.consumer(), empty);
    }

    /// The next completion, consumed.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Mlx5Wc<'_>> {
        let owner = self.reader.look()?;
        // Pairs with the device writing the last byte of an element after all others.
        udma_from_device();
        // A loop here would be laid out for those who go round.
        let found = match self.usual(owner) {
            Some(found) => found,
            None if self.unusual(owner) => self.odd,
            None => return None,
        };
        Some(self.wc(found))
    }

    /// The next completion, consumed, if it is a success of a queue pair in the book.
    #[inline(always)]
    pub(crate) fn next_usual(&mut self) -> Option<Mlx5Wc<'_>> {
        let owner = self.reader.look()?;
        // As in `next`.
        udma_from_device();
        let found = self.usual(owner)?;
        Some(self.wc(found))
    }

    #[inline(always)]
    fn wc(&self, found: Found) -> Mlx5Wc<'_> {
        let Found { number, wr_id, kind, owner } = found;
        Mlx5Wc { number, wr_id, kind, owner, reader: &self.reader }
    }

    /// Consumes the next element if it is a success of a queue pair in the book.
    #[inline(always)]
    fn usual(&mut self, owner: u8) -> Option<Found> {
        let book = &self.book;
        self.reader.consume(|element| {
            let number = number_of(element);
            let record = book.get(number)?;
            // Records have no more places than these bits name.
            let at = element.low16::<COUNTER>();
            // Opcodes are compared where they stand, so that nothing is shifted.
            if owner < behind(opcode::MLX5_CQE_REQ) {
                let sent = record.sends.complete(at);
                // Said as it was compared, so that who asks for the status need not compare again.
                let owner = opcode::MLX5_CQE_REQ.0 << 4;
                let (wr_id, kind) = (sent.wr_id, WcOpcode(sent.kind));
                Some(Found { number, wr_id, kind, owner })
            } else if owner < behind(opcode::MLX5_CQE_RESP_SEND_INV) {
                let wr_id = record.receives.complete(at);
                Some(Found { number, wr_id, kind: received(owner), owner })
            } else {
                None
            }
        })
    }

    /// The next completion, where the next element is an error, or of nobody in the book, or no completion,
    /// or was never written: `odd` if there is one, since an answer by way of memory would keep a register of
    /// who polls.
    #[cold]
    #[inline(never)]
    fn unusual(&mut self, mut owner: u8) -> bool {
        loop {
            if owner >= UNWRITTEN {
                return false;
            }
            let mut found = self.rare(owner);
            if found.is_none() {
                let Some(next) = self.reader.look() else { return false };
                // As in `next`.
                udma_from_device();
                owner = next;
                found = self.usual(owner);
            }
            if let Some(found) = found {
                self.odd = found;
                return true;
            }
        }
    }

    /// Consumes the next element, which is as [`unusual`](Self::unusual) says, and was written; nothing if it
    /// is not for the user.
    fn rare(&mut self, owner: u8) -> Option<Found> {
        let code = opcode_of(owner);
        let element = self.reader.next();
        let number = number_of(element);
        let at = u32::from(element.be16::<COUNTER>());
        if self.book.get(number).is_none() {
            // Made, and already busy, since this poll began?
            self.learn();
            self.forget();
        }
        let sent = matches!(code, opcode::MLX5_CQE_REQ | opcode::MLX5_CQE_REQ_ERR);
        self.reader.advance();
        match self.book.get(number) {
            Some(record) if sent => {
                let sent = record.sends.complete(at);
                let (wr_id, kind) = (sent.wr_id, WcOpcode(sent.kind));
                Some(Found { number, wr_id, kind, owner })
            }
            Some(record) if is_receive(code) => {
                let wr_id = record.receives.complete(at);
                Some(Found { number, wr_id, kind: received(owner), owner })
            }
            known => {
                if known.is_none() && is_receive(code) {
                    self.book.discard(number, at);
                }
                // If nothing else comes, nobody else gives it back.
                self.release_here();
                None
            }
        }
    }

    /// As [`release`](Self::release); nothing in a forked child.
    #[inline]
    pub(crate) fn release_here(&self) {
        if !self.gate().is_shut() {
            self.release();
        }
    }

    /// Gives consumed elements back to the device. Not in a forked child, where the record may be the
    /// parent's.
    #[inline(always)]
    pub(crate) fn release(&self) {
        // Pairs with the device writing over elements after the record gave them back.
        udma_done_reading();
        self.consumed.set(self.reader.consumer());
    }

    /// Asks for an event at the next completion, or the next solicited one or error. `heard` counts
    /// the events of this queue that were taken out of its channel, in bits 28 and 29.
    #[inline(always)]
    pub(crate) fn arm(&mut self, solicited: bool, heard: u32) {
        let command = if solicited { MLX5_CQ_DB_REQ_NOT_SOL } else { MLX5_CQ_DB_REQ_NOT };
        let word = heard | command | self.reader.consumer();
        self.armed.set(word);
        // The record stands before the register, which begins with a barrier of that meaning.
        self.arming.ring(pair(word, 0) | self.cqn);
    }

    /// Pretends to be another queue, of which `consumer` completions were consumed.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn pretend(&mut self, cqn: u32, consumer: u32) {
        self.cqn = pair(0, cqn);
        self.reader = CqReader::new(self.reader.elements().clone(), consumer);
    }

    /// For a test to write completions to, where nothing was written before.
    #[cfg(test)]
    pub(crate) fn device(&self) -> super::fake_device::Device {
        let (elements, dbrec) = (self.reader.elements(), self.consumed.record().clone());
        super::fake_device::Device::new(elements.memory(), elements.count(), elements.size(), dbrec)
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        self.reader.ours().count() as u32
    }

    /// Makes nobody's what the queue holds of a queue pair that the kernel reset. Entries of a
    /// shared receive queue go back.
    pub(crate) fn purge(&mut self, record: &SharedQp) {
        self.learn();
        let number = record.index().number();
        for (_, element) in self.reader.ours() {
            udma_from_device();
            if number_of(element) != number {
                continue;
            }
            if let (true, Some(slots)) = (is_receive(opcode_of(element.owner())), record.slots()) {
                slots.complete(element.be16::<COUNTER>().into());
            }
            element.set_be32::<INDEX>(NOBODY);
        }
    }

    /// Takes over the elements that the kernel has moved the queue to, with what is left in the old
    /// ones: the device ended them with a mark.
    pub(crate) fn exchange(&mut self, elements: CqBuffer) {
        let log = elements.count().trailing_zeros();
        let mut next = self.reader.consumer();
        for (at, element) in self.reader.ours() {
            udma_from_device();
            let owner = element.owner();
            if opcode_of(owner) == opcode::MLX5_CQE_RESIZE_CQ {
                // The mark took a number, so that everything before it moves up by one.
                next = next.wrapping_add(1);
                self.book.moved();
                break;
            }
            let to = at.wrapping_add(1);
            let owner = owner & !MLX5_CQE_OWNER_MASK | (to >> log) as u8 & MLX5_CQE_OWNER_MASK;
            elements.take_over(to, self.reader.elements(), at, owner);
        }
        // What was copied is there before the device hears how far we are.
        udma_to_device();
        self.reader = CqReader::new(elements, next);
        self.release();
    }
}

impl Drop for CqRing {
    fn drop(&mut self) {
        let (reader, book) = (self.reader.clone(), std::mem::take(&mut self.book));
        self.members.inherit(Leftover { reader, book });
    }
}
