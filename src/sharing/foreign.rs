//! Objects of other processes that cannot be used here, only looked at, and destroyed by whoever
//! vouches for it: their queues are mapped in the process that made them and nowhere else.
//!
//! Pairs with the DESTROY methods and the QUERY commands of `core/uverbs_cmd.c`, which take a handle
//! from whoever has the file.

use crate::context::Context;
use crate::cq::CompletionQueue;
use crate::error::{Error, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::mr::MemoryRegion;
use crate::object::{Class, Object};
use crate::pd::ProtectionDomain;
use crate::qp::{QpControl, QpInfo};
use crate::sharing::envelope::Envelope;
use crate::srq::{SharedReceiveQueue, SrqAttr};
use crate::xrcd::XrcDomain;
use std::fmt;
use std::sync::Arc;

/// A queue, queue pair, XRC domain or other object that somebody else made on this context's kernel
/// file, known by its handle alone.
///
/// This is for those who clean up after a process that is gone while others keep its file open, or
/// who watch over what their children do. Looking is harmless; [destroying](Self::destroy) is
/// `unsafe`, because nobody tells an owner who is still there. rdma-core cannot do this.
///
/// Dropping it does nothing.
pub struct ForeignObject {
    file: Arc<File>,
    class: Class,
    kind: ObjectKind,
    handle: u32,
}

/// How objects of a kind are destroyed, if they can be named from outside.
fn class(kind: ObjectKind) -> Option<Class> {
    Some(match kind {
        ObjectKind::CQ => Class::CQ,
        ObjectKind::QP => Class::QP,
        ObjectKind::SRQ => Class::SRQ,
        ObjectKind::AH => Class::AH,
        ObjectKind::MW => Class::MW,
        ObjectKind::MR => Class::MR,
        ObjectKind::PD => Class::PD,
        ObjectKind::XRCD => Class::XRCD,
        ObjectKind::MLX5_UAR => Class::UAR,
        ObjectKind::MLX5_VAR => Class::VAR,
        _ => return None,
    })
}

impl Context {
    /// Finds an object that another process exported.
    ///
    /// A memory region is compared with what was exported, and so is a protection domain where the
    /// driver numbers them, as mlx5's does. Of all others the kernel tells only that an object of this
    /// kind has the handle: if the exported one was destroyed, it may be another.
    ///
    /// # Errors
    ///
    /// `EXDEV` for an envelope of another device or context, `ENOENT` if there is no such object,
    /// `ESTALE` if it is another one, `EOPNOTSUPP` for a kind that has no handles of its own.
    pub fn foreign(&self, envelope: &Envelope) -> Result<ForeignObject> {
        const VERB: &str = "find_foreign";
        let (handle, told) = envelope.open(VERB, &self.file, envelope.kind())?;
        let found = self.find_foreign(VERB, envelope.kind(), handle)?;
        match found.kind {
            ObjectKind::MR => MemoryRegion::compare(&self.file, VERB, handle, told)?,
            ObjectKind::PD => ProtectionDomain::compare(&self.file, VERB, handle, told)?,
            _ => {}
        }
        Ok(found)
    }

    /// Finds an object by its bare handle, one that [`handles`](Self::handles) listed for example.
    ///
    /// # Safety
    ///
    /// The caller knows whose object it is: a bare handle says nothing of which object was meant,
    /// and whoever destroys it later relies on this one's being the right one.
    ///
    /// # Errors
    ///
    /// `ENOENT` if there is no such object, `EOPNOTSUPP` for a kind that has no handles of its own.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn foreign_raw(&self, kind: ObjectKind, handle: u32) -> Result<ForeignObject> {
        self.find_foreign("find_foreign", kind, handle)
    }

    fn find_foreign(
        &self,
        verb: &'static str,
        kind: ObjectKind,
        handle: u32,
    ) -> Result<ForeignObject> {
        let class = class(kind).ok_or_else(|| {
            Error::new(verb, rustix::io::Errno::OPNOTSUPP)
                .detail(format!("{kind} {handle} cannot be destroyed by its handle"))
        })?;
        self.file.require(verb, kind, handle)?;
        Ok(ForeignObject { file: self.file.clone(), class, kind, handle })
    }
}

impl ForeignObject {
    /// The kind of object.
    pub fn kind(&self) -> ObjectKind {
        self.kind
    }

    /// The number by which the kernel knows it within the file.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// What the kernel knows of a queue pair. What it [was granted](QpInfo::caps) counts in the driver's
    /// units: on mlx5 sends are blocks of 64 bytes.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an object of another kind, `ENOENT` or `EINVAL` if it is gone.
    pub fn query_qp(&self) -> Result<QpInfo> {
        const VERB: &str = "query_qp";
        self.check_kind(VERB, ObjectKind::QP)?;
        QpInfo::query(&self.file, VERB, self.handle, None)
    }

    /// What the kernel knows of a shared receive queue.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an object of another kind, `ENOENT` or `EINVAL` if it is gone.
    pub fn query_srq(&self) -> Result<SrqAttr> {
        const VERB: &str = "query_srq";
        self.check_kind(VERB, ObjectKind::SRQ)?;
        SrqAttr::query(&self.file, VERB, self.handle)
    }

    /// Destroys the object, for everybody who has the file.
    ///
    /// # Safety
    ///
    /// Nobody acts as the object's owner any more, neither in another process nor in another context
    /// of this one: whoever made it ended, or drops it before anything else is made on the file. Of a
    /// memory region moreover no memory window is left that was bound to it: destroy that first.
    ///
    /// The kernel gives the handle to the next object of the file, and an owner who is left takes
    /// that for its own: it changes what peers may do with memory that is somebody's slice, or
    /// restarts a queue pair whose buffers are another's.
    ///
    /// # Errors
    ///
    /// `ENOENT` if it is gone already, `EBUSY` while something else depends on it; it comes back
    /// with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn destroy(self) -> std::result::Result<(), (Self, Error)> {
        let mut object = Object::imported(self.file.clone(), self.class, self.handle, ());
        match object.destroy_existing() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    fn check_kind(&self, verb: &'static str, kind: ObjectKind) -> Result<()> {
        if self.kind == kind {
            return Ok(());
        }
        Err(Error::invalid(
            verb,
            format!("handle {} is of kind {}, not {kind}", self.handle, self.kind),
        ))
    }
}

impl fmt::Debug for ForeignObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignObject")
            .field("device", &self.file.device.name())
            .field("kind", &self.kind)
            .field("handle", &self.handle)
            .finish()
    }
}

/// Seals an object of which the kernel tells nothing that could be compared.
fn seal(file: &File, verb: &'static str, kind: ObjectKind, handle: u32) -> Result<Envelope> {
    file.check_fork(verb)?;
    Ok(Envelope::seal(file, kind, handle, [0; 4]))
}

impl QpControl {
    /// The exported form, for [`Context::foreign`]: others can query and destroy the queue pair, not
    /// post to it.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.qp.file(), "export_qp", ObjectKind::QP, self.handle())
    }
}

impl CompletionQueue {
    /// The exported form, for [`Context::foreign`]: others can destroy the queue, not poll it.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.inner.file(), "export_cq", ObjectKind::CQ, self.handle())
    }
}

impl SharedReceiveQueue {
    /// The exported form, for [`Context::foreign`]: others can query and destroy the queue, not post
    /// to it.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.inner.file(), "export_srq", ObjectKind::SRQ, self.handle())
    }
}

impl XrcDomain {
    /// The exported form, for [`Context::foreign`]: others who have this context's file can close the
    /// opening. To share the domain itself, open it with a [file](crate::XrcDomainOptions::file).
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that opened it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.inner.file(), "export_xrcd", ObjectKind::XRCD, self.handle())
    }
}
