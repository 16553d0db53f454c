//! A dry run: the leases that a policy would have ended, according to recorded unused times.

use super::{
    machine::{IdleEffect, IdleEvent, IdleMachine},
    policy::{IdleAction, IdlePolicy, LeaseTerms},
};
use crate::{judge::UseState, ledger::UnusedSpan, moment::Moment};

/// A lease that a policy would have ended, or would have reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WouldEnd {
    /// Start of the unused time, in ms since 1970.
    pub unused_since_ms: i64,
    /// Time of the end.
    pub at_ms: i64,
    /// Whether the lease had no process then.
    pub is_empty: bool,
    /// The action that the policy would have taken.
    pub action: IdleAction,
    /// Number of warnings before.
    pub warnings: u32,
}

/// Returns the first action that a policy would have taken for a lease, if every notice had been recorded at once.
///
/// `spans` are the unused times of the lease, the oldest first. Times of less than 5 minutes are not recorded, so an
/// idle time that such a time interrupts counts as two. So the real policy can also end leases that the dry run does
/// not name. It does not spare a lease that the dry run names, unless the holder keeps it. Times are of the wall clock,
/// since the monotonic clock was not recorded.
#[must_use]
pub fn replay(policy: &IdlePolicy, terms: LeaseTerms, spans: &[UnusedSpan]) -> Option<WouldEnd> {
    let mut machine = IdleMachine::new();
    let mut last: Option<(Moment, Moment)> = None;
    let terms = LeaseTerms { granted: on_wall(terms.granted.wall_ms), ..terms };
    let mut warnings = 0;
    for span in spans {
        let (from, until) = (on_wall(span.from_ms), on_wall(span.until_ms));
        let unused = match last {
            Some((unused, end)) if end == from => unused,
            Some(_) | None => {
                let used = IdleEvent::Observed { state: UseState::Busy, since: from, unused_since: None };
                let _ = machine.step(used, policy, terms, from);
                warnings = 0;
                from
            }
        };
        let mut now = from;
        while until.ms_since(now) > 0 {
            now = now.plus_ms(STEP_MS.min(until.ms_since(now)));
            let observed = IdleEvent::Observed { state: span.state, since: from, unused_since: Some(unused) };
            for effect in machine.step(observed, policy, terms, now) {
                let (report, action) = match effect {
                    IdleEffect::Warn { notice, .. } => {
                        warnings += 1;
                        let _ = machine.step(IdleEvent::NoticeRecorded(notice), policy, terms, now);
                        continue;
                    }
                    IdleEffect::Withdraw => continue,
                    IdleEffect::Report(report) => (report, IdleAction::Report),
                    IdleEffect::Release(report) => (report, IdleAction::Release),
                    IdleEffect::End(report) => (report, IdleAction::End),
                };
                return Some(WouldEnd {
                    unused_since_ms: report.unused_since.wall_ms,
                    at_ms: now.wall_ms,
                    is_empty: report.deadline.is_empty,
                    action,
                    warnings,
                });
            }
        }
        last = Some((unused, until));
    }
    None
}

/// Time between two observations, in ms: the interval of samples of an idle policy.
const STEP_MS: u64 = 30_000;

/// Returns a moment whose monotonic clock is the wall clock.
fn on_wall(wall_ms: i64) -> Moment {
    Moment { boot: 0, monotonic_ms: u64::try_from(wall_ms).unwrap_or(0), wall_ms }
}
