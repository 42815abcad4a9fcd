//! XRC among processes that share nothing but a file.

use crate::env;
use crate::pair::{gid, wait};
use crate::partner::Partner;
use crate::pattern;
use crate::verdict::{Stop, Verdict, trials};
use crate::xrc::{Name, Receiver, Sender, context};
use std::fs::File;
use uverbs::{
    Context, Endpoint, Errno, Qpn, Remote, Rkey, SendWr, SrqNumber, WcStatus, XrcDomain, XrcTarget,
};

trials![target_outlives_the_process_that_made_it, sender_notices_a_killed_receiver];

/// Writes an endpoint as a word.
fn print(endpoint: &Endpoint) -> String {
    let gid: String = endpoint.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{} {} {gid} {} {}", endpoint.qpn.0, endpoint.psn.0, endpoint.lid, endpoint.rd_atomic)
}

/// One process makes the target and leaves, another receives the messages of a third. They share
/// nothing but a file.
fn target_outlives_the_process_that_made_it() -> Verdict {
    let context = context()?;
    let name = Name::new("three");
    let path = name.0.display().to_string();
    drop(name.create()?);
    let device = env::device().name().to_owned();
    let (mut maker, mut receiver) = (Partner::start()?, Partner::start()?);
    // The receiver first: it has the domain open when the maker leaves.
    let number = receiver.ask(&format!("xrc-receive {device} {path}"), "number")?;
    let number = SrqNumber(number.parse()?);
    let mut sender = Sender::new(&context)?;
    let from = sender.qp.endpoint(&gid(&context)?)?;
    let to = maker.ask(&format!("xrc-target {device} {path} {}", print(&from)), "target")?;
    let to = parse(&to, &from)?;
    env::handshake(&sender.qp, &to)?;
    receiver.ask(&format!("xrc-open {}", to.qpn.0), "opened")?;
    for seed in 0..5 {
        sender.message(number, seed, 3000)?;
        receiver.ask(&format!("xrc-check {seed} 3000"), "checked")?;
    }
    // The target is the domain's: its maker may die.
    maker.kill()?;
    for seed in 5..10 {
        sender.message(number, seed, 3000)?;
        receiver.ask(&format!("xrc-check {seed} 3000"), "checked")?;
    }
    receiver.dismiss()?;
    // Now no context has the domain open.
    let sges = [sender.memory.sge(..8)?];
    sender.send(SendWr::send(&sges).signaled().to_srq(number))?;
    assert_ne!(wait(&mut sender.cq)?.status, WcStatus::SUCCESS);
    let file = File::open(&name.0)?;
    let error = context.xrcd_builder().file(&file).build().unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::AGAIN), "{error}");
    Ok(())
}

fn parse(line: &str, like: &Endpoint) -> Verdict<Endpoint> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [qpn, psn, gid, lid, rd_atomic] = fields[..] else {
        return Err(Stop::fail(format!("{line:?} is no endpoint")));
    };
    Ok(Endpoint {
        qpn: Qpn(qpn.parse()?),
        psn: uverbs::Psn(psn.parse()?),
        gid: uverbs::Gid(u128::from_str_radix(gid, 16)?.to_be_bytes()),
        lid: lid.parse()?,
        rd_atomic: rd_atomic.parse()?,
        ..*like
    })
}

/// The receiver is killed while messages are under way: the sender's requests fail, and the domain
/// goes with the last context that has it open.
fn sender_notices_a_killed_receiver() -> Verdict {
    let context = context()?;
    let idle = env::resources()?;
    {
        let name = Name::new("killed");
        let path = name.0.display().to_string();
        drop(name.create()?);
        let device = env::device().name().to_owned();
        let mut receiver = Partner::start()?;
        let number = receiver.ask(&format!("xrc-receive {device} {path}"), "number")?;
        let number = SrqNumber(number.parse()?);
        let mut sender = Sender::new(&context)?;
        let from = sender.qp.endpoint(&gid(&context)?)?;
        // Target and memory are on one file, and the kernel destroys the file's newest objects first:
        // the target falls silent before any other object goes.
        let to = receiver.ask(&format!("xrc-connect {}", print(&from)), "target")?;
        env::handshake(&sender.qp, &parse(&to, &from)?)?;
        sender.message(number, 1, 3000)?;
        receiver.ask("xrc-check 1 3000", "checked")?;
        let told = receiver.ask("xrc-memory", "memory")?;
        let (addr, rkey) = told.split_once(' ').ok_or_else(|| Stop::fail("no memory"))?;
        let remote = Remote { addr: addr.parse()?, rkey: Rkey(rkey.parse()?) };
        let sges = [sender.memory.sge(..)?];
        let write = SendWr::write(remote, &sges).signaled().to_srq(number);
        for _ in 0..16 {
            sender.send(write)?;
        }
        assert_eq!(wait(&mut sender.cq)?.status, WcStatus::SUCCESS);
        receiver.kill()?;
        // More messages than were under way, so that some arrive after the receiver is gone.
        for _ in 0..8 {
            sender.send(write)?;
        }
        let ended = loop {
            let status = wait(&mut sender.cq)?.status;
            if status != WcStatus::SUCCESS {
                break status;
            }
        };
        assert_eq!(ended, WcStatus::RETRY_EXC_ERR);
    }
    env::settles(&idle)
}

/// A partner's XRC objects. Fields are dropped in this order.
#[derive(Debug, Default)]
pub(crate) struct Half {
    opened: Option<XrcTarget>,
    made: Option<(XrcTarget, XrcDomain)>,
    receiver: Option<Receiver>,
}

impl Half {
    /// Carries out a command of the partner.
    pub(crate) fn obey(&mut self, word: &str, rest: &str) -> Verdict<Option<String>> {
        let fields: Vec<&str> = rest.split(' ').collect();
        let missing = || Stop::fail("there is no receiver yet");
        Ok(Some(match (word, &fields[..]) {
            ("xrc-receive", [device, path]) => {
                let context = Context::open(&uverbs::Device::by_name(device)?)?;
                let file = File::open(path)?;
                let xrcd = context.xrcd_builder().file(&file).create().build()?;
                let mut receiver = Receiver::new(&context, xrcd)?;
                for at in 0..16 {
                    receiver.recv(at, at as usize * 4096, 4096)?;
                }
                let text = format!("number {}", receiver.number().0);
                self.receiver = Some(receiver);
                text
            }
            ("xrc-target", [device, path, peer @ ..]) => {
                let context = Context::open(&uverbs::Device::by_name(device)?)?;
                let file = File::open(path)?;
                let xrcd = context.xrcd_builder().file(&file).build()?;
                let target = xrcd.create_target()?;
                let own = target.endpoint(&gid(&context)?)?;
                env::handshake(&target, &parse(&peer.join(" "), &own)?)?;
                self.made = Some((target, xrcd));
                format!("target {}", print(&own))
            }
            ("xrc-connect", peer) => {
                let receiver = self.receiver.as_ref().ok_or_else(missing)?;
                let gid = gid(&receiver.xrcd.context())?;
                let own = receiver.target.endpoint(&gid)?;
                env::handshake(&receiver.target, &parse(&peer.join(" "), &own)?)?;
                format!("target {}", print(&own))
            }
            ("xrc-memory", _) => {
                let receiver = self.receiver.as_ref().ok_or_else(missing)?;
                let remote = receiver.memory.remote(0)?;
                format!("memory {} {}", remote.addr, remote.rkey.0)
            }
            ("xrc-open", [qpn]) => {
                let receiver = self.receiver.as_ref().ok_or_else(missing)?;
                self.opened = Some(receiver.xrcd.open_target(Qpn(qpn.parse()?))?);
                "opened".into()
            }
            ("xrc-check", [seed, length]) => {
                let receiver = self.receiver.as_mut().ok_or_else(missing)?;
                let done = wait(&mut receiver.cq)?;
                assert_eq!(done.status, WcStatus::SUCCESS, "{done:?}");
                let mut bytes = vec![0; length.parse()?];
                receiver.memory.copy_to(done.wr_id as usize * 4096, &mut bytes)?;
                pattern::check(&bytes, seed.parse()?);
                "checked".into()
            }
            _ => return Ok(None),
        }))
    }
}
