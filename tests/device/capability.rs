//! Capabilities that a device or a machine may lack. A skip names one of these, and the lab's table
//! decides whether the device under test may lack it.

use std::fmt;
use uverbs::QpType;

macro_rules! capabilities {
    ($( $(#[$doc:meta])* $name:ident = $text:literal; )*) => {
        /// A capability; displayed as the lab's table spells it.
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
    /// Errors of all requests that have not the right to memory.
    AccessErrors = "access_errors";
    /// Advice on pages that will be needed.
    AdviseMr = "advise_mr";
    /// Address handles.
    Ah = "ah";
    /// Nobody else uses the device, so that a test may take all of a resource.
    Alone = "alone";
    /// Fetch and add, compare and swap.
    Atomic = "atomic";
    /// Writing eight bytes in one piece.
    AtomicWrite = "atomic_write";
    /// The device's counter, mapped for programs.
    Clock = "clock";
    /// The kernel's connection manager.
    Cm = "cm";
    /// Events that a program writes into a channel of the connection manager.
    CmEvents = "cm_events";
    /// Word of the connection manager that a peer has another MAC address.
    CmUnreachable = "cm_unreachable";
    /// Announcing completions several at a time.
    CqModeration = "cq_moderation";
    /// Making a completion queue larger or smaller.
    CqResize = "cq_resize";
    /// Memory on the device itself.
    DeviceMemory = "device_memory";
    /// A device that goes while files of it are open.
    Disassociate = "disassociate";
    /// Device memory of another context of the same file.
    DmImport = "dm_import";
    /// Queues in memory of other devices.
    DmabufQueues = "dmabuf_queues";
    /// An end of sends that are posted in an error state.
    ErrorFlush = "error_flush";
    /// Full membership in the partition of the port's first key.
    FirstPkey = "first_pkey";
    /// Rules for packets that no other rule takes.
    FlowDefault = "flow_default";
    /// Options of connections that the device tells.
    Ece = "ece";
    /// Making writes visible or persistent.
    Flush = "flush";
    /// Huge pages that the administrator set aside.
    HugePages = "huge_pages";
    /// Imports that rdma-core knows, too.
    Import = "import";
    /// A port whose link is InfiniBand.
    InfiniBand = "infiniband";
    /// Listing the objects of a file.
    InfoHandles = "info_handles";
    /// An event when a queue pair in an error state is through with its shared receive queue.
    LastWqeEvent = "last_wqe_event";
    /// Links, namespaces and modules may be changed, and this process is root.
    Lab = "lab";
    /// Links that software makes and removes.
    Links = "links";
    /// Atomics on some of the bits of a word.
    MaskedAtomic = "masked_atomic";
    /// The driver mlx5, with what only it has.
    Mlx5 = "mlx5";
    /// Memory of other devices.
    Dmabuf = "dmabuf";
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
    /// Memory that is paged on demand.
    Odp = "odp";
    /// A whole address space that is paged on demand.
    OdpImplicit = "odp_implicit";
    /// rdma-core's programs.
    Peers = "peers";
    /// Other processes that use the device, and children of `fork`.
    Processes = "processes";
    /// An event at the responder when a peer had not the right.
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
    /// Waiting for a while before a message is sent again that found no receive.
    RnrWait = "rnr_wait";
    /// Time: long runs are wanted.
    Soak = "soak";
    /// Doorbell pages that show what was stored in them.
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
    /// A device that makes memory of other devices out of files.
    Udmabuf = "udmabuf";
    /// Doorbell pages of emulated virtio devices.
    Var = "var";
    /// Doorbells in a page of the system that has none of another VAR.
    VarPage = "var_page";
    /// Doorbell pages of other emulated devices.
    VarTlp = "var_tlp";
}

impl Capability {
    /// The reason why the fabric, with its devices and their kernel in this process, may lack this; `None` for
    /// what it has to have, on whatever machine.
    pub(crate) fn lack_on_the_fabric(self) -> Option<&'static str> {
        Some(match self {
            // Impossible in one process.
            Capability::Lab | Capability::Links | Capability::Netns | Capability::Suspend => {
                "the machine's interfaces, namespaces and sleep are not the fabric's"
            }
            Capability::Node => "no node in /dev leads to the devices",
            Capability::Peers => "rdma-core's programs are other processes",
            Capability::Processes => "no other process has the devices",
            // Lacking in the emulated device on current kernels, too.
            Capability::AtomicWrite
            | Capability::Dmabuf
            | Capability::DmabufQueues
            | Capability::FlowDefault
            | Capability::Flush
            | Capability::InfiniBand
            | Capability::Odp
            | Capability::OdpImplicit
            | Capability::Sqd
            | Capability::SrqResize => "the device or its driver has none",
            // Lent by the machine.
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
