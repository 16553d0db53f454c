//! Pauses between attempts.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// Returns endless pauses. The first pause has the length `first`; each further pause is twice as long, at most
/// `longest`.
pub(crate) fn backoff((first, longest): (Duration, Duration)) -> ExponentialBackoff {
    ExponentialBuilder::new().with_min_delay(first).with_max_delay(longest).without_max_times().build()
}
