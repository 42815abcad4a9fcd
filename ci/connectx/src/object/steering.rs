//! What stands between flow tables and raw queues: TIS, TIR and RQ tables.
//!
//! Pairs with mlx5_core's `transobj.c`.

use uverbs_uapi::mlx5::prm::rqc::{
    create_rqt_in, create_rqt_out, create_tir_in, create_tir_out, create_tis_in, create_tis_out,
    destroy_rqt_in, destroy_tir_in, destroy_tis_in, modify_rqt_in, modify_tir_in, modify_tis_in,
    rqtc, tirc, tisc,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;

/// How many queues an RQ table may have, as a power of two.
pub(crate) const LOG_MAX_QUEUES: u64 = 9;

const DIRECT: u64 = 0;
const INDIRECT: u64 = 1;

/// What send queues send through.
pub struct Tis {
    transport_domain: u32,
}

impl Tis {
    /// The domain whose queues do not hear what is sent through this.
    pub(crate) fn transport_domain(&self) -> u32 {
        self.transport_domain
    }
}

/// Where frames of a flow go.
pub struct Tir {
    pub(crate) context: Bits<tirc, Vec<u8>>,
}

/// Receive queues that flows are spread over.
pub struct Rqt {
    pub(crate) queues: Vec<u32>,
}

fn hash_function(number: u64) -> Result<(), Refused> {
    const TOEPLITZ: u64 = 2;
    match number {
        TOEPLITZ => Ok(()),
        other => refuse!(BadParam, "receive hash function {other} is not modelled"),
    }
}

fn queues(list: &[u8], count: u64) -> Result<Vec<u32>, Refused> {
    if count > 1 << LOG_MAX_QUEUES {
        return refuse!(LimitExceeded, "{count} queues of an RQ table, 2^{LOG_MAX_QUEUES} at most");
    }
    let (entries, _) = list.as_chunks::<4>();
    let Some(entries) = entries.get(..count as usize) else {
        return refuse!(BadInputLength, "{count} queues, {} listed", entries.len());
    };
    Ok(entries.iter().map(|entry| u32::from_be_bytes(*entry) & 0xff_ffff).collect())
}

impl Device {
    pub(crate) fn create_tis(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let context = Bits::<create_tis_in, _>::new(input);
        let context = context.sub(create_tis_in::ctx);
        if context.is_set(tisc::tls_en) {
            return refuse!(BadParam, "TLS is not modelled");
        }
        let transport_domain = context.get32(tisc::transport_domain);
        self.objects.transport_domains.allow_lent(uid, transport_domain)?;
        self.objects.tises.room()?;
        self.objects.transport_domains.hold(transport_domain)?;
        let number = self.objects.tises.insert_owned(uid, Tis { transport_domain })?;
        let mut out = Bits::<create_tis_out, _>::new(vec![0; create_tis_out::SIZE]);
        out.set(create_tis_out::tisn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn modify_tis(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<modify_tis_in, _>::new(input);
        self.objects.tises.own(uid, input.get32(modify_tis_in::tisn))?;
        if input.get(modify_tis_in::bitmask) & !1 != 0 {
            return refuse!(BadParam, "MODIFY_TIS of {:#x}", input.get(modify_tis_in::bitmask));
        }
        // Priorities share one link that is never full: there is nothing to remember.
        Ok(vec![])
    }

    pub(crate) fn destroy_tis(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_tis_in, _>::new(input).get32(destroy_tis_in::tisn);
        self.objects.tises.own(uid, number)?;
        let tis = self.objects.tises.remove(number)?;
        self.objects.transport_domains.release(tis.transport_domain);
        Ok(vec![])
    }

    pub(crate) fn create_tir(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_tir_in, _>::new(input);
        let context = Bits::<tirc, _>::new(input.sub(create_tir_in::ctx).bytes().to_vec());
        if context.is_set(tirc::packet_merge_mask) || context.is_set(tirc::tls_en) {
            return refuse!(BadParam, "LRO and TLS are not modelled");
        }
        if context.get(tirc::disp_type) == INDIRECT {
            hash_function(context.get(tirc::rx_hash_fn))?;
        }
        // Without a domain it hears every sender.
        let domain = context.get32(tirc::transport_domain);
        if domain != 0 {
            self.objects.transport_domains.allow_lent(uid, domain)?;
        }
        self.objects.tirs.room()?;
        match context.get(tirc::disp_type) {
            DIRECT => {
                self.objects.rqs.allow(uid, context.get32(tirc::inline_rqn))?;
                self.objects.rqs.hold(context.get32(tirc::inline_rqn))?;
            }
            INDIRECT => {
                self.objects.rqts.allow(uid, context.get32(tirc::indirect_table))?;
                self.objects.rqts.hold(context.get32(tirc::indirect_table))?;
            }
            other => return refuse!(BadParam, "TIR disp_type {other}"),
        }
        if domain != 0 {
            self.objects.transport_domains.hold(domain)?;
        }
        let number = self.objects.tirs.insert_owned(uid, Tir { context })?;
        let mut out = Bits::<create_tir_out, _>::new(vec![0; create_tir_out::SIZE]);
        out.set(create_tir_out::tirn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn modify_tir(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        const SELF_LOOPBACK: u64 = 1 << 4;
        const HASH: u64 = 1 << 3;
        let input = Bits::<modify_tir_in, _>::new(input);
        let number = input.get32(modify_tir_in::tirn);
        let select = input.get(modify_tir_in::bitmask);
        let new = input.sub(modify_tir_in::ctx);
        if select & HASH != 0 {
            hash_function(new.get(tirc::rx_hash_fn))?;
        }
        let tir = self.objects.tirs.own(uid, number)?;
        if select & !(SELF_LOOPBACK | HASH) != 0 {
            return refuse!(BadParam, "MODIFY_TIR of {select:#x}");
        }
        if select & SELF_LOOPBACK != 0 {
            tir.context.set(tirc::self_lb_block, new.get(tirc::self_lb_block));
        }
        if select & HASH != 0 {
            tir.context.set(tirc::rx_hash_fn, new.get(tirc::rx_hash_fn));
            tir.context.set(tirc::rx_hash_symmetric, new.get(tirc::rx_hash_symmetric));
            let key = new.span(tirc::rx_hash_toeplitz_key).to_vec();
            tir.context.set_span(tirc::rx_hash_toeplitz_key, &key);
            let fields = new.sub(tirc::rx_hash_field_selector_outer).bytes().to_vec();
            tir.context.set_sub(tirc::rx_hash_field_selector_outer, &fields);
        }
        Ok(vec![])
    }

    pub(crate) fn destroy_tir(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_tir_in, _>::new(input).get32(destroy_tir_in::tirn);
        self.objects.tirs.own(uid, number)?;
        let tir = self.objects.tirs.remove(number)?;
        if tir.context.get(tirc::disp_type) == DIRECT {
            self.objects.rqs.release(tir.context.get32(tirc::inline_rqn));
        } else {
            self.objects.rqts.release(tir.context.get32(tirc::indirect_table));
        }
        self.objects.transport_domains.release(tir.context.get32(tirc::transport_domain));
        Ok(vec![])
    }

    fn hold_queues(&mut self, uid: u32, queues: &[u32]) -> Result<(), Refused> {
        for queue in queues {
            self.objects.rqs.allow(uid, *queue)?;
        }
        for queue in queues {
            self.objects.rqs.hold(*queue)?;
        }
        Ok(())
    }

    pub(crate) fn create_rqt(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_rqt_in, _>::new(input);
        let context = input.sub(create_rqt_in::rqt_context);
        let list = input.bytes().get(create_rqt_in::SIZE..).unwrap_or_default();
        let queues = queues(list, context.get(rqtc::rqt_actual_size))?;
        self.objects.rqts.room()?;
        self.hold_queues(uid, &queues)?;
        let number = self.objects.rqts.insert_owned(uid, Rqt { queues })?;
        let mut out = Bits::<create_rqt_out, _>::new(vec![0; create_rqt_out::SIZE]);
        out.set(create_rqt_out::rqtn, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn modify_rqt(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<modify_rqt_in, _>::new(input);
        let number = input.get32(modify_rqt_in::rqtn);
        let context = input.sub(modify_rqt_in::ctx);
        let list = input.bytes().get(modify_rqt_in::SIZE..).unwrap_or_default();
        let queues = queues(list, context.get(rqtc::rqt_actual_size))?;
        self.objects.rqts.own(uid, number)?;
        self.hold_queues(uid, &queues)?;
        let old = std::mem::replace(&mut self.objects.rqts.get_mut(number)?.queues, queues);
        old.into_iter().for_each(|queue| self.objects.rqs.release(queue));
        Ok(vec![])
    }

    pub(crate) fn destroy_rqt(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let number = Bits::<destroy_rqt_in, _>::new(input).get32(destroy_rqt_in::rqtn);
        self.objects.rqts.own(uid, number)?;
        let rqt = self.objects.rqts.remove(number)?;
        rqt.queues.into_iter().for_each(|queue| self.objects.rqs.release(queue));
        Ok(vec![])
    }
}
