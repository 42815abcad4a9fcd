//! QUERY_PAGES and MANAGE_PAGES, and the events that ask for pages.

use std::collections::BTreeSet;

use uverbs_uapi::mlx5::prm::cmd::{
    manage_pages_in, manage_pages_out, query_pages_in, query_pages_out,
};
use uverbs_uapi::mlx5::prm::{Bits, Layout};

use crate::chunks::chunks;
use crate::command_error::{CommandError, refuse};
use crate::device::Device;
use crate::format::event;
use crate::pages::{BOOT_PAGES, FirmwarePages, INIT_PAGES};

const BOOT: u64 = 1;
const INIT: u64 = 2;
const REGULAR: u64 = 3;

const CANNOT_GIVE: u64 = 0;
const GIVE: u64 = 1;
const TAKE: u64 = 2;

/// The most pages that firmware takes: far more than all objects need.
const MOST_PAGES: usize = 1 << 18;

/// Answers QUERY_PAGES.
///
/// # Errors
/// For a phase that does not exist.
pub(crate) fn query_pages(pages: &FirmwarePages, input: &[u8]) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<query_pages_in, _>::new(input);
    let wanted = match input.get(query_pages_in::op_mod) {
        BOOT => BOOT_PAGES,
        INIT => BOOT_PAGES + INIT_PAGES,
        // Events ask for more.
        REGULAR => pages.held.len(),
        other => return refuse!(BadParam, "QUERY_PAGES of phase {other}, phases are 1 to 3"),
    };
    let mut out = Bits::<query_pages_out, _>::new(vec![0; query_pages_out::SIZE]);
    out.set(query_pages_out::num_pages, wanted.saturating_sub(pages.held.len()) as u64);
    Ok(out.into_inner())
}

/// MANAGE_PAGES. `room` is the length of the output that the driver expects.
///
/// # Errors
/// For a page that is given twice, a list that is too short, or an address that is no page.
pub(crate) fn manage_pages(
    pages: &mut FirmwarePages,
    input: &[u8],
    room: usize,
) -> Result<Vec<u8>, CommandError> {
    let input = Bits::<manage_pages_in, _>::new(input);
    let count = input.get(manage_pages_in::input_num_entries) as usize;
    let mut out = Bits::<manage_pages_out, _>::new(vec![0; manage_pages_out::SIZE]);
    pages.requested = false;
    match input.get(manage_pages_in::op_mod) {
        CANNOT_GIVE => log::warn!("the driver cannot give pages"),
        GIVE => {
            let list = chunks::<8>(input.tail(manage_pages_in::pas));
            let Some(list) = list.get(..count) else {
                return refuse!(BadInputLength, "{count} pages given, {} listed", list.len());
            };
            let mut given = BTreeSet::new();
            for page in list.iter().map(|page| u64::from_be_bytes(*page)) {
                if page & 0xfff != 0 || pages.held.contains(&page) || !given.insert(page) {
                    return refuse!(BadParam, "page {page:#x} is given twice or not aligned");
                }
            }
            if pages.held.len() + given.len() > MOST_PAGES {
                return refuse!(LimitExceeded, "firmware takes no more than {MOST_PAGES} pages");
            }
            pages.held.append(&mut given);
        }
        TAKE => {
            let count = count.min(pages.held.len()).min(room.saturating_sub(16) / 8);
            out.set(manage_pages_out::output_num_entries, count as u64);
            let mut out = out.into_inner();
            for page in std::iter::from_fn(|| pages.held.pop_last()).take(count) {
                out.extend(page.to_be_bytes());
            }
            return Ok(out);
        }
        other => return refuse!(BadParam, "MANAGE_PAGES with op_mod {other}, valid are 0 to 2"),
    }
    Ok(out.into_inner())
}

/// Raises the event that asks for host pages, or offers some back, if the number of objects calls
/// for it.
pub(crate) fn balance_pages(device: &mut Device) {
    if !device.objects.eqs.iter().any(|(_, eq)| eq.wants(event::PAGE_REQUEST)) {
        return;
    }
    let objects = device.objects.counts().iter().map(|(_, count)| count).sum();
    if let Some(change) = device.pages.wanted(objects) {
        log::debug!("{change} host pages, for {objects} objects");
        let mut data = [0; 28];
        data[4..8].copy_from_slice(&change.to_be_bytes());
        device.raise_async_event(event::PAGE_REQUEST, 0, &data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(op_mod: u64, pages: &[u64], count: u64) -> Vec<u8> {
        let mut input = Bits::<manage_pages_in, _>::new(vec![0; 16]);
        input.set(manage_pages_in::op_mod, op_mod);
        input.set(manage_pages_in::input_num_entries, count);
        let mut input = input.into_inner();
        input.extend(pages.iter().flat_map(|page| page.to_be_bytes()));
        input
    }

    #[test]
    fn the_wanted_pages_follow_the_number_of_objects() {
        let mut pages = FirmwarePages {
            held: (0..80).map(|page| page << 12).collect(),
            ..FirmwarePages::default()
        };
        assert_eq!(pages.wanted(100), None, "not running");
        pages.set_running(true);
        assert_eq!(pages.wanted(8), Some(1 + 16));
        assert_eq!(pages.wanted(800), None, "the driver has not answered");
        let more: Vec<u64> = (100..117).map(|page| page << 12).collect();
        manage_pages(&mut pages, &command(GIVE, &more, 17), 16).unwrap();
        assert_eq!(pages.wanted(80), None);
        assert_eq!(pages.wanted(8 * 14), Some(13));
        let more: Vec<u64> = (200..250).map(|page| page << 12).collect();
        manage_pages(&mut pages, &command(GIVE, &more, 50), 16).unwrap();
        assert_eq!(pages.held(), FirmwarePages::most(8 * (147 - 80 - 32)));
        assert_eq!(pages.wanted(8 * (147 - 80 - 32)), None, "as many as firmware keeps");
        assert_eq!(pages.wanted(0), Some(16 - 67));
        manage_pages(&mut pages, &command(TAKE, &[], 51), 16 + 51 * 8).unwrap();
        assert_eq!(pages.wanted(0), None);
    }

    #[test]
    fn pages_are_given_and_taken_once() {
        let mut pages = FirmwarePages::default();
        manage_pages(&mut pages, &command(GIVE, &[0x1000, 0x2000, 0x3000], 3), 16).unwrap();
        assert!(manage_pages(&mut pages, &command(GIVE, &[0x2000], 1), 16).is_err());
        assert!(
            manage_pages(&mut pages, &command(GIVE, &[0x5000, 0x6000, 0x5000], 3), 16).is_err()
        );
        assert_eq!(pages.held(), 3, "none of a list that is refused");
        assert!(manage_pages(&mut pages, &command(GIVE, &[0x4000], 2), 16).is_err());
        let out = manage_pages(&mut pages, &command(TAKE, &[], 9), 16 + 2 * 8).unwrap();
        assert_eq!(out[11], 2);
        assert_eq!(&out[16..24], &0x3000u64.to_be_bytes());
        assert_eq!(pages.held(), 1);
    }

    #[test]
    fn as_many_pages_as_the_limit_are_accepted() {
        let mut pages = FirmwarePages::default();
        let many: Vec<u64> = (1..=MOST_PAGES as u64).map(|page| page << 12).collect();
        let count = many.len() as u64;
        manage_pages(&mut pages, &command(GIVE, &many, count), 16).unwrap();
        assert_eq!(pages.held(), MOST_PAGES);
        assert!(manage_pages(&mut pages, &command(GIVE, &[0xffff_f000], 1), 16).is_err());
    }
}
