//! The device's clock.
#![allow(unsafe_code, reason = "requests name memory by number")]

use crate::capability::Capability;
use crate::pair::{Config, PATIENCE, Pair, gid};
use crate::verdict::{Stop, Verdict, require, supported, trials};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};
use uverbs::mlx5::{Clock, real_time};
use uverbs::{Access, CompletionQueue, Context, Errno, QpType, RecvWr, SendWr};

trials![
    clock_advances,
    counts_convert_to_elapsed_time,
    completions_have_a_time_of_the_day,
    timestamps_are_of_real_time,
    queues_of_real_time_and_of_ticks_do_not_mix,
    real_time_needs_the_clock,
];

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
        let (_, count) = stamped(&mut pair.a.cq)?;
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

/// Waits for a completion: its `wr_id` and its timestamp.
fn stamped(cq: &mut CompletionQueue) -> Verdict<(u64, u64)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = cq.poll()?.next() {
            let done = done.ok()?;
            let stamp = done.timestamp();
            let stamp = stamp.ok_or_else(|| Stop::fail("a completion without a time"))?;
            return Ok((done.wr_id(), stamp));
        }
        assert!(Instant::now() < deadline, "no completion");
        std::thread::yield_now();
    }
}

/// Skips unless the device has a clock of real time.
fn require_real_time(context: &Context) -> Verdict {
    let has = uverbs::mlx5::query_device(context)?.real_time_timestamps();
    require(has, Capability::RealTime, "timestamps are of ticks alone")
}

/// Both sides of a message of a queue pair to itself, with queues of real time.
fn timestamps_are_of_real_time() -> Verdict {
    const RECEIVE: u64 = 1;
    const SEND: u64 = 2;
    let context = super::open()?;
    require_real_time(&context)?;
    let pd = context.alloc_pd()?;
    let memory = pd.mr_builder().access(Access::LOCAL_WRITE).allocate::<u8>(200)?;
    let mut cq = context.cq_builder(16).real_time_timestamps().build()?;
    let mut qp = pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).max_recv_wr(4).build()?;
    let own = qp.endpoint(&gid(&context)?)?;
    crate::env::handshake(&qp, &own)?;
    let mut last = SystemTime::UNIX_EPOCH;
    for _ in 0..3 {
        let sges = [memory.sge(100..)?];
        let mut batch = qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(RECEIVE))?;
        // SAFETY: the memory is dropped after the queue pair.
        unsafe { batch.ring()? };
        let sges = [memory.sge(..100)?];
        let mut batch = qp.send_batch()?;
        batch.push(SendWr::send(&sges).id(SEND).signaled())?;
        // SAFETY: as above.
        unsafe { batch.ring()? };
        let mut ids = 0;
        while ids != RECEIVE | SEND {
            let (id, stamp) = stamped(&mut cq)?;
            assert!(stamp & 0xffff_ffff < 1_000_000_000, "{stamp:#x} is not of nanoseconds");
            let told = real_time(stamp);
            assert!(told >= last, "{told:?} after {last:?}");
            // The emulated device's clock begins with this machine's, that of a fabric at the epoch.
            let now = SystemTime::now();
            let apart = now.duration_since(told).unwrap_or_else(|late| late.duration());
            if !crate::env::on_fabric() && apart > Duration::from_secs(60 * 60) {
                return Err(Stop::fail(format!("{told:?} is {apart:?} from now")));
            }
            (last, ids) = (told, ids | id);
        }
        sleep(Duration::from_millis(20));
    }
    // Two sleeps lie between the first and the last.
    assert!(last > SystemTime::UNIX_EPOCH + Duration::from_millis(40));
    drop(qp);
    Ok(())
}

fn queues_of_real_time_and_of_ticks_do_not_mix() -> Verdict {
    let context = super::open()?;
    require_real_time(&context)?;
    let pd = context.alloc_pd()?;
    let real = context.cq_builder(16).real_time_timestamps().build()?;
    let ticks = context.cq_builder(16).build()?;
    for (send, recv) in [(&real, &ticks), (&ticks, &real)] {
        let refused = pd.qp_builder(send, recv, QpType::RC).max_send_wr(4).max_recv_wr(4).build();
        let error = refused.unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
        assert!(error.to_string().contains("real_time_timestamps"), "{error}");
    }
    pd.qp_builder(&ticks, &ticks, QpType::RC).build()?;
    pd.qp_builder(&real, &real, QpType::UD).build()?;
    Ok(())
}

fn real_time_needs_the_clock() -> Verdict {
    let mlx5 = super::open()?;
    let mut contexts = vec![mlx5];
    if let Ok(second) = crate::env::second() {
        contexts.push(Context::open(&second)?);
    }
    for context in contexts {
        if uverbs::mlx5::query_device(&context)?.real_time_timestamps() {
            context.cq_builder(16).real_time_timestamps().build()?;
            continue;
        }
        let error = context.cq_builder(16).real_time_timestamps().build().unwrap_err();
        assert_eq!(error.errno(), Errno::OPNOTSUPP, "{error}");
        assert!(error.to_string().contains("ticks"), "{error}");
    }
    Ok(())
}
