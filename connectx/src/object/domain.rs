//! Domains that only have a number: protection, XRC and transport domains.

/// A domain.
pub struct Domain;
