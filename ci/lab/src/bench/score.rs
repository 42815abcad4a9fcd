//! The result of a suite that times ours and theirs in pairs, one right after the other: a table for people, one object
//! for programs.

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
    pub(super) rows: Vec<ScoreRow>,
    /// Why rows are missing at the end.
    pub(super) failure: Option<String>,
}

/// One operation. The ratio is ours to theirs: below 1 we are faster.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ScoreRow {
    operation: String,
    /// Messages under way at once.
    in_flight: u32,
    ours_usec_per_iteration: f64,
    theirs_usec_per_iteration: f64,
    /// Messages per second, both directions together.
    ours_message_rate: f64,
    theirs_message_rate: f64,
    /// Median of the pairs' ratios of times.
    ratio: f64,
    lowest_ratio: f64,
    highest_ratio: f64,
    /// Confidence interval of the median, at 95 %; `None` for fewer than six pairs.
    ratio_between: Option<[f64; 2]>,
    ours_syscalls_per_message: f64,
    theirs_syscalls_per_message: f64,
    target: Target,
    verdict: Verdict,
    /// Why each pair that was run a second time failed the first time.
    repeated: Vec<String>,
}

/// The pairs' verdict on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// The median is within it.
    Met,
    /// The median is beyond it, and its confidence interval is not.
    Undecided,
    /// The whole interval is beyond it, or there are more system calls than allowed.
    Missed,
}

/// The aim for an operation.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Target {
    /// The ratio of times at most.
    pub(super) time: f64,
    /// No more system calls than theirs.
    pub(super) calls: bool,
}

impl ScoreRow {
    /// From `pairs` of times, ours and theirs, in microseconds per iteration, and `calls`, system calls per message.
    /// `in_flight` messages are under way at once, and an iteration has `together` of them.
    pub(super) fn new(
        operation: &str,
        [in_flight, together]: [u32; 2],
        pairs: &[[f64; 2]],
        calls: [f64; 2],
        target: Target,
    ) -> ScoreRow {
        let ours = median(pairs.iter().map(|[ours, _]| *ours));
        let theirs = median(pairs.iter().map(|[_, theirs]| *theirs));
        let ratios = || pairs.iter().map(|[ours, theirs]| ours / theirs);
        let [ours_syscalls_per_message, theirs_syscalls_per_message] = calls;
        let rate = |microseconds: f64| 1e6 * f64::from(together) / microseconds;
        let ratio = median(ratios());
        // Rare calls, less than one in 200 messages, do not count.
        let calls_met = ours_syscalls_per_message <= theirs_syscalls_per_message + 0.005;
        let ratio_between = median_interval(ratios());
        let lower = ratio_between.map_or(f64::NEG_INFINITY, |[lower, _]| lower);
        let verdict = match (calls_met || !target.calls, ratio <= target.time) {
            (true, true) => Verdict::Met,
            (true, false) if !pairs.is_empty() && lower <= target.time => Verdict::Undecided,
            _ => Verdict::Missed,
        };
        ScoreRow {
            operation: operation.to_owned(),
            in_flight,
            ours_usec_per_iteration: ours,
            theirs_usec_per_iteration: theirs,
            ours_message_rate: rate(ours),
            theirs_message_rate: rate(theirs),
            ratio,
            lowest_ratio: ratios().fold(f64::INFINITY, f64::min),
            highest_ratio: ratios().fold(f64::NEG_INFINITY, f64::max),
            ratio_between,
            ours_syscalls_per_message,
            theirs_syscalls_per_message,
            target,
            verdict,
            repeated: Vec::new(),
        }
    }

    /// The row with the failures of its repeated pairs.
    pub(super) fn repeated(self, repeated: Vec<String>) -> ScoreRow {
        ScoreRow { repeated, ..self }
    }
}

impl fmt::Display for ScoreRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Met => "met",
            Verdict::Undecided => "undecided",
            Verdict::Missed => "missed",
        };
        let between = match self.ratio_between {
            Some([least, most]) => format!("{least:.2} – {most:.2}"),
            None => "few".into(),
        };
        let calls = if self.target.calls { ", no more calls" } else { "" };
        write!(
            f,
            "{:<28} {:>10.2} {:>10.2}  {:>9.0} {:>9.0}  {:>6.3} {:>12}  {:>6.2} {:>6.2}  {verdict}: ≤ {:.2}{calls}",
            self.operation,
            self.ours_usec_per_iteration,
            self.theirs_usec_per_iteration,
            self.ours_message_rate,
            self.theirs_message_rate,
            self.ratio,
            between,
            self.ours_syscalls_per_message,
            self.theirs_syscalls_per_message,
            self.target.time,
        )?;
        match self.repeated.len() {
            0 => Ok(()),
            count => write!(f, "; repeated after a failure: {count}"),
        }
    }
}

/// The middle one; the mean of the middle two of an even number.
pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[half],
        _ => (values[half - 1] + values[half]) / 2.0,
    }
}

/// The confidence interval of the median at 95 %, from the values in order. Each value is below the true median by
/// chance of one half, so that the number of those below is binomial: on either side as many are left out as still
/// happens in at most one case of 40. Fewer than six values have no such interval.
pub(super) fn median_interval(values: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    const TAIL: f64 = 1.0 / 40.0;
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let count = values.len();
    // The logarithm of the probability that exactly `below` are below: the probability itself can be too small for `f64`.
    let mut log_exactly = count as f64 * 0.5_f64.ln();
    let mut at_most = log_exactly.exp();
    let mut below = 0;
    while at_most <= TAIL {
        log_exactly += ((count - below) as f64 / (below + 1) as f64).ln();
        at_most += log_exactly.exp();
        below += 1;
    }
    let outside = below.checked_sub(1)?;
    Some([*values.get(outside)?, *values.get(count.checked_sub(outside + 1)?)?])
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Score { kernel, device, accelerator, runs, .. } = self;
        writeln!(f, "{device} on Linux {kernel} under {accelerator}, {runs} pairs of runs")?;
        writeln!(
            f,
            "{:<28} {:>21}  {:>19}  {:>19}  {:>13}",
            "", "µs per iteration", "messages per second", "ratio of times", "calls/message"
        )?;
        writeln!(
            f,
            "{:<28} {:>10} {:>10}  {:>9} {:>9}  {:>6} {:>12}  {:>6} {:>6}",
            "operation", "ours", "theirs", "ours", "theirs", "median", "19 of 20", "ours", "theirs"
        )?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{row}"))?;
        for row in &self.rows {
            for reason in &row.repeated {
                writeln!(f, "{}: repeated after: {reason}", row.operation)?;
            }
        }
        self.failure.iter().try_for_each(|failure| writeln!(f, "not whole: {failure}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn the_ratio_is_the_median_of_neighbours() {
        // The machine got slower and slower; each pair says 2.
        let pairs = [10.0, 15.0, 20.0, 20.0, 45.0, 50.0].map(|theirs| [2.0 * theirs, theirs]);
        let target = Target { time: 1.05, calls: true };
        let row =
            |pairs: &[_], calls| ScoreRow::new("rc polled 4 KiB", [1, 2], pairs, calls, target);
        assert_eq!(row(&[[10.4, 10.0]], [1.5, 1.5]).verdict, Verdict::Met);
        assert_eq!(row(&[[10.4, 10.0]], [1.6, 1.5]).verdict, Verdict::Missed);
        let few = [[10.0, 10.0], [11.0, 10.0], [12.0, 10.0]];
        assert_eq!(row(&few, [1.5, 1.5]).verdict, Verdict::Undecided);
        assert_eq!(row(&few, [1.6, 1.5]).verdict, Verdict::Missed);
        // Five of five happen by chance once in sixteen times.
        assert_eq!(row(&pairs[1..], [1.0, 1.5]).verdict, Verdict::Undecided);
        assert!(row(&few, [1.5, 1.5]).to_string().contains(" few "));
        let row = row(&pairs, [1.0, 1.5]);
        assert_eq!(row.verdict, Verdict::Missed);
        assert_eq!((row.ratio, row.lowest_ratio, row.highest_ratio), (2.0, 2.0, 2.0));
        assert_eq!((row.ours_usec_per_iteration, row.theirs_usec_per_iteration), (40.0, 20.0));
        assert_eq!(row.ours_message_rate, 50_000.0);
        assert_eq!(row.theirs_syscalls_per_message, 1.5);
        let score = Score {
            kernel: "7.2".into(),
            device: "rxe".into(),
            accelerator: "tcg".into(),
            runs: 6,
            rows: vec![row.repeated(vec!["address 185 of 256".into()])],
            failure: Some("ud polled 2 B: the machine was lost".into()),
        };
        assert!(score.to_string().contains("rc polled 4 KiB"), "{score}");
        assert!(score.to_string().contains("repeated after a failure: 1"), "{score}");
        assert!(score.to_string().contains("4 KiB: repeated after: address 185 of 256"), "{score}");
        assert!(score.to_string().ends_with("not whole: ud polled 2 B: the machine was lost\n"));
        assert!(score.to_string().contains("2.00 – 2.00"), "{score}");
    }

    /// Programs that compare one day's scores with another's read this.
    #[test]
    fn a_score_is_an_object_of_all_that_it_says() {
        let target = Target { time: 1.05, calls: true };
        let pairs = [[20.0, 40.0], [30.0, 40.0]];
        let rows = vec![ScoreRow::new("rc polled 4 KiB", [1, 2], &pairs, [1.0, 1.5], target)];
        let score = Score {
            kernel: "7.2".into(),
            device: "rxe".into(),
            accelerator: "tcg".into(),
            runs: 2,
            rows,
            failure: None,
        };
        let expected = json!({
            "kernel": "7.2",
            "device": "rxe",
            "accelerator": "tcg",
            "runs": 2,
            "rows": [{
                "operation": "rc polled 4 KiB",
                "in_flight": 1,
                "ours_usec_per_iteration": 25.0,
                "theirs_usec_per_iteration": 40.0,
                "ours_message_rate": 80_000.0,
                "theirs_message_rate": 50_000.0,
                "ratio": 0.625,
                "lowest_ratio": 0.5,
                "highest_ratio": 0.75,
                "ratio_between": null,
                "ours_syscalls_per_message": 1.0,
                "theirs_syscalls_per_message": 1.5,
                "target": { "time": 1.05, "calls": true },
                "verdict": "met",
                "repeated": [],
            }],
            "failure": null,
        });
        assert_eq!(printed(&score), expected);
    }

    /// JSON has no NaN.
    #[test]
    fn an_unmeasured_value_is_null_and_meets_nothing() {
        let row = ScoreRow::new("ud", [1, 1], &[], [0.0; 2], Target { time: 1.0, calls: false });
        let printed = printed(&row);
        for missing in [
            "ours_usec_per_iteration",
            "theirs_message_rate",
            "ratio",
            "lowest_ratio",
            "highest_ratio",
            "ratio_between",
        ] {
            assert_eq!(printed.get(missing), Some(&Value::Null), "{missing}");
        }
        assert_eq!(printed["verdict"], "missed");
    }

    /// As it is printed, read again.
    fn printed(what: &impl Serialize) -> Value {
        serde_json::from_str(&serde_json::to_string_pretty(what).unwrap()).unwrap()
    }

    #[test]
    fn more_pairs_tell_more() {
        let values = |count: u32| (0..count).map(f64::from);
        assert!((0..6).all(|few| median_interval(values(few)).is_none()));
        // From tables of the binomial distribution, counted from none.
        for (count, ends) in [
            (6, [0.0, 5.0]),
            (8, [0.0, 7.0]),
            (9, [1.0, 7.0]),
            (15, [3.0, 11.0]),
            (100, [39.0, 60.0]),
        ] {
            assert_eq!(median_interval(values(count)), Some(ends), "{count}");
        }
        // No heads at all of so many would be a number too small to hold.
        assert_eq!(median_interval(values(10_000)), Some([4901.0, 5098.0]));
    }

    #[test]
    fn an_even_number_has_two_in_the_middle() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0].into_iter()), 2.5);
    }
}
