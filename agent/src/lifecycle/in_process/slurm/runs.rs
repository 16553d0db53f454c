//! Runs of a job, components of a heterogeneous job, jobs with the same id, and restarts of gpushd.

use gpush_api::{EndReason, Lease, LeaseState};

use super::{ALICE, BOB, Job, WHOLE, targets, two_gpus};
use crate::lifecycle::in_process::lease_requests::whole_gpus;

/// A late Epilog of an earlier run must not end the lease of the next run. In Slurm 22.05, another hook may report the
/// end of the earlier run late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_epilog_of_an_earlier_run_keeps_the_next_lease() {
    let host = two_gpus(WHOLE).await;
    let (first, second) = (Job::new(7).on(&[0]), Job::new(7).on(&[0]).run(1));
    let old = host.starts(&first).await;
    let new = host.starts(&second).await;
    assert_ne!(old.lease.id, new.lease.id);
    assert_eq!(host.state_of(&old).await, LeaseState::Ended, "the next run ends the lease of the earlier run");
    let late = host.epilog(&first).await;
    assert_eq!((late.ended.len(), late.later.as_slice()), (0, [new.lease.id].as_slice()));
    assert_eq!(host.state_of(&new).await, LeaseState::Active);
    // If Epilog knows only the job id, it ends all runs.
    assert_eq!(host.epilog(&Job::new(7).run(u32::MAX)).await.ended, [new.lease.id]);
}

/// Slurm may give a job id again, for example after the counter of the ids has been reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_job_id_of_another_user_gets_another_lease() {
    let host = two_gpus(WHOLE).await;
    let job = Job::new(7).on(&[0]);
    let old = host.starts(&job).await;
    let new = host.starts(&job.clone().of(BOB)).await;
    assert_ne!(old.lease.id, new.lease.id);
    assert_eq!((old.lease.holder.uid, new.lease.holder.uid), (ALICE, BOB));
    assert_eq!(host.state_of(&old).await, LeaseState::Ended);
    assert_eq!(host.epilog(&job).await.ended, [new.lease.id]);
}

/// Fault: the hooks of the leader of a heterogeneous job ended the leases of its other components.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn components_of_a_heterogeneous_job_have_separate_leases() {
    let host = two_gpus(WHOLE).await;
    let component = |id, gpu| {
        let mut job = Job::new(id).on(&[gpu]);
        job.0.leader = Some(41);
        job
    };
    let (other, leader) = (component(42, 1), component(41, 0));
    let first = host.starts(&other).await;
    let second = host.starts(&leader).await;
    assert_ne!(targets(&first), targets(&second));
    assert_eq!(host.epilog(&leader).await.ended, [second.lease.id]);
    assert_eq!(host.state_of(&first).await, LeaseState::Active);
    assert_eq!(host.epilog(&other).await.ended, [first.lease.id]);
}

/// Two clusters, or two nodes, of one host can have jobs with the same id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_of_two_clusters_and_nodes_have_separate_leases() {
    let host = whole_gpus(3).start(WHOLE).await;
    let job = |cluster: &str, node: &str, gpu| {
        let mut job = Job::new(5).on(&[gpu]);
        (job.0.cluster, job.0.node) = (cluster.to_owned(), node.to_owned());
        job
    };
    let jobs = [job("ci", "n1", 0), job("other", "n1", 1), job("ci", "n2", 2)];
    let mut leases = Vec::new();
    for job in &jobs {
        leases.push(host.starts(job).await);
    }
    for (job, lease) in jobs.iter().zip(&leases) {
        assert_eq!(host.epilog(job).await.ended, [lease.lease.id]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_prologs_of_one_run_at_once_get_one_lease() {
    let host = two_gpus(WHOLE).await;
    let job = Job::new(1).on(&[0]);
    let (one, other, third) = tokio::join!(host.starts(&job), host.starts(&job), host.starts(&job));
    assert_eq!((one.lease.id, one.lease.id), (other.lease.id, third.lease.id));
    assert_eq!(host.leases().await.len(), 1);
}

/// A job has no process between Prolog and its first task. Its lease must stay active, also after a restart of gpushd.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_of_a_job_outlives_gpushd_and_ends_with_a_reboot() {
    let host = whole_gpus(2);
    let gpushd = host.start(WHOLE).await;
    let job = Job::new(9).on(&[0, 1]);
    let granted = gpushd.starts(&job).await;
    let before = gpushd.recorded_leases().await;
    gpushd.kill();
    let gpushd = host.start(WHOLE).await;
    assert_eq!(gpushd.recorded_leases().await, before);
    assert_eq!(gpushd.starts(&job).await.lease.id, granted.lease.id, "a repeated Prolog gets the same lease");
    gpushd.kill();
    host.reboot();
    host.gpus.without_mig();
    let gpushd = host.start(WHOLE).await;
    let ended: Lease = gpushd.get(&format!("/v1/leases/{}", granted.lease.id)).await;
    assert_eq!((ended.state, ended.reason), (LeaseState::Ended, Some(EndReason::Rebooted)));
    // After a reboot, Slurm may run the Epilog of a requeued job before the next Prolog, or only the next Prolog.
    assert_eq!(gpushd.epilog(&job.clone().run(1)).await, gpush_api::SlurmJobEnded::default());
    assert_ne!(gpushd.starts(&job).await.lease.id, granted.lease.id);
}
