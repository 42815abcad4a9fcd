//! Contexts, and queries of the device as a whole.
//!
//! Pairs with `core/uverbs_std_types_device.c`, `mlx5_ib_alloc_ucontext` and `mlx5_ib_query_device`.

use super::cq::{MAX_PERIOD, VECTORS};
use super::{Kernel, Limits, Method, Write, qp, srq};
use crate::call::{Call, Result};
use crate::udp::groups::MOST_GROUPS;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, IntoRawFd};
use uverbs_connectx::init_segment::CLOCK_KHZ;
use uverbs_uapi::async_event::{
    UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, UVERBS_METHOD_ASYNC_EVENT_ALLOC,
    ib_uverbs_async_event_desc,
};
use uverbs_uapi::comp_channel::{ib_uverbs_comp_event_desc, ib_uverbs_create_comp_channel_resp};
use uverbs_uapi::context::{
    UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS,
    UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
    ib_uverbs_core_support,
};
use uverbs_uapi::device::{
    UVERBS_ATTR_INFO_HANDLES_LIST, UVERBS_ATTR_INFO_OBJECT_ID, UVERBS_ATTR_INFO_TOTAL_HANDLES,
    UVERBS_METHOD_GET_CONTEXT, UVERBS_METHOD_INFO_HANDLES, UVERBS_METHOD_QUERY_CONTEXT,
    ib_uverbs_device_cap_flags, ib_uverbs_ex_query_device_resp, ib_uverbs_raw_packet_caps,
};
use uverbs_uapi::endian::Be64;
use uverbs_uapi::mlx5::context::{
    MLX5_IB_CLOCK_INFO_V1, mlx5_ib_alloc_ucontext_req_v2, mlx5_ib_alloc_ucontext_resp,
    mlx5_ib_alloc_ucontext_resp_mask, mlx5_ib_alloc_uctx_v2_flags, mlx5_ib_query_dev_resp_flags,
    mlx5_ib_query_device_resp, mlx5_ib_tso_caps,
};
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH, MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX,
    MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH,
};
use uverbs_uapi::object::{
    UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_ASYNC_EVENT, UVERBS_OBJECT_DEVICE,
};
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, IB_USER_VERBS_CMD_FLAG_EXTENDED,
    IB_USER_VERBS_EX_CMD_QUERY_DEVICE,
};
use zerocopy::IntoBytes;

pub(super) const METHODS: &[Method] = &[
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_GET_CONTEXT,
        attrs: &[
            UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS,
            UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT,
            UVERBS_ATTR_UHW_IN,
            UVERBS_ATTR_UHW_OUT,
        ],
        run: get_context,
    },
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_QUERY_CONTEXT,
        attrs: &[
            UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
            UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT,
            MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX,
        ],
        run: query_context,
    },
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_INFO_HANDLES,
        attrs: &[
            UVERBS_ATTR_INFO_OBJECT_ID,
            UVERBS_ATTR_INFO_TOTAL_HANDLES,
            UVERBS_ATTR_INFO_HANDLES_LIST,
        ],
        run: info_handles,
    },
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: MLX5_IB_METHOD_GET_DATA_DIRECT_SYSFS_PATH,
        attrs: &[MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH],
        run: data_direct_path,
    },
    Method {
        object: UVERBS_OBJECT_ASYNC_EVENT,
        method: UVERBS_METHOD_ASYNC_EVENT_ALLOC,
        attrs: &[UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE],
        run: alloc_async_event,
    },
];

pub(super) const WRITES: &[Write] = &[
    Write {
        command: IB_USER_VERBS_EX_CMD_QUERY_DEVICE | IB_USER_VERBS_CMD_FLAG_EXTENDED,
        run: query_device,
    },
    Write { command: IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, run: create_comp_channel },
];

/// Whether the method makes the context that others need.
pub(super) fn makes_context(object: u16, method: u16) -> bool {
    (object, method) == (UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT)
}

fn get_context(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: mlx5_ib_alloc_ucontext_req_v2 = call.driver()?;
    let limits = kernel.limits(call.file)?;
    if kernel.file(call.file)?.has_context {
        return Err(Errno::INVAL);
    }
    let devx = mlx5_ib_alloc_uctx_v2_flags::MLX5_IB_ALLOC_UCTX_DEVX.bits();
    let uid = match request.flags & devx != 0 {
        true => {
            let (driver, switch) = kernel.driver(call.file)?;
            driver.create_uctx(switch)?
        }
        false => 0,
    };
    let file = kernel.file_mut(call.file)?;
    (file.has_context, file.uid) = (true, uid);
    call.respond_driver(&driver_response(limits));
    call.put(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, &VECTORS);
    call.put(UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, &core_support());
    Ok(())
}

/// The place of the data-direct function in the tree of devices, behind that of the device.
fn data_direct_path(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let number = kernel.file(call.file)?.device;
    kernel.drivers[number].data_direct.ok_or(Errno::NODEV)?;
    let path = format!("/devices/pci0000:00/0000:00:{:02x}.1\0", 0x10 + number);
    let room = call.room(MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH);
    if path.len() > room {
        return Err(Errno::NOSPC);
    }
    call.put_bytes(MLX5_IB_ATTR_GET_DATA_DIRECT_SYSFS_PATH, path.as_bytes());
    Ok(())
}

fn query_context(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let limits = kernel.limits(call.file)?;
    call.put(MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX, &driver_response(limits));
    call.put(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &VECTORS);
    call.put(UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &core_support());
    Ok(())
}

fn core_support() -> u64 {
    ib_uverbs_core_support::IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS.bits()
}

fn driver_response(limits: Limits) -> mlx5_ib_alloc_ucontext_resp {
    use mlx5_ib_alloc_ucontext_resp_mask as Mask;
    let mut valid = Mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET
        | Mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_SQD2RTS;
    valid.set(Mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE, limits.has_ece);
    valid.set(Mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_REAL_TIME_TS, limits.has_real_time);
    let dump_fill = limits.dump_fill;
    valid.set(Mask::MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_DUMP_FILL_MKEY, dump_fill.is_some());
    mlx5_ib_alloc_ucontext_resp {
        qp_tab_size: limits.qps,
        cache_line_size: 64,
        comp_mask: valid.bits(),
        response_length: size_of::<mlx5_ib_alloc_ucontext_resp>() as u32,
        clock_info_versions: 1 << MLX5_IB_CLOCK_INFO_V1,
        // The counter is at the beginning of the second page of BAR0.
        hca_core_clock_offset: 0,
        bf_reg_size: 512,
        max_sq_desc_sz: 1024,
        max_rq_desc_sz: 1 << qp::MAX_RECEIVE_SHIFT,
        max_send_wqebb: limits.wqes,
        max_recv_wr: limits.wqes,
        max_srq_recv_wr: limits.srq_wr + 1,
        num_ports: 1,
        cqe_version: 1,
        // CREATE_AH and QUERY_DEVICE.
        cmds_supp_uhw: 3,
        log_uar_size: 12,
        num_uars_per_page: (rustix::param::page_size() / crate::memory::PAGE) as u32,
        dump_fill_mkey: dump_fill.unwrap_or(0),
        // None: WQEs of raw packets carry no header inline.
        eth_min_inline: 1,
        ..Default::default()
    }
}

fn info_handles(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    // A constant of a 16-bit enum travels as an integer of 8 bytes.
    let asked = call.u64_if(UVERBS_ATTR_INFO_OBJECT_ID).ok_or(Errno::INVAL)? as u16;
    let known = super::METHODS.iter().copied().flatten().any(|method| method.object == asked);
    if !known {
        return Err(Errno::NOENT);
    }
    let room = call.room(UVERBS_ATTR_INFO_HANDLES_LIST) / size_of::<u32>();
    let mut handles = kernel.handles(call.file, |object| object.kind() == asked)?;
    handles.truncate(room);
    call.put(UVERBS_ATTR_INFO_TOTAL_HANDLES, &(handles.len() as u32));
    call.put_bytes(UVERBS_ATTR_INFO_HANDLES_LIST, handles.as_bytes());
    Ok(())
}

fn alloc_async_event(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let fd = kernel.add_events(call.file, size_of::<ib_uverbs_async_event_desc>())?;
    let file = kernel.file_mut(call.file)?;
    if file.default_events.is_none() {
        let made = file.events.last().cloned();
        file.default_events = made.map(|events| (events, fd.as_raw_fd()));
    }
    call.made_fd(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, fd);
    Ok(())
}

fn create_comp_channel(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let fd = kernel.add_events(call.file, size_of::<ib_uverbs_comp_event_desc>())?;
    call.respond(&ib_uverbs_create_comp_channel_resp { fd: fd.into_raw_fd() as u32 });
    Ok(())
}

/// WQEBBs of the largest request with one entry, of any transport: `mlx5_ib_calc_max_qp_wr`.
const WQEBBS_OF_LARGEST: u32 = 4;

fn query_device(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let (guid, limits) = (kernel.guid(call.file)?, kernel.limits(call.file)?);
    let mut resp = ib_uverbs_ex_query_device_resp::default();
    let base = &mut resp.base;
    base.fw_ver = 16 << 32 | 35 << 16 | 1000;
    base.node_guid = Be64::new(guid);
    base.sys_image_guid = base.node_guid;
    base.max_mr_size = !0;
    base.page_size_cap = !0xfff;
    base.vendor_id = 0x2c9;
    base.vendor_part_id = 4119;
    base.max_qp = limits.qps;
    base.max_qp_wr = limits.wqes / WQEBBS_OF_LARGEST;
    base.max_sge = 30;
    base.max_sge_rd = 30;
    base.max_cq = limits.cqs;
    base.max_cqe = limits.cqes;
    base.max_mr = limits.mkeys;
    base.max_pd = limits.pds;
    base.max_qp_rd_atom = limits.rd_atomic.into();
    base.max_qp_init_rd_atom = limits.rd_atomic.into();
    base.max_res_rd_atom = u32::from(limits.rd_atomic) * limits.qps;
    base.atomic_cap = limits.has_atomics.into();
    base.max_mw = limits.mkeys;
    // Over UDP each group has a socket.
    let groups = if kernel.transmitter.is_some() { MOST_GROUPS as u32 } else { 1 << 10 };
    base.max_mcast_grp = groups;
    base.max_mcast_qp_attach = 32;
    base.max_total_mcast_qp_attach = 32 * groups;
    base.max_ah = i32::MAX as u32;
    base.max_srq = limits.srqs;
    base.max_srq_wr = limits.srq_wr;
    base.max_srq_sge = srq::MAX_SGE;
    base.max_pkeys = 1;
    base.local_ca_ack_delay = 16;
    base.phys_port_cnt = 1;
    let mut caps = ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_MEM_WINDOW
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2B
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_MEM_MGT_EXTENSIONS
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_RC_RNR_NAK_GEN
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_CHANGE_PHY_PORT
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_PORT_ACTIVE_EVENT
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_SYS_IMAGE_GUID
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_BAD_QKEY_CNTR
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_RAW_IP_CSUM
        | ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_MANAGED_FLOW_STEERING;
    caps.set(ib_uverbs_device_cap_flags::IB_UVERBS_DEVICE_XRC, limits.has_xrc);
    base.device_cap_flags = caps.bits() as u32;
    resp.device_cap_flags_ex = caps.bits();
    resp.cq_moderation_caps.max_cq_moderation_count = 0xffff;
    resp.cq_moderation_caps.max_cq_moderation_period = MAX_PERIOD;
    resp.hca_core_clock = CLOCK_KHZ;
    resp.timestamp_mask = u64::MAX >> 1;
    let raw = ib_uverbs_raw_packet_caps::IB_UVERBS_RAW_PACKET_CAP_CVLAN_STRIPPING
        | ib_uverbs_raw_packet_caps::IB_UVERBS_RAW_PACKET_CAP_IP_CSUM;
    resp.raw_packet_caps = raw.bits();
    resp.max_dm_size = super::dm::MAX;
    resp.response_length = size_of_val(&resp) as u32;
    call.respond(&resp);
    let mut flags = mlx5_ib_query_dev_resp_flags::MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD;
    let out_of_order = mlx5_ib_query_dev_resp_flags::MLX5_IB_QUERY_DEV_RESP_FLAGS_OOO_DP;
    flags.set(out_of_order, limits.out_of_order);
    call.respond_driver(&mlx5_ib_query_device_resp {
        response_length: size_of::<mlx5_ib_query_device_resp>() as u32,
        tso_caps: mlx5_ib_tso_caps { max_tso: 1 << 16, supported_qpts: 1 << 8 },
        flags: flags.bits(),
        ..Default::default()
    });
    Ok(())
}

impl Kernel {
    /// The GUID of a file's device.
    pub(crate) fn guid(&self, file: super::FileId) -> Result<u64> {
        Ok(guid(self.file(file)?.device))
    }
}

/// The GUID of the device with a number.
pub(crate) fn guid(device: usize) -> u64 {
    0x0275_7600_0000_0001 + device as u64
}
