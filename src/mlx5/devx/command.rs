//! Commands as bytes, and the refusals of firmware.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::file::File;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::mlx5::devx::{
    MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT,
    MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC,
    MLX5_IB_METHOD_DEVX_OTHER, MLX5_IB_METHOD_DEVX_QUERY_EQN,
};
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_DEVX;
use uverbs_uapi::mlx5::prm::opcode::{self, GENERAL_QUERIES};

const GENERAL: &str = "devx_general_cmd";

/// Bytes of the header of an input, and of an output.
const HEADER: usize = 16;
/// The most bytes of an attribute.
const MOST: usize = u16::MAX as usize;

/// The number of 16 bits at `at` of a command; 0 beyond its end.
pub(super) fn half(bytes: &[u8], at: usize) -> u16 {
    let half = bytes.get(at..at + 2).and_then(|half| half.try_into().ok());
    u16::from_be_bytes(half.unwrap_or_default())
}

/// The number of 32 bits at `at` of a command; 0 beyond its end.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) << 16 | u32::from(half(bytes, at + 2))
}

/// The name of a command.
fn name(input: &[u8]) -> String {
    let op = half(input, 0);
    opcode::name(op).map_or_else(|| format!("command {op:#x}"), str::to_owned)
}

/// Refuses a command of a length that no kernel takes.
pub(super) fn check(verb: &'static str, input: &[u8], output: usize) -> Result<()> {
    for (length, which) in [(input.len(), "input"), (output, "output")] {
        if !(HEADER..=MOST).contains(&length) {
            let detail = format!("an {which} of {length} bytes; a command has {HEADER} to {MOST}");
            return Err(Error::invalid(verb, detail));
        }
    }
    Ok(())
}

/// The file of a context with DEVX.
///
/// # Errors
///
/// `EOPNOTSUPP` without.
pub(super) fn file_of<'c>(verb: &'static str, context: &'c Context) -> Result<&'c Arc<File>> {
    let file = &context.file;
    if let Some(why) = without_devx(verb, file)? {
        return Err(Error::new(verb, Errno::OPNOTSUPP).detail(why));
    }
    file.check_fork(verb)?;
    Ok(file)
}

/// Words for a file for which the kernel made no user context; `None` for others, as far as the kernel tells.
fn without_devx(verb: &'static str, file: &File) -> Result<Option<String>> {
    let lacks = file.provider.mlx5(verb)?.limits().devx == Some(false);
    let name = file.device.name();
    Ok(lacks.then(|| format!("{name} has no DEVX, or its driver permits this user none")))
}

/// The object that a command is about, and the attribute that names it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject {
    None,
    New { attribute: u16 },
    Of { attribute: u16, handle: u32 },
}

/// Runs a method with a command as its attributes `ids`. Returns the handle of a new object, else 0.
pub(super) fn run(
    file: &File,
    verb: &'static str,
    method: (u16, u16),
    ids: [u16; 2],
    input: &[u8],
    output: &mut [u8],
    object: Subject,
) -> Result<u32> {
    check(verb, input, output.len())?;
    let mut command = Command::new(method.0, method.1);
    match object {
        Subject::None => {}
        Subject::New { attribute } => drop(command.new_handle(attribute)),
        Subject::Of { attribute, handle } => drop(command.handle(attribute, handle)),
    }
    command.input(ids[0], input).output(ids[1], &mut *output);
    let ran = file.execute(verb, &mut command);
    let made = match object {
        Subject::New { attribute } => command.made(attribute),
        Subject::None | Subject::Of { .. } => Ok(0),
    };
    if let Err(error) = ran {
        return Err(refusal(without_devx(verb, file)?, error, input, output));
    }
    made.map_err(|errno| Error::new(verb, errno))
}

/// Explains the error of a command: the kernel's, or firmware's, whose status and syndrome are in the output.
fn refusal(without_devx: Option<String>, error: Error, input: &[u8], output: &[u8]) -> Error {
    match error.kernel_errno() {
        Some(Errno::REMOTEIO) => explain(error, &name(input), output),
        Some(Errno::INVAL) => match without_devx {
            Some(why) => error.meaning(Errno::OPNOTSUPP).detail(format!("{}: {why}", name(input))),
            None => {
                let name = name(input);
                error.detail(format!(
                    "the kernel does not take {name} here, or not with this object"
                ))
            }
        },
        _ => error.context(|| name(input)),
    }
}

/// Explains firmware's refusal of a command by its output.
pub(super) fn explain(error: Error, name: &str, output: &[u8]) -> Error {
    let (status, errno) = status(output.first().copied().unwrap_or(0));
    let syndrome = word(output, 4);
    let detail = format!("firmware refused {name}: {status}, syndrome {syndrome:#x}");
    error.meaning(errno).detail(detail)
}

/// The name of a command's status, and the errno that stands for it: `MLX5_CMD_STAT_*` and `cmd_status_to_err` of the
/// kernel.
fn status(status: u8) -> (&'static str, Errno) {
    match status {
        0x01 => ("internal error", Errno::IO),
        0x02 => ("bad operation", Errno::OPNOTSUPP),
        0x03 => ("bad parameter", Errno::INVAL),
        0x04 => ("bad system state", Errno::IO),
        0x05 => ("bad resource", Errno::INVAL),
        0x06 => ("resource busy", Errno::BUSY),
        0x08 => ("limits exceeded", Errno::NOMEM),
        0x09 => ("bad resource state", Errno::INVAL),
        0x0a => ("bad index", Errno::INVAL),
        0x0f => ("no resources", Errno::AGAIN),
        0x10 => ("bad queue pair state", Errno::INVAL),
        0x30 => ("bad packet", Errno::INVAL),
        0x40 => ("bad size, or too many outstanding CQEs", Errno::INVAL),
        0x50 => ("bad input length", Errno::IO),
        0x51 => ("bad output length", Errno::IO),
        _ => ("unknown status", Errno::IO),
    }
}

/// Sends a query about no object of the program's, such as one of capabilities, and writes its output to `output`. A context
/// without DEVX may query capabilities and vport contexts. It waits for firmware, and may be called from any thread.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs_uapi::mlx5::prm::cmd::query_hca_cap_out;
/// use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
/// use uverbs_uapi::mlx5::prm::{Bits, Layout, command, opcode};
///
/// let mut query = command::<16>(opcode::QUERY_HCA_CAP);
/// // The current values of the general capabilities.
/// query[7] = 1;
/// let mut output = vec![0; query_hca_cap_out::SIZE];
/// uverbs::mlx5::devx::general_command(context, &query, &mut output)?;
/// let output = Bits::<query_hca_cap_out, _>::new(output);
/// let general = Bits::<cmd_hca_cap, _>::new(output.span(query_hca_cap_out::capability));
/// println!("2^{} user contexts", general.get(cmd_hca_cap::log_max_uctx));
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver and without DEVX; `EINVAL` for a command that is not in
/// [`GENERAL_QUERIES`], for one for another function (a `vhca_tunnel_id`), and for fewer than 16 bytes. If firmware
/// refuses the command, the error names its status and syndrome, which from Linux 5.18 on are in `output` as well, and
/// [`kernel_errno`](Error::kernel_errno) is `EREMOTEIO`.
#[doc(alias = "mlx5dv_devx_general_cmd")]
pub fn general_command(context: &Context, input: &[u8], output: &mut [u8]) -> Result<()> {
    if !GENERAL_QUERIES.contains(&half(input, 0)) {
        let detail = format!(
            "{} is no query about no object; objects have methods of their own, and general_command_unchecked takes all \
             opcodes",
            name(input)
        );
        return Err(Error::invalid(GENERAL, detail));
    }
    if half(input, 4) != 0 {
        let detail =
            format!("{} for the function {:#x} behind this one", name(input), half(input, 4));
        return Err(Error::invalid(GENERAL, detail));
    }
    send_general(context, input, output)
}

/// As [`general_command`], for any opcode and function. The kernel also takes opcodes from `GENERAL_START` on, such as accesses
/// to the registers of firmware.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs::mlx5::devx;
/// use uverbs_uapi::mlx5::prm::{command, opcode};
///
/// let query = command::<16>(opcode::QUERY_VHCA_STATE);
/// // SAFETY: the command names neither memory nor keys, and changes nothing.
/// unsafe { devx::general_command_unchecked(context, &query, &mut [0; 64])? };
/// # Ok(()) }
/// ```
///
/// # Safety
///
/// As far as the command lets the device access memory by key, the memory stays registered, and is not borrowed while the
/// device may write it. It harms no object of this library.
///
/// # Errors
///
/// Those of [`general_command`], but what the kernel takes decides.
#[allow(unsafe_code, reason = "the obligation is the caller's")]
pub unsafe fn general_command_unchecked(
    context: &Context,
    input: &[u8],
    output: &mut [u8],
) -> Result<()> {
    send_general(context, input, output)
}

fn send_general(context: &Context, input: &[u8], output: &mut [u8]) -> Result<()> {
    context.file.provider.mlx5(GENERAL)?;
    run(
        &context.file,
        GENERAL,
        (MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_OTHER),
        [MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT],
        input,
        output,
        Subject::None,
    )
    .map(drop)
}

/// The number of the event queue behind a completion vector, which a completion queue of DEVX names. `vector` is below
/// [`Context::completion_vectors`].
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver and without DEVX, `EINVAL` for a vector that the device does not have.
#[doc(alias = "mlx5dv_devx_query_eqn")]
pub fn query_eqn(context: &Context, vector: u32) -> Result<u32> {
    const VERB: &str = "devx_query_eqn";
    let file = file_of(VERB, context)?;
    file.check_vector(VERB, vector)?;
    let mut eqn = 0u32;
    let mut command = Command::new(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_QUERY_EQN);
    command
        .u32(MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC, vector)
        .output(MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN, &mut eqn);
    file.execute(VERB, &mut command).map_err(|error| {
        error.context(|| format!("{} tells no event queue of vector {vector}", file.device.name()))
    })?;
    Ok(eqn)
}
