//! What the emulated device says about whoever used it: what it saw at doorbells, and what was left
//! on it.
//!
//! Pairs with the control socket of the emulator. A suite can show that its messages arrived, but
//! neither that none came by luck nor that the device has forgotten all of it.

use super::case::run_script;
use super::failed;
use crate::outcome::{Outcome, Report};
use crate::vm::Vm;
use anyhow::{Result, bail, ensure};
use connectx::control::{Reply, Request};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Counts of what a correct driver does not do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Doorbells {
    /// Copies cut short.
    pub(crate) torn: u64,
    /// Records that lag behind their doorbell.
    pub(crate) record_behind: u64,
    /// Copies and doorbells that are not what the ring holds.
    pub(crate) differs: u64,
    /// Doorbells of nothing.
    pub(crate) stray: u64,
}

impl Doorbells {
    /// Of both functions. The driver's own test of write combining differs on purpose, so counts are
    /// to be compared with earlier ones.
    pub(crate) fn of(vm: &Vm) -> Result<Self> {
        let mut control = vm.control()?;
        let mut sum = Self::default();
        for function in 0..2 {
            match control.ask(&Request::Doorbells { function })? {
                Reply::Doorbells { torn, record_behind, differs, stray, .. } => {
                    sum.torn += torn;
                    sum.record_behind += record_behind;
                    sum.differs += differs;
                    sum.stray += stray;
                }
                other => bail!("doorbells of function {function}: {other:?}"),
            }
        }
        Ok(sum)
    }

    /// What was added since.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            torn: self.torn - before.torn,
            record_behind: self.record_behind - before.record_behind,
            differs: self.differs - before.differs,
            stray: self.stray - before.stray,
        }
    }

    /// Fails if there are more than before.
    pub(crate) fn none_since(self, before: Self) -> Result<()> {
        let seen = self.since(before);
        ensure!(seen == Self::default(), "at doorbells the device saw {seen:?}");
        Ok(())
    }
}

/// Living objects of both functions.
pub(crate) fn living(vm: &Vm) -> Result<[BTreeMap<String, usize>; 2]> {
    let mut control = vm.control()?;
    let mut of = |function| match control.ask(&Request::Objects { function })? {
        Reply::Objects { counts } => Ok(counts),
        other => bail!("objects of function {function}: {other:?}"),
    };
    Ok([of(0)?, of(1)?])
}

/// The same but for memory keys: the driver keeps those for later.
pub(crate) fn objects(vm: &Vm) -> Result<[BTreeMap<String, usize>; 2]> {
    Ok(living(vm)?.map(|mut counts| {
        counts.remove("mkey");
        counts
    }))
}

/// What there was before a suite ran.
pub(crate) struct EmulatorCheck {
    doorbells: Doorbells,
    objects: [BTreeMap<String, usize>; 2],
}

/// Uses both devices: the driver makes some things for its own use when it first needs them, and
/// tries its registers.
const FIRST_USE: &str = "pair 'tcp 18515' 'uverbs pingpong srq -n 10 -d mlx5_1' \
                         'uverbs pingpong srq -n 10 -d mlx5_0 127.0.0.1'";

impl EmulatorCheck {
    /// Looks at a machine that has the program `uverbs`.
    pub(crate) fn new(vm: &mut Vm) -> Result<Self> {
        if let Err(why) = run_script(vm, FIRST_USE, false)? {
            bail!("the first use of the devices: {why}");
        }
        Ok(Self { doorbells: Doorbells::of(vm)?, objects: objects(vm)? })
    }

    /// Two reports on what has happened since.
    pub(crate) fn reports(&self, vm: &Vm) -> Vec<Report> {
        let report = |name: &str, outcome: Result<()>| match outcome {
            Ok(()) => Report { name: name.to_owned(), outcome: Outcome::Passed },
            Err(error) => failed(name, &error),
        };
        vec![
            report("emulator::doorbells", self.doorbells(vm)),
            report("emulator::objects", self.nothing_left(vm)),
        ]
    }

    /// A suite may ring pages of its own behind which there is nothing, so strays do not count.
    fn doorbells(&self, vm: &Vm) -> Result<()> {
        let stray = self.doorbells.stray;
        (Doorbells { stray, ..Doorbells::of(vm)? }).none_since(self.doorbells)
    }

    fn nothing_left(&self, vm: &Vm) -> Result<()> {
        // What a process left behind goes when its file is closed for good, a little later.
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let after = objects(vm)?;
            if after == self.objects {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("left on the device: {:?}, before {:?}", after, self.objects);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}
