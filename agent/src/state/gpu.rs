//! One GPU of a snapshot: its state with the reasons, and its differences from its rule.
//!
//! Several states may apply at once. The GPU's state is the first that applies, from the top.
//!
//! ```text
//! maintenance   an administrator entered it: gpushd has no driver handle open ─ until it is left
//! lost          the driver no longer lists the GPU, or says that it is lost   ─ until it is listed again
//! unknown       a call may still take effect, or the GPU cannot be read       ─ until it is read
//! held          claimed by the config, and the database was lost              ─ recover, or another boot
//!               gpushd can use neither the config nor its copy                ─ a reload of a valid config
//! changing      an operation changes it                                       ─ until the operation ends
//! degraded      a change and its rollback failed                              ─ an operation that succeeds, or a
//!                                                                               reading as planned or as before
//! cordoned      an administrator, an Xid error, a pending row remap           ─ uncordon
//! ready         none of these
//! ```
//!
//! | state | new work | change by name | change by a request for all GPUs, or by gpushd itself |
//! |---|---|---|---|
//! | `ready` | yes | yes | yes |
//! | `cordoned` | no | yes | no |
//! | `degraded` | no | yes | no |
//! | `changing` | no | with `--wait`: queued; else refused | the same |
//! | `held`, `unknown`, `lost`, `maintenance` | no | no | no |
//!
//! A cordon is independent of the state. `cordons` lists the cordons of a GPU in any state.

use std::collections::BTreeSet;

use gpush_api::{Gpu, GpuChange, GpuState, InstanceSummary, Memory, Mode, TimesliceView};
use gpush_core::{desired, sharing};
use gpush_nvml::{ErrorKind, Identity, ReadingPart, RemappedRows};

use super::{
    pending,
    readings::Moment,
    reason::Reason,
    sources::{ListedGpu, SnapshotSources},
};

/// A GPU in a snapshot.
#[derive(Debug)]
pub(crate) struct GpuSnapshot {
    /// The GPU with all details, as an administrator sees it.
    pub(crate) gpu: Gpu,
    /// The reasons for the state, as types. The order is that of `gpu.reasons`.
    pub(crate) reasons: Vec<Reason>,
    /// Which rule of the config claims the GPU: the position of the rule, or `None` if no rule does.
    pub(crate) rule: Option<usize>,
    /// Remapped memory rows in the last reading; `None` if the driver does not report them.
    pub(crate) rows: Option<RemappedRows>,
    /// The fields that events report about the GPU. `changed` is empty.
    pub(super) reported: GpuChange,
}

impl GpuSnapshot {
    /// Returns whether an operation is changing the GPU.
    pub(crate) fn is_changing(&self) -> bool {
        self.reasons.iter().any(|reason| matches!(reason, Reason::Changing { .. }))
    }

    /// Returns a snapshot of this GPU, without a rule and without reasons for its state.
    #[cfg(test)]
    pub(crate) fn of(gpu: Gpu) -> Self {
        let reported = event_fields(&gpu);
        Self { gpu, reasons: Vec::new(), rule: None, rows: None, reported }
    }

    /// Returns whether this gpushd has not tried to read the GPU yet.
    pub(crate) fn is_unread(&self) -> bool {
        self.reasons.iter().any(|reason| matches!(reason, Reason::NotRead))
    }

    /// Returns whether two snapshots differ in a field that events report.
    pub(crate) fn differs_from(&self, other: &Self) -> bool {
        !std::ptr::eq(self, other) && self.reported != other.reported
    }

    /// Returns a GPU with only its identity.
    pub(super) fn outline(identity: &Identity) -> Gpu {
        Gpu {
            index: identity.index,
            uuid: identity.uuid.clone(),
            pci: identity.pci.clone(),
            pci_id: Some(format!("0x{:08X}", identity.pci_id)),
            pci_subsystem: identity.pci_subsystem.map(|id| format!("0x{id:08X}")),
            minor: identity.minor,
            name: identity.name.clone(),
            architecture: identity.architecture,
            passed_through: identity.passed_through,
            memory: Memory::default(),
            mode: Mode::NoRule,
            rule: None,
            access: None,
            layout: None,
            overridden: None,
            drift: Vec::new(),
            pending: Vec::new(),
            state: GpuState::Unknown,
            reasons: Vec::new(),
            cordons: Vec::new(),
            mig: None,
            compute_mode: None,
            timeslice: None,
            nvlink: None,
            sensors: gpush_api::Sensors::default(),
            processes: Vec::new(),
            leases: Vec::new(),
            mps_daemons: BTreeSet::new(),
            processes_known: true,
            processes_error: None,
            unleased: Vec::new(),
            blocked_by: Vec::new(),
            observed_at: jiff::Timestamp::UNIX_EPOCH,
            stale: true,
        }
    }

    /// Creates a GPU of a snapshot. `listed_at` is the time at which the driver listed the GPUs.
    pub(super) fn compose(known: &SnapshotSources, sight: &ListedGpu, listed_at: Moment) -> Self {
        let uuid = &sight.identity.uuid;
        let (state, reasons) = state(known, sight);
        let (reading, at) = match &sight.last.good {
            Some((reading, at)) => (Some(reading), *at),
            None => (None, listed_at),
        };
        let in_maintenance = known.conditions.maintenance().is_some();
        let overridden = known.overrides.of(uuid);
        let mut gpu = Gpu {
            memory: reading.map_or_else(Memory::default, |reading| reading.memory),
            overridden: overridden.map(|one| super::overridden(one.clone(), Some(sight.identity.index))),
            state,
            cordons: known.conditions.cordons(uuid),
            // If the GPU was never read, these fields are empty, and gpushd plans no change of the GPU.
            mig: reading.and_then(|reading| reading.mig.clone()),
            compute_mode: reading.and_then(|reading| reading.compute_mode),
            timeslice: known.levels.view(uuid),
            nvlink: reading.and_then(|reading| reading.nvlink.clone()),
            sensors: reading.map(|reading| reading.sensors).unwrap_or_default(),
            processes: reading.map(|reading| reading.processes.clone()).unwrap_or_default(),
            mps_daemons: known.mps.daemons_on(uuid),
            processes_known: reading.is_none_or(|reading| reading.processes_known),
            processes_error: reading.and_then(|reading| reading.unread(ReadingPart::Processes)).map(str::to_owned),
            observed_at: at.wall,
            stale: in_maintenance || sight.last.stale || sight.list_error.is_some(),
            ..Self::outline(&sight.identity)
        };
        let rule = known.claims.get(uuid).copied().flatten();
        gpu.leases = known.leases.uses_on(uuid);
        let desired_state = desired::describe(&known.config, rule, &mut gpu);
        let is_shared = known.mps.is_active(uuid.as_target());
        gpu.drift.extend(sharing_drift(&gpu, is_shared));
        pending::complete(known, &desired_state, &mut gpu);
        if !is_shared && gpu.pending.is_empty() && gpu.state != GpuState::Lost {
            gpu.drift.extend(desired::compute_mode_drift(&desired_state, &gpu));
        }
        let mut reasons = reasons;
        let lost = known.loss.lost.as_ref().filter(|lost| lost.holds && is_managed(&gpu));
        let unknown = (!known.rules_are_known).then_some(Reason::RulesUnknown);
        let held: Vec<Reason> = lost.map(|lost| Reason::Held(lost.cause.clone())).into_iter().chain(unknown).collect();
        if !held.is_empty() && (gpu.state == GpuState::Changing || is_usable(gpu.state)) {
            gpu.state = GpuState::Held;
        }
        reasons.extend(held);
        gpu.reasons = reasons.iter().map(ToString::to_string).collect();
        gpu.unleased = known.unleased.get(uuid).cloned().unwrap_or_default();
        // A GPU that has its layout needs no change that something could block.
        if !gpu.drift.is_empty() {
            gpu.blocked_by = known.blocked_by.get(uuid).cloned().unwrap_or_default();
        }
        let reported = event_fields(&gpu);
        Self { gpu, reasons, rule, rows: reading.and_then(|reading| reading.rows), reported }
    }
}

/// Returns the state of a GPU and its reasons. Leaves out the reasons that depend on the GPU's rule.
fn state(known: &SnapshotSources, sight: &ListedGpu) -> (GpuState, Vec<Reason>) {
    let uuid = &sight.identity.uuid;
    let mut reasons: Vec<Reason> = Vec::new();
    let mut state = GpuState::Ready;
    if let Some((reading, _)) = &sight.last.good {
        reasons.extend(reading.warnings.iter().map(|unread| Reason::Warning(unread.to_string())));
    }
    let cordons = known.conditions.cordons(uuid);
    if !cordons.is_empty() {
        state = GpuState::Cordoned;
    }
    let degraded = known.conditions.degraded(uuid);
    if !degraded.is_empty() {
        state = GpuState::Degraded;
        reasons.extend(degraded.into_iter().map(Reason::Degraded));
    }
    // Ignore an operation that is still being planned.
    if let Some(holder) = known.lanes.get(uuid).filter(|holder| holder.has_begun()) {
        state = GpuState::Changing;
        reasons.push(Reason::Changing { holder: holder.clone() });
    }
    if known.unsettled.contains(uuid) {
        state = GpuState::Unknown;
        reasons.push(Reason::Unsettled);
    } else if !sight.listed {
        state = GpuState::Lost;
        reasons.push(Reason::NotListed);
    }
    let maintenance = known.conditions.maintenance();
    let error = sight.list_error.as_ref().or(sight.last.error.as_ref());
    if let Some(error) = error.filter(|_| maintenance.is_none()) {
        if error.kind == ErrorKind::GpuIsLost {
            state = GpuState::Lost;
        } else if state != GpuState::Lost {
            state = GpuState::Unknown;
        }
        reasons.push(Reason::Driver(error.clone()));
    } else if sight.last.good.is_none() && maintenance.is_none() && is_usable(state) {
        state = GpuState::Unknown;
        reasons.push(Reason::NotRead);
    }
    if let Some(maintenance) = maintenance {
        state = GpuState::Maintenance;
        reasons.push(Reason::Maintenance(maintenance));
    }
    if state == GpuState::Cordoned {
        // In other states, only the field `cordons` shows the cordons.
        reasons.extend(cordons.into_iter().map(Reason::Cordoned));
    }
    (state, reasons)
}

/// Returns whether the GPU can be used in this state.
fn is_usable(state: GpuState) -> bool {
    match state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => true,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    }
}

/// Returns whether a rule of the config claims the GPU for a mode other than `unmanaged`.
pub(crate) fn is_managed(gpu: &Gpu) -> bool {
    gpu.mode.is_managed()
}

/// Returns how a GPU's sharing through MPS differs from its rule. `shared` is whether an MPS daemon for the whole GPU
/// is in force.
fn sharing_drift(gpu: &Gpu, shared: bool) -> Option<String> {
    let seen = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Changing => true,
        // If the database was lost, a daemon may serve although gpushd has no record of it.
        GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    match (gpu.mode, shared) {
        // Explain why the GPU is not shared, unless other drift already explains it.
        (Mode::Mps, false) if seen && gpu.drift.is_empty() => Some(match sharing::mps_unsupported_reason(gpu) {
            Some(why) => format!("it can't be shared through MPS: {why}"),
            None => "it is not shared through MPS yet".to_owned(),
        }),
        (Mode::Mps | Mode::NoRule | Mode::Unmanaged, _) | (_, false) => None,
        (Mode::Exclusive | Mode::Mig | Mode::Timeslice, true) => {
            Some("it is shared through MPS, but its rule no longer says so".to_owned())
        }
    }
}

/// Returns the fields that events report about a GPU.
fn event_fields(gpu: &Gpu) -> GpuChange {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| InstanceSummary {
        id: instance.id,
        profile: instance.profile.clone(),
        placement: instance.placement,
        compute: instance.compute.iter().map(|compute| compute.id).collect(),
        device_uuids: instance.compute.iter().filter_map(|compute| compute.uuid.clone()).collect(),
    });
    GpuChange {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        changed: Vec::new(),
        state: gpu.state,
        reasons: gpu.reasons.clone(),
        drift: gpu.drift.clone(),
        pending: gpu.pending.clone(),
        mig: gpu.mig.as_ref().map(|mig| mig.enabled),
        instances: instances.collect(),
        destroyed_device_uuids: Vec::new(),
        compute_mode: gpu.compute_mode,
        // Leave out the time of the reading: a newer reading of the same level is not a change.
        timeslice: gpu.timeslice.clone().map(|level| TimesliceView { read_at: None, ..level }),
    }
}
