//! rdma-core's ping-pong programs as the peer of ours, in both roles.

use crate::capability::Capability;
use crate::env;
use crate::interop::absent;
use crate::pair::gid;
use crate::verdict::{Stop, Verdict, require, supported, trials};
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uverbs::{AddressVector, LinkLayer};

trials![
    our_rc_server_serves_rdma_core,
    our_rc_client_uses_rdma_core,
    out_of_order_sides_play_with_rdma_core,
    our_uc_server_serves_rdma_core,
    our_uc_client_uses_rdma_core,
    our_ud_server_serves_rdma_core,
    our_ud_client_uses_rdma_core,
    our_srq_server_serves_rdma_core,
    our_srq_client_uses_rdma_core,
    our_xsrq_server_serves_rdma_core,
    our_xsrq_client_uses_rdma_core,
    our_xsrq_server_serves_one_client_of_each,
    xsrq_server_of_rdma_core_serves_one_client_of_each,
];

/// The longest time of one ping-pong.
const PATIENCE: Duration = Duration::from_secs(30);

/// The options of a ping-pong.
#[derive(Clone, Copy, Debug)]
struct Game {
    size: u32,
    rounds: u32,
    events: bool,
    check: bool,
}

/// Each side polls, or sleeps until an event; messages are small, or fill a packet.
const GAMES: [Game; 3] = [
    Game { size: 1000, rounds: 100, events: false, check: false },
    Game { size: 1, rounds: 30, events: true, check: true },
    Game { size: 1024, rounds: 30, events: false, check: true },
];

/// For connections, whose messages may have several packets. Both programs register memory for all receives of an SRQ,
/// within an ordinary user's limit of locked memory.
const LONG: Game = Game { size: 8000, rounds: 30, events: true, check: true };

/// A port without a listener.
fn free_port() -> Verdict<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Whether a program listens at a port, asked without connecting to it.
fn is_listened_at(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        fs::read_to_string(path).is_ok_and(|table| {
            table.lines().skip(1).any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let local = fields.next().unwrap_or_default();
                let state = fields.nth(1).unwrap_or_default();
                local.ends_with(&format!(":{port:04X}")) && state == "0A"
            })
        })
    })
}

/// A program under way.
struct Player {
    name: String,
    process: Child,
}

impl Player {
    fn start(ours: bool, kind: &str, game: Game, port: u16, server: bool) -> Verdict<Player> {
        Player::start_with(ours, kind, game, port, server, &[])
    }

    fn start_with(
        ours: bool,
        kind: &str,
        game: Game,
        port: u16,
        server: bool,
        more: &[&str],
    ) -> Verdict<Player> {
        // The programs use the first partition key only.
        env::first_pkey()?;
        let index = gid(&env::open()?)?.index;
        let mut command = if ours {
            let mut command = Command::new("uverbs");
            command.args(["pingpong", kind]);
            command
        } else {
            Command::new(format!("ibv_{kind}_pingpong"))
        };
        command.args(["-d", env::device().name(), "-i", &env::port().to_string()]);
        command.args(["-g", &index.to_string(), "-p", &port.to_string()]);
        command.args(["-s", &game.size.to_string(), "-n", &game.rounds.to_string()]);
        if game.events {
            command.arg("-e");
        }
        // For xsrq `-c` would be the number of clients, and all messages are alike.
        if game.check && kind != "xsrq" {
            command.arg("-c");
        }
        command.args(more);
        if !server {
            command.arg("127.0.0.1");
        }
        let name = format!("{command:?}");
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| absent(&name, &error))?;
        Ok(Player { name, process })
    }

    /// Whether it has ended.
    fn has_ended(&mut self) -> Verdict<bool> {
        Ok(self.process.try_wait()?.is_some())
    }

    /// Kills it if it has not ended, and returns its command, its exit status and its output.
    fn end(&mut self) -> String {
        let _ = self.process.kill();
        let mut text = format!("{}: {:?}\n", self.name, self.process.wait());
        if let Some(stream) = &mut self.process.stdout {
            let _ = stream.read_to_string(&mut text);
        }
        if let Some(stream) = &mut self.process.stderr {
            let _ = stream.read_to_string(&mut text);
        }
        text
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Plays one game and fails unless both sides succeed.
fn play(kind: &str, game: Game, ours_is_server: bool) -> Verdict {
    play_with(kind, game, ours_is_server, &[])
}

/// The same; `more` are options of our side.
fn play_with(kind: &str, game: Game, ours_is_server: bool, more: &[&str]) -> Verdict {
    let port = free_port()?;
    let start = |ours, server| {
        Player::start_with(ours, kind, game, port, server, if ours { more } else { &[] })
    };
    let mut server = start(ours_is_server, true)?;
    let deadline = Instant::now() + PATIENCE;
    while !is_listened_at(port) {
        if server.has_ended()? || Instant::now() > deadline {
            let texts = server.end();
            return Err(Stop::fail(format!("it does not listen: {texts}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut client = start(!ours_is_server, false)?;
    while !(client.has_ended()? && server.has_ended()?) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    // A program that has not ended by now hangs, and is killed.
    let (at_client, at_server) = (client.end(), server.end());
    let content = client.process.wait()?.success() && server.process.wait()?.success();
    if !content {
        return Err(Stop::fail(format!("{game:?}\n{at_client}\n{at_server}")));
    }
    // rdma-core's program prints the number of bytes in both directions.
    let theirs = if ours_is_server { at_client } else { at_server };
    let bytes = 2 * u64::from(game.size) * u64::from(game.rounds);
    let content = match kind {
        "xsrq" => "success".to_owned(),
        _ => format!("{bytes} bytes in"),
    };
    assert!(theirs.contains(&content), "{game:?}: {theirs}");
    Ok(())
}

fn tournament(kind: &str, ours_is_server: bool) -> Verdict {
    let wanted = std::env::var("UVERBS_PEERS").is_ok();
    require(wanted, Capability::Peers, "UVERBS_PEERS is not set")?;
    for game in GAMES {
        play(kind, game, ours_is_server)?;
    }
    match kind {
        "ud" => Ok(()),
        _ => play(kind, LONG, ours_is_server),
    }
}

fn our_rc_server_serves_rdma_core() -> Verdict {
    tournament("rc", true)
}

fn our_rc_client_uses_rdma_core() -> Verdict {
    tournament("rc", false)
}

/// Messages of many packets between a side of ours whose device takes them in any order, and one of libmlx5 whose device
/// does not. The manual of libmlx5 demands the flag of both sides, but rdma-core's program has no option for it.
fn out_of_order_sides_play_with_rdma_core() -> Verdict {
    let wanted = std::env::var("UVERBS_PEERS").is_ok();
    require(wanted, Capability::Peers, "UVERBS_PEERS is not set")?;
    let context = env::open()?;
    let caps = supported(uverbs::mlx5::query_out_of_order(&context), Capability::Mlx5)?;
    require(caps.rc > 0, Capability::OutOfOrder, "RC has no placement out of order")?;
    let mut more = vec!["--out-of-order"];
    if context.query_port(env::port())?.link_layer == LinkLayer::ETHERNET {
        more.extend(["--udp-port", "50000"]);
    }
    for ours_is_server in [true, false] {
        play_with("rc", LONG, ours_is_server, &more)?;
    }
    Ok(())
}

fn our_uc_server_serves_rdma_core() -> Verdict {
    tournament("uc", true)
}

fn our_uc_client_uses_rdma_core() -> Verdict {
    tournament("uc", false)
}

/// Skips tests of datagrams if the device has no address handles: soft-RoCE has none before Linux 5.16.
fn datagrams() -> Verdict {
    let context = env::open()?;
    let own = gid(&context)?;
    let vector = AddressVector::global(env::port(), own.index, own.gid);
    match context.alloc_pd()?.create_ah(&vector) {
        Err(error) if error.is_unsupported() => Err(Stop::Skip(Capability::Ah, error.to_string())),
        _ => Ok(()),
    }
}

fn our_ud_server_serves_rdma_core() -> Verdict {
    datagrams()?;
    tournament("ud", true)
}

fn our_ud_client_uses_rdma_core() -> Verdict {
    datagrams()?;
    tournament("ud", false)
}

fn our_srq_server_serves_rdma_core() -> Verdict {
    tournament("srq", true)
}

fn our_srq_client_uses_rdma_core() -> Verdict {
    tournament("srq", false)
}

fn xrc() -> Verdict {
    supported(env::open()?.xrcd_builder().build(), Capability::Xrc)?;
    Ok(())
}

fn our_xsrq_server_serves_rdma_core() -> Verdict {
    xrc()?;
    tournament("xsrq", true)
}

fn our_xsrq_client_uses_rdma_core() -> Verdict {
    xrc()?;
    tournament("xsrq", false)
}

/// A server with a client of rdma-core's and one of ours, which share a domain by a file and are reached over each
/// other's connections.
fn two_clients(ours_is_server: bool) -> Verdict {
    xrc()?;
    require(std::env::var("UVERBS_PEERS").is_ok(), Capability::Peers, "UVERBS_PEERS is not set")?;
    let game = Game { size: 3000, rounds: 20, events: false, check: false };
    let port = free_port()?;
    let count = if ours_is_server { "--clients" } else { "-c" };
    let mut server = Player::start_with(ours_is_server, "xsrq", game, port, true, &[count, "2"])?;
    let deadline = Instant::now() + PATIENCE;
    while !is_listened_at(port) {
        if server.has_ended()? || Instant::now() > deadline {
            return Err(Stop::fail(format!("it does not listen: {}", server.end())));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut clients = [
        Player::start(true, "xsrq", game, port, false)?,
        Player::start(false, "xsrq", game, port, false)?,
    ];
    let deadline = Instant::now() + PATIENCE;
    let mut ended = false;
    while !ended && Instant::now() < deadline {
        ended = server.has_ended()?;
        for client in &mut clients {
            ended &= client.has_ended()?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let [one, other] = &mut clients;
    let texts = [server.end(), one.end(), other.end()];
    if texts.iter().all(|text| text.contains("success")) {
        return Ok(());
    }
    Err(Stop::fail(texts.join("\n")))
}

fn our_xsrq_server_serves_one_client_of_each() -> Verdict {
    two_clients(true)
}

fn xsrq_server_of_rdma_core_serves_one_client_of_each() -> Verdict {
    two_clients(false)
}
