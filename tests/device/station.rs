//! A raw packet queue pair with memory, on a port whose hardware address is known. Flow rules
//! choose its packets.

use crate::capability::Capability;
use crate::env;
use crate::frame::Mac;
use crate::pair::{PATIENCE, SILENCE};
use crate::pattern;
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, supported};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::fs;
use std::ops::Range;
use std::time::Instant;
use uverbs::{
    Access, CompletionQueue, Context, Device, FlowAttr, MemoryRegion, PostError, ProtectionDomain,
    QpAttr, QpBuilder, QpState, QpType, QueuePair, RecvWr, SendWr, Sge, WcOpcode, WcStatus,
};

/// Room for one frame.
pub(crate) const ROOM: usize = 2048;
/// Frames that fit into the memory: the first place is for sends.
pub(crate) const PLACES: usize = 8;
/// Requests of each queue.
pub(crate) const DEPTH: u32 = 16;

/// A received frame, and its completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) bytes: Vec<u8>,
    pub(crate) tag: u32,
    pub(crate) checked: bool,
    pub(crate) vlan: Option<u16>,
}

#[derive(Debug)]
pub(crate) struct Station {
    // The queue pair goes first: memory stays until the device is done with it.
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) memory: MemoryRegion<u8>,
    pub(crate) pd: ProtectionDomain,
    pub(crate) context: Context,
    pub(crate) mac: Mac,
    port: u32,
    /// The place of the next receive.
    next: usize,
}

impl Station {
    /// The device under test and the one at the other end of its cable.
    pub(crate) fn both() -> Verdict<(Station, Station)> {
        env::packets()?;
        let a = Station::on(&env::device())?;
        Ok((a, Station::on(&env::second()?)?))
    }

    pub(crate) fn on(device: &Device) -> Verdict<Station> {
        Station::made(device, |builder| builder)
    }

    /// Ready to send and to receive.
    pub(crate) fn made(
        device: &Device,
        refine: impl FnOnce(QpBuilder) -> QpBuilder,
    ) -> Verdict<Station> {
        let station = Station::raw(device, refine)?;
        station.start()?;
        Ok(station)
    }

    /// In state RESET.
    pub(crate) fn raw(
        device: &Device,
        refine: impl FnOnce(QpBuilder) -> QpBuilder,
    ) -> Verdict<Station> {
        let context = Context::open(device)?;
        let pd = context.alloc_pd()?;
        let memory = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(ROOM * PLACES)?;
        let cq = context.cq_builder(2 * DEPTH).build()?;
        let builder = pd
            .qp_builder(&cq, &cq, QpType::RAW_PACKET)
            .max_send_wr(DEPTH)
            .max_recv_wr(DEPTH)
            .max_send_sge(3)
            .max_inline_data(128);
        let qp = supported(refine(builder).build(), Capability::RawPacket)?;
        let port = link_of(&context)?.port;
        let mac = mac(device, port)?;
        Ok(Station { qp, cq, memory, pd, context, mac, port, next: 1 })
    }

    pub(crate) fn start(&self) -> Verdict {
        self.qp.modify(&QpAttr::new().state(QpState::INIT).port(self.port))?;
        self.qp.modify(&QpAttr::new().state(QpState::RTR))?;
        self.qp.modify(&QpAttr::new().state(QpState::RTS))?;
        Ok(())
    }

    pub(crate) fn sge(&self, range: Range<usize>) -> Sge {
        self.memory.sge(range).expect("the range is within the memory")
    }

    /// Writes bytes into the place for sends.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.memory.copy_from(0, bytes).expect("a frame has room");
    }

    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn post(&mut self, wr: SendWr<'_>) -> Result<(), PostError> {
        let mut batch = self.qp.send_batch()?;
        batch.push(wr)?;
        // SAFETY: requests name the memory of a station, which is dropped after its queue pair and
        // borrowed nowhere.
        unsafe { batch.ring() }.map_err(PostError::Ring)
    }

    /// Posts a send and waits for its completion.
    #[track_caller]
    pub(crate) fn send_wr(&mut self, wr: SendWr<'_>) -> Verdict {
        self.post(wr.id(1).signaled())?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(done) = self.cq.poll()?.next() {
                let found = (done.wr_id(), done.status(), done.opcode(), done.qpn());
                let qpn = self.qp.qpn();
                assert_eq!(found, (1, WcStatus::SUCCESS, WcOpcode::SEND, qpn));
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Stop::fail("a packet is not sent"));
            }
            std::thread::yield_now();
        }
    }

    /// Sends a frame from the memory.
    #[track_caller]
    pub(crate) fn send(&mut self, frame: &[u8]) -> Verdict {
        self.put(frame);
        let sges = [self.sge(0..frame.len())];
        self.send_wr(SendWr::send(&sges))
    }

    /// Posts a receive for one frame, into memory that is poisoned.
    #[allow(unsafe_code, reason = "ringing is")]
    pub(crate) fn listen(&mut self) -> Result<(), PostError> {
        let at = self.next * ROOM;
        let poison = pattern::bytes(pattern::POISON, ROOM);
        self.memory.copy_from(at, &poison).expect("a frame has room");
        let sges = [self.sge(at..at + ROOM)];
        let mut batch = self.qp.recv_batch()?;
        batch.push(RecvWr::new(&sges).id(self.next as u64))?;
        // SAFETY: as for sends.
        unsafe { batch.ring() }.map_err(PostError::Ring)?;
        self.next = if self.next + 1 == PLACES { 1 } else { self.next + 1 };
        Ok(())
    }

    /// The received frame, if one arrived.
    #[track_caller]
    pub(crate) fn poll(&mut self) -> Verdict<Option<Heard>> {
        let mut completions = self.cq.poll()?;
        let Some(done) = completions.next() else { return Ok(None) };
        assert_eq!((done.status(), done.opcode()), (WcStatus::SUCCESS, WcOpcode::RECV));
        let (at, length) = (done.wr_id() as usize * ROOM, done.byte_len() as usize);
        let mut heard = Heard {
            bytes: vec![0; length],
            tag: done.flow_tag(),
            checked: done.ip_checksum_ok(),
            vlan: done.vlan(),
        };
        self.memory.copy_to(at, &mut heard.bytes).expect("it was received there");
        let mut rest = vec![0; ROOM - length];
        self.memory.copy_to(at + length, &mut rest).expect("it was poisoned");
        assert!(rest == pattern::bytes(pattern::POISON, ROOM)[length..], "bytes behind the frame");
        Ok(Some(heard))
    }

    /// Waits for a frame.
    #[track_caller]
    pub(crate) fn hear(&mut self) -> Verdict<Heard> {
        self.heard()?.ok_or_else(|| Stop::fail(format!("no packet after {PATIENCE:?}")))
    }

    /// Waits for a frame; `None` if none comes in time.
    #[track_caller]
    pub(crate) fn heard(&mut self) -> Verdict<Option<Heard>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(heard) = self.poll()? {
                return Ok(Some(heard));
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            std::thread::yield_now();
        }
    }

    /// Waits for this frame.
    #[track_caller]
    pub(crate) fn expect(&mut self, frame: &[u8]) -> Verdict<Heard> {
        let heard = self.hear()?;
        assert_eq!(hex(&heard.bytes), hex(frame));
        Ok(heard)
    }

    #[track_caller]
    pub(crate) fn expect_silence(&mut self) -> Verdict {
        let end = Instant::now() + SILENCE;
        while Instant::now() < end {
            if let Some(heard) = self.poll()? {
                return Err(Stop::fail(format!("an unexpected packet: {}", hex(&heard.bytes))));
            }
            std::thread::sleep(SILENCE / 20);
        }
        Ok(())
    }

    /// A rule of this station's port.
    pub(crate) fn rule(&self) -> FlowAttr {
        FlowAttr::new(self.port)
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hardware address of a device's port.
fn mac(device: &Device, port: u32) -> Verdict<Mac> {
    if env::on_fabric() {
        // The fabric's interface is not in sysfs; the port's first GID is made from its address.
        let first = Context::open(device)?.query_gid(port, 0)?.gid.0;
        return Ok([first[8] ^ 2, first[9], first[10], first[13], first[14], first[15]]);
    }
    let netdev = device.netdev(port)?;
    let Some(netdev) = netdev else {
        let why = "the port has no network interface, and so no Ethernet packets";
        return Err(Stop::Skip(Capability::RawPacket, why.into()));
    };
    let text = fs::read_to_string(format!("/sys/class/net/{netdev}/address"))?;
    let mut mac = [0; 6];
    for (place, digits) in mac.iter_mut().zip(text.trim().split(':')) {
        *place = u8::from_str_radix(digits, 16)?;
    }
    Ok(mac)
}

/// Runs `act` in a thread without `CAP_NET_RAW`, even if the user is root.
pub(crate) fn unprivileged<T: Send>(act: impl FnOnce() -> T + Send) -> Verdict<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| -> rustix::io::Result<T> {
            let mut sets = capabilities(None)?;
            sets.effective.remove(CapabilitySet::NET_RAW);
            set_capabilities(None, sets)?;
            Ok(act())
        });
        Ok(thread.join().expect("it does not panic")?)
    })
}
