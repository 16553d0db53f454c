//! Derives an observation of each hold of a GPU from a sample.

use gpush_api::{LeaseId, TargetUuid};
use serde::{Deserialize, Serialize};

use super::{
    decide::{MeasuredActivity, Observation, ObservedProcesses, SignalSource},
    power::{BoardActivity, BoardPower, PowerLevels},
};
use crate::{
    input::{Activity, ActivityWindow, GpuProcess, GpuSample, Hold, ProcessOwner, Ratio, Reading, WindowScope},
    share::GPU_UNITS,
};

/// Longest time of the driver's buffer, in ms, from which the utilization of the first sample is a mean.
const UTILIZATION_BUFFER_MS: u64 = 120_000;

/// The processes of a hold in the last sample, for the comparison with the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessTrace {
    /// Hash of the pids and start times.
    fingerprint: u64,
    /// Memory of the processes that certainly belong to the hold, in MiB; `None` if it is not known.
    memory_mib: Option<u64>,
}

/// The past of a hold before the sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HoldPast {
    /// Processes at the sample before; `None` without a recent sample.
    pub(crate) trace: Option<ProcessTrace>,
    /// Time since the lease got the hold, in ms.
    pub(crate) held_ms: u64,
}

/// The activity of a GPU or GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceActivity {
    Active(SignalSource),
    Zero(SignalSource),
    Unsupported,
    Failed,
}

/// The activity of the processes of one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnActivity {
    Active,
    Zero,
    Unsupported,
    Failed,
}

/// A sample together with the leases of the GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signals<'a> {
    sample: &'a GpuSample,
    holds: &'a [(LeaseId, &'a Hold)],
    /// Time since the sample before, in ms; `None` without a recent one.
    since_last_ms: Option<u64>,
}

impl<'a> Signals<'a> {
    pub(crate) fn new(sample: &'a GpuSample, holds: &'a [(LeaseId, &'a Hold)], since_last_ms: Option<u64>) -> Self {
        Self { sample, holds, since_last_ms }
    }

    /// Returns the observation of a hold.
    pub(crate) fn observe(
        &self,
        lease: LeaseId,
        hold: &Hold,
        past: HoldPast,
        mean_mw: Option<u64>,
        levels: &PowerLevels,
    ) -> Observation {
        Observation {
            activity: self.activity(lease, hold, past.held_ms),
            processes: self.observed_processes(lease, hold, past.trace),
            board: match (self.is_any_device_active(), self.work_of_neighbours(hold)) {
                (false, _) => levels.compare(mean_mw, self.sample.power_limit_mw),
                (true, Some(work)) => levels.compare_beside(mean_mw, self.sample.power_limit_mw, work),
                (true, None) => BoardPower::Explained,
            },
            has_neighbours: match &self.sample.processes {
                Reading::Value(all) => all.iter().any(|process| process.owner != ProcessOwner::Lease(lease)),
                Reading::Unsupported | Reading::Failed => true,
            },
        }
    }

    /// Returns the processes that certainly belong to a hold.
    pub(crate) fn own(&self, lease: LeaseId, hold: &'a Hold) -> impl Iterator<Item = &'a GpuProcess> {
        self.on_target(hold).filter(move |process| process.owner == ProcessOwner::Lease(lease))
    }

    /// Returns the memory of the processes of a hold, in MiB; `None` if it is not known, or if a process may belong to the
    /// lease.
    pub(crate) fn memory_mib(&self, lease: LeaseId, hold: &'a Hold) -> Option<u64> {
        if !matches!(self.sample.processes, Reading::Value(_)) || self.has_uncertain_process(lease, hold) {
            return None;
        }
        self.own(lease, hold).map(|process| process.memory_mib.value()).sum()
    }

    /// Returns the known memory of the processes that certainly belong to the lease, in MiB. The lease uses at least this
    /// memory. Returns `None` if the processes are not known.
    pub(crate) fn least_memory_mib(&self, lease: LeaseId, hold: &'a Hold) -> Option<u64> {
        if !matches!(self.sample.processes, Reading::Value(_)) {
            return None;
        }
        Some(self.own(lease, hold).filter_map(|process| process.memory_mib.value()).sum())
    }

    /// Returns the processes of a hold for the comparison with the next sample.
    pub(crate) fn trace(&self, lease: LeaseId, hold: &'a Hold) -> Option<ProcessTrace> {
        if self.sample.processes.is_failed() {
            return None;
        }
        let memory_mib = self.own(lease, hold).map(|process| process.memory_mib.value()).sum();
        Some(ProcessTrace { fingerprint: fingerprint(self.own(lease, hold)), memory_mib })
    }

    /// Returns a hash of the pids and start times of all processes on the GPU; `None` if they are not known.
    pub(crate) fn all_processes(&self) -> Option<u64> {
        match &self.sample.processes {
            Reading::Value(all) => Some(fingerprint(all)),
            Reading::Unsupported | Reading::Failed => None,
        }
    }

    /// Returns the activities of a hold's device; `None` if another lease, another process, or a lease before this one can
    /// have caused them.
    pub(crate) fn own_activity_of_device(&self, lease: LeaseId, hold: &Hold, held_ms: u64) -> Option<Activity> {
        let can_have_worked = |process: &GpuProcess| process.sm != Reading::Value(Ratio::ZERO);
        let is_shared = self.is_held_by_others(lease, hold)
            || self.on_device(hold).any(|process| !may_belong(process, lease) && can_have_worked(process));
        if is_shared || self.is_younger_than_window(hold, held_ms) {
            return None;
        }
        self.window(hold)?.activity.value()
    }

    /// Returns the SM activity of the lease's own processes, on a device that others use too. It is an estimate: the driver
    /// reports the part of the time in which a process worked. `None` if it is not known for one of them.
    pub(crate) fn estimated_activity(&self, lease: LeaseId, hold: &Hold) -> Option<Activity> {
        let is_listed = matches!(self.sample.processes, Reading::Value(_));
        if !is_listed || !self.is_shared(lease, hold) || self.has_uncertain_process(lease, hold) {
            return None;
        }
        let sum: Option<u32> = self.own(lease, hold).map(|process| process.sm.value().map(Ratio::millionths)).sum();
        Some(Activity { sm: sum.map(Ratio::from_millionths), ..Activity::default() })
    }

    /// Returns the activity of the other GPU instances, as a part of the GPU in millionths; `None` without MIG, or if one of
    /// them is not known.
    fn work_of_neighbours(&self, hold: &Hold) -> Option<u32> {
        let own = hold.instance?;
        let is_other = |window: &&ActivityWindow| matches!(window.scope, WindowScope::Instance(id) if id != own);
        let others = self.sample.windows.iter().filter(is_other);
        let work = others.map(|window| {
            let largest = match window.activity {
                Reading::Value(Activity { sm, tensor, dram, graphics: _ }) => {
                    [sm, tensor, dram].into_iter().flatten().max()?
                }
                // A GPU instance without a compute instance does no work.
                Reading::Unsupported => Ratio::ZERO,
                Reading::Failed => return None,
            };
            Some(u64::from(largest.millionths()) * u64::from(window.units) / u64::from(GPU_UNITS))
        });
        let sum: Option<u64> = work.sum();
        sum.map(|sum| u32::try_from(sum).unwrap_or(u32::MAX))
    }

    /// Returns the activity window of a hold's GPU or GPU instance.
    fn window(&self, hold: &Hold) -> Option<&'a ActivityWindow> {
        let scope = hold.instance.map_or(WindowScope::Gpu, WindowScope::Instance);
        self.sample.windows.iter().find(|window| window.scope == scope)
    }

    /// Returns all activity windows.
    pub(crate) fn windows(&self) -> &'a [ActivityWindow] {
        &self.sample.windows
    }

    /// Returns the processes that do not certainly belong to a lease of this GPU.
    pub(crate) fn without_holder(&self) -> impl Iterator<Item = &'a GpuProcess> {
        let all = match &self.sample.processes {
            Reading::Value(all) => all.as_slice(),
            Reading::Unsupported | Reading::Failed => &[],
        };
        let holds = self.holds;
        all.iter().filter(move |process| match &process.owner {
            ProcessOwner::Lease(id) => holds.iter().all(|(lease, _)| lease != id),
            ProcessOwner::Perhaps(_) | ProcessOwner::NoLease => true,
        })
    }

    /// Returns the activity of the board, for learning its levels of power.
    pub(crate) fn board_activity(&self) -> BoardActivity {
        let Reading::Value(processes) = &self.sample.processes else { return BoardActivity::Other };
        if self.is_any_device_active() {
            return BoardActivity::Other;
        }
        let is_zero = |device| matches!(device, DeviceActivity::Zero(_));
        match (processes.is_empty(), self.devices().all(is_zero)) {
            (true, _) => BoardActivity::NoProcess,
            (false, true) => BoardActivity::Zero,
            (false, false) => BoardActivity::Other,
        }
    }

    /// Returns the processes on the GPU or GPU instance of a hold. A process whose GPU instance is not known counts
    /// everywhere.
    fn on_device(&self, hold: &'a Hold) -> impl Iterator<Item = &'a GpuProcess> {
        let all = match &self.sample.processes {
            Reading::Value(all) => all.as_slice(),
            Reading::Unsupported | Reading::Failed => &[],
        };
        all.iter().filter(|process| match (process.instance, hold.instance) {
            (Some(used), Some(held)) => used == held,
            (Some(_) | None, None) | (None, Some(_)) => true,
        })
    }

    /// Returns the processes on the target of a hold. A GPU instance can have several targets: its compute instances. A
    /// process whose compute instance is not known counts for all of them.
    fn on_target(&self, hold: &'a Hold) -> impl Iterator<Item = &'a GpuProcess> {
        let is_on_target = |target: &TargetUuid| hold.instance.is_none() || *target == hold.target;
        self.on_device(hold).filter(move |process| process.target.as_ref().is_none_or(is_on_target))
    }

    fn has_uncertain_process(&self, lease: LeaseId, hold: &Hold) -> bool {
        self.on_target(hold)
            .any(|process| matches!(&process.owner, ProcessOwner::Perhaps(leases) if leases.contains(&lease)))
    }

    fn observed_processes(&self, lease: LeaseId, hold: &Hold, last: Option<ProcessTrace>) -> ObservedProcesses {
        let Some(now) = self.trace(lease, hold).filter(|_| matches!(self.sample.processes, Reading::Value(_))) else {
            return ObservedProcesses::Failed;
        };
        let mut own = self.own(lease, hold).peekable();
        if own.peek().is_none() {
            let is_uncertain = self.has_uncertain_process(lease, hold);
            return if is_uncertain { ObservedProcesses::Uncertain } else { ObservedProcesses::None };
        }
        let is_memory_failed = own.any(|process| process.memory_mib.is_failed());
        let is_memory_changed =
            if is_memory_failed { None } else { Some(last.is_none_or(|last| last.memory_mib != now.memory_mib)) };
        let is_changed = last.is_none_or(|last| last.fingerprint != now.fingerprint);
        ObservedProcesses::Some { is_changed, is_memory_changed }
    }

    fn activity(&self, lease: LeaseId, hold: &Hold, held_ms: u64) -> MeasuredActivity {
        let is_young = self.is_younger_than_window(hold, held_ms);
        let own = self.own_activity(lease, hold);
        let is_shared = self.is_shared(lease, hold);
        let is_estimate = is_shared || !hold.is_exclusive();
        let processes = SignalSource::Processes;
        match (self.device(hold.instance), own) {
            (DeviceActivity::Active(source), _) if !is_shared && !is_young => {
                MeasuredActivity::Active { source, is_estimate: false, is_own: true }
            }
            (_, OwnActivity::Active) => MeasuredActivity::Active { source: processes, is_estimate, is_own: true },
            (DeviceActivity::Failed, _) | (_, OwnActivity::Failed) => MeasuredActivity::Failed,
            (DeviceActivity::Zero(source), OwnActivity::Zero | OwnActivity::Unsupported) => {
                MeasuredActivity::Zero { source, is_estimate: false }
            }
            (DeviceActivity::Active(_) | DeviceActivity::Unsupported, OwnActivity::Zero) => {
                MeasuredActivity::Zero { source: processes, is_estimate }
            }
            (DeviceActivity::Active(_), OwnActivity::Unsupported) if is_young => MeasuredActivity::Unexplained,
            (DeviceActivity::Active(source), OwnActivity::Unsupported) if !self.has_other_process(lease, hold) => {
                MeasuredActivity::Active { source, is_estimate, is_own: false }
            }
            (DeviceActivity::Active(_), OwnActivity::Unsupported) => MeasuredActivity::Ambiguous,
            (DeviceActivity::Unsupported, OwnActivity::Unsupported) => MeasuredActivity::Unsupported,
        }
    }

    /// Returns whether another lease, or a process that does not belong to the lease, can cause activity of the hold's
    /// device.
    fn is_shared(&self, lease: LeaseId, hold: &Hold) -> bool {
        self.is_held_by_others(lease, hold) || self.has_other_process(lease, hold)
    }

    fn is_held_by_others(&self, lease: LeaseId, hold: &Hold) -> bool {
        self.holds.iter().any(|(id, other)| *id != lease && other.instance == hold.instance)
    }

    fn has_other_process(&self, lease: LeaseId, hold: &Hold) -> bool {
        self.on_device(hold).any(|process| !may_belong(process, lease))
    }

    /// Returns whether the lease got the hold after the activity of its device began to be measured. Then a lease before it
    /// can have caused the activity.
    fn is_younger_than_window(&self, hold: &Hold, held_ms: u64) -> bool {
        let window_ms = self.window(hold).map_or(0, |window| window.age_ms);
        let has_utilization = hold.instance.is_none() && self.sample.utilization.value().is_some();
        let utilization_ms = if has_utilization { self.since_last_ms.unwrap_or(UTILIZATION_BUFFER_MS) } else { 0 };
        held_ms < window_ms.max(utilization_ms)
    }

    fn own_activity(&self, lease: LeaseId, hold: &Hold) -> OwnActivity {
        let readings: Vec<Reading<Ratio>> = self.own(lease, hold).map(|process| process.sm).collect();
        let is_active = |sm: &Reading<Ratio>| sm.value().is_some_and(|sm| !sm.is_zero());
        if readings.iter().any(is_active) {
            OwnActivity::Active
        } else if readings.iter().any(Reading::is_failed) {
            OwnActivity::Failed
        } else if readings.is_empty() || readings.contains(&Reading::Unsupported) {
            OwnActivity::Unsupported
        } else {
            OwnActivity::Zero
        }
    }

    fn is_any_device_active(&self) -> bool {
        self.devices().any(|device| matches!(device, DeviceActivity::Active(_)))
            || self.holds.iter().any(|(lease, hold)| self.own_activity(*lease, hold) == OwnActivity::Active)
    }

    /// Returns the activity of each GPU instance that has a window, or of the GPU.
    fn devices(&self) -> impl Iterator<Item = DeviceActivity> {
        let instances = self.sample.windows.iter().filter_map(|window| match window.scope {
            WindowScope::Gpu => None,
            WindowScope::Instance(id) => Some(id),
        });
        let instances: Vec<Option<u32>> = instances.map(Some).collect();
        let devices = if instances.is_empty() { vec![None] } else { instances };
        devices.into_iter().map(|instance| self.device(instance))
    }

    fn device(&self, instance: Option<u32>) -> DeviceActivity {
        let scope = instance.map_or(WindowScope::Gpu, WindowScope::Instance);
        let window = match self.sample.windows.iter().find(|window| window.scope == scope) {
            Some(window) => in_window(window.activity),
            None if self.sample.windows.is_empty() => DeviceActivity::Unsupported,
            // The GPU has GPM, so the window of this device is missing.
            None => DeviceActivity::Failed,
        };
        // The utilization of the GPU says nothing about one of its GPU instances.
        let utilization = match self.sample.utilization {
            Reading::Unsupported => DeviceActivity::Unsupported,
            _ if instance.is_some() => DeviceActivity::Unsupported,
            Reading::Failed => DeviceActivity::Failed,
            Reading::Value(ratio) if ratio.is_zero() => DeviceActivity::Zero(SignalSource::Utilization),
            Reading::Value(_) => DeviceActivity::Active(SignalSource::Utilization),
        };
        match (window, utilization) {
            (active @ DeviceActivity::Active(_), _) | (_, active @ DeviceActivity::Active(_)) => active,
            (DeviceActivity::Failed, _) | (_, DeviceActivity::Failed) => DeviceActivity::Failed,
            (zero @ DeviceActivity::Zero(_), _) | (_, zero @ DeviceActivity::Zero(_)) => zero,
            (DeviceActivity::Unsupported, DeviceActivity::Unsupported) => DeviceActivity::Unsupported,
        }
    }
}

/// Returns whether a process belongs to a lease, or may belong to it.
fn may_belong(process: &GpuProcess, lease: LeaseId) -> bool {
    match &process.owner {
        ProcessOwner::Lease(id) => *id == lease,
        ProcessOwner::Perhaps(leases) => leases.contains(&lease),
        ProcessOwner::NoLease => false,
    }
}

/// Returns a hash of the pids and start times of processes.
fn fingerprint<'a>(processes: impl IntoIterator<Item = &'a GpuProcess>) -> u64 {
    let mut ids: Vec<(u32, u64)> = processes.into_iter().map(|process| (process.pid, process.start)).collect();
    ids.sort_unstable();
    let bytes = ids.iter().flat_map(|(pid, start)| pid.to_le_bytes().into_iter().chain(start.to_le_bytes()));
    bytes.fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME))
}

/// Constants of the hash FNV-1a.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

fn in_window(activity: Reading<Activity>) -> DeviceActivity {
    match activity {
        Reading::Failed => DeviceActivity::Failed,
        Reading::Unsupported => DeviceActivity::Unsupported,
        Reading::Value(Activity { graphics, sm, tensor, dram }) => {
            let wanted = [graphics, sm, dram];
            if wanted.iter().chain([&tensor]).flatten().any(|ratio| !ratio.is_zero()) {
                DeviceActivity::Active(SignalSource::Gpm)
            } else if wanted.contains(&None) {
                DeviceActivity::Failed
            } else {
                DeviceActivity::Zero(SignalSource::Gpm)
            }
        }
    }
}
