//! Mistakes planted in a copy of the workspace, so that the library needs no hooks for them.
//!
//! All mistakes of a copy are in one build, and an environment variable chooses one: building takes longer
//! than running.

use super::{Workspace, copy_tree};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::Path;

/// Names the mistake that is made.
pub(crate) const VARIABLE: &str = "UVERBS_MUTANT";
/// Placeholder in an edit for "if this mistake is chosen".
const CHOSEN: &str = "CHOSEN";
/// The function for the placeholder, appended to the library's root.
const CHOICE: &str = r#"
pub(crate) fn mutant(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("UVERBS_MUTANT").ok()).as_deref() == Some(name)
}
"#;
const ROOT: &str = "src/lib.rs";

/// A piece of the library, and its replacement.
pub(crate) struct Edit {
    pub(crate) file: &'static str,
    /// The text must be in the file exactly once.
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
}

/// The edits of a list of mistakes, each with its mistake's name.
pub(crate) trait Edits: Iterator<Item = (&'static str, &'static Edit)> {}
impl<I: Iterator<Item = (&'static str, &'static Edit)>> Edits for I {}

impl Workspace {
    /// A copy of the workspace in `target/lab/DIRECTORY` with these mistakes in it.
    pub(crate) fn with_mistakes(&self, directory: &str, edits: impl Edits) -> Result<Workspace> {
        let directory = self.lab_directory()?.join(directory);
        let copy = directory.join("tree");
        if copy.exists() {
            fs::remove_dir_all(&copy)?;
        }
        copy_tree(self.root(), &copy)?;
        for (name, edit) in edits {
            let path = copy.join(edit.file);
            fs::write(&path, changed(&read(&path)?, name, edit)?)?;
        }
        let root = copy.join(ROOT);
        fs::write(&root, read(&root)? + CHOICE)?;
        Workspace::of_copy(&copy, &directory.join("target"))
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// A text with a mistake in it, which depends on the choice.
fn changed(text: &str, name: &str, edit: &Edit) -> Result<String> {
    let Edit { file, to, .. } = edit;
    ensure!(to.contains(CHOSEN), "{name}: the change of {file} does not depend on the choice");
    let made = replaced(text, name, edit)?;
    Ok(made.replace(CHOSEN, &format!("crate::mutant({name:?})")))
}

/// A text with an edit in it.
pub(crate) fn replaced(text: &str, name: &str, edit: &Edit) -> Result<String> {
    let Edit { file, from, to } = edit;
    match text.matches(from).count() {
        1 => Ok(text.replace(from, to)),
        count => {
            bail!("{name}: `{from}` is {count} times in {file}; the edit has to be described anew")
        }
    }
}

/// Whether all mistakes of a list can be made together: fails in seconds, before anything is built.
#[cfg(test)]
pub(crate) fn assert_all_fit(edits: impl Edits) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = std::collections::BTreeMap::new();
    let mut count = 0;
    for (name, edit) in edits {
        let text = texts.entry(edit.file).or_insert_with(|| read(&root.join(edit.file)).unwrap());
        *text = changed(text, name, edit).unwrap();
        count += 1;
    }
    let made: usize = texts.values().map(|text| text.matches("crate::mutant(").count()).sum();
    assert_eq!(made, count);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_that_does_not_fit_is_refused() {
        let edit = Edit { file: "x", from: "lock();", to: "if !CHOSEN { lock(); }" };
        assert_eq!(
            changed("{ lock(); }", "m", &edit).unwrap(),
            "{ if !crate::mutant(\"m\") { lock(); } }"
        );
        assert!(changed("{}", "m", &edit).is_err());
        assert!(changed("lock(); lock();", "m", &edit).is_err());
        assert!(changed("lock();", "m", &Edit { to: "", ..edit }).is_err());
    }
}
