//! A completion queue and a queue pair of commands alone, connected to itself.

use crate::Result;
use crate::engine::{Completions, Sends};
use uverbs::mlx5::devx::{self, DevxObject, DevxRef, Umem};
use uverbs::mlx5::{Uar, UarKind, pd_number};
use uverbs::{Access, Context};
use uverbs_uapi::mlx5::prm::cqc::{cqc, create_cq_in};
use uverbs_uapi::mlx5::prm::qpc::{ads, create_qp_in, qpc, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout, command, opcode};

/// The parts of the umem: 256 receives of 16 bytes, sends behind them, CQEs, and doorbell records.
const RECEIVES: u64 = 0;
const SENDS: u64 = 0x1000;
const CQES: u64 = 0x2000;
const CQ_RECORD: u64 = 0x3000;
const QP_RECORD: u64 = 0x3040;
const LENGTH: usize = 0x4000;
/// Base-2 logarithm of the number of WQEBBs and of CQEs.
const LOG: u8 = 4;
/// Where the register for sends lies in its page.
const REGISTER: usize = 0x800;

pub(crate) fn run() -> Result<()> {
    let context = Context::open_first()?;
    let pd = context.alloc_pd()?;
    let uar = Uar::alloc(&context, UarKind::NonCached)?;
    let page = uar.map()?;
    let umem = Umem::builder(&context).page_sizes(4096).allocate(LENGTH)?;
    let at = |offset: u64| umem.as_ptr().wrapping_add(offset as usize);
    for cqe in 0..1 << LOG {
        /// The last byte of a CQE that is unwritten.
        const UNWRITTEN: u8 = 0xf1;
        // SAFETY: inside the umem, of which the device knows nothing yet.
        unsafe { at(CQES + 64 * cqe + 63).write(UNWRITTEN) };
    }
    let mut from = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1)?;
    let to = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u64>(1)?;

    let mut input =
        Bits::<create_cq_in, _>::new(command::<{ create_cq_in::SIZE }>(opcode::CREATE_CQ));
    input.set(create_cq_in::cq_umem_id, umem.id().into());
    input.set(create_cq_in::cq_umem_offset, CQES);
    let mut queue = input.sub_mut(create_cq_in::cq_context);
    queue.set(cqc::log_cq_size, LOG.into());
    queue.set(cqc::uar_page, uar.page_id().into());
    queue.set(cqc::c_eqn_or_apu_element, devx::query_eqn(&context, 0)?.into());
    queue.set(cqc::dbr_umem_id, umem.id().into());
    queue.set(cqc::dbr_addr, CQ_RECORD);
    let cq = create(&context, input.bytes(), &[&umem, &uar])?;

    let mut input =
        Bits::<create_qp_in, _>::new(command::<{ create_qp_in::SIZE }>(opcode::CREATE_QP));
    input.set(create_qp_in::wq_umem_id, umem.id().into());
    input.set(create_qp_in::wq_umem_offset, RECEIVES);
    let mut queue = input.sub_mut(create_qp_in::qpc);
    for (field, value) in [
        (qpc::pm_state, 3),
        (qpc::pd, pd_number(&pd)?.into()),
        (qpc::cqn_snd, cq.number().into()),
        (qpc::cqn_rcv, cq.number().into()),
        (qpc::log_rq_size, 8),
        (qpc::log_sq_size, LOG.into()),
        (qpc::uar_page, uar.page_id().into()),
        (qpc::user_index, 0xff_ffff),
        (qpc::dbr_umem_id, umem.id().into()),
        (qpc::dbr_addr, QP_RECORD),
    ] {
        queue.set(field, value);
    }
    // It keeps the completion queue, the domain and the UAR, and is destroyed before them.
    let qp = create(&context, input.bytes(), &[&umem, &uar, &pd, &cq])?;
    connect(&context, &qp)?;
    println!("queue pair {:#x} and completion queue {:#x}", qp.number(), cq.number());

    let sends = Sends {
        qpn: qp.number(),
        buf: at(SENDS),
        wqebbs: 1 << LOG,
        dbrec: at(QP_RECORD).cast(),
        reg: page.as_ptr().wrapping_add(REGISTER).cast(),
        posted: 0,
    };
    let completions =
        Completions { buf: at(CQES), count: 1 << LOG, dbrec: at(CQ_RECORD).cast(), consumed: 0 };
    crate::drive(sends, completions, &mut from, &to)?;
    qp.destroy()?;
    cq.destroy()?;
    Ok(())
}

/// Brings a queue pair to RTS, with itself as its peer.
fn connect(context: &Context, qp: &DevxObject) -> Result<()> {
    const PORT: u32 = 1;
    let (gid, port) = (context.default_gid(PORT)?, context.query_port(PORT)?);
    let mac = match context.device().netdev(PORT)? {
        Some(name) => mac(&name)?,
        None => 0,
    };
    for op in [opcode::RST2INIT_QP, opcode::INIT2RTR_QP, opcode::RTR2RTS_QP] {
        let mut input = Bits::<rst2init_qp_in, _>::new(command::<{ rst2init_qp_in::SIZE }>(op));
        input.set(rst2init_qp_in::qpn, qp.number().into());
        let mut queue = input.sub_mut(rst2init_qp_in::qpc);
        for (field, value) in [
            (qpc::pm_state, 3),
            (qpc::rwe, 1),
            (qpc::mtu, 3),
            (qpc::log_msg_max, 30),
            (qpc::remote_qpn, qp.number().into()),
            (qpc::retry_count, 7),
            (qpc::rnr_retry, 7),
        ] {
            queue.set(field, value);
        }
        let mut path = queue.sub_mut(qpc::primary_address_path);
        path.set(ads::vhca_port_num, PORT.into());
        path.set(ads::ack_timeout, 16);
        path.set(ads::src_addr_index, gid.index.into());
        path.set(ads::rlid, port.lid.into());
        path.set_span(ads::rgid_rip, &gid.gid.0);
        path.set(ads::rmac_47_32, mac >> 32);
        path.set(ads::rmac_31_0, mac & 0xffff_ffff);
        // The least port that RoCE sends from.
        path.set(ads::udp_sport, 0xc000);
        path.set(ads::hop_limit, 64);
        // SAFETY: nothing is posted, and no peer has a key.
        unsafe { devx::modify(qp, input.bytes(), &mut [0; 16])? };
    }
    Ok(())
}

/// The MAC address of a network interface.
fn mac(name: &str) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/address"))?;
    Ok(u64::from_str_radix(&text.trim().replace(':', ""), 16)?)
}

fn create(context: &Context, input: &[u8], keeps: &[&dyn DevxRef]) -> Result<DevxObject> {
    // SAFETY: the umem is among `keeps`, and no WQE names memory that is dropped before the queues.
    Ok(unsafe { DevxObject::create(context, input, &mut [0; 16], keeps)? })
}
