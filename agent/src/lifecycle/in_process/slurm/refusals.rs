//! Jobs that gpushd refuses although the node can serve jobs, and requests of users about jobs.

use gpush_api::{ApiError, AuditRecord, Code, LeaseKind, LeaseState, MemberShare, MpsDaemon, MpsState, SlurmOutcome};
use gpush_core::slurm::decide;
use serde_json::{Value, json};

use super::{ALICE, BOB, Job, WHOLE, two_gpus};
use crate::lifecycle::in_process::{
    InProcess,
    daemons::{DaemonStart, Silence},
    leases::DYNAMIC,
    programs::{own_uid, skips_other_users},
    user,
};

/// A config in which only jobs use GPU 0, through MPS. No test waits for a probe.
const MPS: &str = "[slurm]\nbusy = \"fail\"\n[mps]\nhealth = \"3600s\"\n# --constants mps.stop=2s,mps.pause=1s,mps.longest_pause=1s\n\
                   [[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nowner = \"slurm\"\n";

/// Time limit of a hook that waits until its deadline, in milliseconds. An attempt takes longer on a busy machine.
const DEADLINE: i64 = 6000;

/// Starts gpushd on a host with one GPU that jobs share through MPS, with a daemon that is ready.
async fn with_daemon() -> InProcess {
    let host = InProcess::start("dgx-h100", 1, MPS).await;
    host.apply_rules(&["0"]).await;
    host
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_names_its_cause_and_is_in_the_audit_trail() {
    let host = two_gpus(WHOLE).await;
    let first = host.starts(&Job::new(1).on(&[0])).await;
    let busy = host.refuses(&Job::new(2).on(&[0]).requests("whole")).await;
    let named = first.lease.id.to_string();
    assert!(busy.contains("a whole GPU") && busy.contains(&named), "{busy}");
    assert!(busy.contains("submit the job again later, or for another node"), "{busy}");
    let kind = host.refuses(&Job::new(3).on(&[1]).requests("mps=25")).await;
    assert!(kind.contains("submit the job with `--comment=gpush:whole`"), "{kind}");
    let no_gpu = host.refuses(&Job::new(4).requests("whole")).await;
    assert!(no_gpu.contains("Slurm allocated no GPU") && no_gpu.contains("--gres=gpu:1"), "{no_gpu}");
    let trail: Vec<AuditRecord> = host.get("/v1/audit?object=job%202").await;
    let [record] = &trail[..] else { panic!("{trail:?}") };
    assert_eq!((record.action.as_str(), record.result.as_str()), ("slurm.start", "refused"));
    let detail = ["cluster", "uid", "request_spec"].map(|key| record.detail[key].clone());
    assert_eq!(detail, [json!("ci"), json!(ALICE), json!("whole")]);
    // The other GPU is still free.
    host.starts(&Job::new(5).on(&[1])).await;
}

/// Slurm limits the duration of jobs, so the quota for durations does not apply to them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_beyond_the_quota_of_its_user_is_refused() {
    let quota = "[[quota]]\neverybody = true\nleases = 1\nlongest = \"1h\"\n";
    let host = two_gpus(&format!("{quota}{WHOLE}")).await;
    host.starts(&Job::new(1).on(&[0])).await;
    let over = host.refuses(&Job::new(2).on(&[1])).await;
    assert!(over.contains("holds 1 lease of at most 1") && !over.contains("lease end"), "{over}");
    host.starts(&Job::new(3).of(BOB).on(&[1])).await;
    // The user never gets a lease of this kind, and the host offers no other, so the hint does not suggest to try again.
    let host = two_gpus(&format!("[[quota]]\neverybody = true\nkinds = [\"mps\"]\n{WHOLE}")).await;
    let denied = host.refuses(&Job::new(1).on(&[0])).await;
    assert!(denied.contains("kind whole") && denied.contains("ask an administrator to change the quota"), "{denied}");
}

/// Fault: for a job without devices, Prolog created MIG devices. This could take longer than the time limit of the hook.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_on_a_dynamic_layout_is_refused_and_creates_no_device() {
    for (owner, job) in [
        ("owner = \"slurm\"\n", Job::new(1).on(&[0])),
        ("", Job::new(1).on(&[0]).requests("mig=1g.10gb")),
        ("", Job::new(1).requests("mig=1g.10gb")),
    ] {
        let host = InProcess::start("dgx-h100", 1, &format!("{DYNAMIC}{owner}")).await;
        let refused = host.refuses(&job).await;
        assert!(refused.contains("dynamic layout"), "{owner:?}: {refused}");
        assert!(host.gpus.instances(0).is_empty(), "{owner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn share_of_an_mps_gpu_needs_a_request_and_a_daemon() {
    let host = with_daemon().await;
    let job = |id: u32| Job::new(id).of(own_uid()).on(&[0]);
    // Prolog cannot distinguish a shard from a whole GPU.
    let unclear = host.refuses(&job(1)).await;
    assert!(unclear.contains("requests no share") && unclear.contains("gpush:mps=25"), "{unclear}");
    let granted = host.starts(&job(2).requests("mps=20,memory=2G")).await;
    let MemberShare::Mps { percentage, .. } = &granted.lease.members[0].share else { panic!("{granted:?}") };
    assert_eq!((granted.lease.kind, percentage.to_string().as_str()), (LeaseKind::Mps, "20"));
    // A daemon serves one user at a time.
    let other = host.refuses(&job(3).of(BOB).requests("mps=10")).await;
    assert!(other.contains(&granted.lease.id.to_string()), "{other}");
    host.epilog(&job(2)).await;
    // An administrator has stopped the daemon, so waiting would not help.
    host.post::<Value>("/v1/mps/0/stop", &json!({})).await.expect("the daemon is stopped");
    let is_stopped = async || (host.get::<MpsDaemon>("/v1/mps/0").await.state == MpsState::Stopped).then_some(());
    host.until("the daemon has stopped", is_stopped).await;
    let stopped = host.refuses(&job(4).requests("mps=10")).await;
    assert!(stopped.contains("its MPS daemon is stopped") && stopped.contains("gpushctl mps start 0"), "{stopped}");
}

/// Before an MPS daemon changes to the next user, gpushd asks the daemon for its clients. A user can make the daemon
/// slow. Fault: at the deadline of the hook, gpushd interrupted the grant, and the capacity stayed reserved until gpushd
/// restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_mps_daemon_refuses_the_job_of_the_next_user() {
    if skips_other_users("MPS daemons of two users") {
        return;
    }
    let host = with_daemon().await;
    let job = |id: u32, uid: u32| Job::new(id).of(uid).on(&[0]).requests("mps=100");
    host.starts(&job(1, ALICE)).await;
    host.epilog(&job(1, ALICE)).await;
    host.host.daemons.silence(Silence::Hello);
    let refused = host.refuses(&job(2, BOB).for_ms(DEADLINE)).await;
    assert!(!refused.is_empty());
    host.host.daemons.clear_faults();
    host.epilog(&job(2, BOB)).await;
    // The refused job keeps no part of the target.
    let of_next = host.until("a lease of the whole target", async || {
        let started = host.prolog(&job(3, BOB).for_ms(DEADLINE)).await.ok()?;
        matches!(started.outcome, SlurmOutcome::Granted { .. }).then_some(())
    });
    of_next.await;
    assert_eq!(host.lease_of_job(3).await.map(|lease| lease.state), Some(LeaseState::Active));
}

/// A user can make the daemon of a target end, for example with clients that crash its server. So this must not drain the
/// node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mps_daemon_that_does_not_serve_refuses_the_job() {
    let host = with_daemon().await;
    let daemon = async || host.get::<MpsDaemon>("/v1/mps/0").await;
    host.host.daemons.start_next(DaemonStart::Slow);
    let pid = nix::unistd::Pid::from_raw(daemon().await.pid.expect("a daemon").cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it runs");
    host.until("the next daemon", async || (daemon().await.state == MpsState::Starting).then_some(())).await;
    let refused = host.refuses(&Job::new(1).of(own_uid()).on(&[0]).requests("mps=25").for_ms(DEADLINE)).await;
    assert!(refused.contains("MPS daemon"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_of_a_job_cannot_change_or_use_its_lease() {
    let host = two_gpus(WHOLE).await;
    let granted = host.starts(&Job::new(1).on(&[0])).await;
    let path = |verb: &str| format!("/v1/leases/{}/{verb}", granted.lease.id);
    let denied = async |verb: &str, body: Value| -> ApiError {
        host.post_as::<Value>(user(ALICE), &path(verb), &body).await.expect_err("it is denied")
    };
    let released = denied("release", json!({})).await;
    let hint = released.hint.clone().unwrap_or_default();
    assert!(format!("{released:?}").contains("Slurm job 1") && hint.contains("scancel 1"), "{released:?}");
    let renewed = denied("renew", json!({ "duration_s": 3600 })).await;
    let revoked = denied("revoke", json!({ "reason": "mine" })).await;
    let environment = host.get_as::<Value>(user(ALICE), &path("environment")).await.expect_err("it is denied");
    for error in [released, renewed, revoked, environment] {
        assert_eq!(error.code, Code::Denied, "{error:?}");
    }
    assert_eq!(host.state_of(&granted).await, LeaseState::Active);
}

/// Only an administrator can begin or end the lease of a job, and only through the admin socket. Users cannot lease the
/// GPUs of Slurm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_hooks_lease_gpus_of_slurm() {
    let host = two_gpus(WHOLE).await;
    let job = Job::new(1).on(&[0]);
    let (start, end) = (json!(job.0), json!(job.end()));
    let through_the_users_socket =
        [host.post::<Value>("/v1/slurm/jobs", &start).await, host.post::<Value>("/v1/slurm/jobs/end", &end).await];
    let by_a_user = [
        host.hook::<Value>(user(ALICE), "/v1/slurm/jobs", &start).await,
        host.hook::<Value>(user(ALICE), "/v1/slurm/jobs/end", &end).await,
    ];
    for answer in through_the_users_socket.into_iter().chain(by_a_user) {
        assert_eq!(answer.expect_err("it is denied").code, Code::Denied);
    }
    for uid in [0, ALICE] {
        let body = json!({ "share": { "kind": "whole" }, "selectors": ["0"], "duration_s": 60 });
        assert_eq!(host.lease(uid, &body).await.unwrap_err().code, Code::Denied, "uid {uid}");
    }
    assert_eq!(host.leases().await, []);
}

/// A cluster or node name goes into messages and file names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_with_an_invalid_name_is_a_bad_request() {
    let host = two_gpus(WHOLE).await;
    for (cluster, node, id) in [("", "n1", 1), ("ci", "n\n1", 1), ("ci", "n1", 0)] {
        let mut job = Job::new(id).on(&[0]);
        (job.0.cluster, job.0.node) = (cluster.to_owned(), node.to_owned());
        let error = host.fails(&job).await;
        assert!(error.code == Code::BadRequest && decide::is_refusal(error.code), "{error:?}");
    }
}
