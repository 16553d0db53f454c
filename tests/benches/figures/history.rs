//! Size of the database and time of reports after 400 days with 200 leases a day.

use std::{
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Instant,
};

use gpush_api::{
    Actor, EndReason, LeaseBinding, LeaseHolder, LeaseId, LeaseKind, LeaseMember, LeaseRequest, MemberShare, Priority,
};
use gpush_store::{ClosedMonth, HoursPage, LeaseSource, LeaseTerms, NewLease, Options, OwnedHour, Store, UsageRecord};
use gpush_tests::{agent::Setup, host::Host};
use gpush_usage::{
    account::{EndedLease, LeaseOwner},
    bill::{BilledGpu, Month, MonthInputs, PriceList},
    input::Hold,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, LeaseTotals, MemberTotals, RowBound, StateTimes, TimeMean},
    moment::{DAY_MS, HOUR_MS},
    share::{GPU_UNITS, Share},
};
use jiff::Timestamp;

use crate::{
    ctl::{self, ctl, must},
    report::{Report, grouped, median},
};

const DAYS: i64 = 400;
const LEASES_A_DAY: u64 = 200;
const GPUS: u64 = 8;
const USERS: u64 = 40;
/// Hours that a lease touches.
const HOURS: i64 = 4;
/// Number of runs of each command.
const RUNS: usize = 21;

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

/// Returns a lease of a user for an eighth of an MPS target.
fn new_lease(lease: u64, owner: &LeaseOwner) -> NewLease {
    let uid = 1000 + u32::try_from(lease % USERS).expect("a small number");
    let binding = match &owner.job {
        Some(_) => LeaseBinding::Job {
            cluster: "cluster".to_owned(),
            job: u32::try_from(lease).expect("a small number"),
            node: "gpu1".to_owned(),
            restart: 0,
            leader: None,
            cgroup: Some(format!("system.slice/slurmstepd.scope/job_{lease}")),
            name: Some("train".to_owned()),
            account: owner.account.clone(),
        },
        None => LeaseBinding::Process { pid: Some(4711), start: Some(815) },
    };
    let user = Some(owner.user.clone());
    NewLease {
        holder: LeaseHolder { uid, user: user.clone() },
        asked_by: Actor { uid, user, pid: Some(4711) },
        kind: LeaseKind::Mps,
        request: LeaseRequest { gpus: vec!["0-3".to_owned()], duration_s: Some(7200), ..LeaseRequest::default() },
        binding,
    }
}

fn lease_terms() -> LeaseTerms {
    let member = LeaseMember {
        target: "GPU-0".into(),
        gpu_uuid: "GPU-0".into(),
        share: MemberShare::Mps {
            percentage: "12.5".parse().expect("a percentage"),
            memory_limit_mib: "8G".parse().ok(),
            priority: Priority::Normal,
        },
        memory_mib: 10_240,
        gpu_memory_mib: 81_920,
    };
    LeaseTerms { members: vec![member], expires_at: None }
}

/// Returns what gpushd records in one day.
fn day(day: u64, day_ms: i64, number: &mut u64) -> UsageRecord {
    let mut next = || {
        *number += 1;
        *number
    };
    let first = day * LEASES_A_DAY + 1;
    let mut usage = UsageRecord { checkpoint: "{}".to_owned(), ..UsageRecord::default() };
    for lease in first..first + LEASES_A_DAY {
        let begin_ms = day_ms + i64::try_from(lease % 20).expect("a small number") * HOUR_MS;
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
    let (leases, gpus, number) = read.wait().expect("rows");
    let mut inputs = MonthInputs::new(Month::of(until_ms - 1), PriceList::default());
    leases.into_iter().for_each(|row| inputs.add_lease(row.owner, row.hour));
    gpus.into_iter().for_each(|row| inputs.add_gpu(row));
    for gpu in 0..GPUS {
        inputs.models.insert(hold(gpu).gpu, BilledGpu { model: "NVIDIA H100 80GB HBM3".to_owned(), slices: 7 });
    }
    let month =
        ClosedMonth::new(inputs.month.start_ms(), &serde_json::to_string(&inputs).expect("JSON")).expect("a document");
    store
        .write(move |tx| tx.close_bills(std::slice::from_ref(&month), RowBound { until_ms, number }))
        .wait()
        .expect("a closed month");
}

/// Fills the store of an agent that has run for the days until `end_ms`.
fn fill(directory: &Path, end_ms: i64) {
    let start_ms = end_ms - DAYS * DAY_MS;
    let clock = Arc::new(AtomicI64::new(start_ms));
    let now = Arc::clone(&clock);
    let time = move || Timestamp::from_millisecond(now.load(Ordering::Relaxed)).expect("a time");
    let options = Options { boot_id: "boot-1".to_owned(), clock: Arc::new(time), ..Options::default() };
    let store = Store::open(directory, options).expect("a store").store;
    let mut number = 0;
    for (number_of_day, day_ms) in (start_ms..end_ms).step_by(usize::try_from(DAY_MS).expect("a day")).enumerate() {
        clock.store(day_ms + DAY_MS, Ordering::Relaxed);
        let usage = day(number_of_day as u64, day_ms, &mut number);
        let write = store.write(move |tx| {
            for lease in &usage.ended {
                let new = new_lease(lease.totals.lease.0, &lease.owner);
                let id = tx.grant_lease(LeaseSource::from(new), lease_terms())?.id;
                tx.end_lease(id, EndReason::Released)?;
            }
            tx.record_usage(&usage)?;
            tx.fold_days(day_ms + DAY_MS)
        });
        write.wait().expect("a record");
        if Month::of(day_ms) != Month::of(day_ms + DAY_MS) {
            close(&store, day_ms + DAY_MS);
        }
        let hours_ms = day_ms - 39 * DAY_MS;
        store.write(move |tx| tx.delete_folded_hours(hours_ms)).wait().expect("a deletion");
    }
}

fn size(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).expect("the folder of the store");
    entries.map(|entry| entry.and_then(|entry| entry.metadata()).map_or(0, |meta| meta.len())).sum()
}

/// Measures commands for users and administrators on a store with a long history.
pub(crate) fn run() -> Report {
    let host = Host::up("dgx-a100");
    let state_dir = Setup::on(&host).state_dir();
    let today_ms = Timestamp::now().as_millisecond().div_euclid(DAY_MS) * DAY_MS;
    fill(&state_dir, today_ms);
    let bytes = size(&state_dir);
    let agent = ctl::agent(&host);
    let last_month = Month::of(Month::of(today_ms).start_ms() - 1).to_string();
    let commands: [&[&str]; 6] = [
        &["usage", "--since", "30d"],
        &["usage", "--since", "30d", "--by", "job"],
        &["usage", "--since", "400d", "--by", "group"],
        &["lease", "list", "--ended", "--user", "1007"],
        &["bill", "--month", &last_month],
        &["bill", "--month", &last_month, "-o", "csv"],
    ];
    let kept = must(&host, &agent, &["usage", "--since", "400d", "--json"]);
    assert!(kept.stdout.len() > 1000, "the history is there");
    let mut report = Report::new(
        "Long history",
        &format!(
            "The database has {DAYS} days with {LEASES_A_DAY} leases a day, of {USERS} users on {GPUS} GPUs; each lease \
             touches {HOURS} hours, and every second one belongs to a Slurm job. Its size is {} MB. The months before \
             this one are closed. The table shows medians of {RUNS} runs of each command, with its start.",
            grouped(usize::try_from(bytes / 1_000_000).unwrap_or(usize::MAX))
        ),
        &["command", "ms", "KiB printed"],
    );
    for (at, arguments) in commands.iter().enumerate() {
        let mut times = Vec::new();
        let mut printed = 0;
        for _ in 0..RUNS {
            let mut command = ctl(&host, &agent, arguments);
            let started = Instant::now();
            let output = command.stderr(Stdio::null()).output().expect("gpushctl can be started");
            times.push(started.elapsed().as_secs_f64() * 1e3);
            assert!(output.status.success(), "{arguments:?}");
            printed = output.stdout.len();
        }
        let took = median(times);
        let shown = arguments.join(" ").replace(&last_month, "MONTH");
        report.rows.push(vec![
            format!("`gpushctl {shown}`"),
            format!("{took:.0}"),
            format!("{:.0}", printed as f64 / 1024.0),
        ]);
        if at == 0 {
            let what = format!("`gpushctl {shown}` after {DAYS} days");
            report.target(&what, "within 50 ms", &format!("{took:.0} ms"), took <= 50.0);
        }
    }
    agent.stop();
    report
}
