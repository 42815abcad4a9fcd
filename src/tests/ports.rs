//! Devices with several ports: the first on Ethernet, the second on InfiniBand.

use crate::port::LinkLayers;
use crate::uverbs::scripted::{Op, Script, ScriptedPort};
use crate::wr::Address;
use crate::{
    AddressHandle, AddressVector, Context, Errno, GidEntry, GidType, Handshake, LinkLayer,
    LinkWidth, PortState, QpAttr, QpState, QpType,
};
use uverbs_sim::Profile;
use uverbs_uapi::device::UVERBS_METHOD_QUERY_PORT_SPEED;
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;

const BOTH: [ScriptedPort; 2] = [ScriptedPort::ETHERNET, ScriptedPort::INFINIBAND];

fn open() -> (Script, Context) {
    let script = Script::new();
    script.set_ports(&BOTH);
    let context = script.open("rxe0");
    (script, context)
}

#[test]
fn each_port_has_its_own_link_and_identifiers() {
    let (_script, context) = open();
    assert_eq!(context.device().port_count(), 2);
    let [one, two] = [1, 2].map(|port| context.query_port(port).unwrap());
    assert_eq!((one.link_layer, one.lid), (LinkLayer::ETHERNET, 0));
    assert_eq!((two.link_layer, two.lid), (LinkLayer::INFINIBAND, 0x12));
    let table = context.gid_table().unwrap();
    let places: Vec<_> = table.iter().map(|entry| (entry.port, entry.index)).collect();
    assert_eq!(places, [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]);
    assert_eq!(context.query_gid(2, 3).unwrap(), table[7]);
    let chosen = context.default_gid(2).unwrap();
    assert_eq!((chosen.port, chosen.index, chosen.gid_type), (2, 0, GidType::IB));
    for port in [0, 3, 300] {
        for error in [
            context.query_port(port).unwrap_err(),
            context.query_gid(port, 0).unwrap_err(),
            context.default_gid(port).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Errno::INVAL);
            assert!(error.message().contains("rxe0 has ports 1 to 2"), "{error}");
        }
    }
    let error = context.query_gid(2, 4).unwrap_err();
    assert!(error.message().contains("index 4 of port 2, whose table has 4 entries"), "{error}");
}

#[test]
fn the_rate_of_a_port_is_the_drivers_or_that_of_its_link() {
    let (script, context) = open();
    let of_link = context.query_port_speed(1).unwrap();
    assert_eq!((of_link.mbps, of_link.of_link), (100_000, true));
    // A kernel without the method.
    let method =
        Op::Method { object: UVERBS_OBJECT_DEVICE, method: UVERBS_METHOD_QUERY_PORT_SPEED };
    script.refuse(method, Errno::PROTONOSUPPORT);
    assert_eq!(context.query_port_speed(2).unwrap(), of_link);
    script.allow(method);
    // Two ports that are aggregated.
    script.set_port_speed(2000);
    let told = context.query_port_speed(1).unwrap();
    assert_eq!((told.mbps, told.of_link), (200_000, false));
    let error = context.query_port_speed(3).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("query_port_speed", Errno::INVAL));
    assert_eq!(error.message(), "port 3; rxe0 has ports 1 to 2");
    let script = Script::new();
    script.set_ports(&[ScriptedPort { width: LinkWidth(3), ..ScriptedPort::ETHERNET }]);
    let error = script.open("rxe0").query_port_speed(1).unwrap_err();
    assert!(error.is_unsupported() && error.message().contains("unknown width 3"), "{error}");
}

/// The local identifier of an address, or its UDP port, and whether it has a global route by its own bit.
fn place(ah: &AddressHandle) -> (u16, u32) {
    match ah.address() {
        Address::Mlx5(av) => (av.rlid.get(), av.grh_gid_fl.get() >> 30),
        other => panic!("{other:?}"),
    }
}

#[test]
fn addresses_on_infiniband_have_a_local_identifier() {
    let script = Script::with(Profile::new().infiniband());
    let context = script.open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let gid = context.query_gid(1, 0).unwrap().gid;
    let near = pd.create_ah(&AddressVector::local(1, 0x77)).unwrap();
    assert_eq!(place(&near), (0x77, 0));
    let routed = AddressVector { dlid: 0x77, ..AddressVector::global(1, 0, gid) };
    assert_eq!(place(&pd.create_ah(&routed).unwrap()), (0x77, 1));
    let asked = script.log().len();
    for lost in [AddressVector::global(1, 0, gid), AddressVector::local(1, 0)] {
        let error = pd.create_ah(&lost).unwrap_err();
        assert_eq!((error.errno(), error.kernel_errno()), (Errno::INVAL, None));
        assert!(error.message().contains("port 1 is InfiniBand, where `dlid`"), "{error}");
    }
    assert_eq!(script.log().len(), asked, "the kernel was asked");
}

#[test]
fn addresses_on_ethernet_have_a_udp_port() {
    let context = Script::mlx5().open("mlx5_0");
    let pd = context.alloc_pd().unwrap();
    let entry = context.default_gid(1).unwrap();
    // The bit of the route is clear.
    let over_udp = pd.create_ah(&AddressVector::global(1, entry.index, entry.gid)).unwrap();
    assert!(place(&over_udp).0 >= 0xc000 && place(&over_udp).1 == 0);
    let error = pd.create_ah(&AddressVector::local(1, 0x77)).unwrap_err();
    assert_eq!(error.kernel_errno(), Some(Errno::INVAL));
    let error = pd.create_ah(&AddressVector::local(3, 0x77)).unwrap_err();
    assert_eq!(error.message(), "port 3 of mlx5_0, which has ports 1 to 1");
}

#[test]
fn the_link_layer_of_each_port_is_remembered_by_itself() {
    let links = LinkLayers::default();
    links.set(1, LinkLayer::ETHERNET);
    links.set(2, LinkLayer::INFINIBAND);
    let known = [0, 1, 2, 3, 64].map(|port| links.get(port));
    let expected = [LinkLayer::ETHERNET, LinkLayer::INFINIBAND].map(Some);
    assert_eq!(known, [None, expected[0], expected[1], None, None]);
}

#[test]
fn queue_pairs_connect_over_the_port_of_their_endpoint() {
    let (script, context) = open();
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(16).build().unwrap();
    let qp = || pd.qp_builder(&cq, &cq, QpType::RC).build().unwrap();
    for (port, lid) in [(1, 0), (2, 0x12)] {
        let qp = qp();
        let own = qp.endpoint(&context.query_gid(port, 1).unwrap()).unwrap();
        assert_eq!((own.lid, own.gid), (lid, context.query_gid(port, 1).unwrap().gid));
        assert_eq!(qp.path_to(&own).unwrap().port, port);
        // Within an InfiniBand subnet the local identifier is enough.
        assert_eq!(qp.path_to(&own).unwrap().global.is_some(), port == 1);
        qp.handshake(&own, &Handshake::new()).unwrap();
        assert_eq!(u32::from(script.object(qp.handle()).port), port);
        let info = qp.query().unwrap();
        assert_eq!((info.state, info.port), (QpState::RTS, port));
    }
    let refused = [0, 3].map(|port| {
        let nowhere = GidEntry { port, ..Default::default() };
        qp().endpoint(&nowhere).unwrap_err()
    });
    assert!(refused.iter().all(|error| error.message().contains("has ports 1 to 2")));
    // The library leaves a path of another port to the kernel, which knows whether it is for migration.
    let qp = qp();
    let init = QpAttr::new().state(QpState::INIT).port(2).pkey_index(0);
    qp.modify(&init.access(crate::Access::empty())).unwrap();
    let own = qp.endpoint(&qp.context().query_gid(1, 0).unwrap()).unwrap();
    let rtr = QpAttr::new().state(QpState::RTR).path(qp.path_to(&own).unwrap());
    let rtr = rtr.path_mtu(own.mtu).dest_qpn(own.qpn).rq_psn(own.psn);
    let error = qp.modify(&rtr.max_dest_rd_atomic(1).min_rnr_timer(1)).unwrap_err();
    assert_eq!((error.kernel_errno(), qp.state()), (Some(Errno::INVAL), QpState::INIT));
}

#[test]
fn a_port_that_is_down_says_so_beside_one_that_is_active() {
    let script = Script::new();
    let down = ScriptedPort { state: PortState::DOWN, ..ScriptedPort::ETHERNET };
    script.set_ports(&[down, ScriptedPort::ETHERNET]);
    let context = script.open("rxe0");
    let states = [1, 2].map(|port| context.query_port(port).unwrap().state);
    assert_eq!(states, [PortState::DOWN, PortState::ACTIVE]);
    let pd = context.alloc_pd().unwrap();
    let cq = context.cq_builder(16).build().unwrap();
    let qp = pd.qp_builder(&cq, &cq, QpType::UD).build().unwrap();
    let own = qp.endpoint(&context.query_gid(2, 0).unwrap()).unwrap();
    qp.handshake(&own, &Handshake::new()).unwrap();
    assert_eq!(script.object(qp.handle()).port, 2);
    pd.create_ah(&qp.path_to(&own).unwrap()).unwrap();
    assert!(script.log().contains(&Op::CREATE_AH));
}

#[test]
fn a_device_names_its_directory_in_sysfs_and_its_node() {
    let context = Script::new().open("rxe0");
    assert_eq!(context.device().node_path().unwrap().to_str(), Some("/dev/infiniband/uverbs0"));
    assert_eq!(context.device().sysfs_path().to_str(), Some("/sys/class/infiniband/rxe0"));
}
