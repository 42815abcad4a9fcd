//! The report of a run: lines for people, one object for programs.
//!
//! The object's fields keep their names, types and units; new ones may be added.

use super::address::Address;
use super::checker::{Checker, Expected};
use super::port::Port;
use crate::args::PingpongArgs;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// A run that went well.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PingpongReport {
    kind: &'static str,
    role: &'static str,
    peer: String,
    device: String,
    ib_port: u32,
    gid_index: Option<u32>,
    gid_type: Option<String>,
    path_mtu: Option<u32>,
    events: bool,
    size: u32,
    iterations: u64,
    local: Vec<JsonAddress>,
    remote: Vec<JsonAddress>,
    bytes: u64,
    seconds: f64,
    mbit_per_second: f64,
    usec_per_iteration: f64,
    /// `null` if nothing was checked.
    validated: Option<Validated>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct JsonAddress {
    lid: u16,
    qpn: u32,
    psn: u32,
    gid: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Validated {
    messages: u64,
    /// "distinct", "alike" or "plain"; see [`Expected`].
    content: &'static str,
}

impl PingpongReport {
    pub(crate) fn new(
        args: &PingpongArgs,
        port: &Port,
        peer: impl fmt::Display,
        addresses: (&[Address], &[Address]),
        took: Duration,
        checker: Option<&Checker>,
    ) -> Self {
        let options = args.options();
        let seconds = took.as_secs_f64();
        let bytes = u64::from(args.size()).saturating_mul(options.iters).saturating_mul(2);
        PingpongReport {
            kind: super::Kind::of(args).name(),
            role: if options.host.is_some() { "client" } else { "server" },
            peer: peer.to_string(),
            device: port.device().name().to_owned(),
            ib_port: port.number,
            gid_index: port.source.map(|source| source.entry.index),
            gid_type: port.source.map(|source| source.entry.gid_type.to_string()),
            path_mtu: args.mtu().map(|mtu| mtu.bytes()),
            events: options.events,
            size: args.size(),
            iterations: options.iters,
            local: addresses.0.iter().map(JsonAddress::from).collect(),
            remote: addresses.1.iter().map(JsonAddress::from).collect(),
            bytes,
            seconds,
            mbit_per_second: bytes as f64 * 8.0 / 1e6 / seconds,
            usec_per_iteration: seconds * 1e6 / options.iters as f64,
            validated: checker.map(Validated::from),
        }
    }
}

impl From<&Address> for JsonAddress {
    fn from(address: &Address) -> Self {
        JsonAddress {
            lid: address.lid,
            qpn: address.qpn.0,
            psn: address.psn.0,
            gid: address.gid.to_string(),
        }
    }
}

impl From<&Checker> for Validated {
    fn from(checker: &Checker) -> Self {
        let content = match checker.expected() {
            Some(Expected::Distinct) => "distinct",
            Some(Expected::Alike) => "alike",
            Some(Expected::Plain) | None => "plain",
        };
        Validated { messages: checker.checked(), content }
    }
}

/// The lines after a run.
impl fmt::Display for PingpongReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PingpongReport { bytes, seconds, iterations, .. } = self;
        writeln!(f, "{bytes} bytes in {seconds:.3} s: {:.2} Mbit/s", self.mbit_per_second)?;
        write!(
            f,
            "{iterations} iterations in {seconds:.3} s: {:.2} µs per iteration",
            self.usec_per_iteration
        )?;
        let Some(Validated { messages, content }) = self.validated else { return Ok(()) };
        let what = match content {
            "distinct" => "each with content of its own",
            "alike" => "all of one content, as the peer does not keep its queue pairs apart",
            _ => "all plain, as the peer does not validate",
        };
        write!(f, "\n{messages} messages checked, {what}: every byte is right")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(validated: Option<Validated>) -> PingpongReport {
        PingpongReport {
            kind: "rc",
            role: "client",
            peer: "10.0.0.1:18515".into(),
            device: "rxe0".into(),
            ib_port: 1,
            gid_index: Some(1),
            gid_type: Some("RoCE v2".into()),
            path_mtu: Some(1024),
            events: false,
            size: 4096,
            iterations: 1000,
            local: vec![],
            remote: vec![],
            bytes: 8_192_000,
            seconds: 0.125,
            mbit_per_second: 524.288,
            usec_per_iteration: 125.0,
            validated,
        }
    }

    #[test]
    fn lines_for_people() {
        let text = report(Some(Validated { messages: 1000, content: "distinct" })).to_string();
        assert_eq!(
            text,
            "8192000 bytes in 0.125 s: 524.29 Mbit/s\n\
             1000 iterations in 0.125 s: 125.00 µs per iteration\n\
             1000 messages checked, each with content of its own: every byte is right"
        );
    }

    #[test]
    fn fields_for_programs() {
        let text = serde_json::to_string(&report(None)).unwrap();
        for field in [
            r#""kind":"rc""#,
            r#""role":"client""#,
            r#""gid_index":1"#,
            r#""iterations":1000"#,
            r#""bytes":8192000"#,
            r#""usec_per_iteration":125.0"#,
            r#""validated":null"#,
        ] {
            assert!(text.contains(field), "{field} in {text}");
        }
    }
}
