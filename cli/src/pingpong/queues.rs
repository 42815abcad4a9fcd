//! The queues of one side, with the memory of the messages.

use super::address::Address;
use super::kind::Kind;
use super::layout::Layout;
use super::port::Port;
use super::volley::MOST_POLLED;
use crate::args::{Mlx5Options, PathMtu};
use crate::failure::{Failure, Result};
use uverbs::{
    Access, AddressHandle, CompletionChannel, CompletionQueue, Destination, MemoryRegion, Mtu,
    Notify, ProtectionDomain, Psn, Qkey, QpAttr, QpState, Qpn, QueuePair, RecvWr, SendWr, Sge,
    SharedReceiveQueue,
};

/// The bits of a `wr_id` that tell sends from receives. The other bits are the receive's buffer.
pub(crate) const RECV: u64 = 1;
pub(crate) const SEND: u64 = 2;
pub(crate) const WHAT: u64 = 3;
pub(crate) const SLOT_SHIFT: u32 = 2;

/// The Q_Key of datagrams, the same on both sides.
const QKEY: Qkey = Qkey(0x1111_1111);

/// Attributes of the queues to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    pub(crate) qps: u32,
    pub(crate) rx_depth: u32,
    pub(crate) events: bool,
    pub(crate) layout: Layout,
    pub(crate) service_level: u8,
    /// The path MTU; `None` for datagrams.
    pub(crate) mtu: Option<PathMtu>,
    pub(crate) mlx5: Mlx5Options,
}

/// The queues of one side.
#[derive(Debug)]
pub(crate) struct Queues {
    pub(crate) cq: CompletionQueue,
    pub(crate) channel: Option<CompletionChannel>,
    pub(crate) posting: Posting,
    pub(crate) memory: MemoryRegion,
    pd: ProtectionDomain,
    shape: Shape,
}

/// The queues that requests are posted to.
#[derive(Debug)]
pub(crate) struct Posting {
    pub(crate) qps: Vec<QueuePair>,
    srq: Option<SharedReceiveQueue>,
    /// The destination of each datagram queue pair.
    peers: Vec<(AddressHandle, Qpn)>,
    recv_sges: Vec<[Sge; 1]>,
    send_sges: Vec<[Sge; 1]>,
    /// Short messages are sent inline, from this copy.
    inline: Option<Vec<u8>>,
}

impl Queues {
    pub(crate) fn create(port: &Port, shape: Shape) -> Result<Queues> {
        let Shape { kind, qps, rx_depth, layout, .. } = shape;
        let context = &port.context;
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().allocate::<u8>(layout.byte_len())?;
        let channel = shape.events.then(|| context.create_comp_channel()).transpose()?;
        if let Some(channel) = &channel {
            // The program waits for this channel only.
            channel.set_nonblocking(false)?;
        }
        // A queue pair has at most one send and one receive under way, and there are no fewer
        // receives than queue pairs.
        let mut cq = context.cq_builder(rx_depth.saturating_add(qps + MOST_POLLED));
        if let Some(channel) = &channel {
            cq = cq.channel(channel);
        }
        let mut cq = cq.build()?;
        let srq = (kind == Kind::Srq).then(|| pd.srq_builder(rx_depth).build()).transpose()?;
        let mut pairs = Vec::with_capacity(qps as usize);
        for _ in 0..qps {
            let mut builder = pd.qp_builder(&cq, &cq, kind.qp_type());
            builder = match &srq {
                Some(srq) => builder.srq(srq),
                None => builder.max_recv_wr(rx_depth),
            };
            if shape.mlx5.out_of_order {
                builder = builder.out_of_order_placement();
            }
            let qp = builder.build()?;
            let init = QpAttr::new().state(QpState::INIT).pkey_index(0).port(port.number);
            qp.modify(&match kind {
                Kind::Ud => init.qkey(QKEY),
                _ => init.access(Access::empty()),
            })?;
            pairs.push(qp);
        }
        if shape.events {
            cq.req_notify(Notify::Next)?;
        }
        let sge = |range| match memory.sge(range) {
            Ok(sge) => Ok([sge]),
            Err(error) => Err(Failure::device(error.to_string())),
        };
        let recv_sges = (0..layout.slots()).map(|slot| sge(layout.recv(slot)));
        let send_sges = (0..qps as usize).map(|qp| sge(layout.send(qp)));
        let size = layout.send(0).len();
        let longest_inline = pairs.iter().map(|qp| qp.caps().max_inline_data).min().unwrap_or(0);
        Ok(Queues {
            posting: Posting {
                srq,
                peers: Vec::new(),
                recv_sges: recv_sges.collect::<Result<_>>()?,
                send_sges: send_sges.collect::<Result<_>>()?,
                inline: (size <= longest_inline as usize).then(|| vec![0; size]),
                qps: pairs,
            },
            cq,
            channel,
            memory,
            pd,
            shape,
        })
    }

    /// The addresses that the peer has to know.
    pub(crate) fn addresses(&self, port: &Port) -> Result<Vec<Address>> {
        let address = |qp: &QueuePair| {
            Ok(Address { lid: port.attr.lid, qpn: qp.qpn(), psn: random_psn()?, gid: port.gid() })
        };
        self.posting.qps.iter().map(address).collect()
    }

    /// Makes the queue pairs ready to receive and to send.
    pub(crate) fn connect(
        &mut self,
        port: &Port,
        local: &[Address],
        remote: &[Address],
    ) -> Result<()> {
        for ((qp, local), remote) in self.posting.qps.iter().zip(local).zip(remote) {
            let path = port.path(self.shape.service_level, remote.lid, remote.gid)?;
            let rtr = QpAttr::new().state(QpState::RTR);
            let rts = QpAttr::new().state(QpState::RTS).sq_psn(local.psn);
            let mtu = self.shape.mtu.map(|mtu| Mtu(mtu as u8)).unwrap_or(port.attr.active_mtu);
            let connected = rtr.path(path).path_mtu(mtu).dest_qpn(remote.qpn).rq_psn(remote.psn);
            let (rtr, rts) = match self.shape.kind {
                Kind::Ud => (rtr, rts),
                Kind::Uc => (connected, rts),
                Kind::Rc | Kind::Srq => (
                    connected.max_dest_rd_atomic(1).min_rnr_timer(12),
                    rts.timeout(14).retry_count(7).rnr_retry(7).max_rd_atomic(1),
                ),
            };
            qp.modify(&rtr)?;
            qp.modify(&rts)?;
            if let Some(port) = self.shape.mlx5.udp_port {
                uverbs::mlx5::set_udp_source_port(qp, port)?;
            }
            if self.shape.kind == Kind::Ud {
                self.posting.peers.push((self.pd.create_ah(&path)?, remote.qpn));
            }
        }
        Ok(())
    }
}

impl Posting {
    /// Posts receives into the buffers that `slots` names.
    #[allow(unsafe_code, reason = "ringing a batch names memory by number")]
    pub(crate) fn post_recvs(&mut self, slots: impl Iterator<Item = usize>) -> uverbs::Result<()> {
        let mut batch = match &mut self.srq {
            Some(srq) => srq.batch()?,
            None => self.qps[0].recv_batch()?,
        };
        for slot in slots {
            let wr_id = RECV | (slot as u64) << SLOT_SHIFT;
            batch.push(RecvWr::new(&self.recv_sges[slot]).id(wr_id))?;
        }
        // SAFETY: the buffers lie in a region that lives as long as the queue pairs, in the same
        // `Queues`. The program never borrows it, and only copies from and to it.
        unsafe { batch.ring()? };
        Ok(())
    }

    /// Posts a send of the message in the buffer of queue pair `qp`.
    #[allow(unsafe_code, reason = "ringing a batch names memory by number")]
    #[inline]
    pub(crate) fn post_send(
        &mut self,
        qp: usize,
        memory: &MemoryRegion,
        layout: &Layout,
    ) -> uverbs::Result<()> {
        let mut wr = SendWr::send(&self.send_sges[qp]).id(SEND).signaled();
        if let Some((handle, qpn)) = self.peers.get(qp) {
            wr = wr.to(Destination::new(handle, *qpn, QKEY));
        }
        if let Some(message) = &mut self.inline {
            // It lies within the region, which was made for the layout.
            let _ = memory.copy_to(layout.send(qp).start, message);
            wr = wr.inline(message);
        }
        let mut batch = self.qps[qp].send_batch()?;
        batch.push(wr)?;
        // SAFETY: as for receives.
        unsafe { batch.ring()? };
        Ok(())
    }
}

pub(crate) fn random_psn() -> Result<Psn> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::device(format!("no random numbers: {errno}")))?;
    Ok(Psn::new(u32::from_ne_bytes(bytes)))
}
