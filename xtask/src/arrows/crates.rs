//! Checks the dependencies between crates, which ARCHITECTURE.md shows.
//!
//! The check reads normal dependencies from `cargo metadata`. Some crates must not depend on
//! certain crates, for example because they do no I/O. For these crates, the check also follows
//! indirect dependencies. Tests may use the simulator, so the check does not limit
//! dev-dependencies.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace;

/// For each crate of the workspace, the crates of the workspace on which it may depend. A new crate
/// needs an entry here.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("gpush-geometry", &[]),
    ("gpush-api", &[]),
    ("gpush-core", &["gpush-api", "gpush-geometry"]),
    ("gpush-advice", &["gpush-api", "gpush-core"]),
    ("gpush-nvml", &["gpush-api", "gpush-core", "gpush-locked"]),
    ("gpush-host", &["gpush-api", "gpush-core", "gpush-locked"]),
    ("gpush-mps", &["gpush-api", "gpush-core", "gpush-host", "gpush-locked"]),
    ("gpush-doctor", &["gpush-api", "gpush-core", "gpush-host", "gpush-mps"]),
    ("gpush-client", &["gpush-api"]),
    ("gpush-store", &["gpush-api", "gpush-core", "gpush-locked", "gpush-usage"]),
    ("gpush-usage", &["gpush-api", "gpush-core"]),
    ("gpush-slurm-hook", &["gpush-api", "gpush-client", "gpush-core", "gpush-host"]),
    ("gpush-openmetrics", &[]),
    ("gpush-man", &[]),
    ("gpush-locked", &[]),
    (
        "gpushd",
        &[
            "gpush-api",
            "gpush-core",
            "gpush-host",
            "gpush-locked",
            "gpush-man",
            "gpush-mps",
            "gpush-nvml",
            "gpush-openmetrics",
            "gpush-store",
            "gpush-usage",
        ],
    ),
    (
        "gpushctl",
        &[
            "gpush-advice",
            "gpush-api",
            "gpush-client",
            "gpush-core",
            "gpush-doctor",
            "gpush-host",
            "gpush-locked",
            "gpush-man",
            "gpush-openmetrics",
            "gpush-slurm-hook",
        ],
    ),
    ("silicon", &["gpush-geometry", "gpush-locked"]),
    ("nvml-sim", &["silicon", "gpush-geometry", "gpush-locked"]),
    ("gpush-sim", &["silicon", "gpush-geometry", "gpush-man", "mps-sim"]),
    ("mps-sim", &["silicon", "gpush-locked"]),
    ("gpush-tests", &["gpush-api", "gpush-client", "gpush-core", "gpush-geometry", "gpush-nvml", "silicon"]),
    ("xtask", &["gpush-api", "gpush-client", "gpush-core", "gpush-geometry", "gpush-nvml"]),
];

/// Each entry is a crate, the crates on which it must not depend (even indirectly), and the reason.
/// A `*` at the end of a name matches any ending.
const MUST_NOT_REACH: &[(&str, &[&str], &str)] = &[
    (
        "gpush-core",
        &["tokio*", "nvml-wrapper*", "nix", "libc", "rustix", "hyper*", "axum", "tracing*", "libloading"],
        "core decides and does no I/O",
    ),
    (
        "gpush-usage",
        &["tokio*", "nvml-wrapper*", "nix", "libc", "rustix", "hyper*", "axum", "tracing*", "libloading"],
        "usage computes and does no I/O",
    ),
    ("gpush-advice", &["tokio*", "nix", "libc", "rustix", "hyper*"], "advice is computed without I/O"),
    ("gpush-api", &["tokio*", "nix", "libc", "hyper*", "axum"], "wire types do no I/O"),
    ("gpush-geometry", &["gpush-*", "silicon", "tokio*", "nix", "libc"], "geometry is data"),
    ("gpush-openmetrics", &["gpush-*", "tokio*", "nix", "libc"], "it only writes text"),
    ("gpushctl", &["gpush-nvml", "nvml-wrapper*", "libloading", "gpushd"], "gpushctl never loads NVML"),
    ("gpushctl", SIMULATION, "nothing that ships depends on the simulator"),
    ("gpush-slurm-hook", &["clap*", "gpush-nvml", "axum"], "Slurm starts it for every job, so it is small"),
    ("gpushd", SIMULATION, "nothing that ships depends on the simulator"),
    ("silicon", &["gpush-core", "gpush-api", "gpush-nvml"], "the simulator and the planner check each other"),
    ("nvml-sim", &["gpush-core", "gpush-api", "gpush-nvml"], "the simulator and the planner check each other"),
    ("gpush-sim", &["gpush-core", "gpush-nvml"], "the simulator and the planner check each other"),
];

const SIMULATION: &[&str] = &["silicon", "nvml-sim", "mps-sim", "gpush-sim", "gpush-tests", "xtask"];

/// For each package, by name: its normal dependencies.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Checks the dependencies between the crates of this workspace. Returns a summary.
pub(crate) fn check() -> Result<String> {
    let metadata = metadata()?;
    let (graph, members) = read(&metadata)?;
    let wrong = violations(&graph, &members);
    if !wrong.is_empty() {
        bail!("the arrows of ARCHITECTURE.md are broken:\n  {}", wrong.join("\n  "));
    }
    Ok(format!("{} workspace crates, which depend on {} packages", members.len(), graph.len() - members.len()))
}

fn metadata() -> Result<Value> {
    let host = std::process::Command::new("rustc").arg("-vV").current_dir(workspace::root()).output();
    let host = String::from_utf8(host.context("rustc cannot be started")?.stdout)?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    let output = workspace::cargo()
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", host])
        .output()
        .context("cargo cannot be started")?;
    if !output.status.success() {
        bail!("`cargo metadata` fails: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("cargo metadata is not JSON")
}

fn read(metadata: &Value) -> Result<(Graph, BTreeSet<String>)> {
    let list = |value: &Value, key: &str| value[key].as_array().cloned().with_context(|| format!("no {key}"));
    let mut names = BTreeMap::new();
    for package in list(metadata, "packages")? {
        if let (Some(id), Some(name)) = (package["id"].as_str(), package["name"].as_str()) {
            names.insert(id.to_owned(), name.to_owned());
        }
    }
    let name = |id: &Value| id.as_str().and_then(|id| names.get(id)).cloned().context("a package without a name");

    let mut graph = Graph::new();
    for node in list(&metadata["resolve"], "nodes")? {
        let below = graph.entry(name(&node["id"])?).or_default();
        for dependency in list(&node, "deps")? {
            // In `cargo metadata`, a normal dependency has the kind null. Dependencies of build
            // scripts and tests do not ship.
            if list(&dependency, "dep_kinds")?.iter().any(|kind| kind["kind"].is_null()) {
                below.insert(name(&dependency["pkg"])?);
            }
        }
    }
    let members = list(metadata, "workspace_members")?.iter().map(name).collect::<Result<_>>()?;
    Ok((graph, members))
}

fn violations(graph: &Graph, members: &BTreeSet<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for member in members {
        let Some((_, allowed)) = MAY_KNOW.iter().find(|(name, _)| name == member) else {
            wrong.push(format!(
                "{member} is new: say in xtask/src/arrows/crates.rs and ARCHITECTURE.md what it may know"
            ));
            continue;
        };
        for dependency in graph.get(member).into_iter().flatten() {
            if members.contains(dependency) && !allowed.contains(&dependency.as_str()) {
                wrong.push(format!("{member} depends on {dependency}, which it may not know"));
            }
        }
    }
    for (name, _) in MAY_KNOW {
        if !members.contains(*name) {
            wrong.push(format!("{name} is named in xtask/src/arrows/crates.rs and is no member of the workspace"));
        }
    }
    for (from, forbidden, why) in MUST_NOT_REACH {
        for (reached, path) in reach(graph, from) {
            if forbidden.iter().any(|pattern| matches(pattern, &reached)) {
                wrong.push(format!("{from} reaches {reached} by {}: {why}", path.join(" → ")));
            }
        }
    }
    wrong
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => pattern == name,
    }
}

/// Returns all direct and indirect dependencies of `from`, each with the path of dependencies that
/// leads to it.
fn reach(graph: &Graph, from: &str) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    let mut open = vec![vec![from.to_owned()]];
    while let Some(path) = open.pop() {
        let Some(last) = path.last() else { continue };
        for next in graph.get(last).into_iter().flatten() {
            if !found.contains_key(next) {
                let mut longer = path.clone();
                longer.push(next.clone());
                found.insert(next.clone(), longer.clone());
                open.push(longer);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_this_workspace_match_the_table() {
        println!("{}", check().unwrap());
    }

    /// Returns a workspace that follows all rules, without external crates.
    fn sound() -> (Graph, BTreeSet<String>) {
        let graph: Graph = MAY_KNOW
            .iter()
            .map(|(name, known)| ((*name).to_owned(), known.iter().map(|k| (*k).to_owned()).collect()))
            .collect();
        let members = graph.keys().cloned().collect();
        (graph, members)
    }

    fn broken(from: &str, to: &str, below: &[&str]) -> Vec<String> {
        let (mut graph, members) = sound();
        graph.get_mut(from).unwrap().insert(to.to_owned());
        graph.entry(to.to_owned()).or_default().extend(below.iter().map(|b| (*b).to_owned()));
        violations(&graph, &members)
    }

    #[test]
    fn every_forbidden_dependency_is_named() {
        let (graph, members) = sound();
        assert_eq!(violations(&graph, &members), Vec::<String>::new());

        let cases = [
            ("gpush-core", "gpush-nvml", "gpush-core depends on gpush-nvml"),
            ("gpush-client", "gpush-core", "gpush-client depends on gpush-core"),
            ("gpushctl", "gpush-nvml", "gpushctl reaches gpush-nvml"),
            ("gpushd", "silicon", "gpushd reaches silicon by gpushd → silicon"),
            ("silicon", "gpush-core", "silicon reaches gpush-core"),
            ("gpush-geometry", "gpush-api", "gpush-geometry depends on gpush-api"),
        ];
        for (from, to, printed) in cases {
            let wrong = broken(from, to, &[]);
            assert!(wrong.iter().any(|line| line.starts_with(printed)), "{from} → {to}: {wrong:?}");
        }
    }

    #[test]
    fn indirect_forbidden_crate_is_found() {
        let wrong = broken("gpush-advice", "innocent", &["tokio-util"]);
        assert_eq!(
            wrong,
            ["gpush-advice reaches tokio-util by gpush-advice → innocent → tokio-util: advice is computed without I/O"]
                .map(str::to_owned)
        );
    }

    #[test]
    fn new_crate_must_be_listed() {
        let (mut graph, mut members) = sound();
        graph.insert("gpush-new".into(), BTreeSet::new());
        members.insert("gpush-new".into());
        assert!(violations(&graph, &members)[0].starts_with("gpush-new is new"));
    }
}
