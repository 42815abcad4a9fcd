//! Payloads that stay in memory of the sender until their packets arrive: the device reads none of them once the memory
//! may be somebody else's.

mod driver;

use driver::Driver;
use driver::pair::Pair;
use driver::pair::code::*;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use uverbs_connectx::recording::Recorder;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::{opcode, qpc::qpc};

/// Bytes of a message: five packets, of which those in the middle leave as one unit.
const LONG: usize = 5 * 1024;
/// The byte of a program that uses its memory again.
const LATER: u8 = 0xee;

fn data() -> Vec<u8> {
    (0..LONG).map(|at| (at % 200) as u8).collect()
}

/// A program that writes to a page as soon as there is a CQE: a recording learns of it at once.
struct Program {
    memory: File,
    page: u64,
}

impl Write for Program {
    fn write(&mut self, entry: &[u8]) -> io::Result<usize> {
        /// The kind of entries with a CQE.
        const CQE: u8 = 7;
        if entry.get(4) == Some(&CQE) {
            self.memory.write_all_at(&[LATER; LONG], self.page)?;
        }
        Ok(entry.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Program {
    fn start(driver: &mut Driver, page: u64) {
        let program = Program { memory: driver.share_memory(), page };
        *driver.fabric.function(0).device_mut().recorder_mut() = Recorder::new(program, 0).unwrap();
    }
}

/// A pair whose pages are two each.
fn with_room(mut p: Pair) -> Pair {
    let mut two = || [p.driver.alloc_page(), p.driver.alloc_page()][0];
    (p.from, p.to) = (two(), two());
    p.key = p.driver.mkey(p.from, 4 * 4096, &[mkc::lr, mkc::lw, mkc::rr, mkc::rw]);
    p
}

fn read(p: &mut Pair, at: u64) -> Vec<u8> {
    let mut bytes = vec![0; LONG];
    p.driver.memory().read(at, &mut bytes).unwrap();
    bytes
}

/// The first packets of a write leave before its second SGE is refused.
#[test]
fn packets_of_a_request_that_fails_carry_the_data_from_before_its_cqe() {
    const PROTECTION: u8 = 0x04;
    let mut p = with_room(Pair::new());
    p.driver.memory().write(p.from, &data()).unwrap();
    let (to, from) = (p.to, p.from);
    Program::start(&mut p.driver, from);
    let refused = Driver::segment(8, p.key ^ 1, from);
    let segments = [Pair::remote(to, p.key), p.local(LONG as u32), refused].concat();
    p.driver.post_send(&mut p.a, WRITE, 0, &segments);
    let (code, cqe) = p.driver.cqe(p.sent, 0);
    assert_eq!((code, cqe[55]), (REQUEST_ERROR, PROTECTION));
    assert_eq!(read(&mut p, from), [LATER; LONG]);
    assert!(read(&mut p, to) == data());
}

/// The responder's program invalidates the key in the turn in which its device answers the read.
#[test]
fn the_response_to_a_read_carries_the_data_from_before_an_invalidation() {
    const LOCAL_INVALIDATE: u8 = 0x1b;
    let mut p = with_room(Pair::with(&[], &[(qpc::fre, 1)]));
    let (to, from) = (p.to, p.from);
    p.driver.memory().write(to, &data()).unwrap();
    let rights = [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::umr_en];
    let key = p.driver.mkey(to, 8192, &rights);
    Program::start(&mut p.driver, to);
    let segments = [Pair::remote(to, key), p.local(LONG as u32)].concat();
    p.driver.queue_send(&mut p.a, READ, 0, &segments);
    p.driver.queue_send(&mut p.b, LOCAL_INVALIDATE, key, &[]);
    p.driver.run();
    assert_eq!(p.driver.cqe(p.received, 0).0, REQUEST);
    assert_eq!(p.driver.cqe(p.sent, 0).0, REQUEST);
    assert!(read(&mut p, from) == data());
}

/// At each moment of a read or a write: its data is from before, or there is none.
#[test]
fn a_destroyed_key_gives_no_access_to_what_is_there_later() {
    for (code, steps) in [READ, WRITE].into_iter().flat_map(|code| (0..9).map(move |at| (code, at)))
    {
        let mut p = with_room(Pair::new());
        let (near, far) = (p.from, p.to);
        let (from, to) = if code == READ { (far, near) } else { (near, far) };
        p.driver.memory().write(from, &data()).unwrap();
        let key = p.driver.mkey(from, 8192, &[mkc::rr, mkc::lr]);
        let (remote, local) = if code == READ { (key, p.key) } else { (p.key, key) };
        let local = Driver::segment(LONG as u32, local, near);
        let segments = [Pair::remote(far, remote), local].concat();
        p.driver.queue_send(&mut p.a, code, 0, &segments);
        for _ in 0..steps {
            p.driver.fabric.run_ready(0);
        }
        let ended = p.driver.cqe(p.sent, 0).0 != NONE;
        p.driver.run_command_on(opcode::DESTROY_MKEY, key >> 8).unwrap();
        p.driver.memory().write(from, &[LATER; LONG]).unwrap();
        p.driver.run();
        let taken = read(&mut p, to);
        match p.driver.cqe(p.sent, 0).0 {
            REQUEST => assert!(taken == data(), "{code} {steps}"),
            status => {
                assert!(status == REQUEST_ERROR && !taken.contains(&LATER), "{code} {steps}");
            }
        }
        assert!(ended || steps < 8, "{code} {steps}");
    }
}

/// Packets of a write whose memory overlaps that of the peer are written one after the other.
#[test]
fn a_write_to_memory_that_it_overlaps_is_that_of_its_packets() {
    /// Bytes of four packets, and how far they move.
    const BYTES: usize = 4000;
    const BY: usize = 512;
    let mut p = Pair::new();
    let from = p.from;
    let mut expected: Vec<u8> = (0..BYTES + BY).map(|at| (at * 7 + at / 251) as u8).collect();
    p.driver.memory().write(from, &expected).unwrap();
    let segments = [Pair::remote(from + BY as u64, p.key), p.local(BYTES as u32)].concat();
    p.driver.post_send(&mut p.a, WRITE, 0, &segments);
    for at in (0..BYTES).step_by(1024) {
        expected.copy_within(at..BYTES.min(at + 1024), at + BY);
    }
    let mut written = vec![0; BYTES + BY];
    p.driver.memory().read(from, &mut written).unwrap();
    assert!(written == expected);
}

/// A list of regions that lie one behind the other, and of others: both have the same turns.
#[test]
fn turns_do_not_follow_from_where_the_regions_of_a_list_lie() {
    const KLMS: u64 = 2;
    const REGIONS: usize = 4;
    let turns = |apart: bool| {
        let mut p = Pair::new();
        let regions = [(); REGIONS].map(|()| {
            let page = p.driver.alloc_page();
            (0..usize::from(apart)).for_each(|_| _ = p.driver.alloc_page());
            page
        });
        let to = [(); REGIONS].map(|()| p.driver.alloc_page())[0];
        let into = p.driver.mkey(to, REGIONS as u64 * 4096, &[mkc::rw]);
        let entries: Vec<u8> = regions
            .iter()
            .flat_map(|page| {
                let key = p.driver.mkey(*page, 4096, &[mkc::lr]);
                let size = 4096u32.to_be_bytes();
                [&size[..], &key.to_be_bytes(), &page.to_be_bytes()].concat()
            })
            .collect();
        let len = REGIONS as u32 * 4096;
        let fields = [(mkc::access_mode_1_0, KLMS), (mkc::lr, 1), (mkc::len, len.into())];
        let list = p.driver.mkey_with(&fields, &entries);
        let segments = [Pair::remote(to, into), Driver::segment(len, list, 0)].concat();
        p.driver.queue_send(&mut p.a, WRITE, 0, &segments);
        let mut turns = Vec::new();
        while p.driver.fabric.ready() > 0 {
            turns.push(p.driver.fabric.ready());
            p.driver.fabric.run_ready(0);
        }
        assert_eq!(p.driver.cqe(p.sent, 0).0, REQUEST);
        turns
    };
    assert_eq!(turns(false), turns(true));
}
