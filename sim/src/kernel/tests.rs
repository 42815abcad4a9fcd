//! Commands that fail: nothing is left of them, on the device or lent to it.

use super::{FileId, Kernel};
use crate::call::Result;
use crate::driver::Driver;
use crate::faults::Rates;
use crate::interface::Interface;
use crate::memory::{Pages, User};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_connectx::fault::CommandFailure;
use uverbs_connectx::options::Options;
use uverbs_uapi::async_event::ib_uverbs_async_event_desc;
use uverbs_uapi::comp_channel::ib_uverbs_comp_event_desc;
use uverbs_uapi::cq::*;
use uverbs_uapi::device::*;
use uverbs_uapi::dm::*;
use uverbs_uapi::ioctl::{ib_uverbs_attr, ib_uverbs_ioctl_hdr};
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_cq, mlx5_ib_create_qp, mlx5_ib_create_srq};
use uverbs_uapi::mlx5::context::{mlx5_ib_alloc_ucontext_req_v2, mlx5_ib_alloc_uctx_v2_flags};
use uverbs_uapi::mlx5::devx::*;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_OBJECT_UAR,
    mlx5_ib_uapi_reg_dmabuf_flags,
};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mlx5::uar::*;
use uverbs_uapi::mr::*;
use uverbs_uapi::object::*;
use uverbs_uapi::pd::ib_uverbs_alloc_pd_resp;
use uverbs_uapi::qp::*;
use uverbs_uapi::srq::*;
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_ALLOC_PD, IB_USER_VERBS_CMD_REG_MR, IB_USER_VERBS_CMD_REREG_MR,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A status of commands, which is `EBUSY`.
const BUSY: u8 = 6;
/// Bytes of an event of any kind.
const WIDTH: usize = size_of::<ib_uverbs_comp_event_desc>();
/// Offset of a doorbell record in the memory of the test.
const RECORD: u64 = 0x3000;

/// A kernel with one device, a file with a context and a PD, and memory for queues.
struct Bench {
    kernel: Kernel,
    file: FileId,
    _fd: OwnedFd,
    memory: Arc<Pages>,
    uar: u32,
    pd: u32,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(Options::default())
    }

    fn with(options: Options) -> Bench {
        let mut kernel = Kernel::new(1, Rates::none());
        let interface = Interface::numbered(0, &[]);
        let driver =
            Driver::probe(&mut kernel.switch, options, "mlx5_0".into(), interface).unwrap();
        let uar = driver.alloc_uar(&mut kernel.switch, 0).unwrap();
        kernel.drivers.push(driver);
        let (file, fd) = kernel.open(0, 0).unwrap();
        let memory = Pages::new(0x4000);
        let mut bench = Bench { kernel, file, _fd: fd, memory, uar, pd: 0 };
        let flags = mlx5_ib_alloc_uctx_v2_flags::MLX5_IB_ALLOC_UCTX_DEVX.bits();
        let context = mlx5_ib_alloc_ucontext_req_v2 { flags, ..Default::default() };
        let attrs = [input(UVERBS_ATTR_UHW_IN, &context)];
        bench.run(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT, attrs).unwrap();
        let pd: ib_uverbs_alloc_pd_resp = bench.write(IB_USER_VERBS_CMD_ALLOC_PD, &[0; 8]).unwrap();
        bench.pd = pd.pd_handle;
        bench
    }

    /// Runs a method; returns its attributes as they are then.
    fn run<const N: usize>(
        &mut self,
        object_id: u16,
        method_id: u16,
        attrs: [ib_uverbs_attr; N],
    ) -> Result<[ib_uverbs_attr; N]> {
        let length = size_of::<ib_uverbs_ioctl_hdr>() + size_of_val(&attrs);
        let header = ib_uverbs_ioctl_hdr {
            length: length as u16,
            object_id,
            method_id,
            num_attrs: N as u16,
            driver_id: rdma_driver_id::RDMA_DRIVER_MLX5.0,
            ..Default::default()
        };
        let mut message = [header.as_bytes(), attrs.as_bytes()].concat();
        let address = message.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the message and the memory of its attributes are there until the call returns.
        let user = unsafe { User::new() };
        self.kernel.ioctl(self.file, user, address)?;
        let bytes = &message[size_of_val(&header)..];
        Ok(<[ib_uverbs_attr; N]>::read_from_bytes(bytes).unwrap())
    }

    /// Runs an older command.
    fn write<T: FromBytes + IntoBytes>(&mut self, command: u32, request: &[u8]) -> Result<T> {
        let mut response = T::new_zeroed();
        let address = response.as_mut_bytes().as_mut_ptr().expose_provenance() as u64;
        let attrs = [
            attr(UVERBS_ATTR_WRITE_CMD, 8, command.into()),
            input(UVERBS_ATTR_CORE_IN, request),
            attr(UVERBS_ATTR_CORE_OUT, size_of::<T>(), address),
        ];
        self.run(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, attrs)?;
        Ok(response)
    }

    fn create_cq(&mut self, channel: i32, events: i32) -> Result<u32> {
        let driver_part = mlx5_ib_create_cq {
            buf_addr: self.memory.address(),
            db_addr: self.memory.address() + RECORD,
            cqe_size: 64,
            uar_page_index: self.uar as u16,
            ..Default::default()
        };
        let attrs = [
            attr(UVERBS_ATTR_CREATE_CQ_HANDLE, 0, 0),
            attr(UVERBS_ATTR_CREATE_CQ_CQE, 4, 15),
            attr(UVERBS_ATTR_CREATE_CQ_USER_HANDLE, 8, 1),
            descriptor(UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL, channel),
            descriptor(UVERBS_ATTR_CREATE_CQ_EVENT_FD, events),
            input(UVERBS_ATTR_UHW_IN, &driver_part),
        ];
        let made = self.run(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE, attrs)?;
        Ok(made[0].data as u32)
    }

    fn create_srq(&mut self, events: i32) -> Result<u32> {
        let driver_part = mlx5_ib_create_srq {
            buf_addr: self.memory.address(),
            db_addr: self.memory.address() + RECORD,
            ..Default::default()
        };
        let kind = ib_uverbs_srq_type::IB_UVERBS_SRQT_BASIC.0;
        let attrs = [
            attr(UVERBS_ATTR_CREATE_SRQ_HANDLE, 0, 0),
            attr(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE, 0, self.pd.into()),
            attr(UVERBS_ATTR_CREATE_SRQ_MAX_WR, 4, 15),
            attr(UVERBS_ATTR_CREATE_SRQ_MAX_SGE, 4, 1),
            attr(UVERBS_ATTR_CREATE_SRQ_TYPE, 8, kind.into()),
            descriptor(UVERBS_ATTR_CREATE_SRQ_EVENT_FD, events),
            input(UVERBS_ATTR_UHW_IN, &driver_part),
        ];
        let made = self.run(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE, attrs)?;
        Ok(made[0].data as u32)
    }

    fn create_qp(&mut self, cq: u32, events: i32) -> Result<u32> {
        let driver_part = mlx5_ib_create_qp {
            buf_addr: self.memory.address(),
            db_addr: self.memory.address() + RECORD,
            sq_wqe_count: 16,
            bfreg_index: self.uar,
            ..Default::default()
        };
        let kind = ib_uverbs_qp_type::IB_UVERBS_QPT_RC;
        let attrs = [
            attr(UVERBS_ATTR_CREATE_QP_HANDLE, 0, 0),
            attr(UVERBS_ATTR_CREATE_QP_PD_HANDLE, 0, self.pd.into()),
            attr(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, 0, cq.into()),
            attr(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, 0, cq.into()),
            attr(UVERBS_ATTR_CREATE_QP_TYPE, 8, kind.0.into()),
            descriptor(UVERBS_ATTR_CREATE_QP_EVENT_FD, events),
            input(UVERBS_ATTR_UHW_IN, &driver_part),
        ];
        let made = self.run(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, attrs)?;
        Ok(made[0].data as u32)
    }

    /// Registers a part of a dma-buf by the data-direct function.
    fn reg_direct(&mut self, buffer: &OwnedFd, iova: u64, length: u64) -> Result<u32> {
        let direct = mlx5_ib_uapi_reg_dmabuf_flags::MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT;
        let attrs = [
            attr(UVERBS_ATTR_REG_DMABUF_MR_HANDLE, 0, 0),
            attr(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, 0, self.pd.into()),
            attr(UVERBS_ATTR_REG_DMABUF_MR_OFFSET, 8, 0),
            attr(UVERBS_ATTR_REG_DMABUF_MR_LENGTH, 8, length),
            attr(UVERBS_ATTR_REG_DMABUF_MR_IOVA, 8, iova),
            attr(UVERBS_ATTR_REG_DMABUF_MR_FD, 4, buffer.as_raw_fd() as u64),
            attr(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 4, 1),
            attr(MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 4, direct.bits().into()),
        ];
        let made = self.run(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR, attrs)?;
        Ok(made[0].data as u32)
    }

    /// Registers a dma-buf for DEVX, in pages of the sizes of `bitmap`.
    fn reg_umem(&mut self, buffer: &OwnedFd, length: u64, bitmap: u64) -> Result<u32> {
        let attrs = [
            attr(MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE, 0, 0),
            attr(MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR, 8, 0),
            attr(MLX5_IB_ATTR_DEVX_UMEM_REG_LEN, 8, length),
            attr(MLX5_IB_ATTR_DEVX_UMEM_REG_PGSZ_BITMAP, 8, bitmap),
            descriptor(MLX5_IB_ATTR_DEVX_UMEM_REG_DMABUF_FD, buffer.as_raw_fd()),
        ];
        let made = self.run(MLX5_IB_OBJECT_DEVX_UMEM, MLX5_IB_METHOD_DEVX_UMEM_REG, attrs)?;
        Ok(made[0].data as u32)
    }

    fn fail_command(&mut self, op: u16, after: u32) {
        let device = self.kernel.switch.function(0).device_mut();
        device.faults_mut().fail_command(op, after, CommandFailure::Status(BUSY));
    }

    /// The number of the device's objects of each kind, and of the ranges that are lent to it.
    fn census(&mut self) -> (Vec<(&'static str, usize)>, usize) {
        let function = self.kernel.switch.function(0);
        (function.device().objects().counts(), function.memory_mut().pins())
    }
}

fn attr(attr_id: u16, length: usize, data: u64) -> ib_uverbs_attr {
    ib_uverbs_attr { attr_id, len: length as u16, data, ..Default::default() }
}

fn descriptor(attr_id: u16, fd: i32) -> ib_uverbs_attr {
    attr(attr_id, 0, i64::from(fd) as u64)
}

/// An input, which outlives the attribute.
fn input<T: IntoBytes + Immutable + ?Sized>(attr_id: u16, value: &T) -> ib_uverbs_attr {
    let bytes = value.as_bytes();
    attr(attr_id, bytes.len(), bytes.as_ptr().expose_provenance() as u64)
}

#[test]
#[cfg_attr(miri, ignore = "its duplicates of a descriptor have another number")]
fn a_wrong_event_descriptor_leaves_nothing_behind() {
    let mut bench = Bench::new();
    let channel = bench.kernel.add_events(bench.file, WIDTH).unwrap();
    let events = size_of::<ib_uverbs_async_event_desc>();
    let events = bench.kernel.add_events(bench.file, events).unwrap();
    let other = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let cq = bench.create_cq(channel.as_raw_fd(), events.as_raw_fd()).unwrap();
    let before = bench.census();
    for (fd, errno) in [(i32::MAX, Errno::BADF), (other.as_raw_fd(), Errno::INVAL)] {
        assert_eq!(bench.create_cq(fd, events.as_raw_fd()), Err(errno));
        assert_eq!(bench.create_cq(channel.as_raw_fd(), fd), Err(errno));
        assert_eq!(bench.create_srq(fd), Err(errno));
        assert_eq!(bench.create_qp(cq, fd), Err(errno));
        assert_eq!(bench.census(), before, "{errno}");
    }
    // A refused request reports nowhere.
    let qp = bench.create_qp(cq, events.as_raw_fd()).unwrap();
    let srq = bench.create_srq(events.as_raw_fd()).unwrap();
    for handle in [srq, qp, cq] {
        bench.kernel.destroy(bench.file, handle).unwrap();
    }
    drop((channel, events));
    let files = &bench.kernel.files[&bench.file].events;
    assert!(files.iter().all(|file| file.is_closed()));
}

#[test]
fn a_raw_queue_pair_that_is_refused_leaves_nothing_behind() {
    let mut bench = Bench::new();
    let channel = bench.kernel.add_events(bench.file, WIDTH).unwrap();
    let cq = bench.create_cq(channel.as_raw_fd(), -1).unwrap();
    let driver_part = mlx5_ib_create_qp {
        // No page begins there.
        sq_buf_addr: bench.memory.address() + 4,
        db_addr: bench.memory.address() + RECORD,
        sq_wqe_count: 16,
        bfreg_index: bench.uar,
        ..Default::default()
    };
    let kind = ib_uverbs_qp_type::IB_UVERBS_QPT_RAW_PACKET;
    let attrs = [
        attr(UVERBS_ATTR_CREATE_QP_HANDLE, 0, 0),
        attr(UVERBS_ATTR_CREATE_QP_PD_HANDLE, 0, bench.pd.into()),
        attr(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, 0, cq.into()),
        attr(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, 0, cq.into()),
        attr(UVERBS_ATTR_CREATE_QP_TYPE, 8, kind.0.into()),
        input(UVERBS_ATTR_UHW_IN, &driver_part),
    ];
    let errno = if super::qp::has_raw_capability() { Errno::INVAL } else { Errno::PERM };
    let mut refused = || {
        let answer = bench.run(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, attrs);
        assert_eq!(answer.err(), Some(errno));
        bench.census()
    };
    // The first one makes the transport domain of the context.
    assert_eq!(refused(), refused());
}

#[test]
fn a_raw_queue_pair_that_firmware_keeps_in_part_is_destroyed_by_the_next_call() {
    let mut bench = Bench::new();
    let channel = bench.kernel.add_events(bench.file, WIDTH).unwrap();
    let cq = bench.create_cq(channel.as_raw_fd(), -1).unwrap();
    let driver_part = mlx5_ib_create_qp {
        buf_addr: bench.memory.address() + 0x1000,
        sq_buf_addr: bench.memory.address(),
        db_addr: bench.memory.address() + RECORD,
        sq_wqe_count: 16,
        rq_wqe_count: 16,
        rq_wqe_shift: 4,
        bfreg_index: bench.uar,
        ..Default::default()
    };
    let kind = ib_uverbs_qp_type::IB_UVERBS_QPT_RAW_PACKET;
    let attrs = [
        attr(UVERBS_ATTR_CREATE_QP_HANDLE, 0, 0),
        attr(UVERBS_ATTR_CREATE_QP_PD_HANDLE, 0, bench.pd.into()),
        attr(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, 0, cq.into()),
        attr(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, 0, cq.into()),
        attr(UVERBS_ATTR_CREATE_QP_TYPE, 8, kind.0.into()),
        input(UVERBS_ATTR_UHW_IN, &driver_part),
    ];
    if !super::qp::has_raw_capability() {
        let refused = bench.run(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, attrs);
        assert_eq!(refused.err(), Some(Errno::PERM));
        return;
    }
    // The first one makes the transport domain of the context.
    let mut before = None;
    for op in [0, opcode::DESTROY_TIR, opcode::DESTROY_RQ, opcode::DESTROY_SQ, opcode::DESTROY_TIS]
    {
        let made = bench.run(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, attrs).unwrap();
        let handle = made[0].data as u32;
        if op != 0 {
            bench.fail_command(op, 0);
            assert_eq!(bench.kernel.destroy(bench.file, handle), Err(Errno::BUSY), "{op:#x}");
        }
        assert_eq!(bench.kernel.destroy(bench.file, handle), Ok(()), "{op:#x}");
        let after = bench.census();
        assert_eq!(after, *before.get_or_insert_with(|| after.clone()), "{op:#x}");
    }
}

#[test]
fn an_object_that_firmware_does_not_free_is_freed_by_the_next_call() {
    let mut bench = Bench::new();
    let before = bench.census();
    let kind = mlx5_ib_uapi_uar_alloc_type::MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF;
    let uar = [
        attr(MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, 0, 0),
        attr(MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE, 8, kind.0.into()),
    ];
    let uar = bench.run(MLX5_IB_OBJECT_UAR, MLX5_IB_METHOD_UAR_OBJ_ALLOC, uar).unwrap();
    let memory = [
        attr(UVERBS_ATTR_ALLOC_DM_HANDLE, 0, 0),
        attr(UVERBS_ATTR_ALLOC_DM_LENGTH, 8, 64),
        attr(UVERBS_ATTR_ALLOC_DM_ALIGNMENT, 4, 0),
    ];
    let memory = bench.run(UVERBS_OBJECT_DM, UVERBS_METHOD_DM_ALLOC, memory).unwrap();
    for (made, op) in [(uar[0], opcode::DEALLOC_UAR), (memory[0], opcode::DEALLOC_MEMIC)] {
        // `mlx5_ib_mmap_free` drops the refusal.
        let with = bench.census();
        bench.fail_command(op, 0);
        assert_eq!(bench.kernel.destroy(bench.file, made.data as u32), Ok(()));
        assert_eq!(bench.census(), with);
        bench.fail_command(op, 0);
        bench.kernel.reap();
        assert_eq!(bench.census(), with);
        bench.kernel.reap();
        assert_ne!(bench.census(), with);
    }
    assert_eq!(bench.census(), before);
}

#[test]
fn a_region_keeps_its_memory_when_a_rereg_is_refused() {
    let mut bench = Bench::new();
    let start = bench.memory.address();
    let region = ib_uverbs_reg_mr {
        start,
        length: 0x1000,
        hca_va: start,
        pd_handle: bench.pd,
        ..Default::default()
    };
    let made: ib_uverbs_reg_mr_resp =
        bench.write(IB_USER_VERBS_CMD_REG_MR, region.as_bytes()).unwrap();
    let before = bench.census();
    let change = |flags: ib_mr_rereg_flags| ib_uverbs_rereg_mr {
        mr_handle: made.mr_handle,
        flags: flags.bits(),
        start: start + 0x1000,
        length: 0x2000,
        hca_va: start + 0x1000,
        pd_handle: bench.pd,
        access_flags: 1,
        ..Default::default()
    };
    let changes =
        [ib_mr_rereg_flags::IB_MR_REREG_ACCESS, ib_mr_rereg_flags::IB_MR_REREG_TRANS].map(change);
    for op in [opcode::DESTROY_MKEY, opcode::CREATE_MKEY] {
        for change in changes {
            bench.fail_command(op, 0);
            let answer: Result<ib_uverbs_rereg_mr_resp> =
                bench.write(IB_USER_VERBS_CMD_REREG_MR, change.as_bytes());
            assert_eq!(answer.map(|_| ()), Err(Errno::BUSY));
            assert_eq!(bench.census(), before);
        }
    }
    bench.kernel.destroy(bench.file, made.mr_handle).unwrap();
    assert_eq!(bench.census().1, before.1 - 1);
}

fn data_direct() -> Bench {
    Bench::with(Options { data_direct: true, ..Options::default() })
}

#[test]
#[cfg_attr(miri, ignore = "it maps a file")]
fn a_data_direct_region_that_is_refused_lends_its_memory_as_long_as_it_has_an_mkey() {
    let mut bench = data_direct();
    let buffer = crate::dma_buf(1 << 16).unwrap();
    let before = bench.census();
    // The first mkey, and the other name for it.
    for after in [0, 1] {
        bench.fail_command(opcode::CREATE_MKEY, after);
        assert_eq!(bench.reg_direct(&buffer, 0, 1 << 16), Err(Errno::BUSY));
        assert_eq!(bench.census(), before, "{after}");
    }
    bench.fail_command(opcode::CREATE_MKEY, 1);
    bench.fail_command(opcode::DESTROY_MKEY, 0);
    assert_eq!(bench.reg_direct(&buffer, 0, 1 << 16), Err(Errno::BUSY));
    let after = bench.census();
    assert_ne!(after.0, before.0, "firmware keeps the mkey");
    assert_eq!(after.1, before.1 + 1, "the memory of an mkey was taken");
    bench.kernel.close(bench.file);
    assert_eq!(bench.kernel.switch.function(0).memory_mut().pins(), before.1);
}

#[test]
#[cfg_attr(miri, ignore = "it maps a file")]
fn a_data_direct_region_whose_second_mkey_stays_is_destroyed_by_the_next_call() {
    let mut bench = data_direct();
    let buffer = crate::dma_buf(1 << 16).unwrap();
    let before = bench.census();
    for after in [0, 1] {
        let region = bench.reg_direct(&buffer, 0, 1 << 16).unwrap();
        bench.fail_command(opcode::DESTROY_MKEY, after);
        assert_eq!(bench.kernel.destroy(bench.file, region), Err(Errno::BUSY));
        assert_eq!(bench.census().1, before.1 + 1, "{after}");
        assert_eq!(bench.kernel.destroy(bench.file, region), Ok(()), "{after}");
        assert_eq!(bench.census(), before, "{after}");
    }
}

/// The most bytes of memory that this process had at once. Linux adds what each processor counted only now and then, so
/// a later answer may be a little smaller.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A file with holes costs nothing, and the lists of its pages of 4 KiB would have 512 MiB and 1 GiB, or more than there
/// is.
#[test]
#[cfg_attr(miri, ignore = "it maps a file")]
fn lists_that_the_device_does_not_take_are_not_built() {
    const PAGE: u64 = 4096;
    let mut bench = data_direct();
    let before = (bench.census(), most_memory());
    for log in [38, 45] {
        let buffer = crate::dma_buf(1 << log).unwrap();
        assert_eq!(bench.reg_umem(&buffer, 1 << log, PAGE), Err(Errno::INVAL));
        assert_eq!(bench.reg_direct(&buffer, PAGE, 1 << log), Err(Errno::INVAL));
        assert_eq!(bench.census(), before.0);
        let more = most_memory().saturating_sub(before.1);
        assert!(more < 256 << 20, "{more} bytes for lists of 2^{log} bytes of memory");
    }
}
