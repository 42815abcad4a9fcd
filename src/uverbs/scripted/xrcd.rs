//! XRC domains of a scripted kernel, by the inode of a file.

use super::attrs::{self, Responses};
use super::state::{Result, ScriptedObject, State};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use uverbs_uapi::device::{UVERBS_ATTR_CORE_IN, UVERBS_ATTR_CORE_OUT};
use uverbs_uapi::object::{UVERBS_OBJECT_QP, UVERBS_OBJECT_XRCD};
use uverbs_uapi::qp::{self, ib_uverbs_create_qp_resp, ib_uverbs_open_qp};
use uverbs_uapi::xrcd::{ib_uverbs_open_xrcd, ib_uverbs_open_xrcd_resp};

impl State {
    pub(super) fn open_xrcd(&mut self, to: &mut Responses<'_, '_>) -> Result<()> {
        if !self.deviations.has_xrc {
            return Err(Errno::OPNOTSUPP);
        }
        let request: ib_uverbs_open_xrcd = attrs::input(to.command, UVERBS_ATTR_CORE_IN)?;
        let flags = OFlags::from_bits_retain(request.oflags);
        let inode = match request.fd as i32 {
            -1 => None,
            fd => Some(inode(fd)?),
        };
        let there = self
            .objects
            .values()
            .find(|other| {
                other.object == UVERBS_OBJECT_XRCD && inode.is_some() && other.inode == inode
            })
            .map(|other| other.number);
        if inode.is_some() {
            if there.is_none() && !flags.contains(OFlags::CREATE) {
                return Err(Errno::AGAIN);
            }
            if there.is_some() && flags.contains(OFlags::EXCL) {
                return Err(Errno::INVAL);
            }
        }
        let domain = ScriptedObject { object: UVERBS_OBJECT_XRCD, inode, ..Default::default() };
        let xrcd_handle = self.add(domain);
        // Domains count as their first opening does.
        self.object(xrcd_handle).number = there.unwrap_or(xrcd_handle);
        to.put(UVERBS_ATTR_CORE_OUT, &ib_uverbs_open_xrcd_resp { xrcd_handle });
        Ok(())
    }

    /// Opens a target of a domain again, also through another handle of the domain.
    pub(super) fn open_qp(&mut self, to: &mut Responses<'_, '_>) -> Result<()> {
        let request: ib_uverbs_open_qp = attrs::input(to.command, UVERBS_ATTR_CORE_IN)?;
        let domain = self.expect("open_qp", request.pd_handle, UVERBS_OBJECT_XRCD)?;
        let number = self.object(domain).number;
        let target = self.objects.values().find(|qp| {
            qp.number == request.qpn
                && self.xrc_domain(qp).is_some_and(|domain| domain.number == number)
        });
        let is_target =
            u32::from(request.qp_type) == qp::ib_uverbs_qp_type::IB_UVERBS_QPT_XRC_TGT.0;
        let target = target.filter(|_| is_target).ok_or(Errno::INVAL)?;
        let (qpn, opened) =
            (target.number, ScriptedObject { stands_on: vec![domain], ..target.clone() });
        let qp_handle = self.add(opened);
        let resp = ib_uverbs_create_qp_resp { qp_handle, qpn, ..Default::default() };
        to.put(UVERBS_ATTR_CORE_OUT, &resp);
        Ok(())
    }

    /// The domain of an object that is an XRC target.
    fn xrc_domain(&self, object: &ScriptedObject) -> Option<&ScriptedObject> {
        let [domain] = object.stands_on[..] else { return None };
        let domain = self.objects.get(&domain)?;
        let is_target = object.object == UVERBS_OBJECT_QP && domain.object == UVERBS_OBJECT_XRCD;
        is_target.then_some(domain)
    }

    /// The state of a queue pair; a target has one, however often it is open.
    pub(super) fn change_state(&mut self, handle: u32, state: u8) {
        let number = self.object(handle).number;
        let is_target = self.objects.get(&handle).and_then(|qp| self.xrc_domain(qp)).is_some();
        for (other, object) in &mut self.objects {
            let same = is_target && object.object == UVERBS_OBJECT_QP && object.number == number;
            if *other == handle || same {
                object.state = state;
            }
        }
    }
}

/// The inode of a descriptor. The kernel refuses one that was opened with `O_PATH`.
fn inode(fd: i32) -> Result<(u64, u64)> {
    let metadata = std::fs::metadata(format!("/proc/self/fd/{fd}")).map_err(|_| Errno::BADF)?;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}"));
    let flags = info.ok().and_then(|info| {
        let line = info.lines().find_map(|line| line.strip_prefix("flags:"))?.trim().to_owned();
        u32::from_str_radix(&line, 8).ok()
    });
    match flags {
        Some(flags) if flags & OFlags::PATH.bits() == 0 => Ok((metadata.dev(), metadata.ino())),
        _ => Err(Errno::BADF),
    }
}
