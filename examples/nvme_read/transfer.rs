//! The transfer of many blocks in requests of one size, several of them under way.

use crate::Result;
use crate::capsule::Command;
use crate::controller::Namespace;
use crate::pattern;
use crate::transport::{Queue, Slot};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// The blocks to transfer, and the number in each request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) namespace: Namespace,
    pub(crate) first: u64,
    pub(crate) blocks: u64,
    pub(crate) per_request: u16,
}

/// The blocks of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    first: u64,
    blocks: u16,
}

impl Plan {
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks * self.namespace.block_size as u64
    }

    /// The request that begins with a block; `None` after the last.
    fn piece(&self, first: u64) -> Option<Piece> {
        let left = (self.first + self.blocks).checked_sub(first).filter(|left| *left > 0)?;
        let blocks = u16::try_from(left).unwrap_or(u16::MAX).min(self.per_request);
        Some(Piece { first, blocks })
    }

    fn length(&self, piece: Piece) -> usize {
        usize::from(piece.blocks) * self.namespace.block_size
    }

    /// The start of a piece, in bytes from the beginning of the namespace.
    fn offset(&self, piece: Piece) -> u64 {
        piece.first * self.namespace.block_size as u64
    }

    /// The bytes of a piece in a buffer for the largest one.
    fn part<'b>(&self, piece: Piece, buffer: &'b mut [u8]) -> Result<&'b mut [u8]> {
        let length = self.length(piece);
        Ok(buffer.get_mut(..length).ok_or("a piece is longer than a request")?)
    }
}

/// A job that handles the disk piece by piece.
pub(crate) trait Work {
    /// Its name.
    const NAME: &'static str;

    /// Fills the memory of a slot, if the job writes, and makes the command.
    fn begin(
        &mut self,
        queue: &mut Queue,
        slot: Slot,
        plan: &Plan,
        piece: Piece,
    ) -> Result<Command>;

    /// Handles the data of a completed command.
    fn end(&mut self, queue: &Queue, slot: Slot, plan: &Plan, piece: Piece) -> Result<()>;
}

/// Transfers all blocks, and returns the time that it took.
pub(crate) fn run<W: Work>(queue: &mut Queue, plan: &Plan, work: &mut W) -> Result<Duration> {
    let started = Instant::now();
    let bar = bar(W::NAME, plan.bytes());
    let mut under_way: Vec<Option<Piece>> = Vec::new();
    let mut next = plan.first;
    loop {
        while let Some(piece) = plan.piece(next) {
            let Some(slot) = queue.take_slot() else { break };
            let command = work.begin(queue, slot, plan, piece)?;
            queue.submit(slot, command)?;
            if under_way.len() <= slot.index() {
                under_way.resize(slot.index() + 1, None);
            }
            if let Some(place) = under_way.get_mut(slot.index()) {
                *place = Some(piece);
            }
            next += u64::from(piece.blocks);
        }
        if under_way.iter().all(Option::is_none) {
            break;
        }
        let (slot, response) = queue.wait()?;
        let piece = under_way.get_mut(slot.index()).and_then(Option::take);
        let piece = piece.ok_or("a response to no request")?;
        if !response.status().is_success() {
            let Piece { first, blocks } = piece;
            let status = response.status();
            return Err(format!("{} {blocks} blocks from {first} on: {status}", W::NAME).into());
        }
        work.end(queue, slot, plan, piece)?;
        queue.free_slot(slot);
        bar.inc(plan.length(piece) as u64);
    }
    bar.finish_and_clear();
    Ok(started.elapsed())
}

/// A bar on standard error, if that is a terminal.
fn bar(name: &'static str, bytes: u64) -> ProgressBar {
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style =
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes).with_style(style).with_message(name)
}

/// Writes the pattern.
pub(crate) struct Write {
    pub(crate) seed: u64,
    pub(crate) scratch: Vec<u8>,
}

impl Work for Write {
    const NAME: &'static str = "writing";

    fn begin(
        &mut self,
        queue: &mut Queue,
        slot: Slot,
        plan: &Plan,
        piece: Piece,
    ) -> Result<Command> {
        let bytes = plan.part(piece, &mut self.scratch)?;
        pattern::fill(self.seed, plan.offset(piece), bytes);
        queue.write_data(slot, bytes)?;
        let sgl = queue.sgl(slot, bytes.len())?;
        Ok(Command::write(plan.namespace.number, piece.first, piece.blocks, sgl))
    }

    fn end(&mut self, _: &Queue, _: Slot, _: &Plan, _: Piece) -> Result<()> {
        Ok(())
    }
}

/// Reads. If there is a seed, it compares with the pattern; if there is a file, it copies to it.
pub(crate) struct Read {
    pub(crate) seed: Option<u64>,
    pub(crate) output: Option<File>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) scratch: Vec<u8>,
}

impl Work for Read {
    const NAME: &'static str = "reading";

    fn begin(
        &mut self,
        queue: &mut Queue,
        slot: Slot,
        plan: &Plan,
        piece: Piece,
    ) -> Result<Command> {
        let sgl = queue.sgl(slot, plan.length(piece))?;
        Ok(Command::read(plan.namespace.number, piece.first, piece.blocks, sgl))
    }

    fn end(&mut self, queue: &Queue, slot: Slot, plan: &Plan, piece: Piece) -> Result<()> {
        if self.seed.is_none() && self.output.is_none() {
            return Ok(());
        }
        let bytes = plan.part(piece, &mut self.bytes)?;
        queue.read_data(slot, bytes)?;
        if let Some(seed) = self.seed {
            let scratch = plan.part(piece, &mut self.scratch)?;
            let found = pattern::compare(seed, plan.offset(piece), bytes, scratch);
            if let Some(difference) = found {
                let size = plan.namespace.block_size as u64;
                let (block, byte) = (difference.offset / size, difference.offset % size);
                return Err(format!(
                    "block {block} has {:#04x} at byte {byte}, where the pattern of seed {seed} has {:#04x}",
                    difference.found, difference.expected
                )
                .into());
            }
        }
        if let Some(file) = &self.output {
            let at = plan.offset(piece) - plan.first * plan.namespace.block_size as u64;
            file.write_all_at(bytes, at)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(first: u64, blocks: u64, per_request: u16) -> Plan {
        let namespace = Namespace { number: 1, blocks: 1 << 40, block_size: 512 };
        Plan { namespace, first, blocks, per_request }
    }

    #[test]
    fn pieces_cover_each_block_once() {
        for (first, blocks, per_request) in [(0, 1, 8), (5, 8, 8), (7, 17, 8), (0, 200_000, 65_535)]
        {
            let plan = plan(first, blocks, per_request);
            let mut next = first;
            while let Some(piece) = plan.piece(next) {
                assert_eq!(piece.first, next);
                assert!((1..=per_request).contains(&piece.blocks));
                next += u64::from(piece.blocks);
            }
            assert_eq!(next, first + blocks);
        }
    }

    #[test]
    fn places_are_counted_in_bytes() {
        let plan = plan(1 << 33, 9, 8);
        let piece = plan.piece((1 << 33) + 8).unwrap();
        assert_eq!(piece, Piece { first: (1 << 33) + 8, blocks: 1 });
        assert_eq!((plan.length(piece), plan.offset(piece)), (512, (1 << 42) + 4096));
        assert_eq!(plan.bytes(), 9 * 512);
        assert!(plan.part(piece, &mut [0; 511]).is_err());
    }
}
