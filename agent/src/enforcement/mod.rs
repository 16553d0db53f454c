//! Device access: the kernel denies the GPUs to login sessions, and the scope of a lease opens its own.
//!
//! ```text
//! enforce on ─► DeviceAllow= of user.slice, without the GPUs ─► check ─► state: verified
//!                 systemd keeps it in /etc/systemd/system.control         ▲   ├ unverified, with the reason
//!                                                                         │   └ off
//! start, every hour, request, daemon-reload, other rules, Slurm starts ───┘
//! ```
//!
//! The setting belongs to systemd, so nothing opens while gpushd is down. gpushd believes no setting: a check runs
//! programs that try to open a GPU ([`probe`]). `lease = "enforced"` in a rule is a wish; the state says whether the host
//! fulfills it.
//!
//! | file | subject |
//! |---|---|
//! | `host_part` | the units that deny the GPUs: reads, sets and opens them |
//! | `probe` | programs that try to open a GPU |
//! | `slurm_jobs` | the scope of Slurm jobs, which denies some GPUs |
//! | `plan` | what the setting changes on this host |
//! | `sessions` | processes of login sessions that use a GPU |

mod host_part;
mod plan;
mod probe;
mod sessions;
mod slurm_jobs;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{
    ApiError, Code, DeviceEnforcement, DeviceProbe, EnforcedUnit, EnforcementPlan, EnforcementState, GpuIndex,
    ProbePlace, ProbeResult,
};
use gpush_core::lease::access::{self, NoDeviceAccess, Nodes};
use gpush_host::{
    capability_files,
    systemd::{self, Manager},
};
use gpush_store::AuditEvent;
use jiff::Timestamp;
use tokio::{sync::Mutex, task::JoinHandle};

use crate::{
    requests::request::Request,
    state::{HostState, context::HostContext},
    system::tasks::TaskName,
};

/// Interval between two checks.
const INTERVAL: Duration = Duration::from_secs(3600);

/// Pause before gpushd subscribes to systemd's signals again after the connection failed.
const RETRY: Duration = Duration::from_secs(10);

/// Interval between two checks while the last one could not verify the host.
const INTERVAL_UNVERIFIED: Duration = Duration::from_secs(60);

/// How often gpushd repeats a probe that could not run, and the pause before.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// Age up to which an answer shows the last check instead of a new one.
const CURRENT: Duration = Duration::from_secs(10);

/// How to let the kernel deny the GPUs.
const TURN_ON: &str = "see `gpushctl enforce plan`, and then run `gpushctl enforce on` (administrator)";

/// Whether the kernel denies the GPUs to login sessions. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Enforcement(Arc<EnforcementParts>);

#[derive(Debug)]
struct EnforcementParts {
    context: Arc<HostContext>,
    /// systemd; an error if this gpushd cannot change its units.
    manager: Result<Arc<Manager>, &'static str>,
    /// Locked while units are changed or probed.
    lock: Mutex<()>,
}

impl Enforcement {
    pub(crate) fn new(context: Arc<HostContext>, manager: Result<Arc<Manager>, &'static str>) -> Self {
        Self(Arc::new(EnforcementParts { context, manager, lock: Mutex::default() }))
    }

    /// Starts the task that checks at the start, at intervals, after each reload of systemd's units, when slurmstepd's scope
    /// starts, and when the GPUs change that Slurm jobs must not open.
    pub(crate) fn spawn(&self) -> JoinHandle<()> {
        let own = self.clone();
        self.0.context.tasks.spawn(TaskName::DeviceEnforcement, move || own.clone().run())
    }

    async fn run(self) {
        let stopping = self.0.context.stopping.clone();
        loop {
            // Subscribe before the check, so that no reload is missed.
            let changes = match &self.0.manager {
                Ok(manager) => Some(manager.unit_changes(slurm_jobs::SCOPE).await),
                Err(_) => None,
            };
            let mut snapshots = self.0.context.state.watch();
            let denied = slurm_jobs::denied_gpus(&snapshots.borrow_and_update());
            let mut changed = std::pin::pin!(async {
                match changes {
                    Some(Ok(mut changes)) => match changes.next().await {
                        Ok(()) => {}
                        Err(_) => tokio::time::sleep(RETRY).await,
                    },
                    Some(Err(_)) => tokio::time::sleep(RETRY).await,
                    None => std::future::pending().await,
                }
            });
            // Read the signals during the check too. If they are not read, no answer of systemd arrives after a while.
            let mut check = std::pin::pin!(self.check());
            let is_changed = tokio::select! {
                () = &mut check => false,
                () = &mut changed => true,
            };
            if is_changed {
                check.await;
                continue;
            }
            let interval = {
                let found = &self.0.context.state.now().enforcement;
                match found.state {
                    EnforcementState::Off if self.0.manager.is_ok() && found.units.is_empty() => INTERVAL_UNVERIFIED,
                    EnforcementState::Unverified => INTERVAL_UNVERIFIED,
                    EnforcementState::Off | EnforcementState::Verified => INTERVAL,
                }
            };
            let others_denied = async {
                let _ = snapshots.wait_for(|host| slurm_jobs::denied_gpus(host) != denied).await;
            };
            tokio::select! {
                () = &mut changed => {}
                () = others_denied => {}
                () = tokio::time::sleep(interval) => {}
                () = stopping.cancelled() => return,
            }
        }
    }

    /// Returns the result of the last check, for the present rules.
    fn last(&self) -> DeviceEnforcement {
        let host = self.0.context.state.now();
        let mut shown = DeviceEnforcement::clone(&host.enforcement);
        (shown.enforced_gpus, shown.other_gpus) = gpus_by_rule(&host);
        if shown.state == EnforcementState::Off {
            shown.other_gpus.clear();
        }
        shown
    }

    /// Returns whether the kernel denies the GPUs. Checks again if the last check is old.
    pub(crate) async fn status(&self) -> DeviceEnforcement {
        if !self.is_current() {
            let _lock = self.0.lock.lock().await;
            // Another caller may have waited for the same check.
            if !self.is_current() {
                self.check_locked().await;
            }
        }
        self.last()
    }

    /// Returns whether the last check is recent enough for an answer.
    fn is_current(&self) -> bool {
        let checked_at = self.0.context.state.now().enforcement.checked_at;
        let age = checked_at.map(|at| Timestamp::now().duration_since(at).unsigned_abs());
        age.is_some_and(|age| age <= CURRENT)
    }

    /// Runs the first check after the start of gpushd, or waits until it has ended.
    pub(crate) async fn known(&self) {
        if self.0.context.state.now().enforcement.checked_at.is_none() {
            let _lock = self.0.lock.lock().await;
            if self.0.context.state.now().enforcement.checked_at.is_none() {
                self.check_locked().await;
            }
        }
    }

    /// Returns whether a rule enforces leases.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.context.state.config().rules.iter().any(is_rule_enforced)
    }

    /// Checks whether the kernel denies the GPUs to login sessions, and stores the result.
    async fn check(&self) {
        let _lock = self.0.lock.lock().await;
        self.check_locked().await;
    }

    /// Checks while the lock is held.
    async fn check_locked(&self) {
        let before = self.0.context.state.now().enforcement.state;
        let mut found = self.found().await;
        found.checked_at = Some(Timestamp::now());
        let reason = found.reason.clone().unwrap_or_default();
        match (before, found.state) {
            (before, now) if before == now => {}
            (_, EnforcementState::Verified) => tracing::info!("the kernel denies the GPUs to login sessions"),
            (EnforcementState::Verified, EnforcementState::Off) => {
                tracing::error!("the kernel no longer denies the GPUs to login sessions: {reason}");
            }
            (_, EnforcementState::Unverified) => {
                tracing::warn!("cannot verify that the kernel denies the GPUs to login sessions: {reason}");
            }
            (_, EnforcementState::Off) => {
                tracing::info!("the kernel does not deny the GPUs to login sessions: {reason}");
            }
        }
        self.0.context.state.set_enforcement(found);
    }

    async fn found(&self) -> DeviceEnforcement {
        let off = |reason: String| DeviceEnforcement { reason: Some(reason), ..DeviceEnforcement::default() };
        let manager = match &self.0.manager {
            Ok(manager) => manager,
            Err(reason) => return off((*reason).to_owned()),
        };
        let read = async { Ok((manager.version().await?, host_part::read(manager).await?)) };
        let (systemd_version, units) = match read.await {
            Ok(read) => read,
            Err(error) => return self.unread(&error),
        };
        let found = DeviceEnforcement { systemd_version, units, ..DeviceEnforcement::default() };
        let is_on = host_part::denies_sessions(&found.units);
        let jobs = self.limit_jobs(manager, is_on).await;
        if !is_on {
            let reason = host_part::unsupported(systemd_version, manager.is_unified())
                .unwrap_or_else(|| format!("`DeviceAllow=` of {} does not deny the GPUs", access::SESSIONS));
            return DeviceEnforcement { reason: Some(reason), ..found };
        }
        let mut probes = probe::all(manager, &self.0.context).await;
        // While systemd executes itself again, it starts no unit.
        for _ in 0..ATTEMPTS {
            if probes.iter().all(|probe| probe.result != ProbeResult::Failed) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            probes = probe::all(manager, &self.0.context).await;
        }
        let reason = host_part::unsupported(systemd_version, manager.is_unified())
            .or_else(|| unverified(&probes))
            .or_else(|| host_part::open_unit(&found.units));
        let (jobs, open_jobs) = match jobs {
            Ok(jobs) => {
                let reason = slurm_jobs::unlimited(&jobs);
                (jobs, reason)
            }
            Err(error) => (Vec::new(), Some(error.in_full())),
        };
        let reason = reason.or_else(|| open_jobs.map(|why| format!("Slurm jobs may open GPUs without a lease: {why}")));
        let state = if reason.is_none() { EnforcementState::Verified } else { EnforcementState::Unverified };
        let units = found.units.iter().cloned().chain(jobs).collect();
        DeviceEnforcement { state, reason, probes, units, ..found }
    }

    /// Returns what is known after systemd did not answer. If the units denied the GPUs before, they still do.
    fn unread(&self, error: &systemd::Error) -> DeviceEnforcement {
        let reason = Some(error.in_full());
        let before = DeviceEnforcement::clone(&self.0.context.state.now().enforcement);
        match before.state {
            EnforcementState::Off => DeviceEnforcement { reason, ..DeviceEnforcement::default() },
            EnforcementState::Unverified | EnforcementState::Verified => {
                DeviceEnforcement { state: EnforcementState::Unverified, reason, probes: Vec::new(), ..before }
            }
        }
    }

    /// Denies the GPUs to Slurm jobs that need a lease and do not belong to Slurm; if the host does not enforce leases,
    /// opens them. Returns the limited scopes.
    async fn limit_jobs(&self, manager: &Manager, is_on: bool) -> Result<Vec<EnforcedUnit>, systemd::Error> {
        let denied = if is_on { slurm_jobs::denied_gpus(&self.0.context.state.now()) } else { Some(BTreeSet::new()) };
        match denied {
            Some(denied) => slurm_jobs::limit(manager, &self.0.context.host_services.proc, &denied).await,
            // The driver has not answered yet. What was set before stays.
            None => Ok(Vec::new()),
        }
    }

    /// Returns what `on` changes on this host.
    ///
    /// # Errors
    /// If systemd does not answer.
    pub(crate) async fn plan(&self) -> Result<EnforcementPlan, ApiError> {
        let manager = match &self.0.manager {
            Ok(manager) => manager,
            Err(reason) => {
                return Ok(EnforcementPlan { unsupported: Some((*reason).to_owned()), ..EnforcementPlan::default() });
            }
        };
        plan::of_host(manager, &self.0.context).await
    }

    /// Lets the kernel deny the GPUs to login sessions, and to the services that run jobs of users.
    ///
    /// # Errors
    /// If this host cannot do so. If graphical sessions use a GPU, and `force` is not set. If systemd refuses, or the
    /// change cannot be recorded.
    pub(crate) async fn turn_on(&self, request: Request, force: bool) -> Result<DeviceEnforcement, ApiError> {
        let _lock = self.0.lock.lock().await;
        let manager = self.manager()?;
        let version = manager.version().await.map_err(|error| host_part::failed(&error))?;
        if let Some(reason) = host_part::unsupported(version, manager.is_unified()) {
            return Err(ApiError::new(Code::Unsupported, "this host cannot enforce leases").cause(reason));
        }
        if !force && let Some(error) = plan::graphical_sessions(&self.0.context).await {
            return Err(error);
        }
        let units = match host_part::deny(manager).await {
            Ok(units) => units,
            Err(error) => return Err(self.failed_change(&error).await),
        };
        let (changed, object) = (units.clone(), access::SESSIONS.to_owned());
        let recorded = request.recorded(object, |reason| AuditEvent::EnforceOn { units, forced: force, reason });
        self.0.context.store.write(recorded).await?;
        tracing::info!("`DeviceAllow=` of {} denies the GPUs now", changed.join(", "));
        self.check_locked().await;
        Ok(self.last())
    }

    /// Lets login sessions open the GPUs again.
    ///
    /// # Errors
    /// If systemd refuses, or the change cannot be recorded.
    pub(crate) async fn turn_off(&self, request: Request) -> Result<DeviceEnforcement, ApiError> {
        let _lock = self.0.lock.lock().await;
        let manager = self.manager()?;
        let units = match host_part::open(manager).await {
            Ok(units) => units,
            Err(error) => return Err(self.failed_change(&error).await),
        };
        let (changed, object) = (units.clone(), access::SESSIONS.to_owned());
        let recorded = request.recorded(object, |reason| AuditEvent::EnforceOff { units, reason });
        self.0.context.store.write(recorded).await?;
        if !changed.is_empty() {
            tracing::info!("processes of {} can open the GPUs now", changed.join(", "));
        }
        self.check_locked().await;
        Ok(self.last())
    }

    /// Returns the error of a change that failed. A failed change may have changed some units. So gpushd checks the host
    /// again, and the error names the units that deny the GPUs now.
    async fn failed_change(&self, error: &systemd::Error) -> ApiError {
        self.check_locked().await;
        let units = self.last().units;
        let denied: Vec<&str> = units.iter().filter(|unit| unit.denies_gpus).map(|unit| unit.unit.as_str()).collect();
        let failed = host_part::failed(error);
        match denied.as_slice() {
            [] => failed,
            denied => failed.cause(format!("`DeviceAllow=` of {} denies the GPUs now", denied.join(", "))),
        }
    }

    fn manager(&self) -> Result<&Arc<Manager>, ApiError> {
        self.0.manager.as_ref().map_err(|reason| {
            ApiError::new(Code::Unsupported, "this gpushd cannot change which devices login sessions may open")
                .cause((*reason).to_owned())
                .hint("run gpushd as the system service: `systemctl enable --now gpushd.socket gpushd.service`")
        })
    }

    /// Returns whether the scopes of leases have a list of devices: if the kernel denies the GPUs to sessions, or a rule
    /// wishes it. Without a list, the scope of a lease of one GPU could open all GPUs, because it is not in `user.slice`.
    pub(crate) fn limits_scopes(&self) -> bool {
        self.0.manager.is_ok() && (self.is_installed() || self.is_wanted())
    }

    /// Returns whether the units of the host deny the GPUs.
    pub(crate) fn is_installed(&self) -> bool {
        self.0.context.state.now().enforcement.state != EnforcementState::Off
    }

    /// Returns why gpushd grants no leases of GPUs whose rule enforces them; `None` if it grants them.
    pub(crate) fn missing(&self) -> Option<String> {
        let host = self.0.context.state.now();
        match host.enforcement.state {
            EnforcementState::Verified => None,
            EnforcementState::Off | EnforcementState::Unverified => {
                let reason = host.enforcement.reason.clone();
                Some(reason.unwrap_or_else(|| "gpushd has not checked the device access yet".to_owned()))
            }
        }
    }

    /// Returns the problem of a host on which a rule enforces leases, but the kernel does not deny the GPUs.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        let host = self.0.context.state.now();
        let (enforced, _) = gpus_by_rule(&host);
        let Some(reason) = self.missing().filter(|_| !enforced.is_empty()) else { return Vec::new() };
        // Until the first check has ended, no problem is known.
        if host.enforcement.checked_at.is_none() {
            return Vec::new();
        }
        let message = format!("leases of {} are not enforced", access::named(&enforced));
        vec![ApiError::new(Code::Unsupported, message).cause(reason).hint(TURN_ON)]
    }

    /// Returns the nodes that the processes of a lease need, from its members.
    ///
    /// # Errors
    /// If a device of the lease is not known, or the driver's files cannot be read.
    pub(crate) async fn nodes(&self, members: Vec<gpush_api::LeaseMember>) -> Result<Nodes, ApiError> {
        let proc = self.0.context.host_services.proc.clone();
        let read = move || capability_files::read(&proc).map(|found| (found, capability_files::kernel_majors()));
        let read = gpush_host::subtask::blocking(read).await;
        let (capabilities, majors) =
            read.ok_or_else(|| ApiError::stopping("gpushd is stopping"))?.map_err(|error| {
                ApiError::new(Code::Internal, "cannot read the capabilities of MIG devices").cause(error.to_string())
            })?;
        let host = self.0.context.state.now();
        let gpus: Vec<&gpush_api::Gpu> = host.gpus.iter().map(|gpu| &gpu.gpu).collect();
        access::nodes(&members, &gpus, &capabilities, majors).map_err(|error| no_access(&error))
    }
}

/// Returns whether a rule enforces leases.
fn is_rule_enforced(rule: &gpush_core::config::Rule) -> bool {
    rule.lease.is_some_and(|terms| terms.is_enforced())
}

/// Returns the GPUs whose rules enforce leases, and the other GPUs.
fn gpus_by_rule(host: &HostState) -> (Vec<GpuIndex>, Vec<GpuIndex>) {
    let is_enforced = |gpu: &crate::state::GpuSnapshot| {
        gpu.rule.and_then(|position| host.config.rules.get(position)).is_some_and(is_rule_enforced)
    };
    let indexes = |wanted: bool| {
        let gpus = host.gpus.iter().filter(|gpu| is_enforced(gpu) == wanted);
        gpus.map(|gpu| gpu.gpu.index).collect()
    };
    (indexes(true), indexes(false))
}

/// Returns why the probes do not show that the kernel denies the GPUs; `None` if they show it.
fn unverified(probes: &[DeviceProbe]) -> Option<String> {
    let of = |place: ProbePlace| probes.iter().find(|probe| probe.place == place);
    for place in [ProbePlace::Session, ProbePlace::OtherLease] {
        let Some(probe) = of(place) else { return Some(format!("no probe ran {}", place.describe())) };
        match probe.result {
            ProbeResult::Denied => {}
            ProbeResult::Allowed => {
                return Some(format!("a program {} could open {}", place.describe(), probe.device));
            }
            ProbeResult::Failed => {
                let why = probe.reason.as_deref().unwrap_or("it ended with an unknown status");
                return Some(format!("the probe {} failed: {why}", place.describe()));
            }
        }
    }
    // Without this probe, the host could deny the creation of device nodes to all programs.
    match of(ProbePlace::Service) {
        Some(DeviceProbe { result: ProbeResult::Denied, device, .. }) => {
            Some(format!("a program in a service could not open {device} either, so the other probes show nothing"))
        }
        _ => None,
    }
}

fn no_access(error: &NoDeviceAccess) -> ApiError {
    ApiError::new(Code::Unavailable, "cannot determine which devices the lease may open")
        .cause(error.to_string())
        .hint("try again; if the error remains, see `gpushctl enforce status`")
        .retryable()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(place: ProbePlace, result: ProbeResult) -> DeviceProbe {
        DeviceProbe { place, device: "/dev/nvidia0".to_owned(), result, reason: None }
    }

    #[test]
    fn only_denied_probes_verify_the_host() {
        use ProbePlace::{OtherLease, Service, Session};
        use ProbeResult::{Allowed, Denied, Failed};
        let of = |results: &[(ProbePlace, ProbeResult)]| {
            unverified(&results.iter().map(|(place, result)| probe(*place, *result)).collect::<Vec<_>>())
        };
        assert_eq!(of(&[(Session, Denied), (OtherLease, Denied)]), None);
        assert_eq!(of(&[(Session, Denied), (OtherLease, Denied), (Service, Allowed)]), None);
        for (results, why) in [
            (&[][..], "no probe ran in user.slice"),
            (&[(Session, Denied)][..], "no probe ran in the scope of another lease"),
            (&[(Session, Allowed), (OtherLease, Denied)][..], "a program in user.slice could open /dev/nvidia0"),
            (&[(Session, Denied), (OtherLease, Failed)][..], "the probe in the scope of another lease failed"),
            (&[(Session, Denied), (OtherLease, Denied), (Service, Denied)][..], "a program in a service could not"),
        ] {
            assert!(of(results).is_some_and(|found| found.starts_with(why)), "{why}: {:?}", of(results));
        }
    }
}
