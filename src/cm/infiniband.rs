//! Ids on InfiniBand without IP addresses: GIDs with service ids, paths, and the services that a subnet administrator
//! knows. Pairs with `ucma_query_gid`, `ucma_query_path`, `ucma_set_ib_path` and `ucma_resolve_ib_service` in
//! `core/ucma.c`, and with `path_rec_table` in `core/sa_query.c`.

use super::address::STORAGE;
use super::address_error::explain_privileged;
use super::bound::BoundId;
use super::channel::Channel;
use super::connect::Connection;
use super::event::Event;
use super::id::{IdInner, Path};
use super::listen::{ConnectRequest, ListeningId};
use super::port_space::PortSpace;
use super::resolve_addr::{AddrResolved, ResolvingAddr};
use super::resolve_route::{ResolvingRoute, RouteResolved};
use super::step::{Progress, Step, wait};
use super::ucma::UcmaCommand;
use super::unbound::Id;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::number::Gid;
use crate::port::Mtu;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;
use uverbs_uapi::endian::{Be16, Be32, Be64};
use uverbs_uapi::rdma_user_cm as uapi;
use uverbs_uapi::rdma_user_cm::rdma_cm_event_type as Type;
use zerocopy::{FromBytes, IntoBytes};

/// The address family of InfiniBand, which rustix does not name.
pub(super) const AF_IB: u16 = 27;

/// The error of a query if the port has no subnet administrator.
pub(super) const NO_ADMINISTRATOR: &str = "the port knows no subnet administrator to ask; without one, \
     `set_ib_path` takes a path that the program knows";

/// The P_Key of the default partition, for full members.
const DEFAULT_PKEY: u16 = 0xffff;

/// An address on InfiniBand: the GID of a port, and a service id.
///
/// ```no_run
/// # fn f(id: uverbs::cm::Id, gid: uverbs::Gid) -> uverbs::Result<()> {
/// use std::time::Duration;
/// use uverbs::cm::{IbAddress, PortSpace};
///
/// let peer = IbAddress::new(gid, PortSpace::TCP, 7471);
/// let resolving = id.resolve_ib_addr(None, peer, Duration::from_secs(2))?;
/// # drop(resolving); Ok(()) }
/// ```
///
/// Both ends of a connection by GID, its paths, and a service by its number:
///
/// ```no_run
/// # fn f(channel: &uverbs::cm::EventChannel, own: uverbs::Gid, peer: uverbs::Gid, qp: &uverbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::QpType;
/// use uverbs::cm::{
///     BoundId, ConnectParam, ConnectRequest, Connection, IbAddress, ListeningId, PortSpace, RouteResolved,
/// };
///
/// let limit = Duration::from_secs(2);
/// let service = IbAddress::of_service(own, 0x1_0006_1d2f);
/// let listening: ListeningId = channel.create_id(PortSpace::TCP, QpType::RC)?.bind_ib(service)?.listen(16)?;
/// println!("listens at {:?}", listening.local_ib_addr()?);
/// let request: Option<ConnectRequest> = listening.next_request(None)?;
/// if let Some(request) = request {
///     println!("asked by {:?}", request.ib_addrs()?.1);
/// }
///
/// let bound: BoundId = channel
///     .create_id(PortSpace::TCP, QpType::RC)?
///     .bind_ib(IbAddress::new(own, PortSpace::TCP, 0))?;
/// let to = IbAddress::new(peer, PortSpace::TCP, 7471);
/// let resolved = bound.resolve_ib_addr(to, limit)?.wait(None)?.done()?;
/// let route: RouteResolved = resolved.resolve_route(limit)?.wait(None)?.done()?;
/// println!("{:?} by {:?}", route.ib_addrs()?, route.ib_paths()?);
/// let connection: Connection = route.connect(qp, &ConnectParam::new())?.wait(None)?.done()?;
/// assert_eq!(connection.ib_addrs()?.1, to);
/// # Ok(()) }
/// ```
#[doc(alias("sockaddr_ib", "AF_IB"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IbAddress {
    /// The port's GID; [`Gid::default`] stands for any.
    pub gid: Gid,
    /// The partition.
    pub pkey: u16,
    /// The service id: the upper bits are the port space, the last 16 bits the port number.
    pub service_id: u64,
    /// The bits of the service id that are compared.
    pub service_mask: u64,
    /// The flow label of the global route.
    pub flow_info: u32,
    /// The scope of the GID.
    pub scope_id: u64,
}

impl IbAddress {
    /// The address of a port number in a port space, in the default partition. If an id is bound with port number 0,
    /// the kernel chooses one.
    pub fn new(gid: Gid, space: PortSpace, port: u16) -> IbAddress {
        IbAddress::of_service(gid, u64::from(space.0) << 16 | u64::from(port))
    }

    /// The address of a service, in the default partition.
    pub fn of_service(gid: Gid, service_id: u64) -> IbAddress {
        IbAddress {
            gid,
            pkey: DEFAULT_PKEY,
            service_id,
            service_mask: u64::MAX,
            flow_info: 0,
            scope_id: 0,
        }
    }

    /// The port number: the last 16 bits of the service id.
    pub fn port(&self) -> u16 {
        self.service_id as u16
    }

    /// The address in the kernel's form, and its length.
    pub(super) fn encode(&self) -> ([u8; STORAGE], u16) {
        let raw = uapi::sockaddr_ib {
            sib_family: AF_IB,
            sib_pkey: Be16::new(self.pkey),
            sib_flowinfo: Be32::new(self.flow_info),
            sib_addr: self.gid.0,
            sib_sid: Be64::new(self.service_id),
            sib_sid_mask: Be64::new(self.service_mask),
            sib_scope_id: self.scope_id,
        };
        let mut storage = [0; STORAGE];
        for (place, byte) in storage.iter_mut().zip(raw.as_bytes()) {
            *place = *byte;
        }
        (storage, size_of::<uapi::sockaddr_ib>() as u16)
    }

    /// An address from the kernel's form; `None` for another address family, and for an unset address.
    pub(super) fn decode(storage: &[u8]) -> Option<IbAddress> {
        let (raw, _) = uapi::sockaddr_ib::read_from_prefix(storage).ok()?;
        (raw.sib_family == AF_IB).then(|| IbAddress {
            gid: Gid(raw.sib_addr),
            pkey: raw.sib_pkey.get(),
            service_id: raw.sib_sid.get(),
            service_mask: raw.sib_sid_mask.get(),
            flow_info: raw.sib_flowinfo.get(),
            scope_id: raw.sib_scope_id,
        })
    }
}

impl ListeningId {
    /// The GID and the service that the id listens on, also of an id with an IP address. The GID is `::`, all zeros,
    /// for an id that listens on the unspecified address, which belongs to no device; [`ConnectRequest::ib_addrs`] has
    /// the GID that a request came to.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn local_ib_addr(&self) -> Result<IbAddress> {
        self.id.ib_addrs("get_local_addr").map(|(local, _)| local)
    }
}

impl ConnectRequest {
    /// The GIDs and the service of both ends, this end first, also of a request with IP addresses.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn ib_addrs(&self) -> Result<(IbAddress, IbAddress)> {
        self.id.ib_addrs("get_peer_addr")
    }
}

impl Connection {
    /// The GIDs and the service of both ends, this end first, also of a connection with IP addresses.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn ib_addrs(&self) -> Result<(IbAddress, IbAddress)> {
        self.id().ib_addrs("get_peer_addr")
    }
}

/// A path through the subnet, as a subnet administrator describes it. On RoCE the kernel makes one from the IP
/// addresses.
///
/// [`IbPath::default`] is a reversible path in the default partition with an MTU of 2048 bytes, with GIDs and LIDs
/// still to be set.
#[doc(alias = "ib_path_record")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IbPath {
    /// The service id that the path is for; 0 stands for any.
    pub service_id: u64,
    /// The GID of the other end.
    pub dgid: Gid,
    /// The GID of this end.
    pub sgid: Gid,
    /// The LID of the other end.
    pub dlid: u16,
    /// The LID of this end.
    pub slid: u16,
    /// The flow label of the global route, 20 bits.
    pub flow_label: u32,
    /// The largest number of routers that a packet passes.
    pub hop_limit: u8,
    /// The traffic class of the global route.
    pub traffic_class: u8,
    /// Whether packets can return on the same path, as connections need.
    pub reversible: bool,
    /// The partition.
    pub pkey: u16,
    /// The QoS class that the query asked for, 12 bits.
    pub qos_class: u16,
    /// The service level, 4 bits.
    pub service_level: u8,
    /// The path's MTU.
    pub mtu: Mtu,
    /// The static rate, 6 bits, coded as in [`AddressVector::static_rate`](crate::AddressVector::static_rate).
    pub rate: u8,
    /// The longest time of a packet on the path, 6 bits: 4.096 µs · 2ⁿ.
    pub packet_life_time: u8,
    /// The rank among several paths; the administrator prefers 0.
    pub preference: u8,
}

impl Default for IbPath {
    fn default() -> IbPath {
        IbPath {
            service_id: 0,
            dgid: Gid::default(),
            sgid: Gid::default(),
            dlid: 0,
            slid: 0,
            flow_label: 0,
            hop_limit: 0,
            traffic_class: 0,
            reversible: true,
            pkey: DEFAULT_PKEY,
            qos_class: 0,
            service_level: 0,
            mtu: Mtu::MTU_2048,
            rate: 0,
            packet_life_time: 0,
            preference: 0,
        }
    }
}

/// The length of a path record.
const RECORD: usize = 64;

impl IbPath {
    /// The selector of MTU, rate and packet life time: exactly this value, not a bound.
    const EXACTLY: u8 = 2 << 6;

    /// Refuses values that their fields cannot hold.
    fn check(&self, verb: &'static str) -> Result<()> {
        let fields = [
            ("flow label", self.flow_label, 20),
            ("QoS class", self.qos_class.into(), 12),
            ("service level", self.service_level.into(), 4),
            ("MTU code", self.mtu.0.into(), 6),
            ("static rate", self.rate.into(), 6),
            ("packet life time", self.packet_life_time.into(), 6),
        ];
        match fields.into_iter().find(|(_, value, bits)| value >> bits != 0) {
            Some((name, value, bits)) => {
                let most = (1 << bits) - 1;
                let detail = format!(
                    "a {name} of {value}; it has {bits} bits, so that {most} is the maximum"
                );
                Err(Error::invalid(verb, detail))
            }
            None => Ok(()),
        }
    }

    /// The record as it travels. Each value [fits](Self::check).
    fn to_record(self) -> [u8; RECORD] {
        let flow = self.flow_label << 8 | u32::from(self.hop_limit);
        let mut record = [0; RECORD];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            for byte in bytes {
                if let Some(place) = record.get_mut(at) {
                    *place = *byte;
                }
                at += 1;
            }
        };
        put(&self.service_id.to_be_bytes());
        put(&self.dgid.0);
        put(&self.sgid.0);
        put(&self.dlid.to_be_bytes());
        put(&self.slid.to_be_bytes());
        put(&flow.to_be_bytes());
        // The record's count of paths: 1.
        put(&[self.traffic_class, u8::from(self.reversible) << 7 | 1]);
        put(&self.pkey.to_be_bytes());
        put(&(self.qos_class << 4 | u16::from(self.service_level)).to_be_bytes());
        put(&[Self::EXACTLY | self.mtu.0, Self::EXACTLY | self.rate]);
        put(&[Self::EXACTLY | self.packet_life_time, self.preference]);
        record
    }

    fn from_record(record: &[u8; RECORD]) -> IbPath {
        fn bytes<const N: usize>(record: &[u8; RECORD], at: usize) -> [u8; N] {
            record.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
        }
        let half = |at| u16::from_be_bytes(bytes(record, at));
        let byte = |at| u8::from_be_bytes(bytes(record, at));
        let flow = u32::from_be_bytes(bytes(record, 44));
        IbPath {
            service_id: u64::from_be_bytes(bytes(record, 0)),
            dgid: Gid(bytes(record, 8)),
            sgid: Gid(bytes(record, 24)),
            dlid: half(40),
            slid: half(42),
            flow_label: flow >> 8 & 0xf_ffff,
            hop_limit: flow as u8,
            traffic_class: byte(48),
            reversible: byte(49) >> 7 != 0,
            pkey: half(50),
            qos_class: half(52) >> 4,
            service_level: byte(53) & 0xf,
            mtu: Mtu(byte(54) & 0x3f),
            rate: byte(55) & 0x3f,
            packet_life_time: byte(56) & 0x3f,
            preference: byte(57),
        }
    }
}

/// A service to look for.
///
/// ```no_run
/// # fn f(id: uverbs::cm::BoundId) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use uverbs::QpType;
/// use uverbs::cm::{ConnectParam, IbService, IbServiceResolved};
///
/// let resolving = id.resolve_ib_service(IbService::Name("storage"))?;
/// let found: IbServiceResolved = resolving.wait(None)?.done()?;
/// for record in found.records() {
///     println!("{} at {}", record.name, record.address.gid);
/// }
///
/// // Connects to the first of them.
/// let context = found.context()?;
/// let (pd, cq) = (context.alloc_pd()?, context.cq_builder(16).build()?);
/// let qp = pd.qp_builder(&cq, &cq, QpType::RC).build()?;
/// let route = found.resolve_route(Duration::from_secs(2))?.wait(None)?.done()?;
/// let connection = route.connect(&qp, &ConnectParam::new())?.wait(None)?.done()?;
/// # drop(connection); Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IbService<'a> {
    /// By its id.
    Id(u64),
    /// By its name, of at most 63 bytes.
    Name(&'a str),
}

/// A subnet administrator's record of a service.
#[doc(alias = "ib_user_service_rec")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IbServiceRecord {
    /// The address of the service.
    pub address: IbAddress,
    /// The lease of the record in seconds; `u32::MAX` for an unlimited one.
    pub lease: u32,
    /// The key that allows changes of the record, or zeros.
    pub key: [u8; 16],
    /// The name.
    pub name: String,
    /// Data of the service, in bytes, and in numbers of 16, 32 and 64 bits.
    pub data_8: [u8; 16],
    /// See [`data_8`](Self::data_8).
    pub data_16: [u16; 8],
    /// See [`data_8`](Self::data_8).
    pub data_32: [u32; 4],
    /// See [`data_8`](Self::data_8).
    pub data_64: [u64; 2],
}

impl IbServiceRecord {
    fn new(raw: &uapi::ib_user_service_rec) -> IbServiceRecord {
        let name = raw.name.split(|byte| *byte == 0).next().unwrap_or_default();
        let address = IbAddress::of_service(Gid(raw.gid), raw.id.get());
        IbServiceRecord {
            address: IbAddress { pkey: raw.pkey.get(), ..address },
            lease: raw.lease.get(),
            key: raw.key,
            name: String::from_utf8_lossy(name).into_owned(),
            data_8: raw.data_8,
            data_16: raw.data_16.map(|value| value.get()),
            data_32: raw.data_32.map(|value| value.get()),
            data_64: raw.data_64.map(|value| value.get()),
        }
    }
}

impl IdInner {
    /// Both ends by GID and service, also of an id with IP addresses.
    pub(super) fn ib_addrs(&self, verb: &'static str) -> Result<(IbAddress, IbAddress)> {
        let option = uapi::RDMA_USER_CM_QUERY_GID;
        let request = uapi::rdma_ucm_query { id: self.number(), option, ..Default::default() };
        let mut answer = uapi::rdma_ucm_query_addr_resp::default();
        self.execute(verb, UcmaCommand::query(&request, &mut answer))?;
        match (IbAddress::decode(&answer.src_addr), IbAddress::decode(&answer.dst_addr)) {
            (Some(local), Some(peer)) => Ok((local, peer)),
            _ => Err(Error::new(verb, Errno::AFNOSUPPORT).detail("the id has no GID")),
        }
    }

    /// Queries a list. The kernel answers its length and as many items as the buffer has room for.
    fn query_list<T: FromBytes>(&self, verb: &'static str, option: u32) -> Result<Vec<T>> {
        const HEADER: usize = size_of::<uapi::rdma_ucm_query_path_resp>();
        let request = uapi::rdma_ucm_query { id: self.number(), option, ..Default::default() };
        // The length of an answer is a field of 16 bits. The kernel leaves the last place of a list of paths empty.
        let most = (usize::from(u16::MAX) - HEADER) / size_of::<T>() - 1;
        let mut room = 6;
        loop {
            let mut answer = vec![0; HEADER + (room + 1) * size_of::<T>()];
            self.execute(verb, UcmaCommand::query_list(&request, &mut answer))?;
            let count = answer.first_chunk().copied().map_or(0, u32::from_ne_bytes) as usize;
            if count > room && room < most {
                room = count.min(most);
                continue;
            }
            let items = answer.get(HEADER..).unwrap_or_default().chunks_exact(size_of::<T>());
            return Ok(items
                .take(count.min(room))
                .filter_map(|item| T::read_from_bytes(item).ok())
                .collect());
        }
    }

    fn set_ib_path(&self, path: &IbPath) -> Result<()> {
        const VERB: &str = "set_ib_path";
        path.check(VERB)?;
        // The only flags that the kernel takes.
        let flags = uapi::IB_PATH_GMP | uapi::IB_PATH_PRIMARY | uapi::IB_PATH_BIDIRECTIONAL;
        let mut value = [0; size_of::<uapi::ib_path_rec_data>()];
        let fields = flags.to_ne_bytes().into_iter().chain([0; 4]).chain(path.to_record());
        for (place, byte) in value.iter_mut().zip(fields) {
            *place = byte;
        }
        self.set_option(VERB, uapi::RDMA_OPTION_IB, uapi::RDMA_OPTION_IB_PATH, &value)
    }

    fn resolve_ib_service(&self, service: IbService<'_>) -> Result<()> {
        const VERB: &str = ResolvingIbService::VERB;
        const RESOLVE: u32 = uapi::RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE;
        let mut ibs = uapi::rdma_ucm_ib_service::default();
        match service {
            IbService::Id(id) => {
                ibs.service_id = id;
                ibs.flags = uapi::RDMA_USER_CM_IB_SERVICE_FLAG_ID;
            }
            IbService::Name(name) => {
                let most = ibs.service_name.len() - 1;
                if name.len() > most || name.is_empty() || name.contains('\0') {
                    let detail = format!(
                        "a service name of {} bytes: it has 1 to {most}, none of them 0",
                        name.len()
                    );
                    return Err(Error::invalid(VERB, detail));
                }
                for (place, byte) in ibs.service_name.iter_mut().zip(name.bytes()) {
                    *place = byte;
                }
                ibs.flags = uapi::RDMA_USER_CM_IB_SERVICE_FLAG_NAME;
            }
        }
        let request =
            uapi::rdma_ucm_resolve_ib_service { id: self.number(), ibs, ..Default::default() };
        let probe = uapi::rdma_ucm_resolve_ib_service { id: Channel::NO_ID, ..request };
        self.channel.execute_new(VERB, RESOLVE, &request, &probe, "6.18").map_err(|error| {
            match (error.errno(), error.kernel_errno()) {
                (Errno::INVAL, _) => {
                    error.detail("the id is on no device: bind it to an address of a port first")
                }
                (Errno::AGAIN, _) => error.detail(
                    "the port knows no subnet administrator to ask; a program that knows the GID and the service id \
                     of the service takes `resolve_ib_addr` and `set_ib_path`",
                ),
                (Errno::OPNOTSUPP, Some(Errno::OPNOTSUPP)) => {
                    error.detail("only an InfiniBand port has a subnet administrator to ask")
                }
                _ => error,
            }
        })
    }
}

/// Refuses a service id outside of the port space, as the kernel's `cma_select_ib_ps` does.
fn check_service(verb: &'static str, space: PortSpace, address: &IbAddress) -> Result<()> {
    /// The bits of the port number.
    const NUMBER: u64 = 0xffff;
    let spaces: &[PortSpace] = match space {
        PortSpace::IB => &[PortSpace::IB, PortSpace::TCP, PortSpace::UDP],
        PortSpace::TCP => &[PortSpace::TCP],
        PortSpace::UDP => &[PortSpace::UDP],
        _ => &[],
    };
    let mask = address.service_mask & !NUMBER;
    let is_in = |space: &PortSpace| (address.service_id ^ u64::from(space.0) << 16) & mask == 0;
    if spaces.iter().any(is_in) {
        return Ok(());
    }
    let detail = match spaces {
        [] => format!("the port space {space} has no service ids; `bind` takes an IP address"),
        _ => format!(
            "the service id {:#x} is none of the port space {space}; `IbAddress::new` makes one that is",
            address.service_id
        ),
    };
    Err(Error::invalid(verb, detail))
}

/// Explains the kernel's refusal to bind an id to an address.
fn explain_bind(error: Error, space: PortSpace, address: &IbAddress) -> Error {
    let port = address.port();
    match error.errno() {
        Errno::NODEV => error.detail(format!("no InfiniBand port has the GID {}", address.gid)),
        // `EADDRNOTAVAIL` if one of the two ids is bound to any GID.
        Errno::ADDRINUSE | Errno::ADDRNOTAVAIL => error.meaning(Errno::ADDRINUSE).detail(format!(
            "port number {port} of the port space {space} is in use; choose another one, or 0 to have the kernel \
             choose"
        )),
        _ => explain_privileged(error, port)
            .context(|| format!("the kernel binds no id to the GID {}", address.gid)),
    }
}

impl Id {
    /// Binds the id to the GID of a port and to a service, on InfiniBand; with port number 0 the kernel chooses one.
    /// The upper part of the service id is that of the id's port space.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for a service id of another port space, `ENODEV` if no InfiniBand port has
    /// the GID, `EADDRINUSE` if another id has the port number, `EACCES` for a port number below 1024
    /// without `CAP_NET_BIND_SERVICE`.
    #[doc(alias = "rdma_bind_addr")]
    pub fn bind_ib(self, address: IbAddress) -> Result<BoundId> {
        const VERB: &str = "bind_addr";
        check_service(VERB, self.id.space, &address)?;
        self.id
            .bind_raw(VERB, address.encode())
            .map_err(|error| explain_bind(error, self.id.space, &address))?;
        Ok(BoundId { id: self.id })
    }

    /// As [`resolve_addr`](Self::resolve_addr), to the GID of a port and a service, on InfiniBand. The kernel chooses a
    /// local port in the same subnet and partition, without a query of the network.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ENODEV` if no active port is in the subnet and partition, or none has the GID of
    /// `from`; for `from` also the errors of [`bind_ib`](Self::bind_ib).
    #[doc(alias = "rdma_resolve_addr")]
    pub fn resolve_ib_addr(
        self,
        from: Option<IbAddress>,
        to: IbAddress,
        timeout: Duration,
    ) -> Result<ResolvingAddr> {
        resolve_ib(self.id, from, to, timeout)
    }
}

fn resolve_ib(
    id: Arc<IdInner>,
    from: Option<IbAddress>,
    to: IbAddress,
    timeout: Duration,
) -> Result<ResolvingAddr> {
    const VERB: &str = ResolvingAddr::VERB;
    if let Some(from) = &from {
        check_service(VERB, id.space, from)?;
    }
    let source = from.map_or(([0; STORAGE], 0), |from| from.encode());
    id.resolve_raw(VERB, source, to.encode(), timeout).map_err(|error| match (error.errno(), from) {
        (Errno::NODEV, None) => error.detail(format!(
            "no active InfiniBand port is in the subnet of the GID {} and has the P_Key {:#06x}",
            to.gid, to.pkey
        )),
        (Errno::NODEV, Some(from)) => error.detail(format!(
            "no active InfiniBand port has the GID {} and is in the subnet of {} with the P_Key {:#06x}",
            from.gid, to.gid, to.pkey
        )),
        (_, Some(from)) => explain_bind(error, id.space, &from),
        _ => error.context(|| format!("the kernel does not resolve the GID {}", to.gid)),
    })?;
    Ok(ResolvingAddr { id })
}

impl BoundId {
    /// As [`Id::resolve_ib_addr`], from the address that the id is bound to.
    ///
    /// # Errors
    ///
    /// As [`Id::resolve_ib_addr`]; `EINVAL` for an id that is bound to an IP address.
    pub fn resolve_ib_addr(self, to: IbAddress, timeout: Duration) -> Result<ResolvingAddr> {
        resolve_ib(self.id, None, to, timeout).map_err(|error| match error.errno() {
            Errno::INVAL => {
                error.detail(format!("the id is bound to an IP address, and {} is a GID", to.gid))
            }
            // `resolve_ib` has explained it.
            _ => error,
        })
    }

    /// The GID and the service that the id is bound to, also of an id with an IP address. The GID is `::`, all zeros,
    /// for an id that is bound to the unspecified address, which belongs to no device.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn local_ib_addr(&self) -> Result<IbAddress> {
        self.id.ib_addrs("get_local_addr").map(|(local, _)| local)
    }

    /// Asks the subnet administrator for the address of a service, through the InfiniBand port that has the id's
    /// address. An id asks once.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EOPNOTSUPP` if the port is no InfiniBand port, and before Linux 6.18; `EAGAIN` if
    /// the port knows no subnet administrator; `EINVAL` for an id that is bound to no device, and for a name that is
    /// empty, longer than 63 bytes or has a byte of 0.
    #[doc(alias = "rdma_resolve_addrinfo")]
    pub fn resolve_ib_service(self, service: IbService<'_>) -> Result<ResolvingIbService> {
        self.id.resolve_ib_service(service)?;
        Ok(ResolvingIbService { id: self.id })
    }
}

impl AddrResolved {
    /// Takes this path in place of the one that the kernel would resolve, for example where no subnet administrator
    /// answers. The route is then resolved at once.
    ///
    /// ```no_run
    /// # fn f(id: uverbs::cm::Id, here: uverbs::Gid, there: uverbs::Gid, qp: &uverbs::QueuePair)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use uverbs::Mtu;
    /// use uverbs::cm::{ConnectParam, IbAddress, IbPath, PortSpace};
    ///
    /// let to = IbAddress::new(there, PortSpace::TCP, 7471);
    /// let resolved = id.resolve_ib_addr(None, to, Duration::from_secs(2))?.wait(None)?.done()?;
    /// // The LIDs of both ports, as the subnet manager assigned them.
    /// let (slid, dlid) = (4, 7);
    /// let path = IbPath { sgid: here, slid, dgid: there, dlid, mtu: Mtu::MTU_4096, ..IbPath::default() };
    /// let route = resolved.set_ib_path(&path)?.wait(None)?.done()?;
    /// let connection = route.connect(qp, &ConnectParam::new())?.wait(None)?.done()?;
    /// # drop(connection); Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `EINVAL` for a value that its field cannot hold; `ENXIO` if the device is gone.
    #[doc(alias("rdma_set_option", "RDMA_OPTION_IB_PATH"))]
    pub fn set_ib_path(self, path: &IbPath) -> Result<ResolvingRoute> {
        self.id.set_ib_path(path)?;
        Ok(ResolvingRoute { id: self.id, path: self.path })
    }
}

impl RouteResolved {
    /// The GIDs and the service of both ends, this end first, also of an id with IP addresses.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    pub fn ib_addrs(&self) -> Result<(IbAddress, IbAddress)> {
        self.id.ib_addrs("get_peer_addr")
    }

    /// The path to the other end, and on InfiniBand the alternate one if there is any.
    ///
    /// # Errors
    ///
    /// `ENXIO` if the device is gone.
    #[doc(alias = "RDMA_USER_CM_QUERY_PATH")]
    pub fn ib_paths(&self) -> Result<Vec<IbPath>> {
        const SKIP: usize = size_of::<uapi::ib_path_rec_data>() - RECORD;
        type Record = [u8; SKIP + RECORD];
        let records: Vec<Record> =
            self.id.query_list("query_path", uapi::RDMA_USER_CM_QUERY_PATH)?;
        let records = records.iter().filter_map(|record| record.last_chunk::<RECORD>());
        Ok(records.map(IbPath::from_record).collect())
    }
}

/// An id that waits for the subnet administrator's address of a service.
#[derive(Debug)]
pub struct ResolvingIbService {
    id: Arc<IdInner>,
}

impl ResolvingIbService {
    /// Waits for the administrator's answer, for at most `timeout`, or without a limit for `None`; a timeout of zero
    /// polls once.
    ///
    /// # Errors
    ///
    /// Any error destroys the id. `ETIMEDOUT` if no administrator answered, which the kernel reports after two
    /// seconds; `ENOENT` if it knows no such service.
    pub fn wait(self, timeout: Option<Duration>) -> Result<Progress<Self, IbServiceResolved>> {
        wait(self, timeout)
    }
}

impl Step for ResolvingIbService {
    type Next = IbServiceResolved;
    type Error = Error;
    const VERB: &'static str = "resolve_ib_service";

    fn id(&self) -> &IdInner {
        &self.id
    }

    fn advance(self, event: Event) -> Result<IbServiceResolved> {
        const VERB: &str = ResolvingIbService::VERB;
        if event.kind != Type::RDMA_CM_EVENT_ADDRINFO_RESOLVED {
            return Err(event.failure(VERB).into());
        }
        let raw: Vec<uapi::ib_user_service_rec> =
            self.id.query_list(VERB, uapi::RDMA_USER_CM_QUERY_IB_SERVICE)?;
        let path = self.id.query(VERB)?;
        let records = raw.iter().map(IbServiceRecord::new).collect();
        Ok(IbServiceResolved { id: self.id, path, records })
    }
}

/// An id that has the address of a service.
#[derive(Debug)]
pub struct IbServiceResolved {
    id: Arc<IdInner>,
    path: Path,
    records: Vec<IbServiceRecord>,
}

impl IbServiceResolved {
    /// The subnet administrator's records: at least one, and at most 371, the room of the kernel's answer.
    /// [`resolve_route`](Self::resolve_route) takes the first one.
    ///
    /// To reach another one, make a new id with [`Id::bind_ib`] and [`BoundId::resolve_ib_addr`]: the kernel takes no
    /// other address for this id.
    #[doc(alias = "rdma_query_addrinfo")]
    pub fn records(&self) -> &[IbServiceRecord] {
        &self.records
    }

    /// The context of the id's device; see [`EventChannel::use_context`](super::EventChannel::use_context).
    ///
    /// # Errors
    ///
    /// As [`Context::open`](crate::Context::open).
    pub fn context(&self) -> Result<Context> {
        const VERB: &str = ResolvingIbService::VERB;
        self.id.channel.context(VERB, self.path.device(VERB)?)
    }

    /// Starts to resolve the route to the first record's address; see
    /// [`AddrResolved::resolve_route`].
    ///
    /// # Errors
    ///
    /// As [`AddrResolved::resolve_route`].
    pub fn resolve_route(self, timeout: Duration) -> Result<ResolvingRoute> {
        self.id.resolve_route(timeout)?;
        Ok(ResolvingRoute { id: self.id, path: self.path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(last: u8) -> Gid {
        let mut gid = [0; 16];
        (gid[0], gid[1], gid[15]) = (0xfe, 0x80, last);
        Gid(gid)
    }

    #[test]
    fn decoding_reverses_encoding() {
        let address = IbAddress {
            flow_info: 5,
            scope_id: 6,
            pkey: 0x8001,
            ..IbAddress::new(gid(7), PortSpace::IB, 0x1234)
        };
        let (storage, length) = address.encode();
        assert_eq!((length, IbAddress::decode(&storage)), (48, Some(address)));
        // The port space and the port number are in the service id, in network order.
        assert_eq!(storage[24..32], [0, 0, 0, 0, 0x01, 0x3f, 0x12, 0x34]);
        assert_eq!((address.port(), storage[2..4].to_vec()), (0x1234, vec![0x80, 0x01]));
        assert_eq!(IbAddress::decode(&[0; STORAGE]), None);
        assert_eq!(IbAddress::decode(&[]), None);
    }

    #[test]
    fn any_bytes_of_the_subnet_administrator_are_a_value() {
        let path = IbPath { dgid: gid(1), sgid: gid(2), hop_limit: 1, ..IbPath::default() };
        let known =
            [path.to_record().to_vec(), IbAddress::of_service(gid(3), 7).encode().0.to_vec()];
        let tally = crate::tests::hostile::explore("paths and services", 1, &known, |bytes| {
            let address = IbAddress::decode(bytes);
            if let Some(address) = address {
                assert!(!format!("{address:?} {}", address.port()).is_empty());
            }
            let path = bytes.first_chunk().map(IbPath::from_record);
            if let Some(path) = path {
                // Every value fits its field, so that the kernel takes the path back.
                assert!(path.check("set_ib_path").is_ok(), "{path:?}");
                assert_eq!(
                    IbPath::from_record(&path.to_record()),
                    IbPath { reversible: path.reversible, ..path }
                );
            }
            if let Ok((raw, _)) = uapi::ib_user_service_rec::read_from_prefix(bytes) {
                assert!(IbServiceRecord::new(&raw).name.len() <= 3 * raw.name.len());
            }
            address.is_some() || path.is_some()
        });
        assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
    }

    /// The places of the fields are those of the InfiniBand specification, 15.2.5.16.
    #[test]
    fn fields_of_a_path_are_in_their_places() {
        let path = IbPath {
            service_id: 1,
            dgid: gid(2),
            sgid: gid(3),
            dlid: 0x0405,
            slid: 0x0607,
            flow_label: 0x8_090a,
            hop_limit: 11,
            traffic_class: 12,
            reversible: true,
            pkey: 0x8d0e,
            qos_class: 0xabc,
            service_level: 15,
            mtu: Mtu(4),
            rate: 17,
            packet_life_time: 18,
            preference: 19,
        };
        let record = path.to_record();
        assert_eq!((record[7], record[23], record[39]), (1, 2, 3));
        assert_eq!(record[40..48], [4, 5, 6, 7, 0x08, 0x09, 0x0a, 11]);
        assert_eq!(record[48..54], [12, 0x81, 0x8d, 0x0e, 0xab, 0xcf]);
        assert_eq!(record[54..58], [0x80 | 4, 0x80 | 17, 0x80 | 18, 19]);
        assert_eq!(record[58..], [0; 6]);
        assert_eq!(IbPath::from_record(&record), path);
        // The selectors and the count of paths are no part of the values.
        assert_eq!(IbPath::from_record(&[0xff; RECORD]).mtu, Mtu(0x3f));
        assert_eq!(IbPath::from_record(&[0xff; RECORD]).flow_label, 0xf_ffff);
    }
}
