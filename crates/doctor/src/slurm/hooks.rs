//! Prolog, Epilog and TaskProlog: whether they run gpush, and whether a file in their directory fails the job.

use std::os::unix::fs::PermissionsExt;

use super::files::Files;
use crate::{Area, Finding, Host};

/// Each hook, its command, and what does not work without it.
const HOOKS: [(&str, &str, &str); 3] = [
    ("Prolog", "prolog", "jobs get no lease"),
    ("Epilog", "epilog", "leases of jobs do not end"),
    ("TaskProlog", "task-prolog", "tasks do not get the environment of their lease"),
];

pub(super) fn examine(host: &Host, files: &Files, has_owner: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (key, command, otherwise) in HOOKS {
        let scripts: Vec<String> =
            files.all(key).iter().flat_map(|pattern| matching(host, &files.sibling(pattern))).collect();
        findings.extend(scripts.iter().filter_map(|script| not_executable(host, key, script)));
        let runs = |script: &String| {
            let text = host.read(script).unwrap_or_default();
            text.contains("gpushctl") && text.contains(&format!("slurm {command}"))
        };
        if scripts.iter().any(runs) {
            continue;
        }
        let message = format!("{key} does not run gpush: {otherwise}");
        let hint = format!(
            "set {key}=/usr/share/gpush/slurm/{command} in {}, or call that script from yours; then run \
             `scontrol reconfigure`",
            files.path
        );
        let cause = match scripts.as_slice() {
            [] => format!("{} has no {key}", files.path),
            scripts => format!("no `gpushctl slurm {command}` in {}", scripts.join(", ")),
        };
        findings.push(if has_owner {
            Finding::problem(Area::Slurm, message, hint).cause(cause)
        } else {
            Finding::warning(Area::Slurm, message, hint).cause(cause)
        });
    }
    findings
}

/// Returns the files that a path with `*` at its end names, sorted.
fn matching(host: &Host, pattern: &str) -> Vec<String> {
    let Some((directory, name)) = pattern.rsplit_once('/') else { return Vec::new() };
    let Some((start, end)) = name.split_once('*') else {
        return if host.has(pattern) { vec![pattern.to_owned()] } else { Vec::new() };
    };
    let names = host.names(directory).into_iter();
    let suits = |name: &String| !name.starts_with('.') && name.starts_with(start) && name.ends_with(end);
    names.filter(suits).map(|name| format!("{directory}/{name}")).collect()
}

/// slurmd runs each file of the directory. One that it cannot run fails the job and drains the node.
fn not_executable(host: &Host, key: &str, script: &str) -> Option<Finding> {
    let meta = std::fs::metadata(host.path(script)).ok()?;
    if meta.is_file() && meta.permissions().mode() & 0o111 != 0 {
        return None;
    }
    let message = format!("{script} is not executable: {key} fails, and Slurm drains the node");
    let hint = format!("move it out of the directory, or run `chmod 755 {script}`");
    Some(Finding::problem(Area::Slurm, message, hint))
}
