//! Room for the driver's part of a response, which follows the core's.

use zerocopy::FromBytes;

const ROOM: usize = 112;

/// A driver's output struct, as bytes until it is read.
#[derive(Clone, Debug)]
pub(crate) struct DriverResponse {
    bytes: [u8; ROOM],
    length: usize,
}

impl DriverResponse {
    /// No room: the driver has no part in the response.
    pub(crate) const fn none() -> Self {
        DriverResponse { bytes: [0; ROOM], length: 0 }
    }

    /// Room for a `T`.
    pub(crate) const fn room_for<T>() -> Self {
        const { assert!(size_of::<T>() <= ROOM) };
        DriverResponse { bytes: [0; ROOM], length: size_of::<T>() }
    }

    /// The driver's part as a `T`, zero where the driver wrote less.
    pub(crate) fn read<T: FromBytes>(&self) -> T {
        const { assert!(size_of::<T>() <= ROOM) };
        match T::read_from_prefix(&self.bytes) {
            Ok((value, _)) => value,
            Err(_) => T::new_zeroed(),
        }
    }
}

impl AsMut<[u8]> for DriverResponse {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}
