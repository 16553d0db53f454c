//! Notices to the holder of a lease: when gpushd warns that the lease expires, and what each notice says.
//!
//! ```text
//! granted ────────────── 15m before ───── 2m before ── expires          [notify] before = ["15m", "2m"]
//!                             │                │
//!                             └─ warned        └─ warned again
//! renewed: the warnings begin again for the new end
//! ```
//!
//! A warning is left out if it would come in the first half of the lease. A user who has just requested or renewed a lease
//! for 10 minutes knows when it ends.

use std::time::Duration;

use gpush_api::{
    LeaseId, LeaseNotice, LeaseRevocation, NoticeKind,
    text::{local_time, plain},
};
use jiff::{SignedDuration, Timestamp};

use super::{
    over_limit::{OverLimitEnd, OverLimitWarning},
    time_left::within,
    unused::{UnusedEnd, UnusedWarning},
};

/// Maximum length of a notice in characters.
const LONGEST: usize = 400;

/// Maximum length of the reason in a notice, in characters.
const LONGEST_REASON: usize = 200;

/// The time between the grant and the end of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTerm {
    /// Time of the grant.
    pub granted_at: Timestamp,
    /// Time of the end.
    pub expires_at: Timestamp,
}

/// The warnings that the holder of a lease has got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpiryWarnings {
    /// The end time that the last warning named, and how long before it the warning was due.
    last: Option<(Timestamp, Duration)>,
    /// Time of the last renewal.
    renewed_at: Option<Timestamp>,
}

impl ExpiryWarnings {
    /// Returns the warnings of a lease whose holder has got this notice from an earlier gpushd.
    #[must_use]
    pub fn after(notice: &LeaseNotice) -> Self {
        let end = notice.ends_at.filter(|_| notice.kind == NoticeKind::EndsSoon);
        let left = |end: &Timestamp| Duration::try_from(end.duration_since(notice.at)).unwrap_or_default();
        Self { last: end.map(|end| (end, left(&end))), renewed_at: None }
    }

    /// Notes that the holder has just renewed the lease, and so knows its end.
    pub fn renewed(&mut self, at: Timestamp) {
        self.renewed_at = Some(at);
    }

    /// Returns the time of the next warning. It may have passed. Returns `None` if no warning follows. `before` are the
    /// times between the warnings and the end.
    #[must_use]
    pub fn next(&self, term: LeaseTerm, before: &[Duration]) -> Option<Timestamp> {
        self.remaining(term, before).max().and_then(|longest| earlier(term.expires_at, longest))
    }

    /// Returns whether a warning is due, and notes that the holder gets it. Several warnings that are due count as one.
    pub fn take_due(&mut self, term: LeaseTerm, before: &[Duration], now: Timestamp) -> bool {
        let is_due = |before: &Duration| earlier(term.expires_at, *before).is_some_and(|at| at <= now);
        let due = self.remaining(term, before).filter(is_due).min();
        if let Some(shortest) = due {
            self.last = Some((term.expires_at, shortest));
        }
        due.is_some()
    }

    /// Returns the warnings that the holder has not got for this end.
    fn remaining(&self, term: LeaseTerm, before: &[Duration]) -> impl Iterator<Item = Duration> {
        let began = self.renewed_at.unwrap_or(term.granted_at);
        let length = Duration::try_from(term.expires_at.duration_since(began)).unwrap_or_default();
        let last = self.last.filter(|(end, _)| *end == term.expires_at).map(|(_, before)| before);
        let is_left = move |before: &Duration| *before * 2 <= length && last.is_none_or(|last| *before < last);
        before.iter().copied().filter(is_left)
    }
}

fn earlier(end: Timestamp, before: Duration) -> Option<Timestamp> {
    end.checked_sub(SignedDuration::try_from(before).ok()?).ok()
}

/// What happens to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeCause<'a> {
    /// The lease expires soon.
    EndsSoon {
        /// Time of the end.
        expires_at: Timestamp,
        /// Whether the holder can renew the lease.
        is_renewable: bool,
    },
    /// The lease has expired.
    Expired {
        /// Whether gpushd ends its processes.
        ends_processes: bool,
    },
    /// An administrator has revoked the lease.
    Revoked(&'a LeaseRevocation),
    /// A GPU or MIG device of the lease does not exist any more.
    GpuLost,
    /// A GPU of the lease takes no new leases.
    Cordoned {
        /// The GPU: `GPU 0`.
        gpu: &'a str,
        /// Why.
        reason: &'a str,
        /// The administrator; `None` if a fault has cordoned the GPU.
        by: Option<&'a str>,
    },
    /// The MPS daemon of the lease has stopped serving.
    MpsFault {
        /// The target: `GPU 0`, or `MIG device 0:2g.20gb@2`.
        target: &'a str,
        /// Why.
        reason: &'a str,
    },
    /// The lease is unused.
    Unused(UnusedWarning),
    /// The warning of an unused lease does not apply any more.
    UnusedNoMore(UnusedEnd),
    /// The lease uses more memory than its share has.
    OverLimit(OverLimitWarning),
    /// The notice about memory above the limit does not apply any more.
    OverLimitNoMore(OverLimitEnd),
}

impl NoticeCause<'_> {
    /// Returns the kind of the notice.
    #[must_use]
    pub fn kind(&self) -> NoticeKind {
        match self {
            Self::EndsSoon { .. } => NoticeKind::EndsSoon,
            Self::Expired { .. } => NoticeKind::Expired,
            Self::Revoked(_) => NoticeKind::Revoked,
            Self::GpuLost => NoticeKind::GpuLost,
            Self::Cordoned { .. } => NoticeKind::Cordoned,
            Self::MpsFault { .. } => NoticeKind::MpsFault,
            Self::Unused(_) => NoticeKind::Unused,
            Self::UnusedNoMore(_) => NoticeKind::UnusedNoMore,
            Self::OverLimit(_) => NoticeKind::OverLimit,
            Self::OverLimitNoMore(_) => NoticeKind::OverLimitNoMore,
        }
    }

    /// Returns the time at which the lease ends, or gpushd ends its processes.
    #[must_use]
    pub fn ends_at(&self) -> Option<Timestamp> {
        match self {
            Self::EndsSoon { expires_at, .. } => Some(*expires_at),
            Self::Revoked(revocation) => revocation.processes_end_at,
            Self::Unused(warning) => warning.ends_at(),
            Self::OverLimit(warning) => warning.ends_at,
            Self::Expired { .. }
            | Self::GpuLost
            | Self::Cordoned { .. }
            | Self::MpsFault { .. }
            | Self::UnusedNoMore(_)
            | Self::OverLimitNoMore(_) => None,
        }
    }

    /// Returns the notice as one line without control characters, such as
    /// `lease L21 ends in 10m: exam starts (root)`.
    #[must_use]
    pub fn text(&self, lease: LeaseId, now: Timestamp) -> String {
        let text = match self {
            Self::EndsSoon { expires_at, is_renewable } => {
                let renew =
                    if *is_renewable { format!("; to keep it: gpushctl lease renew {lease}") } else { String::new() };
                format!("lease {lease} ends {} ({}){renew}", within(*expires_at, now), local_time(*expires_at))
            }
            Self::Expired { ends_processes: true } => format!("lease {lease} has expired, and its programs are ended"),
            Self::Expired { ends_processes: false } => {
                format!("lease {lease} has expired: its programs may finish, but no new one may use the GPU")
            }
            Self::Revoked(revocation) => {
                let reason = because(&revocation.reason, Some(&named(revocation)));
                match revocation.processes_end_at {
                    Some(at) => format!("lease {lease} ends {}{reason}; its programs are ended then", within(at, now)),
                    None => format!(
                        "lease {lease} was revoked{reason}; its programs may finish, but no new one may use the GPU"
                    ),
                }
            }
            Self::GpuLost => format!("lease {lease} has ended, because its GPU or MIG device does not exist any more"),
            Self::Cordoned { gpu, reason, by } => {
                format!("{gpu} takes no new leases{}; lease {lease} continues", because(reason, *by))
            }
            Self::MpsFault { target, reason } => format!(
                "the MPS daemon of {target} stopped serving{}; programs of lease {lease} that fail must be started again",
                because(reason, None)
            ),
            Self::Unused(warning) => warning.text(lease, now),
            Self::UnusedNoMore(end) => end.text(lease),
            Self::OverLimit(warning) => warning.text(lease, now),
            Self::OverLimitNoMore(end) => end.text(lease),
        };
        bounded(&plain(&text), LONGEST)
    }
}

/// Returns the name of the administrator who revoked a lease.
fn named(revocation: &LeaseRevocation) -> String {
    revocation.by.user.clone().unwrap_or_else(|| format!("uid {}", revocation.by.uid))
}

/// Formats a reason and its author: `: exam starts (root)`.
fn because(reason: &str, by: Option<&str>) -> String {
    let reason = bounded(reason.trim(), LONGEST_REASON);
    match (reason.is_empty(), by) {
        (true, None) => String::new(),
        (true, Some(by)) => format!(" by {by}"),
        (false, None) => format!(": {reason}"),
        (false, Some(by)) => format!(": {reason} ({by})"),
    }
}

/// Shortens a text to a number of characters.
fn bounded(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}\u{2026}", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Actor;
    use proptest::prelude::*;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn term(end: i64) -> LeaseTerm {
        LeaseTerm { granted_at: at(0), expires_at: at(end) }
    }

    #[test]
    fn holder_is_warned_at_each_time_once_and_again_after_a_renewal() {
        let before = [15 * MINUTE, 2 * MINUTE];
        let mut warnings = ExpiryWarnings::default();
        assert_eq!(warnings.next(term(3600), &before), Some(at(2700)));
        assert!(!warnings.take_due(term(3600), &before, at(2699)));
        assert!(warnings.take_due(term(3600), &before, at(2700)) && !warnings.take_due(term(3600), &before, at(2701)));
        assert_eq!(warnings.next(term(3600), &before), Some(at(3480)));
        // The clock was set forward, or gpushd did not run.
        let mut late = ExpiryWarnings::default();
        assert!(late.take_due(term(3600), &before, at(3590)) && late.next(term(3600), &before).is_none());
        assert_eq!(late.next(term(7200), &before), Some(at(6300)), "renewed");
    }

    #[test]
    fn short_lease_is_not_warned_of_in_its_first_half() {
        let before = [15 * MINUTE, 2 * MINUTE];
        let warnings = ExpiryWarnings::default();
        assert_eq!(warnings.next(term(1200), &before), Some(at(1080)));
        assert_eq!(warnings.next(term(60), &before), None);
    }

    #[test]
    fn holder_who_has_just_renewed_is_not_warned_at_once() {
        let before = [15 * MINUTE, 2 * MINUTE];
        let mut warnings = ExpiryWarnings::default();
        warnings.renewed(at(36_000));
        assert_eq!(warnings.next(term(36_600), &before), Some(at(36_480)), "not 15 minutes before");
    }

    #[test]
    fn restarted_gpushd_does_not_repeat_a_warning() {
        let before = [15 * MINUTE, 2 * MINUTE];
        let sent =
            |kind| LeaseNotice { at: at(2701), kind, text: String::new(), ends_at: Some(at(3600)), terminals: None };
        let mut warnings = ExpiryWarnings::after(&sent(NoticeKind::EndsSoon));
        assert!(!warnings.take_due(term(3600), &before, at(3000)));
        assert_eq!(warnings.next(term(3600), &before), Some(at(3480)));
        assert!(ExpiryWarnings::after(&sent(NoticeKind::Revoked)).take_due(term(3600), &before, at(3000)));
    }

    fn revocation(reason: &str, end: Option<i64>) -> LeaseRevocation {
        let by = Actor { uid: 0, user: Some("root".to_owned()), pid: None };
        LeaseRevocation { by, reason: reason.to_owned(), at: at(0), processes_end_at: end.map(at) }
    }

    #[test]
    fn notice_says_what_happens_when_and_why() {
        let text = |cause: NoticeCause<'_>| cause.text(LeaseId(21), at(0));
        let exam = revocation("exam starts", Some(600));
        assert_eq!(
            text(NoticeCause::Revoked(&exam)),
            "lease L21 ends in 10m: exam starts (root); its programs are ended then"
        );
        assert_eq!(
            text(NoticeCause::Revoked(&revocation("exam starts", None))),
            "lease L21 was revoked: exam starts (root); its programs may finish, but no new one may use the GPU"
        );
        let ends = NoticeCause::EndsSoon { expires_at: at(900), is_renewable: true };
        let ends = text(ends);
        assert!(ends.starts_with("lease L21 ends in 15m (2027-01-15 08:15:00"), "{ends}");
        assert!(ends.ends_with("; to keep it: gpushctl lease renew L21"), "{ends}");
        assert_eq!(
            text(NoticeCause::Cordoned { gpu: "GPU 0", reason: "new cable", by: Some("root") }),
            "GPU 0 takes no new leases: new cable (root); lease L21 continues"
        );
        assert_eq!(
            text(NoticeCause::MpsFault { target: "GPU 0", reason: "" }),
            "the MPS daemon of GPU 0 stopped serving; programs of lease L21 that fail must be started again"
        );
        for (ends_processes, end) in [(true, "its programs are ended"), (false, "no new one may use the GPU")] {
            assert!(text(NoticeCause::Expired { ends_processes }).ends_with(end));
        }
        assert!(text(NoticeCause::GpuLost).starts_with("lease L21 has ended"));
    }

    proptest! {
        /// A reason is text of a user. It must not control the terminal of the holder.
        #[test]
        fn text_of_a_notice_is_one_plain_line(reason in "\\PC*|.*", end in proptest::option::of(-10_i64..100_000)) {
            let revoked = revocation(&reason, end);
            let causes = [
                NoticeCause::Revoked(&revoked),
                NoticeCause::Cordoned { gpu: "GPU 0", reason: &reason, by: Some(&reason) },
                NoticeCause::MpsFault { target: &reason, reason: &reason },
            ];
            for cause in causes {
                let text = cause.text(LeaseId(1), at(0));
                prop_assert!(text.chars().all(gpush_api::text::is_plain), "{:?}", text);
                prop_assert!(text.chars().count() <= LONGEST + 1);
            }
        }

        /// Whatever the times, the holder gets each warning at most once for an end, and none after the last.
        #[test]
        fn each_end_has_at_most_one_warning_for_each_time(
            before in proptest::collection::vec(1_u64..5000, 0..5),
            looks in proptest::collection::vec(0_i64..8000, 1..40),
            end in 1_i64..8000,
        ) {
            let before: Vec<Duration> = before.into_iter().map(Duration::from_secs).collect();
            let mut warnings = ExpiryWarnings::default();
            let mut looks = looks;
            looks.sort_unstable();
            let given = looks.into_iter().filter(|now| warnings.take_due(term(end), &before, at(*now))).count();
            prop_assert!(given <= before.len());
            if let Some(next) = warnings.next(term(end), &before) {
                prop_assert!(next <= at(end));
            }
        }
    }
}
