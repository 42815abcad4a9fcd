//! Priorities of a guest's virtual processors on a host without spare processors.
//!
//! Pairs with `vm.rs`, which has QEMU name their threads. A guest that polls never leaves its
//! processors. The emulator of its device then waits for one until the scheduler's tick, some
//! milliseconds, unless it has the right of way: with both on equal terms a ping-pong takes half as
//! long again. And a scheduler that weighs threads puts those that weigh little on one processor, so
//! each gets its own.

use anyhow::{Context, Result};
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Their nice value: the emulator has the weight of nine of them.
const NICE: i32 = 10;

/// The highest nice value.
const LEAST: i32 = 19;

/// Has the threads of a machine's processors give way to whatever else serves it, if the host has no
/// processor left for that. Beside `others` none gets a processor of its own: two machines may both work
/// on their first one most of the time.
pub(crate) fn give_way(threads: &[i32], others: bool) -> Result<()> {
    let allowed = sched_getaffinity(None).context("the host's processors")?;
    let hosts: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    if hosts.len() > threads.len() {
        return Ok(());
    }
    for (number, thread) in threads.iter().enumerate() {
        let thread = Pid::from_raw(*thread).context("a thread without number")?;
        // Relative to their present value: the lab may have been started with a nice value.
        let now = getpriority_process(Some(thread)).context("nice")?;
        setpriority_process(Some(thread), (now + NICE).min(LEAST)).context("nice")?;
        if hosts.len() == threads.len() && !others {
            let mut own = CpuSet::new();
            own.set(hosts[number]);
            sched_setaffinity(Some(thread), &own).context("affinity")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::gettid;
    use std::sync::mpsc::channel;
    use std::thread;

    #[test]
    fn as_many_threads_as_processors_get_one_each_and_give_way() {
        let hosts = sched_getaffinity(None).unwrap().count() as usize;
        let (sender, numbers) = channel();
        let mut ends = Vec::new();
        for _ in 0..hosts {
            let (sender, (end, wait)) = (sender.clone(), channel::<()>());
            ends.push(end);
            thread::spawn(move || {
                sender.send(gettid()).unwrap();
                wait.recv().unwrap_err();
            });
        }
        let threads: Vec<Pid> = numbers.iter().take(hosts).collect();
        let raw: Vec<i32> = threads.iter().map(|thread| thread.as_raw_nonzero().get()).collect();
        give_way(&raw[..hosts - 1], false).unwrap();
        let nice = |thread| getpriority_process(Some(thread)).unwrap();
        let before = nice(gettid());
        assert!(threads.iter().all(|thread| nice(*thread) == before), "there is one to spare");
        give_way(&raw, false).unwrap();
        let mut taken = CpuSet::new();
        for thread in threads {
            assert_eq!(nice(thread), (before + NICE).min(LEAST));
            let own = sched_getaffinity(Some(thread)).unwrap();
            assert_eq!(own.count(), 1);
            (0..CpuSet::MAX_CPU).filter(|cpu| own.is_set(*cpu)).for_each(|cpu| taken.set(cpu));
        }
        assert_eq!(taken.count() as usize, hosts);
    }
}
