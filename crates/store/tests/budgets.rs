//! Limits for each user: requests of one user never displace the answers and audit records of other users.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

mod scene;

use std::{path::Path, sync::Arc};

use gpush_store::{Answer, AuditQuery, Bounds, NewAnswer, NewAudit, Options, Store};
use jiff::Timestamp;
use scene::{actor, options};

/// Uid of a user who sends very many requests. The next constants: a user who sends few requests, and root.
const FLOOD: u32 = 1001;
const LITTLE: u32 = 1002;
const ROOT: u32 = 0;

/// First subordinate uid of the user [`FLOOD`]. The next constant: a uid whose account is not known yet.
const SUBORDINATE: u32 = 100_000;
const UNRESOLVED: u32 = 5000;

fn open(directory: &Path, bounds: Bounds) -> Store {
    let account_of = Arc::new(|uid| match uid {
        UNRESOLVED => None,
        SUBORDINATE.. => Some(FLOOD.into()),
        _ => Some(uid.into()),
    });
    let bounds = Bounds { reserve: 1 << 16, ..bounds };
    Store::open(directory, Options { bounds, account_of, ..options() }).unwrap().store
}

fn answer(store: &Store, uid: u32, key: String) {
    let write = store.write(move |tx| {
        tx.keep_answer(NewAnswer {
            uid,
            key: key.clone(),
            request: b"request",
            operation: None,
            status: 200,
            body: serde_json::Value::Null,
            expires_at: Timestamp::MAX,
        })
    });
    write.wait().unwrap();
}

fn knows(store: &Store, uid: u32, key: &str) -> bool {
    let key = key.to_owned();
    matches!(store.read(move |view| view.answer(uid, &key, b"request")).wait().unwrap(), Answer::Known(_))
}

#[test]
fn flood_of_answers_evicts_the_users_own_only() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { answers_per_account: 30, answers: 40, ..Bounds::default() };
    let store = open(scratch.path(), bounds);
    answer(&store, ROOT, "apply".to_owned());
    (0..5).for_each(|n| answer(&store, LITTLE, n.to_string()));
    (0..20).for_each(|n| answer(&store, 2000 + n, "key".to_owned()));
    (0..40).for_each(|n| answer(&store, UNRESOLVED, n.to_string()));
    (0..100).for_each(|n| answer(&store, FLOOD, n.to_string()));
    // The user's subordinate uids: many uids with one answer each.
    (0..30).for_each(|n| answer(&store, SUBORDINATE + n, "key".to_owned()));
    // Closing the store deletes old records.
    drop(store);
    let store = open(scratch.path(), bounds);
    assert!(knows(&store, ROOT, "apply"));
    let of = |uid, count: u32| (0..count).filter(|n| knows(&store, uid, &n.to_string())).count();
    let with_one = |first| (0..30).filter(|n| knows(&store, first + n, "key")).count();
    assert_eq!((of(LITTLE, 5), with_one(2000)), (5, 20), "users with few answers keep them");
    assert_eq!((of(FLOOD, 100), with_one(SUBORDINATE)), (0, 15), "the account with most answers loses most");
    assert!(knows(&store, SUBORDINATE + 29, "key"));
    assert_eq!(of(UNRESOLVED, 40), 40, "gpushd does not know whose limit applies");
}

/// Fault: a user with more uids than gpushd can resolve stored any number of records.
#[test]
fn records_of_unresolved_uids_are_limited_in_all() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { answers_per_account: 10, answers: 30, ..Bounds::default() };
    let store = open(scratch.path(), bounds);
    (0..10).for_each(|n| answer(&store, LITTLE, n.to_string()));
    (0..100).for_each(|n| answer(&store, UNRESOLVED, n.to_string()));
    drop(store);
    let store = open(scratch.path(), bounds);
    let of = |uid, count: u32| (0..count).filter(|n| knows(&store, uid, &n.to_string())).count();
    assert_eq!((of(LITTLE, 10), of(UNRESOLVED, 100)), (10, 30));
}

#[test]
fn flood_of_shares_evicts_no_record_of_a_refused_attempt() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { audit_shares_per_account: 10, audit_shares: 15, audit_most: 20, ..Bounds::default() };
    let store = open(scratch.path(), bounds);
    let record = |uid: u32, action: &'static str| {
        let write = store.write(move |tx| {
            tx.audit(NewAudit {
                by: Some(actor(uid)),
                action: action.to_owned(),
                object: "host".to_owned(),
                result: "refused".to_owned(),
                detail: serde_json::Value::Null,
            })
        });
        write.wait().unwrap();
    };
    record(ROOT, "gpu.cordon");
    (0..4).for_each(|_| record(FLOOD, "access.denied"));
    (0..50).for_each(|_| record(FLOOD, "lease.grant"));
    (0..50).for_each(|_| record(LITTLE, "access.denied"));
    drop(store);
    let store = open(scratch.path(), bounds);
    let all = store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
    let of = |uid: u32, action: &str| {
        all.iter().filter(|one| one.action == action && one.by.as_ref().is_some_and(|by| by.uid == uid)).count()
    };
    let counts =
        [of(FLOOD, "access.denied"), of(FLOOD, "lease.grant"), of(LITTLE, "access.denied"), of(ROOT, "gpu.cordon")];
    assert_eq!(counts, [4, 10, 10, 1]);
}

#[test]
fn flood_of_shares_evicts_the_users_own_records_only() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { audit_shares_per_account: 10, audit_shares: 15, ..Bounds::default() };
    let store = open(scratch.path(), bounds);
    let record = |by: Option<u32>, detail: serde_json::Value| {
        let write = store.write(move |tx| {
            tx.audit(NewAudit {
                by: by.map(actor),
                action: "lease.grant".to_owned(),
                object: "GPU-0".to_owned(),
                result: "done".to_owned(),
                detail: detail.clone(),
            })
        });
        write.wait().unwrap();
    };
    (0..4).for_each(|_| record(Some(LITTLE), serde_json::Value::Null));
    (0..50).for_each(|_| record(Some(FLOOD), serde_json::Value::Null));
    // If gpushd itself ends a lease, the record belongs to the user who held the lease.
    (0..50).for_each(|_| record(None, serde_json::json!({ "uid": FLOOD })));
    // Fault: each of 65,536 subordinate uids had a limit of its own.
    (0..50).for_each(|n| record(Some(SUBORDINATE + n), serde_json::Value::Null));
    drop(store);
    let store = open(scratch.path(), bounds);
    let all = store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
    let of_little = all.iter().filter(|one| one.by.as_ref().is_some_and(|by| by.uid == LITTLE)).count();
    assert_eq!((of_little, all.len()), (4, 14));
}

/// Fault: the limits counted records, and one user filled 444 MB with long texts.
#[test]
fn records_are_limited_in_bytes() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { account_bytes: 4 * 10_000, all_bytes: 4 * 25_000, ..Bounds::default() };
    let store = open(scratch.path(), bounds);
    let record = |uid: u32, count: usize| {
        for _ in 0..count {
            let write = store.write(move |tx| {
                tx.audit(NewAudit {
                    by: Some(actor(uid)),
                    action: "lease.grant".to_owned(),
                    object: "GPU-0".to_owned(),
                    result: "done".to_owned(),
                    detail: serde_json::json!({ "text": "x".repeat(900) }),
                })
            });
            write.wait().unwrap();
        }
    };
    record(LITTLE, 3);
    (0..4).for_each(|n| record(3000 + n, 12));
    record(FLOOD, 50);
    drop(store);
    let store = open(scratch.path(), bounds);
    let all = store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
    let of = |uid: u32| all.iter().filter(|one| one.by.as_ref().is_some_and(|by| by.uid == uid)).count();
    assert_eq!(of(LITTLE), 3, "users with few records keep them");
    assert!((4..=10).contains(&of(FLOOD)), "{}", of(FLOOD));
    assert!(all.len() <= 25, "{}", all.len());
    assert!(all.iter().next_back().is_some_and(|one| one.by.as_ref().is_some_and(|by| by.uid == FLOOD)));
}

/// Fault: records about ended processes had no limit for each account. A user who started very many processes displaced the
/// records about all other changes.
#[test]
fn process_end_records_evict_only_records_of_the_same_user() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { audit_shares_per_account: 10, audit_most: 5, audit_least: 0, ..Bounds::default() };
    let record = |store: &Store, action: &'static str, uid: u32| {
        let write = store.write(move |tx| {
            tx.audit(NewAudit {
                by: None,
                action: action.to_owned(),
                object: "GPU-0".to_owned(),
                result: "killed".to_owned(),
                detail: serde_json::json!({ "uid": uid, "command": "x".repeat(900) }),
            })
        });
        write.wait().unwrap();
    };
    let fill = |bounds| {
        let store = open(scratch.path(), bounds);
        record(&store, "gpu.cordon", ROOT);
        (0..3).for_each(|_| record(&store, "process.end", LITTLE));
        (0..50).for_each(|n| record(&store, "process.end", SUBORDINATE + n));
        (0..50).for_each(|_| record(&store, "process.end", FLOOD));
        drop(store);
        let store = open(scratch.path(), bounds);
        let all = store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
        let of =
            |action: &str, uid: u32| all.iter().filter(|one| one.action == action && one.detail["uid"] == uid).count();
        (of("gpu.cordon", ROOT), of("process.end", LITTLE), of("process.end", FLOOD), all.len())
    };
    assert_eq!(fill(bounds), (1, 3, 10, 14));
    let (cordons, little, flood, _) = fill(Bounds { account_bytes: 4 * 4000, ..bounds });
    assert_eq!(cordons, 2);
    assert!((3..=4).contains(&little) && (1..=4).contains(&flood), "{little} and {flood} records of 1 KB in 4 KB each");
}

#[test]
fn store_that_is_never_quiet_prunes() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path(), Bounds { answers_per_account: 10, ..Bounds::default() });
    // Write continuously: each write begins as soon as the previous one is committed.
    (0..1200).for_each(|n| answer(&store, FLOOD, n.to_string()));
    assert!(!knows(&store, FLOOD, "0"), "nothing was pruned during 1,200 commits");
}
