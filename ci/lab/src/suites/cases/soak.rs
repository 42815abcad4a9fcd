//! Long use of a device: reloading of drivers, resets, hot-plugging, reboots, and many short-lived
//! clients. Nothing may pile up in the device or in the kernel.
//!
//! The emulator counts live objects and lent pages, and reports them over its control socket.

use super::{CaseContext, case, emulator_check, failed};
use crate::machine::device::Emulation;
use crate::machine::session::Machine;
use crate::machine::vm::Vm;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use anyhow::{Result, bail, ensure};
use connectx_vfio::control::{ControlRequest, Reply};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use uverbs_connectx::object::mkey::CACHED_MKEY;
use uverbs_connectx::pages::FirmwarePages;

/// Waits until both devices work, and shows that they do.
const WORKS: &str = r#"
works() {
    for name in mlx5_0 mlx5_1; do
        until_true "grep -q ACTIVE /sys/class/infiniband/$name/ports/1/state" || exit 1
    done
    timeout 60 ibv_rc_pingpong -d mlx5_1 -g 1 -n 100 >server & server=$!
    until_true "tcp 18515" || exit 1
    timeout 60 ibv_rc_pingpong -d mlx5_0 -g 1 -n 100 127.0.0.1 || fail "no ping-pong"
    wait $server || fail "no ping-pong at the server"
}
# The device has GID 1 before the interface has the link-local address in it, without which the
# way to it is not found: 80 is an address that is there to stay.
up() {
    for name in mlx5_0 mlx5_1; do
        until_true "test -e /sys/class/infiniband/$name/device/net" || exit 1
        for interface in $(ls /sys/class/infiniband/$name/device/net); do
            /usr/bin/ip link set $interface up || fail "$interface does not come up"
            until_true "grep -q '^fe80.* 80 *$interface\$' /proc/net/if_inet6" || exit 1
        done
        until_true "grep -q fe80 /sys/class/infiniband/$name/ports/1/gids/1" || exit 1
    done
}
pci() { readlink -f /sys/class/infiniband/$1/device; }
cd /tmp
"#;

/// A soak by its name.
type Soak = fn(&CaseContext<'_>, &mut Vm) -> Result<()>;

const SOAKS: &[(&str, Soak)] = &[
    ("soak::clients", clients),
    ("soak::unbind_under_traffic", unbind_under_traffic),
    ("soak::function_reset", function_reset),
    ("soak::remove_and_rescan", remove_and_rescan),
    ("soak::reboot", reboot),
    ("soak::another_guest", another_guest),
    ("soak::reload", reload),
];

/// Runs the requested soaks in one guest.
pub(crate) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let wanted: Vec<_> = SOAKS
        .iter()
        .filter(|(name, _)| match context.scope.filter {
            None => true,
            Some(filter) => name.contains(filter),
        })
        .collect();
    let mut reports = Vec::new();
    if wanted.is_empty() {
        return reports;
    }
    say!("\nsoak on {} mlx5", context.kernel.label());
    let machine = machine(context);
    let mut vm = None;
    for (name, soak) in wanted {
        let start = Instant::now();
        let result = (|| {
            let running = match &mut vm {
                Some(vm) => vm,
                none => none.insert(context.session.boot(&machine)?),
            };
            soak(context, running)
        })();
        let seconds = start.elapsed().as_secs_f64();
        stages::case(name, start.elapsed());
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        say!("test {name} ... {word} ({seconds:.1} s)");
        reports.push(match result {
            Ok(()) => Report { name: (*name).to_owned(), outcome: TestOutcome::Passed },
            Err(error) => {
                // The next one gets a new guest.
                vm = None;
                failed(name, &error)
            }
        });
    }
    if let Some(Err(error)) = vm.map(Vm::power_off) {
        reports.push(failed("soak::power_off", &error));
    }
    reports
}

fn machine(context: &CaseContext<'_>) -> Machine<'static> {
    Machine { python: true, ..context.machine(Emulation::default()) }
}

/// Runs a script as root that must succeed, and returns its output.
fn script(vm: &mut Vm, text: &str) -> Result<String> {
    match case::run_script(vm, &format!("{WORKS}\n{text}"), true)? {
        Ok(printed) => Ok(printed),
        Err(why) => bail!("{why}"),
    }
}

/// Objects of both functions, and pages that the driver gave to the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct DeviceUsage {
    objects: [BTreeMap<String, usize>; 2],
    /// The objects that the driver had not destroyed when it last ended.
    left: [BTreeMap<String, usize>; 2],
    pages: [usize; 2],
}

impl DeviceUsage {
    fn of(vm: &Vm) -> Result<Self> {
        let mut usage = Self::default();
        let mut control = vm.control()?;
        for function in 0..2 {
            [usage.objects[function], usage.left[function]] =
                emulator_check::living_and_left(vm, function)?;
            match control.ask(&ControlRequest::Pages { function })? {
                Reply::Pages { held } => usage.pages[function] = held,
                other => bail!("pages of function {function}: {other:?}"),
            }
        }
        Ok(usage)
    }

    /// The kinds of objects that have become more; pages are a kind, too, if there are more than firmware
    /// keeps with so many objects. Cached mkeys do not count: how many there are depends on the sizes of earlier
    /// regions and on the time since. Counts may be lower: the objects of a process that just ended can be among those
    /// before.
    fn grown(&self, before: &Self) -> BTreeSet<&str> {
        let mut kinds = BTreeSet::new();
        for function in 0..2 {
            let (objects, known) = (&self.objects[function], &before.objects[function]);
            let grown = |(kind, count): &(&String, &usize)| {
                *kind != CACHED_MKEY && known.get(*kind).is_none_or(|old| *count > old)
            };
            kinds.extend(objects.iter().filter(grown).map(|(kind, _)| kind.as_str()));
            if self.pages[function] > FirmwarePages::most(objects.values().sum()) {
                kinds.insert("pages");
            }
        }
        kinds
    }

    /// Whether the device has no objects and no pages, as it must be without a driver, and the driver destroyed all
    /// objects itself.
    fn is_empty(&self) -> bool {
        (0..2).all(|function| self.is_empty_of(function))
    }

    /// The same of one function.
    fn is_empty_of(&self, function: usize) -> bool {
        let objects = [&self.objects[function], &self.left[function]];
        objects.iter().all(|kinds| kinds.values().all(|count| *count == 0))
            && self.pages[function] == 0
    }
}

/// The kernel's own counts, by device: each line begins with a number that the device gets anew when
/// its driver is bound again.
fn resources(vm: &mut Vm) -> Result<String> {
    script(vm, "/usr/bin/rdma resource show | sed 's/^[0-9]*: //' | sort")
}

/// The counts of the device, and those of the kernel.
type UsageAndResources = (DeviceUsage, String);

fn counts(vm: &mut Vm) -> Result<UsageAndResources> {
    Ok((DeviceUsage::of(vm)?, resources(vm)?))
}

/// Whether device and kernel count no more than before; an error if they had time enough: the objects of a process go
/// when the kernel releases its file, a little later.
fn has_settled(
    before: &UsageAndResources,
    after: &UsageAndResources,
    waited: Duration,
) -> Result<bool> {
    let grown = after.0.grown(&before.0);
    if grown.is_empty() && after.1 == before.1 {
        return Ok(true);
    }
    ensure!(
        waited < Duration::from_secs(10),
        "after {waited:?} more of {grown:?}\nbefore: {before:#?}\nafter: {after:#?}"
    );
    Ok(false)
}

fn settle(vm: &mut Vm, before: &UsageAndResources) -> Result<()> {
    let start = Instant::now();
    while !has_settled(before, &counts(vm)?, start.elapsed())? {
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// A thousand processes, or 150 in an ordinary run, open a device, use it, and end with or without
/// destroying their objects.
fn clients(context: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    const PROGRAM: &str = include_str!("client.py");
    let round = |vm: &mut Vm, rounds: u32| {
        let program = PROGRAM.replace('\'', "\"");
        script(
            vm,
            &format!("timeout 500 python3 -c '{program}' {rounds} || fail 'a client failed'"),
        )
    };
    // The driver makes some objects at their first use.
    round(vm, 50)?;
    let before = counts(vm)?;
    round(vm, if context.scope.options.soak { 1000 } else { 150 })?;
    settle(vm, &before)
}

/// Unbinds the driver while clients send: the client that waits for events must notice and end, the
/// one that polls goes on polling memory. Without the driver the device has no objects of theirs,
/// and afterwards as many as before.
fn unbind_under_traffic(context: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    // The driver makes some objects in the first turn.
    let mut before = None;
    for turn in 1..=if context.scope.options.soak { 3 } else { 2 } {
        let device = script(
            vm,
            r#"
up
device=$(pci mlx5_0)
timeout 60 ib_write_bw -F -x 1 -d mlx5_1 -s 4096 -D 8 >polled 2>&1 & polled=$!
until_true "tcp 18515" || exit 1
timeout 60 ib_write_bw -F -x 1 -d mlx5_0 -s 4096 -D 8 127.0.0.1 >polling 2>&1 & polling=$!
until_true "! tcp 18515" || exit 1
timeout 60 ibv_rc_pingpong -e -n 10000000 -g 1 -d mlx5_1 >server 2>&1 & server=$!
until_true "tcp 18515" || exit 1
timeout 60 ibv_rc_pingpong -e -n 10000000 -g 1 -d mlx5_0 127.0.0.1 >client 2>&1 & client=$!
sleep 2
kill -0 $client || { cat client; fail "the client ended before"; }
kill -0 $polling || { cat polling; fail "the polling client ended before"; }
echo ${device##*/} >/sys/bus/pci/drivers/mlx5_core/unbind
test -e $device/infiniband && fail "the RDMA device stays"
wait $client; status=$?
[ $status = 143 ] && fail "the client noticed nothing"
[ $status = 0 ] && fail "the client thinks that all went well"
kill $server $polled $polling
wait
echo ${device##*/}
"#,
        )?;
        let usage = DeviceUsage::of(vm)?;
        ensure!(usage.is_empty_of(0), "left behind in turn {turn}: {usage:#?}");
        let device = device.lines().next_back().unwrap_or_default();
        script(
            vm,
            &format!(
                "echo {device} >/sys/bus/pci/drivers/mlx5_core/bind || fail 'the driver does not bind'
                 up; works"
            ),
        )?;
        match &before {
            None => before = Some(counts(vm)?),
            Some(before) => settle(vm, before)?,
        }
    }
    Ok(())
}

/// Resets a function without a driver, and one with: the driver's health check notices. No object
/// from before may remain.
fn function_reset(_: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    script(vm, "up; works")?;
    let before = counts(vm)?;
    let printed = script(
        vm,
        r#"
device=$(pci mlx5_0)
grep -q flr $device/reset_method || fail "no function-level reset"
echo ${device##*/} >/sys/bus/pci/drivers/mlx5_core/unbind
echo 1 >$device/reset || fail "the reset failed"
echo ${device##*/}
"#,
    )?;
    let usage = DeviceUsage::of(vm)?;
    ensure!(usage.is_empty_of(0), "left behind: {usage:#?}");
    let device = printed.lines().next_back().unwrap_or_default();
    script(
        vm,
        &format!(
            r#"
echo {device} >/sys/bus/pci/drivers/mlx5_core/bind || fail "the driver does not bind"
up; works
dmesg -c >/dev/null
echo 1 >$(pci mlx5_0)/reset || fail "the reset failed"
for turn in 1 2 3 4 5 6; do
    dmesg | grep -q "health recovery succe" && break
    until_true "dmesg | grep -q \"health recovery succe\"" && break
done
dmesg | tail -20
up; works
"#
        ),
    )?;
    settle(vm, &before)
}

/// Removes the functions from the bus and finds them again.
fn remove_and_rescan(_: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    for _ in 0..3 {
        script(
            vm,
            r#"
up
for device in $(pci mlx5_0) $(pci mlx5_1); do echo 1 >$device/remove || fail "no removal"; done
test -z "$(ls /sys/class/infiniband)" || fail "a device stays"
"#,
        )?;
        let usage = DeviceUsage::of(vm)?;
        ensure!(usage.is_empty(), "left behind: {usage:#?}");
        script(
            vm,
            "echo 1 >/sys/bus/pci/rescan; until_true 'test -e /sys/class/infiniband/mlx5_1'; up; works",
        )?;
    }
    Ok(())
}

/// Boots the guest again under the same emulator.
fn reboot(_: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    for _ in 0..2 {
        vm.reboot(Duration::from_secs(120))?;
        script(vm, "up; works")?;
    }
    Ok(())
}

/// Another guest connects to the emulator after the first one was killed, as on a crash.
fn another_guest(context: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    script(vm, "up; works")?;
    let emulator = vm.companion();
    vm.tear_out();
    let machine = Machine { companion: emulator.as_ref(), ..machine(context) };
    *vm = context.session.boot(&machine)?;
    script(vm, "up; works")?;
    Ok(())
}

/// Unloads and loads the drivers; each time the device must be empty in between.
fn reload(context: &CaseContext<'_>, vm: &mut Vm) -> Result<()> {
    let rounds = if context.scope.options.soak { 50 } else { 5 };
    for round in 1..=rounds {
        script(vm, "modprobe -r mlx5_ib mlx5_core; lsmod | grep mlx5 && fail 'still there'; true")?;
        let usage = DeviceUsage::of(vm)?;
        ensure!(usage.is_empty(), "left behind in round {round}: {usage:#?}");
        let check = if round == rounds { "up; works" } else { "true" };
        script(
            vm,
            &format!(
                "modprobe mlx5_core && modprobe mlx5_ib || fail 'not loaded'\n\
                 until_true 'test -e /sys/class/infiniband/mlx5_1' || exit 1\n{check}"
            ),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cached_mkeys_and_spare_pages_may_grow() {
        let counts = |qps, mkeys, cached, pages, resources: &str| -> UsageAndResources {
            let kinds = [("QP", qps), ("mkey", mkeys), (CACHED_MKEY, cached)];
            let function = BTreeMap::from(kinds.map(|(kind, count)| (kind.to_owned(), count)));
            let objects = [function.clone(), function];
            let usage = DeviceUsage { objects, pages: [pages; 2], ..DeviceUsage::default() };
            (usage, resources.to_owned())
        };
        let most = FirmwarePages::most(2 + 5 + 1);
        let before = counts(2, 5, 1, most - 28, "pd 1");
        let after =
            |counts, seconds| has_settled(&before, &counts, Duration::from_secs(seconds)).ok();
        for settled in [counts(1, 4, 0, most, "pd 1"), counts(2, 5, 3, most, "pd 1")] {
            assert_eq!(after(settled, 90), Some(true));
        }
        for late in [
            counts(3, 5, 1, most, "pd 1"),
            counts(2, 6, 0, most, "pd 1"),
            counts(2, 5, 1, most + 1, "pd 1"),
            counts(2, 5, 1, most, "pd 2"),
        ] {
            assert_eq!(after(late.clone(), 9), Some(false));
            assert_eq!(after(late, 11), None);
        }
        assert!(!counts(0, 0, 1, 0, "").0.is_empty(), "without a driver there are none");
    }
}
