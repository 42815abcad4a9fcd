//! Checks the emulated device after a suite: the faults that it saw at doorbells, and the objects
//! that are left on it.
//!
//! Pairs with the control socket of the emulator. A suite can show that its messages arrived, but
//! neither that each doorbell was right nor that nothing is left on the device.

use super::case::run_script;
use super::failed;
use crate::machine::vm::Vm;
use crate::run::outcome::{Report, TestOutcome};
use anyhow::{Result, bail, ensure};
use connectx_vfio::control::{ControlRequest, Reply};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use uverbs_connectx::object::mkey::CACHED_MKEY;

/// Counts of faults at doorbells, which a correct driver does not cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DoorbellFaults {
    /// BlueFlame copies that were cut short.
    pub(crate) torn: u64,
    /// Doorbell records that lag behind their doorbell.
    pub(crate) record_behind: u64,
    /// Copies and doorbells that differ from the WQE in the queue.
    pub(crate) differs: u64,
    /// Doorbells of queues that do not exist.
    pub(crate) stray: u64,
}

impl DoorbellFaults {
    /// The counts of both functions. The driver's test of write combining makes differing copies on
    /// purpose, so compare counts with earlier ones.
    pub(crate) fn of(vm: &Vm) -> Result<Self> {
        let mut control = vm.control()?;
        let mut sum = Self::default();
        for function in 0..2 {
            match control.ask(&ControlRequest::Doorbells { function })? {
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

    /// The difference from earlier counts. A device that was reset meanwhile counts anew.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            torn: self.torn.saturating_sub(before.torn),
            record_behind: self.record_behind.saturating_sub(before.record_behind),
            differs: self.differs.saturating_sub(before.differs),
            stray: self.stray.saturating_sub(before.stray),
        }
    }

    /// Fails if there are more than before.
    pub(crate) fn none_since(self, before: Self) -> Result<()> {
        let seen = self.since(before);
        ensure!(seen == Self::default(), "at doorbells the device saw {seen:?}");
        Ok(())
    }
}

/// The living objects of a function, and those that its driver left when it last ended.
pub(crate) fn living_and_left(vm: &Vm, function: usize) -> Result<[BTreeMap<String, usize>; 2]> {
    match vm.control()?.ask(&ControlRequest::Objects { function })? {
        Reply::Objects { counts, left } => Ok([counts, left]),
        other => bail!("objects of function {function}: {other:?}"),
    }
}

/// The living objects of both functions, without cached mkeys: docs/KERNEL-NOTES.md says when the driver makes and
/// destroys those, which says nothing about the objects of programs.
pub(crate) fn objects(vm: &Vm) -> Result<[BTreeMap<String, usize>; 2]> {
    let of = |function| -> Result<_> {
        let [mut living, _] = living_and_left(vm, function)?;
        living.remove(CACHED_MKEY);
        Ok(living)
    };
    Ok([of(0)?, of(1)?])
}

/// The counts before a suite ran.
pub(crate) struct EmulatorCheck {
    doorbells: DoorbellFaults,
    objects: Objects,
    infiniband: bool,
}

/// Counts of the living objects of both functions.
type Objects = [BTreeMap<String, usize>; 2];

/// The completion vectors of a function in a guest, one for each of its processors.
const VECTORS: usize = 2;

/// Whether a suite left nothing. With InfiniBand ports the driver makes the completion EQ of a vector when the vector
/// is first used, and keeps it; with Ethernet ports the network interface has used all vectors before. Counts may be
/// lower: a device that woke from sleep has a new driver, which makes objects of its own at first use.
fn left_nothing(before: &Objects, after: &Objects, infiniband: bool) -> bool {
    let made_later = if infiniband { VECTORS - 1 } else { 0 };
    before.iter().zip(after).all(|(before, after)| {
        before.keys().eq(after.keys())
            && before.iter().zip(after.values()).all(|((name, before), after)| {
                match name.as_str() {
                    "EQ" => *after <= before + made_later,
                    _ => after <= before,
                }
            })
    })
}

/// Uses both devices once: the driver makes some objects of its own, and tests write combining,
/// when a device is first used.
const FIRST_USE: &str = "pair 'tcp 18515' 'uverbs pingpong srq -n 10 -d mlx5_1' \
                         'uverbs pingpong srq -n 10 -d mlx5_0 127.0.0.1'";

impl EmulatorCheck {
    /// Reads the counts of a guest that has the program `uverbs`.
    pub(crate) fn new(vm: &mut Vm, infiniband: bool) -> Result<Self> {
        if let Err(why) = run_script(vm, FIRST_USE, false)? {
            bail!("the first use of the devices: {why}");
        }
        Ok(Self { doorbells: DoorbellFaults::of(vm)?, objects: objects(vm)?, infiniband })
    }

    /// Two reports on the changes since then.
    pub(crate) fn reports(&self, vm: &Vm) -> Vec<Report> {
        let report = |name: &str, outcome: Result<()>| match outcome {
            Ok(()) => Report { name: name.to_owned(), outcome: TestOutcome::Passed },
            Err(error) => failed(name, &error),
        };
        vec![
            report("emulator::doorbells", self.doorbells(vm)),
            report("emulator::objects", self.nothing_left(vm)),
        ]
    }

    /// A suite may ring pages of its own without a queue, so strays do not count.
    fn doorbells(&self, vm: &Vm) -> Result<()> {
        let stray = self.doorbells.stray;
        (DoorbellFaults { stray, ..DoorbellFaults::of(vm)? }).none_since(self.doorbells)
    }

    fn nothing_left(&self, vm: &Vm) -> Result<()> {
        // The objects of a process go when the kernel releases its file, a little later.
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let after = objects(vm)?;
            if left_nothing(&self.objects, &after, self.infiniband) {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("left on the device: {:?}, before {:?}", after, self.objects);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_completion_eqs_of_infiniband_ports_may_be_left() {
        let counts = |eqs, cqs| {
            let function = BTreeMap::from([("CQ".to_owned(), cqs), ("EQ".to_owned(), eqs)]);
            [function.clone(), function]
        };
        assert!(left_nothing(&counts(4, 4), &counts(4, 4), false));
        assert!(left_nothing(&counts(4, 4), &counts(5, 4), true));
        assert!(left_nothing(&counts(4, 4), &counts(3, 3), false));
        for (after, infiniband) in
            [(counts(5, 4), false), (counts(6, 4), true), (counts(4, 5), true)]
        {
            assert!(!left_nothing(&counts(4, 4), &after, infiniband), "{after:?}");
        }
    }
}
