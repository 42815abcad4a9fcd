//! Loads kernel modules with their dependencies, from the list that the host wrote.
//!
//! The list comes from `kernel/module.rs` of `lab`, which read it out of the modules themselves.

use crate::Failure;
use crate::output::errln;
use lab_guest::order::{MODULES_PATH, Module};
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::{self, File};
use std::process::ExitCode;

/// The modules that this guest could load.
pub(crate) struct Modules {
    known: BTreeMap<String, Module>,
    loaded: BTreeSet<String>,
}

impl Modules {
    /// Reads the host's list.
    pub(crate) fn read() -> Result<Self, Failure> {
        let list: Vec<Module> = serde_json::from_slice(
            &fs::read(MODULES_PATH).map_err(|error| format!("read {MODULES_PATH}: {error}"))?,
        )?;
        let known = list.into_iter().map(|module| (module.name.clone(), module)).collect();
        Ok(Self { known, loaded: BTreeSet::new() })
    }

    /// Loads a module after those that it needs. A name that is not in the list is taken for built
    /// in: the host has already refused names that this kernel does not have in either form.
    pub(crate) fn load(&mut self, name: &str) -> Result<(), Failure> {
        let Some(module) = self.known.get(name).cloned() else { return Ok(()) };
        if !self.loaded.insert(module.name) {
            return Ok(());
        }
        for needed in &module.needs {
            self.load(needed)?;
        }
        let file = File::open(&module.path).map_err(|error| format!("{}: {error}", module.path))?;
        match finit_module(&file, &CString::default(), ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST) => Ok(()),
            Err(error) => Err(format!("load module {name}: {error}").into()),
        }
    }

    fn by_alias(&self, alias: &str) -> Vec<String> {
        let wanted = alias.replace('-', "_");
        if self.known.contains_key(&wanted) {
            return vec![wanted];
        }
        self.known
            .values()
            .filter(|module| module.aliases.iter().any(|pattern| matches(pattern, alias)))
            .map(|module| module.name.clone())
            .collect()
    }
}

/// Whether a name fits a module alias, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|tail| {
            (0..=tail.len())
                .filter(|at| tail.is_char_boundary(*at))
                .any(|at| matches(rest, &tail[at..]))
        }),
    }
}

/// `modprobe [options] NAME…`, for the kernel and for users.
pub(crate) fn modprobe(arguments: impl Iterator<Item = String>) -> ExitCode {
    let names: Vec<String> = arguments.filter(|argument| !argument.starts_with('-')).collect();
    let mut modules = match Modules::read() {
        Ok(modules) => modules,
        Err(failure) => {
            errln!("modprobe: {failure}");
            return ExitCode::FAILURE;
        }
    };
    let mut status = ExitCode::SUCCESS;
    for name in names {
        let found = modules.by_alias(&name);
        if found.is_empty() {
            errln!("modprobe: the lab has no module {name} for this kernel");
            status = ExitCode::FAILURE;
        }
        for module in found {
            if let Err(failure) = modules.load(&module) {
                errln!("modprobe: {failure}");
                status = ExitCode::FAILURE;
            }
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn aliases_match_with_wildcards() {
        assert!(matches("crypto-crc32", "crypto-crc32"));
        assert!(!matches("crypto-crc32", "crypto-crc32c"));
        assert!(matches("pci:v000015B3d00001017*", "pci:v000015B3d00001017sv0sd0"));
        assert!(matches("rdma-link-*", "rdma-link-rxe"));
        assert!(matches("a*b*c", "a-b-b-c"));
        assert!(!matches("a*b*c", "a-c-b"));
    }
}
