//! Problems outside the store: a full disk, a second gpushd, deleted files, the database of a newer gpushd, an unusable
//! directory.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use gpush_api::OperationState;
use gpush_store::{Bounds, NewOperation, Note, OpenError, Opened, Options, SCHEMA, Store, StoreError};
use scene::{audit, everything, lost, open, operation, options, override_of};

#[test]
fn second_agent_gets_holder_and_can_open_afterwards() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("a/b");
    let first = open(&path);
    let error = Store::open(&path, options()).unwrap_err().to_string();
    let pid = std::process::id();
    assert!(error.starts_with(&format!("another gpushd (pid {pid}) uses the state directory")), "{error}");
    assert!(error.contains(&format!("`kill {pid}`")), "{error}");
    let clone = first.store.clone();
    drop(first);
    assert!(Store::open(&path, options()).is_err(), "a handle is left");
    drop(clone);
    open(&path);
}

#[test]
fn directory_that_cannot_be_created_names_the_option() {
    let error = Store::open(Path::new("/dev/null/gpush"), options()).unwrap_err();
    assert!(error.to_string().contains("--state-dir"), "{error}");
    let scratch = tempfile::tempdir().unwrap();
    fs::create_dir(scratch.path().join("gpush.db")).unwrap();
    let error = Store::open(scratch.path(), options()).unwrap_err();
    assert!(matches!(&error, OpenError::Unusable { path, .. } if path.ends_with("gpush.db")), "{error}");
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn only_state_directory_itself_is_private() {
    let scratch = tempfile::tempdir().unwrap();
    fs::create_dir(scratch.path().join("usual")).unwrap();
    let directory = scratch.path().join("above/state");
    let store = open(&directory).store;
    store.write(|tx| tx.audit(audit("x", "y"))).wait().unwrap();
    assert_eq!(mode(&scratch.path().join("above")), mode(&scratch.path().join("usual")));
    assert_eq!(mode(&directory), 0o700);
    let mut files = 0;
    for entry in fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
        files += 1;
    }
    assert!(files >= 5, "{files}");
    drop(store);
    // A database of an earlier version may be readable for all users.
    set_mode(&directory.join("gpush.db"), 0o644);
    open(&directory);
    assert_eq!(mode(&directory.join("gpush.db")), 0o600);
    // A link to the directory is accepted; the checks apply to its target.
    symlink(&directory, scratch.path().join("link")).unwrap();
    open(&scratch.path().join("link"));
}

#[test]
fn files_writable_by_others_are_refused_unchanged() {
    const FILES: [&str; 5] = ["lock", "reserve", "watermark", "gpush.db", "gpush.db-wal"];
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("state");
    let store = open(&directory).store;
    store.write(|tx| tx.audit(audit("x", "kept"))).wait().unwrap();
    drop(store);
    if !directory.join("gpush.db-wal").exists() {
        fs::write(directory.join("gpush.db-wal"), "").unwrap();
        set_mode(&directory.join("gpush.db-wal"), 0o600);
    }
    let refused = |path: &Path, says: &[&str]| {
        let error = Store::open(&directory, options()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(&error, OpenError::Untrusted { path: found, .. } if found == path), "{text}");
        for part in says.iter().chain(&[path.to_str().unwrap(), "--state-dir"]) {
            assert!(text.contains(part), "{part}: {text}");
        }
    };
    let writable = format!("`chmod go-w {}", directory.display());
    for mode in [0o777, 0o770, 0o1777] {
        set_mode(&directory, mode);
        refused(&directory, &[&writable, "can be written by users other than its owner", &format!("mode {mode:04o}")]);
    }
    set_mode(&directory, 0o700);
    let victim = scratch.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    for name in FILES {
        let path = directory.join(name);
        set_mode(&path, 0o666);
        refused(&path, &["`chmod go-w "]);
        set_mode(&path, 0o600);
        fs::rename(&path, scratch.path().join("moved")).unwrap();
        symlink(&victim, &path).unwrap();
        refused(&path, &["is a symbolic link", "`rm "]);
        fs::remove_file(&path).unwrap();
        fs::rename(scratch.path().join("moved"), &path).unwrap();
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    match chown(&directory, Some(65534), Some(65534)) {
        Ok(()) => {
            refused(&directory, &["belongs to uid 65534", "`chown 0 "]);
            chown(&directory, Some(0), Some(0)).unwrap();
            chown(directory.join("gpush.db"), Some(65534), None).unwrap();
            refused(&directory.join("gpush.db"), &["belongs to uid 65534", "`chown 0 "]);
            chown(directory.join("gpush.db"), Some(0), None).unwrap();
        }
        Err(error) => println!("SKIPPED another user's directory: it can't be given away here ({error})"),
    }
    let opened = open(&directory);
    assert_eq!(lost(&opened.notes), None);
    let trail = opened.store.read(|view| view.audit(&gpush_store::AuditQuery::default())).wait().unwrap();
    assert_eq!(trail[0].object, "kept");
}

#[test]
fn deleted_or_replaced_file_fails_the_next_write() {
    type Way = (&'static str, fn(&Path));
    let ways: [Way; 6] = [
        ("database deleted", |directory| fs::remove_file(directory.join("gpush.db")).unwrap()),
        ("log deleted", |directory| fs::remove_file(directory.join("gpush.db-wal")).unwrap()),
        ("lock deleted", |directory| fs::remove_file(directory.join("lock")).unwrap()),
        ("directory deleted", |directory| fs::remove_dir_all(directory).unwrap()),
        ("directory moved", |directory| fs::rename(directory, directory.with_extension("old")).unwrap()),
        ("database replaced", |directory| {
            fs::copy(directory.join("gpush.db"), directory.join("copy")).unwrap();
            fs::rename(directory.join("copy"), directory.join("gpush.db")).unwrap();
        }),
    ];
    for (what, way) in ways {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("state");
        let store = open(&directory).store;
        store.write(|tx| tx.audit(audit("x", "before"))).wait().unwrap();
        way(&directory);
        let error = store.write(|tx| tx.audit(audit("x", "after"))).wait().unwrap_err();
        assert!(matches!(error, StoreError::Gone { .. }), "{what}: {error}");
        assert!(error.to_string().contains("systemctl restart gpushd"), "{what}: {error}");
        // The store stays unusable, even for endings.
        let again = store.write_ending(|tx| tx.audit(audit("x", "after"))).wait().unwrap_err();
        assert!(matches!(again, StoreError::Gone { .. }), "{what}: {again}");
        drop(store);
        // The next gpushd has everything that was reported as recorded, or reports a loss.
        if !what.starts_with("directory") {
            let opened = open(&directory);
            let trail = opened.store.read(|view| view.audit(&gpush_store::AuditQuery::default())).wait().unwrap();
            let there = trail.first().is_some_and(|first| first.object == "before");
            assert_eq!(there, lost(&opened.notes).is_none(), "{what}: {:?}", opened.notes);
            assert!(what != "database deleted" || !there, "{what}");
        }
    }
    println!("{} ways", ways.len());
}

#[test]
fn newer_database_is_read_only() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    store.write(|tx| tx.set_override(override_of("GPU-0", "kept"))).wait().unwrap();
    drop(store);
    // A later schema might add a column, and include that column in the seal.
    let file = scratch.path().join("gpush.db");
    let newer = rusqlite::Connection::open(&file).unwrap();
    newer
        .execute_batch(
            "ALTER TABLE overrides ADD COLUMN enforcement TEXT; UPDATE overrides SET enforcement = 'report', seal = 1;
             CREATE TABLE later (id INTEGER PRIMARY KEY); PRAGMA user_version = 1000;",
        )
        .unwrap();
    newer.close().unwrap();
    // So far, only the schema number in the header is newer. This counts as damage, because a flipped bit in the header
    // must not look like a newer schema.
    let before = fs::read(&file).unwrap();
    let opened = open(scratch.path());
    assert!(lost(&opened.notes).unwrap().cause.contains("different schema numbers"), "{:?}", opened.notes);
    drop(opened);
    for entry in fs::read_dir(scratch.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    fs::write(&file, before).unwrap();
    let newer = rusqlite::Connection::open(&file).unwrap();
    let seal = seal_of_schema_fact("1000");
    newer.execute("UPDATE facts SET value = '1000', seal = ?1 WHERE name = 'schema'", [seal]).unwrap();
    newer.close().unwrap();

    let before = fs::read(&file).unwrap();
    let opened = open(scratch.path());
    let note = Note::NewerSchema { file: file.clone(), found: 1000, known: SCHEMA };
    assert!(opened.notes.contains(&note), "{:?}", opened.notes);
    let found = opened.store.read(|view| view.overrides()).wait().unwrap();
    assert_eq!(found[0].reason, "kept");
    for ending in [false, true] {
        let change = |tx: &mut gpush_store::Tx<'_>| tx.clear_override(&"GPU-0".into());
        let outcome = if ending { opened.store.write_ending(change) } else { opened.store.write(change) };
        let error = outcome.wait().unwrap_err();
        assert_eq!(error, StoreError::ReadOnly { file: file.clone(), found: 1000, known: SCHEMA });
        assert!(error.to_string().contains("newer gpushd"), "{error}");
    }
    drop(opened);
    assert_eq!(fs::read(&file).unwrap(), before, "not a byte was changed");
}

#[test]
fn older_database_is_migrated_with_all_records() {
    let scratch = tempfile::tempdir().unwrap();
    let store = open(scratch.path()).store;
    store.write(|tx| tx.set_override(override_of("GPU-0", "kept"))).wait().unwrap();
    drop(store);
    // Change the database to the form that the oldest gpushd would leave: all younger tables are dropped.
    let older = rusqlite::Connection::open(scratch.path().join("gpush.db")).unwrap();
    let oldest = ["facts", "head", "operations", "intents", "undo", "overrides", "conditions", "answers", "audit"];
    let tables = {
        let mut query = older.prepare("SELECT name FROM sqlite_schema WHERE type = 'table'").unwrap();
        let names = query.query_map([], |row| row.get::<_, String>(0)).unwrap();
        names.collect::<Result<Vec<_>, _>>().unwrap()
    };
    for table in tables.iter().filter(|name| !oldest.contains(&name.as_str())) {
        older.execute_batch(&format!("DROP TABLE {table};")).unwrap();
    }
    older.pragma_update(None, "user_version", 1).unwrap();
    let seal = seal_of_schema_fact("1");
    older.execute("UPDATE facts SET value = '1', seal = ?1 WHERE name = 'schema'", [seal]).unwrap();
    older.close().unwrap();

    let opened = open(scratch.path());
    assert!(opened.notes.contains(&Note::Migrated { from: 1, to: SCHEMA }), "{:?}", opened.notes);
    // The install scripts of the packages read the schema number from the header of the database file, even while
    // gpushd runs.
    assert_eq!(schema_in_header(scratch.path()), SCHEMA);
    assert_eq!(opened.store.read(|view| view.overrides()).wait().unwrap()[0].reason, "kept");
    opened.store.write(|tx| tx.queue_lease(scene::new_lease(1000))).wait().unwrap();
}

/// Returns `user_version` from the header of the database file. Does not read the log.
fn schema_in_header(directory: &Path) -> u32 {
    let header = fs::read(directory.join("gpush.db")).unwrap();
    u32::from_be_bytes(header[60..64].try_into().unwrap())
}

/// Computes the seal of a fact from its definition: FNV-1a over the table's name, and then over each text. A text is
/// digested as the kind number 3, the text's length in 8 bytes, and the bytes of the text.
fn seal_of_schema_fact(value: &str) -> i64 {
    let mut bytes = b"facts".to_vec();
    for text in ["schema", value] {
        bytes.push(3);
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.bytes());
    }
    let step = |state: u64, byte: &u8| (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step).cast_signed()
}

/// A small file system for the test. If this file system cannot be mounted, the test prints a message and is skipped.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let made =
            Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "gpush-test"]).arg(at).output();
        match made {
            Ok(output) if output.status.success() => Some(Self(at.to_owned())),
            Ok(_) | Err(_) => {
                println!("SKIPPED a full disk: no small file system can be mounted here (needs root)");
                None
            }
        }
    }

    /// Fills the file system except for `left` bytes.
    fn fill(&self, left: usize) {
        let mut file = File::create(self.0.join("filler")).unwrap();
        let block = vec![1; 4096];
        while file.write_all(&block).is_ok() {}
        let length = file.metadata().unwrap().len();
        file.set_len(length - (left.next_multiple_of(4096) as u64).min(length)).unwrap();
    }

    fn free(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn small(directory: &Path) -> Result<Opened, OpenError> {
    Store::open(directory, Options { bounds: Bounds { reserve: 1 << 20, ..Bounds::default() }, ..options() })
}

#[test]
fn full_disk_loses_nothing_and_records_endings() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::mount(&scratch.path().join("disk"), "5m") else { return };
    let mut refused = 0;
    // Each run leaves a different number of free pages, so the disk becomes full at a different write.
    const LEFT: usize = 60;
    for left in 0..LEFT {
        let directory = disk.0.join(format!("state-{left}"));
        let store = small(&directory).unwrap().store;
        let id = store.write(|tx| Ok(tx.begin(operation("mig.apply", 7))?.id)).wait().unwrap();
        disk.fill(left * 4096);
        let mut recorded = store.read(everything).wait().unwrap();
        // Ordinary changes succeed until the disk is full. The refused change has no effect.
        let error = loop {
            let change = store.write(|tx| {
                let n = tx.read(|view| view.sequence());
                tx.set_override(override_of(&format!("GPU-{n}"), &"long ".repeat(1000)))?;
                tx.audit(audit("mig.apply", "GPU-0"))
            });
            match change.wait() {
                Ok(_) => recorded = store.read(everything).wait().unwrap(),
                Err(error) => break error,
            }
        };
        assert_eq!(error, StoreError::Full { path: directory.clone() });
        assert!(error.to_string().contains("`df -h"), "{error}");
        refused += 1;
        assert_eq!(store.read(everything).wait().unwrap(), recorded, "{left} pages left");
        // An ending and a beginning in one batch: only the ending is recorded.
        let large = NewOperation { kind: "x".repeat(100_000), ..operation("mig.apply", 8) };
        let begin = store.write(move |tx| tx.begin(large.clone()));
        let end = store.write_ending(move |tx| {
            tx.audit(audit("mig.apply", "done"))?;
            tx.end(id, OperationState::Done, None)
        });
        assert!(matches!(begin.wait(), Err(StoreError::Full { .. })), "{left} pages left");
        assert_eq!(end.wait().unwrap().stage, OperationState::Done, "{left} pages left");
        for _ in 0..20 {
            store.write_ending(|tx| tx.audit(audit("mig.apply", "more endings"))).wait().unwrap();
        }
        let recorded = store.read(everything).wait().unwrap();
        drop(store);
        // After a restart on the full disk, the content is the same.
        let opened = small(&directory).unwrap();
        assert_eq!(opened.store.read(everything).wait().unwrap(), recorded, "{left} pages left");
        assert!(opened.store.read(|view| view.unfinished()).wait().unwrap().is_empty());
        disk.free();
        // With free space, the store works again without a restart.
        opened.store.write(|tx| tx.begin(operation("mig.apply", 9))).wait().unwrap();
        drop(opened);
        fs::remove_dir_all(&directory).unwrap();
    }
    println!("disk full with 0 to {} pages left: {refused} refusals, {LEFT} ends recorded", LEFT - 1);

    // The reserve suffices to record the ends of many operations, because the log is reused.
    let directory = disk.0.join("endings");
    let store = small(&directory).unwrap().store;
    disk.fill(0);
    while store.write(|tx| tx.audit(audit("x", &"y".repeat(1000)))).wait().is_ok() {}
    for n in 0..600u64 {
        let ended = store.write_ending(move |tx| tx.audit(audit("lease.grant", &n.to_string())));
        ended.wait().unwrap_or_else(|error| panic!("ending {n}: {error}"));
    }
    drop(store);
    disk.free();
    fs::remove_dir_all(&directory).unwrap();

    let directory = disk.0.join("reported");
    let store = small(&directory).unwrap().store;
    assert_eq!(store.refusal(), None);
    disk.fill(0);
    loop {
        if store.write(|tx| tx.audit(audit("x", &"y".repeat(1000)))).wait().is_err() {
            break;
        }
    }
    let full = || Some(StoreError::Full { path: directory.clone() });
    assert_eq!(store.refusal(), full());
    drop(store);
    fs::remove_file(directory.join("reserve")).unwrap();
    File::create(disk.0.join("filler.2")).unwrap().write_all(&vec![1; 4 << 20]).unwrap_err();
    let opened = small(&directory).unwrap();
    assert!(opened.notes.contains(&Note::NoReserve { directory: directory.clone() }), "{:?}", opened.notes);
    assert_eq!(opened.store.refusal(), full(), "it is reported without a write");
    disk.free();
    fs::remove_file(disk.0.join("filler.2")).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while opened.store.refusal().is_some() {
        assert!(Instant::now() < end, "there is space, and it says: {:?}", opened.store.refusal());
        std::thread::yield_now();
    }
    drop(opened);
    fs::remove_dir_all(&directory).unwrap();

    disk.fill(0);
    let error = small(&disk.0.join("new")).unwrap_err();
    assert!(matches!(error, OpenError::Unusable { .. } | OpenError::Full { .. }), "{error}");
    assert!(error.to_string().contains("state directory") || error.to_string().contains("df -h"), "{error}");
}
