//! Changes of a rule that do not take effect yet, because leases hold the GPU under the earlier rule.
//!
//! ```text
//!                        the rule is changed back, or the leases fit again
//!              ┌─────────────────────────────────────────────────────────────┐
//!              ▼                                                             │
//! effective ──── rule changes, leases do not fit ────► pending: old rule in force, no new leases
//!     ▲                                                                      │ the last lease ends
//!     │                                                                      ▼
//!     └── apply, reload, auto_reconcile, start of gpushd ─────────────── deferred: no new leases, drift
//! ```
//!
//! The record of a lease contains the rule under which it was granted: the kind of its share, and for a time-slice replica
//! also the level and the compute mode. So gpushd needs no record of earlier rules. A lease fits the rule if the rule
//! still gives shares of its kind on its target. Changed numbers, such as replicas or percentages, apply to new leases
//! only, so they are never pending. A changed layout is not pending either: it is drift, and its plan names the leases in
//! its way.

use std::collections::BTreeSet;

use gpush_api::{
    Gpu, LeaseId, LeaseKind, LeaseUse, MemberShare, Mode, PendingAim, PendingChange, TargetUuid, TimeslicePolicy,
};

use super::DesiredState;
use crate::sharing;

/// Returns the changes that the leases on a GPU delay. `gpu` must contain its leases.
#[must_use]
pub fn pending(desired_state: &DesiredState, gpu: &Gpu) -> Vec<PendingChange> {
    if gpu.leases.iter().any(|lease| mode_of(lease, gpu) != desired_state.mode) {
        let from = gpu.leases.iter().min_by_key(|lease| lease.id).map_or(Mode::NoRule, |lease| mode_of(lease, gpu));
        let aim = PendingAim::Mode { from, mode: desired_state.mode };
        return vec![PendingChange { aim, leases: ids(gpu.leases.iter()) }];
    }
    match desired_state.mode {
        Mode::Timeslice => timeslice(desired_state, gpu).into_iter().collect(),
        Mode::Mig => devices(desired_state, gpu),
        Mode::NoRule | Mode::Unmanaged | Mode::Exclusive | Mode::Mps => Vec::new(),
    }
}

/// Returns which of the changes in `before`, which leases delayed earlier, still wait although no lease delays them.
/// `is_shared` is whether the whole GPU is shared through MPS.
#[must_use]
pub fn deferred(desired_state: &DesiredState, gpu: &Gpu, before: &[PendingAim], is_shared: bool) -> Vec<PendingChange> {
    let still_wanted = |aim: &&PendingAim| match aim {
        PendingAim::Mode { mode, .. } if *mode != desired_state.mode => false,
        PendingAim::Mode { mode: Mode::NoRule | Mode::Unmanaged, .. } => false,
        PendingAim::Mode { mode: Mode::Mps, .. } => !is_shared,
        PendingAim::Mode { mode: Mode::Mig, .. } => gpu.mig.as_ref().is_some_and(|mig| !mig.enabled),
        PendingAim::Mode { mode: Mode::Exclusive | Mode::Timeslice, .. } => true,
        PendingAim::Timeslice { level, compute_mode } => desired_state
            .timeslice
            .as_ref()
            .is_some_and(|policy| (policy.level, policy.compute_mode) == (*level, *compute_mode)),
        PendingAim::ShareDevice { uuid, .. } => shared(desired_state, gpu).iter().any(|one| one.uuid == *uuid),
        PendingAim::UnshareDevice { uuid, .. } => {
            exists(gpu, uuid) && !shared(desired_state, gpu).iter().any(|one| one.uuid == *uuid)
        }
    };
    let waiting = before.iter().filter(still_wanted);
    waiting.map(|aim| PendingChange { aim: aim.clone(), leases: Vec::new() }).collect()
}

/// Returns the time-slicing settings that the leases on a GPU were promised. If the settings differ, the oldest lease
/// counts.
#[must_use]
pub fn promised_timeslice(gpu: &Gpu) -> Option<TimeslicePolicy> {
    let promised = |lease: &LeaseUse| match lease.share {
        MemberShare::Timeslice { replicas, level: Some(level), compute_mode } => {
            Some((lease.id, TimeslicePolicy { replicas, level, compute_mode }))
        }
        MemberShare::Timeslice { level: None, .. }
        | MemberShare::Mig { .. }
        | MemberShare::Mps { .. }
        | MemberShare::Whole => None,
    };
    gpu.leases.iter().filter_map(promised).min_by_key(|(id, _)| *id).map(|(_, policy)| policy)
}

/// Returns the mode of the rule under which a lease was granted.
fn mode_of(lease: &LeaseUse, gpu: &Gpu) -> Mode {
    match lease.kind {
        LeaseKind::Whole => Mode::Exclusive,
        LeaseKind::Timeslice => Mode::Timeslice,
        LeaseKind::Mps if lease.target == gpu.uuid => Mode::Mps,
        LeaseKind::Mps | LeaseKind::Mig => Mode::Mig,
    }
}

fn ids<'a>(leases: impl Iterator<Item = &'a LeaseUse>) -> Vec<LeaseId> {
    let ids: BTreeSet<LeaseId> = leases.map(|lease| lease.id).collect();
    ids.into_iter().collect()
}

/// Returns the change of the level and compute mode of a time-sliced GPU.
fn timeslice(desired_state: &DesiredState, gpu: &Gpu) -> Option<PendingChange> {
    let (policy, promised) = (desired_state.timeslice.as_ref()?, promised_timeslice(gpu)?);
    let is_same = (policy.level, policy.compute_mode) == (promised.level, promised.compute_mode);
    let aim = PendingAim::Timeslice { level: policy.level, compute_mode: policy.compute_mode };
    (!is_same).then(|| PendingChange { aim, leases: ids(gpu.leases.iter()) })
}

/// Returns the MIG devices that the desired layout shares.
fn shared(desired_state: &DesiredState, gpu: &Gpu) -> Vec<sharing::NamedDevice> {
    match (&desired_state.layout, &gpu.mig) {
        (Some(layout), Some(mig)) if mig.enabled => sharing::shared_devices(layout, gpu, mig, &BTreeSet::new()),
        _ => Vec::new(),
    }
}

fn exists(gpu: &Gpu, uuid: &TargetUuid) -> bool {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    instances.flat_map(|instance| &instance.compute).any(|compute| compute.uuid.as_ref() == Some(uuid))
}

/// Returns the MIG devices that change between a device for one lease and a device that is shared through MPS.
fn devices(desired_state: &DesiredState, gpu: &Gpu) -> Vec<PendingChange> {
    let shared = shared(desired_state, gpu);
    let mut changes = Vec::new();
    for one in &shared {
        let alone = |lease: &&LeaseUse| lease.target == one.uuid && lease.kind == LeaseKind::Mig;
        let leases = ids(gpu.leases.iter().filter(alone));
        if !leases.is_empty() {
            let aim = PendingAim::ShareDevice { uuid: one.uuid.clone(), device: one.device.clone() };
            changes.push(PendingChange { aim, leases });
        }
    }
    // The layout of an override that this version cannot parse is unknown, so its devices stay as they are.
    if desired_state.layout.is_none() && !desired_state.dynamic {
        return changes;
    }
    let Some(mig) = &gpu.mig else { return changes };
    let devices = mig.instances.iter().flat_map(|instance| instance.compute.iter().map(move |one| (instance, one)));
    for (instance, compute) in devices {
        let Some(uuid) = &compute.uuid else { continue };
        let is_shared = shared.iter().any(|one| one.uuid == *uuid);
        let sharing = |lease: &&LeaseUse| lease.target == *uuid && lease.kind == LeaseKind::Mps;
        let leases = ids(gpu.leases.iter().filter(sharing));
        if !is_shared && !leases.is_empty() {
            let device = sharing::device_name(instance, compute);
            changes.push(PendingChange { aim: PendingAim::UnshareDevice { uuid: uuid.clone(), device }, leases });
        }
    }
    changes
}

#[cfg(test)]
mod tests;
