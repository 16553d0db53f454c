//! The bill of a month. A closed month is read from its document, so its bill never changes. The bill of another month is
//! made of the hours so far, and says so.

use gpush_api::{ApiError, BillModel, BillState, BillSums, Code, UsageGrouping};
use gpush_core::quote::Quoted;
use gpush_host::{machine, subtask};
use gpush_store::StoreError;
use gpush_usage::{
    bill::{
        self, BillSum, BillSummary, CsvError, FocusSite, Month, MonthInputs, bill_csv, focus_csv, gpu_hours, summary,
    },
    ledger::RowBound,
    moment::DAY_MS,
};
use jiff::Timestamp;

use super::{
    Usage,
    closing::{models, prices, unbilled},
    pages::pages,
    report::grouping,
    show::joules,
};

/// Days of the longest month, and one more day: by then, gpushd has closed the month.
const NEEDED_DAYS: u32 = 32;

/// A request for the bill of a month.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BillQuery {
    pub(crate) month: Month,
    pub(crate) model: BillModel,
    pub(crate) by: UsageGrouping,
}

impl BillQuery {
    /// Reads the month of a request; the present one if the request names none.
    ///
    /// # Errors
    /// If the text is not a month, or if the month has not begun.
    pub(crate) fn new(month: Option<&str>, model: BillModel, by: UsageGrouping) -> Result<Self, ApiError> {
        let present = Month::of(Timestamp::now().as_millisecond());
        let Some(text) = month else { return Ok(Self { month: present, model, by }) };
        let month: Month = text.parse().map_err(|error: bill::BadMonth| {
            ApiError::new(Code::BadRequest, format!("{} is not a month", Quoted(text))).hint(error.to_string())
        })?;
        if month > present {
            let error = ApiError::new(Code::BadRequest, format!("the month {month} has not begun"));
            return Err(error.hint(format!("name a month up to {present}")));
        }
        Ok(Self { month, model, by })
    }
}

impl Usage {
    /// Returns the bill. `only` is the user whose leases count; `None` for all users.
    ///
    /// # Errors
    /// If the store cannot be read, or if the month is too old.
    pub(crate) async fn bill(&self, query: BillQuery, only: Option<&str>) -> Result<gpush_api::Bill, ApiError> {
        let (inputs, state) = self.inputs(query.month, only).await?;
        let made = inputs.bill(query.model);
        let BillSummary { lines, unallocated, total } = summary(&made, grouping(query.by));
        let line = |line: bill::SummaryLine| gpush_api::BillLine { key: line.key, sums: sums(&line.sum) };
        Ok(gpush_api::Bill {
            month: query.month.to_string(),
            state,
            model: query.model,
            currency: made.currency,
            user: only.map(str::to_owned),
            by: query.by,
            lines: lines.into_iter().map(line).collect(),
            unallocated: only.is_none().then(|| sums(&unallocated)),
            total: sums(&total),
            notes: self.notes(&inputs, state),
        })
    }

    /// Returns the bill as CSV: one row for each lease, target and hour. With `focus`, it has the columns of FOCUS.
    ///
    /// # Errors
    /// If the store cannot be read, or if the month is too old.
    pub(crate) async fn bill_rows(
        &self,
        query: BillQuery,
        only: Option<&str>,
        focus: bool,
    ) -> Result<String, ApiError> {
        let (inputs, _) = self.inputs(query.month, only).await?;
        let made = inputs.bill(query.model);
        let text = if focus { focus_csv(&made, &site()) } else { bill_csv(&made) };
        text.map_err(|error: CsvError| {
            ApiError::new(Code::Internal, "the bill cannot be written as CSV").cause(error.to_string())
        })
    }

    /// Returns the inputs of the bill.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    async fn inputs(&self, month: Month, only: Option<&str>) -> Result<(MonthInputs, BillState), ApiError> {
        let store = &self.0.context.store;
        let closed = store.read(|view| view.closed_bills()).await?;
        let now_ms = Timestamp::now().as_millisecond();
        let (inputs, state) = if closed.is_some_and(|closed| month.end_ms() <= closed.until_ms) {
            (self.closed_inputs(month, now_ms).await?, BillState::Closed)
        } else {
            let state = if now_ms < month.end_ms() { BillState::Running } else { BillState::Ended };
            (self.open_inputs(month, closed).await?, state)
        };
        Ok((
            match only {
                Some(user) => inputs.of_user(user),
                None => inputs,
            },
            state,
        ))
    }

    /// Reads the document of a closed month.
    async fn closed_inputs(&self, month: Month, now_ms: i64) -> Result<MonthInputs, ApiError> {
        let month_ms = month.start_ms();
        match self.0.context.store.read(move |view| view.closed_month(month_ms)).await? {
            Some(document) => {
                let read = move || {
                    let damaged = |error: serde_json::Error| StoreError::DamagedUse {
                        table: "closed_bills".to_owned(),
                        what: error.to_string(),
                    };
                    serde_json::from_str(&document.content()?).map_err(damaged)
                };
                let inputs: Result<MonthInputs, StoreError> = subtask::blocking(read)
                    .await
                    .unwrap_or_else(|| Err(StoreError::Internal("the bill was not read".to_owned())));
                Ok(inputs?)
            }
            None => {
                let days = self.0.context.settings.config().history.days;
                if month.end_ms() < now_ms - i64::from(days) * DAY_MS {
                    let message = format!("gpushd has no bill of {month}: it keeps bills for {days} days");
                    let error = ApiError::new(Code::NotFound, message);
                    return Err(error.hint("`history.days` of the config sets how long gpushd keeps them"));
                }
                // A closed month without use has no document.
                Ok(MonthInputs::new(month, gpush_usage::bill::PriceList::default()))
            }
        }
    }

    /// Collects the hours so far of a month that is not closed.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the methods accept only one lifetime of `View`")]
    async fn open_inputs(&self, month: Month, closed: Option<RowBound>) -> Result<MonthInputs, ApiError> {
        let mut inputs = MonthInputs::new(month, prices(&self.0.context.settings.config()));
        let (leases, gpus) = self.hours(month.start_ms(), month.end_ms(), 0).await?;
        leases.into_iter().for_each(|row| inputs.add_lease(row.owner, row.hour));
        gpus.into_iter().for_each(|row| inputs.add_gpu(row));
        // Hours that are recorded after their month was closed belong to the first month that is not closed.
        let first = closed.filter(|closed| Month::of(closed.until_ms) == month);
        if let Some(page) = first.and_then(|_| unbilled(closed, month.start_ms()).pop()) {
            let late = pages(self, page, |view, page| view.lease_hours(page), |row| row.hour.number).await?;
            late.into_iter().for_each(|row| inputs.add_lease(row.owner, row.hour));
            let late = pages(self, page, |view, page| view.gpu_hours(page), |row| row.number).await?;
            late.into_iter().for_each(|row| inputs.add_gpu(row));
        }
        let (from_ms, until_ms) = (month.start_ms(), month.end_ms());
        let corrections = self.0.context.store.read(move |view| view.bill_corrections(from_ms, until_ms)).await?;
        inputs.adjustments.extend(corrections.into_iter().map(|correction| correction.adjustment));
        inputs.models = models(self).await?;
        Ok(inputs)
    }

    /// Returns the notes about a bill.
    fn notes(&self, inputs: &MonthInputs, state: BillState) -> Vec<String> {
        let month = inputs.month;
        let mut notes = Vec::new();
        let has_rows = !inputs.leases.is_empty() || !inputs.gpus.is_empty();
        match state {
            BillState::Running => notes.push(format!("The month {month} is not over: the bill has the use so far.")),
            BillState::Ended | BillState::Closed if !has_rows => {
                notes.push(format!("gpushd has no records of {month}."));
            }
            BillState::Ended => {
                notes.push(format!("The month {month} is not closed yet: the bill can change for about an hour."));
            }
            BillState::Closed => {}
        }
        if has_rows && inputs.prices.currency().is_none() {
            notes.push(match state {
                BillState::Closed => format!("The config had no price when {month} was closed, so all amounts are 0."),
                BillState::Running | BillState::Ended => {
                    "The config has no price, so all amounts are 0: add `[[price]]` before the month ends.".to_owned()
                }
            });
        }
        let days = self.0.context.settings.config().history.days;
        if state != BillState::Closed && days < NEEDED_DAYS {
            notes.push(format!(
                "The bill may lack the first days of the month, because gpushd keeps the use for {days} days only \
                 (`history.days`)."
            ));
        }
        notes
    }
}

/// The code of ISO 4217 for "no currency", for bills without prices.
const NO_CURRENCY: &str = "XXX";

/// Returns the names for bills in FOCUS: the host is provider, publisher and issuer.
fn site() -> FocusSite {
    let name = machine::name().unwrap_or_else(|| "localhost".to_owned());
    FocusSite {
        account_id: name.clone(),
        account_name: name.clone(),
        region: name.clone(),
        name,
        currency: NO_CURRENCY.to_owned(),
    }
}

fn sums(sum: &BillSum) -> BillSums {
    BillSums {
        lease_count: u64::try_from(sum.leases).unwrap_or(u64::MAX),
        held_s: sum.times.held_ms() / 1000,
        busy_s: sum.times.busy_ms / 1000,
        charged_gpu_hours: gpu_hours(sum.charged_unit_ms).to_string(),
        slice_hours: sum.quantity.to_string(),
        amount: sum.amount.to_string(),
        corrections: sum.corrections.to_string(),
        energy_j: joules(sum.energy_mj),
    }
}
