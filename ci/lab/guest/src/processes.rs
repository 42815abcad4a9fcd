//! Ordered processes: starting them, carrying their streams, reporting how they ended.
//!
//! One thread reads the host's frames, one per output stream copies bytes, and one reaps. As PID 1
//! this process inherits orphans, so it reaps any process that ended, and never waits for one
//! child.

use crate::Failure;
use crate::channel::{Channel, Sender};
use crate::launch;
use lab_guest::frame::{CHUNK, Kind};
use lab_guest::order::{Ending, Order};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Where an ordered process's standard input goes.
enum Input {
    Pipe(ChildStdin),
    Terminal(File),
}

/// A process that was started and has not been reported as ended.
struct Running {
    process: u32,
    outputs: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Table {
    by_pid: BTreeMap<i32, Running>,
    inputs: BTreeMap<u32, Input>,
    pids: BTreeMap<u32, i32>,
}

#[derive(Default)]
struct Processes {
    table: Mutex<Table>,
    started: Condvar,
}

impl Processes {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries out the host's frames until it powers the guest off or closes the channel.
pub(crate) fn serve(mut channel: Channel) -> Result<(), Failure> {
    let processes = Arc::new(Processes::default());
    let sender = channel.sender();
    {
        let processes = Arc::clone(&processes);
        let sender = sender.clone();
        thread::Builder::new().name("reap".into()).spawn(move || reap(&processes, &sender))?;
    }
    loop {
        let frame = channel.receive()?;
        match frame.kind {
            Kind::Run => {
                let order: Order = serde_json::from_slice(&frame.payload)?;
                if let Err(error) = start(&processes, &sender, frame.process, &order) {
                    let text = format!("lab: cannot start {:?}: {error}\n", order.command);
                    sender.send(Kind::Stderr, frame.process, text.into_bytes())?;
                    report(&sender, frame.process, Ending::Exited(126))?;
                }
            }
            Kind::Stdin => {
                // Taken out for the write: a full pipe must not block starting and reaping.
                let input = processes.table().inputs.remove(&frame.process);
                if let Some(mut input) = input {
                    let written = match &mut input {
                        Input::Pipe(pipe) => pipe.write_all(&frame.payload),
                        Input::Terminal(terminal) => terminal.write_all(&frame.payload),
                    };
                    // The process has closed its input.
                    if written.is_ok() {
                        processes.table().inputs.insert(frame.process, input);
                    }
                }
            }
            Kind::StdinEnd => {
                processes.table().inputs.remove(&frame.process);
            }
            Kind::Signal => {
                let number = frame.payload.as_slice().try_into().map(i32::from_le_bytes);
                let signal = number.ok().and_then(|number| Signal::try_from(number).ok());
                let pid = processes.table().pids.get(&frame.process).copied();
                if let (Some(signal), Some(pid)) = (signal, pid) {
                    // It may have ended meanwhile; that is reported on its own.
                    let _gone = killpg(Pid::from_raw(pid), signal);
                }
            }
            Kind::Resize => {
                if let (Some(Input::Terminal(terminal)), [c0, c1, r0, r1]) =
                    (processes.table().inputs.get(&frame.process), frame.payload.as_slice())
                {
                    let size =
                        window(u16::from_le_bytes([*c0, *c1]), u16::from_le_bytes([*r0, *r1]));
                    tcsetwinsize(terminal, size)?;
                }
            }
            Kind::PowerOff => return Ok(()),
            kind => return Err(format!("the host sent {kind:?}").into()),
        }
    }
}

fn window(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

fn report(sender: &Sender, process: u32, ending: Ending) -> Result<(), Failure> {
    sender.send(Kind::Exit, process, serde_json::to_vec(&ending)?)?;
    Ok(())
}

fn start(
    processes: &Processes,
    sender: &Sender,
    process: u32,
    order: &Order,
) -> Result<(), Failure> {
    let home = if order.root { "/root" } else { "/home/user" };
    let mut launch = Command::new("/lab/lab-launch");
    launch
        .args(launch::arguments(order)?)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin")
        .env("HOME", home)
        .env("LANG", "C.UTF-8")
        .env("UVERBS_LAB", "1")
        .envs(order.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(home);
    let mut outputs: Vec<(Kind, Box<dyn Read + Send>)> = Vec::new();
    // Held from before the start, so that the reaper finds the process in the table.
    let mut table = processes.table();
    let pid = if let Some((columns, rows)) = order.terminal {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&controller)?;
        unlockpt(&controller)?;
        tcsetwinsize(&controller, window(columns, rows))?;
        let terminal = ioctl_tiocgptpeer(&controller, OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        let child = launch
            .env("TERM", "xterm")
            .stdin(terminal.try_clone()?)
            .stdout(terminal.try_clone()?)
            .stderr(terminal)
            .spawn()?;
        let controller = File::from(controller);
        outputs.push((Kind::Stdout, Box::new(controller.try_clone()?)));
        table.inputs.insert(process, Input::Terminal(controller));
        child.id()
    } else {
        let mut child =
            launch.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(stdout) = child.stdout.take() {
            outputs.push((Kind::Stdout, Box::new(stdout)));
        }
        if let Some(stderr) = child.stderr.take() {
            outputs.push((Kind::Stderr, Box::new(stderr)));
        }
        if let Some(stdin) = child.stdin.take() {
            table.inputs.insert(process, Input::Pipe(stdin));
        }
        child.id()
    };
    let pid = i32::try_from(pid)?;
    let outputs = outputs
        .into_iter()
        .map(|(kind, from)| {
            let sender = sender.clone();
            thread::spawn(move || copy_out(from, &sender, kind, process))
        })
        .collect();
    table.pids.insert(process, pid);
    table.by_pid.insert(pid, Running { process, outputs });
    processes.started.notify_all();
    Ok(())
}

fn copy_out(mut from: impl Read, sender: &Sender, kind: Kind, process: u32) {
    let mut buffer = vec![0; CHUNK];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => {
                if sender.send(kind, process, buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A terminal whose last process has gone answers EIO.
            Err(_) => return,
        }
    }
}

fn reap(processes: &Processes, sender: &Sender) {
    loop {
        let (pid, ending) = match wait() {
            Ok(WaitStatus::Exited(pid, status)) => (pid, Ending::Exited(status)),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, Ending::Killed(signal as i32)),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(_) => {
                // No child at all: sleep until one is started.
                let table = processes.table();
                if table.by_pid.is_empty() {
                    drop(processes.started.wait(table).unwrap_or_else(PoisonError::into_inner));
                }
                continue;
            }
        };
        let running = {
            let mut table = processes.table();
            let running = table.by_pid.remove(&pid.as_raw());
            if let Some(running) = &running {
                table.inputs.remove(&running.process);
                table.pids.remove(&running.process);
            }
            running
        };
        if let Some(Running { process, outputs }) = running {
            let sender = sender.clone();
            // Its output is sent before its end. A child that it left behind may hold the streams
            // open for ever, so the whole session is killed with it.
            thread::spawn(move || {
                let _gone = killpg(pid, Signal::SIGKILL);
                for output in outputs {
                    let _panicked = output.join();
                }
                let _host_gone = report(&sender, process, ending);
            });
        }
    }
}
