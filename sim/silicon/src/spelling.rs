//! Suggestions for misspelled names in error messages.

/// Returns the minimum number of insertions, deletions, substitutions and swaps that turn `a` into
/// `b`.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.to_lowercase().chars().collect();
    let b: Vec<char> = b.to_lowercase().chars().collect();
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let cost = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + cost);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// Returns up to three of the `known` names that are most similar to `name`, most similar first.
#[must_use]
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let limit = (name.chars().count() / 3).max(2);
    let lower = name.to_lowercase();
    let mut close: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|candidate| {
            let other = candidate.to_lowercase();
            let d = distance(name, candidate);
            // If a name begins with the text, or contains it, the name is similar even if it is
            // much longer.
            let rank = if lower.len() >= 3 && other.starts_with(&lower) {
                0
            } else if lower.len() >= 3 && other.contains(&lower) {
                1
            } else {
                d
            };
            (rank.min(d) <= limit).then_some((rank, candidate))
        })
        .collect();
    close.sort_unstable();
    close.into_iter().map(|(_, candidate)| candidate).take(3).collect()
}

/// Returns `did you mean a, b or c?`. If no known name is similar, returns all known names.
#[must_use]
pub fn suggest<'a>(name: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    let near = nearest(name, known.clone());
    match near.as_slice() {
        [] => format!("known: {}", known.into_iter().collect::<Vec<_>>().join(", ")),
        [one] => format!("did you mean `{one}`?"),
        [first @ .., last] => format!("did you mean `{}` or `{last}`?", first.join("`, `")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_come_first_and_others_are_left_out() {
        let known = ["dgx-a100", "dgx-h100", "a30x4", "mixed"];
        assert_eq!(nearest("dgx-a10", known), ["dgx-a100", "dgx-h100"]);
        assert_eq!(nearest("a100", known), ["dgx-a100"]);
        assert_eq!(nearest("mxied", known), ["mixed"]);
        assert!(nearest("zzzzzz", known).is_empty());
        assert_eq!(suggest("zzzzzz", known), "known: dgx-a100, dgx-h100, a30x4, mixed");
    }
}
