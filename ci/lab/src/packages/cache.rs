//! The download cache: units that are complete or absent, shared by all runs of `cargo ci`.
//!
//! A unit is a directory that is filled under another name and then renamed, so an interrupted
//! download leaves nothing that looks finished. One run fills at a time; others wait for it.

use crate::output::errln;
use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The version of the units' layout: caches of an older lab are filled anew.
const LAYOUT: u32 = 1;

const MANIFEST: &str = "manifest.json";

/// The file by which a directory is known as a cache, to the lab and to programs that make backups.
const TAG: &str = "CACHEDIR.TAG";
const SIGNATURE: &str = "Signature: 8a477f597d28d172789f06886806bc55\n# The cache of `cargo ci`.\n";
/// The file that is locked while units are added. Caches of earlier labs have it, and no tag.
const LOCK: &str = "lock";

/// The packages that a complete unit was made of.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    layout: u32,
    /// Package names with versions, or another origin.
    sources: Vec<String>,
}

/// The cache directory.
pub(crate) struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `UVERBS_LAB_CACHE`, else `uverbs-lab` in the user's cache directory.
    pub(crate) fn open() -> Result<Self> {
        let from_env = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let root = match from_env("UVERBS_LAB_CACHE") {
            Some(path) => PathBuf::from(path),
            None => match from_env("XDG_CACHE_HOME") {
                Some(path) => PathBuf::from(path).join("uverbs-lab"),
                None => {
                    let home = from_env("HOME").context(
                        "neither UVERBS_LAB_CACHE nor XDG_CACHE_HOME nor HOME says where to cache",
                    )?;
                    PathBuf::from(home).join(".cache/uverbs-lab")
                }
            },
        };
        Self::at(&root)
    }

    /// The cache in a directory, which is made if it is absent. A directory with other files is refused: filling a
    /// cache removes directories.
    fn at(root: &Path) -> Result<Self> {
        let advice = || advice(root);
        fs::create_dir_all(root).with_context(advice)?;
        let root = root.canonicalize().with_context(advice)?;
        if !root.join(TAG).exists() && !root.join(LOCK).is_file() {
            // A file system of its own has a directory of its own.
            let is_other = |entry: &fs::DirEntry| entry.file_name() != "lost+found";
            let mut entries = fs::read_dir(&root).with_context(advice)?.flatten();
            if entries.any(|entry| is_other(&entry)) {
                bail!("{} has files that are not the lab's: {}", root.display(), advice());
            }
            fs::write(root.join(TAG), SIGNATURE).with_context(advice)?;
        }
        Ok(Self { root })
    }

    /// The path of the cache.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The unit's directory if it is complete.
    pub(crate) fn unit(&self, name: &str) -> Option<PathBuf> {
        let path = self.root.join(name);
        let manifest: Manifest =
            serde_json::from_slice(&fs::read(path.join(MANIFEST)).ok()?).ok()?;
        (manifest.layout == LAYOUT).then_some(path)
    }

    /// Package names and versions in a unit.
    pub(crate) fn sources(&self, name: &str) -> Vec<String> {
        fs::read(self.root.join(name).join(MANIFEST))
            .ok()
            .and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok())
            .map(|manifest| manifest.sources)
            .unwrap_or_default()
    }

    /// A unit made from a file of the user's; made anew when that file has changed.
    pub(crate) fn unit_of_file(
        &self,
        name: &str,
        file: &Path,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let metadata = fs::metadata(file).with_context(|| format!("read {}", file.display()))?;
        let state = format!("{} {:?} {}", file.display(), metadata.modified()?, metadata.len());
        if let Some(unit) = self.unit(name).filter(|_| self.sources(name) == [state.as_str()]) {
            return Ok(unit);
        }
        self.filling()?.add(name, |unit| {
            fill(unit)?;
            Ok(vec![state])
        })
    }

    /// Takes the lock for filling units; waits while another run has it.
    pub(crate) fn filling(&self) -> Result<Filling<'_>> {
        let path = self.root.join(LOCK);
        let advice = || advice(&self.root);
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.with_context(advice)?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
                errln!("waiting for another `cargo ci` that fills {}", self.root.display());
                Flock::lock(file, FlockArg::LockExclusive)
                    .map_err(|(_, error)| error)
                    .with_context(|| format!("lock {}", path.display()))?
            }
            Err((_, error)) => {
                return Err(error).with_context(|| format!("lock {}", path.display()));
            }
        };
        let staging = self.root.join("staging");
        // The run that left this is over, because this one has the lock.
        if staging.exists() {
            fs::remove_dir_all(&staging).with_context(advice)?;
        }
        fs::create_dir_all(&staging).with_context(advice)?;
        Ok(Filling { cache: self, staging, _lock: lock })
    }
}

/// The exclusive right to add units.
pub(crate) struct Filling<'a> {
    cache: &'a Cache,
    staging: PathBuf,
    _lock: Flock<File>,
}

/// An error's context: the cache that cannot be used, and the variable that names another.
pub(crate) fn advice(root: &Path) -> String {
    format!("the cache {}: UVERBS_LAB_CACHE names another directory", root.display())
}

impl Filling<'_> {
    /// The cache that is filled.
    pub(crate) fn cache(&self) -> &Cache {
        self.cache
    }

    /// A directory for files that are needed only while filling.
    pub(crate) fn scratch(&self, name: &str) -> Result<PathBuf> {
        let path = self.staging.join(name);
        fs::create_dir_all(&path).with_context(|| advice(&self.cache.root))?;
        Ok(path)
    }

    /// Adds a unit: `fill` puts files into an empty directory and returns where they came from.
    pub(crate) fn add(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<Vec<String>>,
    ) -> Result<PathBuf> {
        let building = self.scratch(&format!("unit-{name}"))?;
        let sources = fill(&building)?;
        let manifest = Manifest { layout: LAYOUT, sources };
        self.put(name, &building, &serde_json::to_vec_pretty(&manifest)?)
            .with_context(|| advice(&self.cache.root))
    }

    /// Puts a complete unit in the place of an earlier one.
    fn put(&self, name: &str, building: &Path, manifest: &[u8]) -> io::Result<PathBuf> {
        fs::write(building.join(MANIFEST), manifest)?;
        let path = self.cache.root.join(name);
        if path.exists() {
            // Moved before it is removed: a crash between the two must not leave half a unit.
            let old = self.staging.join(format!("old-{name}"));
            fs::rename(&path, &old)?;
            fs::rename(building, &path)?;
            fs::remove_dir_all(&old)?;
        } else {
            fs::rename(building, &path)?;
        }
        Ok(path)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        // The next run that fills removes the rest.
        let _kept = fs::remove_dir_all(&self.staging);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(name: &str) -> Cache {
        let root = env::temp_dir().join(format!("lab-cache-{}-{name}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Cache { root }
    }

    #[test]
    fn a_unit_appears_only_when_complete() {
        let cache = cache("complete");
        let filling = cache.filling().unwrap();
        let failed = filling.add("thing", |path| {
            fs::write(path.join("half"), "")?;
            anyhow::bail!("interrupted")
        });
        assert!(failed.is_err());
        assert_eq!(cache.unit("thing"), None);
        let path = filling.add("thing", |_| Ok(vec!["package=1".into()])).unwrap();
        assert_eq!(cache.unit("thing"), Some(path.clone()));
        assert_eq!(cache.sources("thing"), ["package=1"]);
        filling.add("thing", |_| Ok(vec!["package=2".into()])).unwrap();
        assert_eq!(cache.sources("thing"), ["package=2"]);
        drop(filling);
        assert!(!cache.root.join("staging").exists());
        fs::write(path.join(MANIFEST), r#"{"layout":0,"sources":[]}"#).unwrap();
        assert_eq!(cache.unit("thing"), None, "an older layout counts as absent");
        fs::remove_dir_all(&cache.root).unwrap();
    }

    #[test]
    fn a_directory_with_other_files_is_no_cache() {
        let root = env::temp_dir().join(format!("lab-cache-{}-other", std::process::id()));
        fs::create_dir_all(root.join("staging")).unwrap();
        let error = format!("{:#}", Cache::at(&root).map(|_| ()).unwrap_err());
        for part in [root.to_str().unwrap(), "UVERBS_LAB_CACHE", "not the lab's"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(root.join("staging").exists());
        fs::remove_dir(root.join("staging")).unwrap();
        Cache::at(&root).unwrap();
        fs::create_dir_all(root.join("staging")).unwrap();
        Cache::at(&root).unwrap();
        // An earlier lab's.
        fs::rename(root.join(TAG), root.join(LOCK)).unwrap();
        Cache::at(&root).unwrap();
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_named_with_the_variable() {
        let cache = cache("unwritable");
        let named = |error: anyhow::Error| {
            let text = format!("{error:#}");
            let path = cache.root.to_str().unwrap();
            assert!(text.contains(path) && text.contains("UVERBS_LAB_CACHE"), "{text}");
        };
        // Root may write anywhere, so that no mode keeps it from doing so.
        fs::create_dir_all(cache.root.join(LOCK)).unwrap();
        named(cache.filling().map(|_| ()).unwrap_err());
        fs::remove_dir(cache.root.join(LOCK)).unwrap();
        fs::write(cache.root.join("staging"), "").unwrap();
        named(cache.filling().map(|_| ()).unwrap_err());
        fs::remove_file(cache.root.join("staging")).unwrap();
        let filling = cache.filling().unwrap();
        let full = filling.add("thing", |unit| {
            fs::create_dir_all(unit.join(MANIFEST))?;
            Ok(Vec::new())
        });
        named(full.unwrap_err());
        drop(filling);
        let error = Cache::at(Path::new("/dev/null/cache")).map(|_| ()).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("/dev/null/cache") && text.contains("UVERBS_LAB_CACHE"), "{text}");
        fs::remove_dir_all(&cache.root).unwrap();
    }

    #[test]
    fn a_unit_from_a_file_follows_the_file() {
        let cache = cache("file");
        let file = cache.root.join("file");
        let made = |text: &str| {
            fs::write(&file, text).unwrap();
            let mut filled = false;
            let fill = |_: &Path| {
                filled = true;
                Ok(())
            };
            cache.unit_of_file("unit", &file, fill).unwrap();
            filled
        };
        assert!(made("one"));
        assert!(made("longer"));
        assert!(cache.unit_of_file("unit", &file, |_| anyhow::bail!("made again")).is_ok());
        fs::remove_dir_all(&cache.root).unwrap();
    }

    #[test]
    fn only_one_run_fills() {
        let cache = cache("lock");
        let filling = cache.filling().unwrap();
        let file = File::options().write(true).open(cache.root.join("lock")).unwrap();
        let second = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        assert!(matches!(second, Err((_, nix::errno::Errno::EWOULDBLOCK))));
        drop(filling);
        fs::remove_dir_all(&cache.root).unwrap();
    }
}
