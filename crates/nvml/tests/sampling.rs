//! Samples with a scripted worker: a late or failed sample affects nothing but itself. `scripted` has the worker.

#![allow(clippy::unwrap_used)] // A failed test panics.
#![allow(clippy::disallowed_methods)] // A test starts its own tasks.

mod scripted;

use std::time::Duration;

use gpush_api::Placement;
use gpush_nvml::{
    ErrorKind, Hardware, Options, SampleError,
    proto::GpuRef,
    sample::{Sample, Wanted},
};
use scripted::stage::{Stage, alive, gone, gpu};

const A: &str = "GPU-a";
const B: &str = "GPU-b";
const WHOLE: Placement = Placement { start: 0, size: 8 };

async fn sample(hardware: &Hardware, uuid: &str) -> Result<Sample, SampleError> {
    hardware.sample(GpuRef::new(&gpu(uuid)), None, Wanted::default()).await
}

/// Returns the pid of the worker that answered, which the scripted worker reports as energy.
async fn sampling_pid(hardware: &Hardware) -> u32 {
    sample(hardware, B).await.unwrap().energy_mj.unwrap().try_into().unwrap()
}

/// Samples may take `allowed` ms; all other calls have time.
fn stage(behaviour: &str, allowed: u64) -> Stage {
    Stage::with(behaviour, |options: &mut Options| {
        options.deadlines.sample = Duration::from_millis(allowed);
        options.deadlines.sample_wait = Duration::from_secs(60);
        options.deadlines.read = Duration::from_secs(60);
        options.deadlines.change = Duration::from_secs(60);
    })
}

#[tokio::test]
async fn second_worker_starts_with_the_first_sample() {
    let stage = stage("* * ok", 60_000);
    stage.hardware.read(&gpu(A)).await.unwrap();
    assert_eq!(stage.hardware.sampling_status().started, 0);
    let pid = sampling_pid(&stage.hardware).await;
    let commands = stage.hardware.status().worker.unwrap();
    assert_ne!(pid, commands);
    assert_eq!(stage.hardware.worker_pids(), [commands, pid]);
    assert_eq!(stage.hardware.status().started, 1);
}

/// An open driver handle keeps an administrator from unloading the driver, so the worker must not stay without need.
#[tokio::test]
async fn worker_for_samples_ends_when_no_samples_are_needed() {
    let stage = stage("* * ok", 60_000);
    let first = sampling_pid(&stage.hardware).await;
    stage.hardware.end_sampling().await.unwrap();
    gone(first).await;
    assert_eq!(stage.hardware.sampling_status().worker, None);
    assert_ne!(sampling_pid(&stage.hardware).await, first, "the next sample starts a worker");
}

#[tokio::test]
async fn hung_sample_is_dropped_and_its_gpu_stays_settled() {
    let stage = stage(&format!("sample {A} hang\n* * ok"), 100);
    let first = sampling_pid(&stage.hardware).await;
    assert_eq!(sample(&stage.hardware, A).await, Err(SampleError::Late));
    stage.hardware.read(&gpu(A)).await.unwrap();
    stage.hardware.create_gpu_instance(&gpu(A), 0, WHOLE).await.unwrap();
    let status = stage.hardware.status();
    assert!(status.unsettled.is_empty() && status.abandoned.is_empty() && status.failure.is_none());
    assert_eq!((status.started, status.crashed), (1, 0));
    gone(first).await;
    assert_ne!(sampling_pid(&stage.hardware).await, first, "another worker samples the other GPU");
    let again = sample(&stage.hardware, A).await;
    assert!(matches!(again, Err(SampleError::Waiting(left)) if left <= Duration::from_secs(5)), "{again:?}");
    let asked = stage.log().iter().filter(|line| *line == &format!("sample {A}")).count();
    assert_eq!(asked, 1, "a GPU that hangs does not end the worker again and again");
}

#[tokio::test]
async fn command_does_not_wait_for_a_hung_sample() {
    let stage = stage(&format!("sample {A} hang\n* * ok"), 600_000);
    let hardware = stage.hardware.clone();
    let hung = tokio::spawn(async move { sample(&hardware, A).await });
    while !stage.log().contains(&format!("sample {A}")) {
        tokio::task::yield_now().await;
    }
    stage.hardware.read(&gpu(A)).await.unwrap();
    stage.hardware.destroy_gpu_instance(&gpu(A), 1).await.unwrap();
    assert!(!hung.is_finished());
}

#[tokio::test]
async fn crashed_sample_is_an_error_of_the_sample_alone() {
    let stage = stage(&format!("sample {A} die\n* * ok"), 60_000);
    stage.hardware.read(&gpu(A)).await.unwrap();
    let error = sample(&stage.hardware, A).await.unwrap_err();
    let SampleError::Driver(error) = error else { panic!("{error:?}") };
    assert_eq!(error.kind, ErrorKind::WorkerDied { may_have_landed: false });
    assert_eq!((stage.hardware.status().crashed, stage.hardware.sampling_status().crashed), (0, 2));
    stage.hardware.read(&gpu(A)).await.unwrap();
    sample(&stage.hardware, B).await.unwrap();
}

#[tokio::test]
async fn mode_change_ends_the_worker_for_samples_first() {
    let stage = stage("set_mig_mode * gate\n* * ok", 60_000);
    let gate = stage.gate();
    let pid = sampling_pid(&stage.hardware).await;
    let hardware = stage.hardware.clone();
    let change = tokio::spawn(async move { hardware.set_mig_mode(&gpu(A), true).await });
    while !stage.log().contains(&format!("set_mig_mode {A}")) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!alive(pid), "it has ended before the change begins");
    assert_eq!(sample(&stage.hardware, B).await, Err(SampleError::Suspended));
    gate.open();
    change.await.unwrap().unwrap();
    assert_ne!(sampling_pid(&stage.hardware).await, pid);
}

#[tokio::test]
async fn pause_and_stop_end_both_workers() {
    let stage = stage("* * ok", 60_000);
    for stop in [false, true] {
        let pids = [sampling_pid(&stage.hardware).await, stage.pid().await];
        if stop { stage.hardware.stop().await } else { stage.hardware.pause().await }.unwrap();
        assert!(pids.iter().all(|pid| !alive(*pid)));
        assert_eq!(sample(&stage.hardware, B).await, Err(SampleError::Suspended));
        if stop { stage.hardware.resume() } else { stage.hardware.unpause() }
    }
    let pid = sampling_pid(&stage.hardware).await;
    stage.hardware.restart().await.unwrap();
    assert!(!alive(pid), "a restart leaves no handle open");
    assert_ne!(sampling_pid(&stage.hardware).await, pid);
}

#[tokio::test]
async fn mode_change_does_not_end_a_pause() {
    let stage = stage("set_mig_mode * gate\n* * ok", 60_000);
    let gate = stage.gate();
    let (changing, pausing) = (stage.hardware.clone(), stage.hardware.clone());
    let change = tokio::spawn(async move { changing.set_mig_mode(&gpu(A), true).await });
    while !stage.log().contains(&format!("set_mig_mode {A}")) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let pause = tokio::spawn(async move { pausing.pause().await });
    // On this runtime with one thread, the pause has begun after this.
    tokio::task::yield_now().await;
    gate.open();
    change.await.unwrap().unwrap();
    pause.await.unwrap().unwrap();
    assert_eq!(sample(&stage.hardware, B).await, Err(SampleError::Suspended));
    assert_eq!(stage.hardware.sampling_status().started, 0);
    stage.hardware.unpause();
    sample(&stage.hardware, B).await.unwrap();
}

#[tokio::test]
async fn suspended_hardware_takes_no_samples_until_resumed() {
    let stage = stage("* * ok", 60_000);
    stage.hardware.suspend();
    assert_eq!(sample(&stage.hardware, B).await, Err(SampleError::Suspended));
    stage.hardware.set_mig_mode(&gpu(A), false).await.unwrap_err();
    assert_eq!(sample(&stage.hardware, B).await, Err(SampleError::Suspended), "the refused change ends no stop");
    stage.hardware.resume();
    sample(&stage.hardware, B).await.unwrap();
}

#[tokio::test]
async fn both_workers_end_with_the_last_handle() {
    let stage = stage("* * ok", 60_000);
    let pids = [sampling_pid(&stage.hardware).await, stage.pid().await];
    let Stage { dir: _dir, hardware } = stage;
    drop(hardware);
    gone(pids[0]).await;
    gone(pids[1]).await;
}
