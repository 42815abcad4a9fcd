//! Mailbox chains: the part of a command's input and output that does not fit the command queue
//! entry.
//!
//! Pairs with `mlx5_alloc_cmd_msg` of mlx5_core. The device reads as many blocks as the length
//! needs, so a cyclic chain ends. Each block repeats its number and the token.

use crate::guest::GuestMemory;

/// Data bytes of a block.
pub const DATA: usize = 512;
/// Bytes of a block.
pub const BLOCK: usize = 576;
const NEXT: usize = 560;
const NUMBER: usize = 568;
const TOKEN: usize = 573;
const CONTROL_SIGNATURE: usize = 574;
const SIGNATURE: usize = 575;
/// Offset of the part that the control signature covers.
const CONTROL: usize = 512;

/// Delivery status: an error of the command's delivery, not of the command.
#[allow(missing_docs, reason = "the driver's names, MLX5_CMD_DELIVERY_STAT_*")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum DeliveryStatus {
    Signature = 0x1,
    Token = 0x2,
    BlockNumber = 0x3,
    OutputPointer = 0x4,
    InputPointer = 0x5,
    InputLength = 0x7,
    OutputLength = 0x8,
    Descriptor = 0x10,
}

/// The direction of a chain: each has its own status for a bad pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Input,
    Output,
}

impl Direction {
    fn bad_pointer(self) -> DeliveryStatus {
        match self {
            Direction::Input => DeliveryStatus::InputPointer,
            Direction::Output => DeliveryStatus::OutputPointer,
        }
    }
}

/// XOR of all bytes. Over an area with its signature it is 0xff.
pub fn xor(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum ^ byte)
}

fn block(
    memory: &GuestMemory,
    address: u64,
    number: usize,
    token: u8,
    direction: Direction,
) -> Result<[u8; BLOCK], DeliveryStatus> {
    if address == 0 || address % 64 != 0 {
        return Err(direction.bad_pointer());
    }
    let mut bytes = [0; BLOCK];
    memory.read(address, &mut bytes).map_err(|_| direction.bad_pointer())?;
    let block_number = u32::from_be_bytes([
        bytes[NUMBER],
        bytes[NUMBER + 1],
        bytes[NUMBER + 2],
        bytes[NUMBER + 3],
    ]);
    if block_number as usize != number {
        return Err(DeliveryStatus::BlockNumber);
    }
    if bytes[TOKEN] != token {
        return Err(DeliveryStatus::Token);
    }
    let control = xor(&bytes[CONTROL..SIGNATURE]);
    if is_signed(&bytes)
        && (control != 0xff || direction == Direction::Input && xor(&bytes) != 0xff)
    {
        return Err(DeliveryStatus::Signature);
    }
    Ok(bytes)
}

/// A driver signs blocks, or leaves both signatures zero.
fn is_signed(bytes: &[u8; BLOCK]) -> bool {
    bytes[CONTROL_SIGNATURE] != 0 || bytes[SIGNATURE] != 0
}

fn next(bytes: &[u8; BLOCK]) -> u64 {
    let mut next = [0; 8];
    next.copy_from_slice(&bytes[NEXT..NEXT + 8]);
    u64::from_be_bytes(next)
}

/// Appends `len` bytes of the chain at `address` to `to`.
///
/// # Errors
/// The delivery status of a broken chain.
pub fn read(
    memory: &GuestMemory,
    mut address: u64,
    len: usize,
    token: u8,
    to: &mut Vec<u8>,
) -> Result<(), DeliveryStatus> {
    for number in 0..len.div_ceil(DATA) {
        let bytes = block(memory, address, number, token, Direction::Input)?;
        let take = (len - number * DATA).min(DATA);
        to.extend_from_slice(&bytes[..take]);
        address = next(&bytes);
    }
    Ok(())
}

/// Checks that a chain at `address` has room for `len` bytes.
///
/// # Errors
/// The delivery status of a broken chain.
pub fn check(
    memory: &GuestMemory,
    mut address: u64,
    len: usize,
    token: u8,
) -> Result<(), DeliveryStatus> {
    for number in 0..len.div_ceil(DATA) {
        let bytes = block(memory, address, number, token, Direction::Output)?;
        memory.writable(address, BLOCK).map_err(|_| DeliveryStatus::OutputPointer)?;
        address = next(&bytes);
    }
    Ok(())
}

/// Writes `data` to the chain at `address`, whose blocks the driver has prepared.
///
/// # Errors
/// The delivery status of a broken chain; blocks before the broken one are written.
pub fn write(
    memory: &GuestMemory,
    mut address: u64,
    data: &[u8],
    token: u8,
) -> Result<(), DeliveryStatus> {
    for (number, data) in data.chunks(DATA).enumerate() {
        let mut bytes = block(memory, address, number, token, Direction::Output)?;
        bytes[..data.len()].copy_from_slice(data);
        if is_signed(&bytes) {
            bytes[CONTROL_SIGNATURE] = !xor(&bytes[CONTROL..CONTROL_SIGNATURE]);
            bytes[SIGNATURE] = !xor(&bytes[..SIGNATURE]);
        }
        memory.write(address, &bytes).map_err(|_| DeliveryStatus::OutputPointer)?;
        address = next(&bytes);
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Writes a chain of blocks at `base`, one per KiB.
    pub(crate) fn chain(memory: &GuestMemory, base: u64, data: &[u8], token: u8, signed: bool) {
        let blocks: Vec<_> = data.chunks(DATA).collect();
        for (number, data) in blocks.iter().enumerate() {
            let mut bytes = [0; BLOCK];
            bytes[..data.len()].copy_from_slice(data);
            let address = base + number as u64 * 1024;
            let next = if number + 1 < blocks.len() { address + 1024 } else { 0 };
            bytes[NEXT..NEXT + 8].copy_from_slice(&next.to_be_bytes());
            bytes[NUMBER..NUMBER + 4].copy_from_slice(&(number as u32).to_be_bytes());
            bytes[TOKEN] = token;
            if signed {
                bytes[CONTROL_SIGNATURE] = !xor(&bytes[CONTROL..CONTROL_SIGNATURE]);
                bytes[SIGNATURE] = !xor(&bytes[..SIGNATURE]);
            }
            memory.write(address, &bytes).unwrap();
        }
    }

    fn read_back(memory: &GuestMemory, len: usize, token: u8) -> Result<Vec<u8>, DeliveryStatus> {
        let mut data = vec![];
        read(memory, 0x1000, len, token, &mut data).map(|()| data)
    }

    #[test]
    fn a_mailbox_chain_reads_back_as_written() {
        let memory = GuestMemory::plain(0, 1 << 16).unwrap();
        for signed in [false, true] {
            chain(&memory, 0x1000, &[0; 1300], 7, signed);
            let data: Vec<u8> = (0..1300u32).map(|n| n as u8).collect();
            write(&memory, 0x1000, &data, 7).unwrap();
            assert_eq!(read_back(&memory, 1300, 7).unwrap(), data);
        }
    }

    #[test]
    fn each_kind_of_broken_mailbox_has_its_delivery_status() {
        let memory = GuestMemory::plain(0, 1 << 16).unwrap();
        chain(&memory, 0x1000, &[5; 1300], 7, true);
        assert_eq!(read_back(&memory, 1300, 8), Err(DeliveryStatus::Token));
        assert_eq!(read_back(&memory, 1600, 7), Err(DeliveryStatus::InputPointer));
        memory.write(0x1000, &[6]).unwrap();
        assert_eq!(read_back(&memory, 1300, 7), Err(DeliveryStatus::Signature));
        chain(&memory, 0x1000, &[5; 1300], 7, false);
        memory.write(0x1400 + NUMBER as u64 + 3, &[9]).unwrap();
        assert_eq!(read_back(&memory, 1300, 7), Err(DeliveryStatus::BlockNumber));
        assert_eq!(write(&memory, 0x1001, &[0; 8], 7), Err(DeliveryStatus::OutputPointer));
        assert_eq!(write(&memory, 1 << 40, &[0; 8], 7), Err(DeliveryStatus::OutputPointer));
    }

    #[test]
    fn a_cyclic_mailbox_chain_ends() {
        let memory = GuestMemory::plain(0, 1 << 16).unwrap();
        chain(&memory, 0x1000, &[5; 512], 7, false);
        memory.write(0x1000 + NEXT as u64, &0x1000u64.to_be_bytes()).unwrap();
        assert_eq!(read_back(&memory, 1 << 20, 7), Err(DeliveryStatus::BlockNumber));
    }
}
