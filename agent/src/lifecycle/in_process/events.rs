//! Events. A listener gets each event once. If a listener has missed events, gpushd reports that to the listener.

use std::collections::BTreeSet;

use gpush_api::{Code, Event, EventKind, EventPayload, GpuState, OperationState, ResyncReason, TargetUuid};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    InProcess,
    host::ScriptedHost,
    listener::{number, state},
    user,
};

fn assert_consecutive(events: &[Event]) {
    let numbers: Vec<u64> = events.iter().map(number).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_change_is_one_event_in_order() {
    let host = InProcess::start("dgx-a100", 2, "").await;
    host.gpus().await;
    let mut listener = host.listen("", None).await;
    let begun = host.begin(&["0", "1"], &["3g.40gb", "1g.10gb"], &json!({})).await.expect("it begins");
    let reported = listener.until_end_of(&begun.id).await;
    assert_consecutive(&reported);
    let states: Vec<OperationState> = reported.iter().filter_map(|event| Some(state(event)?.1)).collect();
    assert_eq!((states[0], states[states.len() - 1]), (OperationState::Running, OperationState::Done));
    // When a step begins, gpushd sends an event with the number of finished steps: on each GPU, from 0 of 4 to 4 of 4.
    for gpu in 0..2 {
        let done = |event: &Event| match &event.what {
            EventPayload::Operation(change) => Some(change.progress[gpu].done),
            _ => None,
        };
        let mut done: Vec<u32> = reported.iter().filter_map(done).collect();
        done.dedup();
        assert_eq!(done, [0, 1, 2, 3, 4], "GPU {gpu}");
    }
    assert!(!serde_json::to_string(&reported).expect("JSON").contains("\"plans\""));
    // Before the end of the operation, an event shows that the GPU is free and has its new instances. gpushd sends this
    // event even if no client reads the GPU.
    let gpu = reported.iter().rev().find_map(|event| match &event.what {
        EventPayload::Gpu(change) if change.gpu == 1 => Some(change),
        _ => None,
    });
    let gpu = gpu.unwrap_or_else(|| panic!("{reported:?}"));
    assert_eq!((gpu.state, gpu.instances.len(), gpu.mig), (GpuState::Ready, 2, Some(true)));
    // An event names the MIG devices that an operation destroys.
    let before: BTreeSet<TargetUuid> = gpu.instances.iter().flat_map(|one| one.device_uuids.clone()).collect();
    assert_eq!(before.len(), 2, "{gpu:?}");
    let begun = host.begin(&["1"], &["7g.80gb"], &json!({})).await.expect("it begins");
    let reported = listener.until_end_of(&begun.id).await;
    let destroyed = reported.iter().flat_map(|event| match &event.what {
        EventPayload::Gpu(change) => change.destroyed_device_uuids.clone(),
        _ => Vec::new(),
    });
    assert_eq!(destroyed.collect::<BTreeSet<_>>(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnecting_listener_gets_exactly_the_missed_events() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    host.gpus().await;
    let mut stayed = host.listen("", None).await;
    let (mut all, mut pieces): (Vec<Event>, Vec<Event>) = (Vec::new(), Vec::new());
    let mut place: Option<String> = None;
    for round in 0..6 {
        let layout = if round % 2 == 0 { "1g.10gb*7" } else { "7g.80gb" };
        // In every third round, no listener is connected. In the other rounds, the listener disconnects during the
        // operation.
        let mut listener = None;
        if round % 3 > 0 || place.is_none() {
            listener = Some(host.listen("", place.as_deref()).await);
        }
        let operation = host.begin(&["0"], &[layout], &json!({})).await.expect("it begins");
        if let Some(mut listener) = listener {
            for _ in 0..=round {
                pieces.extend(listener.event().await);
            }
            place = Some(listener.place.clone());
        }
        all.extend(stayed.until_end_of(&operation.id).await);
    }
    let mut listener = host.listen("", place.as_deref()).await;
    let last = all.last().expect("an event").id.clone();
    pieces.extend(listener.until(|event| event.id == last).await);
    assert_consecutive(&all);
    let from = all.iter().position(|event| event.id == pieces[0].id).expect("the first event");
    assert_eq!(pieces, all[from..], "each event once, in order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_id_of_an_earlier_gpushd_gets_a_resync() {
    let host = ScriptedHost::new("a30x4", 1);
    let gpushd = host.start("").await;
    let mut listener = gpushd.listen("", None).await;
    let operation = gpushd.begin(&["0"], &["4g.24gb"], &json!({})).await.expect("it begins");
    listener.until_end_of(&operation.id).await;
    let place = listener.place.clone();
    gpushd.kill();
    let gpushd = host.start("").await;
    let mut listener = gpushd.listen("?kinds=operation", Some(&place)).await;
    let first = listener.event().await.expect("an event");
    let is_resync =
        |what: &EventPayload| matches!(what, EventPayload::Resync(one) if one.reason == ResyncReason::OtherRun);
    assert!(is_resync(&first.what), "{first:?}");
    // After the resync, the listener gets later events.
    let operation = gpushd.begin(&["0"], &["1g.6gb*4"], &json!({})).await.expect("it begins");
    assert!(listener.until_end_of(&operation.id).await.len() > 3);
    let run = |place: &str| place.rsplit_once('-').expect("a number").0.to_owned();
    assert_ne!(run(&place), run(&listener.place));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn event_filters_apply_and_invalid_ones_are_refused() {
    let host = InProcess::start("dgx-a100", 2, "").await;
    host.gpus().await;
    let mut one = host.listen("?gpu=1&kinds=operation,gpu", None).await;
    host.apply(&["0"], &["7g.80gb"]).await;
    let second = host.begin(&["0", "1"], &["1g.10gb"], &json!({})).await.expect("it begins");
    let reported = one.until_end_of(&second.id).await;
    assert!(reported.iter().all(|event| state(event).is_none_or(|(id, _)| id == second.id)), "{reported:?}");
    let is_wanted = |event: &Event| [EventKind::Gpu, EventKind::Operation].contains(&event.what.kind());
    assert!(reported.iter().all(is_wanted), "{reported:?}");

    let path = "/v1/events?follow=false&kinds=operation";
    let stored: Vec<Event> = host.get(path).await;
    assert!(stored.iter().all(|event| event.what.kind() == EventKind::Operation), "{stored:?}");
    let rest = host.request(Method::GET, path, &[("last-event-id", &stored[2].id)], "").await;
    assert_eq!(rest.document::<Vec<Event>>().expect("events"), stored[3..]);

    for (parameters, code, says) in [
        ("?kinds=weather", Code::BadRequest, "operation, gpu, config"),
        ("?kinds=", Code::BadRequest, "not a kind"),
        ("?gpu=9", Code::NotFound, "9"),
        ("?gpu=", Code::BadRequest, ""),
        ("?since=1", Code::BadRequest, "since"),
        ("?follow=perhaps", Code::BadRequest, "follow"),
    ] {
        let error = host.get_as::<Value>(user(0), &format!("/v1/events{parameters}")).await.unwrap_err();
        let text = format!("{} {}", error.message, error.hint.clone().unwrap_or_default());
        assert!(error.code == code && text.contains(says), "{parameters}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listening_makes_no_driver_call() {
    // Without records, gpushd takes no samples.
    let host = InProcess::start("dgx-a100", 2, "[history]\ndays = 0\n").await;
    host.gpus().await;
    let before = host.gpus.calls();
    let mut listeners = Vec::new();
    for gpu in [0, 1] {
        listeners.push(host.listen(&format!("?gpu={gpu}"), None).await);
        host.get::<Value>("/v1/events?follow=false").await;
        host.get::<Value>("/v1/operations").await;
    }
    assert_eq!(host.gpus.calls(), before);
    // A reading is a call.
    host.apply(&["0"], &["7g.80gb"]).await;
    assert!(host.gpus.calls() > before);
}
