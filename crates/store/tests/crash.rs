//! Kills, power cuts and failing disks, on a process of its own that commits as fast as it can.
//!
//! The process is this test program run again with `GPUSH_STORE_ROLE` set; the test that takes the
//! role does nothing otherwise. System calls are watched, failed and killed at by `strace`; where
//! it is missing, those tests say that they were skipped.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "the methods alone are not general over lifetimes")]

mod scene;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use gpush_store::{AuditQuery, Bounds, Options, Stage, Store, StoreError};
use scene::{audit, lost, operation, options, override_of};

const THREADS: u64 = 4;

fn roomy() -> Options {
    let bounds = Bounds { operations: usize::MAX, audit_most: 1_000_000, ..Bounds::default() };
    Options { bounds, ..options() }
}

/// One transaction of many parts, of which each thread makes number 1, 2, 3 and so on.
fn commit(store: &Store, thread: u64, number: u64) -> Result<u64, StoreError> {
    let write = store.write(move |tx| {
        let id = tx.begin(operation(&format!("thread {thread}"), number))?.id;
        tx.note_undo(id, serde_json::json!(number))?;
        tx.set_override(override_of(&format!("GPU-{thread}"), &number.to_string()))?;
        tx.end(id, Stage::Done, None)?;
        tx.undone(id, 0)?;
        tx.audit(audit(&format!("thread {thread}"), &number.to_string()))?;
        Ok(number)
    });
    write.wait()
}

/// How far each thread came, by what the store holds; fails if any transaction is there in part
/// or one in between is missing.
fn reached(store: &Store) -> BTreeMap<u64, u64> {
    let read = store.read(|view| {
        let mut reached = BTreeMap::new();
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
                assert_eq!(record.stage, Stage::Done);
                let intent = view.intent(record.id)?.unwrap();
                assert_eq!(intent.more["mark"], number, "{name}");
                assert_eq!(view.undo(record.id)?.iter().map(|undo| undo.undone).collect::<Vec<_>>(), [true]);
            }
            let set = overrides.iter().find(|one| one.gpu == format!("GPU-{thread}"));
            assert_eq!(set.map_or(0, |one| one.reason.parse().unwrap()), last, "{name}");
            reached.insert(thread, last);
        }
        Ok(reached)
    });
    read.wait().unwrap()
}

fn say(line: &str) {
    // One line, one write: a reader never sees half of it.
    std::io::stdout().lock().write_all(format!("{line}\n").as_bytes()).unwrap();
    std::io::stdout().flush().unwrap();
}

/// The process that is killed. Roles: `forever` commits from all threads; `few N` commits N times
/// from one and leaves without closing; `open` opens and closes.
#[test]
fn the_process_that_is_killed() {
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
        let ended = store.write_ending(|tx| tx.record_boot("boot-2")).wait();
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

fn child(strace: &[&str], role: &str, directory: &Path) -> Command {
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

fn have_strace(what: &str) -> bool {
    // It may be there and not be allowed to trace.
    let works = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    let works = works.is_ok_and(|output| output.status.success());
    if !works {
        println!("SKIPPED {what}: strace is not installed or may not trace here");
    }
    works
}

/// Highest number told as recorded by each thread, in the output of the process.
fn told(lines: impl Iterator<Item = String>) -> BTreeMap<u64, u64> {
    let mut told = BTreeMap::new();
    for line in lines {
        if let Some((thread, number)) = line.strip_prefix("recorded ").and_then(|rest| rest.split_once(' ')) {
            told.insert(thread.parse().unwrap(), number.parse().unwrap());
        }
        assert!(!line.starts_with("lost") && !line.starts_with("refused"), "{line}");
    }
    told
}

#[test]
fn killed_at_any_moment_it_keeps_what_it_told_and_nothing_by_halves() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("state");
    const ROUNDS: u64 = 40;
    let (mut recorded, mut beyond) = (0, 0);
    let mut before = BTreeMap::new();
    for round in 0..ROUNDS {
        let mut process = child(&[], "forever", &directory).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "ready"), "round {round}");
        // Any moment will do; these are spread, and no two rounds have the same.
        let reader = std::thread::spawn(move || told(lines));
        std::thread::sleep(Duration::from_micros(500 + round * 1733 % 60_000));
        process.kill().unwrap();
        process.wait().unwrap();
        let told = reader.join().unwrap();
        let opened = Store::open(&directory, roomy()).unwrap();
        assert_eq!(lost(&opened.notes), None, "round {round}");
        let now = reached(&opened.store);
        for thread in 0..THREADS {
            let (there, before) = (now[&thread], before.get(&thread).copied().unwrap_or(0));
            let told = told.get(&thread).copied().unwrap_or(before);
            // Each thread has one transaction under way at most.
            assert!(there >= told && there <= told + 1, "round {round}: thread {thread} {told} told, {there} there");
            recorded += told - before;
            beyond += there - told;
        }
        before = now;
    }
    println!("{ROUNDS} kills: {recorded} transactions told as recorded, all there; {beyond} more, each whole");
    assert!(recorded > ROUNDS);
}

/// The process is killed at its n-th call of each kind, for every n that it reaches.
#[test]
fn killed_at_each_write_and_sync_it_keeps_what_it_told() {
    if !have_strace("kills at each write and sync") {
        return;
    }
    let mut points = BTreeMap::new();
    // A first start, and one with something there already.
    for first in [true, false] {
        for call in ["pwrite64", "fdatasync", "fsync", "fallocate", "ftruncate", "unlink"] {
            for number in 1..200 {
                let scratch = tempfile::tempdir().unwrap();
                let directory = scratch.path().join("state");
                if !first {
                    let store = Store::open(&directory, roomy()).unwrap().store;
                    commit(&store, 0, 1).unwrap();
                }
                let before = u64::from(!first);
                let (trace, inject) = (format!("trace={call}"), format!("inject={call}:signal=SIGKILL:when={number}"));
                let strace = ["-o", "/dev/null", "-e", &trace, "-e", &inject];
                let output = child(&strace, "few 3", &directory).output().unwrap();
                let text = String::from_utf8(output.stdout).unwrap();
                let told = told(text.lines().map(str::to_owned)).get(&0).copied().unwrap_or(before);
                let opened = Store::open(&directory, roomy()).unwrap();
                let what = format!("{call} {number}, first start {first}");
                assert_eq!(lost(&opened.notes), None, "{what}");
                let there = reached(&opened.store)[&0];
                assert!(there >= told && there <= told + 1, "{what}: {told} told, {there} there");
                if text.contains("ending Ok") {
                    assert_eq!(told, before + 3, "{what}");
                    break;
                }
                *points.entry(call).or_insert(0) += 1;
            }
        }
    }
    println!("killed at {} points: {points:?}", points.values().sum::<i32>());
    assert!(points["pwrite64"] > 20 && points["fdatasync"] > 3, "{points:?}");
}

#[test]
fn a_disk_that_fails_or_is_full_at_each_call_is_told_and_loses_nothing() {
    if !have_strace("failing disks at each write and sync") {
        return;
    }
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for (call, error) in [("pwrite64", "EIO"), ("fdatasync", "EIO"), ("pwrite64", "ENOSPC")] {
        let mut in_a_row = 0;
        for number in 1..200 {
            let scratch = tempfile::tempdir().unwrap();
            let directory = scratch.path().join("state");
            let store = Store::open(&directory, roomy()).unwrap().store;
            commit(&store, 0, 1).unwrap();
            drop(store);
            let (trace, inject) = (format!("trace={call}"), format!("inject={call}:error={error}:when={number}"));
            let strace = ["-o", "/dev/null", "-e", &trace, "-e", &inject];
            let output = child(&strace, "few 3", &directory).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let what = format!("{call} {error} {number}:\n{text}");
            let key = |outcome: &str| format!("{call} {error}: {outcome}");
            let opened = Store::open(&directory, roomy()).unwrap();
            assert_eq!(lost(&opened.notes), None, "{what}");
            // `reached` wants them without a gap; what was refused leaves one, so look directly.
            let trail = opened.store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
            let there = |number: &str| trail.iter().filter(|one| one.object == number).count();
            for number in text.lines().filter_map(|line| line.strip_prefix("recorded 0 ")) {
                assert_eq!(there(number), 1, "{what}");
            }
            let boot = opened.store.read(|view| view.last_boot()).wait().unwrap();
            let ended = text.contains("ending Ok");
            assert!(!ended || boot.as_deref() == Some("boot-2"), "{what}");
            let errors: Vec<_> = text.lines().filter(|line| line.starts_with("error ")).collect();
            let outcome = if text.contains("refused") {
                "not opened"
            } else if let Some(first) = errors.first() {
                // Once the disk failed, nothing is told as recorded; once it was full, endings are.
                let after_first = text.split_once(first).unwrap().1;
                if error == "ENOSPC" {
                    assert!(first.contains("Full") && ended, "{what}");
                } else {
                    assert!(first.contains("Uncertain") || first.contains("Broken"), "{what}");
                    assert!(!after_first.contains("recorded") && !ended, "{what}");
                }
                "told"
            } else if ended {
                if text.lines().filter(|line| line.starts_with("recorded")).count() == 3 { "survived" } else { "?" }
            } else {
                // The last transaction was the one that failed.
                assert!(text.contains("ending Err"), "{what}");
                "told"
            };
            assert_ne!(outcome, "?", "{what}");
            *counts.entry(key(outcome)).or_default() += 1;
            // Some calls may fail unnoticed (the watermark's), but not several in a row: then there
            // are no more such calls.
            in_a_row = if outcome == "survived" { in_a_row + 1 } else { 0 };
            if in_a_row == 3 {
                break;
            }
        }
    }
    println!("{counts:?}");
    assert!(counts["pwrite64 EIO: told"] > 5 && counts["fdatasync EIO: told"] > 2, "{counts:?}");
    assert!(counts["pwrite64 ENOSPC: told"] > 5, "{counts:?}");
}

/// A call that matters, as strace wrote it down.
#[derive(Debug)]
enum Event {
    Write { file: String, offset: usize, bytes: Vec<u8> },
    Cut { file: String, length: usize },
    Synced { file: String },
    Told(u64),
}

fn unhex(text: &str) -> Vec<u8> {
    text.split("\\x").skip(1).map(|pair| u8::from_str_radix(&pair[..2], 16).unwrap()).collect()
}

/// Reads a trace made with `-y -xx`. A call that another thread's line interrupts counts from its
/// end, where it has effect for sure.
fn events(trace: &str) -> Vec<Event> {
    let mut unfinished: BTreeMap<&str, String> = BTreeMap::new();
    let mut events = Vec::new();
    for line in trace.lines() {
        let (pid, rest) = line.split_once(' ').unwrap();
        let mut call = rest.trim_start().to_owned();
        if let Some(begun) = call.strip_suffix(" <unfinished ...>") {
            unfinished.insert(pid, begun.to_owned());
            continue;
        }
        if call.starts_with("<... ") {
            let end = call.split_once(" resumed>").unwrap().1.to_owned();
            call = unfinished.remove(pid).unwrap() + &end;
        }
        let (name, arguments) = call.split_once('(').unwrap_or((&call, ""));
        // The file name is in hex as well: `7<\x2f…>`.
        let file = arguments.split_once('<').and_then(|(_, rest)| rest.split_once('>')).map(|(path, _)| {
            let path = if path.contains("\\x") { String::from_utf8(unhex(path)).unwrap() } else { path.to_owned() };
            path.rsplit('/').next().unwrap_or_default().to_owned()
        });
        let Some(file) = file else { continue };
        let data = || arguments.split('"').nth(1).map(unhex).unwrap();
        let last = || {
            let inside = arguments.rsplit_once(')').unwrap().0;
            inside.rsplit(", ").next().unwrap().trim().parse::<usize>().unwrap()
        };
        assert!(!call.contains("= -1"), "{call}");
        match name {
            "pwrite64" => events.push(Event::Write { file, offset: last(), bytes: data() }),
            "ftruncate" => events.push(Event::Cut { file, length: last() }),
            "fdatasync" | "fsync" => events.push(Event::Synced { file }),
            "write" => {
                let text = String::from_utf8(data()).unwrap();
                if let Some(number) = text.trim().strip_prefix("recorded 0 ") {
                    events.push(Event::Told(number.parse().unwrap()));
                }
            }
            other => panic!("{other}"),
        }
    }
    events
}

/// Content of files, some changes of which may not have reached the disk yet.
#[derive(Default, Clone)]
struct Disk {
    durable: BTreeMap<String, Vec<u8>>,
    pending: Vec<(String, usize, Option<Vec<u8>>)>,
}

impl Disk {
    fn change(file: &mut Vec<u8>, offset: usize, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => {
                file.resize(file.len().max(offset + bytes.len()), 0);
                file[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            None => file.resize(offset, 0),
        }
    }

    fn sync(&mut self, name: &str) {
        let (due, rest) = std::mem::take(&mut self.pending).into_iter().partition(|change| change.0 == name);
        self.pending = rest;
        let due: Vec<(String, usize, Option<Vec<u8>>)> = due;
        for (file, offset, bytes) in due {
            Self::change(self.durable.entry(file).or_default(), offset, bytes.as_deref());
        }
    }

    /// What a power cut leaves when of the pending changes only those happen that `keep` says.
    fn cut(&self, keep: impl Fn(usize) -> bool) -> BTreeMap<String, Vec<u8>> {
        let mut left = self.durable.clone();
        for (number, (file, offset, bytes)) in self.pending.iter().enumerate() {
            if keep(number) {
                Self::change(left.entry(file.clone()).or_default(), *offset, bytes.as_deref());
            }
        }
        left
    }
}

#[test]
fn a_power_cut_at_any_moment_keeps_what_was_told() {
    if !have_strace("order of durability and power cuts") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("state");
    let store = Store::open(&directory, roomy()).unwrap().store;
    commit(&store, 0, 1).unwrap();
    drop(store);
    // Hundreds of stores are opened: in memory where there is such a place.
    let shared = Path::new("/dev/shm");
    let memory = if shared.is_dir() { tempfile::tempdir_in(shared) } else { tempfile::tempdir() };
    let memory = memory.or_else(|_| tempfile::tempdir()).unwrap();
    let mut disk = Disk::default();
    for name in ["gpush.db", "watermark"] {
        disk.durable.insert(name.to_owned(), fs::read(directory.join(name)).unwrap());
    }
    let trace = scratch.path().join("trace");
    let calls = "trace=pwrite64,ftruncate,fdatasync,fsync,write";
    let strace = ["-y", "-xx", "-s", "70000", "-e", calls, "-o", trace.to_str().unwrap()];
    // So many that the log is brought into the database among them.
    const COMMITS: u64 = 260;
    let output = child(&strace, &format!("few {COMMITS}"), &directory).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("ending Ok"));
    let events = events(&fs::read_to_string(&trace).unwrap());

    let ours = ["gpush.db", "gpush.db-wal", "watermark"];
    let (mut told, mut syncs, mut syncs_then) = (1, 0, 0);
    let (mut cuts, mut checkpointed) = (0, false);
    for (position, event) in events.iter().enumerate() {
        match event {
            Event::Write { file, offset, bytes } if ours.contains(&file.as_str()) => {
                disk.pending.push((file.clone(), *offset, Some(bytes.clone())));
                checkpointed |= file == "gpush.db";
            }
            Event::Cut { file, length } if ours.contains(&file.as_str()) => {
                disk.pending.push((file.clone(), *length, None));
            }
            Event::Synced { file } => {
                disk.sync(file);
                syncs += u64::from(file == "gpush.db-wal");
            }
            Event::Told(number) => {
                // The promise itself: a sync of the log between two replies, and nothing of it
                // pending at a reply.
                assert!(syncs > syncs_then, "no sync before reply {number}");
                assert!(disk.pending.iter().all(|change| change.0 != "gpush.db-wal"), "reply {number}");
                (told, syncs_then) = (*number, syncs);
            }
            Event::Write { .. } | Event::Cut { .. } => {}
        }
        // All events around the checkpoint, and a sample of the rest.
        let near = |event: &Event| match event {
            Event::Write { file, .. } | Event::Cut { file, .. } | Event::Synced { file } => file == "gpush.db",
            Event::Told(_) => false,
        };
        let window = &events[position.saturating_sub(3)..(position + 12).min(events.len())];
        if !(position < 60 || position % 61 == 0 || window.iter().any(near)) {
            continue;
        }
        for way in 0..3usize {
            let keep = |number: usize| match way {
                0 => false,
                1 => true,
                // Any part of it, in any order.
                _ => (number.wrapping_mul(0x9e37_79b9) ^ position.wrapping_mul(0x85eb_ca6b)) >> (way + 5) & 1 == 1,
            };
            let target = memory.path().join("cut");
            let _ = fs::remove_dir_all(&target);
            fs::create_dir(&target).unwrap();
            for (name, bytes) in disk.cut(keep) {
                fs::write(target.join(name), bytes).unwrap();
            }
            let opened = Store::open(&target, roomy()).unwrap();
            let what = format!("event {position} of {}, way {way}", events.len());
            assert_eq!(lost(&opened.notes), None, "{what}");
            let there = reached(&opened.store)[&0];
            assert!(there >= told && there <= told + 1, "{what}: {told} told, {there} there");
            cuts += 1;
        }
    }
    assert_eq!(told, COMMITS + 1);
    assert!(checkpointed, "a checkpoint was among it");
    println!("{told} replies, each after a sync of its own; {cuts} power cuts over {} events", events.len());
}
