//! Tests of the package elsewhere; `../cargo_runner.rs` judges their output.

use std::{env, fs};

#[test]
fn finds_everything() {
    let devices = fs::read_dir("/sys/class/infiniband").expect("RDMA devices");
    let mut devices: Vec<_> = devices.map(|entry| entry.unwrap().file_name()).collect();
    devices.sort();
    assert_eq!(devices, ["rxe0", "rxe1"]);
    fs::File::options().read(true).write(true).open("/dev/infiniband/uverbs0").unwrap();

    let package = env::var("CARGO_MANIFEST_DIR").unwrap();
    assert_eq!(package, env!("CARGO_MANIFEST_DIR"));
    assert_eq!(package, env::current_dir().unwrap().to_str().unwrap());
    assert_eq!(env::var("CARGO_PKG_VERSION").as_deref(), Ok("1.2.3"));
    assert_eq!(env::var("ELSEWHERE").as_deref(), Ok("given to cargo"));

    assert_eq!(fs::read_to_string("fixture.txt").unwrap(), "of the package");
    fs::write(concat!(env!("CARGO_TARGET_TMPDIR"), "/written"), "by a test").unwrap();
    fs::write("/tmp/of-the-guest", "").unwrap();
}

#[test]
fn fails() {
    panic!("meant to");
}
