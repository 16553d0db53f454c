//! Drawings of plans and operations.

use super::*;
use gpush_api::GpuIndex;

#[test]
fn plans_before_and_after() {
    let look = fixtures::look(80, UTF8);
    let gpus = fixtures::mixed();
    let span = |start, size| Placement { start, size };

    let split = gpush_api::GpuPlan {
        gpu: GpuIndex(1),
        gpu_uuid: gpus[1].uuid.clone(),
        layout: vec!["1c.4g.40gb*2".into(), "2g.20gb".into(), "1g.10gb".into()],
        steps: [
            InstanceStep::DestroyCompute { gi: 1, ci: 2, profile: "2c.4g.40gb".into(), uuid: None },
            InstanceStep::CreateCompute {
                gi_placement: span(0, 4),
                profile: "1c.4g.40gb".into(),
                profile_id: 0,
                placement: Some(span(2, 1)),
            },
            InstanceStep::CreateCompute {
                gi_placement: span(4, 2),
                profile: "2g.20gb".into(),
                profile_id: 1,
                placement: None,
            },
            InstanceStep::CreateGpuInstance { profile: "1g.10gb".into(), profile_id: 19, placement: span(6, 1) },
            InstanceStep::CreateCompute {
                gi_placement: span(6, 1),
                profile: "1g.10gb".into(),
                profile_id: 0,
                placement: None,
            },
        ]
        .map(Step::Instance)
        .into(),
        keeps: vec![1, 5],
        ..fixtures::plan()
    };
    let mut enables = gpush_api::GpuPlan {
        gpu: GpuIndex(4),
        gpu_uuid: gpus[4].uuid.clone(),
        name: gpus[4].name.clone(),
        layout: vec!["4g.24gb".into()],
        steps: [
            InstanceStep::CreateGpuInstance { profile: "4g.24gb".into(), profile_id: 0, placement: span(0, 4) },
            InstanceStep::CreateCompute {
                gi_placement: span(0, 4),
                profile: "4g.24gb".into(),
                profile_id: 3,
                placement: None,
            },
        ]
        .map(Step::Instance)
        .into(),
        ..gpush_api::GpuPlan::default()
    };
    enables.add(Step::MigMode(MigModeStep::Enable { reset: None, at_reboot: false }));
    let blocked = gpush_api::GpuPlan {
        gpu: GpuIndex(6),
        gpu_uuid: gpus[6].uuid.clone(),
        name: gpus[6].name.clone(),
        layout: vec!["4g.96gb".into()],
        refusal: Some(Refusal::Blocked { blockers: Vec::new() }),
        error: Some(
            ApiError::new(Code::Blocked, "GPU 6 (GPU-00000006): 1g.24gb@0 is in use and in the way of 4g.96gb")
                .cause("held by another user")
                .hint("wait for it to end, or leave this GPU out with --gpu"),
        ),
        ..gpush_api::GpuPlan::default()
    };
    let two_alike = Plans { plans: vec![fixtures::plan_without_steps(2), fixtures::plan_without_steps(3)] };
    let plans = Plans { plans: [vec![fixtures::plan(), split], two_alike.plans, vec![enables, blocked]].concat() };
    assert_snapshot!("plan-80", fits(&plan::plans(&plans, &gpus, &look), &look));
    let ascii = fixtures::look(80, Charset::Ascii);
    let text = fits(&plan::plans(&plans, &gpus, &ascii), &ascii);
    assert!(text.is_ascii());
    assert_snapshot!("plan-ascii", text);
    assert_snapshot!(
        "plan-without-readings",
        fits(&plan::plans(&Plans { plans: vec![fixtures::plan()] }, &[], &look), &look)
    );
    assert_snapshot!("plan-none", fits(&plan::plans(&Plans { plans: Vec::new() }, &gpus, &look), &look));
}

/// If a rollback has failed, each fact must appear once, and no step may look as if it still ran.
#[test]
fn failed_rollback_is_shown_once() {
    let look = fixtures::look(120, UTF8);
    let mut failed = fixtures::operation(OperationState::Failed);
    failed.progress[0].done = 3;
    failed.progress[0].rolling_back = true;
    let back = "GPU 0: destroying GPU instance 3 failed";
    failed.progress[0].error = Some(ApiError::new(Code::DriverError, back).cause("out of luck"));
    failed.error = Some(
        ApiError::new(Code::DriverError, "GPU 0: creating 1g.10gb@5 failed")
            .cause("insufficient resources")
            .cause(back)
            .cause("out of luck"),
    );
    let text = fits(&operation::operation(&failed, &[], &[], true, &look), &look);
    for once in [back, "out of luck", "insufficient resources", "creating 1g.10gb@5 failed"] {
        assert_eq!(text.matches(once).count(), 1, "{once}:\n{text}");
    }
    assert!(text.contains("3 of 6 steps were executed, and not all of them could be rolled back"), "{text}");
}

#[test]
fn operations_and_their_ends() {
    let look = fixtures::look(120, UTF8);
    let (before, after) = (fixtures::mixed(), fixtures::after());
    let done = fixtures::operation(OperationState::Done);
    assert_snapshot!("operation-done", fits(&operation::operation(&done, &before, &after, true, &look), &look));
    assert_snapshot!(
        "operation-done-without-readings",
        fits(&operation::operation(&done, &[], &[], true, &look), &look)
    );

    // If the operation ended some time ago, the GPU may have changed since. So the drawing must not
    // show current ids.
    let later = operation::operation(&done, &[], &after, false, &look);
    assert_snapshot!("operation-done-later", fits(&later, &look));

    let mut running = fixtures::operation(OperationState::Running);
    running.progress[0].done = 2;
    running.progress[0].doing = Some("creating 1g.10gb@4".into());
    assert_snapshot!("operation-running", fits(&operation::operation(&running, &before, &before, true, &look), &look));

    let error = ApiError::new(Code::DriverError, "the driver refused to create 1g.10gb@5 on GPU 0")
        .cause("NVML: insufficient resources")
        .hint("gpushctl mig apply --dry-run --gpu 0 shows what is free now");
    let mut rolled = fixtures::operation(OperationState::RolledBack);
    rolled.progress[0].error = Some(error.clone());
    rolled.error = Some(error.clone());
    assert_snapshot!(
        "operation-rolled-back",
        fits(&operation::operation(&rolled, &before, &before, true, &look), &look)
    );
    assert_eq!(operation::error(&rolled), Some(error));

    // The operation has the error of the GPU with one more cause. The drawing must show only one
    // error.
    let whole = rolled.error.take().map(|error| error.outcome("the previous layout was restored and read back"));
    rolled.error = whole;
    let text = fits(&operation::operation(&rolled, &before, &before, true, &look), &look);
    for once in ["the driver refused to create", "insufficient resources", "was restored", "hint:"] {
        assert_eq!(text.matches(once).count(), 1, "{once}:\n{text}");
    }

    let mut failed = fixtures::operation(OperationState::Failed);
    failed.progress[0].done = 3;
    failed.progress[0].error = Some(ApiError::new(Code::DriverTimeout, "creating 1g.10gb@5 did not return in 60s"));
    assert_snapshot!("operation-failed", fits(&operation::operation(&failed, &before, &before, true, &look), &look));
    assert_eq!(operation::error(&failed).unwrap().code.exit_status(), 8);

    // In this sample, the steps of a second GPU had succeeded when the first GPU failed. gpushd
    // rolled them back, and the drawing must say why.
    let mut both = failed.clone();
    both.plans[1] = gpush_api::GpuPlan { gpu: GpuIndex(1), ..fixtures::plan() };
    both.progress[1] = gpush_api::StepState {
        gpu: GpuIndex(1),
        done: 6,
        total: 6,
        rolling_back: true,
        restored: true,
        ..both.progress[1].clone()
    };
    let text = fits(&operation::operation(&both, &before, &before, true, &look), &look);
    assert!(text.contains("  as it was before, because the change of GPU 0 failed\n"), "{text}");
    assert!(!text.contains("6 of 6 steps"), "{text}");
    // In this sample, the previous state of GPU 0 was restored after its failure. Only GPU 1 could
    // not be restored.
    both.progress[0] = gpush_api::StepState { rolling_back: true, restored: true, ..both.progress[0].clone() };
    both.progress[1].restored = false;
    let text = fits(&operation::operation(&both, &before, &before, true, &look), &look);
    assert_eq!(text.matches("not all of them could be rolled back").count(), 1, "{text}");
    assert!(text.contains("  as it was before\n"), "{text}");

    let all = [&done, &running, &rolled, &failed].map(OperationSummary::from);
    let look = fixtures::look(80, UTF8);
    assert_snapshot!("operation-list", fits(operation_list::operations(&all, &look).text(), &look));
}
