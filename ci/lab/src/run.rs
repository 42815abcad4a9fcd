//! The course of any run: jobs and their stages, subprocesses, progress, outcomes, and their summary.

pub(crate) mod jobs;
pub(crate) mod junit;
pub(crate) mod outcome;
pub(crate) mod parent_death;
pub(crate) mod progress;
pub(crate) mod signals;
pub(crate) mod stages;
pub(crate) mod subprocess;
pub(crate) mod summary;
pub(crate) mod terminal;
