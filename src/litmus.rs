//! The hand-offs of `tests/litmus`, each as one function, for `cargo ci soak litmus`: it compiles this file with
//! `--cfg litmus` and compares the loads, stores and barriers with those of the tests.
//!
//! The functions call the data path itself: a copy of its sequence written here would prove nothing.
#![allow(missing_docs, private_interfaces)]

use crate::lending::loan_table::LoanTable;
use crate::lending::loan_table::lender::{FreeSlot, Lender};
use crate::memory::buffer_slab::{BufferSlab, SlabBuffer};
use crate::memory::doorbell_register::DoorbellRegister;
use crate::memory::mmio_page::MmioPage;
use crate::memory::mmio_window::MmioWindow;
use crate::memory::rxe_queue::{ProducerWatch, RxeQueue};
use crate::provider::mlx5::cq::Mlx5Cq;
use crate::provider::mlx5::rq::Mlx5Rq;
use crate::provider::mlx5::sq::Mlx5Sq;
use crate::provider::mlx5::srq::Mlx5Srq;
use crate::provider::mlx5::srq_wr_ids::SrqWrIds;
use crate::provider::mlx5::wr_ids::{RqWrIds, SqWrIds};
use crate::provider::poll_gate::PollGate;
use crate::provider::rxe::retired::Retirements;
use crate::provider::{RecvCursor, SendCursor};
use crate::sync::update_list::UpdateList;
use crate::wr::{RecvWr, SendWr, Sge};
use std::sync::Arc;

// Requests are posted one by one, of one SGE: the paths of other requests differ before the first barrier.

#[inline(never)]
pub fn post_send(ring: &mut Mlx5Sq, cursor: &mut SendCursor, sges: &[Sge; 1]) -> bool {
    ring.try_push(cursor, &SendWr::send(sges)) && ring.ring(cursor, true).is_ok()
}

#[inline(never)]
pub fn post_recv(ring: &mut Mlx5Rq, cursor: &mut RecvCursor, sges: &[Sge; 1]) -> bool {
    let pushed = ring.try_push(cursor, &RecvWr::new(sges));
    if pushed {
        ring.ring(*cursor);
    }
    pushed
}

#[inline(never)]
pub fn post_srq(ring: &mut Mlx5Srq, cursor: &mut RecvCursor, sges: &[Sge; 1]) -> bool {
    let pushed = ring.try_push(cursor, &RecvWr::new(sges));
    if pushed {
        ring.ring(*cursor, 1);
    }
    pushed
}

#[inline(never)]
pub fn ring_shared(register: &DoorbellRegister, word: u64) {
    let held = register.hold();
    register.doorbell(word);
    drop(held);
}

#[inline(never)]
pub fn begin_send(ring: &Mlx5Sq) -> u32 {
    ring.begin().room
}

#[inline(never)]
pub fn begin_recv(ring: &Mlx5Rq) -> u32 {
    ring.begin().room
}

#[inline(never)]
pub fn begin_srq(ring: &mut Mlx5Srq) -> u32 {
    ring.begin().free
}

#[inline(never)]
pub fn poll_next(ring: &mut Mlx5Cq) -> Option<u64> {
    ring.next_success().map(|wc| wc.wr_id)
}

#[inline(never)]
pub fn poll_release(ring: &Mlx5Cq) {
    ring.release();
}

#[inline(never)]
pub fn arm(ring: &mut Mlx5Cq) {
    ring.arm(false, 0);
}

#[inline(never)]
pub fn complete_send(wr_ids: &SqWrIds, at: u32) -> u64 {
    wr_ids.complete(at).wr_id
}

#[inline(never)]
pub fn complete_recv(wr_ids: &RqWrIds, at: u32) -> u64 {
    wr_ids.complete(at)
}

#[inline(never)]
pub fn complete_srq(wr_ids: &SrqWrIds, at: u32) -> u64 {
    wr_ids.complete(at)
}

#[inline(never)]
pub fn put_update(list: &UpdateList<u64>, value: u64) {
    list.put(value);
}

#[inline(never)]
pub fn take_updates(list: &UpdateList<u64>) -> u64 {
    let mut sum = 0u64;
    list.take(|value| sum = sum.wrapping_add(value));
    sum
}

#[inline(never)]
pub fn mark_dirty(gate: &PollGate) {
    gate.mark_dirty();
}

#[inline(never)]
pub fn clear(gate: &PollGate) {
    gate.clear();
}

#[inline(never)]
pub fn free_slot(lender: &mut Lender<u64>) -> bool {
    lender.begin().free_slot().is_some()
}

#[inline(never)]
pub fn lend(slot: FreeSlot<'_, u64>, payload: u64) {
    slot.lend(payload);
}

#[inline(never)]
pub fn take_back(table: &LoanTable<u64>, wr_id: u64) -> Option<u64> {
    table.take_back(wr_id).map(|loan| loan.take())
}

#[inline(never)]
pub fn take_buffer(slab: &Arc<BufferSlab<(), ()>>) -> Option<SlabBuffer<(), ()>> {
    slab.take()
}

#[inline(never)]
pub fn window_store(window: &MmioWindow, word: &[u8; 4]) -> bool {
    window.store(0, word).is_some()
}

#[inline(never)]
pub fn page_store(page: &MmioPage, word: u64) -> bool {
    page.store(0, word).is_some()
}

#[inline(never)]
pub fn page_load(page: &MmioPage) -> Option<u32> {
    page.load(0)
}

#[inline(never)]
pub fn rxe_post(queue: &RxeQueue, index: u32, value: &u64) -> bool {
    let written = queue.write(index, 0, value);
    if written {
        queue.publish_producer(index);
    }
    written
}

#[inline(never)]
pub fn rxe_room(queue: &RxeQueue) -> u32 {
    queue.consumer()
}

#[inline(never)]
pub fn rxe_poll(queue: &RxeQueue) -> Option<u64> {
    let at = queue.producer();
    if at == 0 { None } else { queue.read(at) }
}

#[inline(never)]
pub fn rxe_release(queue: &RxeQueue, index: u32) {
    queue.publish_consumer(index);
}

#[inline(never)]
pub fn rxe_release_position(retirements: &Retirements<ProducerWatch>, position: u64) {
    retirements.release(position);
}
