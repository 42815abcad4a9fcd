//! Forked children: nothing that they do or drop touches the parent's objects, and they can start
//! afresh on the file that they inherited.

use crate::pair::{Config, PATIENCE, Pair};
use crate::verdict::{Stop, Verdict, trials};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use std::time::Instant;
use uverbs::{Access, Context, ObjectKind, PollError, PostError, QpAttr, QpState, Rereg};

trials![
    calls_in_the_child_are_refused,
    dropping_in_the_child_destroys_nothing,
    destroying_in_the_child_is_refused,
    child_can_start_afresh,
    parent_cannot_reimport,
    file_stays_open_for_the_child,
    grandchildren_are_children,
];

/// Runs `child` in a forked child with its copy of `value`, and fails if that fails.
#[allow(unsafe_code, reason = "forking is")]
fn in_child<T>(value: T, child: impl FnOnce(T) -> Verdict) -> Verdict<T> {
    // SAFETY: the other threads of this process wait for a test to end, without a lock held; the
    // child runs the closure and ends without returning from here.
    let pid = match unsafe { fork() }? {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let run = std::panic::AssertUnwindSafe(|| child(value));
            let status = match std::panic::catch_unwind(run) {
                Ok(Ok(())) => 0,
                Ok(Err(stop)) => {
                    eprintln!("in the child: {stop:?}");
                    1
                }
                Err(_) => 2,
            };
            // SAFETY: it ends the process, without what the parent has still to print.
            unsafe { nix::libc::_exit(status) }
        }
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG))? {
            WaitStatus::StillAlive if Instant::now() < deadline => std::thread::yield_now(),
            WaitStatus::Exited(_, 0) => return Ok(value),
            other => {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
                return Err(Stop::fail(format!("the child ended as {other:?}")));
            }
        }
    }
}

/// How many objects of each kind a context has.
fn census(context: &Context) -> Verdict<Vec<usize>> {
    let kinds = [ObjectKind::PD, ObjectKind::CQ, ObjectKind::QP, ObjectKind::SRQ, ObjectKind::MR];
    let count = |kind| context.handles(kind).map(|handles| handles.len());
    Ok(kinds.into_iter().map(count).collect::<uverbs::Result<Vec<_>>>()?)
}

fn calls_in_the_child_are_refused() -> Verdict {
    let pair = Pair::new(Config { srq: true, ..Config::rc() })?;
    let mut pair = in_child(pair, |mut pair| {
        let b = &mut pair.b;
        let errors = [
            b.context.alloc_pd().unwrap_err(),
            b.context.alloc_td().unwrap_err(),
            b.context.query_device().unwrap_err(),
            b.context.query_port(1).unwrap_err(),
            b.context.gid_table().unwrap_err(),
            b.context.handles(ObjectKind::PD).unwrap_err(),
            b.context.create_comp_channel().unwrap_err(),
            b.context.try_next_event().unwrap_err(),
            b.context.create_cq(1).build().unwrap_err(),
            b.pd.allocate::<u8>(64).unwrap_err(),
            b.pd.create_srq(1).build().unwrap_err(),
            b.pd.create_qp(&b.cq, &b.cq, uverbs::QpType::RC).build().unwrap_err(),
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
    let before = (census(&pair.a.context)?, census(&pair.b.context)?);
    let mut pair = in_child(pair, |pair| {
        drop(pair);
        Ok(())
    })?;
    assert_eq!((census(&pair.a.context)?, census(&pair.b.context)?), before);
    for seed in 0..5 {
        pair.message(seed, 5000)?;
    }
    Ok(())
}

fn destroying_in_the_child_is_refused() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let before = census(&pair.b.context)?;
    let mut pair = in_child(pair, |pair| {
        let b = pair.b;
        let (qp, error) = b.qp.destroy().unwrap_err();
        assert!(error.is_forked(), "{error:?}");
        drop(qp);
        assert!(b.memory.destroy().unwrap_err().1.is_forked());
        assert!(b.cq.destroy().is_err());
        Ok(())
    })?;
    assert_eq!(census(&pair.b.context)?, before);
    pair.message(1, 100)
}

fn child_can_start_afresh() -> Verdict {
    let pair = Pair::new(Config::rc())?;
    let before = census(&pair.b.context)?;
    let mut pair = in_child(pair, |pair| {
        let own = pair.b.context.reimport()?;
        // The file is the parent's, and so are its objects.
        assert_eq!(census(&own)?, census(&pair.b.context.reimport()?)?);
        let mut fresh = Pair::on(own.clone(), own, Config::rc())?;
        fresh.connect()?;
        for seed in 0..5 {
            fresh.message(seed, 2000)?;
        }
        // Objects of the two lives do not mix.
        let mixed = fresh.a.pd.create_qp(&pair.b.cq, &fresh.a.cq, uverbs::QpType::RC).build();
        assert!(mixed.is_err());
        Ok(())
    })?;
    // What the child made, the child destroyed.
    assert_eq!(census(&pair.b.context)?, before);
    pair.message(1, 100)
}

fn parent_cannot_reimport() -> Verdict {
    let context = crate::env::open()?;
    assert_eq!(context.reimport().unwrap_err().errno(), uverbs::Errno::INVAL);
    Ok(())
}

fn file_stays_open_for_the_child() -> Verdict {
    let device = crate::env::device();
    let idle = device.resources()?;
    let context = crate::env::open()?;
    let pd = context.alloc_pd()?;
    in_child((context, pd), |(context, pd)| {
        let own = context.reimport()?;
        drop(pd);
        drop(context);
        assert_eq!(own.handles(ObjectKind::PD)?.len(), 1);
        own.alloc_pd()?;
        Ok(())
    })?;
    assert_eq!(device.resources()?, idle);
    Ok(())
}

fn grandchildren_are_children() -> Verdict {
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
