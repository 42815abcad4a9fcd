//! The subcommands that boot machines: a command in one, a demonstration, and the runs of tests.

pub(crate) mod demo;
pub(crate) mod exec;
pub(crate) mod quick;
pub(crate) mod runner;
pub(crate) mod smoke;
pub(crate) mod soak;
pub(crate) mod test;
