//! Events: how they are told apart and waited for.

pub(crate) mod keys;
pub(crate) mod wait;
