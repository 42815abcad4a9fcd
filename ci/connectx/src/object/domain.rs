//! Domains that only have a number: protection, XRC and transport domains, and counter sets.
//!
//! Pairs with their ALLOC and DEALLOC commands.

use uverbs_uapi::mlx5::prm::object::{
    alloc_pd_out, alloc_transport_domain_out, alloc_xrcd_out, dealloc_pd_in,
    dealloc_transport_domain_in, dealloc_xrcd_in,
};
use uverbs_uapi::mlx5::prm::vport::{
    alloc_q_counter_out, dealloc_q_counter_in, query_q_counter_in, query_q_counter_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::cmd::refusal::Refused;
use crate::device::Device;

/// What happened to the queue pairs of a counter set.
#[derive(Default)]
pub struct Domain {
    pub(crate) writes: u32,
    pub(crate) reads: u32,
    pub(crate) atomics: u32,
    pub(crate) out_of_buffer: u32,
}

macro_rules! domain {
    ($alloc:ident, $dealloc:ident, $table:ident, $out:ident.$out_field:ident, $in:ident) => {
        impl Device {
            pub(crate) fn $alloc(&mut self, uid: u32) -> Result<Vec<u8>, Refused> {
                let number = self.objects.$table.insert_owned(uid, Domain::default())?;
                let mut out = Bits::<$out, _>::new(vec![0; $out::SIZE]);
                out.set($out::$out_field, number.into());
                Ok(out.into_inner())
            }

            pub(crate) fn $dealloc(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
                let number = Bits::<$in, _>::new(input).get32($in::$out_field);
                self.objects.$table.own(uid, number)?;
                self.objects.$table.remove(number)?;
                Ok(vec![])
            }
        }
    };
}

domain!(alloc_pd, dealloc_pd, pds, alloc_pd_out.pd, dealloc_pd_in);
domain!(alloc_xrcd, dealloc_xrcd, xrcds, alloc_xrcd_out.xrcd, dealloc_xrcd_in);
domain!(
    alloc_transport_domain,
    dealloc_transport_domain,
    transport_domains,
    alloc_transport_domain_out.transport_domain,
    dealloc_transport_domain_in
);
domain!(
    alloc_q_counter,
    dealloc_q_counter,
    counters,
    alloc_q_counter_out.counter_set_id,
    dealloc_q_counter_in
);

impl Device {
    pub(crate) fn query_q_counter(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<query_q_counter_in, _>::new(input);
        let number = input.get32(query_q_counter_in::counter_set_id);
        let set = self.objects.counters.get_mut(number)?;
        let mut out = Bits::<query_q_counter_out, _>::new(vec![0; query_q_counter_out::SIZE]);
        out.set(query_q_counter_out::rx_write_requests, set.writes.into());
        out.set(query_q_counter_out::rx_read_requests, set.reads.into());
        out.set(query_q_counter_out::rx_atomic_requests, set.atomics.into());
        out.set(query_q_counter_out::out_of_buffer, set.out_of_buffer.into());
        if input.is_set(query_q_counter_in::clear) {
            *set = Domain::default();
        }
        Ok(out.into_inner())
    }
}
