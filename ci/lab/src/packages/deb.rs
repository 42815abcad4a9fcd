//! Unpacks files of Debian packages, from the tar stream of `dpkg-deb`.
//!
//! `apt.rs` brings the files; kernels, QEMU and peers each choose their part.

use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

/// Hands each regular file and link of a package to `visit`, with its path relative to the root.
fn each_entry(
    deb: &Path,
    mut visit: impl FnMut(
        &Path,
        &mut tar::Entry<'_, io::BufReader<std::process::ChildStdout>>,
    ) -> Result<()>,
) -> Result<()> {
    let mut child = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(deb)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("run dpkg-deb")?;
    let stdout = child.stdout.take().context("dpkg-deb's output")?;
    let mut archive = tar::Archive::new(io::BufReader::with_capacity(1 << 20, stdout));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = relative(&entry.path()?)
            .with_context(|| format!("a path in {} leaves its root", deb.display()))?;
        visit(&path, &mut entry)?;
    }
    // The rest of the stream must be read, or dpkg-deb fails with a closed pipe.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    let status = child.wait()?;
    if !status.success() {
        bail!("dpkg-deb --fsys-tarfile {} failed ({status})", deb.display());
    }
    Ok(())
}

/// The path without leading `/` or `./`; `None` if it would climb out.
fn relative(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir | Component::RootDir => {}
            Component::Normal(name) => clean.push(name),
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}

/// Moves files that older packages still ship in `/lib` and `/bin` to where those names point today.
fn merged(path: &Path) -> PathBuf {
    const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
    match path.components().next() {
        Some(Component::Normal(first)) if MERGED.iter().any(|name| first == *name) => {
            Path::new("usr").join(path)
        }
        _ => path.to_owned(),
    }
}

/// Unpacks the files and links for which `wanted` says so under `root`, with `/usr` merged.
/// Answers how many there were.
pub(crate) fn unpack(deb: &Path, root: &Path, wanted: impl Fn(&Path) -> bool) -> Result<usize> {
    let mut count = 0;
    each_entry(deb, |path, entry| {
        let path = merged(path);
        if !wanted(&path) {
            return Ok(());
        }
        let target = root.join(&path);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        let kind = entry.header().entry_type();
        if kind.is_file() {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            fs::write(&target, bytes)?;
            let mode = entry.header().mode()? & 0o755;
            fs::set_permissions(&target, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
        } else if kind.is_symlink() {
            let to = entry.link_name()?.context("a link without target")?;
            symlink(to, &target)?;
        } else if kind.is_hard_link() {
            let to = entry.link_name()?.context("a link without target")?;
            let to = relative(&to).context("a link that leaves the root")?;
            fs::hard_link(root.join(merged(&to)), &target)?;
        } else {
            return Ok(());
        }
        count += 1;
        Ok(())
    })
    .with_context(|| format!("unpack {}", deb.display()))?;
    Ok(count)
}

/// As `unpack`, but regular files alone and without `/usr` merged: no link of the package can lead
/// another of its files out of a fresh `root`.
pub(crate) fn unpack_files(deb: &Path, root: &Path, wanted: impl Fn(&Path) -> bool) -> Result<()> {
    each_entry(deb, |path, entry| {
        if !wanted(path) || !entry.header().entry_type().is_file() {
            return Ok(());
        }
        let target = root.join(path);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        fs::write(&target, bytes)?;
        Ok(())
    })
    .with_context(|| format!("unpack {}", deb.display()))
}

/// The package's name, from its file's name.
pub(crate) fn package_name(deb: &Path) -> OsString {
    let name = deb.file_name().unwrap_or_default().to_string_lossy();
    name.split('_').next().unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        assert_eq!(relative(Path::new("./usr/bin/x")), Some(PathBuf::from("usr/bin/x")));
        assert_eq!(relative(Path::new("/usr/bin/x")), Some(PathBuf::from("usr/bin/x")));
        assert_eq!(relative(Path::new("./usr/../../etc/passwd")), None);
    }

    #[test]
    fn the_root_is_merged() {
        assert_eq!(merged(Path::new("lib/modules/6.1")), PathBuf::from("usr/lib/modules/6.1"));
        assert_eq!(merged(Path::new("library/x")), PathBuf::from("library/x"));
        assert_eq!(merged(Path::new("usr/lib/x")), PathBuf::from("usr/lib/x"));
    }

    #[test]
    fn package_names_come_from_file_names() {
        assert_eq!(package_name(Path::new("/a/libc6_2.41-12_amd64.deb")), "libc6");
    }
}
