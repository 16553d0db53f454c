//! The supervisor with a scripted worker: a real process that uses the worker's protocol. It
//! crashes, hangs and gives wrong answers according to its script.
//!
//! The worker is this test program; see `scripted`. Its script is a directory, whose path is passed
//! in place of the library's path. The file `behaviour` defines the result of each call. Its lines
//! have the form `REQUEST UUID DEED`; `*` matches any request or UUID, and the first matching line
//! applies. The file is read for each call. The worker appends every call to the file `log`.

#![allow(clippy::unwrap_used)] // A failed test panics.
#![allow(clippy::disallowed_methods)] // A test starts its own tasks.

mod scripted;

use std::{fs, path::PathBuf, time::Duration};

use gpush_api::{ComputeMode, GpuUuid, Placement};
use gpush_nvml::{ErrorKind, Event, EventKind, Settled};
use nix::{sys::signal::kill, unistd::Pid};
use scripted::stage::{Stage, alive, gone, gpu};

const A: &str = "GPU-a";
const B: &str = "GPU-b";

const WHOLE: Placement = Placement { start: 0, size: 8 };

#[tokio::test]
async fn one_worker_serves_all_calls() {
    let stage = Stage::new("* * ok");
    assert_eq!(stage.hardware.status().started, 0, "the first call starts it");
    assert_eq!(stage.hardware.driver().await.unwrap().version, "scripted");
    let reading = stage.hardware.read(&gpu(A)).await.unwrap();
    assert_eq!(reading.identity.uuid, A);
    let made = stage.hardware.create_gpu_instance(&gpu(A), 0, WHOLE).await.unwrap();
    assert_eq!(made.placement, WHOLE);
    stage.hardware.destroy_gpu_instance(&gpu(A), 1).await.unwrap();
    assert!(stage.hardware.set_mig_mode(&gpu(B), true).await.unwrap().is(true));
    stage.hardware.set_compute_mode(&gpu(B), ComputeMode::ExclusiveProcess).await.unwrap();
    let (a, b) = (gpu(A), gpu(B));
    let (one, two) = tokio::join!(stage.hardware.read(&a), stage.hardware.read(&b));
    assert!(one.is_ok() && two.is_ok());
    let status = stage.hardware.status();
    assert_eq!((status.started, status.crashed), (1, 0));
    assert!(status.abandoned.is_empty() && status.unsettled.is_empty());
}

#[tokio::test]
async fn calls_to_one_gpu_run_in_order_one_at_a_time() {
    let stage = Stage::new("* * ok");
    let calls = (0..40).map(|gi| {
        let hardware = stage.hardware.clone();
        async move { hardware.destroy_gpu_instance(&gpu(A), gi).await }
    });
    for result in futures_in_order(calls).await {
        result.unwrap();
    }
    let expected: Vec<_> = (0..40).map(|gi| format!("destroy_gpu_instance {A} {gi}")).collect();
    assert_eq!(stage.log(), expected);
}

/// Starts all futures in order, then waits for all.
async fn futures_in_order<T: Send + 'static>(
    calls: impl Iterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let tasks: Vec<_> = calls.map(tokio::spawn).collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

#[tokio::test]
async fn hung_read_fails_alone() {
    let stage = Stage::new("read GPU-a hang\n* * ok");
    let first = stage.pid().await;
    let error = stage.hardware.read(&gpu(A)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Deadline { may_land: false });
    assert_eq!(error.gpu.as_deref(), Some(A));
    // Another worker serves the other GPUs while the first worker is killed.
    stage.hardware.read(&gpu(B)).await.unwrap();
    assert_ne!(stage.pid().await, first);
    stage.hardware.settle(&gpu(A)).await;
    assert!(!alive(first));
    stage.behave("* * ok");
    stage.hardware.read(&gpu(A)).await.unwrap();
    let status = stage.hardware.status();
    assert_eq!((status.started, status.crashed), (2, 0));
    assert!(status.abandoned.is_empty() && status.unsettled.is_empty());
}

#[tokio::test]
async fn hung_mutation_leaves_its_gpu_unsettled() {
    let stage = Stage::with("create_gpu_instance GPU-a hang\n* * ok", |o| o.deadlines.grace = Duration::from_secs(2));
    stage.hardware.list().await.unwrap();
    let first = stage.pid().await;
    let error = stage.hardware.create_gpu_instance(&gpu(A), 0, WHOLE).await.unwrap_err();
    assert!(error.may_land(), "{error}");
    assert_eq!(error.to_api().code, gpush_api::Code::DriverTimeout);
    // The mutation may take effect during its grace time. Meanwhile its GPU gets no calls, and other GPUs are served.
    for result in
        [stage.hardware.read(&gpu(A)).await.map(|_| ()), stage.hardware.destroy_gpu_instance(&gpu(A), 1).await]
    {
        assert_eq!(result.unwrap_err().kind, ErrorKind::Unsettled);
    }
    stage.hardware.read(&gpu(B)).await.unwrap();
    let listed = stage.hardware.list().await.unwrap();
    assert_eq!(listed[0].identity.as_ref().unwrap_err().kind, ErrorKind::Unsettled, "the list skips it");
    assert!(listed[1].identity.is_ok());
    let status = stage.hardware.status();
    assert_eq!(status.unsettled, [A]);
    assert_eq!(status.abandoned.len(), 1);
    assert_eq!(status.abandoned[0].pid, Some(first));
    assert!(!status.abandoned[0].stuck);
    assert!(alive(first), "it is left to land");
    // After the grace time, the worker is killed. Its GPU can be read again only after that.
    assert_eq!(stage.hardware.settle(&gpu(A)).await, Settled::Gone);
    assert!(!alive(first));
    stage.hardware.read(&gpu(A)).await.unwrap();
    assert_eq!(stage.hardware.status().abandoned, []);
}

#[tokio::test]
async fn late_mutation_is_settled_by_its_answer() {
    let stage = Stage::with("destroy_gpu_instance GPU-a gate\n* * ok", |o| o.deadlines.grace = Duration::from_secs(60));
    let gate = stage.gate();
    let first = stage.pid().await;
    assert!(stage.hardware.destroy_gpu_instance(&gpu(A), 3).await.unwrap_err().may_land());
    let waiting = tokio::spawn({
        let hardware = stage.hardware.clone();
        async move { hardware.settle(&gpu(A)).await }
    });
    stage.hardware.read(&gpu(B)).await.unwrap();
    tokio::task::spawn_blocking(move || gate.open()).await.unwrap();
    assert_eq!(waiting.await.unwrap(), Settled::Late(Ok(())));
    stage.hardware.read(&gpu(A)).await.unwrap();
    // The worker has no calls left, and ends without waiting for the grace time.
    gone(first).await;
    assert_eq!(stage.hardware.settle(&gpu(A)).await, Settled::Nothing);
}

#[tokio::test]
async fn other_gpus_finish_on_an_abandoned_worker() {
    let stage = Stage::with("read GPU-a hang\ndestroy_gpu_instance GPU-b gate\n* * ok", |o| {
        o.deadlines.change = Duration::from_secs(60);
    });
    let gate = stage.gate();
    let first = stage.pid().await;
    let destroying = tokio::spawn({
        let hardware = stage.hardware.clone();
        async move { hardware.destroy_gpu_instance(&gpu(B), 1).await }
    });
    assert_eq!(stage.hardware.read(&gpu(A)).await.unwrap_err().kind, ErrorKind::Deadline { may_land: false });
    stage.hardware.read(&gpu("GPU-c")).await.unwrap();
    assert!(alive(first), "it still carries a call");
    tokio::task::spawn_blocking(move || gate.open()).await.unwrap();
    destroying.await.unwrap().unwrap();
    gone(first).await;
}

#[tokio::test]
async fn worker_death_in_mutation_may_have_taken_effect() {
    let stage = Stage::new("create_gpu_instance GPU-a die\n* * ok");
    let error = stage.hardware.create_gpu_instance(&gpu(A), 0, WHOLE).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::WorkerDied { may_have_landed: true });
    assert!(error.to_string().contains("SIGKILL"), "{error}");
    // The worker has ended, so no call is pending and the GPU can be read at once.
    assert_eq!(stage.hardware.settle(&gpu(A)).await, Settled::Nothing);
    stage.hardware.read(&gpu(A)).await.unwrap();
    assert_eq!(stage.log().iter().filter(|line| line.starts_with("create")).count(), 1, "never tried twice");
}

/// The change hangs, is late, or ends the worker. In each case it may have taken effect.
#[tokio::test]
async fn unfinished_compute_mode_change_leaves_its_gpu_unsettled() {
    for (deed, outcome) in [("hang", Settled::Gone), ("gate", Settled::Late(Ok(()))), ("die", Settled::Nothing)] {
        let grace = Duration::from_secs(if deed == "hang" { 2 } else { 60 });
        let stage = Stage::with(&format!("set_compute_mode GPU-a {deed}\n* * ok"), |o| o.deadlines.grace = grace);
        let (gate, hardware) = (stage.gate(), stage.hardware.clone());
        let error = hardware.set_compute_mode(&gpu(A), ComputeMode::Prohibited).await.unwrap_err();
        let has_died = error.kind == ErrorKind::WorkerDied { may_have_landed: true };
        assert!(error.may_land() || has_died, "{deed}: {error}");
        let settling = tokio::spawn(async move { hardware.settle(&gpu(A)).await });
        stage.hardware.set_compute_mode(&gpu(B), ComputeMode::Prohibited).await.unwrap();
        if deed != "die" {
            assert_eq!(stage.hardware.read(&gpu(A)).await.unwrap_err().kind, ErrorKind::Unsettled, "{deed}");
        }
        if deed == "gate" {
            tokio::task::spawn_blocking(move || gate.open()).await.unwrap();
        }
        assert_eq!(settling.await.unwrap(), outcome, "{deed}");
        stage.hardware.read(&gpu(A)).await.unwrap();
        assert_eq!(stage.log().iter().filter(|line| *line == "set_compute_mode GPU-a").count(), 1, "never tried twice");
    }
}

#[tokio::test]
async fn gpu_that_kills_the_worker_affects_no_other() {
    let stage = Stage::new("read GPU-a die\n* * ok");
    let reads = ["GPU-b", "GPU-c", A, "GPU-d", "GPU-e"].map(|uuid| {
        let hardware = stage.hardware.clone();
        async move { hardware.read(&gpu(uuid)).await }
    });
    let results = futures_in_order(reads.into_iter()).await;
    for (position, result) in results.iter().enumerate() {
        match position {
            2 => assert_eq!(result.as_ref().unwrap_err().kind, ErrorKind::WorkerDied { may_have_landed: false }),
            _ => assert!(result.is_ok(), "{position}: {result:?}"),
        }
    }
    // The machine skips this GPU for a while, so that its reading does not end the next worker too.
    let started = stage.hardware.status().started;
    let error = stage.hardware.read(&gpu(A)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::WorkerUnavailable);
    stage.hardware.read(&gpu(B)).await.unwrap();
    assert!(stage.hardware.status().started <= started + 1);
    assert_eq!(stage.hardware.status().crashed, 2);
}

#[tokio::test]
async fn read_survives_worker_death() {
    let stage = Stage::new("read GPU-a gate\n* * ok");
    let first = stage.pid().await;
    kill(Pid::from_raw(i32::try_from(first).unwrap()), nix::sys::signal::SIGKILL).unwrap();
    stage.hardware.read(&gpu(B)).await.unwrap();
    let second = stage.pid().await;
    assert_ne!(first, second);
    // The worker is busy: the call waits at the gate.
    let _gate = stage.gate();
    let reading = tokio::spawn({
        let hardware = stage.hardware.clone();
        async move { hardware.read(&gpu(A)).await }
    });
    while !stage.log().iter().any(|line| line == "read GPU-a") {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    stage.behave("* * ok");
    kill(Pid::from_raw(i32::try_from(second).unwrap()), nix::sys::signal::SIGKILL).unwrap();
    reading.await.unwrap().unwrap();
    assert_eq!(stage.hardware.status().crashed, 2);
}

#[tokio::test]
async fn missing_driver_is_reported_and_retried_on_request() {
    let stage = Stage::with("init * fail 9\n* * ok", |o| o.deadlines.retry = Duration::from_millis(50));
    let error = stage.hardware.driver().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::DriverNotLoaded);
    assert!(error.hint().unwrap().contains("modprobe nvidia"));
    // Calls right after the failure get the same error without another start. If there are no
    // calls, the worker is not started.
    assert_eq!(stage.hardware.read(&gpu(A)).await.unwrap_err().kind, ErrorKind::DriverNotLoaded);
    assert_eq!(stage.hardware.status().started, 1);
    assert_eq!(stage.hardware.status().failure.unwrap().kind, ErrorKind::DriverNotLoaded);
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(stage.hardware.status().started, 1, "no loop");
    stage.behave("* * ok");
    stage.hardware.driver().await.unwrap();
    assert_eq!(stage.hardware.status().started, 2);
    assert_eq!(stage.hardware.status().failure, None);
    assert_eq!(stage.hardware.status().crashed, 0);
}

#[tokio::test]
async fn worker_that_dies_at_start_is_an_error() {
    let stage = Stage::new("init * die");
    for _ in 0..3 {
        let error = stage.hardware.read(&gpu(A)).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::WorkerUnavailable, "{error}");
    }
    assert!(stage.hardware.status().started <= 3);
    // A restart resets the backoff.
    stage.behave("* * ok");
    stage.hardware.restart().await.unwrap();
    stage.hardware.read(&gpu(A)).await.unwrap();
}

#[tokio::test]
async fn hung_start_is_an_error_and_its_worker_ends() {
    let stage = Stage::with("init * hang", |o| o.deadlines.start = Duration::from_millis(200));
    let error = stage.hardware.driver().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::WorkerUnavailable);
    assert!(error.to_string().contains("nvmlInit"), "{error}");
    stage.behave("* * ok");
    stage.hardware.restart().await.unwrap();
    assert_eq!(stage.hardware.status().abandoned, []);
    stage.hardware.driver().await.unwrap();
}

#[tokio::test]
async fn missing_worker_program_is_named() {
    let stage = Stage::with("* * ok", |o| o.program = PathBuf::from("/nowhere/gpushd"));
    let error = stage.hardware.driver().await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::WorkerUnavailable);
    assert!(error.to_string().contains("/nowhere/gpushd"), "{error}");
}

#[tokio::test]
async fn restart_waits_for_the_old_worker() {
    let stage = Stage::new("* * ok");
    let first = stage.pid().await;
    stage.hardware.restart().await.unwrap();
    assert!(!alive(first));
    let second = stage.pid().await;
    assert_ne!(first, second);
    assert_eq!(stage.hardware.status().crashed, 0);
}

#[tokio::test]
async fn restart_finishes_calls_and_delays_later_ones() {
    let stage = Stage::with("destroy_gpu_instance * gate\n* * ok", |o| o.deadlines.change = Duration::from_secs(60));
    let gate = stage.gate();
    let first = stage.pid().await;
    let hardware = stage.hardware.clone();
    let destroying = tokio::spawn(async move { hardware.destroy_gpu_instance(&gpu(A), 1).await });
    while stage.log().is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let hardware = stage.hardware.clone();
    let restarting = tokio::spawn(async move { hardware.restart().await });
    let hardware = stage.hardware.clone();
    let reading = tokio::spawn(async move { hardware.read(&gpu(B)).await });
    tokio::task::spawn_blocking(move || gate.open()).await.unwrap();
    destroying.await.unwrap().unwrap();
    restarting.await.unwrap().unwrap();
    assert!(!alive(first));
    reading.await.unwrap().unwrap();
}

#[tokio::test]
async fn worker_that_does_not_end_is_killed() {
    let stage = Stage::new("eof * hang\n* * ok");
    let first = stage.pid().await;
    stage.hardware.stop().await.unwrap();
    assert!(!alive(first));
}

#[tokio::test]
async fn stopped_hardware_refuses_until_resumed() {
    let stage = Stage::new("* * ok");
    let first = stage.pid().await;
    stage.hardware.stop().await.unwrap();
    assert!(!alive(first));
    assert_eq!(stage.hardware.read(&gpu(A)).await.unwrap_err().kind, ErrorKind::Stopped);
    assert_eq!(stage.hardware.driver().await.unwrap_err().kind, ErrorKind::Stopped);
    stage.hardware.resume();
    stage.hardware.read(&gpu(A)).await.unwrap();
}

#[tokio::test]
async fn worker_ends_with_the_last_handle() {
    let stage = Stage::new("* * ok");
    let pid = stage.pid().await;
    let Stage { dir, hardware } = stage;
    drop(hardware);
    gone(pid).await;
    drop(dir);
}

#[test]
fn worker_ends_with_the_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let (stage, pid) = first.block_on(async {
        let stage = Stage::new("* * ok");
        let pid = stage.pid().await;
        (stage, pid)
    });
    drop(first);
    runtime().block_on(async {
        gone(pid).await;
        assert_eq!(stage.hardware.read(&gpu(A)).await.unwrap_err().kind, ErrorKind::Stopped);
    });
}

#[tokio::test]
async fn call_in_flight_finishes_after_the_last_handle() {
    let stage = Stage::with("destroy_gpu_instance * gate\n* * ok", |o| o.deadlines.change = Duration::from_secs(60));
    let gate = stage.gate();
    let pid = stage.pid().await;
    let Stage { dir, hardware } = stage;
    let log = dir.path().join("log");
    let destroying = tokio::spawn(async move { hardware.destroy_gpu_instance(&gpu(A), 1).await });
    while !log.exists() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    destroying.abort();
    assert!(destroying.await.unwrap_err().is_cancelled());
    tokio::task::spawn_blocking(move || gate.open()).await.unwrap();
    gone(pid).await;
    let log = fs::read_to_string(log).unwrap();
    assert_eq!(log, format!("destroy_gpu_instance {A} 1\nafter the gate\n"));
}

#[tokio::test]
async fn worker_with_invalid_frames_is_replaced() {
    let stage = Stage::new("destroy_gpu_instance * nonsense\n* * ok");
    let error = stage.hardware.destroy_gpu_instance(&gpu(A), 1).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::WorkerDied { may_have_landed: true });
    stage.hardware.read(&gpu(A)).await.unwrap();
}

#[tokio::test]
async fn events_reach_their_listeners() {
    let stage = Stage::new("read * event\n* * ok");
    let mut events = stage.hardware.events();
    stage.hardware.read(&gpu(A)).await.unwrap();
    let event = events.recv().await.unwrap();
    assert_eq!(event, Event { uuid: gpu(A), kind: EventKind::Xid(79), gi: Some(1), ci: None });
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_gpus_are_read_at_once() {
    let stage = Stage::with("* * ok", |o| o.deadlines.read = Duration::from_secs(30));
    let reads = (0..64).map(|gpu| {
        let hardware = stage.hardware.clone();
        async move { hardware.read(&GpuUuid::from(format!("GPU-{gpu}"))).await }
    });
    let results = futures_in_order(reads).await;
    assert_eq!(results.into_iter().filter(Result::is_ok).count(), 64);
    assert_eq!(stage.hardware.status().started, 1);
}
