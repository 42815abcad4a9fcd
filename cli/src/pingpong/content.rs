//! The content of buffers: the same bytes all the time, or messages that are made and checked one
//! by one. The run is compiled once for each, so that without checks there is not even a branch.

use super::checker::Checker;
use super::layout::Layout;
use super::pattern::POISON;
use crate::failure::{Failure, Result};
use uverbs::MemoryRegion;

pub(crate) trait Content {
    /// Prepares the buffers before the first receive is posted.
    fn prepare(&mut self, memory: &mut MemoryRegion) -> Result<()>;

    /// A buffer for the next receive.
    fn take_slot(&mut self) -> usize;

    /// Called when a message for queue pair `qp` has arrived in `slot`.
    fn received(
        &mut self,
        memory: &mut MemoryRegion,
        qp: usize,
        slot: usize,
        length: u32,
    ) -> Result<()>;

    /// Called before queue pair `qp` sends.
    fn sending(&mut self, memory: &mut MemoryRegion, qp: usize) -> Result<()>;
}

/// All messages are the same. There is one buffer: a message is sent back from where it arrived.
#[derive(Debug)]
pub(crate) struct Plain {
    pub(crate) layout: Layout,
    pub(crate) byte: u8,
}

impl Content for Plain {
    fn prepare(&mut self, memory: &mut MemoryRegion) -> Result<()> {
        memory.copy_from(0, &vec![self.byte; self.layout.byte_len()]).map_err(outside)
    }

    #[inline]
    fn take_slot(&mut self) -> usize {
        0
    }

    #[inline]
    fn received(&mut self, _: &mut MemoryRegion, _: usize, _: usize, _: u32) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn sending(&mut self, _: &mut MemoryRegion, _: usize) -> Result<()> {
        Ok(())
    }
}

/// Messages are checked. Sends and receives have buffers of their own; a receive buffer is
/// poisoned before it is posted.
#[derive(Debug)]
pub(crate) struct Checked {
    layout: Layout,
    checker: Checker,
    poison: Vec<u8>,
    found: Vec<u8>,
    free: Vec<usize>,
}

impl Checked {
    pub(crate) fn new(layout: Layout, checker: Checker) -> Self {
        Checked {
            poison: vec![POISON; layout.recv(0).len()],
            found: vec![0; layout.payload(0).len()],
            // If all receives share one buffer, no receive takes it.
            free: if layout.slots() == 1 { vec![] } else { (0..layout.slots()).collect() },
            layout,
            checker,
        }
    }

    pub(crate) fn into_checker(self) -> Checker {
        self.checker
    }
}

impl Content for Checked {
    fn prepare(&mut self, memory: &mut MemoryRegion) -> Result<()> {
        for slot in 0..self.layout.slots() {
            memory.copy_from(self.layout.recv(slot).start, &self.poison).map_err(outside)?;
        }
        Ok(())
    }

    fn take_slot(&mut self) -> usize {
        self.free.pop().unwrap_or(0)
    }

    fn received(
        &mut self,
        memory: &mut MemoryRegion,
        qp: usize,
        slot: usize,
        length: u32,
    ) -> Result<()> {
        let expected = self.layout.recv(slot).len();
        if length as usize != expected {
            let header = expected - self.found.len();
            return Err(Failure::run(format!(
                "a message of {} bytes arrived where {} were due",
                (length as usize).saturating_sub(header),
                self.found.len()
            ))
            .advice("give both sides the same --size"));
        }
        memory.copy_to(self.layout.payload(slot).start, &mut self.found).map_err(outside)?;
        self.checker.incoming(qp, &self.found).map_err(|wrong| Failure::run(wrong.to_string()))?;
        memory.copy_from(self.layout.recv(slot).start, &self.poison).map_err(outside)?;
        if self.layout.slots() > 1 {
            self.free.push(slot);
        }
        Ok(())
    }

    fn sending(&mut self, memory: &mut MemoryRegion, qp: usize) -> Result<()> {
        let message = self.checker.outgoing(qp);
        memory.copy_from(self.layout.send(qp).start, message).map_err(outside)
    }
}

fn outside(error: uverbs::MemoryError) -> Failure {
    Failure::device(format!("a buffer lies outside its region: {error}"))
}
