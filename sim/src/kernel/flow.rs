//! Rules for raw packets: they lead packets to a queue pair, or drop them.
//!
//! Pairs with `ib_uverbs_ex_create_flow` and `hw/mlx5/fs.c`. Each priority has a table, and a packet that no entry
//! of a table takes goes on to the next.

use super::{FileId, Kernel, Method, Object, Switch, Write, destroying};
use crate::call::{Call, Result};
use crate::driver::{Driver, input};
use rustix::io::Errno;
use std::collections::BTreeMap;
use uverbs_uapi::flow::*;
use uverbs_uapi::mlx5::prm::flow::*;
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_OBJECT_FLOW};
use uverbs_uapi::write::{IB_USER_VERBS_CMD_FLAG_EXTENDED, IB_USER_VERBS_EX_CMD_CREATE_FLOW};
use zerocopy::{FromBytes, IntoBytes};

pub(super) const METHODS: &[Method] = &[destroying(UVERBS_OBJECT_FLOW, UVERBS_METHOD_FLOW_DESTROY)];

pub(super) const WRITES: &[Write] = &[Write {
    command: IB_USER_VERBS_EX_CMD_CREATE_FLOW | IB_USER_VERBS_CMD_FLAG_EXTENDED,
    run: create,
}];

/// The most specifications of a rule, and the last priority.
const MAX_SPECS: usize = 10;
const LAST_PRIORITY: u16 = 15;
/// The priority of rules for multicast packets alone: behind all others.
const MULTICAST_PRIORITY: u32 = 2 * (LAST_PRIORITY as u32 + 1);
/// log2 of the entries of a table, and the entries of a group.
const LOG_TABLE: u64 = 14;
const GROUP: u32 = 64;
/// Flow tags have 24 bits.
const TAGS: u32 = 1 << 24;

// `MLX5_FLOW_CONTEXT_ACTION_*`.
const ALLOW: u64 = 1;
const DROP: u64 = 2;
const FORWARD: u64 = 4;
/// `MLX5_FLOW_DESTINATION_TYPE_TIR`.
const TO_TIR: u64 = 2;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The direction of packets, as firmware numbers the types of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Receive = 0,
    Transmit = 1,
}

/// The tables of a device, by direction and priority.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    tables: BTreeMap<(Direction, u32), Table>,
}

#[derive(Debug)]
struct Table {
    number: u32,
    /// Masks by the number of their group.
    groups: BTreeMap<u32, Group>,
    entries: BTreeMap<u32, Entry>,
}

#[derive(Debug)]
struct Group {
    first: u32,
    mask: Vec<u8>,
}

/// An entry, of one rule or of several that match the same.
#[derive(Clone, Debug)]
struct Entry {
    value: Vec<u8>,
    act: Act,
    /// The TIRs that receive the packets, each with the number of its rules.
    tirs: BTreeMap<u32, usize>,
    /// Rules without a destination.
    others: usize,
}

/// The actions on a packet, beside its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Act {
    action: u64,
    tag: u32,
}

/// A rule that was made.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    place: (Direction, u32),
    index: u32,
    tir: Option<u32>,
}

/// The match and the actions of a rule.
struct Parsed {
    mask: Bits<fte_match_param, Vec<u8>>,
    value: Bits<fte_match_param, Vec<u8>>,
    tag: u32,
    drops: bool,
}

fn create(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let bytes = call.bytes(uverbs_uapi::device::UVERBS_ATTR_CORE_IN);
    let (request, specs) =
        ib_uverbs_create_flow::read_from_prefix(&bytes).map_err(|_| Errno::INVAL)?;
    let attr = request.flow_attr;
    if request.comp_mask != 0 {
        return Err(Errno::INVAL);
    }
    if !super::qp::has_raw_capability() {
        return Err(Errno::PERM);
    }
    let flags = ib_flow_flags::from_bits(attr.flags).ok_or(Errno::INVAL)?;
    let kind = ib_flow_attr_type(attr.r#type);
    let is_default = matches!(
        kind,
        ib_flow_attr_type::IB_FLOW_ATTR_ALL_DEFAULT | ib_flow_attr_type::IB_FLOW_ATTR_MC_DEFAULT
    );
    let specs = specs.get(..usize::from(attr.size)).ok_or(Errno::INVAL)?;
    if is_default && !flags.is_empty() || usize::from(attr.num_of_specs) > MAX_SPECS {
        return Err(Errno::INVAL);
    }
    let specs = split(specs, attr.num_of_specs.into())?;
    let number = kernel.qp(call.file, request.qp_handle)?;
    if !call.bytes(UVERBS_ATTR_UHW_IN).iter().all(|byte| *byte == 0) {
        return Err(Errno::OPNOTSUPP);
    }
    let (driver, switch) = kernel.driver(call.file)?;
    let qp = driver.qps.get(&number).ok_or(Errno::INVAL)?;
    let raw = qp.raw.clone().ok_or(Errno::INVAL)?;
    if attr.priority > LAST_PRIORITY {
        return Err(Errno::NOMEM);
    }
    if attr.port > 1 {
        return Err(Errno::INVAL);
    }
    match kind {
        ib_flow_attr_type::IB_FLOW_ATTR_NORMAL => {}
        // The device copies no packets.
        ib_flow_attr_type::IB_FLOW_ATTR_SNIFFER => return Err(Errno::OPNOTSUPP),
        // Drivers since Linux 6.16 look for such a rule beyond the end of its table.
        _ => return Err(Errno::INVAL),
    }
    let egress = flags.contains(ib_flow_flags::IB_FLOW_ATTR_FLAGS_EGRESS);
    let dont_trap = flags.contains(ib_flow_flags::IB_FLOW_ATTR_FLAGS_DONT_TRAP);
    let parsed = parse(&specs)?;
    if dont_trap && !parsed.drops {
        // The device has no `nic_rx_multi_path_tirs`.
        return Err(Errno::OPNOTSUPP);
    }
    let priority = match is_multicast_only(&specs) && !dont_trap {
        true => MULTICAST_PRIORITY,
        false => 2 * u32::from(attr.priority) + u32::from(!dont_trap),
    };
    let tir = if egress || parsed.drops { None } else { Some(raw.tir().ok_or(Errno::INVAL)?) };
    let action = match (parsed.drops, egress) {
        (true, _) => DROP,
        (false, true) => ALLOW,
        (false, false) => FORWARD,
    };
    let act = Act { action, tag: parsed.tag };
    let direction = if egress { Direction::Transmit } else { Direction::Receive };
    let rule = driver.add_rule(switch, (direction, priority), &parsed, act, tir)?;
    let flow_handle = kernel.add(call.file, Object::Flow(rule), &[request.qp_handle])?;
    call.respond(&ib_uverbs_create_flow_resp { comp_mask: 0, flow_handle });
    Ok(())
}

pub(super) fn destroy(kernel: &mut Kernel, file: FileId, rule: &Rule) -> Result<()> {
    let (driver, switch) = kernel.driver(file)?;
    driver.remove_rule(switch, rule)
}

/// The specifications, each with its header.
fn split(mut bytes: &[u8], count: usize) -> Result<Vec<&[u8]>> {
    let mut specs = Vec::new();
    for _ in 0..count {
        let (header, _) =
            ib_uverbs_flow_spec_hdr::read_from_prefix(bytes).map_err(|_| Errno::INVAL)?;
        let size = usize::from(header.size);
        if size < size_of::<ib_uverbs_flow_spec_hdr>() || header.reserved != 0 {
            return Err(Errno::INVAL);
        }
        let (spec, rest) = bytes.split_at_checked(size).ok_or(Errno::INVAL)?;
        specs.push(spec);
        bytes = rest;
    }
    if bytes.is_empty() { Ok(specs) } else { Err(Errno::INVAL) }
}

fn kind_of(spec: &[u8]) -> ib_flow_spec_type {
    let header = ib_uverbs_flow_spec_hdr::read_from_prefix(spec);
    ib_flow_spec_type(header.map_or(0, |(header, _)| header.r#type))
}

/// A specification of a known layout.
fn read<T: FromBytes>(spec: &[u8]) -> Result<T> {
    T::read_from_bytes(spec).map_err(|_| Errno::INVAL)
}

/// As `flow_is_multicast_only`: by the first specification alone.
fn is_multicast_only(specs: &[&[u8]]) -> bool {
    let Some(spec) = specs.first() else { return false };
    match kind_of(spec) {
        ib_flow_spec_type::IB_FLOW_SPEC_IPV4 => read::<ib_uverbs_flow_spec_ipv4>(spec)
            .is_ok_and(|spec| spec.val.dst_ip.as_bytes()[0] & 0xf0 == 0xe0),
        ib_flow_spec_type::IB_FLOW_SPEC_ETH => read::<ib_uverbs_flow_spec_eth>(spec)
            .is_ok_and(|spec| spec.mask.dst_mac[0] & spec.val.dst_mac[0] & 1 == 1),
        _ => false,
    }
}

/// The headers of a mask or of a value.
type Headers<'h> = Bits<fte_match_set_lyr_2_4, &'h mut [u8]>;

fn set_eth(headers: &mut Headers<'_>, filter: &ib_uverbs_flow_eth_filter, has_tag: bool) {
    let word = |mac: [u8; 6]| u32::from_be_bytes([mac[0], mac[1], mac[2], mac[3]]);
    let half = |mac: [u8; 6]| u16::from_be_bytes([mac[4], mac[5]]);
    let tag = filter.vlan_tag.get();
    for (field, value) in [
        (fte_match_set_lyr_2_4::dmac_47_16, word(filter.dst_mac).into()),
        (fte_match_set_lyr_2_4::dmac_15_0, half(filter.dst_mac).into()),
        (fte_match_set_lyr_2_4::smac_47_16, word(filter.src_mac).into()),
        (fte_match_set_lyr_2_4::smac_15_0, half(filter.src_mac).into()),
        (fte_match_set_lyr_2_4::ethertype, u64::from(filter.ether_type.get())),
    ] {
        headers.set(field, value);
    }
    if has_tag {
        for (field, value) in [
            (fte_match_set_lyr_2_4::cvlan_tag, 1),
            (fte_match_set_lyr_2_4::first_vid, u64::from(tag & 0xfff)),
            (fte_match_set_lyr_2_4::first_cfi, u64::from(tag >> 12 & 1)),
            (fte_match_set_lyr_2_4::first_prio, u64::from(tag >> 13)),
        ] {
            headers.set(field, value);
        }
    }
}

fn set_tos(headers: &mut Headers<'_>, tos: u8) {
    headers.set(fte_match_set_lyr_2_4::ip_ecn, (tos & 3).into());
    headers.set(fte_match_set_lyr_2_4::ip_dscp, (tos >> 2).into());
}

/// An IPv4 address in the last four of 16 bytes.
fn as_ipv4(address: &[u8]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[12..].copy_from_slice(address);
    bytes
}

fn set_addresses(headers: &mut Headers<'_>, src: &[u8; 16], dst: &[u8; 16]) {
    headers.set_span(fte_match_set_lyr_2_4::src_ipv4_src_ipv6, src);
    headers.set_span(fte_match_set_lyr_2_4::dst_ipv4_dst_ipv6, dst);
}

impl Parsed {
    /// Does the same with the headers of the mask and those of the value.
    fn both(&mut self, set: impl Fn(&mut Headers<'_>, bool)) {
        set(&mut self.mask.sub_mut(fte_match_param::outer_headers), true);
        set(&mut self.value.sub_mut(fte_match_param::outer_headers), false);
    }

    /// Matches the protocol, unless another specification says otherwise.
    fn protocol(&mut self, mask: u8, value: u8) -> Result<()> {
        if mask == 0 {
            return Ok(());
        }
        let of = |bits: &Bits<fte_match_param, Vec<u8>>| {
            bits.sub(fte_match_param::outer_headers).get(fte_match_set_lyr_2_4::ip_protocol) as u8
        };
        let known = (of(&self.mask), of(&self.value));
        if known.0 != 0 && known != (mask, value) {
            return Err(Errno::INVAL);
        }
        self.both(|headers, is_mask| {
            let byte = if is_mask { mask } else { value };
            headers.set(fte_match_set_lyr_2_4::ip_protocol, byte.into());
        });
        Ok(())
    }

    fn ethertype(&mut self, value: u16) {
        self.both(|headers, is_mask| {
            let value = if is_mask { 0xffff } else { value };
            headers.set(fte_match_set_lyr_2_4::ethertype, value.into());
        });
    }

    fn eth(&mut self, spec: &ib_uverbs_flow_spec_eth) {
        let has_tag = spec.mask.vlan_tag.get() != 0;
        self.both(|headers, is_mask| {
            set_eth(headers, if is_mask { &spec.mask } else { &spec.val }, has_tag);
        });
    }

    fn ipv4(&mut self, spec: &ib_uverbs_flow_spec_ipv4) -> Result<()> {
        if spec.mask.ttl != 0 || spec.mask.flags != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.ethertype(ETH_P_IP);
        self.both(|headers, is_mask| {
            let filter = if is_mask { &spec.mask } else { &spec.val };
            let address = |address: &uverbs_uapi::endian::Be32| as_ipv4(address.as_bytes());
            set_addresses(headers, &address(&filter.src_ip), &address(&filter.dst_ip));
            set_tos(headers, filter.tos);
        });
        self.protocol(spec.mask.proto, spec.val.proto)
    }

    fn ipv6(&mut self, spec: &ib_uverbs_flow_spec_ipv6) -> Result<()> {
        if spec.mask.hop_limit != 0 || spec.mask.reserved != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        self.ethertype(ETH_P_IPV6);
        self.both(|headers, is_mask| {
            let filter = if is_mask { &spec.mask } else { &spec.val };
            set_addresses(headers, &filter.src_ip, &filter.dst_ip);
            set_tos(headers, filter.traffic_class);
        });
        for (bits, filter) in [(&mut self.mask, &spec.mask), (&mut self.value, &spec.val)] {
            let mut misc = bits.sub_mut(fte_match_param::misc_parameters);
            let label = filter.flow_label.get() & 0xf_ffff;
            misc.set(fte_match_set_misc::outer_ipv6_flow_label, label.into());
        }
        self.protocol(spec.mask.next_hdr, spec.val.next_hdr)
    }

    fn ports(&mut self, spec: &ib_uverbs_flow_spec_tcp_udp, protocol: u8) -> Result<()> {
        self.protocol(0xff, protocol)?;
        let (src, dst) = match protocol {
            TCP => (fte_match_set_lyr_2_4::tcp_sport, fte_match_set_lyr_2_4::tcp_dport),
            _ => (fte_match_set_lyr_2_4::udp_sport, fte_match_set_lyr_2_4::udp_dport),
        };
        self.both(|headers, is_mask| {
            let filter = if is_mask { &spec.mask } else { &spec.val };
            headers.set(src, u64::from(filter.src_port.get()));
            headers.set(dst, u64::from(filter.dst_port.get()));
        });
        Ok(())
    }
}

/// As `is_valid_ethertype`: an IP header of the type that the Ethernet header says.
fn check_ethertype(specs: &[&[u8]]) -> Result<()> {
    let (mut said, mut needed) = (None, None);
    for spec in specs {
        match kind_of(spec) {
            ib_flow_spec_type::IB_FLOW_SPEC_ETH => {
                let eth: ib_uverbs_flow_spec_eth = read(spec)?;
                if eth.mask.ether_type.get() != 0 {
                    said = Some((eth.mask.ether_type.get(), eth.val.ether_type.get()));
                }
            }
            ib_flow_spec_type::IB_FLOW_SPEC_IPV4 => needed = Some(ETH_P_IP),
            ib_flow_spec_type::IB_FLOW_SPEC_IPV6 => needed = Some(ETH_P_IPV6),
            _ => {}
        }
    }
    match (said, needed) {
        (Some(said), Some(needed)) if said != (0xffff, needed) => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

fn parse(specs: &[&[u8]]) -> Result<Parsed> {
    check_ethertype(specs)?;
    let fresh = || Bits::<fte_match_param, _>::new(vec![0; fte_match_param::SIZE]);
    let mut parsed = Parsed { mask: fresh(), value: fresh(), tag: 0, drops: false };
    for spec in specs {
        match kind_of(spec) {
            ib_flow_spec_type::IB_FLOW_SPEC_ETH => parsed.eth(&read(spec)?),
            ib_flow_spec_type::IB_FLOW_SPEC_IPV4 => parsed.ipv4(&read(spec)?)?,
            ib_flow_spec_type::IB_FLOW_SPEC_IPV6 => parsed.ipv6(&read(spec)?)?,
            ib_flow_spec_type::IB_FLOW_SPEC_TCP => parsed.ports(&read(spec)?, TCP)?,
            ib_flow_spec_type::IB_FLOW_SPEC_UDP => parsed.ports(&read(spec)?, UDP)?,
            ib_flow_spec_type::IB_FLOW_SPEC_ACTION_TAG => {
                let spec: ib_uverbs_flow_spec_action_tag = read(spec)?;
                if spec.tag_id >= TAGS {
                    return Err(Errno::INVAL);
                }
                parsed.tag = spec.tag_id;
            }
            ib_flow_spec_type::IB_FLOW_SPEC_ACTION_DROP => parsed.drops = true,
            // Tunnels and counters, which the device does not match or have.
            ib_flow_spec_type::IB_FLOW_SPEC_ESP
            | ib_flow_spec_type::IB_FLOW_SPEC_VXLAN_TUNNEL
            | ib_flow_spec_type::IB_FLOW_SPEC_GRE
            | ib_flow_spec_type::IB_FLOW_SPEC_MPLS => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        }
    }
    Ok(parsed)
}

impl Entry {
    fn users(&self) -> usize {
        self.others + self.tirs.values().sum::<usize>()
    }

    fn add(&mut self, tir: Option<u32>) {
        match tir {
            Some(tir) => *self.tirs.entry(tir).or_default() += 1,
            None => self.others += 1,
        }
    }

    fn remove(&mut self, tir: Option<u32>) {
        match tir.and_then(|tir| Some((tir, self.tirs.get_mut(&tir)?))) {
            Some((tir, 1)) => drop(self.tirs.remove(&tir)),
            Some((_, users)) => *users -= 1,
            None => self.others -= 1,
        }
    }
}

impl Driver {
    /// The priority of the table behind this one in the same direction, and its number.
    fn next_table(&self, (direction, priority): (Direction, u32)) -> Option<u32> {
        let behind = (direction, priority + 1)..=(direction, u32::MAX);
        self.flows.tables.range(behind).next().map(|(_, table)| table.number)
    }

    /// The place of the table in front of this one.
    fn table_before(&self, (direction, priority): (Direction, u32)) -> Option<(Direction, u32)> {
        let before = (direction, 0)..(direction, priority);
        self.flows.tables.range(before).next_back().map(|(place, _)| *place)
    }

    /// Has packets go from the table in front of a place to `next`, or begin there.
    fn lead_to(
        &mut self,
        switch: &mut Switch,
        place: (Direction, u32),
        next: Option<u32>,
    ) -> Result<()> {
        const DISCONNECT: u64 = 1;
        const MISS_TABLE: u64 = 1;
        let direction = place.0;
        let Some(before) = self.table_before(place) else {
            let mut command = input::<set_flow_table_root_in>(opcode::SET_FLOW_TABLE_ROOT);
            command.set(set_flow_table_root_in::table_type, direction as u64);
            match next {
                Some(next) => command.set(set_flow_table_root_in::table_id, next.into()),
                None => command.set(set_flow_table_root_in::op_mod, DISCONNECT),
            }
            return self.execute(switch, &command.into_inner()).map(drop);
        };
        let number = self.flows.tables.get(&before).ok_or(Errno::INVAL)?.number;
        let mut command = input::<modify_flow_table_in>(opcode::MODIFY_FLOW_TABLE);
        command.set(modify_flow_table_in::modify_field_select, MISS_TABLE);
        command.set(modify_flow_table_in::table_type, direction as u64);
        command.set(modify_flow_table_in::table_id, number.into());
        let mut context = command.sub_mut(modify_flow_table_in::flow_table_context);
        context.set(flow_table_context::table_miss_action, next.is_some().into());
        context.set(flow_table_context::table_miss_id, next.unwrap_or(0).into());
        self.execute(switch, &command.into_inner()).map(drop)
    }

    /// The table of a place, which is made if there is none.
    fn table(&mut self, switch: &mut Switch, place: (Direction, u32)) -> Result<u32> {
        if let Some(table) = self.flows.tables.get(&place) {
            return Ok(table.number);
        }
        let next = self.next_table(place);
        let mut command = input::<create_flow_table_in>(opcode::CREATE_FLOW_TABLE);
        command.set(create_flow_table_in::table_type, place.0 as u64);
        let mut context = command.sub_mut(create_flow_table_in::flow_table_context);
        context.set(flow_table_context::log_size, LOG_TABLE);
        context.set(flow_table_context::table_miss_action, next.is_some().into());
        context.set(flow_table_context::table_miss_id, next.unwrap_or(0).into());
        let number = Driver::created(&self.execute(switch, &command.into_inner())?);
        self.lead_to(switch, place, Some(number))?;
        let table = Table { number, groups: BTreeMap::new(), entries: BTreeMap::new() };
        self.flows.tables.insert(place, table);
        Ok(number)
    }

    /// Removes the table of a place if it has no entries.
    fn put_table(&mut self, switch: &mut Switch, place: (Direction, u32)) -> Result<()> {
        let Some(table) = self.flows.tables.get(&place) else { return Ok(()) };
        if !table.entries.is_empty() {
            return Ok(());
        }
        let (number, groups) = (table.number, table.groups.keys().copied().collect::<Vec<_>>());
        self.lead_to(switch, place, self.next_table(place))?;
        for group in groups {
            let mut command = input::<destroy_flow_group_in>(opcode::DESTROY_FLOW_GROUP);
            command.set(destroy_flow_group_in::table_type, place.0 as u64);
            command.set(destroy_flow_group_in::table_id, number.into());
            command.set(destroy_flow_group_in::group_id, group.into());
            self.execute(switch, &command.into_inner())?;
        }
        let mut command = input::<destroy_flow_table_in>(opcode::DESTROY_FLOW_TABLE);
        command.set(destroy_flow_table_in::table_type, place.0 as u64);
        command.set(destroy_flow_table_in::table_id, number.into());
        self.execute(switch, &command.into_inner())?;
        self.flows.tables.remove(&place);
        Ok(())
    }

    /// A free index for an entry with this mask, in a group that is made if there is none.
    fn free_index(
        &mut self,
        switch: &mut Switch,
        place: (Direction, u32),
        mask: &[u8],
    ) -> Result<u32> {
        let table = self.flows.tables.get(&place).ok_or(Errno::INVAL)?;
        let groups = table.groups.values().filter(|group| group.mask == mask);
        let mut indices = groups.flat_map(|group| group.first..group.first + GROUP);
        if let Some(index) = indices.find(|index| !table.entries.contains_key(index)) {
            return Ok(index);
        }
        let is_free = |first: &u32| table.groups.values().all(|group| group.first != *first);
        let mut firsts = (0..1 << LOG_TABLE).step_by(GROUP as usize);
        let first = firsts.find(is_free).ok_or(Errno::NOMEM)?;
        let mut command = input::<create_flow_group_in>(opcode::CREATE_FLOW_GROUP);
        command.set(create_flow_group_in::table_type, place.0 as u64);
        command.set(create_flow_group_in::table_id, table.number.into());
        command.set(create_flow_group_in::start_flow_index, first.into());
        command.set(create_flow_group_in::end_flow_index, (first + GROUP - 1).into());
        command.set_sub(create_flow_group_in::match_criteria, mask);
        let group = Driver::created(&self.execute(switch, &command.into_inner())?);
        let table = self.flows.tables.get_mut(&place).ok_or(Errno::INVAL)?;
        table.groups.insert(group, Group { first, mask: mask.to_vec() });
        Ok(first)
    }

    fn add_rule(
        &mut self,
        switch: &mut Switch,
        place: (Direction, u32),
        parsed: &Parsed,
        act: Act,
        tir: Option<u32>,
    ) -> Result<Rule> {
        let number = self.table(switch, place)?;
        let added = self.add_entry(switch, place, number, parsed, act, tir);
        if added.is_err() {
            self.put_table(switch, place)?;
        }
        Ok(Rule { place, index: added?, tir })
    }

    fn add_entry(
        &mut self,
        switch: &mut Switch,
        place: (Direction, u32),
        number: u32,
        parsed: &Parsed,
        act: Act,
        tir: Option<u32>,
    ) -> Result<u32> {
        let (mask, value) = (parsed.mask.bytes(), parsed.value.bytes());
        let table = self.flows.tables.get(&place).ok_or(Errno::INVAL)?;
        let of_mask = |index: u32| {
            let mut groups = table.groups.values();
            groups.any(|group| group.first == index / GROUP * GROUP && group.mask == mask)
        };
        let same =
            table.entries.iter().find(|(index, entry)| entry.value == value && of_mask(**index));
        let (index, mut entry) = match same {
            // Another rule matches the same and does something else with it.
            Some((_, entry)) if entry.act != act => return Err(Errno::EXIST),
            Some((index, entry)) => (*index, entry.clone()),
            None => {
                let entry = Entry { value: value.to_vec(), act, tirs: BTreeMap::new(), others: 0 };
                (self.free_index(switch, place, mask)?, entry)
            }
        };
        entry.add(tir);
        self.execute(switch, &set_entry(place.0, number, index, &entry))?;
        let table = self.flows.tables.get_mut(&place).ok_or(Errno::INVAL)?;
        table.entries.insert(index, entry);
        Ok(index)
    }

    fn remove_rule(&mut self, switch: &mut Switch, rule: &Rule) -> Result<()> {
        let Rule { place, index, tir } = *rule;
        let table = self.flows.tables.get(&place).ok_or(Errno::INVAL)?;
        let number = table.number;
        let mut entry = table.entries.get(&index).ok_or(Errno::INVAL)?.clone();
        entry.remove(tir);
        let is_gone = entry.users() == 0;
        let command = match is_gone {
            true => {
                let mut command = input::<delete_fte_in>(opcode::DELETE_FLOW_TABLE_ENTRY);
                command.set(delete_fte_in::table_type, place.0 as u64);
                command.set(delete_fte_in::table_id, number.into());
                command.set(delete_fte_in::flow_index, index.into());
                command.into_inner()
            }
            false => set_entry(place.0, number, index, &entry),
        };
        self.execute(switch, &command)?;
        let table = self.flows.tables.get_mut(&place).ok_or(Errno::INVAL)?;
        match is_gone {
            true => drop(table.entries.remove(&index)),
            false => drop(table.entries.insert(index, entry)),
        }
        self.put_table(switch, place)
    }
}

/// SET_FLOW_TABLE_ENTRY.
fn set_entry(direction: Direction, table: u32, index: u32, entry: &Entry) -> Vec<u8> {
    let mut command = input::<set_fte_in>(opcode::SET_FLOW_TABLE_ENTRY);
    command.set(set_fte_in::table_type, direction as u64);
    command.set(set_fte_in::table_id, table.into());
    command.set(set_fte_in::flow_index, index.into());
    let mut context = command.sub_mut(set_fte_in::flow_context);
    context.set(flow_context::flow_tag, entry.act.tag.into());
    context.set(flow_context::action, entry.act.action);
    context.set(flow_context::destination_list_size, entry.tirs.len() as u64);
    context.set_sub(flow_context::match_value, &entry.value);
    let mut command = command.into_inner();
    for tir in entry.tirs.keys() {
        let mut destination = Bits::<dest_format, _>::new(vec![0; dest_format::SIZE]);
        destination.set(dest_format::destination_type, TO_TIR);
        destination.set(dest_format::destination_id, (*tir).into());
        command.extend(destination.into_inner());
    }
    command
}
