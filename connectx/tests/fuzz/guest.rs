//! A hostile guest: random commands, mailboxes, WQEs, doorbells and registers.
//!
//! The device must not crash, hang or access anything outside of guest memory, which `guest.rs`
//! reports as an error.

use arbitrary::{Arbitrary, Result, Unstructured};
use rustix::time::{ClockId, clock_gettime};
use uverbs_connectx::bar0::VAR_OFFSET;
use uverbs_connectx::function::Region;
use uverbs_connectx::options::Options;
use uverbs_connectx::recording::{Entry, MemoryFile, Recorder};
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, mkc};
use uverbs_uapi::mlx5::prm::object::{
    create_umem_in, create_umem_out, general_obj_in_cmd_hdr, general_obj_out_cmd_hdr, umem,
};
use uverbs_uapi::mlx5::prm::opcode::{self, OPCODES};
use uverbs_uapi::mlx5::prm::virtio::{
    MODIFY_STATE, OBJ_TYPE_VIRTIO_NET_Q, create_virtio_net_q_in, modify_virtio_net_q_in, state,
    virtio_net_q_object, virtio_q,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::corpus::Traits;
use crate::driver::{Driver, MEMORY, Queue};

/// Most seconds of processor time for one input: far more than the device needs, less than a human
/// waits.
const PATIENCE: i64 = 5;

/// Processor time of this thread in seconds. A device that hangs uses it up, also on a busy
/// machine.
fn worked() -> i64 {
    clock_gettime(ClockId::ThreadCPUTime).tv_sec
}

/// `access_mode` of an mkey.
const PAGES: u64 = 1;
const KSM: u64 = 3;
const CROSSING: u64 = 6;
/// Entries of a virtqueue, and where its rings and buffers are: the descriptors first.
const ENTRIES: u64 = 16;
const AVAILABLE: u64 = 0x200;
const USED: u64 = 0x300;

struct Guest {
    driver: Driver,
    queues: Vec<Queue>,
    key: u32,
    uid: u32,
    /// The umem of queues, that of pages of 4 GiB, a list of parts of the key, another name for the list, and virtqueues.
    numbers: Vec<u32>,
    umems: [u32; 2],
    /// The page of each virtqueue, by index.
    virtqs: [u64; 2],
}

/// A guest with working objects, so that random input gets past the first checks.
fn guest() -> Guest {
    let mut driver = Driver::with(Options { data_direct: true, ..Options::default() });
    driver.set_gid();
    let eqn = driver.eq();
    let (cqn, _) = driver.cq(eqn);
    let mut queues: Vec<Queue> = (0..2).map(|_| driver.qp(0, cqn)).collect();
    let (a, b) = queues.split_at_mut(1);
    driver.connect(&a[0], &b[0]);
    driver.connect(&b[0], &a[0]);
    queues.push(driver.qp(2, cqn));
    let page = driver.alloc_page();
    let rights = [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a, mkc::umr_en];
    let key = driver.mkey(page, 4096, &rights);
    let uid = driver.create_uctx();
    let whole: Vec<u64> = (0..8).map(|page| page * 4096).collect();
    let umems = [umem_of(&mut driver, 0, &whole, 0), umem_of(&mut driver, uid, &[0; 64], 20)];
    let rights = rights.map(|right| (right, 1));
    let entry = Driver::segment(0, key, page);
    let fields = [(mkc::access_mode_1_0, KSM), (mkc::len, 4096), (mkc::log_page_size, 12)];
    let list = driver.mkey_with(&[&fields[..], &rights].concat(), &entry);
    let fields = [
        (mkc::access_mode_1_0, CROSSING & 3),
        (mkc::access_mode_4_2, CROSSING >> 2),
        (mkc::len, 4096),
        (mkc::translations_octword_size, list.into()),
    ];
    let name = driver.mkey_with(&[&fields[..], &rights].concat(), &[]);
    let tis = driver.tis();
    let memory = driver.mkey(0, MEMORY as u64, &[mkc::lr, mkc::lw]);
    let virtqs = [0, 1].map(|index| virtq(&mut driver, index, [memory, umems[0], tis]));
    let mut numbers = vec![umems[0], umems[1], list, name];
    numbers.extend(virtqs.map(|(number, _)| number));
    Guest { driver, queues, key, uid, numbers, umems, virtqs: virtqs.map(|(_, page)| page) }
}

/// A umem of pages of 2^(12 + `log`) bytes.
fn umem_of(driver: &mut Driver, uid: u32, pages: &[u64], log: u64) -> u32 {
    let mut input = Bits::<create_umem_in, _>::new(vec![0; create_umem_in::SIZE]);
    let mut context = input.sub_mut(create_umem_in::umem);
    context.set(umem::num_of_mtt, pages.len() as u64);
    context.set(umem::log_page_size, log);
    let mut input = input.into_inner();
    // The device may read and write each.
    input.extend(pages.iter().flat_map(|page| (page | 3).to_be_bytes()));
    let out = driver.run_command_as(uid, opcode::CREATE_UMEM, &input).unwrap();
    Bits::<create_umem_out, _>::new(out).get32(create_umem_out::umem_id)
}

/// A virtqueue that is served, with this key, umem and TIS: its number, and the page of its rings.
fn virtq(driver: &mut Driver, index: u64, [key, umem, tis]: [u32; 3]) -> (u32, u64) {
    let page = driver.alloc_page();
    let mut input = Bits::<create_virtio_net_q_in, _>::new(vec![0; create_virtio_net_q_in::SIZE]);
    let mut about = input.sub_mut(create_virtio_net_q_in::general_obj_in_cmd_hdr);
    about.set(general_obj_in_cmd_hdr::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    let mut net = input.sub_mut(create_virtio_net_q_in::obj_context);
    net.set(virtio_net_q_object::tisn_or_qpn, tis.into());
    let mut queue = net.sub_mut(virtio_net_q_object::virtio_q_context);
    for (field, value) in [
        (virtio_q::virtio_version_1_0, 1),
        (virtio_q::queue_index, index),
        (virtio_q::queue_size, ENTRIES),
        (virtio_q::desc_addr, page),
        (virtio_q::available_addr, page + AVAILABLE),
        (virtio_q::used_addr, page + USED),
        (virtio_q::virtio_q_mkey, key.into()),
        (virtio_q::pd, driver.pd.into()),
        (virtio_q::umem_1_id, umem.into()),
        (virtio_q::umem_2_id, umem.into()),
        (virtio_q::umem_3_id, umem.into()),
        (virtio_q::umem_1_size, 2 * 4096),
        (virtio_q::umem_2_size, 2 * 4096),
        (virtio_q::umem_3_size, 2 * 4096),
    ] {
        queue.set(field, value);
    }
    let out = driver.run_command(opcode::CREATE_GENERAL_OBJECT, &input.into_inner()).unwrap();
    let number =
        Bits::<general_obj_out_cmd_hdr, _>::new(out).get32(general_obj_out_cmd_hdr::obj_id);
    let mut input = Bits::<modify_virtio_net_q_in, _>::new(vec![0; modify_virtio_net_q_in::SIZE]);
    let mut about = input.sub_mut(modify_virtio_net_q_in::general_obj_in_cmd_hdr);
    about.set(general_obj_in_cmd_hdr::obj_type, OBJ_TYPE_VIRTIO_NET_Q.into());
    about.set(general_obj_in_cmd_hdr::obj_id, number.into());
    let mut net = input.sub_mut(modify_virtio_net_q_in::obj_context);
    net.set(virtio_net_q_object::modify_field_select, MODIFY_STATE);
    net.set(virtio_net_q_object::state, state::RDY);
    driver.run_command(opcode::MODIFY_GENERAL_OBJECT, &input.into_inner()).unwrap();
    (number, page)
}

/// A number that is valid more often than a random one.
fn word(u: &mut Unstructured<'_>, guest: &Guest) -> Result<u32> {
    Ok(match u.int_in_range(0..=10)? {
        0..=3 => 0,
        4 => u.int_in_range(0..=16)?,
        5 => guest.key,
        6 => guest.queues[u.choose_index(guest.queues.len())?].number,
        7 => u.int_in_range(0..=255)? << u.choose(&[12, 16, 24])?,
        8 => u32::MAX,
        9 => *u.choose(&guest.numbers)?,
        _ => u32::arbitrary(u)?,
    })
}

fn words(u: &mut Unstructured<'_>, guest: &Guest, most: usize) -> Result<Vec<u8>> {
    let count = u.int_in_range(0..=most)?;
    let mut bytes = Vec::new();
    for _ in 0..count {
        bytes.extend(word(u, guest)?.to_be_bytes());
    }
    Ok(bytes)
}

fn step(u: &mut Unstructured<'_>, guest: &mut Guest) -> Result<()> {
    match u.int_in_range(0..=13)? {
        13 => {
            // An mkey over a umem that is valid except for its sizes.
            let which = u.choose_index(guest.umems.len())?;
            let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
            input.set(create_mkey_in::mkey_umem_valid, 1);
            input.set(create_mkey_in::mkey_umem_id, guest.umems[which].into());
            input.set(create_mkey_in::mkey_umem_offset, u.int_in_range(0..=3)? << 12);
            let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
            let bits = u.int_in_range(0..=38)?;
            context.set(mkc::len, u64::arbitrary(u)? >> (63 - bits));
            context.set(mkc::free, 1);
            context.set(mkc::access_mode_1_0, PAGES);
            context.set(mkc::translations_octword_size, u.int_in_range(0..=4096)?);
            let uid = if which == 0 { 0 } else { guest.uid };
            let _ = guest.driver.run_command_as(uid, opcode::CREATE_MKEY, &input.into_inner());
        }
        12 => {
            // Chains of a virtqueue that are valid except for their addresses, lengths and flags.
            let index = u.choose_index(guest.virtqs.len())?;
            let page = guest.virtqs[index];
            for at in 0..ENTRIES {
                let mut descriptor = [0; 16];
                let place = u.int_in_range(0..=MEMORY as u64 / 8)? * 8;
                descriptor[..8].copy_from_slice(&place.to_le_bytes());
                let len = u32::arbitrary(u)? >> u.int_in_range(12..=31)?;
                descriptor[8..12].copy_from_slice(&len.to_le_bytes());
                // Receives are to be written.
                let flags = u16::from(u.ratio(1, 2)?) | u16::from(index == 0) << 1;
                descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
                let next = u.int_in_range(0..=ENTRIES as u16)?;
                descriptor[14..].copy_from_slice(&next.to_le_bytes());
                let _ = guest.driver.memory().write(page + at * 16, &descriptor);
            }
            let mut available = vec![0; 2];
            available.extend(u.int_in_range(0..=ENTRIES as u16 + 1)?.to_le_bytes());
            for _ in 0..ENTRIES {
                available.extend(u.int_in_range(0..=ENTRIES as u16)?.to_le_bytes());
            }
            let _ = guest.driver.memory().write(page + AVAILABLE, &available);
            let function = guest.driver.fabric.function(0);
            function.write(Region::Bar0, VAR_OFFSET, &(index as u16).to_le_bytes());
        }
        11 => {
            // A UMR WQE that is valid except for its numbers.
            let mut segments = vec![*u.choose(&[0x00, 0x80, 0x90, 0xa0, 0xc0])?, 0, 0, 0];
            for _ in 0..2 {
                segments.extend(u.int_in_range(0..=20u16)?.to_be_bytes());
            }
            let mask = u64::arbitrary(u)? & 0x8400_22be_61c3;
            segments.extend(mask.to_be_bytes());
            segments.resize(48, 0);
            segments.extend(words(u, guest, 16)?);
            segments.resize(48 + 64, 0);
            segments.extend(words(u, guest, 60)?);
            segments.truncate(segments.len() / 16 * 16);
            let key = guest.key;
            let peer = guest.queues[1].number;
            let _ = guest.driver.reconnect(&mut guest.queues[0], peer);
            guest.driver.post_send(&mut guest.queues[0], 37, key, &segments);
        }
        10 => {
            // A random slot: lengths, pointers, tokens.
            let mut slot = words(u, guest, 16)?;
            slot.resize(64, 0);
            slot[0] = *u.choose(&[7, 7, 7, 0])?;
            slot[61] = 0;
            slot[63] = 1;
            guest.driver.ring_slot(&slot);
        }
        0..=3 => {
            let (op, _) = *u.choose(OPCODES)?;
            let mut input = words(u, guest, 120)?;
            input.resize(input.len().max(16), 0);
            let uid = if u.ratio(1, 4)? { guest.uid } else { 0 };
            input[2..4].copy_from_slice(&(uid as u16).to_be_bytes());
            let room = u.int_in_range(16..=5000)?;
            input[..2].copy_from_slice(&op.to_be_bytes());
            // A refused command is as good as a successful one.
            let _ = guest.driver.run_raw_command(&input, room);
        }
        4 => {
            let at = u.int_in_range(0..=MEMORY as u64)?;
            let bytes = words(u, guest, 40)?;
            // The address may be past the end of memory.
            let _ = guest.driver.memory().write(at, &bytes);
        }
        5 | 6 => {
            let segments = words(u, guest, 60)?;
            let op = u.choose(&[0, 1, 8, 9, 10, 11, 14, 16, 17, 18, 20, 21, 27, 37, 99])?;
            let immediate = word(u, guest)?;
            let index = u.choose_index(guest.queues.len())?;
            // The first error breaks the connection; reconnect to test the next one.
            if index < 2 && u.ratio(3, 4)? {
                for (queue, peer) in [(0, 1), (1, 0)] {
                    let peer = guest.queues[peer].number;
                    // Another step may have destroyed it.
                    let _ = guest.driver.reconnect(&mut guest.queues[queue], peer);
                }
            }
            let len = segments.len() / 16 * 16;
            guest.driver.post_send(&mut guest.queues[index], *op, immediate, &segments[..len]);
        }
        7 => {
            let segment = Driver::segment(word(u, guest)?, guest.key, word(u, guest)?.into());
            let index = u.choose_index(guest.queues.len())?;
            guest.driver.post_receive(&mut guest.queues[index], &segment);
        }
        8 => {
            let offset = match u.ratio(1, 2)? {
                true => u64::from(guest.driver.uar) * 4096 + u.int_in_range(0..=0xfff)?,
                false => u.int_in_range(0..=(32 << 20) - 256)?,
            };
            let bytes = words(u, guest, 4)?;
            // Keep the address of the command queue, or the device would read no more commands.
            if !(0xc..0x18).contains(&offset) {
                guest.driver.fabric.function(0).write(Region::Bar0, offset, &bytes);
            }
        }
        _ => {
            let mut bytes = [0; 64];
            let offset = u.int_in_range(0..=(32 << 20) - 64)?;
            guest.driver.fabric.function(0).read(Region::Bar0, offset, &mut bytes);
        }
    }
    guest.driver.run();
    Ok(())
}

/// Runs one input to its end. The traits are the device's answers in its recording.
pub(crate) fn run(input: &[u8]) -> Traits {
    let mut guest = guest();
    let file = MemoryFile::default();
    *guest.driver.fabric.function(0).device_mut().recorder_mut() =
        Recorder::new(file.clone(), 0).unwrap();
    let mut u = Unstructured::new(input);
    let start = worked();
    while !u.is_empty() && step(&mut u, &mut guest).is_ok() {
        assert!(worked() - start <= PATIENCE, "the device hangs");
    }
    let mut traits = Traits::new();
    let mut opcode = 0;
    for (_, entry) in file.entries().unwrap() {
        let (kind, first, second) = match &entry {
            Entry::Command { input, .. } => {
                opcode = u32::from(input[0]) << 8 | u32::from(input[1]);
                continue;
            }
            Entry::CommandOutput { delivery, output, .. } if *delivery > 0 || output.is_empty() => {
                (0, u32::from(*delivery), 0)
            }
            // The syndrome tells one refusal from another.
            Entry::CommandOutput { output, .. } => {
                let syndrome = output[4..8].try_into().map_or(0, u32::from_be_bytes);
                (1, opcode, if output[0] == 0 { 0 } else { syndrome })
            }
            Entry::Wqe { service, blue_flame, bytes, .. } => {
                let first = u32::from(*service) << 8 | u32::from(*blue_flame);
                (2, first, u32::from(bytes[3]))
            }
            Entry::ReceiveWqe { bytes, .. } => (3, bytes.len() as u32, 0),
            Entry::Cqe { bytes, .. } => {
                let cqe = &bytes[bytes.len() - 64..];
                let failed = matches!(cqe[63] >> 4, 0xd | 0xe);
                let syndrome = if failed { cqe[55].into() } else { 0 };
                (4, u32::from(cqe[63] >> 4) << 8 | u32::from(cqe[56]), syndrome)
            }
            Entry::Eqe { bytes, .. } => (5, bytes[1].into(), 0),
            Entry::Write { .. } | Entry::DoorbellRecord { .. } | Entry::Reset => continue,
            Entry::Fate { late, .. } => (6, u32::from(late.is_some()), 0),
            Entry::Refusal { why, .. } => (7, *why as u32, 0),
            Entry::Packet { fate, .. } => (8, *fate as u32, 0),
        };
        traits.insert((kind, first, second));
    }
    traits
}
