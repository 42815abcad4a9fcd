use super::sample::{choose, is_test_file, test_lines};
use super::*;

fn mutant(name: &str) -> Mutant {
    let (file, rest) = name.split_once(':').unwrap();
    let line = rest.split(':').next().unwrap().parse().unwrap();
    let span = Span { start: Position { line, column: 1 }, end: Position { line, column: 2 } };
    Mutant { name: name.into(), file: file.into(), span, replacement: String::new() }
}

fn hundred() -> Vec<Mutant> {
    (1..=100).map(|n| mutant(&format!("src/a.rs:{n}:1: replace f with ()"))).collect()
}

fn names(seed: &str, mutants: Vec<Mutant>, count: usize) -> Vec<String> {
    let chosen = choose(&seed.parse().unwrap(), mutants, count);
    chosen.into_iter().map(|mutant| mutant.name).collect()
}

#[test]
fn a_seed_names_one_sample_whatever_the_order_of_the_list() {
    let sample = names("c0ffee", hundred(), 10);
    let mut backwards = hundred();
    backwards.reverse();
    assert_eq!(names("C0FFEE", backwards, 10), sample);
    assert_ne!(names("c0ffef", hundred(), 10), sample);
    // Written down, so that the samples of old notes can be drawn again.
    let lines = names("c0ffee", hundred(), 3);
    let lines: Vec<&str> = lines.iter().map(|name| name.split(':').nth(1).unwrap()).collect();
    assert_eq!(lines, ["34", "19", "21"]);
}

#[test]
fn a_larger_sample_begins_with_the_smaller_and_the_largest_has_all() {
    let (few, many) = (names("1", hundred(), 7), names("1", hundred(), 50));
    assert_eq!(few, many[..7]);
    let mut all = names("1", hundred(), 1000);
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 100);
}

#[test]
fn every_part_of_the_list_is_sampled() {
    let mut hits = [0; 4];
    for seed in 0..64 {
        for name in names(&format!("{seed:x}"), hundred(), 8) {
            let line: usize = name.split(':').nth(1).unwrap().parse().unwrap();
            hits[(line - 1) / 25] += 1;
        }
    }
    // 128 each, if chance were even.
    assert!(hits.iter().all(|hits| (96..=160).contains(hits)), "{hits:?}");
}

#[test]
fn only_hexadecimal_digits_are_a_seed() {
    for text in ["", "xyz", "12 ", &"a".repeat(65)] {
        assert!(text.parse::<Seed>().is_err(), "{text}");
    }
    assert_eq!("60C0CEF".parse::<Seed>().unwrap().to_string(), "60c0cef");
}

#[test]
fn tests_and_models_are_not_changed() {
    let text = "\
fn a() {
}
#[cfg(all(target_arch = \"x86_64\", not(miri)))]
fn b() {}
impl C {
    #[cfg(test)]
    #[inline]
    fn only_tests(
        self,
    ) {
        x
    }
    fn d() {}
    #[cfg(loom)]
    field: u8,
    other: u8,
}
#[cfg(test)]
use e;
#[cfg(all(test, loom))]
mod model {
    fn f() {}
}
fn g() {}
";
    let hidden = test_lines(text);
    let seen: Vec<&str> =
        text.lines().zip(hidden).filter(|(_, hidden)| !hidden).map(|(line, _)| line).collect();
    assert_eq!(
        seen.join("|"),
        "fn a() {|}|#[cfg(all(target_arch = \"x86_64\", not(miri)))]|fn b() {}|impl C {|    \
         fn d() {}|    other: u8,|}|fn g() {}"
    );
    assert!(["src/tests/a.rs", "src/a/tests.rs", "src/a/model.rs"].into_iter().all(is_test_file));
    assert!(!is_test_file("src/provider/mlx5/fake_device.rs"));
}

#[test]
fn an_accepted_mutant_is_known_by_its_file_its_change_and_its_line() {
    let table = "src/a.rs: replace | with ^ in f\n  at x | y\n  No bit is in both.\n\n\
                 src/b…: replace <impl Debug for …\n  What Debug prints is not promised.\n";
    let table = Accepted::parse(table).unwrap();
    let covered = |name, line| table.covers(&mutant(name), line);
    assert!(covered("src/a.rs:7:3: replace | with ^ in f", "x | y"));
    assert!(!covered("src/a.rs:7:3: replace | with ^ in f", "x | z"));
    assert!(!covered("src/a.rs:7:3: replace | with & in f", "x | y"));
    assert!(!covered("src/c.rs:7:3: replace | with ^ in f", "x | y"));
    assert!(covered("src/a.rs:7:3: replace | with ^ in f", "x »| y"));
    assert!(covered("src/b/c.rs:1:9: replace <impl Debug for C>::fmt -> R with Ok(())", "x"));

    let all = [mutant("src/a.rs:9:3: replace | with ^ in f"), mutant("src/b.rs:1:1: x")];
    let stale = table.stale(&all, |_| Ok("x | y".into())).unwrap();
    assert!(stale.is_empty(), "not all files of the second need be listed: {stale:?}");
    let stale = table.stale(&all, |_| Ok("x | z".into())).unwrap();
    assert_eq!(stale.len(), 1);
    assert!(stale[0].to_string().starts_with("src/a.rs: replace | with ^ in f"), "{stale:?}");
}

/// In milliseconds, and not when a run is over at last.
#[test]
fn every_accepted_line_is_still_in_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for entry in Accepted::of_tree().unwrap().entries {
        if entry.file.contains('…') {
            continue;
        }
        let text = fs::read_to_string(root.join(&entry.file)).expect(&entry.file);
        if let Some(line) = &entry.line {
            let line = accepted::unmarked(line);
            assert!(text.lines().any(|other| other.trim() == line), "{entry}");
        }
    }
}

#[test]
fn one_in_twenty_alive_fails_the_run() {
    let verdict = |caught, lived, unviable| {
        let mut fates = vec![Fate::Caught; caught];
        fates.extend(vec![Fate::Lived; lived]);
        fates.extend(vec![Fate::Unviable; unviable]);
        Verdict { fates }
    };
    assert!(!verdict(0, 0, 5).failed());
    assert!(!verdict(20, 1, 0).failed());
    assert!(verdict(19, 1, 0).failed());
    assert!(verdict(19, 1, 100).failed(), "what does not compile is not counted");
    let said = verdict(19, 1, 100).to_string();
    assert!(said.starts_with("120 mutants, 19 caught") && said.contains("1 LIVED"), "{said}");
}

#[test]
fn a_path_is_one_of_the_library_s() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let globs = |path: &str| scope(&root, &[path.into()]);
    assert_eq!(globs("src/qp/").unwrap(), ["src/qp/**"]);
    assert_eq!(globs("src/cq.rs").unwrap(), ["src/cq.rs"]);
    for path in ["ci/lab/src", "src/nothing", "/etc/passwd"] {
        assert!(globs(path).is_err(), "{path}");
    }
    assert_eq!(scope(&root, &[]).unwrap().len(), DATA_PATH.len(), "each of them exists");
}

#[test]
fn the_name_of_a_change_has_no_position() {
    let named = mutant("src/a.rs:41:9: replace f -> Result<a::B> with Ok(c: d)");
    assert_eq!(named.change(), "replace f -> Result<a::B> with Ok(c: d)");
}

#[test]
fn a_mark_tells_two_places_of_a_line_apart() {
    let table = "src/a.rs: replace | with ^ in f\n  at x »| y | z\n  No bit is in both.\n";
    let table = Accepted::parse(table).unwrap();
    let name = "src/a.rs:7:3: replace | with ^ in f";
    let covered = |column| table.covers(&mutant(name), &place::marked("    x | y | z", column));
    assert!(covered(7));
    assert!(!covered(11));
}
