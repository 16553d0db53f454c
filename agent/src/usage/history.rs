//! Records the sums in the store, so that a restart or a crash loses no held time.
//!
//! ```text
//! start ──► checkpoint of the store + leases that began or ended since ──► ledger
//! lease begins, changes, ends ─► at most 10 s later ─┐
//! 30 seconds over while metrics are collected ───────┤
//! 10 minutes over, without leases 1 hour ────────────┼──► one transaction: checkpoint, closed hours, ended leases
//! gpushd stops ──────────────────────────────────────┘                          then: see `closing`
//! ```
//!
//! Metrics show the sums of the last transaction, so that no counter falls after a crash: see [`RecordedSums`].
//!
//! After a crash, the time since the checkpoint is held time of which gpushd does not know the use.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpush_api::{EndReason, GpuUuid, LeaseBinding, LeaseId};
use gpush_store::{GpuModel, LeaseRecord, OwnedHour, RequestCount, StoreError, Tx, UsageRecord};
use gpush_usage::{
    account::{EndedLease, LeaseOwner, RequestDay, RequestSums},
    bill::BilledGpu,
    ledger::{ClosedRows, LeaseHour, LeaseTotals, Ledger, Missed},
    moment::{DAY_MS, Moment},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{
    Usage,
    closing::{self, Closing},
    holds,
    lease_owners::LeaseOwners,
};
use crate::state::{
    HostState,
    refused_requests::RefusedByUser,
    request_counts::{RequestResult, RequestedShare},
};

/// Time between two checkpoints without a change. After a crash, the use of at most this time is unknown.
const WITHOUT_CHANGE: Duration = Duration::from_secs(600);
/// Time between two checkpoints while metrics are collected, as a multiple of the shortest time: 30 seconds. Counters in
/// metrics are as old as the last checkpoint.
const WHILE_SCRAPED: u32 = 3;
/// Time between two checkpoints on a host without leases.
const WITHOUT_LEASES: Duration = Duration::from_secs(3600);
/// Maximum number of rows that wait while the store accepts no writes.
const MOST_WAITING: usize = 100_000;

/// Numbers of requests since gpushd started.
pub(super) type CountedRequests = BTreeMap<(RequestedShare, RequestResult), u64>;

/// The accounts at a moment.
#[derive(Debug, Serialize, Deserialize)]
struct Checkpoint<L> {
    at: Moment,
    ledger: L,
}

/// The sums of the last transaction. After a crash, gpushd continues with them, so they never fall.
#[derive(Debug, Default)]
pub(super) struct RecordedSums {
    pub(super) leases: BTreeMap<LeaseId, LeaseTotals>,
    /// Unattributed energy in mJ, by GPU.
    pub(super) unattributed_mj: BTreeMap<GpuUuid, u64>,
}

impl RecordedSums {
    fn of(ledger: &Ledger, now: Moment) -> Self {
        Self {
            leases: ledger.leases().filter_map(|id| Some((id, ledger.settled_totals(id)?))).collect(),
            unattributed_mj: ledger.gpus(now).map(|gpu| (gpu.gpu, gpu.sums.unattributed_mj)).collect(),
        }
    }
}

/// The content of the next transaction.
struct Due {
    closed: ClosedRows,
    begun: Vec<LeaseId>,
    ended: Vec<LeaseTotals>,
    checkpoint: String,
    recorded: RecordedSums,
}

/// Records the sums.
#[derive(Debug)]
pub(super) struct Recorder {
    owners: LeaseOwners,
    /// Rows that are not recorded yet.
    waiting: UsageRecord,
    last: Option<Instant>,
    /// The counts of requests that are recorded.
    counted: CountedRequests,
    /// The models of GPUs that are recorded.
    models: BTreeMap<GpuUuid, BilledGpu>,
    closing: Closing,
    /// Shortest time between two checkpoints. Changes in this time share one.
    pause: Duration,
    /// Whether the numbers of new rows follow those in the store. Otherwise they would replace older rows.
    is_numbered: bool,
}

impl Recorder {
    /// Creates a recorder. Its first checkpoint is due at once: from then on, no lease is missed. `close` is how long
    /// the clock must show a month until the earlier months are closed.
    pub(super) fn new(pause: Duration, close: Duration, now: Moment, is_numbered: bool) -> Self {
        Self {
            owners: LeaseOwners::default(),
            waiting: UsageRecord::default(),
            last: None,
            counted: BTreeMap::new(),
            models: BTreeMap::new(),
            closing: Closing::new(close, now),
            pause,
            is_numbered,
        }
    }

    /// Returns when the next checkpoint is due.
    pub(super) fn due(&self, is_changed: bool, has_leases: bool, is_scraped: bool) -> Instant {
        let pause = match (is_changed, has_leases, is_scraped) {
            (true, _, _) => self.pause,
            (false, true, true) => self.pause * WHILE_SCRAPED,
            (false, true, false) | (false, false, true) => WITHOUT_CHANGE,
            (false, false, false) => WITHOUT_LEASES,
        };
        self.last.map_or_else(Instant::now, |last| last + pause)
    }

    /// Records a checkpoint, and the rows that have closed since the last one. If the store refuses, the rows wait for the
    /// next attempt.
    pub(super) async fn record(mut self, usage: Usage) -> Self {
        self.last = Some(Instant::now());
        if !self.is_numbered {
            self.is_numbered = usage.number_rows().await;
            if !self.is_numbered {
                return self;
            }
        }
        let turn = Arc::clone(&usage.0);
        let turn = turn.recording.lock().await;
        let Due { closed, begun, ended, checkpoint, recorded } = usage.take_for_record();
        match self.try_record(&usage, closed, &begun, ended, checkpoint).await {
            Ok(unaccounted) => {
                usage.0.accounts.lock().recorded = recorded;
                usage.0.saved_requests.lock().clone_from(&self.counted);
                usage.account_short_leases(&unaccounted);
                if let Err(error) = self.closing.run(&usage).await {
                    tracing::warn!(
                        "bills cannot be closed, or old use cannot be folded or deleted; gpushd tries again: {error}"
                    );
                }
            }
            Err(error) => tracing::warn!("the use of GPUs cannot be recorded, gpushd tries again: {error}"),
        }
        drop(turn);
        self
    }

    async fn try_record(
        &mut self,
        usage: &Usage,
        closed: ClosedRows,
        begun: &[LeaseId],
        ended: Vec<LeaseTotals>,
        checkpoint: String,
    ) -> Result<Vec<LeaseRecord>, StoreError> {
        let context = &usage.0.context;
        let ended_ids: Vec<LeaseId> = ended.iter().map(|totals| totals.lease).collect();
        let unknown = self.owners.unknown(closed.leases.iter().map(|row| row.lease).chain(ended_ids.iter().copied()));
        let read = unknown.into_iter().chain(begun.iter().copied()).chain(ended_ids.iter().copied()).collect();
        let records = read_leases(usage, read).await.unwrap_or_else(|error| {
            tracing::warn!("the owners of leases cannot be read: {error}");
            BTreeMap::new()
        });
        self.owners.find(records.values(), &context.users).await;
        let owned = |hour: LeaseHour| OwnedHour { owner: self.owners.of(hour.lease), hour };
        self.waiting.lease_hours.extend(closed.leases.into_iter().map(owned));
        self.waiting.gpu_hours.extend(closed.gpus);
        self.waiting.unused.extend(closed.spans);
        let ended = ended.into_iter().map(|totals| {
            let owner = self.owners.of(totals.lease);
            ended_lease(records.get(&totals.lease), owner, totals)
        });
        self.waiting.ended.extend(ended);
        let begun =
            begun.iter().filter_map(|id| records.get(id)).map(|record| granted(record, self.owners.of(record.id)));
        self.waiting.owner_requests.extend(begun);
        self.waiting.owner_requests.extend(usage.refused(context.refused.take()).await);
        for lease in ended_ids {
            self.owners.forget(lease);
        }
        self.count_requests(usage);
        self.drop_beyond_limit();
        let present = closing::present_models(&context.state.now());
        let is_new = |(gpu, billed): &(&GpuUuid, &BilledGpu)| self.models.get(*gpu) != Some(*billed);
        let model = |(gpu, billed): (&GpuUuid, &BilledGpu)| GpuModel { gpu: gpu.clone(), billed: billed.clone() };
        let models: Vec<GpuModel> = present.iter().filter(is_new).map(model).collect();
        let written = UsageRecord { checkpoint, models, ..self.waiting.clone() };
        let unaccounted = context.store.write(move |tx: &mut Tx<'_>| tx.record_usage(&written)).await?;
        self.waiting = UsageRecord::default();
        self.models.extend(present);
        Ok(unaccounted)
    }

    /// Adds the requests since the last transaction.
    fn count_requests(&mut self, usage: &Usage) {
        let day_ms = day_ms(Timestamp::now());
        for (share, result, count) in usage.0.context.requests.list() {
            let recorded = self.counted.entry((share.clone(), result)).or_default();
            let new = count - std::mem::replace(recorded, count);
            if new > 0 {
                let RequestedShare { kind, profile } = share;
                let (kind, result) = (kind.to_owned(), result.name().to_owned());
                self.waiting.requests.push(RequestCount { day_ms, kind, profile, result, count: new });
            }
        }
    }

    /// Drops the oldest rows if the store has refused writes for a long time.
    fn drop_beyond_limit(&mut self) {
        let UsageRecord { lease_hours, gpu_hours, unused, ended, requests, owner_requests, checkpoint: _, models: _ } =
            &mut self.waiting;
        let dropped = drop_oldest(lease_hours)
            + drop_oldest(gpu_hours)
            + drop_oldest(unused)
            + drop_oldest(ended)
            + drop_oldest(requests)
            + drop_oldest(owner_requests);
        if dropped > 0 {
            tracing::error!("the store accepts no writes: {dropped} rows about the use of GPUs are lost");
        }
    }
}

fn drop_oldest<T>(rows: &mut Vec<T>) -> usize {
    let dropped = rows.len().saturating_sub(MOST_WAITING);
    rows.drain(..dropped).count()
}

/// Returns the granted request of a lease.
fn granted(record: &LeaseRecord, owner: LeaseOwner) -> RequestDay {
    let granted_at = record.granted_at.unwrap_or(record.created_at);
    let waited = granted_at.duration_since(record.created_at).as_millis();
    let mut sums = RequestSums::default();
    sums.add(true, u64::try_from(waited).unwrap_or(0));
    RequestDay { day_ms: day_ms(granted_at), owner, kind: Some(record.kind), sums }
}

/// Returns the start of the UTC day of a time.
fn day_ms(at: Timestamp) -> i64 {
    at.as_millisecond().div_euclid(DAY_MS) * DAY_MS
}

/// Returns the row of an ended lease.
fn ended_lease(record: Option<&LeaseRecord>, owner: LeaseOwner, totals: LeaseTotals) -> EndedLease {
    let waited = record.and_then(|record| Some(record.granted_at?.duration_since(record.created_at)));
    let name = match record.map(|record| &record.binding) {
        Some(LeaseBinding::Job { name, .. }) => name.clone(),
        Some(
            LeaseBinding::None
            | LeaseBinding::Scope { .. }
            | LeaseBinding::Cgroup { .. }
            | LeaseBinding::Process { .. }
            | LeaseBinding::Time,
        )
        | None => None,
    };
    EndedLease {
        owner,
        name,
        reason: record.and_then(|record| record.reason).unwrap_or(EndReason::Released),
        waited_ms: waited.map_or(0, |waited| u64::try_from(waited.as_millis()).unwrap_or(0)),
        totals,
    }
}

pub(super) async fn read_leases(
    usage: &Usage,
    leases: BTreeSet<LeaseId>,
) -> Result<BTreeMap<LeaseId, LeaseRecord>, StoreError> {
    if leases.is_empty() {
        return Ok(BTreeMap::new());
    }
    let read =
        usage.0.context.store.read(move |view| leases.iter().map(|id| view.lease(*id)).collect::<Result<Vec<_>, _>>());
    Ok(read.await?.into_iter().flatten().map(|record| (record.id, record)).collect())
}

impl Usage {
    /// Returns whether the use is recorded.
    pub(super) fn records(&self) -> bool {
        let context = &self.0.context;
        context.read_only.is_none() && context.settings.config().history.days > 0
    }

    /// Returns whether the use of open leases is recorded, so that samples are needed.
    pub(super) fn records_leases(&self, host: &HostState) -> bool {
        self.records() && host.leases.holding().next().is_some()
    }

    /// Returns whether a lease has begun, changed or ended since the last checkpoint.
    pub(super) fn is_changed(&self) -> bool {
        self.0.accounts.lock().is_changed
    }

    /// Takes the content of the next transaction.
    fn take_for_record(&self) -> Due {
        let now = self.0.clock.now();
        let accounts = &mut *self.0.accounts.lock();
        accounts.ledger.advance(now);
        let (closed, ended) = (accounts.ledger.take_closed(), std::mem::take(&mut accounts.ended));
        let begun = std::mem::take(&mut accounts.begun);
        accounts.is_changed = false;
        let checkpoint = Checkpoint { at: now, ledger: &accounts.ledger };
        let checkpoint = serde_json::to_string(&checkpoint).unwrap_or_else(|error| {
            tracing::error!("the checkpoint of the use cannot be written: {error}");
            String::new()
        });
        Due { closed, begun, ended, checkpoint, recorded: RecordedSums::of(&accounts.ledger, now) }
    }

    /// Accounts leases that ended before this task noticed them. Each gets a row.
    fn account_short_leases(&self, ended: &[LeaseRecord]) {
        let now = self.0.clock.now();
        let host = self.0.context.state.now();
        let accounts = &mut *self.0.accounts.lock();
        for record in ended {
            // The ledger ends the first ones with the next snapshot. The next transaction records the others.
            if accounts.ledger.leases().any(|lease| lease == record.id)
                || accounts.ended.iter().any(|totals| totals.lease == record.id)
            {
                continue;
            }
            accounts.begun.push(record.id);
            accounts.ledger.set_lease(record.id, holds::of_members(&host, &record.members), now);
            accounts.ended.extend(accounts.ledger.end_lease(record.id, now));
            accounts.is_changed = true;
        }
    }

    /// Returns the rows for refused requests. They count for the present day.
    pub(super) async fn refused(&self, counts: RefusedByUser) -> Vec<RequestDay> {
        let users = &self.0.context.users;
        let accounts = users.owners(counts.keys().map(|(uid, _)| *uid).collect()).await;
        let mut days = Vec::new();
        for ((uid, kind), refused) in counts {
            let group = users.names().primary_group(uid).await.ok().flatten();
            let name = match accounts.get(&uid) {
                Some(account) => Some(account.clone()),
                None => users.user(uid).await,
            };
            let owner = LeaseOwner { user: name.unwrap_or_else(|| uid.to_string()), group, ..LeaseOwner::default() };
            let sums = RequestSums { refused, ..RequestSums::default() };
            days.push(RequestDay { day_ms: day_ms(Timestamp::now()), owner, kind, sums });
        }
        days
    }

    /// Numbers new rows so that they do not replace those in the store. Returns whether the store could be read.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method accepts only one lifetime of `View`")]
    pub(super) async fn number_rows(&self) -> bool {
        match self.0.context.store.read(|view| view.next_usage_row()).await {
            Ok(number) => self.0.accounts.lock().ledger.number_rows_from(number),
            Err(error) => {
                tracing::warn!("the use of GPUs is not recorded, because the store cannot be read: {error}");
                return false;
            }
        }
        true
    }

    /// Drops the rows that wait for the next transaction, while nothing is recorded. Otherwise they would fill the memory.
    pub(super) fn drop_unrecorded(&self) {
        let accounts = &mut *self.0.accounts.lock();
        accounts.ended.clear();
        accounts.begun.clear();
        self.0.context.refused.take();
        let _rows = accounts.ledger.take_closed();
    }

    /// Continues from the last checkpoint. `host` is the first snapshot with GPUs.
    pub(super) async fn restore(&self, host: &HostState) {
        let store = &self.0.context.store;
        let read = store.read(|view| Ok((view.usage_checkpoint()?, view.unaccounted_leases()?)));
        let (text, unaccounted) = match read.await {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!("the recorded use of GPUs cannot be read; gpushd begins new sums: {error}");
                return;
            }
        };
        let Some(text) = text else { return };
        let Checkpoint { at, mut ledger } = match serde_json::from_str::<Checkpoint<Ledger>>(&text) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                tracing::warn!("the checkpoint of the use of GPUs is damaged; gpushd begins new sums: {error}");
                return;
            }
        };
        let closed = ledger.leases().filter(|id| !host.leases.open.contains_key(id)).collect();
        let closed = read_leases(self, closed).await.unwrap_or_default();
        let now = self.0.clock.now();
        let missed =
            missed(&ledger, host, &closed, &unaccounted, |time| Moment::between(at, now, time.as_millisecond()), now);
        let begun = missed.iter().filter_map(|(_, one)| match one {
            Missed::Begun(id, _) => Some(*id),
            Missed::Ended(_) => None,
        });
        let begun: Vec<LeaseId> = begun.collect();
        let ended = ledger.resume(missed, now);
        let gone: Vec<_> = ledger.gpus(now).map(|gpu| gpu.gpu).filter(|gpu| host.gpu(gpu).is_none()).collect();
        for gpu in gone {
            ledger.remove_gpu(&gpu, now);
        }
        let accounts = &mut *self.0.accounts.lock();
        accounts.recorded = RecordedSums::of(&ledger, now);
        (accounts.ledger, accounts.begun, accounts.ended, accounts.is_changed) = (ledger, begun, ended, true);
    }
}

/// Returns the events since a checkpoint, in the order of time.
fn missed(
    ledger: &Ledger,
    host: &HostState,
    closed: &BTreeMap<LeaseId, LeaseRecord>,
    unaccounted: &[LeaseRecord],
    moment: impl Fn(Timestamp) -> Moment,
    now: Moment,
) -> Vec<(Moment, Missed)> {
    let known: BTreeSet<LeaseId> = ledger.leases().collect();
    let mut missed = Vec::new();
    let open = host.leases.holding().map(|lease| &lease.record);
    for record in open.chain(unaccounted).filter(|record| !known.contains(&record.id)) {
        let Some(granted) = record.granted_at else { continue };
        missed.push((moment(granted), Missed::Begun(record.id, holds::of_members(host, &record.members))));
    }
    for record in unaccounted.iter().filter(|record| !known.contains(&record.id)) {
        missed.push((record.ended_at.map_or(now, &moment), Missed::Ended(record.id)));
    }
    for id in known.iter().filter(|id| !host.leases.open.contains_key(id)) {
        let ended = closed.get(id).and_then(|record| record.ended_at);
        missed.push((ended.map_or(now, &moment), Missed::Ended(*id)));
    }
    // The sort is stable, so a lease begins before it ends.
    missed.sort_by_key(|(at, _)| (at.wall_ms, at.monotonic_ms));
    missed
}
