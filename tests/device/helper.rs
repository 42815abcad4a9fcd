//! A second process: this program once more, which carries out commands for one queue pair from its standard input, and
//! answers on its standard output.
//!
//! Each line begins with a word: `address`, `send`, `recv`, `flood`, `namespace`, `lent`,
//! `cm`.

use crate::env;
use crate::lent::Far;
use crate::pair::{Address, Config, PATIENCE, Path, Side};
use crate::root::cm::Answering;
use crate::verdict::{Stop, Verdict};
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child, ChildStdin, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use uverbs::{Context, Device, Gid, Psn, QpType, Qpn, Remote, Rkey, SendWr, WcOpcode};

/// The first argument of a program that is to be a helper.
const HELPER: &str = "--helper";

/// The configuration of a helper's side, and of the side that it is connected to.
pub(crate) fn config() -> Config {
    config_of(QpType::RC)
}

/// The same for a type of queue pairs.
pub(crate) fn config_of(qp_type: QpType) -> Config {
    // A short timeout, so that the death of a peer is noticed soon.
    Config { timeout: 12, retry_count: 3, ..Config::of(qp_type) }
}

/// The name of a type in a command.
fn name_of(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::UC => "uc",
        QpType::UD => "ud",
        _ => "rc",
    }
}

/// A side with the path to its peer.
struct End {
    side: Side,
    config: Config,
    path: Option<Path>,
}

/// The helper that a test talks to. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Helper {
    process: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    /// The path to its side, and bytes in front of a message there.
    path: Option<Path>,
    header: usize,
}

impl Helper {
    /// Starts a helper.
    pub(crate) fn start() -> Verdict<Helper> {
        env::processes()?;
        let mut process = env::second_process()?
            .arg(HELPER)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take().expect("it was piped");
        let output = BufReader::new(process.stdout.take().expect("it was piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Helper { process, input, lines, path: None, header: 0 })
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends the helper a command.
    pub(crate) fn tell(&mut self, line: &str) -> Verdict {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// Waits for the helper's next line, which must begin with `word`; answers the rest.
    #[track_caller]
    pub(crate) fn hear(&mut self, word: &str) -> Verdict<String> {
        let line = self
            .lines
            .recv_timeout(PATIENCE)
            .map_err(|error| Stop::fail(format!("waiting for {word:?} of the helper: {error}")))?;
        match line.strip_prefix(word) {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => Err(Stop::fail(format!("the helper says {line:?} in place of {word:?}"))),
        }
    }

    /// Connects `side` with the helper's, on the device of this name, and returns the beginning of the helper's memory.
    pub(crate) fn connect(&mut self, device: &str, side: &mut Side) -> Verdict<Remote> {
        self.connect_as(&config(), device, side)
    }

    /// As [`connect`](Self::connect), with a configuration of [`config_of`].
    pub(crate) fn connect_as(
        &mut self,
        config: &Config,
        device: &str,
        side: &mut Side,
    ) -> Verdict<Remote> {
        self.tell(&format!("open {device} {}", name_of(config.qp_type)))?;
        let (address, remote) = parse(&self.hear("address")?)?;
        (self.path, self.header) = (Some(side.path_to(config, &address)?), header(config));
        self.tell(&format!("connect {}", print(side)))?;
        self.hear("connected")?;
        side.connect(config, &address)?;
        Ok(remote)
    }

    /// Kills the helper with a signal that it cannot catch, and waits until it is gone.
    pub(crate) fn kill(&mut self) -> Verdict {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a message from `side` to the helper.
pub(crate) fn send_to(side: &mut Side, helper: &mut Helper, seed: u64, length: usize) -> Verdict {
    helper.tell(&format!("recv {seed} {length}"))?;
    helper.hear("posted")?;
    send(side, helper.path.as_ref(), seed, length)?;
    helper.hear("received")?;
    Ok(())
}

/// Bytes in front of a received message: the GRH of a datagram.
fn header(config: &Config) -> usize {
    if config.qp_type == QpType::UD { 40 } else { 0 }
}

/// Has the helper send a message to `side`.
pub(crate) fn receive_from(
    side: &mut Side,
    helper: &mut Helper,
    seed: u64,
    length: usize,
) -> Verdict {
    let whole = 0..helper.header + length;
    side.poison(whole.clone());
    side.recv(seed, whole.clone())?;
    helper.tell(&format!("send {seed} {length}"))?;
    helper.hear("sent")?;
    side.expect(seed, WcOpcode::RECV)?;
    side.check(helper.header..whole.end, seed);
    Ok(())
}

fn send(side: &mut Side, path: Option<&Path>, seed: u64, length: usize) -> Verdict {
    side.fill(0..length, seed);
    let sges = [side.sge(0..length)];
    let wr = SendWr::send(&sges).id(seed).signaled();
    side.send(path.map_or(wr, |path| path.to(wr)))?;
    side.expect(seed, WcOpcode::SEND)?;
    Ok(())
}

/// The address of a side and its memory in a line.
fn print(side: &Side) -> String {
    let (address, remote) = (side.address(), side.remote(0));
    let gid: String = address.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "{} {} {gid} {} {} {}",
        address.qpn.0, address.psn.0, address.lid, remote.addr, remote.rkey.0
    )
}

fn parse(line: &str) -> Verdict<(Address, Remote)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [qpn, psn, gid, lid, addr, rkey] = fields[..] else {
        return Err(Stop::fail(format!("{line:?} is no address")));
    };
    let gid = u128::from_str_radix(gid, 16)?.to_be_bytes();
    let address = Address {
        qpn: Qpn(qpn.parse()?),
        psn: Psn(psn.parse()?),
        gid: Gid(gid),
        lid: lid.parse()?,
    };
    Ok((address, Remote { addr: addr.parse()?, rkey: Rkey(rkey.parse()?) }))
}

/// Runs as the helper, if this program was started as one.
pub(crate) fn run() -> Option<ExitCode> {
    if std::env::args().nth(1).as_deref() != Some(HELPER) {
        return None;
    }
    Some(match obey() {
        Ok(()) => ExitCode::SUCCESS,
        Err(stop) => {
            answer(&format!("failed {stop:?}"));
            ExitCode::FAILURE
        }
    })
}

pub(crate) fn answer(line: &str) {
    println!("{line}");
    let _ = stdout().flush();
}

/// Carries out commands until its standard input ends.
fn obey() -> Verdict {
    let mut end: Option<End> = None;
    let mut far = Far::default();
    let mut answering = Answering::default();
    for line in stdin().lines() {
        let line = line?;
        if let Some(line) = line.strip_prefix("lent ") {
            far.obey(line)?;
            continue;
        }
        if let Some(line) = line.strip_prefix("cm ") {
            answering.obey(line)?;
            continue;
        }
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let numbers: Vec<u64> = rest.split(' ').map_while(|number| number.parse().ok()).collect();
        match (word, &mut end, &numbers[..]) {
            ("namespace", None, _) => {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
                answer("unshared");
            }
            ("link", None, _) => {
                crate::root::configure(rest)?;
                answer("linked");
            }
            ("open", None, _) => {
                let (device, kind) = rest.split_once(' ').unwrap_or((rest, "rc"));
                let types = [QpType::RC, QpType::UC, QpType::UD];
                let qp_type = types.into_iter().find(|qp_type| name_of(*qp_type) == kind);
                let config = config_of(qp_type.ok_or_else(|| Stop::fail(format!("a {kind}?")))?);
                let context = Context::open(&Device::by_name(device)?)?;
                let side = Side::new(context, &config, Psn::new(0x55_5555))?;
                answer(&format!("address {}", print(&side)));
                end = Some(End { side, config, path: None });
            }
            ("connect", Some(End { side, config, path }), _) => {
                let peer = parse(rest)?.0;
                *path = Some(side.path_to(config, &peer)?);
                side.connect(config, &peer)?;
                answer("connected");
            }
            ("send", Some(End { side, path, .. }), [seed, length]) => {
                send(side, path.as_ref(), *seed, *length as usize)?;
                answer("sent");
            }
            ("recv", Some(End { side, config, .. }), [seed, length]) => {
                let range = 0..header(config) + *length as usize;
                side.poison(range.clone());
                side.recv(*seed, range.clone())?;
                answer("posted");
                side.expect(*seed, WcOpcode::RECV)?;
                side.check(header(config)..range.end, *seed);
                answer("received");
            }
            ("close", Some(_), _) => {
                end = None;
                answer("closed");
            }
            ("unlink", None, _) => {
                uverbs::device::link::remove_link(rest)?;
                answer("unlinked");
            }
            _ => return Err(Stop::fail(format!("{line:?} makes no sense now"))),
        }
    }
    Ok(())
}
