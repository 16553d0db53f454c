//! `.rpm` files, which are built from the spec with `rpmbuild`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    Release,
    build::Profile,
    contents::{CONFIG, CREATED_CONFIG, Package},
    deb::packages,
    elf, output,
    scripts::Values,
    stage::{Stage, Staged},
};
/// Builds one file per package and returns their paths.
///
/// # Errors
/// If `rpmbuild` fails.
pub(super) fn build(release: &Release, stage: &Stage, values: &Values, out: &Path) -> Result<Vec<PathBuf>> {
    // Only tests use a package of debug builds, so strong compression would waste time.
    let payload = if release.profile == Profile::Release { "w9.xzdio" } else { "w1.gzdio" };
    let work = out.join("work").join("rpm");
    let root = work.join("root");
    fs::create_dir_all(&root)?;
    // rpmbuild needs a file here, but the package does not contain it.
    let created = root.join(CREATED_CONFIG.trim_start_matches('/'));
    fs::create_dir_all(created.parent().context("the config is in a directory")?)?;
    fs::write(&created, "").with_context(|| format!("cannot write {}", created.display()))?;
    let date = output(
        Command::new("date").args(["--utc", "+%a %b %d %Y", &format!("--date=@{}", release.epoch)]).env("LC_ALL", "C"),
    )?;
    let values = values
        .with("STAGE", work.display().to_string())
        .with("PAYLOAD", payload.to_owned())
        .with("LIBGCC", if needs_libgcc(stage)? { " libgcc_s.so.1()(64bit)" } else { "" }.to_owned())
        .with("MAINTAINER", release.maintainer.clone())
        .with("DATE", date.trim().to_owned());
    let mut spec = values.fill("rpm/gpush.spec")?;
    for package in Package::ALL {
        let list = work.join(format!("{}.files", package.name()));
        if packages(release.profile).all(|built| built != package) {
            spec = without_package(&spec);
            continue;
        }
        output(Command::new("cp").arg("--archive").arg(format!("{}/.", stage.root(package).display())).arg(&root))?;
        let files = stage.files(package)?;
        let mut lines: Vec<String> = own_directories(&files)
            .into_iter()
            .map(|directory| format!("%dir %attr(0755, root, root) {directory}"))
            .collect();
        lines.extend(files.into_iter().map(|file| match file.mode {
            None => file.path,
            Some(mode) => {
                let kind = if CONFIG.contains(&file.path.as_str()) { "%config(noreplace) " } else { "" };
                format!("{kind}%attr({mode:04o}, root, root) {}", file.path)
            }
        }));
        if package == Package::Gpush {
            lines.push(format!("%ghost %config(noreplace) %attr(0644, root, root) {CREATED_CONFIG}"));
        }
        fs::write(&list, lines.join("\n") + "\n").with_context(|| format!("cannot write {}", list.display()))?;
    }
    let file = work.join("gpush.spec");
    fs::write(&file, spec).with_context(|| format!("cannot write {}", file.display()))?;
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.args(["-bb", "--quiet", "--target", release.arch.name()]);
    for (name, value) in [
        ("_topdir", work.display().to_string()),
        ("_rpmdir", work.join("out").display().to_string()),
        ("buildroot", root.display().to_string()),
        // A package file must not contain where and when it was built.
        ("_buildhost", "gpush".to_owned()),
        ("use_source_date_epoch_as_buildtime", "1".to_owned()),
        ("clamp_mtime_to_source_date_epoch", "1".to_owned()),
    ] {
        rpmbuild.args(["--define", &format!("{name} {value}")]);
    }
    output(rpmbuild.arg(&file).env("SOURCE_DATE_EPOCH", release.epoch.to_string()))?;
    let mut made = Vec::new();
    for entry in fs::read_dir(work.join("out").join(release.arch.name())).context("rpmbuild made no package")? {
        let built = entry?.path();
        let target = out.join(built.file_name().unwrap_or_default());
        fs::rename(&built, &target).with_context(|| format!("cannot move {}", built.display()))?;
        made.push(target);
    }
    made.sort();
    Ok(made)
}

/// Returns the directories of these files that no other package has. rpm removes a directory only if it belongs to the
/// package.
fn own_directories(files: &[Staged]) -> BTreeSet<String> {
    let is_own = |directory: &&Path| directory.iter().any(|name| name.to_string_lossy().starts_with("gpu"));
    let directories = files.iter().flat_map(|file| Path::new(&file.path).ancestors().skip(1).filter(is_own));
    directories.map(|directory| directory.display().to_string()).collect()
}

/// Returns whether a program of the packages is linked with `libgcc_s`.
fn needs_libgcc(stage: &Stage) -> Result<bool> {
    for program in Package::ALL.iter().flat_map(|package| stage.programs(*package)) {
        if elf::packages(&program)?.contains(&"libgcc-s1") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the spec without the subpackage of debug symbols.
fn without_package(spec: &str) -> String {
    let mut kept = String::new();
    let mut left_out = false;
    for line in spec.lines() {
        if line.starts_with('%') {
            left_out = ["%package debuginfo", "%description debuginfo", "%files debuginfo"]
                .iter()
                .any(|start| line.starts_with(start));
        }
        if !left_out {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    /// rpm also expands `%` in scripts. If a script contained `${x%%y}`, it would become another
    /// command.
    #[test]
    fn shared_scripts_contain_no_rpm_macro() {
        let scripts = crate::workspace::root().join("packaging/scripts");
        for entry in fs::read_dir(scripts).unwrap() {
            let path = entry.unwrap().path();
            assert!(!fs::read_to_string(&path).unwrap().contains('%'), "{}", path.display());
        }
    }

    #[test]
    fn package_owns_only_the_directories_that_are_its_own() {
        let file = |path: &str| Staged { path: path.to_owned(), mode: Some(0o644) };
        let files =
            [file("/usr/bin/gpushctl"), file("/usr/share/doc/gpush/docs/a.md"), file("/usr/share/doc/gpush/b.md")];
        assert!(own_directories(&files).into_iter().eq(["/usr/share/doc/gpush", "/usr/share/doc/gpush/docs"]));
    }

    #[test]
    fn spec_without_symbols_keeps_the_other_packages() {
        let spec = "%package sim\na\n\n%package debuginfo\nb\n\n%files sim\n%files debuginfo\n%pre\nc\n";
        assert_eq!(without_package(spec), "%package sim\na\n\n%files sim\n%pre\nc\n");
    }
}
