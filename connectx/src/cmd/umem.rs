//! Commands of umems.
//!
//! Pairs with `devx.c` of mlx5_ib.

use uverbs_uapi::mlx5::prm::object::{
    create_umem_in, create_umem_out, destroy_umem_in, umem as context,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::chunks::chunks;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::object::buffer::Buffer;
use crate::object::umem::Umem;

/// The bit of an MTT entry that lets the device write the page: `MLX5_IB_MTT_WRITE`.
const MTT_WRITE: u64 = 1 << 1;

pub(crate) fn create_umem(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<create_umem_in, _>::new(input);
    let umem = input.sub(create_umem_in::umem);
    let pages = umem.get(context::num_of_mtt);
    let log_page_size = umem.get(context::log_page_size);
    let offset = umem.get(context::page_offset);
    let list = input.bytes().get(create_umem_in::SIZE..).unwrap_or_default();
    if pages > 1 << 24 || pages > (list.len() / 8) as u64 || log_page_size > 20 {
        return refuse!(
            BadParam,
            "umem of {pages} pages of 2^(12+{log_page_size}) bytes: {} pages are listed, \
             and a page has at most 2^32 bytes",
            list.len() / 8
        );
    }
    let len = pages << (12 + log_page_size);
    let Some(rest) = len.checked_sub(offset) else {
        return refuse!(BadParam, "a umem cannot begin at byte {offset:#x} of {len:#x}");
    };
    let buffer = Buffer::new(&device.objects.listed_pages, log_page_size, 0, len, list)?
        .part(offset, rest)?;
    let mut entries = chunks::<8>(list).iter().take(pages as usize);
    let is_writable = entries.all(|entry| u64::from_be_bytes(*entry) & MTT_WRITE != 0);
    let number = device.objects.umems.insert_owned(uid, Umem { buffer, is_writable })?;
    let mut out = Bits::<create_umem_out, _>::new(vec![0; create_umem_out::SIZE]);
    out.set(create_umem_out::umem_id, number.into());
    Ok(out.into_inner())
}

pub(crate) fn destroy_umem(
    device: &mut Device,
    uid: u32,
    input: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<destroy_umem_in, _>::new(input);
    let number = input.get32(destroy_umem_in::umem_id);
    device.objects.umems.owned_mut(uid, number)?;
    device.objects.umems.remove(number)?;
    Ok(vec![])
}
