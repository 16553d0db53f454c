//! Who used how much in a period, from the recorded hours and the hours that are not closed yet.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, CapacitySums, RequestLine, RequestTotals, UsageGrouping, UsageLine, UsageReport, UsageSums};
use gpush_store::{HoursPage, OwnedHour, RequestCount, View};
use gpush_usage::{
    account::{self, GpuDay, Grouping, LeaseDay, LeaseOwner, RequestDay, fold_gpus, fold_leases, recorded_since},
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour},
    moment::{DAY_MS, HOUR_MS},
    share::GPU_UNITS,
};
use jiff::Timestamp;

use super::{
    Usage,
    history::read_leases,
    lease_owners::LeaseOwners,
    pages::{PAGE, pages},
    show::joules,
};
use crate::state::request_counts::{RequestResult, RequestedShare};

/// Number of days that are read at once.
const DAYS_AT_ONCE: i64 = 16;
/// Maximum number of days that gpushd keeps (`history.days`).
const MOST_DAYS: i64 = 3660;

/// The parts of a period: whole days, stored as rows of days, and the remaining hours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PeriodParts {
    from_ms: i64,
    until_ms: i64,
    /// Start of the first day, and end of the last one; equal if there is no day.
    days: (i64, i64),
    /// Hours of these days whose number is `number` or higher are not in a row of a day.
    number: u64,
}

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
        let parts = self.parts(from_ms, until_ms).await?;
        let PeriodParts { from_ms, until_ms, .. } = parts;
        let (mut days, mut gpu_days) = self.folded_days(parts.days).await?;
        let (hours, gpus) = self.unfolded_hours(&parts).await?;
        let request_lines =
            if only.is_none() { request_lines(self.request_counts(from_ms, until_ms).await?) } else { Vec::new() };
        let owners: BTreeMap<u64, &LeaseOwner> = hours.iter().map(|row| (row.hour.number, &row.owner)).collect();
        let without_owner = LeaseOwner::default();
        let owner_of = |hour: &LeaseHour| owners.get(&hour.number).copied().unwrap_or(&without_owner);
        days.extend(fold_leases(hours.iter().map(|row| &row.hour), owner_of));
        days.retain(|day| only.is_none_or(|user| day.owner.user == user));
        let since = first_record(&gpus, &gpu_days, from_ms, until);
        gpu_days.extend(fold_gpus(&gpus));
        // A request has no GPU.
        let has_requests = by != UsageGrouping::Gpu;
        let mut requests = if has_requests { self.owner_requests(from_ms, until_ms).await? } else { Vec::new() };
        requests.retain(|day| only.is_none_or(|user| day.owner.user == user));
        let report = account::report(&days, &requests, &gpu_days, grouping(by));
        let line = |line: account::ReportLine| UsageLine {
            key: line.key,
            sums: sums(&line.sums),
            request_sums: request_sums(line.requests),
        };
        Ok(UsageReport {
            from: Timestamp::from_millisecond(from_ms).unwrap_or(from),
            until: Timestamp::from_millisecond(until_ms).unwrap_or(until),
            recorded_since: since,
            by,
            lines: report.lines.into_iter().map(line).collect(),
            total: sums(&report.all),
            total_requests: request_sums(report.requests),
            capacity: only.is_none().then(|| capacity(&report.gpus)),
            request_lines,
        })
    }

    /// Returns the hours of a period: stored rows whose number is `number` or higher, and rows that are not recorded
    /// yet.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    pub(super) async fn hours(
        &self,
        from_ms: i64,
        until_ms: i64,
        number: u64,
    ) -> Result<(Vec<OwnedHour>, Vec<GpuHour>), ApiError> {
        if from_ms >= until_ms {
            return Ok((Vec::new(), Vec::new()));
        }
        // While a transaction records hours, they are neither in the ledger nor in the store.
        let turn = self.0.recording.lock().await;
        let (open, next) = self.0.accounts.lock().ledger.open_rows(self.0.clock.now());
        let page = HoursPage { from_ms, until_ms, number, limit: PAGE };
        let mut leases =
            pages(self, page, |view, page| view.lease_hours(page), |row: &OwnedHour| row.hour.number).await?;
        let mut gpus = pages(self, page, |view, page| view.gpu_hours(page), |row: &GpuHour| row.number).await?;
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
    /// Splits a period into days whose rows are read, and the hours before and after them.
    async fn parts(&self, from_ms: i64, until_ms: i64) -> Result<PeriodParts, ApiError> {
        let day_of = |ms: i64| ms.div_euclid(DAY_MS) * DAY_MS;
        let (first, last) = (day_of(from_ms), day_of(until_ms));
        let read =
            move |view: &View<'_>| Ok((view.folded_hours()?, view.is_only_a_day(first)?, view.is_only_a_day(last)?));
        let (folded, is_first_whole, is_last_whole) = self.0.context.store.read(read).await?;
        let Some(folded) = folded else {
            return Ok(PeriodParts { from_ms, until_ms, days: (from_ms, from_ms), number: 0 });
        };
        let from_ms = if is_first_whole { first } else { from_ms };
        let until_ms = if is_last_whole && last < until_ms { last.saturating_add(DAY_MS) } else { until_ms };
        let begin = if day_of(from_ms) == from_ms { from_ms } else { day_of(from_ms).saturating_add(DAY_MS) };
        let begin = begin.max(folded.until_ms.saturating_sub(MOST_DAYS * DAY_MS));
        let end = day_of(until_ms).min(folded.until_ms);
        let days = if begin < end { (begin, end) } else { (from_ms, from_ms) };
        Ok(PeriodParts { from_ms, until_ms, days, number: folded.number })
    }

    /// Returns the rows of days, some days at once, so that changes can be recorded between two reads.
    async fn folded_days(&self, (from_ms, until_ms): (i64, i64)) -> Result<(Vec<LeaseDay>, Vec<GpuDay>), ApiError> {
        let (mut leases, mut gpus) = (Vec::new(), Vec::new());
        let mut at = from_ms;
        while at < until_ms {
            let next = at.saturating_add(DAYS_AT_ONCE * DAY_MS).min(until_ms);
            let read = move |view: &View<'_>| Ok((view.lease_days(at, next)?, view.gpu_days(at, next)?));
            let (some, of_gpus) = self.0.context.store.read(read).await?;
            leases.extend(some);
            gpus.extend(of_gpus);
            at = next;
        }
        Ok((leases, gpus))
    }

    /// Returns the hours of a period that are not in a row of a day.
    async fn unfolded_hours(&self, parts: &PeriodParts) -> Result<(Vec<OwnedHour>, Vec<GpuHour>), ApiError> {
        let PeriodParts { from_ms, until_ms, days: (begin, end), number } = *parts;
        if begin == end {
            return self.hours(from_ms, until_ms, 0).await;
        }
        let (mut leases, mut gpus) = self.hours(from_ms, begin, 0).await?;
        // Hours that were recorded after their day was folded.
        let late = self.hours(begin, end, number).await?;
        let after = self.hours(end, until_ms, 0).await?;
        leases.extend(late.0.into_iter().chain(after.0));
        gpus.extend(late.1.into_iter().chain(after.1));
        Ok((leases, gpus))
    }

    /// Returns the requests of the days of a period by owner: those in the store, and those that are not recorded yet.
    async fn owner_requests(&self, from_ms: i64, until_ms: i64) -> Result<Vec<RequestDay>, ApiError> {
        let day_ms = from_ms.div_euclid(DAY_MS) * DAY_MS;
        let turn = self.0.recording.lock().await;
        let mut days = self.0.context.store.read(move |view| view.owner_requests(day_ms, until_ms)).await?;
        let refused = self.0.context.refused.counts();
        drop(turn);
        days.extend(self.refused(refused).await.into_iter().filter(|one| (day_ms..until_ms).contains(&one.day_ms)));
        Ok(days)
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

fn request_sums(sums: account::RequestSums) -> RequestTotals {
    let account::RequestSums { granted, refused, waited_ms } = sums;
    RequestTotals { granted_requests: granted, refused_requests: refused, waited_s: waited_ms / 1000 }
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
            Some(RequestResult::NotReady) => &mut line.not_ready,
            Some(RequestResult::NotAllowed) => &mut line.not_allowed,
            Some(RequestResult::Impossible) => &mut line.impossible,
            Some(RequestResult::Failed) | None => &mut line.failed_requests,
        };
        *sum += count;
    }
    lines.into_values().collect()
}

/// Returns the time from which these hours and days of GPUs are recorded; `None` if the period begins there or later.
fn first_record(hours: &[GpuHour], days: &[GpuDay], from_ms: i64, until: Timestamp) -> Option<Timestamp> {
    match recorded_since(hours, days, Timestamp::now().as_millisecond()) {
        Some(since_ms) if since_ms <= from_ms => None,
        Some(since_ms) => Some(Timestamp::from_millisecond(since_ms).map_or(until, |since| since.min(until))),
        None => Some(until),
    }
}

pub(super) fn grouping(by: UsageGrouping) -> Grouping {
    match by {
        UsageGrouping::User => Grouping::User,
        UsageGrouping::Group => Grouping::Group,
        UsageGrouping::Job => Grouping::Job,
        UsageGrouping::Account => Grouping::Account,
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
        energy_method: sums.energy_method(),
        energy_mixed: sums.is_energy_mixed(),
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
