//! Tests that need no machine: cargo's, Miri's, loom's, litmus tests, seeds and mutants.

pub(crate) mod cargo_test;
pub(crate) mod litmus;
pub(crate) mod miri;
pub(crate) mod mutants;
pub(crate) mod seeds;
