//! MSI-X vectors.
//!
//! Pairs with the EQs, which raise vectors, and with the receiver that the owner of the function connects: an eventfd
//! of QEMU, or a call in this process. QEMU keeps the MSI-X table and its mask bits.

/// MSI-X vectors of a function.
pub const VECTORS: usize = 32;

/// The vectors of a function.
pub struct Interrupts {
    vectors: Vec<Vector>,
    to_lose: u32,
    enabled: bool,
}

/// Called when a vector is raised.
pub type Notify = Box<dyn FnMut() + Send>;

#[derive(Default)]
struct Vector {
    notify: Option<Notify>,
    raised: u64,
}

impl Interrupts {
    /// `count` vectors, none connected.
    pub fn new(count: usize) -> Self {
        Self { vectors: (0..count).map(|_| Vector::default()).collect(), to_lose: 0, enabled: true }
    }

    /// Raises a vector; a vector that is not connected is only counted.
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
        if let Some(notify) = &mut vector.notify {
            notify();
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

    /// The number of times that a vector was raised.
    pub fn raised(&self, vector: usize) -> u64 {
        self.vectors.get(vector).map_or(0, |vector| vector.raised)
    }

    /// Connects or disconnects a vector. `notify` must not call the function: it is being run.
    pub fn connect(&mut self, vector: usize, notify: Option<Notify>) {
        if let Some(vector) = self.vectors.get_mut(vector) {
            vector.notify = notify;
        }
    }

    /// Disconnects all vectors.
    pub fn disconnect_all(&mut self) {
        self.vectors.iter_mut().for_each(|vector| vector.notify = None);
    }
}
