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
use uverbs_uapi::mlx5::prm::opcode;

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

/// Refuses a command that no kernel takes: one of a wrong length, or for another function than the context's.
fn check(verb: &'static str, input: &[u8], output: &[u8]) -> Result<()> {
    for (bytes, which) in [(input, "input"), (output, "output")] {
        if !(HEADER..=MOST).contains(&bytes.len()) {
            let length = bytes.len();
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
    if file.provider.mlx5(verb)?.limits().devx == Some(false) {
        let name = file.device.name();
        let detail = format!("{name} has no DEVX, or its driver permits this user none");
        return Err(Error::new(verb, Errno::OPNOTSUPP).detail(detail));
    }
    file.check_fork(verb)?;
    Ok(file)
}

/// Runs the method that `prepare` fills, with the command as its attributes `ids`. Returns what `then` finds in it.
pub(super) fn run<T>(
    file: &File,
    verb: &'static str,
    method: (u16, u16),
    ids: [u16; 2],
    input: &[u8],
    output: &mut [u8],
    (prepare, then): (
        impl FnOnce(&mut Command<'_>),
        impl FnOnce(&Command<'_>) -> std::result::Result<T, Errno>,
    ),
) -> Result<T> {
    check(verb, input, output)?;
    let mut command = Command::new(method.0, method.1);
    prepare(&mut command);
    command.input(ids[0], input).output(ids[1], &mut *output);
    let ran = file.execute(verb, &mut command);
    let found = then(&command);
    ran.map_err(|error| refusal(error, input, output))?;
    found.map_err(|errno| Error::new(verb, errno))
}

/// Explains the error of a command: the kernel's, or firmware's, whose status and syndrome are in the output.
fn refusal(error: Error, input: &[u8], output: &[u8]) -> Error {
    match error.kernel_errno() {
        Some(Errno::REMOTEIO) => {
            let (status, errno) = status(output.first().copied().unwrap_or(0));
            let (name, syndrome) = (name(input), word(output, 4));
            let detail = format!("firmware refused {name}: {status}, syndrome {syndrome:#x}");
            error.meaning(errno).detail(detail)
        }
        Some(Errno::INVAL) => {
            let detail =
                format!("the kernel does not take {} here, or not with this object", name(input));
            error.detail(detail)
        }
        _ => error.context(|| name(input)),
    }
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
        0x40 => ("bad size of too many outstanding CQEs", Errno::INVAL),
        0x50 => ("bad input length", Errno::IO),
        0x51 => ("bad output length", Errno::IO),
        _ => ("unknown status", Errno::IO),
    }
}

/// Sends a command about no object of the program's, such as a query of capabilities, and writes its output to
/// `output`. A context without DEVX may query capabilities and vport contexts.
///
/// ```no_run
/// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
/// use uverbs_uapi::mlx5::prm::cmd::query_hca_cap_out;
/// use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
/// use uverbs_uapi::mlx5::prm::{Bits, Layout, opcode};
///
/// let mut command = [0; 16];
/// command[..2].copy_from_slice(&opcode::QUERY_HCA_CAP.to_be_bytes());
/// // The current values of the general capabilities.
/// command[7] = 1;
/// let mut output = vec![0; query_hca_cap_out::SIZE];
/// uverbs::mlx5::devx::general_command(context, &command, &mut output)?;
/// let output = Bits::<query_hca_cap_out, _>::new(output);
/// let general = Bits::<cmd_hca_cap, _>::new(output.span(query_hca_cap_out::capability));
/// println!("2^{} user contexts", general.get(cmd_hca_cap::log_max_uctx));
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver and without DEVX; `EINVAL` for a command that the kernel does not take
/// for one about no object, for one for another function (a `vhca_tunnel_id`), and for fewer than 16 bytes. If firmware
/// refuses the command, the error names its status and syndrome, which from Linux 5.18 on are in `output` as well, and
/// [`kernel_errno`](Error::kernel_errno) is `EREMOTEIO`.
#[doc(alias = "mlx5dv_devx_general_cmd")]
pub fn general_command(context: &Context, input: &[u8], output: &mut [u8]) -> Result<()> {
    const VERB: &str = "devx_general_cmd";
    context.file.provider.mlx5(VERB)?;
    if half(input, 4) != 0 {
        let detail =
            format!("{} for the function {:#x} behind this one", name(input), half(input, 4));
        return Err(Error::invalid(VERB, detail));
    }
    run(
        &context.file,
        VERB,
        (MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_OTHER),
        [MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT],
        input,
        output,
        (|_| (), |_| Ok(())),
    )
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
    file.execute(VERB, &mut command)?;
    Ok(eqn)
}
