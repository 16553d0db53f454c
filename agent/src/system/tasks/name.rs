//! The names of all background tasks, and how gpushd treats a failure of each.

use gpush_api::TaskKind;

/// Declares [`TaskName`], so that each name has exactly one text and one kind.
macro_rules! task_names {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $kind:ident;)*) => {
        /// The name of a background task.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) enum TaskName {
            $($(#[$doc])* $name,)*
        }

        impl TaskName {
            /// All names.
            pub(crate) const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the name in the log and in the API.
            pub(crate) const fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Returns how gpushd treats a failure of the task.
            pub(crate) const fn kind(self) -> TaskKind {
                match self {
                    $(Self::$name => TaskKind::$kind,)*
                }
            }
        }
    };
}

task_names! {
    /// Handles the driver's events, and reads the GPUs periodically.
    Monitor = "monitor", Service;
    /// Looks up the users and groups of the config.
    UserLookup = "user_lookup", Service;
    /// Notifies the watchdog of systemd.
    Watchdog = "watchdog", Service;
    /// Applies layouts after a boot, and repairs drift.
    StartupLayouts = "startup_layouts", Service;
    /// Ends overrides that expire.
    OverrideExpiry = "override_expiry", Service;
    /// Starts and stops MPS daemons as desired.
    MpsReconciler = "mps_reconciler", Service;
    /// Ends leases whose GPU or MIG device is gone.
    LostLeases = "lost_leases", Service;
    /// Checks whether the kernel denies the GPUs to login sessions.
    DeviceEnforcement = "device_enforcement", Service;
    /// Keeps the devices of the scopes of leases up to date.
    LeaseDevices = "lease_devices", Service;
    /// Tells holders of leases about cordoned GPUs and MPS daemons that stopped serving.
    LeaseWarnings = "lease_warnings", Service;
    /// Warns the holders of unused leases, and ends unused leases.
    LeasePolicies = "lease_policies", Service;
    /// Takes samples of the GPUs, and accounts what leases use.
    UsageSampler = "usage_sampler", Service;
    /// Writes files with the jobs on each GPU.
    JobFiles = "job_files", Service;
    /// Runs the hook for notices.
    NoticeHook = "notice_hook", Service;
    /// Decides about the operations and leases that wait.
    Scheduler = "scheduler", Service;
    /// Keeps the settings of time-sliced GPUs.
    TimesliceReconciler = "timeslice_reconciler", Service;
    /// Restores compute modes that no MPS daemon needs any more.
    ComputeModes = "compute_modes", Service;
    /// Finds processes without a lease.
    UnleasedProcesses = "unleased_processes", Service;
    /// Owns a lease until its end.
    Lease = "lease", PerObject;
    /// Supervises an MPS daemon.
    MpsDaemon = "mps_daemon", PerObject;
    /// Starts the services that an operation stopped and could not start again.
    ServiceStart = "service_start", PerObject;
    /// Ends an operation whose task has failed, or cleans up after an operation of an earlier gpushd.
    OperationCleanup = "operation_cleanup", PerObject;
    /// Records the end of an operation until the record succeeds.
    OperationRecord = "operation_record", PerObject;
    /// Accepts connections to `gpushd.sock`.
    PublicSocket = "public_socket", Final;
    /// Accepts connections to `admin.sock`.
    AdminSocket = "admin_socket", Final;
    /// Manages the driver worker.
    DriverSupervisor = "driver_supervisor", Final;
    /// Serves a connection.
    Connection = "connection", OneShot;
    /// Handles a request, until its answer is composed or its change is recorded.
    Request = "request", OneShot;
    /// Sends events to a client.
    EventStream = "event_stream", OneShot;
    /// Executes an operation, or waits in the queue until it can begin.
    Operation = "operation", OneShot;
    /// Makes capacity available that was reserved for a request.
    FreedCapacity = "freed_capacity", OneShot;
    /// Logs the number of refused requests of an account.
    RefusalLog = "refusal_log", OneShot;
    /// Reads a GPU.
    GpuReading = "gpu_reading", OneShot;
    /// Runs `nvidia-smi compute-policy`.
    TimesliceCommand = "timeslice_command", OneShot;
    /// Wakes a reconciler after a pause, or when a GPU is free.
    ReconcilerWakeup = "reconciler_wakeup", OneShot;
    /// Ends MPS daemons whose directories are gone.
    MpsOrphans = "mps_orphans", OneShot;
}

impl TaskName {
    /// Returns the task with this name.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn named(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|name| name.text() == text)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn task_names_are_unique_and_found_by_their_text() {
        let texts: BTreeSet<&str> = TaskName::ALL.iter().map(|name| name.text()).collect();
        assert_eq!(texts.len(), TaskName::ALL.len());
        for name in TaskName::ALL {
            assert_eq!(TaskName::named(name.text()), Some(*name));
        }
        assert_eq!(TaskName::named("other"), None);
    }
}
