//! The tests of docs/TESTING.md, which shows parts of them.
#![cfg(all(feature = "sim", feature = "tokio"))]

mod publish;

use publish::{Publisher, RECORD, Reader, Result};
use std::time::Duration;
use uverbs::device::devices_on;
use uverbs::sim::{
    Fabric, FabricBuilder, Mode, Network, PacketFault, PacketKind, Profile, Rates, TokioClock,
    Verb, each_seed,
};
use uverbs::{Context, Errno};

#[test]
fn a_record_arrives() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let devices = devices_on(&fabric.system());
    let reader = Reader::new(&Context::open(&devices[1])?)?;
    let mut publisher = Publisher::new(&Context::open(&devices[0])?, &reader)?;
    publisher.publish_in_order(&reader, 7)?;
    while reader.take(7).is_none() {
        assert!(fabric.step() || fabric.advance(), "nothing is under way");
    }
    assert_eq!(reader.take(7), Some(vec![7; RECORD]));
    Ok(())
}

#[test]
fn a_publisher_notices_that_its_reader_died() -> Result<()> {
    let fabric = Fabric::builder()
        .stepped(1)
        .device(Profile::new().name("publisher"))
        .device(Profile::new().name("reader"))
        .build()?;
    let devices = devices_on(&fabric.system());
    let of_reader = Context::open(&devices[1])?;
    let reader = Reader::new(&of_reader)?;
    let mut publisher = Publisher::new(&Context::open(&devices[0])?, &reader)?;
    fabric.kill(&of_reader);
    publisher.publish_in_order(&reader, 1)?;
    while fabric.step() || fabric.advance() {}
    assert_eq!(publisher.reap().unwrap_err().to_string(), "transport retries exceeded");
    // Seven repetitions of half a second each, in virtual time.
    assert!(fabric.now() > Duration::from_millis(400));
    Ok(())
}

#[test]
fn a_publisher_without_memory_says_so() -> Result<()> {
    let fabric = Fabric::builder().stepped(1).device(Profile::new().name("only")).build()?;
    let context = Context::open(&devices_on(&fabric.system())[0])?;
    let reader = Reader::new(&context)?;
    let device = fabric.device("only").ok_or("it is there")?;
    device.fail_call(Verb::RegMr, 0, Errno::NOMEM);
    assert!(Publisher::new(&context, &reader).is_err());
    Ok(())
}

#[test]
fn a_program_that_leaves_nothing_passes_the_check() -> Result<()> {
    let fabric = Fabric::builder().stepped(1).strict().device(Profile::new()).build()?;
    let context = Context::open(&devices_on(&fabric.system())[0])?;
    let reader = Reader::new(&context)?;
    let mut publisher = Publisher::new(&context, &reader)?;
    publisher.publish_in_order(&reader, 1)?;
    while fabric.step() || fabric.advance() {}
    let found = fabric.check().unwrap_err();
    assert!(found.iter().any(|line| line.contains("completions that were not polled")));
    publisher.reap()?;
    drop((publisher, reader, context));
    fabric.check()?;
    Ok(())
}

type Publish = fn(&mut Publisher, &Reader, u64) -> Result<()>;

/// Publishes three records on a network that loses one message in twenty.
fn records_arrive_whole(seed: u64, publish: Publish) -> Result<()> {
    records_arrive_on(&lossy(seed)?, publish)
}

fn lossy(seed: u64) -> Result<Fabric> {
    Ok(two_devices(seed).rates(Rates::none().loss(0.05)).build()?)
}

fn two_devices(seed: u64) -> FabricBuilder {
    let builder = Fabric::builder().stepped(seed).history();
    builder.device(Profile::new().name("publisher")).device(Profile::new().name("reader"))
}

fn records_arrive_on(fabric: &Fabric, publish: Publish) -> Result<()> {
    let devices = devices_on(&fabric.system());
    let reader = Reader::new(&Context::open(&devices[1])?)?;
    let mut publisher = Publisher::new(&Context::open(&devices[0])?, &reader)?;
    for number in 1..=3 {
        publish(&mut publisher, &reader, number)?;
        let record = loop {
            match reader.take(number) {
                Some(record) => break record,
                None if fabric.step() || fabric.advance() => {}
                None => return Err(format!("record {number} never arrives").into()),
            }
        };
        if record != [number; RECORD] {
            return Err(format!("flag {number} came before its record: {record:?}").into());
        }
        while !publisher.is_idle() {
            publisher.reap()?;
            fabric.advance();
        }
    }
    Ok(())
}

#[test]
fn a_flag_comes_behind_its_record() {
    each_seed(0..100, |seed| records_arrive_whole(seed, Publisher::publish_in_order));
}

/// Finds the bug of [`Publisher::publish`].
#[test]
fn some_seeds_find_that_two_queue_pairs_are_not_ordered() {
    let failing = (0..100).filter(|seed| records_arrive_whole(*seed, Publisher::publish).is_err());
    let failing = failing.collect::<Vec<_>>();
    assert!((2..50).contains(&failing.len()), "{failing:?}");
}

#[test]
fn records_arrive_over_a_network_that_loses_packets() {
    let mut lost = 0;
    each_seed(0..100, |seed| -> Result<()> {
        let network = Network::ideal()
            .bandwidth(10_000_000_000)
            .latency(Duration::from_micros(5))
            .reordering(0.05, Duration::from_micros(20))
            .loss(0.02);
        let fabric = two_devices(seed).network(network).build()?;
        records_arrive_on(&fabric, Publisher::publish_in_order)?;
        let publisher = fabric.device("publisher").ok_or("it is there")?;
        let reader = fabric.device("reader").ok_or("it is there")?;
        lost += publisher.traffic_to(&reader).lost;
        Ok(())
    });
    assert!(lost > 0, "no seed has lost a packet");
}

#[test]
fn records_arrive_though_an_ack_is_lost() {
    each_seed(0..100, |seed| -> Result<()> {
        let fabric = two_devices(seed).build()?;
        let publisher = fabric.device("publisher").ok_or("it is there")?;
        let reader = fabric.device("reader").ok_or("it is there")?;
        let lost = PacketFault::lose().of(PacketKind::Acknowledge).after(2);
        reader.fault_packets(&publisher, lost);
        records_arrive_on(&fabric, Publisher::publish_in_order)?;
        assert_eq!(reader.traffic_to(&publisher).lost, 1);
        Ok(())
    });
}

/// Publishes three records on devices that write memory in any order.
fn records_arrive_in_any_order(seed: u64, publish: Publish) -> Result<()> {
    records_arrive_on(&two_devices(seed).writes_in_any_order().build()?, publish)
}

#[test]
fn a_flag_in_a_write_of_its_own_comes_last() {
    each_seed(0..100, |seed| records_arrive_in_any_order(seed, Publisher::publish_in_order));
}

/// Finds the bug of [`Publisher::publish_at_once`].
#[test]
fn some_seeds_find_that_the_last_byte_is_not_the_last_one() {
    let fails =
        |seed: &u64| records_arrive_in_any_order(*seed, Publisher::publish_at_once).is_err();
    assert!((2..100).contains(&(0..100).filter(fails).count()));
    let in_order =
        |seed| records_arrive_on(&two_devices(seed).build()?, Publisher::publish_at_once);
    assert!((0..100).all(|seed| in_order(seed).is_ok()));
}

#[test]
fn a_deadline_of_a_minute_takes_no_time() -> Result<()> {
    let fabric = Fabric::new(2, Mode::Stepped { seed: 1 });
    let mut event_loop = tokio::runtime::Builder::new_current_thread();
    let event_loop = event_loop.enable_all().start_paused(true).build()?;
    event_loop.block_on(async {
        let driven = fabric.clone();
        tokio::spawn(async move { driven.drive(TokioClock::new()).await });
        // The program: contexts of `devices_on(&fabric.system())`.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(fabric.now() >= Duration::from_secs(60));
    });
    Ok(())
}

/// Whitespace apart, the document shows the code that is compiled here, and the output of its seed. If the fabric's
/// decisions change, another seed is the first that fails, and its history goes into the document.
#[test]
fn the_document_is_true() -> Result<()> {
    let document = include_str!("../../docs/TESTING.md");
    let code = [include_str!("main.rs"), include_str!("publish.rs")].map(words).join(" ");
    let blocks = |start| document.split(start).skip(1).filter_map(|rest| rest.split_once("```"));
    let mut shown = 0;
    for (block, _) in blocks("```rust\n") {
        assert!(code.contains(&words(block)), "not compiled: {block}");
        shown += 1;
    }
    assert!(shown >= 4, "{shown}");
    let seed = document.split_once("UVERBS_SIM_SEED=").and_then(|(_, rest)| rest.split_once(' '));
    let seed: u64 = seed.ok_or("no seed is named")?.0.parse()?;
    let fails = |seed: &u64| records_arrive_whole(*seed, Publisher::publish).is_err();
    assert_eq!((0..100).find(fails), Some(seed), "the first seed that fails");
    let fabric = lossy(seed)?;
    let failed = records_arrive_on(&fabric, Publisher::publish).unwrap_err().to_string();
    assert!(document.contains(&failed), "{failed}");
    let torn = |seed| records_arrive_in_any_order(seed, Publisher::publish_at_once).err();
    let torn = (0..100).find_map(|seed| Some(format!("seed {seed}: {}", torn(seed)?)));
    let torn = torn.ok_or("a seed fails")?;
    assert!(document.contains(&torn), "{torn}");
    let history = fabric.history();
    let lines = document.lines().filter(|line| line.contains(" µs ")).collect::<Vec<_>>();
    assert!(lines.len() > 5);
    for line in lines {
        assert!(history.contains(line), "{line:?} is not in:\n{history}");
    }
    Ok(())
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
