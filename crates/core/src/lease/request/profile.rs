//! The form of the name of a MIG profile.

/// Maximum length of a profile name. NVIDIA's longest name has 13 characters.
const LONGEST_PROFILE: usize = 32;

/// Checks that a text has the form of a profile name. Placement checks later whether a GPU has the
/// profile.
pub(super) fn profile(text: &str) -> Result<String, String> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b".+-".contains(&b);
    let lower = text.to_ascii_lowercase();
    let is_name = lower.len() <= LONGEST_PROFILE && lower.contains("g.") && lower.bytes().all(plain);
    if is_name { Ok(lower) } else { Err("write a profile name, such as 1g.10gb or 1c.3g.40gb".to_owned()) }
}
