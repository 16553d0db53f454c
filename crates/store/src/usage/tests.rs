#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `View`")]

use std::collections::BTreeMap;

use gpush_api::{EndReason, LeaseId, LeaseKind};
use gpush_usage::{
    account::{EndedLease, LeaseOwner, RequestDay, RequestSums},
    input::Hold,
    judge::UseState,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, LeaseTotals, RowBound, StateTimes, UnusedSpan},
    share::Share,
};

use super::{ClosedMonth, HoursPage, OwnedHour, RequestCount, UsageBounds, UsageRecord};
use crate::{Options, Store};

const HOUR: i64 = 3_600_000;

fn owner() -> LeaseOwner {
    LeaseOwner { user: "ada".to_owned(), group: Some("lab".to_owned()), account: None, job: None }
}

fn hold() -> Hold {
    Hold {
        gpu: "GPU-0".into(),
        target: "MIG-1".into(),
        kind: LeaseKind::Mig,
        share: Share { units: 1, charged: 1 },
        instance: Some(3),
        memory_mib: 9_728,
    }
}

/// Returns what a transaction records in one hour about one lease.
fn usage(number: u64, lease: u64, hour_ms: i64) -> UsageRecord {
    let lease = LeaseId(lease);
    let totals = LeaseTotals {
        lease,
        begun_ms: hour_ms,
        until_ms: hour_ms + HOUR,
        times: StateTimes::default(),
        members: Vec::new(),
    };
    UsageRecord {
        checkpoint: format!("{{\"hour\":{hour_ms}}}"),
        lease_hours: vec![OwnedHour {
            owner: owner(),
            hour: LeaseHour { lease, hold: hold(), number, hour_ms, sums: HoldSums::default() },
        }],
        gpu_hours: vec![GpuHour { gpu: "GPU-0".into(), number: number + 1, hour_ms, sums: GpuSums::default() }],
        unused: vec![UnusedSpan { lease, state: UseState::Idle, from_ms: hour_ms, until_ms: hour_ms + 600_000 }],
        ended: vec![EndedLease { owner: owner(), name: None, reason: EndReason::Released, waited_ms: 5, totals }],
        requests: Vec::new(),
        owner_requests: Vec::new(),
        models: Vec::new(),
    }
}

fn open(directory: &std::path::Path) -> Store {
    Store::open(directory, Options::default()).expect("a store").store
}

#[test]
fn recorded_use_is_read_back_after_a_restart() {
    let scratch = tempfile::tempdir().expect("a directory");
    let recorded = usage(1, 7, 10 * HOUR);
    let store = open(scratch.path());
    assert_eq!(store.read(|view| view.usage_checkpoint()).wait().unwrap(), None);
    let written = recorded.clone();
    store.write(move |tx| tx.record_usage(&written)).wait().unwrap();
    drop(store);
    let store = open(scratch.path());
    let read = store
        .read(|view| {
            Ok::<_, crate::StoreError>(UsageRecord {
                checkpoint: view.usage_checkpoint()?.unwrap_or_default(),
                lease_hours: view.lease_hours(HoursPage::all())?,
                gpu_hours: view.gpu_hours(HoursPage::all())?,
                unused: view.unused_times(0)?,
                ended: view.used_leases(0, i64::MAX)?,
                requests: view.request_counts(0, i64::MAX)?,
                owner_requests: view.owner_requests(0, i64::MAX)?,
                models: view.gpu_models()?,
            })
        })
        .wait()
        .unwrap();
    assert_eq!(read, recorded);
    let page = HoursPage { from_ms: 11 * HOUR, ..HoursPage::all() };
    assert!(store.read(move |view| view.lease_hours(page)).wait().unwrap().is_empty());
}

/// The accounts of thousands of leases are larger than one record may be.
#[test]
fn large_checkpoint_is_stored_in_parts() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    let large = "ü23456789".repeat(400_000);
    let record = |checkpoint: &str| {
        let record = UsageRecord { checkpoint: checkpoint.to_owned(), ..UsageRecord::default() };
        store.write(move |tx| tx.record_usage(&record)).wait().unwrap();
        store.read(|view| view.usage_checkpoint()).wait().unwrap()
    };
    assert_eq!(record(&large).as_deref(), Some(large.as_str()));
    assert_eq!(record("{}").as_deref(), Some("{}"), "no part of the old one is left");
}

#[test]
fn old_rows_are_deleted_and_new_ones_kept() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    for day in 0..10 {
        let row = usage(day * 2, day + 1, i64::try_from(day).unwrap() * 24 * HOUR);
        store.write(move |tx| tx.record_usage(&row)).wait().unwrap();
    }
    let bounds = UsageBounds { unused_from_ms: 8 * 24 * HOUR, history_from_ms: 3 * 24 * HOUR };
    let deleted = store.write(move |tx| tx.prune_usage(bounds)).wait().unwrap();
    assert_eq!(deleted, 8 + 3);
    assert_eq!(store.write(move |tx| tx.prune_usage(bounds)).wait().unwrap(), 0);
    let left = store.read(|view| view.used_leases(0, i64::MAX)).wait().unwrap();
    assert_eq!(left.iter().map(|one| one.totals.lease.0).collect::<Vec<_>>(), [4, 5, 6, 7, 8, 9, 10]);
    let hours = store.read(|view| view.lease_hours(HoursPage::all())).wait().unwrap();
    assert_eq!(hours.len(), 10, "hours stay until they are in a bill");
}

const DAY: i64 = 24 * HOUR;

/// Returns an hour of a lease and an hour of a GPU with random sums.
fn random_hours(number: u64, hour_ms: i64, random: &mut fastrand::Rng) -> UsageRecord {
    let lease = random.u64(1..5);
    let mut row = usage(number * 2, lease, hour_ms);
    let owned = &mut row.lease_hours[0];
    owned.owner.user = format!("user{}", lease % 2);
    owned.hour.hold.gpu = format!("GPU-{}", random.u8(0..2)).as_str().into();
    owned.hour.hold.kind = if random.bool() { LeaseKind::Mig } else { LeaseKind::Mps };
    owned.hour.sums = HoldSums {
        times: StateTimes { busy_ms: random.u64(0..3_600_000), idle_ms: random.u64(0..1000), ..StateTimes::default() },
        unit_ms: random.u64(0..1 << 40),
        charged_unit_ms: random.u64(0..1 << 40),
        energy_mj: random.u64(0..1 << 30),
        memory_peak_mib: random.u64(0..80_000),
        ..HoldSums::default()
    };
    row.gpu_hours[0].sums =
        GpuSums { capacity: random.u64(0..1 << 40), energy_mj: random.u64(0..1 << 30), ..GpuSums::default() };
    (row.unused, row.ended) = (Vec::new(), Vec::new());
    row
}

/// The sums of all hours and of all days in the store, by user and of all GPUs, and the number of hours.
#[derive(Debug, Default)]
struct Sums {
    hours: (BTreeMap<String, HoldSums>, GpuSums),
    days: (BTreeMap<String, HoldSums>, GpuSums),
    count: usize,
}

fn sums(store: &Store) -> Sums {
    let hours = store.read(|view| Ok((view.lease_hours(HoursPage::all())?, view.gpu_hours(HoursPage::all())?)));
    let days = store.read(|view| Ok((view.lease_days(i64::MIN, i64::MAX)?, view.gpu_days(i64::MIN, i64::MAX)?)));
    let ((leases, gpus), (lease_days, gpu_days)) = (hours.wait().unwrap(), days.wait().unwrap());
    let mut all = Sums { count: leases.len() + gpus.len(), ..Sums::default() };
    for row in &leases {
        all.hours.0.entry(row.owner.user.clone()).or_default().merge(&row.hour.sums);
    }
    for day in &lease_days {
        all.days.0.entry(day.owner.user.clone()).or_default().merge(&day.sums);
    }
    gpus.iter().for_each(|row| all.hours.1.merge(&row.sums));
    gpu_days.iter().for_each(|day| all.days.1.merge(&day.sums));
    all
}

/// A fold loses no second and no joule, also if hours of a folded day are recorded later.
#[test]
fn folded_days_have_exactly_the_sums_of_their_hours() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    let random = &mut fastrand::Rng::with_seed(40);
    let mut number = 0;
    let mut record = |from_day: i64, until_day: i64, count: usize| {
        for _ in 0..count {
            let hour_ms = random.i64(from_day * 24..until_day * 24) * HOUR;
            let row = random_hours(number, hour_ms, random);
            number += 1;
            store.write(move |tx| tx.record_usage(&row)).wait().unwrap();
        }
    };
    let fold = |until_ms: i64| store.write(move |tx| tx.fold_days(until_ms)).wait().unwrap();
    let delete = |before_ms: i64| store.write(move |tx| tx.delete_folded_hours(before_ms)).wait().unwrap();
    record(0, 10, 150);
    let hours = sums(&store).hours;
    assert_eq!(sums(&store).days, Sums::default().days);
    assert!(fold(5 * DAY + HOUR) > 0);
    let first = sums(&store);
    assert_eq!((fold(5 * DAY), &first.hours), (0, &hours), "the hours stay");
    // Late hours of folded days are added once.
    record(0, 3, 20);
    fold(10 * DAY);
    let all = sums(&store);
    assert_eq!((&all.days, all.count), (&all.hours, 340));
    assert_eq!(delete(i64::MAX), 0, "no month is closed");
    let number = store.read(|view| view.next_usage_row()).wait().unwrap();
    let closed = RowBound { until_ms: 8 * DAY, number };
    store.write(move |tx| tx.close_bills(&[], closed)).wait().unwrap();
    record(1, 2, 5);
    assert!(delete(i64::MAX) > 200);
    let left = sums(&store);
    assert_eq!((&left.days, left.count > 10), (&all.days, true), "late hours and two days stay");
    fold(11 * DAY);
    assert_eq!(sums(&store).count, left.count);
    let days = sums(&store).days.1.capacity;
    assert_eq!(days, all.days.1.capacity + late_capacity(&store, number));
    let bounds = UsageBounds { unused_from_ms: 0, history_from_ms: 9 * DAY };
    store.write(move |tx| tx.prune_usage(bounds)).wait().unwrap();
    let days = store.read(|view| view.gpu_days(0, i64::MAX)).wait().unwrap();
    assert!(!days.is_empty() && days.iter().all(|day| day.day_ms == 9 * DAY), "{days:?}");
}

/// Returns the capacity of the hours from a number on.
fn late_capacity(store: &Store, number: u64) -> u64 {
    let page = HoursPage { number, ..HoursPage::all() };
    store.read(move |view| view.gpu_hours(page)).wait().unwrap().iter().map(|row| row.sums.capacity).sum()
}

/// A month that is closed already is never replaced.
#[test]
fn closed_month_is_read_back_unchanged() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    let random = &mut fastrand::Rng::with_seed(40);
    // More than one part, although it is compressed.
    let large: String = (0..600_000).map(|_| random.alphanumeric()).collect();
    let close = |month_ms: i64, content: &str, until_ms: i64| {
        let months = [ClosedMonth::new(month_ms, content).unwrap()];
        store.write(move |tx| tx.close_bills(&months, RowBound { until_ms, number: 7 })).wait().unwrap();
    };
    close(0, &large, 31 * DAY);
    close(0, "another", 31 * DAY);
    close(31 * DAY, "later", 59 * DAY);
    drop(store);
    let store = open(scratch.path());
    let content = |month_ms: i64| {
        let month = store.read(move |view| view.closed_month(month_ms)).wait().unwrap();
        month.map(|month| month.content().unwrap())
    };
    assert_eq!((content(0), content(31 * DAY)), (Some(large), Some("later".to_owned())));
    assert_eq!(content(59 * DAY), None);
    let closed = store.read(|view| view.closed_bills()).wait().unwrap();
    assert_eq!(closed, Some(RowBound { until_ms: 59 * DAY, number: 7 }));
    let bounds = UsageBounds { unused_from_ms: 0, history_from_ms: 40 * DAY };
    store.write(move |tx| tx.prune_usage(bounds)).wait().unwrap();
    assert_eq!((content(0), content(31 * DAY)), (None, Some("later".to_owned())));
}

/// A damaged row about the use must not lead to the loss of the leases.
#[test]
fn damaged_row_is_reported_and_costs_only_itself() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    let row = usage(1, 7, HOUR);
    store.write(move |tx| tx.record_usage(&row)).wait().unwrap();
    drop(store);
    let files: Vec<_> = std::fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let database = files.iter().find(|path| path.extension().is_some_and(|end| end == "db")).expect("a database");
    rusqlite::Connection::open(database).unwrap().execute("UPDATE lease_hours SET owner = '{}'", []).unwrap();
    let opened = Store::open(scratch.path(), Options::default()).expect("the store opens");
    assert!(!opened.notes.iter().any(|note| matches!(note, crate::Note::Lost(_))), "{:?}", opened.notes);
    let error = opened.store.read(|view| view.lease_hours(HoursPage::all())).wait().unwrap_err();
    assert!(matches!(error, crate::StoreError::DamagedUse { .. }), "{error}");
    assert_eq!(opened.store.read(|view| view.gpu_hours(HoursPage::all())).wait().unwrap().len(), 1);
}

#[test]
fn requests_of_a_day_are_added() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    let refused = |day: i64, count| RequestCount {
        day_ms: day * 24 * HOUR,
        kind: "mig".to_owned(),
        profile: "7g.80gb".to_owned(),
        result: "no_capacity".to_owned(),
        count,
    };
    for row in [refused(1, 2), refused(1, 3), refused(2, 4)] {
        let usage = UsageRecord { checkpoint: "{}".to_owned(), requests: vec![row], ..UsageRecord::default() };
        store.write(move |tx| tx.record_usage(&usage)).wait().unwrap();
    }
    let all = store.read(|view| view.request_counts(0, i64::MAX)).wait().unwrap();
    assert_eq!(all, [refused(1, 5), refused(2, 4)]);
}

#[test]
fn requests_of_an_owner_are_added_by_day_and_kind() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    let row = |user: &str, kind, granted, refused, waited_ms| RequestDay {
        day_ms: 24 * HOUR,
        owner: LeaseOwner { user: user.to_owned(), ..LeaseOwner::default() },
        kind,
        sums: RequestSums { granted, refused, waited_ms },
    };
    for row in [
        row("anna", Some(LeaseKind::Mig), 1, 0, 500),
        row("anna", Some(LeaseKind::Mig), 0, 2, 0),
        row("bob", None, 0, 1, 0),
    ] {
        let usage = UsageRecord { checkpoint: "{}".to_owned(), owner_requests: vec![row], ..UsageRecord::default() };
        store.write(move |tx| tx.record_usage(&usage)).wait().unwrap();
    }
    let all = store.read(|view| view.owner_requests(0, i64::MAX)).wait().unwrap();
    assert_eq!(all, [row("anna", Some(LeaseKind::Mig), 1, 2, 500), row("bob", None, 0, 1, 0)]);
    let bounds = UsageBounds { unused_from_ms: 0, history_from_ms: 25 * HOUR };
    store.write(move |tx| tx.prune_usage(bounds)).wait().unwrap();
    assert_eq!(store.read(|view| view.owner_requests(0, i64::MAX)).wait().unwrap(), []);
}

#[test]
fn hours_are_read_page_by_page() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    for number in 0..5 {
        let row = usage(number * 2, number + 1, HOUR);
        store.write(move |tx| tx.record_usage(&row)).wait().unwrap();
    }
    let mut page = HoursPage { limit: 2, ..HoursPage::all() };
    let mut numbers = Vec::new();
    loop {
        let rows = store.read(move |view| view.lease_hours(page)).wait().unwrap();
        numbers.extend(rows.iter().map(|row| row.hour.number));
        let Some(last) = rows.last() else { break };
        page.number = last.hour.number + 1;
    }
    assert_eq!(numbers, [0, 2, 4, 6, 8]);
}

#[test]
fn newest_leases_of_a_period_are_read_page_by_page() {
    let scratch = tempfile::tempdir().expect("a directory");
    let store = open(scratch.path());
    for lease in 1..=6 {
        let row = usage(lease * 2, lease, i64::try_from(lease).unwrap() * HOUR);
        store.write(move |tx| tx.record_usage(&row)).wait().unwrap();
    }
    let page = |below: u64| {
        // Lease 6 ends at 7 h, at the end of the period.
        let read = store.read(move |view| view.newest_used_leases(3 * HOUR, 7 * HOUR, LeaseId(below), 3));
        read.wait().unwrap().iter().map(|one| one.totals.lease.0).collect::<Vec<_>>()
    };
    assert_eq!(page(u64::MAX), [5, 4, 3]);
    assert_eq!(page(3), [2]);
    assert_eq!(page(2), [] as [u64; 0]);
}
