//! Processes and leases as data.

mod cases;
mod properties;

use std::cell::Cell;

use gpush_api::{LeaseBinding, LeaseId, LeaseMember, MemberShare};

use super::*;

/// A lease that owns the data of its view.
#[derive(Debug, Clone, PartialEq)]
struct Leased {
    id: u64,
    holder: u32,
    binding: LeaseBinding,
    members: Vec<LeaseMember>,
}

impl Leased {
    /// A time-slice replica of GPU-0.
    fn new(id: u64, holder: u32, binding: LeaseBinding) -> Self {
        Self { id, holder, binding, members: vec![member("GPU-0", "GPU-0", shared())] }
    }

    fn on(mut self, gpu: &str, target: &str, share: MemberShare) -> Self {
        self.members = vec![member(gpu, target, share)];
        self
    }

    fn view(&self) -> AttributableLease<'_> {
        AttributableLease { id: LeaseId(self.id), holder: self.holder, binding: &self.binding, members: &self.members }
    }
}

fn member(gpu: &str, target: &str, share: MemberShare) -> LeaseMember {
    LeaseMember { target: target.into(), gpu_uuid: gpu.into(), share, memory_mib: 1, gpu_memory_mib: 4 }
}

fn shared() -> MemberShare {
    MemberShare::Timeslice { replicas: 4, level: None, compute_mode: None }
}

fn mig() -> MemberShare {
    MemberShare::Mig { profile: "1g.10gb".to_owned() }
}

fn scope(path: &str) -> LeaseBinding {
    LeaseBinding::Scope { unit: None, cgroup: Some(path.to_owned()) }
}

/// The binding to a login session, service or container.
fn within(path: &str) -> LeaseBinding {
    LeaseBinding::Cgroup { cgroup: Some(path.to_owned()), pid: None, start: None }
}

fn job(cluster: &str, restart: u32) -> LeaseBinding {
    let (cluster, node) = (cluster.to_owned(), "n1".to_owned());
    LeaseBinding::Job { cluster, job: 42, node, restart, leader: None, cgroup: None, name: None, account: None }
}

fn unreadable(fact: FactName) -> Unreadable {
    Unreadable { fact, why: "too many open files".to_owned() }
}

/// The lease that the environment of a process names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    Lease(u64),
    None,
    Overwritten,
    Unreadable,
}

#[derive(Debug, Clone)]
struct Process {
    uid: Fact<u32>,
    cgroups: Fact<Cgroups>,
    name: Name,
    inherited: Fact<Option<u64>>,
    has_read_environment: Cell<bool>,
}

impl Process {
    /// A process in this cgroup, whose environment names no lease.
    fn new(uid: u32, path: &str) -> Self {
        let cgroups = Cgroups { paths: vec![path.to_owned()], slurm_job: None };
        Self {
            uid: Ok(uid),
            cgroups: Ok(cgroups),
            name: Name::None,
            inherited: Ok(None),
            has_read_environment: Cell::default(),
        }
    }

    fn named(mut self, name: Name) -> Self {
        self.name = name;
        self
    }

    /// The process is in the cgroup of job 42.
    fn in_job(mut self, node: Option<&str>) -> Self {
        let slurm_job = Some(SlurmJob { id: 42, node: node.map(str::to_owned), uid: None });
        self.cgroups = Ok(Cgroups { paths: vec!["/system.slice/slurmstepd.scope/job_42".to_owned()], slurm_job });
        self
    }
}

impl Facts for Process {
    fn uid(&self) -> Fact<u32> {
        self.uid.clone()
    }

    fn cgroups(&self) -> Fact<Cgroups> {
        self.cgroups.clone()
    }

    fn named_lease(&self, accepts: &dyn Fn(LeaseId) -> bool) -> Fact<NamedLease> {
        self.has_read_environment.set(true);
        match self.name {
            Name::Lease(id) if accepts(LeaseId(id)) => Ok(NamedLease::Named(LeaseId(id))),
            Name::Lease(_) | Name::None => Ok(NamedLease::None),
            Name::Overwritten => Ok(NamedLease::Overwritten),
            Name::Unreadable => Err(unreadable(FactName::Environment)),
        }
    }

    fn inherited_lease(&self, accepts: &dyn Fn(LeaseId) -> bool) -> Fact<Option<LeaseId>> {
        self.inherited.clone().map(|found| found.map(LeaseId).filter(|id| accepts(*id)))
    }
}

/// Attributes a process on GPU-0, or on this device.
fn on(device: &str, process: &Process, leases: &[Leased]) -> Attribution {
    attribute(process, GpuUse::Target(&device.into()), leases.iter().map(Leased::view))
}

fn on_gpu(process: &Process, leases: &[Leased]) -> Attribution {
    on("GPU-0", process, leases)
}

fn certain(id: u64, evidence: Evidence) -> Attribution {
    Attribution::lease(LeaseId(id), evidence)
}

fn perhaps(id: u64, doubt: Doubt) -> Attribution {
    Attribution::perhaps(LeaseId(id), doubt)
}
