//! A kernel in the process: commands without mailboxes, process addresses, events as values, time from outside.

mod driver;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use driver::pair::code;
use uverbs_connectx::command_error::CommandStatus;
use uverbs_connectx::doorbell::DoorbellErrors;
use uverbs_connectx::fabric::{Fabric, Progress};
use uverbs_connectx::fault::CommandFailure;
use uverbs_connectx::format::event::{self, Event, Subject};
use uverbs_connectx::function::Function;
use uverbs_connectx::guest::GuestMemory;
use uverbs_connectx::interrupt::VECTORS;
use uverbs_connectx::object::cq::NO_ARM_WORD;
use uverbs_connectx::options::Options;
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in, create_cq_out};
use uverbs_uapi::mlx5::prm::eqc::{create_eq_in, create_eq_out, eqc};
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, create_mkey_out, mkc};
use uverbs_uapi::mlx5::prm::object::{
    alloc_memic_in, alloc_memic_out, alloc_pd_out, alloc_uar_out,
};
use uverbs_uapi::mlx5::prm::qpc::{ads, create_qp_in, create_qp_out, qpc, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::vport::{roce_addr_layout, set_roce_address_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

/// The syndrome of a CQE whose request named memory that is not there.
const LOCAL_PROTECTION: u8 = 0x04;
/// Offset of the doorbell of a CQ, and of the first register of a send queue.
const CQ: u64 = 0x20;
const SEND: u64 = 0x800;

#[repr(C, align(4096))]
struct Page([AtomicU64; 512]);

/// Pages of the process that the device may access.
struct Pages(Arc<[Page]>);

impl Pages {
    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    fn len(&self) -> u64 {
        self.0.len() as u64 * 4096
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.0[at / 4096].0[at % 4096 / 8]
    }

    /// Writes whole words.
    fn write(&self, at: usize, bytes: &[u8]) {
        for (number, word) in bytes.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes(word.try_into().unwrap());
            self.word(at + number * 8).store(value, Ordering::Release);
        }
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let words = (at / 8..(at + len).div_ceil(8)).map(|word| self.word(word * 8));
        words.flat_map(|word| word.load(Ordering::Acquire).to_ne_bytes()).take(len).collect()
    }

    /// Sets half of a word, big-endian: doorbell records.
    fn set_half(&self, at: usize, value: u32) {
        let mut bytes = self.read(at / 8 * 8, 8);
        bytes[at % 8..at % 8 + 4].copy_from_slice(&value.to_be_bytes());
        self.write(at / 8 * 8, &bytes);
    }

    /// The page list of a command.
    fn list(&self) -> Vec<u8> {
        let pages = (self.address()..self.address() + self.len()).step_by(4096);
        pages.flat_map(u64::to_be_bytes).collect()
    }
}

/// A queue pair: 16 WQEBBs of sends behind 16 receives of one SGE in the first page, doorbell records in
/// the second, a CQ of 32 CQEs in the third with its record in the fourth, data in those from the fifth on.
struct End {
    number: usize,
    uar: u32,
    pd: u32,
    qpn: u32,
    cqn: u32,
    eqn: u32,
    key: u32,
    pages: Pages,
    posted: u16,
    received: u32,
}

const RECORDS: usize = 4096;
const CQES: usize = 2 * 4096;
const CQ_RECORD: usize = 3 * 4096;
const DATA: usize = 4 * 4096;
const DATA_PAGES: usize = 3;

struct Host {
    fabric: Fabric,
    now: u64,
}

fn command(function: &mut Function, op: u16, input: &[u8]) -> Result<Vec<u8>, u8> {
    let mut input = input.to_vec();
    input[..2].copy_from_slice(&op.to_be_bytes());
    let output = function.command(&input, 512).expect("a completion");
    assert_eq!(output.len(), 512);
    if output[0] == 0 { Ok(output) } else { Err(output[0]) }
}

fn gid(number: usize) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, number as u8 + 1]
}

impl Host {
    /// Functions behind one switch, each with an address.
    fn new(functions: usize) -> Self {
        let mut fabric = Fabric::default();
        for number in 0..functions {
            fabric.add(Options::default());
            let function = fabric.function(number);
            *function.memory_mut() = GuestMemory::process();
            function.enable_bus_master();
            for op in [opcode::ENABLE_HCA, opcode::INIT_HCA] {
                command(function, op, &[0; 16]).unwrap();
            }
            let mut input = Bits::<set_roce_address_in, _>::new(vec![0; set_roce_address_in::SIZE]);
            let mut entry = input.sub_mut(set_roce_address_in::roce_address);
            entry.set_span(roce_addr_layout::source_l3_address, &gid(number));
            entry.set(roce_addr_layout::roce_version, 2);
            command(function, opcode::SET_ROCE_ADDRESS, &input.into_inner()).unwrap();
        }
        Self { fabric, now: 0 }
    }

    fn pages(&mut self, number: usize, count: usize) -> Pages {
        let page = || Page(std::array::from_fn(|_| AtomicU64::new(0)));
        let pages = Pages((0..count).map(|_| page()).collect());
        let memory = self.fabric.function(number).memory_mut();
        // SAFETY: the host keeps pages until the end of the test, and all accesses are atomic.
        unsafe { memory.pin(pages.address(), pages.len(), true) }.unwrap();
        pages
    }

    /// An end of a connection, in state RESET.
    fn end(&mut self, number: usize) -> End {
        let pages = self.pages(number, DATA / 4096 + DATA_PAGES);
        let function = self.fabric.function(number);
        let out = command(function, opcode::ALLOC_UAR, &[0; 16]).unwrap();
        let uar = Bits::<alloc_uar_out, _>::new(out).get32(alloc_uar_out::uar);
        let out = command(function, opcode::ALLOC_PD, &[0; 16]).unwrap();
        let pd = Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd);
        let kinds = [event::CQ_ERROR, event::WQ_CATASTROPHIC, event::PORT_CHANGE];
        let eqn = function.create_event_queue(&kinds).unwrap();

        pages.set_half(CQ_RECORD + 4, NO_ARM_WORD);
        pages.write(CQES, &[0xf1; 4096]);
        let mut input = Bits::<create_cq_in, _>::new(vec![0; create_cq_in::SIZE]);
        let mut context = input.sub_mut(create_cq_in::cq_context);
        context.set(cqc::log_cq_size, 5);
        context.set(cqc::uar_page, uar.into());
        context.set(cqc::c_eqn_or_apu_element, eqn.into());
        context.set(cqc::dbr_addr, pages.address() + CQ_RECORD as u64);
        let mut input = input.into_inner();
        input.extend((pages.address() + CQES as u64).to_be_bytes());
        let out = command(function, opcode::CREATE_CQ, &input).unwrap();
        let cqn = Bits::<create_cq_out, _>::new(out).get32(create_cq_out::cqn);

        let mut input = Bits::<create_qp_in, _>::new(vec![0; create_qp_in::SIZE]);
        let mut context = input.sub_mut(create_qp_in::qpc);
        for (field, value) in [
            (qpc::pd, pd.into()),
            (qpc::log_rq_size, 4),
            (qpc::log_sq_size, 4),
            (qpc::uar_page, uar.into()),
            (qpc::cqn_snd, cqn.into()),
            (qpc::cqn_rcv, cqn.into()),
            (qpc::dbr_addr, pages.address() + RECORDS as u64),
        ] {
            context.set(field, value);
        }
        let mut input = input.into_inner();
        input.extend(pages.address().to_be_bytes());
        let out = command(function, opcode::CREATE_QP, &input).unwrap();
        let qpn = Bits::<create_qp_out, _>::new(out).get32(create_qp_out::qpn);

        // The data pages, in pages of 4 KiB.
        let octowords = DATA_PAGES.div_ceil(2) as u64;
        let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
        input.set(create_mkey_in::translations_octword_actual_size, octowords);
        let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
        for right in [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a] {
            context.set(right, 1);
        }
        for (field, value) in [
            (mkc::access_mode_1_0, 1),
            (mkc::qpn, 0xff_ffff),
            (mkc::pd, pd.into()),
            (mkc::start_addr, pages.address() + DATA as u64),
            (mkc::len, DATA_PAGES as u64 * 4096),
            (mkc::log_page_size, 12),
            (mkc::translations_octword_size, octowords),
        ] {
            context.set(field, value);
        }
        let mut input = input.into_inner();
        input.extend(&pages.list()[DATA / 4096 * 8..]);
        input.resize(create_mkey_in::SIZE + octowords as usize * 16, 0);
        let out = command(function, opcode::CREATE_MKEY, &input).unwrap();
        let key = Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index) << 8;
        End { number, uar, pd, qpn, cqn, eqn, key, pages, posted: 0, received: 0 }
    }

    fn connect(&mut self, end: &End, peer: &End) {
        let steps = [
            (opcode::RST2INIT_QP, vec![(qpc::rre, 1), (qpc::rwe, 1), (qpc::rae, 1)]),
            (opcode::INIT2RTR_QP, vec![(qpc::mtu, 3), (qpc::min_rnr_nak, 12)]),
            (opcode::RTR2RTS_QP, vec![(qpc::retry_count, 3), (qpc::rnr_retry, 2)]),
        ];
        for (op, fields) in steps {
            let mut input = Bits::<rst2init_qp_in, _>::new(vec![0; rst2init_qp_in::SIZE]);
            input.set(rst2init_qp_in::qpn, end.qpn.into());
            let mut context = input.sub_mut(rst2init_qp_in::qpc);
            context.set(qpc::remote_qpn, peer.qpn.into());
            for (field, value) in fields {
                context.set(field, value);
            }
            let mut path = context.sub_mut(qpc::primary_address_path);
            path.set_span(ads::rgid_rip, &gid(peer.number));
            path.set(ads::ack_timeout, 14);
            command(self.fabric.function(end.number), op, &input.into_inner()).unwrap();
        }
    }

    /// Two connected ends, on two functions.
    fn pair(&mut self) -> (End, End) {
        let (a, b) = (self.end(0), self.end(1));
        self.connect(&a, &b);
        self.connect(&b, &a);
        (a, b)
    }

    /// Runs until there is nothing to do at this time.
    fn run(&mut self) -> Progress {
        loop {
            let progress = self.fabric.run(self.now);
            if !progress.more {
                return progress;
            }
        }
    }

    fn ring(&mut self, end: &End, wqe: &[u8]) {
        self.fabric.function(end.number).ring(end.uar, SEND, wqe);
    }

    fn events(&mut self, number: usize) -> Vec<Event> {
        std::iter::from_fn(|| self.fabric.function(number).next_event()).collect()
    }
}

impl End {
    fn segment(&self, at: usize, len: u32) -> Vec<u8> {
        let address = self.pages.address() + (DATA + at) as u64;
        [&len.to_be_bytes()[..], &self.key.to_be_bytes(), &address.to_be_bytes()].concat()
    }

    fn remote(&self, at: usize) -> Vec<u8> {
        let address = self.pages.address() + (DATA + at) as u64;
        [&address.to_be_bytes()[..], &self.key.to_be_bytes(), &[0; 4]].concat()
    }

    fn post_receive(&mut self, at: usize, len: u32) {
        self.pages.write(self.received as usize % 16 * 16, &self.segment(at, len));
        self.received += 1;
        self.pages.set_half(RECORDS, self.received);
    }

    /// Posts a signaled WQE of one WQEBB and writes the doorbell record. Returns the WQE.
    fn post_send(&mut self, op: u8, segments: &[u8]) -> Vec<u8> {
        let units = 1 + segments.len() as u32 / 16;
        let mut wqe = (u32::from(self.posted) << 8 | u32::from(op)).to_be_bytes().to_vec();
        wqe.extend((self.qpn << 8 | units).to_be_bytes());
        wqe.extend([0, 0, 0, 8, 0, 0, 0, 0]);
        wqe.extend(segments);
        wqe.resize(64, 0);
        self.pages.write(256 + usize::from(self.posted) % 16 * 64, &wqe);
        self.posted += 1;
        self.pages.set_half(RECORDS + 4, self.posted.into());
        wqe
    }

    /// CQE `index`: its opcode, and its syndrome if it is of an error.
    fn cqe(&self, index: usize) -> (u8, u8) {
        let cqe = self.pages.read(CQES + index * 64, 64);
        let code = cqe[63] >> 4;
        (code, if matches!(code, code::REQUEST_ERROR | code::RECEIVE_ERROR) { cqe[55] } else { 0 })
    }

    fn data(&self, at: usize, len: usize) -> Vec<u8> {
        self.pages.read(DATA + at, len)
    }
}

#[test]
fn functions_and_fabrics_move_between_threads() {
    fn sent<T: Send>() {}
    sent::<Fabric>();
    sent::<Function>();
}

#[test]
fn messages_pass_between_functions_at_process_addresses() {
    let mut host = Host::new(2);
    let (mut a, mut b) = host.pair();
    // Across three pages, and long enough to be copied at once.
    let text: Vec<u8> = (0..9000u32).map(|n| (n / 3) as u8).collect();
    a.pages.write(DATA + 16, &text);
    let segments = [b.remote(24), a.segment(16, 9000)].concat();
    let wqe = a.post_send(code::WRITE, &segments);
    host.ring(&a, &wqe[..8]);
    assert_eq!(a.cqe(0).0, code::NONE, "nothing happens before the run");
    assert_eq!(host.run(), Progress { worked: true, more: false, deadline: None });
    assert_eq!(a.cqe(0), (code::REQUEST, 0));
    assert_eq!(b.data(24, 9000), text);
    assert_eq!((b.data(0, 24), b.data(9024, 64)), (vec![0; 24], vec![0; 64]));

    b.post_receive(0, 64);
    let wqe = a.post_send(code::SEND, &a.segment(16, 40));
    host.ring(&a, &wqe[..8]);
    host.run();
    assert_eq!((a.cqe(1), b.cqe(0)), ((code::REQUEST, 0), (code::RECEIVED, 0)));
    assert_eq!(b.data(0, 40), text[..40]);
    let progress = host.run();
    assert!(!progress.worked, "there is nothing left to do");
    for number in 0..2 {
        let errors = host.fabric.function(number).device().doorbell_errors();
        assert_eq!(errors, DoorbellErrors::default());
    }
}

#[test]
fn memory_that_is_not_pinned_is_a_protection_error() {
    let mut host = Host::new(2);
    let (mut a, b) = host.pair();
    let (address, len) = (a.pages.address(), a.pages.len());
    let memory = host.fabric.function(0).memory_mut();
    // All but the second data page.
    let gap = address + (DATA + 4096) as u64;
    // SAFETY: the pages live until the end of the test, and all accesses are atomic.
    unsafe { memory.pin(address, gap - address, true) }.unwrap();
    memory.unpin(address, len, true).unwrap();
    let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 4096)].concat());
    host.ring(&a, &wqe[..8]);
    host.run();
    assert_eq!(a.cqe(0), (code::REQUEST, 0));
    let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 4097)].concat());
    host.ring(&a, &wqe[..8]);
    host.run();
    assert_eq!(a.cqe(1), (code::REQUEST_ERROR, LOCAL_PROTECTION));
}

#[test]
fn events_are_values_and_an_interrupt_is_a_call() {
    let mut host = Host::new(2);
    let (mut a, b) = host.pair();
    let send = |host: &mut Host, a: &mut End| {
        let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
        host.ring(a, &wqe[..8]);
        host.run();
    };
    send(&mut host, &mut a);
    assert_eq!(host.events(0), [], "the CQ is not armed");
    // Armed by its doorbell, for the CQE that is there.
    a.pages.set_half(CQ_RECORD + 4, 0);
    let doorbell = [[0; 4], a.cqn.to_be_bytes()].concat();
    host.fabric.function(0).ring(a.uar, CQ, &doorbell);
    assert!(!host.fabric.function(0).arm_from_record(a.cqn), "its doorbell came");
    let [event] = host.events(0)[..] else { panic!("one event") };
    assert_eq!((event.eqn, event.kind), (a.eqn, event::COMPLETION));
    assert_eq!(event.subject(), Subject::Cq(a.cqn));
    host.fabric.function(0).device_mut().set_link(false);
    let [event] = host.events(0)[..] else { panic!("one event") };
    assert_eq!((event.kind, event.subject()), (event::PORT_CHANGE, Subject::Port(1)));
    // The same event in an EQ in memory raises an interrupt.
    let eq = host.pages(0, 1);
    let mut input = Bits::<create_eq_in, _>::new(vec![0; create_eq_in::SIZE]);
    let mut context = input.sub_mut(create_eq_in::eq_context_entry);
    context.set(eqc::log_eq_size, 6);
    context.set(eqc::intr, VECTORS as u64 - 1);
    context.set(eqc::uar_page, a.uar.into());
    let mask: u64 = 1 << event::PORT_CHANGE;
    input.set_span(create_eq_in::event_bitmask, &mask.to_be_bytes());
    let mut input = input.into_inner();
    input.extend(eq.address().to_be_bytes());
    let out = command(host.fabric.function(0), opcode::CREATE_EQ, &input).unwrap();
    let eqn = Bits::<create_eq_out, _>::new(out).get32(create_eq_out::eq_number);
    let raised = Arc::new(AtomicU64::new(0));
    let count = raised.clone();
    let notify = Box::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let function = host.fabric.function(0);
    function.interrupts_mut().connect(VECTORS - 1, Some(notify));
    function.ring(a.uar, 0x40, &(eqn << 24).to_be_bytes());
    function.device_mut().set_link(true);
    assert_eq!((raised.load(Ordering::Relaxed), eq.read(0, 2)[1]), (1, event::PORT_CHANGE));
    assert_eq!(host.events(0).len(), 1, "the other EQ has it, too");
}

#[test]
fn an_event_queue_of_values_is_held_and_destroyed_as_any_other() {
    let mut host = Host::new(1);
    let a = host.end(0);
    let mut input = [0; 16];
    input[11] = a.eqn as u8;
    let function = host.fabric.function(0);
    let refused = command(function, opcode::DESTROY_EQ, &input);
    assert_eq!(refused, Err(CommandStatus::ResourceBusy as u8));
    command(function, opcode::TEARDOWN_HCA, &[0; 16]).unwrap();
    command(function, opcode::INIT_HCA, &[0; 16]).unwrap();
    let eqn = function.create_event_queue(&[]).unwrap();
    input[11] = eqn as u8;
    command(function, opcode::QUERY_EQ, &input).unwrap();
    command(function, opcode::DESTROY_EQ, &input).unwrap();
    assert!(command(function, opcode::DESTROY_EQ, &input).is_err());
}

#[test]
fn doorbell_records_alone_ring_and_arm() {
    let mut host = Host::new(2);
    let (mut a, b) = host.pair();
    assert!(!host.fabric.function(0).ring_to_record(a.qpn), "nothing is posted");
    assert!(!host.fabric.function(0).arm_from_record(a.cqn));
    for _ in 0..2 {
        a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
    }
    assert!(!host.run().worked, "no doorbell came");
    assert!(host.fabric.function(0).ring_to_record(a.qpn));
    assert!(!host.fabric.function(0).ring_to_record(a.qpn), "it is rung");
    host.run();
    assert_eq!([a.cqe(0).0, a.cqe(1).0, a.cqe(2).0], [code::REQUEST, code::REQUEST, code::NONE]);
    assert!(!host.fabric.function(0).ring_to_record(a.qpn));
    // The first arm word of a program is that of a fresh record.
    a.pages.set_half(CQ_RECORD + 4, 0);
    assert!(host.fabric.function(0).arm_from_record(a.cqn));
    assert!(!host.fabric.function(0).arm_from_record(a.cqn));
    assert_eq!(host.events(0).len(), 1);
    // A record that is out of range is the queue's error, once.
    a.pages.set_half(RECORDS + 4, 100);
    assert!(host.fabric.function(0).ring_to_record(a.qpn));
    host.run();
    assert!(!host.fabric.function(0).ring_to_record(a.qpn));
    let errors = host.events(0);
    assert!(errors.iter().any(|event| event.subject() == Subject::Qp(a.qpn)), "{errors:?}");
    assert!(!host.fabric.function(0).ring_to_record(77), "no such queue");
}

#[test]
fn a_blueflame_copy_comes_whole() {
    let mut host = Host::new(2);
    let (mut a, b) = host.pair();
    let errors = |host: &mut Host| host.fabric.function(0).device().doorbell_errors();
    let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
    host.ring(&a, &wqe);
    host.run();
    assert_eq!((a.cqe(0), errors(&mut host)), ((code::REQUEST, 0), DoorbellErrors::default()));
    // The copy is executed, and compared with the WQE in memory.
    a.pages.write(DATA, &[5; 8]);
    let mut wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
    wqe[23] += 64;
    host.ring(&a, &wqe);
    host.run();
    assert_eq!((b.data(64, 8), errors(&mut host).differs), (vec![5; 8], 1));
    // Half of one is torn, and rings.
    let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
    host.ring(&a, &wqe[..24]);
    host.run();
    assert_eq!((a.cqe(2).0, errors(&mut host).torn), (code::REQUEST, 1));
    let function = host.fabric.function(0);
    function.ring(a.uar, SEND + 8, &wqe[..8]);
    function.ring(1, SEND, &wqe[..8]);
    function.ring(a.uar, 5000, &wqe[..8]);
    assert_eq!(errors(&mut host).stray, 1, "only a UAR page has doorbells");
}

#[test]
fn rnr_and_lost_messages_wait_in_virtual_time() {
    let mut host = Host::new(2);
    let (mut a, mut b) = host.pair();
    let wqe = a.post_send(code::SEND, &a.segment(0, 8));
    host.ring(&a, &wqe[..8]);
    // RNR timer 12 is 0.64 milliseconds.
    let progress = host.run();
    assert_eq!((progress.deadline, a.cqe(0).0), (Some(640_000), code::NONE));
    host.now = 639_999;
    assert!(!host.run().worked);
    b.post_receive(0, 8);
    host.now = 640_000;
    let progress = host.run();
    assert!(progress.worked && progress.deadline.is_none(), "{progress:?}");
    assert_eq!((a.cqe(0).0, b.cqe(0).0), (code::REQUEST, code::RECEIVED));

    host.fabric.function(0).device_mut().faults_mut().lose_messages(100);
    let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
    host.ring(&a, &wqe[..8]);
    let mut timeouts = 0;
    loop {
        let progress = host.run();
        if a.cqe(1).0 != code::NONE {
            break;
        }
        let due = progress.deadline.expect("a timeout is due");
        assert_eq!(due - host.now, 4096 << 14);
        host.now = due;
        timeouts += 1;
    }
    // Three retries and the timeout of the last one, far longer than this test takes.
    assert_eq!((a.cqe(1), timeouts), ((code::REQUEST_ERROR, 0x15), 4));
}

#[test]
fn a_thing_is_done_for_as_many_messages_as_the_caller_says() {
    for messages in [1, 2] {
        let mut host = Host::new(2);
        let (mut a, b) = host.pair();
        host.run();
        a.pages.write(DATA, &[1; 8]);
        for at in [8, 16, 24] {
            let wqe = a.post_send(code::WRITE, &[b.remote(at), a.segment(0, 8)].concat());
            host.ring(&a, &wqe[..8]);
        }
        assert!(!host.fabric.start_turn(host.now), "no timer is due");
        let mut run = |before| {
            let thing = host.fabric.find_ready(before).expect("there is something to do");
            assert!(host.fabric.run_thing(thing, messages));
            host.fabric.ready()
        };
        // WQEs are fetched, and the queue has a third one. Then the packets leave, and arrive.
        assert_eq!(run(0), 2);
        assert_eq!(run(1), 1 + messages);
        run(1);
        let written = [8, 16, 24].map(|at| b.data(at, 8) == [1; 8]);
        assert_eq!(written, [true, messages == 2, false]);
    }
}

#[test]
fn the_caller_may_decide_which_queue_is_served() {
    for order in [[0, 1], [1, 0]] {
        let mut host = Host::new(2);
        let (mut a, mut b) = host.pair();
        host.run();
        a.pages.write(DATA, &[1; 8]);
        b.pages.write(DATA, &[2; 8]);
        let target = [b.remote(8), a.segment(0, 8)].concat();
        let wqe = a.post_send(code::WRITE, &target);
        host.ring(&a, &wqe[..8]);
        // The other end reads what the first one writes there.
        let wqe = b.post_send(code::WRITE, &[a.remote(64), b.segment(8, 8)].concat());
        host.ring(&b, &wqe[..8]);
        assert!(!host.fabric.start_turn(host.now), "no timer is due");
        assert_eq!(host.fabric.ready(), 2);
        let functions =
            [0, 1, 2].map(|before| host.fabric.find_ready(before).map(|thing| thing.function()));
        assert_eq!(functions, [Some(0), Some(1), None]);
        // The WQE is fetched, its packet leaves, and arrives: all before the other queue is served.
        while host.fabric.ready() > 1 {
            let ready = 0..host.fabric.ready();
            let fabric = &host.fabric;
            let mut things = ready.filter_map(|at| fabric.find_ready(at));
            let Some(next) = things.find(|thing| thing.function() == order[0]) else { break };
            host.fabric.run_thing(next, 1);
        }
        assert_eq!(b.data(8, 8), if order[0] == 0 { [1; 8] } else { [0; 8] });
        host.run();
        assert_eq!(a.data(64, 8), if order[0] == 0 { [1; 8] } else { [0; 8] });
        assert_eq!(host.fabric.ready(), 0);
        assert!(!host.fabric.run_ready(0) && !host.fabric.run_ready(9));
    }
}

#[test]
fn device_memory_has_an_address_in_the_process() {
    let mut host = Host::new(2);
    let (mut a, b) = host.pair();
    let function = host.fabric.function(1);
    let mut input = Bits::<alloc_memic_in, _>::new(vec![0; alloc_memic_in::SIZE]);
    input.set(alloc_memic_in::range_start_addr, uverbs_connectx::bar0::MEMIC_OFFSET);
    input.set(alloc_memic_in::range_size, 4096);
    input.set(alloc_memic_in::memic_size, 4096);
    let out = command(function, opcode::ALLOC_MEMIC, &input.into_inner()).unwrap();
    let offset = Bits::<alloc_memic_out, _>::new(out).get(alloc_memic_out::memic_start_addr);
    let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
    let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
    for (field, value) in [
        (mkc::access_mode_1_0, 1),
        (mkc::access_mode_4_2, 1),
        (mkc::qpn, 0xff_ffff),
        (mkc::pd, b.pd.into()),
        (mkc::start_addr, offset),
        (mkc::len, 4096),
        (mkc::lr, 1),
        (mkc::rw, 1),
    ] {
        context.set(field, value);
    }
    let out = command(function, opcode::CREATE_MKEY, &input.into_inner()).unwrap();
    let key = Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index) << 8;
    a.pages.write(DATA, &[3; 16]);
    let remote = [&16u64.to_be_bytes()[..], &key.to_be_bytes(), &[0; 4]].concat();
    let wqe = a.post_send(code::WRITE, &[remote, a.segment(0, 16)].concat());
    host.ring(&a, &wqe[..8]);
    host.run();
    assert_eq!(a.cqe(0), (code::REQUEST, 0));
    let address = host.fabric.function(1).bar_address(offset + 16, 16).unwrap();
    // SAFETY: the memory lives as long as the function, and no run of the device is under way.
    let bytes = unsafe { address.cast::<[u8; 16]>().read() };
    assert_eq!(bytes, [3; 16]);
    assert!(host.fabric.function(1).bar_address(0, 8).is_none(), "registers are no memory");
}

#[test]
fn commands_are_refused_silenced_and_ignored_as_by_the_queue() {
    let mut host = Host::new(1);
    let function = host.fabric.function(0);
    let mut input = [0; 16];
    input[..2].copy_from_slice(&opcode::DEALLOC_PD.to_be_bytes());
    let output = function.command(&input, 16).unwrap();
    assert_eq!((output.len(), output[0]), (16, CommandStatus::BadResource as u8));
    assert_ne!(output[4..8], [0; 4], "a syndrome");
    for short in [&[][..], &[5], &opcode::CREATE_QP.to_be_bytes()] {
        assert_ne!(function.command(short, 16).unwrap()[0], 0, "{short:?}");
    }
    let op = opcode::ALLOC_PD;
    function.device_mut().faults_mut().fail_command(op, 0, CommandFailure::Silence);
    input[..2].copy_from_slice(&op.to_be_bytes());
    assert_eq!(function.command(&input, 16), None);
    assert_eq!(function.command(&input, 16).unwrap()[0], 0);
    function.remove();
    assert_eq!(function.command(&input, 16), None);
    assert!(!function.ring_to_record(1) && !function.arm_from_record(1));
    function.insert();
    assert_eq!(function.command(&input, 16), None, "no bus mastering yet");
    function.enable_bus_master();
    let refused = function.command(&input, 16).unwrap();
    assert_eq!(refused[0], CommandStatus::BadSystemState as u8, "no INIT_HCA yet");
}

/// A thread runs the device while another one posts and polls.
#[test]
fn a_thread_may_run_the_device() {
    let mut host = Host::new(2);
    let (mut a, b) = host.pair();
    let (uar, rounds) = (a.uar, if cfg!(miri) { 4 } else { 1000 });
    let fabric = Mutex::new(host.fabric);
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while done.load(Ordering::Acquire) == 0 {
                fabric.lock().unwrap().run(0);
                std::thread::yield_now();
            }
        });
        for round in 0..rounds {
            a.pages.write(DATA, &[round as u8; 8]);
            let wqe = a.post_send(code::WRITE, &[b.remote(0), a.segment(0, 8)].concat());
            fabric.lock().unwrap().function(0).ring(uar, SEND, &wqe[..8]);
            // CQE `round` has the parity of its pass through the queue as owner bit.
            let at = CQES + round % 32 * 64 + 56;
            let there = |word: u64| {
                let last = word.to_ne_bytes()[7];
                last >> 4 == code::REQUEST && usize::from(last & 1) == round / 32 % 2
            };
            while !there(a.pages.word(at).load(Ordering::Acquire)) {
                std::thread::yield_now();
            }
            a.pages.set_half(CQ_RECORD, round as u32 + 1);
            assert_eq!(b.data(0, 8), [round as u8; 8]);
        }
        done.store(1, Ordering::Release);
    });
}
