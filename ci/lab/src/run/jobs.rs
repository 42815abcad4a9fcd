//! Runs jobs in parallel, in as many job slots as there are processors, but at most four.
//!
//! An emulated guest keeps one processor busy most of the time. A job takes one slot or more; one that
//! measures time takes all. Jobs start in the order of the list, as soon as the jobs that they wait for
//! have ended and enough slots are free.

use crate::output::outln;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::channel;
use std::thread;

/// With more slots the longest chain of jobs decides the time.
const MOST: usize = 4;
/// Sets the number of slots.
const SLOTS: &str = "UVERBS_LAB_JOBS";

thread_local! {
    static LABEL: RefCell<Option<String>> = const { RefCell::new(None) };
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// Prints a line, after the name of the job if jobs run in parallel.
macro_rules! say {
    ($($arguments:tt)*) => { $crate::run::jobs::line(&format!($($arguments)*)) };
}
pub(crate) use say;

/// Prints the line of `say!`.
pub(crate) fn line(text: &str) {
    LABEL.with_borrow(|label| match label {
        Some(label) => outln!("{label} | {}", text.trim_start_matches('\n')),
        None => outln!("{text}"),
    });
}

/// Processors that this process may use.
pub(crate) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The number of slots.
pub(crate) fn slots() -> usize {
    let asked = std::env::var(SLOTS).ok().and_then(|text| text.parse().ok());
    asked.unwrap_or_else(|| processors().min(MOST)).max(1)
}

/// The number of this thread's job. Guests of one job may share files, those of two jobs may
/// not.
pub(crate) fn number() -> usize {
    NUMBER.get()
}

/// Whether other jobs may run beside this thread's.
pub(crate) fn beside_others() -> bool {
    LABEL.with_borrow(Option::is_some)
}

/// One piece of work.
pub(crate) struct Job<'a, T> {
    pub(crate) name: String,
    /// Slots that it takes; all of them if there are fewer.
    pub(crate) slots: usize,
    /// Names of jobs that have to end before this one. A name that is not in the list is ignored.
    pub(crate) after: Vec<String>,
    pub(crate) work: Box<dyn FnOnce() -> T + Send + 'a>,
}

impl<'a, T> Job<'a, T> {
    /// A job of one slot that waits for nothing.
    pub(crate) fn new(name: impl Into<String>, work: impl FnOnce() -> T + Send + 'a) -> Self {
        Self { name: name.into(), slots: 1, after: Vec::new(), work: Box::new(work) }
    }

    /// The same after another job.
    pub(crate) fn after(mut self, name: &str) -> Self {
        self.after.push(name.to_owned());
        self
    }

    /// The same on so many slots.
    pub(crate) fn on(self, slots: usize) -> Self {
        Self { slots, ..self }
    }
}

/// Runs all jobs on `slots` slots and returns their results, in the order of the list.
pub(crate) fn run<'a, T: Send>(slots: usize, jobs: Vec<Job<'a, T>>) -> Vec<T> {
    let several = jobs.len() > 1;
    let mut waiting: Vec<Option<Job<'a, T>>> = jobs.into_iter().map(Some).collect();
    let mut results: Vec<Option<T>> = waiting.iter().map(|_| None).collect();
    let mut unfinished: BTreeSet<String> =
        waiting.iter().flatten().map(|job| job.name.clone()).collect();
    let (sender, ended) = channel::<(usize, String, usize, thread::Result<T>)>();
    thread::scope(|scope| {
        let mut free = slots;
        let mut started = 0;
        let mut running = 0;
        loop {
            for (index, place) in waiting.iter_mut().enumerate() {
                let fits = |job: &mut Job<'_, T>| {
                    job.slots.min(slots) <= free
                        && !job.after.iter().any(|name| unfinished.contains(name))
                };
                let Some(job) = place.take_if(fits) else { continue };
                let takes = job.slots.min(slots);
                free -= takes;
                running += 1;
                started += 1;
                let (sender, number) = (sender.clone(), started);
                scope.spawn(move || {
                    if several && slots > 1 {
                        crate::run::progress::be_quiet();
                        LABEL.set(Some(job.name.clone()));
                    }
                    NUMBER.set(number);
                    let result = catch_unwind(AssertUnwindSafe(job.work));
                    // The receiver waits for every job.
                    let _received = sender.send((index, job.name, takes, result));
                });
            }
            if running == 0 {
                break;
            }
            let Ok((index, name, takes, result)) = ended.recv() else { break };
            results[index] = Some(result.unwrap_or_else(|panic| resume_unwind(panic)));
            unfinished.remove(&name);
            free += takes;
            running -= 1;
        }
    });
    let stuck: Vec<&str> = waiting.iter().flatten().map(|job| job.name.as_str()).collect();
    assert!(stuck.is_empty(), "jobs wait for one another: {stuck:?}");
    results.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn jobs_share_slots_and_wait_for_their_predecessors() {
        let (now, most, log) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
        let (now, most, log) = (&now, &most, &log);
        let work = |name: &'static str, slots: usize| {
            move || {
                let taken = now.fetch_add(slots, Ordering::SeqCst) + slots;
                most.fetch_max(taken, Ordering::SeqCst);
                // A job that did not wait would end before it.
                let long = if name == "build" { 150 } else { 30 };
                thread::sleep(Duration::from_millis(long));
                log.lock().unwrap().push(name);
                now.fetch_sub(slots, Ordering::SeqCst);
                name
            }
        };
        let jobs = vec![
            Job::new("suite", work("suite", 1)).after("build"),
            Job::new("figures", work("figures", 2)).on(9),
            Job::new("build", work("build", 1)),
            Job::new("lints", work("lints", 1)),
            Job::new("odd", work("odd", 1)).after("no such job"),
        ];
        assert_eq!(run(2, jobs), ["suite", "figures", "build", "lints", "odd"]);
        assert_eq!(most.load(Ordering::SeqCst), 2, "as many as there are slots, and no more");
        let log = log.lock().unwrap();
        let at = |name| log.iter().position(|done| *done == name).unwrap();
        assert!(at("build") < at("suite"));
    }

    #[test]
    #[should_panic = "the first one"]
    fn a_job_that_panics_ends_the_run() {
        run(2, vec![Job::new("a", || panic!("the first one")), Job::new("b", || ())]);
    }

    #[test]
    #[should_panic = "wait for one another"]
    fn jobs_that_wait_for_one_another_are_not_left_out() {
        run(2, vec![Job::new("a", || ()).after("b"), Job::new("b", || ()).after("a")]);
    }

    #[test]
    fn one_slot_runs_everything_in_turn() {
        let jobs = (0..4).map(|n| Job::new(n.to_string(), move || n).on(3)).collect();
        assert_eq!(run(1, jobs), [0, 1, 2, 3]);
    }
}
