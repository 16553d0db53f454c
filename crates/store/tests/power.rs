//! Power cuts. `strace` records every write and sync of a process that commits. From these records,
//! the test builds the disk contents that a power cut at any moment could leave: any part of the
//! unsynced data may be missing. The test also checks that there is a sync between two replies, and
//! that the write-ahead log has no unsynced data at a reply.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{collections::BTreeMap, fs, path::Path};

use gpush_store::Store;
use scene::{
    lost,
    writer::{child, commit, have_strace, reached, roomy},
};

#[test]
fn the_process_that_is_killed() {
    scene::writer::role();
}

/// A call in strace's output.
#[derive(Debug)]
enum Event {
    Write { file: String, offset: usize, bytes: Vec<u8> },
    Cut { file: String, length: usize },
    Synced { file: String },
    Reported(u64),
}

fn unhex(text: &str) -> Vec<u8> {
    text.split("\\x").skip(1).map(|pair| u8::from_str_radix(&pair[..2], 16).unwrap()).collect()
}

/// Parses a trace made with `-y -xx`. An interrupted call becomes an event when it returns, because
/// only the return shows that the call has taken effect.
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
        // strace writes the file name in hexadecimal too: `7<\x2f…>`.
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
                    events.push(Event::Reported(number.parse().unwrap()));
                }
            }
            other => panic!("{other}"),
        }
    }
    events
}

/// Contents of files; some changes may not have reached the disk yet.
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

    /// Returns the contents after a power cut that keeps only the pending changes selected by `keep`.
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

/// The files after a power cut.
struct Cut {
    files: BTreeMap<String, Vec<u8>>,
    /// The last change that was reported before the cut.
    reported: u64,
    /// Where the cut was.
    what: String,
}

/// Opens a store on the files of each power cut, in two threads. Returns the number of cuts.
fn open_all(memory: &Path, cuts: &[Cut]) -> usize {
    let half = cuts.len().div_ceil(2).max(1);
    std::thread::scope(|scope| {
        for (thread, cuts) in cuts.chunks(half).enumerate() {
            scope.spawn(move || cuts.iter().for_each(|cut| open_after(&memory.join(thread.to_string()), cut)));
        }
    });
    cuts.len()
}

/// Checks that the store has all reported changes, and at most one more.
fn open_after(target: &Path, Cut { files, reported, what }: &Cut) {
    let _ = fs::remove_dir_all(target);
    fs::create_dir(target).unwrap();
    for (name, bytes) in files {
        fs::write(target.join(name), bytes).unwrap();
    }
    let opened = Store::open(target, roomy()).unwrap();
    assert_eq!(lost(&opened.notes), None, "{what}");
    let there = reached(&opened.store)[&0];
    assert!(there >= *reported && there <= reported + 1, "{what}: {reported} reported, {there} there");
}

#[test]
fn power_cut_keeps_reported_changes() {
    if !have_strace("order of durability and power cuts") {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("state");
    let store = Store::open(&directory, roomy()).unwrap().store;
    commit(&store, 0, 1).unwrap();
    drop(store);
    // The test opens hundreds of stores, so it uses a directory in memory if possible.
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
    // Enough commits to include a checkpoint.
    const COMMITS: u64 = 260;
    let output = child(&strace, &format!("few {COMMITS}"), &directory).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("ending Ok"));
    let events = events(&fs::read_to_string(&trace).unwrap());

    let ours = ["gpush.db", "gpush.db-wal", "watermark"];
    let (mut reported, mut syncs, mut syncs_then) = (1, 0, 0);
    let (mut cuts, mut tried, mut checkpointed) = (Vec::new(), 0, false);
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
            Event::Reported(number) => {
                // There must be a sync of the log between two replies, and no unsynced log data at a reply.
                assert!(syncs > syncs_then, "no sync before reply {number}");
                assert!(disk.pending.iter().all(|change| change.0 != "gpush.db-wal"), "reply {number}");
                (reported, syncs_then) = (*number, syncs);
            }
            Event::Write { .. } | Event::Cut { .. } => {}
        }
        // Cut the power after each event around the checkpoint, and after a sample of the other
        // events.
        let near = |event: &Event| match event {
            Event::Write { file, .. } | Event::Cut { file, .. } | Event::Synced { file } => file == "gpush.db",
            Event::Reported(_) => false,
        };
        let window = &events[position.saturating_sub(3)..(position + 12).min(events.len())];
        if !(position < 60 || position % 61 == 0 || window.iter().any(near)) {
            continue;
        }
        for way in 0..3usize {
            let keep = |number: usize| match way {
                0 => false,
                1 => true,
                // Keep a pseudo-random subset of the changes.
                _ => (number.wrapping_mul(0x9e37_79b9) ^ position.wrapping_mul(0x85eb_ca6b)) >> (way + 5) & 1 == 1,
            };
            let what = format!("event {position} of {}, way {way}", events.len());
            cuts.push(Cut { files: disk.cut(keep), reported, what });
        }
        if cuts.len() >= 64 {
            tried += open_all(memory.path(), &cuts);
            cuts.clear();
        }
    }
    tried += open_all(memory.path(), &cuts);
    assert_eq!(reported, COMMITS + 1);
    assert!(checkpointed, "a checkpoint was among it");
    println!("{reported} replies, each after a separate sync; {tried} power cuts over {} events", events.len());
}
