//! The location of this checkout, and calls of its cargo.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Returns the root of the checkout from which this program was built.
pub(crate) fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// Returns cargo's target directory.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Returns the directory for xtask's logs and for tools that it installs. It is in `target`, so
/// that no other folder changes.
pub(crate) fn scratch() -> Result<PathBuf> {
    let dir = target().join("xtask");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Returns a command for the cargo that runs xtask, in the root directory of the checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` sets environment variables about the crate of xtask. A cargo that xtask starts
    // must not get them.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// The profile of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    /// A build for development.
    Debug,
    /// A build as shipped, for benchmarks.
    Release,
}

impl Build {
    /// Returns the folder with the built programs and the simulated driver library.
    pub(crate) fn folder(self) -> PathBuf {
        target().join(match self {
            Self::Debug => "debug",
            Self::Release => "release",
        })
    }
}

/// Packages that a simulated host with an agent needs.
pub(crate) const PROGRAMS: [&str; 5] = ["gpushd", "gpushctl", "gpush-slurm-hook", "gpush-sim", "nvml-sim"];

/// Builds [`PROGRAMS`]. Returns the folder that contains them.
pub(crate) fn build_programs(build: Build) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--locked"]);
    for package in PROGRAMS {
        command.args(["--package", package]);
    }
    if build == Build::Release {
        command.arg("--release");
    }
    if !command.status().context("cargo cannot be started")?.success() {
        bail!("the programs do not build; cargo's messages above say why");
    }
    Ok(build.folder())
}

/// The program of Slurm's hooks.
pub(crate) const SLURM_HOOK: &str = "gpush-slurm-hook";

/// Builds [`SLURM_HOOK`] with all libraries in the program, with these flags of rustc. Slurm starts the program twice for
/// each job, and the start of a program with shared libraries needs more than half as much processor time again. Returns
/// the path of the program.
pub(crate) fn build_static_hook(triple: &str, flags: &[String]) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--locked", "--release", "--target", triple, "--package", SLURM_HOOK]);
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(["-Ctarget-feature=+crt-static"]).collect();
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    if !command.status().context("cargo cannot be started")?.success() {
        bail!("{SLURM_HOOK} does not build; cargo's messages above say why");
    }
    Ok(target().join(triple).join("release").join(SLURM_HOOK))
}

/// Returns the files that git tracks, or would track, relative to the root of the checkout. Without
/// git, as in an unpacked archive, returns every file outside `target` and outside hidden folders.
pub(crate) fn files() -> Result<Vec<PathBuf>> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    if let Ok(output) = listed
        && output.status.success()
    {
        let text = String::from_utf8(output.stdout).context("a file name that is not UTF-8")?;
        let files = text.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from);
        return Ok(files.filter(|file| root().join(file).is_file()).collect());
    }
    let mut found = Vec::new();
    walk(&root(), &mut found)?;
    Ok(found)
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && name != ".git" {
                walk(&path, found)?;
            }
        } else if let Ok(relative) = path.strip_prefix(root()) {
            found.push(relative.to_path_buf());
        }
    }
    Ok(())
}

/// Returns whether a program is in `PATH`.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}
