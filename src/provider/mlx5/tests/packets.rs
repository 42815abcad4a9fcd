//! Raw packets bit for bit.

use super::{SGE, Sender, Shape};
use crate::provider::mlx5::context::RawPacketLimits;
use crate::qp::state::QpType;
use crate::wr::{Packet, PostError, QpTransport, SendWr};

const HEADER: [u8; 18] =
    [0x02, 0, 0, 0, 0, 0x0b, 0x02, 0, 0, 0, 0, 0x0a, 0x81, 0x00, 0x00, 0x2a, 0x08, 0x00];
/// The Ethernet segment without offloads and inline header.
const PLAIN: &str = "00000000000000000000000000000000";
const DATA: &str = "00001000010404001122334455667788";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn device(min_header: u8, checksums: bool) -> Sender {
    let raw_packet = RawPacketLimits { min_header, checksums };
    Sender::new(Shape { raw_packet, ..Shape::default() })
}

fn push(sends: &mut Sender, wr: SendWr<'_>) -> Result<(), PostError> {
    sends.ring.transport = QpTransport { qp_type: QpType::RAW_PACKET, ..super::transport(&wr) };
    let mut cursor = sends.ring.begin();
    sends.ring.push_checked(&mut cursor, &wr)?;
    sends.ring.ring(&cursor, false).map_err(PostError::from)
}

/// The bytes of one request on such a device.
fn posted(min_header: u8, wr: SendWr<'_>) -> String {
    let mut sends = device(min_header, true);
    push(&mut sends, wr).unwrap();
    let segments = usize::from(sends.bytes(0, 16)[7]);
    hex(&sends.bytes(0, segments * 16))
}

#[test]
fn a_device_that_wants_no_headers_gets_none() {
    let control = "0000000a000042030000000800000000";
    let expected = format!("{control}{PLAIN}{DATA}");
    assert_eq!(posted(0, SendWr::send(&[SGE]).signaled()), expected);
    assert_eq!(posted(0, SendWr::packet(Packet::new(), &[SGE]).signaled()), expected);
    let sums = "00000000c00000000000000000000000";
    let control = "0000000a000042030000000000000000";
    let wr = SendWr::packet(Packet::new().ip_checksum(), &[SGE]);
    assert_eq!(posted(0, wr), format!("{control}{sums}{DATA}"));
}

#[test]
fn a_queue_that_signals_all_signals_packets_asked_for_or_not() {
    for wr in [SendWr::send(&[SGE]), SendWr::send(&[SGE]).signaled()] {
        let mut sends = Sender::new(Shape { signal_all: true, ..Shape::default() });
        push(&mut sends, wr).unwrap();
        assert_eq!(hex(&sends.bytes(0, 16)), "0000000a000042030000000800000000");
    }
}

#[test]
fn headers_are_in_their_segment() {
    let head = "0000000000000000000000000012";
    let expected = format!("0000000a000042040000000000000000{head}{}{DATA}", hex(&HEADER));
    let wr = SendWr::packet(Packet::new().header(&HEADER), &[SGE]);
    assert_eq!(posted(0, wr), expected);
    assert_eq!(posted(18, wr), expected);
    // Without a VLAN tag, and with as many header bytes as one segment holds.
    let wr = SendWr::packet(Packet::new().header(&HEADER[..14]), &[SGE]);
    let head = format!("000000000000000000000000000e{}00000000", hex(&HEADER[..14]));
    assert_eq!(posted(0, wr), format!("0000000a000042040000000000000000{head}{DATA}"));
    let wr = SendWr::packet(Packet::new().header(&HEADER[..2]), &[SGE]);
    let head = "00000000000000000000000000020200";
    assert_eq!(posted(0, wr), format!("0000000a000042030000000000000000{head}{DATA}"));
}

/// A ConnectX-4 requires the packet's headers inline: the library takes them from the front of the data.
#[test]
fn inline_data_begins_in_the_segment() {
    let frame: Vec<u8> = HEADER.iter().copied().chain(1..=8).collect();
    let inline = "800000080102030405060708";
    let head = format!("0000000000000000000000000012{}", hex(&HEADER));
    let found = posted(18, SendWr::send(&[]).inline(&frame));
    assert!(
        found.starts_with(&format!("0000000a000042040000000000000000{head}{inline}")),
        "{found}"
    );
    let packet = Packet::new().header(&HEADER[..12]);
    assert_eq!(posted(18, SendWr::packet(packet, &[]).inline(&frame[12..])), found);
    let slices = [&frame[..5], &[], &frame[5..20], &frame[20..]];
    assert_eq!(posted(18, SendWr::send(&[]).inline_list(&slices)), found);
    // A device that requires no inline header gets all data behind the segment.
    let found = posted(0, SendWr::send(&[]).inline(&frame));
    let inline = format!("8000001a{}", hex(&frame));
    assert!(
        found.starts_with(&format!("0000000a000042040000000000000000{PLAIN}{inline}")),
        "{found}"
    );
    // No data is left behind the segment.
    let found = posted(18, SendWr::send(&[]).inline(&HEADER));
    assert_eq!(found, format!("0000000a000042030000000000000000{head}"));
}

#[test]
fn requests_that_the_device_lacks_are_refused() {
    let refused = |min, wr: SendWr<'_>| {
        let mut sends = device(min, false);
        let error = push(&mut sends, wr).unwrap_err();
        assert_eq!(sends.ring.begin().head, 0);
        error
    };
    let min = PostError::HeaderTooShort { min: 18 };
    assert_eq!(refused(18, SendWr::send(&[SGE])), min);
    assert_eq!(refused(18, SendWr::packet(Packet::new().header(&HEADER[..17]), &[SGE])), min);
    assert_eq!(refused(18, SendWr::send(&[]).inline(&[0; 17])), min);
    let max = PostError::HeaderTooLong { max: 18 };
    for length in [19, 256, 300] {
        let bytes = vec![0; length];
        assert_eq!(refused(0, SendWr::packet(Packet::new().header(&bytes), &[SGE])), max);
    }
    let sums = SendWr::packet(Packet::new().ip_checksum(), &[SGE]);
    assert_eq!(refused(0, sums), PostError::NoChecksums);
    let message = SendWr::send_imm(&[SGE], 1);
    assert_eq!(refused(0, message), PostError::Unsupported);
    let many = vec![SGE; 31];
    assert_eq!(refused(0, SendWr::send(&many)), PostError::TooManySge { max: 30 });
    let long = vec![0; 1000];
    assert_eq!(refused(0, SendWr::send(&[]).inline(&long)), PostError::InlineTooLong { max: 980 });
    // A queue pair of another type takes no raw packets.
    let mut sends = Sender::new(Shape::default());
    let error = sends.post(&[SendWr::packet(Packet::new(), &[SGE])]).unwrap_err();
    assert_eq!(error, PostError::Unsupported);
}

#[test]
fn packets_fill_a_queue_and_retire() {
    let mut sends = Sender::new(Shape { wqebbs: 4, max_post: 4, ..Shape::default() });
    let wr = |id| SendWr::send(&[SGE]).id(id);
    for round in 0..3u32 {
        for at in 0..4 {
            push(&mut sends, wr((4 * round + at).into())).unwrap();
        }
        assert_eq!(push(&mut sends, wr(0)), Err(PostError::Full));
        assert_eq!(sends.dbrec.get(1), 4 * round + 4);
        assert_eq!(sends.qp.sends.complete(4 * round + 3).wr_id, u64::from(4 * round + 3));
    }
}

#[test]
fn completions_tell_tag_checksums_and_vlan() {
    use super::{Completed, cqe};
    use crate::provider::mlx5::uidx::UidxAllocator;
    use crate::provider::mlx5::wr_ids::{Receives, SharedQp};
    const RECEIVED: u8 = 2;
    let mut completed = Completed::new(16, 64);
    let qp = SharedQp::new(9, UidxAllocator::new().take().unwrap(), None, Receives::Own(4));
    completed.ring.registry().attach(&qp);
    let mut found = |checked, kinds, vlan: u16| {
        let mut core = cqe(RECEIVED, qp.uidx().get(), 0x00ab_cdef, 0);
        core[28..30].copy_from_slice(&[checked, kinds]);
        core[30..32].copy_from_slice(&vlan.to_be_bytes());
        completed.write(core);
        let wc = completed.next().unwrap();
        assert_eq!(wc.packet().flow_tag, 0xab_cdef);
        (wc.packet().ip_checksum_ok, wc.packet().vlan)
    };
    const IPV4: u8 = 2 << 2;
    const IPV6: u8 = 1 << 2;
    assert_eq!(found(7, IPV4, 0x6005), (true, None));
    assert_eq!(found(7, IPV4 | 1, 0x6005), (true, Some(0x6005)));
    assert_eq!(found(6, IPV4, 0), (true, None), "the link's is none of it");
    assert_eq!(found(7, IPV6, 0), (false, None));
    assert_eq!(found(3, IPV4, 0), (false, None), "the transport's is wrong");
    assert_eq!(found(5, IPV4, 0), (false, None), "the network's is wrong");
}
