//! tokio's clock, for fabrics that its event loop steps.

use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use uverbs_sim::Clock;

/// The clock of a tokio event loop, for [`Fabric::drive`](uverbs_sim::Fabric::drive).
///
/// In an event loop of one thread whose clock is paused, virtual time moves on only when all tasks wait, so that
/// timeouts of seconds take none, and a seed repeats a whole program:
///
/// ```
/// use uverbs::sim::{Fabric, Profile, TokioClock};
///
/// let fabric = Fabric::builder().stepped(7).device(Profile::new()).build()?;
/// let event_loop = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
/// event_loop.block_on(async {
///     let driven = fabric.clone();
///     tokio::spawn(async move { driven.drive(TokioClock::new()).await });
///     // The program under test: contexts of `devices_on(&fabric.system())`.
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Two runs of a seed can still differ through threads, real sockets and files, `select!` without `biased`, hash maps
/// with random keys, and decisions by addresses or real time.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock(Instant);

impl TokioClock {
    /// A clock that starts now, of the event loop that this thread runs.
    pub fn new() -> TokioClock {
        TokioClock(Instant::now())
    }
}

impl Default for TokioClock {
    fn default() -> TokioClock {
        TokioClock::new()
    }
}

impl Clock for TokioClock {
    fn elapsed(&self) -> Duration {
        // Outside of a runtime tokio's clock is real time.
        if Handle::try_current().is_err() {
            return Duration::ZERO;
        }
        self.0.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        sleep(duration).await;
    }
}
