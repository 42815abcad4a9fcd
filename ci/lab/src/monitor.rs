//! QEMU's monitor: plugs functions out and in while the machine runs.
//!
//! Pairs with `-qmp`. Each line is a JSON object: a command, an answer, or an event.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A connection to the monitor.
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
    /// Events that came while an answer was waited for.
    events: Vec<Value>,
}

impl Monitor {
    /// Connects, and is ready for commands.
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)?;
        let mut monitor = Self { stream: BufReader::new(stream), events: Vec::new() };
        monitor.read(Duration::from_secs(10))?;
        monitor.execute("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn read(&mut self, patience: Duration) -> Result<Value> {
        // Zero would wait for ever.
        let patience = patience.max(Duration::from_millis(1));
        self.stream.get_ref().set_read_timeout(Some(patience))?;
        let mut line = String::new();
        if self.stream.read_line(&mut line).context("QEMU says nothing")? == 0 {
            bail!("QEMU has closed its monitor");
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// Has QEMU do something, and answers what it returned.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{line}")?;
        loop {
            let mut answer = self.read(Duration::from_secs(30))?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            self.events.push(answer);
        }
    }

    /// Waits for an event about the device with this id.
    pub(crate) fn event(&mut self, name: &str, id: &str, patience: Duration) -> Result<()> {
        let is_it = |event: &Value| event["event"] == name && event["data"]["device"] == id;
        let deadline = Instant::now() + patience;
        loop {
            if self.events.drain(..).any(|event| is_it(&event)) {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.read(left).with_context(|| format!("no {name} of {id}"))?;
            self.events.push(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    #[test]
    fn answers_and_events_are_told_apart() {
        let path = std::env::temp_dir().join(format!("lab-monitor-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut commands = BufReader::new(stream.try_clone().unwrap()).lines();
            writeln!(stream, r#"{{"QMP":{{}}}}"#).unwrap();
            commands.next();
            writeln!(stream, r#"{{"return":{{}}}}"#).unwrap();
            let asked = commands.next().unwrap().unwrap();
            writeln!(stream, r#"{{"event":"GONE","data":{{"device":"b"}}}}"#).unwrap();
            writeln!(stream, r#"{{"return":{{"answer":5}}}}"#).unwrap();
            commands.next();
            writeln!(stream, r#"{{"error":{{"desc":"it is stuck"}}}}"#).unwrap();
            asked
        });
        let mut monitor = Monitor::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(monitor.execute("ask", json!({ "id": 1 })).unwrap()["answer"], 5);
        monitor.event("GONE", "b", Duration::from_secs(1)).unwrap();
        let error = monitor.execute("pull", json!({})).unwrap_err();
        assert!(error.to_string().contains("it is stuck"), "{error}");
        assert_eq!(qemu.join().unwrap(), r#"{"arguments":{"id":1},"execute":"ask"}"#);
        assert!(monitor.event("GONE", "a", Duration::from_secs(1)).is_err());
    }
}
