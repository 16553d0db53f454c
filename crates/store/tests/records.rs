//! Normal use of the store: each kind of record over its lifetime, atomic transactions, shared syncs, and
//! unchanged content after reopening.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use gpush_api::{ApiError, Code, ComputeMode, GpuIndex, Mode, OperationState, StepState, TimesliceLevel};
use gpush_core::mps::{MpsStopped, MpsTargetRecord};
use gpush_store::{
    Answer, AuditQuery, Bounds, ComputeModeSet, ConditionKind, LevelSet, NewAnswer, NewCondition, Note, OperationId,
    Options, Scope, SharedGpu, Store, StoreError,
};
use jiff::{SignedDuration, Timestamp};
use scene::{actor, audit, condition, everything, intent, open, operation, options, override_of};

/// An intent summary contains the facts that a list of operations needs, but not the plans.
#[test]
fn intent_summary_says_what_has_begun_and_names_gpus() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let queued = store.write(|tx| tx.enqueue(operation("mig.apply", 1))).wait().unwrap().id;
    let begun = store.write(|tx| tx.begin(operation("mig.apply", 2))).wait().unwrap().id;
    let ended = store.write(|tx| tx.begin(operation("mig.apply", 3))).wait().unwrap().id;
    store.write_ending(move |tx| tx.end(ended, OperationState::Done, None)).wait().unwrap();
    let all = store.read(move |view| view.intent_summaries(queued, None)).wait().unwrap();
    assert_eq!([queued, begun, ended].map(|id| all[&id].begun), [false, true, true]);
    assert!(all.values().all(|one| one.gpu_uuids == ["GPU-0"]), "{all:?}");
    let some = store.read(move |view| view.intent_summaries(begun, Some(ended))).wait().unwrap();
    assert_eq!(some.into_keys().collect::<Vec<_>>(), [begun]);
}

/// Fault: a search for a GPU found neither the GPU's resets nor the MPS records of MIG devices that no longer exist.
#[test]
fn audit_is_searched_by_gpu_device_target_and_holder() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let records = [
        ("reset", "host", serde_json::json!({ "gpu_uuids": ["GPU-1", "GPU-2"] })),
        ("mps", "m1234abcd", serde_json::json!({ "uuid": "MIG-1", "gpu_uuid": "GPU-1" })),
        (
            "lease",
            "L7",
            serde_json::json!({ "targets": ["MIG-1"], "user": "alice", "gpus": [{ "gpu_uuid": "GPU-1" }] }),
        ),
        ("apply", "op-3", serde_json::json!({ "gpus": [{ "gpu_uuid": "GPU-1" }] })),
        ("other", "config", serde_json::json!({ "targets": "MIG-2" })),
    ];
    for (action, object, detail) in records {
        let new = gpush_store::NewAudit { detail, ..audit(action, object) };
        store.write(move |tx| tx.audit(new.clone())).wait().unwrap();
    }
    let found = |objects: &[&str], operations_of: &[&str]| {
        let list = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let query = AuditQuery { objects: list(objects), operations_of: list(operations_of), ..AuditQuery::default() };
        let found = store.read(move |view| view.audit(&query)).wait().unwrap();
        found.into_iter().map(|one| one.action).collect::<Vec<_>>()
    };
    assert_eq!(found(&["GPU-1"], &[]), ["reset", "mps", "lease", "apply"]);
    assert_eq!(found(&["GPU-2"], &[]), ["reset"]);
    assert_eq!(found(&["MIG-1"], &["GPU-1"]), ["mps", "lease", "apply"]);
    assert_eq!(
        (found(&["alice"], &[]), found(&["m1234abcd"], &[])),
        (vec!["lease".to_owned()], vec!["mps".to_owned()])
    );
    assert_eq!(found(&[], &[]).len(), 5);
}

#[test]
fn operation_follows_its_states_and_survives_reopening() {
    let scratch = tempfile::tempdir().unwrap();
    let opened = open(scratch.path());
    assert_eq!(opened.notes.iter().filter(|note| **note == Note::Created).count(), 1);
    let store = opened.store;
    let first = store.write(|tx| tx.enqueue(operation("mig.apply", 1))).wait().unwrap();
    assert_eq!((first.id.to_string().as_str(), first.stage, first.revision), ("op-1", OperationState::Queued, 1));
    assert_eq!((first.boot_id.as_str(), first.instance.as_str()), ("boot-1", store.instance()));
    let second = store.write(|tx| tx.begin(operation("mig.apply", 2))).wait().unwrap();
    let id = first.id;
    let started = store.write(move |tx| tx.start(id, intent(3), Vec::new())).wait().unwrap();
    assert_eq!((started.stage, started.revision), (OperationState::Running, 2));
    // A driver call may have happened, so the recorded state before it must not be overwritten.
    let again = store.write(move |tx| tx.start(id, intent(4), Vec::new())).wait().unwrap_err();
    assert!(matches!(again, StoreError::Transition { from: OperationState::Running, .. }), "{again}");

    let step = StepState {
        gpu: GpuIndex(0),
        done: 1,
        total: 4,
        doing: Some("x".to_owned()),
        rolling_back: false,
        restored: false,
        error: None,
    };
    let step = vec![step];
    let reported = store.write(move |tx| tx.progress(id, step.clone())).wait().unwrap();
    assert_eq!(reported.progress[0].doing.as_deref(), Some("x"));
    let stop = serde_json::json!({ "start": "nvidia-dcgm.service" });
    let position = store.write(move |tx| tx.add_undo(id, stop.clone())).wait().unwrap();
    let more = store.write(move |tx| tx.add_undo(id, serde_json::json!(2))).wait().unwrap();
    assert_eq!((position, more), (0, 1));
    assert!(store.write(move |tx| tx.mark_undone(id, 1)).wait().unwrap());
    assert!(!store.write(move |tx| tx.mark_undone(id, 2)).wait().unwrap());
    drop(store);

    // The next gpushd finds both operations, with everything that it needs for recovery.
    let store = open(scratch.path()).store;
    let found = store.read(|view| view.unfinished()).wait().unwrap();
    assert_eq!(found.iter().map(|one| one.record.id).collect::<Vec<_>>(), [first.id, second.id]);
    let begun = gpush_store::Intent { begun: Some(found[0].intent.begun.expect("it had begun")), ..intent(3) };
    assert_eq!((found[0].intent.clone(), found[0].undo.len()), (begun, 1));
    assert_ne!(found[0].record.instance, store.instance());
    let taken = store.write(move |tx| tx.advance(id, OperationState::Interrupted)).wait().unwrap();
    assert_eq!(taken.instance, store.instance());
    let error = ApiError::new(Code::DriverError, "it broke");
    let ended = {
        let error = error.clone();
        store.write_ending(move |tx| tx.end(id, OperationState::RolledBack, Some(error.clone()))).wait().unwrap()
    };
    assert_eq!((ended.error, ended.progress[0].doing.clone()), (Some(error), None));
    assert!(ended.ended_at.is_some());
    // Clients may have seen a higher revision than the store recorded.
    let reported = ended.revision + 5;
    for (revision, now) in [(reported, reported), (reported - 3, reported)] {
        let raised = store.write_ending(move |tx| tx.raise_revision(id, revision)).wait().unwrap();
        assert_eq!((raised.revision, raised.stage), (now, OperationState::RolledBack));
    }
    // The operation has ended, but a service that it stopped must still be started again.
    let found = store.read(|view| view.unfinished()).wait().unwrap();
    assert_eq!(
        found.iter().map(|one| one.record.stage).collect::<Vec<_>>(),
        [OperationState::RolledBack, OperationState::Running]
    );
    assert!(store.write_ending(move |tx| tx.mark_undone(id, 0)).wait().unwrap());
    assert_eq!(store.read(|view| view.unfinished()).wait().unwrap().len(), 1);

    for (to, allowed) in
        [(OperationState::Done, false), (OperationState::Running, false), (OperationState::Failed, false)]
    {
        let outcome =
            store.write(move |tx| if to.is_final() { tx.end(id, to, None) } else { tx.advance(id, to) }).wait();
        assert_eq!(outcome.is_ok(), allowed, "{to}");
    }
    let unknown = store.write(|tx| tx.end(OperationId(99), OperationState::Done, None)).wait().unwrap_err();
    assert_eq!(unknown, StoreError::NoSuchOperation(OperationId(99)));
}

#[test]
fn failed_transaction_leaves_others_of_its_batch() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    store.write(|tx| tx.set_override(override_of("GPU-0", "first"))).wait().unwrap();
    let before = store.read(everything).wait().unwrap();
    let refused = ApiError::new(Code::Conflict, "GPU 0 is being changed by op-7");
    let own = refused.clone();
    // All writes are in one call, so that they share a batch.
    let fails = store.write(move |tx| {
        tx.begin(operation("mig.apply", 1))?;
        tx.clear_override(&"GPU-0".into())?;
        tx.audit(audit("mig.apply", "GPU-0"))?;
        Err::<(), _>(StoreError::from(own.clone()))
    });
    let panics = store.write(|tx| {
        tx.begin(operation("mig.apply", 1))?;
        if tx.read(|view| view.sequence()) > 0 {
            panic!("on purpose");
        }
        Ok(())
    });
    let error = fails.wait().unwrap_err();
    assert_eq!(ApiError::from(error), refused);
    assert!(matches!(panics.wait(), Err(StoreError::Internal(_))));
    assert_eq!(store.read(everything).wait().unwrap(), before);
    let large = store.write(|tx| {
        tx.set_override(override_of("GPU-1", "small"))?;
        tx.set_override(override_of("GPU-0", &"x".repeat(2 << 20)))
    });
    assert!(matches!(large.wait(), Err(StoreError::TooLarge { table: "overrides", .. })));
    assert_eq!(store.read(everything).wait().unwrap(), before);
    // A record is refused if it could not be read at the next start.
    let deep = (0..200).fold(serde_json::Value::Null, |inner, _| serde_json::json!([inner]));
    let deep = store.write(move |tx| tx.audit(gpush_store::NewAudit { detail: deep.clone(), ..audit("x", "y") }));
    assert!(matches!(deep.wait(), Err(StoreError::Unreadable { table: "audit", .. })));
    assert_eq!(store.read(everything).wait().unwrap(), before);
    // The next operation takes the number that the failed one did not use.
    let next = store.write(|tx| tx.begin(operation("mig.apply", 1))).wait().unwrap();
    assert_eq!(next.id, OperationId(1));
}

#[tokio::test]
async fn concurrent_callers_share_a_sync() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    // Keep the store's thread busy until all writes are queued.
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let block = store.read(move |_| {
        let _ = wait.recv();
        Ok(())
    });
    const MANY: usize = 100;
    let all: Vec<_> = (0..MANY).map(|n| store.write(move |tx| tx.audit(audit("x", &n.to_string())))).collect();
    go.send(()).unwrap();
    block.await.unwrap();
    let mut sequences = Vec::new();
    for pending in all {
        sequences.push(pending.await.unwrap());
    }
    assert!(sequences.is_sorted());
    let statistics = store.statistics();
    println!("{} writes in {} commits", statistics.writes, statistics.commits);
    assert_eq!(statistics.writes, MANY as u64);
    assert!(statistics.commits <= 2, "{statistics:?}");
    // A transaction without a change causes no commit.
    store.write(|tx| tx.answer(1, "k", b"r")).await.unwrap();
    assert_eq!(store.statistics().commits, statistics.commits);
    store.ping().await.unwrap();
}

#[test]
fn overrides_are_cleared_or_expire_and_raise_generation() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let made = store.write(|tx| tx.set_override(override_of("GPU-1", "a test"))).wait().unwrap();
    assert_eq!(made.generation, 1);
    let later = store
        .write(|tx| {
            let expires_at = Some(tx.now());
            tx.set_override(gpush_store::NewOverride { expires_at, ..override_of("GPU-0", "an hour") })
        })
        .wait()
        .unwrap();
    assert_eq!(later.generation, 2);
    drop(store);
    let store = open(scratch.path()).store;
    assert_eq!(store.read(|view| view.overrides()).wait().unwrap(), [made.clone(), later.clone()]);
    assert_eq!(store.read(|view| view.expired_overrides()).wait().unwrap(), std::slice::from_ref(&later));
    assert_eq!(store.write_ending(|tx| tx.clear_override(&"GPU-0".into())).wait().unwrap(), Some(later));
    assert_eq!(store.write_ending(|tx| tx.clear_override(&"GPU-0".into())).wait().unwrap(), None);
    assert_eq!(store.read(|view| Ok(view.generation())).wait().unwrap(), 3);
}

#[test]
fn conditions_are_distinguished_by_cause() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let set = store
        .write(|tx| {
            let host = NewCondition { scope: Scope::Host, kind: ConditionKind::Maintenance, ..condition("", "admin") };
            Ok([
                tx.set_condition(condition("GPU-0", "admin"))?,
                tx.set_condition(condition("GPU-0", "xid-79"))?,
                tx.set_condition(host)?,
            ])
        })
        .wait()
        .unwrap();
    let gpu = Scope::Gpu("GPU-0".into());
    let cleared = {
        let gpu = gpu.clone();
        store.write(move |tx| tx.clear_conditions(&gpu, ConditionKind::Cordon, Some("xid-79"))).wait().unwrap()
    };
    assert_eq!(cleared, [set[1].clone()]);
    drop(store);
    let store = open(scratch.path()).store;
    assert_eq!(store.read(|view| view.conditions()).wait().unwrap(), [set[0].clone(), set[2].clone()]);
    let cleared = store.write(move |tx| tx.clear_conditions(&gpu, ConditionKind::Cordon, None)).wait().unwrap();
    assert_eq!(cleared, [set[0].clone()]);
}

#[test]
fn answer_is_repeated_for_same_user_key_and_request() {
    let scratch = tempfile::tempdir().unwrap();
    let mut store = open(scratch.path()).store;
    let expires_at = Timestamp::now() + SignedDuration::from_hours(1);
    let kept = |key: &str, expires_at| NewAnswer {
        uid: 1000,
        key: key.to_owned(),
        request: b"POST /v1/mig/apply {}",
        operation: Some(OperationId(1)),
        status: 202,
        body: serde_json::json!({ "id": "op-1" }),
        expires_at,
    };
    store
        .write(move |tx| {
            tx.keep_answer(kept("key", expires_at))?;
            tx.keep_answer(kept("old", Timestamp::UNIX_EPOCH))
        })
        .wait()
        .unwrap();
    for _ in 0..2 {
        let [known, other, user, old] = store
            .read(|view| {
                Ok([
                    view.answer(1000, "key", b"POST /v1/mig/apply {}")?,
                    view.answer(1000, "key", b"POST /v1/mig/apply {1}")?,
                    view.answer(1001, "key", b"POST /v1/mig/apply {}")?,
                    view.answer(1000, "old", b"POST /v1/mig/apply {}")?,
                ])
            })
            .wait()
            .unwrap();
        let Answer::Known(known) = known else { panic!("{known:?}") };
        assert_eq!((known.status, known.operation, known.key.as_str()), (202, Some(OperationId(1)), "key"));
        assert_eq!((other, user, old), (Answer::OtherRequest, Answer::None, Answer::None));
        drop(store);
        store = open(scratch.path()).store;
    }
}

#[test]
fn history_is_bounded_and_wrong_clock_keeps_trail() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds =
        Bounds { operations: 3, answers: 2, audit_most: 50, audit_least: 10, reserve: 1 << 16, ..Bounds::default() };
    let open = |clock: Timestamp| {
        let options = Options { bounds, clock: std::sync::Arc::new(move || clock), ..options() };
        Store::open(scratch.path(), options).unwrap()
    };
    let start = Timestamp::from_second(1_800_000_000).unwrap();
    let store = open(start).store;
    for n in 0..70u64 {
        store
            .write(move |tx| {
                if n < 8 {
                    let id = tx.begin(operation("x", n))?.id;
                    if n == 0 {
                        tx.add_undo(id, serde_json::json!(1))?;
                    }
                    tx.end(id, OperationState::Done, None)?;
                    tx.keep_answer(NewAnswer {
                        uid: 1,
                        key: n.to_string(),
                        request: b"",
                        operation: None,
                        status: 200,
                        body: serde_json::Value::Null,
                        expires_at: tx.now() + SignedDuration::from_hours(1),
                    })?;
                }
                tx.audit(audit("x", &n.to_string()))
            })
            .wait()
            .unwrap();
    }
    // Closing the store deletes old records.
    drop(store);
    let look = |store: &Store| {
        store
            .read(|view| {
                let operations: Vec<u64> = view.operations()?.iter().map(|record| record.id.0).collect();
                let trail = view.audit(&AuditQuery::default())?;
                let known = (0..8).filter(|n| view.answer(1, &n.to_string(), b"") != Ok(Answer::None)).count();
                Ok((operations, trail.len(), trail.last().map(|last| last.object.clone()), known))
            })
            .wait()
            .unwrap()
    };
    let store = open(start).store;
    // The first operation still has an undo entry.
    assert_eq!(look(&store), (vec![1, 6, 7, 8], 50, Some("69".to_owned()), 2));
    drop(store);
    // The clock is far ahead, and is then set back. Because `audit_least` is ten, the last ten records stay. A note
    // reports that the clock was set back. The order of the records does not change.
    let store = open(start + SignedDuration::from_hours(24 * 365 * 50)).store;
    store.write(|tx| tx.audit(audit("x", "ahead"))).wait().unwrap();
    drop(store);
    let opened = open(start);
    assert!(opened.notes.iter().any(|note| matches!(note, Note::ClockBack { .. })), "{:?}", opened.notes);
    let store = opened.store;
    let trail = look(&store);
    assert_eq!((trail.1, trail.2), (10, Some("ahead".to_owned())));
    store.write(|tx| tx.audit(audit("x", "back"))).wait().unwrap();
    let last = AuditQuery { latest: true, limit: 2, ..AuditQuery::default() };
    let last = store.read(move |view| view.audit(&last)).wait().unwrap();
    assert_eq!(last.iter().map(|one| one.object.as_str()).collect::<Vec<_>>(), ["ahead", "back"]);
    let about = AuditQuery { objects: vec!["69".to_owned()], ..AuditQuery::default() };
    assert_eq!(store.read(move |view| view.audit(&about)).wait().unwrap().len(), 1);
    let gpus = serde_json::json!({ "gpus": [{ "gpu_uuid": "GPU-a" }, { "gpu_uuid": "GPU-b" }, 7] });
    let by_gpu = move |tx: &mut gpush_store::Tx<'_>| {
        tx.audit(gpush_store::NewAudit { detail: gpus.clone(), ..audit("x", "op-1") })?;
        tx.audit(audit("y", "op-1"))?;
        tx.audit(audit("z", "GPU-b"))
    };
    store.write(by_gpu).wait().unwrap();
    let about = |objects: &[&str]| {
        let objects = objects.iter().map(|object| (*object).to_owned()).collect();
        let query = AuditQuery { objects, ..AuditQuery::default() };
        let found = store.read(move |view| view.audit(&query)).wait().unwrap();
        found.into_iter().map(|one| one.action).collect::<Vec<_>>()
    };
    assert_eq!(about(&["GPU-a"]), ["x", "y"]);
    assert_eq!(about(&["GPU-b"]), ["x", "y", "z"]);
    assert_eq!((about(&["op-1"]), about(&["GPU-c"])), (vec!["x".to_owned(), "y".to_owned()], vec![]));
    let after = AuditQuery { after: last[0].sequence, limit: 1, ..AuditQuery::default() };
    assert_eq!(store.read(move |view| view.audit(&after)).wait().unwrap(), last[1..]);
    // `since` selects by the system clock, which was set back. So earlier records have a later time.
    let back = last[1].at;
    let since = AuditQuery { since: Some(back), ..AuditQuery::default() };
    let since = store.read(move |view| view.audit(&since)).wait().unwrap();
    assert!(since.iter().all(|one| one.at >= back) && since.contains(&last[1]) && since.contains(&last[0]));
    let never = AuditQuery { since: Some(jiff::Timestamp::MAX), ..AuditQuery::default() };
    assert_eq!(store.read(move |view| view.audit(&never)).wait().unwrap(), []);
    let _ = actor(0);
}

#[test]
fn last_notice_of_each_gpu_survives_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    assert!(store.read(|view| view.observations()).wait().unwrap().is_empty());
    for (uuid, what) in [("GPU-0", "first"), ("GPU-1", "other"), ("GPU-0", "second")] {
        store.write(move |tx| tx.record_observation(&uuid.into(), serde_json::json!(what))).wait().unwrap();
    }
    drop(store);
    let noticed = open(scratch.path()).store.read(|view| view.observations()).wait().unwrap();
    let reported: Vec<_> = noticed.iter().map(|(uuid, what)| (uuid.as_str(), what.as_str().unwrap())).collect();
    assert_eq!(reported, [("GPU-0", "second"), ("GPU-1", "other")]);
}

#[test]
fn mps_target_record_is_deleted_when_it_is_empty() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let target = MpsTargetRecord {
        target: "GPU-0".into(),
        stopped: Some(MpsStopped { by: scene::actor(0), end_at: None }),
        set: None,
        in_force: Some(options().boot_id),
    };
    let kept = target.clone();
    store.write(move |tx| tx.set_mps_target(&kept)).wait().unwrap();
    drop(store);

    let options = Options { boot_id: "another".to_owned(), ..Options::default() };
    let store = Store::open(scratch.path(), options).unwrap().store;
    assert_eq!(store.read(|view| view.mps_targets()).wait().unwrap(), std::slice::from_ref(&target));
    store.write_ending(|tx| tx.forget_mps_of_other_boots()).wait().unwrap();
    let stopped = MpsTargetRecord { in_force: None, ..target };
    assert_eq!(store.read(|view| view.mps_targets()).wait().unwrap(), [stopped]);
    let empty = MpsTargetRecord { target: "GPU-0".into(), ..MpsTargetRecord::default() };
    store.write(move |tx| tx.set_mps_target(&empty)).wait().unwrap();
    assert_eq!(store.read(|view| view.mps_targets()).wait().unwrap(), []);
}

#[test]
fn gpu_settings_last_until_reboot() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let level = |set, last| LevelSet { set, last };
    let mode =
        ComputeModeSet { before: ComputeMode::Default, set: ComputeMode::Prohibited, last: None, by: Mode::Timeslice };
    let shared = |gpu: &str| SharedGpu { gpu_uuid: gpu.into(), ..SharedGpu::default() };
    let set = |shared: SharedGpu| store.write(move |tx| tx.set_shared_gpu(shared.clone())).wait().unwrap();
    let one =
        set(SharedGpu { compute_mode: Some(mode), level: Some(level(TimesliceLevel::Long, None)), ..shared("GPU-1") });
    assert_eq!(one.boot_id, options().boot_id);
    let other =
        set(SharedGpu { level: Some(level(TimesliceLevel::Short, Some(TimesliceLevel::Long))), ..shared("GPU-0") });
    assert_eq!(store.read(|view| view.shared_gpus()).wait().unwrap(), [other.clone(), one.clone()]);
    set(shared("GPU-1"));
    drop(store);
    let store = open(scratch.path()).store;
    store.write_ending(|tx| tx.forget_shared_gpus_of_other_boots()).wait().unwrap();
    assert_eq!(store.read(|view| view.shared_gpus()).wait().unwrap(), [other], "of this boot");
    drop(store);
    let options = Options { boot_id: "another".to_owned(), ..Options::default() };
    let store = Store::open(scratch.path(), options).unwrap().store;
    store.write_ending(|tx| tx.forget_shared_gpus_of_other_boots()).wait().unwrap();
    assert_eq!(store.read(|view| view.shared_gpus()).wait().unwrap(), []);
}
