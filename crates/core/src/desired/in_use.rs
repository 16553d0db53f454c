//! The in-use check of changes to how a GPU or a MIG device is shared.
//!
//! A target is in use if a process runs on it, if a lease overlaps it, or if an MPS client is connected to its daemon.
//! gpushd removes its own idle MPS servers from the GPUs before the check, and checks the clients of daemons itself.
//!
//! An operation that changes a mode, compute mode, time-slice level or daemon passes this check twice: before it is
//! planned, and again when it has claimed the GPU. The planner checks the instances, because a plan may keep an instance
//! in use.

use gpush_api::{ApiError, Gpu, GpuPlan, Holder, LeaseKind, LeaseUse, Process, Refusal, TargetUuid, USERS_UNKNOWN};

use super::gpu_label::label;
use crate::{
    holders,
    lease::capacity::{Held, Relation},
};

/// What a change affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// The whole GPU.
    Gpu,
    /// The whole GPU without its MIG devices, which the planner checks.
    OutsideInstances,
    /// A MIG device, by UUID.
    Device(&'a TargetUuid),
}

/// The users of what a change affects. At least one of the lists is not empty.
#[derive(Debug, PartialEq, Eq)]
pub struct Users {
    holders: Vec<Holder>,
    leases: Vec<LeaseUse>,
}

impl From<Users> for Refusal {
    fn from(Users { holders, leases }: Users) -> Self {
        Self::Held { holders, leases }
    }
}

/// Returns who uses the scope of a change; `None` if it is not in use. `kept` is the kind of leases that the change does
/// not disturb.
#[must_use]
pub fn in_use(gpu: &Gpu, scope: Scope<'_>, kept: Option<LeaseKind>) -> Option<Users> {
    let target = match scope {
        Scope::Gpu | Scope::OutsideInstances => gpu.uuid.as_target(),
        Scope::Device(uuid) => uuid,
    };
    let excludes = |lease: &&LeaseUse| {
        let held = Held::by_use(&gpu.uuid, lease);
        // If the change keeps no kind of lease, every overlapping lease counts. No lease shares a whole GPU.
        match held.relation(&gpu.uuid, target, kept.unwrap_or(LeaseKind::Whole)) {
            Relation::Excludes => true,
            Relation::Shares | Relation::None => false,
        }
    };
    let is_checked = |lease: &&LeaseUse| scope != Scope::OutsideInstances || lease.target == gpu.uuid;
    let leases: Vec<LeaseUse> = gpu.leases.iter().filter(is_checked).filter(excludes).cloned().collect();
    let processes: Vec<&Process> = match scope {
        Scope::Gpu | Scope::OutsideInstances => gpu.processes.iter().collect(),
        Scope::Device(uuid) => {
            let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
            let of = |compute: &gpush_api::ComputeInstance| compute.uuid.as_ref() == Some(uuid);
            let here = instances.filter(|instance| instance.compute.iter().any(of));
            here.flat_map(|instance| {
                let device = instance.compute.iter().filter(|compute| of(compute));
                instance.processes.iter().chain(device.flat_map(|compute| &compute.processes))
            })
            .collect()
        }
    };
    let holders: Vec<Holder> = processes.into_iter().map(holder).collect();
    (!leases.is_empty() || !holders.is_empty()).then_some(Users { holders, leases })
}

/// Checks that the scope of a change is not in use. `change` completes the sentence "cannot …".
///
/// # Errors
/// The scope is in use, or the driver does not list the processes of the GPU. The plan then contains the refusal.
pub fn check(
    gpu: &Gpu,
    plan: &GpuPlan,
    scope: Scope<'_>,
    kept: Option<LeaseKind>,
    change: &str,
) -> Result<(), Box<GpuPlan>> {
    let refused = |error: ApiError, refusal| Box::new(GpuPlan { refusal, ..plan.without_steps().refused(error) });
    if let Some(users) = in_use(gpu, scope, kept) {
        let message = format!("cannot {change} of {} while it is in use", label(gpu));
        return Err(refused(holders::explain_sharing(message, &users.holders, &users.leases), Some(users.into())));
    }
    if gpu.processes_known {
        return Ok(());
    }
    let message = format!("cannot {change} of {}: {USERS_UNKNOWN}", label(gpu));
    let hint = format!("see why with `gpushctl gpu show {}`, then try again", gpu.index);
    Err(refused(ApiError::new(gpush_api::Code::Blocked, message).hint(hint).retryable(), None))
}

fn holder(process: &Process) -> Holder {
    Holder {
        pid: process.pid,
        uid: process.uid,
        user: process.user.clone(),
        command: process.command.clone(),
        ..Holder::default()
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{GpuIndex, LeaseHolder, LeaseId, MemberShare, ProcessKind};

    use super::*;
    use crate::preset;

    fn lease(gpu: &Gpu, target: &str, share: MemberShare) -> LeaseUse {
        let target = if target.is_empty() { gpu.uuid.as_target().clone() } else { target.into() };
        let holder = LeaseHolder { uid: 1000, user: Some("alice".to_owned()) };
        LeaseUse { id: LeaseId(12), target, kind: share.kind(), share, holder, until: None }
    }

    fn mps() -> MemberShare {
        let percentage = "50".parse().unwrap();
        MemberShare::Mps { percentage, memory_limit_mib: None, priority: gpush_api::Priority::Normal }
    }

    #[test]
    fn leases_of_the_kept_kind_on_the_same_target_do_not_count() {
        let mut gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        gpu.leases = vec![lease(&gpu, "", mps())];
        assert_eq!(in_use(&gpu, Scope::Gpu, Some(LeaseKind::Mps)), None);
        assert!(in_use(&gpu, Scope::Gpu, Some(LeaseKind::Timeslice)).is_some());
        assert!(in_use(&gpu, Scope::Gpu, None).is_some());
        gpu.leases = vec![lease(&gpu, "MIG-1", mps())];
        assert!(in_use(&gpu, Scope::Gpu, Some(LeaseKind::Mps)).is_some(), "a lease on a part of the GPU");
        assert!(in_use(&gpu, Scope::Device(&"MIG-1".into()), None).is_some());
        assert_eq!(in_use(&gpu, Scope::Device(&"MIG-2".into()), None), None);
    }

    #[test]
    fn refusal_names_processes_leases_and_unknown_users() {
        let mut gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let plan = GpuPlan { gpu: GpuIndex(0), gpu_uuid: gpu.uuid.clone(), ..GpuPlan::default() };
        let change = "change how MPS shares";
        assert!(check(&gpu, &plan, Scope::Gpu, None, change).is_ok());
        gpu.leases = vec![lease(&gpu, "", MemberShare::Whole)];
        let (pid, kind) = (Some(7), ProcessKind::Compute);
        gpu.processes =
            vec![Process { pid, uid: None, user: None, command: None, kind, memory_mib: None, unidentified: false }];
        let error = check(&gpu, &plan, Scope::Gpu, None, "start the MPS daemon").unwrap_err().error.unwrap();
        assert_eq!(error.message, "cannot start the MPS daemon of GPU 0 while it is in use");
        assert_eq!(error.causes, ["held by lease L12 of alice, without an end", "held by pid 7"]);
        (gpu.leases, gpu.processes, gpu.processes_known) = (Vec::new(), Vec::new(), false);
        assert!(check(&gpu, &plan, Scope::Gpu, None, change).unwrap_err().error.unwrap().retryable);
    }
}
