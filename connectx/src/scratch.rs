//! Bytes of one request, in memory that the next request uses again.
//!
//! A fresh `Vec` of 1 MiB is new pages from the system each time: their page faults took four fifths of a message's
//! time.

/// Bytes that are kept for the next request; longer memory is given back.
const KEPT: usize = 8 << 20;

/// A buffer that is emptied and filled again.
#[derive(Default)]
pub(crate) struct Scratch {
    /// As long as the longest content so far, so that no content is cleared before it is written.
    bytes: Vec<u8>,
    len: usize,
}

impl Scratch {
    /// Makes it empty.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        if self.bytes.len() > KEPT {
            self.bytes = Vec::new();
        }
    }

    /// Appends `count` bytes for the caller to write: they hold bytes of an earlier request.
    pub(crate) fn grow(&mut self, count: usize) -> &mut [u8] {
        let start = self.len;
        self.len += count;
        if self.len > self.bytes.len() {
            self.bytes.resize(self.len, 0);
        }
        &mut self.bytes[start..self.len]
    }

    /// Appends bytes.
    pub(crate) fn extend(&mut self, from: &[u8]) {
        self.grow(from.len()).copy_from_slice(from);
    }
}

impl std::ops::Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ends_where_it_was_written_and_memory_is_kept_up_to_a_limit() {
        let mut scratch = Scratch::default();
        scratch.extend(b"longer");
        scratch.clear();
        scratch.extend(b"ab");
        scratch.grow(1)[0] = b'c';
        assert_eq!(&scratch[..], b"abc");
        assert_eq!(scratch.bytes.len(), 6);
        scratch.grow(KEPT);
        scratch.clear();
        assert_eq!((scratch.len(), scratch.bytes.len()), (0, 0));
    }
}
