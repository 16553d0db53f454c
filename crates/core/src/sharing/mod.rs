//! Determines which GPUs and MIG devices should have an MPS daemon, and the limits of the daemon's
//! clients. The inputs are the config, its overrides, and the existing devices.
//!
//! ```text
//! rule of mode mps ──► the GPU, without MIG ─────────────────────────────┐
//! rule of mode mig ──► its layout, or the override's ──► entries ":mps"  ├──► one Target for each daemon
//!                                  existing MIG devices ────► devices ───┘
//! ```
//!
//! A daemon can exist only for an existing device, so a device of a layout becomes a target only
//! when the device exists. Among equal devices, devices that already have daemons are preferred,
//! because moving a daemon to another device would end the clients. So the result depends on
//! `shared_before`: the UUIDs of the devices that were shared before.
//!
//! While a GPU cannot be read or is being changed, the GPU gets no new daemon, and keeps its
//! existing daemons. A failed reading must not end running clients.

use std::{collections::BTreeSet, fmt};

use gpush_api::{
    Architecture, Gpu, GpuIndex, GpuState, GpuUuid, Mig, Mode, MpsPolicy, MpsScope, PendingAim, TargetUuid,
};

use self::devices::DeviceUses;
use crate::{
    config::{Config, Rule},
    desired::{self, DesiredState},
    layout::Layout,
};

mod after_plan;
mod devices;
mod limits;
mod names;

pub use after_plan::{DeviceAfter, shared_after};
pub use devices::device_name;
pub use limits::{check_memory_limit, max_device_clients, unfit_settings};
pub use names::{name_of, pending_target, resolve, short_name};

/// A GPU or MIG device that should have an MPS daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharingTarget {
    /// UUID of the GPU or MIG device that the daemon sees.
    pub uuid: TargetUuid,
    /// Index of the GPU.
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// Display name of the MIG device, `2g.20gb@2` or `1c.3g.40gb@0/2`; `None` for a whole GPU.
    pub device: Option<String>,
    /// Memory in MiB, if known.
    pub memory_mib: Option<u64>,
    /// Limits of the clients.
    pub policy: MpsPolicy,
    /// Whether the target is a whole GPU.
    pub full_gpu: bool,
}

impl SharingTarget {
    /// Returns the name for messages: `GPU 0`, or `MIG device 0:2g.20gb@2`.
    #[must_use]
    pub fn label(&self) -> String {
        label(self.gpu, self.device.as_deref())
    }
}

/// Why a GPU or MIG device cannot be shared, or cannot be shared as desired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// UUID of the GPU or MIG device; `None` if the driver does not report it.
    pub target: Option<TargetUuid>,
    /// Name of the target for messages, as in [`SharingTarget::label`].
    pub label: String,
    /// The reason, as a clause.
    pub reason: String,
}

impl Finding {
    fn of_gpu(gpu: &Gpu, reason: impl Into<String>) -> Self {
        Self { target: Some(gpu.uuid.clone().into()), label: label(gpu.index, None), reason: reason.into() }
    }

    fn of(target: &SharingTarget, reason: impl Into<String>) -> Self {
        Self { target: Some(target.uuid.clone()), label: target.label(), reason: reason.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.label, self.reason)
    }
}

/// The targets of a host, and the problems with them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sharing {
    /// Targets, sorted by GPU and placement.
    pub targets: Vec<SharingTarget>,
    /// Targets that get a daemon later, because leases keep them from being shared now.
    pub pending: Vec<SharingTarget>,
    /// Desired sharing that is not possible.
    pub findings: Vec<Finding>,
    /// UUIDs of GPUs whose MIG devices cannot be read now. The daemons of these GPUs do not change.
    pub unseen: BTreeSet<GpuUuid>,
}

/// Determines which targets are shared through MPS. `shared_before` contains the UUIDs of the
/// targets that already have a daemon.
#[must_use]
pub fn decide(config: &Config, gpus: &[Gpu], shared_before: &BTreeSet<TargetUuid>) -> Sharing {
    let mut sharing = Sharing::default();
    for (gpu, claimed) in gpus.iter().zip(desired::claims(config, gpus)) {
        decide_one(&mut sharing, config, claimed, gpu, shared_before);
    }
    sharing
}

/// Determines the sharing of one GPU in the same way as [`decide`]. `claimed` is the position of
/// the GPU's rule, from [`desired::claims`].
#[must_use]
pub fn decide_gpu(config: &Config, claimed: Option<usize>, gpu: &Gpu, shared_before: &BTreeSet<TargetUuid>) -> Sharing {
    let mut sharing = Sharing::default();
    decide_one(&mut sharing, config, claimed, gpu, shared_before);
    sharing
}

fn decide_one(
    sharing: &mut Sharing,
    config: &Config,
    claimed: Option<usize>,
    gpu: &Gpu,
    shared_before: &BTreeSet<TargetUuid>,
) {
    let Some(rule) = claimed.and_then(|position| config.rules.get(position)) else { return };
    let desired_state = desired::desired_state(config, claimed, gpu);
    match desired_state.mode.mps_scope() {
        MpsScope::WholeGpu => decide_whole(sharing, gpu, rule, shared_before),
        MpsScope::MigDevices => decide_mig(sharing, gpu, &desired_state, rule, shared_before),
        MpsScope::Nothing => {}
    }
}

/// Returns only the targets of [`decide`].
#[must_use]
pub fn targets(config: &Config, gpus: &[Gpu], shared_before: &BTreeSet<TargetUuid>) -> Vec<SharingTarget> {
    decide(config, gpus, shared_before).targets
}

/// Finds a target among the current GPUs. Returns the index of its GPU and, for a MIG device, the
/// display name.
#[must_use]
pub fn locate_target(gpus: &[Gpu], uuid: &TargetUuid) -> Option<(GpuIndex, Option<String>)> {
    let only = BTreeSet::from([uuid.clone()]);
    gpus.iter().find_map(|gpu| {
        let device =
            || devices::previously_shared(gpu.mig.as_ref()?, &only).first().map(devices::SharedDevice::display_name);
        if gpu.uuid == *uuid { Some((gpu.index, None)) } else { Some((gpu.index, Some(device()?))) }
    })
}

/// Returns only the problems of [`decide`], as sentences.
#[must_use]
pub fn findings(config: &Config, gpus: &[Gpu], shared_before: &BTreeSet<TargetUuid>) -> Vec<String> {
    decide(config, gpus, shared_before).findings.iter().map(Finding::to_string).collect()
}

fn decide_whole(sharing: &mut Sharing, gpu: &Gpu, rule: &Rule, shared_before: &BTreeSet<TargetUuid>) {
    if let Some(reason) = mps_unsupported_reason(gpu) {
        sharing.findings.push(Finding::of_gpu(gpu, reason));
        return;
    }
    let in_the_way = desired::whole_gpu_obstacles(Mode::Mps, gpu);
    if !in_the_way.is_empty() {
        sharing.findings.extend(in_the_way.into_iter().map(|reason| Finding::of_gpu(gpu, reason)));
        return;
    }
    let target = SharingTarget {
        uuid: gpu.uuid.clone().into(),
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        device: None,
        memory_mib: Some(gpu.memory.total_mib).filter(|mib| *mib > 0),
        policy: rule.mps_policy(),
        full_gpu: true,
    };
    accept_targets(sharing, gpu, vec![target], shared_before);
}

/// A MIG device that a layout shares through MPS.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedDevice {
    /// UUID.
    pub uuid: TargetUuid,
    /// Name, such as `3g.40gb@4`.
    pub device: String,
}

/// Returns the existing MIG devices that a layout shares on a GPU, as far as their UUIDs are known.
#[must_use]
pub fn shared_devices(layout: &Layout, gpu: &Gpu, mig: &Mig, shared_before: &BTreeSet<TargetUuid>) -> Vec<NamedDevice> {
    let shared = devices::shared(layout, mig, &DeviceUses::of(gpu, shared_before));
    let named = |device: devices::SharedDevice<'_>| {
        Some(NamedDevice { uuid: device.compute.uuid.clone()?, device: device.display_name() })
    };
    shared.into_iter().filter_map(named).collect()
}

/// Determines the sharing of a GPU's MIG devices, if the layout shares some of them.
fn decide_mig(
    sharing: &mut Sharing,
    gpu: &Gpu,
    desired_state: &DesiredState,
    rule: &Rule,
    shared_before: &BTreeSet<TargetUuid>,
) {
    let known = match (&desired_state.layout, &gpu.overridden) {
        (Some(layout), _) if layout.shared().is_none() => return,
        (layout @ Some(_), _) => layout.as_ref(),
        // The layout of the override is unknown, so existing sharing does not change.
        (None, Some(_)) => None,
        (None, None) => return,
    };
    let Some(mig) = &gpu.mig else {
        if !is_current(gpu) {
            sharing.unseen.insert(gpu.uuid.clone());
        }
        return;
    };
    // Report nothing here: drift already reports that MIG mode is off or instances are missing.
    if !mig.enabled {
        return;
    }
    let devices = match known {
        Some(layout) => devices::shared(layout, mig, &DeviceUses::of(gpu, shared_before)),
        None => devices::previously_shared(mig, shared_before),
    };
    let mut targets = Vec::new();
    for device in devices {
        let words = device.display_name();
        let Some(uuid) = &device.compute.uuid else {
            let label = label(gpu.index, Some(&words));
            sharing.findings.push(Finding {
                target: None,
                label,
                reason: "the UUID of this MIG device is not known".to_owned(),
            });
            continue;
        };
        let policy = rule.mps_policy();
        let max_clients = max_device_clients(policy.max_clients, device.slices(mig), mig.compute_slices);
        targets.push(SharingTarget {
            uuid: uuid.clone(),
            gpu: gpu.index,
            gpu_uuid: gpu.uuid.clone(),
            memory_mib: limits::memory_of(mig, device.instance),
            device: Some(words),
            policy: MpsPolicy { max_clients, ..policy },
            full_gpu: false,
        });
    }
    accept_targets(sharing, gpu, targets, shared_before);
}

/// Adds the targets that the state of the GPU allows, and reports the other targets.
fn accept_targets(sharing: &mut Sharing, gpu: &Gpu, targets: Vec<SharingTarget>, shared_before: &BTreeSet<TargetUuid>) {
    let start = daemon_start(gpu);
    let is_pending = |target: &SharingTarget| {
        gpu.pending.iter().any(|change| match &change.aim {
            PendingAim::Mode { mode, .. } => target.full_gpu && *mode == Mode::Mps,
            PendingAim::ShareDevice { uuid, .. } => *uuid == target.uuid,
            PendingAim::Timeslice { .. } | PendingAim::UnshareDevice { .. } => false,
        })
    };
    for target in targets {
        // An existing daemon is never stopped because of a lease.
        if is_pending(&target) && !shared_before.contains(&target.uuid) {
            sharing.pending.push(target);
            continue;
        }
        match start {
            DaemonStart::Allowed => {}
            DaemonStart::Forbidden(why) | DaemonStart::ExistingOnly(why) => {
                let stays = matches!(start, DaemonStart::ExistingOnly(_)) && shared_before.contains(&target.uuid);
                if !stays {
                    sharing.findings.push(Finding::of(&target, why));
                    continue;
                }
            }
        }
        sharing.findings.extend(limits::memory_problem(&target).map(|reason| Finding::of(&target, reason)));
        sharing.targets.push(target);
    }
}

/// Whether new daemons may be started on a GPU.
#[derive(Debug, Clone, Copy)]
enum DaemonStart {
    /// New daemons may be started.
    Allowed,
    /// Existing daemons are kept, but no new daemon is started. Contains the reason.
    ExistingOnly(&'static str),
    /// The GPU cannot be shared at all. Contains the reason.
    Forbidden(&'static str),
}

fn daemon_start(gpu: &Gpu) -> DaemonStart {
    match gpu.state {
        GpuState::Lost => DaemonStart::Forbidden("the GPU is lost: it has fallen off the bus"),
        GpuState::Unknown => DaemonStart::ExistingOnly("the GPU can't be read, so no MPS daemon is started on it"),
        GpuState::Maintenance => {
            DaemonStart::ExistingOnly("the GPU is in maintenance, so no MPS daemon is started on it")
        }
        GpuState::Held => DaemonStart::ExistingOnly("the GPU is held, so no MPS daemon is started on it"),
        GpuState::Degraded => DaemonStart::ExistingOnly("the GPU is degraded, so no MPS daemon is started on it"),
        GpuState::Changing => {
            DaemonStart::ExistingOnly("an operation is changing the GPU; the MPS daemon starts afterwards")
        }
        GpuState::Ready | GpuState::Cordoned if gpu.stale => {
            DaemonStart::ExistingOnly("the GPU can't be read, so no MPS daemon is started on it")
        }
        // A cordon does not prevent a start. gpushd keeps new clients away from the daemon instead.
        GpuState::Ready | GpuState::Cordoned => DaemonStart::Allowed,
    }
}

/// Returns whether the reading of the GPU's instances is current.
fn is_current(gpu: &Gpu) -> bool {
    match gpu.state {
        GpuState::Unknown | GpuState::Maintenance => false,
        // The devices of a lost GPU certainly no longer exist, so a newer reading is not necessary.
        GpuState::Lost => true,
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Changing | GpuState::Held => !gpu.stale,
    }
}

/// Returns why the GPU does not support MPS with limits; `None` if the GPU does support it.
#[must_use]
pub fn mps_unsupported_reason(gpu: &Gpu) -> Option<String> {
    match gpu.architecture {
        Architecture::Legacy => Some(format!("{} is older than Volta, so MPS cannot limit its clients", gpu.name)),
        Architecture::Volta
        | Architecture::Turing
        | Architecture::Ampere
        | Architecture::Ada
        | Architecture::Hopper
        | Architecture::Blackwell
        | Architecture::Unknown => None,
    }
}

fn label(gpu: GpuIndex, device: Option<&str>) -> String {
    match device {
        Some(device) => format!("MIG device {gpu}:{device}"),
        None => format!("GPU {gpu}"),
    }
}

#[cfg(test)]
mod tests;
