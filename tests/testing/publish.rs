//! The tested program of docs/TESTING.md: it publishes records in a reader's memory.
//!
//! A record is written to the reader, and then a flag with the record's number. The reader polls the flag in its own
//! memory, and takes the record when the flag changes. Records use one queue pair, flags another, so that no flag waits
//! behind a large record of another kind.

use uverbs::owned::{BufferPool, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    Access, CompletionQueue, Context, Handshake, MemoryRegion, ProtectionDomain, QpType, QueuePair,
    SendWr,
};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Words of a record, which all are its number.
pub(crate) const RECORD: usize = 7;
/// The place of the flag, behind the record.
const FLAG: usize = RECORD;

pub(crate) struct Reader {
    qps: [QueuePair; 2],
    memory: MemoryRegion<u64>,
    _cq: CompletionQueue,
}

impl Reader {
    pub(crate) fn new(context: &Context) -> Result<Reader> {
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(8).build()?;
        let build = || pd.qp_builder(&cq, &cq, QpType::RC).build();
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate(RECORD + 1)?;
        Ok(Reader { qps: [build()?, build()?], memory, _cq: cq })
    }

    /// The record, if the flag has its number.
    pub(crate) fn take(&self, number: u64) -> Option<Vec<u64>> {
        let flag = self.memory.read_at(FLAG)?;
        (flag == number).then(|| (0..RECORD).filter_map(|at| self.memory.read_at(at)).collect())
    }
}

pub(crate) struct Publisher {
    records: OwnedQueuePair<()>,
    flags: OwnedQueuePair<()>,
    cq: OwnedCompletionQueue<()>,
    pool: BufferPool,
    _pd: ProtectionDomain,
}

impl Publisher {
    /// Connects to a reader.
    pub(crate) fn new(context: &Context, reader: &Reader) -> Result<Publisher> {
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(8 * (RECORD + 1)).count(4).build()?;
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(32).build()?);
        let mut connect = |theirs: &QueuePair| -> Result<_> {
            let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC).max_send_wr(4);
            let qp = builder.build()?;
            let qp = cq.adopt(qp)?;
            let here = qp.endpoint(&context.default_gid(1)?)?;
            let there = theirs.endpoint(&theirs.context().default_gid(1)?)?;
            theirs.handshake(&here, &Handshake::new())?;
            qp.handshake(&there, &Handshake::new())?;
            Ok(qp)
        };
        let [records, flags] = &reader.qps;
        let (records, flags) = (connect(records)?, connect(flags)?);
        Ok(Publisher { records, flags, cq, pool, _pd: pd })
    }

    /// Publishes a record, with a bug: nothing orders the writes of two queue pairs. The polls between them hide it as
    /// long as the network loses no message.
    pub(crate) fn publish(&mut self, reader: &Reader, number: u64) -> Result<()> {
        let record = self.pool.copy(&bytes(number, RECORD))?;
        let mut batch = self.records.send_batch()?;
        batch.push(SendWr::write(reader.memory.remote(0)?, &[]), record, ())?;
        batch.ring()?;
        for _ in 0..8 {
            self.reap()?;
        }
        let flag = self.pool.copy(&bytes(number, 1))?;
        let mut batch = self.flags.send_batch()?;
        batch.push(SendWr::write(reader.memory.remote(8 * FLAG)?, &[]), flag, ())?;
        batch.ring()?;
        Ok(())
    }

    /// Publishes a record: a reliable connection carries out its writes in order.
    pub(crate) fn publish_in_order(&mut self, reader: &Reader, number: u64) -> Result<()> {
        let record = self.pool.copy(&bytes(number, RECORD))?;
        let flag = self.pool.copy(&bytes(number, 1))?;
        let mut batch = self.records.send_batch()?;
        batch.push(SendWr::write(reader.memory.remote(0)?, &[]), record, ())?;
        batch.push(SendWr::write(reader.memory.remote(8 * FLAG)?, &[]), flag, ())?;
        batch.ring()?;
        self.reap()
    }

    /// Publishes a record, with another bug: the flag is the end of the same write, whose bytes have no order.
    pub(crate) fn publish_at_once(&mut self, reader: &Reader, number: u64) -> Result<()> {
        let record = self.pool.copy(&bytes(number, RECORD + 1))?;
        let mut batch = self.records.send_batch()?;
        batch.push(SendWr::write(reader.memory.remote(0)?, &[]), record, ())?;
        batch.ring()?;
        self.reap()
    }

    /// Takes back the buffers of writes that have ended.
    pub(crate) fn reap(&mut self) -> Result<()> {
        for done in self.cq.poll()? {
            if !done.outcome.is_success() {
                return Err(done.outcome.status.to_string().into());
            }
        }
        Ok(())
    }

    /// Whether all buffers are back.
    pub(crate) fn is_idle(&self) -> bool {
        self.pool.idle() == self.pool.count()
    }
}

fn bytes(number: u64, words: usize) -> Vec<u8> {
    number.to_ne_bytes().repeat(words)
}
