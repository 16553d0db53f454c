//! How many requests for leases were granted, queued and refused, by the requested share. So administrators see which
//! shares the host has too few of.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, LeaseShare};
use gpush_locked::Locked;

/// Maximum number of different shares. A profile name in a request is text of a user, so further ones count together.
const MOST: usize = 100;

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
    /// Refused by a quota, a rule or a missing permission.
    NotAllowed,
    /// Refused, because the host can never meet it.
    Impossible,
    /// Refused, because something failed.
    Failed,
}

impl RequestResult {
    /// All results.
    const ALL: [Self; 6] =
        [Self::Granted, Self::Queued, Self::NoCapacity, Self::NotAllowed, Self::Impossible, Self::Failed];

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
            Self::NotAllowed => "not_allowed",
            Self::Impossible => "impossible",
            Self::Failed => "failed",
        }
    }

    fn of_error(error: &ApiError) -> Self {
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
    /// Counts a request.
    pub(crate) fn note(&self, share: &LeaseShare, result: Result<RequestResult, &ApiError>) {
        let result = result.unwrap_or_else(RequestResult::of_error);
        let mut counts = self.0.lock();
        let mut key = (requested(share), result);
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
        counts.note(&mig, Ok(RequestResult::Granted));
        for code in [Code::Blocked, Code::Blocked, Code::Denied, Code::UnknownProfile, Code::Internal] {
            counts.note(&mig, Err(&ApiError::new(code, "no")));
        }
        let size = LeaseShare::MigSize { memory_mib: Some(10_240), slices: Some(2) };
        counts.note(&size, Ok(RequestResult::Queued));
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
            mig("not_allowed", 1),
            mig("impossible", 1),
            mig("failed", 1),
        ];
        assert_eq!(list, expected);
    }

    /// Each request can name another profile.
    #[test]
    fn invented_profiles_do_not_grow_the_counts() {
        let counts = RequestCounts::default();
        for number in 0..10 * MOST {
            let share = LeaseShare::MigProfile { profile: format!("{number}g.1gb") };
            counts.note(&share, Err(&ApiError::new(Code::UnknownProfile, "no")));
        }
        let list = counts.list();
        assert_eq!(list.len(), MOST + 1);
        assert_eq!(list.iter().map(|(.., count)| count).sum::<u64>(), 10 * MOST as u64);
    }
}
