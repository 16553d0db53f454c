//! Which processes have no lease, and which of them gpushd never ends.
//!
//! ```text
//! its GPU was not read just now, or is being changed ─► not judged
//! the database was lost ─────────────────────────────► not judged: the leases are not known
//! an MPS server of gpushd ───────────────────────────► has none
//! in the cgroup of a lease of its user's there, or
//!   names one in its environment ────────────────────► that lease
//! its user holds a lease there ──────────────────────► unattributed: it counts for the user's oldest lease
//! `lease = "required"` on its GPU ───────────────────► without a lease (a stray)
//! another user's lease has the whole GPU or MIG device ► without a lease; never ended
//! ```
//!
//! The last case is most often an old environment. A MIG device that is made again in the same place gets the same UUID,
//! so the environment of an ended lease selects the device of its next holder. The id of a lease never repeats: a process
//! with `GPUSH_LEASE=L3` on a device of lease L9 has an old environment. A process that names L9 is not reported: it may
//! run in a container as another user.
//!
//! On a target that is shared through MPS, a process that bypasses the daemon is a stray whatever its cgroup, and so is
//! one that is unattributed. Neither is ended while its user holds a lease there.
//!
//! The user decides first, then the cgroup: the user is the kernel's word, and a user cannot enter a cgroup that root
//! created. The environment is the process's own word. It counts only among the leases of its user, and grants nothing.

use gpush_api::{Gpu, GpuProcess, GpuState, LeaseId, LeaseRequirement, LeaseTerms, Mode, Process, ProcessKind};
use gpush_host::{
    cgroup::{self, Place},
    proc,
};

use super::{
    Strays,
    lease::{Told, ancestors},
};
use crate::{
    mps::{self, Server, Servers, SharedTarget},
    state::{LeaseTable, OpenLease},
};

/// Why a process of a holder is not ended: it may be a job of an earlier lease, or one whose environment was cleaned on
/// the way. Users decide what it is.
const HOLDER: &str = "its user holds a lease";

/// Why a process is not ended whose lease may have been forgotten.
const FORGOTTEN: &str = "it comes from before the database was lost, and may have had a lease";

/// Why a process is not ended that runs in a scope that gpushd created.
const SCOPE: &str = "it is in the scope of a lease that gpushd does not know";

/// Why a process on the device of another user's lease is not ended.
const OPTIONAL: &str = "the rule of its GPU does not require a lease";

/// A process, and why it is not ended although it is a stray.
#[derive(Debug, Clone)]
pub(super) struct Judged {
    pub(super) process: GpuProcess,
    pub(super) spared: Option<&'static str>,
}

/// What is known about a process.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// What it serves, where it is an MPS server.
    pub(super) serves: Option<String>,
    /// Its lease.
    pub(super) lease: Option<String>,
    /// Whether it counts for the oldest lease of its user.
    pub(super) unattributed: bool,
    /// Why it is a stray.
    pub(super) stray: Option<String>,
    /// Why it is not ended although it is one.
    pub(super) spared: Option<&'static str>,
}

/// Judges processes by what is known at one moment.
#[derive(Debug)]
pub(super) struct Judge<'a> {
    strays: &'a Strays,
    table: std::sync::Arc<LeaseTable>,
    pub(super) servers: Servers,
    lost: bool,
}

impl<'a> Judge<'a> {
    /// Judges by what is known now.
    pub(super) fn of(strays: &'a Strays) -> Self {
        Self {
            strays,
            table: strays.state.leases(),
            servers: strays.mps.servers(),
            lost: strays.state.now().lost.as_ref().is_some_and(|lost| lost.holds),
        }
    }

    /// Judges a process on a GPU or MIG device; `device` is `None` when the process is in none, or not yet.
    pub(super) fn of_process(&self, gpu: &Gpu, device: Option<&str>, process: &Process) -> Found {
        let (Some(pid), Some(uid)) = (process.pid, process.uid) else { return Found::default() };
        let server = self.servers.of_process(pid, process.kind);
        let serves = server.map(Server::words);
        if let Some(Server::Of(_)) = server {
            return Found { serves, ..Found::default() };
        }
        let shared = mps::sharing(&self.strays.mps, device.unwrap_or(&gpu.uuid));
        let own = self.leases_of(gpu, device, uid);
        let told = self.lease_of(&own, pid, uid);
        let named = match &told {
            Told::Lease(name) => Some(name.clone()),
            Told::Another(_) | Told::Nothing | Told::Unsure => None,
        };
        let found = Found { serves, ..Found::default() };
        let is_past = shared.is_some() && process.kind != ProcessKind::MpsClient;
        if let (Some(lease), false) = (named, is_past) {
            return Found { lease: Some(lease), ..found };
        }
        let is_judged = match &shared {
            Some(shared) => shared.is_given && shares(gpu, device),
            None => device.is_some() || gpu.mode != Mode::Mps,
        };
        let is_required = self.terms(gpu).requirement_for(shared.is_some()) == LeaseRequirement::Required;
        let is_known = !self.lost && is_seen(gpu);
        let is_judged = is_judged && is_required && is_known;
        if let Some(oldest) = own.first()
            && !(is_judged && shared.is_some())
        {
            return Found { lease: Some(oldest.id().to_string()), unattributed: true, ..found };
        }
        if !is_judged {
            let other = own.is_empty().then(|| self.table.alone_on(device.unwrap_or(&gpu.uuid))).flatten();
            return match other.filter(|_| is_known).and_then(|id| on_device_of(id, &told)) {
                Some(why) => Found { stray: Some(why), spared: Some(OPTIONAL), ..found },
                None => found,
            };
        }
        let stray = match &shared {
            Some(shared) => why(shared, process.kind, uid, &told),
            None => "its user holds no lease".to_owned(),
        };
        let is_held = !own.is_empty() || shared.is_some_and(|shared| shared.is_held_by(uid));
        let spared = if is_held { Some(HOLDER) } else { self.may_be_forgotten(pid, uid) };
        Found { stray: Some(stray), spared, ..found }
    }

    /// Returns the leases of a user on a GPU or MIG device, the oldest first.
    fn leases_of(&self, gpu: &Gpu, device: Option<&str>, uid: u32) -> Vec<&OpenLease> {
        let own = self.table.holding().filter(|lease| lease.record.holder.uid == uid);
        let is_here = |lease: &&OpenLease| {
            lease.record.members.iter().any(|member| match device {
                Some(device) => member.target == device,
                None => member.gpu == gpu.uuid,
            })
        };
        own.filter(is_here).collect()
    }

    /// Returns the lease that a process runs with: by its cgroup or the cgroup of its Slurm job, else by its
    /// environment.
    fn lease_of(&self, own: &[&OpenLease], pid: u32, uid: u32) -> Told {
        let by_cgroup = || {
            let found = self.table.by_cgroup(uid, &proc::cgroups(pid)?)?;
            own.iter().any(|lease| lease.id() == found.id()).then(|| Told::Lease(found.id().to_string()))
        };
        let by_job = || {
            let job = cgroup::of(pid)?.slurm_job?;
            let lease = own.iter().find(|lease| lease.fits_job(&job))?;
            (!self.table.is_ambiguous(&job, uid)).then(|| Told::Lease(lease.id().to_string()))
        };
        let is_own = |name: &str| own.iter().any(|lease| lease.id().to_string() == name);
        by_cgroup().or_else(by_job).unwrap_or_else(|| self.strays.leases.lease_of(pid, is_own))
    }

    /// What the rule of a GPU says about leases. Without a rule, none is needed.
    fn terms(&self, gpu: &Gpu) -> LeaseTerms {
        let host = self.strays.state.now();
        let rule = host.gpu(&gpu.uuid).and_then(|snapshot| host.config.rules.get(snapshot.rule?)?.lease);
        rule.unwrap_or(LeaseTerms { requirement: Some(LeaseRequirement::Optional), ..LeaseTerms::default() })
    }

    /// Returns why a process may have a lease that is not known: itself, or one of its user's that it comes from.
    fn may_be_forgotten(&self, pid: u32, uid: u32) -> Option<&'static str> {
        let its = |pid: &u32| proc::owner(*pid) == Some(uid);
        let mut from = std::iter::once(pid).chain(ancestors(pid).take_while(its)).filter_map(proc::start);
        if from.any(|start| self.strays.state.may_have_forgotten(start)) {
            return Some(FORGOTTEN);
        }
        matches!(Place::of(pid), Place::Lease { .. }).then_some(SCOPE)
    }
}

/// Whether a rule has a GPU shared, or its MIG devices. The clients of a daemon on one that has another desired mode stay,
/// and nothing bypasses the daemon.
fn shares(gpu: &Gpu, device: Option<&str>) -> bool {
    match gpu.mode {
        Mode::Mps => true,
        Mode::Mig => device.is_some(),
        Mode::Unmanaged | Mode::Exclusive | Mode::Timeslice => false,
    }
}

/// Whether the last reading of a GPU is recent, and no operation changes the GPU.
fn is_seen(gpu: &Gpu) -> bool {
    let workable = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => true,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    workable && !gpu.stale && gpu.processes_known
}

/// Why a process is a stray on a device that the lease `id` of another user has for itself. `None` if it names that lease.
fn on_device_of(id: LeaseId, told: &Told) -> Option<String> {
    match told {
        Told::Another(name) if name.parse() == Ok(id) => None,
        Told::Another(name) => Some(format!("its environment is of lease {name}, but lease {id} has the device now")),
        Told::Lease(_) | Told::Nothing | Told::Unsure => Some(format!("lease {id} of another user has the device")),
    }
}

/// Why a process on a target that is shared through MPS is a stray.
fn why(shared: &SharedTarget, kind: ProcessKind, uid: u32, told: &Told) -> String {
    match (kind, told) {
        (ProcessKind::Compute, _) => "it computes past MPS".to_owned(),
        (ProcessKind::Graphics, _) => "it draws, and has no lease".to_owned(),
        (ProcessKind::MpsClient, _) if !shared.is_held_by(uid) => "its user holds no lease".to_owned(),
        (ProcessKind::MpsClient, Told::Another(name)) => format!("it names lease {name}, which its user does not hold"),
        (ProcessKind::MpsClient, Told::Nothing) => "it names none of its user's leases".to_owned(),
        (ProcessKind::MpsClient, Told::Unsure | Told::Lease(_)) => {
            "its lease is not known: its environment is overwritten, or can't be read".to_owned()
        }
    }
}
