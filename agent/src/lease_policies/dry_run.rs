//! A dry run: what the idle policy would have done in the past, from the recorded unused times.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, IdleAction, IdleReport, LeaseId, LeaseState, UnusedLease};
use gpush_store::LeaseRecord;
use gpush_usage::{
    idle::{WouldEnd, replay},
    judge::UseState,
    ledger::UnusedSpan,
    moment::Moment,
};
use jiff::Timestamp;

use super::{LeasePolicies, subject::PolicySubject};

/// Maximum number of leases in an answer.
const MOST: usize = 1000;
/// Number of leases that are read at once, so that changes can be recorded in between.
const PAGE: usize = 500;

/// A period, and how the leases are judged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdleQuery {
    pub(crate) from: Timestamp,
    /// The action to assume; `None` for the action of each lease's rule.
    pub(crate) action: Option<IdleAction>,
    /// Uid whose leases count; `None` for all.
    pub(crate) only: Option<u32>,
}

impl LeasePolicies {
    /// Returns the leases that are unused now, and what the policy would have done since a time, with the present config.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) async fn report(&self, query: IdleQuery) -> Result<IdleReport, ApiError> {
        let IdleQuery { from, action, only } = query;
        let is_visible = |record: &LeaseRecord| only.is_none_or(|uid| record.holder.uid == uid);
        let mut spans: BTreeMap<LeaseId, Vec<UnusedSpan>> = BTreeMap::new();
        for span in self.0.usage.unused_times(from).await? {
            spans.entry(span.lease).or_default().push(span);
        }
        let ids: Vec<LeaseId> = spans.keys().copied().collect();
        let host = self.0.context.state.now();
        let mut would_have = Vec::new();
        for some in ids.chunks(PAGE) {
            for record in self.records(some.iter().copied().collect()).await? {
                let (Some(granted), Some(spans)) = (record.granted_at, spans.get(&record.id)) else { continue };
                if !is_visible(&record) {
                    continue;
                }
                let granted = Moment { boot: 0, monotonic_ms: 0, wall_ms: granted.as_millisecond() };
                let PolicySubject { mut policy, terms } = self.subject(&host, &record, granted).await;
                policy.action = action.unwrap_or(policy.action);
                would_have.extend(replay(&policy, terms, spans).map(|end| unused(&record, end)));
            }
        }
        would_have.sort_by_key(|one| std::cmp::Reverse(one.due_at));
        would_have.truncate(MOST);
        Ok(IdleReport { from, assumed_action: action, unused_now: self.unused_now(is_visible), would_have })
    }

    async fn records(&self, ids: BTreeSet<LeaseId>) -> Result<Vec<LeaseRecord>, ApiError> {
        let read =
            self.0.context.store.read(move |view| ids.iter().map(|id| view.lease(*id)).collect::<Result<Vec<_>, _>>());
        Ok(read.await?.into_iter().flatten().collect())
    }
}

fn unused(record: &LeaseRecord, end: WouldEnd) -> UnusedLease {
    let time = |ms: i64| Timestamp::from_millisecond(ms).unwrap_or(Timestamp::UNIX_EPOCH);
    UnusedLease {
        lease_id: record.id,
        holder: record.holder.clone(),
        state: if end.is_empty { UseState::Empty } else { UseState::Idle },
        unused_since: time(end.unused_since_ms),
        action: end.action,
        due_at: time(end.at_ms),
        warning_count: end.warnings,
        is_open: record.state != LeaseState::Ended,
    }
}
