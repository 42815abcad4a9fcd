//! Memory of another device. `/dev/udmabuf` stands in for one: it makes a dma-buf of a file in memory. On the fabric
//! such a file is taken for a dma-buf itself.

use crate::capability::Capability;
use crate::env;
use crate::leaks::rounds;
use crate::pair::{Config, Pair};
use crate::pattern;
use crate::verdict::{Verdict, require, supported, trials};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use uverbs::mlx5::devx::Umem;
use uverbs::mlx5::{Uar, UarKind, Var, VarKind, data_direct_path};
use uverbs::{
    Access, DmaBuf, Errno, MemoryRegion, MrBuilder, ObjectKind, ProtectionDomain, Remote, SendWr,
    Sge, WcOpcode, WcStatus,
};

trials![
    peers_reach_a_dma_buf,
    region_of_a_part_reaches_only_that_part,
    regions_of_a_dma_buf_leave_nothing,
    peers_reach_a_dma_buf_by_the_data_direct_function,
    data_direct_regions_have_their_own_limits,
    data_direct_regions_leave_nothing,
    data_direct_needs_the_function,
    data_direct_is_refused_for_other_memory_than_dma_bufs,
    umem_of_a_dma_buf_is_registered,
    memory_of_the_device_is_exported,
    exported_memory_leaves_nothing,
];

/// The library's own module, which is private.
#[allow(unsafe_code, reason = "an ioctl that rustix does not know")]
#[path = "../../../src/memory/udmabuf.rs"]
mod udmabuf;

const BYTES: usize = 1 << 16;

/// A file in memory, and a dma-buf of it.
fn dmabuf() -> Verdict<(OwnedFd, OwnedFd)> {
    if env::on_fabric() {
        let buffer = uverbs_sim::dma_buf(BYTES)?;
        return Ok((buffer.try_clone()?, buffer));
    }
    let maker = File::options().read(true).write(true).open("/dev/udmabuf");
    require(maker.is_ok(), Capability::Udmabuf, "there is no /dev/udmabuf")?;
    let memory = memfd_create("dmabuf", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, BYTES as u64)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK)?;
    let fd = udmabuf::of_memfd(maker?, memory.as_fd(), BYTES)?;
    Ok((memory, fd))
}

/// Rights that a peer needs to write and read.
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

fn peers_reach_a_dma_buf() -> Verdict {
    super::open()?;
    let buffer = dmabuf()?;
    let pair = Pair::new(Config::rc())?;
    let registered =
        pair.b.pd.mr_builder().access(ACCESS).iova(0).register_dmabuf(&buffer.1, 0, BYTES as u64);
    let region = supported(registered, Capability::Dmabuf)?;
    reach(pair, buffer, &region)
}

/// A builder of regions of the data-direct function.
fn direct(pd: &ProtectionDomain) -> Verdict<MrBuilder> {
    supported(data_direct_path(&pd.context()), Capability::DataDirect)?;
    Ok(pd.mr_builder().access(ACCESS).data_direct())
}

fn peers_reach_a_dma_buf_by_the_data_direct_function() -> Verdict {
    // Behind each other in the buffer, and at other addresses.
    const PAGE: u64 = 0x1_0000;
    super::open()?;
    for (offset, iova) in [(0, 0), (0, 5 * PAGE)] {
        let buffer = dmabuf()?;
        let pair = Pair::new(Config::rc())?;
        let builder = direct(&pair.b.pd)?.iova(iova);
        let region = builder.register_dmabuf(&buffer.1, offset, BYTES as u64)?;
        assert_eq!(region.addr(), iova);
        reach(pair, buffer, &region)?;
    }
    Ok(())
}

/// Writes to a whole dma-buf, and reads from it, as a peer.
fn reach(
    mut pair: Pair,
    (memory, buffer): (OwnedFd, OwnedFd),
    region: &MemoryRegion<u8, DmaBuf>,
) -> Verdict {
    // The region keeps the buffer.
    drop(buffer);
    for (seed, offset, length) in [(1, 0, 100), (2, 5000, 9000), (3, BYTES - 64, 64)] {
        let to = Remote { addr: region.addr() + offset as u64, rkey: region.rkey() };
        pair.a.fill(0..length, seed);
        let sges = [pair.a.sge(0..length)];
        pair.a.send(SendWr::write(to, &sges).id(seed).signaled())?;
        pair.a.expect(seed, WcOpcode::WRITE)?;
        let mut bytes = vec![0; length];
        rustix::io::pread(&memory, bytes.as_mut_slice(), offset as u64)?;
        pattern::check(&bytes, seed);
        // And back, after this process wrote there through its mapping.
        let other = pattern::bytes(!seed, length);
        rustix::io::pwrite(&memory, &other, offset as u64)?;
        pair.a.poison(0..length);
        let sges = [pair.a.sge(0..length)];
        pair.a.send(SendWr::read(to, &sges).id(seed).signaled())?;
        pair.a.expect(seed, WcOpcode::READ)?;
        pair.a.check(0..length, !seed);
    }
    // As local memory, into that of the other side.
    let other = pattern::bytes(9, 200);
    rustix::io::pwrite(&memory, &other, 300)?;
    let sges = [Sge { addr: region.addr() + 300, length: 200, lkey: region.lkey() }];
    pair.b.send(SendWr::write(pair.a.remote(0), &sges).id(8).signaled())?;
    pair.b.expect(8, WcOpcode::WRITE)?;
    pair.a.check(0..200, 9);
    let beyond = Remote { addr: region.addr() + BYTES as u64 - 8, rkey: region.rkey() };
    let sges = [pair.a.sge(0..16)];
    pair.a.send(SendWr::write(beyond, &sges).id(9))?;
    pair.a.expect_failure(9, WcStatus::REM_ACCESS_ERR)?;
    Ok(())
}

fn data_direct_regions_have_their_own_limits() -> Verdict {
    let context = super::open()?;
    let (memory, buffer) = dmabuf()?;
    let pd = context.alloc_pd()?;
    let page = env::page_size() as u64;
    let refused = |iova, offset, length, detail: &str| -> Verdict {
        let builder = direct(&pd)?.iova(iova);
        let error = builder.register_dmabuf(&buffer, offset, length).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
        assert!(error.to_string().contains(detail), "{error}");
        Ok(())
    };
    refused(64, 64, 100, "no multiple of")?;
    refused(0, 64, 100, "")?;
    refused(0, 0, BYTES as u64 + page, "")?;
    refused(0, BYTES as u64, page, "")?;
    refused(0, 0, 0, "")?;
    // A part, whose rights are those of the region.
    let mut pair = Pair::new(Config::rc())?;
    let readable = direct(&pair.b.pd)?.access(Access::REMOTE_READ).iova(page);
    let region = readable.register_dmabuf(&buffer, page, page)?;
    rustix::io::pwrite(&memory, &pattern::bytes(3, 64), page)?;
    let from = Remote { addr: page, rkey: region.rkey() };
    let sges = [pair.a.sge(0..64)];
    pair.a.send(SendWr::read(from, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::READ)?;
    pair.a.check(0..64, 3);
    let sges = [pair.a.sge(0..64)];
    pair.a.send(SendWr::write(from, &sges).id(2))?;
    pair.a.expect_failure(2, WcStatus::REM_ACCESS_ERR)?;
    // The page in front is nobody's.
    let mut pair = Pair::new(Config::rc())?;
    let region = direct(&pair.b.pd)?.iova(page).register_dmabuf(&buffer, page, page)?;
    let before = Remote { addr: page - 8, rkey: region.rkey() };
    let sges = [pair.a.sge(0..8)];
    pair.a.send(SendWr::read(before, &sges).id(3))?;
    pair.a.expect_failure(3, WcStatus::REM_ACCESS_ERR)?;
    Ok(())
}

fn data_direct_regions_leave_nothing() -> Verdict {
    super::open()?;
    let (_memory, buffer) = dmabuf()?;
    rounds(&[ObjectKind::MR, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        drop(direct(&pd)?);
        let buffer = buffer.try_clone()?;
        Ok(Box::new(move || {
            drop(direct(&pd)?.iova(0).register_dmabuf(&buffer, 0, BYTES as u64)?);
            let refused = direct(&pd)?.iova(0).register_dmabuf(&buffer, 0, 2 * BYTES as u64);
            assert!(refused.is_err());
            Ok(())
        }))
    })
}

fn umem_of_a_dma_buf_is_registered() -> Verdict {
    let context = super::devx::open()?;
    let (_memory, buffer) = dmabuf()?;
    let builder = || Umem::builder(&context).page_sizes(4096);
    let umem = builder().register_dmabuf(&buffer, 0x1000, 0x3000)?;
    assert_eq!((umem.len(), umem.as_ptr().is_null()), (0x3000, true));
    let beyond = builder().register_dmabuf(&buffer, 0x1000, BYTES as u64).unwrap_err();
    assert_eq!(beyond.errno(), Errno::INVAL, "{beyond}");
    // A queue in it: firmware keeps the memory.
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let queue = super::devx::sharing::queue_in(&context, umem.id(), &uar, &[&umem])?;
    drop(buffer);
    assert_eq!(umem.destroy().expect_err("a queue is in it").error.errno(), Errno::BUSY);
    queue.destroy()?;
    Ok(())
}

fn region_of_a_part_reaches_only_that_part() -> Verdict {
    // The same offset in a page as that of the part, for all page sizes.
    const IOVA: u64 = 0x10_1000;
    super::open()?;
    let (memory, buffer) = dmabuf()?;
    let mut pair = Pair::new(Config::rc())?;
    let pd = &pair.b.pd;
    let region = supported(
        pd.mr_builder().access(ACCESS).iova(IOVA).register_dmabuf(&buffer, 4096, 8192),
        Capability::Dmabuf,
    )?;
    assert_eq!(region.addr(), IOVA);
    pair.a.fill(0..8192, 7);
    let to = Remote { addr: IOVA, rkey: region.rkey() };
    let sges = [pair.a.sge(0..8192)];
    pair.a.send(SendWr::write(to, &sges).id(1).signaled())?;
    pair.a.expect(1, WcOpcode::WRITE)?;
    let mut bytes = vec![0; 3 * 4096];
    rustix::io::pread(&memory, bytes.as_mut_slice(), 0)?;
    assert!(bytes[..4096].iter().all(|byte| *byte == 0), "before the part");
    pattern::check(&bytes[4096..], 7);
    // A part beyond the buffer, and a file that is no dma-buf.
    let error = pair
        .b
        .pd
        .mr_builder()
        .access(ACCESS)
        .iova(0)
        .register_dmabuf(&buffer, 4096, BYTES as u64)
        .unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    let error = pair
        .b
        .pd
        .mr_builder()
        .access(ACCESS)
        .iova(0)
        .register_dmabuf(memory.as_fd(), 0, 4096)
        .unwrap_err();
    assert!(matches!(error.errno(), Errno::INVAL | Errno::BADF), "{error}");
    Ok(())
}

/// The emulated device has none unless it was asked for; before Linux 6.12 the kernel does not know of it.
fn data_direct_needs_the_function() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let path = uverbs::mlx5::data_direct_path(&context);
    // A file that is no dma-buf: whether the device could comes first.
    let file = memfd_create("no dmabuf", MemfdFlags::CLOEXEC)?;
    let region = pd.mr_builder().data_direct().register_dmabuf(&file, 0, 4096);
    match path {
        Ok(path) => {
            assert!(env::on_fabric() || path.is_dir(), "{}", path.display());
            assert!(path.starts_with("/sys/devices"), "{}", path.display());
            assert_ne!(region.unwrap_err().errno(), Errno::OPNOTSUPP);
        }
        Err(error) => {
            for error in [error, region.unwrap_err()] {
                assert_eq!(error.errno(), Errno::OPNOTSUPP, "{error}");
                assert!(error.to_string().contains("data-direct function"), "{error}");
            }
        }
    }
    Ok(())
}

fn regions_of_a_dma_buf_leave_nothing() -> Verdict {
    super::open()?;
    let (_memory, buffer) = dmabuf()?;
    rounds(&[ObjectKind::MR, ObjectKind::PD], |context| {
        let pd = context.alloc_pd()?;
        let buffer = buffer.try_clone()?;
        Ok(Box::new(move || {
            let region = supported(
                pd.mr_builder().access(ACCESS).iova(0).register_dmabuf(&buffer, 0, BYTES as u64),
                Capability::Dmabuf,
            )?;
            drop(region);
            Ok(())
        }))
    })
}

/// The length of a dma-buf, whose end is the only place that can be sought.
fn length_of(file: &OwnedFd) -> Verdict<u64> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    assert!(name.to_string_lossy().contains("dmabuf"), "{}", name.display());
    Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?)
}

/// No device of this machine could import them: an importer has to reach memory of other devices.
fn memory_of_the_device_is_exported() -> Verdict {
    let context = super::open()?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let page = supported(uar.export_dma_buf(), Capability::DmabufExport)?;
    assert_eq!(length_of(&page)?, uar.len() as u64);
    let count = || context.handles(ObjectKind::DMABUF).map(|handles| handles.len());
    assert_eq!(count()?, 1);
    uar.destroy()?;
    assert_eq!(length_of(&page)?, env::page_size() as u64, "the file outlives the page");
    let var = supported(Var::alloc(&context, VarKind::Virtio), Capability::Var)?;
    let doorbell = var.export_dma_buf()?;
    assert_eq!(length_of(&doorbell)?, env::page_size() as u64);
    let first = supported(context.alloc_dm(64, 8), Capability::DeviceMemory)?;
    let second = context.alloc_dm(env::page_size(), 8)?;
    for memory in [&first, &second] {
        let part = memory.export_dma_buf()?;
        assert!(part.offset < env::page_size() as u64, "{}", part.offset);
        let length = length_of(&part.file)?;
        assert!(part.offset + memory.len() as u64 <= length, "{} of {length}", part.offset);
    }
    drop((page, doorbell));
    assert_eq!(count()?, 0);
    Ok(())
}

fn exported_memory_leaves_nothing() -> Verdict {
    super::open()?;
    rounds(&[ObjectKind::DMABUF, ObjectKind::MLX5_UAR], |context| {
        let context = context.clone();
        Ok(Box::new(move || {
            let uar = Uar::alloc(&context, UarKind::NonCached)?;
            let page = supported(uar.export_dma_buf(), Capability::DmabufExport)?;
            // In either order: the kernel takes the page away from the file.
            drop(uar);
            drop(page);
            let uar = Uar::alloc(&context, UarKind::NonCached)?;
            drop(uar.export_dma_buf()?);
            drop(uar);
            Ok(())
        }))
    })
}

/// The driver would ignore it.
fn data_direct_is_refused_for_other_memory_than_dma_bufs() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let direct = || pd.mr_builder().data_direct();
    let memory = supported(context.alloc_dm(64, 8), Capability::DeviceMemory)?;
    let refused = [
        direct().allocate::<u64>(8).err(),
        direct().register(vec![0u8; 64]).err().map(uverbs::Error::from),
        direct().register_dm(&memory, ..).err(),
    ];
    for error in refused {
        let error = error.expect("it is no dma-buf");
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None), "{error}");
        assert!(error.to_string().contains("register_dmabuf"), "{error}");
    }
    Ok(())
}
