//! Plans, and the layouts that their steps lead to.

use gpush_api::{Code, Gpu, GpuPlan, GpuState, InstanceStep, OperationState, Plans};
use serde_json::json;

use super::{
    InProcess,
    call_rules::{CREATE, CallRule, READ},
    host::ScriptedHost,
};

async fn plans(host: &InProcess, gpus: &[&str], entries: &[&str]) -> Vec<GpuPlan> {
    let body = json!({ "selectors": gpus, "layout_source": { "entries": entries } });
    host.post::<Plans>("/v1/mig/plan", &body).await.expect("plans").plans
}

/// A process that has just started must block a plan at once. So gpushd must not plan with a reading from before the start
/// of the process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_includes_a_process_that_has_just_started() {
    let host = InProcess::start("a30x4", 1, "").await;
    assert_eq!(host.apply(&["0"], &["2g.12gb@0"]).await.state, OperationState::Done);
    for round in 0..5 {
        assert!(plans(&host, &["0"], &["4g.24gb"]).await[0].error.is_none(), "round {round}: it is idle");
        host.gpus.use_first_device(0, std::process::id());
        let plan = plans(&host, &["0"], &["4g.24gb"]).await.remove(0);
        let error = plan.error.unwrap_or_else(|| panic!("round {round}: the process is in the way"));
        assert_eq!((error.code, plan.steps.len()), (Code::Blocked, 0), "round {round}");
        host.gpus.end_processes(0);
    }
}

/// The plan of a GPU that cannot be read has an error instead of steps.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_gpu_has_no_plan_and_others_do() {
    let host = InProcess::start("a30x4", 4, "# --constants driver.read=300ms\n").await;
    assert_eq!(host.gpus().await.len(), 4);
    host.gpus.hold(READ, 2);
    let plans = plans(&host, &["1", "2", "3"], &["2g.12gb*2"]).await;
    assert_eq!(plans.iter().map(|plan| plan.gpu).collect::<Vec<_>>(), [1, 2, 3]);
    for plan in &plans {
        match &plan.error {
            Some(error) => assert!(plan.gpu == 2 && plan.steps.is_empty() && error.message.contains("GPU 2 (")),
            None => assert!(plan.gpu != 2 && plan.steps.len() == 4, "{plan:?}"),
        }
    }
}

/// While an operation changes a GPU, a plan for this GPU does not wait. The plan names the operation, and does not show the
/// previous instances as present. The error of an apply also names the operation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_during_a_change_names_the_operation() {
    let host = InProcess::start("a30x4", 1, "").await;
    assert_eq!(host.apply(&["0"], &["2g.12gb*2"]).await.state, OperationState::Done);
    host.gpus.rule(CallRule::on(CREATE, 0).once().held());
    let operation = host.begin(&["0"], &["1g.6gb"], &json!({})).await.expect("it begins");
    host.until_held().await;
    let operation = host.ended_or(&operation, |now| now.progress[0].done == 4).await;
    // gpushd has destroyed both instances. The creation of the first new instance takes long.
    let (gpu, plan) = (host.gpu(0).await, plans(&host, &["0"], &["none"]).await.remove(0));
    let refused = host.refused(&["0"], &["none"]).await;
    assert!(gpu.stale || gpu.mig.as_ref().is_some_and(|mig| mig.instances.is_empty()), "{gpu:?}");
    assert_eq!(gpu.state, GpuState::Changing);
    let total = operation.progress[0].total;
    assert_eq!(gpu.reasons, [format!("operation {} is changing the GPU: 4 of {total} steps are done", operation.id)]);
    assert_eq!((plan.error.as_ref(), plan.steps.len()), (Some(&refused), 0));
    assert_eq!((refused.code, refused.retryable), (Code::Conflict, true));
    let command = format!("`gpushctl operation wait {}`", operation.id);
    assert!(refused.hint.is_some_and(|hint| hint.contains(&command)));
    host.gpus.release();
    assert_eq!(host.ended(&operation).await.state, OperationState::Done);
    assert!(plans(&host, &["0"], &["1g.6gb"]).await[0].steps.is_empty());
}

/// An apply of these plans is refused as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_has_steps_or_refusal_for_each_gpu() {
    let host = ScriptedHost::of("mixed").start("").await;
    let plans = plans(&host, &["all"], &["1g.10gb"]).await;
    assert_eq!(plans.len(), 6);
    assert!(plans[0].error.is_none());
    let refusal = |gpu: usize| serde_json::to_value(&plans[gpu].refusal).expect("JSON")["reason"].clone();
    assert_eq!((refusal(1), refusal(4)), (json!("unknown_profile"), json!("no_mig")), "an A30 has no 1g.10gb");
    let hint = plans[1].error.as_ref().and_then(|error| error.hint.clone());
    assert!(hint.is_some_and(|hint| hint.contains("1g.6gb")), "{plans:?}");
    let refused = host.refused(&["all"], &["1g.10gb"]).await;
    assert_eq!(refused.code, Code::UnknownProfile);
    assert_eq!(refused.message, "4 of 6 GPUs cannot be changed: GPUs 1, 3, 4, 5");
    let own: Vec<_> = plans.into_iter().filter_map(|plan| plan.error).collect();
    assert_eq!((refused.errors.to_vec(), refused.causes.len()), (own, 0), "each as its own plan has it");
    assert!(refused.outcome.as_ref().is_some_and(|outcome| outcome.contains("no GPU was changed")), "{refused:?}");
    assert!(host.gpus.take_changes().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unchanged_layout_is_an_operation_without_steps() {
    let host = InProcess::start("a30x4", 2, "").await;
    for (layout, expected) in [
        (&["2g.12gb", "1g.6gb*2"][..], &["2g.12gb@0[2g.12gb@0]", "1g.6gb@2[1g.6gb@0]", "1g.6gb@3[1g.6gb@0]"][..]),
        (&["4g.24gb"], &["4g.24gb@0[4g.24gb@0]"]),
    ] {
        assert_eq!(host.apply(&["1"], layout).await.state, OperationState::Done);
        assert_eq!(host.gpus.layout(1), expected);
    }
    host.gpus.take_changes();
    let again = host.apply(&["1"], &["4g.24gb"]).await;
    assert_eq!((again.state, again.plans[0].steps.len(), again.plans[0].keeps.len()), (OperationState::Done, 0, 1));
    assert!(host.gpus.take_changes().is_empty() && host.gpus.instances(0).is_empty());
}

/// The mode is a step of its GPU. Faults 2 and 3 of mig-parted: a change of GPU 1 cleared GPU 0, and a reset affected all
/// GPUs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hopper_layout_enables_mig_on_its_gpu_only() {
    let host = InProcess::start("dgx-h100", 3, "").await;
    host.gpus.without_mig();
    assert_eq!(host.apply(&["0"], &["3g.40gb", "2g.20gb"]).await.state, OperationState::Done);
    let before = host.gpus.layout(0);
    host.gpus.take_changes();
    let ended = host.apply(&["1"], &["4g.40gb", "1g.20gb", "1g.10gb"]).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    let plan = &ended.plans[0];
    assert!(plan.mig_mode() == Some(true) && plan.reset().is_none());
    assert_eq!(plan.instance_steps().count() + 1, plan.steps.len(), "the mode is a step");
    assert_eq!(ended.progress[0].done, ended.progress[0].total);
    assert_eq!(ended.progress[0].total as usize, plan.steps.len());
    let changes = host.gpus.take_changes();
    assert!(changes.iter().all(|call| call.ends_with(" 1")), "{changes:?}");
    assert_eq!((host.gpus.layout(0), host.gpus.layout(1).len()), (before, 3));
    assert_eq!(host.gpus.layout(2), ["MIG off"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_operation_changes_all_gpus_of_each_model() {
    for (preset, layout, devices) in [
        ("dgx-h200", &["3g.71gb", "2g.35gb", "1g.18gb*2"][..], 4),
        // This model has twelve memory slices.
        ("rtx-pro-6000x2", &["2g.48gb", "1g.24gb*2"], 3),
    ] {
        let host = ScriptedHost::of(preset).start("").await;
        let ended = host.apply(&["all"], layout).await;
        assert_eq!(ended.state, OperationState::Done, "{ended:?}");
        let gpus = host.gpus().await;
        for gpu in 0..gpus.len() {
            let instances = host.gpus.instances(gpu);
            assert_eq!(instances.len(), devices, "{preset}, GPU {gpu}: {instances:?}");
            assert!(instances.iter().any(|instance| instance.starts_with(&format!("{}@", layout[0]))));
        }
        let creates = |step: &&InstanceStep| matches!(step, InstanceStep::CreateGpuInstance { .. });
        let created = ended.plans.iter().flat_map(GpuPlan::instance_steps).filter(creates).count();
        assert_eq!(created, devices * gpus.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_host_gets_the_layouts_of_its_rules() {
    let config = r#"
[layouts]
small = ["1g.10gb*7"]

[[gpu]]
match = ["*A100*"]
mode = "mig"
layout = "small"

[[gpu]]
match = ["*A30*"]
mode = "mig"
layout = ["2g.12gb*2"]

[[gpu]]
match = ["*H100*"]
mode = "mig"
layout = ["3g.40gb", "4g.40gb"]
"#;
    let host = ScriptedHost::of("mixed").start_with_layouts("").await;
    host.until_layouts_are_settled().await;
    host.reload(config).await;
    assert!(host.gpus.instances(0).is_empty(), "a reload alone changes no layout");
    let begun = host.begin_with(&json!({})).await.expect("it begins");
    let ended = host.ended(&begun).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(ended.plans.iter().map(|plan| plan.gpu).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(host.gpus.instances(0).len(), 7);
    assert_eq!(host.gpus.instances(1), ["2g.12gb@0", "2g.12gb@2"]);
    assert_eq!(host.gpus.instances(2), ["4g.40gb@0", "3g.40gb@4"]);
    let gpus = host.gpus().await;
    assert!(gpus[..3].iter().all(|gpu: &Gpu| gpu.drift.is_empty() && gpu.rule.is_some()), "{gpus:?}");
    assert!(gpus[4].mig.is_none() && gpus[5].mig.is_none(), "L4 and T4 have no MIG");
}
