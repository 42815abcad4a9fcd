//! Counters of queue pairs and receive queues (Q counters), which mlx5_ib shows as `hw_counters`.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::vport::query_q_counter_out;

use super::Objects;
use crate::command_error::CommandError;
use crate::format::syndrome::Syndrome;

macro_rules! q_counter {
    ($($field:ident,)*) => {
        /// A Q counter, with the field names of QUERY_Q_COUNTER.
        #[derive(Debug, Default, Clone, PartialEq, Eq)]
        pub struct QCounter {
            $(pub(crate) $field: u32,)*
        }

        impl QCounter {
            pub(crate) fn fill(&self, out: &mut Bits<query_q_counter_out, Vec<u8>>) {
                $(out.set(query_q_counter_out::$field, self.$field.into());)*
            }
        }
    };
}

q_counter! {
    rx_write_requests,
    rx_read_requests,
    rx_atomic_requests,
    out_of_buffer,
    out_of_sequence,
    duplicate_request,
    rnr_nak_retry_err,
    packet_seq_err,
    implied_nak_seq_err,
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

impl QCounter {
    /// Counts a send that failed.
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

    /// Counts a receive that failed.
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

impl Objects {
    /// Moves a queue from one Q counter to another; 0 is none.
    pub(crate) fn switch_q_counter(
        &mut self,
        uid: u32,
        old: u32,
        new: u32,
    ) -> Result<(), CommandError> {
        if old == new {
            return Ok(());
        }
        if new != 0 {
            self.q_counters.check_use_or_kernels(uid, new)?;
            self.q_counters.hold(new)?;
        }
        self.q_counters.release(old);
        Ok(())
    }

    /// The Q counter of a queue pair.
    pub(crate) fn q_counter_of(&mut self, qpn: u32) -> Option<&mut QCounter> {
        let number = self.qps.find(qpn)?.context.get32(qpc::counter_set_id);
        self.q_counters.find_mut(number)
    }

    /// Adds one to a count in the Q counter of a queue pair.
    pub(crate) fn count_for_qp(&mut self, qpn: u32, count: impl FnOnce(&mut QCounter) -> &mut u32) {
        if let Some(counter) = self.q_counter_of(qpn) {
            let count = count(counter);
            *count = count.wrapping_add(1);
        }
    }
}
