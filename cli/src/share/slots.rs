//! The layout of the shared memory: a greeting by the process that registered it, and room for the message of the
//! process that imports it. Each begins with its length.

use crate::failure::{Failure, Result};
use std::ops::Range;

/// Bytes of each half.
const HALF: usize = 4096;
/// Bytes of the memory.
pub(crate) const SIZE: usize = 2 * HALF;
pub(crate) const GREETING: Range<usize> = 0..HALF;
pub(crate) const MESSAGE: Range<usize> = HALF..SIZE;

/// The bytes of a text in its half.
pub(crate) fn write(text: &str) -> Result<Vec<u8>> {
    let most = HALF - size_of::<u32>();
    if text.len() > most {
        let length = text.len();
        return Err(Failure::usage(format!("a text of {length} bytes; {most} fit")));
    }
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    Ok(bytes)
}

/// The text in a half, without control characters, which could move a terminal's cursor.
pub(crate) fn read(bytes: &[u8]) -> Result<String> {
    let text = bytes.split_first_chunk().and_then(|(length, rest)| {
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let text = std::str::from_utf8(rest.get(..length)?).ok()?;
        let harmless = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
        Some(text.chars().map(harmless).collect())
    });
    text.ok_or_else(|| Failure::run("the shared memory holds no valid text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        let bytes = write("a\x1b[2Jb\n").unwrap();
        assert_eq!(read(&bytes).unwrap(), "a\u{fffd}[2Jb\u{fffd}");
    }

    #[test]
    fn texts_come_back() {
        for text in ["", "grüezi", &"x".repeat(HALF - 4)] {
            let mut bytes = write(text).unwrap();
            bytes.resize(HALF, 0xee);
            assert_eq!(read(&bytes).unwrap(), text);
        }
        assert!(write(&"x".repeat(HALF - 3)).is_err());
        assert!(read(&[255, 255, 255, 255, 0]).is_err());
        assert!(read(&[1, 0]).is_err());
    }
}
