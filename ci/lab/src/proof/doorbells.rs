//! What the emulator saw at doorbells while programs ran: nothing that a correct driver does not do.

use crate::vm::Vm;
use anyhow::{Result, bail, ensure};
use connectx::control::{Reply, Request};

/// Counts of both functions: copies cut short, records that lag behind, data that differs from the
/// ring, and doorbells of nothing. The driver's own test of write combining differs on purpose, so
/// counts are compared with earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doorbells([[u64; 4]; 2]);

impl Doorbells {
    pub(super) fn of(vm: &Vm) -> Result<Self> {
        let mut control = vm.control()?;
        let mut counts = [[0; 4]; 2];
        for (function, counts) in counts.iter_mut().enumerate() {
            match control.ask(&Request::Doorbells { function })? {
                Reply::Doorbells { torn, record_behind, differs, stray, .. } => {
                    *counts = [torn, record_behind, differs, stray];
                }
                other => bail!("doorbells of function {function}: {other:?}"),
            }
        }
        Ok(Self(counts))
    }

    /// Fails if there are more than before.
    pub(super) fn none_since(&self, before: &Self) -> Result<()> {
        ensure!(
            self == before,
            "torn copies, records behind, differing data, stray doorbells of either function: \
             {:?}, before {:?}",
            self.0,
            before.0
        );
        Ok(())
    }
}
