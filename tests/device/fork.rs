//! Forked children: no call or drop of theirs touches the parent's objects, and they can start
//! afresh on the inherited file.

use crate::capability::Capability;
use crate::census::{census, registers};
use crate::env;
use crate::pair::{Config, PATIENCE, Pair};
use crate::partner::Loop;
use crate::pattern;
use crate::verdict::{Stop, Verdict, require, trials};
use memmap2::{MmapMut, MmapOptions};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use std::time::Instant;
use uverbs::{Access, Context, ObjectKind, PollError, PostError, QpAttr, QpState, Rereg, WcStatus};

trials![
    calls_in_the_child_are_refused,
    dropping_in_the_child_destroys_nothing,
    destroying_in_the_child_is_refused,
    child_reimports_the_context_and_works,
    parent_cannot_reimport,
    file_stays_open_for_the_child,
    grandchild_is_refused_like_a_child,
    child_imports_the_objects_that_the_parent_exported,
    registered_pages_stay_the_parents,
    registered_huge_pages_stay_the_parents,
];

/// Runs `child` in a forked child with its copy of `value`, and fails if that fails.
pub(crate) fn in_child<T>(value: T, child: impl FnOnce(T) -> Verdict) -> Verdict<T> {
    let mut value = Some(value);
    let pid = spawn(|| value.take().map_or(Ok(()), child))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive if Instant::now() < deadline => std::thread::yield_now(),
            WaitStatus::Exited(_, 0) => break,
            other => {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
                return Err(Stop::fail(format!("the child ended as {other:?}")));
            }
        }
    }
    value.ok_or_else(|| Stop::fail("the child took the value of its parent"))
}

/// Forks a child that runs `child` and ends with 0 if that succeeds.
#[allow(unsafe_code, reason = "forking is")]
pub(crate) fn spawn(child: impl FnOnce() -> Verdict) -> Verdict<Pid> {
    // SAFETY: the other threads of this process wait for a test to end and hold no lock; the child
    // runs the closure and ends without returning from here.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child),
        ForkResult::Child => {
            let status = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)) {
                Ok(Ok(())) => 0,
                Ok(Err(stop)) => {
                    eprintln!("in the child: {stop:?}");
                    1
                }
                Err(_) => 2,
            };
            // SAFETY: it ends the process, and does not print the parent's buffered output.
            unsafe { nix::libc::_exit(status) }
        }
    }
}

/// The numbers of a context's objects of each kind, and of its pages of registers.
fn counted(context: &Context) -> Verdict<(Vec<usize>, usize)> {
    Ok((census(context)?, registers(context)?.len()))
}

fn calls_in_the_child_are_refused() -> Verdict {
    let pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    let mut pair = in_child(pair, |mut pair| {
        let b = &mut pair.b;
        let errors = [
            b.context.alloc_pd().unwrap_err(),
            b.context.alloc_td().unwrap_err(),
            b.context.query_device().unwrap_err(),
            b.context.query_port(env::port()).unwrap_err(),
            b.context.gid_table().unwrap_err(),
            b.context.handles(ObjectKind::PD).unwrap_err(),
            b.context.create_comp_channel().unwrap_err(),
            b.context.try_next_event().unwrap_err(),
            b.context.cq_builder(1).build().unwrap_err(),
            b.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap_err(),
            b.pd.srq_builder(1).build().unwrap_err(),
            b.pd.qp_builder(&b.cq, &b.cq, uverbs::QpType::RC).build().unwrap_err(),
            b.cq.resize(100).unwrap_err(),
            b.cq.req_notify(uverbs::Notify::Next).unwrap_err(),
            b.channel.try_next().unwrap_err(),
            b.qp.modify(&QpAttr::new().state(QpState::ERR)).unwrap_err(),
            b.qp.query().unwrap_err(),
            b.memory.rereg(Rereg::new().access(Access::LOCAL_WRITE)).unwrap_err(),
        ];
        for error in errors {
            assert!(error.is_forked(), "{error:?}");
        }
        assert_eq!(b.cq.poll().map(drop), Err(PollError::Forked));
        assert_eq!(b.qp.send_batch().map(drop), Err(PostError::Forked));
        let srq = b.srq.as_mut().expect("a pair with a shared receive queue");
        assert_eq!(srq.batch().map(drop), Err(PostError::Forked));
        assert!(srq.query().unwrap_err().is_forked());
        assert!(srq.set_limit(1).unwrap_err().is_forked());
        Ok(())
    })?;
    pair.message(1, 3000)
}

fn dropping_in_the_child_destroys_nothing() -> Verdict {
    let pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    let before = (counted(&pair.a.context)?, counted(&pair.b.context)?);
    let mut pair = in_child(pair, |pair| {
        drop(pair);
        Ok(())
    })?;
    assert_eq!((counted(&pair.a.context)?, counted(&pair.b.context)?), before);
    for seed in 0..5 {
        pair.message(seed, 5000)?;
    }
    Ok(())
}

fn destroying_in_the_child_is_refused() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let before = counted(&pair.b.context)?;
    let mut pair = in_child(pair, |pair| {
        let b = pair.b;
        let (qp, error) = b.qp.destroy().unwrap_err().into_parts();
        assert!(error.is_forked(), "{error:?}");
        drop(qp);
        assert!(b.memory.destroy().unwrap_err().error.is_forked());
        assert!(b.cq.destroy().is_err());
        Ok(())
    })?;
    assert_eq!(counted(&pair.b.context)?, before);
    pair.message(1, 100)
}

fn child_reimports_the_context_and_works() -> Verdict {
    env::processes()?;
    let pair = Pair::new(Config::rc())?;
    let before = counted(&pair.b.context)?;
    let mut pair = in_child(pair, |pair| {
        let own = pair.b.context.reimport()?;
        // The file is the parent's, and so are its objects.
        assert_eq!(census(&own)?, census(&pair.b.context.reimport()?)?);
        let mut fresh = Pair::on(own.clone(), own, Config::rc())?;
        fresh.connect()?;
        for seed in 0..5 {
            fresh.message(seed, 2000)?;
        }
        // Objects from before and after the fork do not mix.
        let mixed = fresh.a.pd.qp_builder(&pair.b.cq, &fresh.a.cq, uverbs::QpType::RC).build();
        assert!(mixed.is_err());
        Ok(())
    })?;
    // The child destroyed the objects that it made.
    assert_eq!(counted(&pair.b.context)?, before);
    pair.message(1, 100)
}

fn parent_cannot_reimport() -> Verdict {
    let context = env::open()?;
    assert_eq!(context.reimport().unwrap_err().errno(), uverbs::Errno::INVAL);
    Ok(())
}

fn file_stays_open_for_the_child() -> Verdict {
    env::processes()?;
    let idle = env::resources()?;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    in_child((context, pd), |(context, pd)| {
        let own = context.reimport()?;
        drop(pd);
        drop(context);
        assert_eq!(own.handles(ObjectKind::PD)?.len(), 1);
        own.alloc_pd()?;
        Ok(())
    })?;
    env::unchanged(&idle)
}

fn grandchild_is_refused_like_a_child() -> Verdict {
    env::processes()?;
    let pair = Pair::new(Config::rc())?;
    let mut pair = in_child(pair, |pair| {
        let own = pair.b.context.reimport()?;
        let own = in_child(own, |own| {
            assert!(own.alloc_pd().unwrap_err().is_forked());
            assert!(own.reimport()?.alloc_pd().is_ok());
            Ok(())
        })?;
        own.alloc_pd()?;
        Ok(())
    })?;
    pair.message(1, 100)
}

/// The child imports objects that were exported before the fork. It has the file but none of the
/// parent's objects, and reaches the parent's memory by its keys.
fn child_imports_the_objects_that_the_parent_exported() -> Verdict {
    env::processes()?;
    const BYTES: usize = 4096;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(2 * BYTES)?;
    region.copy_from(0, &pattern::bytes(pattern::POISON, 2 * BYTES))?;
    let before = counted(&context)?;
    let (sent_pd, sent) = (pd.export()?, region.export()?);
    let (context, _pd, region) = in_child((context, pd, region), |(context, pd, region)| {
        assert!(context.import_pd(&sent_pd).unwrap_err().is_forked());
        let own = context.reimport()?;
        let imported_pd = own.import_pd(&sent_pd)?;
        let imported = imported_pd.import_mr(&sent)?;
        let mut memory =
            imported_pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
        memory.copy_from(0, &pattern::bytes(21, BYTES))?;
        let mut path = Loop::new(&own, &imported_pd)?;
        let status = path.write(memory.sge(..)?, imported.remote(BYTES)?)?;
        assert_eq!(status, WcStatus::SUCCESS);
        drop((path, memory));
        imported.unimport()?;
        imported_pd.unimport()?;
        drop((region, pd, context, own));
        Ok(())
    })?;
    let mut bytes = vec![0; BYTES];
    region.copy_to(BYTES, &mut bytes)?;
    pattern::check(&bytes, 21);
    region.copy_to(0, &mut bytes)?;
    assert_eq!(bytes, pattern::bytes(pattern::POISON, 2 * BYTES)[..BYTES]);
    assert_eq!(counted(&context)?, before);
    Ok(())
}

/// While a child shares the parent's memory, the parent writes, and reads the device's data.
fn registered_pages_stay_the_parents() -> Verdict {
    stay_the_parents(MmapMut::map_anon(1 << 16)?)
}

/// Kernels before Linux 5.12 would give the parent new pages.
fn registered_huge_pages_stay_the_parents() -> Verdict {
    const HUGE: usize = 2 << 20;
    require(env::free_huge_pages()? > 0, Capability::HugePages, "none is free")?;
    stay_the_parents(MmapOptions::new().len(HUGE).huge(Some(21)).map_anon()?)
}

fn stay_the_parents(memory: MmapMut) -> Verdict {
    const BYTES: usize = 4096;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).register(memory)?;
    region.copy_from(0, &pattern::bytes(pattern::POISON, BYTES))?;
    let child = spawn(|| {
        loop {
            std::thread::park();
        }
    })?;
    let written = (|| -> Verdict<Vec<u8>> {
        // Of two processes that share a page copy-on-write, the first that writes gets a copy.
        region.copy_from(0, &pattern::bytes(pattern::POISON, BYTES))?;
        let mut source = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
        source.copy_from(0, &pattern::bytes(5, BYTES))?;
        let mut path = Loop::new(&context, &pd)?;
        let status = path.write(source.sge(..)?, region.remote(0)?)?;
        assert_eq!(status, WcStatus::SUCCESS);
        let mut bytes = vec![0; BYTES];
        region.copy_to(0, &mut bytes)?;
        Ok(bytes)
    })();
    kill(child, Signal::SIGKILL)?;
    waitpid(child, None)?;
    pattern::check(&written?, 5);
    Ok(())
}
