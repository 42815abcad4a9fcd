//! One table for each suite: operation, ours, theirs, their ratio and how far it spreads, and
//! whether the target was met.

use super::score;
use serde::Serialize;
use std::fmt;

/// The bound that must not be exceeded, or has to be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct TableTarget {
    /// Ours, in the table's unit.
    pub(super) ours: Option<f64>,
    /// The ratio of ours to theirs.
    pub(super) ratio: Option<f64>,
    /// The least that ours is meant to be, of a rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) least: Option<f64>,
}

/// One side's result: the value that counts, and the range of all runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Value {
    pub(super) value: f64,
    pub(super) lowest: f64,
    pub(super) highest: f64,
}

impl Value {
    /// The lowest of the runs: where instructions are counted, everything that is added to it is an
    /// interrupt.
    pub(super) fn lowest(runs: &[f64]) -> Option<Value> {
        let mut value = Value::median(runs)?;
        value.value = value.lowest;
        Some(value)
    }

    /// The highest of the runs, of a rate.
    pub(super) fn highest(runs: &[f64]) -> Option<Value> {
        let mut value = Value::median(runs)?;
        value.value = value.highest;
        Some(value)
    }

    /// The median of the runs.
    pub(super) fn median(runs: &[f64]) -> Option<Value> {
        let mut runs = runs.to_vec();
        runs.sort_by(f64::total_cmp);
        let (lowest, highest) = (*runs.first()?, *runs.last()?);
        let half = runs.len() / 2;
        let value = match runs.len() % 2 {
            1 => runs[half],
            _ => (runs[half - 1] + runs[half]) / 2.0,
        };
        Some(Value { value, lowest, highest })
    }

    /// How far the runs lie apart, in parts of the value.
    fn spread(self) -> f64 {
        if self.highest > self.lowest { (self.highest - self.lowest) / self.value } else { 0.0 }
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TableRow {
    pub(super) operation: String,
    /// How the objects were made.
    pub(super) setting: String,
    pub(super) ours: Option<Value>,
    pub(super) theirs: Option<Value>,
    /// Which of their interfaces did best.
    pub(super) their_way: String,
    pub(super) ratio: Option<f64>,
    /// Of pairs of runs, where the median of the ratios would be if there were pairs without end, in 19 of 20 cases.
    pub(super) ratio_between: Option<[f64; 2]>,
    pub(super) target: TableTarget,
    pub(super) met: Option<bool>,
}

impl TableRow {
    pub(super) fn new(
        operation: &str,
        setting: &str,
        ours: Option<Value>,
        theirs: Option<(Value, String)>,
        target: TableTarget,
    ) -> TableRow {
        let their_way = theirs.as_ref().map(|(_, way)| way.clone()).unwrap_or_default();
        let theirs = theirs.map(|(value, _)| value);
        let ratio = ours.zip(theirs).map(|(ours, theirs)| ours.value / theirs.value);
        // Nothing to nothing has none.
        let ratio = ratio.filter(|ratio| ratio.is_finite());
        let verdicts = [
            target.ours.zip(ours).map(|(limit, ours)| ours.value <= limit),
            target.ratio.zip(ratio).map(|(limit, ratio)| ratio <= limit),
            target.least.zip(ours).map(|(least, ours)| ours.value >= least),
        ];
        let mut verdicts = verdicts.into_iter().flatten().peekable();
        let met = verdicts.peek().is_some().then(|| verdicts.all(|met| met));
        TableRow {
            operation: operation.to_owned(),
            setting: setting.to_owned(),
            ours,
            theirs,
            their_way,
            ratio,
            ratio_between: None,
            target,
            met,
        }
    }

    /// From runs of ours and theirs that follow one another: the ratio is the median of each pair's.
    pub(super) fn of_pairs(operation: &str, setting: &str, pairs: &[[f64; 2]]) -> TableRow {
        let side =
            |at: usize| Value::median(&pairs.iter().map(|pair| pair[at]).collect::<Vec<_>>());
        let ratios = || pairs.iter().map(|[ours, theirs]| ours / theirs);
        let theirs = side(1).map(|theirs| (theirs, String::new()));
        let row = TableRow::new(operation, setting, side(0), theirs, TableTarget::default());
        let ratio = row.ratio.map(|_| score::median(ratios()));
        TableRow { ratio, ratio_between: score::median_interval(ratios()), ..row }
    }
}

/// The result of a suite.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Table {
    pub(super) title: String,
    pub(super) unit: String,
    pub(super) kernel: String,
    /// Empty if the suite runs on this machine.
    pub(super) accelerator: String,
    pub(super) runs: u32,
    pub(super) rows: Vec<TableRow>,
    /// Why rows are missing, and other remarks.
    pub(super) notes: Vec<String>,
}

/// A number with about three figures.
fn short(number: f64) -> String {
    match number {
        number if number >= 1e9 => format!("{:.2}G", number / 1e9),
        number if number >= 1e6 => format!("{:.2}M", number / 1e6),
        number if number >= 1e5 => format!("{:.0}k", number / 1e3),
        number if number >= 100.0 => format!("{number:.0}"),
        number if number >= 10.0 => format!("{number:.1}"),
        number => format!("{number:.2}"),
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Table { title, unit, kernel, accelerator, runs, rows, notes } = self;
        let under = if accelerator.is_empty() { "" } else { " under " };
        writeln!(f, "{title}, in {unit}\nLinux {kernel}{under}{accelerator}, {runs} runs\n")?;
        let width = |text: fn(&TableRow) -> &str| {
            rows.iter().map(|row| text(row).chars().count()).max().unwrap_or(0).max(9)
        };
        let (first, second) = (width(|row| &row.operation), width(|row| &row.setting));
        writeln!(
            f,
            "{:<first$}  {:<second$} {:>8} {:>8} {:>6} {:>13}{}",
            "operation",
            "setting",
            "ours",
            "theirs",
            "ratio",
            "spread",
            if rows.iter().any(|row| row.target != TableTarget::default()) {
                "  target"
            } else {
                ""
            }
        )?;
        let value = |value: &Option<Value>| match value {
            Some(value) => short(value.value),
            None => "–".to_owned(),
        };
        let percent = |value: &Option<Value>| match value {
            Some(value) => format!("{:.1}%", 100.0 * value.spread()),
            None => "–".to_owned(),
        };
        for row in rows {
            let ratio = row.ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
            let limits = [
                row.target.ours.map(|limit| format!("≤ {}", short(limit))),
                row.target.ratio.map(|limit| format!("ratio ≤ {limit}")),
                row.target.least.map(|least| format!("≥ {}", short(least))),
            ];
            let between = row.ratio_between;
            let between =
                between.map(|[least, most]| format!("{least:.2} – {most:.2} in 19 of 20"));
            let limits: Vec<String> = limits.into_iter().chain([between]).flatten().collect();
            let verdict = match row.met {
                Some(true) => "met: ",
                Some(false) => "missed: ",
                None => "",
            };
            let line = format!(
                "{:<first$}  {:<second$} {:>8} {:>8} {:>6} {:>6} {:>6}  {verdict}{}",
                row.operation,
                row.setting,
                value(&row.ours),
                value(&row.theirs),
                ratio,
                percent(&row.ours),
                percent(&row.theirs),
                limits.join(", ")
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        for note in notes {
            writeln!(f, "\n{note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    #[test]
    fn values_come_from_runs() {
        let runs = [30.0, 10.0, 20.0];
        assert_eq!(Value::lowest(&runs).unwrap().value, 10.0);
        assert_eq!(Value::highest(&runs).unwrap().value, 30.0);
        assert_eq!(Value::median(&runs).unwrap().value, 20.0);
        assert_eq!(Value::median(&[1.0, 4.0, 2.0, 3.0]).unwrap().value, 2.5);
        assert_eq!(Value::median(&runs).unwrap().spread(), 1.0);
        assert_eq!(Value::lowest(&[]), None);
    }

    #[test]
    fn a_target_is_met_when_all_of_it_is() {
        let value = |value| Value { value, lowest: value, highest: value };
        let row = |ours: f64, theirs: f64, target| {
            let theirs = Some((value(theirs), "classic".into()));
            TableRow::new("write", "shared", Some(value(ours)), theirs, target)
        };
        let both = TableTarget { ours: Some(90.0), ratio: Some(0.5), least: None };
        assert_eq!(row(90.0, 180.0, both).met, Some(true));
        assert_eq!(row(91.0, 200.0, both).met, Some(false));
        assert_eq!(row(80.0, 100.0, both).met, Some(false));
        assert_eq!(row(80.0, 100.0, TableTarget::default()).met, None);
        let rate = TableTarget { least: Some(90.0), ..TableTarget::default() };
        assert_eq!(row(90.0, 180.0, rate).met, Some(true));
        assert_eq!(row(89.0, 180.0, rate).met, Some(false));
        let alone = TableRow::new("write", "shared", Some(value(80.0)), None, both);
        assert_eq!((alone.ratio, alone.met), (None, Some(true)), "nothing to compare with");
        let none = TableRow::new("write", "shared", None, None, both);
        assert_eq!(none.met, None);
    }

    #[test]
    fn pairs_tell_their_ratio_and_where_it_lies() {
        // The machine got slower and slower; five of six pairs say 2.
        let pairs =
            [[20.0, 10.0], [30.0, 15.0], [80.0, 40.0], [100.0, 50.0], [2.0, 1.0], [9.0, 3.0]];
        let row = TableRow::of_pairs("connect", "µs", &pairs);
        assert_eq!((row.ratio, row.ratio_between, row.met), (Some(2.0), Some([2.0, 3.0]), None));
        assert_eq!(row.ours.unwrap().value, 25.0);
        let few = TableRow::of_pairs("connect", "µs", &pairs[..5]);
        assert_eq!((few.ratio, few.ratio_between), (Some(2.0), None));
        let none = TableRow::of_pairs("connect", "µs", &[]);
        assert_eq!((none.ratio, none.ratio_between), (None, None));
        let text = table(vec![row]).to_string();
        assert!(text.contains("2.00"), "{text}");
        assert!(text.contains("  2.00 – 3.00 in 19 of 20\n"), "{text}");
    }

    fn table(rows: Vec<TableRow>) -> Table {
        Table {
            title: "mlx5".into(),
            unit: "instructions".into(),
            kernel: "7.2".into(),
            accelerator: "tcg".into(),
            runs: 9,
            rows,
            notes: vec!["theirs has no thread domain".into()],
        }
    }

    #[test]
    fn a_table_says_what_was_missed() {
        let value = |value| Value { value, lowest: value, highest: 1.1 * value };
        let target = TableTarget { ratio: Some(0.5), ..TableTarget::default() };
        let text = table(vec![TableRow::new(
            "write",
            "doorbell",
            Some(value(200.0)),
            Some((value(236.0), "extended".into())),
            target,
        )])
        .to_string();
        assert!(text.contains("write      doorbell       200      236   0.85"), "{text}");
        assert!(text.contains("10.0%  10.0%  missed: ratio ≤ 0.5"), "{text}");
        assert!(text.ends_with("\ntheirs has no thread domain\n"), "{text}");
        let rate = TableTarget { least: Some(200e3), ..TableTarget::default() };
        let row = TableRow::new("send", "messages/s", Some(value(150e3)), None, rate);
        let here = Table { accelerator: String::new(), ..table(vec![row]) }.to_string();
        assert!(
            here.contains("\nLinux 7.2, 9 runs\n") && here.contains("missed: ≥ 200k"),
            "{here}"
        );
    }

    /// Programs that compare one day's tables with another's read this.
    #[test]
    fn a_table_is_an_object_of_all_that_it_says() {
        let value = |value| Value { value, lowest: 0.5 * value, highest: 2.0 * value };
        let theirs = |number| Some((value(number), "extended".to_owned()));
        let rows = vec![
            TableRow::new(
                "write",
                "doorbell",
                Some(value(200.0)),
                theirs(250.0),
                TableTarget { ours: Some(201.5), ratio: Some(0.5), least: None },
            ),
            TableRow::new(
                "arm",
                "",
                Some(value(8.0)),
                None,
                TableTarget { ratio: Some(1.0), ..TableTarget::default() },
            ),
            TableRow::new("poll", "", None, theirs(1.0), TableTarget::default()),
            TableRow::new(
                "build",
                "",
                Some(value(0.0)),
                theirs(0.0),
                TableTarget { ratio: Some(1.0), ..TableTarget::default() },
            ),
        ];
        let table = Table {
            title: "the data path of mlx5".into(),
            unit: "instructions".into(),
            kernel: "7.2".into(),
            accelerator: "tcg".into(),
            runs: 9,
            rows,
            notes: vec!["theirs has no thread domain".into()],
        };
        let expected = json!({
            "title": "the data path of mlx5",
            "unit": "instructions",
            "kernel": "7.2",
            "accelerator": "tcg",
            "runs": 9,
            "rows": [
                {
                    "operation": "write",
                    "setting": "doorbell",
                    "ours": { "value": 200.0, "lowest": 100.0, "highest": 400.0 },
                    "theirs": { "value": 250.0, "lowest": 125.0, "highest": 500.0 },
                    "their_way": "extended",
                    "ratio": 0.8,
                    "ratio_between": null,
                    "target": { "ours": 201.5, "ratio": 0.5 },
                    "met": false,
                },
                {
                    "operation": "arm",
                    "setting": "",
                    "ours": { "value": 8.0, "lowest": 4.0, "highest": 16.0 },
                    "theirs": null,
                    "their_way": "",
                    "ratio": null,
                    "ratio_between": null,
                    "target": { "ours": null, "ratio": 1.0 },
                    "met": null,
                },
                {
                    "operation": "poll",
                    "setting": "",
                    "ours": null,
                    "theirs": { "value": 1.0, "lowest": 0.5, "highest": 2.0 },
                    "their_way": "extended",
                    "ratio": null,
                    "ratio_between": null,
                    "target": { "ours": null, "ratio": null },
                    "met": null,
                },
                {
                    "operation": "build",
                    "setting": "",
                    "ours": { "value": 0.0, "lowest": 0.0, "highest": 0.0 },
                    "theirs": { "value": 0.0, "lowest": 0.0, "highest": 0.0 },
                    "their_way": "extended",
                    "ratio": null,
                    "ratio_between": null,
                    "target": { "ours": null, "ratio": 1.0 },
                    "met": null,
                },
            ],
            "notes": ["theirs has no thread domain"],
        });
        let printed = serde_json::to_string_pretty(&table).unwrap();
        assert_eq!(serde_json::from_str::<Json>(&printed).unwrap(), expected, "{printed}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(short(1.234), "1.23");
        assert_eq!(short(45.67), "45.7");
        assert_eq!(short(236.4), "236");
        assert_eq!(short(12_345.0), "12345");
        assert_eq!(short(123_456.0), "123k");
        assert_eq!(short(12_345_678.0), "12.35M");
    }
}
