//! The past of a lease as gpushd has recorded it. It can be older than the picture.

use gpush_api::{LeasePast, UsageBucket};

use super::details::row_of_bars;
use crate::render::{
    Appearance,
    appearance::{STRONG, paint},
};

/// Draws the busy part of each minute, hour and day. Draws nothing if none is known.
pub(in super::super) fn lines(past: &LeasePast, look: &Appearance) -> Vec<String> {
    let rows = [("by minute", &past.minutes), ("by hour", &past.hours), ("by day", &past.days)];
    let rows =
        rows.into_iter().filter_map(|(name, buckets)| row_of_bars(name, buckets.iter().map(busy).collect(), look));
    let rows: Vec<String> = rows.collect();
    if rows.is_empty() {
        return rows;
    }
    [String::new(), paint(STRONG, "Busy time")].into_iter().chain(rows).collect()
}

/// Returns the busy part of the known time.
fn busy(bucket: &UsageBucket) -> Option<f64> {
    let known = bucket.busy_s + bucket.unused_s;
    (known > 0).then(|| bucket.busy_s as f64 / known as f64)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::render::{Charset, fixtures};

    fn bucket(busy_s: u64, unused_s: u64, unknown_s: u64) -> UsageBucket {
        let begins_at = Timestamp::UNIX_EPOCH;
        UsageBucket { begins_at, busy_s, unused_s, unknown_s, memory_peak_mib: 0, energy_j: 0.0 }
    }

    #[test]
    fn unknown_time_is_a_gap_and_a_row_without_known_time_is_left_out() {
        let past = LeasePast {
            lease_id: gpush_api::LeaseId(17),
            minutes: vec![bucket(60, 0, 0), bucket(0, 0, 60), bucket(0, 60, 0), bucket(30, 30, 0)],
            hours: vec![bucket(0, 0, 3600)],
            days: Vec::new(),
        };
        let text = fixtures::plain(&lines(&past, &fixtures::look(80, Charset::Ascii)).join("\n"));
        assert_eq!(text, "\nBusy time\n  by minute     # _=");
        let nothing = LeasePast { minutes: Vec::new(), ..past };
        assert!(lines(&nothing, &fixtures::look(80, Charset::Ascii)).is_empty());
    }
}
