//! Leases: records, order of states, numbers, and the budget of ended leases.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use gpush_api::{EndReason, LeaseId, LeaseKeep, LeaseNotice, LeaseRevocation, LeaseState, NoticeKind, OperationState};
use gpush_store::{
    Bounds, LeaseHistory, LeaseRecord, LeaseSource, LeaseTerms, Options, Store, StoreError, Tx, UsageRecord,
};
use jiff::Timestamp;
use proptest::prelude::*;
use scene::{actor, lease_terms, lost, new_lease, open, operation, options};

fn write<T: Send + 'static>(
    store: &Store,
    change: impl FnMut(&mut Tx<'_>) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    store.write(change).wait()
}

fn grant(store: &Store, uid: u32) -> LeaseRecord {
    write(store, move |tx| tx.grant_lease(LeaseSource::from(new_lease(uid)), lease_terms(&["GPU-0"]))).unwrap()
}

fn end(store: &Store, id: LeaseId) -> LeaseRecord {
    store.write_ending(move |tx| tx.end_lease(id, EndReason::Released)).wait().unwrap()
}

fn open_ids(store: &Store) -> Vec<u64> {
    let open = store.read(|view| view.open_leases()).wait().unwrap();
    open.into_iter().map(|lease| lease.id.0).collect()
}

fn ended(store: &Store, uid: Option<u32>, before: Option<u64>, limit: usize) -> Vec<LeaseRecord> {
    let history = LeaseHistory { uids: uid.map(|uid| vec![uid]), before, limit };
    store.read(move |view| view.ended_leases(&history)).wait().unwrap()
}

fn reopen(directory: &Path, boot: &str) -> Store {
    Store::open(directory, Options { boot_id: boot.to_owned(), ..options() }).unwrap().store
}

#[test]
fn notice_and_keep_stay_with_the_lease_after_its_end() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let id = grant(&store, 1000).id;
    let (at, ends_at) = (Timestamp::UNIX_EPOCH, None);
    let notice =
        |text: &str| LeaseNotice { at, kind: NoticeKind::Unused, text: text.to_owned(), ends_at, terminals: Some(1) };
    let keep = LeaseKeep { by: actor(1000), reason: "demo".to_owned(), at, until: at };
    for text in ["first", "last"] {
        let record = notice(text);
        write(&store, move |tx| tx.record_notice(id, record.clone())).unwrap();
    }
    let kept = keep.clone();
    write(&store, move |tx| tx.keep_lease(id, kept.clone())).unwrap();
    end(&store, id);
    let late = keep.clone();
    assert!(write(&store, move |tx| tx.keep_lease(id, late.clone())).is_err(), "only an active lease can be kept");
    let record = notice("too late");
    let missing = write(&store, move |tx| tx.record_notice(LeaseId(99), record.clone()));
    assert_eq!(missing, Err(StoreError::NoSuchLease(LeaseId(99))));
    drop(store);
    let store = open(scratch.path()).store;
    let found = store.read(move |view| Ok((view.lease_notices(&[id])?, view.lease_keeps(&[id])?))).wait().unwrap();
    assert_eq!(found, (BTreeMap::from([(id, notice("last"))]), BTreeMap::from([(id, keep)])));
}

#[test]
fn free_share_is_granted_by_one_commit_and_survives_a_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let commits = store.statistics().commits;
    let lease = grant(&store, 1000);
    assert_eq!(store.statistics().commits, commits + 1);
    assert_eq!((lease.id, lease.state, lease.members.len()), (LeaseId(1), LeaseState::Active, 1));
    assert!(lease.granted_at.is_some());
    drop(store);
    let store = open(scratch.path()).store;
    assert_eq!(store.read(|view| view.open_leases()).wait().unwrap(), std::slice::from_ref(&lease));
    assert_eq!(store.read(move |view| view.lease(lease.id)).wait().unwrap(), Some(lease));
}

#[test]
fn dynamic_grant_is_recorded_when_its_operation_begins_and_ends() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let queued = write(&store, |tx| tx.queue_lease(new_lease(1000))).unwrap();
    let id = queued.id;
    let (operation, lease) = write(&store, move |tx| {
        let operation = tx.begin(operation("lease.grant", 1))?.id;
        Ok((operation, tx.begin_lease(LeaseSource::Queued(id), Vec::new(), operation)?))
    })
    .unwrap();
    assert_eq!((lease.state, lease.operation, lease.id), (LeaseState::Granting, Some(operation), queued.id));
    drop(store);
    // A restart finds both records. After the second commit, no operation is unfinished.
    let store = open(scratch.path()).store;
    assert_eq!(store.read(|view| view.unfinished()).wait().unwrap().len(), 1);
    let active = write(&store, move |tx| {
        tx.end(operation, OperationState::Done, None)?;
        tx.activate_lease(id, lease_terms(&["MIG-1"]))
    })
    .unwrap();
    assert_eq!((active.state, active.members[0].target.as_str()), (LeaseState::Active, "MIG-1"));
    assert_eq!(active.created_at, queued.created_at);
}

#[test]
fn change_that_does_not_fit_the_state_changes_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let id = grant(&store, 1000).id;
    let refused = |outcome: Result<LeaseRecord, StoreError>| {
        assert!(matches!(outcome, Err(StoreError::LeaseTransition { .. })), "{outcome:?}");
    };
    refused(write(&store, move |tx| tx.activate_lease(id, LeaseTerms::default())));
    refused(write(&store, move |tx| tx.grant_lease(LeaseSource::Queued(id), LeaseTerms::default())));
    let renewed = write(&store, move |tx| tx.renew_lease(id, Some(Timestamp::MAX))).unwrap();
    assert!(renewed.expires_at.is_some());
    write(&store, move |tx| tx.release_lease(id, EndReason::Expired)).unwrap();
    refused(write(&store, move |tx| tx.renew_lease(id, None)));
    refused(write(&store, move |tx| tx.release_lease(id, EndReason::Released)));
    let revocation = LeaseRevocation {
        by: actor(0),
        reason: "maintenance".to_owned(),
        at: Timestamp::UNIX_EPOCH,
        processes_end_at: None,
    };
    let (again, late) = (revocation.clone(), revocation.clone());
    let revoked = write(&store, move |tx| tx.revoke_lease(id, again.clone())).unwrap();
    assert_eq!((revoked.reason, revoked.revocation.as_ref()), (Some(EndReason::Expired), Some(&revocation)));
    let over = end(&store, id);
    assert_eq!((over.reason, over.state), (Some(EndReason::Expired), LeaseState::Ended), "the first reason stays");
    refused(write(&store, move |tx| tx.end_lease(id, EndReason::Released)));
    refused(write(&store, move |tx| tx.revoke_lease(id, late.clone())));
    assert_eq!(
        write(&store, |tx| tx.end_lease(LeaseId(99), EndReason::Released)),
        Err(StoreError::NoSuchLease(LeaseId(99)))
    );
    assert_eq!(store.read(move |view| view.lease(id)).wait().unwrap(), Some(over));
    // A failed transaction does not use up a number.
    let failed = write(&store, |tx| {
        tx.queue_lease(new_lease(1000))?;
        Err::<(), _>(StoreError::Closed)
    });
    assert_eq!(failed, Err(StoreError::Closed));
    assert_eq!(grant(&store, 1000).id, LeaseId(2));
}

#[test]
fn reboot_ends_the_leases_of_the_previous_boot() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let first = grant(&store, 1000).id;
    write(&store, move |tx| tx.release_lease(first, EndReason::Revoked)).unwrap();
    grant(&store, 1001);
    write(&store, |tx| tx.queue_lease(new_lease(1002))).unwrap();
    drop(store);
    let store = reopen(scratch.path(), "boot-1");
    assert_eq!(write(&store, |tx| tx.end_leases_of_other_boots()).unwrap(), []);
    drop(store);
    let store = reopen(scratch.path(), "boot-2");
    let over = store.write_ending(|tx| tx.end_leases_of_other_boots()).wait().unwrap();
    let reasons: Vec<_> = over.iter().map(|lease| lease.reason.unwrap()).collect();
    assert_eq!(reasons, [EndReason::Revoked, EndReason::Rebooted, EndReason::Rebooted]);
    assert_eq!((open_ids(&store), grant(&store, 1000).id), (vec![], LeaseId(4)));
}

#[test]
fn numbers_continue_after_a_lost_database_and_its_epoch_differs() {
    let scratch = tempfile::tempdir().unwrap();
    let (mut numbers, mut epochs) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..6 {
        let opened = open(scratch.path());
        assert_eq!(lost(&opened.notes).is_some(), round > 0);
        let store = opened.store;
        assert!(store.epoch().len() == 8 && store.epoch().bytes().all(|b| b.is_ascii_hexdigit()));
        assert!(epochs.insert(store.epoch().to_owned()), "{epochs:?}");
        for n in 0..5 {
            let lease = grant(&store, 1000);
            assert!(numbers.insert(lease.id), "{} was given twice", lease.id);
            // Queued leases that were never granted have numbers too.
            let queued = write(&store, |tx| tx.queue_lease(new_lease(1000))).unwrap();
            assert!(numbers.insert(queued.id) && queued.id > lease.id);
            if n % 2 == 0 {
                end(&store, lease.id);
            }
        }
        write(&store, |tx| tx.accept_loss()).unwrap();
        drop(store);
        let store = open(scratch.path()).store;
        assert!(epochs.contains(store.epoch()), "a restart keeps it");
        drop(store);
        match round % 3 {
            0 => fs::remove_file(scratch.path().join("gpush.db")).unwrap(),
            1 => fs::write(scratch.path().join("gpush.db"), b"garbage that is not a database").unwrap(),
            _ => fs::write(scratch.path().join("gpush.db"), b"").unwrap(),
        }
    }
}

#[test]
fn history_is_read_by_user_and_in_pages() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let ids: Vec<LeaseId> = (0..12).map(|n| grant(&store, 1000 + n % 3).id).collect();
    // End the leases in the reverse order: the last lease ends first.
    ids.iter().rev().for_each(|id| _ = end(&store, *id));
    let all: Vec<u64> = ended(&store, None, None, 100).iter().map(|lease| lease.id.0).collect();
    let holders = store.read(|view| view.ended_holders()).wait().unwrap();
    let history = LeaseHistory { uids: Some(holders), before: None, limit: 100 };
    let of_all = store.read(move |view| view.ended_leases(&history)).wait().unwrap();
    assert_eq!(of_all.iter().map(|lease| lease.id.0).collect::<Vec<_>>(), all);
    assert_eq!(all, (1..=12).collect::<Vec<_>>());
    let mut pages = Vec::new();
    let mut before = None;
    loop {
        let page = ended(&store, Some(1001), before, 3);
        let Some(last) = page.last() else { break };
        before = Some(last.sequence);
        pages.push(page.iter().map(|lease| lease.id.0).collect::<Vec<_>>());
    }
    assert_eq!(pages, [vec![2, 5, 8], vec![11]]);
}

#[test]
fn flood_of_leases_evicts_the_users_own_history_only() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { leases_per_account: 30, leases: 40, reserve: 1 << 16, ..Bounds::default() };
    let open = || Store::open(scratch.path(), Options { bounds, ..options() }).unwrap().store;
    let store = open();
    let kept = grant(&store, 1001).id;
    for uid in [1002, 1002, 1002, 1003] {
        end(&store, grant(&store, uid).id);
    }
    for _ in 0..100 {
        end(&store, grant(&store, 1001).id);
    }
    // Simulate a user with subordinate uids (`/etc/subuid`): many uids with a few leases each.
    for uid in 0..30 {
        end(&store, grant(&store, 100_000 + uid).id);
    }
    // Closing the store deletes old records.
    drop(store);
    let store = open();
    let of = |uid| ended(&store, Some(uid), None, 1000).len();
    assert_eq!((of(1002), of(1003)), (3, 1));
    assert_eq!((0..30).map(|uid| of(100_000 + uid)).sum::<usize>(), 30);
    assert_eq!(of(1001), 40 - 34, "the user with most of them loses most");
    assert_eq!(open_ids(&store), [kept.0], "open leases are never deleted");
    assert!(grant(&store, 1001).id.0 > 135);
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Queue(u8),
    Grant(u8),
    Begin(u8),
    Activate(u8),
    Release(u8),
    End(u8),
    GivenUp,
    Reopen,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        any::<u8>().prop_map(Action::Queue),
        any::<u8>().prop_map(Action::Grant),
        any::<u8>().prop_map(Action::Begin),
        any::<u8>().prop_map(Action::Activate),
        any::<u8>().prop_map(Action::Release),
        any::<u8>().prop_map(Action::End),
        Just(Action::GivenUp),
        Just(Action::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    /// Applies random changes to the store and to a model in memory. Closes and reopens the store at random.
    #[test]
    fn store_holds_the_leases_of_the_model(actions in proptest::collection::vec(action(), 1..50)) {
        let scratch = tempfile::tempdir().unwrap();
        let mut store = open(scratch.path()).store;
        let mut model: Vec<LeaseState> = Vec::new();
        for action in actions {
            let target = |n: u8| LeaseId(u64::from(n) % (model.len() as u64 + 2));
            let state = |id: LeaseId| usize::try_from(id.0).unwrap().checked_sub(1).and_then(|at| model.get(at).copied());
            let (outcome, id, expected) = match action {
                Action::Queue(n) => {
                    let queued = write(&store, move |tx| tx.queue_lease(new_lease(n.into())));
                    (queued, LeaseId(model.len() as u64 + 1), Some(LeaseState::Queued))
                }
                Action::Grant(n) if n % 2 == 0 => {
                    let source = move || LeaseSource::from(new_lease(n.into()));
                    let granted = write(&store, move |tx| tx.grant_lease(source(), lease_terms(&["GPU-0"])));
                    (granted, LeaseId(model.len() as u64 + 1), Some(LeaseState::Active))
                }
                Action::Grant(n) => {
                    let id = target(n);
                    let granted = write(&store, move |tx| tx.grant_lease(LeaseSource::Queued(id), LeaseTerms::default()));
                    (granted, id, (state(id) == Some(LeaseState::Queued)).then_some(LeaseState::Active))
                }
                Action::Begin(n) => {
                    let id = target(n);
                    let begun = write(&store, move |tx| {
                        let operation = tx.begin(operation("lease.grant", 1))?.id;
                        tx.begin_lease(LeaseSource::Queued(id), Vec::new(), operation)
                    });
                    (begun, id, (state(id) == Some(LeaseState::Queued)).then_some(LeaseState::Granting))
                }
                Action::Activate(n) => {
                    let id = target(n);
                    let active = write(&store, move |tx| tx.activate_lease(id, lease_terms(&["MIG-1"])));
                    (active, id, (state(id) == Some(LeaseState::Granting)).then_some(LeaseState::Active))
                }
                Action::Release(n) => {
                    let id = target(n);
                    let releasing = write(&store, move |tx| tx.release_lease(id, EndReason::Expired));
                    (releasing, id, (state(id) == Some(LeaseState::Active)).then_some(LeaseState::Releasing))
                }
                Action::End(n) => {
                    let id = target(n);
                    let ended = store.write_ending(move |tx| tx.end_lease(id, EndReason::Released)).wait();
                    let open = state(id).is_some_and(|state| state != LeaseState::Ended);
                    (ended, id, open.then_some(LeaseState::Ended))
                }
                Action::GivenUp => {
                    let given_up = write(&store, |tx| {
                        tx.queue_lease(new_lease(7))?;
                        Err(StoreError::Closed)
                    });
                    (given_up, LeaseId(0), None)
                }
                Action::Reopen => {
                    drop(store);
                    store = open(scratch.path()).store;
                    continue;
                }
            };
            match (outcome, expected) {
                (Ok(lease), Some(expected)) => {
                    prop_assert_eq!((lease.id, lease.state), (id, expected));
                    match usize::try_from(id.0).unwrap() - 1 {
                        at if at == model.len() => model.push(expected),
                        at => model[at] = expected,
                    }
                }
                (Err(_), None) => {}
                (outcome, expected) => prop_assert!(false, "{action:?}: {outcome:?}, expected {expected:?}"),
            }
        }
        let mut found: Vec<(u64, LeaseState)> = store
            .read(|view| view.open_leases())
            .wait()
            .unwrap()
            .into_iter()
            .chain(ended(&store, None, None, 1000))
            .map(|lease| (lease.id.0, lease.state))
            .collect();
        found.sort_unstable();
        let expected: Vec<(u64, LeaseState)> = (1..).zip(model).collect();
        prop_assert_eq!(found, expected);
    }
}

/// A lease that began and ended between two checkpoints must not be missing in the accounts.
#[test]
fn lease_without_totals_is_found_once() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    let record = || {
        let usage = UsageRecord { checkpoint: "{}".to_owned(), ..UsageRecord::default() };
        let found = write(&store, move |tx| tx.record_usage(&usage)).unwrap();
        found.into_iter().map(|lease| lease.id).collect::<Vec<_>>()
    };
    let ended = || end(&store, grant(&store, 1000).id).id;
    ended();
    assert_eq!(record(), [], "before the first checkpoint, nothing is accounted");
    let first = ended();
    let refused = write(&store, |tx| tx.queue_lease(new_lease(1000))).unwrap().id;
    store.write_ending(move |tx| tx.end_lease(refused, EndReason::Cancelled)).wait().unwrap();
    let unaccounted = store.read(|view| view.unaccounted_leases()).wait().unwrap();
    assert_eq!(unaccounted.iter().map(|lease| lease.id).collect::<Vec<_>>(), [first]);
    assert_eq!(record(), [first]);
    assert_eq!(record(), [], "the next checkpoint contains it");
}
