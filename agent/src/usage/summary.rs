//! The use of each lease in one line, and its recent past.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{Lease, LeaseId, LeasePast, LeaseState, LeaseUsageSummary, UsageBucket};
use gpush_usage::{
    input::{GpuProcess, ProcessOwner},
    ledger::{Bucket, HoldSums, LeaseTotals, StateTimes},
    moment::Moment,
};
use jiff::Timestamp;

use super::{
    Accounts, Usage,
    clock::timestamp,
    show::{joules, state_reason, visible},
};
use crate::{requests::caller::Viewer, state::OpenLease};

impl Usage {
    /// Adds the summaries of their use to these leases, as far as the viewer may see them.
    pub(crate) async fn add_to(&self, leases: &mut [Lease], viewer: Viewer) {
        let ended: Vec<LeaseId> =
            leases.iter().filter(|lease| lease.state == LeaseState::Ended).map(|lease| lease.id).collect();
        let totals = self.recorded(ended).await;
        let host = self.0.context.state.now();
        let now = self.0.clock.now();
        let visible: Vec<LeaseId> = visible(&host, viewer).collect();
        let accounts = self.0.accounts.lock();
        for lease in leases {
            lease.usage = match lease.state {
                // A caller sees only those ended leases that they may read in full.
                LeaseState::Ended => {
                    let waiting = accounts.ended.iter().find(|totals| totals.lease == lease.id);
                    waiting.or_else(|| totals.get(&lease.id)).map(of_ended)
                }
                _ if visible.contains(&lease.id) => of_open(lease.id, &accounts, now),
                _ => None,
            };
        }
    }

    /// Returns the summaries of all leases that hold capacity, then of those that ended at most 5 minutes ago. A lease
    /// that the ledger does not know yet has no summary.
    pub(crate) fn summaries(&self) -> Vec<(Arc<OpenLease>, Option<LeaseUsageSummary>)> {
        let host = self.0.context.state.now();
        let now = self.0.clock.now();
        let accounts = self.0.accounts.lock();
        let open = host.leases.open.values().filter(|lease| lease.state.name().holds_capacity());
        let records = self.records();
        let open = open.map(|lease| (Arc::clone(lease), counted(lease.id(), &accounts, records, now)));
        let is_closed = |lease: &&Arc<OpenLease>| !host.leases.open.contains_key(&lease.id());
        let ended = accounts.recent.iter().filter(|(lease, _)| is_closed(lease));
        let ended = ended.map(|(lease, totals)| (Arc::clone(lease), Some(of_ended(totals))));
        open.chain(ended).collect()
    }

    /// Returns the recorded totals of leases.
    async fn recorded(&self, leases: Vec<LeaseId>) -> BTreeMap<LeaseId, LeaseTotals> {
        if leases.is_empty() {
            return BTreeMap::new();
        }
        match self.0.context.store.read(move |view| view.lease_totals(&leases)).await {
            Ok(ended) => ended.into_iter().map(|one| (one.totals.lease, one.totals)).collect(),
            Err(error) => {
                tracing::warn!("the use of ended leases cannot be read: {error}");
                BTreeMap::new()
            }
        }
    }

    /// Returns the recent past of a lease; `None` if the viewer may not see it, or if it is not open.
    pub(crate) fn past(&self, lease: LeaseId, viewer: Viewer) -> Option<LeasePast> {
        let host = self.0.context.state.now();
        visible(&host, viewer).find(|id| *id == lease)?;
        let accounts = self.0.accounts.lock();
        let buckets = accounts.ledger.buckets(lease)?;
        let list = |list: Vec<(i64, Bucket)>| list.into_iter().map(bucket).collect();
        Some(LeasePast {
            lease_id: lease,
            minutes: list(buckets.minutes()),
            hours: list(buckets.hours()),
            days: list(buckets.days()),
        })
    }
}

fn of_open(lease: LeaseId, accounts: &Accounts, now: Moment) -> Option<LeaseUsageSummary> {
    let figures = accounts.ledger.lease(lease, now)?;
    let sums = accounts.ledger.totals(lease, now)?.sums();
    let memory: Option<Vec<u64>> = figures.members.iter().map(|member| member.memory_mib).collect();
    let samples = accounts.last.values().filter_map(|last| last.recent(now));
    let is_own = |process: &&GpuProcess| process.owner == ProcessOwner::Lease(lease);
    let counts: Vec<u64> = samples
        .filter_map(|taken| taken.translated.processes.as_ref().value())
        .map(|processes| u64::try_from(processes.iter().filter(is_own).count()).unwrap_or(u64::MAX))
        .collect();
    Some(LeaseUsageSummary {
        state: Some(figures.state),
        reason: state_reason(&figures),
        weak: figures.is_weak(),
        unused_since: figures.unused_since.map(timestamp),
        unused_s: figures.unused_since.map(|since| now.ms_since(since) / 1000),
        process_count: memory.as_ref().filter(|memory| !memory.is_empty()).map(|_| counts.into_iter().sum()),
        memory_mib: memory.filter(|memory| !memory.is_empty()).map(|memory| memory.into_iter().sum()),
        ..of_sums(&figures.times, &sums)
    })
}

/// Returns the summary of a lease with times and energy that never fall, not even if gpushd is killed: those that are
/// recorded. Without recording, they are those up to the last sample, and begin again with gpushd.
fn counted(lease: LeaseId, accounts: &Accounts, records: bool, now: Moment) -> Option<LeaseUsageSummary> {
    let present = of_open(lease, accounts, now)?;
    let settled = if records {
        // A lease that has just begun is not recorded yet.
        let nothing = || of_sums(&StateTimes::default(), &HoldSums::default());
        accounts.recorded.leases.get(&lease).map_or_else(nothing, of_ended)
    } else {
        of_ended(&accounts.ledger.settled_totals(lease)?)
    };
    Some(LeaseUsageSummary {
        state: present.state,
        reason: present.reason,
        weak: present.weak,
        unused_since: present.unused_since,
        unused_s: present.unused_s,
        process_count: present.process_count,
        memory_mib: present.memory_mib,
        ..settled
    })
}

fn of_ended(totals: &LeaseTotals) -> LeaseUsageSummary {
    of_sums(&totals.times, &totals.sums())
}

fn of_sums(times: &StateTimes, sums: &HoldSums) -> LeaseUsageSummary {
    let limited = |ms: u64| (sums.limits_known_ms > 0).then(|| part(ms, sums.limits_known_ms));
    let is_counted = sums.energy_mj > 0;
    LeaseUsageSummary {
        state: None,
        reason: None,
        weak: false,
        unused_since: None,
        unused_s: None,
        busy_s: times.busy_ms / 1000,
        idle_s: times.idle_ms / 1000,
        empty_s: times.empty_ms / 1000,
        unknown_s: times.unknown_ms / 1000,
        process_count: None,
        memory_mib: None,
        // If the memory was unknown for a part of the time, its peak is not known.
        memory_peak_mib: (sums.memory.known_ms > sums.times.held_ms() / 10 * 9).then_some(sums.memory_peak_mib),
        energy_j: is_counted.then(|| joules(sums.energy_mj)),
        energy_method: sums.energy_method(),
        energy_mixed: sums.is_energy_mixed(),
        power_limited: limited(sums.power_limited_ms),
        thermal_limited: limited(sums.thermal_limited_ms),
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of a lease have fewer than 53 bits")]
fn part(ms: u64, of: u64) -> f64 {
    ms as f64 / of as f64
}

fn bucket((from_ms, bucket): (i64, Bucket)) -> UsageBucket {
    UsageBucket {
        begins_at: Timestamp::from_millisecond(from_ms).unwrap_or(Timestamp::UNIX_EPOCH),
        busy_s: u64::from(bucket.busy_ms) / 1000,
        unused_s: u64::from(bucket.unused_ms) / 1000,
        unknown_s: u64::from(bucket.unknown_ms) / 1000,
        memory_peak_mib: bucket.memory_peak_mib.into(),
        energy_j: joules(bucket.energy_mj),
    }
}
