//! The control socket: tests use it to inspect the emulator and to inject faults.
//!
//! Pairs with `--control SOCKET`. Each line is a JSON object [`ControlRequest`], each reply a line with a
//! [`Reply`]; [`Client`] is the client for tests. For example:
//!
//! ```text
//! {"do":"objects","function":0}
//! {"answer":"objects","counts":{"PD":3,"QP":1},"left":{}}
//! ```

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::{Deserialize, Serialize};

use uverbs_connectx::bar0::{LOG_VAR_STRIDE, PAGE, TLP_PAGES, VAR_BYTES, VAR_OFFSET};
use uverbs_connectx::fabric::Fabric;
use uverbs_connectx::fault::{CommandFailure, Delay, Side};
use uverbs_connectx::format::syndrome::CqeError;

/// The longest line that the server accepts.
const MAX_LINE: usize = 4096;
/// The most bytes of a VAR page in one reply: the whole page.
const MAX_VAR: u32 = 4096;

/// [`Side`] in JSON.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Side", rename_all = "snake_case")]
enum SideName {
    Send,
    Receive,
}

/// [`Delay`] in JSON.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Delay", rename_all = "snake_case")]
enum DelayValue {
    Time(u64),
    Messages(u32),
}

/// A request. `function` is the position of the function's `--socket` on the command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Counts the objects by kind.
    Objects {
        /// Number of the function.
        function: usize,
    },
    /// Counts the host pages that firmware holds.
    Pages {
        /// Number of the function.
        function: usize,
    },
    /// Reads the counts of doorbell errors.
    Doorbells {
        /// Number of the function.
        function: usize,
    },
    /// Reads a VAR page.
    Var {
        /// Number of the function.
        function: usize,
        /// Number of the page.
        page: u32,
        /// Bytes to read, from the start of the page.
        len: u32,
    },
    /// Takes the link up or down.
    Link {
        /// Number of the function.
        function: usize,
        /// Whether the link is up.
        up: bool,
    },
    /// Makes a command with this opcode fail.
    FailCommand {
        /// Number of the function.
        function: usize,
        /// The opcode.
        opcode: u16,
        /// The number of commands that succeed before.
        after: u32,
        /// The error status.
        status: u8,
    },
    /// Makes a command with this opcode get no completion.
    SilenceCommand {
        /// Number of the function.
        function: usize,
        /// The opcode.
        opcode: u16,
        /// The number of commands that complete before.
        after: u32,
    },
    /// Makes a send or receive WQE fail with an error CQE, without any other effect.
    FailRequest {
        /// Number of the function.
        function: usize,
        /// Number of the queue pair; if none, every queue pair of a user context.
        qpn: Option<u32>,
        /// The queue of the queue pair.
        #[serde(with = "SideName")]
        side: Side,
        /// The number of WQEs that succeed before.
        after: u32,
        /// The syndrome in the CQE.
        syndrome: u8,
        /// The vendor syndrome in the CQE.
        vendor: u8,
    },
    /// Takes the link down and up again.
    FlapLink {
        /// Number of the function.
        function: usize,
        /// The number of times.
        times: u32,
        /// Nanoseconds down each time.
        down: u64,
        /// Nanoseconds up each time.
        up: u64,
    },
    /// Delays each of the next messages that a function sends.
    DelayMessages {
        /// Number of the function.
        function: usize,
        /// Their number.
        count: u32,
        /// The delay of each message.
        #[serde(with = "DelayValue")]
        by: Delay,
    },
    /// Removes the function, as if it were pulled out of its slot: reads return ones, and the
    /// device does nothing.
    Remove {
        /// Number of the function.
        function: usize,
    },
    /// Inserts the function again, as after power on. A new client inserts it, too.
    Insert {
        /// Number of the function.
        function: usize,
    },
    /// Loses the next messages that a function sends.
    LoseMessages {
        /// Number of the function.
        function: usize,
        /// Their number.
        count: u32,
    },
    /// Loses the next interrupts of a function.
    LoseInterrupts {
        /// Number of the function.
        function: usize,
        /// Their number.
        count: u32,
    },
    /// Reports a health syndrome; 0 is healthy.
    Health {
        /// Number of the function.
        function: usize,
        /// The syndrome.
        syndrome: u8,
        /// Whether firmware requests a reset, which makes the driver recover.
        #[serde(default)]
        fatal: bool,
    },
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Reply {
    /// The request was carried out.
    Done,
    /// The request was refused.
    Error {
        /// The reason.
        why: String,
    },
    /// Objects.
    Objects {
        /// By kind.
        counts: BTreeMap<String, usize>,
        /// By kind, the objects that the driver had not destroyed when it last ended. The function destroyed them then.
        left: BTreeMap<String, usize>,
    },
    /// Host pages.
    Pages {
        /// The number of pages that firmware holds.
        held: usize,
    },
    /// Doorbells.
    Doorbells {
        /// See [`uverbs_connectx::doorbell::DoorbellErrors::torn`].
        torn: u64,
        /// See [`uverbs_connectx::doorbell::DoorbellErrors::record_behind`].
        record_behind: u64,
        /// See [`uverbs_connectx::doorbell::DoorbellErrors::differs`].
        differs: u64,
        /// See [`uverbs_connectx::doorbell::DoorbellErrors::late`].
        late: u64,
        /// See [`uverbs_connectx::doorbell::DoorbellErrors::stray`].
        stray: u64,
    },
    /// A VAR page.
    Var {
        /// The bytes of the page.
        bytes: Vec<u8>,
    },
}

fn error(why: impl Into<String>) -> Reply {
    Reply::Error { why: why.into() }
}

/// Carries out a request.
pub fn answer(fabric: &mut Fabric, request: &ControlRequest) -> Reply {
    let number = match *request {
        ControlRequest::Objects { function }
        | ControlRequest::Pages { function }
        | ControlRequest::Doorbells { function }
        | ControlRequest::Var { function, .. }
        | ControlRequest::Link { function, .. }
        | ControlRequest::FailCommand { function, .. }
        | ControlRequest::SilenceCommand { function, .. }
        | ControlRequest::FailRequest { function, .. }
        | ControlRequest::FlapLink { function, .. }
        | ControlRequest::DelayMessages { function, .. }
        | ControlRequest::Remove { function }
        | ControlRequest::Insert { function }
        | ControlRequest::LoseMessages { function, .. }
        | ControlRequest::LoseInterrupts { function, .. }
        | ControlRequest::Health { function, .. } => function,
    };
    if number >= fabric.len() {
        return error(format!("function {number} does not exist, only {} exist", fabric.len()));
    }
    let device = fabric.function(number).device_mut();
    match *request {
        ControlRequest::Objects { .. } => {
            let named = |(kind, count): (&str, usize)| (kind.to_owned(), count);
            let counts = device.objects().counts().into_iter().map(named).collect();
            let left = device.left().iter().copied().map(named).collect();
            return Reply::Objects { counts, left };
        }
        ControlRequest::Pages { .. } => return Reply::Pages { held: device.pages().held() },
        ControlRequest::Doorbells { .. } => {
            let errors = device.doorbell_errors();
            return Reply::Doorbells {
                torn: errors.torn,
                record_behind: errors.record_behind,
                differs: errors.differs,
                late: errors.late,
                stray: errors.stray,
            };
        }
        ControlRequest::Var { page, len, .. } => {
            let stride = 1u64 << LOG_VAR_STRIDE;
            let offset = u64::from(page) * stride;
            let pages = VAR_BYTES + TLP_PAGES * PAGE;
            if offset + u64::from(len) > pages || len > MAX_VAR {
                return error(format!(
                    "{len} bytes of VAR page {page}: at most {MAX_VAR} of an existing page can be read"
                ));
            }
            let mut bytes = vec![0; len as usize];
            device.bar_memory().read(VAR_OFFSET + offset, &mut bytes);
            return Reply::Var { bytes };
        }
        ControlRequest::Link { up, .. } => device.set_link(up),
        ControlRequest::FailCommand { opcode, after, status, .. } => {
            if status == 0 {
                return error("status 0 is success, ask for another");
            }
            device.faults_mut().fail_command(opcode, after, CommandFailure::Status(status));
        }
        ControlRequest::SilenceCommand { opcode, after, .. } => {
            device.faults_mut().fail_command(opcode, after, CommandFailure::Silence);
        }
        ControlRequest::FailRequest { qpn, side, after, syndrome, vendor, .. } => {
            device.faults_mut().fail_wqe(qpn, side, after, CqeError { syndrome, vendor });
        }
        ControlRequest::FlapLink { times, down, up, .. } => {
            let now = device.now();
            device.faults_mut().flap_link(now, times, down, up);
        }
        ControlRequest::DelayMessages { count, by, .. } => {
            device.faults_mut().delay_messages(count, by)
        }
        ControlRequest::Remove { function } => fabric.function(function).remove(),
        ControlRequest::Insert { function } => fabric.function(function).insert(),
        ControlRequest::LoseMessages { count, .. } => device.faults_mut().lose_messages(count),
        ControlRequest::LoseInterrupts { count, .. } => device.interrupts_mut().lose(count),
        ControlRequest::Health { syndrome, fatal, .. } => {
            device.init_segment_mut().set_health(syndrome, fatal)
        }
    }
    Reply::Done
}

/// One connection to the control socket.
pub struct Server {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Server {
    /// Serves a connected client.
    ///
    /// # Errors
    /// If the socket cannot be made non-blocking.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// The socket, to wait on.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Answers the requests that have arrived; returns false when the client is gone.
    pub fn serve(&mut self, fabric: &mut Fabric) -> bool {
        let mut bytes = [0; MAX_LINE];
        match self.stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => self.buffer.extend(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(_) => return false,
        }
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            let reply = match serde_json::from_slice(&line) {
                Ok(request) => answer(fabric, &request),
                Err(wrong) => error(wrong.to_string()),
            };
            let Ok(mut line) = serde_json::to_vec(&reply) else { return false };
            line.push(b'\n');
            if self.stream.write_all(&line).is_err() {
                return false;
            }
        }
        self.buffer.len() <= MAX_LINE
    }
}

/// The client's end of the connection.
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to a control socket.
    ///
    /// # Errors
    /// The error of the connection.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self { stream: BufReader::new(UnixStream::connect(path)?) })
    }

    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// An error of the socket, or `InvalidData` for a reply that cannot be parsed.
    pub fn ask(&mut self, request: &ControlRequest) -> io::Result<Reply> {
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        let mut reply = String::new();
        self.stream.read_line(&mut reply)?;
        Ok(serde_json::from_str(&reply)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_connectx::function::Region;
    use uverbs_connectx::options::Options;

    #[test]
    fn each_request_line_gets_a_reply_line() {
        let mut fabric = Fabric::default();
        fabric.add(Options::default());
        fabric.function(0).device().bar_memory().write(VAR_OFFSET + 4096, &[7, 8, 9]);
        let (mut client, server) = UnixStream::pair().unwrap();
        let mut server = Server::new(server).unwrap();
        let asked = [
            r#"{"do":"var","function":0,"page":1,"len":3}"#,
            r#"{"do":"pages","function":0}"#,
            r#"{"do":"pages","function":1}"#,
            r#"{"do":"dance"}"#,
            r#"{"do":"link","function":0,"up":false}"#,
        ];
        for line in asked {
            writeln!(client, "{line}").unwrap();
        }
        assert!(server.serve(&mut fabric));
        drop(server);
        let replies: Vec<Reply> = BufReader::new(client)
            .lines()
            .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
            .collect();
        assert_eq!(replies[0], Reply::Var { bytes: vec![7, 8, 9] });
        assert_eq!(replies[1], Reply::Pages { held: 0 });
        assert!(matches!(&replies[2], Reply::Error { why } if why.contains("1 exist")));
        assert!(matches!(&replies[3], Reply::Error { why } if why.contains("dance")));
        assert_eq!(replies[4], Reply::Done);
        assert!(!fabric.function(0).device().link_up());
    }

    #[test]
    fn every_var_page_is_read_and_no_byte_behind_the_last() {
        let mut fabric = Fabric::default();
        fabric.add(Options::default());
        let pages = (VAR_BYTES / PAGE) as u32;
        let last = pages + TLP_PAGES as u32 - 1;
        for page in [0, pages - 1, pages, last] {
            let value = (page + 7).to_be_bytes();
            let place = VAR_OFFSET + u64::from(page) * PAGE;
            fabric.function(0).write(Region::Bar0, place, &value);
            let asked = ControlRequest::Var { function: 0, page, len: 4 };
            assert_eq!(answer(&mut fabric, &asked), Reply::Var { bytes: value.to_vec() });
        }
        for (page, len) in [(last + 1, 1), (last, 4097), (u32::MAX, 4)] {
            let asked = ControlRequest::Var { function: 0, page, len };
            let reply = answer(&mut fabric, &asked);
            assert!(matches!(reply, Reply::Error { .. }), "{page} {len}: {reply:?}");
        }
    }

    #[test]
    fn a_client_that_sends_an_endless_line_is_dropped() {
        let mut fabric = Fabric::default();
        let (mut client, server) = UnixStream::pair().unwrap();
        let mut server = Server::new(server).unwrap();
        client.write_all(&[b'x'; 2 * MAX_LINE]).unwrap();
        assert!(server.serve(&mut fabric));
        assert!(!server.serve(&mut fabric));
    }
}
