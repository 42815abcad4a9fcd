//! The driver of a function: the state that mlx5_core and mlx5_ib keep, and the firmware commands that they send.
//!
//! Pairs with `mlx5_cmd_exec` and `mlx5_cmd_check` in `core/cmd.c`, with `core/eq.c`, and with `hw/mlx5/main.c`.

use crate::call::Result;
use crate::events::EventFile;
use crate::faults::{FailingCalls, Rates};
use crate::interface::Interface;
use crate::kernel::{
    ClockPages, Flows, Kind, Lease, Leaving, Limits, Membership, RawQp, Subscription, Xrcd,
};
use crate::memory::Pages;
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use uverbs_connectx::decisions::Decisions;
use uverbs_connectx::fabric::Fabric as Switch;
use uverbs_connectx::format::event::{self, Event, Subject};
use uverbs_connectx::function::{Function, Region};
use uverbs_connectx::guest::GuestMemory;
use uverbs_connectx::options::{Options, PortType};
use uverbs_uapi::async_event::ib_uverbs_async_event_desc;
use uverbs_uapi::comp_channel::ib_uverbs_comp_event_desc;
use uverbs_uapi::mlx5::prm::cmd::{query_vuid_in, query_vuid_out, set_hca_cap_in};
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in};
use uverbs_uapi::mlx5::prm::hca_cap::atomic_caps;
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, mkc};
use uverbs_uapi::mlx5::prm::object::{alloc_pd_out, alloc_uar_out, alloc_xrcd_out};
use uverbs_uapi::mlx5::prm::srqc::{create_xrc_srq_in, xrc_srqc};
use uverbs_uapi::mlx5::prm::vport::{
    modify_nic_vport_context_in, modify_nic_vport_field_select, nic_vport_context,
    roce_addr_layout, set_roce_address_in,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};
use uverbs_uapi::qp::{ib_uverbs_modify_qp, ib_uverbs_qp_cap};
use zerocopy::IntoBytes;

/// Bytes of a page in the lists of commands.
const PAGE: u64 = 4096;
/// Types of events to which the driver subscribes.
const EVENTS: [u8; 7] = [
    event::CQ_ERROR,
    event::WQ_CATASTROPHIC,
    event::PORT_CHANGE,
    event::WQ_INVALID_REQUEST,
    event::WQ_ACCESS_ERROR,
    event::LAST_WQE_REACHED,
    event::SRQ_LIMIT,
];

/// The event file of an object, and the program's number for the object there.
#[derive(Clone, Debug)]
pub(crate) struct Reports {
    pub(crate) to: EventFile,
    pub(crate) user_handle: u64,
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    /// The address of its doorbell record.
    pub(crate) record: u64,
    pub(crate) channel: Option<Reports>,
    pub(crate) events: Option<Reports>,
    /// Bytes of an entry.
    pub(crate) cqe_size: u32,
    pub(crate) entries: u32,
    /// Whether its queues have timestamps of real time: `MLX5_IB_CQ_PR_FLAGS_REAL_TIME_TS`.
    pub(crate) real_time: bool,
}

/// An open handle of a queue pair. An XRC target may have several.
pub(crate) type OpenerId = u64;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    /// The event file of each opener.
    pub(crate) openers: BTreeMap<OpenerId, Option<Reports>>,
    /// The attributes that were set last: the driver asks firmware for the state alone.
    pub(crate) attr: ib_uverbs_modify_qp,
    /// The state that was set or seen last.
    pub(crate) state: u8,
    pub(crate) cap: ib_uverbs_qp_cap,
    pub(crate) kind: Kind,
    pub(crate) signal_all: bool,
    /// Whether data may be placed out of order: `is_ooo_rq`.
    pub(crate) out_of_order: bool,
    /// The XRC domain of a target.
    pub(crate) xrcd: Option<u32>,
    pub(crate) groups: Vec<Membership>,
    /// The queues of a raw packet queue pair.
    pub(crate) raw: Option<RawQp>,
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) events: Option<Reports>,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    /// Whether it is for messages of XRC.
    pub(crate) is_xrc: bool,
}

/// Objects that the driver lends to queue pairs which have none: `struct mlx5_ib_resources`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reserved {
    pub(crate) pd: u32,
    pub(crate) cq: u32,
    pub(crate) xrcd: u32,
    pub(crate) srq: u32,
}

/// Objects by which regions reach memory through the data-direct function: `mlx5_data_direct_resources`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataDirect {
    pub(crate) pd: u32,
    /// The key of all memory that the function reaches, by its address there.
    pub(crate) key: u32,
}

/// Whether a device works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Working,
    /// In internal error.
    Failed,
    /// Out of its slot.
    Unplugged,
}

/// The driver of a function.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) name: String,
    health: Health,
    pub(crate) link: bool,
    /// Calls that a test makes fail.
    pub(crate) failing: FailingCalls,
    /// The number of events that a test has asked to lose.
    pub(crate) events_to_lose: u32,
    /// The number of events that a test has asked to hold back, and the nanoseconds for each.
    pub(crate) events_to_delay: (u32, u64),
    /// Events that are held back, and when each goes on.
    late: VecDeque<(u64, Event)>,
    /// Changes of the link that contexts were not told of: `true` for up.
    pub(crate) link_changes: Vec<bool>,
    /// The function's place at the switch.
    function: usize,
    /// The event queue, which has no memory: events are taken as values.
    eqn: u32,
    /// The low byte of the next mkey.
    variant: u8,
    /// The source of random numbers, if peers are outside of the process.
    exposed: Option<fn() -> u64>,
    /// The network interface of the port; over InfiniBand that of IPoIB.
    pub(crate) interface: Interface,
    /// The LID and the partition keys of an InfiniBand port.
    pub(crate) infiniband: Option<(u16, Vec<u16>)>,
    pub(crate) cqs: BTreeMap<u32, Cq>,
    pub(crate) qps: BTreeMap<u32, Qp>,
    pub(crate) srqs: BTreeMap<u32, Srq>,
    pub(crate) xrcds: BTreeMap<u32, Xrcd>,
    /// VARs that are allocated or mapped, by offset in BAR0.
    pub(crate) vars: BTreeMap<u64, Weak<Lease>>,
    /// Resources that are freed with their last mapping.
    pub(crate) leaving: Vec<(Weak<Lease>, Leaving)>,
    /// Device memory that is allocated: its offset in BAR0, and the bytes of its pages.
    pub(crate) memic: BTreeMap<u64, u64>,
    pub(crate) limits: Limits,
    pub(crate) clock: ClockPages,
    pub(crate) flows: Flows,
    /// Subscriptions of DEVX event channels.
    pub(crate) subscriptions: Vec<Subscription>,
    /// The driver's part of the data-direct function.
    pub(crate) data_direct: Option<DataDirect>,
    reserved: Option<Reserved>,
    /// The pages of the driver's own queues.
    own_pages: Vec<Arc<Pages>>,
    next_opener: OpenerId,
    /// Queue pairs that were given a port of the LAG.
    lag_turns: u64,
}

/// A command's input, with the opcode.
pub(crate) fn input<L: Layout>(op: u16) -> Bits<L, Vec<u8>> {
    let mut bytes = vec![0; L::SIZE.max(16)];
    bytes[..2].copy_from_slice(&op.to_be_bytes());
    Bits::new(bytes)
}

/// The start of a buffer in a command: `page_offset`, in 64ths of a page and in a field of `bits` bits, and
/// `log_page_size`, in steps above 4 KiB. As `mlx5_umem_find_best_quantized_pgoff`.
///
/// # Errors
///
/// `EINVAL` for a start that no page size can express.
pub(crate) fn quantized_offset(start: u64, bits: u32) -> Result<(u64, u64)> {
    const STEPS: u64 = 64;
    // The device uses the addresses of the process, so pages of every size are contiguous.
    for log_page_size in 0..20 {
        let page = PAGE << log_page_size;
        let (offset, step) = (start & (page - 1), page / STEPS);
        if offset % step == 0 && offset / step < 1 << bits {
            return Ok((offset / step, log_page_size));
        }
    }
    Err(Errno::INVAL)
}

/// Appends the pages of a range to a command, of a size in steps above 4 KiB.
pub(crate) fn append_pages(command: &mut Vec<u8>, start: u64, length: u64, log_page_size: u64) {
    let page = PAGE << log_page_size;
    for page in (start & !(page - 1)..start + length.max(1)).step_by(page as usize) {
        command.extend(page.to_be_bytes());
    }
}

/// The errno of a command's status, as `cmd_status_to_err`.
fn errno_of(status: u8) -> Errno {
    match status {
        0x02 => Errno::OPNOTSUPP,
        0x03 | 0x05 | 0x09 | 0x0a | 0x10 | 0x30 | 0x40 => Errno::INVAL,
        0x06 => Errno::BUSY,
        0x08 => Errno::NOMEM,
        0x0f => Errno::AGAIN,
        _ => Errno::IO,
    }
}

/// The vital product data of a data-direct function, by the registers of its capability: `pci_vpd_read`.
fn vital_product_data(function: &mut Function) -> Vec<u8> {
    /// Offset of the capability, of its address and of its data.
    const CAPABILITY: u64 = 0x9c;
    const MOST: u16 = 256;
    let mut data = Vec::new();
    for at in (0..MOST).step_by(4) {
        let mut word = [0; 4];
        function.write(Region::DataDirect, CAPABILITY + 2, &at.to_le_bytes());
        function.read(Region::DataDirect, CAPABILITY + 4, &mut word);
        data.extend(word);
    }
    data
}

impl Driver {
    /// The port of the LAG for the next queue pair, in turn: `get_tx_affinity_rr`. 0 without a LAG.
    pub(crate) fn next_lag_port(&mut self) -> u64 {
        match self.limits.lag_ports {
            0 | 1 => 0,
            ports => {
                self.lag_turns += 1;
                self.lag_turns % ports + 1
            }
        }
    }

    /// Adds a function to the switch and brings it up.
    pub(crate) fn probe(
        switch: &mut Switch,
        options: Options,
        name: String,
        interface: Interface,
    ) -> Result<Driver> {
        let is_infiniband = options.port_type == PortType::InfiniBand;
        let (pkeys, exposed) = (options.pkeys.clone(), options.exposed);
        let function = switch.add(options);
        let pci = switch.function(function);
        *pci.memory_mut() = GuestMemory::process();
        pci.enable_bus_master();
        let mut driver = Driver {
            name,
            health: Health::Working,
            link: true,
            failing: FailingCalls::default(),
            events_to_lose: 0,
            events_to_delay: (0, 0),
            late: VecDeque::new(),
            link_changes: Vec::new(),
            function,
            eqn: 0,
            variant: 0,
            exposed,
            interface,
            infiniband: None,
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            srqs: BTreeMap::new(),
            xrcds: BTreeMap::new(),
            vars: BTreeMap::new(),
            leaving: Vec::new(),
            memic: BTreeMap::new(),
            limits: Limits::default(),
            clock: ClockPages::new(),
            flows: Flows::default(),
            subscriptions: Vec::new(),
            reserved: None,
            data_direct: None,
            own_pages: Vec::new(),
            next_opener: 1,
            lag_turns: 0,
        };
        if is_infiniband {
            let (lid, gid) = switch.function(function).device().infiniband_address();
            driver.interface.be_over_infiniband(gid);
            driver.infiniband = Some((lid, pkeys));
        }
        driver.boot(switch)?;
        Ok(driver)
    }

    fn boot(&mut self, switch: &mut Switch) -> Result<()> {
        for op in [opcode::ENABLE_HCA, opcode::INIT_HCA] {
            let mut command = vec![0; 16];
            command[..2].copy_from_slice(&op.to_be_bytes());
            self.execute(switch, &command)?;
        }
        self.limits = Limits::query(self, switch)?;
        if self.limits.has_atomics {
            self.set_atomic_order(switch)?;
        }
        if self.infiniband.is_none() {
            self.set_address(switch)?;
            self.set_gids(switch)?;
        }
        if self.limits.has_data_direct {
            self.bind_data_direct(switch)?;
        }
        let queue = switch.function(self.function).create_event_queue(&EVENTS);
        self.eqn = queue.map_err(|refused| errno_of(refused.status as u8))?;
        Ok(())
    }

    /// Binds the device to its data-direct function, whose identifier is the same: `mlx5_ib_data_direct_init` and
    /// `mlx5_data_direct_probe`.
    fn bind_data_direct(&mut self, switch: &mut Switch) -> Result<()> {
        let mut command = input::<query_vuid_in>(opcode::QUERY_VUID);
        command.set(query_vuid_in::data_direct, 1);
        let answer = self.execute(switch, &command.into_inner())?;
        let wanted = answer.get(query_vuid_out::SIZE..).unwrap_or_default();
        let function = switch.function(self.function);
        function.enable_data_direct();
        let found = vital_product_data(function);
        let wanted = wanted.split(|byte| *byte == 0).next().unwrap_or_default();
        let same = [b"VU", &[wanted.len() as u8][..], wanted].concat();
        if wanted.is_empty() || !found.windows(same.len()).any(|part| part == same) {
            return Ok(());
        }
        let pd = self.alloc_pd(switch, 0)?;
        let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
        command.set(create_mkey_in::data_direct, 1);
        let mut context = command.sub_mut(create_mkey_in::memory_key_mkey_entry);
        for (field, value) in [
            (mkc::lw, 1),
            (mkc::lr, 1),
            (mkc::rw, 1),
            (mkc::rr, 1),
            (mkc::a, 1),
            (mkc::length64, 1),
            (mkc::qpn, 0xff_ffff),
            (mkc::pd, pd.into()),
        ] {
            context.set(field, value);
        }
        let answer = self.execute(switch, &command.into_inner())?;
        self.data_direct = Some(DataDirect { pd, key: Driver::created(&answer) << 8 });
        Ok(())
    }

    /// Gives the port the GIDs of its interface.
    fn set_gids(&self, switch: &mut Switch) -> Result<()> {
        for (index, entry) in self.interface.gids.iter().enumerate() {
            let mut command = input::<set_roce_address_in>(opcode::SET_ROCE_ADDRESS);
            command.set(set_roce_address_in::roce_address_index, index as u64);
            let mut address = command.sub_mut(set_roce_address_in::roce_address);
            address.set_span(roce_addr_layout::source_l3_address, &entry.gid);
            address.set(roce_addr_layout::roce_version, entry.firmware_version());
            address.set(roce_addr_layout::roce_l3_type, entry.is_ipv6_packet().into());
            self.execute(switch, &command.into_inner())?;
        }
        Ok(())
    }

    /// Gives the port the address of its interface, and RoCE.
    fn set_address(&self, switch: &mut Switch) -> Result<()> {
        let mut command = input::<modify_nic_vport_context_in>(opcode::MODIFY_NIC_VPORT_CONTEXT);
        let mut chosen = command.sub_mut(modify_nic_vport_context_in::field_select);
        chosen.set(modify_nic_vport_field_select::permanent_address, 1);
        chosen.set(modify_nic_vport_field_select::roce_en, 1);
        let [a, b, c, d, e, f] = self.interface.mac;
        let mut context = command.sub_mut(modify_nic_vport_context_in::nic_vport_context);
        let address = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
        context.set(nic_vport_context::permanent_address, address);
        context.set(nic_vport_context::roce_en, 1);
        self.execute(switch, &command.into_inner()).map(drop)
    }

    /// Makes atomics return values in the host's byte order.
    fn set_atomic_order(&mut self, switch: &mut Switch) -> Result<()> {
        const ATOMIC: u16 = 3;
        const CAPS: usize = 4096;
        let mut caps = Bits::<atomic_caps, _>::new(vec![0; CAPS]);
        caps.set(atomic_caps::atomic_req_8B_endianness_mode, 1);
        let mut command = input::<set_hca_cap_in>(opcode::SET_HCA_CAP).into_inner();
        command.resize(16 + CAPS, 0);
        command[6..8].copy_from_slice(&(ATOMIC << 1).to_be_bytes());
        command[16..].copy_from_slice(&caps.into_inner());
        self.execute(switch, &command).map(drop)
    }

    /// Sends a command to firmware, and returns its output, also that of a command that firmware refused.
    pub(crate) fn send(&self, switch: &mut Switch, command: &[u8]) -> Result<Vec<u8>> {
        // The longest answer: a group of capabilities.
        const ROOM: usize = 16 + 4096;
        if self.health != Health::Working {
            return self.execute_after_failure(command);
        }
        switch.function(self.function).command(command, ROOM).ok_or(Errno::TIMEDOUT)
    }

    /// Sends a command to firmware.
    pub(crate) fn execute(&self, switch: &mut Switch, command: &[u8]) -> Result<Vec<u8>> {
        let answer = self.send(switch, command)?;
        match answer.first() {
            Some(0) => Ok(answer),
            Some(status) => Err(errno_of(*status)),
            None => Err(Errno::IO),
        }
    }

    /// The outcome of a command on a device that has failed: a command that destroys or releases something succeeds, as
    /// in `mlx5_internal_err_ret_value`.
    fn execute_after_failure(&self, command: &[u8]) -> Result<Vec<u8>> {
        let op = command.first_chunk().map_or(0, |op| u16::from_be_bytes(*op));
        match TAKES_AWAY.contains(&op) {
            true => Ok(vec![0; 16]),
            false => Err(Errno::NOLINK),
        }
    }

    /// Whether the device is in its slot.
    pub(crate) fn is_plugged(&self) -> bool {
        self.health != Health::Unplugged
    }

    /// Whether the device works, and its port has a link.
    pub(crate) fn has_link(&self) -> bool {
        self.health == Health::Working && self.link
    }

    /// Stops the device; returns whether it was working.
    pub(crate) fn stop(&mut self, switch: &mut Switch, unplug: bool) -> bool {
        let worked = self.health == Health::Working;
        if unplug || worked {
            self.health = if unplug { Health::Unplugged } else { Health::Failed };
        }
        switch.function(self.function).remove();
        self.late.clear();
        worked
    }

    /// Sends a command whose input is the number of one object, at byte 8.
    pub(crate) fn execute_on(&self, switch: &mut Switch, op: u16, number: u32) -> Result<Vec<u8>> {
        self.execute(switch, &about(op, number))
    }

    /// Sends a command of a user context that has nothing but its header.
    fn execute_of(&self, switch: &mut Switch, op: u16, uid: u16) -> Result<Vec<u8>> {
        let mut command = about(op, 0);
        set_uid(&mut command, uid);
        self.execute(switch, &command)
    }

    /// The number of a new object, in the third word of an output.
    pub(crate) fn created(answer: &[u8]) -> u32 {
        let word = answer.get(8..12).and_then(|word| word.try_into().ok());
        u32::from_be_bytes(word.unwrap_or_default()) & 0xff_ffff
    }

    /// Allocates a UAR, which the user context `uid` owns.
    pub(crate) fn alloc_uar(&self, switch: &mut Switch, uid: u16) -> Result<u32> {
        let answer = self.execute_of(switch, opcode::ALLOC_UAR, uid)?;
        Ok(Bits::<alloc_uar_out, _>::new(answer).get32(alloc_uar_out::uar))
    }

    /// Allocates a protection domain, which the user context `uid` owns.
    pub(crate) fn alloc_pd(&self, switch: &mut Switch, uid: u16) -> Result<u32> {
        let answer = self.execute_of(switch, opcode::ALLOC_PD, uid)?;
        Ok(Bits::<alloc_pd_out, _>::new(answer).get32(alloc_pd_out::pd))
    }

    /// The low byte of a new mkey.
    pub(crate) fn next_variant(&mut self) -> u8 {
        self.variant = match self.exposed {
            Some(random) => random() as u8,
            None => self.variant.wrapping_add(1),
        };
        self.variant
    }

    /// Whether peers are outside of the process.
    pub(crate) fn is_exposed(&self) -> bool {
        self.exposed.is_some()
    }

    /// The function's place at the switch.
    pub(crate) fn function(&self) -> usize {
        self.function
    }

    /// A number for a new opener of a queue pair.
    pub(crate) fn new_opener(&mut self) -> OpenerId {
        self.next_opener += 1;
        self.next_opener
    }

    /// The driver's own objects, which are made when the first queue pair needs one.
    pub(crate) fn reserved(&mut self, switch: &mut Switch) -> Result<Reserved> {
        if let Some(reserved) = self.reserved {
            return Ok(reserved);
        }
        let pd = self.alloc_pd(switch, 0)?;
        let uar = self.alloc_uar(switch, 0)?;
        let answer = self.execute_on(switch, opcode::ALLOC_XRCD, 0)?;
        let xrcd = Bits::<alloc_xrcd_out, _>::new(answer).get32(alloc_xrcd_out::xrcd);
        // One page for both queues, and one for their doorbell records.
        let pages = Pages::new(2 * PAGE as usize);
        pages.lend(self.memory(switch))?;
        let (queues, records) = (pages.address(), pages.address() + PAGE);
        self.own_pages.push(pages);
        let mut command = input::<create_cq_in>(opcode::CREATE_CQ);
        let mut context = command.sub_mut(create_cq_in::cq_context);
        for (field, value) in [
            (cqc::log_cq_size, 1),
            (cqc::uar_page, uar.into()),
            (cqc::c_eqn_or_apu_element, self.eqn.into()),
            (cqc::dbr_addr, records),
        ] {
            context.set(field, value);
        }
        let mut command = command.into_inner();
        append_pages(&mut command, queues, 1, 0);
        let cq = Driver::created(&self.execute(switch, &command)?);
        let mut command = input::<create_xrc_srq_in>(opcode::CREATE_XRC_SRQ);
        let mut context = command.sub_mut(create_xrc_srq_in::xrc_srq_context_entry);
        for (field, value) in [
            (xrc_srqc::log_xrc_srq_size, 1),
            (xrc_srqc::log_rq_stride, 1),
            (xrc_srqc::xrcd, xrcd.into()),
            (xrc_srqc::cqn, cq.into()),
            (xrc_srqc::pd, pd.into()),
            (xrc_srqc::page_offset, PAGE / 2 / 64),
            (xrc_srqc::db_record_addr_h, (records + 64) >> 32),
            (xrc_srqc::db_record_addr_l, ((records + 64) & 0xffff_ffff) >> 2),
        ] {
            context.set(field, value);
        }
        let mut command = command.into_inner();
        append_pages(&mut command, queues, 1, 0);
        let srq = Driver::created(&self.execute(switch, &command)?);
        let reserved = Reserved { pd, cq, xrcd, srq };
        self.reserved = Some(reserved);
        Ok(reserved)
    }

    /// The event queue that completion queues report to.
    pub(crate) fn eqn(&self) -> u32 {
        self.eqn
    }

    /// A store to a page of registers.
    pub(crate) fn ring(&self, switch: &mut Switch, uar: u32, at: u64, bytes: &[u8]) {
        switch.function(self.function).ring(uar, at, bytes);
    }

    /// The memory that the device may access.
    pub(crate) fn memory<'s>(&self, switch: &'s mut Switch) -> &'s mut GuestMemory {
        switch.function(self.function).memory_mut()
    }

    /// Whether there are events of the device, or changes of its link, that were not passed on.
    pub(crate) fn has_reports(&self, switch: &mut Switch) -> bool {
        let late = !self.late.is_empty() || !self.link_changes.is_empty();
        late || switch.function(self.function).has_events()
    }

    /// Takes the device's events, and reports those that are neither lost nor late; returns whether there were any.
    pub(crate) fn take_events(
        &mut self,
        switch: &mut Switch,
        now: u64,
        rates: Rates,
        decisions: &mut Decisions,
    ) -> bool {
        let mut any = false;
        while self.late.front().is_some_and(|(due, _)| *due <= now) {
            let Some((_, event)) = self.late.pop_front() else { break };
            any = true;
            self.pass_on(&event);
        }
        while let Some(event) = switch.function(self.function).next_event() {
            any = true;
            if self.events_to_lose > 0 {
                self.events_to_lose -= 1;
                continue;
            }
            let late = match &mut self.events_to_delay {
                (0, _) => rates.lateness(decisions),
                (count, by) => {
                    *count -= 1;
                    *by
                }
            };
            // Events stay in order.
            let due = now.saturating_add(late);
            let due = self.late.back().map_or(due, |(last, _)| due.max(*last));
            match due > now {
                true => self.late.push_back((due, event)),
                false => self.pass_on(&event),
            }
        }
        any
    }

    /// Forgets the late events of an object that is destroyed: a later one may get its number.
    pub(crate) fn forget_events_of(&mut self, subject: Subject) {
        self.late.retain(|(_, event)| event.subject() != subject);
    }

    /// When the next late event goes on.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.late.front().map(|(due, _)| *due)
    }

    fn pass_on(&mut self, event: &Event) {
        /// `MLX5_PORT_CHANGE_SUBTYPE_ACTIVE`.
        const SUB_ACTIVE: u8 = 4;
        self.subscriptions.retain(|subscription| !subscription.is_over());
        self.subscriptions.iter().for_each(|subscription| subscription.take(event));
        match (event.kind, event.subject()) {
            (event::PORT_CHANGE, _) => {
                self.link_changes.push(event.sub_type == SUB_ACTIVE);
            }
            (event::COMPLETION, Subject::Cq(number)) => {
                let channel = self.cqs.get(&number).and_then(|cq| cq.channel.as_ref());
                if let Some(Reports { to, user_handle }) = channel {
                    to.send(ib_uverbs_comp_event_desc { cq_handle: *user_handle }.as_bytes());
                }
            }
            (_, Subject::Cq(number)) => {
                report(self.cqs.get(&number).and_then(|cq| cq.events.as_ref()), IB_EVENT_CQ_ERR);
            }
            (_, Subject::Srq(number)) => {
                let srq = self.srqs.get(&number);
                report(srq.and_then(|srq| srq.events.as_ref()), IB_EVENT_SRQ_LIMIT_REACHED);
            }
            (kind, Subject::Qp(number)) => {
                let reported = match kind {
                    event::WQ_CATASTROPHIC => IB_EVENT_QP_FATAL,
                    event::WQ_INVALID_REQUEST => IB_EVENT_QP_REQ_ERR,
                    event::WQ_ACCESS_ERROR => IB_EVENT_QP_ACCESS_ERR,
                    event::LAST_WQE_REACHED => IB_EVENT_QP_LAST_WQE_REACHED,
                    _ => return,
                };
                let openers = self.qps.get(&number).into_iter().flat_map(|qp| qp.openers.values());
                openers.for_each(|events| report(events.as_ref(), reported));
            }
            _ => {}
        }
    }
}

/// A command whose input is the number of one object, at byte 8.
pub(crate) fn about(op: u16, number: u32) -> [u8; 16] {
    let mut command = [0; 16];
    command[..2].copy_from_slice(&op.to_be_bytes());
    command[8..12].copy_from_slice(&number.to_be_bytes());
    command
}

/// Sets the user context that sends a command, and owns what it creates.
pub(crate) fn set_uid(command: &mut [u8], uid: u16) {
    command[2..4].copy_from_slice(&uid.to_be_bytes());
}

/// Commands that destroy or release something.
const TAKES_AWAY: [u16; 26] = [
    opcode::DESTROY_UCTX,
    opcode::DESTROY_UMEM,
    opcode::DESTROY_RQT,
    opcode::DEALLOC_Q_COUNTER,
    opcode::DESTROY_GENERAL_OBJECT,
    opcode::DESTROY_MKEY,
    opcode::DESTROY_CQ,
    opcode::DESTROY_QP,
    opcode::DESTROY_SRQ,
    opcode::DESTROY_XRC_SRQ,
    opcode::DESTROY_RMP,
    opcode::DESTROY_RQ,
    opcode::DESTROY_SQ,
    opcode::DESTROY_TIR,
    opcode::DESTROY_TIS,
    opcode::DEALLOC_PD,
    opcode::DEALLOC_UAR,
    opcode::DEALLOC_XRCD,
    opcode::DEALLOC_TRANSPORT_DOMAIN,
    opcode::DEALLOC_MEMIC,
    opcode::DETACH_FROM_MCG,
    opcode::DESTROY_FLOW_TABLE,
    opcode::DESTROY_FLOW_GROUP,
    opcode::DELETE_FLOW_TABLE_ENTRY,
    opcode::TO_RST_QP,
    opcode::TO_ERR_QP,
];

/// Queues an asynchronous event.
pub(crate) fn report(reports: Option<&Reports>, event_type: u32) {
    if let Some(Reports { to, user_handle }) = reports {
        let event = ib_uverbs_async_event_desc { element: *user_handle, event_type, reserved: 0 };
        to.send(event.as_bytes());
    }
}

// `enum ib_event_type`.
const IB_EVENT_CQ_ERR: u32 = 0;
const IB_EVENT_QP_FATAL: u32 = 1;
pub(crate) const IB_EVENT_DEVICE_FATAL: u32 = 8;
pub(crate) const IB_EVENT_PORT_ACTIVE: u32 = 9;
pub(crate) const IB_EVENT_PORT_ERR: u32 = 10;
const IB_EVENT_QP_REQ_ERR: u32 = 2;
const IB_EVENT_QP_ACCESS_ERR: u32 = 3;
const IB_EVENT_SRQ_LIMIT_REACHED: u32 = 15;
const IB_EVENT_QP_LAST_WQE_REACHED: u32 = 16;
