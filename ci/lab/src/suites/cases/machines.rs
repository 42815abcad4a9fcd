//! Two guests with one function each, at one switch: only the emulated cable joins them.

use super::{CaseContext, case, failed};
use crate::machine::device::Emulation;
use crate::machine::session::Machine;
use crate::machine::vm::Vm;
use crate::run::jobs::say;
use crate::run::outcome::{Report, TestOutcome};
use crate::run::stages;
use anyhow::{Result, bail};
use std::time::Instant;

/// The program that the far guest starts in the background, the word that shows that it listens,
/// the program of the near guest, and the check in the far guest afterwards.
struct Exchange {
    name: &'static str,
    server: &'static str,
    ready: &'static str,
    client: &'static str,
    check: &'static str,
}

/// Both sides make the same bytes, so that they need not be sent another way.
const FILE: &str = "seq 300000";

const EXCHANGES: &[Exchange] = &[
    Exchange {
        name: "machines::tcp",
        server: "httpd -f -p 8000 -h /tmp",
        ready: "tcp 8000",
        client: "wget -q -O got http://10.0.0.2:8000/file && cmp got file",
        check: "true",
    },
    Exchange {
        name: "machines::rc_pingpong",
        server: "ibv_rc_pingpong -g 3 -c",
        ready: "tcp 18515",
        client: "ibv_rc_pingpong -g 3 -c 10.0.0.2",
        check: "grep -q \"iters in\" server",
    },
    Exchange {
        name: "machines::ud_pingpong_events",
        server: "ibv_ud_pingpong -g 3 -e",
        ready: "tcp 18515",
        client: "ibv_ud_pingpong -g 3 -e 10.0.0.2",
        check: "grep -q \"iters in\" server",
    },
    Exchange {
        name: "machines::ib_write_bw",
        server: "ib_write_bw -F -x 3 -n 500 -q 2",
        ready: "tcp 18515",
        client: "ib_write_bw -F -x 3 -n 500 -q 2 10.0.0.2",
        check: "grep -q \"^ 65536 .*500\\|^ 65536 .*1000\" server",
    },
    Exchange {
        name: "machines::rping",
        server: "rping -s -a 10.0.0.2 -C 20 -V",
        ready: "cm",
        client: "rping -c -a 10.0.0.2 -C 20 -V",
        check: "true",
    },
];

/// Boots two guests and runs the requested exchanges.
pub(crate) fn run(context: &CaseContext<'_>) -> Vec<Report> {
    let wanted: Vec<&Exchange> =
        EXCHANGES.iter().filter(|exchange| context.wanted(exchange.name)).collect();
    if wanted.is_empty() {
        return Vec::new();
    }
    say!("\nmachines on {} mlx5", context.kernel.label());
    let mut reports = Vec::new();
    if let Err(error) = exchanges(context, &wanted, &mut reports) {
        for exchange in &wanted[reports.len()..] {
            reports.push(failed(exchange.name, &error));
        }
    }
    reports
}

fn exchanges(
    context: &CaseContext<'_>,
    wanted: &[&Exchange],
    reports: &mut Vec<Report>,
) -> Result<()> {
    let machine = context.machine(Emulation::default());
    let mut near = context.session.boot(&Machine { functions: &[0], ..machine })?;
    let emulator = near.companion();
    let beside = Machine { functions: &[1], companion: emulator.as_ref(), ..machine };
    let mut far = context.session.boot(&beside)?;
    let move_address = "/usr/bin/ip address flush dev eth0 && \
                        /usr/bin/ip address add 10.0.0.2/24 dev eth0 && \
                        until_true \"grep -q 0a00:0002 /sys/class/infiniband/mlx5_0/ports/1/gids/3\"";
    script(&mut far, move_address)?;
    for vm in [&mut near, &mut far] {
        script(vm, &format!("{FILE} >/tmp/file"))?;
    }
    for exchange in wanted {
        let start = Instant::now();
        let Exchange { name, server, ready, client, check } = exchange;
        script(
            &mut far,
            &format!("cd /tmp; setsid timeout 90 {server} >server 2>&1 & until_true '{ready}'"),
        )?;
        let outcome = script(&mut near, &format!("cd /tmp; timeout 60 sh -c '{client}'"))
            .and_then(|_| script(&mut far, &format!("cd /tmp; until_true '{check}'")));
        let seconds = start.elapsed().as_secs_f64();
        stages::case(name, start.elapsed());
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        say!("test {name} ... {word} ({seconds:.1} s)");
        reports.push(match outcome {
            Ok(()) => Report { name: (*name).to_owned(), outcome: TestOutcome::Passed },
            Err(error) => failed(name, &error),
        });
    }
    near.power_off()?;
    far.power_off()
}

fn script(vm: &mut Vm, text: &str) -> Result<()> {
    match case::run_script(vm, text, true)? {
        Ok(_) => Ok(()),
        Err(why) => bail!("{why}"),
    }
}
