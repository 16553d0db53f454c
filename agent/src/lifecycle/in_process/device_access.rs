//! Device access on a host whose systemd is in a script: install, refuse, restore, failures in the middle, restarts.

use std::sync::Arc;

use gpush_api::{ApiError, Code, DeviceEnforcement, EnforcementPlan, EnforcementReach, EnforcementState, ProbeResult};
use gpush_host::systemd::{ScriptedFault, ScriptedSystemd};
use gpush_store::AuditQuery;
use serde_json::json;

use super::{InProcess, host::ScriptedHost, leases::devices};

/// A rule that enforces leases of GPU 0.
const RULE: &str =
    "[[gpu]]\nname = \"strict\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\nlease = \"enforced\"\n";

/// Creates a host with two GPUs, systemd of this version, and a cron that runs.
fn scripted(version: u32) -> (Arc<ScriptedHost>, ScriptedSystemd) {
    let (host, systemd) = (ScriptedHost::new("dgx-h100", 2), ScriptedSystemd::new(version));
    systemd.run_service("cron.service", "");
    *host.systemd.lock() = Some(systemd.clone());
    (host, systemd)
}

impl InProcess {
    async fn enforcement(&self, change: &str) -> Result<DeviceEnforcement, ApiError> {
        self.post(&format!("/v1/enforcement/{change}"), &json!({})).await
    }

    async fn audited(&self) -> Vec<String> {
        let store = self.engine.as_ref().expect("gpushd runs").context.store.clone();
        let trail = store.read(|view| view.audit(&AuditQuery::default())).await.expect("readable");
        trail.into_iter().map(|record| record.action).filter(|action| action.starts_with("enforce.")).collect()
    }
}

/// Returns the units that deny the GPUs.
fn denied(found: &DeviceEnforcement) -> Vec<&str> {
    found.units.iter().filter(|unit| unit.denies_gpus).map(|unit| unit.unit.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn enforce_on_is_verified_and_off_restores_the_units() {
    let (scripted, systemd) = scripted(257);
    let host = scripted.start(RULE).await;
    let before = host.get::<DeviceEnforcement>("/v1/enforcement").await;
    assert_eq!((before.state, denied(&before)), (EnforcementState::Off, vec![]));
    let on = host.enforcement("on").await.expect("it works");
    assert_eq!((on.state, on.reason.clone()), (EnforcementState::Verified, None), "{on:?}");
    assert_eq!(denied(&on), ["user.slice", "cron.service"]);
    assert!(on.units.iter().all(|unit| unit.set_by_gpush) && on.systemd_version == Some(257), "{on:?}");
    assert_eq!(systemd.take_changes(), ["set user.slice", "set cron.service"]);
    let again = host.enforcement("on").await.expect("it works");
    assert_eq!((again.state, systemd.take_changes()), (EnforcementState::Verified, vec![]), "nothing to change");
    let off = host.enforcement("off").await.expect("it works");
    assert_eq!((off.state, denied(&off)), (EnforcementState::Off, vec![]));
    for unit in ["user.slice", "cron.service"] {
        let devices = systemd.devices(unit);
        assert_eq!((devices.policy.as_str(), devices.allowed.len()), ("auto", 0), "{unit}");
    }
    assert_eq!(host.audited().await, ["enforce.on", "enforce.on", "enforce.off"]);
}

/// gpushd opens only a unit whose list it has set itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_of_an_administrator_is_kept() {
    let (scripted, systemd) = scripted(257);
    systemd.set_devices("cron.service", "closed", &["char-1"]);
    let host = scripted.start(RULE).await;
    let on = host.enforcement("on").await.expect("it works");
    assert_eq!(denied(&on), ["user.slice", "cron.service"]);
    assert_eq!(systemd.take_changes(), ["set user.slice"]);
    host.enforcement("off").await.expect("it works");
    assert_eq!(systemd.devices("cron.service").allowed, ["char-1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn setting_that_the_kernel_does_not_obey_is_not_verified() {
    let (scripted, systemd) = scripted(257);
    systemd.set_obeys_lists(false);
    let host = scripted.start(RULE).await;
    let on = host.enforcement("on").await.expect("the units are set");
    assert_eq!(on.state, EnforcementState::Unverified);
    assert!(on.reason.as_ref().is_some_and(|why| why.contains("in user.slice could open")), "{on:?}");
    assert!(on.probes.iter().any(|probe| probe.result == ProbeResult::Allowed), "{on:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_systemd_and_cgroup_v1_are_refused_and_nothing_changes() {
    for (version, is_unified, why) in [(249, true, "systemd 249 opens all devices"), (257, false, "cgroup v2")] {
        let (scripted, systemd) = scripted(version);
        systemd.set_unified(is_unified);
        let host = scripted.start(RULE).await;
        let refused = host.enforcement("on").await.expect_err("refused");
        assert_eq!(refused.code, Code::Unsupported);
        assert!(refused.causes.iter().any(|cause| cause.contains(why)), "{refused:?}");
        let plan: EnforcementPlan = host.get("/v1/enforcement/plan").await;
        assert!(plan.unsupported.is_some_and(|reason| reason.contains(why)));
        assert_eq!((systemd.take_changes(), host.audited().await), (vec![], vec![]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_names_the_units_that_change_and_those_that_are_not_covered() {
    let (scripted, systemd) = scripted(257);
    systemd.run_service("docker.service", "");
    systemd.run_service("app.service", "hub");
    let host = scripted.start(RULE).await;
    let plan: EnforcementPlan = host.get("/v1/enforcement/plan").await;
    assert_eq!((plan.unsupported, plan.changes), (None, vec!["user.slice".to_owned(), "cron.service".to_owned()]));
    let open: Vec<&str> = plan
        .effects
        .iter()
        .filter(|effect| effect.reach == EnforcementReach::NotCovered)
        .map(|effect| effect.subject.as_str())
        .collect();
    assert!(open.contains(&"docker.service") && open.contains(&"app.service"), "{open:?}");
    host.enforcement("on").await.expect("it works");
    let plan: EnforcementPlan = host.get("/v1/enforcement/plan").await;
    assert_eq!(plan.changes, [] as [String; 0], "the host denies the GPUs already");
}

/// Fault: after a failure in the middle, gpushd showed `off` until the next check, although sessions could open no GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_in_the_middle_is_shown_as_it_is() {
    for (fault, after, expected) in [
        (ScriptedFault::Refused, 0, vec![]),
        (ScriptedFault::LostBefore, 0, vec![]),
        (ScriptedFault::LostAfter, 0, vec!["user.slice"]),
        (ScriptedFault::Refused, 1, vec!["user.slice"]),
        (ScriptedFault::LostBefore, 1, vec!["user.slice"]),
        (ScriptedFault::LostAfter, 1, vec!["user.slice", "cron.service"]),
    ] {
        let (scripted, systemd) = scripted(257);
        let host = scripted.start(RULE).await;
        systemd.fail_after(after, fault);
        let failed = host.enforcement("on").await.expect_err("it fails");
        assert_eq!(failed.code, Code::Unavailable, "{fault:?}");
        let names_units = failed.causes.iter().any(|cause| cause.contains(&expected.join(", ")));
        assert!(expected.is_empty() || names_units, "{fault:?} {after}: {failed:?}");
        let shown = host.get::<DeviceEnforcement>("/v1/enforcement").await;
        let state = match expected.len() {
            0 => EnforcementState::Off,
            1 => EnforcementState::Unverified,
            _ => EnforcementState::Verified,
        };
        assert_eq!((shown.state, denied(&shown)), (state, expected), "{fault:?} {after}");
        let on = host.enforcement("on").await.expect("it works now");
        assert_eq!((on.state, denied(&on).len()), (EnforcementState::Verified, 2), "{fault:?} {after}");
        systemd.fail_after(1, fault);
        let failed = host.enforcement("off").await.expect_err("it fails");
        assert_eq!(failed.code, Code::Unavailable);
        let off = host.enforcement("off").await.expect("it works now");
        assert_eq!((off.state, denied(&off)), (EnforcementState::Off, vec![]), "{fault:?} {after}");
    }
}

/// Fault: gpushd showed `off` after one failed read, so processes that entered a lease could open all GPUs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_read_does_not_show_that_the_gpus_are_open() {
    let (scripted, systemd) = scripted(257);
    let host = scripted.start(RULE).await;
    host.enforcement("on").await.expect("it works");
    systemd.set_refuses_reads(true);
    host.enforcement("on").await.expect_err("units cannot be read");
    let shown = host.get::<DeviceEnforcement>("/v1/enforcement").await;
    assert_eq!((shown.state, denied(&shown).len()), (EnforcementState::Unverified, 2), "{shown:?}");
    systemd.set_refuses_reads(false);
    let on = host.enforcement("on").await.expect("it works now");
    assert_eq!(on.state, EnforcementState::Verified);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpushd_killed_between_two_units_tells_the_state_after_a_restart() {
    let (scripted, systemd) = scripted(257);
    let mut host = scripted.start(RULE).await;
    systemd.fail_after(1, ScriptedFault::Hangs);
    {
        let change = host.enforcement("on");
        tokio::pin!(change);
        let waits = host.until("the second unit", async || (systemd.hanging() == 1).then_some(()));
        tokio::select! {
            done = &mut change => panic!("{done:?}"),
            () = waits => {}
        }
    }
    host.kill();
    host = scripted.start(RULE).await;
    let shown = host.get::<DeviceEnforcement>("/v1/enforcement").await;
    assert_eq!((shown.state, denied(&shown)), (EnforcementState::Unverified, vec!["user.slice"]), "{shown:?}");
    assert!(shown.reason.is_some_and(|why| why.contains("cron.service does not deny the GPUs")));
    assert_eq!(host.audited().await, [] as [String; 0], "the change was not completed");
    let on = host.enforcement("on").await.expect("it works now");
    assert_eq!(denied(&on), ["user.slice", "cron.service"]);
    host.kill();
    host = scripted.start(RULE).await;
    let off = host.enforcement("off").await.expect("it works");
    assert_eq!((off.state, denied(&off)), (EnforcementState::Off, vec![]), "another gpushd recognizes its lists");
}

/// Fault: if systemd failed once when a lease ended, processes that had entered the lease could open its GPU until they
/// ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scope_of_an_ended_lease_is_closed_although_systemd_fails() {
    for fault in [ScriptedFault::Refused, ScriptedFault::LostBefore, ScriptedFault::LostAfter] {
        let (scripted, systemd) = scripted(257);
        let mut host = scripted.start(RULE).await;
        host.enforcement("on").await.expect("it works");
        let lease = host.lease(1000, &devices("1g.10gb", 1)).await.expect("granted");
        let epoch = host.engine.as_ref().expect("gpushd runs").context.store.epoch().to_owned();
        let unit = format!("gpulease-{epoch}-{}-4711.scope", lease.lease.id.0);
        systemd.run_scope(&unit);
        let opens = |number: usize| {
            let allowed = systemd.devices(&unit).allowed;
            let gpus = allowed.iter().filter(|pattern| pattern.starts_with("/dev/char/195:")).count();
            (!allowed.is_empty() && gpus == number).then_some(())
        };
        // A gpushd that starts finds the scopes of an earlier one: the GPU and nvidiactl.
        host.kill();
        host = scripted.start(RULE).await;
        host.get::<serde_json::Value>("/v1/gpus").await;
        host.until("the scope opens the devices of its lease", async || opens(2)).await;
        systemd.fail_after(0, fault);
        host.release(&lease).await;
        host.wait_until_ended(&lease).await;
        host.until("the scope opens no GPU", async || opens(0)).await;
    }
}

/// A scope that an earlier gpushd left open is closed, also after its lease has ended. Scopes of another database are not
/// changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scope_that_an_earlier_gpushd_left_open_is_closed() {
    let (scripted, systemd) = scripted(257);
    let mut host = scripted.start(RULE).await;
    host.enforcement("on").await.expect("it works");
    let epoch = host.engine.as_ref().expect("gpushd runs").context.store.epoch().to_owned();
    let [own, entered] = ["7", "7-4711"].map(|numbers| format!("gpulease-{epoch}-{numbers}.scope"));
    let foreign = "gpulease-00000000-7.scope";
    host.kill();
    for unit in [own.as_str(), entered.as_str(), foreign] {
        systemd.run_scope(unit);
    }
    let _ = systemd.take_changes();
    host = scripted.start(RULE).await;
    let is_closed = |unit: &str| systemd.devices(unit).denies_gpus();
    host.until("both scopes are closed", async || (is_closed(&own) && is_closed(&entered)).then_some(())).await;
    assert!(!is_closed(foreign) && !systemd.take_changes().contains(&format!("set {foreign}")));
}
