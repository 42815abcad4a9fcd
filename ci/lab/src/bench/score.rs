//! What a bench found: a table for people, one object for programs.

use super::pingpong::Operation;
use serde::Serialize;
use std::fmt;

/// All operations on one machine.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Score {
    pub(super) kernel: String,
    pub(super) device: String,
    pub(super) accelerator: String,
    /// Pairs of runs for each operation.
    pub(super) runs: u32,
    pub(super) rows: Vec<Row>,
}

/// One operation. The ratio is ours to theirs: below 1 we are faster.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    operation: String,
    /// Messages under way at once.
    in_flight: u32,
    ours_usec_per_iteration: f64,
    theirs_usec_per_iteration: f64,
    /// Messages per second, both directions together.
    ours_message_rate: f64,
    theirs_message_rate: f64,
    /// Median of the ratios of neighbouring runs' times.
    ratio: f64,
    lowest_ratio: f64,
    highest_ratio: f64,
    ours_syscalls_per_message: f64,
    theirs_syscalls_per_message: f64,
}

impl Row {
    /// From neighbouring runs, ours and theirs, in microseconds per iteration, and from system
    /// calls per message.
    pub(super) fn new(operation: &Operation, pairs: &[[f64; 2]], calls: [f64; 2]) -> Row {
        let ours = median(pairs.iter().map(|[ours, _]| *ours));
        let theirs = median(pairs.iter().map(|[_, theirs]| *theirs));
        let ratios = || pairs.iter().map(|[ours, theirs]| ours / theirs);
        let [ours_syscalls_per_message, theirs_syscalls_per_message] = calls;
        // An iteration is a message there and one back.
        let rate = |microseconds: f64| 2e6 / microseconds;
        Row {
            operation: operation.name(),
            in_flight: operation.queue_pairs,
            ours_usec_per_iteration: ours,
            theirs_usec_per_iteration: theirs,
            ours_message_rate: rate(ours),
            theirs_message_rate: rate(theirs),
            ratio: median(ratios()),
            lowest_ratio: ratios().fold(f64::INFINITY, f64::min),
            highest_ratio: ratios().fold(0.0, f64::max),
            ours_syscalls_per_message,
            theirs_syscalls_per_message,
        }
    }
}

/// The middle one; the mean of the middle two of an even number.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[half],
        _ => (values[half - 1] + values[half]) / 2.0,
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Score { kernel, device, accelerator, runs, .. } = self;
        writeln!(f, "{device} on Linux {kernel} under {accelerator}, {runs} pairs of runs")?;
        writeln!(
            f,
            "{:<22} {:>21}  {:>19}  {:>19}  {:>13}",
            "", "µs per iteration", "messages per second", "ratio of times", "calls/message"
        )?;
        writeln!(
            f,
            "{:<22} {:>10} {:>10}  {:>9} {:>9}  {:>6} {:>12}  {:>6} {:>6}",
            "operation", "ours", "theirs", "ours", "theirs", "median", "range", "ours", "theirs"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<22} {:>10.2} {:>10.2}  {:>9.0} {:>9.0}  {:>6.3} {:>12}  {:>6.2} {:>6.2}",
                row.operation,
                row.ours_usec_per_iteration,
                row.theirs_usec_per_iteration,
                row.ours_message_rate,
                row.theirs_message_rate,
                row.ratio,
                format!("{:.2} – {:.2}", row.lowest_ratio, row.highest_ratio),
                row.ours_syscalls_per_message,
                row.theirs_syscalls_per_message
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_neighbours() {
        let operation = Operation { kind: "rc", queue_pairs: 1, size: 4096, events: false };
        // The machine got slower and slower; each pair says 2.
        let pairs = [[20.0, 10.0], [40.0, 20.0], [90.0, 45.0]];
        let row = Row::new(&operation, &pairs, [1.0, 1.5]);
        assert_eq!((row.ratio, row.lowest_ratio, row.highest_ratio), (2.0, 2.0, 2.0));
        assert_eq!((row.ours_usec_per_iteration, row.theirs_usec_per_iteration), (40.0, 20.0));
        assert_eq!(row.ours_message_rate, 50_000.0);
        assert_eq!(row.theirs_syscalls_per_message, 1.5);
        let score = Score {
            kernel: "7.2".into(),
            device: "rxe".into(),
            accelerator: "tcg".into(),
            runs: 3,
            rows: vec![row],
        };
        assert!(score.to_string().contains("rc polled 4 KiB"), "{score}");
        assert!(score.to_string().contains("2.00 – 2.00"), "{score}");
    }

    #[test]
    fn an_even_number_has_two_in_the_middle() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0].into_iter()), 2.5);
    }
}
