//! `.deb` files, which are built from control files with `dpkg-deb`.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    Release,
    build::Profile,
    contents::{CONFIG, Package},
    elf, output,
    scripts::Values,
    stage::{Stage, md5sums},
};
use crate::workspace;

const SCRIPTS: [&str; 4] = ["preinst", "postinst", "prerm", "postrm"];

/// Builds one file per package and returns their paths.
///
/// # Errors
/// If a control file cannot be written, or `dpkg-deb` fails.
pub(super) fn build(release: &Release, stage: &Stage, values: &Values, out: &Path) -> Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    for package in packages(release.profile) {
        let tree = out.join("work").join("deb").join(package.name());
        copy_tree(&stage.root(package), &tree)?;
        if package == Package::Gpush {
            remove_presets(&tree)?;
        }
        add_changelog(release, package, &tree)?;
        let overrides = tree.join("usr/share/lintian/overrides");
        fs::create_dir_all(&overrides)?;
        let text = fs::read_to_string(workspace::root().join("packaging/deb/lintian-overrides"))?;
        write(&overrides.join(package.name()), &overrides_of(&text, package), 0o644)?;
        let sums = md5sums(&tree)?;
        let control = tree.join("DEBIAN");
        fs::create_dir_all(&control)?;
        write(&control.join("md5sums"), &sums, 0o644)?;
        write(&control.join("control"), &control_file(release, stage, package)?, 0o644)?;
        if package == Package::Gpush {
            write(&control.join("conffiles"), &CONFIG.map(|path| format!("{path}\n")).concat(), 0o644)?;
            for script in SCRIPTS {
                write(&control.join(script), &values.fill(&format!("deb/{script}"))?, 0o755)?;
            }
        }
        let file = out.join(format!("{}_{}-1_{}.deb", package.name(), release.version, release.arch.debian()));
        let compression: &[&str] =
            if release.profile == Profile::Release { &["-Zxz", "-z9", "-Sextreme"] } else { &["-Znone"] };
        let mut dpkg = Command::new("dpkg-deb");
        dpkg.arg("--root-owner-group").args(compression).arg("--build").arg(&tree).arg(&file);
        output(dpkg.env("SOURCE_DATE_EPOCH", release.epoch.to_string()))?;
        made.push(file);
    }
    Ok(made)
}

/// Returns the packages of a build. A debug build has no package for debug symbols.
pub(super) fn packages(profile: Profile) -> impl Iterator<Item = Package> {
    Package::ALL.into_iter().filter(move |package| profile == Profile::Release || *package != Package::Symbols)
}

/// Removes the presets of systemd. The maintainer scripts enable the units, so only the .rpm needs presets. In a .deb,
/// the directory of the presets would cause a warning of dpkg at each removal, because Debian 12 knows it as
/// `/lib/systemd/system-preset`.
fn remove_presets(tree: &Path) -> Result<()> {
    let directory = tree.join("usr/lib/systemd/system-preset");
    fs::remove_dir_all(&directory).with_context(|| format!("cannot remove {}", directory.display()))
}

/// Returns lintian's overrides for a package: each line with the name of the package, and the
/// comment above this line.
fn overrides_of(text: &str, package: Package) -> String {
    let own = format!("{}: ", package.name());
    let (mut kept, mut comment) = (String::new(), String::new());
    for line in text.lines() {
        if line.starts_with('#') {
            comment = format!("{line}\n");
        } else if line.starts_with(&own) {
            kept += &format!("{}{line}\n", std::mem::take(&mut comment));
        }
    }
    kept
}

fn control_file(release: &Release, stage: &Stage, package: Package) -> Result<String> {
    let mut libraries = BTreeSet::new();
    for program in stage.programs(package) {
        libraries.extend(elf::packages(&program)?);
    }
    let glibc = stage.glibc()?;
    let version = |library: &str| if library == "libc6" { format!("libc6 (>= {glibc})") } else { library.to_owned() };
    let mut depends: Vec<String> = libraries.into_iter().map(version).collect();
    let own = format!("gpush (= {}-1)", release.version);
    let (section, summary, text) = match package {
        Package::Gpush => {
            depends.extend(["init-system-helpers (>= 1.54)".to_owned(), "systemd (>= 245)".to_owned()]);
            (
                "admin",
                "agent that shares the NVIDIA GPUs of one host",
                " gpushd applies MIG layouts without touching what is in use, supervises MPS\n \
                 control daemons and applies time-slicing settings. gpushctl is the command\n \
                 for administrators, users and scripts.\n",
            )
        }
        Package::Sim => {
            depends.push(own);
            (
                "devel",
                "simulated hosts with NVIDIA GPUs",
                " A simulated driver library and the programs that make a host with simulated\n \
                 GPUs: to try gpush, and to test scripts, on machines without a GPU.\n",
            )
        }
        Package::Symbols => {
            depends = vec![own];
            ("debug", "debug symbols of gpush", " Debug symbols of gpushd and gpushctl.\n")
        }
    };
    Ok(format!(
        "Package: {name}\nVersion: {version}-1\nArchitecture: {arch}\nMaintainer: {maintainer}\n\
         Installed-Size: {size}\nDepends: {depends}\nSection: {section}\nPriority: optional\n\
         Description: {summary}\n{text}",
        name = package.name(),
        version = release.version,
        arch = release.arch.debian(),
        maintainer = release.maintainer,
        size = stage.size(package)?.div_ceil(1024),
        depends = depends.join(", "),
    ))
}

/// Adds a changelog in Debian's format. It only refers to the file with the list of changes.
fn add_changelog(release: &Release, package: Package, tree: &Path) -> Result<()> {
    let date = output(Command::new("date").args(["--utc", "--rfc-email", &format!("--date=@{}", release.epoch)]))?;
    let text = format!(
        "gpush ({}-1) unstable; urgency=medium\n\n  * The changes are in changelog.gz.\n\n -- {}  {}\n",
        release.version,
        release.maintainer,
        date.trim()
    );
    let path = tree.join(changelog(package));
    fs::create_dir_all(path.parent().context("a path below a tree has a directory")?)?;
    let plain = path.with_extension("");
    write(&plain, &text, 0o644)?;
    output(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(&plain)).map(|_| ())
}

fn changelog(package: Package) -> String {
    format!("usr/share/doc/{}/changelog.Debian.gz", package.name())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    output(Command::new("cp").arg("--archive").arg(format!("{}/.", from.display())).arg(to)).map(|_| ())
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_gets_its_own_lintian_overrides_with_their_reasons() {
        let text = "# Why.\ngpush: a *\ngpush-sim: a *\n# Other.\ngpush: b *\n";
        assert_eq!(overrides_of(text, Package::Gpush), "# Why.\ngpush: a *\n# Other.\ngpush: b *\n");
        assert_eq!(overrides_of(text, Package::Sim), "# Why.\ngpush-sim: a *\n");
    }
}
