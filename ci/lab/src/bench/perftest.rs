//! perftest beside `bench-traffic`, which does the same with this workspace's library.

use super::pingpong::{Program, numbers_before, pair};
use anyhow::{Context, Result};

/// Sizes of messages whose latency is measured.
const SIZES: [u32; 5] = [2, 64, 1024, 8192, 65536];
/// Requests that are posted together where the rate is measured.
const LISTS: [u32; 3] = [1, 32, 128];

/// Requests that are under way at most where the rate is measured, by default of both.
pub(super) const DEPTH: u32 = 128;

/// Something that both can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PerftestOperation {
    /// As perftest's programs spell it.
    verb: &'static str,
    size: u32,
    /// Requests that are posted together, or nothing for one under way.
    pub(super) list: Option<u32>,
}

impl PerftestOperation {
    /// Latencies of three operations, then rates of short messages.
    pub(super) fn all() -> Vec<PerftestOperation> {
        let latency = |verb| SIZES.map(|size| PerftestOperation { verb, size, list: None });
        let rate = |verb| LISTS.map(|list| PerftestOperation { verb, size: 2, list: Some(list) });
        let latencies = ["send", "write", "read"].into_iter().flat_map(latency);
        latencies.chain(["send", "write"].into_iter().flat_map(rate)).collect()
    }

    pub(super) fn name(&self) -> String {
        let size = match self.size {
            size if size % 1024 == 0 => format!("{} KiB", size / 1024),
            size => format!("{size} B"),
        };
        match self.list {
            None => format!("{} latency {size}", self.verb),
            Some(list) => format!("{} rate {size}, {list} at once", self.verb),
        }
    }

    /// Whether each message is answered by another.
    pub(super) fn is_answered(&self) -> bool {
        self.list.is_none() && self.verb != "read"
    }

    /// The command that runs both sides.
    pub(super) fn script(&self, program: Program, iterations: u64, counted: bool) -> Vec<String> {
        let PerftestOperation { verb, size, list } = self;
        let what = if list.is_some() { "bw" } else { "lat" };
        let mut side = match program {
            Program::Theirs => format!("ib_{verb}_{what} -F -m 1024"),
            _ => format!("bench-traffic {verb}_{what}"),
        };
        // Without it perftest would send small messages of its latency tests inline.
        if program == Program::Theirs && list.is_none() && *verb != "read" {
            side.push_str(" -I 0");
        }
        side.push_str(&format!(" -p 18515 -x 1 -s {size} -n {iterations}"));
        if let Some(list) = list.filter(|list| *list > 1) {
            side.push_str(&format!(" -l {list}"));
        }
        pair(&side, counted)
    }

    /// Microseconds per message.
    pub(super) fn microseconds(&self, program: Program, output: &str) -> Result<f64> {
        let found = match program {
            Program::Theirs => self.of_table(output),
            _ => numbers_before(output, "µs per message").pop(),
        };
        found.with_context(|| format!("no result in:\n{output}"))
    }

    /// Of the last line that begins with the size: the average, or what the rate in millions says.
    fn of_table(&self, output: &str) -> Option<f64> {
        let size = self.size.to_string();
        let rows = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = rows.rev().find(|row| row.first() == Some(&size.as_str()))?;
        match self.list {
            None => row.get(5)?.parse().ok(),
            Some(_) => Some(1.0 / row.get(4)?.parse::<f64>().ok()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_have_the_same_options() {
        let one = PerftestOperation { verb: "write", size: 2, list: Some(32) };
        assert_eq!(one.name(), "write rate 2 B, 32 at once");
        let ours = one.script(Program::Ours, 640, true).pop().unwrap();
        let side = "lab-count bench-traffic write_bw -p 18515 -x 1 -s 2 -n 640 -l 32";
        assert!(ours.contains(&format!("\n{side} -d rxe1 10.0.0.1 >")), "{ours}");
        let theirs = one.script(Program::Theirs, 640, false).pop().unwrap();
        let side = "ib_write_bw -F -m 1024 -p 18515 -x 1 -s 2 -n 640 -l 32";
        assert!(theirs.contains(&format!("\n{side} -d rxe0 >")), "{theirs}");
        let one = PerftestOperation { verb: "send", size: 2, list: None };
        let theirs = one.script(Program::Theirs, 640, false).pop().unwrap();
        assert!(theirs.contains("ib_send_lat -F -m 1024 -I 0 -p 18515"), "{theirs}");
    }

    #[test]
    fn tables_are_read() {
        let latency = PerftestOperation { verb: "send", size: 1024, list: None };
        let output = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]\n \
                      1024    500          20.11          99.20        21.40  21.75  3.10 30.00 99.20\n\
                      ------\n";
        assert_eq!(latency.microseconds(Program::Theirs, output).unwrap(), 21.75);
        assert_eq!(latency.microseconds(Program::Ours, "7.250 µs per message\n").unwrap(), 7.25);
        let rate = PerftestOperation { verb: "send", size: 2, list: Some(1) };
        let output =
            " 2          5000             0.25               0.24               0.125000\n";
        assert_eq!(rate.microseconds(Program::Theirs, output).unwrap(), 8.0);
        assert!(rate.microseconds(Program::Theirs, "nothing").is_err());
    }
}
