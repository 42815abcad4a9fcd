//! Every connected operation at every place of a small ring, for RC and for XRC: the unchecked and the checked
//! path write the bytes that this file computes independently.

use super::{BUFFER, QPN, Sender, Shape};
use crate::number::{Lkey, Rkey, SrqNumber};
use crate::wr::{MaskedSwap, Remote, SendWr, Sge};

const WQEBBS: u32 = 16;
const REMOTE: Remote = Remote { addr: 0x0102_0304_0506_0708, rkey: Rkey(0x0a0b_0c0d) };
const SRQ: SrqNumber = SrqNumber(0x01_2345);
const MASKED: MaskedSwap = MaskedSwap { compare: 1, compare_mask: 2, swap: 3, swap_mask: 4 };
/// Lengths of inline data: less than a segment; up to the end of an RC request's first WQEBB, and
/// beyond; over several WQEBBs.
const INLINE: [usize; 6] = [1, 12, 28, 29, 44, 200];

/// A request, and the WQE that the device must find: the opcode, the immediate, and all segments behind the
/// control segment and the XRC segment.
struct Case<'a> {
    wr: SendWr<'a>,
    opcode: u8,
    immediate: u32,
    body: Vec<u8>,
    /// Whether it may take the unchecked path at all.
    unchecked: bool,
}

fn raddr() -> Vec<u8> {
    [&REMOTE.addr.to_be_bytes()[..], &REMOTE.rkey.0.to_be_bytes(), &[0; 4]].concat()
}

fn pointers(sges: &[Sge]) -> Vec<u8> {
    let pointer = |sge: &Sge| {
        let Sge { addr, length, lkey } = *sge;
        [&length.to_be_bytes()[..], &lkey.0.to_be_bytes(), &addr.to_be_bytes()].concat()
    };
    sges.iter().filter(|sge| sge.length > 0).flat_map(pointer).collect()
}

fn inline(bytes: &[u8]) -> Vec<u8> {
    [&(1 << 31 | bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// The operations with these SGEs, whose lengths make up the eight bytes of an atomic.
fn gathered<'a>(sges: &'a [Sge]) -> Vec<Case<'a>> {
    let case = |wr, opcode, immediate, parts: &[Vec<u8>]| {
        let body = [parts.concat(), pointers(sges)].concat();
        Case { wr, opcode, immediate, body, unchecked: true }
    };
    vec![
        case(SendWr::send(sges), 0x0a, 0, &[]),
        case(SendWr::send_imm(sges, 0x0102_0304).signaled(), 0x0b, 0x0102_0304, &[]),
        case(SendWr::send_inv(sges, Rkey(7)).fence(), 0x01, 7, &[]),
        case(SendWr::write(REMOTE, sges), 0x08, 0, &[raddr()]),
        case(SendWr::write_imm(REMOTE, sges, 9).solicited(), 0x09, 9, &[raddr()]),
        case(SendWr::read(REMOTE, sges).signaled(), 0x10, 0, &[raddr()]),
        case(SendWr::compare_swap(REMOTE, 3, 5, sges), 0x11, 0, &[raddr(), words(&[5, 3])]),
        case(SendWr::fetch_add(REMOTE, 7, sges).fence(), 0x12, 0, &[raddr(), words(&[7, 0])]),
        Case {
            unchecked: false,
            ..case(
                SendWr::masked_compare_swap(REMOTE, &MASKED, sges),
                0x14,
                0,
                &[raddr(), words(&[3, 1, 4, 2])],
            )
        },
        Case {
            unchecked: false,
            ..case(
                SendWr::masked_fetch_add(REMOTE, 7, 8, sges),
                0x15,
                0,
                &[raddr(), words(&[7, 8])],
            )
        },
    ]
}

/// The operations with these bytes.
fn inlined(bytes: &[u8]) -> Vec<Case<'_>> {
    let case = |wr: SendWr<'static>, opcode, immediate, parts: &[Vec<u8>]| {
        let body = [parts.concat(), inline(bytes)].concat();
        Case { wr: wr.inline(bytes), opcode, immediate, body, unchecked: true }
    };
    vec![
        case(SendWr::send(&[]), 0x0a, 0, &[]),
        case(SendWr::send_imm(&[], 0x0102_0304).signaled(), 0x0b, 0x0102_0304, &[]),
        case(SendWr::send_inv(&[], Rkey(7)).fence(), 0x01, 7, &[]),
        case(SendWr::write(REMOTE, &[]), 0x08, 0, &[raddr()]),
        case(SendWr::write_imm(REMOTE, &[], 9).solicited(), 0x09, 9, &[raddr()]),
    ]
}

impl Case<'_> {
    /// The whole WQE, which begins at the WQEBB `at`.
    fn wqe(&self, at: u32) -> Vec<u8> {
        let target = self.wr.srq.map(|srq| words(&[u64::from(srq.0) << 32, 0]));
        let rest = [target.unwrap_or_default(), self.body.clone()].concat();
        let flags = format!("{:?}", self.wr.flags);
        let bit = |name: &str, bit: u8| if flags.contains(name) { bit } else { 0 };
        let modifier = if self.opcode == 0x14 || self.opcode == 0x15 { 9 } else { 0 };
        let [_, _, high, low] = at.to_be_bytes();
        let segments = 1 + rest.len().div_ceil(16);
        let mut wqe = vec![modifier, high, low, self.opcode];
        wqe.extend((QPN << 8 | segments as u32).to_be_bytes());
        wqe.extend([0, 0, 0, bit("SIGNALED", 8) | bit("SOLICITED", 2) | bit("FENCE", 0x80)]);
        wqe.extend(self.immediate.to_be_bytes());
        wqe.extend(rest);
        wqe
    }
}

/// A queue whose next WQE begins at the WQEBB `at`, and whose memory shows every store after that.
fn sender_at(at: u32) -> Sender {
    let mut sends = Sender::new(Shape { wqebbs: WQEBBS, max_post: 2, ..Shape::default() });
    for before in 0..at {
        sends.post(&[SendWr::send(&[])]).unwrap();
        sends.qp.sends.complete(before);
    }
    for segment in 0..WQEBBS * 4 {
        sends.device.write(segment, [0xa5a5_a5a5_a5a5_a5a5; 2]);
    }
    sends
}

fn check(case: &Case<'_>, at: u32, checked: bool, single: bool) {
    let of = format!("{:?} at WQEBB {at}, checked: {checked}, single: {single}", case.wr);
    // A batch begins with another WQE, of one WQEBB.
    let first = if single { at } else { at - 1 };
    let mut sends = sender_at(first);
    let mut cursor = sends.ring.begin();
    if !single {
        sends.push(&mut cursor, &SendWr::send(&[])).unwrap();
    }
    let wr = case.wr.id(77);
    if checked || !case.unchecked {
        sends.push_checked(&mut cursor, &wr).expect(&of);
    } else {
        assert!(sends.try_push(&mut cursor, &wr), "{of}");
    }
    let wqe = case.wqe(at);
    let wqebbs = wqe.len().div_ceil(64) as u32;
    assert_eq!((cursor.at, cursor.room), (at + wqebbs, u32::from(single)), "{of}");
    let mut expected = wqe.clone();
    expected.resize(WQEBBS as usize * 64, 0xa5);
    if !single {
        let filler = Case {
            wr: SendWr::send(&[]),
            opcode: 0x0a,
            immediate: 0,
            body: Vec::new(),
            unchecked: true,
        };
        let last = expected.len() - 64;
        expected[last..last + 16].copy_from_slice(&filler.wqe(first));
    }
    // The whole ring, from the WQE's first WQEBB on: nothing else was written.
    assert_eq!(sends.bytes(at, expected.len()), expected, "{of}");

    sends.ring.ring(&cursor, single).unwrap();
    assert_eq!(sends.dbrec.get(1), at + wqebbs, "{of}");
    let buffer = if first % 2 == 0 { 0 } else { BUFFER };
    let copied = if single && wqe.len() <= BUFFER { wqebbs as usize * 64 } else { 8 };
    assert_eq!(sends.page.bytes(buffer, copied), expected[..copied], "{of}");
    assert_eq!(sends.qp.sends.complete(at).wr_id, 77, "{of}");
}

/// Every WQE longer than a WQEBB is also placed so that it wraps around the ring's end.
#[test]
fn unchecked_and_checked_requests_have_the_same_bytes_wherever_they_begin() {
    let data: Vec<u8> = (1..=200).collect();
    let lengths: [&[u32]; 5] = [&[8], &[4, 4], &[2, 0, 6], &[2, 2, 4], &[2, 2, 2, 2]];
    let sges: Vec<Vec<Sge>> = lengths
        .iter()
        .map(|lengths| {
            let sge = |(n, length): (u64, &u32)| {
                let lkey = Lkey(0x0104_0400 + n as u32);
                Sge { addr: 0x1122_3344_5566_7788 + n, length: *length, lkey }
            };
            (0..).zip(lengths.iter()).map(sge).collect()
        })
        .collect();
    let gathered = sges.iter().flat_map(|sges| gathered(sges));
    let inlined = INLINE.iter().flat_map(|length| inlined(&data[..*length]));
    // Slices of each way to copy one: of each length whose ends are copied, and of less and more.
    let slices: [&[&[u8]]; 4] = [
        &[&data[..16], &data[16..32], &data[32..48], &data[48..64]],
        &[&data[..1], &[], &data[1..40], &data[40..110], &data[110..127], &data[127..143]],
        &[&data[..65], &data[65..77]],
        &[&data[..17]],
    ];
    let listed = slices.iter().zip([64, 143, 77, 17]).flat_map(|(slices, length)| {
        self::inlined(&data[..length])
            .into_iter()
            .map(|case| Case { wr: case.wr.inline_list(slices), ..case })
    });
    let cases: Vec<Case<'_>> = gathered.chain(inlined).chain(listed).collect();
    assert_eq!(cases.len(), 5 * 10 + 6 * 5 + 4 * 5);
    let places = if cfg!(miri) { WQEBBS - 1..WQEBBS } else { 1..WQEBBS + 1 };
    // A step that meets a list: the last twenty cases.
    let step = if cfg!(miri) { 31 } else { 1 };
    for case in cases.into_iter().step_by(step) {
        let Case { wr, opcode, immediate, body, unchecked } = case;
        for wr in [wr, wr.to_srq(SRQ)] {
            let case = Case { wr, opcode, immediate, body: body.clone(), unchecked };
            for at in places.clone() {
                for (checked, single) in
                    [(false, true), (true, true), (false, false), (true, false)]
                {
                    check(&case, at, checked, single);
                }
            }
        }
    }
}
