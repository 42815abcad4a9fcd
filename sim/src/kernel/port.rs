//! Ports and their tables of GIDs. Pairs with `UVERBS_METHOD_QUERY_PORT` and `UVERBS_METHOD_QUERY_GID_*` in
//! `core/uverbs_std_types_device.c`.

use super::{Kernel, Method};
use crate::call::{Call, Result};
use crate::driver::{Driver, input};
use rustix::io::Errno;
use uverbs_uapi::device::{
    UVERBS_METHOD_QUERY_GID_ENTRY, UVERBS_METHOD_QUERY_GID_TABLE, UVERBS_METHOD_QUERY_PORT,
    UVERBS_METHOD_QUERY_PORT_SPEED,
};
use uverbs_uapi::gid::*;
use uverbs_uapi::mlx5::prm::vport::{query_vport_state_in, query_vport_state_out};
use uverbs_uapi::mlx5::prm::{Bits, opcode};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;
use uverbs_uapi::port::{
    UVERBS_ATTR_QUERY_PORT_PORT_NUM, UVERBS_ATTR_QUERY_PORT_RESP,
    UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM, UVERBS_ATTR_QUERY_PORT_SPEED_RESP,
    ib_uverbs_query_port_resp_ex,
};
use zerocopy::IntoBytes;

/// The LID of the subnet manager, which the switch is.
const SM_LID: u16 = 0xbfff;
/// Entries of an InfiniBand port's table.
const INFINIBAND_GIDS: u32 = 16;
/// The rate of the link, in units of 100 Mb/s: four lanes of 25 Gbit/s.
const LINK_SPEED: u64 = 1000;
/// Entries of a port's table.
const GIDS: u32 = 256;

pub(super) const METHODS: &[Method] = &[
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_QUERY_PORT,
        attrs: &[UVERBS_ATTR_QUERY_PORT_PORT_NUM, UVERBS_ATTR_QUERY_PORT_RESP],
        run: query,
    },
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_QUERY_PORT_SPEED,
        attrs: &[UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM, UVERBS_ATTR_QUERY_PORT_SPEED_RESP],
        run: query_speed,
    },
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_QUERY_GID_ENTRY,
        attrs: &[
            UVERBS_ATTR_QUERY_GID_ENTRY_PORT,
            UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX,
            UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS,
            UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY,
        ],
        run: query_entry,
    },
    Method {
        object: UVERBS_OBJECT_DEVICE,
        method: UVERBS_METHOD_QUERY_GID_TABLE,
        attrs: &[
            UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE,
            UVERBS_ATTR_QUERY_GID_TABLE_FLAGS,
            UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES,
            UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES,
        ],
        run: query_table,
    },
];

fn query(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    if call.u64_if(UVERBS_ATTR_QUERY_PORT_PORT_NUM) != Some(1) {
        return Err(Errno::INVAL);
    }
    let (driver, _) = kernel.driver(call.file)?;
    let (has_link, infiniband) = (driver.has_link(), driver.infiniband.clone());
    let mut resp = ib_uverbs_query_port_resp_ex::default();
    let port = &mut resp.legacy_resp;
    // Ethernet, MTU of at most 4096, four lanes of 25 Gbit/s; ACTIVE and LINK_UP, or DOWN and DISABLED.
    port.link_layer = 2;
    (port.state, port.phys_state) = if has_link { (4, 5) } else { (1, 3) };
    port.max_mtu = 5;
    port.active_mtu = driver.interface.mtu;
    port.max_msg_sz = 1 << 30;
    port.gid_tbl_len = GIDS as i32 as _;
    port.pkey_tbl_len = 1;
    port.active_width = 2;
    port.active_speed = 32;
    // The first GID is at `sgid_index` 0, and GIDs are IP addresses.
    port.flags = 1;
    port.port_cap_flags = 1 << 16 | 1 << 26;
    resp.active_speed_ex = 32;
    if let Some((lid, pkeys)) = infiniband {
        // No GRH within the subnet.
        port.link_layer = 1;
        port.flags = 0;
        port.lid = lid;
        port.sm_lid = SM_LID;
        port.gid_tbl_len = INFINIBAND_GIDS;
        // DOWN ports are POLLING.
        port.phys_state = if has_link { 5 } else { 2 };
        port.pkey_tbl_len = pkeys.len() as u16;
        port.port_cap_flags = 0;
    }
    call.put(UVERBS_ATTR_QUERY_PORT_RESP, &resp);
    Ok(())
}

/// The rate of a port in units of 100 Mb/s, of all ports behind a LAG: `mlx5_ib_query_port_speed`.
fn query_speed(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    if call.u64_if(UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM) != Some(1) {
        return Err(Errno::INVAL);
    }
    let (driver, switch) = kernel.driver(call.file)?;
    let command = input::<query_vport_state_in>(opcode::QUERY_VPORT_STATE).into_inner();
    let told = match driver.infiniband {
        Some(_) => 0,
        None => {
            let answer = driver.execute(switch, &command)?;
            Bits::<query_vport_state_out, _>::new(answer).get(query_vport_state_out::max_tx_speed)
        }
    };
    let speed = match told {
        _ if !driver.has_link() => 0,
        0 => LINK_SPEED,
        told => told,
    };
    call.put(UVERBS_ATTR_QUERY_PORT_SPEED_RESP, &speed);
    Ok(())
}

fn entry(driver: &Driver, index: usize) -> Option<ib_uverbs_gid_entry> {
    let found = driver.interface.gids.get(index)?;
    let mut entry = ib_uverbs_gid_entry {
        gid_index: index as u32,
        port_num: 1,
        // The kernel counts from IB, which is 0.
        gid_type: found.kind,
        // As `rdma_read_gid_attr_ndev_rcu`: a GID of InfiniBand has no interface.
        netdev_ifindex: if driver.infiniband.is_some() { 0 } else { driver.interface.index },
        ..Default::default()
    };
    entry.gid.as_mut_bytes().copy_from_slice(&found.gid);
    Some(entry)
}

fn query_entry(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let index = call.u32(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX)?;
    if call.u32(UVERBS_ATTR_QUERY_GID_ENTRY_PORT)? != 1 || index >= GIDS {
        return Err(Errno::INVAL);
    }
    let (driver, _) = kernel.driver(call.file)?;
    let found = entry(driver, index as usize).ok_or(Errno::NODATA)?;
    call.put(UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &found);
    Ok(())
}

fn query_table(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let each = call.u64_if(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE).ok_or(Errno::INVAL)?;
    if each != size_of::<ib_uverbs_gid_entry>() as u64 {
        return Err(Errno::INVAL);
    }
    let room = call.room(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES) / each as usize;
    let (driver, _) = kernel.driver(call.file)?;
    let entries: Vec<_> =
        (0..driver.interface.gids.len()).filter_map(|index| entry(driver, index)).collect();
    if entries.len() > room {
        return Err(Errno::INVAL);
    }
    call.put_bytes(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, entries.as_bytes());
    call.put(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &(entries.len() as u64));
    Ok(())
}
