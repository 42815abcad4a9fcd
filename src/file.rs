//! The state that all objects of one context share: the open uverbs file (the kernel's `ib_uverbs_file`),
//! the device, the provider, and counters.
//!
//! Every object holds an `Arc` of this, so the file is closed when the last object is dropped, in any order.

use crate::device::Device;
use crate::device_attr::DeviceAttr;
use crate::error::{Error, Result};
use crate::events::file::EventFile;
use crate::events::keys::{EventKey, EventSourceKind, Keys};
use crate::port::LinkLayers;
use crate::provider::Provider;
use crate::provider::driver_response::DriverResponse;
use crate::sync::fork::Epoch;
use crate::sync::lock::Lock;
use crate::uverbs::command::Command;
use crate::uverbs::fd;
use crate::uverbs::invoke_write::write_ex;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
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

/// The longest wait of a file's objects until the kernel has destroyed them while it disassociates the
/// file: for all together, counted from the first that is dropped.
const DISASSOCIATE_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5000 });

#[derive(Debug)]
pub(crate) struct File {
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) device: Device,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) epoch: Epoch,
    pub(crate) events: EventFile,
    pub(crate) keys: Arc<Keys>,
    /// A random number that identifies the kernel's file in every process that has it; envelopes carry it.
    /// 0 in an importer that got no envelope of the context.
    pub(crate) origin: u64,
    pub(crate) completion_vectors: u32,
    /// Whether the kernel ignores optional access flags that it does not know.
    pub(crate) optional_access: bool,
    pub(crate) leaked: AtomicU64,
    pub(crate) dead_events: AtomicU64,
    /// Whether a read of the event file has returned `DEVICE_FATAL` or that the device is gone.
    pub(crate) device_gone_reported: AtomicBool,
    /// When objects stop waiting for the kernel to destroy them; set by the first object that waits.
    disassociate_deadline: Lock<Option<Instant>>,
    /// The link layers of the device's ports.
    pub(crate) links: LinkLayers,
    /// Whether something besides this context may keep the kernel's file open: the context was imported or
    /// shared, or the program has mappings of the file. A forked child keeps it open, too, and does not set
    /// this: objects that the kernel destroys with the file then live until the child closes it.
    pub(crate) shared: AtomicBool,
}

/// Facts that every process with the same kernel file must agree on; an envelope of the context carries them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileFacts {
    pub(crate) origin: u64,
    pub(crate) completion_vectors: u32,
    pub(crate) optional_access: bool,
}

impl FileFacts {
    /// Reads the kernel's response to the creation or the query of a context.
    pub(crate) fn new(origin: u64, completion_vectors: u32, core_support: u64) -> FileFacts {
        let support = ib_uverbs_core_support::from_bits_retain(core_support);
        let optional_access =
            support.contains(ib_uverbs_core_support::IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS);
        FileFacts { origin, completion_vectors, optional_access }
    }
}

impl File {
    pub(crate) fn new(
        kernel: Box<dyn Kernel>,
        device: Device,
        provider: Arc<dyn Provider>,
        epoch: Epoch,
        keys: Arc<Keys>,
        events: EventFile,
        facts: FileFacts,
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
            device_gone_reported: AtomicBool::new(false),
            disassociate_deadline: Lock::default(),
            links: LinkLayers::default(),
            shared: AtomicBool::new(false),
        }
    }

    pub(crate) fn facts(&self) -> FileFacts {
        FileFacts {
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

    /// A dma-buf of the pages of the device that the file maps at this offset.
    pub(crate) fn export_dma_buf(&self, mmap_offset: u64) -> Result<OwnedFd> {
        const VERB: &str = "export_dma_buf";
        self.check_fork(VERB)?;
        fd::export_dma_buf(&*self.kernel, mmap_offset).map_err(|errno| {
            let error = Error::from_kernel(VERB, errno);
            match (errno, error.errno()) {
                (Errno::INVAL, _) => {
                    error.detail("the kernel has no such page any more: was its object freed?")
                }
                (_, Errno::OPNOTSUPP) => error.detail(
                    "it needs Linux 7.0, with peer-to-peer DMA (CONFIG_PCI_P2PDMA), and mlx5",
                ),
                _ => error,
            }
        })
    }

    pub(crate) fn check_fork(&self, verb: &'static str) -> Result<()> {
        if self.epoch.is_over() { Err(Error::forked(verb)) } else { Ok(()) }
    }

    /// Refuses an object of another kernel file: its handle is a number that means something else in this
    /// file.
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

    /// Refuses a completion vector that the device does not have. mlx5's QUERY_EQN takes the low 16 bits of any number.
    pub(crate) fn check_vector(&self, verb: &'static str, vector: u32) -> Result<()> {
        if vector < self.completion_vectors {
            return Ok(());
        }
        let (name, vectors) = (self.device.name(), self.completion_vectors);
        Err(Error::invalid(
            verb,
            format!("completion vector {vector}, but {name} has only {vectors}"),
        ))
    }

    /// A key for a new object, by which events name it.
    pub(crate) fn register(&self, verb: &'static str, kind: EventSourceKind) -> Result<EventKey> {
        self.check_fork(verb)?;
        self.keys.register(kind).ok_or_else(|| {
            Error::new(verb, Errno::NFILE).detail("2^24 objects of this context are alive")
        })
    }

    /// Whether the kernel disassociated this file, because the device is gone. The kernel answers
    /// QUERY_GID_TABLE without the driver, so that disassociation is its only reason for `EIO`. A table of one
    /// entry will do: a table that is too small is refused with another errno.
    pub(crate) fn is_disassociated(&self) -> bool {
        let mut count = 0u64;
        let mut entry = [ib_uverbs_gid_entry::default(); 1];
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE);
        command
            .u64(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, size_of::<ib_uverbs_gid_entry>() as u64)
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, &mut entry)
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &mut count);
        self.kernel.execute(&mut command) == Err(Errno::IO)
    }

    /// When to stop waiting for the kernel to destroy the objects of a file that it disassociates.
    pub(crate) fn disassociate_deadline(&self) -> Instant {
        // A forked child destroys nothing, and waits for nothing.
        let Some(mut disassociate_deadline) = self.disassociate_deadline.lock() else {
            return Instant::now();
        };
        *disassociate_deadline.get_or_insert_with(|| Instant::now() + DISASSOCIATE_TIMEOUT)
    }

    /// Limits and capabilities of the device, and the driver's part of the response.
    pub(crate) fn query_device(&self, verb: &'static str) -> Result<(DeviceAttr, DriverResponse)> {
        let mut resp = ib_uverbs_ex_query_device_resp::new_zeroed();
        let mut driver_response = self.provider.traits().device_response.clone();
        let request = ib_uverbs_ex_query_device::default();
        self.execute(
            verb,
            write_ex(IB_USER_VERBS_EX_CMD_QUERY_DEVICE, &request)
                .response(&mut resp)
                .driver(&[], driver_response.as_mut()),
        )?;
        Ok((DeviceAttr::new(&resp), driver_response))
    }

    /// Asks a device that neither netlink nor sysfs describes for its ports and GUIDs.
    pub(crate) fn describe_device(&mut self, verb: &'static str) -> Result<()> {
        if !self.device.is_described() {
            let (attr, _) = self.query_device(verb)?;
            self.device.describe_opened(&attr);
        }
        Ok(())
    }

    /// The device's limits, for the detail of an error; `None` if the query fails.
    pub(crate) fn limits(&self) -> Option<DeviceAttr> {
        self.query_device("query_device").ok().map(|(attr, _)| attr)
    }

    /// Remembers that something else may keep the kernel's file open from now on.
    pub(crate) fn mark_shared(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    pub(crate) fn count_leak(&self) {
        self.leaked.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // While others keep the file open, the kernel keeps the provider's UARs: the provider gives them back
        // itself. Not in a forked child, where they are the parent's. Not after a leak either: the queue that
        // could not be destroyed still belongs to its register, which would go to another program.
        let shared = *self.shared.get_mut();
        if shared && !self.epoch.is_over() && *self.leaked.get_mut() == 0 {
            self.provider.close(&*self.kernel);
        }
    }
}

/// Random numbers from the kernel, for the name of a file and the secret of its keys. A generator in memory
/// would draw the same numbers in the children of one process, which inherit its state.
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
