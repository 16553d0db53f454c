//! Plans in the form that users read: the current instances, the requested ones, and the steps.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use std::fmt::Write;

use gpush_api::{ComputeInstance, GpuInstance, InstanceStep, Placement, Process, ProcessKind, Refusal};
use gpush_core::geometry::{Geometry, profiles_of_model};
use gpush_core::layout::Layout;
use gpush_core::plan::{
    Plan, ProtectedInstances, Target, exact_layout, foreign_instances, outcome, partial_restore, plan, plan_protecting,
};

fn geometry(key: &str) -> Geometry {
    Geometry::of_model(&gpush_geometry::model(key).unwrap())
}

fn resolve(geometry: &Geometry, layout: &str) -> Target {
    Target::resolve(geometry, &Layout::parse(layout).unwrap()).unwrap()
}

/// Returns the instances that a layout creates on an empty GPU. The ids start at 1.
fn standing(geometry: &Geometry, layout: &str) -> Vec<GpuInstance> {
    let plan = plan(geometry, &[], &resolve(geometry, layout)).unwrap();
    let mut instances: Vec<GpuInstance> = Vec::new();
    for step in plan.steps {
        match step {
            InstanceStep::CreateGpuInstance { profile, profile_id, placement } => instances.push(GpuInstance {
                id: 1 + instances.len() as u32,
                profile_id,
                profile,
                placement,
                memory: None,
                compute: Vec::new(),
                processes: Vec::new(),
            }),
            InstanceStep::CreateCompute { gi_placement, profile, profile_id, placement } => {
                let gi = instances.iter_mut().find(|i| i.placement == gi_placement).unwrap();
                let only = || geometry.profile(gi.profile_id).unwrap().compute(profile_id).unwrap().spots[0].placement;
                let placement = Some(placement.unwrap_or_else(only));
                let id = gi.compute.len() as u32;
                gi.compute.push(ComputeInstance {
                    id,
                    profile_id,
                    profile,
                    placement,
                    uuid: None,
                    processes: Vec::new(),
                });
            }
            InstanceStep::DestroyCompute { .. } | InstanceStep::DestroyGpuInstance { .. } => {
                unreachable!("nothing stood")
            }
        }
    }
    instances
}

fn process() -> Process {
    Process {
        pid: Some(4711),
        uid: None,
        user: None,
        command: None,
        kind: ProcessKind::Compute,
        memory_mib: None,
        unidentified: false,
    }
}

fn text(plan: &Plan) -> String {
    let at = |p: &Placement| format!("{}:{}", p.start, p.size);
    let mut text = format!("keeps {:?}\n", plan.keeps);
    for step in &plan.steps {
        let line = match step {
            InstanceStep::DestroyCompute { gi, ci, profile, .. } => format!("- CI {gi}/{ci} {profile}"),
            InstanceStep::DestroyGpuInstance { gi, profile, placement } => {
                format!("- GI {gi} {profile} {}", at(placement))
            }
            InstanceStep::CreateGpuInstance { profile, placement, .. } => format!("+ GI {profile} {}", at(placement)),
            InstanceStep::CreateCompute { gi_placement, profile, placement, .. } => {
                let place = placement.as_ref().map_or_else(|| "any".to_owned(), at);
                format!("+ CI {profile} {place} in {}", at(gi_placement))
            }
        };
        writeln!(text, "  {line}").unwrap();
    }
    text
}

#[test]
fn plans_have_the_expected_text() {
    let cases = [
        ("a100-80", "none", "3g.40gb, 2g.20gb, 1g.10gb*2"),
        ("a100-80", "7g.80gb", "3g.40gb, 2g.20gb, 1g.10gb"),
        ("a100-80", "3g.40gb, 2g.20gb, 1g.10gb", "3g.40gb, 2g.20gb, 1g.10gb"),
        ("a100-80", "3g.40gb, 2g.20gb, 1g.10gb", "none"),
        ("a100-80", "1g.10gb*7", "3g.40gb, 1g.10gb*3"),
        ("a100-80", "1g.10gb*7", "3g.40gb@0, 1g.10gb*3"),
        ("a100-80", "2g.20gb@2, 1g.10gb@6", "4g.40gb, 2g.20gb"),
        ("a100-80", "3g.40gb@4", "1c.3g.40gb*3"),
        ("a100-80", "1c.3g.40gb@4, 2c.3g.40gb@4", "1c.3g.40gb*3"),
        ("a100-80", "3g.40gb, 3g.40gb", "1c.3g.40gb*2, 2c.3g.40gb*2"),
        ("h100-80-sxm", "none", "1c.7g.80gb, 2c.7g.80gb, 4c.7g.80gb"),
        ("h100-80-sxm", "none", "3c.7g.80gb*2"),
        ("h100-80-sxm", "1g.20gb*2", "1c.1g.20gb*2, 1g.20gb"),
        ("a30-24", "none", "2g.12gb+me, 1c.2g.12gb*2"),
        ("rtxpro6000-96", "1g.24gb*4", "1g.24gb+me.all, 1g.24gb-me*2"),
    ];
    let mut texts = String::new();
    for (key, before, after) in cases {
        let geometry = geometry(key);
        let plan = plan(&geometry, &standing(&geometry, before), &resolve(&geometry, after)).unwrap();
        writeln!(texts, "{key}: {before} -> {after}\n{}", text(&plan)).unwrap();
    }
    insta::assert_snapshot!(texts);
}

/// On Hopper and newer GPUs, a `1g` GPU instance with double memory offers two compute profiles.
/// Each of the two names selects one profile.
#[test]
fn double_memory_names_mean_different_compute_profiles() {
    let ids = |key: &str, layout: &str| -> Vec<Vec<u32>> {
        let target = resolve(&geometry(key), layout);
        target.instances.iter().map(|i| i.compute.iter().map(|c| c.profile_id).collect()).collect()
    };
    assert_eq!(ids("h100-80-sxm", "1g.20gb, 1c.1g.20gb"), [[7], [0]]);
    // A `1g` GPU instance never has room for two compute instances `1c.1g.20gb`.
    assert_eq!(ids("h100-80-sxm", "1c.1g.20gb*2"), [[0], [0]]);
    // Before Hopper, a `1g` GPU instance with double memory has only one compute profile, and both
    // names select it.
    assert_eq!(ids("a100-80", "1g.20gb, 1c.1g.20gb"), [[0], [0]]);
    assert_eq!(ids("h100-80-sxm", "1c.1g.10gb, 3c.3g.40gb"), [[0], [2]]);
}

/// mig-parted and the DRA driver create compute profile 0 in a `1g` with double memory.
#[test]
fn double_memory_instances_are_kept_by_their_own_name_only() {
    let h100 = geometry("h100-80-sxm");
    for (there, other) in [("1c.1g.20gb", "1g.20gb"), ("1g.20gb", "1c.1g.20gb")] {
        let mut instances = standing(&h100, &format!("{there}*4"));
        assert_eq!(exact_layout(&instances)[0], format!("{there}@0"));
        // The instances are in use. The target requests these instances by their own name, at any
        // placement, so the plan has no steps.
        instances.iter_mut().for_each(|i| i.compute[0].processes.push(process()));
        for layout in [format!("{there}*4"), format!("{there}@6,{there}@2,{there}*2")] {
            assert_eq!(text(&plan(&h100, &instances, &resolve(&h100, &layout)).unwrap()), "keeps [1, 2, 3, 4]\n");
        }
        let exact = Layout::parse_list(&exact_layout(&instances)).unwrap();
        assert!(plan(&h100, &instances, &Target::resolve(&h100, &exact).unwrap()).unwrap().steps.is_empty());
        // The target requests one of the four instances by the other name. If all four are in use,
        // the plan is blocked. If one is idle, it is replaced within its GPU instance.
        let target = resolve(&h100, &format!("{other}, {there}*3"));
        assert!(matches!(plan(&h100, &instances, &target), Err(Refusal::Blocked { blockers }) if blockers.len() == 1));
        instances[2].compute[0].processes.clear();
        let steps = format!("keeps [1, 2, 3, 4]\n  - CI 3/0 {there}\n  + CI {other} any in 4:2\n");
        assert_eq!(text(&plan(&h100, &instances, &target).unwrap()), steps);
    }
}

#[test]
fn packing_uses_fewest_gpu_instances() {
    let geometry = geometry("a100-80");
    let packed = |layout: &str| -> Vec<Vec<String>> {
        let target = resolve(&geometry, layout);
        target.instances.iter().map(|i| i.compute.iter().map(|c| c.profile.clone()).collect()).collect()
    };
    assert_eq!(packed("1c.3g.40gb*3"), [["1c.3g.40gb"; 3]]);
    assert_eq!(packed("1c.3g.40gb*4"), [vec!["1c.3g.40gb"; 3], vec!["1c.3g.40gb"]]);
    // First fit alone would need a third GPU instance, but only two fit on the GPU.
    assert_eq!(packed("1c.3g.40gb*2, 2c.3g.40gb*2"), [["1c.3g.40gb", "2c.3g.40gb"]; 2]);
    // Entries with different starts are in different GPU instances. A compute instance that
    // occupies a whole GPU instance does not share this GPU instance.
    assert_eq!(packed("1c.3g.40gb@0, 1c.3g.40gb@4").len(), 2);
    assert_eq!(packed("3c.3g.40gb, 1c.3g.40gb"), [["3g.40gb"], ["1c.3g.40gb"]]);
    // The target has the order of the layout.
    let target = resolve(&geometry, "2g.20gb, 1c.3g.40gb, 1g.10gb, 2c.3g.40gb");
    assert_eq!(
        target.instances.iter().map(|i| i.profile.as_str()).collect::<Vec<_>>(),
        ["2g.20gb", "3g.40gb", "1g.10gb"]
    );
}

#[test]
fn gpu_instance_without_ci_gets_one_in_place() {
    let geometry = geometry("a100-80");
    let mut bare = standing(&geometry, "3g.40gb@4");
    bare[0].compute.clear();
    let plan = plan(&geometry, &bare, &resolve(&geometry, "3g.40gb")).unwrap();
    assert_eq!(text(&plan), "keeps [1]\n  + CI 3g.40gb any in 4:4\n");
}

#[test]
fn instances_with_mps_daemon_are_kept_even_at_higher_cost() {
    let geometry = geometry("a100-80");
    let instances = standing(&geometry, "3g.40gb@0, 1g.10gb@4, 1g.10gb@6");
    let target = resolve(&geometry, "3g.40gb@4");
    // The 3g.40gb cannot be kept, so the planner destroys it even if it has an MPS daemon.
    let with_daemon = |gi: usize| {
        let uuid = format!("MIG-{gi}");
        let mut instances = instances.clone();
        instances[gi - 1].compute[0].uuid = Some(uuid.clone().into());
        ProtectedInstances::default().with_mps_daemons(&instances, &[uuid.into()].into())
    };
    assert!(plan_protecting(&geometry, &instances, &target, &with_daemon(1)).is_ok());

    // One of the two small instances must be destroyed. If neither has an MPS daemon, the planner
    // keeps the instance that leaves more room.
    let target = resolve(&geometry, "4g.40gb, 1g.10gb");
    assert_eq!(plan(&geometry, &instances, &target).unwrap().keeps, [3]);
    for gi in [3, 2] {
        let plan = plan_protecting(&geometry, &instances, &target, &with_daemon(gi)).unwrap();
        assert_eq!(plan.keeps, [u32::try_from(gi).unwrap()]);
    }
}

#[test]
fn foreign_instances_occupy_slices_and_go_when_idle() {
    let model = gpush_geometry::model("a100-80").unwrap();
    let all = Geometry::of_model(&model);
    let without_2g: Vec<_> = profiles_of_model(&model).into_iter().filter(|p| p.name != "2g.20gb").collect();
    let geometry = Geometry::new(&without_2g, model.memory_slices, model.compute_slices);
    let mut instances = standing(&all, "2g.20gb@0, 1g.10gb@6");

    let exact = Target::of_instances(&geometry, &instances);
    assert!(plan(&geometry, &instances, &exact).unwrap().steps.is_empty());
    let target = resolve(&geometry, "1g.10gb");
    let away = plan(&geometry, &instances, &target).unwrap();
    assert_eq!(text(&away), "keeps [2]\n  - CI 1/0 2g.20gb\n  - GI 1 2g.20gb 0:2\n");
    // The instance can be created again by its profile id, at its placement.
    let back = plan(&geometry, &instances[1..], &exact).unwrap();
    assert_eq!(text(&back), "keeps [2]\n  + GI 2g.20gb 0:2\n  + CI 2g.20gb 0:2 in 0:2\n");

    instances[0].compute[0].processes.push(process());
    let refusal = plan(&geometry, &instances, &target).unwrap_err();
    assert!(matches!(refusal, Refusal::Blocked { blockers } if blockers.len() == 1 && blockers[0].gi == 1));
}

#[test]
fn driver_without_ci_placements_gets_none() {
    let geometry = geometry("a100-80");
    let mut instances = standing(&geometry, "1c.3g.40gb*2, 2g.20gb");
    for compute in instances.iter_mut().flat_map(|i| &mut i.compute) {
        compute.placement = None;
    }
    let same = resolve(&geometry, "1c.3g.40gb*2, 2g.20gb");
    assert!(plan(&geometry, &instances, &same).unwrap().steps.is_empty());
    let one_more = plan(&geometry, &instances, &resolve(&geometry, "1c.3g.40gb*3, 2g.20gb")).unwrap();
    assert!(text(&one_more).ends_with("\n  + CI 1c.3g.40gb any in 4:4\n"), "{}", text(&one_more));
    let exact = Target::of_instances(&geometry, &instances);
    assert!(plan(&geometry, &instances, &exact).unwrap().steps.is_empty());

    // An instance can also be created again if the driver has not reported the placements of its
    // profile.
    let model = gpush_geometry::model("a100-80").unwrap();
    let mut bare = profiles_of_model(&model);
    bare.iter_mut().flat_map(|p| &mut p.compute).for_each(|c| c.placements.clear());
    let bare = Geometry::new(&bare, model.memory_slices, model.compute_slices);
    let split = plan(&bare, &[], &resolve(&bare, "2c.3g.40gb, 1c.3g.40gb")).unwrap();
    let steps = "  + GI 3g.40gb 4:4\n  + CI 2c.3g.40gb any in 4:4\n  + CI 1c.3g.40gb any in 4:4\n";
    assert_eq!(text(&split), format!("keeps []\n{steps}"));
}

#[test]
fn ci_with_more_slots_than_expected_is_kept() {
    let geometry = geometry("a100-80");
    let mut instances = standing(&geometry, "3c.7g.80gb*2");
    for compute in &mut instances[0].compute {
        compute.placement.as_mut().unwrap().size = 4;
    }
    let same = plan(&geometry, &instances, &resolve(&geometry, "3c.7g.80gb*2")).unwrap();
    assert!(same.steps.is_empty(), "{}", text(&same));
}

#[test]
fn impossible_states_and_figures_never_panic() {
    let geometry = geometry("a100-80");
    let mut instances = Vec::new();
    for n in 0..500_u32 {
        let mut odd = standing(&geometry, "7g.80gb");
        odd[0].id = n % 7;
        odd[0].placement = Placement { start: (n % 256) as u8, size: 255 - (n % 200) as u8 };
        odd[0].profile_id = n % 30;
        instances.extend(odd);
    }
    let plan_of_mess = plan(&geometry, &instances, &resolve(&geometry, "1g.10gb*7")).unwrap();
    assert_eq!(plan_of_mess.placements.len(), 7);
    let exact = Target::of_instances(&geometry, &instances);
    assert!(plan(&geometry, &instances, &exact).is_err());

    let empty = Geometry::new(&[], 0, 0);
    assert!(plan(&empty, &[], &Target::default()).unwrap().steps.is_empty());
    assert!(plan(&empty, &[], &resolve(&geometry, "7g.80gb")).is_err());
    assert!(Target::resolve(&empty, &Layout::parse("1g.10gb").unwrap()).is_err());
    // These layouts are larger than the grammar allows, but the planner can handle them.
    for (entry, count) in [("1c.3g.40gb*8", 40), ("1g.10gb*8", 200)] {
        let entries = vec![Layout::parse(entry).unwrap().entries.remove(0); count];
        assert!(Target::resolve(&geometry, &Layout { entries }).is_err(), "{entry}");
    }
}

const LAYOUTS: [&str; 8] = [
    "2g.20gb,1g.10gb*2,3g.40gb",
    "3g.40gb*2",
    "1g.10gb*7",
    "7g.80gb",
    "1c.3g.40gb*3,4g.40gb",
    "1c.3g.40gb,2c.3g.40gb",
    "1g.10gb+me,2g.20gb*3",
    "none",
];

#[test]
fn previous_layout_is_restored_around_instances_in_use() {
    let a100 = geometry("a100-80");
    let (mut tried, mut whole) = (0, 0);
    for (before, now) in LAYOUTS.iter().flat_map(|before| LAYOUTS.map(|now| (*before, now))) {
        let previous = standing(&a100, before);
        let count: usize = standing(&a100, now).iter().map(|i| i.compute.len()).sum();
        // Tries each subset of the compute instances as the instances in use.
        for users in 0..1_u32 << count {
            let mut instances = standing(&a100, now);
            for (n, compute) in instances.iter_mut().flat_map(|i| &mut i.compute).enumerate() {
                compute.processes.extend((users & (1 << n) != 0).then(process));
            }
            let found = partial_restore(&a100, &instances, &previous, |_| false);
            let plan = plan(&a100, &instances, &found.target).unwrap();
            for step in &plan.steps {
                let destroyed = |gi: u32, ci: Option<u32>| {
                    let in_it = instances.iter().filter(|i| i.id == gi).flat_map(|i| &i.compute);
                    let busy = in_it.filter(|c| ci.is_none_or(|ci| c.id == ci)).any(|c| !c.processes.is_empty());
                    assert!(!busy, "{before} after {now}, users {users:b}: {step:?}");
                };
                match step {
                    InstanceStep::DestroyCompute { gi, ci, .. } => destroyed(*gi, Some(*ci)),
                    InstanceStep::DestroyGpuInstance { gi, .. } => destroyed(*gi, None),
                    InstanceStep::CreateGpuInstance { .. } | InstanceStep::CreateCompute { .. } => {}
                }
            }
            for missing in &found.missing {
                assert!(!missing.behind.is_empty(), "{missing:?}");
                let named = |at| found.stays.iter().any(|s| s.placement == at);
                assert!(missing.behind.iter().any(|at| named(*at)), "{before} after {now}: {found:?}");
            }
            if found.stays.is_empty() {
                assert_eq!(found.missing, []);
                assert_eq!(found.target.instances.len(), previous.len());
                whole += 1;
            }
            tried += 1;
        }
    }
    assert!(whole > LAYOUTS.len() * LAYOUTS.len());
    println!("{tried} ways back, {whole} of them whole");
}

#[test]
fn only_cis_in_use_stay_in_a_previous_gpu_instance() {
    let a100 = geometry("a100-80");
    let previous = standing(&a100, "1c.3g.40gb*3");
    let mut now = standing(&a100, "1c.3g.40gb,2c.3g.40gb");
    let small = now[0].compute.iter().position(|c| c.profile.starts_with("1c.")).unwrap();
    now[0].compute[small].processes.push(process());
    let found = partial_restore(&a100, &now, &previous, |_| false);
    assert_eq!((found.stays, found.missing), (Vec::new(), Vec::new()), "it is one of the three");
    assert_eq!(found.target.instances[0].compute.len(), 3);
    // The larger instance overlaps two of the three previous instances.
    now[0].compute[small].processes.clear();
    now[0].compute[1 - small].processes.push(process());
    let found = partial_restore(&a100, &now, &previous, |_| false);
    assert_eq!((found.stays.len(), found.missing.len()), (1, 2), "{found:?}");
    // An untouchable instance does not change.
    let found = partial_restore(&a100, &now, &previous, |_| true);
    assert_eq!(found.target.instances[0].compute.len(), 2, "{found:?}");
}

#[test]
fn foreign_instances_are_recognised_at_every_step() {
    let a100 = geometry("a100-80");
    let (mut states, mut found) = (0, 0);
    for (before, after) in LAYOUTS.iter().flat_map(|before| LAYOUTS.map(|after| (*before, after))) {
        let previous = standing(&a100, before);
        let steps = plan(&a100, &previous, &resolve(&a100, after)).unwrap().steps;
        let end = outcome(&previous, &steps);
        // A plan from any intermediate state leads to the same placements as the first plan.
        let pinned = Target::resolve(&a100, &Layout::parse_list(&exact_layout(&end)).unwrap()).unwrap();
        for taken in 0..=steps.len() {
            let now = outcome(&previous, &steps[..taken]);
            assert_eq!(foreign_instances(&now, &previous, &end), [].into(), "{before} to {after}, {taken} steps");
            let rest = plan(&a100, &now, &pinned).unwrap().steps;
            let shape = |instances: &[GpuInstance]| {
                let mut shape: Vec<_> = instances.iter().map(|i| (i.placement, i.profile_id)).collect();
                shape.sort_unstable();
                shape
            };
            assert_eq!(shape(&outcome(&now, &rest)), shape(&end), "{before} to {after}, {taken} steps");
            if taken == steps.len() {
                assert_eq!(rest, [], "{before} to {after}");
            }
            // An instance that another program creates is recognized as foreign.
            for layout in LAYOUTS {
                for mut other in standing(&a100, layout) {
                    other.id = 77;
                    let known =
                        |one: &GpuInstance| (one.profile_id, one.placement) == (other.profile_id, other.placement);
                    if !previous.iter().chain(&end).any(known) {
                        assert_eq!(
                            foreign_instances(&[now.clone(), vec![other]].concat(), &previous, &end),
                            [77].into()
                        );
                        found += 1;
                    }
                }
            }
            states += 1;
        }
    }
    println!("{states} states, {found} instances of others");
}

#[test]
fn foreign_ci_makes_its_gpu_instance_foreign() {
    let a100 = geometry("a100-80");
    let previous = standing(&a100, "1c.3g.40gb*3");
    let end = standing(&a100, "none");
    let mut now = previous.clone();
    now[0].compute.pop();
    assert_eq!(foreign_instances(&now, &previous, &end), [].into());
    now[0].compute = standing(&a100, "3g.40gb").remove(0).compute;
    assert_eq!(foreign_instances(&now, &previous, &end), [now[0].id].into());
}
