//! Creation that fails: at every step, on kernels that lack or shorten something.

use super::Bench;
use crate::uverbs::scripted::{Op, Script};
use crate::{AddressVector, Errno, Gid, QpType, RecvWr, Result};
use uverbs_uapi::object::UVERBS_ATTR_UHW_OUT;
use uverbs_uapi::rxe::rxe_create_ah_resp;

/// Lets each step of `create` fail in turn until there are no more, and checks that a failure
/// leaves nothing behind.
fn survives_any_failure<T>(script: &Script, errno: Errno, create: impl Fn() -> Result<T>) -> u64 {
    let (live, mappings) = (script.live(), script.mappings());
    for step in 1.. {
        script.fail_step(step, errno);
        match create() {
            Ok(made) => {
                assert!(script.cancel_failure(), "step {step} failed, and nobody noticed");
                drop(made);
                assert_eq!(script.live(), live, "dropping it leaves something");
                assert_eq!(script.mappings(), mappings);
                assert_eq!(script.complaints(), [""; 0]);
                return step - 1;
            }
            Err(error) => {
                assert_eq!(error.errno(), errno, "{error}");
                assert_eq!(script.live(), live, "failing in step {step} leaves something");
                assert_eq!(script.mappings(), mappings, "step {step} leaks a mapping");
                assert_eq!(script.complaints(), [""; 0]);
            }
        }
        assert!(step < 20, "creation never succeeds");
    }
    unreachable!()
}

#[test]
fn a_context_takes_two_commands_and_closes_its_file_if_either_fails() {
    for step in 1..=2 {
        let script = Script::new();
        script.fail_step(step, Errno::NOMEM);
        assert_eq!(script.try_open("rxe0").unwrap_err().errno(), Errno::NOMEM);
        assert_eq!(script.left_at_close(), Some(vec![]));
    }
    let script = Script::new();
    script.fail_step(3, Errno::NOMEM);
    let context = script.open("rxe0");
    assert!(script.cancel_failure());
    assert_eq!(script.left_at_close(), None);
    drop(context);
    assert_eq!(script.left_at_close(), Some(vec![]));
}

#[test]
fn every_creation_survives_failure_of_every_step() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    let srq = pd.srq_builder(4).build().unwrap();
    let channel = context.create_comp_channel().unwrap();
    let vector = AddressVector::global(1, 0, Gid([1; 16]));
    for errno in [Errno::NOMEM, Errno::AGAIN, Errno::IO] {
        // One command each, and one mapping for each queue.
        let steps = [
            survives_any_failure(script, errno, || context.alloc_pd()),
            survives_any_failure(script, errno, || context.create_comp_channel()),
            survives_any_failure(script, errno, || pd.create_ah(&vector)),
            survives_any_failure(script, errno, || context.cq_builder(8).build()),
            survives_any_failure(script, errno, || {
                context.cq_builder(8).channel(&channel).vector(1).build()
            }),
            survives_any_failure(script, errno, || pd.srq_builder(8).max_sge(3).build()),
            survives_any_failure(script, errno, || pd.qp_builder(cq, cq, QpType::RC).build()),
            survives_any_failure(script, errno, || {
                pd.qp_builder(cq, cq, QpType::UD).srq(&srq).build()
            }),
        ];
        assert_eq!(steps, [1, 1, 1, 2, 2, 2, 3, 2]);
    }
    assert_eq!(context.leaked(), 0);
}

#[test]
fn thread_and_parent_domains_need_no_kernel() {
    let bench = Bench::new();
    let before = bench.script.log().len();
    bench.script.fail_step(1, Errno::NOMEM);
    let td = bench.context.alloc_td().unwrap();
    let domain = bench.pd.parent_domain_builder().thread_domain(&td).build().unwrap();
    // A parent domain is accepted in place of a protection domain, even under another parent domain.
    let nested = domain.parent_domain_builder().build().unwrap();
    assert_eq!((domain.handle(), nested.handle()), (bench.pd.handle(), bench.pd.handle()));
    drop((td, domain, nested));
    assert_eq!(bench.script.log().len(), before);
    assert!(bench.script.cancel_failure());
}

#[test]
fn a_kernel_without_a_method_is_unsupported_and_keeps_its_own_word() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    let vector = AddressVector::global(1, 0, Gid([1; 16]));
    for errno in [Errno::PROTONOSUPPORT, Errno::NOTTY, Errno::NOSYS, Errno::OPNOTSUPP] {
        let errors = [
            (Op::CREATE_CQ, "create_cq"),
            (Op::CREATE_QP, "create_qp"),
            (Op::CREATE_SRQ, "create_srq"),
            (Op::CREATE_AH, "create_ah"),
            (Op::ALLOC_PD, "alloc_pd"),
            (Op::CREATE_COMP_CHANNEL, "create_comp_channel"),
        ]
        .map(|(op, verb)| {
            script.refuse(op, errno);
            let error = match op {
                Op::CREATE_CQ => context.cq_builder(8).build().unwrap_err(),
                Op::CREATE_QP => pd.qp_builder(cq, cq, QpType::RC).build().unwrap_err(),
                Op::CREATE_SRQ => pd.srq_builder(8).build().unwrap_err(),
                Op::CREATE_AH => pd.create_ah(&vector).unwrap_err(),
                Op::ALLOC_PD => context.alloc_pd().unwrap_err(),
                _ => context.create_comp_channel().unwrap_err(),
            };
            script.allow(op);
            assert_eq!(error.verb(), verb);
            error
        });
        for error in errors {
            assert!(error.is_unsupported(), "{error}");
            assert_eq!(error.kernel_errno(), Some(errno));
        }
    }
    let script = Script::new();
    script.refuse(Op::GET_CONTEXT, Errno::PROTONOSUPPORT);
    let error = script.try_open("rxe0").unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("Linux 5.10"), "{error}");
    let script = Script::new();
    script.refuse(Op::ALLOC_EVENTS, Errno::PROTONOSUPPORT);
    assert!(script.try_open("rxe0").unwrap_err().is_unsupported());
}

/// After a short response of the driver, the library maps or takes over nothing that the response
/// does not name.
#[test]
fn short_responses_fail_cleanly() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    let (live, mappings) = (script.live(), script.mappings());
    for length in [0, 3] {
        for op in [Op::CREATE_CQ, Op::CREATE_QP, Op::CREATE_SRQ, Op::CREATE_COMP_CHANNEL] {
            script.shorten_response(op, length);
        }
        assert!(context.cq_builder(8).build().is_err());
        assert!(pd.qp_builder(cq, cq, QpType::RC).build().is_err());
        assert!(pd.srq_builder(8).build().is_err());
        assert!(context.create_comp_channel().is_err());
        for op in [Op::CREATE_CQ, Op::CREATE_QP, Op::CREATE_SRQ, Op::CREATE_COMP_CHANNEL] {
            script.allow_full_response(op);
        }
        assert_eq!(script.live(), live);
        assert_eq!(script.mappings(), mappings);
    }
    assert_eq!(script.complaints(), [""; 0]);
}

/// Soft-RoCE before Linux 5.16: a request could not name the handle.
#[test]
fn an_address_handle_without_a_number_is_refused_and_destroyed() {
    let bench = Bench::new();
    let Bench { script, pd, .. } = &bench;
    let live = script.live();
    let untold = |driver: &mut rxe_create_ah_resp| driver.ah_num = 0;
    script.forge(Op::CREATE_AH, UVERBS_ATTR_UHW_OUT, untold);
    let error = pd.create_ah(&AddressVector::global(1, 0, Gid([1; 16]))).unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("Linux 5.16"), "{error}");
    assert_eq!(script.live(), live);
    assert_eq!(script.complaints(), [""; 0]);
}

#[test]
fn a_request_beyond_a_limit_names_the_limit() {
    let bench = Bench::new();
    let Bench { context, pd, cq, .. } = &bench;
    let refused = [
        (context.cq_builder(0).build().map(drop), "0 entries"),
        (context.cq_builder(40_000).build().map(drop), "cqe 40000 is above the 32767 of rxe0 ("),
        (context.cq_builder(8).vector(2).build().map(drop), "vector 2"),
        (pd.srq_builder(0).build().map(drop), "0 receives"),
        (pd.srq_builder(1 << 20).build().map(drop), "max_wr 1048576 is above the 16384 of rxe0 ("),
        (pd.srq_builder(8).max_sge(33).build().map(drop), "max_sge 33 is above the 32 of rxe0 ("),
        (
            pd.qp_builder(cq, cq, QpType::RC).max_send_wr(1 << 20).build().map(drop),
            "create_qp: max_send_wr 1048576 is above the 16384 of rxe0 (",
        ),
        (
            pd.qp_builder(cq, cq, QpType::RC).max_recv_wr(1 << 20).build().map(drop),
            "create_qp: max_recv_wr 1048576 is above the 16384 of rxe0 (",
        ),
        (
            pd.qp_builder(cq, cq, QpType::RC).max_send_sge(33).build().map(drop),
            "create_qp: max_send_sge 33 is above the 32 of rxe0 (",
        ),
        (
            pd.qp_builder(cq, cq, QpType::RC).max_recv_sge(33).build().map(drop),
            "create_qp: max_recv_sge 33 is above the 32 of rxe0 (",
        ),
        (
            pd.qp_builder(cq, cq, QpType::RC).max_inline_data(513).build().map(drop),
            "create_qp: max_inline_data 513 is above the 512 of rxe0 (",
        ),
        (
            pd.qp_builder(cq, cq, QpType::RC)
                .max_send_sge(33)
                .max_recv_wr(1 << 20)
                .build()
                .map(drop),
            "max_recv_wr 1048576 is above the 16384 of rxe0, max_send_sge 33 is above the 32 of rxe0 (",
        ),
        (
            pd.create_ah(&AddressVector::local(1, 7)).map(drop),
            "create_ah: port 1 is Ethernet, where a path needs a global part",
        ),
    ];
    for (result, text) in refused {
        let error = result.unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.to_string().contains(text), "{error}");
    }
    let error = pd.qp_builder(cq, cq, QpType::XRC_INI).build().unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("XRC initiator"), "{error}");
    let error = pd.qp_builder(cq, cq, QpType::RC).scatter_to_cqe().build().unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("only mlx5"), "{error}");
}

/// rxe of Linux 5.10 creates such a queue pair, but it neither sends nor receives.
#[test]
fn raw_packets_are_refused_by_a_driver_that_has_none() {
    let Bench { script, pd, cq, .. } = &Bench::new();
    let before = script.live();
    let error = pd.qp_builder(cq, cq, QpType::RAW_PACKET).build().unwrap_err();
    assert!(error.is_unsupported());
    assert_eq!(error.kernel_errno(), None, "the kernel was asked");
    assert!(error.message().contains("rxe0 has no queue pairs of type raw packet"), "{error}");
    assert_eq!(script.live(), before);
}

#[test]
fn a_queue_pair_on_a_shared_receive_queue_has_no_receives_of_its_own() {
    for script in [Script::new(), Script::mlx5()] {
        let bench = Bench::on(script);
        let srq = bench.pd.srq_builder(4).build().unwrap();
        let builder = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC);
        let qp = builder.srq(&srq).max_recv_wr(9).max_recv_sge(2).build().unwrap();
        let caps = qp.caps();
        assert_eq!((caps.max_recv_wr, caps.max_recv_sge), (0, 0));
    }
}

/// A driver of another ABI or a faulty one, whose WQEs would overlap.
#[test]
fn rings_whose_elements_are_too_small_for_their_sges_are_refused() {
    let Bench { script, pd, cq, .. } = &Bench::new();
    script.omit_sges();
    let (live, mappings) = (script.live(), script.mappings());
    let make = || pd.qp_builder(cq, cq, QpType::RC);
    for builder in [make().max_send_sge(8), make().max_recv_sge(2)] {
        assert_eq!(builder.build().unwrap_err().errno(), Errno::PROTO);
        assert_eq!((script.live(), script.mappings()), (live.clone(), mappings));
    }
    // Elements still have room for one SGE, as they fill whole cache lines.
    make().build().unwrap();
}

#[test]
fn a_shared_receive_queue_that_was_resized_knows_how_many_it_holds() {
    let bench = Bench::new();
    let mut srq = bench.pd.srq_builder(4).build().unwrap();
    srq.resize(20).unwrap();
    let holds = srq.query().unwrap().max_wr;
    assert!(holds >= 20);
    let error = srq.set_limit(1000).unwrap_err();
    assert!(error.message().contains(&format!("the queue holds {holds}")), "{error}");
}

#[test]
fn a_resize_that_is_refused_names_the_one_cause() {
    let mut bench = Bench::new();
    for id in 0..3 {
        assert!(bench.script.complete(bench.cq.handle(), super::wc(99, id)));
    }
    let mut srq = bench.pd.srq_builder(8).build().unwrap();
    let mut batch = srq.batch().unwrap();
    for id in 0..3 {
        batch.push(RecvWr::new(&[]).id(id)).unwrap();
    }
    super::ring_recv(batch).unwrap();
    let refused = [
        (bench.cq.resize(40_000), "resize_cq: cqe 40000 is above the 32767 of rxe0 ("),
        (bench.cq.resize(2), "resize_cq: cqe 2 is below the 3 completions in the queue ("),
        (srq.resize(1 << 20), "modify_srq: max_wr 1048576 is above the 16384 of rxe0 ("),
        (
            srq.resize(2),
            "modify_srq: max_wr 2 is below the receives in the queue, or below its limit (",
        ),
    ];
    for (refused, text) in refused {
        let error = refused.unwrap_err();
        assert!(error.to_string().starts_with(text), "{error}");
    }
    bench.cq.resize(3).unwrap();
    srq.resize(3).unwrap();
}

/// When the kernel flushes a queue, it publishes each completion before it frees the place of the request.
#[test]
fn a_queue_of_rxe_has_a_place_more_than_is_reported() {
    let bench = Bench::new();
    for wanted in 1..=16 {
        let builder = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC);
        let mut qp = builder.max_send_wr(wanted).max_recv_wr(wanted).build().unwrap();
        super::bring_up(&bench.script, &qp);
        let caps = qp.caps();
        let rooms = (qp.send_batch().unwrap().room(), qp.recv_batch().unwrap().room());
        assert!(caps.max_send_wr >= wanted && rooms.0 > caps.max_send_wr, "{wanted} sends");
        assert!(caps.max_recv_wr >= wanted && rooms.1 > caps.max_recv_wr, "{wanted} receives");
    }
}

/// The kernel would ignore the option, or refuse it by an errno alone.
#[test]
fn contradictory_creations_are_refused_before_the_kernel() {
    let (bench, other) = (Bench::on(Script::mlx5()), Bench::on(Script::mlx5()));
    let Bench { script, context, pd, cq } = &bench;
    let domain = context.xrcd_builder().build().unwrap();
    let of_domain = pd.srq_builder(4).xrc(&domain, cq).build().unwrap();
    let srq = pd.srq_builder(4).build().unwrap();
    let foreign = other.pd.srq_builder(4).build().unwrap();
    let commands = (script.log().len(), other.script.log().len());
    let make = |qp_type| pd.qp_builder(cq, cq, qp_type);
    let refused = [
        (pd.qp_builder(&other.cq, cq, QpType::RC), "send completion queue"),
        (pd.qp_builder(cq, &other.cq, QpType::RC), "receive completion queue"),
        (make(QpType::RC).srq(&foreign), "shared receive queue"),
        (make(QpType::XRC_TGT), "XrcDomain::create_target"),
        (make(QpType::XRC_INI).srq(&srq), "an XRC initiator receives nothing"),
        (make(QpType::RC).srq(&of_domain), "belongs to an XRC domain"),
        (make(QpType::RAW_PACKET).srq(&srq), "raw packets are received by queues of their own"),
        (make(QpType::RC).cvlan_stripping(), "type RC has no VLAN tags to strip"),
        (make(QpType::UD).cvlan_stripping(), "type UD has no VLAN tags to strip"),
        (make(QpType::UD).scatter_to_cqe(), "type UD has no scatter to CQE"),
        (make(QpType::XRC_INI).scatter_to_cqe(), "type XRC initiator has no scatter to CQE"),
    ];
    for (builder, text) in refused {
        let error = builder.build().unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert!(error.message().contains(text), "{error}");
    }
    assert_eq!((script.log().len(), other.script.log().len()), commands, "a kernel was asked");
}

#[test]
fn a_queue_pair_that_the_kernel_refuses_names_the_missing_feature() {
    let bench = Bench::new();
    let Bench { script, context, pd, cq } = &bench;
    // rxe has neither XRC targets nor raw packets, and is not asked.
    script.grant(Op::OPEN_XRCD);
    let domain = context.xrcd_builder().build().unwrap();
    let error = domain.create_target().unwrap_err();
    assert!(
        error.kernel_errno().is_none() && error.message().contains("has no XRC targets"),
        "{error}"
    );
    let mlx5 = Script::mlx5();
    let on_mlx5 = mlx5.open("mlx5_0");
    let domain = on_mlx5.xrcd_builder().build().unwrap();
    let (mlx5_pd, mlx5_cq) = (on_mlx5.alloc_pd().unwrap(), on_mlx5.cq_builder(16).build().unwrap());
    let raw = || mlx5_pd.qp_builder(&mlx5_cq, &mlx5_cq, QpType::RAW_PACKET).max_recv_wr(3);
    let datagrams = pd.qp_builder(cq, cq, QpType::UD).max_recv_wr(3);
    let refused = [
        (script, Errno::INVAL, datagrams, "rxe0 refuses type UD with max_send_wr 1"),
        (&mlx5, Errno::PERM, raw(), "type raw packet needs CAP_NET_RAW"),
        (&mlx5, Errno::OPNOTSUPP, raw(), "mlx5_0 has no queue pairs of type raw packet"),
        (&mlx5, Errno::OPNOTSUPP, raw().cvlan_stripping(), "type raw packet that strip VLAN tags"),
    ];
    for (script, errno, builder, text) in refused {
        script.refuse(Op::CREATE_QP, errno);
        let error = builder.build().unwrap_err();
        script.allow(Op::CREATE_QP);
        assert_eq!(error.kernel_errno(), Some(errno));
        assert!(error.message().contains(text), "{error}");
        let strips = |text: &str| text.contains("strip VLAN tags");
        assert_eq!(strips(error.message()), strips(text), "{error}");
    }
    mlx5.refuse(Op::CREATE_QP, Errno::OPNOTSUPP);
    let error = domain.create_target().unwrap_err();
    assert!(
        error.is_unsupported() && error.message().contains("mlx5_0 has no XRC targets"),
        "{error}"
    );
    mlx5.allow(Op::CREATE_QP);
    mlx5.refuse(Op::CREATE_QP, Errno::IO);
    let error = domain.create_target().unwrap_err();
    assert!(error.errno() == Errno::IO && !error.message().contains("XRC targets"), "{error}");
}

#[test]
fn device_memory_is_refused_by_a_driver_that_has_none() {
    let bench = Bench::new();
    let before = bench.script.log().len();
    let error = bench.context.alloc_dm(64, 1).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("rxe"), "{error}");
    assert_eq!((error.verb(), error.kernel_errno()), ("alloc_dm", None));
    assert_eq!(bench.script.log().len(), before, "the kernel was asked");
}
