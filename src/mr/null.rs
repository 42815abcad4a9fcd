//! The null region: a key of no memory. Pairs with `ibv_alloc_null_mr`, and with `dump_fill_mkey` of
//! `mlx5_ib_alloc_ucontext_resp`.

use crate::error::{Error, Result};
use crate::number::Lkey;
use crate::pd::{ProtectionDomain, Sharing};
use crate::wr::Sge;
use rustix::io::Errno;

/// A key for SGEs without memory: data that a request or a message would write there vanishes, and data that a request
/// reads there is zeros.
///
/// It is the device's, so that nothing is registered and nothing has to be destroyed. Peers cannot name it.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, header: uverbs::Sge) -> uverbs::Result<()> {
/// // Receives the first bytes of messages of up to 1 MiB, and drops the rest.
/// let null = pd.alloc_null_mr()?;
/// let sges = [header, null.sge(1 << 20)];
/// let recv = uverbs::RecvWr::new(&sges);
/// # let _ = recv; Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NullRegion {
    lkey: Lkey,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// The null region of the device, for queue pairs of any domain of the context. It asks nobody.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on soft-RoCE, and on an mlx5 device that has none.
    #[doc(alias = "ibv_alloc_null_mr")]
    pub fn alloc_null_mr(&self) -> Result<NullRegion> {
        const VERB: &str = "alloc_null_mr";
        let file = self.inner.file();
        let lkey = file.provider.mlx5(VERB)?.limits().null_lkey;
        lkey.map(|lkey| NullRegion { lkey }).ok_or_else(|| {
            let detail = format!("{} has no key of a null region", file.device.name());
            Error::new(VERB, Errno::OPNOTSUPP).detail(detail)
        })
    }
}

impl NullRegion {
    /// The key.
    pub fn lkey(&self) -> Lkey {
        self.lkey
    }

    /// An entry of `length` bytes without memory.
    pub fn sge(&self, length: u32) -> Sge {
        Sge { addr: 0, length, lkey: self.lkey }
    }
}
