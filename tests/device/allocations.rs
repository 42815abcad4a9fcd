//! Messages cost no allocation: neither by the verbs, nor in lent buffers, nor as futures, nor in a device in this
//! process, where the ringing thread does the device's work. Each test first sends a few messages, during which tables
//! and lists grow to their sizes.
#![allow(unsafe_code, reason = "counting what the program's allocator is asked for")]

use crate::lent;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, trials};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use uverbs::{SendWr, WcOpcode};

#[cfg(not(feature = "tokio"))]
trials![a_message_by_number_allocates_nothing, a_message_in_a_lent_buffer_allocates_nothing];
#[cfg(feature = "tokio")]
trials![
    a_message_by_number_allocates_nothing,
    a_message_in_a_lent_buffer_allocates_nothing,
    a_message_as_a_future_allocates_nothing,
    a_list_allocates_no_more_than_three_times,
    a_list_that_is_kept_allocates_nothing,
];

thread_local! {
    /// The allocations of this thread; other threads belong to the harness.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts the calls.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count() {
    ASKED.set(ASKED.get() + 1);
}

// SAFETY: it is the system's allocator, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

/// The numbers of messages before the count begins, and during it.
const BEFORE: u64 = 100;
const COUNTED: u64 = 300;

/// The allocations of `message` after the first rounds.
fn asked(mut message: impl FnMut(u64) -> Verdict) -> Verdict<u64> {
    for n in 0..BEFORE {
        message(n)?;
    }
    let before = ASKED.get();
    for n in 0..COUNTED {
        message(n)?;
    }
    Ok(ASKED.get() - before)
}

fn a_message_by_number_allocates_nothing() -> Verdict {
    let Pair { mut a, mut b, .. } = Pair::new(Config::rc())?;
    let asked = asked(|n| {
        b.recv(n, 0..64)?;
        a.send(SendWr::send(&[a.sge(0..64)]).id(n).signaled())?;
        a.expect(n, WcOpcode::SEND)?;
        b.expect(n, WcOpcode::RECV).map(drop)
    })?;
    assert_eq!(asked, 0, "allocations of {COUNTED} messages");
    Ok(())
}

fn a_message_in_a_lent_buffer_allocates_nothing() -> Verdict {
    let (mut a, mut b) = lent::pair()?;
    let asked = asked(|n| {
        let mut batch = b.qp.recv_batch()?;
        batch.push(b.pool.take().expect("a buffer"), n)?;
        batch.ring()?;
        let mut batch = a.qp.send_batch()?;
        // From a buffer of its own, and from one that several requests read.
        let text = a.pool.copy(&n.to_ne_bytes()).expect("a buffer");
        match n % 2 {
            0 => batch.push(SendWr::send(&[]), text, n)?,
            _ => {
                let part = text.share().slice(..4).expect("it is that long");
                batch.push(SendWr::send(&[]), part, n)?;
            }
        }
        batch.ring()?;
        let (sent, received) = (a.wait()?, b.wait()?);
        assert!(sent.outcome.is_success() && received.outcome.is_success());
        Ok(())
    })?;
    assert_eq!(asked, 0, "allocations of {COUNTED} messages");
    Ok(())
}

#[cfg(feature = "tokio")]
fn a_message_as_a_future_allocates_nothing() -> Verdict {
    crate::env::rnr_wait()?;
    use crate::tasks::{both, pair, run};
    run(0, async {
        let (a, b) = pair()?;
        let mut inbox = b.qp.inbox(&b.pool, 8);
        let mut before = 0;
        for n in 0..BEFORE + COUNTED {
            if n == BEFORE {
                before = ASKED.get();
            }
            let text = a.pool.copy(&n.to_ne_bytes()).expect("a buffer");
            let send = async { Ok(a.qp.send(text).await.map(drop)?) };
            // The drivers are tasks of the same thread, so that their allocations are counted, too.
            let receive = async {
                assert_eq!(inbox.next().await?.memory[..], n.to_ne_bytes());
                Ok(())
            };
            both(send, receive).await?;
        }
        assert_eq!(ASKED.get() - before, 0, "allocations of {COUNTED} messages");
        Ok(())
    })
}

/// Once for its requests, once for those that are posted and once for their ends, however many there are.
#[cfg(feature = "tokio")]
fn a_list_allocates_no_more_than_three_times() -> Verdict {
    crate::env::rnr_wait()?;
    use crate::tasks::{pair, run};
    use uverbs::aio::Transfer;
    run(0, async {
        let (a, b) = pair()?;
        let page = b.pd.mr_builder().access(uverbs::Access::ALL_REMOTE).allocate::<u64>(8)?;
        let to = page.remote(0)?;
        let mut before = 0;
        for n in 0..BEFORE + COUNTED {
            if n == BEFORE {
                before = ASKED.get();
            }
            let word = || a.pool.copy(&n.to_ne_bytes()).expect("a buffer");
            let writes = (0..1 + n as usize % 12).map(|_| (Transfer::Write(to), word()));
            for end in a.qp.post_all(writes).await {
                end?;
            }
        }
        assert_eq!(page.read_at(0), Some(BEFORE + COUNTED - 1));
        let asked = ASKED.get() - before;
        assert!(asked <= 3 * COUNTED, "{asked} allocations of {COUNTED} lists");
        Ok(())
    })
}

/// Its requests are taken one after the other: a vector of the ends would be the program's.
#[cfg(feature = "tokio")]
fn a_list_that_is_kept_allocates_nothing() -> Verdict {
    crate::env::rnr_wait()?;
    use crate::tasks::{pair, run};
    use uverbs::aio::Transfer;
    run(0, async {
        let (a, b) = pair()?;
        let page = b.pd.mr_builder().access(uverbs::Access::ALL_REMOTE).allocate::<u64>(8)?;
        let (to, mut list, mut before) = (page.remote(0)?, a.qp.post_all([]), 0);
        for n in 0..BEFORE + COUNTED {
            if n == BEFORE {
                before = ASKED.get();
            }
            let word = || a.pool.copy(&n.to_ne_bytes()).expect("a buffer");
            list.extend((0..1 + n as usize % 12).map(|_| (Transfer::Write(to), word())));
            while let Some(end) = list.next().await {
                end?;
            }
        }
        assert_eq!(page.read_at(0), Some(BEFORE + COUNTED - 1));
        assert_eq!(ASKED.get() - before, 0, "allocations of {COUNTED} lists");
        Ok(())
    })
}
