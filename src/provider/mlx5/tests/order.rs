//! The order of accesses to memory, records and registers. If any one of the barriers, or the lock,
//! is missing, a test here fails.

use super::{Completed, Receiver, SGE, Sender, Shape, SharedReceiver, cqe};
use crate::memory::queue_memory::QueueMemory;
use crate::memory::recorded_order::{RecordedStep, steps_of};
use crate::provider::mlx5::cq;
use crate::wr::{RecvWr, SendWr};
use std::sync::Arc;

#[test]
fn a_request_then_its_record_then_the_register() {
    let mut sends = Sender::new(Shape::default());
    let wr = SendWr::send(&[SGE]);
    let steps = steps_of(|| assert!(sends.post(&[wr]).is_ok()));
    let expected = [
        RecordedStep::Request,
        RecordedStep::ToDevice,
        RecordedStep::Record(1),
        RecordedStep::Lock,
        RecordedStep::WcStart,
        RecordedStep::BlueFlame,
        RecordedStep::Flush,
        RecordedStep::Unlock,
    ];
    assert_eq!(steps, expected);
    let steps = steps_of(|| assert!(sends.post(&[wr, wr]).is_ok()));
    assert_eq!(steps[..5], expected[..5]);
    assert_eq!(steps[5..], [RecordedStep::Doorbell, RecordedStep::Flush, RecordedStep::Unlock]);
}

#[test]
fn a_queue_with_its_own_register_takes_no_lock() {
    let mut sends = Sender::new(Shape { owns_register: true, ..Shape::default() });
    let steps = steps_of(|| assert!(sends.post(&[SendWr::send(&[])]).is_ok()));
    assert_eq!(
        steps,
        [
            RecordedStep::Request,
            RecordedStep::ToDevice,
            RecordedStep::Record(1),
            RecordedStep::WcStart,
            RecordedStep::Doorbell,
            RecordedStep::Flush
        ]
    );
}

#[test]
fn receives_then_their_record() {
    let recv = RecvWr::new(&[SGE]).id(1);
    let expected = [RecordedStep::Request, RecordedStep::ToDevice, RecordedStep::Record(0)];
    let mut receiver = Receiver::new(4, 16);
    assert_eq!(steps_of(|| assert!(receiver.post(&[recv, recv]).is_ok())), expected);
    let mut shared = SharedReceiver::new(4, 32);
    assert_eq!(steps_of(|| assert!(shared.post(&[recv, recv]).is_ok())), expected);
}

#[test]
fn the_owner_then_the_rest_then_the_record() {
    let sends = Sender::new(Shape::default());
    let mut completed = Completed::new(4, 64);
    completed.ring.registry().attach(&sends.qp);
    // Reads the update that attaches the queue pair.
    completed.write(cqe(0, 1, 0, 0));
    assert!(completed.next().is_some());
    assert_eq!(steps_of(|| assert!(completed.next().is_none())), [RecordedStep::OpOwn]);
    completed.write(cqe(0, 1, 0, 0));
    let steps = steps_of(|| {
        assert!(completed.next().unwrap().status().0 == 0);
        completed.ring.release();
    });
    let expected = [
        RecordedStep::OpOwn,
        RecordedStep::FromDevice,
        RecordedStep::Completion,
        RecordedStep::DoneReading,
        RecordedStep::Record(0),
    ];
    assert_eq!(steps, expected);
}

/// A CQE that names no queue pair is returned to the device, and the next CQE has a barrier of its own.
#[test]
fn each_cqe_is_behind_a_barrier() {
    let sends = Sender::new(Shape::default());
    let mut completed = Completed::new(4, 64);
    completed.ring.registry().attach(&sends.qp);
    completed.write(cqe(0, 1, 0, 0));
    assert!(completed.next().is_some());
    completed.write(cqe(0, 99, 0, 0));
    completed.write(cqe(0, 1, 0, 0));
    let steps = steps_of(|| assert!(completed.ring.next().is_some()));
    let expected = [
        RecordedStep::DoneReading,
        RecordedStep::Record(0),
        RecordedStep::OpOwn,
        RecordedStep::FromDevice,
        RecordedStep::Completion,
    ];
    assert!(steps.ends_with(&expected), "{steps:?}");
}

#[test]
fn cqes_that_a_reset_discards_are_read_behind_a_barrier() {
    let sends = Sender::new(Shape::default());
    let mut completed = Completed::new(4, 64);
    completed.write(cqe(0, 1, 0, 0));
    let steps = steps_of(|| completed.ring.purge(&sends.qp));
    let expected = [
        RecordedStep::OpOwn,
        RecordedStep::FromDevice,
        RecordedStep::Completion,
        RecordedStep::OpOwn,
    ];
    assert_eq!(steps, expected);
}

#[test]
fn cqes_that_nobody_polled_are_read_behind_a_barrier() {
    let mut completed = Completed::new(4, 64);
    completed.write(cqe(0, 1, 0, 0));
    let Completed { ring, .. } = completed;
    let registry = ring.registry().clone();
    drop(ring);
    let steps = steps_of(|| drop(registry));
    assert_eq!(steps, [RecordedStep::OpOwn, RecordedStep::FromDevice, RecordedStep::OpOwn]);
}

#[test]
fn cqes_are_copied_before_the_record_of_a_resized_queue() {
    let mut completed = Completed::new(4, 64);
    completed.write(cqe(0, 1, 0, 0));
    let memory = Arc::new(QueueMemory::pages(8 * 64).unwrap());
    let cqes = cq::prepare(&memory, 8, 64).unwrap();
    let steps = steps_of(|| completed.ring.exchange(cqes));
    let expected = [
        RecordedStep::OpOwn,
        RecordedStep::FromDevice,
        RecordedStep::OpOwn,
        RecordedStep::ToDevice,
        RecordedStep::DoneReading,
        RecordedStep::Record(0),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn arming_is_recorded_and_then_rung() {
    let completed = Completed::new(4, 64);
    let steps = steps_of(|| {
        completed.ring.arm(false, 0);
    });
    // No lock: a word is one store.
    assert_eq!(
        steps,
        [
            RecordedStep::Record(1),
            RecordedStep::WcStart,
            RecordedStep::Doorbell,
            RecordedStep::Flush
        ]
    );
}
