//! Documentation pages from `docs` whose commands the tests run.

use std::path::Path;

/// Returns the text of a page, such as `install.md`.
///
/// # Panics
/// If the page does not exist.
#[must_use]
pub fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the fenced code blocks of one language.
#[must_use]
pub fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(bool, String)> = None;
    for line in page.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(found)) => open = Some((found == language, String::new())),
            (Some(_), Some(_)) => blocks.extend(open.take().filter(|(ours, _)| *ours).map(|(_, text)| text)),
            (Some((_, text)), None) => *text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}
