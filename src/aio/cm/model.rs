//! Futures of a channel, the events that they wait for, and the end of its driver, at the same time.

use super::*;
use crate::cm::model::{Any, Task, channel, id, tell};
use crate::sync::bounded_model;
use loom::thread;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;

fn state() -> Arc<ChannelState> {
    let is_over = AtomicBool::new(false);
    Arc::new(ChannelState { channel: channel(), is_over, driver: Lock::default() })
}

/// The future gets its event, or fails: it does not wait for ever.
#[test]
fn a_future_polled_while_the_driver_ends_is_woken() {
    loom::model(|| {
        let state = state();
        let id = id(&state.channel);
        let theirs = state.clone();
        let future = thread::spawn(move || {
            let mut wait = EventWait::new(&id);
            let end = Task::run(|cx| theirs.poll_event(&Any(&id), &mut wait.number, cx));
            assert_eq!(end.map(drop).unwrap_err().errno(), Errno::CANCELED);
        });
        // In a thread of its own: loom does not preempt a model's first thread as it does others.
        let driver = thread::spawn(move || state.end());
        driver.join().unwrap();
        future.join().unwrap();
    });
}

/// There is one event, which one of two tasks takes.
#[test]
fn all_tasks_learn_of_an_end() {
    bounded_model(2, 3, || {
        let state = state();
        let id = id(&state.channel);
        let ended = Arc::new(AtomicBool::new(false));
        let tasks = [0, 1].map(|_| {
            let (state, id, ended) = (state.clone(), id.clone(), ended.clone());
            thread::spawn(move || {
                let mut wait = EventWait::new(&id);
                let over = || ended.load(Ordering::Relaxed);
                let step = End { id: &id, ended: &ended };
                Task::run(|cx| state.poll_end(step, &over, &mut wait.number, cx)).unwrap();
            })
        });
        tell(&id, Type::RDMA_CM_EVENT_DISCONNECTED);
        for task in tasks {
            task.join().unwrap();
        }
    });
}

/// As a connection takes its end.
#[derive(Clone, Copy)]
struct End<'a> {
    id: &'a crate::cm::model::Inner,
    ended: &'a AtomicBool,
}

impl Step for End<'_> {
    type Next = ();
    type Error = Error;
    const VERB: &'static str = "model";

    fn id(&self) -> &crate::cm::model::Inner {
        self.id
    }

    fn advance(self, _event: Event) -> Result<()> {
        self.ended.store(true, Ordering::Relaxed);
        self.id.wake();
        Ok(())
    }
}
