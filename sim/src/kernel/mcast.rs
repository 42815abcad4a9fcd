//! Multicast groups. Pairs with `ib_uverbs_attach_mcast`, `ib_attach_mcast` and `mlx5_ib_mcg_attach`.

use super::{FileId, Kernel, Write};
use crate::call::{Call, Result};
use crate::driver::input;
use rustix::io::Errno;
use uverbs_uapi::mcast::{ib_uverbs_attach_mcast, ib_uverbs_detach_mcast};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::prm::qpc::attach_to_mcg_in;
use uverbs_uapi::write::{IB_USER_VERBS_CMD_ATTACH_MCAST, IB_USER_VERBS_CMD_DETACH_MCAST};

pub(super) const WRITES: &[Write] = &[
    Write { command: IB_USER_VERBS_CMD_ATTACH_MCAST, run: attach },
    Write { command: IB_USER_VERBS_CMD_DETACH_MCAST, run: detach },
];

/// A membership of a queue pair: the group's GID and LID.
pub(crate) type Membership = ([u8; 16], u16);

/// The MAC of a group: `ff00::/8`, or `224.0.0.0/4` as an IPv4-mapped address; `None` for the GID of a port.
pub(super) fn group_mac(gid: [u8; 16]) -> Option<[u8; 6]> {
    match gid {
        [0xff, .., b2, b1, b0, last] => Some([0x33, 0x33, b2, b1, b0, last]),
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224..=239, b2, b1, b0] => {
            Some([0x01, 0x00, 0x5e, b2 & 0x7f, b1, b0])
        }
        _ => None,
    }
}

fn attach(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_attach_mcast = call.core()?;
    let number = kernel.qp(call.file, request.qp_handle)?;
    let membership = (request.gid, request.mlid);
    let (driver, _) = kernel.driver(call.file)?;
    let qp = driver.qps.get(&number).ok_or(Errno::INVAL)?;
    if qp.groups.contains(&membership) {
        return Ok(());
    }
    if group_mac(request.gid).is_none() || !qp.kind.is_datagram() {
        return Err(Errno::INVAL);
    }
    // Peers outside of the process send to the host, which has to be in the group, too.
    let outside = kernel.transmitter.as_ref();
    outside.map_or(Ok(()), |outside| outside.join(request.gid))?;
    kernel
        .change_membership(call.file, opcode::ATTACH_TO_MCG, number, request.gid)
        .inspect_err(|_| kernel.leave_outside(request.gid))?;
    let (driver, _) = kernel.driver(call.file)?;
    driver.qps.entry(number).and_modify(|qp| qp.groups.push(membership));
    Ok(())
}

fn detach(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_detach_mcast = call.core()?;
    let number = kernel.qp(call.file, request.qp_handle)?;
    let membership = (request.gid, request.mlid);
    let (driver, _) = kernel.driver(call.file)?;
    let qp = driver.qps.get_mut(&number).ok_or(Errno::INVAL)?;
    let at = qp.groups.iter().position(|group| *group == membership).ok_or(Errno::INVAL)?;
    qp.groups.remove(at);
    kernel.leave_outside(request.gid);
    kernel.change_membership(call.file, opcode::DETACH_FROM_MCG, number, request.gid)
}

impl Kernel {
    fn change_membership(
        &mut self,
        file: FileId,
        op: u16,
        number: u32,
        gid: [u8; 16],
    ) -> Result<()> {
        let (driver, switch) = self.driver(file)?;
        let mut command = input::<attach_to_mcg_in>(op);
        command.set(attach_to_mcg_in::qpn, number.into());
        command.set_span(attach_to_mcg_in::multicast_gid, &gid);
        driver.execute(switch, &command.into_inner()).map(drop)
    }

    fn leave_outside(&self, gid: [u8; 16]) {
        if let Some(outside) = &self.transmitter {
            outside.leave(gid);
        }
    }

    /// Ends the memberships of a queue pair that goes with its file, as `ib_uverbs_detach_umcast`.
    pub(super) fn leave_groups(&mut self, file: FileId, number: u32) {
        let Ok((driver, _)) = self.driver(file) else { return };
        let groups = driver.qps.get_mut(&number).map(|qp| std::mem::take(&mut qp.groups));
        for (gid, _) in groups.into_iter().flatten() {
            self.leave_outside(gid);
            let _ = self.change_membership(file, opcode::DETACH_FROM_MCG, number, gid);
        }
    }
}
