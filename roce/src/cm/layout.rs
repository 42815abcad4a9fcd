//! The messages as structs of bytes: each field where [`super`] draws it.

use super::{About, BadMad, Confirmation, Dreq, Ece, Message, Mra, Path, Rej, Rep, Req, Service};
use super::{SidrRep, SidrReq};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a message behind the header of its MAD.
const BODY: usize = 232;

macro_rules! layouts {
    ($( struct $name:ident[$size:expr] { $( $field:ident: $type:ty, )* } )*) => {
        $(
            #[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
            #[repr(C)]
            pub(super) struct $name { $( pub(super) $field: $type, )* }

            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}

layouts! {
    struct RawMad[super::MAD] {
        base_version: u8,
        class: u8,
        class_version: u8,
        method: u8,
        status: U16,
        class_specific: U16,
        transaction: U64,
        attribute: U16,
        reserved: U16,
        modifier: U32,
        body: [u8; BODY],
    }

    struct RawPath[44] {
        local_lid: U16,
        remote_lid: U16,
        local_gid: [u8; 16],
        remote_gid: [u8; 16],
        flow: U32,
        traffic_class: u8,
        hop_limit: u8,
        level: u8,
        ack: u8,
    }

    struct RawReq[BODY] {
        local_id: U32,
        vendor: U32,
        service_id: U64,
        ca_guid: U64,
        reserved: U32,
        qkey: U32,
        queue_pair: U32,
        context: U32,
        remote: U32,
        starting: U32,
        pkey: U16,
        mtu: u8,
        cm_retries: u8,
        primary: RawPath,
        alternate: RawPath,
        private_data: [u8; 92],
    }

    struct RawMra[BODY] {
        local_id: U32,
        remote_id: U32,
        about: u8,
        timeout: u8,
        private_data: [u8; 222],
    }

    struct RawRej[BODY] {
        local_id: U32,
        remote_id: U32,
        about: u8,
        info_length: u8,
        reason: U16,
        info: [u8; 72],
        private_data: [u8; 148],
    }

    struct RawRep[BODY] {
        local_id: U32,
        remote_id: U32,
        qkey: U32,
        queue_pair: U32,
        context: U32,
        starting: U32,
        responder_resources: u8,
        initiator_depth: u8,
        ack: u8,
        rnr: u8,
        ca_guid: U64,
        private_data: [u8; 196],
    }

    struct RawConfirmation[BODY] {
        local_id: U32,
        remote_id: U32,
        private_data: [u8; 224],
    }

    struct RawDreq[BODY] {
        local_id: U32,
        remote_id: U32,
        queue_pair: U32,
        private_data: [u8; 220],
    }

    struct RawSidrReq[BODY] {
        request_id: U32,
        pkey: U16,
        reserved: U16,
        service_id: U64,
        private_data: [u8; 216],
    }

    struct RawSidrRep[BODY] {
        request_id: U32,
        status: u8,
        info_length: u8,
        vendor: U16,
        queue_pair: U32,
        service_id: U64,
        qkey: U32,
        info: [u8; 72],
        private_data: [u8; 136],
    }

    struct RawIp[super::IP_ADDRESSING] {
        version: u8,
        ip_version: u8,
        source_port: U16,
        source: [u8; 16],
        destination: [u8; 16],
    }
}

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;

/// Bytes of the info of REJ and SIDR_REP.
const INFO: u8 = 72;

/// A word of 24 bits and a byte.
fn wide(high: u32, low: u8) -> U32 {
    (high << 8 | u32::from(low)).into()
}

/// The 24 bits and the byte of a word.
fn split(word: U32) -> (u32, u8) {
    (word.get() >> 8, word.get() as u8)
}

/// A byte of fields, each with its width in bits, from the high bits to the low ones.
fn pack<const N: usize>(fields: [(u8, u8); N]) -> u8 {
    let append =
        |byte: u16, (value, width): (u8, u8)| byte << width | u16::from(value) & ((1 << width) - 1);
    fields.into_iter().fold(0, append) as u8
}

/// The fields of a byte, by their widths, from the high bits to the low ones.
fn unpack<const N: usize>(byte: u8, widths: [u8; N]) -> [u8; N] {
    let mut left = 8;
    widths.map(|width| {
        left -= width;
        byte >> left & (((1u16 << width) - 1) as u8)
    })
}

impl About {
    fn code(self) -> u8 {
        match self {
            About::Req => 0,
            About::Rep => 1,
            About::Other => 2,
        }
    }

    fn of(code: u8) -> Result<About, BadMad> {
        match code {
            0 => Ok(About::Req),
            1 => Ok(About::Rep),
            2 => Ok(About::Other),
            code => Err(BadMad::Field("message that is answered", code.into())),
        }
    }
}

impl Service {
    /// Transport, and extended transport.
    fn codes(self) -> (u8, u8) {
        match self {
            Service::Rc => (0, 0),
            Service::Uc => (1, 0),
            Service::Xrc => (3, 1),
        }
    }

    fn of(transport: u8, extended: u8) -> Result<Service, BadMad> {
        match (transport, extended) {
            (0, _) => Ok(Service::Rc),
            (1, _) => Ok(Service::Uc),
            (3, 1) => Ok(Service::Xrc),
            (3, extended) => Err(BadMad::Field("extended transport", extended.into())),
            (transport, _) => Err(BadMad::Field("transport of a connection", transport.into())),
        }
    }
}

impl Path {
    fn write(&self) -> RawPath {
        RawPath {
            local_lid: self.local_lid.into(),
            remote_lid: self.remote_lid.into(),
            local_gid: self.local_gid,
            remote_gid: self.remote_gid,
            flow: (self.flow_label << 12 | u32::from(self.rate & 0x3f)).into(),
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            level: pack([(self.service_level, 4), (self.subnet_local.into(), 1), (0, 3)]),
            ack: pack([(self.ack_timeout, 5), (0, 3)]),
        }
    }

    fn read(raw: &RawPath) -> Path {
        let [service_level, subnet_local, _] = unpack(raw.level, [4, 1, 3]);
        let [ack_timeout, _] = unpack(raw.ack, [5, 3]);
        Path {
            local_lid: raw.local_lid.get(),
            remote_lid: raw.remote_lid.get(),
            local_gid: raw.local_gid,
            remote_gid: raw.remote_gid,
            flow_label: raw.flow.get() >> 12,
            rate: (raw.flow.get() & 0x3f) as u8,
            traffic_class: raw.traffic_class,
            hop_limit: raw.hop_limit,
            service_level,
            subnet_local: subnet_local != 0,
            ack_timeout,
        }
    }
}

impl Req {
    fn write(&self) -> RawReq {
        let (transport, extended) = self.service.codes();
        let flow_control = self.flow_control.into();
        RawReq {
            local_id: self.local_id.into(),
            vendor: (self.ece.vendor & 0xff_ffff).into(),
            service_id: self.service_id.into(),
            ca_guid: self.ca_guid.into(),
            reserved: 0.into(),
            qkey: self.qkey.into(),
            queue_pair: wide(self.qpn, self.responder_resources),
            context: wide(0, self.initiator_depth),
            remote: wide(
                0,
                pack([(self.remote_response_timeout, 5), (transport, 2), (flow_control, 1)]),
            ),
            starting: wide(
                self.starting_psn,
                pack([(self.local_response_timeout, 5), (self.retries, 3)]),
            ),
            pkey: self.pkey.into(),
            mtu: pack([(self.mtu, 4), (0, 1), (self.rnr_retries, 3)]),
            cm_retries: pack([(self.cm_retries, 4), (self.srq.into(), 1), (extended, 3)]),
            primary: self.path.write(),
            alternate: Path::default().write(),
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawReq, options: u32) -> Result<Req, BadMad> {
        let (qpn, responder_resources) = split(raw.queue_pair);
        let (_, initiator_depth) = split(raw.context);
        let (_, remote) = split(raw.remote);
        let [remote_response_timeout, transport, flow_control] = unpack(remote, [5, 2, 1]);
        let (starting_psn, local) = split(raw.starting);
        let [local_response_timeout, retries] = unpack(local, [5, 3]);
        let [mtu, _, rnr_retries] = unpack(raw.mtu, [4, 1, 3]);
        let [cm_retries, srq, extended] = unpack(raw.cm_retries, [4, 1, 3]);
        if !(1..=5).contains(&mtu) {
            return Err(BadMad::Field("path MTU", mtu.into()));
        }
        Ok(Req {
            local_id: raw.local_id.get(),
            ece: Ece { vendor: raw.vendor.get() & 0xff_ffff, options },
            service_id: raw.service_id.get(),
            ca_guid: raw.ca_guid.get(),
            qkey: raw.qkey.get(),
            qpn,
            responder_resources,
            initiator_depth,
            remote_response_timeout,
            service: Service::of(transport, extended)?,
            flow_control: flow_control != 0,
            starting_psn,
            local_response_timeout,
            retries,
            pkey: raw.pkey.get(),
            mtu,
            rnr_retries,
            cm_retries,
            srq: srq != 0,
            path: Path::read(&raw.primary),
            private_data: raw.private_data,
        })
    }
}

impl Mra {
    fn write(&self) -> RawMra {
        RawMra {
            local_id: self.local_id.into(),
            remote_id: self.remote_id.into(),
            about: pack([(self.about.code(), 2), (0, 6)]),
            timeout: pack([(self.service_timeout, 5), (0, 3)]),
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawMra) -> Result<Mra, BadMad> {
        let [about, _] = unpack(raw.about, [2, 6]);
        let [service_timeout, _] = unpack(raw.timeout, [5, 3]);
        Ok(Mra {
            local_id: raw.local_id.get(),
            remote_id: raw.remote_id.get(),
            about: About::of(about)?,
            service_timeout,
            private_data: raw.private_data,
        })
    }
}

/// Checks the length of the info of REJ and SIDR_REP.
fn info_length(length: u8) -> Result<u8, BadMad> {
    match length {
        0..=INFO => Ok(length),
        length => Err(BadMad::Field("length of the info", length.into())),
    }
}

impl Rej {
    fn write(&self) -> RawRej {
        RawRej {
            local_id: self.local_id.into(),
            remote_id: self.remote_id.into(),
            about: pack([(self.about.code(), 2), (0, 6)]),
            info_length: pack([(self.info_length.min(INFO), 7), (0, 1)]),
            reason: self.reason.into(),
            info: self.info,
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawRej) -> Result<Rej, BadMad> {
        let [about, _] = unpack(raw.about, [2, 6]);
        let [length, _] = unpack(raw.info_length, [7, 1]);
        Ok(Rej {
            local_id: raw.local_id.get(),
            remote_id: raw.remote_id.get(),
            about: About::of(about)?,
            reason: raw.reason.get(),
            info_length: info_length(length)?,
            info: raw.info,
            private_data: raw.private_data,
        })
    }
}

impl Rep {
    fn write(&self) -> RawRep {
        let [_, high, middle, low] = self.ece.vendor.to_be_bytes();
        let flow_control = self.flow_control.into();
        RawRep {
            local_id: self.local_id.into(),
            remote_id: self.remote_id.into(),
            qkey: self.qkey.into(),
            queue_pair: wide(self.qpn, high),
            context: wide(self.ee_context, middle),
            starting: wide(self.starting_psn, low),
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            ack: pack([(self.ack_delay, 5), (self.failover, 2), (flow_control, 1)]),
            rnr: pack([(self.rnr_retries, 3), (self.srq.into(), 1), (0, 4)]),
            ca_guid: self.ca_guid.into(),
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawRep, options: u32) -> Rep {
        let (qpn, high) = split(raw.queue_pair);
        let (ee_context, middle) = split(raw.context);
        let (starting_psn, low) = split(raw.starting);
        let [ack_delay, failover, flow_control] = unpack(raw.ack, [5, 2, 1]);
        let [rnr_retries, srq, _] = unpack(raw.rnr, [3, 1, 4]);
        Rep {
            local_id: raw.local_id.get(),
            remote_id: raw.remote_id.get(),
            ece: Ece { vendor: u32::from_be_bytes([0, high, middle, low]), options },
            qkey: raw.qkey.get(),
            qpn,
            ee_context,
            starting_psn,
            responder_resources: raw.responder_resources,
            initiator_depth: raw.initiator_depth,
            ack_delay,
            failover,
            flow_control: flow_control != 0,
            rnr_retries,
            srq: srq != 0,
            ca_guid: raw.ca_guid.get(),
            private_data: raw.private_data,
        }
    }
}

impl Confirmation {
    fn write(&self) -> RawConfirmation {
        RawConfirmation {
            local_id: self.local_id.into(),
            remote_id: self.remote_id.into(),
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawConfirmation) -> Confirmation {
        Confirmation {
            local_id: raw.local_id.get(),
            remote_id: raw.remote_id.get(),
            private_data: raw.private_data,
        }
    }
}

impl Dreq {
    fn write(&self) -> RawDreq {
        RawDreq {
            local_id: self.local_id.into(),
            remote_id: self.remote_id.into(),
            queue_pair: wide(self.remote_qpn, 0),
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawDreq) -> Dreq {
        Dreq {
            local_id: raw.local_id.get(),
            remote_id: raw.remote_id.get(),
            remote_qpn: split(raw.queue_pair).0,
            private_data: raw.private_data,
        }
    }
}

impl SidrReq {
    fn write(&self) -> RawSidrReq {
        RawSidrReq {
            request_id: self.request_id.into(),
            pkey: self.pkey.into(),
            reserved: 0.into(),
            service_id: self.service_id.into(),
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawSidrReq) -> SidrReq {
        SidrReq {
            request_id: raw.request_id.get(),
            pkey: raw.pkey.get(),
            service_id: raw.service_id.get(),
            private_data: raw.private_data,
        }
    }
}

impl SidrRep {
    fn write(&self) -> RawSidrRep {
        RawSidrRep {
            request_id: self.request_id.into(),
            status: self.status,
            info_length: self.info_length.min(INFO),
            vendor: ((self.ece.vendor >> 8) as u16).into(),
            queue_pair: wide(self.qpn, self.ece.vendor as u8),
            service_id: self.service_id.into(),
            qkey: self.qkey.into(),
            info: self.info,
            private_data: self.private_data,
        }
    }

    fn read(raw: &RawSidrRep, options: u32) -> Result<SidrRep, BadMad> {
        let (qpn, low) = split(raw.queue_pair);
        let vendor = u32::from(raw.vendor.get()) << 8 | u32::from(low);
        Ok(SidrRep {
            request_id: raw.request_id.get(),
            status: raw.status,
            ece: Ece { vendor, options },
            qpn,
            service_id: raw.service_id.get(),
            qkey: raw.qkey.get(),
            info_length: info_length(raw.info_length)?,
            info: raw.info,
            private_data: raw.private_data,
        })
    }
}

/// The attribute ID, the attribute modifier and the bytes of a message.
pub(super) fn write(message: &Message) -> (u16, u32, [u8; BODY]) {
    let ece = |ece: &Ece| ece.options;
    match message {
        Message::Req(req) => (REQ, ece(&req.ece), zerocopy::transmute!(req.write())),
        Message::Mra(mra) => (MRA, 0, zerocopy::transmute!(mra.write())),
        Message::Rej(rej) => (REJ, 0, zerocopy::transmute!(rej.write())),
        Message::Rep(rep) => (REP, ece(&rep.ece), zerocopy::transmute!(rep.write())),
        Message::Rtu(rtu) => (RTU, 0, zerocopy::transmute!(rtu.write())),
        Message::Dreq(dreq) => (DREQ, 0, zerocopy::transmute!(dreq.write())),
        Message::Drep(drep) => (DREP, 0, zerocopy::transmute!(drep.write())),
        Message::SidrReq(req) => (SIDR_REQ, 0, zerocopy::transmute!(req.write())),
        Message::SidrRep(rep) => (SIDR_REP, ece(&rep.ece), zerocopy::transmute!(rep.write())),
    }
}

/// The message with an attribute ID, an attribute modifier and these bytes.
pub(super) fn read(attribute: u16, modifier: u32, body: &[u8; BODY]) -> Result<Message, BadMad> {
    Ok(match attribute {
        REQ => Message::Req(Req::read(zerocopy::transmute_ref!(body), modifier)?),
        MRA => Message::Mra(Mra::read(zerocopy::transmute_ref!(body))?),
        REJ => Message::Rej(Rej::read(zerocopy::transmute_ref!(body))?),
        REP => Message::Rep(Rep::read(zerocopy::transmute_ref!(body), modifier)),
        RTU => Message::Rtu(Confirmation::read(zerocopy::transmute_ref!(body))),
        DREQ => Message::Dreq(Dreq::read(zerocopy::transmute_ref!(body))),
        DREP => Message::Drep(Confirmation::read(zerocopy::transmute_ref!(body))),
        SIDR_REQ => Message::SidrReq(SidrReq::read(zerocopy::transmute_ref!(body))),
        SIDR_REP => Message::SidrRep(SidrRep::read(zerocopy::transmute_ref!(body), modifier)?),
        attribute => return Err(BadMad::Attribute(attribute)),
    })
}
