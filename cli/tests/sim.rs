//! `--sim`: commands on devices in the process. No device of the machine is needed.

use std::process::{Command, Output};

fn uverbs(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_uverbs")).args(words).output().unwrap()
}

/// The output of a command, which has to end with status 0.
fn printed(words: &[&str]) -> String {
    let output = uverbs(words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn devices_are_shown_as_those_of_a_machine() {
    let listed: serde_json::Value =
        serde_json::from_str(&printed(&["--sim", "devinfo", "--json"])).unwrap();
    let names: Vec<_> = listed["devices"].as_array().unwrap().iter().map(|d| &d["name"]).collect();
    assert_eq!(names, ["mlx5_0", "mlx5_1"]);
    assert_eq!(printed(&["devinfo", "--sim=3"]).matches("port 1 ").count(), 3);
    let doctor = printed(&["doctor", "--sim=1"]);
    assert!(doctor.contains("ok   devices: mlx5_0 (mlx5)"), "{doctor}");
}

#[test]
fn a_pingpong_plays_both_sides() {
    // With events, because two spinning threads would wait for each other's processor.
    for kind in ["rc", "uc", "ud", "srq"] {
        let text = printed(&["--sim", "pingpong", kind, "-e", "-c", "-n", "100"]);
        assert!(text.contains("every byte is right"), "{text}");
        assert_eq!(text.matches("100 iterations").count(), 1, "{text}");
    }
}

#[test]
fn there_is_a_device_at_least_and_64_at_most() {
    for count in ["0", "65", "two"] {
        let output = uverbs(&[&format!("--sim={count}"), "devinfo"]);
        assert_eq!(output.status.code(), Some(2), "{count}");
    }
}
