//! What is counted: sets of counters of queue pairs, and counters of flows.
//!
//! Pairs with ALLOC_Q_COUNTER, which mlx5_ib shows as a port's hardware counters, and with
//! ALLOC_FLOW_COUNTER, whose counters the actions of flows name.

use uverbs_uapi::mlx5::prm::flow::{
    alloc_flow_counter_in, alloc_flow_counter_out, dealloc_flow_counter_in, query_flow_counter_in,
    query_flow_counter_out,
};
use uverbs_uapi::mlx5::prm::vport::{
    alloc_q_counter_out, dealloc_q_counter_in, query_q_counter_in, query_q_counter_out,
    traffic_counter,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::cmd::refusal::{Refused, refuse};
use crate::data::message::Syndrome;
use crate::device::Device;
use crate::port::Traffic;

macro_rules! counter_set {
    ($($field:ident,)*) => {
        /// What happened to the queue pairs of a set, by the names of QUERY_Q_COUNTER.
        #[derive(Debug, Default, Clone, PartialEq, Eq)]
        pub struct CounterSet {
            $(pub(crate) $field: u32,)*
        }

        impl CounterSet {
            fn fill(&self, out: &mut Bits<query_q_counter_out, Vec<u8>>) {
                $(out.set(query_q_counter_out::$field, self.$field.into());)*
            }
        }
    };
}

counter_set! {
    rx_write_requests,
    rx_read_requests,
    rx_atomic_requests,
    out_of_buffer,
    out_of_sequence,
    duplicate_request,
    rnr_nak_retry_err,
    local_ack_timeout_err,
    req_rnr_retries_exceeded,
    req_transport_retries_exceeded,
    req_remote_invalid_request,
    req_remote_access_errors,
    req_cqe_error,
    req_cqe_flush_error,
    resp_local_length_error,
    resp_remote_access_errors,
    resp_cqe_error,
    resp_cqe_flush_error,
}

const FLUSHED: u8 = Syndrome::Flushed as u8;
const RECEIVER_NOT_READY: u8 = Syndrome::ReceiverNotReady as u8;
const RETRIES_EXCEEDED: u8 = Syndrome::RetriesExceeded as u8;
const REMOTE_INVALID_REQUEST: u8 = Syndrome::RemoteInvalidRequest as u8;
const REMOTE_ACCESS: u8 = Syndrome::RemoteAccess as u8;
const LOCAL_LENGTH: u8 = Syndrome::LocalLength as u8;

impl CounterSet {
    /// A send that ended with an error.
    pub(crate) fn count_send_error(&mut self, syndrome: u8) {
        self.req_cqe_error = self.req_cqe_error.wrapping_add(1);
        match syndrome {
            FLUSHED => self.req_cqe_flush_error = self.req_cqe_flush_error.wrapping_add(1),
            RECEIVER_NOT_READY => {
                self.req_rnr_retries_exceeded = self.req_rnr_retries_exceeded.wrapping_add(1)
            }
            RETRIES_EXCEEDED => {
                self.req_transport_retries_exceeded =
                    self.req_transport_retries_exceeded.wrapping_add(1)
            }
            REMOTE_INVALID_REQUEST => {
                self.req_remote_invalid_request = self.req_remote_invalid_request.wrapping_add(1)
            }
            REMOTE_ACCESS => {
                self.req_remote_access_errors = self.req_remote_access_errors.wrapping_add(1)
            }
            _ => {}
        }
    }

    /// A receive that ended with an error.
    pub(crate) fn count_receive_error(&mut self, syndrome: u8) {
        self.resp_cqe_error = self.resp_cqe_error.wrapping_add(1);
        match syndrome {
            FLUSHED => self.resp_cqe_flush_error = self.resp_cqe_flush_error.wrapping_add(1),
            LOCAL_LENGTH => {
                self.resp_local_length_error = self.resp_local_length_error.wrapping_add(1)
            }
            _ => {}
        }
    }
}

impl Device {
    pub(crate) fn alloc_q_counter(&mut self, uid: u32) -> Result<Vec<u8>, Refused> {
        let number = self.objects.counters.insert_owned(uid, CounterSet::default())?;
        let mut out = Bits::<alloc_q_counter_out, _>::new(vec![0; alloc_q_counter_out::SIZE]);
        out.set(alloc_q_counter_out::counter_set_id, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn dealloc_q_counter(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<dealloc_q_counter_in, _>::new(input);
        let number = input.get32(dealloc_q_counter_in::counter_set_id);
        self.objects.counters.own(uid, number)?;
        self.objects.counters.remove(number)?;
        Ok(vec![])
    }

    /// Has a queue that counted in one set, or none, count in another from now on.
    pub(crate) fn count_in(&mut self, uid: u32, old: u32, new: u32) -> Result<(), Refused> {
        if old == new {
            return Ok(());
        }
        if new != 0 {
            self.objects.counters.allow_lent(uid, new)?;
            self.objects.counters.hold(new)?;
        }
        self.objects.counters.release(old);
        Ok(())
    }

    pub(crate) fn query_q_counter(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<query_q_counter_in, _>::new(input);
        let number = input.get32(query_q_counter_in::counter_set_id);
        let set = self.objects.counters.own(uid, number)?;
        let mut out = Bits::<query_q_counter_out, _>::new(vec![0; query_q_counter_out::SIZE]);
        set.fill(&mut out);
        if input.is_set(query_q_counter_in::clear) {
            *set = CounterSet::default();
        }
        Ok(out.into_inner())
    }

    pub(crate) fn alloc_flow_counter(
        &mut self,
        uid: u32,
        input: &[u8],
    ) -> Result<Vec<u8>, Refused> {
        let input = Bits::<alloc_flow_counter_in, _>::new(input);
        if input.is_set(alloc_flow_counter_in::flow_counter_bulk) {
            return refuse!(BadParam, "flow counters in bulk are not modelled");
        }
        let number = self.objects.flow_counters.insert_owned(uid, Traffic::default())?;
        let mut out = Bits::<alloc_flow_counter_out, _>::new(vec![0; alloc_flow_counter_out::SIZE]);
        out.set(alloc_flow_counter_out::flow_counter_id, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn dealloc_flow_counter(
        &mut self,
        uid: u32,
        input: &[u8],
    ) -> Result<Vec<u8>, Refused> {
        let input = Bits::<dealloc_flow_counter_in, _>::new(input);
        let number = input.get32(dealloc_flow_counter_in::flow_counter_id);
        self.objects.flow_counters.own(uid, number)?;
        self.objects.flow_counters.remove(number)?;
        Ok(vec![])
    }

    pub(crate) fn query_flow_counter(
        &mut self,
        uid: u32,
        input: &[u8],
    ) -> Result<Vec<u8>, Refused> {
        let input = Bits::<query_flow_counter_in, _>::new(input);
        let first = input.get32(query_flow_counter_in::flow_counter_id);
        let count = input.get32(query_flow_counter_in::num_of_counters).max(1);
        // All or none: what is cleared and not told would be lost.
        for number in (0..count).map(|step| first.wrapping_add(step)) {
            self.objects.flow_counters.own(uid, number)?;
        }
        let mut out = vec![0; query_flow_counter_out::SIZE];
        for number in (0..count).map(|step| first.wrapping_add(step)) {
            let counter = self.objects.flow_counters.own(uid, number)?;
            let mut entry = Bits::<traffic_counter, _>::new(vec![0; traffic_counter::SIZE]);
            entry.set(traffic_counter::packets, counter.packets);
            entry.set(traffic_counter::octets, counter.octets);
            out.extend(entry.into_inner());
            if input.is_set(query_flow_counter_in::clear) {
                *counter = Traffic::default();
            }
        }
        Ok(out)
    }
}
