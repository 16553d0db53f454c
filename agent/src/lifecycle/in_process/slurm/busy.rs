//! Jobs whose share is not free: Prolog waits, until the deadline of the hook.

use gpush_api::{Code, LeaseState};

use super::{ALICE, BOB, Job, WHOLE, two_gpus};

/// A config in which jobs wait, which is the default.
fn waiting() -> String {
    WHOLE.replace("busy = \"fail\"", "busy = \"wait\"")
}

/// Fault: each of 30 jobs failed because a process of an earlier job still used the GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_gets_its_gpu_when_the_earlier_lease_ends() {
    let host = two_gpus(&waiting()).await;
    host.starts(&Job::new(1).on(&[0])).await;
    let second = Job::new(2).of(BOB).on(&[0]);
    let (granted, ()) = tokio::join!(host.starts(&second), async {
        // The job waits, and another GPU is granted meanwhile.
        host.starts(&Job::new(3).on(&[1])).await;
        assert!(host.lease_of_job(2).await.is_none());
        host.epilog(&Job::new(1).on(&[0])).await;
    });
    assert_eq!((granted.lease.holder.uid, granted.lease.state), (BOB, LeaseState::Active));
    let refusals: Vec<gpush_api::AuditRecord> = host.get("/v1/audit?object=job%202").await;
    assert!(refusals.is_empty(), "{refusals:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_fails_at_the_deadline_with_the_reason() {
    let host = two_gpus(&waiting()).await;
    let first = host.starts(&Job::new(1).on(&[0])).await;
    let refused = host.refuses(&Job::new(2).on(&[0]).for_ms(5000)).await;
    assert!(refused.contains(&first.lease.id.to_string()) && refused.contains("gpushd has waited for"), "{refused}");
    assert!(refused.contains("submit the job again later, or for another node"), "{refused}");
    assert!(host.lease_of_job(2).await.is_none());
}

/// The hooks of these jobs have no deadline, so the test would not end if a job waited.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_request_fails_at_once() {
    let host = two_gpus(&waiting()).await;
    host.starts(&Job::new(1).on(&[0])).await;
    let kind = host.refuses(&Job::new(2).of(ALICE).on(&[0]).requests("mps=25")).await;
    assert!(kind.contains("whole"), "{kind}");
    let no_gpu = host.refuses(&Job::new(3).requests("whole")).await;
    assert!(no_gpu.contains("Slurm allocated no GPU"), "{no_gpu}");
    let error = host.fails(&Job::new(0).on(&[0])).await;
    assert_eq!(error.code, Code::BadRequest);
}

/// Fault: a job that waited delayed the stop of gpushd until its deadline, and other jobs got no answer meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_stops_while_a_job_waits() {
    let host = two_gpus(&waiting()).await;
    host.starts(&Job::new(1).on(&[0])).await;
    let second = Job::new(2).of(BOB).on(&[0]);
    let (error, ()) = tokio::join!(host.fails(&second), async {
        host.starts(&Job::new(3).on(&[1])).await;
        host.stopping.cancel();
    });
    assert!(error.retryable, "the hook repeats the request: {error:?}");
}
