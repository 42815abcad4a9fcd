//! Clients read and write values without their server's doing, in one thread that polls and steps the fabric. Each word
//! of a value that a client reads is no older than the last write that had ended; a client's own values are whole. A
//! counter has grown by each addition once. The requests of a queue pair end in order, each gives its memory back, and
//! the peer has the written values.

use crate::harness::{Dice, Fault, Record, Result, Stage, check_objects, connect};
use std::collections::{BTreeSet, VecDeque};
use uverbs::owned::{Buffer, BufferPool, Finished, Memory, OwnedCompletionQueue, OwnedQueuePair};
use uverbs::{
    Access, CompletionQueue, Context, EventType, MemoryRegion, ProtectionDomain, QpType, QueuePair,
    SendWr, WcStatus,
};

const CLIENTS: usize = 2;
const ACTIONS: u64 = 120;
const WORDS: usize = 8;
const BYTES: usize = 8 * WORDS;
/// Requests that a client's queue holds.
const DEPTH: u32 = 8;
const BUFFERS: usize = 16;
/// Words of the region: a counter, a word that is swapped, and then a value for each client.
const COUNTER: usize = 0;
const SWAPPED: usize = 1;
const VALUES: usize = WORDS;

struct Server {
    qps: Vec<QueuePair>,
    region: MemoryRegion<u64>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    context: Context,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write {
        version: u64,
    },
    /// A read of this client's value, not older than this version.
    Read {
        of: usize,
        oldest: u64,
    },
    Add,
    Swap {
        compare: u64,
    },
}

struct Client {
    number: usize,
    qp: Option<OwnedQueuePair<u64>>,
    pool: BufferPool,
    cq: OwnedCompletionQueue<u64>,
    pd: ProtectionDomain,
    context: Context,
    /// The posted requests in order, with their tags.
    posted: VecDeque<(u64, Kind)>,
    next: u64,
    /// The version that the last posted write has.
    newest: u64,
    /// The version of the last write that has ended.
    written: u64,
    /// The last known value of the swapped word.
    seen: u64,
    /// Whether the connection failed.
    broken: bool,
}

/// The knowledge of all clients together.
#[derive(Default)]
struct Known {
    /// Results of additions and swaps that succeeded.
    added: BTreeSet<u64>,
    swapped: u64,
    /// Additions and swaps that may have been carried out.
    unknown_adds: u64,
    unknown_swaps: u64,
    /// The value that was read.
    record: Vec<u8>,
}

/// The value of a client with a version.
fn value(client: usize, version: u64) -> [u64; WORDS] {
    if version == 0 {
        return [0; WORDS];
    }
    let mut dice = Dice::new(version << 8 | client as u64);
    let mut words = [version; WORDS];
    words[1..].iter_mut().for_each(|word| *word = dice.next());
    words
}

fn bytes(words: [u64; WORDS]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

impl Server {
    fn new(stage: &Stage) -> Result<Server> {
        let context = stage.open(1)?;
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(16).build()?;
        let builder = pd.mr_builder().access(Access::ALL_REMOTE);
        let region = builder.allocate::<u64>(VALUES + CLIENTS * WORDS)?;
        let build = || pd.qp_builder(&cq, &cq, QpType::RC).max_recv_wr(1).build();
        let qps = (0..CLIENTS).map(|_| build()).collect::<uverbs::Result<_>>()?;
        Ok(Server { qps, region, cq, pd, context })
    }
}

impl Client {
    fn new(number: usize, context: &Context) -> Result<Client> {
        let context = context.clone();
        let pd = context.alloc_pd()?;
        let pool = pd.buffer_pool_builder(BYTES).count(BUFFERS).build()?;
        let cq = OwnedCompletionQueue::new(context.cq_builder(64).build()?);
        Ok(Client {
            number,
            qp: None,
            pool,
            cq,
            pd,
            context,
            posted: VecDeque::new(),
            next: 0,
            newest: 0,
            written: 0,
            seen: 0,
            broken: false,
        })
    }

    fn connect(&mut self, server: &mut Server) -> Result<()> {
        self.broken = true;
        self.qp = None;
        let (queue, theirs) = (self.cq.queue(), &mut server.qps[self.number]);
        let qp = self.pd.qp_builder(queue, queue, QpType::RC).max_send_wr(DEPTH).build()?;
        let qp = self.cq.adopt(qp)?;
        theirs.reset(&mut [&mut server.cq])?;
        connect(&qp, theirs)?;
        (self.qp, self.broken) = (Some(qp), false);
        Ok(())
    }

    /// Posts some requests in one batch, which may be dropped or forgotten before the device sees it.
    fn post(&mut self, clients: &[u64], server: &Server, dice: &mut Dice) -> Result<()> {
        let Some(qp) = &mut self.qp else { return Ok(()) };
        let mut batch = match qp.send_batch() {
            Ok(batch) => batch,
            // An earlier request failed.
            Err(_) => {
                self.broken = true;
                return Ok(());
            }
        };
        let mut pushed = Vec::new();
        let before = (self.next, self.newest);
        for _ in 0..1 + dice.below(5) {
            let Ok(mut buffer) = self.pool.take() else { break };
            let at = |word: usize| server.region.remote(8 * word);
            let (wr, kind) = match dice.below(10) {
                0..4 => {
                    let version = self.newest + 1;
                    buffer.copy_from_slice(&bytes(value(self.number, version)));
                    let to = at(VALUES + self.number * WORDS)?;
                    (SendWr::write(to, &[]), Kind::Write { version })
                }
                4..7 => {
                    let of = dice.below(CLIENTS as u64) as usize;
                    let oldest = clients[of];
                    buffer.fill(0xdd);
                    (SendWr::read(at(VALUES + of * WORDS)?, &[]), Kind::Read { of, oldest })
                }
                7..9 => {
                    buffer.set_len(8);
                    (SendWr::fetch_add(at(COUNTER)?, 1, &[]), Kind::Add)
                }
                _ => {
                    buffer.set_len(8);
                    let compare = self.seen;
                    let wr = SendWr::compare_swap(at(SWAPPED)?, compare, compare + 1, &[]);
                    (wr, Kind::Swap { compare })
                }
            };
            let result = match dice.happens(40) {
                true => batch.push_unsignaled(wr, buffer, self.next),
                false => batch.push(wr, buffer, self.next),
            };
            // The queue is full.
            if result.is_err() {
                break;
            }
            if let Kind::Write { version } = kind {
                self.newest = version;
            }
            pushed.push((self.next, kind));
            self.next += 1;
        }
        match dice.below(20) {
            0 => drop(batch),
            1 => std::mem::forget(batch),
            _ => {
                if batch.ring().is_err() {
                    self.broken = true;
                }
                self.posted.extend(pushed);
                return Ok(());
            }
        }
        (self.next, self.newest) = before;
        Ok(())
    }

    /// Handles completed requests; returns whether there were any.
    fn poll(
        &mut self,
        newest: &[u64; CLIENTS],
        known: &mut Known,
        dice: &mut Dice,
    ) -> Result<bool> {
        let mut ended: Vec<Finished<Memory, u64>> = Vec::new();
        if dice.happens(50) {
            ended.extend(self.cq.poll()?);
        } else {
            let most = 1 + dice.below(6) as usize;
            self.cq.poll_each(most, |done| ended.extend(done.into_owned()))?;
        }
        let any = !ended.is_empty();
        for done in ended {
            self.take(done, newest, known);
        }
        Ok(any)
    }

    fn take(&mut self, done: Finished<Memory, u64>, newest: &[u64; CLIENTS], known: &mut Known) {
        let Finished { memory, tag, outcome } = done;
        let (posted, kind) = self.posted.pop_front().expect("a request that was posted");
        assert_eq!(tag, posted, "requests end in their order");
        let mut buffer = memory.into_buffer().expect("the request's buffer");
        if outcome.is_success() {
            self.succeed(kind, &buffer, newest, known);
        } else {
            self.broken = true;
            match kind {
                Kind::Add => known.unknown_adds += 1,
                Kind::Swap { .. } => known.unknown_swaps += 1,
                Kind::Write { .. } | Kind::Read { .. } => {}
            }
            known.record.push(if outcome.status == WcStatus::WR_FLUSH_ERR { 1 } else { 2 });
        }
        // The device no longer accesses the buffer.
        buffer.reset();
        buffer.fill(0xee);
    }

    fn succeed(&mut self, kind: Kind, buffer: &Buffer, newest: &[u64; CLIENTS], known: &mut Known) {
        let word = |at: usize| {
            let word = buffer[8 * at..].first_chunk().expect("a whole word");
            u64::from_ne_bytes(*word)
        };
        match kind {
            Kind::Write { version } => {
                assert_eq!(buffer[..], bytes(value(self.number, version)), "what was written");
                self.written = version;
            }
            Kind::Read { of, oldest } => {
                // A read of another client's value may meet its write, and get words of both versions.
                let is_of = |at: usize, version: &u64| value(of, *version)[at] == word(at);
                for at in 0..WORDS {
                    let version = (oldest..=newest[of]).find(|version| is_of(at, version));
                    assert!(version.is_some(), "word {at} of {of} in {oldest}..={}", newest[of]);
                }
                let version = word(0);
                let whole = (0..WORDS).all(|at| is_of(at, &version));
                assert!(whole || of != self.number, "a client's own value is whole");
                known.record.push(version as u8);
            }
            Kind::Add => {
                assert!(known.added.insert(word(0)), "an addition that was carried out twice")
            }
            Kind::Swap { compare } => {
                self.seen = word(0);
                if self.seen == compare {
                    self.seen += 1;
                    known.swapped += 1;
                }
            }
        }
    }

    /// Counts the posted requests as unknown, because the client drops them.
    fn forget_posted(&mut self, known: &mut Known) {
        for (_, kind) in self.posted.drain(..) {
            match kind {
                Kind::Add => known.unknown_adds += 1,
                Kind::Swap { .. } => known.unknown_swaps += 1,
                Kind::Write { .. } | Kind::Read { .. } => {}
            }
        }
    }
}

/// Whether a device reported that it is gone. No request completes then.
fn is_gone(context: &Context) -> bool {
    let mut gone = false;
    loop {
        match context.try_next_event() {
            Ok(Some(event)) => gone |= event.kind == EventType::DEVICE_FATAL,
            Ok(None) => return gone,
            Err(_) => return true,
        }
    }
}

pub(crate) fn run(seed: u64) -> Result<Record> {
    let mut dice = Dice::new(!seed);
    let stage = Stage::new(&mut dice, seed)?;
    let end = play(&stage, &mut dice);
    stage.end();
    while stage.fabric.step() || stage.fabric.advance() {}
    let memory = match end {
        Ok(memory) => memory,
        Err(error) if stage.fault.is_harmless() => {
            return Err(format!("{:?} ends the program: {error}", stage.fault).into());
        }
        Err(error) => error.to_string().into_bytes(),
    };
    check_objects(&stage.fabric).map_err(|error| format!("{:?}: {error}", stage.fault))?;
    Ok(stage.record(memory))
}

fn play(stage: &Stage, dice: &mut Dice) -> Result<Vec<u8>> {
    let mut server = Server::new(stage)?;
    let context = stage.open(0)?;
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        clients.push(Client::new(number, &context)?);
    }
    let mut known = Known::default();
    let ended = act(stage, &mut server, &mut clients, &mut known, dice);
    // Unless the server's device is gone, its memory has the written values.
    let words: Vec<u64> =
        (0..server.region.len()).filter_map(|at| server.region.read_at(at)).collect();
    let pools: Vec<_> = clients.iter().map(|client| client.pool.clone()).collect();
    let all_ended = ended.is_ok() && clients.iter().all(|client| client.posted.is_empty());
    for client in &mut clients {
        client.forget_posted(&mut known);
    }
    drop(clients);
    for pool in pools {
        assert_eq!(pool.idle(), pool.count(), "buffers are lost: {:?}", stage.fault);
    }
    assert_eq!((context.leaked(), server.context.leaked()), (0, 0), "{:?}", stage.fault);
    let adds = known.added.len() as u64;
    assert!((adds..=adds + known.unknown_adds).contains(&words[COUNTER]), "{adds}: {words:?}");
    let swaps = known.swapped;
    assert!((swaps..=swaps + known.unknown_swaps).contains(&words[SWAPPED]), "{swaps}: {words:?}");
    drop(server.pd);
    ended?;
    assert!(all_ended || !stage.fault.is_harmless());
    known.record.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    Ok(known.record)
}

fn act(
    stage: &Stage,
    server: &mut Server,
    clients: &mut [Client],
    known: &mut Known,
    dice: &mut Dice,
) -> Result<()> {
    for client in clients.iter_mut() {
        client.connect(server)?;
    }
    let strikes = dice.below(ACTIONS);
    for action in 0..ACTIONS {
        if action == strikes && !matches!(stage.fault, Fault::FailCall(_)) {
            stage.strike();
        }
        if action == strikes + 10 {
            stage.relieve();
        }
        let newest = [0, 1].map(|at: usize| clients[at].newest);
        let written: Vec<u64> = clients.iter().map(|client| client.written).collect();
        let client = &mut clients[dice.below(CLIENTS as u64) as usize];
        match dice.below(100) {
            0..45 => client.post(&written, server, dice)?,
            45..90 => drop(client.poll(&newest, known, dice)?),
            90..93 => drop(stage.fabric.step()),
            93..95 => drop(stage.fabric.advance()),
            95..97 => {
                // Requests that had not completed end as flushed.
                let Some(mut qp) = client.qp.take() else { continue };
                qp.reset(&mut client.cq)?;
                drop(qp);
                while client.poll(&newest, known, dice)? {}
                assert!(client.posted.is_empty(), "a reset gives everything back");
                client.connect(server)?;
            }
            97..99 => {
                client.qp = None;
                // The queue does not report earlier completions.
                while client.poll_dropped()? {}
                client.forget_posted(known);
                client.connect(server)?;
            }
            _ if client.broken => {
                client.drain(stage, server, &newest, known, dice)?;
                client.connect(server)?;
            }
            _ => {}
        }
    }
    stage.relieve();
    let newest = [0, 1].map(|at: usize| clients[at].newest);
    for client in clients.iter_mut() {
        client.drain(stage, server, &newest, known, dice)?;
    }
    Ok(())
}

impl Client {
    /// Polls a queue whose queue pair was dropped: no completion belongs to a request.
    fn poll_dropped(&mut self) -> Result<bool> {
        Ok(self.cq.poll()?.next().is_some())
    }

    /// Posts a signaled request after unsignaled ones; returns whether there was room.
    fn push_signaled(&mut self, server: &Server) -> Result<bool> {
        let from = server.region.remote(8 * (VALUES + self.number * WORDS))?;
        let kind = Kind::Read { of: self.number, oldest: self.written };
        let Some(qp) = &mut self.qp else { return Ok(false) };
        let Ok(mut batch) = qp.send_batch() else { return Ok(false) };
        let buffer = self.pool.take().expect("fewer requests than buffers");
        if batch.push(SendWr::read(from, &[]), buffer, self.next).is_err() || batch.ring().is_err()
        {
            return Ok(false);
        }
        self.posted.push_back((self.next, kind));
        self.next += 1;
        Ok(true)
    }

    /// Polls until all has ended, or the device is gone.
    fn drain(
        &mut self,
        stage: &Stage,
        server: &Server,
        newest: &[u64; CLIENTS],
        known: &mut Known,
        dice: &mut Dice,
    ) -> Result<()> {
        let mut is_last_signaled = false;
        while !self.posted.is_empty() {
            if self.poll(newest, known, dice)? || stage.fabric.step() || stage.fabric.advance() {
                continue;
            }
            if is_gone(&self.context) {
                return Err("the device is gone".into());
            }
            // The remaining requests are unsignaled.
            assert!(!is_last_signaled, "{:?}: {:?} wait for ever", stage.fault, self.posted);
            is_last_signaled = self.push_signaled(server)?;
            assert!(is_last_signaled, "{:?}: {:?} are left", stage.fault, self.posted);
        }
        Ok(())
    }
}
