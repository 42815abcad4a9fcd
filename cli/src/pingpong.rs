//! `uverbs pingpong`: messages there and back, with itself or with rdma-core's programs.
//!
//! [`port`] is the local end, [`queues`] has the objects on it. By [`exchange`] the sides learn each other's
//! [`address`]. [`volley`] is the run, and a [`watchdog`] guards its sleep. [`content`] fills and checks the buffers
//! that [`layout`] places, with [`checker`] and [`pattern`]. [`report`] has the results. [`xsrq`] is a ping-pong of its
//! own.

mod address;
mod checker;
mod content;
mod exchange;
mod kind;
mod layout;
mod pattern;
mod port;
mod queues;
mod report;
mod volley;
mod watchdog;
mod xsrq;

use crate::args::{PingpongArgs, PingpongCommand};
use crate::failure::{self, Failure, Result};
use crate::output::outln;
use address::Address;
use checker::Checker;
use content::{Checked, Content, Plain};
use exchange::Exchange;
use kind::Kind;
use layout::Layout;
use port::Port;
use queues::{Queues, Shape};
use report::PingpongReport;
use uverbs::{Gid, devices};
use volley::Volley;

/// The GID of an address that stands for no queue pair. It announces that its sender keeps the messages of different
/// queue pairs apart. rdma-core's srq program sends zeros there, and ignores them.
const KEEPS_APART: Gid = Gid(*b"uverbs validates");

/// Runs a ping-pong. With `is_sim` it plays both sides: no other process has the devices.
pub(crate) fn run(command: &PingpongCommand, is_sim: bool) -> Result<()> {
    match command {
        PingpongCommand::Pair(args) if is_sim && args.options().host.is_none() => both_sides(args),
        PingpongCommand::Pair(args) => Side::set_up(args)?.run(),
        PingpongCommand::Xsrq(args) => xsrq::run(args),
    }
}

/// Plays both sides in this process. The client prints the report.
fn both_sides(args: &PingpongArgs) -> Result<()> {
    const WAIT: u64 = 10;
    let (mut server, mut client) = (args.clone(), args.clone());
    let last = devices()?.pop().ok_or_else(Failure::no_device)?;
    server.options_mut().device = Some(last.name().to_owned());
    client.options_mut().host = Some("127.0.0.1".into());
    for side in [&mut server, &mut client] {
        side.options_mut().wait.get_or_insert(WAIT);
    }
    std::thread::scope(|threads| {
        let server = threads.spawn(|| {
            let mut side = Side::set_up(&server)?;
            side.is_quiet = true;
            side.run()
        });
        Side::set_up(&client)?.run()?;
        server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// One side of a run.
struct Side<'a> {
    args: &'a PingpongArgs,
    kind: Kind,
    port: Port,
    queues: Queues,
    layout: Layout,
    /// One for each queue pair.
    local: Vec<Address>,
    /// Whether this side prints nothing.
    is_quiet: bool,
}

impl<'a> Side<'a> {
    fn set_up(args: &'a PingpongArgs) -> Result<Self> {
        let options = args.options();
        let kind = Kind::of(args);
        let qps = args.qps();
        if qps > options.rx_depth {
            return Err(Failure::usage(format!(
                "--rx-depth {} is below --qps {qps}: each queue pair needs a receive",
                options.rx_depth
            )));
        }
        let port = Port::open(options)?;
        port.check_size(kind, args.size(), args.mtu())?;
        let (header, size) = (kind.header(), args.size());
        let layout = match (options.validate, kind) {
            (false, _) => Layout::shared(header, size),
            // A message goes to any of the shared receives, so that each needs a buffer.
            (true, Kind::Srq) => {
                Layout::separate(header, size, options.rx_depth as usize, qps as usize)
            }
            // A queue pair's next message comes after the answer to the last: one buffer is enough.
            (true, _) => Layout::separate(header, size, 1, 1),
        };
        let shape = Shape {
            kind,
            qps,
            rx_depth: options.rx_depth,
            events: options.events,
            layout,
            service_level: options.sl,
            mtu: args.mtu(),
            mlx5: args.mlx5(),
        };
        let queues = Queues::create(&port, shape)?;
        let local = queues.addresses(&port)?;
        Ok(Side { args, kind, port, queues, layout, local, is_quiet: false })
    }

    fn run(self) -> Result<()> {
        if self.args.options().validate {
            self.run_with(Side::checked, |content| Some(content.into_checker()))
        } else {
            self.run_with(
                |side, _| Plain { layout: side.layout, byte: side.kind.plain() },
                |_| None,
            )
        }
    }

    /// The content of a checked run, for the peer's way to send.
    fn checked(&self, remote: &[Address]) -> Checked {
        let size = self.args.size() as usize;
        let psns = |addresses: &[Address]| {
            addresses.iter().take(self.local.len()).map(|address| address.psn).collect()
        };
        let checker = if self.is_client() {
            // With one queue pair no message can overtake another.
            let last = remote.last().map(|address| address.gid);
            let kept_apart = self.local.len() == 1 || last == Some(KEEPS_APART);
            Checker::client(psns(&self.local), size, kept_apart)
        } else {
            Checker::server(psns(remote), size, self.kind.plain())
        };
        Checked::new(self.layout, checker)
    }

    fn run_with<C: Content>(
        mut self,
        make: impl FnOnce(&Self, &[Address]) -> C,
        checker: impl FnOnce(C) -> Option<Checker>,
    ) -> Result<()> {
        let options = self.args.options();
        self.say("local address: ", &self.local);
        let told = self.sent_addresses();
        let volley = self.volley();
        let mut exchange = self.meet()?;
        let connect = |remote: &[Address]| {
            let mut content = make(&self, remote);
            let remote = remote[..self.local.len()].to_vec();
            // Before the peer can send: it learns of these queue pairs afterwards.
            volley.prepare(&mut self.queues, &mut content)?;
            self.queues.connect(&self.port, &self.local, &remote)?;
            Ok((content, remote))
        };
        let (mut content, remote) = if options.host.is_some() {
            exchange.as_client(&told, connect)?
        } else {
            exchange.as_server(&told, connect)?
        };
        self.say("remote address:", &remote);
        let took = volley
            .run(&mut self.queues, &mut content)
            .map_err(|failure| self.port.with_events(failure))?;
        let checker = checker(content);
        let peer = exchange.peer();
        exchange.finish();
        let addresses = (self.local.as_slice(), remote.as_slice());
        let report =
            PingpongReport::new(self.args, &self.port, peer, addresses, took, checker.as_ref());
        match (self.is_quiet, options.json) {
            (true, _) => {}
            (_, true) => failure::print(&report),
            (_, false) => outln!("{report}"),
        }
        Ok(())
    }

    fn is_client(&self) -> bool {
        self.args.options().host.is_some()
    }

    fn volley(&self) -> Volley {
        let options = self.args.options();
        Volley {
            kind: self.kind,
            client: self.is_client(),
            iters: options.iters,
            rx_depth: options.rx_depth,
            timeout: options.timeout(),
            json: options.json,
            layout: self.layout,
        }
    }

    /// Finds the peer.
    fn meet(&self) -> Result<Exchange> {
        let options = self.args.options();
        let (wait, timeout) = (options.wait(), options.timeout());
        match &options.host {
            Some(host) => exchange::connect(host, options.port, wait, timeout),
            None => exchange::accept(&exchange::listen(options.port)?, wait, timeout),
        }
    }

    /// The addresses to send to the peer, including those without a queue pair.
    fn sent_addresses(&self) -> Vec<Address> {
        let mut told = self.local.clone();
        told.resize(self.kind.addresses(), Address::default());
        if let (Some(last), true, Kind::Srq) =
            (told.last_mut(), self.args.options().validate, self.kind)
        {
            last.gid = KEEPS_APART;
        }
        told
    }

    fn say(&self, what: &str, addresses: &[Address]) {
        if !self.args.options().json && !self.is_quiet {
            for address in addresses {
                outln!("{what} {address}");
            }
        }
    }
}
