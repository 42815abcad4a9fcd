//! Connections by address with this workspace's library. Pairs with `bench-theirs`.

use lab_bench::Failure;
use lab_bench::control::{FROM, TO};
use std::mem::forget;
use std::net::SocketAddr;
use std::time::Duration;
use uverbs::cm::{ConnectParam, Connection, ConnectionEvent, EventChannel, ListeningId, PortSpace};
use uverbs::{CompletionQueue, Context, ProtectionDomain, QpType, QueuePair};

const LIMIT: Duration = Duration::from_secs(2);

/// The objects that the queue pairs of one side share.
struct Shared {
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Shared {
    fn of(context: &Context) -> Result<Shared, Failure> {
        Ok(Shared { pd: context.alloc_pd()?, cq: context.cq_builder(16).build()? })
    }

    /// A queue pair of the objects that are there already, or that are made for the first one.
    fn qp(
        known: &mut Option<Shared>,
        context: impl FnOnce() -> uverbs::Result<Context>,
    ) -> Result<QueuePair, Failure> {
        let Shared { pd, cq } = match known {
            Some(shared) => shared,
            none => none.insert(Shared::of(&context()?)?),
        };
        let (pd, cq) = (&*pd, &*cq);
        Ok(pd.qp_builder(cq, cq, QpType::RC).max_send_wr(16).max_recv_wr(16).build()?)
    }
}

/// The two sides, each with a channel of its own.
pub(crate) struct ByAddress {
    channel: EventChannel,
    listener: ListeningId,
    from: SocketAddr,
    to: SocketAddr,
    active: Option<Shared>,
    passive: Option<Shared>,
}

impl ByAddress {
    pub(crate) fn open() -> Result<ByAddress, Failure> {
        let (from, to) = (FROM.parse()?, TO.parse()?);
        let listener =
            EventChannel::open()?.create_id(PortSpace::TCP, QpType::RC)?.bind(to)?.listen(4)?;
        let channel = EventChannel::open()?;
        Ok(ByAddress { channel, listener, from, to, active: None, passive: None })
    }

    /// Connects for the first time, and leaves all as it is.
    pub(crate) fn first() -> Result<(), Failure> {
        let mut ends = ByAddress::open()?;
        let connected = ends.connect()?;
        forget((connected, ends));
        Ok(())
    }

    pub(crate) fn connect(&mut self) -> Result<Connected, Failure> {
        let param = ConnectParam::new().responder_resources(1).initiator_depth(1);
        let resolving = self.channel.create_id(PortSpace::TCP, QpType::RC)?.resolve_addr(
            Some(self.from),
            self.to,
            LIMIT,
        )?;
        let resolved = resolving.wait(None)?.done()?;
        let route = resolved.resolve_route(LIMIT)?.wait(None)?.done()?;
        let active = Shared::qp(&mut self.active, || route.context())?;
        let connecting = route.connect(&active, &param)?;
        let request = self.listener.next_request(None)?.ok_or("no request")?;
        let passive = Shared::qp(&mut self.passive, || request.context())?;
        let accepting = request.accept(&passive, &param)?;
        let connection = connecting.wait(None)?.done()?;
        let accepted = accepting.wait(None)?.done()?;
        Ok(Connected { active: (active, connection), passive: (passive, accepted) })
    }
}

/// Waits for the next event of a side.
fn is_disconnected(connection: &Connection) -> Result<(), Failure> {
    match connection.next_event(None)? {
        Some(ConnectionEvent::Disconnected) => Ok(()),
        found => Err(format!("event {found:?} in place of the end").into()),
    }
}

/// Two connected queue pairs.
pub(crate) struct Connected {
    active: (QueuePair, Connection),
    passive: (QueuePair, Connection),
}

impl Connected {
    /// Each side disconnects and hears that the other did.
    pub(crate) fn close(self) -> Result<(), Failure> {
        let Connected { active: (active, connection), passive: (passive, accepted) } = self;
        connection.disconnect()?;
        is_disconnected(&accepted)?;
        accepted.disconnect()?;
        is_disconnected(&connection)?;
        active.destroy()?;
        passive.destroy()?;
        Ok(())
    }
}
