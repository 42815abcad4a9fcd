//! Finds who carries out a command.
//!
//! Pairs with the opcodes of [`uverbs_uapi::mlx5::prm::opcode`]. A command that has no line here is
//! refused as firmware refuses what it does not know, and logged by name the first time.

use uverbs_uapi::mlx5::prm::cmd::{
    query_adapter_out, query_adapter_param_block, query_issi_out, set_issi_in,
};
use uverbs_uapi::mlx5::prm::opcode::*;
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

use super::refusal::{Refused, refuse};
use crate::device::Device;
use crate::fault::Failure;
use crate::table::{KERNEL, SHARED};

/// What the driver may ask before it initialises the function, and after it has torn it down.
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

/// Carries out a command and returns the whole output; `room` is the length the driver expects.
/// `None` is no answer at all, for a test.
pub fn execute(device: &mut Device, input: &[u8], room: usize) -> Option<Vec<u8>> {
    let half = |at: usize| {
        input.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    };
    let (op, uid, op_mod) = (half(0), half(2), half(6));
    match device.faults.command(op) {
        // The syndrome tells it from refusals in the driver's log.
        Some(Failure::Status(status)) => return Some(vec![status, 0, 0, 0, 0, 0, 0xfa, 0x17]),
        Some(Failure::Silence) => return None,
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
            let count = device.refused.entry(key).or_insert(0);
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
) -> Result<Vec<u8>, Refused> {
    if !matches!(uid, KERNEL | SHARED) && op != DESTROY_UCTX {
        device.objects.uctxs.get(uid)?;
    }
    if !device.running && !BEFORE_INIT.contains(&op) {
        return refuse!(BadSystemState, "INIT_HCA comes first");
    }
    match op {
        ENABLE_HCA | NOP => Ok(vec![]),
        INIT_HCA => {
            device.running = true;
            device.pages.run(true);
            Ok(vec![])
        }
        TEARDOWN_HCA | DISABLE_HCA => {
            device.tear_down();
            Ok(vec![])
        }
        QUERY_ISSI => {
            let mut out = Bits::<query_issi_out, _>::new(vec![0; query_issi_out::SIZE]);
            out.set(query_issi_out::current_issi, device.issi);
            // Interface revisions 0 and 1, as a bit mask at the end.
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
            other => refuse!(BadParam, "interface revision {other}"),
        },
        QUERY_PAGES => device.pages.query(input),
        MANAGE_PAGES => device.pages.manage(input, room),
        QUERY_HCA_CAP => device.caps.query(op_mod),
        SET_HCA_CAP => device.caps.set(op_mod, input).map(|()| vec![]),
        QUERY_ADAPTER => {
            let mut out = Bits::<query_adapter_out, _>::new(vec![0; query_adapter_out::SIZE]);
            let mut block = out.sub_mut(query_adapter_out::query_adapter_struct);
            block.set(query_adapter_param_block::ieee_vendor_id, 0x2c9);
            block.set(query_adapter_param_block::vsd_vendor_id, 0x15b3);
            block.set_span(query_adapter_param_block::vsd_contd_psid, b"EMU0000000001\0\0\0");
            Ok(out.into_inner())
        }
        ACCESS_REG => device.access_register(input),

        ALLOC_UAR => device.alloc_uar(uid),
        DEALLOC_UAR => device.dealloc_uar(uid, input),
        ALLOC_PD => device.alloc_pd(uid),
        DEALLOC_PD => device.dealloc_pd(uid, input),
        ALLOC_XRCD => device.alloc_xrcd(uid),
        DEALLOC_XRCD => device.dealloc_xrcd(uid, input),
        ALLOC_TRANSPORT_DOMAIN => device.alloc_transport_domain(uid),
        DEALLOC_TRANSPORT_DOMAIN => device.dealloc_transport_domain(uid, input),
        ALLOC_Q_COUNTER => device.alloc_q_counter(uid),
        DEALLOC_Q_COUNTER => device.dealloc_q_counter(uid, input),
        QUERY_Q_COUNTER => device.query_q_counter(uid, input),
        ALLOC_FLOW_COUNTER => device.alloc_flow_counter(uid, input),
        DEALLOC_FLOW_COUNTER => device.dealloc_flow_counter(uid, input),
        QUERY_FLOW_COUNTER => device.query_flow_counter(uid, input),
        CREATE_UCTX => device.create_uctx(input),
        DESTROY_UCTX => device.destroy_uctx(input),
        CREATE_UMEM => device.create_umem(uid, input),
        DESTROY_UMEM => device.destroy_umem(uid, input),

        CREATE_MKEY => device.create_mkey(uid, input),
        DESTROY_MKEY => device.destroy_mkey(uid, input),
        QUERY_MKEY => device.query_mkey(uid, input),
        ALLOC_MEMIC => device.alloc_memic(input),
        DEALLOC_MEMIC => device.dealloc_memic(input),
        CREATE_EQ => device.create_eq(input),
        DESTROY_EQ => device.destroy_eq(input),
        QUERY_EQ => device.query_eq(input),
        CREATE_CQ => device.create_cq(uid, input),
        DESTROY_CQ => device.destroy_cq(uid, input),
        QUERY_CQ => device.query_cq(uid, input),
        MODIFY_CQ => device.modify_cq(uid, input),
        CREATE_QP => device.create_qp(uid, input),
        DESTROY_QP => device.destroy_qp(uid, input),
        RST2INIT_QP | INIT2INIT_QP | INIT2RTR_QP | RTR2RTS_QP | RTS2RTS_QP | SQERR2RTS_QP
        | TO_ERR_QP | TO_RST_QP => device.modify_qp(op, uid, input),
        QUERY_QP => device.query_qp(uid, input),
        CREATE_RMP => device.create_rmp(uid, input),
        MODIFY_RMP => device.modify_rmp(uid, input),
        QUERY_RMP => device.query_rmp(uid, input),
        DESTROY_RMP => device.destroy_rmp(uid, input),
        CREATE_XRC_SRQ => device.create_xrc_srq(uid, input),
        QUERY_XRC_SRQ => device.query_xrc_srq(uid, input),
        ARM_XRC_SRQ => device.arm_xrc_srq(uid, input),
        DESTROY_XRC_SRQ => device.destroy_xrc_srq(uid, input),
        ATTACH_TO_MCG => device.attach_to_mcg(uid, input),
        DETACH_FROM_MCG => device.detach_from_mcg(uid, input),

        QUERY_NIC_VPORT_CONTEXT => device.query_nic_vport_context(input),
        MODIFY_NIC_VPORT_CONTEXT => device.modify_nic_vport_context(input),
        QUERY_VPORT_STATE => device.query_vport_state(input),
        QUERY_VPORT_COUNTER => device.query_vport_counter(input),
        QUERY_HCA_VPORT_CONTEXT => device.query_hca_vport_context(),
        QUERY_HCA_VPORT_GID => device.query_hca_vport_gid(input),
        QUERY_HCA_VPORT_PKEY => device.query_hca_vport_pkey(input),
        SET_ROCE_ADDRESS => device.set_roce_address(input),
        QUERY_ROCE_ADDRESS => device.query_roce_address(input),

        CREATE_SQ => device.create_sq(uid, input),
        MODIFY_SQ => device.modify_sq(uid, input),
        QUERY_SQ => device.query_sq(uid, input),
        DESTROY_SQ => device.destroy_sq(uid, input),
        CREATE_RQ => device.create_rq(uid, input),
        MODIFY_RQ => device.modify_rq(uid, input),
        QUERY_RQ => device.query_rq(uid, input),
        DESTROY_RQ => device.destroy_rq(uid, input),
        CREATE_TIS => device.create_tis(uid, input),
        MODIFY_TIS => device.modify_tis(uid, input),
        DESTROY_TIS => device.destroy_tis(uid, input),
        CREATE_TIR => device.create_tir(uid, input),
        MODIFY_TIR => device.modify_tir(uid, input),
        DESTROY_TIR => device.destroy_tir(uid, input),
        CREATE_RQT => device.create_rqt(uid, input),
        MODIFY_RQT => device.modify_rqt(uid, input),
        DESTROY_RQT => device.destroy_rqt(uid, input),
        CREATE_FLOW_TABLE => device.create_flow_table(uid, input),
        MODIFY_FLOW_TABLE => device.modify_flow_table(uid, input),
        DESTROY_FLOW_TABLE => device.destroy_flow_table(uid, input),
        SET_FLOW_TABLE_ROOT => device.set_flow_table_root(uid, input),
        CREATE_FLOW_GROUP => device.create_flow_group(uid, input),
        DESTROY_FLOW_GROUP => device.destroy_flow_group(uid, input),
        SET_FLOW_TABLE_ENTRY => device.set_fte(uid, input),
        DELETE_FLOW_TABLE_ENTRY => device.delete_fte(uid, input),

        _ => refuse!(BadOp, "not modelled"),
    }
}
