//! The device's clock.

use crate::capability::Capability;
use crate::pair::{Config, PATIENCE, Pair};
use crate::verdict::{Stop, Verdict, supported, trials};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use uverbs::SendWr;
use uverbs::mlx5::Clock;

trials![clock_advances, counts_convert_to_elapsed_time, completions_have_a_time_of_the_day];

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

fn completions_have_a_time_of_the_day() -> Verdict {
    let clock = Clock::open(&super::open()?)?;
    supported(clock.now(), Capability::Clock)?;
    let mut pair = Pair::new(Config::rc())?;
    let mut ends = Vec::new();
    for id in 0..2 {
        pair.b.recv(id, 0..100)?;
        let sges = [pair.a.sge(0..100)];
        pair.a.send(SendWr::send(&sges).id(id).signaled())?;
        let deadline = Instant::now() + PATIENCE;
        let count = loop {
            if let Some(done) = pair.a.cq.poll()?.next() {
                break done.timestamp();
            }
            assert!(Instant::now() < deadline, "no completion");
            std::thread::yield_now();
        };
        let count = count.ok_or_else(|| Stop::fail("a completion without a time"))?;
        // The driver set its clock to the system's when it was loaded; both went on by themselves.
        let told = clock.system_time(count)?;
        let apart = SystemTime::now().duration_since(told).unwrap_or_else(|late| late.duration());
        // The clock of a fabric begins at the epoch.
        if !crate::env::on_fabric() && apart > Duration::from_secs(30) {
            return Err(Stop::fail(format!("{told:?} is {apart:?} from now")));
        }
        ends.push(told);
        sleep(Duration::from_millis(20));
    }
    assert!(ends[1] > ends[0] + Duration::from_millis(10), "{ends:?}");
    Ok(())
}
