//! Damaged databases. For any damage to the files, the store either reports a loss, or contains exactly what was
//! recorded. It never returns anything else.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use gpush_api::{EndReason, OperationState};
use gpush_store::{LeaseSource, NewAnswer, OpenError, Store};
use jiff::Timestamp;
use scene::{audit, condition, everything, intent, lost, open, operation, options, override_of};

/// Creates a directory, in memory if possible: the tests create and sync thousands of databases.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.or_else(|_| tempfile::tempdir()).unwrap()
}

fn fill(store: &Store) {
    for n in 0..40u64 {
        store
            .write(move |tx| {
                let id = tx.begin(operation("mig.apply", n))?.id;
                tx.add_undo(id, serde_json::json!({ "start": "nvidia-dcgm.service" }))?;
                if n % 8 != 0 {
                    tx.end(id, OperationState::Done, None)?;
                }
                tx.set_override(override_of(&format!("GPU-{}", n % 8), &format!("reason {n}")))?;
                let terms = scene::lease_terms(&["GPU-0", "GPU-1"]);
                let lease = tx.grant_lease(LeaseSource::from(scene::new_lease(1000)), terms)?.id;
                if n % 4 != 0 {
                    tx.end_lease(lease, EndReason::Released)?;
                }
                tx.set_condition(condition(&format!("GPU-{}", n % 8), &format!("xid-{}", n % 3)))?;
                tx.keep_answer(NewAnswer {
                    uid: 1000,
                    key: "key".to_owned(),
                    request: b"request",
                    operation: Some(id),
                    status: 202,
                    body: serde_json::json!({ "id": id.to_string(), "n": n }),
                    expires_at: Timestamp::MAX,
                })?;
                tx.record_boot(&gpush_store::BootRecord::new("boot-1".to_owned()))?;
                tx.audit(audit("mig.apply", "GPU-0"))
            })
            .wait()
            .unwrap();
    }
    // SQLite needs overflow pages for this intent.
    let mut large = intent(99);
    large.more = serde_json::json!({ "mark": 99, "text": "A100".repeat(3000) });
    store
        .write(move |tx| tx.begin(gpush_store::NewOperation { intent: large.clone(), ..operation("x", 99) }))
        .wait()
        .unwrap();
}

type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Returns the current files of the store. If the store is open, a kill would leave these files.
fn files(directory: &Path) -> Files {
    let names = ["gpush.db", "gpush.db-wal", "watermark"];
    names.iter().filter_map(|name| Some((PathBuf::from(name), fs::read(directory.join(name)).ok()?))).collect()
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Harmless,
    Printed,
    Refused,
}

/// Writes the files to a directory, opens the store, and compares the store's content with the recorded content.
fn judge(directory: &Path, files: &Files, recorded: &str, what: &str) -> Outcome {
    let _ = fs::remove_dir_all(directory);
    fs::create_dir(directory).unwrap();
    for (name, bytes) in files {
        fs::write(directory.join(name), bytes).unwrap();
    }
    let opened = match Store::open(directory, options()) {
        Ok(opened) => opened,
        Err(OpenError::Database { .. }) => return Outcome::Refused,
        Err(error) => panic!("{what}: {error}"),
    };
    let text = opened.store.read(everything).wait().unwrap();
    if let Some(lost) = lost(&opened.notes) {
        // The damaged file is kept, and no number is used twice.
        let kept = lost.kept.as_ref().expect("a damaged file is kept");
        assert_eq!(fs::read(kept).unwrap(), files[Path::new("gpush.db")], "{what}");
        let log = fs::read(format!("{}-wal", kept.display())).unwrap_or_default();
        assert_eq!(Some(&log).filter(|log| !log.is_empty()), files.get(Path::new("gpush.db-wal")), "{what}");
        let next = opened.store.write(|tx| tx.begin(operation("x", 1))).wait().unwrap().id;
        assert!(next.0 > 41 || !files.contains_key(Path::new("watermark")), "{what}: {next}");
        return Outcome::Printed;
    }
    assert!(text == recorded, "{what}: neither reported nor harmless");
    Outcome::Harmless
}

#[derive(Debug, Default)]
struct Counts {
    harmless: u32,
    printed: u32,
    refused: u32,
}

impl Counts {
    fn add(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Harmless => self.harmless += 1,
            Outcome::Printed => self.printed += 1,
            Outcome::Refused => self.refused += 1,
        }
    }
}

#[test]
fn damaged_database_is_reported_or_unchanged() {
    let scratch = scratch();
    let directory = scratch.path().join("whole");
    let store = open(&directory).store;
    fill(&store);
    let recorded = store.read(everything).wait().unwrap();
    drop(store);
    let whole = files(&directory);
    let database = Path::new("gpush.db");
    assert!(!whole.contains_key(Path::new("gpush.db-wal")), "closing brings the log in");
    let size = whole[database].len();
    let target = scratch.path().join("damaged");
    assert_eq!(judge(&target, &whole, &recorded, "whole"), Outcome::Harmless);

    let mut header = Counts::default();
    for bit in 0..100 * 8 {
        let mut bad = whole.clone();
        bad.get_mut(database).unwrap()[bit / 8] ^= 1 << (bit % 8);
        header.add(&judge(&target, &bad, &recorded, &format!("header bit {bit}")));
    }
    println!("{size} bytes; header, each of 800 bits: {header:?}");
    let mut rng = fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15);
    let mut bits = Counts::default();
    for round in 0..1000 {
        let mut bad = whole.clone();
        let at = rng.usize(..size);
        bad.get_mut(database).unwrap()[at] ^= 1 << rng.usize(..8);
        bits.add(&judge(&target, &bad, &recorded, &format!("round {round}, byte {at}")));
    }
    println!("one bit anywhere, 1000 times: {bits:?}");
    let mut bytes = Counts::default();
    for round in 0..500 {
        let mut bad = whole.clone();
        let bad_bytes = bad.get_mut(database).unwrap();
        for _ in 0..=rng.usize(..16) {
            let at = rng.usize(..size);
            bad_bytes[at] = rng.usize(..256) as u8;
        }
        bytes.add(&judge(&target, &bad, &recorded, &format!("bytes, round {round}")));
    }
    println!("up to 16 bytes anywhere, 500 times: {bytes:?}");
    let mut sectors = Counts::default();
    for sector in 0..size / 512 {
        let mut bad = whole.clone();
        bad.get_mut(database).unwrap()[sector * 512..(sector + 1) * 512].fill(0);
        sectors.add(&judge(&target, &bad, &recorded, &format!("sector {sector}")));
    }
    println!("each of {} sectors zeroed: {sectors:?}", size / 512);
    let mut cut = Counts::default();
    for page in 0..size / 1024 {
        let mut bad = whole.clone();
        bad.get_mut(database).unwrap().truncate(page * 1024);
        cut.add(&judge(&target, &bad, &recorded, &format!("cut at {page} kB")));
    }
    println!("cut at each of {} kB: {cut:?}", size / 1024);
    assert_eq!(cut.harmless, 0);
    assert!(header.printed > 200 && bits.printed > 300 && bytes.printed > 400 && sectors.printed > 50);
}

#[test]
fn damaged_log_is_reported_or_unchanged() {
    let scratch = scratch();
    let directory = scratch.path().join("whole");
    let store = open(&directory).store;
    fill(&store);
    let recorded = store.read(everything).wait().unwrap();
    // These are the files that a kill -9 would leave now. The log is still needed after housekeeping.
    let whole = files(&directory);
    let log = Path::new("gpush.db-wal");
    let size = whole[log].len();
    assert!(size > 100_000, "{size}");
    let target = scratch.path().join("damaged");
    assert_eq!(judge(&target, &whole, &recorded, "whole"), Outcome::Harmless);
    let mut rng = fastrand::Rng::with_seed(0x2545_f491_4f6c_dd1d);
    let mut bits = Counts::default();
    for round in 0..600 {
        let mut bad = whole.clone();
        let at = rng.usize(..size);
        bad.get_mut(log).unwrap()[at] ^= 1 << rng.usize(..8);
        bits.add(&judge(&target, &bad, &recorded, &format!("log, round {round}, byte {at}")));
    }
    println!("{size} bytes of log; one bit anywhere, 600 times: {bits:?}");
    let mut cut = Counts::default();
    for round in 0..200 {
        let mut bad = whole.clone();
        bad.get_mut(log).unwrap().truncate(rng.usize(..size));
        cut.add(&judge(&target, &bad, &recorded, &format!("log cut, round {round}")));
    }
    println!("cut anywhere, 200 times: {cut:?}");
    let mut gone = whole.clone();
    gone.remove(log);
    assert_eq!(judge(&target, &gone, &recorded, "log deleted"), Outcome::Printed);
    // Without the watermark, nothing outside the database shows that the database is complete.
    let mut marks = Counts::default();
    for bit in (0..48 * 8).step_by(2) {
        let mut bad = whole.clone();
        bad.get_mut(Path::new("watermark")).unwrap()[bit / 8] ^= 1 << (bit % 8);
        marks.add(&judge(&target, &bad, &recorded, &format!("watermark bit {bit}")));
    }
    println!("watermark, every other of 384 bits: {marks:?}");
    assert_eq!((marks.printed, cut.harmless), (192, 0));
    drop(store);
}

#[test]
fn old_or_deleted_database_is_a_loss_until_accepted() {
    let scratch = scratch();
    let directory = scratch.path().join("state");
    drop(open(&directory));
    let old = fs::read(directory.join("gpush.db")).unwrap();
    let store = open(&directory).store;
    fill(&store);
    drop(store);
    fs::write(directory.join("gpush.db"), &old).unwrap();
    let opened = open(&directory);
    let loss = lost(&opened.notes).unwrap().clone();
    assert!(loss.cause.contains("an old copy was restored"), "{}", loss.cause);
    assert_eq!((loss.boot_id.as_str(), fs::read(loss.kept.as_ref().unwrap()).unwrap()), ("boot-1", old));
    drop(opened);
    // The loss is reported at each start until it is accepted.
    let opened = open(&directory);
    assert_eq!(lost(&opened.notes), Some(&loss));
    let accepted = opened.store.write(|tx| tx.accept_loss()).wait().unwrap();
    assert_eq!(accepted, Some(loss));
    assert_eq!(opened.store.write(|tx| tx.accept_loss()).wait().unwrap(), None);
    drop(opened);
    let opened = open(&directory);
    assert_eq!(opened.notes.len(), usize::from(directory.starts_with("/dev/shm")), "{:?}", opened.notes);
    drop(opened);

    fs::remove_file(directory.join("gpush.db")).unwrap();
    let opened = open(&directory);
    assert!(lost(&opened.notes).unwrap().cause.contains("was deleted"), "{:?}", opened.notes);
    drop(opened);
    fs::write(directory.join("gpush.db"), "").unwrap();
    assert!(lost(&open(&directory).notes).unwrap().cause.contains("it is empty"));
    fs::write(directory.join("gpush.db"), "this is no database at all").unwrap();
    assert!(lost(&open(&directory).notes).is_some());
    // Only a limited number of damaged files is kept.
    for round in 0..8 {
        fs::write(directory.join("gpush.db"), format!("damage number {round}")).unwrap();
        assert!(lost(&open(&directory).notes).is_some());
    }
    let aside = fs::read_dir(&directory).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name().into_string().unwrap();
        name.starts_with("gpush.db.damaged-") && !name.ends_with("-wal")
    });
    assert_eq!(aside.count(), 5);
}
