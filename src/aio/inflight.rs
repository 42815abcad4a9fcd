//! What futures and the driver share: which requests are under way, who waits for them, and who
//! waits for room. Model-checked with loom.

use super::deferred::Later;
use super::waiters::{Waiters, take};
use crate::error::Error;
use crate::memory::lock::{Guard, Lock};
use crate::owned::{Memory, Outcome};
use crate::qp::{QpAttr, QpControl, QpInner, QpState};
use crate::wc::WcStatus;
use std::fmt;
use std::sync::{Arc, Weak};
use std::task::Waker;

/// Which queue of a table a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Recv,
}

/// What a request is posted with: who is to hear of its end.
#[derive(Debug)]
pub(super) struct Tag {
    pub(super) table: Arc<Table>,
    pub(super) cell: u32,
    pub(super) side: Side,
}

/// A request, seen from its future.
#[derive(Debug)]
enum Cell {
    Free,
    /// Under way.
    Open(Waker),
    /// Under way, and nobody waits for it.
    Abandoned,
    Over(Memory, Outcome),
}

/// Why nothing can be posted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// A request failed, and with it the connection.
    Failed(WcStatus),
    /// Nobody looks for completions.
    Undriven,
    /// This process is a child of the one that made the queue.
    Forked,
}

#[derive(Debug, Default)]
struct State {
    cells: Vec<Cell>,
    free: Vec<u32>,
    sends: Waiters,
    recvs: Waiters,
    broken: Option<Broken>,
}

impl State {
    fn waiters(&mut self, side: Side) -> &mut Waiters {
        match side {
            Side::Send => &mut self.sends,
            Side::Recv => &mut self.recvs,
        }
    }

    fn open(&mut self, waker: Waker) -> u32 {
        let cell = Cell::Open(waker);
        match self.free.pop() {
            Some(index) => {
                if let Some(place) = self.cells.get_mut(index as usize) {
                    *place = cell;
                }
                index
            }
            None => {
                self.cells.push(cell);
                (self.cells.len() - 1) as u32
            }
        }
    }

    /// Lets nobody in any more, and tells those who wait for that.
    fn break_with(&mut self, broken: Broken, later: &mut Later) {
        self.broken = Some(broken);
        for waker in self.sends.dismiss().chain(self.recvs.dismiss()) {
            later.wake(waker);
        }
    }

    /// Takes a cell out of use, and what is in it.
    fn close(&mut self, index: u32) -> Cell {
        let Some(place) = self.cells.get_mut(index as usize) else { return Cell::Free };
        self.free.push(index);
        std::mem::replace(place, Cell::Free)
    }
}

/// Whether a request may be posted now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Yes, and this is its cell.
    Open(u32),
    /// Others came first.
    Wait,
    Broken(Broken),
}

/// How a request stands.
#[derive(Debug)]
pub(super) enum Progress {
    UnderWay,
    Over(Memory, Outcome),
    /// It will not be heard of.
    Lost(Broken),
}

/// Brings a queue pair that is still there to state [`ERR`](QpState::ERR).
pub(super) fn flush(qp: Option<&Weak<QpInner>>) -> crate::Result<()> {
    match qp.and_then(Weak::upgrade) {
        Some(qp) => QpControl { qp }.modify(&QpAttr::new().state(QpState::ERR)),
        None => Ok(()),
    }
}

/// The requests of one queue pair, or of one shared receive queue.
///
/// No code of the program runs under the lock: wakers are cloned before, and woken and dropped after.
pub(super) struct Table {
    state: Lock<State>,
    /// What has to be told when a request fails; not for shared receive queues. Tags keep the
    /// table, and must not keep the queue pair.
    qp: Option<Weak<QpInner>>,
}

impl Table {
    pub(super) fn new(qp: Option<&QpControl>) -> Arc<Table> {
        let qp = qp.map(|control| Arc::downgrade(&control.qp));
        Arc::new(Table { state: Lock::default(), qp })
    }

    /// `None` in a forked child, where no request is under way.
    fn state(&self) -> Option<Guard<'_, State>> {
        self.state.lock()
    }

    /// Lets a request in if nobody is before it in the line.
    pub(super) fn admit(&self, side: Side, number: &mut Option<u64>, waker: &Waker) -> Admission {
        let waker = waker.clone();
        let Some(mut state) = self.state() else { return Admission::Broken(Broken::Forked) };
        if let Some(broken) = state.broken {
            drop(state);
            return Admission::Broken(broken);
        }
        let waiters = state.waiters(side);
        if !waiters.is_turn(*number) {
            let old = waiters.stand(number, waker);
            drop(state);
            drop(old);
            return Admission::Wait;
        }
        Admission::Open(state.open(waker))
    }

    /// Puts who found the queue full in line. Look for room once more afterwards: what completed
    /// before this call woke nobody.
    pub(super) fn wait(&self, side: Side, number: &mut Option<u64>, waker: &Waker) {
        let waker = waker.clone();
        let Some(mut state) = self.state() else { return };
        let old = state.waiters(side).stand(number, waker);
        drop(state);
        drop(old);
    }

    /// Takes back the admission of a request that was not posted.
    pub(super) fn dismiss(&self, cell: u32) {
        let Some(mut state) = self.state() else { return };
        let open = state.close(cell);
        drop(state);
        drop(open);
    }

    /// Leaves the line, because the request is posted or not wanted any more. The next may find
    /// room, too.
    pub(super) fn leave(&self, side: Side, number: &mut Option<u64>) {
        let Some(number) = number.take() else { return };
        let Some(mut state) = self.state() else { return };
        let [left, next] = state.waiters(side).leave(number);
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
        drop(left);
    }

    /// How the request of a cell stands. One that is not under way has left its cell.
    pub(super) fn progress(&self, cell: u32, waker: &Waker) -> Progress {
        // Of the waker, if it is another than that which waits: made without the lock.
        let mut fresh = None;
        loop {
            let Some(mut state) = self.state() else { return Progress::Lost(Broken::Forked) };
            let broken = state.broken;
            let (progress, left) = match state.cells.get_mut(cell as usize) {
                Some(place @ Cell::Open(_)) if broken == Some(Broken::Undriven) => {
                    let open = std::mem::replace(place, Cell::Abandoned);
                    (Progress::Lost(Broken::Undriven), open)
                }
                Some(Cell::Open(old)) if old.will_wake(waker) => (Progress::UnderWay, Cell::Free),
                Some(Cell::Open(old)) => match fresh.take() {
                    Some(new) => (Progress::UnderWay, Cell::Open(std::mem::replace(old, new))),
                    None => {
                        drop(state);
                        fresh = Some(waker.clone());
                        continue;
                    }
                },
                _ => match state.close(cell) {
                    Cell::Over(memory, outcome) => (Progress::Over(memory, outcome), Cell::Free),
                    left => (Progress::Lost(Broken::Undriven), left),
                },
            };
            drop(state);
            drop(left);
            return progress;
        }
    }

    /// Nobody waits for the request of a cell any more. What it works on stays lent until it is
    /// over.
    pub(super) fn abandon(&self, cell: u32) {
        let Some(mut state) = self.state() else { return };
        let left = match state.cells.get_mut(cell as usize) {
            Some(place @ Cell::Open(_)) => std::mem::replace(place, Cell::Abandoned),
            _ => state.close(cell),
        };
        drop(state);
        // Not under the lock: it may be the last part of a region, or the last that holds a task.
        drop(left);
    }

    /// Notes that a request is over, and what is to be done about it.
    pub(super) fn complete(
        &self,
        cell: u32,
        side: Side,
        memory: Memory,
        outcome: Outcome,
        later: &mut Later,
    ) {
        let Some(mut state) = self.state() else { return later.drop(memory) };
        let first = !outcome.is_success() && self.qp.is_some() && state.broken.is_none();
        if first {
            state.break_with(Broken::Failed(outcome.status), later);
        }
        state.waiters(side).first().into_iter().for_each(|waker| later.wake(waker));
        match state.cells.get_mut(cell as usize) {
            Some(place @ Cell::Open(_)) => {
                if let Cell::Open(waker) = std::mem::replace(place, Cell::Over(memory, outcome)) {
                    later.wake(waker);
                }
            }
            _ => {
                state.close(cell);
                later.drop(memory);
            }
        }
        drop(state);
        if first {
            // The device did this itself; saying it again makes rxe flush receives that were
            // posted since.
            later.flush(self.qp.clone());
        }
    }

    /// Lets nothing be posted any more, and the device flush what is.
    pub(super) fn abort(&self) -> crate::Result<()> {
        let mut later = Later::default();
        let Some(mut state) = self.state() else { return Err(Error::forked("abort")) };
        if state.broken.is_none() {
            state.break_with(Broken::Failed(WcStatus::WR_FLUSH_ERR), &mut later);
        }
        drop(state);
        // After that, so that whoever posts meanwhile learns of it: see `posted`.
        let answer = self.flush();
        later.run();
        answer
    }

    fn flush(&self) -> crate::Result<()> {
        flush(self.qp.as_ref())
    }

    /// To be called after a receive was posted: if the connection broke after the receive was let
    /// in, nobody else would tell rxe to flush it.
    pub(super) fn posted(&self) {
        // Whoever breaks it does so under this lock, and tells the device afterwards: either they
        // see the receive, or we see what they did.
        let broken = self.state().and_then(|state| state.broken);
        if matches!(broken, Some(Broken::Failed(_))) {
            let _ = self.flush();
        }
    }

    /// Nobody will look for completions any more: everybody is to hear that.
    pub(super) fn undrive(&self, later: &mut Later) {
        let Some(mut state) = self.state() else { return };
        state.break_with(Broken::Undriven, later);
        for cell in &mut state.cells {
            if let Cell::Open(waker) = cell {
                later.wake(take(waker));
            }
        }
    }

    /// As [`undrive`](Self::undrive), for one queue pair that the device has given up.
    pub(super) fn give_up(&self) {
        let mut later = Later::default();
        self.undrive(&mut later);
        later.run();
    }

    /// Requests under way, abandoned ones included.
    pub(super) fn under_way(&self) -> usize {
        let Some(state) = self.state() else { return 0 };
        let open = |cell: &&Cell| matches!(cell, Cell::Open(_) | Cell::Abandoned);
        state.cells.iter().filter(open).count()
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("under_way", &self.under_way()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::number::Qpn;
    use crate::wc::WcOpcode;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn waker() -> (Arc<Count>, Waker) {
        let count = Arc::<Count>::default();
        (count.clone(), Waker::from(count))
    }

    fn finish(table: &Table, cell: u32) -> usize {
        let mut later = Later::default();
        table.complete(cell, Side::Send, Memory::None, outcome(), &mut later);
        let woken = later.wakers();
        later.run();
        woken
    }

    pub(super) fn outcome() -> Outcome {
        Outcome::plain(WcStatus::SUCCESS, WcOpcode::SEND, Qpn(1))
    }

    #[test]
    fn who_came_first_goes_first() {
        let table = Table::new(None);
        let (first, one) = waker();
        let (second, two) = waker();
        let (mut a, mut b) = (None, None);
        table.wait(Side::Send, &mut a, &one);
        assert_eq!(table.admit(Side::Send, &mut b, &two), Admission::Wait);
        assert!(matches!(table.admit(Side::Recv, &mut None, &two), Admission::Open(_)));
        let Admission::Open(cell) = table.admit(Side::Send, &mut a, &one) else { panic!("first") };
        table.leave(Side::Send, &mut a);
        assert_eq!(second.0.load(Ordering::Relaxed), 1, "the next may find room, too");
        // Who was told and goes away tells the next.
        let (third, three) = waker();
        let mut c = None;
        assert_eq!(table.admit(Side::Send, &mut c, &three), Admission::Wait);
        table.leave(Side::Send, &mut b);
        assert_eq!(third.0.load(Ordering::Relaxed), 1);
        assert_eq!(finish(&table, cell), 2, "who waits for the request, and for room");
        assert_eq!(first.0.load(Ordering::Relaxed), 1);
        assert!(matches!(table.progress(cell, &one), Progress::Over(..)));
    }

    /// A task that is held by its waker alone, and that has a request of the same table.
    struct Holder(Arc<Table>, u32);

    impl Wake for Holder {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            self.0.abandon(self.1);
        }
    }

    /// A waker that goes may take futures of the same queue along, which would wait for the lock.
    #[test]
    fn wakers_are_dropped_without_the_lock() {
        let (_, other) = waker();
        let admit = |table: &Table, waker: &Waker| match table.admit(Side::Send, &mut None, waker) {
            Admission::Open(cell) => cell,
            admission => panic!("{admission:?}"),
        };
        let end: [fn(&Table, u32, &Waker); 4] = [
            |table, cell, other| assert!(matches!(table.progress(cell, other), Progress::UnderWay)),
            |table, cell, _| table.abandon(cell),
            |table, cell, _| table.dismiss(cell),
            |table, cell, _| assert_eq!(finish(table, cell), 1),
        ];
        for end in end {
            let table = Table::new(None);
            let held = admit(&table, &other);
            let holder = Waker::from(Arc::new(Holder(table.clone(), held)));
            let cell = admit(&table, &holder);
            drop(holder);
            end(&table, cell, &other);
            assert!(matches!(table.state().unwrap().cells[held as usize], Cell::Abandoned));
        }
        // The same in line.
        let end: [fn(&Table, &mut Option<u64>, &Waker); 2] = [
            |table, number, other| table.wait(Side::Send, number, other),
            |table, number, _| table.leave(Side::Send, number),
        ];
        for end in end {
            let table = Table::new(None);
            let held = admit(&table, &other);
            let holder = Waker::from(Arc::new(Holder(table.clone(), held)));
            let mut number = None;
            table.wait(Side::Send, &mut number, &holder);
            drop(holder);
            end(&table, &mut number, &other);
            assert!(matches!(table.state().unwrap().cells[held as usize], Cell::Abandoned));
        }
    }

    /// A request under way, one in line, and one that is dropped before it got there.
    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_child_waits_for_nobody_at_a_table() {
        let table = Table::new(None);
        let (count, waker) = waker();
        let Admission::Open(cell) = table.admit(Side::Send, &mut None, &waker) else { panic!() };
        let mut number = None;
        table.wait(Side::Send, &mut number, &waker);
        crate::memory::lock::in_child_while_held(
            || table.state(),
            || {
                let mut number = number;
                let admission = table.admit(Side::Send, &mut number, &waker);
                assert_eq!(admission, Admission::Broken(Broken::Forked));
                let progress = table.progress(cell, &waker);
                assert!(matches!(progress, Progress::Lost(Broken::Forked)));
                table.wait(Side::Recv, &mut None, &waker);
                table.leave(Side::Send, &mut number);
                table.abandon(cell);
                table.dismiss(cell);
                table.posted();
                table.give_up();
                assert!(table.abort().unwrap_err().is_forked());
                assert_eq!((table.under_way(), finish(&table, cell)), (0, 0));
                assert_eq!(count.0.load(Ordering::Relaxed), 0, "a task of the parent was woken");
            },
        );
        assert_eq!(table.under_way(), 1);
    }

    /// A task that waits for many requests is woken when all that completed are noted.
    #[test]
    fn wake_ups_come_after_a_whole_look() {
        let table = Table::new(None);
        let (count, waker) = waker();
        let mut later = Later::default();
        let cells = [(); 3].map(|()| match table.admit(Side::Send, &mut None, &waker) {
            Admission::Open(cell) => cell,
            admission => panic!("{admission:?}"),
        });
        for cell in cells {
            table.complete(cell, Side::Send, Memory::None, outcome(), &mut later);
            assert_eq!(count.0.load(Ordering::Relaxed), 0, "others are not noted yet");
        }
        later.run();
        assert_eq!(count.0.load(Ordering::Relaxed), 3);
        assert!(
            cells.iter().all(|&cell| matches!(table.progress(cell, &waker), Progress::Over(..)))
        );
    }

    #[test]
    fn nobody_is_told_of_an_abandoned_request() {
        let table = Table::new(None);
        let (count, waker) = waker();
        for late in [false, true] {
            let Admission::Open(cell) = table.admit(Side::Send, &mut None, &waker) else {
                panic!("room");
            };
            if late {
                assert_eq!(finish(&table, cell), 1);
                table.abandon(cell);
            } else {
                table.abandon(cell);
                assert_eq!((table.under_way(), finish(&table, cell)), (1, 0));
            }
            assert_eq!(table.under_way(), 0);
        }
        assert_eq!((count.0.load(Ordering::Relaxed), table.state().unwrap().cells.len()), (1, 1));
    }
}

#[cfg(all(test, loom))]
mod model;
