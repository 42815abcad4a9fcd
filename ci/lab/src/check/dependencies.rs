//! Three rules for the packages that the workspace depends on: their licences are listed, none is there
//! in two versions without a reason, none compiles C.
//!
//! The rules cover all features, all targets and all kinds of dependency that the lock file has.

use super::licence;
use super::row::{self, CheckRow};
use crate::run::outcome::TestOutcome;
use crate::workspace::{self, Workspace};
use anyhow::{Result, bail};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};

/// Licences that suffice for every package, with the reason.
const LICENCES: &[(&str, &str)] = &[
    ("MIT", "the project's own"),
    ("Apache-2.0", "asks for a notice, and gives what MIT gives"),
    ("BSD-2-Clause", "asks for a notice"),
    ("ISC", "asks for a notice, in fewer words than MIT"),
    ("Unicode-3.0", "asks for a notice; the tables of letters in procedural macros"),
];

/// Packages under other licences, with the licence and the reason. No published package may be built
/// from one.
const TOOLS: &[(&str, &str, &str)] = &[
    ("btf-rs", "LGPL-2.1-or-later", "reads type information of kernels in a test of uverbs-uapi"),
    ("btf-rs-derive", "LGPL-2.1-or-later", "part of btf-rs"),
    ("foldhash", "Zlib", "part of yaml-rust2, which reads the workflow files in the lab"),
];

/// Packages that are there in more than one version, with the beginnings of those versions and the
/// reason.
const DUPLICATES: &[(&str, &[&str], &str)] =
    &[("syn", &["2", "3"], "procedural macros change to the new one at their own pace")];

/// Packages that compile or bind C, or look for C libraries.
const C: [&str; 6] = ["cc", "cmake", "bindgen", "pkg-config", "ibverbs-sys", "rdma-sys"];

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
    resolve: Resolve,
}

#[derive(Clone, Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// Empty where it must not be published.
    publish: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Debug, Deserialize)]
struct Kind {
    /// `dev`, `build`, or nothing.
    kind: Option<String>,
}

/// All checks of dependencies.
pub(super) fn checks(workspace: &Workspace) -> Vec<CheckRow> {
    let metadata = metadata(workspace);
    let judged = |name: &str, judge: &dyn Fn(&Metadata) -> Vec<String>| {
        row::timed(name, || match &metadata {
            Err(error) => bail!("{error:#}"),
            Ok(metadata) => Ok(match judge(metadata) {
                complaints if complaints.is_empty() => TestOutcome::Passed,
                complaints => TestOutcome::Failed(complaints.join("\n")),
            }),
        })
    };
    vec![
        judged("licences", &|metadata| licences(metadata, LICENCES, TOOLS)),
        judged("duplicate versions", &|metadata| duplicates(&metadata.packages, DUPLICATES)),
        judged("no C", &|metadata| compilers_of_c(&metadata.packages)),
    ]
}

fn metadata(workspace: &Workspace) -> Result<Metadata> {
    let output = Command::new(workspace::cargo())
        .args(["metadata", "--locked", "--all-features", "--format-version", "1"])
        .current_dir(workspace.root())
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

impl Metadata {
    /// Packages that a user of the published ones compiles.
    fn shipped(&self) -> BTreeSet<&str> {
        let nodes: BTreeMap<&str, &Node> =
            self.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
        let mut open: Vec<&str> = self
            .packages
            .iter()
            .filter(|package| self.workspace_members.contains(&package.id))
            .filter(|package| package.publish.as_ref().is_none_or(|to| !to.is_empty()))
            .map(|package| package.id.as_str())
            .collect();
        let mut found = BTreeSet::new();
        while let Some(id) = open.pop() {
            let Some(node) = nodes.get(id).filter(|_| found.insert(id)) else { continue };
            let compiled = node.deps.iter().filter(|dependency| {
                dependency.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"))
            });
            open.extend(compiled.map(|dependency| dependency.pkg.as_str()));
        }
        found
    }
}

/// A complaint for each package whose licence is not allowed.
fn licences(
    metadata: &Metadata,
    licences: &[(&str, &str)],
    tools: &[(&str, &str, &str)],
) -> Vec<String> {
    let mut complaints = Vec::new();
    let shipped = metadata.shipped();
    let mut used = BTreeSet::new();
    for package in &metadata.packages {
        let Package { id, name, version, .. } = package;
        let Some(expression) = &package.license else {
            complaints.push(format!("{name} {version} names no licence"));
            continue;
        };
        let allowed = |licence: &str| licences.iter().any(|(known, _)| *known == licence);
        match licence::suffices(expression, &allowed) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(error) => {
                complaints.push(format!("{name} {version}: {error}"));
                continue;
            }
        }
        let tool = tools.iter().find(|(known, licence, _)| known == name && licence == expression);
        match tool {
            None => complaints.push(format!(
                "{name} {version} is under {expression}, and LICENCES in \
                 ci/lab/src/check/dependencies.rs has too little of that: take another package, or \
                 add the licence or the package there with the reason"
            )),
            Some((known, ..)) if shipped.contains(id.as_str()) => complaints.push(format!(
                "{known} {version} ({expression}) is for tools and tests only, and a published \
                 package depends on it"
            )),
            Some((known, ..)) => {
                used.insert(*known);
            }
        }
    }
    for (known, ..) in tools.iter().filter(|(known, ..)| !used.contains(known)) {
        complaints.push(format!("TOOLS names {known}, which nothing needs: remove its line"));
    }
    complaints
}

/// A complaint for each package that is there in more versions than the table lists.
fn duplicates(packages: &[Package], known: &[(&str, &[&str], &str)]) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        versions.entry(&package.name).or_default().insert(&package.version);
    }
    versions.retain(|_, versions| versions.len() > 1);
    let mut complaints = Vec::new();
    for (name, versions) in &versions {
        let listed = known.iter().find(|(known, ..)| known == name).map_or(&[][..], |row| row.1);
        let fits = |version: &&&str| {
            listed
                .iter()
                .any(|begin| version.strip_prefix(begin).is_some_and(|rest| rest.starts_with('.')))
        };
        if versions.len() != listed.len() || !versions.iter().all(|version| fits(&version)) {
            let versions: Vec<&str> = versions.iter().copied().collect();
            complaints.push(format!(
                "{name} is there in the versions {}: `cargo tree --workspace --invert {name}@VERSION` \
                 tells who wants each; bring them together, or list them with the reason in \
                 DUPLICATES in ci/lab/src/check/dependencies.rs",
                versions.join(" and ")
            ));
        }
    }
    for (name, ..) in known.iter().filter(|(name, ..)| !versions.contains_key(name)) {
        complaints.push(format!("DUPLICATES names {name}, which is there once: remove its line"));
    }
    complaints
}

/// A complaint for each package that compiles or binds C.
fn compilers_of_c(packages: &[Package]) -> Vec<String> {
    packages
        .iter()
        .filter(|package| C.contains(&package.name.as_str()))
        .map(|package| {
            let Package { name, version, .. } = package;
            format!(
                "{name} {version} compiles or binds C: `cargo tree --workspace --invert {name}` \
                 tells who wants it; nothing here may"
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, version: &str, license: &str) -> Package {
        Package {
            id: format!("{name}@{version}"),
            name: name.into(),
            version: version.into(),
            license: Some(license.into()),
            publish: None,
        }
    }

    /// A published package `lib` that needs `used`, tests with `tested`, and is built with `built`.
    fn tree(packages: Vec<Package>) -> Metadata {
        let dependency = |name: &str, kind: Option<&str>| Dependency {
            pkg: format!("{name}@1.0.0"),
            dep_kinds: vec![Kind { kind: kind.map(str::to_owned) }],
        };
        let deps = vec![
            dependency("used", None),
            dependency("tested", Some("dev")),
            dependency("built", Some("build")),
        ];
        let mut nodes = vec![Node { id: "lib@1.0.0".into(), deps }];
        nodes.extend(packages.iter().map(|package| Node { id: package.id.clone(), deps: vec![] }));
        let mut all = vec![package("lib", "1.0.0", "MIT")];
        all.extend(packages);
        Metadata {
            packages: all,
            workspace_members: vec!["lib@1.0.0".into()],
            resolve: Resolve { nodes },
        }
    }

    const MIT: &[(&str, &str)] = &[("MIT", "ours")];
    const TOOL: &[(&str, &str, &str)] = &[("tested", "GPL-3.0-only", "in a test")];

    #[test]
    fn a_licence_that_is_not_listed_is_named() {
        let tree = tree(vec![package("used", "1.0.0", "GPL-3.0-only")]);
        let complaints = licences(&tree, MIT, &[]);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].starts_with("used 1.0.0 is under GPL-3.0-only, "), "{complaints:?}");
    }

    #[test]
    fn a_package_without_licence_is_named() {
        let mut silent = package("used", "1.0.0", "");
        silent.license = None;
        assert_eq!(licences(&tree(vec![silent]), MIT, &[]), ["used 1.0.0 names no licence"]);
    }

    #[test]
    fn a_tool_may_be_under_its_licence_where_nobody_ships_it() {
        let tool = |version, license| tree(vec![package("tested", version, license)]);
        assert_eq!(licences(&tool("1.0.0", "GPL-3.0-only"), MIT, TOOL), [""; 0]);
        // The same package under another licence is another matter.
        assert_eq!(licences(&tool("1.0.0", "AGPL-3.0-only"), MIT, TOOL).len(), 2);
    }

    #[test]
    fn a_tool_that_a_published_package_is_built_from_is_refused() {
        for name in ["used", "built"] {
            let tools = [(name, "GPL-3.0-only", "in a test")];
            let tree = tree(vec![package(name, "1.0.0", "GPL-3.0-only")]);
            let complaints = licences(&tree, MIT, &tools);
            assert!(complaints[0].contains("a published package depends on it"), "{complaints:?}");
        }
    }

    #[test]
    fn a_line_for_a_tool_that_is_gone_is_named() {
        let complaints = licences(&tree(vec![]), MIT, TOOL);
        assert_eq!(complaints, ["TOOLS names tested, which nothing needs: remove its line"]);
    }

    #[test]
    fn a_second_version_needs_a_line_that_names_it() {
        let twice = [package("syn", "2.0.1", "MIT"), package("syn", "3.1.0", "MIT")];
        let third = [&twice[..], &[package("syn", "3.2.0", "MIT")]].concat();
        let known: &[(&str, &[&str], &str)] = &[("syn", &["2", "3"], "why")];
        assert_eq!(duplicates(&twice, known), [""; 0]);
        assert!(duplicates(&twice, &[])[0].starts_with("syn is there in the versions 2.0.1 and "));
        assert_eq!(duplicates(&third, known).len(), 1);
        assert_eq!(duplicates(&twice, &[("syn", &["1", "3"], "why")]).len(), 1);
        assert!(duplicates(&twice[..1], known)[0].contains("remove its line"));
    }

    #[test]
    fn a_package_that_compiles_c_is_named() {
        let packages = [package("libc", "0.2.0", "MIT"), package("cc", "1.0.0", "MIT")];
        let complaints = compilers_of_c(&packages);
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].starts_with("cc 1.0.0 compiles or binds C"), "{complaints:?}");
    }

    /// In any build or test of the workspace: all of them are in the one lock file.
    #[test]
    fn no_crate_compiles_or_binds_c() {
        let lock = include_str!("../../../../Cargo.lock");
        assert!(lock.contains("name = \"uverbs\""));
        for name in C {
            assert!(!lock.contains(&format!("name = \"{name}\"\n")), "{name} is in Cargo.lock");
        }
    }
}
