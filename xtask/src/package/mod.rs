//! `cargo xtask package`: builds the .deb and .rpm files of gpush from the same staged files.
//!
//! ```text
//! build ──► programs ──┐
//! man, completions ────┼──► stage: one tree per package ─┬──► dpkg-deb ──► .deb
//! packaging/, systemd/ ┘     (list of files, modes)      └──► rpmbuild ──► .rpm
//! cargo metadata ──► licences, SBOM ┘
//! ```
//!
//! The packages do not depend on the time, the user, the umask or the folder of the build. The times of all
//! files are the time of the last commit, and the owner of all files is root.
//!
//! | file | subject |
//! |---|---|
//! | `arch` | the architectures, and their names in each tool |
//! | `build` | the programs, built against an old glibc if cargo-zigbuild is installed |
//! | `contents` | the path and the mode of each file |
//! | `stage` | the staged trees |
//! | `dependencies` | licences of the libraries, and the SBOM |
//! | `elf` | what a program needs from the host: libraries, glibc version |
//! | `scripts` | maintainer scripts and the spec, with their placeholders filled in |
//! | `deb`, `rpm` | the two formats |

mod arch;
mod build;
mod contents;
mod deb;
mod dependencies;
mod elf;
mod rpm;
mod scripts;
mod stage;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use nix::sys::stat::{Mode, umask};

use self::{arch::Arch, build::Profile, contents::Package, scripts::Values, stage::Stage};
use crate::workspace::{self, Build};

/// Version of the packages that tests install as an upgrade.
pub(crate) const LATER: &str = "99.0.0";

/// Limits for the package `gpush`, in bytes: of the file, and of the installed files.
const MOST_PACKED: u64 = 9 << 20;
const MOST_INSTALLED: u64 = 30 << 20;

/// What to package, and where to.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Folder for the packages [default: target/package]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Version of the packages [default: that of the workspace]
    #[arg(long)]
    version: Option<String>,
    /// Architecture of the hosts [default: that of this machine]
    #[arg(long, conflicts_with = "debug_build")]
    arch: Option<Arch>,
    /// Package debug builds, without compression: for tests of the packages, not for hosts
    #[arg(long)]
    debug_build: bool,
    /// Use the debug build as it is, without checking that it is up to date
    #[arg(long, hide = true, requires = "debug_build")]
    built: bool,
    /// Only these formats
    #[arg(long, value_delimiter = ',', default_value = "deb,rpm")]
    format: Vec<Format>,
}

/// A format of packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Deb,
    Rpm,
}

/// The parameters of one run.
#[derive(Debug)]
struct Release {
    version: String,
    arch: Arch,
    profile: Profile,
    /// Time of the last commit, in seconds since 1970. Every file of a package has this time.
    epoch: u64,
    /// Name and address of the person who builds the packages, in the form `NAME <ADDRESS>`.
    maintainer: String,
}

/// Runs `cargo xtask package`.
///
/// # Errors
/// If a program does not build or needs a newer glibc than [`build::GLIBC`], a file is missing, or
/// `dpkg-deb` or `rpmbuild` fails.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    // The modes of folders in the packages must not depend on the umask of the user.
    umask(Mode::from_bits_truncate(0o022));
    check_tools(&arguments.format)?;
    let native = Arch::native()?;
    let release = Release {
        version: arguments.version.clone().unwrap_or_else(|| env!("CARGO_PKG_VERSION").to_owned()),
        arch: arguments.arch.unwrap_or(native),
        profile: if arguments.debug_build { Profile::Debug } else { Profile::Release },
        epoch: last_commit()?,
        maintainer: std::env::var("GPUSH_MAINTAINER").unwrap_or_else(|_| "gpush authors <gpush@localhost>".to_owned()),
    };
    let out = arguments.out.clone().unwrap_or_else(|| workspace::target().join("package"));
    let work = out.join("work");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let out = out.canonicalize()?;

    let programs = if arguments.built { Build::Debug.folder() } else { build::build(&release)? };
    // These programs run on this machine. They print the man pages, completions and the database schema.
    let runnable = if release.arch == native { programs.clone() } else { workspace::build_programs(Build::Debug)? };
    let stage = Stage::create(&release, &programs, &runnable, &out.join("work"))?;
    let glibc = stage.glibc()?;
    let values = Values::new(&release, &glibc, schema(&runnable)?);
    let mut made = Vec::new();
    for format in &arguments.format {
        made.extend(match format {
            Format::Deb => deb::build(&release, &stage, &values, &out)?,
            Format::Rpm => rpm::build(&release, &stage, &values, &out)?,
        });
    }
    println!("glibc {glibc} or later; database schema {}", values.schema());
    for path in &made {
        println!("{:>9} KiB  {}", fs::metadata(path)?.len().div_ceil(1024), path.display());
    }
    for package in Package::ALL {
        println!("{:>9} KiB  installed: {}", stage.size(package)?.div_ceil(1024), package.name());
    }
    if release.profile == Profile::Release {
        check_sizes(&made, stage.size(Package::Gpush)?)?;
    }
    let work = out.join("work");
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    Ok(true)
}

/// Checks that the programs that build the packages are installed, before anything is built.
fn check_tools(formats: &[Format]) -> Result<()> {
    let needed = formats.iter().map(|format| match format {
        Format::Deb => ("dpkg-deb", "dpkg"),
        Format::Rpm => ("rpmbuild", "rpm"),
    });
    for (program, package) in needed.chain([("objcopy", "binutils"), ("gzip", "gzip")]) {
        if !workspace::is_installed(program) {
            bail!("{program} is not installed; on Debian: `apt install {package}`");
        }
    }
    Ok(())
}

/// Checks the sizes of the package `gpush`: of the package files in both formats, and of the
/// installed files.
fn check_sizes(made: &[PathBuf], installed: u64) -> Result<()> {
    let mut sizes = vec![("the installed gpush".to_owned(), installed, MOST_INSTALLED)];
    for path in made {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("gpush_")
            || name.strip_prefix("gpush-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        {
            sizes.push((name, fs::metadata(path)?.len(), MOST_PACKED));
        }
    }
    match sizes.iter().find(|(_, size, most)| size > most) {
        Some((what, size, most)) => bail!("{what} has {size} bytes, and the limit is {most}"),
        None => Ok(()),
    }
}

/// Returns `SOURCE_DATE_EPOCH` if it is set. Otherwise, returns the time of the last commit in
/// seconds since 1970.
fn last_commit() -> Result<u64> {
    if let Ok(set) = std::env::var("SOURCE_DATE_EPOCH") {
        return set.parse().with_context(|| format!("SOURCE_DATE_EPOCH is not a number: {set}"));
    }
    let mut git = Command::new("git");
    let printed = output(git.args(["log", "-1", "--format=%ct"]).current_dir(workspace::root()))
        .context("cannot read the time of the last commit; outside a git checkout, set SOURCE_DATE_EPOCH")?;
    printed.trim().parse().context("git printed no time")
}

/// Returns the newest database schema of the built gpushd.
fn schema(programs: &Path) -> Result<u32> {
    let printed = output(Command::new(programs.join("gpushd")).arg("--version"))?;
    let number =
        printed.split("database schema ").nth(1).and_then(|rest| rest.trim().trim_end_matches(')').parse().ok());
    number.with_context(|| format!("`gpushd --version` names no database schema: {printed}"))
}

/// Runs a command that must succeed. Returns its standard output.
fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.output().with_context(|| format!("cannot start {program}"))?;
    if !done.status.success() {
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        bail!("{program} failed ({}): {}{}", done.status, out.trim(), err.trim());
    }
    String::from_utf8(done.stdout).with_context(|| format!("{program} printed no UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_main_package_has_a_size_limit() {
        let scratch = tempfile::tempdir().unwrap();
        let file = |name: &str, size: u64| {
            let path = scratch.path().join(name);
            fs::File::create(&path).unwrap().set_len(size).unwrap();
            path
        };
        let small = [file("gpush_1.0-1_amd64.deb", 1), file("gpush-dbgsym_1.0-1_amd64.deb", MOST_PACKED + 1)];
        check_sizes(&small, MOST_INSTALLED).unwrap();
        assert!(check_sizes(&small, MOST_INSTALLED + 1).is_err());
        let error = check_sizes(&[file("gpush-1.0-1.x86_64.rpm", MOST_PACKED + 1)], 1).unwrap_err();
        assert!(error.to_string().contains("gpush-1.0-1.x86_64.rpm has 9437185 bytes"), "{error}");
    }
}
