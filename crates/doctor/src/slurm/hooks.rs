//! Prolog, Epilog and TaskProlog: whether they run gpush, and whether a file in their directory
//! makes the job fail.

use std::{os::unix::fs::PermissionsExt, path::Path};

use glob::{MatchOptions, Pattern, glob_with};
use gpush_core::duration;

use super::files::Files;
use crate::{Area, Finding, Host};

/// Each hook, its command, and what does not work without the hook.
const HOOKS: [(&str, &str, &str); 3] = [
    ("Prolog", "prolog", "jobs get no lease"),
    ("Epilog", "epilog", "leases of jobs do not end"),
    ("TaskProlog", "task-prolog", "tasks do not get the environment of their lease"),
];

pub(super) fn examine(host: &Host, files: &Files, has_owner: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (key, command, otherwise) in HOOKS {
        let (patterns, scripts) = scripts_of(host, files, key);
        findings.extend(scripts.iter().filter_map(|script| not_executable(host, key, script)));
        let texts = texts(host, &scripts, command);
        findings.extend(texts.iter().filter_map(|(script, text)| missing_program(host, script, text, command)));
        if texts.iter().any(|(_, text)| runs(text, command)) {
            continue;
        }
        let message = format!("{key} does not run gpush, so {otherwise}");
        let hint = format!(
            "set {key}=/usr/share/gpush/slurm/{command} in {}, or call that script from your own script; then run \
             `scontrol reconfigure`",
            files.path
        );
        let cause = match scripts.as_slice() {
            [] if patterns.is_empty() => format!("{} does not set {key}", files.path),
            [] => format!("no file matches {}", patterns.join(", ")),
            scripts => format!("no `gpush-slurm-hook {command}` in {}", scripts.join(", ")),
        };
        findings.push(if has_owner {
            Finding::problem(Area::Slurm, message, hint).cause(cause)
        } else {
            Finding::warning(Area::Slurm, message, hint).cause(cause)
        });
    }
    findings
}

/// Returns the patterns of a setting that names scripts, and the scripts that match them.
fn scripts_of(host: &Host, files: &Files, key: &str) -> (Vec<String>, Vec<String>) {
    let patterns: Vec<String> = files.all(key).iter().map(|pattern| files.sibling(pattern)).collect();
    let scripts = patterns.iter().flat_map(|pattern| matching(host, pattern)).collect();
    (patterns, scripts)
}

/// Returns the paths and texts of scripts. If a script calls another script that runs `command`,
/// also returns the called script, because a script of the site may call the script of the package.
fn texts(host: &Host, scripts: &[String], command: &str) -> Vec<(String, String)> {
    let mut texts: Vec<(String, String)> =
        scripts.iter().map(|script| (script.clone(), host.read(script).unwrap_or_default())).collect();
    let called: Vec<_> = texts.iter().flat_map(|(_, text)| called_scripts(host, text)).collect();
    texts.extend(called.into_iter().filter(|(_, text)| runs(text, command)));
    texts
}

/// Returns each script of Prolog and Epilog that runs gpush, with the value of its option
/// `--deadline` in seconds; `None` if the script does not have this option.
pub(super) fn deadlines(host: &Host, files: &Files) -> Vec<(String, Option<u32>)> {
    let mut found = Vec::new();
    for (key, command) in [("Prolog", "prolog"), ("Epilog", "epilog")] {
        let texts = texts(host, &scripts_of(host, files, key).1, command);
        for (script, text) in texts.into_iter().filter(|(_, text)| runs(text, command)) {
            let runs = |line: &&str| calls(line, command);
            let deadline = code(&text).filter(runs).find_map(deadline);
            found.push((script, deadline));
        }
    }
    found
}

/// Returns the value of `--deadline` in a line, in seconds.
fn deadline(line: &str) -> Option<u32> {
    let mut words = line.split(|c: char| c.is_whitespace() || c == '=');
    let value = words.by_ref().skip_while(|word| *word != "--deadline").nth(1)?;
    Some(u32::try_from(duration::parse(value).ok()?.as_secs()).unwrap_or(u32::MAX))
}

/// The programs with Slurm's hooks, each with the word that comes before the name of the hook, and its usual path.
const PROGRAMS: [(&str, Option<&str>, &str); 2] =
    [("gpush-slurm-hook", None, "/usr/lib/gpush/gpush-slurm-hook"), ("gpushctl", Some("slurm"), "/usr/bin/gpushctl")];

/// Returns whether a script runs a hook of gpush: `#!/usr/lib/gpush/gpush-slurm-hook prolog`, `#!/usr/bin/gpushctl slurm
/// prolog`, or a shell that calls one of these programs.
fn runs(text: &str, command: &str) -> bool {
    let first = text.lines().next().and_then(|line| line.strip_prefix("#!")).unwrap_or_default();
    let mut words = first.split_whitespace();
    let program = words.next().and_then(|path| Some(path.rsplit_once('/')?.1)).unwrap_or_default();
    if let Some((_, before, _)) = PROGRAMS.iter().find(|(name, ..)| *name == program) {
        // The programs accept the words only in this order.
        return before.is_none_or(|before| words.next() == Some(before)) && words.next() == Some(command);
    }
    calls(text, command)
}

/// Returns whether a text calls a program with the hook `command`.
fn calls(text: &str, command: &str) -> bool {
    PROGRAMS.iter().any(|(name, before, _)| {
        let words = before.map_or_else(|| format!("{name} {command}"), |before| format!("{before} {command}"));
        text.contains(name) && text.contains(&words)
    })
}

/// Reports a script that names a program of gpush which does not exist on this host. If the first line names such a
/// program, Slurm cannot start the script.
fn missing_program(host: &Host, script: &str, text: &str, command: &str) -> Option<Finding> {
    let known =
        |path: &str| PROGRAMS.iter().find(|(name, ..)| path.rsplit_once('/').is_some_and(|(_, one)| one == *name));
    let (path, (name, before, usual)) =
        paths(text).filter(|path| !host.has(path)).find_map(|path| Some((path, known(path)?)))?;
    let message = format!("{script} runs {path}, which does not exist, so the hook fails");
    let words = before.map(|before| format!("{before} ")).unwrap_or_default();
    let hint = format!("correct the path of {name} in {script}, such as `#!{usual} {words}{command}`");
    Some(Finding::problem(Area::Slurm, message, hint).cause("Slurm drains a node whose Prolog or Epilog fails"))
}

/// Returns the scripts that a script names by absolute path, with the texts of the named scripts.
fn called_scripts(host: &Host, text: &str) -> Vec<(String, String)> {
    let files = paths(text).filter(|path| host.path(path).is_file());
    let texts = files.filter_map(|path| Some((path.to_owned(), host.read(path)?)));
    texts.filter(|(_, text)| text.starts_with("#!")).collect()
}

/// Returns the program in the first line of a script, and the lines that are not comments.
fn code(text: &str) -> impl Iterator<Item = &str> {
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    let code = rest.lines().filter(|line| !line.trim_start().starts_with('#'));
    first.strip_prefix("#!").into_iter().chain(code)
}

/// Returns the absolute paths in the code of a script.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let words = code(text).flat_map(|line| {
        line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`' | ';' | '=' | '(' | ')' | '&' | '|'))
    });
    words.filter(|word| word.starts_with('/'))
}

/// Returns the files that match a path with wildcards, sorted. slurmd uses glob(3).
fn matching(host: &Host, pattern: &str) -> Vec<String> {
    // The syntax of the crate `glob` differs from glob(3): the crate writes `[^a]` as `[!a]`, and
    // its `**` matches several directories.
    let mut below = pattern.trim_start_matches('/').replace("[^", "[!");
    while below.contains("**") {
        below = below.replace("**", "*");
    }
    let root = host.root();
    let absolute = Path::new(&Pattern::escape(&root.to_string_lossy())).join(below);
    let options =
        MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
    match glob_with(&absolute.to_string_lossy(), options) {
        Ok(found) => {
            let below = found.flatten().filter_map(|path| path.strip_prefix(root).map(Path::to_path_buf).ok());
            below.map(|path| format!("/{}", path.display())).collect()
        }
        // In glob(3), a bracket without a partner is a plain character.
        Err(_) if host.has(pattern) => vec![pattern.to_owned()],
        Err(_) => Vec::new(),
    }
}

/// Reports a file that slurmd cannot run. slurmd runs every file in a hook's directory. If one of
/// these files cannot run, Prolog and Epilog fail, and Slurm drains the node. If TaskProlog fails,
/// only the task fails.
fn not_executable(host: &Host, key: &str, script: &str) -> Option<Finding> {
    let meta = std::fs::metadata(host.path(script)).ok()?;
    if meta.is_file() && meta.permissions().mode() & 0o111 != 0 {
        return None;
    }
    let otherwise = if key == "TaskProlog" { "and so does each task" } else { "and Slurm drains the node" };
    let message = format!("{script} is not executable, so {key} fails, {otherwise}");
    let hint = format!("move it out of the directory, or run `chmod 755 {script}`");
    Some(Finding::problem(Area::Slurm, message, hint))
}
