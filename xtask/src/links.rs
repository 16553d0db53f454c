//! Checks the documents of the repository: each link must lead to a file that exists, and each test that
//! [`SECURITY`] names must exist.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::workspace;

/// The document whose promises each name their tests.
const SECURITY: &str = "SECURITY.md";

/// Checks every relative link of every Markdown file, and the tests in [`SECURITY`]. Returns a summary.
pub(crate) fn check() -> Result<String> {
    let (mut seen, mut dead) = (0, Vec::new());
    for file in workspace::files()? {
        if file.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let path = workspace::root().join(&file);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        for link in relative_links(&text) {
            seen += 1;
            if !folder.join(link).exists() {
                dead.push(format!("{}: {link}", file.display()));
            }
        }
    }
    if !dead.is_empty() {
        bail!("{} links lead nowhere:\n  {}", dead.len(), dead.join("\n  "));
    }
    let text = std::fs::read_to_string(workspace::root().join(SECURITY)).context(SECURITY)?;
    let named = named_tests(&text);
    let missing: Vec<String> = named.iter().filter(|(file, test)| !has_test(file, *test)).map(in_words).collect();
    if !missing.is_empty() {
        bail!("{SECURITY} names tests that do not exist:\n  {}", missing.join("\n  "));
    }
    Ok(format!("{seen} links lead somewhere, {} files and tests of {SECURITY} exist", named.len()))
}

fn in_words((file, test): &(&str, Option<&str>)) -> String {
    test.map_or_else(|| (*file).to_owned(), |test| format!("{file}: {test}"))
}

fn has_test(file: &str, test: Option<&str>) -> bool {
    let source = std::fs::read_to_string(workspace::root().join(file));
    source.is_ok_and(|source| test.is_none_or(|test| source.contains(&format!("fn {test}("))))
}

/// Returns the source files that a text names, each with the test in parentheses after it: `FILE` (`TEST`).
fn named_tests(text: &str) -> Vec<(&str, Option<&str>)> {
    let parts: Vec<&str> = text.split('`').collect();
    let is_code = |at: &usize| at % 2 == 1 && parts[*at].ends_with(".rs");
    let test = |at: usize| parts.get(at + 1).filter(|text| **text == " (").and_then(|_| parts.get(at + 2)).copied();
    (0..parts.len()).filter(is_code).map(|at| (parts[at], test(at))).collect()
}

/// Returns the targets of the links `[text](target)` that name files, without their anchors.
pub(crate) fn relative_links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.starts_with("```");
        let mut rest = line;
        while let (false, Some((_, after))) = (fenced, rest.split_once("](")) {
            let Some((target, behind)) = after.split_once(')') else { break };
            let target = target.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") {
                links.push(target);
            }
            rest = behind;
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::{named_tests, relative_links};

    #[test]
    fn tests_are_found_after_the_names_of_their_files() {
        let text = "| `a b` | `x/a.rs` (`one_works`), `x/b.rs`, `c` | `x/d.rs` (see `e`) |";
        assert_eq!(named_tests(text), [("x/a.rs", Some("one_works")), ("x/b.rs", None), ("x/d.rs", None)]);
    }

    #[test]
    fn links_to_files_are_checked_only() {
        let text = "see [a](docs/a.md#part) and [b](https://example.org/b)\n```\n[c](c.md)\n```\n[d](../d)";
        assert_eq!(relative_links(text), ["docs/a.md", "../d"]);
    }
}
