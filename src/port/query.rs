//! Queries of ports, GIDs and partition keys. Pairs with the QUERY_PORT and QUERY_GID methods of
//! `core/uverbs_std_types_device.c`.

use super::{GidEntry, GidType, PortAttr, PortSpeed};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::number::Gid;
use crate::uverbs::command::Command;
use rustix::io::Errno;
use uverbs_uapi::device::{
    UVERBS_METHOD_QUERY_GID_ENTRY, UVERBS_METHOD_QUERY_GID_TABLE, UVERBS_METHOD_QUERY_PORT,
    UVERBS_METHOD_QUERY_PORT_SPEED,
};
use uverbs_uapi::gid::{
    UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS, UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX,
    UVERBS_ATTR_QUERY_GID_ENTRY_PORT, UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY,
    UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES,
    UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, ib_uverbs_gid_entry,
};
use uverbs_uapi::object::UVERBS_OBJECT_DEVICE;
use uverbs_uapi::port as uapi;

/// An attribute's length has 16 bits.
const MAX_GID_ENTRIES: usize = u16::MAX as usize / size_of::<ib_uverbs_gid_entry>();

impl Context {
    /// Queries state and limits of a port; ports count from 1.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have.
    #[doc(alias = "ibv_query_port")]
    pub fn query_port(&self, port: u32) -> Result<PortAttr> {
        let mut resp = uapi::ib_uverbs_query_port_resp_ex::default();
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT);
        command
            .u64(uapi::UVERBS_ATTR_QUERY_PORT_PORT_NUM, port.into())
            .output(uapi::UVERBS_ATTR_QUERY_PORT_RESP, &mut resp);
        let asked = self.file.execute("query_port", &mut command);
        asked.map_err(|error| self.explain_port(error, port))?;
        Ok(PortAttr::new(&resp))
    }

    /// Queries the rate of a port, as the driver tells it: the total rate of aggregated ports (LAG), and the
    /// share of a virtual function.
    ///
    /// Before Linux 7.0, and with a driver that does not tell, such as soft-RoCE's, it is the rate of the link:
    /// its width times the speed of a lane. [`PortSpeed::of_link`] says so.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have; `EOPNOTSUPP` if neither the driver tells the rate nor
    /// this library knows the width or the speed of the link.
    #[doc(alias = "ibv_query_port_speed")]
    pub fn query_port_speed(&self, port: u32) -> Result<PortSpeed> {
        const VERB: &str = "query_port_speed";
        /// Megabits a second in the kernel's unit.
        const UNIT: u64 = 100;
        let mut speed = 0u64;
        let asked = self.file.execute(
            VERB,
            Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT_SPEED)
                .u64(uapi::UVERBS_ATTR_QUERY_PORT_SPEED_PORT_NUM, port.into())
                .output(uapi::UVERBS_ATTR_QUERY_PORT_SPEED_RESP, &mut speed),
        );
        match asked {
            Ok(()) => Ok(PortSpeed { mbps: speed.saturating_mul(UNIT), of_link: false }),
            Err(error) if error.is_unsupported() => {
                let attr = self.query_port(port).map_err(|error| error.in_verb(VERB))?;
                match attr.link_rate_mbps() {
                    Some(mbps) => Ok(PortSpeed { mbps: mbps.into(), of_link: true }),
                    None => Err(error.detail(format!(
                        "the driver of {} tells no rate of port {port} (from Linux 7.0 on some do), and its link \
                         has the unknown width {} or speed {}",
                        self.file.device.name(),
                        attr.active_width,
                        attr.active_speed
                    ))),
                }
            }
            Err(error) => Err(self.explain_port(error, port)),
        }
    }

    /// Queries one entry of a port's GID table; the GID of an empty entry [is zero](Gid::is_zero).
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have, or an index beyond the table.
    #[doc(alias("ibv_query_gid", "ibv_query_gid_ex", "ibv_query_gid_type"))]
    pub fn query_gid(&self, port: u32, index: u32) -> Result<GidEntry> {
        const VERB: &str = "query_gid";
        let mut entry = ib_uverbs_gid_entry::default();
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_ENTRY);
        command
            .u64(UVERBS_ATTR_QUERY_GID_ENTRY_PORT, port.into())
            .u64(UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX, index.into())
            // The attribute is mandatory, although no flag is defined.
            .u32(UVERBS_ATTR_QUERY_GID_ENTRY_FLAGS, 0)
            .output(UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &mut entry);
        let asked = self.file.execute(VERB, &mut command);
        match asked {
            Ok(()) => Ok(GidEntry::new(&entry)),
            Err(error) if error.errno() == Errno::NODATA => Ok(GidEntry {
                gid: Gid::default(),
                index,
                port,
                gid_type: GidType::default(),
                ifindex: 0,
            }),
            Err(error) if error.errno() == Errno::INVAL => match self.query_port(port) {
                Ok(attr) => Err(error.detail(format!(
                    "index {index} of port {port}, whose table has {} entries",
                    attr.gid_table_len
                ))),
                Err(other) => Err(other.in_verb(VERB)),
            },
            Err(error) => Err(error.context(|| format!("index {index} of port {port}"))),
        }
    }

    /// Queries the GID tables of all ports, without the empty entries.
    #[doc(alias = "ibv_query_gid_table")]
    pub fn gid_table(&self) -> Result<Vec<GidEntry>> {
        const VERB: &str = "query_gid_table";
        let mut total = 0usize;
        for port in 1..=self.file.device.port_count() {
            let attr = self.query_port(port).map_err(|error| error.in_verb(VERB))?;
            total = total.saturating_add(attr.gid_table_len as usize);
        }
        // The kernel answers only the entries in use, so this limit is not reached in practice.
        let total = total.min(MAX_GID_ENTRIES);
        if total == 0 {
            return Ok(Vec::new());
        }
        let mut entries = vec![ib_uverbs_gid_entry::default(); total];
        let mut count = 0u64;
        let mut command = Command::new(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_GID_TABLE);
        command
            .u64(UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE, size_of::<ib_uverbs_gid_entry>() as u64)
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES, entries.as_mut_slice())
            .output(UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, &mut count);
        self.file.execute(VERB, &mut command)?;
        let count = usize::try_from(count).unwrap_or(total).min(total);
        Ok(entries[..count].iter().map(GidEntry::new).collect())
    }

    /// Reads a partition key of a port, in host order, from sysfs: the kernel has no verb for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a port that the device does not have or an index beyond the table, `ENOENT`
    /// where sysfs is not mounted or shows another network namespace's devices.
    ///
    /// ```no_run
    /// # fn f(context: &uverbs::Context) -> uverbs::Result<()> {
    /// let is_full_member = context.query_pkey(1, 0)? & 0x8000 != 0;
    /// # let _ = is_full_member; Ok(()) }
    /// ```
    #[doc(alias = "ibv_query_pkey")]
    pub fn query_pkey(&self, port: u32, index: u16) -> Result<u16> {
        const VERB: &str = "query_pkey";
        self.file.check_fork(VERB)?;
        self.file.device.check_described(VERB, "partition keys")?;
        let attr = self.query_port(port).map_err(|error| error.in_verb(VERB))?;
        if index >= attr.pkey_table_len {
            return Err(Error::invalid(
                VERB,
                format!(
                    "index {index} of port {port}, whose table has {} entries",
                    attr.pkey_table_len
                ),
            ));
        }
        if let Some(key) = self.file.device.hosted_pkey(port, index) {
            return Ok(key);
        }
        let name = self.file.device.name();
        let path = format!("/sys/class/infiniband/{name}/ports/{port}/pkeys/{index}");
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Error::new(VERB, errno).detail(path.clone())
        })?;
        parse_pkey(&text)
            .ok_or_else(|| Error::new(VERB, Errno::PROTO).detail(format!("{path} reads {text:?}")))
    }

    fn explain_port(&self, error: Error, port: u32) -> Error {
        match error.errno() {
            Errno::INVAL => error.detail(format!(
                "port {port}; {} has ports 1 to {}",
                self.file.device.name(),
                self.file.device.port_count()
            )),
            _ => error.context(|| format!("port {port} of {}", self.file.device.name())),
        }
    }
}

pub(super) fn parse_pkey(text: &str) -> Option<u16> {
    u16::from_str_radix(text.trim_end().strip_prefix("0x")?, 16).ok()
}
