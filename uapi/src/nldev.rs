//! RDMA netlink: the numbers of `include/uapi/rdma/rdma_netlink.h`, complete up to Linux 7.2.
//!
//! The message type of a request is [`RDMA_NL_GET_TYPE`] of [`RDMA_NL_NLDEV`] and a command; its
//! attributes are ordinary netlink attributes in host byte order. The kernel checks requests
//! strictly: an attribute that the command does not take is `EINVAL`.

/// Protocol of the netlink socket (`include/uapi/linux/netlink.h`).
pub const NETLINK_RDMA: u32 = 20;

/// Client of the iWARP port mapper.
pub const RDMA_NL_IWCM: u16 = 2;
/// Not used.
pub const RDMA_NL_RSVD: u16 = 3;
/// Client of local services (path resolution).
pub const RDMA_NL_LS: u16 = 4;
/// Client of everything about devices.
pub const RDMA_NL_NLDEV: u16 = 5;

/// Multicast group of the iWARP port mapper.
pub const RDMA_NL_GROUP_IWPM: u32 = 2;
/// Multicast group of local services.
pub const RDMA_NL_GROUP_LS: u32 = 3;
/// Multicast group of [`RDMA_NLDEV_CMD_MONITOR`].
pub const RDMA_NL_GROUP_NOTIFY: u32 = 4;

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

/// InfiniBand or RoCE channel adapter.
pub const RDMA_NODE_IB_CA: u8 = 1;
/// InfiniBand switch.
pub const RDMA_NODE_IB_SWITCH: u8 = 2;
/// InfiniBand router.
pub const RDMA_NODE_IB_ROUTER: u8 = 3;
/// iWARP interface.
pub const RDMA_NODE_RNIC: u8 = 4;
/// Cisco usNIC.
pub const RDMA_NODE_USNIC: u8 = 5;
/// Cisco usNIC over UDP.
pub const RDMA_NODE_USNIC_UDP: u8 = 6;
/// A transport of its own (EFA, for one).
pub const RDMA_NODE_UNSPECIFIED: u8 = 7;

/// Describes a device; by index, or all of them as a dump.
pub const RDMA_NLDEV_CMD_GET: u16 = 1;
/// Renames a device, moves it to a network namespace or sets adaptive moderation.
pub const RDMA_NLDEV_CMD_SET: u16 = 2;
/// Makes a software device on a network interface.
pub const RDMA_NLDEV_CMD_NEWLINK: u16 = 3;
/// Removes a software device.
pub const RDMA_NLDEV_CMD_DELLINK: u16 = 4;
/// Describes a port; one, or all of a device as a dump.
pub const RDMA_NLDEV_CMD_PORT_GET: u16 = 5;
/// Describes settings of the whole subsystem.
pub const RDMA_NLDEV_CMD_SYS_GET: u16 = 6;
/// Changes settings of the whole subsystem.
pub const RDMA_NLDEV_CMD_SYS_SET: u16 = 7;
/// Counts a device's objects by kind; all devices as a dump.
pub const RDMA_NLDEV_CMD_RES_GET: u16 = 9;
/// Describes queue pairs.
pub const RDMA_NLDEV_CMD_RES_QP_GET: u16 = 10;
/// Describes connection manager ids.
pub const RDMA_NLDEV_CMD_RES_CM_ID_GET: u16 = 11;
/// Describes completion queues.
pub const RDMA_NLDEV_CMD_RES_CQ_GET: u16 = 12;
/// Describes memory regions.
pub const RDMA_NLDEV_CMD_RES_MR_GET: u16 = 13;
/// Describes protection domains.
pub const RDMA_NLDEV_CMD_RES_PD_GET: u16 = 14;
/// Names the character device of a client ("uverbs", "umad"…) for a device. Never a dump.
pub const RDMA_NLDEV_CMD_GET_CHARDEV: u16 = 15;
/// Configures or binds statistics counters.
pub const RDMA_NLDEV_CMD_STAT_SET: u16 = 16;
/// Reads statistics counters.
pub const RDMA_NLDEV_CMD_STAT_GET: u16 = 17;
/// Unbinds a statistics counter.
pub const RDMA_NLDEV_CMD_STAT_DEL: u16 = 18;
/// Dumps the driver's own image of a queue pair.
pub const RDMA_NLDEV_CMD_RES_QP_GET_RAW: u16 = 19;
/// Dumps the driver's own image of a completion queue.
pub const RDMA_NLDEV_CMD_RES_CQ_GET_RAW: u16 = 20;
/// Dumps the driver's own image of a memory region.
pub const RDMA_NLDEV_CMD_RES_MR_GET_RAW: u16 = 21;
/// Describes user contexts.
pub const RDMA_NLDEV_CMD_RES_CTX_GET: u16 = 22;
/// Describes shared receive queues.
pub const RDMA_NLDEV_CMD_RES_SRQ_GET: u16 = 23;
/// Lists which optional counters are on.
pub const RDMA_NLDEV_CMD_STAT_GET_STATUS: u16 = 24;
/// Dumps the driver's own image of a shared receive queue.
pub const RDMA_NLDEV_CMD_RES_SRQ_GET_RAW: u16 = 25;
/// Makes a sub-device of a device.
pub const RDMA_NLDEV_CMD_NEWDEV: u16 = 26;
/// Removes a sub-device.
pub const RDMA_NLDEV_CMD_DELDEV: u16 = 27;
/// Notification, sent by the kernel: a device or its network interface came, went or was renamed.
pub const RDMA_NLDEV_CMD_MONITOR: u16 = 28;
/// Describes pools of reusable memory keys.
pub const RDMA_NLDEV_CMD_FRMR_POOLS_GET: u16 = 29;
/// Configures pools of reusable memory keys.
pub const RDMA_NLDEV_CMD_FRMR_POOLS_SET: u16 = 30;

/// Padding before a 64-bit value; carries nothing.
pub const RDMA_NLDEV_ATTR_PAD: u16 = 0;
/// `u32`: identity of a device, handed out cyclically.
pub const RDMA_NLDEV_ATTR_DEV_INDEX: u16 = 1;
/// String: name of a device.
pub const RDMA_NLDEV_ATTR_DEV_NAME: u16 = 2;
/// `u32`: port number from 1; in answers to [`RDMA_NLDEV_CMD_GET`] the number of ports.
pub const RDMA_NLDEV_ATTR_PORT_INDEX: u16 = 3;
/// `u64`: capability bits of a device or an InfiniBand port.
pub const RDMA_NLDEV_ATTR_CAP_FLAGS: u16 = 4;
/// String: firmware version; absent where there is no firmware.
pub const RDMA_NLDEV_ATTR_FW_VERSION: u16 = 5;
/// `u64`, host order.
pub const RDMA_NLDEV_ATTR_NODE_GUID: u16 = 6;
/// `u64`, host order.
pub const RDMA_NLDEV_ATTR_SYS_IMAGE_GUID: u16 = 7;
/// `u64`, host order; InfiniBand ports only.
pub const RDMA_NLDEV_ATTR_SUBNET_PREFIX: u16 = 8;
/// `u32`: InfiniBand ports only.
pub const RDMA_NLDEV_ATTR_LID: u16 = 9;
/// `u32`: InfiniBand ports only.
pub const RDMA_NLDEV_ATTR_SM_LID: u16 = 10;
/// `u8`: InfiniBand ports only.
pub const RDMA_NLDEV_ATTR_LMC: u16 = 11;
/// `u8`: logical state.
pub const RDMA_NLDEV_ATTR_PORT_STATE: u16 = 12;
/// `u8`: physical state.
pub const RDMA_NLDEV_ATTR_PORT_PHYS_STATE: u16 = 13;
/// `u8`: one of `RDMA_NODE_…`.
pub const RDMA_NLDEV_ATTR_DEV_NODE_TYPE: u16 = 14;
/// Nest of [`RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_SUMMARY: u16 = 15;
/// Nest: one kind of object.
pub const RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY: u16 = 16;
/// String: the kind, "pd", "cq", "qp", "cm_id", "mr", "ctx" or "srq".
pub const RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME: u16 = 17;
/// `u64`: objects that exist now.
pub const RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR: u16 = 18;
/// Nest of [`RDMA_NLDEV_ATTR_RES_QP_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_QP: u16 = 19;
/// Nest: one queue pair.
pub const RDMA_NLDEV_ATTR_RES_QP_ENTRY: u16 = 20;
/// `u32`: local queue pair number.
pub const RDMA_NLDEV_ATTR_RES_LQPN: u16 = 21;
/// `u32`: remote queue pair number; connected types only.
pub const RDMA_NLDEV_ATTR_RES_RQPN: u16 = 22;
/// `u32`: next packet expected; connected types only.
pub const RDMA_NLDEV_ATTR_RES_RQ_PSN: u16 = 23;
/// `u32`: next packet sent.
pub const RDMA_NLDEV_ATTR_RES_SQ_PSN: u16 = 24;
/// `u8`: path migration state.
pub const RDMA_NLDEV_ATTR_RES_PATH_MIG_STATE: u16 = 25;
/// `u8`: queue pair type.
pub const RDMA_NLDEV_ATTR_RES_TYPE: u16 = 26;
/// `u8`: state.
pub const RDMA_NLDEV_ATTR_RES_STATE: u16 = 27;
/// `u32`: owner; objects of user space only.
pub const RDMA_NLDEV_ATTR_RES_PID: u16 = 28;
/// String: owner; objects of the kernel only.
pub const RDMA_NLDEV_ATTR_RES_KERN_NAME: u16 = 29;
/// Nest of [`RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_CM_ID: u16 = 30;
/// Nest: one connection manager id.
pub const RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY: u16 = 31;
/// `u32`: port space.
pub const RDMA_NLDEV_ATTR_RES_PS: u16 = 32;
/// `struct __kernel_sockaddr_storage`.
pub const RDMA_NLDEV_ATTR_RES_SRC_ADDR: u16 = 33;
/// `struct __kernel_sockaddr_storage`.
pub const RDMA_NLDEV_ATTR_RES_DST_ADDR: u16 = 34;
/// Nest of [`RDMA_NLDEV_ATTR_RES_CQ_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_CQ: u16 = 35;
/// Nest: one completion queue.
pub const RDMA_NLDEV_ATTR_RES_CQ_ENTRY: u16 = 36;
/// `u32`: size of a completion queue.
pub const RDMA_NLDEV_ATTR_RES_CQE: u16 = 37;
/// `u64`: users of an object.
pub const RDMA_NLDEV_ATTR_RES_USECNT: u16 = 38;
/// `u8`: how the kernel polls it.
pub const RDMA_NLDEV_ATTR_RES_POLL_CTX: u16 = 39;
/// Nest of [`RDMA_NLDEV_ATTR_RES_MR_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_MR: u16 = 40;
/// Nest: one memory region.
pub const RDMA_NLDEV_ATTR_RES_MR_ENTRY: u16 = 41;
/// `u32`: needs CAP_NET_ADMIN.
pub const RDMA_NLDEV_ATTR_RES_RKEY: u16 = 42;
/// `u32`: needs CAP_NET_ADMIN.
pub const RDMA_NLDEV_ATTR_RES_LKEY: u16 = 43;
/// `u64`.
pub const RDMA_NLDEV_ATTR_RES_IOVA: u16 = 44;
/// `u64`: bytes.
pub const RDMA_NLDEV_ATTR_RES_MRLEN: u16 = 45;
/// Nest of [`RDMA_NLDEV_ATTR_RES_PD_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_PD: u16 = 46;
/// Nest: one protection domain.
pub const RDMA_NLDEV_ATTR_RES_PD_ENTRY: u16 = 47;
/// `u32`: needs CAP_NET_ADMIN.
pub const RDMA_NLDEV_ATTR_RES_LOCAL_DMA_LKEY: u16 = 48;
/// `u32`: needs CAP_NET_ADMIN.
pub const RDMA_NLDEV_ATTR_RES_UNSAFE_GLOBAL_RKEY: u16 = 49;
/// `u32`: network interface behind a port, where it is in the asker's namespace.
pub const RDMA_NLDEV_ATTR_NDEV_INDEX: u16 = 50;
/// String: its name.
pub const RDMA_NLDEV_ATTR_NDEV_NAME: u16 = 51;
/// Nest of what the driver adds.
pub const RDMA_NLDEV_ATTR_DRIVER: u16 = 52;
/// Nest: one key and value of the driver's.
pub const RDMA_NLDEV_ATTR_DRIVER_ENTRY: u16 = 53;
/// String.
pub const RDMA_NLDEV_ATTR_DRIVER_STRING: u16 = 54;
/// `u8`: [`RDMA_NLDEV_PRINT_TYPE_UNSPEC`] or [`RDMA_NLDEV_PRINT_TYPE_HEX`].
pub const RDMA_NLDEV_ATTR_DRIVER_PRINT_TYPE: u16 = 55;
/// `i32`.
pub const RDMA_NLDEV_ATTR_DRIVER_S32: u16 = 56;
/// `u32`.
pub const RDMA_NLDEV_ATTR_DRIVER_U32: u16 = 57;
/// `i64`.
pub const RDMA_NLDEV_ATTR_DRIVER_S64: u16 = 58;
/// `u64`.
pub const RDMA_NLDEV_ATTR_DRIVER_U64: u16 = 59;
/// `u32`: id of a protection domain.
pub const RDMA_NLDEV_ATTR_RES_PDN: u16 = 60;
/// `u32`: id of a completion queue.
pub const RDMA_NLDEV_ATTR_RES_CQN: u16 = 61;
/// `u32`: id of a memory region.
pub const RDMA_NLDEV_ATTR_RES_MRN: u16 = 62;
/// `u32`: id of a connection manager id.
pub const RDMA_NLDEV_ATTR_RES_CM_IDN: u16 = 63;
/// `u32`: id of a user context.
pub const RDMA_NLDEV_ATTR_RES_CTXN: u16 = 64;
/// String: "rxe" or "siw".
pub const RDMA_NLDEV_ATTR_LINK_TYPE: u16 = 65;
/// `u8`: 1 devices are shared by all network namespaces, 0 each is in one.
pub const RDMA_NLDEV_SYS_ATTR_NETNS_MODE: u16 = 66;
/// String: "ib", "roce", "iw", "opa" or "usnic", by the first port.
pub const RDMA_NLDEV_ATTR_DEV_PROTOCOL: u16 = 67;
/// `u32`: file descriptor of a network namespace.
pub const RDMA_NLDEV_NET_NS_FD: u16 = 68;
/// String: which client is asked for, "uverbs", "umad"…
pub const RDMA_NLDEV_ATTR_CHARDEV_TYPE: u16 = 69;
/// String: name of the node, without directory.
pub const RDMA_NLDEV_ATTR_CHARDEV_NAME: u16 = 70;
/// `u64`: for "uverbs" the driver's ABI version.
pub const RDMA_NLDEV_ATTR_CHARDEV_ABI: u16 = 71;
/// `u64`: device number in the kernel's `huge_encode_dev` form.
pub const RDMA_NLDEV_ATTR_CHARDEV: u16 = 72;
/// `u32` on the wire (the header's comment says `u64`): `enum rdma_driver_id`.
pub const RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID: u16 = 73;
/// `u32`: how counters bind.
pub const RDMA_NLDEV_ATTR_STAT_MODE: u16 = 74;
/// `u32`: the kind of object a counter is for.
pub const RDMA_NLDEV_ATTR_STAT_RES: u16 = 75;
/// `u32`: criteria of automatic binding.
pub const RDMA_NLDEV_ATTR_STAT_AUTO_MODE_MASK: u16 = 76;
/// Nest of [`RDMA_NLDEV_ATTR_STAT_COUNTER_ENTRY`].
pub const RDMA_NLDEV_ATTR_STAT_COUNTER: u16 = 77;
/// Nest: one counter.
pub const RDMA_NLDEV_ATTR_STAT_COUNTER_ENTRY: u16 = 78;
/// `u32`.
pub const RDMA_NLDEV_ATTR_STAT_COUNTER_ID: u16 = 79;
/// Nest of [`RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY`].
pub const RDMA_NLDEV_ATTR_STAT_HWCOUNTERS: u16 = 80;
/// Nest: one value.
pub const RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY: u16 = 81;
/// String.
pub const RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME: u16 = 82;
/// `u64`.
pub const RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE: u16 = 83;
/// `u8`: adaptive moderation of completion queues.
pub const RDMA_NLDEV_ATTR_DEV_DIM: u16 = 84;
/// Bytes in the driver's own format.
pub const RDMA_NLDEV_ATTR_RES_RAW: u16 = 85;
/// Nest of [`RDMA_NLDEV_ATTR_RES_CTX_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_CTX: u16 = 86;
/// Nest: one user context.
pub const RDMA_NLDEV_ATTR_RES_CTX_ENTRY: u16 = 87;
/// Nest of [`RDMA_NLDEV_ATTR_RES_SRQ_ENTRY`].
pub const RDMA_NLDEV_ATTR_RES_SRQ: u16 = 88;
/// Nest: one shared receive queue.
pub const RDMA_NLDEV_ATTR_RES_SRQ_ENTRY: u16 = 89;
/// `u32`: id of a shared receive queue.
pub const RDMA_NLDEV_ATTR_RES_SRQN: u16 = 90;
/// `u32`: first number of a range.
pub const RDMA_NLDEV_ATTR_MIN_RANGE: u16 = 91;
/// `u32`: last number of a range.
pub const RDMA_NLDEV_ATTR_MAX_RANGE: u16 = 92;
/// `u8`: 1 where fork copies pinned pages for the child.
pub const RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK: u16 = 93;
/// `u32`.
pub const RDMA_NLDEV_ATTR_STAT_HWCOUNTER_INDEX: u16 = 94;
/// `u8`: the counter can be switched.
pub const RDMA_NLDEV_ATTR_STAT_HWCOUNTER_DYNAMIC: u16 = 95;
/// `u8`: controlled queue keys need a privilege.
pub const RDMA_NLDEV_SYS_ATTR_PRIVILEGED_QKEY_MODE: u16 = 96;
/// `u8`: ask for objects that drivers keep for themselves, too.
pub const RDMA_NLDEV_ATTR_DRIVER_DETAILS: u16 = 97;
/// String: kind of a driver's own queue pair.
pub const RDMA_NLDEV_ATTR_RES_SUBTYPE: u16 = 98;
/// `u8`: [`RDMA_DEVICE_TYPE_SMI`] for a sub-device of that type.
pub const RDMA_NLDEV_ATTR_DEV_TYPE: u16 = 99;
/// String: the device that a sub-device belongs to.
pub const RDMA_NLDEV_ATTR_PARENT_NAME: u16 = 100;
/// `u8`: 1 where user space chose the name.
pub const RDMA_NLDEV_ATTR_NAME_ASSIGN_TYPE: u16 = 101;
/// `u8`: one of `RDMA_…_EVENT`.
pub const RDMA_NLDEV_ATTR_EVENT_TYPE: u16 = 102;
/// `u8`: 1 where [`RDMA_NLDEV_CMD_MONITOR`] is sent.
pub const RDMA_NLDEV_SYS_ATTR_MONITOR_MODE: u16 = 103;
/// `u8`.
pub const RDMA_NLDEV_ATTR_STAT_OPCOUNTER_ENABLED: u16 = 104;
/// Nest of [`RDMA_NLDEV_ATTR_FRMR_POOL_ENTRY`].
pub const RDMA_NLDEV_ATTR_FRMR_POOLS: u16 = 105;
/// Nest: one pool.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_ENTRY: u16 = 106;
/// Nest: what the keys of a pool have in common.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_KEY: u16 = 107;
/// `u8`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_KEY_ATS: u16 = 108;
/// `u32`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_KEY_ACCESS_FLAGS: u16 = 109;
/// `u64`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_KEY_VENDOR_KEY: u16 = 110;
/// `u64`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_KEY_NUM_DMA_BLOCKS: u16 = 111;
/// `u32`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_QUEUE_HANDLES: u16 = 112;
/// `u64`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_MAX_IN_USE: u16 = 113;
/// `u64`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_IN_USE: u16 = 114;
/// `u32`: seconds.
pub const RDMA_NLDEV_ATTR_FRMR_POOLS_AGING_PERIOD: u16 = 115;
/// `u32`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_PINNED_HANDLES: u16 = 116;
/// `u64`.
pub const RDMA_NLDEV_ATTR_FRMR_POOL_KEY_KERNEL_VENDOR_KEY: u16 = 117;

/// Decimal.
pub const RDMA_NLDEV_PRINT_TYPE_UNSPEC: u8 = 0;
/// Hexadecimal.
pub const RDMA_NLDEV_PRINT_TYPE_HEX: u8 = 1;

/// Sub-device that carries subnet management.
pub const RDMA_DEVICE_TYPE_SMI: u8 = 1;

/// A device was registered.
pub const RDMA_REGISTER_EVENT: u8 = 0;
/// A device was unregistered.
pub const RDMA_UNREGISTER_EVENT: u8 = 1;
/// A port got a network interface.
pub const RDMA_NETDEV_ATTACH_EVENT: u8 = 2;
/// A port lost its network interface.
pub const RDMA_NETDEV_DETACH_EVENT: u8 = 3;
/// A device was renamed.
pub const RDMA_RENAME_EVENT: u8 = 4;
/// The network interface of a port was renamed.
pub const RDMA_NETDEV_RENAME_EVENT: u8 = 5;

// One constant per enumerator of `rdma_nldev_attr` and no gap: the last one known is the highest.
const _: () = assert!(RDMA_NLDEV_ATTR_FRMR_POOL_KEY_KERNEL_VENDOR_KEY == 117);
const _: () = assert!(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET) == 0x1401);
