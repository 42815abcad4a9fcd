//! The command line.

use crate::Result;
use crate::controller::Namespace;
use crate::transfer::Plan;

pub(crate) const USAGE: &str = "usage: nvme_read [OPTION…] HOST[:PORT] SUBSYSTEM-NQN
  --namespace N    the namespace; 1 unless given
  --first BLOCK    the first block; 0 unless given
  --blocks N       how many blocks; all behind the first unless given
  --size BYTES     bytes of a request; 65536 unless given
  --depth N        requests under way; 16 unless given
  --write          DESTROY the contents: write a pattern, then read it and compare
  --verify         read, and compare with the pattern that --write wrote
  --seed N         which pattern; 1 unless given
  --output FILE    copy what is read to a file
  --host NQN       the name of this host; a random one unless given";

/// The port of NVMe over RDMA.
const PORT: u16 = 4420;

/// The command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Host and port.
    pub(crate) address: String,
    pub(crate) subsystem: String,
    pub(crate) namespace: u32,
    pub(crate) first: u64,
    pub(crate) blocks: Option<u64>,
    pub(crate) size: usize,
    pub(crate) depth: u16,
    pub(crate) write: bool,
    pub(crate) verify: bool,
    pub(crate) seed: u64,
    pub(crate) output: Option<String>,
    pub(crate) host: Option<String>,
}

impl Options {
    /// Reads the arguments after the program's name.
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Options> {
        let mut options = Options {
            address: String::new(),
            subsystem: String::new(),
            namespace: 1,
            first: 0,
            blocks: None,
            size: 1 << 16,
            depth: 16,
            write: false,
            verify: false,
            seed: 1,
            output: None,
            host: None,
        };
        let mut places = Vec::new();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let name = argument.as_str();
            let mut value =
                || arguments.next().ok_or_else(|| format!("{name} needs a value\n{USAGE}"));
            match name {
                "--namespace" => options.namespace = number(name, &value()?, 1)?,
                "--first" => options.first = number(name, &value()?, 0)?,
                "--blocks" => options.blocks = Some(number(name, &value()?, 1)?),
                "--size" => options.size = number(name, &value()?, 512)?,
                "--depth" => options.depth = number(name, &value()?, 1)?,
                "--seed" => options.seed = number(name, &value()?, 0)?,
                "--output" => options.output = Some(value()?),
                "--host" => options.host = Some(value()?),
                "--write" => options.write = true,
                "--verify" => options.verify = true,
                _ if name.starts_with('-') => {
                    return Err(format!("unknown option {name}\n{USAGE}").into());
                }
                _ => places.push(argument),
            }
        }
        let Ok([address, subsystem]) = <[String; 2]>::try_from(places) else {
            return Err(USAGE.into());
        };
        options.address = with_port(&address);
        options.subsystem = subsystem;
        Ok(options)
    }

    /// The blocks to transfer, with requests of at most `max_transfer` bytes.
    pub(crate) fn plan(&self, namespace: Namespace, max_transfer: Option<usize>) -> Result<Plan> {
        let Namespace { number, blocks: all, block_size } = namespace;
        let behind = all.checked_sub(self.first).filter(|left| *left > 0);
        let behind = behind.ok_or_else(|| {
            format!("--first {}: namespace {number} has {all} blocks", self.first)
        })?;
        let blocks = self.blocks.unwrap_or(behind);
        if blocks > behind {
            return Err(format!(
                "--blocks {blocks}: namespace {number} has {behind} blocks from block {} on",
                self.first
            )
            .into());
        }
        if self.size % block_size != 0 {
            return Err(format!("--size {}: a block has {block_size} bytes", self.size).into());
        }
        // The field for blocks has 16 bits, and the field for bytes 24.
        let most = (usize::from(u16::MAX) * block_size).min(1 << 23);
        let most = max_transfer.map_or(most, |limit| limit.min(most));
        if self.size > most {
            return Err(format!("--size {}: a request has at most {most} bytes", self.size).into());
        }
        let per_request = u16::try_from(self.size / block_size)?;
        Ok(Plan { namespace, first: self.first, blocks, per_request })
    }
}

fn number<N: TryFrom<u64>>(name: &str, text: &str, least: u64) -> Result<N> {
    let value = text.parse::<u64>().ok().filter(|value| *value >= least);
    let fits = value.and_then(|value| N::try_from(value).ok());
    let bits = 8 * size_of::<N>();
    Ok(fits.ok_or_else(|| format!("{name} {text}: not a number from {least} on, of {bits} bits"))?)
}

/// Adds the port unless there is one. An IPv6 address with a port is in brackets.
fn with_port(address: &str) -> String {
    if address.parse::<std::net::Ipv6Addr>().is_ok() {
        return format!("[{address}]:{PORT}");
    }
    match address.rsplit_once(':') {
        Some((_, port)) if port.parse::<u16>().is_ok() => address.to_owned(),
        _ => format!("{address}:{PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    fn plan(line: &str, max_transfer: Option<usize>) -> std::result::Result<Plan, String> {
        let namespace = Namespace { number: 1, blocks: 1000, block_size: 4096 };
        let options = parse(&format!("{line} host nqn")).unwrap();
        options.plan(namespace, max_transfer).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_is_written_unless_it_is_asked_for() {
        let options = parse("10.0.0.2 nqn.x").unwrap();
        assert!(!options.write && !options.verify);
        assert_eq!((options.address.as_str(), options.depth), ("10.0.0.2:4420", 16));
        let options = parse("--write --depth 4 --seed 9 [fe80::1%eth0]:4421 nqn.x").unwrap();
        assert!(options.write);
        assert_eq!((options.depth, options.seed), (4, 9));
        assert_eq!(options.address, "[fe80::1%eth0]:4421");
        assert_eq!(parse("fe80::1 nqn.x").unwrap().address, "[fe80::1]:4420");
    }

    #[test]
    fn wrong_options_are_named() {
        for (line, told) in [
            ("", "usage"),
            ("host", "usage"),
            ("host nqn more", "usage"),
            ("--wipe host nqn", "unknown option --wipe"),
            ("host nqn --depth", "--depth needs a value"),
            ("--depth 0 host nqn", "--depth 0: not a number from 1 on, of 16 bits"),
            ("--depth 70000 host nqn", "--depth 70000"),
            ("--size 1x host nqn", "--size 1x: not a number from 512 on"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(told), "{line}: {error}");
        }
    }

    #[test]
    fn plan_stays_in_the_namespace_and_below_the_limits() {
        let whole = plan("", None).unwrap();
        assert_eq!((whole.first, whole.blocks, whole.per_request), (0, 1000, 16));
        let part = plan("--first 990 --blocks 10 --size 4096", Some(4096)).unwrap();
        assert_eq!((part.first, part.blocks, part.per_request), (990, 10, 1));
        for (line, told) in [
            ("--first 1000", "--first 1000: namespace 1 has 1000 blocks"),
            ("--first 990 --blocks 11", "has 10 blocks from block 990 on"),
            ("--size 6000", "a block has 4096 bytes"),
            ("--size 135168", "a request has at most 131072 bytes"),
        ] {
            let error = plan(line, Some(1 << 17)).unwrap_err();
            assert!(error.contains(told), "{line}: {error}");
        }
        assert!(plan("--size 16777216", None).unwrap_err().contains("at most 8388608 bytes"));
    }
}
