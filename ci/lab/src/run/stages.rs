//! The stage clock: the stage that a run is in, the time of each stage, and the slowest cases.
//!
//! A stage is announced when it begins, so that the end of a truncated log names it. Stages of one
//! thread nest; an outer stage does not count the time of its inner ones. Processor time is that of
//! the processes that the thread started (`spent`, `alive`), because a busy machine does not change
//! it.

use crate::run::jobs::say;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many of the slowest cases the table names.
const SLOWEST: usize = 10;
/// A stage is named if it took this much more than recorded, by ratio and by seconds.
const RATIO: f64 = 1.25;
const MARGIN: f64 = 5.0;
/// Recorded times, in the tree.
const RECORDED: &str = "ci/lab/times.txt";

/// Wall-clock and processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Times {
    pub(crate) wall: Duration,
    pub(crate) processor: Duration,
}

impl Times {
    fn add(&mut self, other: Times) {
        self.wall += other.wall;
        self.processor += other.processor;
    }

    fn without(self, other: Times) -> Times {
        Times {
            wall: self.wall.saturating_sub(other.wall),
            processor: self.processor.saturating_sub(other.processor),
        }
    }
}

/// All stages of the run.
#[derive(Default)]
struct Clock {
    /// In the order in which they first began.
    stages: Vec<(String, Times, u32)>,
    cases: Vec<(String, Duration)>,
    /// Stages under way, with the time of their begin.
    open: Vec<(String, Instant)>,
    log: Option<PathBuf>,
}

static CLOCK: LazyLock<Mutex<Clock>> = LazyLock::new(Mutex::default);
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

thread_local! {
    static SPENT: RefCell<Spent> = RefCell::default();
    /// The time counted by the inner stages of each stage under way.
    static INNER: RefCell<Vec<(String, Times)>> = const { RefCell::new(Vec::new()) };
}

/// Processor time of the processes that a thread started.
#[derive(Default)]
struct Spent {
    ended: Duration,
    alive: Vec<u32>,
}

fn clock() -> MutexGuard<'static, Clock> {
    CLOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the clock. It also writes `stages.log` in `logs`, in place of an earlier run's.
pub(crate) fn start(logs: &Path) -> std::io::Result<()> {
    let _running = *START;
    let log = logs.join("stages.log");
    fs::write(&log, "")?;
    clock().log = Some(log);
    Ok(())
}

/// Time since the clock started, as minutes and seconds.
fn now() -> String {
    let seconds = START.elapsed().as_secs();
    format!("{:02}:{:02}", seconds / 60, seconds % 60)
}

/// The directory of the run's logs, if it keeps any.
pub(crate) fn logs() -> Option<PathBuf> {
    clock().log.as_ref().and_then(|log| log.parent()).map(Path::to_owned)
}

fn keep(clock: &Clock, line: &str) {
    let Some(path) = &clock.log else { return };
    if let Ok(mut file) = fs::File::options().append(true).open(path) {
        // The table on standard output says the same.
        let _full = writeln!(file, "{line}");
    }
}

/// A process whose processor time counts for this thread's stages until `ended`.
pub(crate) fn alive(process: u32) {
    SPENT.with_borrow_mut(|spent| spent.alive.push(process));
}

/// A process of `alive` is about to be reaped; until then its time can be read.
pub(crate) fn ended(process: u32) {
    SPENT.with_borrow_mut(|spent| {
        let before = spent.alive.len();
        spent.alive.retain(|alive| *alive != process);
        if spent.alive.len() < before {
            spent.ended += processor_time(process);
        }
    });
}

/// Whether a child has ended; it is not reaped, so that its processor time can still be read.
pub(crate) fn has_ended(process: u32) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    let status = waitid(Id::Pid(Pid::from_raw(process as i32)), flags);
    !matches!(status, Ok(nix::sys::wait::WaitStatus::StillAlive))
}

/// Waits until a child has ended, without reaping it, and counts its processor time.
pub(crate) fn wait_and_count(process: u32) {
    // An error means that the process is no longer a child, so there is nothing to wait for.
    let _gone =
        waitid(Id::Pid(Pid::from_raw(process as i32)), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
    ended(process);
}

/// User and system time of a process and of its children that it has waited for.
fn processor_time(process: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    Duration::from_secs_f64(ticks(&stat) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Fields 14 to 17 of `/proc/PID/stat`. The second field, a name, may hold anything in parentheses.
fn ticks(stat: &str) -> u64 {
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields).unwrap_or_default();
    fields.split_whitespace().skip(11).take(4).filter_map(|text| text.parse::<u64>().ok()).sum()
}

fn thread_spent() -> Duration {
    SPENT.with_borrow(|spent| {
        spent.ended + spent.alive.iter().map(|process| processor_time(*process)).sum::<Duration>()
    })
}

/// A stage under way; it ends when this is dropped.
pub(crate) struct Stage {
    name: String,
    begin: Instant,
    spent: Duration,
}

/// Begins a stage and says so. A name that comes again adds to the same row of the table.
pub(crate) fn stage(name: impl Into<String>) -> Stage {
    let name = name.into();
    // Commands other than tests announce no stages.
    if clock().log.is_some() {
        say!("[{}] stage: {name}", now());
    }
    let begin = Instant::now();
    {
        let mut clock = clock();
        keep(&clock, &format!("[{}] stage: {name}", now()));
        clock.open.push((name.clone(), begin));
        if !clock.stages.iter().any(|(known, ..)| *known == name) {
            clock.stages.push((name.clone(), Times::default(), 0));
        }
    }
    INNER.with_borrow_mut(|inner| inner.push((name.clone(), Times::default())));
    Stage { name, begin, spent: thread_spent() }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let whole = Times {
            wall: self.begin.elapsed(),
            processor: thread_spent().saturating_sub(self.spent),
        };
        let inner = INNER.with_borrow_mut(|inner| {
            let own = inner.pop().unwrap_or_default();
            if let Some((_, outer)) = inner.last_mut() {
                outer.add(whole);
            }
            own.1
        });
        let mut clock = clock();
        if let Some(at) =
            clock.open.iter().position(|(name, begin)| *name == self.name && *begin == self.begin)
        {
            clock.open.remove(at);
        }
        if let Some((_, times, count)) =
            clock.stages.iter_mut().find(|(name, ..)| *name == self.name)
        {
            times.add(whole.without(inner));
            *count += 1;
        }
        let seconds = whole.wall.as_secs_f64();
        keep(&clock, &format!("[{}] ended: {} ({seconds:.1} s)", now(), self.name));
    }
}

/// How long a case of this thread's stage took.
pub(crate) fn case(name: &str, time: Duration) {
    let stage = INNER.with_borrow(|stages| stages.last().map(|(stage, _)| format!("{stage}: ")));
    clock().cases.push((stage.unwrap_or_default() + name, time));
}

/// The stages under way and for how long each has been, for a run that is cut off.
pub(crate) fn under_way() -> String {
    let clock = clock();
    let stages: Vec<String> = clock
        .open
        .iter()
        .map(|(name, begin)| format!("{name} (since {} s)", begin.elapsed().as_secs()))
        .collect();
    match stages.as_slice() {
        [] => "between two stages".into(),
        stages => stages.join(", "),
    }
}

/// The class of machine that times are compared within: processors and accelerator.
pub(crate) fn machine_class(accelerator: &str) -> String {
    format!("{} processors, {accelerator}", crate::run::jobs::processors())
}

/// A row of the file of recorded times.
fn row(class: &str, command: &str, stage: &str, times: Times) -> String {
    format!(
        "{class}; {command}; {stage}; {:.0}; {:.0}",
        times.wall.as_secs_f64(),
        times.processor.as_secs_f64()
    )
}

type Recorded = BTreeMap<String, Times>;

/// The recorded times of a machine class and command, by stage.
fn recorded(text: &str, class: &str, command: &str) -> Recorded {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let parts: Vec<&str> = line.split("; ").collect();
            let [of_class, of_command, stage, wall, processor] = parts[..] else { return None };
            let seconds = |text: &str| text.parse().ok().map(Duration::from_secs);
            let times = Times { wall: seconds(wall)?, processor: seconds(processor)? };
            (of_class == class && of_command == command).then(|| (stage.to_owned(), times))
        })
        .collect()
}

/// Replaces the rows of a class and command.
fn with_rows(text: &str, class: &str, command: &str, rows: &[String]) -> String {
    let start = format!("{class}; {command}; ");
    let mut lines: Vec<&str> = text.lines().filter(|line| !line.starts_with(&start)).collect();
    lines.extend(rows.iter().map(String::as_str));
    lines.join("\n") + "\n"
}

/// The line on a stage that is slower than recorded, if it is.
fn slower(stage: &str, now: Times, before: Times) -> Option<String> {
    let beyond = |now: Duration, before: Duration| {
        let (now, before) = (now.as_secs_f64(), before.as_secs_f64());
        now > before * RATIO && now > before + MARGIN
    };
    beyond(now.wall, before.wall).then(|| {
        let load = match beyond(now.processor, before.processor) {
            true => "its processor time rose as well",
            false => "its processor time did not: the machine was busy",
        };
        format!(
            "slower than recorded: {stage} took {:.0} s in place of {:.0} s; {load} \
             ({:.0} s, recorded {:.0} s)",
            now.wall.as_secs_f64(),
            before.wall.as_secs_f64(),
            now.processor.as_secs_f64(),
            before.processor.as_secs_f64()
        )
    })
}

/// The table that every run ends with. The rows are kept in the logs in the form of the recorded
/// times, and written to the tree if `record` says so.
pub(crate) fn finish(
    root: &Path,
    logs: &Path,
    command: &str,
    class: &str,
    record: bool,
) -> std::io::Result<String> {
    let clock = clock();
    let path = root.join(RECORDED);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let known = recorded(&text, class, command);
    let whole = Times {
        wall: START.elapsed(),
        processor: clock.stages.iter().map(|(_, times, _)| times.processor).sum(),
    };
    let mut rows: Vec<(&str, Times)> =
        clock.stages.iter().map(|(name, times, _)| (name.as_str(), *times)).collect();
    rows.push(("the whole run", whole));
    let lines: Vec<String> =
        rows.iter().map(|(name, times)| row(class, command, name, *times)).collect();
    fs::write(logs.join("times.txt"), lines.join("\n") + "\n")?;
    let cases: Vec<String> = clock
        .cases
        .iter()
        .map(|(name, time)| format!("{:.2} {name}\n", time.as_secs_f64()))
        .collect();
    fs::write(logs.join("cases.txt"), cases.concat())?;
    if record {
        fs::write(&path, with_rows(&text, class, command, &lines))?;
    }
    Ok(table(&rows, &known, &clock.cases))
}

fn table(rows: &[(&str, Times)], known: &Recorded, cases: &[(String, Duration)]) -> String {
    let mut text = String::new();
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(5);
    // Writing to a string does not fail.
    let _ = writeln!(text, "{:width$}  seconds  processor  recorded", "stage");
    for (name, times) in rows {
        let before = known
            .get(*name)
            .map_or("-".to_owned(), |times| format!("{:.0}", times.wall.as_secs_f64()));
        let _ = writeln!(
            text,
            "{name:width$}  {:7.1}  {:9.1}  {before:>8}",
            times.wall.as_secs_f64(),
            times.processor.as_secs_f64()
        );
    }
    let mut slowest: Vec<&(String, Duration)> = cases.iter().collect();
    slowest.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    slowest.truncate(SLOWEST);
    if !slowest.is_empty() {
        let _ = writeln!(text, "\nthe slowest cases");
    }
    for (name, time) in slowest {
        let _ = writeln!(text, "{:7.1} s  {name}", time.as_secs_f64());
    }
    for (name, times) in rows {
        if let Some(line) = known.get(*name).and_then(|before| slower(name, *times, *before)) {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(wall: u64, processor: u64) -> Times {
        Times { wall: Duration::from_secs(wall), processor: Duration::from_secs(processor) }
    }

    #[test]
    fn processor_time_is_read_behind_any_name_with_waited_children() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 10 20 0 0 5 6 100 200 20 0 1 0 99";
        assert_eq!(ticks(stat), 311);
        assert_eq!(ticks(""), 0);
    }

    #[test]
    fn a_stage_counts_the_work_of_the_process_that_it_waits_for() {
        let name = "a stage of the test of stages";
        let inner = "an inner stage of the test of stages";
        {
            let _stage = stage(name);
            let _inner = stage(inner);
            let mut child = std::process::Command::new("sh")
                .args(["-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"])
                .spawn()
                .unwrap();
            alive(child.id());
            assert!(under_way().contains(inner));
            wait_and_count(child.id());
            child.wait().unwrap();
        }
        let clock = clock();
        let of = |wanted: &str| {
            clock
                .stages
                .iter()
                .find(|(name, ..)| name == wanted)
                .map(|(_, times, _)| *times)
                .unwrap()
        };
        assert!(of(inner).processor >= Duration::from_millis(20), "{:?}", of(inner));
        assert!(of(name).processor < Duration::from_millis(20), "the outer one counts the rest");
    }

    #[test]
    fn a_stage_that_became_a_quarter_slower_is_named_with_its_processor_time() {
        assert_eq!(slower("s", times(120, 9), times(100, 9)), None, "a fifth");
        assert_eq!(slower("s", times(4, 4), times(1, 1)), None, "three seconds");
        let busy = slower("s", times(130, 90), times(100, 90)).unwrap();
        assert!(busy.contains("the machine was busy"), "{busy}");
        let work = slower("s", times(130, 120), times(100, 90)).unwrap();
        assert!(work.contains("rose as well"), "{work}");
    }

    #[test]
    fn rows_of_one_class_and_command_are_replaced_and_read_again() {
        let text = "# a comment\n2 processors, tcg; full; fetch; 9; 1\n4 processors, kvm; full; fetch; 3; 1\n";
        let row = row("2 processors, tcg", "full", "fetch", times(12, 2));
        let text = with_rows(text, "2 processors, tcg", "full", &[row]);
        assert!(text.starts_with("# a comment\n"));
        assert_eq!(text.matches("2 processors, tcg; full; fetch;").count(), 1, "{text}");
        assert_eq!(recorded(&text, "2 processors, tcg", "full")["fetch"], times(12, 2));
        assert_eq!(recorded(&text, "4 processors, kvm", "full")["fetch"], times(3, 1));
        assert!(recorded(&text, "2 processors, tcg", "quick").is_empty());
    }

    #[test]
    fn the_table_names_the_slowest_cases_first() {
        let cases: Vec<(String, Duration)> =
            (0..20).map(|n| (format!("case{n}"), Duration::from_secs(n))).collect();
        let text = table(&[("fetch", times(3, 1))], &Recorded::new(), &cases);
        assert!(text.contains("case19") && text.contains("case10") && !text.contains("case9\n"));
        assert!(text.find("case19") < text.find("case18"));
    }
}
