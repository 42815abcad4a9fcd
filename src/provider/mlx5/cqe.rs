//! Completions as the device writes them.

use crate::memory::cq_buffer::{CqReader, Cqe, UNWRITTEN};
use crate::provider::{WcPacket, WcPath};
use crate::wc::{Scattered, WcOpcode, WcStatus};
use std::mem::offset_of;
use uapi::{
    mlx5_cqe_checked as checked, mlx5_cqe_opcode as opcode, mlx5_cqe_syndrome as syndrome,
    mlx5_cqe64, mlx5_err_cqe,
};
use uverbs_uapi::mlx5::cqe as uapi;

pub(crate) const UIDX: usize = offset_of!(mlx5_cqe64, srqn);
const FLAGS: usize = offset_of!(mlx5_cqe64, flags_rqpn);
const IMMEDIATE: usize = offset_of!(mlx5_cqe64, immediate);
const BYTES: usize = offset_of!(mlx5_cqe64, byte_cnt);
const QPN: usize = offset_of!(mlx5_cqe64, sop_drop_qpn);
pub(crate) const COUNTER: usize = offset_of!(mlx5_cqe64, wqe_counter);
const PATH: usize = offset_of!(mlx5_cqe64, ml_path);
const LID: usize = offset_of!(mlx5_cqe64, slid);
const TIME_HIGH: usize = offset_of!(mlx5_cqe64, timestamp_h);
const TIME_LOW: usize = offset_of!(mlx5_cqe64, timestamp_l);
const CHECKED: usize = offset_of!(mlx5_cqe64, hds_ip_ext);
const KINDS: usize = offset_of!(mlx5_cqe64, l4_l3_hdr_type);
const VLAN: usize = offset_of!(mlx5_cqe64, vlan_info);
const SYNDROME: usize = offset_of!(mlx5_err_cqe, syndrome);
const VENDOR: usize = offset_of!(mlx5_err_cqe, vendor_err_synd);

/// In `op_own`: the core of the CQE begins with up to 32 bytes of inline data.
const IN_CORE: u8 = 1 << 2;
/// In `op_own`: up to 64 bytes of inline data are in the first half of a CQE of 128 bytes, before the core.
const IN_FRONT: u8 = 1 << 3;
/// Bytes of an atomic's result.
const ATOMIC: u32 = 8;

const _: () = assert!(UNWRITTEN == opcode::MLX5_CQE_INVALID.0 << 4);

/// The opcode in `op_own`, the last byte of a CQE.
#[inline(always)]
pub(crate) const fn opcode_of(op_own: u8) -> opcode {
    opcode(op_own >> 4)
}

/// The smallest `op_own` of a CQE whose opcode is greater than `code`.
#[inline(always)]
pub(crate) const fn op_own_above(code: opcode) -> u8 {
    (code.0 + 1) << 4
}

/// The user index in a CQE, of 24 bits.
#[inline(always)]
pub(crate) fn uidx_of(cqe: Cqe<'_>) -> u32 {
    // The upper byte of the field is not part of the index.
    cqe.be24::<{ UIDX + 1 }>()
}

/// Whether the completion is of a receive.
pub(crate) fn is_receive(code: opcode) -> bool {
    matches!(
        code,
        opcode::MLX5_CQE_RESP_WR_IMM
            | opcode::MLX5_CQE_RESP_SEND
            | opcode::MLX5_CQE_RESP_SEND_IMM
            | opcode::MLX5_CQE_RESP_SEND_INV
            | opcode::MLX5_CQE_RESP_ERR
    )
}

/// The opcode by which a receive is reported.
#[inline(always)]
pub(crate) fn received(op_own: u8) -> WcOpcode {
    match opcode_of(op_own) {
        opcode::MLX5_CQE_RESP_WR_IMM => WcOpcode::RECV_WRITE_IMM,
        _ => WcOpcode::RECV,
    }
}

/// A completion in its ring. Its fields are read from the CQE on demand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mlx5Wc<'r> {
    /// The user index of the queue pair.
    pub(crate) uidx: u32,
    pub(crate) wr_id: u64,
    /// The opcode of the completion.
    pub(crate) kind: WcOpcode,
    /// The CQE's last byte, of which the owner bit means nothing here.
    pub(crate) op_own: u8,
    /// The CQE is the last that was consumed.
    pub(crate) reader: &'r CqReader,
}

impl<'r> Mlx5Wc<'r> {
    /// The CQE, computed on demand: not every caller needs it.
    #[inline(always)]
    fn cqe(&self) -> Cqe<'r> {
        self.reader.last()
    }

    /// The same completion, with its fields read from the CQE again.
    #[inline(always)]
    pub(crate) fn reload(self) -> Self {
        Mlx5Wc { op_own: self.cqe().op_own(), ..self }
    }

    #[inline(always)]
    fn opcode_byte(&self) -> opcode {
        opcode_of(self.op_own)
    }

    #[inline(always)]
    fn is_error(&self) -> bool {
        // There are two error opcodes, one for each direction; the opcodes above them are no completions.
        self.op_own >= opcode::MLX5_CQE_REQ_ERR.0 << 4
    }

    #[inline(always)]
    pub(crate) fn status(&self) -> WcStatus {
        if !self.is_error() {
            return WcStatus::SUCCESS;
        }
        status_of(self.cqe().byte::<SYNDROME>())
    }

    #[inline(always)]
    pub(crate) fn opcode(&self) -> WcOpcode {
        self.kind
    }

    #[inline]
    pub(crate) fn byte_len(&self) -> u32 {
        match self.kind {
            // The device need not fill in `byte_cnt` for an atomic, whose response always has eight bytes.
            WcOpcode::COMPARE_SWAP | WcOpcode::FETCH_ADD => ATOMIC,
            _ => self.cqe().be32::<BYTES>(),
        }
    }

    #[inline]
    pub(crate) fn qpn(&self) -> u32 {
        self.cqe().be32::<QPN>() & 0xff_ffff
    }

    #[inline]
    pub(crate) fn src_qpn(&self) -> u32 {
        if self.brings_data() { 0 } else { self.cqe().be32::<FLAGS>() & 0xff_ffff }
    }

    /// Whether received data is in the CQE, in place of a datagram's source.
    #[inline]
    fn brings_data(&self) -> bool {
        self.cqe().op_own() & IN_CORE != 0 && !self.is_error()
    }

    #[inline]
    pub(crate) fn imm(&self) -> Option<u32> {
        match self.opcode_byte() {
            opcode::MLX5_CQE_RESP_WR_IMM | opcode::MLX5_CQE_RESP_SEND_IMM => {
                Some(self.cqe().be32::<IMMEDIATE>())
            }
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn invalidated_rkey(&self) -> Option<u32> {
        match self.opcode_byte() {
            opcode::MLX5_CQE_RESP_SEND_INV => Some(self.cqe().be32::<IMMEDIATE>()),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn has_grh(&self) -> bool {
        !self.brings_data() && self.cqe().be32::<FLAGS>() >> 28 & 3 != 0
    }

    #[inline]
    pub(crate) fn vendor_err(&self) -> u32 {
        if self.is_error() { self.cqe().byte::<VENDOR>().into() } else { 0 }
    }

    pub(crate) fn path(&self) -> WcPath {
        let pkey_index = self.cqe().be32::<IMMEDIATE>() as u16;
        if self.brings_data() {
            return WcPath { pkey_index, ..WcPath::default() };
        }
        WcPath {
            pkey_index,
            src_lid: self.cqe().be16::<LID>(),
            service_level: (self.cqe().be32::<FLAGS>() >> 24 & 0xf) as u8,
            path_bits: self.cqe().byte::<PATH>() & 0x7f,
        }
    }

    pub(crate) fn packet(&self) -> WcPacket {
        /// Bits 2 and 3 of the header type: L3 is IPv4.
        const IPV4: u8 = 2;
        // The device puts the flow tag in place of the queue pair's number.
        let flow_tag = self.qpn();
        if self.brings_data() {
            return WcPacket { flow_tag, ..WcPacket::default() };
        }
        let both = checked::CQE_L3_OK | checked::CQE_L4_OK;
        let checked = checked::from_bits_retain(self.cqe().byte::<CHECKED>());
        let kinds = self.cqe().byte::<KINDS>();
        WcPacket {
            flow_tag,
            ip_checksum_ok: checked.contains(both) && kinds >> 2 & 3 == IPV4,
            vlan: (kinds & 1 != 0).then(|| self.cqe().be16::<VLAN>()),
        }
    }

    /// The inline data of the completion, which the device did not write to memory.
    pub(crate) fn scattered(&self) -> Option<Scattered> {
        if self.is_error() {
            return None;
        }
        // Read again from the CQE: for a send the poller does not keep this byte.
        let format = self.cqe().op_own() & (IN_CORE | IN_FRONT);
        match format {
            IN_CORE => Some(Scattered::new(&self.cqe().start(), self.byte_len())),
            IN_FRONT => Some(Scattered::new(&self.cqe().front()?, self.byte_len())),
            _ => None,
        }
    }

    /// When the device wrote the completion, by its own clock. An error CQE has no timestamp: its
    /// syndrome is in the same place.
    pub(crate) fn timestamp(&self) -> Option<u64> {
        if self.is_error() {
            return None;
        }
        let high = u64::from(self.cqe().be32::<TIME_HIGH>());
        Some(high << 32 | u64::from(self.cqe().be32::<TIME_LOW>()))
    }
}

/// The status that a syndrome of the device stands for.
#[cold]
fn status_of(code: u8) -> WcStatus {
    match syndrome(code) {
        syndrome::MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR => WcStatus::LOC_LEN_ERR,
        syndrome::MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR => WcStatus::LOC_QP_OP_ERR,
        syndrome::MLX5_CQE_SYNDROME_LOCAL_PROT_ERR => WcStatus::LOC_PROT_ERR,
        syndrome::MLX5_CQE_SYNDROME_WR_FLUSH_ERR => WcStatus::WR_FLUSH_ERR,
        syndrome::MLX5_CQE_SYNDROME_MW_BIND_ERR => WcStatus::MW_BIND_ERR,
        syndrome::MLX5_CQE_SYNDROME_BAD_RESP_ERR => WcStatus::BAD_RESP_ERR,
        syndrome::MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR => WcStatus::LOC_ACCESS_ERR,
        syndrome::MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR => WcStatus::REM_INV_REQ_ERR,
        syndrome::MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR => WcStatus::REM_ACCESS_ERR,
        syndrome::MLX5_CQE_SYNDROME_REMOTE_OP_ERR => WcStatus::REM_OP_ERR,
        syndrome::MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR => WcStatus::RETRY_EXC_ERR,
        syndrome::MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR => WcStatus::RNR_RETRY_EXC_ERR,
        syndrome::MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR => WcStatus::REM_ABORT_ERR,
        _ => WcStatus::GENERAL_ERR,
    }
}
