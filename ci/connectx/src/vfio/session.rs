//! Serves one client of one PCI function.
//!
//! Pairs with [`super::connection`] and [`uverbs_connectx::function::Function`]. A request that is unknown or
//! malformed gets an errno and changes nothing. The stream stays in step, because a message is read
//! as a whole before it is parsed.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;

use super::connection::{Connection, StreamError, VfioRequest, command};
use uverbs_connectx::function::{Function, Region};
use uverbs_connectx::interrupt::{Notify, VECTORS};
use uverbs_connectx::pci::CONFIG_SIZE;
use uverbs_connectx::{bar_memory, bar0};

const EINVAL: u32 = 22;
const EOPNOTSUPP: u32 = 95;

const REGIONS: u32 = 9;
const IRQS: u32 = 5;
const MSIX_IRQ: u32 = 2;
const BAR0_REGION: u32 = 0;
const CONFIG_REGION: u32 = 7;

/// Flags of `struct vfio_device_info`: resettable, PCI.
const DEVICE_FLAGS: u32 = 1 | 2;
const REGION_READ_WRITE: u32 = 1 | 2;
const REGION_MMAP: u32 = 4;
const REGION_CAPS: u32 = 8;
/// Identifier and version of the capability that lists the mappable areas.
const SPARSE_MMAP: u32 = 1 | 1 << 16;
const IRQ_EVENTFD: u32 = 1;
const IRQ_NORESIZE: u32 = 8;

const SET_DATA_NONE: u32 = 1;
const SET_DATA_BOOL: u32 = 2;
const SET_DATA_EVENTFD: u32 = 4;
const SET_MASK: u32 = 8;
const SET_UNMASK: u32 = 16;
const SET_TRIGGER: u32 = 32;

/// A connected client.
pub struct Session {
    connection: Connection,
    served: Served,
}

/// The PCI function of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// The function with the registers.
    Adapter,
    /// Its data-direct function: configuration space alone. The guest gives both functions the same memory, so that the
    /// mappings of the adapter serve both.
    DataDirect,
}

/// Body of a reply, or an errno.
type ReplyBody = Result<Vec<u8>, u32>;

impl Session {
    /// Serves the client behind `stream`.
    pub fn new(stream: UnixStream, served: Served) -> Self {
        Self { connection: Connection::new(stream), served }
    }

    /// The socket, to wait on.
    pub fn stream(&self) -> &UnixStream {
        self.connection.stream()
    }

    /// Answers the requests that have arrived; returns false if there were none.
    ///
    /// # Errors
    /// [`StreamError`] if the connection is over.
    pub fn serve(&mut self, function: &mut Function) -> Result<bool, StreamError> {
        if !self.connection.receive()? {
            return Ok(false);
        }
        while let Some(mut request) = self.connection.request()? {
            let answer = answer(&mut request, function, self.served);
            if let Err(errno) = answer {
                log::warn!("vfio-user command {} refused, errno {errno}", request.command);
            }
            if request.wants_reply {
                // The reply about BAR0 carries the file to map.
                let bar0 = self.served == Served::Adapter
                    && request.command == command::DEVICE_GET_REGION_INFO
                    && request.u32(8) == Some(BAR0_REGION);
                let file = function.bar_file().filter(|_| bar0 && answer.is_ok());
                let answer = answer.as_ref().map(Vec::as_slice).map_err(|errno| *errno);
                self.connection.reply(&request, answer, file).map_err(StreamError::Io)?;
            }
        }
        Ok(true)
    }
}

fn answer(request: &mut VfioRequest, function: &mut Function, served: Served) -> ReplyBody {
    match (request.command, served) {
        (command::VERSION, _) => version(request),
        (command::DMA_MAP, Served::Adapter) => dma_map(request, function).map(|()| vec![]),
        (command::DMA_MAP, Served::DataDirect) => Ok(vec![]),
        (command::DMA_UNMAP, _) => dma_unmap(request, function, served),
        (command::DEVICE_GET_INFO, _) => Ok(words(&[16, DEVICE_FLAGS, REGIONS, IRQS])),
        (command::DEVICE_GET_REGION_INFO, _) => region_info(request, function, served),
        (command::DEVICE_GET_IRQ_INFO, _) => irq_info(request, served),
        (command::DEVICE_SET_IRQS, _) => set_irqs(request, function, served).map(|()| vec![]),
        (command::REGION_READ, _) => region_read(request, function, served),
        (command::REGION_WRITE, _) => region_write(request, function, served),
        (command::REGION_WRITE_MULTI, _) => region_write_multi(request, function, served),
        (command::DEVICE_RESET, _) => {
            match served {
                Served::Adapter => function.reset(),
                Served::DataDirect => function.restart_data_direct(),
            }
            Ok(vec![])
        }
        _ => Err(EOPNOTSUPP),
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn version(request: &VfioRequest) -> ReplyBody {
    let major =
        u16::from_ne_bytes(request.body.get(..2).and_then(|b| b.try_into().ok()).ok_or(EINVAL)?);
    if major != 0 {
        return Err(EOPNOTSUPP);
    }
    let mut body = words(&[0]);
    body.extend(
        b"{\"capabilities\":{\"max_msg_fds\":1,\"max_data_xfer_size\":1048576,\
          \"write_multiple\":true}}\0",
    );
    Ok(body)
}

fn dma_map(request: &mut VfioRequest, function: &mut Function) -> Result<(), u32> {
    let flags = request.u32(4).ok_or(EINVAL)?;
    let offset = request.u64(8).ok_or(EINVAL)?;
    let address = request.u64(16).ok_or(EINVAL)?;
    let size = request.u64(24).ok_or(EINVAL)?;
    let file = match request.files.as_slice() {
        [] => None,
        [file] => Some((file, offset)),
        _ => return Err(EINVAL),
    };
    let (readable, writable) = (flags & 1 != 0, flags & 2 != 0);
    // Memory that the device may write but not read gets no mapping: the device would read it all the same.
    let file = file.filter(|_| readable);
    log::debug!("map {address:#x}+{size:#x} file {} writable {writable}", file.is_some());
    function.memory_mut().map(address, size, file, writable).map_err(|error| {
        log::warn!("DMA_MAP {address:#x}+{size:#x}: {error}");
        EINVAL
    })
}

fn dma_unmap(request: &VfioRequest, function: &mut Function, served: Served) -> ReplyBody {
    const ALL: u32 = 2;
    let flags = request.u32(4).ok_or(EINVAL)?;
    let address = request.u64(8).ok_or(EINVAL)?;
    let size = request.u64(16).ok_or(EINVAL)?;
    log::debug!("unmap {address:#x}+{size:#x}");
    match flags {
        0 | ALL if served == Served::DataDirect => {}
        0 => function.memory_mut().unmap(address, size).map_err(|_| EINVAL)?,
        ALL => function.memory_mut().clear(),
        _ => return Err(EOPNOTSUPP),
    }
    Ok(request.body.get(..24).unwrap_or_default().to_vec())
}

fn region(index: u32, served: Served) -> Option<(Region, u64)> {
    match (index, served) {
        (BAR0_REGION, Served::Adapter) => Some((Region::Bar0, bar0::SIZE)),
        (CONFIG_REGION, Served::Adapter) => Some((Region::Config, CONFIG_SIZE as u64)),
        (CONFIG_REGION, Served::DataDirect) => Some((Region::DataDirect, CONFIG_SIZE as u64)),
        _ => None,
    }
}

fn region_info(request: &VfioRequest, function: &Function, served: Served) -> ReplyBody {
    const PLAIN: u32 = 32;
    let room = request.u32(0).ok_or(EINVAL)?;
    let index = request.u32(8).ok_or(EINVAL)?;
    if index >= REGIONS || room < PLAIN {
        return Err(EINVAL);
    }
    let (mut flags, size) =
        region(index, served).map_or((0, 0), |(_, size)| (REGION_READ_WRITE, size));
    let mut areas = vec![];
    if size > 0 && index == BAR0_REGION && function.bar_file().is_some() {
        // If a client may map anything, it must wait for a reply to each write: otherwise its
        // accesses to mapped memory could overtake a write.
        flags |= REGION_MMAP | REGION_CAPS;
        areas.extend(words(&[SPARSE_MMAP, 0, bar_memory::MAPPABLE.len() as u32, 0]));
        areas.extend(
            bar_memory::MAPPABLE
                .iter()
                .flat_map(|(at, len)| [at.to_ne_bytes(), len.to_ne_bytes()])
                .flatten(),
        );
    }
    let capabilities = if areas.is_empty() { 0 } else { PLAIN };
    let mut body = words(&[PLAIN + areas.len() as u32, flags, index, capabilities]);
    body.extend(size.to_ne_bytes());
    // Offset of the region in the file.
    body.extend(0u64.to_ne_bytes());
    // A client with less room asks again.
    if room as usize >= body.len() + areas.len() {
        body.extend(areas);
    }
    Ok(body)
}

fn irq_info(request: &VfioRequest, served: Served) -> ReplyBody {
    let index = request.u32(8).ok_or(EINVAL)?;
    if index >= IRQS {
        return Err(EINVAL);
    }
    let (flags, count) = match served {
        Served::Adapter if index == MSIX_IRQ => (IRQ_EVENTFD | IRQ_NORESIZE, VECTORS as u32),
        _ => (0, 0),
    };
    Ok(words(&[16, flags, index, count]))
}

/// Signals an eventfd for each interrupt.
fn signal(mut event: File) -> Notify {
    Box::new(move || {
        if let Err(error) = event.write_all(&1u64.to_ne_bytes()) {
            log::warn!("eventfd: {error}");
        }
    })
}

fn set_irqs(request: &mut VfioRequest, function: &mut Function, served: Served) -> Result<(), u32> {
    let flags = request.u32(4).ok_or(EINVAL)?;
    let index = request.u32(8).ok_or(EINVAL)?;
    let start = request.u32(12).ok_or(EINVAL)? as usize;
    let count = request.u32(16).ok_or(EINVAL)? as usize;
    if index != MSIX_IRQ || served == Served::DataDirect {
        // Clients disable interrupt types that the function does not have.
        return if count == 0 { Ok(()) } else { Err(EINVAL) };
    }
    let end = start.checked_add(count).filter(|end| *end <= VECTORS).ok_or(EINVAL)?;
    let vectors = function.interrupts_mut();
    match (flags & 0x38, flags & 0x7) {
        (SET_TRIGGER, SET_DATA_NONE) if count == 0 => vectors.disconnect_all(),
        (SET_TRIGGER, SET_DATA_NONE) => (start..end).for_each(|vector| vectors.raise(vector)),
        (SET_TRIGGER, SET_DATA_BOOL) => {
            let wanted = request.body.get(20..20 + count).ok_or(EINVAL)?;
            for (vector, _) in (start..end).zip(wanted).filter(|(_, on)| **on != 0) {
                vectors.raise(vector);
            }
        }
        (SET_TRIGGER, SET_DATA_EVENTFD) => {
            if request.files.is_empty() {
                (start..end).for_each(|vector| vectors.connect(vector, None));
            } else if request.files.len() == count {
                for (vector, file) in (start..end).zip(request.files.drain(..)) {
                    vectors.connect(vector, Some(signal(file)));
                }
            } else {
                return Err(EINVAL);
            }
        }
        // QEMU keeps the MSI-X table and applies the masks itself.
        (SET_MASK | SET_UNMASK, SET_DATA_NONE) => {}
        _ => return Err(EINVAL),
    }
    Ok(())
}

fn region_read(request: &VfioRequest, function: &mut Function, served: Served) -> ReplyBody {
    let offset = request.u64(0).ok_or(EINVAL)?;
    let index = request.u32(8).ok_or(EINVAL)?;
    let count = request.u32(12).ok_or(EINVAL)?;
    let (region, size) = region(index, served).ok_or(EINVAL)?;
    if count > 1 << 20 || offset.checked_add(u64::from(count)).is_none_or(|end| end > size) {
        return Err(EINVAL);
    }
    let mut body = request.body[..16].to_vec();
    body.resize(16 + count as usize, 0);
    function.read(region, offset, &mut body[16..]);
    Ok(body)
}

fn write(
    function: &mut Function,
    served: Served,
    offset: u64,
    index: u32,
    data: &[u8],
) -> Result<(), u32> {
    let (region, size) = region(index, served).ok_or(EINVAL)?;
    if offset.checked_add(data.len() as u64).is_none_or(|end| end > size) {
        return Err(EINVAL);
    }
    function.write(region, offset, data);
    Ok(())
}

fn region_write(request: &VfioRequest, function: &mut Function, served: Served) -> ReplyBody {
    let offset = request.u64(0).ok_or(EINVAL)?;
    let index = request.u32(8).ok_or(EINVAL)?;
    let count = request.u32(12).ok_or(EINVAL)? as usize;
    let data = &request.body[16..];
    if data.len() != count {
        return Err(EINVAL);
    }
    write(function, served, offset, index, data)?;
    Ok(request.body[..16].to_vec())
}

/// Handles several posted writes in one message, each of at most eight bytes.
fn region_write_multi(request: &VfioRequest, function: &mut Function, served: Served) -> ReplyBody {
    const ENTRY: usize = 24;
    let count = request.u64(0).ok_or(EINVAL)?;
    let entries = &request.body[8..];
    if count > (entries.len() / ENTRY) as u64 {
        return Err(EINVAL);
    }
    for entry in 0..count as usize {
        let at = 8 + entry * ENTRY;
        let offset = request.u64(at).ok_or(EINVAL)?;
        let index = request.u32(at + 8).ok_or(EINVAL)?;
        let len = request.u32(at + 12).ok_or(EINVAL)? as usize;
        let data = request.body[at + 16..at + ENTRY].get(..len).ok_or(EINVAL)?;
        write(function, served, offset, index, data)?;
    }
    Ok(count.to_ne_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use uverbs_connectx::options::Options;

    fn ask(mapped: bool, index: u32, room: u32) -> ReplyBody {
        ask_of(Served::Adapter, mapped, index, room)
    }

    fn ask_of(served: Served, mapped: bool, index: u32, room: u32) -> ReplyBody {
        let request = VfioRequest {
            id: 1,
            command: command::DEVICE_GET_REGION_INFO,
            wants_reply: true,
            body: words(&[room, 0, index, 0, 0, 0, 0, 0]),
            files: vec![],
        };
        region_info(&request, &Function::new(Options { mapped, ..Options::default() }), served)
    }

    fn word(body: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(body[at..at + 4].try_into().unwrap())
    }

    fn long(body: &[u8], at: usize) -> u64 {
        u64::from_ne_bytes(body[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn region_info_lists_the_mappable_areas_of_bar0() {
        let short = ask(true, BAR0_REGION, 32).unwrap();
        assert_eq!((short.len(), word(&short, 0)), (32, 80), "it has to ask with more room");
        let body = ask(true, BAR0_REGION, 80).unwrap();
        assert_eq!(
            (body.len(), word(&body, 4)),
            (80, REGION_READ_WRITE | REGION_MMAP | REGION_CAPS)
        );
        assert_eq!((word(&body, 12), long(&body, 16)), (32, bar0::SIZE));
        assert_eq!((word(&body, 32), word(&body, 36), word(&body, 40)), (SPARSE_MMAP, 0, 2));
        for (at, (offset, len)) in [48, 64].into_iter().zip(bar_memory::MAPPABLE) {
            assert_eq!((long(&body, at), long(&body, at + 8)), (offset, len));
        }
    }

    #[test]
    fn only_bar0_can_be_mapped_and_only_with_map() {
        let body = ask(true, CONFIG_REGION, 80).unwrap();
        assert_eq!((body.len(), word(&body, 4)), (32, REGION_READ_WRITE));
        let body = ask(false, BAR0_REGION, 80).unwrap();
        assert_eq!((body.len(), word(&body, 4)), (32, REGION_READ_WRITE), "unless it was wanted");
        assert_eq!(ask(true, BAR0_REGION, 31), Err(EINVAL));
        assert_eq!(ask(true, REGIONS, 80), Err(EINVAL));
    }

    #[test]
    fn data_direct_function_has_configuration_space_alone() {
        let of = |index| ask_of(Served::DataDirect, true, index, 80).unwrap();
        assert_eq!(
            (word(&of(CONFIG_REGION), 4), long(&of(CONFIG_REGION), 16)),
            (REGION_READ_WRITE, 4096)
        );
        assert_eq!((word(&of(BAR0_REGION), 4), long(&of(BAR0_REGION), 16)), (0, 0));
        let mut function = Function::new(Options { data_direct: true, ..Options::default() });
        let mut ids = |served| {
            let mut body = 0u64.to_ne_bytes().to_vec();
            body.extend(words(&[CONFIG_REGION, 4]));
            let command = command::REGION_READ;
            let mut request =
                VfioRequest { id: 1, command, wants_reply: true, body, files: vec![] };
            word(&answer(&mut request, &mut function, served).unwrap(), 16)
        };
        assert_eq!((ids(Served::Adapter), ids(Served::DataDirect)), (0x1017_15b3, 0x2100_15b3));
    }
}
