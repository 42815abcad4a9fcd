//! Address handles, device memory and protection domains as foreign code names them. Pairs with `mlx5dv_ah`,
//! `mlx5dv_dm` and `mlx5dv_pd`.

use crate::ah::AddressHandle;
use crate::dm::DeviceMemory;
use crate::error::{Error, Result};
use crate::pd::{ProtectionDomain, Sharing};
use crate::wr::Address;
use rustix::io::Errno;
use uverbs_uapi::mlx5::wqe::mlx5_av;

/// The address vector of a handle as a datagram's WQE carries it, `struct mlx5_wqe_av`. The first 12 bytes are
/// the Q_Key and the queue pair number with its uppermost bit set, which the WQE's writer fills in.
///
/// ```no_run
/// # fn f(ah: &uverbs::AddressHandle, qkey: u32, qpn: u32) -> uverbs::Result<()> {
/// let mut segments = uverbs::mlx5::address_vector(ah)?;
/// segments[..4].copy_from_slice(&qkey.to_be_bytes());
/// segments[8..12].copy_from_slice(&(1 << 31 | qpn).to_be_bytes());
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver.
#[doc(alias = "mlx5dv_ah")]
#[doc(alias = "MLX5DV_OBJ_AH")]
pub fn address_vector(ah: &AddressHandle) -> Result<[u8; size_of::<mlx5_av>()]> {
    match ah.address() {
        Address::Mlx5(vector) => Ok(zerocopy::transmute!(*vector)),
        Address::Rxe { .. } => Err(Error::new("address_vector", Errno::OPNOTSUPP)
            .detail("the device is not driven by mlx5: its requests name an address handle")),
    }
}

/// The first byte of device memory in this process, of [`len`](DeviceMemory::len) bytes. It stays mapped as long as
/// the memory.
///
/// ```no_run
/// # fn f(memory: &uverbs::DeviceMemory) -> uverbs::Result<()> {
/// let words = uverbs::mlx5::device_memory_address(memory)?.cast::<u32>();
/// // SAFETY: the memory begins with a word, and is accessed by words.
/// unsafe { words.write_volatile(7) };
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`Error::is_forked`] in a child of the process that allocated the memory.
#[doc(alias = "mlx5dv_dm")]
#[doc(alias = "MLX5DV_OBJ_DM")]
pub fn device_memory_address(memory: &DeviceMemory) -> Result<*mut u8> {
    const VERB: &str = "device_memory_address";
    memory.inner.object.file().check_fork(VERB)?;
    let window = memory.inner.object.memory().ok_or_else(|| Error::new(VERB, Errno::NOENT))?;
    Ok(window.as_ptr())
}

/// The device's number of a protection domain, as WQEs and commands of firmware name it.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain) -> uverbs::Result<()> {
/// println!("protection domain {:#x}", uverbs::mlx5::pd_number(pd)?);
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver.
#[doc(alias = "mlx5dv_pd")]
#[doc(alias = "MLX5DV_OBJ_PD")]
pub fn pd_number<S: Sharing>(pd: &ProtectionDomain<S>) -> Result<u32> {
    const VERB: &str = "pd_number";
    let file = pd.inner.file();
    file.provider.mlx5(VERB)?;
    file.check_fork(VERB)?;
    let number = file.provider.pd_number(&*file.kernel, pd.inner.handle());
    number
        .map_err(|errno| Error::from_kernel(VERB, errno))?
        .ok_or_else(|| Error::new(VERB, Errno::OPNOTSUPP))
}
