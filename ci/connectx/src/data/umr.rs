//! Work requests that change memory keys.
//!
//! Pairs with mlx5_ib's `umr.c` for registration, and with memory windows and local invalidation of
//! the verbs.

use uverbs_uapi::mlx5::prm::mkc::mkc;

use super::message::Syndrome;
use super::wqe::Segments;
use crate::device::Device;
use crate::object::qp::Service;

impl Device {
    /// Carries out a UMR request.
    pub(crate) fn umr(
        &mut self,
        qpn: u32,
        _pd: u32,
        _service: Service,
        _segments: Segments<'_>,
    ) -> Result<(), Syndrome> {
        log::warn!("QP {qpn:#x}: UMR is not modelled");
        Err(Syndrome::LocalQpOperation)
    }

    /// Makes a key of the queue pair's own protection domain invalid.
    pub(crate) fn local_invalidate(&mut self, key: u32, pd: u32) -> Result<(), Syndrome> {
        let Ok(mkey) = self.objects.mkeys.get_mut(key >> 8) else {
            return Err(Syndrome::LocalProtection);
        };
        let context = &mut mkey.context;
        if context.get(mkc::mkey_7_0) != u64::from(key & 0xff) || context.get32(mkc::pd) != pd {
            return Err(Syndrome::LocalProtection);
        }
        context.set(mkc::free, 1);
        Ok(())
    }
}
