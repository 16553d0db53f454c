//! Size of the database and time of a report after 400 days with 200 leases a day.
//!
//! The measurement takes about a minute:
//! `cargo test --release -p gpush-store --test long_history -- --ignored --nocapture`

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `View`")]

mod scene;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use gpush_api::{EndReason, LeaseBinding, LeaseId, LeaseKind};
use gpush_store::{
    ClosedMonth, HoursPage, LeaseHistory, LeaseSource, Options, OwnedHour, Store, UsageBounds, UsageRecord,
};
use gpush_usage::{
    account::{EndedLease, Grouping, LeaseOwner, fold_gpus, fold_leases, report},
    bill::{BillModel, BilledGpu, Month, MonthInputs, PriceList, bill_csv},
    input::Hold,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, LeaseTotals, MemberTotals, RowBound, StateTimes, TimeMean},
    moment::{DAY_MS, HOUR_MS},
    share::{GPU_UNITS, Share},
};
use jiff::Timestamp;
use scene::{lease_terms, new_lease, options};

const DAYS: i64 = 400;
const LEASES_A_DAY: u64 = 200;
const GPUS: u64 = 8;
const USERS: u64 = 40;
/// Hours that a lease touches.
const HOURS: i64 = 4;
/// 2026-01-01.
const START_MS: i64 = 1_767_225_600_000;

fn hold(lease: u64) -> Hold {
    Hold {
        gpu: format!("GPU-5d1b4e2a-7c33-5e0a-9d61-{:012}", lease % GPUS).as_str().into(),
        target: format!("MIG-5d1b4e2a-7c33-5e0a-9d61-{lease:012}").as_str().into(),
        kind: LeaseKind::Mig,
        share: Share { units: GPU_UNITS / 7, charged: GPU_UNITS / 7 },
        instance: Some(9),
        memory_mib: 9_728,
    }
}

fn sums(ms: u64) -> HoldSums {
    let unit_ms = u64::from(GPU_UNITS / 7) * ms;
    HoldSums {
        times: StateTimes { busy_ms: ms / 2, idle_ms: ms / 2, ..StateTimes::default() },
        unit_ms,
        busy_unit_ms: unit_ms / 2,
        charged_unit_ms: unit_ms,
        busy_charged_unit_ms: unit_ms / 2,
        energy_mj: 123_456_789,
        memory: TimeMean { value_ms: 7_654 * ms, known_ms: ms },
        memory_peak_mib: 8_321,
        sm: TimeMean { value_ms: 345_678 * ms, known_ms: ms },
        dram: TimeMean { value_ms: 234_567 * ms, known_ms: ms },
        limits_known_ms: ms,
        ..HoldSums::default()
    }
}

/// Every second lease belongs to a Slurm job of its own.
fn owner(lease: u64) -> LeaseOwner {
    LeaseOwner {
        user: format!("user{}", lease % USERS),
        group: Some(format!("group{}", lease % 5)),
        account: lease.is_multiple_of(2).then(|| format!("account{}", lease % 7)),
        job: lease.is_multiple_of(2).then(|| format!("cluster/{lease}")),
    }
}

/// Returns what gpushd records in one day.
fn day(day: i64, number: &mut u64) -> UsageRecord {
    let day_ms = START_MS + day * DAY_MS;
    let mut next = || {
        *number += 1;
        *number
    };
    let first = u64::try_from(day).unwrap() * LEASES_A_DAY + 1;
    let mut usage = UsageRecord { checkpoint: "{}".to_owned(), ..UsageRecord::default() };
    for lease in first..first + LEASES_A_DAY {
        let begin_ms = day_ms + i64::try_from(lease % 20).unwrap() * HOUR_MS;
        for hour in 0..HOURS {
            let hour = LeaseHour {
                lease: LeaseId(lease),
                hold: hold(lease),
                number: next(),
                hour_ms: begin_ms + hour * HOUR_MS,
                sums: sums(3_600_000),
            };
            usage.lease_hours.push(OwnedHour { owner: owner(lease), hour });
        }
        let all = sums(4 * 3_600_000);
        let member = MemberTotals { hold: hold(lease), sums: all, memory_p98_mib: Some(8_000) };
        let totals = LeaseTotals {
            lease: LeaseId(lease),
            begun_ms: begin_ms,
            until_ms: begin_ms + HOURS * HOUR_MS,
            times: all.times,
            members: vec![member],
        };
        let (owner, name) = (owner(lease), Some("train".to_owned()));
        usage.ended.push(EndedLease { owner, name, reason: EndReason::Released, waited_ms: 5_000, totals });
    }
    for gpu in 0..GPUS {
        for hour in 0..24 {
            let capacity = u64::from(GPU_UNITS) * 3_600_000;
            let sums = GpuSums {
                known_ms: 3_600_000,
                capacity,
                leased: capacity / 2,
                free: capacity / 2,
                charged: capacity / 2,
                uncharged: capacity / 2,
                energy_mj: 1_234_567_890,
                unattributed_mj: 234_567_890,
                ..GpuSums::default()
            };
            let gpu = hold(gpu).gpu;
            usage.gpu_hours.push(GpuHour { gpu, number: next(), hour_ms: day_ms + hour * HOUR_MS, sums });
        }
    }
    usage
}

/// Closes the month before a day, as gpushd does.
fn close(store: &Store, until_ms: i64) {
    let read = store.read(move |view| {
        let closed = view.closed_bills()?;
        let from_ms = closed.map_or(i64::MIN, |closed| closed.until_ms);
        let page = HoursPage { from_ms, until_ms, number: 0, limit: usize::MAX };
        Ok((view.lease_hours(page)?, view.gpu_hours(page)?, view.next_usage_row()?))
    });
    let (leases, gpus, number) = read.wait().unwrap();
    let mut inputs = MonthInputs::new(Month::of(until_ms - 1), PriceList::default());
    leases.into_iter().for_each(|row| inputs.add_lease(row.owner, row.hour));
    gpus.into_iter().for_each(|row| inputs.add_gpu(row));
    for gpu in 0..GPUS {
        inputs.models.insert(hold(gpu).gpu, BilledGpu { model: "NVIDIA H100 80GB HBM3".to_owned(), slices: 7 });
    }
    let month = ClosedMonth::new(inputs.month.start_ms(), &serde_json::to_string(&inputs).unwrap()).unwrap();
    store.write(move |tx| tx.close_bills(std::slice::from_ref(&month), RowBound { until_ms, number })).wait().unwrap();
}

fn fill(store: &Store, clock: &AtomicI64) {
    let mut number = 0;
    for number_of_day in 0..DAYS {
        let day_ms = START_MS + number_of_day * DAY_MS;
        clock.store(day_ms + DAY_MS, Ordering::Relaxed);
        let usage = day(number_of_day, &mut number);
        let write = store.write(move |tx| {
            for lease in &usage.ended {
                let mut new = new_lease(1000 + u32::try_from(lease.totals.lease.0 % USERS).unwrap());
                if lease.owner.job.is_some() {
                    new.binding = LeaseBinding::Job {
                        cluster: "cluster".to_owned(),
                        job: u32::try_from(lease.totals.lease.0).unwrap(),
                        node: "gpu1".to_owned(),
                        restart: 0,
                        leader: None,
                        cgroup: Some(format!("system.slice/slurmstepd.scope/job_{}", lease.totals.lease.0)),
                        name: Some("train".to_owned()),
                        account: lease.owner.account.clone(),
                    };
                }
                let id = tx.grant_lease(LeaseSource::from(new), lease_terms(&["GPU-0"]))?.id;
                tx.end_lease(id, EndReason::Released)?;
            }
            tx.record_usage(&usage)?;
            tx.fold_days(day_ms + DAY_MS)
        });
        write.wait().unwrap();
        if Month::of(day_ms) != Month::of(day_ms + DAY_MS) {
            close(store, day_ms + DAY_MS);
        }
        let (hours_ms, history_from_ms) = (day_ms - 39 * DAY_MS, day_ms - 399 * DAY_MS);
        let bounds = UsageBounds { unused_from_ms: history_from_ms, history_from_ms };
        let delete = store.write(move |tx| Ok(tx.delete_folded_hours(hours_ms)? + tx.prune_usage(bounds)?));
        delete.wait().unwrap();
    }
}

fn best(mut measured: impl FnMut() -> usize) -> Duration {
    let times = (0..5).map(|_| {
        let began = Instant::now();
        assert!(measured() > 0);
        began.elapsed()
    });
    times.min().unwrap()
}

fn size(directory: &Path) -> u64 {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
#[ignore = "a measurement: see the top of the file"]
fn store_of_400_days_is_small_and_reports_are_fast() {
    let scratch = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(START_MS));
    let now = Arc::clone(&clock);
    let time = move || Timestamp::from_millisecond(now.load(Ordering::Relaxed)).unwrap();
    let options = || Options { clock: Arc::new(time.clone()), ..options() };
    let store = Store::open(scratch.path(), options()).unwrap().store;
    fill(&store, &clock);
    drop(store);
    println!("size after 400 days × 200 leases: {:.1} MB", size(scratch.path()) as f64 / 1e6);
    let began = Instant::now();
    let store = Store::open(scratch.path(), options()).unwrap().store;
    println!("opening: {:?}", began.elapsed());
    let end_ms = START_MS + DAYS * DAY_MS;
    let kept = store.read(|view| view.ended_leases(&LeaseHistory { uids: None, before: None, limit: usize::MAX }));
    let kept = kept.wait().unwrap().len();
    assert_eq!(kept, usize::try_from(DAYS).unwrap() * usize::try_from(LEASES_A_DAY).unwrap(), "no lease is lost");
    for (name, days) in [("30 days", 30), ("400 days", 400)] {
        let from_ms = end_ms - days * DAY_MS;
        for by in [Grouping::User, Grouping::Job] {
            let took = best(|| {
                let read = store.read(move |view| {
                    let page = HoursPage { from_ms: end_ms - HOUR_MS, until_ms: end_ms, number: 0, limit: 10_000 };
                    let hours = (view.lease_hours(page)?, view.gpu_hours(page)?);
                    Ok((view.lease_days(from_ms, end_ms)?, view.gpu_days(from_ms, end_ms)?, hours))
                });
                let (leases, gpus, (hours, gpu_hours)) = read.wait().unwrap();
                let none = LeaseOwner::default();
                let more = fold_leases(hours.iter().map(|row| &row.hour), |_| &none);
                let more_gpus = fold_gpus(&gpu_hours);
                report(leases.iter().chain(&more), &[], gpus.iter().chain(&more_gpus), by).lines.len()
            });
            println!("report over {name} by {}: {took:?}", by.name());
        }
    }
    let took = best(|| {
        let history = LeaseHistory { uids: Some(vec![1007]), before: None, limit: 100 };
        store.read(move |view| view.ended_leases(&history)).wait().unwrap().len()
    });
    println!("100 ended leases of one user: {took:?}");
    let took = best(|| {
        let month_ms = Month::of(end_ms - 1).start_ms();
        let month_ms = Month::of(month_ms - 1).start_ms();
        let month = store.read(move |view| view.closed_month(month_ms)).wait().unwrap().unwrap();
        let inputs: MonthInputs = serde_json::from_str(&month.content().unwrap()).unwrap();
        bill_csv(&inputs.bill(BillModel::Requested)).unwrap().len()
    });
    println!("bill of a closed month as CSV: {took:?}");
}
