//! Finds tests that were skipped.
//!
//! If the machine lacks something that a test needs, the test passes but prints `SKIPPED what:
//! why`. For a test with `#[ignore]`, the test harness prints a line. The summary lists all these
//! lines, so that a successful run does not hide skipped tests.

/// Returns `what: why` from a line that reports a skipped test.
pub(crate) fn from_line(line: &str) -> Option<String> {
    let line = line.trim();
    if let Some((name, why)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored")) {
        let why = why.trim_start_matches(", ");
        return Some(format!("{name}: {}", if why.is_empty() { "ignored, without a reason" } else { why }));
    }
    let rest = line.strip_prefix("SKIPPED")?;
    let rest = rest.trim_start_matches([':', ' ']);
    if rest.is_empty() { None } else { Some(rest.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::from_line;

    #[test]
    fn only_lines_that_begin_with_skipped_count() {
        assert_eq!(from_line("SKIPPED nvtop: not installed").as_deref(), Some("nvtop: not installed"));
        assert_eq!(from_line("  SKIPPED: tests/gpu: no GPU here").as_deref(), Some("tests/gpu: no GPU here"));
        assert_eq!(from_line("test worker ... ignored, it is no test").as_deref(), Some("worker: it is no test"));
        assert_eq!(from_line("test worker ... ignored").as_deref(), Some("worker: ignored, without a reason"));
        assert_eq!(from_line("test worker ... ok"), None);
        assert_eq!(from_line("nothing was SKIPPED"), None);
        assert_eq!(from_line("SKIPPED"), None);
    }
}
