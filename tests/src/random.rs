//! Seeds and numbers for random tests.

/// Creates a generator from the seed in `GPUSH_TEST_SEED`, or from `usual`. Also returns the seed, so
/// that a test can print it.
#[must_use]
pub fn seeded(usual: u64) -> (fastrand::Rng, u64) {
    let seed = number("GPUSH_TEST_SEED", usual);
    (fastrand::Rng::with_seed(seed), seed)
}

/// Returns the number in an environment variable, or `usual`.
#[must_use]
pub fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}
