//! The structs and enums in a kernel's BTF.
//!
//! BTF comes as one file for the kernel image and one per module, which continues the numbering of
//! the first. A running kernel shows them in `/sys/kernel/btf`.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

use btf_rs::{Btf, BtfType, Type};

/// The modules that hold the ABI.
pub(crate) const MODULES: [&str; 8] = [
    "ib_core",
    "ib_uverbs",
    "mlx5_core",
    "mlx5_ib",
    "mlx5_vdpa",
    "rdma_cm",
    "rdma_rxe",
    "rdma_ucm",
];

/// A member of a struct as the kernel has it, with those of anonymous structs and unions in it
/// lifted to its level.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) offset_bits: usize,
    pub(crate) size_bits: usize,
    /// The outermost anonymous union that the member was lifted from, numbered within the struct.
    pub(crate) union: Option<usize>,
}

/// A struct or union as the kernel has it.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) size: usize,
    pub(crate) members: Vec<Member>,
}

/// An enumerator as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    /// The enum it belongs to; empty for an anonymous one.
    pub(crate) of: String,
    pub(crate) value: u64,
}

/// The type information of one kernel.
pub(crate) struct Kernel {
    pub(crate) release: String,
    base: Btf,
    modules: Vec<(&'static str, Btf)>,
    module_numbers: HashMap<String, Vec<Number>>,
    base_numbers: OnceLock<Result<HashMap<String, Vec<Number>>, String>>,
}

impl Kernel {
    /// Reads a directory that has a file `vmlinux` and one for each module.
    pub(crate) fn load(release: &str, dir: &Path) -> Result<Self, String> {
        let fault = |file: &str, e: btf_rs::Error| format!("{}: {e}", dir.join(file).display());
        let base = Btf::from_file(dir.join("vmlinux")).map_err(|e| fault("vmlinux", e))?;
        let mut modules = Vec::new();
        for module in MODULES {
            let path = dir.join(module);
            if path.exists() {
                let btf = Btf::from_split_file(path, &base).map_err(|e| fault(module, e))?;
                modules.push((module, btf));
            }
        }
        let first = (1..).find(|&id| base.resolve_type_by_id(id).is_err()).unwrap_or(1);
        let mut module_numbers = HashMap::new();
        for (_, btf) in &modules {
            collect_numbers(btf, first, &mut module_numbers)?;
        }
        Ok(Self {
            release: release.to_owned(),
            base,
            modules,
            module_numbers,
            base_numbers: OnceLock::new(),
        })
    }

    /// Major and minor version.
    pub(crate) fn version(&self) -> (u32, u32) {
        let mut parts = self.release.split(|c: char| !c.is_ascii_digit());
        let mut next = || parts.next().and_then(|part| part.parse().ok()).unwrap_or(0);
        (next(), next())
    }

    /// Whether the type information of a module is there.
    pub(crate) fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|(module, _)| *module == name)
    }

    /// Every shape that `path` has: a struct's name, followed by the members to step through.
    ///
    /// Modules are built apart, so one struct can be described several times.
    pub(crate) fn shapes(&self, path: &str) -> Result<Vec<Shape>, String> {
        let mut shapes = Vec::new();
        if self.modules.is_empty() {
            shapes_in(&self.base, path, &mut shapes)?;
        }
        for (_, btf) in &self.modules {
            shapes_in(btf, path, &mut shapes)?;
        }
        Ok(shapes)
    }

    /// Every enumerator of this name.
    pub(crate) fn numbers(&self, name: &str) -> Result<&[Number], String> {
        if let Some(found) = self.module_numbers.get(name) {
            return Ok(found);
        }
        Ok(self.base_numbers()?.get(name).map_or(&[], Vec::as_slice))
    }

    /// The names of the enumerators of an enum.
    pub(crate) fn enumerators_of(&self, name: &str) -> Result<Vec<&str>, String> {
        let found = members(&self.module_numbers, name);
        if found.is_empty() { Ok(members(self.base_numbers()?, name)) } else { Ok(found) }
    }

    /// Reads the image only if the modules do not suffice: it is large.
    fn base_numbers(&self) -> Result<&HashMap<String, Vec<Number>>, String> {
        let numbers = self.base_numbers.get_or_init(|| {
            let mut numbers = HashMap::new();
            collect_numbers(&self.base, 1, &mut numbers)?;
            Ok(numbers)
        });
        numbers.as_ref().map_err(Clone::clone)
    }
}

/// The names of the enumerators of the enum `of`.
fn members<'a>(numbers: &'a HashMap<String, Vec<Number>>, of: &str) -> Vec<&'a str> {
    let belongs = |numbers: &[Number]| numbers.iter().any(|number| number.of == of);
    numbers.iter().filter(|(_, numbers)| belongs(numbers)).map(|(name, _)| &**name).collect()
}

fn name_of(btf: &Btf, of: &dyn BtfType) -> Result<String, String> {
    match of.get_name_offset() {
        None | Some(0) => Ok(String::new()),
        Some(_) => btf.resolve_name(of).map_err(|e| e.to_string()),
    }
}

/// Adds the enumerators of all types from the id `first` on.
fn collect_numbers(
    btf: &Btf,
    first: u32,
    into: &mut HashMap<String, Vec<Number>>,
) -> Result<(), String> {
    let mut add = |of: &dyn BtfType, member: &dyn BtfType, value| {
        let number = Number { of: name_of(btf, of)?, value };
        let known = into.entry(name_of(btf, member)?).or_default();
        if !known.contains(&number) {
            known.push(number);
        }
        Ok::<(), String>(())
    };
    for id in first.. {
        match btf.resolve_type_by_id(id) {
            Ok(Type::Enum(e)) => {
                for member in &e.members {
                    add(&e, member, member.val().into())?;
                }
            }
            Ok(Type::Enum64(e)) => {
                for member in &e.members {
                    add(&e, member, member.val())?;
                }
            }
            Ok(_) => {}
            Err(_) => break,
        }
    }
    Ok(())
}

fn shapes_in(btf: &Btf, path: &str, into: &mut Vec<Shape>) -> Result<(), String> {
    let mut steps = path.split('.');
    let name = steps.next().unwrap_or_default();
    // A name that a module does not have is an error of the lookup, not of the comparison.
    for found in btf.resolve_types_by_name(name).unwrap_or_default() {
        if !matches!(found, Type::Struct(_) | Type::Union(_)) {
            continue;
        }
        let mut at = Some(found);
        for step in steps.clone() {
            at = match &at {
                Some(outer) => member_type(btf, outer, step)?,
                None => None,
            };
        }
        if let Some(Type::Struct(s) | Type::Union(s)) = &at {
            let mut shape = Shape { size: s.size(), members: Vec::new() };
            let is_union = matches!(at, Some(Type::Union(_)));
            lift(btf, s, 0, is_union.then_some(0), &mut 1, &mut shape.members)?;
            into.push(shape);
        }
    }
    Ok(())
}

/// The type of the member `name`, looked for in anonymous members too.
fn member_type(btf: &Btf, outer: &Type, name: &str) -> Result<Option<Type>, String> {
    let (Type::Struct(s) | Type::Union(s)) = outer else {
        return Ok(None);
    };
    for member in &s.members {
        let ty = btf.resolve_chained_type(member).map_err(|e| e.to_string())?;
        let found = match name_of(btf, member)? {
            own if own == name => Some(ty),
            own if own.is_empty() => member_type(btf, &ty, name)?,
            _ => None,
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn lift(
    btf: &Btf,
    of: &btf_rs::Struct,
    base_bits: usize,
    union: Option<usize>,
    next_union: &mut usize,
    into: &mut Vec<Member>,
) -> Result<(), String> {
    for member in &of.members {
        let name = name_of(btf, member)?;
        let offset_bits = base_bits + member.bit_offset() as usize;
        let ty = btf.resolve_chained_type(member).map_err(|e| e.to_string())?;
        if name.is_empty() {
            match &ty {
                Type::Struct(inner) => {
                    lift(btf, inner, offset_bits, union, next_union, into)?;
                    continue;
                }
                Type::Union(inner) => {
                    let id = union.unwrap_or(*next_union);
                    *next_union += 1;
                    lift(btf, inner, offset_bits, Some(id), next_union, into)?;
                    continue;
                }
                _ => {}
            }
        }
        let size_bits = match member.bitfield_size() {
            Some(bits) if bits > 0 => bits as usize,
            _ => 8 * size_of_type(btf, ty)?,
        };
        into.push(Member { name, offset_bits, size_bits, union });
    }
    Ok(())
}

fn size_of_type(btf: &Btf, mut ty: Type) -> Result<usize, String> {
    let mut times = 1;
    loop {
        let size = match &ty {
            Type::Int(i) => i.size(),
            Type::Struct(s) | Type::Union(s) => s.size(),
            Type::Enum(e) => e.size(),
            Type::Enum64(e) => e.size(),
            Type::Float(f) => f.size(),
            Type::Ptr(_) => size_of::<u64>(),
            Type::Array(array) => {
                times *= array.len();
                ty = btf.resolve_chained_type(array).map_err(|e| e.to_string())?;
                continue;
            }
            other => match other.as_btf_type().filter(|t| t.get_type_id().is_some()) {
                Some(_) => {
                    let chained = other.as_btf_type().ok_or("a type without a name")?;
                    ty = btf.resolve_chained_type(chained).map_err(|e| e.to_string())?;
                    continue;
                }
                None => return Err(format!("a {} has no size", other.name())),
            },
        };
        return Ok(size * times);
    }
}
