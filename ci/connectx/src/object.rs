//! The objects that commands create: each file has one kind, [`Objects`] has them all.

pub mod buffer;
pub mod cq;
pub mod domain;
pub mod eq;
pub mod flow_table;
pub mod mcg;
pub mod memic;
pub mod mkey;
pub mod q_counter;
pub mod qp;
pub mod receive_queue;
pub mod rq;
pub mod rqt;
pub mod send_queue;
pub mod sq;
pub mod srq;
pub mod table;
pub mod tir;
pub mod tis;
pub mod uar;
pub mod uctx;
pub mod umem;

use self::buffer::Listed;
use self::table::Table;
use crate::bar0;
use crate::cost::Cost;
use crate::port::Traffic;

/// All objects of a function.
pub struct Objects {
    pub(crate) uars: Table<uar::Uar>,
    pub(crate) uctxs: Table<uctx::Uctx>,
    pub(crate) umems: Table<umem::Umem>,
    pub(crate) pds: Table<domain::Domain>,
    pub(crate) xrcds: Table<domain::Domain>,
    pub(crate) transport_domains: Table<domain::Domain>,
    pub(crate) counters: Table<q_counter::CounterSet>,
    pub(crate) flow_counters: Table<Traffic>,
    pub(crate) mkeys: Table<mkey::Mkey>,
    /// Pages of all queues and umems.
    pub(crate) listed: Listed,
    /// Bytes of the translation lists of all mkeys.
    pub(crate) mkey_lists: usize,
    /// Cost of the current WQE.
    pub(crate) cost: Cost,
    pub(crate) eqs: Table<eq::Eq>,
    pub(crate) cqs: Table<cq::Cq>,
    pub(crate) qps: Table<qp::Qp>,
    pub(crate) srqs: Table<srq::Srq>,
    pub(crate) rqs: Table<rq::Rq>,
    pub(crate) sqs: Table<sq::Sq>,
    pub(crate) tises: Table<tis::Tis>,
    pub(crate) tirs: Table<tir::Tir>,
    pub(crate) rqts: Table<rqt::Rqt>,
    pub(crate) flow_tables: Table<flow_table::FlowTable>,
    pub(crate) flow_roots: flow_table::Roots,
    pub(crate) groups: mcg::Groups,
    pub(crate) memic: memic::Memic,
}

impl Objects {
    /// A function without objects.
    pub fn new() -> Self {
        Self {
            uars: Table::new("UAR", bar0::UARS),
            uctxs: Table::new("user context", 1..=1023),
            umems: Table::new("umem", 1..=0xffff),
            pds: Table::new("PD", 1..=0xffff),
            xrcds: Table::new("XRC domain", 1..=0xffff),
            transport_domains: Table::new("transport domain", 1..=0xff),
            counters: Table::new("counter set", 1..=0xff),
            flow_counters: Table::new("flow counter", 1..=0xffff),
            mkeys: Table::new("mkey", 0x100..=0x1_ffff),
            listed: Listed::default(),
            mkey_lists: 0,
            cost: Cost::default(),
            eqs: Table::new("EQ", 1..=63),
            cqs: Table::new("CQ", 0x400..=0xffff),
            // Doorbells name queue pairs and raw send queues by numbers of one space.
            qps: Table::new("QP", 0x40..=0xffff),
            sqs: Table::new("SQ", 0x1_0000..=0x1_ffff),
            srqs: Table::new("SRQ", 1..=0xffff),
            rqs: Table::new("RQ", 1..=0xffff),
            tises: Table::new("TIS", 1..=0xfff),
            tirs: Table::new("TIR", 1..=0xfff),
            rqts: Table::new("RQ table", 1..=0x3ff),
            flow_tables: Table::new("flow table", 1..=0xff),
            flow_roots: flow_table::Roots::default(),
            groups: mcg::Groups::default(),
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
        first!(umems pds xrcds transport_domains counters flow_counters mkeys cqs qps srqs);
        first!(rqs sqs tises tirs rqts flow_tables);
        None
    }

    /// How many objects there are, by kind.
    pub fn counts(&self) -> Vec<(&'static str, usize)> {
        vec![
            (self.uars.kind(), self.uars.len()),
            (self.uctxs.kind(), self.uctxs.len()),
            (self.umems.kind(), self.umems.len()),
            (self.pds.kind(), self.pds.len()),
            (self.xrcds.kind(), self.xrcds.len()),
            (self.transport_domains.kind(), self.transport_domains.len()),
            (self.counters.kind(), self.counters.len()),
            (self.flow_counters.kind(), self.flow_counters.len()),
            (self.mkeys.kind(), self.mkeys.len()),
            (self.eqs.kind(), self.eqs.len()),
            (self.cqs.kind(), self.cqs.len()),
            (self.qps.kind(), self.qps.len()),
            (self.srqs.kind(), self.srqs.len()),
            (self.rqs.kind(), self.rqs.len()),
            (self.sqs.kind(), self.sqs.len()),
            (self.tises.kind(), self.tises.len()),
            (self.tirs.kind(), self.tirs.len()),
            (self.rqts.kind(), self.rqts.len()),
            (self.flow_tables.kind(), self.flow_tables.len()),
            ("device memory", self.memic.len()),
        ]
    }
}

impl Default for Objects {
    fn default() -> Self {
        Self::new()
    }
}
