//! GPUs whose rule needs MIG mode off.

use super::*;

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
