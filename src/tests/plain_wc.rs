//! Completions as plain data have the fields of the lent ones, and do not borrow the queue.

use super::{Bench, connect_to_itself, ring, wc};
use crate::uverbs::scripted::Script;
use crate::{Completion, QpType, Qpn, Remote, Rkey, SendWr, Wc, WcOpcode, WcStatus};
use uverbs_sim::{CqeError, Side, Syndrome};
use uverbs_uapi::wc::ib_uverbs_wc;

fn same(lent: Completion<'_>, plain: &Wc) {
    assert_eq!(
        (plain.wr_id, plain.status, plain.qpn, plain.vendor_err),
        (lent.wr_id(), lent.status(), lent.qpn(), lent.vendor_err())
    );
    assert_eq!(plain.ok().map(drop), lent.ok().map(drop));
    if !plain.is_success() {
        return;
    }
    assert_eq!((plain.opcode, plain.byte_len), (lent.opcode(), lent.byte_len()));
    assert_eq!((plain.imm, plain.invalidated_rkey), (lent.imm(), lent.invalidated_rkey()));
    assert_eq!((plain.has_grh, plain.src_qpn), (lent.has_grh(), lent.src_qpn()));
    assert_eq!((plain.src_lid, plain.pkey_index), (lent.src_lid(), lent.pkey_index()));
    assert_eq!((plain.service_level, plain.path_bits), (lent.service_level(), lent.path_bits()));
    assert_eq!((plain.flow_tag, plain.vlan), (lent.flow_tag(), lent.vlan()));
    assert_eq!((plain.ip_checksum_ok, plain.timestamp), (lent.ip_checksum_ok(), lent.timestamp()));
    assert_eq!(plain.scattered.as_deref(), lent.scattered().as_deref());
}

#[test]
fn polling_into_an_array_takes_as_many_as_fit_in_order() {
    let mut bench = Bench::new();
    let qp = bench.qp(QpType::RC);
    let (qpn, cq) = (qp.qpn().0, bench.cq.handle());
    for id in 1..=5 {
        bench.script.complete(cq, wc(qpn, id));
    }
    assert_eq!(bench.cq.poll_into(&mut []), Ok(0));
    let mut wcs = [Wc::default(); 3];
    assert_eq!(bench.cq.poll_into(&mut wcs), Ok(3));
    assert_eq!(wcs.map(|wc| wc.wr_id), [1, 2, 3]);
    assert_eq!(bench.cq.poll_into(&mut wcs), Ok(2));
    // Elements that were not written are unchanged.
    assert_eq!(wcs.map(|wc| wc.wr_id), [4, 5, 3]);
    assert_eq!(bench.cq.poll_into(&mut wcs), Ok(0));
}

#[test]
fn plain_completions_of_rxe_equal_lent_ones() {
    let mut bench = Bench::new();
    let qp = bench.qp(QpType::UD);
    let (qpn, cq) = (qp.qpn().0, bench.cq.handle());
    let full = ib_uverbs_wc {
        wr_id: 9,
        opcode: WcOpcode::RECV.0,
        byte_len: 140,
        ex: 0x1234_5678u32.to_be(),
        qp_num: qpn,
        src_qp: 0x22,
        wc_flags: 0xffff_ffff,
        pkey_index: 3,
        slid: 4,
        sl: 5,
        dlid_path_bits: 6,
        ..Default::default()
    };
    let failed = ib_uverbs_wc { wr_id: 10, status: 12, vendor_err: 0x81, ..full };
    for _ in 0..2 {
        assert!(bench.script.complete(cq, full));
        assert!(bench.script.complete(cq, failed));
    }
    let mut wcs = [Wc::default(); 2];
    assert_eq!(bench.cq.poll_into(&mut wcs), Ok(2));
    let mut completions = bench.cq.poll().unwrap();
    for wc in &wcs {
        same(completions.next().unwrap(), wc);
    }
    assert_eq!((wcs[0].imm, wcs[0].byte_len, wcs[0].src_lid), (Some(0x1234_5678), 140, 4));
    let error = wcs[1].ok().unwrap_err();
    assert_eq!((error.status, error.wr_id), (WcStatus::RETRY_EXC_ERR, 10));
    assert_eq!((error.qpn, error.vendor_err), (Qpn(qpn), 0x81));
    // All other fields are unset, and not left over from the success before.
    assert_eq!((wcs[1].imm, wcs[1].byte_len, wcs[1].src_lid), (None, 0, 0));
}

#[test]
fn plain_completions_of_mlx5_equal_lent_ones() {
    let script = Script::mlx5();
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let mut cq = context.cq_builder(8).build().unwrap();
    let device = script.device();
    let qp = || pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(4).build().unwrap();
    let (mut one, mut other) = (qp(), qp());
    for (qp, id, done) in [(&mut one, 20, 2), (&mut other, 30, 0)] {
        connect_to_itself(&context, qp);
        let error = CqeError { vendor: 0x88, ..Syndrome::RemoteAccess.into() };
        device.fail_request(Some(qp.qpn().0), Side::Send, done, error);
        let mut batch = qp.send_batch().unwrap();
        for n in 0..=done {
            let to = Remote { addr: 0, rkey: Rkey(0) };
            batch.push(SendWr::write(to, &[]).id(id + u64::from(n)).signaled()).unwrap();
        }
        ring(batch).unwrap();
        script.settle();
    }
    let mut wcs = [Wc::default()];
    assert_eq!(cq.poll_into(&mut wcs), Ok(1));
    assert_eq!((wcs[0].wr_id, wcs[0].opcode), (20, WcOpcode::WRITE));
    let there = cq.poll().unwrap().next().map(|there| {
        same(there, &Wc { wr_id: 21, timestamp: there.timestamp(), ..wcs[0] });
    });
    assert!(there.is_some());
    assert_eq!(cq.poll_into(&mut wcs), Ok(1));
    let error = wcs[0].ok().unwrap_err();
    assert_eq!((error.status, error.wr_id), (WcStatus::REM_ACCESS_ERR, 22));
    assert_eq!((error.qpn, error.vendor_err), (one.qpn(), 0x88));
    let there = cq.poll().unwrap().next().map(|there| {
        same(there, &Wc { wr_id: 30, qpn: other.qpn(), ..wcs[0] });
    });
    assert!(there.is_some());
}
