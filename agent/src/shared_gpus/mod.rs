//! What gpushd sets on whole GPUs while they are shared, on record before it is set and put back
//! afterwards: the compute mode, for MPS and for turns, and the time-slice level.
//!
//! ```text
//!           what is there is recorded, then set           the one from before is set
//!  as found ───────────────────────────────────► taken ─────────────────────────────► as found
//!     ▲                                           │  │ another use takes it over:
//!     │        somebody else has set it since     │  │ the record stays, and is its own
//!     └───────────────────────────────────────────┘  └─► taken
//! ```
//!
//! The driver forgets both with a reboot, and so do the records then: what is found is what there was
//! before. The record of a GPU is changed by one caller at a time, so that no use puts back what the next one has
//! taken. GPUs do not wait for each other.
//!
//! What cannot be read or set back stays on record: `leftover` tries again what MPS left, and the reconciler of
//! time-slicing what that left.

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

/// What is on record. A handle, cheap to clone.
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
    /// By UUID of the GPU; held while its record is changed.
    locks: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Compute modes that no mode needs any more and that are not put back yet, by UUID of their GPU.
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

    /// The level that was set on a GPU.
    pub(crate) fn level(&self, uuid: &str) -> Option<LevelSet> {
        self.record(uuid).level
    }

    /// The compute mode that was set on a GPU for the sake of a mode.
    pub(crate) fn compute_mode(&self, uuid: &str, by: Mode) -> Option<ComputeModeSet> {
        self.record(uuid).compute_mode.filter(|set| set.by == by)
    }

    /// Whether anything is set for the sake of turns on a GPU.
    pub(crate) fn has_turns_of(&self, uuid: &str) -> bool {
        self.records().get(uuid).is_some_and(is_of_turns)
    }

    /// Has it checked whether a compute mode is set that no mode needs any more.
    pub(crate) fn look(&self) {
        self.0.wake.send_modify(|times| *times += 1);
    }

    /// What was set and can't be put back yet.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.troubles().values().cloned().collect()
    }

    fn troubles(&self) -> MutexGuard<'_, BTreeMap<String, ApiError>> {
        self.0.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything is set for the sake of turns on any.
    pub(crate) fn has_turns(&self) -> bool {
        self.records().values().any(is_of_turns)
    }
}

fn is_of_turns(record: &SharedGpu) -> bool {
    record.level.is_some() || record.compute_mode.is_some_and(|set| set.by == Mode::Timeslice)
}

impl SharedGpus {
    /// Sees to it that a GPU has a compute mode for the sake of the mode of its rule; the one that was there,
    /// when it had another.
    ///
    /// # Errors
    /// Why it has not.
    pub(crate) async fn take(
        &self,
        uuid: &str,
        wanted: ComputeMode,
        by: Mode,
        is_needed: impl Fn() -> bool,
    ) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        // It may have failed since it was asked for: then it is put back, and not taken again.
        if !is_needed() {
            return Ok(None);
        }
        let Some(now) = self.read(uuid).await? else { return Ok(None) };
        let record = self.record(uuid);
        let taken = match record.compute_mode {
            // What was there before the first of several is what goes back.
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
        // It was read back: nothing else is of our making any more.
        if let Some(done) = taken.filter(|taken| taken.last.is_some()) {
            self.keep(SharedGpu { compute_mode: Some(ComputeModeSet { last: None, ..done }), ..record }).await?;
        }
        Ok((now != wanted).then_some(now))
    }

    /// What is to be put on record of GPUs whose daemons stand, and of which nothing is since the database was lost: those
    /// that are EXCLUSIVE_PROCESS were given that, and had before what a driver begins with.
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

    /// Takes in what was recorded.
    pub(crate) fn take_in(&self, recorded: Vec<SharedGpu>) {
        self.records().extend(recorded.into_iter().map(|record| (record.gpu.clone(), record)));
    }

    /// Puts back the compute mode that a GPU had before one was set for the sake of a mode; the one that it has
    /// now, if it was put back. Somebody else's doing since then is left alone.
    ///
    /// # Errors
    /// Why it could not be put back: it stays on record.
    pub(crate) async fn put_back(&self, uuid: &str, by: Mode) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        self.restore(uuid, by).await
    }

    /// The same, unless a caller needs it again.
    ///
    /// # Errors
    /// As there.
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

    /// Records which level is about to be set on a GPU, and which one of ours it may have until then; or that none of
    /// ours is there any more.
    ///
    /// # Errors
    /// When it can't be recorded: then it is not to be set.
    pub(crate) async fn note_level(&self, uuid: &str, level: Option<LevelSet>) -> Result<(), String> {
        let _lock = self.lock(uuid).await;
        let record = self.record(uuid);
        if record.level == level {
            return Ok(());
        }
        self.keep(SharedGpu { level, ..record }).await
    }

    /// The compute mode of a GPU; `None` where it has none: one that is cut, or a part that knows none.
    ///
    /// # Errors
    /// Why it is not known. Whose it is can't be told then, and so it is nobody else's.
    async fn read(&self, uuid: &str) -> Result<Option<ComputeMode>, String> {
        let why = |cause: String| format!("its compute mode can't be read: {cause}");
        let reading = self.0.readings.read_now(uuid).await.map_err(|error| why(error.to_string()))?;
        let failed = reading.warnings.iter().find(|unread| unread.part == ReadingPart::ComputeMode);
        match (reading.compute_mode, failed) {
            (None, Some(unread)) => Err(why(unread.message.clone())),
            (mode, _) => Ok(mode),
        }
    }

    /// Sets a compute mode. The driver layer has read it back when it says that it is so.
    async fn set(&self, uuid: &str, mode: ComputeMode) -> Result<(), String> {
        let called = self.0.hardware.set_compute_mode(uuid, mode).await;
        self.0.readings.outdate(uuid);
        called.map_err(|error| format!("its compute mode can't be made {mode}: {error}"))?;
        // Whoever looks from now on sees it.
        let _ = self.read(uuid).await;
        Ok(())
    }

    async fn keep(&self, record: SharedGpu) -> Result<(), String> {
        let uuid = record.gpu.clone();
        let written = self.0.store.write_ending(move |tx| tx.set_shared_gpu(record.clone()));
        let record = written
            .await
            .map_err(|error| format!("what is set on it can't be recorded, so it stays as it is: {error}"))?;
        let mut records = self.records();
        if record.compute_mode.is_none() && record.level.is_none() {
            records.remove(&uuid);
        } else {
            records.insert(uuid, record);
        }
        Ok(())
    }
}
