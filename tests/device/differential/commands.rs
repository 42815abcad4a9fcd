//! Commands that this library would not send: with handles of other objects, with masks and values that it refuses, and
//! with messages that lack parts or have extra bytes.

use super::words::name;
use super::world::World;
use crate::verdict::Verdict;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use uverbs::{Errno, QpState, QpType};
use uverbs_host::HostFile;
use uverbs_uapi::ah::{
    UVERBS_METHOD_AH_DESTROY, ib_uverbs_ah_attr, ib_uverbs_create_ah, ib_uverbs_global_route,
};
use uverbs_uapi::cq::*;
use uverbs_uapi::device::{
    UVERBS_ATTR_CORE_IN, UVERBS_ATTR_CORE_OUT, UVERBS_ATTR_WRITE_CMD, UVERBS_METHOD_INVOKE_WRITE,
    rdma_driver_id,
};
use uverbs_uapi::ioctl::{
    RDMA_VERBS_IOCTL, UVERBS_ATTR_F_MANDATORY, ib_uverbs_attr, ib_uverbs_ioctl_hdr,
};
use uverbs_uapi::mlx5::abi::{mlx5_ib_create_cq, mlx5_ib_create_qp, mlx5_ib_create_srq};
use uverbs_uapi::mr::{UVERBS_METHOD_MR_DESTROY, ib_uverbs_reg_mr, ib_uverbs_rereg_mr};
use uverbs_uapi::mw::{UVERBS_METHOD_MW_DESTROY, ib_uverbs_alloc_mw};
use uverbs_uapi::object::*;
use uverbs_uapi::pd::UVERBS_METHOD_PD_DESTROY;
use uverbs_uapi::qp::*;
use uverbs_uapi::srq::*;
use uverbs_uapi::write::*;
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// A handle that no object has.
const NONE: u32 = 4000;
/// Spare bytes behind each part, so that a longer length stays within memory.
const ROOM: usize = 256;
/// Bytes of memory for queues.
pub(super) const QUEUES: usize = 16 * 4096;

/// The open file of a context, by Linux or by the kernel in this process.
pub(super) enum File {
    Linux(OwnedFd),
    Hosted(Arc<dyn HostFile>),
}

/// The one ioctl.
struct Verbs(*mut c_void);

// SAFETY: with this number the kernel reads and writes the message, whose parts the caller of `issue` made.
#[allow(unsafe_code, reason = "rustix does not know the request")]
unsafe impl Ioctl for Verbs {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        RDMA_VERBS_IOCTL as Opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.0
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// A part of a message.
#[derive(Clone)]
struct Part {
    id: u16,
    length: u16,
    mandatory: bool,
    kind: PartKind,
    bytes: [u8; ROOM],
}

/// The place of a part's value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PartKind {
    /// In the message, or at an address if it has more than eight bytes.
    Input,
    /// At an address.
    Output,
    /// In the message: a handle.
    Handle(u32),
}

/// A message.
#[derive(Clone)]
struct Message {
    object: u16,
    method: u16,
    parts: Vec<Part>,
    /// For a command that creates an object: how it is destroyed, and the part with its handle (`None`: the response).
    made: Option<(u16, u16, Option<u16>)>,
    text: String,
}

impl Message {
    fn new(object: u16, method: u16, text: String) -> Message {
        Message { object, method, parts: Vec::new(), made: None, text }
    }

    /// A command of the older write(2) interface.
    fn write<T: IntoBytes + Immutable>(number: u32, input: &T, text: String) -> Message {
        Message::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_INVOKE_WRITE, text)
            .word(UVERBS_ATTR_WRITE_CMD, number.into())
            .input(UVERBS_ATTR_CORE_IN, input)
    }

    fn part(mut self, id: u16, kind: PartKind, length: u16) -> Message {
        self.parts.push(Part { id, length, mandatory: true, kind, bytes: [0; ROOM] });
        self
    }

    fn input<T: IntoBytes + Immutable>(self, id: u16, value: &T) -> Message {
        let bytes = value.as_bytes();
        let mut message = self.part(id, PartKind::Input, bytes.len() as u16);
        let part = message.parts.last_mut().expect("one was pushed");
        part.bytes[..bytes.len()].copy_from_slice(bytes);
        message
    }

    fn output(self, id: u16, length: u16) -> Message {
        self.part(id, PartKind::Output, length)
    }

    fn word(self, id: u16, value: u64) -> Message {
        self.input(id, &value)
    }

    fn handle(self, id: u16, handle: u32) -> Message {
        self.part(id, PartKind::Handle(handle), 0)
    }

    /// Makes an object that is destroyed by this method.
    fn makes(mut self, object: u16, method: u16, told: Option<u16>) -> Message {
        self.made = Some((object, method, told));
        self
    }
}

impl File {
    /// Issues a command. The answer has the attributes as the kernel left them.
    #[allow(unsafe_code, reason = "the messages are the test's own")]
    fn issue(&self, message: &mut Message) -> Result<Vec<u64>, Errno> {
        let count = message.parts.len();
        let length = size_of::<ib_uverbs_ioctl_hdr>() + count * size_of::<ib_uverbs_attr>();
        let header = ib_uverbs_ioctl_hdr {
            length: length as u16,
            object_id: message.object,
            method_id: message.method,
            num_attrs: count as u16,
            driver_id: rdma_driver_id::RDMA_DRIVER_MLX5.0,
            ..FromZeros::new_zeroed()
        };
        let mut bytes = header.as_bytes().to_vec();
        for part in &mut message.parts {
            let address = part.bytes.as_mut_ptr().expose_provenance() as u64;
            let data = match part.kind {
                PartKind::Handle(handle) if part.length <= 8 => handle.into(),
                PartKind::Input if part.length <= 8 => {
                    let (word, _) = part.bytes.split_first_chunk().expect("there is room");
                    u64::from_ne_bytes(*word)
                }
                _ => address,
            };
            let attr = ib_uverbs_attr {
                attr_id: part.id,
                len: part.length,
                flags: if part.mandatory { UVERBS_ATTR_F_MANDATORY } else { 0 },
                data,
                ..FromZeros::new_zeroed()
            };
            bytes.extend(attr.as_bytes());
        }
        let word = |word: &[u8]| u64::from_ne_bytes(word.try_into().expect("eight bytes"));
        let mut words: Vec<u64> = bytes.chunks_exact(8).map(word).collect();
        let address = words.as_mut_ptr().cast();
        match self {
            // SAFETY: the message is whole, its parts have room for any length that a step gives them, and the memory
            // of queues stays as long as the file.
            File::Linux(fd) => unsafe { rustix::ioctl::ioctl(fd.as_fd(), Verbs(address)) }?,
            // SAFETY: as above.
            File::Hosted(file) => unsafe { file.ioctl(RDMA_VERBS_IOCTL, address) }?,
        }
        Ok(words)
    }
}

impl World {
    /// The open file of the context.
    pub(super) fn file(&self) -> Verdict<File> {
        Ok(match uverbs_host::adopt(self.context.share()?) {
            Ok(file) => File::Hosted(file),
            Err(fd) => File::Linux(fd),
        })
    }

    /// Issues a random command, and destroys the object that it made.
    pub(super) fn some_command(&mut self) -> Verdict<String> {
        let mut message = match self.random.below(20) {
            0..7 => self.modify_command(),
            7 => self.query_command(),
            8 | 9 => self.reg_command(),
            10 | 11 => self.rereg_command(),
            12 => self.mw_command(),
            13 => self.ah_command(),
            14 => self.srq_command(),
            15 => self.destroy_command(),
            16 => self.cq_command(),
            17 => self.create_srq_command(),
            _ => self.create_qp_command(),
        };
        if self.random.one_in(6) {
            self.corrupt(&mut message);
        }
        let file = self.file()?;
        let answer = file.issue(&mut message);
        let text = std::mem::take(&mut message.text);
        let words = match answer {
            Ok(words) => words,
            Err(errno) => return Ok(format!("{text}: {}", name(errno))),
        };
        let Some((object, method, told)) = message.made else { return Ok(format!("{text}: ok")) };
        let handle = match told {
            Some(id) => {
                let nth = message.parts.iter().position(|part| part.id == id);
                nth.map(|nth| words[3 + 2 * nth + 1] as u32)
            }
            None => {
                let is_it = |part: &&Part| part.id == UVERBS_ATTR_CORE_OUT;
                let response = message.parts.iter().find(is_it).map(|part| &part.bytes[..4]);
                response.and_then(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?)))
            }
        };
        let Some(handle) = handle else { return Ok(format!("{text}: ok, not told")) };
        let mut end = Message::new(object, method, String::new()).handle(0, handle);
        if matches!(object, UVERBS_OBJECT_CQ | UVERBS_OBJECT_QP | UVERBS_OBJECT_SRQ) {
            end = end.output(1, if object == UVERBS_OBJECT_CQ { 8 } else { 4 });
        }
        let gone = file.issue(&mut end).map_or_else(name, |_| "ok".into());
        Ok(format!("{text}: ok, destroyed {gone}"))
    }

    /// Removes something from a message, or adds to it.
    fn corrupt(&mut self, message: &mut Message) {
        let at = self.random.below(message.parts.len());
        match self.random.below(8) {
            0 => {
                message.text += &format!(" without {:#x}", message.parts.remove(at).id);
            }
            1 | 2 => {
                let part = &mut message.parts[at];
                let less = part.length.min(self.random.pick(&[1, 4, 8]));
                part.length -= less;
                message.text += &format!(" {:#x} shorter by {less}", part.id);
            }
            3 => {
                let part = &mut message.parts[at];
                part.length += 8;
                message.text += &format!(" {:#x} longer", part.id);
            }
            4 => {
                let part = &mut message.parts[at];
                part.bytes[usize::from(part.length)] = 1;
                part.length += 8;
                message.text += &format!(" {:#x} longer by what counts", part.id);
            }
            5 => {
                let mut part = message.parts[at].clone();
                part.id = self.random.pick(&[0x20, 0x100, 0xfff, 0x1007, 0xf000]);
                part.mandatory = self.random.one_in(2);
                let must = if part.mandatory { "" } else { " optional" };
                message.text += &format!(" and{must} {:#x}", part.id);
                message.parts.push(part);
            }
            6 => {
                message.parts.push(message.parts[at].clone());
                message.text += &format!(" {:#x} twice", message.parts[at].id);
            }
            _ => {
                let (object, method) =
                    self.random.pick(&[(0x40, 0), (0, 0x77), (4, 0x40), (0x1010, 0)]);
                (message.object, message.method) = (object, method);
                message.text += &format!(" as method {method:#x} of {object:#x}");
            }
        }
    }

    /// The handle of an object of a kind, or of something else.
    fn some_handle(&mut self, kind: &str) -> (u32, String) {
        let (at, bad) = (self.random.below(3), self.random.one_in(8));
        let kind = match bad {
            true => self.random.pick(&["pd", "cq", "qp", "mr", "srq", "ah", "none"]),
            false => kind,
        };
        let handle = match kind {
            "pd" => self.pds[at / 2].as_ref().map(|pd| pd.handle()),
            "cq" => self.cqs[at / 2 * 2].as_ref().map(|cq| cq.handle()),
            "qp" => self.qps[at].as_ref().map(|queue| queue.qp.handle()),
            "mr" => self.mrs[at].as_ref().map(|mr| mr.handle()),
            "srq" => self.srqs[0].as_ref().map(|srq| srq.handle()),
            _ => None,
        };
        (handle.unwrap_or(NONE), format!("{kind}{at}"))
    }

    fn modify_command(&mut self) -> Message {
        use ib_qp_attr_mask as M;
        let (handle, said) = self.some_handle("qp");
        let queue = self.qps.iter().flatten().find(|queue| queue.qp.handle() == handle);
        let (kind, from) = queue.map_or((QpType::RC, QpState::RESET), |queue| {
            let state = queue.qp.query().map_or(QpState::RESET, |info| info.state);
            (queue.qp.qp_type(), state)
        });
        let next = match from {
            QpState::RESET => QpState::INIT,
            QpState::INIT => QpState::RTR,
            QpState::RTR | QpState::RTS => QpState::RTS,
            _ => QpState::RESET,
        };
        let others = [0, 1, 2, 3, 4, 5, 6, 7, 255];
        let to = if self.random.one_in(4) { self.random.pick(&others) } else { next.0 };
        let connected = kind != QpType::UD;
        let mut mask = M::IB_QP_STATE;
        mask |= match (from, QpState(to)) {
            (QpState::RESET, QpState::INIT) if connected => {
                M::IB_QP_PKEY_INDEX | M::IB_QP_PORT | M::IB_QP_ACCESS_FLAGS
            }
            (QpState::RESET, QpState::INIT) => M::IB_QP_PKEY_INDEX | M::IB_QP_PORT | M::IB_QP_QKEY,
            (QpState::INIT, QpState::RTR) if connected => {
                M::IB_QP_AV | M::IB_QP_PATH_MTU | M::IB_QP_DEST_QPN | M::IB_QP_RQ_PSN
            }
            (QpState::RTR, QpState::RTS) => M::IB_QP_SQ_PSN,
            _ => M::empty(),
        };
        if kind == QpType::RC {
            mask |= match (from, QpState(to)) {
                (QpState::INIT, QpState::RTR) => {
                    M::IB_QP_MAX_DEST_RD_ATOMIC | M::IB_QP_MIN_RNR_TIMER
                }
                (QpState::RTR, QpState::RTS) => {
                    M::IB_QP_TIMEOUT
                        | M::IB_QP_RETRY_CNT
                        | M::IB_QP_RNR_RETRY
                        | M::IB_QP_MAX_QP_RD_ATOMIC
                }
                _ => M::empty(),
            };
        }
        let good = self.path.global;
        let mut raw = ib_uverbs_modify_qp {
            qp_handle: handle,
            qkey: 5,
            rq_psn: 7,
            sq_psn: 9,
            dest_qp_num: 3,
            qp_access_flags: 0xf,
            qp_state: to,
            cur_qp_state: from.0,
            path_mtu: 3,
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            port_num: 1,
            timeout: 14,
            retry_cnt: 3,
            rnr_retry: 3,
            ..FromZeros::new_zeroed()
        };
        raw.dest.port_num = 1;
        if let Some(global) = good {
            raw.dest.dgid = global.dgid.0;
            raw.dest.is_global = 1;
            raw.dest.sgid_index = global.sgid_index as u8;
            raw.dest.hop_limit = 64;
        }
        let mut odd = String::new();
        if self.random.one_in(2) {
            let bit = M::from_bits_retain(1 << self.random.below(27));
            mask ^= bit;
            odd += &format!(" ^{:#x}", bit.bits());
        }
        if self.random.one_in(2) {
            odd += &self.odd_attribute(&mut raw);
        }
        raw.attr_mask = mask.bits();
        let text = format!(
            "MODIFY_QP {said} {kind:?} {from:?}→{} mask {:#x}{odd}",
            QpState(to)
                .description()
                .map_or_else(|| to.to_string(), |_| format!("{:?}", QpState(to))),
            mask.bits()
        );
        if !self.random.one_in(4) {
            return Message::write(IB_USER_VERBS_CMD_MODIFY_QP, &raw, text);
        }
        let (rate_limit, reserved) =
            (self.random.pick(&[0, 0, 1000]), self.random.below(8) as u32 / 7);
        let raw = ib_uverbs_ex_modify_qp { base: raw, rate_limit, reserved };
        let number = IB_USER_VERBS_EX_CMD_MODIFY_QP | IB_USER_VERBS_CMD_FLAG_EXTENDED;
        let text = text + &format!(" ex rate {rate_limit} reserved {reserved}");
        Message::write(number, &raw, text).output(UVERBS_ATTR_CORE_OUT, 8)
    }

    /// Gives an attribute a value that the kernel may refuse.
    fn odd_attribute(&mut self, raw: &mut ib_uverbs_modify_qp) -> String {
        let wrong = self.random.pick(&[0, 1, 2, 3, 6, 8, 17, 32, 64, 128, 255]);
        let (what, field) = match self.random.below(18) {
            0 => ("pkey_index", None),
            1 => ("port", Some(&mut raw.port_num)),
            2 => ("mtu", Some(&mut raw.path_mtu)),
            3 => ("rd", Some(&mut raw.max_rd_atomic)),
            4 => ("dest_rd", Some(&mut raw.max_dest_rd_atomic)),
            5 => ("rnr_timer", Some(&mut raw.min_rnr_timer)),
            6 => ("timeout", Some(&mut raw.timeout)),
            7 => ("retry", Some(&mut raw.retry_cnt)),
            8 => ("rnr_retry", Some(&mut raw.rnr_retry)),
            9 => ("current", Some(&mut raw.cur_qp_state)),
            10 => ("mig", Some(&mut raw.path_mig_state)),
            11 => ("path port", Some(&mut raw.dest.port_num)),
            12 => ("GID index", Some(&mut raw.dest.sgid_index)),
            13 => ("global", Some(&mut raw.dest.is_global)),
            14 => ("sl", Some(&mut raw.dest.sl)),
            15 => ("rate", Some(&mut raw.dest.static_rate)),
            16 => ("alternate port", Some(&mut raw.alt_port_num)),
            _ => ("access", None),
        };
        match field {
            Some(field) => *field = wrong,
            None if what == "access" => raw.qp_access_flags = 1 << (wrong & 31),
            None => raw.pkey_index = wrong.into(),
        }
        format!(" {what} {wrong}")
    }

    fn query_command(&mut self) -> Message {
        let (handle, said) = self.some_handle("qp");
        let mask = self.random.pick(&[0, 1, 0x1f_ffff, u32::MAX]);
        let raw = ib_uverbs_query_qp { qp_handle: handle, attr_mask: mask, response: 0 };
        Message::write(IB_USER_VERBS_CMD_QUERY_QP, &raw, format!("QUERY_QP {said} mask {mask:#x}"))
            .output(UVERBS_ATTR_CORE_OUT, 128)
    }

    /// Access flags, sometimes with an invalid one.
    fn some_flags(&mut self) -> u32 {
        let flags = self.random.pick(&[0, 1, 3, 5, 7, 0xf, 0x11, 0x1f]);
        if self.random.one_in(2) { flags } else { flags ^ 1 << self.random.below(32) }
    }

    fn reg_command(&mut self) -> Message {
        let (pd, said) = self.some_handle("pd");
        let access_flags = self.some_flags();
        let arena = self.arena.as_ptr().expose_provenance() as u64;
        let (what, start, length, hca_va) = match self.random.below(10) {
            0 => ("of no bytes", arena, 0, arena),
            1 => ("of no memory", 4096, 4096, 4096),
            2 => ("beyond all memory", arena, 1 << 62, arena),
            3 => ("around the end", arena, u64::MAX - arena, arena),
            4 => ("around the end by an address", arena, 4096, u64::MAX - 4095),
            5 => ("off the page", arena, 100, arena + 1),
            _ => ("of the arena", arena + 8, 5000, arena + 8),
        };
        let raw =
            ib_uverbs_reg_mr { response: 0, start, length, hca_va, pd_handle: pd, access_flags };
        let text = format!("REG_MR {said} {what} access {access_flags:#x}");
        Message::write(IB_USER_VERBS_CMD_REG_MR, &raw, text).output(UVERBS_ATTR_CORE_OUT, 12).makes(
            UVERBS_OBJECT_MR,
            UVERBS_METHOD_MR_DESTROY,
            None,
        )
    }

    fn rereg_command(&mut self) -> Message {
        let ((mr, said), (pd, to)) = (self.some_handle("mr"), self.some_handle("pd"));
        let access_flags = self.some_flags();
        let flags = self.random.pick(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 1 << 31]);
        let arena = self.arena.as_ptr().expose_provenance() as u64;
        let (what, start, length, hca_va) = match self.random.below(6) {
            0 => ("of no bytes", arena, 0, arena),
            1 => ("of no memory", 4096, 4096, 4096),
            2 => ("around the end", arena, u64::MAX - arena, arena),
            3 => ("off the page", arena, 100, arena + 1),
            _ => ("of the arena", arena + 8, 5000, arena + 8),
        };
        let raw = ib_uverbs_rereg_mr {
            response: 0,
            mr_handle: mr,
            flags,
            start,
            length,
            hca_va,
            pd_handle: pd,
            access_flags,
        };
        let text =
            format!("REREG_MR {said} flags {flags:#x} {what} access {access_flags:#x} in {to}");
        Message::write(IB_USER_VERBS_CMD_REREG_MR, &raw, text).output(UVERBS_ATTR_CORE_OUT, 8)
    }

    fn mw_command(&mut self) -> Message {
        let (pd, said) = self.some_handle("pd");
        let mw_type = self.random.pick(&[0, 1, 2, 3, 255]);
        let reserved = [0, 0, self.random.below(4) as u8 / 3];
        let raw = ib_uverbs_alloc_mw { response: 0, pd_handle: pd, mw_type, reserved };
        let text = format!("ALLOC_MW {said} type {mw_type} reserved {}", reserved[2]);
        Message::write(IB_USER_VERBS_CMD_ALLOC_MW, &raw, text)
            .output(UVERBS_ATTR_CORE_OUT, 8)
            .makes(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY, None)
    }

    fn ah_command(&mut self) -> Message {
        let (pd, said) = self.some_handle("pd");
        let Some(global) = self.path.global else { return self.mw_command() };
        let mut attr = ib_uverbs_ah_attr {
            grh: ib_uverbs_global_route {
                dgid: global.dgid.0,
                sgid_index: global.sgid_index as u8,
                hop_limit: 64,
                ..FromZeros::new_zeroed()
            },
            is_global: 1,
            port_num: 1,
            ..FromZeros::new_zeroed()
        };
        let wrong = self.random.pick(&[0, 2, 5, 16, 40, 127, 255]);
        let (what, field) = match self.random.below(9) {
            0 => ("port", &mut attr.port_num),
            1 => ("global", &mut attr.is_global),
            2 => ("GID index", &mut attr.grh.sgid_index),
            3 => ("rate", &mut attr.static_rate),
            4 => ("sl", &mut attr.sl),
            5 => ("hops", &mut attr.grh.hop_limit),
            _ => ("class", &mut attr.grh.traffic_class),
        };
        *field = wrong;
        let raw = ib_uverbs_create_ah { pd_handle: pd, attr, ..FromZeros::new_zeroed() };
        let text = format!("CREATE_AH {said} {what} {wrong}");
        let message = Message::write(IB_USER_VERBS_CMD_CREATE_AH, &raw, text)
            .output(UVERBS_ATTR_CORE_OUT, 4)
            .makes(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY, None);
        let room = self.random.pick(&[16, 16, 8, 24]);
        let mut message = message.output(UVERBS_ATTR_UHW_OUT, room);
        message.text += &format!(" room {room}");
        message
    }

    fn srq_command(&mut self) -> Message {
        let (srq, said) = self.some_handle("srq");
        if self.random.one_in(3) {
            let raw = ib_uverbs_query_srq { srq_handle: srq, ..FromZeros::new_zeroed() };
            return Message::write(IB_USER_VERBS_CMD_QUERY_SRQ, &raw, format!("QUERY_SRQ {said}"))
                .output(UVERBS_ATTR_CORE_OUT, 16);
        }
        let attr_mask = self.random.pick(&[0, 1, 2, 2, 2, 3, 4, 6, 1 << 31]);
        let (max_wr, srq_limit) = (
            self.random.pick(&[0, 16, 1 << 20]),
            self.random.pick(&[0, 1, 15, 16, 31, 32, 33, 1 << 16]),
        );
        let raw = ib_uverbs_modify_srq { srq_handle: srq, attr_mask, max_wr, srq_limit };
        let text = format!("MODIFY_SRQ {said} mask {attr_mask:#x} wr {max_wr} limit {srq_limit}");
        Message::write(IB_USER_VERBS_CMD_MODIFY_SRQ, &raw, text)
    }

    /// Destroys an object that others use, or names one of another type.
    fn destroy_command(&mut self) -> Message {
        let (kind, object, method) = self.random.pick(&[
            ("pd", UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY),
            ("cq", UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY),
            ("mw", UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY),
            ("ah", UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY),
        ]);
        let named = if kind == "cq" { "cq" } else { "pd" };
        let (handle, said) = self.some_handle(named);
        let message = Message::new(object, method, format!("destroy {kind} {said}"));
        let message = message.handle(0, handle);
        if kind == "cq" { message.output(1, 8) } else { message }
    }

    /// The address of memory for a queue, or an unmapped address.
    fn some_buffer(&mut self) -> (u64, &'static str) {
        let queues = self.queues.as_ptr().expose_provenance() as u64;
        match self.random.below(10) {
            0 => (4096, "of no memory"),
            1 => (queues + 64, "at 64"),
            2 => (queues + 7, "at 7"),
            _ => (queues, "at a page"),
        }
    }

    /// The address of a doorbell record.
    fn some_record(&mut self) -> (u64, &'static str) {
        let records = self.queues.as_ptr().expose_provenance() as u64 + QUEUES as u64 - 4096;
        match self.random.below(12) {
            0 => (4096, "record of no memory"),
            1 => (records + 4, "record at 4"),
            _ => (records, "record"),
        }
    }

    fn cq_command(&mut self) -> Message {
        let ((buf_addr, at), (db_addr, record)) = (self.some_buffer(), self.some_record());
        let cqe = self.random.pick(&[1, 7, 63, 63, 0, 1 << 22, u32::MAX]);
        let cqe_size = self.random.pick(&[64, 64, 64, 128, 0, 32, 256]);
        let vector: u32 = self.random.pick(&[0, 0, 0, 1, 2, 1000]);
        let flags: u32 = self.random.pick(&[0, 0, 0, 1, 2, 4, 8]);
        let driver_flags = self.random.pick(&[0, 0, 0, 0, 1, 2, 4, 8]);
        let driver = mlx5_ib_create_cq {
            buf_addr,
            db_addr,
            cqe_size,
            flags: driver_flags,
            ..FromZeros::new_zeroed()
        };
        let text = format!(
            "CREATE_CQ cqe {cqe} size {cqe_size} vector {vector} flags {flags:#x} {driver_flags:#x} {at} {record}"
        );
        Message::new(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE, text)
            .handle(UVERBS_ATTR_CREATE_CQ_HANDLE, 0)
            .input(UVERBS_ATTR_CREATE_CQ_CQE, &cqe)
            .word(UVERBS_ATTR_CREATE_CQ_USER_HANDLE, 0)
            .input(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR, &vector)
            .input(UVERBS_ATTR_CREATE_CQ_FLAGS, &flags)
            .output(UVERBS_ATTR_CREATE_CQ_RESP_CQE, 4)
            .input(UVERBS_ATTR_UHW_IN, &driver)
            .output(UVERBS_ATTR_UHW_OUT, 8)
            .makes(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY, Some(UVERBS_ATTR_CREATE_CQ_HANDLE))
    }

    fn create_srq_command(&mut self) -> Message {
        let ((buf_addr, at), (db_addr, record)) = (self.some_buffer(), self.some_record());
        let (pd, said) = self.some_handle("pd");
        let wr = self.random.pick(&[1, 16, 63, 0, 32767, 32768, u32::MAX]);
        let sge = self.random.pick(&[1, 2, 3, 0, 31, 32, u32::MAX]);
        let limit: u32 = self.random.pick(&[0, 0, 1, 64, u32::MAX]);
        let kind: u64 = self.random.pick(&[0, 0, 0, 1, 2, 3]);
        let driver_flags = self.random.pick(&[0, 0, 0, 1, 2]);
        let uidx = self.random.pick(&[0xff_ffff, 0xff_ffff, 0, 1 << 24]);
        let driver = mlx5_ib_create_srq {
            buf_addr,
            db_addr,
            flags: driver_flags,
            uidx,
            ..FromZeros::new_zeroed()
        };
        let text = format!(
            "CREATE_SRQ {said} type {kind} wr {wr} sge {sge} limit {limit} flags {driver_flags:#x} uidx {uidx:#x} {at} {record}"
        );
        Message::new(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE, text)
            .handle(UVERBS_ATTR_CREATE_SRQ_HANDLE, 0)
            .handle(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE, pd)
            .word(UVERBS_ATTR_CREATE_SRQ_USER_HANDLE, 0)
            .input(UVERBS_ATTR_CREATE_SRQ_MAX_WR, &wr)
            .input(UVERBS_ATTR_CREATE_SRQ_MAX_SGE, &sge)
            .input(UVERBS_ATTR_CREATE_SRQ_LIMIT, &limit)
            .word(UVERBS_ATTR_CREATE_SRQ_TYPE, kind)
            .output(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, 4)
            .output(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, 4)
            .output(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 4)
            .input(UVERBS_ATTR_UHW_IN, &driver)
            .output(UVERBS_ATTR_UHW_OUT, 8)
            .makes(
                UVERBS_OBJECT_SRQ,
                UVERBS_METHOD_SRQ_DESTROY,
                Some(UVERBS_ATTR_CREATE_SRQ_HANDLE),
            )
    }

    fn create_qp_command(&mut self) -> Message {
        let ((buf_addr, at), (db_addr, record)) = (self.some_buffer(), self.some_record());
        let ((pd, said), (cq, queue)) = (self.some_handle("pd"), self.some_handle("cq"));
        // RC, UC, UD, an XRC initiator, and types that do not exist.
        let kind: u64 = self.random.pick(&[2, 2, 3, 4, 9, 0, 1, 5, 7, 255]);
        let mut cap = ib_uverbs_qp_cap {
            max_send_wr: 8,
            max_recv_wr: if kind == 9 { 0 } else { 8 },
            max_send_sge: 2,
            max_recv_sge: if kind == 9 { 0 } else { 2 },
            max_inline_data: 64,
        };
        let mut driver = mlx5_ib_create_qp {
            buf_addr,
            db_addr,
            sq_wqe_count: 16,
            rq_wqe_count: if kind == 9 { 0 } else { 8 },
            rq_wqe_shift: 5,
            uidx: 0xff_ffff,
            ..FromZeros::new_zeroed()
        };
        let mut text = format!("CREATE_QP {said} {queue} type {kind} {at} {record}");
        if self.random.one_in(2) {
            let wrong = self.random.pick(&[0, 1, 3, 9, 64, 1 << 15, 1 << 16, u32::MAX]);
            let (what, field) = match self.random.below(11) {
                0 => ("send wr", &mut cap.max_send_wr),
                1 => ("recv wr", &mut cap.max_recv_wr),
                2 => ("send sge", &mut cap.max_send_sge),
                3 => ("recv sge", &mut cap.max_recv_sge),
                4 => ("inline", &mut cap.max_inline_data),
                5 => ("SQ WQEs", &mut driver.sq_wqe_count),
                6 => ("RQ WQEs", &mut driver.rq_wqe_count),
                7 => ("RQ shift", &mut driver.rq_wqe_shift),
                8 => ("driver flags", &mut driver.flags),
                9 => ("uidx", &mut driver.uidx),
                _ => ("bfreg", &mut driver.bfreg_index),
            };
            *field = wrong;
            text += &format!(" {what} {wrong:#x}");
        }
        let flags: u32 = self.random.pick(&[0, 0, 0, 0, 1 << 1, 1 << 11, 1 << 4, 1 << 8, 1 << 20]);
        text += &format!(" flags {flags:#x}");
        Message::new(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE, text)
            .handle(UVERBS_ATTR_CREATE_QP_HANDLE, 0)
            .handle(UVERBS_ATTR_CREATE_QP_PD_HANDLE, pd)
            .handle(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, cq)
            .handle(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, cq)
            .word(UVERBS_ATTR_CREATE_QP_USER_HANDLE, 0)
            .input(UVERBS_ATTR_CREATE_QP_CAP, &cap)
            .word(UVERBS_ATTR_CREATE_QP_TYPE, kind)
            .input(UVERBS_ATTR_CREATE_QP_FLAGS, &flags)
            .output(UVERBS_ATTR_CREATE_QP_RESP_CAP, 20)
            .output(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 4)
            .input(UVERBS_ATTR_UHW_IN, &driver)
            .output(UVERBS_ATTR_UHW_OUT, 32)
            .makes(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY, Some(UVERBS_ATTR_CREATE_QP_HANDLE))
    }
}
