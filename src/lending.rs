//! Memory that goes to a queue with a request and comes back when the request has completed.
#![allow(unsafe_code)]

pub(crate) mod compact_enum;
pub(crate) mod inline_any;
pub(crate) mod loan_table;
pub(crate) mod waiting;
