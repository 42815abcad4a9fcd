//! The device suite: tests of the library's promises on any RDMA device.
//!
//! One binary. `UVERBS_TEST_DEVICE` names the device. Without it the suite runs on a fabric of two devices in its own
//! process, and never by accident on a machine that works with its devices. `UVERBS_TEST_PORT` chooses a port, else
//! the first active one is tested, and `UVERBS_TEST_SECOND_DEVICE` names a device at the other end of the cable. The
//! first lines of a run describe these choices. With `UVERBS_TEST_WIRE` one side of each pair is a device in this
//! process, over UDP (`env.rs`). A fault that would make every test fail ends the run there. Tests whose names begin
//! with `udp::` are those with two processes once more, each with a device over UDP of its own (`udp.rs`).
//!
//! Tests whose names begin with `root::` change links and namespaces; they run as root in the lab only. With
//! `UVERBS_TEST_ALONE` tests take all of shared resources. `UVERBS_TEST_JUNIT` names a file for the results.

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
mod differential;
mod ece;
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
mod junit;
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
mod owners;
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
mod results;
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
mod testbed;
mod uc;
mod ud;
mod udp;
mod unplug;
mod unsignaled;
mod verdict;
mod watchdog;
mod xrc;
mod xrc_processes;

use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;

fn main() -> ExitCode {
    env::set_up_udp();
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
    // Tests count the objects of this process, so that they run one at a time, even with `--test-threads`.
    arguments.test_threads = Some(1);
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
        differential::trials(),
        ece::trials(),
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
        root::cable::trials(),
        root::cm::trials(),
        root::devx::trials(),
        root::flow::trials(),
        root::gids::trials(),
        root::raw_packet::trials(),
        root::refusals::trials(),
        root::sandbox::trials(),
        root::suspend::trials(),
        scope::trials(),
        share::trials(),
        sharing::trials(),
        srq::trials(),
        uc::trials(),
        ud::trials(),
        udp::trials(),
        unsignaled::trials(),
        xrc::trials(),
        #[cfg(feature = "tokio")]
        xrc::futures::trials(),
        xrc_processes::trials(),
    ];
    let mut trials: Vec<_> = modules.into_iter().flatten().collect();
    // If the results may not overwrite a file, this error may not either.
    if let Err(why) = env::junit() {
        return not_run(&why);
    }
    match env::chosen(&trials.iter().map(Trial::name).collect::<Vec<_>>()) {
        Ok(None) => {}
        Ok(Some(names)) => trials.retain(|trial| names.iter().any(|name| name == trial.name())),
        Err(why) => {
            written(results::write("device", Some(&why)));
            return not_run(&why);
        }
    }
    if !arguments.list {
        env::set_up();
        match testbed::look() {
            Ok(lines) => println!("{lines}"),
            Err(why) => {
                written(results::write("device", Some(&why)));
                return not_run(&why);
            }
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !arguments.list && !written(results::write("device", None)) {
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// Prints the reason that no test runs.
fn not_run(why: &str) -> ExitCode {
    println!("device tests not run: {why}");
    ExitCode::FAILURE
}

/// Prints an error if the results could not be written.
fn written(outcome: std::io::Result<()>) -> bool {
    if let Err(error) = &outcome {
        eprintln!("UVERBS_TEST_JUNIT: {error}");
    }
    outcome.is_ok()
}
