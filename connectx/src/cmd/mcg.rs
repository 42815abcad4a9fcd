//! Commands of multicast groups: ATTACH_TO_MCG and DETACH_FROM_MCG.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::qpc::attach_to_mcg_in;

use crate::command_error::{CommandError, refuse};
use crate::device::Device;

const MAX_GROUPS: usize = 1024;
const MAX_MEMBERS: usize = 32;

fn arguments(input: &[u8]) -> (u32, [u8; 16]) {
    let input = Bits::<attach_to_mcg_in, _>::new(input);
    let mut gid = [0; 16];
    let bytes = input.span(attach_to_mcg_in::multicast_gid);
    gid[..bytes.len()].copy_from_slice(bytes);
    (input.get32(attach_to_mcg_in::qpn), gid)
}

pub(crate) fn attach_to_mcg(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let (qpn, gid) = arguments(input);
    device.objects.qps.owned_mut(uid, qpn)?;
    let groups = &mut device.objects.multicast_groups.members;
    if groups.len() >= MAX_GROUPS && !groups.contains_key(&gid) {
        return refuse!(LimitExceeded, "{MAX_GROUPS} multicast groups exist already, the limit");
    }
    let group = groups.entry(gid).or_default();
    if group.len() >= MAX_MEMBERS && !group.contains(&qpn) {
        return refuse!(
            LimitExceeded,
            "the multicast group already has {MAX_MEMBERS} members, the limit"
        );
    }
    if group.insert(qpn) {
        device.objects.qps.hold(qpn)?;
    }
    Ok(vec![])
}

pub(crate) fn detach_from_mcg(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let (qpn, gid) = arguments(input);
    device.objects.qps.owned_mut(uid, qpn)?;
    let groups = &mut device.objects.multicast_groups.members;
    let left = groups.get_mut(&gid).is_some_and(|group| group.remove(&qpn));
    if !left {
        return refuse!(BadParam, "QP {qpn:#x} is not a member of the multicast group");
    }
    groups.retain(|_, group| !group.is_empty());
    device.objects.qps.release(qpn);
    Ok(vec![])
}
