//! Kernel modules as files: decompresses them and reads their dependencies.
//!
//! Debian writes `modules.dep` only when a kernel is installed, so the dependencies are read out
//! of the modules' own `.modinfo`, as `depmod` would. `modules.rs` of the guest loads by them.

use anyhow::{Context, Result, bail};
use lab_guest::order::Module;
use object::{Object, ObjectSection};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A module's name from its file: underscores for dashes, suffixes gone.
pub(crate) fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (stem, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| stem.replace('-', "_"))
}

/// The module's bytes, decompressed if need be.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let mut plain = Vec::new();
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => {
            lzma_rust2::XzReader::new(bytes.as_slice(), true)
                .read_to_end(&mut plain)
                .with_context(|| format!("decompress {}", path.display()))?;
        }
        Some("zst") => {
            ruzstd::decoding::StreamingDecoder::new(bytes.as_slice())
                .map_err(|error| anyhow::anyhow!("{error}"))
                .and_then(|mut reader| Ok(reader.read_to_end(&mut plain)?))
                .with_context(|| format!("decompress {}", path.display()))?;
        }
        Some("ko") => plain = bytes,
        _ => bail!("{} is compressed in a way that the lab does not know", path.display()),
    }
    Ok(plain)
}

/// `key=value` pairs of a module's `.modinfo` section.
fn information(module: &[u8]) -> Result<Vec<(String, String)>> {
    let elf = object::File::parse(module)?;
    let section = elf.section_by_name(".modinfo").context("no .modinfo section")?;
    Ok(section
        .data()?
        .split(|byte| *byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect())
}

/// Modules under a directory, by name.
pub(crate) fn find(directory: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in
            fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?
        {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                waiting.push(entry.path());
            } else if let Some(name) = name_of(&entry.path()) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

/// Names of the modules that are built into the kernel, from its `modules.builtin`.
pub(crate) fn built_in(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(|line| name_of(Path::new(line))).collect()
}

/// Writes the named modules and all they need into `target`, decompressed, and returns the list in
/// no particular order with paths relative to `target`. Names that this kernel does not have are
/// left out: the user of a kernel decides which modules it must have.
pub(crate) fn collect(
    all: &BTreeMap<String, PathBuf>,
    wanted: &[&str],
    target: &Path,
) -> Result<Vec<Module>> {
    fs::create_dir_all(target)?;
    let mut list = Vec::new();
    let mut done = BTreeSet::new();
    let mut waiting: Vec<String> = wanted.iter().map(|name| (*name).to_owned()).collect();
    while let Some(name) = waiting.pop() {
        let Some(path) = all.get(&name) else { continue };
        if !done.insert(name.clone()) {
            continue;
        }
        let bytes = read(path)?;
        let information =
            information(&bytes).with_context(|| format!("module {}", path.display()))?;
        let mut needs = Vec::new();
        let mut aliases = Vec::new();
        for (key, value) in information {
            match key.as_str() {
                "depends" => needs.extend(
                    value
                        .split(',')
                        .filter(|name| !name.is_empty())
                        .map(|name| name.replace('-', "_")),
                ),
                "softdep" => needs
                    .extend(soft_before(&value).into_iter().filter(|name| all.contains_key(name))),
                "alias" => aliases.push(value),
                _ => {}
            }
        }
        waiting.extend(needs.iter().cloned());
        let file = format!("{name}.ko");
        fs::write(target.join(&file), bytes)?;
        list.push(Module { name, path: file, needs, aliases });
    }
    Ok(list)
}

/// The text files by which `modprobe` finds its way.
pub(crate) struct Index {
    /// `modules.dep`.
    pub(crate) dependencies: String,
    /// `modules.alias`.
    pub(crate) aliases: String,
}

/// Writes the index of modules that lie side by side in one directory.
pub(crate) fn index(modules: &[Module]) -> Index {
    let by_name: BTreeMap<&str, &Module> =
        modules.iter().map(|module| (module.name.as_str(), module)).collect();
    let mut index = Index { dependencies: String::new(), aliases: String::new() };
    for module in modules {
        // All modules that it needs, directly or not; read backwards, each comes before those that need it.
        let mut order: Vec<&str> = Vec::new();
        let mut waiting: Vec<&str> = module.needs.iter().map(String::as_str).collect();
        while let Some(name) = waiting.pop() {
            let Some(needed) = by_name.get(name) else { continue };
            order.retain(|known| *known != name);
            order.push(name);
            waiting.extend(needed.needs.iter().map(String::as_str));
        }
        index.dependencies.push_str(&format!("{}.ko:", module.name));
        for name in order {
            index.dependencies.push_str(&format!(" {name}.ko"));
        }
        index.dependencies.push('\n');
        for alias in &module.aliases {
            index.aliases.push_str(&format!("alias {alias} {}\n", module.name));
        }
    }
    index
}

/// Modules that a soft dependency wants loaded before: `pre: a b post: c`.
fn soft_before(text: &str) -> Vec<String> {
    text.split_whitespace()
        .scan(false, |before, word| {
            if let Some(section) = word.strip_suffix(':') {
                *before = section == "pre";
                return Some(None);
            }
            Some(before.then(|| word.replace('-', "_")))
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_suffixes_and_dashes() {
        assert_eq!(name_of(Path::new("a/crc32-pclmul.ko.xz")).as_deref(), Some("crc32_pclmul"));
        assert_eq!(name_of(Path::new("veth.ko")).as_deref(), Some("veth"));
        assert_eq!(name_of(Path::new("modules.order")), None);
        assert_eq!(name_of(Path::new("x.konf")), None);
    }

    #[test]
    fn soft_dependencies_before_are_told_from_those_after() {
        assert_eq!(soft_before("pre: a-b c post: d"), ["a_b", "c"]);
        assert!(soft_before("post: d").is_empty());
    }

    #[test]
    fn the_index_orders_indirect_dependencies() {
        let module = |name: &str, needs: &[&str]| Module {
            name: name.into(),
            path: format!("{name}.ko"),
            needs: needs.iter().map(|name| (*name).to_owned()).collect(),
            aliases: vec![format!("rdma-link-{name}")],
        };
        let list = [
            module("rxe", &["core", "uverbs", "builtin"]),
            module("uverbs", &["core"]),
            module("core", &[]),
        ];
        let index = index(&list);
        assert_eq!(index.dependencies, "rxe.ko: uverbs.ko core.ko\nuverbs.ko: core.ko\ncore.ko:\n");
        assert!(index.aliases.starts_with("alias rdma-link-rxe rxe\n"));
    }

    /// An ELF file that has nothing but this `.modinfo`.
    fn elf(information: &[u8]) -> Vec<u8> {
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut elf = vec![0; 64];
        elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        elf.extend_from_slice(names);
        elf.extend_from_slice(information);
        let table = elf.len() as u64;
        let mut header = |name: u32, kind: u8, offset: u64, length: u64| {
            let start = elf.len();
            elf.resize(start + 64, 0);
            elf[start + 4] = kind;
            elf[start..start + 4].copy_from_slice(&name.to_le_bytes());
            elf[start + 0x18..start + 0x20].copy_from_slice(&offset.to_le_bytes());
            elf[start + 0x20..start + 0x28].copy_from_slice(&length.to_le_bytes());
        };
        header(0, 0, 0, 0);
        header(1, 1, 64 + names.len() as u64, information.len() as u64);
        header(10, 3, 64, names.len() as u64);
        elf[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        elf[0x3a] = 64;
        elf[0x3c] = 3;
        elf[0x3e] = 2;
        elf
    }

    #[test]
    fn sections_are_found_by_name() {
        let elf = elf(b"depends=ib_core,udp_tunnel\0alias=rdma-link-rxe\0");
        let found = super::information(&elf).unwrap();
        assert_eq!(
            found,
            [
                ("depends".to_owned(), "ib_core,udp_tunnel".to_owned()),
                ("alias".to_owned(), "rdma-link-rxe".to_owned())
            ]
        );
        assert!(super::information(&elf[..70]).is_err());
    }

    #[test]
    fn dependencies_of_a_module_are_collected() {
        let root = std::env::temp_dir().join(format!("lab-modules-{}", std::process::id()));
        let tree = root.join("kernel/drivers");
        fs::create_dir_all(&tree).unwrap();
        fs::write(tree.join("rdma-rxe.ko"), elf(b"depends=ib-core\0alias=rdma-link-rxe\0"))
            .unwrap();
        fs::write(tree.join("ib_core.ko"), elf(b"softdep=pre: helper missing\0depends=\0"))
            .unwrap();
        fs::write(tree.join("helper.ko"), elf(b"license=GPL\0")).unwrap();
        fs::write(tree.join("other.ko"), elf(b"license=GPL\0")).unwrap();
        let all = find(&root).unwrap();
        let mut list = collect(&all, &["rdma_rxe", "absent"], &root.join("out")).unwrap();
        list.sort_by(|one, other| one.name.cmp(&other.name));
        let names: Vec<&str> = list.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["helper", "ib_core", "rdma_rxe"]);
        assert_eq!(list[1].needs, ["helper"]);
        assert_eq!(list[2].needs, ["ib_core"]);
        assert_eq!(list[2].aliases, ["rdma-link-rxe"]);
        assert!(root.join("out/ib_core.ko").is_file() && !root.join("out/other.ko").exists());
        fs::remove_dir_all(&root).unwrap();
    }
}
