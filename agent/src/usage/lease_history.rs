//! The use of each lease of a period, and the refused requests. gpushctl makes its advice from them.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, Gpu, LeaseId, LeaseKind, MemberShare, RequestDay, UsageHistory, UsedLease, UsedTarget};
use gpush_store::{LeaseRecord, RequestCount};
use gpush_usage::{
    account::{EndedLease, LeaseOwner},
    ledger::{LeaseTotals, MemberTotals},
    share::GPU_UNITS,
};
use jiff::Timestamp;

use super::{Usage, history::read_leases, lease_owners::LeaseOwners, report::request_lines};
use crate::state::HostState;

/// Maximum number of leases in one answer. The answer contains the newest leases.
const MOST_LEASES: usize = 5000;
/// Number of leases that are read at once, so that changes can be recorded in between.
const PAGE: usize = 1000;

/// A lease with its owner. Its time in the queue is in ms.
struct OwnedLease {
    owner: LeaseOwner,
    waited_ms: u64,
    is_open: bool,
    totals: LeaseTotals,
}

impl Usage {
    /// Returns the leases that were open in a period. `only` is the user whose leases count; `None` for all users, and for
    /// the requests.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) async fn lease_history(
        &self,
        from: Timestamp,
        until: Timestamp,
        only: Option<&str>,
    ) -> Result<UsageHistory, ApiError> {
        let (from_ms, until_ms) = (from.as_millisecond(), until.as_millisecond());
        // While a transaction records a lease, it is neither in the ledger nor in the store.
        let turn = self.0.recording.lock().await;
        let open = self.unrecorded(until_ms).await?;
        let (mut leases, has_older_leases) = self.recorded_leases(from_ms, until_ms, only).await?;
        drop(turn);
        leases.extend(open.into_iter().filter(|lease| only.is_none_or(|user| lease.owner.user == user)));
        leases.sort_by_key(|lease| std::cmp::Reverse(lease.totals.lease));
        // The records of old leases are deleted before their totals. Then only the size of the share is known.
        let mut records = BTreeMap::new();
        for some in leases.chunks(PAGE) {
            records.extend(read_leases(self, some.iter().map(|lease| lease.totals.lease).collect()).await?);
        }
        let host = self.0.context.state.now();
        let used_lease = |lease: &OwnedLease| used_lease(lease, records.get(&lease.totals.lease), &host);
        Ok(UsageHistory {
            from,
            until,
            user: only.map(str::to_owned),
            used_leases: leases.iter().map(used_lease).collect(),
            has_older_leases,
            request_days: if only.is_none() { self.request_days(from_ms, until_ms).await? } else { Vec::new() },
        })
    }

    /// Returns the newest leases that ended in the period and are recorded, and whether there are more.
    async fn recorded_leases(
        &self,
        from_ms: i64,
        until_ms: i64,
        only: Option<&str>,
    ) -> Result<(Vec<OwnedLease>, bool), ApiError> {
        let mut leases = Vec::new();
        let mut below = LeaseId(u64::MAX);
        loop {
            let read = move |view: &gpush_store::View<'_>| view.newest_used_leases(from_ms, until_ms, below, PAGE);
            let page = self.0.context.store.read(read).await?;
            let Some(last) = page.last() else { return Ok((leases, false)) };
            below = last.totals.lease;
            for EndedLease { owner, waited_ms, totals, .. } in page {
                if only.is_some_and(|user| owner.user != user) {
                    continue;
                }
                if leases.len() >= MOST_LEASES {
                    return Ok((leases, true));
                }
                leases.push(OwnedLease { owner, waited_ms, is_open: false, totals });
            }
        }
    }

    /// Returns the open leases that began before this time, and the ended ones that are not recorded yet.
    async fn unrecorded(&self, until_ms: i64) -> Result<Vec<OwnedLease>, ApiError> {
        let now = self.0.clock.now();
        let totals: Vec<(bool, LeaseTotals)> = {
            let accounts = self.0.accounts.lock();
            let ledger = &accounts.ledger;
            let open = ledger.leases().filter_map(|id| Some((true, ledger.totals(id, now)?)));
            open.chain(accounts.ended.iter().map(|totals| (false, totals.clone()))).collect()
        };
        let ids: BTreeSet<LeaseId> = totals.iter().map(|(_, totals)| totals.lease).collect();
        let records = read_leases(self, ids).await?;
        let mut owners = LeaseOwners::default();
        owners.find(records.values(), &self.0.context.users).await;
        let begun = totals.into_iter().filter(|(_, totals)| totals.begun_ms < until_ms);
        let owned = begun.map(|(is_open, totals)| OwnedLease {
            owner: owners.of(totals.lease),
            waited_ms: records.get(&totals.lease).map_or(0, waited_ms),
            is_open,
            totals,
        });
        Ok(owned.collect())
    }

    /// Returns the requests of each day of a period.
    async fn request_days(&self, from_ms: i64, until_ms: i64) -> Result<Vec<RequestDay>, ApiError> {
        let mut days: BTreeMap<i64, Vec<RequestCount>> = BTreeMap::new();
        for count in self.request_counts(from_ms, until_ms).await? {
            days.entry(count.day_ms).or_default().push(count);
        }
        let day = |(day_ms, counts)| RequestDay { day: time(day_ms), request_lines: request_lines(counts) };
        Ok(days.into_iter().map(day).collect())
    }
}

/// Returns how long a lease waited in the queue.
fn waited_ms(record: &LeaseRecord) -> u64 {
    let waited = record.granted_at.map(|granted| granted.duration_since(record.created_at).as_millis());
    waited.and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0)
}

fn time(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(ms).unwrap_or(Timestamp::UNIX_EPOCH)
}

fn used_lease(lease: &OwnedLease, record: Option<&LeaseRecord>, host: &HostState) -> UsedLease {
    let totals = &lease.totals;
    UsedLease {
        lease_id: totals.lease,
        user: lease.owner.user.clone(),
        begun_at: time(totals.begun_ms),
        ended_at: (!lease.is_open).then(|| time(totals.until_ms)),
        waited_s: lease.waited_ms / 1000,
        used_targets: totals.members.iter().map(|member| used_target(member, record, host)).collect(),
    }
}

fn used_target(member: &MemberTotals, record: Option<&LeaseRecord>, host: &HostState) -> UsedTarget {
    let MemberTotals { hold, sums, memory_p98_mib } = member;
    let of_record = record.iter().flat_map(|record| &record.members).find_map(|member| match &member.share {
        MemberShare::Mig { profile } => (member.target == hold.target && !profile.is_empty()).then(|| profile.clone()),
        MemberShare::Mps { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => None,
    });
    let of_gpu = || profile_of_size(&host.gpu(&hold.gpu)?.gpu, hold.share.units, hold.memory_mib);
    let ratio = |millionths: u64| u32::try_from(millionths).ok().map(|millionths| f64::from(millionths) / 1e6);
    let is_known = sums.memory.mean().is_some();
    UsedTarget {
        gpu_uuid: hold.gpu.clone(),
        share_kind: hold.kind.name().to_owned(),
        profile: if hold.kind == LeaseKind::Mig { of_record.or_else(of_gpu) } else { None },
        compute_part: f64::from(hold.share.units) / f64::from(GPU_UNITS),
        share_memory_mib: hold.memory_mib,
        held_s: sums.times.held_ms() / 1000,
        busy_s: sums.times.busy_ms / 1000,
        memory_known_s: sums.memory.known_ms / 1000,
        memory_peak_mib: is_known.then_some(sums.memory_peak_mib),
        memory_p98_mib: memory_p98_mib.filter(|_| is_known),
        activity_known_s: sums.sm.known_ms / 1000,
        sm_mean: sums.sm.mean().and_then(ratio),
    }
}

/// Returns the profile whose instances have these compute units and nearly this memory; `None` if no profile does. The
/// memory that the driver reports for an instance differs a little from that of its profile.
fn profile_of_size(gpu: &Gpu, units: u32, memory_mib: u64) -> Option<String> {
    let mig = gpu.mig.as_ref()?;
    let all = u32::from(mig.compute_slices).max(1);
    let is_plain = |name: &str| !name.contains(['+', '-']);
    let equal = mig.profiles.iter().filter(|profile| {
        is_plain(&profile.name) && !profile.gfx && GPU_UNITS / all * u32::from(profile.slices) == units
    });
    let near = equal.filter(|profile| profile.memory_mib.abs_diff(memory_mib) * 10 <= profile.memory_mib);
    near.min_by_key(|profile| profile.memory_mib.abs_diff(memory_mib)).map(|profile| profile.name.clone())
}

#[cfg(test)]
mod tests {
    use gpush_core::preset;

    use super::*;

    #[test]
    fn profile_is_found_by_compute_and_memory() {
        let gpu = preset::gpus("dgx-h100").expect("a preset").remove(0);
        let mig = gpu.mig.as_ref().expect("MIG");
        for profile in mig.profiles.iter().filter(|profile| !profile.name.contains(['+', '-']) && !profile.gfx) {
            let units = GPU_UNITS / u32::from(mig.compute_slices) * u32::from(profile.slices);
            let found = profile_of_size(&gpu, units, profile.memory_mib + 100);
            assert_eq!(found.as_deref(), Some(profile.name.as_str()));
        }
        assert_eq!(profile_of_size(&gpu, GPU_UNITS / 5, 10_000), None, "no profile has a fifth of the GPU");
        assert_eq!(profile_of_size(&gpu, GPU_UNITS / 7, 60_000), None, "no profile has so much memory");
    }
}
