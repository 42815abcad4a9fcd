//! The recording of a message from one queue pair to another.

mod driver;

use std::fs::File;

use driver::Driver;
use uverbs_connectx::recording::{DoorbellCounter, Entry, Recorder, Recording};
use uverbs_uapi::mlx5::prm::mkc::mkc;

#[test]
fn a_message_is_recorded_in_order() {
    let path = std::env::temp_dir().join(format!("connectx-{}.record", std::process::id()));
    let mut driver = Driver::new();
    *driver.fabric.function(0).device_mut().recorder_mut() = Recorder::create(&path, 0).unwrap();
    driver.set_gid();
    let eqn = driver.eq();
    let (cqn, cqes) = driver.cq(eqn);
    let (mut a, mut b) = (driver.qp(0, cqn), driver.qp(0, cqn));
    driver.connect(&a, &b);
    driver.connect(&b, &a);
    let data = driver.alloc_page();
    let key = driver.mkey(data, 4096, &[mkc::lr, mkc::lw]);
    driver.post_receive(&mut b, &Driver::segment(64, key, data));
    driver.post_send(&mut a, 0x0a, 0, &Driver::segment(8, key, data + 64));
    let completions = [driver.cqe(cqes, 0).1, driver.cqe(cqes, 1).1];
    driver.fabric.function(0).device_mut().reset();
    driver.fabric.function(0).device_mut().recorder_mut().flush();

    let mut recording = Recording::new(File::open(&path).unwrap()).unwrap();
    let mut names = Vec::new();
    let mut written = Vec::new();
    let mut commands = 0;
    while let Some((_, entry)) = recording.next_entry().unwrap() {
        names.push(match entry {
            Entry::Command { .. } => {
                commands += 1;
                continue;
            }
            Entry::CommandOutput { slot, delivery, output } => {
                assert_eq!((slot, delivery, output[0]), (0, 0, 0));
                commands -= 1;
                continue;
            }
            // The command doorbell.
            Entry::Write { offset: 0x18, .. } => continue,
            Entry::Write { offset, bytes } => {
                assert_eq!(offset % 4096, 0x800);
                assert_eq!(bytes[4..8], [0, (a.number >> 8) as u8, a.number as u8, 2]);
                "doorbell"
            }
            // The device also reads the records before anything is posted.
            Entry::DoorbellRecord { value: 0, .. } => continue,
            Entry::DoorbellRecord { counter: DoorbellCounter::Sq, number, value } => {
                assert_eq!((number, value), (a.number, 1));
                "send record"
            }
            Entry::DoorbellRecord { counter: DoorbellCounter::QpRq, number, value } => {
                assert_eq!((number, value), (b.number, 1));
                "receive record"
            }
            Entry::DoorbellRecord { .. } => "another record",
            Entry::Wqe { service, blue_flame, index, number, bytes } => {
                assert_eq!((service, blue_flame, index, number), (0, false, 0, a.number));
                assert_eq!(
                    (bytes.len(), &bytes[16..32]),
                    (64, &Driver::segment(8, key, data + 64)[..])
                );
                "request"
            }
            Entry::ReceiveWqe { linked, index, number, bytes, .. } => {
                assert_eq!((linked, index, number), (false, 0, b.number));
                assert_eq!(bytes, Driver::segment(64, key, data));
                "receive"
            }
            Entry::Cqe { number, bytes, .. } => {
                assert_eq!(number, cqn);
                written.push(bytes);
                "completion"
            }
            Entry::Eqe { .. } => "event",
            Entry::Reset => "reset",
            Entry::Fate { .. } | Entry::Refusal { .. } | Entry::Packet { .. } => "fault",
        });
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(commands, 0);
    assert_eq!(written, completions);
    let order = [
        "doorbell",
        "send record",
        "request",
        "receive record",
        "receive",
        "completion",
        "completion",
        "reset",
    ];
    assert_eq!(names, order);
}
