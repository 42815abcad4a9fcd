//! The files of a package, and which of them name items of which others.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fs, io};

/// A module's place in the crate: its names from the root.
type ModulePath = Vec<String>;

/// A file that names an item of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrow {
    pub(crate) from: String,
    /// The line of the path.
    pub(crate) line: usize,
    pub(crate) to: String,
    /// The item, from the other file's module on.
    pub(crate) name: String,
}

/// The source of one crate.
pub(crate) struct Source {
    /// File, relative to the crate's root, and its tokens.
    files: BTreeMap<String, TokenStream>,
}

/// A path as the source spells it: `crate` or how many times `super`, and names.
struct Named {
    root: Root,
    names: Vec<String>,
    line: usize,
}

#[derive(Clone, Copy)]
enum Root {
    Crate,
    /// From this module, so many levels up.
    Up(usize),
}

/// Methods of the standard library that a file names one of its own after: a call may be either.
const NAMES_OF_STD: &[&str] = &["as_mut_slice"];

/// A file that defines a method.
struct Definer<'a> {
    /// The type of the method.
    implemented: String,
    file: &'a str,
    /// Whether the type is another file's, and the method not one of a trait.
    added: bool,
}

/// A call of a method.
struct MethodCall {
    name: String,
    /// The type of `self`, if the method is called on that.
    receiver: Option<String>,
    line: usize,
}

/// An `impl` block.
struct ImplBlock {
    implemented: String,
    of_trait: bool,
    body: TokenStream,
}

impl Source {
    /// All `.rs` files below a folder.
    pub(crate) fn read(root: &Path) -> io::Result<Source> {
        let mut files = BTreeMap::new();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let name = path.strip_prefix(root).map_err(io::Error::other)?;
                    let tokens = fs::read_to_string(&path)?
                        .parse()
                        .map_err(|error| io::Error::other(format!("{name:?}: {error}")))?;
                    files.insert(name.to_string_lossy().into_owned(), tokens);
                }
            }
        }
        Ok(Source { files })
    }

    /// Files by name and text.
    pub(crate) fn of(files: &[(&str, &str)]) -> Source {
        let parse = |(name, text): &(&str, &str)| ((*name).to_owned(), text.parse().unwrap());
        Source { files: files.iter().map(parse).collect() }
    }

    /// Files that are no tests.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &TokenStream)> {
        self.files.iter().filter(|(file, _)| !is_test(file)).map(|(file, text)| (&**file, text))
    }

    /// Every file that names an item of another one.
    pub(crate) fn arrows(&self) -> Vec<Arrow> {
        let modules: BTreeMap<ModulePath, &str> =
            self.files.keys().map(|file| (module_of(file), &**file)).collect();
        let exported = self.exported();
        let mut arrows = Vec::new();
        for (file, tokens) in self.files() {
            let mut named = Vec::new();
            paths(tokens.clone(), 0, &mut named);
            for Named { root, names, line } in named {
                let mut path = match root {
                    Root::Crate => Vec::new(),
                    Root::Up(levels) => {
                        let own = module_of(file);
                        own[..own.len().saturating_sub(levels)].to_vec()
                    }
                };
                path.extend(names);
                if let [name, rest @ ..] = &path[..]
                    && !modules.contains_key(std::slice::from_ref(name))
                    && let Some(defined) = exported.get(name)
                {
                    path = defined.iter().chain(rest).cloned().collect();
                }
                let known = (0..=path.len()).rev().find_map(|length| {
                    modules.get(&path[..length]).map(|to| (*to, path[length..].join("::")))
                });
                if let Some((to, name)) = known
                    && to != file
                {
                    arrows.push(Arrow { from: file.into(), line, to: to.into(), name });
                }
            }
        }
        arrows
    }

    /// Every call of a method that another file adds to a type: such a call needs no path. Types are not
    /// inferred. A call on `self` finds the methods of its `impl` block's type, another call all methods
    /// of its name, and it counts if one file alone defines them, which is not the one with the type.
    pub(crate) fn method_arrows(&self) -> Vec<Arrow> {
        let mut types: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (file, tokens) in self.files() {
            let tokens: Vec<_> = tokens.clone().into_iter().collect();
            for name in defined_types(&tokens) {
                types.entry(name).or_default().insert(file);
            }
        }
        let mut methods: BTreeMap<String, Vec<Definer<'_>>> = BTreeMap::new();
        for (file, tokens) in self.files() {
            for block in impl_blocks(tokens) {
                let home = types.get(&block.implemented);
                let added = !block.of_trait && home.is_some_and(|homes| !homes.contains(file));
                for name in block.methods() {
                    let implemented = block.implemented.clone();
                    methods.entry(name).or_default().push(Definer { implemented, file, added });
                }
            }
        }
        let mut arrows = Vec::new();
        for (file, tokens) in self.files() {
            let mut called = Vec::new();
            for block in impl_blocks(tokens) {
                method_calls(block.body, Some(&block.implemented), &mut called);
            }
            method_calls(tokens.clone(), None, &mut called);
            for MethodCall { name, receiver, line } in called {
                let Some(all) = methods.get(&name) else { continue };
                let its = all.iter().filter(|its| receiver.as_ref() == Some(&its.implemented));
                let own: Vec<_> = its.collect();
                let found = if own.is_empty() { all.iter().collect() } else { own };
                let (first, rest) = (found[0], &found[1..]);
                let alone = rest.iter().all(|other| other.file == first.file)
                    && !NAMES_OF_STD.contains(&&*name);
                if alone && first.added && first.file != file {
                    arrows.push(Arrow { from: file.into(), line, to: first.file.into(), name });
                }
            }
        }
        arrows
    }

    /// Every file with a word in its code, and the word's line. Tests are left out.
    pub(crate) fn files_with(&self, word: &str) -> Vec<(&str, usize)> {
        let mut found = Vec::new();
        for (file, tokens) in self.files() {
            let mut lines = Vec::new();
            lines_with(word, tokens.clone(), &mut lines);
            found.extend(lines.into_iter().map(|line| (file, line)));
        }
        found
    }

    /// The items that the crate's root re-exports, by name, with the paths of their definitions.
    fn exported(&self) -> BTreeMap<String, ModulePath> {
        let mut exported = BTreeMap::new();
        let Some(root) = self.files.get("lib.rs").or_else(|| self.files.get("main.rs")) else {
            return exported;
        };
        let tokens: Vec<_> = root.clone().into_iter().collect();
        for (at, _) in tokens.iter().enumerate().filter(|(_, token)| is_word(token, "use")) {
            let mut leaves = Vec::new();
            tree(&tokens[at + 1..], Vec::new(), &mut leaves);
            for leaf in leaves {
                if let Some(name) = leaf.last() {
                    exported.insert(name.clone(), leaf.clone());
                }
            }
        }
        exported
    }
}

/// Tests may import anything, and so may items that only tests use.
fn is_test(file: &str) -> bool {
    let mut parts = file.split('/').rev();
    let last = parts.next().unwrap_or_default();
    matches!(last, "tests.rs" | "model.rs" | "scripted.rs")
        || file.split('/').any(|part| matches!(part, "tests" | "scripted"))
}

fn module_of(file: &str) -> ModulePath {
    let mut path: ModulePath = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if path.last().is_some_and(|last| matches!(&**last, "lib" | "main")) {
        path.pop();
    }
    path
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == word)
}

fn is_sign(token: Option<&TokenTree>, sign: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign)
}

fn is_path_separator(tokens: &[TokenTree]) -> bool {
    is_sign(tokens.first(), ':') && is_sign(tokens.get(1), ':')
}

/// Finds the paths that begin with `crate`, `self` or `super`, `depth` inline modules deep.
fn paths(stream: TokenStream, depth: usize, found: &mut Vec<Named>) {
    let tokens = without_tests(stream);
    let mut at = 0;
    while at < tokens.len() {
        let rest = &tokens[at..];
        let root = match &rest[0] {
            TokenTree::Ident(word) if is_path_separator(&rest[1..]) => match &*word.to_string() {
                "crate" => Some(Root::Crate),
                "self" => Some(Root::Up(0)),
                "super" => Some(Root::Up(1)),
                _ => None,
            },
            _ => None,
        };
        match (root, &rest[0]) {
            (Some(root), first) => {
                let line = first.span().start().line;
                let mut leaves = Vec::new();
                let end = tree_with_lines(&rest[3..], Vec::new(), line, &mut leaves);
                for (mut names, line) in leaves {
                    let more = names.iter().take_while(|name| *name == "super").count();
                    names.drain(..more);
                    let root = match root {
                        Root::Up(levels) => match (levels + more).checked_sub(depth) {
                            Some(levels) => Root::Up(levels),
                            // Within the file.
                            None => continue,
                        },
                        Root::Crate => Root::Crate,
                    };
                    found.push(Named { root, names, line });
                }
                at += 3 + end;
            }
            (None, TokenTree::Group(group)) => {
                let inside = at >= 2 && is_word(&tokens[at - 2], "mod");
                paths(group.stream(), depth + usize::from(inside), found);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// The structs, enums and unions that a file defines outside of inline modules.
fn defined_types(tokens: &[TokenTree]) -> impl Iterator<Item = String> {
    tokens.windows(2).filter_map(|pair| {
        let kind = ["struct", "enum", "union"].iter().any(|kind| is_word(&pair[0], kind));
        kind.then(|| word(&pair[1])).flatten()
    })
}

/// The `impl` blocks of a file. Tests are left out.
fn impl_blocks(file: &TokenStream) -> Vec<ImplBlock> {
    let tokens = without_tests(file.clone());
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        at += 1;
        if !is_word(&tokens[at - 1], "impl") {
            continue;
        }
        let Some(length) = tokens[at..].iter().position(is_braces) else { break };
        let head = &tokens[at..at + length];
        if let (Some(implemented), TokenTree::Group(body)) =
            (implemented_type(head), &tokens[at + length])
        {
            let of_trait = head.iter().any(|token| is_word(token, "for"));
            found.push(ImplBlock { implemented, of_trait, body: body.stream() });
        }
        at += length + 1;
    }
    found
}

impl ImplBlock {
    fn methods(&self) -> Vec<String> {
        let body: Vec<_> = self.body.clone().into_iter().collect();
        let names = body.windows(2).filter(|pair| is_word(&pair[0], "fn"));
        names.filter_map(|pair| word(&pair[1])).collect()
    }
}

/// The type whose `impl` block has this head: the last word outside of angle brackets, behind `for` if
/// there is one.
fn implemented_type(head: &[TokenTree]) -> Option<String> {
    let mut depth = 0;
    let mut last = None;
    for token in head {
        match token {
            TokenTree::Punct(sign) if sign.as_char() == '<' => depth += 1,
            TokenTree::Punct(sign) if sign.as_char() == '>' => depth -= 1,
            _ if depth == 0 && is_word(token, "where") => break,
            _ if depth == 0 => last = word(token).or(last),
            _ => {}
        }
    }
    last
}

/// Finds calls of methods: those on `self` if its type is given, else all others. Tests are left out.
fn method_calls(stream: TokenStream, of_self: Option<&str>, found: &mut Vec<MethodCall>) {
    let tokens = without_tests(stream);
    for at in 0..tokens.len() {
        if let [TokenTree::Punct(dot), TokenTree::Ident(name), TokenTree::Group(group), ..] =
            &tokens[at..]
            && dot.as_char() == '.'
            && group.delimiter() == Delimiter::Parenthesis
        {
            let on_self = at > 0 && is_word(&tokens[at - 1], "self");
            if on_self == of_self.is_some() {
                let (receiver, line) = (of_self.map(str::to_owned), name.span().start().line);
                found.push(MethodCall { name: name.to_string(), receiver, line });
            }
        }
        if let TokenTree::Group(group) = &tokens[at] {
            method_calls(group.stream(), of_self, found);
        }
    }
}

/// Finds the lines of a word. Tests are left out.
fn lines_with(word: &str, stream: TokenStream, found: &mut Vec<usize>) {
    for token in without_tests(stream) {
        match token {
            TokenTree::Group(group) => lines_with(word, group.stream(), found),
            token if is_word(&token, word) => found.push(token.span().start().line),
            _ => {}
        }
    }
}

fn word(token: &TokenTree) -> Option<String> {
    match token {
        TokenTree::Ident(word) => Some(word.to_string()),
        _ => None,
    }
}

fn is_braces(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

/// Whether these are the brackets of `#[cfg(test)]` or alike.
fn is_for_tests(brackets: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = brackets else { return false };
    let text = group.stream().to_string().replace(' ', "");
    text.starts_with("cfg(test") || text.starts_with("cfg(all(test")
}

/// The tokens without the items that only tests use.
fn without_tests(stream: TokenStream) -> Vec<TokenTree> {
    let tokens: Vec<_> = stream.into_iter().collect();
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if is_sign(tokens.get(at), '#') && is_for_tests(tokens.get(at + 1)) {
            at = end_of_item(&tokens, at);
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Where the item ends whose attributes begin here.
fn end_of_item(tokens: &[TokenTree], mut at: usize) -> usize {
    while is_sign(tokens.get(at), '#') {
        at += 2;
    }
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token {
            TokenTree::Punct(punct) if punct.as_char() == ';' => break,
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
            _ => {}
        }
    }
    // `use a::{b};` goes on behind its braces.
    at + usize::from(is_sign(tokens.get(at), ';'))
}

/// The names that a path or a tree of `use` ends in; answers how many tokens belong to it.
fn tree_with_lines(
    tokens: &[TokenTree],
    prefix: Vec<String>,
    line: usize,
    leaves: &mut Vec<(Vec<String>, usize)>,
) -> usize {
    let mut names = prefix;
    let mut line = line;
    let mut at = 0;
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(ident)) => {
                if at == 0 {
                    line = ident.span().start().line;
                }
                names.push(ident.to_string());
                at += 1;
                if is_path_separator(&tokens[at..]) {
                    at += 2;
                    continue;
                }
                if tokens.get(at).is_some_and(|token| is_word(token, "as")) {
                    at += 2;
                }
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<_> = group.stream().into_iter().collect();
                for part in inner.split(|token| is_sign(Some(token), ',')) {
                    if !part.is_empty() {
                        tree_with_lines(part, names.clone(), line, leaves);
                    }
                }
                return at + 1;
            }
            // `*`, or the arguments of a generic type.
            _ => {}
        }
        leaves.push((names, line));
        return at;
    }
}

fn tree(tokens: &[TokenTree], prefix: Vec<String>, leaves: &mut Vec<Vec<String>>) {
    let mut found = Vec::new();
    tree_with_lines(tokens, prefix, 0, &mut found);
    leaves.extend(found.into_iter().map(|(names, _)| names));
}
