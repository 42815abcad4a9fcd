//! Two connected queue pairs that own the memory of their requests; both in this process, or one in
//! another.

use crate::capability::Capability;
use crate::env;
use crate::helper::{Helper, answer};
use crate::pair::{PATIENCE, gid};
use crate::verdict::{Stop, Verdict, supported};
use std::time::Instant;
use uverbs::owned::{BufferPool, Finished, Memory, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    Access, Context, Endpoint, Handshake, MemoryRegion, ProtectionDomain, QpControl, QpType,
    Remote, Rkey,
};

/// One half.
pub(crate) struct Half {
    pub(crate) qp: OwnedQueuePair<u64>,
    pub(crate) cq: OwnedCompletionQueue<u64>,
    pub(crate) pool: BufferPool,
    pub(crate) pd: ProtectionDomain,
    pub(crate) context: Context,
}

/// The number of requests that each queue holds.
pub(crate) const DEPTH: u32 = 16;

/// A handshake with short timeouts, so that a dead peer is noticed soon.
pub(crate) fn hasty() -> Handshake {
    env::handshake_options().timeout(12).retry_count(3)
}

impl Half {
    pub(crate) fn new() -> Verdict<Half> {
        Half::on(env::open()?)
    }

    pub(crate) fn on(context: Context) -> Verdict<Half> {
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(4096).count(64).remote_read().build()?;
        let mut cq = OwnedCompletionQueue::new(context.cq_builder(128).build()?);
        let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::RC);
        let builder = builder.max_send_wr(DEPTH).max_recv_wr(DEPTH).max_inline_data(64);
        let qp = cq.adopt(supported(builder.build(), Capability::Rc)?)?;
        Ok(Half { qp, cq, pool, pd, context })
    }

    /// The next request that has ended.
    #[track_caller]
    pub(crate) fn wait(&mut self) -> Verdict<Finished<Memory, u64>> {
        wait(&mut self.cq)
    }
}

/// The next request that has ended.
#[track_caller]
pub(crate) fn wait(cq: &mut OwnedCompletionQueue<u64>) -> Verdict<Finished<Memory, u64>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(done) = cq.poll()?.next() {
            return Ok(done);
        }
        if Instant::now() > deadline {
            return Err(Stop::fail(format!("nothing is over after {PATIENCE:?}")));
        }
        std::thread::yield_now();
    }
}

/// Two halves that can send to each other.
pub(crate) fn pair() -> Verdict<(Half, Half)> {
    pair_of(Half::new()?, Half::new()?)
}

/// Connects two halves that exist.
pub(crate) fn pair_of(one: Half, other: Half) -> Verdict<(Half, Half)> {
    let ends = [&one, &other].map(|half| Ok(half.qp.endpoint(&gid(&half.context)?)?));
    let [here, there]: [Verdict<_>; 2] = ends;
    one.qp.handshake(&there?, &hasty())?;
    other.qp.handshake(&here?, &hasty())?;
    Ok((one, other))
}

/// A half in another process, and memory of it that can be read and written.
#[derive(Default)]
pub(crate) struct Far(Option<(Half, MemoryRegion<u8>)>);

/// Bytes of the memory.
pub(crate) const FAR_BYTES: usize = 1 << 20;

impl Far {
    /// Carries out a command of the helper, after the word `lent`.
    pub(crate) fn obey(&mut self, line: &str) -> Verdict {
        match (line.split_once(' ').unwrap_or((line, "")), &self.0) {
            (("open", ""), None) => {
                let half = Half::new()?;
                let mut memory =
                    half.pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(FAR_BYTES)?;
                memory.copy_from(0, &vec![7; FAR_BYTES])?;
                let endpoint = half.qp.endpoint(&gid(&half.context)?)?;
                let remote = memory.remote(0)?;
                answer(&format!("{} {} {}", print(&endpoint), remote.addr, remote.rkey.0));
                self.0 = Some((half, memory));
            }
            (("connect", endpoint), Some((half, _))) => {
                half.qp.handshake(&parse(endpoint)?, &hasty())?;
                answer("connected");
            }
            _ => return Err(Stop::fail(format!("{line:?} makes no sense now"))),
        }
        Ok(())
    }
}

/// Connects `qp` to a half that the helper makes, and returns its memory.
pub(crate) fn far(helper: &mut Helper, context: &Context, qp: &QpControl) -> Verdict<Remote> {
    helper.tell("lent open")?;
    let line = helper.hear("")?;
    let fields: Vec<&str> = line.split(' ').collect();
    let [endpoint, addr, rkey] = fields[..] else {
        return Err(Stop::fail(format!("{line:?} is no half")));
    };
    let here = qp.endpoint(&gid(context)?)?;
    helper.tell(&format!("lent connect {}", print(&here)))?;
    helper.hear("connected")?;
    qp.handshake(&parse(endpoint)?, &hasty())?;
    Ok(Remote { addr: addr.parse()?, rkey: Rkey(rkey.parse()?) })
}

fn print(endpoint: &Endpoint) -> String {
    endpoint.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse(text: &str) -> Verdict<Endpoint> {
    let mut bytes = [0; Endpoint::BYTES];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits)?, 16)?;
    }
    Endpoint::from_bytes(&bytes).ok_or_else(|| Stop::fail(format!("{text:?} is no endpoint")))
}
