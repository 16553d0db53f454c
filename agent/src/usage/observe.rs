//! The observations for the policies of leases: the figures of leases after each round of samples, and the recorded unused
//! times.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, GpuUuid, LeaseId};
use gpush_store::LeaseRecord;
use gpush_usage::{
    ledger::{LeaseFigures, UnusedSpan},
    moment::Moment,
    over_limit::MemoryReading,
};
use jiff::Timestamp;
use tokio::sync::watch;

use super::{LastSample, Usage, clock::timestamp};
use crate::state::{HostState, OpenLease};

/// The figures of the leases that hold capacity, at one moment.
#[derive(Debug)]
pub(crate) struct ObservedLeases {
    pub(crate) host: Arc<HostState>,
    pub(crate) now: Moment,
    /// Leases that the ledger does not know yet are missing.
    pub(crate) leases: Vec<(Arc<OpenLease>, LeaseFigures)>,
}

impl Usage {
    /// Returns a receiver that is notified after each sample.
    pub(crate) fn samples(&self) -> watch::Receiver<()> {
        self.0.sampled.subscribe()
    }

    /// Returns whether samples of leases are needed: their use is recorded, or a policy ends leases because of it.
    pub(super) fn samples_leases(&self, host: &HostState) -> bool {
        let acts = || host.config.acts_on_unused_leases() || host.config.ends_leases_over_limit();
        let is_acted_on = || acts() && host.leases.holding().next().is_some();
        self.records_leases(host) || is_acted_on()
    }

    /// Returns the GPUs whose power without work is known.
    pub(super) fn gpus_with_power_level(&self) -> BTreeSet<GpuUuid> {
        let ledger = &self.0.accounts.lock().ledger;
        let gpus = ledger.gpus(self.0.clock.now()).filter(|gpu| gpu.levels.without_process.is_some());
        gpus.map(|gpu| gpu.gpu).collect()
    }

    /// Returns the present figures of all leases that hold capacity.
    pub(crate) fn observed_leases(&self) -> ObservedLeases {
        let host = self.0.context.state.now();
        let now = self.0.clock.now();
        let accounts = self.0.accounts.lock();
        let holding = host.leases.open.values().filter(|lease| lease.state.name().holds_capacity());
        let leases =
            holding.filter_map(|lease| Some((Arc::clone(lease), accounts.ledger.lease(lease.id(), now)?))).collect();
        drop(accounts);
        ObservedLeases { host, now, leases }
    }

    /// Returns the memory of a lease, compared with its limits; `None` if the lease is not known, or has no such limit.
    pub(crate) fn memory_of(&self, lease: LeaseId) -> Option<MemoryReading> {
        MemoryReading::observed(&self.0.accounts.lock().ledger.lease(lease, self.0.clock.now())?)
    }

    /// Returns the unused times of all leases that ended since a time, and those that last, by lease and start.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) async fn unused_times(&self, from: Timestamp) -> Result<Vec<UnusedSpan>, ApiError> {
        let from_ms = from.as_millisecond();
        // While a transaction records rows, they are neither in the ledger nor in the store.
        let turn = self.0.recording.lock().await;
        let open = {
            let now = self.0.clock.now();
            let ledger = &self.0.accounts.lock().ledger;
            let closed = ledger.open_rows(now).0.spans;
            let lasting = ledger.leases().filter_map(|lease| ledger.open_span(lease, now));
            closed.into_iter().chain(lasting).filter(|span| span.until_ms >= from_ms).collect::<Vec<_>>()
        };
        let mut spans = self.0.context.store.read(move |view| view.unused_times(from_ms)).await?;
        drop(turn);
        spans.extend(open);
        spans.sort_by_key(|span| (span.lease, span.from_ms, span.until_ms));
        spans.dedup();
        Ok(spans)
    }

    /// Returns the time of the last samples of the GPUs of a lease; `None` if a sample is missing.
    pub(crate) fn last_sample(&self, record: &LeaseRecord) -> Option<Moment> {
        let accounts = self.0.accounts.lock();
        let sampled = |gpu: &GpuUuid| match accounts.last.get(gpu)? {
            LastSample::Taken(taken) => Some(taken.translated.at),
            LastSample::Failed(_) => None,
        };
        let samples: Option<Vec<Moment>> = record.members.iter().map(|member| sampled(&member.gpu_uuid)).collect();
        samples?.into_iter().min_by_key(|at| at.monotonic_ms)
    }

    /// Returns the present moment.
    pub(crate) fn now(&self) -> Moment {
        self.0.clock.now()
    }

    /// Returns a moment as a time of the wall clock.
    pub(crate) fn timestamp(moment: Moment) -> Timestamp {
        timestamp(moment)
    }
}
