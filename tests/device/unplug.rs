//! A program whose device is removed while it works on it: this program once more. It does everything at the same time,
//! reports that, waits for the events that the device is gone, and checks the answers of every call then.
//!
//! Pairs with the lab, which removes the device: a test cannot remove its own, unless it is a soft-RoCE link.

mod lending;
#[cfg(feature = "tokio")]
mod waiting;

use crate::env;
use crate::mlx5::devx::objects::mkey_in;
use crate::mlx5::devx::sharing::queue_in;
use crate::mlx5::stress::{Owner, Worker};
use crate::pair::loopback;
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict};
use std::io::stdin;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};
use uverbs::mlx5::devx::{DevxEventData, DevxEvents, DevxObject, DevxQueries, Umem};
use uverbs::mlx5::{Uar, UarKind, Var, VarKind};
use uverbs::{
    Access, Context, Device, Errno, ErrorWith, EventType, Notify, ObjectKind, PostError, QpAttr,
    QpState, QpType, WcStatus, WindowType,
};
use uverbs_uapi::mlx5::prm::{command, opcode};

/// The argument of a program whose device under test is removed.
const UNPLUG: &str = "--unplug";

/// The longest time until all workers have begun. A later one fails by itself.
const START: Duration = Duration::from_secs(30);

/// Runs as that program, if this process was started as one.
pub(crate) fn run() -> Option<ExitCode> {
    if std::env::args().nth(1).as_deref() != Some(UNPLUG) {
        return None;
    }
    Some(match work() {
        Ok(()) => {
            println!("clean");
            ExitCode::SUCCESS
        }
        Err(stop) => {
            println!("not clean: {stop:?}");
            ExitCode::FAILURE
        }
    })
}

/// A worker that has not begun yet. The worker drops this when it works, or fails before.
struct Awaited(Arc<AtomicUsize>);

impl Awaited {
    fn new(count: &Arc<AtomicUsize>) -> Awaited {
        count.fetch_add(1, Ordering::Relaxed);
        Awaited(count.clone())
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Fails unless the answer is `EIO`: the device is gone.
#[track_caller]
fn gone<T>(what: &str, answer: uverbs::Result<T>) -> Verdict {
    match answer {
        Err(error) if error.errno() == Errno::IO => Ok(()),
        Err(error) => Err(Stop::fail(format!("{what}: {error:?}, and not EIO"))),
        Ok(_) => Err(Stop::fail(format!("{what} works without a device"))),
    }
}

fn work() -> Verdict {
    let device = env::find().map_err(Stop::fail)?;
    let over = AtomicBool::new(false);
    let look = holding(&device)?;
    let awaited = Arc::new(AtomicUsize::new(0));
    let who = || Awaited::new(&awaited);
    thread::scope(|scope| {
        let (one, two, three, four, five, six) = (who(), who(), who(), who(), who(), who());
        let threads: [(&str, ScopedJoinHandle<'_, Verdict>); 6] = [
            ("traffic", scope.spawn(|| traffic(&device, &over, one))),
            ("creation", scope.spawn(|| creation(&device, &over, two))),
            ("channel", scope.spawn(|| channel(&device, three))),
            ("events", scope.spawn(|| events(&device, four))),
            ("owned", scope.spawn(|| lending::owned(&device, five))),
            ("scope", scope.spawn(|| lending::scope(&device, six))),
        ];
        #[cfg(feature = "tokio")]
        let futures = {
            let seven = who();
            [("futures", scope.spawn(|| waiting::futures(&device, seven)))]
        };
        #[cfg(not(feature = "tokio"))]
        let futures = [];
        begun(&awaited);
        println!("at work");
        let mut line = String::new();
        stdin().read_line(&mut line)?;
        over.store(true, Ordering::Relaxed);
        joined(threads.into_iter().chain(futures))
    })?;
    look()?;
    let error = Context::open(&device).err().map(|error| error.errno());
    if !matches!(error, Some(Errno::NODEV | Errno::NOENT | Errno::NXIO)) {
        return Err(Stop::fail(format!("opened again: {error:?}")));
    }
    Ok(())
}

/// Lends memory to requests, scopes and futures of a device of any driver, while `remove` removes the device.
pub(crate) fn lent_meanwhile(device: &Device, remove: impl FnOnce() -> Verdict) -> Verdict {
    let awaited = Arc::new(AtomicUsize::new(0));
    let who = || Awaited::new(&awaited);
    thread::scope(|scope| {
        let (one, two) = (who(), who());
        let threads: [(&str, ScopedJoinHandle<'_, Verdict>); 2] = [
            ("owned", scope.spawn(|| lending::owned(device, one))),
            ("scope", scope.spawn(|| lending::scope(device, two))),
        ];
        #[cfg(feature = "tokio")]
        let futures = {
            let three = who();
            [("futures", scope.spawn(|| waiting::futures(device, three)))]
        };
        #[cfg(not(feature = "tokio"))]
        let futures = [];
        begun(&awaited);
        remove()?;
        joined(threads.into_iter().chain(futures))
    })
}

/// Waits until all workers have begun, or are late.
fn begun(awaited: &AtomicUsize) {
    let deadline = Instant::now() + START;
    while awaited.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// The results of all workers.
fn joined<'s>(
    threads: impl IntoIterator<Item = (&'static str, ScopedJoinHandle<'s, Verdict>)>,
) -> Verdict {
    for (what, thread) in threads {
        match thread.join() {
            Ok(verdict) => verdict.map_err(|stop| Stop::fail(format!("{what}: {stop:?}")))?,
            Err(_) => return Err(Stop::fail(format!("{what}: a panic"))),
        }
    }
    Ok(())
}

/// Posts and polls all the time. As memory still answers, no post fails: requests stop completing, or complete with an
/// error, until the queue is full.
fn traffic(device: &Device, over: &AtomicBool, awaited: Awaited) -> Verdict {
    let context = Context::open(device)?;
    let pd = context.alloc_pd()?;
    let mut worker = Worker::new(&context, &pd, 4)?;
    let mut awaited = Some(awaited);
    let mut completed = 0u64;
    while !over.load(Ordering::Relaxed) {
        for at in 0..4 {
            match worker.post(at) {
                Ok(()) | Err(PostError::Full | PostError::State(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut completions = worker.cq.poll()?;
        while let Some(done) = completions.next() {
            completed += u64::from(done.status() == WcStatus::SUCCESS);
        }
        if completed > 0 {
            drop(awaited.take());
        }
    }
    if completed == 0 {
        return Err(Stop::fail("nothing ever completed"));
    }
    drop((worker, pd));
    gone("query_device after traffic", context.query_device())?;
    none_leaked(&context)
}

/// Makes and destroys objects until that fails.
fn creation(device: &Device, over: &AtomicBool, awaited: Awaited) -> Verdict {
    let context = Context::open(device)?;
    let link = link_of(&context)?;
    let round = || -> uverbs::Result<()> {
        let pd = context.alloc_pd()?;
        let _memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(5000)?;
        let cq = context.cq_builder(16).build()?;
        let srq = pd.srq_builder(8).build()?;
        let qp = pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build()?;
        qp.modify(
            &QpAttr::new()
                .state(QpState::INIT)
                .port(link.port)
                .pkey_index(link.pkey_index)
                .access(Access::empty()),
        )?;
        drop(Uar::alloc(&context, UarKind::NonCached)?);
        context.alloc_td()?;
        Ok(())
    };
    round()?;
    drop(awaited);
    // Between the time at which the device falls silent and that at which the driver removes it, commands fail with
    // errors of the driver.
    let mut failure = None;
    while !over.load(Ordering::Relaxed) {
        if let Err(error) = round() {
            failure = Some(error);
            thread::sleep(Duration::from_millis(5));
        }
    }
    match failure {
        Some(error) if error.message().is_empty() => {
            return Err(Stop::fail(format!("an error without words: {error:?}")));
        }
        Some(_) => {}
        None => return Err(Stop::fail("creating never failed")),
    }
    gone("alloc_pd", context.alloc_pd())?;
    none_leaked(&context)
}

/// Waits for a completion event, which never comes.
fn channel(device: &Device, awaited: Awaited) -> Verdict {
    let context = Context::open(device)?;
    let channel = context.create_comp_channel()?;
    let mut cq = context.cq_builder(4).channel(&channel).build()?;
    cq.req_notify(Notify::Next)?;
    drop(awaited);
    gone("wait", channel.wait(None))?;
    gone("wait again", channel.wait(Some(Duration::from_secs(1))))?;
    gone("try_next", channel.try_next())?;
    // Arming is a store, and cannot fail.
    cq.req_notify(Notify::Next)?;
    drop((channel, cq));
    none_leaked(&context)
}

/// Waits for the event that the device is gone.
fn events(device: &Device, awaited: Awaited) -> Verdict {
    let context = Context::open(device)?;
    drop(awaited);
    while let Some(event) = context.next_event(None)? {
        if event.kind == EventType::DEVICE_FATAL {
            // The driver raises the event each time that it finds the device failed, and the kernel when the device is
            // gone.
            loop {
                match context.next_event(None) {
                    Ok(Some(event)) if event.kind == EventType::DEVICE_FATAL => {}
                    other => break gone("next_event", other)?,
                }
            }
            gone("next_event again", context.next_event(Some(Duration::from_secs(20))))?;
            return none_leaked(&context);
        }
    }
    Err(Stop::fail("no event"))
}

fn none_leaked(context: &Context) -> Verdict {
    match context.leaked() {
        0 => Ok(()),
        count => Err(Stop::fail(format!("{count} objects are given up"))),
    }
}

/// A counter set of DEVX, which has no memory.
#[allow(unsafe_code, reason = "a command, which could name memory")]
fn counters(context: &Context) -> uverbs::Result<DevxObject> {
    let command = command::<16>(opcode::ALLOC_Q_COUNTER);
    // SAFETY: the command names neither memory nor keys.
    unsafe { DevxObject::create(context, &command, &mut [0; 16], &[]) }
}

/// Makes a umem, and a queue and an mkey in another, and returns the checks for the time after the device is gone: the
/// kernel may confirm the end of no umem.
fn lent_to_firmware(device: &Device) -> Verdict<impl FnOnce() -> Verdict> {
    let context = Context::open(device)?;
    let (pd, uar) = (context.alloc_pd()?, Uar::alloc(&context, UarKind::NonCached)?);
    let umem = || Umem::builder(&context).page_sizes(4096).allocate(0x2000);
    let (alone, kept) = (umem()?, umem()?);
    let queue = queue_in(&context, kept.id(), &uar, &[&kept, &uar])?;
    let mkey = mkey_in(&context, &pd, &kept)?;
    Ok(move || {
        // The kernel has destroyed it before it let go of the device, or tells nothing any more.
        let alone = match alone.destroy() {
            Ok(_) => None,
            Err(ErrorWith { object, error }) => {
                assert_eq!(error.errno(), Errno::IO, "{error}");
                Some(object)
            }
        };
        queue.destroy()?;
        assert_eq!(context.leaked(), 0);
        let refused = u64::from(alone.is_some());
        drop((alone, mkey, kept, uar, pd));
        let leaked = context.leaked();
        assert!((refused..=refused + 1).contains(&leaked), "{leaked} leaked, {refused} refused");
        Ok(())
    })
}

/// Makes one object of each kind, and returns the checks for the time after the device is gone.
fn holding(device: &Device) -> Verdict<impl FnOnce() -> Verdict> {
    let context = Context::open(device)?;
    let pd = context.alloc_pd()?;
    let mut memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(512)?;
    let window = pd.alloc_mw(WindowType::Two)?;
    let vector = loopback(&context)?;
    let (port, handle) = (vector.port, pd.create_ah(&vector)?);
    let mut cq = context.cq_builder(8).build()?;
    let mut srq = pd.srq_builder(8).build()?;
    let mut owner = Owner::new(&context, &pd)?;
    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let var = Var::alloc(&context, VarKind::Virtio)?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let counters = counters(&context)?;
    let events = DevxEvents::create(&context, DevxEventData::Entry)?;
    let queries = DevxQueries::create(&context)?;
    let lent_to_firmware = lent_to_firmware(device)?;
    let (page, bell) = (var.map()?, uar.map()?);
    page.ring_u32(0, 1)?;
    Ok(move || {
        lent_to_firmware()?;
        // Memory belongs to the process, and mapped pages reach no device.
        memory.write_at(0, 5)?;
        assert_eq!(memory.read_at(0), Some(5));
        page.ring_u32(0, 2)?;
        bell.ring_be64(0x800, 0)?;
        owner.post()?;
        assert!(cq.poll()?.next().is_none());
        gone("query_device", context.query_device())?;
        gone("query_port", context.query_port(port))?;
        gone("query_port_speed", context.query_port_speed(port))?;
        // The kernel still lists objects, and there are none.
        assert!(context.handles(ObjectKind::PD)?.is_empty());
        gone("modify", qp.modify(&QpAttr::new().state(QpState::ERR)))?;
        gone("query", qp.query())?;
        gone("resize", cq.resize(32))?;
        gone("set_limit", srq.set_limit(2))?;
        gone("alloc_mw", pd.alloc_mw(WindowType::Two))?;
        gone("create_ah", pd.create_ah(&vector))?;
        gone("create_cq", context.cq_builder(4).build())?;
        gone("create_qp", pd.qp_builder(&cq, &cq, QpType::RC).build())?;
        gone("create_srq", pd.srq_builder(4).build())?;
        gone("allocate", pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(100))?;
        gone("open_xrcd", context.xrcd_builder().build())?;
        gone("Var::alloc", Var::alloc(&context, VarKind::Virtio))?;
        gone("Uar::alloc", Uar::alloc(&context, UarKind::NonCached))?;
        gone("DevxObject::create", self::counters(&context))?;
        gone("DevxEvents::try_next", events.try_next())?;
        gone("DevxEvents::wait", events.wait(None))?;
        gone("DevxQueries::query", queries.query(&counters, &[0; 32], 256, 1))?;
        gone("DevxQueries::try_next", queries.try_next())?;
        gone("DevxQueries::wait", queries.wait(None))?;
        counters.destroy()?;
        // The kernel has destroyed all objects, so that their destruction is no error, one by one or by drop; lent
        // registers still come back.
        drop(owner);
        context.alloc_td()?;
        qp.destroy()?;
        window.destroy()?;
        handle.destroy()?;
        memory.destroy()?;
        var.destroy()?;
        uar.destroy()?;
        page.ring_u32(0, 3)?;
        drop((pd, srq, cq, page, bell));
        none_leaked(&context)
    })
}
