//! Lists of devices from scripted netlink and planted sysfs, and of the running system.

use super::netlink::tests::{Script, attribute, message};
use super::sysfs::scratch::Scratch;
use super::*;
use uverbs_uapi::nldev::*;

fn listed(index: u32, name: &str) -> Vec<u8> {
    [
        attribute(RDMA_NLDEV_ATTR_DEV_INDEX, &index.to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_DEV_NAME, format!("{name}\0").as_bytes()),
        attribute(RDMA_NLDEV_ATTR_PORT_INDEX, &1u32.to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_DEV_NODE_TYPE, &[RDMA_NODE_IB_CA]),
        attribute(RDMA_NLDEV_ATTR_DEV_PROTOCOL, b"roce\0"),
    ]
    .concat()
}

fn node(name: &str, minor: u64, abi: u64, driver: Option<u32>) -> Vec<u8> {
    let mut attributes = [
        attribute(RDMA_NLDEV_ATTR_CHARDEV, &(231 << 8 | minor).to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_CHARDEV_ABI, &abi.to_ne_bytes()),
        attribute(RDMA_NLDEV_ATTR_CHARDEV_NAME, format!("{name}\0").as_bytes()),
    ]
    .concat();
    if let Some(driver) = driver {
        attributes.extend(attribute(RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID, &driver.to_ne_bytes()));
    }
    attributes
}

const GET: u16 = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET);
const CHARDEV: u16 = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET_CHARDEV);

fn dump(devices: &[(u32, &str)]) -> Vec<u8> {
    let mut datagram = Vec::new();
    for (index, name) in devices {
        datagram.extend(message(GET, 2, 1, &listed(*index, name)));
    }
    datagram.extend(message(3, 2, 1, &[0; 4]));
    datagram
}

fn failure(sequence: u32, status: i32) -> Vec<u8> {
    message(2, 0, sequence, &status.to_ne_bytes())
}

/// A system without nodes.
fn no_nodes() -> DevTree<'static> {
    DevTree::at(std::path::Path::new("/nonexistent"))
}

fn list_scripted(script: &mut Script, sysfs: &Sysfs) -> Result<Vec<Device>> {
    list(Ok(Client::new(script, "list_devices")), sysfs, &no_nodes(), "list_devices")
}

fn only(attributes: &[u8]) -> Device {
    let tree = Scratch::new("device-only");
    let mut script =
        Script::default().reply(dump(&[(0, "dev0")])).reply(message(CHARDEV, 0, 2, attributes));
    list_scripted(&mut script, &Sysfs::at(tree.path())).unwrap().remove(0)
}

#[test]
#[cfg_attr(miri, ignore = "it makes files and directories")]
fn netlink_and_sysfs_are_joined_in_index_order() {
    let tree = Scratch::new("device-join");
    let dir = "class/infiniband/mlx5_0/device/";
    tree.file(&format!("{dir}modalias"), "pci:v000015B3d0000101Dsv0\n");
    tree.file(&format!("{dir}numa_node"), "1\n");
    let mut script = Script::default()
        .reply(dump(&[(9, "rxe0"), (4, "mlx5_0"), (5, "gone0"), (6, "bare0")]))
        .reply(message(CHARDEV, 0, 2, &node("uverbs3", 195, 1, Some(1))))
        .reply(failure(3, -22))
        .reply(failure(4, -95))
        .reply(message(CHARDEV, 0, 5, &node("uverbs4", 196, 2, Some(14))));
    let devices = list_scripted(&mut script, &Sysfs::at(tree.path())).unwrap();
    let names: Vec<_> = devices.iter().map(Device::name).collect();
    assert_eq!(names, ["mlx5_0", "bare0", "rxe0"]);

    let mlx5 = &devices[0];
    assert_eq!(mlx5.index(), Some(4));
    assert_eq!(mlx5.uverbs_name(), Some("uverbs3"));
    assert_eq!(mlx5.device_number(), Some(DeviceNumber { major: 231, minor: 195 }));
    assert_eq!(mlx5.pci_id(), Some(PciId { vendor: 0x15b3, device: 0x101d }));
    assert_eq!(mlx5.numa_node(), Some(1));
    assert_eq!(mlx5.provider().unwrap(), ProviderKind::Mlx5);
    assert_eq!(mlx5.to_string(), "mlx5_0 (mlx5)");

    let bare = &devices[1];
    assert!(!bare.is_supported());
    let error = bare.open_node(crate::sync::fork::Epoch::current().unwrap()).unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV);
    assert!(error.message().contains("ib_uverbs"), "{error}");

    let rxe = &devices[2];
    assert_eq!(rxe.provider().unwrap(), ProviderKind::Rxe);
    assert_eq!(rxe.transport(), Transport::InfiniBand);
    assert_eq!(rxe.protocol(), Some(&Protocol::Roce));
    assert_eq!(rxe.pci_id(), None);
}

#[test]
#[cfg_attr(miri, ignore = "it reads directories")]
fn a_device_without_provider_names_its_driver() {
    for (driver, name) in
        [(Some(18), "siw"), (Some(99), "driver 99"), (Some(0), "unknown"), (None, "unknown")]
    {
        let device = only(&node("uverbs0", 192, 1, driver));
        let error = device.provider().unwrap_err();
        assert!(error.is_unsupported());
        let text = error.message();
        assert!(text.contains(name) && text.contains("dev0"), "{error}");
        assert!(!device.is_supported());
    }
}

#[test]
#[cfg_attr(miri, ignore = "it reads directories")]
fn an_abi_out_of_range_names_the_range() {
    let error = only(&node("uverbs0", 192, 3, Some(14))).provider().unwrap_err();
    assert!(error.is_unsupported());
    assert!(error.message().contains("ABI version 3"), "{error}");
    let known = if cfg!(target_pointer_width = "64") { "1 to 2" } else { "2 to 2" };
    assert!(error.message().contains(known), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "it makes files and directories")]
fn a_driver_without_id_is_known_by_its_pci_function() {
    let tree = Scratch::new("device-no-id");
    tree.file("class/infiniband/dev0/device/modalias", "pci:v000015B3d00001019sv0\n");
    tree.link("class/infiniband/dev1/device/driver", "../drivers/ib_mthca");
    let mut script = Script::default()
        .reply(dump(&[(0, "dev0"), (1, "dev1")]))
        .reply(message(CHARDEV, 0, 2, &node("uverbs0", 192, 1, None)))
        .reply(message(CHARDEV, 0, 3, &node("uverbs1", 193, 1, None)));
    let devices = list_scripted(&mut script, &Sysfs::at(tree.path())).unwrap();
    assert_eq!(devices[0].provider().unwrap(), ProviderKind::Mlx5);
    assert!(devices[1].provider().unwrap_err().message().contains("ib_mthca"));
}

fn plant(tree: &Scratch) {
    for (path, text) in [
        ("class/infiniband_verbs/uverbs0/ibdev", "rxe0\n"),
        ("class/infiniband_verbs/uverbs0/dev", "231:192\n"),
        ("class/infiniband_verbs/uverbs0/abi_version", "2\n"),
        ("class/infiniband/rxe0/node_type", "1: CA\n"),
        ("class/infiniband/rxe0/parent", "eth0\n"),
    ] {
        tree.file(path, text);
    }
}

#[test]
#[cfg_attr(miri, ignore = "it makes files and directories")]
fn without_netlink_sysfs_is_read() {
    let tree = Scratch::new("device-fallback");
    plant(&tree);
    for errno in [Errno::PROTONOSUPPORT, Errno::AFNOSUPPORT, Errno::PERM, Errno::TIMEDOUT] {
        let client: Result<Client<&mut Script>> = Err(Error::from_kernel("list_devices", errno));
        let devices = list(client, &Sysfs::at(tree.path()), &no_nodes(), "list_devices").unwrap();
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].provider().unwrap(), ProviderKind::Rxe);
        assert_eq!(devices[0].index(), None);
        assert!(devices[0].resources().unwrap_err().is_unsupported());
    }
}

#[test]
#[cfg_attr(miri, ignore = "it makes files and directories")]
fn a_system_without_rdma_has_no_devices_and_no_error() {
    let tree = Scratch::new("device-none");
    let none = |errno| {
        let client: Result<Client<&mut Script>> = Err(Error::from_kernel("list_devices", errno));
        list(client, &Sysfs::at(tree.path()), &no_nodes(), "list_devices")
    };
    assert_eq!(none(Errno::PROTONOSUPPORT).unwrap(), []);
    // A failure that says nothing about RDMA is not taken for its absence.
    assert_eq!(none(Errno::MFILE).unwrap_err().errno(), Errno::MFILE);
}

#[test]
#[cfg_attr(miri, ignore = "it reads directories")]
fn a_device_that_is_not_there_names_those_that_are() {
    let device = only(&node("uverbs0", 192, 2, Some(14)));
    let error = absent("mlx5_9", &[device]);
    assert_eq!(error.errno(), Errno::NODEV);
    assert!(error.message().contains("\"mlx5_9\"") && error.message().contains("dev0"), "{error}");
    assert!(absent("mlx5_9", &[]).message().ends_with("none"));
}

#[test]
#[cfg_attr(miri, ignore = "it reads directories")]
fn ports_out_of_range_name_the_range() {
    let device = Device::planted("rxe0", DriverId::RXE, 1);
    for port in [0, 2] {
        let error = device.netdev(port).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.message().contains("ports 1 to 1"), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "it reads directories")]
fn a_node_that_passed_to_another_device_is_refused() {
    let device = only(&node("uverbs0", 192, 2, Some(14)));
    let own = device.node.clone().unwrap();
    let answer = |number| {
        NodeAnswer::Node(nldev::Uverbs { node: Node { number, ..own.clone() }, driver: None })
    };
    device.confirm(answer(own.number), &own).unwrap();
    let other = DeviceNumber { major: 231, minor: 193 };
    for answer in [answer(other), NodeAnswer::Gone, NodeAnswer::None] {
        let error = device.confirm(answer, &own).unwrap_err();
        assert_eq!(error.errno(), Errno::NODEV);
        assert!(error.message().contains("dev0"), "{error}");
    }
}

/// On a machine with devices this compares both ways of listing them and opens each; on one
/// without it still proves that asking is no error.
#[test]
#[cfg_attr(miri, ignore = "it makes files and directories")]
fn this_systems_devices_are_the_same_by_netlink_and_sysfs() {
    let devices = devices().unwrap();
    let with_node: Vec<_> =
        devices.iter().filter(|device| device.uverbs_name().is_some()).cloned().collect();
    let tree = Sysfs::system();
    let mut alike: Vec<_> = tree.list().unwrap().into_iter().map(Device::from).collect();
    // A mount of sysfs may belong to another network namespace and show more.
    alike.retain(|device| with_node.iter().any(|listed| listed.name == device.name));
    alike.sort_by_key(|device| with_node.iter().position(|listed| listed.name == device.name));
    for (listed, found) in with_node.iter().zip(&mut alike) {
        found.index = listed.index;
        // One of them looks the bus up when it is asked.
        assert_eq!(listed.bus.get(), found.bus.get());
        found.bus = listed.bus.clone();
        // Fields that sysfs does not have.
        if !listed.is_supported() {
            found.driver = listed.driver;
        }
    }
    assert_eq!(with_node, alike);
    for device in &with_node {
        let fd = device.open_node(crate::sync::fork::Epoch::current().unwrap()).unwrap();
        let stat = rustix::fs::fstat(&fd).unwrap();
        let number = device.device_number().unwrap();
        assert_eq!(stat.st_rdev, rustix::fs::makedev(number.major, number.minor));
        for port in 1..=device.port_count() {
            assert_eq!(device.netdev(port).unwrap(), tree.port_netdev(&device.name, port));
        }
    }
    println!("{} devices compared and opened", with_node.len());
}
