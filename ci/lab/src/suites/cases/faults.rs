//! Faults of the device, injected while a program of rdma-core's runs on it: the driver and libmlx5
//! have to notice, report, and recover.
//!
//! Pairs with the control socket of the emulated ConnectX.

use super::emulator_check::{DoorbellFaults, objects};
use super::guest_processes::{GuestProcess, GuestProcesses};
use super::{CaseContext, failed};
use crate::machine::device::Emulation;
use crate::machine::session::Machine;
use crate::machine::vm::Vm;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use anyhow::{Context, Result, bail, ensure};
use connectx_vfio::control::{Client, ControlRequest, Reply};
use std::time::{Duration, Instant};
use uverbs_connectx::fault::{Delay, Side};

const GROUP: &str = "faults";

const CREATE_CQ: u16 = 0x400;
const CREATE_QP: u16 = 0x500;
const MILLISECOND: u64 = 1_000_000;

/// Seconds that a prompt event may take on a busy machine.
const PATIENCE: u64 = 150;

/// The event with which the driver gives the device up.
const FATAL: &str = "IBV_EVENT_DEVICE_FATAL";
/// The event with which the kernel takes it away from processes that have it open: it names no port.
const FATAL_OF_FILE: &str = "IBV_EVENT_DEVICE_FATAL (8), port 0";

/// The guest and the device of a test.
struct FaultTest<'a> {
    guest: GuestProcesses<'a>,
    device: Client,
}

type Test = fn(&mut FaultTest<'_>) -> Result<()>;

/// The tests in their order: the last ones reset or replug a function.
const TESTS: &[(&str, Test)] = &[
    ("doorbells_in_order", doorbells_in_order),
    ("a_command_that_fails", a_command_that_fails),
    ("requests_with_every_syndrome", requests_with_every_syndrome),
    ("a_receive_with_a_syndrome", a_receive_with_a_syndrome),
    ("lost_messages", lost_messages),
    ("delayed_messages", delayed_messages),
    ("a_link_that_flaps", a_link_that_flaps),
    ("sickness", sickness),
    ("surprise_removal", surprise_removal),
    ("our_program_and_surprise_removal", our_program_and_surprise_removal),
    ("our_program_and_removal", our_program_and_removal),
    ("our_program_works_again", our_program_works_again),
];

/// The tests that wait for the driver's command timeout, which is a minute.
const SLOW: &[(&str, Test)] = &[
    ("a_command_without_answer", a_command_without_answer),
    ("a_lost_interrupt", a_lost_interrupt),
];

/// Runs the requested tests in one guest.
pub(crate) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let name = |test: &str| format!("{GROUP}::{test}");
    let tests: Vec<_> =
        TESTS.iter().chain(SLOW).filter(|(n, _)| context.wanted(&name(n))).collect();
    if tests.is_empty() {
        return Vec::new();
    }
    say!("\n{GROUP} on {} mlx5", context.kernel.label());
    let mut reports = Vec::new();
    let mut log = String::new();
    let outcome = (|| {
        let ours = match tests.iter().any(|(name, _)| name.starts_with("our_")) {
            true => context.ours()?,
            false => Vec::new(),
        };
        let mut left = tests.iter();
        while left.len() > 0 {
            let machine = context.machine(Emulation::default());
            let mut vm = context.session.boot(&Machine { programs: &ours, ..machine })?;
            for (test, body) in left.by_ref() {
                let device = vm.control()?;
                reports.push(one(&name(test), *body, &mut vm, device, &mut log));
                // A fault that is still there would fail the next test, too, so that test gets a
                // new guest.
                if reports.last().is_some_and(|report| report.outcome != TestOutcome::Passed) {
                    break;
                }
            }
            if !vm.ended() {
                vm.power_off()?;
            }
        }
        Ok(())
    })();
    if let Err(error) = outcome.and_then(|()| context.keep(GROUP, &log)) {
        reports.push(failed(&name("machine"), &error));
    }
    for (test, _) in &tests[reports.len().min(tests.len())..] {
        reports.push(failed(&name(test), &anyhow::anyhow!("its machine was lost before")));
    }
    reports
}

fn one(name: &str, body: Test, vm: &mut Vm, device: Client, log: &mut String) -> Report {
    let start = Instant::now();
    let mut test = FaultTest { guest: GuestProcesses::new(vm), device };
    let result = test.around(body);
    let word = if result.is_ok() { "ok" } else { "FAILED" };
    if result.is_err() {
        // For the log; the guest may be lost.
        let _kernel = test.guest.run("dmesg | tail -n 100", PATIENCE);
    }
    stages::case(name, start.elapsed());
    say!("test {name} ... {word} ({:.1} s)", start.elapsed().as_secs_f64());
    log.push_str(&format!("==== {name} ... {word}\n{}\n", test.guest.transcript()));
    match result {
        Ok(()) => Report { name: name.to_owned(), outcome: TestOutcome::Passed },
        Err(error) => failed(name, &error),
    }
}

/// The end of the server when its client has failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Server {
    /// It may never notice: it is killed.
    Killed,
    /// It fails as well, at a time of its own.
    Awaited,
}

/// A server on the second function and a client on the first, which ends the script as it ends.
fn pair(server: &str, client: &str, after: Server) -> String {
    let kill = if after == Server::Killed { "[ $status = 0 ] || kill $server\n" } else { "" };
    format!(
        "timeout 60 {server} >/tmp/server 2>&1 & server=$!\n\
         until_true 'tcp 18515' || exit 1\n\
         timeout 50 {client} 127.0.0.1; status=$?\n\
         {kill}wait $server; cat /tmp/server; exit $status"
    )
}

/// A ping-pong with the same options on both sides.
fn ping_pong(options: &str) -> String {
    ping_pong_and(options, Server::Killed)
}

fn ping_pong_and(options: &str, after: Server) -> String {
    let side = |device| format!("ibv_rc_pingpong -d {device} -g 3 {options}");
    pair(&side("mlx5_1"), &side("mlx5_0"), after)
}

/// A program of perftest with the same options on both sides.
fn perftest(program: &str) -> String {
    let side = |device| format!("{program} -d {device} -x 3 -F");
    pair(&side("mlx5_1"), &side("mlx5_0"), Server::Killed)
}

impl FaultTest<'_> {
    /// Runs a test; afterwards a ping-pong must work, and the device's objects must be as before.
    fn around(&mut self, body: Test) -> Result<()> {
        self.guest.run(&ping_pong("-n 10"), PATIENCE).context("before")?;
        let before = objects(self.guest.vm())?;
        body(self)?;
        self.guest.run(&ping_pong("-n 100 -e"), PATIENCE).context("afterwards")?;
        let after = objects(self.guest.vm())?;
        ensure!(before == after, "objects before and afterwards: {before:?}, {after:?}");
        Ok(())
    }

    fn ask(&mut self, request: ControlRequest) -> Result<()> {
        match self.device.ask(&request)? {
            Reply::Done => Ok(()),
            other => bail!("{request:?}: {other:?}"),
        }
    }

    /// Runs a server and a client that must fail, and returns the output of both.
    fn fails(&mut self, script: &str) -> Result<String> {
        let who = self.guest.start(script)?;
        let status = self.guest.end(who, PATIENCE)?;
        let text = self.guest.text(who)?.to_owned();
        ensure!(status != 0, "the client saw nothing:\n{text}");
        Ok(text)
    }

    /// Waits for asynchronous events of the first function until it is told to end.
    fn events(&mut self) -> Result<GuestProcess> {
        let who = self.guest.start("exec timeout 150 ibv_asyncwatch -d mlx5_0")?;
        self.guest.until(who, "async event FD", PATIENCE)?;
        Ok(who)
    }

    fn no_more_events(&mut self, events: GuestProcess) -> Result<()> {
        self.guest.run("killall ibv_asyncwatch", PATIENCE)?;
        self.guest.end(events, PATIENCE)?;
        Ok(())
    }

    /// Configures the first function's new interface like the old one, and waits for the port.
    fn restore(&mut self) -> Result<()> {
        let script = "until_long() { for turn in 1 2 3 4 5 6; do until_true \"$1\" && return; done; exit 1; }\n\
             until_long 'ls /sys/class/infiniband/mlx5_0/device/net/*/address'\n\
             own=$(ls /sys/class/infiniband/mlx5_0/device/net | head -n 1)\n\
             far=$(cat /sys/class/infiniband/mlx5_1/device/net/*/address)\n\
             ip=/usr/bin/ip\n\
             $ip link set $own up && $ip address replace 10.0.0.1/24 dev $own &&\n\
             $ip route replace 10.0.0.2 dev $own table 101 scope link &&\n\
             $ip neighbour replace 10.0.0.2 lladdr $far dev $own nud permanent || exit 1\n\
             until_long 'grep -q 0000:ffff:0a00:0001 /sys/class/infiniband/mlx5_0/ports/1/gids/3'\n\
             until_long 'grep -q ACTIVE /sys/class/infiniband/mlx5_0/ports/1/state'".to_string();
        self.guest.run(&script, PATIENCE).context("the new interface")?;
        Ok(())
    }
}

/// The device counts no fault at the doorbells of libmlx5, so counts elsewhere are no false alarms.
fn doorbells_in_order(test: &mut FaultTest<'_>) -> Result<()> {
    // The driver tests write combining with differing copies first.
    let before = DoorbellFaults::of(test.guest.vm())?;
    let programs = ["ib_send_lat -s 32 -n 300", "ib_send_bw -s 64 -n 400 -l 4 -t 16 -q 2"];
    for script in programs.map(perftest).into_iter().chain([ping_pong("-n 300 -e")]) {
        test.guest.run(&script, PATIENCE)?;
    }
    DoorbellFaults::of(test.guest.vm())?.none_since(before)
}

/// The nth command of a kind fails; libmlx5 says which object could not be made.
fn a_command_that_fails(test: &mut FaultTest<'_>) -> Result<()> {
    const BAD_RESOURCE: u8 = 0x05;
    for (after, words) in [(0, "Couldn't create QP"), (1, "Couldn't create QP")] {
        test.ask(ControlRequest::FailCommand {
            function: 0,
            opcode: CREATE_QP,
            after,
            status: BAD_RESOURCE,
        })?;
        if after > 0 {
            test.guest.run(&ping_pong("-n 10"), PATIENCE).context("the one before")?;
        }
        let text = test.fails(&ping_pong("-n 10"))?;
        ensure!(text.contains(words), "{words:?} is not in\n{text}");
    }
    Ok(())
}

/// Each syndrome becomes the status of the verbs that stands for it, and the vendor's syndrome is
/// shown by libmlx5 as it is.
fn requests_with_every_syndrome(test: &mut FaultTest<'_>) -> Result<()> {
    const STATUS: [(u8, u32); 14] = [
        (0x01, 1),
        (0x02, 2),
        (0x04, 4),
        (0x05, 5),
        (0x06, 6),
        (0x10, 7),
        (0x11, 8),
        (0x12, 9),
        (0x13, 10),
        (0x14, 11),
        (0x15, 12),
        (0x16, 13),
        (0x22, 16),
        // An unknown syndrome is a general error.
        (0x7b, 21),
    ];
    let fail = |syndrome, vendor| ControlRequest::FailRequest {
        function: 0,
        qpn: None,
        side: Side::Send,
        after: 4,
        syndrome,
        vendor,
    };
    for (syndrome, status) in STATUS {
        test.ask(fail(syndrome, 0))?;
        let text = test.fails(&ping_pong("-n 20"))?;
        let words = format!("({status}) for wr_id 2");
        ensure!(text.contains(&words), "syndrome {syndrome:#x}: {words:?} is not in\n{text}");
    }
    test.ask(fail(0x10, 0x99))?;
    let text = test.fails(&perftest("ib_write_lat -s 64 -n 20"))?;
    ensure!(
        text.contains("Failed status 7: wr_id 0 syndrom 0x99"),
        "no vendor's syndrome:\n{text}"
    );
    Ok(())
}

/// A receive that fails is the receiver's error, and a remote one for the sender.
fn a_receive_with_a_syndrome(test: &mut FaultTest<'_>) -> Result<()> {
    test.ask(ControlRequest::FailRequest {
        function: 1,
        qpn: None,
        side: Side::Receive,
        after: 3,
        syndrome: 0x04,
        vendor: 0x77,
    })?;
    let text = test.fails(&ping_pong_and("-n 20", Server::Awaited))?;
    ensure!(text.contains("(4) for wr_id 1"), "no protection error at the receiver\n{text}");
    ensure!(text.contains("(11) for wr_id 2"), "no remote error at the sender\n{text}");
    Ok(())
}

/// A few lost messages are sent again; if all are lost, the retries run out.
fn lost_messages(test: &mut FaultTest<'_>) -> Result<()> {
    test.ask(ControlRequest::LoseMessages { function: 0, count: 3 })?;
    test.guest.run(&ping_pong("-n 50"), PATIENCE).context("three lost messages")?;
    test.ask(ControlRequest::LoseMessages { function: 0, count: 100_000 })?;
    let text = test.fails(&ping_pong("-n 50"))?;
    ensure!(text.contains("(12) for wr_id 2"), "the retries do not run out\n{text}");
    test.ask(ControlRequest::LoseMessages { function: 0, count: 0 })
}

/// A delayed message arrives: in time, or in a repetition after the timeout of `ibv_rc_pingpong`, which is 67 ms. Its
/// seven retries run out if each of them is late, too.
fn delayed_messages(test: &mut FaultTest<'_>) -> Result<()> {
    let late = Delay::Time(1_000 * MILLISECOND);
    // The third message has none to let pass.
    for (by, least) in
        [(Delay::Time(50 * MILLISECOND), 0.05), (late, 0.067), (Delay::Messages(3), 0.067)]
    {
        test.ask(ControlRequest::DelayMessages { function: 0, count: 1, by })?;
        let text = test.guest.run(&ping_pong("-n 20"), PATIENCE).context("a delayed message")?;
        let seconds = text
            .lines()
            .find_map(|line| line.split_once(" iters in ")?.1.split(' ').next()?.parse().ok())
            .unwrap_or(0.0);
        ensure!(seconds >= least, "{by:?}: {seconds} s\n{text}");
    }
    test.ask(ControlRequest::DelayMessages { function: 0, count: 100, by: late })?;
    let text = test.fails(&ping_pong("-n 20"))?;
    ensure!(text.contains("(12) for wr_id 2"), "the retries do not run out\n{text}");
    // Four queue pairs; some overtake others.
    test.ask(ControlRequest::DelayMessages { function: 0, count: 40, by: Delay::Messages(3) })?;
    let script = perftest("ib_write_bw -q 4 -n 200 -s 64");
    test.guest.run(&script, PATIENCE).context("messages that overtake each other")?;
    test.ask(ControlRequest::DelayMessages { function: 0, count: 0, by: Delay::Time(0) })
}

/// Each change of the link is an event of the port.
fn a_link_that_flaps(test: &mut FaultTest<'_>) -> Result<()> {
    let events = test.events()?;
    let time = 2500 * MILLISECOND;
    test.ask(ControlRequest::FlapLink { function: 0, times: 2, down: time, up: time })?;
    let deadline = Instant::now() + Duration::from_secs(PATIENCE);
    let count = |text: &str, words: &str| text.matches(words).count();
    loop {
        let text = test.guest.text(events)?;
        if count(text, "IBV_EVENT_PORT_ERR") >= 2 && count(text, "IBV_EVENT_PORT_ACTIVE") >= 2 {
            break;
        }
        ensure!(Instant::now() < deadline, "not two changes each way:\n{text}");
        test.guest.pause(Duration::from_millis(200))?;
    }
    test.no_more_events(events)
}

/// The driver sees that firmware asks for a reset, raises an event in each process that has the
/// device open, resets it and initialises it again.
fn sickness(test: &mut FaultTest<'_>) -> Result<()> {
    const INTERNAL_ERROR: u8 = 1;
    let events = test.events()?;
    test.ask(ControlRequest::Health { function: 0, syndrome: INTERNAL_ERROR, fatal: true })?;
    test.guest.until(events, FATAL, PATIENCE)?;
    test.guest.until(events, FATAL_OF_FILE, PATIENCE)?;
    test.no_more_events(events)?;
    test.restore()?;
    test.guest.run("dmesg | grep 'health recovery succeeded'", PATIENCE)?;
    Ok(())
}

/// A function that is pulled out: waiting processes get an event, its open files end, and it works
/// again after it was put back.
fn surprise_removal(test: &mut FaultTest<'_>) -> Result<()> {
    let place = test.guest.run("readlink -f /sys/class/infiniband/mlx5_0/device", PATIENCE)?;
    let events = test.events()?;
    let waiting = test.guest.start(&ping_pong("-n 100000000 -e"))?;
    test.guest.until(waiting, "remote address", PATIENCE)?;
    // That is printed before they connect.
    test.guest.pause(Duration::from_millis(1500))?;
    test.ask(ControlRequest::Remove { function: 0 })?;
    test.guest.until(events, FATAL, PATIENCE)?;
    // The events of a hot-plug slot. QEMU's own way to unplug such a function crashes QEMU.
    test.guest.run(&format!("echo 1 >{}/remove", place.trim()), PATIENCE)?;
    test.guest.until(events, FATAL_OF_FILE, PATIENCE)?;
    test.no_more_events(events)?;
    let status = test.guest.end(waiting, PATIENCE)?;
    let text = test.guest.text(waiting)?;
    ensure!(status != 0 && text.contains("Failed to get cq_event"), "ended with {status}\n{text}");
    test.guest
        .run("[ ! -e /sys/class/infiniband/mlx5_0 ]", PATIENCE)
        .context("the device is still there")?;
    test.ask(ControlRequest::Insert { function: 0 })?;
    test.guest.run("echo 1 >/sys/bus/pci/rescan", PATIENCE)?;
    test.restore()
}

/// A program of this project that does everything at once while its device is removed: each call
/// returns that the device is gone, none hangs, and nothing is left in the device.
fn our_program(test: &mut FaultTest<'_>, surprise: bool) -> Result<()> {
    let place = test.guest.run("readlink -f /sys/class/infiniband/mlx5_0/device", PATIENCE)?;
    let ours = test.guest.start(
        "rm -f /tmp/gone\n\
         (until [ -e /tmp/gone ]; do usleep 20000; done; echo) |\n\
         UVERBS_TEST_DEVICE=mlx5_0 timeout 120 uverbs-device-tests --unplug",
    )?;
    test.guest.until(ours, "at work", PATIENCE)?;
    if surprise {
        test.ask(ControlRequest::Remove { function: 0 })?;
        // First no process notices; then the driver does, before the device is removed.
        test.guest.pause(Duration::from_secs(4))?;
    }
    test.guest.run(&format!("echo 1 >{}/remove; touch /tmp/gone", place.trim()), PATIENCE)?;
    let status = test.guest.end(ours, PATIENCE)?;
    let text = test.guest.text(ours)?;
    ensure!(status == 0 && text.contains("clean"), "ended with {status}\n{text}");
    if surprise {
        test.ask(ControlRequest::Insert { function: 0 })?;
    }
    test.guest.run("echo 1 >/sys/bus/pci/rescan", PATIENCE)?;
    test.restore()
}

fn our_program_and_surprise_removal(test: &mut FaultTest<'_>) -> Result<()> {
    our_program(test, true)
}

fn our_program_and_removal(test: &mut FaultTest<'_>) -> Result<()> {
    our_program(test, false)
}

/// A program of this project that waits for events learns that its device is gone, and works again when a
/// device of that name is back.
fn our_program_works_again(test: &mut FaultTest<'_>) -> Result<()> {
    let place = test.guest.run("readlink -f /sys/class/infiniband/mlx5_0/device", PATIENCE)?;
    let ours = test
        .guest
        .start("exec env UVERBS_TEST_DEVICE=mlx5_0 timeout 150 uverbs-device-tests --hotplug")?;
    test.guest.until(ours, "AtWork", PATIENCE)?;
    test.guest.run(&format!("echo 1 >{}/remove", place.trim()), PATIENCE)?;
    test.guest.until(ours, "Gone", PATIENCE)?;
    test.guest.run("echo 1 >/sys/bus/pci/rescan", PATIENCE)?;
    test.restore()?;
    let status = test.guest.end(ours, PATIENCE)?;
    let text = test.guest.text(ours)?;
    ensure!(status == 0 && text.contains("Again"), "ended with {status}\n{text}");
    Ok(())
}

/// The driver gives up on a command after a minute, and its caller gets an error.
fn a_command_without_answer(test: &mut FaultTest<'_>) -> Result<()> {
    test.ask(ControlRequest::SilenceCommand { function: 0, opcode: CREATE_CQ, after: 0 })?;
    let who = test.guest.start("exec timeout 100 ibv_rc_pingpong -d mlx5_0 -g 3")?;
    let status = test.guest.end(who, PATIENCE)?;
    let text = test.guest.text(who)?;
    ensure!(status == 1 && text.contains("Couldn't create CQ"), "ended with {status}\n{text}");
    test.guest.run("dmesg | grep 'CREATE_CQ(0x400) timeout'", PATIENCE)?;
    Ok(())
}

/// When the interrupt of a finished command is lost, the driver looks for its event by itself.
fn a_lost_interrupt(test: &mut FaultTest<'_>) -> Result<()> {
    test.ask(ControlRequest::LoseInterrupts { function: 0, count: 1 })?;
    test.guest.run("timeout 100 ibv_devinfo -d mlx5_0", PATIENCE)?;
    test.guest.run("dmesg | grep 'Recovered [1-9].* EQEs on cmd_eq'", PATIENCE)?;
    Ok(())
}
