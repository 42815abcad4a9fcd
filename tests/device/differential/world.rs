//! The objects of a sequence, and its steps.

use super::commands::QUEUES;
use super::random::Random;
use super::words::refusal;
use crate::env;
use crate::pair::loopback;
use crate::pattern;
use crate::verdict::Verdict;
use std::collections::BTreeMap;
use uverbs::{
    Access, AddressHandle, AddressVector, CompletionQueue, Context, ErrorWith, MemoryRegion,
    MemoryWindow, ProtectionDomain, QpType, QueuePair, RawRange, SharedReceiveQueue, WindowType,
    XrcDomain, XrcTarget,
};

/// Bytes of the memory that holds all regions.
pub(super) const ARENA: usize = 4 * 4096;
/// The steps of a sequence.
pub(super) const STEPS: usize = 40;

/// The first seed whose sequence is of commands.
const COMMANDS: u64 = 24;

/// The subject of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    /// Objects come, change and go.
    Objects,
    /// Queue pairs change their states and attributes.
    States,
    /// Commands that the library would not send.
    Commands,
    /// Connected queue pairs of a type send to each other.
    Traffic(QpType),
}

impl Theme {
    /// The theme of a seed.
    pub(super) fn of(seed: u64) -> Theme {
        if seed >= COMMANDS {
            return Theme::Commands;
        }
        match seed % 8 {
            0 | 4 => Theme::Objects,
            1 => Theme::States,
            2 | 3 | 5 => Theme::Traffic(QpType::RC),
            6 => Theme::Traffic(QpType::UC),
            _ => Theme::Traffic(QpType::UD),
        }
    }
}

/// A queue pair, and its connection.
pub(super) struct Queue {
    pub(super) qp: QueuePair,
    pub(super) cqs: [usize; 2],
    pub(super) srq: Option<usize>,
    /// The queue pair at the other end, if the same step connected both.
    pub(super) peer: Option<(usize, u64)>,
}

type Region = MemoryRegion<u8, RawRange>;

/// The places in the arena for the data of a posted receive.
pub(super) type Pieces = Vec<(usize, usize)>;

/// The objects.
pub(super) struct World {
    pub(super) random: Random,
    // Queue pairs first: memory stays until the device is done with it.
    pub(super) qps: [Option<Queue>; 3],
    pub(super) targets: [Option<XrcTarget>; 1],
    pub(super) srqs: [Option<SharedReceiveQueue>; 2],
    pub(super) mws: [Option<MemoryWindow>; 2],
    pub(super) ahs: [Option<AddressHandle>; 2],
    pub(super) mrs: [Option<Region>; 4],
    pub(super) cqs: [Option<CompletionQueue>; 3],
    pub(super) xrcds: [Option<XrcDomain>; 1],
    pub(super) pds: [Option<ProtectionDomain>; 2],
    pub(super) arena: MemoryRegion<u8>,
    /// Memory for queues of commands.
    pub(super) queues: MemoryRegion<u8>,
    pub(super) path: AddressVector,
    pub(super) context: Context,
    /// The number of the next request.
    pub(super) next: u64,
    /// The number of the last step that connected.
    pub(super) epoch: u64,
    /// Whether the last step connected anew, and no receive was posted since.
    is_fresh: bool,
    /// The windows of binds that have not completed.
    pub(super) bindings: BTreeMap<u64, usize>,
    /// Signaled sends that have not completed, and their queue pairs.
    pub(super) awaited: BTreeMap<u64, usize>,
    pub(super) receives: BTreeMap<u64, Pieces>,
}

/// Destroys the object in a slot.
pub(super) fn end<T, R>(
    slot: &mut Option<T>,
    by: impl FnOnce(T) -> Result<R, ErrorWith<T>>,
) -> String {
    let Some(object) = slot.take() else { return "none".into() };
    match by(object) {
        Ok(_) => "ok".into(),
        Err(failed) => {
            let (object, error) = failed.into_parts();
            *slot = Some(object);
            refusal(&error)
        }
    }
}

/// Makes room in a slot, or returns the reason that it cannot.
pub(super) fn vacate<T, R>(
    slot: &mut Option<T>,
    by: impl FnOnce(T) -> Result<R, ErrorWith<T>>,
) -> Result<(), String> {
    match slot.is_some().then(|| end(slot, by)) {
        None => Ok(()),
        Some(gone) if gone == "ok" => Ok(()),
        Some(refused) => Err(format!("taken, {refused}")),
    }
}

/// Puts a new object into a slot.
pub(super) fn keep<T>(
    slot: &mut Option<T>,
    made: uverbs::Result<T>,
    say: impl FnOnce(&T) -> String,
) -> String {
    match made {
        Ok(object) => {
            let text = say(&object);
            *slot = Some(object);
            text
        }
        Err(error) => refusal(&error),
    }
}

impl World {
    pub(super) fn new(seed: u64) -> Verdict<World> {
        let context = env::open()?;
        let own = context.alloc_pd()?;
        let mut arena = own.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(ARENA)?;
        arena.copy_from(0, &pattern::bytes(seed, ARENA))?;
        let path = loopback(&context)?;
        Ok(World {
            random: Random::new(seed),
            qps: Default::default(),
            targets: Default::default(),
            srqs: Default::default(),
            mws: Default::default(),
            ahs: Default::default(),
            mrs: Default::default(),
            cqs: Default::default(),
            xrcds: Default::default(),
            pds: Default::default(),
            arena,
            queues: own.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(QUEUES)?,
            path,
            context,
            next: 0,
            epoch: 0,
            is_fresh: true,
            bindings: BTreeMap::new(),
            awaited: BTreeMap::new(),
            receives: BTreeMap::new(),
        })
    }

    /// The first steps of a theme.
    pub(super) fn begin(&mut self, theme: Theme) -> Verdict<Vec<String>> {
        let mut lines = vec![self.alloc_pd(0), self.create_cq(0, 128), self.alloc_pd(1)];
        lines.push(self.create_cq(2, 128));
        lines.push(self.register(0, 0, 0, ARENA, Access::ALL_REMOTE | Access::MW_BIND));
        lines.push(self.register(1, 0, 4100, 5000, Access::LOCAL_WRITE | Access::REMOTE_READ));
        lines.push(self.register(2, 1, 8000, 3000, Access::ALL_REMOTE));
        for (at, window_type) in [WindowType::One, WindowType::Two].into_iter().enumerate() {
            lines.push(self.alloc_mw(at, 0, window_type));
        }
        let Theme::Traffic(kind) = theme else {
            lines.push(self.create_srq(0, 0, 16, 2));
            if theme == Theme::Commands {
                for (at, kind) in [QpType::RC, QpType::UC, QpType::UD].into_iter().enumerate() {
                    lines.push(self.create_qp(at, 0, kind, [8, 8, 2, 2, 64], false));
                }
            }
            return Ok(lines);
        };
        let srq = self.random.one_in(3);
        if srq {
            lines.push(self.create_srq(0, 0, 16, 2));
        }
        for at in 0..2 {
            lines.push(self.create_qp(at, 0, kind, [8, 8, 2, 2, 64], srq && at == 1));
        }
        lines.push(self.connect(0, 1));
        if kind == QpType::UD {
            lines.push(self.create_ah(0, 0, self.path, "good"));
        }
        Ok(lines)
    }

    /// Makes a random step.
    pub(super) fn step(
        &mut self,
        theme: Theme,
        is_final: impl Fn(&str) -> Option<bool>,
    ) -> Verdict<String> {
        let text = match (theme, self.random.below(100)) {
            (Theme::Commands, _) => return self.some_command(),
            (Theme::Objects, 0..70) | (Theme::States, 0..15) | (Theme::Traffic(_), 0..7) => {
                self.some_object()
            }
            (Theme::Objects | Theme::States, _) | (Theme::Traffic(_), 7..10) => self.some_state(),
            (Theme::Traffic(_), 10..13) => self.some_connect(),
            (Theme::Traffic(_), _) if std::mem::take(&mut self.is_fresh) => self.some_receives()?,
            (Theme::Traffic(_), _) if self.is_broken() && !self.random.one_in(4) => {
                self.is_fresh = true;
                self.reconnect()
            }
            (Theme::Traffic(_), 13..45) => self.some_receives()?,
            (Theme::Traffic(_), _) => self.some_sends()?,
        };
        self.settle(text, is_final)
    }
}
