//! XRC domains of a scripted kernel, by the inode of a file.

use super::attrs::{self, Responses};
use super::state::{Result, ScriptedObject, State};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use uverbs_uapi::device::{UVERBS_ATTR_CORE_IN, UVERBS_ATTR_CORE_OUT};
use uverbs_uapi::object::UVERBS_OBJECT_XRCD;
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
