//! Reads the hardware. No other module reads the hardware. The results go to the [`State`].
//!
//! There are two kinds of readings:
//!
//! - [`Readings::host`] and [`Readings::recent`] serve responses. These functions read a GPU again
//!   when its last reading is older than one second. Concurrent callers share a reading. A caller
//!   waits at most until 75 ms after the reading began; after that time, a GPU that hangs is shown
//!   as last read, marked stale. So after a GPU's first reading, a response takes less than 100 ms,
//!   even if the driver hangs.
//! - [`Readings::now`] is for changes of GPUs: the reading begins after the call.
//!
//! GPUs are identified by UUID. A GPU that the driver no longer lists stays known, as lost, until gpushd exits.

mod cached;
mod identify;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, MutexGuard},
    time::Duration,
};

use gpush_api::{ApiError, GpuUuid};
use gpush_host::{accounts::Accounts, identity::Users, subtask};
use gpush_locked::Locked;
use gpush_nvml::{DriverError, ErrorKind, Hardware, Listed, Reading, Status};

pub(super) use self::cached::Cached;
pub(crate) use self::cached::{LastReading, Moment};
use self::identify::identify;
use super::{HostState, Observed, State, view, words};
use crate::system::{coalesced::Coalesced, tasks::Tasks};

/// How long callers wait for a newer reading. After that, they get the last reading.
const WAIT: Duration = Duration::from_millis(75);

/// How long callers wait for the first reading of a GPU. This time is long because, without persistence mode, the
/// driver must first initialize each GPU.
const FIRST: Duration = Duration::from_secs(5);

/// Reads the hardware into the [`State`]. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Readings(Arc<ReadingParts>);

#[derive(Debug)]
struct ReadingParts {
    hardware: Hardware,
    users: Users,
    state: State,
    tasks: Tasks,
    list: Cached<Arc<Vec<Listed>>>,
    gpus: Locked<BTreeMap<GpuUuid, Cached<Arc<Reading>>>>,
    /// For each GPU, readings that begin only after a caller has asked. Concurrent callers share a reading.
    fresh: Locked<BTreeMap<GpuUuid, Arc<Coalesced<ReadOutcome>>>>,
}

/// The outcome of a reading.
type ReadOutcome = Result<Arc<Reading>, DriverError>;

impl Readings {
    /// Creates the handle. gpushd reads nothing until a caller asks.
    pub(crate) fn new(hardware: Hardware, users: Users, state: State, tasks: Tasks) -> Self {
        let to = state.clone();
        let list = Cached::new(tasks.clone(), Box::new(move |list| to.set_list(list)));
        Self(Arc::new(ReadingParts {
            hardware,
            users,
            state,
            tasks,
            list,
            gpus: Locked::default(),
            fresh: Locked::default(),
        }))
    }

    /// Returns the accounts of the users of processes.
    pub(crate) fn accounts(&self) -> &Accounts {
        self.0.users.accounts()
    }

    fn gpus(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, Cached<Arc<Reading>>>> {
        self.0.gpus.lock()
    }

    /// Returns the cache of a GPU that the driver has listed.
    fn cache(&self, uuid: &GpuUuid) -> Option<Cached<Arc<Reading>>> {
        if let Some(cache) = self.gpus().get(uuid) {
            return Some(cache.clone());
        }
        self.0.state.index_of(uuid)?;
        let (to, of) = (self.0.state.clone(), uuid.clone());
        let cache = || Cached::new(self.0.tasks.clone(), Box::new(move |last| to.set_reading(&of, last)));
        Some(self.gpus().entry(uuid.clone()).or_insert_with(cache).clone())
    }

    /// Returns the host with readings that are at most one second old. If the driver does not answer in time, returns
    /// older readings. During maintenance, gpushd reads nothing.
    ///
    /// # Errors
    /// If there is no driver, the driver has not answered yet, or gpushd has read nothing before maintenance began.
    pub(crate) async fn host(&self) -> Result<Observed, ApiError> {
        if let Some(maintenance) = self.0.state.maintenance() {
            let host = self.0.state.now();
            if host.was_listed {
                return Ok(Observed { host, late: BTreeSet::new() });
            }
            return Err(words::not_read_error(&maintenance));
        }
        self.recent().await.map_err(|error| view::no_driver(&error))
    }

    /// Returns the host as last read, without a driver call.
    ///
    /// # Errors
    /// As [`Readings::host`].
    pub(crate) fn known(&self) -> Result<Arc<HostState>, ApiError> {
        let host = self.0.state.now();
        host.check_known()?;
        Ok(host)
    }

    /// Returns the host with readings that are at most one second old. If the driver does not answer in time, returns
    /// older readings.
    ///
    /// # Errors
    /// If there is no driver, or the driver has not answered yet.
    pub(crate) async fn recent(&self) -> Result<Observed, DriverError> {
        self.0.state.expire_overrides();
        self.0.state.set_unsettled(&self.0.hardware.status().unsettled);
        // Start to read the known GPUs already while the driver lists the GPUs.
        let known: Vec<GpuUuid> = self.gpus().keys().cloned().collect();
        known.iter().for_each(|uuid| self.refresh(uuid));
        self.0.list.refresh(|| self.list());
        self.0.list.wait(patience(&self.0.list)).await;
        let host = self.0.state.now();
        if let Some(error) = &host.driver {
            return Err(error.clone());
        }
        let uuids: Vec<GpuUuid> = host.gpus.iter().map(|gpu| gpu.gpu.uuid.clone()).collect();
        // Also read the GPUs that are new in the list.
        uuids.iter().filter(|uuid| !known.contains(uuid)).for_each(|uuid| self.refresh(uuid));
        let mut late = BTreeSet::new();
        for uuid in uuids {
            let Some(cache) = self.cache(&uuid) else { continue };
            if cache.wait(patience(&cache)).await {
                late.insert(uuid);
            }
        }
        Ok(Observed { host: self.0.state.now(), late })
    }

    /// Returns the host as last read. If the last reading of the GPU `uuid` is older than one second, reads this GPU
    /// again and waits for the reading. Does not wait for other GPUs.
    ///
    /// # Errors
    /// As [`Readings::host`].
    pub(crate) async fn gpu(&self, uuid: &GpuUuid) -> Result<Observed, ApiError> {
        if self.0.state.maintenance().is_some() {
            return self.host().await;
        }
        self.0.state.expire_overrides();
        self.0.state.set_unsettled(&self.0.hardware.status().unsettled);
        self.refresh(uuid);
        self.0.list.refresh(|| self.list());
        self.0.list.wait(patience(&self.0.list)).await;
        if let Some(error) = &self.0.state.now().driver {
            return Err(view::no_driver(error));
        }
        // The driver may have listed the GPU for the first time just now, so read it.
        self.refresh(uuid);
        let mut late = BTreeSet::new();
        if let Some(cache) = self.cache(uuid)
            && cache.wait(patience(&cache)).await
        {
            late.insert(uuid.clone());
        }
        Ok(Observed { host: self.0.state.now(), late })
    }

    /// Makes the next caller read everything again, and removes earlier errors.
    pub(crate) fn restart(&self) {
        self.0.list.restart();
        self.gpus().values().for_each(Cached::restart);
    }

    /// Reads these GPUs. Does not use a reading that began before the call.
    pub(crate) async fn now(&self, uuids: &[GpuUuid]) -> Vec<(GpuUuid, Result<Arc<Reading>, DriverError>)> {
        let mut tasks = tokio::task::JoinSet::new();
        for (position, uuid) in uuids.iter().enumerate() {
            let (readings, uuid) = (self.clone(), uuid.clone());
            tasks.spawn(async move { (position, readings.read_now(&uuid).await) });
        }
        let mut read: Vec<Option<_>> = uuids.iter().map(|_| None).collect();
        while let Some((position, outcome)) = subtask::next(&mut tasks).await {
            read[position] = Some(outcome);
        }
        let missing = || Err(DriverError::new(ErrorKind::Stopped, "reading the GPU"));
        uuids.iter().cloned().zip(read.into_iter().map(|outcome| outcome.unwrap_or_else(missing))).collect()
    }

    /// Reads one GPU. Does not use a reading that began before the call.
    pub(crate) async fn read_now(&self, uuid: &GpuUuid) -> ReadOutcome {
        self.fresh(uuid).after_now(|| self.read_into_cache(uuid)).await
    }

    /// Does the same as [`Readings::read_now`], but returns `None` if the reading takes longer than `limit`. Time spent
    /// waiting for another reading of the GPU does not count.
    pub(crate) async fn read_now_within(&self, uuid: &GpuUuid, limit: Duration) -> Option<ReadOutcome> {
        self.fresh(uuid).after_now_within(limit, || self.read_into_cache(uuid)).await
    }

    fn fresh(&self, uuid: &GpuUuid) -> Arc<Coalesced<ReadOutcome>> {
        let mut fresh = self.0.fresh.lock();
        Arc::clone(fresh.entry(uuid.clone()).or_default())
    }

    async fn read_into_cache(&self, uuid: &GpuUuid) -> ReadOutcome {
        let begun = Moment::now();
        let outcome = self.read(uuid).await;
        if let Some(cache) = self.cache(uuid) {
            cache.put(begun, outcome.clone());
        }
        outcome
    }

    /// Makes the next caller read this GPU again, because gpushd has changed it.
    pub(crate) fn invalidate(&self, uuid: &GpuUuid) {
        if let Some(cache) = self.cache(uuid) {
            cache.invalidate();
        }
    }

    /// Makes the next caller read every GPU again.
    pub(crate) fn invalidate_all(&self) {
        let caches: Vec<Cached<Arc<Reading>>> = self.gpus().values().cloned().collect();
        caches.iter().for_each(Cached::invalidate);
    }

    fn refresh(&self, uuid: &GpuUuid) {
        let Some(cache) = self.cache(uuid) else { return };
        cache.refresh(|| {
            let (readings, uuid) = (self.clone(), uuid.clone());
            async move { readings.read(&uuid).await }
        });
    }

    async fn read(&self, uuid: &GpuUuid) -> Result<Arc<Reading>, DriverError> {
        let begun = self.0.hardware.status();
        let mut reading = self.0.hardware.read(uuid).await?;
        if may_be_of_previous_worker(&begun, &self.0.hardware.status()) {
            self.invalidate(uuid);
        }
        identify(&self.0.users, &mut reading).await;
        Ok(Arc::new(reading))
    }

    fn list(&self) -> impl Future<Output = Result<Arc<Vec<Listed>>, DriverError>> + Send + use<> {
        let hardware = self.0.hardware.clone();
        async move { hardware.list().await.map(Arc::new) }
    }
}

/// Returns whether a reading may be from a worker that has ended. Such a reading may be from before a reset. `begun`
/// and `ended` are the states of the hardware when the reading began and ended. Without a worker at the beginning, the
/// reading itself started a worker or waited for one, so the result is `false`.
fn may_be_of_previous_worker(begun: &Status, ended: &Status) -> bool {
    begun.worker.is_some() && begun.started != ended.started
}

/// Returns how long callers wait for a reading. The first reading may take longer.
fn patience<V: Clone + Send + 'static>(cached: &Cached<V>) -> Duration {
    if cached.is_known() { WAIT } else { FIRST }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_restart_outdates_a_running_reading() {
        let serving = |started| Status { worker: Some(1), started, ..Status::default() };
        assert!(!may_be_of_previous_worker(&serving(1), &serving(1)));
        assert!(may_be_of_previous_worker(&serving(1), &serving(2)));
        let restarting = Status { worker: None, ..serving(2) };
        assert!(may_be_of_previous_worker(&serving(1), &restarting));
        assert!(!may_be_of_previous_worker(&Status::default(), &serving(1)), "the reading has started the worker");
    }
}
