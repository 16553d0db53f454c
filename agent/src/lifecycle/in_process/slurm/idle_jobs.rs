//! Slurm jobs whose leases are unused, and the comments of jobs.

use gpush_api::{HostUsage, Lease, LeaseState, NoticeKind};

use super::{Job, WHOLE, two_gpus};
use crate::lifecycle::in_process::InProcess;

/// Returns a config with these settings, in which a lease without a process is due after 4 s.
fn config(more: &str) -> String {
    format!("{WHOLE}[idle]\naction = \"end\"\nstart_grace = \"0s\"\nempty_after = \"4s\"\nwarn_before = \"2s\"\n{more}")
}

impl InProcess {
    async fn until_job(&self, what: &str, is: impl Fn(&Lease) -> bool) -> Lease {
        self.until(what, async || {
            self.get::<HostUsage>("/v1/usage?watch=true").await;
            Some(self.get::<Lease>("/v1/leases/L1").await).filter(|lease| is(lease))
        })
        .await
    }
}

fn unused_s(lease: &Lease) -> u64 {
    lease.usage.as_ref().and_then(|usage| usage.unused_s).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_job_is_only_reported() {
    let host = two_gpus(&config("")).await;
    host.gpus.set_sample(0, |_| {});
    host.starts(&Job::new(7).on(&[0])).await;
    let lease = host.until_job("a long time without a process", |lease| unused_s(lease) >= 9).await;
    assert_eq!((lease.state, lease.notice), (LeaseState::Active, None));
    assert_eq!(host.host.services.take_calls(), [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_job_is_cancelled_only_if_the_config_says_so() {
    let host = two_gpus(&config("slurm_jobs = \"scancel\"\n")).await;
    host.gpus.set_sample(0, |_| {});
    host.starts(&Job::new(7).on(&[0])).await;
    let is_noticed = |lease: &Lease| lease.notice.as_ref().is_some_and(|notice| notice.kind == NoticeKind::Unused);
    let warned = host.until_job("the warning", is_noticed).await;
    assert!(warned.notice.is_some_and(|notice| notice.text.contains("so the job is cancelled")));
    let calls = gpush_locked::Locked::new(Vec::new());
    host.until("the cancellation", async || {
        host.get::<HostUsage>("/v1/usage?watch=true").await;
        let mut calls = calls.lock();
        calls.extend(host.host.services.take_calls());
        calls.iter().any(|call: &String| call == "scancel-7").then_some(())
    })
    .await;
    let calls = calls.lock().clone();
    assert_eq!(calls.iter().filter(|call| *call == "scancel-7").count(), 1, "{calls:?}");
    assert_eq!(calls[0], "update JobId=7", "the comment of the job has the warning: {calls:?}");
    assert_eq!(host.get::<Lease>("/v1/leases/L1").await.state, LeaseState::Active, "Epilog ends it");
}

/// gpushd sees only this node. The job may work on the other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_job_on_two_nodes_is_not_cancelled() {
    let host = two_gpus(&config("slurm_jobs = \"scancel\"\n")).await;
    host.gpus.set_sample(0, |_| {});
    host.host.services.set_job_nodes(7, 2);
    host.starts(&Job::new(7).on(&[0])).await;
    let is_withdrawn =
        |lease: &Lease| lease.notice.as_ref().is_some_and(|notice| notice.kind == NoticeKind::UnusedNoMore);
    let lease = host.until_job("the end of the warning", is_withdrawn).await;
    assert!(lease.notice.is_some_and(|notice| notice.text.contains("a part of its job runs on other nodes")));
    let lease = host.until_job("a long time without a process", |lease| unused_s(lease) >= 12).await;
    assert_eq!(lease.state, LeaseState::Active);
    let calls = host.host.services.take_calls();
    assert!(!calls.iter().any(|call| call.starts_with("scancel")), "{calls:?}");
}
