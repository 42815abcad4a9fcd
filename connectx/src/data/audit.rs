//! The device's part of [`crate::audit`]: poison, hashes, and requests and completions that a program has left.

use std::hash::{DefaultHasher, Hasher};

use super::dma::Payload;
use crate::audit::{Audit, DeviceWrites, Finding, POISON, Rung};
use crate::chunks::chunks;
use crate::device::Device;
use crate::format::segments::segments;
use crate::format::wqe::{CtrlSegment, Sge, op};
use crate::object::mkey::{Access, AccessRight, DmaAddress};
use crate::object::qp::QpState;
use crate::object::receive_queue::{ReceiveQueue, ReceiveWqe};
use crate::recording::RqType;
use uverbs_uapi::mlx5::prm::qpc::qpc;

impl Device {
    /// Begins the check. `writes` is one for all devices that reach the same memory.
    pub fn start_audit(&mut self, writes: &DeviceWrites) {
        self.audit = Some(Box::new(Audit { writes: writes.clone(), ..Audit::default() }));
    }

    /// Remembers a write of the device.
    pub(crate) fn note_write(&self, address: u64, len: usize) {
        if let Some(audit) = &self.audit {
            audit.writes.add(address, len as u64);
        }
    }

    /// The findings since the last call.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        self.audit.as_mut().map_or_else(Vec::new, |audit| std::mem::take(&mut audit.findings))
    }

    /// Send queues whose doorbell record is ahead of their doorbell: requests that the program wrote and did not ring.
    pub fn unrung_queues(&mut self) -> Vec<u32> {
        let memory = &self.memory;
        let queues = self.objects.qps.iter_mut().filter_map(|(qpn, qp)| {
            let sq = qp.sq.as_mut().filter(|_| qp.state == QpState::ReadyToSend)?;
            sq.read_doorbell_record(memory).ok()?;
            (sq.producer_index() != sq.rung_index()).then_some(qpn)
        });
        queues.collect()
    }

    /// The CQs with CQEs that the program has not polled, by the consumer index in their doorbell record: the number of
    /// the CQ, and how many CQEs.
    pub fn unread_completions(&self) -> Vec<(u32, u32)> {
        let unread = self.objects.cqs.iter().filter_map(|(number, cq)| {
            let consumer = self.memory.read_be32(cq.doorbell_record).ok()?;
            let unread = cq.producer().wrapping_sub(consumer) & 0xff_ffff;
            (unread > 0).then_some((number, unread))
        });
        unread.collect()
    }

    /// Fills the buffers of receives that were posted since the last call.
    pub fn poison_receives(&mut self) {
        let Some(mut audit) = self.audit.take() else { return };
        let memory = &self.memory;
        let mut posted: Vec<(u32, u32, ReceiveWqe)> = Vec::new();
        let mut look = |rq_type, number: u32, pd: u32, queue: &ReceiveQueue, qpn: u32| {
            let seen = audit.seen.entry((rq_type, number)).or_default();
            for receive in queue.posted_after(memory, *seen) {
                *seen = receive.posted();
                posted.push((pd, qpn, receive));
            }
        };
        for (qpn, qp) in self.objects.qps.iter() {
            // After a reset the doorbell record holds the old count until the program clears it.
            let takes = !matches!(qp.state, QpState::Reset | QpState::Error);
            if let Some(queue) = qp.rq.as_ref().filter(|_| takes) {
                look(RqType::Qp, qpn, qp.pd, queue, qpn);
            }
        }
        for (number, srq) in self.objects.srqs.iter() {
            look(RqType::Srq, number, srq.pd, &srq.queue, 0);
        }
        for (pd, qpn, receive) in posted {
            for sge in receive.sges() {
                // A failed write is reported when a message comes.
                let poison = vec![POISON; sge.len as usize];
                let access = access(&sge, pd, qpn, AccessRight::LocalWrite);
                let _ = self.dma_write(access, Payload::Bytes(&poison));
            }
        }
        self.audit = Some(audit);
    }

    /// Takes hashes of the requests of a queue pair that were rung.
    pub(crate) fn hash_requests(&mut self, qpn: u32) {
        let Some(mut audit) = self.audit.take() else { return };
        let mut rung = Vec::new();
        if let Ok(qp) = self.objects.qps.get(qpn) {
            if let Some(sq) = &qp.sq {
                let service = qp.context.get(qpc::st) as u8;
                let next = audit.hashed.entry(qpn).or_insert(sq.consumer_index());
                while *next != sq.rung_index() {
                    let most = sq.rung_index().wrapping_sub(*next);
                    let read = sq.read_wqe_at(&self.memory, *next, most);
                    let Ok((control, count, bytes)) = read else { break };
                    rung.push((qp.pd, *next, gathered(service, &control, &bytes)));
                    *next = next.wrapping_add(count);
                }
            }
        }
        for (pd, index, sges) in rung {
            if let Some(hash) = self.hash(pd, qpn, &sges) {
                let writes = audit.writes.count();
                audit.rung.entry(qpn).or_default().push_back(Rung { index, sges, hash, writes });
            }
        }
        self.audit = Some(audit);
    }

    /// Compares the requests of a queue pair that a completion at WQEBB `index` covers: that request and those before
    /// it.
    pub(crate) fn compare_requests(&mut self, qpn: u32, index: u16) {
        let Some(mut audit) = self.audit.take() else { return };
        let pd = self.objects.qps.get(qpn).map_or(0, |qp| qp.pd);
        let rung = audit.rung.entry(qpn).or_default();
        // Indices are counted modulo 2¹⁶, and a queue has at most 2¹⁵ WQEBBs.
        while rung.front().is_some_and(|first| index.wrapping_sub(first.index) < 0x8000) {
            let Some(Rung { index, sges, hash, writes }) = rung.pop_front() else { break };
            match self.hash(pd, qpn, &sges) {
                Some(now) if now == hash => {}
                // A read before it, or a peer, has written there.
                Some(_) if audit.writes.reached(writes, &self.ranges(pd, qpn, &sges)) => {}
                Some(_) => audit.findings.push(Finding::Changed { qpn, index }),
                None => audit.findings.push(Finding::Gone { qpn, index }),
            }
        }
        self.audit = Some(audit);
    }

    /// Forgets the requests of a queue pair that is reset or destroyed.
    pub(crate) fn forget_requests(&mut self, qpn: u32) {
        if let Some(audit) = &mut self.audit {
            audit.seen.remove(&(RqType::Qp, qpn));
            audit.hashed.remove(&qpn);
            audit.rung.remove(&qpn);
        }
    }

    /// The ranges of the memory of a request.
    fn ranges(&self, pd: u32, qpn: u32, sges: &[Sge]) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        for sge in sges {
            let read = access(sge, pd, qpn, AccessRight::LocalRead);
            let _ = self.objects.resolve(read, |ranges| {
                found.extend(ranges.iter().filter_map(|range| match range.address {
                    DmaAddress::Guest(address) => Some((address, range.len as u64)),
                    DmaAddress::Bar(_) | DmaAddress::Nowhere => None,
                }));
                Ok(())
            });
        }
        found
    }

    /// A hash of the memory of a request; `None` unless all of it can be read.
    fn hash(&self, pd: u32, qpn: u32, sges: &[Sge]) -> Option<u64> {
        /// Bytes that are read at once: a request may name 4 GiB of a file with holes.
        const PIECE: u64 = 1 << 20;
        let mut hasher = DefaultHasher::new();
        let mut memory = Vec::new();
        for sge in sges {
            let whole = access(sge, pd, qpn, AccessRight::LocalRead);
            let mut at = 0;
            // An access of no bytes has to be allowed, too.
            loop {
                let len = (whole.len - at).min(PIECE);
                memory.resize(len as usize, 0);
                let piece = Access { address: whole.address.wrapping_add(at), len, ..whole };
                self.dma_read(piece, &mut memory).ok()?;
                hasher.write(&memory);
                at += len;
                if at == whole.len {
                    break;
                }
            }
        }
        Some(hasher.finish())
    }
}

fn access(sge: &Sge, pd: u32, qpn: u32, right: AccessRight) -> Access {
    Access { key: sge.key, pd, qpn, right, address: sge.address, len: sge.len.into() }
}

/// The memory that a request reads.
fn gathered(service: u8, control: &CtrlSegment, bytes: &[u8]) -> Vec<Sge> {
    let reads = matches!(
        control.opcode,
        op::SEND | op::SEND_IMM | op::SEND_INVAL | op::RDMA_WRITE | op::RDMA_WRITE_IMM
    );
    if !reads {
        return Vec::new();
    }
    let data =
        segments(service, bytes).into_iter().filter(|(name, _)| *name == "mlx5_wqe_data_seg");
    data.flat_map(|(_, segment)| chunks::<16>(segment).iter().map(Sge::parse)).collect()
}
