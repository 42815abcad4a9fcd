//! Device memory (MEMIC): the driver's part of its commands, and the mmap offset of its pages.
//!
//! Pairs with `hw/mlx5/dm.c`.

use super::mmap_offset::mmap_offset;
use crate::memory::mapping::Mapper;
use crate::memory::mmio_window::MmioWindow;
use crate::uverbs::command::Command;
use crate::uverbs::kernel::Kernel;
use rustix::io::Errno;
use rustix::param::page_size;
use uverbs_uapi::mlx5::context::MLX5_IB_MMAP_DEVICE_MEM;
use uverbs_uapi::mlx5::dm as uapi;
use uverbs_uapi::object::UVERBS_OBJECT_DM;

/// The location of device memory, as the driver reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DmLocation {
    /// The offset of the memory in its first page, in bytes.
    start_offset: u64,
    /// Names its pages in the offset that `mmap` takes.
    page_index: u16,
}

impl DmLocation {
    /// Adds the driver's part to the command that allocates.
    pub(crate) fn request<'a>(&'a mut self, command: &mut Command<'a>) {
        command
            .output(uapi::MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET, &mut self.start_offset)
            .output(uapi::MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX, &mut self.page_index);
    }

    /// The location of the memory of this handle, and its length in bytes.
    pub(crate) fn query(kernel: &dyn Kernel, handle: u32) -> Result<(DmLocation, u64), Errno> {
        let mut location = DmLocation::default();
        let mut length = 0u64;
        let mut command = Command::new(UVERBS_OBJECT_DM, uapi::MLX5_IB_METHOD_DM_QUERY);
        command
            .handle(uapi::MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE, handle)
            .output(uapi::MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET, &mut location.start_offset)
            .output(uapi::MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX, &mut location.page_index)
            .output(uapi::MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH, &mut length);
        kernel.execute(&mut command)?;
        Ok((location, length))
    }

    /// Two numbers that tell this location from others of the same context.
    pub(crate) fn numbers(self) -> [u64; 2] {
        [self.start_offset, self.page_index.into()]
    }

    /// The offset of the memory in its first page, in bytes.
    pub(crate) fn within_page(self) -> u64 {
        self.start_offset % page_size() as u64
    }

    /// The offset at which a file maps its pages.
    pub(crate) fn mmap_offset(self) -> u64 {
        mmap_offset(MLX5_IB_MMAP_DEVICE_MEM, self.page_index.into(), page_size())
    }

    /// Maps `length` bytes of memory.
    pub(crate) fn map(self, length: usize, mapper: &dyn Mapper) -> Result<MmioWindow, Errno> {
        let mapped = length.checked_next_multiple_of(page_size()).ok_or(Errno::NOMEM)?;
        let within = self.within_page() as usize;
        let mapping = mapper.map(self.mmap_offset(), mapped)?;
        MmioWindow::new(mapping, within, length).ok_or(Errno::BADMSG)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::memory::mapping::Mapping;
    use crate::sync::fork::Epoch;

    impl Mapper for FakeMapping {
        fn map(&self, _: u64, length: usize) -> Result<Mapping, Errno> {
            self.map(length, Epoch::current()?)
        }

        fn map_read_only(&self, _: u64, length: usize) -> Result<Mapping, Errno> {
            self.map_read_only(length, Epoch::current()?)
        }
    }

    #[test]
    fn numbers_tell_locations_of_a_context_apart() {
        let starts = [0, 1, 64, 1 << 40];
        let all = starts.iter().flat_map(|&start_offset| {
            [0, 1, 0xabcd].map(|page_index| DmLocation { start_offset, page_index })
        });
        let numbers: std::collections::HashSet<_> = all.map(DmLocation::numbers).collect();
        assert_eq!(numbers.len(), 12);
    }

    #[test]
    fn memory_that_begins_within_a_page_is_written_from_there_on() {
        let file = FakeMapping::new("dm", page_size());
        for start_offset in [0, 64, page_size() as u64 + 128] {
            let at = start_offset % page_size() as u64;
            let location = DmLocation { start_offset, page_index: 1 };
            location.map(64, &file).unwrap().store(0, &[at as u8 + 1; 8]).unwrap();
            assert_eq!(file.read(at, 8), [at as u8 + 1; 8], "{start_offset}");
            assert!(
                location.map(page_size(), &file).is_err() || at == 0,
                "it ends behind the page"
            );
        }
        assert_eq!([0, 64, 128].map(|at| file.read(at, 1)[0]), [1, 65, 129]);
    }
}
