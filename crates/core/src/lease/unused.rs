//! What gpushd tells the holder of a lease that is not used.

use gpush_api::{IdleAction, LeaseId, text::local_time};
use jiff::Timestamp;

use super::time_left::within;
use crate::duration;

/// A warning of an unused lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnusedWarning {
    /// Start of the unused time.
    pub unused_since: Timestamp,
    /// Whether the time without a process counts. Otherwise it is all unused time, with and without a process.
    pub is_empty: bool,
    /// What happens if the lease stays unused.
    pub action: IdleAction,
    /// When it happens.
    pub due_at: Timestamp,
    /// Whether the lease belongs to a Slurm job, which is cancelled then.
    pub of_job: bool,
    /// Longest time in seconds for which the holder can keep the lease; 0 if the config permits no keep.
    pub longest_keep_s: u64,
}

/// Why a warning of an unused lease does not apply any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnusedEnd {
    /// The lease is used.
    Used,
    /// It is not known any more whether the lease is used.
    Unknown,
    /// The lease is kept until this time.
    Kept(Timestamp),
    /// The config exempts the lease.
    Exempt,
    /// The job of the lease also runs on other nodes, which gpushd does not see.
    RunsElsewhere,
    /// The config has changed, and ends no unused leases any more.
    NotEnded,
}

impl UnusedWarning {
    /// Returns the time at which the lease ends; `None` if the action ends nothing.
    #[must_use]
    pub fn ends_at(&self) -> Option<Timestamp> {
        self.action.ends_leases().then_some(self.due_at)
    }

    /// Returns the text of the notice.
    pub(super) fn text(&self, lease: LeaseId, now: Timestamp) -> String {
        let unused = unused_for(self.unused_since, self.is_empty, now);
        let due = within(self.due_at, now);
        let keep =
            keep_command(lease, self.longest_keep_s).map_or_else(String::new, |keep| format!("; to keep it: {keep}"));
        match (self.action, self.of_job) {
            (IdleAction::Report | IdleAction::Warn, false) => {
                format!("lease {lease} {unused}; if you do not need it: gpushctl lease end {lease}")
            }
            (IdleAction::Report | IdleAction::Warn, true) => format!("lease {lease} of this job {unused}"),
            (IdleAction::Release | IdleAction::End, true) => {
                format!("lease {lease} of this job {unused}, so the job is cancelled {due}{keep}")
            }
            (IdleAction::Release, false) => format!("lease {lease} {unused}, so it ends {due}{keep}"),
            (IdleAction::End, false) => {
                format!("lease {lease} {unused}, so it ends {due}, and its programs are ended{keep}")
            }
        }
    }
}

impl UnusedEnd {
    /// Returns the text of the notice.
    pub(super) fn text(self, lease: LeaseId) -> String {
        match self {
            Self::Used => format!("lease {lease} is in use again, so it does not end"),
            Self::Unknown => {
                format!("gpushd does not know any more whether lease {lease} is used, so it does not end")
            }
            Self::Kept(until) => format!("lease {lease} is kept until {}", local_time(until)),
            Self::Exempt => format!("lease {lease} does not end: the config exempts it now"),
            Self::RunsElsewhere => {
                format!("lease {lease} does not end: a part of its job runs on other nodes, which gpushd does not see")
            }
            Self::NotEnded => format!("lease {lease} does not end: the config does not end unused leases any more"),
        }
    }
}

/// Returns the command with which its holder keeps a lease; `None` if the config permits no keep.
#[must_use]
pub fn keep_command(lease: LeaseId, longest_keep_s: u64) -> Option<String> {
    const USUAL_S: u64 = 2 * 3600;
    let time = duration::format(std::time::Duration::from_secs(longest_keep_s.min(USUAL_S)));
    (longest_keep_s > 0).then(|| format!("gpushctl lease keep {lease} --for {time} --reason TEXT"))
}

/// Formats since when a lease is unused, as in a sentence about it: `has been unused for 3h`.
#[must_use]
pub fn unused_for(since: Timestamp, is_empty: bool, now: Timestamp) -> String {
    let seconds = u64::try_from(now.duration_since(since).as_secs()).unwrap_or(0);
    let time = duration::rough(seconds);
    if is_empty { format!("has had no process for {time}") } else { format!("has been unused for {time}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + minute * 60).unwrap()
    }

    #[test]
    fn warning_says_what_happens_when_and_how_to_prevent_it() {
        let warning = |action, of_job, is_empty| {
            UnusedWarning { unused_since: at(0), is_empty, action, due_at: at(240), of_job, longest_keep_s: 28_800 }
                .text(LeaseId(21), at(180))
        };
        assert_eq!(
            warning(IdleAction::Release, false, false),
            "lease L21 has been unused for 3h, so it ends in 1h; to keep it: gpushctl lease keep L21 --for 2h --reason TEXT"
        );
        assert_eq!(
            warning(IdleAction::End, false, true),
            "lease L21 has had no process for 3h, so it ends in 1h, and its programs are ended; to keep it: gpushctl \
             lease keep L21 --for 2h --reason TEXT"
        );
        assert_eq!(
            warning(IdleAction::Warn, false, false),
            "lease L21 has been unused for 3h; if you do not need it: gpushctl lease end L21"
        );
        let cancelled = "lease L21 of this job has been unused for 3h, so the job is cancelled in 1h; to keep it:";
        assert!(warning(IdleAction::End, true, false).starts_with(cancelled));
        assert_eq!(warning(IdleAction::Warn, true, false), "lease L21 of this job has been unused for 3h");
    }

    /// Fault: the notice named a keep that the config does not permit.
    #[test]
    fn warning_names_only_a_keep_that_is_permitted() {
        let keep = |longest| keep_command(LeaseId(4), longest);
        assert_eq!(keep(28_800).as_deref(), Some("gpushctl lease keep L4 --for 2h --reason TEXT"));
        assert_eq!(keep(600).as_deref(), Some("gpushctl lease keep L4 --for 10m --reason TEXT"));
        assert_eq!(keep(0), None);
    }

    #[test]
    fn only_an_action_that_ends_leases_has_an_end() {
        for action in IdleAction::ALL {
            let warning = UnusedWarning {
                unused_since: at(0),
                is_empty: false,
                action,
                due_at: at(240),
                of_job: false,
                longest_keep_s: 0,
            };
            assert_eq!(warning.ends_at().is_some(), action.ends_leases());
        }
    }

    #[test]
    fn holder_learns_why_the_lease_does_not_end() {
        let text = |end: UnusedEnd| end.text(LeaseId(21));
        assert_eq!(text(UnusedEnd::Used), "lease L21 is in use again, so it does not end");
        assert!(text(UnusedEnd::Unknown).ends_with("so it does not end"));
        assert!(text(UnusedEnd::Kept(at(0))).starts_with("lease L21 is kept until 2027-"));
        assert!(text(UnusedEnd::Exempt).contains("exempts it"));
        assert!(text(UnusedEnd::RunsElsewhere).contains("a part of its job"));
        assert!(text(UnusedEnd::NotEnded).ends_with("does not end unused leases any more"));
    }

    #[test]
    fn unused_time_is_short() {
        let since =
            |seconds: i64| unused_for(at(0), true, Timestamp::from_second(at(0).as_second() + seconds).unwrap());
        assert_eq!(since(59), "has had no process for 59s");
        assert_eq!(since(3719), "has had no process for 1h2m");
        assert_eq!(since(-5), "has had no process for 0s");
    }
}
