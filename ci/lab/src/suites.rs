//! Tests that run in a guest: device suites, programs of other projects, and the examples.

pub(crate) mod capability;
pub(crate) mod cases;
pub(crate) mod examples;
pub(crate) mod setup;
pub(crate) mod suite;
