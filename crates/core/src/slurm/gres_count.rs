//! Counts in Slurm's files.

/// Parses a count such as `4` or `10G`. Slurm's suffixes are powers of 1024.
pub(super) fn count(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let power = match suffix.to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        "p" => 5,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1024u64.checked_pow(power)?)
}
