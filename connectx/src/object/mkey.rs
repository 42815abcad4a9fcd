//! Memory keys (mkeys): they check accesses and find the addresses.
//!
//! Pairs with CREATE_MKEY and with UMR WQEs, which change mkeys. The data path finds memory only
//! through `Objects::resolve`.

use uverbs_uapi::mlx5::prm::Bits;
use uverbs_uapi::mlx5::prm::mkc::mkc;

use super::Objects;
use super::table::KERNEL;
use crate::chunks::chunks;
use crate::cost::Cost;

/// The kind of the mkeys that a driver keeps for later memory regions.
pub const CACHED_MKEY: &str = "cached mkey";

/// `qpn` of an mkey that is not bound to a queue pair.
const ANY_QP: u64 = 0xff_ffff;
/// The mkey of no memory: reads find zeros, and writes go nowhere. `dump_fill_mkey` of QUERY_SPECIAL_CONTEXTS; it is
/// behind the numbers of all others.
pub(crate) const DUMP_FILL: u32 = 0xffff_fe00;
/// The deepest nesting of mkey lists.
const MAX_DEPTH: u32 = 4;
/// The most address ranges of one access.
const MAX_RANGES: usize = 1 << 20;
/// Ranges of recent accesses that are remembered: a message has one on each side, and a queue pair both.
const RECENT: usize = 4;
/// The pages behind an access that are remembered with it: 64 packets of 1 KiB.
const PAGES_AHEAD: usize = 16;
/// The ranges whose memory is kept for the next access: those of 16 MiB in scattered pages.
const KEPT_RANGES: usize = 1 << 12;

/// `MLX5_MKC_ACCESS_MODE_*`
pub(crate) const PHYSICAL: u64 = 0;
pub(crate) const PAGES: u64 = 1;
pub(crate) const KLMS: u64 = 2;
pub(crate) const KSM: u64 = 3;
pub(crate) const DEVICE_MEMORY: u64 = 5;
/// Another name for an mkey, of this function or of another one.
pub(crate) const CROSSING: u64 = 6;

/// A memory key.
pub struct Mkey {
    pub(crate) context: Bits<mkc, Vec<u8>>,
    pub(crate) translation: Vec<u8>,
    /// The umem that it is over.
    pub(crate) umem: Option<u32>,
    /// Whether its physical addresses are those of the data-direct function.
    pub(crate) data_direct: bool,
}

/// The access right that an access needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessRight {
    LocalRead,
    LocalWrite,
    RemoteRead,
    RemoteWrite,
    RemoteAtomic,
}

/// One access to memory by mkey.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) key: u32,
    pub(crate) pd: u32,
    pub(crate) qpn: u32,
    pub(crate) right: AccessRight,
    pub(crate) address: u64,
    pub(crate) len: u64,
}

/// Address of a range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DmaAddress {
    /// Guest physical address.
    Guest(u64),
    /// Offset in BAR0.
    Bar(u64),
    /// No memory.
    Nowhere,
}

/// A contiguous range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DmaRange {
    pub(crate) address: DmaAddress,
    pub(crate) len: usize,
}

/// A range of an mkey's addresses that lies in one piece of guest memory, and who may access it. Packets of one message
/// touch memory one behind the other, which is cheaper to remember than to find.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recent {
    /// The access, with the whole range.
    access: Access,
    guest: u64,
    /// [`ObjectTable::changes`](super::table::ObjectTable::changes) of the mkeys.
    changes: u64,
}

impl Recent {
    /// Where another access lies, if it is to a part of the range.
    fn find(&self, changes: u64, access: &Access) -> Option<DmaRange> {
        let Access { key, pd, qpn, right, address, len } = self.access;
        let offset = access.address.wrapping_sub(address);
        let inside = offset.checked_add(access.len).is_some_and(|end| end <= len);
        let same = (key, pd, qpn, right) == (access.key, access.pd, access.qpn, access.right);
        (same && inside && access.len > 0 && self.changes == changes).then(|| DmaRange {
            address: DmaAddress::Guest(self.guest.wrapping_add(offset)),
            len: access.len as usize,
        })
    }
}

impl Mkey {
    fn mode(&self) -> u64 {
        self.context.get(mkc::access_mode_4_2) << 2 | self.context.get(mkc::access_mode_1_0)
    }

    /// Whether it covers device memory; then it holds that allocation.
    pub(crate) fn is_device_memory(&self) -> bool {
        self.mode() == DEVICE_MEMORY
    }

    /// Whether its addresses are guest physical addresses.
    pub(crate) fn is_physical(&self) -> bool {
        self.mode() == PHYSICAL
    }

    /// The mkey that it is another name for; it holds that one.
    pub(crate) fn crossed(&self) -> Option<u32> {
        (self.mode() == CROSSING).then(|| Self::named(&self.context))
    }

    /// The mkey that the context of another name has in place of the length of a list.
    pub(crate) fn named(context: &Bits<mkc, Vec<u8>>) -> u32 {
        context.get32(mkc::translations_octword_size)
    }

    /// Whether it is a list of other mkeys.
    pub(crate) fn is_list(&self) -> bool {
        matches!(self.mode(), KLMS | KSM)
    }

    /// Whether a queue pair may use it: it is bound to that queue pair or to none.
    pub(crate) fn allows_qp(&self, qpn: u32) -> bool {
        matches!(self.context.get(mkc::qpn), bound if bound == ANY_QP || bound == u64::from(qpn))
    }

    pub(crate) fn is_free(&self) -> bool {
        self.context.is_set(mkc::free)
    }

    fn allows(&self, right: AccessRight) -> bool {
        self.context.is_set(match right {
            AccessRight::LocalRead => mkc::lr,
            AccessRight::LocalWrite => mkc::lw,
            AccessRight::RemoteRead => mkc::rr,
            AccessRight::RemoteWrite => mkc::rw,
            AccessRight::RemoteAtomic => mkc::a,
        })
    }

    /// Octowords of the translation list. Each holds two page addresses, or one KLM.
    pub(crate) fn octowords(context: &Bits<mkc, Vec<u8>>) -> u64 {
        context.get(mkc::translations_octword_size)
    }
}

impl Objects {
    /// The number of mkeys in the cache of a driver. mlx5_ib keeps the mkey of a deregistered region for a later one:
    /// it makes the mkey free, and moves it to a PD of the kernel.
    pub(crate) fn cached_mkeys(&self) -> usize {
        let of_kernel = |mkey: &Mkey| self.pds.owner(mkey.context.get32(mkc::pd)) == KERNEL;
        self.mkeys.iter().filter(|(_, mkey)| mkey.is_free() && of_kernel(mkey)).count()
    }

    /// Calls `visit` with the address ranges of an access; returns the reason if the access is not allowed.
    pub(crate) fn resolve<T>(
        &self,
        access: Access,
        visit: impl FnOnce(&[DmaRange]) -> Result<T, String>,
    ) -> Result<T, String> {
        let changes = self.mkeys.changes();
        let known = self.recent.borrow().iter().find_map(|one| one.find(changes, &access));
        if let Some(range) = known {
            return visit(&[range]);
        }
        let mut ranges = self.ranges.take();
        ranges.clear();
        let mut walk = Walk { ranges, cost: &self.cost };
        let found = self.resolve_into(access, 0, &mut walk);
        if let (Ok(()), [range]) = (&found, &walk.ranges[..]) {
            self.remember(access, *range);
        }
        let answer = found.and_then(|()| visit(&walk.ranges));
        walk.ranges.shrink_to(KEPT_RANGES);
        self.ranges.set(walk.ranges);
        answer
    }

    /// Remembers where an allowed access lies, and what lies behind it in one piece.
    fn remember(&self, access: Access, range: DmaRange) {
        let mkey = self.mkeys.find(access.key >> 8).filter(|mkey| mkey.mode() == PAGES);
        let (Some(mkey), DmaAddress::Guest(guest)) = (mkey, range.address) else { return };
        let len = mkey.extent(access.address, guest, access.len);
        let mut recent = self.recent.borrow_mut();
        recent.truncate(RECENT - 1);
        let access = Access { len, ..access };
        recent.push_front(Recent { access, guest, changes: self.mkeys.changes() });
    }

    /// Checks that an access is allowed.
    pub(crate) fn check(&self, access: Access) -> Result<(), String> {
        self.resolve(access, |_| Ok(()))
    }

    fn resolve_into(&self, access: Access, depth: u32, to: &mut Walk<'_>) -> Result<(), String> {
        let Access { key, pd, qpn, right, address, len } = access;
        if depth > MAX_DEPTH {
            return Err(format!("mkey {key:#x} is nested deeper than {MAX_DEPTH}"));
        }
        if key == DUMP_FILL {
            return to.nowhere(right, len);
        }
        let mkey = self.mkeys.get(key >> 8).map_err(|refused| refused.why)?;
        let context = &mkey.context;
        if context.get(mkc::mkey_7_0) != u64::from(key & 0xff) || mkey.is_free() {
            return Err(format!("mkey {key:#x} is not valid"));
        }
        if context.get(mkc::pd) != u64::from(pd) {
            return Err(format!("mkey {key:#x} is of PD {}, not {pd}", context.get(mkc::pd)));
        }
        if !mkey.allows_qp(qpn) {
            let bound = context.get(mkc::qpn);
            return Err(format!("mkey {key:#x} is bound to QP {bound:#x}, not {qpn:#x}"));
        }
        if !mkey.allows(right) {
            return Err(format!("mkey {key:#x} does not allow {right:?}"));
        }
        // Addresses of device memory begin at zero; `start_addr` is its offset in BAR0.
        let device_memory = mkey.is_device_memory();
        let start = if device_memory { 0 } else { context.get(mkc::start_addr) };
        let whole = context.is_set(mkc::length64) && !device_memory;
        let offset = address.wrapping_sub(start);
        let inside = offset.checked_add(len).is_some_and(|end| end <= context.get(mkc::len));
        if !whole && (address < start || !inside) {
            return Err(format!("{address:#x}+{len:#x} is outside mkey {key:#x}"));
        }
        if len == 0 {
            return Ok(());
        }
        match mkey.mode() {
            PHYSICAL if mkey.data_direct && !self.data_direct => {
                Err(format!("the data-direct function of mkey {key:#x} may not access memory"))
            }
            PHYSICAL => {
                let len = usize::try_from(len).map_err(|_| "the length is too long".to_string())?;
                to.ranges.push(DmaRange { address: DmaAddress::Guest(address), len });
                Ok(())
            }
            DEVICE_MEMORY => {
                let address = DmaAddress::Bar(context.get(mkc::start_addr).wrapping_add(address));
                to.ranges.push(DmaRange { address, len: len as usize });
                Ok(())
            }
            PAGES => {
                to.step(key, (len >> 12) as usize)?;
                mkey.pages(address, len, &mut to.ranges)
            }
            KLMS | KSM => self.follow_list(mkey, access, depth, to),
            // The holders of the name need not be of the other mkey's PD.
            CROSSING => {
                let crossed = Mkey::named(context);
                let other = self.mkeys.get(crossed >> 8).map_err(|refused| refused.why)?;
                let pd = other.context.get32(mkc::pd);
                self.follow(Access { key: crossed, pd, ..access }, depth, to)
            }
            mode => Err(format!("mkey {key:#x} has access mode {mode}, not modelled")),
        }
    }

    /// Follows a list of other mkeys (KLMs or KSMs).
    fn follow_list(
        &self,
        mkey: &Mkey,
        access: Access,
        depth: u32,
        to: &mut Walk<'_>,
    ) -> Result<(), String> {
        let fixed = (mkey.mode() == KSM).then(|| 1u64 << mkey.context.get(mkc::log_page_size));
        let start = mkey.context.get(mkc::start_addr);
        let mut skip = access.address.wrapping_sub(start);
        let mut left = access.len;
        let entries = chunks::<16>(&mkey.translation);
        if let Some(pattern) = RepeatPattern::find(entries) {
            return self.follow_pattern(&pattern, Access { address: skip, ..access }, depth, to);
        }
        for entry in entries {
            to.step(access.key, 1)?;
            let entry = u128::from_be_bytes(*entry);
            let size = fixed.unwrap_or((entry >> 96) as u64 & 0x7fff_ffff);
            if skip >= size {
                skip -= size;
                continue;
            }
            let len = (size - skip).min(left);
            let key = (entry >> 64) as u32;
            let address = (entry as u64).wrapping_add(skip);
            self.follow(Access { key, address, len, ..access }, depth, to)?;
            left -= len;
            skip = 0;
            if left == 0 {
                return Ok(());
            }
        }
        Err(format!("the list of mkey {:#x} ends {left} bytes early", access.key))
    }

    /// Follows a repeat pattern; the address of the access counts from the start of the mkey.
    fn follow_pattern(
        &self,
        pattern: &RepeatPattern<'_>,
        access: Access,
        depth: u32,
        to: &mut Walk<'_>,
    ) -> Result<(), String> {
        let (entries, period) = (pattern.entries, pattern.period);
        to.step(access.key, entries.len())?;
        let sum: u64 = entries.iter().map(|entry| RepeatEntry::parse(entry).len).sum();
        if period == 0 || sum != period {
            return Err(format!("a pattern has {period} bytes, its entries {sum}"));
        }
        let mut left = access.len;
        let mut skip = access.address % period;
        for repeat in access.address / period..pattern.count {
            for entry in entries.iter().map(RepeatEntry::parse) {
                to.step(access.key, 1)?;
                if skip >= entry.len {
                    skip -= entry.len;
                    continue;
                }
                let len = (entry.len - skip).min(left);
                let address = entry.address.wrapping_add(repeat * entry.stride).wrapping_add(skip);
                self.follow(Access { key: entry.key, address, len, ..access }, depth, to)?;
                left -= len;
                skip = 0;
                if left == 0 {
                    return Ok(());
                }
            }
        }
        Err(format!("the pattern of mkey {:#x} ends {left} bytes early", access.key))
    }

    /// Continues at an mkey in another mkey's list. The list's own mkey has been checked for the
    /// right. The mkeys in the list belong to its owner, so they are checked for the local right.
    fn follow(&self, access: Access, depth: u32, to: &mut Walk<'_>) -> Result<(), String> {
        let right = match access.right {
            AccessRight::LocalRead | AccessRight::RemoteRead => AccessRight::LocalRead,
            AccessRight::LocalWrite | AccessRight::RemoteWrite | AccessRight::RemoteAtomic => {
                AccessRight::LocalWrite
            }
        };
        self.resolve_into(Access { right, ..access }, depth + 1, to)?;
        if to.ranges.len() > MAX_RANGES {
            return Err(format!(
                "an access by mkey {:#x} has more than {MAX_RANGES} ranges",
                access.key
            ));
        }
        Ok(())
    }
}

/// One access on its way through lists of mkeys.
struct Walk<'a> {
    ranges: Vec<DmaRange>,
    cost: &'a Cost,
}

impl Walk<'_> {
    /// An access by the mkey of no memory, which peers do not have.
    fn nowhere(&mut self, right: AccessRight, len: u64) -> Result<(), String> {
        if !matches!(right, AccessRight::LocalRead | AccessRight::LocalWrite) {
            return Err(format!("the mkey of no memory does not allow {right:?}"));
        }
        let len = usize::try_from(len).map_err(|_| "the length is too long".to_string())?;
        self.ranges.push(DmaRange { address: DmaAddress::Nowhere, len });
        Ok(())
    }

    /// Charges `count` entries of a list. Nested lists could otherwise keep the device busy for ever.
    fn step(&mut self, key: u32, count: usize) -> Result<(), String> {
        match self.cost.add_steps(count as u64) {
            true => Ok(()),
            false => Err(format!("an access ends after too many list entries, at mkey {key:#x}")),
        }
    }
}

/// A list of ranges that repeats, with a stride for each range (`mlx5_wqe_umr_repeat_block_seg`).
struct RepeatPattern<'a> {
    /// Bytes of one repeat.
    period: u64,
    /// The number of repeats.
    count: u64,
    entries: &'a [[u8; 16]],
}

impl<'a> RepeatPattern<'a> {
    /// Value that marks a pattern, in place of the first mkey.
    const MARK: u32 = 0x400;

    fn find(entries: &'a [[u8; 16]]) -> Option<Self> {
        let (first, rest) = entries.split_first()?;
        let head = u128::from_be_bytes(*first);
        if (head >> 64) as u32 != Self::MARK {
            return None;
        }
        let parts = usize::from(head as u16);
        let entries = rest.get(..parts)?;
        Some(Self {
            period: (head >> 96) as u64,
            count: (head >> 32) as u64 & 0xffff_ffff,
            entries,
        })
    }
}

/// A range of a pattern.
struct RepeatEntry {
    stride: u64,
    len: u64,
    key: u32,
    address: u64,
}

impl RepeatEntry {
    fn parse(bytes: &[u8; 16]) -> Self {
        let value = u128::from_be_bytes(*bytes);
        Self {
            stride: (value >> 112) as u64,
            len: (value >> 96) as u64 & 0xffff,
            key: (value >> 64) as u32,
            address: value as u64,
        }
    }
}

impl Mkey {
    /// The bytes from `address` on that lie in one piece from `guest` on, of which `len` are known to.
    fn extent(&self, address: u64, guest: u64, len: u64) -> u64 {
        if self.context.is_set(mkc::length64) {
            return len;
        }
        let shift = self.context.get(mkc::log_page_size);
        let start = self.context.get(mkc::start_addr);
        let offset = address.wrapping_sub(start & !((1 << shift) - 1));
        // From `address` to the begin of a page.
        let reach = |page: u64| (page << shift).wrapping_sub(offset);
        let first = (offset.wrapping_add(len - 1) >> shift) + 1;
        let entries = chunks::<8>(&self.translation).get(first as usize..).unwrap_or_default();
        let pages = (first..).zip(entries.iter().take(PAGES_AHEAD));
        let joined = pages.take_while(|(page, entry)| {
            let entry = u64::from_be_bytes(**entry);
            // A piece ends with the last address.
            entry != 0 && Some(entry & !0xfff) == guest.checked_add(reach(*page))
        });
        let end = first + joined.count() as u64;
        reach(end).min(self.context.get(mkc::len) - (address - start))
    }

    fn pages(&self, address: u64, len: u64, to: &mut Vec<DmaRange>) -> Result<(), String> {
        let shift = self.context.get(mkc::log_page_size);
        if !(12..=48).contains(&shift) {
            return Err(format!("pages of 2^{shift} bytes, valid are 2^12 to 2^48"));
        }
        let page = 1u64 << shift;
        let base = self.context.get(mkc::start_addr) & !(page - 1);
        let entries = chunks::<8>(&self.translation);
        let mut at = address.wrapping_sub(base);
        let mut left = len;
        // Pages of one key that lie one behind the other are one range, and two keys of a list never are: then the
        // length of a unit of packets would follow from where the program's allocator has put memory.
        let begun = to.len();
        while left > 0 {
            // Present bits 0 and 1 matter only with page faults, which are not modelled.
            let entry = entries.get((at >> shift) as usize).map(|entry| u64::from_be_bytes(*entry));
            let Some(entry) = entry.filter(|entry| *entry != 0) else {
                return Err(format!("page {} is not present", at >> shift));
            };
            let inside = at & (page - 1);
            let range = (page - inside).min(left);
            let gpa = (entry & !0xfff).checked_add(inside).ok_or("the page address is too high")?;
            match to[begun..].last_mut() {
                Some(DmaRange { address: DmaAddress::Guest(last), len })
                    if last.wrapping_add(*len as u64) == gpa =>
                {
                    *len += range as usize;
                }
                _ => to.push(DmaRange { address: DmaAddress::Guest(gpa), len: range as usize }),
            }
            at += range;
            left -= range;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::domain::Domain;

    fn found(objects: &Objects, access: Access) -> Result<Vec<DmaRange>, String> {
        objects.resolve(access, |ranges| Ok(ranges.to_vec()))
    }

    fn objects() -> Objects {
        let mut context = Bits::<mkc, _>::new(vec![0; 64]);
        context.set(mkc::access_mode_1_0, PAGES);
        context.set(mkc::log_page_size, 12);
        context.set(mkc::qpn, ANY_QP);
        context.set(mkc::mkey_7_0, 0x55);
        context.set(mkc::pd, 3);
        context.set(mkc::start_addr, 0x7f00_0000_0800);
        context.set(mkc::len, 0x1800);
        context.set(mkc::lr, 1);
        context.set(mkc::rr, 1);
        let translation = [0x5003u64, 0x9003].iter().flat_map(|page| page.to_be_bytes()).collect();
        let mut objects = Objects::default();
        objects
            .mkeys
            .insert(Mkey { context, translation, umem: None, data_direct: false })
            .unwrap();
        objects
    }

    #[test]
    fn a_free_mkey_of_a_kernel_pd_counts_as_cached() {
        let mut objects = Objects::default();
        let kernels = objects.pds.insert(Domain).unwrap();
        let users = objects.pds.insert_owned(7, Domain).unwrap();
        for (pd, free) in [(kernels, 0), (users, 0), (users, 1), (kernels, 1)] {
            let mut context = Bits::<mkc, _>::new(vec![0; 64]);
            context.set(mkc::pd, pd.into());
            context.set(mkc::free, free);
            objects
                .mkeys
                .insert(Mkey { context, translation: vec![], umem: None, data_direct: false })
                .unwrap();
        }
        let counts = objects.counts();
        assert!(counts.contains(&("mkey", 3)) && counts.contains(&(CACHED_MKEY, 1)), "{counts:?}");
    }

    const GOOD: Access = Access {
        key: 0x1_0055,
        pd: 3,
        qpn: 7,
        right: AccessRight::RemoteRead,
        address: 0x7f00_0000_0900,
        len: 0x800,
    };

    #[test]
    fn an_access_across_pages_resolves_to_their_addresses() {
        let ranges = found(&objects(), GOOD).unwrap();
        let range = |address, len| DmaRange { address: DmaAddress::Guest(address), len };
        assert_eq!(ranges, [range(0x5900, 0x700), range(0x9000, 0x100)]);
    }

    /// Pages 0 to 3 of 4 lie behind one another but for the last one, and the last byte of it is outside of the mkey.
    fn neighbours() -> Objects {
        let mut objects = objects();
        let mkey = objects.mkeys.get_mut(0x100).unwrap();
        mkey.context.set(mkc::len, 0x37ff);
        let pages = [0x5003u64, 0x6003, 0x7003, 0xa003];
        mkey.translation = pages.iter().flat_map(|page| page.to_be_bytes()).collect();
        objects
    }

    #[test]
    fn a_remembered_range_ends_with_its_piece_of_memory() {
        let objects = neighbours();
        let at = |address: u64, len: u64| {
            found(&objects, Access { address: 0x7f00_0000_0800 + address, len, ..GOOD })
        };
        let range = |address, len| DmaRange { address: DmaAddress::Guest(address), len };
        for _ in 0..2 {
            assert_eq!(at(0, 1), Ok(vec![range(0x5800, 1)]));
            assert_eq!(at(0x100, 0x2700), Ok(vec![range(0x5900, 0x2700)]));
            assert_eq!(at(0x100, 0x2800), Ok(vec![range(0x5900, 0x2700), range(0xa000, 0x100)]));
            assert_eq!(at(0x2800, 0xfff), Ok(vec![range(0xa000, 0xfff)]));
            at(0x2801, 0xfff).unwrap_err();
        }
        let lens = objects.recent.borrow().iter().map(|one| one.access.len).collect::<Vec<_>>();
        assert_eq!(lens, [0xfff, 0x2800]);
    }

    #[test]
    fn a_range_is_forgotten_when_its_mkey_changes() {
        let mut objects = objects();
        found(&objects, GOOD).unwrap();
        let one = Access { len: 1, ..GOOD };
        found(&objects, one).unwrap();
        let context = &mut objects.mkeys.get_mut(0x100).unwrap().context;
        context.set(mkc::rr, 0);
        found(&objects, one).unwrap_err();
        objects.mkeys.get_mut(0x100).unwrap().context.set(mkc::rr, 1);
        found(&objects, one).unwrap();
        objects.mkeys.remove(0x100).unwrap();
        found(&objects, one).unwrap_err();
    }

    #[test]
    fn a_remembered_range_ends_with_the_last_address() {
        let mut objects = objects();
        let mkey = objects.mkeys.get_mut(0x100).unwrap();
        let pages = [0xffff_ffff_ffff_f003u64, 0x3];
        mkey.translation = pages.iter().flat_map(|page| page.to_be_bytes()).collect();
        let at = |address: u64| found(&objects, Access { address, len: 1, ..GOOD });
        let range = |address| DmaRange { address: DmaAddress::Guest(address), len: 1 };
        for _ in 0..2 {
            assert_eq!(at(0x7f00_0000_0900), Ok(vec![range(0xffff_ffff_ffff_f900)]));
            assert_eq!(at(0x7f00_0000_1000), Ok(vec![range(0)]));
        }
    }

    #[test]
    fn an_access_that_fails_one_check_is_refused() {
        let objects = objects();
        for bad in [
            Access { key: 0x1_0056, ..GOOD },
            Access { key: 0x2_0055, ..GOOD },
            Access { pd: 4, ..GOOD },
            Access { right: AccessRight::RemoteWrite, ..GOOD },
            Access { right: AccessRight::LocalWrite, ..GOOD },
            Access { right: AccessRight::RemoteAtomic, ..GOOD },
            Access { address: 0x7f00_0000_07ff, ..GOOD },
            Access { len: 0x1701, ..GOOD },
            Access { len: u64::MAX, ..GOOD },
        ] {
            assert!(found(&objects, bad).is_err(), "{bad:?}");
        }
    }

    /// Each of 1,024 bytes leads to a list of a million empty entries: a few mkeys would keep the
    /// device busy for minutes.
    #[test]
    fn nested_klm_lists_stop_at_the_cost_limit() {
        let mut objects = objects();
        let mut list = |entries: Vec<u128>, len: u64| {
            let mut context = Bits::<mkc, _>::new(vec![0; 64]);
            for (field, value) in [
                (mkc::access_mode_1_0, KLMS),
                (mkc::qpn, ANY_QP),
                (mkc::pd, 3),
                (mkc::len, len),
                (mkc::lr, 1),
            ] {
                context.set(field, value);
            }
            let translation = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
            objects
                .mkeys
                .insert(Mkey { context, translation, umem: None, data_direct: false })
                .unwrap()
                << 8
        };
        let byte = |key: u32, at: u64| 1 << 96 | u128::from(key) << 64 | u128::from(at);
        let mut entries = vec![0; 1 << 20];
        entries.push(byte(GOOD.key, GOOD.address));
        let inner = list(entries, 1);
        let outer = list(vec![byte(inner, 0); 1 << 10], 1 << 10);
        let access = Access { right: AccessRight::LocalRead, address: 0, ..GOOD };
        let range = DmaRange { address: DmaAddress::Guest(0x5900), len: 1 };
        assert_eq!(found(&objects, Access { key: inner, len: 1, ..access }).unwrap(), [range]);
        assert_eq!(found(&objects, Access { key: outer, len: 2, ..access }).unwrap(), [range; 2]);
        objects.cost.take();
        let why = found(&objects, Access { key: outer, len: 1 << 10, ..access }).unwrap_err();
        assert!(why.contains("an access ends after"), "{why}");
    }

    /// Each access to a pattern adds up its entries.
    #[test]
    fn a_pattern_is_charged_for_each_of_its_entries() {
        let objects = pattern(4, 24);
        found(&objects, Access { key: 0x101 << 8, address: 0x1000, len: 1, ..GOOD }).unwrap();
        assert_eq!(objects.cost.take(), 2 + 1);
    }

    /// Two ranges of the mkey of `objects`, 16 and 8 bytes, with strides of 32 and 8 bytes.
    fn pattern(count: u32, period: u32) -> Objects {
        let mut objects = objects();
        let mut context = Bits::<mkc, _>::new(vec![0; 64]);
        for (field, value) in [
            (mkc::access_mode_1_0, KLMS),
            (mkc::qpn, ANY_QP),
            (mkc::pd, 3),
            (mkc::start_addr, 0x1000),
            (mkc::len, 24 * 4),
            (mkc::lr, 1),
            (mkc::rr, 1),
        ] {
            context.set(field, value);
        }
        let mut translation =
            [period, RepeatPattern::MARK, count, 2].map(u32::to_be_bytes).concat();
        for (stride, len, address) in
            [(32u16, 16u16, 0x7f00_0000_0800u64), (8, 8, 0x7f00_0000_1800)]
        {
            translation.extend(stride.to_be_bytes());
            translation.extend(len.to_be_bytes());
            translation.extend(GOOD.key.to_be_bytes());
            translation.extend(address.to_be_bytes());
        }
        objects
            .mkeys
            .insert(Mkey { context, translation, umem: None, data_direct: false })
            .unwrap();
        objects
    }

    #[test]
    fn a_pattern_repeats_each_range_with_its_own_stride() {
        let access = Access { key: 0x101 << 8, address: 0x1000 + 12, len: 40, ..GOOD };
        let ranges = found(&pattern(4, 24), access).unwrap();
        let range = |address, len| DmaRange { address: DmaAddress::Guest(address), len };
        let want = [range(0x580c, 4), range(0x9800, 8), range(0x5820, 16), range(0x9808, 8)];
        assert_eq!(ranges[..4], want);
        assert_eq!(ranges[4..], [range(0x5840, 4)]);
    }

    #[test]
    fn a_pattern_ends_after_its_last_repeat_and_its_entries_fill_the_period() {
        let access = Access { key: 0x101 << 8, address: 0x1000, len: 72, ..GOOD };
        assert!(found(&pattern(3, 24), access).is_ok());
        assert!(found(&pattern(2, 24), access).is_err());
        assert!(found(&pattern(u32::MAX, 0), access).is_err());
        assert!(found(&pattern(u32::MAX, 25), access).is_err());
    }
}
