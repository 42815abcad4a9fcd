//! Compares the declarations of this crate with those of a kernel.

use std::ops::Range;

use uverbs_uapi::drift::State;
use uverbs_uapi::layout::Layout;

use crate::kernel::{Member, Shape};

/// The name of a field as C has it.
fn c_name(field: &str) -> &str {
    field.strip_prefix("r#").unwrap_or(field)
}

/// Whether a field is there to make padding explicit; the kernel has no member for it.
fn is_padding(name: &str) -> bool {
    name.strip_prefix("padding").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
}

/// A layout's differences from a kernel's shape, each naming the struct, the field and the header.
///
/// `state` returns the state of an item in the kernel.
pub(crate) fn differences(
    layout: &Layout,
    shape: &Shape,
    state: impl Fn(&str) -> State,
) -> Vec<String> {
    let Layout { header, name, .. } = layout;
    let mut out = Vec::new();
    let mut taken = vec![false; shape.members.len()];
    let mut absent: Vec<Range<usize>> = Vec::new();
    let mut end_of_known = 0;

    for field in layout.fields {
        let range = 8 * field.offset..8 * (field.offset + field.size);
        let mut wanted = c_name(field.name);
        match state(&format!("{name}.{wanted}")) {
            State::Absent => {
                // Neighbours count as one: an older kernel may reserve them as one member.
                match absent.last_mut().filter(|last| last.end == range.start) {
                    Some(last) => last.end = range.end,
                    None => absent.push(range),
                }
                continue;
            }
            State::Named(old) => wanted = old,
            State::Present => {}
        }
        let found = shape.members.iter().position(|member| member.name == wanted);
        let Some(index) = found else {
            if is_padding(wanted) {
                // Checked below: no member of the kernel may lie in it.
                end_of_known = end_of_known.max(range.end);
            } else {
                out.push(format!("{header}: {name}.{wanted}: the kernel has no such member"));
            }
            continue;
        };
        taken[index] = true;
        end_of_known = end_of_known.max(range.end);
        let member = &shape.members[index];
        if (member.offset_bits, member.size_bits) != (range.start, range.len()) {
            out.push(format!(
                "{header}: {name}.{wanted}: {} here, {} in the kernel",
                place(range.start, range.len()),
                place(member.offset_bits, member.size_bits),
            ));
        }
    }

    for (member, _) in shape.members.iter().zip(&taken).filter(|(_, taken)| !**taken) {
        let within = |range: &Range<usize>| {
            range.start <= member.offset_bits && member.offset_bits + member.size_bits <= range.end
        };
        if member.size_bits == 0 || absent.iter().any(within) || other_arm(member, shape, &taken) {
            continue;
        }
        out.push(format!(
            "{header}: {name}.{}: {} in the kernel, not declared here",
            member.name,
            place(member.offset_bits, member.size_bits),
        ));
    }

    let size_fits = if absent.is_empty() {
        shape.size == layout.size
    } else {
        (end_of_known / 8..=layout.size).contains(&shape.size)
    };
    if !size_fits {
        out.push(format!(
            "{header}: {name}: {} bytes here, {} in the kernel",
            layout.size, shape.size
        ));
    }
    out
}

/// Whether a member is one arm of an anonymous union, and another arm is declared.
fn other_arm(member: &Member, shape: &Shape, taken: &[bool]) -> bool {
    member.union.is_some()
        && shape.members.iter().zip(taken).any(|(other, taken)| {
            *taken
                && other.union == member.union
                && other.offset_bits < member.offset_bits + member.size_bits
                && member.offset_bits < other.offset_bits + other.size_bits
        })
}

fn place(offset_bits: usize, size_bits: usize) -> String {
    if offset_bits % 8 == 0 && size_bits % 8 == 0 {
        format!("{} bytes at {}", size_bits / 8, offset_bits / 8)
    } else {
        format!("{size_bits} bits at bit {offset_bits}")
    }
}
