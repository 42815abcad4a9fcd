//! The state of one function behind BAR0.
//!
//! The layers above add its behaviour: `data` executes WQEs and doorbells, `cmd` commands, `mmio`
//! accesses to BAR0.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use uverbs_roce::Endpoint;

use crate::audit::Audit;
use crate::bar_memory::BarMemory;
use crate::bus::Bus;
use crate::doorbell::Doorbells;
use crate::fault::InjectedFaults;
use crate::format::event::Event;
use crate::guest::GuestMemory;
use crate::hca_caps::HcaCaps;
use crate::init_segment::InitSegment;
use crate::interrupt::Interrupts;
use crate::link::{Departing, Link};
use crate::object::Objects;
use crate::options::Options;
use crate::outside::Unwelcome;
use crate::pages::FirmwarePages;
use crate::path::Path;
use crate::port::{Port, TrafficByCast};
use crate::ready::ReadyQueues;
use crate::recording::Recorder;

/// The transport of a function, without queue pairs.
fn endpoint(options: &Options) -> Box<Endpoint<Path>> {
    let mut endpoint = Box::new(Endpoint::new());
    if options.exposed.is_some() {
        endpoint.limit_congestion();
    }
    endpoint
}

/// The state of one function behind BAR0.
pub struct Device {
    pub(crate) options: Options,
    pub(crate) memory: GuestMemory,
    pub(crate) interrupts: Interrupts,
    /// Events of the EQs that have no memory.
    pub(crate) events: VecDeque<Event>,
    pub(crate) init_segment: InitSegment,
    pub(crate) caps: HcaCaps,
    /// The interface revision (ISSI) that the driver chose.
    pub(crate) issi: u64,
    pub(crate) pages: FirmwarePages,
    pub(crate) objects: Objects,
    pub(crate) port: Port,
    pub(crate) node_description: Vec<u8>,
    pub(crate) doorbells: Doorbells,
    pub(crate) bar: BarMemory,
    /// Data that is on its way to memory.
    pub(crate) bus: Bus,
    pub(crate) rdma_sent: TrafficByCast,
    pub(crate) rdma_received: TrafficByCast,
    /// Queues with WQEs to fetch or to flush.
    pub(crate) ready_queues: ReadyQueues,
    /// The transport of the queue pairs that have been connected; `None` while it calls the device.
    pub(crate) endpoint: Option<Box<Endpoint<Path>>>,
    /// The packets that have left.
    pub(crate) link: Link,
    /// Why the last packet was not admitted.
    pub(crate) not_admitted: Option<Unwelcome>,
    /// The payload of the packet that the transport puts together.
    pub(crate) departing: Departing,
    /// When queue pairs in error state look for late receives: time and QPN.
    pub(crate) late_receive_timers: BTreeSet<(u64, u32)>,
    /// When delayed events of CQs are due: time and CQN.
    pub(crate) cq_timers: BTreeSet<(u64, u32)>,
    /// Nanoseconds since the start.
    pub(crate) now: u64,
    /// The objects that the last TEARDOWN_HCA found, by kind: the driver should have destroyed them.
    pub(crate) left: Vec<(&'static str, usize)>,
    /// Whether the driver has sent INIT_HCA.
    pub(crate) initialized: bool,
    /// Whether the function may access memory and raise interrupts.
    pub(crate) bus_master: bool,
    /// Faults that tests asked for.
    pub(crate) faults: InjectedFaults,
    /// The recording of the function.
    pub(crate) recorder: Recorder,
    /// The check of the memory of requests, if a test asked for it.
    pub(crate) audit: Option<Box<Audit>>,
    /// Refused commands in the log: opcode and syndrome.
    pub(crate) logged_errors: BTreeMap<(u16, u32), u64>,
}

impl Device {
    /// A function as after power on.
    pub fn new(options: Options, vectors: usize) -> Self {
        let bar = BarMemory::new(options.mapped);
        Self::with(options, Interrupts::new(vectors), bar)
    }

    /// A function as after power on, with these interrupts and this memory in BAR0.
    fn with(options: Options, interrupts: Interrupts, bar: BarMemory) -> Self {
        Self {
            memory: GuestMemory::default(),
            interrupts,
            events: VecDeque::new(),
            init_segment: InitSegment::new(),
            caps: HcaCaps::new(&options),
            issi: 0,
            pages: FirmwarePages::default(),
            objects: Objects::new(&options),
            port: Port::new(options.number),
            node_description: vec![],
            doorbells: Doorbells::new(options.write_combining),
            bar,
            bus: Bus::default(),
            rdma_sent: TrafficByCast::default(),
            rdma_received: TrafficByCast::default(),
            ready_queues: ReadyQueues::default(),
            endpoint: Some(endpoint(&options)),
            link: Link::default(),
            not_admitted: None,
            departing: Departing::default(),
            late_receive_timers: BTreeSet::new(),
            cq_timers: BTreeSet::new(),
            now: 0,
            left: vec![],
            initialized: false,
            bus_master: false,
            faults: InjectedFaults::default(),
            recorder: Recorder::default(),
            audit: None,
            logged_errors: BTreeMap::new(),
            options,
        }
    }

    /// Resets the function or its firmware. Guest memory, interrupts, the time, the recording, injected faults and the
    /// findings of TEARDOWN_HCA stay. The memory in BAR0 stays mapped and is cleared.
    pub fn reset(&mut self) {
        log::info!("function {} reset", self.options.number);
        let interrupts = std::mem::replace(&mut self.interrupts, Interrupts::new(0));
        let bar = std::mem::replace(&mut self.bar, BarMemory::none());
        bar.clear();
        let mut fresh = Self::with(self.options.clone(), interrupts, bar);
        std::mem::swap(&mut fresh.memory, &mut self.memory);
        fresh.now = self.now;
        fresh.bus = self.bus.emptied();
        fresh.left = std::mem::take(&mut self.left);
        fresh.bus_master = self.bus_master;
        fresh.faults = std::mem::take(&mut self.faults);
        fresh.recorder = std::mem::take(&mut self.recorder);
        fresh.recorder.reset(self.now);
        fresh.audit = self.audit.as_ref().map(|audit| Box::new(audit.after_reset()));
        fresh.port.link_up = self.port.link_up;
        fresh.port.lag_up = self.port.lag_up;
        // Another function, which is not reset with this one.
        fresh.objects.data_direct = self.objects.data_direct;
        fresh.init_segment = InitSegment::after_reset();
        *self = fresh;
    }

    /// Destroys every object. Host pages stay until the driver takes them back.
    pub(crate) fn tear_down(&mut self) {
        let left: Vec<_> =
            self.objects.counts().into_iter().filter(|(_, count)| *count > 0).collect();
        if !left.is_empty() {
            log::warn!("function {} is torn down with {left:?}", self.options.number);
        }
        // DISABLE_HCA follows TEARDOWN_HCA, and finds nothing.
        if self.initialized {
            self.left = left;
        }
        self.initialized = false;
        self.pages.set_running(false);
        let data_direct = self.objects.data_direct;
        self.objects = Objects { data_direct, ..Objects::new(&self.options) };
        self.doorbells.clear();
        self.events.clear();
        self.ready_queues.clear();
        self.endpoint = Some(endpoint(&self.options));
        self.link = Link::default();
        self.late_receive_timers.clear();
        self.cq_timers.clear();
        // Another function may have these addresses by now.
        self.port.clear_gids();
    }

    /// Enables or disables access to memory and interrupts.
    pub(crate) fn set_bus_master(&mut self, on: bool) {
        if !on {
            self.bus = self.bus.emptied();
            self.link.copy_payloads(&self.memory, None);
        }
        self.bus_master = on;
        self.interrupts.enable(on);
    }

    /// Enables or disables access to memory by the data-direct function.
    pub(crate) fn set_data_direct(&mut self, on: bool) {
        self.objects.data_direct = on;
    }

    /// The cost since the last call.
    pub(crate) fn take_cost(&self) -> u64 {
        self.objects.cost.take()
    }

    /// Appends a queue to the ready queues.
    pub(crate) fn schedule(&mut self, number: u32) {
        self.ready_queues.push(number);
    }

    /// Has data of packets reach memory later, in any order that the specification permits.
    pub fn write_in_any_order(&mut self) {
        self.bus.be_slow();
    }

    /// When the next timer is due.
    pub(crate) fn deadline(&self) -> Option<u64> {
        if !self.bus_master {
            return None;
        }
        let transport = self.endpoint.as_ref().and_then(|endpoint| endpoint.deadline());
        // Each run asks, and the others are rare.
        let timers = [&self.late_receive_timers, &self.cq_timers];
        let idle = timers.iter().all(|timers| timers.is_empty());
        if idle && !self.link.holds_any() && self.faults.next_link_change().is_none() {
            return transport;
        }
        let timers = timers.map(|timers| timers.first().map(|(due, _)| *due));
        let others = [transport, self.link.deadline(), self.faults.next_link_change()];
        timers.into_iter().chain(others).flatten().min()
    }

    /// Guest memory, to map. Packets that have left do not need it any more.
    pub fn memory_mut(&mut self) -> &mut GuestMemory {
        self.link.copy_payloads(&self.memory, None);
        &mut self.memory
    }

    /// MSI-X vectors, to connect.
    pub fn interrupts_mut(&mut self) -> &mut Interrupts {
        &mut self.interrupts
    }

    /// The recorder of this function.
    pub fn recorder_mut(&mut self) -> &mut Recorder {
        &mut self.recorder
    }

    /// The faults that tests inject.
    pub fn faults_mut(&mut self) -> &mut InjectedFaults {
        &mut self.faults
    }

    /// The registers of the initialization segment.
    pub fn init_segment_mut(&mut self) -> &mut InitSegment {
        &mut self.init_segment
    }

    /// The pages that the host lends to firmware.
    pub fn pages(&self) -> &FirmwarePages {
        &self.pages
    }

    /// VAR pages and device memory.
    pub fn bar_memory(&self) -> &BarMemory {
        &self.bar
    }

    /// The objects that the last TEARDOWN_HCA found, by kind: the driver should have destroyed them.
    pub fn left(&self) -> &[(&'static str, usize)] {
        &self.left
    }

    /// Nanoseconds since the start.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// LID and GID of an InfiniBand port.
    pub fn infiniband_address(&self) -> (u16, [u8; 16]) {
        (self.port.lid(), self.port.ib_gid())
    }

    /// Whether the link is up.
    pub fn link_up(&self) -> bool {
        self.port.link_up
    }

    /// The objects, to count.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }
}
