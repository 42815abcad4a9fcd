//! The guest's root file system, made anew for each boot.
//!
//! Layers of directories over a skeleton: the guest's PID 1, the modules that the kernel has, the
//! shell, our binaries, peers if asked for, the user's overlays. Later layers win.

use crate::packages::kernel::module;
use anyhow::{Context, Result};
use cpio::newc::{self, ModeFileType};
use lab_guest::order::{GuestSetup, MODULES_PATH, Module, SETUP_PATH, USER};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Directories of the skeleton with mode and owner.
const DIRECTORIES: &[(&str, u32, u32)] = &[
    ("dev", 0o755, 0),
    ("etc", 0o755, 0),
    ("home", 0o755, 0),
    ("home/user", 0o755, USER.1),
    ("lab", 0o755, 0),
    ("proc", 0o755, 0),
    ("root", 0o755, 0),
    ("run", 0o755, 0),
    ("sys", 0o755, 0),
    ("tmp", 0o1777, 0),
    ("usr", 0o755, 0),
    ("usr/bin", 0o755, 0),
    ("usr/lib", 0o755, 0),
    ("usr/lib64", 0o755, 0),
    ("usr/local", 0o755, 0),
    ("usr/local/bin", 0o755, 0),
    ("usr/sbin", 0o755, 0),
    ("var", 0o755, 0),
];

const LINKS: &[(&str, &str)] = &[
    ("bin", "usr/bin"),
    ("init", "lab/lab-init"),
    ("lab/lab-launch", "lab-init"),
    ("usr/sbin/lab-count", "/lab/lab-init"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("sbin", "usr/sbin"),
    ("usr/sbin/modprobe", "/lab/lab-init"),
    ("var/run", "../run"),
    ("var/tmp", "../tmp"),
];

/// Files that programs expect; the interfaces' addresses get names.
const FILES: &[(&str, &str)] = &[
    ("etc/group", "root:x:0:\nuser:x:1000:\n"),
    ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n10.0.0.1 h0\n10.0.0.2 h1\n"),
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\nservices: files\n"),
    ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"),
];

/// One path of the guest.
enum Node {
    Directory { mode: u32, owner: u32 },
    File { mode: u32, contents: Contents },
    Link(PathBuf),
}

enum Contents {
    Here(Vec<u8>),
    At(PathBuf),
}

/// A root file system under construction.
pub(crate) struct Initramfs {
    nodes: BTreeMap<String, Node>,
}

impl Initramfs {
    /// The skeleton with PID 1 from `init`.
    pub(crate) fn new(init: &Path) -> Self {
        let mut nodes = BTreeMap::new();
        for &(path, mode, owner) in DIRECTORIES {
            nodes.insert(path.to_owned(), Node::Directory { mode, owner });
        }
        for &(path, to) in LINKS {
            nodes.insert(path.to_owned(), Node::Link(to.into()));
        }
        let mut initramfs = Self { nodes };
        for &(path, text) in FILES {
            initramfs.contents(path, 0o644, text.as_bytes().to_vec());
        }
        initramfs.program("lab/lab-init", init);
        initramfs
    }

    /// Adds the kernel's modules and the guest's orders.
    pub(crate) fn orders(
        &mut self,
        setup: &GuestSetup,
        release: &str,
        modules: &[Module],
    ) -> Result<()> {
        let directory = format!("usr/lib/modules/{release}");
        let mut inside = modules.to_vec();
        for module in &mut inside {
            let path = format!("{directory}/{}.ko", module.name);
            self.parents(&path);
            self.nodes.insert(
                path.clone(),
                Node::File { mode: 0o644, contents: Contents::At(PathBuf::from(&module.path)) },
            );
            module.path = format!("/{path}");
        }
        // For the shell's own `modprobe`; PID 1 and the kernel's requests go by the list.
        let index = module::index(modules);
        self.contents(&format!("{directory}/modules.dep"), 0o644, index.dependencies.into_bytes());
        self.contents(&format!("{directory}/modules.alias"), 0o644, index.aliases.into_bytes());
        self.contents(&MODULES_PATH[1..], 0o644, serde_json::to_vec(&inside)?);
        self.contents(&SETUP_PATH[1..], 0o644, serde_json::to_vec(setup)?);
        Ok(())
    }

    /// Adds an executable file of this machine.
    pub(crate) fn program(&mut self, path: &str, from: &Path) {
        self.parents(path);
        self.nodes.insert(
            path.to_owned(),
            Node::File { mode: 0o755, contents: Contents::At(from.to_owned()) },
        );
    }

    fn contents(&mut self, path: &str, mode: u32, bytes: Vec<u8>) {
        self.parents(path);
        self.nodes.insert(path.to_owned(), Node::File { mode, contents: Contents::Here(bytes) });
    }

    /// Lays a directory of this machine over the root. Files of its `/bin`, `/sbin`, `/lib`
    /// and `/lib64` go where those names point.
    pub(crate) fn overlay(&mut self, directory: &Path) -> Result<()> {
        let mut waiting = vec![PathBuf::new()];
        while let Some(relative) = waiting.pop() {
            let here = directory.join(&relative);
            for entry in fs::read_dir(&here).with_context(|| format!("list {}", here.display()))? {
                let entry = entry?;
                let inside = relative.join(entry.file_name());
                let path = self.resolve(&inside)?;
                let metadata = entry.metadata()?;
                let mode = metadata.permissions().mode() & 0o777;
                if metadata.is_dir() {
                    waiting.push(inside);
                    if !matches!(self.nodes.get(&path), Some(Node::Directory { .. })) {
                        self.parents(&path);
                        self.nodes.insert(path, Node::Directory { mode: mode | 0o555, owner: 0 });
                    }
                } else if metadata.is_symlink() {
                    let to = fs::read_link(entry.path())?;
                    self.parents(&path);
                    self.nodes.insert(path, Node::Link(to));
                } else if metadata.is_file() {
                    self.parents(&path);
                    let contents = Contents::At(entry.path());
                    self.nodes.insert(path, Node::File { mode: mode | 0o444, contents });
                }
            }
        }
        Ok(())
    }

    /// Whether there is a file or a link at an absolute path.
    pub(crate) fn has(&self, path: &Path) -> bool {
        let Ok(inside) = path.strip_prefix("/") else { return false };
        let node = self.resolve(inside).ok().and_then(|inside| self.nodes.get(&inside));
        node.is_some_and(|node| !matches!(node, Node::Directory { .. }))
    }

    /// The path with a merged top directory put in its place.
    fn resolve(&self, path: &Path) -> Result<String> {
        let text = path.to_str().with_context(|| format!("{} is no UTF-8", path.display()))?;
        for merged in ["bin", "sbin", "lib", "lib64"] {
            let below =
                text.strip_prefix(merged).filter(|rest| rest.is_empty() || rest.starts_with('/'));
            if let Some(rest) = below {
                return Ok(format!("usr/{merged}{rest}"));
            }
        }
        Ok(text.to_owned())
    }

    fn parents(&mut self, path: &str) {
        let mut at = path;
        while let Some((parent, _)) = at.rsplit_once('/') {
            self.nodes
                .entry(parent.to_owned())
                .or_insert(Node::Directory { mode: 0o755, owner: 0 });
            at = parent;
        }
    }

    /// The bytes that the files have.
    pub(crate) fn size(&self) -> Result<u64> {
        let mut size = 0;
        for node in self.nodes.values() {
            size += match node {
                Node::File { contents: Contents::Here(bytes), .. } => bytes.len() as u64,
                Node::File { contents: Contents::At(from), .. } => {
                    fs::metadata(from).with_context(|| format!("read {}", from.display()))?.len()
                }
                Node::Directory { .. } | Node::Link(_) => 0,
            };
        }
        Ok(size)
    }

    /// Writes the archive; `packed` hears the size of each file when it has been written.
    pub(crate) fn write(&self, target: &Path, packed: impl Fn(u64)) -> Result<()> {
        let file = File::create(target).with_context(|| format!("create {}", target.display()))?;
        let mut archive = BufWriter::with_capacity(1 << 20, file);
        // The order of the map puts a directory before the files in it.
        for (inode, (path, node)) in (1..).zip(&self.nodes) {
            let entry = newc::Builder::new(path).ino(inode);
            let (entry, contents) = match node {
                Node::Directory { mode, owner } => {
                    let entry = entry.mode(*mode).uid(*owner).gid(*owner);
                    (entry.set_mode_file_type(ModeFileType::Directory), Cow::default())
                }
                Node::Link(to) => {
                    let to = to.to_str().with_context(|| format!("{path}: no UTF-8"))?;
                    let entry = entry.mode(0o777).set_mode_file_type(ModeFileType::Symlink);
                    (entry, to.as_bytes().into())
                }
                Node::File { mode, contents } => {
                    let entry = entry.mode(*mode).set_mode_file_type(ModeFileType::Regular);
                    (entry, contents.read()?)
                }
            };
            let size =
                u32::try_from(contents.len()).with_context(|| format!("{path}: over 4 GiB"))?;
            let mut writer = entry.write(archive, size);
            writer.write_all(&contents)?;
            archive = writer.finish()?;
            if matches!(node, Node::File { .. }) {
                packed(size.into());
            }
        }
        newc::trailer(archive)?.flush()?;
        Ok(())
    }
}

impl Contents {
    fn read(&self) -> Result<Cow<'_, [u8]>> {
        Ok(match self {
            Contents::Here(bytes) => bytes.into(),
            Contents::At(from) => {
                fs::read(from).with_context(|| format!("read {}", from.display()))?.into()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_win_and_respect_the_merged_root() {
        let directory = std::env::temp_dir().join(format!("lab-overlay-{}", std::process::id()));
        fs::create_dir_all(directory.join("lib/thing")).unwrap();
        fs::create_dir_all(directory.join("opt/deep/er")).unwrap();
        fs::write(directory.join("lib/thing/a"), "1").unwrap();
        fs::write(directory.join("opt/deep/er/b"), "2").unwrap();
        let mut initramfs = Initramfs::new(Path::new("/nonexistent"));
        initramfs.overlay(&directory).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        assert!(matches!(initramfs.nodes.get("lib"), Some(Node::Link(_))), "the link stays");
        assert!(initramfs.nodes.contains_key("usr/lib/thing/a"));
        let paths: Vec<&String> = initramfs.nodes.keys().collect();
        for path in &paths {
            if let Some((parent, _)) = path.rsplit_once('/') {
                let at = |wanted: &str| paths.iter().position(|path| *path == wanted);
                assert!(at(parent) < at(path), "{parent} comes before {path}");
                assert!(at(parent).is_some(), "{parent} is there");
            }
        }
    }
}
