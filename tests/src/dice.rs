//! Random numbers for tests. The same seed gives the same numbers.

/// The splitmix64 generator.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Creates a generator from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates a generator from the seed in `GPUSH_TEST_SEED`, or from `usual`. Also returns the
    /// seed, so that a test can print it.
    #[must_use]
    pub fn seeded(usual: u64) -> (Self, u64) {
        let seed = number("GPUSH_TEST_SEED", usual);
        (Self(seed), seed)
    }

    /// Returns a number below `most`.
    ///
    /// # Panics
    /// If `most` is 0.
    pub fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % most as u64).expect("a small number")
    }
}

/// Returns the number in an environment variable, or `usual`.
#[must_use]
pub fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}
