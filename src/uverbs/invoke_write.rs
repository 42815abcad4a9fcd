//! The older commands, through the ioctl: INVOKE_WRITE carries a `write(2)` command's structs.
//!
//! Pairs with `UVERBS_METHOD_INVOKE_WRITE` in `core/uverbs_std_types_device.c`. The driver's own
//! input and output travel beside the core's, never behind them.

use super::command::Command;
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_IN, UVERBS_ATTR_CORE_OUT, UVERBS_ATTR_WRITE_CMD, UVERBS_METHOD_INVOKE_WRITE,
};
use uverbs_uapi::object::{UVERBS_ATTR_UHW_IN, UVERBS_ATTR_UHW_OUT, UVERBS_OBJECT_DEVICE};
use uverbs_uapi::write::IB_USER_VERBS_CMD_FLAG_EXTENDED;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A write command with its core input.
#[inline]
pub(crate) fn write<I: IntoBytes + Immutable + ?Sized>(number: u32, input: &I) -> Command<'_> {
    let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE);
    command.u64(UVERBS_ATTR_WRITE_CMD, number.into()).input(UVERBS_ATTR_CORE_IN, input);
    command
}

/// A command of the extended table.
#[inline]
pub(crate) fn write_ex<I: IntoBytes + Immutable + ?Sized>(number: u32, input: &I) -> Command<'_> {
    write(number | IB_USER_VERBS_CMD_FLAG_EXTENDED, input)
}

impl<'a> Command<'a> {
    /// The core's response to a write command.
    #[inline]
    pub(crate) fn response<O>(&mut self, output: &'a mut O) -> &mut Self
    where
        O: FromBytes + IntoBytes + KnownLayout + ?Sized,
    {
        self.output(UVERBS_ATTR_CORE_OUT, output)
    }

    /// The driver's own input and output, where it has them.
    #[inline]
    pub(crate) fn driver(&mut self, input: &'a [u8], output: &'a mut [u8]) -> &mut Self {
        self.input_if_any(UVERBS_ATTR_UHW_IN, input).output_if_any(UVERBS_ATTR_UHW_OUT, output)
    }
}
