//! Checks every file of the checkout for forbidden content: `unsafe` outside its five folders,
//! paths of the developer's machine, hosts of package registries, and uses of a peer's uid outside
//! the agent's modules that identify callers. Also lists files that have too many lines.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use proc_macro2::{TokenStream, TokenTree};

use crate::workspace;

/// Folders with code that calls C, shares memory between processes, or receives sockets. Only these
/// folders may contain `unsafe`.
const UNSAFE_ALLOWED: &[&str] = &["crates/nvml", "sim/silicon", "sim/nvml-sim", "sim/mps-sim", "tests"];

/// The sources of the agent, and those of them that may use the uid of a peer. Root of a container has the uid of the
/// host's root, so other code must call `Caller::holds`.
const AGENT: &str = "agent/src";
const PEER_UID_ALLOWED: &[&str] = &["agent/src/requests/caller.rs", "agent/src/serve/listen"];

/// A source file with more lines than this is listed as too long.
const LONG: usize = 400;

/// Checks every file. Returns a summary, and the list of long files.
pub(crate) fn check() -> Result<String> {
    let mut wrong = Vec::new();
    let mut long = Vec::new();
    let (mut sources, mut lines) = (0, 0);
    let forbidden = forbidden();
    let files = workspace::files()?;
    for file in &files {
        let path = workspace::root().join(file);
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let Ok(text) = String::from_utf8(bytes) else {
            // A fixture in `tests` may be invalid input, so it need not be UTF-8. All other files
            // must be UTF-8.
            if !file.starts_with("tests") {
                wrong.push(format!("{}: not UTF-8", file.display()));
            }
            continue;
        };
        if file != Path::new("Cargo.lock") {
            wrong.extend(mentions(file, &text, &forbidden));
        }
        if file.extension().is_some_and(|extension| extension == "rs") {
            sources += 1;
            lines += text.lines().count();
            if !UNSAFE_ALLOWED.iter().any(|folder| file.starts_with(folder)) {
                wrong.extend(unsafe_lines(file, &text));
            }
            if file.starts_with(AGENT) && !PEER_UID_ALLOWED.iter().any(|allowed| file.starts_with(allowed)) {
                wrong.extend(peer_uid_lines(file, &text));
            }
            if text.lines().count() > LONG {
                long.push((text.lines().count(), file.clone()));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("{} places to mend:\n  {}", wrong.len(), wrong.join("\n  "));
    }
    Ok(format!("{} files, {sources} of them Rust with {lines} lines{}", files.len(), report(long)))
}

fn report(mut long: Vec<(usize, PathBuf)>) -> String {
    long.sort_by(|a, b| b.cmp(a));
    let mut text = String::new();
    for (lines, file) in long {
        text.push_str(&format!(
            "\n  warning: {} has {lines} lines (more than {LONG}): one subject, or two?",
            file.display()
        ));
    }
    text
}

/// Returns the forbidden texts, each with the reason.
fn forbidden() -> Vec<(String, &'static str)> {
    let mut list: Vec<(String, &str)> = Vec::new();
    let root = workspace::root();
    // Forbid the path of the checkout, unless the path is short, such as `/w`: a short path would
    // also match other texts.
    if root.components().count() > 2 {
        list.push((format!("{}/", root.display()), "the path of a checkout"));
    }
    for home in [format!("/{}/", "root"), format!("/{}/", "Users"), format!("/{}/", "work")] {
        list.push((home, "an absolute path of a developer's machine"));
    }
    // Each name is written in two parts, so that this file does not contain it.
    for (host, domain) in
        [("deb.debian", "org"), ("files.pythonhosted", "org"), ("registry.npmjs", "org"), ("static.crates", "io")]
    {
        list.push((format!("{host}.{domain}"), "a package registry's host"));
    }
    list
}

fn mentions(file: &Path, text: &str, forbidden: &[(String, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        for (what, why) in forbidden {
            // If the text is only a part of a longer path, it names another folder.
            let at_start = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-*}".contains(c));
            if line.match_indices(what.as_str()).any(|(at, _)| !what.starts_with('/') || at_start(at)) {
                found.push(format!("{}:{}: mentions {what}, {why}", file.display(), number + 1));
            }
        }
    }
    found
}

/// Finds `unsafe` code, and attributes that allow it. The word `unsafe` may occur in comments and
/// strings.
fn unsafe_lines(file: &Path, text: &str) -> Vec<String> {
    if !text.contains("unsafe") {
        return Vec::new();
    }
    let Ok(tokens) = text.parse::<TokenStream>() else {
        return vec![format!("{}: is not Rust", file.display())];
    };
    let mut lines = BTreeSet::new();
    unsafe_tokens(tokens, &mut lines);
    let allowed = UNSAFE_ALLOWED.join(", ");
    lines
        .into_iter()
        .map(|line| format!("{}:{line}: unsafe code is allowed in {allowed} only", file.display()))
        .collect()
}

/// Finds code that reads `peer.uid`.
fn peer_uid_lines(file: &Path, text: &str) -> Vec<String> {
    if !text.contains("peer") {
        return Vec::new();
    }
    let Ok(tokens) = text.parse::<TokenStream>() else {
        return vec![format!("{}: is not Rust", file.display())];
    };
    let mut lines = BTreeSet::new();
    peer_uid_tokens(tokens, &mut lines);
    lines
        .into_iter()
        .map(|line| {
            format!("{}:{line}: `peer.uid` may be that of a container's root: use `Caller::holds`", file.display())
        })
        .collect()
}

fn peer_uid_tokens(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |token: &TokenTree, name: &str| matches!(token, TokenTree::Ident(ident) if ident == name);
    for three in tokens.windows(3) {
        if let [peer, TokenTree::Punct(dot), uid] = three
            && is(peer, "peer")
            && dot.as_char() == '.'
            && is(uid, "uid")
        {
            lines.insert(uid.span().start().line);
        }
    }
    for token in tokens {
        if let TokenTree::Group(group) = token {
            peer_uid_tokens(group.stream(), lines);
        }
    }
}

/// Collects the lines with `unsafe` or `allow(unsafe_code)`.
fn unsafe_tokens(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let mut allows = false;
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                if ident == "unsafe" {
                    lines.insert(ident.span().start().line);
                }
                allows = ident == "allow" || ident == "expect";
            }
            TokenTree::Group(group) => {
                let names_lint = |token: &TokenTree| matches!(token, TokenTree::Ident(ident) if ident == "unsafe_code");
                if allows && group.stream().into_iter().any(|token| names_lint(&token)) {
                    lines.insert(group.span_open().start().line);
                }
                allows = false;
                unsafe_tokens(group.stream(), lines);
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => allows = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkout_contains_nothing_forbidden() {
        println!("{}", check().unwrap());
    }

    #[test]
    fn unsafe_is_found_in_code_and_not_in_text() {
        let file = Path::new("agent/src/x.rs");
        let block = format!("let x = {} {{ 1 }};", "unsafe");
        assert_eq!(unsafe_lines(file, &block).len(), 1);
        assert_eq!(unsafe_lines(file, concat!("#![allow(", "unsafe_code)]")).len(), 1);
        assert_eq!(unsafe_lines(file, "// unsafe is explained here").len(), 0);
        assert_eq!(unsafe_lines(file, "let word = \"an unsafe word\"; let unsafe_count = 1;").len(), 0);
        let inside = format!("fn f() {{\n    m!({{ {} {{ 1 }} }})\n}}\n", "unsafe");
        assert!(unsafe_lines(file, &inside)[0].starts_with("agent/src/x.rs:2: "));
    }

    #[test]
    fn code_that_reads_uid_of_peer_is_reported() {
        let lines = |text: &str| peer_uid_lines(Path::new("agent/src/x.rs"), text).len();
        assert_eq!(lines("fn f() { if caller.peer.uid == holder {} }"), 1);
        assert_eq!(lines("fn f() {\n m!(a, peer\n.uid);\n let b = client.peer . uid; }"), 2);
        assert_eq!(lines("// peer.uid\nfn f() { caller.holds(peer); let uid = peer.pid; \"peer.uid\"; }"), 0);
    }

    #[test]
    fn machine_paths_are_found_and_longer_paths_are_not() {
        let forbidden = forbidden();
        let seen = |line: &str| mentions(Path::new("x"), line, &forbidden).len();
        assert_eq!(seen(&format!("see /{}/notes", "work")), 1);
        assert_eq!(seen(&format!("dir/{}/notes", "work")), 0);
        assert_eq!(seen(&format!("from {}.{}", "deb.debian", "org")), 1);
        assert_eq!(seen("/var/lib/gpush and /etc/gpush"), 0);
    }
}
