//! Completion queues: the device produces, we consume, and tell it how far by a doorbell record.
//!
//! An element is ours when the last bit of its last byte equals the parity of the pass over the
//! ring. Arming is the one thing that rings.

use super::book::{Book, Members};
use super::cqe::{COUNTER, INDEX, INVALID, Wc, opcode_of};
use super::record::{Record, Source};
use crate::mem::barrier::{udma_done_reading, udma_from_device, udma_to_device};
use crate::mem::dbrec::{DoorbellRecord, RecordWord};
use crate::mem::queue::{Element, Elements, QueueMemory};
use crate::mem::register::Register;
use std::sync::Arc;
use uverbs_uapi::mlx5::cqe::{
    MLX5_CQ_DB_REQ_NOT, MLX5_CQ_DB_REQ_NOT_SOL, MLX5_CQE_OWNER_MASK, mlx5_cqe_opcode as opcode,
};

/// Indices are shown to the device with as many bits.
const INDEX_BITS: u32 = 0xff_ffff;
/// Names nobody.
const NOBODY: u32 = 0;

/// Lays out `entries` of `size` bytes that the device has not written; `None` unless they fit into
/// `memory`, are a power of two, and of 64 or 128 bytes. To be done before the device knows them.
pub(crate) fn prepare(memory: &Arc<QueueMemory>, entries: u32, size: usize) -> Option<Elements> {
    let elements = Elements::new(memory.clone(), entries, size)?;
    for entry in 0..entries {
        elements.at(entry).set_owner(INVALID);
    }
    Some(elements)
}

/// The poller's side of a completion queue.
#[derive(Debug)]
pub(crate) struct CqRing {
    elements: Elements,
    /// Which bit of `consumer` is the parity of the pass.
    parity: u8,
    /// Completions consumed in all.
    consumer: u32,
    cqn: u32,
    consumed: RecordWord<0>,
    armed: RecordWord<1>,
    arming: Arc<Register>,
    members: Arc<Members>,
    book: Book,
}

/// What one element turned out to be.
enum Found {
    Nothing,
    /// Not for the user.
    Discarded,
    Completion {
        wr_id: u64,
        kind: u32,
    },
}

impl CqRing {
    /// Takes what [`prepare`] made.
    pub(crate) fn new(
        elements: Elements,
        dbrec: Arc<DoorbellRecord>,
        arming: Arc<Register>,
        cqn: u32,
    ) -> CqRing {
        CqRing {
            parity: elements.count().trailing_zeros() as u8,
            elements,
            consumer: 0,
            cqn,
            consumed: dbrec.word(),
            armed: dbrec.word(),
            arming,
            members: Members::new(),
            book: Book::default(),
        }
    }

    /// Where the control path tells of queue pairs.
    pub(crate) fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Bytes of an element.
    pub(crate) fn element_size(&self) -> usize {
        self.elements.size()
    }

    /// How many completions fit.
    pub(crate) fn capacity(&self) -> u32 {
        self.elements.count()
    }

    /// Reads what the control path wrote, if it wrote anything: one load otherwise.
    #[inline(always)]
    pub(crate) fn learn(&mut self) {
        if !self.members.is_empty() {
            self.read_letters();
        }
    }

    #[cold]
    fn read_letters(&mut self) {
        self.book.learn(&self.members, self.consumer, self.elements.count());
        // After the letters were read: what a dead queue pair completed is there by now.
        let empty = !self.is_ours(self.elements.at(self.consumer).owner(), self.consumer);
        self.book.forget(self.consumer, empty);
    }

    #[inline(always)]
    fn is_ours(&self, owner: u8, at: u32) -> bool {
        let expected = (at >> self.parity) as u8;
        (owner ^ expected) & MLX5_CQE_OWNER_MASK == 0 && owner < INVALID
    }

    /// The next completion, consumed.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Wc<'_>> {
        let (wr_id, kind) = loop {
            match self.step() {
                Found::Nothing => return None,
                Found::Discarded => {}
                Found::Completion { wr_id, kind } => break (wr_id, kind),
            }
        };
        let element = self.elements.at(self.consumer.wrapping_sub(1));
        Some(Wc { wr_id, kind, element })
    }

    #[inline(always)]
    fn step(&mut self) -> Found {
        let element = self.elements.at(self.consumer);
        let owner = element.owner();
        if !self.is_ours(owner, self.consumer) {
            return Found::Nothing;
        }
        // Pairs with the device writing the last byte of an element after all others.
        udma_from_device();
        self.consumer = self.consumer.wrapping_add(1);
        let number = element.be32::<INDEX>() & INDEX_BITS;
        if let Some(record) = self.book.get(number) {
            let at = u32::from(element.be16::<COUNTER>());
            match opcode_of(owner) {
                opcode::MLX5_CQE_REQ | opcode::MLX5_CQE_REQ_ERR => {
                    let sent = record.sends.complete(at);
                    return Found::Completion { wr_id: sent.wr_id, kind: sent.kind };
                }
                code if is_receive(code) => {
                    let wr_id = match &record.receives {
                        Source::Own(posted) => posted.complete(at),
                        Source::Shared(slots) => slots.complete(at),
                    };
                    return Found::Completion { wr_id, kind: 0 };
                }
                _ => {}
            }
        }
        self.strange(number, owner)
    }

    /// Looks again at the element before the consumer, which is of nobody in the book, or is no
    /// completion.
    #[cold]
    #[inline(never)]
    fn strange(&mut self, number: u32, owner: u8) -> Found {
        let code = opcode_of(owner);
        let receive = is_receive(code);
        if !(receive || matches!(code, opcode::MLX5_CQE_REQ | opcode::MLX5_CQE_REQ_ERR)) {
            self.release();
            return Found::Discarded;
        }
        let known = |book: &Book| book.get(number).is_some();
        if !known(&self.book) && !self.members.is_empty() {
            // Made, and already busy, since this poll began.
            self.read_letters();
            if known(&self.book) {
                self.consumer = self.consumer.wrapping_sub(1);
                return self.step_again();
            }
        }
        let element = self.elements.at(self.consumer.wrapping_sub(1));
        let at = u32::from(element.be16::<COUNTER>());
        self.book.discard(number, receive.then_some(at));
        // If nothing else comes, nobody else gives it back.
        self.release();
        Found::Discarded
    }

    #[cold]
    #[inline(never)]
    fn step_again(&mut self) -> Found {
        self.step()
    }

    /// Gives consumed elements back to the device.
    #[inline(always)]
    pub(crate) fn release(&mut self) {
        if self.elements.epoch().is_over() {
            return;
        }
        // Pairs with the device writing over elements after the record gave them back.
        udma_done_reading();
        self.consumed.set(self.consumer & INDEX_BITS);
    }

    /// Asks for an event at the next completion, or the next solicited one or error. `heard` counts
    /// the events of this queue that were taken out of its channel.
    pub(crate) fn arm(&mut self, solicited: bool, heard: u32) {
        let command = if solicited { MLX5_CQ_DB_REQ_NOT_SOL } else { MLX5_CQ_DB_REQ_NOT };
        let word = (heard & 3) << 28 | command | self.consumer & INDEX_BITS;
        self.armed.set(word);
        // The record stands before the register, which begins with a barrier of that meaning.
        let held = self.arming.hold();
        self.arming.doorbell((u64::from(word) << 32 | u64::from(self.cqn)).to_be());
        drop(held);
    }

    /// Pretends to be another queue, of which `consumer` completions were consumed.
    #[cfg(test)]
    pub(crate) fn pretend(&mut self, cqn: u32, consumer: u32) {
        (self.cqn, self.consumer) = (cqn, consumer);
    }

    /// Elements from the next to consume on that are ours.
    fn ours(&self) -> impl Iterator<Item = Element<'_>> {
        (0..self.elements.count())
            .map(|n| self.consumer.wrapping_add(n))
            .take_while(|at| self.is_ours(self.elements.at(*at).owner(), *at))
            .map(|at| self.elements.at(at))
    }

    /// Completions that are there to be consumed.
    pub(crate) fn pending(&self) -> u32 {
        self.ours().count() as u32
    }

    /// Makes nobody's what the queue holds of a queue pair that the kernel reset. Entries of a
    /// shared receive queue go back.
    pub(crate) fn purge(&mut self, record: &Record) {
        self.learn();
        let number = record.index().number();
        for element in self.ours() {
            udma_from_device();
            if element.be32::<INDEX>() & INDEX_BITS != number {
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
    pub(crate) fn exchange(&mut self, elements: Elements) {
        let parity = elements.count().trailing_zeros() as u8;
        let mut at = self.consumer;
        let mut marked = false;
        for element in self.ours() {
            udma_from_device();
            let owner = element.owner();
            if opcode_of(owner) == opcode::MLX5_CQE_RESIZE_CQ {
                marked = true;
                break;
            }
            // The mark took a number, so that everything before it moves up by one.
            let to = at.wrapping_add(1);
            let owner = owner & !MLX5_CQE_OWNER_MASK | (to >> parity) as u8 & MLX5_CQE_OWNER_MASK;
            elements.take_over(to, &self.elements, at, owner);
            at = to;
        }
        if marked {
            self.consumer = self.consumer.wrapping_add(1);
        }
        // What was copied is there before the device hears how far we are.
        udma_to_device();
        self.parity = parity;
        self.elements = elements;
        self.release();
    }
}

#[inline(always)]
fn is_receive(code: opcode) -> bool {
    matches!(
        code,
        opcode::MLX5_CQE_RESP_WR_IMM
            | opcode::MLX5_CQE_RESP_SEND
            | opcode::MLX5_CQE_RESP_SEND_IMM
            | opcode::MLX5_CQE_RESP_SEND_INV
            | opcode::MLX5_CQE_RESP_ERR
    )
}
