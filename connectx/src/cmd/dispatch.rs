//! Calls the function of a command's opcode.
//!
//! Pairs with the opcodes of [`uverbs_uapi::mlx5::prm::opcode`]. A command without a line here is
//! refused like one that firmware does not know, and its name is logged the first time.

use uverbs_uapi::mlx5::prm::cmd::{
    query_adapter_out, query_adapter_param_block, query_issi_out, set_issi_in,
};
use uverbs_uapi::mlx5::prm::opcode::*;
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

use super::{
    cq, domain, eq, flow_counter, flow_table, general_object, hca_cap, lag, mcg, memic, mkey,
    pages, q_counter, qp, register, rq, rqt, sq, srq, tir, tis, uar, uctx, umem, vport,
};
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::fault::CommandFailure;
use crate::object::table::{KERNEL, SHARED};

/// Commands that the driver may send before INIT_HCA and after TEARDOWN_HCA.
const BEFORE_INIT: [u16; 13] = [
    NOP,
    ENABLE_HCA,
    DISABLE_HCA,
    INIT_HCA,
    TEARDOWN_HCA,
    QUERY_ISSI,
    SET_ISSI,
    QUERY_PAGES,
    MANAGE_PAGES,
    QUERY_HCA_CAP,
    SET_HCA_CAP,
    QUERY_ADAPTER,
    ACCESS_REG,
];

/// Executes a command and returns its whole output. `room` is the length that the driver expects. `None` if a test has
/// silenced the command: it gets no completion.
pub(crate) fn execute(device: &mut Device, input: &[u8], room: usize) -> Option<Vec<u8>> {
    device.settle_payloads();
    let half = |at: usize| {
        input.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    let (op, uid, op_mod) = (half(0), half(2), half(6));
    match device.faults.command_fault(op) {
        // This syndrome is in the driver's log; no refusal of the device itself has it.
        Some(CommandFailure::Status(status)) => {
            return Some(vec![status, 0, 0, 0, 0, 0, 0xfa, 0x17]);
        }
        Some(CommandFailure::Silence) => return None,
        None => {}
    }
    let result = run(device, op, uid.into(), op_mod, input, room);
    let name = opcode::name(op).unwrap_or("unknown");
    match result {
        Ok(mut output) => {
            log::trace!("{name} {op_mod:#x}: {} bytes", input.len());
            output.resize(output.len().max(8), 0);
            output[..8].fill(0);
            Some(output)
        }
        Err(refused) => {
            let key = (op, refused.syndrome());
            let count = device.logged_errors.entry(key).or_insert(0);
            *count += 1;
            if *count == 1 {
                log::warn!("{name} ({op:#x}, modifier {op_mod:#x}): {refused}");
            }
            let mut output = vec![refused.status as u8, 0, 0, 0];
            output.extend(refused.syndrome().to_be_bytes());
            Some(output)
        }
    }
}

fn run(
    device: &mut Device,
    op: u16,
    uid: u32,
    op_mod: u16,
    input: &[u8],
    room: usize,
) -> Result<Vec<u8>, CommandError> {
    if !matches!(uid, KERNEL | SHARED) && op != DESTROY_UCTX {
        device.objects.uctxs.get(uid)?;
    }
    if !device.initialized && !BEFORE_INIT.contains(&op) {
        return refuse!(BadSystemState, "the driver has to send INIT_HCA first");
    }
    match op {
        ENABLE_HCA | NOP => Ok(vec![]),
        INIT_HCA => {
            device.initialized = true;
            device.pages.set_running(true);
            Ok(vec![])
        }
        TEARDOWN_HCA | DISABLE_HCA => {
            device.tear_down();
            Ok(vec![])
        }
        QUERY_ISSI => {
            let mut out = Bits::<query_issi_out, _>::new(vec![0; query_issi_out::SIZE]);
            out.set(query_issi_out::current_issi, device.issi);
            // The last byte is a bit mask of the supported interface revisions, 0 and 1.
            let mut out = out.into_inner();
            if let Some(last) = out.last_mut() {
                *last = 0b11;
            }
            Ok(out)
        }
        SET_ISSI => match Bits::<set_issi_in, _>::new(input).get(set_issi_in::current_issi) {
            revision @ (0 | 1) => {
                device.issi = revision;
                Ok(vec![])
            }
            other => refuse!(BadParam, "interface revision {other}, 0 and 1 are supported"),
        },
        QUERY_PAGES => pages::query_pages(&device.pages, input),
        MANAGE_PAGES => pages::manage_pages(&mut device.pages, input, room),
        QUERY_HCA_CAP => hca_cap::query_hca_cap(&device.caps, op_mod),
        SET_HCA_CAP => hca_cap::set_hca_cap(&mut device.caps, op_mod, input).map(|()| vec![]),
        QUERY_ADAPTER => {
            let mut out = Bits::<query_adapter_out, _>::new(vec![0; query_adapter_out::SIZE]);
            let mut block = out.sub_mut(query_adapter_out::query_adapter_struct);
            block.set(query_adapter_param_block::ieee_vendor_id, 0x2c9);
            block.set(query_adapter_param_block::vsd_vendor_id, 0x15b3);
            block.set_span(query_adapter_param_block::vsd_contd_psid, b"EMU0000000001\0\0\0");
            Ok(out.into_inner())
        }
        QUERY_LAG => lag::query_lag(device),
        ACCESS_REG => register::access_register(device, input),

        ALLOC_UAR => uar::alloc_uar(device, uid),
        DEALLOC_UAR => uar::dealloc_uar(device, uid, input),
        ALLOC_PD => domain::alloc_pd(device, uid),
        DEALLOC_PD => domain::dealloc_pd(device, uid, input),
        ALLOC_XRCD => domain::alloc_xrcd(device, uid),
        DEALLOC_XRCD => domain::dealloc_xrcd(device, uid, input),
        ALLOC_TRANSPORT_DOMAIN => domain::alloc_transport_domain(device, uid),
        DEALLOC_TRANSPORT_DOMAIN => domain::dealloc_transport_domain(device, uid, input),
        ALLOC_Q_COUNTER => q_counter::alloc_q_counter(device, uid),
        DEALLOC_Q_COUNTER => q_counter::dealloc_q_counter(device, uid, input),
        QUERY_Q_COUNTER => q_counter::query_q_counter(device, uid, input),
        ALLOC_FLOW_COUNTER => flow_counter::alloc_flow_counter(device, uid, input),
        DEALLOC_FLOW_COUNTER => flow_counter::dealloc_flow_counter(device, uid, input),
        QUERY_FLOW_COUNTER => flow_counter::query_flow_counter(device, uid, input),
        CREATE_GENERAL_OBJECT => general_object::create(device, uid, input),
        MODIFY_GENERAL_OBJECT => general_object::modify(device, uid, input),
        QUERY_GENERAL_OBJECT => general_object::query(device, uid, input),
        DESTROY_GENERAL_OBJECT => general_object::destroy(device, uid, input),
        CREATE_UCTX => uctx::create_uctx(device, input),
        DESTROY_UCTX => uctx::destroy_uctx(device, input),
        CREATE_UMEM => umem::create_umem(device, uid, input),
        DESTROY_UMEM => umem::destroy_umem(device, uid, input),

        CREATE_MKEY => mkey::create_mkey(device, uid, input),
        DESTROY_MKEY => mkey::destroy_mkey(device, uid, input),
        QUERY_MKEY => mkey::query_mkey(device, uid, input),
        QUERY_SPECIAL_CONTEXTS => Ok(mkey::query_special_contexts()),
        QUERY_VUID => mkey::query_vuid(device, input),
        ALLOC_MEMIC => memic::alloc_memic(device, input),
        DEALLOC_MEMIC => memic::dealloc_memic(device, input),
        CREATE_EQ => eq::create_eq(device, input),
        DESTROY_EQ => eq::destroy_eq(device, input),
        QUERY_EQ => eq::query_eq(device, input),
        CREATE_CQ => cq::create_cq(device, uid, input),
        DESTROY_CQ => cq::destroy_cq(device, uid, input),
        QUERY_CQ => cq::query_cq(device, uid, input),
        MODIFY_CQ => cq::modify_cq(device, uid, input),
        CREATE_QP => qp::create_qp(device, uid, input),
        DESTROY_QP => qp::destroy_qp(device, uid, input),
        RST2INIT_QP | INIT2INIT_QP | INIT2RTR_QP | RTR2RTS_QP | RTS2RTS_QP | SQERR2RTS_QP
        | TO_ERR_QP | TO_RST_QP => qp::modify_qp(device, op, uid, input),
        QUERY_QP => qp::query_qp(device, uid, input),
        CREATE_RMP => srq::create_rmp(device, uid, input),
        MODIFY_RMP => srq::modify_rmp(device, uid, input),
        QUERY_RMP => srq::query_rmp(device, uid, input),
        DESTROY_RMP => srq::destroy_rmp(device, uid, input),
        CREATE_XRC_SRQ => srq::create_xrc_srq(device, uid, input),
        QUERY_XRC_SRQ => srq::query_xrc_srq(device, uid, input),
        ARM_XRC_SRQ => srq::arm_xrc_srq(device, uid, input),
        DESTROY_XRC_SRQ => srq::destroy_xrc_srq(device, uid, input),
        ATTACH_TO_MCG => mcg::attach_to_mcg(device, uid, input),
        DETACH_FROM_MCG => mcg::detach_from_mcg(device, uid, input),

        QUERY_NIC_VPORT_CONTEXT => vport::query_nic_vport_context(device, input),
        MODIFY_NIC_VPORT_CONTEXT => vport::modify_nic_vport_context(device, input),
        QUERY_VPORT_STATE => vport::query_vport_state(device, input),
        QUERY_VPORT_COUNTER => vport::query_vport_counter(device, input),
        QUERY_HCA_VPORT_CONTEXT => vport::query_hca_vport_context(device),
        MODIFY_HCA_VPORT_CONTEXT => vport::modify_hca_vport_context(device, input),
        QUERY_HCA_VPORT_GID => vport::query_hca_vport_gid(device, input),
        QUERY_HCA_VPORT_PKEY => vport::query_hca_vport_pkey(device, input),
        SET_ROCE_ADDRESS => vport::set_roce_address(device, input),
        QUERY_ROCE_ADDRESS => vport::query_roce_address(device, input),

        CREATE_SQ => sq::create_sq(device, uid, input),
        MODIFY_SQ => sq::modify_sq(device, uid, input),
        QUERY_SQ => sq::query_sq(device, uid, input),
        DESTROY_SQ => sq::destroy_sq(device, uid, input),
        CREATE_RQ => rq::create_rq(device, uid, input),
        MODIFY_RQ => rq::modify_rq(device, uid, input),
        QUERY_RQ => rq::query_rq(device, uid, input),
        DESTROY_RQ => rq::destroy_rq(device, uid, input),
        CREATE_TIS => tis::create_tis(device, uid, input),
        MODIFY_TIS => tis::modify_tis(device, uid, input),
        QUERY_TIS => tis::query_tis(device, uid, input),
        DESTROY_TIS => tis::destroy_tis(device, uid, input),
        CREATE_TIR => tir::create_tir(device, uid, input),
        MODIFY_TIR => tir::modify_tir(device, uid, input),
        QUERY_TIR => tir::query_tir(device, uid, input),
        DESTROY_TIR => tir::destroy_tir(device, uid, input),
        CREATE_RQT => rqt::create_rqt(device, uid, input),
        MODIFY_RQT => rqt::modify_rqt(device, uid, input),
        QUERY_RQT => rqt::query_rqt(device, uid, input),
        DESTROY_RQT => rqt::destroy_rqt(device, uid, input),
        CREATE_FLOW_TABLE => flow_table::create_flow_table(device, uid, input),
        MODIFY_FLOW_TABLE => flow_table::modify_flow_table(device, uid, input),
        DESTROY_FLOW_TABLE => flow_table::destroy_flow_table(device, uid, input),
        SET_FLOW_TABLE_ROOT => flow_table::set_flow_table_root(device, uid, input),
        CREATE_FLOW_GROUP => flow_table::create_flow_group(device, uid, input),
        DESTROY_FLOW_GROUP => flow_table::destroy_flow_group(device, uid, input),
        SET_FLOW_TABLE_ENTRY => flow_table::set_fte(device, uid, input),
        DELETE_FLOW_TABLE_ENTRY => flow_table::delete_fte(device, uid, input),

        _ => refuse!(BadOp, "not modelled"),
    }
}
