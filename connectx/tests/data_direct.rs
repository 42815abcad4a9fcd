//! A data-direct function: its identifier, and the mkeys by which regions reach memory through it.
//!
//! The mkeys are those of `mlx5_data_direct_resources` and of `reg_user_mr_dmabuf_by_data_direct` in mlx5_ib.

mod driver;

use driver::pair::{Pair, code};
use driver::{CommandError, Driver};
use uverbs_connectx::function::Region;
use uverbs_connectx::options::Options;
use uverbs_uapi::mlx5::prm::cmd::{query_vuid_in, query_vuid_out};
use uverbs_uapi::mlx5::prm::hca_cap::{cmd_hca_cap, cmd_hca_cap_2};
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, create_mkey_out, destroy_mkey_in, mkc};
use uverbs_uapi::mlx5::prm::object::alloc_pd_out;
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, opcode};

const BAD_OPERATION: u8 = 0x2;
const BAD_PARAMETER: u8 = 0x3;
const BAD_RESOURCE: u8 = 0x5;
const RESOURCE_BUSY: u8 = 0x6;

const PHYSICAL: u64 = 0;
const KSM: u64 = 3;
const CROSSING: u64 = 6;

/// The syndrome of a peer's refusal.
const REMOTE_ACCESS: u8 = 0x13;
const DONE: (u8, u8) = (code::REQUEST, 0);
const REFUSED: (u8, u8) = (code::REQUEST_ERROR, REMOTE_ACCESS);

const RIGHTS: [Field<mkc>; 4] = [mkc::lr, mkc::lw, mkc::rr, mkc::rw];

fn options() -> Options {
    Options { data_direct: true, ..Options::default() }
}

/// An mkey that the kernel creates in `pd`.
fn mkey(
    driver: &mut Driver,
    pd: u32,
    direct: bool,
    fields: &[(Field<mkc>, u64)],
    list: &[u8],
) -> Result<u32, CommandError> {
    let octowords = (list.len() / 16) as u64;
    let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
    input.set(create_mkey_in::data_direct, direct.into());
    input.set(create_mkey_in::translations_octword_actual_size, octowords);
    let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
    RIGHTS.into_iter().for_each(|right| context.set(right, 1));
    context.set(mkc::qpn, 0xff_ffff);
    context.set(mkc::pd, pd.into());
    context.set(mkc::translations_octword_size, octowords);
    for (field, value) in fields {
        context.set(*field, *value);
    }
    let mut input = input.into_inner();
    input.extend(list);
    let out = driver.run_command(opcode::CREATE_MKEY, &input)?;
    Ok(Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index) << 8)
}

fn mode(mode: u64) -> [(Field<mkc>, u64); 2] {
    [(mkc::access_mode_1_0, mode & 3), (mkc::access_mode_4_2, mode >> 2)]
}

/// The driver's PD, its key of all memory, and the key of a region of two pages that begins at `IOVA`.
struct Direct {
    pd: u32,
    all: u32,
    crossed: u32,
    key: u32,
}

const IOVA: u64 = 0x40_0000;

impl Direct {
    fn new(p: &mut Pair) -> Direct {
        let driver = &mut p.driver;
        let out = driver.run_command(opcode::ALLOC_PD, &[0; 16]).unwrap();
        let pd = Bits::<alloc_pd_out, _>::new(out).get32(alloc_pd_out::pd);
        let all = mkey(driver, pd, true, &[(mkc::length64, 1)], &[]).unwrap();
        // The second page first.
        let mut list = Vec::new();
        for page in [p.to, p.from] {
            list.extend(u64::from(all).to_be_bytes());
            list.extend(page.to_be_bytes());
        }
        let mut fields = mode(KSM).to_vec();
        fields.extend([(mkc::start_addr, IOVA), (mkc::len, 8192), (mkc::log_page_size, 12)]);
        let crossed = mkey(driver, pd, false, &fields, &list).unwrap();
        let own = driver.pd;
        let mut fields = mode(CROSSING).to_vec();
        fields.extend([(mkc::len, IOVA + 8192), (mkc::translations_octword_size, crossed.into())]);
        let key = mkey(driver, own, false, &fields, &[]).unwrap();
        Direct { pd, all, crossed, key }
    }
}

/// Writes eight bytes of the memory to send from to an address, and tells the outcome. A failure ends the pair.
fn write(p: &mut Pair, index: u64, key: u32, address: u64) -> (u8, u8) {
    let segments = [Pair::remote(address, key), p.local(8)].concat();
    p.driver.post_send(&mut p.a, code::WRITE, 0, &segments);
    let (code, cqe) = p.driver.cqe(p.sent, index);
    (code, if code == code::REQUEST_ERROR { cqe[55] } else { 0 })
}

/// The commands of the data-direct function's driver when it binds.
fn bind(driver: &mut Driver, on: bool) {
    driver.fabric.function(0).write(Region::DataDirect, 4, &[if on { 6 } else { 0 }, 0]);
}

#[test]
fn identifier_is_that_of_the_vital_product_data() {
    let mut driver = Driver::with(options());
    let mut input = Bits::<query_vuid_in, _>::new(vec![0; query_vuid_in::SIZE]);
    input.set(query_vuid_in::data_direct, 1);
    let out = driver.run_command(opcode::QUERY_VUID, input.bytes()).unwrap();
    assert_eq!(Bits::<query_vuid_out, _>::new(&out[..]).get(query_vuid_out::num_of_entries), 1);
    let vuid = out[query_vuid_out::SIZE..].split(|byte| *byte == 0).next().unwrap();
    assert_eq!(vuid, options().data_direct_vuid().as_bytes());
    // The function itself is another one.
    let mut own = Bits::<query_vuid_in, _>::new(input.bytes().to_vec());
    own.set(query_vuid_in::data_direct, 0);
    let out = driver.run_command(opcode::QUERY_VUID, own.bytes()).unwrap();
    assert_eq!(Bits::<query_vuid_out, _>::new(&out[..]).get(query_vuid_out::num_of_entries), 1);
    let own = out[query_vuid_out::SIZE..].split(|byte| *byte == 0).next().unwrap();
    assert_eq!(own, options().vuid().as_bytes());
    assert_ne!(own, vuid);
    // Other functions.
    for (field, value) in [(query_vuid_in::vhca_id, 7), (query_vuid_in::query_vfs_vuid, 1)] {
        let mut other = Bits::<query_vuid_in, _>::new(input.bytes().to_vec());
        other.set(field, value);
        let refused = driver.run_command(opcode::QUERY_VUID, other.bytes()).unwrap_err();
        assert_eq!(refused.0, BAD_PARAMETER);
    }
    // A ConnectX-5 has none.
    let refused = Driver::new().run_command(opcode::QUERY_VUID, input.bytes()).unwrap_err();
    assert_eq!(refused.0, BAD_OPERATION);
}

#[test]
fn capabilities_tell_of_the_function() {
    let told = |driver: &mut Driver| {
        let mut group = |number: u16| {
            let mut input = [0; 16];
            input[6..8].copy_from_slice(&(number << 1 | 1).to_be_bytes());
            let out = driver.run_command(opcode::QUERY_HCA_CAP, &input).unwrap();
            out[16..].to_vec()
        };
        let general = Bits::<cmd_hca_cap, _>::new(group(0));
        let second = Bits::<cmd_hca_cap_2, _>::new(group(0x20));
        [
            general.is_set(cmd_hca_cap::data_direct),
            general.is_set(cmd_hca_cap::crossing_vhca_mkey),
            second.is_set(cmd_hca_cap_2::query_vuid),
        ]
    };
    assert_eq!(told(&mut Driver::with(options())), [true; 3]);
    assert_eq!(told(&mut Driver::new()), [false; 3]);
}

#[test]
fn key_of_another_pd_reaches_memory_while_the_function_may() {
    let mut p = Pair::on(Driver::with(options()), &[], &[]);
    let Direct { pd, .. } = Direct::new(&mut p);
    assert_ne!(pd, p.driver.pd);
    // Each refusal ends a pair.
    for (bound, address, expected) in [
        (true, IOVA, DONE),
        (true, IOVA + 8192 - 8, DONE),
        (true, IOVA + 8192 - 4, REFUSED),
        (true, IOVA - 4, REFUSED),
        (true, 0, REFUSED),
        (false, IOVA, REFUSED),
    ] {
        let mut p = Pair::on(Driver::with(options()), &[], &[]);
        let Direct { key, .. } = Direct::new(&mut p);
        bind(&mut p.driver, bound);
        let from = p.from;
        p.driver.memory().write(from, b"directly").unwrap();
        assert_eq!(write(&mut p, 0, key, address), expected, "{address:#x}, bound: {bound}");
        let second = if address == IOVA { p.to } else { p.from + 4096 - 8 };
        let arrived = p.bytes::<8>(second) == *b"directly";
        assert_eq!(arrived, expected == DONE && address != 0, "{address:#x}, bound: {bound}");
    }
}

#[test]
fn a_message_crosses_pages_of_the_list() {
    let mut p = Pair::on(Driver::with(options()), &[], &[]);
    let Direct { key, .. } = Direct::new(&mut p);
    bind(&mut p.driver, true);
    let from = p.from;
    p.driver.memory().write(from, b"directly").unwrap();
    assert_eq!(write(&mut p, 0, key, IOVA + 4096 - 4), DONE);
    let (first, second) = (p.to + 4096 - 4, p.from);
    assert_eq!((p.bytes(first), p.bytes(second)), (*b"dire", *b"ctly"));
}

/// Destroys an mkey; returns the status of a refusal.
fn destroy(driver: &mut Driver, key: u32) -> Result<(), u8> {
    let mut input = Bits::<destroy_mkey_in, _>::new(vec![0; destroy_mkey_in::SIZE]);
    input.set(destroy_mkey_in::mkey_index, (key >> 8).into());
    driver.run_command(opcode::DESTROY_MKEY, input.bytes()).map(drop).map_err(|refused| refused.0)
}

/// Its number would soon be that of another mkey.
#[test]
fn a_key_is_not_destroyed_while_it_has_another_name() {
    let mut p = Pair::on(Driver::with(options()), &[], &[]);
    let Direct { crossed, key, .. } = Direct::new(&mut p);
    assert_eq!(destroy(&mut p.driver, crossed), Err(RESOURCE_BUSY));
    destroy(&mut p.driver, key).unwrap();
    destroy(&mut p.driver, crossed).unwrap();
}

/// The function is reset, or its driver is unbound; keys that are made free reach nothing.
#[test]
fn keys_end_with_the_function_and_with_the_key_that_they_are_names_of() {
    for end in 0..3 {
        let mut p = Pair::on(Driver::with(options()), &[], &[]);
        let Direct { key, crossed, all, .. } = Direct::new(&mut p);
        bind(&mut p.driver, true);
        assert_eq!(write(&mut p, 0, key, IOVA), DONE);
        match end {
            0 => p.driver.fabric.function(0).restart_data_direct(),
            1 => assert!(p.driver.fabric.function(0).device_mut().invalidate_key(crossed)),
            _ => destroy(&mut p.driver, all).unwrap(),
        }
        assert_eq!(write(&mut p, 1, key, IOVA), REFUSED, "{end}");
    }
}

#[test]
fn keys_that_make_no_sense_are_refused() {
    let status = |refused: Result<u32, CommandError>| refused.unwrap_err().0;
    let mut p = Pair::on(Driver::with(options()), &[], &[]);
    let Direct { pd, crossed, .. } = Direct::new(&mut p);
    let driver = &mut p.driver;
    // The function's memory is named by physical addresses alone.
    assert_eq!(status(mkey(driver, pd, true, &mode(KSM), &[])), BAD_PARAMETER);
    let other = |driver: &mut Driver, crossed: u32, more: &[(Field<mkc>, u64)]| {
        let mut fields = mode(CROSSING).to_vec();
        fields.extend([(mkc::len, 4096), (mkc::translations_octword_size, crossed.into())]);
        fields.extend(more);
        mkey(driver, pd, false, &fields, &[])
    };
    assert_eq!(status(other(driver, 0xffff_ff00, &[])), BAD_RESOURCE);
    assert_eq!(status(other(driver, crossed | 1, &[])), BAD_PARAMETER);
    let elsewhere = [(mkc::crossing_target_vhca_id, 1)];
    assert_eq!(status(other(driver, crossed, &elsewhere)), BAD_PARAMETER);
    other(driver, crossed, &[]).unwrap();
    // A program may name no other function.
    let uid = driver.create_uctx();
    let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
    let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
    mode(CROSSING).into_iter().for_each(|(field, value)| context.set(field, value));
    context.set(mkc::translations_octword_size, crossed.into());
    let refused = driver.run_command_as(uid, opcode::CREATE_MKEY, input.bytes()).unwrap_err();
    assert_eq!(refused.0, BAD_PARAMETER);
    // Without the function there are neither kind of keys.
    let mut plain = Driver::new();
    let pd = plain.pd;
    assert_eq!(status(mkey(&mut plain, pd, true, &mode(PHYSICAL), &[])), BAD_PARAMETER);
    assert_eq!(status(mkey(&mut plain, pd, false, &mode(CROSSING), &[])), BAD_PARAMETER);
}
