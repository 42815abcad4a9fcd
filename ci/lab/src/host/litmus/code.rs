//! Assembly, as far as it loads, stores and orders, and the paths through a function.

use super::notation::Notation;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Load,
    Store,
    Swap,
    CompareAndSwap,
    /// Another operation that loads and stores at once.
    Update,
}

/// One thing that an instruction does, as another processor may see it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// A barrier, in lower case.
    Barrier(String),
    Access {
        kind: Kind,
        acquire: bool,
        release: bool,
        bytes: u32,
    },
}

impl Step {
    fn plain(kind: Kind, bytes: u32) -> Step {
        Step::Access { kind, acquire: false, release: false, bytes }
    }

    /// Whether it orders others.
    pub(super) fn orders(&self) -> bool {
        match self {
            Step::Barrier(_) => true,
            Step::Access { acquire, release, .. } => *acquire || *release,
        }
    }

    /// Whether a step of compiled code is this one of a test. A test moves eight bytes where the code may move the
    /// sixteen that they are part of.
    fn is(&self, compiled: &Step) -> bool {
        let wide = |kind| *self == Step::plain(kind, 8) && *compiled == Step::plain(kind, 16);
        self == compiled || wide(Kind::Load) || wide(Kind::Store)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Barrier(name) => to.write_str(name),
            Step::Access { kind, acquire, release, bytes } => {
                let kind = match kind {
                    Kind::Load => "load",
                    Kind::Store => "store",
                    Kind::Swap => "swap",
                    Kind::CompareAndSwap => "compare and swap",
                    Kind::Update => "update",
                };
                write!(to, "{kind} {bytes}")?;
                to.write_str(if *acquire { " acquire" } else { "" })?;
                to.write_str(if *release { " release" } else { "" })
            }
        }
    }
}

/// Steps in a line of text.
pub(super) fn list(steps: &[Step]) -> String {
    steps.iter().map(Step::to_string).collect::<Vec<_>>().join(", ")
}

/// Effect of an instruction; `None` if another processor sees nothing of it.
pub(super) fn step(notation: Notation, instruction: &str) -> Option<Step> {
    let text = instruction.to_lowercase();
    let text = text.trim();
    match notation {
        Notation::Aarch64 => aarch64(text),
        Notation::X86_64 => x86_64(text),
    }
}

fn words(text: &str) -> (&str, &str) {
    let (mnemonic, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (mnemonic, operands.trim())
}

fn aarch64(text: &str) -> Option<Step> {
    let (mnemonic, operands) = words(text);
    if matches!(mnemonic, "dmb" | "dsb" | "isb") {
        return Some(Step::Barrier(format!("{mnemonic} {operands}").trim().to_owned()));
    }
    if mnemonic == "bl" {
        return outlined(operands);
    }
    // The stack is this thread's alone.
    if !operands.contains('[') || operands.contains("[sp") {
        return None;
    }
    let register = match operands.chars().next()? {
        'q' => 16,
        'x' | 'd' => 8,
        'w' | 's' => 4,
        'h' => 2,
        'b' => 1,
        _ => return None,
    };
    for (name, kind) in [("ldp", Kind::Load), ("stp", Kind::Store)] {
        if mnemonic == name {
            return Some(Step::plain(kind, 2 * register));
        }
    }
    let bytes = |rest: &str| match rest {
        "" => Some(register),
        "b" | "sb" => Some(1),
        "h" | "sh" => Some(2),
        "sw" => Some(4),
        _ => None,
    };
    const ACCESSES: [(&str, Kind, bool, bool); 7] = [
        ("ldar", Kind::Load, true, false),
        ("ldapr", Kind::Load, true, false),
        ("stlr", Kind::Store, false, true),
        ("ldr", Kind::Load, false, false),
        ("ldur", Kind::Load, false, false),
        ("str", Kind::Store, false, false),
        ("stur", Kind::Store, false, false),
    ];
    for (name, kind, acquire, release) in ACCESSES {
        if let Some(bytes) = mnemonic.strip_prefix(name).and_then(bytes) {
            return Some(Step::Access { kind, acquire, release, bytes });
        }
    }
    for (name, kind) in [("swp", Kind::Swap), ("cas", Kind::CompareAndSwap)] {
        let Some(rest) = mnemonic.strip_prefix(name) else { continue };
        let (acquire, rest) = rest.strip_prefix('a').map_or((false, rest), |rest| (true, rest));
        let (release, rest) = rest.strip_prefix('l').map_or((false, rest), |rest| (true, rest));
        return Some(Step::Access { kind, acquire, release, bytes: bytes(rest)? });
    }
    None
}

/// The atomic operations that a program for any AArch64 calls, because the oldest have no instruction for each.
fn outlined(function: &str) -> Option<Step> {
    let rest = function.strip_prefix("__aarch64_")?;
    let digit = rest.find(|letter: char| letter.is_ascii_digit())?;
    let (name, rest) = rest.split_at(digit);
    let (bytes, order) = rest.split_once('_')?;
    let kind = match name {
        "swp" => Kind::Swap,
        "cas" => Kind::CompareAndSwap,
        _ => Kind::Update,
    };
    let acquire = matches!(order, "acq" | "acq_rel" | "sync");
    let release = matches!(order, "rel" | "acq_rel" | "sync");
    Some(Step::Access { kind, acquire, release, bytes: bytes.parse().ok()? })
}

fn x86_64(text: &str) -> Option<Step> {
    let (mut mnemonic, mut operands) = words(text);
    if matches!(mnemonic, "lfence" | "sfence" | "mfence") {
        return Some(Step::Barrier(mnemonic.to_owned()));
    }
    let locked = mnemonic == "lock";
    if locked {
        (mnemonic, operands) = words(operands);
    }
    let is_control = mnemonic.starts_with('j') || mnemonic.starts_with("call");
    let is_address = mnemonic.starts_with("lea") || mnemonic.starts_with("nop");
    // The stack is this thread's alone.
    if !operands.contains('(') || operands.contains("(%rsp") || is_control || is_address {
        return None;
    }
    let bytes = match mnemonic {
        _ if mnemonic.starts_with("movzb") || mnemonic.starts_with("movsb") => 1,
        _ if mnemonic.starts_with("movzw") || mnemonic.starts_with("movsw") => 2,
        "movslq" => 4,
        "movups" | "movaps" | "movdqu" | "movdqa" | "movupd" | "movapd" => 16,
        _ => match mnemonic.chars().last()? {
            'q' => 8,
            'l' => 4,
            'w' => 2,
            'b' => 1,
            _ => return None,
        },
    };
    // An instruction that loads and stores at once is all of a barrier here.
    let whole = |kind| Some(Step::Access { kind, acquire: true, release: true, bytes });
    if mnemonic.starts_with("xchg") {
        return whole(Kind::Swap);
    }
    if locked {
        let exchanges = mnemonic.starts_with("cmpxchg");
        return whole(if exchanges { Kind::CompareAndSwap } else { Kind::Update });
    }
    let only_loads = mnemonic.starts_with("cmp") || mnemonic.starts_with("test");
    let stores = operands.trim_end().ends_with(')') && !only_loads;
    Some(Step::plain(if stores { Kind::Store } else { Kind::Load }, bytes))
}

/// Where an instruction goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    Jump(String),
    Branch(String),
    /// It returns, or another function does.
    Return,
    /// It does not go on.
    Never,
}

fn flow(notation: Notation, text: &str) -> Flow {
    let (mnemonic, operands) = words(text);
    let target = operands.rsplit(',').next().unwrap_or_default().trim().to_owned();
    let is_label = target.starts_with(".L");
    match (notation, mnemonic) {
        (Notation::Aarch64, "ret") | (Notation::X86_64, "ret" | "retq") => Flow::Return,
        (Notation::Aarch64, "brk" | "udf") | (Notation::X86_64, "ud2") => Flow::Never,
        (Notation::Aarch64, "b" | "br") | (Notation::X86_64, "jmp" | "jmpq") => {
            if is_label {
                Flow::Jump(target)
            } else {
                Flow::Return
            }
        }
        (Notation::Aarch64, "cbz" | "cbnz" | "tbz" | "tbnz") => Flow::Branch(target),
        (Notation::Aarch64, _) if mnemonic.starts_with("b.") => Flow::Branch(target),
        (Notation::X86_64, _) if mnemonic.starts_with('j') => Flow::Branch(target),
        _ => Flow::Next,
    }
}

/// A function as compiled.
#[derive(Debug, Default)]
pub(super) struct Function {
    instructions: Vec<(Option<Step>, Flow)>,
    labels: BTreeMap<String, usize>,
}

impl Function {
    /// The function `name` of the module `litmus`.
    pub(super) fn find(notation: Notation, assembly: &str, name: &str) -> Result<Function> {
        let mangled = format!("6litmus{}{name}", name.len());
        let mut lines = assembly.lines();
        let is_it = |line: &str| line.ends_with(':') && line.contains(&mangled);
        if !lines.any(|line| is_it(line) && !line.starts_with(['.', ' ', '\t'])) {
            bail!("the assembly has no function {name}");
        }
        let mut function = Function::default();
        for line in lines {
            let comment = if notation == Notation::X86_64 { "#" } else { "//" };
            let line = line.split(comment).next().unwrap_or_default().trim();
            if line.starts_with(".Lfunc_end") {
                return Ok(function);
            }
            if let Some(label) = line.strip_suffix(':') {
                function.labels.insert(label.to_owned(), function.instructions.len());
            } else if !line.is_empty() && !line.starts_with('.') {
                let flow = flow(notation, line);
                if line.starts_with("br\t") || line.starts_with("jmpq\t*%") {
                    bail!("{name} jumps by a table, which the comparison does not follow");
                }
                function.instructions.push((step(notation, line), flow));
            }
        }
        bail!("the assembly of {name} has no end")
    }

    /// Where an instruction may go on: at one of these, and whether it may return.
    fn after(&self, at: usize, flow: &Flow) -> Result<(Vec<usize>, bool)> {
        let label = |name: &String| {
            self.labels.get(name).copied().with_context(|| format!("a jump to {name}"))
        };
        Ok(match flow {
            Flow::Next => (vec![at + 1], false),
            Flow::Jump(name) => (vec![label(name)?], false),
            Flow::Branch(name) => (vec![at + 1, label(name)?], false),
            Flow::Return => (Vec::new(), true),
            Flow::Never => (Vec::new(), false),
        })
    }

    /// Follows all paths. Each goes through `wanted` from one of `from` on: ordering instructions must be the same, one
    /// for one, and there may be more plain loads and stores. Returns how far paths have come at the function's end.
    pub(super) fn follow(
        &self,
        wanted: &[Step],
        from: &BTreeSet<usize>,
        is_open: bool,
    ) -> Result<BTreeSet<usize>> {
        let mut ends = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut open: Vec<(usize, usize)> = from.iter().map(|position| (0, *position)).collect();
        while let Some((at, mut position)) = open.pop() {
            if !seen.insert((at, position)) {
                continue;
            }
            let Some((step, flow)) = self.instructions.get(at) else { continue };
            if let Some(step) = step {
                let fits = wanted.get(position).is_some_and(|wanted| wanted.is(step));
                if fits {
                    position += 1;
                } else if step.orders() {
                    continue;
                }
            }
            if is_open && position == wanted.len() {
                ends.insert(position);
                continue;
            }
            let (next, returns) = self.after(at, flow)?;
            open.extend(next.into_iter().map(|at| (at, position)));
            if returns {
                ends.insert(position);
            }
        }
        Ok(ends)
    }

    /// The ordering instructions on each path that passes no instruction twice.
    pub(super) fn orders(&self) -> Result<BTreeSet<Vec<Step>>> {
        let mut known = BTreeMap::new();
        self.orders_from(0, &mut known)
    }

    fn orders_from(
        &self,
        at: usize,
        known: &mut BTreeMap<usize, Option<BTreeSet<Vec<Step>>>>,
    ) -> Result<BTreeSet<Vec<Step>>> {
        match known.get(&at) {
            Some(Some(orders)) => return Ok(orders.clone()),
            // A loop: the path that leaves it is another.
            Some(None) => return Ok(BTreeSet::new()),
            None => {}
        }
        known.insert(at, None);
        let mut orders = BTreeSet::new();
        if let Some((step, flow)) = self.instructions.get(at) {
            let (next, returns) = self.after(at, flow)?;
            for next in next {
                orders.extend(self.orders_from(next, known)?);
            }
            if returns {
                orders.insert(Vec::new());
            }
            if let Some(step) = step.as_ref().filter(|step| step.orders()) {
                let before = |mut rest: Vec<Step>| {
                    rest.insert(0, step.clone());
                    rest
                };
                orders = orders.into_iter().map(before).collect();
            }
        }
        known.insert(at, Some(orders.clone()));
        Ok(orders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_read_as_compilers_and_tests_write_them() {
        let arm = |text: &str| step(Notation::Aarch64, text).map(|step| step.to_string());
        for (text, found) in [
            ("dmb\toshst", Some("dmb oshst")),
            ("DSB ST", Some("dsb st")),
            ("ldrb\tw8, [x0, #63]", Some("load 1")),
            ("LDR X4,[X0]", Some("load 8")),
            ("stp\tx8, x9, [x10]", Some("store 16")),
            ("stp\tx29, x30, [sp, #-16]!", None),
            ("ldar\tw8, [x9]", Some("load 4 acquire")),
            ("STLRB WZR,[X0]", Some("store 1 release")),
            ("SWPALB W3,W4,[X1]", Some("swap 1 acquire release")),
            ("CASL X5,X9,[X0]", Some("compare and swap 8 release")),
            ("bl\t__aarch64_cas8_rel", Some("compare and swap 8 release")),
            ("bl\t__aarch64_swp1_acq_rel", Some("swap 1 acquire release")),
            ("bl\t__aarch64_ldadd8_relax", Some("update 8")),
            ("bl\tmalloc", None),
            ("mov\tw8, #1", None),
        ] {
            assert_eq!(arm(text).as_deref(), found, "{text}");
        }
        let x86 = |text: &str| step(Notation::X86_64, text).map(|step| step.to_string());
        for (text, found) in [
            ("sfence", Some("sfence")),
            ("movzbl\t(%rdi), %eax", Some("load 1")),
            ("movl\t%eax, 8(%rdi,%rcx,4)", Some("store 4")),
            ("movl $1,(dbrec)", Some("store 4")),
            ("movq (uar),%rax", Some("load 8")),
            ("movups\t%xmm0, (%rax)", Some("store 16")),
            ("movq\t%rax, 8(%rsp)", None),
            ("lock\t\tcmpxchgq\t%rsi, (%rdi)", Some("compare and swap 8 acquire release")),
            ("xchgb\t%al, (%rdi)", Some("swap 1 acquire release")),
            ("cmpb\t$0, 12(%rdi)", Some("load 1")),
            ("leaq\t8(%rdi), %rax", None),
            ("jmpq\t*(%rax)", None),
        ] {
            assert_eq!(x86(text).as_deref(), found, "{text}");
        }
    }

    const ASSEMBLY: &str = "_ZN6uverbs6litmus3arm17h0E:\n\t.cfi_startproc\n\tcbz\tx0, .LBB0_2\n\t\
                            str\tw8, [x1]\n\t//APP\n\tdmb\toshst\n\t//NO_APP\n\tstr\tw8, [x2]\n.LBB0_1:\n\t\
                            ldrb\tw8, [x3]\n\tcbnz\tw8, .LBB0_1\n\tret\n.LBB0_2:\n\tbrk\t#0x1\n.Lfunc_end0:\n";

    fn follow(assembly: &str, wanted: &[&str], is_open: bool) -> bool {
        let function = Function::find(Notation::Aarch64, assembly, "arm").unwrap();
        let wanted: Vec<Step> =
            wanted.iter().filter_map(|text| step(Notation::Aarch64, text)).collect();
        let ends = function.follow(&wanted, &BTreeSet::from([0]), is_open).unwrap();
        ends.contains(&wanted.len())
    }

    #[test]
    fn a_path_has_the_barriers_of_the_test_and_no_others() {
        let whole = ["str w0,[x1]", "dmb oshst", "str w0,[x2]"];
        assert!(follow(ASSEMBLY, &whole, false));
        assert!(follow(ASSEMBLY, &whole[1..], false), "the code may store more");
        assert!(!follow(ASSEMBLY, &["str w0,[x1]", "str w0,[x2]"], false), "a barrier more");
        assert!(!follow(ASSEMBLY, &["dmb oshst", "str x0,[x2]"], false), "another width");
        let moved = ASSEMBLY.replace("str\tw8, [x2]", "nop");
        assert!(!follow(&moved, &whole, false), "nothing behind the barrier");
        assert!(follow(ASSEMBLY, &whole[..1], true));
        assert!(!follow(ASSEMBLY, &whole[..1], false), "the barrier follows");
    }

    #[test]
    fn all_paths_are_listed_by_what_orders() {
        let function = Function::find(Notation::Aarch64, ASSEMBLY, "arm").unwrap();
        let orders: Vec<String> =
            function.orders().unwrap().iter().map(|path| list(path)).collect();
        assert_eq!(orders, ["dmb oshst"]);
        let returns = ASSEMBLY.replace("brk\t#0x1", "ret");
        let function = Function::find(Notation::Aarch64, &returns, "arm").unwrap();
        assert_eq!(function.orders().unwrap().len(), 2);
        assert!(Function::find(Notation::Aarch64, ASSEMBLY, "poll").is_err());
    }
}
