//! Settings of whole GPUs while they are shared: the compute mode for MPS and time-slicing, and the time-slice level.
//! gpushd records a new setting before it changes the GPU. Later, gpushd restores the previous value.
//!
//! ```text
//!           original mode recorded, new mode set           original mode restored
//!  as found ───────────────────────────────────► taken ─────────────────────────────► as found
//!     ▲                                           │  │ another use takes it over:
//!     │        another program has set it since   │  │ the record stays, for the new use
//!     └───────────────────────────────────────────┘  └─► taken
//! ```
//!
//! The driver resets the compute mode and the time-slice level at a reboot. So after a reboot the records no longer
//! apply, and the current values count as the original values. gpushd makes only one change of a GPU's record at a
//! time. Otherwise, it could restore a setting that the next use of the GPU needs. Changes of different GPUs do not
//! wait for each other.
//!
//! If gpushd cannot read or restore a setting, the record stays. For MPS, `leftover` tries again. For time-slicing, the
//! reconciler of time-slicing tries again.

mod leftover;

use crate::state::context::HostContext;
use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
};

use gpush_api::{ApiError, ComputeMode, GpuUuid, Mode};
use gpush_locked::Locked;
use gpush_nvml::ReadingPart;
use gpush_store::{ComputeModeSet, LevelSet, SharedGpu};
use tokio::sync::{OwnedMutexGuard, watch};

pub(crate) use self::leftover::run;

/// The recorded settings of shared GPUs. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SharedGpus(Arc<SharedGpuParts>);

#[derive(Debug)]
struct SharedGpuParts {
    context: Arc<HostContext>,
    /// Records by UUID of the GPU.
    records: Locked<BTreeMap<GpuUuid, SharedGpu>>,
    /// A lock for each GPU, by UUID. It is held while the record of the GPU changes.
    locks: Locked<BTreeMap<GpuUuid, Arc<tokio::sync::Mutex<()>>>>,
    /// For each GPU, by UUID, why gpushd could not restore the compute mode yet.
    troubles: Locked<BTreeMap<GpuUuid, ApiError>>,
    /// Wakes the check for compute modes that no daemon needs any more.
    wake: watch::Sender<()>,
}

impl SharedGpus {
    /// Creates the handle with the recorded settings.
    pub(crate) fn new(context: Arc<HostContext>, records: Vec<SharedGpu>) -> Self {
        let records = Locked::new(records.into_iter().map(|record| (record.gpu_uuid.clone(), record)).collect());
        let (locks, troubles, wake) = (Locked::default(), Locked::default(), watch::Sender::new(()));
        Self(Arc::new(SharedGpuParts { context, records, locks, troubles, wake }))
    }

    /// Locks the record of a GPU. Waits while another caller changes the record.
    async fn lock(&self, uuid: &GpuUuid) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.locks.lock();
            Arc::clone(locks.entry(uuid.clone()).or_default())
        };
        lock.lock_owned().await
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, SharedGpu>> {
        self.0.records.lock()
    }

    fn record(&self, uuid: &GpuUuid) -> SharedGpu {
        let known = self.records().get(uuid).cloned();
        known.unwrap_or_else(|| SharedGpu { gpu_uuid: uuid.clone(), ..SharedGpu::default() })
    }

    /// Returns the time-slice level that gpushd has set on a GPU.
    pub(crate) fn level(&self, uuid: &GpuUuid) -> Option<LevelSet> {
        self.record(uuid).level
    }

    /// Returns the compute mode that gpushd has set on a GPU for a sharing mode.
    pub(crate) fn compute_mode(&self, uuid: &GpuUuid, by: Mode) -> Option<ComputeModeSet> {
        self.record(uuid).compute_mode.filter(|set| set.by == by)
    }

    /// Returns whether gpushd has set a compute mode or level for time-slicing on a GPU.
    pub(crate) fn has_timeslice_settings_of(&self, uuid: &GpuUuid) -> bool {
        self.records().get(uuid).is_some_and(is_timeslice_record)
    }

    /// Wakes the check for compute modes that are not needed any more.
    pub(crate) fn wake_leftover_check(&self) {
        self.0.wake.send_replace(());
    }

    /// Returns an error for each compute mode that gpushd could not restore yet.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.troubles().values().cloned().collect()
    }

    fn troubles(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, ApiError>> {
        self.0.troubles.lock()
    }

    /// Returns whether gpushd has set a compute mode or level for time-slicing on any GPU.
    pub(crate) fn has_timeslice_settings(&self) -> bool {
        self.records().values().any(is_timeslice_record)
    }
}

fn is_timeslice_record(record: &SharedGpu) -> bool {
    record.level.is_some() || record.compute_mode.is_some_and(|set| set.by == Mode::Timeslice)
}

/// Returns the record of a GPU before gpushd sets its compute mode from `now` to `wanted` for the sharing mode `by`.
/// Returns `None` if no change is recorded and none is needed.
fn record_of_change(
    recorded: Option<ComputeModeSet>,
    now: ComputeMode,
    wanted: ComputeMode,
    by: Mode,
) -> Option<ComputeModeSet> {
    match recorded {
        // Keep `before`: gpushd later restores the mode from before its first change.
        Some(set) => {
            let last = Some(now).filter(|now| set.is_ours(*now)).or(set.last).filter(|last| *last != wanted);
            Some(ComputeModeSet { set: wanted, last, by, ..set })
        }
        None => (now != wanted).then_some(ComputeModeSet { before: now, set: wanted, last: None, by }),
    }
}

impl SharedGpus {
    /// Sets the compute mode of a GPU for a sharing mode. Returns the previous compute mode if it was different.
    ///
    /// # Errors
    /// If the GPU does not get the compute mode. The text says why.
    pub(crate) async fn set_compute_mode(
        &self,
        uuid: &GpuUuid,
        wanted: ComputeMode,
        by: Mode,
        is_needed: impl Fn() -> bool,
    ) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        // If the mode is no longer needed, gpushd has already restored the previous mode, so do not set `wanted` again.
        if !is_needed() {
            return Ok(None);
        }
        let Some(now) = self.read(uuid).await? else { return Ok(None) };
        let record = self.record(uuid);
        let taken = record_of_change(record.compute_mode, now, wanted, by);
        if taken != record.compute_mode {
            self.store_record(SharedGpu { compute_mode: taken, ..record.clone() }).await?;
        }
        if now != wanted {
            self.set(uuid, wanted).await?;
        }
        // The new mode is confirmed, so the GPU cannot have the earlier mode. Remove the earlier mode from the record.
        if let Some(done) = taken.filter(|taken| taken.last.is_some()) {
            self.store_record(SharedGpu { compute_mode: Some(ComputeModeSet { last: None, ..done }), ..record })
                .await?;
        }
        Ok((now != wanted).then_some(now))
    }

    /// Returns new records for GPUs with running daemons, after the earlier records were lost with the database. If a
    /// GPU has the compute mode EXCLUSIVE_PROCESS, gpushd assumes that it has set this mode itself. Later, gpushd will
    /// restore the driver's default mode.
    pub(crate) async fn records_of_running_daemons(&self, uuids: &[GpuUuid]) -> Vec<SharedGpu> {
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
                Err(why) => tracing::error!(gpu = uuid.as_str(), "{why}"),
            }
        }
        found
    }

    /// Replaces records in memory.
    pub(crate) fn apply(&self, recorded: Vec<SharedGpu>) {
        self.records().extend(recorded.into_iter().map(|record| (record.gpu_uuid.clone(), record)));
    }

    /// Restores the compute mode that a GPU had before gpushd set a mode for the sharing mode `by`. Changes nothing if
    /// another program has set a mode since. Returns the restored mode; `None` if gpushd changed nothing.
    ///
    /// # Errors
    /// If the mode could not be restored. The text says why. The record stays.
    pub(crate) async fn restore_compute_mode(&self, uuid: &GpuUuid, by: Mode) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        self.restore(uuid, by).await
    }

    /// Does the same as [`Self::restore_compute_mode`], but changes nothing if the mode is needed again.
    ///
    /// # Errors
    /// As [`Self::restore_compute_mode`].
    async fn restore_unless_needed(
        &self,
        uuid: &GpuUuid,
        by: Mode,
        is_needed: impl Fn() -> bool,
    ) -> Result<Option<ComputeMode>, String> {
        let _lock = self.lock(uuid).await;
        if is_needed() { Ok(None) } else { self.restore(uuid, by).await }
    }

    /// Does the same as [`Self::restore_compute_mode`], for a caller that holds the lock of the GPU.
    async fn restore(&self, uuid: &GpuUuid, by: Mode) -> Result<Option<ComputeMode>, String> {
        let record = self.record(uuid);
        let Some(taken) = record.compute_mode.filter(|set| set.by == by) else { return Ok(None) };
        let ours = self.read(uuid).await?.is_some_and(|now| taken.is_ours(now));
        if ours {
            self.set(uuid, taken.before).await?;
        }
        self.store_record(SharedGpu { compute_mode: None, ..record }).await?;
        self.troubles().remove(uuid);
        Ok(ours.then_some(taken.before))
    }

    /// Records the level that the caller is about to set on a GPU, and a level that the GPU may still have from an
    /// earlier attempt. `None` removes the record.
    ///
    /// # Errors
    /// If the record cannot be written. In that case, the caller must not set the level.
    pub(crate) async fn note_level(&self, uuid: &GpuUuid, level: Option<LevelSet>) -> Result<(), String> {
        let _lock = self.lock(uuid).await;
        let record = self.record(uuid);
        if record.level == level {
            return Ok(());
        }
        self.store_record(SharedGpu { level, ..record }).await
    }

    /// Reads the compute mode of a GPU. Returns `None` if the GPU is in MIG mode or has no compute modes.
    ///
    /// # Errors
    /// If the mode is not known. The text says why. The caller must not assume that another program
    /// has changed the mode.
    async fn read(&self, uuid: &GpuUuid) -> Result<Option<ComputeMode>, String> {
        let why = |cause: String| format!("its compute mode can't be read: {cause}");
        let reading = self.0.context.readings.read_now(uuid).await.map_err(|error| why(error.to_string()))?;
        match (reading.compute_mode, reading.unread(ReadingPart::ComputeMode)) {
            (None, Some(error)) => Err(why(error.to_owned())),
            (mode, _) => Ok(mode),
        }
    }

    /// Sets a compute mode. Returns success only if the driver then reports the new mode.
    async fn set(&self, uuid: &GpuUuid, mode: ComputeMode) -> Result<(), String> {
        let called = self.0.context.hardware.set_compute_mode(uuid, mode).await;
        self.0.context.readings.invalidate(uuid);
        called.map_err(|error| format!("cannot set its compute mode to {mode}: {error}"))?;
        // Read the GPU again, so that later callers see the new mode.
        let _ = self.read(uuid).await;
        Ok(())
    }

    async fn store_record(&self, record: SharedGpu) -> Result<(), String> {
        let uuid = record.gpu_uuid.clone();
        let written = self.0.context.store.write_ending(move |tx| tx.set_shared_gpu(record.clone()));
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

#[cfg(test)]
mod tests {
    use gpush_api::TimesliceLevel;

    use super::*;

    const DEFAULT: ComputeMode = ComputeMode::Default;
    const EXCLUSIVE: ComputeMode = ComputeMode::ExclusiveProcess;
    const PROHIBITED: ComputeMode = ComputeMode::Prohibited;

    fn set(before: ComputeMode, set: ComputeMode, last: Option<ComputeMode>, by: Mode) -> ComputeModeSet {
        ComputeModeSet { before, set, last, by }
    }

    #[test]
    fn first_change_records_the_mode_to_restore() {
        assert_eq!(record_of_change(None, EXCLUSIVE, EXCLUSIVE, Mode::Mps), None, "gpushd changes nothing");
        for before in [DEFAULT, PROHIBITED] {
            let record = record_of_change(None, before, EXCLUSIVE, Mode::Mps);
            assert_eq!(record, Some(set(before, EXCLUSIVE, None, Mode::Mps)));
        }
    }

    #[test]
    fn later_sharing_mode_keeps_the_compute_mode_to_restore() {
        let mps = set(DEFAULT, EXCLUSIVE, None, Mode::Mps);
        for (recorded, now, wanted, last) in [
            // The compute mode stays, and the record now belongs to the next sharing mode.
            (mps, EXCLUSIVE, EXCLUSIVE, None),
            (mps, EXCLUSIVE, PROHIBITED, Some(EXCLUSIVE)),
            (mps, EXCLUSIVE, DEFAULT, Some(EXCLUSIVE)),
            // Another program has set these modes.
            (mps, PROHIBITED, EXCLUSIVE, None),
            (mps, DEFAULT, PROHIBITED, None),
            // An earlier change from EXCLUSIVE to PROHIBITED was not confirmed, so the GPU may have either mode.
            (set(DEFAULT, PROHIBITED, Some(EXCLUSIVE), Mode::Mps), EXCLUSIVE, DEFAULT, Some(EXCLUSIVE)),
            (set(DEFAULT, PROHIBITED, Some(EXCLUSIVE), Mode::Mps), DEFAULT, PROHIBITED, Some(EXCLUSIVE)),
            (set(DEFAULT, PROHIBITED, Some(EXCLUSIVE), Mode::Mps), EXCLUSIVE, EXCLUSIVE, None),
        ] {
            let record = record_of_change(Some(recorded), now, wanted, Mode::Timeslice).unwrap();
            assert_eq!(record, set(DEFAULT, wanted, last, Mode::Timeslice), "{recorded:?}: {now} to {wanted}");
        }
    }

    /// The GPU may have the old or the new mode while gpushd changes it. If gpushd ends then, the next gpushd must recognize
    /// both modes.
    #[test]
    fn mode_that_gpushd_has_set_is_recognized_during_each_change() {
        for recorded in [set(DEFAULT, EXCLUSIVE, None, Mode::Mps), set(DEFAULT, EXCLUSIVE, Some(PROHIBITED), Mode::Mps)]
        {
            for now in ComputeMode::ALL.into_iter().filter(|now| recorded.is_ours(*now)) {
                for wanted in ComputeMode::ALL {
                    let record = record_of_change(Some(recorded), now, wanted, Mode::Mps).unwrap();
                    assert!(record.is_ours(now) && record.is_ours(wanted), "{recorded:?}: {now} to {wanted}");
                }
            }
        }
    }

    #[test]
    fn level_or_own_compute_mode_marks_a_time_slicing_record() {
        let level = Some(LevelSet { set: TimesliceLevel::Long, last: None });
        let mode = |by| Some(set(DEFAULT, EXCLUSIVE, None, by));
        for (compute_mode, level, expected) in [
            (None, None, false),
            (None, level, true),
            (mode(Mode::Timeslice), None, true),
            (mode(Mode::Mps), None, false),
            (mode(Mode::Mps), level, true),
        ] {
            let record = SharedGpu { compute_mode, level, ..SharedGpu::default() };
            assert_eq!(is_timeslice_record(&record), expected, "{record:?}");
        }
    }
}
