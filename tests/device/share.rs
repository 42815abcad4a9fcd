//! `uverbs share`: the command line's exporter and importers.

use crate::capability::Capability;
use crate::env;
use crate::pair::gid;
use crate::verdict::{Stop, Verdict, require, trials};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

trials![
    two_importers_use_one_context,
    silent_importer_does_not_delay_others,
    importers_and_exporter_killed_in_any_order_leave_nothing,
];

/// A program under way, killed when this is dropped.
struct Program {
    process: Child,
    lines: BufReader<ChildStdout>,
}

impl Program {
    fn start(arguments: &[&str], socket: &Path) -> Verdict<Program> {
        env::processes()?;
        let started = Command::new("uverbs")
            .arg("share")
            .arg(arguments[0])
            .arg(socket)
            .args(&arguments[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut process = match started {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                require(false, Capability::Lab, "no program `uverbs` is on the path")?;
                return Err(error.into());
            }
            started => started?,
        };
        let lines = BufReader::new(process.stdout.take().expect("it was piped"));
        Ok(Program { process, lines })
    }

    /// Starts an exporter for this number of clients, and waits until it listens.
    fn serve(socket: &Path, clients: u32) -> Verdict<Program> {
        // The command line uses the first partition key only.
        env::first_pkey()?;
        let device = env::device();
        let clients = clients.to_string();
        let arguments = ["serve", "-d", device.name(), "-n", &clients, "--text", "good morning"];
        let mut server = Program::start(&arguments, socket)?;
        server.hear("serving")?;
        Ok(server)
    }

    fn import(socket: &Path, text: &str) -> Verdict<Program> {
        let index = gid(&env::open()?)?.index.to_string();
        Program::start(&["use", "-g", &index, "--text", text], socket)
    }

    /// Its next line, which must contain `words`.
    #[track_caller]
    fn hear(&mut self, words: &str) -> Verdict<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        if line.contains(words) {
            Ok(line)
        } else {
            Err(Stop::fail(format!("{line:?}: no {words:?}")))
        }
    }

    /// The rest of the output of a program that ends with success.
    #[track_caller]
    fn end(mut self) -> Verdict<String> {
        let mut text = String::new();
        self.lines.read_to_string(&mut text)?;
        let status = self.process.wait()?;
        if status.success() {
            Ok(text)
        } else {
            Err(Stop::fail(format!("{status} after {text:?}")))
        }
    }

    fn kill(&mut self) -> Verdict {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A path of this test's own, without a file.
fn socket(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("uverbs-share-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

fn two_importers_use_one_context() -> Verdict {
    let idle = env::resources()?;
    let socket = socket("two");
    let server = Program::serve(&socket, 2)?;
    let users = [Program::import(&socket, "first")?, Program::import(&socket, "second")?];
    for user in users {
        let said = user.end()?;
        assert!(said.contains("the exporter says: good morning"), "{said:?}");
    }
    let said = server.end()?;
    for text in ["wrote: first", "wrote: second"] {
        assert!(said.contains(text), "{said:?}");
    }
    assert!(!socket.exists(), "the socket is still there");
    env::settles(&idle)
}

/// One client connects and does nothing; the server serves the others meanwhile.
fn silent_importer_does_not_delay_others() -> Verdict {
    let idle = env::resources()?;
    let socket = socket("silent");
    let mut server = Program::serve(&socket, 2)?;
    let silent = UnixStream::connect(&socket)?;
    Program::import(&socket, "behind it")?.end()?;
    server.hear("client 2 wrote: behind it")?;
    drop(silent);
    server.hear("client 1: it left before it was done")?;
    server.end()?;
    env::settles(&idle)
}

fn importers_and_exporter_killed_in_any_order_leave_nothing() -> Verdict {
    let idle = env::resources()?;
    for exporter_first in [true, false] {
        let socket = socket("killed");
        let mut server = Program::serve(&socket, 3)?;
        let mut users = [Program::import(&socket, "one")?, Program::import(&socket, "other")?];
        for user in &mut users {
            user.hear("imported")?;
        }
        assert_ne!(env::resources()?, idle);
        if exporter_first {
            server.kill()?;
        }
        for user in &mut users {
            user.kill()?;
        }
        if !exporter_first {
            // The importers' objects are on the exporter's file, and go with it.
            server.kill()?;
        }
        env::settles(&idle)?;
        std::fs::remove_file(&socket)?;
    }
    Ok(())
}
