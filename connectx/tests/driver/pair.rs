//! Two connected queue pairs of one function, with memory that both may use.

use super::{Driver, Queue};
use uverbs_uapi::mlx5::prm::Field;
use uverbs_uapi::mlx5::prm::cqc::cqc;
use uverbs_uapi::mlx5::prm::mkc::mkc;
use uverbs_uapi::mlx5::prm::qpc::qpc;

/// Opcodes of WQEs and CQEs.
pub(crate) mod code {
    pub(crate) const NOP: u8 = 0x00;
    pub(crate) const WRITE: u8 = 0x08;
    pub(crate) const SEND: u8 = 0x0a;
    pub(crate) const READ: u8 = 0x10;
    pub(crate) const FETCH_ADD: u8 = 0x12;

    pub(crate) const REQUEST: u8 = 0;
    pub(crate) const RECEIVED: u8 = 2;
    pub(crate) const RESIZED: u8 = 5;
    pub(crate) const REQUEST_ERROR: u8 = 13;
    pub(crate) const RECEIVE_ERROR: u8 = 14;
    /// Opcode in a CQE that the device has not written.
    pub(crate) const NONE: u8 = 15;
}

/// `a` sends and `b` receives. There is a page to send from, one to receive into, and an mkey for
/// both.
pub(crate) struct Pair {
    pub(crate) driver: Driver,
    pub(crate) a: Queue,
    pub(crate) b: Queue,
    pub(crate) eqn: u32,
    pub(crate) send_cq: u32,
    pub(crate) receive_cq: u32,
    /// Buffers of the CQs of sends and of receives.
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) key: u32,
    /// Buffer of the EQ.
    pub(crate) events: u64,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self::with(&[], &[])
    }

    /// A pair with other fields in the contexts of its CQs and queue pairs.
    pub(crate) fn with(cq: &[(Field<cqc>, u64)], qp: &[(Field<qpc>, u64)]) -> Self {
        Self::on(Driver::new(), cq, qp)
    }

    /// A pair on this function.
    pub(crate) fn on(
        mut driver: Driver,
        cq: &[(Field<cqc>, u64)],
        qp: &[(Field<qpc>, u64)],
    ) -> Self {
        driver.set_gid();
        let eqn = driver.eq();
        let events = driver.last_page();
        let (send_cq, sent) = driver.cq_with(eqn, cq);
        let (receive_cq, received) = driver.cq_with(eqn, cq);
        let a = driver.qp_with(0, send_cq, qp);
        let b = driver.qp_with(0, receive_cq, qp);
        driver.connect(&a, &b);
        driver.connect(&b, &a);
        let (from, to) = (driver.alloc_page(), driver.alloc_page());
        let key = driver.mkey(from, 8192, &[mkc::lr, mkc::lw, mkc::rr, mkc::rw, mkc::a]);
        Self { driver, a, b, eqn, send_cq, receive_cq, sent, received, from, to, key, events }
    }

    /// Posts a receive of `len` bytes.
    pub(crate) fn receive(&mut self, len: u32) {
        self.driver.post_receive(&mut self.b, &Driver::segment(len, self.key, self.to));
    }

    /// Sends `len` bytes.
    pub(crate) fn send(&mut self, len: u32) {
        let segment = self.local(len);
        self.driver.post_send(&mut self.a, code::SEND, 0, &segment);
    }

    /// The data segment of the first `len` bytes to send.
    pub(crate) fn local(&self, len: u32) -> Vec<u8> {
        Driver::segment(len, self.key, self.from)
    }

    /// The remote address segment.
    pub(crate) fn remote(address: u64, key: u32) -> Vec<u8> {
        [&address.to_be_bytes()[..], &key.to_be_bytes(), &[0; 4]].concat()
    }

    pub(crate) fn bytes<const N: usize>(&mut self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.driver.memory().read(at, &mut bytes).unwrap();
        bytes
    }
}
