//! Frames: one kind byte, a process number, a length, then that many bytes.
//!
//! One end of the VM's channel writes them and the other reads them; `order.rs` has the structures
//! of the payloads.

use std::io::{self, Read, Write};

/// Longest payload that a reader accepts, in bytes. Longer output is split by the sender.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// Bytes that one read of a process's output moves at most.
pub const CHUNK: usize = 64 << 10;

/// The kind of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Host to guest: start a process; payload is an [`Order`](crate::order::Order).
    Run = 1,
    /// Host to guest: bytes for the process's standard input.
    Stdin = 2,
    /// Host to guest: the standard input has ended.
    StdinEnd = 3,
    /// Host to guest: send the process's session a signal; payload is its number, four bytes.
    Signal = 4,
    /// Host to guest: terminal size; payload is columns and rows, two bytes each.
    Resize = 5,
    /// Host to guest: power the machine off.
    PowerOff = 6,
    /// Guest to host: set up and waiting; payload is a [`Greeting`](crate::order::Greeting).
    Ready = 16,
    /// Guest to host: bytes from the process's standard output.
    Stdout = 17,
    /// Guest to host: bytes from the process's standard error.
    Stderr = 18,
    /// Guest to host: the process has ended; payload is an [`Ending`](crate::order::Ending).
    Exit = 19,
    /// Guest to host: the guest could not be set up; payload says why.
    Broken = 20,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        const ALL: [Kind; 11] = [
            Kind::Run,
            Kind::Stdin,
            Kind::StdinEnd,
            Kind::Signal,
            Kind::Resize,
            Kind::PowerOff,
            Kind::Ready,
            Kind::Stdout,
            Kind::Stderr,
            Kind::Exit,
            Kind::Broken,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// One message on the channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The kind of the payload.
    pub kind: Kind,
    /// Which process it is about; the host chooses the number when it orders the run.
    pub process: u32,
    /// The bytes.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Writes the frame in one piece, so that frames of several threads do not mix as long as they
    /// share a lock around this call.
    pub fn write_to(&self, to: &mut impl Write) -> io::Result<()> {
        let length = u32::try_from(self.payload.len())
            .ok()
            .filter(|length| *length as usize <= MAX_PAYLOAD)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("payload of {} bytes, limit {MAX_PAYLOAD}", self.payload.len()),
                )
            })?;
        let mut bytes = Vec::with_capacity(9 + self.payload.len());
        bytes.push(self.kind as u8);
        bytes.extend_from_slice(&self.process.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&self.payload);
        to.write_all(&bytes)?;
        to.flush()
    }

    /// Reads the next frame; `None` where the channel ended between two frames.
    pub fn read_from(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut first = [0];
        loop {
            match from.read(&mut first) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let [byte] = first;
        let kind = Kind::from_byte(byte)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("kind {byte}")))?;
        let mut word = [0; 4];
        from.read_exact(&mut word)?;
        let process = u32::from_le_bytes(word);
        from.read_exact(&mut word)?;
        let length = u32::from_le_bytes(word) as usize;
        if length > MAX_PAYLOAD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("payload of {length} bytes, limit {MAX_PAYLOAD}"),
            ));
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        Ok(Some(Self { kind, process, payload }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_were_written() {
        let frames = [
            Frame { kind: Kind::Run, process: 7, payload: b"{}".to_vec() },
            Frame { kind: Kind::StdinEnd, process: u32::MAX, payload: Vec::new() },
            Frame { kind: Kind::Stdout, process: 0, payload: vec![0xa5; MAX_PAYLOAD] },
        ];
        let mut wire = Vec::new();
        for frame in &frames {
            frame.write_to(&mut wire).unwrap();
        }
        let mut rest = wire.as_slice();
        for frame in frames {
            assert_eq!(Frame::read_from(&mut rest).unwrap(), Some(frame));
        }
        assert_eq!(Frame::read_from(&mut rest).unwrap(), None);
    }

    #[test]
    fn a_frame_cut_short_is_an_error() {
        let mut wire = Vec::new();
        Frame { kind: Kind::Stderr, process: 1, payload: vec![1, 2, 3] }
            .write_to(&mut wire)
            .unwrap();
        wire.pop();
        let error = Frame::read_from(&mut wire.as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn unknown_kinds_and_absurd_lengths_are_refused() {
        let mut unknown = [0; 9];
        unknown[0] = 99;
        assert!(Frame::read_from(&mut unknown.as_slice()).is_err());
        let mut long = [0xff; 9];
        long[0] = Kind::Stdout as u8;
        let error = Frame::read_from(&mut long.as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "refused before it is allocated");
        let oversize = Frame { kind: Kind::Stdout, process: 0, payload: vec![0; MAX_PAYLOAD + 1] };
        assert!(oversize.write_to(&mut Vec::new()).is_err());
    }
}
