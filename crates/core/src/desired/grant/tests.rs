use std::collections::BTreeMap;

use gpush_api::{
    ComputeInstance, GpuIndex, LeaseHolder, LeaseId, LeaseKind, LeaseMember, LeaseUse, MemberShare, Process,
};
use proptest::prelude::*;

use super::*;
use crate::{
    config::Config,
    lease::placement::{Host, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, Snapshot, place},
    preset,
};

/// Who created an instance, and who uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Free,
    Leased,
    Used,
    /// The instance is leased, and another program created it.
    ForeignLeased,
    /// The instance is free, and another program created it.
    Foreign,
}

impl Owner {
    fn of(number: u8) -> Self {
        match number % 6 {
            0 | 1 => Self::Free,
            2 => Self::Leased,
            3 => Self::Used,
            4 => Self::ForeignLeased,
            _ => Self::Foreign,
        }
    }

    fn is_foreign(self) -> bool {
        matches!(self, Self::Foreign | Self::ForeignLeased)
    }

    fn is_leased(self) -> bool {
        matches!(self, Self::Leased | Self::ForeignLeased)
    }
}

/// One GPU with a dynamic layout, and the owner of each instance. `owners` uses the placement of
/// the instance as key.
#[derive(Debug, Clone)]
struct Scene {
    gpu: Gpu,
    owners: BTreeMap<Placement, Owner>,
}

impl Scene {
    /// Creates a GPU with as many instances of `wanted` as fit. Each entry of `wanted`
    /// selects a profile, a placement and an owner by number.
    fn new(preset: &str, wanted: &[(u8, u8, u8)]) -> Self {
        let mut gpu = preset::gpus(preset).unwrap().remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        (mig.enabled, mig.reset_pending) = (true, false);
        let mut scene = Self { gpu, owners: BTreeMap::new() };
        for (profile, spot, owner) in wanted {
            scene.add(usize::from(*profile), usize::from(*spot), Owner::of(*owner));
        }
        scene.settle();
        scene
    }

    /// Adds an instance if there is room for it.
    fn add(&mut self, profile: usize, spot: usize, owner: Owner) {
        let mig = self.gpu.mig.as_mut().unwrap();
        let profile = &mig.profiles[profile % mig.profiles.len()];
        let placement = profile.placements[spot % profile.placements.len()];
        let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
        let whole = geometry.profile(profile.id).and_then(|profile| profile.whole()).map(|whole| whole.profile.clone());
        let Some(whole) = whole else { return };
        let instance = GpuInstance {
            id: 10 + u32::from(placement.start) * 16 + u32::from(placement.size),
            profile_id: profile.id,
            profile: profile.name.clone(),
            placement,
            memory: None,
            compute: vec![ComputeInstance {
                id: 0,
                profile_id: whole.id,
                profile: whole.name,
                placement: None,
                uuid: Some(format!("MIG-{}-{}", profile.id, placement.start).into()),
                processes: Vec::new(),
            }],
            processes: Vec::new(),
        };
        let mut instances = mig.instances.clone();
        instances.push(instance);
        // The planner checks that slices, engines and counts suffice.
        let fits = plan::Target::of_instances(&geometry, &instances);
        if plan::plan(&geometry, &[], &fits).is_ok() {
            mig.instances = instances;
            self.owners.insert(placement, owner);
        }
    }

    /// Adds processes and leases that match the owner of each instance.
    fn settle(&mut self) {
        let mut leases = Vec::new();
        let mig = self.gpu.mig.as_mut().unwrap();
        mig.instances.sort_by_key(|instance| instance.placement);
        for instance in &mut mig.instances {
            let owner = self.owners[&instance.placement];
            let process = Process {
                pid: Some(7),
                uid: None,
                user: None,
                command: None,
                kind: gpush_api::ProcessKind::Compute,
                memory_mib: None,
                unidentified: false,
            };
            instance.compute[0].processes = if owner == Owner::Used { vec![process] } else { Vec::new() };
            if owner.is_leased() {
                leases.push(LeaseUse {
                    id: LeaseId(17),
                    target: instance.compute[0].uuid.clone().unwrap(),
                    kind: LeaseKind::Mig,
                    share: gpush_api::MemberShare::Mig { profile: "1g.10gb".to_owned() },
                    holder: LeaseHolder { uid: 1000, user: Some("alice".to_owned()) },
                    until: None,
                });
            }
        }
        self.gpu.leases = leases;
    }

    fn created(&self) -> BTreeSet<Placement> {
        self.owners.iter().filter(|(_, owner)| !owner.is_foreign()).map(|(placement, _)| *placement).collect()
    }

    fn instances(&self) -> &[GpuInstance] {
        &self.gpu.mig.as_ref().unwrap().instances
    }

    /// Makes an assignment for a request of one MIG device.
    fn place(&self, profile: &str, policy: PlacementPolicy) -> Option<Assignment> {
        let config = Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n", "c").unwrap();
        let member = |lease: &LeaseUse| LeaseMember {
            target: lease.target.clone(),
            gpu_uuid: self.gpu.uuid.clone(),
            share: MemberShare::Mig { profile: String::new() },
            memory_mib: 0,
            gpu_memory_mib: 0,
        };
        let members: Vec<LeaseMember> = self.gpu.leases.iter().map(member).collect();
        let members: Vec<(u32, &LeaseMember)> = members.iter().map(|member| (1000, member)).collect();
        let created = [(self.gpu.uuid.clone(), self.created())].into();
        let gpus = std::slice::from_ref(&self.gpu);
        let (claimed, daemons, users) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        let snapshot = Snapshot {
            config: &config,
            gpus,
            members: &members,
            claimed: &claimed,
            daemons: &daemons,
            ended: &BTreeSet::new(),
            users: &users,
            created: &created,
        };
        let share = RequestedShare::Mig(RequestedDevice::Profile(profile.to_owned()));
        let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
        place(&Host::of(&snapshot), &wanted, policy).ok().filter(Assignment::needs_operation)
    }

    /// Checks that a plan does not change instances that are in use, leased, or created by another
    /// program.
    fn check(&self, plan: &GpuPlan) {
        let after = outcome(self.instances(), &plan.instance_steps().cloned().collect::<Vec<_>>());
        for instance in self.instances() {
            let owner = self.owners[&instance.placement];
            if owner != Owner::Free {
                assert!(after.contains(instance), "{owner:?} {instance:?} does not stay: {plan:?}");
            }
        }
    }
}

const PRESETS: [&str; 3] = ["dgx-a100", "dgx-h100", "rtx-pro-6000x2"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// The plan of a new assignment creates the requested instance, destroys the instances that the
    /// assignment lists, and changes nothing else.
    #[test]
    fn grant_plan_does_exactly_what_the_assignment_lists(
        preset in 0..PRESETS.len(),
        wanted in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 0..8),
        request in any::<u8>(),
        spread in any::<bool>(),
    ) {
        let scene = Scene::new(PRESETS[preset], &wanted);
        let profiles = &scene.gpu.mig.as_ref().unwrap().profiles;
        let profile = profiles[usize::from(request) % profiles.len()].name.clone();
        let policy = if spread { PlacementPolicy::Spread } else { PlacementPolicy::Pack };
        if let Some(assignment) = scene.place(&profile, policy) {
            let plan = plan_grant(&scene.gpu, &assignment, &scene.created());
            prop_assert!(plan.error.is_none(), "{:?}", plan.error);
            scene.check(&plan);
            let destroyed: BTreeSet<(GpuIndex, u32)> = plan
                .instance_steps()
                .filter_map(|step| match step {
                    InstanceStep::DestroyGpuInstance { gi, .. } => Some((GpuIndex(0), *gi)),
                    _ => None,
                })
                .collect();
            prop_assert_eq!(destroyed, assignment.destroys.iter().copied().collect::<BTreeSet<_>>());
            let created: Vec<_> =
                plan.instance_steps().filter(|step| matches!(step, InstanceStep::CreateGpuInstance { .. })).collect();
            prop_assert_eq!(created.len(), 1);
            let layout = Layout::parse_list(&plan.layout);
            prop_assert!(layout.is_ok(), "{:?}", plan.layout);
            let after = created_after(&scene.created(), &plan);
            prop_assert_eq!(after.len(), scene.created().len() + 1 - assignment.destroys.len());
        }
    }

    /// If the GPU changes between placement and plan, the plan is refused or leaves instances in
    /// use unchanged.
    #[test]
    fn grant_plan_of_a_changed_gpu_keeps_instances_in_use(
        preset in 0..PRESETS.len(),
        wanted in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 1..8),
        request in any::<u8>(),
        changes in prop::collection::vec((any::<u8>(), any::<u8>()), 1..4),
        added in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 0..3),
        removed in prop::option::of(any::<u8>()),
    ) {
        let mut scene = Scene::new(PRESETS[preset], &wanted);
        let profiles = scene.gpu.mig.as_ref().unwrap().profiles.clone();
        let profile = profiles[usize::from(request) % profiles.len()].name.clone();
        let Some(assignment) = scene.place(&profile, PlacementPolicy::Pack) else { return Ok(()) };
        let placements: Vec<Placement> = scene.owners.keys().copied().collect();
        if let Some(placement) = removed.and_then(|n| placements.get(usize::from(n) % placements.len().max(1))) {
            scene.gpu.mig.as_mut().unwrap().instances.retain(|instance| instance.placement != *placement);
            scene.owners.remove(placement);
        }
        for (at, owner) in changes {
            let count = scene.owners.len().max(1);
            if let Some(old) = scene.owners.values_mut().nth(usize::from(at) % count) {
                *old = Owner::of(owner);
            }
        }
        for (profile, spot, owner) in added {
            scene.add(usize::from(profile), usize::from(spot), Owner::of(owner));
        }
        scene.settle();
        let plan = plan_grant(&scene.gpu, &assignment, &scene.created());
        prop_assert!(plan.error.is_none() || plan.steps.is_empty(), "a refused plan has no steps");
        scene.check(&plan);
    }
}

#[test]
fn grant_plan_names_the_lease_that_blocks_it() {
    // 7g.80gb@0 is free during placement, and leased during planning.
    let mut scene = Scene::new("dgx-a100", &[]);
    let largest =
        scene.gpu.mig.as_ref().unwrap().profiles.iter().position(|profile| profile.name == "7g.80gb").unwrap();
    scene.add(largest, 0, Owner::Free);
    scene.settle();
    let assignment = scene.place("1g.10gb", PlacementPolicy::Pack).unwrap();
    assert_eq!(assignment.destroys.len(), 1);
    *scene.owners.values_mut().next().unwrap() = Owner::Leased;
    scene.settle();
    let error = plan_grant(&scene.gpu, &assignment, &scene.created()).error.unwrap();
    assert_eq!(error.code, Code::Blocked);
    assert!(error.causes[0].contains("lease L17 of alice, without an end"), "{error:?}");
    assert!(error.retryable);
}

#[test]
fn grant_plan_never_destroys_foreign_instances() {
    let mut scene = Scene::new("dgx-a100", &[]);
    let largest =
        scene.gpu.mig.as_ref().unwrap().profiles.iter().position(|profile| profile.name == "7g.80gb").unwrap();
    scene.add(largest, 0, Owner::Free);
    scene.settle();
    let assignment = scene.place("1g.10gb", PlacementPolicy::Pack).unwrap();
    let plan = plan_grant(&scene.gpu, &assignment, &BTreeSet::new());
    assert!(plan.steps.is_empty());
    assert!(plan.error.unwrap().causes[0].starts_with("another program created 7g.80gb@0"));
}
