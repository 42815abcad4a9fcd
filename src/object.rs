//! A kernel object and the memory that it lets a device reach, with one rule for both: the memory
//! is released only after the kernel confirmed that the object is gone.
//!
//! Pairs with the DESTROY methods of `rdma_user_ioctl_cmds.h`.

use crate::error::{Error, ErrorWith, Result};
use crate::file::File;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use uverbs_uapi as uapi;

/// The pause between two attempts while the kernel disassociates the file.
const PAUSE: Duration = Duration::from_millis(1);

/// The kinds of kernel objects: their ids in the kernel's ABI, and their DESTROY methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) verb: &'static str,
    pub(crate) object: u16,
    pub(crate) destroy: u16,
    /// The id of the attribute that names the handle to destroy.
    pub(crate) handle: u16,
    /// The id of a mandatory output of DESTROY and its size in bytes, where there is one.
    pub(crate) report: Option<(u16, u8)>,
}

/// The bits of an object's id that name its owner: 0 is the core, all else a driver.
const NAMESPACE: u16 = 0xf000;

impl Class {
    fn is_of_driver(&self) -> bool {
        self.object & NAMESPACE != 0
    }

    pub(crate) const PD: Class = Class {
        verb: "dealloc_pd",
        object: uapi::object::UVERBS_OBJECT_PD,
        destroy: uapi::pd::UVERBS_METHOD_PD_DESTROY,
        handle: uapi::pd::UVERBS_ATTR_DESTROY_PD_HANDLE,
        report: None,
    };
    pub(crate) const CQ: Class = Class {
        verb: "destroy_cq",
        object: uapi::object::UVERBS_OBJECT_CQ,
        destroy: uapi::cq::UVERBS_METHOD_CQ_DESTROY,
        handle: uapi::cq::UVERBS_ATTR_DESTROY_CQ_HANDLE,
        report: Some((uapi::cq::UVERBS_ATTR_DESTROY_CQ_RESP, 8)),
    };
    pub(crate) const QP: Class = Class {
        verb: "destroy_qp",
        object: uapi::object::UVERBS_OBJECT_QP,
        destroy: uapi::qp::UVERBS_METHOD_QP_DESTROY,
        handle: uapi::qp::UVERBS_ATTR_DESTROY_QP_HANDLE,
        report: Some((uapi::qp::UVERBS_ATTR_DESTROY_QP_RESP, 4)),
    };
    pub(crate) const SRQ: Class = Class {
        verb: "destroy_srq",
        object: uapi::object::UVERBS_OBJECT_SRQ,
        destroy: uapi::srq::UVERBS_METHOD_SRQ_DESTROY,
        handle: uapi::srq::UVERBS_ATTR_DESTROY_SRQ_HANDLE,
        report: Some((uapi::srq::UVERBS_ATTR_DESTROY_SRQ_RESP, 4)),
    };
    pub(crate) const MR: Class = Class {
        verb: "dereg_mr",
        object: uapi::object::UVERBS_OBJECT_MR,
        destroy: uapi::mr::UVERBS_METHOD_MR_DESTROY,
        handle: uapi::mr::UVERBS_ATTR_DESTROY_MR_HANDLE,
        report: None,
    };
    pub(crate) const MW: Class = Class {
        verb: "dealloc_mw",
        object: uapi::object::UVERBS_OBJECT_MW,
        destroy: uapi::mw::UVERBS_METHOD_MW_DESTROY,
        handle: uapi::mw::UVERBS_ATTR_DESTROY_MW_HANDLE,
        report: None,
    };
    pub(crate) const XRCD: Class = Class {
        verb: "close_xrcd",
        object: uapi::object::UVERBS_OBJECT_XRCD,
        destroy: uapi::xrcd::UVERBS_METHOD_XRCD_DESTROY,
        handle: uapi::xrcd::UVERBS_ATTR_DESTROY_XRCD_HANDLE,
        report: None,
    };
    pub(crate) const FLOW: Class = Class {
        verb: "destroy_flow",
        object: uapi::object::UVERBS_OBJECT_FLOW,
        destroy: uapi::flow::UVERBS_METHOD_FLOW_DESTROY,
        handle: uapi::flow::UVERBS_ATTR_DESTROY_FLOW_HANDLE,
        report: None,
    };
    pub(crate) const AH: Class = Class {
        verb: "destroy_ah",
        object: uapi::object::UVERBS_OBJECT_AH,
        destroy: uapi::ah::UVERBS_METHOD_AH_DESTROY,
        handle: uapi::ah::UVERBS_ATTR_DESTROY_AH_HANDLE,
        report: None,
    };
}

/// A kernel object together with the memory `M` that a device may reach through it.
///
/// Dropping it destroys the object. If the kernel refuses, or if this process is a fork of the one that made the
/// object, the memory is leaked instead of freed. An object of another owner is never destroyed here.
#[derive(Debug)]
pub(crate) struct Object<M = ()> {
    file: Arc<File>,
    class: Class,
    handle: u32,
    /// `false` once the kernel confirmed that the object is gone.
    alive: AtomicBool,
    /// Whether this process has to destroy it.
    owned: AtomicBool,
    /// `Some` until dropped.
    memory: Option<M>,
}

impl<M> Object<M> {
    pub(crate) fn new(file: Arc<File>, class: Class, handle: u32, memory: M) -> Self {
        let mut object = Object::without_memory(file, class, handle);
        object.memory = Some(memory);
        object
    }

    /// An object through which the device reaches no memory of this process.
    pub(crate) fn without_memory(file: Arc<File>, class: Class, handle: u32) -> Self {
        let (alive, owned) = (AtomicBool::new(true), AtomicBool::new(true));
        Object { file, class, handle, alive, owned, memory: None }
    }

    /// An object that another process made on the same file, and will destroy.
    pub(crate) fn imported(file: Arc<File>, class: Class, handle: u32, memory: M) -> Self {
        let object = Object::new(file, class, handle, memory);
        object.set_owned(false);
        object
    }

    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }

    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }

    pub(crate) fn memory(&self) -> Option<&M> {
        self.memory.as_ref()
    }

    pub(crate) fn memory_mut(&mut self) -> Option<&mut M> {
        self.memory.as_mut()
    }

    /// Sets whether this process destroys the object, or another one. The memory is dropped with this
    /// struct in either case; see [`give_away`](Self::give_away).
    pub(crate) fn set_owned(&self, owned: bool) {
        self.owned.store(owned, Ordering::Relaxed);
    }

    /// Gives the object to another process, and returns its memory. The device may reach the memory until the
    /// new owner has destroyed the object, which this process does not learn.
    pub(crate) fn give_away(mut self) -> Option<M> {
        self.set_owned(false);
        self.memory.take()
    }

    /// Whether the kernel confirmed that the object is gone.
    pub(crate) fn is_gone(&self) -> bool {
        !self.alive.load(Ordering::Relaxed)
    }

    /// The same object with other memory, after the kernel exchanged the memory behind it.
    pub(crate) fn exchange<N>(mut self, memory: N) -> (Object<N>, Option<M>) {
        let object = Object::new(self.file.clone(), self.class, self.handle, memory);
        // The kernel's object belongs to `object` now; dropping `self` must not destroy it.
        *self.alive.get_mut() = false;
        (object, self.memory.take())
    }

    /// Takes the memory out, once the kernel confirmed that the object is gone.
    pub(crate) fn reclaim(&mut self) -> Option<M> {
        if self.is_gone() { self.memory.take() } else { None }
    }

    /// Gives up on an object that the kernel refuses to destroy: leaks its memory, and counts it.
    pub(crate) fn abandon(&mut self) {
        if std::mem::take(self.alive.get_mut()) {
            std::mem::forget(self.memory.take());
            self.file.count_leak();
        }
    }

    /// Destroys the object now. After an error it is as it was, and may be tried again.
    pub(crate) fn destroy(&mut self) -> Result<()> {
        match self.destroy_existing() {
            // Another process that has the file destroyed it.
            Err(error) if error.errno() == Errno::NOENT => {
                *self.alive.get_mut() = false;
                Ok(())
            }
            other => other,
        }
    }

    /// As [`destroy`](Self::destroy), but an object that is gone already is an error.
    pub(crate) fn destroy_existing(&mut self) -> Result<()> {
        if self.is_gone() {
            return Ok(());
        }
        self.file.check_fork(self.class.verb)?;
        let mut destroyed = self.execute_destroy();
        // After EIO the kernel is either disassociating the file, or the firmware failed, and the device may
        // still reach the memory.
        if destroyed == Err(Errno::IO) && self.file.is_disassociated() {
            // The kernel removes the methods of drivers first. It never confirms that a driver's object is gone, which
            // does no harm unless the object has memory of this process.
            let keeps_memory = self.memory.is_some() && size_of::<M>() != 0;
            destroyed = match (self.class.is_of_driver(), keeps_memory) {
                (true, false) => Ok(()),
                (true, true) => destroyed,
                (false, _) => self.wait_for_disassociation(),
            };
        }
        destroyed.map_err(|errno| Error::from_kernel(self.class.verb, errno))?;
        self.alive.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Destroys an object of a file that the kernel disassociates. The kernel first fails every command with
    /// `EIO` and only then destroys the objects, so this tries again until the kernel confirms that the
    /// object is gone. All objects of a file share one deadline; after it each tries once.
    fn wait_for_disassociation(&self) -> std::result::Result<(), Errno> {
        let deadline = self.file.disassociate_deadline();
        loop {
            match self.execute_destroy() {
                Err(Errno::IO | Errno::BUSY) if Instant::now() < deadline => {
                    std::thread::sleep(PAUSE);
                }
                destroyed => return destroyed,
            }
        }
    }

    fn execute_destroy(&self) -> std::result::Result<(), Errno> {
        let mut report = [0u8; 8];
        let mut command = Command::new(self.class.object, self.class.destroy);
        command.destroy(self.class.handle, self.handle);
        if let Some((id, size)) = self.class.report {
            let bytes: &mut [u8] = &mut report[..usize::from(size)];
            command.output(id, bytes);
        }
        self.file.kernel.execute(&mut command)
    }

    /// Whether the file is disassociated and the kernel confirms that the object is gone. Other holders of
    /// the object see that, too; its memory stays until the last of them drops it.
    pub(crate) fn is_gone_with_its_device(&self) -> bool {
        if self.is_gone() {
            return true;
        }
        let gone = !self.file.epoch.is_over()
            && self.file.is_disassociated()
            && matches!(self.wait_for_disassociation(), Ok(()) | Err(Errno::NOENT));
        if gone {
            self.alive.store(false, Ordering::Relaxed);
        }
        gone
    }
}

impl<M> Drop for Object<M> {
    fn drop(&mut self) {
        if self.file.epoch.is_over() {
            std::mem::forget(self.memory.take());
        } else if *self.owned.get_mut() && self.destroy().is_err() {
            self.abandon();
        }
    }
}

/// Destroys `inner` if the caller is its only holder, else fails with `EBUSY` and names the `dependants`.
pub(crate) fn destroy_sole<T>(
    inner: Arc<T>,
    verb: &'static str,
    dependants: &'static str,
    destroy: impl FnOnce(&mut T) -> Result<()>,
) -> std::result::Result<(), ErrorWith<Arc<T>>> {
    match Arc::try_unwrap(inner) {
        Ok(mut sole) => match destroy(&mut sole) {
            Ok(()) => Ok(()),
            Err(error) => Err(error.with(Arc::new(sole))),
        },
        Err(shared) => Err(Error::new(verb, Errno::BUSY).detail(dependants).with(shared)),
    }
}
