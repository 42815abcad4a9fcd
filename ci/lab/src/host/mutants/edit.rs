//! The text of a file with a mutant in it.

use super::{Mutant, Position};

/// The text of its file with a mutant; `None` if the mutant changes nothing, or if the text is shorter
/// than it says.
///
/// The text behind the change stays on its line: a function that moved names another line in its panics, so
/// rustc would compile all of them anew.
pub(super) fn mutated(mutant: &Mutant, text: &str) -> Option<String> {
    let (start, end) = (mutant.span.start, mutant.span.end);
    let (before, after) = (text.get(..offset(text, start)?)?, text.get(offset(text, end)?..)?);
    let kept = mutant.replacement.matches('\n').count();
    let missing = (end.line - start.line).saturating_sub(kept);
    let mutated = format!("{before}{}{}{after}", mutant.replacement, "\n".repeat(missing));
    (mutated != text).then_some(mutated)
}

/// Where a position is in a text, in bytes. Columns count characters.
fn offset(text: &str, position: Position) -> Option<usize> {
    let mut lines = text.split_inclusive('\n');
    let before: usize = lines.by_ref().take(position.line - 1).map(str::len).sum();
    let line = lines.next()?;
    let mut columns = line.char_indices().map(|(at, _)| at).chain([line.len()]);
    Some(before + columns.nth(position.column - 1)?)
}

#[cfg(test)]
mod tests {
    use super::super::Span;
    use super::*;

    const TEXT: &str = "fn f() -> u8 {\n    g(\"é\") | h()\n}\n\nfn g() {\n    a();\n    b();\n}\n";

    fn mutated_by(start: (usize, usize), end: (usize, usize), replacement: &str) -> Option<String> {
        let position = |(line, column)| Position { line, column };
        let span = Span { start: position(start), end: position(end) };
        let (name, file) = (String::new(), String::new());
        mutated(&Mutant { name, file, span, replacement: replacement.into() }, TEXT)
    }

    #[test]
    fn an_operator_is_replaced_where_characters_say() {
        let text = mutated_by((2, 12), (2, 13), "^").unwrap();
        assert_eq!(text, TEXT.replace('|', "^"));
    }

    #[test]
    fn a_body_is_replaced_and_what_follows_keeps_its_line() {
        let text = mutated_by((6, 5), (7, 9), "()").unwrap();
        assert_eq!(text, TEXT.replace("a();\n    b();", "()\n"));
        let text = mutated_by((6, 5), (7, 9), "x();\ny()").unwrap();
        assert_eq!(text, TEXT.replace("a();\n    b();", "x();\ny()"));
    }

    #[test]
    fn a_mutant_of_another_text_is_refused() {
        assert_eq!(mutated_by((2, 12), (2, 13), "|"), None, "it changes nothing");
        assert_eq!(mutated_by((20, 1), (20, 2), "x"), None, "there is no such line");
        assert_eq!(mutated_by((1, 90), (1, 91), "x"), None, "there is no such column");
    }
}
