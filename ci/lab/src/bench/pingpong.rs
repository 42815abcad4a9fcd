//! The two programs that are compared: how each is started, and how its output is read.

use anyhow::{Result, bail};

/// Whose ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// `uverbs pingpong` of this workspace.
    Ours,
    /// The example `pingpong` of this workspace: futures, over reliable connections with events.
    Futures,
    /// `uverbs pingpong` on devices in the processes, over UDP.
    Udp,
    /// rdma-core's `ibv_*_pingpong`.
    Theirs,
}

/// Something that both can do.
#[derive(Clone, Debug)]
pub(super) struct PingPongOperation {
    /// The transport as both spell it.
    pub(super) kind: &'static str,
    /// Messages under way at once.
    pub(super) queue_pairs: u32,
    pub(super) size: u32,
    pub(super) events: bool,
    /// The driver of futures sleeps in the read of the next event, in place of an event loop.
    pub(super) blocking: bool,
}

impl PingPongOperation {
    /// Latency with one message under way, by size and by how completions are waited for, then
    /// the rate with many under way.
    pub(super) fn all() -> Vec<PingPongOperation> {
        let mut all = Vec::new();
        for (kind, queue_pairs, sizes) in
            [("rc", 1, &[2, 4096, 65536][..]), ("srq", 16, &[2, 4096][..])]
        {
            for events in [false, true] {
                for &size in sizes {
                    all.push(PingPongOperation {
                        kind,
                        queue_pairs,
                        size,
                        events,
                        blocking: false,
                    });
                }
            }
        }
        all
    }

    pub(super) fn name(&self) -> String {
        let waiting = match (self.events, self.blocking) {
            (true, true) => "events, blocking reads,",
            (true, false) => "events",
            (false, _) => "polled",
        };
        let size = match self.size {
            size if size % 1024 == 0 => format!("{} KiB", size / 1024),
            size => format!("{size} B"),
        };
        match self.queue_pairs {
            1 => format!("{} {waiting} {size}", self.kind),
            many => format!("{} ×{many} {waiting} {size}", self.kind),
        }
    }
}

/// The command that succeeds once a program listens on TCP port 18515.
const LISTENS: &str = "cat /proc/net/tcp /proc/net/tcp6 | grep -q ':4853 [0-9A-F]*:0000 0A'";

/// Separates the output of the server from that of the client.
pub(super) const CLIENT_SAYS: &str = "-- client:";

/// The command that starts the server, waits until the command `listens` succeeds, runs the client, and shows what
/// both printed.
pub(super) fn server_and_client(listens: &str, server: &str, client: &str) -> Vec<String> {
    let script = format!(
        r#"
{server} >/tmp/server 2>&1 &
server=$!
until {listens} || ! kill -0 $server
do sleep 0.02
done
{client} >/tmp/client 2>&1
status=$?
[ $status = 0 ] || kill $server
wait $server || status=1
cat /tmp/server
echo '{CLIENT_SAYS}'
cat /tmp/client
exit $status
"#
    );
    vec!["sh".into(), "-c".into(), script]
}

impl Program {
    /// The command that runs both sides, under the counter of system calls if so wanted.
    pub(super) fn script(
        self,
        operation: &PingPongOperation,
        iterations: u64,
        counted: bool,
    ) -> Vec<String> {
        let PingPongOperation { kind, queue_pairs, size, .. } = operation;
        let mut side = match self {
            Program::Ours | Program::Udp => format!("uverbs pingpong {kind}"),
            Program::Futures => "futures-pingpong".to_owned(),
            Program::Theirs => format!("ibv_{kind}_pingpong"),
        };
        // Both know the same letters.
        let index = if self == Program::Udp { "" } else { " -g 1" };
        side.push_str(&format!(" -p 18515{index} -m 1024 -s {size} -n {iterations}"));
        if *queue_pairs > 1 {
            side.push_str(&format!(" -q {queue_pairs}"));
        }
        if operation.events {
            side.push_str(" -e");
        }
        if operation.blocking && self == Program::Futures {
            side.push_str(" --blocking");
        }
        match self {
            Program::Udp => super::udp::pair(&side, counted),
            _ => pair(&side, counted),
        }
    }

    /// Microseconds per iteration. Both sides have a clock of their own and neither is more
    /// right, so this is their mean.
    pub(super) fn microseconds(self, output: &str) -> Result<f64> {
        let unit = match self {
            Program::Ours | Program::Futures | Program::Udp => "µs per iteration",
            Program::Theirs => "usec/iter",
        };
        match numbers_before(output, unit).as_slice() {
            [server, client] => Ok((server + client) / 2.0),
            found => bail!("{} times in place of two in:\n{output}", found.len()),
        }
    }
}

/// Runs both sides of a program, which differ by device and host only, under the counter of system
/// calls if so wanted.
///
/// Both yield to everything else: rxe works in kernel threads, and while two processes poll on two
/// processors those would wait for the scheduler's tick, which is then all that is measured.
pub(super) fn pair(side: &str, counted: bool) -> Vec<String> {
    let counter = if counted { "lab-count " } else { "" };
    yielding(&format!("{counter}{side} -d rxe0"), &format!("{counter}{side} -d rxe1 10.0.0.1"))
}

/// Runs a server and a client that yield to everything else.
pub(super) fn yielding(server: &str, client: &str) -> Vec<String> {
    let mut command = server_and_client(LISTENS, server, client);
    command[2].insert_str(0, "renice -n 19 -p $$");
    command
}

/// System calls of both sides together.
pub(super) fn system_calls(output: &str) -> Result<f64> {
    match numbers_before(output, "system calls").as_slice() {
        [server, client] => Ok(server + client),
        found => bail!("{} counts in place of two in:\n{output}", found.len()),
    }
}

/// The numbers that stand directly before a unit.
pub(super) fn numbers_before(text: &str, unit: &str) -> Vec<f64> {
    text.match_indices(unit)
        .filter_map(|(at, _)| text[..at].split_whitespace().next_back()?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_times_are_averaged() {
        let theirs = "4096000 bytes in 0.01 seconds = 3000.50 Mbit/sec\n\
                      500 iters in 0.01 seconds = 20.50 usec/iter\n\
                      500 iters in 0.01 seconds = 21.50 usec/iter\n";
        assert_eq!(Program::Theirs.microseconds(theirs).unwrap(), 21.0);
        let ours = "500 iterations in 0.010 s: 20.00 µs per iteration\n\
                    500 iterations in 0.011 s: 22.00 µs per iteration\n";
        assert_eq!(Program::Ours.microseconds(ours).unwrap(), 21.0);
        assert!(Program::Ours.microseconds(theirs).is_err());
    }

    #[test]
    fn counts_add_up() {
        let output = "lab-count: 120 system calls\nnoise\nlab-count: 30 system calls\n";
        assert_eq!(system_calls(output).unwrap(), 150.0);
        assert!(system_calls("lab-count: 120 system calls\n").is_err());
    }

    #[test]
    fn sides_differ_by_device_and_host_only() {
        let operation = PingPongOperation {
            kind: "srq",
            queue_pairs: 16,
            size: 2,
            events: true,
            blocking: false,
        };
        assert_eq!(operation.name(), "srq ×16 events 2 B");
        let script = Program::Ours.script(&operation, 7, true).pop().unwrap();
        let side = "lab-count uverbs pingpong srq -p 18515 -g 1 -m 1024 -s 2 -n 7 -q 16 -e";
        assert!(script.contains(&format!("\n{side} -d rxe0 >")), "{script}");
        assert!(script.contains(&format!("\n{side} -d rxe1 10.0.0.1 >")), "{script}");
        let script = Program::Futures.script(&operation, 7, false).pop().unwrap();
        assert!(script.contains("\nfutures-pingpong -p 18515 -g 1 -m 1024"), "{script}");
        let script = Program::Theirs.script(&operation, 7, false).pop().unwrap();
        assert!(script.contains("\nibv_srq_pingpong -p 18515"), "{script}");
    }
}
