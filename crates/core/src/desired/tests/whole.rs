//! GPUs whose rule needs MIG mode off.

use gpush_api::{MigModeStep, Step};

use super::*;
use crate::step::difference;

#[test]
fn named_gpu_without_layout_gets_mig_disabled_by_its_rule() {
    let exclusive = Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n", "test").unwrap();
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    set(&mut gpus[0], &[("3g.40gb", 4, &[])]);
    for source in [LayoutSource::Config, LayoutSource::Wanted] {
        let plan = one(&exclusive, &gpus, &request(&["0"], source));
        assert!(plan.mig_mode() == Some(false) && plan.reset().is_some() && plan.error.is_none(), "{plan:?}");
        assert_eq!(plan.instance_steps().count(), 2, "its instance goes first: {plan:?}");
    }
    // A request for all GPUs never disables MIG. Here the request would change nothing else, so it
    // fails.
    assert!(plan_host(&exclusive, &gpus, &PlanRequest::default()).is_err());
    gpus[0].mig.as_mut().unwrap().instances[0].processes.push(process(4711));
    let plan = one(&exclusive, &gpus, &request(&["0"], LayoutSource::Config));
    assert!(plan.is_empty() && plan.error.is_some(), "{plan:?}");
    let mig = gpus[0].mig.as_mut().unwrap();
    mig.set_mode(false, false);
    mig.instances = Vec::new();
    let plan = one(&exclusive, &gpus, &request(&["0"], LayoutSource::Config));
    assert!(plan.is_empty() && plan.error.is_none(), "as wanted: {plan:?}");
    let unmanaged = Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"unmanaged\"\n", "test").unwrap();
    let refused = plan_host(&unmanaged, &gpus, &request(&["0"], LayoutSource::Config)).unwrap_err();
    assert_eq!(refused.code, Code::Conflict);
}

/// Fault: `waits in the queue to apply none` was shown for an operation that ends an MPS daemon and waits for a lease.
#[test]
fn plan_that_is_blocked_has_the_mode_of_the_rule() {
    for (mode, text) in
        [("mps", "whole GPU, shared through MPS"), ("timeslice", "whole GPU, time-sliced"), ("exclusive", "whole GPU")]
    {
        let config = Config::parse(&format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"{mode}\"\n"), "test").unwrap();
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        set(&mut gpus[0], &[("3g.40gb", 4, &[])]);
        gpus[0].mig.as_mut().unwrap().instances[0].processes.push(process(4711));
        let plan = one(&config, &gpus, &request(&["0"], LayoutSource::Config));
        assert!(plan.is_empty() && plan.error.is_some(), "{plan:?}");
        assert_eq!(plan.end_state(), text);
    }
}

/// Fault: on a virtual machine, every change of MIG mode was refused, although a reboot completes it.
#[test]
fn virtual_machine_completes_a_mode_change_at_its_reboot() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    gpus[0].passed_through = true;
    gpus[0].mig.as_mut().unwrap().set_mode(false, false);
    let config = Config::parse(
        "[mode_change]\nservices = [\"nvidia-dcgm\"]\n[[gpu]]\nmatch = [\"*\"]\nmode = \"mig\"\nlayout = [\"1g.10gb\"]\n",
        "test",
    );
    let config = config.unwrap();
    let plan = |gpus: &[Gpu]| plan_host(&config, gpus, &PlanRequest::default()).unwrap().plans.remove(0);
    let on = plan(&gpus);
    assert_eq!(on.steps, [Step::MigMode(MigModeStep::Enable { reset: None, at_reboot: true })], "{on:?}");
    assert!(on.waits_for_reboot() && on.services.is_empty() && on.error.is_none());
    gpus[0].mig.as_mut().unwrap().set_mode(false, true);
    assert!(gpus[0].waits_for_reboot());
    let waits = plan(&gpus);
    assert_eq!(waits.refusal, Some(Refusal::Reboot { enables: true }));
    assert_eq!(difference(&on, "GPU 0", gpus[0].mig.as_ref()), None, "the plan is done");
    // A mode that is only pending can be cancelled at once.
    let off = per_gpu::plan_mig_off(&gpus[0]);
    assert_eq!(off.steps, [Step::MigMode(MigModeStep::Disable { reset: None, at_reboot: false })], "{off:?}");
    // After the reboot, the plan is ordinary.
    gpus[0].mig.as_mut().unwrap().set_mode(true, true);
    assert!(plan(&gpus).steps.iter().all(|step| matches!(step, Step::Instance(_))));
    let off = per_gpu::plan_mig_off(&gpus[0]);
    assert!(off.waits_for_reboot() && !off.leaves_whole(&gpus[0]), "{off:?}");
    // A newer GPU needs no reset, so its mode changes at once.
    gpus[0].architecture = gpush_api::Architecture::Hopper;
    gpus[0].mig.as_mut().unwrap().set_mode(false, false);
    assert!(!plan(&gpus).waits_for_reboot());
}
