//! Connections by address with librdmacm, opened at run time. Pairs with `rdma/rdma_cma.h`.

use crate::abi::{Context, Cq, Opaque, Pd, QpInitAttrEx};
use crate::endpoint;
use crate::verbs::{Made, Verbs, symbol};
use lab_bench::Failure;
use lab_bench::control::{FROM, TO};
use libloading::Library;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::mem::forget;
use std::net::SocketAddrV4;
use std::ptr::{null, null_mut};
use std::rc::Rc;

const LIBRARY: &str = "librdmacm.so.1";
const PORT_SPACE_TCP: c_uint = 0x0106;
const LIMIT_MS: c_int = 2000;

/// `enum rdma_cm_event_type`.
mod event {
    use std::ffi::c_uint;

    pub(super) const ADDR_RESOLVED: c_uint = 0;
    pub(super) const ROUTE_RESOLVED: c_uint = 2;
    pub(super) const CONNECT_REQUEST: c_uint = 4;
    pub(super) const ESTABLISHED: c_uint = 9;
    pub(super) const DISCONNECTED: c_uint = 10;
}

/// The beginning of `struct rdma_cm_id`.
#[repr(C)]
pub(crate) struct Id {
    verbs: *mut Context,
    // The rest is not touched.
}

/// The beginning of `struct rdma_cm_event`.
#[repr(C)]
struct Event {
    id: *mut Id,
    listen_id: *mut Id,
    event: c_uint,
    status: c_int,
    // The rest is not touched.
}

/// `struct rdma_conn_param`.
#[repr(C)]
struct Param {
    private_data: *const c_void,
    private_data_len: u8,
    responder_resources: u8,
    initiator_depth: u8,
    flow_control: u8,
    retry_count: u8,
    rnr_retry_count: u8,
    srq: u8,
    qp_num: u32,
}

/// `struct sockaddr_in`, in network order.
#[repr(C)]
struct Address {
    family: u16,
    port: [u8; 2],
    ip: [u8; 4],
    zero: [u8; 8],
}

impl Address {
    fn parse(text: &str) -> Result<Address, Failure> {
        const INET: u16 = 2;
        let address: SocketAddrV4 = text.parse()?;
        let (ip, port) = (address.ip().octets(), address.port().to_be_bytes());
        Ok(Address { family: INET, port, ip, zero: [0; 8] })
    }
}

type OnId = unsafe extern "C" fn(*mut Id) -> c_int;

/// The functions of the library.
struct Functions {
    create_event_channel: unsafe extern "C" fn() -> *mut Opaque,
    create_id: unsafe extern "C" fn(*mut Opaque, *mut *mut Id, *mut c_void, c_uint) -> c_int,
    bind_addr: unsafe extern "C" fn(*mut Id, *const Address) -> c_int,
    listen: unsafe extern "C" fn(*mut Id, c_int) -> c_int,
    resolve_addr: unsafe extern "C" fn(*mut Id, *const Address, *const Address, c_int) -> c_int,
    resolve_route: unsafe extern "C" fn(*mut Id, c_int) -> c_int,
    get_cm_event: unsafe extern "C" fn(*mut Opaque, *mut *mut Event) -> c_int,
    ack_cm_event: unsafe extern "C" fn(*mut Event) -> c_int,
    create_qp: unsafe extern "C" fn(*mut Id, *mut Pd, *mut QpInitAttrEx) -> c_int,
    destroy_qp: unsafe extern "C" fn(*mut Id),
    connect: unsafe extern "C" fn(*mut Id, *const Param) -> c_int,
    accept: unsafe extern "C" fn(*mut Id, *const Param) -> c_int,
    disconnect: OnId,
    destroy_id: OnId,
    // Its functions are above.
    _library: Library,
}

impl Functions {
    fn load() -> Result<Functions, Failure> {
        // SAFETY: its constructors ask nothing of the program.
        let library = unsafe { Library::new(LIBRARY) }?;
        macro_rules! named {
            ($name:literal) => {
                // SAFETY: the type of each field is that of the header.
                unsafe { symbol(&library, $name) }?
            };
        }
        Ok(Functions {
            create_event_channel: named!("rdma_create_event_channel"),
            create_id: named!("rdma_create_id"),
            bind_addr: named!("rdma_bind_addr"),
            listen: named!("rdma_listen"),
            resolve_addr: named!("rdma_resolve_addr"),
            resolve_route: named!("rdma_resolve_route"),
            get_cm_event: named!("rdma_get_cm_event"),
            ack_cm_event: named!("rdma_ack_cm_event"),
            create_qp: named!("rdma_create_qp"),
            destroy_qp: named!("rdma_destroy_qp"),
            connect: named!("rdma_connect"),
            accept: named!("rdma_accept"),
            disconnect: named!("rdma_disconnect"),
            destroy_id: named!("rdma_destroy_id"),
            _library: library,
        })
    }
}

/// Calls a function of the library that answers 0 or -1.
macro_rules! call {
    ($self:expr, $function:ident, $($argument:expr),*) => {{
        let function = $self.functions.$function;
        // SAFETY: channels and ids were made by the library and not yet destroyed, structures are laid out
        // as its header says and outlive the call.
        match unsafe { function($($argument),*) } {
            0 => Ok(()),
            _ => Err(Failure::from(format!(
                concat!(stringify!($function), ": {}"),
                io::Error::last_os_error()
            ))),
        }
    }};
}

/// The objects that the queue pairs of one side share.
struct Shared {
    pd: Made<Pd>,
    cq: Made<Cq>,
}

/// The two sides, each with a channel of its own.
pub(crate) struct ByAddress {
    functions: Functions,
    verbs: Rc<Verbs>,
    channels: [Made<Opaque>; 2],
    active: Option<Shared>,
    passive: Option<Shared>,
}

impl ByAddress {
    pub(crate) fn open(verbs: Rc<Verbs>) -> Result<ByAddress, Failure> {
        let functions = Functions::load()?;
        let channel = || {
            // SAFETY: it takes nothing.
            let made = unsafe { (functions.create_event_channel)() };
            Made::check("create_event_channel", made)
        };
        let channels = [channel()?, channel()?];
        let ends = ByAddress { functions, verbs, channels, active: None, passive: None };
        let listener = ends.id(1)?;
        call!(ends, bind_addr, listener, &Address::parse(TO)?)?;
        call!(ends, listen, listener, 4)?;
        Ok(ends)
    }

    /// Connects for the first time, and leaves all as it is.
    pub(crate) fn first() -> Result<(), Failure> {
        let mut ends = ByAddress::open(Rc::new(Verbs::load()?))?;
        let connected = ends.connect()?;
        forget((connected, ends));
        Ok(())
    }

    fn id(&self, side: usize) -> Result<*mut Id, Failure> {
        let mut id = null_mut();
        let channel = self.channels[side].as_ptr();
        call!(self, create_id, channel, &mut id, null_mut(), PORT_SPACE_TCP)?;
        Ok(id)
    }

    /// Waits for this event of a side, and answers its id.
    fn wait(&self, side: usize, wanted: c_uint) -> Result<*mut Id, Failure> {
        let mut event = null_mut();
        call!(self, get_cm_event, self.channels[side].as_ptr(), &mut event)?;
        // SAFETY: an event is there until it is acknowledged.
        let Event { id, event: found, status, .. } = unsafe { event.read() };
        call!(self, ack_cm_event, event)?;
        match found == wanted {
            true => Ok(id),
            false => Err(format!("event {found} with status {status} in place of {wanted}").into()),
        }
    }

    /// Makes the queue pair of an id.
    fn create_qp(&mut self, side: usize, id: *mut Id) -> Result<(), Failure> {
        let known = [&mut self.active, &mut self.passive].into_iter().nth(side);
        let known = known.ok_or("no such side")?;
        if known.is_none() {
            // SAFETY: the id is on a device, so that the library has opened it.
            let context = Made::check("create_qp", unsafe { (*id).verbs })?;
            let (pd, cq) = (self.verbs.alloc_pd(&context)?, self.verbs.create_cq(&context, 16)?);
            *known = Some(Shared { pd, cq });
        }
        let Some(Shared { pd, cq }) = known else { return Err("no domain".into()) };
        let (pd, mut attr) = (pd.as_ptr(), endpoint::attr([cq.as_ptr(); 2], &endpoint::small(16)));
        call!(self, create_qp, id, pd, &mut attr)
    }

    pub(crate) fn connect(&mut self) -> Result<[*mut Id; 2], Failure> {
        let param = Param {
            private_data: null(),
            private_data_len: 0,
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        };
        let active = self.id(0)?;
        let (from, to) = (Address::parse(FROM)?, Address::parse(TO)?);
        call!(self, resolve_addr, active, &from, &to, LIMIT_MS)?;
        self.wait(0, event::ADDR_RESOLVED)?;
        call!(self, resolve_route, active, LIMIT_MS)?;
        self.wait(0, event::ROUTE_RESOLVED)?;
        self.create_qp(0, active)?;
        call!(self, connect, active, &param)?;
        let passive = self.wait(1, event::CONNECT_REQUEST)?;
        self.create_qp(1, passive)?;
        call!(self, accept, passive, &param)?;
        self.wait(0, event::ESTABLISHED)?;
        self.wait(1, event::ESTABLISHED)?;
        Ok([active, passive])
    }

    /// Each side disconnects and hears that the other did.
    pub(crate) fn close(&self, [active, passive]: [*mut Id; 2]) -> Result<(), Failure> {
        call!(self, disconnect, active)?;
        self.wait(1, event::DISCONNECTED)?;
        call!(self, disconnect, passive)?;
        self.wait(0, event::DISCONNECTED)?;
        for id in [active, passive] {
            // SAFETY: the id has a queue pair.
            unsafe { (self.functions.destroy_qp)(id) };
            call!(self, destroy_id, id)?;
        }
        Ok(())
    }
}
