//! Connections by address: the kernel's RDMA connection manager, without librdmacm.
//!
//! Pairs with `/dev/infiniband/rdma_cm`, `core/ucma.c` and `rdma_cma.h` of rdma-core. Two programs that
//! know an IP address and a port connect queue pairs: the connection manager finds the device and
//! the path, exchanges queue pair numbers and sequence numbers, and tells when the peer is gone.
//!
//! [`Connector`] and [`Listener`] do all of it in one call each. Beneath them ids do one step at a
//! time, each a type that has the steps that may follow:
//!
//! | active side | passive side |
//! |---|---|
//! | [`Id`] → [`ResolvingAddr`] → [`AddrResolved`] → [`ResolvingRoute`] → [`RouteResolved`] | [`Id`] → [`BoundId`] → [`ListeningId`] |
//! | → [`Connecting`] → [`Connection`] | [`ConnectRequest`] → [`Accepting`] → [`Connection`] |
//!
//! What waits has `wait(timeout)`; with a timeout of zero that only looks, for programs with an event
//! loop of their own. An id that answers an error is gone, and so is the kernel's.
//!
//! # What keeps what alive
//!
//! Every id keeps its [`EventChannel`] open. [`Connecting`], [`Accepting`] and [`Connection`] keep
//! their queue pair, and with it the context. A [`ConnectRequest`] does not need its listener any more.
//! All of them may be dropped in any order and from any thread.
//!
//! # Calls of librdmacm
//!
//! | `rdma_…` | here |
//! |---|---|
//! | `create_event_channel`, `get_cm_event`, `ack_cm_event` | [`EventChannel::open`], `wait` of the id or [`EventChannel::dispatch`], not needed |
//! | `create_id`, `destroy_id`, `migrate_id` | [`EventChannel::create_id`], drop, [`Id::migrate`] and [`ConnectRequest::migrate`] |
//! | `bind_addr`, `listen`, `get_request` | [`Id::bind`], [`BoundId::listen`], [`ListeningId::next_request`] |
//! | `resolve_addr`, `resolve_route` | [`Id::resolve_addr`], [`AddrResolved::resolve_route`] |
//! | `create_qp`, `init_qp_attr` | [`RouteResolved::context`] and [`create_qp`](crate::ProtectionDomain::create_qp), [`RouteResolved::init_qp`] |
//! | `connect`, `accept`, `reject`, `disconnect` | [`RouteResolved::connect`], [`ConnectRequest::accept`], [`ConnectRequest::reject`], [`Connection::disconnect`] |
//! | `set_option`, `notify` | the `set_…` of [`Id`], [`Accepting::notify_communication_established`] |
//! | `get_local_addr`, `get_peer_addr` | `local_addr`, `peer_addr` |
//! | `create_ep`, `getaddrinfo` | [`Connector`], [`Listener`] |

mod address;
mod channel;
mod connect;
mod connector;
mod event;
mod fd;
mod id;
mod kernel;
mod listen;
mod param;
mod qp;
#[cfg(test)]
mod scripted;
#[cfg(all(test, not(loom)))]
mod tests;

pub use channel::EventChannel;
pub use connect::{Accepting, Connecting, Connection, ConnectionEvent};
pub use connector::{Connector, Listener};
pub use event::{ConnectError, RejectReason, Rejection};
pub use id::{AddrResolved, BoundId, Id, Progress, ResolvingAddr, ResolvingRoute, RouteResolved};
pub use listen::{ConnectRequest, ListeningId};
pub use param::{ACCEPT_PRIVATE_DATA, ConnectParam, REJECT_PRIVATE_DATA, REQUEST_PRIVATE_DATA};
