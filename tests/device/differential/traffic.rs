//! Steps that post, and the completions that follow.

use super::words::{not_posted, refusal, rights};
use super::world::{ARENA, Pieces, World};
use crate::env;
use crate::pair::{PATIENCE, QKEY};
use crate::pattern;
use crate::testbed::link_of;
use crate::verdict::Verdict;
use std::time::{Duration, Instant};
use uverbs::device::DriverId;
use uverbs::{
    Access, Destination, Lkey, PostError, Psn, Qkey, QpAttr, QpState, QpType, RecvWr, Remote, Rkey,
    SendWr, Sge, WcOpcode, WcStatus, WindowBinding,
};

/// Bytes in front of each datagram.
const GRH: usize = 40;

/// The longest wait for completions without a record of them, and on the fabric: retries end before.
const BRIEF: Duration = Duration::from_secs(5);

/// A range of a region: the region, the range in words, its address and length, and its place in the arena.
type Chosen = (usize, String, u64, u32, Option<(usize, usize)>);

/// A message or a request in words and values, before it borrows anything.
struct Planned {
    op: Op,
    sges: Vec<Sge>,
    inline: Option<usize>,
    remote: Remote,
    signaled: bool,
    fence: bool,
    /// The window to bind or invalidate, and the region for it.
    window: (usize, usize),
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    Add,
    Swap,
    Bind,
    Invalidate,
    SendInv,
}

impl World {
    /// Connects two queue pairs to each other, or one to itself, with rights and limits by chance.
    pub(super) fn some_connect(&mut self) -> String {
        let (at, to) = self.random.pick(&[(0, 1), (0, 1), (0, 1), (0, 0), (1, 2)]);
        self.connect(at, to)
    }

    /// Whether the first two queue pairs cannot send to each other.
    pub(super) fn is_broken(&self) -> bool {
        let is_ready = |at: usize| {
            let queue = self.qps[at].as_ref();
            let state = queue.and_then(|queue| queue.qp.query().ok()).map(|info| info.state);
            state == Some(QpState::RTS) && self.is_answered(at)
        };
        !is_ready(0) || !is_ready(1)
    }

    /// Connects the first two queue pairs anew.
    pub(super) fn reconnect(&mut self) -> String {
        let gone = [self.reset(0), self.reset(1)];
        format!("{}, {}, {}", gone[0], gone[1], self.connect(0, 1))
    }

    pub(super) fn connect(&mut self, at: usize, to: usize) -> String {
        let mtu = self.random.pick(&[1, 2, 3]);
        let access = self.random.pick(&[
            Access::ALL_REMOTE,
            Access::ALL_REMOTE,
            Access::ALL_REMOTE,
            Access::ALL_REMOTE,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            Access::REMOTE_READ,
        ]);
        let rnr_retry = self.random.pick(&[0, 1, 2]);
        let rd = self.random.pick(&[1, 4]);
        let text =
            format!("connect {at} {to} mtu {mtu} {} rnr {rnr_retry} rd {rd}", rights(access));
        let kind = |at: usize| self.qps[at].as_ref().map(|queue| queue.qp.qp_type());
        if kind(at) != kind(to) {
            return format!("{text}: of other types");
        }
        self.epoch += 1;
        let mut ways = vec![(at, to), (to, at)];
        ways.dedup();
        for (own, peer) in ways {
            let way = [mtu, rnr_retry, rd];
            if let Err(why) = self.raise(own, peer, way, access) {
                return format!("{text}: {own} {why}");
            }
            if at == to {
                break;
            }
        }
        for (own, peer) in [(at, to), (to, at)] {
            if let Some(queue) = &mut self.qps[own] {
                queue.peer = Some((peer, self.epoch));
            }
        }
        format!("{text}: ok")
    }

    /// Brings a queue pair from RESET to RTS.
    fn raise(
        &mut self,
        own: usize,
        peer: usize,
        way: [u8; 3],
        access: Access,
    ) -> Result<(), String> {
        let port = link_of(&self.context).map_err(|_| "no link")?.port;
        let dest = self.qps[peer].as_ref().ok_or("no peer")?.qp.qpn();
        let queue = self.qps[own].as_mut().ok_or("none")?;
        queue.peer = None;
        let [mtu, rnr_retry, rd] = way;
        let kind = queue.qp.qp_type();
        let first = QpAttr::new().state(QpState::INIT).port(port).pkey_index(env::pkey_index());
        let first = if kind == QpType::UD { first.qkey(QKEY) } else { first.access(access) };
        let mut second = QpAttr::new().state(QpState::RTR);
        let mut third = QpAttr::new().state(QpState::RTS).sq_psn(Psn::new(0xff_fff0));
        if kind != QpType::UD {
            second = second
                .path(self.path)
                .path_mtu(uverbs::Mtu(mtu))
                .dest_qpn(dest)
                .rq_psn(Psn::new(0xff_fff0));
        }
        if kind == QpType::RC || kind == QpType::XRC_TGT {
            second = second.max_dest_rd_atomic(rd).min_rnr_timer(1);
        }
        if kind == QpType::RC || kind == QpType::XRC_INI {
            third = third.timeout(18).retry_count(7).rnr_retry(rnr_retry).max_rd_atomic(rd);
        }
        for (name, attr) in [("INIT", first), ("RTR", second), ("RTS", third)] {
            queue.qp.modify(&attr).map_err(|error| format!("{name} {}", refusal(&error)))?;
        }
        Ok(())
    }

    /// A range of a region: in words, as an address and a length, and its place in the arena.
    fn some_range(&mut self, lengths: &[usize]) -> Option<Chosen> {
        let at = self.random.pick(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 3]);
        let place = self.random.below(100);
        let length = self.random.pick(lengths);
        let beyond = self.random.one_in(30);
        let mr = self.mrs[at].as_ref()?;
        let room = mr.byte_len();
        let length = if beyond { length } else { length.min(room) };
        let offset = if beyond {
            room - length.min(room) / 2
        } else {
            (room - length) * place / 100 / 8 * 8
        };
        let start = (mr.as_ptr().addr() - self.arena.as_ptr().addr()) + offset;
        let inside = offset + length <= room;
        let address = mr.addr().wrapping_add(offset as u64);
        let text = format!("m{at}+{offset}:{length}");
        Some((at, text, address, length as u32, inside.then_some((start, length))))
    }

    /// Scatter/gather entries, and their places in the arena.
    fn some_sges(&mut self, most: usize, lengths: &[usize]) -> (Vec<Sge>, Pieces, String) {
        let (mut sges, mut pieces, mut text) = (Vec::new(), Vec::new(), String::new());
        let many = self.random.below(most + 1);
        for _ in 0..many.max(usize::from(!self.random.one_in(8))) {
            let wrong = self.random.one_in(40);
            let Some((at, said, addr, length, piece)) = self.some_range(lengths) else { continue };
            let Some(mr) = &self.mrs[at] else { continue };
            let lkey = if wrong { Lkey(mr.lkey().0 ^ 0xff) } else { mr.lkey() };
            sges.push(Sge { addr, length, lkey });
            pieces.extend(piece);
            text += &format!(" {said}{}", if wrong { "!" } else { "" });
        }
        (sges, pieces, text)
    }

    /// Posts a few receives.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(super) fn some_receives(&mut self) -> Verdict<String> {
        let at = self.random.pick(&[0, 1, 1, 1]);
        let shared = self.random.one_in(6);
        let mut text = format!("recv {at}");
        let many = 1 + self.random.below(4);
        let mut planned = Vec::new();
        for _ in 0..many {
            let (sges, pieces, said) = self.some_sges(3, &[1024, 2000, 3000, 4000, 4000, 64, 8, 0]);
            planned.push((self.next, sges, pieces, said));
            self.next += 1;
        }
        let Some(queue) = &mut self.qps[at] else { return Ok(text + ": none") };
        // A device decides itself when it fetches receives in state ERR.
        if queue.srq.is_none() && queue.qp.query()?.state == QpState::ERR {
            return Ok(text + ": in error");
        }
        let batch = match queue.srq.filter(|_| !shared).and_then(|srq| self.srqs[srq].as_mut()) {
            Some(srq) => srq.batch(),
            None => queue.qp.recv_batch(),
        };
        let mut batch = match batch {
            Ok(batch) => batch,
            Err(error) => return Ok(format!("{text}: {}", not_posted(error))),
        };
        for (id, sges, pieces, said) in planned {
            text += &format!(" r{id}{said}");
            match batch.push(RecvWr::new(&sges).id(id)) {
                Ok(()) => _ = self.receives.insert(id, pieces),
                Err(error) => text += &format!(" {}", not_posted(error)),
            }
            text += ",";
        }
        text.pop();
        // SAFETY: the arena is dropped after the queue pairs, and the program accesses it only by loads and stores.
        match unsafe { batch.ring() } {
            Ok(()) => Ok(text + ": ok"),
            Err(error) => Ok(format!("{text}: {}", not_posted(PostError::Ring(error)))),
        }
    }

    /// A request for a queue of this type.
    fn some_request(&mut self, kind: QpType, is_last: bool) -> Planned {
        let connected = [
            Op::Send,
            Op::Send,
            Op::SendImm,
            Op::Write,
            Op::Write,
            Op::WriteImm,
            Op::Read,
            Op::Read,
            Op::Add,
            Op::Swap,
            Op::Bind,
            Op::Invalidate,
            Op::SendInv,
        ];
        let (op, any) = (self.random.pick(&connected), self.random.one_in(12));
        let op = match kind {
            QpType::RC => op,
            QpType::UC if op != Op::Read || any => op,
            QpType::UD if any => op,
            _ if self.random.one_in(2) => Op::Send,
            _ => Op::SendImm,
        };
        let (mut sges, _, mut said) =
            self.some_sges(2, &[8, 8, 16, 64, 100, 256, 257, 1024, 3000, 0]);
        if matches!(op, Op::Add | Op::Swap) && !any {
            sges.truncate(1);
            sges.iter_mut().for_each(|sge| sge.length = 8);
        }
        let inline = self.random.one_in(10).then(|| self.random.pick(&[0, 8, 64, 65, 500]));
        if let Some(bytes) = inline {
            said = format!(" inline {bytes}");
        }
        let wrong = self.random.one_in(25);
        let mut remote = Remote { addr: 0, rkey: Rkey(0) };
        let through = self.random.one_in(10).then(|| self.random.below(2));
        if let Some((at, to, addr, _, _)) =
            self.some_range(&[4000, 4000, 4000, 4000, 3000, 1024, 8, 0])
        {
            let mw = through.and_then(|at| self.mws[at].as_ref().map(|mw| (at, mw.rkey())));
            if let Some((window, rkey)) = mw {
                remote = Remote { addr, rkey };
                said += &format!(" to {to} by w{window}");
            } else if let Some(mr) = &self.mrs[at] {
                let rkey = if wrong { Rkey(mr.rkey().0 ^ 0xff) } else { mr.rkey() };
                remote = Remote { addr, rkey };
                said += &format!(" to {to}{}", if wrong { "!" } else { "" });
            }
        }
        let window = (self.random.below(2), self.random.pick(&[0, 0, 1, 2]));
        let signaled = is_last || op == Op::Bind || !self.random.one_in(4);
        let fence = self.random.one_in(8);
        if matches!(op, Op::Bind | Op::Invalidate | Op::SendInv) {
            said += &format!(" w{}", window.0);
        }
        let text = format!(
            "{op:?}{said}{}{}",
            if signaled { "" } else { " quiet" },
            if fence { " fence" } else { "" }
        );
        Planned { op, sges, inline, remote, signaled, fence, window, text }
    }

    /// Whether a queue pair's requests get an answer: without it each would wait for its retries.
    fn is_answered(&self, at: usize) -> bool {
        let Some(queue) = &self.qps[at] else { return false };
        let state = |at: usize| self.qps[at].as_ref().and_then(|queue| queue.qp.query().ok());
        let state = |at: usize| state(at).map_or(QpState::RESET, |info| info.state);
        if queue.qp.qp_type() == QpType::UD || state(at) != QpState::RTS {
            return true;
        }
        let Some((peer, epoch)) = queue.peer else { return false };
        let is_mutual =
            self.qps[peer].as_ref().is_some_and(|queue| queue.peer == Some((at, epoch)));
        is_mutual && matches!(state(peer), QpState::RTR | QpState::RTS)
    }

    /// Prepares a window's binding, or returns the reason against it; `None` without a window or a region.
    fn binding(&mut self, at: usize, planned: &Planned) -> Option<Result<WindowBinding, String>> {
        let (of, region) = planned.window;
        if planned.op != Op::Bind {
            return None;
        }
        let (mw, mr) = (self.mws[of].as_mut()?, self.mrs[region].as_ref()?);
        let qp = &self.qps[at].as_ref()?.qp;
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        Some(mw.bind(qp, mr, .., access).map_err(|error| refusal(&error)))
    }

    /// Posts a few sends.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(super) fn some_sends(&mut self) -> Verdict<String> {
        let (at, to) = self.random.pick(&[(0, 1), (0, 1), (0, 1), (1, 0)]);
        let (ah, odd_key) = (self.random.below(8) / 7, self.random.one_in(8));
        let many = 1 + self.random.below(3);
        let kind = self.qps[at].as_ref().map_or(QpType::RC, |queue| queue.qp.qp_type());
        let planned: Vec<Planned> =
            (0..many).map(|nth| self.some_request(kind, nth + 1 == many)).collect();
        let mut text = format!("send {at}");
        if !self.is_answered(at) {
            return Ok(text + ": no peer");
        }
        let qkey = if odd_key { Qkey(1) } else { QKEY };
        let dest = self.qps[to].as_ref().map(|queue| queue.qp.qpn());
        if self.qps[at].is_none() {
            return Ok(text + ": none");
        }
        if kind == QpType::UD {
            text += &format!(" to {to}{}", if odd_key { "!" } else { "" });
        }
        let is_rxe = self.context.device().driver() == Some(DriverId::RXE);
        let first = self.next;
        let inline = pattern::bytes(first, 500);
        let bindings: Vec<_> = planned.iter().map(|planned| self.binding(at, planned)).collect();
        let Some(queue) = &mut self.qps[at] else { return Ok(text + ": none") };
        let mut batch = match queue.qp.send_batch() {
            Ok(batch) => batch,
            Err(error) => return Ok(format!("{text}: {}", not_posted(error))),
        };
        let mut posted = Vec::new();
        let handle = self.ahs[ah].as_ref();
        for (planned, binding) in planned.iter().zip(bindings) {
            let Planned {
                op, sges, inline: short, remote, signaled, fence, window: (of, _), ..
            } = planned;
            let said = &planned.text;
            let id = self.next;
            self.next += 1;
            text += &format!(" s{id} {said}");
            let imm = 0x8000_0000 | id as u32;
            // soft-RoCE of 7.3 panics when it invalidates a window of type 2 that is not bound.
            let named = if is_rxe { None } else { self.mws[*of].as_ref() };
            let window = named.map_or(Rkey(0), |mw| mw.rkey());
            let wr = match op {
                Op::Send => SendWr::send(sges),
                Op::SendImm => SendWr::send_imm(sges, imm),
                Op::Write => SendWr::write(*remote, sges),
                Op::WriteImm => SendWr::write_imm(*remote, sges, imm),
                Op::Read => SendWr::read(*remote, sges),
                Op::Add => SendWr::fetch_add(*remote, id, sges),
                Op::Swap => SendWr::compare_swap(*remote, 0, id, sges),
                Op::Invalidate => SendWr::local_inv(window),
                Op::SendInv => SendWr::send_inv(sges, window),
                Op::Bind => match binding {
                    Some(Ok(binding)) => SendWr::bind_mw(binding),
                    Some(Err(why)) => {
                        text += &format!(" {why},");
                        continue;
                    }
                    None => {
                        text += " none,";
                        continue;
                    }
                },
            };
            let mut wr = wr.id(id);
            if *signaled {
                wr = wr.signaled();
            }
            if *fence {
                wr = wr.fence();
            }
            if let Some(bytes) = short {
                wr = wr.inline(&inline[..*bytes]);
            }
            if let (Some(handle), Some(dest), QpType::UD) = (handle, dest, kind) {
                wr = wr.to(Destination::new(handle, dest, qkey));
            }
            match batch.push(wr) {
                Ok(()) => {
                    posted.push((id, *signaled));
                    if *op == Op::Bind {
                        self.bindings.insert(id, *of);
                    }
                }
                Err(error) => {
                    text += &format!(" {}", not_posted(error));
                    if let (Op::Bind, Some(mw)) = (op, &mut self.mws[*of]) {
                        mw.settle(WcStatus::WR_FLUSH_ERR);
                    }
                }
            }
            text += ",";
        }
        text.pop();
        // SAFETY: the arena is dropped after the queue pairs, and the program accesses it only by loads and stores.
        if let Err(error) = unsafe { batch.ring() } {
            return Ok(format!("{text}: {}", not_posted(PostError::Ring(error))));
        }
        // The completion of a later request shows that the requests before it have ended, too.
        if let Some((id, _)) = posted.iter().rev().find(|(_, signaled)| *signaled) {
            self.awaited.insert(*id, at);
        }
        Ok(text + ": ok")
    }

    /// Gathers completions until all sends have ended and no more completions come. `is_final` tells whether the whole
    /// line is the recorded one; `None` if none is recorded.
    pub(super) fn settle(
        &mut self,
        text: String,
        is_final: impl Fn(&str) -> Option<bool>,
    ) -> Verdict<String> {
        let mut done: Vec<(usize, bool, String)> = Vec::new();
        let is_checked = is_final("").is_some();
        let patience = if env::on_fabric() || !is_checked { BRIEF } else { PATIENCE };
        let (begun, mut last) = (Instant::now(), Instant::now());
        let mut failed = false;
        loop {
            if self.gather(&mut done, &mut failed)? {
                last = Instant::now();
            }
            let line = self.line(&text, &done, failed);
            let all = self.awaited.is_empty();
            if all && is_final(&line) == Some(true) {
                return Ok(line);
            }
            let quiet = match (env::on_fabric(), is_checked) {
                (_, true) => Duration::from_secs(1),
                (true, false) => Duration::ZERO,
                (false, false) if self.receives.is_empty() && done.is_empty() => Duration::ZERO,
                (false, false) => super::QUIET,
            };
            if all && last.elapsed() >= quiet || begun.elapsed() > patience {
                return Ok(if all { line } else { line + "; not all came" });
            }
            std::thread::yield_now();
        }
    }

    /// The line of a step with these completions.
    fn line(&self, text: &str, done: &[(usize, bool, String)], failed: bool) -> String {
        let mut line = text.to_string();
        let mut sorted: Vec<_> = done.iter().collect();
        // The order counts within a queue, not between two queues.
        sorted.sort_by_key(|(qp, is_recv, _)| (*qp, *is_recv));
        for (_, _, said) in sorted {
            line += &format!("; {said}");
        }
        if failed {
            let state = |queue: &super::world::Queue| queue.qp.query().map(|info| info.state);
            for (at, queue) in self.qps.iter().enumerate() {
                if let Some(Ok(state)) = queue.as_ref().map(state) {
                    line += &format!("; {at} {state:?}");
                }
            }
        }
        if !done.is_empty() {
            line += &format!("; {:08x}", self.digest());
        }
        line
    }

    /// Takes the completions that there are; whether there were any.
    fn gather(
        &mut self,
        done: &mut Vec<(usize, bool, String)>,
        failed: &mut bool,
    ) -> Verdict<bool> {
        let before = done.len();
        let numbers: Vec<_> =
            self.qps.iter().map(|queue| queue.as_ref().map(|queue| queue.qp.qpn())).collect();
        let mut datagrams = Vec::new();
        for cq in self.cqs.iter_mut().flatten() {
            let mut completions = cq.poll()?;
            while let Some(completion) = completions.next() {
                let id = completion.wr_id();
                let at = numbers.iter().position(|own| *own == Some(completion.qpn()));
                let pieces = self.receives.remove(&id);
                let status = completion.status();
                let label = if pieces.is_some() { "r" } else { "s" };
                let mut said = format!("{label}{id} {status:?}");
                if status == WcStatus::SUCCESS {
                    said += &format!(" {:?}", completion.opcode());
                    let opcode = completion.opcode();
                    if pieces.is_some() || matches!(opcode, WcOpcode::READ) {
                        said += &format!(" {}", completion.byte_len());
                    }
                    if let Some(imm) = completion.imm() {
                        said += &format!(" imm {imm:x}");
                    }
                    if completion.has_grh() {
                        said += " grh";
                    }
                } else {
                    *failed = true;
                }
                if pieces.is_none() {
                    self.awaited.remove(&id);
                }
                if let Some(mw) = self.bindings.remove(&id).and_then(|of| self.mws[of].as_mut()) {
                    mw.settle(status);
                }
                let at = at.unwrap_or(9);
                let is_datagram = self.qps.get(at).and_then(Option::as_ref);
                let is_datagram = is_datagram.is_some_and(|queue| queue.qp.qp_type() == QpType::UD);
                done.push((at, pieces.is_some(), said));
                datagrams.extend(pieces.filter(|_| is_datagram));
            }
        }
        // The network headers have identifiers and checksums of their own.
        for pieces in datagrams {
            let mut left = GRH;
            for (start, length) in pieces {
                let part = length.min(left).min(ARENA - start);
                self.arena.copy_from(start, &[0; GRH][..part])?;
                left -= part;
            }
        }
        Ok(done.len() > before)
    }

    /// A digest of the memory.
    pub(super) fn digest(&self) -> u32 {
        let mut bytes = vec![0; ARENA];
        if self.arena.copy_to(0, &mut bytes).is_err() {
            return 0;
        }
        let words = bytes
            .chunks_exact(8)
            .map(|word| word.iter().fold(0, |all, byte| all << 8 | u64::from(*byte)));
        let mixed = words.fold(0xcbf2_9ce4_8422_2325_u64, |digest, word| {
            (digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29)
        });
        (mixed >> 32) as u32
    }
}
