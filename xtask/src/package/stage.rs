//! The staged trees: one folder for each package, with every file as it will be on the host.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{
    Release,
    build::{GLIBC, Profile},
    contents::{self, DOCUMENTS, ENTRIES, Entry, Package, Source},
    dependencies,
    elf::{self, Glibc},
    output,
};
use crate::{generate, workspace};

/// The staged trees of one run.
#[derive(Debug)]
pub(super) struct Stage {
    folder: PathBuf,
    programs: PathBuf,
    /// `objcopy` for the architecture of the programs.
    objcopy: String,
}

/// A file or symbolic link of a staged tree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Staged {
    /// Path on the host.
    pub(super) path: String,
    /// Mode of a file, or `None` for a symbolic link.
    pub(super) mode: Option<u32>,
}

impl Stage {
    /// Creates the staged trees below `folder`. The programs in `runnable` run on this machine, and
    /// print the man pages and completions.
    ///
    /// # Errors
    /// If a file is missing or cannot be written, or a program needs a newer glibc than [`GLIBC`].
    pub(super) fn create(release: &Release, programs: &Path, runnable: &Path, folder: &Path) -> Result<Self> {
        generate::make_all(runnable)?;
        let objcopy = release.arch.binutils("objcopy")?;
        let stage = Self { folder: folder.join("stage"), programs: programs.to_owned(), objcopy };
        for entry in ENTRIES {
            stage.add(entry, release.profile)?;
        }
        for package in Package::ALL {
            let copyright = stage.path(package, &format!("/usr/share/doc/{}/copyright", package.name()));
            copy(&workspace::root().join("packaging/deb/copyright"), &copyright, 0o644)?;
        }
        let doc = stage.path(Package::Gpush, DOCUMENTS);
        for document in contents::documents()? {
            copy(&workspace::root().join(&document), &doc.join(&document), 0o644)?;
        }
        let (licences, sbom) = dependencies::describe(release)?;
        write(&doc.join("THIRD-PARTY-LICENSES"), licences.as_bytes(), 0o644)?;
        compress(&doc.join("THIRD-PARTY-LICENSES"))?;
        write(&doc.join("sbom.cdx.json"), sbom.as_bytes(), 0o644)?;
        compress(&doc.join("sbom.cdx.json"))?;
        stage.set_times(release.epoch)?;
        stage.check_glibc(release.profile)?;
        Ok(stage)
    }

    /// Returns the root of a package's tree.
    pub(super) fn root(&self, package: Package) -> PathBuf {
        self.folder.join(package.name())
    }

    /// Returns the path in a package's tree that corresponds to a path on the host.
    pub(super) fn path(&self, package: Package, path: &str) -> PathBuf {
        self.root(package).join(path.trim_start_matches('/'))
    }

    /// Returns the total size of a package's files in bytes.
    ///
    /// # Errors
    /// If the tree cannot be read.
    pub(super) fn size(&self, package: Package) -> Result<u64> {
        let mut size = 0;
        for staged in self.files(package)? {
            size += fs::symlink_metadata(self.path(package, &staged.path))?.len();
        }
        Ok(size)
    }

    /// Returns the files of a package, sorted by path.
    ///
    /// # Errors
    /// If the tree cannot be read.
    pub(super) fn files(&self, package: Package) -> Result<Vec<Staged>> {
        let root = self.root(package);
        let mut found = Vec::new();
        for path in walk(&root)? {
            let meta = fs::symlink_metadata(&path)?;
            if meta.is_dir() {
                continue;
            }
            let mode = meta.is_file().then(|| meta.permissions().mode() & 0o7777);
            found.push(Staged { path: format!("/{}", path.strip_prefix(&root)?.display()), mode });
        }
        found.sort();
        Ok(found)
    }

    /// Returns the programs and libraries of a package.
    pub(super) fn programs(&self, package: Package) -> Vec<PathBuf> {
        let programs = ENTRIES.iter().filter(|entry| entry.package == package);
        programs
            .filter(|entry| matches!(entry.source, Source::Program(_)))
            .map(|entry| self.path(package, entry.path))
            .collect()
    }

    /// Returns the newest glibc version that any program needs, such as `2.31`.
    ///
    /// # Errors
    /// If a program cannot be examined.
    pub(super) fn glibc(&self) -> Result<String> {
        let mut newest = (0, 0);
        for program in Package::ALL.iter().flat_map(|package| self.programs(*package)) {
            newest = newest.max(elf::glibc(&program)?);
        }
        Ok(format!("{}.{}", newest.0, newest.1))
    }

    fn check_glibc(&self, profile: Profile) -> Result<()> {
        let floor: Vec<u32> = GLIBC.split('.').filter_map(|number| number.parse().ok()).collect();
        let floor: Glibc = (floor[0], floor[1]);
        for program in Package::ALL.iter().flat_map(|package| self.programs(*package)) {
            let needed = elf::glibc(&program)?;
            if profile == Profile::Release && needed > floor {
                bail!("{} needs glibc {}.{}, and the floor is {GLIBC}", program.display(), needed.0, needed.1);
            }
        }
        Ok(())
    }

    fn add(&self, entry: &Entry, profile: Profile) -> Result<()> {
        let root = workspace::root();
        match entry.source {
            Source::Program(name) => self.add_program(name, entry, profile),
            Source::File(source) => copy(&root.join(source), &self.target(entry, Path::new(source)), entry.mode),
            Source::Compressed(source) => {
                let plain = self.path(entry.package, entry.path.trim_end_matches(".gz"));
                copy(&root.join(source), &plain, entry.mode)?;
                compress(&plain)
            }
            Source::Made(folder, end) => self.add_made(entry, &workspace::target().join(folder), end),
            Source::Link(to) => {
                let link = self.path(entry.package, entry.path);
                create_parent(&link)?;
                symlink(to, &link).with_context(|| format!("cannot create {}", link.display()))
            }
        }
    }

    /// Returns the path in the staged tree to which an entry copies this source file.
    fn target(&self, entry: &Entry, source: &Path) -> PathBuf {
        let path = self.path(entry.package, entry.path);
        if entry.path.ends_with('/') { path.join(source.file_name().unwrap_or_default()) } else { path }
    }

    fn add_made(&self, entry: &Entry, folder: &Path, end: &str) -> Result<()> {
        let mut found = false;
        for made in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let made = made?.path();
            let name = made.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_page = end.starts_with('.');
            if !(if is_page { name.ends_with(end) } else { name == end }) {
                continue;
            }
            found = true;
            let target = self.target(entry, &made);
            copy(&made, &target, entry.mode)?;
            if is_page {
                compress(&target)?;
            }
        }
        if !found {
            bail!("{} has no file {end}", folder.display());
        }
        Ok(())
    }

    /// Copies a program, and moves its debug symbols to the package of debug symbols. A debugger
    /// finds the symbols by their build id.
    fn add_program(&self, name: &str, entry: &Entry, profile: Profile) -> Result<()> {
        let (built, target) = (self.programs.join(name), self.path(entry.package, entry.path));
        copy(&built, &target, entry.mode)?;
        if profile == Profile::Debug {
            output(Command::new(&self.objcopy).arg("--strip-debug").arg(&target))?;
            return Ok(());
        }
        let id = build_id(&built)?;
        let (folder, rest) = id.split_at(2);
        let symbols = self.path(Package::Symbols, &format!("/usr/lib/debug/.build-id/{folder}/{rest}.debug"));
        create_parent(&symbols)?;
        let mut split = Command::new(&self.objcopy);
        output(split.args(["--only-keep-debug", "--compress-debug-sections"]).arg(&built).arg(&symbols))?;
        fs::set_permissions(&symbols, fs::Permissions::from_mode(0o644))?;
        output(Command::new(&self.objcopy).arg("--strip-unneeded").arg(&target))?;
        Ok(())
    }

    /// Sets the time of every file and folder to the time of the release.
    fn set_times(&self, epoch: u64) -> Result<()> {
        let mut paths = walk(&self.folder)?;
        paths.push(self.folder.clone());
        for path in paths {
            output(Command::new("touch").args(["--no-dereference", "--date", &format!("@{epoch}")]).arg(&path))?;
        }
        Ok(())
    }
}

/// Returns the build id of a program, in hexadecimal digits.
fn build_id(program: &Path) -> Result<String> {
    let notes = output(Command::new("readelf").arg("--notes").arg(program))?;
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID:").map(|id| id.trim().to_owned()));
    id.filter(|id| id.len() > 2).with_context(|| format!("{} has no build id", program.display()))
}

/// Returns all paths below a folder, deepest first.
fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(walk(&entry.path())?);
        }
        found.push(entry.path());
    }
    Ok(found)
}

fn create_parent(path: &Path) -> Result<()> {
    let folder = path.parent().context("a staged path has a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    create_parent(to)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(|| to.display().to_string())
}

fn write(to: &Path, content: &[u8], mode: u32) -> Result<()> {
    create_parent(to)?;
    fs::write(to, content).with_context(|| format!("cannot write {}", to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(|| to.display().to_string())
}

/// Compresses a file in place. The result contains neither the name nor the time of the file.
fn compress(path: &Path) -> Result<()> {
    output(Command::new("gzip").args(["-9", "--no-name", "--force"]).arg(path)).map(|_| ())
}

/// Returns the MD5 sums of the files below a folder, in the format of Debian's `md5sums`.
///
/// # Errors
/// If `md5sum` fails.
pub(super) fn md5sums(tree: &Path) -> Result<String> {
    let mut lines = BTreeMap::new();
    for path in walk(tree)?.into_iter().filter(|path| !path.is_symlink() && path.is_file()) {
        let printed = output(Command::new("md5sum").arg(&path))?;
        let sum = printed.split_whitespace().next().unwrap_or_default().to_owned();
        lines.insert(path.strip_prefix(tree)?.display().to_string(), sum);
    }
    Ok(lines.into_iter().map(|(path, sum)| format!("{sum}  {path}\n")).collect())
}
