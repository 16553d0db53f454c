//! The libraries in the programs: their licences, and a bill of materials (SBOM) as CycloneDX JSON.
//!
//! The data comes from `cargo metadata`. It includes only the packages on which `gpushd`, `gpushctl`
//! and `gpush-slurm-hook` depend through normal dependencies.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Release, output};
use crate::workspace;

/// The programs whose dependencies are listed.
const PROGRAMS: [&str; 3] = ["gpushd", "gpushctl", "gpush-slurm-hook"];

/// Prefixes of the names of licence and notice files.
const LICENCE_FILES: [&str; 4] = ["license", "licence", "copying", "notice"];

/// Returns the text of all licences, and the SBOM.
///
/// # Errors
/// If `cargo metadata` fails, or its output has an unknown form.
pub(super) fn describe(release: &Release) -> Result<(String, String)> {
    let triple = release.arch.triple();
    let mut cargo = workspace::cargo();
    cargo.args(["metadata", "--locked", "--format-version", "1", "--filter-platform", &triple]);
    let metadata: Value = serde_json::from_str(&output(&mut cargo)?).context("`cargo metadata` printed no JSON")?;
    let reached = reached(&metadata)?;
    let mut packages: Vec<&Value> = array(&metadata, "packages")?
        .iter()
        .filter(|package| reached.contains(text(package, "id")) && !package["source"].is_null())
        .collect();
    packages.sort_by_key(|package| (text(package, "name"), text(package, "version")));
    Ok((licences(&packages)?, sbom(release, &packages)?))
}

/// Returns the ids of all packages on which the programs depend through normal dependencies.
fn reached(metadata: &Value) -> Result<BTreeSet<&str>> {
    let mut next: Vec<&str> = array(metadata, "packages")?
        .iter()
        .filter(|package| PROGRAMS.contains(&text(package, "name")))
        .map(|package| text(package, "id"))
        .collect();
    let nodes = array(&metadata["resolve"], "nodes")?;
    let nodes: BTreeMap<&str, &Value> = nodes.iter().map(|node| (text(node, "id"), node)).collect();
    let mut reached = BTreeSet::new();
    while let Some(id) = next.pop() {
        if !reached.insert(id) {
            continue;
        }
        for dependency in array(nodes.get(id).context("cargo metadata names an unknown package")?, "deps")? {
            let is_normal = array(dependency, "dep_kinds")?.iter().any(|kind| kind["kind"].is_null());
            if is_normal {
                next.push(text(dependency, "pkg"));
            }
        }
    }
    Ok(reached)
}

fn licences(packages: &[&Value]) -> Result<String> {
    let mut whole = String::from("Libraries that the programs of gpush contain, with their licences.\n");
    // Many libraries have the same licence text. Print each text once, below the names of all its
    // libraries.
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages {
        let name = format!("{} {}", text(package, "name"), text(package, "version"));
        writeln!(whole, "  {name}: {}", text(package, "license"))?;
        let folder = Path::new(text(package, "manifest_path")).parent().context("a manifest is in a folder")?;
        for file in licence_files(folder)? {
            texts.entry(file.trim().to_owned()).or_default().push(name.clone());
        }
    }
    for (licence, names) in texts {
        write!(whole, "\n{}\n{}\n\n{licence}\n", "-".repeat(80), names.join(", "))?;
    }
    Ok(whole)
}

fn licence_files(folder: &Path) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_file() && LICENCE_FILES.iter().any(|start| name.starts_with(start)) {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())).collect()
}

fn sbom(release: &Release, packages: &[&Value]) -> Result<String> {
    let component = |package: &&Value| {
        let (name, version) = (text(package, "name"), text(package, "version"));
        let mut component = json!({
            "type": "library",
            "name": name,
            "version": version,
            "purl": format!("pkg:cargo/{name}@{version}"),
        });
        if let Some(licence) = package["license"].as_str() {
            component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
        }
        component
    };
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": { "type": "application", "name": "gpush", "version": release.version } },
        "components": packages.iter().map(component).collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn array<'v>(value: &'v Value, name: &str) -> Result<&'v Vec<Value>> {
    value[name].as_array().with_context(|| format!("cargo metadata has no list {name}"))
}

/// Returns a text field, or an empty text if the field is absent.
fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reached_packages_leave_out_build_and_test_dependencies() {
        let dependency = |id: &str, kind: Value| json!({ "pkg": id, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [{ "name": "gpushd", "id": "d" }, { "name": "x", "id": "x" }],
            "resolve": { "nodes": [
                { "id": "d", "deps": [dependency("x", Value::Null), dependency("y", json!("dev"))] },
                { "id": "x", "deps": [dependency("z", json!("build"))] },
            ] },
        });
        assert_eq!(reached(&metadata).unwrap(), ["d", "x"].into());
    }
}
