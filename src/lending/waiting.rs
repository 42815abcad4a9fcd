//! Requests with the memory that is to be lent to them, in their order.

use std::fmt;
use std::mem::MaybeUninit;

/// A list of requests of which the first ones are posted, whose memory is gone. Posting one moves its memory only, and
/// no other request: with an `Option` in each place, 15 instructions more.
pub(crate) struct Waiting<R: Copy, L> {
    /// The memory is initialised from `posted` on.
    requests: Vec<(R, MaybeUninit<L>)>,
    posted: usize,
}

impl<R: Copy, L> Waiting<R, L> {
    pub(crate) fn new(requests: impl IntoIterator<Item = (R, L)>) -> Self {
        let mut waiting = Waiting { requests: Vec::new(), posted: 0 };
        waiting.extend(requests);
        waiting
    }

    /// Appends others. The places of those that were posted are used again.
    #[inline]
    pub(crate) fn extend(&mut self, more: impl IntoIterator<Item = (R, L)>) {
        // If they are more than half: then each request is moved up once at most, on the average.
        if self.posted > self.len() {
            self.requests.drain(..std::mem::take(&mut self.posted));
        }
        let more = more.into_iter().map(|(request, memory)| (request, MaybeUninit::new(memory)));
        self.requests.extend(more);
    }

    pub(crate) fn len(&self) -> usize {
        self.requests.len() - self.posted
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first request.
    pub(crate) fn first(&self) -> Option<R> {
        self.requests.get(self.posted).map(|(request, _)| *request)
    }

    /// The memory of each request.
    pub(crate) fn memory(&self) -> impl Iterator<Item = &L> {
        // SAFETY: it is initialised from `posted` on.
        self.requests
            .iter()
            .skip(self.posted)
            .map(|(_, memory)| unsafe { memory.assume_init_ref() })
    }

    /// Posts requests from the first one on, until `post` gives the memory of one back, which stays the first.
    #[inline(always)]
    pub(crate) fn post_each(&mut self, mut post: impl FnMut(R, L) -> Result<(), L>) {
        let Waiting { requests, posted } = self;
        for (request, place) in requests.iter_mut().skip(*posted) {
            // First, so that nobody drops the memory again if `post` panics.
            *posted += 1;
            // SAFETY: it was behind `posted`.
            let memory = unsafe { place.assume_init_read() };
            if let Err(back) = post(*request, memory) {
                place.write(back);
                *posted -= 1;
                break;
            }
        }
    }

    /// Removes the first request, and returns its memory.
    #[cold]
    pub(crate) fn pop(&mut self) -> Option<L> {
        let mut popped = None;
        self.post_each(|_, memory| match popped {
            None => {
                popped = Some(memory);
                Ok(())
            }
            Some(_) => Err(memory),
        });
        popped
    }
}

impl<R: Copy, L> Drop for Waiting<R, L> {
    fn drop(&mut self) {
        // As a slice, so that a panic in one drop keeps no other from being dropped.
        let left = self.requests.drain(self.posted..);
        // SAFETY: it is initialised from `posted` on, and nobody sees it again.
        drop(left.map(|(_, memory)| unsafe { memory.assume_init() }).collect::<Vec<L>>());
    }
}

impl<R: Copy, L> fmt::Debug for Waiting<R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::rc::Rc;

    #[test]
    fn requests_are_posted_in_their_order_until_one_comes_back() {
        let mut waiting = Waiting::new([(1, 'a'), (2, 'b')]);
        let mut posted = Vec::new();
        waiting.post_each(|request, memory| match request {
            2 => Err(memory),
            _ => {
                posted.push((request, memory));
                Ok(())
            }
        });
        assert_eq!(
            (posted.as_slice(), waiting.first(), waiting.len()),
            (&[(1, 'a')][..], Some(2), 1)
        );
        waiting.extend([(3, 'c'), (4, 'd')]);
        assert_eq!(waiting.memory().collect::<String>(), "bcd");
        assert_eq!(waiting.pop(), Some('b'));
        waiting.post_each(|request, memory| {
            posted.push((request, memory));
            Ok(())
        });
        assert_eq!(posted, [(1, 'a'), (3, 'c'), (4, 'd')]);
        assert!(waiting.is_empty() && waiting.first().is_none() && waiting.pop().is_none());
    }

    #[test]
    fn a_list_that_is_never_empty_does_not_grow() {
        let mut waiting = Waiting::new((0..4).map(|n| (n, n)));
        for n in 4..100 {
            assert_eq!(waiting.pop(), Some(n - 4));
            waiting.extend([(n, n)]);
        }
        assert!(waiting.len() == 4 && waiting.requests.capacity() <= 16);
    }

    #[test]
    fn memory_is_dropped_once_or_handed_over() {
        let memory = Rc::new(());
        let mut waiting = Waiting::new((0..5).map(|n| (n, memory.clone())));
        drop(waiting.pop());
        let panics = AssertUnwindSafe(|| {
            waiting.post_each(|request, memory| {
                assert!(request != 2, "as it should");
                drop(memory);
                Ok(())
            });
        });
        assert!(catch_unwind(panics).is_err());
        assert_eq!((waiting.len(), Rc::strong_count(&memory)), (2, 3));
        waiting.extend([(5, memory.clone())]);
        waiting.post_each(|_, memory| Err(memory));
        assert_eq!((waiting.len(), Rc::strong_count(&memory)), (3, 4));
        drop(waiting);
        assert_eq!(Rc::strong_count(&memory), 1);
    }
}
