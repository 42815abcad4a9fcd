//! Device memory: allocation, access by mkeys, and access by the processor through BAR0.

mod driver;

use driver::{CommandError, Driver};
use uverbs_connectx::bar0::{MEMIC_BYTES, MEMIC_OFFSET};
use uverbs_connectx::function::Region;
use uverbs_connectx::object::memic;
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, create_mkey_out, destroy_mkey_in, mkc};
use uverbs_uapi::mlx5::prm::object::{alloc_memic_in, alloc_memic_out, dealloc_memic_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

const WRITE: u8 = 0x08;
const FETCH_ADD: u8 = 0x12;

const REQUEST: u8 = 0;
const REQUEST_ERROR: u8 = 13;

fn alloc_memic(driver: &mut Driver, start: u64, range: u64, len: u64) -> Result<u64, CommandError> {
    let mut input = Bits::<alloc_memic_in, _>::new(vec![0; alloc_memic_in::SIZE]);
    input.set(alloc_memic_in::range_start_addr, start);
    input.set(alloc_memic_in::range_size, range);
    input.set(alloc_memic_in::memic_size, len);
    let out = driver.run_command(opcode::ALLOC_MEMIC, &input.into_inner())?;
    Ok(Bits::<alloc_memic_out, _>::new(out).get(alloc_memic_out::memic_start_addr))
}

fn dealloc_memic(driver: &mut Driver, start: u64, len: u64) -> Result<Vec<u8>, CommandError> {
    let mut input = Bits::<dealloc_memic_in, _>::new(vec![0; dealloc_memic_in::SIZE]);
    input.set(dealloc_memic_in::memic_start_addr, start);
    input.set(dealloc_memic_in::memic_size, len);
    driver.run_command(opcode::DEALLOC_MEMIC, &input.into_inner())
}

fn create_mkey(driver: &mut Driver, start: u64, len: u64) -> Result<u32, CommandError> {
    let mut input = Bits::<create_mkey_in, _>::new(vec![0; create_mkey_in::SIZE]);
    let mut context = input.sub_mut(create_mkey_in::memory_key_mkey_entry);
    for right in [mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a] {
        context.set(right, 1);
    }
    // Access mode 5, in two parts.
    context.set(mkc::access_mode_1_0, 1);
    context.set(mkc::access_mode_4_2, 1);
    context.set(mkc::qpn, 0xff_ffff);
    context.set(mkc::pd, driver.pd.into());
    context.set(mkc::start_addr, start);
    context.set(mkc::len, len);
    let out = driver.run_command(opcode::CREATE_MKEY, &input.into_inner())?;
    Ok(Bits::<create_mkey_out, _>::new(out).get32(create_mkey_out::mkey_index) << 8)
}

fn remote(address: u64, key: u32) -> Vec<u8> {
    let mut bytes = address.to_be_bytes().to_vec();
    bytes.extend(key.to_be_bytes());
    bytes.extend([0; 4]);
    bytes
}

#[test]
fn rdma_and_bar0_reach_the_same_device_memory() {
    let mut driver = Driver::new();
    driver.set_gid();
    let eqn = driver.eq();
    let (cqn, sent) = driver.cq(eqn);
    let mut a = driver.qp(0, cqn);
    let b = driver.qp(0, cqn);
    driver.connect(&a, &b);
    driver.connect(&b, &a);
    let start = alloc_memic(&mut driver, MEMIC_OFFSET + 4096, 4096, 128).unwrap();
    assert_eq!(start, MEMIC_OFFSET + 4096);
    // Addresses in the mkey begin at zero.
    let device = create_mkey(&mut driver, start + 64, 64).unwrap();
    let from = driver.alloc_page();
    let host = driver.mkey(from, 4096, &[mkc::lr, mkc::lw]);
    driver.memory().write(from, &40u64.to_le_bytes()).unwrap();
    let local = Driver::segment(8, host, from);
    driver.post_send(&mut a, WRITE, 0, &[remote(8, device), local.clone()].concat());
    let add = [2u64.to_be_bytes(), [0; 8]].concat();
    driver.post_send(&mut a, FETCH_ADD, 0, &[remote(8, device), add, local.clone()].concat());
    let mut bytes = [0; 8];
    driver.fabric.function(0).read(Region::Bar0, start + 64 + 8, &mut bytes);
    assert_eq!(u64::from_le_bytes(bytes), 42);
    assert_eq!((driver.cqe(sent, 0).0, driver.cqe(sent, 1).0), (REQUEST, REQUEST));
    driver.memory().read(from, &mut bytes).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 40, "the old value");
    driver.post_send(&mut a, WRITE, 0, &[remote(57, device), local].concat());
    assert_eq!(driver.cqe(sent, 2).0, REQUEST_ERROR, "it would end behind the key");
}

#[test]
fn allocations_are_whole_units_that_do_not_overlap_or_pass_the_limit() {
    let mut driver = Driver::new();
    let base = MEMIC_OFFSET;
    for (start, range, len) in [
        (base - 4096, 4096, 64),
        (base + MEMIC_BYTES, 4096, 64),
        (base + 8, 4096, 64),
        (base, 4096, 0),
        (base, 4096, 65),
        (base, 4096, 4160),
        (u64::MAX - 4095, 4096, 64),
    ] {
        assert!(
            alloc_memic(&mut driver, start, range, len).is_err(),
            "{start:#x} {range:#x} {len}"
        );
    }
    alloc_memic(&mut driver, base + 8192, 8192, 8192).unwrap();
    for start in [base + 4096, base + 8192, base + 12288] {
        assert!(alloc_memic(&mut driver, start, 8192, 64).is_err(), "{start:#x}");
    }
    alloc_memic(&mut driver, base, 8192, 64).unwrap();
    let rest = memic::MEMORY - 8192 - 64;
    let range = (rest + 64).next_multiple_of(4096);
    assert!(alloc_memic(&mut driver, base + 16384, range, rest + 64).is_err());
    alloc_memic(&mut driver, base + 16384, range, rest).unwrap();
}

#[test]
fn device_memory_with_an_mkey_is_not_freed_and_freeing_clears_it() {
    let mut driver = Driver::new();
    let start = alloc_memic(&mut driver, MEMIC_OFFSET, 4096, 128).unwrap();
    assert!(create_mkey(&mut driver, start + 64, 65).is_err(), "not all of it is allocated");
    let handle = create_mkey(&mut driver, start, 128).unwrap();
    driver.fabric.function(0).write(Region::Bar0, start, &[7; 8]);
    assert!(dealloc_memic(&mut driver, start, 128).is_err());
    let mut input = Bits::<destroy_mkey_in, _>::new(vec![0; destroy_mkey_in::SIZE]);
    input.set(destroy_mkey_in::mkey_index, (handle >> 8).into());
    driver.run_command(opcode::DESTROY_MKEY, &input.into_inner()).unwrap();
    assert!(dealloc_memic(&mut driver, start, 64).is_err(), "another length");
    dealloc_memic(&mut driver, start, 128).unwrap();
    assert!(dealloc_memic(&mut driver, start, 128).is_err());
    let mut bytes = [1; 8];
    driver.fabric.function(0).read(Region::Bar0, start, &mut bytes);
    assert_eq!(bytes, [0; 8]);
}
