//! Runs the workspace's examples in a guest, and checks their output.

mod nvme;

use crate::machine::device::{DeviceName, Emulation};
use crate::machine::session::{Machine, Session};
use crate::packages::kernel::KernelName;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::suites::cases::case::{self, Case};
use crate::workspace::{Profile, Workspace};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// The prefix of the names.
const GROUP: &str = "examples";
/// All of them.
const EXAMPLES: &[&str] = &[
    "devices",
    "echo",
    "fan_in",
    "file_transfer",
    "key_value",
    "nvme_read",
    "per_core",
    "per_thread",
    "pingpong",
    "raw_queue",
    "records",
    "remote_memory",
    "requests",
    "shared_var",
    "virtio_queue",
    "xrc_service",
];

/// Those that connect by IP address, which no interface of the lab's InfiniBand ports has.
const BY_ADDRESS: &[&str] = &["echo", "nvme_read"];

/// Whether a filter names examples only, so that no suite need be built.
pub(crate) fn suffices(filter: &str) -> bool {
    filter.split("::").next() == Some(GROUP)
}

/// How a program has to end: with which status, and after how many seconds at the latest.
type Ending = (u8, u32);
const DONE: Ending = (0, 200);
const REFUSED: Ending = (1, 60);

/// A program that ends by itself, and a pattern that a line of its output must match. It may read
/// the file `file`.
fn alone(name: &str, command: &str, (status, patience): Ending, line: &str) -> Case {
    let script = format!(
        "directory=$(mktemp -d) && cd $directory || exit 1\n\
         echo text >file\n\
         timeout {patience} {command} >printed 2>&1; status=$?; cat printed\n\
         [ $status = {status} ] || fail \"ended with $status\""
    );
    Case::new(name, script).then(&format!("grep -Eq \"{line}\" printed"))
}

fn cases(device: DeviceName) -> Vec<Case> {
    let [one, other] = match device {
        DeviceName::Rxe => ["rxe0", "rxe1"],
        DeviceName::Mlx5 => ["mlx5_0", "mlx5_1"],
    };
    let arena = match device {
        DeviceName::Rxe => "the arena was not asked",
        // Two queue pairs, a completion queue and their doorbell records for each thread.
        DeviceName::Mlx5 => "^18 buffers take",
    };
    // A device that lacks something is named, and is no success.
    let (var, virtio, xrc, raw) = match device {
        DeviceName::Rxe => (
            (REFUSED, "driven by"),
            (REFUSED, "driven by"),
            (REFUSED, "rxe0 has no XRC domains"),
            [(REFUSED, "not one of an mlx5 device"), (REFUSED, "driven by")],
        ),
        DeviceName::Mlx5 => (
            (DONE, "^page [0-9]+ was rung with 3$"),
            (DONE, "^the doorbell of VAR [0-9]+ sent 1 frame, 1 used$"),
            (DONE, "^the second worker received .to the second.$"),
            [(DONE, "^given back in state RTS$"), (DONE, "^the engine wrote 1000 numbers$")],
        ),
    };
    // Not a whole number of pieces.
    let size = "3000001";
    let original = format!("(head -c {size} /dev/urandom >/tmp/original)");
    let copied = "cmp /tmp/original copy";
    let bar = r#"grep -q "\[#\{40\}\] 100 % of 3000001 bytes" server"#;
    let mut cases = vec![
        alone("devices", "devices", DONE, one),
        // Not the shell's own.
        alone("echo", "/usr/local/bin/echo", DONE, "^hello, peer$")
            .then("grep -q \"and no unsafe\" printed"),
        alone("key_value", "key_value 800", DONE, "^800 values read"),
        alone("remote_memory", "remote_memory", DONE, r"^afterwards there is \[111, 101,"),
        alone("records", "records", DONE, "^sensor 3: mean 21.5 of 128 values"),
        alone("per_thread", "per_thread 3 2000", DONE, "^3 threads wrote 2000 times each")
            .then(&format!("grep -q \"{arena}\" printed")),
        alone("per_core", "per_core 3 300", DONE, "^3 workers had 300 messages answered each"),
        alone("shared_var", "shared_var", var.0, var.1),
        alone("virtio_queue", "virtio_queue", virtio.0, virtio.1),
        alone("raw_queue", "raw_queue", raw[0].0, raw[0].1),
        alone("raw_queue::devx", "raw_queue devx", raw[1].0, raw[1].1),
        alone("xrc_service", "xrc_service", xrc.0, xrc.1),
        alone("per_thread::many", "per_thread 16 100", DONE, "^16 threads wrote 100 times each"),
        alone("fan_in", "fan_in", DONE, "^1280 messages of 64 clients"),
        alone("fan_in::few", "fan_in 3 5", DONE, "^15 messages of 3 clients"),
        Case::new("file_transfer::original", original),
        Case::pair(
            "file_transfer",
            "tcp 4000",
            "file_transfer receive copy 127.0.0.1:4000",
            "file_transfer send /tmp/original 127.0.0.1:4000",
        )
        .then(copied)
        .then(bar)
        .then(&bar.replace("server", "client")),
        alone("file_transfer::copy", "file_transfer copy /tmp/original copy", DONE, "100 % of")
            .then(copied),
        alone(
            "file_transfer::nobody",
            "file_transfer send file 127.0.0.1:4001",
            REFUSED,
            "127.0.0.1:4001.*refused",
        ),
        // The output must have rates, requests that are dropped early, and the end of the
        // connection.
        alone("requests", "requests 64 4", DONE, "left early: the channel is as it was")
            .then("grep -Eq \"not ready: (0|none)$|not ready: none, and\" printed")
            .then("grep -q \"^the other side left: \" printed"),
        Case::new(
            "requests::two_sides",
            "directory=$(mktemp -d) && cd $directory || exit 1\n\
             requests serve 127.0.0.1:4002 >server 2>&1 & server=$!\n\
             until_true 'tcp 4002' || exit 1\n\
             timeout 200 requests ask 127.0.0.1:4002 32 4 >client 2>&1; status=$?\n\
             until_true 'grep -q left server'; left=$?\n\
             kill $server; cat server client\n\
             [ $status = 0 ] || fail \"the client ended with $status\"\n\
             [ $left = 0 ] || fail 'the server did not hear that the client left'",
        ),
        alone(
            "requests::nobody",
            "requests ask 127.0.0.1:4001",
            REFUSED,
            "127.0.0.1:4001.*refused",
        ),
        Case::pair(
            "pingpong",
            "tcp 18515",
            &format!("pingpong -n 200 -d {other}"),
            &format!("pingpong -n 200 -d {one} 127.0.0.1"),
        )
        .then("grep -q \"µs per iteration\" client"),
        alone("pingpong::both", "pingpong --both -n 200", DONE, "µs per iteration"),
    ];
    cases.extend(nvme::cases());
    cases
}

fn connects_by_address(case: &str) -> bool {
    case.split("::").nth(1).is_some_and(|example| BY_ADDRESS.contains(&example))
}

/// All of them, built, with their names.
pub(crate) fn programs(workspace: &Workspace) -> Result<Vec<(String, PathBuf)>> {
    let program = |name: &&str| {
        let built = workspace.static_example("uverbs", name, "tokio", Profile::Checked)?;
        Ok(((*name).to_owned(), built))
    };
    EXAMPLES.iter().map(program).collect()
}

/// Runs the requested ones in one guest.
pub(crate) fn run(
    session: &Session,
    kernel: KernelName,
    device: DeviceName,
    emulation: Emulation,
    filter: Option<&str>,
    logs: &Path,
) -> Vec<Report> {
    let cases: Vec<Case> = cases(device)
        .into_iter()
        .map(|case| Case { name: format!("{GROUP}::{}", case.name), ..case })
        .filter(|case| filter.is_none_or(|filter| case.name.contains(filter)))
        .collect();
    let label = device.with(emulation);
    say!("\n{GROUP} on {} {label}", kernel.label());
    let (mut reports, mut log) = (Vec::new(), String::new());
    let outcome = (|| {
        let programs = programs(&session.workspace)?;
        let machine = Machine { programs: &programs, emulation, ..Machine::new(kernel, device) };
        let mut vm = session.boot(&machine)?;
        for case in &cases {
            if emulation.infiniband && connects_by_address(&case.name) {
                let why = "[cm] no interface of an InfiniBand port has an IP address".into();
                reports
                    .push(Report { name: case.name.clone(), outcome: TestOutcome::Skipped(why) });
                continue;
            }
            reports.push(case::run(&mut vm, case, &mut log)?);
            ensure!(!vm.ended(), "the machine was lost in {}", case.name);
        }
        vm.power_off()
    })();
    let path = logs.join(format!("{}-{}-{GROUP}.log", kernel.label(), label.replace(' ', "-")));
    let kept = fs::write(&path, log).with_context(|| format!("write {}", path.display()));
    if let Err(error) = outcome.and(kept) {
        let outcome = TestOutcome::Failed(format!("{error:#}"));
        reports.push(Report { name: format!("{GROUP}::machine"), outcome });
    }
    reports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_run() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let mut there: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_dir() || path.extension().is_some_and(|suffix| suffix == "rs"))
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            // On devices of its own, by the tests of the documentation.
            .filter(|name| name != "hello")
            .collect();
        there.sort();
        assert!(BY_ADDRESS.iter().all(|example| EXAMPLES.contains(example)));
        assert!(connects_by_address("examples::nvme_read::deep"));
        assert!(!connects_by_address("examples::requests::nobody"));
        assert_eq!(there, EXAMPLES);
        for device in DeviceName::ALL {
            let cases = cases(device);
            for example in EXAMPLES {
                assert!(cases.iter().any(|case| case.name == *example), "{example}");
            }
        }
        assert!(
            suffices("examples::echo")
                && suffices("examples")
                && !suffices("async::echo_comes_back")
        );
    }
}
