//! The number of kernel objects on a device. Pairs with `RDMA_NLDEV_CMD_RES_GET`.

use std::collections::BTreeMap;
use std::fmt;

/// The number of objects of each kind on a device, in all processes and the kernel.
///
/// Two counts compare equal when every kind has the same number, so that "nothing was leaked" is
/// one comparison of before and after.
///
/// ```no_run
/// # fn main() -> uverbs::Result<()> {
/// let device = uverbs::device::Device::by_name("rxe0")?;
/// let before = device.resources()?;
/// // By the kernel's name of the kind, which may be newer than this library.
/// println!("{:?} counters", before.get("counter"));
/// // ... work ...
/// assert_eq!(device.resources()?, before, "something was left");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceCounts(BTreeMap<String, u64>);

impl ResourceCounts {
    pub(super) fn insert(&mut self, kind: String, count: u64) {
        self.0.insert(kind, count);
    }

    /// The number of objects of a kind, in the kernel's spelling ("pd", "cm_id"…); `None` if this
    /// kernel does not count that kind.
    pub fn get(&self, kind: &str) -> Option<u64> {
        self.0.get(kind).copied()
    }

    /// Protection domains.
    pub fn pd(&self) -> Option<u64> {
        self.get("pd")
    }

    /// Completion queues.
    pub fn cq(&self) -> Option<u64> {
        self.get("cq")
    }

    /// Queue pairs.
    pub fn qp(&self) -> Option<u64> {
        self.get("qp")
    }

    /// Memory regions.
    pub fn mr(&self) -> Option<u64> {
        self.get("mr")
    }

    /// User contexts: open devices.
    pub fn ctx(&self) -> Option<u64> {
        self.get("ctx")
    }

    /// Connection manager ids.
    pub fn cm_id(&self) -> Option<u64> {
        self.get("cm_id")
    }

    /// Shared receive queues.
    pub fn srq(&self) -> Option<u64> {
        self.get("srq")
    }

    /// Every kind that this kernel counts, in alphabetical order, and its number.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(kind, count)| (kind.as_str(), *count))
    }
}

impl fmt::Display for ResourceCounts {
    /// `cm_id 0 cq 1 ctx 0 …`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (kind, count)) in self.iter().enumerate() {
            let gap = if place == 0 { "" } else { " " };
            write!(f, "{gap}{kind} {count}")?;
        }
        Ok(())
    }
}
