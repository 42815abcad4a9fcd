//! Address handles. Pairs with `ib_uverbs_create_ah` and `hw/mlx5/ah.c`.

use super::mcast::group_mac;
use super::{Kernel, Method, Object, Write, destroying};
use crate::call::{Call, Result};
use crate::driver::Driver;
use rustix::io::Errno;
use uverbs_uapi::ah::{UVERBS_METHOD_AH_DESTROY, ib_uverbs_create_ah, ib_uverbs_create_ah_resp};
use uverbs_uapi::mlx5::abi::mlx5_ib_create_ah_resp;
use uverbs_uapi::object::{UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_AH};
use uverbs_uapi::write::IB_USER_VERBS_CMD_CREATE_AH;

/// A MAC for peers outside of the process, locally administered.
const OUTSIDE_MAC: [u8; 6] = [0x02, 0x75, 0x76, 0xff, 0xff, 0xff];

pub(super) const METHODS: &[Method] = &[destroying(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY)];

pub(super) const WRITES: &[Write] = &[Write { command: IB_USER_VERBS_CMD_CREATE_AH, run: create }];

fn create(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_create_ah = call.core()?;
    if request.attr.port_num != 1 {
        return Err(Errno::INVAL);
    }
    kernel.pd(call.file, request.pd_handle)?;
    let (driver, _) = kernel.driver(call.file)?;
    let is_infiniband = driver.infiniband.is_some();
    // RoCE has no addresses but global ones.
    if request.attr.is_global == 0 && !is_infiniband {
        return Err(Errno::INVAL);
    }
    if usize::from(request.attr.grh.sgid_index) >= driver.interface.gids.len() {
        return Err(Errno::INVAL);
    }
    // The response has to have room for the MAC.
    let room = std::mem::offset_of!(mlx5_ib_create_ah_resp, reserved);
    let (device, grh) = (kernel.file(call.file)?.device, request.attr.grh);
    let dmac = match is_infiniband {
        true => [0; 6],
        false if call.room(UVERBS_ATTR_UHW_OUT) < room => return Err(Errno::INVAL),
        false => kernel.resolve_from(device, grh.sgid_index, grh.dgid)?,
    };
    let ah_handle = kernel.add(call.file, Object::Ah, &[request.pd_handle])?;
    call.respond(&ib_uverbs_create_ah_resp { ah_handle });
    let response_length = size_of::<mlx5_ib_create_ah_resp>() as u32;
    call.respond_driver(&mlx5_ib_create_ah_resp { response_length, dmac, reserved: [0; 6] });
    Ok(())
}

impl Kernel {
    /// The MAC of an address, as a port finds it from one of its own.
    ///
    /// # Errors
    ///
    /// `EINVAL` for addresses of two families, `ETIMEDOUT` for an address that no interface has.
    pub(crate) fn resolve_from(&self, device: usize, own: u8, gid: [u8; 16]) -> Result<[u8; 6]> {
        let is_ipv4 = |gid: &[u8; 16]| gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        let own = self.drivers[device].interface.gids.get(usize::from(own)).ok_or(Errno::INVAL)?;
        let is_group = gid[0] == 0xff || is_ipv4(&gid) && gid[12] >> 4 == 0xe;
        if !is_group && is_ipv4(&own.gid) != is_ipv4(&gid) {
            return Err(Errno::INVAL);
        }
        self.resolve(gid).ok_or(Errno::TIMEDOUT)
    }

    /// The MAC of the interface that has an address, as ARP finds it; that of a group for a group.
    pub(crate) fn resolve(&self, gid: [u8; 16]) -> Option<[u8; 6]> {
        let has = |driver: &&Driver| driver.interface.gids.iter().any(|entry| entry.gid == gid);
        let known = self.drivers.iter().find(has).map(|driver| driver.interface.mac);
        // The socket needs no MAC of a peer outside, and nobody can say whether one is there.
        let outside = || self.drivers.iter().any(Driver::is_exposed).then_some(OUTSIDE_MAC);
        group_mac(gid).or(known).or_else(outside)
    }
}
