//! All output of the program. clippy refuses `println!` and `eprintln!` elsewhere, because they panic when the reader
//! of a pipe is gone or a disk is full, and because an error can lose their buffered text unnoticed.
//!
//! Text goes to standard output without a buffer. If a write fails, the program ends: if the reader is gone, quietly
//! and with the status of a program that SIGPIPE killed, and otherwise with an error and the status of a failure. Text
//! that standard error does not take is lost, since no other stream is left to report it.
//!
//! `connectx` and the packages of the lab include this file.
#![allow(clippy::disallowed_methods, reason = "this is the file that prints")]
#![allow(dead_code, unused_imports, unused_macros, reason = "not each program prints in all ways")]

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fmt::Arguments;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;

/// The status that a shell shows for a program killed by SIGPIPE: 128 plus the number of the signal.
pub(crate) const CLOSED: u8 = 128 + 13;

/// Prints a line to standard output.
macro_rules! outln {
    ($($text:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard output.
macro_rules! out {
    ($($text:tt)*) => { $crate::output::print(format_args!($($text)*)) };
}

/// Prints a line to standard error.
macro_rules! errln {
    ($($text:tt)*) => { $crate::output::complain(format_args!("{}\n", format_args!($($text)*))) };
}

pub(crate) use {errln, out, outln};

/// Prints text, or ends the program.
pub(crate) fn print(text: Arguments<'_>) {
    // One call for each text, so that lines of two threads do not mix.
    write(text.to_string().as_bytes()).unwrap_or_else(|error| fail(&error));
}

/// Writes bytes to standard output.
pub(crate) fn write(mut bytes: &[u8]) -> io::Result<()> {
    let out = io::stdout().lock();
    // Not through `Stdout`: it holds back the end of a line, and drops text silently if the descriptor cannot be
    // written (`EBADF`).
    let fd = out.as_fd();
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Another process that shares the pipe made it non-blocking.
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], None)?;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Ends the program, whose standard output failed.
pub(crate) fn fail(error: &io::Error) -> ! {
    if error.kind() == io::ErrorKind::BrokenPipe {
        crate::end(CLOSED);
    }
    errln!("{}: standard output: {error}", crate::NAME);
    crate::end(1)
}

/// Prints text to standard error, and ignores errors.
pub(crate) fn complain(text: Arguments<'_>) {
    pass_on(text.to_string().as_bytes());
}

/// Writes bytes to standard error, and ignores errors.
pub(crate) fn pass_on(bytes: &[u8]) {
    let _lost = io::stderr().write_all(bytes);
}

/// Whether standard error is a terminal.
pub(crate) fn is_watched() -> bool {
    io::stderr().is_terminal()
}
