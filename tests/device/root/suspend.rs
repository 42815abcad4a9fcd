//! Sleep of the machine, with devices in use.
//!
//! soft-RoCE does not notice the sleep: packets and timers wait. The driver of mlx5 unloads its device before and loads
//! it again afterwards, so that programs lose it as if it had been pulled out.
//!
//! The clock of an emulated machine wakes it from suspend to memory only. Suspend to idle goes as far as the kernel's
//! own test of it (`pm_test`): all drivers suspend their devices, and the processors wait for five seconds in place of
//! idling.

use super::links;
use crate::capability::Capability;
use crate::env;
use crate::hotplug::{self, Step};
use crate::pair::{Config, PATIENCE, Pair};
use crate::verdict::{Stop, Verdict, require, trials};
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;
use uverbs::device::DriverId;

/// The files for the sleep, its kind, its depth, and the alarm.
const STATE: &str = "/sys/power/state";
const KIND: &str = "/sys/power/mem_sleep";
const TEST: &str = "/sys/power/pm_test";
const ALARM: &str = "/sys/class/rtc/rtc0/wakealarm";

trials![messages_go_on_after_a_suspend, program_works_again_when_its_device_wakes];

/// A kind of sleep.
#[derive(Clone, Copy, Debug)]
enum Sleep {
    Idle,
    Memory,
}

impl Sleep {
    /// The kinds of sleep of this machine; skips if there is none.
    fn ways() -> Verdict<Vec<Sleep>> {
        env::lab()?;
        let offers = |file: &str, word: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            text.split_whitespace().any(|known| known.trim_matches(['[', ']']) == word)
        };
        let mut ways = Vec::new();
        if offers(STATE, "freeze") && offers(TEST, "platform") {
            ways.push(Sleep::Idle);
        }
        if offers(STATE, "mem") && offers(KIND, "deep") && fs::exists(ALARM)? {
            ways.push(Sleep::Memory);
        }
        require(!ways.is_empty(), Capability::Suspend, "nothing sends it to sleep and wakes it")?;
        Ok(ways)
    }

    /// Makes the machine sleep for some seconds.
    fn now(self) -> Verdict {
        const SUCCESSES: &str = "/sys/power/suspend_stats/success";
        let count = || -> Verdict<u64> { Ok(fs::read_to_string(SUCCESSES)?.trim().parse()?) };
        let before = count()?;
        match self {
            Sleep::Idle => {
                fs::write(TEST, "platform")?;
                let slept = fs::write(STATE, "freeze");
                fs::write(TEST, "none")?;
                slept?;
            }
            Sleep::Memory => {
                fs::write(KIND, "deep")?;
                fs::write(ALARM, "0")?;
                fs::write(ALARM, "+3")?;
                fs::write(STATE, "mem")?;
            }
        }
        if count()? == before + 1 {
            Ok(())
        } else {
            Err(Stop::fail(format!("{self:?}: the machine did not sleep")))
        }
    }
}

fn messages_go_on_after_a_suspend() -> Verdict {
    env::soak()?;
    links()?;
    let ways = Sleep::ways()?;
    let mut pair = Pair::new(Config::rc())?;
    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| -> Verdict {
            while !over.load(Ordering::Relaxed) {
                let seed = sent.fetch_add(1, Ordering::Relaxed);
                pair.message(seed, 3000)?;
            }
            Ok(())
        });
        let more = |than: u64| -> Verdict {
            let deadline = Instant::now() + PATIENCE;
            while sent.load(Ordering::Relaxed) < than && !traffic.is_finished() {
                if Instant::now() > deadline {
                    return Err(Stop::fail("messages stand still"));
                }
                std::thread::yield_now();
            }
            Ok(())
        };
        let mut slept = more(10);
        for sleep in ways {
            slept = slept.and_then(|()| sleep.now());
            slept = slept.and_then(|()| more(sent.load(Ordering::Relaxed) + 100));
        }
        over.store(true, Ordering::Relaxed);
        let ended = traffic.join().map_err(|_| Stop::fail("the traffic panicked"))?;
        slept.and(ended)
    })
}

fn program_works_again_when_its_device_wakes() -> Verdict {
    env::soak()?;
    let device = env::device();
    let mlx5 = device.driver() == Some(DriverId::MLX5);
    require(mlx5, Capability::Mlx5, "the driver does nothing when the machine sleeps")?;
    for sleep in Sleep::ways()? {
        let (sender, steps) = channel();
        let name = device.name().to_owned();
        let program = std::thread::spawn(move || {
            hotplug::work(&name, |step| {
                let _ = sender.send(step);
            })
        });
        // A program that failed reports no further step; its error follows.
        let reached = |step| steps.recv_timeout(6 * PATIENCE) == Ok(step);
        if reached(Step::AtWork) {
            sleep.now()?;
            let _ = reached(Step::Gone) && reached(Step::Again);
        }
        program.join().map_err(|_| Stop::fail("the program panicked"))??;
    }
    Ok(())
}
