//! Builds the offers of a host from one snapshot of its state.
//!
//! ```text
//! config, overrides ──► mode of each GPU, MPS targets ─┐
//! GPUs as read ──► instances, processes, state ────────┼──► Host
//! members of leases, claimed GPUs ─────────────────────┘
//! ```
//!
//! Unknown capacity counts as in use. A GPU accepts no grants if its reading is stale, if the
//! driver did not list its processes, or if its state is not `ready`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{
    ComputeMode, Gpu, GpuInstance, GpuState, GpuUuid, LeaseKind, LeaseMember, MemberShare, Mig, Mode, Percentage,
    Placement, TargetUuid,
};

use crate::{
    config::Config,
    desired::{self, DesiredState},
    geometry::Geometry,
    lease::capacity::{Held, Relation},
    sharing,
};

use super::{Closed, Device, GpuOffer, Host, Instance, MigOffer, MpsOffer, TimesliceOffer, Unoffered, WholeOffer};

/// The state from which the offers are built.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The config.
    pub config: &'a Config,
    /// GPUs as read, with their profiles and overrides.
    pub gpus: &'a [Gpu],
    /// Members of all leases that hold capacity, each with the uid of the holder.
    pub members: &'a [(u32, &'a LeaseMember)],
    /// UUIDs of the GPUs that an operation has claimed.
    pub claimed: &'a BTreeSet<GpuUuid>,
    /// UUIDs of MPS targets that have a daemon.
    pub daemons: &'a BTreeSet<TargetUuid>,
    /// UUIDs of the targets in `daemons` whose daemon has ended and does not start again. Programs can use these targets
    /// without MPS.
    pub ended: &'a BTreeSet<TargetUuid>,
    /// By UUID of each MPS target, the uid of a user who has clients on the daemon of this target.
    pub users: &'a BTreeMap<TargetUuid, u32>,
    /// Instances that gpushd created, by GPU UUID.
    pub created: &'a BTreeMap<GpuUuid, BTreeSet<Placement>>,
}

impl Snapshot<'_> {
    /// Returns whether a target has a daemon that runs or starts again.
    fn has_daemon(&self, target: &TargetUuid) -> bool {
        self.daemons.contains(target) && !self.ended.contains(target)
    }
}

impl Host {
    /// Returns the offers of all GPUs of the host.
    #[must_use]
    pub fn of(snapshot: &Snapshot<'_>) -> Self {
        let desired_states = desired::desired_states(snapshot.config, snapshot.gpus);
        let decided = sharing::decide(snapshot.config, snapshot.gpus, snapshot.daemons);
        // A target that leases keep from being shared is offered, so that requests for it can wait.
        let targets: Vec<_> = decided.targets.into_iter().chain(decided.pending).collect();
        let gpus = snapshot
            .gpus
            .iter()
            .zip(&desired_states)
            .map(|(gpu, desired_state)| offer(snapshot, gpu, desired_state, &targets))
            .collect();
        Self { gpus }
    }
}

fn offer(
    snapshot: &Snapshot<'_>,
    gpu: &Gpu,
    desired_state: &DesiredState,
    targets: &[sharing::SharingTarget],
) -> GpuOffer {
    let own: Vec<&sharing::SharingTarget> = targets.iter().filter(|target| target.gpu_uuid == gpu.uuid).collect();
    let is_whole = || gpu.mig.as_ref().is_none_or(gpush_api::Mig::is_off);
    let mut offer = GpuOffer {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        closed: closed(snapshot, gpu, desired_state),
        pending: gpu.pending.clone(),
        mps: own.iter().map(|target| mps(snapshot, gpu, target)).collect(),
        ..GpuOffer::default()
    };
    match desired_state.mode {
        Mode::Mig => {
            let enabled = gpu.mig.as_ref().filter(|mig| mig.enabled);
            offer.mig =
                enabled.map(|mig| MigOffer { dynamic: desired_state.dynamic, ..mig_offer(snapshot, gpu, mig, &own) });
        }
        Mode::Timeslice if is_whole() => {
            let leases = Occupants::of(snapshot, gpu, gpu.uuid.as_target(), LeaseKind::Timeslice);
            offer.timeslice = desired_state.timeslice.as_ref().map(|policy| TimesliceOffer {
                replicas: policy.replicas,
                level: policy.level,
                compute_mode: policy.compute_mode,
                taken: count(leases.sharing.len()),
                excluding: leases.excluding,
                first_end: None,
            });
        }
        Mode::Exclusive if is_whole() => {
            let leased = Occupants::of(snapshot, gpu, gpu.uuid.as_target(), LeaseKind::Whole).excluding > 0;
            offer.whole = Some(WholeOffer { free: gpu.processes.is_empty() && !leased, leased, end: None });
        }
        Mode::NoRule | Mode::Unmanaged | Mode::Mps | Mode::Timeslice | Mode::Exclusive => {}
    }
    if offer.kinds().next().is_none() {
        offer.unoffered = Some(match desired_state.mode {
            Mode::NoRule => Unoffered::NoRule,
            Mode::Unmanaged => Unoffered::Unmanaged,
            mode if offer.closed == Some(Closed::NotReady) => Unoffered::NotReady(mode),
            mode if gpu.pending.iter().any(|change| change.aim.device().is_none()) => Unoffered::Pending(mode),
            Mode::Mps if sharing::mps_unsupported_reason(gpu).is_some() => Unoffered::NoMps,
            mode if gpu.waits_for_reboot() => Unoffered::Reboot(mode),
            mode @ (Mode::Mig | Mode::Mps | Mode::Timeslice | Mode::Exclusive) => Unoffered::OtherMode(mode),
        });
    }
    offer
}

fn closed(snapshot: &Snapshot<'_>, gpu: &Gpu, desired_state: &DesiredState) -> Option<Closed> {
    let mode = desired_state.mode;
    let sets_prohibited =
        || desired_state.timeslice.as_ref().is_some_and(|one| one.compute_mode == Some(ComputeMode::Prohibited));
    if snapshot.claimed.contains(&gpu.uuid) {
        return Some(Closed::Claimed);
    }
    match gpu.state {
        _ if !gpu.cordons.is_empty() => Some(Closed::Cordoned),
        GpuState::Cordoned => Some(Closed::Cordoned),
        GpuState::Changing => Some(Closed::Claimed),
        GpuState::Ready if gpu.stale || !gpu.processes_known => Some(Closed::NotReady),
        // The present leases keep the earlier rule. A new lease would delay the change.
        GpuState::Ready if gpu.pending.iter().any(|change| change.aim.device().is_none()) => Some(Closed::Pending),
        // If the rule sets this mode, gpushd soon replaces another mode.
        GpuState::Ready if gpu.compute_mode == Some(ComputeMode::Prohibited) || sets_prohibited() => {
            Some(Closed::Prohibited)
        }
        // Only an operation starts the daemon. A waiting request must not reserve the GPU, because the operation would then
        // wait for this request.
        GpuState::Ready if mode == Mode::Mps && !snapshot.daemons.contains(gpu.uuid.as_target()) => {
            Some(Closed::NotShared)
        }
        // The MPS daemon of the earlier rule still runs, and no program can use the GPU without it.
        GpuState::Ready
            if matches!(mode, Mode::Timeslice | Mode::Exclusive) && snapshot.has_daemon(gpu.uuid.as_target()) =>
        {
            Some(Closed::StillShared)
        }
        GpuState::Ready => None,
        GpuState::Degraded | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => {
            Some(Closed::NotReady)
        }
    }
}

/// The lease members that occupy a target of a GPU.
struct Occupants<'a> {
    /// Members that share the target in the requested way, each with the uid of its holder.
    sharing: Vec<(u32, &'a LeaseMember)>,
    /// Number of members that exclude such a share.
    excluding: u32,
}

impl<'a> Occupants<'a> {
    /// Returns the members that occupy `target` for a share of kind `kind`.
    fn of(snapshot: &Snapshot<'a>, gpu: &Gpu, target: &TargetUuid, kind: LeaseKind) -> Self {
        let mut all = Self { sharing: Vec::new(), excluding: 0 };
        for (holder, member) in snapshot.members {
            match Held::by_member(member).relation(&gpu.uuid, target, kind) {
                Relation::Shares => all.sharing.push((*holder, *member)),
                Relation::Excludes => all.excluding += 1,
                Relation::None => {}
            }
        }
        all
    }
}

fn count(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}

fn mps(snapshot: &Snapshot<'_>, gpu: &Gpu, target: &sharing::SharingTarget) -> MpsOffer {
    let tenths = |(_, member): (u32, &LeaseMember)| match &member.share {
        MemberShare::Mps { percentage, .. } => u32::from(percentage.tenths()),
        MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => 0,
    };
    let Occupants { sharing, excluding } = Occupants::of(snapshot, gpu, &target.uuid, LeaseKind::Mps);
    let holder = || sharing.first().map(|(holder, _)| *holder);
    let user = match target.policy.users {
        gpush_api::MpsUsers::One => holder().or_else(|| snapshot.users.get(&target.uuid).copied()),
        gpush_api::MpsUsers::Many => None,
    };
    MpsOffer {
        target: target.uuid.clone(),
        memory_mib: target.memory_mib.unwrap_or(gpu.memory.total_mib),
        capacity_tenths: target.policy.total_percentage.saturating_mul(10),
        taken_tenths: sharing.iter().copied().map(tenths).fold(0, u32::saturating_add),
        leases: count(sharing.len()),
        most_leases: target.policy.max_clients,
        default: target.policy.settings.percentage,
        ceiling: Percentage::ALL,
        wants_many_users: target.policy.users == gpush_api::MpsUsers::Many,
        user,
        excluding,
        ends: Vec::new(),
    }
}

fn mig_offer(snapshot: &Snapshot<'_>, gpu: &Gpu, mig: &Mig, shared: &[&sharing::SharingTarget]) -> MigOffer {
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let created = snapshot.created.get(&gpu.uuid);
    let instance = |instance: &GpuInstance| {
        let profile = geometry.profile(instance.profile_id);
        let whole = profile.and_then(|profile| profile.whole()).map(|compute| compute.profile.id);
        let mut busy = !instance.processes.is_empty();
        let mut devices = Vec::new();
        for compute in &instance.compute {
            // A device without a known UUID cannot be granted, and counts as in use.
            let Some(uuid) = &compute.uuid else {
                busy = true;
                continue;
            };
            let shared = shared.iter().any(|target| target.uuid == *uuid);
            // A daemon that the layout no longer requires keeps the device in use until the daemon ends.
            let has_daemon = snapshot.has_daemon(uuid);
            let leased = Occupants::of(snapshot, gpu, uuid, LeaseKind::Mig).excluding > 0;
            devices.push(Device {
                uuid: uuid.clone(),
                profile: compute.profile.clone(),
                whole: instance.compute.len() == 1 && whole == Some(compute.profile_id),
                free: compute.processes.is_empty() && !shared && !has_daemon && !leased,
                leased,
                shared,
                end: None,
            });
        }
        Instance {
            id: instance.id,
            profile_id: instance.profile_id,
            placement: instance.placement,
            foreign: created.is_none_or(|created| !created.contains(&instance.placement)),
            busy,
            clearing: false,
            devices,
        }
    };
    let instances = mig.instances.iter().map(instance).collect();
    MigOffer { dynamic: false, instances, reserved: Vec::new(), geometry: Arc::new(geometry) }
}

#[cfg(test)]
mod tests;
