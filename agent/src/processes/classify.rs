//! Finds the lease of each process, and the processes that have no lease.
//!
//! ```text
//! the reading of its GPU is old, or the GPU is being changed ─► not checked
//! the database was lost ──────────────────────────────────────► not checked: the leases are unknown
//! an MPS server of gpushd ────────────────────────────────────► needs no lease
//! in the scope of a lease of its user on this device, or names
//!   one in its environment, or is in the session, service or
//!   container of one ─────────────────────────────────────────► that lease
//! its user holds a lease on this device ──────────────────────► unattributed: counts for the user's oldest lease
//! `lease = "required"` for its GPU ───────────────────────────► unleased
//! another user's lease has the whole GPU or MIG device ───────► unleased, but gpushd never ends it
//! Slurm owns the GPU, and it computes outside all Slurm jobs ─► unleased, but gpushd never ends it
//! ```
//!
//! Processes of the last two kinds use a device that belongs to others. So gpushd shows them with the GPU, too.
//!
//! On the device of another user's lease, the process usually has an old environment. A MIG device that is created again at the
//! same placement has the same UUID. So the environment of an ended lease can select a device that another user now
//! has. Ids of leases never repeat. So if a process with `GPUSH_LEASE=L3` is on a device of lease L9, its environment
//! is old. A process whose environment names L9 is not reported: it may belong to lease L9 and run as another user in a
//! container.
//!
//! On a target shared through MPS, a process that bypasses the daemon is unleased, even if its cgroup belongs to a
//! lease. An unattributed process on such a target is unleased too. gpushd ends neither of them while the user of the
//! process holds a lease on the target.
//!
//! gpushd compares the user first, then the cgroup, because a process cannot fake them: the kernel reports the user,
//! and a user cannot enter a cgroup that root created. But a process can write its own environment. So gpushd accepts
//! the name of a lease in the environment only if the user of the process holds that lease.

use gpush_api::{
    Gpu, GpuProcess, GpuState, LeaseId, LeaseOwner, LeaseRequirement, LeaseTerms, Mode, MpsScope, Process, ProcessKind,
};
use gpush_host::{
    cgroup::{self, CgroupKind},
    proc,
};

use super::{Unleased, environment::EnvironmentLease};
use crate::{
    mps::{self, Place, Server, Servers, SharedTarget},
    state::{LeaseTable, OpenLease},
};

/// Why gpushd does not end a process whose user holds a lease: the process may belong to an earlier lease, or a wrapper
/// may have cleared the environment of the process.
const HOLDER: &str = "its user holds a lease";

/// Why gpushd does not end a process that may have had a lease before the database was lost.
const FORGOTTEN: &str = "it was started before the database was lost, and may have had a lease";

/// Why gpushd does not end a process in the scope of an unknown lease: only gpushd creates such scopes.
const SCOPE: &str = "it is in the scope of a lease that gpushd does not know";

/// Why gpushd does not end a process that may be in the scope of a lease.
const UNREADABLE: &str = "gpushd cannot read its cgroup";

/// Why gpushd does not end a process on the device of another user's lease.
const OPTIONAL: &str = "the rule of its GPU does not require a lease";

/// A process, and the lease that it has, or why it is unleased. `exempt` says why gpushd does not end the process
/// although it is unleased. `trespass` says why the device of the process belongs to others.
#[derive(Debug, Clone)]
pub(super) struct ClassifiedProcess {
    pub(super) process: GpuProcess,
    pub(super) exempt: Option<&'static str>,
    pub(super) trespass: Option<String>,
    /// UUID of the process's GPU or MIG device.
    pub(super) target: String,
}

/// The lease of a process, or why it is unleased.
#[derive(Debug, Default)]
pub(super) struct Attribution {
    /// Description of the MPS server, with its target; `None` for other processes.
    pub(super) serves: Option<String>,
    /// Id of the lease of the process.
    pub(super) lease: Option<String>,
    /// Whether `lease` is only a guess: the oldest lease of the process's user on this device.
    pub(super) unattributed: bool,
    /// Why the process is unleased.
    pub(super) unleased: Option<String>,
    /// Why gpushd does not end the process although it is unleased.
    pub(super) exempt: Option<&'static str>,
    /// Why the device of the process belongs to others.
    pub(super) trespass: Option<String>,
}

/// Finds the lease of a process. Contains the leases and MPS servers as they were when this value was created.
#[derive(Debug)]
pub(super) struct Classifier<'a> {
    unleased: &'a Unleased,
    table: std::sync::Arc<LeaseTable>,
    pub(super) servers: Servers,
    is_database_lost: bool,
}

impl<'a> Classifier<'a> {
    /// Creates the classifier with the current leases and MPS servers.
    pub(super) fn new(unleased: &'a Unleased) -> Self {
        Self {
            unleased,
            table: unleased.state.leases(),
            servers: unleased.mps.servers(),
            is_database_lost: unleased.state.now().lost.as_ref().is_some_and(|lost| lost.holds),
        }
    }

    /// Finds the lease of a process, or why it has none. `device` is the process's MIG device; `None` if the process is
    /// on the whole GPU, or on a GPU instance without a compute instance.
    pub(super) fn classify(&self, gpu: &Gpu, device: Option<&str>, process: &Process) -> Attribution {
        let (Some(pid), Some(uid)) = (process.pid, process.uid) else { return Attribution::default() };
        let server = self.servers.of_process(pid, process.kind, Place::Device { gpu: &gpu.uuid, device });
        let found = Attribution { serves: server.map(Server::describe), ..Attribution::default() };
        if let Some(Server::Of(_)) = server {
            return found;
        }
        let shared = mps::sharing(&self.unleased.mps, device.unwrap_or(&gpu.uuid));
        let own = self.leases_of(&gpu.uuid, device, uid);
        let named = self.lease_of(&own, pid, uid);
        let bypasses_mps = shared.is_some() && process.kind != ProcessKind::MpsClient;
        if let (EnvironmentLease::Own(lease), false) = (&named, bypasses_mps) {
            return Attribution { lease: Some(lease.clone()), ..found };
        }
        let is_checked = match &shared {
            Some(shared) => shared.is_given && is_shared_by_rule(gpu, device),
            None => device.is_some() || gpu.mode != Mode::Mps,
        };
        let is_required = self.terms(gpu).requirement_for(shared.is_some()) == LeaseRequirement::Required;
        let is_known = !self.is_database_lost && is_known(gpu);
        let is_checked = is_checked && is_required && is_known;
        if let Some(oldest) = own.first()
            && !(is_checked && shared.is_some())
        {
            return Attribution { lease: Some(oldest.id().to_string()), unattributed: true, ..found };
        }
        let of_others = || self.device_of_others(gpu, device, pid, process.kind, &named);
        let trespass = (own.is_empty() && is_known).then(of_others).flatten();
        if !is_checked {
            let exempt = trespass.is_some().then_some(OPTIONAL);
            return Attribution { unleased: trespass.clone(), exempt, trespass, ..found };
        }
        let why = match &shared {
            Some(shared) => reason(shared, process.kind, uid, &named),
            None => "its user holds no lease".to_owned(),
        };
        let is_holder = !own.is_empty() || shared.is_some_and(|shared| shared.is_held_by(uid));
        let exempt = if is_holder { Some(HOLDER) } else { self.may_have_had_lease(pid, uid) };
        Attribution { unleased: Some(why), exempt, trespass, ..found }
    }

    /// Returns why gpushd does not end a process whose user `uid` holds a lease on its device now; `None` if the user holds
    /// none.
    pub(super) fn holder(&self, one: &ClassifiedProcess, uid: u32) -> Option<&'static str> {
        let gpu = &one.process.gpu_uuid;
        let device = Some(one.target.as_str()).filter(|target| target != gpu);
        let shared = mps::sharing(&self.unleased.mps, &one.target);
        let is_holder =
            !self.leases_of(gpu, device, uid).is_empty() || shared.is_some_and(|shared| shared.is_held_by(uid));
        is_holder.then_some(HOLDER)
    }

    /// Returns why the device of a process belongs to others: a lease of another user has the device alone, or Slurm
    /// owns the GPU. The user of the process holds no lease on the device.
    fn device_of_others(
        &self,
        gpu: &Gpu,
        device: Option<&str>,
        pid: u32,
        kind: ProcessKind,
        named: &EnvironmentLease,
    ) -> Option<String> {
        if let Some(id) = self.table.exclusive_lease_on(device.unwrap_or(&gpu.uuid)) {
            return reason_on_device_of(id, named);
        }
        let computes = match kind {
            ProcessKind::Compute | ProcessKind::MpsClient => true,
            ProcessKind::Graphics => false,
        };
        let is_slurms = computes && self.terms(gpu).owner == LeaseOwner::Slurm;
        let is_in_job = || match cgroup::try_of(pid) {
            Ok(found) => found.is_some_and(|found| found.slurm_job.is_some()),
            // The process may be in a job.
            Err(_) => true,
        };
        (is_slurms && !is_in_job()).then(|| "Slurm owns the GPU, but the process belongs to no Slurm job".to_owned())
    }

    /// Returns the leases of a user on a GPU or MIG device, the oldest first.
    fn leases_of(&self, gpu: &str, device: Option<&str>, uid: u32) -> Vec<&OpenLease> {
        let own = self.table.holding().filter(|lease| lease.record.holder.uid == uid);
        let is_here = |lease: &&OpenLease| {
            lease.record.members.iter().any(|member| match device {
                Some(device) => member.target == device,
                None => member.gpu == gpu,
            })
        };
        own.filter(is_here).collect()
    }

    /// Returns the lease of a process. Looks first for a cgroup that belongs to one lease, then in the environment of
    /// the process, and last for a cgroup whose processes may belong to several leases.
    fn lease_of(&self, own: &[&OpenLease], pid: u32, uid: u32) -> EnvironmentLease {
        let ids: Vec<LeaseId> = own.iter().map(|lease| lease.id()).collect();
        let bound = self.table.by_cgroup(&ids, &proc::cgroups(pid).unwrap_or_default());
        let by_job = || {
            let job = cgroup::of(pid)?.slurm_job?;
            let lease = own.iter().find(|lease| lease.fits_job(&job))?;
            (!self.table.is_ambiguous(&job, uid)).then(|| lease.id())
        };
        if let Some(id) = bound.certain().or_else(by_job) {
            return EnvironmentLease::Own(id.to_string());
        }
        let is_own = |name: &str| ids.iter().any(|id| id.to_string() == name);
        match (self.unleased.environments.lease_of(pid, uid, is_own), bound.likely()) {
            (named @ EnvironmentLease::Own(_), _) | (named, None) => named,
            (_, Some(id)) => EnvironmentLease::Own(id.to_string()),
        }
    }

    /// Returns what the rule of a GPU says about leases. Without a rule, a lease is optional.
    fn terms(&self, gpu: &Gpu) -> LeaseTerms {
        let host = self.unleased.state.now();
        let rule = host.gpu(&gpu.uuid).and_then(|snapshot| host.config.rules.get(snapshot.rule?)?.lease);
        rule.unwrap_or(LeaseTerms { requirement: Some(LeaseRequirement::Optional), ..LeaseTerms::default() })
    }

    /// Returns why a process may have had a lease; `None` if it had none. There are three possible reasons: the process
    /// or an ancestor of the same user may have started before the database was lost, the process is in the scope of a
    /// lease, or its cgroup cannot be read.
    fn may_have_had_lease(&self, pid: u32, uid: u32) -> Option<&'static str> {
        let is_users = |pid: &u32| proc::owner(*pid) == Some(uid);
        let mut starts = std::iter::once(pid).chain(proc::ancestors(pid).take_while(is_users)).filter_map(proc::start);
        if starts.any(|start| self.unleased.state.may_have_forgotten(start)) {
            return Some(FORGOTTEN);
        }
        match proc::try_cgroups(pid).map(|text| text.as_deref().map(CgroupKind::parse)) {
            Ok(Some(CgroupKind::Lease { .. })) => Some(SCOPE),
            Ok(_) => None,
            Err(_) => Some(UNREADABLE),
        }
    }
}

/// Returns whether the rule shares the GPU or its MIG device `device` through MPS. If not, processes there are not
/// reported as bypassing a daemon, even while a daemon still serves clients there.
fn is_shared_by_rule(gpu: &Gpu, device: Option<&str>) -> bool {
    match gpu.mode.mps_scope() {
        MpsScope::WholeGpu => true,
        MpsScope::MigDevices => device.is_some(),
        MpsScope::Nothing => false,
    }
}

/// Returns whether the processes in the last reading of a GPU are up to date, and no operation changes the GPU.
fn is_known(gpu: &Gpu) -> bool {
    let is_readable = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => true,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    is_readable && !gpu.stale && gpu.processes_known
}

/// Returns why a process is unleased on a device that belongs only to lease `id` of another user; `None` if the
/// environment of the process names lease `id`.
fn reason_on_device_of(id: LeaseId, named: &EnvironmentLease) -> Option<String> {
    match named {
        EnvironmentLease::Other(name) if name.parse() == Ok(id) => None,
        EnvironmentLease::Other(name) => {
            Some(format!("its environment names lease {name}, but lease {id} holds the device now"))
        }
        EnvironmentLease::Own(_) | EnvironmentLease::None | EnvironmentLease::Unknown => {
            Some(format!("lease {id} of another user holds the device"))
        }
    }
}

/// Returns why a process on a target shared through MPS is unleased.
fn reason(shared: &SharedTarget, kind: ProcessKind, uid: u32, named: &EnvironmentLease) -> String {
    match (kind, named) {
        (ProcessKind::Compute, _) => "it computes without MPS".to_owned(),
        (ProcessKind::Graphics, _) => "it uses the GPU for graphics without a lease".to_owned(),
        (ProcessKind::MpsClient, _) if !shared.is_held_by(uid) => "its user holds no lease".to_owned(),
        (ProcessKind::MpsClient, EnvironmentLease::Other(name)) => {
            format!("its environment names lease {name}, which its user does not hold")
        }
        (ProcessKind::MpsClient, EnvironmentLease::None) => "its environment names no lease of its user".to_owned(),
        (ProcessKind::MpsClient, EnvironmentLease::Unknown | EnvironmentLease::Own(_)) => {
            "its lease is unknown: its environment was overwritten or cannot be read".to_owned()
        }
    }
}
