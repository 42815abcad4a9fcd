//! Recorded and garbled answers about devices.

use super::*;
use crate::device::netlink::tests::{Script, attribute, message};

const GET: u16 = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET);
const CHARDEV: u16 = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET_CHARDEV);
const RES: u16 = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_RES_GET);
const SYS: u16 = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_SYS_GET);

/// A dump of an rxe and an mlx5 device, byte for byte as a little-endian kernel sends it.
#[cfg(target_endian = "little")]
#[rustfmt::skip]
const TWO_DEVICES: &[u8] = &[
    // Header: 128 bytes, RDMA_NLDEV_CMD_GET, NLM_F_MULTI, sequence 1.
    128, 0, 0, 0, 0x01, 0x14, 2, 0, 1, 0, 0, 0, 0x39, 0x30, 0, 0,
    8, 0, 1, 0, 0, 0, 0, 0, // DEV_INDEX 0
    9, 0, 2, 0, b'r', b'x', b'e', b'0', 0, 0, 0, 0, // DEV_NAME
    8, 0, 3, 0, 1, 0, 0, 0, // PORT_INDEX: one port
    12, 0, 4, 0, 0x36, 0x3c, 0x22, 0x01, 0, 0, 0, 0, // CAP_FLAGS
    12, 0, 6, 0, 0x56, 0x34, 0x12, 0xfe, 0xff, 0x00, 0x54, 0x50, // NODE_GUID
    12, 0, 7, 0, 0x57, 0x34, 0x12, 0xfe, 0xff, 0x00, 0x54, 0x50, // SYS_IMAGE_GUID
    5, 0, 14, 0, 1, 0, 0, 0, // DEV_NODE_TYPE: CA
    5, 0, 83, 0, 0, 0, 0, 0, // DEV_DIM
    5, 0, 101, 0, 1, 0, 0, 0, // NAME_ASSIGN_TYPE: by the user
    9, 0, 67, 0, b'r', b'o', b'c', b'e', 0, 0, 0, 0, // DEV_PROTOCOL
    12, 0, 200, 0, 1, 2, 3, 4, 5, 6, 7, 8, // an attribute of the future
    // Header: 116 bytes.
    116, 0, 0, 0, 0x01, 0x14, 2, 0, 1, 0, 0, 0, 0x39, 0x30, 0, 0,
    8, 0, 1, 0, 7, 0, 0, 0, // DEV_INDEX 7
    11, 0, 2, 0, b'm', b'l', b'x', b'5', b'_', b'0', 0, 0, // DEV_NAME
    8, 0, 3, 0, 2, 0, 0, 0, // PORT_INDEX: two ports
    4, 0, 0, 0, // padding before 64 bits
    12, 0, 4, 0, 0x36, 0x1c, 0x26, 0xb0, 0x1d, 0, 0, 0, // CAP_FLAGS
    15, 0, 5, 0, b'1', b'6', b'.', b'3', b'5', b'.', b'2', b'0', b'0', b'0', 0, 0, // FW_VERSION
    12, 0, 6, 0, 0x56, 0x34, 0x12, 0x00, 0x03, 0x9b, 0x03, 0x98, // NODE_GUID
    12, 0, 7, 0, 0x56, 0x34, 0x12, 0x00, 0x03, 0x9b, 0x03, 0x98, // SYS_IMAGE_GUID
    5, 0, 14, 0, 1, 0, 0, 0, // DEV_NODE_TYPE: CA
    7, 0, 67, 0, b'i', b'b', 0, 0, // DEV_PROTOCOL
    // NLMSG_DONE with status 0.
    20, 0, 0, 0, 3, 0, 2, 0, 1, 0, 0, 0, 0x39, 0x30, 0, 0, 0, 0, 0, 0,
];

fn client(script: &mut Script) -> Client<&mut Script> {
    Client::new(script, "list_devices")
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, format!("{value}\0").as_bytes())
}

fn entry(name: &str, count: u64) -> Vec<u8> {
    let content = [
        text(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME, name),
        attribute(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR, &count.to_ne_bytes()),
    ];
    attribute(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY, &content.concat())
}

fn chardev() -> Vec<u8> {
    [
        attribute(RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID, &14u32.to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_CHARDEV, &0xe7c0u64.to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_CHARDEV_ABI, &2u64.to_ne_bytes()),
        text(RDMA_NLDEV_ATTR_CHARDEV_NAME, "uverbs0"),
    ]
    .concat()
}

#[test]
#[cfg(target_endian = "little")]
fn a_recorded_dump_of_two_devices_is_read() {
    let mut script = Script::default().reply(TWO_DEVICES);
    let devices = client(&mut script).list().unwrap();
    assert_eq!(
        devices,
        [
            Listed {
                index: 0,
                name: "rxe0".into(),
                ports: 1,
                firmware: None,
                node_guid: Guid::new(0x5054_00ff_fe12_3456),
                sys_image_guid: Guid::new(0x5054_00ff_fe12_3457),
                node_type: Some(NodeType::CA),
                protocol: Some(Protocol::Roce),
            },
            Listed {
                index: 7,
                name: "mlx5_0".into(),
                ports: 2,
                firmware: Some("16.35.2000".into()),
                node_guid: Guid::new(0x9803_9b03_0012_3456),
                sys_image_guid: Guid::new(0x9803_9b03_0012_3456),
                node_type: Some(NodeType::CA),
                protocol: Some(Protocol::InfiniBand),
            },
        ]
    );
}

#[test]
fn a_character_device_is_read() {
    let mut script = Script::default().reply(message(CHARDEV, 0, 1, &chardev()));
    let answer = client(&mut script).uverbs_node(7).unwrap();
    let number = DeviceNumber { major: 231, minor: 192 };
    let node = Node { name: "uverbs0".into(), number, abi: 2 };
    assert_eq!(answer, NodeAnswer::Node(Uverbs { node, driver: Some(DriverId::RXE) }));
}

#[test]
fn a_driver_may_keep_its_id_to_itself() {
    let attributes = &chardev()[8..];
    let mut script = Script::default().reply(message(CHARDEV, 0, 1, attributes));
    let NodeAnswer::Node(uverbs) = client(&mut script).uverbs_node(7).unwrap() else {
        panic!("no node");
    };
    assert_eq!(uverbs.driver, None);
}

#[test]
fn a_device_without_node_is_told_from_one_that_is_gone() {
    for (status, expected) in
        [(-95, NodeAnswer::None), (-2, NodeAnswer::None), (-22, NodeAnswer::Gone)]
    {
        let status: i32 = status;
        let mut script = Script::default().reply(message(2, 0, 1, &status.to_ne_bytes()));
        assert_eq!(client(&mut script).uverbs_node(7).unwrap(), expected);
    }
    let mut script = Script::default().reply(message(2, 0, 1, &(-12i32).to_ne_bytes()));
    let error = client(&mut script).uverbs_node(7).unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM);
}

#[test]
fn resource_counts_are_read_by_name() {
    let table: Vec<u8> =
        [("pd", 2), ("cq", 3), ("qp", 5), ("cm_id", 7), ("mr", 11), ("ctx", 13), ("srq", 17)]
            .iter()
            .flat_map(|(name, count)| entry(name, *count))
            .collect();
    let summary = attribute(RDMA_NLDEV_ATTR_RES_SUMMARY, &table);
    let mut script = Script::default().reply(message(RES, 0, 1, &summary));
    let counts = client(&mut script).resources(7).unwrap();
    let kinds = [
        counts.pd(),
        counts.cq(),
        counts.qp(),
        counts.cm_id(),
        counts.mr(),
        counts.ctx(),
        counts.srq(),
    ];
    assert_eq!(kinds, [2, 3, 5, 7, 11, 13, 17].map(Some));
    assert_eq!(counts.get("dmah"), None);
    assert_eq!(counts.to_string(), "cm_id 7 cq 3 ctx 13 mr 11 pd 2 qp 5 srq 17");
}

#[test]
fn a_device_without_summary_is_not_a_device_without_objects() {
    let mut script = Script::default().reply(message(RES, 0, 1, &chardev()));
    assert_eq!(client(&mut script).resources(7).unwrap_err().errno(), Errno::BADMSG);
}

#[test]
fn settings_are_read() {
    let attributes = [
        attribute(RDMA_NLDEV_SYS_ATTR_NETNS_MODE, &[1]),
        attribute(RDMA_NLDEV_SYS_ATTR_PRIVILEGED_QKEY_MODE, &[0]),
        attribute(RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK, &[1]),
    ];
    let mut script = Script::default().reply(message(SYS, 0, 1, &attributes.concat()));
    let system = client(&mut script).system().unwrap();
    assert_eq!(system.netns_shared, Some(true));
    assert_eq!(system.privileged_qkey, Some(false));
    assert!(system.copy_on_fork && !system.monitor);
}

#[test]
fn identities_that_are_missing_or_too_wide_are_refused() {
    let name = text(RDMA_NLDEV_ATTR_DEV_NAME, "rxe0");
    let index = attribute(RDMA_NLDEV_ATTR_DEV_INDEX, &7u32.to_ne_bytes());
    let wide = attribute(RDMA_NLDEV_ATTR_DEV_INDEX, &(1u64 << 32).to_ne_bytes());
    let unnamed = text(RDMA_NLDEV_ATTR_DEV_NAME, "");
    for attributes in
        [name.clone(), index.clone(), [&wide[..], &name].concat(), [&index[..], &unnamed].concat()]
    {
        let mut script = Script::default().reply(message(GET, 0, 1, &attributes));
        let error = client(&mut script).list().unwrap_err();
        assert_eq!(error.errno(), Errno::BADMSG, "{attributes:?}");
    }
}

/// A small generator of numbers, so that a failure can be repeated from its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

#[test]
#[cfg_attr(miri, ignore = "safe code, in too many rounds")]
fn no_bytes_make_the_reader_panic() {
    let table = [entry("pd", 1), entry("qp", 2)].concat();
    let listed = [
        attribute(RDMA_NLDEV_ATTR_DEV_INDEX, &7u32.to_ne_bytes()),
        text(RDMA_NLDEV_ATTR_DEV_NAME, "rxe0"),
        attribute(RDMA_NLDEV_ATTR_NODE_GUID, &5u64.to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_RES_SUMMARY, &table),
        chardev(),
        attribute(RDMA_NLDEV_SYS_ATTR_NETNS_MODE, &[1]),
    ]
    .concat();
    let valid =
        [message(GET, 2, 1, &listed), message(3, 2, 1, &[]), message(2, 0, 1, &[0; 20])].concat();

    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut read, mut refused) = (0, 0);
    for round in 0..20_000 {
        let bytes = if round % 4 == 0 {
            (0..random.below(200)).map(|_| random.next() as u8).collect()
        } else {
            let mut bytes = valid.clone();
            for _ in 0..random.below(4) {
                let place = random.below(bytes.len());
                bytes[place] = random.next() as u8;
            }
            bytes.truncate(bytes.len() - random.below(2) * random.below(bytes.len()));
            bytes
        };
        let mut count = |failed: bool| if failed { refused += 1 } else { read += 1 };
        let scripted = || Script::default().reply(bytes.clone());
        count(client(&mut scripted()).list().is_err());
        count(client(&mut scripted()).uverbs_node(7).is_err());
        count(client(&mut scripted()).resources(7).is_err());
        count(client(&mut scripted()).system().is_err());
        count(client(&mut scripted()).port_netdev(7, 1).is_err());
    }
    // Both ways were taken often, or the mutations prove nothing.
    assert!(read > 5_000 && refused > 20_000, "read {read}, refused {refused}");
}

/// Asks everything that there is to ask, each of a kernel that answers `datagram`.
fn ask_all(datagram: &[u8]) -> bool {
    let script = || Script::default().reply(datagram).reply(datagram);
    let answered = [
        client(&mut script()).list().is_ok(),
        client(&mut script()).uverbs_node(7).is_ok(),
        client(&mut script()).uverbs_nodes([7, 8].into_iter()).is_ok(),
        client(&mut script()).rdma_cm_node().is_ok(),
        client(&mut script()).port_netdev(7, 1).is_ok(),
        client(&mut script()).resources(7).is_ok_and(|counts| !counts.to_string().is_empty()),
        client(&mut script()).system().is_ok(),
        client(&mut script()).delete_link(7).is_ok(),
    ];
    answered.contains(&true)
}

#[test]
#[cfg(target_endian = "little")]
fn any_datagram_is_an_answer_or_an_error() {
    let summary =
        attribute(RDMA_NLDEV_ATTR_RES_SUMMARY, &[entry("pd", 2), entry("qp", 5)].concat());
    let settings = [
        attribute(RDMA_NLDEV_SYS_ATTR_NETNS_MODE, &[1]),
        attribute(RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK, &[1]),
    ];
    let known = [
        TWO_DEVICES.to_vec(),
        message(CHARDEV, 0, 1, &chardev()),
        [message(CHARDEV, 0, 2, &chardev()), message(CHARDEV, 0, 1, &chardev())].concat(),
        message(RES, 0, 1, &summary),
        message(SYS, 0, 1, &settings.concat()),
        message(2, 0, 1, &(-95i32).to_ne_bytes()),
        message(3, 2, 1, &0i32.to_ne_bytes()),
    ];
    let tally = crate::tests::hostile::explore("RDMA netlink", 1, &known, ask_all);
    assert!(tally.taken > 0 && tally.refused > 0, "{tally:?}");
}
