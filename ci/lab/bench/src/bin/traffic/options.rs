//! The command line.

use lab_bench::Failure;

/// Requests that are under way at most.
const DEPTH: u32 = 128;

/// An operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    SendLatency,
    WriteLatency,
    ReadLatency,
    SendRate,
    WriteRate,
}

/// The options, by perftest's letters.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) what: What,
    pub(crate) device: String,
    pub(crate) gid: u32,
    pub(crate) port: u16,
    pub(crate) size: usize,
    pub(crate) count: u32,
    /// Requests that are posted together.
    pub(crate) list: u32,
    /// Where the server is; this is one if there is none.
    pub(crate) host: Option<String>,
}

impl Options {
    pub(crate) fn parse(arguments: &[String]) -> Result<Options, Failure> {
        let mut words = arguments.iter();
        let what = match words.next().map(String::as_str) {
            Some("send_lat") => What::SendLatency,
            Some("write_lat") => What::WriteLatency,
            Some("read_lat") => What::ReadLatency,
            Some("send_bw") => What::SendRate,
            Some("write_bw") => What::WriteRate,
            _ => {
                return Err("send_lat, write_lat, read_lat, send_bw or write_bw -d DEVICE -x GID \
                 -p PORT -s SIZE -n COUNT [-l LIST] [HOST]"
                    .into());
            }
        };
        let (device, host) = (String::new(), None);
        let mut options =
            Options { what, device, gid: 0, port: 18515, size: 2, count: 1000, list: 1, host };
        while let Some(word) = words.next() {
            if !word.starts_with('-') {
                options.host = Some(word.clone());
                continue;
            }
            let value = words.next().ok_or_else(|| format!("{word} wants a value"))?;
            match word.as_str() {
                "-d" => options.device = value.clone(),
                "-x" => options.gid = value.parse()?,
                "-p" => options.port = value.parse()?,
                "-s" => options.size = value.parse()?,
                "-n" => options.count = value.parse()?,
                "-l" => options.list = value.parse()?,
                _ => return Err(format!("{word} is no option").into()),
            }
        }
        let Options { size, count, list, .. } = options;
        if size == 0 || list == 0 || list > DEPTH || count % list != 0 {
            return Err(format!("{count} messages of {size} bytes in lists of {list}").into());
        }
        Ok(options)
    }

    /// Requests that may be under way: one in latency.
    pub(crate) fn depth(&self) -> u32 {
        match self.what {
            What::SendRate | What::WriteRate => DEPTH,
            _ => 1,
        }
    }
}
