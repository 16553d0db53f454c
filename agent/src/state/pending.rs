//! Changes of rules that leases delay, and changes that wait for an apply after the end of their leases.
//!
//! [`gpush_core::desired::pending`] decides which changes leases delay. The module `delayed` remembers these changes from one
//! snapshot to the next.

use gpush_api::{Gpu, PendingAim};
use gpush_core::desired::{self, DesiredState};

use super::{leases::UNRECORDED, sources::SnapshotSources};

/// Completes the pending changes of a GPU: those that leases delay, and those that wait for an apply because leases have
/// delayed them before. Removes the grants that are being recorded from the leases.
pub(super) fn complete(known: &SnapshotSources, desired_state: &DesiredState, gpu: &mut Gpu) {
    gpu.leases.retain(|lease| lease.id != UNRECORDED);
    gpu.pending.iter_mut().for_each(|change| change.leases.retain(|lease| *lease != UNRECORDED));
    if !known.rules_are_known {
        // Without rules, nothing is known about the mode of the GPU.
        gpu.pending.clear();
        return;
    }
    let Some(before) = known.delayed.get(&gpu.uuid).filter(|_| !known.config.auto_reconcile) else { return };
    let is_delayed = |aim: &PendingAim| gpu.pending.iter().any(|change| change.aim == *aim);
    let others: Vec<PendingAim> = before.iter().filter(|aim| !is_delayed(aim)).cloned().collect();
    let deferred = desired::deferred(desired_state, gpu, &others, known.mps.is_active(gpu.uuid.as_target()));
    gpu.drift.extend(deferred.iter().map(|change| change.describe(gpu.index)));
    gpu.pending.extend(deferred);
}
