//! Records of targets: whether a whole GPU must have a daemon, who stopped a daemon, and which settings override a
//! rule.
//!
//! A change takes effect in memory only after it is on disk. The changes by an operation are recorded in the
//! transaction that ends the operation.

use gpush_api::{Gpu, GpuPlan, GpuUuid, Mode, MpsComputeMode, TargetUuid};
use gpush_core::{desired, mps::MpsTargetRecord, sharing};
use gpush_store::{StoreError, Tx};

use super::Mps;

/// Changes the record of a target. Writes `also` in the same transaction. Computes the new record from the latest
/// record, so no concurrent change is lost.
///
/// # Errors
/// If the commit fails. After an error, the record is unchanged.
pub(super) async fn change(
    mps: &Mps,
    uuid: &TargetUuid,
    change: impl Fn(MpsTargetRecord) -> MpsTargetRecord + Clone + Send + 'static,
    mut also: impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static,
) -> Result<(), StoreError> {
    let (target, recorded) = (uuid.clone(), change.clone());
    let written = mps.handles.context.store.write_ending(move |tx| {
        tx.change_mps_target(&target, recorded.clone())?;
        also(tx)
    });
    written.await?;
    apply_in_memory(mps, uuid, change);
    Ok(())
}

fn apply_in_memory(mps: &Mps, uuid: &TargetUuid, change: impl FnOnce(MpsTargetRecord) -> MpsTargetRecord) {
    mps.handles.context.state.change_mps(|targets| targets.change_record(uuid, change));
}

/// Removes the settings that override a rule if the rule has changed since they were set.
pub(super) async fn drop_overridden_settings(mps: &Mps, target: &sharing::SharingTarget) {
    let now = target.policy.settings.clone();
    if mps.handles.context.state.mps().record(&target.uuid).set.is_none_or(|set| set.rule == now) {
        return;
    }
    let forget =
        move |record: MpsTargetRecord| MpsTargetRecord { set: record.set.filter(|set| set.rule == now), ..record };
    match change(mps, &target.uuid, forget, |_| Ok(())).await {
        Ok(()) => tracing::info!(
            "another rule now applies to {}, so the settings made with `mps set` are discarded",
            target.label()
        ),
        Err(error) => tracing::error!(
            "{}: cannot discard the settings made with `mps set`: \
            {error}",
            target.label()
        ),
    }
}

/// Removes the record of a target. Call this when no rule requests the target and its daemon has exited.
pub(super) async fn remove_record(mps: &Mps, uuid: &TargetUuid) {
    let known = mps.handles.context.state.mps().record(uuid);
    if known == without_daemon(known.clone()) {
        return;
    }
    if let Err(error) = change(mps, uuid, without_daemon, |_| Ok(())).await {
        tracing::error!(gpu = uuid.as_str(), "cannot record that {uuid} is no longer shared through MPS: {error}");
    }
}

/// Returns the record after the daemon was removed.
fn without_daemon(record: MpsTargetRecord) -> MpsTargetRecord {
    MpsTargetRecord { in_force: None, stopped: None, set: None, ..record }
}

/// Returns the record after an operation has started the daemon. The store adds the boot id.
fn with_started_daemon(record: MpsTargetRecord) -> MpsTargetRecord {
    MpsTargetRecord { in_force: Some(String::new()), ..record }
}

type RecordChange = fn(MpsTargetRecord) -> MpsTargetRecord;

/// Returns how a plan changes the record of its GPU if the operation succeeds. `is_active` is whether the daemon of the
/// whole GPU is in force.
fn change_by(plan: &GpuPlan, is_active: bool) -> Option<RecordChange> {
    if plan.starts_mps() {
        return Some(with_started_daemon);
    }
    let stops = plan.stopped_daemons().any(|uuid| *uuid == plan.gpu_uuid);
    (stops && is_active).then_some(without_daemon)
}

/// For each whole GPU, by UUID, how an operation changes the record of the GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct RecordedSettings(Vec<(TargetUuid, RecordChange)>);

impl RecordedSettings {
    /// Returns the changes that an operation with these plans makes if it succeeds.
    pub(crate) fn of(mps: &Mps, plans: &[GpuPlan]) -> Self {
        let targets = mps.handles.context.state.mps();
        let made = |plan: &GpuPlan| {
            Some((TargetUuid::from(&plan.gpu_uuid), change_by(plan, targets.is_active(plan.gpu_uuid.as_target()))?))
        };
        Self(plans.iter().filter_map(made).collect())
    }

    /// For each running daemon that a rule requests, returns the change that records the daemon as started. Used after
    /// a loss of the database, when an administrator accepts the GPUs as they are.
    pub(crate) fn of_running_daemons(mps: &Mps, gpus: &[Gpu]) -> Self {
        let targets = mps.handles.context.state.mps();
        let stands = |gpu: &&Gpu| {
            gpu.mode == Mode::Mps && targets.get(gpu.uuid.as_target()).is_some_and(|target| target.report.pid.is_some())
        };
        Self(
            gpus.iter()
                .filter(stands)
                .map(|gpu| (TargetUuid::from(&gpu.uuid), with_started_daemon as RecordChange))
                .collect(),
        )
    }

    /// Writes the changes in the transaction that ends the operation.
    ///
    /// # Errors
    /// If the write fails.
    pub(crate) fn record(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        self.0.iter().try_for_each(|(uuid, change)| tx.change_mps_target(uuid, change))
    }

    /// Returns the UUIDs of the changed GPUs whose rules request EXCLUSIVE_PROCESS.
    pub(crate) fn exclusive(&self, mps: &Mps, gpus: &[Gpu]) -> Vec<GpuUuid> {
        let config = mps.handles.context.state.config();
        let is_exclusive = |position: usize| {
            let rule = config.rules.get(position);
            rule.is_some_and(|rule| rule.mps_policy().compute_mode == MpsComputeMode::ExclusiveProcess)
        };
        let claims = desired::claims(&config, gpus).into_iter().zip(gpus);
        let wanted: Vec<&GpuUuid> =
            claims.filter(|(claimed, _)| claimed.is_some_and(is_exclusive)).map(|(_, gpu)| &gpu.uuid).collect();
        let those = self.0.iter().map(|(uuid, _)| uuid);
        those.filter_map(TargetUuid::to_gpu).filter(|uuid| wanted.contains(&uuid)).collect()
    }

    /// Applies the changes in memory.
    pub(crate) fn apply(&self, mps: &Mps) {
        self.0.iter().for_each(|(uuid, change)| apply_in_memory(mps, uuid, change));
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{Actor, MpsSettings, MpsStep, Step};
    use gpush_core::mps::{MpsSet, MpsStopped};

    use super::*;

    fn plan(steps: &[MpsStep]) -> GpuPlan {
        let steps = steps.iter().cloned().map(Step::Mps).collect();
        GpuPlan { gpu_uuid: "GPU-0".into(), steps, ..GpuPlan::default() }
    }

    fn stop(uuid: &str) -> MpsStep {
        MpsStep::StopDaemon { uuid: uuid.into(), label: String::new() }
    }

    /// Returns whether the daemon is in force after an operation with these steps; `None` if the record does not change.
    fn in_force_after(steps: &[MpsStep], is_active: bool) -> Option<bool> {
        let record = MpsTargetRecord { in_force: is_active.then(String::new), ..MpsTargetRecord::default() };
        Some(change_by(&plan(steps), is_active)?(record).in_force.is_some())
    }

    #[test]
    fn daemon_is_active_after_the_operation_that_starts_it() {
        let start = || MpsStep::StartDaemon { device: None };
        let device = || MpsStep::StartDaemon { device: Some("2g.20gb@2".to_owned()) };
        for (steps, is_active, expected) in [
            (vec![], true, None),
            (vec![start()], false, Some(true)),
            (vec![stop("GPU-0")], true, Some(false)),
            (vec![stop("GPU-0")], false, None),
            // The daemons of MIG devices follow the layout, without a record.
            (vec![stop("MIG-0"), device()], true, None),
            // The daemon of the whole GPU replaces that of a device.
            (vec![stop("MIG-0"), start()], false, Some(true)),
            (vec![stop("GPU-0"), device()], true, Some(false)),
        ] {
            assert_eq!(in_force_after(&steps, is_active), expected, "{steps:?} {is_active}");
        }
    }

    #[test]
    fn removed_daemon_leaves_nothing_in_its_record() {
        let settings = MpsSettings::default();
        let record = MpsTargetRecord {
            target: "GPU-0".into(),
            stopped: Some(MpsStopped { by: Actor { uid: 0, user: None, pid: None }, end_at: None }),
            set: Some(MpsSet { settings: settings.clone(), rule: settings }),
            in_force: Some("boot".to_owned()),
        };
        assert_eq!(without_daemon(record), MpsTargetRecord { target: "GPU-0".into(), ..MpsTargetRecord::default() });
    }
}
