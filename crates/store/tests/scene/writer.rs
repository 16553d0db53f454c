//! A process that commits continuously until it is killed. The process is the test program, started again with
//! `GPUSH_STORE_ROLE` set. In that process, the test `the_process_that_is_killed` calls [`role`]. In an ordinary test
//! run, this test does nothing.

#![allow(dead_code, reason = "each test program uses its part of it")]
#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use gpush_api::{EndReason, OperationState};
use gpush_store::{AuditQuery, Bounds, LeaseHistory, LeaseSource, Options, Store, StoreError};

use super::{audit, lease_terms, lost, new_lease, operation, options, override_of};

pub(crate) const THREADS: u64 = 4;

pub(crate) fn roomy() -> Options {
    let bounds = Bounds {
        operations: usize::MAX,
        leases: usize::MAX,
        leases_per_account: usize::MAX,
        account_bytes: usize::MAX,
        all_bytes: usize::MAX,
        audit_most: 1_000_000,
        ..Bounds::default()
    };
    Options { bounds, ..options() }
}

/// Commits one transaction with several records. Each thread numbers its transactions 1, 2, 3 and so on.
pub(crate) fn commit(store: &Store, thread: u64, number: u64) -> Result<u64, StoreError> {
    let write = store.write(move |tx| {
        let id = tx.begin(operation(&format!("thread {thread}"), number))?.id;
        tx.add_undo(id, serde_json::json!(number))?;
        tx.set_override(override_of(&format!("GPU-{thread}"), &number.to_string()))?;
        let source = LeaseSource::from(new_lease(uid_of(thread)));
        let lease = tx.begin_lease(source, lease_terms(&["GPU-0"]).members, id)?.id;
        tx.activate_lease(lease, lease_terms(&["GPU-0", "GPU-1"]))?;
        tx.end_lease(lease, EndReason::Released)?;
        tx.end(id, OperationState::Done, None)?;
        tx.mark_undone(id, 0)?;
        tx.audit(audit(&format!("thread {thread}"), &number.to_string()))?;
        Ok(number)
    });
    write.wait()
}

/// Returns the user whose leases a thread records.
fn uid_of(thread: u64) -> u32 {
    2000 + u32::try_from(thread).unwrap()
}

/// Returns the progress of each thread according to the store. Fails if a transaction is incomplete or missing.
pub(crate) fn reached(store: &Store) -> BTreeMap<u64, u64> {
    let read = store.read(|view| {
        let mut reached = BTreeMap::new();
        assert_eq!(view.open_leases()?, []);
        let operations = view.operations()?;
        let trail = view.audit(&AuditQuery::default())?;
        let overrides = view.overrides()?;
        for thread in 0..THREADS {
            let name = format!("thread {thread}");
            let numbers: Vec<u64> =
                trail.iter().filter(|one| one.action == name).map(|one| one.object.parse().unwrap()).collect();
            let last = numbers.len() as u64;
            assert_eq!(numbers, (1..=last).collect::<Vec<_>>(), "{name}");
            let of_thread: Vec<_> = operations.iter().filter(|one| one.kind == name).collect();
            assert_eq!(of_thread.len() as u64, last, "{name}");
            for (number, record) in (1..).zip(&of_thread) {
                assert_eq!(record.stage, OperationState::Done);
                let intent = view.intent(record.id)?.unwrap();
                assert_eq!(intent.more["mark"], number, "{name}");
                assert_eq!(view.undo(record.id)?.iter().map(|undo| undo.undone).collect::<Vec<_>>(), [true]);
            }
            let history = LeaseHistory { uids: Some(vec![uid_of(thread)]), before: None, limit: usize::MAX };
            let leases = view.ended_leases(&history)?;
            assert_eq!(leases.len() as u64, last, "{name}");
            assert!(leases.iter().all(|lease| lease.members.len() == 2), "{name}");
            let set = overrides.iter().find(|one| one.gpu_uuid == format!("GPU-{thread}").as_str());
            assert_eq!(set.map_or(0, |one| one.reason.parse().unwrap()), last, "{name}");
            reached.insert(thread, last);
        }
        Ok(reached)
    });
    read.wait().unwrap()
}

fn say(line: &str) {
    // One write for each line, so that a reader never gets a part of a line.
    std::io::stdout().lock().write_all(format!("{line}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// Runs as the process that the test kills, in one of three modes. `forever` commits from all threads. `few N` commits
/// N times from one thread and exits without closing the store. `open` opens and closes the store.
pub(crate) fn role() {
    let Ok(role) = std::env::var("GPUSH_STORE_ROLE") else { return };
    let directory = PathBuf::from(std::env::var_os("GPUSH_STORE_DIRECTORY").unwrap());
    let store = match Store::open(&directory, roomy()) {
        Ok(opened) => {
            if let Some(lost) = lost(&opened.notes) {
                say(&format!("\nlost {}", lost.cause));
            }
            opened.store
        }
        Err(error) => return say(&format!("\nrefused {error}")),
    };
    if role == "open" {
        return drop(store);
    }
    let from = reached(&store);
    say("\nready");
    if let Some(count) = role.strip_prefix("few ") {
        for number in from[&0] + 1..=from[&0] + count.parse::<u64>().unwrap() {
            match commit(&store, 0, number) {
                Ok(number) => say(&format!("\nrecorded 0 {number}")),
                Err(error) => say(&format!("\nerror {error:?}")),
            }
        }
        let ended = store.write_ending(|tx| tx.record_boot(&gpush_store::BootRecord::new("boot-2".to_owned()))).wait();
        say(&format!("\nending {ended:?}"));
        std::process::exit(0);
    }
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (store, first) = (&store, from[&thread] + 1);
            scope.spawn(move || {
                for number in first.. {
                    say(&format!("\nrecorded {thread} {}", commit(store, thread, number).unwrap()));
                }
            });
        }
    });
}

pub(crate) fn child(strace: &[&str], role: &str, directory: &Path) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut command = if strace.is_empty() {
        Command::new(own)
    } else {
        let mut command = Command::new("strace");
        command.args(["-f", "-qq"]).args(strace).arg(own);
        command
    };
    command
        .args(["--exact", "the_process_that_is_killed", "--nocapture"])
        .env("GPUSH_STORE_ROLE", role)
        .env("GPUSH_STORE_DIRECTORY", directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

pub(crate) fn have_strace(what: &str) -> bool {
    // strace may be installed, but not permitted to trace.
    let works = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    let works = works.is_ok_and(|output| output.status.success());
    if !works {
        println!("SKIPPED {what}: strace is not installed or may not trace here");
    }
    works
}

/// Returns the highest number that each thread printed as recorded.
pub(crate) fn read_reported(lines: impl Iterator<Item = String>) -> BTreeMap<u64, u64> {
    let mut reported = BTreeMap::new();
    for line in lines {
        if let Some((thread, number)) = line.strip_prefix("recorded ").and_then(|rest| rest.split_once(' ')) {
            reported.insert(thread.parse().unwrap(), number.parse().unwrap());
        }
        assert!(!line.starts_with("lost") && !line.starts_with("refused"), "{line}");
    }
    reported
}
