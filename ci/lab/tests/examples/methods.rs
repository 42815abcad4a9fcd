//! Every public method and function is called by an example, or has a line that begins with `Example:` and links to
//! one.
//!
//! Examples are the code in the library's documentation and README, the programs in `examples/`, and the command
//! line. Which methods there are says `ci/api`. A call is found by its name: where several types, or those of the
//! standard library, have a method of the same name, the code has to belong to the type as well. It then stands in
//! the documentation of the type, or where the type's `Example:` links to, or it names the type or one that
//! dereferences to it.

use super::{INTERNAL, sources};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Names of methods of the standard library's types, and of futures, that programs call as well.
const COMMON: [&str; 32] = [
    "accept", "alloc", "as_ptr", "bind", "close", "connect", "contains", "drain", "error", "free",
    "get", "insert", "ip", "is_empty", "items", "iter", "kind", "len", "listen", "map", "next",
    "poll", "port", "push", "read", "recv", "remove", "send", "set", "split", "wait", "write",
];

/// The methods that the crate `bitflags` makes for each set of flags, and documents.
const OF_FLAGS: [&str; 22] = [
    "all",
    "bits",
    "complement",
    "contains",
    "difference",
    "empty",
    "from_bits",
    "from_bits_retain",
    "from_bits_truncate",
    "from_name",
    "insert",
    "intersection",
    "intersects",
    "is_all",
    "is_empty",
    "iter",
    "iter_names",
    "remove",
    "set",
    "symmetric_difference",
    "toggle",
    "union",
];

/// `open_enum!` writes this one for each enumeration of the kernel; [`WcStatus`] has the example.
const OF_ENUMS: &str = "description(self) -> Option<&'static str>";

/// A public method, or a function, whose owner is its module.
#[derive(Debug)]
struct Function<'a> {
    owner: &'a str,
    name: &'a str,
}

/// Code that shows how something is used.
struct Code {
    /// The type in whose documentation it stands, or the program's path below the workspace.
    owner: String,
    text: String,
}

/// The methods in the sources, and those that the documentation's examples call.
#[derive(Default)]
struct Shown {
    code: Vec<Code>,
    /// The files that the lines `Example:` of a type's documentation name.
    links: BTreeMap<String, BTreeSet<String>>,
    /// Methods whose own documentation has code or such a line, by type.
    methods: BTreeSet<(String, String)>,
    /// Types that dereference to another, by that one: their values have its methods.
    derefs: BTreeMap<String, Vec<String>>,
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The identifier that the text begins with.
fn word(text: &str) -> &str {
    text.split(|c| !is_word(c)).next().unwrap_or("")
}

/// The text without the parts in angle brackets.
fn without_generics(text: &str) -> String {
    let (mut depth, mut last, mut plain) = (0_u32, ' ', String::new());
    for c in text.chars() {
        match c {
            '<' => depth += 1,
            '>' if last != '-' => depth = depth.saturating_sub(1),
            _ if depth == 0 => plain.push(c),
            _ => {}
        }
        last = c;
    }
    plain
}

/// The paths of the functions that a line of `ci/api` declares, `uverbs::Context::alloc_pd` for one.
fn paths(api: &str) -> Vec<String> {
    let functions = api.lines().filter(|line| !line.starts_with("impl"));
    let declared = functions.filter_map(|line| Some((line, line.split_once("fn ")?.1)));
    let declared = declared.filter(|(line, path)| {
        let before = line.len() - path.len();
        !line[..before].contains('(') && !path.contains(&format!("::{OF_ENUMS}"))
    });
    declared
        .map(|(_, path)| without_generics(path))
        .map(|path| path.split('(').next().unwrap_or("").trim().to_owned())
        .collect()
}

fn functions(paths: &[String]) -> Vec<Function<'_>> {
    let split = |path: &'_ String| -> Option<(usize, usize)> {
        let name = path.rfind("::")?;
        let owner = path[..name].rfind("::").map_or(0, |at| at + 2);
        Some((owner, name))
    };
    let all = paths.iter().filter_map(|path| {
        let (owner, name) = split(path)?;
        Some(Function { owner: &path[owner..name], name: &path[name + 2..] })
    });
    let all: Vec<_> = all.collect();
    let flags: BTreeSet<_> =
        all.iter().filter(|f| f.name == "from_bits_retain").map(|f| f.owner).collect();
    let made = |f: &Function<'_>| flags.contains(f.owner) && OF_FLAGS.contains(&f.name);
    all.into_iter().filter(|f| !made(f)).collect()
}

/// The type whose methods follow the line: of an `impl`, or the trait that is declared.
fn implemented(line: &str) -> Option<String> {
    let line = without_generics(line);
    let item = line.strip_prefix("unsafe ").unwrap_or(&line);
    let of = item.strip_prefix("impl")?;
    let of = of.rsplit(" for ").next().unwrap_or(of).trim_start();
    let path = of.split(|c| !is_word(c) && c != ':').next()?;
    Some(path.rsplit("::").next()?.to_owned())
}

/// The words of a line that stand for items or programs.
fn linked(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|c| !is_word(c) && !"/:".contains(c));
    words.flat_map(|path| [path.rsplit("::").next().unwrap_or(path), path])
}

impl Shown {
    /// Reads a source file, whose code in the module's documentation belongs to the `module`.
    fn read(&mut self, module: &str, text: &str) {
        let (mut owner, mut open) = (String::new(), None::<String>);
        let (mut pending, mut links) = (Vec::new(), BTreeSet::new());
        for line in text.lines() {
            let trimmed = line.trim_start();
            let doc = trimmed.strip_prefix("///").or_else(|| trimmed.strip_prefix("//!"));
            if let Some(doc) = doc.map(str::trim_start) {
                match (&mut open, doc.starts_with("```")) {
                    (Some(_), true) => {
                        let code = open.take().unwrap_or_default();
                        match trimmed.starts_with("//!") {
                            true => self.code.push(Code { owner: module.to_owned(), text: code }),
                            false => pending.push(code),
                        }
                    }
                    (None, true) => open = Some(String::new()),
                    (Some(code), false) => *code += &format!("{doc}\n"),
                    (None, false) if doc.starts_with("Example: [") => {
                        links.extend(linked(doc).map(str::to_owned));
                    }
                    (None, false) if doc.contains("examples/") => {
                        links.extend(linked(doc).map(str::to_owned));
                    }
                    (None, false) => {}
                }
                continue;
            }
            // Attributes stand between the documentation and the item.
            if trimmed.starts_with(['#', ')', '"']) || line.contains("reason = ") {
                continue;
            }
            if !line.starts_with(' ') {
                owner = implemented(line).unwrap_or_else(|| owner.clone());
            }
            if let Some(kind) = super::declared(line) {
                if line.contains("trait ") {
                    kind.clone_into(&mut owner);
                }
                self.code.extend(pending.drain(..).map(|text| Code { owner: kind.into(), text }));
                self.links.entry(kind.to_owned()).or_default().append(&mut links);
            } else if let Some((_, name)) = trimmed.split_once("fn ") {
                if !pending.is_empty() || !links.is_empty() {
                    self.methods.insert((owner.clone(), word(name).to_owned()));
                }
                self.code.extend(pending.drain(..).map(|text| Code { owner: owner.clone(), text }));
            }
            pending.clear();
            links.clear();
        }
    }

    /// Reads from `ci/api` which types dereference to which.
    fn read_derefs(&mut self, api: &str) {
        for line in api.lines().filter_map(|line| line.strip_prefix("pub type ")) {
            let line = without_generics(line);
            let Some((from, to)) = line.split_once("::Target = ") else { continue };
            let name = |path: &str| path.rsplit("::").next().unwrap_or(path).to_owned();
            self.derefs.entry(name(to)).or_default().push(name(from));
        }
    }

    fn has(&self, function: &Function<'_>, is_ambiguous: bool) -> bool {
        let Function { owner, name } = *function;
        let own = (owner.to_owned(), name.to_owned());
        let links = self.links.get(owner);
        self.methods.contains(&own)
            || self.code.iter().filter(|code| calls(&code.text, owner, name)).any(|code| {
                let of = |owner: &str| code.owner == owner || mentions(&code.text, owner);
                !is_ambiguous
                    || of(owner)
                    || links.is_some_and(|links| links.contains(&code.owner))
                    || self.derefs.get(owner).is_some_and(|all| all.iter().any(|other| of(other)))
            })
    }
}

/// The texts before and behind each place where the name stands as a whole word.
fn uses<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let places = text.match_indices(name).map(move |(at, _)| text.split_at(at));
    let places = places.map(move |(before, rest)| (before, &rest[name.len()..]));
    places.filter(|(before, behind)| !before.ends_with(is_word) && !behind.starts_with(is_word))
}

fn mentions(text: &str, name: &str) -> bool {
    uses(text, name).next().is_some()
}

/// Whether the code calls the method of the type, or implements the method of the trait.
fn calls(text: &str, owner: &str, name: &str) -> bool {
    let is_module = owner.starts_with(char::is_lowercase);
    uses(text, name).any(|(before, behind)| {
        let called = behind.starts_with(['(', ':']) && !behind.starts_with(": ");
        let path = without_generics(before.rsplit('\n').next().unwrap_or(before));
        let of_type = path.trim_end_matches("::").ends_with(owner) && path.ends_with("::");
        of_type
            || called && (before.ends_with('.') || is_module && !before.ends_with("fn "))
            || called && before.ends_with("fn ") && text.contains(&format!("{owner} for "))
    })
}

/// `Type::method` of every public one that no example calls.
fn not_called(paths: &[String], shown: &Shown) -> BTreeSet<String> {
    let all = functions(paths);
    let mut owners: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    // Functions of modules are called without a dot.
    for function in all.iter().filter(|f| f.owner.starts_with(char::is_uppercase)) {
        owners.entry(function.name).or_default().insert(function.owner);
    }
    let is_ambiguous = |f: &Function<'_>| {
        let of_types = owners.get(f.name).map_or(0, BTreeSet::len);
        of_types > 1 || of_types == 1 && COMMON.contains(&f.name)
    };
    let missing = all.iter().filter(|f| !shown.has(f, is_ambiguous(f)));
    missing.map(|f| format!("{}::{}", f.owner, f.name)).collect()
}

#[test]
fn calls_are_told_from_other_uses_of_a_name() {
    assert!(calls("qp.modify(&attr)?;", "QpControl", "modify"));
    assert!(calls("pd.allocate::<u8>(1)", "ProtectionDomain", "allocate"));
    assert!(calls("let a = Rereg::new();", "Rereg", "new"));
    assert!(calls("RegionRef::<'_>::new(a, b)", "RegionRef", "new"));
    assert!(calls("for device in devices()? {", "uverbs", "devices"));
    assert!(calls("unsafe impl StableBytes for A {\nfn items(&self)", "StableBytes", "items"));
    assert!(!calls("qp.modify_all(); other_modify(); modify;", "QpControl", "modify"));
    assert!(!calls("wc.opcode", "Completion", "opcode"));
    assert!(!calls("Other::new()", "Rereg", "new"));
}

#[test]
fn a_method_without_an_example_is_found() {
    let api = "pub struct uverbs::A<T>\npub fn uverbs::A<T>::by_type(&self) -> B\npub fn uverbs::A<T>::its_own()\n\
               pub const fn uverbs::A<T>::nowhere(&self, f: impl Fn(u8) -> u8)\npub fn uverbs::A<T>::len(&self)\n\
               pub fn uverbs::B::len(&self)\npub fn uverbs::m::free(u8)\nimpl Fn for uverbs::A<T>\n";
    let mut shown = Shown::default();
    shown.read(
        "m",
        "//! ```\n//! a.len(); m::free(1);\n//! ```\n\n/// A.\n///\n/// ```\n/// a.by_type();\n/// ```\npub struct A;\n\n\
         impl<T> A<T> {\n    /// It.\n    ///\n    /// Example: [`B`].\n    pub fn its_own() {\n    }\n\n    \
         /// Text.\n    pub fn nowhere() {\n    }\n}\n\n/// B.\n///\n/// ```\n/// b.len();\n/// ```\npub struct B;\n",
    );
    let missing = not_called(&paths(api), &shown);
    assert_eq!(missing.into_iter().collect::<Vec<_>>(), ["A::len", "A::nowhere", "m::free"][..2]);
}

#[test]
fn every_public_method_is_called_by_an_example_or_links_to_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &Path| fs::read_to_string(path).expect("a file of the workspace");
    let rust = |directory: &str| {
        let mut files = Vec::new();
        sources(&root.join(directory), &mut files);
        files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
        let name = |file: &PathBuf| file.strip_prefix(&root).expect("below").display().to_string();
        files.into_iter().map(move |file| (name(&file), file)).collect::<Vec<_>>()
    };
    let mut shown = Shown::default();
    for (name, file) in rust("src") {
        if !name.contains("tests") && !INTERNAL.iter().any(|internal| name.contains(internal)) {
            shown.read(&name, &read(&file));
        }
    }
    let readme = read(&root.join("README.md"));
    let blocks = readme.split("```rust").skip(1).filter_map(|rest| rest.split("```").next());
    shown.code.extend(blocks.map(|text| Code { owner: "README".into(), text: text.into() }));
    for (name, file) in rust("examples").into_iter().chain(rust("cli/src")) {
        let owner = name.split('/').take(2).collect::<Vec<_>>().join("/");
        let owner = owner.trim_end_matches(".rs").to_owned();
        shown.code.push(Code { owner, text: read(&file) });
    }
    let api = read(&root.join("ci/api/uverbs.txt"));
    shown.read_derefs(&api);
    let paths = paths(&api);
    let count = functions(&paths).len();
    assert!(count > 700, "{count} functions are read out of ci/api");
    let missing = not_called(&paths, &shown);
    let missing: Vec<_> = missing.into_iter().collect();
    assert!(
        missing.is_empty(),
        "no example calls these; show them in one:\n{}",
        missing.join("\n")
    );
}
