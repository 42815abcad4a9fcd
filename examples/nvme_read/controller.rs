//! A controller: its admin queue, its identity and namespaces, and its I/O queue.

use crate::Result;
use crate::capsule::{Command, Identify, Property, Response};
use crate::transport::{Queue, QueueAttr, Slot};
use std::thread::sleep;
use std::time::{Duration, Instant};
use uverbs::cm::EventChannel;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Entries of the admin queue: as many as Linux targets have.
const ADMIN_ENTRIES: u16 = 32;
/// Bytes of the data of Identify.
const IDENTIFY: usize = 4096;
/// The number that lets the target choose a controller.
const ANY_CONTROLLER: u16 = 0xffff;

/// The target and the names that both sides have.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Host name or address, and port.
    pub(crate) address: String,
    /// The subsystem's NQN.
    pub(crate) subsystem: String,
    /// The host's NQN.
    pub(crate) host: String,
    /// The host's identifier.
    pub(crate) host_id: [u8; 16],
}

/// The data of a Connect command.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct ConnectData {
    host_id: [u8; 16],
    controller: U16,
    reserved: [u8; 238],
    subsystem: [u8; 256],
    host: [u8; 256],
    reserved_768: [u8; 256],
}

/// The Identify Controller data structure.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct IdentifyController {
    vendor: U16,
    subsystem_vendor: U16,
    serial: [u8; 20],
    model: [u8; 40],
    firmware: [u8; 8],
    reserved_72: [u8; 5],
    /// Maximum data transfer size: a power of two, in units of the smallest page; 0 for no limit.
    mdts: u8,
    reserved_78: [u8; 458],
    sgl_support: U32,
    reserved_540: [u8; 3556],
}

/// The Identify Namespace data structure.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct IdentifyNamespace {
    /// Size in blocks; 0 for an inactive namespace.
    size: U64,
    reserved_8: [u8; 18],
    /// The index of the format in use: bits 0 to 3 and 5 to 6.
    format: u8,
    reserved_27: [u8; 101],
    formats: [Format; 64],
    reserved_384: [u8; 3712],
}

/// A format of blocks.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Format {
    metadata: U16,
    /// The size of a block, as a power of two.
    shift: u8,
    performance: u8,
}

const _: () = assert!(size_of::<ConnectData>() == 1024);
const _: () = assert!(size_of::<IdentifyController>() == IDENTIFY);
const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY);

impl ConnectData {
    fn new(target: &Target, controller: u16) -> Result<ConnectData> {
        let mut data = ConnectData::new_zeroed();
        data.host_id = target.host_id;
        data.controller = controller.into();
        put_name(&mut data.subsystem, &target.subsystem)?;
        put_name(&mut data.host, &target.host)?;
        Ok(data)
    }
}

/// Writes an NQN, of up to 223 bytes, padded with zeros.
fn put_name(field: &mut [u8; 256], name: &str) -> Result<()> {
    const MAX: usize = 223;
    let length = name.len();
    let place = field.get_mut(..length).filter(|_| (1..=MAX).contains(&length));
    let place =
        place.ok_or_else(|| format!("{name:?}: an NQN has 1 to {MAX} bytes, not {length}"))?;
    place.copy_from_slice(name.as_bytes());
    Ok(())
}

/// Controller Capabilities.
#[derive(Clone, Copy, Debug)]
struct Capabilities(u64);

impl Capabilities {
    fn max_entries(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// The longest time until the controller is ready.
    fn timeout(self) -> Duration {
        Duration::from_millis(500 * (self.0 >> 24 & 0xff).max(1))
    }

    /// The smallest page, as a power of two in units of 4096 bytes.
    fn min_page(self) -> u32 {
        (self.0 >> 48 & 0xf) as u32
    }
}

/// Bits of Controller Configuration and Controller Status.
mod bits {
    pub(super) const CC_ENABLE: u32 = 1;
    pub(super) const CC_PAGE_SHIFT: u32 = 7;
    pub(super) const CC_SHUTDOWN: u32 = 1 << 14;
    /// Entries of 64 bytes in submission queues and of 16 in completion queues.
    pub(super) const CC_ENTRY_SIZES: u32 = 6 << 16 | 4 << 20;
    pub(super) const CSTS_READY: u32 = 1;
    pub(super) const CSTS_FATAL: u32 = 1 << 1;
    pub(super) const CSTS_SHUTDOWN: u32 = 3 << 2;
    pub(super) const CSTS_SHUTDOWN_COMPLETE: u32 = 2 << 2;
    /// In the controller's SGL support: keyed data blocks.
    pub(super) const SGL_KEYED: u32 = 1 << 2;
}

/// A connected and enabled controller.
pub(crate) struct Controller {
    target: Target,
    events: EventChannel,
    admin: Queue,
    id: u16,
    capabilities: Capabilities,
    configuration: u32,
}

/// The identity of a controller.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) model: String,
    pub(crate) serial: String,
    pub(crate) firmware: String,
    /// Bytes that a command may transfer; `None` without a limit.
    pub(crate) max_transfer: Option<usize>,
}

/// A namespace's geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) number: u32,
    pub(crate) blocks: u64,
    pub(crate) block_size: usize,
}

impl Controller {
    /// Connects the admin queue and enables the controller.
    pub(crate) fn connect(target: &Target) -> Result<Controller> {
        let events = EventChannel::open()?;
        let attr = QueueAttr {
            qid: 0,
            controller: ANY_CONTROLLER,
            depth: 1,
            entries: ADMIN_ENTRIES,
            bytes: IDENTIFY,
        };
        // In the private data 0 stands for the admin queue; the Connect command lets the target choose.
        let mut admin =
            Queue::connect(&events, &target.address, QueueAttr { controller: 0, ..attr })?;
        let id = join(&mut admin, target, attr)?;
        let mut controller = Controller {
            target: target.clone(),
            events,
            admin,
            id,
            capabilities: Capabilities(0),
            configuration: 0,
        };
        controller.capabilities = Capabilities(controller.get(Property::CAP)?);
        controller.enable()?;
        controller.execute("Set Features", |_, _| Ok(Command::one_io_queue()))?;
        Ok(controller)
    }

    fn enable(&mut self) -> Result<()> {
        let page = self.capabilities.min_page() << bits::CC_PAGE_SHIFT;
        self.configuration = bits::CC_ENTRY_SIZES | page | bits::CC_ENABLE;
        self.set(Property::CC, self.configuration)?;
        self.until("become ready", |status| status & bits::CSTS_READY != 0)
    }

    /// Shuts the controller down, and closes the connection.
    pub(crate) fn shut_down(mut self) -> Result<()> {
        self.set(Property::CC, self.configuration | bits::CC_SHUTDOWN)?;
        self.until("shut down", |status| {
            status & bits::CSTS_SHUTDOWN == bits::CSTS_SHUTDOWN_COMPLETE
        })?;
        self.admin.disconnect()
    }

    /// Reads the status until `reached` is true of it.
    fn until(&mut self, what: &str, reached: impl Fn(u32) -> bool) -> Result<()> {
        let patience = self.capabilities.timeout();
        let deadline = Instant::now() + patience;
        loop {
            let status = self.get(Property::CSTS)? as u32;
            if reached(status) {
                return Ok(());
            }
            if status & bits::CSTS_FATAL != 0 {
                return Err(format!("the controller failed: status {status:#x}").into());
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "the controller did not {what} within {patience:?}: status {status:#x}"
                )
                .into());
            }
            sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn id(&self) -> u16 {
        self.id
    }

    /// The address of the controller.
    pub(crate) fn describe(&self) -> Result<String> {
        self.admin.describe()
    }

    pub(crate) fn identify(&mut self) -> Result<Identity> {
        let data: IdentifyController = self.ask(Identify::Controller)?;
        if data.sgl_support.get() & bits::SGL_KEYED == 0 {
            return Err("the controller takes no keyed SGLs, which RDMA needs".into());
        }
        Ok(Identity {
            model: text(&data.model),
            serial: text(&data.serial),
            firmware: text(&data.firmware),
            max_transfer: max_transfer(data.mdts, self.capabilities.min_page()),
        })
    }

    pub(crate) fn namespace(&mut self, number: u32) -> Result<Namespace> {
        let data: IdentifyNamespace = self.ask(Identify::Namespace(number))?;
        geometry(number, &data)
    }

    fn ask<T: FromBytes + IntoBytes>(&mut self, what: Identify) -> Result<T> {
        let name = match what {
            Identify::Controller => "Identify controller".to_owned(),
            Identify::Namespace(number) => format!("Identify namespace {number}"),
        };
        let (slot, _) = self.execute(&name, |queue, slot| {
            Ok(Command::identify(what, queue.sgl(slot, IDENTIFY)?))
        })?;
        let mut data = T::new_zeroed();
        self.admin.read_data(slot, data.as_mut_bytes())?;
        Ok(data)
    }

    /// Connects an I/O queue for `depth` commands at once, of at most `bytes` bytes each.
    pub(crate) fn io_queue(&self, depth: u16, bytes: usize) -> Result<Queue> {
        // One entry stays free, and a queue has at most 65535.
        let most = self.capabilities.max_entries().min(u16::MAX.into()).saturating_sub(1);
        if u32::from(depth) > most {
            return Err(format!("--depth {depth}: the controller takes at most {most}").into());
        }
        let entries = depth + 1;
        let bytes = bytes.max(size_of::<ConnectData>());
        let attr = QueueAttr { qid: 1, controller: self.id, depth, entries, bytes };
        let mut queue = Queue::connect(&self.events, &self.target.address, attr)?;
        join(&mut queue, &self.target, attr)?;
        Ok(queue)
    }

    fn get(&mut self, property: Property) -> Result<u64> {
        let what = format!("Property Get {}", property.name);
        let (_, response) = self.execute(&what, |_, _| Ok(Command::property_get(property)))?;
        Ok(response.result.get())
    }

    fn set(&mut self, property: Property, value: u32) -> Result<()> {
        let what = format!("Property Set {}", property.name);
        self.execute(&what, |_, _| Ok(Command::property_set(property, value))).map(drop)
    }

    /// Executes an admin command, which must succeed.
    fn execute(
        &mut self,
        what: &str,
        command: impl FnOnce(&mut Queue, Slot) -> Result<Command>,
    ) -> Result<(Slot, Response)> {
        let (slot, response) = self.admin.execute(what, command)?;
        match response.status() {
            status if status.is_success() => Ok((slot, response)),
            status => Err(format!("{what}: {status}").into()),
        }
    }
}

/// Makes a connection a queue of a controller, and returns the controller's number.
fn join(queue: &mut Queue, target: &Target, attr: QueueAttr) -> Result<u16> {
    let data = ConnectData::new(target, attr.controller)?;
    let (_, response) = queue.execute("Connect", |queue, slot| {
        let bytes = data.as_bytes();
        queue.write_data(slot, bytes)?;
        Ok(Command::connect(attr.qid, attr.entries, queue.sgl(slot, bytes.len())?))
    })?;
    let result = response.result.get() as u32;
    if !response.status().is_success() {
        return Err(refused(&response, result, target).into());
    }
    if result >> 16 & 0b11 != 0 {
        return Err("the target wants the host to authenticate, which this program cannot".into());
    }
    Ok(result as u16)
}

/// The reason that a Connect command failed. For a wrong parameter the result has its place.
fn refused(response: &Response, result: u32, target: &Target) -> String {
    const IN_DATA: u32 = 1 << 16;
    const INVALID_PARAMETERS: u16 = 0x182;
    const INVALID_HOST: u16 = 0x184;
    let status = response.status();
    let Target { subsystem, host, .. } = target;
    match (status.code(), result) {
        (INVALID_PARAMETERS, place) if place == IN_DATA | 256 => {
            format!("the target has no subsystem {subsystem:?} on this port: {status}")
        }
        (INVALID_HOST, _) => format!("the subsystem does not admit the host {host:?}: {status}"),
        (INVALID_PARAMETERS, place) => {
            let part = if place & IN_DATA != 0 { "data" } else { "command" };
            format!("{status}, byte {} of its {part}", place & 0xffff)
        }
        _ => status.to_string(),
    }
}

/// Text of a fixed length, without trailing blanks.
fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).trim_matches([' ', '\0']).to_owned()
}

fn max_transfer(mdts: u8, min_page: u32) -> Option<usize> {
    let shift = u32::from(mdts) + 12 + min_page;
    if mdts == 0 { None } else { 1_usize.checked_shl(shift) }
}

fn geometry(number: u32, data: &IdentifyNamespace) -> Result<Namespace> {
    let blocks = data.size.get();
    if blocks == 0 {
        return Err(format!("the controller has no namespace {number}").into());
    }
    let format = usize::from(data.format & 0xf | (data.format >> 1 & 0x30));
    let Some(format) = data.formats.get(format) else {
        return Err(format!("namespace {number} has no format {format}").into());
    };
    if format.metadata.get() != 0 {
        return Err(format!(
            "namespace {number} has {} bytes of metadata a block, which this program cannot transfer",
            format.metadata
        )
        .into());
    }
    if !(9..=16).contains(&format.shift) {
        return Err(format!("namespace {number} has blocks of 2^{} bytes", format.shift).into());
    }
    let block_size = 1 << format.shift;
    if blocks.checked_mul(block_size as u64).is_none() {
        let text = format!(
            "namespace {number} has {blocks} blocks of {block_size} bytes: more than 2^64 bytes"
        );
        return Err(text.into());
    }
    Ok(Namespace { number, blocks, block_size })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target {
            address: "10.0.0.2:4420".into(),
            subsystem: "nqn.2016-06.io.spdk:disk".into(),
            host: "nqn.2014-08.org.nvmexpress:uuid:0".into(),
            host_id: [7; 16],
        }
    }

    #[test]
    fn connect_names_both_sides() {
        let data = ConnectData::new(&target(), 0xffff).unwrap();
        let bytes = data.as_bytes();
        assert_eq!((&bytes[..16], &bytes[16..18]), (&[7; 16][..], &[0xff; 2][..]));
        assert!(bytes[256..].starts_with(b"nqn.2016-06.io.spdk:disk\0"));
        assert!(bytes[512..].starts_with(b"nqn.2014-08.org.nvmexpress:uuid:0\0"));
        for name in [String::new(), "n".repeat(224)] {
            let error = ConnectData::new(&Target { subsystem: name, ..target() }, 1).unwrap_err();
            assert!(error.to_string().contains("1 to 223 bytes"), "{error}");
        }
    }

    #[test]
    fn refusals_name_the_fault() {
        let refusal = |code: u16, result: u32| {
            let mut bytes = [0; 16];
            bytes[14..].copy_from_slice(&(code << 1).to_le_bytes());
            refused(&Response::parse(&bytes).unwrap(), result, &target())
        };
        assert!(refusal(0x182, 0x1_0100).starts_with("the target has no subsystem \"nqn.2016"));
        assert!(refusal(0x184, 0x1_0200).contains("not admit the host \"nqn.2014"));
        assert!(refusal(0x182, 0x1_0010).ends_with("byte 16 of its data"));
        assert!(refusal(0x182, 0x2a).ends_with("byte 42 of its command"));
        assert!(refusal(0x181, 0).starts_with("connect: controller busy"));
    }

    #[test]
    fn capabilities_are_taken_apart() {
        // Linux: 1024 entries, 7.5 seconds, pages of 4096 bytes.
        let linux = Capabilities(15 << 24 | 1 << 37 | 1023);
        assert_eq!((linux.max_entries(), linux.min_page()), (1024, 0));
        assert_eq!(linux.timeout(), Duration::from_millis(7500));
        assert_eq!((max_transfer(0, 0), max_transfer(8, 0)), (None, Some(1 << 20)));
        assert_eq!((max_transfer(1, 4), max_transfer(255, 0)), (Some(1 << 17), None));
    }

    #[test]
    fn namespaces_have_a_geometry() {
        let mut data = IdentifyNamespace::new_zeroed();
        let error = geometry(3, &data).unwrap_err().to_string();
        assert_eq!(error, "the controller has no namespace 3");
        data.size = 2048.into();
        data.format = 0x21;
        data.formats[17].shift = 12;
        let expected = Namespace { number: 3, blocks: 2048, block_size: 4096 };
        assert_eq!(geometry(3, &data).unwrap(), expected);
        data.formats[17].metadata = 8.into();
        assert!(geometry(3, &data).unwrap_err().to_string().contains("8 bytes of metadata"));
        data.formats[17] = Format { metadata: 0.into(), shift: 40, performance: 0 };
        assert!(geometry(3, &data).unwrap_err().to_string().contains("blocks of 2^40 bytes"));
    }

    #[test]
    fn fields_lie_where_the_specification_puts_them() {
        use std::mem::offset_of;
        assert_eq!(offset_of!(IdentifyController, model), 24);
        assert_eq!(offset_of!(IdentifyController, mdts), 77);
        assert_eq!(offset_of!(IdentifyController, sgl_support), 536);
        assert_eq!(offset_of!(IdentifyNamespace, format), 26);
        assert_eq!(offset_of!(IdentifyNamespace, formats), 128);
        assert_eq!(text(b"Linux\0  "), "Linux");
    }
}
