//! Fairness: a poll ends after a certain cost, so that other guests need not wait.

mod driver;

use driver::Driver;
use driver::pair::{Pair, code};
use uverbs_uapi::mlx5::prm::Field;
use uverbs_uapi::mlx5::prm::mkc::mkc;

const KLMS: u64 = 2;
/// Entries of a list.
const ENTRIES: usize = 448;
/// WQEs to post.
const REQUESTS: u64 = 12;

/// A KLM list whose last `bytes` entries name one byte each; the other entries are empty.
fn list(driver: &mut Driver, bytes: usize, key: u32, address: u64) -> u32 {
    let rights: [(Field<mkc>, u64); 3] =
        [(mkc::access_mode_1_0, KLMS), (mkc::lr, 1), (mkc::len, bytes as u64)];
    let mut entries = vec![0; (ENTRIES - bytes) * 16];
    (0..bytes).for_each(|_| entries.extend(Driver::segment(1, key, address)));
    driver.mkey_with(&rights, &entries)
}

#[test]
fn costly_wqes_end_a_poll_early() {
    let mut p = Pair::new();
    let inner = list(&mut p.driver, 1, p.key, p.from);
    let outer = list(&mut p.driver, ENTRIES, inner, 0);
    // Each WQE looks at 448 times 448 entries.
    let write = [Pair::remote(p.to, p.key), Driver::segment(ENTRIES as u32, outer, 0)].concat();
    for _ in 0..REQUESTS {
        p.driver.queue_send(&mut p.a, code::WRITE, 0, &write);
    }
    let now = p.driver.now();
    let mut turns = 1;
    let mut done = vec![];
    while p.driver.fabric.poll(now) {
        done.push((0..64).filter(|index| p.driver.cqe(p.sent, *index).0 == code::REQUEST).count());
        turns += 1;
    }
    assert!(turns > 1, "all in one turn");
    assert!(done[0] > 0 && done[0] < 8, "{} in the first turn", done[0]);
    for index in 0..REQUESTS {
        assert_eq!(p.driver.cqe(p.sent, index).0, code::REQUEST);
    }
}
