//! QEMU's monitor (QMP).
//!
//! Each line is a JSON object; answers come in order, with events in between.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to the monitor.
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("QEMU's monitor {}", socket.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        // Its greeting, then the end of negotiations.
        monitor.line()?;
        monitor.order("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).context("QEMU's monitor")? == 0 {
            bail!("QEMU's monitor is gone");
        }
        serde_json::from_str(&line).with_context(|| format!("QEMU's monitor said {line}"))
    }

    /// Runs a command and returns its result.
    pub(crate) fn order(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let order = json!({ "execute": command, "arguments": arguments });
        self.stream.get_mut().write_all(format!("{order}\n").as_bytes())?;
        loop {
            let mut line = self.line()?;
            if line.get("event").is_some() {
                continue;
            }
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
            bail!("QEMU refuses {order}: {line}");
        }
    }
}
