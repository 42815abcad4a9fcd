//! XRC domains, which contexts of a device share by a file's inode. Pairs with `ib_uverbs_open_xrcd` and
//! `ib_uverbs_dealloc_xrcd`.

use super::{FileId, Kernel, Method, Object, Write, destroying};
use crate::call::{Call, Result};
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use rustix::io::Errno;
use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::object::alloc_xrcd_out;
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::object::UVERBS_OBJECT_XRCD;
use uverbs_uapi::write::IB_USER_VERBS_CMD_OPEN_XRCD;
use uverbs_uapi::xrcd::{
    UVERBS_METHOD_XRCD_DESTROY, ib_uverbs_open_xrcd, ib_uverbs_open_xrcd_resp,
};

pub(super) const METHODS: &[Method] = &[destroying(UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY)];

pub(super) const WRITES: &[Write] = &[Write { command: IB_USER_VERBS_CMD_OPEN_XRCD, run: open }];

/// The identity of a file, the same for all its names and descriptors: file system and inode.
type Inode = (u64, u64);

/// A domain of the device.
#[derive(Debug)]
pub(crate) struct Xrcd {
    /// The file that names it. It stays open meanwhile, so that no other file gets its inode number.
    file: Option<(Inode, OwnedFd)>,
    openers: usize,
}

fn open(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_open_xrcd = call.core()?;
    if !kernel.limits(call.file)?.has_xrc {
        return Err(Errno::OPNOTSUPP);
    }
    let flags = OFlags::from_bits_retain(request.oflags);
    let file = match request.fd as i32 {
        -1 => None,
        fd => {
            let fd = call.user.duplicate(fd).ok_or(Errno::BADF)?;
            // `fdget` does not take one that is only a path.
            if rustix::fs::fcntl_getfl(&fd)?.contains(OFlags::PATH) {
                return Err(Errno::BADF);
            }
            let stat = rustix::fs::fstat(&fd)?;
            Some(((stat.st_dev as u64, stat.st_ino as u64), fd))
        }
    };
    let (driver, switch) = kernel.driver(call.file)?;
    let known = file.as_ref().and_then(|(inode, _)| {
        let is_it = |xrcd: &Xrcd| xrcd.file.as_ref().is_some_and(|(known, _)| known == inode);
        driver.xrcds.iter().find(|(_, xrcd)| is_it(xrcd)).map(|(number, _)| *number)
    });
    let number = match known {
        None if file.is_some() && !flags.contains(OFlags::CREATE) => return Err(Errno::AGAIN),
        Some(_) if flags.contains(OFlags::EXCL) => return Err(Errno::INVAL),
        Some(number) => number,
        None => {
            let answer = driver.execute_on(switch, opcode::ALLOC_XRCD, 0)?;
            let number = Bits::<alloc_xrcd_out, _>::new(answer).get32(alloc_xrcd_out::xrcd);
            driver.xrcds.insert(number, Xrcd { file, openers: 0 });
            number
        }
    };
    driver.xrcds.entry(number).and_modify(|xrcd| xrcd.openers += 1);
    let xrcd_handle = kernel.add(call.file, Object::Xrcd { number }, &[])?;
    call.respond(&ib_uverbs_open_xrcd_resp { xrcd_handle });
    Ok(())
}

pub(super) fn close(kernel: &mut Kernel, file: FileId, number: u32) -> Result<()> {
    let (driver, switch) = kernel.driver(file)?;
    let xrcd = driver.xrcds.get_mut(&number).ok_or(Errno::INVAL)?;
    if xrcd.openers == 1 {
        driver.execute_on(switch, opcode::DEALLOC_XRCD, number)?;
        driver.xrcds.remove(&number);
        return Ok(());
    }
    xrcd.openers -= 1;
    Ok(())
}

impl Kernel {
    /// The number of an XRC domain.
    pub(crate) fn xrcd(&self, file: FileId, handle: u32) -> Result<u32> {
        match self.object(file, handle)? {
            Object::Xrcd { number } => Ok(*number),
            _ => Err(Errno::INVAL),
        }
    }
}
