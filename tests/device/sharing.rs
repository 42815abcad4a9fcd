//! Contexts and objects that processes share. Exporter and importer are separate programs: a forked child would inherit
//! facts that an importer has to receive.

use crate::capability::Capability;
use crate::census::{census, registers};
use crate::env;
use crate::heir::{self, take_over};
use crate::pair::{PATIENCE, SILENCE, gid};
use crate::partner::{Loop, Partner, parse, print};
use crate::verdict::{Stop, Verdict, trials};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use uverbs::device::DriverId;
use uverbs::{
    Access, Context, Errno, EventSource, EventType, Foreign, Imported, MemoryRegion, ObjectKind,
    ProtectionDomain, QpType, RecvWr, SendWr, WcStatus,
};

trials![
    files_without_a_context_are_refused,
    context_is_passed_over_a_socket,
    context_file_without_envelope_is_imported,
    context_file_is_taken_from_a_process_by_pidfd,
    memory_of_the_exporter_is_reached,
    eight_importers_at_once,
    ownership_moves_to_the_importer,
    region_destroyed_by_both_frees_its_memory_once,
    keys_end_with_the_destroyed_region,
    stale_envelopes_are_refused,
    envelopes_of_other_contexts_are_refused,
    envelopes_of_other_devices_are_refused,
    foreign_queues_are_destroyed,
    killed_importer_leaves_its_objects_to_the_file,
    killed_exporter_leaves_its_objects_to_the_file,
    exporter_killed_while_an_importer_writes,
    nothing_is_left_in_any_order_of_leaving,
    events_arrive_where_the_object_was_made,
    without_files_nothing_is_imported,
    more_handles_than_the_kernel_lists,
];

const BYTES: usize = 1 << 16;

/// A context with a domain and memory to share.
struct Exporter {
    region: MemoryRegion,
    pd: ProtectionDomain,
    context: Context,
}

impl Exporter {
    fn new() -> Verdict<Exporter> {
        let context = env::open()?;
        let pd = context.alloc_pd()?;
        let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
        Ok(Exporter { region, pd, context })
    }

    fn partner(&self) -> Verdict<Partner> {
        Partner::importing(&self.context, &self.pd, &self.region)
    }

    fn fill(&mut self, at: usize, length: usize, seed: u64) -> Verdict {
        Ok(self.region.copy_from(at, &crate::pattern::bytes(seed, length))?)
    }

    #[track_caller]
    fn check(&self, at: usize, length: usize, seed: u64) -> Verdict {
        let mut bytes = vec![0; length];
        self.region.copy_to(at, &mut bytes)?;
        crate::pattern::check(&bytes, seed);
        Ok(())
    }
}

fn refusal(errno: Errno) -> String {
    errno.raw_os_error().to_string()
}

fn files_without_a_context_are_refused() -> Verdict {
    let errno = |fd: OwnedFd| Context::import(fd).unwrap_err().errno();
    let (reader, _writer) = rustix::pipe::pipe()?;
    assert_eq!(errno(reader), Errno::INVAL);
    assert_eq!(errno(std::fs::File::open("/proc/self/exe")?.into()), Errno::INVAL);
    assert_eq!(errno(std::fs::File::open("/dev/null")?.into()), Errno::NODEV);
    // An open device node without a context of the kernel.
    env::node()?;
    let name = env::device().uverbs_name().expect("a device that was opened").to_owned();
    let node =
        std::fs::File::options().read(true).write(true).open(format!("/dev/infiniband/{name}"))?;
    let error = Context::import(node.into()).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_device", Errno::INVAL), "{error}");
    Ok(())
}

fn context_is_passed_over_a_socket() -> Verdict {
    let exporter = Exporter::new()?;
    let mut partner = Partner::start()?;
    let vectors = partner.import(&exporter.context)?;
    assert_eq!(vectors, exporter.context.completion_vectors().to_string());
    // The file is the same, so both see the same objects.
    assert_eq!(partner.ask("census", "census")?, "1 1");
    let _second = exporter.context.alloc_pd()?;
    assert_eq!(partner.ask("census", "census")?, "2 1");
    partner.dismiss()
}

fn context_file_without_envelope_is_imported() -> Verdict {
    let exporter = Exporter::new()?;
    let mut partner = Partner::start()?;
    partner.tell_with("bare", &exporter.context.share()?)?;
    let vectors: u32 = partner.hear("imported")?.parse()?;
    assert!((1..=exporter.context.completion_vectors()).contains(&vectors), "{vectors}");
    partner.ask(&format!("pd {}", print(&exporter.pd.export()?)), "pd")?;
    partner.ask(&format!("mr {}", print(&exporter.region.export()?)), "mr")?;
    assert_eq!(partner.ask("copy 0 8192 4096", "copied")?, "0");
    Ok(())
}

/// The other way round: the partner has the context, and the test takes it.
fn context_file_is_taken_from_a_process_by_pidfd() -> Verdict {
    env::processes()?;
    let mut partner = Partner::start()?;
    let device = env::device();
    partner.tell(&format!("export {BYTES} {}", device.name()))?;
    let (text, sent) = partner.hear_with("exported")?;
    let sent = sent.ok_or_else(|| Stop::fail("no file came along"))?;
    let words: Vec<&str> = text.split(' ').collect();
    // The test tries the partner's descriptors: the first one of the device is the context's.
    let pid = Pid::from_raw(partner.id()? as i32).expect("a process");
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    let number = rustix::fs::fstat(&sent)?.st_rdev;
    let taken = (3..64).find_map(|fd| {
        let file = pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).ok()?;
        (rustix::fs::fstat(&file).ok()?.st_rdev == number).then_some(file)
    });
    let taken = taken.ok_or_else(|| Stop::fail("no file of the device in the partner"))?;
    let context = Context::import_exported(taken, &parse(words[0])?)?;
    let pd = context.import_pd(&parse(words[1])?)?;
    let region = pd.import_mr(&parse(words[2])?)?;
    assert_eq!(region.byte_len(), BYTES);
    drop(sent);
    // By its keys, the memory of the partner is filled from here.
    let mut own = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
    own.copy_from(0, &crate::pattern::bytes(5, 4096))?;
    let mut path = Loop::new(&context, &pd)?;
    assert_eq!(path.write(own.sge(..)?, region.remote(0)?)?, WcStatus::SUCCESS);
    partner.ask("pattern 5 4096", "checked")?;
    Ok(())
}

fn memory_of_the_exporter_is_reached() -> Verdict {
    let mut exporter = Exporter::new()?;
    let doorbells = registers(&exporter.context)?;
    let mut partner = exporter.partner()?;
    let before = census(&exporter.context)?;
    for seed in 0..5 {
        exporter.fill(0, 10_000, seed)?;
        exporter.fill(20_000, 10_000, 99)?;
        assert_eq!(partner.ask("copy 0 20000 10000", "copied")?, "0");
        exporter.check(20_000, 10_000, seed)?;
    }
    partner.ask("unimport", "unimported")?;
    assert_eq!(census(&exporter.context)?, before);
    // Objects that the partner only forgot are still there.
    assert_eq!(exporter.context.handles(ObjectKind::MR)?, [exporter.region.handle()]);
    partner.dismiss()?;
    // Nor did it leave the doorbell pages that it rang.
    assert_eq!(registers(&exporter.context)?, doorbells);
    Ok(())
}

fn eight_importers_at_once() -> Verdict {
    const EACH: usize = BYTES / 16;
    let mut exporter = Exporter::new()?;
    let before = census(&exporter.context)?;
    let mut partners = Vec::new();
    for _ in 0..8 {
        let mut partner = Partner::start()?;
        partner.import(&exporter.context)?;
        partners.push(partner);
    }
    for round in 0..6u64 {
        let (pd, mr) = (print(&exporter.pd.export()?), print(&exporter.region.export()?));
        for at in 0..8 {
            exporter.fill(2 * at * EACH, EACH, 100 * round + at as u64)?;
            exporter.fill((2 * at + 1) * EACH, EACH, 99)?;
        }
        // Each command goes to all partners before the test waits for the first answer.
        for (at, partner) in partners.iter_mut().enumerate() {
            partner.tell(&format!("pd {pd}"))?;
            partner.tell(&format!("mr {mr}"))?;
            let (from, to) = (2 * at * EACH, (2 * at + 1) * EACH);
            partner.tell(&format!("copy {from} {to} {EACH}"))?;
            partner.tell("unimport")?;
        }
        for partner in &mut partners {
            partner.hear("pd")?;
            partner.hear("mr")?;
            assert_eq!(partner.hear("copied")?, "0");
            partner.hear("unimported")?;
        }
        for at in 0..8 {
            exporter.check((2 * at + 1) * EACH, EACH, 100 * round + at as u64)?;
        }
        assert_eq!(census(&exporter.context)?, before);
    }
    for partner in partners {
        partner.dismiss()?;
    }
    assert_eq!(exporter.context.leaked(), 0);
    Ok(())
}

fn ownership_moves_to_the_importer() -> Verdict {
    let exporter = Exporter::new()?;
    let Exporter { region, pd, context } = exporter;
    let mut partner = Partner::start()?;
    partner.import(&context)?;
    let (sent, sent_pd) = (region.release()?, pd.release()?);
    assert_eq!(census(&context)?[..2], [1, 1]);
    partner.ask(&format!("pd {}", print(&sent_pd)), "pd")?;
    partner.ask(&format!("mr {}", print(&sent)), "mr")?;
    // The region is destroyed at once, the domain when it is dropped.
    partner.ask("own", "owned")?;
    assert_eq!(census(&context)?[..2], [1, 0]);
    partner.ask("destroy", "destroyed")?;
    assert_eq!(census(&context)?[..2], [0, 0]);
    partner.dismiss()?;
    assert_eq!(context.leaked(), 0);
    Ok(())
}

/// Both processes believe that they own the region: the second finds it destroyed, and frees its memory nevertheless.
fn region_destroyed_by_both_frees_its_memory_once() -> Verdict {
    let exporter = Exporter::new()?;
    let mut one = exporter.partner()?;
    let mut two = exporter.partner()?;
    one.ask("own", "owned")?;
    assert_eq!(two.ask("own", "refused into_owner")?, refusal(Errno::NOENT));
    let handle = exporter.region.handle();
    assert!(!exporter.context.handles(ObjectKind::MR)?.contains(&handle));
    let memory = exporter.region.destroy()?;
    assert_eq!(memory.len(), BYTES);
    assert_eq!(exporter.context.leaked(), 0);
    Ok(())
}

fn keys_end_with_the_destroyed_region() -> Verdict {
    let mut exporter = Exporter::new()?;
    let mut partner = exporter.partner()?;
    exporter.fill(0, BYTES, 1)?;
    assert_eq!(partner.ask("copy 0 4096 100", "copied")?, "0");
    let sent = exporter.region.export()?;
    exporter.region.destroy()?;
    // The keys name no memory any more.
    let status: u32 = partner.ask("copy 0 4096 100", "copied")?.parse()?;
    assert_ne!(status, WcStatus::SUCCESS.0);
    let request = format!("mr {}", print(&sent));
    assert_eq!(partner.ask(&request, "refused import_mr")?, refusal(Errno::NOENT));
    partner.ask("unimport", "unimported")?;
    let sent = exporter.pd.export()?;
    exporter.pd.destroy()?;
    let request = format!("pd {}", print(&sent));
    assert_eq!(partner.ask(&request, "refused import_pd")?, refusal(Errno::NOENT));
    Ok(())
}

fn stale_envelopes_are_refused() -> Verdict {
    let exporter = Exporter::new()?;
    let mut partner = Partner::start()?;
    partner.import(&exporter.context)?;
    partner.ask(&format!("pd {}", print(&exporter.pd.export()?)), "pd")?;
    let pd = exporter.pd;
    let (sent, handle) = (exporter.region.export()?, exporter.region.handle());
    exporter.region.destroy()?;
    let request = format!("mr {}", print(&sent));
    assert_eq!(partner.ask(&request, "refused import_mr")?, refusal(Errno::NOENT));
    // The kernel gives the lowest handle that is free.
    let memory = vec![0u8; 100];
    let other = pd.mr_builder().access(Access::LOCAL_WRITE).register(memory)?;
    assert_eq!(other.handle(), handle, "the handle was not reused");
    assert_eq!(partner.ask(&request, "refused import_mr")?, refusal(Errno::STALE));
    // Nor does a stale envelope destroy the new object.
    let destroy = format!("foreign {}", print(&sent));
    assert_eq!(partner.ask(&destroy, "refused find_foreign")?, refusal(Errno::STALE));
    assert_eq!(exporter.context.handles(ObjectKind::MR)?, [handle]);
    other.destroy()?;
    let cq = exporter.context.cq_builder(4).build()?;
    let domain = exporter.context.alloc_pd()?;
    assert!([cq.handle(), domain.handle()].contains(&handle), "the handle was not reused");
    // Another kind of object has the number.
    assert_eq!(partner.ask(&request, "refused import_mr")?, refusal(Errno::INVAL));
    assert_eq!(partner.ask(&destroy, "refused find_foreign")?, refusal(Errno::NOENT));
    Ok(())
}

fn envelopes_of_other_contexts_are_refused() -> Verdict {
    let (here, there) = (Exporter::new()?, Exporter::new()?);
    let mut partner = here.partner()?;
    let request = format!("pd {}", print(&there.pd.export()?));
    assert_eq!(partner.ask(&request, "refused import_pd")?, refusal(Errno::XDEV));
    let request = format!("mr {}", print(&there.region.export()?));
    assert_eq!(partner.ask(&request, "refused import_mr")?, refusal(Errno::XDEV));
    let request = format!("pd {}", print(&here.region.export()?));
    assert_eq!(partner.ask(&request, "refused import_pd")?, refusal(Errno::INVAL));
    // The envelope and the file must belong to one device.
    let mut other = Partner::start()?;
    other.tell_with(&format!("import {}", print(&here.pd.export()?)), &here.context.share()?)?;
    assert_eq!(other.hear("refused import_device")?, refusal(Errno::INVAL));
    Ok(())
}

/// A file of one device with the envelope of another's context.
fn envelopes_of_other_devices_are_refused() -> Verdict {
    let (here, there) = (env::open()?, Context::open(&env::second()?)?);
    let doorbells = registers(&here)?;
    let error = Context::import_exported(here.share()?, &there.export()).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("import_device", Errno::XDEV), "{error}");
    assert_eq!(error.kernel_errno(), None, "the kernel was asked");
    assert_eq!(registers(&here)?, doorbells);
    let pd = there.alloc_pd()?;
    assert_eq!(here.import_pd(&pd.export()?).unwrap_err().errno(), Errno::XDEV);
    Ok(())
}

fn foreign_queues_are_destroyed() -> Verdict {
    let exporter = Exporter::new()?;
    let cq = exporter.context.cq_builder(4).build()?;
    let qp = exporter.pd.qp_builder(&cq, &cq, QpType::RC).build()?;
    let srq = exporter.pd.srq_builder(8).build()?;
    let mut partner = exporter.partner()?;
    // The importer queries them first.
    let sent_srq = print(&srq.export()?);
    let state = |state: uverbs::QpState| state.0.to_string();
    let ask = format!("foreign-state {}", print(&qp.export()?));
    assert_eq!(partner.ask(&ask, "state")?, state(uverbs::QpState::RESET));
    let init = uverbs::QpAttr::new()
        .state(uverbs::QpState::INIT)
        .port(env::port())
        .pkey_index(env::pkey_index());
    qp.modify(&init.access(Access::empty()))?;
    assert_eq!(partner.ask(&ask, "state")?, state(uverbs::QpState::INIT));
    let ask = format!("foreign-limits {sent_srq}");
    let limits = srq.query()?;
    assert!(limits.max_wr >= 8, "{limits:?}");
    let told = format!("{} {} {}", limits.max_wr, limits.max_sge, limits.limit);
    assert_eq!(partner.ask(&ask, "limits")?, told);
    let wrong = format!("foreign-state {sent_srq}");
    assert_eq!(partner.ask(&wrong, "refused query_qp")?, refusal(Errno::INVAL));
    partner.ask(&format!("foreign {sent_srq}"), "destroyed")?;
    assert_eq!(partner.ask(&ask, "refused find_foreign")?, refusal(Errno::NOENT));
    drop(srq);
    let (sent_cq, sent_qp) = (print(&cq.export()?), print(&qp.export()?));
    let busy = partner.ask(&format!("foreign {sent_cq}"), "refused destroy_cq")?;
    assert_eq!(busy, refusal(Errno::BUSY));
    let before = census(&exporter.context)?;
    assert_eq!(before[2..4], [1, 1]);
    partner.ask(&format!("foreign {sent_qp}"), "destroyed")?;
    let gone = partner.ask(&format!("foreign {sent_qp}"), "refused find_foreign")?;
    assert_eq!(gone, refusal(Errno::NOENT));
    partner.ask(&format!("foreign {sent_cq}"), "destroyed")?;
    assert_eq!(census(&exporter.context)?[2..4], [0, 0]);
    // Their owner notices with a query, and can drop them.
    assert!(qp.query().is_err());
    drop((qp, cq));
    assert_eq!(exporter.context.leaked(), 0);
    Ok(())
}

#[allow(unsafe_code, reason = "naming objects by their handles is")]
fn killed_importer_leaves_its_objects_to_the_file() -> Verdict {
    env::processes()?;
    let idle = env::resources()?;
    let mut exporter = Exporter::new()?;
    exporter.fill(0, BYTES, 1)?;
    let before = census(&exporter.context)?;
    let doorbells = registers(&exporter.context)?;
    let mut partner = exporter.partner()?;
    partner.ask("flood", "flooding")?;
    std::thread::sleep(SILENCE);
    partner.kill()?;
    // The file is still open, so that the partner's queues are still there; the exporter can destroy them.
    let left = census(&exporter.context)?;
    assert_eq!(left[2..4], [1, 2], "{left:?}");
    for kind in [ObjectKind::QP, ObjectKind::CQ] {
        for handle in exporter.context.handles(kind)? {
            // SAFETY: the exporter has no queues, so these are the partner's, which is dead.
            let object = unsafe { exporter.context.foreign_raw(kind, handle) }?;
            heir::destroy(object)?;
        }
    }
    assert_eq!(census(&exporter.context)?, before);
    for handle in registers(&exporter.context)? {
        if !doorbells.contains(&handle) {
            // SAFETY: these came with the partner, whose queues are gone.
            let page = unsafe { exporter.context.foreign_raw(ObjectKind::MLX5_UAR, handle) }?;
            heir::destroy(page)?;
        }
    }
    assert_eq!(registers(&exporter.context)?, doorbells);
    // The exporter's own objects still work.
    let mut again = exporter.partner()?;
    exporter.fill(0, 4096, 7)?;
    assert_eq!(again.ask("copy 0 8192 4096", "copied")?, "0");
    exporter.check(8192, 4096, 7)?;
    again.kill()?;
    // This time the kernel destroys them, when the file is closed.
    drop(exporter);
    env::settles(&idle)
}

/// The objects that a partner exported.
type Import = (Context, Imported<ProtectionDomain>, Imported<MemoryRegion<u8, Foreign>>);

/// Has a partner export, and imports its objects.
fn imported(partner: &mut Partner) -> Verdict<Import> {
    partner.tell(&format!("export {BYTES} {}", env::device().name()))?;
    let (text, file) = partner.hear_with("exported")?;
    let words: Vec<&str> = text.split(' ').collect();
    let file = file.ok_or_else(|| Stop::fail("no file came along"))?;
    let context = Context::import_exported(file, &parse(words[0])?)?;
    let pd = context.import_pd(&parse(words[1])?)?;
    let region = pd.import_mr(&parse(words[2])?)?;
    Ok((context, pd, region))
}

fn killed_exporter_leaves_its_objects_to_the_file() -> Verdict {
    env::processes()?;
    let idle = env::resources()?;
    {
        let mut partner = Partner::start()?;
        let (context, pd, region) = imported(&mut partner)?;
        let mut path = Loop::new(&context, &pd)?;
        assert_eq!(path.write(region.sge(..4096)?, region.remote(4096)?)?, WcStatus::SUCCESS);
        partner.kill()?;
        // Its memory stays registered, and its pages stay where they are, as long as the file does.
        let mut own = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(4096)?;
        own.copy_from(0, &crate::pattern::bytes(3, 4096))?;
        assert_eq!(path.write(own.sge(..)?, region.remote(0)?)?, WcStatus::SUCCESS);
        own.copy_from(0, &crate::pattern::bytes(4, 4096))?;
        assert_eq!(path.write(region.sge(..4096)?, own.remote(0)?)?, WcStatus::SUCCESS);
        let mut back = [0; 4096];
        own.copy_to(0, &mut back)?;
        crate::pattern::check(&back, 3);
        // The heir destroys it.
        take_over(region)?;
        assert_eq!(context.handles(ObjectKind::MR)?, [own.handle()]);
    }
    env::settles(&idle)
}

fn exporter_killed_while_an_importer_writes() -> Verdict {
    env::processes()?;
    let idle = env::resources()?;
    for _ in 0..3 {
        let mut exporter = Partner::start()?;
        let (context, pd, region) = imported(&mut exporter)?;
        let own = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
        let mut path = Loop::new(&context, &pd)?;
        let killer = std::thread::spawn(move || {
            std::thread::sleep(SILENCE / 4);
            exporter.kill().is_ok()
        });
        let mut rounds = 0;
        while !killer.is_finished() || rounds < 10 {
            let status = path.write(own.sge(..)?, region.remote(0)?)?;
            assert_eq!(status, WcStatus::SUCCESS, "after {rounds}");
            rounds += 1;
        }
        assert!(killer.join().expect("a thread that ends"), "killed");
    }
    env::settles(&idle)
}

fn nothing_is_left_in_any_order_of_leaving() -> Verdict {
    let idle = env::resources()?;
    for first_to_go in 0..3 {
        let exporter = Exporter::new()?;
        let mut partners = [exporter.partner()?, exporter.partner()?];
        for partner in &mut partners {
            assert_eq!(partner.ask("copy 0 4096 64", "copied")?, "0");
        }
        let mut exporter = Some(exporter);
        for step in 0..3 {
            match (first_to_go + step) % 3 {
                0 => partners[0].kill()?,
                1 => partners[1].kill()?,
                _ => exporter = None,
            }
            if step < 2 {
                assert_ne!(env::resources()?, idle, "the file is open");
            }
        }
        assert!(exporter.is_none());
        env::settles(&idle)?;
    }
    Ok(())
}

/// Makes a shared receive queue raise its event, and waits for it.
pub(crate) fn raise_limit(context: &Context, pd: &ProtectionDomain) -> Verdict<String> {
    let mut srq = pd.srq_builder(8).build()?;
    let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(64)?;
    #[allow(unsafe_code, reason = "ringing is")]
    {
        let mut batch = srq.batch()?;
        batch.push(RecvWr::new(&[memory.sge(..)?]).id(1))?;
        // SAFETY: nothing else uses the memory.
        unsafe { batch.ring()? };
    }
    srq.set_limit(1)?;
    let cq = context.cq_builder(8).build()?;
    let make = || pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build();
    let (mut left, right) = (make()?, make()?);
    let gid = gid(context)?;
    let (here, there) = (left.endpoint(&gid)?, right.endpoint(&gid)?);
    env::handshake(&left, &there)?;
    env::handshake(&right, &here)?;
    let mut batch = left.send_batch()?;
    batch.push(SendWr::send(&[]).signaled())?;
    #[allow(unsafe_code, reason = "ringing is")]
    // SAFETY: the request names no memory.
    unsafe { batch.ring() }?;
    let event = context.next_event(Some(PATIENCE))?;
    let ours = event.is_some_and(|event| {
        event.kind == EventType::SRQ_LIMIT_REACHED && event.source == EventSource::Srq(srq.key())
    });
    Ok(if ours { "event".into() } else { format!("other event {event:?}") })
}

fn events_arrive_where_the_object_was_made() -> Verdict {
    let exporter = Exporter::new()?;
    let mut partner = exporter.partner()?;
    let answer = partner.ask("event", "")?;
    if answer.starts_with("lacking") {
        return Err(Stop::Skip(Capability::SrqLimit, answer));
    }
    assert_eq!(answer, "event");
    partner.ask("announce", "announced")?;
    assert_eq!(exporter.context.try_next_event()?, None, "it is not the exporter's");
    // The exporter's events arrive at the exporter.
    assert_eq!(raise_limit(&exporter.context, &exporter.pd)?, "event");
    partner.ask("quiet", "quiet")?;
    Ok(())
}

fn without_files_nothing_is_imported() -> Verdict {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let exporter = Exporter::new()?;
    let told = exporter.context.export();
    let before = std::fs::read_dir("/proc/self/fd")?.count();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let mut imports = 0;
    // The import needs another file, for events, which exceeds the limit.
    let file = exporter.context.share()?;
    let lowest = file.as_fd().as_raw_fd() as u64 + 1;
    setrlimit(Resource::RLIMIT_NOFILE, lowest, hard)?;
    let shared = exporter.context.share().map(drop).map_err(|error| error.errno());
    let refused = Context::import_exported(file, &told).map(|_| imports += 1);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    assert_eq!(shared, Err(Errno::MFILE));
    let error = refused.unwrap_err();
    assert_eq!((error.errno(), imports), (Errno::MFILE, 0), "{error}");
    assert_eq!(std::fs::read_dir("/proc/self/fd")?.count(), before, "open files");
    // With room for files again, the import succeeds.
    Context::import_exported(exporter.context.share()?, &told)?;
    Ok(())
}

/// The kernel lists as many handles as fit into 16 bits of length; imports work beyond.
fn more_handles_than_the_kernel_lists() -> Verdict {
    // Protection domains of firmware are slow to make: there, a list of a few pages is enough.
    let many = if env::device().driver() == Some(DriverId::RXE) { 16_500 } else { 300 };
    let exporter = Exporter::new()?;
    let mut domains = Vec::with_capacity(many);
    for _ in 0..many {
        match exporter.context.alloc_pd() {
            Ok(pd) => domains.push(pd),
            // A device with fewer domains can list all of them.
            Err(_) => break,
        }
    }
    let last = domains.last().ok_or_else(|| Stop::fail("no domain at all"))?;
    let mut partner = Partner::start()?;
    partner.import(&exporter.context)?;
    let handle: u32 = partner.ask(&format!("pd {}", print(&last.export()?)), "pd")?.parse()?;
    assert_eq!(handle, last.handle());
    // The kernel can list the few regions, so that a destroyed one is noticed.
    let gone = exporter.region.export()?;
    drop(exporter.region);
    let request = format!("mr {}", print(&gone));
    assert_eq!(partner.ask(&request, "refused import_mr")?, refusal(Errno::NOENT));
    Ok(())
}
