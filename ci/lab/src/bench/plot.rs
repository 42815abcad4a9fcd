//! Plots of what a suite found, as SVG files that `docs/BENCHMARKS.md` shows.
//!
//! They are drawn from the same JSON that `--json` prints: the ratio of each operation, what one more
//! object costs when there are many, and the time of a message by its size.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Width of a figure, in the unit of SVG.
const WIDTH: f64 = 840.0;
/// Height of a bar with the gap below it.
const BAR: f64 = 20.0;
/// Where bars begin; their labels end before.
const LABELS: f64 = 330.0;
/// Panels in a row of a figure.
const COLUMNS: usize = 3;
/// Width and height of a panel with its axes.
const PANEL: [f64; 2] = [WIDTH / COLUMNS as f64, 190.0];

// Colours that are readable on white and on black.
const OURS: &str = "#3b82d6";
const THEIRS: &str = "#b0641f";
const TEXT: &str = "#7a7a7a";

/// A file to be written.
#[derive(Debug, PartialEq)]
pub(super) struct Plot {
    pub(super) name: String,
    pub(super) svg: String,
}

/// A kind of plot with a line for each side: what is across, and what is up.
#[derive(Debug)]
struct Lines {
    /// The last part of the file's name.
    name: &'static str,
    title: &'static str,
    /// Below each panel; that axis is logarithmic.
    across: &'static str,
    /// Whether the upright axis is logarithmic, too, in place of one that begins at 0.
    logarithmic: bool,
    /// The line that a row is of, and the row's place across.
    place: fn(&Value) -> Option<(String, f64)>,
}

const LINES: [Lines; 2] = [
    Lines {
        name: "scaling",
        title: "the cost of one more object when there are as many",
        across: "objects",
        logarithmic: false,
        place: count,
    },
    Lines {
        name: "size",
        title: "microseconds, by the size of a message",
        across: "bytes",
        logarithmic: true,
        place: size,
    },
];

/// One operation at several sizes, or with several numbers of objects.
#[derive(Debug, PartialEq)]
struct Series {
    title: String,
    /// Size or number, ours, theirs.
    points: Vec<[f64; 3]>,
}

/// The beginning of each plot.
const HEAD: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ";

/// Fails if a file that is no plot would be lost at a path.
pub(super) fn check_place(path: &Path) -> Result<()> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.with_context(|| format!("--plots: {}", path.display()))?,
    };
    if !bytes.is_empty() && !bytes.starts_with(HEAD.as_bytes()) {
        bail!(
            "--plots: {} is no plot, and stays: move it, or name another directory",
            path.display()
        );
    }
    Ok(())
}

/// Makes the directory for plots. Fails before anything is measured if a suite's plot could replace another file.
pub(super) fn prepare(directory: &Path, suites: &[String]) -> Result<()> {
    let named = || format!("--plots {}", directory.display());
    fs::create_dir_all(directory).with_context(named)?;
    for entry in fs::read_dir(directory).with_context(named)? {
        let path = entry.with_context(named)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_of = |suite: &String| {
            name.ends_with(".svg")
                && name.strip_prefix(suite.as_str()).is_some_and(|rest| rest.starts_with('-'))
        };
        if suites.iter().any(is_of) {
            check_place(&path)?;
        }
    }
    Ok(())
}

/// The plots of a suite's result; none of rows that have nothing to draw.
pub(super) fn plots(suite: &str, result: &Value) -> Vec<Plot> {
    let rows = result["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut plots = Vec::new();
    let ratios: Vec<_> = rows.iter().filter_map(ratio).collect();
    if !ratios.is_empty() {
        let title = format!("{suite}: ours to theirs, less is better");
        plots.push(Plot { name: format!("{suite}-ratio.svg"), svg: bars(&title, &ratios) });
    }
    for lines in &LINES {
        let series = series(rows, lines.place);
        if !series.is_empty() {
            let title = format!("{suite}: {}", lines.title);
            let name = format!("{suite}-{}.svg", lines.name);
            plots.push(Plot { name, svg: panels(&title, lines, &series) });
        }
    }
    plots
}

fn text<'v>(row: &'v Value, key: &str) -> &'v str {
    row[key].as_str().unwrap_or_default()
}

/// An operation and its ratio.
fn ratio(row: &Value) -> Option<(String, f64)> {
    // A row at a number of objects is a point of a series, and a growth is seen there.
    if count(row).is_some() || text(row, "operation").ends_with(", ratio") {
        return None;
    }
    let label = format!("{} {}", text(row, "operation"), text(row, "setting"));
    Some((label.trim_end().to_owned(), row["ratio"].as_f64()?))
}

/// The operation and the number of objects of a row that has one.
fn count(row: &Value) -> Option<(String, f64)> {
    let number = text(row, "setting").strip_prefix("at ")?.parse().ok()?;
    Some((text(row, "operation").to_owned(), number))
}

/// The operation and the bytes of a row whose name has a size: `send polled 4 KiB`,
/// `write rate 64 B, 16 at once`.
fn size(row: &Value) -> Option<(String, f64)> {
    let (operation, behind) = match text(row, "operation").split_once(", ") {
        Some((operation, behind)) => (operation, format!(", {behind}")),
        None => (text(row, "operation"), String::new()),
    };
    let (operation, unit) = operation.rsplit_once(' ')?;
    let (operation, number) = operation.rsplit_once(' ')?;
    let factor = match unit {
        "B" => 1.0,
        "KiB" => 1024.0,
        _ => return None,
    };
    Some((format!("{operation}{behind}"), number.parse::<f64>().ok()? * factor))
}

/// Ours and theirs of a row, where both were measured.
fn values(row: &Value) -> Option<[f64; 2]> {
    let pair = |ours: &Value, theirs: &Value| Some([ours.as_f64()?, theirs.as_f64()?]);
    pair(&row["ours"]["value"], &row["theirs"]["value"])
        .or_else(|| pair(&row["ours_usec_per_iteration"], &row["theirs_usec_per_iteration"]))
}

/// Rows that differ only by their place on the axis, together; a line needs three of them.
fn series(rows: &[Value], place: fn(&Value) -> Option<(String, f64)>) -> Vec<Series> {
    let mut found: Vec<Series> = Vec::new();
    for row in rows {
        let (Some((title, at)), Some([ours, theirs])) = (place(row), values(row)) else { continue };
        let at = match found.iter().position(|series| series.title == title) {
            Some(known) => (known, at),
            None => {
                found.push(Series { title, points: Vec::new() });
                (found.len() - 1, at)
            }
        };
        found[at.0].points.push([at.1, ours, theirs]);
    }
    found.retain(|series| series.points.len() >= 3);
    for series in &mut found {
        series.points.sort_by(|one, other| one[0].total_cmp(&other[0]));
    }
    found
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn label(svg: &mut String, [x, y]: [f64; 2], anchor: &str, color: &str, text: &str) {
    let text = escaped(text);
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{color}\">{text}</text>"
    );
}

fn line(svg: &mut String, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], color: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{color}\"/>"
    );
}

fn figure(height: f64, title: &str, content: &str) -> String {
    let mut svg = format!(
        "{HEAD}{WIDTH} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n"
    );
    label(&mut svg, [10.0, 18.0], "start", TEXT, title);
    svg + content + "</svg>\n"
}

/// A bar for each ratio, and a line where both would be equal.
fn bars(title: &str, ratios: &[(String, f64)]) -> String {
    let most = ratios.iter().map(|(_, ratio)| *ratio).fold(1.0, f64::max) * 1.05;
    let scale = (WIDTH - LABELS - 60.0) / most;
    let top = 30.0;
    let mut svg = String::new();
    for (place, (name, ratio)) in ratios.iter().enumerate() {
        let y = top + BAR * place as f64;
        label(&mut svg, [LABELS - 8.0, y + 13.0], "end", TEXT, name);
        let (width, height) = (ratio * scale, BAR - 5.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{LABELS}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{OURS}\"/>"
        );
        label(&mut svg, [LABELS + width + 5.0, y + 13.0], "start", TEXT, &format!("{ratio:.2}"));
    }
    let bottom = top + BAR * ratios.len() as f64;
    line(&mut svg, [LABELS + scale, top], [LABELS + scale, bottom], THEIRS);
    label(&mut svg, [LABELS + scale, bottom + 14.0], "middle", THEIRS, "equal");
    figure(bottom + 24.0, title, &svg)
}

/// The power of ten at or below a number, and the one at or above it.
fn decades(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values.filter(|value| *value > 0.0) {
        least = least.min(value.log10().floor());
        most = most.max(value.log10().ceil());
    }
    if least.is_finite() { [least, most.max(least + 1.0)] } else { [0.0, 1.0] }
}

/// From 0 to the next of 1, 2 or 5 times a power of ten that is above all values.
fn from_zero(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let most = values.fold(0.0, f64::max);
    if most <= 0.0 {
        return [0.0, 1.0];
    }
    let power = 10_f64.powf(most.log10().floor());
    let round = [1.0, 2.0, 5.0].into_iter().map(|factor| factor * power);
    [0.0, round.into_iter().find(|round| *round >= most).unwrap_or(10.0 * power)]
}

/// A panel for each operation.
fn panels(title: &str, lines: &Lines, series: &[Series]) -> String {
    let top = 40.0;
    let mut svg = String::new();
    label(&mut svg, [WIDTH - 120.0, 18.0], "end", OURS, "ours");
    label(&mut svg, [WIDTH - 60.0, 18.0], "end", THEIRS, "theirs");
    for (place, series) in series.iter().enumerate() {
        let left = PANEL[0] * (place % COLUMNS) as f64 + 50.0;
        let head = top + PANEL[1] * (place / COLUMNS) as f64;
        let (right, foot) = (left + PANEL[0] - 70.0, head + PANEL[1] - 55.0);
        let across = decades(series.points.iter().map(|point| point[0]));
        let values = series.points.iter().flat_map(|point| [point[1], point[2]]);
        let up = match lines.logarithmic {
            true => decades(values).map(|power| 10_f64.powf(power)),
            false => from_zero(values),
        };
        let share = |value: f64, [least, most]: [f64; 2]| (value - least) / (most - least);
        let position = |at: f64, value: f64| {
            let height = match lines.logarithmic {
                true => share(value.max(up[0]).log10(), up.map(f64::log10)),
                false => share(value, up),
            };
            [
                left + share(at.log10(), across) * (right - left),
                foot - height * (foot - head - 15.0),
            ]
        };
        label(&mut svg, [left, head + 8.0], "start", TEXT, &series.title);
        line(&mut svg, [left, head + 15.0], [left, foot], TEXT);
        line(&mut svg, [left, foot], [right, foot], TEXT);
        for value in up {
            let [_, y] = position(10_f64.powf(across[0]), value);
            label(&mut svg, [left - 5.0, y + 4.0], "end", TEXT, &tick(value));
        }
        for power in [across[0], across[1]] {
            let value = 10_f64.powf(power);
            let [x, _] = position(value, up[1]);
            label(&mut svg, [x, foot + 16.0], "middle", TEXT, &tick(value));
        }
        label(&mut svg, [(left + right) / 2.0, foot + 16.0], "middle", TEXT, lines.across);
        for (side, color) in [(1, OURS), (2, THEIRS)] {
            let points: Vec<[f64; 2]> =
                series.points.iter().map(|point| position(point[0], point[side])).collect();
            let corners: Vec<String> =
                points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
            let corners = corners.join(" ");
            let _ = writeln!(
                svg,
                "<polyline points=\"{corners}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>"
            );
            for [x, y] in points {
                let _ =
                    writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
            }
        }
    }
    let height = top + PANEL[1] * series.len().div_ceil(COLUMNS) as f64;
    figure(height, title, &svg)
}

/// A round number, short.
fn tick(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{}M", value / 1e6),
        value if value >= 1e3 => format!("{}k", value / 1e3),
        value => format!("{value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_plots_are_replaced_by_plots() {
        let folder = std::env::temp_dir().join(format!("lab-plots-{}", std::process::id()));
        let suites = ["rxe".to_owned(), "scale".to_owned()];
        prepare(&folder, &suites).unwrap();
        let path = folder.join("rxe-ratio.svg");
        check_place(&path).unwrap();
        fs::write(&path, figure(1.0, "title", "")).unwrap();
        prepare(&folder, &suites).unwrap();
        for other in ["<svg><circle/></svg>", "text"] {
            fs::write(&path, other).unwrap();
            for refused in [check_place(&path), prepare(&folder, &suites)] {
                let error = refused.unwrap_err().to_string();
                assert!(error.contains(path.to_str().unwrap()), "{error}");
            }
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        prepare(&folder, &suites[1..]).unwrap();
        assert!(prepare(&path, &suites).is_err(), "a file is no directory");
        fs::remove_dir_all(&folder).unwrap();
    }

    fn row(operation: &str, setting: &str, [ours, theirs]: [f64; 2]) -> Value {
        json!({
            "operation": operation, "setting": setting, "ratio": ours / theirs,
            "ours": { "value": ours }, "theirs": { "value": theirs },
        })
    }

    #[test]
    fn each_operation_has_a_bar_as_long_as_its_ratio() {
        let rows =
            json!({ "rows": [row("write", "doorbell", [1.0, 2.0]), row("poll", "", [3.0, 4.0])] });
        let plots = plots("mlx5-path", &rows);
        assert_eq!(plots.len(), 1);
        let svg = &plots[0].svg;
        assert_eq!(plots[0].name, "mlx5-path-ratio.svg");
        assert_eq!(svg.matches("<rect").count(), 2);
        let widths: Vec<f64> = svg
            .lines()
            .filter_map(|line| line.split_once("width=\"")?.1.split('"').next()?.parse().ok())
            .collect();
        assert!((widths[1] / widths[0] - 1.5).abs() < 0.01, "{widths:?}");
        assert!(svg.contains(">write doorbell<") && svg.contains(">poll<"));
    }

    #[test]
    fn numbers_of_objects_make_a_line_and_two_points_make_none() {
        let at =
            |number: u32, value| row("queue pair: µs each", &format!("at {number}"), [value, 9.0]);
        let other = row("region: µs each", "at 1", [1.0, 1.0]);
        let growth = row("queue pair: µs each, ratio", "10000 to 100", [2.0, 1.0]);
        let rows = json!({ "rows": [at(100, 2.0), at(1, 1.0), at(10000, 4.0), other, growth] });
        let found = series(rows["rows"].as_array().unwrap(), count);
        let points = vec![[1.0, 1.0, 9.0], [100.0, 2.0, 9.0], [10000.0, 4.0, 9.0]];
        assert_eq!(found, [Series { title: "queue pair: µs each".into(), points }]);
        let plots = plots("scale", &rows);
        assert_eq!(plots.len(), 1);
        let svg = &plots[0].svg;
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (2, 6));
        assert!(svg.contains(">objects<") && svg.contains(">0<") && svg.contains(">10<"), "{svg}");
    }

    #[test]
    fn an_upright_axis_from_zero_ends_at_a_round_number_above_all_values() {
        for (most, end) in [(9.0, 10.0), (10.0, 10.0), (11.0, 20.0), (0.3, 0.5), (67e3, 100e3)] {
            let [start, found] = from_zero([1e-9, most].into_iter());
            assert!(start == 0.0 && (found / end - 1.0).abs() < 1e-9, "{most}: {found}");
        }
        assert_eq!(from_zero(std::iter::empty()), [0.0, 1.0]);
    }

    /// Ours is twice as fast at each size, so that the lines are equally far apart everywhere.
    #[test]
    fn ratios_are_distances_where_both_axes_are_logarithmic() {
        let at = |size: f64| [size, size, 2.0 * size];
        let series = Series { title: "read".into(), points: [1.0, 10.0, 100.0].map(at).into() };
        let svg = panels("title", &LINES[1], &[series]);
        let heights: Vec<f64> = svg
            .lines()
            .filter_map(|line| line.split_once(" cy=\"")?.1.split('"').next()?.parse().ok())
            .collect();
        let apart: Vec<f64> = (0..3).map(|at| heights[at] - heights[at + 3]).collect();
        assert!(
            apart[0] > 1.0 && apart.iter().all(|one| (one - apart[0]).abs() < 0.2),
            "{apart:?}"
        );
        assert!(svg.contains(">bytes<"), "{svg}");
    }

    #[test]
    fn sizes_are_read_out_of_the_names_of_operations() {
        let of = |name| size(&json!({ "operation": name }));
        assert_eq!(of("rc polled 4 KiB"), Some(("rc polled".into(), 4096.0)));
        assert_eq!(of("srq ×16 events 2 B"), Some(("srq ×16 events".into(), 2.0)));
        assert_eq!(
            of("write rate 64 B, 16 at once"),
            Some(("write rate, 16 at once".into(), 64.0))
        );
        assert_eq!(of("open to RTS"), None);
        let rows: Vec<Value> = [("2 B", 1.0), ("1 KiB", 2.0), ("64 KiB", 9.0)]
            .map(|(size, time)| {
                json!({
                    "operation": format!("rc polled {size}"), "ratio": 1.0,
                    "ours_usec_per_iteration": time, "theirs_usec_per_iteration": time,
                })
            })
            .into();
        let names: Vec<_> =
            plots("rxe", &json!({ "rows": rows })).into_iter().map(|plot| plot.name).collect();
        assert_eq!(names, ["rxe-ratio.svg", "rxe-size.svg"]);
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a < b & c > d"), "a &lt; b &amp; c &gt; d");
    }
}
