//! The path back to the sender of a datagram. Pairs with `ibv_init_ah_from_wc` of rdma-core.

use super::{GidEntry, GidType};
use crate::address_vector::{AddressVector, Grh};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::wc::Wc;
use rustix::io::Errno;

impl Context {
    /// The path back to the sender of a datagram that `port` received, for [`create_ah`](crate::ProtectionDomain::create_ah).
    /// A datagram with a [header](Grh) came from its source; the index of the port's own GID is that of the header's
    /// destination, or if that is a group, the one that [`choose_gid`](Self::choose_gid) prefers. Without a header, as
    /// within an InfiniBand subnet, the completion has the sender's LID.
    ///
    /// ```no_run
    /// # use uverbs::{CompletionQueue, Context, MemoryRegion, ProtectionDomain};
    /// # fn f(context: &Context, pd: &ProtectionDomain, cq: &mut CompletionQueue, inbox: &MemoryRegion)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use uverbs::{Grh, Wc};
    ///
    /// if let Some(done) = cq.poll()?.next() {
    ///     let done = Wc::from(done.ok()?);
    ///     let mut header = [0; Grh::BYTES];
    ///     inbox.copy_to(0, &mut header)?;
    ///     let back = context.reply_path(1, &done, Grh::parse(&header).as_ref())?;
    ///     println!("an answer goes to {} by {:?}", done.src_qpn, pd.create_ah(&back)?);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// `EINVAL` if the completion tells of a header and `grh` is `None`; `ENODATA` if the port has no GID that the datagram
    /// can have been sent to; those of [`gid_table`](Self::gid_table).
    #[doc(alias = "ibv_init_ah_from_wc")]
    #[doc(alias = "ibv_create_ah_from_wc")]
    pub fn reply_path(&self, port: u32, done: &Wc, grh: Option<&Grh>) -> Result<AddressVector> {
        const VERB: &str = "init_ah_from_wc";
        let mut path = AddressVector::local(port, done.src_lid);
        (path.service_level, path.src_path_bits) = (done.service_level, done.path_bits);
        if !done.has_grh {
            return Ok(path);
        }
        let grh = grh.ok_or_else(|| {
            let detail =
                "the completion tells of a header, which is in the first 40 bytes of the receive";
            Error::invalid(VERB, detail)
        })?;
        let index = self.index_of(VERB, port, grh)?;
        let mut global = AddressVector::global(port, index, grh.source);
        if let Some(route) = &mut global.global {
            route.flow_label = grh.flow_label;
            route.traffic_class = grh.traffic_class;
        }
        path.global = global.global;
        Ok(path)
    }

    /// The index of the GID that a datagram was sent to.
    fn index_of(&self, verb: &'static str, port: u32, grh: &Grh) -> Result<u32> {
        let is_of_kind = |entry: &GidEntry| (entry.gid_type == GidType::ROCE_V2) == grh.is_roce_v2;
        let found = match grh.destination.ip().is_multicast() {
            true => self.default_gid(port).map(|entry| Some(entry).filter(is_of_kind)),
            false => self.gid_table().map(|table| {
                let is_it = |entry: &GidEntry| entry.port == port && entry.gid == grh.destination;
                table.into_iter().find(|entry| is_it(entry) && is_of_kind(entry))
            }),
        };
        let found = found.map_err(|error| error.in_verb(verb))?;
        found.map(|entry| entry.index).ok_or_else(|| {
            let gid = grh.destination;
            let kind = if grh.is_roce_v2 { "RoCE v2" } else { "InfiniBand or RoCE v1" };
            Error::new(verb, Errno::NODATA).detail(format!(
                "port {port} has no GID {gid} of {kind}, which the datagram was sent to"
            ))
        })
    }
}
