//! Builds the programs of the packages.
//!
//! A program that is built without cargo-zigbuild needs at least the glibc version of the build
//! machine. cargo-zigbuild links against an older glibc, so the same file runs on every supported
//! release.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::{Release, arch::Arch};
use crate::workspace::{self, Build};

/// The oldest glibc version that the packages support: that of Debian 11 and Ubuntu 20.04.
pub(super) const GLIBC: &str = "2.31";

/// The build profile of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Profile {
    /// The build for hosts: optimised, with debug symbols in separate packages.
    Release,
    /// The build for tests of the packages.
    Debug,
}

/// Builds the programs and returns their folder.
///
/// # Errors
/// If cargo fails, or cargo-zigbuild is not installed for a release build.
pub(super) fn build(release: &Release) -> Result<PathBuf> {
    if release.profile == Profile::Debug {
        return workspace::build_programs(Build::Debug);
    }
    if !workspace::is_installed("cargo-zigbuild") {
        bail!(
            "cargo-zigbuild is not installed. Without it, the programs would need the glibc of this machine. Install it \
             as in docs/install.md, or add `--debug-build` for test packages."
        );
    }
    let triple = release.arch.triple();
    let mut command = workspace::cargo();
    command.args(["zigbuild", "--locked", "--release", "--target", &format!("{triple}.{GLIBC}")]);
    for package in workspace::PROGRAMS {
        command.args(["--package", package]);
    }
    // With these flags, the programs do not depend on the folder in which they are built. A build
    // id connects each program with its debug symbols.
    let home = std::env::var("CARGO_HOME").or_else(|_| std::env::var("HOME").map(|home| format!("{home}/.cargo")));
    let flags = [
        "-Clink-arg=-Wl,--build-id=sha1".to_owned(),
        "-Cdebuginfo=line-tables-only".to_owned(),
        "-Cstrip=none".to_owned(),
        format!("--remap-path-prefix={}=gpush", workspace::root().display()),
        format!("--remap-path-prefix={}=cargo", home.context("neither CARGO_HOME nor HOME is set")?),
    ];
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    if !command.status().context("cannot start cargo")?.success() {
        bail!("the programs do not build; the messages of cargo above say why");
    }
    // A program without shared libraries needs no glibc, so it needs no cargo-zigbuild. The compiler of this machine can
    // build it only for this architecture.
    if release.arch == Arch::native()? {
        workspace::build_static_hook(&triple, &flags)?;
    }
    Ok(workspace::target().join(triple).join("release"))
}
