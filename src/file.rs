//! What all objects of one context share: the kernel's file, its driver, its bookkeeping.
//!
//! Every object holds an `Arc` of this, so the file is closed when the last of them is gone,
//! whatever the order.

use crate::device::Device;
use crate::device_attr::DeviceAttr;
use crate::error::{Error, Result};
use crate::events::file::EventFile;
use crate::events::keys::{Keys, Kind, Registration};
use crate::memory::fork::Epoch;
use crate::memory::lock::Lock;
use crate::port::LinkLayers;
use crate::provider::Provider;
use crate::provider::driver_response::DriverResponse;
use crate::uverbs::command::Command;
use crate::uverbs::invoke_write::write_ex;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use uverbs_uapi::context::ib_uverbs_core_support;
use uverbs_uapi::device::{
    UVERBS_METHOD_QUERY_GID_TABLE, ib_uverbs_ex_query_device, ib_uverbs_ex_query_device_resp,
};
use uverbs_uapi::gid::{
    UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES,
    UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, ib_uverbs_gid_entry,
};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;
use uverbs_uapi::write::IB_USER_VERBS_EX_CMD_QUERY_DEVICE;
use zerocopy::{FromZeros, IntoBytes};

/// How long the objects of a file wait for the kernel to destroy them while it takes the device away:
/// all of them together, from when the first is dropped.
const FAREWELL: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5000 });

#[derive(Debug)]
pub(crate) struct File {
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) device: Device,
    pub(crate) provider: Provider,
    pub(crate) epoch: Epoch,
    pub(crate) events: EventFile,
    pub(crate) keys: Arc<Keys>,
    /// Names the kernel's file among all: what is exported says where it belongs. 0 if it was
    /// imported from somebody who did not tell.
    pub(crate) origin: u64,
    pub(crate) completion_vectors: u32,
    /// Whether the kernel ignores optional access flags that it does not know.
    pub(crate) optional_access: bool,
    pub(crate) leaked: AtomicU64,
    pub(crate) dead_events: AtomicU64,
    /// Whether somebody was told that the device is gone.
    pub(crate) fatal: AtomicBool,
    /// Until when objects wait that the kernel is about to destroy; set by the first that does.
    farewell: Lock<Option<Instant>>,
    /// What carries the device's ports.
    pub(crate) links: LinkLayers,
    /// Whether the kernel's file has holders besides this context, as far as is known here: it came from
    /// one, was handed out, or has mappings of the program's. A forked child is one, too, that nobody
    /// tells of: what would go with the file goes when the child's goes.
    pub(crate) shared: AtomicBool,
}

/// What is true of a kernel file, whichever process has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) origin: u64,
    pub(crate) completion_vectors: u32,
    pub(crate) optional_access: bool,
}

impl Facts {
    /// From what the kernel told of the context.
    pub(crate) fn new(origin: u64, completion_vectors: u32, core_support: u64) -> Facts {
        let support = ib_uverbs_core_support::from_bits_retain(core_support);
        let optional_access =
            support.contains(ib_uverbs_core_support::IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS);
        Facts { origin, completion_vectors, optional_access }
    }
}

impl File {
    pub(crate) fn new(
        kernel: Box<dyn Kernel>,
        device: Device,
        provider: Provider,
        epoch: Epoch,
        keys: Arc<Keys>,
        events: EventFile,
        facts: Facts,
    ) -> File {
        File {
            kernel,
            device,
            provider,
            epoch,
            events,
            keys,
            origin: facts.origin,
            completion_vectors: facts.completion_vectors,
            optional_access: facts.optional_access,
            leaked: AtomicU64::new(0),
            dead_events: AtomicU64::new(0),
            fatal: AtomicBool::new(false),
            farewell: Lock::default(),
            links: LinkLayers::default(),
            shared: AtomicBool::new(false),
        }
    }

    pub(crate) fn facts(&self) -> Facts {
        Facts {
            origin: self.origin,
            completion_vectors: self.completion_vectors,
            optional_access: self.optional_access,
        }
    }

    /// Runs a command on behalf of `verb`; refuses in a forked child.
    pub(crate) fn execute(&self, verb: &'static str, command: &mut Command<'_>) -> Result<()> {
        self.check_fork(verb)?;
        self.kernel.execute(command).map_err(|errno| Error::from_kernel(verb, errno))
    }

    pub(crate) fn check_fork(&self, verb: &'static str) -> Result<()> {
        if self.epoch.is_over() { Err(Error::forked(verb)) } else { Ok(()) }
    }

    /// Refuses two objects of different kernel files: a handle of one is a number that means
    /// something else in the other.
    pub(crate) fn check_same(
        self: &Arc<Self>,
        verb: &'static str,
        what: &'static str,
        other: &Arc<Self>,
    ) -> Result<()> {
        self.check_fork(verb)?;
        if Arc::ptr_eq(self, other) {
            return Ok(());
        }
        Err(Error::invalid(
            verb,
            format!(
                "the {what} belongs to another context (of device {}) than the rest (of device {})",
                other.device.name(),
                self.device.name()
            ),
        ))
    }

    pub(crate) fn register(&self, verb: &'static str, kind: Kind) -> Result<Registration> {
        self.check_fork(verb)?;
        self.keys.register(kind).ok_or_else(|| {
            Error::new(verb, Errno::NFILE).detail("2^24 objects of this context are alive")
        })
    }

    /// Whether the kernel took the device away from this file. A question about the device that its
    /// driver has no part in fails for no other reason with `EIO`; whether the room for the answer
    /// suffices does not matter.
    pub(crate) fn is_disassociated(&self) -> bool {
        let mut count = 0u64;
        let mut entry = [ib_uverbs_gid_entry::default(); 1];
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE)
            .u64(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, size_of::<ib_uverbs_gid_entry>() as u64)
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, &mut entry)
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &mut count);
        self.kernel.execute(&mut command) == Err(Errno::IO)
    }

    /// Until when to wait for the kernel to destroy what it takes away with the device.
    pub(crate) fn farewell(&self) -> Instant {
        // A forked child destroys nothing, and waits for nothing.
        let Some(mut farewell) = self.farewell.lock() else { return Instant::now() };
        *farewell.get_or_insert_with(|| Instant::now() + FAREWELL)
    }

    /// Limits and capabilities of the device, and what its driver says beside them.
    pub(crate) fn query_device(&self, verb: &'static str) -> Result<(DeviceAttr, DriverResponse)> {
        let mut resp = ib_uverbs_ex_query_device_resp::new_zeroed();
        let mut answer = self.provider.device_answer();
        let request = ib_uverbs_ex_query_device::default();
        let mut command = write_ex(IB_USER_VERBS_EX_CMD_QUERY_DEVICE, &request)
            .answer(&mut resp)
            .driver(&[], answer.as_mut());
        self.execute(verb, &mut command)?;
        drop(command);
        Ok((DeviceAttr::new(&resp), answer))
    }

    /// The device's limits, to say in an error; `None` if it does not tell them either.
    pub(crate) fn limits(&self) -> Option<DeviceAttr> {
        self.query_device("query_device").ok().map(|(attr, _)| attr)
    }

    /// Takes note that something else keeps the kernel's file open from now on.
    pub(crate) fn share(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    pub(crate) fn count_leak(&self) {
        self.leaked.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // What others keep open the kernel does not clean up. In a child, what is the provider's is the
        // parent's. A queue that could not be destroyed may still be rung by whoever got its register
        // next.
        let shared = *self.shared.get_mut();
        if shared && !self.epoch.is_over() && *self.leaked.get_mut() == 0 {
            self.provider.close(&*self.kernel);
        }
    }
}

/// Numbers that nobody else has drawn: the name of a kernel file, the secret of its keys. The kernel is
/// asked, for children of one process inherit the state of any generator in memory.
pub(crate) fn random<const N: usize>() -> [u64; N] {
    let mut numbers = [0; N];
    let bytes = numbers.as_mut_bytes();
    let length = bytes.len();
    match rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(filled) if filled == length => {}
        _ => numbers.fill_with(|| RandomState::new().build_hasher().finish()),
    }
    numbers
}
