//! rdma-core's verbs examples, which connect by a TCP socket of their own.

use super::case::Case;

/// The ping-pongs and the port that each listens on.
const PINGPONGS: [&str; 5] = ["rc", "uc", "ud", "srq", "xsrq"];

/// Ready when the ping-pongs' server listens.
const LISTENS: &str = "tcp 18515";

/// How the two sides address each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addressing {
    /// By the GID that maps the IPv4 address, RoCE v2.
    Gid,
    /// By the local identifier of an InfiniBand port.
    Lid,
}

impl Addressing {
    fn options(self) -> &'static str {
        match self {
            Addressing::Gid => "-g 3",
            Addressing::Lid => "",
        }
    }
}

/// `ibv_devinfo -v` describes the device.
pub(crate) fn devinfo(addressing: Addressing) -> Case {
    let link = match addressing {
        Addressing::Gid => "Ethernet",
        Addressing::Lid => "InfiniBand",
    };
    let mut case =
        Case::new("verbs::devinfo", "cd /tmp; ibv_devinfo -v | tee devinfo.$$; mv devinfo.$$ info");
    for line in
        ["hca_id:.mlx5_0", "hca_id:.mlx5_1", "state:.*PORT_ACTIVE", &format!("link_layer:.*{link}")]
    {
        case = case.then(&format!(r#"grep -q "{line}" info"#));
    }
    case
}

/// One ping-pong between the devices.
pub(crate) fn pingpong(kind: &str, name: &str, addressing: Addressing, options: &str) -> Case {
    let program = format!("ibv_{kind}_pingpong {} {options}", addressing.options());
    Case::pair(
        format!("verbs::{kind}_pingpong::{name}"),
        LISTENS,
        &format!("{program} -d mlx5_1"),
        &format!("{program} -d mlx5_0 127.0.0.1"),
    )
}

/// Every ping-pong, polling and by events. The data is compared.
pub(crate) fn pingpongs(addressing: Addressing) -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in PINGPONGS {
        // The one over XRC counts tests per client, and compares nothing.
        let check = if kind == "xsrq" { "-n 50" } else { "-c" };
        cases.push(pingpong(kind, "polling", addressing, check));
        cases.push(pingpong(kind, "events", addressing, &format!("{check} -e")));
    }
    cases
}

/// Forms of the ping-pong over reliable connections.
pub(crate) fn forms(addressing: Addressing) -> Vec<Case> {
    let rc = |name, options| pingpong("rc", name, addressing, options);
    vec![
        rc("one_byte", "-c -s 1 -m 256"),
        rc("large", "-c -s 1048576 -n 20 -m 4096"),
        rc("new_send", "-c -N"),
        rc("timestamps", "-c -t"),
    ]
}
