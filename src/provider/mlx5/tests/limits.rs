//! Requests that just fit, that just do not fit, and that name no memory.

use super::{Receiver, SGE, Sender, Shape, SharedReceiver, bytes};
use crate::identity::Identity;
use crate::number::{Qkey, Qpn, Rkey};
use crate::wr::{Address, Destination, MaskedSwap, PostError, RecvWr, Remote, SendWr, Sge};
use uverbs_uapi::mlx5::wqe::mlx5_av;
use zerocopy::FromZeros;

const REMOTE: Remote = Remote { addr: 0x1000, rkey: Rkey(0x0a0b_0c0d) };
const NONE: Sge = Sge { length: 0, ..SGE };
const HALF: Sge = Sge { length: 1 << 30, ..SGE };
const LESS: Sge = Sge { length: (1 << 30) - 1, ..SGE };
const LONG: Sge = Sge { length: 1 << 31, ..SGE };

fn datagram<'a>(to: &'a Address, sges: &'a [Sge]) -> SendWr<'a> {
    let (qpn, qkey, domain) = (Qpn(1), Qkey(2), Identity::default());
    SendWr::send(sges).to(Destination { address: to, qpn, qkey, domain })
}

/// The device takes a length of zero as 2^31 bytes.
#[test]
fn a_request_of_one_empty_sge_names_no_memory() {
    let to = Address::Mlx5(mlx5_av::new_zeroed());
    let written = |wr: SendWr<'_>| {
        let mut sends = Sender::new(Shape::default());
        sends.post(&[wr]).unwrap();
        sends.bytes(0, 128)
    };
    assert_eq!(written(SendWr::send(&[NONE])), written(SendWr::send(&[])));
    assert_eq!(written(SendWr::write(REMOTE, &[NONE])), written(SendWr::write(REMOTE, &[])));
    assert_eq!(written(datagram(&to, &[NONE])), written(datagram(&to, &[])));
    let received = |recv: RecvWr<'_>| {
        let (mut own, mut shared) = (Receiver::new(4, 32), SharedReceiver::new(4, 32));
        own.post(&[recv]).unwrap();
        shared.post(&[recv]).unwrap();
        [bytes(&own.device, 0, 32), bytes(&shared.device, 0, 32)]
    };
    assert_eq!(received(RecvWr::new(&[NONE])), received(RecvWr::new(&[])));
}

#[test]
fn a_message_is_shorter_than_two_gibibytes() {
    let to = Address::Mlx5(mlx5_av::new_zeroed());
    let cases: [(&[Sge], bool); 4] =
        [(&[LONG], false), (&[HALF, LESS], true), (&[HALF, HALF], false), (&[LESS, LONG], false)];
    for (sges, fits) in cases {
        let expected = if fits { Ok(()) } else { Err(PostError::TooLong) };
        for wr in [SendWr::send(sges), SendWr::write(REMOTE, sges), datagram(&to, sges)] {
            let mut sends = Sender::new(Shape::default());
            assert_eq!(sends.post(&[wr]).map(drop), expected, "{wr:?}");
        }
        let recv = RecvWr::new(sges);
        assert_eq!(Receiver::new(4, 32).post(&[recv]), expected, "{sges:?}");
        assert_eq!(SharedReceiver::new(4, 64).post(&[recv]), expected, "{sges:?}");
    }
}

#[test]
fn as_many_sges_and_inline_bytes_fit_as_the_queue_takes() {
    let data = [0x5a; 981];
    let swap = MaskedSwap { compare: 1, compare_mask: 2, swap: 3, swap_mask: 4 };
    let short = Sge { length: 1, ..SGE };
    let (some, many) = ([short; 30], [short; 31]);
    let most = PostError::TooManySge { max: 30 };
    let cases = [
        (SendWr::send(&some), SendWr::send(&many), most),
        (SendWr::read(REMOTE, &some), SendWr::read(REMOTE, &many), most),
        (SendWr::fetch_add(REMOTE, 1, &some), SendWr::fetch_add(REMOTE, 1, &many), most),
        (
            SendWr::masked_compare_swap(REMOTE, &swap, &some),
            SendWr::masked_compare_swap(REMOTE, &swap, &many),
            most,
        ),
        (
            SendWr::send(&[]).inline(&data[..980]),
            SendWr::send(&[]).inline(&data),
            PostError::InlineTooLong { max: 980 },
        ),
    ];
    for (fits, does_not, error) in cases {
        let mut sends = Sender::new(Shape::default());
        assert_eq!(sends.post(&[does_not]).map(drop), Err(error));
        sends.post(&[fits]).unwrap();
    }
}

/// SGEs behind the eighth byte of an atomic are not written, and take no room in the WQE.
#[test]
fn a_masked_atomic_counts_only_the_sges_that_it_fills() {
    let swap = MaskedSwap { compare: 1, compare_mask: 2, swap: 3, swap_mask: 4 };
    // Two WQEBBs for each request: room for four SGEs.
    let mut sends = Sender::new(Shape { max_post: 32, ..Shape::default() });
    sends.post(&[SendWr::masked_compare_swap(REMOTE, &swap, &[SGE; 8])]).unwrap();
    assert_eq!(sends.bytes(0, 8)[7], 5, "segments, one of which is an SGE");
}

/// The SGE list of a full WQE has no terminator: the segment behind it belongs to another WQE, which the
/// device may be reading.
#[test]
fn a_receive_of_all_its_sges_leaves_the_next_wqe_alone() {
    let full = RecvWr::new(&[SGE; 2]);
    let mut own = Receiver::new(4, 32);
    own.post(&[full; 4]).unwrap();
    own.qp.receives.own.complete(0);
    let next = bytes(&own.device, 2, 32);
    own.post(&[full]).unwrap();
    assert_eq!(bytes(&own.device, 2, 32), next);

    let full = RecvWr::new(&[SGE; 3]);
    let mut shared = SharedReceiver::new(4, 64);
    shared.post(&[full; 3]).unwrap();
    shared.ring.wr_ids().complete(0);
    // Writes the last WQE of the ring; behind it is the first.
    let next = bytes(&shared.device, 0, 64);
    shared.post(&[full]).unwrap();
    assert_eq!(bytes(&shared.device, 0, 64), next);
}

#[test]
fn a_batch_of_receives_ends_where_the_queue_is_full() {
    for recv in [RecvWr::new(&[SGE]), RecvWr::new(&[])] {
        let (own, mut shared) = (Receiver::new(4, 32), SharedReceiver::new(4, 32));
        let mut cursor = own.ring.begin();
        for room in (0..4).rev() {
            own.push(&mut cursor, &recv).unwrap();
            assert_eq!(cursor.room, room);
        }
        assert_eq!(own.push(&mut cursor, &recv), Err(PostError::Full));
        let mut cursor = shared.ring.begin();
        for room in (0..3).rev() {
            shared.push(&mut cursor, &recv).unwrap();
            assert_eq!(cursor.room, room);
        }
        assert_eq!(shared.push(&mut cursor, &recv), Err(PostError::Full));
    }
}

/// An empty queue may have been used: its WQEs are linked in another order then.
#[test]
fn a_shared_queue_that_was_used_is_never_fresh_again() {
    let mut shared = SharedReceiver::new(4, 32);
    assert!(shared.ring.is_fresh());
    shared.post(&[RecvWr::new(&[])]).unwrap();
    assert!(!shared.ring.is_fresh());
    shared.ring.wr_ids().complete(0);
    assert_eq!(shared.ring.begin().room, 3, "all came back");
    assert!(!shared.ring.is_fresh());
}

/// The dropped batch contained a key change of its own.
#[test]
fn a_dropped_batch_keeps_the_fence_that_a_posted_one_needs() {
    let mut sends = Sender::new(Shape::default());
    let wr = SendWr::send(&[]);
    sends.post(&[SendWr::local_inv(Rkey(5))]).unwrap();
    let mut dropped = sends.ring.begin();
    sends.push(&mut dropped, &SendWr::local_inv(Rkey(6))).unwrap();
    sends.push(&mut dropped, &wr).unwrap();
    sends.post(&[wr]).unwrap();
    assert_eq!(sends.bytes(2, 16)[11], 0x20, "it waits for the posted change");
}

#[test]
fn a_dropped_batch_with_its_own_key_change_leaves_no_fence() {
    let wr = SendWr::send(&[]);
    for changes in [1, 2] {
        let mut sends = Sender::new(Shape::default());
        let mut dropped = sends.ring.begin();
        for _ in 0..changes {
            sends.push(&mut dropped, &SendWr::local_inv(Rkey(5))).unwrap();
        }
        sends.push(&mut dropped, &wr).unwrap();
        let mut cursor = sends.ring.begin();
        assert!(sends.try_push(&mut cursor, &wr), "after {changes} changes");
    }
}
