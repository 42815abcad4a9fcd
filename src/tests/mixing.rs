//! Objects of two contexts never meet: a handle of one names something else in the other.

use super::{Bench, bring_up};
use crate::uverbs::scripted::Script;
use crate::{
    Access, AddressVector, Advice, Context, Destination, Errno, Error, PostError, Qkey, QpType,
    Qpn, QueuePair, Rereg, RingError, SendWr, WindowType,
};

/// Takes the error of a refused call; `Ok` and every other error fail the test.
fn refused<T>(result: crate::Result<T>) -> Error {
    let Err(error) = result else { panic!("objects of two contexts were mixed") };
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    error
}

fn names_both(error: &Error) {
    let text = error.to_string();
    assert!(text.contains("rxe0") && text.contains("rxe1"), "{text}");
}

#[test]
fn every_call_that_takes_two_objects_refuses_those_of_two_contexts() {
    let here = Bench::new();
    let script = Script::new();
    let there = script.open("rxe1");
    let pd = there.alloc_pd().unwrap();
    let cq = there.cq_builder(4).build().unwrap();
    let srq = pd.srq_builder(4).build().unwrap();
    let td = there.alloc_td().unwrap();
    let channel = there.create_comp_channel().unwrap();
    let commands = (here.script.log().len(), script.log().len());

    names_both(&refused(here.pd.qp_builder(&cq, &here.cq, QpType::RC).build()));
    names_both(&refused(here.pd.qp_builder(&here.cq, &cq, QpType::RC).build()));
    names_both(&refused(here.pd.qp_builder(&here.cq, &here.cq, QpType::RC).srq(&srq).build()));
    names_both(&refused(here.pd.parent_domain_builder().thread_domain(&td).build()));
    names_both(&refused(here.context.cq_builder(4).channel(&channel).build()));
    assert_eq!((here.script.log().len(), script.log().len()), commands, "a kernel was asked");

    let qp = pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    let region =
        pd.mr_builder().access(Access::LOCAL_WRITE | Access::MW_BIND).allocate::<u8>(64).unwrap();
    let our_qp = here.qp(QpType::RC);
    let our_region = here.pd.mr_builder().access(Access::MW_BIND).allocate::<u8>(64).unwrap();
    let mut window = here.pd.alloc_mw(WindowType::Two).unwrap();
    let commands = (here.script.log().len(), script.log().len());
    names_both(&refused(window.bind(&our_qp, &region, .., Access::REMOTE_READ)));
    names_both(&refused(window.bind(&qp, &our_region, .., Access::REMOTE_READ)));
    assert_eq!((here.script.log().len(), script.log().len()), commands, "a kernel was asked");
    let mut changed = here.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64).unwrap();
    let paged =
        pd.mr_builder().access(Access::LOCAL_WRITE | Access::ON_DEMAND).allocate::<u8>(64).unwrap();
    let commands = (here.script.log().len(), script.log().len());
    names_both(&refused(changed.rereg(Rereg::new().protection_domain(&pd))));
    let ranges = [paged.on_demand(..).unwrap()];
    names_both(&refused(here.pd.advise(Advice::PREFETCH, &ranges, true)));
    assert_eq!((here.script.log().len(), script.log().len()), commands, "a kernel was asked");
}

/// Two contexts of one device are still two files.
#[test]
fn objects_of_two_contexts_of_one_device_do_not_mix() {
    let first = Bench::new();
    let second = Bench::new();
    refused(first.pd.qp_builder(&second.cq, &second.cq, QpType::RC).build());
    // A clone names the same file.
    let clone: Context = first.context.clone();
    let cq = clone.cq_builder(4).build().unwrap();
    first.pd.qp_builder(&cq, &first.cq, QpType::RC).build().unwrap();
}

#[test]
fn parts_of_two_queue_pairs_do_not_join() {
    let bench = Bench::new();
    let mut first = bench.qp(QpType::RC).split();
    let mut second = bench.qp(QpType::RC).split();
    std::mem::swap(&mut first.send, &mut second.send);
    let (mut first, error) = QueuePair::join(first).unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::INVAL);
    std::mem::swap(&mut first.send, &mut second.send);
    let recv = first.recv.take();
    let (mut first, _) = QueuePair::join(first).unwrap_err().into_parts();
    first.recv = second.recv.take();
    let (mut first, _) = QueuePair::join(first).unwrap_err().into_parts();
    first.recv = recv;
    let mut joined = QueuePair::join(first).unwrap();
    let mut batch = joined.send_batch().unwrap();
    batch.push(SendWr::send(&[])).unwrap();
    super::ring(batch).unwrap();
}

/// Neither type has a receive queue that could be missing.
#[test]
fn queue_pairs_without_receives_of_their_own_split_and_join() {
    let bench = Bench::on(Script::mlx5());
    let srq = bench.pd.srq_builder(4).build().unwrap();
    let make = |qp_type| bench.pd.qp_builder(&bench.cq, &bench.cq, qp_type);
    for (builder, refusal) in [
        (make(QpType::RC).srq(&srq), PostError::SharedReceives),
        (make(QpType::XRC_INI), PostError::Unsupported),
    ] {
        let qp = builder.build().unwrap();
        bring_up(&bench.script, &qp);
        let mut joined = QueuePair::join(qp.split()).unwrap();
        assert_eq!(joined.recv_batch().unwrap_err(), refusal);
        joined.send_batch().unwrap();
    }
}

#[test]
fn a_datagram_goes_by_an_address_of_its_own_protection_domain() {
    for device in [Script::new, Script::mlx5] {
        check_addresses_of(device);
    }
}

fn check_addresses_of(device: fn() -> Script) {
    let bench = Bench::on(device());
    let vector = AddressVector::global(1, 0, bench.context.query_gid(1, 0).unwrap().gid);
    let other_pd = bench.context.alloc_pd().unwrap();
    let other = Bench::on(device());
    let parent = bench.pd.parent_domain_builder().build().unwrap();
    let foreign = [other_pd.create_ah(&vector).unwrap(), other.pd.create_ah(&vector).unwrap()];
    let own = [bench.pd.create_ah(&vector).unwrap(), parent.create_ah(&vector).unwrap()];
    let mut qp = bench.qp(QpType::UD);
    let mut batch = qp.send_batch().unwrap();
    for ah in &foreign {
        let to = Destination::new(ah, Qpn(1), Qkey(2));
        assert_eq!(batch.push(SendWr::send(&[]).to(to)), Err(PostError::ForeignAddress));
    }
    assert!(batch.is_empty());
    for ah in &own {
        batch.push(SendWr::send(&[]).to(Destination::new(ah, Qpn(1), Qkey(2)))).unwrap();
    }
    assert_eq!(batch.len(), 2);
}

#[allow(unsafe_code)]
#[test]
fn only_its_own_thread_domain_rings_a_queue() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    let mut own = context.alloc_td().unwrap();
    let mut sibling = context.alloc_td().unwrap();
    let mut stranger = Script::new().open("rxe1").alloc_td().unwrap();
    let domain = pd.parent_domain_builder().thread_domain(&own).build().unwrap();
    let mut qp = domain.qp_builder(cq, cq, QpType::RC).max_send_wr(4).build().unwrap();
    bring_up(script, &qp);
    let pending =
        |qp: &crate::QpControl| script.pending(qp.handle(), crate::uverbs::scripted::Role::Send);
    for td in [&mut sibling, &mut stranger] {
        let mut batch = qp.send_batch().unwrap();
        batch.push(SendWr::send(&[])).unwrap();
        // SAFETY: the scripted kernel touches no memory that a request names.
        let rung = unsafe { batch.ring(td) };
        assert_eq!(rung, Err(RingError::ForeignThreadDomain));
        assert_eq!(pending(&qp), 0, "nothing was sent");
    }
    let mut batch = qp.send_batch().unwrap();
    batch.push(SendWr::send(&[])).unwrap();
    // SAFETY: the scripted kernel touches no memory that a request names.
    unsafe { batch.ring(&mut own) }.unwrap();
    assert_eq!(pending(&qp), 1);
}
