//! The name and the account of a job: in its lease, in reports, on the bill, and hidden from other users.

use gpush_api::{Bill, Lease, LeaseBinding, UsageReport};

use super::{BOB, Job, WHOLE, two_gpus};
use crate::lifecycle::in_process::user;

fn names(lease: &Lease) -> (Option<&str>, Option<&str>) {
    let LeaseBinding::Job { name, account, .. } = &lease.binding else { panic!("{lease:?}") };
    (name.as_deref(), account.as_deref())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn account_and_name_of_a_job_are_in_lists_reports_and_bills() {
    let host = two_gpus(&format!("# --constants usage.record=1ms\n{WHOLE}")).await;
    host.gpus().await;
    let (job, other) = (Job::new(42).on(&[0]), Job::new(43).on(&[1]).of(BOB));
    let granted = host.starts(&job).await;
    host.starts(&other).await;
    host.until_recorded(&granted, true).await;
    assert_eq!(names(&granted.lease), (Some("train-42"), Some("physics")));
    let seen: Vec<Lease> = host.get_as(user(BOB), "/v1/leases").await.expect("the leases");
    let of_job = |id: u32| {
        seen.iter().find(|lease| matches!(lease.binding, LeaseBinding::Job { job, .. } if job == id)).expect("a lease")
    };
    assert_eq!(names(of_job(42)), (None, None), "another user's job");
    assert_eq!(names(of_job(43)), (Some("train-43"), Some("physics")));
    host.epilog(&job).await;
    host.until_recorded(&granted, false).await;
    let ended: Vec<Lease> = host.get("/v1/leases?job=42&ended=10").await;
    assert_eq!(ended.iter().map(|lease| lease.id).collect::<Vec<_>>(), [granted.lease.id]);
    assert!(names(&ended[0]) == (Some("train-42"), Some("physics")) && ended[0].usage.is_some(), "{ended:?}");
    assert_eq!(host.get_as::<Vec<Lease>>(user(BOB), "/v1/leases?job=42&ended=10").await.expect("an answer"), []);
    let of_bob: Vec<Lease> = host.get(&format!("/v1/leases?holder={BOB}&ended=10")).await;
    assert_eq!(of_bob.iter().map(|lease| lease.holder.uid).collect::<Vec<_>>(), [BOB]);
    let report: UsageReport = host.get("/v1/usage/report?by=account").await;
    assert_eq!(report.lines.iter().filter_map(|line| line.key.as_deref()).collect::<Vec<_>>(), ["physics"]);
    let bill: Bill = host.get("/v1/bill?by=job").await;
    assert_eq!(bill.lines.iter().filter_map(|line| line.key.as_deref()).collect::<Vec<_>>(), ["ci/42", "ci/43"]);
}
