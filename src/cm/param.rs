//! Parameters of a connection. Pairs with `rdma_ucm_conn_param`.

use crate::device_attr::DeviceAttr;
use crate::error::{Error, Result};
use crate::number::{Qkey, Qpn};
use crate::qp::Ece;
use uverbs_uapi::rdma_user_cm::{rdma_ucm_conn_param, rdma_ucm_ece};

/// Bytes of private data that a connect request carries on InfiniBand and RoCE.
///
/// The message has 92; the IP addresses of both sides take 36 of them. An id with GIDs in their place has
/// [`IB_REQUEST_PRIVATE_DATA`].
pub const REQUEST_PRIVATE_DATA: usize = 56;

/// Bytes of private data that a connect request of an id with GIDs in place of IP addresses carries.
pub const IB_REQUEST_PRIVATE_DATA: usize = 92;

/// Bytes of private data that an accept carries on InfiniBand and RoCE.
pub const ACCEPT_PRIVATE_DATA: usize = 196;

/// Bytes of private data that a rejection carries on InfiniBand and RoCE.
pub const REJECT_PRIVATE_DATA: usize = 148;

/// Bytes of private data that a connect request of the port space [`UDP`](super::PortSpace::UDP) carries.
///
/// The message has 216; the IP addresses of both sides take 36 of them. An id with GIDs in their place has
/// [`IB_DATAGRAM_REQUEST_PRIVATE_DATA`].
pub const DATAGRAM_REQUEST_PRIVATE_DATA: usize = 180;

/// Bytes of private data that a connect request for datagrams carries, if its id has GIDs in place of IP addresses.
pub const IB_DATAGRAM_REQUEST_PRIVATE_DATA: usize = 216;

/// Bytes of private data that an answer in the port space [`UDP`](super::PortSpace::UDP) carries, an accept
/// or a rejection.
pub const DATAGRAM_REPLY_PRIVATE_DATA: usize = 136;

/// The Q_Key of queue pairs in the port space [`UDP`](super::PortSpace::UDP). The kernel tells the peer this one,
/// even if the queue pair has another.
#[doc(alias = "RDMA_UDP_QKEY")]
pub const DATAGRAM_QKEY: Qkey = Qkey(0x0123_4567);

/// The ECE options of a message, if it carries any.
pub(super) fn from_raw_ece(raw: rdma_ucm_ece) -> Option<Ece> {
    let rdma_ucm_ece { vendor_id, attr_mod } = raw;
    (vendor_id != 0).then_some(Ece { vendor_id, options: attr_mod })
}

/// The ECE options of a message in the kernel's struct.
pub(super) fn to_raw_ece(ece: Option<Ece>) -> rdma_ucm_ece {
    let raw = |Ece { vendor_id, options: attr_mod }| rdma_ucm_ece { vendor_id, attr_mod };
    ece.map_or_else(Default::default, raw)
}

/// Parameters of a connect request or an accept, with defaults that fit most programs.
///
/// ```
/// use uverbs::cm::ConnectParam;
/// let param = ConnectParam::new().private_data(b"hello").initiator_depth(4);
/// // Receives are posted soon: a peer that finds none is to send again after 0.01 milliseconds.
/// let param = param.min_rnr_timer(1);
/// ```
#[doc(alias = "rdma_conn_param")]
#[derive(Clone, Debug)]
#[must_use]
pub struct ConnectParam {
    private_data: Vec<u8>,
    responder_resources: Option<u8>,
    initiator_depth: Option<u8>,
    retry_count: u8,
    rnr_retry: u8,
    flow_control: bool,
    pub(super) ece: Option<Ece>,
    pub(super) min_rnr_timer: u8,
}

impl Default for ConnectParam {
    fn default() -> Self {
        ConnectParam {
            private_data: Vec::new(),
            responder_resources: None,
            initiator_depth: None,
            retry_count: 6,
            rnr_retry: 7,
            flow_control: false,
            ece: None,
            min_rnr_timer: 12,
        }
    }
}

impl ConnectParam {
    /// The defaults.
    pub fn new() -> Self {
        ConnectParam::default()
    }

    /// Bytes for the peer's program: at most [`REQUEST_PRIVATE_DATA`] with a request and
    /// [`ACCEPT_PRIVATE_DATA`] with an accept.
    ///
    /// The peer does not learn the number of bytes: the field has a fixed length, and the kernel pads it with zeros.
    /// This library adds no length, so that the peer may use another library. A program whose bytes do not tell their
    /// own length puts one in front:
    ///
    /// ```
    /// use uverbs::cm::{ConnectParam, ConnectRequest};
    ///
    /// fn with_length(data: &[u8]) -> ConnectParam {
    ///     let length = [u8::try_from(data.len()).unwrap_or(u8::MAX)];
    ///     ConnectParam::new().private_data(&[&length, data].concat())
    /// }
    ///
    /// fn of(request: &ConnectRequest) -> Option<&[u8]> {
    ///     let (length, rest) = request.private_data().split_first()?;
    ///     rest.get(..usize::from(*length))
    /// }
    /// # let _ = (with_length(b"abc"), of as fn(&ConnectRequest) -> Option<&[u8]>);
    /// ```
    ///
    /// A request of an id with GIDs in place of IP addresses carries up to [`IB_REQUEST_PRIVATE_DATA`]. There the
    /// kernel overwrites the first byte with 0, and the peer's kernel may take the upper half of the second byte for
    /// the IP version. So the first byte has to be 0, and the upper half of the second one neither 4 nor 6.
    pub fn private_data(mut self, bytes: &[u8]) -> Self {
        self.private_data = bytes.to_vec();
        self
    }

    /// The number of the peer's outstanding reads and atomics that the queue pair can answer. Unless set, this is the
    /// device's limit; with an accept, no more than the peer asked for.
    pub fn responder_resources(mut self, count: u8) -> Self {
        self.responder_resources = Some(count);
        self
    }

    /// The number of reads and atomics that the queue pair may have outstanding. Unless set, this is the device's
    /// limit; with an accept, no more than the peer can answer.
    pub fn initiator_depth(mut self, count: u8) -> Self {
        self.initiator_depth = Some(count);
        self
    }

    /// The number of times that both sides retransmit before they give up, 0 to 7; 6 unless set. Soft-RoCE takes 7 as
    /// infinite. Only a connect request carries it.
    pub fn retry_count(mut self, count: u8) -> Self {
        self.retry_count = count;
        self
    }

    /// The number of times that the peer retries when this queue pair has no receive posted, 0 to 7; 7, which is
    /// infinite, unless set.
    pub fn rnr_retry(mut self, count: u8) -> Self {
        self.rnr_retry = count;
        self
    }

    /// Whether the device has end-to-end flow control; false unless set.
    pub fn flow_control(mut self, flow_control: bool) -> Self {
        self.flow_control = flow_control;
        self
    }

    /// The ECE options: in a connect request those for the peer to choose from, in an accept those that were chosen.
    /// Unless set, a request offers the options of the queue pair's device
    /// ([`query_ece`](crate::QpControl::query_ece)). An accept has the device take the request's options that it
    /// supports, and answers with them. Vendor 0 stands for no options: a request then offers none, even if the device
    /// has some.
    ///
    /// Set options with an accept only in a program that gives them to the device itself
    /// ([`set_ece`](crate::QpControl::set_ece)). The options in the peer's answer to a request go to the device in
    /// either case.
    #[doc(alias = "rdma_set_local_ece")]
    pub fn ece(mut self, ece: Ece) -> Self {
        self.ece = Some(ece);
        self
    }

    /// The RNR NAK timer code, which tells a peer that found no receive how long to wait before it sends again; see
    /// [`QpAttr::min_rnr_timer`](crate::QpAttr::min_rnr_timer). 12 unless set: 0.64 milliseconds, as in
    /// [`Handshake`](crate::Handshake). The kernel's own is 0, which is 655 milliseconds.
    ///
    /// Soft-RoCE's sender takes retries off its count during a wait that is longer than its acknowledgement timeout, so
    /// that long waits end the connection although [`rnr_retry`](Self::rnr_retry) is 7.
    pub fn min_rnr_timer(mut self, code: u8) -> Self {
        self.min_rnr_timer = code;
        self
    }

    /// Refuses values that the message cannot carry or that are above the device's limits.
    pub(super) fn check(
        &self,
        verb: &'static str,
        message: CmMessage,
        limits: Depths,
    ) -> Result<()> {
        check_private_data(verb, message, &self.private_data)?;
        if let Some(Ece { vendor_id, .. }) = self.ece.filter(|ece| ece.vendor_id >> 24 != 0) {
            let detail = format!("vendor id {vendor_id:#x} of ECE has more than 24 bits");
            return Err(Error::invalid(verb, detail));
        }
        let ranges = [
            ("retry_count", Some(self.retry_count), 7),
            ("rnr_retry", Some(self.rnr_retry), 7),
            ("min_rnr_timer", Some(self.min_rnr_timer), 31),
            ("responder_resources", self.responder_resources, limits.responder_resources),
            ("initiator_depth", self.initiator_depth, limits.initiator_depth),
        ];
        for (name, value, max) in ranges {
            if let Some(value) = value.filter(|value| *value > max) {
                let detail = format!("{name} {value} is above the maximum of {max}");
                return Err(Error::invalid(verb, detail));
            }
        }
        Ok(())
    }

    /// The program's depths, with `limits` as defaults.
    pub(super) fn depths(&self, limits: Depths) -> Depths {
        Depths {
            responder_resources: self.responder_resources.unwrap_or(limits.responder_resources),
            initiator_depth: self.initiator_depth.unwrap_or(limits.initiator_depth),
        }
    }

    /// Refuses private data that a request of an id without IP addresses would not deliver unchanged.
    pub(super) fn check_is_no_header(&self, verb: &'static str) -> Result<()> {
        check_is_no_header(verb, &self.private_data)
    }

    /// Refuses more private data than a message of the port space UDP carries.
    pub(super) fn check_datagram(&self, verb: &'static str, message: CmMessage) -> Result<()> {
        check_private_data(verb, message, &self.private_data)
    }

    /// The kernel's struct for a UD queue pair, which has no depths.
    pub(super) fn to_raw_datagram(&self, qpn: Qpn) -> rdma_ucm_conn_param {
        self.to_raw(qpn, false, Depths { responder_resources: 0, initiator_depth: 0 })
    }

    /// The kernel's struct for a queue pair; `srq` tells whether it has a shared receive queue.
    pub(super) fn to_raw(&self, qpn: Qpn, srq: bool, depths: Depths) -> rdma_ucm_conn_param {
        let (private_data, private_data_len) = to_field(&self.private_data);
        rdma_ucm_conn_param {
            qp_num: qpn.0,
            qkey: 0,
            private_data,
            private_data_len,
            srq: srq.into(),
            responder_resources: depths.responder_resources,
            initiator_depth: depths.initiator_depth,
            flow_control: self.flow_control.into(),
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry,
            valid: 1,
        }
    }
}

/// The numbers of reads and atomics that may be outstanding in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Depths {
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

impl Depths {
    /// The limits of a device, at most those that a message can carry.
    pub(super) fn of(attr: &DeviceAttr) -> Depths {
        let limit = |count: u32| u8::try_from(count).unwrap_or(u8::MAX);
        Depths {
            responder_resources: limit(attr.max_qp_rd_atom),
            initiator_depth: limit(attr.max_qp_init_rd_atom),
        }
    }

    /// The smaller of both in each direction.
    pub(super) fn min(self, other: Depths) -> Depths {
        Depths {
            responder_resources: self.responder_resources.min(other.responder_resources),
            initiator_depth: self.initiator_depth.min(other.initiator_depth),
        }
    }
}

/// The messages that carry private data.
#[derive(Clone, Copy, Debug)]
pub(super) enum CmMessage {
    Request,
    /// Of an id with GIDs.
    IbRequest,
    Accept,
    Reject,
    DatagramRequest,
    /// Of an id with GIDs.
    IbDatagramRequest,
    DatagramReply,
}

impl CmMessage {
    /// The request of an id that has IP addresses, or GIDs in their place.
    pub(super) fn request(datagrams: bool, has_ip: bool) -> CmMessage {
        match (datagrams, has_ip) {
            (false, true) => CmMessage::Request,
            (false, false) => CmMessage::IbRequest,
            (true, true) => CmMessage::DatagramRequest,
            (true, false) => CmMessage::IbDatagramRequest,
        }
    }
}

/// Refuses more private data than a message carries.
pub(super) fn check_private_data(
    verb: &'static str,
    message: CmMessage,
    data: &[u8],
) -> Result<()> {
    let (name, limit) = match message {
        CmMessage::Request => ("a connect request", REQUEST_PRIVATE_DATA),
        CmMessage::IbRequest => ("a connect request by GID", IB_REQUEST_PRIVATE_DATA),
        CmMessage::Accept => ("an accept", ACCEPT_PRIVATE_DATA),
        CmMessage::Reject => ("a rejection", REJECT_PRIVATE_DATA),
        CmMessage::DatagramRequest => {
            ("a connect request for datagrams", DATAGRAM_REQUEST_PRIVATE_DATA)
        }
        CmMessage::IbDatagramRequest => {
            ("a connect request for datagrams by GID", IB_DATAGRAM_REQUEST_PRIVATE_DATA)
        }
        CmMessage::DatagramReply => ("an answer for datagrams", DATAGRAM_REPLY_PRIVATE_DATA),
    };
    if data.len() > limit {
        let detail =
            format!("{} bytes of private data: {name} carries at most {limit}", data.len());
        return Err(Error::invalid(verb, detail));
    }
    Ok(())
}

/// Refuses private data that the peer's kernel would take for a header of IP addresses. The kernel overwrites the first
/// byte, the header's version, with 0 whether the request has that header or not, and the peer's kernel takes the upper
/// half of the second byte for the version of IP.
fn check_is_no_header(verb: &'static str, data: &[u8]) -> Result<()> {
    let (first, second) = match *data {
        [] | [0] | [0, 0x00..=0x3f | 0x50..=0x5f | 0x70..=0xff, ..] => return Ok(()),
        [first] => (first, 0),
        [first, second, ..] => (first, second),
    };
    let detail = format!(
        "private data that begins with {first:02x} {second:02x}: without IP addresses the kernel overwrites the \
         first byte, and the peer's kernel may take the second one for its own; let two zero bytes precede the data"
    );
    Err(Error::invalid(verb, detail))
}

/// Private data in the field of a command, and its length. [Checked](check_private_data) data fits.
pub(super) fn to_field(data: &[u8]) -> ([u8; 256], u8) {
    let mut field = [0; 256];
    for (place, byte) in field.iter_mut().zip(data) {
        *place = *byte;
    }
    (field, u8::try_from(data.len()).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Depths = Depths { responder_resources: 16, initiator_depth: 8 };

    #[test]
    fn private_data_is_limited_by_its_message() {
        for (message, limit) in [
            (CmMessage::Request, REQUEST_PRIVATE_DATA),
            (CmMessage::IbRequest, IB_REQUEST_PRIVATE_DATA),
            (CmMessage::IbDatagramRequest, IB_DATAGRAM_REQUEST_PRIVATE_DATA),
            (CmMessage::Accept, ACCEPT_PRIVATE_DATA),
            (CmMessage::Reject, REJECT_PRIVATE_DATA),
            (CmMessage::DatagramRequest, DATAGRAM_REQUEST_PRIVATE_DATA),
            (CmMessage::DatagramReply, DATAGRAM_REPLY_PRIVATE_DATA),
        ] {
            for length in [0, limit] {
                check_private_data("connect", message, &vec![1; length]).unwrap();
            }
            let error = check_private_data("connect", message, &vec![1; limit + 1]).unwrap_err();
            let told = format!("{} bytes of private data", limit + 1);
            assert!(error.message().contains(&told), "{error}");
            assert!(error.message().contains(&format!("at most {limit}")), "{error}");
        }
    }

    #[test]
    fn private_data_that_looks_like_a_header_is_refused() {
        for data in [&[][..], &[0], &[0, 0, 0x45], &[0, 0x3f], &[0, 0x50], &[0, 0x74]] {
            check_is_no_header("connect", data).unwrap();
        }
        for data in [&[1][..], &[9, 0, 0x45], &[0, 0x40], &[0, 0x4f], &[0, 0x60], &[0, 0x6f]] {
            let error = check_is_no_header("connect", data).unwrap_err();
            assert!(error.message().contains("two zero bytes"), "{error}");
        }
    }

    #[test]
    fn a_value_beyond_its_limit_is_named_with_it() {
        let check = |param: ConnectParam| {
            param.check("connect", CmMessage::Request, LIMITS).map_err(|error| error.to_string())
        };
        check(ConnectParam::new().responder_resources(16).initiator_depth(8)).unwrap();
        for (param, told) in [
            (ConnectParam::new().responder_resources(17), "responder_resources 17 is above"),
            (ConnectParam::new().initiator_depth(9), "initiator_depth 9 is above the maximum of 8"),
            (ConnectParam::new().retry_count(8), "retry_count 8"),
            (ConnectParam::new().ece(Ece { vendor_id: 1 << 24, options: 0 }), "more than 24 bits"),
            (ConnectParam::new().rnr_retry(8), "rnr_retry 8"),
            (ConnectParam::new().min_rnr_timer(32), "min_rnr_timer 32"),
        ] {
            let error = check(param).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn parameters_reach_the_kernel_as_they_were_set() {
        let param = ConnectParam::new().private_data(b"abc").retry_count(3).rnr_retry(2);
        let depths = param.initiator_depth(5).depths(LIMITS);
        assert_eq!(depths, Depths { responder_resources: 16, initiator_depth: 5 });
        let param = ConnectParam::new().private_data(b"abc").retry_count(3).rnr_retry(2);
        let raw = param.to_raw(Qpn(9), true, depths);
        assert_eq!((&raw.private_data[..4], raw.private_data_len), (&b"abc\0"[..], 3));
        assert_eq!((raw.qp_num, raw.srq, raw.valid), (9, 1, 1));
        assert_eq!((raw.retry_count, raw.rnr_retry_count), (3, 2));
        assert_eq!((raw.responder_resources, raw.initiator_depth), (16, 5));
    }
}
