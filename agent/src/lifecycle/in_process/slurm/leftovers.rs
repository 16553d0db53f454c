//! Processes that still run after the end of their job. Tests of processes in a job's cgroup are in `tests/`.

use gpush_api::{GpuIndex, LeaseState, ProcessKind};

use super::{ALICE, Job, WHOLE, two_gpus};
use crate::lifecycle::in_process::programs::{UserProgram, skips_other_users};

/// Without proctrack/cgroup, gpushd cannot know whether a process belongs to the job. Fault: any process of the user,
/// such as a process of an SSH session, drained the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_outside_the_job_reserves_its_gpu_and_is_not_ended() {
    if skips_other_users("processes outside a job") {
        return;
    }
    let host = two_gpus(WHOLE).await;
    let (job, next) = (Job::new(22).on(&[0]), Job::new(23).on(&[0]));
    let granted = host.starts(&job).await;
    let mut process = UserProgram::sleep(ALICE);
    host.gpus.use_as(0, process.pid(), ProcessKind::Compute);
    let ended = host.epilog(&job).await;
    let [left] = &ended.left[..] else { panic!("{ended:?}") };
    assert_eq!(
        (left.lease, left.gpus.as_slice(), left.unattributed),
        (granted.lease.id, [GpuIndex(0)].as_slice(), true)
    );
    let named = format!("process {} ", process.pid());
    assert!(left.waits_for.iter().any(|why| why.contains(&named) && why.contains("cannot attribute")), "{left:?}");
    assert!(process.lives());
    assert_eq!(host.state_of(&granted).await, LeaseState::Releasing);
    // gpushd refuses jobs on this GPU, and names the process outside the job. Jobs on other GPUs run.
    let refused = host.refuses(&next).await;
    assert!(refused.contains(&granted.lease.id.to_string()) && refused.contains("outside the job"), "{refused}");
    host.starts(&Job::new(25).on(&[1])).await;
    host.gpus.end_process(0, process.pid());
    drop(process);
    host.wait_until_ended(&granted).await;
    host.starts(&next).await;
}

/// A program outside the job has a copy of the job's environment, but uses no GPU. The program must not prevent the lease
/// from ending.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_that_only_names_the_lease_does_not_delay_its_end() {
    if skips_other_users("programs of jobs") {
        return;
    }
    let host = two_gpus(WHOLE).await;
    let granted = host.starts(&Job::new(23).on(&[0])).await;
    let mut program = UserProgram::with_environment(ALICE, &granted.environment);
    assert_eq!(host.epilog(&Job::new(23)).await.ended, [granted.lease.id]);
    assert!(program.lives());
}

/// The hook of another job may report an end late. The job may then run again without a lease, so gpushd does not wait
/// and ends no process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn epilog_after_its_deadline_does_not_wait_for_processes() {
    if skips_other_users("a late end of a job") {
        return;
    }
    let host = two_gpus(WHOLE).await;
    let job = Job::new(41).on(&[0]);
    let granted = host.starts(&job).await;
    let mut process = UserProgram::with_environment(ALICE, &granted.environment);
    host.gpus.use_as(0, process.pid(), ProcessKind::Compute);
    let late = host.epilog(&job.clone().for_ms(0)).await;
    assert_eq!(late.left.iter().map(|left| left.lease).collect::<Vec<_>>(), [granted.lease.id]);
    assert!(process.lives());
    host.gpus.end_process(0, process.pid());
    drop(process);
    host.wait_until_ended(&granted).await;
}
