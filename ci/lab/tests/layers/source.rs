//! The files of a package, and which of them name items of which others.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::BTreeMap;
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
    /// File, relative to the crate's root, and what is in it.
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

    /// What the crate's root re-exports, by name, and where that is.
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
    if path.last().is_some_and(|last| matches!(&**last, "lib" | "main" | "mod")) {
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
    let tokens: Vec<_> = stream.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if is_sign(tokens.get(at), '#') && is_for_tests(tokens.get(at + 1)) {
            at = end_of_item(&tokens, at);
            continue;
        }
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

/// Whether these are the brackets of `#[cfg(test)]` or alike.
fn is_for_tests(brackets: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = brackets else { return false };
    let text = group.stream().to_string().replace(' ', "");
    text.starts_with("cfg(test") || text.starts_with("cfg(all(test")
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
