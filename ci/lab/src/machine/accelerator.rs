//! The accelerator of QEMU: KVM where it really boots a kernel, else TCG.
//!
//! The existence of `/dev/kvm` proves little: inside some virtual machines a stock kernel crashes
//! under it. The lab therefore tries a real boot once, and keeps the result in the cache, for each
//! host kernel and QEMU.

use crate::output::errln;
use crate::packages::cache::{self, Cache};
use crate::packages::qemu::Qemu;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};

/// Forces one accelerator: `kvm` or `tcg`.
const CHOICE: &str = "UVERBS_LAB_ACCEL";
const ANSWER: &str = "accelerator.json";

/// An accelerator of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Accelerator {
    /// The host kernel's virtual machines.
    Kvm,
    /// QEMU's own translator.
    Tcg,
    /// TCG with a clock that counts instructions: the guest measures the same each time, whatever
    /// the load of the host. For one processor.
    Counting,
}

impl Accelerator {
    /// As QEMU spells it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
            Accelerator::Counting => "tcg, counting instructions",
        }
    }

    /// QEMU's arguments for it.
    pub(crate) fn arguments(self) -> &'static [&'static str] {
        match self {
            Accelerator::Kvm => &["-accel", "kvm", "-smp", "2"],
            Accelerator::Tcg => &["-accel", "tcg,thread=multi", "-smp", "2"],
            // An instruction takes one nanosecond; idle time is skipped.
            Accelerator::Counting => {
                &["-accel", "tcg,thread=single", "-smp", "1", "-icount", "shift=0,sleep=off"]
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Answer {
    host: String,
    qemu: String,
    accelerator: Accelerator,
}

/// The accelerator to use; `boots` tries a real boot with the one it is given.
pub(crate) fn choose(
    cache: &Cache,
    qemu: &Qemu,
    boots: impl FnOnce(Accelerator) -> Result<()>,
) -> Result<Accelerator> {
    match std::env::var(CHOICE).ok().as_deref() {
        None | Some("") => {}
        Some("kvm") => return Ok(Accelerator::Kvm),
        Some("tcg") => return Ok(Accelerator::Tcg),
        Some(other) => anyhow::bail!("{CHOICE}={other}: kvm or tcg expected"),
    }
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(Accelerator::Tcg);
    }
    let host = host();
    let path = cache.root().join(ANSWER);
    let known =
        fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Answer>(&bytes).ok());
    if let Some(known) = known.filter(|known| known.host == host && known.qemu == qemu.version) {
        return Ok(known.accelerator);
    }
    errln!("trying once whether /dev/kvm boots a kernel …");
    let accelerator = match boots(Accelerator::Kvm) {
        Ok(()) => Accelerator::Kvm,
        Err(error) => {
            let text = format!("{error:#}");
            let first = text.lines().next().unwrap_or_default();
            errln!("it does not ({first}); guests run under TCG from now on");
            Accelerator::Tcg
        }
    };
    let answer = Answer { host, qemu: qemu.version.clone(), accelerator };
    let partial = cache.root().join(format!("{ANSWER}.{}", std::process::id()));
    let written = fs::write(&partial, serde_json::to_vec_pretty(&answer)?);
    written
        .and_then(|()| fs::rename(&partial, &path))
        .with_context(|| cache::advice(cache.root()))?;
    Ok(accelerator)
}

/// The result depends on the host's kernel and processor, besides QEMU.
fn host() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processor.lines().find(|line| line.starts_with("model name")).unwrap_or_default();
    format!("{} / {}", release.trim(), model.trim())
}
