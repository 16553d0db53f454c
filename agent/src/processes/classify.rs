//! Finds the processes that have no lease although they need one.
//!
//! ```text
//! an MPS server of gpushd ────────────────────────────────────► needs no lease
//! its cgroup or environment identifies a lease of its user on
//!   this device, and it does not bypass MPS ──────────────────► that lease, or perhaps that lease
//! it may belong to a lease on this device ────────────────────► perhaps that lease; on a target shared through MPS, also
//!                                                               unleased, but gpushd never ends it
//! the reading of its GPU is old, or the GPU is being changed ─► not checked
//! the database was lost ──────────────────────────────────────► not checked: the leases are unknown
//! `lease` of its GPU is `required` or `enforced` ──────────────► unleased
//! another user's lease has the whole GPU or MIG device ───────► unleased, but gpushd never ends it
//! Slurm owns the GPU, and it computes outside all Slurm jobs ─► unleased, but gpushd never ends it
//! ```
//!
//! [`gpush_core::attribution`] decides to which lease a process belongs. Processes of the last two kinds use a device that
//! belongs to others. So gpushd shows them with the GPU, too.
//!
//! On the device of another user's lease, the process usually has an old environment. A MIG device that is created again at the
//! same placement has the same UUID. So the environment of an ended lease can select a device that another user now
//! has. Ids of leases never repeat. So if a process with `GPUSH_LEASE=L3` is on a device of lease L9, its environment
//! is old. A process whose environment names L9 is not reported: it may belong to lease L9 and run as another user in a
//! container.
//!
//! On a target shared through MPS, a process that bypasses the daemon is unleased, even if it belongs to a lease.

use gpush_api::{
    Gpu, GpuProcess, GpuState, GpuUuid, LeaseId, LeaseOwner, LeaseRequirement, LeaseTerms, Mode, MpsScope, ProcessKind,
    TargetUuid,
};
use gpush_core::attribution::{Attribution, Facts, GpuUse};
use gpush_host::{
    cgroup::CgroupKind,
    proc,
    process_facts::{EnvironmentName, ProcessFacts},
};

use super::Unleased;
use crate::{
    modes::mps::{self, Place, Server, Servers},
    state::LeaseTable,
};

/// Why gpushd does not end a process whose user holds a lease: the process may belong to an earlier lease, or a wrapper
/// may have cleared the environment of the process.
const HOLDER: &str = "its user holds a lease";

/// Why gpushd does not end a process of another user in the cgroup of a lease.
const IN_CGROUP: &str = "it may belong to a lease of another user: it is in the cgroup of the lease";

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
    pub(super) target: TargetUuid,
}

/// The lease of a process, and why it is unleased.
#[derive(Debug, Default)]
pub(super) struct Classification {
    /// Description of the MPS server, with its target; `None` for other processes.
    pub(super) serves: Option<String>,
    /// Id of the lease of the process.
    pub(super) lease: Option<String>,
    /// Whether `lease` is only a guess.
    pub(super) unattributed: bool,
    /// Why the process is unleased.
    pub(super) unleased: Option<String>,
    /// Why gpushd does not end the process although it is unleased.
    pub(super) exempt: Option<&'static str>,
    /// Why the device of the process belongs to others.
    pub(super) trespass: Option<String>,
}

/// Finds unleased processes. Contains the leases and MPS servers as they were when this value was created.
#[derive(Debug)]
pub(super) struct Classifier<'a> {
    pub(super) unleased: &'a Unleased,
    table: std::sync::Arc<LeaseTable>,
    pub(super) servers: Servers,
    is_database_lost: bool,
}

impl<'a> Classifier<'a> {
    /// Creates the classifier with the current leases and MPS servers.
    pub(super) fn new(unleased: &'a Unleased) -> Self {
        Self {
            unleased,
            table: unleased.context.state.leases(),
            servers: unleased.mps.servers(),
            is_database_lost: unleased.context.state.now().lost.as_ref().is_some_and(|lost| lost.holds),
        }
    }

    /// Finds the lease of a process, and whether the process is unleased. `device` is the process's MIG device; `None` if
    /// the process is on the whole GPU, or on a GPU instance without a compute instance.
    pub(super) fn classify(
        &self,
        gpu: &Gpu,
        device: Option<&TargetUuid>,
        kind: ProcessKind,
        facts: &ProcessFacts<'_>,
    ) -> Classification {
        let server = self.servers.of_process(facts.pid(), kind, Place::Device { gpu: &gpu.uuid, device });
        let found = Classification { serves: server.map(Server::describe), ..Classification::default() };
        if let Some(Server::Of(_)) = server {
            return found;
        }
        let gpu_use = gpu_use(&gpu.uuid, device);
        let attribution = self.table.attribute(facts, gpu_use);
        let shown = attribution.shown();
        let found = Classification {
            lease: shown.map(|(id, _)| id.to_string()),
            unattributed: shown.is_some_and(|(_, is_guess)| is_guess),
            ..found
        };
        let is_granted = mps::grants_leases(&self.unleased.mps, device.unwrap_or(gpu.uuid.as_target()));
        let bypasses_mps = is_granted.is_some() && kind != ProcessKind::MpsClient;
        if attribution.is_identified() && !bypasses_mps {
            return found;
        }
        let is_checked = match is_granted {
            Some(is_granted) => is_granted && is_shared_by_rule(gpu, device),
            None => device.is_some() || gpu.mode != Mode::Mps,
        };
        let is_required = self.terms(gpu).requirement_for(is_granted.is_some()).needs_lease();
        let is_known = !self.is_database_lost && is_known(gpu);
        let is_checked = is_checked && is_required && is_known;
        let may_have_lease = attribution != Attribution::NoLease;
        if may_have_lease && !(is_checked && is_granted.is_some()) {
            return found;
        }
        let of_others = || self.device_of_others(gpu, device, kind, facts);
        let trespass = (!may_have_lease && is_known).then(of_others).flatten();
        if !is_checked {
            let exempt = trespass.is_some().then_some(OPTIONAL);
            return Classification { unleased: trespass.clone(), exempt, trespass, ..found };
        }
        let is_holder = self.table.is_held_by(facts.owner(), gpu_use);
        let why = match (is_granted, kind) {
            (Some(_), ProcessKind::Compute) => "it computes without MPS".to_owned(),
            (Some(_), ProcessKind::Graphics) => "it uses the GPU for graphics without a lease".to_owned(),
            (Some(_), ProcessKind::MpsClient) if is_holder => self.unnamed_reason(facts, gpu_use),
            (Some(_), ProcessKind::MpsClient) | (None, _) => match &trespass {
                // More precise: the user may hold a lease elsewhere, and only jobs can lease this GPU.
                Some(why) if self.terms(gpu).owner == LeaseOwner::Slurm => why.clone(),
                Some(_) | None => "its user holds no lease".to_owned(),
            },
        };
        let exempt = match attribution {
            _ if is_holder => Some(HOLDER),
            Attribution::Lease { .. } | Attribution::Perhaps { .. } => Some(IN_CGROUP),
            Attribution::Unknown { .. } => Some(UNREADABLE),
            Attribution::NoLease => self.may_have_had_lease(facts),
        };
        Classification { unleased: Some(why), exempt, trespass, ..found }
    }

    /// Returns why gpushd does not end a process whose user `uid` holds a lease on its device now; `None` if the user holds
    /// none.
    pub(super) fn holder(&self, one: &ClassifiedProcess, uid: u32) -> Option<&'static str> {
        let gpu = &one.process.gpu_uuid;
        let device = Some(&one.target).filter(|target| **target != *gpu);
        self.table.is_held_by(uid, gpu_use(gpu, device)).then_some(HOLDER)
    }

    /// Returns why the device of a process belongs to others: a lease of another user has the device alone, or Slurm
    /// owns the GPU. The user of the process holds no lease on the device.
    fn device_of_others(
        &self,
        gpu: &Gpu,
        device: Option<&TargetUuid>,
        kind: ProcessKind,
        facts: &ProcessFacts<'_>,
    ) -> Option<String> {
        if let Some(id) = self.table.exclusive_lease_on(device.unwrap_or(gpu.uuid.as_target())) {
            return reason_on_device_of(id, facts.environment_name());
        }
        let computes = match kind {
            ProcessKind::Compute | ProcessKind::MpsClient => true,
            ProcessKind::Graphics => false,
        };
        let is_slurms = computes && self.terms(gpu).owner == LeaseOwner::Slurm;
        // A process whose cgroup cannot be read may be in a job.
        let is_in_job = || facts.cgroups().map_or(true, |cgroups| cgroups.slurm_job.is_some());
        (is_slurms && !is_in_job()).then(|| "Slurm owns the GPU, but the process belongs to no Slurm job".to_owned())
    }

    /// Returns why an MPS client is unleased although its user holds a lease on the target.
    fn unnamed_reason(&self, facts: &ProcessFacts<'_>, gpu_use: GpuUse<'_>) -> String {
        let id = match facts.environment_name() {
            EnvironmentName::Lease(id) => id,
            EnvironmentName::None => return "its environment names no lease of its user".to_owned(),
            EnvironmentName::Unknown => {
                return "its lease is unknown: its environment was overwritten or cannot be read".to_owned();
            }
        };
        match self.table.get(id).filter(|lease| lease.record.holder.uid == facts.owner()) {
            None => format!("its environment names lease {id}, which its user does not hold"),
            Some(lease) if lease.is_on(gpu_use) => {
                format!("its environment names lease {id}, but one of its uids is another user's")
            }
            Some(_) => format!("its environment names lease {id}, which is for another device"),
        }
    }

    /// Returns what the rule of a GPU says about leases. Without a rule, a lease is optional.
    fn terms(&self, gpu: &Gpu) -> LeaseTerms {
        let host = self.unleased.context.state.now();
        let rule = host.gpu(&gpu.uuid).and_then(|snapshot| host.config.rules.get(snapshot.rule?)?.lease);
        rule.unwrap_or(LeaseTerms { requirement: Some(LeaseRequirement::Optional), ..LeaseTerms::default() })
    }

    /// Returns why a process may have had a lease; `None` if it had none. There are three possible reasons: the process
    /// or an ancestor of the same user may have started before the database was lost, the process is in the scope of a
    /// lease, or its cgroup cannot be read.
    fn may_have_had_lease(&self, facts: &ProcessFacts<'_>) -> Option<&'static str> {
        let pid = facts.pid();
        let is_users = |pid: &u32| proc::owner(*pid) == Some(facts.owner());
        let mut starts = std::iter::once(pid).chain(proc::ancestors(pid).take_while(is_users)).filter_map(proc::start);
        if starts.any(|start| self.unleased.context.state.may_have_forgotten(start)) {
            return Some(FORGOTTEN);
        }
        match facts.cgroup_kind() {
            Ok(CgroupKind::Lease { .. }) => Some(SCOPE),
            Ok(_) => None,
            Err(_) => Some(UNREADABLE),
        }
    }
}

/// Returns the device that a process uses.
fn gpu_use<'a>(gpu: &'a GpuUuid, device: Option<&'a TargetUuid>) -> GpuUse<'a> {
    device.map_or(GpuUse::Gpu(gpu), GpuUse::Target)
}

/// Returns whether the rule shares the GPU or its MIG device `device` through MPS. If not, processes there are not
/// reported as bypassing a daemon, even while a daemon still serves clients there.
fn is_shared_by_rule(gpu: &Gpu, device: Option<&TargetUuid>) -> bool {
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
fn reason_on_device_of(id: LeaseId, named: EnvironmentName) -> Option<String> {
    match named {
        EnvironmentName::Lease(named) if named == id => None,
        EnvironmentName::Lease(named) => {
            Some(format!("its environment names lease {named}, but lease {id} holds the device now"))
        }
        EnvironmentName::None | EnvironmentName::Unknown => {
            Some(format!("lease {id} holds the device, and belongs to another user than the process"))
        }
    }
}
