//! Frames from and to virtio network queues: split virtqueues in guest memory.
//!
//! Pairs with section 2.7 of the virtio specification 1.2. A doorbell in a VAR page is the number of a queue in its virtio
//! device. The device looks at every queue of the function that has it: which VAR page belongs to which queue is not
//! published, and programs do not tell firmware.

use super::dma::{Accessor, Payload};
use super::raw::NextFrames;
use crate::device::Device;
use crate::object::mkey::AccessRight;
use crate::object::virtq::{Rings, Virtq, VirtqState};

/// Bytes of a descriptor, and its flags.
const DESCRIPTOR: u64 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Cost of reading a descriptor by an mkey, in steps, beside its bytes.
const DESCRIPTOR_STEPS: u64 = 4;
/// The longest frame.
const MAX_FRAME: usize = 1 << 16;
/// The offset of `num_buffers` in `struct virtio_net_hdr_v1`.
const NUM_BUFFERS: usize = 10;

/// A descriptor: memory of a buffer.
struct Piece {
    address: u64,
    len: u32,
    writable: bool,
}

/// A chain of descriptors that the driver made available, by its first one.
struct Chain {
    head: u16,
    pieces: Vec<Piece>,
}

impl Chain {
    fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len as usize).sum()
    }
}

impl Device {
    /// A store to a VAR page.
    pub(crate) fn ring_virtqs(&mut self, from: &[u8]) {
        let Some(index) = from.first_chunk::<2>().map(|index| u16::from_le_bytes(*index)) else {
            return;
        };
        let of_index = |(number, virtq): (u32, &Virtq)| (virtq.index == index).then_some(number);
        let rung: Vec<_> = self.objects.virtqs.iter().filter_map(of_index).collect();
        rung.into_iter().for_each(|number| self.schedule(number));
    }

    /// Takes the next chain of a queue that sends.
    pub(crate) fn run_next_chain(&mut self, number: u32) -> NextFrames {
        let ready = |virtq: &&Virtq| virtq.state == VirtqState::Ready && virtq.sends();
        let Some(virtq) = self.objects.virtqs.find(number).filter(ready) else {
            return NextFrames::Idle;
        };
        let tis = virtq.tis;
        match self.take_frame(number) {
            Ok(None) => NextFrames::Idle,
            Ok(Some(frame)) => self.let_out(vec![frame], tis),
            Err(why) => {
                self.fail_virtq(number, &why);
                NextFrames::Idle
            }
        }
    }

    /// Writes a frame to a queue that receives; returns false if it is dropped.
    pub(crate) fn write_to_virtq(&mut self, number: u32, frame: &[u8]) -> bool {
        let ready = |virtq: &&Virtq| virtq.state == VirtqState::Ready && !virtq.sends();
        let Some(virtq) = self.objects.virtqs.find(number).filter(ready) else { return false };
        let mut bytes = vec![0; virtq.header];
        if let Some(count) = bytes.get_mut(NUM_BUFFERS) {
            *count = 1;
        }
        bytes.extend(frame);
        self.put_bytes(number, &bytes).unwrap_or_else(|why| {
            self.fail_virtq(number, &why);
            false
        })
    }

    fn fail_virtq(&mut self, number: u32, why: &str) {
        log::warn!("virtqueue {number:#x}: {why}");
        if let Ok(virtq) = self.objects.virtqs.get_mut(number) {
            virtq.state = VirtqState::Error;
        }
    }

    /// The frame of the next available chain, which is then used.
    fn take_frame(&mut self, number: u32) -> Result<Option<Vec<u8>>, String> {
        let Some((virtq, chain)) = self.next_chain(number)? else { return Ok(None) };
        let (rings, header) = (virtq.rings, virtq.header);
        if chain.len() < header || chain.len() > MAX_FRAME {
            return Err(format!("a frame of {} bytes with its header of {header}", chain.len()));
        }
        let mut bytes = vec![0; chain.len()];
        let mut rest = &mut bytes[..];
        for piece in &chain.pieces {
            if piece.writable {
                return Err("a frame to send in a buffer to write".to_string());
            }
            let (part, behind) = rest.split_at_mut(piece.len as usize);
            self.read_rings(number, rings, piece.address, part)?;
            rest = behind;
        }
        // Flags, and the type of segmentation.
        if bytes[..2] != [0, 0] {
            return Err("checksums and segmentation are not modelled".to_string());
        }
        self.use_chain(number, chain.head, 0)?;
        Ok(Some(bytes.split_off(header)))
    }

    /// Writes to the next available chain; returns false if there is none, or it is too short.
    fn put_bytes(&mut self, number: u32, bytes: &[u8]) -> Result<bool, String> {
        let Some((virtq, chain)) = self.next_chain(number)? else { return Ok(false) };
        let rings = virtq.rings;
        if chain.pieces.iter().any(|piece| !piece.writable) {
            return Err("a buffer to read, of a queue that receives".to_string());
        }
        if chain.len() < bytes.len() {
            return Ok(false);
        }
        let mut rest = bytes;
        for piece in &chain.pieces {
            let (part, behind) = rest.split_at(rest.len().min(piece.len as usize));
            self.write_rings(number, rings, piece.address, part)?;
            rest = behind;
        }
        self.use_chain(number, chain.head, bytes.len() as u32)?;
        Ok(true)
    }

    /// The next chain that the driver made available.
    fn next_chain(&self, number: u32) -> Result<Option<(&Virtq, Chain)>, String> {
        let virtq = self.objects.virtqs.get(number).map_err(|refused| refused.why)?;
        let rings = virtq.rings;
        let size = 1u16 << rings.log_size;
        let mut index = [0; 2];
        self.read_rings(number, rings, rings.available.wrapping_add(2), &mut index)?;
        match u16::from_le_bytes(index).wrapping_sub(virtq.next_available) {
            0 => return Ok(None),
            ahead if ahead > size => return Err(format!("{ahead} chains in a ring of {size}")),
            _ => {}
        }
        let slot = u64::from(virtq.next_available & (size - 1));
        let mut head = [0; 2];
        self.read_rings(number, rings, rings.available.wrapping_add(4 + 2 * slot), &mut head)?;
        let head = u16::from_le_bytes(head);
        let (mut pieces, mut next) = (Vec::new(), Some(head));
        while let Some(at) = next {
            if at >= size || pieces.len() == usize::from(size) {
                return Err(format!("descriptor {at} of a chain of {}", pieces.len()));
            }
            // A chain that is too short for a frame is read again for the next one.
            if !self.objects.cost.add_steps(DESCRIPTOR_STEPS) {
                return Err(format!("a frame ends after too many descriptors, at {at}"));
            }
            let mut bytes = [0; DESCRIPTOR as usize];
            let place = rings.descriptors.wrapping_add(DESCRIPTOR * u64::from(at));
            self.read_rings(number, rings, place, &mut bytes)?;
            let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
            let flags = u16::from_le_bytes([f0, f1]);
            if flags & INDIRECT != 0 {
                return Err("indirect descriptors are not modelled".to_string());
            }
            pieces.push(Piece {
                address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
                len: u32::from_le_bytes([l0, l1, l2, l3]),
                writable: flags & WRITE != 0,
            });
            next = (flags & NEXT != 0).then(|| u16::from_le_bytes([n0, n1]));
        }
        Ok(Some((virtq, Chain { head, pieces })))
    }

    /// Gives a chain back with `len` bytes written to it.
    fn use_chain(&mut self, number: u32, head: u16, len: u32) -> Result<(), String> {
        let virtq = self.objects.virtqs.get(number).map_err(|refused| refused.why)?;
        let (rings, used) = (virtq.rings, virtq.next_used);
        let slot = u64::from(used & ((1 << rings.log_size) - 1));
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&len.to_le_bytes());
        self.write_rings(number, rings, rings.used.wrapping_add(4 + 8 * slot), &element)?;
        // The driver reads the entry once it sees the index.
        let index = used.wrapping_add(1);
        self.write_rings(number, rings, rings.used.wrapping_add(2), &index.to_le_bytes())?;
        if let Ok(virtq) = self.objects.virtqs.get_mut(number) {
            virtq.next_used = index;
            virtq.next_available = virtq.next_available.wrapping_add(1);
        }
        Ok(())
    }

    fn read_rings(&self, qpn: u32, rings: Rings, at: u64, to: &mut [u8]) -> Result<(), String> {
        let accessor = Accessor { qpn, pd: rings.pd };
        self.dma_read(accessor.access(AccessRight::LocalRead, rings.key, at, to.len() as u64), to)
    }

    fn write_rings(&self, qpn: u32, rings: Rings, at: u64, from: &[u8]) -> Result<(), String> {
        let accessor = Accessor { qpn, pd: rings.pd };
        let access = accessor.access(AccessRight::LocalWrite, rings.key, at, from.len() as u64);
        self.dma_write(access, Payload::Bytes(from))
    }
}
