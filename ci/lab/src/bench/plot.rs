//! Plots of a suite's result, as SVG files that `docs/BENCHMARKS.md` shows.
//!
//! They are drawn from the same JSON that `--json` prints: the ratio of each operation, the cost of one
//! more object by the number of objects, and the time of a message by its size.

use anyhow::{Context, Result, bail};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Width of a figure in pixels, as all sizes here.
const WIDTH: u32 = 840;
/// Height of a figure's title.
const HEADING: u32 = 30;
/// Height of a bar with its gaps.
const BAR: u32 = 20;
/// Width of the names of bars.
const LABELS: u32 = 250;
/// Height of the numbers below an axis.
const AXIS: u32 = 25;
/// Panels in a row of a figure.
const COLUMNS: usize = 2;
/// Height of a panel with its title and axes.
const PANEL: u32 = 220;

// Colours that are readable on white and on black.
const OURS: RGBColor = RGBColor(0x3b, 0x82, 0xd6);
const THEIRS: RGBColor = RGBColor(0xb0, 0x64, 0x1f);
const TEXT: RGBColor = RGBColor(0x7a, 0x7a, 0x7a);

/// A file to be written.
#[derive(Debug, PartialEq)]
pub(super) struct Plot {
    pub(super) name: String,
    pub(super) svg: String,
}

/// A kind of plot with a line for each side.
#[derive(Debug)]
struct Lines {
    /// The last part of the file's name.
    name: &'static str,
    title: &'static str,
    /// Name of the horizontal axis.
    across: &'static str,
    /// The line that a row is of, and the row's place across.
    place: fn(&Value) -> Option<(String, f64)>,
}

const LINES: [Lines; 2] = [
    Lines {
        name: "scaling",
        title: "cost of one more object, by number of objects",
        across: "objects",
        place: count,
    },
    Lines { name: "size", title: "microseconds by message size", across: "bytes", place: size },
];

/// One operation at several sizes, or with several numbers of objects.
#[derive(Debug, PartialEq)]
struct Series {
    title: String,
    /// Size or number, ours, theirs.
    points: Vec<[f64; 3]>,
}

/// The rows of a setting: each operation and its ratio.
type Setting = (String, Vec<(String, f64)>);

/// The beginning of each plot.
fn head() -> String {
    format!("<svg width=\"{WIDTH}\" ")
}

/// Fails if a file that is no plot would be lost at a path.
pub(super) fn check_place(path: &Path) -> Result<()> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => read.with_context(|| format!("--plots: {}", path.display()))?,
    };
    if !bytes.is_empty() && !bytes.starts_with(head().as_bytes()) {
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
pub(super) fn plots(suite: &str, result: &Value) -> Result<Vec<Plot>> {
    let rows = result["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
    let title = result["title"].as_str().unwrap_or(suite);
    let mut plots = Vec::new();
    let settings = settings(rows);
    if !settings.is_empty() {
        let svg = bars(&format!("{title}, ours / theirs: less is better"), &settings)?;
        plots.push(Plot { name: format!("{suite}-ratio.svg"), svg });
    }
    for lines in &LINES {
        let series = series(rows, lines.place);
        if !series.is_empty() {
            let svg = panels(&format!("{title}: {}", lines.title), lines, &series)?;
            plots.push(Plot { name: format!("{suite}-{}.svg", lines.name), svg });
        }
    }
    Ok(plots)
}

fn text<'v>(row: &'v Value, key: &str) -> &'v str {
    row[key].as_str().unwrap_or_default()
}

/// The ratios of operations by setting, in the order in which the settings appear.
fn settings(rows: &[Value]) -> Vec<Setting> {
    let mut settings: Vec<Setting> = Vec::new();
    for row in rows {
        // A row at a number of objects is a point of a series, and a growth is seen there.
        if count(row).is_some() || text(row, "operation").ends_with(", ratio") {
            continue;
        }
        let (Some(ratio), setting) = (row["ratio"].as_f64(), text(row, "setting")) else {
            continue;
        };
        let entry = (text(row, "operation").to_owned(), ratio);
        match settings.iter_mut().find(|(name, _)| name == setting) {
            Some((_, entries)) => entries.push(entry),
            None => settings.push((setting.to_owned(), vec![entry])),
        }
    }
    settings
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

/// The power of ten at or below all values, and the one at or above them.
fn decades(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values.filter(|value| *value > 0.0) {
        least = least.min(value.log10().floor());
        most = most.max(value.log10().ceil());
    }
    let powers = if least.is_finite() { [least, most.max(least + 1.0)] } else { [0.0, 1.0] };
    powers.map(|power| 10_f64.powf(power))
}

type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;

/// Draws a figure of this height below its title.
fn figure(
    height: u32,
    title: &str,
    draw: impl FnOnce(&Area<'_>, &Area<'_>) -> Result<()>,
) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height + HEADING)).into_drawing_area();
        let (head, body) = root.split_vertically(HEADING);
        head.draw_text(title, &font(15.0, TEXT), (10, 8))?;
        draw(&head, &body)?;
        root.present()?;
    }
    Ok(svg)
}

fn font(size: f64, color: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&color)
}

/// A chart for each setting, with a bar for each ratio and a line where both sides are equal.
fn bars(title: &str, settings: &[Setting]) -> Result<String> {
    let ratios = settings.iter().flat_map(|(_, rows)| rows).map(|(_, ratio)| *ratio);
    let most = ratios.fold(1.0, f64::max) * 1.1;
    let height = |(_, rows): &Setting| HEADING + BAR * rows.len() as u32 + AXIS;
    figure(settings.iter().map(height).sum(), title, |_, body| {
        let mut rest = body.clone();
        for setting in settings {
            let (name, rows) = setting;
            let (area, below) = rest.split_vertically(height(setting));
            rest = below;
            let mut chart = ChartBuilder::on(&area)
                .caption(name, font(14.0, TEXT))
                .y_label_area_size(LABELS)
                .x_label_area_size(AXIS)
                .margin_right(40)
                .build_cartesian_2d(0.0..most, rows.len() as f64..0.0)?;
            chart
                .configure_mesh()
                .disable_mesh()
                .disable_y_axis()
                .axis_style(TEXT)
                .label_style(font(12.0, TEXT))
                .draw()?;
            let label = |text: &str, at: f64, row: f64, (side, apart)| {
                let style = font(12.0, TEXT).pos(Pos::new(side, VPos::Center));
                EmptyElement::at((at, row + 0.5)) + Text::new(text.to_owned(), (apart, 0), style)
            };
            for (row, (operation, ratio)) in rows.iter().enumerate() {
                let row = row as f64;
                let mut bar = Rectangle::new([(0.0, row), (*ratio, row + 1.0)], OURS.filled());
                bar.set_margin(3, 3, 0, 0);
                chart.draw_series([bar])?;
                chart.draw_series([
                    label(operation, 0.0, row, (HPos::Right, -5)),
                    label(&format!("{ratio:.2}"), *ratio, row, (HPos::Left, 5)),
                ])?;
            }
            let equal = [0.0, rows.len() as f64].map(|end| (1.0, end));
            chart.draw_series([PathElement::new(equal, THEIRS)])?;
        }
        Ok(())
    })
}

/// A panel for each operation. Both axes are logarithmic.
fn panels(title: &str, lines: &Lines, series: &[Series]) -> Result<String> {
    let rows = series.len().div_ceil(COLUMNS);
    figure(PANEL * rows as u32, title, |head, body| {
        for (side, color, x) in [("ours", OURS, 140), ("theirs", THEIRS, 80)] {
            head.draw_text(side, &font(14.0, color), (WIDTH as i32 - x, 8))?;
        }
        for (series, area) in series.iter().zip(body.split_evenly((rows, COLUMNS))) {
            let [left, right] = decades(series.points.iter().map(|point| point[0]));
            let values = series.points.iter().flat_map(|point| [point[1], point[2]]);
            let [least, most] = decades(values);
            let mut chart = ChartBuilder::on(&area)
                .caption(&series.title, font(13.0, TEXT))
                .margin(10)
                .margin_right(25)
                .x_label_area_size(AXIS + 10)
                .y_label_area_size(50)
                .build_cartesian_2d((left..right).log_scale(), (least..most).log_scale())?;
            chart
                .configure_mesh()
                .disable_mesh()
                .axis_style(TEXT)
                .label_style(font(12.0, TEXT))
                .x_desc(lines.across)
                .x_labels(4)
                .y_labels(5)
                .x_label_formatter(&|value| tick(*value))
                .y_label_formatter(&|value| tick(*value))
                .draw()?;
            for (side, color) in [(1, OURS), (2, THEIRS)] {
                let points = series.points.iter().map(|point| (point[0], point[side]));
                let line = LineSeries::new(points, color.stroke_width(2)).point_size(3);
                chart.draw_series(line)?;
            }
        }
        Ok(())
    })
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
        fs::write(&path, figure(1, "title", |_, _| Ok(())).unwrap()).unwrap();
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
        let rows = [row("write", "doorbell", [1.0, 2.0]), row("poll", "", [3.0, 4.0])];
        let plots = plots("mlx5-path", &json!({ "rows": rows })).unwrap();
        assert_eq!(plots.len(), 1);
        let svg = &plots[0].svg;
        assert_eq!(plots[0].name, "mlx5-path-ratio.svg");
        let bars = svg.lines().filter(|line| line.starts_with("<rect") && line.contains("#3B82D6"));
        let width =
            |bar: &str| bar.split_once("width=\"")?.1.split('"').next()?.parse::<f64>().ok();
        let widths: Vec<f64> = bars.filter_map(width).collect();
        assert_eq!(widths.len(), 2, "{svg}");
        assert!((widths[1] / widths[0] - 1.5).abs() < 0.01, "{widths:?}");
        assert!(["write", "poll", "doorbell"].iter().all(|word| shows(svg, word)), "{svg}");
    }

    #[test]
    fn operations_stand_under_their_setting() {
        let rows = [("write", "doorbell"), ("poll", ""), ("read", "doorbell")]
            .map(|(operation, setting)| row(operation, setting, [1.0, 2.0]));
        let found = settings(&rows);
        let names = |rows: &[(String, f64)]| {
            rows.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>().join(" ")
        };
        let found: Vec<_> = found.iter().map(|(setting, rows)| (&**setting, names(rows))).collect();
        assert_eq!(found, [("doorbell", "write read".into()), ("", "poll".into())]);
    }

    /// Whether a text is in a figure.
    fn shows(svg: &str, text: &str) -> bool {
        svg.lines().any(|line| line == text)
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
        let plots = plots("scale", &rows).unwrap();
        assert_eq!(plots.len(), 1);
        let svg = &plots[0].svg;
        assert_eq!(svg.matches("<circle").count(), 6);
        assert!(["objects", "1", "10k"].iter().all(|word| shows(svg, word)), "{svg}");
    }

    /// Ours is twice as fast at each size, so that the lines are equally far apart everywhere.
    #[test]
    fn ratios_are_distances_where_both_axes_are_logarithmic() {
        let at = |size: f64| [size, size, 2.0 * size];
        let series = Series { title: "read".into(), points: [1.0, 10.0, 100.0].map(at).into() };
        let svg = panels("title", &LINES[1], &[series]).unwrap();
        let heights: Vec<f64> = svg
            .lines()
            .filter_map(|line| line.split_once(" cy=\"")?.1.split('"').next()?.parse().ok())
            .collect();
        let apart: Vec<f64> = (0..3).map(|at| heights[at] - heights[at + 3]).collect();
        assert!(
            apart[0] > 5.0 && apart.iter().all(|one| (one - apart[0]).abs() <= 1.0),
            "{apart:?}"
        );
        assert!(shows(&svg, "bytes"), "{svg}");
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
        let names: Vec<_> = plots("rxe", &json!({ "rows": rows }))
            .unwrap()
            .into_iter()
            .map(|plot| plot.name)
            .collect();
        assert_eq!(names, ["rxe-ratio.svg", "rxe-size.svg"]);
    }
}
