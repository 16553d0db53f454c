//! Compute modes that gpushd cannot set or restore at once: the call fails, is late, or ends the driver worker. gpushd
//! reports the failure and retries, also after a restart.

use gpush_api::{Code, ComputeMode, GpuState, Health, OperationState};
use gpush_nvml::{ErrorKind, ReadingPart, Unread};
use serde_json::json;

use super::{INTERVALS, rule, shared};
use crate::lifecycle::in_process::{
    InProcess,
    call_rules::{CallEffect, CallRule, EndMoment},
    daemons::DaemonStart,
    host::ScriptedHost,
};

const SET: &str = "setting the compute mode";
const TROUBLE: &str = "still has the compute mode that gpushd set for MPS";
const EXCLUSIVE: Option<ComputeMode> = Some(ComputeMode::ExclusiveProcess);

async fn is_reported(host: &InProcess) -> bool {
    let health: Health = host.get("/v1/health").await;
    health.errors.iter().any(|one| one.message.contains(TROUBLE) && one.code == Code::DriverError)
}

async fn wait_for_report(host: &InProcess) {
    host.until("the failure is reported", async || is_reported(host).await.then_some(())).await;
}

/// The rule is removed while the driver cannot set the mode. gpushd must retry, also after a restart.
#[test]
fn failed_restore_of_a_compute_mode_is_reported_and_retried() {
    let world = ScriptedHost::new("dgx-h100", 1);
    world.run_until(&shared("\"0\"", ""), async |host| {
        host.apply_rules(&["0"]).await;
        assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE);
        host.gpus.fail(SET, 0, 1000, ErrorKind::Unknown);
        host.reload(INTERVALS).await;
        host.no_daemon_is_left().await;
        wait_for_report(host).await;
        assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE);
    });
    world.run_until(INTERVALS, async |host| {
        wait_for_report(host).await;
        assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE);
        host.gpus.clear_faults();
        host.compute_mode_becomes(0, ComputeMode::Default).await;
        host.until("no failure is reported", async || (!is_reported(host).await).then_some(())).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_compute_mode_failure_is_retried() {
    let host = InProcess::with_daemon("").await;
    host.gpus.fail(SET, 0, 1, ErrorKind::Unknown);
    host.reload(INTERVALS).await;
    host.compute_mode_becomes(0, ComputeMode::Default).await;
}

/// The driver does not report the compute mode, so gpushd does not know whether it still has to restore it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_compute_mode_is_restored_when_it_is_known() {
    let host = InProcess::with_daemon("").await;
    host.gpus.alter(0, |reading| {
        reading.compute_mode = None;
        let error = "Unknown Error".to_owned();
        reading.warnings.push(Unread { part: ReadingPart::ComputeMode, error });
    });
    host.reload(INTERVALS).await;
    host.no_daemon_is_left().await;
    wait_for_report(&host).await;
    host.gpus.alter(0, |reading| (reading.compute_mode, reading.warnings) = (EXCLUSIVE, Vec::new()));
    host.compute_mode_becomes(0, ComputeMode::Default).await;
}

#[test]
fn compute_mode_set_by_an_administrator_is_kept() {
    let world = ScriptedHost::new("dgx-h100", 1);
    world.run_until(&shared("\"0\"", ""), async |host| {
        host.apply_rules(&["0"]).await;
        host.gpus.fail(SET, 0, 1000, ErrorKind::Unknown);
        host.reload(INTERVALS).await;
        wait_for_report(host).await;
    });
    world.gpus.clear_faults();
    // An administrator sets another mode, without gpushd.
    world.gpus.alter(0, |reading| reading.compute_mode = Some(ComputeMode::Prohibited));
    world.run_until(INTERVALS, async |host| {
        assert_eq!(host.gpus().await[0].compute_mode, Some(ComputeMode::Prohibited));
        // When the GPU has an MPS rule again, gpushd records the mode that the administrator has set. When this rule is
        // removed, gpushd restores that mode.
        host.reload(&shared("\"0\"", "")).await;
        host.apply_rules(&["0"]).await;
        assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE);
        host.reload(INTERVALS).await;
        host.compute_mode_becomes(0, ComputeMode::Prohibited).await;
        host.no_daemon_is_left().await;
        assert!(!is_reported(host).await);
    });
}

/// gpushd must set compute mode exclusive process. Otherwise programs could bypass MPS.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_compute_mode_rolls_back_and_a_lost_one_is_reported() {
    let host = InProcess::start("dgx-h100", 1, &rule("mode = \"exclusive\"")).await;
    host.apply_rules(&["0"]).await;
    host.gpus.fail(SET, 0, 1000, ErrorKind::Unknown);
    host.reload(&shared("\"0\"", "")).await;
    let begun = host.begin_rules(&["0"], None).await.expect("it begins");
    let failed = host.ended(&begun).await;
    assert_eq!(failed.state, OperationState::RolledBack, "{failed:#?}");
    let error = failed.error.expect("an error");
    assert!(format!("{error:?}").contains("programs can bypass MPS on GPU 0"), "{error:?}");
    host.gpus.clear_faults();
    host.apply_rules(&["0"]).await;
    assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE);
    // An administrator changes the mode. The driver then refuses to change it back.
    host.gpus.fail(SET, 0, 1000, ErrorKind::Unknown);
    host.gpus.alter(0, |reading| reading.compute_mode = Some(ComputeMode::Default));
    host.reload(&shared("\"0\"", "")).await;
    let reported = async || {
        let findings = host.daemon("0").await.findings;
        findings.iter().any(|one| one.contains("programs can bypass MPS on GPU 0"))
    };
    host.until("the failure is reported", async || reported().await.then_some(())).await;
    let health: Health = host.get("/v1/health").await;
    assert!(format!("{:?}", health.errors).contains("programs can bypass MPS"), "{health:?}");
    host.gpus.clear_faults();
    host.reload(&shared("\"0\"", "")).await;
    host.compute_mode_becomes(0, ComputeMode::ExclusiveProcess).await;
    host.until("no failure is reported", async || (!reported().await).then_some(())).await;
}

/// gpushd sets the mode before it starts the daemon. It restores the mode if the daemon does not start, and also if gpushd
/// itself ends before the start.
#[test]
fn failed_daemon_start_leaves_the_compute_mode_unchanged() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let exclusive = rule("mode = \"exclusive\"");
    world.run_until(&exclusive, async |host| {
        host.apply_rules(&["0"]).await;
        host.reload(&shared("\"0\"", "")).await;
        host.host.daemons.start_next(DaemonStart::Refused);
        let begun = host.begin_rules(&["0"], None).await.expect("it begins");
        assert_eq!(host.ended(&begun).await.state, OperationState::RolledBack);
        // gpushd restores the mode before the operation ends.
        assert_eq!(host.gpus.compute_mode(0), Some(ComputeMode::Default));
        let changes = host.gpus.take_changes();
        assert!(changes.contains(&format!("{SET} 0")), "{changes:?}");
        // The next gpushd has no rule for the GPU. So it restores the mode that this gpushd has set.
        host.host.daemons.start_next(DaemonStart::Slow);
        host.begin_rules(&["0"], None).await.expect("it begins");
        host.compute_mode_becomes(0, ComputeMode::ExclusiveProcess).await;
    });
    world.daemons.clear_faults();
    world.run_until(INTERVALS, async |host| {
        host.compute_mode_becomes(0, ComputeMode::Default).await;
        let health: Health = host.get("/v1/health").await;
        assert_eq!(health.errors, [] as [gpush_api::ApiError; 0], "{:?}", json!(health));
    });
}

/// The worker ends during the call that sets the mode, before or after the driver has set it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_that_ends_in_a_compute_mode_call_leaves_no_mode() {
    for moment in [EndMoment::Before, EndMoment::After] {
        let host = InProcess::start("dgx-h100", 1, &rule("mode = \"exclusive\"")).await;
        host.apply_rules(&["0"]).await;
        host.reload(&shared("\"0\"", "")).await;
        host.gpus.rule(CallRule::on(SET, 0).once().with(CallEffect::EndWorker(moment)));
        let begun = host.begin_rules(&["0"], None).await.expect("it begins");
        let ended = host.ended(&begun).await;
        assert_eq!(ended.state, OperationState::RolledBack, "{moment:?}: {ended:#?}");
        host.compute_mode_becomes(0, ComputeMode::Default).await;
        host.apply_rules(&["0"]).await;
        assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE, "{moment:?}");
    }
}

/// The call takes effect after its deadline. The operation fails, so gpushd restores the mode.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_compute_mode_is_restored_and_delays_no_other_gpu() {
    let config = format!("# --constants driver.change=3s\n{}", shared("\"0-1\"", ""));
    let world = ScriptedHost::new("dgx-h100", 2);
    world.gpus.without_mig();
    let host = world.start(&config).await;
    host.gpus.rule(CallRule::on(SET, 0).once().held());
    let late = host.begin_rules(&["0"], None).await.expect("it begins");
    host.until_held().await;
    host.apply_rules(&["1"]).await;
    assert_eq!(host.gpus.compute_mode(1), EXCLUSIVE);
    host.until("the deadline", async || (host.gpu(0).await.state == GpuState::Unknown).then_some(())).await;
    host.gpus.release();
    let ended = host.ended(&late).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:#?}");
    let is_restored = async || {
        let calls = host.gpus.changes().iter().filter(|call| **call == format!("{SET} 0")).count();
        (calls == 2 && host.gpus.compute_mode(0) == Some(ComputeMode::Default)).then_some(())
    };
    host.until("the mode is restored", is_restored).await;
    host.apply_rules(&["0"]).await;
    assert_eq!(host.gpus.compute_mode(0), EXCLUSIVE);
}
