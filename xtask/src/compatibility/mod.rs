//! Compatibility with the last release: within `v1`, the API and the config may only grow
//! ([decision 9](../../../docs/decisions/0009-api-within-v1.md)).
//!
//! `docs/released` contains the API and the config keys of the last release. `cargo xtask test`
//! compares them with the code. If something was removed or has another type, the step
//! `compatibility` fails. Before the first release, the folder does not exist, and there is nothing
//! to compare.
//!
//! | file | subject |
//! |---|---|
//! | `api` | paths, parameters, bodies and responses of two OpenAPI documents |
//! | `schema` | JSON schemas |

mod api;
mod schema;

use std::{collections::BTreeSet, fmt, fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};
use gpush_core::config::schema::SECTIONS;
use serde_json::Value;

use crate::workspace;

/// The folder of the baseline, relative to the root of the checkout.
const FOLDER: &str = "docs/released";

/// Files of the baseline: this one has the API, and the next one has the config keys.
const API: &str = "openapi.json";
const KEYS: &str = "config-keys.txt";

/// The current API. The step `tests` checks that this file matches the code.
const CURRENT_API: &str = "docs/openapi.json";

/// Something that works with the last release, but not with the current code.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Difference {
    /// Path, field or key.
    object: String,
    /// What has changed.
    problem: String,
    /// What a developer must do about the difference.
    remedy: &'static str,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.object, self.problem, self.remedy)
    }
}

/// The API and the config keys of a release.
#[derive(Debug)]
struct Baseline {
    api: Value,
    keys: BTreeSet<String>,
}

/// Compares the code with the baseline, for `cargo xtask test`.
///
/// # Errors
/// If there are differences (the error lists them), or if a file cannot be read.
pub(crate) fn check() -> Result<String> {
    let root = workspace::root();
    if !root.join(FOLDER).exists() {
        return match release_tag(&root) {
            None => Ok("there is no release yet".to_owned()),
            Some(tag) => bail!(
                "the tag {tag} exists, and {FOLDER} does not: check out {tag}, run `cargo xtask release-baseline`, and \
                 commit the folder"
            ),
        };
    }
    judged(&Baseline::read(&root.join(FOLDER))?, &read_json(&root.join(CURRENT_API))?, &config_keys())
}

/// Writes the baseline from the code, for `cargo xtask release-baseline`.
pub(crate) fn write() -> Result<String> {
    let root = workspace::root();
    let folder = root.join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::copy(root.join(CURRENT_API), folder.join(API)).with_context(|| format!("cannot copy {CURRENT_API}"))?;
    let keys: String = config_keys().iter().map(|key| format!("{key}\n")).collect();
    fs::write(folder.join(KEYS), keys).with_context(|| format!("cannot write {FOLDER}/{KEYS}"))?;
    Ok(format!("{FOLDER} is the API and config of the release {}: commit it, then tag", env!("CARGO_PKG_VERSION")))
}

impl Baseline {
    fn read(folder: &Path) -> Result<Self> {
        let keys = folder.join(KEYS);
        let keys = fs::read_to_string(&keys).with_context(|| format!("cannot read {}", keys.display()))?;
        Ok(Self { api: read_json(&folder.join(API))?, keys: keys.lines().map(str::to_owned).collect() })
    }

    /// Returns the version of the release.
    fn version(&self) -> &str {
        self.api["info"]["version"].as_str().unwrap_or("the last release")
    }
}

/// Compares a baseline with the current API and config keys.
fn judged(baseline: &Baseline, api: &Value, keys: &BTreeSet<String>) -> Result<String> {
    let mut found = api::differences(&baseline.api, api);
    found.extend(baseline.keys.difference(keys).map(|key| Difference {
        object: format!("config key {key}"),
        problem: "it was removed".to_owned(),
        remedy: "accept it again, and warn that it has no effect",
    }));
    let version = baseline.version();
    if found.is_empty() {
        return Ok(format!("the API and the config keys have all of {version}, and {} keys", keys.len()));
    }
    let lines: String = found.iter().map(|one| format!("\n  {one}")).collect();
    bail!(
        "{} differences break clients and configs of {version} (docs/decisions/0009-api-within-v1.md):{lines}",
        found.len()
    );
}

/// Returns the keys of the config, each as `[section] key`. A key at the top level has no section.
fn config_keys() -> BTreeSet<String> {
    let of = |header: &str, key: &str| if header.is_empty() { key.to_owned() } else { format!("{header} {key}") };
    let sections =
        SECTIONS.iter().filter(|section| !section.header.is_empty()).map(|section| section.header.to_owned());
    let keys = SECTIONS.iter().flat_map(|section| section.keys.iter().map(|key| of(section.header, key)));
    sections.chain(keys).collect()
}

fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
}

/// Returns the tag of a release. Returns `None` if there is no tag, or git is not installed.
fn release_tag(root: &Path) -> Option<String> {
    let output = Command::new("git").args(["tag", "--list", "v[0-9]*"]).current_dir(root).output().ok()?;
    let tags = String::from_utf8_lossy(&output.stdout).into_owned();
    tags.lines().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn baseline() -> Baseline {
        let keys = ["[mps]", "[mps] control"].map(str::to_owned).into();
        Baseline { api: json!({ "info": { "version": "0.1.0" }, "paths": { "/v1/gpus": {} } }), keys }
    }

    #[test]
    fn each_difference_is_named_with_its_remedy() {
        let (api, keys) = (json!({ "paths": {} }), BTreeSet::from(["[mps]".to_owned(), "[mps] more".to_owned()]));
        let error = judged(&baseline(), &api, &keys).unwrap_err().to_string();
        for line in
            ["/v1/gpus: the path was removed; restore it", "config key [mps] control: it was removed; accept it"]
        {
            assert!(error.contains(line), "{error}");
        }
        assert!(error.contains("2 differences break clients and configs of 0.1.0"), "{error}");
    }

    #[test]
    fn added_paths_and_keys_are_fine() {
        let api = json!({ "paths": { "/v1/gpus": {}, "/v1/new": {} } });
        let keys = BTreeSet::from(["[mps]", "[mps] control", "[mps] new", "[new]"].map(str::to_owned));
        assert!(judged(&baseline(), &api, &keys).unwrap().contains("all of 0.1.0"));
    }

    #[test]
    fn keys_have_their_sections() {
        let keys = config_keys();
        for key in ["auto_reconcile", "[mps] control", "[[gpu]] match", "[gpu.mps] percentage", "[layouts]"] {
            assert!(keys.contains(key), "{key} is not in {keys:?}");
        }
    }

    /// Removes fields of the real API, and checks that the comparison finds each removal. To save
    /// time, removes only every fifth field.
    #[test]
    fn removal_of_any_field_of_the_api_is_found() {
        let api = read_json(&workspace::root().join(CURRENT_API)).unwrap();
        let mut less = api.clone();
        let schemas = api["components"]["schemas"].as_object().unwrap();
        let fields = schemas.iter().flat_map(|(schema, shape)| {
            shape["properties"].as_object().into_iter().flatten().map(move |(field, _)| (schema, field))
        });
        let is_alternative = |one: &Difference| one.problem.contains("alternative was removed");
        let mut removed = 0;
        for (schema, field) in fields.step_by(5) {
            let properties = |api: &mut Value| {
                std::mem::take(api["components"]["schemas"][schema]["properties"].as_object_mut().unwrap())
            };
            let all = properties(&mut less);
            let mut kept = all.clone();
            kept.remove(field);
            let kept_is_empty = kept.is_empty();
            less["components"]["schemas"][schema]["properties"] = kept.into();
            let found = api::differences(&api, &less);
            let object = format!(".{field}");
            // Without its only field, an object is another alternative of a value.
            let is_named = |one: &Difference| one.object.ends_with(&object) || kept_is_empty && is_alternative(one);
            assert!(found.iter().any(is_named), "{schema}.{field}: {found:?}");
            less["components"]["schemas"][schema]["properties"] = all.into();
            removed += 1;
        }
        assert!(removed > 50, "{removed}");
    }

    #[test]
    fn written_baseline_is_read_back() {
        let scratch = tempfile::tempdir().unwrap();
        fs::copy(workspace::root().join(CURRENT_API), scratch.path().join(API)).unwrap();
        fs::write(scratch.path().join(KEYS), "[mps]\n[mps] control\n").unwrap();
        let read = Baseline::read(scratch.path()).unwrap();
        assert_eq!((read.keys.len(), read.version()), (2, env!("CARGO_PKG_VERSION")));
        assert!(judged(&read, &read.api, &config_keys()).is_ok());
    }
}
