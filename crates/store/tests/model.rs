//! Random changes, compared with a model in memory. The store is closed and reopened at random. The contents and their
//! order are always equal.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::collections::BTreeMap;

use gpush_api::{GpuUuid, OperationState};
use gpush_store::{AuditQuery, ConditionKind, OperationId, Scope, Store, StoreError};
use proptest::prelude::*;
use scene::{audit, condition, intent, open, operation, override_of};

#[derive(Debug, Clone)]
enum Action {
    Enqueue,
    Begin,
    Start(u64),
    Advance(u64, usize),
    End(u64, usize),
    Undo(u64),
    Undone(u64, u64),
    Override(u8, u8),
    Clear(u8),
    Cordon(u8, u8),
    Uncordon(u8, Option<u8>),
    Audit(u8),
    Generation,
    /// A transaction whose closure returns an error.
    GivenUp(u8),
    Reopen,
}

fn action() -> impl Strategy<Value = Action> {
    let id = 0..8u64;
    prop_oneof![
        Just(Action::Enqueue),
        Just(Action::Begin),
        id.clone().prop_map(Action::Start),
        (id.clone(), 0..8usize).prop_map(|(id, stage)| Action::Advance(id, stage)),
        (id.clone(), 0..8usize).prop_map(|(id, stage)| Action::End(id, stage)),
        id.clone().prop_map(Action::Undo),
        (id, 0..3u64).prop_map(|(id, position)| Action::Undone(id, position)),
        (0..4u8, any::<u8>()).prop_map(|(gpu, reason)| Action::Override(gpu, reason)),
        (0..4u8).prop_map(Action::Clear),
        (0..4u8, 0..3u8).prop_map(|(gpu, cause)| Action::Cordon(gpu, cause)),
        (0..4u8, proptest::option::of(0..3u8)).prop_map(|(gpu, cause)| Action::Uncordon(gpu, cause)),
        any::<u8>().prop_map(Action::Audit),
        Just(Action::Generation),
        any::<u8>().prop_map(Action::GivenUp),
        Just(Action::Reopen),
    ]
}

/// An operation: state, mark of its intent, revision, undo list.
type Kept = (OperationState, u64, u64, Vec<bool>);

#[derive(Debug, Default, PartialEq)]
struct Model {
    operations: BTreeMap<u64, Kept>,
    overrides: Vec<(GpuUuid, String, u64)>,
    conditions: Vec<(GpuUuid, String)>,
    audit: Vec<String>,
    generation: u64,
}

fn look(store: &Store) -> Model {
    let read = store.read(|view| {
        let mut operations = BTreeMap::new();
        for record in view.operations()? {
            let mark = view.intent(record.id)?.map_or(0, |intent| intent.more["mark"].as_u64().unwrap_or(0));
            let undo: Vec<bool> = view.undo(record.id)?.iter().map(|undo| undo.undone).collect();
            operations.insert(record.id.0, (record.stage, mark, record.revision, undo));
        }
        let unfinished = view.unfinished()?.len();
        let expected =
            operations.values().filter(|(stage, _, _, undo)| !stage.is_final() || undo.contains(&false)).count();
        assert_eq!(unfinished, expected);
        Ok(Model {
            operations,
            overrides: view.overrides()?.into_iter().map(|one| (one.gpu_uuid, one.reason, one.generation)).collect(),
            conditions: view
                .conditions()?
                .into_iter()
                .map(|one| (if let Scope::Gpu(gpu) = one.scope { gpu } else { String::new().into() }, one.cause))
                .collect(),
            audit: view.audit(&AuditQuery::default())?.into_iter().map(|one| one.object).collect(),
            generation: view.generation(),
        })
    });
    read.wait().unwrap()
}

/// Applies an action to store and model. Returns whether the results are equal.
fn apply(store: &Store, model: &mut Model, action: &Action, mark: u64) {
    let gpu = |gpu: u8| GpuUuid::from(format!("GPU-{gpu}"));
    match *action {
        Action::Enqueue | Action::Begin => {
            let begins = matches!(action, Action::Begin);
            let change =
                store.write(
                    move |tx| {
                        if begins { tx.begin(operation("x", mark)) } else { tx.enqueue(operation("x", mark)) }
                    },
                );
            let record = change.wait().unwrap();
            assert!(model.operations.keys().all(|id| *id < record.id.0));
            model.operations.insert(record.id.0, (record.stage, mark, 1, Vec::new()));
        }
        Action::Start(id) => {
            let outcome = store.write(move |tx| tx.start(OperationId(id), intent(mark), Vec::new())).wait();
            match model.operations.get_mut(&id) {
                None => assert_eq!(outcome, Err(StoreError::NoSuchOperation(OperationId(id)))),
                Some(kept) if matches!(kept.0, OperationState::Queued | OperationState::Waiting) => {
                    assert_eq!(outcome.unwrap().stage, OperationState::Running);
                    (kept.0, kept.1, kept.2) = (OperationState::Running, mark, kept.2 + 1);
                }
                Some(_) => assert!(matches!(outcome, Err(StoreError::Transition { .. }))),
            }
        }
        Action::Advance(id, stage) | Action::End(id, stage) => {
            let (to, ends) = (OperationState::ALL[stage], matches!(action, Action::End(..)));
            let id_ = OperationId(id);
            let outcome = if ends {
                store.write_ending(move |tx| tx.end(id_, to, None)).wait()
            } else {
                store.write(move |tx| tx.advance(id_, to)).wait()
            };
            match model.operations.get_mut(&id) {
                None => assert_eq!(outcome, Err(StoreError::NoSuchOperation(id_))),
                // An operation becomes running only through `start`.
                Some(kept)
                    if to == OperationState::Running
                        && matches!(kept.0, OperationState::Queued | OperationState::Waiting) =>
                {
                    assert!(matches!(outcome, Err(StoreError::Transition { .. })));
                }
                Some(kept)
                    if to.is_final() == ends && (gpush_store::may_become(kept.0, to) || (kept.0 == to && !ends)) =>
                {
                    assert_eq!(outcome.unwrap().stage, to);
                    (kept.0, kept.2) = (to, kept.2 + 1);
                }
                Some(_) => assert!(matches!(outcome, Err(StoreError::Transition { .. }))),
            }
        }
        Action::Undo(id) => {
            let outcome = store.write(move |tx| tx.add_undo(OperationId(id), serde_json::json!(mark))).wait();
            match model.operations.get_mut(&id).filter(|kept| !kept.0.is_final()) {
                None => assert!(outcome.is_err()),
                Some(kept) => {
                    assert_eq!(outcome.unwrap(), kept.3.len() as u64);
                    kept.2 += 1;
                    kept.3.push(false);
                }
            }
        }
        Action::Undone(id, position) => {
            let found = store.write_ending(move |tx| tx.mark_undone(OperationId(id), position)).wait().unwrap();
            let undo = model.operations.get_mut(&id).and_then(|kept| kept.3.get_mut(position as usize));
            assert_eq!(found, undo.is_some());
            if let Some(undo) = undo {
                *undo = true;
            }
        }
        Action::Override(n, reason) => {
            let new = override_of(gpu(n).as_str(), &reason.to_string());
            store.write(move |tx| tx.set_override(new.clone())).wait().unwrap();
            model.generation += 1;
            model.overrides.retain(|one| one.0 != gpu(n));
            model.overrides.push((gpu(n), reason.to_string(), model.generation));
        }
        Action::Clear(n) => {
            let cleared = store.write(move |tx| tx.clear_override(&gpu(n))).wait().unwrap();
            let before = model.overrides.len();
            model.overrides.retain(|one| one.0 != gpu(n));
            assert_eq!(cleared.is_some(), model.overrides.len() < before);
            model.generation += u64::from(cleared.is_some());
        }
        Action::Cordon(n, cause) => {
            let key = (gpu(n), format!("xid-{cause}"));
            let new = condition(key.0.as_str(), &key.1);
            store.write(move |tx| tx.set_condition(new.clone())).wait().unwrap();
            model.conditions.retain(|one| *one != key);
            model.conditions.push(key);
        }
        Action::Uncordon(n, cause) => {
            let cause = cause.map(|cause| format!("xid-{cause}"));
            let (scope, which) = (Scope::Gpu(gpu(n)), cause.clone());
            let cleared = store.write(move |tx| tx.clear_conditions(&scope, ConditionKind::Cordon, which.as_deref()));
            let before = model.conditions.len();
            model.conditions.retain(|one| one.0 != gpu(n) || cause.as_ref().is_some_and(|cause| *cause != one.1));
            assert_eq!(cleared.wait().unwrap().len(), before - model.conditions.len());
        }
        Action::Audit(object) => {
            store.write(move |tx| tx.audit(audit("x", &object.to_string()))).wait().unwrap();
            model.audit.push(object.to_string());
        }
        Action::Generation => {
            model.generation += 1;
            assert_eq!(store.write(|tx| Ok(tx.next_generation())).wait().unwrap(), model.generation);
        }
        Action::GivenUp(n) => {
            let outcome = store.write(move |tx| {
                tx.begin(operation("never", 0))?;
                tx.set_override(override_of(gpu(n % 4).as_str(), "never"))?;
                tx.clear_conditions(&Scope::Gpu(gpu(n % 4)), ConditionKind::Cordon, None)?;
                tx.audit(audit("never", "never"))?;
                Err::<(), _>(StoreError::Closed)
            });
            assert_eq!(outcome.wait(), Err(StoreError::Closed));
        }
        // The caller of this function owns the handle, so the caller reopens the store.
        Action::Reopen => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn store_content_equals_model(actions in proptest::collection::vec(action(), 1..60)) {
        let scratch = tempfile::tempdir().unwrap();
        let mut store = open(scratch.path()).store;
        let mut model = Model::default();
        for (number, action) in actions.iter().enumerate() {
            if matches!(action, Action::Reopen) {
                drop(store);
                let opened = open(scratch.path());
                prop_assert!(opened.notes.is_empty(), "{:?}", opened.notes);
                store = opened.store;
                prop_assert_eq!(&look(&store), &model);
            }
            apply(&store, &mut model, action, number as u64 + 1);
        }
        prop_assert_eq!(&look(&store), &model);
        drop(store);
        prop_assert_eq!(&look(&open(scratch.path()).store), &model);
    }
}
