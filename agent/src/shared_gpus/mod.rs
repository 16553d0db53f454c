//! What gpushd sets on whole GPUs while they are shared: the compute mode, for MPS and time-slicing, and the time-slice
//! level. Each setting is recorded before it is set, and the previous one is restored afterwards.
//!
//! ```text
//!           what is there is recorded, then set           the one from before is set
//!  as found ───────────────────────────────────► taken ─────────────────────────────► as found
//!     ▲                                           │  │ another use takes it over:
//!     │        another program has set it since   │  │ the record stays, for the new use
//!     └───────────────────────────────────────────┘  └─► taken
//! ```
//!
//! The driver forgets both settings at a reboot, and so do the records: the values found after it count as the original
//! ones. One caller at a time changes the record of a GPU, so no use restores a setting that the next use needs. GPUs
//! do not wait for each other.
//!
//! A setting that cannot be read or restored stays on record: `leftover` retries for MPS, and the reconciler of
//! time-slicing for its own.

mod leftover;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpush_api::{ApiError, ComputeMode, Mode};
use gpush_nvml::{Hardware, ReadingPart};
use gpush_store::{ComputeModeSet, LevelSet, SharedGpu, Store};
use tokio::sync::{OwnedMutexGuard, watch};

pub(crate) use self::leftover::run;
use crate::{
    lanes::Lanes,
    state::{State, readings::Readings},
};

/// The recorded settings. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SharedGpus(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    state: State,
    readings: Readings,
    hardware: Hardware,
    lanes: Lanes,
    /// By UUID of the GPU.
    records: Mutex<BTreeMap<String, SharedGpu>>,
    /// By UUID of the GPU; locked while its record is changed.
    locks: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Errors of compute modes that no mode needs any more and that are not restored yet, by UUID of their GPU.
    troubles: Mutex<BTreeMap<String, ApiError>>,
    /// Counts how often something may have been left over.
    wake: watch::Sender<u64>,
}

impl SharedGpus {
    /// Continues with these records.
    pub(crate) fn new(
        store: Store,
        state: State,
        readings: Readings,
        hardware: Hardware,
        lanes: Lanes,
        records: Vec<SharedGpu>,
    ) -> Self {
        let records = Mutex::new(records.into_iter().map(|record| (record.gpu.clone(), record)).collect());
        let (locks, troubles, wake) = (Mutex::default(), Mutex::default(), watch::Sender::new(0));
        Self(Arc::new(Inner { store, state, readings, hardware, lanes, records, locks, troubles, wake }))
    }

    /// Waits until no other caller changes the record of a GPU.
    async fn lock(&self, uuid: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.locks.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(locks.entry(uuid.to_owned()).or_default())
        };
        lock.lock_owned().await
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<String, SharedGpu>> {
        self.0.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, uuid: &str) -> SharedGpu {
        let known = self.records().get(uuid).cloned();
        known.unwrap_or_else(|| SharedGpu { gpu: uuid.to_owned(), ..SharedGpu::default() })
    }

    /// Returns the level that was set on a GPU.
    pub(crate) fn level(&self, uuid: &str) -> Option<LevelSet> {
        self.record(uuid).level
    }

    /// Returns the compute mode that was set on a GPU for a mode.
    pub(crate) fn compute_mode(&self, uuid: &str, by: Mode) -> Option<ComputeModeSet> {
        self.record(uuid).compute_mode.filter(|set| set.by == by)
    }

    /// Returns whether anything is set on a GPU for time-slicing.
    pub(crate) fn has_turns_of(&self, uuid: &str) -> bool {
        self.records().get(uuid).is_some_and(is_of_turns)
    }

    /// Starts a check for compute modes that no mode needs any more.
    pub(crate) fn look(&self) {
        self.0.wake.send_modify(|times| *times += 1);
    }

    /// Returns the settings that cannot be restored yet.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.troubles().values().cloned().collect()
    }

    fn troubles(&self) -> MutexGuard<'_, BTreeMap<String, ApiError>> {
        self.0.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether anything is set for time-slicing on any GPU.
    pub(crate) fn has_turns(&self) -> bool {
        self.records().values().any(is_of_turns)
    }
}

fn is_of_turns(record: &SharedGpu) -> bool {
    record.level.is_some() || record.compute_mode.is_some_and(|set| set.by == Mode::Timeslice)
}

impl SharedGpus {
    /// Sets the compute mode of a GPU for the mode of its rule. Returns the previous compute mode if it differed.
    ///
    /// # Errors
    /// Why the GPU does not have the compute mode.
    pub(crate) async fn take(
        &self,
        uuid: &str,
        wanted: ComputeMode,
        by: Mode,
        is_needed: impl Fn() -> bool,
    ) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        // The need may have ended since the call: then the mode is restored, and must not be set again.
        if !is_needed() {
            return Ok(None);
        }
        let Some(now) = self.read(uuid).await? else { return Ok(None) };
        let record = self.record(uuid);
        let taken = match record.compute_mode {
            // After several changes, the mode from before the first one is restored.
            Some(set) => {
                let last = Some(now).filter(|now| set.is_ours(*now)).or(set.last).filter(|last| *last != wanted);
                Some(ComputeModeSet { set: wanted, last, by, ..set })
            }
            None => (now != wanted).then_some(ComputeModeSet { before: now, set: wanted, last: None, by }),
        };
        if taken != record.compute_mode {
            self.keep(SharedGpu { compute_mode: taken, ..record.clone() }).await?;
        }
        if now != wanted {
            self.set(uuid, wanted).await?;
        }
        // The mode was read back: gpushd's earlier value is not on the GPU any more.
        if let Some(done) = taken.filter(|taken| taken.last.is_some()) {
            self.keep(SharedGpu { compute_mode: Some(ComputeModeSet { last: None, ..done }), ..record }).await?;
        }
        Ok((now != wanted).then_some(now))
    }

    /// Returns records for GPUs whose daemons run, and whose records were lost with the database. A GPU in
    /// EXCLUSIVE_PROCESS counts as set by gpushd, and its previous mode as the driver's default.
    pub(crate) async fn as_found(&self, uuids: &[String]) -> Vec<SharedGpu> {
        let mut found = Vec::new();
        for uuid in uuids {
            let record = self.record(uuid);
            let (before, set) = (ComputeMode::Default, ComputeMode::ExclusiveProcess);
            match self.read(uuid).await {
                Ok(Some(now)) if now == set && record.compute_mode.is_none() => {
                    let compute_mode = Some(ComputeModeSet { before, set, last: None, by: Mode::Mps });
                    found.push(SharedGpu { compute_mode, ..record });
                }
                Ok(_) => {}
                Err(why) => tracing::error!(gpu = uuid, "{why}"),
            }
        }
        found
    }

    /// Adopts new records.
    pub(crate) fn take_in(&self, recorded: Vec<SharedGpu>) {
        self.records().extend(recorded.into_iter().map(|record| (record.gpu.clone(), record)));
    }

    /// Restores the compute mode that a GPU had before gpushd set one for this mode, unless another program has changed
    /// it since. Returns the restored mode; `None` if there was nothing to restore.
    ///
    /// # Errors
    /// Why it could not be restored: it stays on record.
    pub(crate) async fn put_back(&self, uuid: &str, by: Mode) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        self.restore(uuid, by).await
    }

    /// The same, unless a caller needs it again.
    ///
    /// # Errors
    /// Those of [`Self::put_back`].
    async fn put_back_unless_needed(
        &self,
        uuid: &str,
        by: Mode,
        is_needed: impl Fn() -> bool,
    ) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        if is_needed() { Ok(None) } else { self.restore(uuid, by).await }
    }

    /// The same, for a caller that has the lock of the GPU.
    async fn restore(&self, uuid: &str, by: Mode) -> Result<Option<ComputeMode>, String> {
        let record = self.record(uuid);
        let Some(taken) = record.compute_mode.filter(|set| set.by == by) else { return Ok(None) };
        let ours = self.read(uuid).await?.is_some_and(|now| taken.is_ours(now));
        if ours {
            self.set(uuid, taken.before).await?;
        }
        self.keep(SharedGpu { compute_mode: None, ..record }).await?;
        self.troubles().remove(uuid);
        Ok(ours.then_some(taken.before))
    }

    /// Records the level that is about to be set on a GPU, and the earlier level of gpushd that it may still have.
    /// `None`: the GPU has no level of gpushd any more.
    ///
    /// # Errors
    /// When it cannot be recorded: then it must not be set.
    pub(crate) async fn note_level(&self, uuid: &str, level: Option<LevelSet>) -> Result<(), String> {
        let _lock = self.lock(uuid).await;
        let record = self.record(uuid);
        if record.level == level {
            return Ok(());
        }
        self.keep(SharedGpu { level, ..record }).await
    }

    /// Reads the compute mode of a GPU; `None` in MIG mode, or when the GPU has no compute modes.
    ///
    /// # Errors
    /// Why it is not known. The caller must not assume then that another program has changed it.
    async fn read(&self, uuid: &str) -> Result<Option<ComputeMode>, String> {
        let why = |cause: String| format!("its compute mode can't be read: {cause}");
        let reading = self.0.readings.read_now(uuid).await.map_err(|error| why(error.to_string()))?;
        let failed = reading.warnings.iter().find(|unread| unread.part == ReadingPart::ComputeMode);
        match (reading.compute_mode, failed) {
            (None, Some(unread)) => Err(why(unread.message.clone())),
            (mode, _) => Ok(mode),
        }
    }

    /// Sets a compute mode. The driver layer has read it back when this succeeds.
    async fn set(&self, uuid: &str, mode: ComputeMode) -> Result<(), String> {
        let called = self.0.hardware.set_compute_mode(uuid, mode).await;
        self.0.readings.outdate(uuid);
        called.map_err(|error| format!("cannot set its compute mode to {mode}: {error}"))?;
        // Later callers see the new mode.
        let _ = self.read(uuid).await;
        Ok(())
    }

    async fn keep(&self, record: SharedGpu) -> Result<(), String> {
        let uuid = record.gpu.clone();
        let written = self.0.store.write_ending(move |tx| tx.set_shared_gpu(record.clone()));
        let record = written
            .await
            .map_err(|error| format!("its settings are not changed, because they cannot be recorded: {error}"))?;
        let mut records = self.records();
        if record.compute_mode.is_none() && record.level.is_none() {
            records.remove(&uuid);
        } else {
            records.insert(uuid, record);
        }
        Ok(())
    }
}
