//! One side of a connection: its queues, its memory, and the other's addresses.

use crate::options::{Options, What};
use lab_bench::Failure;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use uverbs::{
    Access, CompletionQueue, Context, Device, Endpoint, Handshake, MemoryRegion, QpType, QueuePair,
    RecvWr, Remote, Rkey, SendWr, Sge,
};

/// Receives that are posted ahead.
const RECEIVES: u32 = 512;

/// A connected queue pair with all that it needs.
pub(crate) struct TrafficQueues {
    qp: QueuePair,
    sends: CompletionQueue,
    receives: CompletionQueue,
    /// The bytes to send, and behind them those that were received.
    memory: MemoryRegion<u8>,
    size: usize,
    source: [Sge; 1],
    target: [Sge; 1],
    remote: Remote,
    what: What,
    /// Requests that were posted, and receives that still may be.
    posted: u32,
    count: u32,
    receives_left: u32,
    stream: TcpStream,
}

impl TrafficQueues {
    /// Meets the other side, and makes everything ready.
    pub(crate) fn connect(options: &Options) -> Result<TrafficQueues, Failure> {
        let &Options { size, count, what, .. } = options;
        let context = Context::open(&Device::by_name(&options.device)?)?;
        let pd = context.alloc_pd()?;
        let sends = context.cq_builder(options.depth().max(2)).build()?;
        let receives = context.cq_builder(RECEIVES).build()?;
        let qp = pd
            .qp_builder(&sends, &receives, QpType::RC)
            .max_send_wr(options.depth())
            .max_recv_wr(RECEIVES)
            .build()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(2 * size)?;
        let own = qp.endpoint(&context.query_gid(1, options.gid)?)?;
        let mut stream = match &options.host {
            Some(host) => TcpStream::connect((host.as_str(), options.port))?,
            None => TcpListener::bind(("0.0.0.0", options.port))?.accept()?.0,
        };
        stream.set_nodelay(true)?;
        let target = memory.remote(size)?;
        stream.write_all(&own.to_bytes())?;
        stream.write_all(&target.addr.to_be_bytes())?;
        stream.write_all(&target.rkey.0.to_be_bytes())?;
        let mut endpoint = [0; Endpoint::BYTES];
        let (mut addr, mut rkey) = ([0; 8], [0; 4]);
        stream.read_exact(&mut endpoint)?;
        stream.read_exact(&mut addr)?;
        stream.read_exact(&mut rkey)?;
        let peer = Endpoint::from_bytes(&endpoint).ok_or("the other side speaks otherwise")?;
        qp.handshake(&peer, &Handshake::new())?;
        let remote =
            Remote { addr: u64::from_be_bytes(addr), rkey: Rkey(u32::from_be_bytes(rkey)) };
        let source = [memory.sge(..size)?];
        let target = [memory.sge(size..)?];
        let mut side = TrafficQueues {
            qp,
            sends,
            receives,
            memory,
            size,
            source,
            target,
            remote,
            what,
            posted: 0,
            count,
            receives_left: count,
            stream,
        };
        if matches!(what, What::SendLatency | What::SendRate) {
            side.repost(RECEIVES)?;
        }
        side.meet()?;
        Ok(side)
    }

    /// Waits until the other side is here as well.
    fn meet(&mut self) -> Result<(), Failure> {
        self.stream.write_all(&[1])?;
        self.stream.read_exact(&mut [0])?;
        Ok(())
    }

    /// Waits until the other side is done as well.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        self.meet()
    }

    /// Posts receives, each by itself, as perftest does unless it is told otherwise.
    fn repost(&mut self, count: u32) -> Result<(), Failure> {
        let count = count.min(self.receives_left);
        self.receives_left -= count;
        for _ in 0..count {
            let mut batch = self.qp.recv_batch()?;
            batch.push(RecvWr::new(&self.target).id(0))?;
            // SAFETY: the memory lives as long as the queue pair, and nobody borrows it.
            unsafe { batch.ring()? };
        }
        Ok(())
    }

    /// Posts so many requests at once; one in `every` is signaled.
    pub(crate) fn post(&mut self, requests: u32, every: u32) -> Result<(), Failure> {
        let mut batch = self.qp.send_batch()?;
        for _ in 0..requests {
            self.posted += 1;
            let wr = match self.what {
                What::SendLatency | What::SendRate => SendWr::send(&self.source),
                What::WriteLatency | What::WriteRate => SendWr::write(self.remote, &self.source),
                What::ReadLatency => SendWr::read(self.remote, &self.source),
            };
            let signaled = self.posted.is_multiple_of(every) || self.posted == self.count;
            batch.push(if signaled { wr.signaled() } else { wr })?;
        }
        // SAFETY: as above.
        unsafe { batch.ring() }?;
        Ok(())
    }

    /// Completions of sends, as many as there are, up to `most`.
    pub(crate) fn poll_sends(&mut self, most: u32) -> Result<u32, Failure> {
        poll(&mut self.sends, most)
    }

    /// As [`poll_sends`](Self::poll_sends) of receives, which are posted again.
    pub(crate) fn poll_receives(&mut self, most: u32) -> Result<u32, Failure> {
        let found = poll(&mut self.receives, most)?;
        if found > 0 && self.receives_left > 0 {
            self.repost(found)?;
        }
        Ok(found)
    }

    /// Waits for so many completions of sends.
    pub(crate) fn sent(&mut self, count: u32) -> Result<(), Failure> {
        let mut found = 0;
        while found < count {
            found += self.poll_sends(count - found)?;
        }
        Ok(())
    }

    /// Waits for so many receives.
    pub(crate) fn received(&mut self, count: u32) -> Result<(), Failure> {
        let mut found = 0;
        while found < count {
            found += self.poll_receives(count - found)?;
        }
        Ok(())
    }

    /// The last byte that a message of the other side writes.
    pub(crate) fn arrived(&self) -> u8 {
        self.memory.read_at(2 * self.size - 1).unwrap_or(0)
    }

    /// Sets the last byte of the next message.
    pub(crate) fn mark(&mut self, byte: u8) -> Result<(), Failure> {
        Ok(self.memory.write_at(self.size - 1, byte)?)
    }
}

fn poll(cq: &mut CompletionQueue, most: u32) -> Result<u32, Failure> {
    let mut completions = cq.poll()?;
    let mut found = 0;
    while found < most {
        let Some(completion) = completions.next() else { break };
        if !completion.is_success() {
            return Err(format!("a request: {}", completion.status()).into());
        }
        found += 1;
    }
    Ok(found)
}
