//! Exports the state of GPUs. A comparison of the exported file with the same GPUs must find no
//! difference.

use gpush_api::{ComputeInstance, GpuIndex, GpuInstance, GpuPlan, InstanceStep};
use proptest::prelude::*;

use super::*;
use crate::layout::MOST;

/// Executes a plan on an empty GPU. The ids of new instances start at 1.
fn make(gpu: &mut Gpu, plan: &GpuPlan) {
    let mig = gpu.mig.as_mut().unwrap();
    for step in plan.instance_steps() {
        match step {
            InstanceStep::CreateGpuInstance { profile, profile_id, placement } => mig.instances.push(GpuInstance {
                id: 1 + mig.instances.len() as u32,
                profile_id: *profile_id,
                profile: profile.clone(),
                placement: *placement,
                memory: None,
                compute: Vec::new(),
                processes: Vec::new(),
            }),
            InstanceStep::CreateCompute { gi_placement, profile, profile_id, placement } => {
                let gi = mig.instances.iter_mut().find(|gi| gi.placement == *gi_placement).unwrap();
                gi.compute.push(ComputeInstance {
                    id: gi.compute.len() as u32,
                    profile_id: *profile_id,
                    profile: profile.clone(),
                    placement: *placement,
                    uuid: None,
                    processes: Vec::new(),
                });
            }
            InstanceStep::DestroyCompute { .. } | InstanceStep::DestroyGpuInstance { .. } => {
                unreachable!("nothing stood")
            }
        }
    }
}

fn plans(gpus: &[Gpu], each: Vec<GpuLayout>) -> Vec<GpuPlan> {
    let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
    plan_host(&Config::default(), gpus, &request).unwrap().plans
}

fn asserted(exported: &Exported, gpus: &[Gpu]) -> Vec<GpuPlan> {
    let file = file(&exported.text);
    plans(gpus, resolve(&file, file.select(None).unwrap(), gpus, &[]).unwrap().layouts)
}

fn as_wanted(plan: &GpuPlan) -> bool {
    plan.error.is_none() && plan.is_empty()
}

/// Returns a layout entry for the GPU, with a GPU instance profile or a compute instance profile,
/// and a count.
fn entry(gpu: &Gpu, (profile, compute, count): (usize, usize, u8)) -> Entry {
    let profiles = &gpu.mig.as_ref().unwrap().profiles;
    let of = &profiles[profile % profiles.len()];
    let slices = of.compute.get(compute).filter(|c| c.name != of.name).map(|c| c.slices);
    Entry { compute_slices: slices, profile: of.name.clone(), start: None, count: count.clamp(1, MOST), share: None }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn export_then_assert_is_identity(
        host in prop::sample::select(vec!["mixed", "dgx-a100", "dgx-h100", "dgx-b200", "a30x4", "rtx-pro-6000x2"]),
        desired_states in prop::collection::vec((0..4_usize, prop::collection::vec((0..9_usize, 0..4_usize, 1..4_u8), 0..3)), 1..4),
        spread in prop::collection::vec(any::<prop::sample::Index>(), 8),
    ) {
        let mut gpus = preset::gpus(host).unwrap();
        for (at, gpu) in gpus.iter_mut().enumerate().filter(|(_, gpu)| gpu.mig.is_some()) {
            let (mode, entries) = spread[at % spread.len()].get(&desired_states);
            if *mode == 0 {
                let mig = gpu.mig.as_mut().unwrap();
                mig.set_mode(false, false);
                continue;
            }
            // Use as many of the random entries as fit.
            let mut layout = Vec::new();
            for drawn in entries {
                layout.push(entry(gpu, *drawn).to_string());
                let each = vec![GpuLayout { gpu: gpu.uuid.to_string(), mig: true, layout: layout.clone() }];
                if plans(std::slice::from_ref(gpu), each)[0].error.is_some() {
                    layout.pop();
                }
            }
            let each = vec![GpuLayout { gpu: gpu.uuid.to_string(), mig: true, layout }];
            let plan = plans(std::slice::from_ref(gpu), each).remove(0);
            make(gpu, &plan);
        }
        let exported = export(&gpus, "current", |_| true).unwrap();
        let differs: Vec<GpuIndex> = asserted(&exported, &gpus).iter().filter(|plan| !as_wanted(plan)).map(|plan| plan.gpu).collect();
        // If counts cannot express the state of a GPU, the export reports that GPU.
        let reported: Vec<GpuIndex> = gpus.iter().map(|gpu| gpu.index).filter(|index| exported.remarks.iter().any(|r| r.starts_with(&format!("GPU {index}: ")))).collect();
        prop_assert_eq!(&differs, &reported, "{}\n{:?}", exported.text, exported.remarks);
        let mut named: Vec<usize> = (0..gpus.len()).collect();
        named.retain(|at| !asserted(&exported, &gpus).iter().any(|plan| plan.gpu_uuid == gpus[*at].uuid));
        prop_assert!(named.is_empty(), "left out: {named:?}\n{}", exported.text);
    }
}

fn with(gpu: &mut Gpu, layout: &str) {
    let each = vec![GpuLayout { gpu: gpu.uuid.to_string(), mig: true, layout: vec![layout.to_owned()] }];
    let plan = plans(std::slice::from_ref(gpu), each).remove(0);
    assert!(plan.error.is_none(), "{:?}", plan.error);
    make(gpu, &plan);
}

#[test]
fn equal_gpus_share_a_group_and_parts_differ_by_id() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.iter_mut().for_each(|gpu| with(gpu, "3g.40gb,2g.20gb,1g.10gb*2"));
    let alike = export(&gpus, "all balanced", |_| true).unwrap();
    let odd = gpus[6].mig.as_mut().unwrap();
    odd.instances.clear();
    let one_differs = export(&gpus, "no", |_| true).unwrap();
    let some = export(&gpus, "current", |gpu| gpu.index < GpuIndex(2)).unwrap();
    let mixed = export(&preset::gpus("mixed").unwrap(), "current", |_| true).unwrap();
    insta::assert_snapshot!([alike.text, one_differs.text, some.text, mixed.text].join("\n"));
}

/// Returns the name by which mig-parted counts a compute instance: slices of the compute instance and of the GPU
/// instance, memory of the GPU instance as a fraction of the board in eighths, attributes. This is a second
/// implementation of the rule of go-nvlib, independent of gpush's names.
fn name_in_mig_parted(model: &gpush_geometry::Model, instance: &GpuInstance, compute: &ComputeInstance) -> String {
    let profile = model.gi_profiles.iter().find(|one| one.id == instance.profile_id).unwrap();
    let slices = profile.compute.iter().find(|one| one.id == compute.profile_id).unwrap().slices;
    let eighths = (profile.memory_mib * 8).div_ceil(model.board_memory_mib);
    let gib = (eighths * model.board_memory_mib.div_ceil(1024) + 4) / 8;
    let attribute = profile.name.find(['+', '-']).map_or("", |at| &profile.name[at..]);
    if slices == profile.slices {
        format!("{slices}g.{gib}gb{attribute}")
    } else {
        format!("{slices}c.{}g.{gib}gb{attribute}", profile.slices)
    }
}

/// mig-parted's `assert` compares the counts of the file with the counts of its own names. It calls both compute
/// profiles of a double-memory `1g` by one name, for example `1g.20gb`.
#[test]
fn exported_file_passes_the_assert_of_mig_parted() {
    let mut seen = 0;
    for key in gpush_geometry::KEYS {
        let model = gpush_geometry::model(key).unwrap();
        for profile in &model.gi_profiles {
            for compute in &profile.compute {
                let mut gpu = preset::gpu(&model, GpuIndex(0));
                with(&mut gpu, &compute.name);
                let exported = export(std::slice::from_ref(&gpu), "current", |_| true).unwrap();
                let instance = &gpu.mig.as_ref().unwrap().instances[0];
                let name = name_in_mig_parted(&model, instance, &instance.compute[0]);
                let line = format!("        \"{name}\": 1");
                assert!(exported.text.lines().any(|one| one == line), "{key} {}: {}", compute.name, exported.text);
                assert!(exported.remarks.is_empty(), "{key} {}: {:?}", compute.name, exported.remarks);
                assert!(
                    asserted(&exported, std::slice::from_ref(&gpu)).iter().all(as_wanted),
                    "{key} {}",
                    compute.name
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 250, "{seen}");
}

/// A file with `1g.20gb` means the instances that the GPU has, also those of mig-parted.
#[test]
fn file_keeps_both_compute_profiles_of_a_double_memory_1g() {
    let mut gpus = preset::gpus("dgx-h100").unwrap();
    gpus.truncate(1);
    with(&mut gpus[0], "1c.1g.20gb*2,1g.20gb");
    let exported = export(&gpus, "current", |_| true).unwrap();
    assert!(exported.text.contains("\"1g.20gb\": 3\n") && exported.remarks.is_empty(), "{exported:?}");
    assert!(asserted(&exported, &gpus).iter().all(as_wanted));
    let layouts = |text: &str| {
        let file = file(text);
        resolve(&file, file.select(None).unwrap(), &gpus, &[]).unwrap().layouts[0].layout.join(",")
    };
    let counted = |count: u8| {
        label(&format!("    - devices: all\n      mig-enabled: true\n      mig-devices: {{1g.20gb: {count}}}\n"))
    };
    assert_eq!(layouts(&counted(4)), "1g.20gb*2,1c.1g.20gb*2", "a new instance is whole");
    assert_eq!(layouts(&counted(2)), "1g.20gb,1c.1g.20gb");
    gpus[0].mig.as_mut().unwrap().instances.clear();
    let file = file(&counted(4));
    assert_eq!(resolve(&file, file.select(None).unwrap(), &gpus, &[]).unwrap().layouts[0].layout, ["1g.20gb*4"]);
}

#[test]
fn export_reports_what_counts_omit() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(5);
    // Two compute instances in two GPU instances. If they were created from the file, they would
    // share one GPU instance.
    with(&mut gpus[0], "1c.3g.40gb@0,1c.3g.40gb@4");
    // mig-parted does not see a GPU instance without compute instances.
    with(&mut gpus[1], "2g.20gb");
    gpus[1].mig.as_mut().unwrap().instances[0].compute.clear();
    gpus[2].state = GpuState::Lost;
    gpus[2].mig = None;
    gpus[3].mig.as_mut().unwrap().reset_pending = true;
    let foreign = GpuInstance {
        profile: "profile 99".to_owned(),
        profile_id: 99,
        ..{
            with(&mut gpus[4], "2g.20gb");
            gpus[4].mig.as_ref().unwrap().instances[0].clone()
        }
    };
    let mut foreign = foreign;
    foreign.compute[0].profile = "profile 0".to_owned();
    gpus[4].mig.as_mut().unwrap().instances[0] = foreign;
    let exported = export(&gpus, "current", |_| true).unwrap();
    insta::assert_snapshot!(format!("{}{}", exported.text, exported.remarks.join("\n")));
    gpus.iter_mut().for_each(|gpu| gpu.mig = None);
    assert!(export(&gpus, "current", |_| true).unwrap_err().message.contains("none of the selected GPUs supports MIG"));
}
