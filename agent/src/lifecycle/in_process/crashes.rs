//! gpushd ends before and after every driver call: of an apply, of a rollback, of a recovery, of a change of MIG mode. The
//! next gpushd must reach the new or the previous layout, and report which of them. Instances in use must not change.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{GpuState, Operation, OperationState, OperationSummary};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{ANY_CHANGE, CREATE_COMPUTE, CallEffect, CallRule, EndMoment},
    user,
};

const MOMENTS: [EndMoment; 2] = [EndMoment::Before, EndMoment::After];

/// A change of layout. The change must keep an instance that is in use.
struct LayoutChange {
    name: &'static str,
    before: &'static [&'static str],
    after: &'static [&'static str],
    /// Start slice of the instance in use. The slice is the same in both layouts.
    used: Option<u8>,
}

const CHANGES: [LayoutChange; 3] = [
    LayoutChange {
        name: "grow",
        before: &["3g.40gb@4"],
        after: &["3g.40gb@4", "2g.20gb@0", "1g.10gb@2"],
        used: Some(4),
    },
    LayoutChange {
        name: "shrink",
        before: &["3g.40gb@4", "2g.20gb@0", "1g.10gb@2"],
        after: &["3g.40gb@4"],
        used: Some(4),
    },
    RESHAPE,
];

const RESHAPE: LayoutChange = LayoutChange {
    name: "reshape",
    before: &["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"],
    after: &["1c.3g.40gb*2", "4g.40gb"],
    used: None,
};

fn layout(entries: &[&str]) -> Value {
    json!({ "selectors": ["0"], "layout_source": { "entries": entries } })
}

/// Executes a request, and expects its operation to end in this state. Returns the number of its changing calls.
async fn calls(gpushd: &InProcess, body: &Value, state: OperationState) -> u32 {
    gpushd.gpus.take_changes();
    let begun = gpushd.begin_with(body).await.expect("it begins");
    let ended = gpushd.ended(&begun).await;
    assert_eq!(ended.state, state, "{ended:?}");
    u32::try_from(gpushd.gpus.take_changes().len()).expect("a few")
}

fn end_at(call: u32, moment: EndMoment) -> CallRule {
    CallRule::on(ANY_CHANGE, 0).after(call).once().with(CallEffect::EndGpushd(moment))
}

/// Sends a request that ends gpushd, and starts the next gpushd.
async fn end_in(gpushd: InProcess, body: &Value, rules: impl IntoIterator<Item = CallRule>) -> InProcess {
    let host = Arc::clone(&gpushd.host);
    rules.into_iter().for_each(|rule| host.gpus.rule(rule));
    let asked = gpushd.begin_post(user(0), "/v1/mig/apply", body);
    gpushd.died().await;
    drop(asked);
    host.gpus.clear_faults();
    host.start("").await
}

async fn last(gpushd: &InProcess) -> Operation {
    let listed: Vec<OperationSummary> = gpushd.get("/v1/operations?limit=1").await;
    gpushd.operation(&listed[0].id).await
}

/// Checks what gpushd has done with the operation that its predecessor left. The hardware must match the state that the
/// operation reports.
async fn recovered(gpushd: &InProcess, before: &[String], after: &[String], what: &str) -> OperationState {
    let operation = gpushd.ended(&last(gpushd).await).await;
    let now = gpushd.gpus.layout(0);
    match operation.state {
        OperationState::Done => assert_eq!(now, after, "{what}: {operation:?}"),
        OperationState::RolledBack => assert!(now == before && operation.error.is_some(), "{what}: {operation:?}"),
        _ => panic!("{what}: {operation:?}"),
    }
    let is_said = |note: &String| note.contains("gpushd ended while the operation was");
    assert!(operation.notes.iter().any(is_said), "{what}: {operation:?}");
    let gpu = gpushd.gpu(0).await;
    assert_eq!(gpu.state, GpuState::Ready, "{what}: {:?}", gpu.reasons);
    operation.state
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_killed_around_any_driver_call_recovers() {
    let mut gpushd = InProcess::start("dgx-a100", 1, "").await;
    let gpus = Arc::clone(&gpushd.gpus);
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    for change in &CHANGES {
        gpushd.apply(&["0"], change.before).await;
        let number = calls(&gpushd, &layout(change.after), OperationState::Done).await;
        let after = gpus.layout(0);
        for (call, moment) in (0..number).flat_map(|call| MOMENTS.map(|moment| (call, moment))) {
            let what = format!("{}: {moment:?} call {call} of {number}", change.name);
            calls(&gpushd, &layout(change.before), OperationState::Done).await;
            let before = gpus.layout(0);
            let used = change.used.map(|start| gpus.instance_at(0, start));
            if let Some(start) = change.used {
                gpus.use_device_at(0, start, std::process::id());
            }
            gpushd = end_in(gpushd, &layout(change.after), [end_at(call, moment)]).await;
            let end = recovered(&gpushd, &before, &after, &what).await;
            *ends.entry(format!("{} {end}", change.name)).or_default() += 1;
            assert_eq!(used, change.used.map(|start| gpus.instance_at(0, start)), "{what}: the instance in use");
            gpus.end_processes(0);
        }
    }
    println!("ended at {} points of {} applies: {ends:?}", ends.values().sum::<u32>(), CHANGES.len());
    assert!(ends.values().sum::<u32>() > 30, "{ends:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_killed_around_any_rollback_call_recovers() {
    let mut gpushd = InProcess::start("dgx-a100", 1, "").await;
    let body = layout(RESHAPE.after);
    gpushd.apply(&["0"], RESHAPE.before).await;
    let forward = calls(&gpushd, &body, OperationState::Done).await;
    let after = gpushd.gpus.layout(0);
    // Let the last creation fail. gpushd must then undo every step.
    let creations = 3;
    let fails = || CallRule::on(CREATE_COMPUTE, 0).after(creations - 1).once().fails(ErrorKind::InsufficientResources);
    gpushd.apply(&["0"], RESHAPE.before).await;
    gpushd.gpus.rule(fails());
    let all = calls(&gpushd, &body, OperationState::RolledBack).await;
    let mut points = 0;
    for (call, moment) in (forward..all).flat_map(|call| MOMENTS.map(|moment| (call, moment))) {
        let what = format!("{moment:?} call {call} of {all}");
        let before = gpushd.gpus.layout(0);
        gpushd = end_in(gpushd, &body, [fails(), end_at(call, moment)]).await;
        let end = recovered(&gpushd, &before, &after, &what).await;
        assert_eq!(end, OperationState::RolledBack, "{what}");
        points += 1;
    }
    println!("ended at {points} points of a rollback");
    assert!(points > 8, "{points}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_killed_in_any_recovery_recovers() {
    let mut gpushd = InProcess::start("dgx-a100", 1, "").await;
    let host = Arc::clone(&gpushd.host);
    let body = layout(RESHAPE.after);
    gpushd.apply(&["0"], RESHAPE.before).await;
    let number = calls(&gpushd, &body, OperationState::Done).await;
    let after = host.gpus.layout(0);
    let (mut points, mut deepest) = (0, 0);
    for (call, moment) in (0..number).flat_map(|call| MOMENTS.map(|moment| (call, moment))) {
        calls(&gpushd, &layout(RESHAPE.before), OperationState::Done).await;
        let before = host.gpus.layout(0);
        host.gpus.rule(end_at(call, moment));
        let asked = gpushd.begin_post(user(0), "/v1/mig/apply", &body);
        gpushd.died().await;
        drop(asked);
        // Each gpushd ends as soon as its recovery has made one change, until no change is left.
        let mut ended = 0;
        loop {
            host.gpus.clear_faults();
            host.gpus.rule(end_at(0, EndMoment::After));
            let next = host.start("").await;
            let is_final = next
                .until("an end", async || {
                    if host.gpus.is_ending() {
                        return Some(false);
                    }
                    last(&next).await.state.is_final().then_some(true)
                })
                .await;
            if is_final {
                gpushd = next;
                break;
            }
            next.kill();
            ended += 1;
            assert!(ended < 50, "call {call} {moment:?}: the recovery never ends");
        }
        host.gpus.clear_faults();
        let what = format!("recovery ended {ended} times after {moment:?} call {call}");
        recovered(&gpushd, &before, &after, &what).await;
        points += ended;
        deepest = deepest.max(ended);
    }
    println!("{points} recoveries ended, up to {deepest} in a row");
    assert!(points > 20 && deepest > 2, "{points} {deepest}");
}

/// A Hopper GPU needs no reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_killed_around_any_mode_change_call_recovers() {
    let mut gpushd = InProcess::start("dgx-h100", 1, "").await;
    let gpus = Arc::clone(&gpushd.gpus);
    gpus.without_mig();
    let off = json!({ "layout_source": { "per_gpu": [{ "selector": "0", "mig_enabled": false }] } });
    let on = layout(&["3g.40gb", "1g.10gb*2"]);
    let whole = gpus.layout(0);
    calls(&gpushd, &on, OperationState::Done).await;
    let partitioned = gpus.layout(0);
    for (body, back, after) in [(&off, &on, &whole), (&on, &off, &partitioned)] {
        let number = calls(&gpushd, body, OperationState::Done).await;
        for (call, moment) in (0..number).flat_map(|call| MOMENTS.map(|moment| (call, moment))) {
            calls(&gpushd, back, OperationState::Done).await;
            let before = gpus.layout(0);
            gpushd = end_in(gpushd, body, [end_at(call, moment)]).await;
            recovered(&gpushd, &before, after, &format!("{moment:?} call {call} of {number}")).await;
            let mig = gpushd.gpu(0).await.mig.expect("MIG");
            assert_eq!(mig.enabled, mig.pending_mode(), "nothing waits for a reset");
        }
        calls(&gpushd, body, OperationState::Done).await;
    }
}
