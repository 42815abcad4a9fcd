//! Counting the instructions of another process. Here, because waiting for it adds to the time that children
//! have worked, which a unit test of the library looks at.

use lab_bench::control::steps;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

#[test]
fn steps_are_the_instructions_between_two_stops() {
    let steps = |commands: usize| {
        let text = format!("echo; read _; kill -STOP $$; {} kill -STOP $$", ":; ".repeat(commands));
        let mut child = Command::new("sh")
            .args(["-c", &text])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let process = Pid::from_raw(child.id() as i32);
        // The shell runs: a process that is attached during its exec stops with SIGTRAP after it.
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        // Attaching stops it between `echo` and `read`, or in it. The count begins where it stops itself.
        ptrace::attach(process).unwrap();
        let stopped = waitpid(process, None).unwrap();
        assert_eq!(stopped, WaitStatus::Stopped(process, Signal::SIGSTOP));
        ptrace::setoptions(process, ptrace::Options::PTRACE_O_EXITKILL).unwrap();
        ptrace::cont(process, None).unwrap();
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let steps = steps(process).unwrap();
        assert!(child.wait().unwrap().success());
        steps
    };
    let [none, few, many] = [0, 4, 40].map(steps);
    let few = few - none;
    assert!((100..100_000).contains(&few), "{few}");
    let ratio = (many - none) as f64 / few as f64;
    assert!((8.0..12.0).contains(&ratio), "{none}, {few}, {many}");
}

#[test]
fn a_program_that_ends_before_its_stop_is_an_error() {
    let mut child = Command::new("true").spawn().unwrap();
    let failure = steps(Pid::from_raw(child.id() as i32)).unwrap_err().to_string();
    assert!(failure.contains("Exited"), "{failure}");
    assert!(child.wait().is_err(), "it was not waited for");
}
