//! A case: a shell script that runs in the guest and passes if it exits with 0.
//!
//! Most are a server and a client of rdma-core's. A script waits until the server listens, and does
//! not sleep; the guest's `timeout` ends a program that hangs.

use crate::machine::vm::{GuestEvent, Vm};
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use anyhow::Result;
use lab_guest::order::Order;
use std::time::{Duration, Instant};

/// How long a case may take, unless it says otherwise: more than its programs may.
const PATIENCE: Duration = Duration::from_secs(600);

/// The beginning of each script.
pub(super) const PRELUDE: &str = r#"
exec 2>&1
fail() { echo "$*"; exit 1; }
# until COMMAND...: waits for the command to succeed.
until_true() {
    for turn in $(seq 400); do eval "$1" && return; usleep 25000; done
    echo "not within ten seconds: $1"
    return 1
}
# A TCP port in LISTEN state, an identifier of rdma_cm's likewise.
tcp() { grep -qE ":$(printf %04X $1) [0-9A-F]+:0000 0A" /proc/net/tcp /proc/net/tcp6; }
cm() { /usr/bin/rdma resource show cm_id | grep -q LISTEN; }
# pair READY SERVER CLIENT: both must end with 0; what they print ends up in server and client.
pair() {
    directory=$(mktemp -d) && cd $directory || exit 1
    timeout 100 $2 >server 2>&1 & server=$!
    until_true "$1" || { cat server; kill $server; exit 1; }
    timeout 90 $3 >client 2>&1; client=$?
    [ $client = 0 ] || kill $server
    wait $server; server=$?
    echo "$2"; cat server; echo "$3"; cat client
    [ $client = 0 ] || fail "the client ended with $client"
    [ $server = 0 ] || fail "the server ended with $server"
}
"#;

/// A script with a name.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) script: String,
    pub(crate) root: bool,
    /// How long it may take before the guest is given up.
    pub(crate) patience: Duration,
}

impl Case {
    /// Run by the user.
    pub(crate) fn new(name: impl Into<String>, script: impl Into<String>) -> Self {
        Self { name: name.into(), script: script.into(), root: false, patience: PATIENCE }
    }

    /// Run by root.
    pub(crate) fn as_root(name: impl Into<String>, script: impl Into<String>) -> Self {
        Self { root: true, ..Self::new(name, script) }
    }

    /// A server and a client; `ready` is a command that succeeds once the server listens.
    pub(crate) fn pair(name: impl Into<String>, ready: &str, server: &str, client: &str) -> Self {
        Self::new(name, format!("pair '{ready}' '{server}' '{client}'"))
    }

    /// With a command that must succeed afterwards, in the directory of `server` and `client`.
    pub(crate) fn then(mut self, check: &str) -> Self {
        self.script.push_str(&format!("\n{check} || fail 'not found: '{}", quoted(check)));
        self
    }
}

/// Text as one word of the shell.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Runs a script. The inner result is its output, as an error if it failed; the outer error means
/// that the guest is lost.
pub(crate) fn run_script(vm: &mut Vm, script: &str, root: bool) -> Result<Result<String, String>> {
    run_script_within(vm, script, root, PATIENCE)
}

/// The same with another limit of time.
fn run_script_within(
    vm: &mut Vm,
    script: &str,
    root: bool,
    patience: Duration,
) -> Result<Result<String, String>> {
    let command = ["sh", "-c"].map(str::to_owned).into_iter();
    let command = command.chain([format!("{PRELUDE}\n{script}")]).collect();
    let order = Order { command, root, ..Order::default() };
    let mut printed = Vec::new();
    let ending = vm.run(&order, patience, |event| match event {
        GuestEvent::Stdout(_, bytes) | GuestEvent::Stderr(_, bytes) => {
            printed.extend_from_slice(bytes)
        }
        GuestEvent::Exit(..) => {}
    })?;
    let printed = String::from_utf8_lossy(&printed).into_owned();
    Ok(match ending.status() {
        0 => Ok(printed),
        status => Err(format!("{}\nended with status {status}", tail(&printed))),
    })
}

/// Runs a case, prints its line, and adds its output to the log.
pub(crate) fn run(vm: &mut Vm, case: &Case, log: &mut String) -> Result<Report> {
    let start = Instant::now();
    let result = run_script_within(vm, &case.script, case.root, case.patience);
    stages::case(&case.name, start.elapsed());
    let seconds = start.elapsed().as_secs_f64();
    let outcome = match &result {
        Ok(Ok(_)) => TestOutcome::Passed,
        Ok(Err(why)) => TestOutcome::Failed(why.clone()),
        Err(error) => TestOutcome::Failed(format!("{error:#}")),
    };
    let text = match &result {
        Ok(Ok(text) | Err(text)) => text.as_str(),
        Err(_) => "",
    };
    let word = if outcome == TestOutcome::Passed { "ok" } else { "FAILED" };
    say!("test {} ... {word} ({seconds:.1} s)", case.name);
    log.push_str(&format!("==== {} ... {word} ({seconds:.1} s)\n{text}\n", case.name));
    Ok(Report { name: case.name.clone(), outcome })
}

/// The last lines of a long text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_quoted_as_one_word() {
        assert_eq!(quoted("a 'b' c"), r"'a '\''b'\'' c'");
    }
}
