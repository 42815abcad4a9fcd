//! Events of the kernel: asynchronous events, the keys by which events name objects, and waiting for events.

pub(crate) mod async_event;
pub(crate) mod file;
pub(crate) mod keys;
pub(crate) mod wait;
