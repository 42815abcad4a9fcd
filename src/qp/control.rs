//! Control over a queue pair: everything that is not posting.

use super::ece::{Ece, EceState};
use super::transition;
use super::{QpAttr, QpCaps, QpHandle, QpInfo, QpState, QpType};
use crate::error::{Error, Result};
use crate::events::keys::ObjectKey;
use crate::number::Qpn;
use rustix::io::Errno;
use std::fmt;

/// Controls a queue pair; a [`QueuePair`](crate::QueuePair) dereferences to it.
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair, remote: &uverbs::Endpoint, peers: uverbs::Ece) -> uverbs::Result<()> {
/// use uverbs::{Ece, Handshake, QpAttr, QpState};
///
/// // Before the change to RTR: choose the options that both devices have.
/// match qp.query_ece() {
///     Ok(own) if own.vendor_id == peers.vendor_id => {
///         qp.set_ece(Ece { options: own.options & peers.options, ..own })?;
///     }
///     _ => println!("no options"),
/// }
/// println!("the peer is reached by {:?}", qp.path_to(remote)?);
/// qp.handshake(remote, &Handshake::new())?;
/// assert_eq!(qp.state(), QpState::RTS);
/// // Flushes the posted requests.
/// qp.modify(&QpAttr::new().state(QpState::ERR))?;
/// # Ok(()) }
/// ```
pub struct QpControl {
    pub(crate) qp: QpHandle,
}

impl QpControl {
    /// The queue pair's number, to which a peer sends.
    pub fn qpn(&self) -> Qpn {
        self.qp.qpn
    }

    /// The transport.
    pub fn qp_type(&self) -> QpType {
        self.qp.qp_type
    }

    /// The capacities that the queue pair was granted.
    pub fn caps(&self) -> QpCaps {
        self.qp.caps
    }

    /// The state that this library last brought the queue pair to. The device may have moved it
    /// to an error state since.
    pub fn state(&self) -> QpState {
        self.qp.state()
    }

    /// Changes attributes, mostly to bring the queue pair to another state. When it has returned, posting
    /// follows the new state.
    ///
    /// The library checks first that the attributes fit the transition, so that a refusal can name the wrong one:
    ///
    /// | | RESET→INIT | INIT→RTR | RTR→RTS |
    /// |---|---|---|---|
    /// | RC | port, pkey_index, access | path, path_mtu, dest_qpn, rq_psn, max_dest_rd_atomic, min_rnr_timer | sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic |
    /// | UC | port, pkey_index, access | path, path_mtu, dest_qpn, rq_psn | sq_psn |
    /// | UD | port, pkey_index, qkey | | sq_psn |
    /// | XRC initiator | as RC | as UC | as RC |
    /// | XRC target | as RC | as RC | sq_psn, timeout |
    /// | raw packet | port | | |
    ///
    /// On Ethernet the kernel may ask the network for the peer's hardware address while moving to
    /// `RTR`, and this call waits for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a transition that does not exist, a [`current_state`](QpAttr::current_state) that the
    /// queue pair is not in, a missing or superfluous attribute or a value out of range (the message names
    /// it), a port that the device does not have, and for `RESET`: see [`reset`](crate::QueuePair::reset).
    /// `EINVAL`, too, after another process that shares the context reset the queue pair: call `reset` first.
    /// `EPERM` for a privileged queue key; `EHOSTUNREACH`,
    /// `ENETUNREACH` or `ETIMEDOUT` when the peer cannot be resolved; `EOPNOTSUPP` for a rate
    /// limit that the device does not have.
    #[doc(alias = "ibv_modify_qp")]
    #[doc(alias = "ibv_modify_qp_rate_limit")]
    pub fn modify(&self, attr: &QpAttr) -> Result<()> {
        self.modify_with_ece(attr, None)
    }

    /// As [`modify`](Self::modify). With `options` the change carries them to the device, in place of
    /// those of [`set_ece`](Self::set_ece), which a failed change leaves as they were.
    pub(crate) fn modify_with_ece(&self, attr: &QpAttr, options: Option<u32>) -> Result<()> {
        const VERB: &str = "modify_qp";
        if attr.next_state() == Some(QpState::RESET) {
            return Err(Error::invalid(
                VERB,
                "state RESET discards completions: use QueuePair::reset, which takes their queues",
            ));
        }
        attr.check_ranges(VERB)?;
        for port in attr.ports() {
            self.qp.file().device.check_port(VERB, port)?;
        }
        let _moving = self.qp.moving(VERB)?;
        self.check_fresh(VERB)?;
        let mut tracked = self.qp.state();
        if let Err(refusal) = transition::check(VERB, self.qp_type(), tracked, attr) {
            // The device, or another process that shares the context, may have moved it.
            self.query().map_err(|error| error.in_verb(VERB))?;
            if self.qp.state() == tracked {
                return Err(refusal);
            }
            self.check_fresh(VERB)?;
            tracked = self.qp.state();
            transition::check(VERB, self.qp_type(), tracked, attr)?;
        }
        if let Some(claimed) = attr.claimed_state() {
            self.check_claim(VERB, claimed)?;
        }
        let unclaimed = attr.unclaimed();
        let ece = self.qp.ece().zip(options).map(|(ece, options)| (ece, ece.ask(options)));
        self.qp.apply(VERB, &unclaimed).map_err(|error| {
            if let Some((ece, before)) = ece {
                ece.restore(before);
            }
            self.explain(error, tracked, attr)
        })?;
        if let Some(state) = attr.next_state() {
            self.qp.advance(state);
        }
        Ok(())
    }

    /// Refuses a queue pair with stale rings, which would carry out requests from before its reset.
    pub(crate) fn check_fresh(&self, verb: &'static str) -> Result<()> {
        if self.qp.is_stale() {
            let detail = "the queue pair came to state RESET without QueuePair::reset, and its queues \
                          still hold earlier requests: reset it first";
            return Err(Error::invalid(verb, detail));
        }
        Ok(())
    }

    /// Refuses a change from a state that the queue pair is not in. rxe's driver would believe the caller, and
    /// bring a queue pair whose requests it has flushed back to RTS. The query also brings the state in mlx5's
    /// driver up to date, so neither driver needs the caller's claim.
    fn check_claim(&self, verb: &'static str, claimed: QpState) -> Result<()> {
        let told = self.query().map_err(|error| error.in_verb(verb))?.state;
        self.check_fresh(verb)?;
        if told == claimed {
            return Ok(());
        }
        let detail = format!("current_state {claimed}: the queue pair is in state {told}");
        Err(Error::invalid(verb, detail))
    }

    fn explain(&self, error: Error, from: QpState, attr: &QpAttr) -> Error {
        let (errno, context) = (error.errno(), self.context());
        let change = || transition::describe(self.qp_type(), from, attr);
        match errno {
            Errno::PERM => error.detail("a queue key with bit 31 set needs CAP_NET_RAW"),
            Errno::OPNOTSUPP if attr.limit().is_some() => error.detail(format!(
                "{} limits no rates of type {}",
                self.qp.file().device.name(),
                self.qp_type()
            )),
            // mlx5 of Linux 6.1 answers `EINVAL`; later kernels answer `EOPNOTSUPP`.
            Errno::INVAL if attr.limits_rate_alone() => error.detail(format!(
                "{} takes no rate_limit {} of type {}",
                self.qp.file().device.name(),
                attr.limit().unwrap_or_default(),
                self.qp_type()
            )),
            Errno::NOMEM | Errno::IO | Errno::AGAIN => error,
            _ => {
                if let Some(why) = attr.paths().find_map(|path| context.explain_path(errno, &path))
                {
                    return error.detail(why);
                }
                match errno {
                    Errno::INVAL => self.explain_invalid(error, from, attr),
                    Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::TIMEDOUT => {
                        error.detail(format!("no way to the peer: {}", change()))
                    }
                    _ => error.context(change),
                }
            }
        }
    }

    /// Explains `EINVAL` of a change whose paths are right. Asks for the limits of port and device.
    fn explain_invalid(&self, error: Error, from: QpState, attr: &QpAttr) -> Error {
        let context = self.context();
        let port = |port| context.query_port(port).ok();
        if let Some(beyond) = attr.beyond(port, || context.query_device().ok()) {
            return error.detail(beyond);
        }
        let change = transition::describe(self.qp_type(), from, attr);
        error.detail(if from == QpState::SQD {
            format!(
                "the kernel refuses {change}; until query says that the send queue is drained, ERR may be the \
                 only way out"
            )
        } else {
            format!(
                "the kernel refuses {change}; an index into the port's tables, or a limit of the device may \
                 be wrong"
            )
        })
    }

    /// Queries the queue pair's attributes from the kernel. [`state`](Self::state) follows the
    /// returned state, with one exception: after another process reset the queue pair, it stays
    /// [`RESET`](QpState::RESET), where nothing can be posted, until
    /// [`reset`](crate::QueuePair::reset) resets the queues of this process, too.
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QpInfo> {
        let before = self.qp.state();
        let caps = Some(self.qp.caps);
        let info = QpInfo::query(self.qp.file(), "query_qp", self.handle(), caps)?;
        self.qp.observe_state(before, info.state);
        Ok(info)
    }

    /// The ECE options of the queue pair: options of a connection beyond the specification (enhanced connection
    /// establishment). After creation, and after a reset, these are all options of the device, for the peer to choose
    /// from. After [`set_ece`](Self::set_ece) they are 0 until the next change of state, and then those that the device
    /// took.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on rxe, on a device of mlx5 without such options, and for an XRC target that was
    /// [opened](crate::XrcDomain::open_target).
    #[doc(alias = "ibv_query_ece")]
    pub fn query_ece(&self) -> Result<Ece> {
        self.ece_state("query_ece").map(EceState::get)
    }

    /// Sets the options that both sides have agreed on for the next connection. The device gets them with the next
    /// [`modify`](Self::modify) to `INIT`, `RTR` or `RTS`, and [`query_ece`](Self::query_ece) then tells those that
    /// it took. Options of 0 stand for a peer that has none: they are not sent to the device, and only a reset
    /// withdraws options that it took before.
    ///
    /// The [connection manager](crate::cm) does it by itself.
    ///
    /// # Errors
    ///
    /// `EINVAL` for the options of another vendor than the device's; `EOPNOTSUPP` as
    /// [`query_ece`](Self::query_ece).
    #[doc(alias = "ibv_set_ece")]
    pub fn set_ece(&self, ece: Ece) -> Result<()> {
        const VERB: &str = "set_ece";
        let state = self.ece_state(VERB)?;
        let own = state.get().vendor_id;
        if ece.vendor_id != own {
            let detail = format!(
                "ECE options of vendor {:#x}: those of {} are of vendor {own:#x}",
                ece.vendor_id,
                self.qp.file().device.name()
            );
            return Err(Error::invalid(VERB, detail));
        }
        let _moving = self.qp.moving(VERB)?;
        state.ask(ece.options);
        Ok(())
    }

    fn ece_state(&self, verb: &'static str) -> Result<&EceState> {
        self.qp.ece().ok_or_else(|| {
            let device = self.qp.file().device.name();
            Error::new(verb, Errno::OPNOTSUPP)
                .detail(format!("{device} reported no ECE options for the queue pair"))
        })
    }

    /// The key of this queue pair in events.
    pub fn key(&self) -> ObjectKey {
        self.qp.event_key.key()
    }

    /// The number by which the kernel knows the queue pair within its file.
    pub fn handle(&self) -> u32 {
        self.qp.object.handle()
    }
}

impl fmt::Debug for QpControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("device", &self.qp.file().device.name())
            .field("qpn", &self.qpn())
            .field("type", &self.qp_type())
            .field("state", &self.state())
            .finish()
    }
}
