//! The device's clock.

use crate::capability::Capability;
use crate::verdict::{Stop, Verdict, supported, trials};
use std::thread::sleep;
use std::time::{Duration, Instant};
use uverbs::mlx5::Clock;

trials![clock_advances, counts_convert_to_elapsed_time];

fn clock_advances() -> Verdict {
    let clock = Clock::open(&super::open()?)?;
    let mut before = supported(clock.now(), Capability::Clock)?;
    for _ in 0..100 {
        let now = clock.now()?;
        assert!(now >= before, "{now} after {before}");
        before = now;
    }
    sleep(Duration::from_millis(20));
    assert!(clock.now()? > before);
    Ok(())
}

fn counts_convert_to_elapsed_time() -> Verdict {
    let clock = Clock::open(&super::open()?)?;
    supported(clock.now(), Capability::Clock)?;
    let (start, first) = (Instant::now(), clock.now()?);
    sleep(Duration::from_millis(200));
    let (last, passed) = (clock.now()?, start.elapsed());
    let told = Duration::from_nanos(clock.nanoseconds(last)? - clock.nanoseconds(first)?);
    // The virtual machine may pause between any two reads.
    let tolerance = Duration::from_millis(100);
    if told + tolerance < passed || passed + tolerance < told {
        return Err(Stop::fail(format!("the device's clock says {told:?}, ours {passed:?}")));
    }
    // An old count converts as well as a new one.
    assert!(clock.nanoseconds(first)? < clock.nanoseconds(last)?);
    Ok(())
}
