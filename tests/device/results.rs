//! The results of a run, for the file that `UVERBS_TEST_JUNIT` names.

use crate::junit::{Case, Ending, document};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static RESULTS: Mutex<Vec<Case>> = Mutex::new(Vec::new());

/// A test under way. If it is dropped without a result, the test has panicked.
pub(crate) struct Running {
    name: String,
    since: Instant,
    ending: Option<Ending>,
}

impl Running {
    pub(crate) fn new(name: &str) -> Running {
        Running { name: name.to_owned(), since: Instant::now(), ending: None }
    }

    pub(crate) fn ended(mut self, ending: Ending) {
        self.ending = Some(ending);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let panicked = || Ending::Failed("it panicked: see what the run printed".into());
        let case = Case {
            name: std::mem::take(&mut self.name),
            seconds: Some(self.since.elapsed().as_secs_f64()),
            ending: self.ending.take().unwrap_or_else(panicked),
        };
        RESULTS.lock().unwrap_or_else(PoisonError::into_inner).push(case);
    }
}

/// Writes the results so far, and the fault that ended the run or kept it from beginning.
pub(crate) fn write(suite: &str, fault: Option<&str>) -> std::io::Result<()> {
    let Some(path) = std::env::var_os("UVERBS_TEST_JUNIT") else { return Ok(()) };
    let mut cases = RESULTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(fault) = fault {
        let ending = Ending::Failed(fault.to_owned());
        cases.push(Case { name: "the run".into(), seconds: None, ending });
    }
    std::fs::write(path, document([(suite, cases.as_slice())]))
}
