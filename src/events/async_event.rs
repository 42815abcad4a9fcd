//! Asynchronous events of a device, its ports and its queues. Pairs with
//! `core/uverbs_std_types_async_fd.c`.

use super::keys::{EventSourceKind, ObjectKey, Resolved};
use super::wait::{Read, read_record, wait_readable};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::file::File;
use crate::number::open_enum;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;
use uverbs_uapi::async_event::{ib_event_type as raw, ib_uverbs_async_event_desc};
use zerocopy::FromZeros;

open_enum! {
    /// The kind of an asynchronous event.
    #[doc(alias = "ibv_event_type")]
    #[doc(alias = "ibv_event_type_str")]
    pub struct EventType(u32) {
        /// A completion queue overflowed, or the device lost it.
        #[doc(alias = "IBV_EVENT_CQ_ERR")]
        CQ_ERR = raw::IB_EVENT_CQ_ERR.0, "completion queue error";
        /// The queue pair failed and cannot report it by a completion.
        #[doc(alias = "IBV_EVENT_QP_FATAL")]
        QP_FATAL = raw::IB_EVENT_QP_FATAL.0, "queue pair fatal";
        /// A request of the peer was malformed.
        #[doc(alias = "IBV_EVENT_QP_REQ_ERR")]
        QP_REQ_ERR = raw::IB_EVENT_QP_REQ_ERR.0, "queue pair request error";
        /// A request of the peer violated the rights of the memory that it named.
        #[doc(alias = "IBV_EVENT_QP_ACCESS_ERR")]
        QP_ACCESS_ERR = raw::IB_EVENT_QP_ACCESS_ERR.0, "queue pair access error";
        /// The first message arrived while the queue pair was ready to receive only.
        #[doc(alias = "IBV_EVENT_COMM_EST")]
        COMM_EST = raw::IB_EVENT_COMM_EST.0, "communication established";
        /// The send queue was drained, as [`sqd_async_notify`](crate::QpAttr::sqd_async_notify) asked for.
        #[doc(alias = "IBV_EVENT_SQ_DRAINED")]
        SQ_DRAINED = raw::IB_EVENT_SQ_DRAINED.0, "send queue drained";
        /// The connection moved to its alternate path.
        #[doc(alias = "IBV_EVENT_PATH_MIG")]
        PATH_MIG = raw::IB_EVENT_PATH_MIG.0, "path migrated";
        /// The connection could not move to its alternate path.
        #[doc(alias = "IBV_EVENT_PATH_MIG_ERR")]
        PATH_MIG_ERR = raw::IB_EVENT_PATH_MIG_ERR.0, "path migration failed";
        /// The device failed or was removed. No event follows.
        #[doc(alias = "IBV_EVENT_DEVICE_FATAL")]
        DEVICE_FATAL = raw::IB_EVENT_DEVICE_FATAL.0, "device fatal";
        /// The port can be used.
        #[doc(alias = "IBV_EVENT_PORT_ACTIVE")]
        PORT_ACTIVE = raw::IB_EVENT_PORT_ACTIVE.0, "port active";
        /// The port lost its link.
        #[doc(alias = "IBV_EVENT_PORT_ERR")]
        PORT_ERR = raw::IB_EVENT_PORT_ERR.0, "port error";
        /// The port got another local identifier.
        #[doc(alias = "IBV_EVENT_LID_CHANGE")]
        LID_CHANGE = raw::IB_EVENT_LID_CHANGE.0, "LID changed";
        /// The port's table of partition keys changed.
        #[doc(alias = "IBV_EVENT_PKEY_CHANGE")]
        PKEY_CHANGE = raw::IB_EVENT_PKEY_CHANGE.0, "P_Key table changed";
        /// Another subnet manager took over.
        #[doc(alias = "IBV_EVENT_SM_CHANGE")]
        SM_CHANGE = raw::IB_EVENT_SM_CHANGE.0, "subnet manager changed";
        /// A shared receive queue failed.
        #[doc(alias = "IBV_EVENT_SRQ_ERR")]
        SRQ_ERR = raw::IB_EVENT_SRQ_ERR.0, "shared receive queue error";
        /// A shared receive queue holds fewer receives than its limit.
        #[doc(alias = "IBV_EVENT_SRQ_LIMIT_REACHED")]
        SRQ_LIMIT_REACHED = raw::IB_EVENT_SRQ_LIMIT_REACHED.0, "shared receive queue limit reached";
        /// A queue pair in an error state will take no more from its shared receive queue.
        #[doc(alias = "IBV_EVENT_QP_LAST_WQE_REACHED")]
        QP_LAST_WQE_REACHED = raw::IB_EVENT_QP_LAST_WQE_REACHED.0, "last receive reached";
        /// The subnet manager wants clients to register afresh.
        #[doc(alias = "IBV_EVENT_CLIENT_REREGISTER")]
        CLIENT_REREGISTER = raw::IB_EVENT_CLIENT_REREGISTER.0, "client reregistration";
        /// The port's table of global identifiers changed.
        #[doc(alias = "IBV_EVENT_GID_CHANGE")]
        GID_CHANGE = raw::IB_EVENT_GID_CHANGE.0, "GID table changed";
        /// A work queue failed.
        #[doc(alias = "IBV_EVENT_WQ_FATAL")]
        WQ_FATAL = raw::IB_EVENT_WQ_FATAL.0, "work queue fatal";
        /// The port runs at another speed.
        #[doc(alias = "IBV_EVENT_DEVICE_SPEED_CHANGE")]
        DEVICE_SPEED_CHANGE = raw::IB_EVENT_DEVICE_SPEED_CHANGE.0, "device speed changed";
    }
}

/// The device, port or object that an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventSource {
    /// The device as a whole.
    Device,
    /// A port, from 1.
    Port(u32),
    /// The completion queue with this [key](crate::CqControl::key).
    Cq(ObjectKey),
    /// The queue pair with this [key](crate::QpControl::key).
    Qp(ObjectKey),
    /// The shared receive queue with this [key](crate::SharedReceiveQueue::key).
    Srq(ObjectKey),
    /// An object that another process or context made on the kernel file, by its `user_handle`.
    Foreign(u64),
}

/// An asynchronous event.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// while let Some(event) = context.next_event(None)? {
///     println!("{} of {:?}", event.kind, event.source);
/// }
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_async_event")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct AsyncEvent {
    /// The kind of event.
    pub kind: EventType,
    /// The device, port or object that it is about.
    pub source: EventSource,
}

impl Context {
    /// Reads the next asynchronous event; `None` if there is none at the moment.
    ///
    /// Events of objects that were destroyed meanwhile are dropped and
    /// [counted](Self::dead_events). Events need no acknowledgement, and destroying an object
    /// never waits for one. May be called from several threads; each event reaches one of them.
    ///
    /// The removal of the device is an event, too, and the last one:
    /// [`DEVICE_FATAL`](EventType::DEVICE_FATAL). A driver may raise the same event for a device that
    /// failed and is still there.
    ///
    /// # Errors
    ///
    /// `EIO` when the device is gone and `DEVICE_FATAL` was read before.
    #[doc(alias = "ibv_get_async_event")]
    #[doc(alias = "ibv_ack_async_event")]
    pub fn try_next_event(&self) -> Result<Option<AsyncEvent>> {
        const VERB: &str = "get_async_event";
        let file = &*self.file;
        file.check_fork(VERB)?;
        let fd = file.events.reader().map_err(|errno| Error::new(VERB, errno))?;
        loop {
            let mut record = ib_uverbs_async_event_desc::new_zeroed();
            match read_record(VERB, fd, &mut record) {
                // The kernel raises DEVICE_FATAL after it disassociated the file, and leaves the event
                // file open: a caller that reads again must not wait for ever.
                Ok(Read::Empty)
                    if file.device_gone_reported.load(Ordering::Relaxed)
                        && file.is_disassociated() =>
                {
                    return Err(Error::new(VERB, Errno::IO).detail("the device is gone"));
                }
                Ok(Read::Empty) => return Ok(None),
                Ok(Read::Record) => {}
                Err(error) if error.errno() == Errno::IO => {
                    let told = file.device_gone_reported.swap(true, Ordering::Relaxed);
                    return if told { Err(error.detail("the device is gone")) } else { Ok(GONE) };
                }
                Err(error) => return Err(error),
            }
            let kind = EventType(record.event_type);
            match source(file, kind, record.element) {
                Some(source) => {
                    if kind == EventType::DEVICE_FATAL {
                        file.device_gone_reported.store(true, Ordering::Relaxed);
                    }
                    return Ok(Some(AsyncEvent { kind, source }));
                }
                None => {
                    file.dead_events.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Waits for an asynchronous event, at most for `timeout`, for ever without one. `None` after
    /// the timeout.
    ///
    /// Let only one thread wait, or give a timeout: when the device is removed, the kernel wakes the waiting
    /// threads once for the last event. One of them reads it, and the others would wait for ever.
    ///
    /// # Errors
    ///
    /// As [`try_next_event`](Self::try_next_event).
    #[doc(alias = "ibv_get_async_event")]
    pub fn next_event(&self, timeout: Option<Duration>) -> Result<Option<AsyncEvent>> {
        let platform = self.file.kernel.platform();
        wait_readable("get_async_event", &platform, self.events_fd(), timeout, || {
            self.try_next_event()
        })
    }

    /// The event file, for an event loop: readable when there is an event. It is non-blocking;
    /// call [`try_next_event`](Self::try_next_event) until it returns `None`, or an edge-triggered
    /// loop will not be woken again. It takes no commands, unlike [the context's own](Context#impl-AsFd-for-Context).
    #[doc(alias = "async_fd")]
    pub fn events_fd(&self) -> BorrowedFd<'_> {
        // Making an open file non-blocking does not fail.
        self.file.events.reader().unwrap_or_else(|_| self.file.events.as_fd())
    }

    /// The number of events, those of completion channels included, that were dropped because their
    /// object was destroyed before they were read.
    pub fn dead_events(&self) -> u64 {
        self.file.dead_events.load(Ordering::Relaxed)
    }
}

const GONE: Option<AsyncEvent> =
    Some(AsyncEvent { kind: EventType::DEVICE_FATAL, source: EventSource::Device });

/// The source of an event. `element` is a port or a `user_handle`, depending on the kind of event. `None`
/// for an object that was destroyed.
fn source(file: &File, kind: EventType, element: u64) -> Option<EventSource> {
    match kind {
        EventType::DEVICE_FATAL => return Some(EventSource::Device),
        EventType::PORT_ACTIVE
        | EventType::PORT_ERR
        | EventType::LID_CHANGE
        | EventType::PKEY_CHANGE
        | EventType::SM_CHANGE
        | EventType::CLIENT_REREGISTER
        | EventType::GID_CHANGE
        | EventType::DEVICE_SPEED_CHANGE => {
            let port = u32::try_from(element);
            return Some(port.map_or(EventSource::Foreign(element), EventSource::Port));
        }
        _ => {}
    }
    match file.keys.resolve(element) {
        Resolved::Live(EventSourceKind::Cq, key) => Some(EventSource::Cq(key)),
        Resolved::Live(EventSourceKind::Qp, key) => Some(EventSource::Qp(key)),
        Resolved::Live(EventSourceKind::Srq, key) => Some(EventSource::Srq(key)),
        Resolved::Dead => None,
        Resolved::Foreign(number) => Some(EventSource::Foreign(number)),
    }
}
