//! The download cache: units that are complete or absent, shared by all runs of `cargo ci`.
//!
//! A unit is a directory that is filled under another name and then renamed, so an interrupted
//! download leaves nothing that looks finished. One run fills at a time; others wait for it.

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The version of the units' layout: caches of an older lab are filled anew.
const LAYOUT: u32 = 1;

const MANIFEST: &str = "manifest.json";

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
        fs::create_dir_all(&root).with_context(|| format!("create {}", root.display()))?;
        let root = root.canonicalize()?;
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
        let path = self.root.join("lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
                eprintln!("waiting for another `cargo ci` that fills {}", self.root.display());
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
            fs::remove_dir_all(&staging)?;
        }
        fs::create_dir_all(&staging)?;
        Ok(Filling { cache: self, staging, _lock: lock })
    }
}

/// The exclusive right to add units.
pub(crate) struct Filling<'a> {
    cache: &'a Cache,
    staging: PathBuf,
    _lock: Flock<File>,
}

impl Filling<'_> {
    /// The cache that is filled.
    pub(crate) fn cache(&self) -> &Cache {
        self.cache
    }

    /// A directory for what is needed only while filling.
    pub(crate) fn scratch(&self, name: &str) -> Result<PathBuf> {
        let path = self.staging.join(name);
        fs::create_dir_all(&path)?;
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
        fs::write(building.join(MANIFEST), serde_json::to_vec_pretty(&manifest)?)?;
        let path = self.cache.root.join(name);
        if path.exists() {
            // Moved before it is removed: a crash between the two must not leave half a unit.
            let old = self.staging.join(format!("old-{name}"));
            fs::rename(&path, &old)?;
            fs::rename(&building, &path)?;
            fs::remove_dir_all(&old)?;
        } else {
            fs::rename(&building, &path)?;
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
