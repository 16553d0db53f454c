//! Lists of hosts, such as `gpu[01-04,7],login`. Slurm uses the same notation for device files.

use crate::quote::Quoted;

/// Maximum number of names to which a list may expand. Slurm allows 1024 device files on a node.
const MOST: usize = 1 << 14;

/// Maximum number of digits in a range.
const MOST_DIGITS: usize = 9;

/// A list of hosts or files, in the order in which it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostList {
    patterns: Vec<Vec<Part>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Ranges(Vec<Range>),
}

/// A range such as `01-04`, whose numbers have at least `width` digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    low: u32,
    high: u32,
    width: usize,
}

/// Why a text is not a list of hosts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostListError {
    /// A bracket has no matching bracket.
    #[error("{} has an unmatched bracket", Quoted(.0))]
    Bracket(String),
    /// A range is not of the form `3` or `0-3`, or its end is less than its start.
    #[error("{} is not a range such as `0-3`", Quoted(.0))]
    Range(String),
    /// The list expands to too many names.
    #[error("the list has more than {MOST} names")]
    TooMany,
}

impl HostList {
    /// Parses a list.
    ///
    /// # Errors
    /// A bracket or range is wrong.
    pub fn parse(text: &str) -> Result<Self, HostListError> {
        let words = split(text)?;
        let patterns = words.into_iter().map(parts).collect::<Result<_, _>>()?;
        Ok(Self { patterns })
    }

    /// Returns whether the list contains a name, without expanding the list.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.patterns.iter().any(|pattern| matches(pattern, name))
    }

    /// Returns all names of the list, in order.
    ///
    /// # Errors
    /// The list has too many names.
    pub fn expand(&self) -> Result<Vec<String>, HostListError> {
        let mut all = Vec::new();
        for pattern in &self.patterns {
            let mut names = vec![String::new()];
            for part in pattern {
                names = match part {
                    Part::Text(text) => names.into_iter().map(|name| name + text).collect(),
                    Part::Ranges(ranges) => {
                        let each: usize = ranges.iter().map(|range| (range.high - range.low) as usize + 1).sum();
                        if names.len().saturating_mul(each) > MOST {
                            return Err(HostListError::TooMany);
                        }
                        let numbers = || ranges.iter().flat_map(|range| range.numbers());
                        names.iter().flat_map(|name| numbers().map(move |number| format!("{name}{number}"))).collect()
                    }
                };
            }
            all.append(&mut names);
            if all.len() > MOST {
                return Err(HostListError::TooMany);
            }
        }
        Ok(all)
    }
}

impl Range {
    fn parse(text: &str) -> Option<Self> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let number = |digits: &str| {
            let valid = (1..=MOST_DIGITS).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
            if valid { digits.parse().ok() } else { None }
        };
        let (first, last): (u32, u32) = (number(low)?, number(high)?);
        (first <= last).then_some(Self { low: first, high: last, width: low.len() })
    }

    fn numbers(self) -> impl Iterator<Item = String> {
        (self.low..=self.high).map(move |number| format!("{number:0width$}", width = self.width))
    }

    fn contains(self, digits: &str) -> bool {
        digits.len() <= MOST_DIGITS
            && digits.parse().is_ok_and(|number: u32| {
                (self.low..=self.high).contains(&number) && format!("{number:0width$}", width = self.width) == digits
            })
    }
}

/// Splits a list at the commas that are outside of brackets.
fn split(text: &str) -> Result<Vec<&str>, HostListError> {
    let mut words = Vec::new();
    let (mut from, mut inside) = (0, false);
    for (at, byte) in text.bytes().enumerate() {
        match (byte, inside) {
            (b'[', false) => inside = true,
            (b']', true) => inside = false,
            (b'[', true) | (b']', false) => return Err(HostListError::Bracket(text.to_owned())),
            (b',', false) => {
                words.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err(HostListError::Bracket(text.to_owned()));
    }
    words.push(&text[from..]);
    words.retain(|word| !word.is_empty());
    Ok(words)
}

/// Parses one word of a list. The brackets in the word must match.
fn parts(word: &str) -> Result<Vec<Part>, HostListError> {
    let mut parts = Vec::new();
    let mut rest = word;
    while let Some((text, after)) = rest.split_once('[') {
        let (inside, after) = after.split_once(']').ok_or_else(|| HostListError::Bracket(word.to_owned()))?;
        if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
        }
        let ranges = inside
            .split(',')
            .map(|range| Range::parse(range).ok_or_else(|| HostListError::Range(range.to_owned())))
            .collect::<Result<_, _>>()?;
        parts.push(Part::Ranges(ranges));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest.to_owned()));
    }
    Ok(parts)
}

fn matches(pattern: &[Part], name: &str) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((Part::Text(text), rest)) => name.strip_prefix(text.as_str()).is_some_and(|name| matches(rest, name)),
        Some((Part::Ranges(ranges), rest)) => {
            let digits = name.bytes().take(MOST_DIGITS).take_while(u8::is_ascii_digit).count();
            (1..=digits).any(|length| {
                let (number, name) = name.split_at(length);
                ranges.iter().any(|range| range.contains(number)) && matches(rest, name)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expanded(text: &str) -> Vec<String> {
        HostList::parse(text).and_then(|list| list.expand()).expect("a list")
    }

    #[test]
    fn lists_expand_in_the_written_order() {
        assert_eq!(
            expanded("/dev/nvidia[3,0-1],/dev/nvidia2"),
            ["/dev/nvidia3", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"]
        );
        assert_eq!(expanded("n[08-10]"), ["n08", "n09", "n10"]);
        assert_eq!(expanded("r[0-1]n[0-1]"), ["r0n0", "r0n1", "r1n0", "r1n1"]);
        assert_eq!(expanded(""), [""; 0]);
    }

    #[test]
    fn wrong_lists_are_refused() {
        for text in ["n[0-1", "n0]", "n[[0]]", "n[3-0]", "n[v]", "n[]", "n[0-]", "n[1-2-3]", "n[1 2]", "n[+1]"] {
            assert!(HostList::parse(text).is_err(), "{text}");
        }
        assert_eq!(HostList::parse("n[0-999999999]").and_then(|list| list.expand()), Err(HostListError::TooMany));
        assert!(HostList::parse("n[0-999999999]").is_ok_and(|list| list.contains("n123456789")));
    }

    #[test]
    fn width_counts_for_membership() {
        let list = HostList::parse("n[08-10],m[1-3]").expect("a list");
        for (name, inside) in [("n08", true), ("n8", false), ("n10", true), ("m2", true), ("m02", false), ("n", false)]
        {
            assert_eq!(list.contains(name), inside, "{name}");
        }
    }

    proptest! {
        /// A name is in the list if and only if the expanded list contains it. No text causes a
        /// panic.
        #[test]
        fn membership_agrees_with_expansion(text in "([a-c]{0,2}(\\[[0-9]{1,2}(-[0-9]{1,2})?(,[0-9]{1,2})?\\])?,?){0,3}") {
            if let Ok(list) = HostList::parse(&text) {
                // Three long ranges together can have more names than a list may have.
                let Ok(names) = list.expand() else { return Ok(()) };
                for name in &names {
                    prop_assert!(list.contains(name), "{name}");
                }
                for number in 0..120 {
                    for stem in ["a", "b", "ab", ""] {
                        let name = format!("{stem}{number}");
                        prop_assert_eq!(list.contains(&name), names.contains(&name), "{}", name);
                    }
                }
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".{0,60}", name in ".{0,20}") {
            if let Ok(list) = HostList::parse(&text) {
                let _ = list.expand();
                let _ = list.contains(&name);
            }
        }
    }
}
