//! `uverbs cm mckey`: one side sends datagrams to a multicast group, the other receives them. rdma-core's program has
//! the same name.

use super::burst::{Burst, check_datagram};
use super::report::ExchangeReport;
use super::{cannot_listen, resolve};
use crate::args::MckeyArgs;
use crate::failure::{Failure, Result};
use crate::output::outln;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use uverbs::cm::{EventChannel, MulticastRole, PortSpace};
use uverbs::{Destination, QpType};

pub(super) fn run(args: &MckeyArgs) -> Result<()> {
    let group = group(&args.group)?;
    let role = if args.send_only { MulticastRole::SendOnly } else { MulticastRole::Full };
    if args.send_only && !args.sender {
        return Err(Failure::usage("--send-only is for the sender: add --sender"));
    }
    let timeout = Duration::from_secs(args.timeout);
    let (at, to) = (SocketAddr::new(group, 0), group);
    let channel = EventChannel::open()?;
    let mut members = Vec::new();
    for _ in 0..args.connections {
        let id = channel.create_id(PortSpace::UDP, QpType::UD)?;
        let from = args.bind.as_ref().map(|host| resolve(host, 0)).transpose()?;
        let id = match from {
            Some(from) => {
                let id = id.bind(from).map_err(|error| cannot_listen(error, from.ip()))?;
                id.resolve_addr(at, timeout)
            }
            None => id.resolve_addr(None, at, timeout),
        };
        let id = id.map_err(no_route)?.wait(Some(timeout)).and_then(|progress| progress.done());
        let id = id.map_err(no_route)?;
        let context = id.context()?;
        check_datagram(&context, id.port(), args.size)?;
        let mut burst = Burst::new(&context, QpType::UD, args.shape(), timeout)?;
        let member = id.join_multicast(&burst, to, role)?.wait(Some(timeout));
        let member = member.and_then(|progress| progress.done())?;
        if !args.sender {
            burst.post_receives()?;
        }
        members.push((burst, member, id.local_addr()));
    }
    let joined = members.first().map(|(burst, member, local)| ExchangeReport {
        program: "mckey",
        role: if args.sender { "sender" } else { "receiver" },
        local: local.map(|local| local.ip().to_string()).unwrap_or_default(),
        peer: format!("group {}", member.gid()),
        device: burst.pd.context().device().name().to_owned(),
        connections: args.connections,
        messages: args.count,
        size: args.size,
        seconds: 0.0,
    });
    let Some(report) = joined else { return Err(Failure::usage("-c 0 joins nothing")) };
    if !args.json {
        outln!("joined {group}");
    }
    if args.sender {
        // Members that joined just now are not known to every switch yet.
        std::thread::sleep(Duration::from_secs(args.pause));
    }
    let start = Instant::now();
    for (burst, member, _) in &mut members {
        if args.sender {
            let handle = burst.pd.create_ah(member.address())?;
            burst.send_all(Some(Destination::new(&handle, member.qpn(), member.qkey())))?;
            burst.wait_sent(|| Ok(()))?;
        } else {
            burst.wait_received_from(Duration::from_secs(args.wait))?;
        }
    }
    report.print(start.elapsed(), args.json);
    Ok(())
}

/// The address of a group.
fn group(text: &str) -> Result<IpAddr> {
    let address = text.parse::<IpAddr>().ok().filter(IpAddr::is_multicast);
    address.ok_or_else(|| {
        Failure::usage(format!("`{text}` is no multicast address"))
            .advice("groups are 224.0.0.0 to 239.255.255.255; 239.1.2.3 for example")
    })
}

/// The failure to find a device for the group.
fn no_route(error: uverbs::Error) -> Failure {
    Failure::device(error.to_string()).advice(
        "-b takes the address of the interface to join by; without it `ip route get GROUP` shows the one that the \
         routing table chooses",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_are_joined() {
        assert_eq!(group("239.1.2.3").unwrap(), "239.1.2.3".parse::<IpAddr>().unwrap());
        for other in ["10.0.0.1", "localhost", "ff02::1::1"] {
            assert!(group(other).unwrap_err().to_string().contains("239.1.2.3"), "{other}");
        }
    }
}
