//! Closes the bills of months that have ended, folds the hours of ended days, and deletes old rows.
//!
//! ```text
//! month over, for an hour of running time ──► hours, prices, models of that month ──► store, never changed again
//! day over ──► its hours are added to rows of the day, from which reports are made
//! once a day: hours in closed bills, older than 40 days ──► deleted
//!             everything older than `history.days` ──► deleted
//! ```
//!
//! All of this waits until the clock is settled, so that a clock that is wrong after a boot closes and deletes nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::GpuUuid;
use gpush_core::config::{Config, PriceRule};
use gpush_host::subtask;
use gpush_store::{ClosedMonth, HoursPage, StoreError, Tx, UsageBounds, View};
use gpush_usage::{
    bill::{BilledGpu, Month, MonthInputs, Price, PriceList},
    ledger::RowBound,
    moment::{DAY_MS, Moment},
    settled_clock::SettledClock,
};
use rust_decimal::Decimal;
use tokio::time::Instant;

use super::{
    Usage,
    pages::{PAGE, pages},
};
use crate::state::{GpuSnapshot, HostState};

/// Number of days for which hours are kept, if they are in a closed bill.
const HOURS_DAYS: u32 = 40;
/// Number of days for which unused times are kept.
const UNUSED_DAYS: u32 = 100;
/// Time between two deletions of old rows.
const PRUNE_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Closes months, folds days and deletes old rows.
#[derive(Debug)]
pub(super) struct Closing {
    clock: SettledClock,
    /// The present month, if the months before it are closed.
    closed: Option<i64>,
    /// Start of the day before which all hours are folded.
    folded: Option<i64>,
    /// When old rows were last deleted.
    pruned: Option<Instant>,
}

impl Closing {
    /// Creates the state. `pause` is how long the clock must show a day: see [`SettledClock`].
    pub(super) fn new(pause: Duration, now: Moment) -> Self {
        let pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
        Self { clock: SettledClock::new(pause_ms, now), closed: None, folded: None, pruned: None }
    }

    /// Does the work that is due. Call this only while no other transaction records hours.
    ///
    /// # Errors
    /// If the store fails. Then the next call tries again.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    pub(super) async fn run(&mut self, usage: &Usage) -> Result<(), StoreError> {
        let now = usage.now();
        let folded = usage.0.context.store.read(|view| view.folded_hours()).await?;
        if !self.clock.observe(now, folded.map(|folded| folded.until_ms)) {
            return Ok(());
        }
        let month_ms = Month::of(now.wall_ms).start_ms();
        if self.closed != Some(month_ms) {
            close_months(usage, month_ms).await?;
            self.closed = Some(month_ms);
        }
        let day_ms = now.wall_ms.div_euclid(DAY_MS) * DAY_MS;
        if self.folded != Some(day_ms) {
            usage.0.context.store.write(move |tx: &mut Tx<'_>| tx.fold_days(day_ms)).await?;
            self.folded = Some(day_ms);
        }
        if self.pruned.is_none_or(|last| last.elapsed() >= PRUNE_EVERY) {
            delete_old(usage, now.wall_ms).await?;
            self.pruned = Some(Instant::now());
        }
        Ok(())
    }
}

/// Closes the months before a time, which is the start of a month. A month that is closed already never changes.
#[expect(clippy::redundant_closure_for_method_calls, reason = "the methods accept only one lifetime of `View`")]
async fn close_months(usage: &Usage, until_ms: i64) -> Result<(), StoreError> {
    let store = &usage.0.context.store;
    let read = store.read(|view| Ok((view.closed_bills()?, view.next_usage_row()?)));
    let (closed, number) = read.await?;
    if closed.is_some_and(|closed| closed.until_ms >= until_ms) {
        return Ok(());
    }
    let prices = prices(&usage.0.context.settings.config());
    let mut months: BTreeMap<Month, MonthInputs> = BTreeMap::new();
    let first = closed.map(|closed| Month::of(closed.until_ms));
    let month_of = |ms: i64| first.map_or(Month::of(ms), |first| Month::of(ms).max(first));
    let new_month = |month| MonthInputs::new(month, prices.clone());
    for page in unbilled(closed, until_ms) {
        for row in pages(usage, page, |view, page| view.lease_hours(page), |row| row.hour.number).await? {
            let month = month_of(row.hour.hour_ms);
            months.entry(month).or_insert_with(|| new_month(month)).add_lease(row.owner, row.hour);
        }
        for row in pages(usage, page, |view, page| view.gpu_hours(page), |row| row.number).await? {
            let month = month_of(row.hour_ms);
            months.entry(month).or_insert_with(|| new_month(month)).add_gpu(row);
        }
    }
    let from_ms = closed.map_or(i64::MIN, |closed| closed.until_ms);
    for correction in store.read(move |view| view.bill_corrections(from_ms, until_ms)).await? {
        let month = month_of(correction.adjustment.hour_ms);
        months.entry(month).or_insert_with(|| new_month(month)).adjustments.push(correction.adjustment);
    }
    let models = models(usage).await?;
    let documents = subtask::blocking(move || {
        let document = |mut month: MonthInputs| {
            month.models.clone_from(&models);
            let content = serde_json::to_string(&month).map_err(|error| StoreError::Internal(error.to_string()))?;
            ClosedMonth::new(month.month.start_ms(), &content)
        };
        months.into_values().map(document).collect::<Result<Vec<ClosedMonth>, StoreError>>()
    });
    let documents = documents.await.ok_or_else(|| StoreError::Internal("the bills were not made".to_owned()))??;
    let now_closed = RowBound { until_ms, number };
    let count = documents.len();
    store.write(move |tx: &mut Tx<'_>| tx.close_bills(&documents, now_closed)).await?;
    tracing::info!("the bills of all months before {} are closed; {count} months had use", Month::of(until_ms));
    Ok(())
}

/// Returns the pages of all hours before a time that are not in a closed bill.
pub(super) fn unbilled(closed: Option<RowBound>, until_ms: i64) -> Vec<HoursPage> {
    let page = |from_ms, until_ms, number| HoursPage { from_ms, until_ms, number, limit: PAGE };
    match closed {
        None => vec![page(i64::MIN, until_ms, 0)],
        Some(closed) => {
            vec![page(closed.until_ms, until_ms, 0), page(i64::MIN, closed.until_ms.min(until_ms), closed.number)]
        }
    }
}

/// Deletes old hours, and rows that are older than `history.days`.
async fn delete_old(usage: &Usage, now_ms: i64) -> Result<(), StoreError> {
    let context = &usage.0.context;
    let days = context.settings.config().history.days;
    let before = |days: u32| now_ms.saturating_sub(i64::from(days) * DAY_MS);
    // Hours in a closed bill; `prune_usage` deletes no other ones.
    let hours_ms = before(HOURS_DAYS.min(days));
    let bounds = UsageBounds { unused_from_ms: before(days.min(UNUSED_DAYS)), history_from_ms: before(days) };
    let delete = move |tx: &mut Tx<'_>| Ok(tx.delete_folded_hours(hours_ms)? + tx.prune_usage(bounds)?);
    context.store.write(delete).await?;
    Ok(())
}

/// Returns the prices of the config.
pub(super) fn prices(config: &Config) -> PriceList {
    let price = |rule: &PriceRule| {
        let amount = |millionths: u64| Decimal::from(millionths) / Decimal::from(1_000_000_u32);
        Price {
            kind: rule.kind,
            model: rule.model.clone(),
            per_slice_hour: amount(rule.per_slice_hour.millionths()).normalize(),
            per_lease: amount(rule.per_lease.millionths()).normalize(),
            currency: rule.currency.clone(),
        }
    };
    PriceList::new(config.prices.iter().map(price).collect()).unwrap_or_else(|error| {
        // The config has the same limits, so this does not happen.
        tracing::error!("the prices of the config are not used: {error}");
        PriceList::default()
    })
}

/// Returns the models of all GPUs that have or had use.
pub(super) async fn models(usage: &Usage) -> Result<BTreeMap<GpuUuid, BilledGpu>, StoreError> {
    let recorded = usage.0.context.store.read(|view: &View<'_>| view.gpu_models()).await?;
    let mut models: BTreeMap<GpuUuid, BilledGpu> =
        recorded.into_iter().map(|model| (model.gpu, model.billed)).collect();
    models.extend(present_models(&usage.0.context.state.now()));
    Ok(models)
}

/// Returns the models of the GPUs of the host. Leaves out GPUs that gpushd has not read yet: whether they support MIG is not
/// known.
pub(super) fn present_models(host: &HostState) -> BTreeMap<GpuUuid, BilledGpu> {
    let billed = |gpu: &gpush_api::Gpu| BilledGpu {
        model: gpu.name.clone(),
        slices: gpu.mig.as_ref().map_or(1, |mig| u32::from(mig.compute_slices).max(1)),
    };
    let is_read = |one: &&Arc<GpuSnapshot>| one.gpu.memory.total_mib > 0;
    host.gpus.iter().filter(is_read).map(|one| (one.gpu.uuid.clone(), billed(&one.gpu))).collect()
}
