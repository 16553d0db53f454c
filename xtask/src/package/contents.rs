//! The contents of each package: the path and the mode of each file.

use std::path::PathBuf;

use anyhow::Result;

use crate::workspace;

/// A package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Package {
    /// gpushd, gpushctl, the program of Slurm's hooks, and the units.
    Gpush,
    /// Simulated hosts.
    Sim,
    /// Debug symbols of the programs of [`Package::Gpush`].
    Symbols,
}

impl Package {
    /// All packages.
    pub(super) const ALL: [Self; 3] = [Self::Gpush, Self::Sim, Self::Symbols];

    /// Returns the name of the package. Its staged tree has the same name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpush => "gpush",
            Self::Sim => "gpush-sim",
            Self::Symbols => "gpush-dbgsym",
        }
    }
}

/// Where a file of a package comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A built program or library, by file name. Its debug symbols are moved to another package.
    Program(&'static str),
    /// A file of the repository.
    File(&'static str),
    /// A file of the repository, compressed.
    Compressed(&'static str),
    /// All generated files in the directory `target/<first>` whose names end with the second text. Man
    /// pages are compressed.
    Made(&'static str, &'static str),
    /// A symbolic link to this path.
    Link(&'static str),
}

/// A file of a package.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) package: Package,
    pub(super) source: Source,
    /// Path on the host. If it ends with `/`, it is a directory.
    pub(super) path: &'static str,
    pub(super) mode: u32,
}

/// Config files in the packages. If an administrator has changed such a file, and a later version of the package changes
/// it too, dpkg asks which version to keep, and an unattended upgrade fails. So administrators must not need to edit it.
pub(super) const CONFIG: [&str; 1] = ["/etc/needrestart/conf.d/gpush.conf"];

/// The config of gpushd. No package contains this file: the scripts of the packages create it once, and never change it.
pub(super) const CREATED_CONFIG: &str = "/etc/gpush/config.toml";

/// Directory of the documents on the host.
pub(super) const DOCUMENTS: &str = "/usr/share/doc/gpush";

/// Documents of the repository, and directories with documents. Each has the same path below [`DOCUMENTS`] as in the
/// repository, so the links between them work, and `docs/config.md` in a message is a path below [`DOCUMENTS`].
const DOCUMENT_SOURCES: [&str; 7] =
    ["README.md", "CHANGELOG.md", "SECURITY.md", "ARCHITECTURE.md", "docs", "sim/README.md", "sim/mps-sim/README.md"];

/// Returns the paths of the documents, relative to the root of the repository.
///
/// # Errors
/// If the repository cannot be read.
pub(super) fn documents() -> Result<Vec<PathBuf>> {
    let is_document = |file: &PathBuf| DOCUMENT_SOURCES.iter().any(|source| file.starts_with(source));
    Ok(workspace::files()?.into_iter().filter(is_document).collect())
}

/// The program of Slurm's hooks. The first lines of the scripts in `packaging/slurm` name it.
const SLURM_HOOK: &str = "/usr/lib/gpush/gpush-slurm-hook";

const UNITS: &str = "/usr/lib/systemd/system/";

const fn file(source: &'static str, path: &'static str) -> Entry {
    Entry { package: Package::Gpush, source: Source::File(source), path, mode: 0o644 }
}

const fn script(source: &'static str, path: &'static str) -> Entry {
    Entry { package: Package::Gpush, source: Source::File(source), path, mode: 0o755 }
}

const fn program(package: Package, name: &'static str, path: &'static str) -> Entry {
    Entry { package, source: Source::Program(name), path, mode: 0o755 }
}

const fn made(directory: &'static str, end: &'static str, path: &'static str) -> Entry {
    Entry { package: Package::Gpush, source: Source::Made(directory, end), path, mode: 0o644 }
}

/// All files, except those that `stage` and `deb` add: [`documents`], licences, the SBOM, and the changelogs of
/// the package formats.
pub(super) const ENTRIES: &[Entry] = &[
    program(Package::Gpush, "gpushd", "/usr/sbin/gpushd"),
    program(Package::Gpush, "gpushctl", "/usr/bin/gpushctl"),
    program(Package::Gpush, "gpush-slurm-hook", SLURM_HOOK),
    file("systemd/gpushd.service", UNITS),
    file("systemd/gpushd.socket", UNITS),
    file("systemd/gpushd-admin.socket", UNITS),
    file("systemd/gpush-ready.service", UNITS),
    file("systemd/gpush-metrics.service", UNITS),
    file("systemd/gpush-metrics-write.service", UNITS),
    file("systemd/gpush-metrics-write.timer", UNITS),
    file("systemd/gpushd-mps@.service", UNITS),
    file("systemd/gpush.slice", UNITS),
    file("systemd/gpush-mps.slice", UNITS),
    file("systemd/gpush-mps.target", UNITS),
    file("systemd/gpulease-.slice.d/10-defaults.conf", "/usr/lib/systemd/system/gpulease-.slice.d/"),
    file("packaging/sysusers.d/gpush.conf", "/usr/lib/sysusers.d/"),
    file("packaging/tmpfiles.d/gpush.conf", "/usr/lib/tmpfiles.d/"),
    file("packaging/system-preset/80-gpush.preset", "/usr/lib/systemd/system-preset/"),
    file("packaging/needrestart/gpush.conf", "/etc/needrestart/conf.d/"),
    // Scripts for the directories prolog.d and epilog.d of Slurm, and the source of the plugin for
    // `--gpush`.
    script("packaging/slurm/prolog", "/usr/share/gpush/slurm/"),
    script("packaging/slurm/epilog", "/usr/share/gpush/slurm/"),
    script("packaging/slurm/task-prolog", "/usr/share/gpush/slurm/"),
    script("packaging/slurm/health-check", "/usr/share/gpush/slurm/"),
    file("packaging/slurm/spank_gpush.c", "/usr/share/gpush/slurm/"),
    // Alerts for Prometheus and dashboards for Grafana. An administrator loads them on other hosts.
    file("packaging/prometheus/gpush.rules.yml", "/usr/share/gpush/prometheus/"),
    file("packaging/grafana/host.json", "/usr/share/gpush/grafana/"),
    file("packaging/grafana/lease.json", "/usr/share/gpush/grafana/"),
    file("packaging/grafana/month.json", "/usr/share/gpush/grafana/"),
    // The scripts of the packages copy this file to `CREATED_CONFIG`.
    file("packaging/config.toml", "/usr/share/gpush/"),
    file("config.example.toml", "/usr/share/doc/gpush/examples/config.toml"),
    file("packaging/web-config.example.yml", "/usr/share/doc/gpush/examples/web-config.yml"),
    // Documents link to this file.
    Entry {
        package: Package::Gpush,
        source: Source::Link("examples/config.toml"),
        path: "/usr/share/doc/gpush/config.example.toml",
        mode: 0o777,
    },
    made("man", ".1", "/usr/share/man/man1/"),
    made("man", ".5", "/usr/share/man/man5/"),
    made("man", ".8", "/usr/share/man/man8/"),
    made("completions", "gpushctl", "/usr/share/bash-completion/completions/"),
    made("completions", "_gpushctl", "/usr/share/zsh/vendor-completions/"),
    made("completions", "gpushctl.fish", "/usr/share/fish/vendor_completions.d/"),
    Entry {
        package: Package::Gpush,
        source: Source::Compressed("CHANGELOG.md"),
        path: "/usr/share/doc/gpush/changelog.gz",
        mode: 0o644,
    },
    // The program looks for the library in its own directory.
    program(Package::Sim, "gpush-sim", "/usr/lib/gpush-sim/gpush-sim"),
    Entry { package: Package::Sim, source: Source::Made("man-sim", ".1"), path: "/usr/share/man/man1/", mode: 0o644 },
    Entry {
        package: Package::Sim,
        source: Source::Program("libnvidia_ml.so"),
        path: "/usr/lib/gpush-sim/libnvidia_ml.so",
        mode: 0o644,
    },
    Entry {
        package: Package::Sim,
        source: Source::Link("../lib/gpush-sim/gpush-sim"),
        path: "/usr/bin/gpush-sim",
        mode: 0o777,
    },
];

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Component, Path},
    };

    use super::*;
    use crate::links::relative_links;

    /// Returns the path of a link's target, relative to the root of the repository.
    fn target(document: &Path, link: &str) -> PathBuf {
        let mut target = document.parent().unwrap().to_owned();
        for part in Path::new(link).components() {
            if part == Component::ParentDir { assert!(target.pop(), "{link}") } else { target.push(part) }
        }
        target
    }

    #[test]
    fn every_page_for_users_is_in_the_package() {
        let documents = documents().unwrap();
        for entry in fs::read_dir(workspace::root().join("docs")).unwrap() {
            let name = Path::new("docs").join(entry.unwrap().file_name());
            assert!(documents.iter().any(|document| document.starts_with(&name)), "{}", name.display());
        }
    }

    #[test]
    fn links_of_packaged_documents_lead_to_packaged_files() {
        let documents = documents().unwrap();
        let entries = ENTRIES.iter().filter_map(|entry| entry.path.strip_prefix(DOCUMENTS));
        let files: Vec<PathBuf> =
            entries.map(|path| PathBuf::from(path.trim_start_matches('/'))).chain(documents.clone()).collect();
        let mut seen = 0;
        for document in documents.iter().filter(|document| document.extension().is_some_and(|end| end == "md")) {
            let text = fs::read_to_string(workspace::root().join(document)).unwrap();
            for link in relative_links(&text) {
                let target = target(document, link);
                assert!(files.iter().any(|file| file.starts_with(&target)), "{}: {link}", document.display());
                seen += 1;
            }
        }
        assert!(seen > 50, "{seen}");
    }
}
