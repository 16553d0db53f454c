//! Leases: state, share, targets, end.
//!
//! | file | subject |
//! |---|---|
//! | `list` | the table of leases |
//! | `of_job` | the use of the leases of a Slurm job |
//! | `show` | all details of a lease |
//! | `change` | results of lease commands, and what a lease waits for |
//! | `queue` | the place in the queue, and reserved capacity |
//! | `idle` | unused leases, and keeps |
//! | `below` | the leases of a GPU, in `status` |

pub(crate) mod below;
mod change;
mod idle;
mod list;
mod of_job;
mod over_limit;
mod queue;
mod show;
pub(crate) mod usage;

use anstyle::Style;
use gpush_api::{
    DeviceAccess, EndReason, Enforcement, Gpu, Lease, LeaseBinding, LeaseMember, LeaseRequest, LeaseShare, LeaseState,
    MemberShare,
};
use gpush_core::sharing;

pub(crate) use self::{
    change::{ended, granted, renewed, started, waits},
    idle::{keeping, report as idle_report},
    list::{list, own},
    of_job::of_job,
    queue::place,
    show::{one, show},
    usage::{Surroundings, energy, idle, unknown},
};
use super::{
    Appearance,
    appearance::{NEW, NOTE, QUIET},
    mps::memory,
    names::user_name,
};

/// Text for a missing value.
const NONE: &str = "-";

/// Returns the state as text, with its style.
pub(crate) fn state(state: LeaseState) -> (&'static str, Style) {
    let style = match state {
        LeaseState::Active => NEW,
        LeaseState::Queued | LeaseState::Granting | LeaseState::Releasing => NOTE,
        LeaseState::Ended => QUIET,
    };
    (state.name(), style)
}

/// Returns why a lease has ended, as text.
fn reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Released => "released",
        EndReason::Expired => "expired",
        EndReason::Revoked => "revoked",
        EndReason::Cancelled => "cancelled",
        EndReason::TimedOut => "not granted in time",
        EndReason::Rebooted => "the host was rebooted",
        EndReason::GpuLost => "a GPU was lost",
        EndReason::Failed => "the grant failed",
    }
}

/// Returns the name of the holder; the uid if there is no name.
pub(crate) fn user(lease: &Lease, look: &Appearance) -> String {
    look.clean(&user_name(lease.holder.user.as_deref(), lease.holder.uid, lease.account.as_deref()))
}

/// Describes the share briefly: `mps 25% 8G`, `mig 1g.10gb*2`, `whole`.
pub(crate) fn share(lease: &Lease, look: &Appearance) -> String {
    let Some(first) = lease.members.first() else {
        return lease.request.as_ref().map_or_else(|| lease.kind.name().to_owned(), |request| requested(request, look));
    };
    let one = member_share(first, look);
    let is_same = lease.members.iter().all(|member| member.share == first.share)
        || lease.members.iter().all(|member| profile(member).is_some() && profile(member) == profile(first));
    match (lease.members.len(), is_same) {
        (1, _) => one,
        (count, true) => format!("{one}*{count}"),
        (count, false) => format!("{} *{count}", lease.kind),
    }
}

/// Describes the share of one target: `mps 25% 8G`, `mig 1g.10gb`, `whole`.
pub(crate) fn member_share(member: &LeaseMember, look: &Appearance) -> String {
    match &member.share {
        MemberShare::Mig { profile, .. } => format!("mig {}", look.clean(profile)),
        MemberShare::Mps { percentage, memory_limit_mib, priority: _ } => {
            let limit = memory_limit_mib.map_or_else(String::new, |limit| format!(" {}", memory(Some(limit))));
            format!("mps {percentage}%{limit}")
        }
        MemberShare::Timeslice { replicas, .. } => format!("timeslice 1/{replicas}"),
        MemberShare::Whole => "whole".to_owned(),
    }
}

fn profile(member: &LeaseMember) -> Option<&str> {
    match &member.share {
        MemberShare::Mig { profile, .. } => Some(profile),
        MemberShare::Mps { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => None,
    }
}

/// Describes the share that a waiting lease requests.
fn requested(request: &LeaseRequest, look: &Appearance) -> String {
    let one = match &request.share {
        LeaseShare::Default {} => "any".to_owned(),
        LeaseShare::MigProfile { profile } => format!("mig {}", look.clean(profile)),
        LeaseShare::MigSize { memory_mib, slices } => {
            let memory = memory_mib.map(|mib| format!(" {}G", mib.div_ceil(1024)));
            let slices = slices.map(|slices| format!(" {slices} slices"));
            format!("mig{}{}", memory.unwrap_or_default(), slices.unwrap_or_default())
        }
        LeaseShare::Mps { percentage, memory_limit_mib, .. } => {
            let percentage = percentage.map_or_else(String::new, |percentage| format!(" {percentage}%"));
            let limit = memory_limit_mib.map_or_else(String::new, |limit| format!(" {}", memory(Some(limit))));
            format!("mps{percentage}{limit}")
        }
        LeaseShare::Timeslice {} => "timeslice".to_owned(),
        LeaseShare::Whole {} => "whole".to_owned(),
    };
    if request.count == 1 { one } else { format!("{one}*{}", request.count) }
}

/// Returns the name of a target as commands accept it: the index of a GPU, or `1:2g.20gb@2`. If the
/// driver does not list the GPU, returns the UUID.
fn target(member: &LeaseMember, gpus: &[Gpu], look: &Appearance) -> String {
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == member.gpu_uuid) else {
        return look.clean(member.target.as_str());
    };
    if member.target == gpu.uuid {
        return gpu.index.to_string();
    }
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut devices = instances.flat_map(|instance| instance.compute.iter().map(move |compute| (instance, compute)));
    let device = devices.find(|(_, compute)| compute.uuid.as_ref() == Some(&member.target));
    match (device, profile(member)) {
        (Some((instance, compute)), _) => {
            look.clean(&format!("{}:{}", gpu.index, sharing::device_name(instance, compute)))
        }
        (None, Some(profile)) => look.clean(&format!("{}:{profile}", gpu.index)),
        (None, None) => look.clean(&format!("{}:{}", gpu.index, member.target)),
    }
}

/// Returns the targets of a lease: `0, 1:2g.20gb@2`.
fn targets(lease: &Lease, gpus: &[Gpu], look: &Appearance) -> String {
    if lease.members.is_empty() {
        return NONE.to_owned();
    }
    lease.members.iter().map(|member| target(member, gpus, look)).collect::<Vec<_>>().join(", ")
}

/// Describes what ends a lease: `in 2h`, `with pid 4055`.
pub(crate) fn end(lease: &Lease, look: &Appearance) -> String {
    let with = match &lease.binding {
        LeaseBinding::Process { pid: Some(pid), .. } | LeaseBinding::Cgroup { pid: Some(pid), .. } => {
            Some(format!("with pid {pid}"))
        }
        LeaseBinding::Process { pid: None, .. } => Some("with a process".to_owned()),
        LeaseBinding::Scope { .. } => Some("with its scope".to_owned()),
        LeaseBinding::Cgroup { .. } => Some("with its cgroup".to_owned()),
        LeaseBinding::Job { job, .. } => Some(format!("with job {job}")),
        LeaseBinding::Time | LeaseBinding::None => None,
    };
    match (with, lease.expires_at) {
        (None, None) => match lease.request.as_ref().map(|request| request.duration_s) {
            // The lease has not been granted yet, and its duration begins with the grant.
            Some(Some(seconds)) => format!("after {}", duration(seconds)),
            // gpushd withholds the request of another user, so its duration is not known.
            None if matches!(lease.state, LeaseState::Queued | LeaseState::Granting) => NONE.to_owned(),
            Some(None) | None => "on release".to_owned(),
        },
        (Some(with), None) => with,
        (None, Some(at)) => look.ahead(at),
        (Some(with), Some(at)) => format!("{with}, or {}", look.ahead(at)),
    }
}

fn duration(seconds: u64) -> String {
    gpush_core::duration::format(std::time::Duration::from_secs(seconds))
}

/// Describes in one sentence what enforces the share of a lease.
pub(crate) fn enforced_by(enforcement: Enforcement) -> &'static str {
    match enforcement {
        Enforcement::Hardware => "hardware: MIG separates memory, compute and faults",
        Enforcement::MpsCeiling => {
            "limits of the MPS daemon, for programs that do not change their environment; faults are shared"
        }
        Enforcement::Exclusive => "cooperation: gpushd grants no other lease of the GPU, but stops no program",
        Enforcement::None => "nothing: programs take turns; memory and compute time are not limited",
    }
}

/// Describes in one sentence who can open the devices of a lease.
pub(crate) fn device_access(access: DeviceAccess) -> &'static str {
    match access {
        DeviceAccess::Verified => "the kernel denies the devices to login sessions and other leases",
        DeviceAccess::Unverified => "the lease opens only its own devices, but login sessions can open them too",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    /// Fault: a user saw `on release` as the end of another user's queued lease, which ends after a duration.
    #[test]
    fn withheld_duration_of_a_queued_lease_is_not_shown_as_an_end() {
        let look = fixtures::look(80, Charset::Ascii);
        let own = fixtures::lease::queued();
        let mut foreign = own.clone();
        foreign.redact();
        assert_eq!([end(&own, &look), end(&foreign, &look)], ["after 8h", "-"]);
        let mut active = Lease { binding: LeaseBinding::None, expires_at: None, ..fixtures::lease::mps() };
        active.redact();
        assert_eq!(end(&active, &look), "on release");
    }
}
