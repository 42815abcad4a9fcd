//! Memory regions and windows. Pairs with `ib_uverbs_reg_mr`, `ib_uverbs_alloc_mw` and `hw/mlx5/mr.c`.

use super::{FileId, Kernel, Method, Object, Write, destroying};
use crate::call::{Call, Result};
use crate::driver::{DataDirect, Driver, input};
use crate::memory::{DmaBuf, Lent, page_size};
use rustix::io::Errno;
use uverbs_uapi::mlx5::object::{
    MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, mlx5_ib_uapi_reg_dmabuf_flags,
};
use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::mkc::{create_mkey_in, mkc};
use uverbs_uapi::mlx5::prm::opcode;
use uverbs_uapi::mr::ib_uverbs_access_flags as Access;
use uverbs_uapi::mr::*;
use uverbs_uapi::mw::{UVERBS_METHOD_MW_DESTROY, ib_uverbs_alloc_mw, ib_uverbs_alloc_mw_resp};
use uverbs_uapi::object::{UVERBS_OBJECT_MR, UVERBS_OBJECT_MW};
use uverbs_uapi::write::{
    IB_USER_VERBS_CMD_ALLOC_MW, IB_USER_VERBS_CMD_REG_MR, IB_USER_VERBS_CMD_REREG_MR,
};

pub(super) const METHODS: &[Method] = &[
    destroying(UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY),
    destroying(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY),
    Method {
        object: UVERBS_OBJECT_MR,
        method: UVERBS_METHOD_QUERY_MR,
        attrs: &[
            UVERBS_ATTR_QUERY_MR_HANDLE,
            UVERBS_ATTR_QUERY_MR_RESP_LKEY,
            UVERBS_ATTR_QUERY_MR_RESP_RKEY,
            UVERBS_ATTR_QUERY_MR_RESP_LENGTH,
            UVERBS_ATTR_QUERY_MR_RESP_IOVA,
        ],
        run: query,
    },
    Method {
        object: UVERBS_OBJECT_MR,
        method: UVERBS_METHOD_DM_MR_REG,
        attrs: &[
            UVERBS_ATTR_REG_DM_MR_HANDLE,
            UVERBS_ATTR_REG_DM_MR_OFFSET,
            UVERBS_ATTR_REG_DM_MR_LENGTH,
            UVERBS_ATTR_REG_DM_MR_PD_HANDLE,
            UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS,
            UVERBS_ATTR_REG_DM_MR_DM_HANDLE,
            UVERBS_ATTR_REG_DM_MR_RESP_LKEY,
            UVERBS_ATTR_REG_DM_MR_RESP_RKEY,
        ],
        run: reg_dm,
    },
    Method {
        object: UVERBS_OBJECT_MR,
        method: UVERBS_METHOD_REG_DMABUF_MR,
        attrs: &[
            UVERBS_ATTR_REG_DMABUF_MR_HANDLE,
            UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE,
            UVERBS_ATTR_REG_DMABUF_MR_OFFSET,
            UVERBS_ATTR_REG_DMABUF_MR_LENGTH,
            UVERBS_ATTR_REG_DMABUF_MR_IOVA,
            UVERBS_ATTR_REG_DMABUF_MR_FD,
            UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS,
            UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY,
            UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY,
            MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS,
        ],
        run: reg_dmabuf,
    },
    Method {
        object: UVERBS_OBJECT_MR,
        method: UVERBS_METHOD_ADVISE_MR,
        attrs: &[
            UVERBS_ATTR_ADVISE_MR_PD_HANDLE,
            UVERBS_ATTR_ADVISE_MR_ADVICE,
            UVERBS_ATTR_ADVISE_MR_FLAGS,
            UVERBS_ATTR_ADVISE_MR_SGE_LIST,
        ],
        run: advise,
    },
];

pub(super) const WRITES: &[Write] = &[
    Write { command: IB_USER_VERBS_CMD_REG_MR, run: reg },
    Write { command: IB_USER_VERBS_CMD_REREG_MR, run: rereg },
    Write { command: IB_USER_VERBS_CMD_ALLOC_MW, run: alloc_mw },
];

/// A region: `struct ib_mr` with the driver's part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) key: u32,
    pub(crate) length: u64,
    /// The address that QUERY_MR returns; for device memory its place on the device.
    pub(super) iova: u64,
    start: u64,
    access: Access,
    is_device_memory: bool,
    /// The mkey that the key of a data-direct region is another name for; `key` itself once the other name is destroyed.
    pub(super) crossed: Option<u32>,
}

/// Bytes of a page in a translation table.
const PAGE: u64 = 4096;
/// A region of at most this many translations gets no larger pages.
const FEW: u64 = 64;
/// Rights that the kernel knows, beside those that a device may ignore.
const KNOWN: u32 = 0x3ff;
/// `access_mode` of an mkey for device memory.
const DEVICE_MEMORY: u64 = 5;
/// Of a list of pages.
const PAGES: u64 = 1;
/// Of a list of parts of other mkeys, which have one size.
const KSM: u64 = 3;
/// Of another name for an mkey.
const CROSSING: u64 = 6;
/// The longest list of an mkey, in units of 16 bytes.
const MAX_OCTOWORDS: u64 = 1 << 22;

/// Refuses rights, as `ib_check_mr_access`.
fn check_access(access: u32) -> Result<Access> {
    let access = Access::from_bits_retain(access);
    let writes = Access::IB_UVERBS_ACCESS_REMOTE_WRITE | Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(Access::IB_UVERBS_ACCESS_LOCAL_WRITE) {
        return Err(Errno::INVAL);
    }
    if access.bits() & !(KNOWN | IB_UVERBS_ACCESS_OPTIONAL_RANGE) != 0 {
        return Err(Errno::INVAL);
    }
    let flushes = Access::IB_UVERBS_ACCESS_FLUSH_GLOBAL | Access::IB_UVERBS_ACCESS_FLUSH_PERSISTENT;
    if access.intersects(flushes | Access::IB_UVERBS_ACCESS_ON_DEMAND) {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(access)
}

fn reg(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_reg_mr = call.core()?;
    if request.start % page_size() != request.hca_va % page_size() {
        return Err(Errno::INVAL);
    }
    let access = check_access(request.access_flags)?;
    let pd = kernel.pd(call.file, request.pd_handle)?;
    let place = (request.start, request.hca_va, request.length);
    let (region, lent) = make(kernel, call, pd, place, access)?;
    let uses = [request.pd_handle];
    let mr_handle = kernel.add_lending(call.file, Object::Mr(region), &uses, lent)?;
    call.respond(&ib_uverbs_reg_mr_resp { mr_handle, lkey: region.key, rkey: region.key });
    Ok(())
}

/// Creates the mkey of a region of memory, by its start, its first address in requests, and its bytes.
fn make(
    kernel: &mut Kernel,
    call: &Call<'_>,
    pd: u32,
    (start, iova, length): (u64, u64, u64),
    access: Access,
) -> Result<(Region, Lent)> {
    if length == 0 {
        return Err(Errno::INVAL);
    }
    let writable = access.intersects(
        Access::IB_UVERBS_ACCESS_LOCAL_WRITE
            | Access::IB_UVERBS_ACCESS_REMOTE_WRITE
            | Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC
            | Access::IB_UVERBS_ACCESS_MW_BIND,
    );
    // Before the list of its pages is made, which is as long as a program claims.
    let lent = kernel.lend(call, &[(start, length, writable)])?;
    let log = log_page_size(start, iova, length);
    let octowords = translations(start, length, log).div_ceil(2);
    // Present, readable and writable.
    let words = (0..octowords * 2).map(|entry| ((start >> log) + entry) << log | 3);
    let list = List { pd, mode: PAGES, iova, length, log, octowords, access };
    let (key, lent) = make_listed(kernel, call, list, words, lent)?;
    Ok((Region { key, length, iova, start, access, is_device_memory: false, crossed: None }, lent))
}

/// An mkey with a list of pages.
struct List {
    pd: u32,
    mode: u64,
    /// The first address in requests.
    iova: u64,
    length: u64,
    /// The size of a page, as a power of two.
    log: u32,
    /// The length of the list, in units of 16 bytes.
    octowords: u64,
    access: Access,
}

/// Creates an mkey with the words of its list; returns its key. A list that is longer than the device takes is not built:
/// the memory of a program may be a file with holes.
fn make_listed(
    kernel: &mut Kernel,
    call: &Call<'_>,
    list: List,
    words: impl Iterator<Item = u64>,
    lent: Lent,
) -> Result<(u32, Lent)> {
    if list.octowords > MAX_OCTOWORDS {
        kernel.give_back(call.file, lent)?;
        return Err(Errno::INVAL);
    }
    let (driver, _) = kernel.driver(call.file)?;
    let variant = driver.next_variant();
    let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
    command.set(create_mkey_in::translations_octword_actual_size, list.octowords);
    let mut context = command.sub_mut(create_mkey_in::memory_key_mkey_entry);
    grant(&mut context, list.access);
    for (field, value) in [
        (mkc::access_mode_1_0, list.mode),
        (mkc::mkey_7_0, variant.into()),
        (mkc::pd, list.pd.into()),
        (mkc::start_addr, list.iova),
        (mkc::len, list.length),
        (mkc::log_page_size, list.log.into()),
        (mkc::translations_octword_size, list.octowords),
    ] {
        context.set(field, value);
    }
    let mut command = command.into_inner();
    words.for_each(|word| command.extend(word.to_be_bytes()));
    let (answer, lent) = kernel.execute_with(call, &command, lent)?;
    Ok((Driver::created(&answer) << 8 | u32::from(variant), lent))
}

/// Grants rights to the holders of an mkey.
fn grant(context: &mut Bits<mkc, &mut [u8]>, access: Access) {
    let granted = |flag: Access| u64::from(access.contains(flag));
    for (field, value) in [
        (mkc::lr, 1),
        (mkc::lw, granted(Access::IB_UVERBS_ACCESS_LOCAL_WRITE)),
        (mkc::rw, granted(Access::IB_UVERBS_ACCESS_REMOTE_WRITE)),
        (mkc::rr, granted(Access::IB_UVERBS_ACCESS_REMOTE_READ)),
        (mkc::a, granted(Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC)),
        (mkc::relaxed_ordering_write, granted(Access::IB_UVERBS_ACCESS_RELAXED_ORDERING)),
        (mkc::umr_en, 1),
        (mkc::qpn, 0xff_ffff),
    ] {
        context.set(field, value);
    }
}

/// Changes a region. The driver makes a new mkey for every change but those that the device makes in place;
/// here it is always a new one.
fn rereg(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let request: ib_uverbs_rereg_mr = call.core()?;
    let changed = ib_mr_rereg_flags::from_bits_retain(request.flags);
    if changed.is_empty() {
        return Err(Errno::INVAL);
    }
    let known = ib_mr_rereg_flags::IB_MR_REREG_TRANS
        | ib_mr_rereg_flags::IB_MR_REREG_PD
        | ib_mr_rereg_flags::IB_MR_REREG_ACCESS;
    if !known.contains(changed) {
        return Err(Errno::OPNOTSUPP);
    }
    let moves = changed.contains(ib_mr_rereg_flags::IB_MR_REREG_TRANS);
    if moves && request.start % page_size() != request.hca_va % page_size() {
        return Err(Errno::INVAL);
    }
    let region = kernel.mr(call.file, request.mr_handle)?;
    if region.is_device_memory {
        return Err(Errno::INVAL);
    }
    if region.crossed.is_some() {
        return Err(Errno::OPNOTSUPP);
    }
    let access = match changed.contains(ib_mr_rereg_flags::IB_MR_REREG_ACCESS) {
        true => check_access(request.access_flags)?,
        false => region.access,
    };
    let pd_handle = match changed.contains(ib_mr_rereg_flags::IB_MR_REREG_PD) {
        true => request.pd_handle,
        false => *kernel.uses(call.file, request.mr_handle)?.first().ok_or(Errno::INVAL)?,
    };
    let pd = kernel.pd(call.file, pd_handle)?;
    let place = match moves {
        true => (request.start, request.hca_va, request.length),
        false => (region.start, region.iova, region.length),
    };
    // Memory that stays is locked once.
    let kept = if moves { None } else { Some(kernel.unlend(call.file, request.mr_handle)?) };
    let keep = |kernel: &mut Kernel| match &kept {
        Some(ranges) => {
            let lent = kernel.lend(call, ranges)?;
            kernel.lend_anew(call.file, request.mr_handle, lent)
        }
        None => Ok(()),
    };
    let (new, lent) = match make(kernel, call, pd, place, access) {
        Ok(made) => made,
        Err(errno) => {
            keep(kernel)?;
            return Err(errno);
        }
    };
    if let Err(errno) = destroy_key(kernel, call.file, region.key) {
        undo(kernel, call.file, new, lent)?;
        keep(kernel)?;
        return Err(errno);
    }
    kernel.lend_anew(call.file, request.mr_handle, lent)?;
    kernel.replace(call.file, request.mr_handle, Object::Mr(new), &[pd_handle])?;
    call.respond(&ib_uverbs_rereg_mr_resp { lkey: new.key, rkey: new.key });
    Ok(())
}

/// Registers device memory.
fn reg_dm(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let offset = call.u64_if(UVERBS_ATTR_REG_DM_MR_OFFSET).ok_or(Errno::INVAL)?;
    let length = call.u64_if(UVERBS_ATTR_REG_DM_MR_LENGTH).ok_or(Errno::INVAL)?;
    let access = call.u64_if(UVERBS_ATTR_REG_DM_MR_ACCESS_FLAGS).ok_or(Errno::INVAL)?;
    let access = check_access(u32::try_from(access).map_err(|_| Errno::INVAL)?)?;
    let pd_handle = call.handle(UVERBS_ATTR_REG_DM_MR_PD_HANDLE)?;
    let dm_handle = call.handle(UVERBS_ATTR_REG_DM_MR_DM_HANDLE)?;
    let pd = kernel.pd(call.file, pd_handle)?;
    let memory = kernel.dm(call.file, dm_handle)?;
    let allowed = Access::IB_UVERBS_ACCESS_LOCAL_WRITE
        | Access::IB_UVERBS_ACCESS_REMOTE_WRITE
        | Access::IB_UVERBS_ACCESS_REMOTE_READ
        | Access::IB_UVERBS_ACCESS_REMOTE_ATOMIC
        | Access::IB_UVERBS_ACCESS_ZERO_BASED
        | Access::from_bits_retain(IB_UVERBS_ACCESS_OPTIONAL_RANGE);
    let inside = offset.checked_add(length).is_some_and(|end| end <= memory.length);
    let zero_based = access.contains(Access::IB_UVERBS_ACCESS_ZERO_BASED);
    if !zero_based || !inside || !allowed.contains(access) {
        return Err(Errno::INVAL);
    }
    let start = memory.start + offset;
    let (driver, switch) = kernel.driver(call.file)?;
    let variant = driver.next_variant();
    let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
    let mut context = command.sub_mut(create_mkey_in::memory_key_mkey_entry);
    grant(&mut context, access);
    for (field, value) in [
        (mkc::access_mode_1_0, DEVICE_MEMORY & 3),
        (mkc::access_mode_4_2, DEVICE_MEMORY >> 2),
        (mkc::mkey_7_0, variant.into()),
        (mkc::pd, pd.into()),
        (mkc::start_addr, start),
        (mkc::len, length),
    ] {
        context.set(field, value);
    }
    let answer = driver.execute(switch, &command.into_inner())?;
    let key = Driver::created(&answer) << 8 | u32::from(variant);
    let region =
        Region { key, length, iova: start, start, access, is_device_memory: true, crossed: None };
    let handle = kernel.add(call.file, Object::Mr(region), &[pd_handle, dm_handle])?;
    call.made(UVERBS_ATTR_REG_DM_MR_HANDLE, handle);
    call.put(UVERBS_ATTR_REG_DM_MR_RESP_LKEY, &key);
    call.put(UVERBS_ATTR_REG_DM_MR_RESP_RKEY, &key);
    Ok(())
}

/// Memory of another device, which the driver of Linux 7.2 and later accepts only on a device that pages on demand, or
/// through a data-direct function.
fn reg_dmabuf(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let direct = mlx5_ib_uapi_reg_dmabuf_flags::MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT;
    let direct = u64::from(direct.bits());
    let number = |attr| call.u64_if(attr).ok_or(Errno::INVAL);
    let offset = number(UVERBS_ATTR_REG_DMABUF_MR_OFFSET)?;
    let length = number(UVERBS_ATTR_REG_DMABUF_MR_LENGTH)?;
    let iova = number(UVERBS_ATTR_REG_DMABUF_MR_IOVA)?;
    if offset % page_size() != iova % page_size() {
        return Err(Errno::INVAL);
    }
    let access = number(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS)?;
    let access = check_access(u32::try_from(access).map_err(|_| Errno::INVAL)?)?;
    let pd_handle = call.handle(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE)?;
    let pd = kernel.pd(call.file, pd_handle)?;
    let flags = call.u64_if(MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS).unwrap_or(0);
    if flags & !direct != 0 {
        return Err(Errno::INVAL);
    }
    let is_direct = flags & direct != 0;
    if is_direct && iova % page_size() != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if is_direct && kernel.driver(call.file)?.0.data_direct.is_none() {
        return Err(Errno::INVAL);
    }
    let fd = call.u32(UVERBS_ATTR_REG_DMABUF_MR_FD)? as i32;
    let buffer = DmaBuf::map(&call.user.duplicate(fd).ok_or(Errno::BADF)?)?;
    if !is_direct {
        return Err(Errno::OPNOTSUPP);
    }
    let (start, lent) = kernel.lend_dmabuf(call, buffer, offset, length)?;
    let (crossed, lent) = make_direct(kernel, call, (start, iova, length), access, lent)?;
    let is_device_memory = false;
    let mut region = Region {
        key: crossed,
        length,
        iova,
        start,
        access,
        is_device_memory,
        crossed: Some(crossed),
    };
    region.key = match cross(kernel, call, (pd, crossed), (iova, length), access) {
        Ok(key) => key,
        Err(errno) => {
            undo(kernel, call.file, region, lent)?;
            return Err(errno);
        }
    };
    let key = region.key;
    let handle = kernel.add_lending(call.file, Object::Mr(region), &[pd_handle], lent)?;
    call.made(UVERBS_ATTR_REG_DMABUF_MR_HANDLE, handle);
    call.put(UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, &key);
    call.put(UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, &key);
    Ok(())
}

/// Creates the key of pages that the data-direct function reaches, in the driver's own PD: a list of parts of the
/// driver's key of all memory, each a page (KSM). The driver fills it by a UMR, `mlx5r_umr_update_data_direct_ksm_pas`.
fn make_direct(
    kernel: &mut Kernel,
    call: &Call<'_>,
    (start, iova, length): (u64, u64, u64),
    access: Access,
    lent: Lent,
) -> Result<(u32, Lent)> {
    let (driver, _) = kernel.driver(call.file)?;
    let DataDirect { pd, key } = driver.data_direct.ok_or(Errno::INVAL)?;
    let log = (start | iova).trailing_zeros().min(30);
    let octowords = length.div_ceil(1 << log);
    let words = (0..octowords).flat_map(|page| [key.into(), start + (page << log)]);
    let list = List { pd, mode: KSM, iova, length, log, octowords, access };
    make_listed(kernel, call, list, words, lent)
}

/// Destroys the mkey of a region that is not registered after all, and then takes its memory from the device. An mkey that
/// firmware does not destroy keeps its memory, as an object of the file that has no program.
fn undo(kernel: &mut Kernel, file: FileId, region: Region, lent: Lent) -> Result<()> {
    match destroy_key(kernel, file, region.key) {
        Ok(()) => kernel.give_back(file, lent),
        Err(_) => kernel.add_lending(file, Object::Mr(region), &[], lent).map(drop),
    }
}

/// Creates another name, in a program's PD, for a key: `reg_create_crossing_vhca_mr`. Its addresses begin at zero.
fn cross(
    kernel: &mut Kernel,
    call: &Call<'_>,
    (pd, crossed): (u32, u32),
    (iova, length): (u64, u64),
    access: Access,
) -> Result<u32> {
    let (driver, switch) = kernel.driver(call.file)?;
    let variant = driver.next_variant();
    let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
    let mut context = command.sub_mut(create_mkey_in::memory_key_mkey_entry);
    grant(&mut context, access);
    for (field, value) in [
        (mkc::access_mode_1_0, CROSSING & 3),
        (mkc::access_mode_4_2, CROSSING >> 2),
        (mkc::umr_en, 0),
        (mkc::mkey_7_0, variant.into()),
        (mkc::pd, pd.into()),
        (mkc::len, iova + length),
        (mkc::translations_octword_size, crossed.into()),
    ] {
        context.set(field, value);
    }
    let answer = driver.execute(switch, &command.into_inner())?;
    Ok(Driver::created(&answer) << 8 | u32::from(variant))
}

/// Advice is for memory that is paged on demand, which the device does not have.
fn advise(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    kernel.pd(call.file, call.handle(UVERBS_ATTR_ADVISE_MR_PD_HANDLE)?)?;
    Err(Errno::OPNOTSUPP)
}

/// The size of pages that describe a range with few translations, as a power of two.
fn log_page_size(start: u64, iova: u64, length: u64) -> u32 {
    let fits = |log: &u32| (start ^ iova) & ((1 << log) - 1) == 0;
    let mut log = PAGE.ilog2();
    while translations(start, length, log) > FEW && fits(&(log + 1)) && log < 30 {
        log += 1;
    }
    log
}

fn translations(start: u64, length: u64, log: u32) -> u64 {
    ((start + length.max(1) - 1) >> log) - (start >> log) + 1
}

fn alloc_mw(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    const TYPE_2: u8 = 2;
    let request: ib_uverbs_alloc_mw = call.core()?;
    if !matches!(request.mw_type, 1 | TYPE_2) {
        return Err(Errno::INVAL);
    }
    let pd = kernel.pd(call.file, request.pd_handle)?;
    let (driver, switch) = kernel.driver(call.file)?;
    let mut command = input::<create_mkey_in>(opcode::CREATE_MKEY);
    let variant = driver.next_variant();
    let mut context = command.sub_mut(create_mkey_in::memory_key_mkey_entry);
    for (field, value) in [
        (mkc::free, 1),
        (mkc::access_mode_1_0, 2),
        (mkc::umr_en, 1),
        (mkc::lr, 1),
        (mkc::en_rinval, (request.mw_type == TYPE_2).into()),
        (mkc::qpn, 0xff_ffff),
        (mkc::mkey_7_0, variant.into()),
        (mkc::pd, pd.into()),
        (mkc::translations_octword_size, 4),
    ] {
        context.set(field, value);
    }
    let answer = driver.execute(switch, &command.into_inner())?;
    let key = Driver::created(&answer) << 8 | u32::from(variant);
    let mw_handle = kernel.add(call.file, Object::Mw { key }, &[request.pd_handle])?;
    call.respond(&ib_uverbs_alloc_mw_resp { mw_handle, rkey: key });
    Ok(())
}

fn query(kernel: &mut Kernel, call: &mut Call<'_>) -> Result<()> {
    let region = kernel.mr(call.file, call.handle(UVERBS_ATTR_QUERY_MR_HANDLE)?)?;
    call.put(UVERBS_ATTR_QUERY_MR_RESP_LKEY, &region.key);
    call.put(UVERBS_ATTR_QUERY_MR_RESP_RKEY, &region.key);
    call.put(UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &region.length);
    call.put(UVERBS_ATTR_QUERY_MR_RESP_IOVA, &region.iova);
    Ok(())
}

/// Destroys the mkeys of a region: its key, and then the one that this is another name for. A call that fails in between
/// is called again.
pub(super) fn destroy(
    kernel: &mut Kernel,
    file: FileId,
    handle: u32,
    region: Region,
) -> Result<()> {
    let Region { key, crossed, .. } = region;
    if crossed != Some(key) {
        destroy_key(kernel, file, key)?;
    }
    let Some(key) = crossed else { return Ok(()) };
    if let Some(entry) = kernel.file_mut(file)?.objects.get_mut(&handle) {
        entry.object = Object::Mr(Region { key, ..region });
    }
    destroy_key(kernel, file, key)
}

/// Destroys an mkey by its key.
pub(super) fn destroy_key(kernel: &mut Kernel, file: FileId, key: u32) -> Result<()> {
    kernel.destroy_by(file, opcode::DESTROY_MKEY, key >> 8)
}

impl Kernel {
    /// The region with a handle.
    fn mr(&self, file: FileId, handle: u32) -> Result<Region> {
        match self.object(file, handle)? {
            Object::Mr(region) => Ok(*region),
            _ => Err(Errno::INVAL),
        }
    }
}
