//! User contexts, to which objects belong.
//!
//! Pairs with CREATE_UCTX, which mlx5_ib sends for each open device file.

use uverbs_uapi::mlx5::prm::object::{create_uctx_in, create_uctx_out, destroy_uctx_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;

/// A user context.
pub struct Uctx;

impl Device {
    pub(crate) fn create_uctx(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_uctx_in, _>::new(input);
        let caps = input.sub(create_uctx_in::uctx);
        let wanted = caps.get(uverbs_uapi::mlx5::prm::object::uctx::cap);
        if wanted != 0 {
            return refuse!(BadParam, "user context capabilities {wanted:#x} are not modelled");
        }
        let number = self.objects.uctxs.insert(Uctx)?;
        let mut out = Bits::<create_uctx_out, _>::new(vec![0; create_uctx_out::SIZE]);
        out.set(create_uctx_out::uid, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_uctx(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<destroy_uctx_in, _>::new(input);
        let uid = input.get32(destroy_uctx_in::uid);
        self.objects.uctxs.get(uid)?;
        // Its number would come round, and whoever gets it would own them.
        if let Some(kind) = self.objects.left_by(uid) {
            return refuse!(ResourceBusy, "user context {uid} has a {kind}");
        }
        self.objects.uctxs.remove(uid)?;
        // A process may have closed its device before what uses a page of it.
        let left = self.objects.uars.reclaim(uid);
        if left > 0 {
            log::debug!("user context {uid} left {left} UARs behind");
        }
        Ok(vec![])
    }
}
