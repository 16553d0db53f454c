//! Leases that use more memory than their share has: notices, withdrawals, ends, and what must never end a lease.

use gpush_api::{EndReason, Lease, LeaseGrant, LeaseState, NoticeKind, OverLimitAction};
use gpush_nvml::{ErrorKind, sample::ProcessSample};
use gpush_store::AuditQuery;
use serde_json::json;

use super::{
    InProcess,
    idle::{holder, kinds},
    lease_requests::whole_gpus,
    programs::UserProgram,
};

/// Memory of a process within the limit, and above it. The share has half of 80 GiB.
const LITTLE: u64 = 20 << 30;
const MUCH: u64 = 60 << 30;

/// Returns a config in which a GPU has two replicas, and these keys.
fn config(keys: &str) -> String {
    format!("[[gpu]]\nmatch = [\"all\"]\nmode = \"timeslice\"\ntimeslice = {{ replicas = 2 }}\n{keys}")
}

/// A lease with a program.
struct Shared {
    host: InProcess,
    granted: LeaseGrant,
    program: UserProgram,
}

impl Shared {
    /// Starts gpushd, and a program of a lease that uses little memory.
    async fn start(keys: &str) -> Self {
        let host = whole_gpus(1).start(&config(keys)).await;
        let body = json!({ "share": { "kind": "timeslice" }, "duration_s": 600 });
        let granted = host.lease(holder(), &body).await.expect("a lease");
        let program = UserProgram::with_environment(holder(), &granted.environment);
        let shared = Self { host, granted, program };
        shared.uses(Some(LITTLE));
        shared
    }

    /// Sets the memory of the program; `None` if the driver does not report it.
    fn uses(&self, memory_bytes: Option<u64>) {
        let zero = Some(gpush_nvml::sample::Ratio::ZERO);
        let (gi, ci) = (None, None);
        let process = ProcessSample { pid: self.program.pid(), gi, ci, memory_bytes, busy: zero, dram: zero };
        self.host.gpus.set_sample(0, |sample| sample.processes = Some(vec![process]));
    }

    async fn until_notice(&self, kind: NoticeKind) -> Lease {
        self.host.until_notice(&self.granted, kind).await
    }

    /// Waits until the lease has been held for some more seconds.
    async fn until_held(&self, more: u64) -> Lease {
        let held = |lease: &Lease| {
            let usage = lease.usage.as_ref();
            usage.map_or(0, |usage| usage.busy_s + usage.idle_s + usage.empty_s + usage.unknown_s)
        };
        let before = held(&self.host.get(&format!("/v1/leases/{}", self.granted.lease.id)).await);
        self.host.until_lease(&self.granted, "some seconds", |lease| held(lease) >= before + more).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_above_its_limit_gets_a_notice_and_is_then_ended() {
    let mut shared = Shared::start("over_limit = \"end\"\nover_limit_grace = \"3s\"\n").await;
    shared.uses(Some(MUCH));
    let noticed = shared.until_notice(NoticeKind::OverLimit).await;
    let notice = noticed.notice.expect("a notice");
    assert!(notice.text.starts_with("lease L1 uses 60.0 GiB of memory, but its share has "), "{notice:?}");
    assert!(notice.ends_at.is_some(), "{notice:?}");
    let is_dated = |lease: &Lease| lease.over_limit.as_ref().is_some_and(|memory| memory.ends_at.is_some());
    let shown = shared.host.until_lease(&shared.granted, "the time of the end", is_dated).await;
    let memory = shown.over_limit.expect("the memory");
    assert_eq!((memory.action, memory.used_mib, memory.warned), (OverLimitAction::End, 61_440, true));
    let ends = |lease: &Lease| lease.state != LeaseState::Active;
    let ending = shared.host.until_lease(&shared.granted, "the revocation", ends).await;
    let revocation = ending.revocation.expect("a revocation");
    assert_eq!((ending.state, revocation.by.user.as_deref()), (LeaseState::Releasing, Some("gpushd")));
    assert!(revocation.reason.starts_with("the lease uses 60.0 GiB of memory"), "{revocation:?}");
    assert!(revocation.processes_end_at.is_some(), "only the end of its processes frees the memory");
    let since_notice = revocation.at.duration_since(notice.at).as_secs();
    assert!(since_notice >= 2, "{since_notice}: times have whole seconds");
    assert_eq!(kinds(&shared.granted), ["over_limit", "revoked"]);
    assert!(shared.program.lives(), "it may run until the end of the notice");
    let store = shared.host.engine.as_ref().expect("gpushd runs").context.store.clone();
    let trail = store.read(|view| view.audit(&AuditQuery::default())).await.expect("readable");
    let revoked = trail.iter().find(|record| record.action == "lease.revoke").expect("an audit record");
    assert_eq!((revoked.by.as_ref(), revoked.object.as_str()), (None, "L1"), "gpushd itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_without_the_key_only_reports_and_withdraws() {
    let shared = Shared::start("").await;
    shared.uses(Some(MUCH));
    let noticed = shared.until_notice(NoticeKind::OverLimit).await;
    let notice = noticed.notice.expect("a notice");
    assert!(notice.ends_at.is_none() && notice.text.ends_with("other leases of the GPU may get none"), "{notice:?}");
    let lease = shared.until_held(6).await;
    let memory = lease.over_limit.expect("the memory");
    assert_eq!((lease.state, memory.action, memory.ends_at), (LeaseState::Active, OverLimitAction::Report, None));
    let (metrics, _) = shared.host.metrics(0, "*/*").await;
    let limit = metrics.lines().find(|line| line.starts_with("gpush_lease_memory_limit_bytes{"));
    assert!(limit.is_some_and(|line| line.contains("lease=\"L1\"")), "{metrics}");
    shared.uses(Some(LITTLE));
    let withdrawn = shared.until_notice(NoticeKind::OverLimitNoMore).await;
    assert!(withdrawn.notice.is_some_and(|notice| notice.text.contains("within the memory of its share again")));
    assert_eq!(withdrawn.over_limit, None);
    assert_eq!(kinds(&shared.granted), ["over_limit", "over_limit_no_more"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_back_under_its_limit_or_of_unknown_memory_does_not_end() {
    let shared = Shared::start("over_limit = \"end\"\nover_limit_grace = \"4s\"\n").await;
    for (memory, text) in [(Some(LITTLE), "is within the memory"), (None, "does not know any more how much memory")] {
        shared.uses(Some(MUCH));
        shared.until_notice(NoticeKind::OverLimit).await;
        shared.uses(memory);
        let withdrawn = shared.until_notice(NoticeKind::OverLimitNoMore).await;
        assert!(withdrawn.notice.as_ref().is_some_and(|notice| notice.text.contains(text)), "{withdrawn:?}");
        let lease = shared.until_held(7).await;
        assert_eq!((lease.state, lease.over_limit), (LeaseState::Active, None));
    }
    shared.uses(Some(MUCH));
    shared.until_notice(NoticeKind::OverLimit).await;
    shared.host.gpus.fail("sampling the GPU", 0, 100_000, ErrorKind::Unknown);
    shared.until_notice(NoticeKind::OverLimitNoMore).await;
    let lease = shared.until_held(7).await;
    assert_eq!((lease.state, lease.reason), (LeaseState::Active, None::<EndReason>));
}

/// The holder gets the full grace period from the gpushd that ends the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_gpushd_sends_the_notice_again() {
    let scripted = whole_gpus(1);
    let config = config("over_limit = \"end\"\nover_limit_grace = \"5s\"\n");
    let mut host = scripted.start(&config).await;
    let body = json!({ "share": { "kind": "timeslice" }, "duration_s": 600 });
    let granted = host.lease(holder(), &body).await.expect("a lease");
    let program = UserProgram::with_environment(holder(), &granted.environment);
    let mut shared = Shared { host, granted, program };
    shared.uses(Some(MUCH));
    shared.until_notice(NoticeKind::OverLimit).await;
    host = shared.host;
    host.kill();
    shared.host = scripted.start(&config).await;
    shared.host.gpus().await;
    shared.host.until_lease(&shared.granted, "the revocation", |lease| lease.state != LeaseState::Active).await;
    let kinds = kinds(&shared.granted);
    let notices = kinds.iter().filter(|kind| *kind == "over_limit").count();
    assert!(notices >= 2 && kinds.last().is_some_and(|kind| kind == "revoked"), "{kinds:?}");
}
