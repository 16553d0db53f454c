//! The contents of each package: the path and the mode of each file.

/// A package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Package {
    /// gpushd, gpushctl and their units.
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
    /// All generated files in the folder `target/<first>` whose names end with the second text. Man
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
    /// Path on the host. If it ends with `/`, it is a folder.
    pub(super) path: &'static str,
    pub(super) mode: u32,
}

/// Config files. If an administrator has changed them, an upgrade keeps the changes.
pub(super) const CONFIG: [&str; 2] = ["/etc/gpush/config.toml", "/etc/needrestart/conf.d/gpush.conf"];

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

const fn made(folder: &'static str, end: &'static str, path: &'static str) -> Entry {
    Entry { package: Package::Gpush, source: Source::Made(folder, end), path, mode: 0o644 }
}

/// All files, except those that `stage` and `deb` add: licences, the SBOM, and the changelogs of
/// the package formats.
pub(super) const ENTRIES: &[Entry] = &[
    program(Package::Gpush, "gpushd", "/usr/sbin/gpushd"),
    program(Package::Gpush, "gpushctl", "/usr/bin/gpushctl"),
    file("systemd/gpushd.service", UNITS),
    file("systemd/gpushd.socket", UNITS),
    file("systemd/gpushd-admin.socket", UNITS),
    file("systemd/gpush-ready.service", UNITS),
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
    file("packaging/slurm/spank_gpush.c", "/usr/share/gpush/slurm/"),
    file("config.example.toml", "/etc/gpush/config.toml"),
    file("config.example.toml", "/usr/share/doc/gpush/examples/config.toml"),
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
    // The program looks for the library in its own folder.
    program(Package::Sim, "gpush-sim", "/usr/lib/gpush-sim/gpush-sim"),
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
