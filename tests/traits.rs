//! Promises about threads and panics, kept by the compiler.

use std::panic::{RefUnwindSafe, UnwindSafe};
use uverbs::aio;
use uverbs::owned::{
    Buffer, BufferPool, Finished, Memory, OwnedCompletionQueue, OwnedQueuePair, OwnedRecvBatch,
    OwnedSendBatch, OwnedSharedReceiveQueue, RegionSlice, Scope, SharedBuffer,
};
use uverbs::{
    AddressHandle, AddressSpace, AnyMemoryRegion, AsyncEvent, Borrowed, CompletionChannel,
    CompletionQueue, Completions, Context, Device, DeviceMemory, DmaBuf, Endpoint, Envelope, Error,
    Exclusive, Foreign, ForeignObject, Imported, McastMembership, MemoryRegion, MemoryWindow,
    MrBuilder, ObjectKey, OnDemandRange, OnDevice, ParentDomain, PostError, ProtectionDomain,
    QpBuilder, QpControl, QpParts, QueuePair, RawRange, RecvBatch, RecvQueue, SendBatch, SendQueue,
    Shared, SharedReceiveQueue, ThreadDomain, Unowned, XrcDomain, XrcTarget, XrcdBuilder,
};

const fn shared<T: Send + Sync>() {}
const fn carefree<T: Send + Sync + Unpin + UnwindSafe + RefUnwindSafe>() {}

/// Types that a program may build for its tests, and send to another machine.
#[cfg(feature = "serde")]
const fn travels<T: Default + serde::Serialize + serde::de::DeserializeOwned>() {}

#[cfg(feature = "serde")]
const _: () = {
    travels::<uverbs::PortAttr>();
    travels::<uverbs::PortSpeed>();
    travels::<uverbs::DeviceAttr>();
    travels::<uverbs::GidEntry>();
    travels::<uverbs::Gid>();
    travels::<uverbs::device::Guid>();
};

const _: () = {
    carefree::<ProtectionDomain>();
    carefree::<ProtectionDomain<Exclusive>>();
    carefree::<ParentDomain<Shared>>();
    carefree::<ParentDomain<Exclusive>>();
    carefree::<MrBuilder>();
    carefree::<MemoryRegion>();
    carefree::<MemoryRegion<u64, Vec<u64>>>();
    carefree::<MemoryRegion<u64, Box<[u64]>>>();
    carefree::<MemoryRegion<u8, RawRange>>();
    carefree::<MemoryRegion<u8, Unowned>>();
    carefree::<AnyMemoryRegion>();
    carefree::<MemoryRegion<u8, DmaBuf>>();
    carefree::<MemoryRegion<u8, AddressSpace>>();
    carefree::<MemoryRegion<u8, OnDevice>>();
    carefree::<DeviceMemory>();
    carefree::<Imported<DeviceMemory>>();
    carefree::<MemoryWindow>();
    shared::<MemoryRegion<u8, Borrowed<'static>>>();
    shared::<OnDemandRange<'static>>();
    carefree::<Context>();
    carefree::<Envelope>();
    carefree::<ForeignObject>();
    carefree::<Imported<ProtectionDomain>>();
    carefree::<Imported<MemoryRegion<u8, Foreign>>>();
    carefree::<XrcDomain>();
    carefree::<XrcTarget>();
    shared::<XrcdBuilder<'static>>();
    carefree::<Device>();
    carefree::<Error>();
    carefree::<PostError>();
    carefree::<ObjectKey>();
    carefree::<AsyncEvent>();
    carefree::<Endpoint>();
    carefree::<ThreadDomain>();
    carefree::<CompletionChannel>();
    carefree::<AddressHandle>();
    carefree::<McastMembership>();
    // Each part of a queue pair may go to a thread of its own, and a whole worker moves as one value.
    carefree::<CompletionQueue>();
    carefree::<SharedReceiveQueue>();
    carefree::<QueuePair>();
    carefree::<QueuePair<Exclusive>>();
    carefree::<QpBuilder>();
    carefree::<QpParts>();
    carefree::<QpParts<Exclusive>>();
    carefree::<SendQueue>();
    carefree::<SendQueue<Exclusive>>();
    carefree::<RecvQueue>();
    carefree::<QpControl>();
    carefree::<(ThreadDomain, QueuePair<Exclusive>, CompletionQueue)>();
    shared::<SendBatch<'static>>();
    shared::<SendBatch<'static, Exclusive>>();
    shared::<RecvBatch<'static>>();
    shared::<Completions<'static>>();
    // Loans move between the threads that post and poll.
    shared::<Buffer>();
    shared::<BufferPool>();
    shared::<SharedBuffer>();
    shared::<RegionSlice>();
    shared::<Finished<Memory, u64>>();
    shared::<OwnedQueuePair<u64>>();
    shared::<OwnedQueuePair<u64, Exclusive>>();
    shared::<OwnedCompletionQueue<u64>>();
    shared::<OwnedSharedReceiveQueue<u64>>();
    shared::<OwnedSendBatch<'static, u64>>();
    shared::<OwnedRecvBatch<'static, u64>>();
    shared::<Scope<'static, 'static, u64>>();
    // Any thread may run futures and their queues.
    shared::<aio::AsyncCompletionQueue>();
    carefree::<uverbs::cm::EventChannel>();
    carefree::<uverbs::cm::Connector>();
    carefree::<aio::cm::AsyncEventChannel>();
    carefree::<aio::cm::AsyncListener>();
    carefree::<aio::cm::AsyncConnection>();
    carefree::<aio::cm::AsyncMulticastMember>();
    shared::<aio::AsyncQueuePair>();
    // Futures of a thread domain stay on their thread; the worker that makes them can move.
    shared::<aio::Worker>();
    shared::<aio::AsyncSharedReceiveQueue>();
    shared::<aio::Inbox>();
    shared::<aio::Op<Buffer>>();
    shared::<aio::AtomicOp>();
    // Cells are moved in and out as bytes, never shared.
    shared::<MemoryRegion<std::cell::Cell<u8>>>();
};
