//! The recorded requests, and how many of them a number of equal shares meets.
//!
//! ```text
//! granted leases: requested at, length ───────────────────┐
//! refusals of each day and share ──spread over busy times─┴─► requests by share ──► met by 0, 1, 2 … shares
//! ```
//!
//! A request is met if a share of its kind is free when it arrives. It holds the share for its length. Nothing waits.
//!
//! The replay assumes the values that are not recorded. A refused request has neither a time nor a length. The capacity
//! was in use when it was refused, so the refusals of a day are spread over the time in which the most leases of the
//! same share were held. They last as long as the median of these leases. A user who repeats a refused request counts
//! again, but at most [`MOST_REFUSALS`] times a day. Without a granted lease, the length is not known, so the replay
//! leaves out the refusals.

use std::{cmp::Reverse, collections::BTreeMap};

use gpush_api::{LeaseKind, UsageHistory, UsedLease, UsedTarget};
use serde::Serialize;

/// Name of the share of a whole GPU.
pub const WHOLE: &str = "whole";

/// Maximum number of refusals of one share and day that are replayed.
pub const MOST_REFUSALS: u64 = 500;

const DAY_MS: i64 = 24 * 3600 * 1000;

/// A request for one share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReplayedRequest {
    /// Time of the request in ms since 1970.
    pub(crate) at_ms: i64,
    /// How long it holds the share, in ms.
    pub(crate) length_ms: i64,
}

/// The recorded requests.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RecordedRequests {
    /// The requests for each share, in the order of time. The key is a profile, or [`WHOLE`].
    pub(crate) by_share: BTreeMap<String, Vec<ReplayedRequest>>,
    pub(crate) counts: RequestTally,
}

/// The numbers of requests that are replayed, and of those that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct RequestTally {
    /// Requests that were granted; their times are recorded. A lease of several targets counts once for each.
    pub replayed_grants: usize,
    /// Requests that were refused because the capacity was in use; their times are assumed.
    pub replayed_refusals: usize,
    /// Granted requests for other shares, on GPUs that have no fixed layout, or of unknown profiles.
    pub other_grants: usize,
    /// Refused requests for other shares, without a profile, of unknown length, or beyond the limit of a day.
    pub other_refusals: u64,
}

impl RecordedRequests {
    /// Returns the requests for shares that a layout can contain. `is_replayed` says whether a target is on a GPU whose layout
    /// is compared, and `is_known` whether one of these GPUs can have the share.
    pub(crate) fn of(
        history: &UsageHistory,
        is_replayed: impl Fn(&UsedTarget) -> bool,
        is_known: impl Fn(&str) -> bool,
    ) -> Self {
        let mut requests = Self::default();
        let mut holds: BTreeMap<String, Vec<Hold>> = BTreeMap::new();
        for lease in &history.used_leases {
            for target in &lease.used_targets {
                match share(target).filter(|share| is_replayed(target) && is_known(share)) {
                    Some(share) => {
                        requests.by_share.entry(share.to_owned()).or_default().push(granted(lease, history));
                        holds.entry(share.to_owned()).or_default().push(hold(lease, history));
                        requests.counts.replayed_grants += 1;
                    }
                    None => requests.counts.other_grants += 1,
                }
            }
        }
        let medians: BTreeMap<String, i64> =
            requests.by_share.iter().map(|(share, granted)| (share.clone(), median_length(granted))).collect();
        for day in &history.request_days {
            for line in &day.request_lines {
                let share = if line.share_kind == WHOLE { WHOLE } else { line.profile.as_str() };
                let kinds = [LeaseKind::Mig.name(), LeaseKind::Whole.name()];
                let is_replayable = kinds.contains(&line.share_kind.as_str()) && is_known(share);
                let length_ms = medians.get(share).filter(|_| is_replayable);
                let replayed = if length_ms.is_some() { line.no_capacity.min(MOST_REFUSALS) } else { 0 };
                requests.counts.other_refusals += line.no_capacity - replayed;
                let (Some(length_ms), Some(holds)) = (length_ms, holds.get(share)) else { continue };
                let times = refused_at(holds, day.day.as_millisecond(), replayed, history);
                let spread: Vec<ReplayedRequest> =
                    times.into_iter().map(|at_ms| ReplayedRequest { at_ms, length_ms: *length_ms }).collect();
                requests.counts.replayed_refusals += spread.len();
                requests.by_share.entry(share.to_owned()).or_default().extend(spread);
            }
        }
        requests.by_share.values_mut().for_each(|all| all.sort_unstable());
        requests
    }
}

/// Returns the share that a layout must contain for a target; `None` for shares that a layout cannot contain.
fn share(target: &UsedTarget) -> Option<&str> {
    if target.share_kind == LeaseKind::Whole.name() { Some(WHOLE) } else { target.profile.as_deref() }
}

/// Returns the request of a lease: it arrived before the time in the queue. An open lease lasts until now.
fn granted(lease: &UsedLease, history: &UsageHistory) -> ReplayedRequest {
    let begun_ms = lease.begun_at.as_millisecond();
    let end_ms = lease.ended_at.unwrap_or(history.until).as_millisecond();
    let waited_ms = i64::try_from(lease.waited_s).unwrap_or(i64::MAX).saturating_mul(1000);
    ReplayedRequest { at_ms: begun_ms.saturating_sub(waited_ms), length_ms: end_ms.saturating_sub(begun_ms).max(1) }
}

/// The time in which a lease held its share, in ms since 1970.
type Hold = (i64, i64);

fn hold(lease: &UsedLease, history: &UsageHistory) -> Hold {
    (lease.begun_at.as_millisecond(), lease.ended_at.unwrap_or(history.until).as_millisecond())
}

/// Returns the times of the refused requests of a day. Spreads them evenly over the busiest times of the day within the
/// period. `holds` are those of the leases with the same share.
fn refused_at(holds: &[Hold], day_ms: i64, count: u64, history: &UsageHistory) -> Vec<i64> {
    let from = day_ms.max(history.from.as_millisecond());
    let until = day_ms.saturating_add(DAY_MS).min(history.until.as_millisecond()).max(from);
    let busiest = busiest_times(holds, from, until);
    let total: i64 = busiest.iter().map(|(from, until)| until - from).sum();
    let number = i64::try_from(count).unwrap_or(i64::MAX);
    // The middles of equal parts of the time.
    (0..number).map(|index| time_at(&busiest, total / (2 * number) + total / number * index)).collect()
}

/// Returns the times between two times in which the most leases hold a share; the whole time if none does.
fn busiest_times(holds: &[Hold], from: i64, until: i64) -> Vec<(i64, i64)> {
    let mut changes: Vec<(i64, i64)> = holds
        .iter()
        .map(|(begun, ended)| ((*begun).max(from), (*ended).min(until)))
        .filter(|(begun, ended)| begun < ended)
        .flat_map(|(begun, ended)| [(begun, 1), (ended, -1)])
        .collect();
    // At the same time, an end comes before a start.
    changes.sort_unstable();
    let (mut held, mut most, mut busiest) = (0, 0, vec![(from, until)]);
    for (at, change) in changes {
        if let Some(last) = busiest.last_mut().filter(|_| held == most && held > 0) {
            last.1 = last.1.min(at);
        }
        held += change;
        if held > most {
            (most, busiest) = (held, vec![(at, until)]);
        } else if held == most && held > 0 {
            busiest.push((at, until));
        }
    }
    busiest
}

/// Returns the time that is `offset` after the start of these times, without the time between them.
fn time_at(times: &[(i64, i64)], mut offset: i64) -> i64 {
    for (from, until) in times {
        if offset < until - from {
            return from + offset;
        }
        offset -= until - from;
    }
    times.last().map_or(0, |(_, until)| *until)
}

/// Returns the median of the lengths; 1 ms without requests.
fn median_length(requests: &[ReplayedRequest]) -> i64 {
    let mut lengths: Vec<i64> = requests.iter().map(|request| request.length_ms).collect();
    lengths.sort_unstable();
    lengths.get(lengths.len() / 2).copied().unwrap_or(1)
}

/// Returns the numbers of requests that 0, 1, 2 … shares meet. `requests` are in the order of time. The last number of
/// shares is the first that meets all, or `most`.
///
/// One more share never meets fewer requests: if it takes only the requests that the others cannot meet, the others
/// meet the same requests as before.
pub(crate) fn met_by_number(requests: &[ReplayedRequest], most: usize) -> Vec<usize> {
    let mut met = vec![0];
    for number in 1..=most {
        if met.last().is_some_and(|last| *last == requests.len()) {
            break;
        }
        met.push(met_by(requests, number));
    }
    met
}

/// Returns how many requests a number of equal shares meets.
fn met_by(requests: &[ReplayedRequest], number: usize) -> usize {
    let mut ends: std::collections::BinaryHeap<Reverse<i64>> = std::collections::BinaryHeap::new();
    let mut met = 0;
    for request in requests {
        while ends.peek().is_some_and(|Reverse(end)| *end <= request.at_ms) {
            ends.pop();
        }
        if ends.len() < number {
            ends.push(Reverse(request.at_ms.saturating_add(request.length_ms)));
            met += 1;
        }
    }
    met
}

#[cfg(test)]
pub(crate) mod tests {
    use gpush_api::{LeaseId, RequestDay, RequestLine};
    use jiff::Timestamp;
    use proptest::prelude::*;

    use super::*;
    use crate::right_size::tests::{lease, target};

    pub(crate) const HOUR_MS: i64 = 3_600_000;
    /// Start of a UTC day.
    pub(crate) const START_MS: i64 = 20_000 * DAY_MS;

    fn time(ms: i64) -> Timestamp {
        Timestamp::from_millisecond(ms).unwrap()
    }

    /// Returns a lease of a share from one hour to another after the start.
    pub(crate) fn held(share: &str, from: i64, until: i64) -> UsedLease {
        let kind = if share == WHOLE { "whole" } else { "mig" };
        let profile = (share != WHOLE).then_some(share);
        UsedLease {
            lease_id: LeaseId(1),
            begun_at: time(START_MS + from * HOUR_MS),
            ended_at: Some(time(START_MS + until * HOUR_MS)),
            ..lease(1, "anna", vec![target(kind, profile, 1_000, 1_000)])
        }
    }

    pub(crate) fn line(kind: &str, profile: &str, no_capacity: u64) -> RequestLine {
        RequestLine { share_kind: kind.to_owned(), profile: profile.to_owned(), no_capacity, ..RequestLine::default() }
    }

    /// Returns a history of two days.
    pub(crate) fn history(used_leases: Vec<UsedLease>, request_lines: Vec<RequestLine>) -> UsageHistory {
        UsageHistory {
            from: time(START_MS),
            until: time(START_MS + 2 * DAY_MS),
            user: None,
            used_leases,
            has_older_leases: false,
            request_days: vec![RequestDay { day: time(START_MS), request_lines }],
        }
    }

    fn requests(history: &UsageHistory) -> RecordedRequests {
        RecordedRequests::of(history, |_| true, |share| share == WHOLE || share == "1g.10gb")
    }

    /// Fault: refusals were spread over the whole day, so today's layouts met requests that they had refused.
    #[test]
    fn refusals_are_spread_over_the_busiest_time_with_the_median_length() {
        // Two shares are held from 4 to 5 and from 12 to 15.
        let leases =
            vec![held("1g.10gb", 0, 5), held("1g.10gb", 4, 9), held("1g.10gb", 10, 15), held("1g.10gb", 12, 26)];
        let found = requests(&history(leases, vec![line("mig", "1g.10gb", 2)]));
        let of_median = found.by_share["1g.10gb"].iter().filter(|request| request.length_ms == 5 * HOUR_MS);
        let hours: Vec<i64> = of_median.map(|request| (request.at_ms - START_MS) / HOUR_MS).collect();
        assert_eq!(hours, [0, 4, 10, 12, 14], "granted at 0, 4 and 10, refused at 12 and 14");
        let counts = RequestTally { replayed_grants: 4, replayed_refusals: 2, ..RequestTally::default() };
        assert_eq!(found.counts, counts);
    }

    /// Fault: the time in the queue counted as held, and the end of the lease did not.
    #[test]
    fn lease_is_held_from_its_grant_to_its_end() {
        let queued = UsedLease { waited_s: 4 * 3600, ..held("1g.10gb", 5, 10) };
        let found = requests(&history(vec![held("1g.10gb", 0, 5), queued], vec![line("mig", "1g.10gb", 2)]));
        let of_median = found.by_share["1g.10gb"].iter();
        let hours: Vec<i64> = of_median.map(|request| (request.at_ms - START_MS) * 2 / HOUR_MS).collect();
        assert_eq!(hours, [0, 2, 5, 15], "in half hours; requested at 0 and 1, refused at 2.5 and 7.5");
    }

    #[test]
    fn refusals_without_a_lease_on_their_day_are_spread_over_the_day() {
        let found = requests(&history(vec![held("1g.10gb", 30, 33)], vec![line("mig", "1g.10gb", 2)]));
        let hours: Vec<i64> =
            found.by_share["1g.10gb"].iter().map(|request| (request.at_ms - START_MS) / HOUR_MS).collect();
        assert_eq!(hours, [6, 18, 30]);
    }

    #[test]
    fn requests_that_cannot_be_replayed_are_counted() {
        let leases = vec![held(WHOLE, 0, 1), held("2g.20gb", 0, 1)];
        let lines = vec![
            line("whole", "", MOST_REFUSALS + 7),
            line("mig", "1g.10gb", 3),
            line("mig", "10 GiB", 4),
            line("mps", "", 5),
            line("default", "", 6),
        ];
        let found = requests(&history(leases, lines));
        let expected = RequestTally {
            replayed_grants: 1,
            replayed_refusals: usize::try_from(MOST_REFUSALS).unwrap(),
            other_grants: 1,
            other_refusals: 7 + 3 + 4 + 5 + 6,
        };
        assert_eq!(found.counts, expected);
    }

    #[test]
    fn queued_lease_is_requested_before_its_grant() {
        let waited = UsedLease { waited_s: 3600, ended_at: None, ..held("1g.10gb", 3, 4) };
        let found = requests(&history(vec![waited], Vec::new()));
        let [request] = found.by_share["1g.10gb"][..] else { panic!("{found:?}") };
        assert_eq!((request.at_ms, request.length_ms), (START_MS + 2 * HOUR_MS, 2 * DAY_MS - 3 * HOUR_MS));
    }

    #[test]
    fn share_is_free_again_when_its_request_has_ended() {
        let request = |at_ms, length_ms| ReplayedRequest { at_ms, length_ms };
        let all = [request(0, 10), request(5, 5), request(10, 5), request(12, 1)];
        assert_eq!(met_by_number(&all, 9), [0, 2, 4]);
        assert_eq!(met_by_number(&[], 9), [0]);
        assert_eq!(met_by_number(&all, 1), [0, 2]);
    }

    proptest! {
        /// One more share meets at least as many requests, and enough shares meet all.
        #[test]
        fn more_shares_meet_at_least_as_many(requests in prop::collection::vec((0i64..1000, 1i64..300), 0..60)) {
            let mut all: Vec<_> =
                requests.iter().map(|(at_ms, length_ms)| ReplayedRequest { at_ms: *at_ms, length_ms: *length_ms }).collect();
            all.sort_unstable();
            let met = met_by_number(&all, all.len());
            prop_assert!(met.is_sorted());
            prop_assert_eq!(met.last(), Some(&all.len()));
        }
    }
}
