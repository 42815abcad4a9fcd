//! Strictness: mistakes of a program that hardware does not report.

use crate::kernel::Kernel;
use std::fmt;
use uverbs_connectx::audit::DeviceWrites;

/// The findings of a strict fabric: [`Fabric::check`](crate::Fabric::check).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Findings(Vec<String>);

impl Findings {
    /// A sentence for each.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for Findings {}

impl Kernel {
    /// Has the devices watch the memory of requests.
    pub(crate) fn be_strict(&mut self) {
        self.findings = Some(Vec::new());
        let writes = DeviceWrites::default();
        for device in 0..self.drivers.len() {
            self.function(device).device_mut().start_audit(&writes);
        }
    }

    /// Fills the buffers of new receives, and takes the findings of the devices.
    pub(crate) fn audit(&mut self) {
        let Some(mut findings) = self.findings.take() else { return };
        for device in 0..self.drivers.len() {
            let audited = self.function(device).device_mut();
            audited.poison_receives();
            let found = audited.take_findings();
            let name = &self.drivers[device].name;
            findings.extend(found.into_iter().map(|finding| format!("{name}: {finding}")));
        }
        self.findings = Some(findings);
    }

    /// The findings so far, and those about objects and requests that are left now.
    pub(crate) fn check(&mut self) -> Result<(), Findings> {
        self.audit();
        let mut all = self.findings.clone().unwrap_or_default();
        for device in 0..self.drivers.len() {
            let (unrung, unread, errors) = {
                let device = self.function(device).device_mut();
                (device.unrung_queues(), device.unread_completions(), device.doorbell_errors())
            };
            let name = &self.drivers[device].name;
            let unrung = unrung
                .into_iter()
                .map(|qpn| format!("{name}: qp {qpn:#x} has requests whose doorbell was not rung"));
            let unread = unread.into_iter().map(|(cqn, count)| {
                format!("{name}: cq {cqn:#x} has {count} completions that were not polled")
            });
            let counts = [
                (errors.record_behind, "doorbells came before their doorbell record"),
                (errors.differs, "doorbells do not match their request in memory"),
                (errors.stray, "doorbells are of no queue of their page"),
            ];
            let counts = counts.into_iter().filter(|(count, _)| *count > 0);
            let counts = counts.map(|(count, how)| format!("{name}: {count} {how}"));
            all.extend(unrung.chain(unread).chain(counts));
        }
        all.extend(self.objects_left());
        if all.is_empty() { Ok(()) } else { Err(Findings(all)) }
    }
}
