//! Results as JUnit XML, which the web pages of GitHub, GitLab and Jenkins show. `cargo ci test` includes this file,
//! too.

use std::fmt::Write;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The beginning of each document.
const HEAD: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n";

/// The result of a test.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    Passed,
    Skipped(String),
    Failed(String),
}

/// A test by its name, its module included.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) seconds: Option<f64>,
    pub(crate) ending: Ending,
}

/// Whether a document may be written to a path without the loss of another file. A run asks this before its first test.
pub(crate) fn check_place(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(there) if there.is_file() && there.len() > 0 => {
            let mut head = Vec::new();
            File::open(path)?.take(HEAD.len() as u64).read_to_end(&mut head)?;
            if head != HEAD.as_bytes() {
                let what = "a file that is no JUnit XML of an earlier run is there, and stays: remove it, or name another";
                return Err(Error::new(ErrorKind::AlreadyExists, what));
            }
            Ok(())
        }
        // A pipe or a terminal, for example.
        Ok(there) if !there.is_dir() => Ok(()),
        Ok(_) => Err(ErrorKind::IsADirectory.into()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // The folder has to exist.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            fs::metadata(folder.unwrap_or(Path::new("."))).map(drop)
        }
        Err(error) => Err(error),
    }
}

/// A document with these suites, each with its name.
pub(crate) fn document<'a>(suites: impl IntoIterator<Item = (&'a str, &'a [Case])>) -> String {
    let mut text = String::from(HEAD);
    for (name, cases) in suites {
        let count =
            |wanted: fn(&Ending) -> bool| cases.iter().filter(|case| wanted(&case.ending)).count();
        let failed = count(|ending| matches!(ending, Ending::Failed(_)));
        let skipped = count(|ending| matches!(ending, Ending::Skipped(_)));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{failed}\" skipped=\"{skipped}\">",
            escaped(name),
            cases.len()
        );
        cases.iter().for_each(|case| write(&mut text, case));
        text.push_str("  </testsuite>\n");
    }
    text.push_str("</testsuites>\n");
    text
}

/// The module is the class, by which those web pages group tests.
fn write(text: &mut String, case: &Case) {
    let (class, name) = case.name.rsplit_once("::").unwrap_or(("", &case.name));
    let time = case.seconds.map_or(String::new(), |seconds| format!(" time=\"{seconds:.3}\""));
    let _ = write!(
        text,
        "    <testcase classname=\"{}\" name=\"{}\"{time}",
        escaped(class),
        escaped(name)
    );
    let _ = match &case.ending {
        Ending::Passed => writeln!(text, "/>"),
        Ending::Skipped(why) => {
            writeln!(text, "><skipped message=\"{}\"/></testcase>", escaped(why))
        }
        Ending::Failed(why) => writeln!(
            text,
            "><failure message=\"{}\">{}</failure></testcase>",
            escaped(why.lines().next().unwrap_or_default()),
            escaped(why)
        ),
    };
}

/// Text as content of an element or an attribute. XML 1.0 has no way to write most control characters.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            '\t' => escaped.push('\t'),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            control if control.is_control() => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}
