//! Address handles: where datagrams go. Pairs with `ib_uverbs_create_ah` in `core/uverbs_cmd.c`.

pub(crate) mod named_handles;

use crate::address_vector::AddressVector;
use crate::error::{Error, ErrorWith, Result};
use crate::number::{Qkey, Qpn};
use crate::object::{Class, Object};
use crate::pd::{PdInner, ProtectionDomain, Sharing};
use crate::port::{GidType, LinkLayer};
use crate::provider::LinkProtocol;
use crate::uverbs::invoke_write::write;
use crate::wr::{Address, Destination};
use rustix::io::Errno;
use std::sync::Arc;
use uverbs_uapi::ah::{ib_uverbs_create_ah, ib_uverbs_create_ah_resp};
use uverbs_uapi::write::IB_USER_VERBS_CMD_CREATE_AH;
use zerocopy::FromZeros;

/// A resolved path for datagrams.
///
/// It may be dropped as soon as the last request that uses it is pushed: on soft-RoCE, where requests name
/// it, the kernel's address handle stays until they have completed or their queue pair is gone. All methods
/// may be called from any thread.
///
/// ```no_run
/// # use uverbs::{AddressVector, Destination, Gid, Qkey, Qpn, SendWr, Sge};
/// # fn f(pd: &uverbs::ProtectionDomain, gid: Gid, sges: &[Sge]) -> uverbs::Result<()> {
/// let ah = pd.create_ah(&AddressVector::global(1, 0, gid))?;
/// let wr = SendWr::send(sges).to(Destination::new(&ah, Qpn(0x11), Qkey(0x1234)));
/// # let _ = wr; Ok(()) }
/// ```
///
/// ```no_run
/// # fn f(ah: uverbs::AddressHandle) -> uverbs::Result<()> {
/// println!("a handle of domain {}", ah.pd_handle());
/// ah.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_ah")]
#[derive(Debug)]
pub struct AddressHandle {
    /// `Some` until dropped.
    object: Option<Object>,
    address: Address,
    pd: Arc<PdInner>,
}

impl<S: Sharing> ProtectionDomain<S> {
    /// Resolves a path. On Ethernet the kernel may ask the network for the peer's hardware
    /// address, and this call waits for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port or index that does not exist, an index above 255, on Ethernet without a global part, or
    /// on InfiniBand without a `dlid`;
    /// `ENODATA` for an index whose entry is empty; `EOPNOTSUPP` on soft-RoCE before Linux 5.16;
    /// `EHOSTUNREACH` or `ENETUNREACH` without a route to the peer, `ETIMEDOUT` if it does not answer; `EINVAL` for
    /// a peer whose GID is of another IP version than the port's.
    #[doc(alias = "ibv_create_ah")]
    pub fn create_ah(&self, vector: &AddressVector) -> Result<AddressHandle> {
        const VERB: &str = "create_ah";
        self.inner.kernel.retired.sweep();
        let file = self.inner.file();
        file.device.check_port(VERB, vector.port)?;
        let attr = vector.to_ah_attr(VERB)?;
        let link = self.link(vector).map_err(|error| error.in_verb(VERB))?;
        let request =
            ib_uverbs_create_ah { pd_handle: self.inner.handle(), attr, ..Default::default() };
        let mut resp = ib_uverbs_create_ah_resp::new_zeroed();
        let mut driver_response = file.provider.traits().ah_response.clone();
        let made = file.execute(
            VERB,
            write(IB_USER_VERBS_CMD_CREATE_AH, &request)
                .response(&mut resp)
                .driver(&[], driver_response.as_mut()),
        );
        made.map_err(|error| self.explain_ah(error, vector))?;
        // Destroyed if the address cannot be resolved.
        let object = Object::new(file.clone(), Class::AH, resp.ah_handle, ());
        let address = file.provider.address(VERB, &attr, link, &driver_response)?;
        Ok(AddressHandle { object: Some(object), address, pd: self.inner.clone() })
    }
}

impl<S: Sharing> ProtectionDomain<S> {
    fn explain_ah(&self, error: Error, vector: &AddressVector) -> Error {
        let device = self.inner.file().device.name();
        let errno = error.errno();
        let asked = || {
            let way = match vector.global {
                Some(global) => format!("GID index {} to {}", global.sgid_index, global.dgid.ip()),
                None => format!("lid {:#x}", vector.dlid),
            };
            format!("port {} of {device}, {way}", vector.port)
        };
        match errno {
            Errno::OPNOTSUPP => error.detail(format!("{device} makes no address handles")),
            Errno::NOMEM | Errno::IO | Errno::AGAIN => error,
            _ => match self.context().explain_path(errno, vector) {
                Some(why) => error.detail(why),
                None if errno == Errno::INVAL => {
                    error.detail(format!("{}: {device} refuses the path", asked()))
                }
                None => error.context(asked),
            },
        }
    }

    /// The link protocol of the path's packets, where the driver leaves it to this library.
    fn link(&self, vector: &AddressVector) -> Result<LinkProtocol> {
        if !self.inner.file().provider.traits().addresses_by_link {
            return Ok(LinkProtocol::InfiniBand);
        }
        let context = self.context();
        let links = &context.file.links;
        let link_layer = match links.get(vector.port) {
            Some(known) => known,
            None => {
                let link_layer = context.query_port(vector.port)?.link_layer;
                links.set(vector.port, link_layer);
                link_layer
            }
        };
        if link_layer != LinkLayer::ETHERNET {
            // The kernel accepts the reserved identifier 0, and the device sends to no port.
            if vector.dlid == 0 {
                let detail = format!(
                    "port {} is {link_layer}, where `dlid` is the local identifier of the peer or of a \
                     router, with or without a global route; 0 is not valid",
                    vector.port
                );
                return Err(Error::invalid("create_ah", detail));
            }
            return Ok(LinkProtocol::InfiniBand);
        }
        let Some(global) = vector.global else { return Ok(LinkProtocol::RoceV1) };
        let entry = context.query_gid(vector.port, global.sgid_index)?;
        Ok(match entry.gid_type {
            GidType::ROCE_V2 => LinkProtocol::RoceV2,
            _ => LinkProtocol::RoceV1,
        })
    }
}

impl AddressHandle {
    #[inline]
    pub(crate) fn pd(&self) -> &PdInner {
        &self.pd
    }

    /// The address that later requests carry.
    pub(crate) fn address_mut(&mut self) -> &mut Address {
        &mut self.address
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The kernel's number of the protection domain that it belongs to.
    pub fn pd_handle(&self) -> u32 {
        self.pd.handle()
    }

    /// Destroys the handle, and returns an error if that fails. Dropping it does the same silently, after
    /// the last request that names it.
    ///
    /// # Errors
    ///
    /// On rxe `EBUSY` while requests that name it have not completed; those of the kernel.
    /// The handle comes back with the error.
    #[doc(alias = "ibv_destroy_ah")]
    pub fn destroy(mut self) -> std::result::Result<(), ErrorWith<Self>> {
        let number = self.address.number();
        let requests = number.map_or(0, |number| self.pd.kernel.retired.requests(number));
        if requests > 0 {
            let error = Error::new("destroy_ah", Errno::BUSY).detail(format!(
                "{requests} requests name the address handle and have not completed; a handle that is \
                 dropped goes with the last of them"
            ));
            return Err(error.with(self));
        }
        match self.object.as_mut().map_or(Ok(()), Object::destroy) {
            Ok(()) => Ok(()),
            Err(error) => Err(error.with(self)),
        }
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        match (self.address.number(), self.object.take()) {
            (Some(number), Some(object)) if !object.is_gone() => {
                self.pd.kernel.retired.retire(number, object);
            }
            (_, object) => drop(object),
        }
    }
}

impl<'a> Destination<'a> {
    /// The queue pair `qpn` with the key `qkey` at the port that `ah` leads to.
    #[inline]
    pub fn new(ah: &'a AddressHandle, qpn: Qpn, qkey: Qkey) -> Self {
        Destination { address: ah.address(), qpn, qkey, domain: ah.pd().identity() }
    }
}
