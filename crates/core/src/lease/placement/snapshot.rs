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

use gpush_api::{ComputeMode, Gpu, GpuInstance, GpuState, LeaseKind, LeaseMember, MemberShare, Mig, Mode, Placement};

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
    pub claimed: &'a BTreeSet<String>,
    /// UUIDs of MPS targets that have a daemon.
    pub daemons: &'a BTreeSet<String>,
    /// By UUID of each MPS target, the uid of a user who has clients on the daemon of this target.
    pub users: &'a BTreeMap<String, u32>,
    /// Instances that gpushd created, by GPU UUID.
    pub created: &'a BTreeMap<String, BTreeSet<Placement>>,
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
    // While a daemon shares the GPU through MPS, no program can use the GPU without this daemon.
    let is_whole = || gpu.mig.as_ref().is_none_or(gpush_api::Mig::is_off) && !snapshot.daemons.contains(&gpu.uuid);
    let mut offer = GpuOffer {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        closed: closed(snapshot, gpu),
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
            let leases = Occupants::of(snapshot, gpu, &gpu.uuid, LeaseKind::Timeslice);
            offer.timeslice = desired_state.timeslice.as_ref().map(|policy| TimesliceOffer {
                replicas: policy.replicas,
                level: policy.level,
                compute_mode: policy.compute_mode,
                taken: count(leases.sharing.len()),
                excluding: leases.excluding,
            });
        }
        Mode::Exclusive if is_whole() => {
            let leased = Occupants::of(snapshot, gpu, &gpu.uuid, LeaseKind::Whole).excluding > 0;
            offer.whole = Some(WholeOffer { free: gpu.processes.is_empty() && !leased, leased });
        }
        Mode::NoRule | Mode::Unmanaged | Mode::Mps | Mode::Timeslice | Mode::Exclusive => {}
    }
    if offer.kinds().next().is_none() {
        offer.unoffered = Some(match desired_state.mode {
            Mode::NoRule => Unoffered::NoRule,
            Mode::Unmanaged => Unoffered::Unmanaged,
            mode if offer.closed == Some(Closed::NotReady) => Unoffered::NotReady(mode),
            mode if gpu.pending.iter().any(|change| change.aim.device().is_none()) => Unoffered::Pending(mode),
            mode if gpu.waits_for_reboot() => Unoffered::Reboot(mode),
            mode @ (Mode::Mig | Mode::Mps | Mode::Timeslice | Mode::Exclusive) => Unoffered::OtherMode(mode),
        });
    }
    offer
}

fn closed(snapshot: &Snapshot<'_>, gpu: &Gpu) -> Option<Closed> {
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
        GpuState::Ready if gpu.compute_mode == Some(ComputeMode::Prohibited) => Some(Closed::Prohibited),
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
    fn of(snapshot: &Snapshot<'a>, gpu: &Gpu, target: &str, kind: LeaseKind) -> Self {
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
        capacity_tenths: target.policy.shares_percent.saturating_mul(10),
        taken_tenths: sharing.iter().copied().map(tenths).fold(0, u32::saturating_add),
        leases: count(sharing.len()),
        most_leases: target.policy.max_clients,
        default: target.policy.settings.percentage,
        user,
        excluding,
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
            // A daemon that the layout no longer requires may still run.
            let shared = shared.iter().any(|target| target.uuid == *uuid) || snapshot.daemons.contains(uuid);
            let leased = Occupants::of(snapshot, gpu, uuid, LeaseKind::Mig).excluding > 0;
            devices.push(Device {
                uuid: uuid.clone(),
                profile: compute.profile.clone(),
                whole: instance.compute.len() == 1 && whole == Some(compute.profile_id),
                free: compute.processes.is_empty() && !shared && !leased,
                leased,
                shared,
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
mod tests {
    use gpush_api::{ComputeInstance, Process, ProcessKind};

    use super::*;
    use crate::{
        lease::placement::{
            NoAssignment, Obstacle, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, place,
            scene::timeslice_offer,
        },
        preset,
    };

    const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\n\
        [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n[gpu.mps]\nshares_percent = 150\n\
        [[gpu]]\nmatch = [\"2\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 3 }\n\
        [[gpu]]\nmatch = [\"3\"]\nmode = \"exclusive\"\n";

    fn gpus() -> Vec<Gpu> {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        for mig in gpus[1..].iter_mut().filter_map(|gpu| gpu.mig.as_mut()) {
            mig.set_mode(false, false);
        }
        let instance = |n: u8| GpuInstance {
            id: u32::from(n),
            profile_id: 19,
            profile: "1g.10gb".to_owned(),
            placement: Placement { start: n, size: 1 },
            memory: None,
            compute: vec![ComputeInstance {
                id: 0,
                profile_id: 0,
                profile: "1g.10gb".to_owned(),
                placement: None,
                uuid: Some(format!("MIG-{n}")),
                processes: Vec::new(),
            }],
            processes: Vec::new(),
        };
        gpus[0].mig.as_mut().unwrap().instances = (0..2).map(instance).collect();
        gpus
    }

    struct Scene {
        config: Config,
        gpus: Vec<Gpu>,
        members: Vec<(u32, LeaseMember)>,
        claimed: BTreeSet<String>,
        created: BTreeMap<String, BTreeSet<Placement>>,
    }

    impl Scene {
        fn new() -> Self {
            let config = Config::parse(CONFIG, "gpushd.toml").unwrap();
            let (claimed, created) = (BTreeSet::new(), BTreeMap::new());
            Self { config, gpus: gpus(), members: Vec::new(), claimed, created }
        }

        fn lease(&mut self, holder: u32, target: &str, share: MemberShare) {
            // The MIG devices are on GPU 0.
            let gpu = if target.starts_with("MIG-") { self.uuid(0) } else { target.to_owned() };
            let target = target.to_owned();
            self.members.push((holder, LeaseMember { target, gpu, share, memory_mib: 0, gpu_memory_mib: 0 }));
        }

        fn host(&self) -> Host {
            let members: Vec<(u32, &LeaseMember)> = self.members.iter().map(|(uid, member)| (*uid, member)).collect();
            Host::of(&Snapshot {
                config: &self.config,
                gpus: &self.gpus,
                members: &members,
                claimed: &self.claimed,
                daemons: &BTreeSet::new(),
                users: &BTreeMap::new(),
                created: &self.created,
            })
        }

        fn uuid(&self, gpu: usize) -> String {
            self.gpus[gpu].uuid.clone()
        }
    }

    fn process() -> Process {
        let kind = ProcessKind::Compute;
        Process {
            pid: Some(7),
            uid: Some(1000),
            user: None,
            command: None,
            kind,
            memory_mib: None,
            unidentified: false,
        }
    }

    #[test]
    fn each_mode_offers_its_kind_of_lease() {
        let host = Scene::new().host();
        let kinds = |gpu: usize| host.gpus[gpu].kinds().map(gpush_api::LeaseKind::name).collect::<Vec<_>>();
        assert_eq!([kinds(0), kinds(1), kinds(2), kinds(3)], [["mig"], ["mps"], ["timeslice"], ["whole"]]);
        assert!(kinds(4).is_empty(), "the config does not claim it");
        assert_eq!(host.gpus[1].mps[0].capacity_tenths, 1500);
        assert!(host.gpus.iter().all(|gpu| gpu.closed.is_none()));
    }

    #[test]
    fn gpu_without_an_offer_has_the_reason() {
        let mut scene = Scene::new();
        scene.gpus[1].state = GpuState::Lost;
        scene.gpus[3].mig.as_mut().unwrap().set_mode(true, true);
        let host = scene.host();
        let reasons: Vec<_> = host.gpus.iter().map(|gpu| gpu.unoffered).take(5).collect();
        let other_mode = Some(Unoffered::OtherMode(Mode::Exclusive));
        assert_eq!(reasons, [None, Some(Unoffered::NotReady(Mode::Mps)), None, other_mode, Some(Unoffered::NoRule)]);
    }

    #[test]
    fn leases_and_processes_occupy_what_they_use() {
        let mut scene = Scene::new();
        let (mps, timeslice, whole) = (scene.uuid(1), scene.uuid(2), scene.uuid(3));
        scene.lease(1000, "MIG-0", MemberShare::Mig { profile: "1g.10gb".to_owned() });
        let percentage = "12.5".parse().unwrap();
        let share = MemberShare::Mps { percentage, memory_limit_mib: None, priority: gpush_api::Priority::Normal };
        scene.lease(1000, &mps, share);
        scene.lease(1000, &timeslice, MemberShare::Timeslice { replicas: 3, level: None, compute_mode: None });
        scene.lease(1000, &whole, MemberShare::Whole);
        let host = scene.host();
        let free: Vec<bool> =
            host.gpus[0].mig.as_ref().unwrap().instances.iter().map(|one| one.devices[0].free).collect();
        assert_eq!(free, [false, true]);
        assert_eq!((host.gpus[1].mps[0].taken_tenths, host.gpus[1].mps[0].user), (125, Some(1000)));
        assert_eq!(host.gpus[2].timeslice, Some(TimesliceOffer { taken: 1, ..timeslice_offer(3) }));
        assert_eq!(host.gpus[3].whole, Some(WholeOffer { free: false, leased: true }));

        let mut scene = Scene::new();
        scene.gpus[3].processes.push(process());
        scene.gpus[0].mig.as_mut().unwrap().instances[1].compute[0].processes.push(process());
        let host = scene.host();
        assert_eq!(host.gpus[3].whole, Some(WholeOffer { free: false, leased: false }));
        assert!(!host.gpus[0].mig.as_ref().unwrap().instances[1].is_free());
    }

    #[test]
    fn instance_of_another_program_is_foreign_on_a_dynamic_gpu() {
        let mut scene = Scene::new();
        let wanted = |name: &str| PlacementRequest {
            share: RequestedShare::Mig(RequestedDevice::Profile(name.to_owned())),
            count: 1,
            holder: 1000,
            gpus: None,
            targets: None,
        };
        assert!(place(&scene.host(), &wanted("2g.20gb"), PlacementPolicy::Pack).is_err(), "the layout is fixed");
        let dynamic = CONFIG.replace("[\"1g.10gb*2\"]", "\"dynamic\"");
        scene.config = Config::parse(&dynamic, "gpushd.toml").unwrap();
        assert!(place(&scene.host(), &wanted("2g.20gb"), PlacementPolicy::Pack).unwrap().needs_operation());
        let uuid = scene.uuid(0);
        scene.created.insert(uuid.clone(), BTreeSet::from([Placement { start: 0, size: 1 }]));
        let assignment = place(&scene.host(), &wanted("7g.80gb"), PlacementPolicy::Pack);
        assert!(assignment.is_err(), "the instance at start 1 is foreign");
        scene.created.insert(uuid, (0..2).map(|start| Placement { start, size: 1 }).collect());
        let assignment = place(&scene.host(), &wanted("7g.80gb"), PlacementPolicy::Pack).unwrap();
        assert_eq!(assignment.destroys, [(0, 0), (0, 1)]);
    }

    #[test]
    fn gpu_that_is_not_ready_read_or_free_of_claims_is_closed() {
        let obstacle = |scene: &Scene| {
            let wanted =
                PlacementRequest { share: RequestedShare::Whole, count: 1, holder: 1000, gpus: None, targets: None };
            match place(&scene.host(), &wanted, PlacementPolicy::Pack) {
                Err(NoAssignment::Busy { obstacles, .. }) => Some(obstacles),
                Ok(_) | Err(_) => None,
            }
        };
        assert_eq!(obstacle(&Scene::new()), None);
        for state in [GpuState::Degraded, GpuState::Held, GpuState::Unknown, GpuState::Lost, GpuState::Maintenance] {
            let mut scene = Scene::new();
            scene.gpus[3].state = state;
            assert_eq!(obstacle(&scene), Some(vec![(3, Obstacle::Closed(Closed::NotReady))]), "{state:?}");
        }
        let mut scene = Scene::new();
        scene.gpus[3].compute_mode = Some(ComputeMode::Prohibited);
        assert_eq!(obstacle(&scene), Some(vec![(3, Obstacle::Closed(Closed::Prohibited))]));
        let mut scene = Scene::new();
        scene.gpus[3].processes_known = false;
        assert_eq!(obstacle(&scene), Some(vec![(3, Obstacle::Closed(Closed::NotReady))]));
        let mut scene = Scene::new();
        scene.claimed.insert(scene.uuid(3));
        assert_eq!(obstacle(&scene), Some(vec![(3, Obstacle::Closed(Closed::Claimed))]));
    }
}
