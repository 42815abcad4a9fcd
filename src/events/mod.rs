//! Events: how they are told apart and waited for.

pub(crate) mod async_event;
pub(crate) mod file;
pub(crate) mod keys;
pub(crate) mod wait;
