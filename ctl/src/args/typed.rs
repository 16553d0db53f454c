//! Command lines in hints, quoted for a shell.

use gpush_api::text::is_plain;

/// Returns the words of a command as a user types them. Returns `None` if a word cannot be shown in backquotes on one
/// line.
pub(crate) fn command_line<'w>(words: impl IntoIterator<Item = &'w str>) -> Option<String> {
    let words: Option<Vec<String>> = words.into_iter().map(quoted).collect();
    Some(words?.join(" "))
}

fn quoted(word: &str) -> Option<String> {
    if word.contains('`') || !word.chars().all(is_plain) {
        return None;
    }
    let is_safe = |c: char| c.is_ascii_alphanumeric() || "-_=+:,./@%".contains(c);
    if !word.is_empty() && word.chars().all(is_safe) {
        return Some(word.to_owned());
    }
    Some(format!("'{}'", word.replace('\'', r"'\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(command_line(["a", "1g.10gb*2", "", "it's"]).unwrap(), r"a '1g.10gb*2' '' 'it'\''s'");
        assert_eq!(command_line(["a`b"]), None);
        assert_eq!(command_line(["a\x1b[2J"]), None);
    }
}
