//! The connection manager: commands and events of `/dev/infiniband/rdma_cm`.
//!
//! `rdma/rdma_user_cm.h`, `rdma/ib_user_sa.h`. The types of events and the reasons of rejections are in the kernel's
//! own `rdma/rdma_cm.h` and `rdma/ib_cm.h`, addresses in `linux/in.h`, `linux/in6.h` and `rdma/ib.h`.
//!
//! A command is written to the file with `write(2)`: an [`rdma_ucm_cmd_hdr`] and the command's struct. The kernel
//! writes its answer to the address in the field `response`. Where a field holds a socket address, the kernel uses as
//! many of its bytes as its length says.

use crate::ah::ib_uverbs_ah_attr;
use crate::endian::{Be16, Be32, Be64};
use crate::enumeration::{ids, open_enums};
use crate::layout::layouts;

layouts! {
    const LAYOUTS = "rdma/rdma_user_cm.h";

    /// Begins each command. `in` counts the bytes of the command's struct, `out` those that the
    /// kernel may write to `response`.
    struct rdma_ucm_cmd_hdr[8] {
        cmd: u32 = 0,
        r#in: u16 = 4,
        out: u16 = 6,
    }

    /// Command `RDMA_USER_CM_CMD_CREATE_ID`. Events of the id carry `uid`; with 0 there are none. `qp_type` has an
    /// effect in the port space `RDMA_PS_IB` alone.
    struct rdma_ucm_create_id[24] {
        uid: u64 = 0,
        response: u64 = 8,
        ps: u16 = 16,
        qp_type: u8 = 18,
        reserved: [u8; 5] = 19,
    }

    /// Answer of `RDMA_USER_CM_CMD_CREATE_ID`, and of both commands that join a multicast group.
    struct rdma_ucm_create_id_resp[4] {
        id: u32 = 0,
    }

    /// Command `RDMA_USER_CM_CMD_DESTROY_ID`, and `RDMA_USER_CM_CMD_LEAVE_MCAST` with the id of a
    /// membership.
    struct rdma_ucm_destroy_id[16] {
        response: u64 = 0,
        id: u32 = 8,
        reserved: u32 = 12,
    }

    /// Answer of `RDMA_USER_CM_CMD_DESTROY_ID` and `RDMA_USER_CM_CMD_LEAVE_MCAST`.
    struct rdma_ucm_destroy_id_resp[4] {
        events_reported: u32 = 0,
    }

    /// Command `RDMA_USER_CM_CMD_BIND_IP`. `addr` is a [`sockaddr_in`] or [`sockaddr_in6`].
    struct rdma_ucm_bind_ip[40] {
        response: u64 = 0,
        addr: [u8; 28] = 8,
        id: u32 = 36,
    }

    /// Command `RDMA_USER_CM_CMD_BIND`.
    struct rdma_ucm_bind[136] {
        id: u32 = 0,
        addr_size: u16 = 4,
        reserved: u16 = 6,
        addr: [u8; 128] = 8,
    }

    /// Command `RDMA_USER_CM_CMD_RESOLVE_IP`; a source of family 0 leaves the choice to the kernel.
    struct rdma_ucm_resolve_ip[64] {
        src_addr: [u8; 28] = 0,
        dst_addr: [u8; 28] = 28,
        id: u32 = 56,
        timeout_ms: u32 = 60,
    }

    /// Command `RDMA_USER_CM_CMD_RESOLVE_ADDR`; a `src_size` of 0 leaves the choice to the kernel.
    struct rdma_ucm_resolve_addr[272] {
        id: u32 = 0,
        timeout_ms: u32 = 4,
        src_size: u16 = 8,
        dst_size: u16 = 10,
        reserved: u32 = 12,
        src_addr: [u8; 128] = 16,
        dst_addr: [u8; 128] = 144,
    }

    /// Command `RDMA_USER_CM_CMD_RESOLVE_ROUTE`.
    struct rdma_ucm_resolve_route[8] {
        id: u32 = 0,
        timeout_ms: u32 = 4,
    }

    /// Commands `RDMA_USER_CM_CMD_QUERY`, where `option` selects the answer, and `RDMA_USER_CM_CMD_QUERY_ROUTE`, where
    /// it is reserved.
    struct rdma_ucm_query[16] {
        response: u64 = 0,
        id: u32 = 8,
        option: u32 = 12,
    }

    /// Answer of `RDMA_USER_CM_CMD_QUERY_ROUTE`. `node_guid` is in network order.
    struct rdma_ucm_query_route_resp[208] {
        node_guid: u64 = 0,
        ib_route: [ib_user_path_rec; 2] = 8,
        src_addr: [u8; 28] = 136,
        dst_addr: [u8; 28] = 164,
        num_paths: u32 = 192,
        port_num: u8 = 196,
        reserved: [u8; 3] = 197,
        ibdev_index: u32 = 200,
        reserved1: u32 = 204,
    }

    /// Answer of `RDMA_USER_CM_CMD_QUERY` to `RDMA_USER_CM_QUERY_ADDR` and, with addresses of family
    /// `AF_IB`, to `RDMA_USER_CM_QUERY_GID`. `node_guid` and `pkey` are in network order;
    /// `node_guid`, `port_num` and `ibdev_index` stay 0 until the id has a device.
    struct rdma_ucm_query_addr_resp[280] {
        node_guid: u64 = 0,
        port_num: u8 = 8,
        reserved: u8 = 9,
        pkey: u16 = 10,
        src_size: u16 = 12,
        dst_size: u16 = 14,
        src_addr: [u8; 128] = 16,
        dst_addr: [u8; 128] = 144,
        ibdev_index: u32 = 272,
        reserved1: u32 = 276,
    }

    /// Begins the answer of `RDMA_USER_CM_CMD_QUERY` to `RDMA_USER_CM_QUERY_PATH`; as many [`ib_path_rec_data`] follow
    /// as fit.
    struct rdma_ucm_query_path_resp[8] {
        num_paths: u32 = 0,
        reserved: u32 = 4,
    }

    /// Begins the answer of `RDMA_USER_CM_CMD_QUERY` to `RDMA_USER_CM_QUERY_IB_SERVICE`; as many
    /// [`ib_user_service_rec`] follow as fit.
    struct rdma_ucm_query_ib_service_resp[8] {
        num_service_recs: u32 = 0,
        reserved: u32 = 4,
    }

    /// Parameters of a connection, in commands and events. `valid` is 0 in an accept that only confirms the reply of a
    /// peer.
    struct rdma_ucm_conn_param[272] {
        qp_num: u32 = 0,
        qkey: u32 = 4,
        private_data: [u8; 256] = 8,
        private_data_len: u8 = 264,
        srq: u8 = 265,
        responder_resources: u8 = 266,
        initiator_depth: u8 = 267,
        flow_control: u8 = 268,
        retry_count: u8 = 269,
        rnr_retry_count: u8 = 270,
        valid: u8 = 271,
    }

    /// Parameters of a datagram peer or of a multicast group, in events.
    struct rdma_ucm_ud_param[304] {
        qp_num: u32 = 0,
        qkey: u32 = 4,
        ah_attr: ib_uverbs_ah_attr = 8,
        private_data: [u8; 256] = 40,
        private_data_len: u8 = 296,
        reserved: [u8; 7] = 297,
    }

    /// The vendor's options of a connection (ECE) that both ends support.
    struct rdma_ucm_ece[8] {
        vendor_id: u32 = 0,
        attr_mod: u32 = 4,
    }

    /// Command `RDMA_USER_CM_CMD_CONNECT`.
    struct rdma_ucm_connect[288] {
        conn_param: rdma_ucm_conn_param = 0,
        id: u32 = 272,
        reserved: u32 = 276,
        ece: rdma_ucm_ece = 280,
    }

    /// Command `RDMA_USER_CM_CMD_LISTEN`.
    struct rdma_ucm_listen[8] {
        id: u32 = 0,
        backlog: u32 = 4,
    }

    /// Command `RDMA_USER_CM_CMD_ACCEPT`. Events of the id carry `uid` from then on, if
    /// `conn_param` is valid.
    struct rdma_ucm_accept[296] {
        uid: u64 = 0,
        conn_param: rdma_ucm_conn_param = 8,
        id: u32 = 280,
        reserved: u32 = 284,
        ece: rdma_ucm_ece = 288,
    }

    /// Command `RDMA_USER_CM_CMD_REJECT`. A `reason` of 0 is `IB_CM_REJ_CONSUMER_DEFINED`.
    struct rdma_ucm_reject[264] {
        id: u32 = 0,
        private_data_len: u8 = 4,
        reason: u8 = 5,
        reserved: [u8; 2] = 6,
        private_data: [u8; 256] = 8,
    }

    /// Command `RDMA_USER_CM_CMD_DISCONNECT`.
    struct rdma_ucm_disconnect[4] {
        id: u32 = 0,
    }

    /// Command `RDMA_USER_CM_CMD_INIT_QP_ATTR`; its answer is a [`ib_uverbs_qp_attr`](crate::qp::ib_uverbs_qp_attr) for
    /// the state in the command.
    struct rdma_ucm_init_qp_attr[16] {
        response: u64 = 0,
        id: u32 = 8,
        qp_state: u32 = 12,
    }

    /// Command `RDMA_USER_CM_CMD_NOTIFY`: tells of an asynchronous event of the queue pair.
    struct rdma_ucm_notify[8] {
        id: u32 = 0,
        event: u32 = 4,
    }

    /// Command `RDMA_USER_CM_CMD_JOIN_IP_MCAST`.
    struct rdma_ucm_join_ip_mcast[48] {
        response: u64 = 0,
        uid: u64 = 8,
        addr: [u8; 28] = 16,
        id: u32 = 44,
    }

    /// Command `RDMA_USER_CM_CMD_JOIN_MCAST`.
    struct rdma_ucm_join_mcast[152] {
        response: u64 = 0,
        uid: u64 = 8,
        id: u32 = 16,
        addr_size: u16 = 20,
        join_flags: u16 = 22,
        addr: [u8; 128] = 24,
    }

    /// Command `RDMA_USER_CM_CMD_GET_EVENT`; without an event it waits, or fails with `EAGAIN` if the
    /// file does not block.
    struct rdma_ucm_get_event[8] {
        response: u64 = 0,
    }

    /// Answer of `RDMA_USER_CM_CMD_GET_EVENT`. `param` begins with a [`rdma_ucm_conn_param`], for datagrams with a
    /// [`rdma_ucm_ud_param`], and for events of `RDMA_USER_CM_CMD_WRITE_CM_EVENT` with two words of 32 bits.
    struct rdma_ucm_event_resp[336] {
        uid: u64 = 0,
        id: u32 = 8,
        event: u32 = 12,
        status: u32 = 16,
        param: [u8; 304] = 20,
        reserved: u32 = 324,
        ece: rdma_ucm_ece = 328,
    }

    /// Command `RDMA_USER_CM_CMD_SET_OPTION`; `optval` is the address of the value.
    struct rdma_ucm_set_option[24] {
        optval: u64 = 0,
        id: u32 = 8,
        level: u32 = 12,
        optname: u32 = 16,
        optlen: u32 = 20,
    }

    /// Command `RDMA_USER_CM_CMD_MIGRATE_ID`: moves an id, and its events, from the file `fd` to the file of the
    /// command.
    struct rdma_ucm_migrate_id[16] {
        response: u64 = 0,
        id: u32 = 8,
        fd: u32 = 12,
    }

    /// Answer of `RDMA_USER_CM_CMD_MIGRATE_ID`.
    struct rdma_ucm_migrate_resp[4] {
        events_reported: u32 = 0,
    }

    /// A service to look for, by its id or by its name.
    struct rdma_ucm_ib_service[80] {
        service_id: u64 = 0,
        service_name: [u8; 64] = 8,
        flags: u32 = 72,
        reserved: u32 = 76,
    }

    /// Command `RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE`.
    struct rdma_ucm_resolve_ib_service[88] {
        id: u32 = 0,
        reserved: u32 = 4,
        ibs: rdma_ucm_ib_service = 8,
    }

    /// Command `RDMA_USER_CM_CMD_WRITE_CM_EVENT`: the program's own event, with the number at the start of `param`.
    struct rdma_ucm_write_cm_event[320] {
        id: u32 = 0,
        reserved: u32 = 4,
        event: u32 = 8,
        status: u32 = 12,
        param: [u8; 304] = 16,
    }
}

layouts! {
    const LAYOUTS_SA = "rdma/ib_user_sa.h";

    /// A path record in wire format, with flags for its uses.
    struct ib_path_rec_data[72] {
        flags: u32 = 0,
        reserved: u32 = 4,
        path_rec: [u32; 16] = 8,
    }

    /// A path in fields; GIDs are in network order.
    struct ib_user_path_rec[64] {
        dgid: [u8; 16] = 0,
        sgid: [u8; 16] = 16,
        dlid: Be16 = 32,
        slid: Be16 = 34,
        raw_traffic: u32 = 36,
        flow_label: Be32 = 40,
        reversible: u32 = 44,
        mtu: u32 = 48,
        pkey: Be16 = 52,
        hop_limit: u8 = 54,
        traffic_class: u8 = 55,
        numb_path: u8 = 56,
        sl: u8 = 57,
        mtu_selector: u8 = 58,
        rate_selector: u8 = 59,
        rate: u8 = 60,
        packet_life_time_selector: u8 = 61,
        packet_life_time: u8 = 62,
        preference: u8 = 63,
    }

    /// A service record of the subnet administrator.
    struct ib_user_service_rec[176] {
        id: Be64 = 0,
        gid: [u8; 16] = 8,
        pkey: Be16 = 24,
        reserved: [u8; 2] = 26,
        lease: Be32 = 28,
        key: [u8; 16] = 32,
        name: [u8; 64] = 48,
        data_8: [u8; 16] = 112,
        data_16: [Be16; 8] = 128,
        data_32: [Be32; 4] = 144,
        data_64: [Be64; 2] = 160,
    }
}

layouts! {
    const LAYOUTS_IN = "linux/in.h";

    /// An address and port of IPv4.
    struct sockaddr_in[16] {
        sin_family: u16 = 0,
        sin_port: Be16 = 2,
        sin_addr: [u8; 4] = 4,
        __pad: [u8; 8] = 8,
    }
}

layouts! {
    const LAYOUTS_IN6 = "linux/in6.h";

    /// An address and port of IPv6.
    struct sockaddr_in6[28] {
        sin6_family: u16 = 0,
        sin6_port: Be16 = 2,
        sin6_flowinfo: Be32 = 4,
        sin6_addr: [u8; 16] = 8,
        sin6_scope_id: u32 = 24,
    }
}

layouts! {
    const LAYOUTS_IB = "rdma/ib.h";

    /// A GID and service id of InfiniBand. `sib_sid_mask` selects the bits of the service id that count.
    struct sockaddr_ib[48] {
        sib_family: u16 = 0,
        sib_pkey: Be16 = 2,
        sib_flowinfo: Be32 = 4,
        sib_addr: [u8; 16] = 8,
        sib_sid: Be64 = 24,
        sib_sid_mask: Be64 = 32,
        sib_scope_id: u64 = 40,
    }
}

ids! {
    const COMMANDS = "rdma/rdma_user_cm.h";

    enum _: u32 {
        RDMA_USER_CM_CMD_CREATE_ID = 0,
        RDMA_USER_CM_CMD_DESTROY_ID = 1,
        RDMA_USER_CM_CMD_BIND_IP = 2,
        RDMA_USER_CM_CMD_RESOLVE_IP = 3,
        RDMA_USER_CM_CMD_RESOLVE_ROUTE = 4,
        RDMA_USER_CM_CMD_QUERY_ROUTE = 5,
        RDMA_USER_CM_CMD_CONNECT = 6,
        RDMA_USER_CM_CMD_LISTEN = 7,
        RDMA_USER_CM_CMD_ACCEPT = 8,
        RDMA_USER_CM_CMD_REJECT = 9,
        RDMA_USER_CM_CMD_DISCONNECT = 10,
        RDMA_USER_CM_CMD_INIT_QP_ATTR = 11,
        RDMA_USER_CM_CMD_GET_EVENT = 12,
        /// No kernel implements it.
        RDMA_USER_CM_CMD_GET_OPTION = 13,
        RDMA_USER_CM_CMD_SET_OPTION = 14,
        RDMA_USER_CM_CMD_NOTIFY = 15,
        RDMA_USER_CM_CMD_JOIN_IP_MCAST = 16,
        RDMA_USER_CM_CMD_LEAVE_MCAST = 17,
        RDMA_USER_CM_CMD_MIGRATE_ID = 18,
        RDMA_USER_CM_CMD_QUERY = 19,
        RDMA_USER_CM_CMD_BIND = 20,
        RDMA_USER_CM_CMD_RESOLVE_ADDR = 21,
        RDMA_USER_CM_CMD_JOIN_MCAST = 22,
        RDMA_USER_CM_CMD_RESOLVE_IB_SERVICE = 23,
        RDMA_USER_CM_CMD_WRITE_CM_EVENT = 24,
    }

    enum _: u32 {
        RDMA_USER_CM_QUERY_ADDR = 0,
        RDMA_USER_CM_QUERY_PATH = 1,
        RDMA_USER_CM_QUERY_GID = 2,
        RDMA_USER_CM_QUERY_IB_SERVICE = 3,
    }

    enum _: u32 {
        RDMA_OPTION_ID = 0,
        RDMA_OPTION_IB = 1,
    }

    enum _: u32 {
        /// Type of service; one byte.
        RDMA_OPTION_ID_TOS = 0,
        /// Four bytes, 0 or not.
        RDMA_OPTION_ID_REUSEADDR = 1,
        /// Four bytes, 0 or not.
        RDMA_OPTION_ID_AFONLY = 2,
        /// Wait for an acknowledgement, 4.096 µs · 2ⁿ; one byte.
        RDMA_OPTION_ID_ACK_TIMEOUT = 3,
    }

    enum _: u32 {
        /// An array of [`ib_path_rec_data`].
        RDMA_OPTION_IB_PATH = 1,
    }

    enum _: u16 {
        RDMA_MC_JOIN_FLAG_FULLMEMBER = 0,
        RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER = 1,
        RDMA_MC_JOIN_FLAG_RESERVED = 2,
    }

    enum _: u32 {
        RDMA_USER_CM_IB_SERVICE_FLAG_ID = 1 << 0,
        RDMA_USER_CM_IB_SERVICE_FLAG_NAME = 1 << 1,
    }
}

ids! {
    const DEFINES = "rdma/rdma_user_cm.h";

    enum "#define": u32 {
        /// The version of the ABI that `abi_version` in sysfs and netlink tell.
        RDMA_USER_CM_ABI_VERSION = 4,
        /// Room for private data; each message carries less.
        RDMA_MAX_PRIVATE_DATA = 256,
        RDMA_USER_CM_IB_SERVICE_NAME_SIZE = 64,
    }
}

ids! {
    const PATH_FLAGS = "rdma/ib_user_sa.h";

    enum _: u32 {
        IB_PATH_GMP = 1,
        IB_PATH_PRIMARY = 1 << 1,
        IB_PATH_ALTERNATE = 1 << 2,
        IB_PATH_OUTBOUND = 1 << 3,
        IB_PATH_INBOUND = 1 << 4,
        IB_PATH_INBOUND_REVERSE = 1 << 5,
        IB_PATH_BIDIRECTIONAL = IB_PATH_OUTBOUND | IB_PATH_INBOUND_REVERSE,
    }
}

open_enums! {
    const PORT_SPACES = "rdma/rdma_user_cm.h";

    /// The kind of service that a port number names; also decides the transport.
    enum rdma_ucm_port_space: u16 {
        RDMA_PS_IPOIB = 0x0002,
        RDMA_PS_IB = 0x013f,
        RDMA_PS_TCP = 0x0106,
        RDMA_PS_UDP = 0x0111,
    }
}

open_enums! {
    const EVENTS = "rdma/rdma_cm.h";

    /// The type of an id's event.
    enum rdma_cm_event_type: u32 {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0,
        RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4,
        RDMA_CM_EVENT_CONNECT_RESPONSE = 5,
        RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10,
        RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_MULTICAST_JOIN = 12,
        RDMA_CM_EVENT_MULTICAST_ERROR = 13,
        RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
        RDMA_CM_EVENT_ADDRINFO_RESOLVED = 16,
        RDMA_CM_EVENT_ADDRINFO_ERROR = 17,
        RDMA_CM_EVENT_USER = 18,
        RDMA_CM_EVENT_INTERNAL = 19,
    }
}

open_enums! {
    const REJECTIONS = "rdma/ib_cm.h";

    /// The reason why a peer, or its kernel, rejected a connection: the `status` of the event.
    enum ib_cm_rej_reason: u32 {
        IB_CM_REJ_NO_QP = 1,
        IB_CM_REJ_NO_EEC = 2,
        IB_CM_REJ_NO_RESOURCES = 3,
        IB_CM_REJ_TIMEOUT = 4,
        IB_CM_REJ_UNSUPPORTED = 5,
        IB_CM_REJ_INVALID_COMM_ID = 6,
        IB_CM_REJ_INVALID_COMM_INSTANCE = 7,
        IB_CM_REJ_INVALID_SERVICE_ID = 8,
        IB_CM_REJ_INVALID_TRANSPORT_TYPE = 9,
        IB_CM_REJ_STALE_CONN = 10,
        IB_CM_REJ_RDC_NOT_EXIST = 11,
        IB_CM_REJ_INVALID_GID = 12,
        IB_CM_REJ_INVALID_LID = 13,
        IB_CM_REJ_INVALID_SL = 14,
        IB_CM_REJ_INVALID_TRAFFIC_CLASS = 15,
        IB_CM_REJ_INVALID_HOP_LIMIT = 16,
        IB_CM_REJ_INVALID_PACKET_RATE = 17,
        IB_CM_REJ_INVALID_ALT_GID = 18,
        IB_CM_REJ_INVALID_ALT_LID = 19,
        IB_CM_REJ_INVALID_ALT_SL = 20,
        IB_CM_REJ_INVALID_ALT_TRAFFIC_CLASS = 21,
        IB_CM_REJ_INVALID_ALT_HOP_LIMIT = 22,
        IB_CM_REJ_INVALID_ALT_PACKET_RATE = 23,
        IB_CM_REJ_PORT_CM_REDIRECT = 24,
        IB_CM_REJ_PORT_REDIRECT = 25,
        IB_CM_REJ_INVALID_MTU = 26,
        IB_CM_REJ_INSUFFICIENT_RESP_RESOURCES = 27,
        IB_CM_REJ_CONSUMER_DEFINED = 28,
        IB_CM_REJ_INVALID_RNR_RETRY = 29,
        IB_CM_REJ_DUPLICATE_LOCAL_COMM_ID = 30,
        IB_CM_REJ_INVALID_CLASS_VERSION = 31,
        IB_CM_REJ_INVALID_FLOW_LABEL = 32,
        IB_CM_REJ_INVALID_ALT_FLOW_LABEL = 33,
        IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED = 35,
    }

    /// The reason why a datagram service did not resolve: the `status` of the event.
    enum ib_cm_sidr_status: u32 {
        IB_SIDR_SUCCESS = 0,
        IB_SIDR_UNSUPPORTED = 1,
        IB_SIDR_REJECT = 2,
        IB_SIDR_NO_QP = 3,
        IB_SIDR_REDIRECT = 4,
        IB_SIDR_UNSUPPORTED_VERSION = 5,
    }
}
