//! Numbers for tests that try what comes: the same again for the same seed.

/// splitmix64.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// With the seed that the environment names, or this one; which is told, so that it can be had again.
    #[must_use]
    pub fn seeded(usual: u64) -> (Self, u64) {
        let seed = number("GPUSH_TEST_SEED", usual);
        (Self(seed), seed)
    }

    /// A number below `most`.
    ///
    /// # Panics
    /// When `most` is 0.
    pub fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % most as u64).expect("a small number")
    }
}

/// A number that the environment names, or the usual one.
#[must_use]
pub fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}
