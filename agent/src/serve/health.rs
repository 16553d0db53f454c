//! The health of the host: all problems, each with its cause and a hint.
//!
//! gpushd runs as long as it can serve requests, and reports its problems here. A GPU whose layout
//! differs from the config does not degrade health; gpushd shows this drift for each GPU instead.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Driver, GpuIndex, GpuState, Health as Report, HealthStatus, Mode};
use gpush_host::{other_managers, subtask};
use gpush_nvml::DriverError;

use crate::{
    operations::recover,
    reconcile::startup::Startup,
    requests::caller::Viewer,
    state::{Observed, Reason, context::HostContext, no_driver, redact, unidentified, words},
};

/// Maximum wait for the answer of the driver.
const WAIT: Duration = Duration::from_millis(500);

/// Returns the problems of one part of gpushd.
pub(crate) type Check = Box<dyn Fn() -> Vec<ApiError> + Send + Sync>;

/// Composes the health of the host. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Health(Arc<Sources>);

/// The sources of the health report.
pub(crate) struct Sources {
    pub(crate) context: Arc<HostContext>,
    /// Provides the errors of the layouts that gpushd applied when it started.
    pub(crate) startup: Startup,
    /// Root of the host's file system, where gpushd looks for other managers.
    pub(crate) host_root: PathBuf,
    /// Returns the errors of the config file. Their causes contain lines of the file, so only administrators see them.
    pub(crate) config: Check,
    /// Returns whether the config file has changed since gpushd loaded it.
    pub(crate) config_file_changed: Box<dyn Fn() -> bool + Send + Sync>,
    /// Checks of the other parts of gpushd, in the order of the report.
    pub(crate) checks: Vec<Check>,
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").field("checks", &self.checks.len()).finish_non_exhaustive()
    }
}

impl Health {
    pub(crate) fn new(sources: Sources) -> Self {
        Self(Arc::new(sources))
    }

    /// Returns the driver.
    ///
    /// # Errors
    /// If there is no driver, it does not answer in time, or the host is in maintenance.
    pub(crate) async fn driver(&self) -> Result<Driver, DriverError> {
        let HostContext { state, hardware, .. } = &*self.0.context;
        if state.maintenance().is_some() {
            return Err(DriverError::new(gpush_nvml::ErrorKind::Stopped, "querying the driver"));
        }
        let starting = || {
            let status = hardware.status();
            let missing = || {
                DriverError::new(gpush_nvml::ErrorKind::WorkerUnavailable, "querying the driver")
                    .detail("the driver has not answered yet")
            };
            status.driver.ok_or_else(|| status.failure.unwrap_or_else(missing))
        };
        tokio::time::timeout(WAIT, hardware.driver()).await.unwrap_or_else(|_| starting())
    }

    /// Returns the report for `viewer`.
    pub(crate) async fn report(&self, viewer: Viewer) -> Report {
        let HostContext { state, readings, tasks, .. } = &*self.0.context;
        let driver = self.driver().await;
        let simulated = driver.as_ref().is_ok_and(|driver| driver.simulated);
        // Use a blocking thread, because some checks read cgroups or files.
        let sources = Arc::clone(&self.0);
        let check = move || {
            let problems: Vec<ApiError> = sources.checks.iter().flat_map(|check| check()).collect();
            (problems, (sources.config_file_changed)())
        };
        let (problems, config_file_changed) = subtask::blocking(check).await.unwrap_or_default();
        let mut causes = (self.0.config)();
        if !viewer.is_admin() {
            causes.iter_mut().for_each(redact::config_error);
        }
        causes.extend(problems);
        let mut count = 0;
        let mut maintenance = state.maintenance();
        if let Some(maintenance) = &mut maintenance {
            causes.push(words::refusal(maintenance));
            if let Some(by) = &mut maintenance.by {
                redact::actor(by, viewer);
            }
        }
        match (&driver, readings.host().await) {
            (_, observed) if maintenance.is_some() => {
                let gpus = observed.map(|observed| observed.gpus(viewer)).unwrap_or_default();
                count = gpus.iter().filter(|gpu| gpu.state != GpuState::Lost).count();
                causes.extend(state.now().lost.as_ref().map(|lost| recover::health(lost, &gpus)));
            }
            (Err(error), _) => causes.push(no_driver(error)),
            (Ok(_), Err(error)) => causes.push(error),
            (Ok(_), Ok(observed)) => count = self.check_gpus(&observed, viewer, &mut causes),
        }
        causes.extend(self.stuck_workers());
        Report {
            status: if causes.is_empty() { HealthStatus::Ok } else { HealthStatus::Degraded },
            errors: causes,
            simulated,
            maintenance,
            gpu_count: u32::try_from(count).unwrap_or(u32::MAX),
            layouts_at_start: self.0.startup.layouts(),
            config_file_changed,
            pid: std::process::id(),
            tasks: tasks.report(viewer.is_admin()),
        }
    }

    /// Adds the problems of the GPUs to `causes`. Returns the number of GPUs.
    fn check_gpus(&self, observed: &Observed, viewer: Viewer, causes: &mut Vec<ApiError>) -> usize {
        let Sources { context, startup, host_root, .. } = &*self.0;
        let state = &context.state;
        let nameless = &observed.host.nameless;
        causes.extend(nameless.iter().map(|(index, error)| unidentified(*index, error)));
        let gpus = observed.gpus(viewer);
        causes.extend(state.now().lost.as_ref().map(|lost| recover::health(lost, &gpus)));
        let of_driver = |gpu: &gpush_api::Gpu| {
            let known = observed.host.gpus.iter().find(|known| known.gpu.uuid == gpu.uuid)?;
            known.reasons.iter().find_map(Reason::driver_error)
        };
        causes.extend(gpus.iter().filter_map(|gpu| gpu_problem(gpu, of_driver(gpu))));
        if gpus.iter().any(|gpu| gpu.mode == Mode::Mig)
            && let Some(manager) = other_managers::mig_manager(host_root)
        {
            causes.push(manager.error("gpushd does not change the layouts of GPUs in mode `mig`"));
        }
        causes.extend(startup.troubles(&state.now()));
        nameless.len() + gpus.iter().filter(|gpu| gpu.state != GpuState::Lost).count()
    }

    /// Returns an error for each driver worker that gpushd has killed but that still hangs in the
    /// kernel.
    fn stuck_workers(&self) -> Vec<ApiError> {
        let abandoned = self.0.context.hardware.status().abandoned;
        let stuck = abandoned.iter().filter(|worker| worker.stuck).map(|worker| {
            let pid = worker.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
            ApiError::new(
                Code::DriverTimeout,
                format!("gpushd's driver worker (pid {pid}) was killed, but hangs in the kernel"),
            )
            .cause(worker.calls.join(", "))
            .hint("only a reboot can end this driver worker; gpushd uses another one for the other GPUs")
        });
        stuck.collect()
    }
}

/// Returns the hint for a GPU that cannot be read. If the driver gave a reason that has a remedy, such as a missing
/// permission, the hint is that remedy.
fn reading_hint(index: GpuIndex, error: Option<&DriverError>) -> String {
    let remedy = error.filter(|error| !error.may_land()).and_then(|error| error.to_api().hint);
    remedy.unwrap_or_else(|| {
        format!(
            "check it again with `gpushctl gpu show {index}`; if it stays unknown, see `dmesg | grep -i -e nvrm -e xid`"
        )
    })
}

/// Cause of the cordon after Xid 79: the GPU has fallen off the bus. A reset does not bring it back.
const OFF_BUS: &str = "xid-79";

/// Returns the problem of a GPU; `None` if it has none. `error` is the error of the last reading.
fn gpu_problem(gpu: &gpush_api::Gpu, error: Option<&DriverError>) -> Option<ApiError> {
    let index = gpu.index;
    let (code, what, hint) = match gpu.state {
        // A cordon degrades health only if gpushd has set it because of a fault that the driver
        // reported.
        GpuState::Cordoned | GpuState::Ready | GpuState::Changing => {
            let own = gpu.cordons.iter().any(|cordon| cordon.by.is_none());
            if !own {
                return None;
            }
            let is_off_bus = gpu.cordons.iter().any(|cordon| cordon.cause == OFF_BUS);
            (
                Code::DriverError,
                "is cordoned because the driver reported a fault",
                if is_off_bus {
                    format!(
                        "{}; then uncordon it with `gpushctl gpu uncordon {index}` (administrator)",
                        gpush_api::LOST_GPU_HINT
                    )
                } else {
                    format!(
                        "drain it with `gpushctl gpu drain {index}`, reset it with `gpushctl gpu reset {index}`, and \
                         uncordon it with `gpushctl gpu uncordon {index}` (administrator)"
                    )
                },
            )
        }
        // These states are reported once for the whole host.
        GpuState::Held | GpuState::Maintenance => return None,
        GpuState::Degraded => (
            Code::DriverError,
            "is degraded",
            format!(
                "see its instances with `gpushctl gpu show {index}`, then apply a layout: `gpushctl mig apply --gpu \
                {index}{}` (administrator)",
                // If no rule applies to the GPU, the user must choose the layout.
                if gpu.layout.is_some() { "" } else { " --layout ENTRIES" }
            ),
        ),
        GpuState::Unknown => (Code::DriverTimeout, "is in an unknown state", reading_hint(index, error)),
        GpuState::Lost => (Code::GpuLost, "is lost", gpush_api::LOST_GPU_HINT.to_owned()),
    };
    let mut error = ApiError::new(code, format!("GPU {index} ({}) {what}", gpu.uuid)).hint(hint);
    error.causes.clone_from(&gpu.reasons);
    Some(error)
}

#[cfg(test)]
mod tests {
    use gpush_api::Cordon;
    use gpush_nvml::ErrorKind;

    use super::*;

    /// Fault: after Xid 79 the hint was to reset the GPU, which has fallen off the bus.
    #[test]
    fn reset_is_no_hint_for_a_gpu_off_the_bus() {
        let hint = |cause: &str| {
            let mut gpu = gpush_core::preset::gpus("dgx-a100").unwrap().swap_remove(0);
            let (reason, since) = (String::new(), jiff::Timestamp::UNIX_EPOCH);
            gpu.cordons.push(Cordon { cause: cause.to_owned(), reason, by: None, since });
            gpu_problem(&gpu, None).unwrap().hint.unwrap()
        };
        assert!(hint("xid-95").contains("`gpushctl gpu reset 0`"), "{}", hint("xid-95"));
        let off = hint("xid-79");
        assert!(off.contains("reboot the host") && off.contains("uncordon 0") && !off.contains("gpu reset"), "{off}");
    }

    /// Fault: if the driver refused a reading, the hint was to read the log of the kernel.
    #[test]
    fn hint_for_an_unread_gpu_is_the_remedy_of_its_error() {
        let mut gpu = gpush_core::preset::gpus("dgx-a100").unwrap().swap_remove(0);
        gpu.state = GpuState::Unknown;
        let hint = |kind: ErrorKind| {
            let error = DriverError::new(kind, "nvmlDeviceGetMigMode");
            gpu_problem(&gpu, Some(&error)).unwrap().hint.unwrap()
        };
        let denied = hint(ErrorKind::NoPermission);
        assert!(denied.contains("must run as root") && !denied.contains("dmesg"), "{denied}");
        for unexplained in [ErrorKind::Unknown, ErrorKind::Deadline { may_land: true }] {
            assert!(hint(unexplained).contains("dmesg"));
        }
    }
}
