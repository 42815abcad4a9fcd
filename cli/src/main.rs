//! The command line: shows the RDMA devices of a machine, exchanges messages over them with itself or
//! with rdma-core's programs, and shares a context between processes.
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

mod args;
mod cm;
mod devinfo;
mod doctor;
mod failure;
mod open;
mod output;
mod pingpong;
mod share;
mod sim;

use args::{Args, Command};
use clap::Parser;
use failure::Failure;
use std::env;
use std::process::{ExitCode, exit};

/// The name in front of error messages.
const NAME: &str = "uverbs";

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(refusal) => return refuse(&refusal),
    };
    if let Some(count) = args.sim {
        sim::install(count);
    }
    let (json, outcome) = match &args.command {
        Command::Devinfo(args) => (args.json, devinfo::run(args)),
        Command::Doctor(args) => (args.json, doctor::run(args)),
        Command::Pingpong(pingpong) => {
            (pingpong.options().json, pingpong::run(pingpong, args.sim.is_some()))
        }
        Command::Cm(command) => (command.is_json(), cm::run(command)),
        Command::Share(args) => (false, share::run(args)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => ExitCode::from(failure.tell(json)),
    }
}

/// Prints the help, or the fault of the command line.
fn refuse(refusal: &clap::Error) -> ExitCode {
    if !refusal.use_stderr() {
        output::out!("{refusal}");
        return ExitCode::SUCCESS;
    }
    output::complain(format_args!("{refusal}"));
    let options = env::args_os().skip(1).take_while(|word| word != "--");
    if options.into_iter().any(|word| word == "--json") {
        failure::print(&usage(&refusal.to_string()).to_json());
    }
    ExitCode::from(failure::Status::Usage as u8)
}

/// The failure in clap's text: the first paragraph names the fault.
fn usage(text: &str) -> Failure {
    let what = text.split("\n\n").next().unwrap_or(text);
    let words: Vec<&str> = what.split_whitespace().collect();
    let what = words.join(" ");
    let failure = Failure::usage(what.strip_prefix("error: ").unwrap_or(&what));
    failure.advice("`--help` behind the command shows its options")
}

/// Ends the program early, because standard output failed.
fn end(status: u8) -> ! {
    exit(status.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn usage_errors_are_one_sentence() {
        let refusal = Args::command().try_get_matches_from(["uverbs", "cm", "rping"]).unwrap_err();
        let failure = usage(&refusal.to_string());
        let expected = "the following required arguments were not provided: <--server|--client>";
        assert_eq!((failure.message(), failure.status()), (expected, 2));
    }
}
