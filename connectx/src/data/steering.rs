//! Runs frames through flow tables.
//!
//! Pairs with [`crate::object::flow_table`] and [`super::raw`].

use crate::device::Device;
use crate::object::flow_table::{FlowDestination, MATCH_BYTES};

/// Cost of comparing a frame with one entry, in steps.
const ENTRY_STEPS: u64 = 4;

/// The decision of the flow tables about a frame.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SteeringResult {
    /// TIRs that receive it.
    pub(crate) tirs: Vec<u32>,
    /// `flow_tag` in its CQE.
    pub(crate) flow_tag: u32,
    /// Whether it is dropped.
    pub(crate) dropped: bool,
}

impl Device {
    /// Runs a frame of `len` bytes, given as match parameters, through the tables of a type.
    pub(crate) fn steer(
        &mut self,
        table_type: u64,
        headers: &[u8; MATCH_BYTES],
        len: usize,
    ) -> SteeringResult {
        let mut result = SteeringResult::default();
        let Some(root) = self.objects.flow_roots.tables.get(&table_type) else { return result };
        let mut tables = vec![*root];
        let mut counters = vec![];
        // Tables may form a circle, so a frame passes at most as many tables as there are.
        let mut left = self.objects.flow_tables.len();
        while let Some(number) = tables.pop() {
            let Ok(table) = self.objects.flow_tables.get(number) else { continue };
            if left == 0 {
                log::warn!("flow tables form a circle through {number}");
                break;
            }
            left -= 1;
            // A guest with too many entries loses its own frames instead of delaying other guests.
            if !self.objects.cost.add_steps(ENTRY_STEPS * table.len() as u64) {
                log::debug!("a frame ends at flow table {number}, after too many entries");
                result.dropped = true;
                break;
            }
            let Some(entry) = table.find(headers) else {
                tables.extend(table.miss);
                continue;
            };
            counters.extend(&entry.counters);
            if entry.drops() {
                result.dropped = true;
                continue;
            }
            if entry.flow_tag != 0 {
                result.flow_tag = entry.flow_tag;
            }
            for to in &entry.to {
                match to {
                    FlowDestination::Table(table) => tables.push(*table),
                    // A TIR receives the frame once, even if several entries lead to it.
                    FlowDestination::Tir(tir) if result.tirs.contains(tir) => {}
                    FlowDestination::Tir(tir) => result.tirs.push(*tir),
                }
            }
        }
        for counter in counters {
            if let Ok(counter) = self.objects.flow_counters.get_mut(counter) {
                counter.add(1, len);
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use uverbs_uapi::mlx5::prm::flow::{
        create_flow_group_in, create_flow_table_in, create_flow_table_out, delete_fte_in,
        flow_context, fte_match_param, fte_match_set_lyr_2_4, query_flow_counter_in,
        set_flow_table_root_in, set_fte_in,
    };
    use uverbs_uapi::mlx5::prm::vport::traffic_counter;
    use uverbs_uapi::mlx5::prm::{Bits, Layout};

    use super::*;
    use crate::cmd::flow_counter::{dealloc_flow_counter, query_flow_counter};
    use crate::cmd::flow_table::{
        create_flow_group, create_flow_table, delete_fte, set_flow_table_root, set_fte,
    };
    use crate::object::flow_table::NIC_TRANSMIT;
    use crate::options::Options;
    use crate::port::Traffic;

    const DROP: u64 = 2;
    const COUNT: u64 = 8;
    const USER: u32 = 7;

    /// A table with one entry for UDP port 7 that counts and drops.
    fn device() -> (Device, u32, u32) {
        let mut device = Device::new(Options::default(), 1);
        let counter = device.objects.flow_counters.insert_owned(USER, Traffic::default()).unwrap();
        let mut input = Bits::<create_flow_table_in, _>::new(vec![0; create_flow_table_in::SIZE]);
        input.set(create_flow_table_in::table_type, NIC_TRANSMIT);
        let out = create_flow_table(&mut device, USER, &input.into_inner()).unwrap();
        let table =
            Bits::<create_flow_table_out, _>::new(out).get32(create_flow_table_out::table_id);
        let mut input = Bits::<create_flow_group_in, _>::new(vec![0; create_flow_group_in::SIZE]);
        input.set(create_flow_group_in::table_type, NIC_TRANSMIT);
        input.set(create_flow_group_in::table_id, table.into());
        input
            .sub_mut(create_flow_group_in::match_criteria)
            .sub_mut(fte_match_param::outer_headers)
            .set(fte_match_set_lyr_2_4::udp_dport, 0xffff);
        create_flow_group(&mut device, USER, &input.into_inner()).unwrap();
        set_fte(&mut device, USER, &entry(table, &[counter])).unwrap();
        let mut input =
            Bits::<set_flow_table_root_in, _>::new(vec![0; set_flow_table_root_in::SIZE]);
        input.set(set_flow_table_root_in::table_type, NIC_TRANSMIT);
        input.set(set_flow_table_root_in::table_id, table.into());
        set_flow_table_root(&mut device, USER, &input.into_inner()).unwrap();
        (device, table, counter)
    }

    fn entry(table: u32, counters: &[u32]) -> Vec<u8> {
        let mut input = Bits::<set_fte_in, _>::new(vec![0; set_fte_in::SIZE]);
        input.set(set_fte_in::table_type, NIC_TRANSMIT);
        input.set(set_fte_in::table_id, table.into());
        let mut context = input.sub_mut(set_fte_in::flow_context);
        context.set(flow_context::action, DROP | COUNT);
        context.set(flow_context::flow_counter_list_size, counters.len() as u64);
        context
            .sub_mut(flow_context::match_value)
            .sub_mut(fte_match_param::outer_headers)
            .set(fte_match_set_lyr_2_4::udp_dport, 7);
        let mut input = input.into_inner();
        for counter in counters {
            input.extend(counter.to_be_bytes());
            input.extend([0; 4]);
        }
        input
    }

    fn headers(port: u64) -> [u8; MATCH_BYTES] {
        let mut headers = Bits::<fte_match_param, _>::new([0; MATCH_BYTES]);
        headers.sub_mut(fte_match_param::outer_headers).set(fte_match_set_lyr_2_4::udp_dport, port);
        headers.into_inner()
    }

    #[test]
    fn frames_of_a_flow_are_counted_and_dropped() {
        let (mut device, _, counter) = device();
        assert!(device.steer(NIC_TRANSMIT, &headers(7), 60).dropped);
        assert!(device.steer(NIC_TRANSMIT, &headers(7), 40).dropped);
        assert!(!device.steer(NIC_TRANSMIT, &headers(8), 40).dropped);
        assert!(!device.steer(0, &headers(7), 40).dropped, "another direction");
        let counted = device.objects.flow_counters.get(counter).unwrap();
        assert_eq!((counted.packets, counted.octets), (2, 100));
    }

    /// The lookup compares entries one by one, and a guest may have many.
    #[test]
    fn a_frame_past_the_cost_limit_is_dropped() {
        let (mut device, ..) = device();
        assert!(!device.steer(NIC_TRANSMIT, &headers(8), 50).dropped);
        while device.objects.cost.add_steps(1) {}
        assert!(device.steer(NIC_TRANSMIT, &headers(8), 50).dropped);
        assert!(device.take_cost() > 0);
        assert!(!device.steer(NIC_TRANSMIT, &headers(8), 50).dropped);
        assert_eq!(device.take_cost(), ENTRY_STEPS);
    }

    #[test]
    fn flow_counters_are_cleared_all_or_none() {
        let (mut device, _, counter) = device();
        device.steer(NIC_TRANSMIT, &headers(7), 60);
        let mut query = |count: u64, clear: u64| {
            let mut input =
                Bits::<query_flow_counter_in, _>::new(vec![0; query_flow_counter_in::SIZE]);
            input.set(query_flow_counter_in::flow_counter_id, counter.into());
            input.set(query_flow_counter_in::num_of_counters, count);
            input.set(query_flow_counter_in::clear, clear);
            let out = query_flow_counter(&mut device, USER, &input.into_inner()).ok()?;
            let entry = Bits::<traffic_counter, _>::new(&out[16..]);
            Some(entry.get(traffic_counter::packets))
        };
        assert_eq!(query(2, 1), None);
        assert_eq!(query(1, 1), Some(1));
        assert_eq!(query(1, 0), Some(0));
    }

    #[test]
    fn a_flow_counter_in_use_is_not_freed() {
        let (mut device, table, counter) = device();
        let mut number = vec![0; 16];
        number[8..12].copy_from_slice(&counter.to_be_bytes());
        assert!(dealloc_flow_counter(&mut device, USER, &number).is_err(), "held");
        assert!(set_fte(&mut device, USER + 1, &entry(table, &[counter])).is_err(), "another's");
        assert!(set_fte(&mut device, USER, &entry(table, &[])).is_err(), "counts by nothing");
        // Setting the same entry again replaces it, and holds the counter once.
        set_fte(&mut device, USER, &entry(table, &[counter])).unwrap();
        let mut input = Bits::<delete_fte_in, _>::new(vec![0; delete_fte_in::SIZE]);
        input.set(delete_fte_in::table_type, NIC_TRANSMIT);
        input.set(delete_fte_in::table_id, table.into());
        delete_fte(&mut device, USER, &input.into_inner()).unwrap();
        dealloc_flow_counter(&mut device, USER, &number).unwrap();
    }
}
