//! Decoders alone: inputs reach deeper into them than through a whole guest.

use uverbs_connectx::cmd::mailbox::{self, BLOCK, DATA, xor};
use uverbs_connectx::format::wqe::{CtrlSegment, DataSegment, WqeSegments};
use uverbs_connectx::guest::GuestMemory;

use arbitrary::{Result, Unstructured};

use crate::corpus::Traits;

const MEMORY: u64 = 1 << 15;
const TOKEN: u8 = 7;

/// A mailbox chain with some valid blocks, read for a length that may be out of range.
pub(crate) fn mailbox(input: &[u8]) -> Traits {
    let mut traits = Traits::new();
    // The walk ends when the input is used up.
    let _ = walk(&mut Unstructured::new(input), &mut traits);
    traits
}

fn walk(u: &mut Unstructured<'_>, traits: &mut Traits) -> Result<()> {
    let memory = GuestMemory::plain(0, MEMORY as usize).unwrap();
    let blocks: u32 = u.int_in_range(1..=8)?;
    for number in 0..blocks {
        let mut block = [0; BLOCK];
        block[..8].copy_from_slice(&u.arbitrary::<u64>()?.to_be_bytes());
        let next = match u.int_in_range(0..=6)? {
            0 => u.arbitrary()?,
            1 => MEMORY - BLOCK as u64 / 2,
            2 => u.int_in_range(0..=MEMORY)?,
            _ => u64::from(number + 2) * 1024,
        };
        block[560..568].copy_from_slice(&next.to_be_bytes());
        let said = if u.ratio(1, 8)? { u.arbitrary()? } else { number };
        block[568..572].copy_from_slice(&said.to_be_bytes());
        block[573] = if u.ratio(1, 8)? { u.arbitrary()? } else { TOKEN };
        if u.ratio(1, 2)? {
            block[574] = !xor(&block[512..574]);
            block[575] = !xor(&block[..575]);
        }
        if u.ratio(1, 8)? {
            block[u.choose_index(BLOCK)?] ^= 1 << u.int_in_range(0..=7)?;
        }
        memory.write(u64::from(number + 1) * 1024, &block).unwrap();
    }
    let len = match u.int_in_range(0..=3)? {
        0 => u.int_in_range(0..=16 << 20)?,
        _ => u.int_in_range(0..=blocks as usize * DATA)?,
    };
    let mut read = Vec::new();
    let result = mailbox::read(&memory, 1024, len, TOKEN, &mut read);
    assert!(result.is_err() || read.len() == len);
    traits.insert((
        0,
        result.map_or_else(|delivery| delivery as u32, |()| 0),
        read.len() as u32 / 512,
    ));
    let result = mailbox::write(&memory, 1024, &vec![1; len], TOKEN);
    traits.insert((1, result.map_or_else(|delivery| delivery as u32, |()| 0), 0));
    // A chain that was written can be read back.
    if result.is_ok() {
        let mut read = Vec::new();
        assert_eq!(mailbox::read(&memory, 1024, len, TOKEN, &mut read), Ok(()));
        assert_eq!(read, vec![1; len]);
    }
    Ok(())
}

/// A WQE, parsed in each way in which a service may parse it.
pub(crate) fn request(input: &[u8]) -> Traits {
    let mut traits = Traits::new();
    let Some((shape, bytes)) = input.split_first() else { return traits };
    let Some(control) = bytes.first_chunk::<16>().map(CtrlSegment::parse) else { return traits };
    assert!((1..=16).contains(&control.wqebbs()));
    let mut segments = WqeSegments::new(&control, bytes);
    let before = segments.rest().len();
    assert!(before <= usize::from(control.ds) * 16);
    let head = match shape % 8 {
        0 => segments.xrc().is_ok(),
        1 => segments.address_vector().is_ok(),
        2 => segments.remote().is_ok(),
        3 => {
            segments.remote().is_ok()
                && control
                    .atomic_len()
                    .is_some_and(|len| segments.atomic(control.opcode, len).is_ok())
        }
        4 => segments.umr().is_ok(),
        5 => segments.ethernet().is_ok(),
        6 => segments.xrc().is_ok() && segments.remote().is_ok(),
        _ => true,
    };
    assert!(segments.rest().len() <= before);
    let gather = segments.data_segments();
    let pieces = gather.map_or(99, Iterator::count);
    if let Ok(list) = gather {
        let inline: usize = list
            .map(|piece| match piece {
                DataSegment::Inline(bytes) => bytes.len(),
                DataSegment::Memory(_) => 0,
            })
            .sum();
        assert!(inline <= before, "{inline} bytes inline of {before}");
    }
    traits.insert((u32::from(shape % 8), u32::from(head), pieces as u32));
    traits
}
