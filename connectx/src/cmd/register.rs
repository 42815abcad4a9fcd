//! Registers of port and function, behind ACCESS_REG.
//!
//! Pairs with mlx5_core's `port.c` and mlx5e. The device refuses a register that is not modelled,
//! and the driver continues without it.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::cmd::access_register_in;
use uverbs_uapi::mlx5::prm::register::{paos_reg, pcap_reg, pmtu_reg, ptys_reg, pvlc_reg};

use super::ppcnt;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::options::PortType;
use crate::port::MAX_MTU;

const PCAP: u64 = 0x5001;
const PMTU: u64 = 0x5003;
const PTYS: u64 = 0x5004;
const PAOS: u64 = 0x5006;
const PPCNT: u64 = 0x5008;
const PVLC: u64 = 0x500f;
const NODE_DESCRIPTION: u64 = 0x6001;
const HOST_ENDIANNESS: u64 = 0x7004;

/// `op_mod` of a write.
const WRITE: u64 = 0;

const ETHERNET_100G_CR4: u64 = 1 << 20;
const INFINIBAND_EDR: u64 = 1 << 5;
const WIDTH_4X: u64 = 1 << 2;
const PROTOCOL_INFINIBAND: u64 = 1;
const PROTOCOL_ETHERNET: u64 = 4;

const UP: u64 = 1;
const DOWN: u64 = 2;

/// Bytes of headers that the MTU of an Ethernet port includes.
const L2_HEADERS: u16 = 22;

pub(crate) fn access_register(device: &mut Device, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let command = Bits::<access_register_in, _>::new(input);
    let write = command.get(access_register_in::op_mod) == WRITE;
    let register = command.get(access_register_in::register_id);
    let mut data = command.tail(access_register_in::register_data).to_vec();
    if data.len() > 4096 {
        return refuse!(BadInputLength, "{} bytes of register data, the limit is 4096", data.len());
    }
    match register {
        PTYS => ptys(device, Bits::new(&mut data[..]), write)?,
        PMTU => pmtu(device, Bits::new(&mut data[..]), write)?,
        PAOS => paos(device, Bits::new(&mut data[..]), write),
        PVLC if !write => {
            let mut pvlc = Bits::<pvlc_reg, _>::new(&mut data[..]);
            for field in [pvlc_reg::vl_hw_cap, pvlc_reg::vl_admin, pvlc_reg::vl_operational] {
                pvlc.set(field, 1);
            }
        }
        PCAP if !write => {
            let mut pcap = Bits::<pcap_reg, _>::new(&mut data[..]);
            pcap.set_span(pcap_reg::port_capability_mask, &[0; 16]);
        }
        PPCNT => ppcnt::ppcnt(device, Bits::new(&mut data[..]))?,
        NODE_DESCRIPTION => {
            device.node_description.resize(data.len(), 0);
            if write {
                device.node_description.copy_from_slice(&data);
            } else {
                data.copy_from_slice(&device.node_description);
            }
        }
        HOST_ENDIANNESS if write => {
            // 0 means little endian; the emulator supports no other guests.
            if data.first().is_some_and(|byte| byte & 0x80 != 0) {
                return refuse!(BadParam, "a big-endian host is not modelled");
            }
        }
        _ => return refuse!(BadParam, "register {register:#x} is not modelled"),
    }
    let mut out = vec![0; 16];
    out.extend(data);
    Ok(out)
}

fn ptys(
    device: &mut Device,
    mut ptys: Bits<ptys_reg, &mut [u8]>,
    write: bool,
) -> Result<(), CommandError> {
    let ethernet = device.options.port_type == PortType::Ethernet;
    if write {
        let wanted = Bits::<ptys_reg, _>::new(ptys.into_inner().to_vec());
        let speed = wanted.get(ptys_reg::eth_proto_admin);
        if ethernet && speed & ETHERNET_100G_CR4 == 0 {
            return refuse!(BadParam, "link speeds {speed:#x}, only 100GBASE-CR4 is modelled");
        }
        return Ok(());
    }
    let wanted = ptys.get(ptys_reg::proto_mask);
    if ethernet && wanted & PROTOCOL_ETHERNET != 0 {
        let now = if device.port.active() { ETHERNET_100G_CR4 } else { 0 };
        ptys.set(ptys_reg::eth_proto_capability, ETHERNET_100G_CR4);
        ptys.set(ptys_reg::eth_proto_admin, ETHERNET_100G_CR4);
        ptys.set(ptys_reg::eth_proto_oper, now);
    }
    if !ethernet && wanted & PROTOCOL_INFINIBAND != 0 {
        for (width, speed) in [
            (ptys_reg::ib_link_width_capability, ptys_reg::ib_proto_capability),
            (ptys_reg::ib_link_width_admin, ptys_reg::ib_proto_admin),
            (ptys_reg::ib_link_width_oper, ptys_reg::ib_proto_oper),
        ] {
            ptys.set(width, WIDTH_4X);
            ptys.set(speed, INFINIBAND_EDR);
        }
    }
    Ok(())
}

fn pmtu(
    device: &mut Device,
    mut pmtu: Bits<pmtu_reg, &mut [u8]>,
    write: bool,
) -> Result<(), CommandError> {
    let ethernet = device.options.port_type == PortType::Ethernet;
    let max = if ethernet { MAX_MTU + L2_HEADERS } else { 4096 };
    if write {
        let wanted = pmtu.get(pmtu_reg::admin_mtu);
        if wanted > u64::from(max) {
            return refuse!(BadParam, "MTU {wanted} is above {max}");
        }
        device.port.mtu = wanted as u16;
    }
    pmtu.set(pmtu_reg::max_mtu, max.into());
    pmtu.set(pmtu_reg::admin_mtu, device.port.mtu.min(max).into());
    pmtu.set(pmtu_reg::oper_mtu, device.port.mtu.min(max).into());
    Ok(())
}

fn paos(device: &mut Device, mut paos: Bits<paos_reg, &mut [u8]>, write: bool) {
    if write && paos.is_set(paos_reg::ase) {
        let was = device.port.active();
        device.port.admin_up = paos.get(paos_reg::admin_status) == UP;
        if was != device.port.active() {
            device.port_changed();
        }
    }
    paos.set(paos_reg::admin_status, if device.port.admin_up { UP } else { DOWN });
    paos.set(paos_reg::oper_status, if device.port.active() { UP } else { DOWN });
}
