//! An example calls every public method and function of the library, except those that only read a value (`&self`, no
//! arguments, no error) and the setters of builders and attributes (`self` in, `Self` out).
//!
//! Examples are the code in the library's documentation, the programs in `examples/` and `tests/testing`, and the
//! command line. `ci/api` lists the methods. A call is found by its name. Where several types, or those of the
//! standard library, have a method of that name, the code has to belong to the type as well: it stands in the type's
//! documentation, names the type or one that dereferences to it, or calls a method whose signature names the type.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files whose types no program names: their modules are private, or hidden.
const INTERNAL: [&str; 4] = ["sync/lock.rs", "bench", "litmus.rs", "scripted"];

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
    /// The arguments and the type of the answer.
    signature: &'a str,
}

/// Code that shows how something is used.
struct Code {
    /// The type in whose documentation it stands, or the program's path below the workspace.
    owner: String,
    text: String,
}

/// The examples.
#[derive(Default)]
struct Shown {
    code: Vec<Code>,
    /// Methods whose own documentation has code, by type.
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

/// The text without what stands in angle brackets.
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

/// The functions that `ci/api` declares: path and signature, `uverbs::Context::alloc_pd` and
/// `(&self) -> uverbs::Result<…>` for one.
fn declarations(api: &str) -> Vec<(String, &str)> {
    let functions = api.lines().filter(|line| !line.starts_with("impl"));
    let declared = functions.filter_map(|line| Some((line, line.split_once("fn ")?.1)));
    let declared = declared.filter(|(line, path)| {
        let before = line.len() - path.len();
        !line[..before].contains('(') && !path.contains(&format!("::{OF_ENUMS}"))
    });
    declared
        .map(|(_, path)| {
            let plain = without_generics(path);
            let name = plain.split('(').next().unwrap_or("").trim().to_owned();
            (name, &path[path.find('(').unwrap_or(path.len())..])
        })
        .collect()
}

fn functions<'a>(declarations: &'a [(String, &'a str)]) -> Vec<Function<'a>> {
    let all = declarations.iter().filter_map(|(path, signature)| {
        let (owner, name) = path.rsplit_once("::")?;
        let owner = owner.rsplit("::").next().unwrap_or(owner);
        Some(Function { owner, name, signature })
    });
    let all: Vec<_> = all.collect();
    let flags: BTreeSet<_> =
        all.iter().filter(|f| f.name == "from_bits_retain").map(|f| f.owner).collect();
    let made = |f: &Function<'_>| flags.contains(f.owner) && OF_FLAGS.contains(&f.name);
    all.into_iter().filter(|f| !made(f)).collect()
}

/// Whether the function only reads a value, or sets one of a builder.
fn is_plain(function: &Function<'_>) -> bool {
    let Function { signature, .. } = function;
    let read =
        signature.strip_prefix("(&self) -> ").is_some_and(|value| !value.contains("Result<"));
    // A number or a bool of a `Copy` type.
    let copied = signature.strip_prefix("(self) -> ");
    let is_primitive = copied.is_some_and(|value| !value.contains(char::is_uppercase));
    let is_setter = signature.starts_with("(self") && signature.ends_with("-> Self");
    read || is_primitive || is_setter
}

/// The type whose methods follow the line: what is implemented, or the trait that is declared.
fn implemented(line: &str) -> Option<String> {
    let line = without_generics(line);
    let item = line.strip_prefix("unsafe ").unwrap_or(&line);
    let of = item.strip_prefix("impl")?;
    let of = of.rsplit(" for ").next().unwrap_or(of).trim_start();
    let path = of.split(|c| !is_word(c) && c != ':').next()?;
    Some(path.rsplit("::").next()?.to_owned())
}

/// The name of the public type that the line declares.
fn declared(line: &str) -> Option<&str> {
    let item = line.trim_start().strip_prefix("pub ")?;
    let item = item.strip_prefix("unsafe ").unwrap_or(item);
    let keywords = ["struct ", "enum ", "trait "];
    keywords.iter().find_map(|keyword| item.strip_prefix(keyword)).map(word)
}

impl Shown {
    /// Reads a source file, whose code in the module's documentation belongs to the `module`.
    fn read(&mut self, module: &str, text: &str) {
        let (mut owner, mut open) = (String::new(), None::<String>);
        let mut pending = Vec::new();
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
            if let Some(kind) = declared(line) {
                if line.contains("trait ") {
                    kind.clone_into(&mut owner);
                }
                self.code.extend(pending.drain(..).map(|text| Code { owner: kind.into(), text }));
            } else if let Some((_, name)) = trimmed.split_once("fn ") {
                if !pending.is_empty() {
                    self.methods.insert((owner.clone(), word(name).to_owned()));
                }
                self.code.extend(pending.drain(..).map(|text| Code { owner: owner.clone(), text }));
            }
            pending.clear();
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

    /// Whether code calls the function; if its name is ambiguous, `others` are the unambiguous functions.
    fn has(&self, function: &Function<'_>, others: Option<&[&Function<'_>]>) -> bool {
        let Function { owner, name, .. } = *function;
        let own = (owner.to_owned(), name.to_owned());
        let derefs = self.derefs.get(owner).into_iter().flatten().map(String::as_str);
        let kinds: Vec<_> = derefs.chain([owner]).collect();
        let of = |code: &Code| {
            let Some(others) = others else { return true };
            let named = |text: &str| kinds.iter().any(|kind| mentions(text, kind));
            kinds.contains(&code.owner.as_str())
                || named(&code.text)
                || others.iter().any(|f| named(f.signature) && calls(&code.text, f.owner, f.name))
        };
        self.methods.contains(&own)
            || self.code.iter().any(|code| calls(&code.text, owner, name) && of(code))
    }
}

/// The places where the name stands as a whole word: what is before and behind it.
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
fn not_called(declarations: &[(String, &str)], shown: &Shown) -> BTreeSet<String> {
    let all = functions(declarations);
    let mut owners: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    // Functions of modules are called without a dot.
    for function in all.iter().filter(|f| f.owner.starts_with(char::is_uppercase)) {
        owners.entry(function.name).or_default().insert(function.owner);
    }
    let is_ambiguous = |f: &Function<'_>| {
        let of_types = owners.get(f.name).map_or(0, BTreeSet::len);
        of_types > 1 || of_types == 1 && COMMON.contains(&f.name)
    };
    let unambiguous: Vec<_> = all.iter().filter(|f| !is_ambiguous(f)).collect();
    let asked = all.iter().filter(|f| !is_plain(f));
    let missing =
        asked.filter(|f| !shown.has(f, is_ambiguous(f).then_some(unambiguous.as_slice())));
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
    let api = "pub struct uverbs::A<T>\npub fn uverbs::A<T>::by_type(&self) -> uverbs::B\n\
               pub fn uverbs::A<T>::read_only(&self) -> u8\npub fn uverbs::A<T>::set(self, value: u8) -> Self\n\
               pub fn uverbs::A<T>::fallible(&self) -> Result<u8>\n\
               pub const fn uverbs::A<T>::nowhere(&self, f: impl Fn(u8) -> u8)\npub fn uverbs::A<T>::len(&mut self)\n\
               pub fn uverbs::B::len(&mut self)\npub fn uverbs::C::len(&mut self)\npub fn uverbs::m::free(u8)\n\
               impl Fn for uverbs::A<T>\n";
    let mut shown = Shown::default();
    shown.read(
        "m",
        "//! ```\n//! a.len(); m::free(1);\n//! ```\n\n/// A.\n///\n/// ```\n/// a.by_type().len();\n/// ```\n\
         pub struct A;\n\nimpl<T> A<T> {\n    /// Text.\n    pub fn nowhere() {\n    }\n}\n",
    );
    let missing = not_called(&declarations(api), &shown);
    // `by_type` answers a `B`, and nothing a `C`.
    assert_eq!(missing.into_iter().collect::<Vec<_>>(), ["A::fallible", "A::nowhere", "C::len"]);
}

/// The Rust files below a folder of the workspace, with their names there.
fn rust(directory: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut folders, mut found) = (vec![root.join(directory)], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("the sources") {
            let path: PathBuf = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).expect("below").display().to_string();
                found.push((name, fs::read_to_string(&path).expect("a source file")));
            }
        }
    }
    found
}

#[test]
fn an_example_calls_every_public_method() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| fs::read_to_string(root.join(path)).expect("a file of the workspace");
    let mut shown = Shown::default();
    for (name, text) in rust("src") {
        if !name.contains("tests") && !INTERNAL.iter().any(|internal| name.contains(internal)) {
            shown.read(&name, &text);
        }
    }
    let programs = ["examples", "tests/testing", "cli/src"].into_iter().flat_map(rust);
    shown.code.extend(programs.map(|(owner, text)| Code { owner, text }));
    let api = read("ci/api/uverbs.txt");
    shown.read_derefs(&api);
    let declarations = declarations(&api);
    let count = declarations.len();
    assert!(count > 700, "{count} functions are read out of ci/api");
    let missing: Vec<_> = not_called(&declarations, &shown).into_iter().collect();
    assert!(
        missing.is_empty(),
        "no example calls these; use them in a program of examples/, or show them in the documentation:\n{}",
        missing.join("\n")
    );
}
