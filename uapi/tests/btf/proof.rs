//! Proof that the comparison finds each kind of difference. Needs no kernel.

use std::collections::BTreeSet;

use libtest_mimic::{Failed, Trial};
use uverbs_uapi::drift::{self, State};
use uverbs_uapi::layout::{Field, Layout};
use uverbs_uapi::reflection::{enumerations, layouts};

use crate::comparison::differences;
use crate::expectation::{PINNED, RENAMED, UNKNOWN};
use crate::kernel::{Member, Shape};

const FIELDS: &[Field] = &[
    Field { name: "mr_handle", offset: 0, size: 4 },
    Field { name: "lkey", offset: 4, size: 4 },
    Field { name: "r#type", offset: 8, size: 1 },
    Field { name: "padding", offset: 9, size: 7 },
];

const SWAPPED: &[Field] = &[
    Field { name: "lkey", offset: 0, size: 4 },
    Field { name: "mr_handle", offset: 4, size: 4 },
    Field { name: "r#type", offset: 8, size: 1 },
    Field { name: "padding", offset: 9, size: 7 },
];

fn layout(fields: &'static [Field]) -> Layout {
    Layout { header: "rdma/example.h", name: "example", kernel: "example", size: 16, fields }
}

fn member(name: &str, offset: usize, size: usize, union: Option<usize>) -> Member {
    Member { name: name.to_owned(), offset_bits: 8 * offset, size_bits: 8 * size, union }
}

fn shape() -> Shape {
    let members = vec![
        member("mr_handle", 0, 4, None),
        member("lkey", 4, 4, None),
        member("type", 8, 1, None),
    ];
    Shape { size: 16, members }
}

fn present(_: &str) -> State {
    State::Present
}

/// Fails unless exactly these differences were found.
fn expect(found: Vec<String>, wanted: &[&str]) -> Result<(), Failed> {
    if found == wanted { Ok(()) } else { Err(format!("found {found:#?}, not {wanted:#?}").into()) }
}

fn same() -> Result<(), Failed> {
    expect(differences(&layout(FIELDS), &shape(), present), &[])
}

fn swapped() -> Result<(), Failed> {
    expect(
        differences(&layout(SWAPPED), &shape(), present),
        &[
            "rdma/example.h: example.lkey: 4 bytes at 0 here, 4 bytes at 4 in the kernel",
            "rdma/example.h: example.mr_handle: 4 bytes at 4 here, 4 bytes at 0 in the kernel",
        ],
    )
}

fn renamed() -> Result<(), Failed> {
    let mut shape = shape();
    shape.members[1].name = "rkey".to_owned();
    expect(
        differences(&layout(FIELDS), &shape, present),
        &[
            "rdma/example.h: example.lkey: the kernel has no such member",
            "rdma/example.h: example.rkey: 4 bytes at 4 in the kernel, not declared here",
        ],
    )
}

fn grown() -> Result<(), Failed> {
    let mut shape = shape();
    shape.size = 24;
    shape.members.push(member("flags", 16, 8, None));
    expect(
        differences(&layout(FIELDS), &shape, present),
        &[
            "rdma/example.h: example.flags: 8 bytes at 16 in the kernel, not declared here",
            "rdma/example.h: example: 16 bytes here, 24 in the kernel",
        ],
    )
}

fn padding_in_use() -> Result<(), Failed> {
    let mut shape = shape();
    shape.members.push(member("flags", 12, 4, None));
    expect(
        differences(&layout(FIELDS), &shape, present),
        &["rdma/example.h: example.flags: 4 bytes at 12 in the kernel, not declared here"],
    )
}

fn other_arm() -> Result<(), Failed> {
    let mut shape = shape();
    shape.members[1].union = Some(1);
    shape.members.push(member("rkey", 4, 4, Some(1)));
    expect(differences(&layout(FIELDS), &shape, present), &[])?;
    // The same bytes are no arm in another union, nor without one.
    for unions in [(Some(1), Some(2)), (Some(1), None), (None, None)] {
        (shape.members[1].union, shape.members[3].union) = unions;
        expect(
            differences(&layout(FIELDS), &shape, present),
            &["rdma/example.h: example.rkey: 4 bytes at 4 in the kernel, not declared here"],
        )?;
    }
    Ok(())
}

fn absent_field() -> Result<(), Failed> {
    let mut shape = shape();
    shape.members[2] = member("reserved", 8, 1, None);
    let before = |item: &str| match item {
        "example.type" => State::Absent,
        _ => State::Present,
    };
    expect(differences(&layout(FIELDS), &shape, before), &[])?;
    let named = |item: &str| match item {
        "example.type" => State::Named("reserved"),
        _ => State::Present,
    };
    expect(differences(&layout(FIELDS), &shape, named), &[])
}

/// Every entry of the tables must exist: a misspelt one would excuse nothing and stay unnoticed.
fn tables() -> Result<(), Failed> {
    let mut items = BTreeSet::new();
    for layout in layouts() {
        items.insert(layout.name.to_owned());
        items.extend(layout.fields.iter().map(|field| format!("{}.{}", layout.name, field.name)));
    }
    for enumeration in enumerations() {
        items.extend(enumeration.enumerators.iter().map(|e| e.name.to_owned()));
    }
    let changes = drift::CHANGES.iter().flat_map(|change| change.items).copied();
    let renames = drift::RENAMES.iter().flat_map(|rename| rename.names).map(|(new, _)| *new);
    let unknown = UNKNOWN.iter().flat_map(|unknown| unknown.items).copied();
    let missing: Vec<_> =
        changes.chain(renames).chain(unknown).filter(|item| !items.contains(*item)).collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(format!("listed, but not declared: {missing:?}").into())
    }
}

/// A newer kernel than the tables' newest is excused where it differs, so no table may name one.
fn newest() -> Result<(), Failed> {
    let counted = PINNED.iter().map(|pinned| pinned.series).max();
    let renamed = RENAMED.iter().map(|(since, ..)| *since);
    let changes = drift::CHANGES.iter().map(|change| change.present_in);
    let named = drift::RENAMES.iter().map(|rename| rename.new_in);
    let known = renamed.chain(changes).chain(named).max();
    let newest = drift::NEWEST;
    match (counted, known) {
        (Some(counted), Some(known)) if counted == newest && known <= newest => Ok(()),
        other => Err(format!("counted and known: {other:?}, and compared with {newest:?}").into()),
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("the same layout has no differences", same),
        Trial::test("two swapped fields are named with struct and header", swapped),
        Trial::test("a renamed field is found from both sides", renamed),
        Trial::test("a struct that grew is found", grown),
        Trial::test("a member in the padding of a declared struct is found", padding_in_use),
        Trial::test("one declared arm of an anonymous union covers the others", other_arm),
        Trial::test("a field that came later may be reserved before", absent_field),
        Trial::test("the tables list only declared items", tables),
        Trial::test("the newest kernel is the one that the tables were made for", newest),
    ]
}
