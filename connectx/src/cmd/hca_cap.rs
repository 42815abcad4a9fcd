//! QUERY_HCA_CAP and SET_HCA_CAP.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::cmd::{query_hca_cap_out, set_hca_cap_in};
use uverbs_uapi::mlx5::prm::hca_cap::atomic_caps;

use crate::command_error::{CommandError, refuse};
use crate::hca_caps::{ATOMIC, GENERAL, GROUP, HcaCaps, ROCE};

/// QUERY_HCA_CAP: bit 0 of `op_mod` selects current values, the other bits are the group.
///
/// # Errors
/// If the function has no such group.
pub(crate) fn query_hca_cap(caps: &HcaCaps, op_mod: u16) -> Result<Vec<u8>, CommandError> {
    let Some(group) = caps.groups.get(&(op_mod >> 1)) else {
        return refuse!(BadParam, "capability group {:#x} is not modelled", op_mod >> 1);
    };
    let values = if op_mod & 1 == 0 { &group.max } else { &group.current };
    let mut out = Bits::<query_hca_cap_out, _>::new(vec![0; 16 + GROUP]);
    out.set_span(query_hca_cap_out::capability, values);
    Ok(out.into_inner())
}

/// SET_HCA_CAP: changes the current values of a group.
///
/// # Errors
/// If the function has no such group, or the driver may not set it.
pub(crate) fn set_hca_cap(
    caps: &mut HcaCaps,
    op_mod: u16,
    input: &[u8],
) -> Result<(), CommandError> {
    let input = Bits::<set_hca_cap_in, _>::new(input);
    let kind = op_mod >> 1;
    let Some(group) = caps.groups.get_mut(&kind) else {
        return refuse!(BadParam, "capability group {kind:#x} is not modelled");
    };
    let values = input.span(set_hca_cap_in::capability);
    match kind {
        // The driver sends one field and zeros. The zeros must not clear the other fields.
        ATOMIC => {
            let field = atomic_caps::atomic_req_8B_endianness_mode;
            let mode = Bits::<atomic_caps, _>::new(values).get(field);
            Bits::<atomic_caps, _>::new(&mut group.current[..]).set(field, mode);
        }
        GENERAL | ROCE => {
            if values.len() > GROUP {
                return refuse!(
                    BadInputLength,
                    "{} bytes of capabilities, a group has {GROUP}",
                    values.len()
                );
            }
            group.current[..values.len()].copy_from_slice(values);
        }
        _ => return refuse!(BadParam, "capability group {kind:#x} cannot be set"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn setting_the_atomic_endianness_keeps_the_other_atomic_caps() {
        let mut caps = HcaCaps::new(&Options::default());
        let mut input = Bits::<set_hca_cap_in, _>::new(vec![0; 16 + GROUP]);
        let mut value = Bits::<atomic_caps, _>::new([0u8; 64]);
        value.set(atomic_caps::atomic_req_8B_endianness_mode, 1);
        input.set_span(set_hca_cap_in::capability, &value.into_inner());
        set_hca_cap(&mut caps, ATOMIC << 1, &input.into_inner()).unwrap();
        let out = query_hca_cap(&caps, ATOMIC << 1 | 1).unwrap();
        let current = Bits::<atomic_caps, _>::new(&out[16..]);
        assert_eq!(current.get(atomic_caps::atomic_req_8B_endianness_mode), 1);
        assert_eq!(current.get(atomic_caps::atomic_size_qp), 12);
        assert!(query_hca_cap(&caps, 0x7e).is_err());
    }
}
