//! Tests with two processes, each of which has a device and a kernel of its own: `UVERBS_SIM=udp:ADDRESS`, with an
//! address of 127.0.0.0/8 for each.
//!
//! On the fabric these tests skip, because no other process has its devices. Here each runs in a process that this
//! program starts, and the second process of the test (`helper.rs`, `partner.rs`) gets another address. A skip there is
//! a failure.

use crate::env;
use crate::verdict::{Stop, Verdict, named};
use libtest_mimic::Trial;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// The time that all of them have together. They took 1.8 s on a machine with two busy processors.
const LIMIT: Duration = Duration::from_secs(30);

/// Those that run.
const RUN: &[&str] = &[
    "processes::two_processes_exchange_messages",
    "processes::memory_of_another_process_is_written_and_read",
    "processes::atomics_count_in_memory_of_another_process",
    "processes::unreliable_messages_reach_another_process",
    "processes::connections_by_address_lead_to_another_process",
    "processes::requests_to_a_killed_peer_fail",
    "processes::killed_peer_leaves_nothing",
    "processes::requests_to_a_peer_that_left_fail",
    "scope::requests_to_a_killed_peer_end",
    #[cfg(feature = "tokio")]
    "endings::requests_to_a_killed_peer_fail",
    "xrc_processes::sender_notices_a_killed_receiver",
];

/// Those that cannot, by the beginnings of their names, and why.
const NOT_RUN: &[(&str, &str)] = &[
    ("fork::", "a child of `fork` has no thread that runs the device"),
    (
        "cm::killed::",
        "the processes are forked, and a kernel that outlives a process says goodbye for it; `tests/udp_connect.rs` \
         kills either side of a connection",
    ),
    ("share::", "the processes share the objects of one kernel by its files"),
    ("sharing::", "the processes share the objects of one kernel by its files"),
    ("mlx5::", "the processes share the objects of one kernel by its files"),
    (
        "xrc_processes::target_outlives_the_process_that_made_it",
        "the processes have one XRC domain of one kernel, which outlives either",
    ),
];

/// Whether a test with two processes has its place here.
pub(crate) fn knows(name: &str) -> bool {
    RUN.contains(&name) || NOT_RUN.iter().any(|(beginning, _)| name.starts_with(beginning))
}

/// None if the run tests a device that it was told: that one has those tests itself.
pub(crate) fn trials() -> Vec<Trial> {
    if !env::on_fabric() {
        return Vec::new();
    }
    RUN.iter().map(|name| named(format!("udp::{name}"), || run(name))).collect()
}

/// Runs a test in a process with a device over UDP.
fn run(name: &str) -> Verdict {
    static SPENT: Mutex<Duration> = Mutex::new(Duration::ZERO);
    let mut spent = SPENT.lock().unwrap_or_else(PoisonError::into_inner);
    let start = Instant::now();
    let mut said = File::from(memfd_create("said", MemfdFlags::CLOEXEC)?);
    let mut command = Command::new(std::env::current_exe()?);
    env::give_udp(&mut command);
    command.args(["--exact", name, "--nocapture"]).env("UVERBS_TEST_DEVICE", "mlx5_0");
    for variable in ["UVERBS_TEST_JUNIT", "UVERBS_TEST_NAMES", "UVERBS_TEST_PORT"] {
        command.env_remove(variable);
    }
    let mut process =
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said.try_clone()?).spawn()?;
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break Some(status);
        }
        if *spent + start.elapsed() > LIMIT {
            process.kill()?;
            process.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    *spent += start.elapsed();
    let mut text = String::new();
    said.rewind()?;
    said.read_to_string(&mut text)?;
    match status {
        None => Err(Stop::fail(format!("all tests over UDP take more than {LIMIT:?}:\n{text}"))),
        Some(status) if status.success() && text.contains(": ok. 1 passed;") => Ok(()),
        Some(status) => {
            Err(Stop::fail(format!("it ended with {status}, and did not pass:\n{text}")))
        }
    }
}
