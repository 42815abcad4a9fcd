//! Requests of a queue pair that were fetched from its send queue and are not complete.
//!
//! Pairs with the requests of `uverbs_roce`: both lists have the same requests in the same order.

use std::collections::VecDeque;

use crate::format::syndrome::CqeError;
use crate::format::wqe::{CtrlSegment, DataSegments};

/// The most requests of a queue pair in flight. The transport makes room for them when it connects.
pub(crate) const DEPTH: usize = 64;
/// The most bytes of response data that a CQE holds.
pub(crate) const IN_CQE: usize = 64;

/// A request in flight.
pub(crate) struct SendRequest {
    /// Its first WQEBB.
    pub(crate) index: u16,
    pub(crate) control: CtrlSegment,
    /// The WQE, whole.
    pub(crate) wqe: Vec<u8>,
    /// The bytes in front of its data segments.
    pub(crate) head: usize,
    /// Bytes of its data.
    pub(crate) len: u32,
    /// The error with which it completes instead of being executed.
    pub(crate) fault: Option<CqeError>,
    /// Response data for its CQE.
    pub(crate) response: [u8; IN_CQE],
    /// Bytes of that.
    pub(crate) response_len: usize,
}

impl SendRequest {
    /// Its data segments.
    pub(crate) fn data(&self) -> DataSegments<'_> {
        DataSegments::behind(&self.control, &self.wqe, self.head)
    }
}

/// The requests in flight, numbered from 0 on since the queue pair was reset.
#[derive(Default)]
pub(crate) struct InFlight {
    requests: VecDeque<SendRequest>,
    /// The number of the oldest one.
    oldest: u64,
    /// Memory of complete ones.
    spare: Vec<Vec<u8>>,
}

impl InFlight {
    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.requests.clear();
        self.oldest = 0;
    }

    /// Memory for the WQE of the next request.
    pub(crate) fn take_memory(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default()
    }

    /// The number that the next request gets.
    pub(crate) fn next(&self) -> u64 {
        self.oldest + self.requests.len() as u64
    }

    /// Adds a request.
    pub(crate) fn push(&mut self, request: SendRequest) {
        self.requests.push_back(request);
    }

    /// The request with a number.
    pub(crate) fn get(&self, number: u64) -> Option<&SendRequest> {
        self.requests.get(usize::try_from(number.checked_sub(self.oldest)?).ok()?)
    }

    /// The request with a number, to change.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut SendRequest> {
        self.requests.get_mut(usize::try_from(number.checked_sub(self.oldest)?).ok()?)
    }

    /// Takes the oldest request.
    pub(crate) fn pop(&mut self) -> Option<SendRequest> {
        let request = self.requests.pop_front()?;
        self.oldest += 1;
        Some(request)
    }

    /// Takes back the memory of a WQE.
    pub(crate) fn recycle(&mut self, wqe: Vec<u8>) {
        if self.spare.len() < DEPTH {
            self.spare.push(wqe);
        }
    }
}
