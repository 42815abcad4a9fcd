//! The data path of rdma-core: the classic interface, which takes structures, and the extended one,
//! which takes calls.

use crate::abi::{
    Context, Cq, CqEx, DataBuf, Mr, Opaque, PollAttr, Qp, QpEx, RecvWr, SendWr, Sge, Srq, Wc,
    number,
};
use crate::endpoint::{self, QKEY};
use crate::lane::{Ends, Maker};
use crate::verbs::{Made, Verbs, done};
use lab_bench::Failure;
use lab_bench::clock::linger;
use lab_bench::path::{
    AFTERWARDS, BATCH, INLINE, LAST, Lane, Operation, POLLED, Path, RECEIVED, RUN, Request,
    SEGMENT, SEGMENTS, SETTLING, SLICE, SLICES, WORDS, place,
};
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::ptr::{from_mut, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The interfaces, in the order of `WAYS`.
const CLASSIC: usize = 0;
const ENOENT: c_int = 2;

/// Everything that the operations need.
pub(crate) struct Theirs {
    own: Ends,
    shared: Ends,
    datagrams: Ends,
    xrc: Ends,
    /// The number of the shared receive queue that XRC requests name.
    srqn: u32,
    srq: Made<Srq>,
    mr: Made<Mr>,
    ah: Made<Opaque>,
    memory: Box<[AtomicU64]>,
    mark: u64,
    _context: Made<Context>,
    _verbs: Verbs,
}

impl Theirs {
    fn ends(&self, lane: Lane) -> &Ends {
        match lane {
            Lane::Own => &self.own,
            Lane::Shared => &self.shared,
            Lane::Datagrams => &self.datagrams,
            Lane::Xrc => &self.xrc,
        }
    }

    /// The address of a word.
    fn at(&self, word: usize) -> u64 {
        self.memory[word].as_ptr().expose_provenance() as u64
    }

    fn sge(&self, word: usize, length: u32) -> Sge {
        Sge { addr: self.at(word), length, lkey: key(&self.mr).0 }
    }

    /// The request as a structure; `sges` and `data` must stay where they are.
    fn request(&self, request: Request, sges: &mut [Sge; SEGMENTS], data: &[u8]) -> SendWr {
        let rkey = u64::from(key(&self.mr).1);
        let (opcode, flags, count, wr) = match request {
            Request::Write | Request::XrcWrite => {
                (number::WR_RDMA_WRITE, 0, 1, [self.at(place::TARGET), rkey, 0, 0])
            }
            Request::Read => (number::WR_RDMA_READ, 0, 1, [self.at(place::TARGET), rkey, 0, 0]),
            Request::FetchAdd => {
                (number::WR_ATOMIC_FETCH_AND_ADD, 0, 1, [self.at(place::COUNTER), 1, 0, rkey])
            }
            Request::Gather => (number::WR_SEND, 0, SEGMENTS as c_int, [0; 4]),
            Request::Inline(_) => (number::WR_SEND, number::SEND_INLINE, 1, [0; 4]),
            Request::InlineList => (number::WR_SEND, number::SEND_INLINE, SLICES as c_int, [0; 4]),
            Request::Datagram => {
                let ah = self.ah.as_ptr().expose_provenance() as u64;
                // Two 32-bit fields in one word.
                let queue = u64::from(endpoint::qpn(&self.datagrams.qp)) | u64::from(QKEY) << 32;
                (number::WR_SEND, 0, 1, [ah, queue, 0, 0])
            }
        };
        match request {
            Request::FetchAdd => sges[0] = self.sge(place::FETCHED, 8),
            Request::Inline(length) => {
                let addr = data.as_ptr().expose_provenance() as u64;
                sges[0] = Sge { addr, length, lkey: 0 };
            }
            Request::InlineList => {
                for (sge, slice) in sges.iter_mut().zip(data.chunks_exact(SLICE)) {
                    let addr = slice.as_ptr().expose_provenance() as u64;
                    *sge = Sge { addr, length: SLICE as u32, lkey: 0 };
                }
            }
            _ => {
                for (segment, sge) in sges.iter_mut().enumerate() {
                    *sge = self.sge(place::SOURCE + 16 * segment, SEGMENT);
                }
            }
        }
        SendWr {
            wr_id: 0,
            next: null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: count,
            opcode,
            send_flags: flags,
            imm_data: 0,
            wr,
            remote_srqn: self.srqn,
            other: [0; 6],
        }
    }

    fn post_classic<const N: usize>(&self, lane: Lane, request: Request) -> Result<(), Failure> {
        let data = [0x5a; INLINE as usize];
        let mut sges = [Sge::default(); SEGMENTS];
        let mut wrs = [self.request(request, &mut sges, &data); N];
        link(&mut wrs, |wr, next| wr.next = next);
        let qp = self.ends(lane).qp.as_ptr();
        let mut id = 0;
        for _ in 0..RUN / N as u32 {
            for wr in &mut wrs {
                id += 1;
                wr.wr_id = id;
            }
            done("post_send", post_send(qp, wrs.as_mut_ptr()))?;
        }
        Ok(())
    }

    fn post_extended<const N: u32>(&self, lane: Lane, request: Request) -> Result<(), Failure> {
        let qp = self.ends(lane).extended.as_ptr();
        let (lkey, rkey) = key(&self.mr);
        let (source, target) = (self.at(place::SOURCE), self.at(place::TARGET));
        let srqn = self.srqn;
        match request {
            Request::Write => build::<N>(qp, complete, |qp| {
                call!(qp.wr_rdma_write, rkey, target);
                call!(qp.wr_set_sge, lkey, source, SEGMENT);
            }),
            Request::XrcWrite => build::<N>(qp, complete, |qp| {
                call!(qp.wr_rdma_write, rkey, target);
                call!(qp.wr_set_xrc_srqn, srqn);
                call!(qp.wr_set_sge, lkey, source, SEGMENT);
            }),
            Request::Read => build::<N>(qp, complete, |qp| {
                call!(qp.wr_rdma_read, rkey, target);
                call!(qp.wr_set_sge, lkey, source, SEGMENT);
            }),
            Request::FetchAdd => {
                let (counter, fetched) = (self.at(place::COUNTER), self.at(place::FETCHED));
                build::<N>(qp, complete, |qp| {
                    call!(qp.wr_atomic_fetch_add, rkey, counter, 1);
                    call!(qp.wr_set_sge, lkey, fetched, 8);
                })
            }
            Request::Gather => {
                let mut sges = [Sge::default(); SEGMENTS];
                self.request(request, &mut sges, &[]);
                build::<N>(qp, complete, |qp| {
                    call!(qp.wr_send);
                    call!(qp.wr_set_sge_list, SEGMENTS, sges.as_ptr());
                })
            }
            Request::Inline(length) => {
                let mut data = [0x5a_u8; INLINE as usize];
                let data = data.as_mut_ptr().cast::<c_void>();
                build::<N>(qp, complete, |qp| {
                    call!(qp.wr_send);
                    call!(qp.wr_set_inline_data, data, length as usize);
                })
            }
            Request::InlineList => {
                let data = [0x5a_u8; SLICES * SLICE];
                let mut list = [DataBuf { addr: null_mut(), length: SLICE }; SLICES];
                for (buf, slice) in list.iter_mut().zip(data.chunks_exact(SLICE)) {
                    buf.addr = slice.as_ptr().cast_mut().cast();
                }
                build::<N>(qp, complete, |qp| {
                    call!(qp.wr_send);
                    call!(qp.wr_set_inline_data_list, SLICES, list.as_ptr());
                })
            }
            Request::Datagram => {
                let ah = self.ah.as_ptr();
                let qpn = endpoint::qpn(&self.datagrams.qp);
                build::<N>(qp, complete, |qp| {
                    call!(qp.wr_send);
                    call!(qp.wr_set_ud_addr, ah, qpn, QKEY);
                    call!(qp.wr_set_sge, lkey, source, SEGMENT);
                })
            }
        }
    }

    /// Takes the completions of the lane's queues, until `LAST` was sent and `received` came.
    fn drain(&self, lane: Lane, received: u32) -> Result<(), Failure> {
        let ends = self.ends(lane);
        let (mut sent, mut came) = (false, 0);
        let start = Instant::now();
        let mut wc = Wc::default();
        while !sent || came < received {
            while poll_cq(ends.send_cq.as_ptr(), from_mut(&mut wc), 1) == 1 {
                success(&wc)?;
                sent |= wc.wr_id == LAST;
            }
            while poll_cq(ends.recv_cq.as_ptr(), from_mut(&mut wc), 1) == 1 {
                success(&wc)?;
                came += 1;
            }
            if start.elapsed() > Duration::from_secs(SETTLING) {
                return Err(format!("not done: {came} of {received} received").into());
            }
        }
        Ok(())
    }
}

/// The local and the remote key of a region.
pub(crate) fn key(mr: &Made<Mr>) -> (u32, u32) {
    // SAFETY: it is not deregistered, and the key does not change.
    let lkey = unsafe { (*mr.as_ptr()).lkey };
    // SAFETY: as above.
    let rkey = unsafe { (*mr.as_ptr()).rkey };
    (lkey, rkey)
}

/// Chains requests.
pub(crate) fn link<T>(wrs: &mut [T], set: impl Fn(&mut T, *mut T)) {
    let start = wrs.as_mut_ptr();
    let last = wrs.len() - 1;
    for (place, wr) in wrs.iter_mut().enumerate() {
        set(wr, if place < last { start.wrapping_add(place + 1) } else { null_mut() });
    }
}

/// As the header's inline functions go from an object through its context to the library.
macro_rules! through_context {
    ($object:expr, $function:ident $(, $argument:expr)*) => {{
        let object = $object;
        // SAFETY: the object is not destroyed.
        let context = unsafe { (*object).context };
        // SAFETY: the context is open as long as its objects are there.
        let function = unsafe { (*context).ops.$function };
        // SAFETY: structures are laid out as the header says and outlive the call.
        unsafe { function(object $(, $argument)*) }
    }};
}

/// A function that an object holds.
macro_rules! call {
    ($object:ident.$function:ident $(, $argument:expr)*) => {{
        // SAFETY: the object is not destroyed.
        let function = unsafe { (*$object).$function };
        // SAFETY: structures are laid out as the header says and outlive the call.
        unsafe { function($object $(, $argument)*) }
    }};
}
use call;

#[inline]
pub(crate) fn post_send(qp: *mut Qp, wr: *mut SendWr) -> c_int {
    let mut bad = null_mut();
    through_context!(qp, post_send, wr, &mut bad)
}

#[inline]
fn post_recv(qp: *mut Qp, wr: *mut RecvWr) -> c_int {
    let mut bad = null_mut();
    through_context!(qp, post_recv, wr, &mut bad)
}

#[inline]
fn post_srq_recv(srq: *mut Srq, wr: *mut RecvWr) -> c_int {
    let mut bad = null_mut();
    through_context!(srq, post_srq_recv, wr, &mut bad)
}

#[inline]
pub(crate) fn poll_cq(cq: *mut CqEx, wc: *mut Wc, count: c_int) -> c_int {
    through_context!(cq.cast::<Cq>(), poll_cq, count, wc)
}

#[inline]
fn complete(qp: *mut QpEx) -> Result<(), Failure> {
    done("wr_complete", call!(qp.wr_complete))
}

#[inline]
fn abort(qp: *mut QpEx) -> Result<(), Failure> {
    call!(qp.wr_abort);
    Ok(())
}

/// Builds `RUN` requests, `N` between a start and an end.
#[inline]
fn build<const N: u32>(
    qp: *mut QpEx,
    end: impl Fn(*mut QpEx) -> Result<(), Failure>,
    each: impl Fn(*mut QpEx),
) -> Result<(), Failure> {
    let mut id = 0;
    for _ in 0..RUN / N {
        call!(qp.wr_start);
        let mut one = || {
            id += 1;
            // SAFETY: the queue pair is not destroyed, and nobody else uses it.
            unsafe { (*qp).wr_id = id };
            // SAFETY: as above.
            unsafe { (*qp).wr_flags = 0 };
            each(qp);
        };
        if N == 1 {
            // As a program that posts one has it: without a loop around it.
            one();
        } else {
            (0..N).for_each(|_| one());
        }
        end(qp)?;
    }
    Ok(())
}

/// Hands over `RUN` receives, `N` at once.
#[inline]
fn receive<const N: usize>(
    sge: &mut Sge,
    post: impl Fn(*mut RecvWr) -> c_int,
) -> Result<(), Failure> {
    let mut wrs = [RecvWr { wr_id: 0, next: null_mut(), sg_list: sge, num_sge: 1 }; N];
    link(&mut wrs, |wr, next| wr.next = next);
    let mut id = 0;
    for _ in 0..RUN / N as u32 {
        for wr in &mut wrs {
            id += 1;
            wr.wr_id = id;
        }
        done("post_recv", post(wrs.as_mut_ptr()))?;
    }
    Ok(())
}

/// Takes `RUN` completions by the classic interface, at most `N` at once.
#[inline]
fn poll_classic<const N: usize>(cq: *mut CqEx) -> Result<u32, Failure> {
    let (mut found, mut sum) = (0, 0);
    let mut wcs = [Wc::default(); N];
    for _ in 0..RUN / N as u32 {
        let count = poll_cq(cq, wcs.as_mut_ptr(), N as c_int);
        if count < 0 {
            return Err("poll_cq failed".into());
        }
        for wc in wcs.iter().take(count as usize) {
            if wc.status != 0 {
                success(wc)?;
            }
            sum += wc.wr_id + u64::from(wc.opcode);
        }
        found += count as u32;
    }
    black_box(sum);
    Ok(found)
}

/// Takes `RUN` completions by the extended interface, at most `N` at once.
#[inline]
fn poll_extended<const N: u32>(cq: *mut CqEx) -> Result<u32, Failure> {
    let (mut found, mut sum) = (0, 0);
    let mut attr = PollAttr { comp_mask: 0 };
    for _ in 0..RUN / N {
        let mut answer = call!(cq.start_poll, &mut attr);
        if answer == ENOENT {
            continue;
        }
        for turn in 1..=N {
            done("poll", answer)?;
            // SAFETY: the queue is not destroyed, and nobody else uses it.
            let status = unsafe { (*cq).status };
            // SAFETY: as above.
            let id = unsafe { (*cq).wr_id };
            if status != 0 {
                return Err(format!("request {id} completed with status {status}").into());
            }
            sum += id + u64::from(call!(cq.read_opcode));
            found += 1;
            if turn == N {
                break;
            }
            answer = call!(cq.next_poll);
            if answer == ENOENT {
                break;
            }
        }
        call!(cq.end_poll);
    }
    black_box(sum);
    Ok(found)
}

pub(crate) fn success(wc: &Wc) -> Result<(), Failure> {
    match wc.status {
        0 => Ok(()),
        status => Err(format!("request {} completed with status {status}", wc.wr_id).into()),
    }
}

impl Path for Theirs {
    const WAYS: &[&str] = &["ibv_post_send, ibv_poll_cq", "ibv_wr_*, ibv_start_poll"];

    fn open(device: &str, alone: bool) -> Result<Self, Failure> {
        let verbs = Verbs::load()?;
        let context = verbs.open(device)?;
        let gid = verbs.ipv4_gid(&context)?;
        let mut pd = verbs.alloc_pd(&context)?;
        if alone {
            let td = verbs.alloc_td(&context)?;
            pd = verbs.alloc_parent_domain(&context, &pd, Some(&td))?;
        }
        let memory: Box<[AtomicU64]> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let mr = verbs.reg_mr(&pd, &memory)?;
        let srq = verbs.create_srq(&pd, 2 * RUN)?;
        let make = Maker { verbs: &verbs, context: &context, pd: &pd, gid, alone };
        let own = make.pair(null_mut())?;
        let shared = make.pair(srq.as_ptr())?;
        let datagrams = make.datagrams()?;
        let (xrc, srqn) = make.xrc()?;
        let ah = verbs.create_ah(&pd, endpoint::path(gid))?;
        Ok(Theirs {
            own,
            shared,
            datagrams,
            xrc,
            srqn,
            srq,
            mr,
            ah,
            memory,
            mark: 0,
            _context: context,
            _verbs: verbs,
        })
    }

    fn offers(way: usize, operation: Operation) -> bool {
        match operation {
            // Nothing is kept of a structure until it is posted.
            Operation::Build => way != CLASSIC,
            // One interface for both.
            Operation::Receive(..) | Operation::Arm => way == CLASSIC,
            Operation::Post(..) | Operation::Poll(_) | Operation::PollEmpty => true,
        }
    }

    fn post(
        &mut self,
        way: usize,
        lane: Lane,
        request: Request,
        batch: u32,
    ) -> Result<(), Failure> {
        match (way, batch) {
            (CLASSIC, 1) => self.post_classic::<1>(lane, request),
            (CLASSIC, BATCH) => self.post_classic::<{ BATCH as usize }>(lane, request),
            (_, 1) => self.post_extended::<1>(lane, request),
            (_, BATCH) => self.post_extended::<BATCH>(lane, request),
            (_, other) => Err(format!("no batches of {other}").into()),
        }
    }

    fn build(&mut self, _: usize) -> Result<(), Failure> {
        let (lkey, rkey) = key(&self.mr);
        let (source, target) = (self.at(place::SOURCE), self.at(place::TARGET));
        build::<1>(self.own.extended.as_ptr(), abort, |qp| {
            call!(qp.wr_rdma_write, rkey, target);
            call!(qp.wr_set_sge, lkey, source, SEGMENT);
        })
    }

    fn receive(&mut self, lane: Lane, batch: u32) -> Result<(), Failure> {
        let peer = self.ends(lane).peer.as_ref().ok_or("the lane takes no receives")?.as_ptr();
        let srq = self.srq.as_ptr();
        let mut sge = self.sge(place::INBOX, RECEIVED);
        match (lane, batch) {
            (Lane::Shared, 1) => receive::<1>(&mut sge, |wr| post_srq_recv(srq, wr)),
            (Lane::Shared, BATCH) => {
                receive::<{ BATCH as usize }>(&mut sge, |wr| post_srq_recv(srq, wr))
            }
            (_, 1) => receive::<1>(&mut sge, |wr| post_recv(peer, wr)),
            (_, BATCH) => receive::<{ BATCH as usize }>(&mut sge, |wr| post_recv(peer, wr)),
            (_, other) => Err(format!("no batches of {other}").into()),
        }
    }

    fn poll(&mut self, way: usize, batch: u32) -> Result<u32, Failure> {
        let cq = self.own.send_cq.as_ptr();
        match (way, batch) {
            (CLASSIC, 1) => poll_classic::<1>(cq),
            (CLASSIC, POLLED) => poll_classic::<{ POLLED as usize }>(cq),
            (_, 1) => poll_extended::<1>(cq),
            (_, POLLED) => poll_extended::<POLLED>(cq),
            (_, other) => Err(format!("no polls of {other}").into()),
        }
    }

    fn poll_empty(&mut self, way: usize) -> Result<u32, Failure> {
        let cq = self.own.send_cq.as_ptr();
        let mut found = 0;
        if way == CLASSIC {
            let mut wc = Wc::default();
            for _ in 0..RUN {
                found += u32::try_from(poll_cq(cq, &raw mut wc, 1))?;
            }
        } else {
            let mut attr = PollAttr { comp_mask: 0 };
            for _ in 0..RUN {
                if call!(cq.start_poll, &mut attr) != ENOENT {
                    found += 1;
                    call!(cq.end_poll);
                }
            }
        }
        Ok(found)
    }

    fn arm(&mut self) -> Result<(), Failure> {
        let cq = self.own.send_cq.as_ptr().cast::<Cq>();
        for _ in 0..RUN {
            done("req_notify_cq", through_context!(cq, req_notify_cq, 0))?;
        }
        Ok(())
    }

    fn settle(&mut self, lane: Lane, received: u32) -> Result<(), Failure> {
        let mut sges = [Sge::default(); SEGMENTS];
        let request = match lane {
            Lane::Datagrams => Request::Datagram,
            Lane::Own | Lane::Shared => Request::Write,
            Lane::Xrc => Request::XrcWrite,
        };
        let mut wr = self.request(request, &mut sges, &[]);
        wr.wr_id = LAST;
        wr.send_flags |= number::SEND_SIGNALED;
        done("post_send", post_send(self.ends(lane).qp.as_ptr(), &raw mut wr))?;
        self.drain(lane, received)
    }

    fn fill(&mut self) -> Result<(), Failure> {
        self.mark += 1;
        self.memory[place::MARK].store(self.mark, Ordering::Relaxed);
        let mut sges = [Sge::default(); SEGMENTS];
        let mut wr = self.request(Request::Write, &mut sges, &[]);
        wr.send_flags |= number::SEND_SIGNALED;
        let mut wrs = vec![wr; RUN as usize];
        let mut mark = self.sge(place::MARK, 8);
        let last = &mut wrs[RUN as usize - 1];
        last.sg_list = &raw mut mark;
        last.wr[0] = self.at(place::MARKED);
        link(&mut wrs, |wr, next| wr.next = next);
        done("post_send", post_send(self.own.qp.as_ptr(), wrs.as_mut_ptr()))?;
        let start = Instant::now();
        while self.memory[place::MARKED].load(Ordering::Acquire) != self.mark {
            if start.elapsed() > Duration::from_secs(SETTLING) {
                return Err("the last write did not arrive".into());
            }
        }
        // The completion follows the write.
        linger(AFTERWARDS);
        Ok(())
    }
}
