//! The congestion window of a requester: as TCP's (RFC 5681) without fast recovery, counted in packets.
//!
//! ```text
//! window   │              ╱│ loss: half
//!          │            ╱  │      ╱│ timeout: 2, and up to half at once
//! threshold│- - - - -╱- - -│- -╱  │
//!          │       │       │╱     │   ╱╱
//!       16 │─────╱         │      │ ╱
//!          └───────────────────────────────▶ acknowledged packets
//! ```
//!
//! Up to the threshold the window grows by one with each packet that is acknowledged, which doubles it each round trip.
//! Behind it the window grows by one each round trip.

use super::WINDOW;

/// The window at first: few enough for a socket's receive buffer of usual size, whatever the packets are.
const FIRST: u32 = 16;
/// The smallest window: one packet asks for an acknowledgement while the next one is on its way.
const LEAST: u32 = 2;

/// The congestion window of a requester.
#[derive(Debug)]
pub(super) struct Congestion {
    window: u32,
    threshold: u32,
    /// Packets that were acknowledged since the window grew behind the threshold.
    acknowledged: u32,
}

impl Congestion {
    pub(super) fn new() -> Congestion {
        Congestion { window: FIRST, threshold: WINDOW, acknowledged: 0 }
    }

    /// The most packets in flight.
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// Packets were acknowledged.
    pub(super) fn grow(&mut self, packets: u32) {
        let fast = packets.min(self.threshold.saturating_sub(self.window));
        self.window += fast;
        self.acknowledged += packets - fast;
        while self.acknowledged >= self.window {
            self.acknowledged -= self.window;
            self.window = (self.window + 1).min(WINDOW);
        }
    }

    /// A packet was lost, and later ones arrived.
    pub(super) fn halve(&mut self) {
        self.threshold = (self.window / 2).max(LEAST);
        self.window = self.threshold;
        self.acknowledged = 0;
    }

    /// Nothing came back for so long that all may be lost.
    pub(super) fn start_over(&mut self) {
        self.window = LEAST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_halves_on_loss_and_grows_again() {
        let mut congestion = Congestion::new();
        congestion.grow(16);
        assert_eq!(congestion.window(), 32);
        congestion.grow(1_000);
        assert!((128..=WINDOW).contains(&congestion.window()));
        congestion.halve();
        assert_eq!(congestion.window(), 64);
        // By one each round trip.
        congestion.grow(63);
        assert_eq!(congestion.window(), 64);
        congestion.grow(1);
        assert_eq!(congestion.window(), 65);
        congestion.halve();
        congestion.start_over();
        assert_eq!(congestion.window(), 2);
        // At once up to half of what was too much.
        congestion.grow(30);
        assert_eq!(congestion.window(), 32);
        (0..100).for_each(|_| congestion.halve());
        assert_eq!(congestion.window(), LEAST);
    }
}
