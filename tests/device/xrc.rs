//! XRC: domains with a file and without, initiators, targets, and shared receive queues that
//! senders name.

#[cfg(feature = "tokio")]
pub(crate) mod futures;

use crate::capability::Capability;
use crate::env;
use crate::events::GRACE;
use crate::heir;
use crate::pair::{PATIENCE, gid, wait};
use crate::pattern;
use crate::verdict::{Stop, Verdict, supported, trials};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::path::PathBuf;
use std::time::Instant;
use uverbs::owned::{Finished, Memory, OwnedCompletionQueue};
use uverbs::{
    Access, CompletionQueue, Context, Errno, EventSource, EventType, MemoryRegion, ObjectKind,
    PostError, ProtectionDomain, QpControl, QpState, QpType, Qpn, QueuePair, RecvWr, SendWr,
    SharedReceiveQueue, SrqNumber, WcOpcode, WcStatus, XrcDomain, XrcTarget,
};

trials![
    devices_without_xrc_say_so,
    domains_without_a_file_are_private,
    opening_the_domain_of_a_new_file_needs_create,
    file_names_one_domain_in_every_context,
    path_descriptors_are_refused,
    pipes_and_devices_name_domains_too,
    unlinked_file_keeps_its_domain,
    one_file_names_a_domain_of_each_device,
    contradictory_requests_are_refused,
    messages_reach_a_queue_by_its_number,
    reads_writes_and_atomics_complete,
    queues_of_another_domain_are_not_reached,
    targets_are_opened_by_their_number,
    events_go_to_the_creator_of_a_target,
    busy_domains_are_not_closed,
    destroyed_queues_complete_nothing,
    rounds_leave_nothing,
    owned_receives_give_their_memory_back,
];

const BYTES: usize = 1 << 16;

/// Skips on devices without XRC.
pub(crate) fn context() -> Verdict<Context> {
    let context = env::open()?;
    supported(context.xrcd_builder().build(), Capability::Xrc)?;
    Ok(context)
}

/// A file of this test's own.
pub(crate) struct Name(pub(crate) PathBuf);

impl Name {
    pub(crate) fn new(name: &str) -> Name {
        let path = std::env::temp_dir().join(format!("uverbs-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Name(path)
    }

    pub(crate) fn create(&self) -> Verdict<File> {
        Ok(File::create(&self.0)?)
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The receiving half of a connection, and the queues that it delivers to.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) target: XrcTarget,
    pub(crate) srq: SharedReceiveQueue,
    pub(crate) cq: CompletionQueue,
    pub(crate) memory: MemoryRegion,
    pub(crate) xrcd: XrcDomain,
    pd: ProtectionDomain,
}

impl Receiver {
    pub(crate) fn new(context: &Context, xrcd: XrcDomain) -> Verdict<Receiver> {
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
        let cq = context.cq_builder(64).build()?;
        let srq = pd.srq_builder(32).max_sge(2).xrc(&xrcd, &cq).build()?;
        let target = xrcd.create_target()?;
        Ok(Receiver { target, srq, cq, memory, xrcd, pd })
    }

    pub(crate) fn number(&self) -> SrqNumber {
        self.srq.number().expect("the queue is of an XRC domain")
    }

    pub(crate) fn recv(&mut self, wr_id: u64, at: usize, length: usize) -> Verdict {
        let poison = pattern::bytes(pattern::POISON, length);
        self.memory.copy_from(at, &poison)?;
        let sges = [self.memory.sge(at..at + length)?];
        post(&mut self.srq, wr_id, &sges)
    }

    #[track_caller]
    pub(crate) fn expect(&mut self, wr_id: u64, qpn: Qpn, seed: u64, length: usize) -> Verdict {
        let done = wait(&mut self.cq)?;
        assert_eq!((done.status, done.opcode), (WcStatus::SUCCESS, WcOpcode::RECV), "{done:?}");
        assert_eq!((done.wr_id, done.qpn, done.byte_len), (wr_id, qpn, length as u32), "{done:?}");
        let mut bytes = vec![0; length];
        self.memory.copy_to(wr_id as usize * 4096, &mut bytes)?;
        pattern::check(&bytes, seed);
        Ok(())
    }
}

/// Posts a receive.
#[allow(unsafe_code, reason = "ringing is")]
fn post(srq: &mut SharedReceiveQueue, wr_id: u64, sges: &[uverbs::Sge]) -> Verdict {
    let mut batch = srq.batch()?;
    batch.push(RecvWr::new(sges).id(wr_id))?;
    // SAFETY: the program only copies from and to a receiver's memory, which is dropped after its queues.
    unsafe { batch.ring()? };
    Ok(())
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) memory: MemoryRegion,
}

impl Sender {
    pub(crate) fn new(context: &Context) -> Verdict<Sender> {
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
        let cq = context.cq_builder(64).build()?;
        let builder = pd.qp_builder(&cq, &cq, QpType::XRC_INI).max_send_wr(32).max_send_sge(2);
        let qp = builder.max_inline_data(64).build()?;
        Ok(Sender { qp, cq, memory })
    }

    pub(crate) fn message(&mut self, to: SrqNumber, seed: u64, length: usize) -> Verdict {
        self.memory.copy_from(0, &pattern::bytes(seed, length))?;
        let sges = [self.memory.sge(..length)?];
        self.send(SendWr::send(&sges).id(seed).signaled().to_srq(to))?;
        let done = wait(&mut self.cq)?;
        assert_eq!((done.wr_id, done.status), (seed, WcStatus::SUCCESS), "{done:?}");
        assert_eq!((done.opcode, done.qpn), (WcOpcode::SEND, self.qp.qpn()), "{done:?}");
        Ok(())
    }

    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn send(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        let mut batch = self.qp.send_batch()?;
        batch.push(wr)?;
        // SAFETY: as for receives.
        unsafe { batch.ring() }.map_err(PostError::Ring)
    }
}

/// Connects the two halves.
fn connect(context: &Context, sender: &Sender, receiver: &Receiver) -> Verdict {
    let index = gid(context)?;
    let from = sender.qp.endpoint(&index)?;
    let to = receiver.target.endpoint(&index)?;
    env::handshake(&sender.qp, &to)?;
    env::handshake(&receiver.target, &from)?;
    assert_eq!((sender.qp.state(), receiver.target.state()), (QpState::RTS, QpState::RTS));
    Ok(())
}

fn devices_without_xrc_say_so() -> Verdict {
    let context = env::open()?;
    match context.xrcd_builder().build() {
        Ok(domain) => domain.destroy().map_err(|failed| failed.error.into()),
        Err(error) => {
            assert!(error.is_unsupported(), "{error:?}");
            assert!(error.message().contains(env::device().name()), "{error}");
            Ok(())
        }
    }
}

/// Without a file the flags have no effect.
fn domains_without_a_file_are_private() -> Verdict {
    let context = context()?;
    let flags = [OFlags::empty(), OFlags::CREATE, OFlags::EXCL, OFlags::CREATE | OFlags::EXCL];
    let domains = flags.map(|flags| context.xrcd_builder().raw_flags(flags.bits()).build());
    let domains = domains.into_iter().collect::<uverbs::Result<Vec<_>>>()?;
    assert_eq!(context.handles(ObjectKind::XRCD)?.len(), 4);
    for domain in domains {
        domain.destroy()?;
    }
    assert_eq!(context.handles(ObjectKind::XRCD)?, [0u32; 0]);
    Ok(())
}

fn opening_the_domain_of_a_new_file_needs_create() -> Verdict {
    let context = context()?;
    let name = Name::new("none");
    let file = name.create()?;
    for flags in [OFlags::empty(), OFlags::EXCL] {
        let error = context.xrcd_builder().file(&file).raw_flags(flags.bits()).build().unwrap_err();
        assert_eq!(error.kernel_errno(), Some(Errno::AGAIN), "{flags:?}: {error}");
        assert!(error.message().contains("no XRC domain"), "{error}");
    }
    for flags in [OFlags::CREATE, OFlags::CREATE | OFlags::EXCL] {
        let domain = context.xrcd_builder().file(&file).raw_flags(flags.bits()).build()?;
        domain.destroy()?;
        // It was the last user of the domain.
        let error = context.xrcd_builder().file(&file).build().unwrap_err();
        assert_eq!(error.kernel_errno(), Some(Errno::AGAIN), "{error}");
    }
    Ok(())
}

fn file_names_one_domain_in_every_context() -> Verdict {
    let context = context()?;
    // The file names one domain of the device, in every context.
    let other = env::open()?;
    let name = Name::new("some");
    let file = name.create()?;
    let first = context.xrcd_builder().file(&file).create_new().build()?;
    for context in [&context, &other] {
        for flags in [OFlags::EXCL, OFlags::CREATE | OFlags::EXCL] {
            let error =
                context.xrcd_builder().file(&file).raw_flags(flags.bits()).build().unwrap_err();
            assert_eq!(error.kernel_errno(), Some(Errno::INVAL), "{flags:?}: {error}");
            assert!(error.message().contains("already"), "{error}");
        }
    }
    let again = File::open(&name.0)?;
    let second = context.xrcd_builder().file(&again).build()?;
    let third = other.xrcd_builder().file(&file).create().build()?;
    // The file may be closed; the domain lives as long as any context has it open.
    drop((file, again));
    first.destroy()?;
    second.destroy()?;
    let again = File::open(&name.0)?;
    let fourth = context.xrcd_builder().file(&again).build()?;
    drop(third);
    drop(fourth);
    let error = context.xrcd_builder().file(&again).build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::AGAIN), "{error}");
    Ok(())
}

fn path_descriptors_are_refused() -> Verdict {
    let context = context()?;
    let path = rustix::fs::open("/", OFlags::PATH, Mode::empty())?;
    let error = context.xrcd_builder().file(&path).create().build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::BADF), "{error}");
    assert!(error.message().contains("O_PATH"), "{error}");
    Ok(())
}

fn pipes_and_devices_name_domains_too() -> Verdict {
    let context = context()?;
    let (reader, writer) = rustix::pipe::pipe()?;
    let pipe = context.xrcd_builder().file(&reader).create_new().build()?;
    // Both ends are one inode.
    let error = context.xrcd_builder().file(&writer).create_new().build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::INVAL), "{error}");
    let null = File::open("/dev/null")?;
    let device = context.xrcd_builder().file(&null).create().build()?;
    drop((pipe, device));
    Ok(())
}

fn unlinked_file_keeps_its_domain() -> Verdict {
    let context = context()?;
    let name = Name::new("unlinked");
    let old = name.create()?;
    let first = context.xrcd_builder().file(&old).create_new().build()?;
    std::fs::remove_file(&name.0)?;
    // The open file still finds the domain; its path now leads to another file.
    let second = context.xrcd_builder().file(&old).build()?;
    let new = name.create()?;
    let error = context.xrcd_builder().file(&new).build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::AGAIN), "{error}");
    let third = context.xrcd_builder().file(&new).create_new().build()?;
    let number = {
        let receiver = Receiver::new(&context, first)?;
        second.open_target(receiver.target.qpn())?;
        receiver.target.qpn()
    };
    assert_eq!(third.open_target(number).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn one_file_names_a_domain_of_each_device() -> Verdict {
    let here = context()?;
    let there = Context::open(&env::second()?)?;
    let name = Name::new("devices");
    let file = name.create()?;
    let one = here.xrcd_builder().file(&file).create_new().build()?;
    let other = there.xrcd_builder().file(&file).create_new().build()?;
    drop(one);
    // The other device's is untouched.
    let error = here.xrcd_builder().file(&file).build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::AGAIN), "{error}");
    there.xrcd_builder().file(&file).build()?;
    drop(other);
    Ok(())
}

fn contradictory_requests_are_refused() -> Verdict {
    let context = context()?;
    let receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
    let mut sender = Sender::new(&context)?;
    let pd = &receiver.pd;
    let cq = context.cq_builder(8).build()?;
    let refusals = [
        pd.qp_builder(&cq, &cq, QpType::XRC_TGT).build().unwrap_err(),
        pd.qp_builder(&cq, &cq, QpType::RC).srq(&receiver.srq).build().unwrap_err(),
        pd.qp_builder(&cq, &cq, QpType::XRC_INI).srq(&receiver.srq).build().unwrap_err(),
    ];
    for error in refusals {
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
    }
    let elsewhere = env::open()?;
    let cq_there = elsewhere.cq_builder(8).build()?;
    let error = pd.srq_builder(4).xrc(&receiver.xrcd, &cq_there).build().unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    connect(&context, &sender, &receiver)?;
    assert_eq!(sender.send(SendWr::send(&[])), Err(PostError::SrqNumber));
    assert_eq!(sender.qp.recv_batch().map(drop), Err(PostError::Unsupported));
    // Only messages of initiators name a queue.
    let (mut rc, other) = (
        pd.qp_builder(&cq, &cq, QpType::RC).build()?,
        pd.qp_builder(&cq, &cq, QpType::RC).build()?,
    );
    let index = gid(&context)?;
    rc.endpoint(&index)?;
    env::handshake(&rc, &other.endpoint(&index)?)?;
    #[allow(unsafe_code, reason = "ringing is")]
    let posted = {
        let mut batch = rc.send_batch()?;
        let pushed = batch.push(SendWr::send(&[]).to_srq(receiver.number()));
        // SAFETY: the batch took no request, and the request would name no memory.
        pushed.and_then(|()| unsafe { batch.ring() }.map_err(PostError::Ring))
    };
    assert_eq!(posted, Err(PostError::SrqNumber));
    assert_eq!(pd.srq_builder(4).build()?.number(), None);
    let parts = sender.qp.split();
    assert!(parts.recv.is_none());
    sender.qp = QueuePair::join(parts)?;
    Ok(())
}

fn messages_reach_a_queue_by_its_number() -> Verdict {
    let context = context()?;
    let mut one = Receiver::new(&context, context.xrcd_builder().build()?)?;
    let mut sender = Sender::new(&context)?;
    connect(&context, &sender, &one)?;
    // Another queue of the domain, with a completion queue of its own, reached by the same target.
    let cq = context.cq_builder(64).build()?;
    let mut srq = one.pd.srq_builder(32).xrc(&one.xrcd, &cq).build()?;
    let mut cq = cq;
    let other = srq.number().expect("the queue is of an XRC domain");
    assert_ne!(other, one.number());
    for (round, length) in [0, 1, 64, 1000, 1024, 4096].into_iter().enumerate() {
        let (wr_id, seed) = (round as u64, 7 * round as u64);
        one.recv(wr_id, round * 4096, 4096)?;
        sender.message(one.number(), seed, length)?;
        one.expect(wr_id, one.target.qpn(), seed, length)?;
    }
    for round in 0..100u64 {
        if round % 3 == 0 {
            let memory = one.memory.sge(8192..8192 + 100)?;
            post(&mut srq, round, &[memory])?;
            sender.message(other, round, 100)?;
            let done = wait(&mut cq)?;
            assert_eq!((done.wr_id, done.status), (round, WcStatus::SUCCESS), "{done:?}");
            assert_eq!(done.qpn, one.target.qpn(), "{done:?}");
        } else {
            one.recv(round % 3, (round % 3) as usize * 4096, 2000)?;
            sender.message(one.number(), round, 2000)?;
            one.expect(round % 3, one.target.qpn(), round, 2000)?;
        }
    }
    // Inline data, and immediate data.
    one.recv(1, 4096, 64)?;
    let text = pattern::bytes(3, 48);
    let number = one.number();
    sender.send(SendWr::send_imm(&[], 0x1234_5678).inline(&text).signaled().to_srq(number))?;
    assert_eq!(wait(&mut sender.cq)?.status, WcStatus::SUCCESS);
    let done = wait(&mut one.cq)?;
    assert_eq!((done.imm, done.byte_len), (Some(0x1234_5678), 48), "{done:?}");
    Ok(())
}

fn reads_writes_and_atomics_complete() -> Verdict {
    let context = context()?;
    let mut receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
    let mut sender = Sender::new(&context)?;
    connect(&context, &sender, &receiver)?;
    let number = receiver.number();
    let remote = receiver.memory.remote(0)?;
    sender.memory.copy_from(0, &pattern::bytes(5, 10_000))?;
    let expect = |sender: &mut Sender| -> Verdict {
        assert_eq!(wait(&mut sender.cq)?.status, WcStatus::SUCCESS);
        Ok(())
    };
    let sges = [sender.memory.sge(..10_000)?];
    sender.send(SendWr::write(remote, &sges).signaled().to_srq(number))?;
    expect(&mut sender)?;
    let mut bytes = vec![0; 10_000];
    receiver.memory.copy_to(0, &mut bytes)?;
    pattern::check(&bytes, 5);
    let sges = [sender.memory.sge(20_000..30_000)?];
    sender.send(SendWr::read(remote, &sges).signaled().to_srq(number))?;
    expect(&mut sender)?;
    sender.memory.copy_to(20_000, &mut bytes)?;
    pattern::check(&bytes, 5);
    receiver.memory.copy_from(0, &40u64.to_ne_bytes())?;
    let sges = [sender.memory.sge(..8)?];
    sender.send(SendWr::fetch_add(remote, 2, &sges).signaled().to_srq(number))?;
    expect(&mut sender)?;
    let mut word = [0; 8];
    receiver.memory.copy_to(0, &mut word)?;
    assert_eq!(u64::from_ne_bytes(word), 42);
    sender.memory.copy_to(0, &mut word)?;
    assert_eq!(u64::from_ne_bytes(word), 40);
    // A write with immediate data consumes a receive of the queue that it names.
    receiver.recv(1, 4096, 64)?;
    sender.send(SendWr::write_imm(remote, &sges, 9).signaled().to_srq(number))?;
    expect(&mut sender)?;
    let done = wait(&mut receiver.cq)?;
    assert_eq!((done.wr_id, done.imm, done.opcode), (1, Some(9), WcOpcode::RECV_WRITE_IMM));
    Ok(())
}

fn queues_of_another_domain_are_not_reached() -> Verdict {
    let context = context()?;
    let receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
    let mut stranger = Receiver::new(&context, context.xrcd_builder().build()?)?;
    let mut sender = Sender::new(&context)?;
    connect(&context, &sender, &receiver)?;
    stranger.recv(1, 4096, 64)?;
    let sges = [sender.memory.sge(..8)?];
    let number = stranger.number();
    sender.send(SendWr::send(&sges).signaled().to_srq(number))?;
    let done = wait(&mut sender.cq)?;
    assert_eq!(done.status, WcStatus::REM_INV_REQ_ERR, "{done:?}");
    assert_eq!(crate::pair::poll(&mut stranger.cq)?, None, "it arrived in another domain");
    Ok(())
}

fn targets_are_opened_by_their_number() -> Verdict {
    let context = context()?;
    let name = Name::new("targets");
    let file = name.create()?;
    let xrcd = context.xrcd_builder().file(&file).create_new().build()?;
    let mut receiver = Receiver::new(&context, xrcd)?;
    let mut sender = Sender::new(&context)?;
    connect(&context, &sender, &receiver)?;
    let elsewhere = env::open()?;
    let xrcd = elsewhere.xrcd_builder().file(&file).build()?;
    let opened = xrcd.open_target(receiver.target.qpn())?;
    assert_eq!((opened.qpn(), opened.state()), (receiver.target.qpn(), QpState::RTS));
    assert_eq!(opened.qp_type(), QpType::XRC_TGT);
    for wrong in [Qpn(0xff_fff0), sender.qp.qpn()] {
        let error = xrcd.open_target(wrong).unwrap_err();
        assert_eq!((error.verb(), error.errno()), ("open_qp", Errno::INVAL), "{error}");
    }
    let private = elsewhere.xrcd_builder().build()?;
    assert_eq!(private.open_target(opened.qpn()).unwrap_err().errno(), Errno::INVAL);
    // The target outlives the context that made it, and still delivers.
    let fresh = receiver.xrcd.create_target()?;
    let old = std::mem::replace(&mut receiver.target, fresh);
    old.destroy()?;
    receiver.recv(2, 2 * 4096, 100)?;
    sender.message(receiver.number(), 11, 100)?;
    receiver.expect(2, opened.qpn(), 11, 100)?;
    assert_eq!(opened.query()?.state, QpState::RTS);
    let qpn = opened.qpn();
    opened.destroy()?;
    assert_eq!(xrcd.open_target(qpn).unwrap_err().errno(), Errno::INVAL);
    Ok(())
}

fn events_go_to_the_creator_of_a_target() -> Verdict {
    let context = context()?;
    let name = Name::new("openers");
    let file = name.create()?;
    let xrcd = context.xrcd_builder().file(&file).create_new().build()?;
    let receiver = Receiver::new(&context, xrcd)?;
    // It has a context of its own, so that events of the sender do not arrive here.
    let far = env::open()?;
    let mut sender = Sender::new(&far)?;
    connect(&context, &sender, &receiver)?;
    let elsewhere = env::open()?;
    let xrcd = elsewhere.xrcd_builder().file(&file).build()?;
    let opened = xrcd.open_target(receiver.target.qpn())?;
    let sges = [sender.memory.sge(..8)?];
    let remote = receiver.memory.remote(0)?;
    let remote = uverbs::Remote { rkey: uverbs::Rkey(remote.rkey.0 ^ 0xff), ..remote };
    sender.send(SendWr::write(remote, &sges).signaled().to_srq(receiver.number()))?;
    assert_eq!(wait(&mut sender.cq)?.status, WcStatus::REM_ACCESS_ERR);
    let Some(event) = context.next_event(Some(GRACE))? else {
        return Err(Stop::Skip(Capability::QpAccessEvent, "no such event came".into()));
    };
    let source = EventSource::Qp(receiver.target.key());
    assert_eq!((event.kind, event.source), (EventType::QP_ACCESS_ERR, source));
    // Some devices also report that no more receives will be consumed; the error comes once.
    while let Some(event) = context.try_next_event()? {
        assert_eq!((event.kind, event.source), (EventType::QP_LAST_WQE_REACHED, source));
    }
    // By now the kernel has raised the events of all contexts that have it open.
    assert_eq!(elsewhere.try_next_event()?, None);
    assert_eq!(opened.query()?.state, QpState::ERR);
    Ok(())
}

fn busy_domains_are_not_closed() -> Verdict {
    let context = context()?;
    let name = Name::new("busy");
    let file = name.create()?;
    let xrcd = context.xrcd_builder().file(&file).create_new().build()?;
    let Receiver { target, srq, cq, memory, xrcd, pd } = Receiver::new(&context, xrcd)?;
    let envelope = xrcd.export()?;
    let (xrcd, error) = xrcd.destroy().unwrap_err().into_parts();
    assert_eq!((error.errno(), error.kernel_errno()), (Errno::BUSY, None), "{error}");
    // The kernel refuses it, too.
    for _ in 0..2 {
        let (_, error) = heir::destroy(context.foreign(&envelope)?).unwrap_err().into_parts();
        assert_eq!(error.kernel_errno(), Some(Errno::BUSY), "{error}");
    }
    drop(srq);
    assert!(heir::destroy(context.foreign(&envelope)?).is_err(), "a target is left");
    let qpn = target.qpn();
    // Another handle of the domain has no objects of its own, and may be closed.
    let other = context.xrcd_builder().file(&file).build()?;
    other.destroy()?;
    let other = context.xrcd_builder().file(&file).build()?;
    let opened = other.open_target(qpn)?;
    drop(target);
    xrcd.destroy()?;
    let (other, error) = other.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY, "{error}");
    drop(opened);
    other.destroy()?;
    drop((cq, memory, pd));
    assert_eq!(context.leaked(), 0);
    Ok(())
}

/// A queue is destroyed while completions of it are in a completion queue that others use, too. The
/// next queue may get the same index.
fn destroyed_queues_complete_nothing() -> Verdict {
    let context = context()?;
    let mut receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
    let mut sender = Sender::new(&context)?;
    connect(&context, &sender, &receiver)?;
    for round in 0..20 {
        receiver.recv(1, 4096, 100)?;
        sender.message(receiver.number(), round, 100)?;
        // Its completion has been written: the acknowledgement came after it.
        let fresh =
            receiver.pd.srq_builder(32).max_sge(2).xrc(&receiver.xrcd, &receiver.cq).build()?;
        let old = std::mem::replace(&mut receiver.srq, fresh);
        if round % 2 == 0 {
            drop(old);
        } else {
            old.destroy()?;
        }
        receiver.recv(2, 2 * 4096, 100)?;
        sender.message(receiver.number(), 100 + round, 100)?;
        receiver.expect(2, receiver.target.qpn(), 100 + round, 100)?;
        assert_eq!(crate::pair::poll(&mut receiver.cq)?, None);
    }
    Ok(())
}

fn rounds_leave_nothing() -> Verdict {
    let context = context()?;
    let idle = env::resources()?;
    for round in 0..50 {
        let mut receiver = Receiver::new(&context, context.xrcd_builder().build()?)?;
        let mut sender = Sender::new(&context)?;
        if round % 10 == 0 {
            connect(&context, &sender, &receiver)?;
            receiver.recv(0, 0, 64)?;
            sender.message(receiver.number(), round, 64)?;
        }
        // In any order.
        let Receiver { target, srq, cq, memory, xrcd, pd } = receiver;
        match round % 3 {
            0 => drop((xrcd, cq, pd, srq, target, memory)),
            1 => drop((pd, memory, target, srq, cq, xrcd)),
            _ => drop((srq, target, xrcd, memory, pd, cq)),
        }
    }
    env::unchanged(&idle)?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}

/// Connects an initiator to a target.
fn connect_halves(context: &Context, initiator: &QpControl, target: &XrcTarget) -> Verdict {
    let index = gid(context)?;
    let (from, to) = (initiator.endpoint(&index)?, target.endpoint(&index)?);
    env::handshake(initiator, &to)?;
    env::handshake(target, &from)?;
    Ok(())
}

/// Waits for the next request that is over.
fn next_of(cq: &mut OwnedCompletionQueue<u32>) -> Verdict<Finished<Memory, u32>> {
    let start = Instant::now();
    loop {
        if let Some(done) = cq.poll()?.next() {
            return Ok(done);
        }
        if start.elapsed() > PATIENCE {
            return Err(Stop::fail(format!("no completion after {PATIENCE:?}")));
        }
    }
}

/// Two shared receive queues of one completion queue get their own messages, one after the other.
fn owned_receives_give_their_memory_back() -> Verdict {
    let context = context()?;
    let pd = context.alloc_pd()?;
    let xrcd = context.xrcd_builder().build()?;
    let pool = pd.buffer_pool_builder(64).count(16).build()?;
    let mut cq = OwnedCompletionQueue::new(context.cq_builder(64).build()?);
    let other = context.cq_builder(64).build()?;
    let plain = pd.srq_builder(4).build()?;
    assert_eq!(cq.adopt_srq(plain).unwrap_err().error.errno(), Errno::INVAL);
    let elsewhere = pd.srq_builder(4).xrc(&xrcd, &other).build()?;
    assert_eq!(cq.adopt_srq(elsewhere).unwrap_err().error.errno(), Errno::INVAL);
    let deep = pd.srq_builder(500).xrc(&xrcd, cq.queue()).build()?;
    let error = cq.adopt_srq(deep).unwrap_err().error;
    assert!(error.message().contains("larger"), "{error}");
    let target = xrcd.create_target()?;
    let builder = pd.qp_builder(cq.queue(), cq.queue(), QpType::XRC_INI).max_send_wr(8);
    let mut initiator = cq.adopt(builder.build()?)?;
    connect_halves(&context, &initiator, &target)?;
    let mut queues = Vec::new();
    for _ in 0..2 {
        let srq = pd.srq_builder(4).xrc(&xrcd, cq.queue()).build()?;
        queues.push(cq.adopt_srq(srq)?);
    }
    for (srq, tag) in queues.iter_mut().zip([10, 20]) {
        let mut batch = srq.batch()?;
        for more in 0..2 {
            batch.push(pool.take().expect("a buffer"), tag + more)?;
        }
        batch.ring()?;
    }
    for (tag, queue, text) in [(20, 1, "to the second"), (10, 0, "to the first")] {
        let number = queues[queue].queue().number().expect("it is of an XRC domain");
        let mut batch = initiator.send_batch()?;
        let buffer = pool.copy(text.as_bytes()).expect("a buffer");
        batch.push(SendWr::send(&[]).to_srq(number), buffer, 1)?;
        batch.ring()?;
        let mut done = [next_of(&mut cq)?, next_of(&mut cq)?];
        done.sort_by_key(|done| done.tag);
        let [sent, received] = done;
        assert_eq!((sent.tag, sent.outcome.status), (1, WcStatus::SUCCESS));
        assert_eq!((received.tag, received.outcome.status), (tag, WcStatus::SUCCESS));
        assert_eq!(received.outcome.qpn, target.qpn());
        let filled = received.outcome.filled();
        let buffer = received.memory.into_buffer().expect("a buffer");
        assert_eq!(&buffer[..filled], text.as_bytes());
    }
    assert_eq!((pool.idle(), cq.unmatched()), (14, 0));
    // The destruction of a queue frees its lent memory, and makes room in the completion queue.
    for _ in 0..40 {
        queues.clear();
        assert_eq!((pool.idle(), context.leaked()), (16, 0));
        let srq = pd.srq_builder(4).xrc(&xrcd, cq.queue()).build()?;
        queues.push(cq.adopt_srq(srq)?);
        let mut batch = queues[0].batch()?;
        batch.push(pool.take().expect("a buffer"), 7)?;
        batch.ring()?;
        assert_eq!(pool.idle(), 15);
    }
    drop((queues, initiator));
    assert_eq!((pool.idle(), context.leaked()), (16, 0));
    Ok(())
}
