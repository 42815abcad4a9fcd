//! The fabric, as tests and programs make it.

use crate::driver::Driver;
use crate::faults::Rates;
use crate::interface::Interface;
use crate::kernel::Kernel;
use crate::profile::Profile;
use crate::seeds::{self, Prints};
use crate::strict::Findings;
use crate::udp::{self, Transmitter, UdpCounters, Wire};
pub use crate::world::Mode;
use crate::world::World;
use rustix::io::Errno;
use std::fmt;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use uverbs_connectx::network::Network;
use uverbs_connectx::options::PortType;
use uverbs_host::HostSystem;
use uverbs_uapi::port::ib_mtu;

/// Devices behind one switch, with a kernel of their own, in this process.
#[derive(Clone, Debug)]
pub struct Fabric {
    pub(crate) world: Arc<World>,
}

/// A fabric before it is made: [`Fabric::builder`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct FabricBuilder {
    profiles: Vec<Profile>,
    mode: Mode,
    rates: Rates,
    network: Option<Network>,
    history: bool,
    strict: bool,
    any_order: bool,
    udp: Option<SocketAddr>,
}

impl FabricBuilder {
    /// Adds a device.
    pub fn device(mut self, profile: Profile) -> FabricBuilder {
        self.profiles.push(profile);
        self
    }

    /// Has the program step the fabric, in virtual time, with decisions drawn from this seed:
    /// [`Mode::Stepped`]. Without it time is real, and threads of the program run the devices.
    pub fn stepped(mut self, seed: u64) -> FabricBuilder {
        self.mode = Mode::Stepped { seed };
        self
    }

    /// Faults that happen at random, by the seed of a stepped fabric.
    pub fn rates(mut self, rates: Rates) -> FabricBuilder {
        self.rates = rates;
        self
    }

    /// The network between the devices: without it, packets arrive at once and in order, unless [`Rates`] say
    /// otherwise. Its times are those of the fabric, virtual or real; the seed of a stepped fabric makes its faults
    /// repeat.
    pub fn network(mut self, network: Network) -> FabricBuilder {
        self.network = Some(network);
        self
    }

    /// Records what happens, for [`Fabric::history`]. A fabric whose last handle is dropped while the thread panics
    /// prints it on standard error.
    pub fn history(mut self) -> FabricBuilder {
        self.history = true;
        self
    }

    /// Makes the devices look for mistakes that hardware does not report, for [`Fabric::check`]: memory of a send or
    /// write that changes before its completion, doorbells that are missing, early or of another queue. The device
    /// fills the buffer of a receive with [`POISON`](crate::POISON) until its completion: a program that reads the
    /// buffer early finds that.
    pub fn strict(mut self) -> FabricBuilder {
        self.strict = true;
        self
    }

    /// Has the devices write data of packets to memory in any order that the specification permits, as the bus may: the
    /// bytes of a message in any order, data of two queue pairs in any order, and messages of a queue pair in order
    /// unless their region has relaxed ordering. All of it is in memory before its completion, before the peer's, and
    /// before the peer reads with the same queue pair. A program that polls the last byte of a message for the whole
    /// finds parts of it on some seed. Only a stepped fabric chooses: one in real time has the last piece of a message
    /// in memory first, and all of it before its call ends.
    pub fn writes_in_any_order(mut self) -> FabricBuilder {
        self.any_order = true;
        self
    }

    /// Has the device speak RoCE v2 over a UDP socket at this address, with other processes and machines: with fabrics
    /// like this one, with Linux's soft-RoCE (rxe), and with hardware. The port is [`ROCE_PORT`](crate::ROCE_PORT) for
    /// those; fabrics that use another one reach each other.
    ///
    /// The device is one, with or without [`FabricBuilder::device`], and its only GID is the address. Any peer that can
    /// send to the address can send packets to the device: RoCE knows neither authentication nor encryption.
    /// [`Fabric::udp_counters`] counts what is dropped. A [`network`](FabricBuilder::network) is that of packets that
    /// leave. The fabric is not stepped: time is real.
    pub fn udp(mut self, at: SocketAddr) -> FabricBuilder {
        self.udp = Some(at);
        self
    }

    /// Makes the fabric.
    ///
    /// # Errors
    ///
    /// Two devices of one name or address, a name that no device can have, more than [`MAX_DEVICES`], or a share of
    /// [`Rates`] or of the [`Network`] that is not between 0 and 1. [Over UDP](FabricBuilder::udp): more than one
    /// device, an InfiniBand port, a stepped fabric, or an address at which the system binds no socket.
    pub fn build(mut self) -> Result<Fabric, FabricError> {
        let wire = self.bind()?;
        let (seed, rates) = match self.mode {
            Mode::Stepped { seed } => (seed, self.rates),
            Mode::Trapped => (0, Rates::none()),
        };
        if let Some((name, share)) = self.rates.out_of_range() {
            return Err(FabricError::Rate(name, share.to_string()));
        }
        if self.profiles.len() > MAX_DEVICES {
            return Err(FabricError::TooManyDevices(self.profiles.len()));
        }
        let mut kernel = Kernel::new(seed, rates);
        if let Some(network) = self.network {
            kernel.switch.set_network(check_network(network)?);
        }
        for (number, profile) in self.profiles.into_iter().enumerate() {
            let name = profile.name.unwrap_or_else(|| format!("mlx5_{number}"));
            if !(1..=MAX_NAME).contains(&name.len()) || name.contains(['/', '\0']) {
                return Err(FabricError::Name(name));
            }
            if let Some(limit) = profile.options.limits.out_of_range() {
                return Err(FabricError::Limit(limit));
            }
            let mut interface = match &wire {
                Some((wire, mtu)) => Interface::outside(wire.address().ip(), *mtu),
                None => Interface::numbered(number, &profile.addresses),
            };
            if profile.jumbo_frames {
                interface.mtu = ib_mtu::IB_MTU_4096.0;
            }
            for other in &kernel.drivers {
                if other.name == name {
                    return Err(FabricError::NameTaken(name));
                }
                let taken = |address: &&IpAddr| other.interface.addresses.contains(address);
                if let Some(address) = interface.addresses.iter().find(taken) {
                    return Err(FabricError::AddressTaken(*address));
                }
            }
            let driver = Driver::probe(&mut kernel.switch, profile.options, name, interface)
                .map_err(|errno| FabricError::NotProbed(number, errno))?;
            kernel.drivers.push(driver);
        }
        if self.strict {
            kernel.be_strict();
        }
        for device in 0..kernel.drivers.len() {
            if self.any_order {
                kernel.function(device).device_mut().write_in_any_order();
            }
        }
        let prints = Prints::here();
        if self.history || prints == Prints::Always {
            kernel.record_history(prints);
        }
        let wire = wire.map(|(wire, _)| wire);
        if let Some(wire) = &wire {
            let function = kernel.drivers[0].function();
            kernel.switch.lead_outside(function, udp::random() as u32);
            kernel.transmitter = Some(Transmitter::new(wire.clone()));
            kernel.cm.be_random(udp::random);
        }
        let world = World::new(kernel, self.mode, wire).map_err(FabricError::UdpThread)?;
        if prints == Prints::Always {
            seeds::note(&world);
        }
        let system: Arc<dyn HostSystem> = world.clone();
        uverbs_host::register(&system);
        Ok(Fabric { world })
    }
}

impl FabricBuilder {
    /// Binds the socket, if the fabric is to have one, and makes the one device fit for it.
    fn bind(&mut self) -> Result<Option<(Arc<Wire>, u8)>, FabricError> {
        let Some(at) = self.udp else { return Ok(None) };
        if self.mode != Mode::Trapped {
            return Err(FabricError::UdpIsStepped);
        }
        if self.profiles.is_empty() {
            self.profiles.push(Profile::new());
        }
        let [profile] = &mut self.profiles[..] else {
            return Err(FabricError::UdpDevices(self.profiles.len()));
        };
        if profile.options.port_type == PortType::InfiniBand || !profile.addresses.is_empty() {
            return Err(FabricError::UdpProfile);
        }
        profile.jumbo_frames = false;
        profile.options.exposed = Some(udp::random);
        let mtu = udp::port_mtu(at)?;
        Ok(Some((Arc::new(Wire::bind(at)?), mtu)))
    }
}

/// Checks that shares are between 0 and 1, and that packets pass a port some time.
pub(crate) fn check_network(network: Network) -> Result<Network, FabricError> {
    if network.has_zero_bandwidth() {
        return Err(FabricError::Bandwidth);
    }
    match network.out_of_range() {
        Some((name, share)) => Err(FabricError::Rate(name, share.to_string())),
        None => Ok(network),
    }
}

/// The most devices of a fabric.
pub const MAX_DEVICES: usize = 1024;
/// The most bytes of a device's name: `IB_DEVICE_NAME_MAX` with its zero.
const MAX_NAME: usize = 63;

/// The reason why a fabric cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FabricError {
    /// More devices than [`MAX_DEVICES`].
    TooManyDevices(usize),
    /// A name that no device can have.
    Name(String),
    /// Two devices have this name.
    NameTaken(String),
    /// Two devices have this address.
    AddressTaken(IpAddr),
    /// A limit is 0, or above that of [`Limits::FULL`](crate::Limits::FULL).
    Limit(&'static str),
    /// A share of [`Rates`] or of a [`Network`], by its name, is not between 0 and 1.
    Rate(&'static str, String),
    /// A [`Network`] has a bandwidth of 0.
    Bandwidth,
    /// A fabric over UDP has one device, not so many.
    UdpDevices(usize),
    /// The device of a fabric over UDP has an Ethernet port, and its address is that of the socket.
    UdpProfile,
    /// A fabric over UDP is not stepped.
    UdpIsStepped,
    /// An address that is not that of one port: of a group, of one link, of no or of all interfaces; or port 0.
    UdpAddress(SocketAddr),
    /// The interface with the address has an MTU that is too small.
    UdpMtu(SocketAddr, u32),
    /// The system binds no socket at the address.
    UdpSocket(SocketAddr, Errno),
    /// The system starts no thread that receives from the socket.
    UdpThread(Errno),
    /// The driver does not bring the device with this number up, which is a defect of this package.
    NotProbed(usize, Errno),
}

impl fmt::Display for FabricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FabricError::TooManyDevices(count) => {
                write!(f, "a fabric has at most {MAX_DEVICES} devices, not {count}")
            }
            FabricError::Name(name) => write!(
                f,
                "a device cannot be called {name:?}: a name has 1 to {MAX_NAME} bytes and no slash"
            ),
            FabricError::NameTaken(name) => {
                write!(f, "two devices are called {name:?}: give each a name of its own")
            }
            FabricError::AddressTaken(address) => {
                write!(f, "two devices have the address {address}: give each one of its own")
            }
            FabricError::Limit(name) => {
                write!(f, "the limit {name} has to be from 1 to that of Limits::FULL")
            }
            FabricError::Bandwidth => write!(
                f,
                "a bandwidth of 0 bits per second: give at least 1, or none for ports without a queue"
            ),
            FabricError::Rate(name, share) => {
                write!(
                    f,
                    "a share of {share} of {name}: give one from 0.0 for never to 1.0 for always"
                )
            }
            FabricError::UdpDevices(count) => {
                write!(f, "a fabric over UDP has one device, not {count}: make a fabric for each")
            }
            FabricError::UdpProfile => write!(
                f,
                "the device of a fabric over UDP has an Ethernet port with the address of the socket: give its profile \
                 neither InfiniBand nor an address"
            ),
            FabricError::UdpIsStepped => {
                write!(f, "a fabric over UDP cannot be stepped: other processes have real time")
            }
            FabricError::UdpAddress(at) => write!(
                f,
                "a fabric over UDP cannot be at {at}: give the address of one interface that is not link-local, and a \
                 port that is not 0"
            ),
            FabricError::UdpMtu(at, mtu) => write!(
                f,
                "the interface of {at} has an MTU of {mtu} bytes: RoCE needs at least 336"
            ),
            FabricError::UdpSocket(at, errno) => {
                write!(f, "no UDP socket at {at}: {errno}")?;
                match *errno {
                    Errno::ADDRINUSE => write!(
                        f,
                        "; another process has it, or the module rdma_rxe, which has port 4791 of its whole network \
                         namespace: give another address or another port"
                    ),
                    Errno::ADDRNOTAVAIL => {
                        write!(f, "; give the address of an interface of this machine")
                    }
                    _ => Ok(()),
                }
            }
            FabricError::UdpThread(errno) => {
                write!(f, "no thread to receive from the UDP socket: {errno}")
            }
            FabricError::NotProbed(number, errno) => {
                write!(f, "device {number} does not come up: {errno}")
            }
        }
    }
}

impl std::error::Error for FabricError {}

impl Fabric {
    /// A fabric of `devices` devices with all capabilities.
    ///
    /// # Panics
    ///
    /// If there are more than [`MAX_DEVICES`].
    pub fn new(devices: usize, mode: Mode) -> Fabric {
        let profiles = vec![Profile::new(); devices];
        let builder = FabricBuilder { profiles, mode, ..FabricBuilder::default() };
        builder.build().unwrap_or_else(|error| panic!("{error}"))
    }

    /// A fabric without devices so far.
    pub fn builder() -> FabricBuilder {
        FabricBuilder::default()
    }

    /// The system, for `uverbs::device::devices_on`.
    pub fn system(&self) -> Arc<dyn HostSystem> {
        self.world.clone()
    }

    /// Makes this the system of the whole process: its devices are listed and opened, and not Linux's. For
    /// programs and test suites that were not written for it.
    ///
    /// # Errors
    ///
    /// The fabric, if another system was installed before.
    pub fn install(self) -> Result<(), Fabric> {
        uverbs_host::install(self.system()).map_err(|_| self)
    }

    /// Does up to eight things that are due, each for up to 32 messages, or everything in [`Mode::Trapped`]; returns
    /// whether there was any.
    pub fn step(&self) -> bool {
        self.world.step()
    }

    /// Takes a [step](Self::step) if something is due now, and else moves virtual time to the next timer; `false` if
    /// there is neither.
    pub fn advance(&self) -> bool {
        self.world.is_stepped() && self.world.step() || self.world.advance_to_timer(None)
    }

    /// The time since the fabric was made; virtual if it is stepped.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.world.nanoseconds())
    }

    /// The events so far, a line for each call, request, message that went wrong, and completion; empty unless
    /// [it is recorded](FabricBuilder::history). Two runs of one seed have the same history.
    ///
    /// ```text
    ///          1.234 µs left: qp 0x40 send 0: RDMA_WRITE at the peer's mr 0x10001+0x10, 8 bytes of mr 0x10001+0x8, signaled
    ///          1.234 µs left: cq 0x401 entry 0: qp 0x40 send 0 is done
    /// ```
    pub fn history(&self) -> String {
        self.world.history()
    }

    /// Writes the packets between Ethernet ports to a file in the format of pcap, as RoCE v2, for Wireshark: those that
    /// arrive, at the fabric's time, until the fabric is dropped or another file is given. The devices wait while a
    /// packet is written: a pipe needs a reader.
    ///
    /// # Errors
    ///
    /// The beginning of the file cannot be written. If a packet cannot, the capture ends, perhaps with a part of it.
    pub fn capture(&self, to: File) -> io::Result<()> {
        self.world.kernel()?.switch.capture(to)
    }

    /// The counters of a fabric [over UDP](FabricBuilder::udp); `None` of another one.
    pub fn udp_counters(&self) -> Option<UdpCounters> {
        self.world.kernel().ok()?.udp_counters()
    }

    /// Reports the mistakes of the program, if the fabric is [strict](FabricBuilder::strict), and in any case its
    /// leftovers: requests that were not rung, completions that were not polled, objects that were not destroyed. For
    /// the end of a test.
    ///
    /// # Errors
    ///
    /// The findings.
    pub fn check(&self) -> Result<(), Findings> {
        self.world.check()
    }

    /// The number of decisions that the seed has made: two runs with different numbers differ.
    pub fn decisions(&self) -> u64 {
        self.world.kernel().map_or(0, |kernel| kernel.decisions())
    }

    /// Steps the fabric as a task of an event loop, whose clock becomes the fabric's. Between two steps the tasks of
    /// the program run. When there is nothing to do, the task sleeps until the next timer, so that a paused clock moves
    /// on. The future never ends.
    ///
    /// `clock` tells the time since its start, and sleeps. Each call of the program reads it, too.
    pub async fn drive(&self, clock: impl Clock + Send + Sync + 'static) {
        let world = &self.world;
        let clock = Arc::new(clock);
        // The fabric may have had a time of its own before.
        let (base, since) = (clock.elapsed(), world.nanoseconds());
        let told = clock.clone();
        let now = move || since + told.elapsed().saturating_sub(base).as_nanos() as u64;
        let _follows = world.follow(Arc::new(now.clone()));
        loop {
            world.set_time(now());
            // Another thread may call after the last step and before this task waits.
            let mut called = world.calls();
            while world.step() {
                yield_once().await;
                called = world.calls();
            }
            let mut sleep = world.deadline().map(|due| {
                let left = Duration::from_nanos(due.saturating_sub(now()));
                Box::pin(clock.sleep(left))
            });
            let mut first = true;
            // Until the program calls, or the timer is due.
            poll_fn(|cx| {
                if !first {
                    return Poll::Ready(());
                }
                if let Some(sleep) = &mut sleep {
                    if sleep.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(());
                    }
                }
                first = false;
                world.wake_when_called(cx.waker());
                if world.calls() == called { Poll::Pending } else { Poll::Ready(()) }
            })
            .await;
        }
    }
}

/// The clock of an event loop.
pub trait Clock {
    /// The time since some moment that stays the same. Where the clock cannot be read, outside of its event loop for
    /// one, it is zero, and the fabric's time stands still.
    fn elapsed(&self) -> Duration;

    /// A future that ends after a while.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()>;
}

/// Lets other tasks run.
async fn yield_once() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
