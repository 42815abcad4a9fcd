//! Timestamps of ticks and of real time, by the choice of each queue.

mod driver;

use driver::pair::{Pair, code};
use driver::{CommandError, Driver};
use uverbs_connectx::function::Region;
use uverbs_connectx::options::Options;
use uverbs_uapi::mlx5::prm::hca_cap::{cmd_hca_cap, roce_cap};
use uverbs_uapi::mlx5::prm::qpc::qpc;
use uverbs_uapi::mlx5::prm::rqc::{create_rq_in, create_sq_in, rqc, sqc};
use uverbs_uapi::mlx5::prm::srqc::wq;
use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};

const BAD_PARAMETER: u8 = 0x3;

const TICKS: u64 = 0;
const FIRMWARES: u64 = 1;
const REAL: u64 = 2;
const NONE: u64 = 3;

/// Two seconds and 999,999,900 nanoseconds after the epoch.
const START: u64 = 2_999_999_900;

fn with_clock() -> Driver {
    Driver::with(Options { real_time: Some(START), ..Options::default() })
}

/// The timestamps of a send and of its receive, and the time before and after both.
fn stamps(driver: Driver, format: u64) -> ([u64; 2], std::ops::RangeInclusive<u64>) {
    let mut p = Pair::on(driver, &[], &[(qpc::ts_format, format)]);
    let before = p.driver.now() + 1000;
    p.driver.run_at(before);
    p.receive(64);
    p.send(64);
    let cqes = [p.driver.cqe(p.sent, 0), p.driver.cqe(p.received, 0)];
    assert_eq!((cqes[0].0, cqes[1].0), (code::REQUEST, code::RECEIVED));
    let stamps = cqes.map(|(_, cqe)| u64::from_be_bytes(cqe[48..56].try_into().unwrap()));
    (stamps, before..=p.driver.now())
}

#[test]
fn each_format_counts_from_its_own_start() {
    for (driver, format) in
        [(Driver::new(), TICKS), (with_clock(), TICKS), (with_clock(), FIRMWARES)]
    {
        let (stamps, time) = stamps(driver, format);
        let told = time.start() / 4..=time.end() / 4;
        assert!(stamps.iter().all(|stamp| told.contains(stamp)), "{stamps:?}, format {format}");
    }
    let (stamps, time) = stamps(with_clock(), REAL);
    // The second ends meanwhile.
    let nanoseconds = stamps.map(|stamp| (stamp >> 32, (stamp & 0xffff_ffff) + 100));
    let told = |(second, since)| second == 3 && time.contains(&since);
    assert!(nanoseconds.into_iter().all(told), "{stamps:?} in {time:?}");
}

#[test]
fn formats_that_the_device_lacks_are_refused() {
    let status = |made: Result<(), CommandError>| made.err().map_or(0, |refused| refused.0);
    let qp = |driver: &mut Driver, cqn: u32, format: u64| {
        let page = driver.alloc_page();
        driver.try_qp(0, page, 0, cqn, &[(qpc::ts_format, format)]).map(drop)
    };
    for (mut driver, format, expected) in [
        (Driver::new(), TICKS, 0),
        (Driver::new(), FIRMWARES, 0),
        (Driver::new(), REAL, BAD_PARAMETER),
        (Driver::new(), NONE, BAD_PARAMETER),
        (with_clock(), REAL, 0),
        (with_clock(), NONE, BAD_PARAMETER),
    ] {
        let eqn = driver.eq();
        let (cqn, _) = driver.cq(eqn);
        assert_eq!(status(qp(&mut driver, cqn, format)), expected, "QP, format {format}");
        // Queues of raw packets.
        let memory = driver.alloc_page();
        let (pd, uar, tis) = (driver.pd, driver.uar, driver.tis());
        let work_queue = |mut queue: Bits<wq, &mut [u8]>, stride: u64| {
            for (field, value) in [
                (wq::wq_type, 1),
                (wq::pd, pd.into()),
                (wq::uar_page, uar.into()),
                (wq::dbr_addr, memory + 2048),
                (wq::log_wq_stride, stride),
                (wq::log_wq_sz, 2),
            ] {
                queue.set(field, value);
            }
        };
        let mut input = Bits::<create_sq_in, _>::new(vec![0; create_sq_in::SIZE]);
        let mut context = input.sub_mut(create_sq_in::ctx);
        for (field, value) in [
            (sqc::cqn, cqn.into()),
            (sqc::ts_format, format),
            (sqc::tis_lst_sz, 1),
            (sqc::tis_num_0, tis.into()),
        ] {
            context.set(field, value);
        }
        work_queue(context.sub_mut(sqc::wq), 6);
        let mut input = input.into_inner();
        input.extend(memory.to_be_bytes());
        let made = driver.run_command(opcode::CREATE_SQ, &input).map(drop);
        assert_eq!(status(made), expected, "SQ, format {format}");
        let mut input = Bits::<create_rq_in, _>::new(vec![0; create_rq_in::SIZE]);
        let mut context = input.sub_mut(create_rq_in::ctx);
        context.set(rqc::cqn, cqn.into());
        context.set(rqc::ts_format, format);
        work_queue(context.sub_mut(rqc::wq), 4);
        let mut input = input.into_inner();
        input.extend(memory.to_be_bytes());
        let made = driver.run_command(opcode::CREATE_RQ, &input).map(drop);
        assert_eq!(status(made), expected, "RQ, format {format}");
    }
}

#[test]
fn capabilities_and_registers_tell_of_the_clock() {
    let told = |driver: &mut Driver| {
        let mut group = |number: u16| {
            let mut input = [0; 16];
            input[6..8].copy_from_slice(&(number << 1 | 1).to_be_bytes());
            driver.run_command(opcode::QUERY_HCA_CAP, &input).unwrap()[16..].to_vec()
        };
        let general = Bits::<cmd_hca_cap, _>::new(group(0));
        let roce = Bits::<roce_cap, _>::new(group(4));
        [
            general.get(cmd_hca_cap::sq_ts_format),
            general.get(cmd_hca_cap::rq_ts_format),
            roce.get(roce_cap::qp_ts_format),
        ]
    };
    assert_eq!(told(&mut Driver::new()), [0; 3]);
    let mut driver = with_clock();
    // Both formats.
    assert_eq!(told(&mut driver), [2; 3]);
    driver.run_at(1_000_000_000);
    let mut words = [0; 8];
    driver.fabric.function(0).read(Region::Bar0, 0x1040, &mut words);
    let now = driver.now();
    let time = START + now;
    assert_eq!(u64::from_be_bytes(words), ((time / 1_000_000_000) << 32) | (time % 1_000_000_000));
}
