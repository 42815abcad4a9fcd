//! A small driver: drives a device in plain memory, without QEMU or a kernel.

#![allow(dead_code, reason = "each test uses its own part")]

pub(crate) mod pair;

use std::fs::File;
use uverbs_connectx::fabric::Fabric;
use uverbs_connectx::function::Region;
use uverbs_connectx::guest::{GuestMemory, SharedMemory};
use uverbs_connectx::options::Options;
use uverbs_uapi::mlx5::prm::cmd::set_hca_cap_in;
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in, create_cq_out, modify_cq_in};
use uverbs_uapi::mlx5::prm::eqc::{create_eq_in, create_eq_out, eqc};
use uverbs_uapi::mlx5::prm::flow::{
    create_flow_group_in, create_flow_table_in, create_flow_table_out, flow_table_context,
    set_flow_table_root_in,
};
use uverbs_uapi::mlx5::prm::hca_cap::atomic_caps;
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, create_mkey_out, mkc};
use uverbs_uapi::mlx5::prm::object::{
    alloc_pd_out, alloc_transport_domain_out, alloc_uar_out, create_uctx_out,
};
use uverbs_uapi::mlx5::prm::qpc::{
    ads, create_qp_in, create_qp_out, qpc, rst2init_qp_in, rst2init_qp_out,
};
use uverbs_uapi::mlx5::prm::rqc::{create_tis_in, create_tis_out, tisc};
use uverbs_uapi::mlx5::prm::vport::{roce_addr_layout, set_roce_address_in};
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

pub(crate) const MEMORY: usize = 1 << 20;
const QUEUE: u64 = 0x1000;
const INPUT: u64 = 0x2000;
const OUTPUT: u64 = 0x6000;
/// The first address of queues; each has a page.
const FIRST_FREE: u64 = 0x2_0000;
const DATA_BLOCK: usize = 512;
pub(crate) const GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];

/// Event types: CQ error, QP error, invalid request, access error, last WQE reached.
const ERRORS: u64 = 1 << 0x04 | 1 << 0x05 | 1 << 0x10 | 1 << 0x11 | 1 << 0x13;

/// A queue as its user sees it.
pub(crate) struct Queue {
    pub(crate) number: u32,
    pub(crate) receives: u64,
    pub(crate) sends: u64,
    pub(crate) record: u64,
    posted: u16,
    received: u16,
}

impl Queue {
    /// A queue with its receives and sends at these addresses.
    pub(crate) fn new(number: u32, receives: u64, sends: u64, record: u64) -> Self {
        Self { number, receives, sends, record, posted: 0, received: 0 }
    }

    /// Counts WQEBBs as posted that do not exist.
    pub(crate) fn overstate_producer_index(&mut self, count: u16) {
        self.posted += count;
    }
}

/// A function and its driver.
pub(crate) struct Driver {
    pub(crate) fabric: Fabric,
    pub(crate) uar: u32,
    pub(crate) pd: u32,
    /// `ack_timeout` of queue pairs; 0 is never.
    pub(crate) ack_timeout: u64,
    /// Options of connections (ECE) that commands name, and the device's last answer to them.
    pub(crate) ece: u32,
    pub(crate) told_ece: u32,
    /// Remote GID of queue pairs.
    pub(crate) peer_gid: [u8; 16],
    /// Index of the RoCE address that queue pairs send from.
    pub(crate) source: u64,
    next: u64,
    now: u64,
}

/// The status and the syndrome of a refused command.
pub(crate) type CommandError = (u8, u32);

impl Driver {
    /// A function with a command queue, a UAR page and a PD.
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    /// The same, of other options.
    pub(crate) fn with(options: Options) -> Self {
        let mut fabric = Fabric::default();
        fabric.add(options);
        let function = fabric.function(0);
        *function.memory_mut() = GuestMemory::plain(0, MEMORY).unwrap();
        function.write(Region::Config, 4, &[6, 0]);
        function.write(Region::Bar0, 0x10, &0u32.to_be_bytes());
        function.write(Region::Bar0, 0x14, &(QUEUE as u32).to_be_bytes());
        let mut driver = Self {
            fabric,
            uar: 0,
            pd: 0,
            ack_timeout: 1,
            ece: 0,
            told_ece: 0,
            peer_gid: GID,
            source: 0,
            next: FIRST_FREE,
            now: 0,
        };
        for op in [opcode::ENABLE_HCA, opcode::INIT_HCA] {
            driver.run_command(op, &[0; 16]).unwrap();
        }
        driver.host_order_atomics(true);
        let out = driver.run_command(opcode::ALLOC_UAR, &[0; 16]).unwrap();
        driver.uar = Bits::<alloc_uar_out, _>::new(out).get32(alloc_uar_out::uar);
        let out = driver.run_command(opcode::ALLOC_PD, &[0; 16]).unwrap();
        driver.pd = Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd);
        driver
    }

    /// Chooses host order for old values of atomics, as drivers of little-endian hosts do.
    pub(crate) fn host_order_atomics(&mut self, on: bool) {
        /// The group of capabilities in `op_mod`.
        const ATOMIC: u16 = 3 << 1;
        let mut input = Bits::<set_hca_cap_in, _>::new(vec![0; 16 + 4096]);
        let mut caps = Bits::<atomic_caps, _>::new(vec![0; 4096]);
        caps.set(atomic_caps::atomic_req_8B_endianness_mode, on.into());
        input.set_span(set_hca_cap_in::capability, &caps.into_inner());
        let mut input = input.into_inner();
        input[6..8].copy_from_slice(&ATOMIC.to_be_bytes());
        self.run_command(opcode::SET_HCA_CAP, &input).unwrap();
    }

    pub(crate) fn memory(&mut self) -> &mut GuestMemory {
        self.fabric.function(0).memory_mut()
    }

    /// Moves the memory to a file, by which a test reaches it while the device runs.
    pub(crate) fn share_memory(&mut self) -> File {
        let mut bytes = vec![0; MEMORY];
        self.memory().read(0, &mut bytes).unwrap();
        let (file, memory) = SharedMemory::create("memory", MEMORY).unwrap();
        memory.write(0, &bytes).unwrap();
        *self.memory() = GuestMemory::default();
        self.memory().map(0, MEMORY as u64, Some((&file, 0)), true).unwrap();
        file
    }

    pub(crate) fn alloc_page(&mut self) -> u64 {
        self.next += 4096;
        self.next - 4096
    }

    /// The page that was allocated last.
    pub(crate) fn last_page(&self) -> u64 {
        self.next - 4096
    }

    /// Runs a command and fills in its opcode.
    pub(crate) fn run_command(&mut self, op: u16, input: &[u8]) -> Result<Vec<u8>, CommandError> {
        let mut input = input.to_vec();
        input[..2].copy_from_slice(&op.to_be_bytes());
        self.run_raw_command(&input, 4096)
    }

    /// Runs a command whose input is the number of one object.
    pub(crate) fn run_command_on(&mut self, op: u16, number: u32) -> Result<Vec<u8>, CommandError> {
        let mut input = [0; 16];
        input[8..12].copy_from_slice(&number.to_be_bytes());
        self.run_command(op, &input)
    }

    /// Runs a command in the first slot.
    pub(crate) fn run_raw_command(
        &mut self,
        input: &[u8],
        out_len: usize,
    ) -> Result<Vec<u8>, CommandError> {
        let (input_token, memory) = (7, self.memory());
        for (base, len) in [(INPUT, input.len()), (OUTPUT, out_len)] {
            let blocks = len.saturating_sub(16).div_ceil(DATA_BLOCK);
            for number in 0..blocks {
                let address = base + number as u64 * 1024;
                let mut block = [0; 576];
                if base == INPUT {
                    let from = 16 + number * DATA_BLOCK;
                    let part = &input[from..input.len().min(from + DATA_BLOCK)];
                    block[..part.len()].copy_from_slice(part);
                }
                block[560..568].copy_from_slice(&(address + 1024).to_be_bytes());
                block[568..572].copy_from_slice(&(number as u32).to_be_bytes());
                block[573] = input_token;
                memory.write(address, &block).unwrap();
            }
        }
        let mut slot = [0; 64];
        slot[0] = 7;
        slot[4..8].copy_from_slice(&(input.len() as u32).to_be_bytes());
        slot[8..16].copy_from_slice(&INPUT.to_be_bytes());
        let inline = input.len().min(16);
        slot[16..16 + inline].copy_from_slice(&input[..inline]);
        slot[48..56].copy_from_slice(&OUTPUT.to_be_bytes());
        slot[56..60].copy_from_slice(&(out_len as u32).to_be_bytes());
        slot[60] = input_token;
        slot[63] = 1;
        memory.write(QUEUE, &slot).unwrap();
        self.fabric.function(0).write(Region::Bar0, 0x18, &1u32.to_be_bytes());
        let memory = self.memory();
        memory.read(QUEUE, &mut slot).unwrap();
        assert_eq!(slot[63], 0, "delivery status");
        let mut output = slot[32..48].to_vec();
        for number in 0..out_len.saturating_sub(16).div_ceil(DATA_BLOCK) {
            let mut block = [0; DATA_BLOCK];
            memory.read(OUTPUT + number as u64 * 1024, &mut block).unwrap();
            output.extend(block);
        }
        output.truncate(out_len);
        match output[0] {
            0 => Ok(output),
            status => Err((status, u32::from_be_bytes(output[4..8].try_into().unwrap()))),
        }
    }

    /// Rings the doorbell for a slot with these bytes.
    pub(crate) fn ring_slot(&mut self, slot: &[u8]) {
        self.memory().write(QUEUE, slot).unwrap();
        self.fabric.function(0).write(Region::Bar0, 0x18, &1u32.to_be_bytes());
    }

    /// The first slot as it is now.
    pub(crate) fn slot_bytes(&mut self) -> [u8; 64] {
        let mut slot = [0; 64];
        self.memory().read(QUEUE, &mut slot).unwrap();
        slot
    }

    /// Nanoseconds since the start.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    pub(crate) fn eq(&mut self) -> u32 {
        let page = self.alloc_page();
        let mut input = Bits::<create_eq_in, _>::new(vec![0; create_eq_in::SIZE]);
        let mut context = input.sub_mut(create_eq_in::eq_context_entry);
        context.set(eqc::log_eq_size, 6);
        context.set(eqc::uar_page, self.uar.into());
        // A CQ names its EQ for completion events; other events need a subscription.
        input.set_span(create_eq_in::event_bitmask, &ERRORS.to_be_bytes());
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        let out = self.run_command(opcode::CREATE_EQ, &input).unwrap();
        Bits::<create_eq_out, _>::new(out).get32(create_eq_out::eq_number)
    }

    /// A CQ of 64 CQEs: its number and its buffer.
    pub(crate) fn cq(&mut self, eqn: u32) -> (u32, u64) {
        self.cq_with(eqn, &[])
    }

    /// A CQ with other fields in its context. With at most 32 CQEs the buffer has room for 128
    /// bytes each.
    pub(crate) fn cq_with(&mut self, eqn: u32, fields: &[(Field<cqc>, u64)]) -> (u32, u64) {
        let (page, record) = (self.alloc_page(), self.alloc_page());
        self.memory().write(page, &[0xf1; 4096]).unwrap();
        let mut input = Bits::<create_cq_in, _>::new(vec![0; create_cq_in::SIZE]);
        let mut context = input.sub_mut(create_cq_in::cq_context);
        context.set(cqc::log_cq_size, 6);
        context.set(cqc::uar_page, self.uar.into());
        context.set(cqc::c_eqn_or_apu_element, eqn.into());
        context.set(cqc::dbr_addr, record);
        for (field, value) in fields {
            context.set(*field, *value);
        }
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        let out = self.run_command(opcode::CREATE_CQ, &input).unwrap();
        (Bits::<create_cq_out, _>::new(out).get32(create_cq_out::cqn), page)
    }

    pub(crate) fn resize_cq(
        &mut self,
        number: u32,
        log_size: u64,
        page: u64,
    ) -> Result<Vec<u8>, CommandError> {
        let mut input = Bits::<modify_cq_in, _>::new(vec![0; modify_cq_in::SIZE]);
        input.set(modify_cq_in::op_mod, 1);
        input.set(modify_cq_in::cqn, number.into());
        input.sub_mut(modify_cq_in::cq_context).set(cqc::log_cq_size, log_size);
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        self.run_command(opcode::MODIFY_CQ, &input)
    }

    /// An mkey for `len` bytes at guest physical address `start`, mapped at the same address.
    pub(crate) fn mkey(&mut self, start: u64, len: u64, rights: &[Field<mkc>]) -> u32 {
        let first = start & !0xfff;
        let pages = (start + len).div_ceil(4096) - first / 4096;
        let octowords = pages.div_ceil(2);
        let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
        input.set(create_mkey_in::translations_octword_actual_size, octowords);
        let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
        for right in rights {
            context.set(*right, 1);
        }
        for (field, value) in [
            (mkc::access_mode_1_0, 1),
            (mkc::qpn, 0xff_ffff),
            (mkc::mkey_7_0, 0x5a),
            (mkc::pd, self.pd.into()),
            (mkc::start_addr, start),
            (mkc::len, len),
            (mkc::log_page_size, 12),
            (mkc::translations_octword_size, octowords),
        ] {
            context.set(field, value);
        }
        let mut input = input.into_inner();
        for page in 0..octowords * 2 {
            input.extend((first + page * 4096).to_be_bytes());
        }
        let out = self.run_command(opcode::CREATE_MKEY, &input).unwrap();
        Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index) << 8 | 0x5a
    }

    /// An mkey with these fields in its context and this translation list, bound to no queue pair
    /// unless the fields say so. Its variant part is 0.
    pub(crate) fn mkey_with(&mut self, fields: &[(Field<mkc>, u64)], list: &[u8]) -> u32 {
        let octowords = list.len().div_ceil(16) as u64;
        let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
        input.set(create_mkey_in::translations_octword_actual_size, octowords);
        let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
        context.set(mkc::qpn, 0xff_ffff);
        context.set(mkc::pd, self.pd.into());
        context.set(mkc::translations_octword_size, octowords);
        for (field, value) in fields {
            context.set(*field, *value);
        }
        let mut input = input.into_inner();
        input.extend(list);
        input.resize(input.len().next_multiple_of(16), 0);
        let out = self.run_command(opcode::CREATE_MKEY, &input).unwrap();
        Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index) << 8
    }

    /// A queue pair with 16 receives of one SGE and 16 WQEBBs for sends.
    pub(crate) fn qp(&mut self, service: u64, cqn: u32) -> Queue {
        self.qp_with(service, cqn, &[])
    }

    /// A queue pair with other fields in its context.
    pub(crate) fn qp_with(
        &mut self,
        service: u64,
        cqn: u32,
        fields: &[(Field<qpc>, u64)],
    ) -> Queue {
        let page = self.alloc_page();
        self.try_qp(0, page, service, cqn, fields).unwrap()
    }

    /// A queue pair of a user context, in a page of choice, if the device creates it.
    pub(crate) fn try_qp(
        &mut self,
        uid: u32,
        page: u64,
        service: u64,
        cqn: u32,
        fields: &[(Field<qpc>, u64)],
    ) -> Result<Queue, CommandError> {
        let record = self.alloc_page();
        let mut input = Bits::<create_qp_in, _>::new(vec![0; create_qp_in::SIZE]);
        input.set(create_qp_in::ece, self.ece.into());
        let mut context = input.sub_mut(create_qp_in::qpc);
        for (field, value) in [
            (qpc::st, service),
            (qpc::pd, self.pd.into()),
            (qpc::log_rq_size, 4),
            (qpc::log_rq_stride, 0),
            (qpc::log_sq_size, 4),
            (qpc::uar_page, self.uar.into()),
            (qpc::cqn_snd, cqn.into()),
            (qpc::cqn_rcv, cqn.into()),
            (qpc::dbr_addr, record),
        ] {
            context.set(field, value);
        }
        for (field, value) in fields {
            context.set(*field, *value);
        }
        let mut input = input.into_inner();
        input.extend(page.to_be_bytes());
        let out =
            Bits::<create_qp_out, _>::new(self.run_command_as(uid, opcode::CREATE_QP, &input)?);
        let number = out.get32(create_qp_out::qpn);
        self.told_ece = out.get32(create_qp_out::ece);
        Ok(Queue::new(number, page, page + 256, record))
    }

    pub(crate) fn modify(
        &mut self,
        op: u16,
        qp: &Queue,
        peer: u32,
        fields: &[(Field<qpc>, u64)],
    ) -> Result<Vec<u8>, CommandError> {
        let mut input = Bits::<rst2init_qp_in, _>::new(vec![0; rst2init_qp_in::SIZE]);
        input.set(rst2init_qp_in::qpn, qp.number.into());
        input.set(rst2init_qp_in::ece, self.ece.into());
        let mut context = input.sub_mut(rst2init_qp_in::qpc);
        context.set(qpc::remote_qpn, peer.into());
        for (field, value) in fields {
            context.set(*field, *value);
        }
        let mut path = context.sub_mut(qpc::primary_address_path);
        path.set_span(ads::rgid_rip, &self.peer_gid);
        path.set(ads::ack_timeout, self.ack_timeout);
        path.set(ads::src_addr_index, self.source);
        let out = self.run_command(op, &input.into_inner())?;
        self.told_ece = Bits::<rst2init_qp_out, _>::new(&*out).get32(rst2init_qp_out::ece);
        Ok(out)
    }

    /// Connects two reliable queue pairs of this function.
    pub(crate) fn connect(&mut self, qp: &Queue, peer: &Queue) {
        let rights = [(qpc::rre, 1), (qpc::rwe, 1), (qpc::rae, 1)];
        self.modify(opcode::RST2INIT_QP, qp, 0, &rights).unwrap();
        let receive = [(qpc::mtu, 3), (qpc::min_rnr_nak, 1)];
        self.modify(opcode::INIT2RTR_QP, qp, peer.number, &receive).unwrap();
        let send = [(qpc::retry_count, 3), (qpc::rnr_retry, 2)];
        self.modify(opcode::RTR2RTS_QP, qp, peer.number, &send).unwrap();
    }

    /// Resets a reliable queue pair and connects it again, if that is possible.
    pub(crate) fn reconnect(&mut self, qp: &mut Queue, peer: u32) -> Result<(), CommandError> {
        self.modify(opcode::TO_RST_QP, qp, 0, &[])?;
        qp.posted = 0;
        qp.received = 0;
        let record = qp.record;
        self.memory().write(record, &[0; 8]).unwrap();
        let rights = [(qpc::rre, 1), (qpc::rwe, 1), (qpc::rae, 1)];
        self.modify(opcode::RST2INIT_QP, qp, 0, &rights)?;
        let receive = [(qpc::mtu, 3), (qpc::min_rnr_nak, 1)];
        self.modify(opcode::INIT2RTR_QP, qp, peer, &receive)?;
        let send = [(qpc::retry_count, 3), (qpc::rnr_retry, 2)];
        self.modify(opcode::RTR2RTS_QP, qp, peer, &send)?;
        Ok(())
    }

    /// Sets the GID of the port.
    pub(crate) fn set_gid(&mut self) {
        self.set_roce_address(0, GID, None);
    }

    /// Sets an entry of the table of RoCE addresses.
    pub(crate) fn set_roce_address(&mut self, index: u64, gid: [u8; 16], vlan: Option<u64>) {
        let mut input = Bits::<set_roce_address_in, _>::new(vec![0; set_roce_address_in::SIZE]);
        input.set(set_roce_address_in::roce_address_index, index);
        let mut entry = input.sub_mut(set_roce_address_in::roce_address);
        entry.set_span(roce_addr_layout::source_l3_address, &gid);
        entry.set(roce_addr_layout::roce_version, 2);
        entry.set(roce_addr_layout::vlan_valid, vlan.is_some().into());
        entry.set(roce_addr_layout::vlan_id, vlan.unwrap_or(0));
        self.run_command(opcode::SET_ROCE_ADDRESS, &input.into_inner()).unwrap();
    }

    pub(crate) fn segment(len: u32, key: u32, address: u64) -> Vec<u8> {
        let mut bytes = len.to_be_bytes().to_vec();
        bytes.extend(key.to_be_bytes());
        bytes.extend(address.to_be_bytes());
        bytes
    }

    pub(crate) fn post_receive(&mut self, qp: &mut Queue, segment: &[u8]) {
        let at = qp.receives + u64::from(qp.received % 16) * 16;
        qp.received += 1;
        let record = u32::from(qp.received).to_be_bytes();
        let address = qp.record;
        self.memory().write(at, segment).unwrap();
        self.memory().write(address, &record).unwrap();
    }

    /// Posts one signaled WQE, rings the doorbell, and runs the device until it is idle.
    pub(crate) fn post_send(&mut self, qp: &mut Queue, op: u8, immediate: u32, segments: &[u8]) {
        self.ring_send(qp, op, immediate, segments);
        self.run();
    }

    /// Posts one signaled WQE, rings the doorbell, and runs the device without timers.
    pub(crate) fn ring_send(&mut self, qp: &mut Queue, op: u8, immediate: u32, segments: &[u8]) {
        self.queue_send(qp, op, immediate, segments);
        self.run_now();
    }

    /// Posts one signaled WQE and rings the doorbell; the device does not run.
    pub(crate) fn queue_send(&mut self, qp: &mut Queue, op: u8, immediate: u32, segments: &[u8]) {
        let units = 1 + segments.len() / 16;
        let mut request = (u32::from(qp.posted) << 8 | u32::from(op)).to_be_bytes().to_vec();
        request.extend((qp.number << 8 | units as u32).to_be_bytes());
        request.extend([0, 0, 0, 8]);
        request.extend(immediate.to_be_bytes());
        request.extend(segments);
        request.resize(request.len().next_multiple_of(64), 0);
        for (number, block) in request.chunks(64).enumerate() {
            let index = (u64::from(qp.posted) + number as u64) % 16;
            let at = qp.sends + index * 64;
            self.memory().write(at, block).unwrap();
        }
        qp.posted += (request.len() / 64) as u16;
        let (record, posted) = (qp.record + 4, u32::from(qp.posted).to_be_bytes());
        self.memory().write(record, &posted).unwrap();
        let doorbell = u64::from(self.uar) * 4096 + 0x800;
        self.fabric.function(0).write(Region::Bar0, doorbell, &request[..8]);
        self.fabric.function(0).device_mut().flush_gathered_writes();
    }

    /// Sets the time and runs the device without timers.
    pub(crate) fn run_at(&mut self, now: u64) {
        self.now = now;
        self.run_now();
    }

    /// Runs the device until it has nothing to do at the current time.
    pub(crate) fn run_now(&mut self) {
        while self.fabric.poll(self.now) {}
    }

    /// Runs the device until it has nothing to do, timers included.
    pub(crate) fn run(&mut self) {
        loop {
            while self.fabric.poll(self.now) {}
            match self.fabric.deadline() {
                Some(due) => self.now = due,
                None => return,
            }
        }
    }

    /// Arms a CQ for every CQE, with consumer index `seen`.
    pub(crate) fn arm(&mut self, cqn: u32, seen: u32) {
        let mut doorbell = seen.to_be_bytes().to_vec();
        doorbell.extend(cqn.to_be_bytes());
        let place = u64::from(self.uar) * 4096 + 0x20;
        self.fabric.function(0).write(Region::Bar0, place, &doorbell);
    }

    /// The number of completion events of a CQ in the EQ at `page`.
    pub(crate) fn completion_events(&mut self, page: u64, cqn: u32) -> usize {
        let mut bytes = [0; 4096];
        self.memory().read(page, &mut bytes).unwrap();
        let of_queue = |eqe: &&[u8]| eqe[1] == 0 && eqe[56..60] == cqn.to_be_bytes();
        bytes.chunks(64).filter(of_queue).count()
    }

    /// Runs a command of a user context.
    pub(crate) fn run_command_as(
        &mut self,
        uid: u32,
        op: u16,
        input: &[u8],
    ) -> Result<Vec<u8>, CommandError> {
        let mut input = input.to_vec();
        input[2..4].copy_from_slice(&(uid as u16).to_be_bytes());
        self.run_command(op, &input)
    }

    /// Creates a user context.
    pub(crate) fn create_uctx(&mut self) -> u32 {
        let out = self.run_command(opcode::CREATE_UCTX, &[0; 64]).unwrap();
        Bits::<create_uctx_out, _>::new(out).get32(create_uctx_out::uid)
    }

    /// A TIS with a transport domain of its own.
    pub(crate) fn tis(&mut self) -> u32 {
        let out = self.run_command(opcode::ALLOC_TRANSPORT_DOMAIN, &[0; 16]).unwrap();
        let domain = Bits::<alloc_transport_domain_out, _>::new(out)
            .get(alloc_transport_domain_out::transport_domain);
        let mut input = Bits::<create_tis_in, _>::new(vec![0; create_tis_in::SIZE]);
        input.sub_mut(create_tis_in::ctx).set(tisc::transport_domain, domain);
        let out = self.run_command(opcode::CREATE_TIS, &input.into_inner()).unwrap();
        Bits::<create_tis_out, _>::new(out).get32(create_tis_out::tisn)
    }

    /// A flow table of one entry, with a group.
    pub(crate) fn flow_table(&mut self) -> u64 {
        let mut input = Bits::<create_flow_table_in, _>::new(vec![0; create_flow_table_in::SIZE]);
        let mut context = input.sub_mut(create_flow_table_in::flow_table_context);
        context.set(flow_table_context::log_size, 0);
        let out = self.run_command(opcode::CREATE_FLOW_TABLE, &input.into_inner()).unwrap();
        let table = Bits::<create_flow_table_out, _>::new(out).get(create_flow_table_out::table_id);
        let mut input = Bits::<create_flow_group_in, _>::new(vec![0; create_flow_group_in::SIZE]);
        input.set(create_flow_group_in::table_id, table);
        self.run_command(opcode::CREATE_FLOW_GROUP, &input.into_inner()).unwrap();
        table
    }

    /// Makes a flow table the one that frames meet first.
    pub(crate) fn set_flow_root(&mut self, table: u64) {
        let mut input =
            Bits::<set_flow_table_root_in, _>::new(vec![0; set_flow_table_root_in::SIZE]);
        input.set(set_flow_table_root_in::table_id, table);
        self.run_command(opcode::SET_FLOW_TABLE_ROOT, &input.into_inner()).unwrap();
    }

    /// CQE `index` of a CQ: opcode and bytes.
    pub(crate) fn cqe(&mut self, buffer: u64, index: u64) -> (u8, [u8; 64]) {
        let mut bytes = [0; 64];
        self.memory().read(buffer + index * 64, &mut bytes).unwrap();
        (bytes[63] >> 4, bytes)
    }
}
