//! Objects of other processes that can be queried and destroyed here, and not used: their queues are
//! mapped only in the process that made them.
//!
//! Pairs with the DESTROY methods and the QUERY commands of `core/uverbs_cmd.c`, which take any handle of
//! the file.

use crate::context::Context;
use crate::cq::CompletionQueue;
use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::handles::ObjectKind;
use crate::mr::MemoryRegion;
use crate::object::{Class, Object};
use crate::pd::ProtectionDomain;
use crate::qp::{QpControl, QpInfo};
use crate::sharing::envelope::Envelope;
use crate::srq::{SharedReceiveQueue, SrqAttr};
use crate::xrcd::XrcDomain;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;

/// A queue, queue pair, XRC domain or other object that another process made on this context's kernel
/// file, known by its handle alone.
///
/// It serves a program that cleans up after a process which ended while others keep its file open, or
/// that supervises its children. Queries are harmless; [destroying](Self::destroy) is `unsafe`, because an
/// owner that is still there does not learn of it. rdma-core has no such function.
///
/// Dropping it does nothing.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs::{ForeignObject, ObjectKind};
///
/// for handle in context.handles(ObjectKind::QP)? {
///     // SAFETY: the process whose queue pairs these are has ended.
///     let orphan: ForeignObject = unsafe { context.foreign_raw(ObjectKind::QP, handle)? };
///     println!("{} {}: {:?}", orphan.kind(), orphan.handle(), orphan.query_qp()?.state);
///     // SAFETY: nobody uses it any more.
///     unsafe { orphan.destroy()? };
/// }
/// # Ok(()) }
/// ```
///
/// A supervisor queries the objects whose envelopes a worker sent:
///
/// ```no_run
/// # fn f(context: &uverbs::Context, from_worker: &[uverbs::Envelope]) -> uverbs::Result<()> {
/// use uverbs::{ForeignObject, ObjectKind};
///
/// for envelope in from_worker {
///     let object: ForeignObject = context.foreign(envelope)?;
///     if object.kind() == ObjectKind::SRQ {
///         println!("a queue of {} receives", object.query_srq()?.max_wr);
///     }
/// }
/// # Ok(()) }
/// ```
pub struct ForeignObject {
    file: Arc<File>,
    class: Class,
    kind: ObjectKind,
    handle: u32,
}

/// The DESTROY method of a kind of object; `None` for a kind that has no handles of its own.
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
        ObjectKind::MLX5_DEVX_OBJ => Class::DEVX_OBJECT,
        ObjectKind::MLX5_DEVX_UMEM => Class::DEVX_UMEM,
        _ => return None,
    })
}

impl Context {
    /// Finds an object that another process exported.
    ///
    /// A memory region is compared with the exported one, and so is a protection domain where the driver
    /// tells its number, as mlx5's does. For other objects the kernel tells only that an object of this
    /// kind has the handle: if the exported object was destroyed, another one may have it.
    ///
    /// # Errors
    ///
    /// `EXDEV` for an envelope of another device or context, `ENOENT` if there is no such object,
    /// `ESTALE` if it is another one, `EOPNOTSUPP` for a kind that has no handles of its own.
    pub fn foreign(&self, envelope: &Envelope) -> Result<ForeignObject> {
        const VERB: &str = "find_foreign";
        let (handle, exported) = envelope.open(VERB, &self.file, envelope.kind())?;
        let found = self.find_foreign(VERB, envelope.kind(), handle)?;
        match found.kind {
            ObjectKind::MR => {
                MemoryRegion::compare_with_kernel(&self.file, VERB, handle, exported)?
            }
            ObjectKind::PD => {
                ProtectionDomain::compare_with_kernel(&self.file, VERB, handle, exported)?
            }
            _ => {}
        }
        Ok(found)
    }

    /// Finds an object by its bare handle, one that [`handles`](Self::handles) listed for example.
    ///
    /// # Safety
    ///
    /// The caller knows which object has the handle: the handle alone does not say it, and
    /// [`destroy`](ForeignObject::destroy) relies on it.
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

    /// Queries a queue pair. Its [capacities](QpInfo::caps) are in the driver's units: on mlx5 `max_send_wr`
    /// counts WQEBBs of 64 bytes.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an object of another kind, `ENOENT` or `EINVAL` if it is gone.
    pub fn query_qp(&self) -> Result<QpInfo> {
        const VERB: &str = "query_qp";
        self.check_kind(VERB, ObjectKind::QP)?;
        QpInfo::query(&self.file, VERB, self.handle, None)
    }

    /// Queries a shared receive queue.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an object of another kind, `ENOENT` or `EINVAL` if it is gone.
    pub fn query_srq(&self) -> Result<SrqAttr> {
        const VERB: &str = "query_srq";
        self.check_kind(VERB, ObjectKind::SRQ)?;
        SrqAttr::query(&self.file, VERB, self.handle)
    }

    /// Destroys the object, for all processes that have the file.
    ///
    /// # Safety
    ///
    /// No other process and no other context of this process acts as the object's owner any more: the
    /// process that made it ended, or drops it before anything else is made on the file. If it is a memory
    /// region, no memory window is left that was bound to it: destroy such a window first.
    ///
    /// The kernel gives the handle to the next object of the file, and a remaining owner treats that object
    /// as its own: it changes the rights of peers to memory that is borrowed as a slice, or restarts a queue
    /// pair whose buffers another process has.
    ///
    /// # Errors
    ///
    /// `ENOENT` if it is gone already, `EBUSY` while something else depends on it; it comes back
    /// with the error.
    #[allow(unsafe_code, reason = "the obligation is the caller's")]
    pub unsafe fn destroy(self) -> std::result::Result<(), ErrorWith<Self>> {
        let mut object = Object::imported(self.file.clone(), self.class, self.handle, ());
        match object.destroy_existing() {
            Ok(()) => Ok(()),
            Err(error) => {
                let remedy = match error.errno() {
                    // Of firmware, too: see `undestroyed` of `mlx5/devx/object.rs`.
                    Errno::BUSY | Errno::INVAL | Errno::REMOTEIO => {
                        ": destroy what depends on it first"
                    }
                    _ => "",
                };
                let error = error.context(|| format!("{} {}{remedy}", self.kind, self.handle));
                Err(error.with(self))
            }
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

/// Seals an object of a kind whose kernel response has no facts to compare.
fn seal(file: &File, verb: &'static str, kind: ObjectKind, handle: u32) -> Result<Envelope> {
    file.check_fork(verb)?;
    Ok(Envelope::seal(file, kind, handle, [0; 4]))
}

impl QpControl {
    /// The exported form, for [`Context::foreign`]: other processes can query and destroy the queue pair,
    /// not post to it.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.qp.file(), "export_qp", ObjectKind::QP, self.handle())
    }
}

impl CompletionQueue {
    /// The exported form, for [`Context::foreign`]: other processes can destroy the queue, not poll it.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.inner.file(), "export_cq", ObjectKind::CQ, self.handle())
    }
}

impl SharedReceiveQueue {
    /// The exported form, for [`Context::foreign`]: other processes can query and destroy the queue, not
    /// post to it.
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that has it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.inner.file(), "export_srq", ObjectKind::SRQ, self.handle())
    }
}

impl XrcDomain {
    /// The exported form, for [`Context::foreign`]: other processes that have this context's file can close
    /// this handle of the domain. To share the domain itself, open it with a [file](crate::XrcdBuilder::file).
    ///
    /// # Errors
    ///
    /// [`Error::is_forked`] in a child of the process that opened it.
    pub fn export(&self) -> Result<Envelope> {
        seal(self.inner.file(), "export_xrcd", ObjectKind::XRCD, self.handle())
    }
}
