//! Options of connections (enhanced connection establishment), on the scripted kernel.

use super::Bench;
use crate::sync::fork::in_child;
use crate::uverbs::scripted::{Op, Script};
use crate::{Ece, Errno, Psn, Qkey, QpAttr, QpState, QpType, QueuePair};
use uverbs_uapi::mlx5::context::mlx5_ib_alloc_ucontext_resp;
use uverbs_uapi::object::UVERBS_ATTR_UHW_OUT;

/// The options that the device offers.
const OFFERED: Ece = Ece { vendor_id: 0x15b3, options: 0x1000_0007 };

fn bench() -> Bench {
    Bench::on(Script::mlx5())
}

/// A queue pair in `RESET`.
fn reset_qp(bench: &Bench) -> QueuePair {
    bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::UD).build().unwrap()
}

fn init() -> QpAttr {
    QpAttr::new().state(QpState::INIT).port(1).pkey_index(0).qkey(Qkey(1))
}

fn to(state: QpState) -> QpAttr {
    QpAttr::new().state(state)
}

fn with(options: u32) -> Ece {
    Ece { options, ..OFFERED }
}

#[test]
fn device_takes_the_options_that_it_has_with_the_next_change() {
    let mut bench = bench();
    let mut qp = reset_qp(&bench);
    assert_eq!(qp.query_ece().unwrap(), OFFERED);
    qp.modify(&init()).unwrap();
    assert_eq!(bench.script.log().last(), Some(&Op::MODIFY_QP), "nothing is to be told");
    qp.set_ece(with(0x1000_000a)).unwrap();
    assert_eq!((bench.script.ece_told(), qp.query_ece().unwrap()), (0, with(0)));
    qp.modify(&to(QpState::RTR)).unwrap();
    assert_eq!(
        (bench.script.ece_told(), qp.query_ece().unwrap()),
        (0x1000_000a, with(0x1000_0002))
    );
    qp.modify(&to(QpState::RTS).sq_psn(Psn(0))).unwrap();
    assert_eq!(bench.script.log().last(), Some(&Op::MODIFY_QP), "it was told once");
    assert_eq!(qp.query_ece().unwrap(), with(0x1000_0002));
    // A change that ends the connection carries no options, and a reset drops them.
    qp.set_ece(with(1)).unwrap();
    qp.modify(&to(QpState::ERR)).unwrap();
    assert_eq!(bench.script.ece_told(), 0x1000_000a);
    qp.reset(&mut [&mut bench.cq]).unwrap();
    assert_eq!(qp.query_ece().unwrap(), OFFERED);
    qp.modify(&init()).unwrap();
    assert_eq!(bench.script.ece_told(), 0x1000_000a);
}

#[test]
fn options_of_0_are_not_sent_to_the_device() {
    let bench = bench();
    let qp = reset_qp(&bench);
    qp.set_ece(with(3)).unwrap();
    qp.set_ece(with(0)).unwrap();
    qp.modify(&init()).unwrap();
    assert_eq!((bench.script.ece_told(), qp.query_ece().unwrap()), (0, with(0)));
}

#[test]
fn refused_change_leaves_the_options_for_the_next_one() {
    let bench = bench();
    let qp = reset_qp(&bench);
    qp.set_ece(with(0x1000_0003)).unwrap();
    bench.script.refuse(Op::EX_MODIFY_QP, Errno::NOMEM);
    assert_eq!(qp.modify(&init()).unwrap_err().errno(), Errno::NOMEM);
    bench.script.allow(Op::EX_MODIFY_QP);
    assert_eq!(qp.query_ece().unwrap(), with(0));
    qp.modify(&init()).unwrap();
    assert_eq!(
        (bench.script.ece_told(), qp.query_ece().unwrap()),
        (0x1000_0003, with(0x1000_0003))
    );
}

#[test]
fn xrc_target_has_the_options_of_its_device() {
    let bench = bench();
    let target = bench.context.xrcd_builder().build().unwrap().create_target().unwrap();
    assert_eq!(target.query_ece().unwrap(), OFFERED);
}

#[test]
#[cfg_attr(miri, ignore = "it forks")]
fn options_of_another_vendor_and_devices_without_any_are_refused() {
    let bench = bench();
    let qp = reset_qp(&bench);
    let error = qp.set_ece(Ece { vendor_id: 0x1234, options: 1 }).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL);
    assert!(
        error.message().contains("vendor 0x1234: those of mlx5_0 are of vendor 0x15b3"),
        "{error}"
    );
    assert_eq!(qp.query_ece().unwrap(), OFFERED);
    in_child(|| assert!(qp.set_ece(OFFERED).unwrap_err().is_forked()));
    let without = Script::mlx5();
    without.forge(
        Op::GET_CONTEXT,
        UVERBS_ATTR_UHW_OUT,
        |context: &mut mlx5_ib_alloc_ucontext_resp| context.comp_mask = 0,
    );
    for script in [Script::new(), without] {
        let bench = Bench::on(script);
        let qp = reset_qp(&bench);
        let errors = [qp.query_ece().map(drop).unwrap_err(), qp.set_ece(OFFERED).unwrap_err()];
        for error in errors {
            assert_eq!(error.errno(), Errno::OPNOTSUPP);
            assert!(error.message().contains("reported no ECE options"), "{error}");
        }
    }
}
