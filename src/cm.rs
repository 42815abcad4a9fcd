//! Connections by address: the kernel's RDMA connection manager, without librdmacm.
//!
//! Pairs with `/dev/infiniband/rdma_cm`, `core/ucma.c` and `rdma_cma.h` of rdma-core. Two programs that
//! know an IP address and a port connect queue pairs: the connection manager finds the device and
//! the path, exchanges queue pair numbers and sequence numbers, and reports when the peer closes the
//! connection or its host does. The kernel needs the module `rdma_ucm`, which it usually loads by itself.
//!
//! [`Connector`] and [`Listener`] connect and accept in one call each; the documentation of each has a program.
//! Beneath them an id takes one step at a time, and its type says which steps may follow:
//!
//! | active side | passive side |
//! |---|---|
//! | [`Id`] → [`ResolvingAddr`] → [`AddrResolved`] → [`ResolvingRoute`] → [`RouteResolved`] | [`Id`] → [`BoundId`] → [`ListeningId`] |
//! | → [`Connecting`] → [`Connection`] | [`ConnectRequest`] → [`Accepting`] → [`Connection`] |
//! | or → [`ConnectingDatagrams`] → [`DatagramPeer`] | or [`ConnectRequest::accept_datagrams`] |
//!
//! A step that the network takes part in has `wait(timeout)`. With a timeout of zero it polls once, for programs with
//! an event loop of their own. An error of a step that takes the id by value destroys the id.
//! [`aio::cm`](crate::aio::cm) has futures.
//!
//! Addresses are IPv4 and IPv6 addresses, on InfiniBand also GIDs with service ids. Two programs of one host connect by
//! the address of an RDMA device: the loopback interface (127.0.0.1, `::1`, `localhost`) belongs to none, so that a
//! program can listen on its addresses, but not connect to them.
//!
//! Connections are reliable in the port space [`TCP`](PortSpace::TCP). In the port space [`IB`](PortSpace::IB) they are
//! of any type ([`EventChannel::create_id`]): reliable, unreliable, or XRC, where an initiator connects to a listener
//! for targets; the programs exchange the number of the target's shared receive queue themselves, for example as
//! private data. In the port space [`UDP`](PortSpace::UDP) there is no connection: an id asks a listener for the number
//! and the Q_Key of its queue pair ([`RouteResolved::connect_datagrams`], [`ConnectRequest::accept_datagrams`]), and
//! then sends datagrams there. A [`BoundId`] or an [`AddrResolved`] joins multicast groups
//! ([`join_multicast`](BoundId::join_multicast)). Requests and answers carry the ECE options of both devices ([`Ece`]),
//! and the devices take those that both have.
//!
//! With GIDs ([`Id::bind_ib`], [`Id::resolve_ib_addr`]) the program may set an id's path
//! ([`AddrResolved::set_ib_path`]), and ask the subnet administrator for a service ([`BoundId::resolve_ib_service`]).
//! The answers of an administrator were tested with a scripted kernel only.
//!
//! # When to use it
//!
//! [`endpoint`](crate::QpControl::endpoint) and [`handshake`](crate::QpControl::handshake) connect queue pairs, too.
//!
//! | | `endpoint` and `handshake` | connection manager |
//! |---|---|---|
//! | the program has to know | its device, port and GID index; how to exchange some bytes with the peer | the peer's IP address and port |
//! | peers | programs of its own | all programs that use a connection manager: NVMe over Fabrics, NFS/RDMA, programs written to librdmacm |
//! | requirements | the device's node in `/dev` | `/dev/infiniband/rdma_cm` (module `rdma_ucm`), too, and an IP address on the device's interface, or a GID on InfiniBand |
//! | when the peer closes, or is killed | the exchange of bytes has to tell, or a request fails after its retries | [`Disconnected`](ConnectionEvent::Disconnected) |
//! | path MTU, timeouts, retries | the program's, in the [`Handshake`](crate::Handshake) | the kernel's, and those of [`ConnectParam`] |
//! | types of queue pairs | RC, UC, UD, XRC | RC, UD; in the port space `IB` also UC and XRC |
//! | bytes for the program's own use | as many as the exchange carries | [private data](ConnectParam::private_data), 56 to 216 bytes |
//!
//! A service that listens on an address uses the connection manager. Programs that have a control connection anyway,
//! for example the ranks of a job, need no second one: they exchange endpoints there.
//!
//! # Costs
//!
//! A connection with its end costs both sides together 38 system calls; librdmacm makes 47. Requests on a connection cost
//! no more than on any queue pair. An [`EventChannel`] is a file, which any number of ids share.
//!
//! # Lifetimes
//!
//! An id keeps its [`EventChannel`] open, and a [`ConnectRequest`] does not need its listener any more.
//! The channel keeps one [`Context`](crate::Context) of each device that an id asked a context of. No id
//! keeps a queue pair: keep it until the handshake is over, or the handshake fails. A [`Connection`] and its
//! queue pair may be dropped in any order and from any thread.
//!
//! # Calls of librdmacm
//!
//! | C | here |
//! |---|---|
//! | `rdma_create_event_channel`, `rdma_destroy_event_channel` | [`EventChannel::open`], drop |
//! | `rdma_get_cm_event`, `rdma_ack_cm_event` | `wait` of the id, or [`EventChannel::dispatch`]; nothing is acknowledged |
//! | `rdma_create_id`, `rdma_destroy_id`, `rdma_migrate_id` | [`EventChannel::create_id`], drop, [`Id::migrate`] and [`ConnectRequest::migrate`] |
//! | `rdma_bind_addr`, `rdma_listen`, `rdma_get_request` | [`Id::bind`], [`BoundId::listen`], [`ListeningId::next_request`] |
//! | `rdma_resolve_addr`, `rdma_resolve_route` | [`Id::resolve_addr`], [`AddrResolved::resolve_route`] |
//! | `rdma_create_qp`, `rdma_init_qp_attr` | [`RouteResolved::context`] and [`qp_builder`](crate::ProtectionDomain::qp_builder), [`RouteResolved::init_qp`] |
//! | `rdma_connect`, `rdma_accept`, `rdma_reject`, `rdma_disconnect` | [`RouteResolved::connect`], [`ConnectRequest::accept`], [`ConnectRequest::reject`], [`Connection::disconnect`] |
//! | `rdma_connect`, `rdma_accept` in `RDMA_PS_UDP` | [`RouteResolved::connect_datagrams`], [`ConnectRequest::accept_datagrams`], [`Connector::connect_datagrams`] |
//! | `rdma_join_multicast`, `rdma_join_multicast_ex`, `rdma_leave_multicast` | [`BoundId::join_multicast`], [`AddrResolved::join_multicast`], drop |
//! | `rdma_set_local_ece`, `rdma_get_remote_ece`, `rdma_reject_ece` | [`ConnectParam::ece`], [`ConnectRequest::ece`] and [`Connection::ece`], [`ConnectRequest::reject_ece`] |
//! | `rdma_write_cm_event` | [`Connection::write_event`] |
//! | `rdma_resolve_addrinfo`, `rdma_query_addrinfo` with `RAI_SA` | [`BoundId::resolve_ib_service`], [`IbServiceResolved::records`] |
//! | `rdma_bind_addr`, `rdma_resolve_addr` with `AF_IB` | [`Id::bind_ib`], [`Id::resolve_ib_addr`], [`Listener::builder_ib`], [`Connector::to_ib`] |
//! | `rdma_set_option` with `RDMA_OPTION_IB_PATH` | [`AddrResolved::set_ib_path`], [`RouteResolved::ib_paths`] |
//! | `rdma_set_option`, `rdma_notify` | the `set_…` of [`Id`], [`Accepting::notify_communication_established`] |
//! | `rdma_get_local_addr`, `rdma_get_peer_addr` | `local_addr`, `peer_addr` |
//! | `rdma_create_ep`, `rdma_getaddrinfo` | [`Connector`], [`Listener`] |

mod address;
mod address_error;
mod bound;
mod channel;
mod connect;
mod connector;
mod datagram;
mod event;
mod id;
mod infiniband;
mod listen;
#[cfg(all(test, loom))]
pub(crate) mod model;
mod multicast;
mod param;
mod port_space;
mod qp;
mod rdma_cm_fd;
mod resolve_addr;
mod resolve_route;
#[cfg(all(test, not(loom)))]
pub(crate) mod scripted;
mod step;
#[cfg(all(test, not(loom)))]
mod tests;
mod ucma;
mod unbound;

pub use crate::qp::Ece;
pub use bound::BoundId;
pub use channel::EventChannel;
pub use connect::{Accepting, Connecting, Connection, ConnectionEvent};
pub use connector::{Connector, Listener, ListenerBuilder, QpWith};
pub(crate) use connector::{NO_ADDRESS, NO_ANSWER, NO_ROUTE, Target, no_address};
pub use datagram::{ConnectingDatagrams, DatagramPeer};
pub(crate) use event::Event;
pub use event::{ConnectError, RejectReason, Rejection};
pub(crate) use id::events::{EventWait, Polled};
pub use infiniband::{
    IbAddress, IbPath, IbService, IbServiceRecord, IbServiceResolved, ResolvingIbService,
};
pub use listen::{ConnectRequest, ListeningId};
pub use multicast::{JoiningMulticast, MulticastMember, MulticastRole};
pub use param::{
    ACCEPT_PRIVATE_DATA, ConnectParam, DATAGRAM_QKEY, DATAGRAM_REPLY_PRIVATE_DATA,
    DATAGRAM_REQUEST_PRIVATE_DATA, IB_DATAGRAM_REQUEST_PRIVATE_DATA, IB_REQUEST_PRIVATE_DATA,
    REJECT_PRIVATE_DATA, REQUEST_PRIVATE_DATA,
};
pub use port_space::PortSpace;
pub use resolve_addr::{AddrResolved, ResolvingAddr};
pub use resolve_route::{ResolvingRoute, RouteResolved};
pub use step::Progress;
pub(crate) use step::Step;
pub(crate) use step::timed_out;
pub use unbound::Id;
