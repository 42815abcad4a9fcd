//! The responder: does for the transport what the peer asks for.
//!
//! Pairs with the requester. The transport checks queue pair, state, PSN and the rights of the queue pair; the device
//! checks the address that a packet comes from, P_Key and Q_Key, and the rights of mkeys.

use uverbs_roce::headers::Packet;
use uverbs_roce::{Atomic, Received, Refusal, Right, Target};
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc};

use super::datagram::{GRH, grh};
use super::dma::{Accessor, Payload};
use crate::device::Device;
use crate::fault::Side;
use crate::format::event;
use crate::format::syndrome::Syndrome;
use crate::object::mkey::{Access, AccessRight};
use crate::object::qp::{Qp, QpState, Service};
use crate::object::table::KERNEL;
use crate::options::PortType;
use crate::outside::Unwelcome;
use crate::path::{Path, UNKNOWN_QPN};
use crate::port::share_partition;
use crate::recording::RqType;

impl Device {
    /// Whether a packet is for a queue pair; notes why if it is not.
    pub(crate) fn admit_packet(&mut self, qpn: u32, from: &Path, packet: &Packet<'_>) -> bool {
        self.not_admitted = self.check_packet(qpn, from, packet).err();
        self.not_admitted.is_none()
    }

    fn check_packet(
        &mut self,
        qpn: u32,
        from: &Path,
        packet: &Packet<'_>,
    ) -> Result<(), Unwelcome> {
        let qp = self.objects.qps.find(qpn).ok_or(Unwelcome::NoQueuePair)?;
        // General services are there for all partitions of the port.
        let partition =
            qp.service == Service::Gsi || share_partition(self.pkey(qp), packet.bth.pkey.get());
        if qp.state == QpState::Error || qp.service == Service::Umr {
            return Err(Unwelcome::State);
        }
        if !partition {
            return Err(Unwelcome::Partition);
        }
        if let Some(deth) = packet.deth {
            if deth.qkey.get() != qp.context.get32(qpc::q_key) {
                self.port.count_qkey_violation();
                return Err(Unwelcome::Qkey);
            }
        } else if !self.is_from_peer(qp, from) {
            return Err(Unwelcome::Source);
        }
        Ok(())
    }

    /// Whether a packet comes from the other end of the connection: the same QPN exists on every port.
    fn is_from_peer(&self, qp: &Qp, from: &Path) -> bool {
        let path = qp.context.sub(qpc::primary_address_path);
        let address = match self.options.port_type {
            PortType::InfiniBand => path.get(ads::rlid) == u64::from(from.source.lid),
            PortType::Ethernet => path.span(ads::rgid_rip).first_chunk() == Some(&from.source.gid),
        };
        let qpn = matches!(from.source_qpn, UNKNOWN_QPN)
            || qp.context.get32(qpc::remote_qpn) == from.source_qpn;
        address && qpn
    }

    /// The access of the peer of a queue pair to memory. An XRC request accesses memory of the SRQ's PD.
    pub(super) fn target_access(
        &self,
        qpn: u32,
        right: AccessRight,
        target: Target,
    ) -> Result<Access, Refusal> {
        let qp = self.objects.qps.find(qpn).ok_or(Refusal::Operational)?;
        let pd = match target.srq {
            None => qp.pd,
            Some(srqn) => self.xrc_srq_pd(qp, srqn)?,
        };
        let Target { key, address, length, .. } = target;
        Ok(Accessor { qpn, pd }.access(right, key, address, length.into()))
    }

    /// The PD of an XRC SRQ of the queue pair's domain.
    fn xrc_srq_pd(&self, qp: &Qp, srqn: u32) -> Result<u32, Refusal> {
        let matches = self.objects.xrc_srq_matches(srqn, qp.context.get32(qpc::xrcd));
        let srq = self.objects.srqs.find(srqn).filter(|_| matches);
        srq.map(|srq| srq.pd).ok_or(Refusal::InvalidRequest)
    }

    /// Checks the whole memory of a request before any of it is touched, and counts the request.
    pub(crate) fn check_target(
        &mut self,
        qpn: u32,
        right: Right,
        target: Target,
    ) -> Result<(), Refusal> {
        let need = match right {
            Right::Read => AccessRight::RemoteRead,
            Right::Write => AccessRight::RemoteWrite,
            Right::Atomic => AccessRight::RemoteAtomic,
            Right::Flush(..) => return Err(Refusal::InvalidRequest),
        };
        if target.length > 0 {
            let access = self.target_access(qpn, need, target)?;
            self.objects.check(access).map_err(|why| refuse(qpn, &why))?;
        }
        self.objects.count_for_qp(qpn, |set| match right {
            Right::Read => &mut set.rx_read_requests,
            Right::Write => &mut set.rx_write_requests,
            _ => &mut set.rx_atomic_requests,
        });
        Ok(())
    }

    /// Reads memory for the peer.
    pub(crate) fn read_target(
        &mut self,
        qpn: u32,
        target: Target,
        to: &mut [u8],
    ) -> Result<(), Refusal> {
        self.settle(Some(qpn));
        let access = self.target_access(qpn, AccessRight::RemoteRead, target)?;
        self.dma_read(access, to).map_err(|why| refuse(qpn, &why))
    }

    /// Writes memory for the peer.
    pub(crate) fn write_target(
        &self,
        qpn: u32,
        target: Target,
        data: Payload<'_>,
    ) -> Result<(), Refusal> {
        let access = self.target_access(qpn, AccessRight::RemoteWrite, target)?;
        self.dma_post(access, data).map_err(|why| refuse(qpn, &why))
    }

    /// Changes a word for the peer, and returns the old one.
    pub(crate) fn change_target(
        &self,
        qpn: u32,
        target: Target,
        change: Atomic,
    ) -> Result<u64, Refusal> {
        self.settle(Some(qpn));
        let access = self.target_access(qpn, AccessRight::RemoteAtomic, target)?;
        self.dma_atomic(access, |old| change.apply(old)).map_err(|why| refuse(qpn, &why))
    }

    /// Invalidates an mkey for the peer.
    pub(crate) fn invalidate_for_peer(&mut self, qpn: u32, key: u32) -> Result<(), Refusal> {
        let pd = self.objects.qps.find(qpn).map_or(0, |qp| qp.receiving.pd);
        self.settle_payloads();
        if self.invalidate(qpn, key, pd) {
            return Ok(());
        }
        self.objects.count_for_qp(qpn, |counter| &mut counter.resp_remote_access_errors);
        self.qp_event(qpn, event::WQ_ACCESS_ERROR);
        Err(Refusal::Access)
    }

    /// Takes the next receive of a queue pair or its SRQ, or of the SRQ that an XRC message names; `None` if none is
    /// posted. Returns its WQE index.
    pub(crate) fn take_next_receive(
        &mut self,
        qpn: u32,
        xrc_srqn: Option<u32>,
    ) -> Result<Option<u64>, Refusal> {
        let qp = self.objects.qps.find(qpn).ok_or(Refusal::Operational)?;
        let shared = xrc_srqn.or(qp.srqn);
        let pd = match (xrc_srqn, shared) {
            (Some(srqn), _) => self.xrc_srq_pd(qp, srqn)?,
            (None, Some(srqn)) => self.objects.srqs.find(srqn).map_or(qp.pd, |srq| srq.pd),
            (None, None) => qp.pd,
        };
        let refused = self.faults.refuses_receive();
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return Ok(None) };
        let mut receive = std::mem::take(&mut qp.receiving.receive);
        let queue = self.objects.receive_queue(qpn, xrc_srqn);
        let taken = match queue {
            Some(queue) if !refused => {
                let peeked = queue.peek_into(&self.memory, &mut receive);
                if peeked == Ok(true) {
                    queue.take(&receive);
                }
                peeked
            }
            _ => Ok(false),
        };
        let index = receive.index;
        if taken == Ok(true) {
            let (rq_type, number) = shared.map_or((RqType::Qp, qpn), |srqn| (RqType::Srq, srqn));
            receive.record(&mut self.recorder, self.now, rq_type, number);
        }
        let Some(qp) = self.objects.qps.find_mut(qpn) else { return Ok(None) };
        let receiving = &mut qp.receiving;
        receiving.receive = receive;
        (receiving.xrc_srqn, receiving.pd, receiving.data_len) = (xrc_srqn, pd, 0);
        match taken {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(why) => {
                log::warn!("QP {qpn:#x}: {why}");
                self.qp_event(qpn, event::WQ_CATASTROPHIC);
                self.end_unless_reliable(qpn);
                return Err(Refusal::Operational);
            }
        }
        shared.into_iter().for_each(|srqn| self.check_limit(srqn));
        let user = self.objects.qps.owner(qpn) != KERNEL;
        if let Some(cause) = self.faults.wqe_fault(qpn, user, Side::Receive) {
            self.fail_receive(qpn, xrc_srqn, index, cause);
            self.end_unless_reliable(qpn);
            return Err(Refusal::Operational);
        }
        Ok(Some(index.into()))
    }

    /// Moves a queue pair to error whose receives have failed; a reliable one is in error when it has sent its NAK.
    fn end_unless_reliable(&mut self, qpn: u32) {
        if !self.objects.qps.find(qpn).is_some_and(|qp| qp.service.reliable()) {
            self.move_qp_to_error(qpn, None);
        }
    }

    /// Writes data of a message to its receive from `offset` on, or keeps it for the CQE.
    pub(crate) fn fill_receive(
        &mut self,
        qpn: u32,
        offset: u32,
        data: Payload<'_>,
    ) -> Result<(), Syndrome> {
        let qp = self.objects.qps.find(qpn).ok_or(Syndrome::LocalQpOperation)?;
        let receiving = &qp.receiving;
        let header = if qp.service.datagram() { GRH as u64 } else { 0 };
        let at = header + u64::from(offset);
        if at + data.len() as u64 > receiving.receive.room() {
            return Err(Syndrome::LocalLength);
        }
        // A message that is so short has one packet.
        let room = qp.receive_scatter_to_cqe().min(self.cqe_data_room(qp.receive_cq()));
        let inline = matches!(qp.service, Service::Rc | Service::Uc)
            && offset == 0
            && (1..=room).contains(&data.len());
        let by = Accessor { qpn, pd: receiving.pd };
        // The driver copies data from the CQE to this address; check that the mkey allows it.
        self.scatter(by, receiving.receive.sges(), at, data, !inline)?;
        if let (Payload::Bytes(data), true) = (data, inline) {
            if let Some(qp) = self.objects.qps.find_mut(qpn) {
                qp.receiving.data[..data.len()].copy_from_slice(data);
                qp.receiving.data_len = data.len();
            }
        }
        Ok(())
    }

    /// Reports the receive of a message. Returns whether it could, for a message that was received.
    pub(crate) fn end_receive(
        &mut self,
        qpn: u32,
        received: Result<Received<'_, Path>, Syndrome>,
    ) -> bool {
        let Some(qp) = self.objects.qps.find(qpn) else { return false };
        let receiving = &qp.receiving;
        let (index, srqn) = (receiving.receive.index, receiving.xrc_srqn);
        let received = received.and_then(|received| {
            if qp.service.datagram() {
                let by = Accessor { qpn, pd: receiving.pd };
                self.scatter(
                    by,
                    receiving.receive.sges(),
                    0,
                    Payload::Bytes(&grh(&received)),
                    true,
                )?;
            }
            Ok(received)
        });
        match received {
            Ok(received) => self.complete_receive(qpn, srqn, index, &received),
            Err(syndrome) => {
                let datagram = qp.service.datagram();
                self.fail_receive(qpn, srqn, index, syndrome.into());
                // A datagram that is too long is the sender's error and does not stop the receiver.
                if datagram && syndrome == Syndrome::LocalProtection {
                    self.move_qp_to_error(qpn, None);
                }
                true
            }
        }
    }
}

fn refuse(qpn: u32, why: &str) -> Refusal {
    log::debug!("the peer of QP {qpn:#x}: {why}");
    Refusal::Access
}
