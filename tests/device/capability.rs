//! Capabilities that a device or a machine may lack. A skip names one of these, and the lab's table
//! decides whether the device under test may lack it.

use std::fmt;
use uverbs::QpType;

macro_rules! capabilities {
    ($( $(#[$doc:meta])* $name:ident = $text:literal; )*) => {
        /// A capability; displayed with its name in the lab's table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Capability { $( $(#[$doc])* $name, )* }

        impl fmt::Display for Capability {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Capability::$name => $text, )* })
            }
        }
    };
}

capabilities! {
    /// Error answers to all requests without the right to memory.
    AccessErrors = "access_errors";
    /// Advice (prefetch) on pages of on-demand memory.
    AdviseMr = "advise_mr";
    /// Address handles.
    Ah = "ah";
    /// No other process uses the device, so that a test may take all of a resource.
    Alone = "alone";
    /// Fetch and add, compare and swap.
    Atomic = "atomic";
    /// Writing eight bytes in one piece.
    AtomicWrite = "atomic_write";
    /// The device's counter, mapped for programs.
    Clock = "clock";
    /// The kernel's connection manager.
    Cm = "cm";
    /// Events that a program writes into a channel of the connection manager (`rdma_write_cm_event`).
    CmEvents = "cm_events";
    /// The connection manager's event that a peer has another MAC address.
    CmUnreachable = "cm_unreachable";
    /// Announcing completions several at a time.
    CqModeration = "cq_moderation";
    /// Making a completion queue larger or smaller.
    CqResize = "cq_resize";
    /// Memory on the device itself.
    DeviceMemory = "device_memory";
    /// Removal of a device while files of it are open.
    Disassociate = "disassociate";
    /// Device memory of another context of the same file.
    DmImport = "dm_import";
    /// Queues in memory of other devices.
    DmabufQueues = "dmabuf_queues";
    /// Flushing of sends that are posted in state `ERR`.
    ErrorFlush = "error_flush";
    /// Full membership in the partition of the port's first key.
    FirstPkey = "first_pkey";
    /// Rules for packets that no other rule takes.
    FlowDefault = "flow_default";
    /// Options of connections that the device announces (enhanced connection establishment).
    Ece = "ece";
    /// Making writes visible or persistent.
    Flush = "flush";
    /// Huge pages that the administrator set aside.
    HugePages = "huge_pages";
    /// Imports that rdma-core has, too.
    Import = "import";
    /// A port whose link is InfiniBand.
    InfiniBand = "infiniband";
    /// Listing the objects of a file.
    InfoHandles = "info_handles";
    /// Ports that form a LAG.
    Lag = "lag";
    /// An event when a queue pair in state `ERR` takes no more from its shared receive queue.
    LastWqeEvent = "last_wqe_event";
    /// Links, namespaces and modules may be changed, and this process is root.
    Lab = "lab";
    /// Links that software makes and removes.
    Links = "links";
    /// Atomics on some of the bits of a word.
    MaskedAtomic = "masked_atomic";
    /// The driver mlx5, with features that only it has.
    Mlx5 = "mlx5";
    /// A data-direct function of the device.
    DataDirect = "data_direct";
    /// Memory of other devices.
    Dmabuf = "dmabuf";
    /// Memory of the device as a dma-buf.
    DmabufExport = "dmabuf_export";
    /// A node in `/dev` by which the device is opened.
    Node = "node";
    /// Multicast groups.
    Multicast = "multicast";
    /// Memory windows of type 1.
    Mw1 = "mw1";
    /// Memory windows of type 2.
    Mw2 = "mw2";
    /// Devices in several network namespaces.
    Netns = "netns";
    /// A key of no memory.
    NullMr = "null_mr";
    /// Memory that is paged on demand.
    Odp = "odp";
    /// A whole address space that is paged on demand.
    OdpImplicit = "odp_implicit";
    /// Placement of data out of order.
    OutOfOrder = "out_of_order";
    /// rdma-core's programs.
    Peers = "peers";
    /// Other processes that use the device, and children of `fork`.
    Processes = "processes";
    /// An event at the responder of a request without the right.
    QpAccessEvent = "qp_access_event";
    /// Queue pairs of raw packets, and rules for them.
    RawPacket = "raw_packet";
    /// Reliable connections.
    Rc = "rc";
    /// A device and a kernel whose answers are on record.
    Recorded = "recorded";
    /// Accesses that the device may reorder.
    RelaxedOrdering = "relaxed_ordering";
    /// Memory regions whose rights or domain change in place.
    Rereg = "rereg";
    /// Memory regions whose memory changes in place.
    ReregTranslation = "rereg_translation";
    /// A wait before a message that found no receive is sent again.
    RnrWait = "rnr_wait";
    /// Long runs: the run asks for them.
    Soak = "soak";
    /// Doorbell pages from which stored values can be read.
    ShownStores = "shown_stores";
    /// Draining a send queue without ending it.
    Sqd = "sqd";
    /// Shared receive queues.
    Srq = "srq";
    /// An event when few receives are left.
    SrqLimit = "srq_limit";
    /// Making a shared receive queue larger or smaller.
    SrqResize = "srq_resize";
    /// A machine that sleeps, and a clock that wakes it.
    Suspend = "suspend";
    /// A second device, joined to the first by a cable.
    TwoDevices = "two_devices";
    /// Extended reliable connections: initiators, targets and their domains.
    Xrc = "xrc";
    /// Unreliable connections.
    Uc = "uc";
    /// Datagrams.
    Ud = "ud";
    /// Another UDP source port for a connected queue pair.
    UdpPort = "udp_port";
    /// A device that makes memory of other devices out of files.
    Udmabuf = "udmabuf";
    /// Doorbell pages of emulated virtio devices.
    Var = "var";
    /// VARs of at least a page of the system, so that no page holds doorbells of two.
    VarPage = "var_page";
    /// A clock of real time.
    RealTime = "real_time";
    /// Doorbell pages of other emulated devices.
    VarTlp = "var_tlp";
}

impl Capability {
    /// The reason why the fabric, with its devices and their kernel in this process, may lack this; `None` for a
    /// capability that it has to have on any machine.
    pub(crate) fn lack_on_the_fabric(self) -> Option<&'static str> {
        Some(match self {
            // Impossible in one process.
            Capability::Lab | Capability::Links | Capability::Netns | Capability::Suspend => {
                "the machine's interfaces, namespaces and sleep are not the fabric's"
            }
            Capability::Node => "no node in /dev leads to the devices",
            Capability::Peers => "rdma-core's programs are other processes",
            Capability::Processes => "no other process has the devices",
            // The emulated device on current kernels lacks these, too.
            Capability::AtomicWrite
            | Capability::Dmabuf
            | Capability::DmabufExport
            | Capability::DmabufQueues
            | Capability::FlowDefault
            | Capability::Flush
            | Capability::InfiniBand
            | Capability::Odp
            | Capability::OdpImplicit
            | Capability::Sqd
            | Capability::SrqResize => "the device or its driver has none",
            // The machine has to provide these.
            Capability::HugePages
            | Capability::RawPacket
            | Capability::Soak
            | Capability::Udmabuf => "the machine or its user has none",
            _ => return None,
        })
    }

    /// The capability that queue pairs of this type need.
    pub(crate) fn of(qp_type: QpType) -> Capability {
        match qp_type {
            QpType::UC => Capability::Uc,
            QpType::UD => Capability::Ud,
            _ => Capability::Rc,
        }
    }
}
