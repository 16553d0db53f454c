//! The architectures of the packages, and their names in each tool.

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::workspace;

/// An architecture of hosts with NVIDIA GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Arch {
    #[value(name = "x86_64")]
    X86,
    #[value(name = "aarch64")]
    Arm,
}

impl Arch {
    /// Returns the architecture of this machine.
    ///
    /// # Errors
    /// If no packages exist for it.
    pub(super) fn native() -> Result<Self> {
        let name = std::env::consts::ARCH;
        match Self::from_str(name, false) {
            Ok(arch) => Ok(arch),
            Err(_) => bail!("there are no packages for {name}, only for x86_64 and aarch64"),
        }
    }

    /// Returns the name that Rust, the kernel and rpm use.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86_64",
            Self::Arm => "aarch64",
        }
    }

    /// Returns Debian's name.
    pub(super) const fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// Returns the target triple of Rust.
    pub(super) fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// Returns the name of a program of binutils that can read files of this architecture.
    ///
    /// # Errors
    /// If the program is not installed.
    pub(super) fn binutils(self, tool: &str) -> Result<String> {
        if Self::native().is_ok_and(|native| native == self) {
            return Ok(tool.to_owned());
        }
        let program = format!("{}-linux-gnu-{tool}", self.name());
        if !workspace::is_installed(&program) {
            bail!(
                "{program} is not installed; on Debian: `apt install binutils-{}-linux-gnu`",
                self.name().replace('_', "-")
            );
        }
        Ok(program)
    }
}
