//! Placement out of order, which devices have for some types of queue pairs. Pairs with `get_dp_ooo_cap` of
//! `hw/mlx5/qp.c`, which the kernel asks only when a queue pair moves to `INIT`.

use super::QpType;
use crate::error::{Error, Result};
use crate::file::File;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use uverbs_uapi::mlx5::context::{mlx5_ib_query_dev_resp_flags, mlx5_ib_query_device_resp};
use uverbs_uapi::mlx5::devx::{
    MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT, MLX5_IB_METHOD_DEVX_OTHER,
};
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_DEVX;
use uverbs_uapi::mlx5::prm::cmd::query_hca_cap_out;
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::{Bits, Field, Layout, command, opcode};

/// The general capabilities of a device, as they are set. A context without DEVX may query them, too.
pub(crate) fn capabilities(verb: &'static str, file: &File) -> Result<Bits<cmd_hca_cap, Vec<u8>>> {
    file.provider.mlx5(verb)?;
    let mut asked = command::<16>(opcode::QUERY_HCA_CAP);
    asked[7] = 1;
    let mut output = vec![0; query_hca_cap_out::SIZE];
    let mut command = Command::new(MLX5_IB_OBJECT_DEVX, MLX5_IB_METHOD_DEVX_OTHER);
    command
        .input(MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, &asked)
        .output(MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT, &mut output[..]);
    file.execute(verb, &mut command).map_err(|error| {
        error.context(|| format!("{} does not tell its capabilities", file.device.name()))
    })?;
    let output = Bits::<query_hca_cap_out, _>::new(output);
    Ok(Bits::new(output.span(query_hca_cap_out::capability).to_vec()))
}

/// Refuses a type of queue pair whose data the device does not place out of order.
///
/// # Errors
///
/// `EINVAL` for a type that no device has it for, `EOPNOTSUPP` for one that this device has not.
pub(super) fn check(verb: &'static str, file: &File, qp_type: QpType) -> Result<()> {
    file.provider.mlx5(verb)?;
    let Some(capability) = capability(qp_type) else {
        let detail = format!("type {qp_type} has no placement out of order");
        return Err(Error::invalid(verb, detail));
    };
    let (_, driver_response) = file.query_device(verb)?;
    let device: mlx5_ib_query_device_resp = driver_response.read();
    let flags = mlx5_ib_query_dev_resp_flags::from_bits_retain(device.flags);
    let name = file.device.name();
    if !flags.contains(mlx5_ib_query_dev_resp_flags::MLX5_IB_QUERY_DEV_RESP_FLAGS_OOO_DP) {
        let detail = format!(
            "{name} has no placement out of order, or a kernel before Linux 6.13 that does not tell"
        );
        return Err(Error::new(verb, Errno::OPNOTSUPP).detail(detail));
    }
    // The flag says that there is some type.
    if capabilities(verb, file)?.get(capability) == 0 {
        let detail =
            format!("{name} has placement out of order for other types, but not for {qp_type}");
        return Err(Error::new(verb, Errno::OPNOTSUPP).detail(detail));
    }
    Ok(())
}

/// The capability of a type.
fn capability(qp_type: QpType) -> Option<Field<cmd_hca_cap>> {
    match qp_type {
        QpType::RC => Some(cmd_hca_cap::dp_ordering_ooo_all_rc),
        QpType::UC => Some(cmd_hca_cap::dp_ordering_ooo_all_uc),
        QpType::UD => Some(cmd_hca_cap::dp_ordering_ooo_all_ud),
        QpType::XRC_INI => Some(cmd_hca_cap::dp_ordering_ooo_all_xrc),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_has_a_capability_of_its_own() {
        let fields =
            [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI].map(|it| capability(it).unwrap());
        for (nth, field) in fields.iter().enumerate() {
            let mut caps = Bits::<cmd_hca_cap, _>::new(vec![0; cmd_hca_cap::SIZE]);
            caps.set(*field, 1);
            let set = fields.map(|field| caps.get(field));
            assert_eq!(set, std::array::from_fn(|at| u64::from(at == nth)));
        }
        assert!(capability(QpType::RAW_PACKET).is_none());
        assert!(capability(QpType::XRC_TGT).is_none());
    }
}
