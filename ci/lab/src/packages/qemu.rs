//! QEMU: the machine's own if it is new enough, else Debian's with the libraries it needs.
//!
//! The fetched one runs from the cache by its own loader, whatever the machine
//! has installed. `machine/vm.rs` builds the rest of the command line.

use crate::arch::Arch;
use crate::packages::apt::{Apt, DebPackage};
use crate::packages::cache::{Cache, Filling};
use crate::packages::deb;
use anyhow::{Context, Result, bail};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names a QEMU to use instead of one on `PATH` or a fetched one.
fn own(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "UVERBS_LAB_QEMU",
        Arch::Aarch64 => "UVERBS_LAB_QEMU_AARCH64",
    }
}

/// The program that emulates an architecture.
fn program(arch: Arch) -> String {
    format!("qemu-system-{}", arch.label())
}

/// Debian's package of it.
fn package(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "qemu-system-x86",
        Arch::Aarch64 => "qemu-system-arm",
    }
}

const UNIT: &str = "qemu";
/// The first release with `vfio-user-pci`.
const OLDEST: (u32, u32) = (10, 1);

/// A QEMU that can be started.
#[derive(Clone, Debug)]
pub(crate) struct Qemu {
    /// The output of its `--version`.
    pub(crate) version: String,
    command: Vec<String>,
    modules: Option<PathBuf>,
}

impl Qemu {
    /// The QEMU to use, if one is there.
    pub(crate) fn find(arch: Arch, cache: &Cache) -> Result<Option<Self>> {
        let variable = own(arch);
        if let Some(own) = env::var_os(variable).filter(|value| !value.is_empty()) {
            let mut qemu = Self::at(Path::new(&own));
            let (version, numbers) =
                qemu.ask_version().with_context(|| format!("{variable}={own:?}"))?;
            if numbers < OLDEST {
                bail!(
                    "{variable} names QEMU {version}; the lab needs {}.{} or newer",
                    OLDEST.0,
                    OLDEST.1
                );
            }
            qemu.version = version;
            return Ok(Some(qemu));
        }
        let on_path = env::var_os("PATH").and_then(|path| {
            env::split_paths(&path).map(|dir| dir.join(program(arch))).find(|path| path.is_file())
        });
        if let Some(path) = on_path {
            let mut qemu = Self::at(&path);
            // A broken or old QEMU is ignored, and the fetched one is used.
            if let Ok((version, numbers)) = qemu.ask_version()
                && numbers >= OLDEST
            {
                qemu.version = version;
                return Ok(Some(qemu));
            }
        }
        let unit = arch.unit(UNIT);
        let Some(directory) = cache.unit(&unit) else { return Ok(None) };
        let mut qemu = Self::fetched(arch, &directory);
        let prefix = format!("{}=", package(arch));
        qemu.version = cache
            .sources(&unit)
            .iter()
            .find_map(|source| source.strip_prefix(prefix.as_str()).map(str::to_owned))
            .unwrap_or_default();
        Ok(Some(qemu))
    }

    fn at(path: &Path) -> Self {
        Self { version: String::new(), command: vec![path.display().to_string()], modules: None }
    }

    fn fetched(arch: Arch, directory: &Path) -> Self {
        let path = |relative: &str| directory.join(relative).display().to_string();
        Self {
            version: String::new(),
            command: vec![
                path("usr/lib64/ld-linux-x86-64.so.2"),
                "--library-path".into(),
                format!("{}:{}", path("usr/lib/x86_64-linux-gnu"), path("usr/lib")),
                path(&format!("usr/bin/{}", program(arch))),
                "-L".into(),
                path("usr/share/qemu"),
                "-L".into(),
                path("usr/share/seabios"),
            ],
            modules: Some(directory.join("usr/lib/x86_64-linux-gnu/qemu")),
        }
    }

    fn ask_version(&self) -> Result<(String, (u32, u32))> {
        let output = self.command().arg("--version").stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        version(&text).with_context(|| {
            format!("its --version said {text:?} {}", String::from_utf8_lossy(&output.stderr))
        })
    }

    /// A command to which arguments can be added.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        if let Some(modules) = &self.modules {
            command.env("QEMU_MODULE_DIR", modules);
        }
        command
    }
}

/// The version text and its first two numbers, from `QEMU emulator version 11.1.3 (Debian …)`.
fn version(text: &str) -> Option<(String, (u32, u32))> {
    let rest = text.split_once("version ")?.1;
    let version = rest.split_whitespace().next()?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let major = numbers.next()?.ok()?;
    let minor = numbers.next()?.ok()?;
    Some((version.to_owned(), (major, minor)))
}

/// Downloads QEMU into the cache.
pub(crate) fn fetch(arch: Arch, filling: &Filling<'_>, apt: &Apt) -> Result<()> {
    // Packages that configure an installed system, and have no files that QEMU opens.
    const NEEDLESS: &[&str] = &[
        "adduser",
        "base-passwd",
        "cpio",
        "debconf",
        "dracut",
        "dracut-core",
        "dracut-install",
        "e2fsprogs",
        "initramfs-tools",
        "kmod",
        "libpam-modules",
        "libpam-modules-bin",
        "login.defs",
        "logsave",
        "mount",
        "passwd",
        "systemd",
        "udev",
        "perl-base",
        "linux-base",
    ];
    let packages: Vec<DebPackage> = apt
        .closure(&[package(arch), "libc6"])?
        .into_iter()
        .filter(|package| !NEEDLESS.contains(&package.name.as_str()))
        .collect();
    let files = apt.download(&program(arch), &packages)?;
    let directory = filling.add(&arch.unit(UNIT), |unit| {
        for file in &files {
            deb::unpack(file, unit, |path| wanted(arch, path))?;
            fs::remove_file(file)?;
        }
        let (_, numbers) = Qemu::fetched(arch, unit).ask_version().context("the fetched QEMU")?;
        if numbers < OLDEST {
            bail!("the suite's QEMU is {numbers:?}, needed is {OLDEST:?}");
        }
        Ok(packages.iter().map(DebPackage::to_string).collect())
    })?;
    debug_assert!(directory.exists());
    Ok(())
}

/// The files that QEMU opens when it runs a machine without display.
fn wanted(arch: Arch, path: &Path) -> bool {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    if path.starts_with("usr/lib64") || path.starts_with("usr/lib/x86_64-linux-gnu") {
        let directory = path.parent().unwrap_or(Path::new(""));
        let library = file.contains(".so");
        let top = directory == Path::new("usr/lib64")
            || directory == Path::new("usr/lib/x86_64-linux-gnu");
        return library && (top || directory.ends_with("qemu"));
    }
    if path.starts_with("usr/share/seabios") {
        return true;
    }
    if path.starts_with("usr/share/qemu") {
        const FIRMWARE: &[&str] = &[
            "bios-256k.bin",
            "bios.bin",
            "bios-microvm.bin",
            "kvmvapic.bin",
            "linuxboot.bin",
            "linuxboot_dma.bin",
            "multiboot.bin",
            "multiboot_dma.bin",
            "pvh.bin",
            "qboot.rom",
        ];
        return FIRMWARE.contains(&&*file);
    }
    path == Path::new("usr/bin").join(program(arch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let text = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\nCopyright";
        assert_eq!(version(text), Some(("11.1.3".into(), (11, 1))));
        assert_eq!(version("QEMU emulator version 7.2.19"), Some(("7.2.19".into(), (7, 2))));
        assert_eq!(version("segmentation fault"), None);
    }

    #[test]
    fn only_files_of_a_headless_machine_are_kept() {
        let wanted = |path: &Path| wanted(Arch::X86_64, path);
        assert!(wanted(Path::new("usr/bin/qemu-system-x86_64")));
        assert!(wanted(Path::new("usr/lib64/ld-linux-x86-64.so.2")));
        assert!(wanted(Path::new("usr/lib/x86_64-linux-gnu/libglib-2.0.so.0")));
        assert!(wanted(Path::new("usr/share/seabios/bios-256k.bin")));
        assert!(!wanted(Path::new("usr/lib/x86_64-linux-gnu/gconv/BIG5.so")));
        assert!(!wanted(Path::new("usr/share/doc/libc6/copyright")));
    }
}
