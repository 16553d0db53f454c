//! Which devices a job gets: those that Slurm allocated, or a share that the job requests.

use std::{fs, sync::Arc};

use gpush_api::{GpuInstance, LeaseBinding, LeaseKind, LeaseState, MemberShare, SlurmOutcome};

use super::{ALICE, BOB, Job, MIG, WHOLE, mig_devices, targets, two_gpus};
use crate::{lifecycle::in_process::InProcess, metrics::job_files};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_has_its_gpu_from_prolog_until_epilog() {
    let host = two_gpus(WHOLE).await;
    let job = Job::new(42).on(&[1]);
    let started = host.prolog(&job).await.expect("the node can serve the job");
    let owned: Vec<u32> = started.owned.iter().map(|gpu| gpu.minor).collect();
    assert_eq!(owned, [0, 1], "the hooks store the GPUs of Slurm");
    let granted = host.starts(&job).await;
    let lease = &granted.lease;
    assert_eq!((lease.kind, lease.holder.uid, lease.state), (LeaseKind::Whole, ALICE, LeaseState::Active));
    assert_eq!(lease.asked_by.as_ref().map(|by| by.uid), Some(0));
    let LeaseBinding::Job { cluster, node, restart, .. } = &lease.binding else { panic!("{lease:?}") };
    assert_eq!((cluster.as_str(), node.as_str(), *restart), ("ci", "n1", 0));
    let gpu = host.gpu(1).await.uuid;
    assert_eq!(targets(&granted), [gpu.as_str()]);
    assert!(granted.environment.contains(&("CUDA_VISIBLE_DEVICES".to_owned(), gpu.to_string())), "{granted:?}");
    // A second Prolog of the same run gets the same lease.
    assert_eq!(host.starts(&job).await.lease.id, lease.id);
    // Epilog knows only the job, not its devices.
    let ended = host.epilog(&Job::new(42)).await;
    assert_eq!((ended.ended.as_slice(), ended.left.len()), ([lease.id].as_slice(), 0));
    assert_eq!(host.state_of(&granted).await, LeaseState::Ended);
    for job in [42, 4711] {
        assert_eq!(host.epilog(&Job::new(job)).await, gpush_api::SlurmJobEnded::default(), "job {job} has no lease");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_without_a_request_needs_no_lease_of_a_users_gpu() {
    let host = two_gpus(&WHOLE.replace("owner = \"slurm\"\n", "")).await;
    let started = host.prolog(&Job::new(1).on(&[0])).await.expect("the node can serve the job");
    assert_eq!((started.outcome, started.owned.len()), (SlurmOutcome::NotConcerned, 0));
    assert_eq!(host.leases().await, []);
    let granted = host.starts(&Job::new(2).on(&[0]).requests("whole")).await;
    assert_eq!(targets(&granted), [host.gpu(0).await.uuid]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_gets_the_mig_devices_of_its_uuids() {
    let (host, uuids) = mig_devices().await;
    let job = Job::new(1).on_uuid(uuids[2].as_str()).on_uuid(uuids[0].as_str());
    let granted = host.starts(&job).await;
    let mut expected = [uuids[0].clone(), uuids[2].clone()];
    expected.sort_unstable();
    assert_eq!((granted.lease.kind, targets(&granted)), (LeaseKind::Mig, expected.to_vec()));
    let second = Job::new(2).on_uuid(uuids[0].as_str());
    assert!(host.refuses(&second).await.contains("MIG"));
    // gres.conf lists this GPU as a whole GPU, but the GPU has MIG devices.
    let whole = host.refuses(&Job::new(3).on(&[0])).await;
    assert!(whole.contains("partitioned with MIG"), "{whole}");
    let mixed = host.refuses(&Job::new(3).on(&[0]).on_uuid(uuids[1].as_str()).requests("mig=1g.10gb")).await;
    assert!(mixed.contains("whole GPUs and MIG devices"), "{mixed}");
    // With a request for a profile, a job gets a device on this GPU.
    assert_eq!(targets(&host.starts(&Job::new(4).on(&[0]).requests("mig=1g.10gb")).await), [uuids[1].as_str()]);
    host.epilog(&job).await;
    assert_eq!(targets(&host.starts(&second).await), [uuids[0].as_str()]);
}

/// Fault: if Prolog ran again for the same run with another MIG device of the GPU, the job kept the lease of the first
/// device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_prolog_with_another_mig_device_gets_that_device() {
    let (host, uuids) = mig_devices().await;
    let first = host.starts(&Job::new(1).on_uuid(uuids[0].as_str())).await;
    let second = host.starts(&Job::new(1).on_uuid(uuids[1].as_str())).await;
    assert_eq!((targets(&first), targets(&second)), (vec![uuids[0].clone()], vec![uuids[1].clone()]));
    assert_eq!(host.state_of(&first).await, LeaseState::Ended);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_of_a_time_sliced_gpu_are_shared_by_jobs() {
    let config = "[slurm]\nbusy = \"fail\"\n[[gpu]]\nmatch = [\"all\"]\nmode = \"timeslice\"\nowner = \"slurm\"\ntimeslice = { replicas = 2 }\n";
    let host = two_gpus(config).await;
    for (id, uid) in [(1, ALICE), (2, BOB)] {
        let granted = host.starts(&Job::new(id).of(uid).on(&[0]).requests("timeslice")).await;
        assert_eq!((granted.lease.kind, granted.lease.holder.uid), (LeaseKind::Timeslice, uid));
    }
    let full = host.refuses(&Job::new(3).on(&[0]).requests("timeslice")).await;
    assert!(full.contains("replica"), "{full}");
    // Prolog cannot distinguish a shard from a whole GPU.
    let unclear = host.refuses(&Job::new(4).on(&[1])).await;
    assert!(unclear.contains("time-sliced") && unclear.contains("--comment=gpush:timeslice"), "{unclear}");
}

/// If Slurm allocated no GPU to a job, the job gets no GPU that belongs to Slurm. Users cannot lease a GPU of Slurm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_without_devices_gets_only_a_gpu_of_users() {
    let config = "[slurm]\nbusy = \"fail\"\n[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n\
                  [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let host = two_gpus(config).await;
    let of_users = Job::new(1).requests("whole");
    assert_eq!(targets(&host.starts(&of_users).await), [host.gpu(0).await.uuid]);
    let full = host.refuses(&Job::new(2).requests("whole")).await;
    assert!(full.contains("a whole GPU"), "{full}");
    host.epilog(&of_users).await;
    let by_user = host.lease(BOB, &serde_json::json!({ "share": { "kind": "whole" }, "duration_s": 60 })).await;
    assert_eq!(targets(&by_user.expect("a lease")), [host.gpu(0).await.uuid]);
    assert_eq!(targets(&host.starts(&Job::new(3).on(&[1])).await), [host.gpu(1).await.uuid]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_of_two_gpus_gets_both_or_none() {
    let host = two_gpus(WHOLE).await;
    let one = Job::new(1).on(&[1]);
    let first = host.starts(&one).await;
    let refused = host.refuses(&Job::new(2).on(&[0, 1])).await;
    assert!(refused.contains(&first.lease.id.to_string()), "{refused}");
    host.epilog(&one).await;
    let both = host.starts(&Job::new(3).on(&[1, 0])).await;
    let mut gpus = [host.gpu(0).await.uuid, host.gpu(1).await.uuid];
    gpus.sort_unstable();
    assert_eq!(targets(&both), gpus);
    assert!(both.lease.members.iter().all(|member| matches!(member.share, MemberShare::Whole)), "{both:?}");
}

/// slurmd without NVML names a MIG device by the ids of its instances.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_gets_the_mig_device_of_its_instance_ids() {
    let host = InProcess::start("dgx-h100", 1, MIG).await;
    host.apply(&["0"], &["1g.10gb*3"]).await;
    let gpu = host.gpu(0).await;
    let instances = gpu.mig.as_ref().expect("MIG").instances.clone();
    let device = |gpu_instance, compute_instance| gpush_api::SlurmDevice::Mig {
        minor: gpu.minor,
        gpu_instance,
        compute_instance,
    };
    let granted = host.starts(&Job::new(1).with([device(instances[1].id, 0)])).await;
    assert_eq!(Some(&targets(&granted)[0]), instances[1].compute[0].uuid.as_ref());
    let unknown = host.fails(&Job::new(2).with([device(instances[0].id, 7)])).await;
    assert!(unknown.message.contains("compute instance 7 of GPU instance"), "{unknown:?}");
}

/// Other exporters find the job of each MIG device in files.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_name_the_jobs_on_each_device() {
    let host = InProcess::start("dgx-h100", 1, &format!("[metrics]\njob_files = true\n{MIG}")).await;
    host.apply(&["0"], &["1g.10gb*3"]).await;
    let uuids = host.device_uuids(0).await;
    let scratch = tempfile::tempdir().expect("a directory");
    let directory = scratch.path().join("jobs");
    let context = Arc::clone(&host.engine.as_ref().expect("gpushd runs").context);
    let writing = tokio::spawn(job_files::run(context, directory.clone()));
    let read = |path: &str| fs::read_to_string(directory.join(path)).ok();
    let of_device = format!("jobstats/{}", uuids[1]);
    let instances = host.gpu(0).await.mig.expect("MIG").instances;
    let has_device = |gi: &&GpuInstance| gi.compute.iter().any(|device| device.uuid.as_ref() == Some(&uuids[1]));
    let gi = instances.iter().find(has_device).expect("an instance").id;
    let of_instance = format!("dcgm/0.{gi}");
    let job = Job::new(7).on_uuid(uuids[1].as_str());
    host.starts(&job).await;
    host.until("files of the job", async || read(&of_device).filter(|text| *text == format!("7 {ALICE}\n"))).await;
    assert_eq!(read(&of_instance).as_deref(), Some("7\n"));
    host.epilog(&job).await;
    host.until("no job", async || read(&of_device).is_none().then_some(())).await;
    assert_eq!(read(&of_instance).as_deref(), Some(""), "dcgm-exporter needs a file that stays");
    writing.abort();
}
