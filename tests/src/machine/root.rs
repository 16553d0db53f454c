//! The root file system of the machines: a small Debian with systemd, created once.
//!
//! The packages come from the Debian sources in this host's package lists. Most machines have the
//! Debian release of this host, so that programs that were built here also run in them. There are
//! two other root file systems: Debian 13 with Slurm 24.11, and Debian 11, the oldest supported
//! release. The root file systems are stored below the target directory. They are created again if
//! the recipe changes. Machines never write to them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::Instant,
};

use nix::fcntl::{Flock, FlockArg};

use super::Debian;
use crate::host::program;

/// Packages of every machine, in addition to the minimal Debian.
const PACKAGES: &str = "systemd,systemd-sysv,dbus,procps";

/// Packages of the machine with the Debian release of this host. `rpm` is there because tests
/// install .rpm files.
const OF_HOST: &str = "rpm";

/// Packages of the machine with Debian 13, which has Slurm 24.11.
const SLURM: &str = "slurmd,slurmctld,slurm-client,munge";

/// Returns the directory of the root file system. The first call creates the directory. If the
/// creation fails, every caller gets the error.
pub(super) fn root(debian: Debian) -> Result<&'static Path, String> {
    static ROOTS: [OnceLock<Result<PathBuf, String>>; 3] = [const { OnceLock::new() }; 3];
    let make = || match debian {
        Debian::Bullseye => made("machine-11", "bullseye", PACKAGES, Packages::Installed),
        Debian::OfHost => made("machine", &release()?, &format!("{PACKAGES},{OF_HOST}"), Packages::Installed),
        Debian::Trixie => made("machine-slurm", "trixie", &format!("{PACKAGES},{SLURM}"), Packages::Installed),
    };
    ROOTS[debian as usize].get_or_init(make).as_deref().map_err(Clone::clone)
}

/// Returns a directory with the files of these packages of Debian 13, and of all packages that they need. The packages
/// are unpacked, but not installed.
pub(super) fn unpacked(name: &str, packages: &str) -> Result<PathBuf, String> {
    made(name, "trixie", packages, Packages::Unpacked)
}

/// What happens with packages in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packages {
    Installed,
    Unpacked,
}

/// Returns the target directory of cargo.
pub(super) fn target() -> Result<PathBuf, String> {
    let profile = program("gpushd");
    // target/<profile>/gpushd → target
    profile.parent().and_then(Path::parent).map(Path::to_owned).ok_or_else(|| "no target directory".to_owned())
}

fn made(name: &str, wanted_release: &str, packages: &str, what: Packages) -> Result<PathBuf, String> {
    let dir = target()?.join(name);
    let release = release()?;
    let mut sources = sources(&release, Path::new("/etc/apt"));
    if sources.is_empty() {
        return Err(format!("apt has no source of Debian's {release} here"));
    }
    // The package archive of this host also has the packages of the wanted release. So only change
    // the name of the release in the lists of sources.
    sources.iter_mut().for_each(|(_, text)| *text = text.replace(&release, wanted_release));
    let release = wanted_release;
    let wanted = format!("{release} {packages}\n");
    let why = |error: std::io::Error| format!("{}: {error}", dir.display());
    fs::create_dir_all(&dir).map_err(why)?;
    let lock = fs::File::create(dir.join("lock")).map_err(why)?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| why(error.into()))?;
    let (root, note) = (dir.join("root"), dir.join("recipe"));
    if fs::read_to_string(&note).is_ok_and(|recipe| recipe == wanted) && root.is_dir() {
        return Ok(root);
    }
    let begun = Instant::now();
    // Remove the recipe file first. If this run does not finish, the next run creates the directory
    // again, because it finds no recipe file.
    let _ = fs::remove_file(&note);
    if root.exists() {
        fs::remove_dir_all(&root).map_err(why)?;
    }
    let mut lists = Vec::new();
    for (name, text) in &sources {
        lists.push(dir.join(name));
        fs::write(dir.join(name), text).map_err(why)?;
    }
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap.args(["--quiet", "--mode=root"]).arg(format!("--include={packages}"));
    match what {
        Packages::Installed => mmdebstrap
            .arg("--variant=minbase")
            // Empty the file with the machine id, so that each boot generates an id.
            .arg("--customize-hook=: > \"$1/etc/machine-id\"")
            // Disable the daemons of Slurm, because they have no config until a test writes it.
            .arg("--customize-hook=rm -f \"$1\"/etc/systemd/system/multi-user.target.wants/slurm*"),
        Packages::Unpacked => mmdebstrap.arg("--variant=extract"),
    };
    let output = mmdebstrap
        .arg(release)
        .arg(&root)
        .args(&lists)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("mmdebstrap can't be started: {error}"))?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        return Err(format!("mmdebstrap failed: {}", printed.lines().last().unwrap_or("it printed nothing")));
    }
    fs::write(&note, wanted).map_err(why)?;
    println!("{name}: Debian {release} was made for machines in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(root)
}

/// Returns the code name of the Debian release of this host.
fn release() -> Result<String, String> {
    let text = fs::read_to_string("/etc/os-release").map_err(|error| format!("/etc/os-release: {error}"))?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.map(|name| name.trim_matches('"').to_owned()).ok_or("this is no Debian: it has no code name".to_owned())
}

/// Returns the parts of apt's source lists that concern this release, as file name and content.
fn sources(release: &str, apt: &Path) -> Vec<(String, String)> {
    let mut files = vec![apt.join("sources.list")];
    files.extend(fs::read_dir(apt.join("sources.list.d")).into_iter().flatten().flatten().map(|entry| entry.path()));
    let kept = |file: &PathBuf| {
        let name = file.file_name()?.to_str()?.to_owned();
        let text = fs::read_to_string(file).ok()?;
        let kept = if name.ends_with(".sources") { stanzas(&text, release) } else { lines(&text, release) };
        (!kept.is_empty() && (name.ends_with(".sources") || name.ends_with(".list"))).then_some((name, kept))
    };
    files.iter().filter_map(kept).collect()
}

/// Returns whether a suite belongs to the release. For example, `bookworm-security` belongs to
/// `bookworm`.
fn is_of(suite: &str, release: &str) -> bool {
    suite.strip_prefix(release).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn stanzas(text: &str, release: &str) -> String {
    let is_ours = |stanza: &&str| {
        let suites = stanza.lines().find_map(|line| line.strip_prefix("Suites:"));
        suites.is_some_and(|suites| suites.split_whitespace().any(|suite| is_of(suite, release)))
    };
    text.split("\n\n").filter(is_ours).map(|stanza| format!("{}\n\n", stanza.trim())).collect()
}

fn lines(text: &str, release: &str) -> String {
    let is_ours = |line: &&str| line.starts_with("deb ") && line.split_whitespace().any(|word| is_of(word, release));
    text.lines().filter(is_ours).map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debian_sources_of_the_release_are_used() {
        let text = "Types: deb\n# old\nURIs: file:/a\nSuites: trixie trixie-updates\nComponents: main\n\n\
                    Types: deb\nURIs: file:/b\nSuites: nodistro\nComponents: main\n";
        assert!(stanzas(text, "trixie").contains("file:/a") && !stanzas(text, "trixie").contains("file:/b"));
        let text = "deb file:/a bookworm-security main\ndeb file:/b cloud-bookworm main\n# deb file:/c bookworm main\n";
        assert_eq!(lines(text, "bookworm"), "deb file:/a bookworm-security main\n");
        assert_eq!(lines(text, "book"), "");
    }
}
