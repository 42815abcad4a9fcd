//! Multicast groups of datagram queue pairs. Pairs with `ib_uverbs_attach_mcast` in
//! `core/uverbs_cmd.c`.

use super::{QpControl, QpInner, QpType};
use crate::error::{Error, ErrorWith, Result};
use crate::number::Gid;
use crate::sync::lock::Lock;
use crate::uverbs::invoke_write::write;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;
use uverbs_uapi::mcast::{ib_uverbs_attach_mcast, ib_uverbs_detach_mcast};
use uverbs_uapi::write::{IB_USER_VERBS_CMD_ATTACH_MCAST, IB_USER_VERBS_CMD_DETACH_MCAST};

/// The groups that a queue pair is in. The kernel counts a second attachment to the same group
/// as the first, so that the first detachment would end both.
#[derive(Debug, Default)]
pub(crate) struct Groups(Lock<Vec<(Gid, u16)>>);

/// Membership of a queue pair in a multicast group; it ends when this is dropped.
///
/// The kernel does not destroy a queue pair that is in a group. When the program drops all parts of the queue
/// pair before the membership, the queue pair is [reset](crate::QueuePair::destroy) and receives nothing; it is
/// destroyed with the membership. Use it from any thread.
///
/// ```no_run
/// # fn f(qp: &uverbs::QpControl, group: uverbs::Gid) -> Result<(), Box<dyn std::error::Error>> {
/// let membership = qp.attach_mcast(group, 0)?;
/// // Receives on `qp` now take the group's datagrams, too.
/// membership.detach()?;
/// # Ok(()) }
/// ```
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair, group: uverbs::Gid) -> uverbs::Result<()> {
/// let member: uverbs::McastMembership = qp.attach_mcast(group, 0)?;
/// println!("the queue pair receives datagrams to {}, LID {}", member.gid(), member.lid());
/// member.detach()?;
/// # Ok(()) }
/// ```
#[must_use = "the membership ends when this is dropped"]
pub struct McastMembership {
    qp: Arc<QpInner>,
    gid: Gid,
    lid: u16,
    attached: bool,
}

impl QpControl {
    /// Receives datagrams that are sent to a multicast group, too.
    ///
    /// `gid` is the group: an IPv6 multicast address, or an IPv4 one mapped. `lid` is its local
    /// identifier on InfiniBand, from `0xc000`, and ignored on Ethernet. Joining the group in the
    /// fabric (by a subnet manager, IGMP or MLD) is not part of this; senders address queue pair
    /// number `0xffffff`.
    ///
    /// # Errors
    ///
    /// `EINVAL` unless the queue pair is of type `UD` and `gid` is a multicast address, `EEXIST`
    /// if the queue pair is in that group, `ENOMEM` at the device's limits (`max_mcast_grp`,
    /// `max_mcast_qp_attach`), `EOPNOTSUPP` on devices without multicast.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&self, gid: Gid, lid: u16) -> Result<McastMembership> {
        const VERB: &str = "attach_mcast";
        self.qp.file().check_fork(VERB)?;
        if self.qp_type() != QpType::UD {
            let detail = format!("a queue pair of type {}; only UD has groups", self.qp_type());
            return Err(Error::invalid(VERB, detail));
        }
        if !gid.ip().is_multicast() {
            return Err(Error::invalid(VERB, format!("{gid} is not a multicast address")));
        }
        let mut groups = self.qp.groups.0.lock().ok_or_else(|| Error::forked(VERB))?;
        if groups.contains(&(gid, lid)) {
            let detail = format!("the queue pair is in group {gid} with lid {lid:#x} already");
            return Err(Error::new(VERB, Errno::EXIST).detail(detail));
        }
        let request = ib_uverbs_attach_mcast {
            gid: gid.0,
            qp_handle: self.handle(),
            mlid: lid,
            ..Default::default()
        };
        self.qp
            .file()
            .execute(VERB, &mut write(IB_USER_VERBS_CMD_ATTACH_MCAST, &request))
            .map_err(|error| match error.errno() {
                Errno::INVAL => error.detail(format!(
                    "group {gid}, lid {lid:#x}: InfiniBand has multicast lids 0xc000 to 0xfffe"
                )),
                Errno::NOMEM => error.detail(
                    "no memory, or more groups or members than query_device says the device has",
                ),
                _ => error.context(|| format!("group {gid}, lid {lid:#x}")),
            })?;
        groups.push((gid, lid));
        drop(groups);
        Ok(McastMembership { qp: self.qp.inner().clone(), gid, lid, attached: true })
    }
}

impl McastMembership {
    /// The group.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// The group's local identifier; 0 on Ethernet.
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// Ends the membership, and returns an error if that fails; dropping it does the same silently.
    ///
    /// # Errors
    ///
    /// Those of the kernel; the membership comes back with the error.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach(mut self) -> std::result::Result<(), ErrorWith<Self>> {
        match self.leave() {
            Ok(()) => Ok(()),
            Err(error) => Err(error.with(self)),
        }
    }

    fn leave(&mut self) -> Result<()> {
        const VERB: &str = "detach_mcast";
        if !self.attached {
            return Ok(());
        }
        let file = self.qp.file();
        file.check_fork(VERB)?;
        let request = ib_uverbs_detach_mcast {
            gid: self.gid.0,
            qp_handle: self.qp.object.handle(),
            mlid: self.lid,
            ..Default::default()
        };
        let mut groups = self.qp.groups.0.lock().ok_or_else(|| Error::forked(VERB))?;
        match file.kernel.execute(&mut write(IB_USER_VERBS_CMD_DETACH_MCAST, &request)) {
            // ENOENT: another process that has the file destroyed the queue pair. EIO: the device is gone.
            Ok(()) | Err(Errno::NOENT | Errno::IO) => {}
            Err(errno) => return Err(Error::from_kernel(VERB, errno)),
        }
        groups.retain(|group| *group != (self.gid, self.lid));
        self.attached = false;
        Ok(())
    }
}

impl Drop for McastMembership {
    fn drop(&mut self) {
        // If the kernel refuses, it refuses to destroy the queue pair as well, which is counted.
        let _ = self.leave();
    }
}

impl fmt::Debug for McastMembership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("McastMembership")
            .field("qpn", &self.qp.qpn)
            .field("gid", &self.gid)
            .field("lid", &self.lid)
            .finish()
    }
}
