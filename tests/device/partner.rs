//! A second process that shares a context with a test, as exporter or importer: this program once more, which carries
//! out commands from a socket and answers over the same. Files travel along.
//!
//! It is started, not forked: it has only those facts of the other's memory that it received. If the device is in this
//! process, the partner is a thread of it.

use crate::env;
use crate::heir::{self, take_over};
use crate::pair::PATIENCE;
use crate::pattern;
use crate::sharing::raise_limit;
use crate::verdict::{Stop, Verdict};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use std::process::{Child, ExitCode, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uverbs::mlx5::{DoorbellPage, ImportedVar, Var, VarKind};
use uverbs::{
    Access, CompletionQueue, Context, Device, Envelope, ErrorWith, Foreign, Imported, MemoryRegion,
    Notify, ObjectKind, ProtectionDomain, QpType, QueuePair, RecvWr, Remote, SendWr, Sge, WcStatus,
    passing,
};

/// The first argument of a program that is to be a partner.
const PARTNER: &str = "--partner";
const MESSAGE: usize = 4096;

/// One end of the socket.
#[derive(Debug)]
pub(crate) struct Wire(OwnedFd);

impl Wire {
    pub(crate) fn send(&self, line: &str, file: Option<&OwnedFd>) -> Verdict {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        passing::send_files(&self.0, line.as_bytes(), &files)?;
        Ok(())
    }

    /// The next message; `None` when the other end is closed.
    pub(crate) fn receive(&self) -> Verdict<Option<(String, Option<OwnedFd>)>> {
        let mut bytes = [0; MESSAGE];
        let received = passing::receive_files(&self.0, &mut bytes)?;
        let (got, file) = (received.length, received.files.into_iter().last());
        if got == 0 {
            return Ok(None);
        }
        Ok(Some((String::from_utf8(bytes[..got].to_vec())?, file)))
    }
}

/// Our end of a socket, with a limit for each answer, and the other end.
pub(crate) fn pair(patience: Duration) -> Verdict<(Wire, OwnedFd)> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(patience))?;
    Ok((Wire(ours), theirs))
}

/// The partner that a test talks to. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Partner {
    who: Who,
    wire: Wire,
}

#[derive(Debug)]
enum Who {
    Process(Child),
    Thread(Option<JoinHandle<bool>>),
}

impl Partner {
    /// Starts a partner.
    pub(crate) fn start() -> Verdict<Partner> {
        let (wire, theirs) = pair(PATIENCE)?;
        if env::on_fabric() {
            let thread = std::thread::spawn(|| serve(&Wire(theirs)));
            return Ok(Partner { who: Who::Thread(Some(thread)), wire });
        }
        let process = env::second_process()?
            .arg(PARTNER)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::inherit())
            .spawn()?;
        Ok(Partner { who: Who::Process(process), wire })
    }

    /// Starts a partner that has imported `context`.
    pub(crate) fn sharing(context: &Context) -> Verdict<Partner> {
        let mut partner = Partner::start()?;
        partner.import(context)?;
        Ok(partner)
    }

    /// As [`sharing`](Self::sharing), with a protection domain and a region of the context.
    pub(crate) fn importing(
        context: &Context,
        pd: &ProtectionDomain,
        region: &MemoryRegion,
    ) -> Verdict<Partner> {
        let mut partner = Partner::sharing(context)?;
        partner.ask(&format!("pd {}", print(&pd.export()?)), "pd")?;
        partner.ask(&format!("mr {}", print(&region.export()?)), "mr")?;
        Ok(partner)
    }

    /// The number of its process.
    pub(crate) fn id(&self) -> Verdict<u32> {
        match &self.who {
            Who::Process(process) => Ok(process.id()),
            Who::Thread(_) => env::processes().map(|()| 0),
        }
    }

    /// Gives it a context.
    pub(crate) fn import(&mut self, context: &Context) -> Verdict<String> {
        self.tell_with(&format!("import {}", print(&context.export())), &context.share()?)?;
        self.hear("imported")
    }

    pub(crate) fn tell(&mut self, line: &str) -> Verdict {
        self.wire.send(line, None)
    }

    pub(crate) fn tell_with(&mut self, line: &str, file: &OwnedFd) -> Verdict {
        self.wire.send(line, Some(file))
    }

    /// Waits for its next answer, which must begin with `word`; returns the rest.
    #[track_caller]
    pub(crate) fn hear(&mut self, word: &str) -> Verdict<String> {
        self.hear_with(word).map(|(rest, _)| rest)
    }

    /// As [`hear`](Self::hear), with the file that came along.
    #[track_caller]
    pub(crate) fn hear_with(&mut self, word: &str) -> Verdict<(String, Option<OwnedFd>)> {
        let (line, file) = self
            .wire
            .receive()?
            .ok_or_else(|| Stop::fail(format!("the partner left in place of {word:?}")))?;
        match line.strip_prefix(word) {
            Some(rest) => Ok((rest.trim().to_owned(), file)),
            None => Err(Stop::fail(format!("the partner says {line:?} in place of {word:?}"))),
        }
    }

    #[track_caller]
    pub(crate) fn ask(&mut self, line: &str, word: &str) -> Verdict<String> {
        self.tell(line)?;
        self.hear(word)
    }

    /// Kills it with SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&mut self) -> Verdict {
        let Who::Process(process) = &mut self.who else { return env::processes() };
        process.kill()?;
        process.wait()?;
        Ok(())
    }

    /// Tells it to leave, and waits for it.
    pub(crate) fn dismiss(mut self) -> Verdict {
        self.tell("leave")?;
        self.hear("left")?;
        let deadline = Instant::now() + PATIENCE;
        let mut has_left = || -> Verdict<bool> {
            Ok(match &mut self.who {
                Who::Process(process) => process.try_wait()?.is_some(),
                Who::Thread(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
            })
        };
        while !has_left()? {
            if Instant::now() > deadline {
                return Err(Stop::fail("the partner does not leave"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        match &mut self.who {
            Who::Process(process) => {
                let _ = process.kill();
                let _ = process.wait();
            }
            Who::Thread(thread) => {
                // It leaves when the other end is closed.
                let _ = rustix::net::shutdown(&self.wire.0, rustix::net::Shutdown::Both);
                let _ = thread.take().map(JoinHandle::join);
            }
        }
    }
}

/// An envelope as a word.
pub(crate) fn print(envelope: &Envelope) -> String {
    envelope.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An envelope that came as a word.
pub(crate) fn parse(word: &str) -> Verdict<Envelope> {
    let digits: Vec<char> = word.chars().collect();
    let bytes = digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16))
        .collect::<Result<Vec<u8>, _>>()?;
    Ok(Envelope::from_bytes(&bytes)?)
}

/// Two queue pairs of one process that are connected to each other: a path to memory with only its keys.
#[derive(Debug)]
pub(crate) struct Loop {
    left: QueuePair,
    right: QueuePair,
    cq: CompletionQueue,
}

impl Loop {
    pub(crate) fn new(context: &Context, pd: &ProtectionDomain) -> Verdict<Loop> {
        let cq = context.cq_builder(64).build()?;
        let make = || pd.qp_builder(&cq, &cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build();
        let (left, right) = (make()?, make()?);
        let gid = crate::pair::gid(context)?;
        let (here, there) = (left.endpoint(&gid)?, right.endpoint(&gid)?);
        env::handshake(&left, &there)?;
        env::handshake(&right, &here)?;
        Ok(Loop { left, right, cq })
    }

    /// Copies by RDMA and returns the status.
    pub(crate) fn write(&mut self, from: Sge, to: Remote) -> Verdict<WcStatus> {
        self.post(from, to)?;
        Ok(crate::pair::wait(&mut self.cq)?.status)
    }

    #[allow(unsafe_code, reason = "ringing is")]
    fn post(&mut self, from: Sge, to: Remote) -> Verdict {
        let mut batch = self.left.send_batch()?;
        batch.push(SendWr::write(to, &[from]).signaled())?;
        // SAFETY: the memory is registered, and this process does not read it before the
        // completion.
        unsafe { batch.ring() }?;
        Ok(())
    }

    /// Posts a receive that no message arrives for.
    #[allow(unsafe_code, reason = "ringing is")]
    fn receive(&mut self, into: Sge) -> Verdict {
        let mut batch = self.right.recv_batch()?;
        batch.push(RecvWr::new(&[into]).id(0))?;
        // SAFETY: as for sends.
        unsafe { batch.ring()? };
        Ok(())
    }
}

/// Runs as the partner, if this program was started as one.
pub(crate) fn run() -> Option<ExitCode> {
    if std::env::args().nth(1).as_deref() != Some(PARTNER) {
        return None;
    }
    let wire = match rustix::io::dup(std::io::stdin()) {
        Ok(fd) => Wire(fd),
        Err(_) => return Some(ExitCode::FAILURE),
    };
    Some(if serve(&wire) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Carries out commands; returns whether the last one told it to leave.
fn serve(wire: &Wire) -> bool {
    let mut objects = PartnerObjects::default();
    loop {
        match wire.receive() {
            Ok(Some((line, file))) => {
                if line == "leave" {
                    drop(objects);
                    let _ = wire.send("left", None);
                    return true;
                }
                let (text, file) = match objects.obey(&line, file, wire) {
                    Ok(answer) => answer,
                    Err(Stop::Fail(why)) => (format!("failed {line:.20}: {why}"), None),
                    Err(Stop::Skip(_, why)) => (format!("lacking {why}"), None),
                };
                if wire.send(&text, file.as_ref()).is_err() {
                    return false;
                }
            }
            _ => return false,
        }
    }
}

/// A partner's objects. Fields are dropped in this order.
#[derive(Debug, Default)]
struct PartnerObjects {
    var: PartnerVars,
    dm: crate::mlx5::dm::PartnerMemory,
    devx: crate::mlx5::devx::sharing::PartnerObjects,
    path: Option<Loop>,
    imported: Option<Imported<MemoryRegion<u8, Foreign>>>,
    imported_pd: Option<Imported<ProtectionDomain>>,
    own: Option<MemoryRegion>,
    own_pd: Option<ProtectionDomain>,
    context: Option<Context>,
    xrc: crate::xrc_processes::Half,
}

/// A partner's VARs.
#[derive(Debug, Default)]
struct PartnerVars {
    imported: Option<ImportedVar>,
    own: Option<Var>,
    page: Option<DoorbellPage>,
}

#[allow(unsafe_code, reason = "envelopes of VARs are taken on trust")]
fn import_var(context: &Context, envelope: &Envelope) -> uverbs::Result<ImportedVar> {
    // SAFETY: the test that sent it exported it.
    unsafe { Var::import(context, envelope) }
}

impl PartnerVars {
    fn obey(&mut self, context: Context, line: &str) -> Verdict<String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        Ok(match word {
            "import" => match import_var(&context, &parse(rest)?) {
                Ok(var) => {
                    let text = format!("imported {} {}", var.page_id(), var.len());
                    self.imported = Some(var);
                    text
                }
                Err(error) => refused(&error),
            },
            "alloc" => {
                let var = Var::alloc(&context, VarKind::Virtio)?;
                let text = format!("allocated {}", print(&var.export()?));
                self.own = Some(var);
                text
            }
            "map" => match self.imported.as_ref().ok_or_else(|| missing("VAR"))?.map() {
                Ok(page) => {
                    self.page = Some(page);
                    "mapped".into()
                }
                Err(error) => refused(&error),
            },
            "ring" => {
                self.page.as_ref().ok_or_else(|| missing("page"))?.ring_u32(0, rest.parse()?)?;
                "rung".into()
            }
            "own" => match take_over(self.imported.take().ok_or_else(|| missing("VAR"))?) {
                Ok(var) => {
                    self.own = Some(var);
                    "owned".into()
                }
                Err(ErrorWith { error, .. }) => refused(&error),
            },
            "unimport" => {
                let var = self.imported.take().ok_or_else(|| missing("VAR"))?;
                var.unimport()?;
                "forgotten".into()
            }
            "destroy" => match self.own.take().ok_or_else(|| missing("VAR"))?.destroy() {
                Ok(()) => "destroyed".into(),
                Err(ErrorWith { error, .. }) => refused(&error),
            },
            other => return Err(Stop::fail(format!("var-{other} is nothing that is known"))),
        })
    }
}

pub(crate) fn missing(what: &str) -> Stop {
    Stop::fail(format!("there is no {what} yet"))
}

/// An error of the library as an answer, which many tests compare.
pub(crate) fn refused(error: &uverbs::Error) -> String {
    format!("refused {} {}", error.verb(), error.errno().raw_os_error())
}

impl PartnerObjects {
    fn context(&self) -> Verdict<&Context> {
        self.context.as_ref().ok_or_else(|| missing("context"))
    }

    fn obey(
        &mut self,
        line: &str,
        file: Option<OwnedFd>,
        wire: &Wire,
    ) -> Verdict<(String, Option<OwnedFd>)> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let numbers: Vec<usize> = rest.split(' ').map_while(|number| number.parse().ok()).collect();
        if let Some(rest) = line.strip_prefix("var-") {
            let text = self.var.obey(self.context()?.clone(), rest)?;
            return Ok((text, None));
        }
        if let Some(rest) = line.strip_prefix("devx-") {
            let context = self.context()?.clone();
            let text = self.devx.obey(&context, rest)?;
            return Ok((text, None));
        }
        if let Some(rest) = line.strip_prefix("dm-") {
            let context = self.context()?.clone();
            let text = self.dm.obey(&context, rest)?;
            return Ok((text, None));
        }
        let text = match (word, &numbers[..]) {
            ("import", _) => {
                let file = file.ok_or_else(|| missing("file"))?;
                self.adopt(Context::import_exported(file, &parse(rest)?))
            }
            ("bare", _) => self.adopt(Context::import(file.ok_or_else(|| missing("file"))?)),
            ("pd", _) => match self.context()?.import_pd(&parse(rest)?) {
                Ok(pd) => {
                    let text = format!("pd {}", pd.handle());
                    self.imported_pd = Some(pd);
                    text
                }
                Err(error) => refused(&error),
            },
            ("mr", _) => {
                let pd = self.imported_pd.as_ref().ok_or_else(|| missing("domain"))?;
                match pd.import_mr(&parse(rest)?) {
                    Ok(region) => {
                        let text = format!("mr {} {}", region.lkey().0, region.rkey().0);
                        self.imported = Some(region);
                        text
                    }
                    Err(error) => refused(&error),
                }
            }
            ("foreign", _) => match self.context()?.foreign(&parse(rest)?) {
                Ok(object) => match heir::destroy(object) {
                    Ok(()) => "destroyed".into(),
                    Err(ErrorWith { error, .. }) => refused(&error),
                },
                Err(error) => refused(&error),
            },
            ("foreign-state", _) => {
                match self.context()?.foreign(&parse(rest)?).and_then(|object| object.query_qp()) {
                    Ok(info) => format!("state {}", info.state.0),
                    Err(error) => refused(&error),
                }
            }
            ("foreign-limits", _) => {
                match self.context()?.foreign(&parse(rest)?).and_then(|object| object.query_srq()) {
                    Ok(told) => format!("limits {} {} {}", told.max_wr, told.max_sge, told.limit),
                    Err(error) => refused(&error),
                }
            }
            ("copy", [from, to, length]) => {
                let status = self.copy(*from, *to, *length)?;
                format!("copied {}", status.0)
            }
            ("flood", _) => self.flood(wire)?,
            ("unimport", _) => {
                self.path = None;
                if let Some(Err(ErrorWith { error, .. })) =
                    self.imported.take().map(Imported::unimport)
                {
                    return Ok((refused(&error), None));
                }
                match self.imported_pd.take().map(Imported::unimport) {
                    Some(Err(ErrorWith { error, .. })) => refused(&error),
                    _ => "unimported".into(),
                }
            }
            ("own", _) => self.own()?,
            ("destroy", _) => {
                self.path = None;
                (self.own, self.imported) = (None, None);
                (self.own_pd, self.imported_pd) = (None, None);
                "destroyed".into()
            }
            ("export", [length]) => {
                return self.export(&rest[rest.find(' ').unwrap_or(0)..], *length);
            }
            ("pattern", [seed, length]) => {
                let region = self.own.as_ref().ok_or_else(|| missing("region of its own"))?;
                let mut bytes = vec![0; *length];
                region.copy_to(0, &mut bytes)?;
                pattern::check(&bytes, *seed as u64);
                "checked".into()
            }
            ("event", _) => {
                let pd = self.imported_pd.as_ref().ok_or_else(|| missing("domain"))?;
                raise_limit(self.context()?, pd)?
            }
            ("quiet", _) => match self.context()?.try_next_event()? {
                None => "quiet".into(),
                Some(event) => format!("event {event:?}"),
            },
            ("announce", _) => self.announce()?,
            ("census", _) => {
                let context = self.context()?;
                let count = |kind| context.handles(kind).map(|handles| handles.len());
                format!("census {} {}", count(ObjectKind::PD)?, count(ObjectKind::MR)?)
            }
            _ => match self.xrc.obey(word, rest)? {
                Some(text) => text,
                None => return Err(Stop::fail(format!("{line:?} makes no sense"))),
            },
        };
        Ok((text, None))
    }

    fn adopt(&mut self, context: uverbs::Result<Context>) -> String {
        match context {
            Ok(context) => {
                let text = format!("imported {}", context.completion_vectors());
                self.context = Some(context);
                text
            }
            Err(error) => refused(&error),
        }
    }

    /// Copies within the imported region.
    fn copy(&mut self, from: usize, to: usize, length: usize) -> Verdict<WcStatus> {
        let context = self.context.as_ref().ok_or_else(|| missing("context"))?;
        let pd = self.imported_pd.as_ref().ok_or_else(|| missing("domain"))?;
        let region = self.imported.as_ref().ok_or_else(|| missing("region"))?;
        let path = match &mut self.path {
            Some(path) => path,
            None => self.path.insert(Loop::new(context, pd)?),
        };
        path.write(region.sge(from..from + length)?, region.remote(to)?)
    }

    /// Writes until it is killed.
    fn flood(&mut self, wire: &Wire) -> Verdict<String> {
        let context = self.context.as_ref().ok_or_else(|| missing("context"))?;
        let pd = self.imported_pd.as_ref().ok_or_else(|| missing("domain"))?;
        let region = self.imported.as_ref().ok_or_else(|| missing("region"))?;
        let mut path = Loop::new(context, pd)?;
        path.receive(region.sge(..64)?)?;
        wire.send("flooding", None)?;
        let half = region.byte_len() / 2;
        loop {
            for _ in 0..8 {
                path.post(region.sge(..half)?, region.remote(half)?)?;
            }
            for _ in 0..8 {
                let status = crate::pair::wait(&mut path.cq)?.status;
                if status != WcStatus::SUCCESS {
                    return Ok(format!("flood ended {}", status.0));
                }
            }
        }
    }

    /// Takes ownership of the imported objects.
    fn own(&mut self) -> Verdict<String> {
        self.path = None;
        if let Some(region) = self.imported.take() {
            match take_over(region) {
                Ok(region) => region.destroy().map(drop)?,
                Err(ErrorWith { error, .. }) => return Ok(refused(&error)),
            }
        }
        match self.imported_pd.take().map(take_over) {
            Some(Ok(pd)) => self.own_pd = Some(pd),
            Some(Err(ErrorWith { error, .. })) => return Ok(refused(&error)),
            None => {}
        }
        Ok("owned".into())
    }

    /// Opens a device, registers memory and shares it.
    fn export(&mut self, device: &str, length: usize) -> Verdict<(String, Option<OwnedFd>)> {
        let context = Context::open(&Device::by_name(device.trim())?)?;
        let pd = context.alloc_pd()?;
        let region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(length)?;
        let text = format!(
            "exported {} {} {}",
            print(&context.export()),
            print(&pd.export()?),
            print(&region.export()?)
        );
        let file = context.share()?;
        (self.own, self.own_pd, self.context) = (Some(region), Some(pd), Some(context));
        Ok((text, Some(file)))
    }

    /// Raises a completion event at a channel of its own.
    fn announce(&mut self) -> Verdict<String> {
        let context = self.context()?;
        let pd = self.imported_pd.as_ref().ok_or_else(|| missing("domain"))?;
        let channel = context.create_comp_channel()?;
        let mut cq = context.cq_builder(8).channel(&channel).build()?;
        cq.req_notify(Notify::Next)?;
        let mut qp = pd.qp_builder(&cq, &cq, QpType::UD).build()?;
        qp.modify(
            &uverbs::QpAttr::new()
                .state(uverbs::QpState::INIT)
                .port(env::port())
                .pkey_index(env::pkey_index())
                .qkey(crate::pair::QKEY),
        )?;
        #[allow(unsafe_code, reason = "ringing is")]
        {
            let mut batch = qp.recv_batch()?;
            batch.push(RecvWr::new(&[]).id(1))?;
            // SAFETY: the request names no memory.
            unsafe { batch.ring()? };
        }
        qp.modify(&uverbs::QpAttr::new().state(uverbs::QpState::ERR))?;
        let key = channel.wait(Some(PATIENCE))?;
        Ok(if key == Some(cq.key()) { "announced".into() } else { format!("other key {key:?}") })
    }
}
