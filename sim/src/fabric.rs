//! The fabric, as tests and programs make it.

use crate::driver::Driver;
use crate::kernel::Kernel;
use crate::network::Interface;
pub use crate::world::Mode;
use crate::world::World;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use uverbs_connectx::options::Options;
use uverbs_host::HostSystem;

/// Devices behind one switch, with a kernel of their own, in this process.
#[derive(Clone, Debug)]
pub struct Fabric {
    world: Arc<World>,
}

impl Fabric {
    /// A fabric of `devices` devices.
    ///
    /// # Panics
    ///
    /// If the device model refuses to be brought up, which is a defect of this package.
    pub fn new(devices: usize, mode: Mode) -> Fabric {
        let seed = match mode {
            Mode::Stepped { seed } => seed,
            Mode::Trapped => 0,
        };
        let mut kernel = Kernel::new(seed);
        for number in 0..devices {
            let options = Options::default();
            let interface = Interface::numbered(number);
            let driver = Driver::probe(&mut kernel.switch, options, interface)
                .unwrap_or_else(|errno| panic!("device {number} does not come up: {errno}"));
            kernel.drivers.push(driver);
        }
        let world = World::new(kernel, mode);
        let system: Arc<dyn HostSystem> = world.clone();
        uverbs_host::register(&system);
        Fabric { world }
    }

    /// The system, for `uverbs::device::devices_on`.
    pub fn system(&self) -> Arc<dyn HostSystem> {
        self.world.clone()
    }

    /// Makes this the system of the whole process: its devices are listed and opened, and not Linux's. For
    /// programs and test suites that were not written for it.
    ///
    /// # Errors
    ///
    /// The fabric, if another system was installed before.
    pub fn install(self) -> Result<(), Fabric> {
        uverbs_host::install(self.system()).map_err(|_| self)
    }

    /// Does what there is to do now; whether there was anything.
    pub fn step(&self) -> bool {
        self.world.step()
    }

    /// Moves virtual time to the next timer; `false` if there is none.
    pub fn advance(&self) -> bool {
        self.world.advance_to_timer(None)
    }

    /// How many decisions the seed has made: two runs that differ here differ.
    pub fn decisions(&self) -> u64 {
        self.world.kernel().map_or(0, |kernel| kernel.decisions())
    }

    /// Steps the fabric as a task of an event loop with a clock of its own, which becomes the fabric's: between two
    /// steps the tasks of the program run, and when there is nothing to do this sleeps until the next timer, so that
    /// a paused clock moves on. It never ends.
    ///
    /// `clock` tells the time since its start, and sleeps.
    pub async fn drive(&self, clock: impl Clock) {
        let world = &self.world;
        let base = clock.elapsed();
        let now = || clock.elapsed().saturating_sub(base).as_nanos() as u64;
        loop {
            world.set_time(now());
            while world.step() {
                yield_once().await;
            }
            let mut sleep = world.deadline().map(|due| {
                let left = Duration::from_nanos(due.saturating_sub(now()));
                Box::pin(clock.sleep(left))
            });
            let mut first = true;
            // Until the program calls, or the timer is due.
            poll_fn(|cx| {
                if !first {
                    return Poll::Ready(());
                }
                if let Some(sleep) = &mut sleep {
                    if sleep.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(());
                    }
                }
                first = false;
                world.wake_when_called(cx.waker());
                Poll::Pending
            })
            .await;
        }
    }
}

/// The clock of an event loop.
pub trait Clock {
    /// The time since some moment that stays the same.
    fn elapsed(&self) -> Duration;

    /// A future that ends after a while.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()>;
}

/// Lets other tasks run.
async fn yield_once() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
