//! One comparison per kernel and header.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use libtest_mimic::{Completion, Failed, Trial};
use uverbs_uapi::drift::{self, State, Version};
use uverbs_uapi::enumeration::DEFINE;
use uverbs_uapi::reflection::{enumerations, layouts};

use crate::comparison::differences;
use crate::expectation::{ELSEWHERE, OMITTED, PINNED, RENAMED, UNKNOWN, Unknown};
use crate::kernel::Kernel;

/// Lines to print when all comparisons are done; they run side by side.
#[derive(Clone, Default)]
pub(crate) struct Report(Arc<Mutex<Vec<String>>>);

impl Report {
    fn add(&self, line: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    /// The lines in order.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        lines.sort();
        lines
    }
}

/// All headers with declarations in this crate other than macros: BTF has none of those.
fn headers() -> BTreeSet<&'static str> {
    let enums = enumerations().filter(|enumeration| enumeration.name != DEFINE);
    layouts().map(|layout| layout.header).chain(enums.map(|e| e.header)).collect()
}

/// Headers of the connection manager.
const CM_HEADERS: [&str; 7] = [
    "linux/in.h",
    "linux/in6.h",
    "rdma/ib.h",
    "rdma/ib_cm.h",
    "rdma/ib_user_sa.h",
    "rdma/rdma_cm.h",
    "rdma/rdma_user_cm.h",
];

/// The module whose BTF has the types of a header.
fn home(header: &str) -> &'static str {
    if header.contains("mlx5") {
        if header.starts_with("linux/") { "mlx5_core" } else { "mlx5_ib" }
    } else if header.contains("rxe") {
        "rdma_rxe"
    } else if CM_HEADERS.contains(&header) {
        "rdma_ucm"
    } else {
        "ib_uverbs"
    }
}

/// A comparison for each header whose types the kernel's modules can have.
///
/// Adds the findings to `report`.
pub(crate) fn trials(kernel: Arc<Kernel>, report: &Report) -> Vec<Trial> {
    headers()
        .into_iter()
        .map(|header| {
            let kernel = Arc::clone(&kernel);
            let report = report.clone();
            Trial::ignorable_test(format!("{} {header}", kernel.release), move || {
                let module = home(header);
                if !kernel.has_module(module) {
                    return Ok(Completion::ignored_with(format!("{module} is not loaded")));
                }
                let tally = compare(&kernel, header)?;
                report.add(format!("{} {header}: {}", kernel.release, tally.summary()));
                for note in &tally.newer {
                    report.add(format!("{} newer than this crate: {note}", kernel.release));
                }
                tally.verdict(&kernel, header)
            })
        })
        .collect()
}

#[derive(Default)]
struct Tally {
    structs: [usize; 2],
    numbers: [usize; 2],
    later: usize,
    unknown: usize,
    elsewhere: usize,
    newer: Vec<String>,
    faults: Vec<String>,
}

impl Tally {
    fn summary(&self) -> String {
        let [structs, all_structs] = self.structs;
        let [numbers, all_numbers] = self.numbers;
        let mut summary =
            format!("{structs} of {all_structs} structs, {numbers} of {all_numbers} numbers");
        if self.later > 0 {
            summary += &format!(", {} came later", self.later);
        }
        if self.unknown > 0 {
            summary += &format!(", {} not in BTF", self.unknown);
        }
        if self.elsewhere > 0 {
            summary += &format!(", {} in a module that is not loaded", self.elsewhere);
        }
        summary
    }

    fn verdict(mut self, kernel: &Kernel, header: &str) -> Result<Completion, Failed> {
        let version = kernel.version();
        // A kernel between two series must have all items of the older one.
        let pinned = PINNED
            .iter()
            .filter(|pinned| pinned.series <= version)
            .max_by_key(|pinned| pinned.series)
            .and_then(|pinned| pinned.counts.iter().find(|(name, ..)| *name == header));
        match pinned {
            None => self.faults.push(format!("{header}: no count is pinned for {version:?}")),
            Some((_, structs, numbers)) => {
                if self.structs[0] < *structs || self.numbers[0] + self.elsewhere < *numbers {
                    self.faults.push(format!(
                        "{header}: found {} structs and {} numbers, fewer than the {structs} and \
                         {numbers} pinned",
                        self.structs[0], self.numbers[0],
                    ));
                }
            }
        }
        if self.faults.is_empty() {
            Ok(Completion::Completed)
        } else {
            Err(Failed::from(self.faults.join("\n")))
        }
    }

    /// Checks that a kernel has an item exactly when it should, and returns whether to compare it.
    fn expect(
        &mut self,
        what: &str,
        known: bool,
        (old, new): (State, State),
        unknown: Option<&str>,
    ) -> bool {
        let fault = match (known, unknown) {
            (false, Some(_)) => {
                self.unknown += 1;
                return false;
            }
            (true, Some(reason)) => format!("not expected in BTF ({reason}), but it is there"),
            (false, None) if old == State::Absent => {
                self.later += 1;
                return false;
            }
            (false, None) => "the kernel does not know it".to_owned(),
            (true, None) if new == State::Absent => "there before its time".to_owned(),
            (true, None) => return true,
        };
        self.faults.push(format!("{what}: {fault}"));
        false
    }
}

/// The reason why a kernel does not know an item, if it is listed.
fn unknown(item: &str, version: Version) -> Option<&'static str> {
    let listed = |unknown: &&Unknown| version <= unknown.until && unknown.items.contains(&item);
    UNKNOWN.iter().find(listed).map(|unknown| unknown.reason)
}

/// Whether only the BTF of a module that is not loaded can know a number.
fn elsewhere(item: &str, kernel: &Kernel) -> bool {
    ELSEWHERE.iter().any(|elsewhere| {
        kernel.version() <= elsewhere.until
            && elsewhere.items.contains(&item)
            && !kernel.has_module(elsewhere.module)
    })
}

fn compare(kernel: &Kernel, header: &str) -> Result<Tally, String> {
    let mut tally = Tally::default();
    let version = kernel.version();

    for layout in layouts().filter(|layout| layout.header == header) {
        let name = layout.name;
        tally.structs[1] += 1;
        let mut shapes = kernel.shapes(layout.kernel)?;
        let renamed = |(since, old, _): &&(_, &str, _)| *since <= version && *old == name;
        if let (true, Some((_, _, new))) = (shapes.is_empty(), RENAMED.iter().find(renamed)) {
            shapes = kernel.shapes(new)?;
        }
        let what = format!("{header}: {name}");
        let states = drift::states(name, version);
        if !tally.expect(&what, !shapes.is_empty(), states, unknown(name, version)) {
            continue;
        }
        tally.structs[0] += 1;
        let mut found = BTreeSet::new();
        for shape in &shapes {
            let old = differences(layout, shape, |item| drift::states(item, version).0);
            let new = differences(layout, shape, |item| drift::states(item, version).1);
            if !old.is_empty() && !new.is_empty() {
                found.extend(new);
            }
        }
        if version > drift::NEWEST {
            tally.newer.extend(found);
        } else {
            tally.faults.extend(found);
        }
    }

    for enumeration in enumerations().filter(|e| e.header == header && e.name != DEFINE) {
        for ours in enumeration.enumerators {
            tally.numbers[1] += 1;
            let what = format!("{header}: enum {}: {}", enumeration.name, ours.name);
            let states = drift::states(ours.name, version);
            let mut theirs = kernel.numbers(ours.name)?;
            if let (State::Named(old), true) = (states.0, theirs.is_empty()) {
                theirs = kernel.numbers(old)?;
            }
            let unknown = unknown(ours.name, version);
            if theirs.is_empty() && elsewhere(ours.name, kernel) {
                tally.elsewhere += 1;
                continue;
            }
            if !tally.expect(&what, !theirs.is_empty(), states, unknown) {
                continue;
            }
            tally.numbers[0] += 1;
            if let Some(other) = theirs.iter().find(|number| number.value != ours.value) {
                tally.faults.push(format!(
                    "{what}: {:#x} here, {:#x} in the kernel's enum {}",
                    ours.value, other.value, other.of
                ));
            }
        }
    }
    let found = undeclared(kernel, header)?;
    if version > drift::NEWEST {
        tally.newer.extend(found);
    } else {
        tally.faults.extend(found);
    }
    Ok(tally)
}

/// Enumerators that a kernel has in an enum of a header for processes, and that this crate does not have.
///
/// Of the kernel's internal enums this crate has only the enumerators that it uses.
fn undeclared(kernel: &Kernel, header: &str) -> Result<BTreeSet<String>, String> {
    let mut found = BTreeSet::new();
    if !header.starts_with("rdma/") || header == "rdma/ib_verbs.h" {
        return Ok(found);
    }
    let declared: BTreeSet<_> =
        enumerations().flat_map(|e| e.enumerators).map(|enumerator| enumerator.name).collect();
    for enumeration in enumerations().filter(|e| e.header == header) {
        for name in kernel.enumerators_of(enumeration.name)? {
            if !declared.contains(name) && !OMITTED.contains(&name) {
                let of = enumeration.name;
                found.insert(format!("{header}: enum {of}: {name}: in the kernel, not here"));
            }
        }
    }
    Ok(found)
}
