//! Nodes that cannot serve a job. gpushd then answers with an error, so Prolog fails, and Slurm drains the node.

use gpush_api::{Code, GpuState, OperationState, SlurmDevice, SlurmOutcome};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{Job, WHOLE, two_gpus};
use crate::lifecycle::in_process::{
    InProcess,
    call_rules::{CREATE, CallRule},
    lease_requests::{SLOW_READINGS, whole_gpus},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_gpu_fails_only_the_jobs_on_it() {
    let host = two_gpus(WHOLE).await;
    host.post::<Value>("/v1/gpus/0/cordon", &json!({ "reason": "fan" })).await.expect("it is cordoned");
    let cordoned = host.fails(&Job::new(1).on(&[0])).await;
    assert!(cordoned.message.contains("GPU 0 is cordoned") && !cordoned.retryable, "{cordoned:?}");
    assert!(cordoned.causes.iter().any(|cause| cause.contains("fan")), "{cordoned:?}");
    assert_eq!(cordoned.hint.as_deref(), Some("see `gpushctl gpu show 0`"));
    host.starts(&Job::new(2).on(&[1])).await;
    host.epilog(&Job::new(2)).await;
    host.post::<Value>("/v1/gpus/0/uncordon", &json!({})).await.expect("it is open again");
    host.gpus.lose(0);
    let is_lost = async || {
        let gpus: Vec<gpush_api::Gpu> = host.get("/v1/gpus").await;
        gpus.iter().any(|gpu| gpu.state == GpuState::Lost).then_some(())
    };
    host.until("the lost GPU", is_lost).await;
    assert!(host.fails(&Job::new(3).on(&[0])).await.message.contains("GPU 0 is lost"));
    host.starts(&Job::new(4).on(&[1])).await;
    assert_eq!(host.leases().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn degraded_gpu_fails_the_job() {
    let config =
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb@0\", \"2g.20gb@4\"]\nowner = \"slurm\"\n";
    let host = InProcess::start("dgx-h100", 1, config).await;
    host.apply(&["0"], &["3g.40gb@0", "2g.20gb@4"]).await;
    let uuid = host.device_uuids(0).await.remove(0);
    host.starts(&Job::new(1).on_uuid(uuid.as_str())).await;
    host.epilog(&Job::new(1)).await;
    // Every creation fails, also in the rollback. The device of the first job stays.
    host.gpus.rule(CallRule::on(CREATE, 0).fails(ErrorKind::Unknown));
    assert_eq!(host.apply(&["0"], &["3g.40gb@0", "1g.10gb@4"]).await.state, OperationState::Failed);
    let error = host.fails(&Job::new(2).on_uuid(uuid.as_str())).await;
    assert!(error.code == Code::Unavailable && error.message.contains("GPU 0 is degraded"), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_database_fails_jobs_until_recover() {
    let host = whole_gpus(2);
    let gpushd = host.start(WHOLE).await;
    gpushd.starts(&Job::new(1).on(&[1])).await;
    gpushd.epilog(&Job::new(1)).await;
    std::fs::remove_file(host.state_directory().join("gpush.db")).expect("the database exists");
    let error = gpushd.fails(&Job::new(2).on(&[0])).await;
    assert!(error.message.contains("gpush.db was deleted or replaced"), "{error:?}");
    gpushd.kill();
    let gpushd = host.start(WHOLE).await;
    let error = gpushd.fails(&Job::new(3).on(&[0])).await;
    assert!(error.message.contains("GPU 0 is held"), "{error:?}");
    gpushd.post::<Value>("/v1/recover", &json!({ "reason": "a test" })).await.expect("the loss is accepted");
    gpushd.starts(&Job::new(4).on(&[0])).await;
}

/// Fault: if the last reading of the job's GPU was old, gpushd refused the job.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_waits_for_a_late_reading_of_its_gpu() {
    let host = two_gpus(&format!("{SLOW_READINGS}{WHOLE}")).await;
    host.reading_hangs(1).await;
    let (quick, slow) = (Job::new(1).on(&[0]), Job::new(2).on(&[1]));
    let waiting = host.starts(&slow);
    tokio::pin!(waiting);
    tokio::select! {
        early = &mut waiting => panic!("{early:?}"),
        granted = host.starts(&quick) => assert_eq!(granted.lease.members[0].gpu_uuid, host.gpu(0).await.uuid),
    }
    host.gpus.release();
    assert_eq!(waiting.await.lease.members[0].gpu_uuid, host.gpu(1).await.uuid);
}

/// Earlier fault: after the first answer of gpushd, Prolog let the job run without a lease or a message. The list of the
/// GPUs of Slurm does not contain a device that the host does not have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_device_fails_the_job_if_slurm_owns_a_gpu() {
    let host = two_gpus(WHOLE).await;
    for (device, named) in
        [(SlurmDevice::Minor(99), "/dev/nvidia99"), (SlurmDevice::Uuid("MIG-0".to_owned()), "`MIG-0`")]
    {
        let error = host.fails(&Job::new(1).with([device])).await;
        assert_eq!(error.code, Code::ConfigInvalid, "{error:?}");
        assert!(error.message.contains(&format!("{named}, which is not a device of this host")), "{error:?}");
        assert!(error.hint.is_some_and(|hint| hint.contains("gpushctl doctor --only slurm")));
    }
    // slurmd uses other devices than the driver lists. The node can still serve jobs with other devices.
    let detected = SlurmDevice::Detected { index: 0, devices: 3, minors: Vec::new() };
    let refused = host.refuses(&Job::new(2).with([detected])).await;
    assert!(refused.contains("Slurm's index 0") && refused.contains("gives the node 3 GPUs"), "{refused}");
    let detected = SlurmDevice::Detected { index: 1, devices: 2, minors: Vec::new() };
    let granted = host.starts(&Job::new(3).with([detected])).await;
    assert_eq!(granted.lease.members[0].target, host.gpu(1).await.uuid);
    // If no GPU belongs to Slurm, an unknown device does not matter to a job without a request.
    host.reload(&WHOLE.replace("owner = \"slurm\"\n", "")).await;
    let started = host.prolog(&Job::new(4).on(&[99])).await.expect("the node can serve the job");
    assert_eq!(started.outcome, SlurmOutcome::NotConcerned);
}
