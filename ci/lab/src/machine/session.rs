//! Prepares and boots guests: fetch, build, choose an accelerator, pack the initramfs, boot.
//!
//! Callers choose the programs that the guest gets and those that it runs.

use crate::arch::Arch;
use crate::machine::accelerator::{self, Accelerator};
use crate::machine::device::{self, Device, DeviceName, Emulation};
use crate::machine::initramfs::Initramfs;
use crate::machine::vm::{self, ChildGuard, Plan, Vm};
use crate::packages::busybox;
use crate::packages::cache::Cache;
use crate::packages::cross::Cross;
use crate::packages::fetch::{self, Needs};
use crate::packages::kernel::{Kernel, KernelName};
use crate::packages::python;
use crate::packages::qemu::Qemu;
use crate::packages::rdma_core;
use crate::run::jobs;
use crate::run::progress;
use crate::run::stages;
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result};
use lab_guest::order::HostFiles;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Names an emulator of ConnectX functions to use instead of the workspace's.
const EMULATOR: &str = "UVERBS_LAB_CONNECTX";

/// Packing this many bytes or more into an initramfs is shown.
const LARGE_ROOT: u64 = 64_000_000;

/// A packed initramfs, and the run directory and number of its guest.
struct Packed {
    directory: PathBuf,
    number: u32,
    archive: PathBuf,
}

/// State shared by all guests of one command.
pub(crate) struct Session {
    pub(crate) workspace: Workspace,
    cache: Cache,
    qemu: Qemu,
    accelerator: Accelerator,
    arch: Arch,
    init: PathBuf,
    directory: PathBuf,
    show_console: bool,
    /// The number of guests started so far.
    machines: AtomicU32,
}

/// The configuration of one guest.
#[derive(Clone, Copy)]
pub(crate) struct Machine<'a> {
    pub(crate) kernel: KernelName,
    pub(crate) device: DeviceName,
    /// Programs of the host, with their names in the guest's `/usr/local/bin`.
    pub(crate) programs: &'a [(String, PathBuf)],
    pub(crate) overlays: &'a [PathBuf],
    pub(crate) peers: bool,
    /// The directory for the emulated device's recording.
    pub(crate) record: Option<&'a Path>,
    /// Python with rdma-core's bindings; it uses the libraries of the peers.
    pub(crate) python: bool,
    /// Options of the emulated device, and which of its functions the guest gets.
    pub(crate) emulation: Emulation,
    pub(crate) functions: &'a [usize],
    /// The running emulator of another guest, to use in place of a new one.
    pub(crate) companion: Option<&'a Rc<ChildGuard>>,
    /// This machine's file system, if the guest gets it.
    pub(crate) host: Option<&'a HostFiles>,
}

impl Machine<'_> {
    /// A guest without further programs.
    pub(crate) fn new(kernel: KernelName, device: DeviceName) -> Self {
        Self {
            kernel,
            device,
            programs: &[],
            overlays: &[],
            peers: false,
            python: false,
            emulation: Emulation::default(),
            record: None,
            functions: &[0, 1],
            companion: None,
            host: None,
        }
    }
}

impl Session {
    /// Prepares for booting the kernels that `needs` names.
    pub(crate) fn open(needs: &Needs, show_console: bool) -> Result<Self> {
        vm::check_host()?;
        let cache = Cache::open()?;
        let arch = needs.arch;
        let stage = stages::stage(arch.stage("fetch"));
        fetch::fetch(&cache, needs, false)?;
        drop(stage);
        let cross = match arch.is_host() {
            true => None,
            false => Some(Cross::find(arch, &cache)?),
        };
        let workspace = Workspace::find()?.built_by(cross.clone());
        let stage = stages::stage(arch.stage("build: guest and emulator"));
        let init = init(cross)?;
        drop(stage);
        let qemu = Qemu::find(arch, &cache)?.context("QEMU has gone from the cache")?;
        // A run may have a session for each architecture.
        let directory = workspace.run_directory()?.join(arch.label());
        std::fs::create_dir_all(&directory)?;
        let mut session = Self {
            workspace,
            cache,
            qemu,
            accelerator: Accelerator::Tcg,
            arch,
            init,
            directory,
            show_console,
            machines: AtomicU32::new(0),
        };
        if !arch.is_host() {
            return Ok(session);
        }
        let kernel = needs.kernels.last().copied().unwrap_or(KernelName::Newest);
        session.accelerator = accelerator::choose(&session.cache, &session.qemu, |accelerator| {
            let kernel = session.kernel(kernel)?;
            let device = Device::default();
            let packed = session.pack(&kernel, &device, session.skeleton())?;
            session.start(&kernel, &device, &packed, None, accelerator, 30)?.power_off()
        })?;
        Ok(session)
    }

    /// Makes the guest's clock count instructions, so that times do not depend on the host's load.
    pub(crate) fn count_instructions(&mut self) {
        self.accelerator = Accelerator::Counting;
    }

    /// The accelerator of the guests.
    pub(crate) fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The processor of the guests.
    pub(crate) fn arch(&self) -> Arch {
        self.arch
    }

    /// A kernel that `open` has fetched.
    pub(crate) fn kernel(&self, name: KernelName) -> Result<Kernel> {
        Kernel::find(name, self.arch, &self.cache)?
            .with_context(|| format!("kernel {} has gone from the cache", name.label()))
    }

    fn skeleton(&self) -> Initramfs {
        Initramfs::new(&self.init)
    }

    /// Boots a guest.
    pub(crate) fn boot(&self, machine: &Machine<'_>) -> Result<Vm> {
        let names = format!("boot {} {}", machine.kernel.label(), machine.device.label());
        let _stage = stages::stage(self.arch.stage(names));
        let kernel = self.kernel(machine.kernel)?;
        let mut device = device::prepare(
            machine.device,
            &kernel,
            machine.emulation,
            machine.functions,
            emulator,
        )?;
        if let Some(directory) = machine.record {
            device.record(directory)?;
        }
        if let Some(files) = machine.host {
            device.share(&kernel, files)?;
        }
        let packed = self.pack(&kernel, &device, self.root(machine)?)?;
        let spinner = progress::spinner(format!(
            "booting {} with {} under {}",
            kernel.release,
            machine.device.label(),
            self.accelerator.label()
        ));
        let vm = self.start(&kernel, &device, &packed, machine.companion, self.accelerator, 180);
        spinner.finish_and_clear();
        vm.with_context(|| format!("boot {} with {}", kernel.release, machine.device.label()))
    }

    /// The root of a guest, without the kernel's modules.
    pub(crate) fn root(&self, machine: &Machine<'_>) -> Result<Initramfs> {
        let mut root = self.skeleton();
        root.overlay(
            &busybox::shell(self.arch, &self.cache)?
                .context("the shell has gone from the cache")?,
        )?;
        if machine.peers {
            let peers = rdma_core::peers(self.arch, &self.cache)
                .context("the peers have gone from the cache")?;
            root.overlay(&peers)?;
        }
        if machine.python {
            let python =
                python::python(self.arch, &self.cache).context("Python has gone from the cache")?;
            root.overlay(&python)?;
            let newer =
                rdma_core::newer(self.arch, &self.cache).context("newer libraries have gone")?;
            root.overlay(&newer)?;
        }
        for (name, path) in machine.programs {
            root.program(&format!("usr/local/bin/{name}"), path);
        }
        for overlay in machine.overlays {
            root.overlay(overlay)
                .with_context(|| format!("lay {} over the root", overlay.display()))?;
        }
        Ok(root)
    }

    /// Packs the guest's root file system into an initramfs.
    fn pack(&self, kernel: &Kernel, device: &Device, mut root: Initramfs) -> Result<Packed> {
        // Sockets have fixed names, so the guests of each job have a directory of their own.
        let directory = self.directory.join(format!("job-{}", jobs::number()));
        std::fs::create_dir_all(&directory)?;
        let number = self.machines.fetch_add(1, Ordering::Relaxed);
        root.orders(&device.setup, &kernel.release, &kernel.modules)?;
        let size = root.size()?;
        // A small root takes too short a time to be shown.
        let bar = (size >= LARGE_ROOT).then(|| progress::bytes("packing the guest's root", size));
        let archive = directory.join(format!("initramfs-{number}"));
        root.write(&archive, |packed| {
            if let Some(bar) = &bar {
                bar.inc(packed);
            }
        })?;
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        Ok(Packed { directory, number, archive })
    }

    fn start(
        &self,
        kernel: &Kernel,
        device: &Device,
        packed: &Packed,
        companion: Option<&Rc<ChildGuard>>,
        accelerator: Accelerator,
        patience: u64,
    ) -> Result<Vm> {
        Vm::boot(Plan {
            qemu: &self.qemu,
            arch: self.arch,
            accelerator,
            kernel,
            device,
            archive: &packed.archive,
            companion: companion.cloned(),
            directory: &packed.directory,
            number: packed.number,
            patience: Duration::from_secs(patience),
            show_console: self.show_console,
        })
    }
}

/// Builds the program that serves the emulated devices.
pub(crate) fn programs() -> Result<()> {
    emulator()?;
    Ok(())
}

/// PID 1 of the guest.
fn init(cross: Option<Cross>) -> Result<PathBuf> {
    let lab = Workspace::of_lab()?.built_by(cross);
    lab.static_program("lab-guest", "lab-init", Profile::Release)
}

/// The emulated ConnectX: named by the environment, or built from the lab's workspace.
fn emulator() -> Result<Option<PathBuf>> {
    if let Some(own) = std::env::var_os(EMULATOR).filter(|value| !value.is_empty()) {
        let path = PathBuf::from(own);
        return Ok(Some(path.canonicalize().with_context(|| format!("{EMULATOR}={path:?}"))?));
    }
    let lab = Workspace::of_lab()?;
    let there = lab.has("connectx-vfio", "bin", "connectx");
    there.then(|| lab.static_program("connectx-vfio", "connectx", Profile::Release)).transpose()
}

impl Drop for Session {
    fn drop(&mut self) {
        // The next run removes the rest.
        let _left = std::fs::remove_dir_all(&self.directory);
        // The run's directory stays while it has another session's.
        let _used = self.directory.parent().map(std::fs::remove_dir);
    }
}
