//! Suggestions: the known words that are most similar to a word that a user typed.
//!
//! Every error about an unknown name suggests similar existing names. Config keys, modes, layouts
//! and profiles use the same measure of similarity.

/// Returns the word in `known` that is most similar to `word`; `None` if no word is similar enough.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    nearest_few(word, known, 1).into_iter().next()
}

/// Returns the words of `known` that are similar to `word`, at most `most`. The most similar words
/// come first. Equally similar words have the given order.
#[must_use]
pub fn nearest_few<'a>(word: &str, known: impl IntoIterator<Item = &'a str>, most: usize) -> Vec<&'a str> {
    let word = fold(word);
    if word.len() > LONGEST {
        return Vec::new();
    }
    let mut found: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|candidate| {
            let folded = fold(candidate);
            let distance = if abbreviates(&word, &folded) { 1 } else { distance(&word, &folded) };
            let tolerated = (word.len().max(folded.len()) / 3).max(1);
            (distance <= tolerated).then_some((distance, candidate))
        })
        .collect();
    found.sort_by_key(|(distance, _)| *distance);
    found.truncate(most);
    found.into_iter().map(|(_, candidate)| candidate).collect()
}

/// Maximum length of a word. A longer word is probably pasted text, not a typing error.
const LONGEST: usize = 64;

/// Returns whether the shorter word has at least three letters and is a prefix of the longer word,
/// for example `warn` and `warning`.
fn abbreviates(a: &[char], b: &[char]) -> bool {
    a.len().min(b.len()) >= 3 && (a.starts_with(b) || b.starts_with(a))
}

pub(crate) fn fold(word: &str) -> Vec<char> {
    word.chars().flat_map(char::to_lowercase).map(|c| if c == '-' { '_' } else { c }).collect()
}

/// Returns the edit distance of two words: the number of insertions, deletions, replacements, and
/// swaps of adjacent characters.
pub(crate) fn distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, cb) in b.iter().enumerate() {
            let mut best = (above[j] + usize::from(ca != cb)).min(above[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *ca == b[j - 1] && a[i - 1] == *cb {
                best = best.min(before[j - 1] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typing_errors_get_suggestions() {
        let keys = ["library", "read_ms", "change_s", "admin_groups"];
        for (typed, meant) in [
            ("libary", "library"),
            ("Read-MS", "read_ms"),
            ("chnage_s", "change_s"),
            ("admin_group", "admin_groups"),
            ("admin", "admin_groups"),
        ] {
            assert_eq!(nearest(typed, keys), Some(meant), "{typed}");
        }
    }

    #[test]
    fn dissimilar_words_are_not_suggested() {
        for typed in ["", "x", "colour", "reading_s", &"l".repeat(10_000)] {
            assert_eq!(nearest(typed, ["library", "read_ms"]), None, "{typed:.20}");
        }
    }

    #[test]
    fn most_similar_word_comes_first() {
        let profiles = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"];
        assert_eq!(nearest_few("1g.12gb", profiles, 2), ["1g.10gb", "1g.20gb"]);
    }
}
