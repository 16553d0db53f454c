//! Tests of steps without a driver: verification, remaining steps after an interruption, and
//! brackets.

use gpush_api::{
    Gpu, GpuIndex, GpuInstance, GpuLayout, GpuPlan, InstanceStep, LayoutSource, Mig, MigModeStep, MpsStep, Peer, Phase,
    PlanRequest, Reset, Step, TimesliceStep,
};
use proptest::prelude::*;

use super::*;
use crate::{config::Config, config::ModeChange, desired::plan_host, plan, preset};

/// Returns GPU 0 of an HGX H100 with the instances of `layout`.
fn gpu_with(layout: &[&str]) -> Gpu {
    let mut gpu = preset::gpus("dgx-h100").unwrap().remove(0);
    let mig = gpu.mig.as_mut().unwrap();
    mig.set_mode(true, true);
    mig.instances.clear();
    let instances = after(&plan_of(&gpu, true, layout), &gpu);
    gpu.mig.as_mut().unwrap().instances = instances;
    gpu
}

fn plan_of(gpu: &Gpu, mig: bool, layout: &[&str]) -> GpuPlan {
    let layout = layout.iter().map(|entry| (*entry).to_owned()).collect();
    let each = vec![GpuLayout { gpu: gpu.uuid.to_string(), mig, layout }];
    let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(each) };
    plan_host(&Config::default(), std::slice::from_ref(gpu), &request).unwrap().plans.remove(0)
}

/// Returns the instances after a plan. New instances get unused ids, as a driver would assign them.
fn after(plan: &GpuPlan, gpu: &Gpu) -> Vec<GpuInstance> {
    numbered(plan::outcome(&gpu.mig.as_ref().unwrap().instances, plan.instance_steps()))
}

fn numbered(mut instances: Vec<GpuInstance>) -> Vec<GpuInstance> {
    for at in 0..instances.len() {
        if instances[at].id == u32::MAX {
            instances[at].id = (1..).find(|id| instances.iter().all(|other| other.id != *id)).unwrap();
        }
        let compute = &mut instances[at].compute;
        for ci in 0..compute.len() {
            if compute[ci].id == u32::MAX {
                compute[ci].id = (0..).find(|id| compute.iter().all(|other| other.id != *id)).unwrap();
            }
        }
    }
    instances
}

const LAYOUTS: [&[&str]; 6] = [
    &["3g.40gb", "2g.20gb", "1g.10gb*2"],
    &["1c.3g.40gb*2", "4g.40gb"],
    &["1g.10gb*7"],
    &["7g.80gb"],
    &[],
    &["2g.20gb*3"],
];

/// Executes a plan step by step. The verdict on a step is `NotDone` before that step and `Done`
/// after that step.
#[test]
fn step_on_an_instance_is_done_exactly_after_it() {
    for (before, target) in LAYOUTS.iter().flat_map(|before| LAYOUTS.map(|target| (before, target))) {
        let mut gpu = gpu_with(before);
        let plan = plan_of(&gpu, true, target);
        for step in plan.instance_steps() {
            let mig = gpu.mig.as_mut().unwrap();
            let known = Instances::of(&mig.instances);
            assert_eq!(verify_instance(step, &known, Some(mig)), Verdict::NotDone, "{step:?} on {before:?}");
            mig.instances = numbered(plan::outcome(&mig.instances, [step]));
            assert_eq!(verify_instance(step, &known, Some(mig)), Verdict::Done, "{step:?} on {before:?}");
            assert_eq!(verify_instance(step, &known, None), Verdict::NotDone);
        }
        assert_eq!(difference(&plan, "GPU 0", gpu.mig.as_ref()), None, "{before:?} to {target:?}");
    }
}

#[test]
fn mode_that_is_only_pending_may_take_effect() {
    let mig = |enabled, pending| Mig { enabled, reset_pending: enabled != pending, ..gpu_with(&[]).mig.unwrap() };
    for (enable, enabled, pending, verdict) in [
        (true, true, true, Verdict::Done),
        (true, false, true, Verdict::MayTakeEffect),
        (true, false, false, Verdict::NotDone),
        (true, true, false, Verdict::NotDone),
        (false, false, false, Verdict::Done),
        (false, true, false, Verdict::MayTakeEffect),
        (false, true, true, Verdict::NotDone),
    ] {
        assert_eq!(verify_mode(enable, Some(&mig(enabled, pending))), verdict, "{enable} {enabled} {pending}");
    }
    assert_eq!(verify_mode(true, None), Verdict::NotDone);
}

fn stop() -> Step {
    Step::Mps(MpsStep::StopDaemon { uuid: "MIG-1".into(), label: "MIG device 0:1g.10gb@0".to_owned() })
}

/// Returns a plan with a reset and steps of all phases.
fn recorded(gpu: &Gpu, target: &[&str]) -> GpuPlan {
    let mut plan = plan_of(gpu, !target.is_empty(), target);
    let peer = Peer { gpu: GpuIndex(1), gpu_uuid: "GPU-1".into() };
    if let Some(Step::MigMode(MigModeStep::Disable { reset, .. } | MigModeStep::Enable { reset, .. })) =
        plan.steps.iter_mut().find(|step| matches!(step, Step::MigMode(_)))
    {
        *reset = Some(Reset { together: vec![peer] });
    }
    plan.add(stop());
    plan.add(Step::Timeslice(TimesliceStep::Set));
    plan
}

proptest! {
    /// At any point of interruption, the remaining steps lead to the same layout, and they follow
    /// the order of the phases. The number of executed steps plus the number of remaining steps
    /// equals the number of steps of the plan.
    #[test]
    fn remaining_steps_lead_to_the_recorded_end(from in 0..LAYOUTS.len(), to in 0..LAYOUTS.len(), cut in 0_usize..40) {
        let mut gpu = gpu_with(LAYOUTS[from]);
        let plan = recorded(&gpu, LAYOUTS[to]);
        let steps: Vec<&InstanceStep> = plan.instance_steps().collect();
        let cut = cut % (steps.len() + 1);
        let mig = gpu.mig.as_mut().unwrap();
        let end = plan::outcome(&mig.instances, steps.iter().copied());
        mig.instances = numbered(plan::outcome(&mig.instances, steps[..cut].iter().copied()));
        let layout = plan::exact_layout(&end);
        let layout: Vec<&str> = layout.iter().map(String::as_str).collect();
        let target = if LAYOUTS[to].is_empty() { &[] } else { &layout[..] };
        let rest = remaining(&plan, plan_of(&gpu, !LAYOUTS[to].is_empty(), target));

        prop_assert!(rest.steps.is_sorted_by_key(Step::phase), "{:?}", rest);
        prop_assert_eq!(&rest.layout, &plan.layout);
        prop_assert_eq!(done_before(&plan, &rest) as usize, cut, "{:?}", rest);
        prop_assert_eq!(rest.mig_mode(), plan.mig_mode());
        prop_assert_eq!(rest.reset(), plan.reset(), "a reset disturbs what was recorded");
        for phase in [Phase::Before, Phase::After] {
            prop_assert!(rest.phase(phase).eq(plan.phase(phase)), "{:?}", rest);
        }
    }

    /// Brackets are opened in this order: time-slice levels, MPS daemons, services, the hook
    /// `after`, the hook `before`. Services and hooks surround only plans that need them.
    #[test]
    fn brackets_open_in_order_and_hooks_only_around_plans_that_need_them(
        daemons in proptest::collection::vec(0_usize..3, 1..4),
        needs in proptest::collection::vec(any::<bool>(), 4),
        services in proptest::collection::vec("[a-z]{3}", 0..3),
        (before, after) in (any::<bool>(), any::<bool>()),
    ) {
        let hook = |wanted: bool| wanted.then(|| "/bin/true".to_owned());
        let change = ModeChange { services, before: hook(before), after: hook(after), ..ModeChange::default() };
        let hooks: Vec<String> = change.before.iter().chain(&change.after).cloned().collect();
        let plans: Vec<GpuPlan> = daemons
            .iter()
            .zip(&needs)
            .map(|(count, needs)| {
                let mut plan = GpuPlan { gpu_uuid: "GPU-0".into(), ..GpuPlan::default() };
                (0..*count).for_each(|_| plan.add(stop()));
                if *needs {
                    (plan.services, plan.hooks) = (change.services.clone(), hooks.clone());
                }
                plan
            })
            .collect();
        let all = brackets(&plans, "op-1", &change);
        let rank = |bracket: &Bracket| match bracket {
            Bracket::Timeslice => 0,
            Bracket::MpsDaemon { .. } => 1,
            Bracket::Service { .. } => 2,
            Bracket::HookAfter { .. } => 3,
            Bracket::HookBefore { .. } => 4,
        };
        prop_assert!(all.is_sorted_by_key(rank), "{:?}", all);
        let count = |wanted: u32| all.iter().filter(|bracket| rank(bracket) == wanted).count();
        let is_needed = needs.iter().take(plans.len()).any(|needs| *needs);
        prop_assert_eq!((count(0), count(1)), (1, daemons.iter().sum()));
        let surrounded = (count(2), count(3), count(4));
        let expected = (change.services.len(), usize::from(after), usize::from(before));
        prop_assert_eq!(surrounded, if is_needed { expected } else { (0, 0, 0) });
        // A bracket that was read from the journal is equal to the bracket that was recorded.
        for bracket in all.iter().filter(|bracket| bracket.is_recorded()) {
            let json = serde_json::to_value(bracket).unwrap();
            prop_assert_eq!(&serde_json::from_value::<Bracket>(json).unwrap(), bracket);
        }
    }
}

/// Case: the previous version recorded a plan with a reset, and without its services and hooks.
#[test]
fn plan_of_earlier_version_with_reset_still_stops_services() {
    let change = ModeChange { services: vec!["dcgm".to_owned()], ..ModeChange::default() };
    let services = |reset: Option<Reset>| {
        let mut plan = GpuPlan::default();
        plan.add(Step::MigMode(MigModeStep::Enable { reset, at_reboot: false }));
        brackets(&[plan], "op-1", &change).len() - 1
    };
    assert_eq!((services(Some(Reset::default())), services(None)), (1, 0));
}

#[test]
fn hook_learns_which_modes_change() {
    let (mut on, mut off, other) = (GpuPlan::default(), GpuPlan::default(), GpuPlan::default());
    (on.gpu_uuid, off.gpu_uuid) = ("GPU-1".into(), "GPU-2".into());
    on.add(Step::MigMode(MigModeStep::Enable { reset: None, at_reboot: false }));
    off.add(Step::MigMode(MigModeStep::Disable { reset: None, at_reboot: false }));
    let env = hook_environment(&[on, off, other], "op-7", "before");
    let reported = |name: &str| env[name].as_str();
    assert_eq!((reported("GPUSH_OPERATION"), reported("GPUSH_PHASE")), ("op-7", "before"));
    assert_eq!((reported("GPUSH_MIG_ON"), reported("GPUSH_MIG_OFF")), ("GPU-1", "GPU-2"));
}

#[test]
fn layouts_are_compared_without_instance_ids() {
    let gpu = gpu_with(LAYOUTS[0]);
    let one = gpu.mig.as_ref().unwrap();
    let mut other = one.clone();
    other.instances.reverse();
    other.instances.iter_mut().for_each(|instance| instance.id += 7);
    assert!(same_layout(Some(one), Some(&other)));
    other.instances[0].compute.clear();
    assert!(!same_layout(Some(one), Some(&other)), "another split");
    assert!(!same_layout(Some(one), Some(&Mig { reset_pending: true, ..one.clone() })), "another mode");
    assert!(same_layout(None, None) && !same_layout(Some(one), None));
}
