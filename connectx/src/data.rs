//! The data path: the execution of doorbells, WQEs, packets and frames.
//!
//! [`doorbell`] takes writes to UAR pages and schedules queues. [`requester`] fetches the WQEs of a queue pair and posts
//! their requests to the [`transport`], whose calls [`host`] takes: for the requester, and for the [`responder`] that
//! executes packets of the peer. [`datagram`] has paths and headers of datagrams, and [`completion`] writes the CQEs of
//! both sides. [`raw`] sends and receives Ethernet frames, with [`steering`] for flow tables, and [`umr`] changes mkeys.
//! [`virtio`] takes frames from and to virtqueues.
//! [`dma`] accesses memory by mkey. [`cq`] and [`eq`] write CQEs and EQEs, [`srq`] reports the SRQ limit, [`port`]
//! changes of the link, and [`timer`] runs timers that are due. [`audit`] checks that a program leaves the memory of its
//! requests alone.

pub(crate) mod audit;
pub(crate) mod completion;
pub(crate) mod cq;
pub(crate) mod datagram;
pub(crate) mod dma;
pub(crate) mod doorbell;
pub(crate) mod eq;
pub(crate) mod host;
pub(crate) mod port;
pub(crate) mod raw;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod srq;
pub(crate) mod steering;
pub(crate) mod timer;
pub(crate) mod transport;
pub(crate) mod umr;
pub(crate) mod virtio;
