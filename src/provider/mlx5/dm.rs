//! Device memory (MEMIC): what the driver adds to its commands, and where it is to be mapped.
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

/// Where device memory is, as the driver tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DmPlace {
    /// Where in its first page it begins, in bytes.
    start: u64,
    /// What its pages are mapped by.
    index: u16,
}

impl DmPlace {
    /// Adds the driver's part to the command that allocates.
    pub(crate) fn request<'a>(&'a mut self, command: Command<'a>) -> Command<'a> {
        command
            .output(uapi::MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET, &mut self.start)
            .output(uapi::MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX, &mut self.index)
    }

    /// Where the memory of this handle is, and how many bytes it has.
    pub(crate) fn query(kernel: &dyn Kernel, handle: u32) -> Result<(DmPlace, u64), Errno> {
        let mut place = DmPlace::default();
        let mut length = 0u64;
        let mut command = Command::new(UVERBS_OBJECT_DM, uapi::MLX5_IB_METHOD_DM_QUERY)
            .handle(uapi::MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE, handle)
            .output(uapi::MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET, &mut place.start)
            .output(uapi::MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX, &mut place.index)
            .output(uapi::MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH, &mut length);
        kernel.execute(&mut command)?;
        drop(command);
        Ok((place, length))
    }

    /// Two numbers that tell this place from others of the same file.
    pub(crate) fn numbers(self) -> [u64; 2] {
        [self.start, self.index.into()]
    }

    /// Maps `length` bytes of memory.
    pub(crate) fn map(self, length: usize, mapper: &dyn Mapper) -> Result<MmioWindow, Errno> {
        let mapped = length.checked_next_multiple_of(page_size()).ok_or(Errno::NOMEM)?;
        let within = (self.start % page_size() as u64) as usize;
        let offset = mmap_offset(MLX5_IB_MMAP_DEVICE_MEM, self.index.into(), page_size());
        let mapping = mapper.map(offset, mapped)?;
        MmioWindow::new(mapping, within, length).ok_or(Errno::BADMSG)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::fake_mapping::FakeMapping;
    use crate::memory::fork::Epoch;
    use crate::memory::mapping::Mapping;

    impl Mapper for FakeMapping {
        fn map(&self, _: u64, length: usize) -> Result<Mapping, Errno> {
            self.map(length, Epoch::current()?)
        }

        fn map_read_only(&self, _: u64, length: usize) -> Result<Mapping, Errno> {
            self.map_read_only(length, Epoch::current()?)
        }
    }

    #[test]
    fn numbers_tell_places_of_a_file_apart() {
        let starts = [0, 1, 64, 1 << 40];
        let all =
            starts.iter().flat_map(|&start| [0, 1, 0xabcd].map(|index| DmPlace { start, index }));
        let numbers: std::collections::HashSet<_> = all.map(DmPlace::numbers).collect();
        assert_eq!(numbers.len(), 12);
    }

    #[test]
    fn memory_that_begins_within_a_page_is_written_from_there_on() {
        let file = FakeMapping::new("dm", page_size());
        for start in [0, 64, page_size() as u64 + 128] {
            let at = start % page_size() as u64;
            let place = DmPlace { start, index: 1 };
            place.map(64, &file).unwrap().store(0, &[at as u8 + 1; 8]).unwrap();
            assert_eq!(file.read(at, 8), [at as u8 + 1; 8], "{start}");
            assert!(place.map(page_size(), &file).is_err() || at == 0, "it ends behind the page");
        }
        assert_eq!([0, 64, 128].map(|at| file.read(at, 1)[0]), [1, 65, 129]);
    }
}
