//! Which profiles the requests name.

pub(crate) const MODEL: &str = "a100-80";
/// The profiles, in order of size.
pub(crate) const PROFILES: [&str; 6] = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"];
/// Offered loads in percent of the host's memory slices.
pub(crate) const LOADS: [usize; 3] = [80, 100, 130];
/// Number of requests of each profile, in the order of [`PROFILES`].
pub(crate) type Weights = [usize; 6];

/// The mixes. The last two are the requests of a public trace of a cluster (Alibaba's openb), rounded up to profiles, with
/// and without its pods that use a whole GPU.
pub(crate) const MIXES: [(&str, Weights); 8] = [
    ("mixed", [50, 0, 20, 15, 10, 5]),
    ("large", [25, 0, 20, 25, 20, 10]),
    ("uniform", [1, 1, 1, 1, 1, 1]),
    ("inverse", [8, 4, 4, 2, 2, 1]),
    ("1g and 7g", [80, 0, 0, 0, 0, 20]),
    ("bimodal", [60, 0, 0, 25, 15, 0]),
    ("openb", [31, 0, 277, 1292, 0, 5389]),
    ("openb, shared", [31, 0, 277, 1292, 0, 1478]),
];

/// Returns the mixes in words.
pub(crate) fn text() -> String {
    let profiles = PROFILES.map(|profile| format!("`{profile}`")).join(", ");
    let mix =
        |(name, weights): &(&str, Weights)| format!("{name} {}", weights.map(|weight| weight.to_string()).join(":"));
    format!("{} (requests for {profiles})", MIXES.iter().map(mix).collect::<Vec<_>>().join(", "))
}
