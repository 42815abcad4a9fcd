//! A kernel that damages its answers: each output of each command.

use super::{Damage, explore};
use crate::cm::ConnectParam;
use crate::owned::OwnedCompletionQueue;
use crate::uverbs::scripted::Script;
use crate::{
    Access, AddressVector, Context, Gid, Handshake, Notify, ObjectKind, QpAttr, QpState, QpType,
    RecvWr, Rereg, Result, SendWr, Wc, WindowType,
};
use std::cell::Cell;
use std::error::Error as _;

thread_local! {
    /// Calls of this thread that failed.
    static FAILED: Cell<u32> = const { Cell::new(0) };
}

/// Notes a call that failed. Its error has a text.
fn tell<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            assert!(!error.to_string().is_empty() && error.source().is_none());
            FAILED.set(FAILED.get() + 1);
            None
        }
    }
}

/// Makes every query of the device.
fn query(context: &Context) {
    if let Some(attr) = tell(context.query_device()) {
        let _ = (format!("{attr:?}"), ConnectParam::new());
    }
    for port in 0..3 {
        if let Some(attr) = tell(context.query_port(port)) {
            let _ = (format!("{attr:?}"), attr.link_rate_mbps());
            let _ = (attr.active_mtu.bytes(), attr.link_layer.to_string());
        }
        tell(context.query_gid(port, 0));
        tell(context.query_pkey(port, 0));
    }
    tell(context.gid_table().map(|table| table.iter().map(|entry| entry.gid.to_string()).max()));
    for kind in [ObjectKind::PD, ObjectKind::CQ] {
        tell(context.handles(kind));
    }
    let _ = (context.completion_vectors(), context.export().to_bytes());
    tell(crate::mlx5::query_device(context));
    tell(
        crate::mlx5::Uar::alloc(context, crate::mlx5::UarKind::NonCached).and_then(|uar| uar.map()),
    );
    tell(crate::mlx5::Clock::open(context).and_then(|clock| clock.nanoseconds(7)));
}

/// Makes one of each object, works with it, and destroys it.
fn work(script: &Script, context: &Context) -> Result<()> {
    let pd = context.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::LOCAL_WRITE).register(vec![0u8; 64])?;
    tell(region.rereg(Rereg::new().access(Access::LOCAL_WRITE | Access::REMOTE_READ)));
    tell(region.export().and_then(|envelope| pd.import_mr(&envelope)));
    tell(pd.export().and_then(|envelope| context.import_pd(&envelope)));
    tell(pd.alloc_mw(WindowType::Two));
    tell(context.alloc_dm(64, 64));
    tell(context.xrcd_builder().create().build());
    let channel = context.create_comp_channel()?;
    let mut cq = context.cq_builder(16).channel(&channel).build()?;
    tell(cq.req_notify(Notify::Next));
    tell(cq.resize(40));
    let mut srq = pd.srq_builder(4).max_sge(2).build()?;
    tell(srq.query());
    tell(srq.resize(9));
    let sge = region.sge(..)?;
    if let Ok(mut batch) = srq.batch() {
        while batch.push(RecvWr::new(&[sge])).is_ok() {}
        let _ = super::super::ring_recv(batch);
    }
    for qp_type in [QpType::UD, QpType::RC, QpType::RAW_PACKET] {
        let builder =
            pd.qp_builder(&cq, &cq, qp_type).max_send_wr(4).max_recv_wr(4).max_send_sge(2);
        let Some(mut qp) = tell(builder.max_inline_data(32).build()) else { continue };
        tell(qp.query().map(|info| format!("{info:?}")));
        tell(qp.query_ece());
        if let Some(endpoint) = tell(qp.endpoint(&qp.context().query_gid(1, 0)?)) {
            tell(qp.handshake(&endpoint, &Handshake::new()));
        }
        super::super::bring_up(script, &qp);
        if let Ok(mut batch) = qp.send_batch() {
            while batch.push(SendWr::send(&[sge]).signaled()).is_ok() && batch.len() < 1 << 16 {}
            let _ = super::super::ring(batch);
        }
        if let Ok(mut batch) = qp.recv_batch() {
            while batch.push(RecvWr::new(&[sge])).is_ok() && batch.len() < 1 << 16 {}
            let _ = super::super::ring_recv(batch);
        }
        let _ = cq.poll_into(&mut [Wc::default(); 8]);
        tell(qp.modify(&QpAttr::new().state(QpState::ERR)));
        tell(qp.reset(&mut [&mut cq]));
    }
    let vector = AddressVector::global(1, 0, Gid([1; 16]));
    tell(pd.create_ah(&vector).map(|ah| ah.pd_handle()));
    // The size of the tables of requests follows from the kernel's response.
    let mut owned = OwnedCompletionQueue::<u32>::new(context.cq_builder(64).build()?);
    let builder = pd.qp_builder(owned.queue(), owned.queue(), QpType::RC);
    let qp = builder.max_send_wr(4).max_recv_wr(4).build()?;
    let _ = owned.adopt(qp).map(|qp| format!("{qp:?}"));
    if let Ok(srq) = crate::owned::OwnedSharedReceiveQueue::<u32>::new(srq) {
        let _ = srq.depth();
    }
    let _ = owned.poll().map(|completions| completions.count());
    tell(region.destroy().map_err(Into::into));
    Ok(())
}

/// The number of calls that fail; some do on every kernel.
fn run(script: Script, device: &str, input: &[u8]) -> u32 {
    let early = input.first().is_some_and(|first| first % 4 == 0);
    let mut damage = Damage::new(input.get(1..).unwrap_or_default());
    let context = if early { None } else { Some(script.open(device)) };
    script.tamper(move |output| damage.apply(output));
    let context = context.or_else(|| tell(script.try_open(device)));
    if let Some(context) = context {
        query(&context);
        tell(work(&script, &context));
    }
    script.stop_tampering();
    FAILED.replace(0)
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn no_answer_of_the_kernel_makes_a_call_of_rxe_panic() {
    let healthy = run(Script::new(), "rxe0", &[]);
    let tally =
        explore("answers on rxe", 100, &[], |input| run(Script::new(), "rxe0", input) == healthy);
    assert!(tally.refused > 0, "{tally:?}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn no_answer_of_the_kernel_makes_a_call_of_mlx5_panic() {
    let healthy = run(Script::mlx5(), "mlx5_0", &[]);
    let tally = explore("answers on mlx5", 100, &[], |input| {
        run(Script::mlx5(), "mlx5_0", input) == healthy
    });
    assert!(tally.refused > 0, "{tally:?}");
}
