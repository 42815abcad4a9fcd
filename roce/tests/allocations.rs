//! Packets and requests cost no allocation: all memory is there when a queue pair is.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use uverbs_roce::headers::{MAX_PACKET, Packet};
use uverbs_roce::opcodes::Transport;
use uverbs_roce::{
    Atomic, Attributes, Counter, Endpoint, Event, Host, Mtu, Psn, Received, Refusal, Request,
    Right, State, Target, Work,
};
use uverbs_uapi::mr::ib_uverbs_access_flags;
use uverbs_uapi::wc::ib_wc_status;

struct Counting;

thread_local! {
    /// How often this thread asked for memory. The one that runs tests may ask at any time.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A device that keeps nothing but the packets to send.
struct Device {
    packets: Vec<u8>,
    lengths: Vec<usize>,
    completions: u64,
    received: u64,
}

impl Device {
    fn new() -> Device {
        let packets = Vec::with_capacity(1000 * MAX_PACKET);
        Device { packets, lengths: Vec::with_capacity(1000), completions: 0, received: 0 }
    }
}

impl Host for Device {
    type Path = ();

    fn admit(&mut self, _: u32, _: &(), _: &Packet<'_>) -> bool {
        true
    }
    fn begin(&mut self, _: u32, _: u64) {}
    fn send(&mut self, _: u32, _: &(), packet: &[u8]) -> bool {
        self.packets.extend_from_slice(packet);
        self.lengths.push(packet.len());
        true
    }
    fn read_local(&mut self, _: u32, _: u64, _: u32, _: &mut [u8]) -> Result<(), ib_wc_status> {
        Ok(())
    }
    fn write_local(&mut self, _: u32, _: u64, _: u32, _: &[u8]) -> Result<(), ib_wc_status> {
        Ok(())
    }
    fn write_old(&mut self, _: u32, _: u64, _: u64) -> Result<(), ib_wc_status> {
        Ok(())
    }
    fn run_local(&mut self, _: u32, _: u64) -> Result<(), ib_wc_status> {
        Ok(())
    }
    fn complete(&mut self, _: u32, _: u64, status: ib_wc_status) {
        assert_eq!(status, ib_wc_status::IB_WC_SUCCESS);
        self.completions += 1;
    }
    fn check_remote(&mut self, _: u32, _: Right, _: Target) -> Result<(), Refusal> {
        Ok(())
    }
    fn read_remote(&mut self, _: u32, _: Target, _: &mut [u8]) -> Result<(), Refusal> {
        Ok(())
    }
    fn write_remote(&mut self, _: u32, _: Target, _: &[u8]) -> Result<(), Refusal> {
        Ok(())
    }
    fn atomic(&mut self, _: u32, _: Target, _: Atomic) -> Result<u64, Refusal> {
        Ok(0)
    }
    fn atomic_write(&mut self, _: u32, _: Target, _: [u8; 8]) -> Result<(), Refusal> {
        Ok(())
    }
    fn flush(&mut self, _: u32, _: Target, _: u8, _: u8) -> Result<(), Refusal> {
        Ok(())
    }
    fn invalidate(&mut self, _: u32, _: Option<u32>, _: u32) -> Result<(), Refusal> {
        Ok(())
    }
    fn take_receive(&mut self, _: u32, _: Option<u32>) -> Result<Option<u64>, Refusal> {
        Ok(Some(0))
    }
    fn write_receive(&mut self, _: u32, _: u64, _: u32, _: &[u8]) -> Result<(), ib_wc_status> {
        Ok(())
    }
    fn complete_receive(
        &mut self,
        _: u32,
        _: u64,
        received: Result<Received<'_, ()>, ib_wc_status>,
    ) -> Result<(), Refusal> {
        self.received += u64::from(received.is_ok());
        Ok(())
    }
    fn event(&mut self, _: u32, _: Event) {}
    fn count(&mut self, _: u32, _: Counter) {}
}

const ROUNDS: u64 = 100;
const QPN: u32 = 7;

#[test]
fn packets_and_requests_cost_no_allocation() {
    let attributes = Attributes {
        path: (),
        destination: QPN,
        source: QPN,
        pkey: 0xffff,
        mtu: Mtu::Mtu1024,
        send_psn: Psn::new(0),
        receive_psn: Psn::new(0),
        timeout: 14,
        retry_count: 7,
        rnr_retry: 7,
        min_rnr_timer: 1,
        max_rd_atomic: 4,
        max_dest_rd_atomic: 4,
        access: ib_uverbs_access_flags::all(),
    };
    let mut sides = [(); 2].map(|()| {
        let (mut endpoint, mut device) = (Endpoint::new(), Device::new());
        endpoint.create(QPN, Transport::Rc, 16, attributes.clone());
        endpoint.move_to(&mut device, QPN, State::Rtr);
        endpoint.move_to(&mut device, QPN, State::Rts);
        (endpoint, device)
    });
    let before = ALLOCATIONS.get();
    let (address, key) = (0, 0);
    for round in 0..ROUNDS {
        for (work, length) in [
            (Work::Send { immediate: None }, 3000),
            (Work::Write { address, key, immediate: Some(1) }, 64 << 10),
            (Work::Read { address, key }, 64 << 10),
            (Work::Atomic { address, key, change: Atomic::FetchAdd { add: 1 } }, 8),
        ] {
            let request = Request {
                id: 0,
                work,
                length,
                fence: false,
                solicited: false,
                srq: 0,
                datagram: None,
            };
            sides[0].0.post(QPN, request).unwrap();
        }
        let mut moved = true;
        while moved {
            moved = false;
            for from in 0..2 {
                let [left, right] = &mut sides;
                let (sender, receiver) = if from == 0 { (left, right) } else { (right, left) };
                sender.0.run(round, &mut sender.1, usize::MAX);
                let mut at = 0;
                for length in sender.1.lengths.drain(..) {
                    let packet = &sender.1.packets[at..at + length];
                    receiver.0.packet(round, &mut receiver.1, &(), packet).unwrap();
                    (at, moved) = (at + length, true);
                }
                sender.1.packets.clear();
            }
        }
    }
    let allocations = ALLOCATIONS.get() - before;
    assert_eq!((sides[0].1.completions, sides[1].1.received), (4 * ROUNDS, 2 * ROUNDS));
    assert_eq!(allocations, 0);
}
