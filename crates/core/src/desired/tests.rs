use std::fmt::Write as _;

use gpush_api::{
    ApiError, Architecture, Code, ComputeInstance, ComputeMode, Gpu, GpuIndex, GpuInstance, GpuLayout, GpuPlan,
    GpuState, InstanceStep, LayoutSource, Mode, Placement, PlanRequest, Process, ProcessKind, Refusal,
};
use proptest::prelude::*;

use super::*;
use crate::{layout::Layout, preset};

mod carried_out;
mod drifts;
mod leased;
mod overridden;
mod requests;
mod switched;
mod whole;

const CONFIG: &str = r#"
[layouts]
halves = ["3g.40gb*2"]

[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = "halves"

[[gpu]]
match = ["0-2"]
mode = "mig"
layout = ["3g.40gb", "1c.3g.40gb*3"]

[[gpu]]
match = ["3"]
mode = "exclusive"

[[gpu]]
match = ["4"]
mode = "unmanaged"

[[gpu]]
match = ["5"]
mode = "mig"
layout = "none"
"#;

fn config() -> Config {
    Config::parse(CONFIG, "config.toml").unwrap_or_else(|e| panic!("{e}"))
}

fn host() -> Vec<Gpu> {
    preset::gpus("dgx-a100").unwrap()
}

fn request(gpus: &[&str], layout: LayoutSource) -> PlanRequest {
    PlanRequest { gpus: gpus.iter().map(|s| (*s).to_owned()).collect(), layout }
}

fn entries(text: &str) -> LayoutSource {
    LayoutSource::Entries(vec![text.to_owned()])
}

fn process(pid: u32) -> Process {
    Process {
        pid: Some(pid),
        uid: Some(1000),
        user: Some("ada".to_owned()),
        command: Some("python train.py".to_owned()),
        kind: ProcessKind::Compute,
        memory_mib: Some(512),
        unidentified: false,
    }
}

/// Returns a GPU instance as the driver would report it. `compute` lists its compute instances. If
/// the list is empty, one compute instance occupies the whole GPU instance.
fn instance(gpu: &Gpu, id: u32, profile: &str, start: u8, compute: &[&str]) -> GpuInstance {
    let of = gpu.mig.as_ref().unwrap().profiles.iter().find(|p| p.name == profile).unwrap();
    let compute = if compute.is_empty() { &[profile][..] } else { compute };
    GpuInstance {
        id,
        profile_id: of.id,
        profile: profile.to_owned(),
        placement: *of.placements.iter().find(|p| p.start == start).unwrap(),
        memory: None,
        compute: (0..)
            .zip(compute)
            .map(|(id, name)| ComputeInstance {
                id,
                profile_id: of.compute.iter().find(|c| c.name == *name).unwrap().id,
                profile: (*name).to_owned(),
                placement: None,
                uuid: None,
                processes: Vec::new(),
            })
            .collect(),
        processes: Vec::new(),
    }
}

fn set(gpu: &mut Gpu, instances: &[(&str, u8, &[&str])]) {
    let made = (1..).zip(instances).map(|(id, (p, start, c))| instance(gpu, id, p, *start, c)).collect();
    gpu.mig.as_mut().unwrap().instances = made;
}

fn one(config: &Config, gpus: &[Gpu], request: &PlanRequest) -> GpuPlan {
    let mut plans = plan_host(config, gpus, request).unwrap_or_else(|e| panic!("{e:?}")).plans;
    assert_eq!(plans.len(), 1);
    plans.remove(0)
}

/// Applies a plan to the data of a GPU.
fn carry_out(gpu: &mut Gpu, plan: &GpuPlan) {
    let profiles = gpu.mig.as_ref().unwrap().profiles.clone();
    let mig = gpu.mig.as_mut().unwrap();
    for step in plan.instance_steps() {
        match step {
            InstanceStep::DestroyCompute { gi, ci, .. } => {
                let instance = mig.instances.iter_mut().find(|i| i.id == *gi).unwrap();
                instance.compute.retain(|c| c.id != *ci);
            }
            InstanceStep::DestroyGpuInstance { gi, .. } => mig.instances.retain(|i| i.id != *gi),
            InstanceStep::CreateGpuInstance { profile, profile_id, placement } => {
                let id = (1..).find(|id| mig.instances.iter().all(|i| i.id != *id)).unwrap();
                mig.instances.push(GpuInstance {
                    id,
                    profile_id: *profile_id,
                    profile: profile.clone(),
                    placement: *placement,
                    memory: None,
                    compute: Vec::new(),
                    processes: Vec::new(),
                });
            }
            InstanceStep::CreateCompute { gi_placement, profile, placement, .. } => {
                let instance = mig.instances.iter_mut().find(|i| i.placement == *gi_placement).unwrap();
                let of = profiles.iter().find(|p| p.id == instance.profile_id).unwrap();
                let id = (0..).find(|id| instance.compute.iter().all(|c| c.id != *id)).unwrap();
                instance.compute.push(ComputeInstance {
                    id,
                    profile_id: of.compute.iter().find(|c| c.name == *profile).unwrap().id,
                    profile: profile.clone(),
                    placement: *placement,
                    uuid: None,
                    processes: Vec::new(),
                });
            }
        }
    }
    mig.instances.sort_by_key(|i| i.placement);
}

fn any_layout() -> impl Strategy<Value = String> {
    let entry = prop::sample::select(vec![
        "1g.10gb",
        "1g.10gb+me",
        "1g.20gb",
        "2g.20gb",
        "3g.40gb",
        "4g.40gb",
        "7g.80gb",
        "1c.2g.20gb*2",
        "1c.3g.40gb*3",
        "2c.3g.40gb",
        "1c.7g.80gb*7",
        "1g.10gb@4",
        "3g.40gb@0",
        "2g.20gb@2",
    ]);
    prop::collection::vec(entry, 0..4).prop_map(|entries| match entries.len() {
        0 => "none".to_owned(),
        _ => entries.join(","),
    })
}

#[test]
fn first_matching_rule_claims_a_gpu() {
    let host = host();
    let claimed = claims(&config(), &host);
    assert_eq!(claimed, [Some(0), Some(0), Some(1), Some(2), Some(3), Some(4), None, None]);
    let desired_states = desired_states(&config(), &host);
    assert_eq!(desired_states[0].rule.as_deref(), Some("training"));
    assert_eq!(desired_states[2].rule.as_deref(), Some("rule 2"));
    assert_eq!(desired_states[2].layout.as_ref().unwrap().to_string(), "3g.40gb,1c.3g.40gb*3");
    assert_eq!((desired_states[3].mode, &desired_states[3].layout), (Mode::Exclusive, &None));
    assert_eq!((desired_states[7].mode, &desired_states[7].rule), (Mode::NoRule, &None));
}

#[test]
fn config_view_lists_claims() {
    let view = config().view(Some("config.toml"), &host());
    let claims: Vec<Vec<GpuIndex>> = view.rules.iter().map(|rule| rule.claims.clone()).collect();
    assert_eq!(claims, [vec![0, 1], vec![2], vec![3], vec![4], vec![5]]);
    assert_eq!(view.rules[0].layout.as_deref(), Some(&["halves".to_owned()][..]));
    assert_eq!(view.layouts[0].entries, ["3g.40gb*2"]);
    assert_eq!(Config::parse(&view.effective, "effective").unwrap(), config());
}

#[test]
fn findings_name_unused_selectors() {
    let text = r#"
[[gpu]]
name = "all of it"
match = ["*A100*"]
mode = "unmanaged"
[[gpu]]
match = ["0", "*H100*", "9", "GPU-00000000", "07:00.0"]
mode = "unmanaged"
"#;
    let config = Config::parse(text, "config.toml").unwrap();
    assert_eq!(
        super::findings::remarks(&config, &host()),
        [
            "rule 2: `*h100*` matches no GPU of this host",
            "rule 2: `9` matches no GPU of this host",
            "rule 2: `GPU-00000000` is the beginning of several UUIDs, so it claims no GPU",
            "rule 2 claims no GPU: earlier rules claim all GPUs that it matches",
        ]
    );
    assert!(super::findings::remarks(&Config::default(), &host()).is_empty());
    let turns = |timeslice: &str| {
        let text = format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = {{ {timeslice} }}\n");
        let mut host = host();
        host[0].architecture = Architecture::Volta;
        super::findings::remarks(&Config::parse(&text, "config.toml").unwrap(), &host)
    };
    assert!(turns("replicas = 1000").is_empty() && turns("compute_mode = \"exclusive_process\"").is_empty());
    let admits_none = turns("replicas = 4, compute_mode = \"prohibited\"");
    assert_eq!(
        admits_none,
        ["rule 1: compute mode `prohibited` allows no process, but the rule allows 4 holders at a time"]
    );
    let text = "[[quota]]\neverybody = true\ngpus = [\"0-9\", \"*H100*\"]\n";
    let quotas = super::findings::remarks(&Config::parse(text, "config.toml").unwrap(), &host());
    let absent = "quota 1: `0-9` contains GPU 8, which this host does not have";
    assert_eq!(quotas, [absent, "quota 1: `*h100*` matches no GPU of this host"]);
    assert!(turns("level = \"long\"")[0].contains("is older than Turing"));
}

/// Fault: a price for a model that the host does not have made a bill of 0, without a warning.
#[test]
fn price_for_an_absent_model_is_a_finding() {
    let gpus = host();
    let findings = |model: &str| {
        let text = format!("[[price]]\nper_slice_hour = 0.25\ncurrency = \"EUR\"\nmodel = \"{model}\"\n");
        super::findings::remarks(&Config::parse(&text, "config.toml").unwrap(), &gpus)
    };
    let name = gpus[0].name.clone();
    assert_eq!(findings(&name), [""; 0]);
    assert_eq!(findings(&name.trim_start_matches("NVIDIA ").to_lowercase()), [""; 0], "as gpushctl prints it");
    let absent = findings("T4");
    assert!(
        absent[0].starts_with("price 1: no GPU of this host has the model `T4`; write model = \"NVIDIA "),
        "{absent:?}"
    );
}

#[test]
fn plan_enables_mig_mode_that_is_off() {
    let off = |preset: &str, change: &dyn Fn(&mut Gpu)| {
        let mut gpu = preset::gpus(preset).unwrap().remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(false, false);
        change(&mut gpu);
        let layout = if preset == "rtx-pro-6000x2" { "4g.96gb" } else { "1g.10gb*7" };
        let layout = if preset == "dgx-b200" { "7g.180gb" } else { layout };
        (one(&Config::default(), &[gpu.clone()], &request(&["0"], entries(layout))), gpu)
    };
    for preset in ["dgx-h100", "dgx-b200", "rtx-pro-6000x2"] {
        let (plan, gpu) = off(preset, &|_| {});
        assert!(
            plan.mig_mode() == Some(true) && plan.refusal.is_none() && plan.instance_steps().count() > 0,
            "{preset}"
        );
        assert_eq!(plan.reset(), None, "{preset}");
        assert!(matches!(gpu.architecture, Architecture::Hopper | Architecture::Blackwell));
    }
    let (plan, _) = off("dgx-a100", &|_| {});
    assert!(
        plan.mig_mode() == Some(true)
            && plan.reset().is_some()
            && plan.instance_steps().count() > 0
            && plan.error.is_none()
    );
    // The mode change is already pending. The plan has the same steps as without a pending change.
    let (plan, _) = off("dgx-a100", &|gpu| gpu.mig.as_mut().unwrap().reset_pending = true);
    assert!(plan.mig_mode() == Some(true) && plan.reset().is_some() && plan.error.is_none());
    let (plan, _) = off("dgx-h100", &|gpu| gpu.mig.as_mut().unwrap().reset_pending = true);
    assert!(
        plan.mig_mode() == Some(true) && plan.reset().is_some(),
        "a mode that hangs in the air takes a reset everywhere"
    );
    let (plan, _) = off("dgx-h100", &|gpu| gpu.processes.push(process(4711)));
    assert!(matches!(&plan.refusal, Some(Refusal::Held { holders, .. }) if holders.len() == 1));
    let error = plan.error.unwrap();
    assert_eq!((error.code, error.causes), (Code::Blocked, vec!["held by pid 4711 (ada, python train.py)".to_owned()]));
    assert!(plan.steps.is_empty());
    // A layout that is impossible on the GPU is reported as impossible, whether MIG mode is on or
    // off.
    let mut gpu = host().remove(0);
    gpu.mig.as_mut().unwrap().enabled = false;
    let plan = one(&Config::default(), &[gpu.clone()], &request(&["0"], entries("7g.80gb*2")));
    assert!(matches!(plan.refusal, Some(Refusal::TooMany { .. })), "{:?}", plan.refusal);
    // A GPU with MIG mode off and no desired instances needs no change.
    gpu.mig.as_mut().unwrap().set_mode(false, false);
    let plan = one(&Config::default(), &[gpu], &request(&["0"], LayoutSource::Named("none".to_owned())));
    assert!(plan.refusal.is_none() && plan.is_empty());
}

#[test]
fn mig_off_follows_instances_and_resets_ampere_only() {
    let whole = |gpus: &[Gpu], config: &str| {
        let each = vec![GpuLayout { gpu: "0".to_owned(), mig: false, layout: Vec::new() }];
        let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
        plan_host(&Config::parse(config, "test").unwrap(), gpus, &request).map(|mut plans| plans.plans.remove(0))
    };
    for (preset, reset) in [("dgx-a100", true), ("a30x4", true), ("dgx-h100", false), ("dgx-b200", false)] {
        let gpus = preset::gpus(preset).unwrap();
        let plan = whole(&gpus, "").unwrap();
        assert!(plan.mig_mode() == Some(false) && plan.error.is_none(), "{preset}: {plan:?}");
        assert_eq!(plan.reset().is_some(), reset, "{preset}");
    }
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    let services = "[mode_change]\nservices = [\"nvidia-dcgm\"]\nbefore = \"/x/y\"\n";
    let plan = whole(&gpus, services).unwrap();
    assert_eq!((plan.services, plan.hooks), (vec!["nvidia-dcgm".to_owned()], vec!["/x/y".to_owned()]));
    // MIG mode is off, and turning MIG mode on is pending. The pending change can be cancelled
    // without a reset.
    let pending = |gpu: &mut Gpu, enabled, pending| {
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(enabled, pending);
    };
    pending(&mut gpus[0], false, true);
    let plan = whole(&gpus, "").unwrap();
    assert!(plan.mig_mode() == Some(false) && plan.reset().is_none());
    pending(&mut gpus[0], false, false);
    let plan = whole(&gpus, "").unwrap();
    assert!(plan.is_empty() && plan.error.is_none());
    pending(&mut gpus[0], true, true);
    gpus[0].processes.push(process(4711));
    let plan = whole(&gpus, "").unwrap();
    assert!(plan.mig_mode() != Some(false) && matches!(plan.refusal, Some(Refusal::Held { .. })));
    // A GPU whose rule has mode `unmanaged` is not changed.
    gpus[0].processes.clear();
    let unmanaged = "[[gpu]]\nmatch = [\"0\"]\nmode = \"unmanaged\"\n";
    assert_eq!(whole(&gpus, unmanaged).unwrap_err().code, Code::Conflict);
    let exclusive = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n";
    assert!(whole(&gpus, exclusive).unwrap().mig_mode() == Some(false));
}

/// Fault: on Hopper, gpushd did not stop the services, so a host with DCGM lost MIG at each boot. The driver of a Hopper
/// GPU refuses the first instance, not the change of MIG mode, while a program has the GPU open.
#[test]
fn services_stop_around_mode_changes_and_first_instances() {
    let config = Config::parse("[mode_change]\nservices = [\"nvidia-dcgm\"]\nafter = \"/x/y\"\n", "test").unwrap();
    let surrounded = |gpus: &[Gpu], layout: &str| {
        let plan = plan_host(&config, gpus, &request(&["0"], entries(layout))).unwrap().plans.remove(0);
        assert!(plan.error.is_none() && !plan.is_empty(), "{plan:?}");
        assert_eq!(plan.services.is_empty(), plan.hooks.is_empty());
        !plan.services.is_empty()
    };
    for (preset, is_hopper) in [("dgx-a100", false), ("dgx-h100", true), ("dgx-b200", true)] {
        let mut gpus = preset::gpus(preset).unwrap();
        let small = gpus[0].mig.as_ref().unwrap().profiles.iter().find(|profile| profile.slices == 1).unwrap();
        let (one, two) = (small.name.clone(), format!("{}*2", small.name));
        // MIG mode is on, and the GPU has no instances.
        gpus[0].mig.as_mut().unwrap().instances.clear();
        assert_eq!(surrounded(&gpus, &one), is_hopper, "{preset}: first instance");
        let mut filled = gpus.clone();
        let first = instance(&gpus[0], 7, &one, 0, &[]);
        filled[0].mig.as_mut().unwrap().instances = vec![first];
        assert!(!surrounded(&filled, &two), "{preset}: another instance");
        gpus[0].mig.as_mut().unwrap().set_mode(false, false);
        assert!(surrounded(&gpus, &one), "{preset}: mode change");
    }
}

#[test]
fn gpus_reset_together_must_be_free_or_change_too() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    for gpu in &mut gpus {
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(false, false);
    }
    let config = Config::parse("[mode_change]\nreset_together = [\"0-1\", \"2-7\"]\n", "test").unwrap();
    let plan =
        |gpus: &[Gpu], which: &[&str]| plan_host(&config, gpus, &request(which, entries("7g.80gb"))).unwrap().plans;
    let alone = plan(&gpus, &["0"]);
    assert_eq!(alone[0].reset().unwrap().together[0].gpu_uuid, gpus[1].uuid);
    gpus[1].processes.push(process(4711));
    let refused = plan(&gpus, &["0"]).remove(0);
    assert!(refused.is_empty());
    let error = refused.error.unwrap();
    assert_eq!(error.code, Code::Blocked);
    assert!(error.causes[0].contains("GPU 1") && error.causes[0].contains("is in use"), "{error:?}");
    gpus[1].processes.clear();
    assert!(plan(&gpus, &["0", "1"]).iter().all(|plan| plan.error.is_none() && plan.reset().is_some()));
    assert!(plan(&gpus, &["2"])[0].reset().unwrap().together.len() == 5);
}
