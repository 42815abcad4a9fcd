//! Compares every struct, field offset and enumerator of this crate with a kernel's own BTF.
//!
//! By default the BTF is that of the running kernel, from `/sys/kernel/btf`. `UVERBS_BTF_DIR` names
//! another place: a directory per kernel release, with copies of the files `vmlinux`, `ib_core`,
//! `ib_uverbs`, `mlx5_core`, `mlx5_ib`, `mlx5_vdpa`, `rdma_cm`, `rdma_rxe` and `rdma_ucm` from there.

mod comparison;
mod expectation;
mod header;
mod kernel;
mod prm;
mod proof;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Conclusion, Failed, Trial};

use header::Report;
use kernel::Kernel;

const KIND: &str = "kernel-btf";

fn main() -> std::process::ExitCode {
    let arguments = Arguments::from_args();
    run(&arguments).exit_code()
}

fn run(arguments: &Arguments) -> Conclusion {
    let report = Report::default();
    let mut trials = proof::trials();
    match kernels() {
        Err(e) => trials.push(Trial::test("type information", move || Err(Failed::from(e)))),
        Ok(kernels) if kernels.is_empty() => {
            trials.push(Trial::ignorable_test("structs and numbers of the running kernel", || {
                Ok(Completion::ignored_with(
                    "[btf] no RDMA module is loaded here, or this kernel's modules have no type \
                     information, as before Linux 5.11",
                ))
            }))
        }
        Ok(kernels) => {
            for (release, dir) in kernels {
                match Kernel::load(&release, &dir) {
                    Ok(kernel) => {
                        let kernel = Arc::new(kernel);
                        trials.extend(prm::trials(&kernel));
                        trials.extend(header::trials(kernel, &report));
                    }
                    Err(e) => trials.push(Trial::test(release, move || Err(Failed::from(e)))),
                }
            }
        }
    }
    let trials = trials.into_iter().map(|trial| trial.with_kind(KIND)).collect();
    let conclusion = libtest_mimic::run(arguments, trials);
    for line in report.lines() {
        println!("{line}");
    }
    conclusion
}

/// The releases to compare with, and where their type information is.
fn kernels() -> Result<Vec<(String, PathBuf)>, String> {
    if let Some(dir) = env::var_os("UVERBS_BTF_DIR").map(PathBuf::from) {
        let fault = |e: std::io::Error| format!("UVERBS_BTF_DIR={}: {e}", dir.display());
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir).map_err(fault)? {
            let path = entry.map_err(fault)?.path();
            if path.join("vmlinux").exists() {
                let release = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.push((release, path));
            }
        }
        if found.is_empty() {
            return Err(format!(
                "UVERBS_BTF_DIR={}: no directory in it has vmlinux",
                dir.display()
            ));
        }
        found.sort();
        return Ok(found);
    }
    let dir = Path::new("/sys/kernel/btf");
    if !dir.join("vmlinux").exists() || !dir.join("ib_uverbs").exists() {
        return Ok(Vec::new());
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").map_err(|e| e.to_string())?;
    Ok(vec![(release.trim().to_owned(), dir.to_owned())])
}
