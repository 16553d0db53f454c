//! Checks the links between the documents of the repository: each must lead to a file that exists.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::workspace;

/// Checks every relative link of every Markdown file. Returns a summary.
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
    Ok(format!("{seen} links lead somewhere"))
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
    use super::relative_links;

    #[test]
    fn links_to_files_are_checked_only() {
        let text = "see [a](docs/a.md#part) and [b](https://example.org/b)\n```\n[c](c.md)\n```\n[d](../d)";
        assert_eq!(relative_links(text), ["docs/a.md", "../d"]);
    }
}
