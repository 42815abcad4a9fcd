//! Steps that create, change and destroy objects.

use super::words::{outcome, refusal, rights};
use super::world::{Queue, World, end, keep, vacate};
use crate::env;
use crate::pair::QKEY;
use crate::testbed::link_of;
use uverbs::{
    Access, AddressVector, GlobalRoute, Mtu, Psn, Qkey, QpAttr, QpState, QpType, Qpn, Rereg,
    WindowType,
};

/// A number beyond the limit that the device advertises.
const BEYOND: u32 = u32::MAX - 1;

impl World {
    pub(super) fn some_object(&mut self) -> String {
        match self.random.below(30) {
            0 => {
                let at = self.random.below(2);
                self.alloc_pd(at)
            }
            1 => {
                let at = self.random.below(2);
                format!("dealloc_pd {at}: {}", end(&mut self.pds[at], |pd| pd.destroy()))
            }
            2..5 => {
                let (at, n) = (self.random.below(3), self.some_count());
                self.create_cq(at, n)
            }
            5 => {
                let (at, n) = (self.random.below(3), self.some_count());
                let n = self.limited(n, |attr| attr.max_cqe);
                let Some(cq) = &mut self.cqs[at] else { return format!("resize_cq {at}: none") };
                let answer = match cq.resize(n.0) {
                    Ok(()) => format!("{} entries", cq.capacity()),
                    Err(error) => refusal(&error),
                };
                format!("resize_cq {at} to {}: {answer}", n.1)
            }
            6 => {
                let at = self.random.below(3);
                format!("destroy_cq {at}: {}", end(&mut self.cqs[at], |cq| cq.destroy()))
            }
            7..12 => self.some_region(),
            12 => self.some_rereg(),
            13 => {
                let at = self.random.below(4);
                format!("dereg_mr {at}: {}", end(&mut self.mrs[at], |mr| mr.destroy()))
            }
            14 => {
                let (at, pd) = (self.random.below(2), self.random.below(2));
                let kind = self.random.pick(&[WindowType::One, WindowType::Two]);
                self.alloc_mw(at, pd, kind)
            }
            15 => {
                let at = self.random.below(2);
                format!("dealloc_mw {at}: {}", end(&mut self.mws[at], |mw| mw.destroy()))
            }
            16 | 17 => {
                let (at, pd) = (self.random.below(2), self.random.below(2));
                let wr = self.random.pick(&[1, 2, 16, 100, 0, BEYOND]);
                let sge = self.random.pick(&[1, 2, 3, 8, 31, 0, BEYOND]);
                self.create_srq(at, pd, wr, sge)
            }
            18 => {
                let (at, limit) =
                    (self.random.below(2), self.random.pick(&[0, 1, 15, 1000, BEYOND]));
                let Some(srq) = &mut self.srqs[at] else { return format!("set_limit {at}: none") };
                format!("set_limit {at} to {limit}: {}", outcome(srq.set_limit(limit)))
            }
            19 => {
                let (at, n) = (self.random.below(2), self.random.pick(&[1, 50, 200, BEYOND]));
                let Some(srq) = &mut self.srqs[at] else { return format!("resize_srq {at}: none") };
                format!("resize_srq {at} to {n}: {}", outcome(srq.resize(n)))
            }
            20 => {
                let at = self.random.below(2);
                let Some(srq) = &self.srqs[at] else { return format!("query_srq {at}: none") };
                let answer = match srq.query() {
                    Ok(attr) => format!("{attr:?}"),
                    Err(error) => refusal(&error),
                };
                format!("query_srq {at}: {answer}")
            }
            21 => {
                let at = self.random.below(2);
                format!("destroy_srq {at}: {}", end(&mut self.srqs[at], |srq| srq.destroy()))
            }
            22..26 => self.some_qp(),
            26 => self.destroy_qp(),
            27 => self.some_ah(),
            28 => {
                let at = self.random.below(2);
                format!("destroy_ah {at}: {}", end(&mut self.ahs[at], |ah| ah.destroy()))
            }
            _ => self.some_xrc(),
        }
    }

    pub(super) fn alloc_pd(&mut self, at: usize) -> String {
        let made = self.context.alloc_pd();
        format!("alloc_pd {at}: {}", keep(&mut self.pds[at], made, |_| "ok".into()))
    }

    /// The number of entries of a queue.
    fn some_count(&mut self) -> u32 {
        self.random.pick(&[1, 2, 3, 16, 63, 64, 100, 128, 200, 0, BEYOND, u32::MAX])
    }

    /// A number, and its name: [`BEYOND`] stands for one more than the device's limit.
    fn limited(&self, n: u32, limit: fn(&uverbs::DeviceAttr) -> u32) -> (u32, String) {
        if n != BEYOND {
            return (n, n.to_string());
        }
        let attr = self.context.query_device();
        (attr.map_or(n, |attr| limit(&attr) + 1), "limit+1".into())
    }

    pub(super) fn create_cq(&mut self, at: usize, n: u32) -> String {
        let (n, said) = self.limited(n, |attr| attr.max_cqe);
        if let Err(why) = vacate(&mut self.cqs[at], |cq| cq.destroy()) {
            return format!("create_cq {at} {said}: {why}");
        }
        let made = self.context.cq_builder(n).build();
        let answer = keep(&mut self.cqs[at], made, |cq| format!("{} entries", cq.capacity()));
        format!("create_cq {at} {said}: {answer}")
    }

    pub(super) fn alloc_mw(&mut self, at: usize, pd: usize, kind: WindowType) -> String {
        let text = format!("alloc_mw {at} in {pd} {kind:?}");
        let Some(pd) = &self.pds[pd] else { return format!("{text}: no PD") };
        format!("{text}: {}", keep(&mut self.mws[at], pd.alloc_mw(kind), |_| "ok".into()))
    }

    pub(super) fn create_srq(&mut self, at: usize, pd: usize, wr: u32, sge: u32) -> String {
        let wr = self.limited(wr, |attr| attr.max_srq_wr);
        let sge = self.limited(sge, |attr| attr.max_srq_sge);
        let Some(pd) = &self.pds[pd] else { return format!("create_srq {at}: no PD") };
        let made = pd.srq_builder(wr.0).max_sge(sge.0).build();
        let answer = keep(&mut self.srqs[at], made, |srq| match srq.query() {
            Ok(attr) => format!("{attr:?}"),
            Err(error) => refusal(&error),
        });
        format!("create_srq {at} wr {} sge {}: {answer}", wr.1, sge.1)
    }

    fn some_access(&mut self) -> Access {
        let some = [
            Access::LOCAL_WRITE,
            Access::ALL_REMOTE,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            Access::LOCAL_WRITE | Access::REMOTE_READ,
            Access::LOCAL_WRITE | Access::MW_BIND,
            Access::REMOTE_READ,
            Access::empty(),
            Access::MW_BIND,
            Access::REMOTE_WRITE,
            Access::ALL_REMOTE | Access::RELAXED_ORDERING,
            Access::ALL_REMOTE | Access::ZERO_BASED,
            Access::LOCAL_WRITE | Access::ON_DEMAND,
            Access::LOCAL_WRITE | Access::HUGETLB,
            Access::LOCAL_WRITE | Access::FLUSH_GLOBAL,
            Access::LOCAL_WRITE | Access::from_bits_retain(1 << 10),
            Access::LOCAL_WRITE | Access::from_bits_retain(1 << 22),
        ];
        let many = if self.random.one_in(3) { some.len() } else { 8 };
        self.random.pick(&some[..many])
    }

    /// Registers a range of the arena, or one that cannot be registered.
    fn some_region(&mut self) -> String {
        let (at, pd, access) = (self.random.below(4), self.random.below(2), self.some_access());
        if self.random.one_in(4) {
            return self.register_badly(at, pd, access);
        }
        let start = self.random.pick(&[0, 1, 8, 64, 4095, 4096, 5000, 8192]);
        let length = self.random.pick(&[1, 7, 64, 4096, 4097, 8000, 0]);
        self.register(at, pd, start, length, access)
    }

    #[allow(unsafe_code, reason = "the range is of the arena, which is dropped last")]
    pub(super) fn register(
        &mut self,
        at: usize,
        pd: usize,
        start: usize,
        length: usize,
        access: Access,
    ) -> String {
        let text = format!("reg_mr {at} in {pd} {start}+{length} {}", rights(access));
        let Some(pd) = &self.pds[pd] else { return format!("{text}: no PD") };
        if let Err(why) = vacate(&mut self.mrs[at], |mr| mr.destroy()) {
            return format!("{text}: {why}");
        }
        let address = self.arena.as_ptr().wrapping_add(start);
        // SAFETY: the arena is there as long as its regions, and the program accesses it only by loads and stores.
        let made = unsafe { pd.mr_builder().access(access).register_raw(address, length) };
        format!("{text}: {}", keep(&mut self.mrs[at], made, |_| "ok".into()))
    }

    /// Registers invalid ranges: unmapped memory, more than there is, unaligned addresses.
    #[allow(unsafe_code, reason = "the kernel refuses the ranges, or they are of the arena")]
    fn register_badly(&mut self, at: usize, pd: usize, access: Access) -> String {
        let arena = self.arena.as_ptr();
        let nowhere = std::ptr::without_provenance_mut(4096);
        let (what, address, length, iova) = match self.random.below(6) {
            0 => ("of no memory", nowhere, 4096, None),
            1 => ("of no memory but a byte", nowhere, 1, None),
            2 => ("beyond all memory", arena, usize::MAX - arena as usize - 4096, None),
            3 => ("beyond the address space", arena, usize::MAX - 100, None),
            4 => ("at another page's address", arena, 4096, Some(1 << 40)),
            _ => ("at an address off the page", arena, 4096, Some((1 << 40) + 8)),
        };
        let text = format!("reg_mr {at} in {pd} {what} {}", rights(access));
        let Some(pd) = &self.pds[pd] else { return format!("{text}: no PD") };
        if let Err(why) = vacate(&mut self.mrs[at], |mr| mr.destroy()) {
            return format!("{text}: {why}");
        }
        let builder = pd.mr_builder().access(access);
        let builder = iova.map_or(builder.clone(), |iova| builder.iova(iova));
        // SAFETY: the arena is there as long as its regions; no other memory is ever registered.
        let made = unsafe { builder.register_raw(address, length) };
        format!("{text}: {}", keep(&mut self.mrs[at], made, |_| "ok".into()))
    }

    fn some_rereg(&mut self) -> String {
        let at = self.random.below(4);
        let access = self.some_access();
        let (to, how) = (self.random.below(2), self.random.below(4));
        let Some(mr) = &mut self.mrs[at] else { return format!("rereg_mr {at}: none") };
        let mut change = Rereg::new();
        let mut text = format!("rereg_mr {at}");
        if how != 0 {
            change = change.access(access);
            text += &format!(" from {} to {}", rights(mr.access()), rights(access));
        }
        if how < 2 {
            let Some(pd) = &self.pds[to] else { return format!("{text}: no PD") };
            change = change.protection_domain(pd);
            text += &format!(" in {to}");
        }
        format!("{text}: {}", outcome(mr.rereg(change)))
    }

    fn some_qp(&mut self) -> String {
        let at = self.random.below(3);
        let free = self.qps.iter().position(Option::is_none).unwrap_or(at);
        let at = if self.random.one_in(4) { at } else { free };
        let kind = self.random.pick(&[QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI]);
        let mut caps = [8, 8, 2, 2, 64];
        if self.random.one_in(2) {
            let nth = self.random.below(5);
            caps[nth] = match nth {
                0 | 1 => self.random.pick(&[0, 1, 3, 100, 500, BEYOND, u32::MAX]),
                2 | 3 => self.random.pick(&[0, 1, 4, 16, BEYOND, u32::MAX]),
                _ => self.random.pick(&[0, 1, 100, 400, 2000, u32::MAX]),
            };
        }
        let (srq, pd) = (self.random.one_in(3), self.random.below(4) / 3);
        self.create_qp(at, pd, kind, caps, srq)
    }

    /// Creates a queue pair: WQEs of sends and receives, SGEs of each, bytes inline.
    pub(super) fn create_qp(
        &mut self,
        at: usize,
        pd: usize,
        kind: QpType,
        caps: [u32; 5],
        srq: bool,
    ) -> String {
        let send = self.limited(caps[0], |attr| attr.max_qp_wr);
        let recv = self.limited(caps[1], |attr| attr.max_qp_wr);
        let send_sge = self.limited(caps[2], |attr| attr.max_sge);
        let recv_sge = self.limited(caps[3], |attr| attr.max_sge);
        let cqs = [0, 2 * self.random.below(2)];
        let srq_at = self.random.below(2);
        let srq_at = if matches!(self.srqs, [Some(_), None]) { 0 } else { srq_at };
        let text = format!(
            "create_qp {at} {kind:?} in {pd} wr {}/{} sge {}/{} inline {}{}",
            send.1,
            recv.1,
            send_sge.1,
            recv_sge.1,
            caps[4],
            if srq { " srq" } else { "" }
        );
        let (Some(pd), Some(send_cq), Some(recv_cq)) =
            (&self.pds[pd], &self.cqs[cqs[0]], &self.cqs[cqs[1]])
        else {
            return format!("{text}: no parents");
        };
        if self.qps[at].is_some() {
            return format!("{text}: taken");
        }
        let mut builder = pd
            .qp_builder(send_cq, recv_cq, kind)
            .max_send_wr(send.0)
            .max_recv_wr(recv.0)
            .max_send_sge(send_sge.0)
            .max_recv_sge(recv_sge.0)
            .max_inline_data(caps[4]);
        if srq {
            let Some(srq) = &self.srqs[srq_at] else { return format!("{text}: no SRQ") };
            builder = builder.srq(srq);
        }
        let made =
            builder.build().map(|qp| Queue { qp, cqs, srq: srq.then_some(srq_at), peer: None });
        let answer = keep(&mut self.qps[at], made, |queue| {
            let caps = queue.qp.caps();
            format!(
                "wr {}/{} sge {}/{} inline {}",
                caps.max_send_wr,
                caps.max_recv_wr,
                caps.max_send_sge,
                caps.max_recv_sge,
                caps.max_inline_data
            )
        });
        format!("{text}: {answer}")
    }

    fn destroy_qp(&mut self) -> String {
        let at = self.random.below(3);
        let Some(Queue { qp, cqs, srq, peer }) = self.qps[at].take() else {
            return format!("destroy_qp {at}: none");
        };
        let answer = match qp.destroy() {
            Ok(()) => {
                self.awaited.retain(|_, of| *of != at);
                "ok".into()
            }
            Err(failed) => {
                let (qp, error) = failed.into_parts();
                self.qps[at] = Some(Queue { qp, cqs, srq, peer });
                refusal(&error)
            }
        };
        format!("destroy_qp {at}: {answer}")
    }

    /// A path to this port, or an invalid one.
    fn some_path(&mut self) -> (AddressVector, &'static str) {
        let good = self.path;
        if !self.random.one_in(3) {
            return (good, "good");
        }
        let Some(global) = good.global else { return (good, "good") };
        let with = |global: GlobalRoute| AddressVector { global: Some(global), ..good };
        match self.random.below(6) {
            0 => (AddressVector { port: 2, ..good }, "port 2"),
            1 => (AddressVector { global: None, ..good }, "not global"),
            2 => (with(GlobalRoute { sgid_index: 200, ..global }), "empty GID"),
            3 => (with(GlobalRoute { sgid_index: 256, ..global }), "GID 256"),
            4 => (AddressVector { service_level: 7, ..good }, "service level 7"),
            _ => (with(GlobalRoute { traffic_class: 5, flow_label: 9, ..global }), "class 5"),
        }
    }

    fn some_ah(&mut self) -> String {
        let (at, pd, (path, said)) = (self.random.below(2), self.random.below(2), self.some_path());
        self.create_ah(at, pd, path, said)
    }

    pub(super) fn create_ah(
        &mut self,
        at: usize,
        pd: usize,
        path: AddressVector,
        said: &str,
    ) -> String {
        let text = format!("create_ah {at} in {pd} {said}");
        let Some(pd) = &self.pds[pd] else { return format!("{text}: no PD") };
        format!("{text}: {}", keep(&mut self.ahs[at], pd.create_ah(&path), |_| "ok".into()))
    }

    fn some_xrc(&mut self) -> String {
        match self.random.below(5) {
            0 | 1 => {
                let made = self.context.xrcd_builder().build();
                format!("open_xrcd: {}", keep(&mut self.xrcds[0], made, |_| "ok".into()))
            }
            2 => format!("close_xrcd: {}", end(&mut self.xrcds[0], |domain| domain.destroy())),
            3 => {
                let Some(domain) = &self.xrcds[0] else { return "create_target: none".into() };
                let made = domain.create_target();
                format!("create_target: {}", keep(&mut self.targets[0], made, |_| "ok".into()))
            }
            _ => format!("destroy_target: {}", end(&mut self.targets[0], |qp| qp.destroy())),
        }
    }

    /// Changes or queries a queue pair.
    pub(super) fn some_state(&mut self) -> String {
        let at = self.random.below(3);
        if self.qps[at].is_none() {
            return self.some_qp();
        }
        match self.random.below(10) {
            0 => self.reset(at),
            1 | 2 => self.query(at),
            _ => self.modify(at),
        }
    }

    pub(super) fn reset(&mut self, at: usize) -> String {
        let Some(Queue { qp, cqs, peer, .. }) = &mut self.qps[at] else {
            return format!("reset {at}: none");
        };
        let mut used: Vec<_> = self.cqs.iter_mut().enumerate().collect();
        used.retain(|(nth, _)| cqs.contains(nth));
        let mut used: Vec<_> = used.into_iter().filter_map(|(_, cq)| cq.as_mut()).collect();
        let answer = qp.reset(&mut used);
        if answer.is_ok() {
            *peer = None;
            self.awaited.retain(|_, of| *of != at);
        }
        format!("reset {at}: {}", outcome(answer))
    }

    pub(super) fn query(&mut self, at: usize) -> String {
        let Some(Queue { qp, .. }) = &self.qps[at] else { return format!("query {at}: none") };
        let answer = match qp.query() {
            Ok(info) => format!(
                "{:?} mtu {} {} pkey {} psn {:x}/{:x} qkey {:x} rd {}/{} rnr {}/{} timeout {} retry {} port {} sl {} mig {} {}",
                info.state,
                info.path_mtu.0,
                rights(info.access),
                info.pkey_index,
                info.sq_psn.0,
                info.rq_psn.0,
                info.qkey.0,
                info.max_rd_atomic,
                info.max_dest_rd_atomic,
                info.min_rnr_timer,
                info.rnr_retry,
                info.timeout,
                info.retry_count,
                info.port,
                info.path.service_level,
                info.path_mig_state.0,
                if info.signal_all { "all" } else { "some" },
            ),
            Err(error) => refusal(&error),
        };
        format!("query {at}: {answer}")
    }

    /// Asks for a change, often to the next state, and often with a mistake.
    fn modify(&mut self, at: usize) -> String {
        let Some((kind, state, own)) = self.qps[at]
            .as_ref()
            .map(|queue| (queue.qp.qp_type(), queue.qp.state(), queue.qp.qpn()))
        else {
            return format!("modify {at}: none");
        };
        let next = match state {
            QpState::RESET => QpState::INIT,
            QpState::INIT => QpState::RTR,
            QpState::RTR | QpState::RTS | QpState::SQD | QpState::SQE => QpState::RTS,
            _ => QpState::ERR,
        };
        let others = [QpState::INIT, QpState::RTR, QpState::RTS, QpState::SQD, QpState::ERR];
        let to = if self.random.one_in(5) { self.random.pick(&others) } else { next };
        let mut attr = QpAttr::new();
        let mut text = format!("modify {at} {kind:?} {state:?}");
        if state != to || !self.random.one_in(3) {
            attr = attr.state(to);
            text += &format!("→{to:?}");
        }
        let (connected, reliable) =
            (kind != QpType::UD, kind == QpType::RC || kind == QpType::XRC_INI);
        // The attributes that the change needs.
        let mut with: Vec<&str> = match (state, to) {
            (QpState::RESET, QpState::INIT) if connected => vec!["port", "pkey", "access"],
            (QpState::RESET, QpState::INIT) => vec!["port", "pkey", "qkey"],
            (_, QpState::RTR) if connected => vec!["path", "mtu", "dest", "rq_psn"],
            (QpState::RTR, QpState::RTS) if reliable => {
                vec!["sq_psn", "timeout", "retry", "rnr_retry", "rd"]
            }
            (QpState::RTR, QpState::RTS) => vec!["sq_psn"],
            _ => vec![],
        };
        if to == QpState::RTR && kind == QpType::RC {
            with.extend(["dest_rd", "rnr_timer"]);
        }
        const ALL: [&str; 16] = [
            "port",
            "pkey",
            "access",
            "qkey",
            "path",
            "mtu",
            "dest",
            "rq_psn",
            "sq_psn",
            "timeout",
            "retry",
            "rnr_retry",
            "rd",
            "dest_rd",
            "rnr_timer",
            "current",
        ];
        match self.random.below(8) {
            0 if !with.is_empty() => {
                let nth = self.random.below(with.len());
                with.remove(nth);
            }
            1 => with.push(self.random.pick(&ALL)),
            2 | 3 if state == to => {
                with.push(self.random.pick(&["access", "rnr_timer", "qkey", "pkey", "port"]));
            }
            _ => {}
        }
        let wrong = self.random.one_in(4);
        let wrong =
            if wrong && !with.is_empty() { Some(self.random.below(with.len())) } else { None };
        for (nth, name) in with.iter().enumerate() {
            let bad = wrong == Some(nth);
            let (changed, said) = self.attribute(attr, name, bad, own, state);
            attr = changed;
            text += &format!(" {name} {said}");
        }
        let Some(queue) = &mut self.qps[at] else { return text };
        let answer = queue.qp.modify(&attr);
        if answer.is_ok() && (to != state || !with.is_empty()) {
            queue.peer = queue.peer.filter(|_| to == QpState::ERR);
        }
        format!("{text}: {}", outcome(answer))
    }

    /// Adds an attribute; a bad one has a value that the library, kernel or device may refuse.
    fn attribute(
        &mut self,
        attr: QpAttr,
        name: &str,
        bad: bool,
        own: Qpn,
        state: QpState,
    ) -> (QpAttr, String) {
        let port = link_of(&self.context).map_or(1, |link| link.port);
        let mut number =
            |good: &[u32], wrong: &[u32]| self.random.pick(if bad { wrong } else { good });
        match name {
            "port" => {
                let value = if bad { number(&[], &[0, 2, 300]) } else { port };
                (attr.port(value), if bad { value.to_string() } else { "own".into() })
            }
            "pkey" => {
                let value =
                    if bad { number(&[], &[1, 127, 128, 65535]) } else { env::pkey_index().into() };
                (attr.pkey_index(value as u16), if bad { value.to_string() } else { "own".into() })
            }
            "access" => {
                let access = match number(&[0, 1, 2, 3, 4], &[5, 6, 7]) {
                    0 => Access::ALL_REMOTE,
                    1 => Access::empty(),
                    2 => Access::REMOTE_READ,
                    3 => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
                    4 => Access::REMOTE_ATOMIC,
                    5 => Access::ALL_REMOTE | Access::MW_BIND,
                    6 => Access::ON_DEMAND,
                    _ => Access::from_bits_retain(1 << 12),
                };
                (attr.access(access), rights(access))
            }
            "qkey" => {
                let value = number(&[QKEY.0, 7, 0], &[0x7fff_ffff]);
                (attr.qkey(Qkey(value)), format!("{value:x}"))
            }
            "path" => {
                let (path, said) = if bad { self.some_path() } else { (self.path, "good") };
                (attr.path(path), said.into())
            }
            "mtu" => {
                let value = number(&[1, 2, 3], &[0, 4, 5, 6]);
                (attr.path_mtu(Mtu(value as u8)), value.to_string())
            }
            "dest" => {
                let value = if bad { number(&[], &[0, 0xff_ffff, 0x100_0000]) } else { own.0 };
                (attr.dest_qpn(Qpn(value)), if bad { value.to_string() } else { "itself".into() })
            }
            "rq_psn" | "sq_psn" => {
                let value = number(&[0, 1, 0xff_ffff, 0x12_3456], &[0x100_0000, u32::MAX]);
                let changed = if name == "rq_psn" { QpAttr::rq_psn } else { QpAttr::sq_psn };
                (changed(attr, Psn(value)), format!("{value:x}"))
            }
            "timeout" => {
                let value = number(&[0, 14, 18, 31], &[32, 255]);
                (attr.timeout(value as u8), value.to_string())
            }
            "retry" => {
                let value = number(&[0, 3, 7], &[8, 255]);
                (attr.retry_count(value as u8), value.to_string())
            }
            "rnr_retry" => {
                let value = number(&[0, 3, 7], &[8, 255]);
                (attr.rnr_retry(value as u8), value.to_string())
            }
            "rd" => {
                let value = number(&[0, 1, 4, 16, 3], &[17, 128, 129, 255]);
                (attr.max_rd_atomic(value as u8), value.to_string())
            }
            "dest_rd" => {
                let value = number(&[0, 1, 4, 16, 3], &[17, 128, 129, 255]);
                (attr.max_dest_rd_atomic(value as u8), value.to_string())
            }
            "rnr_timer" => {
                let value = number(&[0, 1, 12, 31], &[32, 255]);
                (attr.min_rnr_timer(value as u8), value.to_string())
            }
            _ => {
                let value =
                    if bad { self.random.pick(&[QpState::INIT, QpState::RTS]) } else { state };
                (attr.current_state(value), format!("{value:?}"))
            }
        }
    }
}
