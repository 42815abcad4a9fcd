//! The processors that guests can have: this machine's, or another one that QEMU emulates.

use clap::ValueEnum;
use std::fmt::Display;

/// A processor architecture by the name that the command line gives it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    /// the machine's own
    #[default]
    #[value(name = "x86_64")]
    X86_64,
    /// emulated; `newest` then is a kernel with pages of 16 KiB
    Aarch64,
}

impl Arch {
    /// As the command line and QEMU spell it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    /// As Debian's packages spell it.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Arch::X86_64 => "amd64",
            Arch::Aarch64 => "arm64",
        }
    }

    /// As Rust's compiler spells its target.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64-unknown-linux-gnu",
            Arch::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Where Debian's packages have its shared libraries.
    pub(crate) fn libraries(self) -> &'static str {
        match self {
            Arch::X86_64 => "usr/lib/x86_64-linux-gnu",
            Arch::Aarch64 => "usr/lib/aarch64-linux-gnu",
        }
    }

    /// The name of a unit of the cache that differs between architectures.
    pub(crate) fn unit(self, name: &str) -> String {
        match self {
            Arch::X86_64 => name.to_owned(),
            Arch::Aarch64 => format!("{name}-aarch64"),
        }
    }

    /// The name of a stage, or of the tests of a kernel and a device, that differs between architectures.
    pub(crate) fn stage(self, name: impl Display) -> String {
        match self {
            Arch::X86_64 => name.to_string(),
            Arch::Aarch64 => format!("aarch64 {name}"),
        }
    }

    /// Whether this machine runs its programs, and may have KVM for its guests.
    pub(crate) fn is_host(self) -> bool {
        self == Arch::X86_64
    }
}
