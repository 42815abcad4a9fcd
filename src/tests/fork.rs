//! Objects that a forked child inherits are its parent's: calls fail with `Forked`, and dropping does nothing.

use super::{Bench, bring_up, poll_ids, ring, ring_recv, wc};
use crate::owned::OwnedCompletionQueue;
use crate::sync::fork::in_child;
use crate::uverbs::scripted::{Role, Script};
use crate::{
    Access, AddressVector, Errno, Gid, Notify, PollError, PostError, QpAttr, QpState, QpType,
    RecvWr, RingError, SendWr, WindowType,
};

fn address() -> AddressVector {
    AddressVector::global(1, 0, Gid([1; 16]))
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn in_a_child_every_call_fails_with_forked_and_makes_no_system_call() {
    let mut bench = Bench::new();
    let td = bench.context.alloc_td().unwrap();
    let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    let channel = bench.context.create_comp_channel().unwrap();
    let mut cq = bench.context.cq_builder(4).channel(&channel).build().unwrap();
    let mut srq = bench.pd.srq_builder(4).build().unwrap();
    let ah = bench.pd.create_ah(&address()).unwrap();
    let mut qp = bench.qp(QpType::RC);
    let ud = bench.qp(QpType::UD);
    let region = bench.pd.mr_builder().access(Access::MW_BIND).allocate::<u8>(64).unwrap();
    let mut window = bench.pd.alloc_mw(WindowType::Two).unwrap();
    let (script, live) = (bench.script.clone(), bench.script.live());
    let (commands, mappings) = (script.log().len(), script.mappings());

    in_child(|| {
        let Bench { context, pd, cq: other_cq, .. } = &mut bench;
        let new = other_cq.key();
        assert_eq!(new, other_cq.key());
        let errors = [
            context.alloc_pd().map(drop),
            context.alloc_td().map(drop),
            context.create_comp_channel().map(drop),
            context.cq_builder(4).build().map(drop),
            context.query_device().map(drop),
            context.query_port(1).map(drop),
            context.query_port_speed(1).map(drop),
            context.gid_table().map(drop),
            context.handles(crate::ObjectKind::QP).map(drop),
            context.try_next_event().map(drop),
            context.next_event(None).map(drop),
            channel.try_next().map(drop),
            channel.wait(None).map(drop),
            pd.create_ah(&address()).map(drop),
            pd.srq_builder(4).build().map(drop),
            pd.qp_builder(other_cq, other_cq, QpType::RC).build().map(drop),
            pd.alloc_mw(WindowType::One).map(drop),
            pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(8).map(drop),
            pd.parent_domain_builder().build().map(drop),
            cq.req_notify(Notify::Next),
            cq.resize(32),
            srq.set_limit(1),
            srq.resize(32),
            srq.query().map(drop),
            qp.query().map(drop),
            qp.modify(&QpAttr::new().state(QpState::ERR)),
            ud.attach_mcast("ff12::1".parse::<std::net::Ipv6Addr>().unwrap().into(), 0).map(drop),
            window.bind(&qp, &region, .., Access::REMOTE_READ).map(drop),
            window.reallocate(),
        ];
        for (index, result) in errors.into_iter().enumerate() {
            let Err(error) = result else { panic!("call {index} was carried out") };
            assert!(error.is_forked(), "call {index}: {error}");
        }
        assert_eq!(cq.poll().err(), Some(PollError::Forked));
        assert_eq!(srq.batch().err(), Some(PostError::Forked));
        assert_eq!(qp.send_batch().err(), Some(PostError::Forked));
        assert_eq!(qp.recv_batch().err(), Some(PostError::Forked));
        assert_eq!(script.log().len(), commands, "the kernel heard of it");
    });
    // `destroy` returns `Forked` with the object, whose drop does nothing.
    let mut everything = Some((window, region, qp, ud, ah, srq, cq, domain, td, channel));
    in_child(|| {
        let (window, region, qp, ud, ah, srq, cq, domain, td, channel) = everything.take().unwrap();
        assert!(window.destroy().unwrap_err().error.is_forked());
        assert!(region.destroy().unwrap_err().error.is_forked());
        assert!(qp.destroy().unwrap_err().error.is_forked());
        assert!(ud.split().send.batch().is_err());
        assert!(ah.destroy().unwrap_err().error.is_forked());
        assert!(srq.destroy().unwrap_err().error.is_forked());
        assert!(cq.destroy().unwrap_err().error.is_forked());
        assert!(domain.destroy().unwrap_err().error.is_forked());
        assert!(td.destroy().unwrap_err().error.is_forked());
        drop(channel);
        assert_eq!(script.log().len(), commands, "the kernel heard of it");
        assert_eq!(script.live(), live);
        assert_eq!(script.mappings(), mappings, "the child unmapped inherited queues");
    });
    // The parent goes on undisturbed.
    let (.., mut qp, ud, ah, srq, cq, domain, td, channel) = everything.unwrap();
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::send(&[])).unwrap();
    ring(batch).unwrap();
    drop((qp, ud, ah, srq, cq, domain, td, channel));
    let Bench { context, pd, cq, .. } = bench;
    drop((pd, cq));
    assert_eq!(script.live(), []);
    assert_eq!((context.leaked(), script.mappings()), (0, 0));
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_child_adopts_no_queue_pair() {
    let bench = Bench::new();
    let mut cq = OwnedCompletionQueue::<u32>::new(bench.cq);
    let qp = bench.pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).build().unwrap();
    let mut qp = Some(qp);
    in_child(|| {
        let refused = cq.adopt(qp.take().unwrap()).err().unwrap();
        assert!(refused.error.is_forked(), "{}", refused.error);
    });
    assert!(cq.adopt(qp.unwrap()).is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_batch_or_poll_begun_before_the_fork_does_nothing_in_the_child() {
    let mut bench = Bench::new();
    let mut qp = bench.qp(QpType::RC);
    let handle = qp.handle();
    let script = bench.script.clone();
    for id in 0..3 {
        assert!(script.complete(bench.cq.handle(), wc(99, id)));
    }
    let parts = &mut qp;
    let mut batch = parts.send_batch().unwrap();
    batch.push(SendWr::send(&[]).id(1)).unwrap();
    let mut sends = Some(batch);
    in_child(|| {
        let mut batch = sends.take().unwrap();
        assert_eq!(batch.push(SendWr::send(&[]).id(2)), Err(PostError::Forked));
        assert_eq!(ring(batch), Err(RingError::Forked));
    });
    assert_eq!(script.pending(handle, Role::Send), 0);
    ring(sends.unwrap()).unwrap();
    assert_eq!(script.pending(handle, Role::Send), 1);

    let mut batch = qp.recv_batch().unwrap();
    batch.push(RecvWr::new(&[]).id(1)).unwrap();
    let mut receives = Some(batch);
    in_child(|| {
        let mut batch = receives.take().unwrap();
        assert_eq!(batch.push(RecvWr::new(&[]).id(2)), Err(PostError::Forked));
        assert_eq!(ring_recv(batch), Err(RingError::Forked));
    });
    assert_eq!(script.pending(handle, Role::Recv), 0);
    ring_recv(receives.unwrap()).unwrap();
    assert_eq!(script.pending(handle, Role::Recv), 1);

    let cq = bench.cq.handle();
    let mut completions = Some(bench.cq.poll().unwrap());
    in_child(|| {
        let mut completions = completions.take().unwrap();
        while completions.next().is_some() {}
    });
    assert_eq!(script.pending(cq, Role::Cq), 3);
    drop(completions);
    assert_eq!(poll_ids(&mut bench.cq), [0, 1, 2]);
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn a_child_can_reimport_the_context() {
    let bench = Bench::new();
    let error = bench.context.reimport().unwrap_err();
    assert_eq!((error.errno(), error.is_forked()), (Errno::INVAL, false));
    let script = bench.script.clone();
    let inherited = script.live();
    in_child(|| {
        let context = bench.context.reimport().unwrap();
        let pd = context.alloc_pd().unwrap();
        let mut cq = context.cq_builder(4).build().unwrap();
        let mut qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
        bring_up(&script, &qp);
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[])).unwrap();
        ring(batch).unwrap();
        assert!(script.complete(cq.handle(), wc(qp.qpn().0, 5)));
        assert_eq!(poll_ids(&mut cq), [5]);
        // Objects of parent and child cannot be used together, and the parent's stay.
        assert!(bench.pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap_err().is_forked());
        assert_eq!(
            pd.qp_builder(&bench.cq, &cq, QpType::RC).build().unwrap_err().errno(),
            Errno::INVAL
        );
        // A grandchild inherits from both.
        in_child(|| {
            assert!(context.alloc_pd().unwrap_err().is_forked());
            assert!(bench.context.alloc_pd().unwrap_err().is_forked());
            assert_eq!(cq.poll().err(), Some(PollError::Forked));
            let own = context.reimport().unwrap();
            let again = bench.context.reimport().unwrap();
            own.alloc_pd().unwrap().destroy().unwrap();
            again.alloc_pd().unwrap().destroy().unwrap();
        });
        assert!(context.reimport().is_err());
        drop((qp, cq, pd, context));
        assert_eq!(script.live(), inherited);
        assert_eq!(script.complaints(), [""; 0]);
    });
    bench.pd.create_ah(&address()).unwrap();
    let opened_later = Script::new().open("rxe1");
    assert!(opened_later.reimport().is_err());
}
