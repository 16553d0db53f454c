//! Who used how much in a period, from the recorded hours and the hours that are not closed yet.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, CapacitySums, RequestLine, UsageGrouping, UsageLine, UsageReport, UsageSums};
use gpush_store::{HoursPage, OwnedHour, RequestCount, StoreError, View};
use gpush_usage::{
    account::{self, Grouping, LeaseDay, LeaseOwner, fold_gpus, fold_leases, recorded_since},
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour},
    moment::{DAY_MS, HOUR_MS},
    share::GPU_UNITS,
};
use jiff::Timestamp;

use super::{Usage, history::read_leases, lease_owners::LeaseOwners, show::joules};
use crate::state::request_counts::{RequestResult, RequestedShare};

/// Number of hours that are read at once.
const PAGE: usize = 1000;

/// A period and a grouping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportQuery {
    pub(crate) from: Timestamp,
    pub(crate) until: Timestamp,
    pub(crate) by: UsageGrouping,
}

impl Usage {
    /// Makes a report. `only` is the user whose leases count; `None` for all users, and for the capacity of the GPUs.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) async fn report(&self, query: ReportQuery, only: Option<&str>) -> Result<UsageReport, ApiError> {
        let ReportQuery { from, until, by } = query;
        let from_ms = from.as_millisecond().div_euclid(HOUR_MS) * HOUR_MS;
        let until_ms = until.as_millisecond().max(from_ms);
        let (hours, gpus) = self.hours(from_ms, until_ms).await?;
        let request_lines =
            if only.is_none() { request_lines(self.request_counts(from_ms, until_ms).await?) } else { Vec::new() };
        let hours: Vec<&OwnedHour> =
            hours.iter().filter(|row| only.is_none_or(|user| row.owner.user == user)).collect();
        let owners: BTreeMap<u64, &LeaseOwner> = hours.iter().map(|row| (row.hour.number, &row.owner)).collect();
        let without_owner = LeaseOwner::default();
        let owner_of = |hour: &LeaseHour| owners.get(&hour.number).copied().unwrap_or(&without_owner);
        let days: Vec<LeaseDay> = fold_leases(hours.iter().map(|row| &row.hour), owner_of);
        let report = account::report(&days, &[], &fold_gpus(&gpus), grouping(by));
        let line = |line: account::ReportLine| UsageLine { key: line.key, sums: sums(&line.sums) };
        Ok(UsageReport {
            from: Timestamp::from_millisecond(from_ms).unwrap_or(from),
            until,
            recorded_since: first_record(&gpus, from_ms, until),
            by,
            lines: report.lines.into_iter().map(line).collect(),
            total: sums(&report.all),
            capacity: only.is_none().then(|| capacity(&report.gpus)),
            request_lines,
        })
    }

    /// Returns the hours of a period: those in the store, and those that are not recorded yet.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    async fn hours(&self, from_ms: i64, until_ms: i64) -> Result<(Vec<OwnedHour>, Vec<GpuHour>), ApiError> {
        // While a transaction records hours, they are neither in the ledger nor in the store.
        let turn = self.0.recording.lock().await;
        let (open, next) = self.0.accounts.lock().ledger.open_rows(self.0.clock.now());
        let page = HoursPage { from_ms, until_ms, number: 0, limit: PAGE };
        let mut leases =
            self.pages(page, |view, page| view.lease_hours(page), |row: &OwnedHour| row.hour.number).await?;
        let mut gpus = self.pages(page, |view, page| view.gpu_hours(page), |row: &GpuHour| row.number).await?;
        drop(turn);
        leases.retain(|row| row.hour.number < next);
        gpus.retain(|row| row.number < next);
        let is_in_period = |hour_ms: i64| (from_ms..until_ms).contains(&hour_ms);
        let ids: BTreeSet<_> = open.leases.iter().map(|row| row.lease).collect();
        let mut owners = LeaseOwners::default();
        owners.find(read_leases(self, ids).await?.values(), &self.0.context.users).await;
        let open_leases = open.leases.into_iter().filter(|row| is_in_period(row.hour_ms));
        leases.extend(open_leases.map(|hour| OwnedHour { owner: owners.of(hour.lease), hour }));
        gpus.extend(open.gpus.into_iter().filter(|row| is_in_period(row.hour_ms)));
        Ok((leases, gpus))
    }
}

impl Usage {
    /// Reads hours page by page, so that changes can be recorded between two pages.
    async fn pages<R: Send + 'static>(
        &self,
        mut page: HoursPage,
        read: fn(&View<'_>, HoursPage) -> Result<Vec<R>, StoreError>,
        number: fn(&R) -> u64,
    ) -> Result<Vec<R>, StoreError> {
        let mut all = Vec::new();
        loop {
            let rows = self.0.context.store.read(move |view| read(view, page)).await?;
            let is_last = rows.len() < PAGE;
            page.number = rows.last().map_or(0, |row| number(row) + 1);
            all.extend(rows);
            if is_last {
                return Ok(all);
            }
        }
    }

    /// Returns the requests of the days of a period: those in the store, and those that are not recorded yet.
    pub(super) async fn request_counts(&self, from_ms: i64, until_ms: i64) -> Result<Vec<RequestCount>, ApiError> {
        let day_ms = from_ms.div_euclid(DAY_MS) * DAY_MS;
        // While a transaction records requests, they would be missing or count twice.
        let turn = self.0.recording.lock().await;
        let mut counts = self.0.context.store.read(move |view| view.request_counts(day_ms, until_ms)).await?;
        counts.extend(self.unsaved_requests().into_iter().filter(|one| (day_ms..until_ms).contains(&one.day_ms)));
        drop(turn);
        Ok(counts)
    }

    /// Returns the requests that are not in the store yet. They count for the present day.
    fn unsaved_requests(&self) -> Vec<RequestCount> {
        let day_ms = Timestamp::now().as_millisecond().div_euclid(DAY_MS) * DAY_MS;
        let saved = self.0.saved_requests.lock();
        let counts = self.0.context.requests.list().into_iter().map(|(share, result, count)| {
            let RequestedShare { kind, profile } = share.clone();
            let count = count.saturating_sub(saved.get(&(share, result)).copied().unwrap_or(0));
            RequestCount { day_ms, kind: kind.to_owned(), profile, result: result.name().to_owned(), count }
        });
        counts.filter(|one| one.count > 0).collect()
    }
}

/// Returns the sums of counts of requests, one line for each share.
pub(super) fn request_lines(counts: impl IntoIterator<Item = RequestCount>) -> Vec<RequestLine> {
    let mut lines: BTreeMap<(String, String), RequestLine> = BTreeMap::new();
    for count in counts {
        let RequestCount { kind, profile, result, count, .. } = count;
        let line = lines.entry((kind.clone(), profile.clone())).or_insert_with(|| RequestLine {
            share_kind: kind,
            profile,
            ..RequestLine::default()
        });
        let sum = match RequestResult::of_name(&result) {
            Some(RequestResult::Granted) => &mut line.granted_requests,
            Some(RequestResult::Queued) => &mut line.queued_requests,
            Some(RequestResult::NoCapacity) => &mut line.no_capacity,
            Some(RequestResult::NotAllowed) => &mut line.not_allowed,
            Some(RequestResult::Impossible) => &mut line.impossible,
            Some(RequestResult::Failed) | None => &mut line.failed_requests,
        };
        *sum += count;
    }
    lines.into_values().collect()
}

/// Returns the time from which these hours of GPUs are recorded; `None` if the period begins there or later.
fn first_record(gpus: &[GpuHour], from_ms: i64, until: Timestamp) -> Option<Timestamp> {
    match recorded_since(gpus, &[], Timestamp::now().as_millisecond()) {
        Some(since_ms) if since_ms <= from_ms => None,
        Some(since_ms) => Some(Timestamp::from_millisecond(since_ms).map_or(until, |since| since.min(until))),
        None => Some(until),
    }
}

fn grouping(by: UsageGrouping) -> Grouping {
    match by {
        UsageGrouping::User => Grouping::User,
        UsageGrouping::Group => Grouping::Group,
        UsageGrouping::Job => Grouping::Job,
        UsageGrouping::Kind => Grouping::Kind,
        UsageGrouping::Gpu => Grouping::Gpu,
    }
}

fn sums(sums: &HoldSums) -> UsageSums {
    let HoldSums { times, memory, .. } = sums;
    UsageSums {
        busy_s: times.busy_ms / 1000,
        idle_s: times.idle_ms / 1000,
        empty_s: times.empty_ms / 1000,
        unknown_s: times.unknown_ms / 1000,
        held_gpu_hours: gpu_hours(sums.unit_ms),
        busy_gpu_hours: gpu_hours(sums.busy_unit_ms),
        memory_gib_hours: (memory.known_ms > 0).then(|| float(memory.value_ms) / 1024.0 / 3_600_000.0),
        energy_j: joules(sums.energy_mj),
    }
}

fn capacity(sums: &GpuSums) -> CapacitySums {
    CapacitySums {
        capacity_gpu_hours: gpu_hours(sums.capacity),
        leased_gpu_hours: gpu_hours(sums.leased),
        free_gpu_hours: gpu_hours(sums.free),
        unusable_gpu_hours: gpu_hours(sums.unusable),
        energy_j: joules(sums.energy_mj),
        unattributed_j: joules(sums.unattributed_mj),
    }
}

/// Returns units times milliseconds as hours of a whole GPU.
fn gpu_hours(unit_ms: u64) -> f64 {
    float(unit_ms) / f64::from(GPU_UNITS) / 3_600_000.0
}

#[expect(clippy::cast_precision_loss, reason = "a report shows fewer than 15 digits")]
fn float(value: u64) -> f64 {
    value as f64
}
