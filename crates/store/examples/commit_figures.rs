//! Measures how long one durable change through the store takes, and how many changes share a sync.
//! Compares these changes with plain SQLite commits of the same bytes on the same disk. Changes and
//! plain commits alternate in one run.
//!
//! ```text
//! cargo run --release -p gpush-store --example commit_figures [DIRECTORY]
//! ```

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use gpush_api::{Actor, Mig};
use gpush_store::{Intent, NewAudit, NewOperation, Options, Store};

const ROUNDS: usize = 2000;
const CALLERS: usize = 32;
const EACH: usize = 200;

fn intent() -> Intent {
    let mig = Mig {
        enabled: true,
        reset_pending: false,
        memory_slices: 8,
        compute_slices: 7,
        instances: Vec::new(),
        profiles: std::sync::Arc::default(),
    };
    Intent {
        gpus: Vec::new(),
        more: serde_json::json!({ "before": mig, "text": "x".repeat(2000) }),
        ..Intent::default()
    }
}

fn percentile(times: &mut [Duration], part: usize) -> Duration {
    times.sort();
    times[times.len() * part / 100]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let parent = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = parent.join(format!("gpush-commit-figures-{}", std::process::id()));
    let result = measure(&directory);
    std::fs::remove_dir_all(&directory)?;
    result
}

fn measure(directory: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
    let opened = Store::open(&directory.join("store"), Options::default())?;
    for note in &opened.notes {
        println!("note: {note}");
    }
    let store = opened.store;
    let bare = rusqlite::Connection::open(directory.join("bare.db"))?;
    bare.execute_batch(
        "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
         CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT NOT NULL);",
    )?;
    // A plain commit writes as much text as one change through the store, which writes an intent,
    // an operation and an audit record.
    let text = serde_json::to_string(&intent())? + &"y".repeat(500);
    let by = || Actor { uid: 0, user: None, pid: None };
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS + 100 {
        let start = Instant::now();
        bare.prepare_cached("INSERT INTO t (text) VALUES (?1)")?.execute([&text])?;
        let bare_time = start.elapsed();
        let new = NewOperation {
            kind: "mig.apply".to_owned(),
            by: by(),
            reason: None,
            intent: intent(),
            progress: Vec::new(),
        };
        let start = Instant::now();
        runtime.block_on(store.write(move |tx| {
            let record = tx.begin(new.clone())?;
            tx.audit(NewAudit {
                by: Some(record.by.clone()),
                action: "mig.apply".to_owned(),
                object: record.id.to_string(),
                result: "accepted".to_owned(),
                detail: serde_json::Value::Null,
            })?;
            Ok(record.id)
        }))?;
        let our_time = start.elapsed();
        if round >= 100 {
            theirs.push(bare_time);
            ours.push(our_time);
        }
    }
    let ratio = percentile(&mut ours, 50).as_secs_f64() / percentile(&mut theirs, 50).as_secs_f64();
    for (name, times) in [("bare commit", &mut theirs), ("store, intent + operation + audit", &mut ours)] {
        println!("{name}: p50 {:?}, p95 {:?}", percentile(times, 50), percentile(times, 95));
    }
    println!("ratio of p50: {ratio:.2}");

    let before = store.statistics();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                for number in 0..EACH {
                    let change = store.write(move |tx| {
                        tx.audit(NewAudit {
                            by: None,
                            action: "x".to_owned(),
                            object: number.to_string(),
                            result: "done".to_owned(),
                            detail: serde_json::Value::Null,
                        })
                    });
                    if let Err(error) = change.wait() {
                        println!("{error}");
                    }
                }
            });
        }
    });
    let (after, took) = (store.statistics(), start.elapsed());
    let (writes, commits) = (after.writes - before.writes, after.commits - before.commits);
    println!(
        "{CALLERS} callers at once: {writes} changes in {commits} syncs ({:.1} a sync), {:.0} a second",
        writes as f64 / commits as f64,
        writes as f64 / took.as_secs_f64()
    );
    Ok(())
}
