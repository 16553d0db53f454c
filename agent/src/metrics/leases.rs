//! Metrics of leases and of the queue. They name users, so only administrators and the configured readers get them.

use std::sync::Arc;

use gpush_api::{LeaseBinding, LeaseMember, LeaseState, LeaseUsageSummary, MemberShare, UseState};
use gpush_openmetrics::Family;
use jiff::Timestamp;

use crate::state::{HostState, OpenLease};

/// Returns the metrics of all leases that hold capacity, of those that have ended a short time ago, and of the queue.
pub(super) fn families(host: &HostState, used: &[(Arc<OpenLease>, Option<LeaseUsageSummary>)]) -> Vec<Family> {
    let mut families = Families::new();
    for (lease, used) in used {
        families.add_identity(host, lease);
        if host.leases.open.contains_key(&lease.id()) {
            families.ends.add([("lease", &*lease.id().to_string())], lease.record.expires_at.map(seconds));
        }
        if let Some(used) = used {
            families.add_usage(lease, used);
        }
    }
    families.add_queue(host);
    let Families { info, held, busy, idle, empty, unknown, unused, ends, memory, limit, energy, length, oldest } =
        families;
    vec![info, held, busy, idle, empty, unknown, unused, ends, memory, limit, energy, length, oldest]
}

struct Families {
    info: Family,
    held: Family,
    busy: Family,
    idle: Family,
    empty: Family,
    unknown: Family,
    unused: Family,
    ends: Family,
    memory: Family,
    limit: Family,
    energy: Family,
    length: Family,
    oldest: Family,
}

impl Families {
    fn new() -> Self {
        Self {
            info: Family::gauge("gpush_lease_info", "Identity of a lease, for each of its targets."),
            held: Family::counter("gpush_lease_held_seconds", "Time since the grant of a lease."),
            busy: Family::counter("gpush_lease_busy_seconds", "Time in which a lease worked."),
            idle: Family::counter("gpush_lease_held_idle_seconds", "Time with a process and without work."),
            empty: Family::counter("gpush_lease_empty_seconds", "Time without a process."),
            unknown: Family::counter("gpush_lease_unknown_seconds", "Time of which gpushd does not know the use."),
            unused: Family::gauge(
                "gpush_lease_idle_seconds",
                "Time for which a lease has done no work; 0 while it works.",
            ),
            ends: Family::gauge("gpush_lease_ends_timestamp_seconds", "End of a lease."),
            memory: Family::gauge("gpush_lease_memory_bytes", "Memory of the processes of a lease."),
            limit: Family::gauge(
                "gpush_lease_memory_limit_bytes",
                "Memory of the MPS and time-slice shares of a lease, which programs can exceed.",
            ),
            energy: Family::counter("gpush_lease_energy_joules", "Energy of a lease, and how it was found."),
            length: Family::gauge("gpush_queue_length", "Requests that wait for capacity."),
            oldest: Family::gauge("gpush_queue_oldest_seconds", "Age of the oldest request that waits."),
        }
    }

    fn add_identity(&mut self, host: &HostState, lease: &OpenLease) {
        let record = &lease.record;
        let id = record.id.to_string();
        let uid = record.holder.uid.to_string();
        // A uid can have no name. Then users must still differ.
        let user = record.holder.user.as_deref().unwrap_or(&uid);
        let (job, cluster) = match &record.binding {
            LeaseBinding::Job { job, cluster, .. } => (job.to_string(), cluster.as_str()),
            LeaseBinding::None
            | LeaseBinding::Process { .. }
            | LeaseBinding::Time
            | LeaseBinding::Scope { .. }
            | LeaseBinding::Cgroup { .. } => (String::new(), ""),
        };
        if let Some(mib) = soft_limit_mib(&record.members) {
            self.limit.add([("lease", &*id)], number(mib) * 1_048_576.0);
        }
        for member in &record.members {
            let mig = host.gpu(&member.gpu_uuid).and_then(|one| one.gpu.mig.as_ref());
            let devices = mig.into_iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
            let device = devices.into_iter().find(|device| device.uuid.as_ref() == Some(&member.target));
            let labels = [
                ("lease", &*id),
                ("kind", record.kind.name()),
                ("user", user),
                ("uid", &*uid),
                ("slurm_job", &*job),
                ("cluster", cluster),
                ("uuid", member.gpu_uuid.as_str()),
                ("target", member.target.as_str()),
                ("profile", device.map_or("", |device| &*device.profile)),
            ];
            self.info.add(labels, 1.0);
        }
    }

    fn add_usage(&mut self, lease: &OpenLease, used: &LeaseUsageSummary) {
        let id = lease.id().to_string();
        let label = || [("lease", &*id)];
        let held = used.busy_s + used.idle_s + used.empty_s + used.unknown_s;
        let times = [
            (&mut self.held, held),
            (&mut self.busy, used.busy_s),
            (&mut self.idle, used.idle_s),
            (&mut self.empty, used.empty_s),
            (&mut self.unknown, used.unknown_s),
        ];
        for (family, time) in times {
            family.add(label(), number(time));
        }
        if let Some(energy) = used.energy_j {
            self.energy.add([("lease", &*id), ("method", used.energy_method.name())], energy);
        }
        let unused = match used.state {
            Some(UseState::Busy) => Some(0.0),
            Some(UseState::Idle | UseState::Empty) => used.unused_s.map(number),
            Some(UseState::Unknown) | None => None,
        };
        self.unused.add(label(), unused);
        self.memory.add(label(), used.memory_mib.map(|mib| number(mib) * 1_048_576.0));
    }

    fn add_queue(&mut self, host: &HostState) {
        let now = Timestamp::now();
        let waiting = host.leases.all().filter(|lease| lease.state.name() == LeaseState::Queued);
        let ages: Vec<f64> = waiting.map(|lease| age(now, lease.record.created_at)).collect();
        #[expect(clippy::cast_precision_loss, reason = "the queue is short")]
        self.length.add([], ages.len() as f64);
        self.oldest.add([], ages.into_iter().fold(0.0, f64::max));
    }
}

/// Returns the sum of the memory limits of MPS and time-slice shares; `None` if a share is a MIG device or a whole GPU.
fn soft_limit_mib(members: &[LeaseMember]) -> Option<u64> {
    let of_member = |member: &LeaseMember| match member.share {
        MemberShare::Mps { .. } | MemberShare::Timeslice { .. } => Some(member.memory_mib),
        MemberShare::Mig { .. } | MemberShare::Whole => None,
    };
    if members.is_empty() { None } else { members.iter().map(of_member).sum() }
}

#[expect(clippy::cast_precision_loss, reason = "a time or an amount of memory has fewer than 53 bits")]
fn number(value: u64) -> f64 {
    value as f64
}

#[expect(clippy::cast_precision_loss, reason = "a time in this millennium")]
fn seconds(at: Timestamp) -> f64 {
    at.as_millisecond() as f64 / 1000.0
}

/// Returns the seconds from a time to now; 0 if the time is in the future.
fn age(now: Timestamp, from: Timestamp) -> f64 {
    (seconds(now) - seconds(from)).max(0.0)
}
