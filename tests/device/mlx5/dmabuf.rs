//! Memory of another device. `/dev/udmabuf` stands in for one: it makes a dma-buf of a file in
//! memory.

use crate::capability::Capability;
use crate::leaks::rounds;
use crate::pair::{Config, Pair};
use crate::pattern;
use crate::verdict::{Verdict, require, supported, trials};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use uverbs::{Access, Errno, ObjectKind, Remote, SendWr, WcOpcode, WcStatus};

trials![
    peers_reach_a_dma_buf,
    region_of_a_part_reaches_only_that_part,
    regions_of_a_dma_buf_leave_nothing,
    data_direct_needs_the_function,
];

/// The library's own module, which is private.
#[allow(unsafe_code, reason = "an ioctl that rustix does not know")]
#[path = "../../../src/memory/udmabuf.rs"]
mod udmabuf;

const BYTES: usize = 1 << 16;

/// A file in memory, and a dma-buf of it.
fn dmabuf() -> Verdict<(OwnedFd, OwnedFd)> {
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
    let (memory, buffer) = dmabuf()?;
    let mut pair = Pair::new(Config::rc())?;
    let region = supported(
        pair.b.pd.mr_builder().access(ACCESS).iova(0).register_dmabuf(&buffer, 0, BYTES as u64),
        Capability::Dmabuf,
    )?;
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
    let beyond = Remote { addr: region.addr() + BYTES as u64 - 8, rkey: region.rkey() };
    let sges = [pair.a.sge(0..16)];
    pair.a.send(SendWr::write(beyond, &sges).id(9))?;
    pair.a.expect_failure(9, WcStatus::REM_ACCESS_ERR)?;
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

/// The emulated device has none; before Linux 6.12 the kernel does not know of it.
fn data_direct_needs_the_function() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let path = uverbs::mlx5::data_direct_path(&context);
    // A file that is no dma-buf: whether the device could comes first.
    let file = memfd_create("no dmabuf", MemfdFlags::CLOEXEC)?;
    let region = pd.mr_builder().data_direct().register_dmabuf(&file, 0, 4096);
    match path {
        Ok(path) => {
            assert!(path.is_dir(), "{}", path.display());
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
