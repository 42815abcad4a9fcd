//! The older commands of a scripted kernel.

use super::attrs::{self, Responses};
use super::state::{
    MAX_CQE, MAX_SGE, MAX_WR, Result, Role, ScriptedObject, State, cq_element, recv_element,
};
use crate::port::LinkLayer;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use uverbs_uapi::device as device_ids;
use uverbs_uapi::object::*;
use uverbs_uapi::rxe::{rxe_create_ah_resp, rxe_modify_srq_cmd, rxe_resize_cq_resp};
use uverbs_uapi::write::*;
use uverbs_uapi::{ah, comp_channel, cq, mcast, mr, mw, pd, qp, srq, wr};

impl State {
    pub(super) fn run_write(&mut self, number: u32, mut to: Responses<'_, '_>) -> Result<()> {
        use device_ids::{UVERBS_ATTR_CORE_IN as IN, UVERBS_ATTR_CORE_OUT as OUT};
        const QUERY_DEVICE: u32 =
            IB_USER_VERBS_EX_CMD_QUERY_DEVICE | IB_USER_VERBS_CMD_FLAG_EXTENDED;
        const EX_MODIFY_QP: u32 = IB_USER_VERBS_EX_CMD_MODIFY_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED;
        match number {
            QUERY_DEVICE => {
                let mut resp = device_ids::ib_uverbs_ex_query_device_resp::default();
                resp.base.max_qp_wr = MAX_WR;
                resp.base.max_sge = MAX_SGE;
                resp.base.max_cqe = MAX_CQE;
                resp.base.max_srq_wr = MAX_WR;
                resp.base.max_srq_sge = MAX_SGE;
                resp.base.phys_port_cnt = self.ports.len() as u8;
                resp.base.max_qp_rd_atom = 128;
                resp.base.max_qp_init_rd_atom = 128;
                resp.response_length = size_of_val(&resp) as u32;
                to.put(OUT, &resp);
            }
            IB_USER_VERBS_CMD_ALLOC_PD => {
                let pd_handle =
                    self.add(ScriptedObject { object: UVERBS_OBJECT_PD, ..Default::default() });
                to.put(OUT, &pd::ib_uverbs_alloc_pd_resp { pd_handle });
            }
            IB_USER_VERBS_CMD_CREATE_AH => {
                let request: ah::ib_uverbs_create_ah = attrs::input(to.command, IN)?;
                let port = self.port(request.attr.port_num.into())?;
                let ethernet = port.link_layer == LinkLayer::ETHERNET;
                if ethernet && request.attr.is_global == 0 {
                    return Err(Errno::INVAL);
                }
                let pd = self.expect("create_ah", request.pd_handle, UVERBS_OBJECT_PD)?;
                let ah_handle = self.add_on(pd, UVERBS_OBJECT_AH);
                let ah_num = ah_handle + 1;
                self.object(ah_handle).number = ah_num;
                to.put(OUT, &ah::ib_uverbs_create_ah_resp { ah_handle });
                to.put(UVERBS_ATTR_UHW_OUT, &rxe_create_ah_resp { ah_num, reserved: 0 });
            }
            IB_USER_VERBS_CMD_REG_MR => {
                let request: mr::ib_uverbs_reg_mr = attrs::input(to.command, IN)?;
                let page = rustix::param::page_size() as u64;
                if request.start % page != request.hca_va % page {
                    return Err(Errno::INVAL);
                }
                let pd = self.expect("reg_mr", request.pd_handle, UVERBS_OBJECT_PD)?;
                let mr_handle = self.add_on(pd, UVERBS_OBJECT_MR);
                let region = self.object(mr_handle);
                region.start = request.start;
                region.iova = request.hca_va;
                region.length = request.length;
                region.access = request.access_flags;
                let key = (mr_handle + 1) << 8;
                region.number = key;
                to.put(OUT, &mr::ib_uverbs_reg_mr_resp { mr_handle, lkey: key, rkey: key });
            }
            IB_USER_VERBS_CMD_REREG_MR => {
                let request: mr::ib_uverbs_rereg_mr = attrs::input(to.command, IN)?;
                self.expect("rereg_mr", request.mr_handle, UVERBS_OBJECT_MR)?;
                if request.flags & 1 != 0 {
                    if !self.deviations.translates {
                        return Err(Errno::OPNOTSUPP);
                    }
                    let region = self.object(request.mr_handle);
                    (region.start, region.length) = (request.start, request.length);
                }
                if request.flags & 2 != 0 {
                    let pd = self.expect("rereg_mr", request.pd_handle, UVERBS_OBJECT_PD)?;
                    self.object(request.mr_handle).stands_on = vec![pd];
                }
                if request.flags & 4 != 0 {
                    self.object(request.mr_handle).access = request.access_flags;
                }
                let key = (request.mr_handle + 1) << 8;
                to.put(OUT, &mr::ib_uverbs_rereg_mr_resp { lkey: key, rkey: key });
            }
            IB_USER_VERBS_CMD_ALLOC_MW => {
                let request: mw::ib_uverbs_alloc_mw = attrs::input(to.command, IN)?;
                let pd = self.expect("alloc_mw", request.pd_handle, UVERBS_OBJECT_PD)?;
                let mw_handle = self.add_on(pd, UVERBS_OBJECT_MW);
                let rkey = 0x8000_0000 | mw_handle << 8;
                to.put(OUT, &mw::ib_uverbs_alloc_mw_resp { mw_handle, rkey });
            }
            IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL => {
                if attrs::room(to.command, OUT) > to.limit {
                    return Ok(());
                }
                let (ours, theirs) = super::socket::pair().map_err(|_| Errno::MFILE)?;
                self.channels.insert(theirs.as_raw_fd(), ours);
                let fd = OwnedFd::from(theirs).into_raw_fd() as u32;
                to.put(OUT, &comp_channel::ib_uverbs_create_comp_channel_resp { fd });
            }
            IB_USER_VERBS_CMD_RESIZE_CQ => {
                let request: cq::ib_uverbs_resize_cq = attrs::input(to.command, IN)?;
                self.expect("resize_cq", request.cq_handle, UVERBS_OBJECT_CQ)?;
                let old = self.ring(request.cq_handle, Role::Cq);
                if request.cqe == 0 || request.cqe > MAX_CQE || request.cqe < old.pending() {
                    return Err(Errno::INVAL);
                }
                let (ring, mi) = self.add_ring(
                    request.cq_handle,
                    Role::Cq,
                    "cq-resized",
                    request.cqe,
                    cq_element(),
                );
                while let Some(element) = old.take() {
                    ring.put(&element);
                }
                let resp = cq::ib_uverbs_resize_cq_resp { cqe: ring.capacity(), reserved: 0 };
                to.put(OUT, &resp);
                to.put(UVERBS_ATTR_UHW_OUT, &rxe_resize_cq_resp { mi });
            }
            IB_USER_VERBS_CMD_REQ_NOTIFY_CQ => {
                let request: cq::ib_uverbs_req_notify_cq = attrs::input(to.command, IN)?;
                self.expect("req_notify_cq", request.cq_handle, UVERBS_OBJECT_CQ)?;
            }
            IB_USER_VERBS_CMD_MODIFY_QP => {
                self.modify_qp(attrs::input(to.command, IN)?)?;
            }
            EX_MODIFY_QP => {
                let request: qp::ib_uverbs_ex_modify_qp = attrs::input(to.command, IN)?;
                self.modify_qp(request.base)?;
            }
            IB_USER_VERBS_CMD_QUERY_QP => {
                let request: qp::ib_uverbs_query_qp = attrs::input(to.command, IN)?;
                self.expect("query_qp", request.qp_handle, UVERBS_OBJECT_QP)?;
                // A driver may leave out attributes that are not in the mask, and refuse those that the
                // response has no room for.
                if request.attr_mask != 0x1f_ffff {
                    return Err(Errno::INVAL);
                }
                let object = self.object(request.qp_handle);
                let ScriptedObject { state: qp_state, port, .. } = *object;
                to.put(
                    OUT,
                    &qp::ib_uverbs_query_qp_resp {
                        qp_state,
                        cur_qp_state: qp_state,
                        port_num: port.max(1),
                        ..Default::default()
                    },
                );
            }
            IB_USER_VERBS_CMD_POST_SEND => {
                let request: wr::ib_uverbs_post_send = attrs::input(to.command, IN)?;
                self.expect("post_send", request.qp_handle, UVERBS_OBJECT_QP)?;
                let size = size_of::<wr::ib_uverbs_send_wr>() as u32;
                let queue = self.object(request.qp_handle);
                if queue.state < 3 || request.wr_count != 0 || request.wqe_size < size {
                    return Err(Errno::INVAL);
                }
                to.put(OUT, &wr::ib_uverbs_post_send_resp { bad_wr: 0 });
            }
            IB_USER_VERBS_CMD_ATTACH_MCAST | IB_USER_VERBS_CMD_DETACH_MCAST => {
                let request: mcast::ib_uverbs_attach_mcast = attrs::input(to.command, IN)?;
                self.expect("multicast", request.qp_handle, UVERBS_OBJECT_QP)?;
            }
            IB_USER_VERBS_CMD_MODIFY_SRQ => self.modify_srq(&to)?,
            IB_USER_VERBS_CMD_QUERY_SRQ => {
                let request: srq::ib_uverbs_query_srq = attrs::input(to.command, IN)?;
                self.expect("query_srq", request.srq_handle, UVERBS_OBJECT_SRQ)?;
                let queue = self.object(request.srq_handle);
                let resp = srq::ib_uverbs_query_srq_resp {
                    max_wr: queue.max_wr,
                    max_sge: queue.max_sge,
                    srq_limit: queue.limit,
                    reserved: 0,
                };
                to.put(OUT, &resp);
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        Ok(())
    }

    fn modify_qp(&mut self, request: qp::ib_uverbs_modify_qp) -> Result<()> {
        self.expect("modify_qp", request.qp_handle, UVERBS_OBJECT_QP)?;
        let mask = qp::ib_qp_attr_mask::from_bits_retain(request.attr_mask);
        if mask.contains(qp::ib_qp_attr_mask::IB_QP_CUR_STATE) {
            // A driver might trust the claimed state.
            return Err(Errno::PROTO);
        }
        if mask.contains(qp::ib_qp_attr_mask::IB_QP_PORT) {
            self.port(request.port_num.into())?;
            self.object(request.qp_handle).port = request.port_num;
        }
        let own = self.object(request.qp_handle).port;
        // The path of INIT to RTR is one of the queue pair's own port.
        if mask.contains(qp::ib_qp_attr_mask::IB_QP_AV) && own != 0 && request.dest.port_num != own
        {
            return Err(Errno::INVAL);
        }
        if mask.contains(qp::ib_qp_attr_mask::IB_QP_STATE) {
            if request.qp_state > 6 {
                return Err(Errno::INVAL);
            }
            self.object(request.qp_handle).state = request.qp_state;
        }
        Ok(())
    }

    fn modify_srq(&mut self, to: &Responses<'_, '_>) -> Result<()> {
        let request: srq::ib_uverbs_modify_srq =
            attrs::input(to.command, device_ids::UVERBS_ATTR_CORE_IN)?;
        let handle = self.expect("modify_srq", request.srq_handle, UVERBS_OBJECT_SRQ)?;
        let mask = srq::ib_srq_attr_mask::from_bits_retain(request.attr_mask);
        if mask.contains(srq::ib_srq_attr_mask::IB_SRQ_LIMIT) {
            if request.srq_limit > self.object(handle).max_wr {
                return Err(Errno::INVAL);
            }
            self.object(handle).limit = request.srq_limit;
        }
        if mask.contains(srq::ib_srq_attr_mask::IB_SRQ_MAX_WR) {
            let driver: rxe_modify_srq_cmd = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
            let old = self.ring(handle, Role::Recv);
            if request.max_wr == 0 || request.max_wr > MAX_WR || request.max_wr < old.pending() {
                return Err(Errno::INVAL);
            }
            let element = recv_element(self.object(handle).max_sge);
            let (ring, mi) =
                self.add_ring(handle, Role::Recv, "srq-resized", request.max_wr, element);
            while let Some(receive) = old.take() {
                ring.put(&receive);
            }
            self.object(handle).max_wr = ring.capacity();
            crate::memory::pointer::play_kernel(driver.mmap_info_addr, mi);
        }
        Ok(())
    }
}
