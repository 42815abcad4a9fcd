//! RDMA netlink, complete up to Linux 7.3: `rdma/rdma_netlink.h`.
//!
//! The message type of a request is [`RDMA_NL_GET_TYPE`] of [`RDMA_NL_NLDEV`] and a command; its
//! attributes are ordinary netlink attributes in host byte order. The kernel checks requests
//! strictly: an attribute that the command does not take is `EINVAL`.

use crate::enumeration::ids;

ids! {
    const PROTOCOL = "linux/netlink.h";

    enum "#define": u32 {
        /// Protocol of the netlink socket.
        NETLINK_RDMA = 20,
    }
}

/// Message type of command `op` of `client`.
#[allow(non_snake_case)]
pub const fn RDMA_NL_GET_TYPE(client: u16, op: u16) -> u16 {
    (client << 10) + op
}

/// Client that a message type belongs to.
#[allow(non_snake_case)]
pub const fn RDMA_NL_GET_CLIENT(r#type: u16) -> u16 {
    r#type >> 10
}

/// Command within a message type.
#[allow(non_snake_case)]
pub const fn RDMA_NL_GET_OP(r#type: u16) -> u16 {
    r#type & 0x3ff
}

ids! {
    const IDS = "rdma/rdma_netlink.h";

    enum _: u16 {
        /// Client of the iWARP port mapper.
        RDMA_NL_IWCM = 2,
        /// Not used.
        RDMA_NL_RSVD = 3,
        /// Client of local services (path resolution).
        RDMA_NL_LS = 4,
        /// Client of all requests about devices.
        RDMA_NL_NLDEV = 5,
    }

    enum _: u32 {
        /// Multicast group of the iWARP port mapper.
        RDMA_NL_GROUP_IWPM = 2,
        /// Multicast group of local services.
        RDMA_NL_GROUP_LS = 3,
        /// Multicast group of [`RDMA_NLDEV_CMD_MONITOR`].
        RDMA_NL_GROUP_NOTIFY = 4,
    }

    enum _: u8 {
        /// InfiniBand or RoCE channel adapter.
        RDMA_NODE_IB_CA = 1,
        /// InfiniBand switch.
        RDMA_NODE_IB_SWITCH = 2,
        /// InfiniBand router.
        RDMA_NODE_IB_ROUTER = 3,
        /// iWARP interface.
        RDMA_NODE_RNIC = 4,
        /// Cisco usNIC.
        RDMA_NODE_USNIC = 5,
        /// Cisco usNIC over UDP.
        RDMA_NODE_USNIC_UDP = 6,
        /// A transport of its own, such as EFA.
        RDMA_NODE_UNSPECIFIED = 7,
    }

    enum rdma_nldev_command: u16 {
        /// Describes a device; by index, or all of them as a dump.
        RDMA_NLDEV_CMD_GET = 1,
        /// Renames a device, moves it to a network namespace or sets adaptive moderation.
        RDMA_NLDEV_CMD_SET = 2,
        /// Makes a software device on a network interface.
        RDMA_NLDEV_CMD_NEWLINK = 3,
        /// Removes a software device.
        RDMA_NLDEV_CMD_DELLINK = 4,
        /// Describes a port; one, or all of a device as a dump.
        RDMA_NLDEV_CMD_PORT_GET = 5,
        /// Describes settings of the whole subsystem.
        RDMA_NLDEV_CMD_SYS_GET = 6,
        /// Changes settings of the whole subsystem.
        RDMA_NLDEV_CMD_SYS_SET = 7,
        /// Counts a device's objects by kind; all devices as a dump.
        RDMA_NLDEV_CMD_RES_GET = 9,
        /// Describes queue pairs.
        RDMA_NLDEV_CMD_RES_QP_GET = 10,
        /// Describes connection manager ids.
        RDMA_NLDEV_CMD_RES_CM_ID_GET = 11,
        /// Describes completion queues.
        RDMA_NLDEV_CMD_RES_CQ_GET = 12,
        /// Describes memory regions.
        RDMA_NLDEV_CMD_RES_MR_GET = 13,
        /// Describes protection domains.
        RDMA_NLDEV_CMD_RES_PD_GET = 14,
        /// Names the character device of a client ("uverbs", "umad"…) for a device. Never a dump.
        RDMA_NLDEV_CMD_GET_CHARDEV = 15,
        /// Configures or binds statistics counters.
        RDMA_NLDEV_CMD_STAT_SET = 16,
        /// Reads statistics counters.
        RDMA_NLDEV_CMD_STAT_GET = 17,
        /// Unbinds a statistics counter.
        RDMA_NLDEV_CMD_STAT_DEL = 18,
        /// Dumps the driver's own image of a queue pair.
        RDMA_NLDEV_CMD_RES_QP_GET_RAW = 19,
        /// Dumps the driver's own image of a completion queue.
        RDMA_NLDEV_CMD_RES_CQ_GET_RAW = 20,
        /// Dumps the driver's own image of a memory region.
        RDMA_NLDEV_CMD_RES_MR_GET_RAW = 21,
        /// Describes user contexts.
        RDMA_NLDEV_CMD_RES_CTX_GET = 22,
        /// Describes shared receive queues.
        RDMA_NLDEV_CMD_RES_SRQ_GET = 23,
        /// Lists which optional counters are on.
        RDMA_NLDEV_CMD_STAT_GET_STATUS = 24,
        /// Dumps the driver's own image of a shared receive queue.
        RDMA_NLDEV_CMD_RES_SRQ_GET_RAW = 25,
        /// Makes a sub-device of a device.
        RDMA_NLDEV_CMD_NEWDEV = 26,
        /// Removes a sub-device.
        RDMA_NLDEV_CMD_DELDEV = 27,
        /// Notification, sent by the kernel: a device or its network interface came, went or was renamed.
        RDMA_NLDEV_CMD_MONITOR = 28,
        /// Describes pools of reusable memory keys.
        RDMA_NLDEV_CMD_FRMR_POOLS_GET = 29,
        /// Configures pools of reusable memory keys.
        RDMA_NLDEV_CMD_FRMR_POOLS_SET = 30,
    }

    enum rdma_nldev_attr: u16 {
        /// Padding before a 64-bit value; carries nothing.
        RDMA_NLDEV_ATTR_PAD = 0,
        /// `u32`: identity of a device, handed out cyclically.
        RDMA_NLDEV_ATTR_DEV_INDEX = 1,
        /// String: name of a device.
        RDMA_NLDEV_ATTR_DEV_NAME = 2,
        /// `u32`: port number from 1; in responses to [`RDMA_NLDEV_CMD_GET`] the number of ports.
        RDMA_NLDEV_ATTR_PORT_INDEX = 3,
        /// `u64`: capability bits of a device or an InfiniBand port.
        RDMA_NLDEV_ATTR_CAP_FLAGS = 4,
        /// String: firmware version; absent where there is no firmware.
        RDMA_NLDEV_ATTR_FW_VERSION = 5,
        /// `u64`, host order.
        RDMA_NLDEV_ATTR_NODE_GUID = 6,
        /// `u64`, host order.
        RDMA_NLDEV_ATTR_SYS_IMAGE_GUID = 7,
        /// `u64`, host order; InfiniBand ports only.
        RDMA_NLDEV_ATTR_SUBNET_PREFIX = 8,
        /// `u32`: InfiniBand ports only.
        RDMA_NLDEV_ATTR_LID = 9,
        /// `u32`: InfiniBand ports only.
        RDMA_NLDEV_ATTR_SM_LID = 10,
        /// `u8`: InfiniBand ports only.
        RDMA_NLDEV_ATTR_LMC = 11,
        /// `u8`: logical state.
        RDMA_NLDEV_ATTR_PORT_STATE = 12,
        /// `u8`: physical state.
        RDMA_NLDEV_ATTR_PORT_PHYS_STATE = 13,
        /// `u8`: one of `RDMA_NODE_…`.
        RDMA_NLDEV_ATTR_DEV_NODE_TYPE = 14,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY`].
        RDMA_NLDEV_ATTR_RES_SUMMARY = 15,
        /// Nest: one kind of object.
        RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY = 16,
        /// String: the kind, "pd", "cq", "qp", "cm_id", "mr", "ctx" or "srq".
        RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME = 17,
        /// `u64`: objects that exist now.
        RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR = 18,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_QP_ENTRY`].
        RDMA_NLDEV_ATTR_RES_QP = 19,
        /// Nest: one queue pair.
        RDMA_NLDEV_ATTR_RES_QP_ENTRY = 20,
        /// `u32`: local queue pair number.
        RDMA_NLDEV_ATTR_RES_LQPN = 21,
        /// `u32`: remote queue pair number; connected types only.
        RDMA_NLDEV_ATTR_RES_RQPN = 22,
        /// `u32`: next packet expected; connected types only.
        RDMA_NLDEV_ATTR_RES_RQ_PSN = 23,
        /// `u32`: next packet sent.
        RDMA_NLDEV_ATTR_RES_SQ_PSN = 24,
        /// `u8`: path migration state.
        RDMA_NLDEV_ATTR_RES_PATH_MIG_STATE = 25,
        /// `u8`: queue pair type.
        RDMA_NLDEV_ATTR_RES_TYPE = 26,
        /// `u8`: state.
        RDMA_NLDEV_ATTR_RES_STATE = 27,
        /// `u32`: owner; objects of user space only.
        RDMA_NLDEV_ATTR_RES_PID = 28,
        /// String: owner; objects of the kernel only.
        RDMA_NLDEV_ATTR_RES_KERN_NAME = 29,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY`].
        RDMA_NLDEV_ATTR_RES_CM_ID = 30,
        /// Nest: one connection manager id.
        RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY = 31,
        /// `u32`: port space.
        RDMA_NLDEV_ATTR_RES_PS = 32,
        /// `struct __kernel_sockaddr_storage`.
        RDMA_NLDEV_ATTR_RES_SRC_ADDR = 33,
        /// `struct __kernel_sockaddr_storage`.
        RDMA_NLDEV_ATTR_RES_DST_ADDR = 34,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_CQ_ENTRY`].
        RDMA_NLDEV_ATTR_RES_CQ = 35,
        /// Nest: one completion queue.
        RDMA_NLDEV_ATTR_RES_CQ_ENTRY = 36,
        /// `u32`: size of a completion queue.
        RDMA_NLDEV_ATTR_RES_CQE = 37,
        /// `u64`: users of an object.
        RDMA_NLDEV_ATTR_RES_USECNT = 38,
        /// `u8`: how the kernel polls it.
        RDMA_NLDEV_ATTR_RES_POLL_CTX = 39,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_MR_ENTRY`].
        RDMA_NLDEV_ATTR_RES_MR = 40,
        /// Nest: one memory region.
        RDMA_NLDEV_ATTR_RES_MR_ENTRY = 41,
        /// `u32`: needs CAP_NET_ADMIN.
        RDMA_NLDEV_ATTR_RES_RKEY = 42,
        /// `u32`: needs CAP_NET_ADMIN.
        RDMA_NLDEV_ATTR_RES_LKEY = 43,
        /// `u64`.
        RDMA_NLDEV_ATTR_RES_IOVA = 44,
        /// `u64`: bytes.
        RDMA_NLDEV_ATTR_RES_MRLEN = 45,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_PD_ENTRY`].
        RDMA_NLDEV_ATTR_RES_PD = 46,
        /// Nest: one protection domain.
        RDMA_NLDEV_ATTR_RES_PD_ENTRY = 47,
        /// `u32`: needs CAP_NET_ADMIN.
        RDMA_NLDEV_ATTR_RES_LOCAL_DMA_LKEY = 48,
        /// `u32`: needs CAP_NET_ADMIN.
        RDMA_NLDEV_ATTR_RES_UNSAFE_GLOBAL_RKEY = 49,
        /// `u32`: network interface behind a port, where it is in the asker's namespace.
        RDMA_NLDEV_ATTR_NDEV_INDEX = 50,
        /// String: its name.
        RDMA_NLDEV_ATTR_NDEV_NAME = 51,
        /// Nest of the attributes that the driver adds.
        RDMA_NLDEV_ATTR_DRIVER = 52,
        /// Nest: one key and value of the driver's.
        RDMA_NLDEV_ATTR_DRIVER_ENTRY = 53,
        /// String.
        RDMA_NLDEV_ATTR_DRIVER_STRING = 54,
        /// `u8`: [`RDMA_NLDEV_PRINT_TYPE_UNSPEC`] or [`RDMA_NLDEV_PRINT_TYPE_HEX`].
        RDMA_NLDEV_ATTR_DRIVER_PRINT_TYPE = 55,
        /// `i32`.
        RDMA_NLDEV_ATTR_DRIVER_S32 = 56,
        /// `u32`.
        RDMA_NLDEV_ATTR_DRIVER_U32 = 57,
        /// `i64`.
        RDMA_NLDEV_ATTR_DRIVER_S64 = 58,
        /// `u64`.
        RDMA_NLDEV_ATTR_DRIVER_U64 = 59,
        /// `u32`: id of a protection domain.
        RDMA_NLDEV_ATTR_RES_PDN = 60,
        /// `u32`: id of a completion queue.
        RDMA_NLDEV_ATTR_RES_CQN = 61,
        /// `u32`: id of a memory region.
        RDMA_NLDEV_ATTR_RES_MRN = 62,
        /// `u32`: id of a connection manager id.
        RDMA_NLDEV_ATTR_RES_CM_IDN = 63,
        /// `u32`: id of a user context.
        RDMA_NLDEV_ATTR_RES_CTXN = 64,
        /// String: "rxe" or "siw".
        RDMA_NLDEV_ATTR_LINK_TYPE = 65,
        /// `u8`: 1 devices are shared by all network namespaces, 0 each is in one.
        RDMA_NLDEV_SYS_ATTR_NETNS_MODE = 66,
        /// String: "ib", "roce", "iw", "opa" or "usnic", by the first port.
        RDMA_NLDEV_ATTR_DEV_PROTOCOL = 67,
        /// `u32`: file descriptor of a network namespace.
        RDMA_NLDEV_NET_NS_FD = 68,
        /// String: the client, "uverbs", "umad"…
        RDMA_NLDEV_ATTR_CHARDEV_TYPE = 69,
        /// String: name of the node, without directory.
        RDMA_NLDEV_ATTR_CHARDEV_NAME = 70,
        /// `u64`: for "uverbs" the driver's ABI version.
        RDMA_NLDEV_ATTR_CHARDEV_ABI = 71,
        /// `u64`: device number in the kernel's `huge_encode_dev` form.
        RDMA_NLDEV_ATTR_CHARDEV = 72,
        /// `u32` on the wire (the header's comment says `u64`): `enum rdma_driver_id`.
        RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID = 73,
        /// `u32`: how counters bind.
        RDMA_NLDEV_ATTR_STAT_MODE = 74,
        /// `u32`: the kind of object a counter is for.
        RDMA_NLDEV_ATTR_STAT_RES = 75,
        /// `u32`: criteria of automatic binding.
        RDMA_NLDEV_ATTR_STAT_AUTO_MODE_MASK = 76,
        /// Nest of [`RDMA_NLDEV_ATTR_STAT_COUNTER_ENTRY`].
        RDMA_NLDEV_ATTR_STAT_COUNTER = 77,
        /// Nest: one counter.
        RDMA_NLDEV_ATTR_STAT_COUNTER_ENTRY = 78,
        /// `u32`.
        RDMA_NLDEV_ATTR_STAT_COUNTER_ID = 79,
        /// Nest of [`RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY`].
        RDMA_NLDEV_ATTR_STAT_HWCOUNTERS = 80,
        /// Nest: one value.
        RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY = 81,
        /// String.
        RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME = 82,
        /// `u64`.
        RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE = 83,
        /// `u8`: adaptive moderation of completion queues.
        RDMA_NLDEV_ATTR_DEV_DIM = 84,
        /// Bytes in the driver's own format.
        RDMA_NLDEV_ATTR_RES_RAW = 85,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_CTX_ENTRY`].
        RDMA_NLDEV_ATTR_RES_CTX = 86,
        /// Nest: one user context.
        RDMA_NLDEV_ATTR_RES_CTX_ENTRY = 87,
        /// Nest of [`RDMA_NLDEV_ATTR_RES_SRQ_ENTRY`].
        RDMA_NLDEV_ATTR_RES_SRQ = 88,
        /// Nest: one shared receive queue.
        RDMA_NLDEV_ATTR_RES_SRQ_ENTRY = 89,
        /// `u32`: id of a shared receive queue.
        RDMA_NLDEV_ATTR_RES_SRQN = 90,
        /// `u32`: first number of a range.
        RDMA_NLDEV_ATTR_MIN_RANGE = 91,
        /// `u32`: last number of a range.
        RDMA_NLDEV_ATTR_MAX_RANGE = 92,
        /// `u8`: 1 where fork copies pinned pages for the child.
        RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK = 93,
        /// `u32`.
        RDMA_NLDEV_ATTR_STAT_HWCOUNTER_INDEX = 94,
        /// `u8`: the counter can be switched.
        RDMA_NLDEV_ATTR_STAT_HWCOUNTER_DYNAMIC = 95,
        /// `u8`: controlled queue keys need a privilege.
        RDMA_NLDEV_SYS_ATTR_PRIVILEGED_QKEY_MODE = 96,
        /// `u8`: ask for objects that drivers keep for themselves, too.
        RDMA_NLDEV_ATTR_DRIVER_DETAILS = 97,
        /// String: kind of a driver's own queue pair.
        RDMA_NLDEV_ATTR_RES_SUBTYPE = 98,
        /// `u8`: [`RDMA_DEVICE_TYPE_SMI`] for a sub-device of that type.
        RDMA_NLDEV_ATTR_DEV_TYPE = 99,
        /// String: the device that a sub-device belongs to.
        RDMA_NLDEV_ATTR_PARENT_NAME = 100,
        /// `u8`: 1 where user space chose the name.
        RDMA_NLDEV_ATTR_NAME_ASSIGN_TYPE = 101,
        /// `u8`: one of `RDMA_…_EVENT`.
        RDMA_NLDEV_ATTR_EVENT_TYPE = 102,
        /// `u8`: 1 where [`RDMA_NLDEV_CMD_MONITOR`] is sent.
        RDMA_NLDEV_SYS_ATTR_MONITOR_MODE = 103,
        /// `u8`.
        RDMA_NLDEV_ATTR_STAT_OPCOUNTER_ENABLED = 104,
        /// Nest of [`RDMA_NLDEV_ATTR_FRMR_POOL_ENTRY`].
        RDMA_NLDEV_ATTR_FRMR_POOLS = 105,
        /// Nest: one pool.
        RDMA_NLDEV_ATTR_FRMR_POOL_ENTRY = 106,
        /// Nest: the common properties of a pool's keys.
        RDMA_NLDEV_ATTR_FRMR_POOL_KEY = 107,
        /// `u8`.
        RDMA_NLDEV_ATTR_FRMR_POOL_KEY_ATS = 108,
        /// `u32`.
        RDMA_NLDEV_ATTR_FRMR_POOL_KEY_ACCESS_FLAGS = 109,
        /// `u64`.
        RDMA_NLDEV_ATTR_FRMR_POOL_KEY_VENDOR_KEY = 110,
        /// `u64`.
        RDMA_NLDEV_ATTR_FRMR_POOL_KEY_NUM_DMA_BLOCKS = 111,
        /// `u32`.
        RDMA_NLDEV_ATTR_FRMR_POOL_QUEUE_HANDLES = 112,
        /// `u64`.
        RDMA_NLDEV_ATTR_FRMR_POOL_MAX_IN_USE = 113,
        /// `u64`.
        RDMA_NLDEV_ATTR_FRMR_POOL_IN_USE = 114,
        /// `u32`: seconds.
        RDMA_NLDEV_ATTR_FRMR_POOLS_AGING_PERIOD = 115,
        /// `u32`.
        RDMA_NLDEV_ATTR_FRMR_POOL_PINNED_HANDLES = 116,
        /// `u64`.
        RDMA_NLDEV_ATTR_FRMR_POOL_KEY_KERNEL_VENDOR_KEY = 117,
        /// `u64`: how many of a kind the device takes.
        RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_MAX = 118,
    }

    enum rdma_nldev_print_type: u8 {
        /// Decimal.
        RDMA_NLDEV_PRINT_TYPE_UNSPEC = 0,
        /// Hexadecimal.
        RDMA_NLDEV_PRINT_TYPE_HEX = 1,
    }

    enum rdma_nl_dev_type: u8 {
        /// Sub-device that carries subnet management.
        RDMA_DEVICE_TYPE_SMI = 1,
    }

    enum rdma_nl_notify_event_type: u8 {
        /// A device was registered.
        RDMA_REGISTER_EVENT = 0,
        /// A device was unregistered.
        RDMA_UNREGISTER_EVENT = 1,
        /// A port got a network interface.
        RDMA_NETDEV_ATTACH_EVENT = 2,
        /// A port lost its network interface.
        RDMA_NETDEV_DETACH_EVENT = 3,
        /// A device was renamed.
        RDMA_RENAME_EVENT = 4,
        /// The network interface of a port was renamed.
        RDMA_NETDEV_RENAME_EVENT = 5,
    }
}

// One constant per enumerator of `rdma_nldev_attr` and no gap: the last one known is the highest.
const _: () = assert!(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_MAX == 118);
const _: () = assert!(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET) == 0x1401);
