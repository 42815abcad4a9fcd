//! User contexts and the memory they register for their own objects.
//!
//! Pairs with CREATE_UCTX and CREATE_UMEM, which mlx5_ib sends for each open device file and for
//! DEVX.

use uverbs_uapi::mlx5::prm::object::{
    create_uctx_in, create_uctx_out, create_umem_in, create_umem_out, destroy_uctx_in,
    destroy_umem_in, umem,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::buffer::Buffer;
use crate::cmd::refusal::{Refused, refuse};
use crate::device::Device;

/// A user context.
pub struct Uctx;

/// Registered memory.
pub struct Umem {
    #[expect(dead_code, reason = "commands that name a umem are refused so far")]
    buffer: Buffer,
}

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
        self.objects.uctxs.remove(uid)?;
        // A process may have closed its device before what uses a page of it.
        let left = self.objects.uars.reclaim(uid);
        if left > 0 {
            log::debug!("user context {uid} left {left} UARs behind");
        }
        Ok(vec![])
    }

    pub(crate) fn create_umem(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<create_umem_in, _>::new(input);
        let context = input.sub(create_umem_in::umem);
        let pages = context.get(umem::num_of_mtt);
        let log_page_size = context.get(umem::log_page_size);
        let list = input.bytes().get(create_umem_in::SIZE..).unwrap_or_default();
        if pages > 1 << 24 || pages > (list.len() / 8) as u64 || log_page_size > 20 {
            return refuse!(BadParam, "umem of {pages} pages of 2^(12+{log_page_size}) bytes");
        }
        let buffer = Buffer::new(log_page_size, 0, pages << (12 + log_page_size), list)?;
        let number = self.objects.umems.insert_owned(uid, Umem { buffer })?;
        let mut out = Bits::<create_umem_out, _>::new(vec![0; create_umem_out::SIZE]);
        out.set(create_umem_out::umem_id, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn destroy_umem(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<destroy_umem_in, _>::new(input);
        let number = input.get32(destroy_umem_in::umem_id);
        self.objects.umems.own(uid, number)?;
        self.objects.umems.remove(number)?;
        Ok(vec![])
    }
}
