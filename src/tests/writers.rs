//! The program's writer of a `Debug` text may use the object that it writes. So the library holds no lock meanwhile.

use super::futures::{Futures, Kind, for_each_kind};
use super::owned::Owned;
use crate::QpType;
use crate::cm::PortSpace;
use crate::cm::scripted::{CmScript, LOCAL};
use std::fmt::{self, Debug, Write};
use std::sync::mpsc::channel;
use std::time::Duration;

for_each_kind! {
    futures_are_written_without_a_lock
}

/// Calls a closure before it takes a text.
struct Acts<F>(F, String);

impl<F: FnMut()> Write for Acts<F> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        (self.0)();
        self.1.push_str(text);
        Ok(())
    }
}

/// Writes a value, and calls `act` for each piece of its text.
fn written(value: &dyn Debug, act: impl FnMut()) -> String {
    let mut writer = Acts(act, String::new());
    write!(writer, "{value:?} {value:#?}").unwrap();
    writer.1
}

/// Fails if `test` deadlocks.
fn in_time(test: impl FnOnce() + Send + 'static) {
    let (told, heard) = channel();
    std::thread::spawn(move || {
        test();
        told.send(()).unwrap();
    });
    assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok(()), "a writer waits for itself");
}

fn futures_are_written_without_a_lock<S: Kind>() {
    in_time(|| {
        let Futures { bench, pd, cq, qp, driver, pool, .. } = Futures::<S>::of();
        let srq = cq.adopt_srq(bench.pd.srq_builder(4).build().unwrap()).unwrap();
        let (inbox, op) = (qp.inbox(&pool, 2), qp.send(pool.take().unwrap()));
        let (plain, driven): (&dyn Debug, &dyn Debug) = (&inbox, &driver);
        let all: [&dyn Debug; 7] = [&cq, &qp, &srq, &op, plain, driven, &bench.context];
        for value in all {
            let text = written(value, || {
                // Each `fmt` takes a lock of the object, and would print "forked" if the lock were held.
                assert!(!format!("{cq:?}{qp:?}{srq:?}").contains("forked"));
                assert_eq!((cq.unmatched(), qp.in_flight()), (0, 2), "the inbox has posted");
                cq.adopt_srq(bench.pd.srq_builder(4).build().unwrap()).unwrap();
                drop(pd.qp_builder(&cq, &cq, QpType::RC).srq(&srq).build().unwrap());
            });
            assert!(!text.contains("forked"), "{text}");
        }
        assert!(format!("{cq:?}").starts_with("AsyncCompletionQueue { device: \"rxe0\", handle: "));
        assert!(format!("{cq:?}").ends_with("capacity: 127 }"), "{cq:?}");
        assert!(format!("{srq:?}").ends_with("max_wr: 7 }"), "{srq:?}");
    });
}

#[test]
fn channels_and_queues_are_written_without_a_lock() {
    in_time(|| {
        let (owned, channel) = (Owned::new(), CmScript::new().open());
        let id = channel.create_id(PortSpace::TCP, QpType::RC).unwrap();
        let bound = channel
            .create_id(PortSpace::TCP, QpType::RC)
            .unwrap()
            .bind(LOCAL.parse().unwrap())
            .unwrap();
        let listener = bound.listen(4).unwrap();
        let all: [&dyn Debug; 5] = [&channel, &id, &listener, &owned.cq, &owned.qp];
        for value in all {
            written(value, || {
                drop(channel.create_id(PortSpace::TCP, QpType::RC).unwrap());
                channel.use_context(&owned.bench.context).unwrap();
                assert_eq!(channel.dispatch().unwrap(), 0);
                owned.qp.modify(&crate::QpAttr::new().state(owned.qp.state())).ok();
            });
        }
    });
}

/// The `Debug` text of a lock does not contain its value.
#[test]
fn locks_are_written_without_their_values() {
    use crate::sync::lock::{AnyLock, LocalLock, Lock, TryLock};
    in_time(|| {
        let (lock, local) = (<Lock<_> as AnyLock<_>>::new(7), <LocalLock<_> as AnyLock<_>>::new(7));
        let tried = TryLock::new(7);
        let all: [&dyn Debug; 3] = [&lock, &local, &tried];
        for value in all {
            let text = written(value, || {
                assert!(AnyLock::lock(&lock).is_some() && local.lock().is_some());
                assert!(tried.try_lock().is_some());
            });
            assert!(!text.contains('7'), "{text}");
        }
    });
}
