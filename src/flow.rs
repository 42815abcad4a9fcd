//! Flow rules: they select the packets that a raw packet queue pair receives. Pairs with
//! `ib_uverbs_ex_create_flow` in `core/uverbs_cmd.c`.
//!
//! [`spec`] has the matches and actions of a rule; here are the rule and its handle.

mod spec;
#[cfg(test)]
mod tests;

pub use spec::{FlowEth, FlowIpv4, FlowIpv6, FlowPorts, FlowSpec};

use crate::error::{Error, ErrorWith, Result, narrow};
use crate::number::open_enum;
use crate::object::{Class, Object};
use crate::qp::{QpControl, QpInner, QpType};
use crate::uverbs::invoke_write::write_ex;
use rustix::io::Errno;
use std::fmt;
use std::sync::Arc;
use uverbs_uapi::flow as uapi;
use uverbs_uapi::flow::ib_flow_attr_type as raw;
use uverbs_uapi::write::IB_USER_VERBS_EX_CMD_CREATE_FLOW;
use zerocopy::IntoBytes;

/// The most specifications of a rule: `ib_uverbs_ex_create_flow` refuses more.
const MAX_SPECS: usize = 10;

/// The last priority, `MLX5_IB_FLOW_LAST_PRIO`. Of the supported drivers only mlx5 has flow rules.
const LAST_PRIORITY: u16 = 15;

open_enum! {
    /// The packets that a rule takes.
    #[doc(alias = "ibv_flow_attr_type")]
    pub struct FlowType(u32) {
        /// Packets that its specifications match; all packets, if it has none.
        #[doc(alias = "IBV_FLOW_ATTR_NORMAL")]
        NORMAL = raw::IB_FLOW_ATTR_NORMAL.0, "normal";
        /// Packets that no other rule takes. It has no specifications. mlx5 refuses it from Linux 6.16 on.
        #[doc(alias = "IBV_FLOW_ATTR_ALL_DEFAULT")]
        ALL_DEFAULT = raw::IB_FLOW_ATTR_ALL_DEFAULT.0, "all default";
        /// Packets to multicast addresses that no other rule takes. It has no specifications. mlx5
        /// refuses it from Linux 6.16 on.
        #[doc(alias = "IBV_FLOW_ATTR_MC_DEFAULT")]
        MC_DEFAULT = raw::IB_FLOW_ATTR_MC_DEFAULT.0, "multicast default";
        /// A copy of all packets that the port receives and sends. It has no specifications.
        #[doc(alias = "IBV_FLOW_ATTR_SNIFFER")]
        SNIFFER = raw::IB_FLOW_ATTR_SNIFFER.0, "sniffer";
    }
}

/// The attributes of a rule for [`create_flow`](QpControl::create_flow): its matches and its actions.
///
/// All specifications must match. Matches go from the outermost header inwards, at most one for each
/// layer; actions may stand anywhere:
///
/// ```
/// use std::net::Ipv4Addr;
/// use uverbs::{FlowAttr, FlowEth, FlowIpv4, FlowPorts, FlowSpec};
///
/// let rule = FlowAttr::new(1)
///     .spec(FlowEth::new().dst_mac([2, 0, 0, 0, 0, 1]))
///     .spec(FlowIpv4::new().dst(Ipv4Addr::new(192, 0, 2, 1)))
///     .spec(FlowSpec::Udp(FlowPorts::new().dst_port(4791)))
///     .tag(7)
///     .priority(1);
/// ```
///
/// Rules of other kinds, and the matches of each header:
///
/// ```
/// use std::net::Ipv4Addr;
/// use uverbs::{FlowAttr, FlowEth, FlowIpv4, FlowIpv6, FlowPorts, FlowSpec, FlowType};
///
/// // A copy of all packets of port 1.
/// let sniffer = FlowAttr::new(1).flow_type(FlowType::SNIFFER);
/// // From any host of a network, to ports 1024 to 2047.
/// let lan = FlowIpv4::new().src_masked(Ipv4Addr::new(192, 0, 2, 0), Ipv4Addr::new(255, 255, 255, 0));
/// let ports = FlowPorts::new().dst_port_masked(0x400, 0xfc00);
/// let from_lan = FlowAttr::new(1).spec(lan).spec(FlowSpec::Udp(ports));
/// // IPv6 packets of a VLAN that are dropped.
/// let nothing = FlowAttr::new(1).spec(FlowEth::new().vlan(12)).spec(FlowIpv6::new()).drop_packets();
/// # let _ = (sniffer, from_lan, nothing);
/// ```
///
/// A queue pair has the rule until it is dropped:
///
/// ```no_run
/// # fn f(qp: &uverbs::QueuePair, rule: uverbs::FlowAttr) -> uverbs::Result<()> {
/// let flow: uverbs::Flow = qp.create_flow(&rule)?;
/// println!("rule {}", flow.handle());
/// flow.destroy()?;
/// # Ok(()) }
/// ```
#[doc(alias = "ibv_flow_attr")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct FlowAttr {
    kind: FlowType,
    port: u32,
    priority: u16,
    dont_trap: bool,
    egress: bool,
    specs: Vec<FlowSpec>,
}

impl FlowAttr {
    /// A [normal](FlowType::NORMAL) rule for a port, from 1, that matches everything until
    /// specifications say otherwise.
    pub fn new(port: u32) -> Self {
        FlowAttr {
            kind: FlowType::NORMAL,
            port,
            priority: 0,
            dont_trap: false,
            egress: false,
            specs: Vec::new(),
        }
    }

    /// Sets the packets that the rule takes; [normal](FlowType::NORMAL) unless set.
    pub fn flow_type(mut self, kind: FlowType) -> Self {
        self.kind = kind;
        self
    }

    /// Sets the priority: rules with 0, the default, match before all others. mlx5 has 0 to 15. It matches a
    /// rule whose only specification is a multicast Ethernet address after all others, with any priority.
    pub fn priority(mut self, priority: u16) -> Self {
        self.priority = priority;
        self
    }

    /// Adds a specification.
    pub fn spec(mut self, spec: impl Into<FlowSpec>) -> Self {
        self.specs.push(spec.into());
        self
    }

    /// Marks the completions of the rule's packets with a number of 24 bits; see
    /// [`Completion::flow_tag`](crate::Completion::flow_tag).
    pub fn tag(self, tag: u32) -> Self {
        self.spec(FlowSpec::Tag(tag))
    }

    /// Drops the rule's packets instead of receiving them.
    pub fn drop_packets(self) -> Self {
        self.spec(FlowSpec::Drop)
    }

    /// Lets rules of lower priority take the rule's packets, too.
    #[doc(alias = "IBV_FLOW_ATTR_FLAGS_DONT_TRAP")]
    pub fn dont_trap(mut self) -> Self {
        self.dont_trap = true;
        self
    }

    /// Takes packets that this port sends.
    #[doc(alias = "IBV_FLOW_ATTR_FLAGS_EGRESS")]
    pub fn egress(mut self) -> Self {
        self.egress = true;
        self
    }

    /// Refuses rules that the kernel would refuse without a reason, or accept and ignore.
    fn check(&self, verb: &'static str) -> Result<()> {
        let invalid = |detail: String| Err(Error::invalid(verb, detail));
        if self.specs.len() > MAX_SPECS {
            return invalid(format!(
                "{} specifications; the maximum is {MAX_SPECS}",
                self.specs.len()
            ));
        }
        if self.kind != FlowType::NORMAL && !self.specs.is_empty() {
            return invalid(format!("a rule of type {} takes no specifications", self.kind));
        }
        for spec in &self.specs {
            if let FlowSpec::Tag(tag) = spec {
                if tag >> 24 != 0 {
                    return invalid(format!("tag {tag:#x}; tags have 24 bits"));
                }
            }
        }
        Ok(())
    }

    /// The command that makes the rule for a queue pair.
    fn to_bytes(&self, verb: &'static str, qp_handle: u32) -> Result<Vec<u8>> {
        let specs: Vec<u8> = self.specs.iter().flat_map(FlowSpec::encode).collect();
        let mut flags = uapi::ib_flow_flags::empty();
        flags.set(uapi::ib_flow_flags::IB_FLOW_ATTR_FLAGS_DONT_TRAP, self.dont_trap);
        flags.set(uapi::ib_flow_flags::IB_FLOW_ATTR_FLAGS_EGRESS, self.egress);
        let request = uapi::ib_uverbs_create_flow {
            comp_mask: 0,
            qp_handle,
            flow_attr: uapi::ib_uverbs_flow_attr {
                r#type: self.kind.0,
                // At most `MAX_SPECS` of 88 bytes each.
                size: specs.len() as u16,
                priority: self.priority,
                num_of_specs: self.specs.len() as u8,
                reserved: [0; 2],
                port: narrow(verb, "port", self.port)?,
                flags: flags.bits(),
            },
        };
        Ok([request.as_bytes(), &specs].concat())
    }
}

/// The rule in words, without the values that it matches.
impl fmt::Display for FlowAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FlowAttr { kind, port, priority, dont_trap, egress, specs } = self;
        write!(f, "rule of type {kind}, port {port}, priority {priority}")?;
        for (is_set, name) in [(dont_trap, "don't trap"), (egress, "egress")] {
            if *is_set {
                write!(f, ", {name}")?;
            }
        }
        let names: Vec<&str> = specs.iter().map(FlowSpec::name).collect();
        match names.is_empty() {
            true => f.write_str(" without specifications"),
            false => write!(f, " with specifications {}", names.join(", ")),
        }
    }
}

/// A flow rule; it ends when this is dropped.
///
/// The kernel does not destroy a queue pair that has rules. When the program drops all parts of the queue
/// pair before the rule, the queue pair is [reset](crate::QueuePair::destroy) and receives nothing; it is
/// destroyed with the rule. Use it from any thread.
#[doc(alias = "ibv_flow")]
#[must_use = "the rule ends when this is dropped"]
pub struct Flow {
    // Dropped before `qp`: the kernel refuses to destroy a queue pair that has rules.
    object: Object,
    qp: Arc<QpInner>,
}

impl QpControl {
    /// Makes a rule that steers packets to this queue pair, or drops them. Without a rule a raw packet
    /// queue pair receives nothing.
    ///
    /// The rule takes effect at once, in any state of the queue pair; packets that arrive before
    /// [`RTR`](crate::QpState::RTR) are lost. Rules of all processes share one order of priorities; those of
    /// the port's network interface match last.
    ///
    /// # Errors
    ///
    /// `EPERM` without `CAP_NET_RAW`; `EINVAL` unless the queue pair is of type
    /// [`RAW_PACKET`](QpType::RAW_PACKET), for a port that does not exist, and for specifications that
    /// contradict each other or cannot be matched; `EOPNOTSUPP` for matches and actions that the device does
    /// not have; `EEXIST` if another rule matches the same packets and has another tag or does not drop them
    /// alike; `ENOMEM` for a priority beyond the last (on mlx5, 15), and without room for another rule.
    #[doc(alias = "ibv_create_flow")]
    pub fn create_flow(&self, attr: &FlowAttr) -> Result<Flow> {
        const VERB: &str = "create_flow";
        let file = self.qp.file();
        file.check_fork(VERB)?;
        if self.qp_type() != QpType::RAW_PACKET {
            let detail = format!("a queue pair of type {}; only raw packet has", self.qp_type());
            return Err(Error::invalid(VERB, format!("{detail} flow rules")));
        }
        attr.check(VERB)?;
        file.device.check_port(VERB, attr.port)?;
        let request = attr.to_bytes(VERB, self.handle())?;
        let mut resp = uapi::ib_uverbs_create_flow_resp::default();
        let created = file.execute(
            VERB,
            write_ex(IB_USER_VERBS_EX_CMD_CREATE_FLOW, request.as_slice()).response(&mut resp),
        );
        created.map_err(|error| self.explain_flow(error, attr))?;
        let object = Object::new(file.clone(), Class::FLOW, resp.flow_handle, ());
        Ok(Flow { object, qp: self.qp.inner().clone() })
    }

    /// Adds the rule's fault to the kernel's refusal, as far as the errno tells it.
    fn explain_flow(&self, error: Error, attr: &FlowAttr) -> Error {
        let device = self.qp.file().device.name();
        match error.errno() {
            Errno::PERM => error.detail("flow rules need CAP_NET_RAW"),
            Errno::OPNOTSUPP => error.detail(format!("{device} makes no {attr}")),
            Errno::EXIST => error.detail(format!(
                "another rule matches the same as the {attr}, and does something else with it"
            )),
            Errno::NOMEM if attr.priority > LAST_PRIORITY => error.detail(format!(
                "priority {} is beyond the last, which is {LAST_PRIORITY}",
                attr.priority
            )),
            Errno::NOMEM => error.detail(format!("{device} has no room for another rule")),
            Errno::INVAL if matches!(attr.kind, FlowType::ALL_DEFAULT | FlowType::MC_DEFAULT) => {
                error.detail(format!(
                    "the kernel refuses a {attr}; mlx5 refuses all default rules from Linux 6.16 on"
                ))
            }
            Errno::INVAL => error.detail(format!(
                "the kernel refuses a {attr}: their order may be wrong, or one has a field that {device} does \
                 not match"
            )),
            _ => error.context(|| format!("{device} makes no {attr}")),
        }
    }
}

impl Flow {
    /// Ends the rule; dropping it does the same and ignores errors.
    ///
    /// # Errors
    ///
    /// Those of the kernel; the rule comes back with the error.
    #[doc(alias = "ibv_destroy_flow")]
    pub fn destroy(mut self) -> std::result::Result<(), ErrorWith<Self>> {
        match self.object.destroy() {
            Ok(()) => Ok(()),
            Err(error) => Err(error.with(self)),
        }
    }

    /// The kernel's handle of the rule, a number within its file.
    pub fn handle(&self) -> u32 {
        self.object.handle()
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow")
            .field("device", &self.qp.file().device.name())
            .field("qpn", &self.qp.qpn)
            .field("handle", &self.handle())
            .finish()
    }
}
