//! How many requests for leases were granted, queued and refused, by the requested share. So administrators see which
//! shares the host has too few of.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, LeaseShare};
use gpush_locked::Locked;

/// Maximum number of different shares. A request can name any amount of memory, so further ones count together.
const MOST: usize = 100;

/// The profile of requests for a profile that no GPU of the host has.
const UNKNOWN: &str = "unknown";

/// The share that a request names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RequestedShare {
    /// Kind, such as `mig`; `default` if the request names none.
    pub(crate) kind: &'static str,
    /// Profile of a MIG device; empty for other shares.
    pub(crate) profile: String,
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RequestResult {
    /// Granted at once.
    Granted,
    /// Queued.
    Queued,
    /// Refused, because the capacity is in use.
    NoCapacity,
    /// Refused, because the GPUs that could meet it are not ready: cordoned, in maintenance or faulty.
    NotReady,
    /// Refused by a quota, a rule or a missing permission.
    NotAllowed,
    /// Refused, because the host can never meet it.
    Impossible,
    /// Refused, because something failed.
    Failed,
}

impl RequestResult {
    /// All results.
    const ALL: [Self; 7] = [
        Self::Granted,
        Self::Queued,
        Self::NoCapacity,
        Self::NotReady,
        Self::NotAllowed,
        Self::Impossible,
        Self::Failed,
    ];

    /// Returns the result with a name.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|result| result.name() == name)
    }

    /// Returns the name in labels and in the store.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Queued => "queued",
            Self::NoCapacity => "no_capacity",
            Self::NotReady => "not_ready",
            Self::NotAllowed => "not_allowed",
            Self::Impossible => "impossible",
            Self::Failed => "failed",
        }
    }

    /// Returns the result of a request that was refused with an error, for a reason other than GPUs that are not ready.
    pub(crate) fn of_error(error: &ApiError) -> Self {
        match error.code {
            Code::Blocked | Code::Conflict | Code::Resetting => Self::NoCapacity,
            Code::Denied => Self::NotAllowed,
            Code::BadRequest | Code::NotFound | Code::UnknownProfile | Code::LayoutImpossible | Code::Unsupported => {
                Self::Impossible
            }
            Code::Cancelled
            | Code::DriverUnavailable
            | Code::DriverError
            | Code::DriverTimeout
            | Code::GpuLost
            | Code::ConfigInvalid
            | Code::Internal
            | Code::Unavailable
            | Code::Stopping
            | Code::Unreachable
            | Code::TimedOut => Self::Failed,
        }
    }
}

/// The counts since gpushd started.
#[derive(Debug, Default)]
pub(crate) struct RequestCounts(Locked<BTreeMap<(RequestedShare, RequestResult), u64>>);

impl RequestCounts {
    /// Counts a request. `is_known` says whether a GPU of the host has a profile; all other names count together, because
    /// users can invent any number of names.
    pub(crate) fn note(&self, share: &LeaseShare, result: RequestResult, is_known: impl FnOnce(&str) -> bool) {
        let mut key = (requested(share), result);
        if let LeaseShare::MigProfile { profile } = share
            && !is_known(profile)
        {
            key.0.profile = UNKNOWN.to_owned();
        }
        let mut counts = self.0.lock();
        if counts.len() >= MOST && !counts.contains_key(&key) {
            key.0.profile = if key.0.profile.is_empty() { String::new() } else { "other".to_owned() };
        }
        *counts.entry(key).or_default() += 1;
    }

    /// Returns the counts.
    pub(crate) fn list(&self) -> Vec<(RequestedShare, RequestResult, u64)> {
        let counts = self.0.lock();
        counts.iter().map(|((share, result), count)| (share.clone(), *result, *count)).collect()
    }
}

fn requested(share: &LeaseShare) -> RequestedShare {
    let (kind, profile) = match share {
        LeaseShare::Default {} => ("default", String::new()),
        LeaseShare::MigProfile { profile } => ("mig", profile.chars().take(32).collect()),
        LeaseShare::MigSize { memory_mib, slices } => {
            let memory = memory_mib.map(|mib| format!("{} GiB", mib.div_ceil(1024)));
            let slices = slices.map(|slices| format!("{slices} slices"));
            ("mig", memory.into_iter().chain(slices).collect::<Vec<_>>().join(", "))
        }
        LeaseShare::Mps { .. } => ("mps", String::new()),
        LeaseShare::Timeslice {} => ("timeslice", String::new()),
        LeaseShare::Whole {} => ("whole", String::new()),
    };
    RequestedShare { kind, profile }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_by_share_and_result() {
        let counts = RequestCounts::default();
        let mig = LeaseShare::MigProfile { profile: "7g.80gb".to_owned() };
        let is_known = |profile: &str| profile == "7g.80gb";
        counts.note(&mig, RequestResult::Granted, is_known);
        counts.note(&mig, RequestResult::NotReady, is_known);
        for code in [Code::Blocked, Code::Blocked, Code::Denied, Code::Unsupported, Code::Internal] {
            counts.note(&mig, RequestResult::of_error(&ApiError::new(code, "no")), is_known);
        }
        let size = LeaseShare::MigSize { memory_mib: Some(10_240), slices: Some(2) };
        counts.note(&size, RequestResult::Queued, is_known);
        let list: Vec<_> = counts
            .list()
            .into_iter()
            .map(|(share, result, count)| (share.kind, share.profile, result.name(), count))
            .collect();
        let mig = |result, count| ("mig", "7g.80gb".to_owned(), result, count);
        let expected = [
            ("mig", "10 GiB, 2 slices".to_owned(), "queued", 1),
            mig("granted", 1),
            mig("no_capacity", 2),
            mig("not_ready", 1),
            mig("not_allowed", 1),
            mig("impossible", 1),
            mig("failed", 1),
        ];
        assert_eq!(list, expected);
    }

    /// Each request can name another profile, or another amount of memory. Fault: invented profiles made 100 metrics.
    #[test]
    fn invented_shares_do_not_grow_the_counts() {
        let counts = RequestCounts::default();
        for number in 0..10 * MOST {
            let share = LeaseShare::MigProfile { profile: format!("{number}g.1gb") };
            counts.note(&share, RequestResult::Impossible, |_| false);
        }
        let list = counts.list();
        assert_eq!((list.len(), list[0].0.profile.as_str(), list[0].2), (1, UNKNOWN, 10 * MOST as u64));
        for number in 0..10 * MOST as u64 {
            let share = LeaseShare::MigSize { memory_mib: Some(number * 1024), slices: None };
            counts.note(&share, RequestResult::NoCapacity, |_| false);
        }
        assert_eq!(counts.list().len(), MOST + 1);
    }
}
