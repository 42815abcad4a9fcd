//! Completions as polling lends them, over the formats of both providers.

use crate::number::{Qpn, Rkey};
use crate::provider::{ProviderWc, WcPacket, WcPath};
use crate::wc::{Scattered, Wc, WcError, WcOpcode, WcStatus};
use uverbs_uapi::wc::ib_wc_flags;

// rxe's ring holds the kernel's own flags, which are not those of libibverbs.
const WC_GRH: u32 = ib_wc_flags::IB_WC_GRH.bits();
const WC_WITH_IMM: u32 = ib_wc_flags::IB_WC_WITH_IMM.bits();
const WC_IP_CSUM_OK: u32 = ib_wc_flags::IB_WC_IP_CSUM_OK.bits();
const WC_WITH_INV: u32 = ib_wc_flags::IB_WC_WITH_INVALIDATE.bits();

/// A completion, lent until the next one is asked for; [`Wc`] is a copy to keep. See
/// [`CompletionQueue::poll`](crate::CompletionQueue::poll) for an example.
///
/// ```no_run
/// use uverbs::{Completion, WcOpcode};
///
/// fn received(completion: &Completion<'_>) {
///     let (from, bytes) = (completion.qpn(), completion.byte_len());
///     match completion.opcode() {
///         WcOpcode::RECV => println!("{from} got {bytes} bytes"),
///         // A write with immediate data: the bytes lie where the peer wrote them.
///         WcOpcode::RECV_WRITE_IMM => println!("{from}: number {:?}", completion.imm()),
///         other => println!("{other} of request {}", completion.wr_id()),
///     }
/// }
/// ```
#[doc(alias = "ibv_wc")]
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    wc: ProviderWc<'a>,
}

impl<'a> Completion<'a> {
    #[inline]
    pub(crate) fn new(wc: ProviderWc<'a>) -> Self {
        Completion { wc }
    }

    /// The same completion, rebuilt from its CQE, so that the compiler keeps no copy of it in registers.
    #[inline]
    pub(crate) fn reload(self) -> Self {
        match self.wc {
            ProviderWc::Mlx5(wc) => Completion { wc: ProviderWc::Mlx5(wc.reload()) },
            ProviderWc::Rxe(_) => self,
        }
    }

    /// The number that the request was posted with.
    #[doc(alias = "ibv_wc")]
    #[inline]
    pub fn wr_id(&self) -> u64 {
        match &self.wc {
            ProviderWc::Rxe(wc) => wc.wr_id,
            ProviderWc::Mlx5(wc) => wc.wr_id,
        }
    }

    /// The number by which the completion names its queue pair; see
    /// [`Member::number`](crate::provider::Member::number).
    #[inline]
    pub(crate) fn number(&self) -> u32 {
        match &self.wc {
            ProviderWc::Rxe(wc) => wc.qp_num,
            ProviderWc::Mlx5(wc) => wc.uidx,
        }
    }

    /// The outcome of the request. Unless it is [`WcStatus::SUCCESS`], only `wr_id`, `qpn` and
    /// `vendor_err` mean anything beside it.
    #[inline]
    pub fn status(&self) -> WcStatus {
        match &self.wc {
            ProviderWc::Rxe(wc) => WcStatus(wc.status),
            ProviderWc::Mlx5(wc) => wc.status(),
        }
    }

    /// Whether the request succeeded.
    #[inline]
    pub fn is_success(&self) -> bool {
        self.status() == WcStatus::SUCCESS
    }

    /// The completion, if its request succeeded:
    ///
    /// ```no_run
    /// # fn f(cq: &mut uverbs::CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut completions = cq.poll()?;
    /// while let Some(completion) = completions.next() {
    ///     let completion = completion.ok()?;
    ///     println!("request {} has moved {} bytes", completion.wr_id(), completion.byte_len());
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The status of a failed request, with the fields that are valid in its completion.
    #[inline]
    pub fn ok(&self) -> Result<Self, WcError> {
        if self.is_success() { Ok(*self) } else { Err(self.failure()) }
    }

    #[cold]
    fn failure(&self) -> WcError {
        WcError {
            status: self.status(),
            wr_id: self.wr_id(),
            qpn: self.qpn(),
            vendor_err: self.vendor_err(),
        }
    }

    /// The kind of the request. Undefined unless the request succeeded.
    #[doc(alias = "ibv_wc_read_opcode")]
    #[inline]
    pub fn opcode(&self) -> WcOpcode {
        match &self.wc {
            ProviderWc::Rxe(wc) => WcOpcode(wc.opcode),
            ProviderWc::Mlx5(wc) => wc.opcode(),
        }
    }

    /// Bytes received, or returned by a read or atomic; for a datagram including the 40 bytes of
    /// a global route header. Undefined for sends and writes, and unless the request succeeded. An atomic
    /// returns 8 bytes; if the request names longer memory, rxe reports the length of that memory.
    ///
    /// For [`RECV_WRITE_IMM`](WcOpcode::RECV_WRITE_IMM) it counts the bytes that the peer wrote elsewhere:
    /// the memory of the receive got none of them.
    #[doc(alias = "ibv_wc_read_byte_len")]
    #[inline]
    pub fn byte_len(&self) -> u32 {
        match &self.wc {
            ProviderWc::Rxe(wc) => wc.byte_len,
            ProviderWc::Mlx5(wc) => wc.byte_len(),
        }
    }

    /// The queue pair that the request was posted to, or that took it from a shared receive queue.
    /// For a received raw packet mlx5 reports [`flow_tag`](Self::flow_tag) in its place.
    #[doc(alias = "ibv_wc_read_qp_num")]
    #[inline]
    pub fn qpn(&self) -> Qpn {
        match &self.wc {
            ProviderWc::Rxe(wc) => Qpn(wc.qp_num),
            ProviderWc::Mlx5(wc) => Qpn(wc.qpn()),
        }
    }

    /// The sending queue pair; for receives of datagrams.
    #[doc(alias = "ibv_wc_read_src_qp")]
    #[inline]
    pub fn src_qpn(&self) -> Qpn {
        match &self.wc {
            ProviderWc::Rxe(wc) => Qpn(wc.src_qp),
            ProviderWc::Mlx5(wc) => Qpn(wc.src_qpn()),
        }
    }

    /// The immediate data of the message, as the number that the sender gave, in host byte order.
    #[doc(alias = "ibv_wc_read_imm_data")]
    #[inline]
    pub fn imm(&self) -> Option<u32> {
        match &self.wc {
            ProviderWc::Rxe(wc) => (wc.wc_flags & WC_WITH_IMM != 0).then(|| u32::from_be(wc.ex)),
            ProviderWc::Mlx5(wc) => wc.imm(),
        }
    }

    /// The key of this side that the message invalidated.
    #[doc(alias = "ibv_wc_read_invalidated_rkey")]
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<Rkey> {
        match &self.wc {
            ProviderWc::Rxe(wc) => (wc.wc_flags & WC_WITH_INV != 0).then_some(Rkey(wc.ex)),
            ProviderWc::Mlx5(wc) => wc.invalidated_rkey().map(Rkey),
        }
    }

    /// A copy of the inline data, at most 64 bytes: received data, or the result of a read or an
    /// atomic, that the device put into the CQE and *not* into the memory that the request named.
    /// `None` if the data lies in memory, as it always does unless the queue pair was made with
    /// [`scatter_to_cqe`](crate::QpBuilder::scatter_to_cqe).
    ///
    /// `None` for a request that failed.
    #[doc(alias = "MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE")]
    pub fn scattered(&self) -> Option<Scattered> {
        match &self.wc {
            ProviderWc::Rxe(_) => None,
            ProviderWc::Mlx5(wc) => wc.scattered(),
        }
    }

    /// Whether the first 40 bytes of a received datagram hold a global route header.
    #[inline]
    #[doc(alias = "ibv_wc_read_wc_flags")]
    pub fn has_grh(&self) -> bool {
        match &self.wc {
            ProviderWc::Rxe(wc) => wc.wc_flags & WC_GRH != 0,
            ProviderWc::Mlx5(wc) => wc.has_grh(),
        }
    }

    /// The device's own code for an error; 0 where it has none.
    #[doc(alias = "ibv_wc_read_vendor_err")]
    #[inline]
    pub fn vendor_err(&self) -> u32 {
        match &self.wc {
            ProviderWc::Rxe(wc) => wc.vendor_err,
            ProviderWc::Mlx5(wc) => wc.vendor_err(),
        }
    }

    /// The tag of the [rule](crate::FlowAttr::tag) that steered a raw packet here; 0 if the rule
    /// has none. For receives of raw packets.
    #[doc(alias = "ibv_wc_read_flow_tag")]
    pub fn flow_tag(&self) -> u32 {
        self.packet().flow_tag
    }

    /// Whether the device found the checksums of a received raw packet right: that of its IPv4
    /// header, and that of the TCP or UDP header behind. `false` for anything else, IPv6 included.
    #[doc(alias = "IBV_WC_IP_CSUM_OK")]
    pub fn ip_checksum_ok(&self) -> bool {
        self.packet().ip_checksum_ok
    }

    /// The VLAN tag that the device took out of a received raw packet: priority in bits 13 to 15,
    /// identifier in bits 0 to 11. `None` if it had none, or if the queue pair was not made with
    /// [`cvlan_stripping`](crate::QpBuilder::cvlan_stripping).
    #[doc(alias = "ibv_wc_read_cvlan")]
    pub fn vlan(&self) -> Option<u16> {
        self.packet().vlan
    }

    /// When the device completed the request, in ticks of its own clock, where the device says so:
    /// mlx5 does for requests that succeeded. A queue of
    /// [real time](crate::CqBuilder::real_time_timestamps) has seconds and nanoseconds in its place.
    #[doc(alias = "ibv_wc_read_completion_ts")]
    pub fn timestamp(&self) -> Option<u64> {
        match &self.wc {
            ProviderWc::Rxe(_) => None,
            ProviderWc::Mlx5(wc) => wc.timestamp(),
        }
    }

    /// Index of the partition key that a datagram came with.
    pub fn pkey_index(&self) -> u16 {
        self.path().pkey_index
    }

    /// Local identifier of a datagram's sender; 0 on Ethernet.
    #[doc(alias = "ibv_wc_read_slid")]
    pub fn src_lid(&self) -> u16 {
        self.path().src_lid
    }

    /// Service level of a datagram, 0 to 15.
    #[doc(alias = "ibv_wc_read_sl")]
    pub fn service_level(&self) -> u8 {
        self.path().service_level
    }

    /// The low bits of the local identifier that a datagram was sent to; 0 on Ethernet.
    #[doc(alias = "ibv_wc_read_dlid_path_bits")]
    pub fn path_bits(&self) -> u8 {
        self.path().path_bits
    }

    fn path(&self) -> WcPath {
        match &self.wc {
            ProviderWc::Rxe(wc) => WcPath {
                pkey_index: wc.pkey_index,
                src_lid: wc.slid,
                service_level: wc.sl,
                path_bits: wc.dlid_path_bits,
            },
            ProviderWc::Mlx5(wc) => wc.path(),
        }
    }

    fn packet(&self) -> WcPacket {
        match &self.wc {
            ProviderWc::Rxe(wc) => {
                WcPacket { ip_checksum_ok: wc.wc_flags & WC_IP_CSUM_OK != 0, ..WcPacket::default() }
            }
            ProviderWc::Mlx5(wc) => wc.packet(),
        }
    }
}

impl From<Completion<'_>> for Wc {
    /// Copies the completion, so that it outlives the poll. If the request failed, only the fields of
    /// [`WcError`] are set.
    #[inline]
    fn from(completion: Completion<'_>) -> Wc {
        let completion = match completion.ok() {
            Ok(completion) => completion,
            Err(WcError { status, wr_id, qpn, vendor_err }) => {
                return Wc { status, wr_id, qpn, vendor_err, ..Wc::default() };
            }
        };
        let (path, packet) = (completion.path(), completion.packet());
        Wc {
            wr_id: completion.wr_id(),
            status: WcStatus::SUCCESS,
            opcode: completion.opcode(),
            qpn: completion.qpn(),
            vendor_err: 0,
            byte_len: completion.byte_len(),
            imm: completion.imm(),
            invalidated_rkey: completion.invalidated_rkey(),
            has_grh: completion.has_grh(),
            src_qpn: completion.src_qpn(),
            src_lid: path.src_lid,
            service_level: path.service_level,
            path_bits: path.path_bits,
            pkey_index: path.pkey_index,
            flow_tag: packet.flow_tag,
            ip_checksum_ok: packet.ip_checksum_ok,
            vlan: packet.vlan,
            timestamp: completion.timestamp(),
            scattered: completion.scattered(),
        }
    }
}
