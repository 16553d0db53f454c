//! The major numbers of character devices that a scope lists.
//!
//! systemd turns each line of a list into instructions for the kernel. A list of all 512 numbers delays the start of a scope
//! by about 30 ms. So the list of a scope has the numbers in use, and the next ones that the kernel gives to a driver
//! without a fixed number.

use std::collections::BTreeSet;

/// The largest major number of a character device.
const MOST: u32 = 511;

/// Number of free dynamic major numbers in a list. A driver without a fixed number, such as `nvidia-uvm`, may be loaded after
/// the scope starts.
const NEXT: usize = 8;

/// Major numbers of character devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CharacterMajors(BTreeSet<u32>);

impl Default for CharacterMajors {
    /// All numbers.
    fn default() -> Self {
        Self((0..=MOST).collect())
    }
}

impl CharacterMajors {
    /// Returns the numbers in use and the next ones, from the text of `/proc/devices`. Without a number in the text, all
    /// numbers.
    #[must_use]
    pub fn of(devices: &str) -> Self {
        let lines = devices.lines().take_while(|line| !line.starts_with("Block devices"));
        let numbers = lines.filter_map(|line| line.split_whitespace().next()?.parse().ok());
        let mut majors: BTreeSet<u32> = numbers.filter(|major| *major <= MOST).collect();
        if majors.is_empty() {
            return Self::default();
        }
        // The order in which the kernel gives them (`find_dynamic_major`).
        let dynamic = (234..=254).rev().chain((384..=MOST).rev());
        let next: Vec<u32> = dynamic.filter(|major| !majors.contains(major)).take(NEXT).collect();
        majors.extend(next);
        Self(majors)
    }

    /// Returns the numbers.
    pub(super) fn all(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_the_numbers_in_use_and_the_next_ones() {
        let text = "Character devices:\n  1 mem\n  5 /dev/tty\n  5 /dev/console\n195 nvidia\n254 ndctl\n252 dax\n\n\
                    Block devices:\n  7 loop\n259 blkext\n";
        let majors: Vec<u32> = CharacterMajors::of(text).all().collect();
        assert_eq!(majors, [1, 5, 195, 245, 246, 247, 248, 249, 250, 251, 252, 253, 254]);
    }

    #[test]
    fn full_dynamic_range_continues_at_511() {
        let text: String = (234..=254).map(|major| format!("{major} x\n")).collect();
        let majors = CharacterMajors::of(&text);
        assert!((504..=511).all(|major| majors.0.contains(&major)) && !majors.0.contains(&503));
    }

    #[test]
    fn text_without_numbers_gives_all_numbers() {
        assert_eq!(CharacterMajors::of("Character devices:\n"), CharacterMajors::default());
        assert_eq!(CharacterMajors::default().all().count(), 512);
    }
}
