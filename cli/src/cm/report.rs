//! The report of the programs that exchange a number of messages.

use crate::failure;
use crate::output::outln;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// A run that went well. The fields keep their names, types and units; new ones may be added.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ExchangeReport {
    pub(super) program: &'static str,
    pub(super) role: &'static str,
    pub(super) local: String,
    pub(super) peer: String,
    pub(super) device: String,
    pub(super) connections: u32,
    pub(super) messages: u32,
    pub(super) size: u32,
    pub(super) seconds: f64,
}

impl ExchangeReport {
    pub(super) fn print(mut self, took: Duration, json: bool) {
        self.seconds = took.as_secs_f64();
        if json {
            failure::print(&self);
        } else {
            outln!("{self}");
        }
    }
}

impl fmt::Display for ExchangeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExchangeReport {
            program,
            local,
            peer,
            device,
            connections,
            messages,
            size,
            seconds,
            ..
        } = self;
        writeln!(f, "{program}: {local} on {device}, with {peer}")?;
        write!(
            f,
            "{connections} of {connections} with {messages} messages of {size} bytes, in {seconds:.3} s"
        )
    }
}
