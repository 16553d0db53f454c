//! Where this checkout is, and how its own cargo is called.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Root of the checkout that this binary was built from.
pub(crate) fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// Where cargo puts what it builds.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Where xtask keeps its logs and what it installed; below `target`, so that nothing else is touched.
pub(crate) fn scratch() -> Result<PathBuf> {
    let dir = target().join("xtask");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// The cargo that runs us, in the root of the checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` tells its child about the crate it ran; a nested cargo shall not see it.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// How the programs are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    /// As developed.
    Debug,
    /// As shipped; for figures.
    Release,
}

impl Build {
    /// Folder that holds the built programs and the simulated driver library.
    pub(crate) fn folder(self) -> PathBuf {
        target().join(match self {
            Self::Debug => "debug",
            Self::Release => "release",
        })
    }
}

/// Packages of what a simulated host and an agent on it need.
pub(crate) const PROGRAMS: [&str; 4] = ["gpushd", "gpushctl", "gpush-sim", "nvml-sim"];

/// Builds [`PROGRAMS`] and returns the folder that holds them.
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

/// Files of the checkout that git knows, or would, relative to its root. Without git (an unpacked
/// archive): every file outside `target` and hidden folders.
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

/// Whether a program is on the search path.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}
