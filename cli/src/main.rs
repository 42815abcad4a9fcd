//! The command line: shows the RDMA devices of a machine, exchanges messages over them with itself or
//! with rdma-core's programs, and shares a context between processes.
#![deny(unsafe_code)]

mod args;
mod cm;
mod devinfo;
mod doctor;
mod failure;
mod open;
mod pingpong;
mod share;

use args::{Args, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    let (json, outcome) = match &args.command {
        Command::Devinfo(args) => (args.json, devinfo::run(args)),
        Command::Doctor(args) => (args.json, doctor::run(args)),
        Command::Pingpong(args) => (args.options().json, pingpong::run(args)),
        Command::Cm(command) => (command.is_json(), cm::run(command)),
        Command::Share(args) => (false, share::run(args)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => ExitCode::from(failure.tell(json)),
    }
}
