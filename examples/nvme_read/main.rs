//! Reads the blocks of a disk on another machine: a host of NVMe over Fabrics, with RDMA as transport.
//!
//! The target is any program that speaks the standard, for example the Linux kernel's `nvmet-rdma`, which knows nothing
//! of this library. The kernel's connection manager connects two queue pairs: one for commands to the controller, one
//! for reads and writes. The target moves the data itself, by RDMA READ and RDMA WRITE in this program's memory, with
//! several requests under way.
//!
//! ```text
//! nvme_read 10.0.0.2 nqn.2024-01.org.example:disk               reads all blocks
//! nvme_read --output copy 10.0.0.2 nqn.2024-01.org.example:disk copies them to a file
//! nvme_read --write 10.0.0.2 nqn.2024-01.org.example:disk       DESTROYS them, reads and compares
//! ```

mod capsule;
mod controller;
mod handshake;
mod options;
mod pattern;
mod transfer;
mod transport;

use capsule::Command;
use controller::{Controller, Target};
use options::Options;
use std::fs::File;
use std::process::ExitCode;
use std::time::Duration;
use transfer::{Plan, Read, Write};
use transport::Queue;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvme_read: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let mut controller = Controller::connect(&target(options)?)?;
    println!("controller {} at {}", controller.id(), controller.describe()?);
    let identity = controller.identify()?;
    println!("{}, firmware {}, serial {}", identity.model, identity.firmware, identity.serial);
    let namespace = controller.namespace(options.namespace)?;
    println!(
        "namespace {}: {} blocks of {} bytes",
        namespace.number, namespace.blocks, namespace.block_size
    );
    let plan = options.plan(namespace, identity.max_transfer)?;
    let mut queue = controller.io_queue(options.depth, options.size)?;
    println!("I/O queue for {} requests of {} bytes", options.depth, options.size);
    let done = transfer(options, &plan, &mut queue);
    // Also after an error, so that the target need not wait for this host.
    let ended = queue.disconnect().and_then(|()| controller.shut_down());
    done.and(ended)
}

fn transfer(options: &Options, plan: &Plan, queue: &mut Queue) -> Result<()> {
    let buffer = || vec![0; options.size];
    if options.write {
        let mut write = Write { seed: options.seed, scratch: buffer() };
        report(options, plan, "wrote", transfer::run(queue, plan, &mut write)?);
        let namespace = plan.namespace.number;
        let (_, response) = queue.execute("Flush", |_, _| Ok(Command::flush(namespace)))?;
        if !response.status().is_success() {
            return Err(format!("Flush: {}", response.status()).into());
        }
    }
    let seed = (options.write || options.verify).then_some(options.seed);
    let output = options.output.as_ref().map(|path| create(path)).transpose()?;
    let mut read = Read { seed, output, bytes: buffer(), scratch: buffer() };
    report(options, plan, "read", transfer::run(queue, plan, &mut read)?);
    if let Some(seed) = seed {
        println!("all {} blocks have the pattern of seed {seed}", plan.blocks);
    }
    Ok(())
}

/// The file for the blocks: a new one, or an existing one that is not regular, for example `/dev/null`.
fn create(path: &str) -> Result<File> {
    let is_file = std::fs::metadata(path).is_ok_and(|there| there.is_file());
    let file = if is_file { File::create_new(path) } else { File::create(path) };
    file.map_err(|error| format!("--output {path}: {error}").into())
}

fn report(options: &Options, plan: &Plan, verb: &str, elapsed: Duration) {
    let requests = plan.blocks.div_ceil(plan.per_request.into());
    let seconds = elapsed.as_secs_f64();
    println!(
        "{verb} {} bytes in {seconds:.3} s: {:.1} MB/s, {:.0} requests a second, {} under way",
        plan.bytes(),
        plan.bytes() as f64 / seconds / 1e6,
        requests as f64 / seconds,
        u64::from(options.depth).min(requests)
    );
}

/// The names of both sides. Without a name of its own the host has a random one.
fn target(options: &Options) -> Result<Target> {
    let mut host_id = [0; 16];
    rustix::rand::getrandom(&mut host_id, rustix::rand::GetRandomFlags::empty())?;
    // A random UUID: version 4 and the usual variant.
    host_id[6] = host_id[6] & 0x0f | 0x40;
    host_id[8] = host_id[8] & 0x3f | 0x80;
    let [a, b, c, d, e, f, g, h, rest @ ..] = host_id;
    let tail: String = rest[2..].iter().map(|byte| format!("{byte:02x}")).collect();
    let uuid = format!(
        "{a:02x}{b:02x}{c:02x}{d:02x}-{e:02x}{f:02x}-{g:02x}{h:02x}-{:02x}{:02x}-{tail}",
        rest[0], rest[1]
    );
    let host =
        options.host.clone().unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"));
    Ok(Target {
        address: options.address.clone(),
        subsystem: options.subsystem.clone(),
        host,
        host_id,
    })
}
