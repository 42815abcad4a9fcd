//! Messages of the command line about wrong arguments, and about a machine that lacks something.

use std::path::Path;
use std::process::{Command, Output};

fn uverbs(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_uverbs")).args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn usage_errors_are_objects_with_json() {
    let asked: [&[&str]; 8] = [
        &["pingpong", "rc", "--json", "--size", "0"],
        &["pingpong", "srq", "--json", "--rx-depth", "1"],
        &["pingpong", "xsrq", "--json", "--validate"],
        &["devinfo", "--json", "--nonsense"],
        &["doctor", "--json", "--report"],
        &["cm", "rping", "--json"],
        &["cm", "rping", "--json", "-c"],
        &["cm", "mckey", "--json"],
    ];
    for words in asked {
        let output = uverbs(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let object: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{words:?}: {error}: {}", text(&output.stdout)));
        assert_eq!(object["exit_status"], 2, "{words:?}");
        let error = object["error"].as_str().unwrap();
        assert!(!error.is_empty() && !error.contains('\n'), "{words:?}: {error:?}");
        assert!(!error.starts_with("error"), "{words:?}: {error:?}");
        assert!(!output.stderr.is_empty(), "{words:?}: people read standard error");
    }
    assert!(uverbs(&["cm", "rping"]).stdout.is_empty(), "only where JSON is asked for");
    assert!(uverbs(&["cm", "rping", "--", "--json"]).stdout.is_empty(), "this is no option");
}

#[test]
fn rping_names_both_sides() {
    let said = text(&uverbs(&["cm", "rping"]).stderr);
    assert!(said.contains("--server") && said.contains("--client"), "{said}");
}

#[test]
fn a_group_has_no_server() {
    let help = text(&uverbs(&["cm", "mckey", "--help"]).stdout);
    assert!(!help.contains("server"), "{help}");
    assert!(help.contains("receivers first"), "{help}");
}

#[test]
fn refused_options_are_not_in_the_help() {
    for words in [["pingpong", "xsrq", "--help"], ["pingpong", "xsrq", "-h"]] {
        let help = text(&uverbs(&words).stdout);
        assert!(help.contains("--clients") && !help.contains("validate"), "{help}");
    }
    assert!(text(&uverbs(&["pingpong", "rc", "--help"]).stdout).contains("--validate"));
}

/// The server and the client fail for the same reason, and print the same message.
#[test]
fn without_a_connection_manager_both_sides_name_the_module_to_load() {
    if Path::new("/sys/class/misc/rdma_cm").exists() {
        return;
    }
    let sides: [&[&str]; 7] = [
        &["cm", "rping", "-s"],
        &["cm", "rping", "-c", "-a", "127.0.0.1"],
        &["cm", "ucmatose"],
        &["cm", "ucmatose", "-s", "127.0.0.1"],
        &["cm", "udaddy"],
        &["cm", "udaddy", "-s", "127.0.0.1"],
        &["cm", "mckey", "-m", "239.1.2.3"],
    ];
    for words in sides {
        let output = uverbs(words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {said}");
        assert!(said.contains("modprobe rdma_ucm"), "{words:?}: {said}");
        assert!(!said.contains("what to do"), "{words:?}: the message says it: {said}");
    }
}

#[test]
fn the_doctor_has_no_empty_finding() {
    let output = uverbs(&["doctor", "-v"]);
    for line in text(&output.stdout).lines() {
        assert!(!line.trim_end().ends_with(':'), "an empty finding: {line:?}");
    }
    if !Path::new("/sys/module/ib_core").exists() {
        let said = text(&output.stdout);
        assert!(!said.contains("AF_NETLINK"), "nothing forbids netlink: {said}");
    }
}
