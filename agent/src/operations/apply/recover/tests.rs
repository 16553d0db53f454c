//! The remaining plan of an interrupted operation.

use gpush_api::{Mig, MpsStep, Step, TimesliceStep};

use super::*;
use crate::modes::scene::{mig_gpu, plan_layout, plan_mig_off, whole_gpu};

fn intent(before: &Gpu, plan: GpuPlan) -> GpuIntent {
    GpuIntent { before: before.mig.clone(), plan }
}

fn steps(plan: &GpuPlan) -> Vec<String> {
    assert_eq!(plan.error, None);
    plan.steps.iter().map(gpush_core::step::describe).collect()
}

#[test]
fn only_the_missing_instances_remain() {
    let before = mig_gpu(&["3g.40gb@4", "2g.20gb@0"]);
    let recorded = intent(&before, plan_layout(&before, &["3g.40gb@4", "4g.40gb@0"]));
    let now = |layout: &[&str]| remaining_plan(&[mig_gpu(layout)], &recorded);
    assert_eq!(steps(&now(&["3g.40gb@4", "2g.20gb@0"])).len(), 4);
    assert_eq!(
        steps(&now(&["3g.40gb@4"])),
        ["creating GPU instance 4g.40gb@0", "creating compute instance 4g.40gb in the GPU instance at 0"]
    );
    assert_eq!(steps(&now(&["3g.40gb@4", "4g.40gb@0"])), [] as [&str; 0]);
}

/// The entries have no placements, but the journal has.
#[test]
fn instances_are_completed_at_their_planned_placements() {
    let before = mig_gpu(&["1g.10gb@0"]);
    let plan = plan_layout(&before, &["1g.10gb*3"]);
    let planned: Vec<u8> = outcome(&intent(&before, plan.clone())).iter().map(|one| one.placement.start).collect();
    let first = format!("1g.10gb@{}", planned[1]);
    let rest = remaining_plan(&[mig_gpu(&["1g.10gb@0", &first])], &intent(&before, plan));
    assert_eq!(steps(&rest)[0], format!("creating GPU instance 1g.10gb@{}", planned[2]));
    assert_eq!(rest.layout, ["1g.10gb*3"], "the layout of the request");
}

#[test]
fn mig_mode_that_is_off_needs_no_more_steps() {
    let before = mig_gpu(&["3g.40gb@4"]);
    let recorded = intent(&before, plan_mig_off(&before));
    assert_eq!(steps(&remaining_plan(&[before], &recorded)).len(), 3);
    assert_eq!(steps(&remaining_plan(&[mig_gpu(&[])], &recorded)), ["switching MIG mode off"]);
    assert_eq!(steps(&remaining_plan(&[whole_gpu()], &recorded)), [] as [&str; 0]);
}

/// No reading shows whether these steps are done.
#[test]
fn sharing_of_a_whole_gpu_is_set_up_again() {
    let gpu = whole_gpu();
    for step in [Step::Timeslice(TimesliceStep::Set), Step::Mps(MpsStep::StartDaemon { device: None })] {
        let plan = GpuPlan { gpu_uuid: gpu.uuid.clone(), steps: vec![step], ..GpuPlan::default() };
        for before in [gpu.mig.clone(), None::<Mig>] {
            let recorded = GpuIntent { before, plan: plan.clone() };
            assert_eq!(remaining_plan(std::slice::from_ref(&gpu), &recorded), plan);
        }
    }
}

#[test]
fn missing_gpu_gets_a_plan_with_an_error() {
    let before = mig_gpu(&[]);
    let recorded = intent(&before, plan_layout(&before, &["7g.80gb"]));
    assert!(remaining_plan(&[], &recorded).error.is_some());
    let other = Gpu { uuid: "GPU-9".into(), ..before };
    assert!(remaining_plan(&[other], &recorded).error.is_some());
}

#[test]
fn only_a_missing_gpu_counts_as_gone() {
    for kind in [ErrorKind::GpuIsLost, ErrorKind::NotFound] {
        assert!(is_gone(&DriverError::new(kind, "reading")));
    }
    for kind in [ErrorKind::Unknown, ErrorKind::DriverNotLoaded, ErrorKind::WorkerUnavailable] {
        assert!(!is_gone(&DriverError::new(kind, "reading")));
    }
}
