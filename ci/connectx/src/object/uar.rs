//! UAR pages: the parts of BAR0 where software rings doorbells.
//!
//! Pairs with ALLOC_UAR and DEALLOC_UAR. A number is the page's place in BAR0.

use std::ops::RangeInclusive;

use uverbs_uapi::mlx5::prm::object::{alloc_uar_out, dealloc_uar_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::cmd::refusal::Refused;
use crate::device::Device;

/// Size of a page.
pub const PAGE: u64 = 4096;
/// Pages of BAR0 that are UARs: behind the initialization segment and MSI-X, before the VAR pages.
pub const NUMBERS: RangeInclusive<u32> = 16..=(crate::var::OFFSET / PAGE) as u32 - 1;

/// An allocated page.
pub struct Uar;

impl Device {
    pub(crate) fn alloc_uar(&mut self, uid: u32) -> Result<Vec<u8>, Refused> {
        let number = self.objects.uars.insert_owned(uid, Uar)?;
        let mut out = Bits::<alloc_uar_out, _>::new(vec![0; alloc_uar_out::SIZE]);
        out.set(alloc_uar_out::uar, number.into());
        Ok(out.into_inner())
    }

    pub(crate) fn dealloc_uar(&mut self, uid: u32, input: &[u8]) -> Result<Vec<u8>, Refused> {
        let input = Bits::<dealloc_uar_in, _>::new(input);
        let number = input.get32(dealloc_uar_in::uar);
        self.objects.uars.own(uid, number)?;
        self.objects.uars.remove(number)?;
        Ok(vec![])
    }
}
