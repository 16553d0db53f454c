//! Databases of released versions: every later version reads them completely.
//!
//! A fixture is a dump in SQL, because the repository contains no binary files. Each version writes
//! its own fixture, which has the version in its name. The command is
//! `GPUSH_WRITE_FIXTURE=1 cargo test -p gpush-store --test released`. The fixture never changes
//! after the release of its version.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{collections::BTreeSet, fmt::Write as _, path::Path, sync::Arc};

use gpush_api::{
    EndReason, LeaseId, LeaseKeep, LeaseKind, LeaseNotice, LeaseState, NoticeKind, OperationState, TimesliceLevel,
    UseState,
};
use gpush_core::mps::{MpsStopped, MpsTargetRecord};
use gpush_store::{
    Answer, AuditQuery, BootRecord, ClosedMonth, GpuModel, LeaseHistory, LeaseSource, LevelSet, NewAnswer, Note,
    Options, OwnedHour, RequestCount, SharedGpu, Store, UsageRecord,
};
use gpush_usage::{
    account::{EndedLease, LeaseOwner, RequestDay, RequestSums},
    bill::{Adjustment, BilledGpu},
    input::Hold,
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour, LeaseTotals, RowBound, StateTimes, UnusedSpan},
    moment::DAY_MS,
    share::{GPU_UNITS, Share},
};
use jiff::Timestamp;
use rusqlite::Connection;
use scene::{actor, audit, condition, everything, intent, lease_terms, new_lease, operation, options, override_of};

/// The dumps, oldest first. The last one is of this version.
const RELEASES: [(&str, &str); 4] = [
    ("v0.1-before-usage", include_str!("fixtures/v0.1-before-usage.sql")),
    ("v0.1-before-bills", include_str!("fixtures/v0.1-before-bills.sql")),
    ("v0.1-before-requests", include_str!("fixtures/v0.1-before-requests.sql")),
    ("v0.1", include_str!("fixtures/v0.1.sql")),
];

/// When this environment variable is set, the fixture of this version is written again.
const WRITE: &str = "GPUSH_WRITE_FIXTURE";

/// Returns at least one record of each kind about the use.
fn usage() -> UsageRecord {
    let (lease, hour_ms) = (LeaseId(2), 1_789_999_200_000);
    let hold = Hold {
        gpu: "GPU-0".into(),
        target: "GPU-0".into(),
        kind: LeaseKind::Whole,
        share: Share { units: GPU_UNITS, charged: GPU_UNITS },
        instance: None,
        memory_mib: 81_920,
    };
    let owner = LeaseOwner { user: "anna".to_owned(), ..LeaseOwner::default() };
    let until_ms = hour_ms + 600_000;
    let totals = LeaseTotals { lease, begun_ms: hour_ms, until_ms, times: StateTimes::default(), members: Vec::new() };
    UsageRecord {
        checkpoint: "{}".to_owned(),
        lease_hours: vec![OwnedHour {
            owner: owner.clone(),
            hour: LeaseHour { lease, hold, number: 0, hour_ms, sums: HoldSums::default() },
        }],
        gpu_hours: vec![GpuHour { gpu: "GPU-0".into(), number: 1, hour_ms, sums: GpuSums::default() }],
        unused: vec![UnusedSpan { lease, state: UseState::Idle, from_ms: hour_ms, until_ms }],
        ended: vec![EndedLease { owner, name: None, reason: EndReason::Released, waited_ms: 0, totals }],
        requests: vec![RequestCount {
            day_ms: 1_789_948_800_000,
            kind: "whole".to_owned(),
            profile: String::new(),
            result: "granted".to_owned(),
            count: 2,
        }],
        owner_requests: vec![RequestDay {
            day_ms: 1_789_948_800_000,
            owner: LeaseOwner { user: "anna".to_owned(), ..LeaseOwner::default() },
            kind: Some(LeaseKind::Whole),
            sums: RequestSums { granted: 2, refused: 0, waited_ms: 1500 },
        }],
        models: vec![GpuModel {
            gpu: "GPU-0".into(),
            billed: BilledGpu { model: "NVIDIA H100".to_owned(), slices: 7 },
        }],
    }
}

/// Start of a closed month, 2026-08.
const OLD_MS: i64 = 1_785_542_400_000;

/// Returns hours of a closed month, which are folded into a day.
fn old_usage() -> UsageRecord {
    let mut old = usage();
    (old.lease_hours[0].hour.hour_ms, old.lease_hours[0].hour.number) = (OLD_MS, 1);
    (old.gpu_hours[0].hour_ms, old.gpu_hours[0].number) = (OLD_MS, 2);
    UsageRecord { unused: Vec::new(), ended: Vec::new(), requests: Vec::new(), owner_requests: Vec::new(), ..old }
}

fn closed_month() -> ClosedMonth {
    ClosedMonth::new(OLD_MS, "{}").unwrap()
}

fn correction() -> Adjustment {
    Adjustment {
        hour_ms: OLD_MS + 40 * DAY_MS,
        owner: LeaseOwner { user: "anna".to_owned(), ..LeaseOwner::default() },
        lease: None,
        amount: "-3.1".parse().unwrap(),
        description: "August: the GPU had failed".to_owned(),
    }
}

fn some_notice() -> LeaseNotice {
    let at = Timestamp::from_second(1_790_000_000).unwrap();
    LeaseNotice { at, kind: NoticeKind::Unused, text: "lease L1 is unused".to_owned(), ends_at: None, terminals: None }
}

fn keep() -> LeaseKeep {
    let at = Timestamp::from_second(1_790_000_000).unwrap();
    LeaseKeep { by: actor(1000), reason: "demo at noon".to_owned(), at, until: at }
}

/// Writes at least one record of each kind: operations that run, wait and have ended, leases that are active and have
/// ended, and all other state.
fn fill(store: &Store) {
    store
        .write(|tx| {
            let ended = tx.begin(operation("mig.apply", 1))?.id;
            tx.end(ended, OperationState::Done, None)?;
            let queued = tx.enqueue(operation("mig.apply", 2))?.id;
            let running = tx.enqueue(operation("mig.apply", 3))?.id;
            tx.start(running, intent(3), Vec::new())?;
            tx.add_undo(running, serde_json::json!({ "start": "nvidia-dcgm.service" }))?;
            tx.set_override(override_of("GPU-1", "a test"))?;
            tx.set_condition(condition("GPU-0", "admin"))?;
            tx.audit(audit("mig.apply", &queued.to_string()))?;
            tx.record_boot(&BootRecord::new("boot-1".to_owned()))?;
            tx.keep_answer(NewAnswer {
                uid: 1000,
                key: "key".to_owned(),
                request: b"request",
                operation: Some(ended),
                status: 202,
                body: serde_json::json!({ "id": "op-1" }),
                expires_at: Timestamp::from_second(4_000_000_000).unwrap(),
            })
        })
        .wait()
        .unwrap();
    let grant = |uid| {
        let write = move |tx: &mut gpush_store::Tx<'_>| {
            tx.grant_lease(LeaseSource::from(new_lease(uid)), lease_terms(&["GPU-0"]))
        };
        store.write(write).wait().unwrap().id
    };
    let (active, released) = (grant(1000), grant(1001));
    store.write_ending(move |tx| tx.end_lease(released, EndReason::Released)).wait().unwrap();
    store
        .write(move |tx| {
            tx.queue_lease(new_lease(1002))?;
            tx.set_mps_target(&MpsTargetRecord {
                target: "GPU-2".into(),
                stopped: Some(MpsStopped { by: actor(0), end_at: None }),
                ..MpsTargetRecord::default()
            })?;
            tx.record_usage(&usage())?;
            tx.record_usage(&old_usage())?;
            tx.close_bills(&[closed_month()], RowBound { until_ms: OLD_MS + 31 * DAY_MS, number: 3 })?;
            tx.fold_days(OLD_MS + 31 * DAY_MS)?;
            tx.record_usage(&UsageRecord { ended: Vec::new(), requests: Vec::new(), ..usage() })?;
            tx.add_correction(correction())?;
            tx.record_notice(active, some_notice())?;
            tx.keep_lease(active, keep())?;
            tx.set_shared_gpu(SharedGpu {
                gpu_uuid: "GPU-3".into(),
                level: Some(LevelSet { set: TimesliceLevel::Short, last: None }),
                ..SharedGpu::default()
            })
        })
        .wait()
        .unwrap();
}

/// The line of a dump with the content of the file `watermark`, in hexadecimal.
const WATERMARK: &str = "-- watermark ";

/// Returns the SQL that creates the same database, and its watermark as a comment.
fn dump(directory: &Path) -> String {
    let connection = Connection::open(directory.join("gpush.db")).unwrap();
    let number = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0)).unwrap();
    // gpushd's databases have a write-ahead log; the header says so.
    let mut text = "PRAGMA journal_mode = wal;\n".to_owned();
    let watermark = std::fs::read(directory.join("watermark")).unwrap();
    let watermark: String = watermark.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(text, "{WATERMARK}{watermark}").unwrap();
    for name in ["application_id", "user_version"] {
        writeln!(text, "PRAGMA {name} = {};", number(name)).unwrap();
    }
    let rows = |sql: &str| -> Vec<(String, String, String)> {
        let mut statement = connection.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
        rows.map(Result::unwrap).collect()
    };
    for (kind, table, sql) in rows("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid") {
        writeln!(text, "{sql};").unwrap();
        if kind != "table" {
            continue;
        }
        let columns: Vec<String> = rows(&format!("SELECT name, type, '' FROM pragma_table_info('{table}')"))
            .into_iter()
            .map(|(name, _, _)| format!("quote(\"{name}\")"))
            .collect();
        let columns = columns.join(" || ', ' || ");
        for (values, _, _) in rows(&format!("SELECT {columns}, '', '' FROM {table}")) {
            writeln!(text, "INSERT INTO {table} VALUES ({values});").unwrap();
        }
    }
    text
}

/// Creates the database of a dump in a directory, and opens it with this version.
fn opened(directory: &Path, dump: &str) -> gpush_store::Opened {
    let connection = Connection::open(directory.join("gpush.db")).unwrap();
    connection.execute_batch(dump).unwrap();
    drop(connection);
    let watermark = dump.lines().find_map(|line| line.strip_prefix(WATERMARK)).unwrap();
    let bytes = (0..watermark.len()).step_by(2).map(|at| u8::from_str_radix(&watermark[at..at + 2], 16).unwrap());
    std::fs::write(directory.join("watermark"), bytes.collect::<Vec<_>>()).unwrap();
    Store::open(directory, options()).unwrap()
}

#[test]
fn database_of_each_release_is_read_completely() {
    for (release, dump) in RELEASES {
        let scratch = tempfile::tempdir().unwrap();
        let gpush_store::Opened { store, notes } = opened(scratch.path(), dump);
        let is_loss = |note: &Note| matches!(note, Note::Lost(_) | Note::Created | Note::OtherHost { .. });
        assert!(!notes.iter().any(is_loss), "{release}: {notes:?}");
        store
            .read(move |view| {
                let states: Vec<_> = view.operations()?.iter().map(|one| one.stage).collect();
                assert_eq!(
                    states,
                    [OperationState::Done, OperationState::Queued, OperationState::Running],
                    "{release}"
                );
                let unfinished = view.unfinished()?;
                assert_eq!((unfinished.len(), unfinished[1].undo.len()), (2, 1), "{release}");
                assert_eq!(unfinished[0].intent.gpus[0].plan.gpu_uuid, "GPU-0", "{release}");

                let open: Vec<_> = view.open_leases()?.into_iter().map(|one| (one.holder.uid, one.state)).collect();
                assert_eq!(open, [(1000, LeaseState::Active), (1002, LeaseState::Queued)], "{release}");
                let ended = view.ended_leases(&LeaseHistory { uids: None, before: None, limit: 10 })?;
                assert_eq!(ended.iter().map(|one| one.holder.uid).collect::<Vec<_>>(), [1001], "{release}");

                let trail = view.audit(&AuditQuery::default())?;
                assert_eq!((trail.len(), trail[0].action.as_str()), (1, "mig.apply"), "{release}");
                assert_eq!(trail[0].by, Some(actor(0)), "{release}");
                assert_eq!(view.overrides()?[0].layout, ["3g.40gb", "1g.10gb*2"], "{release}");
                assert_eq!(view.conditions()?[0].reason, "fan replaced", "{release}");
                assert_eq!((view.mps_targets()?.len(), view.shared_gpus()?.len()), (1, 1), "{release}");
                assert!(matches!(view.answer(1000, "key", b"request")?, Answer::Known(_)), "{release}");
                assert!(view.last_boot()?.is_some() && view.lost()?.is_none(), "{release}");
                println!("{release}: {} bytes of records", everything(view)?.len());
                Ok(())
            })
            .wait()
            .unwrap();
        // This version can also write to the database.
        let write =
            |tx: &mut gpush_store::Tx<'_>| tx.grant_lease(LeaseSource::from(new_lease(1003)), lease_terms(&["GPU-0"]));
        let granted = store.write(write).wait().unwrap();
        assert_eq!(granted.id.0, 4, "{release}");
    }
}

/// A new table must be added to the fixture of this version before this version is released.
#[test]
fn fixture_of_this_version_has_rows_in_every_table() {
    let scratch = tempfile::tempdir().unwrap();
    let clock = Arc::new(|| Timestamp::from_second(1_790_000_000).unwrap());
    let store = Store::open(scratch.path(), Options { clock, ..options() }).unwrap().store;
    fill(&store);
    drop(store);
    let fresh = dump(scratch.path());
    let (version, fixture) = RELEASES[RELEASES.len() - 1];
    if std::env::var_os(WRITE).is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(format!("{version}.sql"));
        std::fs::write(path, &fresh).unwrap();
        return;
    }
    let tables = |dump: &str| -> BTreeSet<String> {
        let names = |line: &str| line.strip_prefix("CREATE TABLE ")?.split([' ', '(']).next().map(str::to_owned);
        dump.lines().filter_map(names).collect()
    };
    for table in tables(&fresh) {
        let insert = format!("INSERT INTO {table} ");
        assert!(fresh.contains(&insert), "`fill` writes no row of {table}");
        assert!(fixture.contains(&insert), "tests/fixtures/{version}.sql has no row of {table}; set {WRITE}=1");
    }
    assert_eq!(tables(&fresh), tables(fixture), "set {WRITE}=1, or add the fixture of a new version");
}
