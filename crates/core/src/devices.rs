//! The MIG devices of a host: which devices are free, and why the other devices are not free.
//!
//! A device is `in_use` if the driver lists a process on it. Otherwise it is `reserved` if its GPU
//! or its MPS daemon accepts no new work. Otherwise it is `granted` if a lease holds it. Otherwise
//! it is `reserved` if a queued operation will destroy it, or a queued lease request needs it.
//! Otherwise it is `free`.
//!
//! A free device is `available` if a new lease request can get it now. If it is not available, its
//! `reason` says why.

use std::borrow::Borrow;

use gpush_api::{
    ComputeInstance, DeviceGrant, DeviceUse, Gpu, GpuInstance, GpuState, Lease, MigDevice, MpsDaemon, MpsState,
    Process, USERS_UNKNOWN,
};

use crate::sharing;

mod available;

use available::unavailable;
pub use available::{CallerQuota, Offers};

/// Lists the MIG devices of these GPUs, sorted by GPU and placement. `daemons` are the MPS daemons
/// of the host. `leases` are the leases that have not ended.
#[must_use]
pub fn list<G: Borrow<Gpu>>(gpus: &[G], daemons: &[MpsDaemon], leases: &[Lease]) -> Vec<MigDevice> {
    let gpus = gpus.iter().map(Borrow::borrow);
    let enabled = gpus.filter(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.enabled));
    enabled.flat_map(|gpu| of_gpu(gpu, daemons, leases)).collect()
}

/// Applies to listed devices what only gpushd knows. `needed_by` returns the entry of the queue that
/// needs a device: `operation op-7`, `lease L3`.
pub fn apply_queue(devices: &mut [MigDevice], needed_by: impl Fn(&MigDevice) -> Option<String>, offers: Offers<'_>) {
    for device in devices.iter_mut().filter(|device| device.usage == DeviceUse::Free) {
        if let Some(waiter) = needed_by(device) {
            device.usage = DeviceUse::Reserved;
            device.available = false;
            device.reason = Some(format!("{waiter} waits in the queue and needs the device"));
        } else if device.available
            && let Some(why) = offers.unavailable(device)
        {
            device.available = false;
            device.reason = Some(why.to_string());
        }
    }
}

fn of_gpu(gpu: &Gpu, daemons: &[MpsDaemon], leases: &[Lease]) -> Vec<MigDevice> {
    let mut devices = Vec::new();
    for instance in gpu.mig.iter().flat_map(|mig| &mig.instances) {
        if instance.compute.is_empty() {
            devices.push(device(gpu, instance, None, daemons, leases));
        }
        devices.extend(instance.compute.iter().map(|compute| device(gpu, instance, Some(compute), daemons, leases)));
    }
    devices
}

fn device(
    gpu: &Gpu,
    instance: &GpuInstance,
    compute: Option<&ComputeInstance>,
    daemons: &[MpsDaemon],
    leases: &[Lease],
) -> MigDevice {
    let uuid = compute.and_then(|compute| compute.uuid.clone());
    let daemon = daemons.iter().find(|daemon| uuid.as_ref() == Some(&daemon.uuid));
    let servers: Vec<u32> = daemon.iter().flat_map(|daemon| &daemon.servers).filter_map(|server| server.pid).collect();
    let of_compute = compute.iter().flat_map(|compute| &compute.processes);
    // Omit MPS servers from the processes of the device: only the clients of a server use the
    // device.
    let is_user = |process: &&Process| process.pid.is_none_or(|pid| !servers.contains(&pid));
    let processes: Vec<Process> = instance.processes.iter().chain(of_compute).filter(is_user).cloned().collect();
    let is_here = |lease: &&Lease| lease.members.iter().any(|member| uuid.as_ref() == Some(&member.target));
    let holding = leases.iter().filter(|lease| lease.state.holds_capacity());
    let grants: Vec<DeviceGrant> = holding.filter(is_here).map(grant).collect();
    let reason = reserved(gpu, compute, daemon);
    let usage = if !processes.is_empty() || daemon.is_some_and(|daemon| !daemon.clients.is_empty()) {
        DeviceUse::InUse
    } else if reason.is_some() {
        DeviceUse::Reserved
    } else if grants.is_empty() {
        DeviceUse::Free
    } else {
        DeviceUse::Granted
    };
    let unavailable = unavailable(gpu, daemon).filter(|_| usage == DeviceUse::Free);
    MigDevice {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        instance: format!("{}@{}", instance.profile, instance.placement.start),
        device: compute.map(|compute| sharing::device_name(instance, compute)),
        profile: compute.map_or_else(|| instance.profile.clone(), |compute| compute.profile.clone()),
        gi: instance.id,
        ci: compute.map(|compute| compute.id),
        uuid,
        memory_mib: instance.memory.map(|memory| memory.total_mib),
        usage,
        available: usage == DeviceUse::Free && unavailable.is_none(),
        grants,
        processes,
        reason: match usage {
            DeviceUse::Reserved => reason,
            DeviceUse::Free => unavailable.map(|why| why.to_string()),
            DeviceUse::InUse | DeviceUse::Granted => None,
        },
    }
}

fn grant(lease: &Lease) -> DeviceGrant {
    let holder = lease.holder.clone();
    DeviceGrant { id: lease.id.to_string(), uid: holder.uid, user: holder.user, expires_at: lease.expires_at }
}

/// Returns why a device without processes accepts no new work.
fn reserved(gpu: &Gpu, compute: Option<&ComputeInstance>, daemon: Option<&MpsDaemon>) -> Option<String> {
    let state = match gpu.state {
        GpuState::Ready => None,
        GpuState::Cordoned => Some("the GPU is cordoned"),
        GpuState::Degraded => Some("the GPU is degraded"),
        GpuState::Changing => Some("an operation is changing the GPU"),
        GpuState::Held => Some("the GPU is held"),
        GpuState::Unknown => Some("the state of the GPU is not known"),
        GpuState::Lost => Some("the GPU is lost"),
        GpuState::Maintenance => Some("the host is in maintenance"),
    };
    if let Some(reason) = state {
        return Some(reason.to_owned());
    }
    if !gpu.cordons.is_empty() {
        return Some("the GPU is cordoned".to_owned());
    }
    if compute.is_none() {
        return Some("the GPU instance has no compute instance".to_owned());
    }
    if !gpu.processes_known {
        return Some(USERS_UNKNOWN.to_owned());
    }
    let daemon = daemon?;
    match daemon.state {
        MpsState::Ready => daemon.ends.as_ref().map(|_| "the MPS daemon of the device is draining".to_owned()),
        MpsState::Draining => Some("the MPS daemon of the device is draining".to_owned()),
        other => Some(format!("the MPS daemon of the device is {}", other.name().replace('_', " "))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use gpush_api::{Actor, ComputeMode, GpuIndex, GpuUuid, LeaseKind, Mode, PendingAim, PendingChange, Placement};

    use super::*;
    use crate::{
        lease::{
            placement::{Host, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, Snapshot},
            quota::{self, Effective, HeldLease, Limits, MemoryAmount},
        },
        preset,
        schedule::{Needs, Queue, ScheduleRules, Waiter},
    };

    fn host() -> Vec<Gpu> {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        gpus.truncate(1);
        gpus[0].mode = Mode::Mig;
        let mig = gpus[0].mig.as_mut().unwrap();
        mig.set_mode(true, true);
        let instance = |id: u32, start: u8| GpuInstance {
            id,
            profile_id: 19,
            profile: "1g.10gb".to_owned(),
            placement: Placement { start, size: 1 },
            memory: None,
            compute: vec![ComputeInstance {
                id: 0,
                profile_id: 0,
                profile: "1g.10gb".to_owned(),
                placement: None,
                uuid: Some(format!("MIG-{id}").into()),
                processes: Vec::new(),
            }],
            processes: Vec::new(),
        };
        mig.instances = vec![instance(7, 0), instance(8, 1)];
        gpus
    }

    fn daemon(uuid: &str) -> MpsDaemon {
        let policy = serde_json::to_value(gpush_api::MpsPolicy::default()).unwrap();
        let all = serde_json::json!({
            "target": "m1", "uuid": uuid, "state": "ready", "since": "2026-01-01T00:00:00Z", "desired_policy": policy,
        });
        serde_json::from_value(all).unwrap()
    }

    fn lease(target: &str) -> Lease {
        let member = serde_json::json!({
            "target": target, "gpu_uuid": "GPU-0", "granted_share": {"kind": "mig", "profile": "1g.10gb", "generation": 1},
            "memory_mib": 9728, "gpu_memory_mib": 81920,
        });
        let all = serde_json::json!({
            "id": "L1", "holder": {"uid": 1000, "user": "alice"}, "kind": "mig", "enforcement": "hardware",
            "state": "active", "members": [member], "binding": {"kind": "time"},
            "created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-02T00:00:00Z",
        });
        serde_json::from_value(all).unwrap()
    }

    fn uses(gpus: &[Gpu], daemons: &[MpsDaemon], leases: &[Lease]) -> Vec<DeviceUse> {
        list(gpus, daemons, leases).iter().map(|device| device.usage).collect()
    }

    #[test]
    fn idle_devices_are_free_until_granted_or_used() {
        let mut gpus = host();
        assert_eq!(uses(&gpus, &[], &[]), [DeviceUse::Free, DeviceUse::Free]);
        let devices = list(&gpus, &[daemon("MIG-8")], &[lease("MIG-8")]);
        assert_eq!((devices[0].available, devices[1].available), (true, false));
        assert_eq!((devices[1].usage, devices[1].grants[0].user.as_deref()), (DeviceUse::Granted, Some("alice")));
        assert!(devices[1].grants[0].expires_at.is_some());
        let process = Process {
            pid: Some(4),
            uid: None,
            user: None,
            command: None,
            kind: gpush_api::ProcessKind::Compute,
            memory_mib: None,
            unidentified: false,
        };
        gpus[0].mig.as_mut().unwrap().instances[1].compute[0].processes.push(process);
        assert_eq!(uses(&gpus, &[daemon("MIG-8")], &[lease("MIG-8")]), [DeviceUse::Free, DeviceUse::InUse]);
    }

    /// Fault: `mig list --free` listed an idle device that MPS shares, and a program that used the
    /// device bypassed MPS.
    #[test]
    fn idle_device_that_mps_shares_is_not_available() {
        let devices = list(&host(), &[daemon("MIG-8")], &[]);
        let found: Vec<_> = devices.iter().map(|device| (device.usage, device.available)).collect();
        assert_eq!(found, [(DeviceUse::Free, true), (DeviceUse::Free, false)]);
    }

    /// Fault: a device that a queued operation destroys was listed as available, and so was a
    /// device of a GPU without a rule. But a lease request did not get these devices.
    #[test]
    fn device_is_available_only_if_a_request_gets_it() {
        let gpus = host();
        let mut devices = list(&gpus, &[], &[]);
        let needed_by = |device: &MigDevice| (device.gi == 7).then(|| "operation op-3".to_owned());
        let offered = offered(&gpus, &BTreeSet::new());
        let none = (BTreeMap::new(), BTreeSet::new());
        let root = Effective::without_quota(Limits::default());
        let offers = Offers {
            host: &offered,
            takers: &none.0,
            slurm: &none.1,
            closed: &none.1,
            quota: Some(limited(&root, &[], &gpus)),
        };
        apply_queue(&mut devices, needed_by, offers);
        let found: Vec<_> = devices.iter().map(|device| (device.usage, device.available)).collect();
        assert_eq!(found, [(DeviceUse::Reserved, false), (DeviceUse::Free, true)]);
        assert_eq!(devices[0].reason.as_deref(), Some("operation op-3 waits in the queue and needs the device"));
        let mut devices = list(&gpus, &[], &[lease("MIG-8")]);
        apply_queue(&mut devices, |_| Some("lease L2".to_owned()), offers);
        assert_eq!(devices[1].usage, DeviceUse::Granted, "the lease still has it");
    }

    fn limited<'a>(effective: &'a Effective, held: &'a [HeldLease], gpus: &'a [Gpu]) -> CallerQuota<'a> {
        CallerQuota { effective, held, gpus }
    }

    /// Fault: a free device that the quota of the caller forbids was listed as available, so a script that polled the
    /// list and then requested a lease never ended.
    #[test]
    fn device_that_the_quota_forbids_is_not_available() {
        let gpus = host();
        let offered = offered(&gpus, &BTreeSet::new());
        let (takers, slurm) = (BTreeMap::new(), BTreeSet::new());
        let list_for = |limits: Limits, held: &[HeldLease]| {
            let effective = Effective::without_quota(limits);
            let mut devices = list(&gpus, &[], &[]);
            let quota = Some(limited(&effective, held, &gpus));
            apply_queue(
                &mut devices,
                |_| None,
                Offers { host: &offered, takers: &takers, slurm: &slurm, closed: &slurm, quota },
            );
            assert!(devices.iter().all(|device| device.usage == DeviceUse::Free));
            assert_eq!(devices[0].available, devices[1].available);
            devices.remove(0).reason
        };
        let small = quota::Size { members: 1, memory_mib: 9728, gpu_thousandths: 125, mps_tenths: 0 };
        let held = [HeldLease { id: gpush_api::LeaseId(3), queued: false, size: small, releasable: true }];
        let queued = [HeldLease { queued: true, ..held[0] }];
        let none = Limits::default();
        let kinds = |kind| Limits { kinds: Some([kind].into()), ..Limits::default() };
        let on = |gpu| Limits { gpus: Some([GpuIndex(gpu)].into()), ..Limits::default() };
        let leases = |most| Limits { leases: Some(most), ..Limits::default() };
        let memory = |most| Limits { memory: Some(most), ..Limits::default() };
        for (limits, held) in [
            (none.clone(), &held[..]),
            (kinds(LeaseKind::Mig), &[]),
            (on(0), &[]),
            (leases(1), &queued),
            (leases(2), &held),
            (memory(MemoryAmount::Gpus(250)), &held),
            // Only the duration of a request decides about this limit.
            (Limits { longest_s: Some(60), ..none }, &[]),
        ] {
            assert_eq!(list_for(limits.clone(), held), None, "{limits:?}");
        }
        for (limits, held, why) in [
            (kinds(LeaseKind::Mps), &held[..0], "each user may not hold leases of kind mig"),
            (on(1), &[], "each user may hold leases on GPU 1 only"),
            (leases(1), &held, "each user may hold 1 lease; the user holds L3"),
            (memory(MemoryAmount::Mib(10_000)), &held, "each user may hold 10000 MiB"),
            (memory(MemoryAmount::Gpus(200)), &held, "each user may hold the memory of 0.2 GPUs"),
        ] {
            let reason = list_for(limits.clone(), held).unwrap_or_default();
            assert!(reason.starts_with(&format!("not allowed by your quota: {why}")), "{limits:?}: {reason}");
        }
    }

    /// Returns what GPU 0 offers with a rule of mode `mig`.
    fn offered(gpus: &[Gpu], claimed: &BTreeSet<GpuUuid>) -> Host {
        let rule = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
        Host::of(&Snapshot {
            config: &crate::config::Config::parse(rule, "gpushd.toml").unwrap(),
            gpus,
            members: &[],
            claimed,
            daemons: &BTreeSet::new(),
            ended: &BTreeSet::new(),
            users: &BTreeMap::new(),
            created: &BTreeMap::new(),
        })
    }

    /// Faults: devices of a GPU that only Slurm jobs can lease were listed as available. Free devices that were not
    /// available were listed without a reason.
    #[test]
    fn free_device_that_no_request_gets_has_a_reason() {
        let first = |gpus: &[Gpu], daemons: &[MpsDaemon], offers: Offers<'_>| {
            let mut devices = list(gpus, daemons, &[]);
            apply_queue(&mut devices, |_| None, offers);
            let device = devices.remove(0);
            assert_eq!(device.usage, DeviceUse::Free);
            (device.available, device.reason.unwrap_or_default())
        };
        let mut gpus = host();
        let (open, none, all) = (offered(&gpus, &BTreeSet::new()), BTreeMap::new(), BTreeSet::new());
        let (root, listed) = (Effective::without_quota(Limits::default()), gpus.clone());
        let offers =
            Offers { host: &open, takers: &none, slurm: &all, closed: &all, quota: Some(limited(&root, &[], &listed)) };
        assert_eq!(first(&gpus, &[], offers), (true, String::new()));
        let no = |why: &str| (false, why.to_owned());
        let unknown = first(&gpus, &[], Offers { quota: None, ..offers });
        assert_eq!(unknown, no("your quota is unknown: the name service of the host does not answer"));
        let shared = first(&gpus, &[daemon("MIG-7")], offers);
        assert_eq!(shared, no("shared through MPS: request it with --mps"));
        let slurm = BTreeSet::from([GpuIndex(0)]);
        assert_eq!(first(&gpus, &[], Offers { slurm: &slurm, ..offers }), no("only Slurm jobs can lease the GPU"));
        let closed = first(&gpus, &[], Offers { closed: &slurm, ..offers });
        assert_eq!(closed, no("the rule of the GPU permits only other users"));
        let claimed = offered(&gpus, &BTreeSet::from([gpus[0].uuid.clone()]));
        let claimed = first(&gpus, &[], Offers { host: &claimed, ..offers });
        assert_eq!(claimed, no("an operation is about to change the GPU"));
        // Faults: for days, the reason said that the change was near. For a prohibited compute mode, the reason was that
        // the reading was old.
        for (leases, why) in [
            (vec![gpush_api::LeaseId(12)], "GPU 0 changes from mode `mig` to `mps` when L12 ends"),
            (Vec::new(), "GPU 0 changes from mode `mig` to `mps` with `gpushctl apply 0` (administrator)"),
        ] {
            let mut pending = listed.clone();
            pending[0].pending =
                vec![PendingChange { aim: PendingAim::Mode { from: Mode::Mig, mode: Mode::Mps }, leases }];
            let pending = offered(&pending, &BTreeSet::new());
            assert_eq!(first(&gpus, &[], Offers { host: &pending, ..offers }), no(why));
        }
        let mut prohibited = listed.clone();
        prohibited[0].compute_mode = Some(ComputeMode::Prohibited);
        let prohibited = offered(&prohibited, &BTreeSet::new());
        let prohibited = first(&gpus, &[], Offers { host: &prohibited, ..offers });
        assert_eq!(prohibited, no("no program can use the GPU: its compute mode is PROHIBITED"));
        let mut queue = Queue::default();
        let share = RequestedShare::Mig(RequestedDevice::Profile("1g.10gb".to_owned()));
        let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
        let ticket = queue.push(Waiter::Lease("L48".to_owned()), Some(wanted), Needs::new());
        let takers = queue.schedule(&open, ScheduleRules::new(PlacementPolicy::Pack, 0)).takers;
        assert!(takers.values().all(|taker| *taker == ticket));
        let takers = takers.into_keys().map(|uuid| (uuid, "lease L48".to_owned())).collect();
        assert_eq!(first(&gpus, &[], Offers { takers: &takers, ..offers }), no("lease L48 is ahead in the queue"));
        for (mode, why) in [
            (Mode::NoRule, "no rule of the config claims the GPU"),
            (Mode::Unmanaged, "mode `unmanaged`: gpushd grants no leases"),
            (Mode::Exclusive, "the GPU is not in its mode: MIG mode is on, but mode `exclusive` needs the whole GPU"),
        ] {
            gpus[0].mode = mode;
            assert_eq!(first(&gpus, &[], offers), no(why));
        }
    }

    #[test]
    fn devices_that_take_no_work_are_reserved_with_a_reason() {
        let mut gpus = host();
        let draining = MpsDaemon { state: MpsState::Draining, ..daemon("MIG-7") };
        let devices = list(&gpus, &[draining], &[]);
        assert_eq!(devices[0].reason.as_deref(), Some("the MPS daemon of the device is draining"));
        assert_eq!((devices[0].usage, devices[1].usage), (DeviceUse::Reserved, DeviceUse::Free));
        gpus[0].cordons.push(gpush_api::Cordon {
            cause: "admin".to_owned(),
            reason: "fan".to_owned(),
            by: Some(Actor { uid: 0, user: None, pid: None }),
            since: jiff::Timestamp::UNIX_EPOCH,
        });
        assert_eq!(uses(&gpus, &[], &[]), [DeviceUse::Reserved; 2]);
        gpus[0].cordons.clear();
        gpus[0].processes_known = false;
        assert_eq!(uses(&gpus, &[], &[]), [DeviceUse::Reserved; 2]);
        gpus[0].processes_known = true;
        gpus[0].mig.as_mut().unwrap().instances[0].compute.clear();
        assert_eq!(uses(&gpus, &[], &[]), [DeviceUse::Reserved, DeviceUse::Free]);
        gpus[0].mode = Mode::NoRule;
        gpus[0].mig.as_mut().unwrap().enabled = false;
        assert!(list(&gpus, &[], &[]).is_empty());
    }
}
