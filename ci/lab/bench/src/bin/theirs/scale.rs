//! Many objects of rdma-core.

use crate::abi::{Context, Cq, Mr, Pd, Qp, SendWr, Sge, Wc, number};
use crate::endpoint;
use crate::path::{key, link, poll_cq, post_send, success};
use crate::verbs::{Made, Verbs, done};
use lab_bench::Failure;
use lab_bench::path::RUN;
use lab_bench::scale::Scale;
use std::array;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

/// A device and the objects that were made of it.
pub(crate) struct Theirs {
    verbs: Verbs,
    context: Made<Context>,
    pd: Made<Pd>,
    cqs: Vec<Made<Cq>>,
    qps: Vec<Made<Qp>>,
    regions: Vec<Made<Mr>>,
    pair: Option<[Made<Qp>; 2]>,
    shared: Made<Cq>,
    memory: Box<Page>,
    mr: Made<Mr>,
}

/// As large and as aligned as the other side's memory: the cost depends on the pages that it touches.
#[repr(align(4096))]
struct Page([AtomicU64; 512]);

impl Theirs {
    fn make_qp(&self, sends: u32) -> Result<Made<Qp>, Failure> {
        let mut attr = endpoint::attr([self.shared.as_ptr(); 2], &endpoint::small(sends));
        self.verbs.create_qp(&self.pd, &mut attr)
    }
}

impl Scale for Theirs {
    fn open(device: &str) -> Result<Self, Failure> {
        let verbs = Verbs::load()?;
        let context = verbs.open(device)?;
        let pd = verbs.alloc_pd(&context)?;
        let shared = verbs.create_cq(&context, 2 * RUN as c_int)?;
        let memory: Box<Page> = Box::new(Page(array::from_fn(|_| AtomicU64::new(0))));
        let mr = verbs.reg_mr(&pd, &memory.0)?;
        Ok(Theirs {
            verbs,
            context,
            pd,
            cqs: Vec::new(),
            qps: Vec::new(),
            regions: Vec::new(),
            pair: None,
            shared,
            memory,
            mr,
        })
    }

    fn cq(&mut self) -> Result<(), Failure> {
        self.cqs.push(self.verbs.create_cq(&self.context, 16)?);
        Ok(())
    }

    fn qp(&mut self) -> Result<(), Failure> {
        self.qps.push(self.make_qp(16)?);
        Ok(())
    }

    fn region(&mut self) -> Result<(), Failure> {
        self.regions.push(self.verbs.reg_mr(&self.pd, &self.memory.0)?);
        Ok(())
    }

    fn poll(&mut self) -> Result<f64, Failure> {
        if self.pair.is_none() {
            let pair = [self.make_qp(RUN)?, self.make_qp(RUN)?];
            let gid = self.verbs.ipv4_gid(&self.context)?;
            endpoint::connect(&self.verbs, &pair[0], endpoint::qpn(&pair[1]), gid)?;
            endpoint::connect(&self.verbs, &pair[1], endpoint::qpn(&pair[0]), gid)?;
            self.pair = Some(pair);
        }
        let qp = self.pair.as_ref().ok_or("no pair")?[0].as_ptr();
        let (lkey, rkey) = key(&self.mr);
        let at = |word: usize| self.memory.0[word].as_ptr().expose_provenance() as u64;
        let mut sge = Sge { addr: at(0), length: 8, lkey };
        let wr = SendWr {
            wr_id: 0,
            next: null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: number::WR_RDMA_WRITE,
            send_flags: number::SEND_SIGNALED,
            imm_data: 0,
            wr: [at(1), rkey.into(), 0, 0],
            remote_srqn: 0,
            other: [0; 6],
        };
        let mut wrs = vec![wr; RUN as usize];
        link(&mut wrs, |wr, next| wr.next = next);
        done("post_send", post_send(qp, wrs.as_mut_ptr()))?;
        thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        let mut found = 0;
        let mut wcs = [Wc::default(); 16];
        while found < RUN {
            let count = poll_cq(self.shared.as_ptr().cast(), wcs.as_mut_ptr(), 16);
            let count = u32::try_from(count)?;
            wcs.iter().take(count as usize).try_for_each(success)?;
            found += count;
            if start.elapsed() > Duration::from_secs(10) {
                return Err(format!("{found} of {RUN} writes").into());
            }
        }
        Ok(start.elapsed().as_nanos() as f64)
    }

    fn threads(&mut self, count: u32) -> Result<(), Failure> {
        let (verbs, context, pd) = (&self.verbs, &self.context, &self.pd);
        let work = move || -> Result<(), Failure> {
            let td = verbs.alloc_td(context)?;
            let parent = verbs.alloc_parent_domain(context, pd, Some(&td))?;
            let cq = verbs.create_cq(context, 16)?;
            let mut attr = endpoint::attr([cq.as_ptr(); 2], &endpoint::small(16));
            let qp = verbs.create_qp(&parent, &mut attr)?;
            verbs.destroy_qp(qp)?;
            verbs.destroy_cq(cq)?;
            verbs.dealloc_pd(parent)?;
            verbs.dealloc_td(context, td)
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..count)
                .map(|_| scope.spawn(move || work().map_err(|failure| failure.to_string())))
                .collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(answer) => answer.map_err(Failure::from),
                Err(_) => Err("a thread panicked".into()),
            })
        })
    }
}
