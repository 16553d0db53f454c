//! Deletion of old audit records: records that every user can cause never displace other users' records.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

mod scene;

use gpush_store::{AuditQuery, Bounds, Options, Store};
use scene::{audit, options};

#[test]
fn share_records_evict_no_administrator_records() {
    let scratch = tempfile::tempdir().unwrap();
    let bounds = Bounds { audit_most: 40, audit_shares: 25, audit_least: 5, reserve: 1 << 16, ..Bounds::default() };
    let open = || Store::open(scratch.path(), Options { bounds, ..options() }).unwrap().store;
    let store = open();
    // Of the first 45 records, every third one is an administrator's. All other records are about leases.
    let action = |n: u64| if n < 45 && n.is_multiple_of(3) { "gpu.cordon" } else { "lease.grant" };
    for n in 0..200 {
        store.write(move |tx| tx.audit(audit(action(n), &n.to_string()))).wait().unwrap();
    }
    drop(store);
    let store = open();
    let all = store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
    let of = |wanted: &str| -> Vec<u64> {
        all.iter().filter(|one| one.action == wanted).map(|one| one.object.parse().unwrap()).collect()
    };
    assert_eq!(of("gpu.cordon"), (0..45).filter(|n| n % 3 == 0).collect::<Vec<u64>>());
    assert_eq!(of("lease.grant"), (175..200).collect::<Vec<u64>>());
    assert!(all.is_sorted_by_key(|one| one.sequence), "the order is that of what was done");
    // Reading page by page from the oldest record returns all remaining records, although the numbers of the deleted
    // records are missing. A query with `latest` returns the last 30 remaining records.
    let mut paged = Vec::new();
    loop {
        let after = paged.last().map_or(0, |one: &gpush_store::AuditRecord| one.sequence);
        let query = AuditQuery { after, limit: 7, ..AuditQuery::default() };
        let page = store.read(move |view| view.audit(&query)).wait().unwrap();
        if page.is_empty() {
            break;
        }
        paged.extend(page);
    }
    assert_eq!(paged, all);
    let last = AuditQuery { latest: true, limit: 30, ..AuditQuery::default() };
    assert_eq!(store.read(move |view| view.audit(&last)).wait().unwrap(), all[10..]);
    // Records of administrators have a separate limit.
    for n in 0..60u64 {
        store.write(move |tx| tx.audit(audit("gpu.cordon", &n.to_string()))).wait().unwrap();
    }
    drop(store);
    let all = open().read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
    let shares = all.iter().filter(|one| one.action == "lease.grant").count();
    assert_eq!((all.len() - shares, shares), (40, 25));
}
