//! The time until something happens to a lease, in words.

use std::time::Duration;

use jiff::Timestamp;

use crate::duration;

/// Formats the time until `at`: `in 10m`, or `now`.
pub(super) fn within(at: Timestamp, now: Timestamp) -> String {
    // Round up: the part of a second that has passed since the change does not matter to a reader.
    let millis = at.duration_since(now).as_millis();
    let seconds = u64::try_from(millis).unwrap_or(0).div_ceil(1000);
    if seconds == 0 { "now".to_owned() } else { format!("in {}", duration::format(Duration::from_secs(seconds))) }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn time_of_a_notice_is_rounded_up() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let ends = |millis: i64| within(now + SignedDuration::from_millis(millis), now);
        assert_eq!((ends(59_300), ends(0), ends(-5000)), ("in 1m".to_owned(), "now".to_owned(), "now".to_owned()));
    }
}
