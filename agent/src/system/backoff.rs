//! Pauses between attempts.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// Returns endless pauses. The first pause has the length `first`; each further pause is twice as long, at most
/// `longest`.
pub(crate) fn backoff((first, longest): (Duration, Duration)) -> ExponentialBackoff {
    ExponentialBuilder::new().with_min_delay(first).with_max_delay(longest).without_max_times().build()
}

/// Returns the pause number `index` of [`backoff`], counted from 0. This function is for callers that count their
/// attempts.
pub(crate) fn nth_pause(pauses: (Duration, Duration), index: u32) -> Duration {
    // In gpushd, every backoff reaches its longest pause before this index.
    backoff(pauses).nth(index.min(32) as usize).unwrap_or(pauses.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses = (Duration::from_secs(1), Duration::from_secs(60));
        let seconds = [0, 1, 2, 5, 6, u32::MAX].map(|index| nth_pause(pauses, index).as_secs());
        assert_eq!(seconds, [1, 2, 4, 32, 60, 60]);
    }
}
