//! User contexts, which own objects.

/// A user context.
pub struct Uctx;
