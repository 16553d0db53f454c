//! Checks the names of types: within a crate, one name must mean one thing.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::workspace;

/// Names that several types of one crate have. In the first six entries, the types have the same
/// purpose in each module. The types of the other entries should get different names. Do not add an
/// entry.
const KNOWN: &[(&str, &str)] = &[
    ("agent", "ListParameters"),
    ("sim/gpush-sim", "Action"),
    ("sim/gpush-sim", "Add"),
    ("xtask", "Arguments"),
    ("crates/core", "Instant"),
    ("crates/core", "Verdict"),
    ("crates/mps", "Daemon"),
    ("sim/gpush-sim", "Asked"),
    ("sim/gpush-sim", "Command"),
    ("sim/mps-sim", "Kind"),
    ("sim/mps-sim", "Server"),
    ("sim/silicon", "Rules"),
];

/// Checks every source file of crates that ship. Returns a summary.
pub(crate) fn check() -> Result<String> {
    let mut types: BTreeMap<(String, String), Vec<PathBuf>> = BTreeMap::new();
    for file in workspace::files()? {
        let Some(krate) = crate_of(&file) else { continue };
        let path = workspace::root().join(&file);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for name in defined(&text) {
            types.entry((krate.clone(), name.to_owned())).or_default().push(file.clone());
        }
    }
    let several: BTreeMap<_, _> = types.iter().filter(|(_, files)| files.len() > 1).collect();
    let known: BTreeSet<_> = KNOWN.iter().map(|(krate, name)| ((*krate).to_owned(), (*name).to_owned())).collect();
    let mut wrong = Vec::new();
    for (key, files) in &several {
        if !known.contains(key) {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            wrong.push(format!("{}: {} types are named `{}`: {}", key.0, files.len(), key.1, files.join(", ")));
        }
    }
    for key in known.iter().filter(|key| !several.contains_key(key)) {
        wrong
            .push(format!("{}: only one type is named `{}`: remove it from KNOWN in xtask/src/names.rs", key.0, key.1));
    }
    if !wrong.is_empty() {
        bail!("{} names of types:\n  {}", wrong.len(), wrong.join("\n  "));
    }
    Ok(format!("names are clean: {} types, {} names with an exception", types.len(), KNOWN.len()))
}

/// Returns the folder of the crate to which a source file belongs. Returns `None` for a file of
/// tests.
fn crate_of(file: &Path) -> Option<String> {
    let parts: Vec<&str> = file.iter().filter_map(|part| part.to_str()).collect();
    let is_test = parts.iter().any(|part| *part == "tests" || *part == "benches") || parts.ends_with(&["tests.rs"]);
    if is_test || file.extension().is_none_or(|extension| extension != "rs") {
        return None;
    }
    match parts.as_slice() {
        [group @ ("crates" | "sim"), name, "src", ..] => Some(format!("{group}/{name}")),
        [name, "src", ..] => Some((*name).to_owned()),
        _ => None,
    }
}

/// Returns the names of the types that a file defines, without types in functions and in unit
/// tests.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    let shipped = text.split("#[cfg(test)]\nmod").next().unwrap_or_default();
    shipped.lines().filter_map(|line| {
        let line = match line.strip_prefix("pub") {
            Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
            Some(rest) => rest.strip_prefix(' ')?,
            None => line,
        };
        let (word, rest) = line.split_once(' ')?;
        let is_type = ["struct", "enum", "union", "trait", "type"].contains(&word);
        is_type.then(|| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_a_file_are_found_in_every_visibility() {
        let text = "struct A;\npub enum B<T> {}\npub(crate) type C = u8;\n    struct Inner;\nfn struct_d() {}\n\
                    #[cfg(test)]\nmod tests {}\nstruct E;\n";
        assert_eq!(defined(text).collect::<Vec<_>>(), ["A", "B", "C"]);
    }

    #[test]
    fn files_of_tests_have_no_crate() {
        assert_eq!(crate_of(Path::new("crates/core/src/plan/mod.rs")).as_deref(), Some("crates/core"));
        assert_eq!(crate_of(Path::new("agent/src/main.rs")).as_deref(), Some("agent"));
        for test in ["tests/src/lib.rs", "crates/core/src/plan/tests.rs", "crates/mps/tests/all.rs", "agent/Cargo.toml"]
        {
            assert_eq!(crate_of(Path::new(test)), None, "{test}");
        }
    }
}
