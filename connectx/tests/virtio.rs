//! Virtio network queues in plain memory: frames from one to another.

mod driver;

use driver::Driver;
use uverbs_connectx::bar0::VAR_OFFSET;
use uverbs_connectx::function::Region;
use uverbs_uapi::mlx5::prm::flow::{dest_format, flow_context, set_fte_in};
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::object::{
    create_umem_in, create_umem_out, general_obj_in_cmd_hdr as header, general_obj_out_cmd_hdr,
    umem,
};
use uverbs_uapi::mlx5::prm::rqc::{
    create_rqt_in, create_rqt_out, create_tir_in, create_tir_out, rqtc, tirc,
};
use uverbs_uapi::mlx5::prm::virtio::{
    LIST_Q_TYPE_VIRTIO_NET_Q, MODIFY_STATE, OBJ_TYPE_VIRTIO_NET_Q, create_virtio_net_q_in,
    modify_virtio_net_q_in, query_virtio_net_q_out, state, virtio_net_q_object as object, virtio_q,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

const RESOURCE_BUSY: u8 = 0x6;
const ENTRIES: u64 = 4;
/// Enough for a queue of 4,096 entries.
const UMEM_BYTES: u64 = 129 * 4096;
/// Parts of a queue's page: descriptors, available ring, used ring, buffers.
const AVAILABLE: u64 = 0x100;
const USED: u64 = 0x200;
const BUFFERS: u64 = 0x400;
const HEADER: usize = 12;
const WRITE: u16 = 2;
const NEXT: u16 = 1;

struct Queues {
    driver: Driver,
    key: u32,
    /// Transport domains, so that frames come back to the function that sends them.
    tis: u32,
    umem: u32,
}

/// A virtqueue, and the page with its rings.
#[derive(Clone, Copy)]
struct Virtq {
    number: u32,
    page: u64,
}

impl Queues {
    fn new() -> Self {
        let mut driver = Driver::new();
        let memory = driver::MEMORY as u64;
        let key = driver.mkey(0, memory, &[mkc::lr, mkc::lw]);
        let tis = driver.tis();
        let mut input = Bits::<create_umem_in, _>::new(vec![0; create_umem_in::SIZE]);
        input.sub_mut(create_umem_in::umem).set(umem::num_of_mtt, UMEM_BYTES / 4096);
        let mut input = input.into_inner();
        input.extend((0..UMEM_BYTES / 4096).flat_map(|page| (page * 4096).to_be_bytes()));
        let out = driver.run_command(opcode::CREATE_UMEM, &input).unwrap();
        let umem = Bits::<create_umem_out, _>::new(out).get32(create_umem_out::umem_id);
        Self { driver, key, tis, umem }
    }

    fn virtq(&mut self, index: u64) -> Virtq {
        let page = self.driver.alloc_page();
        self.virtq_of(index, ENTRIES, [page, page + AVAILABLE, page + USED])
    }

    /// A virtqueue with these descriptors, available ring and used ring.
    fn virtq_of(&mut self, index: u64, entries: u64, rings: [u64; 3]) -> Virtq {
        let [page, available, used] = rings;
        let mut input =
            Bits::<create_virtio_net_q_in, _>::new(vec![0; create_virtio_net_q_in::SIZE]);
        let mut about = input.sub_mut(create_virtio_net_q_in::general_obj_in_cmd_hdr);
        about.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
        let mut net = input.sub_mut(create_virtio_net_q_in::obj_context);
        net.set(object::tisn_or_qpn, self.tis.into());
        let mut queue = net.sub_mut(object::virtio_q_context);
        let size = 128 * entries + 4096;
        for (field, value) in [
            (virtio_q::virtio_version_1_0, 1),
            (virtio_q::queue_index, index),
            (virtio_q::queue_size, entries),
            (virtio_q::desc_addr, page),
            (virtio_q::available_addr, available),
            (virtio_q::used_addr, used),
            (virtio_q::virtio_q_mkey, self.key.into()),
            (virtio_q::pd, self.driver.pd.into()),
            (virtio_q::umem_1_id, self.umem.into()),
            (virtio_q::umem_1_size, size),
            (virtio_q::umem_2_id, self.umem.into()),
            (virtio_q::umem_2_size, size),
            (virtio_q::umem_3_id, self.umem.into()),
            (virtio_q::umem_3_size, size),
        ] {
            queue.set(field, value);
        }
        let out = self.driver.run_command(opcode::CREATE_GENERAL_OBJECT, &input.into_inner());
        let out = Bits::<general_obj_out_cmd_hdr, _>::new(out.unwrap());
        let virtq = Virtq { number: out.get32(general_obj_out_cmd_hdr::obj_id), page };
        let mut input =
            Bits::<modify_virtio_net_q_in, _>::new(vec![0; modify_virtio_net_q_in::SIZE]);
        let mut about = input.sub_mut(modify_virtio_net_q_in::general_obj_in_cmd_hdr);
        about.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
        about.set(header::obj_id, virtq.number.into());
        let mut net = input.sub_mut(modify_virtio_net_q_in::obj_context);
        net.set(object::modify_field_select, MODIFY_STATE);
        net.set(object::state, state::RDY);
        self.driver.run_command(opcode::MODIFY_GENERAL_OBJECT, &input.into_inner()).unwrap();
        virtq
    }

    /// Writes a descriptor.
    fn describe(&mut self, virtq: Virtq, at: u16, (place, len): (u64, usize), flags: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(virtq.page + BUFFERS + place).to_le_bytes());
        bytes[8..12].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&(at + 1).to_le_bytes());
        self.driver.memory().write(virtq.page + u64::from(at) * 16, &bytes).unwrap();
    }

    /// Makes the chain that begins with `head` available, as the `nth` one.
    fn offer(&mut self, virtq: Virtq, nth: u16, head: u16) {
        let at = virtq.page + AVAILABLE;
        let slot = at + 4 + 2 * ((u64::from(nth) - 1) % ENTRIES);
        self.driver.memory().write(slot, &head.to_le_bytes()).unwrap();
        self.driver.memory().write(at + 2, &nth.to_le_bytes()).unwrap();
    }

    fn ring(&mut self, index: u16) {
        let function = self.driver.fabric.function(0);
        function.write(Region::Bar0, VAR_OFFSET + 7 * 4096, &index.to_le_bytes());
        self.driver.run_now();
    }

    /// Index of the used ring, and its first element.
    fn used(&mut self, virtq: Virtq) -> (u16, u32, u32) {
        let mut bytes = [0; 12];
        self.driver.memory().read(virtq.page + USED, &mut bytes).unwrap();
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        (u16::from_le_bytes([bytes[2], bytes[3]]), word(4), word(8))
    }

    /// Runs a command that has nothing but the queue's header.
    fn run(&mut self, op: u16, virtq: Virtq) -> Result<Vec<u8>, driver::CommandError> {
        let mut input = Bits::<header, _>::new(vec![0; 16]);
        input.set(header::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
        input.set(header::obj_id, virtq.number.into());
        self.driver.run_command(op, &input.into_inner())
    }

    fn state(&mut self, virtq: Virtq) -> u64 {
        let out = self.run(opcode::QUERY_GENERAL_OBJECT, virtq);
        let out = Bits::<query_virtio_net_q_out, _>::new(out.unwrap());
        out.sub(query_virtio_net_q_out::obj_context).get(object::state)
    }

    fn destroy(&mut self, virtq: Virtq) -> Result<Vec<u8>, driver::CommandError> {
        self.run(opcode::DESTROY_GENERAL_OBJECT, virtq)
    }

    /// Makes every frame go to a virtqueue.
    fn steer_all_to(&mut self, virtq: Virtq) {
        const INDIRECT: u64 = 1;
        const TO_TIR: u64 = 2;
        const FORWARD: u64 = 4;
        let driver = &mut self.driver;
        let mut input = Bits::<create_rqt_in, _>::new(vec![0; create_rqt_in::SIZE]);
        let mut context = input.sub_mut(create_rqt_in::rqt_context);
        context.set(rqtc::rqt_actual_size, 1);
        context.set(rqtc::list_q_type, LIST_Q_TYPE_VIRTIO_NET_Q);
        let mut input = input.into_inner();
        input.extend(virtq.number.to_be_bytes());
        let out = driver.run_command(opcode::CREATE_RQT, &input).unwrap();
        let rqt = Bits::<create_rqt_out, _>::new(out).get(create_rqt_out::rqtn);
        let mut input = Bits::<create_tir_in, _>::new(vec![0; create_tir_in::SIZE]);
        let mut context = input.sub_mut(create_tir_in::ctx);
        context.set(tirc::disp_type, INDIRECT);
        context.set(tirc::indirect_table, rqt);
        context.set(tirc::rx_hash_fn, 1);
        let out = driver.run_command(opcode::CREATE_TIR, &input.into_inner()).unwrap();
        let tirn = Bits::<create_tir_out, _>::new(out).get(create_tir_out::tirn);
        let table = driver.flow_table();
        let mut input = Bits::<set_fte_in, _>::new(vec![0; set_fte_in::SIZE]);
        input.set(set_fte_in::table_id, table);
        let mut context = input.sub_mut(set_fte_in::flow_context);
        context.set(flow_context::action, FORWARD);
        context.set(flow_context::destination_list_size, 1);
        let mut to = Bits::<dest_format, _>::new(vec![0; 8]);
        to.set(dest_format::destination_type, TO_TIR);
        to.set(dest_format::destination_id, tirn);
        let mut input = input.into_inner();
        input.extend(to.into_inner());
        driver.run_command(opcode::SET_FLOW_TABLE_ENTRY, &input).unwrap();
        driver.set_flow_root(table);
    }
}

#[test]
fn a_frame_goes_from_one_virtqueue_to_another() {
    let mut queues = Queues::new();
    let (receives, sends) = (queues.virtq(0), queues.virtq(1));
    queues.steer_all_to(receives);
    assert_eq!(queues.destroy(receives).unwrap_err().0, RESOURCE_BUSY, "an RQT names it");
    // A frame in two pieces, behind its header, to a buffer of two pieces.
    let frame: Vec<u8> = [&[0xff; 12][..], &[7; 60]].concat();
    let driver = &mut queues.driver;
    driver.memory().write(sends.page + BUFFERS + HEADER as u64, &frame).unwrap();
    queues.describe(sends, 0, (0, 40), NEXT);
    queues.describe(sends, 1, (40, HEADER + frame.len() - 40), 0);
    queues.describe(receives, 2, (0, 30), NEXT | WRITE);
    queues.describe(receives, 3, (100, 200), WRITE);
    queues.offer(sends, 1, 0);
    // Without a buffer the frame is dropped, and nothing is wrong.
    queues.ring(1);
    assert_eq!((queues.used(sends), queues.used(receives).0), ((1, 0, 0), 0));
    queues.offer(receives, 1, 2);
    queues.offer(sends, 2, 0);
    queues.ring(1);
    assert_eq!(queues.used(sends).0, 2);
    assert_eq!(queues.used(receives), (1, 2, (HEADER + frame.len()) as u32));
    let (mut first, mut rest) = ([0; 30], [0; 54]);
    queues.driver.memory().read(receives.page + BUFFERS, &mut first).unwrap();
    queues.driver.memory().read(receives.page + BUFFERS + 100, &mut rest).unwrap();
    let header = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    assert_eq!([&first[..], &rest].concat(), [&header[..], &frame].concat());
}

/// A chain of descriptors, by its name.
type Chain = (&'static str, fn(&mut Queues, Virtq));

#[test]
fn chains_that_make_no_sense_move_a_virtqueue_to_error() {
    let chains: [Chain; 5] = [
        ("a circle", |queues, virtq| {
            (0..ENTRIES as u16).for_each(|at| queues.describe(virtq, at, (0, 8), NEXT));
        }),
        ("a buffer to write", |queues, virtq| queues.describe(virtq, 0, (0, 100), WRITE)),
        ("no header", |queues, virtq| queues.describe(virtq, 0, (0, HEADER - 1), 0)),
        ("too long a frame", |queues, virtq| queues.describe(virtq, 0, (0, 1 << 17), 0)),
        ("indirect descriptors", |queues, virtq| queues.describe(virtq, 0, (0, 64), 4)),
    ];
    for (name, describe) in chains {
        let mut queues = Queues::new();
        let virtq = queues.virtq(1);
        describe(&mut queues, virtq);
        queues.offer(virtq, 1, 0);
        queues.ring(1);
        assert_eq!((queues.state(virtq), queues.used(virtq).0), (state::ERR, 0), "{name}");
        queues.destroy(virtq).unwrap();
    }
    let mut queues = Queues::new();
    let virtq = queues.virtq(1);
    queues.offer(virtq, ENTRIES as u16 + 1, 0);
    queues.ring(1);
    assert_eq!(queues.state(virtq), state::ERR, "more chains than the ring has entries");
}

/// A chain that is too short for a frame stays, and the device reads all of it again for the next frame: other guests
/// would wait for as many descriptors as the ring has, for each frame that a peer sends.
#[test]
fn long_chains_end_a_poll_early() {
    const LONG: u16 = 1 << 12;
    const RING: u64 = 128;
    const FRAMES: u16 = 72;
    let mut queues = Queues::new();
    let rings = [0x8_0000, 0x9_0000, 0xa_0000];
    let receives = queues.virtq_of(0, LONG.into(), rings);
    let [descriptors, available, used] = rings.map(|ring| ring + 0x3_0000);
    let sends = queues.virtq_of(1, RING, [descriptors, available, used]);
    queues.steer_all_to(receives);
    // Descriptors of no bytes.
    for at in 0..LONG {
        let more = if at + 1 < LONG { NEXT } else { 0 };
        queues.describe(receives, at, (0, 0), WRITE | more);
    }
    let memory = queues.driver.memory();
    memory.write(rings[1] + 2, &1u16.to_le_bytes()).unwrap();
    // One frame, again and again.
    memory.write(descriptors + BUFFERS + HEADER as u64, &[0xff; 72]).unwrap();
    memory.write(available + 2, &FRAMES.to_le_bytes()).unwrap();
    queues.describe(sends, 0, (0, HEADER + 72), 0);
    let function = queues.driver.fabric.function(0);
    function.write(Region::Bar0, VAR_OFFSET, &1u16.to_le_bytes());
    let now = queues.driver.now();
    let mut sent = vec![];
    loop {
        let more = queues.driver.fabric.poll(now);
        let mut index = [0; 2];
        queues.driver.memory().read(used + 2, &mut index).unwrap();
        sent.push(u16::from_le_bytes(index));
        if !more {
            break;
        }
    }
    assert!((1..FRAMES).contains(&sent[0]), "{sent:?}");
    assert_eq!(sent.last(), Some(&FRAMES));
    assert_eq!([sends, receives].map(|virtq| queues.state(virtq)), [state::RDY; 2]);
}
