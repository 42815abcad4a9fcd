//! Event files with arbitrary bytes.

use super::explore;
use crate::tests::Bench;
use crate::{EventSource, Notify};

/// Events as they are read from a file: the kernel never gives less than one, or a part of one.
fn records(input: &[u8], size: usize) -> impl Iterator<Item = &[u8]> {
    input.chunks(size).take(8)
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn any_record_of_the_event_file_is_an_event_or_an_error() {
    let bench = Bench::new();
    let element = bench.script.object(bench.cq.handle()).user_handle;
    let event = |element: u64, kind: u32| {
        [&element.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 4]].concat()
    };
    let known = [event(element, 0), event(1, 9), event(element, 3)];
    let tally = explore("asynchronous events", 10, &known, |input| {
        let mut events = 0;
        for record in records(input, 16) {
            bench.script.raise_garbage(record);
            let dead = bench.context.dead_events();
            match bench.context.try_next_event() {
                Ok(Some(event)) => {
                    assert!(!format!("{} {event:?}", event.kind).is_empty());
                    if let EventSource::Cq(key) = event.source {
                        assert_eq!(key, bench.cq.key());
                    }
                    events += 1;
                }
                Ok(None) => assert!(bench.context.dead_events() > dead || record.is_empty()),
                Err(error) => assert!(record.len() < 16, "{error}"),
            }
        }
        events > 0
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens files")]
fn any_record_of_a_completion_channel_is_a_key_or_an_error() {
    let bench = Bench::new();
    let channel = bench.context.create_comp_channel().unwrap();
    channel.set_nonblocking(true).unwrap();
    let mut cq = bench.context.cq_builder(4).channel(&channel).build().unwrap();
    cq.req_notify(Notify::Next).unwrap();
    let known = [bench.script.object(cq.handle()).user_handle.to_ne_bytes().to_vec()];
    let tally = explore("completion events", 10, &known, |input| {
        let mut keys = 0;
        for record in records(input, 8) {
            bench.script.notify_garbage(cq.handle(), record);
            match channel.try_next() {
                Ok(Some(key)) => {
                    assert!(key == cq.key() || key == bench.cq.key());
                    keys += 1;
                }
                Ok(None) => {}
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        keys > 0
    });
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}
