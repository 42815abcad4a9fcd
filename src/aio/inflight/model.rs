//! Futures and the driver at one table at the same time.

use super::*;
use crate::memory::loan_table::lender::Lender;
use crate::number::Qpn;
use crate::wc::WcOpcode;
use loom::sync::Notify;
use loom::thread;
use std::task::Wake;

/// A task that sleeps until it is woken.
struct Task(Notify);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

fn task() -> (Arc<Task>, Waker) {
    let task = Arc::new(Task(Notify::new()));
    (task.clone(), Waker::from(task))
}

fn complete(table: &Table, cell: u32) {
    let outcome = Outcome::plain(WcStatus::SUCCESS, WcOpcode::SEND, Qpn(1));
    let mut later = Later::default();
    table.complete(cell, Side::Send, Memory::None, outcome, &mut later);
    later.run();
}

fn admit(table: &Table, waker: &Waker) -> u32 {
    match table.admit(Side::Send, &mut None, waker) {
        Admission::Open(cell) => cell,
        other => panic!("{other:?}"),
    }
}

/// A request completes while its future looks: the future is over, or is woken. Both are
/// threads of their own, here and below: the model's first is not preempted as others are.
#[test]
fn look_while_a_request_completes() {
    loom::model(|| {
        let table = Table::new(None);
        let (task, waker) = task();
        let cell = admit(&table, &waker);
        let theirs = table.clone();
        let driver = thread::spawn(move || complete(&theirs, cell));
        let theirs = table.clone();
        let future = thread::spawn(move || {
            while let Progress::UnderWay = theirs.progress(cell, &waker) {
                task.0.wait();
            }
        });
        driver.join().unwrap();
        future.join().unwrap();
        assert_eq!(table.under_way(), 0);
    });
}

/// A future is dropped while its request completes: its cell is free afterwards.
#[test]
fn drop_while_a_request_completes() {
    loom::model(|| {
        let table = Table::new(None);
        let (_, waker) = task();
        let cell = admit(&table, &waker);
        let theirs = table.clone();
        let driver = thread::spawn(move || complete(&theirs, cell));
        let theirs = table.clone();
        let future = thread::spawn(move || theirs.abandon(cell));
        driver.join().unwrap();
        future.join().unwrap();
        let state = table.state().unwrap();
        assert_eq!((state.cells.len(), &state.free[..]), (1, &[0][..]));
    });
}

/// The queue is full while a future looks for room, and something completes: the future finds
/// the room, or is woken. The slots stand for the queue.
#[test]
fn look_for_room_while_a_request_completes() {
    loom::model(|| {
        let table = Table::new(None);
        let mut queue = Lender::new(1, 0);
        let (_, other) = task();
        let cell = admit(&table, &other);
        let mut lending = queue.begin();
        let ticket = lending.vacancy().map(|vacancy| {
            let ticket = vacancy.ticket();
            vacancy.lend(());
            ticket
        });
        lending.hand_over();
        let (theirs, slots) = (table.clone(), queue.slots().clone());
        let driver = thread::spawn(move || {
            slots.settle(ticket.unwrap()).unwrap().take();
            complete(&theirs, cell);
        });
        let future = thread::spawn(move || {
            let (task, waker) = task();
            let mut number = None;
            loop {
                let Admission::Open(cell) = table.admit(Side::Send, &mut number, &waker) else {
                    panic!("nobody else stands in line");
                };
                if queue.begin().vacancy().is_some() {
                    break;
                }
                table.wait(Side::Send, &mut number, &waker);
                if queue.begin().vacancy().is_some() {
                    break;
                }
                table.dismiss(cell);
                task.0.wait();
            }
        });
        driver.join().unwrap();
        future.join().unwrap();
    });
}
