//! MSI-X vectors.
//!
//! Pairs with SET_IRQS of vfio-user, which connects eventfds, and with the EQs,
//! which raise vectors. QEMU keeps the MSI-X table and its mask bits.

use std::fs::File;
use std::io::Write;

/// MSI-X vectors of a function.
pub const VECTORS: usize = 32;

/// The vectors of a function.
pub struct Interrupts {
    vectors: Vec<Vector>,
    to_lose: u32,
    enabled: bool,
}

#[derive(Default)]
struct Vector {
    event: Option<File>,
    raised: u64,
}

impl Interrupts {
    /// `count` vectors, none connected.
    pub fn new(count: usize) -> Self {
        Self { vectors: (0..count).map(|_| Vector::default()).collect(), to_lose: 0, enabled: true }
    }

    /// Raises a vector; a vector without an eventfd is only counted.
    pub fn raise(&mut self, vector: usize) {
        let Some(vector) = self.vectors.get_mut(vector) else { return };
        // MSI-X interrupts are writes to memory, so they need bus mastering.
        if !self.enabled {
            return;
        }
        vector.raised += 1;
        if self.to_lose > 0 {
            self.to_lose -= 1;
            return;
        }
        if let Some(event) = &mut vector.event
            && let Err(error) = event.write_all(&1u64.to_ne_bytes())
        {
            log::warn!("eventfd: {error}");
        }
    }

    /// Enables or disables interrupts. Interrupts raised while disabled are lost.
    pub(crate) fn enable(&mut self, on: bool) {
        self.enabled = on;
    }

    /// Loses the next `count` interrupts of any vector.
    pub fn lose(&mut self, count: u32) {
        self.to_lose = count;
    }

    /// How many times a vector was raised.
    pub fn raised(&self, vector: usize) -> u64 {
        self.vectors.get(vector).map_or(0, |vector| vector.raised)
    }

    /// Sets or removes the eventfd of a vector.
    pub fn connect(&mut self, vector: usize, event: Option<File>) {
        if let Some(vector) = self.vectors.get_mut(vector) {
            vector.event = event;
        }
    }

    /// Removes all eventfds.
    pub fn disconnect_all(&mut self) {
        self.vectors.iter_mut().for_each(|vector| vector.event = None);
    }
}
