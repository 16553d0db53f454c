//! Metrics of gpushd itself.

use gpush_openmetrics::Family;

use crate::state::{HostState, context::HostContext};

/// Returns the metrics of gpushd.
pub(super) fn families(context: &HostContext, host: &HostState) -> Vec<Family> {
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
    vec![build, restarts, failures, maintenance, requests]
}
