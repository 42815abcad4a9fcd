//! Tasks that share a channel, in loom's interleavings. The kernel has no events, and carries out every command.

use super::event::Event;
pub(crate) use super::id::IdInner as Inner;
use super::id::IdInner;
use super::id::events::{EventWait, Waiting};
use super::port_space::PortSpace;
use super::ucma::{UcmaCommand, UcmaFile};
use super::{EventChannel, Step};
use crate::error::{Error, Result};
use crate::qp::QpType;
use loom::sync::Notify;
use loom::thread;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use uverbs_uapi::rdma_user_cm::*;

#[derive(Debug)]
struct Silent(OwnedFd);

impl UcmaFile for Silent {
    fn execute(&self, command: UcmaCommand<'_>) -> std::result::Result<(), Errno> {
        match command.number {
            RDMA_USER_CM_CMD_GET_EVENT => Err(Errno::AGAIN),
            _ => Ok(()),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A channel without events.
pub(crate) fn channel() -> EventChannel {
    let (file, _) = rustix::pipe::pipe().expect("a pipe");
    EventChannel::on(Box::new(Silent(file))).expect("a channel")
}

/// A new id.
pub(crate) fn id(channel: &EventChannel) -> Arc<IdInner> {
    let id = IdInner::adopt(&channel.inner, 1, PortSpace::TCP, QpType::RC);
    channel.inner.register("model", &id).expect("no fork");
    id
}

/// Reports an event of the id, as the thread that reads the channel does.
pub(crate) fn tell(id: &IdInner, kind: rdma_cm_event_type) {
    let mut waiting = Waiting::default();
    let raw = rdma_ucm_event_resp { event: kind.0, ..Default::default() };
    drop(id.receive(Event::new(&raw), &mut waiting));
    waiting.wake();
}

/// A task that sleeps until it is woken.
pub(crate) struct Task(Notify);

impl Task {
    /// Polls to the end.
    pub(crate) fn run<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        let task = Arc::new(Task(Notify::new()));
        let waker = Waker::from(task.clone());
        loop {
            match poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(end) => return end,
                Poll::Pending => task.0.wait(),
            }
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

/// A step that any event ends.
#[derive(Clone, Copy)]
pub(crate) struct Any<'a>(pub(crate) &'a IdInner);

impl Step for Any<'_> {
    type Next = rdma_cm_event_type;
    type Error = Error;
    const VERB: &'static str = "model";

    fn id(&self) -> &IdInner {
        self.0
    }

    fn advance(self, event: Event) -> Result<rdma_cm_event_type> {
        Ok(event.kind)
    }
}

/// A thread reads the channel while a driver wants to: the driver reads, or is woken when that thread stops.
#[test]
fn a_driver_reads_when_a_thread_stops_reading() {
    loom::model(|| {
        let channel = channel();
        let theirs = channel.clone();
        let thread = thread::spawn(move || theirs.dispatch().unwrap());
        let theirs = channel.clone();
        let driver = thread::spawn(move || {
            Task::run(|cx| match theirs.dispatch_or_wake(cx).unwrap() {
                Some(_) => Poll::Ready(()),
                None => Poll::Pending,
            })
        });
        thread.join().unwrap();
        driver.join().unwrap();
    });
}

/// Each of two tasks takes one of two events, in any order of polls.
#[test]
fn events_that_come_while_tasks_poll_wake_them() {
    crate::sync::bounded_model(2, 3, || {
        let channel = channel();
        let id = id(&channel);
        let tasks = [0, 1].map(|_| {
            let id = id.clone();
            thread::spawn(move || {
                let mut wait = EventWait::new(&id);
                Task::run(|cx| id.poll_event("model", &mut wait.number, cx)).unwrap().kind
            })
        });
        tell(&id, rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED);
        tell(&id, rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED);
        let taken = tasks.map(|task| task.join().unwrap());
        assert_ne!(taken[0], taken[1]);
    });
}
