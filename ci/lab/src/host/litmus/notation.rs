//! A litmus test in herd's notation, with and without each barrier.

use crate::arch::Arch;
use anyhow::{Context, Result, bail};

/// The architecture that a test is written for, as herd spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notation {
    Aarch64,
    X86_64,
}

impl Notation {
    pub(super) const ALL: [Notation; 2] = [Notation::Aarch64, Notation::X86_64];

    /// As the first line of a test spells it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Notation::Aarch64 => "AArch64",
            Notation::X86_64 => "X86_64",
        }
    }

    /// The architecture.
    pub(super) fn arch(self) -> Arch {
        match self {
            Notation::Aarch64 => Arch::Aarch64,
            Notation::X86_64 => Arch::X86_64,
        }
    }

    /// As the folders spell it.
    pub(super) fn folder(self) -> &'static str {
        self.arch().label()
    }
}

/// A cell of the table of threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell {
    /// The instruction; empty if there is none.
    pub(super) instruction: String,
    /// The barrier that the comment behind it names.
    pub(super) names: Vec<String>,
}

impl Cell {
    fn parse(text: &str) -> Result<Cell> {
        let (instruction, comment) = match text.split_once("(*") {
            None => (text, ""),
            Some((instruction, rest)) => {
                let comment = rest.trim_end().strip_suffix("*)");
                (
                    instruction,
                    comment.with_context(|| format!("{text:?}: the comment is not last"))?,
                )
            }
        };
        let names = comment.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Cell {
            instruction: instruction.trim().to_owned(),
            names: names.map(str::to_owned).collect(),
        })
    }

    fn has(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// Whether it is a barrier, and no access.
    fn is_barrier(&self) -> bool {
        const BARRIERS: [&str; 5] = ["DMB ", "DSB ", "lfence", "sfence", "mfence"];
        BARRIERS.iter().any(|barrier| self.instruction.starts_with(barrier))
    }
}

/// The functions whose sequence a thread's column is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Code {
    pub(super) thread: usize,
    pub(super) functions: Vec<String>,
    /// Whether the column may end before the last function does.
    pub(super) is_open: bool,
}

/// The model's verdict on the test without some barriers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Without {
    pub(super) names: Vec<String>,
    pub(super) is_allowed: bool,
    /// Why barriers stay that the model can do without.
    pub(super) reason: String,
}

/// A test.
#[derive(Clone, Debug)]
pub(super) struct Test {
    pub(super) notation: Notation,
    pub(super) name: String,
    /// The verdict that must hold.
    pub(super) title: String,
    pub(super) codes: Vec<Code>,
    pub(super) withouts: Vec<Without>,
    /// The lines between the braces.
    initial: Vec<String>,
    threads: Vec<String>,
    rows: Vec<Vec<Cell>>,
    /// The outcome that must not happen.
    condition: String,
}

impl Test {
    pub(super) fn parse(text: &str) -> Result<Test> {
        let mut lines = text.lines();
        let mut next = || lines.next().context("the test ends too early");
        let (notation, name) = next()?.split_once(' ').context("the first line has no name")?;
        let notation = Notation::ALL.into_iter().find(|known| known.name() == notation);
        let title = next()?.trim_matches('"').to_owned();
        let mut test = Test {
            notation: notation.context("the first line names no architecture")?,
            name: name.to_owned(),
            title,
            codes: Vec::new(),
            withouts: Vec::new(),
            initial: Vec::new(),
            threads: Vec::new(),
            rows: Vec::new(),
            condition: String::new(),
        };
        loop {
            let line = next()?;
            if line == "{" {
                break;
            }
            let comment = line.strip_prefix("(* ").and_then(|line| line.strip_suffix(" *)"));
            match comment.and_then(|comment| comment.split_once(": ")) {
                Some(("Code", value)) => test.codes.push(code(value)?),
                Some(("Without", value)) => test.withouts.push(without(value)?),
                _ => bail!("{line:?} is neither Code nor Without"),
            }
        }
        loop {
            match next()? {
                "}" => break,
                line => test.initial.push(line.to_owned()),
            }
        }
        let cells = |line: &str| -> Option<Vec<String>> {
            let line = line.trim_end().strip_suffix(';')?;
            Some(line.split('|').map(|cell| cell.trim().to_owned()).collect())
        };
        test.threads = cells(next()?).context("no line of threads")?;
        loop {
            let line = next()?;
            let Some(row) = cells(line) else {
                let condition = line.strip_prefix("exists ");
                test.condition = condition.context("no `exists` below the threads")?.to_owned();
                break;
            };
            if row.len() != test.threads.len() {
                bail!("{line:?}: {} cells for {} threads", row.len(), test.threads.len());
            }
            test.rows.push(row.iter().map(|cell| Cell::parse(cell)).collect::<Result<_>>()?);
        }
        if lines.any(|line| !line.trim().is_empty()) {
            bail!("something follows the condition, which is one line");
        }
        Ok(test)
    }

    /// The instructions of a thread that it makes in the functions that are compared.
    pub(super) fn compared(&self, thread: usize) -> impl Iterator<Item = &str> {
        let elsewhere = |cell: &&Cell| {
            !cell.names.is_empty() && !cell.names.iter().any(|name| self.judges(name))
        };
        let column = self.rows.iter().filter_map(move |row| row.get(thread));
        column.filter(move |cell| !elsewhere(cell)).map(|cell| cell.instruction.as_str())
    }

    fn judges(&self, name: &str) -> bool {
        self.withouts.iter().any(|without| without.names.iter().any(|known| known == name))
    }

    /// The names of the barriers that are instructions, or nothing but comments.
    #[cfg(test)]
    pub(super) fn barriers(&self) -> Vec<String> {
        let cells = self.rows.iter().flatten();
        let named = cells.filter(|cell| cell.is_barrier() || cell.instruction.is_empty());
        named.flat_map(|cell| cell.names.clone()).collect()
    }

    /// The test as herd takes it, with a name and without some barriers.
    pub(super) fn text(&self, name: &str, without: &[String]) -> Result<String> {
        let mut rows = self.rows.clone();
        for barrier in without {
            let place = rows.iter().enumerate().find_map(|(row, cells)| {
                cells.iter().position(|cell| cell.has(barrier)).map(|thread| (row, thread))
            });
            let (row, thread) = place.with_context(|| format!("no comment names {barrier}"))?;
            take_out(&mut rows, row, thread, barrier)?;
        }
        let mut text = format!("{} {name}\n{{\n", self.notation.name());
        for line in self.initial.iter().chain([&"}".to_owned()]) {
            text += &format!("{line}\n");
        }
        text += &format!(" {} ;\n", self.threads.join(" | "));
        for row in &rows {
            let cells: Vec<&str> = row.iter().map(|cell| cell.instruction.as_str()).collect();
            text += &format!(" {} ;\n", cells.join(" | "));
        }
        Ok(text + &format!("exists {}\n", self.condition))
    }
}

/// Takes a barrier out of a table.
fn take_out(rows: &mut [Vec<Cell>], row: usize, thread: usize, barrier: &str) -> Result<()> {
    let cell = &mut rows[row][thread];
    if cell.is_barrier() {
        cell.instruction.clear();
        return Ok(());
    }
    if !cell.instruction.is_empty() {
        cell.instruction = weaker(&cell.instruction, barrier)?;
        return Ok(());
    }
    // The compiler may do this where nothing forbids it.
    let is_full = |rows: &[Vec<Cell>], row: &usize| !rows[*row][thread].instruction.is_empty();
    let before = (0..row).rev().find(|at| is_full(rows, at));
    let after = (row + 1..rows.len()).find(|at| is_full(rows, at));
    let (before, after) = before.zip(after).context("nothing around a barrier of the compiler")?;
    let cell = std::mem::take(&mut rows[before][thread]);
    rows[before][thread] = std::mem::replace(&mut rows[after][thread], cell);
    Ok(())
}

/// An ordered access of AArch64 without what `name` begins with: Acquire or Release.
fn weaker(instruction: &str, name: &str) -> Result<String> {
    let (mnemonic, operands) = instruction.split_once(' ').unwrap_or((instruction, ""));
    let (letter, plain) = match () {
        () if name.starts_with("Acquire") => ('A', [("LDAR", "LDR"), ("LDAPR", "LDR")]),
        () if name.starts_with("Release") => ('L', [("STLR", "STR"), ("STLLR", "STR")]),
        () => bail!("{name} of {instruction} begins with neither Acquire nor Release"),
    };
    for (ordered, plain) in plain {
        if let Some(width) = mnemonic.strip_prefix(ordered) {
            return Ok(format!("{plain}{width} {operands}"));
        }
    }
    for kind in ["SWP", "CAS"] {
        if let Some(rest) = mnemonic.strip_prefix(kind)
            && let Some(at) = rest.find(letter)
        {
            let rest = format!("{}{}", &rest[..at], &rest[at + 1..]);
            return Ok(format!("{kind}{rest} {operands}"));
        }
    }
    bail!("{instruction} has no {name}")
}

fn code(value: &str) -> Result<Code> {
    let (thread, functions) = value.split_once(' ').context("Code names no function")?;
    let thread = thread.strip_prefix('P').and_then(|number| number.parse().ok());
    let (functions, is_open) = match functions.strip_suffix("...") {
        Some(functions) => (functions, true),
        None => (functions, false),
    };
    Ok(Code {
        thread: thread.with_context(|| format!("{value}: Code names no thread"))?,
        functions: functions.split(',').map(|name| name.trim().to_owned()).collect(),
        is_open,
    })
}

fn without(value: &str) -> Result<Without> {
    let (names, verdict) = value.split_once(" => ").context("Without has no verdict")?;
    let (verdict, reason) = verdict.split_once(": ").unwrap_or((verdict, ""));
    let is_allowed = match verdict {
        "allowed" => true,
        "forbidden" => false,
        _ => bail!("{verdict} is neither allowed nor forbidden"),
    };
    let names = names.split(" + ").map(str::to_owned).collect();
    Ok(Without { names, is_allowed, reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "AArch64 t\n\"Something holds\"\n(* Code: P0 one, two... *)\n\
                        (* Without: b => allowed *)\n\
                        (* Without: Release in f + b => forbidden: because *)\n{\n0:X1=x;\n}\n\
                        P0 | P1 ;\n STR W0,[X1] | LDR W0,[X1] (* elsewhere *) ;\n\
                        DMB OSHST (* b *) | ;\n STLRB W0,[X2] (* Release in f *) | ;\n\
                        exists (1:X0=1)\n";

    #[test]
    fn a_test_is_read_with_its_settings() {
        let test = Test::parse(TEXT).unwrap();
        assert_eq!((test.notation, test.name.as_str()), (Notation::Aarch64, "t"));
        let functions = vec!["one".to_owned(), "two".into()];
        assert_eq!(test.codes, [Code { thread: 0, functions, is_open: true }]);
        assert!(test.withouts[0].is_allowed && !test.withouts[1].is_allowed);
        assert_eq!(test.withouts[1].reason, "because");
        let column: Vec<&str> = test.compared(0).collect();
        assert_eq!(column, ["STR W0,[X1]", "DMB OSHST", "STLRB W0,[X2]"]);
        assert_eq!(test.compared(1).filter(|cell| !cell.is_empty()).count(), 0);
        assert_eq!(test.barriers(), ["b"]);
    }

    #[test]
    fn a_barrier_is_taken_out_and_an_ordered_access_becomes_plain() {
        let test = Test::parse(TEXT).unwrap();
        let text = test.text("u", &["b".into(), "Release in f".into()]).unwrap();
        assert!(text.starts_with("AArch64 u\n{\n0:X1=x;\n}\n"), "{text}");
        assert!(!text.contains("DMB") && text.contains("STRB W0,[X2]"), "{text}");
        assert!(test.text("u", &["c".into()]).is_err());
        let weak = |instruction, name| weaker(instruction, name).unwrap();
        assert_eq!(weak("SWPALB W0,W1,[X2]", "Acquire in f"), "SWPLB W0,W1,[X2]");
        assert_eq!(weak("SWPALB W0,W1,[X2]", "Release in f"), "SWPAB W0,W1,[X2]");
        assert_eq!(weak("CASL X0,X1,[X2]", "Release"), "CAS X0,X1,[X2]");
        assert_eq!(weak("LDAR X0,[X2]", "Acquire"), "LDR X0,[X2]");
        assert!(weaker("LDR X0,[X2]", "Acquire").is_err());
    }

    #[test]
    fn without_a_barrier_of_the_compiler_accesses_change_places() {
        let text = "X86_64 t\n\"\"\n(* Without: b => allowed *)\n{\n}\n P0 ;\n movl $1,(x) ;\n (* b *) ;\n \
                    movl $1,(y) ;\nexists (0:rax=1)\n";
        let test = Test::parse(text).unwrap();
        let text = test.text("t", &["b".into()]).unwrap();
        assert!(text.find("(y)").unwrap() < text.find("(x)").unwrap(), "{text}");
    }

    #[test]
    fn mistakes_are_named() {
        let error = |from: &str, to: &str| Test::parse(&TEXT.replace(from, to)).unwrap_err();
        assert!(error("=> allowed", "=> maybe").to_string().contains("maybe"));
        assert!(error("Code: P0", "Cod: P0").to_string().contains("Cod"));
        assert!(error("DMB OSHST (* b *) |", "DMB OSHST").to_string().contains("1 cells"));
    }
}
