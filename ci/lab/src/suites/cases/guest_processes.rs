//! Programs in the guest whose output is read while they run, so that a test can change their
//! device at the right moment.
//!
//! Pairs with `faults.rs`, whose tests go back and forth between the guest and the device.

use super::case::PRELUDE;
use crate::machine::vm::{GuestEvent, Vm};
use anyhow::{Context, Result, bail};
use lab_guest::order::{Ending, Order};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The output of a process so far, and how it ended.
#[derive(Default)]
struct ProcessOutput {
    command: String,
    text: String,
    ending: Option<Ending>,
}

/// The processes of one test.
pub(crate) struct GuestProcesses<'a> {
    vm: &'a mut Vm,
    heard: BTreeMap<u32, ProcessOutput>,
}

/// A process of one test.
#[derive(Clone, Copy)]
pub(crate) struct GuestProcess(u32);

impl<'a> GuestProcesses<'a> {
    /// No process runs yet.
    pub(crate) fn new(vm: &'a mut Vm) -> Self {
        Self { vm, heard: BTreeMap::new() }
    }

    /// The guest that they run in.
    pub(crate) fn vm(&self) -> &Vm {
        self.vm
    }

    /// Starts a shell script as root.
    pub(crate) fn start(&mut self, script: &str) -> Result<GuestProcess> {
        let whole = format!("{PRELUDE}\n{script}");
        let command = ["sh", "-c", &whole].map(str::to_owned).to_vec();
        // Programs print line by line to a terminal.
        let terminal = Some((200, 50));
        let process =
            self.vm.start(&Order { command, root: true, terminal, ..Order::default() })?;
        self.vm.end_input(process)?;
        let heard = ProcessOutput { command: script.to_owned(), ..ProcessOutput::default() };
        self.heard.insert(process, heard);
        Ok(GuestProcess(process))
    }

    /// Takes the next event; false if there is none until the deadline.
    fn listen(&mut self, deadline: Instant) -> Result<bool> {
        let Some(event) = self.vm.next_event(deadline)? else { return Ok(false) };
        let (process, bytes, ending) = match event {
            GuestEvent::Stdout(process, bytes) | GuestEvent::Stderr(process, bytes) => {
                (process, bytes, None)
            }
            GuestEvent::Exit(process, ending) => (process, Vec::new(), Some(ending)),
        };
        // Events of an earlier test are dropped.
        if let Some(heard) = self.heard.get_mut(&process) {
            heard.text.push_str(&String::from_utf8_lossy(&bytes));
            heard.ending = heard.ending.or(ending);
        }
        Ok(true)
    }

    fn heard(&self, who: GuestProcess) -> Result<&ProcessOutput> {
        self.heard.get(&who.0).context("a speaker of another conversation")
    }

    /// The output of a process.
    pub(crate) fn text(&self, who: GuestProcess) -> Result<&str> {
        Ok(&self.heard(who)?.text)
    }

    /// Waits until a process has printed `words`.
    pub(crate) fn until(&mut self, who: GuestProcess, words: &str, patience: u64) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(patience);
        while !self.text(who)?.contains(words) {
            if self.heard(who)?.ending.is_some() || !self.listen(deadline)? {
                let ProcessOutput { command, text, ending } = self.heard(who)?;
                bail!("`{command}` did not print {words:?} ({ending:?}), but:\n{text}");
            }
        }
        Ok(())
    }

    /// Waits until a process ends, and returns its status.
    pub(crate) fn end(&mut self, who: GuestProcess, patience: u64) -> Result<i32> {
        let deadline = Instant::now() + Duration::from_secs(patience);
        loop {
            let ProcessOutput { command, text, ending } = self.heard(who)?;
            match ending {
                Some(ending) => return Ok(ending.status()),
                None if Instant::now() < deadline => {}
                None => bail!("`{command}` still runs after {patience} s:\n{text}"),
            }
            self.listen(deadline)?;
        }
    }

    /// Runs a script to its end and returns its output; it must succeed.
    pub(crate) fn run(&mut self, script: &str, patience: u64) -> Result<String> {
        let who = self.start(script)?;
        let status = self.end(who, patience)?;
        let text = self.text(who)?.to_owned();
        if status != 0 {
            bail!("`{script}` ended with {status}:\n{text}");
        }
        Ok(text)
    }

    /// Reads events for a while.
    pub(crate) fn pause(&mut self, time: Duration) -> Result<()> {
        let deadline = Instant::now() + time;
        while self.listen(deadline)? {}
        Ok(())
    }

    /// The output of all processes, for a log.
    pub(crate) fn transcript(&self) -> String {
        let said = |heard: &ProcessOutput| {
            format!("---- {}\n{}{:?}\n", heard.command, heard.text, heard.ending)
        };
        self.heard.values().map(said).collect()
    }
}
