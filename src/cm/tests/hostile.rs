//! A connection manager that damages its answers and events.

use crate::QpType;
use crate::cm::scripted::{CmScript, LOCAL, PEER};
use crate::cm::ucma::{CommandMemory, UcmaCommand, UcmaFile};
use crate::cm::{ConnectParam, EventChannel, PortSpace};
use crate::tests::Bench;
use crate::tests::hostile::{Damage, explore};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::time::Duration;
use uverbs_uapi::rdma_user_cm::*;

const NOW: Option<Duration> = Some(Duration::ZERO);
const LONG: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct HostileCm {
    script: CmScript,
    damage: Mutex<Damage>,
}

impl UcmaFile for HostileCm {
    fn execute(&self, mut command: UcmaCommand<'_>) -> Result<(), Errno> {
        let buffer = match &mut command.buffer {
            CommandMemory::None => CommandMemory::None,
            CommandMemory::In(bytes) => CommandMemory::In(bytes),
            CommandMemory::Out(bytes) => CommandMemory::Out(bytes),
        };
        let UcmaCommand { number, request, address_at, .. } = command;
        self.script.execute(UcmaCommand { number, request, buffer, address_at })?;
        if let CommandMemory::Out(answer) = command.buffer {
            self.damage.lock().unwrap().apply(answer);
        }
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.script.fd()
    }
}

type Steps = Result<(), Box<dyn std::error::Error>>;

fn connect(bench: &Bench, script: &CmScript, channel: &EventChannel) -> Steps {
    use rdma_cm_event_type as Type;
    let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build()?;
    let resolving =
        channel.create_id(PortSpace::TCP, QpType::RC)?.resolve_addr(None, PEER.parse()?, LONG)?;
    let id = *script.live().last().ok_or("no id")?;
    script.tell(id, Type::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    let resolving = resolving.wait(NOW)?.done()?.resolve_route(LONG)?;
    script.tell(id, Type::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    let route = resolving.wait(NOW)?.done()?;
    let _ =
        (route.peer_addr(), route.local_addr(), route.port(), route.ib_paths(), route.ib_addrs());
    let connecting = route.connect(&qp, &ConnectParam::new())?;
    script.tell(id, Type::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    let connection = connecting.wait(NOW)?.done()?;
    script.tell(id, Type::RDMA_CM_EVENT_DISCONNECTED, 0);
    let _ = (connection.peer_qpn(), connection.private_data().len(), connection.next_event(NOW)?);
    connection.disconnect()?;
    Ok(())
}

fn accept(bench: &Bench, script: &CmScript, channel: &EventChannel) -> Steps {
    let listener =
        channel.create_id(PortSpace::TCP, QpType::RC)?.bind(LOCAL.parse()?)?.listen(4)?;
    let id = *script.live().last().ok_or("no id")?;
    let qp = bench.pd.qp_builder(&bench.cq, &bench.cq, QpType::RC).build()?;
    for _ in 0..2 {
        script.request(id, rdma_ucm_conn_param { private_data_len: 56, ..Default::default() });
    }
    let request = listener.next_request(NOW)?.ok_or("no request")?;
    let _ = (request.private_data().len(), request.peer_addr(), request.peer_qpn());
    let accepting = request.accept(&qp, &ConnectParam::new())?;
    let id = *script.live().last().ok_or("no id")?;
    script.tell(id, rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED, 0);
    let _ = accepting.wait(NOW)?;
    Ok(())
}

/// A call that fails tells the reason, and leaves behind at most ids whose numbers were damaged.
#[test]
#[cfg_attr(miri, ignore = "it polls a file")]
fn no_answer_of_the_connection_manager_makes_a_call_panic() {
    let run = |input: &[u8]| {
        let bench = Bench::new();
        let script = CmScript::new();
        let damage = Mutex::new(Damage::new(input));
        let channel = EventChannel::on(Box::new(HostileCm { script: script.clone(), damage }));
        let channel = channel.unwrap();
        channel.use_context(&bench.context).unwrap();
        let done = [connect(&bench, &script, &channel), accept(&bench, &script, &channel)];
        for error in done.iter().filter_map(|done| done.as_ref().err()) {
            assert!(!error.to_string().is_empty());
        }
        done.iter().all(Result::is_ok)
    };
    assert!(run(&[]), "a healthy connection manager");
    let tally = explore("answers of cm", 50, &[], run);
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}
