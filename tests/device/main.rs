//! The device suite: what the library promises, checked on whatever RDMA device is there.
//!
//! One binary. `UVERBS_TEST_DEVICE` names the device; it has no default, so that the suite never runs by
//! accident on a machine that works with its devices. Tests whose names begin with `root::` change links
//! and namespaces; they run as root in the lab only. Without a device nothing runs, and one line says so.

#![deny(unsafe_code)]

mod allocations;
#[cfg(feature = "tokio")]
mod r#async;
mod atomics;
#[cfg(feature = "tokio")]
mod cancel;
mod capability;
mod census;
mod cm;
mod confine;
mod context;
mod cq;
mod device;
#[cfg(feature = "tokio")]
mod endings;
mod env;
#[cfg(feature = "tokio")]
mod epoll;
mod errors;
mod events;
mod fork;
#[cfg(feature = "tokio")]
mod fork_messages;
mod frame;
mod handshake;
mod heir;
mod helper;
mod hotplug;
mod interop;
mod leaks;
mod lent;
mod limits;
mod mcast;
#[cfg(feature = "tokio")]
mod messages;
mod mlx5;
mod modify;
mod mr;
mod mr_peer;
mod mw;
mod mw_holds;
mod owned;
mod pair;
mod partner;
mod pattern;
mod pd;
mod peers;
mod port;
mod processes;
mod program_buffers;
mod qp;
mod rc;
mod reset;
mod root;
mod scope;
mod share;
mod sharing;
mod srq;
mod station;
#[cfg(all(feature = "tokio", feature = "stream"))]
mod stream;
#[cfg(feature = "tokio")]
mod tasks;
mod uc;
mod ud;
mod unplug;
mod unsignaled;
mod verdict;
mod watchdog;
mod xrc;
mod xrc_processes;

use libtest_mimic::Arguments;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = helper::run()
        .or_else(partner::run)
        .or_else(unplug::run)
        .or_else(hotplug::run)
        .or_else(confine::run)
        .or_else(root::sandbox::run)
    {
        return code;
    }
    let mut arguments = Arguments::from_args();
    // Objects are counted per device, so tests take turns.
    arguments.test_threads.get_or_insert(1);
    if !arguments.list {
        if let Err(why) = env::find() {
            println!(
                "device tests not run: {why}; `cargo ci test` runs them in a VM, with --native here"
            );
            return ExitCode::SUCCESS;
        }
    }
    let modules = [
        allocations::trials(),
        #[cfg(feature = "tokio")]
        r#async::trials(),
        #[cfg(feature = "tokio")]
        cancel::trials(),
        #[cfg(feature = "tokio")]
        endings::trials(),
        atomics::trials(),
        cm::all(),
        context::trials(),
        cq::trials(),
        device::trials(),
        #[cfg(feature = "tokio")]
        epoll::trials(),
        #[cfg(all(feature = "tokio", feature = "stream"))]
        stream::trials(),
        errors::trials(),
        events::trials(),
        fork::trials(),
        #[cfg(feature = "tokio")]
        fork_messages::trials(),
        handshake::trials(),
        interop::trials(),
        leaks::trials(),
        limits::trials(),
        mcast::trials(),
        #[cfg(feature = "tokio")]
        messages::trials(),
        mlx5::trials(),
        modify::trials(),
        mr::trials(),
        mr_peer::trials(),
        mw::trials(),
        mw_holds::trials(),
        owned::trials(),
        pd::trials(),
        peers::trials(),
        port::trials(),
        processes::trials(),
        program_buffers::trials(),
        qp::trials(),
        rc::trials(),
        reset::trials(),
        root::trials(),
        root::cm::trials(),
        root::flow::trials(),
        root::raw_packet::trials(),
        root::sandbox::trials(),
        scope::trials(),
        share::trials(),
        sharing::trials(),
        srq::trials(),
        uc::trials(),
        ud::trials(),
        unsignaled::trials(),
        xrc::trials(),
        #[cfg(feature = "tokio")]
        xrc::futures::trials(),
        xrc_processes::trials(),
    ];
    let mut trials: Vec<_> = modules.into_iter().flatten().collect();
    if let Some(names) = env::chosen() {
        trials.retain(|trial| names.iter().any(|name| name == trial.name()));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
