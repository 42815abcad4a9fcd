//! Debian packages by suite, through the host's apt with a state directory of the lab's.
//!
//! apt writes nothing outside the cache: lists, status and archives are the lab's, and an empty
//! status makes apt resolve the whole closure of dependencies. Mirror, proxies and keyrings are the
//! host's. `deb.rs` unpacks the downloads.

use crate::arch::Arch;
use crate::run::parent_death;
use crate::run::progress;
use crate::run::subprocess;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

/// Names the mirror when the machine's own apt sources carry no Debian suites.
pub(crate) const MIRROR: &str = "UVERBS_LAB_MIRROR";
/// Names the keyring that signs the mirror's suites, if it is not the usual one.
pub(crate) const KEYRING: &str = "UVERBS_LAB_KEYRING";

/// How long apt may take to answer, lists included.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// How long a download may bring nothing.
const STALL: Duration = Duration::from_secs(120);

/// The part of apt that downloads single files.
const HELPER: &str = "/usr/lib/apt/apt-helper";

const USUAL_KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A suite, in Debian's words: a line of releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DebSuite {
    /// Debian 11.
    Bullseye,
    /// Debian 12.
    Bookworm,
    /// Newer packages for Debian 12.
    BookwormBackports,
    /// Debian 13.
    Trixie,
    /// Newer packages for Debian 13.
    TrixieBackports,
    /// The future Debian 14 (testing).
    Forky,
    /// Unstable.
    Sid,
    /// Whichever is stable: today another name of Debian 13's.
    Stable,
}

impl DebSuite {
    /// Where to look for a kernel, in this order; the lists of backports include those of their release.
    pub(crate) const WITH_KERNELS: [DebSuite; 5] = [
        DebSuite::TrixieBackports,
        DebSuite::BookwormBackports,
        DebSuite::Forky,
        DebSuite::Sid,
        DebSuite::Bullseye,
    ];

    /// As an archive spells it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            DebSuite::Bullseye => "bullseye",
            DebSuite::Bookworm => "bookworm",
            DebSuite::BookwormBackports => "bookworm-backports",
            DebSuite::Trixie => "trixie",
            DebSuite::TrixieBackports => "trixie-backports",
            DebSuite::Forky => "forky",
            DebSuite::Sid => "sid",
            DebSuite::Stable => "stable",
        }
    }

    /// The suites whose lists apt needs to resolve packages of this one.
    fn lists(self) -> &'static [&'static str] {
        match self {
            DebSuite::Bullseye => &["bullseye"],
            DebSuite::Bookworm => &["bookworm"],
            DebSuite::BookwormBackports => &["bookworm", "bookworm-backports"],
            DebSuite::Trixie => &["trixie"],
            DebSuite::TrixieBackports => &["trixie", "trixie-backports"],
            DebSuite::Forky => &["forky"],
            DebSuite::Sid => &["sid"],
            DebSuite::Stable => &["stable"],
        }
    }
}

/// A package in one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DebPackage {
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
}

impl std::fmt::Display for DebPackage {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}={}", self.name, self.version)
    }
}

/// apt with the lists of one suite for one architecture, as Debian spells it.
pub(crate) struct Apt {
    suite: DebSuite,
    arch: &'static str,
    mirror: String,
    directory: PathBuf,
    configuration: PathBuf,
}

impl Apt {
    /// Fetches the suite's lists into `directory`.
    pub(crate) fn update(suite: DebSuite, arch: &'static str, directory: &Path) -> Result<Self> {
        if !on_path("apt-get") || !on_path("dpkg-deb") {
            bail!(
                "this machine has no apt-get and dpkg-deb to fetch Debian packages with.\n\
                 Name what the lab needs yourself: UVERBS_LAB_QEMU (qemu-system-x86_64 ≥ 10.1), \
                 UVERBS_LAB_BUSYBOX (static), and for a kernel UVERBS_LAB_KERNEL_<6_1|6_12|NEWEST|…> (image) with \
                 UVERBS_LAB_MODULES_<6_1|6_12|NEWEST|…> (its directory under lib/modules)."
            );
        }
        let mirror = mirror()?;
        for sub in ["lists/partial", "cache/archives/partial", "empty", "debs"] {
            fs::create_dir_all(directory.join(sub))?;
        }
        fs::write(directory.join("status"), "")?;
        let sources = sources(suite, arch, &mirror, keyring().as_deref());
        fs::write(directory.join("sources.list"), sources)?;
        let configuration = directory.join("apt.conf");
        fs::write(&configuration, settings(arch, directory))?;
        let directory = directory.to_owned();
        let apt = Self { suite, arch, mirror: mirror.clone(), directory, configuration };
        let lists = format!("package lists of {} for {arch}", suite.name());
        let spinner = progress::spinner(format!("{lists} ({mirror})"));
        let mut command = apt.get();
        command.args(["update", "-q", "--error-on=any"]);
        let updated = answer("apt-get update", command);
        spinner.finish_and_clear();
        updated.with_context(|| {
            format!(
                "cannot read the lists of {} from {mirror}.\n{MIRROR} names another mirror (http(s) \
                 URI of a Debian archive), {KEYRING} the keyring that signs it.",
                suite.lists().join(" and ")
            )
        })?;
        Ok(apt)
    }

    fn get(&self) -> Command {
        self.tool("apt-get")
    }

    /// A program of apt's with our state.
    fn tool(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .arg("-c")
            .arg(&self.configuration)
            .env("LC_ALL", "C")
            .current_dir(self.directory.join("debs"))
            .stdin(Stdio::null());
        command
    }

    /// The packages with everything they depend on, recommendations left out.
    pub(crate) fn closure(&self, names: &[&str]) -> Result<Vec<DebPackage>> {
        let mut command = self.get();
        command
            .args(["install", "--simulate", "--no-install-recommends", "-y", "-qq"])
            .args(["-t", self.suite.name()])
            .args(names);
        let plan = answer("apt-get install --simulate", command).with_context(|| {
            format!("{} cannot be resolved in {}", names.join(", "), self.suite.name())
        })?;
        let closure = installations(&plan);
        for name in names {
            if !closure.iter().any(|package| package.name == *name) {
                bail!("apt resolved no package {name} in {}", self.suite.name());
            }
        }
        Ok(closure)
    }

    /// All packages of the lists whose names begin with this, each in its newest version.
    pub(crate) fn listed(&self, prefix: &str) -> Result<Vec<DebPackage>> {
        let mut command = self.tool("apt-cache");
        command.args(["pkgnames", prefix]);
        let names = answer("apt-cache pkgnames", command)?;
        let mut command = self.tool("apt-cache");
        command.arg("madison").args(names.lines());
        Ok(versions(&answer("apt-cache madison", command)?))
    }

    /// Downloads a package that the archive keeps in its pool and that these lists do not name. There is no
    /// signed checksum, so the caller must verify it by other means.
    pub(crate) fn download_unlisted(&self, source: &str, package: &DebPackage) -> Result<PathBuf> {
        let file = format!("{}_{}_{}.deb", package.name, package.version, self.arch);
        let initial = &source[..1];
        let mirror = self.mirror.trim_end_matches('/');
        let uri = format!("{mirror}/pool/main/{initial}/{source}/{file}");
        let path = self.directory.join("debs").join(&file);
        let mut command = self.tool(HELPER);
        command.arg("download-file").arg(&uri).arg(&path);
        let spinner = progress::spinner(format!("{package}, from the archive's pool"));
        let outcome = answer("apt-helper download-file", command);
        spinner.finish_and_clear();
        outcome.with_context(|| format!("{uri} cannot be had"))?;
        Ok(path)
    }

    /// Downloads packages, checked against the signed lists; returns the files.
    pub(crate) fn download(&self, what: &str, packages: &[DebPackage]) -> Result<Vec<PathBuf>> {
        let archives = self.directory.join("debs");
        let requests: Vec<String> = packages.iter().map(DebPackage::to_string).collect();
        let mut command = self.get();
        command.args(["download", "--print-uris"]).args(&requests);
        let total = download_size(&answer("apt-get download --print-uris", command)?);
        let before = directory_size(&archives);
        let known: BTreeSet<PathBuf> = files(&archives)?.into_iter().collect();
        let bar = progress::bytes(format!("{what}: {} packages", packages.len()), total);
        let log = self.directory.join("download.log");
        let mut command = self.get();
        command.args(["download", "-q"]).args(&requests);
        let mut child = parent_death::die_with_this_thread(&command)
            .stdin(Stdio::null())
            .stdout(fs::File::create(&log)?)
            .stderr(fs::File::options().append(true).open(&log)?)
            .spawn()?;
        let mut seen = (before, Instant::now());
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            let size = directory_size(&archives);
            if size != seen.0 {
                seen = (size, Instant::now());
            } else if seen.1.elapsed() > STALL {
                child.kill()?;
                child.wait()?;
                bail!("the download of {what} stood still for {} s", STALL.as_secs());
            }
            bar.set_position(size.saturating_sub(before));
            thread::sleep(Duration::from_millis(200));
        };
        bar.finish_and_clear();
        if !status.success() {
            let text = fs::read_to_string(&log).unwrap_or_default();
            bail!("apt-get download of {what} failed ({status}):\n{}", tail(&text, 20));
        }
        let fetched: Vec<PathBuf> =
            files(&archives)?.into_iter().filter(|path| !known.contains(path)).collect();
        if fetched.len() != packages.len() {
            bail!("{} packages asked for, {} files came", packages.len(), fetched.len());
        }
        Ok(fetched)
    }
}

/// Whether a program of this name lies in a directory of `PATH`.
pub(crate) fn on_path(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

fn sources(suite: DebSuite, arch: &str, mirror: &str, keyring: Option<&Path>) -> String {
    let signed = keyring.map(|path| format!(" signed-by={}", path.display())).unwrap_or_default();
    suite
        .lists()
        .iter()
        .map(|list| format!("deb [arch={arch} target=Packages{signed}] {mirror} {list} main\n"))
        .collect()
}

/// Settings on top of the host's: the lab's directories, and none of the host's hooks, which would
/// change the host.
fn settings(arch: &str, directory: &Path) -> String {
    let directory = directory.display();
    format!(
        "#clear APT::Update::Pre-Invoke;\n\
         #clear APT::Update::Post-Invoke;\n\
         #clear APT::Update::Post-Invoke-Success;\n\
         #clear APT::Default-Release;\n\
         APT::Sandbox::User \"root\";\n\
         APT::Architecture \"{arch}\";\n\
         #clear APT::Architectures;\n\
         APT::Architectures {{ \"{arch}\"; }};\n\
         Dir::State \"{directory}\";\n\
         Dir::State::lists \"{directory}/lists\";\n\
         Dir::State::status \"{directory}/status\";\n\
         Dir::State::extended_states \"{directory}/extended_states\";\n\
         Dir::Cache \"{directory}/cache\";\n\
         Dir::Cache::archives \"{directory}/cache/archives\";\n\
         Dir::Etc::sourcelist \"{directory}/sources.list\";\n\
         Dir::Etc::sourceparts \"{directory}/empty\";\n\
         Dir::Etc::preferences \"{directory}/empty/none\";\n\
         Dir::Etc::preferencesparts \"{directory}/empty\";\n\
         Dir::Log \"{directory}\";\n\
         Acquire::Languages \"none\";\n\
         Acquire::Retries \"3\";\n\
         APT::Get::List-Cleanup \"false\";\n"
    )
}

fn keyring() -> Option<PathBuf> {
    match env::var_os(KEYRING).filter(|value| !value.is_empty()) {
        Some(path) => Some(PathBuf::from(path)),
        None => Some(PathBuf::from(USUAL_KEYRING)).filter(|path| path.exists()),
    }
}

/// The archive that the machine's own apt sources name.
fn mirror() -> Result<String> {
    if let Some(mirror) = env::var(MIRROR).ok().filter(|value| !value.is_empty()) {
        return Ok(mirror);
    }
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", "$(REPO_URI) $(RELEASE)"]).env("LC_ALL", "C");
    // A warning on one source must not hide the others.
    let targets = subprocess::run(command, PATIENCE)?.stdout;
    archive(&targets).with_context(|| {
        format!(
            "this machine's apt sources name no Debian archive; set {MIRROR} to the URI of one \
             (it must carry bookworm, trixie and trixie-backports)"
        )
    })
}

/// The first repository that carries a release of Debian proper, out of lines `URI RELEASE`.
fn archive(targets: &str) -> Option<String> {
    const RELEASES: [&str; 8] =
        ["bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable", "oldstable"];
    targets.lines().find_map(|line| {
        let (uri, release) = line.trim().rsplit_once(' ')?;
        let debian = uri.trim_end_matches('/').ends_with("/debian");
        (debian && RELEASES.contains(&release)).then(|| uri.to_owned())
    })
}

/// Packages named by the `Inst` lines of a simulated installation.
fn installations(text: &str) -> Vec<DebPackage> {
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.strip_prefix("Inst ")?.split_once(' ')?;
            let version = rest.split_once('(')?.1.split_whitespace().next()?;
            let name = name.split_once(':').map_or(name, |(name, _)| name);
            Some(DebPackage { name: name.to_owned(), version: version.to_owned() })
        })
        .collect()
}

/// Packages in lines `name | version | where`; of several versions of one the first, the newest.
fn versions(text: &str) -> Vec<DebPackage> {
    let mut found: Vec<DebPackage> = Vec::new();
    for line in text.lines() {
        let mut parts = line.split('|').map(str::trim);
        let (Some(name), Some(version)) = (parts.next(), parts.next()) else { continue };
        if !found.iter().any(|package| package.name == name) {
            found.push(DebPackage { name: name.to_owned(), version: version.to_owned() });
        }
    }
    found
}

/// Sum of the sizes in lines `'URI' file size hash`.
fn download_size(text: &str) -> u64 {
    text.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum()
}

fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = fs::read_dir(directory)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    found.sort();
    Ok(found)
}

fn directory_size(directory: &Path) -> u64 {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The output of a command of apt.
fn answer(what: &str, command: Command) -> Result<String> {
    let run = subprocess::run(command, PATIENCE)?;
    match run.status {
        Some(status) if status.success() => Ok(run.stdout),
        Some(status) => bail!("{what} failed ({status}):\n{}", tail(&run.stderr, 20)),
        None => {
            bail!("{what} did not end within {} s:\n{}", PATIENCE.as_secs(), tail(&run.stderr, 20))
        }
    }
}

/// The scratch directory of a suite's lists.
pub(crate) fn lists_directory(suite: DebSuite, arch: Arch) -> String {
    format!("apt-{suite:?}-{}", arch.label())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_the_one_that_carries_debian_itself() {
        let targets = "https://packages.example/node nodistro\n\
                       http://mirror.example/debian-security/ bookworm-security\n\
                       http://mirror.example/debian/ bookworm-updates\n\
                       http://mirror.example/debian/ bookworm\n";
        assert_eq!(archive(targets).as_deref(), Some("http://mirror.example/debian/"));
        assert_eq!(archive("http://archive.example/ubuntu/ noble\n"), None);
        assert_eq!(archive("http://archive.example/raspbian/ bookworm\n"), None);
        assert_eq!(archive(""), None);
    }

    #[test]
    fn simulated_installations_name_packages_and_versions() {
        let text = "Inst libc6 (2.41-12+deb13u4 Debian:13.7/stable [amd64]) []\n\
                    Inst libpci3 (1:3.13.0-2 Debian:13.7/stable [amd64])\n\
                    Conf libc6 (2.41-12+deb13u4 Debian:13.7/stable [amd64])\n";
        let found: Vec<String> = installations(text).iter().map(DebPackage::to_string).collect();
        assert_eq!(found, ["libc6=2.41-12+deb13u4", "libpci3=1:3.13.0-2"]);
    }

    #[test]
    fn the_newest_of_several_versions_counts() {
        let text = "linux-image-6.18.15 | 6.18.15-1 | http://m/debian trixie-backports/main Packages\n\
                    linux-image-6.1 |  6.1.176-1 | http://m/debian bookworm/main amd64 Packages\n\
                    linux-image-6.1 |  6.1.170-1 | http://m/debian bookworm/main amd64 Packages\n";
        let found: Vec<String> = versions(text).iter().map(DebPackage::to_string).collect();
        assert_eq!(found, ["linux-image-6.18.15=6.18.15-1", "linux-image-6.1=6.1.176-1"]);
    }

    #[test]
    fn sizes_add_up() {
        let text = "'http://m/a.deb' a.deb 100 SHA256:00\n'http://m/b.deb' b.deb 23 \n";
        assert_eq!(download_size(text), 123);
    }

    #[test]
    fn sources_name_each_list_with_its_keyring() {
        let keyring = Some(Path::new("/k.gpg"));
        let text = sources(DebSuite::TrixieBackports, "amd64", "http://m/debian", keyring);
        assert_eq!(
            text,
            "deb [arch=amd64 target=Packages signed-by=/k.gpg] http://m/debian trixie main\n\
             deb [arch=amd64 target=Packages signed-by=/k.gpg] http://m/debian trixie-backports main\n"
        );
        let text = sources(DebSuite::Trixie, "arm64", "http://m/debian", None);
        assert_eq!(text, "deb [arch=arm64 target=Packages] http://m/debian trixie main\n");
    }
}
