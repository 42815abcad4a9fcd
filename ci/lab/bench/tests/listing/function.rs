//! One function of a listing: its instructions, and where each of them leads. Pairs with what LLVM
//! prints for x86.

use std::collections::{BTreeMap, VecDeque};

/// The counts of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Length {
    /// All that lies in it.
    pub(crate) instructions: u32,
    pub(crate) calls: u32,
    pub(crate) locked: u32,
    /// Instructions of mlx5's usual way; see [`Function::usual`].
    pub(crate) usual: Option<u32>,
}

/// Kind of an instruction, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    /// Changes the order of bytes.
    Swap,
    /// A fence that keeps the stores to a register in order.
    Fence,
    Locked,
    Call,
    /// Leads to a label, and with `true` to nowhere else.
    Jump(String, bool),
    Return,
    /// Leads nowhere that is known: a table, another function, a trap.
    Away,
}

impl Kind {
    fn of(word: &str, operand: Option<&str>) -> Kind {
        let label = operand.filter(|operand| operand.starts_with(".L"));
        match (word, label) {
            ("jmp", Some(label)) => Kind::Jump(label.to_owned(), true),
            (word, Some(label)) if word.starts_with('j') => Kind::Jump(label.to_owned(), false),
            (word, None) if word.starts_with('j') => Kind::Away,
            _ if word.starts_with("call") => Kind::Call,
            _ if word.starts_with("ret") => Kind::Return,
            _ if word.starts_with("ud2") => Kind::Away,
            _ if word.starts_with("bswap") || word.starts_with("movbe") => Kind::Swap,
            _ if word == "lock" || word.starts_with("xchg") => Kind::Locked,
            ("sfence", _) => Kind::Fence,
            _ => Kind::Plain,
        }
    }
}

/// A function's instructions, in the order in which they lie there.
#[derive(Debug, Default)]
pub(crate) struct Function {
    instructions: Vec<Kind>,
    /// The place of the instruction behind each label.
    labels: BTreeMap<String, usize>,
}

impl Function {
    /// The functions of a listing whose names begin with `prefix`.
    pub(crate) fn all(listing: &str, prefix: &str) -> BTreeMap<String, Function> {
        let mut functions = BTreeMap::new();
        let mut current: Option<(String, Function)> = None;
        for line in listing.lines() {
            if let Some(name) = line.strip_suffix(':').filter(|name| name.starts_with(prefix)) {
                current = Some((name.to_owned(), Function::default()));
            } else if line.starts_with(".Lfunc_end") {
                functions.extend(current.take());
            } else if let Some((_, function)) = &mut current {
                function.read(line);
            }
        }
        functions
    }

    /// Takes a line: instructions are indented, directives begin with a dot, labels end with a colon.
    fn read(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let Some(word) = words.next() else { return };
        if !line.starts_with('\t') {
            if let Some(label) = word.strip_suffix(':') {
                self.labels.insert(label.to_owned(), self.instructions.len());
            }
        } else if !word.starts_with(['.', '#']) {
            self.instructions.push(Kind::of(word, words.next()));
        }
    }

    pub(crate) fn length(&self) -> Length {
        let count = |kind: Kind| self.places(&kind).count() as u32;
        Length {
            instructions: self.instructions.len() as u32,
            calls: count(Kind::Call),
            locked: count(Kind::Locked),
            usual: self.usual(),
        }
    }

    /// The fewest instructions once around the loop, or from the beginning to the end if there is no loop,
    /// by a way that calls nothing and on which bytes change their order: mlx5's devices read and write
    /// big-endian numbers, and rxe's queues have none. A rare way calls something, or is longer. A way to the end
    /// passes a fence if there is any, since a path that posts and does not ring has failed.
    fn usual(&self) -> Option<u32> {
        let swaps: Vec<usize> = self.places(&Kind::Swap).collect();
        let around = swaps.iter().filter_map(|&swap| self.reach(self.behind(swap))[swap]);
        if let Some(around) = around.min() {
            return Some(around);
        }
        let start = self.reach((!self.instructions.is_empty()).then_some(0));
        let fences: Vec<usize> = self.places(&Kind::Fence).collect();
        let ways = swaps.iter().filter_map(|&swap| {
            let rest = if fences.is_empty() {
                self.to_the_end(swap)?
            } else {
                let behind = self.reach(self.behind(swap));
                let by = |&fence: &usize| Some(behind[fence]? + self.to_the_end(fence)?);
                fences.iter().filter_map(by).min()?
            };
            Some(start[swap]? + rest)
        });
        ways.min()
    }

    /// The fewest instructions that follow one, to a return.
    fn to_the_end(&self, at: usize) -> Option<u32> {
        let behind = self.reach(self.behind(at));
        self.places(&Kind::Return).filter_map(|place| behind[place]).min()
    }

    /// How many instructions it takes at least to have done each, if one of `starts` is the first.
    fn reach(&self, starts: impl IntoIterator<Item = usize>) -> Vec<Option<u32>> {
        let mut done = vec![None; self.instructions.len()];
        let mut queue: VecDeque<(usize, u32)> = starts.into_iter().map(|at| (at, 1)).collect();
        while let Some((at, count)) = queue.pop_front() {
            if let Some(place @ None) = done.get_mut(at) {
                *place = Some(count);
                queue.extend(self.behind(at).into_iter().map(|next| (next, count + 1)));
            }
        }
        done
    }

    /// The instructions that may come directly behind one.
    fn behind(&self, at: usize) -> Vec<usize> {
        match &self.instructions[at] {
            Kind::Call | Kind::Return | Kind::Away => Vec::new(),
            Kind::Jump(label, always) => {
                let there = self.labels.get(label).copied();
                there.into_iter().chain((!always).then_some(at + 1)).collect()
            }
            Kind::Plain | Kind::Swap | Kind::Fence | Kind::Locked => vec![at + 1],
        }
    }

    fn places(&self, kind: &Kind) -> impl Iterator<Item = usize> {
        let places = self.instructions.iter().enumerate();
        places.filter(move |(_, other)| *other == kind).map(|(place, _)| place)
    }
}
