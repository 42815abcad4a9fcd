//! The objects that commands create: each file has one kind, [`Objects`] has them all.

pub mod buffer;
pub mod cq;
pub mod domain;
pub mod eq;
pub mod flow_table;
pub(crate) mod in_flight;
pub mod mcg;
pub mod memic;
pub mod mkey;
pub mod q_counter;
pub mod qp;
pub mod receive_queue;
pub(crate) mod receiving;
pub mod rq;
pub mod rqt;
pub mod send_queue;
pub mod sq;
pub mod srq;
pub mod table;
pub(crate) mod timestamp;
pub mod tir;
pub mod tis;
pub mod uar;
pub mod uctx;
pub mod umem;
pub mod virtq;

use self::buffer::ListedPages;
use self::mkey::CACHED_MKEY;
use self::table::ObjectTable;
use crate::bar0;
use crate::cost::Cost;
use crate::options::Options;
use crate::port::Traffic;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// All objects of a function.
pub struct Objects {
    pub(crate) uars: ObjectTable<uar::Uar>,
    pub(crate) uctxs: ObjectTable<uctx::Uctx>,
    pub(crate) umems: ObjectTable<umem::Umem>,
    pub(crate) pds: ObjectTable<domain::Domain>,
    pub(crate) xrcds: ObjectTable<domain::Domain>,
    pub(crate) transport_domains: ObjectTable<domain::Domain>,
    pub(crate) q_counters: ObjectTable<q_counter::QCounter>,
    pub(crate) flow_counters: ObjectTable<Traffic>,
    pub(crate) mkeys: ObjectTable<mkey::Mkey>,
    /// Whether the data-direct function may access memory.
    pub(crate) data_direct: bool,
    /// Pages of all queues and umems.
    pub(crate) listed_pages: ListedPages,
    /// Bytes of the translation lists of all mkeys.
    pub(crate) mkey_lists: usize,
    /// The ranges of the last access, whose memory the next one uses.
    pub(crate) ranges: Cell<Vec<mkey::DmaRange>>,
    /// Where recent accesses lay.
    pub(crate) recent: RefCell<VecDeque<mkey::Recent>>,
    /// Cost of the current WQE.
    pub(crate) cost: Cost,
    pub(crate) eqs: ObjectTable<eq::Eq>,
    pub(crate) cqs: ObjectTable<cq::Cq>,
    pub(crate) qps: ObjectTable<qp::Qp>,
    pub(crate) srqs: ObjectTable<srq::Srq>,
    pub(crate) rqs: ObjectTable<rq::Rq>,
    pub(crate) sqs: ObjectTable<sq::Sq>,
    pub(crate) tises: ObjectTable<tis::Tis>,
    pub(crate) tirs: ObjectTable<tir::Tir>,
    pub(crate) rqts: ObjectTable<rqt::Rqt>,
    pub(crate) virtqs: ObjectTable<virtq::Virtq>,
    pub(crate) flow_tables: ObjectTable<flow_table::FlowTable>,
    pub(crate) flow_roots: flow_table::FlowTableRoots,
    pub(crate) multicast_groups: mcg::MulticastGroups,
    pub(crate) memic: memic::Memic,
}

impl Objects {
    /// A function without objects.
    pub fn new(options: &Options) -> Self {
        let limits = &options.limits;
        // 2^`log` numbers from `first` on, but none above `most`.
        let numbers = |first: u32, log: u8, most: u32| first..=most.min(first + (1 << log) - 1);
        Self {
            uars: ObjectTable::new("UAR", bar0::UARS),
            uctxs: ObjectTable::new("user context", 1..=1023),
            umems: ObjectTable::new("umem", 1..=0xffff),
            pds: ObjectTable::new("PD", numbers(1, limits.log_max_pd, 0xffff)),
            xrcds: ObjectTable::new("XRC domain", 1..=0xffff),
            transport_domains: ObjectTable::new("transport domain", 1..=0xff),
            q_counters: ObjectTable::new("counter set", 1..=0xff),
            flow_counters: ObjectTable::new("flow counter", 1..=0xffff),
            mkeys: match options.exposed {
                None => ObjectTable::new("mkey", numbers(0x100, limits.log_max_mkey, 0x1_ffff)),
                Some(random) => {
                    ObjectTable::drawn("mkey", 0x100..=0xff_ffff, 1 << limits.log_max_mkey, random)
                }
            },
            data_direct: false,
            listed_pages: ListedPages::default(),
            mkey_lists: 0,
            ranges: Cell::default(),
            recent: RefCell::default(),
            cost: Cost::default(),
            eqs: ObjectTable::new("EQ", 1..=63),
            cqs: ObjectTable::new("CQ", numbers(0x400, limits.log_max_cq, 0xffff)),
            // Doorbells name queue pairs and raw send queues by numbers of one space.
            qps: match options.exposed {
                None => ObjectTable::new("QP", numbers(0x40, limits.log_max_qp, 0xffff)),
                // Behind those of send queues; the last one is that of multicast.
                Some(random) => {
                    ObjectTable::drawn("QP", 0x2_0000..=0xff_fffe, 1 << limits.log_max_qp, random)
                }
            },
            sqs: ObjectTable::new("SQ", 0x1_0000..=0x1_ffff),
            srqs: ObjectTable::new("SRQ", numbers(1, limits.log_max_srq, 0xffff)),
            // RQ tables name RQs and virtqueues by numbers of one space.
            rqs: ObjectTable::new("RQ", 1..=0xffff),
            virtqs: ObjectTable::new("virtqueue", 0x2_0000..=0x2_0000 + virtq::MOST - 1),
            tises: ObjectTable::new("TIS", 1..=0xfff),
            tirs: ObjectTable::new("TIR", 1..=0xfff),
            rqts: ObjectTable::new("RQ table", 1..=0x3ff),
            flow_tables: ObjectTable::new("flow table", 1..=0xff),
            flow_roots: flow_table::FlowTableRoots::default(),
            multicast_groups: mcg::MulticastGroups::default(),
            memic: memic::Memic::default(),
        }
    }

    /// A kind of object that a user context still owns. UAR pages do not count.
    pub(crate) fn left_by(&self, uid: u32) -> Option<&'static str> {
        macro_rules! first {
            ($($table:ident)*) => {
                $(if self.$table.owned_by(uid) { return Some(self.$table.kind()) })*
            };
        }
        first!(umems pds xrcds transport_domains q_counters flow_counters mkeys cqs qps srqs);
        first!(rqs sqs tises tirs rqts virtqs flow_tables);
        None
    }

    /// The number of objects, by kind.
    pub fn counts(&self) -> Vec<(&'static str, usize)> {
        let cached = self.cached_mkeys();
        vec![
            (self.uars.kind(), self.uars.len()),
            (self.uctxs.kind(), self.uctxs.len()),
            (self.umems.kind(), self.umems.len()),
            (self.pds.kind(), self.pds.len()),
            (self.xrcds.kind(), self.xrcds.len()),
            (self.transport_domains.kind(), self.transport_domains.len()),
            (self.q_counters.kind(), self.q_counters.len()),
            (self.flow_counters.kind(), self.flow_counters.len()),
            (self.mkeys.kind(), self.mkeys.len() - cached),
            (CACHED_MKEY, cached),
            (self.eqs.kind(), self.eqs.len()),
            (self.cqs.kind(), self.cqs.len()),
            (self.qps.kind(), self.qps.len()),
            (self.srqs.kind(), self.srqs.len()),
            (self.rqs.kind(), self.rqs.len()),
            (self.sqs.kind(), self.sqs.len()),
            (self.tises.kind(), self.tises.len()),
            (self.tirs.kind(), self.tirs.len()),
            (self.rqts.kind(), self.rqts.len()),
            (self.virtqs.kind(), self.virtqs.len()),
            (self.flow_tables.kind(), self.flow_tables.len()),
            ("device memory", self.memic.len()),
        ]
    }
}

impl Default for Objects {
    fn default() -> Self {
        Self::new(&Options::default())
    }
}
