//! The commands in which a scripted mlx5 driver differs from rxe's: queues are in memory of the process, and
//! their doorbells in UARs.

use super::attrs::{self, Responses};
use super::state::{Result, ScriptedObject, State};
use rustix::io::Errno;
use uverbs_uapi::buffer::{ib_uverbs_buffer_desc, ib_uverbs_buffer_type};
use uverbs_uapi::device::UVERBS_ATTR_CORE_OUT;
use uverbs_uapi::mlx5::abi;
use uverbs_uapi::mlx5::context::{
    mlx5_ib_alloc_ucontext_req_v2, mlx5_ib_alloc_ucontext_resp, mlx5_ib_alloc_ucontext_resp_mask,
};
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX,
    MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM, MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX,
    MLX5_IB_ATTR_QUERY_PD_HANDLE, MLX5_IB_ATTR_QUERY_PD_RESP_PDN, MLX5_IB_METHOD_PD_QUERY,
    MLX5_IB_OBJECT_UAR, MLX5_IB_OBJECT_VAR,
};
use uverbs_uapi::mlx5::{uar, var};
use uverbs_uapi::object::*;
use uverbs_uapi::{context, cq, device, qp, srq};

/// The scripted device.
#[derive(Clone, Debug)]
pub(crate) struct ScriptedMlx5 {
    pub(crate) context: mlx5_ib_alloc_ucontext_resp,
    /// Whether contexts may ask for DEVX.
    pub(crate) devx: bool,
    /// Whether queues may be dma-bufs.
    pub(crate) dmabufs: bool,
    /// Whether the device advertises paging on demand.
    pub(crate) on_demand: bool,
    /// UARs that are left.
    pub(crate) uars: u32,
    /// The device's number of the next UAR.
    pub(crate) next_page: u32,
    /// The options of connections (ECE) that the device has, if the context says that it tells them.
    pub(crate) ece: u32,
    /// What the driver was last asked for: a completion queue, its resize, a queue pair.
    pub(crate) asked_cq: abi::mlx5_ib_create_cq,
    pub(crate) asked_resize: abi::mlx5_ib_resize_cq,
    pub(crate) asked_qp: abi::mlx5_ib_create_qp,
}

impl Default for ScriptedMlx5 {
    fn default() -> Self {
        let context = mlx5_ib_alloc_ucontext_resp {
            bf_reg_size: 512,
            max_sq_desc_sz: 512,
            max_rq_desc_sz: 512,
            max_send_wqebb: 1 << 15,
            max_recv_wr: 1 << 15,
            max_srq_recv_wr: 1 << 15,
            cqe_version: 1,
            cmds_supp_uhw: 3,
            log_uar_size: 12,
            num_uars_per_page: 1,
            ..Default::default()
        };
        ScriptedMlx5 {
            context,
            devx: true,
            dmabufs: true,
            on_demand: false,
            uars: 64,
            next_page: 5,
            ece: 0,
            asked_cq: Default::default(),
            asked_resize: Default::default(),
            asked_qp: Default::default(),
        }
    }
}

impl ScriptedMlx5 {
    /// Has the device tell options of connections.
    pub(crate) fn offer_ece(&mut self, options: u32) {
        let tells = mlx5_ib_alloc_ucontext_resp_mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE;
        self.context.comp_mask |= tells.bits();
        self.ece = options;
    }

    /// What a new queue pair tells of its options: those of version 1, if it was asked for them.
    fn told_ece(&self, asked: u32) -> u32 {
        if asked == 1 << 28 { self.ece } else { 0 }
    }

    pub(super) fn alloc_ucontext(&self, to: &mut Responses<'_, '_>) -> Result<()> {
        let request: mlx5_ib_alloc_ucontext_req_v2 = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
        if request.flags != 0 && !self.devx {
            return Err(Errno::INVAL);
        }
        to.put(UVERBS_ATTR_UHW_OUT, &self.context);
        Ok(())
    }
}

/// Memory that the driver would pin.
fn pins(address: u64, align: u64) -> Result<()> {
    if address == 0 || address % align != 0 { Err(Errno::INVAL) } else { Ok(()) }
}

impl State {
    /// Where a buffer begins that is named by an attribute, or else by an address.
    fn buffer(&self, to: &Responses<'_, '_>, id: u16, address: u64, align: u64) -> Result<u64> {
        if !attrs::has(to.command, id) {
            return pins(address, align).map(|()| address);
        }
        if !self.mlx5.as_ref().is_some_and(|mlx5| mlx5.dmabufs) {
            return Err(Errno::PROTONOSUPPORT);
        }
        let desc: ib_uverbs_buffer_desc = attrs::input(to.command, id)?;
        let dmabuf = desc.r#type == ib_uverbs_buffer_type::IB_UVERBS_BUFFER_TYPE_DMABUF.0;
        if !dmabuf || desc.flags != 0 || desc.length == 0 || address != 0 {
            return Err(Errno::INVAL);
        }
        if desc.fd < 0 { Err(Errno::BADF) } else { Ok(desc.addr) }
    }

    pub(super) fn run_mlx5(
        &mut self,
        object: u16,
        method: u16,
        mut to: Responses<'_, '_>,
    ) -> Result<()> {
        match (object, method) {
            (MLX5_IB_OBJECT_UAR, uar::MLX5_IB_METHOD_UAR_OBJ_ALLOC) => {
                let mlx5 = self.mlx5.as_mut().ok_or(Errno::PROTONOSUPPORT)?;
                mlx5.uars = mlx5.uars.checked_sub(1).ok_or(Errno::NOSPC)?;
                let page = mlx5.next_page;
                mlx5.next_page += 1;
                let handle =
                    self.add(ScriptedObject { object: MLX5_IB_OBJECT_UAR, ..Default::default() });
                let offset = self.add_page(handle, "uar");
                to.made(uar::MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, handle)?;
                to.put(uar::MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, &offset);
                to.put(
                    uar::MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH,
                    &(rustix::param::page_size() as u32),
                );
                to.put(uar::MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, &page);
                Ok(())
            }
            (MLX5_IB_OBJECT_VAR, var::MLX5_IB_METHOD_VAR_OBJ_ALLOC) => {
                let handle =
                    self.add(ScriptedObject { object: MLX5_IB_OBJECT_VAR, ..Default::default() });
                let offset = self.add_page(handle, "var");
                to.made(var::MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE, handle)?;
                to.put(var::MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET, &offset);
                to.put(
                    var::MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH,
                    &(rustix::param::page_size() as u32),
                );
                to.put(var::MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID, &(handle + 0x40));
                Ok(())
            }
            (UVERBS_OBJECT_DEVICE, device::UVERBS_METHOD_QUERY_CONTEXT) => {
                let mlx5 = self.mlx5.as_ref().ok_or(Errno::PROTONOSUPPORT)?;
                to.put(MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX, &mlx5.context);
                to.put(context::UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &2u32);
                to.put(context::UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &1u64);
                Ok(())
            }
            (UVERBS_OBJECT_PD, MLX5_IB_METHOD_PD_QUERY) => {
                let handle = attrs::handle(to.command, MLX5_IB_ATTR_QUERY_PD_HANDLE);
                // An importer may ask for anything.
                let pd = handle.and_then(|handle| self.objects.get(&handle));
                let pd = pd.filter(|pd| pd.object == UVERBS_OBJECT_PD).ok_or(Errno::NOENT)?;
                to.put(MLX5_IB_ATTR_QUERY_PD_RESP_PDN, &pd.number);
                Ok(())
            }
            (UVERBS_OBJECT_CQ, cq::UVERBS_METHOD_CQ_CREATE) => {
                let cqe = attrs::u32(to.command, cq::UVERBS_ATTR_CREATE_CQ_CQE)?;
                let driver: abi::mlx5_ib_create_cq = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
                self.mlx5.as_mut().ok_or(Errno::PROTONOSUPPORT)?.asked_cq = driver;
                let id = cq::UVERBS_ATTR_CREATE_CQ_BUF_UMEM;
                let start = self.buffer(&to, id, driver.buf_addr, 64)?;
                self.buffer(&to, MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM, driver.db_addr, 8)?;
                let wide = attrs::u32(to.command, MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX).is_ok();
                let sized = [64, 128].contains(&driver.cqe_size);
                if !(cqe + 1).is_power_of_two() || (driver.flags & 2 != 0) == wide || !sized {
                    return Err(Errno::INVAL);
                }
                let handle = self.add(ScriptedObject {
                    object: UVERBS_OBJECT_CQ,
                    max_wr: cqe,
                    start,
                    ..Default::default()
                });
                to.made(cq::UVERBS_ATTR_CREATE_CQ_HANDLE, handle)?;
                to.put(cq::UVERBS_ATTR_CREATE_CQ_RESP_CQE, &cqe);
                let resp = abi::mlx5_ib_create_cq_resp { cqn: handle + 0x80, reserved: 0 };
                to.put(UVERBS_ATTR_UHW_OUT, &resp);
                Ok(())
            }
            (UVERBS_OBJECT_SRQ, srq::UVERBS_METHOD_SRQ_CREATE) => {
                let driver: abi::mlx5_ib_create_srq = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
                pins(driver.buf_addr, 64)?;
                pins(driver.db_addr, 8)?;
                let pd = attrs::handle(to.command, srq::UVERBS_ATTR_CREATE_SRQ_PD_HANDLE)
                    .ok_or(Errno::NOENT)?;
                let pd = self.expect("create_srq", pd, UVERBS_OBJECT_PD)?;
                let domain = attrs::handle(to.command, srq::UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE);
                // The driver asks a queue of an XRC domain for a user index.
                if domain.is_some() && driver.uidx == 0 {
                    return Err(Errno::INVAL);
                }
                let max_wr = attrs::u32(to.command, srq::UVERBS_ATTR_CREATE_SRQ_MAX_WR)?;
                let handle = self.add_on(pd, UVERBS_OBJECT_SRQ);
                let object = self.object(handle);
                object.uidx = driver.uidx;
                // The driver counts one more, which stays free, and rounds up.
                object.max_wr = (max_wr + 1).next_power_of_two() - 1;
                to.made(srq::UVERBS_ATTR_CREATE_SRQ_HANDLE, handle)?;
                let resp = abi::mlx5_ib_create_srq_resp { srqn: handle + 0x100, reserved: 0 };
                if domain.is_some() {
                    to.put(srq::UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, &resp.srqn);
                }
                to.put(UVERBS_ATTR_UHW_OUT, &resp);
                Ok(())
            }
            (UVERBS_OBJECT_QP, qp::UVERBS_METHOD_QP_CREATE) => self.create_qp_mlx5(to),
            _ => self.run_dm(object, method, to),
        }
    }

    /// Moves a completion queue to other memory, unless it already has as many entries: the driver ignores the
    /// memory then.
    pub(super) fn resize_cq_mlx5(
        &mut self,
        handle: u32,
        entries: u32,
        mut to: Responses<'_, '_>,
    ) -> Result<()> {
        let driver: abi::mlx5_ib_resize_cq = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
        self.mlx5.as_mut().ok_or(Errno::PROTONOSUPPORT)?.asked_resize = driver;
        let object = self.object(handle);
        if entries != object.max_wr + 1 {
            if ![64, 128].contains(&driver.cqe_size) {
                return Err(Errno::INVAL);
            }
            pins(driver.buf_addr, 64)?;
            object.max_wr = entries - 1;
            object.start = driver.buf_addr;
        }
        let resp = cq::ib_uverbs_resize_cq_resp { cqe: entries - 1, reserved: 0 };
        to.put(UVERBS_ATTR_CORE_OUT, &resp);
        Ok(())
    }

    /// Tells the device the options of a connection: it takes those that it has.
    pub(super) fn modify_ece(&mut self, handle: u32, to: &mut Responses<'_, '_>) -> Result<()> {
        let driver: abi::mlx5_ib_modify_qp = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
        let mlx5 = self.mlx5.as_ref().ok_or(Errno::PROTONOSUPPORT)?;
        if driver.comp_mask != 0 || driver.burst_info.reserved != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let ece_options = driver.ece_options & mlx5.ece;
        self.object(handle).ece = driver.ece_options;
        let response_length = size_of::<abi::mlx5_ib_modify_qp_resp>() as u32;
        let resp =
            abi::mlx5_ib_modify_qp_resp { response_length, ece_options, ..Default::default() };
        to.put(UVERBS_ATTR_UHW_OUT, &resp);
        Ok(())
    }

    /// A target has no queues, but a user index as every queue pair.
    fn create_xrc_target(
        &mut self,
        domain: u32,
        uidx: u32,
        resp: abi::mlx5_ib_create_qp_resp,
        mut to: Responses<'_, '_>,
    ) -> Result<()> {
        let domain = self.expect("create_qp", domain, UVERBS_OBJECT_XRCD)?;
        if uidx == 0 {
            return Err(Errno::INVAL);
        }
        let number = self.next_qpn;
        self.next_qpn += 1;
        let object = UVERBS_OBJECT_QP;
        let stands_on = vec![domain];
        let handle =
            self.add(ScriptedObject { object, stands_on, number, uidx, ..Default::default() });
        to.made(qp::UVERBS_ATTR_CREATE_QP_HANDLE, handle)?;
        to.put(qp::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &number);
        to.put(UVERBS_ATTR_UHW_OUT, &resp);
        Ok(())
    }

    fn create_qp_mlx5(&mut self, mut to: Responses<'_, '_>) -> Result<()> {
        let driver: abi::mlx5_ib_create_qp = attrs::input(to.command, UVERBS_ATTR_UHW_IN)?;
        let told = self.mlx5.as_ref().map(|mlx5| mlx5.told_ece(driver.ece_options));
        let resp = abi::mlx5_ib_create_qp_resp {
            ece_options: told.unwrap_or_default(),
            ..Default::default()
        };
        if let Some(domain) = attrs::handle(to.command, qp::UVERBS_ATTR_CREATE_QP_XRCD_HANDLE) {
            return self.create_xrc_target(domain, driver.uidx, resp, to);
        }
        self.mlx5.as_mut().ok_or(Errno::PROTONOSUPPORT)?.asked_qp = driver;
        let raw = qp::ib_uverbs_qp_type::IB_UVERBS_QPT_RAW_PACKET.0;
        let split = attrs::u32(to.command, qp::UVERBS_ATTR_CREATE_QP_TYPE)? == raw;
        let id = match split {
            true => qp::UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM,
            false => qp::UVERBS_ATTR_CREATE_QP_BUF_UMEM,
        };
        let (has_sends, has_receives) = (driver.sq_wqe_count > 0, driver.rq_wqe_count > 0);
        let start = match has_receives || has_sends && !split {
            true => self.buffer(&to, id, driver.buf_addr, 64)?,
            false => Default::default(),
        };
        if split && has_sends {
            self.buffer(&to, qp::UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM, driver.sq_buf_addr, 64)?;
        }
        self.buffer(&to, MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM, driver.db_addr, 8)?;
        let is_size = driver.sq_wqe_count == 0 || driver.sq_wqe_count.is_power_of_two();
        if !is_size || driver.uidx == 0 {
            return Err(Errno::INVAL);
        }
        let stands_on = self.parents_of_qp(to.command)?;
        let number = self.next_qpn;
        self.next_qpn += 1;
        let handle = self.add(ScriptedObject {
            object: UVERBS_OBJECT_QP,
            stands_on,
            number,
            // Which page its doorbells are in.
            max_wr: driver.bfreg_index,
            start,
            iova: driver.db_addr,
            uidx: driver.uidx,
            ..Default::default()
        });
        to.made(qp::UVERBS_ATTR_CREATE_QP_HANDLE, handle)?;
        to.put(qp::UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, &number);
        to.put(UVERBS_ATTR_UHW_OUT, &resp);
        Ok(())
    }
}
