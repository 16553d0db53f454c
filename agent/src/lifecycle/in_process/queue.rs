//! Operations that cannot start immediately: gpushd refuses or queues them, or they wait until instances are idle.

use std::time::Duration;

use gpush_api::{ApiError, AuditRecord, Code, Operation, OperationState};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{ANY_CHANGE, CREATE, CallRule, READ},
    host::ScriptedHost,
};

fn is_waiting(operation: &Operation) -> bool {
    operation.state == OperationState::Waiting && !operation.waits_for.is_empty()
}

/// Creates an instance on each GPU, and starts a computation in it.
async fn in_use(host: &InProcess) {
    assert_eq!(host.apply(&["all"], &["3g.40gb@4"]).await.state, OperationState::Done);
    for gpu in 0..host.gpus().await.len() {
        host.gpus.use_first_device(gpu, std::process::id());
    }
}

fn outcome(operation: Operation) -> (OperationState, ApiError) {
    (operation.state, operation.error.expect("an error"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operation_on_several_gpus_waits_for_all_of_them() {
    let host = InProcess::start("dgx-a100", 3, "").await;
    host.gpus.hold(CREATE, 0);
    let first = host.begin(&["0"], &["7g.80gb"], &json!({})).await.expect("it begins");
    let refused = host.refused(&["1", "0"], &["7g.80gb"]).await;
    assert_eq!((refused.code, refused.retryable), (Code::Conflict, true));
    assert!(refused.message.contains(&format!("operation {}", first.id)), "{refused:?}");
    let second = host.begin_waiting(&["0", "1"], &["1g.10gb*7"]).await;
    assert_eq!(second.state, OperationState::Queued);
    let third = host.begin_waiting(&["0"], &["3g.40gb"]).await;
    // Operations that are queued on GPU 0 do not delay an operation on another GPU.
    assert_eq!(host.apply(&["2"], &["7g.80gb"]).await.state, OperationState::Done);
    host.gpus.release();
    for operation in [&first, &second, &third] {
        assert_eq!(host.ended(operation).await.state, OperationState::Done);
    }
    assert_eq!([0, 1].map(|gpu| host.gpus.instances(gpu).len()), [1, 7], "the last request for GPU 0 has won");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_operation_begins_when_the_instance_is_idle() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    in_use(&host).await;
    let refused = host.refused(&["0"], &["7g.80gb"]).await;
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let waiting = host.begin_waiting(&["0"], &["7g.80gb"]).await;
    let waiting = host.ended_or(&waiting, is_waiting).await;
    assert!(!waiting.begun, "{waiting:?}");
    let pid = std::process::id().to_string();
    assert!(waiting.waits_for.join("; ").contains(&pid), "root reads which process blocks it: {waiting:?}");
    // The GPU names the operation, and so does a newer operation, which the waiting one does not prevent.
    let says = format!("operation {} waits in the queue (desired: 7g.80gb)", waiting.id);
    host.until("a reason", async || host.gpu(0).await.reasons.contains(&says).then_some(())).await;
    assert!(host.gpus().await[0].reasons.contains(&says), "in the list, too");
    let newer = host.apply(&["0"], &["3g.40gb@4", "1g.10gb"]).await;
    assert_eq!(newer.state, OperationState::Done);
    assert!(newer.notes.iter().any(|note| note.contains(&says)), "{newer:?}");
    host.gpus.end_processes(0);
    let ended = host.ended(&waiting).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(host.gpus.layout(0), ["7g.80gb@0[7g.80gb@0]"]);
    // The reason for waiting is gone, both in the memory of gpushd and in the journal.
    for reported in [&ended, &host.operation(&ended.id).await] {
        assert!(reported.begun && reported.waits_for.is_empty(), "{reported:?}");
        assert!(reported.notes[0].starts_with("it waited: "), "{reported:?}");
    }
    // When the operation started, gpushd made a new plan. The progress shows this plan.
    assert!(ended.progress[0].done > 0 && ended.progress[0].done == ended.progress[0].total);
    assert!(host.gpu(0).await.reasons.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_operation_ends_on_cancel_or_timeout() {
    let host = InProcess::start("dgx-a100", 2, "").await;
    in_use(&host).await;
    host.gpus.end_processes(1);
    let before = host.gpus.layout(0);
    let waiting = host.begin_waiting(&["0"], &["7g.80gb"]).await;
    let waiting = host.ended_or(&waiting, is_waiting).await;
    // Earlier fault: the answer did not show root which process blocks the operation.
    let cancelled = host.cancel(&waiting.id).await.expect("it is cancelled");
    assert!(!format!("{cancelled:?}").contains("to its owner and to administrators"), "{cancelled:?}");
    let (state, error) = outcome(host.ended(&waiting).await);
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::Cancelled), "{error:?}");
    assert_eq!(error.outcome.as_deref(), Some("nothing was changed"));
    // The answer now comes from the journal, and still has the same outcome.
    let recorded = host.operation(&waiting.id).await.error.expect("an error");
    assert_eq!(recorded.outcome.as_deref(), Some("nothing was changed"));
    assert_eq!(host.cancel(&waiting.id).await.unwrap_err().code, Code::Conflict);

    let short = host.begin(&["0"], &["7g.80gb"], &json!({ "wait_s": 1 })).await.expect("it waits");
    let (state, error) = outcome(host.ended(&short).await);
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::TimedOut), "{error:?}");
    assert!(error.message.contains("within 1s"), "{error:?}");

    // An operation that is queued behind another operation can also be cancelled. It does not wait for the other one.
    host.gpus.hold(CREATE, 1);
    let first = host.begin(&["1"], &["7g.80gb"], &json!({})).await.expect("it begins");
    let queued = host.begin_waiting(&["1"], &["1g.10gb"]).await;
    host.cancel(&queued.id).await.expect("it is cancelled");
    let (state, error) = outcome(host.ended(&queued).await);
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::Cancelled), "{error:?}");
    assert!(!host.operation(&first.id).await.state.is_final());
    host.gpus.release();
    assert_eq!(host.ended(&first).await.state, OperationState::Done);
    // A cancelled operation no longer delays other operations.
    assert_eq!(host.apply(&["1"], &["1g.10gb*2"]).await.state, OperationState::Done);

    // An impossible layout is refused at once.
    let impossible = host.begin(&["0"], &["9g.80gb"], &json!({ "wait_s": 60 })).await;
    assert_eq!(impossible.unwrap_err().code, Code::UnknownProfile);
    assert_eq!(host.gpus.layout(0), before);
}

/// Two operations wait for processes. When both processes have ended, the reading for the first operation hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_operation_begins_while_another_gpu_hangs() {
    let host = InProcess::start("dgx-a100", 2, "# --constants driver.read=60000ms\n").await;
    in_use(&host).await;
    let hangs = host.ended_or(&host.begin_waiting(&["0"], &["7g.80gb"]).await, is_waiting).await;
    let works = host.ended_or(&host.begin_waiting(&["1"], &["7g.80gb"]).await, is_waiting).await;
    // The first reading shows that GPU 0 is idle, so the operation claims GPU 0. The next reading hangs.
    host.gpus.rule(CallRule::on(READ, 0).after(1).held());
    host.gpus.end_processes(0);
    host.until_held().await;
    host.gpus.end_processes(1);
    assert_eq!(host.ended(&works).await.state, OperationState::Done);
    assert!(!host.operation(&hangs.id).await.begun);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_at_each_step_ends_in_the_previous_or_the_new_layout() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    let (before, wanted) = (["3g.40gb@4", "2g.20gb@0"], ["1g.10gb*4", "2g.20gb@4"]);
    assert_eq!(host.apply(&["0"], &before).await.state, OperationState::Done);
    let existing = host.gpus.layout(0);
    let mut steps = 1;
    for step in 0.. {
        if step >= steps {
            break;
        }
        host.gpus.rule(CallRule::on(ANY_CHANGE, 0).after(step).once().held());
        let begun = host.begin(&["0"], &wanted, &json!({})).await.expect("it begins");
        steps = begun.progress[0].total;
        host.until_held().await;
        host.cancel(&begun.id).await.expect("it is cancelled");
        host.gpus.release();
        let ended = host.ended(&begun).await;
        if ended.state == OperationState::Done {
            assert_eq!((step + 1, host.gpus.instances(0).len()), (steps, 5), "only the last step: {ended:?}");
            break;
        }
        let (state, error) = outcome(ended);
        assert_eq!((state, error.code), (OperationState::RolledBack, Code::Cancelled), "step {step}: {error:?}");
        assert_eq!(error.message, format!("operation {} was cancelled by root", begun.id));
        assert_eq!(host.gpus.layout(0), existing, "step {step} of {steps}");
    }
    assert!(steps >= 10, "{steps} steps");
    // An operation that has ended cannot be cancelled.
    let done = host.apply(&["0"], &wanted).await;
    assert_eq!((done.state, host.gpus.instances(0).len()), (OperationState::Done, 5));
    assert_eq!(host.cancel(&done.id).await.unwrap_err().code, Code::Conflict);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_operation_survives_restarts() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let mut gpushd = host.start("").await;
    in_use(&gpushd).await;
    let waiting = gpushd.begin_waiting(&["0"], &["7g.80gb"]).await;
    gpushd.ended_or(&waiting, is_waiting).await;
    for kill in [false, true, true] {
        if kill {
            gpushd.kill();
        } else {
            gpushd.stop().await;
        }
        gpushd = host.start("").await;
        let now = gpushd.operation(&waiting.id).await;
        assert_eq!(now.state, OperationState::Waiting, "{now:?}");
    }
    let notes = gpushd.operation(&waiting.id).await.notes;
    assert!(notes.iter().any(|note| note.contains("gpushd ended while the operation was waiting")), "{notes:?}");
    host.gpus.end_processes(0);
    assert_eq!(gpushd.ended(&waiting).await.state, OperationState::Done);
    assert_eq!(host.gpus.layout(0), ["7g.80gb@0[7g.80gb@0]"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_cancellation_survives_gpushd_crash() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let gpushd = host.start("").await;
    in_use(&gpushd).await;
    let before = host.gpus.layout(0);
    // gpushd records the end of an operation that has not started before it answers.
    let waiting = gpushd.ended_or(&gpushd.begin_waiting(&["0"], &["7g.80gb"]).await, is_waiting).await;
    gpushd.cancel(&waiting.id).await.expect("it is cancelled");
    gpushd.kill();
    let gpushd = host.start("").await;
    let (state, error) = outcome(gpushd.operation(&waiting.id).await);
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::Cancelled));
    host.gpus.end_processes(0);
    // The next gpushd could finish an operation that has started, but must roll it back.
    host.gpus.rule(CallRule::on(CREATE, 0).after(1).once().held());
    let running = gpushd.begin(&["0"], &["3g.40gb@4", "1g.10gb*4"], &json!({})).await.expect("it begins");
    gpushd.until_held().await;
    gpushd.cancel(&running.id).await.expect("it is cancelled");
    gpushd.kill();
    let gpushd = host.start("").await;
    let ended = gpushd.ended(&running).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(host.gpus.layout(0), before);
}

/// The time limit counts from the request, also if gpushd does not run for a part of that time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_of_an_operation_is_not_extended_by_a_restart() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let gpushd = host.start("").await;
    in_use(&gpushd).await;
    let limit = Duration::from_secs(2);
    let earlier = gpushd.begin(&["0"], &["7g.80gb"], &json!({ "wait_s": limit.as_secs() })).await.expect("it waits");
    gpushd.kill();
    // The limit passes while no gpushd runs.
    tokio::time::sleep(limit).await;
    let gpushd = host.start("").await;
    let later = gpushd.begin(&["0"], &["7g.80gb"], &json!({ "wait_s": 1 })).await.expect("it waits");
    assert_eq!(outcome(gpushd.ended(&later).await).1.code, Code::TimedOut);
    let (state, error) = outcome(gpushd.operation(&earlier.id).await);
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::TimedOut), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_of_each_operation_is_in_the_audit_trail() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    let done = host.apply(&["0"], &["3g.40gb@4"]).await;
    host.gpus.fail(CREATE, 0, 1, ErrorKind::Unknown);
    let rolled_back = host.apply(&["0"], &["1g.10gb*2"]).await;
    host.gpus.use_first_device(0, std::process::id());
    let waiting = host.begin_waiting(&["0"], &["7g.80gb"]).await;
    host.cancel(&waiting.id).await.expect("it is cancelled");
    let not_started = host.ended(&waiting).await;
    for (ended, state) in [
        (done, OperationState::Done),
        (rolled_back, OperationState::RolledBack),
        (not_started, OperationState::NotStarted),
    ] {
        assert_eq!(ended.state, state, "{ended:?}");
        let trail: Vec<AuditRecord> = host.get(&format!("/v1/audit?object={}", ended.id)).await;
        let results: Vec<&str> = trail.iter().map(|record| record.result.as_str()).collect();
        assert!(results.contains(&"accepted") && results.contains(&state.name()), "{state}: {results:?}");
        let why = trail.iter().find(|record| record.result == state.name()).map(|record| &record.detail["why"]);
        assert_eq!(why.and_then(Value::as_str), ended.error.as_ref().map(|error| error.message.as_str()), "{trail:?}");
    }
}
