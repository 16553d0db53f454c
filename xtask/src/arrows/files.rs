//! Cycles between the files of a crate: files that use each other, directly or through other files.
//!
//! A file that is in no cycle can be read with only the files below it. The folder of a module and the module's own
//! file belong together: a `mod.rs` declares what its files share and calls them, so dependencies between a module and
//! the modules inside it do not count. A path through a re-export counts as a path to the file that defines the item.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::source::{CrateSource, ItemPath, Position};
use crate::workspace;

/// Folders that contain crates, and folders that are crates.
const GROUPS: [&str; 2] = ["crates", "sim"];
const CRATES: [&str; 4] = ["agent", "ctl", "tests", "xtask"];

/// Checks that no files of a crate use each other in a cycle. Returns a summary.
///
/// # Errors
/// If there is a cycle. The error names the files of each cycle, and their dependencies.
pub(crate) fn check() -> Result<String> {
    let root = workspace::root();
    let mut folders: Vec<PathBuf> = CRATES.map(|name| root.join(name)).into();
    for group in GROUPS {
        let path = root.join(group);
        let entries = fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?;
        for entry in entries {
            folders.push(entry?.path());
        }
    }
    let (mut files, mut found) = (0, Vec::new());
    for src in folders.iter().map(|folder| folder.join("src")).filter(|src| src.is_dir()) {
        let graph = FileGraph::of(&CrateSource::read(&src)?);
        files += graph.files.len();
        let name = src.strip_prefix(&root).unwrap_or(&src);
        found.extend(graph.cycles().iter().map(|cycle| graph.describe(cycle, name)));
    }
    if !found.is_empty() {
        bail!("files use each other in cycles:\n{}", found.join("\n"));
    }
    Ok(format!("{files} files, no cycle between them"))
}

/// The files of a crate, and the dependencies between them.
struct FileGraph {
    /// The files, relative to the crate's `src`, sorted.
    files: Vec<PathBuf>,
    /// For each file, the files that it uses, and where it uses each of them first. Files are positions in `files`.
    uses: Vec<BTreeMap<usize, Position>>,
}

impl FileGraph {
    fn of(source: &CrateSource) -> Self {
        let files: Vec<PathBuf> = source.files.values().cloned().collect::<BTreeSet<_>>().into_iter().collect();
        let position = |file: &Path| files.binary_search_by(|other| other.as_path().cmp(file)).ok();
        let mut uses = vec![BTreeMap::new(); files.len()];
        for one in &source.references {
            let Some(module) = defining_module(source, &one.to) else { continue };
            if module.starts_with(&one.from) || one.from.starts_with(&module) {
                continue;
            }
            let Some(to) = source.files.get(&module).and_then(|file| position(file)) else { continue };
            if let Some(from) = position(&one.place.file).filter(|from| *from != to) {
                let first: &mut Position = uses[from].entry(to).or_insert_with(|| one.place.clone());
                *first = first.clone().min(one.place.clone());
            }
        }
        Self { files, uses }
    }

    /// Returns the cycles: the sets of two or more files of which each file uses each other file, directly or through
    /// other files.
    fn cycles(&self) -> Vec<BTreeSet<usize>> {
        let reached: Vec<BTreeSet<usize>> = (0..self.files.len()).map(|file| self.reached(file)).collect();
        let mut cycles = BTreeSet::new();
        for (file, below) in reached.iter().enumerate().filter(|(file, below)| below.contains(file)) {
            cycles.insert(below.iter().copied().filter(|other| reached[*other].contains(&file)).collect());
        }
        cycles.into_iter().collect()
    }

    /// Returns the files that a file uses, directly or through other files.
    fn reached(&self, file: usize) -> BTreeSet<usize> {
        let (mut reached, mut next) = (BTreeSet::new(), vec![file]);
        while let Some(one) = next.pop() {
            next.extend(self.uses[one].keys().filter(|used| reached.insert(**used)));
        }
        reached
    }

    /// Describes a cycle: each file with its dependencies on the others.
    fn describe(&self, cycle: &BTreeSet<usize>, src: &Path) -> String {
        let mut lines = vec![format!("  {} files of {}:", cycle.len(), src.display())];
        for file in cycle {
            for (used, place) in self.uses[*file].iter().filter(|(used, _)| cycle.contains(used)) {
                let name = self.files[*used].display();
                lines.push(format!("    {}:{} uses {name}", place.file.display(), place.line));
            }
        }
        lines.join("\n")
    }
}

/// Returns the module that defines what a path leads to; `None` if the path leads out of the crate.
fn defining_module(source: &CrateSource, path: &[String]) -> Option<ItemPath> {
    let mut path = path.to_vec();
    // A chain of re-exports has an end, because the crate compiles. The limit is for code that does not.
    for _ in 0..16 {
        let re_exported = (1..=path.len()).find_map(|end| Some((end, source.re_exports.get(&path[..end])?)));
        match re_exported {
            Some((end, to)) if to.as_slice() != &path[..end] => path = [to.as_slice(), &path[end..]].concat(),
            _ => break,
        }
    }
    (0..=path.len()).rev().map(|end| &path[..end]).find(|module| source.files.contains_key(*module)).map(<[_]>::to_vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(files: &[(&str, &str)]) -> FileGraph {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        FileGraph::of(&CrateSource::read(folder.path()).unwrap())
    }

    fn cycles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let graph = graph(files);
        let names = |cycle: BTreeSet<usize>| cycle.iter().map(|at| graph.files[*at].display().to_string()).collect();
        graph.cycles().into_iter().map(names).collect()
    }

    #[test]
    fn files_that_use_each_other_are_a_cycle() {
        let a = ("a/mod.rs", "mod b;\nmod c;\nmod d;\n");
        let files = [
            ("lib.rs", "mod a;\n"),
            a,
            ("a/b.rs", "use super::c::X;\npub struct B;\n"),
            ("a/c.rs", "pub struct X;\nfn f() { super::d::g() }\n"),
            ("a/d.rs", "pub fn g() { crate::a::b::B; }\n"),
        ];
        assert_eq!(cycles(&files), [["a/b.rs", "a/c.rs", "a/d.rs"]]);
        let sound = [files[0], a, files[2], files[3], ("a/d.rs", "pub fn g() {}\n")];
        assert_eq!(cycles(&sound), Vec::<Vec<String>>::new());
    }

    #[test]
    fn re_export_leads_to_the_file_that_defines_the_item() {
        let files = [
            ("main.rs", "mod a;\n"),
            ("a/mod.rs", "mod b;\nmod c;\npub use self::{b::B, c::C as Other};\n"),
            ("a/b.rs", "use super::Other;\npub struct B;\n"),
            ("a/c.rs", "use crate::a::B;\npub struct C;\n"),
        ];
        assert_eq!(cycles(&files), [["a/b.rs", "a/c.rs"]]);
    }

    #[test]
    fn module_and_the_modules_inside_it_are_no_cycle() {
        let files = [
            ("lib.rs", "mod a;\n"),
            ("a.rs", "mod b;\npub struct A;\nfn f() { self::b::g() }\n"),
            ("a/b.rs", "use super::A;\npub fn g() {}\n"),
        ];
        assert_eq!(cycles(&files), Vec::<Vec<String>>::new());
    }
}
