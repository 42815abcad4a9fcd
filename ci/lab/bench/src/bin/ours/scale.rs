//! Many objects of this workspace's library.

use lab_bench::Failure;
use lab_bench::path::RUN;
use lab_bench::scale::Scale;
use std::thread;
use std::time::{Duration, Instant};
use uverbs::{
    Access, CompletionQueue, Context, Device, Handshake, MemoryRegion, ProtectionDomain, QpType,
    QueuePair, RawRange, SendWr,
};

/// A device and the objects that were made of it.
pub(crate) struct Ours {
    context: Context,
    pd: ProtectionDomain,
    cqs: Vec<CompletionQueue>,
    qps: Vec<QueuePair>,
    regions: Vec<MemoryRegion<u8, RawRange>>,
    pair: Option<[QueuePair; 2]>,
    shared: CompletionQueue,
    memory: MemoryRegion<u64>,
}

fn qp(pd: &ProtectionDomain, cq: &CompletionQueue, sends: u32) -> Result<QueuePair, Failure> {
    let builder = pd.qp_builder(cq, cq, QpType::RC);
    Ok(builder.max_send_wr(sends).max_recv_wr(16).build()?)
}

impl Scale for Ours {
    fn open(device: &str) -> Result<Self, Failure> {
        let context = Context::open(&Device::by_name(device)?)?;
        let pd = context.alloc_pd()?;
        let shared = context.cq_builder(2 * RUN).build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate(512)?;
        Ok(Ours {
            context,
            pd,
            cqs: Vec::new(),
            qps: Vec::new(),
            regions: Vec::new(),
            pair: None,
            shared,
            memory,
        })
    }

    fn cq(&mut self) -> Result<(), Failure> {
        self.cqs.push(self.context.cq_builder(16).build()?);
        Ok(())
    }

    fn qp(&mut self) -> Result<(), Failure> {
        self.qps.push(qp(&self.pd, &self.shared, 16)?);
        Ok(())
    }

    fn region(&mut self) -> Result<(), Failure> {
        let (start, length) = (self.memory.as_ptr().cast::<u8>(), self.memory.byte_len());
        // SAFETY: the memory outlives the regions, is initialised, and nobody borrows it.
        let region =
            unsafe { self.pd.mr_builder().access(Access::ALL_REMOTE).register_raw(start, length) }?;
        self.regions.push(region);
        Ok(())
    }

    fn poll(&mut self) -> Result<f64, Failure> {
        let pair = match &mut self.pair {
            Some(pair) => pair,
            none => {
                let pair = [qp(&self.pd, &self.shared, RUN)?, qp(&self.pd, &self.shared, RUN)?];
                let gid = self.context.default_gid(1)?;
                let (here, there) = (pair[0].endpoint(&gid)?, pair[1].endpoint(&gid)?);
                pair[0].handshake(&there, &Handshake::new())?;
                pair[1].handshake(&here, &Handshake::new())?;
                none.insert(pair)
            }
        };
        let source = [self.memory.sge(..8)?];
        let target = self.memory.remote(8)?;
        let mut batch = pair[0].send_batch()?;
        for id in 0..RUN {
            batch.push(SendWr::write(target, &source).id(id.into()).signaled())?;
        }
        // SAFETY: the memory lives as long as the queue pairs, and nobody borrows it.
        unsafe { batch.ring() }?;
        thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        let mut found = 0;
        while found < RUN {
            let mut completions = self.shared.poll()?;
            while let Some(completion) = completions.next() {
                if !completion.is_success() {
                    return Err(format!("a write: {}", completion.status()).into());
                }
                found += 1;
            }
            if start.elapsed() > Duration::from_secs(10) {
                return Err(format!("{found} of {RUN} writes").into());
            }
        }
        Ok(start.elapsed().as_nanos() as f64)
    }

    fn threads(&mut self, count: u32) -> Result<(), Failure> {
        let (context, pd) = (&self.context, &self.pd);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..count)
                .map(|_| {
                    scope.spawn(move || -> Result<(), uverbs::Error> {
                        let td = context.alloc_td()?;
                        let parent = pd.parent_domain_builder().thread_domain(&td).build()?;
                        let cq = context.cq_builder(16).build()?;
                        let qp = parent.qp_builder(&cq, &cq, QpType::RC);
                        qp.max_send_wr(16).max_recv_wr(16).build().map(drop)
                    })
                })
                .collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(answer) => answer.map_err(Failure::from),
                Err(_) => Err("a thread panicked".into()),
            })
        })
    }
}
