//! Maintenance: gpushd closes all its handles to the driver, for a reset, another driver, or work on the board.
//!
//! ```text
//!           no operation changes a GPU      recorded         the worker has ended
//! serving ──────────────────────────► closed ────────► entered ─────────────────► no handle is open
//!    ▲          │ one does: refused, operation named       │ worker hangs in the kernel: an error with its pid
//!    │                                                     ▼
//!    └──────────── leave: recorded, a new worker, GPUs matched again by UUID
//! ```
//!
//! Maintenance survives a restart: the next gpushd starts without loading the driver. During maintenance, responses
//! show the last readings, marked as stale. gpushd refuses changes of GPUs; the error names the administrator who
//! entered maintenance. Queued operations wait.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Change as Reported, Code, GpuIndex, GpuUuid, Maintenance};
use gpush_core::lease::usage;
use gpush_store::{AuditEvent, ConditionKind, NewCondition, Scope};
use tokio::sync::Mutex;

use crate::{
    operations::operation::Operations,
    requests::request::Request,
    state::{Change, Commits, Holder, LeaseTable, OpenLease, context::HostContext, words},
};

/// Maximum time that gpushd waits for the worker to end. It is longer than every time limit of a driver call. If a call
/// exceeds its limit, gpushd kills the worker.
const WORKER_EXIT_TIMEOUT: Duration = Duration::from_secs(45);

/// Enters and leaves maintenance. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct MaintenanceControl {
    pub(crate) context: Arc<HostContext>,
    /// Records that maintenance begins or ends.
    pub(crate) commits: Commits,
    /// Refuses to begin operations during maintenance.
    pub(crate) operations: Operations,
    /// Locked while maintenance begins or ends, or a loss of the database is accepted.
    pub(crate) host_lock: Arc<Mutex<()>>,
}

impl MaintenanceControl {
    /// Returns the maintenance that the host is in, if any.
    pub(crate) fn current(&self) -> Option<Maintenance> {
        self.context.state.maintenance()
    }

    /// Enters maintenance. On return, all driver handles of gpushd are closed. `resets` are the UUIDs of the GPUs that
    /// the caller wants to reset; empty for other work.
    ///
    /// # Errors
    /// If the host is already in maintenance, a lease of a GPU in `resets` exists (any lease if `resets` is empty), an
    /// operation has claimed a GPU, or maintenance cannot be recorded. Also if the worker does not end; the host is
    /// then in maintenance anyway.
    pub(crate) async fn enter(&self, request: Request, resets: Vec<GpuUuid>) -> Result<Maintenance, ApiError> {
        let _lock = self.host_lock.lock().await;
        if let Some(current) = self.context.state.maintenance() {
            return Err(ApiError { causes: Vec::new(), ..words::refusal(&current) });
        }
        let attempt = self.attempt(&resets);
        if let Some(error) = leased(&attempt, &self.context.state.leases(), &resets) {
            return Err(error);
        }
        let maintenance = Maintenance {
            reason: request.reason.clone().filter(|reason| !reason.is_empty()),
            by: Some(request.by.clone()),
            since: jiff::Timestamp::now(),
        };
        let closed = self.operations.close(words::refusal(&maintenance));
        closed.map_err(|(uuid, holder)| in_use(&attempt, self.context.state.index_of(&uuid), &uuid, &holder))?;
        let new = NewCondition {
            scope: Scope::Host,
            kind: ConditionKind::Maintenance,
            cause: "admin".to_owned(),
            reason: request.reason.clone().unwrap_or_default(),
            by: Some(request.by.clone()),
        };
        let uid = request.by.uid;
        let event = change_event("maintenance.enter", &request, &resets);
        let recorded =
            request.recorded(host(), |reason| AuditEvent::MaintenanceEnter { gpu_uuids: resets.clone(), reason });
        if let Err(error) = self.commits.change(Change::Set(new), event, recorded).await {
            self.operations.open();
            return Err(error);
        }
        tracing::info!(uid, "{}", words::in_maintenance(&maintenance));
        // Wait for a running helper unit too, because it may have the driver open. It ends soon, and no other helper
        // unit can start.
        let _ = tokio::time::timeout(WORKER_EXIT_TIMEOUT, self.context.host_services.driverless.write()).await;
        self.end_worker().await?;
        tracing::info!("gpushd's driver worker has ended, so gpushd has no driver handle open");
        Ok(self.context.state.maintenance().unwrap_or(maintenance))
    }

    /// Closes all driver handles if the host is in maintenance.
    ///
    /// # Errors
    /// If the worker does not end.
    pub(crate) async fn close_handles(&self) -> Result<(), ApiError> {
        let _lock = self.host_lock.lock().await;
        match self.context.state.maintenance() {
            Some(_) => self.end_worker().await,
            None => Ok(()),
        }
    }

    /// Leaves maintenance. Does nothing if the host is not in maintenance. `resets` are the UUIDs of the GPUs that the
    /// caller has reset.
    ///
    /// # Errors
    /// If the end of maintenance cannot be recorded.
    pub(crate) async fn leave(&self, request: Request, resets: Vec<GpuUuid>) -> Result<(), ApiError> {
        let _lock = self.host_lock.lock().await;
        if self.context.state.maintenance().is_none() {
            return Ok(());
        }
        let uid = request.by.uid;
        let change = Change::Clear(Scope::Host, ConditionKind::Maintenance, None);
        let event = change_event("maintenance.leave", &request, &resets);
        let recorded = request.recorded(host(), |reason| AuditEvent::MaintenanceLeave { gpu_uuids: resets, reason });
        // Permit a new worker before maintenance ends. Otherwise callers could get the error that the worker is
        // stopped.
        self.context.hardware.resume();
        self.context.readings.restart();
        if let Err(error) = self.commits.change(change, event, recorded).await {
            self.context.hardware.suspend();
            return Err(error);
        }
        self.operations.open();
        tracing::info!(uid, "maintenance has ended");
        Ok(())
    }

    /// If the host is in maintenance when gpushd starts, prevents gpushd from loading the driver. Call this before any
    /// driver call.
    pub(crate) fn resume(&self) {
        let Some(maintenance) = self.context.state.maintenance() else { return };
        tracing::warn!(
            "{}; gpushd does not load the driver before maintenance ends",
            words::in_maintenance(&maintenance)
        );
        if let Err((uuid, holder)) = self.operations.close(words::refusal(&maintenance)) {
            tracing::error!(
                gpu = uuid.as_str(),
                "{holder} has not finished its change of GPU {uuid}, and continues after \
                maintenance"
            );
        }
        self.context.hardware.suspend();
    }

    /// Returns the beginning of an error, which says what the caller tried to do.
    fn attempt(&self, resets: &[GpuUuid]) -> String {
        if resets.is_empty() {
            return "cannot enter maintenance".to_owned();
        }
        let name = |uuid: &GpuUuid| {
            self.context.state.index_of(uuid).map_or_else(|| uuid.to_string(), |index| index.to_string())
        };
        format!("cannot reset GPU {}", resets.iter().map(name).collect::<Vec<_>>().join(", "))
    }

    async fn end_worker(&self) -> Result<(), ApiError> {
        let hangs = |cause: String| {
            let abandoned = self.context.hardware.status().abandoned;
            let pids: Vec<String> = abandoned.iter().filter_map(|one| one.pid).map(|pid| pid.to_string()).collect();
            let which = if pids.is_empty() { String::new() } else { format!(" (pid {})", pids.join(", ")) };
            let message = format!(
                "the host is in maintenance, but a driver worker of gpushd{which} has not ended and may have GPUs open"
            );
            ApiError::new(Code::DriverTimeout, message).cause(cause).hint(
                "find the cause with `gpushctl status` and `dmesg | grep -i -e nvrm -e xid`; if the worker does not end, reboot the host",
            )
        };
        match tokio::time::timeout(WORKER_EXIT_TIMEOUT, self.context.hardware.stop()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(hangs(error.to_string())),
            Err(_) => Err(hangs(format!("the driver worker did not end within {}s", WORKER_EXIT_TIMEOUT.as_secs()))),
        }
    }
}

fn in_use(attempt: &str, index: Option<GpuIndex>, uuid: &GpuUuid, holder: &Holder) -> ApiError {
    let gpu = index.map_or_else(|| format!("GPU {uuid}"), |index| format!("GPU {index} ({uuid})"));
    let error = ApiError::new(Code::Conflict, format!("{attempt}: {holder} is changing {gpu}"))
        .cause("gpushd must first close its driver handles of all GPUs, but the change still needs the driver handle of its GPU");
    let error = match holder {
        Holder::Operation(id) => error.hint(format!("wait for it with `gpushctl operation wait {id}`, then try again")),
        Holder::Planning => error.hint("try again in a moment"),
    };
    error.retryable()
}

/// Returns the error for leases that block maintenance or the resets; `None` if no lease does.
fn leased(attempt: &str, leases: &LeaseTable, resets: &[GpuUuid]) -> Option<ApiError> {
    let concerns = |lease: &&OpenLease| {
        resets.is_empty() || lease.record.members.iter().any(|member| resets.contains(&member.gpu_uuid))
    };
    let blocking: Vec<&OpenLease> = leases.holding().filter(concerns).collect();
    let hint = usage::hint(blocking.iter().map(|lease| lease.record.id))?;
    let causes: Vec<String> = blocking.iter().map(|lease| lease.describe()).collect();
    let message = format!("{attempt}: {} in use", words::leases_clause(causes.len()));
    Some(ApiError { causes, ..ApiError::new(Code::Blocked, message).hint(hint).retryable() })
}

fn change_event(action: &str, request: &Request, resets: &[GpuUuid]) -> Reported {
    Reported {
        action: action.to_owned(),
        object: host(),
        by: Some(request.by.clone()),
        reason: request.reason.clone(),
        gpu_uuids: resets.to_vec(),
    }
}

/// Returns the object of the audit records.
fn host() -> String {
    "host".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_reset_names_the_gpu_the_operation_and_the_reason() {
        let holder = Holder::Operation("op-3".to_owned());
        let error = in_use("cannot reset GPU 6", Some(GpuIndex(2)), &"GPU-2".into(), &holder);
        assert!(error.retryable && error.message.starts_with("cannot reset GPU 6: operation op-3 is changing GPU 2"));
        assert!(error.causes[0].contains("driver handles of all GPUs"), "{error:?}");
        assert!(error.hint.is_some_and(|hint| hint.contains("gpushctl operation wait op-3")));
    }
}
