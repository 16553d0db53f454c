//! Dependencies between the agent's top-level modules.
//!
//! The table in ARCHITECTURE.md lists the modules from the highest layer to the lowest, each with
//! the modules that it uses. A module may use only modules in lower rows, so there is no cycle.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use anyhow::{Context, Result, bail};

use super::{
    source::{CrateSource, Position, Reference},
    table::Table,
};
use crate::workspace;

const DOCUMENT: &str = "ARCHITECTURE.md";
const SRC: &str = "agent/src";

/// The name of the crate's root, `main.rs`, in the table.
const ROOT: &str = "main";

/// The top-level modules of a crate, and the dependencies between them.
#[derive(Debug)]
pub(super) struct ModuleGraph {
    /// Names of the modules, including [`ROOT`].
    pub(super) modules: BTreeSet<String>,
    /// For each dependency, its first position. The key is the using module and the used module.
    pub(super) uses: BTreeMap<(String, String), Position>,
}

impl ModuleGraph {
    pub(super) fn of(source: &CrateSource) -> Self {
        let name = |path: &[String]| path.first().map_or(ROOT, String::as_str).to_owned();
        let modules: BTreeSet<String> = source.files.keys().map(|module| name(module)).collect();
        let mut uses = BTreeMap::new();
        for Reference { from, to, place, .. } in &source.references {
            let from = name(from);
            // If a name in the root is not a module, it is an item or a macro of the root.
            let to = to.first().filter(|name| modules.contains(*name)).map_or(ROOT, String::as_str).to_owned();
            if from != to {
                uses.entry((from, to))
                    .and_modify(|first: &mut Position| *first = place.clone().min(first.clone()))
                    .or_insert_with(|| place.clone());
            }
        }
        Self { modules, uses }
    }
}

/// Dependencies. Each is a pair: the using module, and the used module.
type Arrows = BTreeSet<(String, String)>;

/// Checks the dependencies between the agent's modules. Returns a summary.
///
/// # Errors
/// If the code and the table differ. The error names every difference.
pub(crate) fn check() -> Result<String> {
    let (source, table) = (source()?, Table::find(&read(DOCUMENT)?)?);
    let wrong = violations(&source, &table);
    if !wrong.is_empty() {
        bail!("the agent's modules do not match the table in {DOCUMENT}:\n  {}", wrong.join("\n  "));
    }
    Ok(format!(
        "{} modules of the agent, {} arrows between them, none of them up",
        source.modules.len(),
        source.uses.len()
    ))
}

/// Updates the lists of used modules in the table.
///
/// # Errors
/// If a module has no row, because a person must decide on the position of the row.
pub(crate) fn write_table() -> Result<()> {
    let (source, text) = (source()?, read(DOCUMENT)?);
    let table = updated(&source, Table::find(&text)?);
    fs::write(path(DOCUMENT), table.replace_in(&text)?).with_context(|| format!("cannot write {DOCUMENT}"))
}

fn path(name: &str) -> PathBuf {
    workspace::root().join(name)
}

fn read(name: &str) -> Result<String> {
    fs::read_to_string(path(name)).with_context(|| format!("cannot read {name}"))
}

fn source() -> Result<ModuleGraph> {
    Ok(ModuleGraph::of(&CrateSource::read(&path(SRC))?))
}

/// Returns the dependencies on modules in higher rows of the table.
fn upward(source: &ModuleGraph, table: &Table) -> Arrows {
    let points_down =
        |from: &str, to: &str| table.rank(from).is_none_or(|from| table.rank(to).is_none_or(|to| from < to));
    source.uses.keys().filter(|(from, to)| !points_down(from, to)).cloned().collect()
}

/// Returns the table with the modules that the code uses. Rows of modules that no longer exist are
/// left out.
fn updated(source: &ModuleGraph, mut table: Table) -> Table {
    let upward = upward(source, &table);
    table.rows.retain(|row| source.modules.contains(&row.module));
    for row in &mut table.rows {
        let own = source.uses.keys().filter(|arrow| arrow.0 == row.module && !upward.contains(*arrow));
        row.uses = own.map(|(_, to)| to.clone()).collect();
    }
    table
}

fn violations(source: &ModuleGraph, table: &Table) -> Vec<String> {
    let mut wrong = Vec::new();
    for module in source.modules.iter().filter(|module| table.rank(module).is_none()) {
        wrong.push(format!("`{module}` has no row: add one above the modules that it uses"));
    }
    let upward = upward(source, table);
    for ((from, to), place) in &source.uses {
        let place = format!("{SRC}/{}:{}: `{from}` uses `{to}`", place.file.display(), place.line);
        let arrow = (from.clone(), to.clone());
        if upward.contains(&arrow) {
            let cycle = path_between(source, to, from)
                .map_or(String::new(), |path| format!(", and closes the cycle {from} → {}", path.join(" → ")));
            wrong.push(format!("{place}, which is further up{cycle}"));
        } else if table.rows.iter().any(|row| row.module == *from && !row.uses.contains(to)) {
            wrong.push(format!("{place}, which its row does not list: `cargo xtask arrows --write` adds it"));
        }
    }
    for row in &table.rows {
        if !source.modules.contains(&row.module) {
            wrong.push(format!("`{}` has a row, but there is no such module in {SRC}", row.module));
            continue;
        }
        for to in &row.uses {
            let arrow = (row.module.clone(), to.clone());
            if !source.uses.contains_key(&arrow) || upward.contains(&arrow) {
                let why = if upward.contains(&arrow) { "which is further up" } else { "but does not use it" };
                wrong.push(format!(
                    "the row of `{}` lists `{to}`, {why}: `cargo xtask arrows --write` removes it",
                    arrow.0
                ));
            }
        }
    }
    wrong
}

/// Returns the modules that a module uses.
fn used_by<'a>(source: &'a ModuleGraph, module: &'a str) -> impl Iterator<Item = &'a str> {
    source.uses.keys().filter(move |(from, _)| from == module).map(|(_, to)| to.as_str())
}

/// Returns a shortest path of dependencies from one module to another, including both modules.
fn path_between<'a>(source: &'a ModuleGraph, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut came_from: BTreeMap<&str, Option<&str>> = BTreeMap::from([(from, None)]);
    let mut open = std::collections::VecDeque::from([from]);
    while let Some(module) = open.pop_front() {
        if module == to {
            let mut path: Vec<&str> = std::iter::successors(Some(module), |at| came_from[at]).collect();
            path.reverse();
            return Some(path);
        }
        for next in used_by(source, module) {
            came_from.entry(next).or_insert_with(|| {
                open.push_back(next);
                Some(module)
            });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "| layer | module | uses |\n|---|---|---|\n| top | `main` | `http` |\n| | `http` | `state` |\n\
                         | low | `state` | |\n";

    fn crate_with(arrows: &[(&str, &str)]) -> ModuleGraph {
        let place = Position { file: "x.rs".into(), line: 7 };
        ModuleGraph {
            modules: ["main", "http", "state"].map(str::to_owned).into(),
            uses: arrows.iter().map(|(from, to)| (((*from).to_owned(), (*to).to_owned()), place.clone())).collect(),
        }
    }

    fn wrong(arrows: &[(&str, &str)]) -> Vec<String> {
        violations(&crate_with(arrows), &Table::find(TABLE).unwrap())
    }

    const SOUND: [(&str, &str); 2] = [("main", "http"), ("http", "state")];

    #[test]
    fn modules_of_the_agent_match_the_table() {
        println!("{}", check().unwrap());
    }

    #[test]
    fn cycle_of_modules_is_an_error() {
        assert_eq!(wrong(&SOUND), Vec::<String>::new());
        let planted = [SOUND[0], SOUND[1], ("state", "http")];
        assert_eq!(
            wrong(&planted),
            ["agent/src/x.rs:7: `state` uses `http`, which is further up, and closes the cycle state → http → state"]
        );
    }

    #[test]
    fn dependency_missing_in_the_table_is_an_error() {
        let arrows = [SOUND[0], SOUND[1], ("main", "state")];
        assert_eq!(wrong(&arrows).len(), 1);
        let table = updated(&crate_with(&arrows), Table::find(TABLE).unwrap());
        assert_eq!(violations(&crate_with(&arrows), &table), Vec::<String>::new());
    }

    #[test]
    fn unused_entry_and_missing_module_are_errors() {
        assert!(wrong(&SOUND[..1])[0].contains("lists `state`, but does not use it"));
        let mut source = crate_with(&SOUND);
        source.modules.insert("new".to_owned());
        let table = Table::find(TABLE).unwrap();
        assert_eq!(violations(&source, &table), ["`new` has no row: add one above the modules that it uses"]);
        source = crate_with(&SOUND[..1]);
        source.modules.remove("state");
        assert!(violations(&source, &table)[0].contains("lists `state`"));
        assert!(violations(&source, &table)[1].contains("there is no such module"));
    }
}
