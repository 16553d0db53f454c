use gpush_api::{Mode, Percentage, PlanRequest};
use gpush_core::{
    config::Config,
    desired::{self, KnownHost},
    preset,
};
use proptest::prelude::*;

use super::*;
use crate::{needs::tests::needs, packing_bound::Demand};

/// Returns the advice, after its config lines were parsed, checked by the lints, and planned on the GPUs.
fn checked(needs: &Needs, gpus: &[Gpu]) -> Advice {
    let advice = advise(needs, gpus).unwrap_or_else(|error| panic!("{needs:?}: {error}"));
    let text = &advice.text;
    let config = Config::parse(text, "config.toml").unwrap_or_else(|errors| panic!("{text}\n{errors}"));
    let findings = desired::findings(&config, Some(KnownHost { gpus, driver: None }));
    assert!(findings.is_empty(), "{text}\n{findings:?}");
    // Without a rule of mode `mig`, there is no layout to plan.
    if config.rules.iter().any(|rule| rule.mode == Mode::Mig) {
        let idle: Vec<Gpu> = gpus.iter().map(desired::as_if_idle).collect();
        let plans = desired::plan_host(&config, &idle, &PlanRequest::default());
        for plan in plans.unwrap_or_else(|error| panic!("{text}\n{error}")).plans {
            assert!(plan.refusal.is_none() && plan.error.is_none(), "{text}\n{plan:?}");
        }
    }
    // Each rule claims the GPUs of its model, and has the mode of the answer.
    for model in &advice.models {
        for index in &model.gpus {
            let position = gpus.iter().position(|gpu| gpu.index == *index).unwrap();
            let claimed = desired::claims(&config, gpus)[position].map(|at| config.rules[at].mode);
            let expected = model.advised.map(|leaf| crate::config_lines::mode(leaf, model.tenants_per_gpu));
            assert_eq!(claimed, expected, "{text}");
        }
    }
    advice
}

fn host(preset: &str) -> Vec<Gpu> {
    preset::gpus(preset).unwrap()
}

fn only(needs: &Needs, preset: &str) -> ModelAdvice {
    let mut advice = checked(needs, &host(preset));
    assert_eq!(advice.models.len(), 1);
    advice.models.remove(0)
}

#[test]
fn each_leaf_has_a_valid_config_on_a_preset() {
    let shared = |workload| needs(Isolation::Shared, workload);
    let one = Needs { tenants: 1, ..needs(Isolation::Hard, Workload::Training) };
    assert_eq!(only(&one, "dgx-a100").advised, Some(Leaf::NoSharing));
    let many = Needs { tenants: 20, ..needs(Isolation::Hard, Workload::Inference) };
    assert_eq!(only(&many, "dgx-a100").advised, Some(Leaf::Mig));
    // Fault: for a GPU each, the advice was MIG with one instance of the whole GPU.
    let each = Needs { tenants: 8, ..many };
    assert_eq!(only(&each, "dgx-a100").advised, Some(Leaf::NoSharing));
    let faults = Needs { shared_faults: true, ..shared(Workload::Kernels) };
    assert_eq!(only(&faults, "dgx-h100").advised, Some(Leaf::Mps));
    let bounded = Needs { bounded_memory: true, soft_compute: true, ..shared(Workload::Inference) };
    assert_eq!(only(&bounded, "dgx-a100").advised, Some(Leaf::Hami));
    assert_eq!(only(&shared(Workload::Notebooks), "a30x4").advised, Some(Leaf::Timeslice));
    let cloud = Needs { driver: DriverOwner::Managed, ..shared(Workload::Batch) };
    assert_eq!(only(&cloud, "dgx-a100").advised, Some(Leaf::ManagedTimeslice));
}

/// Eight A100 for a course: 56 students at a time instead of 8.
#[test]
fn course_of_120_students_gets_56_places_on_8_gpus() {
    let course = Needs { tenants: 120, ..needs(Isolation::Hard, Workload::Notebooks) };
    let advice = checked(&course, &host("dgx-a100"));
    assert_eq!((advice.tenants, advice.places), (120, 56));
    assert_eq!(advice.models[0].entries, ["1g.10gb*7"]);
}

#[test]
fn mixed_fleet_is_answered_for_each_model() {
    let advice = checked(&Needs { tenants: 20, ..needs(Isolation::Hard, Workload::Inference) }, &host("mixed"));
    let answers: Vec<_> = advice.models.iter().map(|model| (model.name.as_str(), model.advised)).collect();
    assert_eq!(answers.len(), 6, "{answers:?}");
    for (name, leaf) in answers {
        let expected = if name.contains("L4") || name.contains("T4") { Leaf::NoSharing } else { Leaf::Mig };
        assert_eq!(leaf, Some(expected), "{name}");
    }
}

/// Two GPUs without MIG take one tenant each, so the others must take more than an equal part.
#[test]
fn tenants_that_whole_gpus_cannot_take_get_instances_elsewhere() {
    let advice = checked(&Needs { tenants: 12, ..needs(Isolation::Hard, Workload::Inference) }, &host("mixed"));
    assert!(advice.places >= 12, "{}", advice.places);
    assert_eq!(advice.models[0].tenants_per_gpu, 3);
}

/// Of a mixed fleet, small GPUs get no rule if a tenant does not fit.
#[test]
fn model_that_is_too_small_gets_no_rule() {
    let demand = Demand { memory_mib: Some(40_000), compute: None };
    let advice = checked(&Needs { demand, ..needs(Isolation::Hard, Workload::Inference) }, &host("mixed"));
    let small: Vec<_> = advice.models.iter().filter(|model| model.advised.is_none()).map(|model| &model.name).collect();
    assert_eq!(small.len(), 3, "{small:?}");
    assert!(advice.models.iter().filter(|model| model.advised.is_none()).all(|model| !model.notes.is_empty()));
}

#[test]
fn tenant_larger_than_any_gpu_is_refused() {
    let demand = Demand { memory_mib: Some(400_000), compute: None };
    let error = advise(&Needs { demand, ..needs(Isolation::Hard, Workload::Batch) }, &host("mixed")).unwrap_err();
    assert_eq!(error.code, Code::BadRequest);
    assert!(error.message.contains("more than any GPU of the host has"), "{error}");
    assert!(advise(&needs(Isolation::Hard, Workload::Batch), &[]).is_err());
}

#[test]
fn packing_bound_limits_the_leases_of_mps() {
    let demand = Demand { memory_mib: Some(6 * 1024), compute: Percentage::of_tenths(120) };
    let many = Needs { tenants: 100, demand, shared_faults: true, ..needs(Isolation::Shared, Workload::Kernels) };
    let model = only(&many, "dgx-a100");
    assert_eq!(model.packing.most_tenants, Some(8));
    assert_eq!((model.advised, model.tenants_per_gpu), (Some(Leaf::Mps), 8));
    let demand = Demand { memory_mib: Some(30 * 1024), compute: Percentage::of_tenths(120) };
    assert_eq!(only(&Needs { demand, ..many }, "dgx-a100").tenants_per_gpu, 2);
}

#[test]
fn demand_above_every_instance_needs_a_whole_gpu() {
    let memory = host("dgx-a100")[0].memory.total_mib;
    let demand = Demand { memory_mib: Some(memory), compute: None };
    let model = only(&Needs { demand, ..needs(Isolation::Hard, Workload::Training) }, "dgx-a100");
    assert_eq!(model.advised, Some(Leaf::NoSharing));
    assert!(model.notes.iter().any(|note| note.contains("whole GPU")), "{:?}", model.notes);
}

#[test]
fn training_gets_one_tenant_a_gpu() {
    let model = only(&Needs { tenants: 20, ..needs(Isolation::Shared, Workload::Training) }, "dgx-a100");
    assert_eq!((model.advised, model.tenants_per_gpu), (Some(Leaf::Timeslice), 1));
    assert!(model.notes.iter().any(|note| note.contains("usual")), "{:?}", model.notes);
}

#[test]
fn host_with_a_gpu_for_each_tenant_needs_no_sharing() {
    let model = only(&needs(Isolation::Shared, Workload::Notebooks), "dgx-a100");
    assert!(model.notes.iter().any(|note| note.contains("exclusive")), "{:?}", model.notes);
}

#[test]
fn live_use_of_the_gpus_does_not_change_the_advice() {
    let idle = host("dgx-a100");
    let mut used = idle.clone();
    used[0].processes_known = false;
    used[0].mode = Mode::Exclusive;
    let needs = needs(Isolation::Hard, Workload::Inference);
    assert_eq!(advise(&needs, &idle).unwrap(), advise(&needs, &used).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Whatever the needs are, the config is valid, has no lint and no refused layout, and no GPU has more tenants than
    /// the packing bound.
    #[test]
    fn any_advice_is_a_valid_config_without_findings(
        tenants in 1u32..200, hard: bool, workload in 0usize..5, memory in proptest::option::of(1u64..60_000),
        tenths in proptest::option::of(1u16..=1000), own: bool, bounded: bool, soft: bool, faults: bool,
        preset in 0usize..7,
    ) {
        let isolation = if hard { Isolation::Hard } else { Isolation::Shared };
        let needs = Needs {
            tenants,
            isolation,
            workload: Workload::ALL[workload],
            demand: Demand { memory_mib: memory, compute: tenths.and_then(Percentage::of_tenths) },
            driver: if own { DriverOwner::Own } else { DriverOwner::Managed },
            bounded_memory: bounded,
            soft_compute: soft && !hard,
            shared_faults: faults && !hard,
        };
        let (name, _) = preset::names().nth(preset).unwrap();
        let gpus = host(name);
        let largest = gpus.iter().map(|gpu| gpu.memory.total_mib).max().unwrap();
        prop_assume!(memory.is_none_or(|own| own <= largest));
        let advice = checked(&needs, &gpus);
        for model in &advice.models {
            prop_assert!(model.packing.most_tenants.is_none_or(|most| model.tenants_per_gpu <= most.max(1)));
        }
    }
}
