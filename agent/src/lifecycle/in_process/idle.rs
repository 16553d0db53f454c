//! Unused leases: warnings, ends, keeps, exemptions, restarts, and what must never end a lease.

use gpush_api::{
    EndReason, HostUsage, IdleAction, IdleReport, Lease, LeaseGrant, LeaseId, LeaseState, NoticeKind, UseState,
};
use gpush_nvml::{ErrorKind, sample::ProcessSample};
use gpush_store::{AuditQuery, UsageRecord};
use gpush_usage::ledger::UnusedSpan;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    InProcess,
    lease_requests::{WHOLE, whole, whole_gpus},
    notices::in_file,
    programs::{UserProgram, own_uid},
    user,
};

/// Returns the holder of the leases. It is not the user of the test, because gpushd would show the notices on the terminals
/// that tests of notices use. Only root can start programs of other users.
pub(super) fn holder() -> u32 {
    if own_uid() == 0 { 1007 } else { own_uid() }
}

/// Returns a config with this action, in which a lease without a process or work is due after 4 or 5 s.
fn config(action: &str, more: &str) -> String {
    format!(
        "{WHOLE}[idle]\naction = \"{action}\"\nstart_grace = \"0s\"\nafter = \"5s\"\nempty_after = \"4s\"\n\
         warn_before = \"2s\"\n{more}"
    )
}

impl InProcess {
    /// Starts gpushd on a host with one GPU without a process, and requests it for the holder.
    async fn with_unused_lease(config: &str) -> (Self, LeaseGrant) {
        let host = whole_gpus(1).start(config).await;
        host.gpus.set_sample(0, |_| {});
        let granted = host.lease(holder(), &whole("0", 1)).await.expect("a lease");
        (host, granted)
    }

    /// Waits until a lease is as a test wants it. Meanwhile, gpushd takes a sample each second.
    pub(super) async fn until_lease(&self, granted: &LeaseGrant, what: &str, is: impl Fn(&Lease) -> bool) -> Lease {
        let path = format!("/v1/leases/{}", granted.lease.id);
        self.until(what, async || {
            self.get::<HostUsage>("/v1/usage?watch=true").await;
            Some(self.get::<Lease>(&path).await).filter(|lease| is(lease))
        })
        .await
    }

    /// Waits until the last notice about a lease has this kind.
    pub(super) async fn until_notice(&self, granted: &LeaseGrant, kind: NoticeKind) -> Lease {
        let is = |lease: &Lease| lease.notice.as_ref().is_some_and(|notice| notice.kind == kind);
        self.until_lease(granted, kind.name(), is).await
    }

    /// Waits until a lease has been in this state for some seconds, long after the time at which an unused lease ends.
    async fn until_long_in(&self, granted: &LeaseGrant, state: UseState) -> Lease {
        let is = |lease: &Lease| {
            lease.usage.as_ref().is_some_and(|usage| match state {
                UseState::Unknown => usage.unknown_s >= 7,
                UseState::Idle | UseState::Empty => usage.unused_s.is_some_and(|seconds| seconds >= 9),
                UseState::Busy => usage.busy_s >= 7,
            })
        };
        self.until_lease(granted, "a long time in one state", is).await
    }

    async fn keep(&self, uid: u32, granted: &LeaseGrant, body: &Value) -> Result<Lease, gpush_api::ApiError> {
        self.post_as(user(uid), &format!("/v1/leases/{}/keep", granted.lease.id), body).await
    }
}

/// Returns the kinds of the notices in the file of a lease.
pub(super) fn kinds(granted: &LeaseGrant) -> Vec<String> {
    in_file(granted).iter().map(|line| line["notice_kind"].as_str().expect("a kind").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_lease_is_warned_of_and_then_released() {
    let (host, granted) = InProcess::with_unused_lease(&config("release", "")).await;
    let warned = host.until_notice(&granted, NoticeKind::Unused).await;
    let notice = warned.notice.expect("a notice");
    assert!(notice.text.starts_with("lease L1 has had no process for ") && notice.ends_at.is_some(), "{notice:?}");
    assert!(notice.text.contains("to keep it: gpushctl lease keep L1"), "{notice:?}");
    let shown = warned.idle.expect("what happens to it");
    assert_eq!(shown.action, IdleAction::Release);
    let ended = host.until_lease(&granted, "the end", |lease| lease.state == LeaseState::Ended).await;
    assert_eq!(ended.reason, Some(EndReason::Revoked));
    let revocation = ended.revocation.expect("a revocation");
    assert_eq!(revocation.by.user.as_deref(), Some("gpushd"));
    assert!(revocation.reason.starts_with("the lease has had no process for "), "{revocation:?}");
    let since_warning = revocation.at.duration_since(notice.at);
    assert!(since_warning >= SignedDuration::from_secs(1), "{since_warning:?}: times have whole seconds");
    assert_eq!(kinds(&granted), ["unused", "revoked"]);
    assert_eq!(ended.notice.map(|notice| notice.kind), Some(NoticeKind::Revoked), "an ended lease keeps its notice");
    let store = host.engine.as_ref().expect("gpushd runs").context.store.clone();
    let trail = store.read(|view| view.audit(&AuditQuery::default())).await.expect("readable");
    let revoked = trail.iter().find(|record| record.action == "lease.revoke").expect("an audit record");
    assert_eq!((revoked.by.as_ref(), revoked.object.as_str()), (None, "L1"), "gpushd itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_program_is_ended_only_with_action_end_and_after_a_notice() {
    for (action, ends) in [("release", false), ("end", true)] {
        let host = whole_gpus(1).start(&config(action, "")).await;
        let zero = gpush_nvml::sample::Ratio::ZERO;
        host.gpus.set_sample(0, |sample| (sample.energy_mj, sample.activity.busy) = (None, Some(zero)));
        host.gpus().await;
        // The power of the board without a process must be known.
        let first = host.until("a sample", async || last_sample(&host).await).await;
        host.until("another sample", async || last_sample(&host).await.filter(|at| *at > first)).await;
        let granted = host.lease(holder(), &whole("0", 1)).await.expect("a lease");
        let mut program = UserProgram::with_environment(holder(), &granted.environment);
        let (gi, ci) = (None, None);
        let busy = Some(zero);
        let idle = ProcessSample { pid: program.pid(), gi, ci, memory_bytes: Some(2 << 30), busy, dram: busy };
        host.gpus.set_sample(0, |sample| sample.processes = Some(vec![idle]));
        let warned = host.until_notice(&granted, NoticeKind::Unused).await;
        assert!(warned.notice.is_some_and(|notice| notice.text.starts_with("lease L1 has been unused for ")));
        let releasing = host.until_lease(&granted, "the release", |lease| lease.state != LeaseState::Active).await;
        let revocation = releasing.revocation.expect("a revocation");
        assert_eq!(revocation.processes_end_at.is_some(), ends, "{action}: {revocation:?}");
        assert!(program.lives(), "{action}: it may run until the end of the notice");
    }
}

/// Fault: a program that no sample had seen ended with the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_that_no_sample_has_seen_prevents_the_end() {
    let (host, granted) = InProcess::with_unused_lease(&config("end", "")).await;
    host.until_notice(&granted, NoticeKind::Unused).await;
    let mut program = UserProgram::with_environment(holder(), &granted.environment);
    // The driver lists the program. The scripted samples do not have it.
    host.gpus.use_as(0, program.pid(), gpush_api::ProcessKind::Compute);
    let lease = host.until_long_in(&granted, UseState::Empty).await;
    assert!(lease.state == LeaseState::Active && program.lives(), "{:?}", lease.state);
}

/// Returns the time of the last sample of GPU 0.
async fn last_sample(host: &InProcess) -> Option<Timestamp> {
    host.get::<HostUsage>("/v1/usage?watch=true").await.gpu_usage.first()?.sampled_at
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_and_warn_end_no_lease() {
    for (action, expected) in [("report", Vec::new()), ("warn", vec!["unused"])] {
        let (host, granted) = InProcess::with_unused_lease(&config(action, "")).await;
        let lease = host.until_long_in(&granted, UseState::Empty).await;
        assert_eq!(
            (lease.state, kinds(&granted)),
            (LeaseState::Active, expected.into_iter().map(str::to_owned).collect()),
            "{action}"
        );
        let report: IdleReport = host.get("/v1/leases/idle").await;
        assert_eq!(report.unused_now.iter().map(|one| one.lease_id).collect::<Vec<_>>(), [LeaseId(1)]);
        assert_eq!(report.unused_now[0].action.name(), action);
        let other: IdleReport = host.get_as(user(holder() + 1), "/v1/leases/idle").await.expect("an answer");
        assert_eq!(other.unused_now, [], "users see their own leases");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_lease_does_not_end() {
    let (host, granted) = InProcess::with_unused_lease(&config("release", "max_keep = \"2h\"\n")).await;
    host.until_notice(&granted, NoticeKind::Unused).await;
    for (uid, body, part) in [
        (holder(), json!({ "duration_s": 7201, "reason": "demo" }), "can be kept for 2h at most"),
        (holder(), json!({ "duration_s": 60, "reason": " " }), "the reason is empty"),
        (holder(), json!({ "duration_s": 0, "reason": "demo" }), "at least 1 second"),
        (holder(), json!({ "duration_s": 60, "reason": "a\nb" }), "control characters"),
        (holder() + 1, json!({ "duration_s": 60, "reason": "demo" }), "you may not keep lease L1"),
    ] {
        let error = host.keep(uid, &granted, &body).await.expect_err(part);
        assert!(error.message.contains(part), "{error:?}");
    }
    let body = json!({ "duration_s": 3600, "reason": "demo at noon" });
    let kept = host.keep(holder(), &granted, &body).await.expect("it is kept").keep.expect("a keep");
    assert_eq!((kept.reason.as_str(), kept.by.uid), ("demo at noon", holder()));
    let notice = host.until_notice(&granted, NoticeKind::UnusedNoMore).await.notice.expect("a notice");
    assert!(notice.text.starts_with("lease L1 is kept until "), "{notice:?}");
    let lease = host.until_long_in(&granted, UseState::Empty).await;
    assert_eq!((lease.state, lease.idle), (LeaseState::Active, None));
    let foreign: Lease = host.get_as(user(holder() + 1), "/v1/leases/L1").await.expect("a lease");
    assert_eq!(foreign.keep, None, "the reason is for the holder and administrators");
}

/// A keep is in the store, so a restart does not forget it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keep_outlasts_a_restart_and_a_kill() {
    let scripted = whole_gpus(1);
    let config = config("release", "");
    let mut host = scripted.start(&config).await;
    host.gpus.set_sample(0, |_| {});
    let granted = host.lease(holder(), &whole("0", 1)).await.expect("a lease");
    let body = json!({ "duration_s": 3600, "reason": "demo" });
    host.keep(holder(), &granted, &body).await.expect("it is kept");
    host.stop().await;
    host = scripted.start(&config).await;
    host.kill();
    host = scripted.start(&config).await;
    host.gpus().await;
    let lease = host.until_long_in(&granted, UseState::Empty).await;
    assert_eq!((lease.state, lease.keep.map(|keep| keep.reason)), (LeaseState::Active, Some("demo".to_owned())));
    assert_eq!(kinds(&granted), [] as [String; 0]);
}

/// The holder gets the full warning from the gpushd that ends the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_gpushd_warns_again_before_it_ends_a_lease() {
    let scripted = whole_gpus(1);
    let config = format!("# --constants usage.record=1ms\n{}", config("release", ""));
    let mut host = scripted.start(&config).await;
    host.gpus.set_sample(0, |_| {});
    let granted = host.lease(holder(), &whole("0", 1)).await.expect("a lease");
    host.until_notice(&granted, NoticeKind::Unused).await;
    host.kill();
    host = scripted.start(&config).await;
    host.gpus().await;
    host.until_lease(&granted, "the end", |lease| lease.state == LeaseState::Ended).await;
    let kinds = kinds(&granted);
    assert_eq!(kinds.last().map(String::as_str), Some("revoked"));
    let warnings = kinds.iter().filter(|kind| *kind == "unused").count();
    assert!(warnings >= 2, "one warning from each gpushd: {kinds:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exempt_leases_are_left_alone() {
    let user = format!("user{}", holder());
    let group = format!("group{}", holder() % 100);
    for exempt in [format!("users = [{user:?}]"), format!("groups = [{group:?}]"), "rules = [\"lab\"]".to_owned()] {
        let config =
            config("end", &format!("[idle.exempt]\n{exempt}\n")).replace("[[gpu]]\n", "[[gpu]]\nname = \"lab\"\n");
        let (host, granted) = InProcess::with_unused_lease(&config).await;
        let lease = host.until_long_in(&granted, UseState::Empty).await;
        assert_eq!((lease.state, lease.idle), (LeaseState::Active, None), "{exempt}");
        assert_eq!(kinds(&granted), [] as [String; 0], "{exempt}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_whose_use_is_not_known_never_ends() {
    let (host, granted) = InProcess::with_unused_lease(&config("end", "")).await;
    host.until_notice(&granted, NoticeKind::Unused).await;
    host.gpus.fail("sampling the GPU", 0, 100_000, ErrorKind::Unknown);
    let notice = host.until_notice(&granted, NoticeKind::UnusedNoMore).await.notice.expect("a notice");
    assert!(notice.text.starts_with("gpushd does not know any more whether lease L1 is used"), "{notice:?}");
    let lease = host.until_long_in(&granted, UseState::Unknown).await;
    assert_eq!((lease.state, lease.idle), (LeaseState::Active, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_overrides_the_action() {
    let config = config("release", "")
        .replace("mode = \"exclusive\"\n", "mode = \"exclusive\"\nidle = { action = \"report\" }\n");
    let (host, granted) = InProcess::with_unused_lease(&config).await;
    let lease = host.until_long_in(&granted, UseState::Empty).await;
    assert_eq!((lease.state, lease.idle.map(|idle| idle.action)), (LeaseState::Active, Some(IdleAction::Report)));
}

/// The dry run uses the recorded unused times and the present config.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_names_what_would_have_been_ended() {
    let host = whole_gpus(4).start(&format!("{WHOLE}[history]\ndays = 0\n")).await;
    let unused = host.lease(holder(), &whole("0", 1)).await.expect("a lease").lease.id;
    let used = host.lease(holder(), &whole("1", 1)).await.expect("a lease").lease.id;
    let now = Timestamp::now().as_millisecond();
    let minute = 60_000;
    let span = |lease, from: i64, until: i64| UnusedSpan {
        lease,
        state: UseState::Idle,
        from_ms: now + from * minute,
        until_ms: now + until * minute,
    };
    let spans = vec![span(unused, 0, 400), span(used, 0, 100), span(used, 110, 300)];
    let record = UsageRecord { unused: spans, ..UsageRecord::default() };
    let store = &host.engine.as_ref().expect("gpushd runs").context.store;
    store.write(move |tx| tx.record_usage(&record).map(drop)).await.expect("recorded");
    for (query, action, warnings) in [("", IdleAction::Report, 0), ("?action=release", IdleAction::Release, 2)] {
        let report: IdleReport = host.get(&format!("/v1/leases/idle{query}")).await;
        let found: Vec<_> = report.would_have.iter().map(|one| (one.lease_id, one.action, one.warning_count)).collect();
        assert_eq!(found, [(unused, action, warnings)]);
        assert!(report.would_have[0].is_open);
    }
    let other: IdleReport = host.get_as(user(holder() + 1), "/v1/leases/idle").await.expect("an answer");
    assert_eq!(other.would_have, []);
}
