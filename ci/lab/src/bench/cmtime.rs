//! `uverbs cm cmtime` beside rdma-core's `cmtime`: how long connections by address take that are made together, with
//! the same program on both sides.
//!
//! The two run in turns, so that whatever slows the machine down slows both; a pair of neighbours gives a ratio.

use super::pingpong::{CLIENT_SAYS, server_and_client};
use super::repeats::Repeats;
use super::rounds::Library;
use super::table::TableRow;
use crate::machine::vm::{GuestEvent, Vm};
use anyhow::{Context, Result, bail};
use lab_guest::order::Order;
use std::time::Duration;

/// The name of the row.
pub(super) const NAME: &str = "connections made together, by cmtime";

/// How many are made together.
const CONNECTIONS: u32 = 50;
/// How long a run may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The command that runs both sides. rdma-core's program invents numbers of queue pairs for a last round, which is not
/// looked at: each side needs its own.
fn script(library: Library) -> Vec<String> {
    let (program, own, peers) = match library {
        Library::Ours => ("uverbs cm cmtime", "", ""),
        Library::Theirs => ("cmtime", " -q 20000", " -q 40000"),
    };
    let all = format!("{program} -b 10.0.0");
    let server = format!("{all}.2 -c {CONNECTIONS}{own}");
    let client = format!("{all}.1 -s 10.0.0.2 -c {CONNECTIONS}{peers}");
    server_and_client("rdma resource show cm_id | grep -q LISTEN", &server, &client)
}

/// Microseconds of each connection, in the client's first table: of this workspace's program the first number is the
/// time of all, of rdma-core's the second one.
fn microseconds(library: Library, output: &str) -> Option<f64> {
    let (_, client) = output.split_once(CLIENT_SAYS)?;
    let row = client.lines().find_map(|line| line.strip_prefix("full connect"))?;
    let at = match library {
        Library::Ours => 0,
        Library::Theirs => 1,
    };
    let all: f64 = row.split_whitespace().nth(at)?.parse().ok()?;
    (all > 0.0).then(|| all / f64::from(CONNECTIONS))
}

fn time(vm: &mut Vm, library: Library) -> Result<f64> {
    let mut output = Vec::new();
    let order = Order { command: script(library), ..Order::default() };
    let ending = vm.run(&order, PATIENCE, |event| match event {
        GuestEvent::Stdout(_, bytes) | GuestEvent::Stderr(_, bytes) => {
            output.extend_from_slice(bytes)
        }
        GuestEvent::Exit(..) => {}
    })?;
    let output = String::from_utf8_lossy(&output);
    if ending.status() != 0 {
        bail!("cmtime of {library:?} ended with status {}:\n{output}", ending.status());
    }
    microseconds(library, &output).with_context(|| format!("no time in:\n{output}"))
}

/// The row, and why pairs were run a second time.
pub(super) fn compare(vm: &mut Vm, runs: u32) -> Result<(TableRow, Vec<String>)> {
    let mut repeats = Repeats::default();
    let mut pair = || repeats.again(|| Ok([time(vm, Library::Ours)?, time(vm, Library::Theirs)?]));
    // The first pair warms up the caches of both.
    pair()?;
    let pairs = (0..runs).map(|_| pair()).collect::<Result<Vec<_>>>()?;
    let row = TableRow::of_pairs(NAME, "µs", &pairs);
    Ok((row, repeats.into_reasons()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_differ_by_address_and_invented_numbers() {
        let script = |library| script(library).pop().unwrap();
        let (ours, theirs) = (script(Library::Ours), script(Library::Theirs));
        assert!(ours.contains("\nuverbs cm cmtime -b 10.0.0.2 -c 50 >/tmp/server"), "{ours}");
        assert!(ours.contains("\nuverbs cm cmtime -b 10.0.0.1 -s 10.0.0.2 -c 50 >"), "{ours}");
        assert!(theirs.contains("\ncmtime -b 10.0.0.2 -c 50 -q 20000 >"), "{theirs}");
        assert!(theirs.contains("\ncmtime -b 10.0.0.1 -s 10.0.0.2 -c 50 -q 40000 >"), "{theirs}");
    }

    #[test]
    fn first_table_of_the_client_is_read() {
        let ours = "50 connections of mlx5_0 with 10.0.0.2:7471, the client's side\n\
                    step               total µs      µs each\n\
                    full connect         500000      10000.0\n\
                    create id              1000         20.0";
        let microseconds = |library, client: &str| {
            microseconds(library, &format!("full connect 7 7\n{CLIENT_SAYS}\n{client}"))
        };
        assert_eq!(microseconds(Library::Ours, ours), Some(10_000.0));
        let theirs = "Connect (50) QPs test\nqp_conn                50\n\
                      step             avg/iter  total(us)    us/conn    sum(us)    max(us)    min(us)\n\
                      full connect        10020     501000          0          0       9999       5555\n\
                      Connect (50) test - no QPs\n\
                      full connect         1002      50100          0          0       9999       5555\n";
        assert_eq!(microseconds(Library::Theirs, theirs), Some(10_020.0));
        assert_eq!(microseconds(Library::Ours, "no connection"), None);
        assert_eq!(microseconds(Library::Ours, "full connect 0 0.0"), None);
    }
}
