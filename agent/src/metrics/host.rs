//! Metrics of gpushd itself.

use gpush_nvml::CallTime;
use gpush_openmetrics::Family;

use crate::{
    state::{HostState, context::HostContext},
    usage::SampleAttempts,
};

/// Returns the metrics of gpushd.
pub(super) fn families(context: &HostContext, host: &HostState, attempts: SampleAttempts) -> Vec<Family> {
    let mut build = Family::gauge("gpush_build_info", "Version of gpushd.");
    build.add([("version", env!("CARGO_PKG_VERSION"))], 1.0);
    let worker = context.hardware.status();
    let mut restarts = Family::counter("gpush_worker_starts", "Starts of the driver worker.");
    #[expect(clippy::cast_precision_loss, reason = "few starts")]
    restarts.add([], worker.started as f64);
    let mut failures = Family::gauge("gpush_task_failures", "Failures of background tasks that health shows.");
    #[expect(clippy::cast_precision_loss, reason = "few tasks fail")]
    failures.add([], context.tasks.health().len() as f64);
    let mut maintenance = Family::gauge("gpush_maintenance", "Whether the host is in maintenance.");
    maintenance.add([], if host.maintenance.is_some() { 1.0 } else { 0.0 });
    let mut requests = Family::counter("gpush_lease_requests", "Requests for leases, by share and result.");
    for (share, result, count) in context.requests.list() {
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 requests")]
        let count = count as f64;
        requests.add([("kind", share.kind), ("profile", &*share.profile), ("result", result.name())], count);
    }
    let mut families = vec![build, restarts, failures, maintenance, requests];
    families.extend(samples(attempts));
    families.extend(calls(context));
    families.extend(store(context));
    families
}

/// Returns the metrics of samples.
fn samples(attempts: SampleAttempts) -> [Family; 2] {
    let mut taken = Family::counter("gpush_samples", "Samples of GPUs that gpushd has used.");
    taken.add([], number(attempts.taken));
    let mut dropped = Family::counter("gpush_samples_dropped", "Samples of GPUs that gpushd has not used.");
    for (reason, count) in attempts.dropped() {
        dropped.add([("reason", reason.name())], number(count));
    }
    [taken, dropped]
}

/// Returns the metrics of calls to the driver workers.
fn calls(context: &HostContext) -> [Family; 2] {
    let mut count = Family::counter("gpush_driver_calls", "Calls that a driver worker has answered.");
    let mut time = Family::counter("gpush_driver_call_seconds", "Time of the calls that a driver worker has answered.");
    for (call, CallTime { count: calls, time: seconds }) in context.hardware.call_times() {
        count.add([("call", call)], number(calls));
        time.add([("call", call)], seconds.as_secs_f64());
    }
    [count, time]
}

/// Returns the metrics of the store.
fn store(context: &HostContext) -> [Family; 1] {
    let mut up = Family::gauge("gpush_store_up", "Whether the database accepts writes.");
    up.add([], if context.read_only.is_none() && context.store.refusal().is_none() { 1.0 } else { 0.0 });
    [up]
}

#[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 samples")]
fn number(count: u64) -> f64 {
    count as f64
}
