//! The way of a queue pair's packets through a network with several: the UDP source port, by which switches choose, and
//! the port of a LAG. Pairs with `mlx5dv_modify_qp_udp_sport`, `mlx5dv_query_qp_lag_port` and `mlx5dv_modify_qp_lag_port`
//! of libmlx5, which send the same commands.

use super::devx::{general_command, query, send_modify};
use crate::ah::AddressHandle;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::provider::mlx5::ah::FIRST_PORT;
use crate::qp::QpControl;
use crate::qp::ordering;
use crate::qp::state::{QpState, QpType};
use crate::wr::Address;
use rustix::io::Errno;
use uverbs_uapi::endian::Be16;
use uverbs_uapi::mlx5::prm::cmd::{lagc, query_lag_out};
use uverbs_uapi::mlx5::prm::hca_cap::cmd_hca_cap;
use uverbs_uapi::mlx5::prm::qpc::{ads, qpc, query_qp_in, query_qp_out, rst2init_qp_in};
use uverbs_uapi::mlx5::prm::{Bits, Layout, command, opcode};

/// Bit of `opt_param_mask_95_32`, `MLX5_QPC_OPT_MASK_32_UDP_SPORT`.
const UDP_PORT: u64 = 1 << 2;
/// Bit of `opt_param_mask`, `MLX5_QPC_OPT_MASK_RTS2RTS_LAG_TX_PORT_AFFINITY`.
const LAG_PORT: u64 = 1 << 15;

/// An input of a layout, with its opcode.
fn input<T: Layout>(op: u16) -> Bits<T, Vec<u8>> {
    let mut bytes = command::<2>(op).to_vec();
    bytes.resize(T::SIZE, 0);
    Bits::new(bytes)
}

/// Refuses what libmlx5 refuses with `EOPNOTSUPP`, for a reason.
fn unsupported(verb: &'static str, why: String) -> Error {
    Error::new(verb, Errno::OPNOTSUPP).detail(why)
}

fn check_rts(verb: &'static str, qp: &QpControl) -> Result<()> {
    match qp.state() {
        QpState::RTS => Ok(()),
        state => {
            Err(unsupported(verb, format!("the queue pair is in {state}; it has to be in RTS")))
        }
    }
}

fn check_udp_port(verb: &'static str, port: u16) -> Result<()> {
    match port < FIRST_PORT {
        true => Err(Error::invalid(
            verb,
            format!("port {port} is below {FIRST_PORT}, the lowest that RoCE v2 sends from"),
        )),
        false => Ok(()),
    }
}

/// Sends the packets of a connected queue pair from another UDP port, so that switches which spread flows over several ways
/// choose another one. The kernel chose the first port by the path's flow label, or without one by the numbers of both queue
/// pairs. Ports of RoCE v2 are 0xc000 to 0xffff. The queue pair is in `RTS`; a change to a new path sets the port anew.
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair) -> uverbs::Result<()> {
/// uverbs::mlx5::set_udp_source_port(qp, 0xc123)?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver, without DEVX, on a device whose firmware does not change the port, for other
/// queue pairs than RC and UC, and in another state than `RTS`; `EINVAL` for a port below 0xc000. Else firmware's refusal, as
/// in [`query`].
#[doc(alias = "mlx5dv_modify_qp_udp_sport")]
pub fn set_udp_source_port(qp: &QpControl, port: u16) -> Result<()> {
    const VERB: &str = "set_udp_source_port";
    check_udp_port(VERB, port)?;
    let caps = ordering::capabilities(VERB, qp.qp.file())?;
    let qp_type = qp.qp_type();
    if !matches!(qp_type, QpType::RC | QpType::UC) {
        return Err(unsupported(
            VERB,
            format!("type {qp_type} has no port of its own, RC and UC have"),
        ));
    }
    check_rts(VERB, qp)?;
    if caps.get(cmd_hca_cap::rts2rts_qp_udp_sport) == 0 {
        return Err(unsupported(VERB, "firmware does not change the port of a queue pair".into()));
    }
    let mut command = input::<rst2init_qp_in>(opcode::RTS2RTS_QP);
    command.set(rst2init_qp_in::qpn, qp.qpn().0.into());
    command.set(rst2init_qp_in::opt_param_mask_95_32, UDP_PORT);
    let mut context = command.sub_mut(rst2init_qp_in::qpc);
    context.sub_mut(qpc::primary_address_path).set(ads::udp_sport, port.into());
    send_modify(VERB, qp, command.bytes(), &mut [0; 16])
}

/// Sends datagrams to an address from another UDP port, from the next request on that is pushed. Creation chose the port by
/// the [flow label](crate::GlobalRoute::flow_label), or without one at random. Ports of RoCE v2 are 0xc000 to 0xffff.
///
/// ```no_run
/// # fn f(pd: &uverbs::ProtectionDomain, to: &uverbs::AddressVector) -> uverbs::Result<()> {
/// let mut ah = pd.create_ah(to)?;
/// uverbs::mlx5::set_ah_udp_source_port(&mut ah, 0xc321)?;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver, `EINVAL` for an address that is not of RoCE v2, and for a port below 0xc000.
#[doc(alias = "mlx5dv_modify_qp_udp_sport")]
#[doc(alias = "rlid")]
pub fn set_ah_udp_source_port(ah: &mut AddressHandle, port: u16) -> Result<()> {
    const VERB: &str = "set_ah_udp_source_port";
    check_udp_port(VERB, port)?;
    match ah.address_mut() {
        // RoCE v1 has no port, and on InfiniBand the field is the LID; only an Ethernet address has a MAC.
        Address::Mlx5(vector) if vector.rmac != [0; 6] && vector.rlid.get() != 0 => {
            vector.rlid = Be16::new(port);
            Ok(())
        }
        Address::Mlx5(_) => Err(Error::invalid(VERB, "only addresses of RoCE v2 have a port")),
        Address::Rxe { .. } => Err(unsupported(
            VERB,
            "the device is not driven by mlx5: its kernel sends datagrams".into(),
        )),
    }
}

/// The port of a LAG that a queue pair sends from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LagPort {
    /// The port that it is to send from, 1 or 2.
    pub configured: u32,
    /// The port that it sends from: another one while its own is down.
    pub active: u32,
}

/// The numbers of ports of the device's LAG, if there are at least two.
fn lag_ports(verb: &'static str, qp: &QpControl) -> Result<(u64, Bits<cmd_hca_cap, Vec<u8>>)> {
    let caps = ordering::capabilities(verb, qp.qp.file())?;
    match caps.get(cmd_hca_cap::num_lag_ports) {
        0 | 1 => Err(unsupported(verb, "the device's ports form no LAG".into())),
        ports => Ok((ports, caps)),
    }
}

/// The port of a LAG that a queue pair sends from.
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver, without DEVX, without a LAG, for a queue pair of raw packets, and while no
/// port was given to the queue pair, which happens in `INIT`. Else firmware's refusal, as in [`query`].
#[doc(alias = "mlx5dv_query_qp_lag_port")]
pub fn query_lag_port(qp: &QpControl) -> Result<LagPort> {
    const VERB: &str = "query_lag_port";
    let (_, caps) = lag_ports(VERB, qp)?;
    lag_port(VERB, qp, &caps)
}

fn lag_port(
    verb: &'static str,
    qp: &QpControl,
    caps: &Bits<cmd_hca_cap, Vec<u8>>,
) -> Result<LagPort> {
    if qp.qp_type() == QpType::RAW_PACKET {
        return Err(unsupported(verb, "a queue pair of raw packets; its TIS has the port".into()));
    }
    let mut output = vec![0; query_lag_out::SIZE];
    let asked = general_command(&qp.context(), &command::<16>(opcode::QUERY_LAG), &mut output);
    asked.map_err(|error| error.in_verb(verb))?;
    let lag = Bits::<query_lag_out, _>::new(output);
    let lag = lag.sub(query_lag_out::ctx);
    if lag.get(lagc::lag_state) == 0 && caps.get(cmd_hca_cap::lag_tx_port_affinity) == 0 {
        return Err(unsupported(verb, "the LAG is not active".into()));
    }
    let mut command = input::<query_qp_in>(opcode::QUERY_QP);
    command.set(query_qp_in::qpn, qp.qpn().0.into());
    let mut output = vec![0; query_qp_out::SIZE];
    query(qp, command.bytes(), &mut output).map_err(|error| error.in_verb(verb))?;
    let output = Bits::<query_qp_out, _>::new(output);
    let (configured, remap) = match output.sub(query_qp_out::qpc).get(qpc::lag_tx_port_affinity) {
        1 => (1, lagc::tx_remap_affinity_1),
        2 => (2, lagc::tx_remap_affinity_2),
        0 => return Err(unsupported(verb, "the queue pair was given no port".into())),
        port => {
            return Err(unsupported(
                verb,
                format!("port {port}, of which QUERY_LAG tells nothing"),
            ));
        }
    };
    Ok(LagPort { configured, active: lag.get32(remap) })
}

/// Lets a queue pair in `RTS` send from a port of the LAG, counted from 1.
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair) -> uverbs::Result<()> {
/// let port = uverbs::mlx5::query_lag_port(qp)?;
/// if port.active != 2 {
///     uverbs::mlx5::set_lag_port(qp, 2)?;
/// }
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// `EINVAL` for a port that the LAG does not have; `EOPNOTSUPP` as [`query_lag_port`], and for types other than RC, UC and
/// UD, in another state than `RTS`, and where firmware does not change the port. Else firmware's refusal.
#[doc(alias = "mlx5dv_modify_qp_lag_port")]
pub fn set_lag_port(qp: &QpControl, port: u32) -> Result<()> {
    const VERB: &str = "set_lag_port";
    let (ports, caps) = lag_ports(VERB, qp)?;
    // Without an active LAG firmware ignores the port and reports success.
    lag_port(VERB, qp, &caps)?;
    let qp_type = qp.qp_type();
    if !matches!(qp_type, QpType::RC | QpType::UC | QpType::UD) {
        return Err(unsupported(VERB, format!("type {qp_type}; RC, UC and UD have a port")));
    }
    check_rts(VERB, qp)?;
    if caps.get(cmd_hca_cap::rts2rts_lag_tx_port_affinity) == 0 {
        return Err(unsupported(VERB, "firmware does not change the port of a queue pair".into()));
    }
    if !(1..=ports).contains(&port.into()) {
        return Err(Error::invalid(VERB, format!("port {port} of a LAG with ports 1 to {ports}")));
    }
    let mut command = input::<rst2init_qp_in>(opcode::RTS2RTS_QP);
    command.set(rst2init_qp_in::qpn, qp.qpn().0.into());
    command.set(rst2init_qp_in::opt_param_mask, LAG_PORT);
    command.sub_mut(rst2init_qp_in::qpc).set(qpc::lag_tx_port_affinity, port.into());
    send_modify(VERB, qp, command.bytes(), &mut [0; 16])
}

/// The receives that a queue with [placement out of order](crate::QpBuilder::out_of_order_placement) takes at most, by type;
/// 0 where the device does not have it.
#[doc(alias = "mlx5dv_ooo_recv_wrs_caps")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfOrderReceives {
    /// Of reliable connections.
    pub rc: u32,
    /// Of unreliable connections.
    pub uc: u32,
    /// Of datagrams.
    pub ud: u32,
    /// Of shared receive queues for XRC.
    pub xrc: u32,
}

/// Queries where data may be placed out of order.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, builder: uverbs::QpBuilder) -> uverbs::Result<()> {
/// let places = uverbs::mlx5::query_out_of_order(context)?;
/// let builder = if places.rc >= 64 { builder.out_of_order_placement() } else { builder };
/// # let _ = builder; Ok(()) }
/// ```
///
/// # Errors
///
/// `EOPNOTSUPP` on a device of another driver.
#[doc(alias = "MLX5DV_CONTEXT_MASK_OOO_RECV_WRS")]
pub fn query_out_of_order(context: &Context) -> Result<OutOfOrderReceives> {
    const VERB: &str = "query_out_of_order";
    let max = context.file.provider.mlx5(VERB)?.limits().max_recv_wr;
    if !super::query_device(context)?.out_of_order_placement() {
        return Ok(OutOfOrderReceives::default());
    }
    let caps = ordering::capabilities(VERB, &context.file)?;
    let most = |field, receives| if caps.get(field) == 0 { 0 } else { receives };
    // A cyclic queue has twice the entries.
    Ok(OutOfOrderReceives {
        rc: most(cmd_hca_cap::dp_ordering_ooo_all_rc, max / 2),
        uc: most(cmd_hca_cap::dp_ordering_ooo_all_uc, max / 2),
        ud: most(cmd_hca_cap::dp_ordering_ooo_all_ud, max / 2),
        xrc: most(cmd_hca_cap::dp_ordering_ooo_all_xrc, max),
    })
}
