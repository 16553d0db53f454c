//! Kills and disk failures, in a separate process that commits continuously (`scene/writer.rs`). `strace` makes system
//! calls fail, or kills the process at a call. If `strace` is not available, the tests that need it report that they
//! were skipped.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]
#![allow(clippy::redundant_closure_for_method_calls, reason = "each method accepts only one lifetime of `Tx`")]

mod scene;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    time::Duration,
};

use gpush_store::{AuditQuery, Store};
use scene::{
    lost,
    writer::{THREADS, child, commit, have_strace, reached, read_reported, roomy},
};

#[test]
fn the_process_that_is_killed() {
    scene::writer::role();
}

#[test]
fn kill_at_random_moment_keeps_whole_reported_transactions() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().join("state");
    const ROUNDS: u64 = 40;
    let (mut recorded, mut beyond) = (0, 0);
    let mut before = BTreeMap::new();
    for round in 0..ROUNDS {
        let mut process = child(&[], "forever", &directory).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "ready"), "round {round}");
        // Each round kills the process after a different time.
        let reader = std::thread::spawn(move || read_reported(lines));
        std::thread::sleep(Duration::from_micros(500 + round * 1733 % 60_000));
        process.kill().unwrap();
        process.wait().unwrap();
        let reported = reader.join().unwrap();
        let opened = Store::open(&directory, roomy()).unwrap();
        assert_eq!(lost(&opened.notes), None, "round {round}");
        let now = reached(&opened.store);
        for thread in 0..THREADS {
            let (there, before) = (now[&thread], before.get(&thread).copied().unwrap_or(0));
            let reported = reported.get(&thread).copied().unwrap_or(before);
            // When the process was killed, each thread had at most one transaction that was not reported.
            assert!(
                there >= reported && there <= reported + 1,
                "round {round}: thread {thread} {reported} reported, {there} there"
            );
            recorded += reported - before;
            beyond += there - reported;
        }
        before = now;
    }
    println!("{ROUNDS} kills: {recorded} transactions reported as recorded, all there; {beyond} more, each whole");
    assert!(recorded > ROUNDS);
}

/// Kills the process at its n-th call of each kind, for every n that the process reaches.
#[test]
fn kill_at_each_write_and_sync_keeps_reported_changes() {
    if !have_strace("kills at each write and sync") {
        return;
    }
    let mut points = BTreeMap::new();
    // Test a first start, and a start with an existing database.
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
                let reported = read_reported(text.lines().map(str::to_owned)).get(&0).copied().unwrap_or(before);
                let opened = Store::open(&directory, roomy()).unwrap();
                let what = format!("{call} {number}, first start {first}");
                assert_eq!(lost(&opened.notes), None, "{what}");
                let there = reached(&opened.store)[&0];
                assert!(there >= reported && there <= reported + 1, "{what}: {reported} reported, {there} there");
                if text.contains("ending Ok") {
                    assert_eq!(reported, before + 3, "{what}");
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
fn disk_failure_at_each_call_is_reported_and_loses_nothing() {
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
            // A refused change leaves a gap in the numbers. `reached` does not accept gaps, so the test reads the trail
            // itself.
            let trail = opened.store.read(|view| view.audit(&AuditQuery::default())).wait().unwrap();
            let there = |number: &str| trail.iter().filter(|one| one.object == number).count();
            for number in text.lines().filter_map(|line| line.strip_prefix("recorded 0 ")) {
                assert_eq!(there(number), 1, "{what}");
            }
            let boot = opened.store.read(|view| view.last_boot()).wait().unwrap();
            let ended = text.contains("ending Ok");
            assert!(!ended || boot.is_some_and(|boot| boot.boot_id == "boot-2"), "{what}");
            let errors: Vec<_> = text.lines().filter(|line| line.starts_with("error ")).collect();
            let outcome = if text.contains("refused") {
                "not opened"
            } else if let Some(first) = errors.first() {
                // After a disk failure, the store reports no change as recorded. On a full disk, it
                // reports only the ends of operations as recorded.
                let after_first = text.split_once(first).unwrap().1;
                if error == "ENOSPC" {
                    assert!(first.contains("Full") && ended, "{what}");
                } else {
                    assert!(first.contains("Uncertain") || first.contains("Broken"), "{what}");
                    assert!(!after_first.contains("recorded") && !ended, "{what}");
                }
                "reported"
            } else if ended {
                if text.lines().filter(|line| line.starts_with("recorded")).count() == 3 { "survived" } else { "?" }
            } else {
                // The disk failed during the last transaction, which records an ending.
                assert!(text.contains("ending Err"), "{what}");
                "reported"
            };
            assert_ne!(outcome, "?", "{what}");
            *counts.entry(key(outcome)).or_default() += 1;
            // The process survives if it ignores the failed call, such as a write of the watermark, or if it makes
            // fewer calls than `number`. After three survivals in a row, assume the second reason and end the loop.
            in_a_row = if outcome == "survived" { in_a_row + 1 } else { 0 };
            if in_a_row == 3 {
                break;
            }
        }
    }
    println!("{counts:?}");
    assert!(counts["pwrite64 EIO: reported"] > 5 && counts["fdatasync EIO: reported"] > 2, "{counts:?}");
    assert!(counts["pwrite64 ENOSPC: reported"] > 5, "{counts:?}");
}
